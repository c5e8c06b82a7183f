"""Items become the tokens that lm-evaluation-harness makes of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jobs.api.request import ChatRequest
from jobs.api.score_request import parse_item
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.scoring.scores import request, score, start
from worker import Engine
from worker.prompt.encoder import Around
from worker.scoring.encoding import ItemEncoder, Targets, rolling_windows

CONTEXT = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    return Engine.load(str(path), device="cpu", dtype="fp32", context=CONTEXT)


def targets(engine: Engine, item: dict[str, Any], **fields: Any) -> list[Targets]:
    encoder = ItemEncoder(engine._core, request(item, **fields))
    return encoder.targets(parse_item(item))


def likelihood(prompt: Any, *continuations: Any) -> dict[str, Any]:
    return {"type": "loglikelihood", "prompt": prompt, "continuations": list(continuations)}


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_continuation(engine: Engine) -> None:
    encode = engine.tokenizer.encode
    (one,) = targets(engine, likelihood("the dog \n ", "sleeps"))
    assert one.token_ids == encode("the dog \n sleeps")
    assert one.first == len(encode("the dog"))


def test_prompt_and_continuation_are_encoded_together(engine: Engine) -> None:
    """And split where the prompt alone would end."""
    encode = engine.tokenizer.encode
    split = 0
    for prompt, continuation in (("the do", "g sleeps"), ("What is", " two"), ("1", "2 and 3")):
        (one,) = targets(engine, likelihood(prompt, continuation))
        context, whole = encode(prompt), encode(prompt + continuation)
        assert list(one.token_ids) == context + whole[len(context) :]
        assert one.first == len(context)
        split += whole != context + encode(continuation)
    assert split  # else the tokenizer merges nothing here


def test_a_continuation_that_adds_no_token_is_an_error(engine: Engine) -> None:
    (both,) = (engine.tokenizer.encode("the"),)
    assert len(both) == 1
    with pytest.raises(JobError, match=r"continuations\[0\] adds no token"):
        targets(engine, likelihood("th", "e"))


@pytest.mark.parametrize("prompt", ["", "  ", []])
def test_an_empty_prompt_is_the_prefix_token(engine: Engine, prompt: Any) -> None:
    prefix = engine._core.loaded.prefix_token_id
    text = engine.tokenizer.encode(f"{prompt or ''}dog")
    (one,) = targets(engine, likelihood(prompt, "dog"))
    assert (list(one.token_ids), one.first) == ([prefix, *text], 1)
    (one,) = targets(engine, likelihood(prompt, "dog"), prefix_token_id=5)
    assert one.token_ids[0] == 5
    # A continuation that begins with it is its own context.
    (one,) = targets(engine, likelihood(prompt, [5, 6, 7]), prefix_token_id=5)
    assert (list(one.token_ids), one.first) == ([5, 6, 7], 1)
    with pytest.raises(JobError, match="prefix token alone"):
        targets(engine, likelihood(prompt, [5]), prefix_token_id=5)


def test_token_ids_are_taken_as_they_are(engine: Engine) -> None:
    text = engine.tokenizer.encode("dog")
    first, second = targets(engine, likelihood([1, 2], [3], "dog"))
    assert (list(first.token_ids), first.first) == ([1, 2, 3], 2)
    assert list(second.token_ids) == [1, 2, *text]


def test_messages_are_rendered_by_the_chat_template(engine: Engine) -> None:
    messages: Any = [{"role": "user", "content": "two plus three?"}]
    prompt = engine.prompt_ids(ChatRequest(model="m", messages=messages))
    item = {"type": "choice", "messages": messages, "choices": ["five", "six"]}
    for one in targets(engine, item):
        assert list(one.token_ids[: one.first]) == prompt
        assert len(one.token_ids) > one.first


def test_messages_have_the_special_tokens_of_their_template_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(engine._core.prompts), "_added", Around([7], []))  # by the tokenizer
    messages: Any = [{"role": "user", "content": "two plus three?"}]
    prompt = engine.prompt_ids(ChatRequest(model="m", messages=messages))
    (one,) = targets(engine, {"type": "choice", "messages": messages, "choices": ["five"]})
    assert list(one.token_ids) == [*prompt, *engine.tokenizer.encode("five")]


def test_messages_as_text_are_split_as_any_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(engine._core.prompts), "_added", Around([7], []))
    messages: Any = [{"role": "user", "content": "two plus three?"}]
    item = {"type": "choice", "messages": messages, "choices": ["five"]}
    text = engine.tokenizer.decode(targets(engine, item)[0].token_ids, skip_special_tokens=False)
    assert text.endswith("\nfive")  # the template ends with white space
    (one,) = targets(engine, item, messages_as_text=True)
    (same,) = targets(engine, likelihood(text.removesuffix("five"), "five"))
    assert one == same
    assert one.token_ids[0] == 7


def test_the_last_message_may_stay_open(engine: Engine) -> None:
    messages: Any = [
        {"role": "user", "content": "two plus three?"},
        {"role": "assistant", "content": "It is"},
    ]
    item = {"type": "choice", "messages": messages, "choices": [" five"]}
    (one,) = targets(engine, {**item, "continue_final_message": True})
    assert engine.tokenizer.decode(one.token_ids).endswith("It is five")
    with pytest.raises(JobError, match="a prompt has no messages"):
        parse_item({**likelihood("a", "b"), "continue_final_message": True})


def test_a_variable_of_the_chat_template_changes_the_prompt(engine: Engine) -> None:
    messages: Any = [{"role": "user", "content": "two plus three?"}]
    item = {"type": "choice", "messages": messages, "choices": ["five"]}
    off = {"enable_thinking": False}
    (one,) = targets(engine, item, chat_template_kwargs=off)
    request = ChatRequest(model="m", messages=messages, chat_template_kwargs=off)
    prompt = engine.prompt_ids(request)
    assert list(one.token_ids[: one.first]) == prompt
    assert prompt != engine.prompt_ids(ChatRequest(model="m", messages=messages))


def test_max_length_is_a_shorter_context(engine: Engine) -> None:
    prompt = list(range(1, 20))
    with pytest.raises(JobError, match="the context holds 8"):
        targets(engine, likelihood(prompt, [1]), max_length=8)
    (one,) = targets(engine, likelihood(prompt, [1]), max_length=8, truncate="left")
    assert (len(one.token_ids), one.truncated) == (9, 11)
    windows = targets(engine, {"type": "perplexity", "text": prompt}, max_length=8)
    assert windows == targets(engine, {"type": "perplexity", "text": prompt, "window": 8})


def test_special_tokens_begin_a_text_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the tokenizer adds, or BOS if the model wants it."""
    bos = engine.tokenizer.encode("<|im_start|>")
    assert len(bos) == 1
    monkeypatch.setattr(engine._core.prompts, "_bos", "<|im_start|>")
    monkeypatch.delattr(engine._core.prompts, "_added", raising=False)
    encode = engine.tokenizer.encode
    (one,) = targets(engine, likelihood("the dog", " sleeps"))
    assert list(one.token_ids) == [*bos, *encode("the dog sleeps")]
    (one,) = targets(engine, likelihood("<|im_start|>the dog", " sleeps"))
    assert list(one.token_ids) == [*bos, *encode("the dog sleeps")]
    (one,) = targets(engine, likelihood("the dog", " sleeps"), add_special_tokens=False)
    assert list(one.token_ids) == encode("the dog sleeps")
    monkeypatch.delattr(engine._core.prompts, "_added", raising=False)


