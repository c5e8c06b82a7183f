"""The curve of tokens per second by batch."""

from __future__ import annotations

from bench.curve import curve_rows, falls


def test_a_curve_that_rises_has_no_fall() -> None:
    assert falls({1: 25.0, 2: 48.0, 4: 88.0}) == []


def test_each_batch_below_a_smaller_one_is_a_fall_beside_the_best_of_them() -> None:
    curve = {4: 88.0, 5: 108.0, 6: 72.0, 8: 96.0, 10: 108.0, 12: 138.0}
    assert [(fall.batch, fall.smaller) for fall in falls(curve)] == [(6, 5), (8, 5)]
    assert falls(curve)[0].ratio == 72 / 108


def test_the_order_of_the_batches_does_not_matter() -> None:
    assert falls({6: 72.0, 5: 108.0}) == falls({5: 108.0, 6: 72.0})


def test_a_step_makes_one_token_for_each_sequence() -> None:
    first, second = curve_rows("bf16", {1: 25.0, 4: 88.0})
    assert first == {"format": "bf16", "batch": 1, "tokens/s": 25.0, "steps/s": 25.0}
    assert second == {"format": "bf16", "batch": 4, "tokens/s": 88.0, "steps/s": 22.0}
