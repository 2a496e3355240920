"""Device, dtype and compilation: resolved once, printed in one line, and passed on as one frozen object."""

import atexit
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio import UserError
from folio.base.files import why_untrusted
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.workers import check_launch, under_torchrun
from folio.machine import distributed
from folio.machine.distributed import SINGLE_PROCESS, Group
from folio.machine.gpus import data_sheet

DEVICES = ("cpu", "cuda", "mps")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Device, dtype and compilation of a run. `description` is printed; it gives the reason for each choice."""

    device: torch.device
    dtype: torch.dtype  # of matmuls and activations; weights and optimizer state are float32
    compile: bool | str  # a string is the mode of torch.compile
    description: str
    group: Group = SINGLE_PROCESS  # of the processes that train together
    workers: int = 1  # threads that divide the sequences of a batch (data_parallel.py)

    @property
    def resolved(self) -> dict[str, Any]:
        """What "auto" was resolved to, and the numbers of processes and workers, as saved in a checkpoint."""
        resolved = {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compile": self.compile,
        }
        counts = {"processes": self.group.size, "workers": self.workers}
        return resolved | {name: count for name, count in counts.items() if count > 1}

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device runs asynchronously, so that reading a value waits for all queued work."""
        return self.device.type == "cuda"

    @property
    def size_multiple(self) -> int:
        """Sizes of matrices are rounded up to a multiple of this if possible. Tensor cores need 8; tiles have 128."""
        return 128 if self.device.type == "cuda" else 1

    def autocast(self) -> AbstractContextManager:
        """The context of a forward pass: autocast to `dtype`.

        All threads share autocast's cache of cast weights, and a worker that ends its forward pass would clear it.
        """
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=self.workers == 1)

    def to_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as tensors on the device; for CUDA, copied asynchronously through pinned memory."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if self.device.type == "cuda":
            return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]
        return [tensor.to(self.device) for tensor in tensors]

    def peak_flops(self) -> float | None:
        """The device's dense FLOP/s in `dtype` from its data sheet; None if unknown."""
        return _peak_flops(self.device) if self.dtype != torch.float32 else None

    def peak_memory(self) -> int | None:
        """Peak memory in bytes: allocated on a GPU, or the resident set size of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return None
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceTime:
    """The time at which a device finishes the work that is queued now; on a CPU, this is now."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event:
            self.event.record()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def seconds_until(self, later: "DeviceTime") -> float:
        """The seconds between two times, after waiting for the later one."""
        return self.event.elapsed_time(later.event) / 1000 if self.event else later.time - self.time


class Length(NamedTuple):
    """The length of a training run: the work of all processes, and the time limit if there is one."""

    flops: float
    seconds: float | None = None
    layers: float = 0  # forward and backward passes through a layer of the model, of one micro-batch each


def resolve_runtime(
    device: str,
    dtype: str,
    compile: bool | str,
    deterministic: bool = False,
    saved: dict[str, Any] | None = None,
    length: Length | None = None,
    backend: str | None = None,
) -> Runtime:
    """Resolve device, dtype and compile: as set, or for "auto" chosen by capability.

    saved: `Runtime.resolved` of the run to resume, which "auto" keeps on a device of the same type. length: of a
    training run; a short run is not compiled. backend: of the process group under torchrun; None: a single process.
    Sets global modes of torch. Raises UserError if a setting cannot work on this machine.
    """
    if under_torchrun() and backend is None:
        raise UserError("this script runs in a single process: start it with python, without torchrun")
    if backend:
        check_launch()
    reasons = []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    opened = _open_device(_own_gpu(device) if under_torchrun() else device)
    is_cuda = opened.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(opened)
    group = distributed.init_process_group(opened, backend) if backend else SINGLE_PROCESS
    name = torch.cuda.get_device_name(opened) if is_cuda else platform.processor() or platform.machine()
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if opened.type == "cpu" else ""
    reasons.append(f"{opened} ({name}{threads})")
    same_device = bool(saved) and saved["device"] == opened.type
    if saved and not same_device:
        reasons.append(f"resumes a run from {saved['device']}, so no longer bitwise identical")

    if group.size > 1:
        reasons[0] = f"{group.size} processes, the first on {reasons[0]}"
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"dtype={dtype}: use auto, {', '.join(DTYPES)}")
    if dtype != "auto":
        chosen, reason = dtype, ""
    else:  # rank 0 chooses, because machines may differ
        chosen, reason = group.broadcast((saved["dtype"], "as before") if same_device else _best_dtype(opened))
    reasons.append(_with_reason(chosen, reason))
    if is_cuda and chosen == "bfloat16" and not _has_bf16():
        raise UserError(f"dtype=bfloat16: {name} does not support it; use --dtype=float16")
    if not is_cuda and chosen == "float16":
        raise UserError(f"dtype=float16: it needs a CUDA GPU, and this run is on {opened}; use --dtype=auto")
    # dtype=float32 means true float32; "auto" may use faster modes of float32 matmuls. On a CPU these are faster only
    # for large matrices, and a bfloat16 run has only small ones in float32.
    precision = "high" if is_cuda else "medium" if chosen == "float32" else "highest"
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else precision)

    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call takes almost a second, for imports
        torch.use_deterministic_algorithms(deterministic)

    if compile == "auto" and same_device:
        resolved_compile, reason = saved["compile"], "as before"
    else:
        resolved_compile, reason = group.broadcast(_resolve_compile(opened, compile, length, group.size))
    reasons.append(_with_reason("torch.compile" if resolved_compile else "eager", reason))
    return Runtime(opened, DTYPES[chosen], resolved_compile, ", ".join(reasons), group)


