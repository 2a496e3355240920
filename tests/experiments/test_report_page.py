import json
import re
from pathlib import Path

import pytest

from folio import UserError
from folio.experiments.report_page import conclusion, report_page, results_table
from folio.experiments.runs import Run
from folio.experiments.selection import sort_runs
from model import GPT, GPTConfig
from tests.support.charts import charts_in, lines_in
from tests.support.runs import blank_part


def rows_of(html: str) -> list[list[str]]:
    """Return the cells of a table, by row."""
    return [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def best_of(run: Run) -> str:
    heads, row = rows_of(results_table([run]))
    return row[heads.index("best validation loss")]


def metrics(step: int, val_loss: float | None = None, speed: float | None = None) -> dict:
    """Return a line of metrics.jsonl, with 100 tokens per step."""
    line = dict(step=step, tokens=100 * step, loss=2.0, val_loss=val_loss, lr=0.1, grad_norm=1.0, skipped=0)
    return {**line, "tokens_per_second": speed, "peak_memory": 2**20}


def run_of(name: str, lines: list[dict], state: dict | None = None, folder: Path = Path("nowhere")) -> Run:
    return Run(folder, name, lines, state or {}, "finished")


def test_the_table_compares_the_runs():
    """The table lacked the size, time and last validation loss of runs, and was not sorted."""
    shape = dict(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4)
    lines = [metrics(1), metrics(11, 3.0, 50.0), metrics(21, 1.5, 10.0), metrics(31, 2.5, 10.0)]
    runs = [
        run_of("worse", [metrics(1), metrics(20, 1.75)]),
        run_of("none", [metrics(1, None, 7.0)], {"model": {"n_layer": 2, "unknown": 3}}),
        run_of("better", lines, {"model": shape}),
    ]
    heads, *rows = rows_of(results_table(sort_runs(runs, "loss")))
    assert [row[0] for row in rows] == ["better", "worse", "none"]
    better, worse, none = (dict(zip(heads, row, strict=True)) for row in rows)
    assert better["parameters"] == f"{GPT(GPTConfig(**shape)).num_params()['total']:,}"
    measured = {"steps": "31", "tokens": "3,100", "tokens/s": "14"}  # 3,000 tokens in 220 s
    measured |= {"time of the steps": "3 min 47 s"}  # 220 s, and the first step at the same speed
    measured |= {"best validation loss": "1.5000 at step 21", "last validation loss": "2.5000 at step 31"}
    assert better.items() >= measured.items()
    unknown = {"parameters": "", "time of the steps": "", "tokens/s": ""}
    losses = ("best validation loss", "last validation loss")
    assert worse.items() >= {**unknown, **dict.fromkeys(losses, "1.7500 at step 20")}.items()
    assert none.items() >= {"parameters": "", **dict.fromkeys(losses, "none yet")}.items()


def test_the_page_begins_with_a_sentence_on_the_best_run():
    worse, best, new = (run_of(name, [metrics(20, loss)]) for name, loss in (("a<b", 1.75), ("b", 1.5), ("c", None)))
    assert conclusion([worse, best, new]) == (
        "The best of 3 runs is b: validation loss 1.5000 at step 20, 0.2500 below a<b."
    )
    assert conclusion([new, worse]) == "Only a<b of 2 runs has a validation loss: 1.7500 at step 20."
    assert conclusion([new]) == "No validation loss yet, after 20 steps."
    one = run_of("one", [metrics(1), metrics(11, 1.5, 10.0), metrics(21, 2.0, 10.0)])
    time = "3 min 30 s of training at 10 tokens/s"
    assert conclusion([one]) == f"Lowest validation loss 1.5000 at step 11 of 21; {time}."
    page = report_page([worse, best, new])
    assert page.index("0.2500 below a&lt;b.</p>") < page.index("<table>")


def test_losses_on_different_text_are_not_compared():
    """The best of runs of Shakespeare and of music had the data set with the smaller vocabulary.

    A run with eval_iters=1 was the best, or the worst, by the text that it evaluated.
    """
    part = {"windows": 2, "max_val_tokens": None}
    verse = {"config": {"dataset": "verse", "block_size": 8}, "dataset": {"hash": "verse"}, "parts": [part]}
    tunes = {**verse, "config": {"dataset": "tunes"}, "dataset": {"hash": "tunes"}}
    limited = {**verse, "parts": [{**part, "max_val_tokens": 64}]}

    def compared(*states: dict) -> str:
        return conclusion([run_of(str(i), [metrics(20, 2.0 + i)], state) for i, state in enumerate(states)])

    assert compared(verse, tunes, verse) == (
        "The runs use different data (verse, tunes), so their losses are not comparable."
    )
    assert "evaluate different parts of their data" in compared(verse, limited)
    assert "best of 2 runs" in compared(verse, verse) and "best of 2 runs" in compared(limited, limited)


def test_what_has_no_values_is_left_out():
    """A column and a chart of skipped steps showed only zeros, and sections of unknown settings were empty."""
    run = run_of("run", [metrics(1), {**metrics(20), "peak_memory": None}])
    run.lines[0]["peak_memory"] = None
    page = report_page([run])
    titles = [panel["title"] for panel in charts_in(page)["curves"]["panels"]]
    assert titles == ["loss (nats per token)", "learning rate", "gradient norm"]
    heads = ["run", "steps", "tokens", "best validation loss", "last validation loss"]
    assert rows_of(page)[0] == heads and "<details>" not in page and "rollback" not in page
    run.lines[1]["skipped"] = 3
    page = report_page([run])
    assert charts_in(page)["curves"]["panels"][-1]["title"] == "skipped steps"
    assert charts_in(page)["curves"]["groups"][0]["lines"][3]["y"] == [0, 3]
    assert rows_of(page)[0] == [*heads, "skipped steps"] and rows_of(page)[1][-1] == "3"


def test_an_evaluation_before_the_first_step_is_shown(tmp_path):
    """All other metrics of step 0 are null."""
    first = {**metrics(0, 4.25), "loss": None, "lr": None, "grad_norm": None}
    plan = {"by": "a guess", "steps": 10, "seconds": None, "tokens_per_second": None, "memory": 2**20}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "text": "abc"}\n')
    run = run_of("run", [first, metrics(1), metrics(10, 5.5, 100.0)], folder=tmp_path)
    page = report_page([run])
    (group,) = charts_in(page)["curves"]["groups"]
    curves = [line for line in group["lines"] if line["name"] == "run"]
    steps = group["columns"][0]
    assert all(0 not in [steps[i] for i in curve["x"]] for curve in curves[:4]) and curves[0]["y"] == [2.0, 2.0]
    validation = lines_in(page)["run: validation"]
    assert (validation["x"], validation["y"]) == ([0, 10], [4.25, 5.5])
    assert best_of(run) == "5.5000 at step 10"  # step 0 has no checkpoint
    assert run.totals()["seconds"] == pytest.approx(10)
    only_evaluated = run_of("run", [first], folder=tmp_path)
    assert best_of(only_evaluated) == "none yet" and report_page([only_evaluated])


