"""The figures of a run by metric, over all rows and by groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.scores import FIGURES
from jobs.scores.figures import Figure, figure_of
from jobs.scores.freshness import is_stale, samples_digest
from jobs.scores.samples import Groups, grouped
from jobs.scores.spec import Spec, parse_spec


@dataclass(frozen=True, slots=True)
class Summary:
    """A metric over the rows of a group. `group`: the values of the columns that make it, empty for
    all rows. `is_stale`: the run has other rows than when it was scored."""

    metric: str
    group: dict[str, str | None]
    figure: Figure
    is_stale: bool


def summarise(
    results: Results,
    run: str,
    specs: Sequence[Spec] = (),
    groups: Groups | None = None,
    seed: int = 0,
) -> Iterator[Summary]:
    """The figures of these metrics, or of all that have scores: over all rows, then by group.
    Raises InvalidRequest if there are no scores."""
    scores = results.scores(run, [spec.text for spec in specs] or None, FIGURES)
    if not len(scores):
        raise invalid(
            f"run {run} has no scores: chatjobs score {run} --metric exact writes some", "run"
        )
    digest = samples_digest(results, run)
    for spec in specs or map(parse_spec, pc.unique(scores["metric"]).to_pylist()):
        own = scores.filter(pc.field("metric") == spec.text)
        stale = is_stale(results, run, spec.text, digest)
        yield Summary(spec.text, {}, figure_of(own, spec, seed), stale)
        if groups is not None:
            for group, rows in grouped(own, groups):
                yield Summary(spec.text, group, figure_of(rows, spec, seed), stale)
