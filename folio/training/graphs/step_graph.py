"""A training step as one CUDA graph, for small models, whose kernels take less time than launching them.

A graph repeats the same kernels on the same memory. So what differs between steps is copied into fixed tensors: the
batches, their shares, the learning rates and Muon's momentum. Dropout follows from the seed of torch's generator, which
a graph reads when it starts. The step number and the sequences are counted on the host, as without a graph.

Not run on a GPU.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from folio.training.loader import BatchLoader
from folio.training.optim import LearningRates, set_rates, use_device_rates
from folio.training.setup import LossFunction
from folio.training.state import TrainState

MicroBatch = tuple[Tensor, Tensor, float | Tensor]  # inputs and targets, (B, T) each, and the share


class FixedBatches:
    """The micro-batches of a step, in tensors that do not move, with what train_step uses of a BatchLoader."""

    def __init__(self, loader: BatchLoader, batches: list[MicroBatch]):
        self.runtime, self.shape = loader.runtime, loader.shape
        self.tensors = [(x.clone(), y.clone(), torch.zeros((), device=x.device)) for x, y, _ in batches]

    def fill(self, batches: list[MicroBatch]) -> None:
        for (fixed_x, fixed_y, fixed_share), (x, y, share) in zip(self.tensors, batches, strict=True):
            fixed_x.copy_(x)
            fixed_y.copy_(y)
            fixed_share.fill_(share)

    def micro_batches(self, first: int) -> Iterator[MicroBatch]:
        return iter(self.tensors)

    def seed_dropout(self, seed: int, step: int, micro_step: int) -> None:
        """Nothing: a graph reads the generator's seed once, before the first micro-batch."""


class StepGraph:
    """train.train_step, captured after a few steps.

    It skips the same steps. Its dropout masks differ from those of train_step if there are several micro-batches, which
    continue the random numbers of the first one, and its weights by the rounding of the learning rates. A resumed run
    with graphs has the same bits as an uninterrupted one with graphs.
    """

    WARMUP_STEPS = 3  # not captured: they compile, choose kernels, and allocate the optimizer's state

    def __init__(self, train_step: Callable[..., None]):
        self.train_step = train_step
        self.key: tuple | None = None  # of what the graph depends on, beside values of tensors
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self,
        state: TrainState,
        loss_fn: LossFunction,
        loader: BatchLoader,
        rates: LearningRates,
        grad_clip: float,
        seed: int,
    ) -> None:
        """Take a step, as train_step does."""
        batches = [*loader.micro_batches(state.next_sequence)]
        if not batches:  # no targets
            self.train_step(state, loss_fn, loader, rates, grad_clip, seed)
            return
        key = (state.loads, grad_clip, *(x.shape for x, _, _ in batches))
        if key != self.key:
            self.key, self.graph, self.steps = key, None, 0
            self.batches, self.stream = FixedBatches(loader, batches), torch.cuda.Stream()
            use_device_rates(state.optimizer)
        self.batches.fill(batches)
        set_rates(state.optimizer, rates, state.step)
        step = partial(self.train_step, state, loss_fn, self.batches, None, grad_clip, seed)
        if self.steps == self.WARMUP_STEPS and self.graph is None:
            self.capture(state, step)
        loader.seed_dropout(seed, state.step, 0)
        if self.graph is None:
            self.warm_up(step)
            return
        self.graph.replay()
        state.guard.judged.append(self.judged.clone())
        state.step += 1
        state.next_sequence += loader.shape.sequences

    def warm_up(self, step: Callable[[], None]) -> None:
        """Take a step on the stream of the capture, because autograd remembers the stream of a parameter's gradient."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.steps += 1

    def capture(self, state: TrainState, step: Callable[[], None]) -> None:
        """Record the operations of a step. They do not run, but the counters on the host advance."""
        counters, self.graph = (state.step, state.next_sequence), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            step()
        state.step, state.next_sequence = counters
        self.judged = state.guard.judged.pop()
