import json
import re
from pathlib import Path

import pytest

from folio.experiments.report_page import report_page, summary
from folio.experiments.runs import Run
from folio.experiments.selection import sort_runs
from model import GPT, GPTConfig
from tests.support.charts import charts_in, lines_in
from tests.support.runs import blank_part


def rows_of(html: str) -> list[list[str]]:
    """Return the cells of a table, by row."""
    return [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def metrics(step: int, val_loss: float | None = None, speed: float | None = None) -> dict:
    """Return a line of metrics.jsonl, with 100 tokens per step."""
    line = dict(step=step, tokens=100 * step, loss=2.0, val_loss=val_loss, lr=0.1, grad_norm=1.0, skipped=0)
    return {**line, "tokens_per_second": speed, "peak_memory": 2**20}


def run_of(name: str, lines: list[dict], state: dict | None = None, folder: Path = Path("nowhere")) -> Run:
    return Run(folder, name, lines, state or {}, "finished")


def evaluation_before_the_first_step(val_loss: float) -> dict:
    return {**metrics(0, val_loss), "loss": None, "lr": None, "grad_norm": None}


def test_the_table_compares_the_runs():
    """The table lacked the size, time and last validation loss of runs, and was not sorted."""
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
    """All other metrics of step 0 are null."""
    first = evaluation_before_the_first_step(4.25)
    plan = {"by": "a guess", "steps": 10, "seconds": None, "tokens_per_second": None, "memory": 2**20}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "text": "abc"}\n')
    run = run_of("run", [first, metrics(1), metrics(10, 5.5, 100.0)], folder=tmp_path)
    page = report_page([run])
    (group,) = charts_in(page)["curves"]["groups"]
    curves = [line for line in group["lines"] if line["name"] == "run"]
    assert all(0 not in curve["x"] for curve in curves[:4]) and curves[0]["y"] == [2.0, 2.0]
    validation = lines_in(page)["run: validation"]
    assert (validation["x"], validation["y"]) == ([0, 10], [4.25, 5.5])
    assert rows_of(summary([run]))[1][-3] == "5.5000 at step 10"  # step 0 has no checkpoint
    assert run.totals()["seconds"] == pytest.approx(10)
    only_evaluated = run_of("run", [first], folder=tmp_path)
    assert rows_of(summary([only_evaluated]))[1][2:6] == ["0", "0", "", ""] and report_page([only_evaluated])


def test_a_time_budget_shows_the_planned_steps():
    """The page had max_iters of the settings, 197, beside 369 completed steps."""
    state = {"config": {"max_iters": 197}, "parts": [blank_part(0, decisions=[(0, 197), (50, 369)])]}
    fixed = {"config": {"max_iters": 100}, "parts": [blank_part(0, decisions=[(0, 100)])]}
    runs = [run_of("budget", [metrics(369)], state), run_of("fixed", [metrics(100)], fixed)]
    rows = rows_of(report_page(runs))
    assert ["steps planned", "369", "100"] in rows and ["steps completed", "369", "100"] in rows
    assert rows.count(["(steps planned)", "369"]) == 1 and ["(steps planned)", "100"] not in rows
