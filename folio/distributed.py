"""Several processes that train one model: who they are, what they tell each other, and how the model is spread.

Started by torchrun, which starts them again when one is lost. Each holds the whole model (DistributedDataParallel), or
a share of every parameter (FSDP2), and computes its share of every step. A process of its own is a group of one.
"""

import os
import signal
import sys
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

PATIENCE = timedelta(hours=2)  # how long the others wait for what one does alone, such as writing to a slow disk


def under_torchrun() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def rank_from_env() -> int:
    """This process's rank, known before the processes are joined; 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


@dataclass(frozen=True)
class Group:
    """The processes of a run. What it says between hosts goes by gloo, so that no GPU is waited for."""

    rank: int = 0
    size: int = 1
    gloo: Any = None  # the gloo process group; None: this process is one of its own, not torchrun's

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place, on the tensor's device."""
        if self.gloo:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_count(self, count: int) -> int:
        """The sum over all processes of what each has counted."""
        if not self.gloo:
            return count
        tensor = torch.tensor(count)
        dist.all_reduce(tensor, group=self.gloo)
        return tensor.item()

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all processes, of one shape, one after the other along the first dimension."""
        if not self.gloo:
            return part
        parts = part.new_empty(self.size * len(part), *part.shape[1:])
        dist.all_gather(list(parts.chunk(self.size)), part.contiguous())  # NCCL takes no other
        return parts

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, for all."""
        if not self.gloo:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.gloo)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """What each process has, by rank, for all."""
        if not self.gloo:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def require_same(self, what: str, value: Any) -> None:
        """Raise UserError where the processes have different values."""
        values = self.all_gather_object(value)
        if any(other != values[0] for other in values):
            told = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise UserError(
                f"the processes have different {what} ({told}): they need one out_dir and one data_dir, on a disk that "
                f"all machines share, or the same files on each"
            )

    def barrier(self) -> None:
        """Wait until all processes are here, as after what one did alone."""
        if self.gloo:
            dist.monitored_barrier(self.gloo, timeout=PATIENCE)


ALONE = Group()


def init_process_group(device: torch.device, backend: str) -> Group:
    """The group that torchrun started, or ALONE. Of the others than rank 0, nothing is printed from here on.

    Raises UserError where the backend does not fit the device.
    """
    if not under_torchrun():
        return ALONE
    if not dist.is_initialized():
        if device.type != "cuda":
            backend = "gloo"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            store, device_id = store_of_this_start(rank, size), device if backend == "nccl" else None
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"backend={backend}: the processes cannot be joined: {str(error).splitlines()[0]}"
            ) from None
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process lives)
    return Group(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))


def store_of_this_start(rank: int, size: int) -> dist.Store:
    """The store that torchrun holds, under a name that belongs to this start of the processes.

    torchrun keeps one store while it starts them again (2.13), and in it they would find, and wait for, those that are
    gone. So rank 0 makes up a name and tells it to each that calls now, who is known by a word of its own.
    """
    store = next(dist.rendezvous("env://"))[0]
    if rank:
        word = uuid4().hex
        store.set(f"calls/{rank}", word)
        name = store.get(f"answers/{word}").decode()  # waits for it
        store.set(f"{name}/{rank}", "heard")
        return dist.PrefixStore(name, store)
    name, missing = uuid4().hex, list(range(1, size))
    while missing := [other for other in missing if not store.check([f"{name}/{other}"])]:
        for other in missing:
            if store.check([f"calls/{other}"]):
                store.set(f"answers/{store.get(f'calls/{other}').decode()}", name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def destroy_process_group() -> None:
    """Take leave of the others, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch_command() -> list[str]:
    """The words before the script's name in the command that started this process, as far as can be known."""
    if not under_torchrun():
        return ["python"]
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={os.environ['WORLD_SIZE']}"]


def run_id() -> str | None:
    """What all processes of one torchrun have in common, over restarts too; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if under_torchrun() else None


def restarted(earlier: str | None) -> bool:
    """Whether torchrun has started this run before, where `earlier` is the `run_id` in its last checkpoint.

    A machine that comes or goes starts all processes again without counting it, and only the id tells; "none" is what
    torchrun calls all runs that were given no --rdzv-id.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return earlier is not None and earlier == run_id() and (again or earlier != "none")


def stop_torchrun(error: UserError) -> None:
    """Have torchrun give up where it would start anew, for what fails each time: no exit code tells it so."""
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if under_torchrun() and left > 0:
        print(f"error: {error}", file=sys.stderr, flush=True)  # first, as torchrun is going to end this process too
        os.kill(os.getppid(), signal.SIGTERM)
        raise SystemExit(error.exit_code)


class Requests:
    """What any process asks of all, known to all at the same step, one step later; no GPU is waited for."""

    def __init__(self, group: Group):
        self.group, self.sent = group, None

    def agree(self, *asked: int) -> list[int]:
        """The largest of what each asked for at the step before; alone, what is asked for now."""
        if not self.group.gloo:
            return list(asked)
        known = [0] * len(asked)
        if self.sent:
            work, tensor = self.sent
            work.wait()
            known = tensor.tolist()
        tensor = torch.tensor(asked)
        self.sent = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group.gloo, async_op=True), tensor
        return known


