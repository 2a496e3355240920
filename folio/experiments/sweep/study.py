"""The runs of a search, which optuna queues in a journal in the sweep's folder, or in a database.

An optuna trial is one attempt at a run. If it is interrupted, or its worker dies, the run is queued again as a new
optuna trial with the same values, and train.py resumes it from its checkpoint.
"""

import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from json import JSONDecodeError
from pathlib import Path

import optuna
import sqlalchemy
from optuna.exceptions import OptunaError, UpdateFinishedTrialError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from folio import UserError
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import Outcome, State, Trial, TrialFailed, TrialSource
from folio.experiments.sweep.sweep_folder import check_definition
from folio.experiments.sweep.trial_folder import TrialLocks

WARMUP_TRIALS = 5  # finished trials before any trial is pruned
MIN_FINISHED = 20  # finished trials for importances: PED-ANOVA needs at least 2 in the best tenth
HEARTBEAT_SECONDS = 60  # a worker without a heartbeat for twice this time is considered dead (optuna's default)
STATES: dict[TrialState, State] = {
    TrialState.FAIL: "failed",
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.PRUNED: "pruned",
    TrialState.COMPLETE: "finished",
}
ATTEMPT_ORDER = tuple(STATES)  # of several attempts at a run, the last in this order counts


class Study(TrialSource):
    """The runs of a search in a database: all points with the first seed, and finished ones with the other seeds.

    While a run trains, optuna sends heartbeats to the database. The run of a worker without heartbeats is queued again.
    """

    def __init__(self, study: optuna.Study, sweep: Sweep):
        self.study, self.sweep = study, sweep
        self.keys = [(point, seed) for point in range(sweep.points) for seed in sweep.seeds]
        self.lock = threading.Lock()  # protects the queue from duplicates, and the sampler

    # --- state ---

    def attempts(self) -> list[FrozenTrial]:
        """Return all attempts at the requested runs. Other workers may have requested more."""
        return [attempt for attempt in self.study.get_trials(deepcopy=False) if key_of(attempt) in self.keys]

    def last_attempts(self) -> dict[tuple[int, int], FrozenTrial]:
        """Return the attempt that counts at each run: a queued, running or successful one, or the last failed one."""
        ordered = sorted(self.attempts(), key=lambda attempt: ATTEMPT_ORDER.index(attempt.state))
        return {key_of(attempt): attempt for attempt in ordered}

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each run, sorted by point and seed; of unfinished points only with the first seed."""
        outcomes, attempts = [], self.last_attempts()
        for point, seed in self.keys:
            first = attempts.get((point, self.sweep.seeds[0]))
            if attempt := attempts.get((point, seed)):
                outcomes.append(outcome_of(attempt))
            elif seed == self.sweep.seeds[0] or (first and first.state == TrialState.COMPLETE):
                outcomes.append(Outcome(point, seed, first.params if first else {}, "waiting"))
        return outcomes

    # --- running ---

    def max_runs(self) -> int:
        return len(self.keys)

    def runs_left(self, outcomes: Sequence[Outcome]) -> int:
        """A run with the first seed is followed by those with the other seeds, unless it is pruned."""
        left = [outcome for outcome in outcomes if outcome.state in ("waiting", "running")]
        return sum(len(self.sweep.seeds) if outcome.seed == self.sweep.seeds[0] else 1 for outcome in left)

    def run_next(self, train: Callable[[Trial], Outcome]) -> bool:
        """Call `train` with the next waiting trial. Returns False if other threads or processes have taken them all."""
        with self.lock:
            self.fail_dead()
            if not self.queue_waiting():
                return False
        skipped = []  # numbers of optuna trials

        def objective(trial: optuna.Trial) -> float:
            if not self.is_redundant(trial):
                with suppress(UpdateFinishedTrialError):  # another worker considers this one dead, and has ended it
                    if self.take(trial, stack):
                        return self.attempt(trial, train)
            skipped.append(trial.number)
            raise TrialFailed

        with ExitStack() as stack:  # closed after optuna has recorded the outcome
            try:
                self.study.optimize(objective, n_trials=1, catch=(TrialFailed,))
            except (ValueError, UpdateFinishedTrialError):  # optuna cannot record the outcome of an ended attempt
                if not skipped:
                    raise
        return True

    def fail_dead(self) -> None:
        """End the attempts of dead workers."""
        optuna.storages.fail_stale_trials(self.study)

    def take(self, trial: optuna.Trial, stack: ExitStack) -> bool:
        """Mark an attempt as running until the stack closes. Returns False if another worker has ended it."""
        return True  # optuna sends the heartbeats

    def queue_waiting(self) -> bool:
        """Add the waiting runs to optuna's queue, unless they are in it. Returns whether there are any."""
        queued = {key for key, attempt in self.last_attempts().items() if attempt.state == TrialState.WAITING}
        waiting = [outcome for outcome in self.outcomes() if outcome.state == "waiting"]
        for outcome in sorted(waiting, key=lambda outcome: outcome.seed):
            if (outcome.point, outcome.seed) not in queued:
                self.queue(outcome)
        return bool(waiting)

    def queue(self, outcome: Outcome) -> None:
        """Add a run to optuna's queue. The values of a new point are chosen when the run starts."""
        self.study.enqueue_trial(outcome.params, user_attrs={"point": outcome.point, "seed": outcome.seed})

    def retry_failed(self) -> None:
        """Requeue the failed trials."""
        for outcome in self.outcomes():
            if outcome.state == "failed":
                self.queue(outcome)

    def is_redundant(self, trial: optuna.Trial) -> bool:
        """Return whether an attempt is not needed.

        optuna created it because another worker took the last one, only another worker's command requests it, or two
        workers queued the run at the same time.
        """
        earlier = (attempt for attempt in self.attempts() if attempt.number < trial.number)
        return key_of(trial) not in self.keys or any(
            key_of(attempt) == key_of(trial) and attempt.state != TrialState.FAIL for attempt in earlier
        )

    def attempt(self, trial: optuna.Trial, train: Callable[[Trial], Outcome]) -> float:
        """Train, record the results, and return the loss. Raises an exception for another outcome."""
        trial.set_user_attr("host", socket.gethostname())
        outcome = train(SearchTrial(*key_of(trial), self.suggest(trial), trial))
        trial.set_user_attr("outcome", asdict(outcome))
        if outcome.state == "pruned":
            raise optuna.TrialPruned
        if outcome.state != "finished":
            raise TrialFailed
        return outcome.loss

    def suggest(self, trial: optuna.Trial) -> dict[str, object]:
        """Let optuna choose the values of a trial.

        They depend on the first seed, the point, and the results so far. With one sampler for all trials, two workers
        that start together would sample the same values.
        """
        with self.lock:
            self.study.sampler = optuna.samplers.TPESampler(seed=self.sweep.seeds[0] + trial.user_attrs["point"])
            return {dimension.name: dimension.suggest(trial) for dimension in self.sweep.space}

    # --- results ---

    def importances(self) -> dict[str, float]:
        """Return each setting's importance for a loss among the best tenth, by PED-ANOVA (Watanabe et al. 2023).

        Empty if there is only one setting, all losses are equal, or too few trials have finished.
        """
        finished = sorted((trial for trial in self.attempts() if trial.state == TrialState.COMPLETE), key=key_of)
        if len(self.sweep.space) < 2 or len(finished) < MIN_FINISHED or len({trial.value for trial in finished}) < 2:
            return {}
        sorted_study = optuna.create_study()  # in memory; self.study's order, by completion, would affect ties
        sorted_study.add_trials(finished)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(sorted_study, evaluator=evaluator)
        return {name: float(share) for name, share in shares.items()}


