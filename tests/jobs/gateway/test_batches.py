"""/v1/batches with the openai package, against gateways and workers as processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from jobs import Client, Results
from jobs.errors import JobError
from jobs.gateway.batches import running, watch
from jobs.gateway.batches.forms import ENDPOINTS, response_of
from jobs.gateway.batches.lines import MAX_ERRORS, BatchRows, check_lines
from jobs.gateway.batches.output import write_files
from jobs.gateway.batches.running import BatchRun
from jobs.gateway.batches.stored import (
    AREA,
    ASKED,
    ENDED,
    FINALIZING,
    IN_PROGRESS,
    PROGRESS,
    BatchStore,
    StoredBatch,
)
from jobs.gateway.files.stored import FileStore
from jobs.gateway.paging import Page
from jobs.gateway.routes.batches import read_asked
from jobs.gateway.settings import Settings
from jobs.results.run_json import RunJson
from tests.jobs.conftest import publish_worker
from tests.jobs.gateway.conftest import Start, chat
from tests.jobs.gateway.test_files import raw
from tests.jobs.gateway.test_http_page import section
from tests.jobs.gateway.test_main_path import client_of
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

CHAT: Any = "/v1/chat/completions"
COMPLETIONS: Any = "/v1/completions"
RESPONSES: Any = "/v1/responses"
WINDOW: Any = "24h"
BODY = {"input_file_id": "f", "endpoint": CHAT, "completion_window": "2d"}
KEYS = '[tenants.a]\nkeys = ["ka"]\nbatches = 1\n[tenants.b]\nkeys = ["kb"]\n'


def line(custom_id: Any, **fields: Any) -> dict[str, Any]:
    """A line of an input; `fields` are of its body."""
    return line_for(CHAT, custom_id, chat(**fields))


def line_for(endpoint: str, custom_id: Any, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def body_for(endpoint: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """The body of a request to an endpoint."""
    if endpoint == CHAT:
        return chat(prompt, **fields)
    name = "prompt" if endpoint == COMPLETIONS else "input"
    return {"model": "fake", name: prompt, **fields}


def text_of(endpoint: str, body: Any) -> str:
    """The text of an answer."""
    if endpoint == RESPONSES:
        return str(body["output"][0]["content"][0]["text"])
    (choice,) = body["choices"]
    return str(choice["message"]["content"] if endpoint == CHAT else choice["text"])


def jsonl(*lines: Any) -> bytes:
    """Lines as an input; a text stays as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    return "".join(f"{text}\n" for text in texts).encode()


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def make(
    client: openai.OpenAI, content: bytes, window: Any = WINDOW, endpoint: Any = CHAT
) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, content), endpoint=endpoint, completion_window=window
    )


def end_of(client: openai.OpenAI, batch: Batch) -> Batch:
    """The batch when it has ended, strictly as the package describes it."""

    def ended() -> bool:
        found = client.batches.retrieve(batch.id).status
        return found in ("completed", "failed", "expired", "cancelled")

    wait_until(ended)
    reply = client.batches.with_raw_response.retrieve(batch.id)
    return Batch.model_validate(raw(reply), strict=True)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def check(client: openai.OpenAI, batch: Batch, ids: list[str]) -> tuple[list[Any], list[Any]]:
    """The lines of both files. Asserts that each line of the input is in one of them, once."""
    output = lines_of(client, batch.output_file_id)
    errors = lines_of(client, batch.error_file_id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(ids), len(output), len(errors))
    assert Counter(one["custom_id"] for one in output + errors) == Counter(ids)
    assert len({one["id"] for one in output + errors}) == len(ids)
    assert {tuple(one) for one in output + errors} == {("id", "custom_id", "response", "error")}
    return output, errors


