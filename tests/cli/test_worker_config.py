"""The file of `chatjobs work --config`."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from jobs.errors import JobError
from tests.cli.conftest import Run
from worker.cli import worker_config
from worker.cli.worker_config import ModelEntry, WorkerConfig, read_config, schema
from worker.model_spec import ModelSpec
from worker.option_values import DTYPES
from worker.residency.policy import ResidencyPolicy

SCHEMA = Path(worker_config.__file__).with_name("worker-schema.json")
FILE = """
device = "cpu"
memory = "90%"
host_memory = "2GiB"
max_wait = 60

[[models]]
model = "demo"
pin = true
aliases = ["small", "gpt-4o-mini"]
max_batch = 4
cache = "1MiB"
chat_template = "template.jinja"
trust_request_chat_template = true
prefix_cache = false

[[models]]
model = "org/large:Q4_K_M"
draft = "ngram"
preload = false
keep_alive = "5m"
"""


def read(folder: Path, text: str) -> WorkerConfig:
    path = folder / "worker.toml"
    path.write_text(text)
    return read_config(path)


def test_the_schema_that_is_shipped_is_that_of_the_code() -> None:
    """To write it: python -c "from worker.cli.worker_config import *; print(schema(), end='')"."""
    assert SCHEMA.read_text() == schema()
    jsonschema.Draft202012Validator.check_schema(json.loads(schema()))


def test_two_models_differ_in_their_options(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("")
    config = read(tmp_path, FILE)
    assert (config.device, config.memory, config.max_wait) == ("cpu", "90%", 60.0)
    assert config.host_memory == "2GiB"
    assert [one.policy for one in config.models] == [
        ResidencyPolicy(pin=True, preload=True, keep_alive=inf),
        ResidencyPolicy(pin=False, preload=False, keep_alive=300.0),
    ]
    defaults = ModelSpec(reference="", dtype="fp32", max_batch=16)
    first, second = (one.spec(defaults, tmp_path) for one in config.models)
    assert first == ModelSpec(
        reference="demo",
        aliases=("small", "gpt-4o-mini"),
        dtype="fp32",
        max_batch=4,
        cache_bytes=2**20,
        chat_template=tmp_path / "template.jinja",
        trust_request_chat_template=True,
        prefix_cache=False,
    )
    assert second == ModelSpec(
        reference="org/large:Q4_K_M", dtype="fp32", max_batch=16, draft="ngram"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nmodel = 'm'\nmaxbatch = 4", "unknown field 'models[0].maxbatch'; did you"),
        ("[[models]]\nmodel = 'm'\nmax_batch = '4'", "models[0].max_batch"),
        ("[[models]]\nmax_batch = 4", "field 'models[0].model' is required"),
        ("memori = '90%'\n[[models]]\nmodel = 'm'", "did you mean 'memory'?"),
        ("memory = '190%'\n[[models]]\nmodel = 'm'", "'190%' is no amount of memory"),
        ("device = 'gpu'\n[[models]]\nmodel = 'm'", "'gpu' is not a device"),
        ("[[models]]\nmodel = 'm'\nkeep_alive = 'soon'", "keep_alive 'soon': give seconds"),
        ("host_memory = 'x'\n[[models]]\nmodel = 'm'", "'x' is no amount of memory"),
        ("max_wait = -1\n[[models]]\nmodel = 'm'", "max_wait"),
        ("models = []", "models is empty"),
        ("models", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_was_meant(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(JobError) as refused:
        read(tmp_path, text)
    assert refused.value.message.startswith(f"{tmp_path}/worker.toml")
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("line", "message"),
    [("cache = '50%'", "give a size such as 2GiB"), ("chat_template = 'none'", "no file")],
)
def test_a_bad_option_of_a_model_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (one,) = read(tmp_path, f"[[models]]\nmodel = 'm'\n{line}").models
    with pytest.raises(JobError, match=message):
        one.spec(ModelSpec(reference=""), tmp_path)


def test_the_dtypes_are_those_of_the_command() -> None:
    literal, *_ = get_args(ModelEntry.model_fields["dtype"].annotation)
    assert set(get_args(literal)) <= {"auto", *DTYPES}


def test_the_command_reads_the_file_and_its_options_win(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, redis_server: Any
) -> None:
    path = tmp_path / "worker.toml"
    path.write_text("memory = '1kB'\n[[models]]\nmodel = 'demo'\npin = true\n")
    words = ("work", "--config", str(path), "--redis", redis_server.url, "--burst", "--no-record")
    refused = run(*words)
    assert refused.exit_code == 3
    assert "do not fit into --memory 1 KiB" in refused.stderr
    assert "  demo: " in refused.stderr
    done = run(*words, "--memory", "300MiB")
    assert done.exit_code == 0, done.stderr
    assert "of the budget of 300 MiB" in caplog.text
