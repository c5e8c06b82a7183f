"""The contents of a page about runs, as values: what the template shows, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from jobs.errors import invalid
from jobs.report import charts, provenance, quotes
from jobs.report.distributions import Distribution, Spread, distribution
from jobs.report.drawing import Drawing
from jobs.report.measures import Measures, read_measures
from jobs.report.score_tables import ScoreTable, score_tables
from jobs.report.timeline import LEAST_ROWS, timeline
from jobs.report.units import ABSENT, count_text, number_text, seconds_text, share_text
from jobs.results.files import Results
from jobs.results.model_versions import mixture_sentence, read_answers
from jobs.results.run_json import RunJson
from jobs.runs.audit import Audit, audit
from jobs.sizes import counted

MAX_RUNS = 8  # beside each other: as many as there are colours
MAX_ERRORS = 20  # codes that are listed
HOUR = 3600
PRICED_ROWS = 1000

# Column, heading, whether it is a duration.
NUMBERS = (
    ("duration_s", "Time from start to end", True),
    ("ttft_s", "Time to the first token", True),
    ("tpot_s", "Time per further token", True),
    ("queue_s", "Time in the queue", True),
    ("input_tokens", "Prompt tokens", False),
    ("output_tokens", "Answer tokens", False),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of a table with a cell for each run. `note`: what the value is."""

    label: str
    cells: tuple[str, ...]
    note: str = ""

    @property
    def differs(self) -> bool:
        """True if runs that have a value have different ones."""
        return len({cell for cell in self.cells if cell}) > 1


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its heading, and lines of numbers for each run. `drawing`: None for few
    rows."""

    heading: str
    drawing: Drawing | None
    header: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Failing:
    """An error code: the rows of each run that have it, and the first message."""

    code: str
    counts: tuple[int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class RunPart:
    """What is said of one run by itself. `audit`: None if the size of its data set is not
    known. `mixture`: a sentence if several versions of a model have made its answers."""

    name: str
    state: str
    audit: Audit | None
    mixture: str
    broken: int
    slowest: Sequence[quotes.Quote]
    failed: Sequence[quotes.Quote]
    first: Sequence[quotes.Quote]
    rows: int
    failures: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A page. `facts`: the summary. The tables have a cell for each of `runs`."""

    runs: tuple[RunPart, ...]
    facts: tuple[Fact, ...]
    scores: tuple[ScoreTable, ...]
    speeds: tuple[Chart, ...]
    has_curves: bool  # among the speeds
    lengths: tuple[Chart, ...]
    errors: tuple[Failing, ...]
    settings: tuple[Fact, ...]
    sampling: tuple[Fact, ...]
    versions: tuple[Fact, ...]
    price_per_hour: float | None

    @property
    def unscored(self) -> list[str]:
        """The runs without scores."""
        scored = {line.run for table in self.scores for line in table.groups[0].lines}
        return [run.name for place, run in enumerate(self.runs) if place not in scored]


def read_contents(
    results: Results,
    runs: Sequence[str],
    by: Sequence[str] = (),
    *,
    price_per_hour: float | None = None,
    seed: int = 0,
) -> Contents:
    """Read runs, whose rows are aggregated by Arrow. `by`: columns that make groups of the scores.
    `price_per_hour`: of a worker. Raises InvalidRequest for a run that does not exist or has no
    rows, for a run.json that can't be read, and for a column of `by` that a run does not have."""
    noted = [RunJson.read(results.path(run)) for run in runs]
    measures = [read_measures(results, run) for run in runs]
    for run, one in zip(runs, measures, strict=True):
        if not one.rows:
            raise invalid(f"run {run} has no rows", "run")
    scores = tuple(score_tables(results, runs, by, seed))
    curves = _curves(measures)
    numbers = [
        (chart, is_time)
        for column, heading, is_time in NUMBERS
        if (chart := _histogram(measures, column, heading, is_time)) is not None
    ]
    return Contents(
        runs=tuple(
            _run_part(results, run, known, one)
            for run, known, one in zip(runs, noted, measures, strict=True)
        ),
        facts=tuple(_facts(measures, price_per_hour)),
        scores=scores,
        speeds=(*curves, *(chart for chart, is_time in numbers if is_time)),
        has_curves=bool(curves),
        lengths=tuple(chart for chart, is_time in numbers if not is_time),
        errors=tuple(_errors(results, runs, measures)),
        settings=_beside([provenance.configuration(one) for one in noted]),
        sampling=_beside(
            [provenance.column_values(results, run, provenance.SAMPLING) for run in runs]
        ),
        versions=_beside(
            [provenance.column_values(results, run, provenance.VERSIONS) for run in runs]
        ),
        price_per_hour=price_per_hour,
    )


def _run_part(results: Results, run: str, noted: RunJson, measures: Measures) -> RunPart:
    return RunPart(
        name=run,
        state=noted.state or "",
        audit=_audit(results, run, noted),
        mixture=mixture_sentence(run, read_answers(results.dataset(run))),
        broken=len(results.broken(run)),
        slowest=quotes.slowest(results, run, measures),
        failed=quotes.failed(results, run, measures),
        first=quotes.first(results, run, measures),
        rows=measures.rows,
        failures=measures.failed,
    )


