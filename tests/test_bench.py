import os
import random
import sys

import numpy as np
import pytest
import torch
from tiny_tokenizers import bpe

from folio import UserError, tokenizer
from folio.corpus import Corpus, find_sources
from folio.prepare import PrepareConfig, prepare
from folio.shards import open_dataset
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


PEER = """
import sys
settings = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
if "dataset" in settings:
    open(f"data/{settings['dataset']}/train.bin", "rb").read()
for step in range(int(settings["max_iters"]) + 1):
    if step == int(settings["max_iters"]):
        print(f"step {step}: train loss 1.9000, val loss 1.8900", flush=True)
    print(f"iter {step}: loss 2.0000, time 50.00ms, mfu 1.00%")
"""


@pytest.fixture
def peer(tmp_path):
    """Something that prints what nanoGPT's train.py prints."""
    folder = tmp_path / "checkout"
    (folder / "config").mkdir(parents=True)
    (folder / "model.py").touch()
    (folder / "config" / "train_shakespeare_char.py").touch()
    (folder / "train.py").write_text(PEER)
    return folder


def test_training_speed_is_compared(peer, data_dir, capsys, monkeypatch):
    shape = dict(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=2, dropout=0.0)
    monkeypatch.setattr(bench, "STEPS", {"tiny": ("verse", shape)})
    words = ["--parts", "speed", "profile", "--repeats=1", f"--data_dir={data_dir}"]
    bench.main(["train", f"--peer={peer}", "--models", "tiny", *words])
    out = capsys.readouterr().out
    assert "| nanoGPT | 320 | 1.00 |" in out  # 16 tokens in 50 ms
    assert "| Folio, AdamW | " in out and "| Folio, Muon | " in out and "| `aten::mm` | " in out
    assert not (peer / "data").exists()
    with pytest.raises(UserError, match="it is not a checkout of nanoGPT"):
        bench.main(["train", f"--peer={data_dir}", "--models", "tiny", *words])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_are_compiled_or_neither_is(peer, data_dir, monkeypatch, device):
    """On a GPU, nanoGPT was compiled and Folio, whose `auto` leaves so short a run alone, was not."""
    compiled = []

    def stop(words, folder):
        compiled.append({word for word in words if word.startswith("--compile=")})
        return [(0.0, f"iter {n}: time 50.00ms") for n in range(9)]

    monkeypatch.setattr(bench, "lines_of", stop)
    monkeypatch.setattr(bench, "matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(bench, "metrics_of", lambda out: [{"tokens_per_second": 1.0}] * 9)
    shape = dict(n_layer=1, n_head=1, n_embd=32, block_size=16, batch_size=1, dropout=0.0)
    monkeypatch.setattr(bench, "STEPS", {"tiny": ("verse", shape)})
    words = ["--parts", "speed", "--repeats=1", f"--data_dir={data_dir}", f"--device={device}"]
    bench.main(["train", f"--peer={peer}", "--models", "tiny", *words])
    assert len(compiled) == 3 and all(found == {f"--compile={device == 'cuda'}"} for found in compiled)


def test_races_are_to_the_evaluation_that_crosses_the_line(peer, data_dir, capsys, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", {"tiny": ("verse", {})})
    monkeypatch.setattr(bench, "RACED", "verse")
    small = (
        "--n_layer=1 --n_head=1 --n_embd=32 --block_size=16 --batch_size=4 --dataset=verse --sample_tokens=0".split()
    )
    monkeypatch.setattr(
        bench,
        "RACES",
        {
            "to 3.9": (3.9, [*small, "--max_iters=20", "--eval_interval=10", "--wsd_decay_iters=10"]),
            "to 0.1": (0.1, [*small, "--max_iters=5", "--wsd_decay_iters=3"]),
            "in nanoGPT's time": (None, [*small, "--max_iters=20", "--wsd_decay_iters=10", "--minutes=0.1"]),
        },
    )
    monkeypatch.setattr(bench, "scored_again", lambda run, args: 3.25)
    words = ["--models", "tiny", "--parts", "race", "--seeds", "3", f"--data_dir={data_dir}"]
    bench.main(["train", f"--peer={peer}", *words])
    rows = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    assert "| 1.8900 | 3.2500 |" in rows["| nanoGPT, its recipe for a CPU"]
    assert "inf" in rows["| Folio, to 0.1"] and "inf" not in rows["| Folio, to 3.9"]
    assert "3.2500 |" in rows["| Folio, in nanoGPT's time"]
