"""Renders a page: one file without scripts, which loads nothing.

The template escapes all that it is given. The charts, which are drawn here, are the only markup
that it takes as it is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jobs.encoding import encodable
from jobs.errors import invalid
from jobs.report import units
from jobs.report.contents import Contents, title_of
from jobs.report.drawing import draw
from jobs.results.output_file import check_output
from jobs.sizes import figure_text, interval_text

GENERATOR = "chatjobs report"
HEAD_BYTES = 1000  # that have the name of the generator
BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they change the order of what follows
CONTROLS: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)},
    **{code: f"\\u{code:04x}" for code in BIDI},
}


def render(contents: Contents) -> str:
    """The HTML of a page. Lone surrogates of a configuration are shown as escapes. Raises JobError
    if its charts can't be drawn."""
    charts = (*contents.speeds, *contents.lengths)
    drawn = draw([one.drawing for one in charts if one.drawing is not None])
    templates = Environment(
        loader=PackageLoader("jobs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        figure=figure_text,
        interval=interval_text,
        count=units.count_text,
        seconds=units.seconds_text,
        visible=_visible,
    )
    style = files("jobs.report").joinpath("templates/report.css").read_text("utf-8")
    text = templates.get_template("report.html").render(
        page=contents,
        title=title_of(contents),
        generator=GENERATOR,
        version=version("chatjobs"),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(style),
        drawn=lambda drawing: Markup(drawn[drawing]),
    )
    return encodable(text)


def check_page(path: Path) -> None:
    """Raise InvalidRequest for a path that can't be written to, or that has a file which is no
    report."""
    check_output(path)
    if path.exists():
        with path.open("rb") as file:
            if GENERATOR.encode() not in file.read(HEAD_BYTES):
                raise invalid(
                    f"{path} exists and is no report of chatjobs: choose another file", "output"
                )


def _visible(text: str) -> str:
    """Control characters as pictures and escapes: a browser would drop them or obey them."""
    return text.translate(CONTROLS)