def _audit(results: Results, run: str, noted: RunJson) -> Audit | None:
    """Count the files again; the last audit has the size of the data set."""
    return None if noted.size is None else audit(results, run, *noted.size)


def _facts(runs: Sequence[Measures], price_per_hour: float | None) -> list[Fact]:
    """The summary. What is known of no run is left out."""

    def fact(label: str, text: Callable[[Measures], str], note: str = "") -> Fact:
        return Fact(label, tuple(text(one) for one in runs), note)

    found = [
        fact("Rows", lambda one: count_text(one.rows)),
        fact(
            "Failed", lambda one: f"{count_text(one.failed)} ({share_text(one.failed, one.rows)})"
        ),
        fact("Elapsed", lambda one: seconds_text(one.elapsed_seconds), "first start to last end"),
        fact("Rows per second", lambda one: number_text(_rate(one.rows, one.elapsed_seconds))),
        fact(
            "Output tokens per second",
            lambda one: number_text(_rate(one.output_tokens, one.elapsed_seconds) or None),
        ),
        fact("Input tokens", lambda one: count_text(one.input_tokens or None)),
        fact(
            "Cached input",
            lambda one: share_text(one.cached_tokens, one.input_tokens),
            "read from the prefix cache",
        ),
        fact("Output tokens", lambda one: count_text(one.output_tokens or None)),
        fact("Workers", lambda one: count_text(one.workers or None)),
        fact("Worker time", lambda one: seconds_text(one.busy_seconds), "with a row running"),
        fact(
            "Worker time per 1,000 rows",
            lambda one: seconds_text(_per_thousand(one)),
        ),
    ]
    if price_per_hour is not None:
        found.append(
            fact(
                "Price per 1,000 rows",
                lambda one: number_text(_price(one, price_per_hour)),
                f"at {price_per_hour:g} per worker and hour",
            )
        )
    return [one for one in found if any(cell != ABSENT for cell in one.cells)]


def _rate(count: float, seconds: float | None) -> float | None:
    return count / seconds if seconds else None


def _per_thousand(one: Measures) -> float | None:
    """Worker seconds per 1,000 rows."""
    busy = one.busy_seconds
    return None if busy is None else busy * PRICED_ROWS / one.rows


def _price(one: Measures, price_per_hour: float) -> float | None:
    seconds = _per_thousand(one)
    return None if seconds is None else seconds / HOUR * price_per_hour


def _histogram(runs: Sequence[Measures], column: str, heading: str, is_time: bool) -> Chart | None:
    data = distribution(
        [one.values(column) for one in runs], logarithmic=is_time, whole=not is_time
    )
    if data is None:
        return None
    text = seconds_text if is_time else count_text
    most = max(one.count for one in data.spreads if one is not None)
    drawing = None
    if most >= LEAST_ROWS:
        label = f"{heading}: {_median(data, text)}"
        drawing = charts.histogram(data, label, seconds=is_time)
    return Chart(
        heading,
        drawing,
        ("mean", "p50", "p90", "p99", "max"),
        tuple(_cells(one, text) for one in data.spreads),
    )


def _cells(one: Spread | None, text: Callable[[float | None], str]) -> tuple[str, ...]:
    values = (None,) * 5 if one is None else (one.mean, *one.percentiles, one.maximum)
    return tuple(map(text, values))


def _median(data: Distribution, text: Callable[[float | None], str]) -> str:
    medians = [text(one.percentiles[0]) for one in data.spreads if one is not None]
    return f"median {', '.join(medians)}"


def _curves(runs: Sequence[Measures]) -> list[Chart]:
    """Throughput over time; empty if there are few rows."""
    data = timeline(runs)
    if data is None:
        return []
    found = [("Rows per second", data.rows)]
    found += [("Output tokens per second", data.tokens)] if any(map(any, data.tokens)) else []
    return [
        Chart(heading, charts.curves(rates, data.seconds, f"{heading} over the time of the run"))
        for heading, rates in found
    ]


def _errors(results: Results, runs: Sequence[str], measures: Sequence[Measures]) -> list[Failing]:
    counts = [one.errors for one in measures]
    totals: dict[str, int] = {}
    for one in counts:
        for code, count in one.items():
            totals[code] = totals.get(code, 0) + count
    codes = sorted(totals, key=lambda code: -totals[code])[:MAX_ERRORS]
    return [
        Failing(code, tuple(one.get(code, 0) for one in counts), _message(results, runs, code))
        for code in codes
    ]


def _message(results: Results, runs: Sequence[str], code: str) -> str:
    """The message of a row with this code."""
    is_meant = (pc.field("error_type") == code) & pc.field("error_message").is_valid()
    for run in runs:
        found = results.dataset(run).head(1, columns=["error_message"], filter=is_meant)
        if len(found):
            return quotes.clip(found["error_message"][0].as_py()).start
    return ""


def _beside(values: Sequence[dict[str, str]]) -> tuple[Fact, ...]:
    """A line for each name, with the values of all runs."""
    names = dict.fromkeys(name for one in values for name in one)
    return tuple(Fact(name, tuple(one.get(name, "") for one in values)) for name in names)


def title_of(contents: Contents) -> str:
    names = [one.name for one in contents.runs]
    return names[0] if len(names) == 1 else f"{counted(len(names), 'run')}: {', '.join(names)}"
