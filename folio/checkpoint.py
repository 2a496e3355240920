"""One directory a checkpoint: whole or absent, checksummed, free of pickle, and all that sampling or resuming needs.

    OUT_DIR/step-000250/    model.safetensors      the weights by parameter name, a tied one once
                            optimizer.safetensors  the optimizer's state, as PARAMETER/KEY
                            tokenizer.json         the tokenizer, whole
                            state.json             format version, step, configuration, losses, the next sequence
                            manifest.json          bytes and sha256 of each of these
    OUT_DIR/last.json       names the newest checkpoint
    OUT_DIR/best.json       names the one with the lowest validation loss

What is being written or removed has a name that begins with a dot; after a kill, the next start clears it away.

docs/checkpoints.md describes each file.
"""

import os
import shutil
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, tokenizer
from folio.files import read_json, sha256, sync, write_json
from folio.tokenizer import Tokenizer

FORMAT_VERSION = 1


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit."""


Model = TypeVar("Model")
STATE = {  # what state.json holds at least
    "format_version": int,
    "step": int,
    "next_sequence": int,
    "best_step": int,
    "evaluations_since_best": int,
    **dict.fromkeys(("model", "config", "resolved", "dataset", "guard", "grad_scaler", "versions"), dict),
}


@dataclass(frozen=True)
class Checkpoint:
    """What one directory held. Tensors are on the CPU; `state` is state.json."""

    path: Path
    model: dict[str, Tensor]
    tokenizer: Tokenizer
    state: dict[str, Any]

    def build(self, model: type[Model], config: type, **changes: Any) -> Model:
        """The model: model.GPT made from its GPTConfig, some of whose fields may be changed. Raises CheckpointError."""
        try:
            return model.from_tensors(config(**{**self.state["model"], **changes}), self.model)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: the weights do not fit state.json: {error}") from None

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

    replace: the checkpoints that are there are of another run, and go when this one is safe.

    Of the older checkpoints the best and the newest `keep_last` (this one among them) stay; the others go when this one
    is safe. The directory is written and synced under a temporary name and renamed, so that at no moment a checkpoint
    is lost or half there. Raises OSError where the disk does not take it, and then leaves all as it was.
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
        _remove(final)  # of a run that went back to an earlier checkpoint and has come here again
        temporary.rename(final)
        sync(out_dir)
    except SafetensorError as error:  # its word for a full disk
        raise OSError(str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if replace and not best:
        (out_dir / "best.json").unlink(missing_ok=True)
    # best.json first: a run killed between the two goes on from the checkpoint before, and comes to this best again.
    for pointer in ("best", "last") if best else ("last",):
        write_json(out_dir / f"{pointer}.json", {"checkpoint": final.name})
    there = _directories(out_dir)
    upto = there.index(final) + 1
    keep = {final} if replace else {*there[max(0, upto - keep_last) : upto], _named(out_dir, "best")}
    for path in there:
        if path not in keep:
            with suppress(OSError):  # the new checkpoint is safe: an old one that cannot be removed is not a failure
                _remove(path)
    return final


class Saver:
    """Writes a run's checkpoints one at a time, behind it. A context manager; its end is the end of what is written."""

    def __init__(self, out_dir: Path, tokenizer: Tokenizer, keep_last: int, replace: bool = False):
        self.out_dir, self.tokenizer, self.keep_last = out_dir, tokenizer, keep_last
        self.replace = replace  # the first checkpoint takes the place of an earlier run's
        self.thread = ThreadPoolExecutor(1, initializer=_step_back)
        self.writing: tuple[int, Future] | None = None  # a step, and what comes of it

    def begin(
        self, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], best: bool
    ) -> None:
        """Begin to `save` what must not change from here on; when the one before has been waited for."""
        assert self.writing is None
        of_all = (self.out_dir, step, model, optimizer, self.tokenizer, state, best, self.keep_last, self.replace)
        self.writing = step, self.thread.submit(save, *of_all)

    def wait(self) -> str | None:
        """Until nothing is being written. Returns why it could not be, if it could not."""
        if not self.writing:
            return None
        (step, written), self.writing = self.writing, None
        error = written.exception()
        self.replace = self.replace and error is not None
        if error and not isinstance(error, OSError):
            raise error
        return f"step {step:,} could not be saved ({error})" if error else None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.shutdown()


