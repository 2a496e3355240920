"""The baselines that the bench scripts measure Folio against: the methods of nanoGPT and transformers.

    python tools/bench/baselines.py documents.jsonl FOLDER    prepare a data set as nanoGPT does

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

# torch is imported in the functions that use it: `prepare_dataset` is timed as a whole process and does not need torch.

# nanoGPT's README, "I only have a macbook": its recipe for a CPU
NANOGPT_CPU_RECIPE = (
    "config/train_shakespeare_char.py --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
).split()
NANOGPT_CPU_LOSS = 1.886  # validation loss that this recipe ends with
TOP_K = 200  # of all methods of generating
LLAMA_SCRIPT = Path(__file__).with_name("llama.mjs")
NANOGPT_A100_LOSS = 1.4697  # validation loss that nanoGPT's README gives for an A100


@dataclass(frozen=True)
class BaselineConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # a file of JSON lines, each {"text": DOCUMENT}; where to write train.bin and test.bin

    def problems(self) -> list[tuple[str, str]]:
        """There are two paths."""
        if len(self.paths) != 2:
            return [("paths", "give two, as in python tools/bench/baselines.py documents.jsonl FOLDER")]
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
    encoding = tiktoken.Encoding(  # tiktoken's own "gpt2"
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
    """Inputs and targets (B, T) from random places of a file of uint16 ids, with the method of nanoGPT's train.py."""
    import torch

    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - T, (B,))
    x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
    return x, y


# --- generating tokens ------------------------------------------------------------------------------------------------


# The methods get `rows` copies of a prompt, and how many tokens to generate after each. They return the ids that follow
# in each row. With a temperature of 0, all of them generate the same.


def generate_recomputed(
    model: Any, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> list[list[int]]:
    """One text after another, in torch's default float32. Each token is computed from the whole context: by the model's
    own `generate` (nanoGPT's) or, without one, as nanoGPT does it.
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
    """All rows at a time, with transformers."""
    import torch

    ids = torch.tensor([prompt] * rows, device=model.device)
    sampling = dict(do_sample=True, temperature=temperature, top_k=TOP_K) if temperature else dict(do_sample=False)
    new_tokens = min(count, model.config.n_positions - len(prompt))  # it does not generate past its last position
    settings = dict(max_new_tokens=new_tokens, attention_mask=torch.ones_like(ids), pad_token_id=0, **sampling)
    return model.generate(ids, **settings)[:, len(prompt) :].tolist()


def transformers_model(ours: Any) -> Any:
    """transformers' GPT-2 with the weights of a model.GPT."""
    from folio.checkpoints import export_formats

    return export_formats.transformers_model(asdict(ours.config), dict(ours.named_parameters()))


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def write_llama_model(ours: Any, path: Path, matrices: str) -> float:
    """Write a model.GPT for llama.cpp, with matrices of this type (export_formats.write_gguf) and meaningless tokens.

    Returns the bytes of the weights that are read for each token.
    """
    from gguf import GGUFReader

    from folio.checkpoints.checkpoint import Checkpoint
    from folio.checkpoints.export_formats import write_gguf

    vocab_size = ours.config.vocab_size
    letters = [bytes([b]) for b in range(min(256, vocab_size - 2))]  # and at least one merge, which llama.cpp needs
    merged = (first + second for first, second in product(letters, repeat=2))
    ranks = [*letters, *islice(merged, vocab_size - 1 - len(letters))]
    tokenizer: Any = SimpleNamespace(ranks=ranks, eot=len(ranks), vocab_size=vocab_size)
    tensors = {name: p.detach().cpu() for name, p in ours.named_parameters()}
    write_gguf(Checkpoint(path, tensors, tokenizer, {"model": asdict(ours.config)}), path, matrices)
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors if tensor.name != "position_embd.weight")


def run_llama(
    folder: Path, file: Path, threads: int, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> dict[str, Any]:
    """What tools/bench/llama.mjs prints. folder: node-llama-cpp is installed there. Raises UserError.

    It generates the same number of tokens after `rows` copies of the prompt, but not past the model's last position.
    """
    settings = dict(
        threads=threads, rows=rows, prompt=",".join(map(str, prompt)), tokens=count, temperature=temperature
    )
    words = ["node", str(LLAMA_SCRIPT), str(folder), str(file)]
    words += [f"--{name}={value}" for name, value in settings.items()]
    if not shutil.which("node"):
        raise UserError(f"llama={folder}: Node.js is not installed, which runs node-llama-cpp")
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        raise UserError(f"llama={folder}: npm install --prefix {folder} node-llama-cpp installs it there")
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{words[1]} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def llama_speed(
    folder: Path, file: Path, threads: int, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> float:
    """Tokens per second of llama.cpp, without starting its process and loading the file. Raises UserError."""
    result = run_llama(folder, file, threads, temperature, prompt, rows, count)
    return rows * len(result["ids"]) / result["seconds"]


# --- a checkout of nanoGPT --------------------------------------------------------------------------------------------


def nanogpt_model(checkout: Path, shape: dict[str, Any]) -> Any:
    """A model of that shape, built by the model.py of a nanoGPT checkout. Raises UserError."""
    try:
        names = runpy.run_path(str(checkout / "model.py"))
        return names["GPT"](names["GPTConfig"](**{"bias": True, "dropout": 0.0, **shape})).eval()
    except (OSError, LookupError, TypeError) as error:
        raise UserError(f"peer={checkout}: not a checkout of nanoGPT ({error!r}); give the path of one") from None


def copy_checkout(checkout: Path, copy: Path, data_dir: Path, datasets: set[str]) -> None:
    """Copy a nanoGPT checkout, so that nothing is written into it, and put Folio's data sets into the copy.

    Raises UserError.
    """
    if not all((checkout / name).is_file() for name in ("train.py", "model.py", "config/train_shakespeare_char.py")):
        raise UserError(f"peer={checkout}: not a checkout of nanoGPT; give the path of one")
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
