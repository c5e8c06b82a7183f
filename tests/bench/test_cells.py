"""Ratios in the tables beside peers."""

from __future__ import annotations

from bench.cells import beside
from bench.quantised_types import OWN_Q8_0, type_row


def test_ours_is_compared_with_the_best_of_the_others() -> None:
    rates = {"chatjobs": 120.0, "llama.cpp": 60.0, "OpenVINO": 100.0}
    assert beside(rates, ["llama.cpp", "OpenVINO"]) == 1.2


def test_a_peer_that_cannot_run_is_left_out_of_the_comparison() -> None:
    rates = {"chatjobs": 120.0, "llama.cpp": 60.0, "OpenVINO": None}
    assert beside(rates, ["llama.cpp", "OpenVINO"]) == 2.0
    assert beside(rates, ["OpenVINO"]) is None
    assert beside(rates, []) is None


def test_a_type_is_compared_with_llama_cpp_and_with_our_q8_0() -> None:
    rates = {"chatjobs": 90.0, "llama.cpp": None, OWN_Q8_0: 100.0}
    row = type_row("IQ2_S", "re-encoded as Q8_0", "decode 1", rates)
    assert row["ours / llama.cpp"] is None
    assert row["ours / our Q8_0"] == 0.9


def test_q8_0_is_its_own_reference() -> None:
    row = type_row("Q8_0", "integer products", "decode 1", {"chatjobs": 90.0, "llama.cpp": 45.0})
    assert (row["ours / llama.cpp"], row["ours / our Q8_0"]) == (2.0, 1.0)
