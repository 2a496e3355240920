"""Reading, writing and locking files, and watching folders."""

import errno
import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from folio.base.files import (
    FolderWatch,
    is_locked,
    read_json,
    read_text,
    replace_folder,
    settle_folder,
    sha256,
    short_repr,
    write_json,
)
from tests.support.disk import assert_durable, record_disk, run_killed_at


def test_only_regular_files_are_read(tmp_path):
    """Opening a FIFO without a writer blocked, and reading a link to /dev/zero never ended."""
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        thread = threading.Thread(target=is_locked, args=(tmp_path / "fifo",), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to(os.devnull)
    for path in tmp_path.iterdir():
        for read in (read_json, sha256):
            with pytest.raises(OSError, match=f"{path.name} is not a regular file"):
                read(path)
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1]


def test_a_file_over_the_maximum_size_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("1234")
    assert read_text(tmp_path / "file", max_bytes=4) == "1234"
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**34)
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: pytest.fail("the file was read"))
    with pytest.raises(ValueError, match=r"file has 4 bytes.*limit.* 3"):
        read_text(tmp_path / "file", max_bytes=3)
    with pytest.raises(ValueError, match=r"huge\.json.* 17,179,869,184 bytes.*limit.* 67,108,864"):
        read_json(tmp_path / "huge.json")


def test_a_foreign_value_is_shortened_in_a_message():
    """Python prints integers of at most 4,300 digits."""
    assert short_repr(["a", -(10**9), None]) == "['a', -1000000000, None]"
    for value in ("x" * 10**6, [["x" * 99] * 99] * 99, {"a" * 999: {"b": {"c": 1}}}, 10**400, 10**5000):
        assert len(short_repr(value)) <= 123


def test_a_file_is_replaced_at_once_after_it_was_synced(tmp_path, monkeypatch):
    calls, path = record_disk(monkeypatch), tmp_path / "deep" / "x.json"
    write_json(path, {"a": "é"})
    assert_durable(calls, path)
    with pytest.raises(TypeError):
        write_json(path, object())
    assert read_json(path) == {"a": "é"}
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path, is_link):
    """Between two renames, none had the name, and the next replacement removed the old one."""
    contents, killed, event = [], True, 0
    while killed:
        parent = tmp_path / str(event)
        for name in ("target", "new"):
            (parent / name).mkdir(parents=True)
            (parent / name / "file").write_text(name)
        if is_link:
            (parent / "folder").symlink_to("target", target_is_directory=True)
        else:
            (parent / "target").rename(parent / "folder")
        killed = run_killed_at(event, lambda parent=parent: replace_folder(parent / "new", parent / "folder"))
        settle_folder(parent / "folder")
        contents.append((parent / "folder" / "file").read_text())
        assert not list(parent.glob(".*")) and (parent / "new").exists() == (contents[-1] == "target")
        event += 1
    assert contents == sorted(contents, reverse=True) and {*contents} == {"target", "new"} and event > 5
    if is_link:
        assert (parent / "target" / "file").read_text() == "target"


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "folder").write_text("mine")
    (tmp_path / "new").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_folder(tmp_path / "new", tmp_path / "folder")
    assert (tmp_path / "folder").read_text() == "mine" and (tmp_path / "new").is_dir()


def test_an_io_error_does_not_mean_that_the_folder_was_moved(tmp_path, monkeypatch):
    """A temporary failure of a network disk ended the run without a save, as if its folder had been removed."""
    watch, stat = FolderWatch(tmp_path), Path.stat

    def fail(path, **kwargs):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", fail)
    assert watch.is_in_place() and watch.current_path() is None
    monkeypatch.undo()
    assert watch.current_path() == tmp_path
    watch.close()


def test_testing_a_lock_does_not_block_and_leaves_no_file(tmp_path):
    path = tmp_path / ".lock"
    assert is_locked(path) is False and not path.exists()
    with FileLock(path) as lock:
        assert is_locked(path) is True
        lock.release()
        assert is_locked(path) is False
        lock.acquire(timeout=0)
