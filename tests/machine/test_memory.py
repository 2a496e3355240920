import torch

from folio.machine import memory
from tests.support.simulated_gpu import SimulatedGPU


def test_a_containers_file_cache_counts_as_free(tmp_path):
    """It counted as used, so that after reading large files no model seemed to fit into memory."""
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 600\nactive_file 300\n")  # active: read twice
    assert memory.free(torch.device("cpu"), tmp_path) == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert 2**20 < memory.free(torch.device("cpu"), tmp_path) < 2**45
    assert 2**20 < memory.free(torch.device("cpu")) < 2**45


def test_memory_cached_by_torch_on_a_gpu_counts_as_free():
    """It counted as used, so that after a model was deleted, another one of its size did not seem to fit."""
    with SimulatedGPU(mem_get_info=(100, 1000), memory_reserved=700, memory_allocated=50):
        assert memory.free(torch.device("cuda")) == 750
