"""The key-value cache of decoding: a new token attends to the keys and values of the tokens before it.

Dimensions: B batch (rows), T time, C channels, H heads, D head size, L layers.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model import Attention, CausalSelfAttention, GPTConfig, causal_mask


class KVCache(Attention):
    """Keys and values of the tokens so far, (L, 2, B, H, T, D), so that a new token costs one token's work.

    Row b holds `lengths[b]` tokens, at positions 0, 1, ...; what the cache holds beyond them is never attended to.

    capacity: None, or for CUDA graphs the number of positions that every row attends to, under a mask. Then the device
    itself counts the positions (`last`), so that a captured step can be replayed.
    """

    capacity: int | None = None

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device):
        D = config.n_embd // config.n_head
        shape = (config.n_layer, 2, rows, config.n_head, config.block_size, D)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.key_positions = torch.arange(config.block_size, device=device)  # slot t holds position t
        self.rows = torch.arange(rows, device=device)
        self.last = torch.zeros_like(self.rows)  # (B,) last position of each row, if they differ or with `capacity`
        self.set_lengths([0] * rows)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.last.copy_(torch.tensor(lengths) - 1)  # in place, because captured graphs read this memory

    def positions(self, idx: Tensor) -> Tensor:
        """Make room for the tokens `idx` (B, T), and return their positions. T > 1 requires empty rows."""
        T = idx.shape[1]
        shortest, longest = min(self.lengths), max(self.lengths)
        self.lengths = [length + T for length in self.lengths]
        attended = self.capacity or longest + T
        self.filled = self.kv.narrow(4, 0, attended).flatten(0, 1).unbind()  # keys, values of each layer in turn
        self.is_causal, self.mask = T > 1, None
        if shortest == longest and not self.capacity:
            self.new = self.kv.narrow(4, longest, T).flatten(0, 1).unbind()
            return self.key_positions[longest : longest + T]
        self.last.add_(1)
        positions = self.last[:, None]  # (B, 1)
        self.mask = causal_mask(positions, self.key_positions[:attended])  # (B, 1, 1, T)
        return positions

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys, values = self.filled[2 * layer.index], self.filled[2 * layer.index + 1]
        if self.mask is None:
            self.new[2 * layer.index].copy_(k)
            self.new[2 * layer.index + 1].copy_(v)
        else:
            keys[self.rows, :, self.last] = k[:, :, 0].to(keys.dtype)
            values[self.rows, :, self.last] = v[:, :, 0].to(values.dtype)
        y = scaled_dot_product_attention(q.to(keys.dtype), keys, values, self.mask, 0.0, self.is_causal)
        return y.to(q.dtype)
