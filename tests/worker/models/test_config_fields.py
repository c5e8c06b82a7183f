"""Fields of a config: what is accepted, and the error that names the field otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import JobError
from worker.models.config_fields import Fields

NOT_FINITE = [float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("value", [*NOT_FINITE, -1, 0, True, "1", [1]])
def test_a_number_is_positive_and_finite(value: Any) -> None:
    with pytest.raises(JobError, match="theta"):
        Fields({"theta": value}, "config.json").number("theta")
    assert Fields({"theta": 2}, "config.json").number("theta") == 2.0


@pytest.mark.parametrize("value", [*([0.5, one] for one in NOT_FINITE), [1, True], ["1"], 1])
def test_numbers_are_a_list_of_finite_numbers(value: Any) -> None:
    with pytest.raises(JobError, match="factors"):
        Fields({"factors": value}, "config.json").numbers("factors")
    assert Fields({"factors": [1, -0.5]}, "config.json").numbers("factors") == [1, -0.5]


@pytest.mark.parametrize("value", [["a", 1], "a", [None]])
def test_texts_are_a_list_of_strings(value: Any) -> None:
    with pytest.raises(JobError, match="tokens"):
        Fields({"tokens": value}, "config.json").texts("tokens")
    assert Fields({"tokens": ["a", ""]}, "config.json").texts("tokens") == ["a", ""]
