"""Durations, rates, shares and prices as text, with their units."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400
ABSENT = "–"  # where there is no value  # noqa: RUF001


def count_text(value: float | None) -> str:
    """A whole number with thousands separators."""
    return ABSENT if value is None else f"{value:,.0f}"


def number_text(value: float | None) -> str:
    """A number with three significant digits: 0.0123, 4.56, 78.9, 1,235."""
    if value is None:
        return ABSENT
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    text = f"{value:#.3g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 100 else text


def seconds_text(value: float | None) -> str:
    """A duration in the unit that fits: 340 µs, 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{number_text(value * 1e6)} µs"
    if value < 0.9995:
        return f"{number_text(value * 1e3)} ms"
    if value < 99.5:
        return f"{number_text(value)} s"
    whole = round(value)
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02} s"
    minutes = round(value / MINUTE)
    if value < DAY:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(value / HOUR)
    return f"{hours // 24} d {hours % 24} h"


def share_text(part: float, whole: float) -> str:
    """A share in percent; never 0 % or 100 % unless it is."""
    if not whole:
        return ABSENT
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"
