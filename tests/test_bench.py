import os
import random
import sys

import numpy as np
import pytest
import torch
from tiny_tokenizers import bpe

from folio import UserError, tokenizer
from folio.corpus import Corpus, find_sources
from folio.dataset import open_dataset
from folio.pipeline import PrepareConfig, prepare
from model import GPT, GPTConfig
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


def test_all_ways_to_sample_are_measured(capsys, monkeypatch):
    small = dict(block_size=16, vocab_size=30, n_layer=1, n_head=2, n_embd=16, bias=False)
    monkeypatch.setattr(bench, "MODELS", {"small": (small, 12)})
    bench.main(["sample", "--models", "small", "--repeats=1"])
    out = capsys.readouterr().out
    for way in ("Folio, float32", "Folio, bfloat16", "Folio, int8", "transformers, bfloat16", "the usual way, float32"):
        assert f"| {way} | " in out
    assert "| small, 12 tokens | 1 at a time, tokens/s | ratio | 10 at a time, tokens/s |" in out


def test_the_model_of_a_checkout_is_measured(tmp_path):
    """What its model.py offers: GPTConfig, GPT, and generate(idx, max_new_tokens, temperature, top_k)."""
    with pytest.raises(UserError, match="is not a checkout of nanoGPT"):
        bench.nanogpt(tmp_path, {})
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace as GPTConfig\n"
        "class GPT(torch.nn.Linear):\n"
        "    def __init__(self, config): super().__init__(1, config.n_layer)\n"
        "    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None): self.asked = max_new_tokens, top_k\n"
    )
    theirs = bench.nanogpt(tmp_path, {"n_layer": 2})
    assert bench.write_recomputed(theirs, 7, 3) == 21 and theirs.asked == (7, 200)


def test_the_peer_has_the_same_weights():
    ours = GPT(GPTConfig(block_size=16, vocab_size=30, n_layer=2, n_head=2, n_embd=16, bias=False), 5).eval()
    ids = torch.arange(12)[None]
    theirs = bench.as_transformers(ours)(ids).logits[:, -1:]
    torch.testing.assert_close(ours(ids)[0], theirs, atol=1e-5, rtol=1e-5)
