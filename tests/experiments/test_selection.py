"""Selection of runs, their order, and the settings in which they differ."""

import re
import shlex
from pathlib import Path

import pytest

from folio.base import settings
from folio.checkpoints.find_runs import runs_under
from folio.experiments.runs import Run
from folio.experiments.selection import Selection, different_settings
from tests.support.runs import edit_state, write_run
from tools.runs import RunsConfig


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", "dcba"),
        ("--sort=-date", "abcd"),
        ("--sort=loss", "bcad"),
        ("--sort=-loss", "acbd"),
        ("--sort=loss --limit=2", "bc"),
        ("--sort=name", "adbc"),
        ("--sort=tokens", "dbac"),
        ("--sort=-time --filter=state=finished", "ac"),
        ("--sort=learning_rate", "acbd"),
        ("--sort=dataset", "cabd"),
        ("--filter=n_layer!=6", "a"),
        ("--filter=learning_rate>1e-3", "cb"),
        ("--filter=learning_rate>=0.001,learning_rate<0.01", "ca"),
        ("--filter=n_layer==6 --filter=dataset=nov*", "b"),
        ("--filter=dataset!=novel", "c"),
        ("--filter=bias=true", "c"),
        ("--filter=dropout=None", "a"),
        ("--filter=loss=None", "d"),
        ("--filter=sweep-x", "cb"),
        ("--filter=sweep-?/b", "b"),
        ("'--filter=date>2023-11-14 22:20'", "dcb"),
        ("--filter=time<=8", "db"),
    ],
)
def test_runs_are_filtered_sorted_and_limited(four, arguments, expected):
    """The names are their last characters."""
    runs = settings.load(RunsConfig, shlex.split(arguments)).select(runs_under(Path()), Path())
    assert "".join(run.name[-1] for run in runs) == expected


def test_explicit_settings_are_first_and_step_counts_of_a_time_budget_are_left_out(tmp_path):
    """The data set and an explicit learning rate came after eval_interval, which --minutes had scaled."""
    origins = {"learning_rate": "command line", "minutes": "command line"}
    for n in range(4):
        counts = dict(minutes=1.0, max_iters=100 + n, eval_interval=10 + 3 * n, warmup_iters=n)
        settings = dict(beta2=0.9 + 0.01 * n, learning_rate=0.1 if n else 0.2, dataset="b" if n == 3 else "a", **counts)
        write_run(tmp_path / f"{n}", {1: 2.0}, **settings)
        edit_state(tmp_path / f"{n}" / "step-000001", lambda state: state.update(origins=origins))
    runs = [Run.of(tmp_path / f"{n}") for n in range(4)]
    assert different_settings(runs) == ["dataset", "learning_rate", "beta2"]


def test_different_settings(tmp_path):
    """Logging settings are ignored, the most varied settings are first, and "resume" equals "scratch"."""
    settings = [dict(n_layer=n % 3, n_head=n % 3, bias=n == 0, keep_last=n, out_dir=f"{n}") for n in range(6)]
    settings[3]["init_from"], settings[4]["init_from"] = "scratch", "resume"
    for n, run_settings in enumerate(settings):
        steps = 100 * (n + 1)
        counts = dict(max_iters=steps, warmup_iters=round(steps / 30), lr_decay_iters=None if n else 50)
        write_run(tmp_path / f"{n}", {1: 2.0}, **{"init_from": "scratch", **counts, **run_settings})
    runs = [Run.of(tmp_path / f"{n}") for n in range(6)]
    unlisted = ["keep_last", "out_dir"]
    assert different_settings(runs, unlisted) == ["n_layer", "bias", "n_head", "max_iters", "lr_decay_iters"]
    edit_state(tmp_path / "5" / "step-000001", lambda state: state["config"].update(init_from="out-novel"))
    assert "init_from" in different_settings([Run.of(tmp_path / f"{n}") for n in range(6)])
    assert different_settings(runs[:1]) == []


def test_a_list_option_can_be_repeated():
    cfg = settings.load(Selection, ["--filter=a, b", "--filter", "c=1"])
    assert cfg.filter == ("a", "b", "c=1") and settings.load(Selection, []).filter == ()
    assert re.search(r"--filter= +state=failed", settings.help_text(Selection))
