// The live page. Text from jobs, models and workers is only ever set as text, never as markup.

const POLL_MILLISECONDS = 2000;
const PATIENCE_MILLISECONDS = 60000; // for one reply to a poll
const TRIES = 40; // of a stream that was cut off, until it is given up
const SAMPLES = 90; // of the small chart
const KEY = "chatjobs-key"; // in the storage of this tab

const $ = id => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

// ---- the API ----

class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `the gateway has replied with ${status}`);
    this.status = status;
    this.code = error.code;
  }
}

const stored = () => sessionStorage.getItem(KEY);

async function call(path, options = {}) {
  const key = stored();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const content = await response.json().catch(() => ({}));
  throw new ApiError(response.status, content.error || {});
}

// The events of a reply, each with its id and its data.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { id: null, data: [] };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data.length) yield { id: event.id, data: event.data.join("\n") };
        event = { id: null, data: [] };
      } else if (line.startsWith("id: ")) event.id = line.slice(4);
      else if (line.startsWith("data: ")) event.data.push(line.slice(6));
    }
  }
}

const pause = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    const left = () => reject(signal.reason);
    signal.addEventListener("abort", left, { once: true });
    setTimeout(() => {
      signal.removeEventListener("abort", left);
      resolve();
    }, milliseconds);
  });

// Follow one stream to its end. A connection that breaks is made again behind the last event, at
// this gateway or at one that has taken its place: no token is lost or repeated.
async function readStream(open, job, { signal, chunk, note }) {
  let last = null;
  let tries = 0;
  for (;;) {
    try {
      const response = await open(last);
      job = job || response.headers.get("x-request-id");
      for await (const event of eventsOf(response)) {
        if (event.data === "[DONE]") return;
        const content = JSON.parse(event.data);
        if (content.error) throw new ApiError(200, content.error);
        if (tries) note("");
        tries = 0;
        last = event.id || last;
        chunk(content);
      }
      throw new Error("the stream has ended too early");
    } catch (error) {
      const lasting = error instanceof ApiError && error.code !== "unavailable";
      if (signal.aborted || lasting || !job || ++tries > TRIES) throw error;
      note("The connection is lost: trying again");
      await pause(Math.min(250 * tries, 2000), signal);
      open = after => followed(job, signal, after);
    }
  }
}

function followed(job, signal, after) {
  const headers = after ? { "last-event-id": after } : {};
  return call(`v1/chat/completions/${encodeURIComponent(job)}/stream`, { headers, signal });
}

// ---- text and tables ----

