"""folio/experiments/charts.py, chart.js, and line_chart.js: the data in a page, and the charts in a browser."""

import math
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folio.experiments.charts import (
    Axis,
    Line,
    LineGroup,
    Mark,
    Panel,
    bar_chart,
    line_chart,
    page_with_charts,
    parallel_chart,
)
from tests.support.charts import charts_in, ticks_of

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">&<b>é"
SVG = "{http://www.w3.org/2000/svg}"


def lines_page(title: str = "page") -> str:
    """Two panels; one line grows tenfold at each step, and the other has a gap and markers."""
    steps = list(range(1, 7))
    lines = [Line("grows", steps, [10.0**step for step in steps])]
    lines += [Line("grows: rate", steps, [0.1 * step for step in steps], panel=1)]
    others = [Line(HOSTILE, steps, [5e3, 4e3, math.nan, 3e3, 2e3, 0.0], points=True, dash="dashed")]
    groups = [LineGroup("grows", lines, [Mark(3, "dotted")]), LineGroup(HOSTILE, others)]
    panels = [Panel("loss"), Panel("rate", 100, from_zero=True)]
    chart = line_chart("curves", "Curves", "step", panels, groups, "A note.")
    return page_with_charts(title, [chart])


def parallel_page() -> str:
    rows = [f"{i}: x" for i in range(4)]
    axes = [
        Axis("n_head", [0, 0, 1, 1], ["2", "4"]),
        Axis("rate", [1e-4, 1e-3, 1e-2, 1e-1], bounds=(1e-4, 1e-1), log=True),
        Axis("validation loss", [1.0, 2.0, 3.0, 4.0]),
    ]
    return page_with_charts("p", [parallel_chart("settings", "Settings", rows, axes)])


def test_the_data_is_json_without_html():
    html = lines_page(HOSTILE)
    chart = charts_in(html)["curves"]
    assert chart["groups"][1]["name"] == HOSTILE and chart["groups"][1]["lines"][0]["y"][2] is None
    assert chart["groups"][0]["marks"] == [{"x": 3, "dash": "dotted"}]
    assert html.count("</script>") == 2 and "<img" not in html and "<html lang='en'>" in html
    assert len(html.encode()) < 200_000 and "://" not in html.replace("http://www.w3.org/2000/svg", "")
    bars = page_with_charts("p", [bar_chart("bars", "B", {HOSTILE: 1.0})])
    assert charts_in(bars)["bars"]["bars"] == [[HOSTILE, 1.0]] and "<img" not in bars


def place_of(page: Any, x: float, panel: int = 0) -> tuple[float, float]:
    """Window coordinates at a fraction of a panel's width."""
    box = page.locator("figure .drawing > svg").bounding_box()
    inner = page.locator("figure .drawing svg svg").first
    left, width = (float(inner.get_attribute(name)) for name in ("x", "width"))  # with 4 pixels more at both ends
    middle = [26 + 150, 26 + 300 + 22 + 26 + 50][panel]  # of the heights in lines_page
    return box["x"] + left + 4 + x * (width - 8), box["y"] + middle


def point_at(page: Any, x: float, panel: int = 0) -> list[list[str]]:
    """Point at a fraction of the panel's width, and return the rows of values."""
    page.mouse.move(*place_of(page, x, panel))
    return [row.locator("td").all_inner_texts() for row in page.locator(".values tr").all()]


def drag(page: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=4)
    page.mouse.up()


def ticks(page: Any, anchor: str) -> list[str]:
    """Return the labels of an axis: "end" for y, "middle" for x. Their first child is the text, another one a title."""
    texts = page.locator(f"figure .drawing > svg > text[text-anchor={anchor}]")
    return texts.evaluate_all("texts => texts.map(text => text.firstChild.textContent)")


