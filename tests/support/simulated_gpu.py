"""Simulated GPUs on a CPU: Folio takes its branches for GPUs, and whatever the host waits for is recorded.

The values of a GPUTensor are in a tensor on the CPU. It is on "cuda:0" for Python code and on "meta:0" for torch's C++
code. In the block, these are replaced:

    torch.cuda                  what Folio, AdamW and GradScaler use of it: the names in SimulatedGPU.__init__
    torch.cuda._lazy_init       raises an error, as do the functions of torch._C that ask the driver: see DRIVER. So a
                                simulated GPU never reaches a real one, nor a driver that is missing
    torch.accelerator           current_accelerator and current_stream, which AdamW asks whether a graph is captured
    torch.utils._foreach_utils  the lists of types and devices of torch's functions of several tensors
    torch.__future__            Module.to swaps parameters; otherwise, it would untie the weights of a GPT
    Runtime.autocast            of Folio: without autocast, which casts nothing on the meta device

Two modes, which torch provides for this, translate function calls and operators. Attention is torch's for an unknown
device.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from folio.machine.runtime import Runtime

CPU = torch.device("cpu")
WAITING = {  # operators whose result on the host, or whose shape, depends on values on the device
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
DRIVER = {"_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"}  # not in a wheel for CPUs
DRIVER |= {name for name in dir(torch._C) if name.startswith(("_cuda_", "_accelerator_"))}


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a simulated GPU asks a real one")


class GPUTensor(Tensor):
    """A tensor on a simulated GPU."""

    device = property(lambda self: self.gpu)
    is_cuda, is_meta = property(lambda self: self.gpu.type == "cuda"), False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, gpu: torch.device) -> "GPUTensor":
        assert gpu.type == "cuda" or values.dtype != torch.float64, "Apple's GPUs have no float64"
        layout = dict(strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype)
        with torch.inference_mode(values.is_inference()):
            return Tensor._make_wrapper_subclass(cls, values.shape, **layout, device=torch.device("meta", gpu.index))

    def __init__(self, values: Tensor, gpu: torch.device):
        self.values, self.gpu = values, gpu

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise RuntimeError(f"{operator} was called outside of the simulation")


class SimulatedGPU(ExitStack):
    """A context in which GPUs are simulated: of CUDA, or Apple's.

    waits: what the host has waited for. operators: the names of the operators that have run, by type of device.
    """

    def __init__(self, kind: str = "cuda", **replacements: Any):
        """kind: or "mps". replacements: of functions of torch.cuda, or their results. Default: one H100."""
        super().__init__()
        self.kind = kind
        self.waits: list[str] = []
        self.operators: dict[str, set[str]] = {"cpu": set(), kind: set()}
        self.copies: list[Callable[[], Tensor]] = []  # functions that complete asynchronous copies to the host
        self.capturing: RecordedGraph | None = None
        self.captures = self.replays = 0
        self.thread = threading.local()  # its current device
        self.sync_debug_mode = "default"
        name, bytes = "NVIDIA H100 80GB HBM3", 80 * 2**30
        properties = SimpleNamespace(name=name, major=9, minor=0, total_memory=bytes, uuid="an id")
        names = dict(is_available=True, device_count=1, get_device_name=name, get_device_properties=properties)
        names |= dict(get_device_capability=(9, 0), get_arch_list=["sm_90"], is_bf16_supported=True)
        names |= dict(mem_get_info=(bytes, bytes), max_memory_allocated=2**10)
        names |= dict.fromkeys(
            ("memory_reserved", "memory_allocated", "empty_cache", "reset_peak_memory_stats", "manual_seed_all"), 0
        )
        names |= dict(current_device=self.index, set_device=self.set_device, device=self.device)
        names |= dict(Event=partial(Event, self), Stream=self.stream, current_stream=self.stream)
        names |= dict(stream=lambda stream: nullcontext())
        names |= dict(CUDAGraph=partial(RecordedGraph, self), graph=self.capture)
        names |= dict(is_current_stream_capturing=lambda: self.capturing is not None)  # for older versions of torch
        names |= dict(set_sync_debug_mode=partial(setattr, self, "sync_debug_mode"))
        names |= dict(synchronize=lambda device=None: self.wait("synchronize"))
        self.names = names | replacements

    def __enter__(self) -> "SimulatedGPU":
        import torch._dynamo  # modes import it; its classes must not keep what is replaced here

        self.replace(torch.cuda, **{name: as_function(value) for name, value in self.names.items()})
        self.replace(torch.cuda, _lazy_init=refuse)
        self.replace(torch._C, create=True, **dict.fromkeys(DRIVER, refuse))
        accelerator = torch.device(self.kind)
        self.replace(torch.accelerator, current_accelerator=as_function(accelerator), current_stream=self.stream)
        self.replace(Runtime, autocast=as_function(nullcontext()))
        self.replace(_foreach_utils, _foreach_supported_types=[Tensor, GPUTensor])
        self.replace(_foreach_utils, _get_foreach_kernels_supported_devices=as_function(["cuda", "meta"]))
        set_swap = torch.__future__.set_swap_module_params_on_conversion
        self.callback(set_swap, torch.__future__.get_swap_module_params_on_conversion())
        set_swap(True)
        self.enter_context(self.modes())
        return self

    def replace(self, owner: Any, create: bool = False, **values: Any) -> None:
        self.enter_context(mock.patch.multiple(owner, create=create, **values))

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes, which each thread must enter."""
        with Functions(self), Operators(self):
            yield

    def index(self, device: Any = None) -> int:
        """The index of a device. None: the current one of the thread, which is 0 in a new thread."""
        index = None if device is None else torch.device(device).index
        return getattr(self.thread, "index", 0) if index is None else index

    def set_device(self, device: Any) -> None:
        self.thread.index = self.index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.index()
        self.set_device(device)
        yield
        self.thread.index = before

    def stream(self, device: Any = None) -> SimpleNamespace:
        def wait_stream(stream: SimpleNamespace) -> None:
            assert stream.gpu == gpu

        gpu = self.index(device)
        return SimpleNamespace(gpu=gpu, wait_stream=wait_stream, is_capturing=lambda: self.capturing is not None)

    def wait(self, reason: str) -> None:
        assert not self.capturing, f"{reason} during a capture"
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")
        self.waits.append(reason)

    @contextmanager
    def capture(
        self, graph: "RecordedGraph", stream: SimpleNamespace | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # NCCL's thread may use CUDA during a capture
        graph.gpu = stream.gpu if stream else 0  # by default, the device of the first capture of the process
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        graph.end()
        self.captures += 1


def as_function(value: Any) -> Callable:
    return value if callable(value) else lambda *args, **kwargs: value


class Event:
    """Completes the asynchronous copies that were started before it was recorded."""

    def __init__(self, simulation: SimulatedGPU, enable_timing: bool = False):
        self.simulation = simulation

    def record(self, stream: SimpleNamespace | None = None) -> None:
        self.copies, self.time = list(self.simulation.copies), time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        """In milliseconds."""
        return 1000 * (later.time - self.time)

    def synchronize(self) -> None:
        self.simulation.wait("Event.synchronize")
        with torch.inference_mode():
            for copy in self.copies:
                copy()


class Functions(TorchFunctionMode):
    """Calls torch's functions for "cuda" with the meta device, because torch's parser of arguments would initialize
    CUDA.
    """

    def __init__(self, simulation: SimulatedGPU):
        super().__init__()
        self.simulation = simulation

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        if function is torch.device:
            return function(*args, **kwargs)
        if function is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            result = Tensor.clone(first) if function is Tensor.pin_memory else function(*args, **kwargs)
            result.is_page_locked = True
            return result
        if function is torch.tensor and self.is_gpu(kwargs.get("device")):
            return self.from_host(*args, **kwargs)
        if isinstance(first, GPUTensor):
            if function is Tensor.new_tensor:
                return self.from_host(*args[1:], **{"dtype": first.dtype, "device": first.device, **kwargs})
            if function is Tensor.tolist:
                self.simulation.wait("tolist")
                return first.values.tolist()
            if function in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                index = tuple(self.from_host(i, device=first.device) if isinstance(i, list) else i for i in index)
                args = (first, index, *args[2:])
            if function is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args = (*args[:2], torch.tensor(args[2], dtype=first.dtype))  # on the CPU, as in THPVariable_setitem
        return function(*map(self.to_meta, args), **{name: self.to_meta(value) for name, value in kwargs.items()})

    def to_meta(self, value: Any) -> Any:
        return torch.device("meta", self.simulation.index(value)) if self.is_gpu(value) else value

    def is_gpu(self, value: Any) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith(self.simulation.kind)

    def from_host(self, data: Any, device: Any, **settings: Any) -> GPUTensor:
        """Like torch.tensor, which copies synchronously."""
        self.simulation.wait("data from the host")
        gpu = torch.device(self.simulation.kind, self.simulation.index(device))
        return GPUTensor(torch.tensor(data, **settings), gpu)


class Operators(TorchDispatchMode):
    """Runs operators of GPUTensors on their values."""

    def __init__(self, simulation: SimulatedGPU):
        super().__init__()
        self.simulation = simulation

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, name = tree_leaves((args, kwargs)), operator.overloadpacket.__name__
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        gpus = [getattr(tensor, "gpu", None) for tensor in tensors]
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)  # of the result
        if device:
            is_gpu = device.type == "meta" and device.index is not None  # torch's own meta device has no index
            gpu = torch.device(self.simulation.kind, device.index) if is_gpu else None
        else:
            gpu = gpus[0] if name == "copy_" else next((gpu for gpu in gpus if gpu is not None), None)
        used = {*gpus, gpu} - {None}
        if not used:
            self.simulation.operators["cpu"].add(name)
            return operator(*args, **kwargs)
        if is_composite(operator):  # in inference mode; otherwise it consists of simpler ones by now
            with self:
                return operator.decompose(*args, **kwargs)
        self.simulation.operators[self.simulation.kind].add(name)
        self.check_gpus(name, used)
        arguments = arguments_of(operator, args, kwargs)
        written = tree_leaves([arguments.get(name) for name in written_arguments(operator)])
        assert name in COPIES or all(hasattr(tensor, "gpu") for tensor in written), f"{name} writes to the CPU"
        assert self.simulation.kind == "cuda" or not arguments.get("non_blocking"), "not known when it is complete"
        on_gpu = [gpu is not None for gpu in gpus]
        if reason := reason_to_wait(name, arguments, tensors, on_gpu, gpu is not None):
            self.simulation.wait(reason)
        args, kwargs = tree_map(to_cpu, (args, kwargs))
        with torch._C.DisableTorchFunction():
            graph = self.simulation.capturing
            results = graph.run(operator, args, kwargs) if graph else operator(*args, **kwargs)
            if name in COPIES and gpu is None and arguments.get("non_blocking"):
                self.simulation.copies.append(cache(partial(results.copy_, results.clone())))  # once
                overwrite(results)  # until an event
        originals = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, GPUTensor)}
        return results if gpu is None else tree_map(lambda leaf: from_cpu(leaf, originals, gpu), results)

    def check_gpus(self, name: str, used: set[torch.device]) -> None:
        """Raise an error if an operator cannot run with tensors on these GPUs."""
        assert len(used) == 1 or name in COPIES, f"{name} with tensors on several GPUs"
        graph = self.simulation.capturing
        assert graph is None or {gpu.index for gpu in used} == {graph.gpu}, f"{name} on another GPU than the graph"
        assert all(gpu.index < torch.cuda.device_count() for gpu in used), "invalid device ordinal"
        major, minor = torch.cuda.get_device_capability()
        if name != "empty" and f"sm_{major}{minor}" not in torch.cuda.get_arch_list():
            raise RuntimeError("no kernel image is available for execution on the device")


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


