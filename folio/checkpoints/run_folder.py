"""The checkpoints in a run's folder: which there are, which is the last and the best, and what state.json says.

A run has parts: one from its start, and one from each resume. state.json records them; see schema.PartRecord.

Nothing here reads weights, so that nothing needs torch. docs/checkpoints.md describes each file.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from folio import UserError
from folio.base.files import read_json, sha256, short_repr, shorten, step_number, write_json
from folio.base.progress import note
from folio.checkpoints.schema import PartRecord, wrong_values

FORMAT_VERSION = 2  # of state.json; version 1 is read, too
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


def directories(out_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    numbered = [path for path in out_dir.glob("step-*") if path.is_dir() and step_number(path.name) is not None]
    return sorted(numbered, key=lambda path: step_number(path.name))


def newest_first(out_dir: Path) -> Iterator[Path]:
    """The checkpoints in a run's folder from the last one back; see RunFolder."""
    return RunFolder(out_dir).newest_first()


def precedes(state: dict[str, Any], newest: dict[str, Any]) -> bool:
    """Whether a checkpoint is an earlier point of the run that saved a newer one and may have been resumed in between.

    state, newest: state.json of the two.
    """
    is_same_run = state.get("run_id") == newest.get("run_id")
    names = ("from_step", "after", "changes", "exact")  # of a resume; a later checkpoint may know more of the others
    resumes, newest_resumes = ([[part[name] for name in names] for part in of["parts"][1:]] for of in (state, newest))
    is_same_past = resumes == [resume for resume in newest_resumes if resume[0] < state["step"]]
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

    def newest_first(self) -> Iterator[Path]:
        """The checkpoints from the last one back, without those after a step from which the run was resumed.

        The last one is the one that last.json names, or a later one that continues it: a kill or a full disk may have
        prevented the pointer. Other later ones belong to another run, or to one that was resumed from an earlier step.
        """
        last = self.last or self.pointer("last")
        if last is None:
            yield from reversed(self.paths)
            return
        end = self.paths.index(last)
        if not self.last:
            for number, path in enumerate(self.paths[end + 1 :], start=end + 1):
                state, later = self.state(last), self.state(path)
                end = number if state and later and precedes(state, later) else end
        last = self.paths[end]
        yield last
        yield from (path for path in reversed(self.paths[:end]) if self._precedes(path, last))

    def _precedes(self, path: Path, last: Path) -> bool:
        """Whether a checkpoint precedes the last one, as far as their states can be read."""
        state, newest = self.state(path), self.state(last)
        return not (state and newest) or precedes(state, newest)

    def best_first(self) -> list[Path]:
        """The checkpoints that were the run's best when they were saved, the one with the lowest loss first.

        Before them, the one that the last checkpoint says is the best, if its state is damaged.
        """
        past = list(self.newest_first())
        states = {path: state for path in past if (state := self.state(path))}
        last = next(iter(states.values()), None)
        if last is None:
            return []
        losses = {
            path: (state["best_val_loss"], state["step"])
            for path, state in states.items()
            if 0 < state["best_step"] == state["step"] and state.get("run_id") == last.get("run_id")
        }
        damaged = [path for path in past if path not in states and step_number(path.name) == last["best_step"]]
        return [*damaged, *sorted(losses, key=losses.__getitem__)]

    def candidates(self, which: str) -> list[Path]:
        """The checkpoints to load for the "last" or "best" one, until one is intact."""
        if which == "last":
            return list(self.newest_first())
        return list(dict.fromkeys([*self.best_first(), *self.newest_first()]))

    def named(self, pointer: str) -> list[Path]:
        """The checkpoint that last.json or best.json should name, if there is one."""
        return list(islice(self.newest_first(), 1)) if pointer == "last" else self.best_first()[:1]

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


def restore_pointers(out_dir: Path) -> None:
    """Write last.json and best.json again if they are damaged or do not name what the checkpoints say, with a line
    about each. Not while another run writes there. Raises OSError.
    """
    folder = RunFolder(out_dir)
    for pointer in POINTERS:
        if problem := folder.pointer_problem(pointer):
            note(f"{problem}; it is written again")
    folder.write_pointers()


