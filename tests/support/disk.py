"""Records syncs and renames in order, to test what would survive a power failure; kills at a file-system event; damages
files.
"""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

SYNC, RENAME = "sync", "rename"
Calls = list[tuple[str, Path, Path]]  # (SYNC, path, path) or (RENAME, old path, new path)


def record_disk(patch: pytest.MonkeyPatch) -> Calls:
    """A list to which later calls of os.fsync, os.replace and Path.rename are appended."""
    calls: Calls = []
    replace, rename = os.replace, Path.rename

    def recorded_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append((SYNC, path, path))

    def recorded_replace(old: Path, new: Path) -> None:
        replace(old, new)
        calls.append((RENAME, Path(old), Path(new)))

    def recorded_rename(old: Path, new: Path) -> None:
        rename(old, new)
        calls.append((RENAME, old, Path(new)))

    patch.setattr(os, "fsync", recorded_sync)
    patch.setattr(os, "replace", recorded_replace)
    patch.setattr(Path, "rename", recorded_rename)
    return calls


def assert_durable(calls: Calls, path: Path, *contents: str) -> int:
    """Assert that a file, or a folder with these files, was synced before it was renamed to `path`, and its parent
    afterwards. Returns the index of the latter call.
    """
    renamed, old = next((n, old) for n, (call, old, new) in enumerate(calls) if (call, new) == (RENAME, path))
    synced = {path for call, path, _ in calls[:renamed] if call == SYNC}
    assert synced >= {old, *(old / name for name in contents)}
    return calls.index((SYNC, path.parent, path.parent), renamed)


class Killed(BaseException):
    """The process was killed."""


EVENTS = [(os, name) for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink", "truncate", "ftruncate")]
EVENTS += [(Path, name) for name in ("mkdir", "rename", "touch", "unlink", "write_bytes")]


def run_killed_at(event: int, run: Callable[[], object]) -> bool:
    """Run a function whose process is killed at this file-system event, counted from 0: it and all later ones raise
    Killed. Returns whether there was such an event.
    """
    numbers, killed = count(), False

    def counted(original: Callable) -> Callable:
        def call(*arguments, **options):
            nonlocal killed
            killed = killed or next(numbers) == event
            if killed:
                raise Killed
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in EVENTS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        with suppress(Killed):
            run()
    return killed


def flip_bit(content: bytes, rng: random.Random) -> bytes:
    """The content with a random bit flipped."""
    flipped = bytearray(content)
    flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(flipped)
