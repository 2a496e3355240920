"""Checkpoints: one directory each, written atomically, checksummed, without pickle, complete for sampling and resuming.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name, a tied one once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the complete tokenizer
                            state.json             format version, step, configuration, losses, the next sequence
                            manifest.json          bytes and sha256 of each of these
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the one with the lowest validation loss
    OUT_DIR/snapshots/      see folio/snapshots.py

A directory that is being written or removed has a name that begins with a dot. After a kill, the next start removes it.

docs/checkpoints.md describes each file.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, tokenizer
from folio.files import check_regular, read_json, sha256, short_repr, shorten, step_number, sync, write_json
from folio.shards import PromptFormat
from folio.snapshots import write_snapshot
from folio.state import SCHEMA
from folio.tokenizer import Tokenizer
from model import GPT, GPTConfig

FORMAT_VERSION = 1


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit."""


class NoCheckpointError(CheckpointError):
    """A folder without a checkpoint. The message names the newest runs beside it, or the command that trains one.

    option: what precedes a run's folder on the command line, such as "--out_dir=".
    """

    def __init__(self, path: Path, option: str = ""):
        self.path = path
        runs = " or ".join(f"{option}{run}" for run in _runs_beside(path)[:3])
        advice = f"try {runs}" if runs else "train one first: python train.py config/shakespeare_char.py"
        super().__init__(f"{path} holds no checkpoint: {advice}")


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for and not kept, so that only those in use take memory."""

    def __init__(self, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]):
        """read: the tensor of a name, in memory of its own."""
        self.shapes, self.read = shapes, read

    @classmethod
    def of_file(cls, path: Path) -> "LazyTensors":
        """Those of a safetensors file. It is not mapped: a mapping stays in memory, and must fit into it as a whole."""
        file = safe_open(path, framework="pt", backend="pread")
        names = file.keys()
        return cls({name: file.get_slice(name).get_shape() for name in names}, file.get_tensor)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. Tensors are on the CPU; `state` is state.json."""

    path: Path
    model: Mapping[str, Tensor]
    tokenizer: Tokenizer
    state: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """The settings of the run, with defaults for model settings newer than it; empty if none are recorded."""
        recorded = self.state.get("config")
        defaults = {field.name: field.default for field in fields(GPTConfig) if field.name != "vocab_size"}
        return {**defaults, **recorded} if recorded else {}

    @property
    def prompt_format(self) -> PromptFormat | None:
        """How the prompts that the run was trained on are written; None: it was trained on text, or does not say."""
        dataset = self.state.get("dataset")
        value = dataset.get("prompt_format") if isinstance(dataset, dict) else None
        return value if value in get_args(PromptFormat) else None

    def config(self, **changes: Any) -> GPTConfig:
        """The model's GPTConfig, of which `changes` replace fields. Raises CheckpointError."""
        with self._fitting():
            return GPTConfig(**{**self.state["model"], **changes})

    def build(self, **changes: Any) -> GPT:
        """The model; `changes` replace fields of its GPTConfig. Raises CheckpointError.

        With LazyTensors it is on the meta device: it has shapes and no values.
        """
        config, tensors = self.config(**changes), self.model
        if isinstance(tensors, LazyTensors):
            tensors = {name: torch.empty(shape, device="meta") for name, shape in tensors.shapes.items()}
        with self._fitting():
            return GPT.from_tensors(config, tensors)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            first = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{self.path}: the weights do not fit state.json, or model.py: {first}") from None

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
    keep_last: int = 1,
    replace: bool = False,
) -> Path:
    """Write step-N, point last.json at it, and best.json too if it is the best.

    The directory is written and synced under a temporary name and then renamed, so that at no moment a checkpoint is
    lost or incomplete. Afterwards older checkpoints are removed, except the best and the newest `keep_last` (including
    this one). replace: the older checkpoints are another run's, and are all removed. Raises OSError if the disk refuses
    it, and then leaves everything unchanged.
    """
    final = out_dir / f"step-{step:06d}"
    _write(final, model, optimizer, tokenizer, {"format_version": FORMAT_VERSION, "step": step, **state})
    if replace and not best:
        (out_dir / "best.json").unlink(missing_ok=True)
    # best.json first: a run killed in between resumes from the checkpoint before, and reaches this best again.
    for pointer in ("best", "last") if best else ("last",):
        write_json(out_dir / f"{pointer}.json", {"checkpoint": final.name})
    checkpoints = directories(out_dir)
    end = checkpoints.index(final) + 1
    keep = {final} if replace else {*checkpoints[max(0, end - keep_last) : end], _named(out_dir, "best")}
    for path in checkpoints:
        if path not in keep:
            with suppress(OSError):  # failing to remove an old checkpoint is not an error
                _remove(path)
    return final


