"""Figures of long contexts."""

from __future__ import annotations

from bench.contexts import figures
from bench.serving import Served


def test_prefill_ends_with_the_last_first_token_and_decoding_begins_there() -> None:
    served = Served([0.0, 0.0], [[2.0, 4.0, 5.0, 6.0], [4.0, 5.0, 6.0, 7.0]])
    found = figures([([1] * 100, 4)] * 2, served, 5 << 20)
    assert found == {"prefill tokens/s": 50.0, "decode tokens/s": 2.0, "peak RSS MiB": 5.0}