class FolderStudy(Study):
    """The runs of a search in a journal in the sweep's folder. The lock of a run tells whether its worker is alive."""

    def __init__(self, study: optuna.Study, sweep: Sweep):
        super().__init__(study, sweep)
        self.locks = TrialLocks(sweep)

    def fail_dead(self) -> None:
        """End the attempts of dead workers, which no longer hold the locks of their runs."""
        for attempt in self.attempts():
            if attempt.state == TrialState.RUNNING:
                with ExitStack() as stack, suppress(UpdateFinishedTrialError):
                    if self.locks.take(key_of(attempt), stack):
                        self.study.tell(attempt.number, state=TrialState.FAIL, skip_if_finished=True)

    def take(self, trial: optuna.Trial, stack: ExitStack) -> bool:
        """Acquire the lock of a run until the stack closes. Returns False if another worker is ending the attempt."""
        return self.locks.take(key_of(trial), stack)


@dataclass(frozen=True)
class SearchTrial(Trial):
    """A trial of a search, which optuna may prune."""

    trial: optuna.Trial

    def report(self, loss: float, number: int) -> bool:
        self.trial.report(loss, number)
        return self.trial.should_prune()


def key_of(trial: FrozenTrial | optuna.Trial) -> tuple[int, int] | tuple[None, None]:
    """Return the point and the seed of a run; None if optuna created the trial because its queue was empty."""
    return trial.user_attrs.get("point"), trial.user_attrs.get("seed")


