"""Token embeddings, and the output head, which may be tied to them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import elementwise, library
from worker.layers.linear import Linear, LinearFactory
from worker.layers.weight import Parameter, WeightSlot


class Embedding:
    """A table [vocab, hidden] indexed by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (vocab_size, hidden_size)
        self._table = Parameter(*self._shape, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] → [tokens, hidden]."""
        return F.embedding(ids, self._table.value)

    def slot(self, *also: WeightSlot) -> WeightSlot:
        """Slot of the table. The same tensor also fills the slots `also` (a tied head)."""

        def load(tensor: Tensor) -> None:
            self._table.slot().load(tensor)
            for other in also:
                other.load(tensor)

        return WeightSlot(self._shape, load)


class Head:
    """Hidden states → logits. If `tied`, its weight is the embedding's tensor."""

    def __init__(
        self,
        embedding: Embedding,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        linears: LinearFactory,
    ) -> None:
        self._embedding, self._tied = embedding, tied
        self._linear: Linear = linears.column(hidden_size, vocab_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, hidden] → float32 logits [rows, vocab]."""
        logits = self._linear(x)
        if logits.dtype is torch.bfloat16 and library.serves(logits):
            return elementwise.widen(logits)
        return logits.float()

    def weight_map(self, embedding_name: str, head_name: str) -> dict[str, WeightSlot]:
        """Slots of the embedding and the head by their checkpoint names."""
        head = self._linear.weight_slot()
        if self._tied:
            return {embedding_name: self._embedding.slot(head)}
        return {embedding_name: self._embedding.slot(), head_name: head}
