"""JSON is the same whether pydantic_core or the standard library encodes and decodes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.encoding import from_json, to_json

TEXT = st.text(st.characters())  # with lone surrogates
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_again(value: Any) -> None:
    text = to_json(value)
    assert text.encode().decode() == text
    assert from_json(text) == json.loads(text) == value
    assert from_json(json.dumps(value)) == value


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 10**400, -(2**63), 1e-300])
def test_numbers_of_any_size(value: float) -> None:
    assert from_json(to_json(value)) == value == json.loads(to_json(value))


def test_deep_values_are_encoded_and_decoded_as_json_does() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert from_json(to_json(deep)) == deep


def test_other_values_raise_what_json_raises() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json(object())
    with pytest.raises(json.JSONDecodeError):
        from_json("{")
    with pytest.raises(RecursionError):
        from_json("[" * 100_000 + "]" * 100_000)
