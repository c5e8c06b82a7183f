"""lm-evaluation-harness over the queue on the weights of SmolLM2-135M: the figures are those of its
own `hf` model. `make real` runs it: it has the weights, and makes the environment of
`make extras`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.embedded import EmbeddedRedis
from tests.extras.evaluations import compare, evaluate, write_documents
from tests.extras.test_lm_eval import COMMAND
from tests.real.dequantised import dequantise
from tests.real.files import FOLDER, SMOLLM2

# lm_eval and its packages warn while they are imported.
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

DOCUMENTS = 4  # of each task


def test_figures_on_real_weights_are_those_of_hf(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    file, folder = FOLDER / SMOLLM2, tmp_path / "smollm2"
    assert file.exists(), f"{file} is missing: make real downloads it"
    dequantise(file, folder)
    write_documents(tmp_path)
    words = ["work", "--model", str(folder), "--dtype", "fp32", "--redis", redis_server.url]
    worker = subprocess.Popen([COMMAND, *words, "--results", str(tmp_path / "results")])
    try:
        given = {"pretrained": str(folder), "dtype": "float32"}
        theirs = evaluate(tmp_path, "hf", given, limit=DOCUMENTS)
        given = {"model": "smollm2", "redis": redis_server.url}
        ours = evaluate(tmp_path, "chatjobs", given, limit=DOCUMENTS)
    finally:
        worker.terminate()
        worker.wait()
    compare(ours, theirs)
    # Equal nonsense would be equal as well.
    assert ours["results"]["texts"]["bits_per_byte,none"] < 1
