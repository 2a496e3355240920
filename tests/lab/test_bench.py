import io
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

import sample
from folio import UserError
from folio.base import settings
from folio.base.settings import ROOT, ConfigError
from folio.data import tokenizer
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.prepare import PrepareConfig, prepare
from folio.data.shards import open_dataset
from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import LanguageModel
from folio.training import reference
from lab.bench import (
    baselines,
    duplicates,
    html_file,
    intervals,
    null_experiments,
    planted_faults,
    preparation,
    reference_losses,
    sampling,
    sequential,
    serving,
    sweeps,
    training,
    training_peers,
    viewer,
)
from lab.bench.baselines import BaselineConfig
from lab.bench.duplicates import DuplicatesBenchConfig
from lab.bench.html_file import HtmlBenchConfig, Size
from lab.bench.intervals import IntervalBenchConfig
from lab.bench.null_experiments import NullBenchConfig
from lab.bench.planted_faults import FAULTS, Fault, FaultsBenchConfig
from lab.bench.preparation import DataBenchConfig
from lab.bench.reference_losses import ReferenceConfig
from lab.bench.sampling import SampleBenchConfig
from lab.bench.sequential import SequentialBenchConfig
from lab.bench.serving import Answer, ServeBenchConfig
from lab.bench.sweeps import SweepBenchConfig
from lab.bench.training import Evaluation, TrainBenchConfig
from lab.bench.training_peers import PeerConfig
from lab.bench.viewer import ViewBenchConfig
from sample import SampleConfig
from tests.support import processes
from tests.support.decoding import random_model
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tiny_tokenizers import bpe
from tests.support.tolerances import binomial_range, logits_error, normal_limit, within
from tests.support.viewed_models import save_random_run
from tests.support.viewers import CHROMIUM
from tests.support.viewers import serving as serving_viewer
from tests.support.waiting import in_thread
from tools import export
from tools.export import ExportConfig
from tools.view import ViewConfig
from train import train

# --- settings ---------------------------------------------------------------------------------------------------------


def test_lists_are_comma_separated():
    cfg = settings.load(SampleBenchConfig, ["--models", "GPT-2 124M", "--rows=1,64", "--repeats", "5"])
    assert cfg == SampleBenchConfig(models="GPT-2 124M", rows="1,64", repeats=5)
    cfg = settings.load(TrainBenchConfig, ["--parts=speed, profile", "--models=char 10.7M without dropout"])
    assert cfg.problems() == []


