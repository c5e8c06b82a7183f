"""Both implementations of chunk attention compute the same."""

from __future__ import annotations

import pytest
import torch

from worker.layers import attention


@pytest.mark.parametrize("window", [None, 1, 7, 50, 500])
@pytest.mark.parametrize(("length", "seen"), [(1, 1), (1, 90), (70, 70), (130, 200), (33, 300)])
def test_attention_by_blocks_equals_the_fused_kernel(
    length: int, seen: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(length + seen)
    if window is not None:
        seen = min(seen, length + window - 1)  # what WindowKVCache returns
    q = torch.randn(2, 3, length, 16, generator=random)
    keys, values = (torch.randn(2, seen, 16, generator=random) for _ in range(2))
    expected = attention._fused(q, keys, values, window, 0.3)
    for scores in (attention.BLOCK_SCORES, 1):  # also the smallest blocks
        monkeypatch.setattr(attention, "BLOCK_SCORES", scores)
        output = attention._by_blocks(q, keys, values, window, 0.3)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
