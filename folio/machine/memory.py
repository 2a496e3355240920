"""Free memory of a device."""

from pathlib import Path

import torch

from folio import UserError

CGROUP = Path("/sys/fs/cgroup")
HEADROOM = 1.2  # factor for the memory of kernels and allocators (docs/use/scaling.md)


def format_bytes(n: float) -> str:
    return f"{n / 2**20:,.0f} MiB" if n < 2**30 else f"{n / 2**30:,.1f} GiB"


def require_free(required: int, what: str, remedy: str, available: int | None) -> None:
    """Raise UserError if `required` bytes are not available. what: a plural noun. available: None: unknown."""
    if available is not None and required > available:
        raise UserError(
            f"{what} take {format_bytes(required)}, and {format_bytes(available)} of memory is free: use {remedy}"
        )


def free(device: torch.device, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can still be allocated on the device; None if unknown. cgroup: folder of a container's limits."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch's allocator
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    import psutil

    available = psutil.virtual_memory().available
    limit = cgroup / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():  # a container with a limit
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        file_cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        used = int((cgroup / "memory.current").read_text()) - file_cache
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)


def ran_out(error: Exception) -> bool:
    """Whether an exception means that the host or a device is out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
