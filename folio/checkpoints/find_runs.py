"""Finds run folders: by name, by pattern, under a folder, or the most recently written."""

import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from folio import UserError
from folio.base.files import is_locked, step_number
from folio.base.progress import note
from folio.base.settings import split_paths
from folio.checkpoints import run_folder
from folio.data.shards import has_data

LATEST = "latest"  # name of the most recently written run


def find_runs(name: str) -> list[str]:
    """The folders that match a pattern such as "out-*", or find_run(name).

    Raises UserError if a pattern has no match.
    """
    matches = sorted(filter(os.path.isdir, glob.glob(name)))
    if "*" in name and not matches:
        raise UserError(f"{name}: no folder matches this pattern")
    return matches or [find_run(name)]


def expand_runs(names: Iterable[str]) -> list[str]:
    """The runs for names, patterns, and comma-separated lists of these. Raises UserError."""
    return [run for listed in names for name in split_paths(listed) for run in find_runs(name)]


def find_run(name: str) -> str:
    """The most recently written run under the working directory for the name "latest", unless a folder has that name.
    Other names are returned unchanged.

    Prints the run to standard error. Raises UserError if there is none.
    """
    if name != LATEST or os.path.isdir(name):
        return name
    folder = max(runs_under(Path()), key=written_at, default=None)
    if folder is None or not written_at(folder):
        raise UserError(f"{LATEST}: there is no run under {Path.cwd()}; name the folder of a run")
    note(f"{LATEST}: {folder}")
    return str(folder)


def runs_under(folder: Path) -> list[Path]:
    """The run folders in and under a folder, sorted by path.

    Skips hidden folders and data sets. A folder with several paths through symbolic links is listed once.
    """
    runs: list[Path] = []
    visited: set[tuple[int, int]] = set()
    folders, links = [folder], []
    while folders or links:
        path = (folders or links).pop()  # links last, so that a folder is listed under its real path
        try:
            info = path.stat()
            with os.scandir(path) as listing:
                entries = list(listing)
        except OSError:  # a file, unreadable, or removed
            continue
        if (info.st_dev, info.st_ino) in visited or (path != folder and has_data(path)):
            continue
        visited.add((info.st_dev, info.st_ino))
        if is_run(path):
            runs.append(path)
        for entry in entries:
            if entry.name.startswith(".") or step_number(entry.name) is not None:
                continue
            if entry.is_symlink():
                links.append(path / entry.name)
            elif entry.is_dir():
                folders.append(path / entry.name)
    return sorted(runs)


def runs_of(folder: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise the runs under it. Raises UserError if there are none."""
    return [folder] if is_run(folder) else runs_under(folder) or no_runs(folder)


def no_runs(folder: Path) -> NoReturn:
    """Raise UserError for a folder without runs."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    raise UserError(
        f"{folder}: there are no runs in this folder; train one: python train.py config/shakespeare_char.py"
    )


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder or holds its lock."""
    lock = folder / ".lock"
    return (folder / "metrics.jsonl").is_file() or run_folder.exists(folder) or (lock.exists() and is_locked(lock))


def written_at(folder: Path) -> float:
    """The time at which a run last wrote metrics, a sample or a checkpoint, in seconds since 1970; 0: never."""
    seconds = 0.0
    for name in ("metrics.jsonl", "samples.jsonl", "last.json"):
        with suppress(OSError):  # a missing file
            seconds = max(seconds, (folder / name).stat().st_mtime)
    return seconds
