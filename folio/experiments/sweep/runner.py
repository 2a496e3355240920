"""Runs the trials of a sweep, several at the same time, and shows how far it is."""

import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from tqdm import tqdm

from folio import UserError
from folio.base.files import is_locked
from folio.base.progress import progress_bar
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.jobs import environments
from folio.experiments.sweep.space import describe_point
from folio.experiments.sweep.study import Study, TrialFailed, TrialInterrupted
from folio.experiments.sweep.trial import OUTPUT, Action, claim, is_finished, read_results, run_training


class Runner:
    """Runs the trials of a sweep, as many at a time as there are jobs."""

    def __init__(self, sweep: Sweep, study: Study, jobs: int | None):
        """jobs: runs at the same time; None: one per GPU, or one. Raises UserError if there are fewer GPUs."""
        self.sweep, self.study = sweep, study
        self.environments: queue.Queue[dict[str, str]] = queue.Queue()  # one for each job
        for environment in environments(jobs, sweep.base.device):
            self.environments.put(environment)
        self.jobs = self.environments.qsize()
        self.stopping, self.killing = threading.Event(), threading.Event()
        self.fractions: dict[tuple[int, int], float] = {}  # of each trial that is running
        self.bar = None

    def run(self) -> str | None:
        """Run trials until none is left, or a signal asks to stop. Returns how far it came then."""
        total = self.sweep.points * len(self.sweep.seeds)
        form = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
        with self.signals(), progress_bar(total=total, bar_format=form) as self.bar:
            self.refresh()
            self.bar.initial = self.done
            self.study.run(self.train, self.jobs, self.stopping.is_set, self.refresh)
        return f"after {self.done} of {total} runs" if self.stopping.is_set() else None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first SIGINT, SIGTERM or SIGHUP stops the trials at a checkpoint; the second one kills them."""

        def stop(number: int, frame: Any) -> None:
            if self.stopping.is_set():
                self.killing.set()
            self.stopping.set()

        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        previous = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def train(self, trial: optuna.Trial) -> float:
        """Run one trial. Returns its lowest validation loss."""
        params = self.study.suggest(trial)
        point, seed = trial.user_attrs["point"], trial.user_attrs["seed"]
        folder, name = self.sweep.folder(point, seed), f"trial {point}, seed {seed} ({describe_point(params)})"
        environment = self.environments.get()
        trial.set_user_attr("host", socket.gethostname())
        trial.set_user_attr("error", None)  # of an earlier attempt
        try:
            self.wait_for(folder, name)
            return self.follow(trial, params, folder, name, environment)
        except optuna.exceptions.StorageInternalError:
            self.stopping.set()  # of the other trials, which could not be recorded
            raise
        except optuna.TrialPruned as pruned:
            tqdm.write(f"{name}: pruned {pruned}")
            raise
        except (TrialFailed, UserError, OSError) as failed:
            trial.set_user_attr("error", str(failed))
            tqdm.write(f"{name}: failed: {failed} (all that it printed: {folder / OUTPUT})")
            raise TrialFailed from failed
        finally:
            self.environments.put(environment)
            self.fractions.pop((point, seed), None)

    def wait_for(self, folder: Path, name: str) -> None:
        """Wait for a run that a killed worker has left behind in this folder."""
        if is_locked(folder / ".lock"):
            tqdm.write(f"{name}: waiting, because a process that another sweep started is still training in {folder}")
        while is_locked(folder / ".lock"):
            if self.stopping.wait(0.5):
                raise TrialInterrupted

    def follow(
        self, trial: optuna.Trial, params: dict[str, Any], folder: Path, name: str, environment: dict[str, str]
    ) -> float:
        """Train, unless the run is finished, and record its results. Returns its lowest validation loss."""
        point, seed = trial.user_attrs["point"], trial.user_attrs["seed"]
        watch = Watch(self, trial, params)
        claim(folder, {"sweep": self.sweep.record, "params": params, "seed": seed})
        if not is_finished(folder):
            reason = run_training(folder, self.sweep.arguments_of(params, seed), environment, watch)
            if self.stopping.is_set() and not is_finished(folder):
                raise TrialInterrupted
            if reason and not watch.is_hopeless:
                raise TrialFailed(reason)
        run = Run.of(folder)
        results = read_results(run)
        for key, value in results.items():
            trial.set_user_attr(key, value)
        loss = results["loss"]
        if watch.is_hopeless and run.status != "finished":
            raise optuna.TrialPruned(f"after {watch.reported} evaluations, at {loss:.4f}")
        self.study.add([(point, params)], self.sweep.seeds)  # in a search, the values are known only now
        seconds = f", {results['seconds']:,.1f} s" if results["seconds"] else ""
        tqdm.write(f"{name}: {loss:.4f} at step {results['step']:,}{seconds}")
        return loss

    # --- progress ---

    def refresh(self) -> None:
        """Count the trials that are done, also those of other workers, and find the best one."""
        outcomes = self.sweep.outcomes(self.study)
        remaining = 0
        for outcome in outcomes:
            if outcome.state in ("waiting", "running"):
                others = self.sweep.is_search and outcome.seed == self.sweep.seeds[0]
                remaining += len(self.sweep.seeds) if others else 1  # a search adds the other seeds later
        finished = [outcome for outcome in outcomes if outcome.state == "finished"]
        best = min(finished, key=lambda outcome: outcome.loss, default=None)
        self.done = self.bar.total - remaining
        self.best = f", best {best.loss:.4f} (trial {best.point})" if best else ""
        self.show()

    def show(self) -> None:
        """Update the bar."""
        with self.bar.get_lock():
            self.bar.n = min(self.bar.total, self.done + sum(self.fractions.values()))
            self.bar.set_description_str(f"{self.done}/{self.bar.total} runs{self.best}")


class Watch:
    """Watches a run while it trains: reports each evaluation to optuna, and stops the run if it says so.

    It is asked about the first seed only: settings that were good with one seed are trained with all.
    """

    def __init__(self, runner: Runner, trial: optuna.Trial, params: dict[str, Any]):
        self.runner, self.trial, self.params = runner, trial, params
        self.key = trial.user_attrs["point"], trial.user_attrs["seed"]
        self.reported = 0  # evaluations
        self.is_hopeless = False  # whether optuna says that the run should stop
        self.began = time.monotonic()

    def __call__(self, step: int, evaluations: list[tuple[int, float]]) -> Action:
        """What the run should do after its last logged step and these evaluations."""
        runner, (_, seed) = self.runner, self.key
        runner.fractions[self.key] = runner.sweep.fraction(self.params, step, time.monotonic() - self.began)
        for _, loss in evaluations[self.reported :]:
            self.reported += 1
            if seed == runner.sweep.seeds[0]:
                self.trial.report(loss, self.reported)
                self.is_hopeless = self.is_hopeless or self.trial.should_prune()
        runner.show()
        if runner.killing.is_set():
            return "kill"
        return "stop" if self.is_hopeless or runner.stopping.is_set() else "train"