def test_the_pointer_shows_the_values_at_the_nearest_step(open_page):
    page = open_page(lines_page())
    assert point_at(page, 0.0) == [[HOSTILE, "5,000", ""], ["grows", "10", ""]]
    assert point_at(page, 0.39) == [[HOSTILE, "4,000", "at 2"], ["grows", "1,000", ""]]  # a gap at step 3
    assert point_at(page, 1.0, panel=1) == [["grows: rate", "0.6", ""]]
    assert page.title() == "page" and page.locator("figure img").count() == 0
    page.mouse.move(5, 5)
    assert page.locator(".values").is_hidden()


def test_arrows_show_the_values(open_page):
    page = open_page(lines_page())
    chart = page.get_by_role("application", name="Curves")
    chart.focus()

    def values_after(*keys: str) -> list[list[str]]:
        for key in keys:
            page.keyboard.press(key)
        return [row.locator("td").all_inner_texts() for row in page.locator(".values tr").all()]

    assert values_after("ArrowLeft") == [[HOSTILE, "5,000", ""], ["grows", "10", ""]]
    assert values_after("ArrowRight") == [[HOSTILE, "4,000", ""], ["grows", "100", ""]]
    assert values_after("ArrowRight")[1] == ["grows", "1,000", ""]  # the other line has no value at step 3
    assert values_after("ArrowDown") == [["grows: rate", "0.3", ""]]
    assert values_after(*["ArrowRight"] * 9) == [["grows: rate", "0.6", ""]]
    page.keyboard.press("Tab")
    assert page.locator(".values").is_hidden()


def test_dragging_zooms_and_a_double_click_shows_all(open_page):
    page = open_page(lines_page())
    initial_ticks = ticks(page, "middle")
    drag(page, place_of(page, 0.5), place_of(page, 0.9))
    shown = [float(label) for label in ticks(page, "middle") if label[0].isdigit()]
    assert 3.4 < min(shown) and max(shown) < 5.7
    assert point_at(page, 0.0) == [["grows", "10,000", ""], [HOSTILE, "3,000", ""]]  # step 4 is the first
    page.mouse.dblclick(*place_of(page, 0.5))
    assert ticks(page, "middle") == initial_ticks
    assert page.get_by_role("button", name="reset zoom").is_disabled()


def test_a_logarithmic_axis_has_powers_of_ten_and_no_zero(open_page):
    page = open_page(lines_page())
    page.get_by_role("button", name="log y").click()
    assert {"100", "10k", "1M"} <= {*ticks(page, "end")}
    numbers, places = zip(*ticks_of(page, "end"), strict=True)
    assert np.corrcoef(np.log(numbers), places)[0, 1] == pytest.approx(1)
    assert point_at(page, 1.0) == [["grows", "1,000,000", ""], [HOSTILE, "2,000", "at 5"]]  # its last value is 0
    page.get_by_role("button", name="log x").click()
    assert point_at(page, 0.0)[0][0] == HOSTILE
    page.get_by_role("button", name="log y").click()
    assert "0" in ticks(page, "end")


def test_the_legend_hides_a_groups_lines_by_mouse_and_keyboard(open_page):
    page = open_page(lines_page())
    marks = page.locator(".drawing svg svg > line[stroke-dasharray]")
    assert marks.count() == 2  # one in each panel
    entry = page.get_by_role("group", name="lines").get_by_role("button").first
    color = "node => getComputedStyle(node).borderBottomColor"
    stroke = "node => getComputedStyle(node).stroke"
    line = page.locator("figure svg svg g", has=page.locator("title", has_text="grows").first).locator("path").first
    assert entry.locator("i").evaluate(color) == line.evaluate(stroke) != "none"
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert page.locator("figure svg svg g > title").all_text_contents() == [HOSTILE] and marks.count() == 0
    assert point_at(page, 0.0) == [[HOSTILE, "5,000", ""]]
    entry.focus()
    page.keyboard.press("Enter")
    assert page.locator("figure svg svg g > title").all_text_contents() == [HOSTILE, "grows", "grows: rate"]
    assert marks.count() == 2


