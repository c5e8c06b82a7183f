"""pass@k (Chen et al. 2021): the probability that of k samples of a question one at least is right,
estimated without bias from n samples of which c are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.scores.spec import Spec, parse_spec


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
    scores = results.scores(run, [base.text], columns)
    right: dict[int, list[float]] = {}
    models: dict[int, str] = {}
    rows = zip(*(scores[name].to_pylist() for name in columns), strict=True)
    for index, status, value, model in rows:
        values = right.setdefault(index, [])
        models[index] = model
        if status != "ok":
            continue
        if value not in (0.0, 1.0):
            raise invalid(
                f"{spec.text} needs a metric that says right or wrong, and {base.text} has the "
                f"value {value:g}",
                "metric",
            )
        values.append(value)
    for index in sorted(right):
        values = right[index]
        row = {
            "run_id": run,
            "model": models[index],
            "row_index": index,
            "repeat_index": 0,
            "choice_index": 0,
        }
        if not values:
            yield {**row, "status": "no_answer"}
        elif len(values) < k:
            error = f"{len(values)} samples have a score, and {spec.name} needs {k}"
            yield {**row, "status": "error", "error": error}
        else:
            value = estimate(len(values), round(sum(values)), k)
            yield {**row, "status": "ok", "value": value}