@pytest.mark.parametrize(
    "cls, arguments, remedy",
    [
        (SampleBenchConfig, ["--models=char 0.8M,GPT"], "'GPT'.*char 0.8M, char 10"),
        (SampleBenchConfig, ["--rows=1 10"], "commas"),
        (SampleBenchConfig, ["--llama_threads=0"], "at least 1"),
        (SampleBenchConfig, ["--device=cuda"], "cpu"),
        (TrainBenchConfig, ["--parts=sped"], "'sped'.*speed, race, profile"),
        (TrainBenchConfig, ["--libraries=torch"], "'torch'.*transformers, jax"),
        (DataBenchConfig, ["nothing.txt"], "no such file"),
        (DataBenchConfig, [], "text: .*lab/bench/preparation.py"),
        (ServeBenchConfig, [], "run: .*lab/bench/serving.py"),
        (ServeBenchConfig, ["a", "--what=loads"], "'loads'.*load, memory, llama"),
        (ServeBenchConfig, ["--what=llama"], "--llama="),
        (FaultsBenchConfig, ["--only=rolback"], "no fault contains this text"),
        (BaselineConfig, ["only_one"], "paths=only_one: .*lab/bench/baselines.py"),
    ],
)
def test_bad_settings_are_an_error_in_one_line(cls, arguments, remedy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=remedy) as error:
        settings.load(cls, arguments)
    line = str(error.value)
    assert "\n" not in line
    assert all(word.removeprefix("--") in line for word in arguments[-1:])


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_baseline_prepares_the_same_tokens(tmp_path, monkeypatch, seed):
    """Both methods must produce the same tokens, in a different order."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(["hello", "world", "日本", "the"], k=rng.randrange(1, 50))) for _ in range(300)]
    source = tmp_path / "source.jsonl"
    preparation.write_lines(source, texts)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(baselines, "gpt2_tokenizer", bpe)
    folder = tmp_path / "baseline"
    baselines.prepare_dataset(source, folder)
    baseline = np.concatenate([np.fromfile(folder / f"{name}.bin", dtype="<u2") for name in ("train", "test")])
    cfg = PrepareConfig(tokenizer="gpt2", data_dir=str(tmp_path))
    data = open_dataset(prepare(cfg, Corpus(find_sources([str(source)])), "ours"))
    ours = np.concatenate([shard.ids for shard in (*data.train, *data.val)])
    assert np.array_equal(np.bincount(baseline), np.bincount(ours)) and len(ours) > 300


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_memory_includes_all_processes(tmp_path):
    allocate = "import sys, time; data = bytearray(200_000_000); time.sleep(1)"
    in_child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {allocate!r}], check=True)"
    (tmp_path / "script.py").write_text(f"{in_child}; open('{tmp_path}/out', 'wb').write(bytes(5000))")
    usage = preparation.measure_command([str(tmp_path / "script.py")], tmp_path)
    assert 200e6 < usage.memory < 2 * 200e6  # the data of the child, counted once; Python takes far less
    assert usage.seconds >= 1  # the child sleeps
    assert preparation.process_memory(os.getpid()) > 0 and preparation.folder_size(tmp_path) > 5000


@pytest.mark.network
def test_preparation_tables_are_printed(tmp_path, capsys):
    source = tmp_path / "text.txt"
    source.write_text("".join(f"It is a truth universally acknowledged, {k}\n" for k in range(4000)))
    preparation.main(DataBenchConfig(text=(str(source),), repeats=1, split_on="\\n"))
    out = capsys.readouterr().out
    assert "| folio, twice the text |" in out and "| 12 x 1024 |" in out


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.needs("transformers", "gguf")
def test_all_sampling_methods_are_measured(capsys, monkeypatch, tmp_path):
    small = dict(block_size=16, vocab_size=30, n_layer=1, n_head=2, n_embd=32)
    monkeypatch.setattr(sampling, "MODELS", {"small": (small, 12)})
    monkeypatch.setattr(sampling, "MIN_SECONDS", 0.01)
    monkeypatch.setattr(sampling, "memory_bandwidth", lambda device: 1e10)
    calls = []

    def run_llama(folder, file, threads, temperature, prompt, rows, count):
        assert folder == tmp_path and file.stat().st_size > 10_000
        calls.append((file.stem, threads, temperature, len(prompt), rows, count))
        return {"ids": [0] * count, "seconds": 0.5 / threads}

    monkeypatch.setattr(baselines, "run_llama", run_llama)
    settings = dict(llama=str(tmp_path), rows="3", prompt_tokens=8, temperature=0.0, repeats=1)
    sampling.main(SampleBenchConfig(models="small", **settings))
    out = capsys.readouterr().out
    assert "| small, 12 tokens | batch of 3, tokens/s | ratio | first token after 8, ms | ratio | of the" in out
    for method in ("Folio, float32", "Folio, bfloat16", "Folio, int8", "Folio, int4", "transformers, bfloat16"):
        assert f"| {method} | " in out
    one = r"1\.00 \(1\.00 to 1\.00\)"
    assert re.search(rf"^\| baseline, float32 \| [\d,]+ \| {one} \| [\d.]+ \| {one} \|", out, re.MULTILINE)
    assert re.search(r"^\| llama\.cpp, Q8_0, 2 threads \| 144 \| .* \| 250 \| ", out, re.MULTILINE)
    kinds = [(matrices, threads, 0.0) for matrices in ("F16", "Q8_0", "Q4_0") for threads in (1, 2)]
    assert calls == 2 * [(*kind, *case) for kind in kinds for case in ((1, 3, 12), (8, 1, 1))]  # one round is warmup


PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def greedy(seed, request):
    """A random model, and nine greedy tokens after PROMPT. Its parameter: whether there are biases."""
    shape = dict(block_size=32, vocab_size=30, n_layer=2, n_head=2, n_embd=32, activation="gelu_new")
    model = random_model(seed, **shape, bias=getattr(request, "param", True))
    ids = torch.tensor([PROMPT])
    for _ in range(9):
        ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], dim=1)
    return model.eval(), ids[0, len(PROMPT) :].tolist()


@pytest.mark.needs("transformers", "gguf")
@pytest.mark.architecture("lab/bench/baselines.py: transformers_model")
@pytest.mark.parametrize("greedy", [True, False], indirect=True, ids=["bias", "no bias"])
def test_all_methods_generate_the_same(greedy):
    """The benchmarks compare the same work."""
    model, expected = greedy
    hf_model = baselines.transformers_model(model)
    logits = model(torch.tensor([PROMPT]))[0]
    limit = within(logits, logits_error(model.config, len(PROMPT)))
    torch.testing.assert_close(logits, hf_model(torch.tensor([PROMPT])).logits[:, -1:], **limit)
    folio_model = LanguageModel(model, CharTokenizer("".join(map(chr, range(30)))), "cpu", "float32")
    assert sampling.generate_folio(folio_model, 0.0, PROMPT, 2, 9) == [expected] * 2
    assert baselines.generate_recomputed(model, 0.0, PROMPT, 2, 9) == [expected] * 2
    assert baselines.generate_transformers(hf_model, 0.0, PROMPT, 2, 9) == [expected] * 2


@pytest.mark.slow
@pytest.mark.skipif("NODE_LLAMA_CPP" not in os.environ, reason="it names the folder where node-llama-cpp is installed")
@pytest.mark.parametrize("rows, threads", [(1, 1), (3, 2)])
def test_llama_cpp_generates_the_same(greedy, rows, threads, tmp_path):
    model, expected = greedy
    baselines.write_llama_model(model, tmp_path / "model.gguf", "F32")
    folder = Path(os.environ["NODE_LLAMA_CPP"])
    result = baselines.run_llama(folder, tmp_path / "model.gguf", threads, 0.0, PROMPT, rows, 9)
    assert result["ids"] == expected and 0 < result["first"] < result["decode"] < result["seconds"]
    result = baselines.run_llama(folder, tmp_path / "model.gguf", threads, 0.8, PROMPT, rows, 99)
    assert len(result["ids"]) == 32 - len(PROMPT) and set(result["ids"]) <= set(range(30))


def test_a_missing_llama_cpp_is_an_error(tmp_path, monkeypatch):
    assert baselines.LLAMA_SCRIPT.is_file()
    with pytest.raises(UserError, match=r"^llama=.*(npm install --prefix .* node-llama-cpp|Node\.js is not installed)"):
        baselines.run_llama(tmp_path, tmp_path / "model.gguf", 1, 0.0, PROMPT, 1, 9)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^llama=.*: Node.js is not installed"):
        baselines.run_llama(tmp_path, tmp_path / "model.gguf", 1, 0.0, PROMPT, 1, 9)


def test_a_nanogpt_checkouts_model_is_measured(tmp_path):
    """The benchmark uses GPTConfig, GPT, and generate(idx, max_new_tokens, ...) of the checkout's model.py."""
    with pytest.raises(UserError, match="not a checkout of nanoGPT"):
        baselines.nanogpt_model(tmp_path, {})
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace as GPTConfig\n"
        "class GPT(torch.nn.Linear):\n"
        "    def __init__(self, config): super().__init__(1, config.n_layer)\n"
        "    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):\n"
        "        self.arguments = temperature, top_k\n"
        "        return torch.cat([idx, torch.full((1, max_new_tokens), 5)], dim=1)\n"
    )
    nanogpt = baselines.nanogpt_model(tmp_path, {"n_layer": 2})
    assert baselines.generate_recomputed(nanogpt, 0.8, [1, 2], 3, 7) == [[5] * 7] * 3
    assert nanogpt.arguments == (0.8, 200)
    baselines.generate_recomputed(nanogpt, 0.0, [1, 2], 3, 7)
    assert nanogpt.arguments == (1.0, 1)  # nanoGPT divides by the temperature


