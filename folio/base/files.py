"""Atomic writes, lock files, checksums, JSON, and limits for untrusted files.

A file or folder is written under a temporary name, synced to disk, then renamed: it is either complete or absent.
"""

import errno
import hashlib
import json
import math
import os
import re
import reprlib
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.progress import note

MAX_TEXT_BYTES = 1 << 26  # 64 MiB, for a file read at once; the largest tokenizer.json files have about 35 MB
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its first bytes
LFS_ADVICE = "is a Git LFS pointer, not the file itself: run git lfs pull, or download the file"
MAX_LFS_POINTER_BYTES = 1024  # as its specification says
STEP = re.compile(r"step-([0-9]+)")  # the name of a checkpoint folder, or of a snapshot without its suffix


@contextmanager
def locked(path: Path, message: str, timeout: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path` inside the block.

    Raises UserError(message) if another process still holds the lock after `timeout` seconds, and OSError if the file
    cannot be created. The operating system releases the locks of a killed process. On a file system without locks,
    this prints a warning and locks nothing.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(message) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        note(f"{path.parent}: the file system does not support locks; do not start another run there")
    identity = _identity(path)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            if _identity(path) == identity:  # otherwise the folder was moved, and another process may lock a new file
                path.unlink()
        lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode number of a file or folder; None if it does not exist."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_dev, info.st_ino


class FolderWatch:
    """Detects that a folder was moved or removed. Holds the folder open, to find its new path."""

    def __init__(self, path: Path):
        self.path, self.identity = path, _identity(path)
        self.descriptor = None if os.name == "nt" else os.open(path, os.O_RDONLY)  # Windows cannot move an open folder

    def is_in_place(self) -> bool:
        try:
            return _identity(self.path) == self.identity
        except OSError:  # an I/O error does not mean that the folder was moved
            return True

    def current_path(self) -> Path | None:
        """The folder's current path; None if it was removed or the system does not report it."""
        path = None
        with suppress(OSError):
            if sys.platform == "linux":
                path = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
            elif sys.platform == "darwin":
                import fcntl

                path = Path(os.fsdecode(fcntl.fcntl(self.descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
            return path if path and _identity(path) == self.identity else None
        return None

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock file `path`; None if this is unknown. Does not block.

    The test itself holds a free lock for some microseconds, in which other processes cannot acquire it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a FIFO would block
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
    finally:
        os.close(descriptor)  # releases the lock


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder. If the block succeeds, the file written there replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename the complete folder `temporary` to `folder`, replacing any folder of that name.

    The replaced folder is kept under the path replaced(folder) until the other one is in its place. Call
    settle_folder() after a kill. If the new folder cannot be renamed, raises OSError, and the replaced one stays.
    """
    old = replaced(folder)
    settle_folder(folder)
    try:
        if folder.is_dir() or folder.is_symlink():  # a file with this name is not replaced: the rename below fails
            old.parent.mkdir(exist_ok=True)
            folder.rename(old)
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        settle_folder(folder)


def replaced(folder: Path) -> Path:
    """The path of a folder while another one takes its place. The name is the same, but the parent is hidden."""
    return folder.with_name(f".{folder.name}.replaced") / folder.name


def settle_folder(folder: Path) -> None:
    """Restore a folder whose replacement was interrupted before the new one was in its place. Remove what remains of a
    replaced one. Raises OSError if it cannot be restored. Not while another process replaces the folder.
    """
    old = replaced(folder)
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)
    shutil.rmtree(old.parent, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to disk. Does nothing for a folder on Windows, which cannot sync one."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- untrusted files --------------------------------------------------------------------------------------------------


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raise OSError unless `path` is a regular file or a link to one, and ValueError if it has more than `max_bytes`.

    Opening a FIFO would block, and reading /dev/zero would never end. Raises UserError for a Git LFS pointer.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if max_bytes is not None and info.st_size > max_bytes:
        raise ValueError(f"{path.name} has {info.st_size:,} bytes; the limit for this file is {max_bytes:,}")
    refuse_lfs_pointer(path)


def refuse_lfs_pointer(path: Path) -> None:
    """Raise UserError if a file is the small text that Git LFS stores in its place.

    Call it before a parser reads the file, because the parser's message would be about the format. A file that is
    missing or cannot be read is not an error here.
    """
    head = b""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size < MAX_LFS_POINTER_BYTES:
            with open(path, "rb") as file:
                head = file.read(len(LFS_POINTER))
    if head == LFS_POINTER:
        raise UserError(f"{path} {LFS_ADVICE}")


def why_untrusted(folder: Path) -> str | None:
    """Why other users may have written files with code in a folder; None if only this user and root can.

    For a folder that does not exist, the reason concerns its parents. Windows has no owners to check, and no shared
    folders for temporary files.
    """
    if os.name == "nt":
        return None
    own = {os.geteuid(), 0}
    trusted = {*own, Path("/").stat().st_uid}  # root, where a container does not show it as 0
    real = Path(os.path.realpath(folder))
    for part in dict.fromkeys([real, *real.parents, folder, *folder.absolute().parents]):
        try:
            info = part.lstat()
        except OSError:  # missing or inaccessible, as everything below it
            continue
        if info.st_uid not in (own if part == real else trusted):
            return f"{part} belongs to another user"
        # In a sticky folder such as /tmp, others cannot rename or remove the next part of the path.
        writable = 0o022 if part == real else 0 if info.st_mode & stat.S_ISVTX else 0o002
        if info.st_mode & writable and not stat.S_ISLNK(info.st_mode):
            return f"other users can write to {part}"
    return None


def read_own_bytes(path: Path) -> bytes:
    """The content of a regular file that belongs to this user or root, and that others cannot write to.

    Raises OSError. Check its folder with why_untrusted().
    """
    flags = os.O_RDONLY
    for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"):  # O_BINARY on Windows, the others elsewhere
        flags |= getattr(os, name, 0)
    handle = os.open(path, flags)
    with open(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a regular file")
        if os.name != "nt" and (info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022):
            raise PermissionError(f"{path} was or can be written by another user")
        return file.read()


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file. Raises OSError, or ValueError if it is too large or not UTF-8."""
    check_regular(path, max_bytes)
    return path.read_text(encoding="utf-8")


def shorten(text: str, limit: int = 300) -> str:
    """The text, or its beginning if it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_utf8(text: str) -> bool:
    """Whether a text or path can be encoded in UTF-8. On Linux, a path may be any bytes, and Python keeps the others as
    lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short_repr(value: Any) -> str:
    """The repr of an untrusted value for a message, cut to about 120 characters."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 4, 80, 80, 80
    try:
        return shorten(short.repr(value), 120)
    except ValueError:  # Python does not print an integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"


def other_version(content: dict[str, Any], supported: int) -> str | None:
    """A clause about the format version of a file of Folio if it is not the supported one, otherwise None."""
    version = content.get("format_version")
    if type(version) is int and version == supported:  # True == 1
        return None
    found = short_repr(version) if "format_version" in content else "missing"
    return f"its format version is {found}, and only {supported} is supported"


def step_number(name: str) -> int | None:
    """The N of a checkpoint or snapshot named step-N; None for other names."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None


# --- checksums and JSON -----------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """The sha256 of a file in hexadecimal, computed in chunks. Raises OSError."""
    check_regular(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    content = json_bytes(value)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def json_bytes(value: Any) -> bytes:
    """`value` as indented JSON in UTF-8."""
    content = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # A lone surrogate, as in a file name that is not UTF-8, is written as an escape such as \udc80.
    return content.encode("utf-8", errors="backslashreplace")


def finite(value: Any, replacement: Callable[[float], Any] = lambda number: None) -> Any:
    """`value` as JSON can represent it: NaN and infinity in dicts and lists become None, or replacement(number)."""
    if isinstance(value, dict):
        return {name: finite(item, replacement) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, replacement) for item in value]
    return replacement(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises OSError unless it is a regular file, and ValueError if it is larger than MAX_TEXT_BYTES, not JSON, or nested
    too deeply.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
