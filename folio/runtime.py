"""Device, dtype, compilation, ranks and seeds: decided once, said in one line, passed on as one frozen value."""

import ctypes
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from folio import UserError, distributed
from folio.distributed import ALONE, Group

DEVICES = ("cpu", "cuda", "mps")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes. `described` is the line that says so, with the reason for each choice."""

    device: torch.device
    dtype: torch.dtype  # of matmuls and activations; weights and optimizer state are float32
    compile: bool | str  # or the mode of torch.compile
    described: str
    group: Group = ALONE  # this process among those that train together

    @property
    def resolved(self) -> dict[str, Any]:
        """What "auto" came to, and among how many, as a checkpoint keeps it."""
        resolved = {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compile": self.compile,
        }
        return {**resolved, "processes": self.group.size} if self.group.size > 1 else resolved

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works off a queue, so that to look at a number is to wait for all that came before it."""
        return self.device.type == "cuda"

    @property
    def skips_on_device(self) -> bool:
        """Whether the fused optimizers there are known to skip a step by a flag on the device (found_inf)."""
        return self.device.type in ("cpu", "cuda")

    def compute(self) -> AbstractContextManager:
        """The context of a forward pass: autocast to `dtype`."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    def to_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as tensors on the device, through pinned memory and without waiting where that is CUDA."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if self.device.type == "cuda":
            return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]
        return [tensor.to(self.device) for tensor in tensors]

    def peak_flops(self) -> float | None:
        """Dense FLOP/s that the device's maker states for `dtype`, or None where this is not known."""
        return _peak_flops(self.device) if self.dtype != torch.float32 else None

    def peak_memory(self) -> int | None:
        """Bytes: the most that was allocated on a GPU, or the largest resident size of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return None
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class GPU(NamedTuple):
    """What a maker's data sheet says."""

    tflops: float  # dense TFLOP/s in bfloat16, or float16, with float32 accumulation
    memory: int  # GB
    watts: int


# NVIDIA's. A GPU that is not in this table gets no MFU.
GPUS = {
    "B200": GPU(2250.0, 180, 1000),
    "H200": GPU(989.4, 141, 700),
    "H100 PCIe": GPU(756.0, 80, 350),
    "H100 NVL": GPU(835.0, 94, 400),
    "H100": GPU(989.4, 80, 700),
    "A100": GPU(312.0, 80, 400),
    "L40S": GPU(362.0, 48, 350),
    "L4": GPU(121.0, 24, 72),
    "A10G": GPU(70.0, 24, 300),
    "RTX 4090": GPU(165.2, 24, 450),
    "RTX 3090": GPU(71.0, 24, 350),
    "V100": GPU(125.0, 32, 300),
    "T4": GPU(65.0, 16, 70),
}


class Length(NamedTuple):
    """How much a run computes, or how long it may take."""

    flops: float
    seconds: float | None = None


def resolve_runtime(
    device: str,
    dtype: str,
    compile: bool | str,
    deterministic: bool = False,
    earlier: dict[str, Any] | None = None,
    length: Length | None = None,
    backend: str | None = None,
) -> Runtime:
    """Settle device, dtype and compile; each is taken by name, or chosen by capability when it is "auto".

    earlier: `Runtime.resolved` of the run that is continued; "auto" then means the same again if the device is of the
    same kind. length: of the run, if it is one to be trained: a short one is not compiled. backend: by which the
    processes of a torchrun are joined; None: this is work for one process. Sets torch's and the allocator's global
    modes for the choice. Raises UserError for what cannot work here.
    """
    if distributed.under_torchrun() and backend is None:
        raise UserError("this is work for one process: start it with python, without torchrun")
    reasons = []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and distributed.under_torchrun():
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # one GPU a process
    place = _open_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    group = distributed.init_process_group(place, backend) if backend else ALONE
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else platform.processor() or platform.machine()
    threads = f", {torch.get_num_threads()} threads" if place.type == "cpu" else ""
    reasons.append(f"{place} ({name}{threads})")
    same = bool(earlier) and earlier["device"] == place.type
    if earlier and not same:
        reasons.append(f"continues a run from {earlier['device']}, so no longer bit for bit")

    if group.size > 1:
        reasons[0] = f"{group.size} processes, the first on {reasons[0]}"
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"dtype={dtype}: take auto, {', '.join(DTYPES)}")
    if dtype != "auto":
        chosen, why = dtype, "as set"
    else:  # of rank 0, as two machines may come to two answers
        chosen, why = group.broadcast((earlier["dtype"], "as before") if same else _best_dtype(place))
    reasons.append(f"{chosen} ({why})")
    if place.type == "cuda" and chosen == "bfloat16" and not _has_bf16():
        raise UserError(f"dtype=bfloat16: {name} cannot compute in it; use --dtype=float16")
    if place.type != "cuda" and chosen == "float16":
        raise UserError(f"dtype=float16: it needs a CUDA GPU, and this run is on {place}; use --dtype=auto")
    # True float32 when it is asked for by name; "auto" may use the faster modes of float32 matmuls. On a CPU they are
    # for large matrices: beside bfloat16, only small ones are left in float32.
    faster = "high" if place.type == "cuda" else "medium" if chosen == "float32" else "highest"
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else faster)

    if place.type == "cpu":
        keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call alone imports for most of a second
        torch.use_deterministic_algorithms(deterministic)

    if compile == "auto" and same:
        compiles, why = earlier["compile"], "as before"
    else:
        compiles, why = group.broadcast(_whether_to_compile(place, compile, length))
    reasons.append(f"{'compiled' if compiles else 'eager'} ({why})")
    return Runtime(place, DTYPES[chosen], compiles, ", ".join(reasons), group)


