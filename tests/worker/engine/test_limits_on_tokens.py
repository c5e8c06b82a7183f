"""vLLM's limits on tokens and its forms of the text: bad_words, allowed_token_ids, stop texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from jobs.api.message import Message
from jobs.api.sampling import Sampling
from jobs.errors import InvalidRequest, JobError
from tests.worker.engine.chat_requests import PROMPT, ask
from tests.worker.sampling.resolved import resolved
from worker import Engine
from worker.local.collect import CollectingSink, Generation
from worker.sampling.bad_words import bad_word_ids
from worker.sampling.inputs import SamplingBatch, SamplingInput
from worker.sampling.params import SamplingParams
from worker.sampling.sampler import sample

VOCAB = 50
params = partial(resolved, VOCAB)


def drawn(params: SamplingParams, output: tuple[int, ...], rows: int = 200) -> set[int]:
    """The tokens that are drawn from equal logits."""
    batch = SamplingBatch()
    for choice in range(rows):
        batch.add(SamplingInput(params, choice, (3, 4), output))
    return {one.token_id for one in sample(torch.zeros(rows, VOCAB), batch)}


def one(engine: Engine, **fields: Any) -> Generation:
    (only,) = engine.generate([PROMPT], Sampling(**{"temperature": 0, "max_tokens": 8, **fields}))
    return only


def test_only_allowed_tokens_are_drawn() -> None:
    assert drawn(params(allowed_token_ids=[7, 9, 9, 11], seed=1), ()) == {7, 9, 11}
    assert drawn(params(allowed_token_ids=[7, 2], seed=1, min_tokens=1), ()) == {7}


def test_a_bad_word_is_blocked_at_its_last_token_only() -> None:
    wanted = params([5, 6, 7], [8], seed=1)
    every = set(range(VOCAB)) - {8}
    assert drawn(wanted, (5, 6), rows=2000) == every - {7}
    for output in ((), (6,), (5,), (6, 5), (5, 6, 1)):
        assert drawn(wanted, output, rows=2000) == every


@pytest.mark.parametrize(
    ("bad", "fields", "param"),
    [
        ([[7]], {"allowed_token_ids": [7]}, "allowed_token_ids"),
        ([[1, 7]], {"allowed_token_ids": [7]}, "allowed_token_ids"),
        ([], {"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ([[i] for i in range(VOCAB)], {}, "bad_words"),
    ],
    ids=["bad word", "end of a bad word", "min_tokens", "all tokens"],
)
def test_limits_that_leave_no_token_are_refused(
    bad: list[list[int]], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="may leave no token to generate") as caught:
        params(*bad, **fields)
    assert caught.value.param == param


def test_a_word_is_blocked_at_the_start_and_after_a_space(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    found = bad_word_ids(tokenizer, ["the", " the"])
    assert found[:2] == [tokenizer.encode("the"), tokenizer.encode(" the")]
    assert found[2] == tokenizer.encode(" the")
    assert bad_word_ids(tokenizer, []) == []


def test_the_engine_keeps_to_allowed_tokens_and_avoids_bad_words(engine: Engine) -> None:
    ids = one(engine, allowed_token_ids=[20, 21, 22], temperature=1.0, seed=3).token_ids
    assert set(ids) <= {20, 21, 22} and len(ids) == 8
    free = one(engine, ignore_eos=True)
    word = engine.tokenizer.decode(free.token_ids[:1])
    assert engine.tokenizer.encode(word) == free.token_ids[:1]
    assert free.token_ids[0] not in one(engine, ignore_eos=True, bad_words=[word]).token_ids
    with pytest.raises(JobError, match="allowed_token_ids: the vocabulary has"):
        one(engine, allowed_token_ids=[99999])


def test_the_stop_string_ends_the_text_where_it_is_included(engine: Engine) -> None:
    free = one(engine, ignore_eos=True, max_tokens=30)
    stop = free.text[5:8]
    upto = free.text[: free.text.index(stop)]
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30, "stop": stop}
    assert one(engine, **fields).text == upto
    included = one(engine, include_stop_str_in_output=True, **fields)
    assert (included.text, included.finish_reason) == (upto + stop, "stop")


def test_the_text_of_a_stop_token_is_included_unless_it_is_skipped(engine: Engine) -> None:
    end = engine.tokenizer.id_of("<|im_end|>")
    assert end is not None
    forced: dict[str, Any] = {"stop_token_ids": [end], "allowed_token_ids": [end]}
    for fields, text in (
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "<|im_end|>"),
    ):
        stopped = one(engine, **forced, **fields)
        assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (text, [end], "stop")


def test_special_tokens_are_shown_on_request(engine: Engine) -> None:
    begin = engine.tokenizer.id_of("<|im_start|>")
    request = ask(allowed_token_ids=[begin], max_tokens=2, skip_special_tokens=False)
    assert engine.chat(request).text == "<|im_start|>" * 2
    streamed = "".join(chunk.text for chunk in engine.stream(request))
    assert streamed == "<|im_start|>" * 2
    shown = [
        token.text
        for token in engine.generate_stream(
            PROMPT, Sampling(allowed_token_ids=[begin], max_tokens=2, skip_special_tokens=False)
        )
    ]
    assert shown == ["<|im_start|>"] * 2


def continuing(text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    return ask(temperature=0, ignore_eos=True, continue_final_message=True, **fields).model_copy(
        update={"messages": [Message(**message) for message in messages]}
    )


def test_a_continued_message_goes_on_from_its_last_token(engine: Engine) -> None:
    request = continuing("The answer", logit_bias={"7": 50})
    ids = engine.prompt_ids(request)
    assert engine.tokenizer.decode(ids[-20:]).endswith("The answer")
    (same,) = engine.generate([ids], request.sampling())
    assert engine.chat(request).text == same.text


@pytest.mark.parametrize(
    ("text", "reasons"),
    [("<think>\nLet me see", True), ("<think>\nSo\n</think>\n\nIt is", False), ("It is", False)],
)
def test_reasoning_that_is_continued_stays_reasoning(
    engine: Engine, text: str, reasons: bool
) -> None:
    message = engine.chat(continuing(text)).choices[0].message
    assert bool(message.reasoning_content) is reasons
    assert bool(message.content) is not reasons


def test_the_row_records_the_limits_that_were_set(engine: Engine) -> None:
    def recorded(**fields: Any) -> dict[str, Any]:
        sink = CollectingSink()
        chat = engine.submit(ask(max_tokens=1, **fields), sink)
        while not chat.done:
            engine.step()
        assert sink.outcome is not None and sink.outcome.sampling is not None
        return sink.outcome.sampling.to_dict()

    limits: dict[str, Any] = {
        "allowed_token_ids": [20, 21],
        "bad_words": ["xyz"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert recorded(**limits).items() >= limits.items()
    neutral = {"include_stop_str_in_output": False, "skip_special_tokens": True, "bad_words": []}
    assert not limits.keys() & recorded(**neutral).keys()
