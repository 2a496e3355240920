"""A simulated CUDA GPU on a CPU: Folio takes its CUDA branches, and whatever the host waits for is recorded.

The values of a GPUTensor are in a tensor on the CPU. For torch's C++ code it is on the meta device, for Python code on
"cuda:0".
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from folio.machine import memory
from folio.machine.runtime import Runtime

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
WAITING = {  # operators whose result on the host, or whose shape, depends on values on the device
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def simulate_accelerator(monkeypatch: pytest.MonkeyPatch, is_capturing: Callable[[], bool]) -> None:
    """Simulate the accelerator and its stream, which AdamW.step asks whether a CUDA graph is being captured.

    If torch was built for CUDA, as PyPI's wheel for Linux is, and CUDA seems to be available, it would ask a real GPU.
    """
    stream = SimpleNamespace(is_capturing=is_capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)  # older versions of torch
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: CUDA)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)


class GPUTensor(Tensor):
    """A tensor on the simulated GPU."""

    device = property(lambda self: CUDA)
    is_cuda, is_meta = True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "GPUTensor":
        layout = dict(strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype)
        with torch.inference_mode(values.is_inference()):
            return Tensor._make_wrapper_subclass(cls, values.shape, **layout, device=META)

    def __init__(self, values: Tensor):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise RuntimeError(f"{operator} was called outside of the simulation")


class SimulatedGPU:
    """A context in which "cuda" is simulated.

    waits: what the host has waited for. operators: the names of the operators that have run, by type of device.
    Autocast is not simulated, and attention is torch's for an unknown device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.waits: list[str] = []
        self.operators: dict[str, set[str]] = {"cpu": set(), "cuda": set()}
        self.copies: list[tuple[Tensor, Tensor]] = []  # asynchronous copies to the host, and their values
        self.capturing: RecordedGraph | None = None
        self.captures = self.replays = 0

    def runtime(self, dtype: torch.dtype = torch.float32) -> Runtime:
        return Runtime(CUDA, dtype, False, "a simulated GPU")

    def wait(self, reason: str) -> None:
        assert not self.capturing, f"{reason} during a capture"
        self.waits.append(reason)

    def __enter__(self) -> "SimulatedGPU":
        names = dict(CUDAGraph=RecordedGraph, Event=Event)
        fakes: dict[str, Any] = {name: partial(fake, self) for name, fake in names.items()}
        fakes |= dict(Stream=Stream, current_stream=lambda device=None: Stream(), graph=self.capture)
        fakes |= dict.fromkeys(("stream", "device"), nullcontext)
        fakes |= dict(max_memory_allocated=lambda device: 0, get_device_name=lambda device: "a simulated GPU")
        for name, fake in fakes.items():
            self.monkeypatch.setattr(torch.cuda, name, fake)
        simulate_accelerator(self.monkeypatch, lambda: self.capturing is not None)
        self.monkeypatch.setattr(memory, "free", lambda device: 2**40)
        self.monkeypatch.setattr(Runtime, "compute", lambda runtime: nullcontext())
        self.monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        self.monkeypatch.setattr(_foreach_utils, "_foreach_supported_types", [Tensor, GPUTensor])
        self.monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
        with ExitStack() as stack:
            swaps = torch.__future__.get_swap_module_params_on_conversion()
            stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
            torch.__future__.set_swap_module_params_on_conversion(True)  # otherwise `to` unties weights
            stack.enter_context(Functions(self))
            stack.enter_context(Operators(self))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()

    @contextmanager
    def capture(self, graph: "RecordedGraph", stream: "Stream", capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # NCCL's thread may use CUDA during a capture
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        graph.end()
        self.captures += 1


class Stream:
    def wait_stream(self, stream: "Stream") -> None: ...


class Event:
    """Completes the asynchronous copies that were started before it was recorded."""

    def __init__(self, gpu: SimulatedGPU, enable_timing: bool = False):
        self.gpu = gpu

    def record(self, stream: Stream | None = None) -> None:
        self.copies, self.time = list(self.gpu.copies), time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        """In milliseconds."""
        return 1000 * (later.time - self.time)

    def synchronize(self) -> None:
        self.gpu.wait("Event.synchronize")
        with torch.inference_mode():
            for host, values in self.copies:
                host.copy_(values)
        self.gpu.copies = [copy for copy in self.gpu.copies if not any(copy is other for other in self.copies)]


class Functions(TorchFunctionMode):
    """Calls torch's functions for "cuda" with the meta device, because torch's parser of arguments refuses "cuda"."""

    def __init__(self, gpu: SimulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        if function is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            result = Tensor.clone(first) if function is Tensor.pin_memory else function(*args, **kwargs)
            result.is_page_locked = True
            return result
        if function is torch.tensor and is_cuda(kwargs.get("device")):
            return self.from_host(*args, **kwargs)
        if isinstance(first, GPUTensor):
            if function is Tensor.new_tensor:
                return self.from_host(*args[1:], **{"dtype": first.dtype, **kwargs})
            if function is Tensor.tolist:
                self.gpu.wait("tolist")
                return first.values.tolist()
            if function in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                index = tuple(self.from_host(i) if isinstance(i, list) else i for i in index)
                args = (first, index, *args[2:])
            if function is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args = (*args[:2], torch.tensor(args[2], dtype=first.dtype))  # on the CPU, as in THPVariable_setitem
        args = (META if is_cuda(value) else value for value in args)
        return function(*args, **{name: META if is_cuda(value) else value for name, value in kwargs.items()})

    def from_host(self, data: Any, **settings: Any) -> GPUTensor:
        """Like torch.tensor, which copies synchronously."""
        self.gpu.wait("data from the host")
        return GPUTensor(torch.tensor(data, **{**settings, "device": CPU}))


def is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class Operators(TorchDispatchMode):
    """Runs operators of GPUTensors on their values."""

    def __init__(self, gpu: SimulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, name = tree_leaves((args, kwargs)), operator.overloadpacket.__name__
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_gpu = [isinstance(tensor, GPUTensor) for tensor in tensors]
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)  # of the result
        to_gpu = device.type == "meta" if device else on_gpu[0] if name == "copy_" else any(on_gpu)
        if not to_gpu and not any(on_gpu):
            self.gpu.operators["cpu"].add(name)
            return operator(*args, **kwargs)
        if is_composite(operator):  # in inference mode; otherwise it consists of simpler ones by now
            with self:
                return operator.decompose(*args, **kwargs)
        self.gpu.operators["cuda"].add(name)
        arguments = arguments_of(operator, args, kwargs)
        if reason := reason_to_wait(name, arguments, tensors, on_gpu, to_gpu):
            self.gpu.wait(reason)
        args, kwargs = tree_map(to_cpu, (args, kwargs))
        with torch._C.DisableTorchFunction():
            graph = self.gpu.capturing
            results = graph.run(operator, args, kwargs) if graph else operator(*args, **kwargs)
            if name in COPIES and not to_gpu and arguments.get("non_blocking"):
                self.gpu.copies.append((results, results.clone()))
                overwrite(results)  # until an event
        originals = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, GPUTensor)}
        return tree_map(lambda leaf: from_cpu(leaf, originals), results) if to_gpu else results


