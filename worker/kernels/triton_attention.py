"""Attention on GPUs, in Triton: queries of single tokens over the columns of their slots, cut into
splits that run side by side, and those of chunks.

How the columns of a single token are cut depends on its own position alone, and so do its sums.
Importing this needs the package `triton`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.attention import PAGE, Stored
from worker.kernels.triton_launch import kernel

HOPPER = 232_448  # bytes of shared memory that a program may have
BLOCK = 64  # most columns that are read at a time
# Most bytes of their keys, by the shared memory at least. Several blocks are there at a time.
BLOCK_BYTES = {160_000: 16_384, 96_000: 8_192, 0: 4_096}
SPLITS = 32  # of a row at most, each with LEAST columns or more
LEAST = 256
QUERIES = 64  # most of a program that computes chunks; a quarter in float32
QUERY_BYTES = {96_000: 32_768, 0: 16_384}  # most bytes of them, likewise
CHUNK_WARPS = 4
GROUP = 16  # query heads of a program: the fewest rows that a tensor core multiplies


def attend_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Stored,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """As that of `worker.kernels.attention`, but each row belongs to another sequence. A row with
    a slot below 0 stores nothing; it gives zeros."""
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    keys, values = stored.keys, stored.values
    repeats = heads // kv_heads
    width, group = _padded(dim), max(GROUP, _padded(repeats))
    splits = min(SPLITS, triton.cdiv(stored.columns, LEAST))  # that any row can have here
    whole = splits == 1 and sinks is None
    partial = sums = out
    if not whole:
        partial = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=q.device)
        sums = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    window = stored.window or 0
    block = columns(width, q.dtype, _memory(q.device))
    pages, places = _places(stored)
    new = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    with torch.cuda.device_of(q):  # Triton starts kernels on the current device
        _attend(
            (rows, kv_heads, splits),
            q,
            k,
            v,
            keys,
            values,
            pages,
            slots,
            positions,
            partial,
            sums,
            out,
            scale,
            cap or 0.0,
            *(q.stride(0), q.stride(1), *new, *places),
            heads,
            window,
            dim=dim,
            width=width,
            repeats=repeats,
            group=group,
            block=block,
            most_splits=SPLITS,
            splits=splits,
            least=LEAST,
            capped=cap is not None,
            whole=whole,
            page=0 if stored.pages is None else PAGE,
        )
        if whole:
            return
        _combine(
            (rows, heads),
            partial,
            sums,
            slots,
            positions,
            sums if sinks is None else sinks,
            out,
            window,
            heads,
            dim=dim,
            width=width,
            block=block,
            most_splits=SPLITS,
            splits=splits,
            padded=triton.next_power_of_2(splits),
            least=LEAST,
            has_sinks=sinks is not None,
            warps=1,
        )


def columns(width: int, dtype: torch.dtype, memory: int) -> int:
    """The columns that a program reads at a time, of heads with `width` channels, where programs
    have so many bytes of shared memory."""
    nbytes = next(most for least, most in BLOCK_BYTES.items() if memory >= least)
    return max(16, min(BLOCK, nbytes // (width * dtype.itemsize)))


def tokens(width: int, dtype: torch.dtype, memory: int) -> int:
    """The tokens of a chunk that a program computes, likewise."""
    nbytes = next(most for least, most in QUERY_BYTES.items() if memory >= least)
    most = QUERIES if dtype.itemsize == 2 else QUERIES // 4
    return max(16, min(most, nbytes // (width * dtype.itemsize)))


def queries(q: Tensor) -> int:
    """The tokens of a chunk that `attend_chunks` computes in one program, of q [rows, heads,
    head_dim]."""
    return tokens(_padded(q.shape[2]), q.dtype, _memory(q.device))


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Stored,
    pieces: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """As that of `worker.kernels.attention`, for caches without a window. pieces, int64 [n, 4]: of
    at most `queries` tokens of a chunk each, the first row, the number of rows, the slot, and the
    first position."""
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    keys, values = stored.keys, stored.values
    width = _padded(dim)
    block = columns(width, q.dtype, _memory(q.device))
    page = 0 if stored.pages is None else PAGE
    sizes = {"dim": dim, "width": width, "most": queries(q), "page": page}
    pages, places = _places(stored)
    with torch.cuda.device_of(q):
        _append_pieces(
            (len(pieces), kv_heads),
            k,
            v,
            keys,
            values,
            pages,
            pieces,
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), *places),
            **sizes,
        )
        _attend_pieces(
            (len(pieces), heads),
            q,
            keys,
            values,
            pages,
            pieces,
            q if sinks is None else sinks,
            out,
            scale,
            cap or 0.0,
            *(q.stride(0), q.stride(1), *places),
            heads // kv_heads,
            heads,
            block=block,
            capped=cap is not None,
            has_sinks=sinks is not None,
            **sizes,
            warps=CHUNK_WARPS,
        )


def _places(stored: Stored) -> tuple[Tensor, tuple[int, int, int]]:
    """`Stored.pages`, or any tensor; and elements between slots (or pages) of a cache, between
    heads, and between slots of `pages`."""
    keys, pages = stored.keys, stored.pages
    if pages is None:
        return keys, (keys.stride(0), keys.stride(1), 0)
    return pages, (keys.stride(0), keys.stride(1), pages.stride(0))


@cache
def _memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0)


def _padded(size: int) -> int:
    """A power of two, and at least 16: what `tl.dot` multiplies."""
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit
def _place(
    pages,
    slot,
    column,
    known,
    slot_stride,
    head_stride,
    entries,
    head,
    dim: tl.constexpr,
    page: tl.constexpr,
):
    """Elements before columns of a slot and a head. `page`: its tokens; 0: there are no pages."""
    if page > 0:
        number = tl.load(pages + slot * entries + column // page, mask=known, other=0).to(tl.int64)
        return number * slot_stride + head * head_stride + (column % page) * dim
    return slot * slot_stride + head * head_stride + column * dim


@triton.jit
def _range(slots, positions, row, window, block: tl.constexpr, most_splits: tl.constexpr, least):
    """The slot, the number of columns that a row sees, and how many of them a split has."""
    slot = tl.load(slots + row)
    length = tl.load(positions + row) + 1
    if window > 0:
        length = tl.minimum(length, window)
    length = tl.where(slot < 0, 0, length)
    share = tl.maximum(least, tl.cdiv(tl.cdiv(length, most_splits), block) * block)
    return slot, length, share


@kernel
def _attend(
    q,
    k,
    v,
    keys,
    values,
    pages,
    slots,
    positions,
    partial,
    sums,
    out,
    scale,
    cap,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    slot_stride,
    head_stride,
    entries,
    heads,
    window,
    dim: tl.constexpr,
    width: tl.constexpr,
    repeats: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    most_splits: tl.constexpr,
    splits: tl.constexpr,
    least: tl.constexpr,
    capped: tl.constexpr,
    whole: tl.constexpr,
    page: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, length, share = _range(slots, positions, row, window, block, most_splits, least)
    begin = split * share
    end = tl.minimum(begin + share, length)
    g, d = tl.arange(0, group), tl.arange(0, width)
    mine = head * repeats + g
    real_g, real_d = g < repeats, d < dim
    added = tl.load(positions + row)
    if window > 0:
        added = added % window
    if (begin <= added) & (added < end):  # no other program reads it
        to = d + _place(
            pages, slot, added, slot >= 0, slot_stride, head_stride, entries, head, dim, page
        )
        tl.store(keys + to, tl.load(k + row * k_row + head * k_head + d, mask=real_d), mask=real_d)
        tl.store(
            values + to, tl.load(v + row * v_row + head * v_head + d, mask=real_d), mask=real_d
        )
        tl.debug_barrier()  # all threads of the program read what some have stored
    to_out = out + (row * heads + mine[:, None]) * dim + d[None, :]
    real = real_g[:, None] & real_d[None, :]
    if begin < end:
        queries = tl.load(
            q + row * q_row + mine[:, None] * q_head + d[None, :],
            mask=real,
            other=0.0,
        )
        most = tl.full([group], float("-inf"), tl.float32)
        total = tl.zeros([group], tl.float32)
        result = tl.zeros([group, width], tl.float32)
        for start in range(begin, end, block):
            c = start + tl.arange(0, block)
            seen = c < end
            at = _place(pages, slot, c, seen, slot_stride, head_stride, entries, head, dim, page)
            at = at[:, None] + d[None, :]
            mask = seen[:, None] & real_d[None, :]
            found = tl.load(keys + at, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(found), input_precision="ieee") * scale
            if capped:
                scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)  # cap · tanh(scores / cap)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            greatest = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp(scores - greatest[:, None])
            shrink = tl.exp(most - greatest)
            total = total * shrink + tl.sum(weights, 1)
            found = tl.load(values + at, mask=mask, other=0.0)
            result = result * shrink[:, None]
            result += tl.dot(weights.to(found.dtype), found, input_precision="ieee")
            most = greatest
        if whole:
            result = result / total[:, None]
            tl.store(to_out, result.to(out.dtype.element_ty), mask=real)
        else:
            to = (row * heads + mine) * splits + split
            tl.store(sums + to * 2, most, mask=real_g)
            tl.store(sums + to * 2 + 1, total, mask=real_g)
            tl.store(partial + to[:, None] * width + d[None, :], result, mask=real_g[:, None])
    elif whole:
        tl.store(to_out, tl.zeros([group, width], out.dtype.element_ty), mask=real)


@kernel
def _combine(
    partial,
    sums,
    slots,
    positions,
    sinks,
    out,
    window,
    heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    most_splits: tl.constexpr,
    splits: tl.constexpr,
    padded: tl.constexpr,
    least: tl.constexpr,
    has_sinks: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, length, share = _range(slots, positions, row, window, block, most_splits, least)
    s, d = tl.arange(0, padded), tl.arange(0, width)
    used = (s < splits) & (s * share < length)
    at = (row * heads + head) * splits + s
    most = tl.load(sums + at * 2, mask=used, other=float("-inf"))
    total = tl.load(sums + at * 2 + 1, mask=used, other=0.0)
    greatest = tl.max(most, 0)
    if has_sinks:
        greatest = tl.maximum(greatest, tl.load(sinks + head))
    greatest = tl.where(length > 0, greatest, 0.0)
    shrink = tl.where(used, tl.exp(most - greatest), 0.0)
    whole = tl.sum(total * shrink, 0)
    if has_sinks:
        whole += tl.exp(tl.load(sinks + head) - greatest)
    results = tl.load(partial + at[:, None] * width + d[None, :], mask=used[:, None], other=0.0)
    mixed = tl.sum(results * shrink[:, None], 0) / tl.where(length > 0, whole, 1.0)
    to = out + (row * heads + head) * dim + d
    tl.store(to, mixed.to(out.dtype.element_ty), mask=d < dim)


@triton.jit
def _piece(pieces):
    """The first row, the rows, the slot and the first position of this program's piece."""
    at = pieces + tl.program_id(0) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@kernel
