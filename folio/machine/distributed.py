"""Training with several processes: the process group, its collectives, DDP, FSDP2 and restarts.

torchrun starts the processes, and restarts them when one fails. Each holds the whole model (DistributedDataParallel) or
a shard of every parameter (FSDP2), and computes its share of every step. A single process is a group of one.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from folio import UserError
from folio.base.progress import note
from folio.base.workers import under_torchrun

TIMEOUT = timedelta(hours=2)  # for work that one rank does alone, such as writing to a slow disk


def rank_from_env() -> int:
    """This process's rank, known before the process group is initialized; 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


@dataclass(frozen=True)
class Group:
    """The processes of a run. Host values are exchanged with gloo, so that no GPU is waited for."""

    rank: int = 0
    size: int = 1
    gloo: Any = None  # the gloo process group; None: a single process without torchrun

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, on the tensor's device."""
        if self.gloo:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_count(self, count: int) -> int:
        """The sum of a number over all processes."""
        if not self.gloo:
            return count
        tensor = torch.tensor(count)
        dist.all_reduce(tensor, group=self.gloo)
        return tensor.item()

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all processes, of equal shape, concatenated along the first dimension."""
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
        """The values of all processes by rank, on every rank."""
        if not self.gloo:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def require_same(self, what: str, value: Any) -> None:
        """Raise UserError if the processes have different values."""
        values = self.all_gather_object(value)
        if any(other != values[0] for other in values):
            by_rank = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise UserError(
                f"the processes have different {what} ({by_rank}): use one out_dir and one data_dir, on a shared disk "
                f"or with the same files on each machine"
            )

    def barrier(self) -> None:
        """Wait for all processes, as after work that one rank did alone."""
        if self.gloo:
            dist.monitored_barrier(self.gloo, timeout=TIMEOUT)


ALONE = Group()


def init_process_group(device: torch.device, backend: str) -> Group:
    """Initialize the process group that torchrun started; ALONE without torchrun. Only rank 0 prints from here on.

    Raises UserError if the backend does not fit the device.
    """
    if not under_torchrun():
        return ALONE
    if not dist.is_initialized():
        if device.type != "cuda":
            backend = "gloo"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            store, device_id = store_of_this_attempt(rank, size), device if backend == "nccl" else None
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"backend={backend}: the process group cannot be initialized: {str(error).splitlines()[0]}"
            ) from None
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process lives)
    return Group(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT))


def store_of_this_attempt(rank: int, size: int) -> dist.Store:
    """torchrun's store, with a prefix that belongs to this attempt to start the processes.

    torchrun keeps one store over restarts (2.13), in which processes would find and wait for ones that have exited. So
    rank 0 chooses a prefix and sends it to each process that asks now, which identifies itself by a random token.
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
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch_command() -> list[str]:
    """The arguments before the script's name in the command that started this process, as far as they are known."""
    if not under_torchrun():
        return ["python"]
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={os.environ['WORLD_SIZE']}"]


def run_id() -> str | None:
    """The id that all processes of one torchrun share, also after restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if under_torchrun() else None


def restarted(earlier: str | None) -> bool:
    """Whether torchrun has started this run before. earlier: the `run_id` in its last checkpoint.

    A node that joins or fails restarts all processes without increasing the restart count; only the id shows it. Runs
    without --rdzv-id all have the id "none".
    """
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return earlier is not None and earlier == run_id() and (counted or earlier != "none")


def stop_torchrun(error: UserError) -> None:
    """Stop torchrun, which would restart a run that fails every time; no exit code can tell it not to."""
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if under_torchrun() and left > 0:
        note(f"error: {error}", flush=True)  # first, because torchrun ends this process too
        os.kill(os.getppid(), signal.SIGTERM)
        raise SystemExit(error.exit_code)


class Requests:
    """Requests of any process to all, known to all at the same step, one step later; no GPU is waited for."""

    def __init__(self, group: Group):
        self.group, self.sent = group, None

    def agree(self, *requests: int) -> list[int]:
        """The maximum over all processes of each request of the previous step; a single process's own of this step."""
        if not self.group.gloo:
            return list(requests)
        agreed = [0] * len(requests)
        if self.sent:
            work, tensor = self.sent
            work.wait()
            agreed = tensor.tolist()
        # A request is still up while it is agreed to. Sending it again would have it obeyed twice.
        tensor = torch.tensor([0 if known else request for request, known in zip(requests, agreed, strict=True)])
        self.sent = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group.gloo, async_op=True), tensor
        return agreed


# --- the model --------------------------------------------------------------------------------------------------------


def checkpoint_activations(blocks: nn.ModuleList) -> None:
    """Keep only the input of each block for the backward pass, which recomputes the rest (Chen et al. 2016)."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(
    model: nn.Module, blocks: nn.ModuleList, group: Group, device: torch.device, dtype: torch.dtype, compile: bool
) -> None:
    """Shard each parameter of a model on the meta device over the processes (FSDP2), still without values.

    Blocks are all-gathered one at a time, in `dtype`; gradients are reduced and kept in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (group.size,))
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:  # inputs as without FSDP: the angles of rotary positions stay in float32
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if compile:
            block.compile()  # block by block, because all-gathers are not part of a graph
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "logits")
    model.to_empty(device=device)
    model.tie_weights()  # to_empty unties them


@torch.no_grad()
def fill_shards(model: nn.Module, value_of: Callable[[str, torch.Size], Tensor]) -> None:
    """Fill each process's shard of each parameter from its full value, which every process computes for a moment."""
    for name, p in model.named_parameters():
        to_local(p).copy_(to_local(distribute_like(p, value_of(name, p.shape))))


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap the model in DistributedDataParallel, which averages gradients over the processes."""
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # After its first backward pass, DDP rebuilds its buckets. With three or more processes this changes the order of
    # sums, so it happens before the first step: a resumed run then sums in the same order as an uninterrupted one.
    idx = torch.zeros(1, 1, dtype=torch.long, device=device)
    for _ in range(2):
        ddp(idx, idx)[1].backward()
        model.zero_grad(set_to_none=True)
    return ddp


def sync_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward pass averages the gradients over the processes, or only accumulates them in each.

    Under FSDP it always does: keeping unsharded gradients would take the memory that FSDP saves.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = now


def reshard(model: nn.Module) -> None:
    """Under FSDP, free the gathered parameters after forward passes without a backward pass."""
    if hasattr(model, "reshard"):
        model.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds only a shard. (Importing DTensor to ask for its type is slow.)"""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def distribute_like(p: Tensor, full: Tensor) -> Tensor:
    """Shard a tensor that every process has in full in the same way as `p`."""
    if not is_sharded(p):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes, each of which must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather_like(part: Tensor, p: Tensor) -> Tensor:
    """The full tensor of parts that are sharded like `p`."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
