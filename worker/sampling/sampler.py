"""Logits → tokens: logits processors, truncation, sampling, log-probabilities.

Order as in transformers: processors, temperature, top_k, top_p, min_p. Each token uses one
uniform random number derived from (seed, choice, position), so other sequences of the batch do not
affect it. The vocabulary is sorted only if top_p needs more than `CANDIDATES` tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from worker.kernels import gpu
from worker.layers.embedding import argmax
from worker.layers.transfer import Reading, read_back, take, to_device
from worker.sampling.inputs import Row, SamplingBatch
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import Found

CANDIDATES = 1024  # number of most likely tokens that top_p considers before a full sort


class Sampled(NamedTuple):
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


class Drawn(Protocol):
    """The tokens of the rows of a sampling batch, on their way to the host."""

    @property
    def token_ids(self) -> Tensor | None:
        """[rows] on the device; None if the host decides some of them."""

    def read(self) -> list[Sampled]:
        """Waits for the device."""


def uniform(seed: int, choice: int, position: int) -> float:
    """A pseudo-random number in [0, 1), a function of its arguments."""
    key = struct.pack("<qqq", seed, choice, position)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
    """`draw`, and what came of it."""
    return draw(logits, batch).read()


def draw(logits: Tensor, batch: SamplingBatch) -> Drawn:
    """Draw one token per row of logits [rows, vocab]. The device is waited for when the tokens are
    read: once, unless a row needs more candidates."""
    rows = batch.rows
    if batch.needs_copy:
        logits = logits.to(torch.float32, copy=True)
    raw, logits = logits, batch.process(logits)  # log-probabilities are taken before penalties
    best, chosen = argmax(logits)
    if batch.greedy:
        return _Tokens(rows, chosen, Reading(best, chosen))
    drawing = [at for at, row in enumerate(rows) if not row.params.greedy]
    drawn = _draw(take(logits, drawing), [rows[at] for at in drawing]) if drawing else None
    if drawn is not None:
        chosen = _replaced(chosen, drawing, drawn.token_ids)
    reading = [at for at, row in enumerate(rows) if row.logprobs]
    logprobs = _logprobs(raw, chosen, reading, rows) if reading else ()
    if drawn is None or drawn.covered is None:
        return _Tokens(rows, chosen, Reading(best, chosen, *logprobs), reading)
    on_way = Reading(best, chosen, *logprobs, drawn.covered)
    return _Candidates(rows, on_way, reading, raw, drawing, drawn)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Drawn tokens. `on_way`: the greatest logit of each row, its token, and the log-probabilities
    of the rows `reading`."""

    rows: Sequence[Row]
    token_ids: Tensor
    on_way: Reading
    reading: Sequence[int] = ()

    def read(self) -> list[Sampled]:
        best, token_ids, *logprobs = self.on_way.values()
        finite = map(isfinite, best)
        if not self.reading:
            return list(map(Sampled, token_ids, finite))
        return _sampled(token_ids, [*finite], self.rows, _by_row(self.reading, logprobs))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that were drawn from the most likely ones, where these may be too few. `on_way` ends
    with whether the candidates of each of the rows `drawing` were enough."""

    rows: Sequence[Row]
    on_way: Reading
    reading: Sequence[int]
    raw: Tensor
    drawing: Sequence[int]
    drawn: _Draws

    @property
    def token_ids(self) -> None:
        return None

    def read(self) -> list[Sampled]:
        best, token_ids, *logprobs, covered = self.on_way.values()
        finite, found = [*map(isfinite, best)], _by_row(self.reading, logprobs)
        for number, enough in enumerate(covered):
            at = self.drawing[number]
            if not enough and finite[at]:
                token_ids[at] = self.drawn.from_all(number)
                if at in found:
                    logits = self.raw[at]
                    own = read_back(logits[token_ids[at]] - torch.logsumexp(logits, -1))
                    found[at] = (own, *found[at][1:])
        return _sampled(token_ids, finite, self.rows, found)


def _by_row(reading: Sequence[int], logprobs: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    """What was read of each row."""
    return dict(zip(reading, zip(*logprobs, strict=True), strict=True)) if reading else {}


def _sampled(
    token_ids: Sequence[int],
    finite: Sequence[bool],
    rows: Sequence[Row],
    found: dict[int, tuple[Any, ...]],
) -> list[Sampled]:
    """`found`, of some rows: the log-probability of the token, those of the most likely ones, and
    their ids."""
    sampled = []
    for at, row in enumerate(rows):
        if at not in found or not finite[at]:
            sampled.append(Sampled(token_ids[at], finite[at]))
            continue
        (own, values, ids), number = found[at], row.params.top_logprobs
        top = tuple(zip(ids[:number], values[:number], strict=True))
        sampled.append(Sampled(token_ids[at], True, own, top))
    return sampled


def _replaced(chosen: Tensor, at: Sequence[int], token_ids: Tensor) -> Tensor:
    """`chosen` [rows] with the tokens [len(at)] at some places."""
    if len(at) == len(chosen):
        return token_ids
    return chosen.index_copy(0, to_device(at, chosen.device, torch.long), token_ids)


def _logprobs(
    raw: Tensor, chosen: Tensor, at: Sequence[int], rows: Sequence[Row]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows `at`: log-probabilities of the chosen tokens [n], and of the most likely tokens
    [n, most], with their ids."""
    logits = take(raw, at)
    totals = torch.logsumexp(logits, dim=-1)
    own = logits.gather(1, take(chosen, at)[:, None])[:, 0] - totals
    values, ids = logits.topk(max(rows[one].params.top_logprobs for one in at), dim=-1)
    return own, values - totals[:, None], ids


