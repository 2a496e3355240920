"""The runs of a search in a journal or database, without training."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState

from folio import UserError
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import Outcome, Trial
from folio.experiments.sweep.space import Values
from folio.experiments.sweep.study import Study, open_database, open_study, storage_errors
from folio.experiments.sweep.sweep_folder import checked_definition
from tests.support.sweeps import parse, run, run_with_two_workers, small_sweep


@pytest.fixture
def new_worker(data_dir, tmp_path) -> Callable[..., Study]:
    """Return a function that opens the same search in a folder: three points with two seeds, 5 and 6."""
    words = ["--seed=5", *(word for word in small_sweep(data_dir, tmp_path / "sweep") if "n_layer" not in word)]

    def worker(*more: str, space: str = "n_layer=1,2,3") -> Study:
        _, sweep = parse([space, "--trials=3", "--seeds=2", *words, *more])
        with checked_definition(sweep):
            study = open_study(sweep, url=None, prune=False)
        study.poll_seconds = 0.01
        return study

    return worker


def finish(trial: Trial) -> Outcome:
    return trial.outcome("finished", loss=float(trial.params["n_layer"]))


def states_of(study: Study) -> dict[tuple[int, int], str]:
    return {(outcome.point, outcome.seed): outcome.state for outcome in study.outcomes()}


ALL_FINISHED = dict.fromkeys(itertools.product(range(3), (5, 6)), "finished")


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_workers_in_a_folder_run_each_trial_once(new_worker, jobs):
    """Only one process could run a search without a database."""
    started, outcomes = run_with_two_workers(new_worker, lambda study, trial: finish(trial), jobs)
    assert started == dict.fromkeys(ALL_FINISHED, 1)
    assert outcomes[0] == outcomes[1]  # both wait for the last trial
    assert states_of(new_worker()) == ALL_FINISHED and [*ALL_FINISHED] == [(o.point, o.seed) for o in outcomes[0]]


def test_runs_that_two_workers_queue_at_the_same_time_are_trained_once(new_worker):
    first, second, started = new_worker(), new_worker(), Counter()
    first.queue_waiting()
    for outcome in first.outcomes():
        second.queue(outcome)

    def train(trial: Trial) -> Outcome:
        started[trial.key] += 1
        return finish(trial)

    run(second, train)
    assert started == dict.fromkeys(ALL_FINISHED, 1) and states_of(first) == ALL_FINISHED


def test_an_interrupted_trial_is_requeued_and_a_failed_one_is_not(new_worker):
    study, attempts = new_worker(), Counter()

    def train(trial: Trial) -> Outcome:
        attempts[trial.key] += 1
        if trial.key == (0, 5) and attempts[0, 5] == 1:
            return trial.outcome("waiting")
        if trial.key == (1, 5) and attempts[1, 5] == 1:
            return trial.outcome("failed", error="out of memory")
        return finish(trial)

    run(study, train)
    states = states_of(study)
    assert states.pop((1, 5)) == "failed" and set(states.values()) == {"finished"} and len(states) == 4
    assert attempts[0, 5] == 2 and attempts.total() == 6
    study.retry_failed()
    run(study, train)
    assert attempts[1, 5] == 2 and attempts.total() == 8  # with the second seed, which a failed point lacks
    assert states_of(study) == ALL_FINISHED


def test_a_worker_resumes_the_trials_of_a_killed_one(new_worker):
    killed = new_worker()
    killed.queue_waiting()
    running, ended = killed.study.ask(), killed.study.ask()  # the kill leaves the first trial running
    values = killed.suggest(running)
    killed.study.tell(ended, state=TrialState.FAIL)  # and the second one before it was requeued
    study = new_worker()
    assert states_of(study) == {(0, 5): "running", (1, 5): "waiting", (2, 5): "waiting"}
    run(study, finish)
    assert states_of(study) == ALL_FINISHED and study.outcomes()[0].params == values


def test_a_worker_trains_only_the_runs_of_its_command_and_leaves_the_others(new_worker):
    first, second, trained = new_worker("--trials=2"), new_worker("--trials=3"), []
    second.queue_waiting()

    def train(trial: Trial) -> Outcome:
        trained.append(trial.key)
        return finish(trial)

    run(first, train)
    assert sorted(trained) == [key for key in ALL_FINISHED if key[0] < 2]
    run(second, finish)
    assert states_of(second) == ALL_FINISHED


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_worker_whose_trial_is_taken_over_continues(tmp_path):
    """A ValueError of optuna, which could not record the lost trial, ended the sweep."""
    sweep = Sweep(None, [], [Values("n_layer", (1, 2, 3))], tmp_path, [5, 6], 3, None)
    study = Study(optuna.create_study(), sweep)
    taken: list[tuple[int, int]] = []

    def train(trial: Trial) -> Outcome:
        if not taken:
            taken.append(trial.key)
            study.study.tell(0, state=TrialState.FAIL)  # as another worker does if there are no heartbeats
        return finish(trial)

    run(study, train)
    assert states_of(study) == ALL_FINISHED and study.last_attempts()[0, 5].number > 0


def test_a_worker_in_a_folder_may_lose_a_trial_before_it_has_its_lock(new_worker, monkeypatch):
    study, other, trained = new_worker(), new_worker(), []
    take = study.take

    def take_late(trial: optuna.Trial, stack) -> bool:
        if trial.number == 0:
            other.fail_dead()
        return take(trial, stack)

    def train(trial: Trial) -> Outcome:
        trained.append(trial.key)
        return finish(trial)

    monkeypatch.setattr(study, "take", take_late)
    run(study, train)
    assert sorted(trained) == [*ALL_FINISHED] and states_of(study) == ALL_FINISHED


def test_importances_do_not_depend_on_the_order_and_need_some_trials():
    """An interrupted search reported other importances than an uninterrupted one."""
    space, seeds = [Values("n_layer", (1, 2)), Values("n_head", (1, 2))], range(10)
    points = itertools.product((1, 2), (1, 2), seeds)  # the best four have one layer, and two of them one head
    losses = {(layers, heads, seed): 10 * layers + 0.1 * heads + seed for layers, heads, seed in points}
    results = []
    for keys in (list(losses), list(losses)[::-1], list(losses)[:19]):
        study = Study(optuna.create_study(), Sweep(None, [], space, Path("sweep"), list(seeds), 9, None))
        for layers, heads, seed in keys:
            study.queue(Outcome(2 * layers + heads, seed, {"n_layer": layers, "n_head": heads}, "waiting"))
            trial = study.study.ask()
            study.suggest(trial)
            study.study.tell(trial, losses[layers, heads, seed])
        results.append(study.importances())
    assert results[0] == results[1] and not results[2]
    assert list(results[0]) == ["n_layer", "n_head"]


def test_different_settings_are_an_error(new_worker):
    new_worker()
    with pytest.raises(UserError, match=r"^sweep was started with n_embd=16, not 32"):
        new_worker("--n_embd=32")


def test_the_folder_of_a_search_may_be_renamed(new_worker, tmp_path):
    """The search started again, because the study had the name of the folder."""
    run(new_worker(), finish)
    (tmp_path / "sweep").rename(tmp_path / "renamed")
    assert states_of(new_worker(f"--out_dir={tmp_path / 'renamed'}")) == ALL_FINISHED


def test_workers_and_jobs_search_different_values_that_depend_only_on_the_point(new_worker):
    """Samplers with the same seed searched the same values. The jobs of a process used each other's samplers."""
    words = dict(space="dropout=0..0.5")
    values = []
    for jobs in (1, 8):
        study = new_worker("--trials=10", "--seeds=1", f"--out_dir={new_worker().sweep.out_dir}-{jobs}", **words)
        run(study, lambda trial: trial.outcome("finished", loss=trial.params["dropout"]), jobs)
        values.append([outcome.params["dropout"] for outcome in study.outcomes()])
    assert values[0] == values[1] and len(set(values[0])) == 10


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@localhost:1/sweeps", r'pip install "psycopg'),
        ("mysql://me@localhost:1/sweeps", r"not installed \([^()]*\)$"),
        ("sqlite:///study.db", r"SQLite.*leave out --storage"),
    ],
)
def test_a_database_without_a_driver_or_without_row_locks_is_an_error(url, message, monkeypatch):
    """With SQLite, optuna gave two threads the same trial."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=rf"^storage={url.partition(':')[0]}.*{message}"):
        open_database(url)


def test_a_damaged_or_lost_storage_is_an_error(new_worker):
    """The user saw optuna's UnboundLocalError."""
    study = new_worker()
    path = study.sweep.out_dir / "study.journal"

    def train(trial: Trial) -> Outcome:
        path.write_bytes(path.read_bytes() + b"no journal\n" * 2)
        return finish(trial)

    with pytest.raises(UserError, match=r"the study of the search.*repeat the command"), storage_errors():
        run(study, train)
    with pytest.raises(UserError, match=r"study\.journal is damaged.*remove the line; otherwise choose another"):
        new_worker()
    with pytest.raises(UserError, match=r"the study of the search failed: .*no such table"), storage_errors():
        storage = optuna.storages.RDBStorage("sqlite://", skip_table_creation=True, skip_compatibility_check=True)
        optuna.create_study(storage=storage)
    with pytest.raises(ZeroDivisionError), storage_errors():
        _ = 1 / 0
