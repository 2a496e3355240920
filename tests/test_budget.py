import pytest

from folio.budget import Plan


@pytest.mark.parametrize("max_iters", [1, 7, 2700, 600_000, 10**12 + 1])
def test_without_a_later_decision_a_step_is_itself(max_iters):
    plan = Plan(max_iters)
    for step in {0, 1, max_iters // 3, max_iters - 1, max_iters}:
        assert plan.recipe_step(step) == step
    assert plan.max_iters == max_iters and plan.decisions == [(0, max_iters)]


def test_a_decision_stretches_what_is_left():
    plan = Plan(100)
    before = [plan.recipe_step(step) for step in range(51)]
    plan.decide(50, 150)  # half of the recipe is left for 100 steps
    plan.decide(100, 110)  # and a quarter of it for 10
    assert [plan.recipe_step(step) for step in range(51)] == before
    assert plan.recipe_step(75) == 62.5 and plan.recipe_step(100) == 75 and plan.recipe_step(105) == 87.5
    assert plan.recipe_step(110) == 100 and plan.max_iters == 110
    again = Plan(100, [list(decision) for decision in plan.decisions])  # as JSON keeps them
    assert [again.recipe_step(step) for step in range(111)] == [plan.recipe_step(step) for step in range(111)]


def test_evaluations_are_those_of_the_recipe():
    plan = Plan(100)
    assert [step for step in range(1, 101) if plan.evaluates(step, 30)] == [30, 60, 90, 100]
    assert [plan.evaluations_after(step, 30) for step in (0, 29, 30, 60, 90, 99, 100)] == [4, 4, 3, 2, 1, 1, 0]
    plan.decide(40, 70)
    assert [step for step in range(1, 71) if plan.evaluates(step, 30)] == [30, 50, 65, 70]
    plan.decide(41, 42)
    assert [step for step in range(1, 43) if plan.evaluates(step, 30)] == [30, 42]
