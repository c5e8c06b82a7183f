"""`chatjobs models check`: describes a model without reading its weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.cli.conftest import COMMAND, Run
from tests.cli.test_json import documented
from tests.hub import Hub
from tests.waiting import PATIENCE
from tests.worker.checkpoints import FAMILIES, make_checkpoint
from tests.worker.gguf.blocks import make_type_file, make_wide
from tests.worker.loading.hub_client import run_command
from worker import device
from worker.kernels import library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", shards=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described(family: str, run: Run, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "it", family, dtype="bfloat16")
    done = run("models", "check", str(path), "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    size = (path / "model.safetensors").stat().st_size
    assert (facts["model"], facts["family"], facts["dtype"]) == ("it", family, "bfloat16")
    assert facts["weight_bytes"] == 2 * facts["parameters"]
    assert 0 <= size - facts["weight_bytes"] < 40_000  # the file's header
    assert (facts["context_length"], facts["longest_sequence"]) == (512, 512)
    assert facts["fits"]
    assert facts["chat_template"]
    assert facts["device"] == "cpu" or facts["device"].startswith("cuda")


def test_types_without_integer_products_are_named_with_what_they_cost(
    run: Run, tmp_path: Path
) -> None:
    file = make_type_file(make_wide(tmp_path / "wide"), tmp_path / "it.gguf", Type.IQ3_S)
    shown = run("models", "check", str(file), "--device", "cpu").stdout
    if library.active() is None:
        assert "dequantised for each product, which is slow" in shown
        return
    assert "re-encoded as Q8_0 (+" in shown
    kept = run("models", "check", str(file), "--device", "cpu", "--keep-quantised").stdout
    assert "dequantised for each product, which is slow" in kept
    assert "\nslow        weights in IQ3_S are" in kept
    assert "\nslow " not in shown
    (facts,) = json.loads(run("models", "check", str(file), "--json").stdout)["products"]
    assert facts["type"] == "IQ3_S"
    assert facts["way"] == "re-encoded as Q8_0"
    assert facts["extra_bytes"] > 0


def test_the_default_output_is_lines(run: Run) -> None:
    done = run("models", "check", "demo", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["model"] == "demo"
    assert lines["family"] == "qwen3"
    assert lines["weights"].endswith("MiB in bfloat16")
    assert "in a step, " in lines["activations"]
    assert lines["device"].startswith("cpu (")
    assert lines["kernels"].startswith(("native, a", "torch alone"))
    assert lines["fits"] == "yes"


def test_a_model_that_does_not_fit_is_reported_with_numbers(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 1000)
    done = run("models", "check", str(folder), "--device", "cpu", "--json")
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert (facts["fits"], facts["longest_sequence"]) == (False, 0)
    assert f"{folder} needs 0.0 GiB for its weights in float32 and cpu has 0.0 GiB" in done.stderr


def test_a_long_context_is_shown_with_the_part_that_fits(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 3 * 2 * 2 * 16 * 4  # layers · keys and values · kv heads · head_dim · bytes
    weights = json.loads(run("models", "check", str(folder), "--json").stdout)["weight_bytes"]
    monkeypatch.setattr(device, "free_bytes", lambda _: weights + 4 * 112 * each)
    done = run("models", "check", str(folder), "--device", "cpu")
    assert "512 tokens, of which 112 fit beside the weights" in done.stdout


def test_only_headers_are_read(run: Run, folder: Path, tmp_path: Path) -> None:
    """NaN weights pass; a wrong shape in a header doesn't."""
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = "model-00001-of-00002.safetensors"
    tensors = load_file(folder / shard)
    (tmp_path / shard).unlink()
    save_file({name: one * float("nan") for name, one in tensors.items()}, tmp_path / shard)
    assert run("models", "check", str(tmp_path)).exit_code == 0
    name, one = next(iter(tensors.items()))
    save_file({**tensors, name: one[:5].clone()}, tmp_path / shard)
    done = run("models", "check", str(tmp_path))
    assert done.exit_code == 3
    assert f"tensor {name} has shape [5" in done.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "foo"}, "unsupported model_type 'foo' in"),
        ({"hidden_size": -1}, "field 'hidden_size' must be a whole number of at least 1, got -1"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "unsupported rope_type 'spiral'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq) is not"),
    ],
)
def test_an_unsupported_model_is_reported_in_one_sentence(
    change: dict[str, object], sentence: str, run: Run, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    done = run("models", "check", str(tmp_path))
    assert done.exit_code == 3
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_only_the_small_files_of_a_repository_are_downloaded(folder: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        hub.publish("org/tiny", folder)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            **{"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "elsewhere")},
            **{"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        }
        done = subprocess.run(
            [COMMAND, "models", "check", "org/tiny", "--json", "--download-dir", tmp_path / "kept"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert not any(name.endswith(".safetensors") for name in hub.fetched())
    assert facts["folder"].startswith(str(tmp_path / "kept"))
    assert (facts["model"], facts["family"], facts["downloaded"]) == ("org/tiny", "qwen3", False)
    assert facts["dtype"] == "float32"
    assert facts["parameters"] == 58_624


def test_a_model_that_was_pulled_is_read_without_the_hub(folder: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        hub.publish("org/tiny", folder)
        absent = run_command("models", "pull", "org/none", hub=hub, home=tmp_path)
        assert absent.returncode == 3 and "org/none" in absent.stderr.splitlines()[-1]
        pulled = run_command("models", "pull", "org/tiny", "--json", hub=hub, home=tmp_path)
    found = json.loads(pulled.stdout)
    assert (found["model"], found["downloaded"]) == ("org/tiny", True)
    for file in folder.glob("*.safetensors"):
        assert (Path(found["folder"]) / file.name).read_bytes() == file.read_bytes()
    again = run_command("models", "pull", "org/tiny", hub=hub, home=tmp_path, HF_HUB_OFFLINE="1")
    assert again.stderr.splitlines()[-1] == f"org/tiny: is in {found['folder']}"


@pytest.mark.parametrize("quiet", [True, False])
def test_the_output_of_a_worker_that_downloads(quiet: bool, folder: Path, tmp_path: Path) -> None:
    """Progress bars unless -q; never the log of the HTTP library, nor the token."""
    with Hub() as hub:
        hub.publish("org/tiny", folder)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            **{"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"},
            **{"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        }
        arguments = ["work", "--model", "org/tiny", "--redis", "embedded", "--burst"]
        done = subprocess.run(
            [COMMAND, *arguments, "--results", tmp_path / "results", *(["-q"] if quiet else [])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stderr
    assert ("Fetching" in done.stderr) is not quiet
    assert ("serves org/tiny" in done.stderr) is not quiet
    assert "HTTP" not in done.stderr
    assert "hf_secret" not in done.stderr


def test_quantize_writes_a_file_that_can_be_checked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("models", "quantize", "demo", "--type", "q8_0")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "demo-Q8_0.gguf: 3.9 MiB, Q8_0, 8.60 bits per weight\n"
    checked = run("models", "check", "demo-Q8_0.gguf", "--json")
    facts = json.loads(checked.stdout)
    assert (facts["family"], facts["fits"]) == ("qwen3", True)
    assert 0 < (tmp_path / "demo-Q8_0.gguf").stat().st_size - facts["weight_bytes"] < 100_000


def test_quantize_prints_json_and_takes_a_file_name(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "small.gguf"
    words = ("models", "quantize", "demo", "--type", "Q4_K_M", "-o", str(output), "--json")
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert set(json.loads(done.stdout)) == documented("models quantize")
    assert json.loads(done.stdout) == {
        "model": "demo",
        "file": str(output),
        "type": "Q4_K_M",
        "parameters": 3_805_184,
        "bytes": output.stat().st_size,
    }
    again = run(*words)
    assert again.exit_code == 2
    assert f"{output} exists already; give another name, or --force" in again.stderr
    assert run(*words, "--force").exit_code == 0


def test_quantize_refuses_what_it_cannot_write(run: Run, tmp_path: Path) -> None:
    missing = run("models", "quantize", str(tmp_path / "none"), "-o", str(tmp_path / "it.gguf"))
    assert missing.exit_code == 3
    assert missing.stderr.count("\n") == 1
    wrong = run("models", "quantize", "demo", "-o", str(tmp_path / "no" / "it.gguf"))
    assert wrong.exit_code == 2
    assert f"there is no folder {tmp_path / 'no'}; create it first" in wrong.stderr
