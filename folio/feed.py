"""Training batches where the model is: gathered from tokens that are in its device's memory, or copied there.

Dimensions: B batch, T time (block_size).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from folio.dataset import Mixture
from folio.runtime import Runtime


class Feed:
    """The micro-batches of a step, without waiting for the device.

    resident: all training tokens are in the device's memory (4 bytes each), and a step is one gather; None: on CUDA,
    where they take at most a quarter of what is free and all of them count.
    """

    def __init__(self, data: Mixture, runtime: Runtime, resident: bool | None = None):
        self.data, self.runtime = data, runtime
        if resident is None:
            resident = runtime.device.type == "cuda" and not data.masked
            resident = resident and 4 * data.training_tokens <= torch.cuda.mem_get_info(runtime.device)[0] / 4
        self.tokens: Tensor | None = None
        if resident:
            self.tokens = torch.from_numpy(data.all_tokens()).to(runtime.device)
            self.window = torch.arange(data.block_size + 1, device=runtime.device)

    def micro_batches(self, first: int, batch_size: int, count: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Of the sequences from number `first` on, `count` times inputs and targets, (B, T) each, and a weight.

        The weight is the share of the step's counted targets, so that each of them weighs the same.
        """
        if self.tokens is not None:
            (starts,) = self.runtime.to_device(self.data.starts(first, count * batch_size))
            ids = self.tokens[starts[:, None] + self.window].long()  # (count * B, T + 1)
            for rows in ids.split(batch_size):
                yield rows[:, :-1], rows[:, 1:], 1 / count
            return
        inputs, targets = self.data.batch(first, count * batch_size)  # (count * B, T) each
        counted = (targets.reshape(count, -1) != -1).sum(axis=1)  # (count,)
        for micro, share in enumerate(counted / max(1, counted.sum())):
            rows = slice(micro * batch_size, (micro + 1) * batch_size)
            yield *self.runtime.to_device(inputs[rows], targets[rows]), float(share)
