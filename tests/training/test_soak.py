"""A long run, in which memory, open files and threads must not grow."""

from pathlib import Path

import psutil
import pytest
import torch

from folio.training.run_log import Metrics
from prepare import text as prepare_text
from train import train


@pytest.mark.slow
def test_memory_open_files_and_threads_do_not_grow(tiny, data_dir, tmp_path, monkeypatch):
    """10,000 steps over 581 shards, with 100 evaluations. Each evaluation samples, and saves in the background."""
    source = str(data_dir / "verse.txt")
    prepare_text.main(prepare_text.TextConfig(inputs=(source,), name="many", data_dir=str(tmp_path), shard_tokens=33))
    process, usage = psutil.Process(), []
    log = Metrics.log

    def log_with_usage(self, line, *remark):
        usage.append((line["step"], process.memory_info().rss, process.num_fds(), process.num_threads()))
        log(self, line, *remark)

    monkeypatch.setattr(Metrics, "log", log_with_usage)
    cfg = tiny(dataset="many", data_dir=str(tmp_path), block_size=16, max_iters=10_000, eval_interval=100)
    cfg = tiny(**{**vars(cfg), "log_interval": 100, "warmup_iters": 100, "sample_tokens": 20, "optimizer": "muon"})
    train(cfg)
    print(f"{len(list(Path(tmp_path, 'many').glob('train*.bin')))} training shards, torch {torch.__version__}")
    early, last = usage[20], usage[-1]  # after 2,000 steps, and at the end
    for step, rss, files, threads in (usage[1], early, usage[50], last):
        print(f"step {step:6,}: {rss / 2**20:.1f} MiB, {files} open files, {threads} threads")
    assert last[1] - early[1] < 8 * 2**20
    assert last[2:] == early[2:]
