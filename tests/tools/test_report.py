import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folio import UserError
from folio.base import settings
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run
from tests.support.charts import ticks_of
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
    for value in "n_layer", "learning_rate", "where it was resumed", "float32", "peak memory (GiB)", "its end":
        assert value in page
    assert "a&lt;b&gt;: samples" in page and "Settings that differ" in page
    assert "Settings that differ" not in report_page([Run.of(runs[0])])
    last = json.loads((runs[0] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert f"{last['val_loss']:.4f}" in page


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, which contains the runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_output_is_in_the_first_runs_folder(runs, here):
    """The default was the current folder, which may be the git checkout."""
    main(ReportConfig(runs=tuple(map(str, runs))))
    assert (runs[0] / "report.html").exists() and not list(here.glob("*.html"))


def test_a_quoted_pattern_selects_runs(runs, here):
    """The pattern was used as a folder name."""
    main(ReportConfig(runs=("a*", "fir*"), sort="name", output="page.html"))
    assert "a&lt;b&gt;, first" in (here / "page.html").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
def test_a_run_whose_name_is_not_utf8_is_shown(runs, here):
    """The report of a pattern that matches it ended in a traceback."""
    runs[0].rename(here / os.fsdecode(b"first-\xe9"))
    main(settings.load(ReportConfig, ["*", "--output=page.html"]))
    assert "first-\\udce9" in (here / "page.html").read_text(encoding="utf-8")


def test_bad_input_is_an_error(runs, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    for words, message in (
        ([], r"runs: .*python tools/report"),
        ([tmp_path / "new"], "has not logged a step yet"),
        ([runs[0], f"--output={tmp_path}"], r"output=.* cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            main(settings.load(ReportConfig, [*map(str, words)]))


# --- curves in a browser ----------------------------------------------------------------------------------------------


SHOWN = 1e-5  # relative error of a number with at least five digits, of which the last one is rounded


@pytest.fixture
def html(runs) -> str:
    return report_page([Run.of(run) for run in runs])


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of metrics.jsonl by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


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


def test_the_pointer_shows_the_values_of_the_runs(html, runs, open_page):
    page = open_page(html)
    first, second = map(metrics_of, runs)
    lines = page.locator(".drawing g > title").all_text_contents()
    assert sorted(lines) == sorted([*5 * ["first", "a<b>"], "first: validation", "a<b>: validation"])
    for step, evaluated in ((2, 0), (6, 6), (12, 12)):
        move_to(page, step)
        losses = {"first": first[step]["loss"], "a<b>": second[step]["loss"]}
        losses |= {"first: validation": first[evaluated]["val_loss"], "a<b>: validation": second[evaluated]["val_loss"]}
        assert values_of(page) == pytest.approx(losses, rel=SHOWN)
        assert page.locator(".values").inner_text().startswith(f"step {step}: loss (nats per token)")
    move_to(page, 3, height=450)  # the second panel
    assert values_of(page) == pytest.approx({"first": first[3]["lr"], "a<b>": second[3]["lr"]}, rel=SHOWN)


def test_zoom_and_the_evaluation_at_step_0_on_a_logarithmic_axis(html, runs, open_page):
    """Step 0 has a place of its own, at the left end of the axis."""
    page = open_page(html)
    for begin, end in ((4, 8), (0, 6)):
        move_to(page, begin - 0.1 * bool(begin))
        page.mouse.down()
        move_to(page, end + 0.1)
        page.mouse.up()
        assert [ticks_of(page, "middle")[i][0] for i in (0, -1)] == [begin, end]
        if begin:
            page.get_by_role("button", name="reset zoom").click()
    page.get_by_role("button", name="log x").click()
    (zero, left), (one, right), *_ = ticks_of(page, "middle")
    assert (zero, one) == (0, 1) and left < right - 20
    drawing = page.locator(".drawing > svg").bounding_box()
    page.mouse.move(drawing["x"] + left, drawing["y"] + 100)
    assert values_of(page)["first: validation"] == pytest.approx(metrics_of(runs[0])[0]["val_loss"], rel=SHOWN)
    move_to(page, 1)
    assert values_of(page)["first"] == pytest.approx(metrics_of(runs[0])[1]["loss"], rel=SHOWN)


def test_the_page_fits_a_phone_and_a_tap_shows_values(html, runs, open_page):
    page = open_page(html, width=360, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    drawing = page.locator(".drawing > svg")
    drawing.evaluate("drawing => drawing.scrollIntoView()")
    box, (_, *_, (step, x)) = drawing.bounding_box(), ticks_of(page, "middle")
    page.touchscreen.tap(box["x"] + x, box["y"] + 60)
    assert values_of(page)["first"] == pytest.approx(metrics_of(runs[0])[step]["loss"], rel=SHOWN)
    values = page.locator(".values").bounding_box()
    assert values["x"] >= 0 and values["x"] + values["width"] <= 360


def test_html_and_scripts_in_a_run_are_escaped(runs, open_page):
    name = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    (runs[0] / "samples.jsonl").write_text(json.dumps({"step": 1, "text": name}) + "\n", encoding="utf-8")
    page = open_page(report_page([Run.of(runs[0], name)]))
    move_to(page, 6)
    assert name in page.locator(".values").inner_text() and name in page.locator("h1").inner_text()
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
