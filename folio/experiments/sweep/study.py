"""The trials of a search, which optuna stores in a database that several machines can share.

An optuna trial is one attempt to train one of our trials. An interrupted trial is requeued as a new optuna trial with
the same values.
"""

import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, IntegrityError, ProgrammingError, SQLAlchemyError

from folio import UserError
from folio.experiments.sweep.outcome import Outcome, State, Trial, TrialFailed
from folio.experiments.sweep.space import Dimension
from folio.experiments.sweep.sweep_folder import check_definition

WARMUP_TRIALS = 5  # finished trials before any trial is pruned
MIN_FINISHED = 20  # finished trials for importances: PED-ANOVA needs at least 2 in the best tenth
CREATION_SECONDS = 30.0  # timeout for another worker to complete a new database or study
STATES: dict[TrialState, State] = {
    TrialState.FAIL: "failed",
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.PRUNED: "pruned",
    TrialState.COMPLETE: "finished",
}
STATE_ORDER = tuple(STATES.values())  # of several attempts, the last state counts


class Study:
    """The trials of a search: all points with the first seed, and unpruned points with the other seeds."""

    def __init__(self, study: optuna.Study, space: list[Dimension], points: int, seeds: list[int], exclusive: bool):
        """points: number of points. exclusive: no other process uses the database."""
        self.study, self.space, self.points, self.seeds, self.exclusive = study, space, points, seeds, exclusive

    # --- list of trials ---

    def add_trials(self) -> None:
        """Add missing trials. The values of a point are chosen when its first trial starts."""
        self.add([(point, {}) for point in range(self.points)], self.seeds[:1])
        self.add([(o.point, o.params) for o in self.outcomes() if o.state == "finished"], self.seeds)

    def add(self, points: list[tuple[int, dict[str, Any]]], seeds: list[int]) -> None:
        """Add each point with each seed, unless it exists."""
        existing = {key_of(trial) for trial in self.trials()}
        for seed in seeds:
            for point, params in points:
                if (point, seed) not in existing:
                    self.study.enqueue_trial(params, user_attrs={"point": point, "seed": seed})

    def trials(self) -> list[FrozenTrial]:
        """Return the sweep's trials, without those that optuna created because another worker took the last one."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if "point" in trial.user_attrs]

    def count(self, *states: TrialState) -> int:
        return sum(trial.state in states for trial in self.trials())

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each requested trial, sorted by point and seed."""
        outcomes: dict[tuple[int, int], Outcome] = {}
        for trial in self.trials():
            key, outcome = key_of(trial), outcome_of(trial)
            if not outcome:
                continue
            if key not in outcomes or STATE_ORDER.index(outcome.state) >= STATE_ORDER.index(outcomes[key].state):
                outcomes[key] = outcome
        keys = [(point, seed) for point in range(self.points) for seed in self.seeds]
        return [outcomes[key] for key in keys if key in outcomes]

    # --- running ---

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each waiting trial, `jobs` at once, until no trial waits, or runs in any process."""
        interrupted, lost = set[int](), set[int]()  # numbers of trials

        def objective(trial: optuna.Trial) -> float:
            if self.is_redundant(trial):
                raise TrialFailed
            try:
                trial.set_user_attr("host", socket.gethostname())
                trial.set_user_attr("error", None)  # of an earlier attempt
                outcome = train(SearchTrial(*key_of(trial), self.suggest(trial), trial))
                for name in ("loss", "text", "step", "tokens", "seconds", "evaluations", "error"):
                    trial.set_user_attr(name, getattr(outcome, name))
            except optuna.exceptions.UpdateFinishedTrialError:  # missing heartbeats: another worker took it over
                lost.add(trial.number)
                raise TrialFailed from None
            except BaseException:
                stopping.set()  # the other trials could not be recorded either
                raise
            if outcome.state == "pruned":
                raise optuna.TrialPruned
            if outcome.state == "waiting":
                interrupted.add(trial.number)
            if outcome.state != "finished":
                raise TrialFailed
            self.add([(outcome.point, outcome.params)], self.seeds)
            return outcome.loss

        def callback(study: optuna.Study, trial: FrozenTrial) -> None:
            if trial.number in interrupted:
                requeue(study, trial)
            after_trial()
            if stopping.is_set() or not self.count(TrialState.WAITING):
                study.stop()

        while not stopping.is_set():
            optuna.storages.fail_stale_trials(self.study)  # requeues the trials of dead workers
            if self.count(TrialState.WAITING):
                try:
                    self.study.optimize(objective, n_jobs=jobs, callbacks=[callback], catch=TrialFailed)
                except ValueError:  # optuna cannot record the outcome of a lost trial
                    if not lost:
                        raise
                    lost.clear()
            elif self.count(TrialState.RUNNING):
                time.sleep(1.0)
                after_trial()  # another worker's
            else:
                return

    def is_redundant(self, trial: optuna.Trial) -> bool:
        """Return whether optuna created a trial because another worker took the last one, another worker has it, or an
        earlier command with more points or seeds added it.
        """
        if "point" not in trial.user_attrs or not self.is_requested(trial):
            return True
        attempts = (other for other in self.trials() if other.number < trial.number and key_of(other) == key_of(trial))
        return any(attempt.state != TrialState.FAIL for attempt in attempts)

    def is_requested(self, trial: FrozenTrial | optuna.Trial) -> bool:
        """Return whether the command requests a trial's point and seed. Other workers of the study may request all."""
        point, seed = key_of(trial)
        return not self.exclusive or (point < self.points and seed in self.seeds)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Let optuna choose the values of a trial.

        They depend on the first seed, the point, and the results so far. With one sampler for all trials, two workers
        that start together would sample the same values.
        """
        self.study.sampler = optuna.samplers.TPESampler(seed=self.seeds[0] + trial.user_attrs["point"])
        return {dimension.name: dimension.suggest(trial) for dimension in self.space}

    def resume_interrupted(self) -> None:
        """Requeue the trials without a result that no process runs. run() detects workers that die later."""
        for trial in self.trials():
            if self.exclusive and trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
        self.requeue_last(lambda trial: outcome_of(trial) is None)

    def retry_failed(self) -> None:
        """Requeue the failed trials."""
        self.requeue_last(lambda trial: trial.state == TrialState.FAIL)

    def requeue_last(self, condition: Callable[[FrozenTrial], bool]) -> None:
        """Requeue the trials whose last attempt satisfies a condition."""
        for trial in {key_of(trial): trial for trial in self.trials()}.values():
            if self.is_requested(trial) and condition(trial):
                requeue(self.study, trial)

    # --- results ---

    def importances(self) -> dict[str, float]:
        """Return each setting's importance for a loss among the best tenth, by PED-ANOVA (Watanabe et al. 2023).

        Empty if there is only one setting, all losses are equal, or too few trials have finished.
        """
        finished = sorted((trial for trial in self.trials() if trial.state == TrialState.COMPLETE), key=key_of)
        if len(self.space) < 2 or len(finished) < MIN_FINISHED or len({trial.value for trial in finished}) < 2:
            return {}
        sorted_study = optuna.create_study()  # in memory; self.study's order, by completion, would affect ties
        sorted_study.add_trials(finished)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(sorted_study, evaluator=evaluator)
        return {name: float(share) for name, share in shares.items()}


@dataclass(frozen=True)
class SearchTrial(Trial):
    """A trial of a search, which optuna may prune."""

    trial: optuna.Trial

    def report(self, loss: float, number: int) -> bool:
        self.trial.report(loss, number)
        return self.trial.should_prune()


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Add an interrupted or failed trial again, with the same values and folder."""
    optuna.storages.RetryHeartbeatStaleTrialCallback()(study, trial)


