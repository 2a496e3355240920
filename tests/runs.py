"""Reading and comparing what training runs have written."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from folio import checkpoint
from folio.snapshots import find_snapshots


def read_metrics(out_dir: str) -> list[dict]:
    """The lines of metrics.jsonl, without the first one, of the evaluation before the first step."""
    first, *lines = [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]
    assert first["step"] == 0 and first["val_loss"] is not None and first["loss"] is None
    return lines


def read_losses(out_dir: str) -> list[tuple]:
    """The step, loss, validation loss, learning rate and gradient norm of each line of metrics.jsonl."""
    names = ("step", "loss", "val_loss", "lr", "grad_norm")
    return [tuple(line[name] for name in names) for line in read_metrics(out_dir)]


def same_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two dictionaries have the same names and bitwise identical tensors."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_run(first: str, second: str) -> None:
    """Weights, optimizer state, position in the data and logged losses of two runs are bitwise identical."""
    a, b = checkpoint.load(Path(first)), checkpoint.load(Path(second))
    assert a.state["step"] == b.state["step"] and a.state["next_sequence"] == b.state["next_sequence"]
    for tensors, others in ((a.model, b.model), (a.optimizer(), b.optimizer())):
        assert tensors.keys() == others.keys() and tensors
        for name in tensors:
            assert torch.equal(tensors[name], others[name]), name
    assert read_losses(first) == read_losses(second)


def read_snapshots(out_dir: str) -> dict[int, dict[str, Tensor]]:
    """The snapshots of a run by their steps."""
    return {step: load_file(path) for step, path in find_snapshots(Path(out_dir)).items()}


def assert_same_snapshots(first: str, second: str) -> None:
    """Two runs have snapshots of the same steps, and they are bitwise identical."""
    a, b = read_snapshots(first), read_snapshots(second)
    assert a.keys() == b.keys() and a
    assert all(same_tensors(a[step], b[step]) for step in a)