function set(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

function make(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function duration(seconds) {
  if (seconds === null) return "–";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.round(seconds)} s`;
}

const count = value => (value ? number.format(value) : "0");
const size = bytes => (bytes ? `${number.format(Math.round(bytes / 2 ** 20))} MiB` : "–");

function chip(cell, text, kind = "") {
  const element = cell.firstElementChild || make(cell, "span");
  set(element, text);
  element.className = `chip ${kind}`;
}

// A table whose rows stay while they are updated, so that the focus does.
class Table {
  constructor(id, columns, key) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = $(id).tBodies[0];
    this.table = $(id);
    this.empty = $(`${id}-empty`);
    const head = make($(id).tHead, "tr");
    for (const { label, className = "" } of columns) {
      const cell = make(head, "th", className, label);
      cell.scope = "col";
      if (!label) make(cell, "span", "hidden", "Actions");
    }
  }

  show(items) {
    const left = new Map(this.rows);
    items.forEach((item, place) => {
      const key = this.key(item);
      let row = this.rows.get(key);
      if (!row) {
        row = this.add();
        this.rows.set(key, row);
      }
      left.delete(key);
      row.item = item;
      this.columns.forEach((column, index) => column.set(row.cells[index], item, row));
      if (this.body.children[place] !== row.element)
        this.body.insertBefore(row.element, this.body.children[place] || null);
    });
    for (const [key, row] of left) {
      row.element.remove();
      this.rows.delete(key);
    }
    this.table.hidden = !items.length;
    this.empty.hidden = Boolean(items.length);
  }

  // The roles are those of a table: on phones the rows are laid out as cards.
  add() {
    const element = make(this.body, "tr");
    element.setAttribute("role", "row");
    const cells = this.columns.map(({ label, className = "" }, index) => {
      const cell = make(element, index ? "td" : "th", className);
      cell.setAttribute("role", index ? "cell" : "rowheader");
      if (!index) cell.scope = "row";
      cell.dataset.label = label;
      return cell;
    });
    return { element, cells };
  }
}

const column = (label, value, className = "") => ({
  label,
  className,
  set: (cell, item) => set(cell, value(item)),
});
const numbers = (label, value) => column(label, value, "number");

function named(label, value, detail) {
  return {
    label,
    set(cell, item) {
      if (!cell.firstChild) {
        make(cell, "span");
        make(cell, "small");
      }
      set(cell.firstChild, value(item));
      set(cell.lastChild, detail(item) || "");
      cell.lastChild.hidden = !detail(item);
    },
  };
}

function action(label, text, run, shown = () => true) {
  return {
    label,
    className: "action",
    set(cell, item, row) {
      if (!cell.firstChild) {
        const button = make(cell, "button", "", text);
        button.type = "button";
        button.addEventListener("click", () => run(row.item));
      }
      cell.firstChild.hidden = !shown(item);
      cell.firstChild.setAttribute("aria-label", `${text} ${item.id}`);
    },
  };
}

const STATES = {
  started: ["running", "good"], finished: ["done", ""], failed: ["failed", "bad"],
  cancelled: ["cancelled", "note"], running: ["running", "good"], paused: ["paused", "bad"],
  loading: ["loading", "note"], interrupted: ["interrupted", "note"], done: ["done", ""],
};

function state(value, reason = () => "") {
  return {
    label: "State",
    set(cell, item) {
      const [text, kind] = STATES[value(item)] || [value(item), ""];
      chip(cell, reason(item) || text, kind);
      cell.firstElementChild.hidden = !cell.firstElementChild.textContent;
    },
  };
}

const modelText = one => (one.state === "ready" ? one.name : `${one.name} (${one.state})`);
const waits = queue => queue.queued + queue.scheduled + queue.deferred;

const tables = {
  jobs: new Table("jobs", [
    column("Job", job => job.id, "id"),
    column("Model", job => job.model),
    column("Run", job => job.run || "–", "quiet"),
    state(job => job.state, job => job.code),
    numbers("Age", job => duration(job.age_s)),
    action("", "Follow", job => follow(job.id), job => job.chat),
  ], job => job.id),
  queues: new Table("queues", [
    column("Queue", queue => queue.name),
    numbers("Waiting", queue => count(queue.queued)),
    numbers("Later", queue => count(queue.scheduled + queue.deferred)),
    numbers("Running", queue => count(queue.running)),
    numbers("Failed", queue => count(queue.failed)),
    numbers("Oldest", queue => (queue.queued ? duration(queue.oldest_s) : "–")),
    {
      label: "Workers",
      className: "number",
      set(cell, queue) {
        const nobody = waits(queue) && !queue.workers;
        set(cell, nobody ? "nobody" : queue.workers);
        cell.className = nobody ? "number bad" : "number";
      },
    },
  ], queue => queue.name),
  workers: new Table("workers", [
    named("Worker", worker => worker.name, worker => worker.host),
    column("Models", worker => worker.models.map(modelText).join(", ")),
    column("Device", worker => worker.device),
    state(worker => worker.state, worker => worker.reason),
    numbers("Running", worker => count(worker.running)),
    numbers("Tokens/s", worker => number.format(Math.round(worker.tokens_per_second))),
    numbers("Memory", worker => size(worker.memory)),
    numbers("Heartbeat", worker => duration(worker.heartbeat_s)),
  ], worker => worker.name),
  runs: new Table("runs", [
    column("Run", run => run.run),
    state(run => run.state),
    {
      label: "Rows",
      className: "whole",
      set(cell, run) {
        if (!cell.firstChild) {
          make(cell, "span");
          make(cell, "progress");
        }
        const [text, bar] = cell.children;
        const rows = run.rows === null ? "counting" : count(run.rows);
        set(text, run.expected ? `${rows} of ${count(run.expected)}` : rows);
        bar.hidden = !run.expected;
        bar.max = run.expected || 1;
        bar.value = run.rows || 0;
        bar.setAttribute("aria-label", `Progress of ${run.run}`);
      },
    },
    numbers("Failed", run => count(run.failed)),
    numbers("Not in Parquet", run => count(run.unwritten)),
  ], run => run.run),
  models: new Table("models", [
    named("Model", model => model.id, model => (model.root === model.id ? "" : model.root)),
    numbers("Context", model => (model.max_model_len ? count(model.max_model_len) : "–")),
    numbers("Workers", model => count(model.workers)),
    action("", "Chat", chatWith),
  ], model => model.id),
};

// ---- what runs ----

const speeds = []; // tokens per second, the newest last

function showStatus(found) {
  const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
  const running = sum(found.queues, queue => queue.running);
  const failed = sum(found.queues, queue => queue.failed);
  const speed = sum(found.workers, worker => worker.tokens_per_second);
  set($("tile-running"), count(running));
  set($("tile-waiting"), count(sum(found.queues, waits)));
  set($("tile-tokens"), number.format(Math.round(speed)));
  set($("tile-workers"), count(found.workers.filter(one => one.state !== "loading").length));
  set($("tile-failed"), count(failed));
  $("tile-failed").className = failed ? "bad" : "";
  speeds.push(speed);
  if (speeds.length > SAMPLES) speeds.shift();
  drawSpeeds();
  tables.jobs.show([...found.jobs.running, ...found.jobs.ended]);
  tables.queues.show(found.queues);
  tables.workers.show(found.workers);
  tables.runs.show(found.runs);
  tables.models.show(found.models);
  showModels(found.models);
  showBanners(found.notices.map(text => ({ text })));
  $("tenant").hidden = found.tenant === null;
  set($("tenant-name"), found.tenant || "");
  document.title = running ? `${count(running)} running · chatjobs` : "chatjobs";
}

function drawSpeeds() {
  const most = Math.max(1, ...speeds);
  const step = 120 / (SAMPLES - 1);
  const start = 120 - step * (speeds.length - 1);
  const points = speeds.map((value, place) => {
    const height = 31 - 29 * (value / most);
    return `${(start + step * place).toFixed(1)},${height.toFixed(1)}`;
  });
  $("spark-line").setAttribute("points", points.join(" "));
  $("spark-area").setAttribute("points", `${start},32 ${points.join(" ")} 120,32`);
}

function showBanners(banners) {
  const place = $("banners");
  const wanted = JSON.stringify(banners);
  if (place.dataset.shown === wanted) return; // a screen reader says a change only
  place.dataset.shown = wanted;
  place.replaceChildren();
  for (const { text, away } of banners) make(place, "p", away ? "banner away" : "banner", text);
}

function setState(kind, text) {
  $("state").dataset.state = kind;
  set($("state"), text);
  $("main").classList.toggle("stale", kind === "away");
}

let polling = null; // what ends the poll that runs, or the pause before the next one
let seen = null; // when the figures were read

async function poll() {
  const signal = (polling = new AbortController()).signal;
  while (!signal.aborted) {
    try {
      const wait = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MILLISECONDS)]);
      const found = await (await call("status", { signal: wait })).json();
      seen = found.at * 1000;
      showStatus(found);
      setState("live", `live, ${clock.format(seen)}`);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        askKey(stored() ? error.message : "");
        return;
      }
      showFault(error);
    }
    await pause(POLL_MILLISECONDS, signal).catch(() => {});
  }
}

function showFault(error) {
  const since = seen ? ` The figures are those of ${clock.format(seen)}.` : "";
  if (error.code === "unavailable")
    showBanners([{ text: `Redis is away: the gateway tries again.${since}`, away: true }]);
  else if (error instanceof ApiError)
    showBanners([{ text: `${error.message}.${since}`, away: true }]);
  else
    showBanners([{ text: `The gateway can't be reached: trying again.${since}`, away: true }]);
  setState("away", error.code === "unavailable" ? "Redis is away" : "not connected");
}

function resume() {
  if (polling) polling.abort();
  if (!$("key-form").hidden) return;
  if (document.hidden) setState("waiting", "paused while the page is hidden");
  else poll();
}

// ---- the key ----

function askKey(problem) {
  $("main").hidden = true;
  $("key-form").hidden = false;
  set($("key-problem"), problem);
  showBanners([]);
  setState("waiting", "a key is needed");
  $("key").focus();
}

$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[ -~]*$/.test(key)) { // no header carries it
    set($("key-problem"), "A key has printable ASCII characters only");
    return;
  }
  sessionStorage.setItem(KEY, key);
  $("key-form").hidden = true;
  $("main").hidden = false;
  setState("waiting", "connecting");
  resume();
});

