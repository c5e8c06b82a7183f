"""Prints the main line of a job: the files listed in docs/design.md, in reading order.

    python -m tests.main_line

For each file: its number of lines, and the files of the main line that it imports. The backend
protocol stands between the queue and the engine, so no import crosses from one to the other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design.md"
HEADING = "## The main line of a job"
ENTRY = re.compile(r"^\d+\. (?:`([^`]+)`)?", re.MULTILINE)


def listed(page: str) -> list[str]:
    """The paths in the numbered list under HEADING. Raises ValueError if it is missing or has an
    entry without a path."""
    paths = ENTRY.findall(page.partition(f"\n{HEADING}\n")[2].partition("\n## ")[0])
    if not paths or not all(paths):
        raise ValueError(f"{PAGE.name} has no numbered list of paths under {HEADING!r}")
    return paths


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports, `from a import b` counted as both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def main() -> None:
    paths = listed(PAGE.read_text(encoding="utf-8"))
    numbers = {module_name(path): number for number, path in enumerate(paths, start=1)}
    total = 0
    for number, path in enumerate(paths, start=1):
        lines = line_count(ROOT / path)
        total += lines
        imported = imported_modules(ROOT / path)
        uses = [str(other) for name, other in numbers.items() if name in imported]
        print(f"{number:>3}. {path:<28} {lines:>4} lines", end="")
        print(f"   imports {', '.join(uses)}" if uses else "")
    print(f"     {len(paths)} files {total:>21} lines")


if __name__ == "__main__":
    main()
