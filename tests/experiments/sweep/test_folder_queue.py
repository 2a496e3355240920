"""The queue of a grid's trials, with runs written by write_run."""

import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from folio import UserError
from folio.base.settings import ROOT
from folio.experiments.sweep import trial_folder
from folio.experiments.sweep.folder_queue import FolderQueue, grid_importances
from folio.experiments.sweep.outcome import Outcome, Trial
from folio.experiments.sweep.space import Values, grid
from folio.experiments.sweep.trial_folder import LOCK, claim
from tests.support.runs import write_run
from tests.support.sweeps import parse, run, run_with_two_workers, small_sweep
from tests.support.tolerances import rounding_error


@pytest.fixture
def new_worker(data_dir, tmp_path):
    """Return a function that creates a worker of the same grid: two values with two seeds."""
    words = [word for word in small_sweep(data_dir, tmp_path / "sweep") if "n_layer" not in word]

    def worker(*more: str) -> FolderQueue:
        queue = FolderQueue(parse(["n_layer=1,2", "--seeds=2", *words, *more])[1])
        queue.poll_seconds = 0.01
        return queue

    return worker


KEYS = [(0, 1337), (1, 1337), (0, 1338), (1, 1338)]  # in the order of running


def finish(queue: FolderQueue, trial: Trial) -> Outcome:
    """Write the folder of a finished run."""
    folder = queue.folder(trial)
    claim(folder, queue.sweep.description(trial))
    loss = float(trial.point + 1)
    write_run(folder, {2: loss})
    return trial.outcome("finished", loss=loss)


def states_of(queue: FolderQueue) -> dict[tuple[int, int], str]:
    return {(outcome.point, outcome.seed): outcome.state for outcome in queue.outcomes()}


def test_all_combinations_run_before_the_second_seed(new_worker):
    queue, started = new_worker(), []

    def train(trial: Trial) -> Outcome:
        started.append(trial.key)
        assert states_of(queue)[trial.key] == states_of(new_worker())[trial.key] == "running"
        return finish(queue, trial)

    assert set(states_of(queue).values()) == {"waiting"}
    run(queue, train)
    assert started == KEYS
    outcomes = new_worker().outcomes()  # read from the folders
    assert [(outcome.point, outcome.seed) for outcome in outcomes] == sorted(KEYS)
    assert {outcome.state for outcome in outcomes} == {"finished"} and outcomes[0].params == {"n_layer": 1}
    assert [outcome.loss for outcome in outcomes] == [1.0, 1.0, 2.0, 2.0] and outcomes[0].evaluations == ((200, 1.0),)
    assert outcomes[0].seconds == 4.0 and outcomes[0].host == socket.gethostname()
    assert new_worker().importances() == {}  # of one setting
    run(new_worker(), train)
    assert started == KEYS


@pytest.mark.parametrize("jobs", [1, 3])
def test_two_workers_with_threads_run_each_trial_once(new_worker, jobs):
    started, outcomes = run_with_two_workers(lambda: new_worker("--seeds=8"), finish, jobs)
    assert started == {(point, seed): 1 for point in range(2) for seed in range(1337, 1345)}
    for worker in outcomes:  # both wait for the last trial
        assert [outcome.state for outcome in worker] == ["finished"] * 16


@pytest.mark.parametrize("jobs", [2, 8])
def test_threads_run_each_trial_once_without_locks_in_the_file_system(new_worker, jobs, monkeypatch):
    monkeypatch.setattr(trial_folder, "locked", lambda path, busy: nullcontext())
    monkeypatch.setattr(trial_folder, "is_locked", lambda path: None)
    queue, started = new_worker("--seeds=8"), Counter()

    def train(trial: Trial) -> Outcome:
        started[trial.key] += 1
        return finish(queue, trial)

    run(queue, train, jobs)
    assert set(started.values()) == {1} and len(started) == 16


def test_an_interrupted_trial_is_requeued_and_a_failed_one_only_by_retry_failed(new_worker):
    attempts: Counter = Counter()
    stopping = threading.Event()
    queue = new_worker()

    def train(trial: Trial) -> Outcome:
        attempts[trial.key] += 1
        if trial.key == (0, 1337) and attempts[trial.key] == 1:
            return trial.outcome("failed", error="memory ran out")
        if trial.key == (1, 1337) and attempts[trial.key] == 1:
            stopping.set()
            return trial.outcome("waiting")
        return finish(queue, trial)

    queue.run(train, 1, stopping, after_trial=lambda: None)
    expected = {(0, 1337): "failed", (1, 1337): "waiting", (0, 1338): "waiting", (1, 1338): "waiting"}
    assert states_of(queue) == states_of(new_worker()) == expected
    assert new_worker().outcomes()[0].error == "memory ran out"
    run(queue, train)
    assert attempts == {(0, 1337): 1, (1, 1337): 2, (0, 1338): 1, (1, 1338): 1}
    assert states_of(queue)[0, 1337] == "failed"
    queue.retry_failed()
    run(new_worker(), train)
    assert attempts[0, 1337] == 2 and attempts.total() == 6 and set(states_of(queue).values()) == {"finished"}