@contextmanager
def name_rank_in_errors(group: Group, step: Callable[[], int]) -> Iterator[None]:
    """Say at which rank and step an error came up, where there are several ranks."""
    try:
        yield
    except Exception as error:
        if group.gloo:
            told = str(error).strip().splitlines() or [type(error).__name__]
            print(f"rank {group.rank} of {group.size}, step {step():,}: {told[0]}", file=sys.stderr)
        raise


# --- the model --------------------------------------------------------------------------------------------------------


def checkpoint_activations(blocks: nn.ModuleList) -> None:
    """Keep only the input of each block for the backward pass, which computes the rest again (Chen et al. 2016)."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(
    model: nn.Module, blocks: nn.ModuleList, group: Group, device: torch.device, dtype: torch.dtype, compile: bool
) -> None:
    """Spread each parameter of a model on the meta device over the processes (FSDP2), still without values.

    A block is gather_like as a whole when it is its turn, in `dtype`; gradients are summed and kept in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (group.size,))
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for block in blocks:
        if compile:
            block.compile()  # one block after the other: the gathering between them is no part of a graph
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.tie_weights()  # which to_empty takes apart


@torch.no_grad()
def fill_shards(model: nn.Module, value_of: Callable[[str, torch.Size], Tensor]) -> None:
    """Give each process its part of each parameter's value, which each of them has whole for a moment."""
    for name, p in model.named_parameters():
        to_local(p).copy_(to_local(distribute_like(p, value_of(name, p.shape))))


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """The model behind DistributedDataParallel, which averages gradients over the processes."""
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # After its first backward pass it divides the gradients anew. With three processes and more this changes the order
    # of sums, so it is done with before the first step: a run that is continued then sums as one that goes through.
    idx = torch.zeros(1, 1, dtype=torch.long, device=device)
    for _ in range(2):
        ddp(idx, idx)[1].backward()
        model.zero_grad(set_to_none=True)
    return ddp


def sync_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward pass averages the gradients over the processes, or only adds them up in each.

    Under FSDP it always does: to keep gradients whole would take the memory that it is there to save.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = now


def reshard(model: nn.Module) -> None:
    """After passes without a backward one, under FSDP: give back what the last of them has gather_like."""
    if hasattr(model, "reshard"):
        model.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds only a part of it. (The type's module is slow to import, and not for one process.)"""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """What this process holds of it, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def distribute_like(p: Tensor, whole: Tensor) -> Tensor:
    """`whole`, which every process has, spread as `p` is."""
    if not is_sharded(p):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, gather_like from every process, each of which has to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather_like(part: Tensor, p: Tensor) -> Tensor:
    """All of what each process has a part of, as it has of `p`."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
