import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from folio import UserError
from folio.base import settings
from folio.experiments.runs import Run
from folio.experiments.selection import sort_runs
from model import GPT, GPTConfig
from tools.report import ReportConfig, main, report, summary
from train import train

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


@pytest.fixture(scope="module")
def trained(tiny_in, tmp_path_factory) -> Path:
    """The folder of the two runs of which each test gets a copy."""
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
    """It was in the current folder, which may be the git checkout."""
    monkeypatch.chdir(tmp_path)
    main(ReportConfig(runs=tuple(map(str, runs))))
    assert (runs[0] / "report.html").exists() and not list(tmp_path.glob("*.html"))


def test_a_quoted_pattern_names_runs(runs, tmp_path, monkeypatch):
    """It was taken for the name of a folder."""
    monkeypatch.chdir(tmp_path)
    main(ReportConfig(runs=("a*", "fir*"), sort="name", output="page.html"))
    assert "a&lt;b&gt;, first" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"^out-\*: no folder matches this pattern$"):
        main(ReportConfig(runs=("out-*",)))


def test_files_that_cannot_be_read_or_written_are_an_error(runs, tmp_path):
    with pytest.raises(UserError, match=r"output=.* cannot be written"):
        main(ReportConfig(runs=(str(runs[0]),), output=str(tmp_path)))
    (runs[0] / "plan.json").write_text("{")
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        main(ReportConfig(runs=(str(runs[0]),)))


def test_differing_settings_are_shown_for_several_runs(runs):
    assert "Settings that differ" not in report([Run.of(runs[0])])
    assert "Settings that differ" in report([Run.of(run) for run in runs])


def rows_of(html: str) -> list[list[str]]:
    """The cells of a table, by row."""
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def metrics(step: int, val_loss: float | None = None, speed: float | None = None) -> dict:
    """A line of metrics.jsonl; a step has 100 tokens."""
    line = dict(step=step, tokens=100 * step, loss=2.0, val_loss=val_loss, lr=0.1, grad_norm=1.0, skipped=0)
    return {**line, "tokens_per_second": speed, "peak_memory": 2**20}


def run_of(name: str, lines: list[dict], state: dict | None = None, folder: Path = Path("nowhere")) -> Run:
    return Run(folder, name, lines, state or {}, "finished")


def evaluation_before_the_first_step(val_loss: float) -> dict:
    return {**metrics(0, val_loss), "loss": None, "lr": None, "grad_norm": None}


def test_the_table_compares_the_runs():
    """It had neither the size nor the time of a run, nor its last validation loss, and was in the order given."""
    shape = dict(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4)
    lines = [metrics(1), metrics(11, 3.0, 50.0), metrics(21, 1.5, 10.0), metrics(31, 2.5, 10.0)]
    runs = [
        run_of("worse", [metrics(1), metrics(20, 1.75)]),
        run_of("none", [metrics(1, None, 7.0)], {"model": {"n_layer": 2, "unknown": 3}}),
        run_of("better", lines, {"model": shape}),
    ]
    heads, *rows = rows_of(summary(sort_runs(runs, "loss")))
    assert [row[0] for row in rows] == ["better", "worse", "none"]
    better, worse, none = (dict(zip(heads, row, strict=True)) for row in rows)
    assert better["parameters"] == f"{GPT(GPTConfig(**shape)).num_params()['total']:,}"
    assert (better["steps"], better["tokens"], better["tokens/s"]) == ("31", "3,100", "14")  # 3,000 in 220 s
    assert better["time of the steps"] == "3 min 47 s"  # 220 s, and the first step at the same speed
    assert better["best validation loss"] == "1.5000 at step 21"
    assert better["last validation loss"] == "2.5000 at step 31"
    assert (worse["parameters"], worse["time of the steps"], worse["tokens/s"]) == ("", "", "")
    assert worse["best validation loss"] == worse["last validation loss"] == "1.7500 at step 20"
    assert none["parameters"] == "" and none["best validation loss"] == none["last validation loss"] == "none yet"


def test_an_evaluation_before_the_first_step_is_shown(tmp_path):
    """All its other numbers are null."""
    first = evaluation_before_the_first_step(4.25)
    plan = {"by": "a guess", "steps": 10, "seconds": None, "tokens_per_second": None, "memory": 2**20}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "text": "abc"}\n')
    run = run_of("run", [first, metrics(1), metrics(10, 5.5, 100.0)], folder=tmp_path)
    page = report([run])
    figures = json.loads(re.search(r'Plotly.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', page, re.DOTALL)[1])
    curves = [curve for curve in figures if curve["name"] == "run"]
    assert all(0 not in curve["x"] for curve in curves[:4]) and curves[0]["y"] == [2.0, 2.0]
    validation = next(curve for curve in figures if curve["name"] == "run: validation")
    assert (validation["x"], validation["y"]) == ([0, 10], [4.25, 5.5])
    assert rows_of(summary([run]))[1][-3] == "5.5000 at step 10"  # step 0 has no checkpoint
    assert run.measured()["seconds"] == pytest.approx(10)
    only_evaluated = run_of("run", [first], folder=tmp_path)
    assert rows_of(summary([only_evaluated]))[1][2:6] == ["0", "0", "", ""] and report([only_evaluated])


def test_without_a_run_the_command_is_shown():
    with pytest.raises(UserError, match="runs: name at least one run's folder, as in python tools/report"):
        settings.load(ReportConfig, [])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a run's folder"):
        Run.of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has not logged a step yet"):
        main(ReportConfig(runs=(str(tmp_path),)))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_every_curve(runs, tmp_path):
    """Each of the two runs has six panels and a validation curve, drawn by plotly's script in a browser, offline."""
    page = tmp_path / "page.html"
    page.write_text(report([Run.of(run) for run in runs]), encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    options += "--disable-component-update --disable-sync --virtual-time-budget=10000 --dump-dom"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120).stdout
    assert len(re.findall(r'class="trace scatter', dom)) == 2 * 7
    assert dom.count("js-line") >= 2 * 7 and "first: validation" in dom
