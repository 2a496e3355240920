"""Checkpoints: one directory each, written atomically, checksummed, without pickle, complete for sampling and resuming.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name, a tied one once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the complete tokenizer
                            state.json             format version, step, configuration, losses, the next sequence
                            manifest.json          bytes and sha256 of each of these
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the one with the lowest validation loss
    OUT_DIR/snapshots/      see folio/snapshots.py

Both names follow from the state.json of the checkpoints, which decides if a pointer is damaged or says otherwise.

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
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, tokenizer
from folio.files import (
    FolderWatch,
    check_regular,
    json_bytes,
    read_json,
    sha256,
    short_repr,
    shorten,
    step_number,
    sync,
    write_json,
)
from folio.progress import note
from folio.shards import PromptFormat
from folio.snapshots import write_snapshot
from folio.state import wrong_values
from folio.tokenizer import Tokenizer
from model import GPT, GPTConfig

FORMAT_VERSION = 1
POINTERS = ("last", "best")


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
    keep = {final} if replace else {*folder.newest_first()[:keep_last], *folder.named("best")}
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


def restore_pointers(out_dir: Path) -> None:
    """Write last.json and best.json again if they are damaged or do not name what the checkpoints say, with a line
    about each. Not while another run writes there. Raises OSError.
    """
    folder = RunFolder(out_dir)
    for pointer in POINTERS:
        if problem := folder.pointer_problem(pointer):
            note(f"{problem}; it is written again")
    folder.write_pointers()


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
        return self.folder.where()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.shutdown()
        self.folder.close()


class NullSaver(Saver):
    """Writes nothing; for every rank but 0."""

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


def exists(out_dir: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return bool(directories(out_dir))


def last_state(out_dir: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint. Raises CheckpointError if it is damaged, LookupError if there is none."""
    return read_state(newest_first(out_dir)[0])


def written_by(out_dir: Path) -> str | None:
    """The id of the torchrun that wrote the newest checkpoint with a readable state.json, or None."""
    for path in reversed(directories(out_dir)):
        with suppress(CheckpointError):
            return read_state(path).get("torchrun")
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
    """The checkpoints in a run's folder from the last one back; see RunFolder."""
    return RunFolder(out_dir).newest_first()


def precedes(state: dict[str, Any], newest: dict[str, Any]) -> bool:
    """Whether a checkpoint is of the same past as a newer one, whose run may have been resumed from a step before it.

    state, newest: state.json of the two.
    """
    resumes, resumed_since = (of.get("resumes") or [] for of in (state, newest))
    is_same_run = state.get("run_id") == newest.get("run_id")
    is_same_past = resumes == [r for r in resumed_since if r["step"] < state["step"]]
    return is_same_run and is_same_past and state["step"] < newest["step"]


