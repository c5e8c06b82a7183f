"""Runs whose model a real worker serves with other weights than before, under the same name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import keys
from tests.cli.conftest import COMMAND
from tests.waiting import PATIENCE, wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site

LINES = ['{"prompt": "one"}', '{"prompt": "two"}', '{"prompt": ', *['{"prompt": "more"}'] * 3]
FIRST = ("--limit", "3")  # the last of these is no request

Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command(site: Site, tmp_path: Path) -> Command:
    """`command("--json")`: the process of `chatjobs run` for the run r1."""
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(LINES))

    def start(*words: str) -> subprocess.Popen[str]:
        places = ("--redis", site.url, "--results", str(site.folder), "--run", "r1", "-m", "m")
        fixed = ("--max-tokens", "4", "-o", "temperature=0")
        return subprocess.Popen(
            [str(COMMAND), "run", str(file), *places, *fixed, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def make_model(folder: Path, seed: int) -> str:
    """Write the model that is served as m, over another one."""
    return str(make_checkpoint(folder / "m", num_hidden_layers=1, seed=seed))


def test_a_run_does_not_go_on_with_other_weights(
    site: Site, tmp_path: Path, command: Command
) -> None:
    worker = site.worker(real=True, models=[make_model(tmp_path, 1)])
    code, out, _ = ended(command(*FIRST))
    assert (code, out) == (1, "r1: 3 in, 3 rows, 0 missing, 0 twice, 1 failed\n")
    before, noted = site.rows("r1"), site.results.config("r1")
    assert worker.stop() == 0

    worker = site.worker(real=True, models=[make_model(tmp_path, 2)])
    site.wait_for_workers()
    for words in ((), ("--retry-failed", *FIRST), ("--dry-run",)):
        code, _, err = ended(command(*words))
        assert code == 2, err
        assert "run 'r1' has 2 answers of another version of 'm' than worker" in err
        assert "serves now (weights " in err
        assert "tokenizer" not in err  # it is the same one
        assert site.rows("r1") == before  # the failed one, too
        assert site.results.config("r1") == noted
        assert not site.redis.exists(keys.queue("m", "bulk"))
    code, out, err = ended(command(*FIRST))  # nothing is left to run
    assert (code, "3 rows, 0 missing" in out) == (1, True), err
    assert worker.stop() == 0

    site.worker(real=True, models=[make_model(tmp_path, 1)])
    site.wait_for_workers()
    code, out, err = ended(command())
    assert (code, out) == (1, "r1: 6 in, 6 rows, 0 missing, 0 twice, 1 failed\n")
    assert "versions" not in err


def test_a_mixture_is_named_with_its_rows(site: Site, tmp_path: Path, command: Command) -> None:
    worker = site.worker(real=True, models=[make_model(tmp_path, 1)])
    ended(command(*FIRST))
    assert worker.stop() == 0
    going = command("--json", "--max-error-rate", "0.5")  # there is no worker to compare with
    wait_until(lambda: site.redis.llen("rq:queue:bulk:m") == 3)
    site.worker(real=True, models=[make_model(tmp_path, 2)])
    code, out, err = ended(going)
    assert code == 0, err
    found = json.loads(out)
    assert (found["holds"], found["mixed"]) == (True, True)
    first, second = found["versions"]
    assert (first["model"], first["rows"], second["model"], second["rows"]) == ("m", 3, "m", 2)
    assert first["model_fingerprint"] != second["model_fingerprint"]
    assert first["tokenizer_hash"] == second["tokenizer_hash"]
    weights = [one["model_fingerprint"][:12] for one in (first, second)]
    sentence = (
        f"run r1 has answers of 2 versions of model 'm' (weights {weights[0]}: 3 rows; weights "
        f"{weights[1]}: 2 rows): its figures are of a mixture"
    )
    assert sentence in err
    assert "versions" not in ended(command("--quiet", "--max-error-rate", "0.5"))[2]
