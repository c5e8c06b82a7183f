"""Mixtures of experts: which experts a token goes to, and its rows among those of all experts:
`src/mixture.cpp`.

Callers check `library.serves` for the first tensor of a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.library import TYPE_CODES


def select(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """The top k of softmax(logits [tokens, experts] + bias) and their indices, [tokens, top_k]
    each: the weights in the dtype of the logits. `bias`: float32 [experts]. With `normalise`, the
    weights of a token are scaled to sum 1."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64)
    library.require().select_experts(
        logits.data_ptr(),
        logits.stride(0),
        None if bias is None else bias.data_ptr(),
        tokens,
        experts,
        top_k,
        normalise,
        weights.data_ptr(),
        chosen.data_ptr(),
        TYPE_CODES[logits.dtype],
        torch.get_num_threads(),
    )
    return weights, chosen


def group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orders pairs of a token and an expert by expert: chosen, int64 [tokens, top_k], contiguous →
    the token of each pair in that order [tokens * top_k], where each pair went [tokens, top_k], and
    the number of pairs of each expert [experts]."""
    tokens, top_k = chosen.shape
    rows = torch.empty(tokens * top_k, dtype=torch.int64)
    places = torch.empty(tokens, top_k, dtype=torch.int64)
    counts = torch.empty(experts, dtype=torch.int64)
    library.require().group_by_expert(
        chosen.data_ptr(),
        tokens * top_k,
        top_k,
        experts,
        rows.data_ptr(),
        places.data_ptr(),
        counts.data_ptr(),
    )
    return rows, places, counts


def add_biases(y: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    """y [rows, size] with the bias of each row's expert added, in place if y is contiguous: biases
    [experts, size]; counts [experts], the rows of each expert in order."""
    y = y.contiguous()
    library.require().add_biases(
        y.data_ptr(),
        biases.data_ptr(),
        counts.data_ptr(),
        *biases.shape,
        TYPE_CODES[y.dtype],
    )
    return y


def combine(outputs: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """The sum over k of weights[:, k] · outputs[places[:, k]], rounded once: outputs [rows, size],
    weights and places [tokens, top_k] → [tokens, size]. All are contiguous; the first two have
    one dtype."""
    tokens, top_k = places.shape
    size = outputs.shape[1]
    y = torch.empty(tokens, size, dtype=outputs.dtype)
    library.require().combine_experts(
        outputs.data_ptr(),
        weights.data_ptr(),
        places.data_ptr(),
        tokens,
        top_k,
        size,
        y.data_ptr(),
        TYPE_CODES[outputs.dtype],
        torch.get_num_threads(),
    )
    return y
