"""Masks of logits: the legal tokens of the rows of a step, found in one call.

A mask has a bit per token, in words of 32. They are found on the host while a GPU computes the
logits, and one copy brings all of them to the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from worker.constraints.matcher import Matcher
from worker.layers.transfer import is_accelerator, to_device

WORD = 32  # bits
MOST_THREADS = 4  # more fight with the threads of the kernels
NEVER = float("-inf")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a number's size in bytes


class MaskedRow(NamedTuple):
    """A row of logits whose next token must be legal, and those after each token of its draft."""

    row: int
    matcher: Matcher
    draft: Sequence[int] = ()


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=min(MOST_THREADS, len(os.sched_getaffinity(0))))


def legal_tokens(rows: Sequence[MaskedRow], vocab: int) -> NDArray[np.int32]:
    """Masks [masks, words]: of each row, and of those that follow it. What follows a draft's end,
    or a token of it that is not legal, is void: all tokens are legal there."""
    number = sum(1 + len(one.draft) for one in rows)
    masks = np.full((number, -(-vocab // WORD)), -1, dtype=np.int32)
    pointer, width = masks.ctypes.data, masks.strides[0]
    plain: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    stopping: list[tuple[int, frozenset[int]]] = []
    forced: list[tuple[int, int]] = []
    at = 0
    for _, matcher, draft in rows:
        legal, inner = list(draft[: matcher.legal(draft)]) if draft else [], matcher.inner
        token_id = matcher.forced_after(legal)
        if token_id is not None:
            forced.append((at + len(legal), token_id))
        if inner is not None and (legal or token_id is None):
            if legal:
                drafted.append((inner, at, legal))
            else:
                plain.append((inner, at))
            stopping += [(at + after, matcher.stops) for after in matcher.stops_after(legal)]
        at += 1 + len(draft)
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, pointer, width, number)
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, width, number)
    for row, stops in stopping:
        for token_id in stops:
            masks.view(np.uint32)[row, token_id // WORD] |= np.uint32(1 << token_id % WORD)
    for row, token_id in forced:
        masks[row] = 0
        masks.view(np.uint32)[row, token_id // WORD] = np.uint32(1 << token_id % WORD)
    return masks


def apply_masks(logits: Tensor, rows: Sequence[MaskedRow]) -> None:
    """Exclude all tokens that are not legal from logits [rows, vocab], in place."""
    vocab = logits.shape[1]
    masks = legal_tokens(rows, vocab)
    at = [row for one in rows for row in range(one.row, one.row + 1 + len(one.draft))]
    if not is_accelerator(logits.device):
        _exclude_on_host(logits, masks, at)
        return
    refused = _refused(masks, vocab, logits.device)
    if at == list(range(len(logits))):
        logits.masked_fill_(refused, NEVER)
        return
    places = to_device(at, logits.device, torch.long)
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(refused, NEVER))


def _exclude_on_host(logits: Tensor, masks: NDArray[np.int32], at: Sequence[int]) -> None:
    """Exclude in the rows `at`, without a branch per token, which costs much more where legal and
    refused tokens alternate. Read as unsigned integers, no finite number exceeds -inf."""
    integers = _INTEGERS[logits.itemsize]
    unsigned = np.dtype(f"u{logits.itemsize}")
    values = logits.view(integers).numpy().view(unsigned)
    never = torch.tensor(NEVER, dtype=logits.dtype).view(integers).numpy().view(unsigned)
    for row, mask in zip(at, masks, strict=True):
        refused = np.unpackbits(~mask.view(np.uint8), count=logits.shape[1], bitorder="little")
        np.maximum(values[row], np.multiply(refused, never, dtype=unsigned), out=values[row])


def _refused(masks: NDArray[np.int32], vocab: int, device: torch.device) -> Tensor:
    """Masks [rows, words] → [rows, vocab] on a device, true for a token that is not legal."""
    on_gpu = device.type == "cuda"
    words = torch.from_numpy(masks)
    words = (words.pin_memory() if on_gpu else words).to(device, non_blocking=on_gpu)
    each = (words[:, :, None] >> torch.arange(WORD, device=device, dtype=torch.int32)) & 1
    legal: Tensor = each.flatten(1)[:, :vocab] != 0
    return legal.logical_not_()
