"""Column arithmetic: the lines of reasoning that the model writes before its answer.

Each line handles one digit, so that the model can learn it. Used by `training.tasks`.
"""

from __future__ import annotations


def padded(a: int, b: int) -> tuple[str, str]:
    """Both numbers, zero-padded to the width of the longer one."""
    width = max(len(str(a)), len(str(b)))
    return str(a).zfill(width), str(b).zfill(width)


def add_reasoning(a: int, b: int) -> str:
    """Adds column by column from the right; the last line is the result with its carry."""
    top, bottom = padded(a, b)
    lines, digits, carry = [f"{top}+{bottom}"], "", 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+{carry}={total % 10} carry {total // 10}")
        digits, carry = f"{total % 10}{digits}", total // 10
    return "\n".join([*lines, f"{carry}{digits}"])


def compare_reasoning(a: int, b: int) -> str:
    """Compares digit by digit from the left, up to the first difference."""
    lines = []
    for x, y in zip(*padded(a, b), strict=True):
        lines.append(f"{x}{'=' if x == y else '<' if x < y else '>'}{y}")
        if x != y:
            break
    return "\n".join(lines)


def subtract_reasoning(a: int, b: int) -> str:
    """Compares, subtracts the smaller from the larger number by columns, then adds the sign."""
    top, bottom = padded(max(a, b), min(a, b))
    lines = ["-".join(padded(a, b)), compare_reasoning(a, b), f"{top}-{bottom}"]
    digits, borrow = "", 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        rest = int(x) - int(y) - borrow
        lines.append(f"{x}-{y}-{borrow}={rest % 10} borrow {int(rest < 0)}")
        digits, borrow = f"{rest % 10}{digits}", int(rest < 0)
    return "\n".join([*lines, f"{'-' if a < b else ''}{digits}"])
