"""One directory a checkpoint: whole or absent, checksummed, free of pickle, and all that sampling or resuming needs.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name, a tied one once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the tokenizer, whole
                            state.json             format version, step, configuration, losses, the next sequence
                            manifest.json          bytes and sha256 of each of these
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the one with the lowest validation loss

docs/checkpoints.md describes each file.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, tokenizer
from folio.files import read_json, sha256, sync, write_json
from folio.tokenizer import Tokenizer

FORMAT_VERSION = 1
POINTERS = ("last", "best")


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit."""


@dataclass(frozen=True)
class Checkpoint:
    """What one directory held. Tensors are on the CPU; `state` is state.json."""

    path: Path
    model: dict[str, Tensor]
    tokenizer: Tokenizer
    state: dict[str, Any]

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.path / "optimizer.safetensors")


def save(
    out_dir: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tokenizer: Tokenizer,
    state: dict[str, Any],
    best: bool,
) -> Path:
    """Write step-N, point last.json at it, and best.json too if it is the best; then drop what neither names.

    The directory is written and synced under a temporary name and renamed, so that at no moment a checkpoint is lost
    or half there.
    """
    final = out_dir / f"step-{step:06d}"
    temporary = out_dir / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in model.items()}, temporary / "model.safetensors")
        save_file({name: t.contiguous().cpu() for name, t in optimizer.items()}, temporary / "optimizer.safetensors")
        write_json(temporary / "tokenizer.json", tokenizer.to_json())
        write_json(temporary / "state.json", {"format_version": FORMAT_VERSION, "step": step, **state})
        files = sorted(path for path in temporary.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        write_json(temporary / "manifest.json", manifest)
        for path in files:
            shutil.copymode(temporary / "manifest.json", path)  # safetensors' own files are for the user alone
            sync(path)
        sync(temporary)
        if final.exists():  # saved at this step before: by a run that was then continued
            replaced = out_dir / f".{final.name}.replaced.tmp"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync(out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for pointer in POINTERS if best else POINTERS[:1]:
        write_json(out_dir / f"{pointer}.json", {"checkpoint": final.name})
    _drop_unnamed(out_dir)
    return final


def exists(out_dir: Path) -> bool:
    """Whether the folder holds a checkpoint, so that a new run would write over an old one."""
    return any((out_dir / f"{pointer}.json").exists() for pointer in POINTERS)


def last_step(out_dir: Path) -> int:
    """The step of the newest checkpoint."""
    return int(read_json(out_dir / "last.json")["checkpoint"].removeprefix("step-"))


def remove_all(out_dir: Path) -> None:
    """Remove the checkpoints of an earlier run, pointers first."""
    for pointer in POINTERS:
        (out_dir / f"{pointer}.json").unlink(missing_ok=True)
    _drop_unnamed(out_dir)


def _drop_unnamed(out_dir: Path) -> None:
    named = {read_json(path)["checkpoint"] for pointer in POINTERS if (path := out_dir / f"{pointer}.json").exists()}
    for path in [*out_dir.glob("step-*"), *out_dir.glob(".step-*.tmp")]:
        if path.is_dir() and path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


def load(path: Path, which: str = "last") -> Checkpoint:
    """Load a checkpoint: `path` is its directory, or a run's folder, of which `which` ("last" or "best") is taken.

    A run that has not been evaluated yet has no best one; there the last is taken. The size and sha256 of every file
    are checked against the manifest. Raises CheckpointError.
    """
    try:
        for pointer in (which, "last"):
            if (path / f"{pointer}.json").exists():
                path = path / read_json(path / f"{pointer}.json")["checkpoint"]
                break
        if not (path / "manifest.json").exists():
            advice = "it is not a checkpoint's folder" if path.exists() else "train one first, or check --out_dir"
            raise CheckpointError(f"{path} holds no checkpoint: {advice}")
        for name, entry in read_json(path / "manifest.json").items():
            file = path / name
            if not file.exists() or file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
                what = "has changed since it was written" if file.exists() else "is missing"
                raise CheckpointError(f"{file} {what}: this checkpoint is damaged; use another one")
        state = read_json(path / "state.json")
        if state["format_version"] != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format version {state['format_version']} is not {FORMAT_VERSION}")
        made_with = tokenizer.from_json(read_json(path / "tokenizer.json"))
    except ValueError as error:  # of JSON
        raise CheckpointError(f"{path} is damaged: {error}; use another one") from None
    return Checkpoint(path, load_file(path / "model.safetensors"), made_with, state)
