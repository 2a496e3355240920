"""How much memory training takes, counted before any of it is allocated, and how much there is."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from folio import UserError
from folio.optim import blocks_matrices

CGROUP = Path("/sys/fs/cgroup")
HEADROOM = 1.2  # what kernels and allocators take on top (docs/scaling.md)


@dataclass(frozen=True)
class Memory:
    """Bytes that one process needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # what forward keeps for backward, with weights in the dtype of matmuls; or what the update takes
    data: int = 0  # the training tokens, where they stay on the device

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def fits(self, available: float) -> bool:
        return HEADROOM * self.total <= available

    def __str__(self) -> str:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = ", ".join(f"{name} {in_words(size)}" for name, size in sizes.items() if size or name != "data")
        return f"{in_words(self.total)} ({parts})"


def in_words(n: float) -> str:
    """Bytes in words."""
    return f"{n / 2**20:,.0f} MiB" if n < 2**30 else f"{n / 2**30:,.1f} GiB"


def needed(
    model: nn.Module,
    sequences: int,
    *,
    optimizer: str,
    dtype: torch.dtype,
    device: str,
    parts: int = 1,
    recompute: bool = False,
) -> Memory:
    """What a step of a GPT takes, not compiled, with so many sequences of block_size in a micro-batch.

    model may be on the meta device. parts: over how many processes FSDP2 spreads it. Weights, gradients and moments are
    float32. The activations are those that autograd keeps for this model's operations, counted by hand and held
    against its own count in a test; what a kernel takes for itself comes on top.
    """
    config = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    N, block = sum(sizes.values()), sum(n for name, n in sizes.items() if ".h.0." in name)
    shapes = [p.shape for p in blocks_matrices(model).values()] if optimizer == "muon" else []
    orthogonal = sum(map(math.prod, shapes))
    s = 4 if dtype == torch.float32 else 2  # bytes of an activation

    tokens = sequences * config.block_size
    of_block = tokens * kept_by_block(config, s, device)
    kept = config.n_layer * of_block
    if recompute:
        kept = config.n_layer * tokens * s * config.n_embd + of_block
    kept += tokens * 2 * s * config.n_embd  # before and behind the last norm
    logits = tokens * config.vocab_size * (12 if s == 4 else 14)  # at the worst: logarithms and two gradients, float32
    if parts > 1:
        cast = s * (N - config.n_layer * block + 2 * block)  # whole: all but the blocks, a block, the next on its way
    else:
        cast = s * (N - sizes["transformer.wpe.weight"]) if s == 2 else 0
    alike = Counter(shapes)  # which Muon updates together
    updating = (12 + 5 * s) * max((n * math.prod(shape) for shape, n in alike.items()), default=0)
    spread = [4 * n // parts for n in (N, N, 2 * N - orthogonal)]
    return Memory(*spread, max(kept + logits + cast, updating))


def refuse_too_large(config: Any, optimizer: str, available: float, parts: int = 1) -> None:
    """Raise UserError for a model whose weights, gradients and optimizer do not fit, before any of it is built."""
    blocks = 12 * config.n_layer * config.n_embd**2
    tables = (config.vocab_size + config.block_size) * config.n_embd
    size = (4 * (3 if optimizer == "muon" else 4) * blocks + 16 * tables) // parts
    if size > available:
        raise UserError(
            f"{blocks + tables:,} parameters take {in_words(size)} for weights, gradients and optimizer, and "
            f"{in_words(available)} are free: take a smaller n_layer or n_embd"
        )


def kept_by_block(config: Any, s: int, device: str) -> int:
    """Bytes a token that a block's forward pass keeps; s: of an activation."""
    C, weights = config.n_embd, config.n_head * config.block_size  # a token's attention
    inputs = 2 + 1 + 3 + 1 + 1 + 4 + 4  # of the norms, c_attn, attention, c_proj, c_fc, the activation, c_proj; in C
    kept = s * inputs * C + 16
    if s == 2 and device == "cuda":
        kept += 2 * (4 - s) * C  # norms are computed in float32
    if device == "cpu" and (s == 2 or config.pdrop("attn")):  # attention written out
        kept += s * weights * (3 if config.pdrop("attn") else 1)
    else:
        kept += 4 * config.n_head
    if config.pdrop("resid"):
        kept += 2 * C * (s if device == "cpu" else 1)
    return kept


def free(device: torch.device) -> int | None:
    """Bytes that can still be allocated there, or None where this cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    import psutil

    available = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():  # a container's share
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))  # a cache that can go
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)
