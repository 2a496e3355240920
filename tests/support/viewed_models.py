"""Small models with random weights, saved as runs that the viewer can open."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from folio.checkpoints import checkpoint
from folio.checkpoints.snapshots import write_snapshot
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from model import GPT, GPTConfig
from tests.support.decoding import random_model
from tests.support.runs import blank_state
from tests.support.tiny_tokenizers import bpe

STRANGE = "</script><b>&amp;\"'\0\x1b\t\u202eabc\u200f\u05d0\u2028\x85é🎉"  # must be shown as text
TEXT = "To be, or not to be: that is the question."
TOKENIZERS: dict[str, Tokenizer] = {
    "char": CharTokenizer.of(TEXT + STRANGE + "\n"),
    "bpe": bpe(),  # a token of one byte is only a part of é
    "rotary": ByteTokenizer(),
}
SHAPES = {  # fields of GPTConfig
    "char": dict(position="learned", n_head=4),
    "bpe": dict(position="relative", bias=False, n_layer=3, activation="gelu"),
    "rotary": dict(position="rotary", vocab_size=260),  # three ids more than the tokenizer has
}

SETTINGS = {"max_iters": 300, "dataset": "no-such-data", "data_dir": None}  # of their runs


def build_model(kind: str, seed: int) -> GPT:
    """A model of one of SHAPES, with a context of 48 tokens."""
    sizes = dict(block_size=48, vocab_size=TOKENIZERS[kind].vocab_size, n_layer=2, n_head=2, n_embd=32, dropout=0.1)
    return random_model(seed, **{**sizes, **SHAPES[kind]}).requires_grad_(False)


def save_run(
    folder: Path,
    models: dict[int, GPT],
    tokenizer: Tokenizer,
    snapshots: dict[int, GPT],
    settings: dict[str, Any] = SETTINGS,
) -> str:
    """A run's folder with complete checkpoints and snapshots by their steps. The best checkpoint is the last one."""
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


N = 128
PARTS = {"token": slice(0, N), "position": slice(N, 2 * N), "previous": slice(2 * N, 3 * N)}
SHARPNESS = 40.0  # the score of a key that matches; others have 0


def planted_model() -> GPT:
    model = GPT(GPTConfig(block_size=N, vocab_size=N, n_layer=2, n_head=3, n_embd=3 * N)).requires_grad_(False)
    transformer = model.transformer
    for p in model.parameters():
        p.zero_()
    for norm in [transformer.ln_f, *(norm for block in transformer.h for norm in (block.ln_1, block.ln_2))]:
        norm.weight.fill_(1.0)
    transformer.wte.weight[:, PARTS["token"]] = torch.eye(N)
    transformer.wpe.weight[:, PARTS["position"]] = torch.eye(N)

    one_hot = torch.eye(N)
    following = one_hot.roll(1, dims=0)  # maps the position t to t + 1
    not_first = torch.zeros(N, N)
    not_first[:, 0] = -1.0  # the first token has no previous one: the head can only attend to the token itself
    plant(model, 0, 0, {"position": one_hot}, {"position": following}, {"token": one_hot}, to="previous")
    key = {"previous": one_hot, "position": not_first}
    plant(model, 1, 1, {"token": one_hot}, key, {"token": one_hot}, to="token", strength=20.0)
    transformer.ln_f.weight.fill_(20.0)
    return model.eval()


def plant(
    model: GPT,
    layer: int,
    head: int,
    query: dict[str, Tensor],
    key: dict[str, Tensor],
    value: dict[str, Tensor],
    to: str,
    strength: float = 1.0,
) -> None:
    """Give a head matrices (N, N) by the part of the stream that they read, and the part that it writes to."""
    ones, C = layer + 2, 3 * N  # all states have so many ones among zeros, so the norm is the same affine function of
    mean = ones / C  # all: (x - mean) / deviation
    deviation = math.sqrt(mean - mean**2 + 1e-5)
    attn = model.transformer.h[layer].attn
    weight, bias = attn.c_attn.weight.view(3, 3, N, C), attn.c_attn.bias.view(3, 3, N)  # q, k, v; heads
    sharp = math.sqrt(SHARPNESS * math.sqrt(N))  # scores are q k / sqrt(D)
    for n, (parts, size) in enumerate([(query, sharp), (key, sharp), (value, 1.0)]):
        for part, matrix in parts.items():
            weight[n, head, :, PARTS[part]] = size * deviation * matrix
        bias[n, head] = weight[n, head].sum(-1) * mean / deviation
    attn.c_proj.weight[PARTS[to], head * N : (head + 1) * N] = strength * torch.eye(N)
