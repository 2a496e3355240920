"""Measure Folio on this machine against the usual way, alternating, in one run.

    python tools/bench.py data enwik8 --split_on="  <page>"
    python tools/bench.py data novel.txt --split_on="\\n\\n" --repeats=5

`data` prepares a text, as JSON lines, in GPT-2's tokens, and then draws batches from it. The usual way is nanoGPT's
(its method, written anew here): `datasets.map` over `encode_ordinary` with a process a core, ids as lists, then copied
into one memmap; and batches that open a memmap and stack slices of it.

    python tools/bench.py sample --models "char 10.7M" --peer=../nanoGPT
    python tools/bench.py sample --models "GPT-2 124M" --device=cuda --rows 1 64

`sample` writes tokens with models of random weights, one text and ten at a time: from the cache, with transformers'
`generate` on the same weights, and the usual way, one text after another with the whole context recomputed for each
token: by nanoGPT's own `generate` where `--peer` names a checkout. Beside each stands the share of the speed at which
this machine's memory could deliver the weights for one text.

    python tools/bench.py train --peer=../nanoGPT
    python tools/bench.py train --peer=../nanoGPT --parts speed --models "GPT-2 124M" --device=cuda

`train` runs the commands themselves, nanoGPT's and ours, one after the other: training speed on the same model and
batch, then a race of whole processes, from their start to the evaluation that crosses the line: to the loss at which
nanoGPT's recipe for a CPU ends, for the lowest loss in the time that this takes, and to the loss that its README gives
for an A100. Each saved checkpoint is scored again over the whole validation set. A profile says where our step goes.
"""

import argparse
import json
import math
import os
import pickle
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, configurator  # noqa: E402
from folio.configurator import line_breaks  # noqa: E402
from folio.files import read_json  # noqa: E402
from folio.shards import open_dataset  # noqa: E402
from folio.tokenizer import gpt2_tokenizer  # noqa: E402
from folio.windows import Mixture  # noqa: E402
from folio.workers import cores  # noqa: E402

MB = 1_000_000


MODELS = {  # name -> the shape, and tokens to write
    "char 0.8M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 400),
    "char 10.7M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 255),
    "GPT-2 124M": (dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768), 64),
}


# nanoGPT's README, "I only have a macbook": its whole recipe for a CPU, and what it prints at the end
CPU_RECIPE = (
    "config/train_shakespeare_char.py --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
).split()
CPU_LOSS, A100_LOSS = 1.886, 1.4697  # validation loss that nanoGPT ends with: by that recipe, by its README on an A100

