"""Run the trials of a sweep concurrently, and show its progress."""

import os
import queue
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from folio import UserError
from folio.base.files import is_locked
from folio.base.number_format import counted
from folio.base.progress import progress_bar
from folio.base.stop_signals import handled_by
from folio.base.workers import cores
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import Outcome, Trial, TrialFailed, TrialInterrupted, TrialSource
from folio.experiments.sweep.trial import OUTPUT, Action, run_training
from folio.experiments.sweep.trial_folder import claim, is_finished, read_results


class Runner:
    """Runs the trials of a sweep, one per job at once."""

    def __init__(self, sweep: Sweep, trials: TrialSource, jobs: int | None):
        """jobs: number of concurrent runs; None: one per GPU, or one. Raises UserError if there are fewer GPUs."""
        self.sweep, self.trials = sweep, trials
        self.environments: queue.Queue[dict[str, str]] = queue.Queue()  # one per job
        for environment in environments(jobs, sweep.base.device):
            self.environments.put(environment)
        self.jobs = self.environments.qsize()
        self.stopping, self.killing = threading.Event(), threading.Event()
        self.stopped_by = 0  # the first signal that stops the sweep
        self.fractions: dict[tuple[int, int], float] = {}  # progress of each running trial
        self.bar = None

    def run(self) -> str | None:
        """Run trials until none is left or a signal arrives. Returns the progress if a signal stopped the sweep."""
        total = self.trials.max_runs()
        form = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
        with handled_by(self.stop), progress_bar(total=total, bar_format=form) as self.bar:
            self.refresh()
            self.bar.initial = self.done
            self.trials.run(self.train, self.jobs, self.stopping, self.refresh)
        return f"after {self.done} of {total} runs" if self.stopping.is_set() else None

    def stop(self, number: int, frame: Any) -> None:
        """Handle a signal: the first one stops trials at a checkpoint; a second SIGINT or SIGTERM kills them.

        A second SIGHUP does not: when a terminal is closed, the kernel and the shell each send one.
        """
        if self.stopping.is_set() and number in (signal.SIGINT, signal.SIGTERM):
            self.killing.set()
        self.stopped_by = self.stopped_by or number
        self.stopping.set()

    def train(self, trial: Trial) -> Outcome:
        """Run one trial and return its outcome, which is waiting if it was interrupted."""
        folder = self.sweep.folder(trial.point, trial.seed)
        name = self.trials.describe(trial)
        environment = self.environments.get()
        try:
            self.wait_for(folder, name)
            return replace(self.train_in(folder, trial, name, environment), host=socket.gethostname())
        except TrialInterrupted:
            return trial.outcome("waiting")
        except (TrialFailed, UserError, OSError) as error:
            tqdm.write(f"{name}: failed: {error} (its output: {folder / OUTPUT})")
            return trial.outcome("failed", error=str(error), host=socket.gethostname())
        finally:
            self.environments.put(environment)
            self.fractions.pop(trial.key, None)

    def wait_for(self, folder: Path, name: str) -> None:
        """Wait for a training process in this folder that a killed worker left behind."""
        if is_locked(folder / ".lock"):
            tqdm.write(f"{name}: waiting for a process of another sweep that is still training in {folder}")
        while is_locked(folder / ".lock"):
            if self.stopping.wait(0.5):
                raise TrialInterrupted

    def train_in(self, folder: Path, trial: Trial, name: str, environment: dict[str, str]) -> Outcome:
        """Train in the folder, unless the run is finished. Returns its results."""
        watch = Watch(self, trial)
        claim(folder, self.sweep.description(trial))
        if not is_finished(folder):
            arguments = self.sweep.arguments_of(trial.params, trial.seed)
            reason = run_training(folder, arguments, environment, watch, self.sweep.code_of(trial.params))
            if self.stopping.is_set() and not is_finished(folder):
                raise TrialInterrupted
            if reason and not watch.is_pruned:
                raise TrialFailed(reason)
        run = Run.of(folder)
        results = read_results(run)
        if watch.is_pruned and run.status != "finished":
            tqdm.write(f"{name}: pruned after {counted(watch.reported, 'evaluation')}, at {results['loss']:.4f}")
            return trial.outcome("pruned", **results)
        seconds = f", {results['seconds']:,.1f} s" if results["seconds"] else ""
        tqdm.write(f"{name}: {results['loss']:.4f} at step {results['step']:,}{seconds}")
        return trial.outcome("finished", **results)

    # --- progress ---

    def refresh(self) -> None:
        """Update the number of completed trials, including other workers', and the best one."""
        outcomes = self.trials.outcomes()
        finished = [outcome for outcome in outcomes if outcome.state == "finished"]
        best = min(finished, key=lambda outcome: outcome.loss, default=None)
        self.done = self.bar.total - self.trials.runs_left(outcomes)
        self.best = f", best {best.loss:.4f} (trial {best.point})" if best else ""
        self.show()

    def show(self) -> None:
        """Update the progress bar."""
        with self.bar.get_lock():
            self.bar.n = min(self.bar.total, self.done + sum(self.fractions.values()))
            self.bar.set_description_str(f"{self.done}/{self.bar.total} runs{self.best}")


class Watch:
    """Callback of a training run: reports each evaluation, and stops the run if it is pruned.

    Only runs with the first seed are pruned: settings that are good with the first seed are trained with all seeds.
    """

    def __init__(self, runner: Runner, trial: Trial):
        self.runner, self.trial = runner, trial
        self.reported = 0  # number of reported evaluations
        self.is_pruned = False
        self.start_time = time.monotonic()

    def __call__(self, step: int, evaluations: list[tuple[int, float]]) -> Action:
        """Return the next action of the run, given its last logged step and all evaluations."""
        runner, trial = self.runner, self.trial
        runner.fractions[trial.key] = runner.sweep.fraction(trial.params, step, time.monotonic() - self.start_time)
        for _, loss in evaluations[self.reported :]:
            self.reported += 1
            if trial.seed == runner.sweep.seeds[0]:
                self.is_pruned = trial.report(loss, self.reported) or self.is_pruned
        runner.show()
        if runner.killing.is_set():
            return "kill"
        return "stop" if self.is_pruned or runner.stopping.is_set() else "train"


def environments(jobs: int | None, device: str) -> list[dict[str, str]]:
    """Return the environment variables of each job. Raises UserError.

    jobs: number of concurrent runs; None: one per GPU, or one. device: train.py's setting.
    """
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        if jobs and jobs > gpus:
            raise UserError(f"jobs={jobs}: each run needs its own GPU, and this machine has {gpus}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible[: jobs or gpus]]
    jobs = jobs or 1
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * jobs
    return [{"OMP_NUM_THREADS": str(max(1, cores() // jobs))}] * jobs
