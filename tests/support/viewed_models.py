"""Small models with random weights, saved as runs for the viewer."""

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


N = 128
PARTS = {"token": slice(0, N), "position": slice(N, 2 * N), "previous": slice(2 * N, 3 * N)}
SHARPNESS = 40.0  # the score of a matching key; others have 0


def planted_model() -> GPT:
    """A model with hand-written weights that copies: after the second A of "A B ... A", it predicts B.

    The residual stream has three parts of N channels with one-hot vectors: the token, its position, and (after layer 0)
    the previous token. Head 0 of layer 0 is a previous-token head: its query is the position t, its key its own
    position plus 1; they match for the key t - 1. It copies that token to the third part. Head 1 of layer 1 is an
    induction head: its query is the token, its key the token before the key; they match for keys that follow an earlier
    occurrence of the token. It adds the token at the key to the first part, so that the output matrix, which is the
    embedding table, predicts it. All other heads have score 0 for every key: uniform weights, and an output of 0.
    """
    model = GPT(GPTConfig(block_size=N, vocab_size=N, n_layer=2, n_head=3, n_embd=3 * N)).requires_grad_(False)
    transformer = model.transformer
    for p in model.parameters():
        p.zero_()
    for norm in [transformer.ln_f, *(norm for block in transformer.h for norm in (block.ln_1, block.ln_2))]:
        norm.weight.fill_(1.0)
    transformer.wte.weight[:, PARTS["token"]] = torch.eye(N)
    transformer.wpe.weight[:, PARTS["position"]] = torch.eye(N)

    one_hot = torch.eye(N)
    next_position = one_hot.roll(1, dims=0)  # maps position t to t + 1
    not_first = torch.zeros(N, N)
    not_first[:, 0] = -1.0  # the first token has no previous one, so that its head attends to itself
    plant(model, 0, 0, {"position": one_hot}, {"position": next_position}, {"token": one_hot}, to="previous")
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
    """Set the weights of a head. query, key, value: matrices (N, N) by the part of the stream that they read. to: the
    part that the head writes.
    """
    # Every state has `ones` ones among zeros, so that the norm is the same affine function: (x - mean) / deviation.
    ones, C = layer + 2, 3 * N
    mean = ones / C
    deviation = math.sqrt(mean - mean**2 + 1e-5)
    attn = model.transformer.h[layer].attn
    weight, bias = attn.c_attn.weight.view(3, 3, N, C), attn.c_attn.bias.view(3, 3, N)  # q, k, v; heads
    sharp = math.sqrt(SHARPNESS * math.sqrt(N))  # scores are q k / sqrt(D)
    for n, (parts, size) in enumerate([(query, sharp), (key, sharp), (value, 1.0)]):
        for part, matrix in parts.items():
            weight[n, head, :, PARTS[part]] = size * deviation * matrix
        bias[n, head] = weight[n, head].sum(-1) * mean / deviation
    attn.c_proj.weight[PARTS[to], head * N : (head + 1) * N] = strength * torch.eye(N)