# --- serving ----------------------------------------------------------------------------------------------------------


def test_the_server_is_measured(tmp_path, capsys, monkeypatch):
    save_random_run(tmp_path / "run", CharTokenizer("\n abcdefgh"), 3, block_size=32)
    monkeypatch.setattr(serving, "MEMORY_INTERVAL", 20)
    cfg = ServeBenchConfig(run=(str(tmp_path / "run"),), clients="6", tokens=8, requests=50, repeats=1)
    in_thread(serving.main, cfg)
    out = capsys.readouterr().out
    assert "| errors | 0 of 12 | 0 |" in out and "| texts that differ from a batch of one | 0 of 12 |" in out
    assert "| after 40 requests | " in out and "| after 50 requests | " in out and "| errors | 0 | 0 |" in out


@pytest.mark.needs("transformers", "gguf")
def test_the_server_is_compared_with_llama_cpp(tmp_path, capsys, monkeypatch):
    small = dict(block_size=32, vocab_size=30, n_layer=1, n_head=2, n_embd=32)
    monkeypatch.setattr(serving, "LLAMA_SHAPE", small)
    monkeypatch.setattr(serving, "LLAMA_DTYPES", {"int8": "Q8_0"})
    calls = []

    def run_llama(folder, file, threads, temperature, prompt, rows, count):
        calls.append((folder, file.name, threads, len(prompt), rows, count))
        return {"ids": [0] * count, "seconds": 1 / threads}

    monkeypatch.setattr(baselines, "run_llama", run_llama)
    cfg = ServeBenchConfig(what="llama", llama=str(tmp_path), llama_clients="1,3", tokens=8, repeats=1)
    in_thread(serving.main, cfg)
    out = capsys.readouterr().out
    assert re.search(r"^\| int8 / Q8_0 \| 3 \| [\d,]+ \| 48 \| 2 \| [\d.]+ \(", out, re.MULTILINE)
    expected = [(rows, threads) for rows in (1, 3) for _ in range(2) for threads in (1, 2)]  # the first round is warmup
    assert calls == [(tmp_path, "Q8_0.gguf", threads, 16, rows, 8) for rows, threads in expected]


