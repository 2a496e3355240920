import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folio import UserError
from folio.base import settings
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run
from tests.support.runs import write_as_version_1
from tests.support.viewers import in_browser
from tools.report import ReportConfig, main
from train import train


@pytest.fixture(scope="module")
def trained(tiny_in, tmp_path_factory) -> Path:
    """The folder of two runs, which tests copy."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = tiny_in(out_dir=str(folder / "first")), dict(out_dir=str(folder / "a<b>"), n_layer=1)
    train(first)
    train(tiny_in(**second, max_iters=8))
    train(tiny_in(**second, init_from="resume", learning_rate=1e-3))
    return folder


@pytest.fixture
def runs(trained, tmp_path) -> list[Path]:
    """Two runs; the second one was resumed with another learning rate."""
    return [shutil.copytree(trained / name, tmp_path / name) for name in ("first", "a<b>")]


def test_the_page_contains_the_runs_and_needs_no_network(runs, tmp_path, capsys):
    output = tmp_path / "page.html"
    main(ReportConfig(runs=tuple(map(str, runs)), output=str(output)))
    page = output.read_text(encoding="utf-8")
    assert str(output) in capsys.readouterr().out
    assert not re.search(r"<script[^>]+src=|<link ", page)
    assert "a&lt;b&gt;" in page and "<b>" not in page.split("<script")[0]
    for value in (
        "n_layer",
        "learning_rate",
        "where it was resumed",
        "float32",
        "peak memory (GiB)",
        "its end",
        "a&lt;b&gt;: samples",
    ):
        assert value in page
    last = json.loads((runs[0] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert f"{last['val_loss']:.4f}" in page


def test_the_default_output_is_in_the_first_runs_folder(runs, tmp_path, monkeypatch):
    """The default was the current folder, which may be the git checkout."""
    monkeypatch.chdir(tmp_path)
    main(ReportConfig(runs=tuple(map(str, runs))))
    assert (runs[0] / "report.html").exists() and not list(tmp_path.glob("*.html"))


def test_a_quoted_pattern_selects_runs(runs, tmp_path, monkeypatch):
    """The pattern was used as a folder name."""
    monkeypatch.chdir(tmp_path)
    main(ReportConfig(runs=("a*", "fir*"), sort="name", output="page.html"))
    assert "a&lt;b&gt;, first" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"^out-\*: no folder matches this pattern$"):
        main(ReportConfig(runs=("out-*",)))


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
def test_a_run_whose_name_is_not_utf8_is_shown(runs, tmp_path, monkeypatch):
    """The report of a pattern that matches it ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    runs[0].rename(tmp_path / os.fsdecode(b"first-\xe9"))
    main(settings.load(ReportConfig, ["*", "--output=page.html"]))
    assert "first-\\udce9" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_unreadable_and_unwritable_files_are_an_error(runs, tmp_path):
    with pytest.raises(UserError, match=r"output=.* cannot be written"):
        main(ReportConfig(runs=(str(runs[0]),), output=str(tmp_path)))
    (runs[0] / "plan.json").write_text("{")
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        main(ReportConfig(runs=(str(runs[0]),)))


def test_differing_settings_are_shown_for_several_runs(runs):
    assert "Settings that differ" not in report_page([Run.of(runs[0])])
    assert "Settings that differ" in report_page([Run.of(run) for run in runs])


def test_a_run_of_version_1_has_the_same_page(runs):
    page = report_page([Run.of(run) for run in runs])
    for run in runs:
        write_as_version_1(run)
    assert report_page([Run.of(run) for run in runs]) == page


def test_a_missing_argument_is_an_error_with_an_example():
    with pytest.raises(UserError, match=r"runs: .*python tools/report"):
        settings.load(ReportConfig, [])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a run's folder"):
        Run.of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has not logged a step yet"):
        main(ReportConfig(runs=(str(tmp_path),)))


# --- curves in a browser ----------------------------------------------------------------------------------------------


@pytest.fixture
def html(runs) -> str:
    return report_page([Run.of(run) for run in runs])


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of metrics.jsonl by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def ticks_of(page: Any, anchor: str) -> list[tuple[float, float]]:
    """Return the ticks of the first panel's x axis ("middle") or y axis ("end") as (number, pixels right or up)."""
    texts = page.locator(f".drawing > svg > text[text-anchor={anchor}]")
    labels = texts.evaluate_all("all => all.map(t => [t.textContent, ...['x', 'y'].map(a => +t.getAttribute(a))])")
    ticks: list[tuple[float, float]] = []
    for text, x, y in labels:
        pixels = x if anchor == "middle" else -y
        if ticks and pixels <= ticks[-1][1]:
            break  # the next panel begins
        ticks.append((float(text), pixels))
    return ticks


def move_to(page: Any, step: float, height: float = 100) -> None:
    """Move the mouse to a step, at this height in the drawing."""
    numbers, places = zip(*ticks_of(page, "middle"), strict=True)
    x = np.interp(step, numbers, places)
    drawing = page.locator(".drawing > svg")
    drawing.evaluate("drawing => drawing.scrollIntoView()")
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + height)


def values_of(page: Any) -> dict[str, float]:
    """Return the values under the pointer, by line."""
    rows = [row.split("\t") for row in page.locator(".values tr").all_inner_texts()]
    return {name: float(value) for name, value, *_ in rows}


