"""Baselines for the benchmarks: the methods of nanoGPT, transformers and llama.cpp.

    python lab/bench/baselines.py documents.jsonl FOLDER    prepare a data set as nanoGPT does

preparation.py starts this command as a separate process. The other baselines are functions: nanoGPT's batches,
generation without a cache, transformers' GPT-2 and llama.cpp with Folio's weights, and the scripts of a nanoGPT
checkout.
"""

import json
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402
from folio.base.workers import cores  # noqa: E402
from folio.data.shards import open_dataset  # noqa: E402
from folio.data.tokenizer import gpt2_tokenizer  # noqa: E402

# torch is imported in functions, because `prepare_dataset` is timed as a process and does not need it.

# nanoGPT's README, "I only have a macbook": its recipe for a CPU
NANOGPT_CPU_RECIPE = (
    "config/train_shakespeare_char.py --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
).split()
NANOGPT_CPU_LOSS = 1.886  # final validation loss of this recipe
TOP_K = 200  # of all generation methods
LLAMA_SCRIPT = Path(__file__).with_name("llama.mjs")
NANOGPT_A100_LOSS = 1.4697  # validation loss in nanoGPT's README for an A100


@dataclass(frozen=True)
class BaselineConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # JSON lines {"text": DOCUMENT}, and the output folder of train.bin and test.bin

    def problems(self) -> list[tuple[str, str]]:
        """Require two paths."""
        if len(self.paths) != 2:
            return [("paths", "give two, as in python lab/bench/baselines.py documents.jsonl FOLDER")]
        return []


def main(cfg: BaselineConfig) -> None:
    source, folder = map(Path, cfg.paths)
    prepare_dataset(source, folder)


# --- data -------------------------------------------------------------------------------------------------------------


def prepare_dataset(source: Path, folder: Path) -> None:
    """Tokenize JSON lines into one file of ids per split, with the method of nanoGPT's prepare.py for OpenWebText."""
    import datasets
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    datasets.disable_progress_bars()
    documents = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder))
    splits = documents.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    ranks = {token: rank for rank, token in enumerate(gpt2_tokenizer().ranks)}
    encoding = tiktoken.Encoding(  # equals tiktoken's "gpt2"
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )

    def process(example: dict) -> dict:
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    tokenized = splits.map(process, remove_columns=["text"], num_proc=cores())
    for name, split in tokenized.items():
        n_shards = min(1024, len(split))
        out = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(int(np.sum(split["len"][:])),))
        start = 0
        for index in range(n_shards):
            batch = split.shard(num_shards=n_shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"][:])
            out[start : start + len(ids)] = ids
            start += len(ids)
        out.flush()


def memmap_batch(path: Path, B: int, T: int) -> tuple[Any, Any]:
    """Return inputs and targets (B, T) from random offsets of a file of uint16 ids, by nanoGPT's train.py's method."""
    import torch

    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - T, (B,))
    x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
    return x, y


# --- generation -------------------------------------------------------------------------------------------------------


# Each method generates `count` tokens after each of `rows` copies of a prompt, and returns the generated ids per row.
# With a temperature of 0, all methods generate the same tokens.


def generate_recomputed(
    model: Any, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> list[list[int]]:
    """Generate one text after another without a cache, in torch's default float32: by the model's `generate` (nanoGPT)
    or, without one, by nanoGPT's method.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    top_k = TOP_K if temperature else 1  # nanoGPT divides by the temperature
    start = torch.tensor([prompt], device=next(model.parameters()).device)  # (1, T)
    texts = []
    with torch.inference_mode():
        for _ in range(rows):
            if hasattr(model, "generate"):
                texts.append(model.generate(start, count, temperature=temperature or 1.0, top_k=top_k))
                continue
            ids = start
            for _ in range(count):
                logits = model(ids[:, -model.config.block_size :])[0][:, -1] / (temperature or 1.0)  # (1, V)
                threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]  # (1, 1)
                probabilities = logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
            texts.append(ids)
    return torch.cat(texts)[:, len(prompt) :].tolist()


def generate_transformers(
    model: Any, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> list[list[int]]:
    """Generate all rows as one batch with transformers."""
    import torch

    ids = torch.tensor([prompt] * rows, device=model.device)
    sampling = dict(do_sample=True, temperature=temperature, top_k=TOP_K) if temperature else dict(do_sample=False)
    new_tokens = min(count, model.config.n_positions - len(prompt))  # it cannot generate beyond its last position
    settings = dict(max_new_tokens=new_tokens, attention_mask=torch.ones_like(ids), pad_token_id=0, **sampling)
    return model.generate(ids, **settings)[:, len(prompt) :].tolist()


def transformers_model(model: Any) -> Any:
    """Return transformers' GPT-2 with the weights of a model.GPT."""
    from folio.checkpoints import export_formats

    return export_formats.transformers_model(asdict(model.config), dict(model.named_parameters()))


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def write_llama_model(model: Any, path: Path, matrices: str) -> float:
    """Write a model.GPT for llama.cpp, with a dummy tokenizer. matrices: type of the matrices, as in write_gguf.

    Returns the bytes of weights that are read per token.
    """
    from gguf import GGUFReader

    from folio.checkpoints.checkpoint import Checkpoint
    from folio.checkpoints.export_formats import write_gguf

    vocab_size = model.config.vocab_size
    letters = [bytes([b]) for b in range(min(256, vocab_size - 2))]  # llama.cpp also needs at least one merge
    merged = (first + second for first, second in product(letters, repeat=2))
    ranks = [*letters, *islice(merged, vocab_size - 1 - len(letters))]
    tokenizer: Any = SimpleNamespace(ranks=ranks, eot=len(ranks), vocab_size=vocab_size)
    tensors = {name: p.detach().cpu() for name, p in model.named_parameters()}
    write_gguf(Checkpoint(path, tensors, tokenizer, {"model": asdict(model.config)}), path, matrices)
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors if tensor.name != "position_embd.weight")


