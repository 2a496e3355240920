import pytest

from folio.gpus import GPUS, data_sheet


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_gpu_is_identified_by_its_full_name(name, tflops):
    """The table was searched for any part of the name, so an "L40" was taken for an "L4" and a "T400" for a "T4"."""
    gpu = data_sheet(name)
    assert (gpu and gpu.tflops) == tflops


def test_all_figures_are_positive():
    assert all(gpu.tflops > 0 and gpu.memory > 0 and gpu.watts > 0 for gpu in GPUS.values())