def _write(
    final: Path,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tokenizer: Tokenizer,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint's directory under a temporary name, sync it, and rename it. Raises OSError."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in model.items()}, temporary / "model.safetensors")
        save_file({name: t.contiguous().cpu() for name, t in optimizer.items()}, temporary / "optimizer.safetensors")
        write_json(temporary / "tokenizer.json", tokenizer.to_json())
        write_json(temporary / "state.json", state)
        files = sorted(temporary.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        write_json(temporary / "manifest.json", manifest)
        for path in files:
            shutil.copymode(temporary / "manifest.json", path)  # safetensors makes its files readable by the owner only
            sync(path)
        sync(temporary)
        _remove(final)  # of a run that was resumed from an earlier checkpoint and reached this step again
        temporary.rename(final)
        sync(final.parent)
    except SafetensorError as error:  # raised for a full disk
        raise OSError(str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Saver:
    """Writes a run's checkpoints and snapshots in the background, one at a time and in order.

    A context manager, which waits for the last one.
    """

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, keep_last: int, replace: bool = False):
        self.out_dir, self.tokenizer, self.keep_last = out_dir, tokenizer, keep_last
        self.replace = replace  # the first checkpoint replaces an earlier run's
        self.thread = ThreadPoolExecutor(1, initializer=_lower_priority)
        self.writing: tuple[int, Future] | None = None  # a step and its save
        self.writing_snapshot: tuple[int, Future] | None = None

    def begin(
        self, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], best: bool
    ) -> None:
        """Start to `save` tensors that no longer change. Call wait() for the previous checkpoint before."""
        assert self.writing is None
        arguments = (self.out_dir, step, model, optimizer, self.tokenizer, state, best, self.keep_last, self.replace)
        self.writing = step, self.thread.submit(save, *arguments)

    def wait(self) -> str | None:
        """Wait for the checkpoint that is being written. Returns why it failed, or None."""
        if not self.writing:
            return None
        writing, self.writing = self.writing, None
        failure = _wait_for(*writing)
        self.replace = self.replace and failure is not None
        return failure

    def begin_snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """As begin(), for a snapshot. Call wait_for_snapshot() for the previous one before."""
        assert self.writing_snapshot is None
        self.writing_snapshot = step, self.thread.submit(write_snapshot, self.out_dir, step, weights)

    def wait_for_snapshot(self) -> str | None:
        """As wait(), for a snapshot."""
        writing, self.writing_snapshot = self.writing_snapshot, None
        return _wait_for(*writing) if writing else None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.shutdown()


class NullSaver(Saver):
    """Writes nothing; for every rank but 0."""

    def __init__(self) -> None: ...

    def begin(self, *arguments: Any) -> None: ...

    def wait(self) -> None: ...

    def begin_snapshot(self, *arguments: Any) -> None: ...

    def wait_for_snapshot(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...


def _wait_for(step: int, future: Future) -> str | None:
    """Wait until a step is written. Returns why it failed, or None."""
    error = future.exception()
    if error and not isinstance(error, OSError):
        raise error
    return f"step {step:,} could not be saved ({error})" if error else None


def _lower_priority() -> None:
    """Give other threads precedence over this one. On a CPU, the threads of a matmul wait for the slowest of them."""
    if sys.platform == "linux":  # threads have their own priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def exists(out_dir: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return bool(directories(out_dir))


def last_state(out_dir: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint."""
    return read_json(newest_first(out_dir)[0] / "state.json")


def written_by(out_dir: Path) -> str | None:
    """The id of the torchrun that wrote the newest checkpoint with a readable state.json, or None."""
    for path in reversed(directories(out_dir)):
        with suppress(OSError, ValueError, LookupError, TypeError):
            return read_json(path / "state.json")["torchrun"]
    return None


def clear_unfinished(out_dir: Path) -> None:
    """Remove what a killed run left half-written or half-removed. Not while another run writes there."""
    for path in [*out_dir.glob(".step-*.tmp"), *out_dir.glob(".*.json*.tmp")]:
        with suppress(OSError):  # a leftover is harmless
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def directories(out_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    numbered = [path for path in out_dir.glob("step-*") if path.is_dir() and step_number(path.name) is not None]
    return sorted(numbered, key=lambda path: step_number(path.name))


def newest_first(out_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder from the last one back; later ones belong to a run that was resumed from an
    earlier step.
    """
    paths, last = directories(out_dir), _named(out_dir, "last")
    return paths[paths.index(last) :: -1] if last in paths else paths[::-1]


def _named(out_dir: Path, pointer: str) -> Path | None:
    """The checkpoint that last.json or best.json names, or None if it does not exist."""
    try:
        name = read_json(out_dir / f"{pointer}.json")["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((path for path in directories(out_dir) if path.name == name), None)


def _runs_beside(path: Path) -> list[Path]:
    """The folders with checkpoints in the folder of `path`, and that folder; the one with the newest one first."""
    with suppress(OSError):  # the folder does not exist, or cannot be read
        runs = [run for run in (path.parent, *path.parent.iterdir()) if exists(run)]
        return sorted(runs, key=lambda run: directories(run)[-1].stat().st_mtime, reverse=True)
    return []


def _remove(path: Path) -> None:
    """Remove a checkpoint, which is never seen incomplete."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        hidden = path.with_name(f".{path.name}.{os.getpid()}.removed.tmp")
        path.rename(hidden)
        shutil.rmtree(hidden)


def load(path: Path, which: str = "last", *, optimizer: bool = True, lazy: bool = False) -> Checkpoint:
    """Load a checkpoint from its directory, or the "last" or "best" one of a run's folder.

    The size and sha256 of every file are checked against the manifest. With optimizer=False, the optimizer's file is
    not read and may be missing. lazy: with LazyTensors. In a run's folder, a damaged checkpoint is reported and the
    newest one before it is loaded instead. A run without an evaluation has no best checkpoint; its last one is loaded.
    Raises CheckpointError.
    """
    if (path / "manifest.json").exists() or not (others := newest_first(path)):
        return _read(path, optimizer, lazy)
    candidates = list(dict.fromkeys(c for c in [_named(path, which), *others] if c))
    for number, candidate in enumerate(candidates, start=1):
        try:
            return _read(candidate, optimizer, lazy)
        except CheckpointError as error:
            if number == len(candidates):
                raise
            print(f"{error}; loading {candidates[number].name}", file=sys.stderr)
    raise AssertionError("there was a candidate")


def _read(path: Path, optimizer: bool, lazy: bool) -> Checkpoint:
    if not (path / "manifest.json").exists():
        raise NoCheckpointError(path)
    try:
        manifest = read_json(path / "manifest.json")
        if not optimizer:
            del manifest["optimizer.safetensors"]
        with ThreadPoolExecutor() as pool:  # sha256 takes 0.7 s per GB; meanwhile, the tokenizer is built
            checks = {name: pool.submit(_check_file, path, name, entry) for name, entry in manifest.items()}
            checks["state.json"].result()
            state = read_json(path / "state.json")
            if state["format_version"] != FORMAT_VERSION:
                raise CheckpointError(
                    f"{path}: format version {short_repr(state['format_version'])} is not {FORMAT_VERSION}"
                )
            if wrong := [name for name, kind in SCHEMA.items() if not isinstance(state.get(name), kind)]:
                raise CheckpointError(f"{path}: state.json is not as Folio writes it: {', '.join(wrong)}")
            checks["tokenizer.json"].result()
            saved_tokenizer = tokenizer.from_json(read_json(path / "tokenizer.json"))
            for check in checks.values():
                check.result()
        check_regular(path / "model.safetensors")
        load_tensors = LazyTensors.of_file if lazy else load_file
        return Checkpoint(path, load_tensors(path / "model.safetensors"), saved_tokenizer, state)
    except (ValueError, LookupError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {shorten(str(error)) or type(error).__name__}") from None


def _check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Raise CheckpointError if a file of a checkpoint is not as the manifest's entry says."""
    if Path(name).name != name:
        raise CheckpointError(f"{folder}: manifest.json names a file outside its folder: {short_repr(name)}")
    file = folder / name
    if not file.exists() or file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        what = "has changed since it was written" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {what}: this checkpoint is damaged")
