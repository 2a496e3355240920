"""Step counts, and schedules with decisions of a time budget."""

import pytest

from folio.base import settings
from folio.training.optim import LearningRates
from folio.training.schedule import Schedule, StepCounts
from train import TrainConfig

# --- step counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_iters", [1, 2, 5, 30, 1000, 600_000])
def test_default_step_counts_depend_on_max_iters(max_iters):
    counts = TrainConfig(max_iters=max_iters).step_counts
    assert counts.warmup_steps <= max_iters / 20 and counts.warmup_steps <= 2000
    assert counts.evaluations >= min(10, max_iters) / 2 and (max_iters < 20 or counts.evaluations >= 10)
    recipe = settings.load(TrainConfig, ["config/shakespeare_char.py"])
    assert recipe.step_counts.evaluations >= 8 and recipe.eval_iters is None  # of all validation data


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_iters", [1, 7, 2700, 600_000, 10**12 + 1])
def test_without_a_decision_recipe_steps_equal_the_runs_steps(max_iters):
    schedule = Schedule(StepCounts(max_iters))
    for step in {0, 1, max_iters // 3, max_iters - 1, max_iters}:
        assert schedule.recipe_step(step) == step
    assert schedule.max_iters == max_iters and schedule.decisions == [(0, max_iters)]


@pytest.mark.parametrize("learning_rate, min_lr", [(6e-4, 1e-4), (8e-3, 0.0), (0.3, None), (0.0, None), (0.0, 0.0)])
def test_each_learning_rate_follows_the_schedule_from_its_own_peak(learning_rate, min_lr):
    """Muon's rate was a multiple of learning_rate, so --learning_rate=0 trained nothing.

    The multiple is exact, so that runs of older versions resume bitwise identically.
    """
    settings = dict(min_lr=min_lr, lr_schedule="linear", warmup_iters=10, max_iters=100)

    def rates(**changes) -> list[LearningRates]:
        cfg = TrainConfig(**{**settings, "learning_rate": learning_rate, "muon_learning_rate": 0.02, **changes})
        return [cfg.schedule(cfg.step_counts, {}).learning_rates_at(step) for step in range(101)]

    alone = rates(learning_rate=0.02, min_lr=min_lr and min_lr * 0.02 / learning_rate)
    assert [muon for _, muon in rates(optimizer="muon")] == pytest.approx([rate for rate, _ in alone])
    if learning_rate:
        assert all(muon == rate * (0.02 / learning_rate) for rate, muon in rates(optimizer="muon"))
    assert rates() == [(rate, 0) for rate, _ in rates(optimizer="muon")]


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
    schedule.decide(41, 42)  # too few steps for the remaining three evaluations
    assert [step for step in range(1, 43) if schedule.evaluates(step)] == [30, 42]
