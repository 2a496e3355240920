import json

import pytest
import torch

from folio.guard import StepGuard

NAN, INF = float("nan"), float("inf")


def guard(skip_spikes: float | None = None, state: dict | None = None) -> StepGuard:
    return StepGuard(torch.device("cpu"), skip_spikes, state)


def judge(guard: StepGuard, loss: float, grad_norm: float, scale: torch.Tensor | None = None) -> float:
    return guard.judge(torch.tensor(loss), torch.tensor(grad_norm), scale).item()


def read(guard: StepGuard) -> StepGuard:
    guard.send()
    guard.read(1)
    return guard


@pytest.mark.parametrize("loss, grad_norm, bad", [(1, 1, 0), (NAN, 1, 1), (1, NAN, 1), (1, INF, 1), (-INF, 1, 1)])
def test_what_is_not_finite_is_bad(loss, grad_norm, bad):
    found = guard()
    assert judge(found, float(loss), float(grad_norm)) == bad
    found.send()
    (step,) = found.read(7)
    assert step.step == 7 and step.skipped == bool(bad) and found.read(7) == []
    assert found.state()["skipped"] == bad == found.state()["in_a_row"]


def test_bad_steps_in_a_row_are_counted():
    found = guard()
    for loss in (1.0, NAN, NAN, 1.0, NAN, NAN, NAN):
        judge(found, loss, 1.0)
    assert read(found).state()["in_a_row"] == 3 and found.state()["skipped"] == 5


def test_an_overflow_of_the_loss_scale_is_passed_over_uncounted():
    found, scale = guard(), torch.tensor(2.0**16)
    assert judge(found, 1.0, INF, scale) == 1 and read(found).state()["skipped"] == 0
    assert judge(found, NAN, NAN, scale) == 1 and read(found).state()["skipped"] == 1


def test_spikes_are_counted_under_loss_scaling_too():
    """They were skipped in silence: after a change of level, each step of a float16 run, forever."""
    found, scale = guard(skip_spikes=3.0), torch.tensor(2.0**16)
    for n in range(150):
        judge(found, 2 + 0.01 * (n % 7), 1.0 + 0.01 * (n % 5), scale)
    assert judge(found, 50.0, 1.0, scale) == 1 and read(found).skipped == 1


def test_steps_of_an_earlier_reading_are_no_streak():
    """A run that had recovered was stopped when it was resumed."""
    state = {"in_a_row": 5, "skipped": 5, "moments": [[0.0, 0.0, 0.0]] * 2}
    found = guard(state=state)
    for _ in range(10):
        judge(found, 1.0, 1.0)
    assert read(found).diagnose(torch.nn.Linear(1, 1), 5, None) is None
    found = guard(state=state)
    judge(found, NAN, 1.0)
    assert read(found).diagnose(torch.nn.Linear(1, 1), 6, None).startswith("the loss is nan")


def test_an_overflow_at_every_scale_is_counted():
    """It never was, so that a run whose gradients do not fit into float16 went on without learning anything."""
    found = guard()
    for exponent in range(16, -5, -1):
        assert judge(found, 1.0, INF, torch.tensor(2.0**exponent)) == 1
    assert read(found).in_a_row == found.skipped == 4


def test_a_streak_between_two_readings_stops_the_run():
    """Only the steps in a row at the end of a reading were looked at."""
    found = guard()
    for loss in [1.0, *[NAN] * 4, 1.0]:
        judge(found, loss, 1.0)
    read(found)
    model = torch.nn.Linear(1, 1)
    assert found.in_a_row == 0 and found.streak == 4 and found.diagnose(model, 5, None) is None
    assert found.diagnose(model, 4, None).startswith("the loss is nan")
    judge(found, 1.0, 1.0)
    assert read(found).diagnose(model, 4, None) is None


def test_numbers_are_read_only_after_the_copy_is_done():
    """Outside CUDA no event says when an asynchronous copy has arrived, so there must be none."""
    copies = []

    class Watched(torch.Tensor):
        def to(self, *args, **kwargs):
            copies.append(kwargs.get("non_blocking", False))
            return super().to(*args, **kwargs)

    found = guard()
    found.judge(torch.tensor(1.0), torch.tensor(1.0))
    found.judged = [one.as_subclass(Watched) for one in found.judged]
    found.send()
    assert copies == [False]


def test_spikes_are_those_above_the_running_deviation(seed):
    torch.manual_seed(seed)
    found = guard(skip_spikes=6.0)
    for _ in range(300):
        judge(found, 2 + 0.1 * torch.rand(()).item(), 1 + 0.1 * torch.rand(()).item())
    (_, loss, loss_variance), (_, norm, _) = found.state()["moments"]
    assert loss == pytest.approx(2.05, abs=0.02) and norm == pytest.approx(1.05, abs=0.02)
    assert loss_variance**0.5 == pytest.approx(0.1 / 12**0.5, rel=0.3)
    before = found.state()["moments"]
    assert judge(found, 2.5, 1.05) == 1 and judge(found, 2.05, 3.0) == 1
    assert found.state()["moments"] == before  # a spike does not move the mean
    assert judge(found, 2.1, 1.05) == 0 and judge(found, 1.0, 0.5) == 0  # to fall is no spike


def test_its_state_comes_back_to_the_bit(seed):
    torch.manual_seed(seed)
    values = (torch.rand(400, 2) + 1).tolist()
    straight, first = guard(3.0), guard(3.0)
    whole = [judge(straight, *value) for value in values]
    half = [judge(first, *value) for value in values[:200]]
    second = guard(3.0, state=json.loads(json.dumps(read(first).state())))
    assert half + [judge(second, *value) for value in values[200:]] == whole
    assert read(second).state() == read(straight).state()
