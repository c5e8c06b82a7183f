"""The shares of models in the budget of a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import JobError
from worker.backend import Footprint
from worker.memory_amount import MemoryAmount
from worker.residency.budget import RESERVE, share_out

SIZES = st.integers(0, 1000)


def model(name: str, weights: int, least: int = 10, most: int = 10**6) -> Footprint:
    return Footprint(name, name, weights, 0, least_cache=least, most_cache=most)


@given(
    st.lists(st.tuples(SIZES, SIZES, SIZES, st.booleans()), min_size=1, max_size=6),
    st.integers(1, 4000),
)
def test_pinned_models_and_any_other_one_fit_together(
    sizes: list[tuple[int, int, int, bool]], budget: int
) -> None:
    models = [
        Footprint(f"m{i}", f"m{i}", weights, activations, least, most_cache=2 * least)
        for i, (weights, activations, least, _) in enumerate(sizes)
    ]
    pinned = {f"m{i}" for i, one in enumerate(sizes) if one[3]}
    least = {one.name: one.weights + one.activations + one.least_cache for one in models}
    others = [least[name] for name in least if name not in pinned]
    fits = sum(least[name] for name in pinned) + max(others, default=0) <= budget
    try:
        shares = share_out(models, budget, pinned=pinned)
    except JobError as error:
        assert error.code == "out_of_memory" and not fits
        return
    assert fits
    kept = sum(shares[name].total for name in pinned)
    assert (
        kept + max((shares[one].total for one in least if one not in pinned), default=0) <= budget
    )
    for one in models:
        assert one.least_cache <= shares[one.name].cache <= one.most_cache


def test_models_that_fit_together_stay_together() -> None:
    shares = share_out([model("a", 300), model("b", 200), model("c", 200)], 1000)
    assert sum(one.total for one in shares.values()) <= 1000
    assert [shares[name].cache for name in "abc"] == [10 + (1000 - 730) // 3] * 3


def test_where_no_two_models_fit_each_takes_the_whole_budget() -> None:
    shares = share_out([model("a", 600), model("b", 600)], 1000)
    assert [one.total for one in shares.values()] == [1000, 1000]


def test_caches_of_given_sizes_and_of_the_longest_batch_are_not_enlarged() -> None:
    models = [model("a", 300), model("b", 200, most=30)]
    shares = share_out(models, 1000, pinned="a", caches={"a": 77})
    assert (shares["a"].cache, shares["b"].cache) == (77, 30)


def test_models_that_would_fit_with_hardly_any_cache_take_turns() -> None:
    budget = 1000
    each = int(budget * (1 - RESERVE)) // 2 - 10
    assert share_out([model(name, each) for name in "ab"], budget)["a"].total <= budget // 2
    assert share_out([model(name, each + 1) for name in "ab"], budget)["a"].total == budget


def test_a_model_that_fits_nowhere_is_refused_by_its_parts() -> None:
    with pytest.raises(JobError, match=r"big takes .*weights 977 KiB.* beside the pinned models"):
        share_out([model("big", 10**6), model("small", 10)], 10**6, pinned=["small"])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("90%", 900), ("100%", 1000), (" 0.5 % ", 5), ("1kB", 1000), ("500", 500), (".5k", 500)],
)
def test_an_amount_of_memory_is_a_share_or_a_size(text: str, nbytes: int) -> None:
    assert MemoryAmount.parse(text).of(1000, "cpu") == nbytes
    assert MemoryAmount.parse("1.5GiB").nbytes == 3 * 2**29


@pytest.mark.parametrize(
    "text", ["", "0", "101%", "0%", "-5", "x", "5 apples", "1e400", "%", "nan"]
)
def test_anything_else_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(JobError, match="is no amount of memory"):
        MemoryAmount.parse(text)


def test_more_memory_than_the_device_has_is_refused() -> None:
    with pytest.raises(JobError, match=r"are more than the 1\.0 GiB that cpu has"):
        MemoryAmount.parse("2GiB").of(2**30, "cpu")
