"""Reading, writing and locking files, and folders that are watched."""

import errno
import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from folio.base.files import FolderWatch, is_locked, read_json, read_text, sha256, short_repr, write_json
from tests.support.disk import assert_durable, record_disk


def test_only_regular_files_are_read(tmp_path):
    """A FIFO without a writer, and a link to /dev/zero, were waited for and read without end."""
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


def test_a_huge_json_file_is_not_read(tmp_path, monkeypatch):
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**34)
    monkeypatch.setattr(Path, "read_text", lambda *args, **named: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"huge\.json has 17,179,869,184 bytes; the limit for this file is 67,108,864"):
        read_json(tmp_path / "huge.json")


def test_a_file_of_exactly_the_largest_size_is_read(tmp_path):
    (tmp_path / "file").write_text("1234")
    assert read_text(tmp_path / "file", max_bytes=4) == "1234"
    with pytest.raises(ValueError, match="file has 4 bytes; the limit for this file is 3"):
        read_text(tmp_path / "file", max_bytes=3)


def test_a_foreign_value_is_shortened_in_a_message():
    """Python does not print an integer of more than 4,300 digits."""
    assert short_repr(["a", -(10**9), None]) == "['a', -1000000000, None]"
    for value in ("x" * 10**6, [["x" * 99] * 99] * 99, {"a" * 999: {"b": {"c": 1}}}, 10**400, 10**5000):
        assert len(short_repr(value)) <= 123


def test_a_failed_write_keeps_the_earlier_file(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"a": "é"})
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    with pytest.raises(TypeError):
        write_json(tmp_path / "deep" / "x.json", object())
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    calls = record_disk(monkeypatch)
    write_json(tmp_path / "a.json", 1)
    assert_durable(calls, tmp_path / "a.json")


def test_a_disk_that_does_not_answer_has_not_moved_the_folder(tmp_path, monkeypatch):
    """A network disk that failed for a moment ended the run as if its folder had been removed, without a save."""
    watch, stat = FolderWatch(tmp_path), Path.stat

    def fail(path, **settings):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", fail)
    assert watch.is_in_place() and watch.where() is None
    monkeypatch.undo()
    assert watch.where() == tmp_path
    watch.close()


def test_a_lock_is_tested_without_waiting_and_without_a_trace(tmp_path):
    path = tmp_path / ".lock"
    assert is_locked(path) is False and not path.exists()
    with FileLock(path) as lock:
        assert is_locked(path) is True
        lock.release()
        assert is_locked(path) is False
        lock.acquire(timeout=0)
