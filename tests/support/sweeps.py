"""Small sweeps, whose runs take a second."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from folio.experiments.sweep.arguments import parse_sweep
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import Outcome, Trial, TrialSource
from tools.sweep import SweepConfig
from train import TrainConfig

SMALL = (
    "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --max_iters=8 --eval_interval=2 --log_interval=1"
)
SMALL += " --eval_iters=2 --dataset=verse --dtype=float32 --device=cpu --learning_rate=3e-3 --sample_tokens=0"


def small_sweep(data_dir: Path, out_dir: Path) -> list[str]:
    """Return the arguments of a sweep with trials of a second."""
    return [*SMALL.split(), f"--data_dir={data_dir}", f"--out_dir={out_dir}"]


def parse(words: list[str]) -> tuple[SweepConfig, Sweep]:
    """Parse a sweep's command line."""
    return parse_sweep(SweepConfig, TrainConfig, words)


def run(source: TrialSource, train: Callable[[Trial], Outcome], jobs: int = 1) -> None:
    """Run all trials of a queue or study."""
    source.run(train, jobs, threading.Event(), after_trial=lambda: None)


def run_with_two_workers(
    new_worker: Callable[[], TrialSource], finish: Callable[[TrialSource, Trial], Outcome], jobs: int
) -> tuple[Counter, list[list[Outcome]]]:
    """Run all trials with two workers in threads. Returns how often each was started, and the outcomes of each worker.

    finish: trains a trial of a worker.
    """
    started: Counter = Counter()
    both = threading.Barrier(2)

    def work(number: int) -> list[Outcome]:
        worker = new_worker()
        both.wait()

        def train(trial: Trial) -> Outcome:
            started[trial.key] += 1
            return finish(worker, trial)

        run(worker, train, jobs)
        return worker.outcomes()

    with ThreadPoolExecutor(2) as pool:
        return started, [*pool.map(work, range(2))]
