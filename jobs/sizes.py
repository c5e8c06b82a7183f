"""Counts, figures and numbers of bytes as text, for messages."""

from __future__ import annotations

UNITS = ((1e6, "MB"), (1e3, "kB"))


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 row, 2 rows."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(count: float) -> str:
    """A number of bytes in the unit that fits: 17.0 MB, 4.1 kB, 200 bytes."""
    for factor, unit in UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return counted(round(count), "byte")


def size_texts(first: float, second: float) -> tuple[str, str]:
    """Two numbers that are compared: with all their digits if they would look the same."""
    texts = size_text(first), size_text(second)
    if first != second and texts[0] == texts[1]:
        return counted(round(first), "byte"), counted(round(second), "byte")
    return texts


def figure_text(value: float | None) -> str:
    """A figure with four places below 10 and two above; empty if there is none."""
    if value is None:
        return ""
    return (
        f"{value:.4f}"
        if abs(value) < 10
        else f"{value:.2f}"
        if abs(value) < 1e6
        else f"{value:.3e}"
    )


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval of figures, empty if there is none."""
    return "" if interval is None else " to ".join(map(figure_text, interval))
