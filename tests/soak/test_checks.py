"""Which jobs a loss of Redis excuses."""

from __future__ import annotations

import pytest

from jobs.api.request import ChatRequest
from tests.soak.checks import may_be_lost
from tests.soak.ledger import Submitted

REQUEST = ChatRequest.parse({"model": "m", "messages": [{"role": "user", "content": "?"}]})
LOSS = (10.0, 14.0)  # what was written in this time is lost


@pytest.mark.parametrize(
    ("submitted", "confirmed", "excused"),
    [(11, 12, True), (13.9, 14.1, True), (9, 9.9, False), (14.1, 14.2, False)],
    ids=["within", "the reply came later", "before", "after"],
)
def test_a_submit_is_excused_if_it_was_written_in_a_loss(
    submitted: float, confirmed: float, excused: bool
) -> None:
    job = Submitted(REQUEST, False, submitted_at=submitted, confirmed_at=confirmed)
    assert may_be_lost(job, [LOSS]) is excused
    assert not may_be_lost(Submitted(REQUEST, True, submitted, confirmed), [LOSS])
