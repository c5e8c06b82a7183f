"""lm-evaluation-harness over the queue: its figures are those of its own `hf` model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from jobs.embedded import EmbeddedRedis
from tests.extras.evaluations import compare, evaluate, tasks, write_documents
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import ROOT

# lm_eval and its packages warn while they are imported.
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

COMMAND = Path(sys.executable).with_name("chatjobs")


class Models:
    """Two checkpoints, and the Redis of the worker that serves both. `folder`: for data."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.paths = {
            "random": make_checkpoint(folder / "random", "llama"),
            "demo": ROOT / "worker/demo/model",
        }


@pytest.fixture(scope="module")
def models(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    models = Models(redis_server.url, tmp_path_factory.mktemp("lm-eval"))
    write_documents(models.folder)
    words = ["work", "--model", "demo", "--model", str(models.paths["random"]), "--dtype", "fp32"]
    words += ["--redis", models.url, "--results", str(models.folder / "results")]
    worker = subprocess.Popen([COMMAND, *words])
    yield models
    worker.terminate()
    worker.wait()


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        pytest.param("random", {}, {}, id="random"),
        pytest.param("demo", {}, {}, id="demo"),
        # Contexts lose their beginning, and texts have windows.
        pytest.param("demo", {"max_length": 40}, {}, id="long"),
        pytest.param(
            "demo",
            {},
            {"apply_chat_template": True, "fewshot_as_multiturn": True},
            id="conversations",
        ),
    ],
)
def test_figures_are_those_of_hf(
    models: Models, name: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    path = str(models.paths[name])
    theirs = evaluate(
        models.folder, "hf", {"pretrained": path, "dtype": "float32", **arguments}, **options
    )
    ours = evaluate(
        models.folder, "chatjobs", {"model": name, "redis": models.url, **arguments}, **options
    )
    compare(ours, theirs)


def test_an_item_that_fails_is_named_by_its_row(models: Models) -> None:
    arguments = {"model": "random", "redis": models.url, "max_length": 2}
    with pytest.raises(JobError, match=r"row \d+ of run 'failing' \(task choices, document \d\)"):
        evaluate(
            models.folder,
            "chatjobs",
            {**arguments, "run": "failing"},
            tasks=tasks(models.folder)[:1],
        )


def test_the_command_has_our_model_and_those_of_lm_eval(models: Models) -> None:
    import yaml

    folder = models.folder / "tasks"
    folder.mkdir()
    (folder / "choices.yaml").write_text(yaml.safe_dump(tasks(models.folder)[0]))
    for model, given in (
        ("chatjobs", f"model=random,redis={models.url},run=command"),
        ("dummy", "model=none"),
    ):
        words = ["lm-eval", "run", "--model", model, "--model_args", given]
        words += ["--tasks", "choices", "--include_path", str(folder), "--limit", "2"]
        done = subprocess.run([COMMAND, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "|choices|" in done.stdout.replace(" ", ""), done.stdout
    samples = models.folder / "results" / "command" / "samples"
    assert samples.is_dir()


def test_the_entry_point_is_the_model() -> None:
    from jobs.lm_eval.model import QueueLM

    (found,) = entry_points(group="lm_eval.models", name="chatjobs")
    assert found.load() is QueueLM