def exists(out_dir: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return bool(directories(out_dir))


def last_state(out_dir: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint. Raises CheckpointError if it is damaged, LookupError if there is none."""
    for path in newest_first(out_dir):
        return read_state(path)
    raise LookupError(out_dir)


def written_by(out_dir: Path) -> str | None:
    """The id of the torchrun that wrote the newest checkpoint with a readable state.json, or None."""
    for path in reversed(directories(out_dir)):
        with suppress(CheckpointError):
            return read_state(path).get("torchrun")
    return None


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, as the manifest says and with values that a run can have. Raises CheckpointError."""
    with as_checkpoint_error(path):
        return check_state(path, read_json(path / "manifest.json"))


def check_state(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    check_file(path, "state.json", manifest["state.json"])
    state = read_json(path / "state.json")
    if state["format_version"] == 1:
        state = with_parts(state)
    if state["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {short_repr(state['format_version'])} is not {FORMAT_VERSION}")
    if wrong := wrong_values(state):
        raise CheckpointError(f"{path}: state.json is not as Folio writes it: {', '.join(wrong)}")
    if step_number(path.name) not in (None, state["step"]):  # None: it is a copy with another name
        raise CheckpointError(f"{path} holds step {state['step']:,}: it was renamed, or replaced by another")
    return state


def with_parts(state: dict[str, Any]) -> dict[str, Any]:
    """state.json of version 1, which recorded only the steps and the changes of resumes, as one of FORMAT_VERSION."""
    state = {"threads": None, "decisions": None, **state, "format_version": FORMAT_VERSION}
    known = {name: state.pop(name) for name in ("resolved", "versions", "threads", "decisions")}
    origin = state.pop("started_from", state["config"].get("init_from"))
    start = {"step": 0, "after": None, "changes": {}, "exact": True}
    parts: list[dict[str, Any]] = []
    for resume in [*reversed(state.pop("resumes", None) or []), start]:
        about = {name: resume[name] for name in ("after", "changes", "exact")}
        parts.insert(0, {"from_step": resume["step"], "init_from": "resume", **about, **known})
        if not resume["exact"]:
            known = {**known, "versions": None}  # the part before may be of another machine
        if resume["changes"].keys() & {"minutes", "max_iters"}:
            known = {**known, "decisions": None}
    parts[0]["init_from"] = None if origin == "resume" else origin
    return {**state, "parts": parts}


def parts_of(out_dir: Path, newest: dict[str, Any]) -> list[PartRecord]:
    """The parts of the run in a folder. newest: state.json of its newest checkpoint.

    What it does not say about a part of a run of version 1 is what the checkpoint nearest to that part says.
    """
    parts = list(newest["parts"])
    for path in newest_first(out_dir):
        with suppress(CheckpointError):  # it is damaged, or has been removed
            state = read_state(path)
            for number, part in enumerate(state["parts"] if precedes(state, newest) else []):
                if None in (parts[number][name] for name in ("init_from", "versions", "decisions")):
                    parts[number] = part
    return parts


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Raise CheckpointError for what a damaged file of the checkpoint raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing: this checkpoint is damaged") from None
    except (ValueError, LookupError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {shorten(str(error)) or type(error).__name__}") from None


def check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Raise CheckpointError if a file of a checkpoint is not as the manifest's entry says."""
    if Path(name).name != name:
        raise CheckpointError(f"{folder}: manifest.json names a file outside its folder: {short_repr(name)}")
    file = folder / name
    if not file.exists() or file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        what = "has changed since it was written" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {what}: this checkpoint is damaged")


def _runs_beside(path: Path) -> list[Path]:
    """The folders with checkpoints in the folder of `path`, and that folder; the one with the newest one first."""
    with suppress(OSError):  # the folder does not exist, or cannot be read
        runs = [run for run in (path.parent, *path.parent.iterdir()) if exists(run)]
        return sorted(runs, key=lambda run: directories(run)[-1].stat().st_mtime, reverse=True)
    return []