def test_the_parts_of_a_stream_are_joined():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    events = [{"choices": [{"text": text}], "usage": None} for text in ("", "a", "b")]
    events.append({"choices": [], "usage": {"completion_tokens": 2}})
    raw = head + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    middle = raw.index(b'"a"') + 1
    answer = Answer([(0.1, raw[:middle]), (0.2, raw[middle : middle + 60]), (0.3, raw[middle + 60 :])])
    assert answer.text == "ab" and answer.first_text == 0.2 and answer.tokens == 2 and answer.is_complete
    assert not Answer(answer.parts[:2]).is_complete  # ended early
    failed = raw.replace(b'"choices": [{"text": "b"}]', b'"error": {"code": "x"}')
    for other in (failed, raw.replace(b"200 OK", b"503 Busy"), b""):
        assert not Answer([(0.1, other)]).is_complete


# --- training ---------------------------------------------------------------------------------------------------------


def test_lines_of_output_are_timestamped(tmp_path, monkeypatch):
    """When they are printed: the script prints its second line after the clock was read for the first one."""
    readings = itertools.count()

    def read_clock():
        reading = next(readings)
        (tmp_path / f"reading-{reading}").touch()
        return float(reading)

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=read_clock))
    wait = "while not os.path.exists('reading-1') and time.monotonic() < end: time.sleep(0.01)"
    script = f"import os, time\nend = time.monotonic() + 60\nprint(1)\n{wait}\nprint(os.path.exists('reading-1'))"
    (tmp_path / "works.py").write_text(script)
    assert training.run_timestamped(["works.py"], tmp_path) == [(1.0, "1"), (2.0, "True")]
    (tmp_path / "fails.py").write_text("print('a reason'); exit(1)")
    with pytest.raises(SystemExit, match=r"fails.py failed:\na reason"):
        training.run_timestamped(["fails.py"], tmp_path)


@pytest.fixture
def forked(monkeypatch):
    """Start programs faster, with timestamps of one second per line."""

    def run_forked(words, folder):
        completed = processes.run(words, folder)
        assert completed.returncode == 0, completed.stderr
        return list(enumerate(completed.stdout.splitlines()))

    monkeypatch.setattr(training, "run_timestamped", run_forked)


@pytest.fixture
def tiny_model(monkeypatch, data_dir) -> dict:
    """Settings that measure a tiny model once."""
    shape = dict(n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=2, dropout=0.0)
    monkeypatch.setattr(training, "MODELS", {"tiny": ("verse", shape)})
    monkeypatch.setattr(training, "MATMUL_SIZES", {"cpu": 64})
    return dict(models="tiny", parts="speed", repeats=1, data_dir=str(data_dir))


def test_training_speed_is_compared(peer, data_dir, capsys, tiny_model, forked):
    settings = tiny_model | dict(parts="speed, profile")
    training.main(TrainBenchConfig(peer=str(peer), **settings))
    out = capsys.readouterr().out
    assert "| nanoGPT | 320 | 1.00 (1.00 to 1.00) |" in out  # 16 tokens in 50 ms
    assert "| Folio, AdamW | " in out and "| Folio, Muon | " in out and "| `aten::mm` | " in out
    assert not (peer / "data").exists()
    with pytest.raises(UserError, match="not a checkout of nanoGPT"):
        training.main(TrainBenchConfig(peer=str(data_dir), **settings))