def outcome_of(attempt: FrozenTrial) -> Outcome:
    """Return the outcome of the last attempt at a run, which is waiting if the attempt was interrupted."""
    point, seed, host, recorded = (attempt.user_attrs.get(name) for name in ("point", "seed", "host", "outcome"))
    if recorded and recorded["state"] == STATES[attempt.state]:
        return Outcome(**{**recorded, "evaluations": tuple(map(tuple, recorded["evaluations"]))})
    state = "waiting" if attempt.state == TrialState.FAIL else STATES[attempt.state]
    return Outcome(point, seed, attempt.params, state, host=host)


# --- storage ----------------------------------------------------------------------------------------------------------


def open_study(sweep: Sweep, url: str | None, prune: bool) -> Study:
    """Open or create the study of a search.

    url: of the database; None: a journal in the sweep's folder. prune: whether optuna may prune trials. Raises
    UserError if the storage cannot be opened, or if the study has another definition.
    """
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # the sweep reports failed trials itself
    pruner = optuna.pruners.NopPruner()
    if prune:  # after the first third of a run
        pruner = optuna.pruners.MedianPruner(n_startup_trials=WARMUP_TRIALS, n_warmup_steps=sweep.evaluations // 3)
    study_class, name = (Study, sweep.name) if url else (FolderStudy, "sweep")  # the folder may be renamed
    storage = open_database(url) if url else open_journal(sweep.out_dir / "study.journal")
    study = optuna.create_study(study_name=name, storage=storage, pruner=pruner, load_if_exists=True)
    check_definition(sweep.name, study.user_attrs.get("definition", sweep.definition), sweep.definition)
    study.set_user_attr("definition", sweep.definition)
    return study_class(study, sweep)


def open_journal(path: Path) -> JournalStorage:
    """Open or create a journal of optuna. Raises UserError if it is damaged."""
    try:
        return JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
    except (ValueError, LookupError, TypeError, AssertionError):
        raise UserError(
            f"{path} is damaged: if a power failure or a full disk left an incomplete line, remove the line; otherwise "
            f"choose another --out_dir"
        ) from None


def open_database(url: str) -> RDBStorage:
    """Open a database with heartbeats. Raises UserError if it cannot be used."""
    try:
        location = sqlalchemy.make_url(url)
    except ArgumentError:
        raise UserError(f"storage={url}: it is not a database URL; write postgresql://USER@HOST/DATABASE") from None
    url_text = location.render_as_string()  # without the password
    if location.get_backend_name() == "sqlite":
        raise UserError(
            f"storage={url_text}: SQLite has no row locks, so two workers could take the same run; leave out --storage "
            f"to share the search in --out_dir"
        )
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # about heartbeats
    engine = {"pool_pre_ping": True}
    if location.drivername == "postgresql":
        location = location.set(drivername="postgresql+psycopg")
        engine["connect_args"] = {"connect_timeout": 10}
    try:
        full_url = location.render_as_string(hide_password=False)
        return RDBStorage(full_url, engine, heartbeat_interval=HEARTBEAT_SECONDS)
    except ImportError as error:
        remedy = ': pip install "psycopg[binary]"' if location.drivername.endswith("+psycopg") else ""
        raise UserError(f"storage={url_text}: its driver is not installed ({first_line(error)}){remedy}") from None
    except (SQLAlchemyError, OptunaError, RuntimeError) as error:
        reason = first_line(getattr(error, "orig", None) or error)
        raise UserError(
            f"storage={url_text}: the database cannot be opened: {reason}; if it is running, repeat the command"
        ) from None


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert errors of the database or journal in the block to UserError."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error  # optuna wraps it in others, even in an UnboundLocalError
        while cause and not isinstance(cause, (SQLAlchemyError, OSError, JSONDecodeError)):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, UserError):
            raise
        reason = first_line(getattr(cause, "orig", None) or cause)
        raise UserError(f"the study of the search failed: {reason}; repeat the command to resume the runs") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
