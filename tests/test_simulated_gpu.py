"""The simulated GPU of other tests, against CUDA: for which operations the host waits."""

import pytest
import torch

from tests.support.simulated_gpu import SimulatedGPU

HOST = torch.tensor([2, 0])
WAITING = {  # of x, float32 (4, 4) on the GPU, and i, indices on the GPU
    "item": lambda x, i: x.sum().item(),
    "bool": lambda x, i: bool(x.sum() > 0),
    "float": lambda x, i: float(x.sum()),
    "tolist": lambda x, i: x.tolist(),
    "equal": lambda x, i: torch.equal(x, x),
    "cpu": lambda x, i: x.cpu(),
    "to cpu": lambda x, i: x.to("cpu"),
    "copy to the host": lambda x, i: torch.empty(4, 4).copy_(x),
    "copy from the host": lambda x, i: x.copy_(torch.ones(4, 4)),
    "to cuda": lambda x, i: torch.ones(4).to("cuda"),
    "tensor": lambda x, i: torch.tensor([1.0, 2.0], device="cuda"),
    "new_tensor": lambda x, i: x.new_tensor([1.0, 2.0]),
    "nonzero": lambda x, i: x.nonzero(),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "a mask as index": lambda x, i: x[x > 0],
    "a list as index": lambda x, i: x[[0, 1]],
    "an index on the host": lambda x, i: x[HOST],
    "a number at indices": lambda x, i: x.__setitem__(i, 1.0),
    "values at a mask": lambda x, i: x.__setitem__(x > 0, x[0, :1]),
    "unique": lambda x, i: x.unique(),
    "bincount": lambda x, i: i.bincount(),
    "repeat_interleave": lambda x, i: x[:2].repeat_interleave(i, dim=0),
}
NOT_WAITING = {
    "arithmetic": lambda x, i: (x + 1) * x.sum() - torch.tensor(2.0),
    "a matmul": lambda x, i: torch.nn.functional.linear(x, x).softmax(-1),
    "zeros": lambda x, i: torch.zeros(2, device="cuda") + x.new_full((2,), 3.0) + torch.ones_like(x[0, :2]),
    "arange": lambda x, i: torch.arange(3, device="cuda"),
    "a number in a slice": lambda x, i: x.__setitem__((slice(None), slice(2, None)), -torch.inf),
    "a number in a row": lambda x, i: x.__setitem__(1, 3.0),
    "values at indices": lambda x, i: x.__setitem__(i, x[i] + 1),
    "indices": lambda x, i: x[i[:, None], i],
    "masked_fill": lambda x, i: x.masked_fill(x > 0, 1.0),
    "where": lambda x, i: torch.where(x > 0, x, 0.0),
    "sampling": lambda x, i: torch.searchsorted(x.softmax(-1).cumsum(-1, dtype=torch.float64), x[:, :1].double()),
    "topk": lambda x, i: x.topk(2).values.masked_fill(x[:, :2] < 1, 2.0),
    "dtype": lambda x, i: x.to(torch.bfloat16).float(),
    "an asynchronous copy": lambda x, i: x.to("cpu", non_blocking=True),
    "a pinned copy": lambda x, i: torch.empty(4, 4, pin_memory=True).copy_(x, non_blocking=True),
    "pinned data": lambda x, i: torch.ones(4).pin_memory().to("cuda", non_blocking=True),
    "lists of tensors": lambda x, i: torch._foreach_add_([x[0], x[1]], x.sum(), alpha=1),
}


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(16.0).view(4, 4).to("cuda"), HOST.to("cuda")


@pytest.mark.parametrize("inference", [False, True])
def test_waits_are_recorded(inference, monkeypatch):
    with SimulatedGPU(monkeypatch) as gpu, torch.inference_mode(inference):
        for name, operation in {**WAITING, **NOT_WAITING}.items():
            x, i = operands()
            gpu.waits.clear()
            operation(x, i)
            assert bool(gpu.waits) == (name in WAITING), (name, gpu.waits)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_waits_for_nothing_else():
    """CUDA does not report all waits: on an H200 with torch 2.11, not all operations in WAITING."""
    reported = set()
    try:
        for name, operation in {**WAITING, **NOT_WAITING}.items():
            x, i = operands()
            torch.cuda.set_sync_debug_mode("error")
            try:
                operation(x, i)
            except RuntimeError as error:
                assert "synchroni" in str(error)
                reported.add(name)
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reported and reported <= WAITING.keys(), f"not reported: {WAITING.keys() - reported}"


def test_values_are_wrong_until_an_event(monkeypatch):
    with SimulatedGPU(monkeypatch):
        x, _ = operands()
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        copied = torch.cuda.Event()
        copied.record()
        x.zero_()  # after the copy
        copied.synchronize()
        assert host.flatten().tolist() == list(range(16))


def test_adamw_asks_the_simulated_gpu_whether_it_is_capturing(monkeypatch):
    """AdamW asked a real GPU if torch was built for CUDA, as here."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with SimulatedGPU(monkeypatch):
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones(2, device="cuda")
        optimizer = torch.optim.AdamW([weight], lr=0.25, weight_decay=0.0, foreach=False)
        optimizer.step()
        assert weight.tolist() == [0.75, 0.75]
        with (
            pytest.raises(RuntimeError, match="graph capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            optimizer.step()


def test_a_graph_computes_when_it_is_replayed(monkeypatch):
    with SimulatedGPU(monkeypatch):
        x, i = operands()
        count, graph = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            count.add_(1)
            y = x[i] * count
        assert count.item() == 0 and y.isnan().all()
        for n in (1, 2):
            graph.replay()
            assert count.item() == n and torch.equal(y, n * x[i])
        x.zero_()
        graph.replay()
        assert not y.any()
        with (
            pytest.raises(AssertionError, match="during a capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            x.sum().item()