def test_the_time_of_a_kernel_is_counted_once():
    """On a GPU, the profile counted a kernel and the operation that launched it: twice the time of a step.

    On an H100, it also counted the annotation of the optimizer's step.
    """

    def event(key, device_type, cpu_time, device_time, is_user_annotation=False):
        times = dict(self_cpu_time_total=cpu_time, self_device_time_total=device_time)
        return SimpleNamespace(key=key, device_type=device_type, is_user_annotation=is_user_annotation, **times)

    operation, kernel = event("aten::mm", DeviceType.CPU, 3, 9), event("gemm", DeviceType.CUDA, 0, 9)
    annotation = event("Optimizer.step#AdamW.step", DeviceType.CUDA, 0, 5, is_user_annotation=True)
    assert training.operation_times([operation, kernel, annotation], on_cpu=False) == {"gemm": 9}
    assert training.operation_times([operation], on_cpu=True) == {"aten::mm": 3}


def test_a_sustained_matmul_is_measured_after_a_gpu_slows_down(monkeypatch):
    """The best of five single products was the limit of a step, which runs at a lower power-limited rate."""
    counts, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: counts.append(1) or matmul(a, b))

    def time_calls(action, count):
        before = len(counts)
        action()
        return (len(counts) - before) * (1e-3 if len(counts) < 100 else 2e-3)  # a slower product after the first 100

    monkeypatch.setattr(training, "time_calls", time_calls)
    rates = [training.matmul_rate(torch.float32, "cpu", size=8, seconds=seconds) for seconds in (0.0, 2.0)]
    seconds = [2 * 8**3 / rate for rate in rates]
    assert seconds[0] == pytest.approx(1e-3) and 1.9e-3 < seconds[1] < 2e-3 and len(counts) > 1000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_programs_use_the_same_compile_setting(peer, tiny_model, monkeypatch, device):
    """On a GPU, only nanoGPT was compiled, because Folio's `auto` does not compile such a short run."""
    settings = []

    def record(words, folder):
        settings.extend(word.removeprefix("--compile=") for word in words if word.startswith("--compile="))
        return [(0.0, f"iter {n}: time 50.00ms") for n in range(9)]

    monkeypatch.setattr(training, "run_timestamped", record)
    monkeypatch.setattr(training, "matmul_rate", lambda dtype, device, seconds: 1e9)
    monkeypatch.setattr(training, "read_metrics", lambda out_dir: [{"tokens_per_second": 1.0}] * 9)
    monkeypatch.setattr(training, "MATMUL_SIZES", {device: 64})
    with SimulatedGPU():
        training.main(TrainBenchConfig(peer=str(peer), device=device, **tiny_model))
    expected = "True True True" if device == "cuda" else "False True False False"  # on a CPU, nanoGPT in both ways
    assert " ".join(settings) == expected


