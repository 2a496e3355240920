"""Distributed training: the process group, its collectives, DDP, FSDP2 and restarts.

torchrun starts the processes, and restarts them when one fails. Each holds the full model (DistributedDataParallel) or
a shard of each parameter (FSDP2), and computes a share of each step. A single process is a group of size 1.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from folio import UserError
from folio.base import stop_signals
from folio.base.progress import note
from folio.base.workers import under_torchrun

TIMEOUT = timedelta(hours=2)  # for work on a single rank, such as writing to a slow disk
PATIENCE = 5.0  # seconds of waiting for other processes to start, after which a line says so


def rank_from_env() -> int:
    """This process's rank, also before the process group is initialized; 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def size_from_env() -> int:
    """The number of processes, also before the process group is initialized; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


@dataclass(frozen=True)
class Group:
    """The processes of a run. CPU values are exchanged with gloo, without waiting for a GPU."""

    rank: int = 0
    size: int = 1
    gloo: Any = None  # the gloo process group; None: a single process without torchrun

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, on the tensor's device."""
        if self.gloo:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_count(self, count: int) -> int:
        """The sum of `count` over all processes."""
        if not self.gloo:
            return count
        tensor = torch.tensor(count)
        dist.all_reduce(tensor, group=self.gloo)
        return tensor.item()

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate equally shaped tensors from all processes along the first dimension."""
        if not self.gloo:
            return part
        parts = part.new_empty(self.size * len(part), *part.shape[1:])
        dist.all_gather(list(parts.chunk(self.size)), part.contiguous())  # NCCL requires contiguous tensors
        return parts

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if not self.gloo:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.gloo)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, on every rank."""
        if not self.gloo:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def require_same(self, what: str, value: Any) -> None:
        """Raise UserError if the processes have different values. what: a plural noun for the message."""
        values = self.all_gather_object(value)
        if any(other != values[0] for other in values):
            by_rank = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise UserError(
                f"the processes have different {what} ({by_rank}): use one out_dir and one data_dir, on a shared disk "
                f"or with the same files on each machine"
            )

    def barrier(self) -> None:
        """Wait for all processes, for example after work on a single rank."""
        if self.gloo:
            dist.monitored_barrier(self.gloo, timeout=TIMEOUT)


SINGLE_PROCESS = Group()


def init_process_group(device: torch.device, backend: str) -> Group:
    """Initialize the process group under torchrun, otherwise return SINGLE_PROCESS. Afterwards only rank 0 prints.

    Raises UserError if the backend is missing or does not support the device.
    """
    if not under_torchrun():
        return SINGLE_PROCESS
    if not dist.is_initialized():
        if device.type != "cuda":
            backend = "gloo"
        if backend == "nccl" and not dist.is_nccl_available():
            raise UserError("backend=nccl: this build of torch has no NCCL, as on Windows; use --backend=gloo")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            with announced_wait(rank, size):
                store, device_id = store_for_attempt(rank, size), device if backend == "nccl" else None
                if device.type == "cuda":
                    claim_gpu(store, device)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"backend={backend}: the process group cannot be initialized: {str(error).splitlines()[0]}"
            ) from None
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (open until the process exits)
    return Group(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT))


@contextmanager
def announced_wait(rank: int, size: int) -> Iterator[None]:
    """Print a line if the block, in which all processes meet, takes longer than PATIENCE.

    Signals end the process at once, because Python does not call their handlers during a wait in torch's code.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    line = f"rank {rank} waits for the other processes; WORLD_SIZE={size} must start, and meet at {address}"
    timer = threading.Timer(PATIENCE, note, (line, True))
    timer.daemon = True
    timer.start()
    try:
        with stop_signals.immediate():
            yield
    finally:
        timer.cancel()


def claim_gpu(store: dist.Store, device: torch.device) -> None:
    """Raise UserError if another process of the run uses this GPU.

    The number of a GPU does not identify it: a scheduler may show each process another one as cuda:0.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    if store.add(f"gpu/{socket.gethostname()}/{uuid}", 1) > 1:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        variable = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
        raise UserError(
            f"device={device}: two processes would use the GPU {uuid}{variable}; show each process its own GPU, or use "
            f"a smaller --nproc_per_node"
        )


def store_for_attempt(rank: int, size: int) -> dist.Store:
    """torchrun's store with a prefix for this attempt to start the processes.

    torchrun (2.13) keeps one store over restarts, so that processes would wait for entries of exited processes. Here
    rank 0 chooses a prefix and sends it to each running process, which identifies itself by a random token.
    """
    store = next(dist.rendezvous("env://"))[0]
    if rank:
        token = uuid4().hex
        store.set(f"calls/{rank}", token)
        prefix = store.get(f"answers/{token}").decode()  # waits for rank 0
        store.set(f"{prefix}/{rank}", "received")
        return dist.PrefixStore(prefix, store)
    prefix, missing = uuid4().hex, list(range(1, size))
    while missing := [other for other in missing if not store.check([f"{prefix}/{other}"])]:
        for other in missing:
            if store.check([f"calls/{other}"]):
                store.set(f"answers/{store.get(f'calls/{other}').decode()}", prefix)
        time.sleep(0.01)
    return dist.PrefixStore(prefix, store)