$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload(); // nothing that the key has shown stays
});

// ---- answers ----

// The text of an answer as it comes, by choice, with the reasoning folded.
class Answer {
  constructor(place) {
    this.place = place;
    this.choices = new Map();
    this.place.setAttribute("aria-busy", "true"); // a screen reader reads it when it is whole
    this.place.classList.add("busy");
  }

  add(chunk) {
    for (const { index, delta } of chunk.choices) {
      if (delta.reasoning_content) this.part(index, "reasoning").append(delta.reasoning_content);
      if (delta.content) this.part(index, "text").append(delta.content);
      for (const { function: called } of delta.tool_calls || [])
        this.part(index, "text").append(called.name ? `\n${called.name} ` : "", called.arguments || "");
    }
  }

  part(index, name) {
    if (!this.choices.has(index)) {
      if (index) make(this.place, "p", "meta", `Choice ${index + 1}`);
      const details = make(this.place, "details", "reasoning");
      details.hidden = true;
      make(details, "summary", "", "Reasoning");
      this.choices.set(index, {
        details,
        reasoning: make(details, "div", "text"),
        text: make(this.place, "div", "text"),
      });
    }
    const choice = this.choices.get(index);
    if (name === "reasoning") choice.details.hidden = false;
    return choice[name];
  }