def _open_device(name: str) -> torch.device:
    """The device of that name. Raises UserError if it is not there."""
    try:
        if name.split(":")[0] not in DEVICES:
            raise RuntimeError(f"Folio runs on {', '.join(DEVICES)}")
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"device={name}: it cannot be used here ({first}); use --device=auto") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _best_dtype(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        if _has_bf16():
            return "bfloat16", "this GPU computes in it"
        return "float16", "this GPU has no bfloat16"
    if device.type == "cpu":
        if feature := _cpu_bf16_feature():
            return "bfloat16", f"this CPU has {feature}"
        return "float32", "this CPU has no known instructions for bfloat16"
    return "float32", "the safe choice on this device"


def _has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _cpu_bf16_feature() -> str | None:
    """The instructions with which this CPU multiplies matrices in bfloat16, or None where it would emulate them.

    A feature, and never a timing: a timing comes out differently while other processes run.
    """
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    # On x86, this operator also answers True for a CPU that has AVX-512 without bfloat16.
    arm = platform.machine().lower() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available()
    return "Arm BF16" if arm and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None


def _peak_flops(device: torch.device) -> float | None:
    gpu = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return 1e12 * gpu.tflops if gpu else None


def data_sheet(name: str) -> GPU | None:
    """The entry of GPUS for a device name as the driver gives it, such as "NVIDIA H100 80GB HBM3".

    After the model's name, only words for its socket and memory may follow: the "L40" is not the "L4", the "RTX 4090
    Laptop GPU" is not the "RTX 4090", and a MIG slice of an H100 is not an H100.
    """
    model = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", name)
    for key in sorted(GPUS, key=len, reverse=True):  # "H100 PCIe" before "H100"
        if re.fullmatch(rf"{key}([ -](SXM\d?|PCIe|HBM\w*|\d+GB))*", model, re.IGNORECASE):
            return GPUS[key]
    return None


COMPILING = 60.0  # seconds
GAIN = 0.25  # of an eager run's time, in a compiled one
EAGER = 0.25  # of a GPU's stated FLOP/s, without torch.compile
UNKNOWN_GPU = 50e12  # FLOP/s


def _whether_to_compile(device: torch.device, wanted: bool | str, length: Length | None) -> tuple[bool | str, str]:
    """Whether torch.compile is used, and why. Raises UserError if it was asked for and does not work."""
    if wanted is False:
        return False, "as set"
    if wanted == "auto" and device.type != "cuda":
        return False, "on a CPU compiling gains next to nothing"  # docs/performance.md
    if wanted == "auto" and length:
        seconds = length.seconds or length.flops / (EAGER * (_peak_flops(device) or UNKNOWN_GPU))
        if seconds * GAIN < COMPILING:
            return False, f"a run of about {seconds:,.0f} s is too short to compile for"
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: (x.sin() * 2).sum())(x).backward()
    except Exception as error:  # whatever the compiler, the driver or a missing tool raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if wanted != "auto":
            raise UserError(
                f"compile={wanted}: torch.compile does not work here: {first}; use --compile=False"
            ) from None
        return False, f"torch.compile does not work here: {first}"
    return (True, "a probe compiled and ran") if wanted == "auto" else (wanted, "as set")


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step. It gives large pieces back to the system, and Linux then has to
    clear each page again: 13 to 18 % of a training step (docs/performance.md).
    """
    TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
    with suppress(OSError, AttributeError):  # another system's library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(MMAP_THRESHOLD, 1 << 30)
        mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def attention_kernel(runtime: Runtime, config: Any) -> str:
    """By what attention of a model of that GPTConfig is computed in training, in words."""
    p = config.pdrop("attn")
    if runtime.device.type == "cpu":
        return "matmuls" if runtime.dtype == torch.bfloat16 or p else "torch's flash kernel"
    if runtime.device.type != "cuda":
        return "scaled_dot_product_attention"
    shape = (1, config.n_head, config.block_size, config.n_embd // config.n_head)
    q = torch.empty(shape, dtype=runtime.dtype, device=runtime.device)
    asked = torch.backends.cuda.SDPAParams(q, q, q, None, p, True, False)
    if torch.backends.cuda.can_use_flash_attention(asked):
        return "the flash kernel"
    return f"the {'memory-efficient' if torch.backends.cuda.can_use_efficient_attention(asked) else 'math'} kernel"


def compiled(model: nn.Module, runtime: Runtime) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss as a function of inputs and targets, (B, T) each; perhaps compiled, model and loss in one graph.

    A model that is spread over processes is compiled block by block already (distributed.shard).
    """

    def loss_of(idx: Tensor, targets: Tensor) -> Tensor:
        with runtime.compute():
            return model(idx, targets)[1]

    mode = runtime.compile if isinstance(runtime.compile, str) else None
    whole = not distributed.is_sharded(next(model.parameters()))
    return torch.compile(loss_of, mode=mode) if runtime.compile and whole else loss_of


class Signals:
    """What signals ask of a run, while its block lasts.

    The first SIGINT or SIGTERM asks it to save and stop (`stop` is the signal's number); the second does what it always
    did, except under torchrun, which passes on each signal that the terminal has sent already, and in the end kills.
    SIGUSR1, where the system has it, asks it to save and go on (`save`, which the run sets back). Outside the main
    thread, where Python lets nobody handle signals, nothing is asked.
    """

    stop: int = 0
    save: bool = False

    def __enter__(self) -> "Signals":
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.ask_to_stop)
            if hasattr(signal, "SIGUSR1"):
                self.before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self.ask_to_save)
        return self

    def ask_to_stop(self, number: int, frame: Any) -> None:
        self.stop = number
        if distributed.under_torchrun():
            return
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, self.before[again])

    def ask_to_save(self, number: int, frame: Any) -> None:
        self.save = True

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
