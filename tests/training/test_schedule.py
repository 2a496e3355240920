"""Step counts, and schedules whose length a time budget changes."""

from pathlib import Path

import pytest

from folio.base import settings
from folio.training.schedule import Schedule, StepCounts
from train import TrainConfig

# --- step counts ------------------------------------------------------------------------------------------------------


def test_max_iters_on_the_command_line_scales_a_config_files_step_counts(tmp_path, monkeypatch, capsys):
    """--max_iters=10 failed with "warmup must end before max_iters", also with nanoGPT's own config files."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(
        "max_iters = 5000\nlr_decay_iters = 5000\nwarmup_iters = 100\neval_interval = 250\ndataset = 'a'\n"
    )

    def counts(*args: str) -> tuple:
        cfg = settings.load(TrainConfig, ["x.py", *args])
        return cfg.max_iters, cfg.lr_decay_iters, cfg.warmup_iters, cfg.eval_interval, cfg.wsd_decay_iters

    assert counts() == (5000, 5000, 100, 250, None) and capsys.readouterr().out == ""
    assert counts("--max_iters=30") == (30, 30, 1, 2, None)
    assert capsys.readouterr().out == (
        "max_iters=30 instead of the config file's 5,000, and in proportion: warmup_iters=1 (was 100), "
        "lr_decay_iters=30 (was 5,000), eval_interval=2 (was 250)\n"
    )
    assert counts("--max_iters=10000") == (10000, 10000, 200, 500, None)
    assert counts("--max_iters=30", "--eval_interval=7", "--wsd_decay_iters=3") == (30, 30, 1, 7, 3)
    Path("y.py").write_text("max_iters = 40\n")
    assert counts("--max_iters=30", "y.py") == (40, 5000, 100, 250, None)  # the last argument decides


@pytest.mark.parametrize("max_iters", [1, 2, 5, 30, 1000, 600_000])
def test_default_step_counts_depend_on_max_iters(max_iters):
    counts = TrainConfig(max_iters=max_iters).step_counts
    assert counts.warmup_steps <= max_iters / 20 and counts.warmup_steps <= 2000
    assert counts.evaluations >= min(10, max_iters) / 2 and (max_iters < 20 or counts.evaluations >= 10)


def test_the_shakespeare_recipe_evaluates_all_validation_data_at_least_8_times():
    cfg = settings.load(TrainConfig, ["config/shakespeare_char.py"])
    assert cfg.step_counts.evaluations >= 8 and cfg.eval_iters is None


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_iters", [1, 7, 2700, 600_000, 10**12 + 1])
def test_without_a_decision_recipe_steps_are_the_runs_steps(max_iters):
    schedule = Schedule(StepCounts(max_iters))
    for step in {0, 1, max_iters // 3, max_iters - 1, max_iters}:
        assert schedule.recipe_step(step) == step
    assert schedule.max_iters == max_iters and schedule.decisions == [(0, max_iters)]


def test_a_decision_stretches_the_rest_of_the_recipe():
    schedule = Schedule(StepCounts(100))
    before = [schedule.recipe_step(step) for step in range(51)]
    schedule.decide(50, 150)  # the second half of the recipe takes 100 steps
    schedule.decide(100, 110)  # and its last quarter takes 10
    assert [schedule.recipe_step(step) for step in range(51)] == before
    assert schedule.recipe_step(75) == 62.5 and schedule.recipe_step(100) == 75 and schedule.recipe_step(105) == 87.5
    assert schedule.recipe_step(110) == 100 and schedule.max_iters == 110
    as_json = [list(decision) for decision in schedule.decisions]
    loaded = Schedule(StepCounts(100), decisions=as_json)
    assert [loaded.recipe_step(step) for step in range(111)] == [schedule.recipe_step(step) for step in range(111)]


def test_a_decision_keeps_the_number_of_evaluations():
    schedule = Schedule(StepCounts(100, eval_interval=30))
    assert [step for step in range(1, 101) if schedule.evaluates(step)] == [30, 60, 90, 100]
    assert [schedule.evaluations_after(step) for step in (0, 29, 30, 60, 90, 99, 100)] == [4, 4, 3, 2, 1, 1, 0]
    schedule.decide(40, 70)
    assert [step for step in range(1, 71) if schedule.evaluates(step)] == [30, 50, 65, 70]
    schedule.decide(41, 42)  # too few steps for the three evaluations that were left
    assert [step for step in range(1, 43) if schedule.evaluates(step)] == [30, 42]
