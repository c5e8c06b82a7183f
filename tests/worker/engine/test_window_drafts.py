"""Drafts beside sliding windows: no more tokens in a step than the window has columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.engine.sequence import TokenEvent

WINDOW = 8
SAMPLING = Sampling(
    temperature=0,
    max_tokens=16,
    ignore_eos=True,
    logit_bias={"7": 100, "8": 99.9},  # repeats itself, so that lookup finds what comes next
    presence_penalty=0.1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "m"
    return make_checkpoint(path, "gemma3_text", sliding_window=WINDOW)


def test_a_sequence_that_resumes_with_several_pending_tokens_drafts_fewer(folder: Path) -> None:
    plain = Engine.load(str(folder), device="cpu", dtype="fp32", prefix_cache=False)
    engine = Engine.load(
        str(folder), device="cpu", dtype="fp32", max_batch=4, draft="ngram", draft_tokens=WINDOW - 1
    )
    core = engine._core
    for length in range(18, 40):
        prompt = ([7, 8] * 30)[:length]
        expected = plain.generate([prompt], SAMPLING)[0].token_ids
        for tokens in (2, 4, 6):
            core.book.kept.clear()
            params = core.sampling_params(SAMPLING, prompt)
            events: list[TokenEvent] = []
            sequence = engine._sequence(prompt, params, 0, events.append)
            core.add([sequence])
            while len(sequence.output_ids) < tokens:
                engine.step()
            core._scheduler._preempt(sequence)
            sequence.acceptance.rate = 0.999
            while engine.step():
                pass
            assert events[-1].error is None, (length, tokens)
            assert sequence.output_ids == expected
    assert core.speculation.accepted_tokens > 0
