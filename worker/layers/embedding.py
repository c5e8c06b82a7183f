"""Token embeddings, and the output head, which may be tied to them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import elementwise, library
from worker.kernels import quantised as kernels
from worker.kernels.library import TYPE_CODES
from worker.layers.linear import Linear, LinearFactory
from worker.layers.shard import WHOLE, Shard
from worker.layers.weights.quantised_tensor import Compress, QuantisedTensor, Weight, place
from worker.layers.weights.slot import WeightSlot


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit of each row [rows, vocab], as float32, and its first id: [rows] each."""
    if library.serves(logits):
        return elementwise.argmax(logits)
    best, chosen = logits.max(dim=-1)
    return best.float(), chosen


class Embedding:
    """A table [vocab, hidden] indexed by token id. Of a quantised table, only the rows that are
    used are dequantised. Each of several ranks has a part of the rows."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        compress: Compress | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self._shape, self._dtype, self._device = (vocab_size, hidden_size), dtype, device
        self._compress, self._shard = compress, shard
        self._rows = shard.padded_part(vocab_size)
        self._table: Weight = torch.empty(0, dtype=dtype, device=device)

    @property
    def recordable(self) -> bool:
        """True if kernels compute a call, so that it can be recorded."""
        return not isinstance(self._table, QuantisedTensor) or self._unpacks(self._table)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens], which are in range → [tokens, hidden]."""
        table = self._table
        if not isinstance(table, QuantisedTensor):
            return F.embedding(ids, table) if self._shard.whole else self._of_ranks(ids, table)
        if self._unpacks(table):
            return kernels.rows(table.type.name, table.shape[1], table.blocks, ids, self._dtype)
        return table[ids].dequantise(self._dtype)

    def _of_ranks(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows of all ranks: each token is in the table of one."""
        if library.serves(table):
            found = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
            elementwise.gather_into(found, table, ids, self._rows.start)
        else:
            rows = ids - self._rows.start
            others = (rows < 0) | (rows >= len(table))
            padded = table if len(table) else table.new_zeros(1, table.shape[1])
            found = F.embedding(rows.masked_fill(others, 0), padded)
            found = found.masked_fill(others[:, None], 0)
        return self._shard.sum(found)

    def _unpacks(self, table: QuantisedTensor) -> bool:
        """True if a kernel reads rows of the table."""
        return (
            self._device.type == "cpu"
            and self._dtype in TYPE_CODES
            and table.blocks.is_contiguous()
            and kernels.serves(table.type.name, table.shape[1])
        )

    def slot(self, *also: WeightSlot) -> WeightSlot:
        """Slot of the table. The same tensor also fills the slots `also` (a tied head)."""

        def load(tensor: Tensor) -> None:
            keep(tensor if self._compress is None else self._compress(tensor))

        def keep(table: Weight) -> None:
            # A tensor that has the right dtype already is kept as it is. On the CPU that is a view
            # of the mapped file: only the rows that are used become resident.
            # A head takes its part of the whole table itself.
            mine = table if self._shard.whole else table[self._rows]
            self._table = place(mine, self._dtype, self._device)
            for other in also:
                other.fill(self._table if self._shard.whole else table)

        return WeightSlot(self._shape, load, load_quantised=keep)


class Head:
    """Hidden states → logits. If `tied`, its weight is the embedding's tensor. Of several ranks,
    the first one has all logits, and each other one those that it has computed."""

    def __init__(
        self,
        embedding: Embedding,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        linears: LinearFactory,
    ) -> None:
        self._embedding, self._tied = embedding, tied
        self._vocab_size, self._shard = vocab_size, linears.shard
        self._linear: Linear = linears.vocabulary(hidden_size, vocab_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, hidden] → logits [rows, vocab], in the dtype of x."""
        logits = self._linear(x)
        if self._shard.whole:
            return logits
        return self._shard.gather(logits)[:, : self._vocab_size]

    def weight_map(self, embedding_name: str, head_name: str) -> dict[str, WeightSlot]:
        """Slots of the embedding and the head by their checkpoint names."""
        head = self._linear.weight_slot()
        if self._tied:
            return {embedding_name: self._embedding.slot(head)}
        return {embedding_name: self._embedding.slot(), head_name: head}