def _step_back() -> None:
    """Have this thread take what time the others leave. On a CPU, the threads of a matmul wait for the slowest one."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def exists(out_dir: Path) -> bool:
    """Whether the folder holds a checkpoint, so that a new run would write over an old one."""
    return bool(_directories(out_dir))


def last_state(out_dir: Path) -> dict[str, Any]:
    """What state.json says in the newest checkpoint."""
    return read_json((_named(out_dir, "last") or _directories(out_dir)[-1]) / "state.json")


def written_by(out_dir: Path) -> str | None:
    """The id of the torchrun that wrote the newest checkpoint whose state.json can be read, or None."""
    for path in reversed(_directories(out_dir)):
        with suppress(OSError, ValueError, LookupError, TypeError):
            return read_json(path / "state.json")["torchrun"]
    return None


def clear_unfinished(out_dir: Path) -> None:
    """Remove what a run that was killed left half-written or half-removed. Not while another run writes there."""
    for path in [*out_dir.glob(".step-*.tmp"), *out_dir.glob(".*.json*.tmp")]:
        with suppress(OSError):  # a leftover does no harm
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _directories(out_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    found = [path for path in out_dir.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _named(out_dir: Path, pointer: str) -> Path | None:
    """The checkpoint that last.json or best.json names, or None if it is not there."""
    try:
        name = read_json(out_dir / f"{pointer}.json")["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((path for path in _directories(out_dir) if path.name == name), None)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that it is never seen half there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        hidden = path.with_name(f".{path.name}.{os.getpid()}.removed.tmp")
        path.rename(hidden)
        shutil.rmtree(hidden)


def load(path: Path, which: str = "last") -> Checkpoint:
    """Load a checkpoint: `path` is its directory, or a run's folder, of which `which` ("last" or "best") is taken.

    The size and sha256 of every file are checked against the manifest. In a run's folder a checkpoint that is damaged
    is named and passed over for the newest one before it; a run that has not been evaluated yet has no best one, and
    there the last is taken. Raises CheckpointError.
    """
    if (path / "manifest.json").exists() or not (others := _directories(path)):
        return _read(path)
    first = [_named(path, which), _named(path, "last")]
    if first[1]:
        others = others[: others.index(first[1])]  # not those of a run that went back behind them
    candidates = list(dict.fromkeys(c for c in [*first, *reversed(others)] if c))
    for number, candidate in enumerate(candidates, start=1):
        try:
            return _read(candidate)
        except CheckpointError as error:
            if number == len(candidates):
                raise
            print(f"{error}; taking {candidates[number].name}", file=sys.stderr)
    raise AssertionError("there was a candidate")


def _read(path: Path) -> Checkpoint:
    if not (path / "manifest.json").exists():
        advice = "it is not a checkpoint's folder" if path.exists() else "train one first, or check --out_dir"
        raise CheckpointError(f"{path} holds no checkpoint: {advice}")
    try:
        for name, entry in read_json(path / "manifest.json").items():
            if Path(name).name != name:
                raise CheckpointError(f"{path}: manifest.json names a file outside its folder: {name}")
            file = path / name
            if not file.exists() or file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
                what = "has changed since it was written" if file.exists() else "is missing"
                raise CheckpointError(f"{file} {what}: this checkpoint is damaged")
        state = read_json(path / "state.json")
        if state["format_version"] != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format version {state['format_version']} is not {FORMAT_VERSION}")
        if wrong := [name for name, kind in STATE.items() if not isinstance(state[name], kind)]:
            raise CheckpointError(f"{path}: state.json is not as Folio writes it: {', '.join(wrong)}")
        made_with = tokenizer.from_json(read_json(path / "tokenizer.json"))
        return Checkpoint(path, load_file(path / "model.safetensors"), made_with, state)
    except (ValueError, LookupError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error or type(error).__name__}") from None
