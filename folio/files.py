"""Files that are whole or absent: written under a temporary name, synced, then renamed; named by their sha256."""

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from folio import UserError


@contextmanager
def locked(path: Path, busy: str, timeout: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path` while the block lasts. Raises UserError(busy) if another process still holds it after
    `timeout` seconds, and OSError where it cannot be made. The operating system releases the lock of a process that is
    killed. On a file system without locks, this only says so.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(busy) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        print(f"{path.parent}: its file system has no locks, so do not start another run there", file=sys.stderr)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove a file that is open
            path.unlink()
        lock.release()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, that file takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk. Windows cannot sync a folder, and there this does nothing."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    content = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as temporary:  # half a surrogate pair, as in a file's name that is not UTF-8, becomes \uDC80
        temporary.write_text(content, encoding="utf-8", errors="backslashreplace")


def read_json(path: Path) -> Any:
    """The value that the file holds. Raises ValueError if it is not JSON, or nested beyond reason."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
