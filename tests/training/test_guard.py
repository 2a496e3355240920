import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from folio.training.evaluations import Evaluations
from folio.training.guard import DECAY, MIN_STEPS, StepGuard
from tests.support.tolerances import normal_limit

NAN, INF = float("nan"), float("inf")


def new_guard(skip_spikes: float | None = None, state: dict | None = None) -> StepGuard:
    guard = StepGuard(torch.device("cpu"), skip_spikes)
    if state:
        guard.load(state)
    return guard


def judge(guard: StepGuard, loss: float, grad_norm: float, scale: float | None = None) -> float:
    scale = None if scale is None else torch.tensor(scale)
    return guard.judge(torch.tensor(loss), torch.tensor(grad_norm), scale).item()


def read(guard: StepGuard) -> StepGuard:
    """Read the steps judged so far."""
    guard.send()
    guard.read(1)
    return guard


STEPS = {  # loss, gradient norm, loss scale -> whether the step is bad, and whether it counts as skipped
    (1.0, 1.0, None): (False, False),
    (NAN, 1.0, None): (True, True),
    (1.0, NAN, None): (True, True),
    (1.0, INF, None): (True, True),
    (-INF, 1.0, None): (True, True),
    (1.0, 1.0, 2.0**16): (False, False),
    (1.0, INF, 2.0**16): (True, False),  # only the loss scale is too large
    (1.0, INF, 0.5): (True, True),  # the unscaled gradients also overflow
    (NAN, NAN, 2.0**16): (True, True),
    None: (False, False),  # without targets
}


@given(st.lists(st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=8), min_size=1, max_size=5))
@example([[(1.0, 1.0, None), *[(NAN, 1.0, None)] * 4, (1.0, 1.0, None)]])
@settings(max_examples=50)
def test_bad_steps_are_skipped_and_counted(reads):
    """Several reads of several steps. After each, the state is restored from JSON, as when a run is resumed.

    Only bad steps at the end of a read stopped a run. A step without targets had a loss of 0, which ended a series of
    bad steps. A recovered run was stopped when it was resumed. A run whose gradients overflow float16 was not stopped.
    """
    state, counts = {}, dict(in_a_row=0, skipped=0, without_targets=0)
    for steps in reads:
        guard, streak = new_guard(state=json.loads(json.dumps(state))), 0
        for step in steps:
            bad, counted = STEPS[step]
            if step is None:
                guard.judge_without_targets()
                counts["without_targets"] += 1
                continue
            assert judge(guard, *step) == bad
            counts["in_a_row"] = counts["in_a_row"] + 1 if counted else 0
            counts["skipped"] += counted
            streak = max(streak, counts["in_a_row"])
        guard.send()
        assert [(s.step, s.loss is None, s.skipped) for s in guard.read(100)] == [
            (number, step is None, STEPS[step][1]) for number, step in enumerate(steps, start=101 - len(steps))
        ]
        state = guard.state()
        assert {name: state[name] for name in counts} == counts
        assert guard.can_continue(streak + 1, None) and not guard.can_continue(streak, None)


def test_spikes_are_also_counted_with_a_loss_scale():
    """They were not counted, so that a float16 run skipped every step after the loss had shifted."""
    guard, scale = new_guard(skip_spikes=3.0), 2.0**16
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


def test_a_step_without_targets_changes_no_moments_and_is_no_last_loss():
    """It had a loss of 0, which was below all validation losses."""
    guard = new_guard(skip_spikes=3.0)
    for loss in (2.0, 1.5):
        judge(guard, loss, 1.0)
    moments = guard.state()["moments"]
    guard.judge_without_targets()
    assert read(guard).last_loss == 1.5 and guard.state()["moments"] == moments
    fresh, evaluations = new_guard(), Evaluations()
    fresh.judge_without_targets()
    assert read(fresh).last_loss is None
    evaluations.add({"val_loss": 1.0}, 7, None)
    assert evaluations.has_diverged(2.0, guard.last_loss) and not evaluations.has_diverged(2.0, fresh.last_loss)


def test_a_streak_in_the_middle_of_a_read_has_a_diagnosis():
    guard = new_guard()
    for loss in [1.0, *[NAN] * 4, 1.0]:
        judge(guard, loss, 1.0)
    assert (
        read(guard).diagnose(torch.nn.Linear(1, 1), 4, None, Evaluations(), has_checkpoint=True)[0] == "the loss is nan"
    )


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
