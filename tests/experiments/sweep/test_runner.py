import os
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from folio import UserError
from folio.base.stop_signals import handled_by
from folio.experiments.sweep.outcome import Trial
from folio.experiments.sweep.runner import Runner, Watch, environments
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.sweeps import parse, small_sweep


@dataclass(frozen=True)
class FakeTrial(Trial):
    """A trial that is pruned after `prune_after` evaluations."""

    prune_after: int
    reports: list[tuple[float, int]] = field(default_factory=list)

    def report(self, loss: float, number: int) -> bool:
        self.reports.append((loss, number))
        return len(self.reports) == self.prune_after


@pytest.fixture
def runner(data_dir, tmp_path, monkeypatch) -> Runner:
    """The runner of a sweep that starts no trial."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, sweep = parse(["n_head=1,2", "--seeds=2", *small_sweep(data_dir, tmp_path / "sweep")])
    runner = Runner(sweep, SimpleNamespace(outcomes=lambda: []), jobs=3)
    monkeypatch.setattr(runner, "show", lambda: None)
    return runner


def watch_of(runner: Runner, seed: int = 1337, prune_after: int = 9) -> Watch:
    return Watch(runner, FakeTrial(0, seed, {"n_head": 1}, prune_after))


def test_a_runner_has_an_environment_for_each_job(runner):
    assert runner.jobs == 3
    assert len({runner.environments.get()["OMP_NUM_THREADS"] for _ in range(3)}) == 1


def test_each_evaluation_of_the_first_seed_is_reported_once(runner):
    """A pruned run does not continue after a later, better evaluation. Other seeds are not pruned."""
    watch = watch_of(runner, prune_after=2)
    assert watch(0, []) == "train"
    assert watch(2, [(2, 3.0)]) == "train"
    assert watch(4, [(2, 3.0), (4, 2.5)]) == "stop"
    assert watch(6, [(2, 3.0), (4, 2.5), (6, 2.0)]) == "stop"
    assert watch.trial.reports == [(3.0, 1), (2.5, 2), (2.0, 3)] and watch.reported == 3 and watch.is_pruned
    assert runner.fractions == {(0, 1337): 6 / 8}
    watch = watch_of(runner, seed=1338, prune_after=0)
    assert watch(2, [(2, 3.0)]) == "train"
    assert watch.trial.reports == [] and watch.reported == 1


def test_the_first_signal_stops_the_trials_and_the_second_kills_them(runner):
    watch, before = watch_of(runner), signal.getsignal(signal.SIGTERM)
    with handled_by(runner.stop):
        for number, action in ((signal.SIGTERM, "stop"), (signal.SIGINT, "kill")):
            os.kill(os.getpid(), number)
            assert watch(1, []) == action
    assert signal.getsignal(signal.SIGTERM) is before
    assert runner.stopped_by == signal.SIGTERM  # for the exit status


def test_a_closed_terminal_does_not_kill_the_trials(runner):
    """The kernel and the shell each send SIGHUP, so the trials were killed instead of stopped at a checkpoint."""
    watch = watch_of(runner)
    with handled_by(runner.stop):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            assert watch(1, []) == "stop"


def test_under_nohup_a_closed_terminal_does_not_stop_the_trials(runner):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled_by(runner.stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not runner.stopping.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "visible", "expected"),
    [
        (None, None, ["0", "1", "2"]),  # one run for each GPU
        (2, None, ["0", "1"]),
        (None, "5,7,6", ["5", "7", "6"]),
    ],
)
def test_each_run_has_its_own_gpu(jobs, visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with SimulatedGPU(device_count=3):
        assert environments(jobs, "auto") == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in expected]
        with pytest.raises(UserError, match=r"jobs=4.* 3$"):
            environments(4, "auto")


def test_runs_on_a_cpu_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    assert environments(3, "cpu") == [{"OMP_NUM_THREADS": "2"}] * 3
