"""The versions of a model that have made the answers of a run, as its rows name them.

A worker that is started again may serve other weights under the same name, and two workers may
serve one model in different data types. Figures of answers of several versions are those of a
mixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.sizes import counted

SHOWN = 12  # characters of a hash in a sentence


class ModelVersion(NamedTuple):
    """What decides on the answers of a model, by the columns of a row: another value in one of
    them is another version. The commit of a repository is not: it changes with its README, too."""

    model_fingerprint: str
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> ModelVersion:
        """From a row, or what a worker publishes; further values are left out."""
        return cls(**{name: columns[name] for name in cls._fields if name in columns})


class Answers(NamedTuple):
    """The number of answers of a run that one version of a model has made. `model`: its name in
    the requests."""

    model: str
    version: ModelVersion
    rows: int

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, **self.version._asdict(), "rows": self.rows}


LABELS = ModelVersion("weights", "tokenizer", "chat template", "dtype")


def read_answers(rows: Any) -> tuple[Answers, ...]:
    """Count the answers of a pyarrow Dataset by version: the model with the first name first, and
    of each model the version with the most rows. Rows without an answer, and those of no worker's
    model, are left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ["model", *ModelVersion._fields]
    is_answer = (pc.field("status") == "ok") & pc.field("model_fingerprint").is_valid()
    counts: Counter[tuple[str, ModelVersion]] = Counter()
    # The metadata of a file is about half a megabyte, and a run may have thousands of files.
    batches = rows.to_batches(columns=names, filter=is_answer, cache_metadata=False)
    for batch in batches:
        table = pa.Table.from_batches([batch]).group_by(names, use_threads=False)
        for group in table.aggregate([([], "count_all")]).to_pylist():
            counts[group["model"], ModelVersion.of(group)] += group["count_all"]
    found = [Answers(model, version, count) for (model, version), count in counts.items()]
    return tuple(sorted(found, key=lambda one: (one.model, -one.rows, str(one.version))))


def is_mixture(found: Sequence[Answers]) -> bool:
    """True if two versions of one model have made answers."""
    return len({one.model for one in found}) < len(found)


def mixture_sentence(run: str, found: Sequence[Answers]) -> str:
    """A sentence for people about the models with several versions; "" if there is none."""
    clauses = []
    for model in dict.fromkeys(one.model for one in found):
        of_model = [one for one in found if one.model == model]
        if len(of_model) > 1:
            parts = [f"{_differing(one, of_model)}: {counted(one.rows, 'row')}" for one in of_model]
            clauses.append(f"{len(of_model)} versions of model {model!r} ({'; '.join(parts)})")
    if not clauses:
        return ""
    return f"run {run} has answers of {', and '.join(clauses)}: its figures are of a mixture"


def difference(before: ModelVersion, after: ModelVersion) -> str:
    """The values that differ: "weights 1c41b6d0a9f2 → 90e1f36b77aa, dtype float32 → bfloat16"."""
    return ", ".join(
        f"{label} {_shown(old)} → {_shown(new)}"
        for label, old, new in zip(LABELS, before, after, strict=True)
        if old != new
    )


def _differing(one: Answers, beside: Sequence[Answers]) -> str:
    """The values of a version in which others beside it differ."""
    columns = zip(LABELS, *(each.version for each in beside), strict=True)
    differ = [len(set(values)) > 1 for _, *values in columns]
    pairs = zip(LABELS, one.version, differ, strict=True)
    return ", ".join(f"{label} {_shown(value)}" for label, value, differs in pairs if differs)


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    is_hash = len(value) > SHOWN and value.isalnum()
    return value[:SHOWN] if is_hash else value