def run_llama(
    folder: Path, file: Path, threads: int, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> dict[str, Any]:
    """Run lab/bench/llama.mjs, and return its output. folder: installation of node-llama-cpp. Raises UserError.

    It generates `count` tokens after each of `rows` copies of the prompt, but not beyond the model's last position.
    """
    settings = dict(
        threads=threads, rows=rows, prompt=",".join(map(str, prompt)), tokens=count, temperature=temperature
    )
    words = ["node", str(LLAMA_SCRIPT), str(folder), str(file)]
    words += [f"--{name}={value}" for name, value in settings.items()]
    if not shutil.which("node"):
        raise UserError(f"llama={folder}: Node.js is not installed; install it to run node-llama-cpp")
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        raise UserError(f"llama={folder}: run npm install --prefix {folder} node-llama-cpp")
    completed = subprocess.run(words, capture_output=True, text=True, encoding="utf-8")
    if completed.returncode:
        raise SystemExit(f"{words[1]} failed:\n{completed.stderr}")
    return json.loads(completed.stdout)


def llama_speed(
    folder: Path, file: Path, threads: int, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> float:
    """Return llama.cpp's tokens per second, excluding process startup and loading. Raises UserError."""
    result = run_llama(folder, file, threads, temperature, prompt, rows, count)
    return rows * len(result["ids"]) / result["seconds"]


# --- nanoGPT checkout -------------------------------------------------------------------------------------------------


def nanogpt_model(checkout: Path, shape: dict[str, Any]) -> Any:
    """Build a model of this shape with the model.py of a nanoGPT checkout. Raises UserError."""
    try:
        names = runpy.run_path(str(checkout / "model.py"))
        return names["GPT"](names["GPTConfig"](**{"bias": True, "dropout": 0.0, **shape})).eval()
    except (OSError, LookupError, TypeError) as error:
        raise UserError(f"peer={checkout}: not a checkout of nanoGPT ({error!r}); give its path") from None


def is_nanogpt(folder: Path) -> bool:
    """Whether a folder is a checkout of nanoGPT."""
    return all((folder / name).is_file() for name in ("train.py", "model.py", "config/train_shakespeare_char.py"))


def copy_checkout(checkout: Path, copy: Path, data_dir: Path, datasets: set[str]) -> None:
    """Copy a nanoGPT checkout, which remains unchanged, and add Folio's data sets to the copy.

    Raises UserError.
    """
    if not is_nanogpt(checkout):
        raise UserError(f"peer={checkout}: not a checkout of nanoGPT; give its path")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("*.bin", "out*", ".git"))
    for name in datasets:
        (copy / "data" / name).mkdir(parents=True, exist_ok=True)
        for split in ("train.bin", "val.bin"):
            shutil.copy(data_dir / name / split, copy / "data" / name)
        tokenizer = open_dataset(data_dir / name).load_tokenizer()
        if tokenizer.kind == "char":
            itos = dict(enumerate(tokenizer.characters))
            meta = {"vocab_size": len(itos), "itos": itos, "stoi": {character: i for i, character in itos.items()}}
            (copy / "data" / name / "meta.pkl").write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    run_script(main, BaselineConfig)
