"""Writing, reading and comparing the files of training runs."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train as train_script
from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint
from folio.checkpoints.snapshots import find_snapshots, read_snapshot
from folio.data.windows import WINDOWS_VERSION
from folio.training.guard import StepGuard
from model import GPTConfig
from tests.support.tolerances import gradients_error, norm_error, normal_limit
from train import TrainConfig, train

SHAPE = dict(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4, document_token=None)


def blank_state(step: int, **changes: Any) -> dict[str, Any]:
    """state.json of a run without settings, first evaluated after this step."""
    progress = dict(step=step, next_sequence=step, best_val_loss=1.0, best_step=step, evaluations_since_best=0)
    if not step:
        progress |= dict(best_val_loss=None)
    guard = {**StepGuard(torch.device("cpu"), None).state(), "val_losses": [], "evaluated_at": 0}
    progress |= dict(guard=guard, grad_scaler={})
    dataset = dict(folder="", hash="", parts={}, not_held_out=[], prompt_format=None)
    run = dict(run_id="", model=SHAPE, config={}, origins={}, dataset=dataset, parts=[blank_part(0)])
    unknown = dict.fromkeys(("torchrun", "stopped_by", "wandb_id", "budget"))
    return {"format_version": 2, **progress, **run, **unknown, **changes}


def blank_part(from_step: int, **changes: Any) -> dict[str, Any]:
    """A part of a run in state.json."""
    resolved = dict(device="cpu", dtype="float32", compile=False)
    start = dict(init_from="resume", after="a kill") if from_step else dict(init_from="scratch", after=None)
    versions = dict(torch="2.0", python="3.10")
    defaults = dict(changes={}, exact=True, resolved=resolved, versions=versions, threads=1, decisions=[[0, 100]])
    return {"from_step": from_step, **start, **defaults, "windows": WINDOWS_VERSION, "max_val_tokens": None, **changes}


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
    """The lines of metrics.jsonl, except the first, which is the evaluation before the first step."""
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
    """Assert that weights, optimizer state, position in the data and logged losses are bitwise identical."""
    a, b = checkpoint.load(Path(first)), checkpoint.load(Path(second))
    assert a.state["step"] == b.state["step"] and a.state["next_sequence"] == b.state["next_sequence"]
    for tensors, others in ((a.model, b.model), (a.optimizer(), b.optimizer())):
        assert tensors.keys() == others.keys() and tensors
        for name in tensors:
            assert torch.equal(tensors[name], others[name]), name
    assert read_losses(first) == read_losses(second)


def assert_same_losses(first: TrainConfig, second: TrainConfig, *more_names: str) -> None:
    """Assert that the losses of all steps, and other metrics, differ only by rounding.

    A loss has 30 roundings in a row: torch adds the exponentials of 43 logits, and then
    the losses of the targets, in blocks of a vector's width. Gradients have independent errors too, relative to norms
    that clipping bounds by 1. AdamW divides gradients by the root of their mean square, so that to first order, each
    step changes later losses by its learning rate times this relative error.
    """
    shape = GPTConfig(**{name: getattr(first, name) for name in ("n_layer", "n_head", "n_embd", "block_size")})
    gradients = gradients_error(shape, 8, first.block_size)
    pairs = list(zip(read_metrics(first.out_dir), read_metrics(second.out_dir), strict=True))
    assert {a["step"] for a, _ in pairs} == set(range(1, first.max_iters + 1))
    for name in ("loss", "val_loss", *more_names):
        differences = [abs(a[name] - b[name]) for a, b in pairs if a[name] is not None]
        largest = max(a[name] for a, _ in pairs if a[name] is not None)
        error = math.sqrt(2) * norm_error(30) * largest + first.max_iters * first.learning_rate * gradients
        print(f"{name}: {max(differences):.1e} of {error:.1e}")
        assert max(differences) < normal_limit(len(pairs)) * error, name


def read_snapshots(out_dir: str) -> dict[int, dict[str, Tensor]]:
    """The snapshots of a run by step."""
    return {step: read_snapshot(path) for step, path in find_snapshots(Path(out_dir)).items()}


def assert_same_snapshots(first: str, second: str) -> None:
    """Assert that two runs have snapshots of the same steps, and that they are bitwise identical."""
    a, b = read_snapshots(first), read_snapshots(second)
    assert a.keys() == b.keys() and a
    assert all(same_tensors(a[step], b[step]) for step in a)


def write_run(folder: Path, losses: dict[int, float], stopped_by: str | None = "its end", **settings) -> Path:
    """Write the files of a run, without weights. losses: step -> validation loss; the last step is saved."""
    best_step = min(losses, key=losses.get)
    state = blank_state(max(losses), best_step=best_step, best_val_loss=losses[best_step], stopped_by=stopped_by)
    state |= dict(config={**SHAPE, "max_iters": max(losses), "seed": 1, **settings})
    state["parts"] = [blank_part(0, decisions=[[0, state["config"]["max_iters"]]])]
    saved = folder / f"step-{max(losses):06d}"
    saved.mkdir(parents=True)
    write_state(saved, state)
    (folder / "last.json").write_text(json.dumps({"checkpoint": saved.name}))
    steps = [line_of(step, losses.get(step)) for step in range(max(losses) + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return folder


def line_of(step: int, val_loss: float | None = None) -> dict:
    """A line of metrics.jsonl: 100 tokens per step, 50 per second."""
    return {"step": step, "tokens": 100 * step, "loss": 2.0, "val_loss": val_loss, "tokens_per_second": 50.0}


def set_date(folder: Path, seconds: int) -> None:
    """Set the time of a run's last write, in seconds after a fixed date."""
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000 + seconds,) * 2)


def set_losses(monkeypatch, *val_losses: float) -> Iterator[float]:
    """Let the evaluations of runs return these losses, the first one before step 1. Returns those that remain."""
    remaining = iter(val_losses)
    monkeypatch.setattr(train_script, "evaluate", lambda *args: {"val_loss": next(remaining)})
    return remaining


def run_with_losses(tiny, monkeypatch, capsys, val_losses: list[float], **settings) -> str:
    """The output of a run that is evaluated after each step with these losses."""
    set_losses(monkeypatch, 3.0, *val_losses)
    train(tiny(max_iters=len(val_losses), eval_interval=1, **settings))
    return capsys.readouterr().out