STEPS = {  # name -> data set, and settings that both have; the rest is as in their config files
    "char 0.8M": ("shakespeare_char", dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0)),
    "char 10.7M": (
        "shakespeare_char",
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16, dropout=0.2),
    ),
    "char 10.7M, no dropout": (
        "shakespeare_char",
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16, dropout=0.0),
    ),
    "GPT-2 124M": ("shakespeare", dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16, dropout=0.0)),
}
RACED = "shakespeare_char"  # data set of the races
# a smaller model than our recipe's: in so short a time more text is worth more than more weights
SMALLER = "--n_layer=1 --n_embd=96 --block_size=64 --muon_learning_rate=0.05 --max_iters=310 --wsd_decay_iters=217"
RACES = {  # name -> the loss to be reached (None: the lowest in nanoGPT's time), and what changes in our recipe
    f"to {CPU_LOSS}": (CPU_LOSS, [*SMALLER.split(), "--eval_interval=310"]),
    "in nanoGPT's time": (None, []),
    f"to {A100_LOSS}": (A100_LOSS, []),
}
IMPORTS = 1.5  # seconds before a run's own clock starts
PARTS = ("speed", "race", "profile")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="what")
    data = commands.add_parser("data", help="preparing a text, and drawing batches")
    data.add_argument("input", type=Path, help="a text file")
    data.add_argument("--split_on", default="\\n\\n", help="what divides it into documents; \\n is a line break")
    data.add_argument("--repeats", type=int, default=3, help="times that each is measured (%(default)s)")
    data.set_defaults(run=bench_data)
    sample = commands.add_parser("sample", help="writing tokens")
    sample.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    sample.add_argument("--repeats", type=int, default=3, help="times that each is measured (%(default)s)")
    sample.add_argument("--rows", type=int, nargs="+", default=[1, 10], help="texts at a time (1 10)")
    sample.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    sample.add_argument("--peer", type=Path, help="a checkout of nanoGPT, to measure its own generate")
    sample.add_argument("--busy", type=int, default=0, help="processes that keep a core busy beside it (%(default)s)")
    sample.set_defaults(run=bench_sample)
    train = commands.add_parser("train", help="training")
    train.add_argument("--peer", type=Path, help="a checkout of nanoGPT; without it, only Folio is measured")
    train.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    train.add_argument("--models", nargs="+", choices=STEPS, default=["char 0.8M", "char 10.7M"], help="for the speed")
    train.add_argument("--repeats", type=int, default=3, help="times that each speed is measured (%(default)s)")
    train.add_argument("--seeds", type=int, nargs="+", default=[1337, 1, 2], help="of the races (1337 1 2)")
    train.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    train.add_argument("--data_dir", default=str(ROOT / "data"), help="folder of the data sets (data)")
    train.add_argument("--busy", type=int, default=0, help="processes that keep a core busy beside it (%(default)s)")
    train.set_defaults(run=bench_train)
    usual = commands.add_parser("usual-way")  # started by `data`, as a process of its own
    usual.add_argument("input", type=Path)
    usual.add_argument("folder", type=Path)
    usual.set_defaults(run=lambda args: prepare_the_usual_way(args.input, args.folder))
    args = parser.parse_args(words)
    args.run(args)


# --- preparing --------------------------------------------------------------------------------------------------------


def bench_data(args: argparse.Namespace) -> None:
    """Print both tables."""
    gpt2_tokenizer()  # fetched before anything is timed
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = [str(ROOT / "prepare" / "text.py"), "--tokenizer=gpt2", f"--data_dir={folder / 'ours'}", "--name=text"]
        lines = folder / "lines.jsonl"
        documents = args.input.read_text(encoding="utf-8").split(line_breaks(args.split_on))
        write_lines(lines, documents)
        usual = [str(ROOT / "tools" / "bench.py"), "usual-way", str(lines), str(folder / "usual")]
        ways = {"usual": usual, "folio": [*ours, str(lines)]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way, words in ways.items():
                for name in ("ours", "usual"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                found[way].append(measured(words, folder))
        tokens = sum(read_json(folder / "ours" / "text" / "report.json")["tokens"].values())
        doubled = folder / "doubled.jsonl"
        write_lines(doubled, documents + documents)
        twice = measured([*ours, str(doubled), "--overwrite=True"], folder)
        size = args.input.stat().st_size / MB
        print(
            f"\n{args.input.name}: {size:,.1f} MB, {len(documents):,} documents, {tokens:,} tokens, {cores()} cores\n"
        )
        print("| | seconds | tokens/s | ratio | peak memory | files on the way |\n|---|---|---|---|---|---|")
        slow = statistics.median(run["seconds"] for run in found["usual"])
        rows = [*((way, runs, tokens) for way, runs in found.items()), ("folio, twice the text", [twice], 2 * tokens)]
        for way, runs, n in rows:
            seconds, memory, disk = (statistics.median(r[key] for r in runs) for key in ("seconds", "memory", "disk"))
            ratio = n / seconds / (tokens / slow)
            speed = f"{seconds:.2f} | {n / seconds / 1e6:.2f} M | {ratio:.2f}"
            print(f"| {way} | {speed} | {memory / MB:,.0f} MB | {disk / MB:,.0f} MB |")
        print("\nMedians; peak memory is of all processes together, shared pages counted once.\n")
        shutil.rmtree(folder / "ours")
        subprocess.run([sys.executable, *ways["folio"]], check=True, stdout=subprocess.DEVNULL)
        bench_batches(folder / "ours" / "text", args.repeats)


def write_lines(path: Path, documents: list[str]) -> None:
    """The documents as JSON lines, from which both ways begin."""
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")


def prepare_the_usual_way(source: Path, folder: Path) -> None:
    """From JSON lines to train.bin and val.bin as nanoGPT's prepare.py for OpenWebText goes about it."""
    import datasets
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    datasets.disable_progress_bars()
    raw = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder))
    split = raw.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    ranks = {token: rank for rank, token in enumerate(gpt2_tokenizer().ranks)}
    encoding = tiktoken.Encoding(  # tiktoken's own "gpt2"
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )

    def process(example: dict) -> dict:
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    tokenized = split.map(process, remove_columns=["text"], num_proc=cores())
    for name, part in tokenized.items():
        shards = min(1024, len(part))
        out = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(int(np.sum(part["len"][:])),))
        at = 0
        for index in range(shards):
            batch = part.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"][:])
            out[at : at + len(ids)] = ids
            at += len(ids)
        out.flush()


