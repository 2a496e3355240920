import pytest

from folio.schedule import Schedule, StepCounts


@pytest.mark.parametrize("max_iters", [1, 7, 2700, 600_000, 10**12 + 1])
def test_without_a_later_decision_a_step_is_itself(max_iters):
    schedule = Schedule(StepCounts(max_iters))
    for step in {0, 1, max_iters // 3, max_iters - 1, max_iters}:
        assert schedule.recipe_step(step) == step
    assert schedule.max_iters == max_iters and schedule.decisions == [(0, max_iters)]


def test_a_decision_stretches_what_is_left():
    schedule = Schedule(StepCounts(100))
    before = [schedule.recipe_step(step) for step in range(51)]
    schedule.decide(50, 150)  # half of the recipe is left for 100 steps
    schedule.decide(100, 110)  # and a quarter of it for 10
    assert [schedule.recipe_step(step) for step in range(51)] == before
    assert schedule.recipe_step(75) == 62.5 and schedule.recipe_step(100) == 75 and schedule.recipe_step(105) == 87.5
    assert schedule.recipe_step(110) == 100 and schedule.max_iters == 110
    as_json = [list(decision) for decision in schedule.decisions]
    again = Schedule(StepCounts(100), decisions=as_json)
    assert [again.recipe_step(step) for step in range(111)] == [schedule.recipe_step(step) for step in range(111)]


def test_evaluations_are_those_of_the_recipe():
    schedule = Schedule(StepCounts(100, eval_interval=30))
    assert [step for step in range(1, 101) if schedule.evaluates(step)] == [30, 60, 90, 100]
    assert [schedule.evaluations_after(step) for step in (0, 29, 30, 60, 90, 99, 100)] == [4, 4, 3, 2, 1, 1, 0]
    schedule.decide(40, 70)
    assert [step for step in range(1, 71) if schedule.evaluates(step)] == [30, 50, 65, 70]
    schedule.decide(41, 42)
    assert [step for step in range(1, 43) if schedule.evaluates(step)] == [30, 42]