  get text() {
    return this.choices.has(0) ? this.choices.get(0).text.textContent : "";
  }

  end() {
    this.place.removeAttribute("aria-busy");
    this.place.classList.remove("busy");
  }
}

// Keep the end of a text in view, unless its reader has scrolled away from it.
function keepEnd(place, change) {
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  change();
  if (atEnd) place.scrollTop = place.scrollHeight;
}

// ---- the stream of a job ----

let following = null;

async function follow(job) {
  if (following) following.abort();
  const stop = (following = new AbortController());
  const place = $("stream-text");
  const say = text => set($("stream-state"), text);
  place.replaceChildren();
  $("stream").hidden = false;
  set($("stream-id"), job);
  say("Waiting for its first token");
  $("stream").scrollIntoView({ block: "nearest" });
  $("stream-close").focus();
  const answer = new Answer(place);
  let reason = "";
  try {
    await readStream(after => followed(job, stop.signal, after), job, {
      signal: stop.signal,
      note: say,
      chunk(content) {
        say("Running");
        keepEnd(place, () => answer.add(content));
        for (const choice of content.choices) reason = choice.finish_reason || reason;
      },
    });
    say(`Ended: ${reason || "done"}`);
  } catch (error) {
    if (stop.signal.aborted) return;
    say("");
    make(place, "p", "problem", error.message);
  } finally {
    if (following === stop) answer.end();
  }
}