def test_a_folder_with_another_run_fails_and_is_not_changed(new_worker):
    queue = new_worker()
    other = queue.folder(queue.trials[0])
    claim(other, {"seed": 0})
    run(queue, lambda trial: finish(queue, trial))
    first = queue.outcomes()[0]
    assert first.state == "failed" and "another run; remove it" in first.error
    assert [path.name for path in other.iterdir()] == ["trial.json"]


def test_an_error_ends_all_threads(new_worker):
    queue, stopping = new_worker(), threading.Event()

    def train(trial: Trial) -> Outcome:
        if trial.key == KEYS[0]:
            raise ZeroDivisionError
        assert stopping.wait(60)
        return trial.outcome("waiting")

    with pytest.raises(ZeroDivisionError):
        queue.run(train, 2, stopping, after_trial=lambda: None)


def test_an_unwritable_folder_is_an_error(new_worker):
    queue = new_worker()
    queue.sweep.out_dir.write_text("")  # not a folder
    with pytest.raises(UserError, match=r"out_dir=.*cannot be written"):
        run(queue, lambda trial: finish(queue, trial))


HOLD = """
import sys, time
from pathlib import Path
from folio.base.files import locked
with locked(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_worker_gets_the_trial_of_a_killed_worker(new_worker):
    """SIGKILL releases the lock but leaves the lock file."""
    queue = new_worker()
    path = queue.folder(queue.trials[0]) / LOCK
    with subprocess.Popen([sys.executable, "-c", HOLD, path], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline().strip() == b"held"
        assert states_of(queue)[KEYS[0]] == "running"
        other.kill()
    assert path.exists() and states_of(queue)[KEYS[0]] == "waiting"
    run(queue, lambda trial: finish(queue, trial))
    assert set(states_of(queue).values()) == {"finished"}


# --- importances ------------------------------------------------------------------------------------------------------


def outcomes_of(space: list[Values], losses: list[list[float]]) -> list[Outcome]:
    """losses: by point and seed."""
    return [
        Outcome(point, seed, params, "finished", loss=loss)
        for point, params in enumerate(grid(space))
        for seed, loss in enumerate(losses[point])
    ]


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_shares_are_sums_of_squares_of_explicit_means(n_seeds, seed):
    space = [Values("a", (1, 2)), Values("b", (1, 2, 3)), Values("c", (1, 2, 3, 4)), Values("one", (7,))]
    losses = np.random.default_rng(seed).normal(size=(24, 3))
    means, points, expected = losses[:, :n_seeds].mean(axis=1), grid(space), {}
    for dimension in space:
        groups = [means[[point[dimension.name] == value for point in points]] for value in dimension.values]
        expected[dimension.name] = sum(len(g) * (g.mean() - means.mean()) ** 2 for g in groups) / (24 * means.var())
    shares = grid_importances(space, range(n_seeds), outcomes_of(space, losses.tolist())[::-1])
    error = rounding_error(24 * 3, torch.float64, values=1)  # of sums whose terms are at most the total
    assert shares == pytest.approx(expected, abs=error)
    assert [*shares.values()] == sorted(shares.values(), reverse=True) and shares["one"] < error


def test_importances_need_all_runs_two_settings_and_a_difference():
    space = [Values("n_layer", (1, 2)), Values("n_head", (1, 2))]
    outcomes = outcomes_of(space, [[1.0], [2.0], [3.0], [4.0]])
    assert grid_importances(space, [0], outcomes)
    assert grid_importances(space, [0, 1], outcomes) == {}
    assert grid_importances(space, [0], outcomes[:3]) == {}
    failed = Outcome(3, 0, {}, "failed", error="why")
    assert grid_importances(space, [0], [*outcomes[:3], failed]) == {}
    assert grid_importances(space[:1], [0], outcomes[:2]) == {}
    assert grid_importances(space, [0], outcomes_of(space, [[0.1]] * 4)) == {}
