"""A session that outgrows the context, with a real engine behind a real Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site
from worker import Engine

CONTEXT, ANSWER = 160, 8


def test_a_session_over_the_context_is_refused_or_loses_its_oldest_turns(
    site: Site, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1, max_position_embeddings=CONTEXT)
    worker = site.worker(real=True, models=[str(folder)])
    site.client.serving = None
    fields: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    session = site.client.session(model="m", system="Be brief.", **fields)
    for number in range(9):
        text = f"{number} " + "word " * 8
        try:
            session.send(text, timeout=PATIENCE)
        except JobError as error:
            assert error.code == "context_length_exceeded"
            assert f"the context holds {CONTEXT}" in error.message
            break
    else:
        pytest.fail("the context was never exceeded")
    before = session.history()
    assert len(before) == 1 + 2 * number > 3  # the failed turn is not in it

    completion = session.send(text, timeout=PATIENCE, truncate="oldest")
    kept = session.history()
    assert kept[:-2] == before and kept[-2]["content"] == text
    assert worker.stop() == 0
    # The answer is that to the system text and the last turns that leave room for it.
    engine = Engine.load(str(folder), device="cpu", dtype="fp32")
    answers = []
    for dropped in range(1, number + 1):
        messages = [before[0], *before[1 + 2 * dropped :], {"role": "user", "content": text}]
        answers.append(engine.chat({"model": "m", "messages": messages, **fields}))
    expected = next(
        one for one in answers if one.usage and one.usage.prompt_tokens <= CONTEXT - ANSWER
    )
    assert completion.usage is not None and expected.usage is not None
    assert completion.usage.prompt_tokens == expected.usage.prompt_tokens
    assert completion.text == expected.text
