"""The runs of an experiment: warming up, what they cost, and whether they are identical."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from folio import UserError
from folio.base.workers import child_options
from folio.checkpoints import run_folder
from folio.checkpoints.checkpoint import LazyTensors
from folio.experiments.ideas.experiment import Experiment
from folio.experiments.ideas.pair_queue import Pair
from folio.experiments.runs import Run
from folio.experiments.sweep.arms import CODE, Arm
from folio.experiments.sweep.trial import run_training

COUNTS = Path(__file__).with_name("counts.py")
WARM_UP = ("--max_iters=3", "--minutes=None", "--eval_iters=1", "--snapshots=0", "--overwrite=True")


def warm_up(experiment: Experiment, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Train each arm for three steps, so that compiled code is in the caches before a step is timed.

    Returns the parameters, and FLOPs per token, of each arm's model, if its code can count them. Raises UserError if an
    arm cannot train.
    """
    if experiment.sweep.base.size:  # the first steps of --size=auto are those of a race
        return [{}, {}]
    facts = []
    for number, arm in enumerate(experiment.arms):
        folder = experiment.folder / f"warm-up-{'ab'[number]}"
        folder.mkdir(exist_ok=True)
        if not run_folder.exists(folder):
            arguments = experiment.sweep.arguments_of({CODE: arm.name}, experiment.sweep.seeds[0])
            reason = run_training(folder, [*arguments, *WARM_UP], environment, lambda *_: "train", arm.folder)
            if reason:
                raise UserError(f"{arm.name}: {reason} (its output: {folder / 'output.txt'})")
        for path in folder.rglob("*.safetensors"):
            path.unlink()
        facts.append(count(arm, run_folder.directories(folder)[-1] / "state.json"))
    return facts


def count(arm: Arm, state: Path) -> dict[str, Any]:
    """Return the parameters and FLOPs per token of an arm's model; empty if its code cannot count them."""
    words = [sys.executable, str(COUNTS), str(arm.folder), str(state)]
    done = subprocess.run(words, **child_options(), capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def measured(experiment: Experiment, pairs: Sequence[Pair], point: int) -> dict[str, Any]:
    """Return the medians of an arm's tokens per second and peak memory over its runs; None: unknown."""
    totals = [Run.of(experiment.sweep.folder(point, pair[point].seed)).totals() for pair in pairs]
    values = {name: [t[name] for t in totals if t[name]] for name in ("tokens_per_second", "memory")}
    return {name: float(np.median(numbers)) if numbers else None for name, numbers in values.items()}


def are_identical(experiment: Experiment, pair: Pair) -> bool:
    """Return whether the runs of a pair ended with the same weights, bit for bit."""
    weights = []
    for outcome in pair:
        checkpoint = run_folder.directories(experiment.sweep.folder(outcome.point, outcome.seed))[-1]
        if not (checkpoint / "model.safetensors").exists():
            return False
        weights.append((checkpoint.name, LazyTensors.from_file(checkpoint / "model.safetensors")))
    (name, first), (other_name, second) = weights
    return name == other_name and first.shapes == second.shapes and all(map(are_equal, first.values(), second.values()))


def are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes, so that NaN is equal to NaN."""
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def remove_weights(experiment: Experiment, pairs: Sequence[Pair]) -> None:
    """Remove the weights and optimizers of finished runs; their settings, logs and losses stay."""
    for outcome in (outcome for pair in pairs for outcome in pair):
        for path in experiment.sweep.folder(outcome.point, outcome.seed).rglob("*.safetensors"):
            path.unlink(missing_ok=True)
