"""pass@k (Chen et al. 2021): the probability that of k samples of a question one at least is right,
estimated without bias from n samples of which c are right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.scores.samples import BATCH_ROWS
from jobs.scores.spec import Spec, parse_spec
from jobs.sizes import counted


def estimate(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), as a product of factors that are all at most 1."""
    if n - c < k:
        return 1.0
    missed = 1.0
    for size in range(n - c + 1, n + 1):
        missed *= 1.0 - k / size
    return 1.0 - missed


def pass_at_k(results: Results, run: str, spec: Spec) -> Iterator[dict[str, Any]]:
    """One row for each row of the data set, from the scores of the metric that says which samples
    are right, which must be written. Raises InvalidRequest if it has other values than 0 and 1."""
    k, base = spec.samples, parse_spec(spec.argument or "")
    assert k is not None
    columns = ("row_index", "status", "value", "model")
    scores = results.scores(run, [base.text], columns).sort_by("row_index")
    samples = (
        row for batch in scores.to_batches(max_chunksize=BATCH_ROWS) for row in batch.to_pylist()
    )
    for index, group in groupby(samples, key=lambda one: one["row_index"]):
        values = []
        for sample in group:
            model, value = sample["model"], sample["value"]
            if sample["status"] != "ok":
                continue
            if value not in (0.0, 1.0):
                raise invalid(
                    f"{spec.text} needs a metric that says right or wrong, and {base.text} has the "
                    f"value {value:g}",
                    "metric",
                )
            values.append(value)
        row = {
            "run_id": run,
            "model": model,
            "row_index": index,
            "repeat_index": 0,
            "choice_index": 0,
        }
        if not values:
            yield {**row, "status": "no_answer"}
        elif len(values) < k:
            have = (
                f"{counted(len(values), 'sample')} {'has' if len(values) == 1 else 'have'} a score"
            )
            error = f"{have}, and {spec.name} needs {k}: chatjobs run --num-samples {k} makes them"
            yield {**row, "status": "error", "error": error}
        else:
            value = estimate(len(values), round(sum(values)), k)
            yield {**row, "status": "ok", "value": value}