class RunFolder:
    """The checkpoints in a run's folder as they are now, and which of them is the last and the best."""

    def __init__(self, out_dir: Path, last: Path | None = None):
        """last: the last checkpoint, if it is known."""
        self.out_dir, self.paths, self.last = out_dir, directories(out_dir), last
        self._states: dict[Path, dict[str, Any] | None] = {}

    def pointer(self, pointer: str) -> Path | None:
        """The checkpoint that last.json or best.json names, or None if it does not exist."""
        try:
            name = read_json(self.out_dir / f"{pointer}.json")["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return next((path for path in self.paths if path.name == name), None)

    def state(self, path: Path) -> dict[str, Any] | None:
        """state.json of a checkpoint; None if it is damaged."""
        if path not in self._states:
            self._states[path] = None
            with suppress(CheckpointError):
                self._states[path] = read_state(path)
        return self._states[path]

    def newest_first(self) -> list[Path]:
        """The checkpoints from the last one back.

        The last one is the one that last.json names, or a later one that continues it: a kill or a full disk may have
        prevented the pointer. Other later ones belong to another run, or to one that was resumed from an earlier step.
        """
        last = self.last or self.pointer("last")
        if last is None:
            return self.paths[::-1]
        end = self.paths.index(last)
        if self.last:
            return self.paths[end::-1]
        for number, path in enumerate(self.paths[end + 1 :], start=end + 1):
            state, later = self.state(last), self.state(path)
            end = number if state and later and precedes(state, later) else end
        return self.paths[end::-1]

    def best_first(self) -> list[Path]:
        """The checkpoints that were the run's best when they were saved, the one with the lowest loss first.

        Before them, the one that the last checkpoint says is the best, if its state is damaged.
        """
        states = {path: state for path in self.paths if (state := self.state(path))}
        last = next((states[path] for path in self.newest_first() if path in states), None)
        if last is None:
            return []
        losses = {
            path: (state["best_val_loss"], state["step"])
            for path, state in states.items()
            if 0 < state["best_step"] == state["step"] and state.get("run_id") == last.get("run_id")
        }
        damaged = [path for path in self.paths if path not in states and step_number(path.name) == last["best_step"]]
        return [*damaged, *sorted(losses, key=losses.__getitem__)]

    def candidates(self, which: str) -> list[Path]:
        """The checkpoints to load for the "last" or "best" one, until one is intact."""
        if which == "last":
            return self.newest_first()
        return list(dict.fromkeys([*self.best_first(), *self.newest_first()]))

    def named(self, pointer: str) -> list[Path]:
        """The checkpoint that last.json or best.json should name, if there is one."""
        return (self.newest_first() if pointer == "last" else self.best_first())[:1]

    def pointer_problem(self, pointer: str) -> str | None:
        """A line if last.json or best.json does not name the checkpoint that it should, or None."""
        file, named, right = self.out_dir / f"{pointer}.json", self.pointer(pointer), self.named(pointer)
        if [named] == right or not (right or file.exists()):
            return None
        problem = "is missing"
        if file.exists():
            problem = f"names {named.name}" if named else "names no checkpoint"
        return f"{file} {problem}; the checkpoints say that {right[0].name if right else 'none'} is the {pointer} one"

    def write_pointers(self) -> None:
        """Write last.json and best.json if they do not name what they should. Raises OSError."""
        self.out_dir.stat()  # it may have been moved, and is not created again
        for pointer in POINTERS:
            right, file = self.named(pointer), self.out_dir / f"{pointer}.json"
            if not right:
                file.unlink(missing_ok=True)
            elif right != [self.pointer(pointer)]:
                write_json(file, {"checkpoint": right[0].name})


def _runs_beside(path: Path) -> list[Path]:
    """The folders with checkpoints in the folder of `path`, and that folder; the one with the newest one first."""
    with suppress(OSError):  # the folder does not exist, or cannot be read
        runs = [run for run in (path.parent, *path.parent.iterdir()) if exists(run)]
        return sorted(runs, key=lambda run: directories(run)[-1].stat().st_mtime, reverse=True)
    return []


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


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, as the manifest says and with values that a run can have. Raises CheckpointError."""
    with _damage(path):
        return _read_state(path, read_json(path / "manifest.json"))


def _read_state(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    _check_file(path, "state.json", manifest["state.json"])
    state = read_json(path / "state.json")
    if state["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {short_repr(state['format_version'])} is not {FORMAT_VERSION}")
    if wrong := wrong_values(state):
        raise CheckpointError(f"{path}: state.json is not as Folio writes it: {', '.join(wrong)}")
    if step_number(path.name) not in (None, state["step"]):  # None: it is a copy with another name
        raise CheckpointError(f"{path} holds step {state['step']:,}: it was renamed, or replaced by another")
    return state


def _read(path: Path, optimizer: bool, lazy: bool) -> Checkpoint:
    with _damage(path):
        manifest = read_json(path / "manifest.json")
        if not optimizer:
            del manifest["optimizer.safetensors"]
        with ThreadPoolExecutor() as pool:  # sha256 takes 0.7 s per GB; meanwhile, the tokenizer is built
            checks = {name: pool.submit(_check_file, path, name, entry) for name, entry in manifest.items()}
            state = _read_state(path, manifest)
            checks["tokenizer.json"].result()
            saved_tokenizer = tokenizer.from_json(read_json(path / "tokenizer.json"))
            for check in checks.values():
                check.result()
        check_regular(path / "model.safetensors")
        load_tensors = LazyTensors.of_file if lazy else load_file
        return Checkpoint(path, load_tensors(path / "model.safetensors"), saved_tokenizer, state)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Raise CheckpointError for what a damaged file of the checkpoint raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing: this checkpoint is damaged") from None
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
