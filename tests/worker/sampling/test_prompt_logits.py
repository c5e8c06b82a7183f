"""Scores of prompt tokens, for the rows of several prompts."""

from __future__ import annotations

import pytest
import torch

from worker.sampling.prompt_logits import CHUNK_TOKENS, WantedRows, score_tokens

VOCAB = 50


def test_more_rows_than_are_scored_at_a_time() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = (CHUNK_TOKENS - 1, 2, CHUNK_TOKENS + 40)
    logits = torch.randn(sum(sizes) + 7, VOCAB, generator=random)
    ids = torch.randint(VOCAB, (len(logits),), generator=random).tolist()
    firsts = (7, 7 + sizes[0], 7 + sizes[0] + sizes[1])  # the first rows belong to others
    wanted = [
        (first, WantedRows(rows, ids[first : first + rows], top))
        for first, rows, top in zip(firsts, sizes, (0, 3, 1), strict=True)
    ]
    logits[firsts[1]] = float("nan")
    own, none, top = score_tokens(logits, wanted)
    assert none is None
    assert own is not None and top is not None
    logprobs = logits.log_softmax(-1)
    for (first, one), scores in ((wanted[0], own), (wanted[2], top)):
        assert len(scores) == one.rows
        for row, (score, *best) in enumerate(scores, first):
            assert score.token_id == ids[row]
            assert score.logprob == pytest.approx(float(logprobs[row, ids[row]]), abs=1e-6)
            assert score.rank == 1 + int((logits[row] > logits[row, ids[row]]).sum())
            others = {int(logits[row].argmax())} - {ids[row]} if one.top else set()
            assert {other.token_id for other in best} == others
