import os
import random
import sys

import numpy as np
import pytest
from tiny_tokenizers import bpe

from folio import tokenizer
from folio.corpus import Corpus, find_sources
from folio.dataset import open_dataset
from folio.pipeline import PrepareConfig, prepare
from tools import bench


def test_the_usual_way_does_the_same_work(tmp_path, monkeypatch, seed):
    """Otherwise the comparison would mean nothing: the same documents give the same tokens, in another order."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(["hello", "world", "日本", "the"], k=rng.randrange(1, 50))) for _ in range(300)]
    source = tmp_path / "source.jsonl"
    bench.write_lines(source, texts)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(bench, "gpt2_tokenizer", bpe)
    bench.prepare_the_usual_way(source, tmp_path / "usual")
    usual = np.concatenate([np.fromfile(tmp_path / "usual" / f"{name}.bin", dtype="<u2") for name in ("train", "test")])
    cfg = PrepareConfig(tokenizer="gpt2", data_dir=str(tmp_path))
    data = open_dataset(prepare(cfg, Corpus(find_sources([str(source)])), "ours"))
    ours = np.concatenate([shard.ids for shard in (*data.train, *data.val)])
    assert np.array_equal(np.bincount(usual), np.bincount(ours)) and len(ours) > 300


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_memory_is_that_of_all_processes(tmp_path):
    hold = "import sys, time; held = bytearray(200_000_000); time.sleep(1)"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    (tmp_path / "script.py").write_text(f"{below}; open('{tmp_path}/out', 'wb').write(bytes(5000))")
    found = bench.measured([str(tmp_path / "script.py")], tmp_path)
    assert 200e6 < found["memory"] < 300e6 and found["seconds"] > 1
    assert bench.memory_of(os.getpid()) > 1e6 and bench.size_of(tmp_path) > 5000


@pytest.mark.network
def test_the_tables_are_printed(tmp_path, capsys):
    source = tmp_path / "text.txt"
    source.write_text("".join(f"It is a truth universally acknowledged, {k}\n" for k in range(4000)))
    bench.main(["data", str(source), "--repeats=1", "--split_on=\\n"])
    out = capsys.readouterr().out
    assert "| folio, twice the text |" in out and "| 12 x 1024 |" in out
