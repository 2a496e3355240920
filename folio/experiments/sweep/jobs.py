"""The resources of each concurrent run of a sweep: a GPU, or a share of the cores."""

import os

import torch

from folio import UserError
from folio.base.workers import cores


def environments(jobs: int | None, device: str) -> list[dict[str, str]]:
    """Return the environment variables of each job. Raises UserError.

    jobs: number of concurrent runs; None: one per GPU, or one. device: train.py's setting.
    """
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        if jobs and jobs > gpus:
            raise UserError(f"jobs={jobs}: each run needs its own GPU, and this machine has {gpus}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible[: jobs or gpus]]
    jobs = jobs or 1
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * jobs
    return [{"OMP_NUM_THREADS": str(max(1, cores() // jobs))}] * jobs
