import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from folio import UserError
from folio.machine import data_parallel, distributed
from folio.machine.data_parallel import (
    MIN_ELEMENTS,
    DataParallelLoss,
    Worker,
    WorkerThreads,
    clip_grad_norm,
    with_workers,
    worker_threads,
)
from folio.machine.distributed import Group
from folio.machine.kernels import adapt, dropout_contexts
from folio.machine.runtime import Runtime
from model import GPT, GPTConfig
from tests.support.tolerances import gradients_error, logits_error, rounding_error, within
from tests.support.waiting import in_thread

V = 60
Gradients = list[Tensor]
# A loss is about log(60). Most of its error is that of the log-sum-exp over 60 logits and of the mean over 512 targets:
# the logits of a new model are less than 1, and their errors are independent.
LOSS_ERROR = 2 * rounding_error(V + 8 * 64)


@pytest.fixture(autouse=True)
def two_threads(set_threads) -> None:
    """Two workers run at the same time."""
    set_threads(2)


@pytest.fixture
def two_workers(seed) -> SimpleNamespace:
    """A model, a batch, and the loss function of two workers."""
    model, (idx, targets) = make_model(cpu_runtime(2)), make_batch(seed)
    return SimpleNamespace(model=model, idx=idx, targets=targets, loss_fn=DataParallelLoss(model, cpu_runtime(2)))


def cpu_runtime(workers: int, dtype: torch.dtype = torch.float32) -> Runtime:
    return Runtime(torch.device("cpu"), dtype, False, "", workers=workers)


def make_model(runtime: Runtime, recompute: bool = False, **settings) -> GPT:
    """A model whose operations are large enough that torch divides them among its threads."""
    shape = dict(block_size=64, vocab_size=V, n_layer=2, n_head=2, n_embd=128)
    model = GPT(GPTConfig(**{**shape, **settings}))
    adapt(model, runtime)
    if recompute:
        distributed.checkpoint_activations(model.transformer.h, dropout_contexts)
    return model


def make_batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    idx, targets = torch.randint(V, (2, rows, 64), generator=torch.Generator().manual_seed(seed))
    return idx, targets


def gradients_of(model: nn.Module) -> Gradients:
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def equal(first: Gradients, second: Gradients) -> bool:
    return all(map(torch.equal, first, second))


@contextmanager
def busy() -> Iterator[None]:
    """Two other threads compute matmuls during the block."""
    ended, a = threading.Event(), torch.ones(200, 200)

    def work():
        while not ended.is_set():
            a @ a

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