def test_many_groups_have_a_color_scale_and_a_button_that_hides_all(open_page):
    groups = [LineGroup(f"run {i}", [Line(f"run {i}", [0, 1], [i, i + 1.0])]) for i in range(30)]
    page = open_page(page_with_charts("p", [line_chart("c", "C", "step", [Panel("loss")], groups)]))
    strokes = page.locator("figure svg svg g path").evaluate_all("paths => paths.map(p => p.getAttribute('stroke'))")
    assert len({*strokes}) == 30
    shown = [name for name, *_ in point_at(page, 0.0)]  # the nearest to the pointer, up to half the window's height
    assert 10 < len(shown) < 30 and "run 15" in shown
    assert f"and {30 - len(shown)} more lines" in page.locator(".values").inner_text()
    page.get_by_role("button", name="hide all").click()
    assert page.locator("figure svg svg g > title").count() == 0
    page.get_by_role("button", name="run 7", exact=True).click()
    assert page.locator("figure svg svg g > title").all_text_contents() == ["run 7"]


def test_brushing_an_axis_selects_rows(open_page):
    page = open_page(parallel_page())
    assert page.get_by_role("status").inner_text() == "4 of 4 selected"
    box, axes = page.locator("figure .drawing > svg").bounding_box(), page.locator("figure .drawing > svg > line")
    x = box["x"] + max(axes.evaluate_all("lines => lines.map(line => Number(line.getAttribute('x1')))"))
    drag(page, (x, box["y"] + 345), (x, box["y"] + 190))  # the lower half: losses 1 and 2
    assert page.get_by_role("status").inner_text() == "2 of 4 selected"
    faint = page.locator("figure .drawing > svg > path[opacity]")
    assert faint.locator("title").all_text_contents() == ["2: x", "3: x"]
    page.get_by_role("button", name="reset selection").click()
    assert page.get_by_role("status").inner_text() == "4 of 4 selected"
    assert {"2", "4"} <= {*ticks(page, "end")}


@pytest.mark.parametrize("html", [lines_page, parallel_page])
def test_a_downloaded_svg_stands_alone(html, open_page, tmp_path):
    page = open_page(html(), accept_downloads=True)
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    path = Path(tmp_path / "saved.svg")
    download.value.save_as(path)
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg" and download.value.suggested_filename in ("curves.svg", "settings.svg")
    titles = [node.text for node in root.iter(f"{SVG}title")]
    expected = ["grows", HOSTILE, "grows: rate"] if html is lines_page else ["0: x", "1: x", "2: x", "3: x"]
    assert {*expected} <= {*titles}
    if html is lines_page:  # the drawn points are the values
        line = next(group for group in root.iter(f"{SVG}g") if group.findtext(f"{SVG}title") == "grows: rate")
        points = re.split("[ML]", line.find(f"{SVG}path").get("d"))[1:]
        drawn = np.array([point.split() for point in points], dtype=float)  # (6, 2)
        for places in drawn.T:
            assert np.polyval(np.polyfit(range(6), places, 1), range(6)) == pytest.approx(
                places, abs=2 * 0.05
            )  # pixels, rounded
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert ("Curves" if html is lines_page else "Settings") in texts
    assert "class=" not in path.read_text(encoding="utf-8")
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    picture = Path(download.value.path()).read_bytes()
    sizes = [2 * math.ceil(float(root.get(name))) for name in ("width", "height")]
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and [*struct.unpack(">II", picture[16:24])] == sizes


@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_is_as_wide_as_the_window(width, open_page):
    bars = bar_chart("bars", "Importance", {"learning_rate": 0.75, HOSTILE: 0.25})
    html = lines_page().replace("</main>", f"{bars}</main>")
    page = open_page(html, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    label = page.get_by_role("img").first.get_attribute("aria-label")
    assert label.startswith("Curves. loss, rate over step.") and "grows" in label
