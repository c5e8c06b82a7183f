"""How the engine behaves: batches, ends, seeds, cancellation, memory, and bad sequences."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jobs.api.request import ChatRequest, StreamOptions
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.backend import Outcome
from worker.engine.chat_generation import ChatGeneration
from worker.engine.collect import CollectingSink
from worker.engine.host import EngineHost


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)


def ask(text: str = "hello", **fields: Any) -> ChatRequest:
    return ChatRequest(
        model="m", messages=[{"role": "user", "content": text}], **{"max_tokens": 12, **fields}
    )


PROMPT = [5, 6, 7, 8]


def test_answers_have_openais_form(engine: Engine) -> None:
    request = ask(n=2, seed=1, ignore_eos=True, logprobs=True, top_logprobs=3)
    request = request.model_copy(update={"stream_options": StreamOptions(include_usage=True)})
    OpenAICompletion.model_validate(engine.chat(request).to_dict())
    chunks = list(engine.stream(request))
    for chunk in chunks:
        OpenAIChunk.model_validate(chunk.to_dict())
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_is_the_whole_text(engine: Engine, seed: int) -> None:
    request = ask(seed=seed, temperature=1.5, max_tokens=40, stop=["a", "xyz"], n=2)
    whole = engine.chat(request)
    chunks = [choice for chunk in engine.stream(request) for choice in chunk.choices]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)


def test_a_seed_means_the_same_tokens_alone_and_among_others(engine: Engine) -> None:
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


def test_one_at_a_time_is_the_same_bit_for_bit(path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=1)
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=30, logprobs=True)
    first, second = (engine.generate([PROMPT, PROMPT[::-1]], sampling) for _ in range(2))
    assert first == second


def test_limits_and_ends(engine: Engine) -> None:
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
def test_more_tokens_than_there_is_room_for_are_refused(
    engine: Engine, fields: dict[str, int]
) -> None:
    with pytest.raises(JobError, match="min_tokens is 600, and the prompt of 4 tokens leaves 508"):
        engine.generate([PROMPT], Sampling(min_tokens=600, **fields))


def test_defaults_of_a_model_may_be_wider_than_requests(path: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path, tmp_path / "hot"))
    (folder / "generation_config.json").write_text('{"temperature": 1000.0}', encoding="utf-8")
    engine = Engine.load(str(folder), device="cpu", dtype="fp32")
    assert engine.chat(ask(max_tokens=3, ignore_eos=True)).usage is not None


def test_a_defect_in_an_answer_ends_its_request_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    expected = engine.chat(ask(seed=1)).text
    whole = ChatGeneration._outcome

    def outcome(flight: ChatGeneration) -> Outcome:
        if flight._plan.seed == 7:
            raise RuntimeError("as it was told")
        return whole(flight)

    monkeypatch.setattr(ChatGeneration, "_outcome", outcome)
    sinks = [CollectingSink(), CollectingSink()]
    flights = [engine.submit(ask(seed=7, n=2), sinks[0]), engine.submit(ask(seed=1), sinks[1])]
    cancelled = engine.submit(ask(seed=7), CollectingSink())
    cancelled.cancel()
    while not all(flight.done for flight in (*flights, cancelled)):
        engine.step()
    with pytest.raises(JobError, match="the answer can't be put together: RuntimeError"):
        sinks[0].completion()
    assert sinks[1].completion().text == expected
    assert engine.running == engine.waiting == 0
    assert "as it was told" in caplog.text


def test_the_end_of_the_context_ends_a_completion(path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", context=16)
    (one,) = engine.generate([PROMPT], Sampling(temperature=0, ignore_eos=True))
    assert (len(one.token_ids), one.finish_reason) == (12, "length")
    with pytest.raises(JobError, match=r"16 tokens and the context holds 16") as caught:
        engine.generate([list(range(16))], Sampling())
    assert caught.value.code == "context_length_exceeded"


def test_stop_strings_end_the_text_before_them(engine: Engine) -> None:
    (free,) = engine.generate([PROMPT], Sampling(seed=5, temperature=1.0, max_tokens=40))
    stop = free.text[10:13]
    sampling = Sampling(seed=5, temperature=1.0, max_tokens=40, stop=stop)
    (stopped,) = engine.generate([PROMPT], sampling)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_are_those_of_the_prompt_logits(engine: Engine) -> None:
    choice = engine.chat(ask(logprobs=True, top_logprobs=4, seed=2, temperature=1.0)).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    prompt = engine.prompt_ids(ask())
    expected = engine.prompt_logits(prompt)[-1].log_softmax(-1)
    first = choice.logprobs.content[0]
    best = expected[: engine.tokenizer.vocab_size].topk(4).values.tolist()
    assert [top.logprob for top in first.top_logprobs] == pytest.approx(best, abs=1e-4)


def test_reasoning_comes_apart_from_the_answer(engine: Engine) -> None:
    opening = engine.tokenizer.id_of("<think>")
    request = ask(temperature=0, max_tokens=8, logit_bias={opening: 100})
    completion = engine.chat(request)
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == ("", "<think>" * 7)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 7


def test_cancelling_ends_a_request_with_what_there_was(engine: Engine) -> None:
    sink = CollectingSink()
    flight = engine.submit(ask(max_tokens=100, temperature=0, ignore_eos=True), sink)
    for _ in range(5):
        engine.step()
    flight.cancel()
    engine.step()
    assert flight.done
    outcome = sink._outcome
    assert outcome is not None and outcome.error is not None and outcome.partial is not None
    assert outcome.error.code == "cancelled"
    assert outcome.partial.usage is not None
    assert outcome.partial.usage.completion_tokens == len(outcome.output_token_ids[0]) == 5
    assert engine.running == engine.waiting == 0


def test_what_can_never_fit_fails_alone_with_the_numbers(path: Path) -> None:
    probe = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    limit = probe._pool.bytes_for_one(40)
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, cache_bytes=limit)
    sink = CollectingSink()
    long = engine.submit(ask("word " * 40), sink)
    short = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(short[0].token_ids) == 5
    assert long.done
    with pytest.raises(JobError, match="MiB") as caught:
        sink.completion()
    assert caught.value.code == "out_of_memory"


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("no room")])
def test_a_sequence_that_breaks_the_model_fails_alone(path: Path, error: Exception) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    expected = engine.generate([PROMPT, [9, 9]], greedy)
    model, poison = engine._model, 77

    class Fragile:
        def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
            if (batch.token_ids == poison).any():
                raise error
            return model(batch, caches)

    engine._model = Fragile()  # type: ignore[assignment]
    sink = CollectingSink()
    bias = {poison: -100}
    bad = engine.submit(ask(max_tokens=4, logit_bias={poison: 100}), sink)
    good = engine.generate([PROMPT, [9, 9]], greedy.model_copy(update={"logit_bias": bias}))
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    while not bad.done:
        engine.step()
    with pytest.raises(JobError) as caught:
        sink.completion()
    assert caught.value.code in ("internal", "out_of_memory")


def test_nan_in_one_sequence_spares_its_neighbours(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    poison = 250
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={poison: -100})
    expected = engine.generate([PROMPT], greedy)
    named = f"tensor model.embed_tokens.weight in {path / 'model.safetensors'} holds NaN"
    with pytest.raises(JobError, match=f"not finite after 3 tokens: {named}"):
        engine.generate([[5, poison, 6]], greedy)
    sampling = [greedy] * 3
    with pytest.raises(JobError, match=named):
        engine.generate([PROMPT, [poison], PROMPT], sampling)
    assert engine.generate([PROMPT], greedy) == expected  # in the slot that held NaN
    for ask_for in (lambda: engine.prompt_logits([poison]), lambda: engine.score([poison], [5])):
        with pytest.raises(JobError, match=named):
            ask_for()
        assert engine.generate([PROMPT], greedy) == expected


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("largest", "says"),
    [
        (1e5, f"tensor {UP} in .* overflows float16; load with another dtype"),
        (6e4, "all weights are finite: a computation overflows float16; load with another dtype"),
    ],
)
def test_a_dtype_that_overflows_is_named(tmp_path: Path, largest: float, says: str) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    weights[UP] *= largest / weights[UP].abs().max()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = Engine.load(str(path), device="cpu", dtype="fp16")
    with pytest.raises(JobError, match=says):
        engine.generate([PROMPT], Sampling(temperature=0, max_tokens=8))


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
def test_what_is_no_token_id_is_refused(engine: Engine, ids: Any) -> None:
    for call in (
        lambda: engine.generate([ids], Sampling()),
        lambda: engine.prompt_logits(ids),
        lambda: engine.score([5], ids),
    ):
        with pytest.raises(JobError, match="must be token ids"):
            call()


def test_a_prompt_has_at_least_one_token(engine: Engine) -> None:
    for call in (
        lambda: engine.generate([[]], Sampling()),
        lambda: engine.prompt_logits([]),
        lambda: engine.score([], [5]),
    ):
        with pytest.raises(JobError, match="a prompt needs at least one token"):
            call()
    assert engine.score([5], []) == []


def test_ids_may_come_as_a_tensor_or_an_array(engine: Engine) -> None:
    expected = engine.score([5, 6], [7, 8])
    prompt: Any = torch.tensor([5, 6])
    target: Any = numpy.array([7, 8])
    assert engine.score(prompt, target) == expected


def test_a_missing_device_is_an_error_that_names_what_is_there(path: Path) -> None:
    with pytest.raises(JobError, match=r"device 'cuda:99' is not there; possible: auto, cpu"):
        Engine.load(str(path), device="cuda:99")
    with pytest.raises(JobError, match="unknown device 'tpu9'"):
        Engine.load(str(path), device="tpu9")


def test_many_threads_may_ask_one_host(path: Path) -> None:
    host = EngineHost(device="cpu", dtype="fp32", max_batch=4)
    try:
        info = host.load(str(path))
        requests = [ask(f"question {i}", seed=i, temperature=1.0) for i in range(8)]
        requests = [r.model_copy(update={"model": info.name}) for r in requests]
        expected = [host.chat(request).text for request in requests]
        answers: dict[int, str] = {}

        def work(i: int) -> None:
            answers[i] = host.chat(requests[i]).text

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [answers[i] for i in range(8)] == expected
        health = host.health()
        assert health.alive and health.progress > 0 and not health.running
        with pytest.raises(JobError, match=f"loaded: {info.name}") as caught:
            host.chat(ask().model_copy(update={"model": "other"}))
        assert caught.value.code == "model_not_found"
    finally:
        host.close()
    assert not host.health().alive