def drawn_lines(page: Any) -> list[str]:
    return page.locator(".drawing g > title").all_text_contents()


@in_browser
def test_the_pointer_shows_the_values_of_the_runs(html, runs, open_page):
    page = open_page(html)
    first, second = map(metrics_of, runs)
    assert sorted(drawn_lines(page)) == sorted([*5 * ["first", "a<b>"], "first: validation", "a<b>: validation"])
    for step in (2, 6, 12):
        move_to(page, step)
        nearest = 6 if step < 12 else 12  # evaluation
        assert values_of(page) == pytest.approx(
            {
                "first": first[step]["loss"],
                "a<b>": second[step]["loss"],
                "first: validation": first[nearest if step > 2 else 0]["val_loss"],
                "a<b>: validation": second[nearest if step > 2 else 0]["val_loss"],
            },
            rel=1e-5,
        )
        assert page.locator(".values").inner_text().startswith(f"step {step}: loss (nats per token)")
    move_to(page, 3, height=450)  # the second panel
    assert values_of(page) == pytest.approx({"first": first[3]["lr"], "a<b>": second[3]["lr"]}, rel=1e-5)


@in_browser
def test_zoom_and_logarithmic_axes(html, runs, open_page):
    page = open_page(html)
    assert [ticks_of(page, "middle")[i][0] for i in (0, -1)] == [0, 12]
    move_to(page, 3.9)
    page.mouse.down()
    move_to(page, 8.1)
    page.mouse.up()
    assert [ticks_of(page, "middle")[i][0] for i in (0, -1)] == [4, 8]
    page.get_by_role("button", name="reset zoom").click()
    for name, anchor in (("log x", "middle"), ("log y", "end")):
        page.get_by_role("button", name=name).click()
        numbers, places = zip(*ticks_of(page, anchor), strict=True)
        assert np.corrcoef(np.log(numbers), places)[0, 1] == pytest.approx(1, abs=1e-6)
    assert ticks_of(page, "middle")[0][0] == 1  # the evaluation at step 0 is not shown
    move_to(page, 1)
    assert values_of(page)["first"] == pytest.approx(metrics_of(runs[0])[1]["loss"], rel=1e-5)
    page.get_by_role("button", name="log x").click()
    move_to(page, 0)
    page.mouse.down()
    move_to(page, 6.1)
    page.mouse.up()
    assert [ticks_of(page, "middle")[i][0] for i in (0, -1)] == [0, 6]
    page.get_by_role("button", name="log x").click()
    assert ticks_of(page, "middle")[0][0] == 1


@in_browser
def test_the_legend_hides_a_run_with_its_resume_marks(html, open_page):
    page = open_page(html)
    marks = page.locator(".drawing svg svg > line[stroke-dasharray]")
    assert marks.count() == 5  # one in each panel
    entry = page.locator(".legend").get_by_role("button", name="a<b>")
    entry.focus()
    page.keyboard.press("Space")
    assert {name.partition(":")[0] for name in drawn_lines(page)} == {"first"} and marks.count() == 0
    move_to(page, 6)
    assert values_of(page).keys() == {"first", "first: validation"}
    page.keyboard.press("Space")
    assert len(drawn_lines(page)) == 2 * 6 and marks.count() == 5


@in_browser
def test_the_svg_file_contains_the_losses_of_the_run(html, runs, open_page, tmp_path):
    page = open_page(html)
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    download.value.save_as(tmp_path / "curves.svg")
    svg = "{http://www.w3.org/2000/svg}"
    lines = [group for group in ElementTree.parse(tmp_path / "curves.svg").iter(f"{svg}g") if len(group) > 1]
    loss = next(line for line in lines if line.findtext(f"{svg}title") == "first").find(f"{svg}path")
    drawn = np.array([point.split() for point in re.split("[ML]", loss.get("d"))[1:]], dtype=float)  # (points, 2)
    logged = [(step, line["loss"]) for step, line in metrics_of(runs[0]).items() if line["loss"] is not None]
    for numbers, places in zip(np.array(logged).T, drawn.T, strict=True):
        assert np.polyval(np.polyfit(numbers, places, 1), numbers) == pytest.approx(places, abs=0.1)  # pixels


@in_browser
def test_the_page_fits_a_phone_and_a_tap_shows_values(html, runs, open_page):
    page = open_page(html, width=360, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    drawing = page.locator(".drawing > svg")
    drawing.evaluate("drawing => drawing.scrollIntoView()")
    box, (_, *_, (step, x)) = drawing.bounding_box(), ticks_of(page, "middle")
    page.touchscreen.tap(box["x"] + x, box["y"] + 60)
    assert values_of(page)["first"] == pytest.approx(metrics_of(runs[0])[step]["loss"], rel=1e-5)
    values = page.locator(".values").bounding_box()
    assert values["x"] >= 0 and values["x"] + values["width"] <= 360


@in_browser
def test_html_and_scripts_in_a_run_are_escaped(runs, open_page):
    name = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    (runs[0] / "samples.jsonl").write_text(json.dumps({"step": 1, "text": name}) + "\n", encoding="utf-8")
    page = open_page(report_page([Run.of(runs[0], name)]))
    move_to(page, 6)
    assert name in page.locator(".values").inner_text() and name in page.locator("h1").inner_text()
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