def _with_reason(choice: str, reason: str) -> str:
    """A choice and the reason for it, which is empty if it was set by name."""
    return f"{choice} ({reason})" if reason else choice


def _own_gpu(device: str) -> str:
    """The GPU of this process under torchrun, where each has its own. Raises UserError."""
    if device.startswith("cuda:"):
        raise UserError(f"device={device}: all processes would use this GPU; use --device=cuda, for one GPU each")
    if device != "cuda":
        return device
    local_rank, n_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if n_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # a scheduler such as SLURM has assigned one to each
        return "cuda:0"
    if 0 < n_gpus <= local_rank:
        raise UserError(f"device=cuda: process {local_rank} has no GPU; use --nproc_per_node={n_gpus}")
    return f"cuda:{local_rank}"


def _open_device(name: str) -> torch.device:
    """The device with this name. Raises UserError if it is not available, or has no kernels in this build of torch."""
    try:
        if name.split(":")[0] not in DEVICES:
            raise RuntimeError(f"Folio supports {', '.join(DEVICES)}")
        device = torch.device(name)
        (torch.ones(1, device=device) + 1).item()  # runs a kernel; allocating memory alone succeeds on any GPU
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        if "no kernel image" in reason:
            major, minor = torch.cuda.get_device_capability(name)
            raise UserError(
                f"device={name}: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(name)} "
                f"(sm_{major}{minor}), only for {', '.join(torch.cuda.get_arch_list())}; install a wheel of torch that "
                f"has them (for an older GPU, one for an older CUDA version), or use --device=cpu"
            ) from None
        raise UserError(f"device={name}: it is not available ({reason}); use --device=auto") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _best_dtype(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        if _has_bf16():
            return "bfloat16", "this GPU supports it"
        return "float16", "this GPU does not support bfloat16"
    if device.type == "cpu":
        if feature := _cpu_bf16_feature():
            return "bfloat16", f"this CPU has {feature}"
        return "float32", "this CPU has no known instructions for bfloat16"
    return "float32", "the default on this device"


def _has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _cpu_bf16_feature() -> str | None:
    """The CPU's instructions for bfloat16 matmuls; None if they would be emulated.

    Features decide, never timings, which change while other processes run.
    """
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    # On x86, the operator is not used, because it is also True for AVX-512 without bfloat16.
    arm = platform.machine().lower() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available()
    return "Arm BF16" if arm and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None


def _peak_flops(device: torch.device) -> float | None:
    gpu = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return 1e12 * gpu.tflops if gpu else None


COMPILE_SECONDS = 60.0
COMPILE_GAIN = 0.25  # fraction of an eager run's time that compiling saves
EAGER_MFU = 0.25  # without torch.compile, of a model that is large enough
EAGER_LAYER_SECONDS = 1.5e-3  # at least, to launch its kernels: on an H200, 6 layers take 9.2 ms per step compiled
UNKNOWN_GPU_FLOPS = 50e12  # per second


def _resolve_compile(
    device: torch.device, setting: bool | str, length: Length | None, processes: int = 1
) -> tuple[bool | str, str]:
    """Whether to use torch.compile, and the reason. Raises UserError if it is set and does not work.

    The reason is empty if the setting names the choice.
    """
    if setting is False:
        return False, ""
    if setting == "auto" and device.type != "cuda":
        gain = "gains almost nothing on a CPU" if device.type == "cpu" else f"was not tried on {device.type}"
        return False, f"compiling {gain}"  # docs/lab/performance.md
    if setting == "auto" and length:
        computing = length.flops / (EAGER_MFU * (_peak_flops(device) or UNKNOWN_GPU_FLOPS))
        seconds = length.seconds or max(computing, length.layers * EAGER_LAYER_SECONDS) / processes
        if seconds * COMPILE_GAIN < COMPILE_SECONDS:
            return False, f"compiling would not pay off in a run of about {seconds:,.0f} s"
    use_private_compiler_cache()
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: (x.sin() * 2).sum())(x).backward()
    except Exception as error:  # the compiler, the driver and missing tools raise different types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if setting != "auto":
            raise UserError(f"compile={setting}: torch.compile fails here: {reason}; use --compile=False") from None
        return False, f"torch.compile fails here: {reason}"
    torch._dynamo.utils.counters.clear()  # for describe_compilation
    return (True, "it works here") if setting == "auto" else (setting, "")


def use_private_compiler_cache() -> None:
    """Make torch.compile use a temporary folder if other users can write to its cache, whose code it executes.

    The cache has a predictable name in a shared folder, where another user can create it first.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # set by the user, or by torch
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_untrusted(folder):
        private = tempfile.mkdtemp(prefix="torchinductor-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = private
        if distributed.rank_from_env() == 0:
            note(f"torch.compile does not use its cache, because {reason}")


def describe_compilation() -> str:
    """What torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    if not graphs:
        return "torch.compile compiled nothing: training runs in eager mode"
    text = f"compiled: {counted(graphs, 'graph')}, {counted(breaks.total(), 'graph break')}"
    return f"{text} ({next(iter(breaks)).splitlines()[0]})" if breaks else text
