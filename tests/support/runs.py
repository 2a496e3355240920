"""Reading and comparing what training runs have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint
from folio.checkpoints.snapshots import find_snapshots, read_snapshot


def blank_state(step: int, **changes: Any) -> dict[str, Any]:
    """state.json of a run without settings that was evaluated after this step for the first time."""
    progress = dict(step=step, next_sequence=step, best_val_loss=1.0, best_step=step, evaluations_since_best=0)
    if not step:
        progress |= dict(best_val_loss=None)
    resolved = dict(device="cpu", dtype="float32", compile=False)
    about = dict(model={}, config={}, resolved=resolved, dataset=dict(folder="", hash=""), versions={})
    return {"format_version": 1, **progress, "guard": {}, "grad_scaler": {}, **about, **changes}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write state.json of a checkpoint, and its entry in the manifest."""
    write_json(path / "state.json", state)
    edit_manifest(path)


def edit_manifest(path: Path) -> None:
    """Write the size and checksum of state.json into a checkpoint's manifest."""
    manifest = read_json(path / "manifest.json") if (path / "manifest.json").exists() else {}
    entry = {"bytes": (path / "state.json").stat().st_size, "sha256": sha256(path / "state.json")}
    write_json(path / "manifest.json", {**manifest, "state.json": entry})


def edit_state(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change state.json of a checkpoint, and its entry in the manifest."""
    state = read_json(path / "state.json")
    edit(state)
    write_state(path, state)


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
    return {step: read_snapshot(path) for step, path in find_snapshots(Path(out_dir)).items()}


def assert_same_snapshots(first: str, second: str) -> None:
    """Two runs have snapshots of the same steps, and they are bitwise identical."""
    a, b = read_snapshots(first), read_snapshots(second)
    assert a.keys() == b.keys() and a
    assert all(same_tensors(a[step], b[step]) for step in a)
