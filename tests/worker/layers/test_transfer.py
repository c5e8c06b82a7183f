"""The border of host and device, with the ways of a device on the CPU."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch

from worker.layers import transfer
from worker.layers.transfer import read_together, take, to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("accelerator", [False, True])
def test_tensors_that_are_read_together_keep_their_types(
    accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "is_accelerator", lambda device: accelerator)
    numbers, ids, flags, table, empty = read_together(
        torch.tensor([0.1, -inf]),
        torch.tensor([151_935, 2**40]),
        torch.tensor([True, False]),
        torch.tensor([[1, 2], [3, 4]]),
        torch.zeros(0, 3),
    )
    assert numbers == torch.tensor([0.1, -inf]).tolist()
    assert ids == [151_935, 2**40] and all(type(one) is int for one in ids)
    assert flags == [True, False] and type(flags[0]) is bool
    assert (table, empty) == ([[1, 2], [3, 4]], [])
    assert isnan(read_together(torch.tensor([nan]), torch.tensor([1]))[0][0])
    assert read_together() == []


def test_rows_are_taken_by_their_numbers() -> None:
    values = torch.arange(8).view(4, 2)
    assert take(values, [2, 0, 2]).tolist() == [[4, 5], [0, 1], [4, 5]]
    assert take(values, [0, 1, 2, 3]) is values
    assert take(values, [0, 1]).tolist() == [[0, 1], [2, 3]]
    assert to_device([1, 2], CPU, torch.float32).tolist() == [1.0, 2.0]