def _append_pieces(
    k,
    v,
    keys,
    values,
    pages,
    pieces,
    k_row,
    k_head,
    v_row,
    v_head,
    slot_stride,
    head_stride,
    entries,
    dim: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    page: tl.constexpr,
):
    row, count, slot, position = _piece(pieces)
    head = tl.program_id(1)
    m, d = tl.arange(0, most)[:, None], tl.arange(0, width)[None, :]
    real = (m < count) & (d < dim)
    to = d + _place(
        pages, slot, position + m, m < count, slot_stride, head_stride, entries, head, dim, page
    )
    found = tl.load(k + (row + m) * k_row + head * k_head + d, mask=real)
    tl.store(keys + to, found, mask=real)
    found = tl.load(v + (row + m) * v_row + head * v_head + d, mask=real)
    tl.store(values + to, found, mask=real)


@kernel
def _attend_pieces(
    q,
    keys,
    values,
    pages,
    pieces,
    sinks,
    out,
    scale,
    cap,
    q_row,
    q_head,
    slot_stride,
    head_stride,
    entries,
    repeats,
    heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    capped: tl.constexpr,
    has_sinks: tl.constexpr,
):
    row, count, slot, position = _piece(pieces)
    head = tl.program_id(1)
    m, d = tl.arange(0, most), tl.arange(0, width)
    real = (m < count)[:, None] & (d < dim)[None, :]
    queries = tl.load(
        q + (row + m)[:, None] * q_row + head * q_head + d[None, :], mask=real, other=0.0
    )
    greatest = tl.full([most], float("-inf"), tl.float32)
    total = tl.zeros([most], tl.float32)
    if has_sinks:
        greatest = tl.zeros([most], tl.float32) + tl.load(sinks + head)
        total += 1.0
    result = tl.zeros([most, width], tl.float32)
    kv_head = head // repeats
    for start in range(0, position + count, block):
        c = start + tl.arange(0, block)
        seen = c < position + count
        at = _place(pages, slot, c, seen, slot_stride, head_stride, entries, kv_head, dim, page)
        at = at[:, None] + d[None, :]
        known = seen[:, None] & (d < dim)[None, :]
        found = tl.load(keys + at, mask=known, other=0.0)
        scores = tl.dot(queries, tl.trans(found), input_precision="ieee") * scale
        if capped:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)  # cap · tanh(scores / cap)
        scores = tl.where(c[None, :] <= (position + m)[:, None], scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(greatest - higher)
        total = total * shrink + tl.sum(weights, 1)
        found = tl.load(values + at, mask=known, other=0.0)
        result = result * shrink[:, None]
        result += tl.dot(weights.to(found.dtype), found, input_precision="ieee")
        greatest = higher
    to = out + ((row + m)[:, None] * heads + head) * dim + d[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=real)
