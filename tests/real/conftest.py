"""Models that people download, and the same files in llama.cpp and transformers.

`make real` prepares .real (the files) and .oracle (llama-cpp-python), and runs these tests.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.real.files import FOLDER, GEMMA, SMOLLM2
from tests.worker.gguf.texts import FIXED
from worker import Engine

ROOT = Path(__file__).parents[2]
PROSE = (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")
WINDOW = 512  # tokens of prose whose likelihood is compared
COUNT = 24  # greedy tokens after each prompt
BEGINNINGS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n",
)
FILES = {"smollm2": SMOLLM2, "gemma": GEMMA}


class Real:
    """One file: our engine, prompts, and llama.cpp's answers about them."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, FOLDER / FILES[name]
        if not self.path.exists():
            pytest.fail(f"{self.path} is missing: make real downloads it")
        self.engine = Engine.load(str(self.path), device="cpu", max_batch=8)
        bos = [2] if name == "gemma" else []
        encode = self.engine.tokenizer.encode
        self.window = [*bos, *encode(PROSE, add_special_tokens=False)][:WINDOW]
        self.prompts = [[*bos, *encode(text, add_special_tokens=False)] for text in BEGINNINGS]

    @cached_property
    def llama(self) -> dict[str, Any]:
        """llama.cpp's answers, as llama.py describes them; kept for the next run."""
        tasks = {
            "file": str(self.path),
            "texts": FIXED,
            "windows": [self.window],
            "prompts": self.prompts,
            "count": COUNT,
        }
        folder = FOLDER.parent / "answers"
        folder.mkdir(exist_ok=True)
        asked, answered = folder / f"{self.name}-tasks.json", folder / f"{self.name}.json"
        text = json.dumps(tasks)
        if not answered.exists() or asked.read_text(encoding="utf-8") != text:
            answered.unlink(missing_ok=True)
            asked.write_text(text, encoding="utf-8")
            script = Path(__file__).with_name("llama.py")
            subprocess.run([ROOT / ".oracle/bin/python", script, asked, answered], check=True)
        answers: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return answers


@cache
def _real(name: str) -> Real:
    return Real(name)


@pytest.fixture(params=sorted(FILES))
def real(request: pytest.FixtureRequest) -> Real:
    """Each file in turn."""
    return _real(request.param)


@pytest.fixture
def smollm2() -> Real:
    """An instruct model with a chat template."""
    return _real("smollm2")
