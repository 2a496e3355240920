import json

import numpy as np
import pytest
import torch

from folio.training.guard import DECAY, MIN_STEPS, StepGuard
from tests.support.tolerances import normal_limit

NAN, INF = float("nan"), float("inf")


def new_guard(skip_spikes: float | None = None, state: dict | None = None) -> StepGuard:
    return StepGuard(torch.device("cpu"), skip_spikes, state)


def judge(guard: StepGuard, loss: float, grad_norm: float, scale: torch.Tensor | None = None) -> float:
    return guard.judge(torch.tensor(loss), torch.tensor(grad_norm), scale).item()


def read(guard: StepGuard) -> StepGuard:
    """Read the steps judged so far."""
    guard.send()
    guard.read(1)
    return guard


@pytest.mark.parametrize("loss, grad_norm, bad", [(1, 1, 0), (NAN, 1, 1), (1, NAN, 1), (1, INF, 1), (-INF, 1, 1)])
def test_steps_that_are_not_finite_are_bad(loss, grad_norm, bad):
    guard = new_guard()
    assert judge(guard, float(loss), float(grad_norm)) == bad
    guard.send()
    (step,) = guard.read(7)
    assert step.step == 7 and step.skipped == bool(bad) and guard.read(7) == []
    assert guard.state()["skipped"] == bad == guard.state()["in_a_row"]


def test_bad_steps_in_a_row_are_counted():
    guard = new_guard()
    for loss in (1.0, NAN, NAN, 1.0, NAN, NAN, NAN):
        judge(guard, loss, 1.0)
    assert read(guard).state()["in_a_row"] == 3 and guard.state()["skipped"] == 5


def test_an_overflow_at_a_large_loss_scale_is_skipped_but_not_counted():
    guard, scale = new_guard(), torch.tensor(2.0**16)
    assert judge(guard, 1.0, INF, scale) == 1 and read(guard).state()["skipped"] == 0
    assert judge(guard, NAN, NAN, scale) == 1 and read(guard).state()["skipped"] == 1


def test_spikes_are_also_counted_with_a_loss_scale():
    """They were not counted, so that a float16 run skipped every step after the loss had shifted."""
    guard, scale = new_guard(skip_spikes=3.0), torch.tensor(2.0**16)
    for n in range(150):
        judge(guard, 2 + 0.01 * (n % 7), 1.0 + 0.01 * (n % 5), scale)
    assert judge(guard, 50.0, 1.0, scale) == 1 and read(guard).skipped == 1


def test_the_running_mean_and_variance_are_those_of_weighted_steps(seed):
    """The first 50 steps have equal weights; later, each is worth DECAY of the next one.

    The tolerance: each step rounds squares of at most the largest one, with float32's unit roundoff of 2**-24.
    """
    values = np.random.default_rng(seed).normal([3.0, 1.0], [0.5, 0.1], (2 * MIN_STEPS, 2)).astype(np.float32)
    guard, weights = new_guard(skip_spikes=100.0), np.empty(0)
    for count, (loss, grad_norm) in enumerate(values, start=1):
        judge(guard, float(loss), float(grad_norm))
        share = max(1 / count, 1 - DECAY)
        weights = np.append(weights * (1 - share), share)
        mean = weights @ values[:count]
        variance = weights @ (values[:count] - mean) ** 2
        expected = np.stack([[count] * 2, mean, variance], axis=1)
        tolerance = count * 2.0**-24 * float(np.square(values).max())
        assert guard.moments.numpy() == pytest.approx(expected, rel=0, abs=tolerance)


def test_bad_steps_before_a_good_step_do_not_count_on_resume():
    """A run that had recovered was stopped when it was resumed."""
    state = {"in_a_row": 5, "skipped": 5, "moments": [[0.0, 0.0, 0.0]] * 2}
    guard = new_guard(state=state)
    for _ in range(10):
        judge(guard, 1.0, 1.0)
    assert read(guard).can_continue(5, None)
    guard = new_guard(state=state)
    judge(guard, NAN, 1.0)
    assert read(guard).diagnose(torch.nn.Linear(1, 1), 6, None, has_checkpoint=True)[0] == "the loss is nan"