# --- the number of workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, batch_size, n_embd, saved, workers, reason",
    [
        (None, 8, 128, None, 4, "one per core"),
        (None, 4, 128, None, 4, "one per core"),
        (None, 4, 127, None, 1, "the batch is too small for more"),
        (None, 3, 512, None, 1, "the batch is too small for more"),
        (None, 8, 10, {"device": "cpu", "workers": 3}, 3, "as before"),
        (None, 8, 128, {"device": "cpu"}, 1, "as before"),
        (None, 8, 128, {"device": "cuda"}, 4, "one per core"),
        (2, 8, 10, {"device": "cpu", "workers": 3}, 2, None),
        (1, 8, 128, None, 1, None),
    ],
)
def test_the_number_of_workers_is_chosen_or_kept(setting, batch_size, n_embd, saved, workers, reason, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    runtime = with_workers(cpu_runtime(1), setting, batch_size, MIN_ELEMENTS // 128 * n_embd, saved)
    assert runtime.workers == workers == runtime.resolved.get("workers", 1)
    expected = f", {workers} worker{'s' * (workers > 1)}"
    assert runtime.description == (f"{expected} ({reason})" if reason else expected)


def test_only_a_cpu_has_workers(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cpu = cpu_runtime(1)
    changes = [dict(device=torch.device("cuda", 0)), dict(device=torch.device("mps")), dict(compile=True)]
    for change in [*changes, dict(group=Group(0, 2, gloo=object()))]:
        other = replace(cpu, **change)
        assert with_workers(other, None, 8, 256 * 128) is other is with_workers(other, 1, 8, 256 * 128)
        with pytest.raises(UserError, match=r"workers=2: .* a CPU, a single process, and compile=False"):
            with_workers(other, 2, 8, 256 * 128)
    with pytest.raises(UserError, match=r"workers=9: .*; use at most batch_size=8"):
        with_workers(cpu, 9, 8, 256 * 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert with_workers(cpu, None, 8, 256 * 128) is cpu


# --- losses and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_worker_computes_the_gradients_of_its_rows(dtype, set_threads, seed):
    """All threads share autocast's cache of cast weights: workers with the same parameters added up each other's."""
    runtime = cpu_runtime(2, dtype)
    model = make_model(runtime)
    loss_fn = DataParallelLoss(model, runtime)
    inputs, targets = (part.chunk(2) for part in make_batch(seed))
    expected = []
    set_threads(1)
    for idx, next_ids in zip(inputs, targets, strict=True):
        with runtime.autocast():
            model(idx, next_ids)[1].backward()
        expected.append(gradients_of(model))
    set_threads(2)
    for _ in range(10):
        results = loss_fn.threads.map(Worker.loss, loss_fn.begin(8), inputs, targets, [1.0, 1.0], [True, True])
        assert all(equal(gradients, alone) for (_, gradients), alone in zip(results, expected, strict=True))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_loss_is_the_mean_over_all_targets(workers, seed):
    """With masked targets, also if a worker has none, or the batch has none."""
    idx, targets = make_batch(seed, rows=7)
    model = make_model(cpu_runtime(1))
    loss_fn = DataParallelLoss(model, cpu_runtime(workers))
    no_rows = torch.zeros(7, 1, dtype=torch.bool)
    for mask in (no_rows, torch.rand(7, 64) < 0.3, torch.arange(7)[:, None] < 4, ~no_rows):
        masked = targets.masked_fill(mask, -1)
        loss = model(idx, masked)[1]
        loss.backward()
        expected = gradients_of(model)
        parallel = loss_fn(idx, masked)
        parallel.backward()
        torch.testing.assert_close(parallel, loss, rtol=LOSS_ERROR, atol=0)
        for gradient, other in zip(gradients_of(model), expected, strict=True):
            assert (gradient - other).norm() <= gradients_error(model.config, 7, 64) * other.norm()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss_fn(idx, masked), loss.detach(), rtol=LOSS_ERROR, atol=0)
        model.train()


def test_an_evaluation_between_steps_has_no_dropout(seed):
    """The replicas must change between training and evaluation with the model, or validation losses have dropout."""
    runtime = cpu_runtime(2)
    model, (idx, targets) = make_model(runtime, dropout=0.5), make_batch(seed)
    loss_fn = DataParallelLoss(model, runtime)
    in_training = loss_fn(idx, targets).item()
    model.eval()
    with torch.no_grad():
        expected, logits = model(idx, targets)[1], model.logits(idx)
        torch.testing.assert_close(loss_fn(idx, targets), expected, rtol=LOSS_ERROR, atol=0)
        error = logits_error(model.config, 64)
        torch.testing.assert_close(loss_fn.logits(idx), logits, **within(logits, error))
    assert in_training != expected.item()
    model.train()
    assert loss_fn(idx, targets).item() == in_training


def test_gradients_of_micro_batches_are_added(two_workers, seed):
    def gradients(*numbers: int) -> Gradients:
        for number in numbers:
            (two_workers.loss_fn(*make_batch(seed + number)) * 0.25).backward()
        return gradients_of(two_workers.model)

    parts = [gradients(number) for number in range(3)]
    assert equal(gradients(0, 1, 2), [a + b + c for a, b, c in zip(*parts, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_dropout_are_repeated_bitwise(dtype, seed):
    """While other threads are busy, with recomputed activations or without, and on one core."""
    runtime = cpu_runtime(2, dtype)
    models = [make_model(runtime, recompute, dropout=0.2) for recompute in (False, True)]
    losses = [DataParallelLoss(model, runtime) for model in models]
    on_one_core = DataParallelLoss(models[0], runtime)
    on_one_core.threads = WorkerThreads(1)

    def step(model: GPT, loss_fn: DataParallelLoss, first: int = 0) -> Gradients:
        for number in range(first, first + 2):
            torch.manual_seed(number)
            loss_fn(*make_batch(seed + number)).backward()
        return gradients_of(model)

    expected = step(models[0], losses[0])
    with busy():
        for number in range(6):
            assert equal(step(models[number % 2], losses[number % 2]), expected)
    assert equal(step(models[0], on_one_core), expected)
    assert not equal(step(models[0], losses[0], first=1), expected)


def test_workers_have_different_dropout(seed):
    runtime = cpu_runtime(2)
    workers = DataParallelLoss(make_model(runtime, dropout=0.5), runtime).begin(2)
    losses = [worker.loss(*make_batch(seed, rows=1), 1.0, False)[0].item() for worker in workers]
    assert losses[0] != losses[1]


def test_workers_see_new_weights(two_workers):
    model, batch = two_workers.model, (two_workers.idx, two_workers.targets)
    before = two_workers.loss_fn(*batch).item()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
        log_p = two_workers.loss_fn.logits(batch[0]).log_softmax(-1)
    after = two_workers.loss_fn(*batch).item()
    assert before != after == pytest.approx(model(*batch)[1].item(), rel=LOSS_ERROR)
    assert -log_p.gather(-1, batch[1][..., None]).mean().item() == pytest.approx(after, rel=LOSS_ERROR)


def test_a_norm_does_not_depend_on_the_number_of_threads(set_threads):
    """It is torch's in one thread."""
    p, gradient = nn.Parameter(torch.zeros(3_000_001)), torch.randn(3_000_001)
    set_threads(1)
    p.grad = gradient.clone()
    norm, expected = nn.utils.clip_grad_norm_([p], 0.5), p.grad
    for threads in (1, 2, 4):
        set_threads(threads)
        p.grad = gradient.clone()
        assert clip_grad_norm([p], 0.5, cpu_runtime(2)) == norm and torch.equal(p.grad, expected)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_the_number_of_torchs_threads_changes_only_in_workers(monkeypatch):
    """torch.set_num_threads also sets the number for threads that start later. There are as many workers as cores."""
    before = torch.get_num_threads(), in_thread(torch.get_num_threads)
    threads = WorkerThreads(2)
    assert threads.map(lambda i: torch.get_num_threads(), range(2)) == [1, 1]
    assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert worker_threads(5) is worker_threads(2) is data_parallel._threads(2)


def test_an_error_in_a_worker_is_raised_after_all_have_ended():
    ended, threads = [], WorkerThreads(2)

    def work(number):
        if number == 0:
            raise RuntimeError("not enough memory")
        ended.append(number)

    with pytest.raises(RuntimeError, match="not enough memory"):
        threads.map(work, range(5))
    assert sorted(ended) == [1, 2, 3, 4]
    assert threads.map(lambda number: number, range(3)) == [0, 1, 2]
