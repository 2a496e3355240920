import itertools
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
from tests.support.charts import charts_in, ticks_of
from tests.support.servers import serving_tool
from tests.support.waiting import wait_until
from tools import report
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
    assert charts_in(page)["samples"]["runs"][0]["samples"] and "Settings that differ" in page
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
        ([runs[0], "--live=True", "--output=x.html"], "no file is written"),
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
    lines = page.locator(".drawing svg g > title").all_text_contents()
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


# --- x axes, smoothing, the picker, names at the ends, samples -------------------------------------------------------


def metrics_line(step: int, loss: float, val_loss: float | None = None, batch: int = 100) -> dict[str, Any]:
    line = {"step": step, "tokens": step * batch, "loss": loss, "val_loss": val_loss, "lr": 0.1, "grad_norm": 1.0}
    return {**line, "skipped": 0, "tokens_per_second": 1000.0, "peak_memory": 2**20}


def write_metrics(folder: Path, count: int = 40, shift: float = 0.0, batch: int = 100) -> Path:
    """A run whose losses begin at 9 and continue near 2 + shift, with an evaluation at every tenth step."""
    folder.mkdir(parents=True)
    first = {**metrics_line(0, 0, 9.0), "loss": None, "lr": None, "grad_norm": None, "tokens_per_second": None}
    lines = [first, metrics_line(1, 9.0, None, batch)]
    for step in range(2, count + 1):
        loss = 2 + shift + (0.1 if step % 2 else -0.1)
        lines.append(metrics_line(step, loss, 2.5 + shift if step % 10 == 0 else None, batch))
    texts = [{"step": step, "text": f"{folder.name} at {step}"} for step in range(10, count + 1, 10)]
    for name, content in (("metrics.jsonl", lines), ("samples.jsonl", texts)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in content), encoding="utf-8")
    return folder


def y_range(page: Any) -> tuple[float, float]:
    """The range of the first panel's y axis: 340 pixels below a title of 26."""
    numbers, places = zip(*ticks_of(page, "end"), strict=True)
    return tuple(np.polyval(np.polyfit(places, numbers, 1), [-(26 + 340 + 4), -(26 + 4)]))


@pytest.mark.browser
def test_the_untrained_loss_does_not_decide_the_axis(tmp_path, open_page):
    """The loss of step 0 put all differences into a fifth of the height, below a straight line that falls from it."""
    page = open_page(report_page([Run.of(write_metrics(tmp_path / "a"))]))
    low, high = y_range(page)
    assert 1.8 <= low < 1.95 and 2.45 < high < 2.6
    assert page.locator("figure tspan").text_content() == "↑ up to 9"
    dashed = page.locator(".drawing svg g path[stroke-dasharray='3 4']")
    assert dashed.count() == 1  # from step 0 to the first evaluation
    move_to(page, 0)
    assert values_of(page)["a: validation"] == 9
    move_to(page, 0.05)  # zoomed into the first steps, they decide it
    page.mouse.down()
    move_to(page, 0.9)
    page.mouse.up()
    assert y_range(page)[1] > 9


@pytest.mark.browser
def test_the_x_axis_can_be_tokens_or_time(tmp_path, open_page):
    runs = [Run.of(write_metrics(tmp_path / "a")), Run.of(write_metrics(tmp_path / "b", batch=200))]
    page = open_page(report_page(runs))
    choice = page.get_by_label("x:")
    assert choice.locator("option").all_text_contents() == ["step", "tokens", "time of the steps (s)"]
    move_to(page, 40)
    assert page.locator(".values").inner_text().startswith("step 40: ") and len(values_of(page)) == 4
    choice.select_option("tokens")
    move_to(page, 8000)
    assert page.locator(".values").inner_text().startswith("tokens 8,000: ")
    assert "at 4,000" in page.locator(".values").inner_text()  # the end of the other run
    choice.select_option("time of the steps (s)")
    move_to(page, 8)
    assert page.locator(".values").inner_text().startswith("time of the steps (s) 8: ")


@pytest.mark.browser
def test_smoothed_lines_have_the_given_ones_behind_them(tmp_path, open_page):
    """The moving average is that of a plain sum over all earlier points."""
    folder = write_metrics(tmp_path / "a")
    page = open_page(report_page([Run.of(folder)]))
    paths = page.locator(".drawing svg g", has=page.locator("title", has_text=re.compile("^a$"))).first.locator("path")
    before, given = paths.count(), paths.first.get_attribute("d")
    page.get_by_label("smoothing:").select_option("5%")
    assert paths.count() == before + 1 and paths.first.get_attribute("d") == given
    assert float(paths.first.get_attribute("opacity")) < 0.5 and paths.nth(1).get_attribute("d") != given
    losses = {step: line["loss"] for step, line in metrics_of(folder).items() if line["loss"] is not None}
    weights = {step: 0.5 ** ((25 - step) / (0.05 * 40)) for step in losses if step <= 25}
    average = sum(weights[step] * losses[step] for step in weights) / sum(weights.values())
    move_to(page, 25)
    (row,) = [row for row in page.locator(".values tr").all_inner_texts() if row.startswith("a\t")]
    assert values_of(page)["a"] == pytest.approx(losses[25], rel=SHOWN)
    assert float(row.rpartition("smoothed ")[2]) == pytest.approx(average, rel=SHOWN)


