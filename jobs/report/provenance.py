"""The configuration of a run, and the versions and devices that its rows name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from jobs.results.files import Results
from jobs.results.run_json import RunJson

KEPT = 4  # different values of a column that are named

SAMPLING = (
    "temperature", "top_p", "min_p", "top_k", "max_tokens", "n", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "sampling_extra",
)  # fmt: skip
VERSIONS = (
    "model", "operation", "model_revision", "model_fingerprint", "tokenizer_hash",
    "chat_template_hash", "dtype", "engine", "engine_version", "torch_version", "cuda_version",
    "device_name", "host",
)  # fmt: skip


def configuration(noted: RunJson) -> dict[str, str]:
    """The settings of `chatjobs run`, as dotted names and JSON; empty for other runs."""
    return dict(_flat(noted.configuration or {}))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if value is None or value == {} or value == []:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{before}{name}", text


def column_values(results: Results, run: str, columns: Sequence[str]) -> dict[str, str]:
    """The different values of columns as text, of those that have any. A column with many says
    so."""
    found: dict[str, dict[Any, None]] = {name: {} for name in columns}
    for batch in results.dataset(run).to_batches(columns=list(columns)):
        for name, values in found.items():
            if len(values) <= KEPT:
                different = pc.unique(batch[name]).drop_null()
                values.update(dict.fromkeys(different[: KEPT + 1].to_pylist()))
    return {name: _listed(values) for name, values in found.items() if values}


def _listed(values: Mapping[Any, None]) -> str:
    shown = ", ".join(_text(one) for one in [*values][:KEPT])
    return f"{shown} and more" if len(values) > KEPT else shown


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
