"""Events of a chat that are taken later and together make what they make one by one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import JobError
from jobs.operations import CHAT
from tests.worker.engine.chat_requests import WaitingSink, ask
from tests.worker.site import wait_until
from worker import Engine
from worker.backend import Assembly
from worker.chat.assembly import ChoiceState
from worker.engine.sequence import TokenEvent
from worker.host.engine_host import EngineHost
from worker.local.collect import CollectingSink
from worker.model_spec import ModelSpec
from worker.sampling.sampler import Sampled
from worker.text.answer_reader import AnswerReader, Part
from worker.text.harmony import HarmonySplitter
from worker.text.reasoning import ReasoningSplitter, ReasoningTags

TAGS = ReasoningTags("<think>", "</think>")
PARTS = ["<think>", "</think>", "</th", "ink>", "<|channel|>analysis<|message|>", "<|end|>"]
PARTS += ["<|start|>assistant<|channel|>final<|message|>", "\n", "so", "42", ""]


def readers(inside: bool) -> list[AnswerReader]:
    return [
        AnswerReader(),
        AnswerReader(ReasoningSplitter(TAGS, inside=inside)),
        AnswerReader(HarmonySplitter("<|start|>assistant")),
    ]


def read(reader: AnswerReader, texts: list[str], cuts: set[int]) -> ChoiceState:
    """A choice to which tokens with these texts are added, taken after each of `cuts`."""
    choice = ChoiceState(index=0, job="j", reader=reader)
    events: list[TokenEvent] = []
    for number, text in enumerate(texts):
        last = number == len(texts) - 1
        events.append(TokenEvent(Sampled(number, True), text, "stop" if last else None))
        if last or number in cuts:
            for run, joined in choice.runs(events):
                choice.add(run, joined, [])
            events = []
    return choice


@given(
    texts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=20),
    cuts=st.sets(st.integers(0, 19)),
    inside=st.booleans(),
)
def test_runs_of_events_make_what_single_ones_make(
    texts: list[str], cuts: set[int], inside: bool
) -> None:
    for one_by_one, together in zip(readers(inside), readers(inside), strict=True):
        expected = read(one_by_one, texts, set(range(len(texts))))
        found = read(together, texts, cuts)
        assert found.message() == expected.message()
        assert found.token_ids == expected.token_ids == list(range(len(texts)))
        assert found.reasoning_tokens == expected.reasoning_tokens
        assert found.finish_reason == "stop"


def test_a_long_run_needs_few_pieces() -> None:
    reader = AnswerReader(ReasoningSplitter(TAGS, inside=True))
    choice = ChoiceState(index=0, job="j", reader=reader)
    texts = ["so"] * 40 + ["</think>"] + ["42"] * 40
    events = [TokenEvent(Sampled(7, True), text) for text in texts]
    pieces = 0
    for run, text in choice.runs(events):
        choice.add(run, text, [])
        pieces += 1
    assert pieces < 15
    assert choice.reasoning_tokens == 40  # the mark is none of them


class LateSink(WaitingSink):
    """Counts the announcements."""

    announced = 0

    def pending(self, assembly: Assembly) -> None:
        self.announced += 1
        super().pending(assembly)


def test_the_receiver_assembles_the_answer_on_its_own_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    push = AnswerReader.push

    def watched(self: AnswerReader, text: str, *, last: bool) -> Part:
        threads.add(threading.current_thread().name)
        return push(self, text, last=last)

    monkeypatch.setattr(AnswerReader, "push", watched)
    host = EngineHost(device="cpu")
    spec = ModelSpec(reference=str(path), dtype="fp32", max_batch=4, prefix_cache=False)
    try:
        request = ask(n=2, seed=1, temperature=1.0, logprobs=True)
        request = request.model_copy(update={"model": host.load(spec).name})
        early, late = WaitingSink(), LateSink()
        host.submit(CHAT, request, early)
        expected = early.wait()
        host.submit(CHAT, request, late)
        wait_until(lambda: late.announced == 3)  # the first event, and the last ones
        wait_until(lambda: host.health().running + host.health().waiting == 0)
        shown = late.take()
        answer = late.completion()
        assert late.announced == 3
    finally:
        host.close()
    assert threads == {threading.current_thread().name}
    for found, one_by_one in zip(answer.choices, expected.choices, strict=True):
        assert found.message == one_by_one.message
        assert found.logprobs is not None and found.logprobs == one_by_one.logprobs
        deltas = [delta for delta in shown if delta.choice == found.index]
        streamed = [logprob for delta in deltas for logprob in delta.logprobs]
        assert streamed == found.logprobs.content
        assert len(deltas) < len(streamed)


class InterruptedSink(CollectingSink):
    """Its first announcement is interrupted."""

    announced = 0

    def pending(self, assembly: Assembly) -> None:
        self.announced += 1
        if self.announced == 1:
            raise KeyboardInterrupt
        super().pending(assembly)


def test_an_interrupted_announcement_leaves_no_request_without_an_end(path: Path) -> None:
    engine = Engine.load(str(path), dtype="fp32")
    sink = InterruptedSink()
    chat = engine.submit(ask(max_tokens=8, ignore_eos=True), sink)
    with pytest.raises(KeyboardInterrupt):
        while engine.step():
            pass
    while engine.step():
        pass
    assert chat.done and sink.outcome is not None
    engine.close()


def test_an_answer_whose_assembly_was_interrupted_ends_with_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(str(path), dtype="fp32")
    sink = CollectingSink()
    chat = engine.submit(ask(max_tokens=8, ignore_eos=True), sink)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnswerReader, "push", interrupt)
        engine.step()
        sink.take()
    while not chat.done:
        engine.step()
    with pytest.raises(JobError, match="the process was interrupted"):
        sink.completion()
    engine.close()


def interrupt(*args: object, **options: object) -> NoReturn:
    raise KeyboardInterrupt