def test_a_prompt_that_is_too_long_is_truncated_only_if_asked(engine: Engine) -> None:
    most = CONTEXT + 1  # the last token is not computed
    prompt = [number % 50 for number in range(100)]
    (one,) = targets(engine, likelihood(prompt[: most - 3], [1, 2, 3]))
    assert (len(one.token_ids), one.truncated) == (most, 0)
    with pytest.raises(JobError, match="100 tokens and continuations") as caught:
        targets(engine, likelihood(prompt, [1, 2, 3]))
    assert caught.value.code == "context_length_exceeded"
    (one,) = targets(engine, likelihood(prompt, [1, 2, 3]), truncate="left")
    assert list(one.token_ids) == [*prompt, 1, 2, 3][-most:]
    assert (one.first, one.truncated) == (most - 3, 100 + 3 - most)
    (found,) = score(engine, likelihood(prompt, [1, 2, 3]), truncate="left")
    assert found.continuations is not None
    assert found.continuations[0].truncated_tokens == 100 + 3 - most
    (one,) = targets(engine, likelihood(prompt, [1] * CONTEXT), truncate="left")
    assert (len(one.token_ids), one.first) == (most, 1)
    with pytest.raises(JobError, match="shorten it"):
        targets(engine, likelihood(prompt, [1] * most), truncate="left")


def harness_windows(ids: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """The disjoint windows that lm-evaluation-harness scores, with one token of context: their
    context and their targets."""
    first = min(length, len(ids))
    windows = [([prefix], ids[:first])]
    done = first
    while done < len(ids):
        end = done + min(len(ids) - done, length)
        windows.append((ids[max(0, end - length - 1) : done], ids[done:end]))
        done = end
    return windows


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 32, 33, 50])
def test_windows_are_those_of_lm_evaluation_harness(tokens: int) -> None:
    ids = list(range(100, 100 + tokens))
    found = [
        (list(one.token_ids[: one.first]), list(one.token_ids[one.first :]))
        for one in rolling_windows([1, *ids], 16, 16)
    ]
    assert found == harness_windows(ids, 1, 16)


def test_windows_with_a_stride_score_each_token_once_with_the_widest_context() -> None:
    ids = list(range(50))
    windows = list(rolling_windows(ids, 16, 5))
    assert [one for window in windows for one in window.token_ids[window.first :]] == ids[1:]
    assert {len(window.token_ids) for window in windows} == {17}
    assert [len(window.token_ids) - window.first for window in windows[1:]] == [5] * 6 + [3]


def test_too_many_windows_are_refused(engine: Engine) -> None:
    item = {"type": "perplexity", "text": [1] * 20_000, "window": 8, "stride": 1}
    with pytest.raises(JobError, match="19993 windows, and at most 10000 are possible"):
        targets(engine, item)


def test_windows_share_the_tokens_of_their_text(engine: Engine) -> None:
    """A window of 60 tokens in steps of one: copies would have 60 times the tokens."""
    item = {"type": "perplexity", "text": [1] * 5000, "window": 60, "stride": 1, "prefix": False}
    tracemalloc.start()
    try:
        scoring, _ = start(engine, item)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(scoring.sequences) == 4940
    assert used < len(scoring.sequences) * 2500
    scoring.cancel()
    engine.step()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAX_SEQUENCES", "the request has 6 continuations and windows, and at most 5"),
        ("MAX_TOKENS", "the request has 14 tokens, and at most 11"),
    ],
)
def test_an_item_that_exceeds_the_limits_of_a_request_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    monkeypatch.setattr(f"worker.scoring.encoding.{limit}", 5 if limit == "MAX_SEQUENCES" else 11)
    text = {"type": "perplexity", "text": [1] * 7, "window": 2, "prefix": False}  # 3 windows
    two = likelihood([1], [2], [3])
    first, failed, last = score(engine, text, text, two)
    assert failed.failure is not None and words in failed.failure.message
    assert first.text is not None and last.continuations is not None