@dataclass(frozen=True)
class _Draws:
    """The tokens [rows] that were drawn for rows of logits. `covered` [rows]: whether the
    candidates of a row were enough; None if all were."""

    token_ids: Tensor
    covered: Tensor | None = None
    scaled: Tensor | None = None
    uniforms: Tensor | None = None
    params: Sequence[SamplingParams] = ()

    def from_all(self, row: int) -> int:
        """Draw a row's token from the sorted vocabulary."""
        assert self.scaled is not None and self.uniforms is not None
        values, ids = self.scaled[row].sort(descending=True, stable=True)
        total = torch.logsumexp(values, -1, keepdim=True)
        probs, _ = _rank(values[None], total[None], [self.params[row]], len(values))
        token_id: int = read_back(ids[_invert(probs, self.uniforms[row : row + 1])])[0]
        return token_id


def _draw(logits: Tensor, rows: Sequence[Row]) -> _Draws:
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
    temperatures = to_device([p.temperature for p in params], device, torch.float32)
    if gpu.serves(logits) and not any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        return _Draws(gpu.sampling().draw(logits, temperatures, uniforms))
    scaled = logits / temperatures[:, None]
    ranked = [at for at, p in enumerate(params) if p.top_k or p.top_p < 1]
    others = [at for at, p in enumerate(params) if not (p.top_k or p.top_p < 1)]
    token_ids, covered = torch.zeros(len(rows), dtype=torch.long, device=device), None
    if others:
        given = take(scaled, others), [params[at] for at in others], take(uniforms, others)
        token_ids = _replaced(token_ids, others, _draw_unranked(*given))
    if ranked:
        given = take(scaled, ranked), [params[at] for at in ranked], take(uniforms, ranked)
        picked, enough = _draw_ranked(*given)
        token_ids = _replaced(token_ids, ranked, picked)
        if enough is not None:
            covered = _replaced(torch.ones_like(token_ids, dtype=torch.bool), ranked, enough)
    return _Draws(token_ids, covered, scaled, uniforms, params)


def _draw_unranked(scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Sample rows [rows, vocab] without top_k and top_p: cumulative sums in order of token id."""
    probs = scaled.softmax(-1)
    if any(p.min_p for p in params):
        floor = _column([p.min_p for p in params], scaled.device) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0)
    return _invert(probs, uniforms)


def _draw_ranked(
    scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Sample rows [rows, vocab] with top_k or top_p: cumulative sums in order of probability.
    Returns the tokens, and for each row whether its candidates were enough; None if they must be,
    as top_k says how many are needed."""
    vocab = scaled.shape[-1]
    width = min(max(p.top_k or CANDIDATES for p in params), vocab)
    values, ids = scaled.topk(width, dim=-1)
    probs, covered = _rank(values, torch.logsumexp(scaled, -1, keepdim=True), params, vocab)
    token_ids = ids.gather(1, _invert(probs, uniforms)[:, None])[:, 0]
    known = width == vocab or all(p.top_k for p in params)
    return token_ids, None if known else covered


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