def test_a_step_without_targets_is_neither_good_nor_bad():
    """It had a loss of 0, which ended a series of bad steps, and was below all validation losses."""
    guard = new_guard(skip_spikes=3.0)
    judge(guard, 2.0, 1.0)
    moments = guard.state()["moments"]
    judge(guard, NAN, 1.0)
    guard.judge_without_targets()
    judge(guard, NAN, 1.0)
    guard.judge_without_targets()
    guard.send()
    steps = guard.read(5)
    assert [(s.step, s.loss, s.grad_norm, s.skipped) for s in steps[::2]] == [
        (1, 2.0, 1.0, False), (3, None, None, False), (5, None, None, False)
    ]  # fmt: skip
    assert guard.in_a_row == guard.streak == 2 and guard.skipped == 2 and guard.moments.tolist() == moments
    assert new_guard(state=json.loads(json.dumps(guard.state()))).without_targets == 2
    judge(guard, 1.5, 1.0)
    guard.judge_without_targets()
    guard.record_evaluation(1.0, 7)
    assert read(guard).last_loss == 1.5 and guard.has_risen(2.0)
    fresh = new_guard()
    fresh.record_evaluation(1.0, 1)
    fresh.judge_without_targets()
    assert read(fresh).last_loss is None and not fresh.has_risen(2.0)


def test_an_overflow_at_a_loss_scale_below_1_is_counted():
    """It was not, so a run whose gradients overflow float16 continued without learning."""
    guard = new_guard()
    for exponent in range(16, -5, -1):
        assert judge(guard, 1.0, INF, torch.tensor(2.0**exponent)) == 1
    assert read(guard).in_a_row == guard.skipped == 4


def test_a_streak_in_the_middle_of_a_read_stops_the_run():
    """Only consecutive bad steps at the end of a read were considered."""
    guard = new_guard()
    for loss in [1.0, *[NAN] * 4, 1.0]:
        judge(guard, loss, 1.0)
    read(guard)
    model = torch.nn.Linear(1, 1)
    assert guard.in_a_row == 0 and guard.streak == 4
    assert guard.can_continue(5, None) and not guard.can_continue(4, None)
    assert guard.diagnose(model, 4, None, has_checkpoint=True)[0] == "the loss is nan"
    judge(guard, 1.0, 1.0)
    assert read(guard).can_continue(4, None)


def test_spikes_are_judged_by_running_mean_and_deviation(seed):
    torch.manual_seed(seed)
    guard = new_guard(skip_spikes=6.0)
    for _ in range(300):
        judge(guard, 2 + 0.1 * torch.rand(()).item(), 1 + 0.1 * torch.rand(()).item())
    (_, loss, loss_variance), (_, norm, _) = guard.state()["moments"]
    deviation = 0.1 / 12**0.5
    limit = normal_limit(3) * ((1 - DECAY) / (1 + DECAY)) ** 0.5  # of a running mean of independent values
    assert loss == pytest.approx(2.05, abs=limit * deviation) and norm == pytest.approx(1.05, abs=limit * deviation)
    squares = 0.8**0.5  # the standard deviation of the square of a uniform number, relative to its mean
    assert loss_variance == pytest.approx(deviation**2, rel=limit * squares + 2 * (1 - DECAY))  # the mean lags, too
    before = guard.state()["moments"]
    assert judge(guard, 2.5, 1.05) == 1 and judge(guard, 2.05, 3.0) == 1
    assert guard.state()["moments"] == before  # a spike does not change the mean
    assert judge(guard, 2.1, 1.05) == 0 and judge(guard, 1.0, 0.5) == 0  # low values are not spikes


def test_the_state_is_restored_exactly(seed):
    torch.manual_seed(seed)
    values = (torch.rand(400, 2) + 1).tolist()
    uninterrupted, first = new_guard(3.0), new_guard(3.0)
    expected = [judge(uninterrupted, *value) for value in values]
    first_half = [judge(first, *value) for value in values[:200]]
    second = new_guard(3.0, state=json.loads(json.dumps(read(first).state())))
    assert first_half + [judge(second, *value) for value in values[200:]] == expected
    assert read(second).state() == read(uninterrupted).state()
