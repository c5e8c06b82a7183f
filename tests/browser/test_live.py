"""The live page of the gateway in headless Chromium: a conversation with a real model, streams,
keys, outages, phones and desktops, light and dark, by keyboard.

`make browser` runs them, and leaves screenshots in browser/ for people to look at.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import keys
from jobs.embedded import EmbeddedRedis
from jobs.store.job_state import Status
from tests.browser.chromium import Browser, Page, Scheme, opened
from tests.jobs.gateway.conftest import GatewayProcess, Start
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).parents[2] / "browser"
PHONE, DESKTOP = 360, 1280  # CSS pixels
LIVE = "document.getElementById('state').dataset.state === 'live'"
FOCUS = "document.getElementById('{}').focus()"
LAST = "[...document.querySelectorAll('.turn.assistant .text')].at(-1)?.textContent ?? ''"
IDLE = "document.getElementById('stop').hidden"
FOLLOWED = "document.querySelector('#stream-text > .text')?.textContent ?? ''"
BANNER = "document.getElementById('banners').textContent"
MARKUP = "<img src=x onerror=window.broken=1><script>window.broken=1</script>"
# Elements that reach beyond the page.
WIDE = """[...document.querySelectorAll("body *")].filter(
    one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        && !one.closest("thead")  // on phones it is clipped, for screen readers
).map(one => one.outerHTML.slice(0, 99))"""
# Contrast of the visible texts with the background behind them, those below WCAG's level AA.
PALE = """(() => {
    const linear = one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const light = text => text.match(/[\\d.]+/g).slice(0, 3).map(one => linear(one / 255))
        .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
    const behind = one => {
        for (; one; one = one.parentElement) {
            const found = getComputedStyle(one).backgroundColor;
            if (!found.endsWith(" 0)")) return found;
        }
    };
    const texts = [...document.querySelectorAll("body *")].filter(one => one.checkVisibility()
        && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    return texts.filter(one => {
        const pair = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
        return !one.closest(":disabled") && (pair[0] + 0.05) / (pair[1] + 0.05) < 4.5;
    }).map(one => one.outerHTML.slice(0, 99));
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    SCREENSHOTS.mkdir(exist_ok=True)
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = Page(browser)
    yield page
    page.close()


def show(
    page: Page, gateway: GatewayProcess, width: int = DESKTOP, scheme: Scheme = "light"
) -> None:
    """Open the page, and wait until it has its figures."""
    page.show(f"{gateway.url}/", width, scheme)
    page.wait(LIVE)


def say(page: Page, text: str) -> None:
    """Send a message of the chat by the keyboard."""
    page.value(FOCUS.format("prompt"))
    page.type(text)
    page.press("Enter")


def choose(page: Page, field: str, value: str) -> None:
    """Type into a field, which may be folded."""
    page.value("document.querySelector('.options details').open = true")
    page.value(FOCUS.format(field))
    page.type(value)


def is_own(page: Page, gateway: GatewayProcess) -> bool:
    return all(one.startswith(f"{gateway.url}/") for one in page.requests)


def test_a_conversation_with_a_real_model(page: Page, site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    gateway = start()
    show(page, gateway)
    choose(page, "temperature", "0")
    for question, answer in (("What is 17 + 25?", "42"), ("What is 2 + 3?", "5")):
        say(page, question)
        page.wait(f"{IDLE} && ({LAST}) === '{answer}'")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 2")
    page.screenshot(SCREENSHOTS / "live-conversation.png")
    page.collect()
    assert page.problems == [] and is_own(page, gateway)
    shown = page.value("document.querySelector('#jobs tbody th').textContent")
    request = site.client.job(shown).request
    assert [one.text for one in request.messages] == ["What is 17 + 25?", "42", "What is 2 + 3?"]
    assert request.temperature == 0 and request.model == "demo"


def test_a_running_job_is_followed_token_by_token_by_the_keyboard(
    page: Page, site: Site, start: Start
) -> None:
    site.worker(delay=0.02)
    site.wait_for_workers()
    job = site.submit("hello", words="150", id="mine")
    show(page, start())
    page.wait("document.querySelector('#jobs td.action button')")
    page.value("document.querySelector('#jobs td.action button').focus()")
    page.press("Enter")
    page.wait(f"({FOLLOWED}).length > 20")
    part = page.value(FOLLOWED)
    page.wait("document.getElementById('stream-state').textContent === 'Ended: stop'")
    answer = job.result(timeout=PATIENCE).text
    assert page.value(FOLLOWED) == answer
    assert len(part) < len(answer) and answer.startswith(part)
    assert page.value("document.getElementById('stream-text').hasAttribute('aria-busy')") is False
    page.press("Escape")
    page.wait("document.getElementById('stream').hidden")
    choose(page, "follow-id", "no-such-job")
    page.press("Enter")
    page.wait("document.querySelector('#stream-text .problem')?.textContent.includes('no job')")


def test_escape_stops_the_answer_and_cancels_its_job(page: Page, site: Site, start: Start) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    show(page, start())
    say(page, "say " + "word " * 3000)
    page.wait(f"({LAST}).length > 10")
    page.press("Escape")
    page.wait(IDLE)
    assert page.value("document.querySelector('.turn .meta').textContent") == "Stopped"
    page.wait("document.querySelector('#jobs tbody th')")
    job = site.client.job(page.value("document.querySelector('#jobs tbody th').textContent"))
    wait_until(lambda: job.status() is Status.CANCELLED)


def test_an_error_is_shown_and_the_message_is_kept(page: Page, site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    show(page, start())
    choose(page, "temperature", "-1")
    say(page, "hello")
    page.wait("document.querySelector('.turn .problem')?.textContent.includes('temperature')")
    page.wait(IDLE)
    assert page.value("document.getElementById('prompt').value") == "hello"


def test_text_of_others_is_never_markup(page: Page, site: Site, start: Start) -> None:
    site.worker(delay=0.02)
    site.wait_for_workers()
    site.redis.sadd(keys.OUTBOXES, MARKUP)
    site.redis.xadd(keys.outbox(MARKUP), {"entry": "x"})
    body: Any = {"model": MARKUP, "messages": [{"role": "user", "content": "x"}]}
    site.client.submit(body)
    gateway = start()
    show(page, gateway)
    say(page, f"say {MARKUP}")
    page.wait(f"{IDLE} && ({LAST}).trim() === {json.dumps(MARKUP)}")
    page.wait(f"document.getElementById('runs').innerText.includes({json.dumps(MARKUP)})")
    page.wait(f"document.getElementById('queues').innerText.includes({json.dumps(MARKUP)})")
    assert page.value("document.querySelectorAll('body img, body script').length") == 0
    assert page.value("typeof window.broken") == "undefined"
    page.collect()
    assert page.problems == [] and is_own(page, gateway)


def test_a_page_without_the_key_asks_for_it(
    page: Page, site: Site, start: Start, tmp_path: Path
) -> None:
    site.worker()
    site.wait_for_workers()
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.acme]\nkeys = ["secret"]\n[tenants.other]\nkeys = ["x"]\n')
    site.submit("hidden", id="of-other", tenant="other")
    gateway = start("--api-key-file", str(file))
    page.show(f"{gateway.url}/", DESKTOP, "light")
    page.wait("document.activeElement.id === 'key'")
    assert not page.value("document.getElementById('main').checkVisibility()")
    page.screenshot(SCREENSHOTS / "live-key.png")
    page.type("“secret”")
    page.press("Enter")
    page.wait("document.getElementById('key-problem').textContent.includes('ASCII')")
    page.type("wrong")
    page.press("Enter")
    page.wait("document.getElementById('key-problem').textContent.includes('not one of')")
    page.type("secret")
    page.press("Enter")
    page.wait(LIVE)
    assert page.value("document.getElementById('tenant-name').textContent") == "acme"
    say(page, "say it was mine")
    page.wait(f"{IDLE} && ({LAST}).trim() === 'it was mine'")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 1")
    page.value("document.querySelector('#jobs td.action button').click()")
    page.wait(f"({FOLLOWED}).trim() === 'it was mine'")
    assert "of-other" not in page.value("document.body.innerText")
    page.value("document.getElementById('forget').click()")
    page.wait("document.activeElement?.id === 'key' && !sessionStorage.length")


def test_the_page_says_that_redis_is_away_and_recovers(page: Page, start: Start) -> None:
    with tempfile.TemporaryDirectory(prefix="chatjobs-") as folder:
        server = EmbeddedRedis(Path(folder), append_only=True)
        with server:
            gateway = start(url=server.url)
            show(page, gateway)
        page.wait(f"({BANNER}).startsWith('Redis is away')")
        assert page.value("document.getElementById('main').classList.contains('stale')")
        page.screenshot(SCREENSHOTS / "live-away.png")
        with server:
            page.wait(f"{LIVE} && ({BANNER}) === ''")
            gateway.kill()
            page.wait(f'({BANNER}).startsWith("The gateway can\'t be reached")')
            start("--port", str(gateway.port), url=server.url)
            page.wait(f"{LIVE} && ({BANNER}) === ''")


def test_a_hidden_page_pauses(page: Page, site: Site, start: Start) -> None:
    show(page, start())
    hide = "Object.defineProperty(document, 'hidden', {{get: () => {}, configurable: true}});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    page.value(hide.format("true") + tell)
    page.wait("document.getElementById('state').textContent.startsWith('paused')")
    page.value(hide.format("false") + tell)
    page.wait(LIVE)


def test_a_killed_gateway_loses_no_token_of_the_chat(page: Page, site: Site, start: Start) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    gateway = start()
    show(page, gateway)
    words = " ".join(f"word-{number}" for number in range(120))
    say(page, f"say {words}")
    page.wait(f"({LAST}).length > 50")
    gateway.kill()
    start("--port", str(gateway.port))
    page.wait(IDLE)
    assert page.value(LAST).strip() == words


def test_an_event_source_of_a_browser_goes_on_after_a_killed_gateway(
    page: Page, site: Site, start: Start
) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    gateway = start()
    show(page, gateway)
    job = site.submit("hello", words="120", stream=True)
    page.value(f"""(() => {{
        window.seen = [], window.ended = false, window.opened = 0;
        const source = new EventSource("v1/chat/completions/chatcmpl-{job.id}/stream");
        source.onopen = () => window.opened++;
        source.onmessage = event => {{
            if (event.data === "[DONE]") {{ source.close(); window.ended = true; }}
            else window.seen.push(JSON.parse(event.data).choices[0].delta.content ?? "");
        }};
    }})()""")
    page.wait("window.seen.length > 5")
    gateway.kill()
    start("--port", str(gateway.port))
    page.wait("window.ended")
    assert page.value("window.seen.join('')") == job.result(timeout=PATIENCE).text
    assert page.value("window.opened") == 2


def test_an_event_source_sees_each_event_of_a_response_once(
    page: Page, site: Site, start: Start
) -> None:
    """Its events have names and numbers; the gateway is killed in the middle."""
    site.worker(delay=0.05)
    site.wait_for_workers()
    gateway = start()
    show(page, gateway)
    words = " ".join(f"word-{number}" for number in range(120))
    body = {"model": "fake", "input": f"say {words}", "background": True, "stream": True}
    with gateway.http() as http, http.stream("POST", "/v1/responses", json=body) as reply:
        id = f"resp_{reply.headers['x-request-id']}"
    page.value(f"""(() => {{
        window.numbers = [], window.said = "", window.opened = 0;
        const source = new EventSource("v1/responses/{id}?stream=true");
        const read = event => {{
            const value = JSON.parse(event.data);
            window.numbers.push(value.sequence_number);
            window.said += event.type === "response.output_text.delta" ? value.delta : "";
            if (event.type === "response.completed") {{ source.close(); window.ended = true; }}
        }};
        source.onopen = () => window.opened++;
        for (const name of ["created", "queued", "in_progress", "output_item.added",
            "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done", "completed"]) source.addEventListener(`response.${{name}}`, read);
    }})()""")
    page.wait("window.said.length > 50")
    gateway.kill()
    start("--port", str(gateway.port))
    page.wait("window.ended")
    assert page.value("window.said").strip() == words
    numbers = page.value("window.numbers")
    assert page.value("window.opened") == 2
    assert [at for at, number in enumerate(numbers) if at != number] == []


@pytest.fixture
def busy(site: Site) -> Site:
    """Queues, workers, runs, running and failed jobs."""
    site.worker(delay=0.1)
    site.worker(delay=0.1)
    site.wait_for_workers(2)
    failed = site.submit_many(["fails"] * 3, fail="timeout")
    site.submit_many(
        [f"row {row}" for row in range(40)], run="evaluation-of-a-long-name", words="2"
    )
    wait_until(lambda: all(job.status().over for job in failed))
    site.submit_many(["long"] * 8, words="100000")
    body: Any = {"model": "org/a-model-with-a-long-name-GGUF:Q4_K_M", "messages": []}
    body["messages"] = [{"role": "user", "content": "nobody answers"}]
    site.client.submit(body)
    return site


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, 800, DESKTOP])
def test_the_page_fits_has_contrast_and_no_errors(
    page: Page, busy: Site, start: Start, width: int, scheme: Scheme
) -> None:
    gateway = start()
    show(page, gateway, width, scheme)
    page.wait("document.querySelectorAll('#jobs tbody tr').length > 8")
    say(page, "say a short answer")
    page.wait(f"{IDLE} && ({LAST}).trim() === 'a short answer'")
    page.value("document.querySelector('#jobs td.action button').click()")
    page.wait(f"({FOLLOWED}).length > 100")
    page.screenshot(SCREENSHOTS / f"live-{width}-{scheme}.png")
    page.collect()
    assert page.problems == [] and is_own(page, gateway)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(WIDE) == []
    assert page.value(PALE) == []


def test_everything_is_reached_by_the_keyboard_and_has_a_name(
    page: Page, busy: Site, start: Start
) -> None:
    show(page, start())
    page.wait("document.querySelectorAll('#jobs tbody tr').length > 8")
    wanted = page.value(
        "[...document.querySelectorAll('a, button, input, select, textarea, summary')]"
        ".filter(one => one.checkVisibility() && !one.disabled).length"
    )
    page.value("document.body.focus()")
    outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
    reached = 0
    for _ in range(wanted):
        page.press("Tab")
        assert page.value(outlined), page.value("document.activeElement.outerHTML")
        reached += page.value("document.activeElement !== document.body")
    assert reached == wanted
    nodes = page.accessibility()
    roles = ("button", "textbox", "combobox", "spinbutton", "table", "progressbar", "log")
    unnamed = [
        one["role"]["value"]
        for one in nodes
        if not one["ignored"] and one["role"]["value"] in roles and not one["name"]["value"]
    ]
    assert set(unnamed) <= {"table"}
