"""The key-value cache of decoding: a new token attends to the keys and values of the tokens before it.

Dimensions: B batch (rows), T time, S keys, H heads, D head size, L layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model import AttentionKernel, CausalSelfAttention, GPTConfig


class Prefix(NamedTuple):
    """The beginning of a context, whose keys and values are in a row of the cache already."""

    row: int
    length: int


class KVCache(AttentionKernel):
    """Keys and values of the newest block_size tokens, (L, 2, B, H, S, D), so that a new token costs one token's work.

    Row b has had `lengths[b]` tokens, at positions 0, 1, ...; position p is in slot p % S, in place of position p - S.
    Empty slots are never attended to.

    capacity: None, or for CUDA graphs the number of slots that every row attends to, under a mask. Then the device
    itself counts the positions (`last`), so that a captured step can be replayed.
    """

    capacity: int | None = None

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device):
        D = config.n_embd // config.n_head
        shape = (config.n_layer, 2, rows, config.n_head, config.block_size, D)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)  # (S,)
        self.rows = torch.arange(rows, device=device)
        self.last = torch.zeros_like(self.rows)  # (B,) last position of each row, if they differ or with `capacity`
        self.set_lengths([0] * rows)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.last.copy_(torch.tensor(lengths) - 1)  # in place, because captured graphs read this memory

    def begin_forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the lengths of the first B rows by the tokens `idx` (B, T). See AttentionKernel.begin_forward.

        T > 1 requires rows of equal length, and that the tokens fit.
        """
        (B, T), size = idx.shape, len(self.slots)
        kv, lengths, last = self.kv[:, :, :B], self.lengths[:B], self.last[:B]
        shortest, longest = min(lengths), max(lengths)
        assert T == 1 or shortest == longest <= size - T
        self.lengths = [length + T for length in lengths] + self.lengths[B:]
        attended = self.capacity or min(longest + T, size)
        self.attended = kv.narrow(4, 0, attended).flatten(0, 1).unbind()  # keys, values of each layer in turn
        self.aligned = shortest == longest and not self.capacity
        if self.aligned and longest < size:
            self.new = kv.narrow(4, longest, T).flatten(0, 1).unbind()
            return self.slots[longest:attended], self.slots[:attended]
        if self.aligned:
            self.new = kv.narrow(4, longest % size, 1).flatten(0, 1).unbind()
            newest = torch.full((1,), longest, device=self.kv.device)
            return newest, self.positions_in_slots(newest, attended)
        last.add_(1)
        self.new_slot = last % size
        return last[:, None], self.positions_in_slots(last[:, None], attended)

    def positions_in_slots(self, last: Tensor, attended: int) -> Tensor:
        """The newest position up to `last` that belongs in each of the first slots; that of an empty one is later."""
        slots, size = self.slots[:attended], len(self.slots)
        return slots + size * ((last - slots) // size).clamp(min=0)

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.attended[2 * layer.index], self.attended[2 * layer.index + 1]  # (B, H, S, D) each
        if self.aligned:
            self.new[2 * layer.index].copy_(k)
            self.new[2 * layer.index + 1].copy_(v)
        else:
            rows = self.rows[: len(k)]
            keys[rows, :, self.new_slot] = k[:, :, 0].to(keys.dtype)
            values[rows, :, self.new_slot] = v[:, :, 0].to(values.dtype)
        T, S = q.shape[2], keys.shape[2]
        is_causal = mask is None and 1 < T == S
        if mask is None and 1 < T < S:  # torch's causal mask is for queries that begin with the first key
            mask = torch.full((T, S), -torch.inf, device=q.device).triu(S - T + 1)
        if mask is not None:
            mask = mask.to(keys.dtype)
        return scaled_dot_product_attention(q.to(keys.dtype), keys, values, mask, 0.0, is_causal).to(q.dtype)
