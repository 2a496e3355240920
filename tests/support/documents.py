"""Attention to documents of different lengths, by a loop."""

import math

import torch
from torch.nn import functional as F


def attend_by_document(q, k, v, bounds_q, bounds_k, max_q, max_k, window_size):
    """torch.nn.attention.varlen.varlen_attn by a loop: q, k, v (tokens, H, D)."""
    assert torch.equal(bounds_q, bounds_k) and bounds_q.dtype == torch.int32 and window_size == (-1, 0)
    results, lengths = torch.full_like(q, math.nan), bounds_q.diff()
    assert bounds_q[0] == 0 and bounds_q[-1] == len(q) and 0 <= lengths.min() <= lengths.max() <= max_q == max_k
    for begin, end in zip(bounds_q.tolist(), bounds_q[1:].tolist(), strict=False):
        x = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))  # (1, H, T, D)
        results[begin:end] = F.scaled_dot_product_attention(*x, is_causal=True)[0].transpose(0, 1)
    return results
