"""Records what llama.cpp answers for the models and vocabularies of cases.py:
`python -m tests.worker.gguf.record PYTHON`, where PYTHON has llama-cpp-python
(`make oracle` builds such an environment and calls this). The tests compare with answers.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tests.worker.gguf.blocks import TYPES, make_type_file, make_wide
from tests.worker.gguf.cases import (
    COUNT,
    KINDS,
    MODELS,
    PROMPT,
    make_file,
    make_model,
    make_vocabulary,
    vocabularies,
)
from tests.worker.gguf.texts import texts

ANSWERS = Path(__file__).with_name("answers.json")
SCRIPT = Path(__file__).with_name("llama_answers.py")


def digest(ids: list[int]) -> str:
    """Short, so that the record of many texts stays small."""
    return f"{zlib.crc32(json.dumps(ids).encode()):08x}"


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        models: dict[str, dict[str, Any]] = {}
        for name in MODELS:
            checkpoint = make_model(folder / name, name)
            for kind in KINDS:
                file = make_file(checkpoint, folder / f"{name}-{kind}.gguf", kind)
                models[f"{name} {kind}"] = {"file": str(file), "prompt": PROMPT, "count": COUNT}
        wide = make_wide(folder / "wide")
        for type_ in TYPES:
            file = make_type_file(wide, folder / f"{type_.name}.gguf", type_)
            # One token at a time: batches of quantised weights crash on some CPUs.
            task = {"file": str(file), "prompt": PROMPT, "count": 8, "n_batch": 1}
            models[f"type {type_.name}"] = task
        files = {
            name: str(make_vocabulary(folder / f"{index}.gguf", name))
            for index, name in enumerate(vocabularies())
        }
        tasks = {"models": models, "vocabularies": files, "texts": texts()}
        (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
        command = [
            sys.argv[1],
            str(SCRIPT),
            str(folder / "tasks.json"),
            str(folder / "answers.json"),
        ]
        subprocess.run(command, check=True)
        answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    answers["vocabularies"] = {
        name: " ".join(map(digest, ids)) for name, ids in answers["vocabularies"].items()
    }
    ANSWERS.write_text(json.dumps(answers, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
