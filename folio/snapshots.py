"""Snapshots of a run's weights, which show how a model changes while it learns.

    OUT_DIR/snapshots/step-000050.safetensors    the weights by parameter name, a tied one once

They are spaced on a log scale, because a model changes most at the beginning. Nothing resumes from them.
"""

from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from folio.files import atomic_write, step_number
from folio.schedule import Schedule


@cache
def snapshot_steps(count: int, max_iters: int) -> tuple[int, ...]:
    """The steps after which to take `count` snapshots: 0, max_iters, and others, evenly spaced in log(1 + step).

    A run of fewer steps has one after each. A single snapshot is of the last step.
    """
    if count < 2:
        return (max_iters,) * count
    steps = [0]
    for remaining in range(min(count - 1, max_iters), 0, -1):
        last = steps[-1]
        ratio = ((1 + max_iters) / (1 + last)) ** (1 / remaining)
        steps.append(max(last + 1, round((1 + last) * ratio) - 1))
    return tuple(steps)


def is_due(step: int, count: int, schedule: Schedule) -> bool:
    """Whether to take one of `count` snapshots after `step`. A time budget's decisions stretch or shorten the rest."""
    if count == 0 or step == schedule.max_iters:
        return count > 0
    before, now = schedule.recipe_step(step - 1) if step else -1, schedule.recipe_step(step)
    return any(before < planned <= now for planned in snapshot_steps(count, schedule.counts.max_iters))


def find_snapshots(out_dir: Path) -> dict[int, Path]:
    """The snapshots in a run's folder by their steps, in order."""
    paths = (out_dir / "snapshots").glob("step-*.safetensors")
    numbered = {step_number(path.stem): path for path in paths}
    return dict(sorted((step, path) for step, path in numbered.items() if step is not None))


def write_snapshot(out_dir: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Write a snapshot, or nothing if the disk refuses it. Raises OSError."""
    with atomic_write(out_dir / "snapshots" / f"step-{step:06d}.safetensors") as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes its files readable by the owner only
        try:
            save_file({name: t.detach().contiguous().cpu() for name, t in weights.items()}, temporary)
        except SafetensorError as error:  # raised for a full disk
            raise OSError(str(error)) from None
        temporary.chmod(mode)


def remove_snapshots(out_dir: Path, after: int) -> None:
    """Remove the snapshots after a step: those of a run that is resumed from there, or (-1) replaced. Raises OSError.

    What a killed run left incomplete is removed too.
    """
    abandoned = [path for step, path in find_snapshots(out_dir).items() if step > after]
    for path in [*abandoned, *(out_dir / "snapshots").glob(".step-*.tmp")]:
        path.unlink()
