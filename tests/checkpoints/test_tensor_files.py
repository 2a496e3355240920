"""Permissions of tensor files. test_snapshots.py fills a disk."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file

from folio.checkpoints.tensor_files import write_tensors


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask for groups and others")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_decides_who_can_read_the_file(umask, tmp_path):
    """safetensors makes files readable by the owner only."""
    previous = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3.0)}, {"step": "3"})
    finally:
        os.umask(previous)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], torch.arange(3.0))
