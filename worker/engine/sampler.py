"""Logits → tokens: penalties, truncation, choice, log-probabilities.

Order as in transformers: bias and penalties, temperature, top_k, top_p, min_p. The only randomness
is one uniform number per token, made from (seed, choice, position): neighbours can't change it.
The vocabulary is never sorted unless a top_p needs more than `CANDIDATES` tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.sampling_plan import REPETITION_WINDOW, SamplingPlan

CANDIDATES = 1024  # most likely tokens that a top_p looks at first


@dataclass(frozen=True, slots=True)
class Draw:
    """What the sampler needs to know of a sequence to draw its next token."""

    plan: SamplingPlan
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. `finite` is False where the logits held NaN or infinity: no token then."""

    token_id: int
    finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    key = struct.pack("<qqq", seed, choice, position)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Draw one token per row. logits float32 [rows, vocab]; not kept, but may be changed."""
    raw = logits
    adjusted = [row for row, draw in enumerate(draws) if draw.plan.changes_logits]
    if adjusted:
        if any(draws[row].plan.logprobs for row in adjusted):
            logits = logits.clone()  # log-probabilities are the model's own, before penalties
        for row in adjusted:
            _adjust(logits[row], draws[row])
    best, chosen = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    token_ids = chosen.tolist()
    drawn = [row for row, draw in enumerate(draws) if not draw.plan.greedy and finite[row]]
    if drawn:
        picked = _draw(
            logits[drawn] if len(drawn) < len(draws) else logits, [draws[r] for r in drawn]
        )
        for row, token_id in zip(drawn, picked, strict=True):
            token_ids[row] = token_id
    return [
        _with_logprobs(raw[row], token_ids[row], draw.plan)
        if finite[row] and draw.plan.logprobs
        else Sampled(token_ids[row], finite[row])
        for row, draw in enumerate(draws)
    ]


def _adjust(logits: Tensor, draw: Draw) -> None:
    """Bias, penalties and min_tokens, on one row [vocab], in place."""
    plan, device = draw.plan, logits.device
    if plan.repetition_penalty != 1:
        window = [*draw.prompt_ids[-REPETITION_WINDOW:], *draw.output_ids][-REPETITION_WINDOW:]
        ids = torch.tensor(sorted(set(window)), device=device)
        seen = logits[ids]
        penalised = torch.where(
            seen > 0, seen / plan.repetition_penalty, seen * plan.repetition_penalty
        )
        logits[ids] = penalised
    if (plan.presence_penalty or plan.frequency_penalty) and draw.output_ids:
        counts = Counter(draw.output_ids)
        ids = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), device=device, dtype=logits.dtype)
        logits[ids] -= plan.presence_penalty + plan.frequency_penalty * times
    for token_id, bias in plan.logit_bias.items():
        logits[token_id] += bias
    if len(draw.output_ids) < plan.min_tokens and plan.stop_ids:
        logits[torch.tensor(sorted(plan.stop_ids), device=device)] = float("-inf")


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample every row of [rows, vocab] by inverting its distribution at the row's own number.

    Rows that truncate by rank run over their most likely tokens, the others over the vocabulary;
    which way a row goes depends on its own plan alone.
    """
    device = logits.device
    plans = [draw.plan for draw in draws]
    numbers = torch.tensor(
        [uniform(d.plan.seed, d.choice, len(d.output_ids)) for d in draws],
        device=device,
        dtype=torch.float64,
    )
    scaled = logits / _column([p.temperature for p in plans], device)
    ranked = [row for row, p in enumerate(plans) if p.top_k or p.top_p < 1]
    chosen = [0] * len(plans)
    for rows, draw in (
        ([row for row in range(len(plans)) if row not in ranked], _draw_open),
        (ranked, _draw_ranked),
    ):
        if rows:
            picked = draw(scaled[rows], [plans[row] for row in rows], numbers[rows])
            for row, token_id in zip(rows, picked, strict=True):
                chosen[row] = token_id
    return chosen


def _draw_open(scaled: Tensor, plans: Sequence[SamplingPlan], numbers: Tensor) -> list[int]:
    """Rows [rows, vocab] that no rank truncates: in order of token id."""
    shares = scaled.softmax(-1)
    if any(p.min_p for p in plans):
        floor = _column([p.min_p for p in plans], scaled.device) * shares.amax(-1, keepdim=True)
        shares = shares.masked_fill(shares < floor, 0)
    picks: list[int] = _invert(shares, numbers).tolist()
    return picks


def _draw_ranked(scaled: Tensor, plans: Sequence[SamplingPlan], numbers: Tensor) -> list[int]:
    """Rows [rows, vocab] with top_k or top_p: in order of probability."""
    vocab = scaled.shape[-1]
    width = min(max(p.top_k or CANDIDATES for p in plans), vocab)
    values, ids = scaled.topk(width, dim=-1)
    shares, enough = _rank(values, torch.logsumexp(scaled, -1, keepdim=True), plans, vocab)
    picks = _invert(shares, numbers)
    chosen: list[int] = ids.gather(1, picks[:, None])[:, 0].tolist()
    for row, plan in enumerate(plans):
        if not enough[row]:
            everything, all_ids = scaled[row].sort(descending=True, stable=True)
            total = torch.logsumexp(everything, -1, keepdim=True)
            share, _ = _rank(everything[None], total[None], [plan], vocab)
            chosen[row] = int(all_ids[_invert(share, numbers[row : row + 1])[0]])
    return chosen


def _rank(
    values: Tensor, total: Tensor, plans: Sequence[SamplingPlan], vocab: int
) -> tuple[Tensor, list[bool]]:
    """Shares of the candidates `values` [rows, width], sorted, after top_k, top_p and min_p; and
    whether the candidates hold all that the row's top_p wants. `total` [rows, 1]: logsumexp of the
    whole row."""
    device, width = values.device, values.shape[-1]
    ranks = torch.arange(width, device=device)[None, :]
    top_k = _column([float(p.top_k or vocab) for p in plans], device)
    top_p = _column([p.top_p for p in plans], device)
    shares = (values - total).exp().masked_fill(ranks >= top_k, 0)
    # top_k renormalises before top_p counts; without it the shares are those of the whole row.
    shares = torch.where(top_k < vocab, shares / shares.sum(-1, keepdim=True), shares)
    before = shares.cumsum(-1) - shares
    min_p = _column([p.min_p for p in plans], device)
    out = ((before >= top_p) & (ranks > 0)) | (shares < min_p * shares[:, :1])
    covered = shares.sum(-1, keepdim=True) >= top_p
    enough: list[bool] = (covered | (top_k <= width) | (width == vocab))[:, 0].tolist()
    return shares.masked_fill(out, 0), enough


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, dtype=torch.float32)[:, None]


def _invert(shares: Tensor, numbers: Tensor) -> Tensor:
    """First index where the running sum of `shares` [rows, n] exceeds number · total: [rows]."""
    sums = shares.double().cumsum(-1)
    target = (numbers * sums[:, -1])[:, None]
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=shares.shape[-1] - 1)


def _with_logprobs(raw: Tensor, token_id: int, plan: SamplingPlan) -> Sampled:
    total = torch.logsumexp(raw, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if plan.top_logprobs:
        values, ids = raw.topk(plan.top_logprobs)
        top = tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
    return Sampled(token_id, True, float(raw[token_id] - total), top)
