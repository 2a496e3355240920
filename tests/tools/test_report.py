import json
import re
import shutil
from pathlib import Path

import pytest

from folio import UserError
from folio.base import settings
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run
from tests.support.viewers import in_browser
from tools.report import ReportConfig, main
from train import train


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
    assert "Settings that differ" not in report_page([Run.of(runs[0])])
    assert "Settings that differ" in report_page([Run.of(run) for run in runs])


def test_without_a_run_the_command_is_shown():
    with pytest.raises(UserError, match="runs: name at least one run's folder, as in python tools/report"):
        settings.load(ReportConfig, [])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a run's folder"):
        Run.of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has not logged a step yet"):
        main(ReportConfig(runs=(str(tmp_path),)))


@in_browser
def test_a_browser_draws_every_curve(runs, tmp_path, browser):
    """Each of the two runs has six panels and a validation curve."""
    page = browser.new_page()
    (tmp_path / "page.html").write_text(report_page([Run.of(run) for run in runs]), encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    titles = page.locator("figure svg g > title").all_text_contents()
    assert sorted(titles) == sorted([name for run in ("first", "a<b>") for name in [*[run] * 6, f"{run}: validation"]])
    page.close()
