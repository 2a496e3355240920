"""The trials of a search in their database, without training."""

import itertools
import sys
import time
from collections import Counter

import pytest

optuna = pytest.importorskip("optuna")

from folio import UserError
from folio.experiments.sweep.outcome import Outcome, Trial
from folio.experiments.sweep.space import Range, Values
from folio.experiments.sweep.study import Study, database_errors, open_storage, open_study
from tests.support.sweeps import run, run_with_two_workers

SPACE = [Values("n_layer", (1, 2, 3))]
POINTS = 3
SEEDS = [5, 6]


def new_worker(tmp_path, exclusive: bool = False, seed: int = 5, grace_period: int | None = None) -> Study:
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}", grace_period)
    return open_study(storage, "sweep", {"seed": seed}, SPACE, POINTS, SEEDS, prune_after=None, exclusive=exclusive)


def finish(trial: Trial) -> Outcome:
    return trial.outcome("finished", loss=float(trial.params["n_layer"]))


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_workers_run_each_trial_once(tmp_path, jobs, monkeypatch):
    """With two threads and SQLite, optuna gave both the same trial."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))  # while the other one trains
    started, (first, second) = run_with_two_workers(
        lambda: new_worker(tmp_path), lambda study, trial: finish(trial), jobs
    )
    assert started == {(point, seed): 1 for point in range(POINTS) for seed in SEEDS}
    assert first == second  # both wait for the last trial
    assert [(outcome.point, outcome.seed) for outcome in first] == sorted(started)
    assert {outcome.state for outcome in first} == {"finished"}


def test_an_interrupted_trial_is_requeued_and_a_failed_one_is_not(tmp_path):
    study, attempts = new_worker(tmp_path, exclusive=True), Counter()

    def train(trial: Trial) -> Outcome:
        attempts[trial.key] += 1
        if trial.key == (0, 5) and attempts[0, 5] == 1:
            return trial.outcome("waiting")
        if trial.key == (1, 5) and attempts[1, 5] == 1:
            return trial.outcome("failed", error="out of memory")
        return finish(trial)

    run(study, train)
    states = {(outcome.point, outcome.seed): outcome.state for outcome in study.outcomes()}
    assert states.pop((1, 5)) == "failed" and set(states.values()) == {"finished"} and len(states) == 4
    assert attempts[0, 5] == 2 and attempts.total() == 6
    study.retry_failed()
    run(study, train)
    assert attempts[1, 5] == 2 and attempts.total() == 8  # with the second seed, which a failed point lacks
    assert {outcome.state for outcome in study.outcomes()} == {"finished"} and len(study.outcomes()) == 6


def test_an_exclusive_worker_resumes_the_trials_of_a_killed_one(tmp_path):
    killed = new_worker(tmp_path, exclusive=True)
    running, ended = killed.study.ask(), killed.study.ask()  # the kill leaves the first trial running
    killed.suggest(running)
    killed.study.tell(ended, state=optuna.trial.TrialState.FAIL)  # and the second one before it was requeued
    study = new_worker(tmp_path, exclusive=True)
    run(study, finish)
    assert [outcome.state for outcome in study.outcomes()] == ["finished"] * 6


def test_a_worker_without_heartbeats_loses_its_trial_and_continues(tmp_path):
    """A ValueError of optuna, which could not record the lost trial, ended the sweep."""
    study, other = (new_worker(tmp_path, grace_period=100) for _ in range(2))
    taken: list[tuple[int, int]] = []

    def train(trial: Trial) -> Outcome:
        if not taken:
            taken.append(trial.key)
            other.exclusive = True  # as after the grace period
            other.resume_interrupted()
        return finish(trial)

    run(study, train)
    assert [outcome.state for outcome in study.outcomes()] == ["finished"] * 6


def test_importances_do_not_depend_on_the_order_and_need_some_trials():
    """An interrupted search reported other importances than an uninterrupted one."""
    space, seeds = [Values("n_layer", (1, 2)), Values("n_head", (1, 2))], range(10)
    points = itertools.product((1, 2), (1, 2), seeds)  # the best four have one layer, and two of them one head
    losses = {(layers, heads, seed): 10 * layers + 0.1 * heads + seed for layers, heads, seed in points}
    results = []
    for keys in (list(losses), list(losses)[::-1], list(losses)[:19]):
        study = Study(optuna.create_study(), space, 9, list(seeds), exclusive=True)
        for layers, heads, seed in keys:
            study.add([(2 * layers + heads, {"n_layer": layers, "n_head": heads})], [seed])
            trial = study.study.ask()
            study.suggest(trial)
            study.study.tell(trial, losses[layers, heads, seed])
        results.append(study.importances())
    assert results[0] == results[1] and results[0]["n_layer"] > 0.8 and not results[2]
    assert list(results[0]) == ["n_layer", "n_head"]


def test_different_settings_are_an_error(tmp_path):
    new_worker(tmp_path)
    with pytest.raises(UserError, match=r"^sweep was started with seed=5, not 6"):
        new_worker(tmp_path, seed=6)


def test_workers_that_start_together_search_different_values(tmp_path):
    """Their samplers had the same seed, so both searched the same values."""
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}", None)
    options = (storage, "sweep", {"seed": 5}, [Range("dropout", 0.0, 0.5)], 6, [5])
    # the first adds the trials
    _, *workers = [open_study(*options, prune_after=None, exclusive=False) for _ in range(3)]
    values = [worker.suggest(worker.study.ask())["dropout"] for _ in range(3) for worker in workers]
    assert len(set(values)) == 6


def test_a_missing_driver_is_an_error_with_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=r'^storage=postgresql.*pip install "psycopg'):
        open_storage("postgresql://me:secret@localhost:1/sweeps", None)
    with pytest.raises(UserError, match=r"^storage=mysql.*not installed \([^()]*\)$"):
        open_storage("mysql://me@localhost:1/sweeps", None)


def test_a_worker_survives_a_failed_heartbeat(tmp_path):
    """optuna's thread ended with a traceback, so the worker sent no more heartbeats."""
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}", 100)
    (tmp_path / "study.db").write_bytes(b"not a database" * 1000)
    storage.record_heartbeat(1)


def test_a_lost_database_is_a_user_error(tmp_path):
    """The user saw optuna's UnboundLocalError."""
    study = new_worker(tmp_path, exclusive=True)

    def train(trial: Trial) -> Outcome:
        (tmp_path / "study.db").write_bytes(b"not a database" * 1000)
        return finish(trial)

    with pytest.raises(UserError, match=r"the sweep's database.*repeat the command"), database_errors():
        run(study, train)
    with pytest.raises(ZeroDivisionError), database_errors():
        _ = 1 / 0
