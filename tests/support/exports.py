"""Checkpoints to export."""

from pathlib import Path

import torch

from folio.checkpoints.checkpoint import Checkpoint
from folio.data.tokenizer import Tokenizer
from model import GPT, GPTConfig


def checkpoint_of(
    tokenizer: Tokenizer, bias: bool, padding: int = 0, activation: str = "gelu_new", **settings
) -> Checkpoint:
    """A model with random weights and biases."""
    shape = dict(block_size=64, vocab_size=tokenizer.vocab_size + padding, n_layer=2, n_head=2, n_embd=16, bias=bias)
    shape |= dict(activation=activation, **settings)
    torch.manual_seed(3)
    model = GPT(GPTConfig(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Checkpoint(Path("random"), {n: p.detach() for n, p in model.named_parameters()}, tokenizer, {"model": shape})
