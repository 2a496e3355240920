"""The trials of a search, in a database that several machines can share; by optuna.

A trial of optuna's is one attempt to train one of ours. One that is interrupted waits again as another trial of
optuna's with the same values.
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
from folio.experiments.sweep.sweep_folder import refuse_another_record

WARMUP_TRIALS = 5  # finished ones, before which none is pruned
MIN_FINISHED = 20  # finished ones, of which the best tenth are the two that PED-ANOVA takes at least
CREATION_SECONDS = 30.0  # for another worker to complete a new database, or a new study
STATES: dict[TrialState, State] = {
    TrialState.FAIL: "failed",
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.PRUNED: "pruned",
    TrialState.COMPLETE: "finished",
}
OUTCOMES = tuple(STATES.values())  # a later one replaces an earlier one


class Study:
    """The trials of a search: all points with the first seed, and those that are not pruned with the other seeds."""

    def __init__(self, study: optuna.Study, space: list[Dimension], points: int, seeds: list[int], alone: bool):
        """points: how many are tried. alone: no other process uses the database."""
        self.study, self.space, self.points, self.seeds, self.alone = study, space, points, seeds, alone

    # --- which trials there are ---

    def add_trials(self) -> None:
        """Add the trials that are not there yet. The values of a point are chosen when its first one starts."""
        self.add([(point, {}) for point in range(self.points)], self.seeds[:1])
        self.add([(o.point, o.params) for o in self.outcomes() if o.state == "finished"], self.seeds)

    def add(self, points: list[tuple[int, dict[str, Any]]], seeds: list[int]) -> None:
        """Add each point with each seed, unless it is there."""
        known = {key_of(trial) for trial in self.trials()}
        for seed in seeds:
            for point, params in points:
                if (point, seed) not in known:
                    self.study.enqueue_trial(params, user_attrs={"point": point, "seed": seed})

    def trials(self) -> list[FrozenTrial]:
        """All of the sweep; without those that a worker began when another one had just taken the last trial."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if "point" in trial.user_attrs]

    def count(self, *states: TrialState) -> int:
        return sum(trial.state in states for trial in self.trials())

    def outcomes(self) -> list[Outcome]:
        """What is known of each trial, in the order of points and seeds. An earlier command may have added others."""
        found: dict[tuple[int, int], Outcome] = {}
        for trial in self.trials():
            key, outcome = key_of(trial), outcome_of(trial)
            if outcome and (key not in found or OUTCOMES.index(outcome.state) >= OUTCOMES.index(found[key].state)):
                found[key] = outcome
        keys = [(point, seed) for point in range(self.points) for seed in self.seeds]
        return [found[key] for key in keys if key in found]

    # --- running them ---

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each trial that waits, `jobs` at a time, until none waits or runs anywhere."""
        interrupted, lost = set[int](), set[int]()  # numbers of trials

        def objective(trial: optuna.Trial) -> float:
            if self.is_superfluous(trial):
                raise TrialFailed
            try:
                trial.set_user_attr("host", socket.gethostname())
                trial.set_user_attr("error", None)  # of an earlier attempt
                outcome = train(SearchTrial(*key_of(trial), self.suggest(trial), trial))
                for name in ("loss", "step", "tokens", "seconds", "evaluations", "error"):
                    trial.set_user_attr(name, getattr(outcome, name))
            except optuna.exceptions.UpdateFinishedTrialError:  # another worker took it over, for lack of heartbeats
                lost.add(trial.number)
                raise TrialFailed from None
            except BaseException:
                stopping.set()  # for the other trials, which could not be recorded
                raise
            if outcome.state == "pruned":
                raise optuna.TrialPruned
            if outcome.state == "waiting":
                interrupted.add(trial.number)
            if outcome.state != "finished":
                raise TrialFailed
            self.add([(outcome.point, outcome.params)], self.seeds)
            return outcome.loss

        def after(study: optuna.Study, trial: FrozenTrial) -> None:
            if trial.number in interrupted:
                requeue(study, trial)
            after_trial()
            if stopping.is_set() or not self.count(TrialState.WAITING):
                study.stop()

        while not stopping.is_set():
            optuna.storages.fail_stale_trials(self.study)  # those of workers that died; they wait again
            if self.count(TrialState.WAITING):
                try:
                    self.study.optimize(objective, n_jobs=jobs, callbacks=[after], catch=TrialFailed)
                except ValueError:  # optuna cannot record the outcome of a trial that was lost
                    if not lost:
                        raise
                    lost.clear()
            elif self.count(TrialState.RUNNING):
                time.sleep(1.0)
                after_trial()  # of another worker
            else:
                return

    def is_superfluous(self, trial: optuna.Trial) -> bool:
        """Whether a trial was begun when another worker had just taken the last one, is another worker's, too, or was
        added by an earlier command with more points or seeds.
        """
        if "point" not in trial.user_attrs or not self.is_wanted(trial):
            return True
        earlier = (other for other in self.trials() if other.number < trial.number and key_of(other) == key_of(trial))
        return any(other.state != TrialState.FAIL for other in earlier)

    def is_wanted(self, trial: FrozenTrial | optuna.Trial) -> bool:
        """Whether it is one of these points and seeds. If other workers share the study, they may want all."""
        point, seed = key_of(trial)
        return not self.alone or (point < self.points and seed in self.seeds)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """The values of a trial.

        Those that optuna chooses follow from the first seed, the point, and the results so far: a sampler that lasts
        would draw the same values for two workers that start together.
        """
        self.study.sampler = optuna.samplers.TPESampler(seed=self.seeds[0] + trial.user_attrs["point"])
        return {dimension.name: dimension.suggest(trial) for dimension in self.space}

    def resume_interrupted(self) -> None:
        """Requeue the trials that have no result and that no process runs. The missing
        heartbeats of workers that die later are noticed in run().
        """
        for trial in self.trials():
            if self.alone and trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
        self.requeue_last(lambda trial: outcome_of(trial) is None)

    def retry_failed(self) -> None:
        """Requeue the trials that failed."""
        self.requeue_last(lambda trial: trial.state == TrialState.FAIL)

    def requeue_last(self, condition: Callable[[FrozenTrial], bool]) -> None:
        """Requeue the trials whose last attempt fulfills a condition."""
        for trial in {key_of(trial): trial for trial in self.trials()}.values():
            if self.is_wanted(trial) and condition(trial):
                requeue(self.study, trial)

    # --- what the trials say ---

    def importances(self) -> dict[str, float]:
        """The importance of each setting for a loss among the best tenth, by PED-ANOVA (Watanabe et al. 2023).

        Empty if there is only one setting, all losses are equal, or too few trials have finished to say.
        """
        finished = sorted((trial for trial in self.trials() if trial.state == TrialState.COMPLETE), key=key_of)
        if len(self.space) < 2 or len(finished) < MIN_FINISHED or len({trial.value for trial in finished}) < 2:
            return {}
        in_order = optuna.create_study()  # in memory; ours is in the order of finishing, on which ties depend
        in_order.add_trials(finished)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(in_order, evaluator=evaluator)
        return {name: float(share) for name, share in shares.items()}


@dataclass(frozen=True)
class SearchTrial(Trial):
    """A trial of a search, which optuna may find hopeless."""

    trial: optuna.Trial  # as optuna knows it

    def report(self, loss: float, number: int) -> bool:
        self.trial.report(loss, number)
        return self.trial.should_prune()


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Add an interrupted or failed trial again, with the same values and the same folder."""
    optuna.storages.RetryHeartbeatStaleTrialCallback()(study, trial)


