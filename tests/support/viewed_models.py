"""Small models with random weights, saved as runs for the viewer."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from folio.checkpoints import checkpoint
from folio.checkpoints.snapshots import write_snapshot
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from model import GPT
from tests.support.decoding import random_model
from tests.support.runs import blank_state
from tests.support.tiny_tokenizers import bpe

STRANGE = "</script><b>&amp;\"'\0\x1b\t\u202eabc\u200f\u05d0\u2028\x85é🎉"  # must be displayed as text
TEXT = "To be, or not to be: that is the question."
TOKENIZERS: dict[str, Tokenizer] = {
    "char": CharTokenizer.of(TEXT + STRANGE + "\n"),
    "bpe": bpe(),  # é takes two tokens of one byte each
    "rotary": ByteTokenizer(),
}
SHAPES = {  # fields of GPTConfig
    "char": dict(position="learned", n_head=4),
    "bpe": dict(position="relative", bias=False, n_layer=3, activation="gelu"),
    "rotary": dict(position="rotary", vocab_size=260),  # three padding ids
}

SETTINGS = {"max_iters": 300, "dataset": "no-such-data", "data_dir": None}  # of their runs


def build_model(kind: str, seed: int) -> GPT:
    """A model with one of SHAPES and a context of 48 tokens."""
    sizes = dict(block_size=48, vocab_size=TOKENIZERS[kind].vocab_size, n_layer=2, n_head=2, n_embd=32, dropout=0.1)
    return random_model(seed, **{**sizes, **SHAPES[kind]}).requires_grad_(False)


def save_run(
    folder: Path,
    models: dict[int, GPT],
    tokenizer: Tokenizer,
    snapshots: dict[int, GPT],
    settings: dict[str, Any] = SETTINGS,
) -> str:
    """Write a run folder with checkpoints and snapshots by step. The last checkpoint is the best."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, model in models.items():
        state = blank_state(step, model=asdict(model.config), config=settings, best_val_loss=1 / step)
        weights = dict(model.named_parameters())
        checkpoint.save(folder, step, weights, {"none": torch.zeros(1)}, tokenizer, state, keep_last=100)
    for step, model in snapshots.items():
        write_snapshot(folder, step, dict(model.named_parameters()))
    return str(folder)


def save_random_run(folder: Path, tokenizer: Tokenizer, seed: int, settings: dict[str, Any] | None = None, **sizes):
    """Save a random model as step 20 of a run, and return it. sizes: fields of GPTConfig; settings: of the run."""
    model = random_model(seed, **{"vocab_size": tokenizer.vocab_size, **sizes})
    save_run(folder, {20: model}, tokenizer, {}, settings or {})
    return model