@pytest.mark.browser
def test_names_are_at_the_ends_of_lines_without_overlap(tmp_path, open_page):
    runs = [Run.of(write_metrics(tmp_path / f"run-{i}", shift=0.001 * i)) for i in range(6)]
    runs.append(Run.of(write_metrics(tmp_path / "a-name-that-is-too-long-for-the-end", count=20)))
    page = open_page(report_page(runs), width=1280)
    labels = page.get_by_test_id("line-name").locator("text")
    assert {label.split("a-name")[0] for label in labels.all_text_contents()} == {*(f"run-{i}" for i in range(6)), ""}
    boxes = sorted((label.bounding_box() for label in labels.all()), key=lambda box: box["y"])
    assert all(a["y"] + a["height"] <= b["y"] + 3 for a, b in itertools.pairwise(boxes))
    drawing = page.locator(".drawing > svg").bounding_box()
    assert all(box["x"] + box["width"] <= drawing["x"] + drawing["width"] for box in boxes)
    page.get_by_role("button", name="run-2", exact=True).click()
    assert labels.count() == 6 and "run-2" not in labels.all_text_contents()


@pytest.mark.browser
def test_the_picker_finds_runs_by_name_and_setting(tmp_path, open_page):
    runs = [Run.of(write_metrics(tmp_path / f"run-{i:02}", shift=0.1 * i)) for i in range(12)]
    for i, run in enumerate(runs):
        run.state["config"] = {"n_layer": 2 + i % 3}
    page = open_page(report_page(runs), width=1280)
    search, entries = page.get_by_label("search lines"), page.locator(".legend button:not([hidden])")
    shown = page.get_by_test_id("line-name").locator("text")
    assert shown.count() == 12
    search.fill("n_layer=4")
    assert entries.all_inner_texts() == ["run-02", "run-05", "run-08", "run-11"]
    assert page.get_by_text("4 of 12 found").is_visible() and shown.count() == 12
    page.get_by_role("button", name="only these").click()
    assert sorted(shown.all_text_contents()) == ["run-02", "run-05", "run-08", "run-11"]
    assert page.locator(".card h3").count() == 4  # the samples are those of the same runs
    search.fill("run-0 n_layer=4")
    page.get_by_role("button", name="hide these").click()
    assert shown.all_text_contents() == ["run-11"]
    search.fill("")
    page.get_by_role("button", name="show all").click()
    assert shown.count() == 12 and entries.count() == 12


@pytest.mark.browser
def test_samples_side_by_side(tmp_path, open_page):
    """Those of all runs at a step, or those of a run at all steps, which were in closed sections one below another."""
    runs = [Run.of(write_metrics(tmp_path / "a")), Run.of(write_metrics(tmp_path / "b", count=20))]
    page = open_page(report_page(runs), width=1280)
    texts = page.locator(".card pre")
    assert texts.all_inner_texts() == ["a at 40", "b at 20"]
    tops = {box["y"] for box in (text.bounding_box() for text in page.locator(".card").all())}
    assert len(tops) == 1
    slider = page.get_by_label("step", exact=True)
    slider.focus()
    page.keyboard.press("Home")
    assert texts.all_inner_texts() == ["a at 10", "b at 10"]
    assert "step 10, loss 2.5000" in page.locator(".card").first.inner_text()
    page.get_by_label("compare:").select_option("steps of a run")
    page.get_by_label("run:").select_option("b")
    assert texts.all_inner_texts() == ["b at 10", "b at 20"]


@pytest.mark.browser
def test_a_live_report_follows_its_runs(tmp_path, browser):
    """The reader's zoom, hidden runs and open sections stay. A new run appears. The end of the server is named."""
    first = write_metrics(tmp_path / "out-a", count=20)
    with serving_tool(report, ReportConfig(runs=(str(tmp_path / "out-*"),), live=True, port=0, open=False)) as served:
        page, problems = browser.new_page(), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.clock.install()
        page.goto("http://{}:{}".format(*served))
        page.get_by_label("x:").select_option("tokens")
        chart = page.locator(".line-chart").element_handle()
        assert page.locator("td").nth(1).inner_text() == "20" and page.locator(".card").count() == 2
        with open(first / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(metrics_line(step, 1.5, 1.75))}\n" for step in range(21, 31))
        write_metrics(tmp_path / "out-b", count=10)

        def is_updated() -> bool:
            page.clock.run_for(3000)
            return page.locator("tr").count() == 3

        wait_until(is_updated)
        assert page.locator("td").all_inner_texts()[:2] == ["out-a", "30"]
        assert chart.evaluate("node => node.isConnected")
        assert page.get_by_label("x:").input_value() == "1" and "2 runs" in page.locator("p.summary").inner_text()
        assert page.locator(".legend button").all_inner_texts() == ["out-a", "out-b"]
        assert page.locator(".live").inner_text() == "live" and not problems
    wait_until(lambda: page.clock.run_for(3000) or "does not answer" in page.locator(".live").inner_text())
    page.close()
