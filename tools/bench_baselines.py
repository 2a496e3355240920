"""The baselines that the bench scripts measure Folio against: the methods of nanoGPT and transformers.

    python tools/bench_baselines.py documents.jsonl FOLDER    prepare a data set as nanoGPT does

tools/bench_data.py starts this command as a separate process. The other baselines are functions: nanoGPT's batches,
generation without a cache, transformers' GPT-2 with Folio's weights, and the scripts of a nanoGPT checkout.
"""

import pickle
import runpy
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.configurator import Settings, run_script  # noqa: E402
from folio.shards import open_dataset  # noqa: E402
from folio.tokenizer import gpt2_tokenizer  # noqa: E402
from folio.workers import cores  # noqa: E402

# torch is imported in the functions that use it: `prepare_dataset` is timed as a whole process and does not need torch.

# nanoGPT's README, "I only have a macbook": its recipe for a CPU
NANOGPT_CPU_RECIPE = (
    "config/train_shakespeare_char.py --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
).split()
NANOGPT_CPU_LOSS = 1.886  # validation loss that this recipe ends with
NANOGPT_A100_LOSS = 1.4697  # validation loss that nanoGPT's README gives for an A100


@dataclass(frozen=True)
class BaselineConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # a file of JSON lines, each {"text": DOCUMENT}; where to write train.bin and test.bin

    def problems(self) -> list[tuple[str, str]]:
        """There are two paths."""
        if len(self.paths) != 2:
            return [("paths", "give two, as in python tools/bench_baselines.py documents.jsonl FOLDER")]
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


def generate_recomputed(model: Any, count: int, rows: int) -> int:
    """Generate `count` tokens in each of `rows` texts, one text after another, in torch's default float32. Each token
    is computed from the whole context: by the model's own `generate` (nanoGPT's) or, without one, as nanoGPT does it.

    Returns the number of generated tokens.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        for _ in range(rows):
            ids = torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device)
            if hasattr(model, "generate"):
                model.generate(ids, count, temperature=0.8, top_k=200)
                continue
            for _ in range(count):
                logits = model(ids[:, -model.config.block_size :])[0][:, -1] / 0.8  # (1, V)
                threshold = logits.topk(min(200, logits.shape[-1])).values[:, [-1]]  # (1, 1)
                probabilities = logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return rows * count


def generate_transformers(model: Any, count: int, rows: int) -> int:
    """Generate `count` tokens in each of `rows` texts at a time with transformers. Returns the number of tokens."""
    import torch

    ids = torch.ones(rows, 1, dtype=torch.long, device=model.device)
    settings = dict(do_sample=True, temperature=0.8, top_k=200, attention_mask=torch.ones_like(ids), pad_token_id=0)
    new_tokens = min(count, model.config.n_positions - 1)  # it does not generate past its last position
    return model.generate(ids, max_new_tokens=new_tokens, **settings)[:, 1:].numel()


def transformers_model(ours: Any) -> Any:
    """transformers' GPT-2 with the weights of a model.GPT."""
    from folio import export_formats

    return export_formats.transformers_model(asdict(ours.config), dict(ours.named_parameters()))


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
