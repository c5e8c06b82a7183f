"""/v1/completions: prompts as texts and token ids, and their scores."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.testing import FakeWorker
from tests.jobs.gateway.conftest import Start
from tests.jobs.gateway.in_process import send
from tests.jobs.gateway.test_main_path import client_of
from tests.waiting import PATIENCE
from tests.worker.site import Site

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "any", "prompt": "one"}


def test_each_prompt_is_a_job_without_a_chat_template() -> None:
    worker = FakeWorker(lambda request: f"<{request.messages[0].text}>")
    body = {**BODY, "prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 4, "stop": "x"}
    reply = send(worker, "POST", PATH, json=body).json()
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert [one["index"] for one in reply["choices"]] == [0, 1, 2, 3]
    assert [one["text"] for one in reply["choices"]] == ["a<a>", "a<a>", "b<b>", "b<b>"]
    first = worker.requests[0]
    assert (first.apply_chat_template, first.max_tokens, first.stop) == (False, 4, "x")


def test_token_ids_are_the_prompt() -> None:
    worker = FakeWorker("x")
    for prompt, ids in (([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])):
        send(worker, "POST", PATH, json={**BODY, "prompt": prompt})
        assert [one.prompt_token_ids for one in worker.requests] == ids
        assert worker.requests[0].max_tokens == 16
        worker.requests.clear()


def test_streams_of_several_prompts_are_one() -> None:
    worker = FakeWorker(lambda request: f"{request.messages[0].text} b")
    body = {**BODY, "prompt": ["x", "y"], "stream": True, "echo": True}
    reply = send(worker, "POST", PATH, json={**body, "stream_options": {"include_usage": True}})
    *events, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert (texts, done) == ({0: "xx b", 1: "yy b"}, "[DONE]")
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 1001}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a", "b"], "job": {"id": "x"}}, "job.id"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"top_p": 2}, "top_p"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    content = json.dumps({**BODY, **fields}).encode()
    headers = {"content-type": "application/json"}
    reply = send(FakeWorker("x"), "POST", PATH, content=content, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_scores_of_a_prompt_are_those_of_scoring_jobs(site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    client = client_of(start().url)
    context, targets = [40, 41, 42, 43, 44], [[45], [46, 47, 48]]
    item = {"type": "loglikelihood", "prompt": context, "continuations": targets}
    request: Any = {"model": "demo", "items": [item]}
    scored = site.client.submit(request).result(timeout=PATIENCE).items[0].continuations

    prompts = [[*context, *one] for one in targets]
    made = client.completions.create(
        model="demo", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    for choice, one in zip(made.choices, scored, strict=True):  # as lm-evaluation-harness reads it
        values = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        assert sum(values) == pytest.approx(one.logprob_sum, abs=1e-5)
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert greedy == one.is_greedy
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)

    none = client.completions.create(
        model="demo", prompt=prompts[1], max_tokens=0, logprobs=1, echo=True
    )
    first, *values = none.choices[0].logprobs.token_logprobs
    assert first is None
    # The second time, another number of rows is computed at once, which rounds otherwise.
    assert values == pytest.approx(made.choices[1].logprobs.token_logprobs[1:-1], abs=1e-4)
    assert none.usage.completion_tokens == 0

    text = "What is 17 + 25?"
    echoed = client.completions.create(
        model="demo", prompt=text, max_tokens=2, logprobs=0, echo=True, temperature=0
    ).choices[0]
    assert echoed.text.startswith(text)
    tokens = echoed.logprobs.tokens
    assert "".join(tokens).startswith(echoed.text)  # it has special tokens, too
    for number, offset in enumerate(echoed.logprobs.text_offset):
        assert "".join(tokens[:number]) == "".join(tokens)[:offset]

    for wrong in ([10**9], [-1]):
        with pytest.raises(Exception, match="vocabulary") as error:
            client.completions.create(model="demo", prompt=wrong)
        assert error.value.param == "prompt"  # type: ignore[attr-defined]
