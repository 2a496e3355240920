"""Checkpoints: one directory each, written atomically, checksummed, without pickle, complete for sampling and resuming.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name; tied weights once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the complete tokenizer
                            state.json             format version, step, configuration, losses, the run's parts
                            manifest.json          size and sha256 of the other files
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the checkpoint with the lowest validation loss
    OUT_DIR/snapshots/      see folio/checkpoints/snapshots.py

The state.json files of the checkpoints determine both pointers, and take precedence over a damaged or wrong pointer.

While a directory is written or removed, its name begins with a dot. After a kill, the next start removes it. While a
directory is replaced by another one of the same step, it is in a hidden folder, where it is found if there is no other.

docs/code/files.md describes each file.
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
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from folio.base.files import (
    FolderWatch,
    check_regular,
    is_utf8,
    json_bytes,
    read_json,
    replace_folder,
    settle_folder,
    sha256,
    step_number,
    sync,
)
from folio.base.progress import note
from folio.base.settings import NOT_UTF8
from folio.checkpoints.build_model import model_from_tensors
from folio.checkpoints.identify import NoCheckpointError
from folio.checkpoints.run_folder import (
    FORMAT_VERSION,
    CheckpointError,
    RunFolder,
    as_checkpoint_error,
    check_file,
    check_state,
    newest_first,
    replaced_directories,
)
from folio.checkpoints.snapshots import write_snapshot
from folio.checkpoints.tensor_files import write_tensors
from folio.data import tokenizer
from folio.data.shards import PromptFormat
from folio.data.tokenizer import Tokenizer
from folio.machine import distributed
from model import GPT, GPTConfig

# The fields of GPTConfig that are settings of train.py. The data determine the others.
MODEL_SETTINGS = [field.name for field in fields(GPTConfig) if field.name not in ("vocab_size", "document_token")]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read on each access and not cached, so that only tensors in use take memory."""

    def __init__(self, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]):
        """read: returns the tensor of a name, in newly allocated memory."""
        self.shapes, self.read = shapes, read

    @classmethod
    def from_file(cls, path: Path) -> "LazyTensors":
        """The tensors of a safetensors file, not memory-mapped, because a mapping must fit into memory as a whole."""
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
        """The run's settings, with defaults for those that were added to model.py later; empty for other models."""
        saved = self.state.get("config")
        defaults = {name: getattr(GPTConfig, name) for name in MODEL_SETTINGS}
        return {**defaults, **saved} if saved else {}

    @property
    def prompt_format(self) -> PromptFormat | None:
        """The format of the training prompts; None for a run on plain text, and for a model of another program."""
        return self.state["dataset"]["prompt_format"] if "dataset" in self.state else None

    def config(self, **changes: Any) -> GPTConfig:
        """The model's GPTConfig, with `changes` to its fields. Raises CheckpointError."""
        with self._mismatch_errors():
            return GPTConfig(**{**self.state["model"], **changes})

    def build(self, **changes: Any) -> GPT:
        """Build the model, with `changes` to its GPTConfig. Raises CheckpointError.

        With LazyTensors, the model is on the meta device, without values.
        """
        config, tensors = self.config(**changes), self.model
        if isinstance(tensors, LazyTensors):
            tensors = {name: torch.empty(shape, device="meta") for name, shape in tensors.shapes.items()}
        with self._mismatch_errors():
            return model_from_tensors(config, tensors)

    @contextmanager
    def _mismatch_errors(self) -> Iterator[None]:
        """Turn errors from weights, state.json and model.py that do not match into CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{self.path}: the weights do not fit state.json, or model.py: {reason}") from None

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

    The directory is written and synced under a temporary name, then renamed, so that no checkpoint is ever lost or
    incomplete. Keeps the best checkpoint and the newest `keep_last`, including this one. replace: remove all other
    checkpoints, because they belong to another run. If the directory cannot be written, raises OSError and changes
    nothing. If a pointer cannot be written, prints a line and removes nothing.
    """
    final = out_dir / f"step-{step:06d}"
    _write(final, model, optimizer, tokenizer, {"format_version": FORMAT_VERSION, "step": step, **state})
    folder = RunFolder(out_dir, last=final)
    try:
        folder.write_pointers()
    except OSError as error:
        note(f"{final} is saved, but not all pointers to checkpoints could be written ({error})")
        return final
    keep = {final} if replace else {*islice(folder.newest_first(), keep_last), *folder.expected("best")}
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
    """Write a checkpoint's directory under a temporary name, sync it and rename it.

    If this fails, raises OSError, and an existing checkpoint of the same step stays.
    """
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, tensors in (("model", model), ("optimizer", optimizer)):
            on_cpu = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
            write_tensors(temporary / f"{name}.safetensors", on_cpu)
        (temporary / "tokenizer.json").write_bytes(json_bytes(tokenizer.to_json()))
        (temporary / "state.json").write_bytes(json_bytes(state))
        files = sorted(temporary.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        (temporary / "manifest.json").write_bytes(json_bytes(manifest))
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        replace_folder(temporary, final)  # one exists if the run has reached this step before, or was rolled back to it
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Saver:
    """Writes a run's checkpoints and snapshots in the background, one at a time and in order.

    As a context manager, it waits for the last write on exit.
    """

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, keep_last: int, replace: bool = False):
        self.out_dir, self.tokenizer, self.keep_last = out_dir, tokenizer, keep_last
        self.replace = replace  # whether the first checkpoint replaces those of another run
        self.folder = FolderWatch(out_dir)
        self.thread = ThreadPoolExecutor(1, initializer=_lower_priority)
        self.writing: dict[str, tuple[int, Future]] = {}  # "checkpoint" or "snapshot" -> its step, its write

    def begin(self, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Start to `save` a checkpoint. The tensors must not change. Wait for the previous one first."""
        arguments = (step, model, optimizer, self.tokenizer, state, self.keep_last, self.replace)
        self._begin("checkpoint", step, save, *arguments)

    def begin_snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """Start to write a snapshot. Wait for the previous one first."""
        self._begin("snapshot", step, write_snapshot, step, weights)

    def _begin(self, what: str, step: int, write: Callable[..., Any], *arguments: Any) -> None:
        assert what not in self.writing
        self.writing[what] = step, self.thread.submit(self._write, write, *arguments)

    def wait(self, what: Literal["checkpoint", "snapshot"]) -> str | None:
        """Wait for the pending checkpoint or snapshot, if there is one. Returns the reason of a failure, or None."""
        if what not in self.writing:
            return None
        step, future = self.writing.pop(what)
        error = future.exception()
        if error and not isinstance(error, OSError):
            raise error
        if what == "checkpoint" and not error:
            self.replace = False
        return f"step {step:,} could not be saved ({error})" if error else None

    def _write(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Write into out_dir. Raises FileNotFoundError if out_dir was moved: its path may belong to another run now."""
        if not self.folder.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "the folder was moved or removed", str(self.out_dir))
        write(self.out_dir, *arguments)

    def folder_is_in_place(self) -> bool:
        """Whether out_dir is still the same folder as at the start."""
        return self.folder.is_in_place()

    def current_folder(self) -> Path | None:
        """The current path of the run's folder; None if it was removed or its path is unknown."""
        return self.folder.current_path()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.shutdown()
        self.folder.close()


