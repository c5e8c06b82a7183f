"""BLEU and chrF equal those of sacrebleu's public functions."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.errors import InvalidRequest
from jobs.scores.figures import figure_of
from jobs.scores.spec import parse_spec

# Methods of sacrebleu without documentation, which jobs/scores/translation.py uses.
PRIVATE = ("_extract_corpus_statistics", "_compute_score_from_stats")

PAIRS = [
    ("the cat sat on the mat", "the cat is on the mat"),
    ("a dog barks loudly", "a dog barked loudly"),
    ("nothing in common", "quite another sentence here"),
    ("", "an empty answer"),
]


def test_sacrebleu_has_the_private_methods() -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    assert all(hasattr(kind, name) for kind in (BLEU, CHRF) for name in PRIVATE)


@pytest.mark.parametrize("name", ["bleu", "chrf", "chrf++", "bleu:char"])
def test_sentences_and_corpus_equal_sacrebleu(name: str) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    tokenizer = name.partition(":")[2] or "13a"
    order = 2 if name == "chrf++" else 0

    def library(sentence: bool) -> BLEU | CHRF:
        if "bleu" in name:
            return BLEU(tokenize=tokenizer, effective_order=sentence)
        return CHRF(word_order=order)

    spec = parse_spec(name)
    metric = spec.make()
    outcomes = [metric.score({"text": text, "target": target}) for text, target in PAIRS]
    texts, targets = zip(*PAIRS, strict=True)
    expected = [library(True).sentence_score(text, [one]).score for text, one in PAIRS]
    assert [one.value for one in outcomes] == pytest.approx(expected)
    table = pa.Table.from_pylist(
        [
            {"row_index": row, "status": "ok", "value": one.value, "statistics": one.statistics}
            for row, one in enumerate(outcomes)
        ]
    )
    figure = figure_of(table, spec)
    corpus = library(False).corpus_score(list(texts), [list(targets)]).score
    assert figure.value == pytest.approx(corpus)
    assert figure.interval is not None
    assert figure.interval.low <= corpus <= figure.interval.high


def test_several_references_count_as_in_sacrebleu() -> None:
    from sacrebleu.metrics.bleu import BLEU

    several = ["the cat is on the mat", "a cat sat on a mat"]
    spec = parse_spec("bleu")
    row = {"text": PAIRS[0][0], "target": json.dumps(several)}
    outcome = spec.make().score(row)
    expected = BLEU(effective_order=True).sentence_score(PAIRS[0][0], several).score
    assert outcome.value == pytest.approx(expected)


def test_a_tokenizer_that_would_download_files_is_refused(tmp_path: Path) -> None:
    spec = parse_spec("bleu:flores200")
    with pytest.raises(InvalidRequest, match="no tokenizer of bleu; they are 13a"):
        spec.make()
