"""dtypes are known by this project's short names, by torch's and by vLLM's."""

from __future__ import annotations

import pytest
import torch

from jobs.errors import InvalidRequest
from worker.checkpoint.dtypes import FROM_OPTION
from worker.device import choose_dtype
from worker.option_values import DTYPES

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
        (("fp16", "float16", "half", "torch.float16"), torch.float16),
        (("fp32", "float32", "float", "torch.float32"), torch.float32),
    ],
    ids=str,
)
def test_each_name_selects_its_dtype(names: tuple[str, ...], dtype: torch.dtype) -> None:
    for name in names:
        assert choose_dtype(name, torch.bfloat16, CPU) is dtype


@pytest.mark.parametrize("name", ["int8", "float64", "BF16", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidRequest, match="possible: auto, bf16, bfloat16, fp16") as caught:
        choose_dtype(name, torch.bfloat16, CPU)
    assert caught.value.param == "dtype"


def test_the_command_line_knows_the_same_names() -> None:
    assert set(DTYPES) == set(FROM_OPTION)
