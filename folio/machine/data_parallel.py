"""Data parallelism inside a process, on a CPU: each worker computes the loss and the gradients of its own sequences.

An operation that is divided among the cores ends when the slowest core does, and the operations of small models are so
short that the cores often wait. Workers wait for each other once per micro-batch.

Dimensions: B batch, T time, V vocabulary.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from folio import UserError
from folio.base.number_format import counted
from folio.base.randomness import derive_seed
from folio.machine.kernels import CPUDropout
from folio.machine.runtime import Runtime
from model import GPT

Result = TypeVar("Result")
MIN_ELEMENTS = 2**15  # per worker and micro-batch, of the residual stream: with fewer, calls take most of the time


def with_workers(
    runtime: Runtime, setting: int | None, batch_size: int, sequence_elements: int, saved: dict[str, Any] | None = None
) -> Runtime:
    """The runtime with the number of workers that is set, or for None, chosen by the cores and the batch.

    sequence_elements: of the residual stream, T C. saved: `Runtime.resolved` of the run to resume, whose number is
    kept. Raises UserError.
    """
    cores = torch.get_num_threads()
    if runtime.device.type != "cpu" or runtime.compile or runtime.group.gloo:
        if setting not in (None, 1):
            raise UserError(f"workers={setting}: they need a CPU, a single process, and compile=False; use --workers=1")
        return runtime
    if setting:
        if setting > batch_size:
            raise UserError(f"workers={setting}: each needs a sequence; use at most batch_size={batch_size}")
        count, reason = setting, ""
    elif saved and saved["device"] == "cpu":
        count, reason = saved.get("workers", 1), " (as before)"
    elif batch_size // cores * sequence_elements < MIN_ELEMENTS:
        count, reason = 1, " (the batch is too small for more)"
    else:
        count, reason = cores, " (one per core)"
    if count == cores == 1:
        return runtime
    return replace(runtime, workers=count, description=f"{runtime.description}, {counted(count, 'worker')}{reason}")


class WorkerThreads:
    """Threads that use one core each.

    Several parts of a computation have the same results on any number of threads.
    """

    def __init__(self, count: int):
        cores = torch.get_num_threads()
        started = threading.Barrier(count + 1)
        self.pool = ThreadPoolExecutor(count, "worker", use_one_core)
        for _ in range(count):
            self.pool.submit(started.wait)
        started.wait()
        torch.set_num_threads(cores)  # a thread's call also changes the number for threads that start later

    def map(self, function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
        """The results of function(*arguments of part i), in order. Raises the first exception after all have ended."""
        futures = [self.pool.submit(function, *part) for part in zip(*arguments, strict=True)]
        wait(futures)
        return [future.result() for future in futures]


def use_one_core() -> None:
    """Let this thread compute without others."""
    torch.get_num_threads()  # otherwise, the first operation sets this thread's number to the process's
    torch.set_num_threads(1)


@functools.cache
def _threads(count: int) -> WorkerThreads:
    return WorkerThreads(count)


def worker_threads(workers: int) -> WorkerThreads:
    """The threads of this process for a number of workers, at most one per core."""
    return _threads(min(workers, torch.get_num_threads()))


class Worker:
    """A replica of the model: its Parameters are other objects in the same memory, with gradients of their own.

    No Parameter is part of two graphs at once. Dropout draws from the worker's own generator.
    """

    def __init__(self, model: GPT, runtime: Runtime, index: int):
        self.runtime, self.index = runtime, index
        parameters = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, memo=parameters)
        self.parameters = trained_parameters(self.model)
        self.generator = torch.Generator()
        for module in self.model.modules():
            if isinstance(module, CPUDropout):
                module.generator = self.generator

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(derive_seed("worker", seed, self.index))

    def loss(self, idx: Tensor, targets: Tensor, weight: float, with_gradients: bool) -> tuple[Tensor, list[Tensor]]:
        """The mean loss times `weight`, and its gradients with respect to self.parameters."""
        with torch.set_grad_enabled(with_gradients):
            with self.runtime.autocast():
                loss = self.model(idx, targets)[1] * weight
            return loss.detach(), list(torch.autograd.grad(loss, self.parameters)) if with_gradients else []

    def logits(self, idx: Tensor) -> Tensor:
        with torch.no_grad(), self.runtime.autocast():
            return self.model.logits(idx)


class DataParallelLoss:
    """The mean loss as a function of inputs and targets, (B, T) each, whose rows are divided among the workers.

    The gradients are computed with the loss and added in the order of the workers. Dropout depends on the last
    torch.manual_seed and on the number of workers.
    """

    def __init__(self, model: GPT, runtime: Runtime):
        self.model, self.parameters = model, trained_parameters(model)
        self.workers = [Worker(model, runtime, index) for index in range(runtime.workers)]
        self.threads = worker_threads(runtime.workers)

    def begin(self, rows: int) -> list[Worker]:
        """The workers that compute `rows` rows, in the mode of the model."""
        workers = self.workers[:rows]
        for worker in workers:
            worker.seed(torch.initial_seed())
            if worker.model.training != self.model.training:
                worker.model.train(self.model.training)
        return workers

    def __call__(self, idx: Tensor, targets: Tensor) -> Tensor:
        workers, with_gradients = self.begin(len(idx)), torch.is_grad_enabled()
        n = len(workers)
        inputs, targets = idx.tensor_split(n), targets.tensor_split(n)
        counts = [int((part != -1).sum()) for part in targets]
        weights = [count / max(1, sum(counts)) for count in counts]
        results = self.threads.map(Worker.loss, workers, inputs, targets, weights, [with_gradients] * n)
        losses, gradients = zip(*results, strict=True)
        loss = torch.stack(losses).sum()
        if not with_gradients:
            return loss
        for others in gradients[1:]:
            torch._foreach_add_(gradients[0], others)
        return LossWithGradients.apply(loss, gradients[0], *self.parameters)

    def logits(self, idx: Tensor) -> Tensor:
        """The logits (B, T, V) that the loss of these rows is computed from."""
        workers = self.begin(len(idx))
        return torch.cat(self.threads.map(Worker.logits, workers, idx.tensor_split(len(workers))))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, runtime: Runtime) -> Tensor:
    """torch.nn.utils.clip_grad_norm_. With several workers, it does not depend on the number of threads."""
    if runtime.workers == 1:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    (norm,) = worker_threads(runtime.workers).map(nn.utils.clip_grad_norm_, [list(parameters)], [max_norm])
    return norm


class LossWithGradients(torch.autograd.Function):
    """A loss whose gradients with respect to the parameters are already computed."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # without other references, they become p.grad without a copy
        if grad != 1:
            torch._foreach_mul_(gradients, grad)
        return None, None, *gradients


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
