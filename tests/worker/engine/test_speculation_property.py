"""The same random requests as without drafts: rejected drafts leave no trace in the tokens, in
kept state or in the bytes that are held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worker.checkpoints import KINDS, make_shallow_checkpoint
from tests.worker.engine.drafted import perturbed
from tests.worker.engine.test_prefix_property import ACTIONS, WORDS, Ask, Cancel, Pair, Steps, run

EXAMPLES = 4
LONG: list[Ask | Cancel | Steps] = [Ask((*WORDS[2], *WORDS[i % 4]), 20, 3, "a") for i in range(8)]


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = make_shallow_checkpoint(
        tmp_path_factory.mktemp("model") / "target", KINDS[request.param]
    )
    pair = Pair(folder, str(perturbed(folder, folder.parent / "draft")))
    pair.core.speculation._costs = None  # draft whatever it costs
    yield pair
    drafts, failed = pair.core.speculation, request.session.testsfailed
    rejected = drafts.drafted_tokens - drafts.accepted_tokens
    assert failed or (drafts.accepted_tokens > 100 and rejected > 100), (drafts.steps, rejected)


@settings(max_examples=EXAMPLES)
@given(actions=ACTIONS, pin=st.booleans())
@example(actions=LONG, pin=False)
@example(actions=LONG, pin=True)
def test_tokens_are_those_of_each_sequence_alone_and_no_state_leaks(
    pair: Pair, actions: list[Ask | Cancel | Steps], pin: bool
) -> None:
    run(pair, actions, pin)
