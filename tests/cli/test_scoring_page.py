"""The commands in docs/scoring.md, and those in the README that lead to scores, do what these pages
say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import COMMAND
from tests.worker.site import Site

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scoring.md").read_text("utf-8")
JUDGE = "judge:Qwen/"  # a model that no test has
REAL = "SmolLM2-135M-Instruct.Q4_1"  # the demo stands in for it, and few rows for its data sets
QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)]
TASKS = [
    {"task": "sums", "input": f"{n} + 1?\nOptions:\n(A) {n + 1}\n(B) {n}", "target": "(A)"}
    for n in range(4)
]
README = (ROOT / "README.md").read_text("utf-8").partition("\n### Score a data set\n")[2]
BIN = Path(sys.executable).parent


def blocks(text: str) -> list[str]:
    """The indented blocks of a text, in order."""
    found = re.findall(r"(?<=\n\n)(?:    .*\n)+", text)
    return [re.sub("^    ", "", block, flags=re.MULTILINE) for block in found]


def is_output(block: str) -> bool:
    return re.match(r"[\w-]+: [\d,]+ in, ", block) is not None


def outputs_of(found: list[str], url: str, folder: Path) -> list[str]:
    """Run blocks of commands one behind the other: those of this package directly, others in a
    shell. A block that shows output has to be in that of the block before."""
    variables = {**os.environ, "CHATJOBS_REDIS_URL": url}
    variables["PATH"] = f"{BIN}:{os.environ['PATH']}"
    outputs: list[str] = []
    for block in found:
        if is_output(block):
            assert block.strip() in outputs[-1], outputs
            continue
        output = ""
        for command in re.split(r"\n(?! )", block.strip()):  # indented lines go on
            words = ["bash", "-ec", command]
            if command.startswith("chatjobs "):
                words = [str(COMMAND), *shlex.split(command.replace("\\\n", ""))[1:]]
            done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            output += done.stdout
        outputs.append(output)
    return outputs


def test_their_commands_work_one_behind_the_other(site: Site, tmp_path: Path) -> None:
    site.worker(real=True, models=["demo"])
    (three,) = blocks(README.partition("\n## ")[0])
    assert len(three.splitlines()) == 3
    (scored,) = outputs_of([three], site.url, tmp_path)
    assert scored.startswith("questions-demo: 2 in, 2 rows, 0 missing, 0 twice, 0 failed\n")
    assert re.search(r"^number +1\.0000 ", scored, re.M)
    for name, rows in (("gsm8k_test", QUESTIONS), ("bbh", TASKS)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    commands = [block.replace(REAL, "demo") for block in blocks(PAGE) if JUDGE not in block]
    assert len(blocks(PAGE)) == len(commands) + 2
    outputs = outputs_of(commands, site.url, tmp_path)
    assert "What is 17 + 25?" not in outputs[1] and "42" in outputs[1]
    for output, name in zip(outputs[-3:], ("gsm8k", "bbh", "bbh-choice"), strict=True):
        assert output.startswith(f"{name}: 4 in, 4 rows, 0 missing, 0 twice, 0 failed\n")