def reason_to_wait(
    name: str, arguments: dict[str, Any], tensors: list[Tensor], on_gpu: list[bool], to_gpu: bool
) -> str | None:
    """Why the host waits for the device in an operator. Asserts that CUDA accepts tensors on these devices.

    to_gpu: whether the result is on the GPU.
    """
    if name in WAITING:
        return name
    if name in COPIES:
        to_pageable = name == "copy_" and not on_gpu[0] and not hasattr(tensors[0], "is_page_locked")
        if (to_gpu and all(on_gpu)) or (arguments.get("non_blocking") and not to_pageable):
            return None
        return f"{name} {'to' if to_gpu else 'from'} the GPU"
    if name in INDEXING:
        if not all(on_gpu):
            return f"{name} with a tensor on the CPU"
        is_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments["indices"])
        return f"{name} with a mask" if is_mask else None
    assert all(gpu or tensor.dim() == 0 for tensor, gpu in zip(tensors, on_gpu, strict=True)), name
    return None


@cache
def is_composite(operator: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def arguments_of(operator: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, GPUTensor):
        return leaf.values
    return CPU if isinstance(leaf, torch.device) else leaf


def from_cpu(leaf: Any, originals: dict[int, GPUTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return originals[id(leaf)] if id(leaf) in originals else GPUTensor(leaf)  # changed in place, or new


class RecordedGraph:
    """A CUDA graph: the operators that ran during its capture, which a replay runs again on the same tensors.

    As on CUDA, a capture changes no existing tensor, and its results have no values before the first replay.
    """

    def __init__(self, gpu: SimulatedGPU):
        self.gpu = gpu
        self.calls: list[tuple[Callable, tuple, dict[str, Any], Tensor | None]] = []  # the last one: a new result
        self.created: dict[int, Tensor] = {}  # tensors in the graph's memory, by storage
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}  # existing tensors by storage, and their values before

    def run(self, operator: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments, writes = arguments_of(operator, args, kwargs), False
        for argument in operator._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write:
                writes = True
                for tensor in tree_leaves(arguments[argument.name]):
                    if storage(tensor) not in self.created and storage(tensor) not in self.changed:
                        everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                        self.changed[storage(tensor)] = everything, everything.clone()
        results = operator(*args, **kwargs)
        existing = {storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        new = {storage(tensor): tensor for tensor in tree_leaves(results) if storage(tensor) not in existing}
        self.created |= new
        if new or writes:  # not a view
            self.calls.append((operator, args, kwargs, results if new else None))
        return results

    def end(self) -> None:
        for tensor, values in self.changed.values():
            tensor.copy_(values)
        for tensor in self.created.values():
            overwrite(tensor)

    def replay(self) -> None:
        self.gpu.replays += 1
        with torch._C.DisableTorchFunction():
            for operator, args, kwargs, results in self.calls:
                for old, new in zip(tree_leaves(results), tree_leaves(operator(*args, **kwargs)), strict=False):
                    if old is not None:
                        old.copy_(new)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def overwrite(tensor: Tensor) -> None:
    """Fill a tensor with wrong values."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
