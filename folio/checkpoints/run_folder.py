"""The checkpoints in a run's folder: the list of them, the last and the best one, and the content of state.json.

A run has parts: one from its start, and one from each resume and rollback. state.json records them; see
schema.PartRecord.

This module does not read weights and needs no torch. docs/code/files.md describes each file.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from folio import UserError
from folio.base.files import (
    other_version,
    read_json,
    refuse_lfs_pointer,
    sha256,
    short_repr,
    shorten,
    step_number,
    write_json,
)
from folio.base.progress import note
from folio.checkpoints.schema import check_fields, measured_text, with_missing_fields

FORMAT_VERSION = 2  # of state.json
POINTERS = ("last", "best")


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not match."""


def directories(out_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first.

    A checkpoint whose replacement was interrupted by a kill is found at its temporary path; see files.replace_folder.
    """
    by_name = {path.name: path for path in _numbered(out_dir, "step-*")}
    by_name = {path.name: path for path in replaced_directories(out_dir)} | by_name
    return sorted(by_name.values(), key=lambda path: step_number(path.name))


def replaced_directories(out_dir: Path) -> list[Path]:
    """Checkpoints that a save was replacing: it still does, or was killed, or could not remove them afterwards."""
    return _numbered(out_dir, ".step-*.replaced/step-*")


def _numbered(out_dir: Path, pattern: str) -> list[Path]:
    return [path for path in out_dir.glob(pattern) if path.is_dir() and step_number(path.name) is not None]


def newest_first(out_dir: Path) -> Iterator[Path]:
    """The checkpoints in a run's folder, newest first; see RunFolder.newest_first."""
    return RunFolder(out_dir).newest_first()


def precedes(state: dict[str, Any], newest: dict[str, Any]) -> bool:
    """Whether a checkpoint is from an earlier step of the run that saved the newest one, possibly before a resume.

    state, newest: state.json of the two.
    """
    following = _parts_after(state, newest)
    return following is not None and state["step"] < newest["step"] and all(p[0] >= state["step"] for p in following)


def supersedes(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved after another one of the same run: at a later step, or after a resume or rollback
    that the other one does not know. state, other: state.json of the two.
    """
    following = _parts_after(other, state)
    return following is not None and (bool(following) or state["step"] > other["step"])


def _parts_after(state: dict[str, Any], later: dict[str, Any]) -> list[list[Any]] | None:
    """The parts of a run that began after a state was saved, according to a later one; None if they are not in one
    history.
    """
    names = ("from_step", "after", "changes", "exact")  # of a part; the other fields may be filled in later
    parts, later_parts = ([[part[name] for name in names] for part in s["parts"][1:]] for s in (state, later))
    is_one_history = state["run_id"] == later["run_id"] and parts == later_parts[: len(parts)]
    return later_parts[len(parts) :] if is_one_history else None


class RunFolder:
    """The checkpoints in a run's folder at this moment, and which of them are the last and the best."""

    def __init__(self, out_dir: Path, last: Path | None = None):
        """last: the last checkpoint, if known."""
        self.out_dir, self.paths, self.last = out_dir, directories(out_dir), last
        self._states: dict[Path, dict[str, Any] | None] = {}

    def pointer(self, pointer: str) -> Path | None:
        """The checkpoint that last.json or best.json names; None if it does not exist."""
        try:
            name = read_json(self.out_dir / f"{pointer}.json")["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None
        return next((path for path in self.paths if path.name == name), None)

    def state(self, path: Path) -> dict[str, Any] | None:
        """state.json of a checkpoint; None if it is damaged."""
        if path not in self._states:
            self._states[path] = None
            with suppress(CheckpointError):
                self._states[path] = read_state(path)
        return self._states[path]

    def newest_first(self) -> Iterator[Path]:
        """The checkpoints from the newest back, without those after a step from which the run was resumed.

        The newest is named by last.json, or supersedes the named one, if a kill or a full disk prevented the update of
        the pointer. Other checkpoints with higher steps are from another run, or from before a resume at an earlier
        step.
        """
        last = self.last or self.pointer("last")
        if last is None:
            yield from reversed(self.paths)
            return
        for path in self.paths if not self.last else ():
            state, last_state = self.state(path), self.state(last)
            last = path if state and last_state and supersedes(state, last_state) else last
        yield last
        earlier = self.paths[: self.paths.index(last)]
        yield from (path for path in reversed(earlier) if self._precedes(path, last))

    def _precedes(self, path: Path, last: Path) -> bool:
        """Whether a checkpoint precedes the last one; True if a state is unreadable."""
        state, newest = self.state(path), self.state(last)
        return not (state and newest) or precedes(state, newest)

    def best_first(self) -> list[Path]:
        """The checkpoints that were the run's best when they were saved, lowest loss first.

        Losses are compared with those of the last evaluation, so only on the text that it measured. If the state of the
        best checkpoint according to the last one is damaged, it comes first. So does the one that best.json names if
        both are damaged, because an older checkpoint does not know the best one.
        """
        paths = list(self.newest_first())
        states = {path: state for path in paths if (state := self.state(path))}
        named = self.pointer("best")
        first = [named] if named in paths and not states.keys() & {paths[0], named} else []
        if not states:
            return first
        last = next((state for state in states.values() if state["best_step"]), next(iter(states.values())))
        losses = {
            path: (state["best_val_loss"], state["step"])
            for path, state in states.items()
            if 0 < state["best_step"] == state["step"]
            and state["run_id"] == last["run_id"]
            and measured_text(state["parts"][-1]) == measured_text(last["parts"][-1])
        }
        damaged = [path for path in paths if path not in states and step_number(path.name) == last["best_step"]]
        return [*dict.fromkeys([*first, *damaged]), *sorted(losses, key=losses.__getitem__)]

    def candidates(self, which: str) -> list[Path]:
        """The checkpoints to try in turn when loading the "last" or "best" one."""
        if which == "last":
            return list(self.newest_first())
        return list(dict.fromkeys([*self.best_first(), *self.newest_first()]))

    def expected(self, pointer: str) -> list[Path]:
        """The checkpoint that last.json or best.json should name, in a list; empty if there is none."""
        return list(islice(self.newest_first(), 1)) if pointer == "last" else self.best_first()[:1]

    def pointer_problem(self, pointer: str) -> str | None:
        """A line for a message if last.json or best.json does not name the right checkpoint, otherwise None."""
        file, actual, expected = self.out_dir / f"{pointer}.json", self.pointer(pointer), self.expected(pointer)
        if [actual] == expected or not (expected or file.exists()):
            return None
        problem = "is missing"
        if file.exists():
            problem = f"names {actual.name}" if actual else "names no checkpoint"
        right = expected[0].name if expected else "none"
        return f"{file} {problem}; according to the checkpoints, {right} is the {pointer} one"

    def write_pointers(self) -> None:
        """Write last.json and best.json if they do not name the right checkpoint. Raises OSError."""
        self.out_dir.stat()  # raises if it was moved; write_json would create it again
        for pointer in POINTERS:
            expected, file = self.expected(pointer), self.out_dir / f"{pointer}.json"
            if not expected:
                file.unlink(missing_ok=True)
            elif expected != [self.pointer(pointer)]:
                write_json(file, {"checkpoint": expected[0].name})


def restore_pointers(out_dir: Path) -> None:
    """Rewrite last.json and best.json if they are damaged or wrong, and print a line about each. Not while another run
    writes to the folder. Raises OSError.
    """
    folder = RunFolder(out_dir)
    for pointer in POINTERS:
        if problem := folder.pointer_problem(pointer):
            note(f"{problem}; rewriting it")
    folder.write_pointers()


def exists(out_dir: Path) -> bool:
    """Whether the folder contains a checkpoint."""
    return bool(directories(out_dir))


def last_state(out_dir: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint in which it is readable; empty without one."""
    for path in newest_first(out_dir):
        with suppress(CheckpointError):  # it is damaged, or was removed by the training process
            return read_state(path)
    return {}


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, checked against the manifest and the schema. Raises CheckpointError."""
    with as_checkpoint_error(path):
        return check_state(path, read_json(path / "manifest.json"))


def check_state(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Read and check state.json. Raises CheckpointError."""
    check_file(path, "state.json", manifest["state.json"])
    state = read_json(path / "state.json")
    if problem := other_version(state, FORMAT_VERSION):
        raise CheckpointError(f"{path}: {problem}; use the version of Folio that wrote it, or train again")
    try:
        state = check_fields(with_missing_fields(state))
    except ValueError as invalid:
        reason = "it was changed, or written by another version of Folio"
        raise CheckpointError(f"{path}: state.json has missing or invalid values ({reason}): {invalid}") from None
    if step_number(path.name) not in (None, state["step"]):  # None: a copy with another name
        raise CheckpointError(f"{path} holds step {state['step']:,}: it was renamed, or replaced by another")
    return state


@contextmanager
def as_checkpoint_error(path: Path, problem: str = "is damaged") -> Iterator[None]:
    """Convert exceptions from damaged or foreign files to CheckpointError. problem: completes the path in a message."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing: this checkpoint is damaged") from None
    except CheckpointError:
        raise
    except UserError as error:  # a Git LFS pointer, or an invalid tokenizer
        raise CheckpointError(str(error)) from None
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise CheckpointError(f"{path} {problem}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened."""
    if isinstance(error, KeyError):
        return f"it has no {short_repr(error.args[0])}"
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0])


def check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Raise CheckpointError if a file of a checkpoint does not match its entry in the manifest."""
    if Path(name).name != name:
        raise CheckpointError(f"{folder}: manifest.json names a file outside its folder: {short_repr(name)}")
    file = folder / name
    refuse_lfs_pointer(file)
    if not file.exists() or file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        what = "has changed since it was written" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {what}: this checkpoint is damaged")