def test_batches_are_those_of_openais_client(site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    client, other = (client_of(start().url) for _ in range(2))
    ids = [f"q{number}" for number in range(20)]
    content = jsonl(
        *(line(id, prompt=f"say {id}") for id in ids),
        "",
        line("wrong", top_p=2),
        line("streamed", stream=True),
        line("fails", metadata={"fail": "internal"}),
    )
    made = client.batches.with_raw_response.create(
        input_file_id=upload(client, content),
        endpoint=CHAT,
        completion_window=WINDOW,
        metadata={"name": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    Batch.model_validate(raw(made), strict=True)
    batch = made.parse()
    assert batch.status == "validating" and batch.metadata == {"name": "nightly"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    client.files.delete(batch.input_file_id)  # the batch has its content

    ended = end_of(other, batch)
    assert (ended.status, ended.model, ended.errors) == ("completed", "fake", None)
    assert ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
    output, errors = check(other, ended, [*ids, "wrong", "streamed", "fails"])
    assert [one["custom_id"] for one in output] == ids  # in the order of the input
    for one in output:
        response = one["response"]
        assert response["status_code"] == 200 and one["error"] is None
        assert response["body"]["choices"][0]["message"]["content"].strip() == one["custom_id"]
        openai.types.chat.ChatCompletion.model_validate(response["body"], strict=True)
    used = [one["response"]["body"]["usage"] for one in output]
    assert ended.usage.total_tokens == sum(one["total_tokens"] for one in used) > 0
    wrong, streamed, fails = errors
    assert wrong["response"]["status_code"] == streamed["response"]["status_code"] == 400
    assert "top_p" in wrong["response"]["body"]["error"]["message"]
    assert "stream" in streamed["response"]["body"]["error"]["message"]
    assert fails["response"]["status_code"] == 500

    for kind in (ended.output_file_id, ended.error_file_id):
        reply = client.files.with_raw_response.retrieve(kind)
        file = FileObject.model_validate(raw(reply), strict=True)
        assert file.purpose == "batch_output" and file.expires_at == file.created_at + 3600
    assert {one.id for one in client.files.list(purpose="batch_output")} == {
        ended.output_file_id,
        ended.error_file_id,
    }
    assert len(site.rows(batch.id)) == len(ids) + 3  # the run of the batch
    assert RunJson.read(site.folder / batch.id).expected == len(ids) + 3

    later = [make(client, jsonl(line("x"))) for _ in range(2)]
    newest = [later[1].id, later[0].id, batch.id]
    listed = other.batches.with_raw_response.list(limit=2)
    assert [one.id for one in listed.parse().data] == newest[:2] and raw(listed)["has_more"]
    assert [one.id for one in other.batches.list(limit=1)] == newest
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)

    store = BatchStore(site.folder, None).get(batch.id)
    again = FileStore(site.folder, "again")
    write_files(store, site.results, again, store.fact(FINALIZING) or {})
    for id in (ended.output_file_id, ended.error_file_id):
        assert again.content(id).read_bytes() == client.files.content(id).read()


def bodies_for(endpoint: str) -> dict[str, dict[str, Any]]:
    """Requests for the demo model that use what the endpoint has, by their custom_ids."""
    asks: dict[str, dict[str, Any]] = {"plain": {}, "tagged": {"metadata": {"a": "b"}}}
    if endpoint == RESPONSES:
        asks |= {
            "instructed": {"instructions": "Add.", "max_output_tokens": 2, "background": True},
            "scored": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        }
    elif endpoint == COMPLETIONS:
        asks |= {
            "echoed": {"echo": True, "max_tokens": 3},
            "several": {"n": 2, "max_tokens": 2, "logprobs": 2},
            "ids": {"prompt": [5, 6, 7], "stop": ["7"], "return_token_ids": True},
        }
    else:
        asks |= {
            "several": {"n": 2, "logprobs": True, "top_logprobs": 2},
            "ids": {"return_token_ids": True, "max_tokens": 2},
        }
    return {
        id: body_for(endpoint, f"What is 1{n} + 25?", model="demo", temperature=0) | fields
        for n, (id, fields) in enumerate(asks.items())
    }


TYPES: dict[str, Any] = {
    CHAT: openai.types.chat.ChatCompletion,
    COMPLETIONS: openai.types.Completion,
    RESPONSES: openai.types.responses.Response,
}
# What differs between two answers to one request, or is not in the rows.
OF_ONE_ANSWER = {
    *("id", "created", "created_at", "system_fingerprint", "store", "background", "bytes"),
    *("cached_tokens", "peak_memory_mb", "prediction_steps", "refusal"),
}


def common(body: Any) -> Any:
    """What two answers to one request have in common; numbers as far as rows hold them."""
    if isinstance(body, dict):
        return {name: common(one) for name, one in body.items() if name not in OF_ONE_ANSWER}
    if isinstance(body, list):
        return [common(one) for one in body]
    return round(body, 3) if isinstance(body, float) else body


def test_each_endpoint_answers_the_lines_of_a_batch_as_requests(site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"], lease_seconds=600.0)
    site.wait_for_workers()
    gateway = start()
    client = client_of(gateway.url)
    made = {}
    for endpoint in ENDPOINTS:
        lines = [line_for(endpoint, id, body) for id, body in bodies_for(endpoint).items()]
        wrong = line_for(endpoint, "wrong", body_for(endpoint, "x", model="demo", top_p=2))
        made[endpoint] = make(client, jsonl(*lines, wrong), endpoint=endpoint)
    for endpoint, batch in made.items():
        bodies = bodies_for(endpoint)
        ended = end_of(client, batch)
        assert (ended.status, ended.endpoint, ended.errors) == ("completed", endpoint, None)
        output, (wrong,) = check(client, ended, [*bodies, "wrong"])
        assert [one["custom_id"] for one in output] == [*bodies]
        assert (wrong["response"]["status_code"], wrong["error"]) == (400, None)
        assert wrong["response"]["body"]["error"]["param"] in ("top_p", None)
        assert "top_p" in wrong["response"]["body"]["error"]["message"]
        with gateway.http() as http:
            for one in output:
                body = one["response"]["body"]
                TYPES[endpoint].model_validate(body, strict=True)
                asked = {**bodies[one["custom_id"]], "background": False}
                reply = http.post(endpoint, json=asked).json()
                assert common(body) == common(reply), one["custom_id"]
        if endpoint == RESPONSES:
            with pytest.raises(openai.NotFoundError):  # it is in the file alone
                client.responses.retrieve(output[0]["response"]["body"]["id"])


def test_a_response_of_a_batch_is_made_again_with_the_same_bytes() -> None:
    """Its time is that of the row, not that of the file."""
    message = {"role": "assistant", "content": "x"}
    answer = {
        "id": "chatcmpl-j",
        "created": 5,
        "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    body = response_of(RESPONSES, body_for(RESPONSES, "hi"), answer, [{"job_id": "j"}])
    assert (body["id"], body["created_at"]) == ("resp_j", 5)


REFUSED = [
    (CHAT, "stream", {"stream": True}),
    (CHAT, "store", {"store": False}),
    (CHAT, "job.run", {"job": {"run": "r"}}),
    (CHAT, "prompt_logprobs", {"prompt_logprobs": 1}),
    (CHAT, "messages", {"messages": []}),
    (COMPLETIONS, "stream", {"stream": True}),
    (COMPLETIONS, "job.custom_id", {"job": {"custom_id": "c"}}),
    (COMPLETIONS, "prompt", {"prompt": ["a", "b"]}),
    (COMPLETIONS, "prompt", {"prompt": None}),
    (COMPLETIONS, "prompt", {"prompt": [0.5]}),
    (COMPLETIONS, "logprobs", {"echo": True, "logprobs": 1}),
    (COMPLETIONS, "echo", {"echo": True, "prompt": [1]}),
    (COMPLETIONS, "suffix", {"suffix": "x"}),
    (RESPONSES, "stream", {"stream": True}),
    (RESPONSES, "store", {"store": False}),
    (RESPONSES, "job.id", {"job": {"id": "j"}}),
    (RESPONSES, "job.session", {"job": {"session": "s"}}),
    (RESPONSES, "previous_response_id", {"previous_response_id": "resp_x"}),
    (RESPONSES, "max_output_tokens", {"max_output_tokens": 0}),
    (RESPONSES, "input", {"input": None}),
    (RESPONSES, "messages", {"messages": []}),
]


@pytest.mark.parametrize(("endpoint", "param", "fields"), REFUSED)
def test_a_wrong_body_is_an_error_of_its_line(
    tmp_path: Path, endpoint: str, param: str, fields: dict[str, Any]
) -> None:
    file = tmp_path / "input"
    bodies = body_for(endpoint, "good"), body_for(endpoint, "wrong") | fields
    file.write_bytes(jsonl(*(line_for(endpoint, str(n), one) for n, one in enumerate(bodies))))
    assert check_lines(file, endpoint).faults == []
    good, wrong = list[Any](BatchRows(file, endpoint, None, "r").read(lambda _: True))
    assert good.request.job.run == "r" and good.request.job.id is None
    assert (wrong.row, wrong.error.param, wrong.fields["job"]) == (1, param, {"custom_id": "1"})
    assert param in wrong.error.message


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_killed_gateway_loses_no_line_of_a_batch(site: Site, start: Start, endpoint: str) -> None:
    site.worker()
    site.wait_for_workers()
    first = start()
    client = client_of(first.url)
    ids = [f"q{number}" for number in range(300)]
    lines = (line_for(endpoint, id, body_for(endpoint, f"say {id}")) for id in ids)
    batch = make(client, jsonl(*lines), endpoint=endpoint)
    wait_until(lambda: site.rows(batch.id))  # some are in Parquet
    first.kill()
    assert not BatchStore(site.folder, None).get(batch.id).has(ENDED)
    second = client_of(start().url)
    ended = end_of(second, batch)
    assert ended.status == "completed"
    output, errors = check(second, ended, ids)
    assert errors == []
    texts = [text_of(endpoint, one["response"]["body"]).strip() for one in output]
    assert texts == [one["custom_id"] for one in output] == ids
    assert set(Counter(site.written(batch.id)).values()) == {1}
    assert len(site.written(batch.id)) == len(ids)


def test_a_batch_that_is_cancelled_has_each_line_in_one_file(site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    client = client_of(start().url)
    quick = [f"q{number}" for number in range(40)]
    endless = [f"e{number}" for number in range(40)]
    content = jsonl(
        *(line(id) for id in quick),
        *(line(id, metadata={"words": "10000000"}) for id in endless),
    )
    batch = make(client, content)
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == len(quick))
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = end_of(client, batch)
    assert ended.status == "cancelled" and ended.cancelling_at <= ended.cancelled_at
    assert client.batches.cancel(batch.id).status == "cancelled"
    output, errors = check(client, ended, quick + endless)
    assert {one["custom_id"] for one in output} == {*quick}
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert all(one["response"] is None for one in errors)
    assert not list(site.redis.scan_iter("rq:queue:*"))


def test_without_a_worker_batches_wait_expire_and_are_cancelled(site: Site, start: Start) -> None:
    client = client_of(start().url)
    ids = ["a", "b", "c"]
    waits = make(client, jsonl(*map(line, ids)))
    short: Any = "1s"
    expired = end_of(client, make(client, jsonl(*map(line, ids)), short))
    assert expired.status == "expired" and expired.output_file_id is None
    _, errors = check(client, expired, ids)
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    wait_until(lambda: client.batches.retrieve(waits.id).status == "in_progress")
    client.batches.cancel(waits.id)
    cancelled = end_of(client, waits)
    _, errors = check(client, cancelled, ids)
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}


BROKEN = {
    "json": (jsonl(line("a"), '{"custom_id": '), "invalid_json_line", 2),
    "no object": (jsonl(line("a"), "", "[1]"), "invalid_json_line", 3),
    "twice": (jsonl(line("a"), line("b"), line("a")), "duplicate_custom_id", 3),
    "no id": (jsonl({**line("a"), "custom_id": None}), "invalid_request", 1),
    "number": (jsonl(line(1)), "invalid_request", 1),
    "method": (jsonl({**line("a"), "method": "GET"}), "invalid_request", 1),
    "url": (jsonl({**line("a"), "url": "/v1/embeddings"}), "url_mismatch", 1),
    "body": (jsonl({**line("a"), "body": "x"}), "invalid_request", 1),
    "field": (jsonl({**line("a"), "colour": "red"}), "invalid_request", 1),
    "empty": (b"", "empty_file", None),
    "blank": (b"\n \n", "empty_file", None),
    "binary": (bytes(range(256)), "invalid_json_line", 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, name: str) -> None:
    content, code, number = BROKEN[name]
    file = tmp_path / "input"
    file.write_bytes(content)
    (fault, *_) = check_lines(file, CHAT).faults
    assert (fault.code, fault.line) == (code, number)


def test_a_batch_with_a_broken_line_fails_and_says_which(site: Site, start: Start) -> None:
    site.worker(lease_seconds=600.0)  # it does not look dead while the machine is busy
    site.wait_for_workers()
    client = client_of(start().url)
    for content, code, number in (BROKEN["json"], BROKEN["twice"], BROKEN["empty"]):
        ended = end_of(client, make(client, content))
        assert ended.status == "failed" and ended.failed_at
        assert ended.errors.object == "list"
        assert (ended.errors.data[0].code, ended.errors.data[0].line) == (code, number)
        assert ended.errors.data[0].message
        assert ended.output_file_id is ended.error_file_id is None
        assert ended.id not in site.results.runs()
    unknown = end_of(client, make(client, jsonl(line("a", model="gpt-9"))))
    assert unknown.errors.data[0].code == "model_not_found"


def test_a_worker_that_publishes_nothing_now_is_waited_for(site: Site, start: Start) -> None:
    """As after an outage, when another one has come back before it."""
    publish_worker(site.client, "another")  # and the name of one that publishes nothing
    client = client_of(start().url)
    batch = make(client, jsonl(line("a")))
    time.sleep(1.5)  # it would have failed by now
    assert client.batches.retrieve(batch.id).status == "validating"
    publish_worker(site.client, "another", "fake")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    client.batches.cancel(batch.id)
    assert end_of(client, batch).status == "cancelled"


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_lines_of_batches_have_the_form_of_the_gateways(
    site: Site, start: Start, form: str
) -> None:
    gateway = start("--log-format", form)
    batch = end_of(client_of(gateway.url), make(client_of(gateway.url), b""))
    assert gateway.stop() == 0
    (said,) = (one for one in gateway.output.splitlines() if f"batch {batch.id} has failed" in one)
    if form == "json":
        assert json.loads(said)["logger"] == "jobs.gateway.batches.running"
    else:
        assert " INFO jobs.gateway.batches.running: batch " in said


def test_a_quiet_gateway_has_quiet_batches(site: Site, start: Start) -> None:
    gateway = start(quiet=True)
    end_of(client_of(gateway.url), make(client_of(gateway.url), b""))
    assert gateway.stop() == 0
    assert "batch" not in gateway.output


def test_a_wrong_request_for_a_batch_is_refused(site: Site, start: Start) -> None:
    gateway = start()
    client = client_of(gateway.url)
    file = upload(client, jsonl(line("a")))
    text = client.files.create(file=b"x", purpose="user_data").id
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    wrong: list[tuple[int, str, Any]] = [
        (404, "input_file_id", "file-../../x"),
        (404, "input_file_id", "file-" + "0" * 28),
        (400, "input_file_id", text),
        (400, "input_file_id", None),
        (400, "endpoint", "/v1/embeddings"),
        (400, "completion_window", "1 day"),
        (400, "completion_window", "31d"),
        (400, "completion_window", "0d"),
        (400, "metadata", {"a": 1}),
        (400, "metadata", {str(n): "" for n in range(17)}),
        (400, "output_expires_after", {"anchor": "created_at", "seconds": 1}),
        (400, "colour", "red"),
    ]
    with gateway.http() as http:
        for status, param, value in wrong:
            reply = http.post("/v1/batches", json={**good, param: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
        for path in ("batch_..", "batch_" + "0" * 28):
            assert http.get(f"/v1/batches/{path}").status_code == 404
            assert http.post(f"/v1/batches/{path}/cancel").status_code == 404
    assert list(client.batches.list()) == []


def test_tenants_have_their_own_batches(site: Site, start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    url = start("--api-key-file", str(keys)).url
    a, b = client_of(url, "ka"), client_of(url, "kb")
    batch = make(a, jsonl(line("x")))
    with pytest.raises(openai.RateLimitError, match="the limit is 1"):
        make(a, jsonl(line("x")))
    for call in (b.batches.retrieve, b.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError) as others:
        b.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window=WINDOW)
    assert others.value.param == "input_file_id"
    assert list(b.batches.list()) == [] and [one.id for one in a.batches.list()] == [batch.id]
    site.worker()
    ended = end_of(a, batch)
    check(a, ended, ["x"])
    assert site.rows(f"a.{batch.id}")[0]["tenant"] == "a"
    with pytest.raises(openai.NotFoundError):
        b.files.content(ended.output_file_id)
    make(a, jsonl(line("x")))


def test_the_lines_of_a_tenant_are_its_own_jobs(tmp_path: Path) -> None:
    file = tmp_path / "input"
    jobs: list[dict[str, Any]] = [{}, {"session": "s"}, {"tenant": "b"}, {"run": "r"}, {"row": 1}]
    file.write_bytes(jsonl(*(line(str(n), job=job) for n, job in enumerate(jobs))))
    rows: list[Any] = list(BatchRows(file, CHAT, "a", "a.run").read(lambda number: number != 0))
    assert rows[0] is None
    job = rows[1].request.job
    assert (job.tenant, job.session, job.run, job.row) == ("a", "a:s", "a.run", 1)
    assert (job.custom_id, job.priority, rows[1].request.cache_salt) == ("1", "bulk", "a:")
    assert [row.error.param for row in rows[2:]] == ["job.tenant", "job.run", "job.row"]


def test_the_first_end_of_a_batch_stays(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"")
    batch = BatchStore(tmp_path, None).add(read_asked(BODY), source, None)
    assert batch.note(IN_PROGRESS, total=1) and batch.to_dict()["status"] == "in_progress"
    assert batch.note(ENDED, status="completed", completed=1, failed=0)
    assert not batch.note(ENDED, status="cancelled")  # by a gateway that was frozen
    assert batch.to_dict()["status"] == "completed"
    assert [*BatchStore(tmp_path, None).open(set())] == []
    assert batch.asked.expires_at - time.time() > 47 * 3600


def test_the_example_of_the_page_runs(
    site: Site, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    site.worker(real=True, models=["demo"], lease_seconds=600.0)
    site.wait_for_workers()
    client = client_of(start().url)
    code = section("Batches").partition("```python\n")[2].partition("```")[0]
    exec(code, {"client": client})
    assert capsys.readouterr().out == "sum-0 2\nsum-1 3\nsum-2 4\n"


def test_a_disk_that_fails_for_a_while_ends_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = asyncio.Event()

    def start(*_: Any) -> Any:
        started.set()
        return SimpleNamespace(poll=lambda: None, stop=lambda _: None)

    monkeypatch.setattr(watch, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_start", start)
    loop = tmp_path / AREA
    loop.symlink_to(loop)  # no folder can be read through it

    async def main() -> None:
        task = asyncio.create_task(watch.watch_batches(Settings("redis://", tmp_path)))
        async with asyncio.timeout(PATIENCE):
            while not caplog.messages:
                await asyncio.sleep(0.01)
            loop.unlink()
            (tmp_path / "input").write_bytes(jsonl(line("a")))
            BatchStore(tmp_path, None).add(read_asked(BODY), tmp_path / "input", None)
            await started.wait()
        task.cancel()

    asyncio.run(main())
    assert "batches wait" in caplog.text


def test_a_batch_names_some_of_many_models_that_nobody_serves(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SILENT_SECONDS", 0.0)
    with Client(redis_url) as client:
        publish_worker(client, *(f"served-{number}" for number in range(500)))
        (tmp_path / "input").write_bytes(jsonl(*(line(str(n), model=f"m{n}") for n in range(500))))
        store = BatchStore(tmp_path, None)
        batch = store.add(read_asked(BODY), tmp_path / "input", None)
        BatchRun(batch, client, Results(tmp_path), threading.Event()).go_on()
        errors = batch.to_dict()["errors"]["data"]
    assert len(errors) == MAX_ERRORS
    assert all(len(one["message"]) < 1000 for one in errors)


def test_a_damaged_fact_of_a_batch_hurts_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "input").write_bytes(jsonl(line("a")))
    store = BatchStore(tmp_path, None)
    batch, other = (store.add(read_asked(BODY), tmp_path / "input", None) for _ in range(2))
    for fact in (PROGRESS, ENDED, FINALIZING, IN_PROGRESS):
        for damaged in ("{", "{}", "[]"):
            (batch.folder / fact).write_text(damaged)
            found, _ = store.listed(Page(None, 10))
            assert {one["id"] for one in found} == {batch.id, other.id}
            store.sweep()
            assert f"{fact} is damaged" in caplog.text
            caplog.clear()
    (batch.folder / ASKED).write_text("{}")
    found, _ = store.listed(Page(None, 10))
    assert [one["id"] for one in found] == [other.id]
    with pytest.raises(JobError, match="is damaged"):
        assert StoredBatch(batch.folder, None).asked