@cache
def written_arguments(operator: torch._ops.OpOverload) -> list[str]:
    """The names of the arguments that an operator changes."""
    return [argument.name for argument in operator._schema.arguments if argument.is_write]


def to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, GPUTensor):
        return leaf.values
    return CPU if isinstance(leaf, torch.device) else leaf


def from_cpu(leaf: Any, originals: dict[int, GPUTensor], gpu: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return originals[id(leaf)] if id(leaf) in originals else GPUTensor(leaf, gpu)  # changed in place, or new


class RecordedGraph:
    """A CUDA graph: the operators that ran during its capture, which a replay runs again on the same tensors.

    As on CUDA, a capture changes no existing tensor, and its results have no values before the first replay.
    """

    def __init__(self, simulation: SimulatedGPU):
        self.simulation, self.gpu = simulation, 0
        self.calls: list[tuple[Callable, tuple, dict[str, Any], Tensor | None]] = []  # the last one: a new result
        self.created: dict[int, Tensor] = {}  # tensors in the graph's memory, by storage
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # other tensors by storage, and their values

    def run(self, operator: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = {storage(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for key in tensors.keys() - self.created.keys() - self.before.keys():
            everything = torch.empty(0, dtype=tensors[key].dtype).set_(tensors[key].untyped_storage())
            self.before[key] = everything, everything.clone()
        results = operator(*args, **kwargs)
        returned = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        new = {storage(tensor): tensor for tensor in returned if storage(tensor) not in tensors}
        self.created |= new
        if new or operator._schema.is_mutable:  # not a view
            self.calls.append((operator, args, kwargs, results if new else None))
        return results

    def end(self) -> None:
        for tensor, values in self.before.values():
            tensor.copy_(values)
        for tensor in self.created.values():
            overwrite(tensor)

    def replay(self) -> None:
        self.simulation.replays += 1
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