class NullSaver(Saver):
    """A Saver that writes nothing, for every rank except 0."""

    replace = False

    def __init__(self) -> None:
        self.writing = {}

    def begin(self, *arguments: Any) -> None: ...

    def begin_snapshot(self, *arguments: Any) -> None: ...

    def folder_is_in_place(self) -> bool:
        return True

    def current_folder(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...


def _lower_priority() -> None:
    """Lower this thread's priority: on a CPU, it would otherwise delay the threads of matmuls."""
    if sys.platform == "linux":  # only there, each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def clear_unfinished(out_dir: Path) -> None:
    """Restore checkpoints that a killed run was replacing, and remove its partly written or partly removed files.

    Not while another run writes to the folder. Raises OSError if a checkpoint cannot be restored.
    """
    for old in replaced_directories(out_dir):
        settle_folder(out_dir / old.name)
    leftovers = (".step-*.tmp", ".step-*.replaced", ".*.json*.tmp")
    for path in [path for pattern in leftovers for path in out_dir.glob(pattern)]:
        with suppress(OSError):  # a leftover is harmless
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _remove(path: Path) -> None:
    """Remove a checkpoint, or a link to one, so that it is never visible incomplete. Raises OSError."""
    if path.is_symlink():
        path.unlink()
        return
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.rename(hidden)
    shutil.rmtree(hidden)


def load(path: Path, which: str = "last", *, optimizer: bool = True, lazy: bool = False) -> Checkpoint:
    """Load a checkpoint from its directory, or the "last" or "best" checkpoint from a run's folder.

    The size and sha256 of every file are checked against the manifest. optimizer: if False, the optimizer's file is
    not read and may be missing. lazy: with LazyTensors. In a run's folder, a damaged or wrong pointer and a damaged
    checkpoint are reported, and the next best or newest checkpoint is loaded instead. "best" loads the last checkpoint
    of a run without evaluations. Raises CheckpointError.
    """
    if not is_utf8(str(path)):
        raise CheckpointError(f"{path}: {NOT_UTF8}")
    if (path / "manifest.json").exists():
        return _read(path, optimizer, lazy)
    folder = RunFolder(path)
    if not folder.paths:
        raise NoCheckpointError(path)
    if folder.pointer_problem(which):
        folder = RunFolder(path)  # read again, because a run may have just saved
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


def load_before(out_dir: Path, step: int) -> Checkpoint | None:
    """The newest intact checkpoint of a run before `step`, or None. Damaged checkpoints are reported and skipped."""
    for path in newest_first(out_dir):
        if step_number(path.name) < step:
            try:
                return load(path)
            except CheckpointError as error:
                problem = f"{path} was removed" if isinstance(error, NoCheckpointError) else error
                if distributed.rank_from_env() == 0:
                    note(f"{problem}; using an earlier checkpoint")
    return None


def _read(path: Path, optimizer: bool, lazy: bool) -> Checkpoint:
    with as_checkpoint_error(path):
        manifest = read_json(path / "manifest.json")
        if not optimizer:
            del manifest["optimizer.safetensors"]
        with ThreadPoolExecutor() as pool:  # sha256 takes 0.7 s per GB, while the tokenizer is built
            checks = {name: pool.submit(check_file, path, name, entry) for name, entry in manifest.items()}
            state = check_state(path, manifest)
            checks["tokenizer.json"].result()
            saved_tokenizer = tokenizer.from_json(read_json(path / "tokenizer.json"))
            for check in checks.values():
                check.result()
        check_regular(path / "model.safetensors")
        load_tensors = LazyTensors.from_file if lazy else load_file
        return Checkpoint(path, load_tensors(path / "model.safetensors"), saved_tokenizer, state)
