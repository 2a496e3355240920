"""The folder of a run: reserved while it is written."""

import os

import pytest
from filelock import FileLock

from folio import UserError
from train import train


def test_a_folder_whose_name_is_not_utf8_is_refused(tiny, tmp_path):
    """The run was trained and saved, and could not be loaded."""
    out_dir = tmp_path / os.fsdecode(b"out-\xe9")
    with pytest.raises(UserError, match=r"out_dir=.*it is not UTF-8; .*rename the file or folder"):
        train(tiny(out_dir=str(out_dir)))
    assert not out_dir.exists()


def test_two_runs_in_one_folder_are_refused(tiny, tmp_path):
    """Both started. One crashed, and the other lost its metrics."""
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    with FileLock(out_dir / ".lock"), pytest.raises(UserError, match=r"out_dir=.*out: another run .*--out_dir"):
        train(tiny())
    assert not (out_dir / "metrics.jsonl").exists()
    train(tiny(max_iters=2))
    with FileLock(out_dir / ".lock"):
        train(tiny(eval_only=True, init_from="resume"))  # an evaluation writes nothing
    (out_dir / ".lock").unlink(missing_ok=True)
    assert not (out_dir / ".lock").exists()
    with pytest.raises(UserError, match="no such data set"):
        train(tiny(dataset="gone", out_dir=str(tmp_path / "unused")))
    assert not (tmp_path / "unused").exists()