@pytest.mark.parametrize("library", training_peers.LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_libraries_learn(library, dtype):
    if library == "jax" and not find_spec("jax"):
        pytest.skip("JAX is in no requirements file: pip install jax optax")
    packages, make_step = training_peers.LIBRARIES[library]
    for package in packages:
        pytest.importorskip(package)
    step = make_step(PeerConfig(library=(library,), n_layer=2, n_embd=32, dtype=dtype))
    tokens = np.random.default_rng(0).integers(65, size=(12, 65))
    losses = [step(tokens) for _ in range(20)]
    deviation = 0.02 * math.sqrt(32)  # of the logits at the start, which add half of its square to the loss
    error = deviation**2 / 2 + normal_limit() * deviation / math.sqrt(65)  # each token has its own logits
    assert losses[0] == pytest.approx(math.log(65), rel=0, abs=error)
    assert losses[-1] < math.log(65) - error  # which no model has by chance


def test_a_missing_library_is_an_error_that_says_how_to_install_it(data_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)  # its import fails
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(UserError, match="pip install jax optax"):
        training_peers.main(PeerConfig(library=("jax",)))
    with pytest.raises(UserError, match="pip install jax optax"):  # before anything is measured
        training.main(TrainBenchConfig(libraries="jax", data_dir=str(data_dir)))


@pytest.mark.slow  # imports transformers in two processes
def test_the_loop_of_another_library_prints_its_speed(tiny_model, monkeypatch, forked, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "folio_speed", lambda settings, folder: 1.0)
    training.main(TrainBenchConfig(libraries="transformers", **tiny_model))
    assert "| transformers, bfloat16 | " in capsys.readouterr().out


def test_a_race_ends_at_the_first_evaluation_at_or_below_the_target():
    evaluations = [Evaluation(1.0, 2.5), Evaluation(2.0, 1.9), Evaluation(3.0, 1.8), Evaluation(4.0, 1.85)]
    assert training.finish(evaluations, 1.9) == (2.0, 1.9) and training.finish(evaluations, 1.8) == (3.0, 1.8)
    assert training.finish(evaluations, None) == (4.0, 1.85)
    assert training.finish(evaluations, 1.7) == (math.inf, 1.85)


def test_races_are_compared(peer, data_dir, capsys, monkeypatch, forked):
    monkeypatch.setattr(training, "MODELS", {"tiny": ("verse", {})})
    monkeypatch.setattr(training, "RACE_DATASET", "verse")
    small = "--n_layer=1 --n_head=1 --n_embd=32 --block_size=16 --batch_size=4 --dataset=verse --sample_tokens=0"
    changes = [*small.split(), "--max_iters=10", "--wsd_decay_iters=5", "--minutes=None"]
    monkeypatch.setattr(training, "RACES", {"in nanoGPT's time": (None, changes)})
    monkeypatch.setattr(training, "evaluate_checkpoint", lambda path, cfg: 3.25)
    settings = dict(models="tiny", parts="race", seeds="3", data_dir=str(data_dir))
    training.main(TrainBenchConfig(peer=str(peer), **settings))
    rows = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    assert "| 1.8900 | 3.2500 |" in rows["| nanoGPT, its recipe for a CPU"]
    assert "3.2500 |" in rows["| Folio, in nanoGPT's time"]


@pytest.mark.needs("scipy")
def test_false_and_true_differences_of_a_sweep_are_counted(tmp_path, seed, capsys):
    rng = np.random.default_rng(seed)
    losses = {0.1: rng.normal(1.0, 0.01, 60), 0.2: rng.normal(2.0, 0.01, 60)}
    rows = [{"params": {"lr": lr}, "losses": dict(enumerate(values))} for lr, values in losses.items()]
    rows.append({"params": {"lr": 9.0}, "losses": {}})  # failed
    (tmp_path / "results.json").write_text(json.dumps({"combinations": rows}))
    sweeps.main(SweepBenchConfig(sweep=(str(tmp_path),)))
    output = capsys.readouterr().out
    assert "different settings, the same seeds: 20 of 20 comparisons (100.0%)" in output
    false_positives = int(re.search(r"^2 identical settings: (\d+) of 20 ", output, re.MULTILINE)[1])
    assert false_positives in binomial_range(20, 0.05)
    with pytest.raises(UserError, match=r"60 seeds.* 61"):
        sweeps.main(SweepBenchConfig(sweep=(str(tmp_path),), seeds=61))
    for content in ("not JSON", "[]", '{"combinations": [{}]}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(UserError, match=r"results\.json is damaged"):
            sweeps.main(SweepBenchConfig(sweep=(str(tmp_path),)))


def test_null_experiments_share_no_pair_and_their_false_verdicts_are_counted(tmp_path, seed, capsys):
    """Of arms that compute the same but for noise; an effect, for comparison, is always found."""
    rng = np.random.default_rng(seed)
    base = rng.normal(2.0, 0.1, 400)
    losses = {"base": base, "null": base + rng.normal(0, 0.02, 400), "effect": base - rng.normal(1.0, 0.02, 400)}
    rows = [{"params": {"code": arm}, "losses": dict(enumerate(values))} for arm, values in losses.items()]
    (tmp_path / "results.json").write_text(json.dumps({"combinations": rows}))
    null_experiments.main(NullBenchConfig(sweep=(str(tmp_path),), base="base"))
    cells = {line.split(" | ")[0].strip("| "): line for line in capsys.readouterr().out.splitlines() if "|" in line}
    false, total = map(int, re.search(r"(\d+) of (\d+)", cells["null"]).groups())
    assert total >= 50 and false in binomial_range(total, 0.05)
    assert re.search(r"(\d+) of \1 ", cells["effect"]) and re.search(r"(\d+) of \1 ", cells["effect, with a ledger"])
    differences = {name: values - base for name, values in losses.items() if name != "base"}
    results = null_experiments.experiments(differences, NullBenchConfig(), True)["null"]
    used = np.concatenate([values for _, values in results])
    assert np.array_equal(used, differences["null"][: len(used)]) and len(used) > 390
    written = json.loads((tmp_path / "differences.json").read_text())
    assert [len(values) for values in written] == [400, 400]
    with pytest.raises(ConfigError, match="base=main"):
        null_experiments.main(NullBenchConfig(sweep=(str(tmp_path),), base="main"))


# --- intervals --------------------------------------------------------------------------------------------------------


def test_the_simulation_of_intervals_draws_the_texts_it_describes(seed):
    sigma, spread, rho, n = 0.5, 0.3, 0.5, 20_000
    text = intervals.simulate(np.random.default_rng(seed), n, sigma, spread, rho)
    tokens, nats, limit = text.tokens, text.nats, normal_limit(4) / math.sqrt(n)
    inverse = math.exp(sigma**2 / 2) / 1000  # mean of 1 / tokens, by which rounding up changes a logarithm at most
    assert np.log(tokens).mean() == pytest.approx(math.log(1000), abs=limit * sigma + inverse)
    assert np.log(tokens).std() == pytest.approx(sigma, abs=limit * sigma / math.sqrt(2) + inverse)
    variance = spread**2 + intervals.TOKEN_SPREAD**2 * inverse  # of a document's mean, with the noise of its tokens
    correlation = rho * spread / math.sqrt(variance)
    error = limit * (1 - correlation**2) + inverse
    assert np.corrcoef(np.log(tokens), nats / tokens)[0, 1] == pytest.approx(correlation, abs=error)
    loss = nats.sum() / tokens.sum()
    deviation = (nats - loss * tokens).std() / tokens.mean()  # of a document's influence on the ratio
    assert loss == pytest.approx(intervals.true_loss(sigma, spread, rho), abs=limit * deviation)
    assert text.block_tokens.sum() == tokens.sum() and text.block_nats.sum() == pytest.approx(nats.sum())


def test_the_table_of_intervals(monkeypatch, capsys):
    monkeypatch.setattr(intervals, "DOCUMENTS", (2, 12))
    intervals.main(IntervalBenchConfig(texts=5))
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("| sigma | rho | documents | used | n - 1 |") and len(rows) == 2 * (4 + 3 + 3)


# --- sequential tests -------------------------------------------------------------------------------------------------


def test_the_tables_of_sequential_tests(tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy.stats")
    monkeypatch.setattr(sequential, "LOGS", np.array([-9.0, 6]))
    noise = tmp_path / "noise.json"
    noise.write_text("[[0.1, -0.2, 0.3], [1, 2], [0, 0]]", encoding="utf-8")
    sequential.main(SequentialBenchConfig(experiments=20, ledgers=5, noise=str(noise)))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("|---") for line in lines) == 5
    assert any(line.startswith("| measured |") for line in lines)


def test_saffron_and_addis_with_large_p_values():
    """Without candidates, SAFFRON's levels decrease like those of LORD++, and ADDIS ignores discarded p-values."""
    assert sequential.adaptive(np.array([0.6, 0.01]), 0.5, 1.0) == [False, False]  # 0.5 * 0.05 * 0.144 = 0.0036
    assert sequential.adaptive(np.array([0.6, 0.005]), 0.25, 0.5) == [False, True]  # 0.25 * 0.05 * 0.437 = 0.0055


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_no_planted_fault_is_stale():
    """The line of each fault occurs once, the fault changes it, and its tests exist."""
    assert [str(fault) for fault in FAULTS if not fault.is_in(ROOT) or fault.old == fault.new] == []
    assert [str(fault) for fault in FAULTS if "\n" in fault.old + fault.new] == []
    assert {file for fault in FAULTS for file in fault.tests if not (ROOT / file).is_file()} == set()
    assert len({*FAULTS}) == len(FAULTS) >= 60


@pytest.mark.skipif(not shutil.which("git"), reason="the copy has git's files")
def test_planted_faults_are_caught_or_not(tmp_path, monkeypatch, capsys):
    """A fault is caught if a test fails, not if there is no test. The files are the same afterwards.

    Without pytest, which takes seconds to start, each test file is a script.
    """
    script = 'import few\nif few.twice(3) != 6:\n    raise SystemExit("FAILED tests/test_few.py::test_twice - 5")\n'
    files = {"few.py": "def twice(n):\n    return 2 * n  # twice n\n", "tests/test_few.py": script}
    (tmp_path / "tests").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    faults = (
        Fault("few.py", "2 * n", "2 + n"),
        Fault("few.py", "# twice n", "# n"),
        Fault("few.py", "2 * n", "2 + n", "tests/test_none.py"),
        Fault("few.py", "n", "m"),
    )
    for name, value in {"ROOT": tmp_path, "FAULTS": faults, "PYTEST": ()}.items():
        monkeypatch.setattr(planted_faults, name, value)
    monkeypatch.setenv("PYTHONPATH", ".")
    with pytest.raises(SystemExit):
        planted_faults.main(FaultsBenchConfig())
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line[:10].strip() for line in lines] == ["caught", "not caught", "no result", "stale"]
    assert lines[0].endswith("(tests/test_few.py::test_twice)") and total.startswith("1 of 4 faults caught in ")
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in files} == files


