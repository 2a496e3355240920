"""The memory that is free on a device."""

from pathlib import Path

import torch

from folio import UserError

CGROUP = Path("/sys/fs/cgroup")
HEADROOM = 1.2  # a factor for what kernels and allocators take themselves (docs/scaling.md)


def format_bytes(n: float) -> str:
    return f"{n / 2**20:,.0f} MiB" if n < 2**30 else f"{n / 2**30:,.1f} GiB"


def require_free(required: int, what: str, remedy: str, available: int | None) -> None:
    """Raise UserError if fewer bytes are available than `what`, a plural noun, will take in any case. None: unknown."""
    if available is not None and required > available:
        raise UserError(
            f"{what} take {format_bytes(required)}, and {format_bytes(available)} of memory is free: use {remedy}"
        )


def free(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device, or None if this is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    import psutil

    available = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():  # the limit of a container
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        droppable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # cached files
        used = int((CGROUP / "memory.current").read_text()) - droppable
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)


def ran_out(error: Exception) -> bool:
    """Whether the exception means that the memory of the host or of a device is full."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