def destroy_process_group() -> None:
    """Destroy the process group if it is initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch_command() -> list[str]:
    """The start of the command line of this process, up to the script; "..." for unknown arguments of torchrun."""
    if not under_torchrun():
        return ["python"]
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={os.environ['WORLD_SIZE']}"]


def run_id() -> str | None:
    """The id shared by all processes of a torchrun job, also after restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if under_torchrun() else None


def is_restart(saved_id: str | None) -> bool:
    """Whether torchrun has restarted this run. saved_id: the `run_id` in its last checkpoint.

    If a node joins or fails, torchrun restarts all processes without increasing the restart count, so the id is
    compared. Without --rdzv-id, every job has the id "none".
    """
    was_counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return saved_id is not None and saved_id == run_id() and (was_counted or saved_id != "none")


def stop_torchrun(error: UserError) -> None:
    """Stop torchrun, which would restart a run with a permanent error. No exit code prevents a restart."""
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if under_torchrun() and max_restarts > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        note(f"error: {error}", flush=True)  # printed first, because torchrun also ends this process
        os.kill(os.getppid(), signal.SIGTERM)
        raise SystemExit(error.exit_code)


class SharedFlags:
    """Flags that any process raises for all, such as to stop. All see them at the same step, one step later.

    The exchange is asynchronous, so that no step waits for it.
    """

    def __init__(self, group: Group):
        self.group, self.pending = group, None

    def agree(self, *flags: int) -> list[int]:
        """The maximum of each flag over all processes, one step late; a single process gets its own at once."""
        if not self.group.gloo:
            return list(flags)
        agreed = [0] * len(flags)
        if self.pending:
            work, tensor = self.pending
            work.wait()
            agreed = tensor.tolist()
        # The caller still raises a flag in the step in which it is agreed to; it must not be sent twice.
        tensor = torch.tensor([0 if known else flag for flag, known in zip(flags, agreed, strict=True)])
        self.pending = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group.gloo, async_op=True), tensor
        return agreed


# --- the model --------------------------------------------------------------------------------------------------------


def checkpoint_activations(blocks: nn.ModuleList, contexts: Callable[[nn.Module], tuple] | None = None) -> None:
    """Activation checkpointing: save only each block's input and recompute the rest in the backward pass (Chen et al.
    2016).

    contexts: returns the contexts of a block's computation and recomputation; None: torch's default generator is
    restored.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        options = {"context_fn": partial(contexts, block)} if contexts else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def shard(
    model: nn.Module, blocks: nn.ModuleList, group: Group, device: torch.device, dtype: torch.dtype, compile: bool
) -> None:
    """Shard each parameter of a model on the meta device over the processes (FSDP2), without initializing it.

    Blocks are all-gathered one at a time, in `dtype`; gradients are reduced and stored in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (group.size,))
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:  # inputs are not cast, so that the angles of rotary positions stay in float32
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if compile:
            # Block by block, because a graph cannot contain the all-gathers, which are in hooks around `forward`.
            # Activation checkpointing must be inside the graph: torch compiles no code that it calls.
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "logits")
    model.to_empty(device=device)
    model.tie_weights()  # to_empty unties them


@torch.no_grad()
def fill_shards(model: nn.Module, value_of: Callable[[str], Tensor]) -> None:
    """Initialize each parameter's local shard from its full value, which exists on every process temporarily."""
    for name, p in model.named_parameters():
        to_local(p).copy_(to_local(distribute_like(p, value_of(name))))


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap the model in DistributedDataParallel, which averages gradients over the processes."""
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # DDP rebuilds its buckets after the first backward pass. With three or more processes this changes the order of
    # sums. Doing it before the first step makes a resumed run sum in the same order as an uninterrupted one.
    idx = torch.zeros(1, 1, dtype=torch.long, device=device)
    for _ in range(2):
        ddp(idx, idx)[1].backward()
        model.zero_grad(set_to_none=True)
    return ddp


def sync_gradients(module: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass averages gradients over the processes or only accumulates them locally.

    FSDP always averages: unsharded gradients would take the memory that FSDP saves.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = enabled


def reshard(model: nn.Module) -> None:
    """Under FSDP, free the gathered parameters after a forward pass without a backward pass."""
    if hasattr(model, "reshard"):
        model.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which each process holds a shard. (Importing DTensor for isinstance is slow.)"""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """This process's shard, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def distribute_like(p: Tensor, full: Tensor) -> Tensor:
    """Shard `full`, which every process has, like `p`."""
    if not is_sharded(p):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes. A collective: every process must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather_like(part: Tensor, p: Tensor) -> Tensor:
    """The full tensor from local parts that are sharded like `p`."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
