"""What a program syncs and renames, in order, so that a test can tell what a power failure would leave."""

import os
from pathlib import Path

import pytest

SYNC, RENAME = "sync", "rename"
Calls = list[tuple[str, Path, Path]]  # SYNC, a path, and it again; or RENAME, the old path, and the new one


def record_disk(patch: pytest.MonkeyPatch) -> Calls:
    """The calls of os.fsync, os.replace and Path.rename from now on."""
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
    """Assert that a file, or a folder with these files, was synced before it got its name, and its parent afterwards.

    Returns the number of the latter call.
    """
    renamed, old = next((n, old) for n, (call, old, new) in enumerate(calls) if (call, new) == (RENAME, path))
    synced = {path for call, path, _ in calls[:renamed] if call == SYNC}
    assert synced >= {old, *(old / name for name in contents)}
    return calls.index((SYNC, path.parent, path.parent), renamed)
