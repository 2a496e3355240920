"""Forecasts of the memory that training takes, before any of it is allocated."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from folio import UserError
from folio.machine import memory
from folio.machine.kernels import FusedAttention, choose_attention, max_logits, trains_bias
from folio.machine.memory import HEADROOM, format_bytes
from folio.machine.runtime import Runtime
from folio.training.optim import muon_matrices, muon_shape
from folio.training.planning.train_settings import TrainSettings
from model import GPT, POSITIONS, GPTConfig


@dataclass(frozen=True)
class Memory:
    """Bytes per process."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # saved for the backward pass, including cast weights; or the update's memory, if that is more
    data: int = 0  # training tokens, if they are kept on the device

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def fits(self, available: float) -> bool:
        return HEADROOM * self.total <= available

    def __str__(self) -> str:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size or name != "data")
        return f"{format_bytes(self.total)} ({parts})"


def training_memory(
    model: GPT,
    sequences: int,
    *,
    optimizer: str,
    dtype: torch.dtype,
    device: str,
    shards: int = 1,
    workers: int = 1,
    recompute: bool = False,
    compiled: bool = False,
) -> Memory:
    """The memory of a training step with micro-batches of `sequences` sequences of block_size tokens.

    model: may be on the meta device. shards: the number of processes over which FSDP2 shards it. workers: those that
    divide the sequences, each with its own gradients and cast weights. Weights, gradients and moments are float32.
    Activations are the tensors that autograd saves for this model's operations, counted by hand; a test compares them
    with autograd's, and another one with what a compiled step keeps. Workspaces of kernels are not included.
    """
    config = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    N, block = sum(sizes.values()), sum(n for name, n in sizes.items() if ".h.0." in name)
    muon_sizes: Counter[tuple[int, int]] = Counter()  # parameters in the matrices that Muon updates together
    for name, p in muon_matrices(model).items() if optimizer == "muon" else ():
        muon_sizes[muon_shape(name, p)] += p.numel()
    s = 4 if dtype == torch.float32 else 2  # bytes per activation

    tokens = sequences * config.block_size
    bias = config.n_head * config.block_size**2 if POSITIONS[config.position].biases_scores else 0
    block_bytes = tokens * saved_bytes_per_token(config, dtype, device)
    if s == 2 and isinstance(choose_attention(device, dtype, config), FusedAttention):
        block_bytes += s * bias  # cast for the kernel
    activations = config.n_layer * block_bytes
    if recompute:
        activations = config.n_layer * tokens * s * config.n_embd + block_bytes
    activations += tokens * 2 * s * config.n_embd  # before and after the last norm
    activations += 4 * bias
    if trains_bias(config):
        activations += 9 * config.block_size**2  # for the bias's gradient: bucket indices (int64) and the mask (bool)
    logits = loss_bytes(tokens, config, s, workers, compiled)
    if shards > 1:
        cast = s * (N - config.n_layer * block + 2 * block)  # gathered: two blocks, and all parameters outside them
    else:
        cast = workers * s * (N - sizes.get("transformer.wpe.weight", 0)) if s == 2 else 0
    update = (8 + 2 * s) * max(muon_sizes.values(), default=0)  # measured: 11 bytes in bfloat16, 16 in float32
    sharded = [4 * n // shards for n in (N, workers * N, 2 * N - muon_sizes.total())]
    return Memory(*sharded, max(activations + logits + cast, update))


def saved_bytes_per_token(config: GPTConfig, dtype: torch.dtype, device: str) -> int:
    """Bytes per token that a block's forward pass saves for the backward pass."""
    s = 4 if dtype == torch.float32 else 2
    C, attention_row = config.n_embd, config.n_head * config.block_size  # elements per token
    is_fused = isinstance(choose_attention(device, dtype, config), FusedAttention)
    inputs = 2 + 1 + 3 + 1 + 1 + 4 + 4  # C times: norms, c_attn, attention, c_proj, c_fc, activation, c_proj
    if config.position == "rotary" and is_fused:
        inputs += 2  # rotated queries and keys, in addition to c_attn's output, which holds the values
    total = s * inputs * C + 16
    if s == 2 and device == "cuda":
        total += 2 * (4 - s) * C  # norms are computed in float32
    if is_fused:
        total += 4 * config.n_head
    else:
        total += s * attention_row * (3 if config.pdrop("attn") else 1)
    if config.pdrop("resid"):
        total += 2 * C * (s if device == "cpu" else 1)
    return total


def loss_bytes(tokens: int, config: GPTConfig, s: int, workers: int = 1, compiled: bool = False) -> int:
    """Peak bytes of logits and their gradients. s: bytes per logit.

    Compiled, the operations on the logits are fused, so that only results of matmuls and their inputs are stored.
    """
    logits, limit = tokens * config.vocab_size, max_logits(compiled)
    if logits <= limit and compiled:
        return logits * (4 + 2 * s)  # log-probabilities, logits and their gradient
    if logits <= limit:
        return logits * (12 if s == 4 else 14)  # log-probabilities, two float32 gradients
    eager = 8 if s == 4 else 10  # log-probabilities, and float32 logits
    chunks = limit * (2 * s if compiled else eager)  # logits and their gradient
    gradients = (4 + s) * config.vocab_size * config.n_embd  # with respect to the weights: the sum, and that of a chunk
    return chunks + workers * gradients


def refuse_too_large(config: GPTConfig, optimizer: str, available: float, shards: int = 1) -> None:
    """Raise UserError if weights, gradients and optimizer state do not fit, before the model is built."""
    blocks = 12 * config.n_layer * config.n_embd**2
    positions = config.block_size if config.position == "learned" else 0
    tables = (config.vocab_size + positions) * config.n_embd
    size = (4 * (3 if optimizer == "muon" else 4) * blocks + 16 * tables) // shards
    if size > available:
        raise UserError(
            f"{blocks + tables:,} parameters take {format_bytes(size)} for weights, gradients and optimizer state, but "
            f"{format_bytes(available)} are free: use a smaller n_layer or n_embd"
        )


def memory_per_process(
    cfg: TrainSettings,
    model: GPT,
    dtype: torch.dtype,
    device: str,
    processes: int,
    workers: int = 1,
    compiled: bool = False,
) -> Memory:
    """The memory of each process of a run. The model may be on the meta device."""
    sequences = min(cfg.batch_size, -(-cfg.accumulation * cfg.batch_size // processes))
    return training_memory(
        model,
        sequences,
        optimizer=cfg.optimizer,
        dtype=dtype,
        device=device,
        shards=processes if cfg.parallel == "fsdp" else 1,
        workers=workers,
        recompute=cfg.recompute,
        compiled=compiled,
    )


def suggest_memory_fix(cfg: TrainSettings, fits: Callable[[TrainSettings], bool]) -> str | None:
    """The cheapest options with which the same steps fit, or None.

    The number of sequences per step stays the same; total_batch_tokens may round it differently for another batch_size.
    """
    sequences = cfg.accumulation * cfg.batch_size
    for recompute in dict.fromkeys((cfg.recompute, True)):
        for batch_size in range(min(cfg.batch_size, 4096), 0, -1):
            if sequences % batch_size:
                continue
            changes = {"batch_size": batch_size, "recompute": recompute}
            if cfg.total_batch_tokens is None and batch_size != cfg.batch_size:
                changes["gradient_accumulation_steps"] = sequences // batch_size
            changed = replace(cfg, **changes)
            if changed.accumulation * changed.batch_size == sequences and fits(changed):
                return " ".join(f"--{name}={value}" for name, value in changes.items() if value != getattr(cfg, name))
    return None


def available_to_process(runtime: Runtime) -> float | None:
    """Free bytes per process of this run. On a CPU, the processes of a machine share its memory."""
    if (total := memory.free(runtime.device)) is None:
        return None
    is_shared = runtime.group.gloo and runtime.device.type == "cpu"
    return total / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_shared else total


def memory_on(cfg: TrainSettings, model: GPT, runtime: Runtime) -> Memory:
    """The memory of each process on this machine, without training data."""
    workers = min(runtime.workers, cfg.batch_size)
    device_type, compiled = runtime.device.type, bool(runtime.compile)
    return memory_per_process(cfg, model, runtime.dtype, device_type, runtime.group.size, workers, compiled)


def memory_report(cfg: TrainSettings, model: GPT, runtime: Runtime, resident_data: int) -> str:
    """Report the memory that training will take, the free memory, and if that is too little, options that fit.

    resident_data: bytes of training tokens on the device. Raises UserError if far too little memory is free.
    """
    available = available_to_process(runtime)

    def memory_with(changed: TrainSettings) -> Memory:
        return replace(memory_on(changed, model, runtime), data=resident_data)

    required = memory_with(cfg)
    report = f"memory: about {required}"
    if available is None:
        return report
    report += f" of {format_bytes(available)} free"
    if required.fits(available):
        return report
    remedy = suggest_memory_fix(cfg, lambda changed: memory_with(changed).fits(available))
    if required.total > 2 * available and not cfg.eval_only:
        raise UserError(f"{report}: far too little; use {remedy or 'a smaller model'}")
    sharding = "" if cfg.parallel == "fsdp" else "; or shard it over several GPUs with --parallel=fsdp"
    return f"{report}: too little; use {remedy or 'a smaller model'}{sharding}"
