"""A long run: nothing grows."""

from pathlib import Path

import psutil
import pytest
import torch

from folio.metrics import Metrics
from prepare import text as prepare_text
from train import train


@pytest.mark.slow
def test_memory_and_open_files_stay_as_they_are(tiny, data_dir, tmp_path, monkeypatch):
    """10,000 steps over 581 shards, with 100 evaluations, each with a sample and a checkpoint behind the run."""
    source = str(data_dir / "verse.txt")
    prepare_text.main(prepare_text.TextConfig(inputs=(source,), name="many", data_dir=str(tmp_path), shard_tokens=33))
    process, seen = psutil.Process(), []
    log = Metrics.log

    def watched(self, line):
        seen.append((line["step"], process.memory_info().rss, process.num_fds(), process.num_threads()))
        log(self, line)

    monkeypatch.setattr(Metrics, "log", watched)
    cfg = tiny(dataset="many", data_dir=str(tmp_path), block_size=16, max_iters=10_000, eval_interval=100)
    cfg = tiny(**{**vars(cfg), "log_interval": 100, "warmup_iters": 100, "sample_tokens": 20, "optimizer": "muon"})
    train(cfg)
    print(f"{len(list(Path(tmp_path, 'many').glob('train*.bin')))} training shards, torch {torch.__version__}")
    settled, last = seen[20], seen[-1]  # after 2,000 steps, and at the end
    for step, rss, files, threads in (seen[1], settled, seen[50], last):
        print(f"step {step:6,}: {rss / 2**20:.1f} MiB, {files} open files, {threads} threads")
    assert last[1] - settled[1] < 8 * 2**20
    assert last[2:] == settled[2:]
