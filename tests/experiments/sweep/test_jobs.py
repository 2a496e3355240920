import os

import pytest

from folio import UserError
from folio.experiments.sweep.jobs import environments
from tests.support.simulated_gpu import SimulatedGPU


@pytest.mark.parametrize(
    ("jobs", "visible", "expected"),
    [
        (None, None, ["0", "1", "2"]),  # one run for each GPU
        (2, None, ["0", "1"]),
        (None, "5,7,6", ["5", "7", "6"]),
    ],
)
def test_each_run_has_its_own_gpu(jobs, visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with SimulatedGPU(device_count=3):
        assert environments(jobs, "auto") == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in expected]
        with pytest.raises(UserError, match=r"jobs=4.* 3$"):
            environments(4, "auto")


def test_runs_on_a_cpu_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    assert environments(3, "cpu") == [{"OMP_NUM_THREADS": "2"}] * 3
