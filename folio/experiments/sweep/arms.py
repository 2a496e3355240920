"""The code of a comparison: each arm is a copy of Folio's files, made once, from which its runs start.

An arm is named by a commit of this project (a branch, a tag, HEAD), by a folder, or by ".", the working tree with its
uncommitted changes; options of train.py may follow, as in "my-idea --activation=relu2". Editing and switching branches
do not affect the copies.
"""

import difflib
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os.path import relpath
from pathlib import Path

from folio import UserError
from folio.base.files import locked, read_json, write_json
from folio.base.settings import ROOT, ConfigError
from folio.checkpoints.find_runs import is_run

CODE = "code"  # the name of the dimension whose values are arms
WORKING_TREE = "."
UNUSED = ("docs", "lab", "tests", "tools", "data", "wandb")  # folders at the top that no run reads
SOURCES = (".py", ".c", ".cpp", ".cu", ".cuh", ".h")  # suffixes of new files that belong to the code
CACHES = ("__pycache__", ".git")
RECORD = "arms.json"
OPENING_SECONDS = 60.0  # timeout for other processes that are copying the arms


@dataclass(frozen=True)
class Arm:
    """Code that a run starts from. hash: of its files. commit: ends in "-dirty" if they differ; None: not in Git."""

    name: str  # as given
    folder: Path  # the copy
    options: tuple[str, ...]  # of train.py
    commit: str | None
    hash: str

    @property
    def definition(self) -> str:
        return f"{self.name} ({self.hash[:12]})"


@dataclass(frozen=True)
class Change:
    """A file that differs between two arms, and the numbers of lines; both are 0 for a file that is not text."""

    path: str
    added: int
    removed: int

    def __str__(self) -> str:
        return f"{self.path} +{self.added} -{self.removed}"


def parse_arm(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the code that an arm names, empty if it names options only, and its options of train.py."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    codes = [word for word in words if not word.startswith("--")]
    if len(codes) > 1 or (codes and words[0] != codes[0]):
        raise ConfigError(f"{name}: name one branch, commit or folder, then options as --name=value")
    return (codes or [""])[0], tuple(word for word in words if word.startswith("--"))


def open_arms(names: Sequence[str], folder: Path) -> dict[str, Arm]:
    """Return the arms, by name, that a sweep's folder holds, and freeze those that it lacks. Raises UserError."""
    with locked(folder / ".arms.lock", f"another process is still copying code to {folder}", OPENING_SECONDS):
        recorded = read_arms(folder)
        arms = {name: recorded.get(name) or freeze(name, folder) for name in names}
        record_arms(arms, folder)
    for arm in arms.values():
        if hash_files(arm.folder) != arm.hash:
            raise UserError(f"{arm.folder}: this copy of {arm.name} was changed; remove {folder} to start again")
    return arms


def read_arms(folder: Path) -> dict[str, Arm]:
    """Return the arms that were recorded in a folder, by name. Raises UserError if the record is damaged."""
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        return {
            name: Arm(**{**arm, "folder": folder / arm["folder"], "options": tuple(arm["options"])})
            for name, arm in read_json(path).items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {folder} to start again") from None


def record_arms(arms: dict[str, Arm], folder: Path) -> None:
    """Write the arms to a folder's record, with the paths of their copies relative to it."""
    write_json(folder / RECORD, {n: {**asdict(arm), "folder": relpath(arm.folder, folder)} for n, arm in arms.items()})


def freeze(name: str, store: Path, other: Arm | None = None) -> Arm:
    """Copy the code of an arm into a folder in `store`. Raises UserError if it does not exist, or is not Folio's.

    other: the arm whose code an arm has that names options only; None: HEAD.
    """
    code, options = parse_arm(name)
    if other and not code:
        return replace(other, name=name, options=options)
    code = code or "HEAD"
    temporary = store / f".new-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    source = ROOT if code == WORKING_TREE else Path(code)
    if code == WORKING_TREE or (source / "train.py").is_file():
        commit = git(source, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        for path in files_of(source):
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, temporary / path)
    else:
        commit = git(ROOT, "rev-parse", "--verify", f"{code}^{{commit}}")
        if commit is None:
            raise UserError(f"{code} is neither a commit of this project nor a folder with train.py")
        archive = git_bytes(ROOT, "archive", "--format=tar", commit)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            for member in files:
                if member.isfile() and is_code(Path(member.name)):
                    (temporary / member.name).parent.mkdir(parents=True, exist_ok=True)
                    (temporary / member.name).write_bytes(files.extractfile(member).read())
    for script in ("train.py", "model.py"):
        if not (temporary / script).is_file():
            raise UserError(f"{code} has no {script}")
    digest = hash_files(temporary)
    copy = store / f"code-{digest[:12]}"
    if copy.exists():  # the same code under another name, or from a command that was killed
        shutil.rmtree(temporary)
    else:
        temporary.rename(copy)
    return Arm(name, copy, options, commit, digest)


def files_of(folder: Path) -> list[Path]:
    """Return the relative paths of the code in a folder: the files in Git's index and new source files, which Git does
    not ignore, or, without Git, all files but data and runs.
    """
    tracked = git_bytes(folder, "ls-files", "-z")
    if tracked is None:
        return sorted(_walk(folder))
    new = git_bytes(folder, "ls-files", "-z", "--others", "--exclude-standard", "--", *(f"*{s}" for s in SOURCES))
    paths = [Path(os.fsdecode(name)) for name in (tracked + (new or b"")).split(b"\0") if name]
    return sorted(
        path for path in paths if is_code(path) and (folder / path).is_file() and not _is_output(folder, path)
    )


def _is_output(folder: Path, path: Path) -> bool:
    """Return whether a file is in the folder of a sweep or of ideas, which hold copies of code."""
    return any((folder / parent / name).exists() for parent in path.parents for name in (RECORD, "ledger.jsonl"))


def is_code(path: Path) -> bool:
    """Return whether a run may read a file of the project. path: relative to its folder."""
    return path.parts[0] not in UNUSED and not path.parts[0].startswith(".")


def _walk(folder: Path, under: Path = Path()) -> Iterator[Path]:
    """Yield the files of a folder, except hidden ones, caches, runs and virtual environments."""
    for entry in sorted((folder / under).iterdir()):
        path = under / entry.name
        if entry.is_file():
            yield path
        elif is_code(path) and not (entry.name in CACHES or is_run(entry) or (entry / "pyvenv.cfg").exists()):
            yield from _walk(folder, path)


def hash_files(folder: Path) -> str:
    """Return a hash of the names and contents of the files in a copy, without Python's caches."""
    digest = hashlib.sha256()
    for path, content in read_files(folder).items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a copy, by its relative path, sorted."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not set(CACHES) & set(path.parts)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}


def changes(first: Arm, second: Arm) -> tuple[list[Change], str]:
    """Return the files that differ, sorted, and a unified diff of the text in them."""
    before, after = read_files(first.folder), read_files(second.folder)
    found, diff = [], []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) == after.get(path):
            continue
        try:
            old, new = ([*files.get(path, b"").decode().splitlines(keepends=True)] for files in (before, after))
        except UnicodeDecodeError:
            found.append(Change(path, 0, 0))
            continue
        lines = list(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
        counts = [sum(line.startswith(sign) for line in lines[2:]) for sign in "+-"]
        found.append(Change(path, *counts))
        diff += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return found, "".join(diff)


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a Git command, stripped; None if it fails or the folder is not in a repository."""
    output = git_bytes(folder, *arguments)
    return None if output is None else os.fsdecode(output).strip()


def git_bytes(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
