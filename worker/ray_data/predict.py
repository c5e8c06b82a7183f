"""`predict`: a Ray data set in, a data set of results out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.data_sets.modes import MODES
from jobs.errors import JobError, invalid
from jobs.install import command_for
from worker.ray_data.arguments import PredictorArguments
from worker.ray_data.loading import check_engine_kwargs
from worker.ray_data.predictor import EnginePredictor
from worker.ray_data.rows import RowReader

if TYPE_CHECKING:
    from ray.data import Dataset


def predict(
    dataset: Dataset,
    model: str,
    *,
    mode: str = MODES[0],
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    delimiter: str | None = None,
    seed: int | None = None,
    run: str = "ray",
    engine_kwargs: Mapping[str, Any] | None = None,
    download: bool = False,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 64,
    max_concurrent_batches: int = 4,
    **map_batches: Any,
) -> Dataset:
    """The answers of a model to the rows of a data set, which are computed when they are read.

    `concurrency`: actors, each with the model in memory; two numbers are the fewest and the most.
    `batch_size`: rows that are read and written together. `max_concurrent_batches`: blocks that an
    actor works on at once, so that the engine's batch stays full while the last rows of one end.
    `map_batches`: further arguments of `Dataset.map_batches`, such as num_cpus and num_gpus, of one
    actor. `EnginePredictor` describes the others.

    Raises JobError for arguments that no row could be answered with.
    """
    try:
        from ray.data import ActorPoolStrategy
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "ray.data", "pandas"):
            raise
        raise JobError("unavailable", f"Ray Data is not installed: {command_for('ray')}") from None

    arguments = PredictorArguments(
        model,
        mode=mode,
        options=options,
        columns=columns,
        template=template,
        delimiter=delimiter,
        seed=seed,
        run=run,
        engine_kwargs=engine_kwargs,
        download=download,
    )
    check_engine_kwargs(engine_kwargs or {})
    reader = RowReader(replace(arguments, template=None))  # which an actor checks
    names = dataset.columns(fetch_if_missing=False)
    if names is not None:
        reader.kept(names)
        absent = next((name for name in columns or {} if name not in names), None)
        if absent is not None:
            raise invalid(
                f"columns: there is no column {absent!r}; the data set has: {', '.join(names)}",
                "columns",
            )
    few, most = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    return dataset.map_batches(
        EnginePredictor,
        fn_constructor_kwargs=dict(vars(arguments)),
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ActorPoolStrategy(
            min_size=few, max_size=most, max_concurrent_calls_per_actor=max_concurrent_batches
        ),
        **map_batches,
    )