function closeStream() {
  if (following) following.abort();
  following = null;
  $("stream").hidden = true;
  $("stream-text").replaceChildren();
}

$("stream-close").addEventListener("click", closeStream);
$("follow-form").addEventListener("submit", event => {
  event.preventDefault();
  const id = $("follow-id").value.trim();
  $("follow-id").value = "";
  if (id) follow(id);
});

// ---- the chat ----

let messages = []; // of the conversation, without the system prompt
let answering = null;

function showModels(models) {
  const choice = $("model");
  const names = models.map(model => model.id);
  const shown = [...choice.options].map(option => option.value);
  if (names.length && JSON.stringify(names) !== JSON.stringify(shown)) {
    const chosen = choice.value;
    choice.replaceChildren();
    for (const name of names) make(choice, "option", "", name).value = name;
    if (names.includes(chosen)) choice.value = chosen;
  }
  $("send").disabled = !choice.value;
}

function chatWith(model) {
  $("model").value = model.id;
  $("prompt").focus();
}

function addTurn(role) {
  $("conversation-empty").hidden = true;
  return make($("conversation"), "div", `turn ${role}`);
}

async function send() {
  const prompt = $("prompt").value;
  if (answering || !prompt.trim() || !$("model").value) return;
  const stop = (answering = new AbortController());
  const asked = { role: "user", content: prompt };
  const conversation = $("conversation");
  const turns = messages; // a new conversation has a list of its own
  const question = addTurn("user");
  make(question, "div", "text", prompt);
  const turn = addTurn("assistant");
  const answer = new Answer(make(turn, "div"));
  const meta = make(turn, "p", "meta", "Waiting for a worker");
  conversation.scrollTop = conversation.scrollHeight;
  $("prompt").value = "";
  $("stop").hidden = false;
  $("send").disabled = true;

  const started = performance.now();
  let first = null;
  let usage = null;
  let reason = "";
  try {
    await readStream(() => call("v1/chat/completions", {
      method: "POST",
      signal: stop.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify(requestOf(asked)),
    }), null, {
      signal: stop.signal,
      note: text => set(meta, text),
      chunk(content) {
        first = first || performance.now();
        usage = content.usage || usage;
        for (const choice of content.choices) reason = choice.finish_reason || reason;
        keepEnd(conversation, () => answer.add(content));
        set(meta, "");
      },
    });
    turns.push(asked, { role: "assistant", content: answer.text });
    set(meta, figures(usage, started, first, reason));
  } catch (error) {
    if (answer.text) turns.push(asked, { role: "assistant", content: answer.text });
    if (stop.signal.aborted) set(meta, "Stopped");
    else {
      set(meta, "");
      make(turn, "p", "problem", error.message).setAttribute("role", "alert");
      if (!answer.text && !$("prompt").value) $("prompt").value = prompt; // to be sent again
    }
  } finally {
    answer.end();
    if (answering === stop) {
      answering = null;
      $("stop").hidden = true;
      $("send").disabled = !$("model").value;
    }
  }
}

function requestOf(asked) {
  const system = $("system").value.trim();
  const temperature = $("temperature").value;
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, asked],
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function figures(usage, started, first, reason) {
  const parts = [];
  if (usage) parts.push(`${count(usage.completion_tokens)} tokens`);
  if (first) parts.push(`first after ${((first - started) / 1000).toFixed(2)} s`);
  if (reason && reason !== "stop") parts.push(`ended by ${reason}`);
  return parts.join(" · ");
}

$("chat-form").addEventListener("submit", event => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  answering.abort();
  $("prompt").focus();
});
$("new").addEventListener("click", () => {
  if (answering) answering.abort();
  messages = [];
  $("conversation").replaceChildren($("conversation-empty"));
  $("conversation-empty").hidden = false;
  $("prompt").focus();
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (answering) answering.abort();
  else if (following) closeStream();
});
document.addEventListener("visibilitychange", resume);
resume();
