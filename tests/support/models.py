"""The shape of a small model, and random token ids."""

import torch

SMALL = dict(block_size=16, vocab_size=50, n_layer=2, n_head=4, n_embd=32)


def tokens(B: int, T: int, V: int = 50) -> torch.Tensor:
    return torch.randint(V, (B, T))
