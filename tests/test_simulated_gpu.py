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


def operands(device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(16.0).view(4, 4).to(device), HOST.to(device)


def waiting_operations() -> set[str]:
    """The operations that CUDA refuses where waiting is an error."""
    waiting = set()
    for name, operation in {**WAITING, **NOT_WAITING}.items():
        x, i = operands()
        torch.cuda.set_sync_debug_mode("error")
        try:
            operation(x, i)
        except RuntimeError as error:
            assert "synchroni" in str(error)
            waiting.add(name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waiting


@pytest.mark.parametrize("inference", [False, True])
def test_waits_are_recorded(inference):
    with SimulatedGPU(), torch.inference_mode(inference):
        assert waiting_operations() == WAITING.keys()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_waits_for_nothing_else():
    """CUDA does not report all waits: on an H200 with torch 2.11, not all operations in WAITING."""
    reported = waiting_operations()
    assert reported and reported <= WAITING.keys(), f"not reported: {WAITING.keys() - reported}"


def test_an_operator_with_a_number_on_the_gpu_does_not_write_to_the_cpu():
    with SimulatedGPU():
        x, count = operands()[0].sum(), torch.zeros(())
        with pytest.raises(AssertionError, match="writes to the CPU"):
            count.add_(x)
        with pytest.raises(AssertionError, match="writes to the CPU"):
            torch._foreach_add_([count], x, alpha=1)
        assert x.add_(count).item() == 120


def test_values_are_wrong_until_an_event():
    with SimulatedGPU():
        x, _ = operands()
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        copied = torch.cuda.Event()
        copied.record()
        x.zero_()  # after the copy
        copied.synchronize()
        assert host.flatten().tolist() == list(range(16))


def capture(graph: torch.cuda.CUDAGraph):
    return torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local")


def test_adamw_asks_the_simulated_gpu_whether_it_is_capturing():
    with SimulatedGPU():
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones(2, device="cuda")
        optimizer = torch.optim.AdamW([weight], lr=0.25, weight_decay=0.0, foreach=False)
        optimizer.step()
        assert weight.tolist() == [0.75, 0.75]
        with pytest.raises(RuntimeError, match="graph capture"), capture(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_a_graph_computes_when_it_is_replayed():
    with SimulatedGPU():
        x, i = operands()
        count, graph = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
        with capture(graph):
            count.add_(1)
            y = x[i] * count
        assert count.item() == 0 and y.isnan().all()
        for n in (1, 2):
            graph.replay()
            assert count.item() == n and torch.equal(y, n * x[i])
        x.zero_()
        graph.replay()
        assert not y.any()
        with pytest.raises(AssertionError, match="during a capture"), capture(torch.cuda.CUDAGraph()):
            x.sum().item()


def test_a_graph_is_captured_on_the_gpu_of_its_tensors():
    with SimulatedGPU(device_count=2):
        x, _ = operands("cuda:1")
        assert (x + 1).device == torch.device("cuda", 1)
        with pytest.raises(AssertionError, match="another GPU"), capture(torch.cuda.CUDAGraph()):
            x.add_(1)
        with pytest.raises(AssertionError, match="several GPUs"):
            x + operands()[0]


def test_a_simulated_gpu_never_asks_a_real_one():
    """With PyPI's wheel of torch, which was built for CUDA, AdamW and others did. A wheel for CPUs lacks its functions,
    which raise an error here.
    """
    with SimulatedGPU():
        for function in (torch.cuda._lazy_init, torch._C._cuda_init, torch.accelerator.synchronize):
            with pytest.raises(AssertionError, match="a real one"):
                function()
        torch.manual_seed(1)  # also seeds all GPUs
