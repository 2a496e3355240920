"""A checkout that benchmarks measure."""

from pathlib import Path

import pytest

PEER = r"""
import sys
open("words", "w").write("\n".join(sys.argv))
settings = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
if "dataset" in settings:
    open(f"data/{settings['dataset']}/train.bin", "rb").read()
for step in range(int(settings["max_iters"]) + 1):
    if step == int(settings["max_iters"]):
        print(f"step {step}: train loss 1.9000, val loss 1.8900", flush=True)
    print(f"iter {step}: loss 2.0000, time 50.00ms, mfu 1.00%")
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A fake nanoGPT checkout, whose train.py prints lines like nanoGPT's, and writes its arguments to "words"."""
    folder = tmp_path / "checkout"
    (folder / "config").mkdir(parents=True)
    (folder / "model.py").touch()
    (folder / "config" / "train_shakespeare_char.py").touch()
    (folder / "train.py").write_text(PEER)
    return folder
