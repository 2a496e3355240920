"""Training batches on the model's device: gathered from tokens in device memory, or copied from the host.

Dimensions: B batch, T time (block_size).
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from folio.data.windows import Mixture
from folio.machine import memory
from folio.machine.runtime import Runtime


def resident_bytes(data: Mixture, device: str, free: int | None) -> int:
    """Bytes of training tokens to keep in device memory, of which `free` bytes are free; 0 if they are not kept."""
    size = resident_dtype(data).itemsize * data.training_tokens
    return size if device == "cuda" and not data.masked and free is not None and size <= free / 4 else 0


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


class BatchLoader:
    """Loads this process's share of each step, in micro-batches, without waiting for the device.

    A step has accumulation * batch_size sequences for any number of processes. Each process takes consecutive
    sequences, in micro-batches of at most batch_size. Shares differ by at most one sequence; padding, which is not
    counted in the loss, makes them equal.

    resident: whether to keep all training tokens in device memory, so that a step is one gather; None: on CUDA, if they
    take at most a quarter of the free memory and no target is masked.
    """

    def __init__(
        self, data: Mixture, runtime: Runtime, batch_size: int, accumulation: int, resident: bool | None = None
    ):
        self.data, self.runtime, group = data, runtime, runtime.group
        self.sequences = batch_size * accumulation  # per step, of all processes
        begin, end = (self.sequences * rank // group.size for rank in (group.rank, group.rank + 1))
        self.begin, self.local_sequences = begin, end - begin
        max_sequences = -(-self.sequences // group.size)  # per process
        self.count = -(-max_sequences // batch_size)  # micro-batches
        self.rows = -(-max_sequences // self.count)  # B, sequences per micro-batch
        if resident is None:
            resident = resident_bytes(data, runtime.device.type, memory.free(runtime.device)) > 0
        self.tokens: Tensor | None = None
        if resident:
            self.tokens = upload_tokens(data, runtime.device)
            self.window = torch.arange(data.block_size + 1, device=runtime.device)

    def micro_batches(self, first: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the micro-batches of the step that begins with sequence `first`: inputs, targets, (B, T) each, share.

        The share is the micro-batch's fraction of the step's counted targets on all processes: the sum of share * mean
        loss is the mean over the step's targets. If the step has no targets, no process gets a micro-batch.
        """
        first += self.begin
        padding = self.count * self.rows - self.local_sequences
        if self.tokens is not None:
            (starts,) = self.runtime.to_device(np.pad(self.data.starts(first, self.local_sequences), (0, padding)))
            ids = self.tokens[starts[:, None] + self.window].long()  # (count * B, T + 1)
            if self.tokens.dtype == torch.int16:
                ids &= 0xFFFF  # as uint16
            ids[self.local_sequences :, 1:] = -1
            counted = np.minimum(np.maximum(self.local_sequences - self.rows * np.arange(self.count), 0), self.rows)
            for rows, share in zip(ids.split(self.rows), counted / self.sequences, strict=True):
                inputs = rows[:, :-1].clamp(min=0) if padding else rows[:, :-1]
                yield inputs.contiguous(), rows[:, 1:].contiguous(), float(share)  # other strides are compiled again
            return
        inputs, targets = self.data.batch(first, self.local_sequences)  # (sequences, T) each
        if padding:
            inputs = np.pad(inputs, ((0, padding), (0, 0)))
            targets = np.pad(targets, ((0, padding), (0, 0)), constant_values=-1)
        counted = (targets.reshape(self.count, -1) != -1).sum(axis=1)  # (count,)
        total = self.sequences * self.data.block_size
        if self.data.masked:
            total = self.runtime.group.all_reduce_count(int(counted.sum()))
        for micro, share in enumerate(counted / total) if total else ():
            rows = slice(micro * self.rows, (micro + 1) * self.rows)
            yield *self.runtime.to_device(inputs[rows], targets[rows]), float(share)
