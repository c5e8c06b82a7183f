"""Embedding and head, with separate weights and tied."""

from __future__ import annotations

import pytest
import torch

from worker.layers.embedding import Embedding, Head
from worker.layers.linear import LinearFactory

VOCAB, HIDDEN = 11, 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_its_own_weight_or_the_embedding(tied: bool, dtype: torch.dtype) -> None:
    embedding = Embedding(VOCAB, HIDDEN, dtype, CPU)
    head = Head(embedding, VOCAB, HIDDEN, tied, LinearFactory(dtype, CPU))
    random = torch.Generator().manual_seed(0)
    given = {}
    for name, slot in head.weight_map("embed", "head").items():
        assert slot.shape == (VOCAB, HIDDEN)
        given[name] = torch.randn(slot.shape, generator=random).to(dtype)
        slot.load(given[name])
    assert set(given) == ({"embed"} if tied else {"embed", "head"})
    ids = torch.tensor([3, 0, 3, 10])
    assert torch.equal(embedding(ids), given["embed"][ids])
    x = torch.randn(2, HIDDEN, generator=random).to(dtype)
    logits = head(x)
    assert logits.dtype == dtype
    expected = x @ given["embed" if tied else "head"].T
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