def measured(words: list[str], folder: Path) -> dict[str, float]:
    """Run a script: seconds from start to end, peak memory of all its processes, and peak size of what it wrote."""
    before = size_of(folder)
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks = {"memory": 0.0, "disk": 0.0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peaks["memory"] = max(peaks["memory"], memory_of(process.pid))
            peaks["disk"] = max(peaks["disk"], size_of(folder) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, err = process.communicate()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{words} failed:\n{err}")
    return {"seconds": seconds, **peaks}


def memory_of(pid: int) -> float:
    """Bytes of memory of a process and all below it, each shared page divided among those that share it. On Linux."""
    total = 0
    with suppress(OSError):  # it may have ended in the meantime
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    return total


def size_of(folder: Path) -> float:
    """Bytes of the files below a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it may have gone in the meantime
                total += os.stat(os.path.join(place, name)).st_size
    return total


# --- batches ----------------------------------------------------------------------------------------------------------


def bench_batches(folder: Path, repeats: int) -> None:
    """Sequences a second on one core, as torch tensors, drawn in shuffled order."""
    import torch  # here, so that the usual way, which does not need it, does not wait for it

    torch.set_num_threads(1)
    dataset = open_dataset(folder)
    path = folder / read_json(folder / "meta.json")["splits"]["train"][0]["file"]

    def usual_batch(B: int, T: int) -> tuple:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - T, (B,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
        return x, y

    print("| batch | usual | folio | ratio |\n|---|---|---|---|")
    for B, T in ((64, 256), (12, 1024)):
        windows = Mixture([(dataset, 1.0)], T, seed=1337, sampling="epoch")
        drawn = 0

        def our_batch(B: int, T: int, windows: Mixture = windows) -> tuple:
            nonlocal drawn
            x, y = windows.batch(drawn, B)
            drawn += B
            return torch.from_numpy(x), torch.from_numpy(y)

        speeds: dict[str, list[float]] = {"usual": [], "folio": []}
        for _ in range(repeats + 1):
            for name, draw, count in (("usual", usual_batch, 300), ("folio", our_batch, 3000)):
                speeds[name].append(B * count / timed(lambda draw=draw, B=B, T=T: draw(B, T), count))
        usual, ours = (statistics.median(speed[1:]) for speed in speeds.values())  # the first warms up
        print(f"| {B} x {T} | {usual:,.0f} sequences/s | {ours:,.0f} sequences/s | {ours / usual:.1f} |")


# --- writing tokens ---------------------------------------------------------------------------------------------------


def bench_sample(args: argparse.Namespace) -> None:
    """Print a table for each model."""
    import torch

    from folio.generate import pack
    from model import GPT, GPTConfig

    bandwidth = memory_speed(args.device)
    on = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    print(f"memory is read at {bandwidth / 1e9:,.0f} GB/s on {on}, torch {torch.__version__}\n")
    usual = "nanoGPT" if args.peer else "the usual way"
    for name in args.models:
        shape, count = MODELS[name]
        plain = GPT(GPTConfig(**shape)).eval().to(args.device)
        ways: dict[str, tuple[Callable[[int], int], int]] = {}  # rows -> tokens that were written; and bytes a weight
        for dtype, size in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
            ours = GPT(GPTConfig(**shape)).eval().to(args.device, torch.float32 if size == 4 else torch.bfloat16)
            if args.device == "cpu":
                pack(ours, int8=dtype == "int8")
            elif dtype == "int8":
                continue
            ways[f"Folio, {dtype}"] = partial(write_cached, ours, count), size
        for dtype in (torch.float32, torch.bfloat16):
            theirs, way = as_transformers(plain).to(args.device, dtype), str(dtype).removeprefix("torch.")
            ways[f"transformers, {way}"] = partial(write_peer, theirs, count), dtype.itemsize
        slowest = nanogpt(args.peer, shape).to(args.device) if args.peer else plain
        ways[f"{usual}, float32"] = partial(write_recomputed, slowest, count), 4
        speeds: dict[str, dict[int, list[float]]] = {way: {rows: [] for rows in args.rows} for way in ways}
        with busy_processes(args.busy):
            for repeat in range(args.repeats + 1):  # the first warms up
                for way, (write, _) in ways.items():
                    for rows in args.rows:
                        if repeat or not way.startswith(usual):
                            began = time.perf_counter()
                            speed = write(rows) / (time.perf_counter() - began)
                            speeds[way][rows] += [speed] if repeat else []
        medians = {way: {rows: statistics.median(found[rows]) for rows in args.rows} for way, found in speeds.items()}
        slow = medians[f"{usual}, float32"]
        parameters = plain.num_params()
        read = parameters["total"] - parameters["positions"]
        heads = "".join(f" {rows} at a time, tokens/s | ratio |" for rows in args.rows)
        print(f"| {name}, {count} tokens |{heads} of the memory's limit |\n|{'---|' * (2 * len(args.rows) + 2)}")
        for way, found in medians.items():
            limit = bandwidth / (read * ways[way][1])
            cells = "".join(f" {found[rows]:,.0f} | {found[rows] / slow[rows]:.1f} |" for rows in args.rows)
            print(f"| {way} |{cells} {found[args.rows[0]] / args.rows[0] / limit:.0%} |")
        print()


def memory_speed(device: str) -> float:
    """Bytes a second at which large tensors are read."""
    import torch

    ones = torch.ones(300_000_000, device=device)
    return max(ones.nbytes / timed(lambda: ones.sum().item(), 1) for _ in range(5))


def write_cached(model: Any, count: int, rows: int) -> int:
    from folio.generate import Sampling, generate
    from folio.runtime import resolve_runtime

    weight = model.transformer.wte.weight
    runtime = resolve_runtime(weight.device.type, str(weight.dtype).removeprefix("torch."), False)
    steps = generate(model, [[1]] * rows, runtime, max_new_tokens=count, sampling=Sampling(temperature=0.8, top_k=200))
    return sum(len(step.tokens) for step in steps)


def write_peer(model: Any, count: int, rows: int) -> int:
    import torch

    ids = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    settings = dict(do_sample=True, temperature=0.8, top_k=200, attention_mask=torch.ones_like(ids), pad_token_id=0)
    new = min(count, model.config.n_positions - 1)  # it does not go beyond
    return model.generate(ids, max_new_tokens=new, **settings)[:, 1:].numel()


def write_recomputed(model: Any, count: int, rows: int) -> int:
    """One text after another, and each token from the whole context, in torch's default float32."""
    import torch

    torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        for _ in range(rows):
            ids = torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device)
            if hasattr(model, "generate"):
                model.generate(ids, count, temperature=0.8, top_k=200)
                continue
            for _ in range(count):
                logits = model(ids[:, -model.config.block_size :])[0][:, -1] / 0.8
                kept = logits.topk(min(200, logits.shape[-1])).values[:, [-1]]
                probabilities = logits.masked_fill(logits < kept, -torch.inf).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return rows * count


def nanogpt(checkout: Path, shape: dict[str, Any]) -> Any:
    """The model of that shape, made by the model.py of a checkout of nanoGPT. Raises UserError."""
    try:
        names = runpy.run_path(str(checkout / "model.py"))
        return names["GPT"](names["GPTConfig"](**{"bias": True, "dropout": 0.0, **shape})).eval()
    except (OSError, LookupError, TypeError) as error:
        raise UserError(f"peer={checkout}: it is not a checkout of nanoGPT ({error!r})") from None


def as_transformers(ours: Any) -> Any:
    """transformers' GPT-2 with the same weights; its matrices are stored (in, out), and it has all the biases."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    c = ours.config
    settings = dict(n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head, bos_token_id=None, eos_token_id=None)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=c.vocab_size, n_positions=c.block_size, **settings)).eval()
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name in weights:
                matrix = ".h." in name and p.dim() == 2
                p.copy_(weights[name].T if matrix else weights[name])
            else:
                p.zero_()
    return theirs


# --- training ---------------------------------------------------------------------------------------------------------


def bench_train(args: argparse.Namespace) -> None:
    """Print a table for each part."""
    import torch

    from train import TrainConfig, find_datasets

    on = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    print(f"{on}, torch {torch.__version__}\n")
    with tempfile.TemporaryDirectory() as scratch, busy_processes(args.busy):
        folder = Path(scratch)
        names = {STEPS[name][0] for name in args.models} | ({RACED} if "race" in args.parts else set())
        for name in names:  # prepared before anything is timed
            find_datasets(TrainConfig(dataset=name, data_dir=args.data_dir))
        if args.peer:
            copy_of_peer(args.peer, folder / "peer", Path(args.data_dir), names)
        if "speed" in args.parts:
            for name in args.models:
                compare_speed(name, folder, args)
        if "race" in args.parts:
            race(folder, args)
        if "profile" in args.parts:
            for name in args.models:
                profile(name, args)


def copy_of_peer(checkout: Path, copy: Path, data_dir: Path, names: set[str]) -> None:
    """A checkout's scripts, with our tokens, so that nothing is written into it. Raises UserError."""
    if not all((checkout / name).is_file() for name in ("train.py", "model.py", "config/train_shakespeare_char.py")):
        raise UserError(f"peer={checkout}: it is not a checkout of nanoGPT")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("*.bin", "out*", ".git"))
    for name in names:
        (copy / "data" / name).mkdir(parents=True, exist_ok=True)
        for split in ("train.bin", "val.bin"):
            shutil.copy(data_dir / name / split, copy / "data" / name)
        tokenizer = open_dataset(data_dir / name).load_tokenizer()
        if tokenizer.kind == "char":
            characters = dict(enumerate(tokenizer.characters))
            meta = {"vocab_size": len(characters), "itos": characters, "stoi": {c: i for i, c in characters.items()}}
            (copy / "data" / name / "meta.pkl").write_bytes(pickle.dumps(meta))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy, as long as the block lasts."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def lines_of(words: list[str], folder: Path) -> list[tuple[float, str]]:
    """Run a Python script in a folder: what it prints, each line with the seconds since the start."""
    began = time.perf_counter()
    lines = []
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip()))
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n" + "\n".join(line for _, line in lines[-20:]))
    return lines