# --- reference losses -------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_more_than_the_seed_are_refused(tiny, tmp_path):
    changes = [dict(seed=1, dropout=0.0, out_dir=str(tmp_path / "a")), dict(seed=2, out_dir=str(tmp_path / "b"))]
    for change in changes:
        train(tiny(max_iters=1, **change))
    with pytest.raises(UserError, match="only in their seeds"):
        reference_losses.main(ReferenceConfig(runs=tuple(change["out_dir"] for change in changes)))
    assert Path(reference.FILE).is_file()


# --- duplicates -------------------------------------------------------------------------------------------------------


def test_the_duplicates_benchmark(tmp_path, capsys, seed):
    rng = random.Random(seed)
    text = " ".join(f"w{int(rng.paretovariate(0.7))}" for _ in range(3000))  # frequencies as in a natural text
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    words = [str(tmp_path / "text.txt"), "--words=50", "--passages=20"]
    duplicates.main(settings.load(DuplicatesBenchConfig, words))
    out = capsys.readouterr().out
    assert "| exact | 1.00 | 100.0% | 100.0% |" in out and "of 20 other passages are false positives" in out
    with pytest.raises(UserError, match=r"60 passages of 50 words.* 2,000.*--passages"):
        duplicates.main(settings.load(DuplicatesBenchConfig, words[:2]))


