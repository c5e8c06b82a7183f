"""Charts of a page: their specifications by Altair, which `draw` of drawing.py draws.

Colours are CSS variables of the page, so that one drawing serves light and dark. A chart is as wide
as a phone; the page puts several beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from jobs.report.distributions import Distribution
from jobs.report.drawing import Drawing

WIDTH, HEIGHT = 340, 190  # CSS pixels
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])  # runs differ without colour, too
SECONDS = (
    "datum.value < 0.000999 ? format(datum.value * 1e6, '~g') + ' µs'"
    " : datum.value < 0.999 ? format(datum.value * 1e3, '~g') + ' ms'"
    " : format(datum.value, '~g') + ' s'"
)
COUNTS = "format(datum.value, datum.value < 10000 ? ',~g' : '~s')"
SHARES = "format(datum.value, '~%')"


def histogram(data: Distribution, label: str, *, seconds: bool) -> Drawing:
    """The share of each run's rows in each bin: bars for one run, steps for several."""
    edges = data.edges
    scale = alt.Scale(
        type="log" if data.logarithmic else "linear",
        domain=[edges[0], edges[-1]],
        nice=False,
        zero=False,
    )
    axis = alt.Axis(
        labelExpr=SECONDS if seconds else COUNTS,
        title=None,
        grid=False,
        labelFlush=True,
        labelOverlap=True,
        **({"values": _decades(edges)} if data.logarithmic else {"tickCount": 5}),
    )
    shares = alt.Y(
        "share:Q",
        axis=alt.Axis(labelExpr=SHARES, title=None, tickCount=4),
        scale=alt.Scale(domainMin=0),
    )
    if len(data.shares) == 1:
        rows = [
            {"from": start, "to": end, "share": share}
            for start, end, share in zip(edges, edges[1:], data.shares[0], strict=False)
            if share
        ]
        chart = alt.Chart(alt.Data(values=rows)).mark_bar(
            color=_colour(0), stroke="var(--card)", strokeWidth=0.5
        )
        encoded = chart.encode(
            x=alt.X("from:Q", scale=scale, axis=axis), x2="to", y=shares, y2=alt.datum(0)
        )
        return _drawing(encoded, label)
    steps = [
        {"at": edge, "share": share, "run": str(run)}
        for run, values in enumerate(data.shares)
        if any(values)
        for edge, share in zip(edges, (*values, values[-1]), strict=True)
    ]
    chart = alt.Chart(alt.Data(values=steps)).mark_line(interpolate="step-after", strokeWidth=1.6)
    return _drawing(
        chart.encode(
            x=alt.X("at:Q", scale=scale, axis=axis), y=shares, **_by_run(len(data.shares))
        ),
        label,
    )


def curves(rates: Sequence[Sequence[float]], part: float, label: str) -> Drawing:
    """A rate of each run over the time since its start. `part`: seconds between two values."""
    longest = part * max(len(one) for one in rates)
    unit, name = next(
        (unit, name)
        for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.0, "ms"))
        if longest >= 3 * unit
    )
    unit = unit or 1e-3
    values = [
        {"at": place * part / unit, "rate": rate, "run": str(run)}
        for run, one in enumerate(rates)
        for place, rate in enumerate((*one, *one[-1:]))
    ]
    chart = alt.Chart(alt.Data(values=values))
    several = len(rates) > 1
    drawn = (
        chart.mark_line(interpolate="step-after", strokeWidth=1.6)
        if several
        else chart.mark_area(
            interpolate="step-after",
            color=_colour(0),
            fillOpacity=0.25,
            line={"color": _colour(0), "strokeWidth": 1.6},
        )
    )
    return _drawing(
        drawn.encode(
            x=alt.X(
                "at:Q",
                axis=alt.Axis(
                    title=None,
                    grid=False,
                    tickCount=5,
                    labelFlush=True,
                    labelExpr=f"format(datum.value, ',~g') + ' {name}'",
                ),
                scale=alt.Scale(nice=False, domain=[0, longest / unit]),
            ),
            y=alt.Y("rate:Q", axis=alt.Axis(title=None, tickCount=4, labelExpr=COUNTS)),
            **(_by_run(len(rates)) if several else {}),
        ),
        label,
    )


def _decades(edges: Sequence[float]) -> list[float]:
    """Round values for a logarithmic axis: powers of ten, with more between them on short axes."""
    wide = edges[-1] / edges[0]
    steps: Sequence[float]
    if wide <= 8:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    else:
        steps = (1, 2, 5) if wide <= 30 else (1, 3) if wide <= 1000 else (1,)
    return [value for value in _powers(steps) if edges[0] * 0.999 <= value <= edges[-1] * 1.001]


def _powers(steps: Sequence[float]) -> Iterator[float]:
    for power in range(-7, 10):
        yield from (float(f"{step}e{power}") for step in steps)


def _by_run(count: int) -> dict[str, Any]:
    """Colours and dashes of runs, in their order; the page has the legend."""
    names = [str(number) for number in range(count)]
    colours = alt.Scale(domain=names, range=[_colour(number) for number in range(count)])
    dashes = alt.Scale(
        domain=names, range=[DASHES[number % len(DASHES)] for number in range(count)]
    )
    return {
        "color": alt.Color("run:N", scale=colours, legend=None),
        "strokeDash": alt.StrokeDash("run:N", scale=dashes, legend=None),
    }


def _colour(run: int) -> str:
    return f"var(--run-{run + 1})"


def _drawing(chart: Any, label: str) -> Drawing:
    """A chart in the style of the page."""
    sized = chart.properties(
        width=WIDTH,
        height=HEIGHT,
        autosize=alt.AutoSizeParams(type="fit", contains="padding"),
        padding={"left": 2, "top": 8, "right": 8, "bottom": 2},
        background="transparent",
    )
    themed = (
        sized.configure(font="Arial", aria=False)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor="var(--muted)",
            labelFontSize=11,
            gridColor="var(--grid)",
            domainColor="var(--rule)",
            tickColor="var(--rule)",
            ticks=False,
            labelPadding=6,
        )
        .configure_axisY(domain=False)
        .configure_axisX(ticks=True, tickSize=4, labelPadding=4)
    )
    return Drawing(themed.to_dict(), label)
