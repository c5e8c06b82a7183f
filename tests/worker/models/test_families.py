"""Family files are independent of each other, and hold the facts about their family."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from worker.models.registry import FAMILIES

MODULES = sorted({family.build.__module__ for family in FAMILIES.values()})


@pytest.mark.parametrize("module", MODULES)
def test_no_family_imports_another(module: str) -> None:
    source = Path(str(sys.modules[module].__file__)).read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}", *(f"{node.module}.{n.name}" for n in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
    assert not imported & (set(MODULES) - {module})


def test_each_family_is_in_a_file_of_its_own() -> None:
    assert len(MODULES) == 17


def test_families_that_are_tied_by_default() -> None:
    tied = {name for name, family in FAMILIES.items() if family.tie_word_embeddings}
    assert tied == {"gemma2", "gemma3", "gemma3_text", "smollm3"}