# --- the HTML file ----------------------------------------------------------------------------------------------------


def run_here(command: list[str], **_: Any) -> SimpleNamespace:
    """Takes the place of subprocess.run: a script in this process, which has already imported torch."""
    script, cls = (sample, SampleConfig) if command[1].endswith("sample.py") else (export, ExportConfig)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        script.main(settings.load(cls, command[2:]))
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_html_benchmark_compares_a_file_with_sample_py(monkeypatch, capsys):
    """The benchmark fails if the texts differ."""
    shape = dict(block_size=24, n_layer=2, n_head=2, n_embd=16, activation="gelu")
    monkeypatch.setattr(html_file, "MODELS", {"tiny": Size(shape, 0.3)})
    monkeypatch.setattr(html_file, "subprocess", SimpleNamespace(run=run_here))
    in_thread(html_file.main, HtmlBenchConfig(models="tiny", repeats=1, tokens=60, browser=CHROMIUM))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny"))
    _, sample_speed, file_speed, ratio, bar, first_token, most = (cell.strip() for cell in row.strip("|").split("|"))
    speeds = [float(number.replace(",", "")) for number in (file_speed, sample_speed)]
    assert float(ratio.split()[0]) == pytest.approx(speeds[0] / speeds[1], rel=0.01, abs=0.006)
    assert bar == "0.5" and float(first_token) > 0 and most == "0.3"


# --- the viewer -------------------------------------------------------------------------------------------------------


def test_the_viewer_benchmark_measures_everything(browser, monkeypatch, capsys):
    @contextmanager
    def serve_here(tool: str, run: str, *options: str) -> Iterator[tuple[int, str]]:
        settings.load(ViewConfig, [run, *options])
        with serving_viewer([run]) as served:
            yield 0, served.url

    shape = dict(block_size=24, vocab_size=257, n_layer=2, n_head=3, n_embd=12)
    changed = {"MODELS": {"tiny": shape}, "SHORT": 8, "HOVER_TOKENS": 16, "running_server": serve_here}
    for name, value in {**changed, "headless_chromium": lambda program: nullcontext(browser)}.items():
        monkeypatch.setattr(viewer, name, value)
    viewer.main(ViewBenchConfig(models="tiny", repeats=1))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line.startswith("|")}
    for name, bar in {
        "page usable": "1 s", "trace of 24 tokens": "4 s", "another head at T = 24": "0.2 s",
        "hovering at T = 24: and layout": "", "JavaScript memory after 4 heads": "300 MB",
    }.items():  # fmt: skip
        median, worst, at_most = (cell.strip() for cell in rows[name])
        assert 0 < float(median.split()[0]) <= float(worst.split()[0]) and at_most == bar, name


def test_the_viewer_benchmark_needs_a_browser(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"chromium and google-chrome were not found.*--browser="):
        viewer.main(ViewBenchConfig())
