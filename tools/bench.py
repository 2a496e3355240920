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
"""

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, configurator  # noqa: E402
from folio.configurator import line_breaks  # noqa: E402
from folio.dataset import Mixture, open_dataset  # noqa: E402
from folio.files import read_json  # noqa: E402
from folio.pipeline import cores  # noqa: E402
from folio.tokenizer import gpt2_tokenizer  # noqa: E402

MB = 1_000_000


MODELS = {  # name -> the shape, and tokens to write
    "char 0.8M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 400),
    "char 10.7M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 255),
    "GPT-2 124M": (dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768), 64),
}


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
    sample.set_defaults(run=bench_sample)
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
    from folio.runtime import decide

    weight = model.transformer.wte.weight
    runtime = decide(weight.device.type, str(weight.dtype).removeprefix("torch."), False)
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


def timed(action: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        action()
    return time.perf_counter() - began


if __name__ == "__main__":
    configurator.run_script(main)
