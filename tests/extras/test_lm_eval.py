"""lm-evaluation-harness over the queue: its figures are those of its own `hf` model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from jobs.embedded import EmbeddedRedis
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import ROOT

# lm_eval and its packages warn while they are imported.
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

COMMAND = Path(sys.executable).with_name("chatjobs")
TOLERANCE = 1e-3
DOCUMENTS = [
    {
        "question": f"What is {number} plus {number + 2}?",
        "choices": [f"{2 * number + 2}", f"the number {number}", "not a number at all", "No."],
        "answer": number % 4,
        "text": "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * number,
    }
    for number in range(1, 9)
]
Evaluate = Callable[..., dict[str, Any]]


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
    (models.folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    words = ["work", "--model", "demo", "--model", str(models.paths["random"]), "--dtype", "fp32"]
    words += ["--redis", models.url, "--results", str(models.folder / "results")]
    worker = subprocess.Popen([COMMAND, *words])
    yield models
    worker.terminate()
    worker.wait()


def tasks(folder: Path) -> list[dict[str, Any]]:
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{question}}\nAnswer:",
    }
    generation = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "dog", "<|im_end|>"], "max_gen_toks": 10},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices"}
    return [
        {**common, **choice, "task": "choices", "doc_to_target": "answer", "num_fewshot": 2},
        # White space at the end of the context, and none before the choices.
        {
            **{**common, **choice, "task": "spaces", "doc_to_target": "answer"},
            **{"doc_to_text": "{{question}} \n ", "target_delimiter": ""},
        },
        # An empty context.
        {**common, **choice, "task": "alone", "doc_to_target": "answer", "doc_to_text": ""},
        {
            **{**common, "task": "texts", "output_type": "loglikelihood_rolling"},
            **{"doc_to_text": "", "doc_to_target": "{{text}}"},
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        {**common, **generation, "task": "answers", "num_fewshot": 1},
        {**common, **generation, "task": "again", "repeats": 2},
    ]


def evaluate(models: Models, model: str, arguments: dict[str, Any], **options: Any) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import model_registry

    import lm_eval.models  # noqa: F401  # isort: skip

    if "chatjobs" not in model_registry:
        model_registry.register("chatjobs", target="jobs.lm_eval.model:QueueLM")
    return simple_evaluate(
        model=model,
        model_args=arguments,
        device="cpu",
        bootstrap_iters=0,
        **{"tasks": tasks(models.folder), **options},
    )


def compare(ours: Any, theirs: Any) -> None:
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in theirs["samples"].items():
        for own, other in zip(ours["samples"][task], samples, strict=True):
            where = f"{task}, document {other['doc_id']}"
            for own_answers, answers in zip(own["resps"], other["resps"], strict=True):
                for answer, wanted in zip(own_answers, answers, strict=True):
                    if isinstance(wanted, tuple):
                        assert answer[0] == pytest.approx(wanted[0], abs=TOLERANCE), where
                        assert answer[1] == wanted[1], where
                    elif isinstance(wanted, float):
                        assert answer == pytest.approx(wanted, rel=TOLERANCE), where
                    else:
                        assert answer == wanted, where
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=TOLERANCE), metric


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
        models, "hf", {"pretrained": path, "dtype": "float32", **arguments}, **options
    )
    ours = evaluate(
        models, "chatjobs", {"model": name, "redis": models.url, **arguments}, **options
    )
    compare(ours, theirs)


def test_an_item_that_fails_is_named_by_its_row(models: Models) -> None:
    arguments = {"model": "random", "redis": models.url, "max_length": 2}
    with pytest.raises(JobError, match=r"row \d+ of run 'failing' \(task choices, document \d\)"):
        evaluate(
            models,
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
