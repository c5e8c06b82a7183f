"""Logits → tokens: logits processors, truncation, sampling, log-probabilities.

Order as in transformers: processors, temperature, top_k, top_p, min_p. Each token uses one
uniform random number derived from (seed, choice, position), so other sequences of the batch do not
affect it. The vocabulary is sorted only if top_p needs more than `CANDIDATES` tokens.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.layers.embedding import argmax
from worker.layers.transfer import read_back, to_device
from worker.sampling.inputs import Row, SamplingBatch
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import Found

CANDIDATES = 1024  # number of most likely tokens that top_p considers before a full sort


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. If `finite` is False the logits held NaN or infinity and there is no token."""

    token_id: int
    finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens of the rows of a sampling batch, what was read of its prompts (None for one whose
    logits are not finite), and whether each checked row is finite."""

    tokens: Sequence[Sampled]
    prompts: Sequence[Found | None] = ()
    checks: Sequence[bool] = ()


def uniform(seed: int, choice: int, position: int) -> float:
    """A pseudo-random number in [0, 1), a function of its arguments."""
    key = struct.pack("<qqq", seed, choice, position)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
    """Draw one token per row of logits [rows, vocab]."""
    rows = batch.rows
    if not batch.greedy:
        logits = logits.to(torch.float32, copy=True)
    raw, logits = logits, batch.process(logits)  # log-probabilities are taken before penalties
    best, chosen = argmax(logits)
    finite = [math.isfinite(one) for one in read_back(best)]
    token_ids: list[int] = read_back(chosen)
    if batch.greedy:
        return [Sampled(*pair) for pair in zip(token_ids, finite, strict=True)]
    drawn = [at for at, row in enumerate(rows) if not row.params.greedy and finite[at]]
    if drawn:
        picked = _draw(
            logits[drawn] if len(drawn) < len(rows) else logits, [rows[at] for at in drawn]
        )
        for at, token_id in zip(drawn, picked, strict=True):
            token_ids[at] = token_id
    return [
        _with_logprobs(raw[at], token_ids[at], row.params)
        if finite[at] and row.logprobs
        else Sampled(token_ids[at], finite[at])
        for at, row in enumerate(rows)
    ]


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Sample each row of [rows, vocab] by inverse transform at the row's uniform number.

    Rows with top_k or top_p are sampled from their most likely tokens, the others from the whole
    vocabulary. The method depends on the row's own parameters alone.
    """
    device = logits.device
    params = [row.params for row in rows]
    uniforms = to_device(
        [uniform(one.seed, choice, position) for one, choice, position, _ in rows],
        device,
        torch.float64,
    )
    scaled = logits / _column([p.temperature for p in params], device)
    ranked = [at for at, p in enumerate(params) if p.top_k or p.top_p < 1]
    chosen = [0] * len(params)
    for places, draw in (
        ([at for at in range(len(params)) if at not in ranked], _draw_unranked),
        (ranked, _draw_ranked),
    ):
        if places:
            picked = draw(scaled[places], [params[at] for at in places], uniforms[places])
            for at, token_id in zip(places, picked, strict=True):
                chosen[at] = token_id
    return chosen


def _draw_unranked(scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> list[int]:
    """Sample rows [rows, vocab] without top_k and top_p: cumulative sums in order of token id."""
    probs = scaled.softmax(-1)
    if any(p.min_p for p in params):
        floor = _column([p.min_p for p in params], scaled.device) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0)
    chosen: list[int] = read_back(_invert(probs, uniforms))
    return chosen


def _draw_ranked(scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> list[int]:
    """Sample rows [rows, vocab] with top_k or top_p: cumulative sums in order of probability."""
    vocab = scaled.shape[-1]
    width = min(max(p.top_k or CANDIDATES for p in params), vocab)
    values, ids = scaled.topk(width, dim=-1)
    probs, covered = _rank(values, torch.logsumexp(scaled, -1, keepdim=True), params, vocab)
    enough: list[bool] = read_back(covered)
    picks = _invert(probs, uniforms)
    chosen: list[int] = read_back(ids.gather(1, picks[:, None])[:, 0])
    for row, one in enumerate(params):
        if not enough[row]:
            all_values, all_ids = scaled[row].sort(descending=True, stable=True)
            total = torch.logsumexp(all_values, -1, keepdim=True)
            all_probs, _ = _rank(all_values[None], total[None], [one], vocab)
            chosen[row] = read_back(all_ids[_invert(all_probs, uniforms[row : row + 1])])[0]
    return chosen


def _rank(
    values: Tensor, total: Tensor, params: Sequence[SamplingParams], vocab: int
) -> tuple[Tensor, Tensor]:
    """Apply top_k, top_p and min_p to the sorted logits `values` [rows, width] of the candidates.
    Returns their probabilities, and for each row [rows] whether the candidates cover its top_p.
    `total` [rows, 1]: logsumexp of the whole row."""
    device, width = values.device, values.shape[-1]
    ranks = torch.arange(width, device=device)[None, :]
    top_k = _column([float(p.top_k or vocab) for p in params], device)
    top_p = _column([p.top_p for p in params], device)
    probs = (values - total).exp().masked_fill(ranks >= top_k, 0)
    # top_p applies to probabilities renormalised after top_k, or else to those of the whole row.
    probs = torch.where(top_k < vocab, probs / probs.sum(-1, keepdim=True), probs)
    before = probs.cumsum(-1) - probs
    min_p = _column([p.min_p for p in params], device)
    out = ((before >= top_p) & (ranks > 0)) | (probs < min_p * probs[:, :1])
    covered = probs.sum(-1, keepdim=True) >= top_p
    return probs.masked_fill(out, 0), (covered | (top_k <= width) | (width == vocab))[:, 0]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(values, device, torch.float32)[:, None]


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """First index where the cumulative sum of `probs` [rows, n] exceeds uniform · total: [rows]."""
    sums = probs.double().cumsum(-1)
    target = (uniforms * sums[:, -1])[:, None]
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def _with_logprobs(raw: Tensor, token_id: int, params: SamplingParams) -> Sampled:
    total = torch.logsumexp(raw, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if params.top_logprobs:
        values, ids = raw.topk(params.top_logprobs)
        top = tuple(zip(read_back(ids), read_back(values - total), strict=True))
    return Sampled(token_id, True, read_back(raw[token_id] - total), top)
