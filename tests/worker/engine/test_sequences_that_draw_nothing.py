"""Sequences without sampling, as a scoring job needs them, in the batch of those that generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import JobError
from tests.worker.engine.chat_requests import ask
from worker import Engine
from worker.engine.sequence import Sequence, TokenEvent
from worker.local.collect import CollectingSink
from worker.sampling.prompt_logits import CHUNK_TOKENS, PromptLogprobs

PROMPT = [3 + number % 40 for number in range(CHUNK_TOKENS + 50)]
TARGET = [7, 8, 9, 7]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_one_is_scored_in_the_batch_of_a_chat(path: Path, draft: str | None) -> None:
    engine = Engine.load(str(path), dtype="fp32", max_batch=4, draft=draft)
    expected, answer = engine.score(PROMPT, TARGET), engine.chat(ask(seed=1)).text
    scores = PromptLogprobs([*PROMPT, *TARGET], 0)
    events: list[TokenEvent] = []
    scored = Sequence([*PROMPT, *TARGET], listener=events.append, reader=scores)
    sink = CollectingSink()
    engine.submit(ask(seed=1), sink)
    engine._core.add([scored])
    engine.step()
    assert engine._core.running == 2
    assert not events
    while engine.step():
        pass
    found = [one[0].logprob for one in scores.positions[-len(TARGET) :]]
    assert found == pytest.approx(expected, abs=1e-4)
    assert [one[0].token_id for one in scores.positions] == [*PROMPT, *TARGET][1:]
    assert events == [TokenEvent(None, finish_reason="stop")]
    assert not scored.output_ids
    assert sink.completion().text == answer
    assert engine._core.running == engine._core.waiting == 0
    engine.close()


def test_one_that_nobody_listens_to_only_fills_the_prefix_cache(path: Path) -> None:
    engine = Engine.load(str(path), dtype="fp32", max_batch=4)
    plain = Sequence(PROMPT)
    engine._core.add([plain])
    while engine.step():
        pass
    assert plain.ended
    again = Sequence(PROMPT)
    engine._core.add([again])
    while engine.step():
        pass
    assert again.ended and again.cached_tokens
    engine.close()


def test_one_can_be_cancelled(path: Path) -> None:
    engine = Engine.load(str(path), dtype="fp32", max_batch=4)
    events: list[TokenEvent] = []
    scored = Sequence(PROMPT, listener=events.append, reader=PromptLogprobs(PROMPT, 0))
    engine._core.add([scored])
    engine.step()
    scored.cancel()
    while engine.step():
        pass
    (event,) = events
    assert isinstance(event.error, JobError) and event.error.code == "cancelled"
    engine.close()
