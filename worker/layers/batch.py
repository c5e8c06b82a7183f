"""The input of one forward pass: a flat batch of tokens from several sequences.

A step maps sequences to numbers of tokens and may mix prefill and decode. Rows of sequences that
advance by one token come first: attention runs them together. The batch is prepared once per step
and passed to every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from worker.layers.transfer import to_device

SHORT = 16  # tokens of a chunk that kernels compute one by one


class Span(NamedTuple):
    """The next tokens of one sequence, starting at position `start`, in cache `slot`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    prompt_length: int  # of the whole sequence: some RoPE variants depend on it
    logits: int = 1  # number of last tokens whose logits are returned

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + self.length


class Following(NamedTuple):
    """The step after one of single tokens: the `rows` of that one that go on by the tokens that it
    draws. They are in the slots [low, high), and `longest` is the greatest position + 1."""

    rows: tuple[int, ...]
    low: int
    high: int
    longest: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [row, row + length) of the flat batch: several tokens of one sequence."""

    slot: int
    start: int
    length: int
    row: int


@dataclass(frozen=True)
class DecodeGroup:
    """The sequences that advance by one token, as a slot range [low, high) for attention.

    `dense`: they fill it in order; else slots of the range without a row see position 0 only, and
    their outputs are discarded.
    """

    size: int
    low: int
    high: int
    slots: Tensor  # [size] long
    positions: Tensor  # [size] long
    longest: int  # greatest position + 1
    dense: bool

    @cached_property
    def rows(self) -> Tensor | None:
        """[size] long: where the first rows of the batch are in the range; None if dense."""
        return None if self.dense else self.slots - self.low

    @cached_property
    def range_positions(self) -> Tensor:
        """[high - low] long."""
        return self.spread(self.positions)

    def spread(self, x: Tensor) -> Tensor:
        """[size, ...] → [high - low, ...]."""
        if self.rows is None:
            return x
        wide = x.new_zeros((self.high - self.low, *x.shape[1:]))
        return wide.index_copy_(0, self.rows, x)

    def collect(self, wide: Tensor) -> Tensor:
        """[high - low, ...] → [size, ...]."""
        return wide if self.rows is None else wide.index_select(0, self.rows)

    def visible(self, columns: int) -> Tensor:
        """Additive float mask [high - low, 1, 1, columns]: 0 where column <= position, else
        -inf."""
        column = torch.arange(columns, device=self.range_positions.device)
        hidden = column[None, :] > self.range_positions[:, None]
        mask = torch.zeros(hidden.shape, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class ShortGroup:
    """The decode group and the short chunks after it, as rows for kernels that compute each token
    as decode does: verified drafts have the bits that they would have one by one."""

    size: int  # all rows
    chunks: int  # number of short chunks
    slots: Tensor  # [size] long
    positions: Tensor  # [size] long
    low: int  # least slot
    high: int  # greatest slot + 1
    longest: int  # greatest position + 1


@dataclass(frozen=True, slots=True)
class LongGroup:
    """The chunks that are not short, for kernels that compute them together."""

    chunks: Tensor  # [n, 4] long, on the CPU: the fields of each Chunk
    high: int  # greatest slot + 1
    longest: int  # greatest position + 1


@dataclass(frozen=True, slots=True)
class Pieces:
    """All chunks, cut for kernels that compute some tokens of one chunk at a time."""

    table: Tensor  # [n, 4] long: first row, rows, slot, first position
    high: int  # greatest slot + 1
    longest: int  # greatest position + 1


Group = TypeVar("Group", DecodeGroup, ShortGroup)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, with their positions and cache slots.

    The tensors of a batch that was prepared, but for `long`, are views of `packed`, so that one
    copy takes them to the device, or to the place of an earlier step. `following` packs nothing.
    """

    packed: Tensor | None  # long, see `_parts`
    token_ids: Tensor  # [tokens] long
    positions: Tensor  # [tokens] long
    prompt_lengths: Tensor  # [tokens] long, of each row's sequence
    decode: DecodeGroup | None  # the first `decode.size` rows
    chunks: tuple[Chunk, ...]  # the rows after them
    short: ShortGroup | None  # with the first chunks, if they are short
    long: LongGroup | None  # the other chunks
    logits_rows: Tensor | None  # [n] long: rows that need logits; None: all
    longest: int  # greatest position + 1
    highest: int  # greatest token id
    masks: dict[int, Tensor]  # decode masks by number of columns, made on first use
    cut: dict[int, Pieces] = field(default_factory=dict)  # by number of tokens, likewise

    @property
    def small(self) -> bool:
        """True if no chunk is long."""
        return self.long is None

    def decode_mask(self, columns: int) -> Tensor:
        """`DecodeGroup.visible`, computed once per step and number of columns."""
        if columns not in self.masks:
            assert self.decode is not None
            self.masks[columns] = self.decode.visible(columns)
        return self.masks[columns]

    def pieces(self, most: int) -> Pieces:
        """The chunks, cut into pieces of at most `most` tokens, computed once per step."""
        if most not in self.cut:
            table = [
                number
                for one in self.chunks
                for at in range(0, one.length, most)
                for number in (one.row + at, min(most, one.length - at), one.slot, one.start + at)
            ]
            self.cut[most] = Pieces(
                to_device(table, self.token_ids.device).view(-1, 4),
                high=max(one.slot for one in self.chunks) + 1,
                longest=max(one.start + one.length for one in self.chunks),
            )
        return self.cut[most]

    @property
    def shape(self) -> tuple[int, ...]:
        """Equal for steps that make the same calls: the numbers of rows of logits and of single
        tokens, then the lengths of the chunks."""
        wanted = 0 if self.logits_rows is None else len(self.logits_rows)
        singles = self.decode.size if self.decode else 0
        return (wanted, singles, *[one.length for one in self.chunks])

    @classmethod
    def prepare(cls, spans: Iterable[Span], device: torch.device) -> tuple[Batch, list[Span]]:
        """Lay spans out flat. Returns the batch, and the spans in the order of their rows."""
        ordered = row_order(spans)
        return cls.lay_out(ordered, device), ordered

    @classmethod
    def lay_out(cls, spans: Sequence[Span], device: torch.device) -> Batch:
        """A batch of spans that are in `row_order`."""
        singles = [span for span in spans if len(span.token_ids) == 1]
        if len(singles) == len(spans) and all([span.logits == 1 for span in spans]):
            return cls._of_singles(singles, device)
        short = [span for span in spans if 1 < span.length <= SHORT]
        ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        wanted: list[int] = []
        chunks: list[Chunk] = []
        for span in spans:
            row = len(ids)
            if span.length > 1:
                chunks.append(Chunk(span.slot, span.start, span.length, row))
            ids.extend(span.token_ids)
            positions.extend(range(span.start, span.end))
            lengths.extend([span.prompt_length] * span.length)
            wanted.extend(range(len(ids) - span.logits, len(ids)))
        everything = len(wanted) == len(ids)
        if everything:
            wanted = []
        slots = [span.slot for span in singles + short for _ in span.token_ids]
        packed = to_device([*ids, *positions, *lengths, *slots, *wanted], device)
        parts = _parts(packed, len(ids), len(wanted))
        token_ids, placed, prompt_lengths, in_slots, logits_rows = parts
        return cls(
            packed=packed,
            token_ids=token_ids,
            positions=placed,
            prompt_lengths=prompt_lengths,
            decode=_decode_group(singles, in_slots, placed) if singles else None,
            chunks=tuple(chunks),
            short=_short_group(singles + short, len(short), in_slots, placed) if short else None,
            long=_long_group(chunks[len(short) :]),
            logits_rows=None if everything else logits_rows,
            longest=max(span.end for span in spans),
            highest=max(ids),
            masks={},
        )

    @classmethod
    def _of_singles(cls, spans: list[Span], device: torch.device) -> Batch:
        """Single tokens that all need logits, as most steps of large batches are."""
        ids = [span.token_ids[0] for span in spans]
        positions = [span.start for span in spans]
        lengths = [span.prompt_length for span in spans]
        packed = to_device([*ids, *positions, *lengths, *[s.slot for s in spans]], device)
        token_ids, placed, prompt_lengths, slots, _ = _parts(packed, len(ids), 0)
        longest = max(positions) + 1
        low, high = spans[0].slot, spans[-1].slot + 1
        dense = high - low == len(spans)
        return cls(
            packed=packed,
            token_ids=token_ids,
            positions=placed,
            prompt_lengths=prompt_lengths,
            decode=DecodeGroup(len(ids), low, high, slots, placed, longest, dense),
            chunks=(),
            short=None,
            long=None,
            logits_rows=None,
            longest=longest,
            highest=max(ids),
            masks={},
        )

    def clone(self) -> Batch:
        """The same in memory of its own, of a batch that was prepared."""
        assert self.packed is not None
        packed, tokens = self.packed.clone(), len(self.token_ids)
        rows = 0 if self.logits_rows is None else len(self.logits_rows)
        token_ids, positions, lengths, slots, logits_rows = _parts(packed, tokens, rows)
        return replace(
            self,
            packed=packed,
            token_ids=token_ids,
            positions=positions,
            prompt_lengths=lengths,
            decode=self.decode and _placed(self.decode, slots, positions),
            short=self.short and _placed(self.short, slots, positions),
            logits_rows=None if self.logits_rows is None else logits_rows,
            masks={},
            cut={},
        )

    @classmethod
    def of_no_sequence(cls, rows: int, device: torch.device) -> Batch:
        """A decode group of `rows` rows whose slot is -1, to `take` steps with as many or fewer."""
        packed = torch.zeros(4 * rows, dtype=torch.long, device=device)
        token_ids, positions, lengths, slots, _ = _parts(packed, rows, 0)
        slots.fill_(-1)
        group = DecodeGroup(rows, 0, 0, slots, positions, longest=0, dense=True)
        return cls(
            packed=packed,
            token_ids=token_ids,
            positions=positions,
            prompt_lengths=lengths,
            decode=group,
            chunks=(),
            short=None,
            long=None,
            logits_rows=None,
            longest=0,
            highest=0,
            masks={},
        )

    def take(self, other: Batch) -> None:
        """Write the rows of another decode group over the first ones of `of_no_sequence`."""
        assert self.packed is not None and other.packed is not None
        mine = self.packed.view(4, -1)
        rows = len(other.token_ids)
        mine[:, :rows] = other.packed.view(4, rows)
        if rows < mine.shape[1]:
            mine[3, rows:] = -1

    def advanced(self, token_ids: Tensor, following: Following) -> Batch:
        """The step after this one of single tokens, which draws `token_ids` [tokens]. They are not
        known on the host, and in range."""
        assert self.packed is not None and not self.chunks
        rows, device = following.rows, self.packed.device
        packed = self.packed.view(4, -1)
        if len(rows) < packed.shape[1]:
            chosen = to_device(rows, device, torch.long)
            packed, token_ids = packed.index_select(1, chosen), token_ids.index_select(0, chosen)
        else:
            packed = packed.clone()
        packed[0] = token_ids
        packed[1] += 1
        flat = packed.view(-1)
        ids, positions, lengths, slots, _ = _parts(flat, len(rows), 0)
        _, low, high, longest = following
        dense = high - low == len(rows)
        return Batch(
            packed=flat,
            token_ids=ids,
            positions=positions,
            prompt_lengths=lengths,
            decode=DecodeGroup(len(rows), low, high, slots, positions, longest, dense),
            chunks=(),
            short=None,
            long=None,
            logits_rows=None,
            longest=longest,
            highest=0,
            masks={},
        )

    def following(self, token_ids: Tensor) -> Batch:
        """The next step of a small batch with one row of logits for each sequence, in which each
        advances by one token of `token_ids` [sequences]."""
        group = self.short or self.decode
        assert group is not None and self.small
        slots, last = self.select_logits_rows(group.slots), self.select_logits_rows(self.positions)
        positions = last + 1
        decode = DecodeGroup(
            size=len(token_ids),
            low=group.low,
            high=group.high,
            slots=slots,
            positions=positions,
            longest=self.longest + 1,
            dense=group.dense if isinstance(group, DecodeGroup) else group.high - group.low == 1,
        )
        return Batch(
            packed=None,
            token_ids=token_ids,
            positions=positions,
            prompt_lengths=self.select_logits_rows(self.prompt_lengths),
            decode=decode,
            chunks=(),
            short=None,
            long=None,
            logits_rows=None,
            longest=self.longest + 1,
            highest=self.highest,
            masks={},
        )

    def select_logits_rows(self, hidden: Tensor) -> Tensor:
        """hidden [tokens, ...] → [n, ...], the rows that need logits."""
        return hidden if self.logits_rows is None else hidden.index_select(0, self.logits_rows)