def key_of(trial: FrozenTrial | optuna.Trial) -> tuple[int, int]:
    """Return the point and the seed."""
    return trial.user_attrs["point"], trial.user_attrs["seed"]


def outcome_of(trial: FrozenTrial) -> Outcome | None:
    """Return the outcome of an optuna trial; None if it was interrupted, so that another one replaces it."""
    attributes = trial.user_attrs
    if trial.state == TrialState.FAIL and not attributes.get("error"):
        return None
    evaluations = tuple((tokens, loss) for tokens, loss in attributes.get("evaluations", ()))
    fields = {name: attributes.get(name) for name in ("loss", "text", "step", "tokens", "seconds", "error", "host")}
    return Outcome(*key_of(trial), trial.params, STATES[trial.state], evaluations=evaluations, **fields)


# --- database ---------------------------------------------------------------------------------------------------------


class Storage(optuna.storages.RDBStorage):
    """A database from which two threads cannot take the same trial.

    optuna reads and then writes a trial's state under a row lock, which SQLite does not have.
    """

    lock = threading.Lock()

    def set_trial_state_values(self, *args: Any, **kwargs: Any) -> bool:
        with self.lock:
            return super().set_trial_state_values(*args, **kwargs)

    def record_heartbeat(self, trial_id: int) -> None:
        """Send a heartbeat to the other workers. Errors are ignored, for example while the database restarts."""
        with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError):
            super().record_heartbeat(trial_id)


