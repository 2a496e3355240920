"""Snapshots of a run's weights, which show how a model changes during training.

    OUT_DIR/snapshots/step-000050.safetensors    the weights by parameter name; tied weights once

Their steps are spaced logarithmically, because a model changes most at the beginning. A run cannot resume from them.
The metadata of the file contains the step and a sha256 of the tensors.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from folio import UserError
from folio.base.files import atomic_write, check_regular, step_number
from folio.checkpoints.tensor_files import write_tensors


def find_snapshots(out_dir: Path) -> dict[int, Path]:
    """The snapshots in a run's folder by step, in ascending order."""
    paths = (out_dir / "snapshots").glob("step-*.safetensors")
    numbered = {step_number(path.stem): path for path in paths}
    return dict(sorted((step, path) for step, path in numbered.items() if step is not None))


def write_snapshot(out_dir: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Write a snapshot atomically into a run's existing folder. Raises OSError."""
    (out_dir / "snapshots").mkdir(exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in weights.items()}
    with atomic_write(out_dir / "snapshots" / f"step-{step:06d}.safetensors") as temporary:
        write_tensors(temporary, tensors, {"step": str(step), "sha256": _digest(tensors)})


def read_snapshot(path: Path) -> dict[str, Tensor]:
    """The weights in a snapshot. Raises UserError if it is damaged, or not a snapshot."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    step = path.stem.removeprefix("step-")
    if not {"step", "sha256"} <= metadata.keys():
        raise UserError(f"{path} has no step or no sha256 in its metadata, so it is not a snapshot of a run; remove it")
    if metadata["sha256"] != _digest(tensors):
        raise UserError(f"{path} has changed since it was written: this snapshot is damaged")
    if metadata["step"] != str(int(step)):
        raise UserError(f"{path} is the snapshot of step {metadata['step']}: it was renamed, or replaced by another")
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    """The sha256 of tensors and their names, dtypes and shapes, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def remove_snapshots(out_dir: Path, after: int | None) -> None:
    """Remove the snapshots after the step from which a run is resumed (None: all), and incomplete files of a killed
    run. Raises OSError.
    """
    abandoned = [path for step, path in find_snapshots(out_dir).items() if after is None or step > after]
    for path in [*abandoned, *(out_dir / "snapshots").glob(".step-*.tmp")]:
        path.unlink()