def key_of(trial: FrozenTrial | optuna.Trial) -> tuple[int, int]:
    """The point and the seed."""
    return trial.user_attrs["point"], trial.user_attrs["seed"]


def outcome_of(trial: FrozenTrial) -> Outcome | None:
    """What is known of a trial; None for one that was interrupted, which waits again as another trial of optuna's."""
    attributes = trial.user_attrs
    if trial.state == TrialState.FAIL and not attributes.get("error"):
        return None
    evaluations = tuple((tokens, loss) for tokens, loss in attributes.get("evaluations", ()))
    known = {name: attributes.get(name) for name in ("loss", "step", "tokens", "seconds", "error", "host")}
    return Outcome(*key_of(trial), trial.params, STATES[trial.state], evaluations=evaluations, **known)


# --- the database -----------------------------------------------------------------------------------------------------


class Storage(optuna.storages.RDBStorage):
    """The database, in which two threads cannot both take the trial that is next.

    optuna reads a trial's state and then writes it, with a lock on the row that SQLite does not have.
    """

    lock = threading.Lock()

    def set_trial_state_values(self, *args: Any, **kwargs: Any) -> bool:
        with self.lock:
            return super().set_trial_state_values(*args, **kwargs)

    def record_heartbeat(self, trial_id: int) -> None:
        """Tell the other workers that this one lives, or try again later, as while the database is started again."""
        with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError):
            super().record_heartbeat(trial_id)


