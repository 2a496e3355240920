"""Snapshots of a run's weights, for looking at how a model changes while it learns.

    OUT_DIR/snapshots/step-000050.safetensors    the weights by parameter name, a tied one once

They are spaced on a log scale, because a model changes most at the beginning. Nothing resumes from them.
"""

import os
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import Tensor


def snapshot_steps(count: int, max_iters: int) -> set[int]:
    """The steps after which to take a snapshot: 0, max_iters, and others between them on a log scale.

    At most `count`; fewer if steps near the beginning coincide.
    """
    if count == 0:
        return set()
    return {0, *np.geomspace(1, max_iters, max(count - 1, 1)).round().astype(int).tolist(), max_iters}


def find_snapshots(out_dir: Path) -> dict[int, Path]:
    """The snapshots in a run's folder by their steps, in order."""
    paths = (out_dir / "snapshots").glob("step-*.safetensors")
    numbered = {path.stem.removeprefix("step-"): path for path in paths}
    return dict(sorted((int(step), path) for step, path in numbered.items() if step.isdigit()))


def write_snapshot(out_dir: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Write a snapshot under a temporary name, and rename it. Raises OSError."""
    final = out_dir / "snapshots" / f"step-{step:06d}.safetensors"
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in weights.items()}, temporary)
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def remove_snapshots(out_dir: Path, after: int) -> None:
    """Remove the snapshots after a step: those of a run that is resumed from there, or (-1) replaced."""
    for step, path in find_snapshots(out_dir).items():
        if step > after:
            path.unlink()
