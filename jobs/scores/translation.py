"""BLEU and chrF by sacrebleu.

The figure of a run is that of the corpus, which is no mean of sentences: it is computed from summed
statistics of the sentences. sacrebleu has methods for both steps, which its own significance tests
use and which are private: tests/jobs/scores/test_translation.py names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row
from jobs.scores.targets import references

TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # of sacrebleu; the others download files


class Translation:
    """The score of a sentence, 0 to 100, and its statistics. `name`: bleu, chrf or chrf++."""

    def __init__(self, name: str, argument: str | None) -> None:
        self._sentence = library_metric(name, argument, sentence=True)
        self._corpus = library_metric(name, argument)

    def score(self, row: Row) -> Outcome:
        accepted = references(row)
        value = self._sentence.sentence_score(row["text"], accepted).score
        (statistics,) = self._corpus._extract_corpus_statistics(
            [row["text"]], [[one] for one in accepted]
        )
        return Outcome(value, statistics=[float(one) for one in statistics])


def library_metric(name: str, argument: str | None, *, sentence: bool = False) -> Any:
    """The metric of sacrebleu. `sentence`: n-grams that a sentence is too short for do not count.
    Raises InvalidRequest."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if name == "bleu":
        if argument not in (None, *TOKENIZERS):
            raise invalid(
                f"{argument!r} is no tokenizer of bleu; they are {', '.join(TOKENIZERS)}", "metric"
            )
        return BLEU(tokenize=argument, effective_order=sentence)
    if argument is not None:
        raise invalid(f"{name} takes no argument", "metric")
    return CHRF(word_order=2 if name == "chrf++" else 0)


def corpus_score(metric: Any, sums: Sequence[float]) -> float:
    """The score of a corpus from the summed statistics of its sentences."""
    return float(metric._compute_score_from_stats([int(one) for one in sums]).score)
