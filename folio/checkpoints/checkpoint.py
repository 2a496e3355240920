"""Checkpoints: one directory each, written atomically, checksummed, without pickle, complete for sampling and resuming.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name, a tied one once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the complete tokenizer
                            state.json             format version, step, configuration, losses, the run's parts
                            manifest.json          bytes and sha256 of each of these
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the one with the lowest validation loss
    OUT_DIR/snapshots/      see folio/checkpoints/snapshots.py

Both names follow from the state.json of the checkpoints, which takes precedence over a pointer that is damaged or
disagrees.

A directory that is being written or removed has a name that begins with a dot. After a kill, the next start removes it.

docs/checkpoints.md describes each file.
"""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio.base.files import (
    FolderWatch,
    check_regular,
    json_bytes,
    read_json,
    sha256,
    sync,
)
from folio.base.progress import note
from folio.checkpoints.run_folder import (
    FORMAT_VERSION,
    CheckpointError,
    NoCheckpointError,
    RunFolder,
    as_checkpoint_error,
    check_file,
    check_state,
)
from folio.checkpoints.snapshots import write_snapshot
from folio.data import tokenizer
from folio.data.shards import PromptFormat
from folio.data.tokenizer import Tokenizer
from model import GPT, GPTConfig


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
    keep_last: int = 1,
    replace: bool = False,
) -> Path:
    """Write step-N into an existing folder, then the pointers; remove older checkpoints.

    The directory is written and synced under a temporary name and then renamed, so that at no moment a checkpoint is
    lost or incomplete. The best one and the newest `keep_last` (including this one) are kept. replace: the other
    checkpoints are another run's, and are all removed. Raises OSError if the directory cannot be written, and then
    leaves everything unchanged. A pointer that cannot be written is reported, and nothing is removed.
    """
    final = out_dir / f"step-{step:06d}"
    _write(final, model, optimizer, tokenizer, {"format_version": FORMAT_VERSION, "step": step, **state})
    folder = RunFolder(out_dir, last=final)
    try:
        folder.write_pointers()
    except OSError as error:
        note(f"{final} is saved, but not all pointers to checkpoints could be written ({error})")
        return final
    keep = {final} if replace else {*islice(folder.newest_first(), keep_last), *folder.named("best")}
    for path in folder.paths:
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
    temporary.mkdir()
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in model.items()}, temporary / "model.safetensors")
        save_file({name: t.contiguous().cpu() for name, t in optimizer.items()}, temporary / "optimizer.safetensors")
        (temporary / "tokenizer.json").write_bytes(json_bytes(tokenizer.to_json()))
        (temporary / "state.json").write_bytes(json_bytes(state))
        files = sorted(temporary.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        (temporary / "manifest.json").write_bytes(json_bytes(manifest))
        for path in temporary.iterdir():
            shutil.copymode(temporary / "manifest.json", path)  # safetensors makes its files readable by the owner only
            sync(path)
        sync(temporary)
        _replace(final, temporary)
    except SafetensorError as error:  # raised for a full disk
        raise OSError(str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(final: Path, temporary: Path) -> None:
    """Rename a complete checkpoint. The one that it replaces, if there is one, stays if this fails. Raises OSError.

    A run that was resumed from an earlier checkpoint reaches the same step again.
    """
    hidden = _hide(final)
    try:
        temporary.rename(final)
    except OSError:
        if hidden:
            hidden.rename(final)
        raise
    sync(final.parent)
    if hidden:
        shutil.rmtree(hidden, ignore_errors=True)


class Saver:
    """Writes a run's checkpoints and snapshots in the background, one at a time and in order.

    A context manager, which waits for the last one.
    """

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, keep_last: int, replace: bool = False):
        self.out_dir, self.tokenizer, self.keep_last = out_dir, tokenizer, keep_last
        self.replace = replace  # the first checkpoint replaces an earlier run's
        self.folder = FolderWatch(out_dir)
        self.thread = ThreadPoolExecutor(1, initializer=_lower_priority)
        self.writing: tuple[int, Future] | None = None  # a step and its save
        self.writing_snapshot: tuple[int, Future] | None = None

    def begin(self, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Start to `save` tensors that no longer change. Call wait() for the previous checkpoint before."""
        assert self.writing is None
        arguments = (self.out_dir, step, model, optimizer, self.tokenizer, state, self.keep_last, self.replace)
        self.writing = step, self.thread.submit(self._write, save, *arguments)

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
        self.writing_snapshot = step, self.thread.submit(self._write, write_snapshot, self.out_dir, step, weights)

    def wait_for_snapshot(self) -> str | None:
        """As wait(), for a snapshot."""
        writing, self.writing_snapshot = self.writing_snapshot, None
        return _wait_for(*writing) if writing else None

    def _write(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Call `write`. Raises FileNotFoundError if out_dir was moved: another run may own the folder at its path."""
        if not self.folder.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "the folder was moved or removed", str(self.out_dir))
        write(*arguments)

    def folder_is_in_place(self) -> bool:
        """Whether out_dir is still the folder that it was when this was created."""
        return self.folder.is_in_place()

    def folder_now(self) -> Path | None:
        """Where this folder is now, if that is known; None if it was removed."""
        return self.folder.current_path()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.shutdown()
        self.folder.close()


class NullSaver(Saver):
    """Writes nothing; for every rank but 0."""

    replace = False

    def __init__(self) -> None: ...

    def begin(self, *arguments: Any) -> None: ...

    def wait(self) -> None: ...

    def begin_snapshot(self, *arguments: Any) -> None: ...

    def wait_for_snapshot(self) -> None: ...

    def folder_is_in_place(self) -> bool:
        return True

    def folder_now(self) -> None: ...

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


def clear_unfinished(out_dir: Path) -> None:
    """Remove what a killed run left half-written or half-removed. Not while another run writes there."""
    for path in [*out_dir.glob(".step-*.tmp"), *out_dir.glob(".*.json*.tmp")]:
        with suppress(OSError):  # a leftover is harmless
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _remove(path: Path) -> None:
    """Remove a checkpoint, which is never seen incomplete. Raises OSError."""
    if hidden := _hide(path):
        shutil.rmtree(hidden)


def _hide(path: Path) -> Path | None:
    """Rename a checkpoint, so that it is no longer one; returns its new path. None if there is none, or only a link,
    which is removed. Raises OSError.
    """
    if path.is_symlink():
        path.unlink()
    if not path.is_dir():
        return None
    hidden = path.with_name(f".{path.name}.{os.getpid()}.removed.tmp")
    path.rename(hidden)
    return hidden


def load(path: Path, which: str = "last", *, optimizer: bool = True, lazy: bool = False) -> Checkpoint:
    """Load a checkpoint from its directory, or the "last" or "best" one of a run's folder.

    The size and sha256 of every file are checked against the manifest. With optimizer=False, the optimizer's file is
    not read and may be missing. lazy: with LazyTensors. In a run's folder, a pointer that is damaged or wrong is
    reported, and so is a damaged checkpoint, and the best or newest one of the others is loaded instead. A run without
    an evaluation has no best checkpoint; its last one is loaded. Raises CheckpointError.
    """
    if (path / "manifest.json").exists():
        return _read(path, optimizer, lazy)
    folder = RunFolder(path)
    if not folder.paths:
        raise NoCheckpointError(path)
    if folder.pointer_problem(which):
        folder = RunFolder(path)  # a run may have saved meanwhile
    if problem := folder.pointer_problem(which):
        note(problem)
    candidates = folder.candidates(which)
    for number, candidate in enumerate(candidates, start=1):
        try:
            return _read(candidate, optimizer, lazy)
        except CheckpointError as error:
            if number == len(candidates):
                raise
            note(f"{error}; loading {candidates[number].name}")
    raise AssertionError("there was a candidate")


def _read(path: Path, optimizer: bool, lazy: bool) -> Checkpoint:
    with as_checkpoint_error(path):
        manifest = read_json(path / "manifest.json")
        if not optimizer:
            del manifest["optimizer.safetensors"]
        with ThreadPoolExecutor() as pool:  # sha256 takes 0.7 s per GB; meanwhile, the tokenizer is built
            checks = {name: pool.submit(check_file, path, name, entry) for name, entry in manifest.items()}
            state = check_state(path, manifest)
            checks["tokenizer.json"].result()
            saved_tokenizer = tokenizer.from_json(read_json(path / "tokenizer.json"))
            for check in checks.values():
                check.result()
        check_regular(path / "model.safetensors")
        load_tensors = LazyTensors.of_file if lazy else load_file
        return Checkpoint(path, load_tensors(path / "model.safetensors"), saved_tokenizer, state)