def test_a_time_budget_shows_the_planned_steps():
    """The page had max_iters of the settings, 197, beside 369 completed steps."""
    state = {"config": {"max_iters": 197}, "parts": [blank_part(0, decisions=[(0, 197), (50, 369)])]}
    fixed = {"config": {"max_iters": 100}, "parts": [blank_part(0, decisions=[(0, 100)])]}
    runs = [run_of("budget", [metrics(369)], state), run_of("fixed", [metrics(100)], fixed)]
    rows = rows_of(report_page(runs))
    assert ["steps planned", "369", "100"] in rows and ["steps completed", "369", "100"] in rows
    assert rows.count(["(steps planned)", "369"]) == 1 and ["(steps planned)", "100"] not in rows


@pytest.mark.parametrize("content", ["", '{"by": "a gu', "[]", '{"steps": 10}'])
def test_a_damaged_plan_is_one_line(content, tmp_path):
    """A list, or a plan without its origin, was a traceback."""
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(UserError, match=r"plan\.json is damaged .*; remove it"):
        report_page([run_of("run", [metrics(10)], folder=tmp_path)])


def test_the_x_axes_are_steps_tokens_and_time():
    """Runs with other batch sizes could not be compared. The time is that of the steps, as in the table."""
    slow = run_of("slow", [metrics(0, 4.0), metrics(1), metrics(11, 3.0, 50.0), metrics(31, 2.0, 5.0)])
    page = report_page([slow, run_of("other", [metrics(20, 1.75, 100.0)])])
    assert charts_in(page)["curves"]["x"] == ["step", "tokens", "time of the steps (min)"]
    (steps, tokens, minutes) = (lines_in(page, axis=axis)["slow: validation"]["x"] for axis in range(3))
    assert (steps, tokens) == ([0, 11, 31], [0, 1100, 3100])
    mean = 3000 / (1000 / 50 + 2000 / 5)  # tokens per second, also of step 1
    assert minutes == pytest.approx([0, (100 / mean + 20) / 60, (100 / mean + 420) / 60], rel=1e-5)
    assert minutes[-1] == pytest.approx(slow.totals()["seconds"] / 60, rel=1e-5)
    assert charts_in(report_page([run_of("unknown", [metrics(1), metrics(20)])]))["curves"]["x"] == ["step", "tokens"]


def test_abandoned_steps_have_their_own_time(tmp_path):
    """They begin where the run was rolled back to, and a mark is between the logged steps."""
    live = [metrics(10, None, 100.0), metrics(20, None, 100.0), metrics(30, None, 100.0)]
    run = run_of("run", live, {"parts": [blank_part(0), blank_part(15)]})
    run.__dict__["abandoned"] = {1: [metrics(20, None, 10.0), metrics(40, None, 10.0)]}
    page = report_page([run])
    (group,) = charts_in(page)["curves"]["groups"]
    assert lines_in(page, axis=2)["run: training before a rollback"]["x"] == [10 + 100, 10 + 300]  # seconds
    assert [column[group["marks"][0]["x"]] for column in group["columns"]] == [15, 1500, 15]


def test_samples_are_side_by_side_with_their_losses(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 20, "text": "abc"}\n{"step": 10, "text": "<b>"}\n')
    run = run_of("run", [metrics(1), metrics(20, 1.5)], folder=tmp_path)
    samples = charts_in(report_page([run, run_of("none", [metrics(1)])]))["samples"]["runs"]
    assert samples[0] == {"name": "run", "samples": [[10, "<b>", None], [20, "abc", 1.5]]}
    assert samples[1]["samples"] == [] and "samples" not in charts_in(report_page([run_of("none", [metrics(1)])]))


def test_only_a_live_page_may_ask_its_server():
    runs = [run_of("b", [metrics(20, 1.5)]), run_of("a", [metrics(20, 1.75)])]
    page, live = report_page(runs), report_page(runs, is_live=True)
    assert "connect-src" not in page and "fetch(" not in page
    assert "connect-src 'self'" in live and "fetch(location.href" in live
    names = [[group["name"] for group in charts_in(html)["curves"]["groups"]] for html in (page, live)]
    assert names == [["b", "a"], ["a", "b"]]  # colors do not follow the ranking