def sqlite_url(path: Path) -> str:
    """The URL of a database in a file, also if its path contains a "?"."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def open_storage(url: str, grace_period: int | None) -> Storage:
    """The database. grace_period: seconds without a heartbeat after which a worker is considered dead; None: there is
    only one worker.

    Raises UserError if it cannot be reached.
    """
    try:
        location = sqlalchemy.make_url(url)
    except ArgumentError:
        raise UserError(f"storage={url}: it is not a database's URL; write postgresql://USER@HOST/DATABASE") from None
    # of heartbeats, which "can change in the future"
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # the sweep reports a trial that fails, in one line
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
    shown = location.render_as_string()
    deadline = time.monotonic() + CREATION_SECONDS
    while True:
        try:
            return Storage(location.render_as_string(hide_password=False), engine, **heartbeat)
        except ImportError as error:
            remedy = ': pip install "psycopg[binary]"' if location.drivername.endswith("+psycopg") else ""
            raise UserError(f"storage={shown}: its driver is not installed ({first_line(error)}){remedy}") from None
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            reason = first_line(getattr(error, "orig", None) or error)
            in_use = isinstance(error, (IntegrityError, ProgrammingError)) or "exists" in reason
        if not in_use or time.monotonic() > deadline:  # otherwise, another worker creates the tables at the same time
            if location.drivername.startswith("sqlite"):
                raise UserError(f"storage={shown}: {reason}; remove this file, or choose another --out_dir")
            raise UserError(f"storage={shown}: the database cannot be reached: {reason}; is it running?")
        time.sleep(0.2)


@contextmanager
def reporting_a_lost_database() -> Iterator[None]:
    """Turn an error of the database in the block into one line. Raises UserError."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error  # optuna raises others while it handles it, even an UnboundLocalError
        while cause and not isinstance(cause, SQLAlchemyError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, UserError):
            raise
        reason = first_line(getattr(cause, "orig", None) or cause)
        raise UserError(
            f"the sweep's database failed: {reason}; its runs are saved, and the same command continues"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def open_study(
    storage: Storage,
    name: str,
    record: dict[str, Any],
    space: list[Dimension],
    points: int,
    seeds: list[int],
    prune_after: int | None,
    alone: bool,
) -> Study:
    """The study of this name, or a new one, with its trials.

    record: what defines it; another worker's must be the same. points: how many are tried. prune_after: evaluations of
    a trial before it can be pruned; None: no trial is. alone: no other process uses the database. Raises UserError if
    the study was made with another record.
    """
    pruner = optuna.pruners.NopPruner()
    if prune_after is not None:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=WARMUP_TRIALS, n_warmup_steps=prune_after)
    options = {"study_name": name, "storage": storage, "pruner": pruner}
    try:
        study, is_new = optuna.create_study(**options), True
    except optuna.exceptions.DuplicatedStudyError:
        study, is_new = optuna.load_study(**options), False
    opened = Study(study, space, points, seeds, alone)
    if is_new or (alone and "record" not in study.user_attrs):
        opened.add_trials()
        study.set_user_attr("record", record)  # other workers wait for it, so that each trial is added once
    refuse_another_record(name, wait_for_record(study), record)
    opened.add_trials()
    opened.resume_interrupted()
    return opened


def wait_for_record(study: optuna.Study) -> dict[str, Any]:
    """What defines a study that another worker may have created just now. Raises UserError."""
    deadline = time.monotonic() + CREATION_SECONDS
    while "record" not in (attributes := study.user_attrs):
        if time.monotonic() > deadline:
            raise UserError(f"the study {study.study_name} is incomplete; choose another --out_dir")
        time.sleep(0.2)
    return attributes["record"]
