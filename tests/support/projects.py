"""A project with two versions of its code, whose runs are written without training."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from folio.checkpoints.tensor_files import write_tensors
from tests.support.runs import write_run

GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run([*GIT, "-C", folder, *arguments], check=True, capture_output=True)


def write_project(folder: Path) -> Path:
    """Write a repository in which main has a loss of 2, and the branch idea one of 1.9."""
    (folder / "config").mkdir(parents=True)
    git(folder, "init")
    (folder / "model.py").write_text("")
    (folder / ".gitignore").write_text("/ideas/\n")
    (folder / "config" / "mine.py").write_text("max_iters = 8\n")
    for branch, loss in (("main", 2.0), ("idea", 1.9)):
        if branch != "main":
            git(folder, "checkout", "-b", branch)
        (folder / "train.py").write_text(f"loss = {loss}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-m", branch)
    git(folder, "checkout", "main")
    return folder


def loss_of(code: Path) -> float:
    """Return the loss that a version of the project states."""
    return float((code / "train.py").read_text().partition("=")[2])


def writer(noise: Callable[[int, float], float] = lambda seed, loss: 0.0) -> Callable:
    """Return a replacement of run_training that writes a finished run with the loss of its code, plus noise.

    noise: a function of the seed and the loss. The weights are the loss.
    """

    def run_training(folder, arguments, environment, watch, code):
        seed = next(int(word.partition("=")[2]) for word in reversed(arguments) if word.startswith("--seed="))
        loss = loss_of(code)
        write_run(folder, {8: loss + noise(seed, loss)})
        write_tensors(folder / "step-000008" / "model.safetensors", {"w": torch.tensor([loss])})
        return None

    return run_training
