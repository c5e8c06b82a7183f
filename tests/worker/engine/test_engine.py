"""Behaviour of `Engine`: completions, stop conditions, seeds, logprobs, cancellation, arguments."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jobs.api.request import ChatRequest, StreamOptions
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.engine.chat_requests import PROMPT, ask
from worker import Engine
from worker.backend import TooLong
from worker.local.collect import CollectingSink


def test_completions_and_chunks_are_valid_openai_objects(engine: Engine) -> None:
    request = ask(n=2, seed=1, ignore_eos=True, logprobs=True, top_logprobs=3)
    request = request.model_copy(update={"stream_options": StreamOptions(include_usage=True)})
    OpenAICompletion.model_validate(engine.chat(request).to_dict())
    chunks = list(engine.stream(request))
    for chunk in chunks:
        OpenAIChunk.model_validate(chunk.to_dict())
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_token_ids_are_returned_where_they_are_asked_for(engine: Engine) -> None:
    asked = engine.chat(ask(n=2, seed=1, return_token_ids=True))
    assert asked.usage and asked.prompt_token_ids
    assert len(asked.prompt_token_ids) == asked.usage.prompt_tokens
    outputs = [choice.token_ids or [] for choice in asked.choices]
    assert sum(map(len, outputs)) == asked.usage.completion_tokens
    assert outputs[0] != outputs[1]
    plain = engine.chat(ask(n=2, seed=1))
    assert plain.prompt_token_ids is None and plain.choices[0].token_ids is None
    chunks = list(engine.stream(ask(n=2, seed=1, return_token_ids=True, stream=True)))
    prompts = [chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids]
    assert prompts == [asked.prompt_token_ids]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index, ids in enumerate(outputs):
        mine = [choice.token_ids or [] for choice in choices if choice.index == index]
        assert [*chain.from_iterable(mine)] == ids and len(mine) > 1
    silent = list(engine.stream(ask(n=2, seed=1)))
    assert not any(c.prompt_token_ids or c.choices[0].token_ids for c in silent if c.choices)


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_equals_the_completion(engine: Engine, seed: int) -> None:
    request = ask(seed=seed, temperature=1.5, max_tokens=40, stop=["a", "xyz"], n=2)
    whole = engine.chat(request)
    chunks = [choice for chunk in engine.stream(request) for choice in chunk.choices]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    sampling = [Sampling(temperature=1.0, seed=seed, max_tokens=20) for seed in range(9)]
    together = [one.token_ids for one in engine.generate([PROMPT] * 9, sampling)]
    alone = [engine.generate([PROMPT], one)[0].token_ids for one in sampling]
    assert together == alone
    assert len({tuple(ids) for ids in together}) > 1


def test_choices_differ_and_a_seed_repeats_all_of_them(engine: Engine) -> None:
    request = ask(n=3, temperature=1.0, seed=11)
    first, second = engine.chat(request), engine.chat(request)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_max_batch_1_is_deterministic_bit_for_bit(path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=1)
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=30, logprobs=True)
    first, second = (engine.generate([PROMPT, PROMPT[::-1]], sampling) for _ in range(2))
    assert first == second


def test_max_tokens_stop_tokens_and_min_tokens(engine: Engine) -> None:
    greedy = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
    (six,) = engine.generate([PROMPT], greedy)
    assert (len(six.token_ids), six.finish_reason) == (6, "length")
    third = six.token_ids[2]
    first = six.token_ids.index(third)
    stop = greedy.model_copy(update={"stop_token_ids": [third]})
    (stopped,) = engine.generate([PROMPT], stop)
    assert stopped.token_ids == six.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == engine.tokenizer.decode(six.token_ids[:first])
    later = stop.model_copy(update={"min_tokens": 5})
    (delayed,) = engine.generate([PROMPT], later)
    assert third not in delayed.token_ids[:5]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 800}])
def test_min_tokens_beyond_the_context_is_refused(engine: Engine, fields: dict[str, int]) -> None:
    words = "min_tokens is 600, and the prompt of 4 tokens leaves 508"
    with pytest.raises(TooLong, match=words) as caught:
        engine.generate([PROMPT], Sampling(min_tokens=600, **fields))
    assert (caught.value.tokens, caught.value.param) == (604, "min_tokens")


def test_model_defaults_may_exceed_request_limits(path: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path, tmp_path / "hot"))
    (folder / "generation_config.json").write_text('{"temperature": 1000.0}', encoding="utf-8")
    engine = Engine.load(str(folder), device="cpu", dtype="fp32")
    assert engine.chat(ask(max_tokens=3, ignore_eos=True)).usage is not None


def test_a_completion_ends_at_the_context_length(path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", context=16)
    (one,) = engine.generate([PROMPT], Sampling(temperature=0, ignore_eos=True))
    assert (len(one.token_ids), one.finish_reason) == (12, "length")
    with pytest.raises(JobError, match=r"16 tokens and the context holds 16") as caught:
        engine.generate([list(range(16))], Sampling())
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_without_the_chat_template_is_continued_as_it_is(engine: Engine) -> None:
    text = "<think>the dog"
    completion = engine.chat(ask(text, apply_chat_template=False, temperature=0))
    sampling = Sampling(temperature=0, max_tokens=12)
    (plain,) = engine.generate([engine.tokenizer.encode(text)], sampling)
    assert completion.text == plain.text
    assert completion.choices[0].message.reasoning_content is None


def test_the_text_of_a_special_token_stops_at_the_token(engine: Engine) -> None:
    """Though it is not shown."""
    (special,) = engine.tokenizer.encode("<|im_start|>")
    assert engine.tokenizer.is_special(special)
    forced = Sampling(allowed_token_ids=[special], ignore_eos=True, max_tokens=3, temperature=0)
    for stop, count in (("<|im_end|>", 3), ("<|im_start|>", 1)):
        sampling = forced.model_copy(update={"stop": [stop]})
        (found,) = engine.generate([PROMPT], sampling)
        assert (len(found.token_ids), found.text) == (count, "")


def test_text_ends_before_a_stop_string(engine: Engine) -> None:
    (free,) = engine.generate([PROMPT], Sampling(seed=5, temperature=1.0, max_tokens=40))
    stop = free.text[10:13]
    sampling = Sampling(seed=5, temperature=1.0, max_tokens=40, stop=stop)
    (stopped,) = engine.generate([PROMPT], sampling)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_match_prompt_logits(engine: Engine) -> None:
    choice = engine.chat(ask(logprobs=True, top_logprobs=4, seed=2, temperature=1.0)).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    prompt = engine.prompt_ids(ask())
    expected = engine.prompt_logits(prompt)[-1].log_softmax(-1)
    first = choice.logprobs.content[0]
    best = expected[: engine.tokenizer.vocab_size].topk(4).values.tolist()
    assert [top.logprob for top in first.top_logprobs] == pytest.approx(best, abs=1e-4)


def test_reasoning_is_separated_from_content(engine: Engine) -> None:
    opening = engine.tokenizer.id_of("<think>")
    request = ask(temperature=0, max_tokens=8, logit_bias={opening: 100})
    completion = engine.chat(request)
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == ("", "<think>" * 7)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 7
    whole = engine.chat(request.model_copy(update={"separate_reasoning": False}))
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("<think>" * 8, None)


def test_a_cancelled_request_keeps_its_partial_output(engine: Engine) -> None:
    sink = CollectingSink()
    chat = engine.submit(ask(max_tokens=100, temperature=0, ignore_eos=True), sink)
    for _ in range(5):
        engine.step()
    chat.cancel()
    engine.step()
    assert chat.done
    outcome = sink.outcome
    assert outcome is not None and outcome.error is not None and outcome.partial is not None
    assert outcome.error.code == "cancelled"
    assert outcome.partial.usage is not None
    assert outcome.partial.usage.completion_tokens == len(outcome.output_token_ids[0]) == 5
    assert engine._core.running == engine._core.waiting == 0


def test_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    for sampling in (Sampling(logit_bias={99999: 1}), Sampling(stop_token_ids=[99999])):
        with pytest.raises(JobError, match="99999"):
            engine.generate([PROMPT], sampling)
    for call in (
        lambda: engine.generate([[99999]], Sampling()),
        lambda: engine.prompt_logits([5, 99999]),
        lambda: engine.score([5, 99999], [5]),
        lambda: engine.score([5], [99999]),
        lambda: engine.score([5], [-99999]),
    ):
        with pytest.raises(JobError, match="99999"):
            call()


@pytest.mark.parametrize("ids", [["a"], [True], [1.5], 7, [[1]], [None], "text"])
def test_values_other_than_token_ids_are_refused(engine: Engine, ids: Any) -> None:
    for call in (
        lambda: engine.generate([ids], Sampling()),
        lambda: engine.prompt_logits(ids),
        lambda: engine.score([5], ids),
    ):
        with pytest.raises(JobError, match="must be token ids"):
            call()


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    for call in (
        lambda: engine.generate([[]], Sampling()),
        lambda: engine.prompt_logits([]),
        lambda: engine.score([], [5]),
    ):
        with pytest.raises(JobError, match="a prompt needs at least one token"):
            call()
    assert engine.score([5], []) == []


def test_ids_may_be_a_tensor_or_an_array(engine: Engine) -> None:
    expected = engine.score([5, 6], [7, 8])
    prompt: Any = torch.tensor([5, 6])
    target: Any = numpy.array([7, 8])
    assert engine.score(prompt, target) == expected


def test_a_missing_device_error_lists_available_devices(path: Path) -> None:
    with pytest.raises(JobError, match=r"'cuda:99' is not available: .*; possible: auto, cpu"):
        Engine.load(str(path), device="cuda:99")
    with pytest.raises(JobError, match="unknown device 'tpu9'"):
        Engine.load(str(path), device="tpu9")


def test_chat_and_stream_take_a_dict_as_a_client_does(engine: Engine) -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 3}
    typed = ChatRequest.parse({**request, "temperature": 0})
    answer = engine.chat({**request, "temperature": 0})
    assert answer.text == engine.chat(typed).text
    chunks = engine.stream(MappingProxyType({**request, "temperature": 0}))
    streamed = "".join(choice.delta.content or "" for one in chunks for choice in one.choices)
    assert streamed == answer.text
    with pytest.raises(JobError, match="unknown field 'topp'"):
        engine.chat({**request, "topp": 1})


@pytest.mark.parametrize("value", ["off", 0, None])
def test_the_prefix_cache_is_on_or_off(path: Path, value: Any) -> None:
    with pytest.raises(JobError, match="prefix_cache is True or False"):
        Engine.load(str(path), device="cpu", prefix_cache=value)


@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_the_limit_of_the_cache_is_a_number_of_bytes(path: Path, value: Any) -> None:
    with pytest.raises(JobError, match="cache_bytes must be a number of bytes"):
        Engine.load(str(path), device="cpu", cache_bytes=value)