def as_words(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def compare_speed(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Training tokens a second of both on the same model, and the share of this machine's own matmul rate."""
    import torch

    from model import GPTConfig

    dataset, settings = STEPS[name]
    shape = {key: settings[key] for key in ("n_layer", "n_head", "n_embd", "block_size")}
    tokens = settings["batch_size"] * settings["block_size"]
    vocab_size = open_dataset(Path(args.data_dir) / dataset).vocab_size
    flops = GPTConfig(vocab_size=vocab_size, **shape).flops_per_token()["total"]
    same = [*as_words(settings), f"--device={args.device}", f"--dataset={dataset}", f"--compile={args.device != 'cpu'}"]
    ours = ["config/nanogpt_char.py", *same]
    ours += ["--eval_iters=1", "--sample_tokens=0", "--overwrite=True", f"--data_dir={args.data_dir}"]
    ways = {"Folio, AdamW": ours, "Folio, Muon": [*ours, "--optimizer=muon"]}
    steps = 60 if flops * tokens < 1e11 else 10
    found: dict[str, list[float]] = {"nanoGPT": [], **{way: [] for way in ways}} if args.peer else {w: [] for w in ways}
    rates: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(args.repeats):
        for dtype, rate in rates.items():
            rate.append(matmul_rate(dtype, args.device))
        if args.peer:
            theirs = ["config/train_shakespeare_char.py", *same, "--eval_iters=1", "--log_interval=1"]
            lines = lines_of(["train.py", *theirs, f"--max_iters={steps}"], folder / "peer")
            times = [float(t.group(1)) for _, line in lines if (t := re.search(r"time ([\d.]+)ms", line))]
            found["nanoGPT"].append(1000 * tokens / statistics.median(times[5:] if len(times) > 10 else times[2:]))
        for way, words in ways.items():
            out = folder / "ours"
            length = [f"--max_iters={steps}", f"--eval_interval={steps}", "--log_interval=1", f"--out_dir={out}"]
            lines_of([str(ROOT / "train.py"), *words, "--warmup_iters=1", *length], folder)
            speeds = [line["tokens_per_second"] for line in metrics_of(out) if line["tokens_per_second"]]
            found[way].append(statistics.median(speeds[5:] if len(speeds) > 10 else speeds[2:]))
    best = statistics.median(rates[torch.bfloat16])
    print(
        f"| {name}, {settings['batch_size']} x {settings['block_size']} | tokens/s | ratio | GFLOP/s | of bf16 matmul |"
    )
    print("|---|---|---|---|---|")
    slow = statistics.median(found["nanoGPT"]) if args.peer else None
    for way, speeds in found.items():
        speed = statistics.median(speeds)
        ratio = f"{speed / slow:.2f}" if slow else ""
        print(f"| {way} | {speed:,.0f} | {ratio} | {speed * flops / 1e9:,.0f} | {speed * flops / best:.0%} |")
    single = statistics.median(rates[torch.float32])
    print(f"\nA matmul of 2,048 x 2,048: {best / 1e9:,.0f} GFLOP/s in bfloat16, {single / 1e9:,.0f} in float32.\n")


def matmul_rate(dtype: Any, device: str) -> float:
    """FLOP/s of this machine, as torch computes by default."""
    import torch

    torch.set_float32_matmul_precision("highest")
    n = 2048 if device == "cpu" else 8192
    a = torch.ones(n, n, dtype=dtype, device=device)

    def multiply() -> None:
        a @ a
        if a.is_cuda:
            torch.cuda.synchronize()

    multiply()
    return 2 * n**3 / min(timed(multiply, 1) for _ in range(5))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def race(folder: Path, args: argparse.Namespace) -> None:
    """Whole processes, one after another, once a seed."""
    recipe = str(ROOT / "config" / "shakespeare_char.py")
    rows: list[tuple[str, str, float, float, float]] = []  # race, who, seconds, loss as printed, loss scored again
    seconds = 60.0  # without a peer
    for seed in args.seeds:
        if args.peer:
            words = ["train.py", *CPU_RECIPE, f"--device={args.device}", "--compile=False", "--out_dir=out-race"]
            lines = lines_of(words, folder / "peer")
            seconds, loss = [
                (at, float(t.group(1))) for at, line in lines if (t := re.search(r"^step .* val loss ([\d.]+)", line))
            ][-1]
            again = scored_again(folder / "peer" / "out-race" / "ckpt.pt", args)
            rows.append(("its recipe for a CPU", "nanoGPT", seconds, loss, again))
        for name, (line, settings) in RACES.items():
            out = folder / "race"
            more = settings if line else [f"--minutes={(seconds - IMPORTS) / 60:.4f}", *settings]
            words = [str(ROOT / "train.py"), recipe, f"--seed={seed}", f"--device={args.device}", *more]
            words += [f"--out_dir={out}", f"--data_dir={args.data_dir}", "--overwrite=True"]
            found = [
                (at, float(t.group(1)))
                for at, text in lines_of(words, folder)
                if (t := re.search(r"^step .* val ([\d.]+)", text))
            ]
            crossed = [one for one in found if one[1] <= line] or [(math.inf, found[-1][1])] if line else found[-1:]
            rows.append((name, "Folio", *crossed[0], scored_again(out, args)))
            print(f"seed {seed}, {name}: {crossed[0][0]:.1f} s, loss {crossed[0][1]:.4f}", flush=True)
    theirs = statistics.median([at for _, who, at, *_ in rows if who == "nanoGPT"] or [math.nan])
    print("\n| | seconds, of whole processes | nanoGPT's time over it | loss | scored again |\n|---|---|---|---|---|")
    for key in dict.fromkeys((who, what) for what, who, *_ in rows):
        found = [row for row in rows if (row[1], row[0]) == key]
        times, printed, again = ([row[i] for row in found] for i in (2, 3, 4))
        median = statistics.median(times)
        each = " / ".join(f"{loss:.4f}" for loss in printed)
        print(
            f"| {key[0]}, {key[1]} | {median:.1f} ({min(times):.1f} to {max(times):.1f}) | {theirs / median:.1f} "
            f"| {each} | {statistics.median(again):.4f} |"
        )
    print()


def scored_again(run: Path, args: argparse.Namespace) -> float:
    """The loss of a checkpoint over the whole validation set, in windows of its block size, by tools/evaluate.py."""
    found = run.with_name("scored.json")
    words = [str(ROOT / "tools" / "evaluate.py"), str(run), f"--dataset={RACED}", f"--data_dir={args.data_dir}"]
    lines_of([*words, f"--device={args.device}", f"--json={found}"], run.parent)
    return next(row["value"] for row in read_json(found)["results"] if row["measure"].startswith("loss"))


def profile(name: str, args: argparse.Namespace) -> None:
    """Where a step of ours goes, by torch's operations."""
    import torch

    from folio.optim import make_optimizer
    from folio.runtime import compiled, resolve_runtime
    from model import GPT, GPTConfig

    dataset, settings = STEPS[name][0], dict(STEPS[name][1])
    vocab_size = open_dataset(Path(args.data_dir) / dataset).vocab_size
    B, T = settings.pop("batch_size"), settings["block_size"]
    runtime = resolve_runtime(args.device, "auto", False)
    model = GPT(GPTConfig(vocab_size=vocab_size, bias=False, activation="gelu", **settings)).to(runtime.device)
    optimizer = make_optimizer(model, "muon", 1e-3, (0.9, 0.99), 0.1, 0.02, runtime.dtype)
    loss_of = compiled(model, runtime)
    x, y = torch.randint(vocab_size, (2, B, T), device=runtime.device)

    def step() -> None:
        loss_of(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timed(step, 3)
    with torch.profiler.profile() as found:
        timed(step, 3)
    times = {
        e.key: (e.self_device_time_total if args.device != "cpu" else e.self_cpu_time_total)
        for e in found.key_averages()
    }
    total = sum(times.values())
    print(f"| {name}, Muon: where a step of {total / 3e3:,.0f} ms goes | |\n|---|---|")
    for key, spent in sorted(times.items(), key=lambda item: -item[1])[:12]:
        print(f"| `{key}` | {spent / total:.1%} |")
    print()


def timed(action: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        action()
    return time.perf_counter() - began


if __name__ == "__main__":
    configurator.run_script(main)
