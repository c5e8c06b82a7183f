"""Reports in headless Chromium, on phones and desktops, light and dark, by keyboard and on paper.

`make browser` runs them, and leaves screenshots in browser/ for people to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Results
from jobs.report.contents import read_contents
from jobs.report.page import render
from tests.browser.chromium import Page, Scheme, opened
from tests.jobs.report.runs import failed, large_run, timed
from tests.jobs.scores.runs import make_run

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).parents[2] / "browser"
PHONE, DESKTOP = 390, 1280  # CSS pixels
LONG = "w" * 300
WORDS = {
    "one": ("The audit holds", "Rows per second", "Price per 1,000 rows", "level: easy"),
    "several": ("3 runs", "one", "two", "failed", "Not scored: failed"),
    "failed": ("No row was started", "has no scores yet", "<b>too slow</b>"),
}
# Elements that reach beyond the page, outside of areas that scroll.
WIDE = """[...document.querySelectorAll("main *, header *")].filter(
    one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        && !one.closest(".scroll") && !one.closest(".hidden")
).map(one => one.outerHTML.slice(0, 99))"""
# Text of the charts whose height on the screen is below 9 pixels.
SMALL = """[...document.querySelectorAll("svg text")].filter(one => one.textContent
    && one.getBoundingClientRect().height < 9).map(one => one.textContent)"""
# Contrast of two colours as the browser computes them.
CONTRAST = """(() => {
    const linear = one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const light = text => text.match(/[\\d.]+/g).slice(0, 3).map(one => linear(one / 255))
        .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
    const style = query => getComputedStyle(document.querySelector(query));
    const card = light(style("section").backgroundColor);
    return ["section", ".footnote", "nav a", "svg text", "th"].map(query => {
        const found = style(query);
        const text = light(query.startsWith("svg") ? found.fill : found.color);
        return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
    });
})()"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name."""
    root = tmp_path_factory.mktemp("results")
    large_run(root, "one", model=LONG, device_name="a device with a long name")
    large_run(root, "two", rows=25, custom_id=LONG)
    rows = [failed("timeout", f"<b>too slow</b> {LONG}"), failed(LONG, "x")]
    make_run(root, [*rows, *rows], "failed")
    make_run(root, [timed(0, 1)], "few")
    results = Results(root)
    found = {}
    for name, runs in {
        "one": ["one"],
        "several": ["one", "two", "failed"],
        "failed": ["failed"],
        "few": ["few"],
    }.items():
        by = ["level"] if name == "one" else []
        found[name] = root / f"{name}.html"
        found[name].write_text(
            render(read_contents(results, runs, by, price_per_hour=2.5)), "utf-8"
        )
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    SCREENSHOTS.mkdir(exist_ok=True)
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield Page(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["one", "several", "failed", "few"])
def test_the_page_fits_loads_nothing_and_has_no_errors(
    page: Page, files: dict[str, Path], name: str, width: int, scheme: Scheme
) -> None:
    page.show(files[name].as_uri(), width, scheme)
    page.screenshot(SCREENSHOTS / f"report-{name}-{width}-{scheme}.png")
    assert page.problems == []
    assert page.requests == [files[name].as_uri()]
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(WIDE) == []
    assert page.value(SMALL) == []
    text = page.value("document.body.innerText")
    assert [words for words in WORDS.get(name, ()) if words not in text] == []
    assert page.value("document.querySelectorAll('script, main img, main b b').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Page, files: dict[str, Path], scheme: Scheme) -> None:
    page.show(files["one"].as_uri(), DESKTOP, scheme)
    assert min(page.value(CONTRAST)) >= 4.5  # WCAG's level AA


def test_links_and_wide_tables_are_reached_by_the_keyboard(
    page: Page, files: dict[str, Path]
) -> None:
    page.show(files["several"].as_uri(), PHONE, "light")
    reached = []
    for _ in range(20):
        page.press("Tab")
        reached.append(page.value("document.activeElement.getAttribute('href')"))
        reached.append(page.value("document.activeElement.className"))
    assert {"#summary", "#configuration", "scroll"} <= {*reached}


def test_it_prints(page: Page, files: dict[str, Path], tmp_path: Path) -> None:
    page.show(files["one"].as_uri(), DESKTOP, "dark")
    page.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