def row_order(spans: Iterable[Span]) -> list[Span]:
    """Spans in the order of their rows: single tokens by slot, then short chunks, then the others.
    Short chunks are ordered by length: fewer shapes of steps, of which each is recorded for
    itself."""
    spans = [*spans]
    singles = sorted((s for s in spans if s.length == 1), key=lambda s: s.slot)
    if len(singles) == len(spans):
        return singles
    short = sorted((s for s in spans if 1 < s.length <= SHORT), key=lambda s: s.length)
    return singles + short + [s for s in spans if s.length > SHORT]


def _parts(packed: Tensor, tokens: int, wanted: int) -> tuple[Tensor, ...]:
    """Token ids, positions and prompt lengths of all rows, slots of those before long chunks, and
    the rows that need logits."""
    slots = len(packed) - 3 * tokens - wanted
    parts: tuple[Tensor, ...] = packed.split((tokens, tokens, tokens, slots, wanted))
    return parts


def _placed(group: Group, slots: Tensor, positions: Tensor) -> Group:
    """The group at the beginning of these rows."""
    return replace(group, slots=slots[: group.size], positions=positions[: group.size])


def _short_group(spans: list[Span], chunks: int, slots: Tensor, positions: Tensor) -> ShortGroup:
    return ShortGroup(
        size=len(slots),
        chunks=chunks,
        slots=slots,
        positions=positions[: len(slots)],
        low=min(span.slot for span in spans),
        high=max(span.slot for span in spans) + 1,
        longest=max(span.end for span in spans),
    )


def _long_group(chunks: Sequence[Chunk]) -> LongGroup | None:
    if not chunks:
        return None
    return LongGroup(
        chunks=torch.tensor([(c.slot, c.start, c.length, c.row) for c in chunks]),
        high=max(c.slot for c in chunks) + 1,
        longest=max(c.start + c.length for c in chunks),
    )


def _decode_group(singles: list[Span], slots: Tensor, positions: Tensor) -> DecodeGroup:
    low, high = singles[0].slot, singles[-1].slot + 1
    return DecodeGroup(
        size=len(singles),
        low=low,
        high=high,
        slots=slots[: len(singles)],
        positions=positions[: len(singles)],
        longest=max(s.end for s in singles),
        dense=high - low == len(singles),
    )
