"""The types between queue side and engine agree with what is recorded of them."""

from __future__ import annotations

import dataclasses

from bench.fleet_workers import NullBackend
from jobs.operations import rows_of
from tests.worker.fake_backend import FakeBackend
from worker.backend import Backend, ModelInfo, SwappingBackend
from worker.model_spec import ModelSpec


def test_each_text_field_of_a_model_that_rows_record_is_found_by_its_name() -> None:
    backend = FakeBackend()
    info = dataclasses.asdict(backend.load(ModelSpec(reference="fake")))
    backend.close()
    names = [field.name for field in dataclasses.fields(ModelInfo)]
    provenance = {**info, **{name: f"value of {name}" for name in names}}
    (row,) = rows_of({"provenance": provenance})  # type: ignore[typeddict-item]
    found = {value.removeprefix("value of ") for value in row.values() if "value of" in str(value)}
    assert found == set(names) - {
        "name", "reference", "family", "parameters", "weight_bytes", "device", "context_length",
        "takes_templates",
    }  # fmt: skip


def test_a_backend_without_a_budget_need_not_swap_models() -> None:
    backend: Backend = NullBackend(1)
    assert not isinstance(backend, SwappingBackend)
    assert backend.memory().budget is None