def sqlite_url(path: Path) -> str:
    """Return the URL of a database file, whose path may contain "?"."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def open_storage(url: str, grace_period: int | None) -> Storage:
    """Open the database. Raises UserError if it cannot be reached.

    grace_period: seconds without a heartbeat after which a worker is considered dead; None: there is only one worker.
    """
    try:
        location = sqlalchemy.make_url(url)
    except ArgumentError:
        raise UserError(f"storage={url}: it is not a database URL; write postgresql://USER@HOST/DATABASE") from None
    # heartbeats are experimental
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # the sweep reports failed trials itself
    heartbeat = {}
    if grace_period:
        heartbeat = {
            "heartbeat_interval": max(1, grace_period // 4),
            "grace_period": grace_period,
            "heartbeat_stale_trial_callback": requeue,
        }
    engine = {"pool_pre_ping": True}
    if location.drivername == "postgresql":
        location = location.set(drivername="postgresql+psycopg")
        engine["connect_args"] = {"connect_timeout": 10}
    url_text = location.render_as_string()  # without the password
    deadline = time.monotonic() + CREATION_SECONDS
    while True:
        try:
            return Storage(location.render_as_string(hide_password=False), engine, **heartbeat)
        except ImportError as error:
            remedy = ': pip install "psycopg[binary]"' if location.drivername.endswith("+psycopg") else ""
            raise UserError(f"storage={url_text}: its driver is not installed ({first_line(error)}){remedy}") from None
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            reason = first_line(getattr(error, "orig", None) or error)
            in_creation = isinstance(error, (IntegrityError, ProgrammingError)) or "exists" in reason  # by a worker
        if not in_creation or time.monotonic() > deadline:
            if location.drivername.startswith("sqlite"):
                raise UserError(f"storage={url_text}: {reason}; remove this file, or choose another --out_dir")
            raise UserError(f"storage={url_text}: the database cannot be reached: {reason}; is it running?")
        time.sleep(0.2)


@contextmanager
def database_errors() -> Iterator[None]:
    """Convert database errors in the block to UserError."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error  # optuna wraps it in others, even in an UnboundLocalError
        while cause and not isinstance(cause, SQLAlchemyError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, UserError):
            raise
        reason = first_line(getattr(cause, "orig", None) or cause)
        raise UserError(f"the sweep's database failed: {reason}; repeat the command to resume the runs") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def open_study(
    storage: Storage,
    name: str,
    definition: dict[str, Any],
    space: list[Dimension],
    points: int,
    seeds: list[int],
    prune_after: int | None,
    exclusive: bool,
) -> Study:
    """Open or create the study of this name, and add its trials. Raises UserError if it has another definition.

    definition: Sweep.definition. points: number of points. prune_after: evaluations before a trial can be pruned;
    None: no pruning. exclusive: no other process uses the database.
    """
    pruner = optuna.pruners.NopPruner()
    if prune_after is not None:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=WARMUP_TRIALS, n_warmup_steps=prune_after)
    options = {"study_name": name, "storage": storage, "pruner": pruner}
    try:
        study, is_new = optuna.create_study(**options), True
    except optuna.exceptions.DuplicatedStudyError:
        study, is_new = optuna.load_study(**options), False
    trials = Study(study, space, points, seeds, exclusive)
    if is_new or (exclusive and "definition" not in study.user_attrs):
        trials.add_trials()
        study.set_user_attr("definition", definition)  # others wait for it, so that each trial is added once
    check_definition(name, wait_for_definition(study), definition)
    trials.add_trials()
    trials.resume_interrupted()
    return trials


def wait_for_definition(study: optuna.Study) -> dict[str, Any]:
    """Return the definition of a study, which another worker may be creating. Raises UserError after a timeout."""
    deadline = time.monotonic() + CREATION_SECONDS
    while "definition" not in (attributes := study.user_attrs):
        if time.monotonic() > deadline:
            raise UserError(f"the study {study.study_name} is incomplete; choose another --out_dir")
        time.sleep(0.2)
    return attributes["definition"]
