"""The key-value cache for decoding with torch.

Dimensions: B batch (rows), T time, S keys, H heads, D head size, L layers.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model import AttentionKernel, CausalSelfAttention, GPTConfig, Mask


def split_documents(ids: Sequence[int], document_token: int | None) -> list[list[int]]:
    """Split ids after each document token (GPTConfig.document_token; None: one document). The last part is not empty.

    A model predicts the next token from the last part alone. If this ends with the document token, the next token
    begins a document, at position 0.
    """
    ends = [position + 1 for position, token in enumerate(ids[:-1]) if token == document_token]
    return [list(ids[begin:end]) for begin, end in pairwise([0, *ends, len(ids)])]


class Prefix(NamedTuple):
    """The beginning of a context, whose keys and values are cached in a row."""

    row: int
    length: int


class KVCache(AttentionKernel):
    """A cache of the keys and values of the newest block_size tokens, (L, 2, B, H, S, D).

    Row b has had `lengths[b]` tokens, at positions 0, 1, ...; position p is in slot p % S, where it replaces position
    p - S. Queries never attend to empty slots. A row holds tokens of one document (see split_documents).

    capacity: for CUDA graphs, the number of slots that every row attends to, under a mask; otherwise None. With it, the
    device counts the positions (`last`), so that a captured step can be replayed.
    """

    capacity: int | None = None
    masks_documents = False  # a row holds one document

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device):
        D = config.n_embd // config.n_head
        shape = (config.n_layer, 2, rows, config.n_head, config.block_size, D)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)  # (S,)
        self.rows = torch.arange(rows, device=device)
        self.last = torch.zeros_like(self.rows)  # (B,) last position of each row; used if not `aligned`
        self.set_lengths([0] * rows)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.last.copy_(torch.tensor(lengths) - 1)  # in place, because captured graphs read this memory

    def begin_forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the lengths of the first B rows by the tokens `idx` (B, T). See AttentionKernel.begin_forward.

        T > 1 requires rows of equal length with enough empty slots.
        """
        (B, T), S = idx.shape, len(self.slots)
        kv, lengths, last = self.kv[:, :, :B], self.lengths[:B], self.last[:B]
        self.last_biases: tuple[Tensor, Tensor] | None = None  # of a mask, and their copy in the dtype of the cache
        min_length, max_length = min(lengths), max(lengths)
        assert T == 1 or min_length == max_length <= S - T
        self.lengths = [length + T for length in lengths] + self.lengths[B:]
        used_slots = self.capacity or min(max_length + T, S)
        self.used_kv = kv.narrow(4, 0, used_slots).flatten(0, 1).unbind()  # keys, values of each layer in turn
        self.aligned = min_length == max_length and not self.capacity
        if self.aligned and max_length < S:
            self.new_kv = kv.narrow(4, max_length, T).flatten(0, 1).unbind()
            return self.slots[max_length:used_slots], self.slots[:used_slots]
        if self.aligned:
            self.new_kv = kv.narrow(4, max_length % S, 1).flatten(0, 1).unbind()
            position = torch.full((1,), max_length, device=self.kv.device)
            return position, self.positions_in_slots(position, used_slots)
        last.add_(1)
        self.new_slot = last % S
        return last[:, None], self.positions_in_slots(last[:, None], used_slots)

    def positions_in_slots(self, last: Tensor, used_slots: int) -> Tensor:
        """The position in each of the first slots, if `last` is the newest one. For empty slots it is after `last`."""
        slots, S = self.slots[:used_slots], len(self.slots)
        return slots + S * ((last - slots) // S).clamp(min=0)

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        keys, values = self.used_kv[2 * layer.index], self.used_kv[2 * layer.index + 1]  # (B, H, S, D) each
        if self.aligned:
            self.new_kv[2 * layer.index].copy_(k)
            self.new_kv[2 * layer.index + 1].copy_(v)
        else:
            rows = self.rows[: len(k)]
            keys[rows, :, self.new_slot] = k[:, :, 0].to(keys.dtype)
            values[rows, :, self.new_slot] = v[:, :, 0].to(values.dtype)
        T, S, biases = q.shape[2], keys.shape[2], mask.biases
        is_causal = biases is None and 1 < T == S
        if biases is None and 1 < T < S:  # torch's is_causal aligns the first query with the first key
            biases = torch.full((T, S), -torch.inf, device=q.device).triu(S - T + 1)
        if biases is not None:
            if self.last_biases is None or self.last_biases[0] is not biases:  # usually, all layers have the same ones
                self.last_biases = biases, biases.to(keys.dtype)
            biases = self.last_biases[1]
        return scaled_dot_product_attention(q.to(keys.dtype), keys, values, biases, 0.0, is_causal).to(q.dtype)
