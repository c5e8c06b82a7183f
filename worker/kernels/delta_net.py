"""A few tokens of each sequence through a gated delta net: `src/delta_net.cpp`.

Rows of one sequence lie together, in their order, and each is computed like the only one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.library import TYPE_CODES

MAX_KEY = 512  # channels of a key in src/delta_net.cpp


def convolve(cache: Tensor, slots: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
    """silu of a causal convolution's next outputs, in float32 [rows, channels]. Appends `inputs`
    [rows, channels] to the slots' last inputs in `cache` [slots, kernel - 1, channels].

    weights: float32 [kernel, channels]. Intermediate values are rounded to the dtype of inputs.
    """
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    rows, channels = inputs.shape
    y = torch.empty(rows, channels)
    library.require().delta_convolve(
        cache.data_ptr(),
        slots.data_ptr(),
        inputs.data_ptr(),
        inputs.stride(0),
        weights.data_ptr(),
        y.data_ptr(),
        rows,
        len(weights),
        channels,
        TYPE_CODES[inputs.dtype],
        torch.get_num_threads(),
    )
    return y


def recur(
    state: Tensor, slots: Tensor, y: Tensor, log_decay: Tensor, beta: Tensor, key_heads: int
) -> Tensor:
    """The recurrence of the rows' tokens, on the slots of `state` [slots, value_heads, key_dim,
    value_dim], in place → [rows, value_heads, value_dim].

    y [rows, channels]: queries, keys and values as `convolve` returns them; queries and keys are
    scaled to unit length. log_decay and beta [rows, value_heads], float32.
    """
    _, value_heads, key_dim, value_dim = state.shape
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    out = torch.empty(len(y), value_heads, value_dim)
    library.require().delta_recur(
        state.data_ptr(),
        slots.data_ptr(),
        y.data_ptr(),
        log_decay.data_ptr(),
        beta.data_ptr(),
        out.data_ptr(),
        len(y),
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        torch.get_num_threads(),
    )
    return out
