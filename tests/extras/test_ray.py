"""Ray Data on a local cluster: `predict`, actors that are killed, the examples of docs/ray.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import JobError, Results
from worker.ray_data import EnginePredictor, predict

# Ray and its packages warn while they are imported.
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs/ray.md"
COMMAND = Path(sys.executable).with_name("chatjobs")
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


class KilledOnce(EnginePredictor):
    """Kills its process after its first answers, which are lost."""

    def __init__(self, marker: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._marker = Path(marker)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        found = await super().__call__(batch)
        if not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def test_a_killed_actor_loses_no_row_and_doubles_none(tmp_path: Path) -> None:
    import ray

    rows = ray.data.from_items(
        [{"number": n, "prompt": f"What is {n} + {n}?"} for n in range(40)]
    ).repartition(5)
    arguments = {"model": "demo", "options": GREEDY, "columns": {"number": "row_index"}}
    found = rows.map_batches(
        KilledOnce,
        fn_constructor_kwargs={"marker": str(tmp_path / "killed"), **arguments},
        batch_format="pyarrow",
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=3),
    ).take_all()
    assert (tmp_path / "killed").exists()
    assert sorted(row["number"] for row in found) == list(range(40))
    assert all(row["status"] == "ok" and row["row_index"] == row["number"] for row in found)
    assert all(f"What is {row['number']} +" in row["messages"][0]["content"] for row in found)


def test_bad_rows_have_errors_and_order_is_kept_if_asked(tmp_path: Path) -> None:
    import ray

    context = ray.data.DataContext.get_current()
    options = context.execution_options
    options.preserve_order, before = True, options.preserve_order
    try:
        prompts = ["What is 2 + 3?", None, "2 + 3? " * 1500, "What is 3 + 3?"] * 3
        rows = ray.data.from_items(
            [{"id": f"row {n}", "prompt": prompt} for n, prompt in enumerate(prompts)]
        )
        found = predict(
            rows.repartition(4), "demo", options=GREEDY, concurrency=2, num_cpus=0.5, batch_size=3
        ).take_all()
    finally:
        options.preserve_order = before
    assert [row["id"] for row in found] == [f"row {n}" for n in range(12)]
    errors = [None, "invalid_request", "context_length_exceeded", None]
    assert [row["error_type"] for row in found] == errors * 3
    assert {row["text"] is None for row in found if row["status"] == "ok"} == {False}


def test_a_model_that_can_not_be_loaded_ends_the_run_with_a_sentence() -> None:
    import ray

    rows = ray.data.from_items([{"prompt": "?"}])
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        predict(rows, "/nowhere").take_all()
    assert "JobError: model_not_found: no folder '/nowhere': give a model folder" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"options": {"temprature": 0}}, "temprature"),
        ({"columns": {"qestion": "prompt"}}, "there is no column 'qestion'; the data set has: id"),
        ({"engine_kwargs": {"dtyp": "fp32"}}, "unknown argument 'dtyp'"),
    ],
)
def test_the_driver_refuses_what_no_row_can_be_answered_with(arguments: Any, sentence: str) -> None:
    import ray

    with pytest.raises(JobError, match=re.escape(sentence)):
        predict(ray.data.from_items([{"id": 1}]).materialize(), "demo", **arguments)


def test_the_examples_of_the_page_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    outputs = []
    for block in re.findall(r"(?<=\n\n)(?:    .*\n)+", PAGE.read_text("utf-8")):
        code = re.sub("^    ", "", block, flags=re.MULTILINE).replace("/shared", str(tmp_path))
        if code.startswith("chatjobs "):
            done = subprocess.run([COMMAND, *code.split()[1:]], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout)
        elif not code.startswith("pip "):
            exec(compile(code, str(PAGE), "exec"), names)
            outputs.append(capsys.readouterr().out)
    answers, errors, picks, scores = filter(None, outputs)
    assert "column 'question' (prompt) is empty" in answers
    assert "'error_type': 'invalid_request'" in errors and "'b'" not in errors
    assert "'target': '5'" in picks
    assert re.search(r"^number +\d", scores, re.M)
    assert [row["name"] for row in names["same"].take_all()] == ["a", "b", "c"]
    rows = Results(tmp_path / "results").table("questions").to_pylist()
    assert {row["custom_id"]: row["status"] for row in rows} == dict(a="ok", b="ok", c="error")
