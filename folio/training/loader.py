"""Training batches on the model's device: gathered from tokens in device memory, or copied from the host.

Dimensions: B batch, T time (block_size).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio.base.randomness import derive_seed
from folio.data.windows import Mixture
from folio.machine.distributed import Group
from folio.machine.runtime import Runtime


def resident_bytes(data: Mixture, device: str, free: int, tokens_to_read: float) -> int:
    """Bytes of training tokens to keep in device memory; 0 if they are not kept.

    They are kept on CUDA, if they take at most a quarter of the memory that the model leaves free, if no target is
    masked, and if the process reads at least as many tokens in training: otherwise, copying them all takes longer.
    """
    size = resident_dtype(data).itemsize * data.training_tokens
    pays_off = data.training_tokens <= tokens_to_read
    return size if device == "cuda" and not data.masked and size <= free / 4 and pays_off else 0


def resident_dtype(data: Mixture) -> torch.dtype:
    """The dtype of tokens in device memory: int16 for the bits of uint16, for which torch has few operators."""
    return torch.int16 if data.vocab_size <= 2**16 else torch.int32


def upload_tokens(data: Mixture, device: torch.device) -> Tensor:
    """Copy all training tokens to the device, in pieces, so that the host never has a copy of them all."""
    tokens, offset = torch.empty(data.training_tokens, dtype=resident_dtype(data), device=device), 0
    for piece in data.token_pieces():
        bits = piece.astype(f"u{tokens.itemsize}", copy=False).view(f"i{tokens.itemsize}")
        tokens[offset : offset + len(piece)] = torch.from_numpy(bits)
        offset += len(piece)
    return tokens


class BatchShape(NamedTuple):
    """The division of a step's sequences among processes and micro-batches.

    A step has accumulation * batch_size sequences for any number of processes. Each process takes consecutive
    sequences, in micro-batches of at most batch_size. Shares differ by at most one sequence; padding, which is not
    counted in the loss, makes them equal.
    """

    sequences: int  # per step, of all processes
    begin: int  # the first sequence of this process
    local_sequences: int  # of this process
    count: int  # micro-batches of each process
    rows: int  # B, sequences per micro-batch
    is_resident: bool  # whether all training tokens are kept in device memory, so that a step is one gather

    @classmethod
    def of(cls, batch_size: int, accumulation: int, group: Group, is_resident: bool = False) -> "BatchShape":
        sequences = batch_size * accumulation
        begin, end = (sequences * rank // group.size for rank in (group.rank, group.rank + 1))
        max_sequences = -(-sequences // group.size)  # per process
        count = -(-max_sequences // batch_size)
        return cls(sequences, begin, end - begin, count, -(-max_sequences // count), is_resident)


class BatchLoader:
    """Loads this process's share of each step, in micro-batches, without waiting for the device."""

    def __init__(self, data: Mixture, runtime: Runtime, shape: BatchShape):
        self.data, self.runtime, self.shape = data, runtime, shape
        if shape.is_resident:
            self.tokens = upload_tokens(data, runtime.device)
            self.window = torch.arange(data.block_size + 1, device=runtime.device)

    def seed_dropout(self, seed: int, step: int, micro_step: int) -> None:
        """Seed the dropout masks of a micro-batch."""
        torch.manual_seed(derive_seed("dropout", seed, step, self.runtime.group.rank * self.shape.count + micro_step))

    def micro_batches(self, first: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the micro-batches of the step that begins with sequence `first`: inputs, targets, (B, T) each, share.

        The share is the micro-batch's fraction of the step's counted targets on all processes: the sum of share * mean
        loss is the mean over the step's targets. If the step has no targets, no process gets a micro-batch.
        """
        shape = self.shape
        first += shape.begin
        padding = shape.count * shape.rows - shape.local_sequences
        if shape.is_resident:
            (starts,) = self.runtime.to_device(np.pad(self.data.starts(first, shape.local_sequences), (0, padding)))
            ids = self.tokens[starts[:, None] + self.window].long()  # (count * B, T + 1)
            if self.tokens.dtype == torch.int16:
                ids &= 0xFFFF  # as uint16
            ids[shape.local_sequences :, 1:] = -1
            counted = np.clip(shape.local_sequences - shape.rows * np.arange(shape.count), 0, shape.rows)
            for rows, share in zip(ids.split(shape.rows), counted / shape.sequences, strict=True):
                inputs = rows[:, :-1].clamp(min=0) if padding else rows[:, :-1]
                yield inputs.contiguous(), rows[:, 1:].contiguous(), float(share)  # other strides are compiled again
            return
        inputs, targets = self.data.batch(first, shape.local_sequences)  # (sequences, T) each
        if padding:
            inputs = np.pad(inputs, ((0, padding), (0, 0)))
            targets = np.pad(targets, ((0, padding), (0, 0)), constant_values=-1)
        counted = (targets.reshape(shape.count, -1) != -1).sum(axis=1)  # (count,)
        total = shape.sequences * self.data.block_size
        if self.data.masked:
            total = self.runtime.group.all_reduce_count(int(counted.sum()))
        for micro, share in enumerate(counted / total) if total else ():
            rows = slice(micro * shape.rows, (micro + 1) * shape.rows)
            yield *self.runtime.to_device(inputs[rows], targets[rows]), float(share)
