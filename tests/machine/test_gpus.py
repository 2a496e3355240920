import pytest

from folio.machine.gpus import GPU, GPUS, data_sheet, find_gpu


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
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", None),
    ],
)
def test_a_gpu_is_identified_by_its_full_name(name, tflops):
    """A part of the name was enough, so that an "L40" was identified as an "L4" and a "T400" as a "T4"."""
    gpu = data_sheet(name)
    assert (gpu and gpu.tflops) == tflops


@pytest.mark.parametrize(
    "text, name, memory",
    [
        ("rtx 4090", "RTX 4090", 24),
        ("RTX4090", "RTX 4090", 24),
        ("rtx-4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("h100", "H100", 80),
        ("H100 SXM", "H100", 80),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("h100-pcie", "H100 PCIe", 80),
        ("H100PCIe 80GB", "H100 PCIe", 80),
        ("A100 40GB", "A100", 40),
        ("NVIDIA A100-SXM4-40GB", "A100", 40),
        ("v100 16 gb", "V100", 16),
        ("Tesla T4", "T4", 16),
    ],
)
def test_common_spellings_of_a_gpu_are_understood(text, name, memory):
    """tools/plan.py only knew "RTX 4090", not "4090" or "RTX4090"."""
    assert find_gpu(text) == (name, GPUS[name]._replace(memory=memory))


@pytest.mark.parametrize("text", ["24GB", "24 gb", "24G"])
def test_a_memory_size_describes_any_card(text):
    assert find_gpu(text) == ("card with 24 GB", GPU(tflops=None, memory=24, watts=None))


@pytest.mark.parametrize(
    "text", ["", "rtx", "NVIDIA", "H1000", "100", "L40", "4090 laptop", "4090D", "A16", "GB", "cpu"]
)
def test_an_unlisted_gpu_is_not_identified_as_another(text):
    assert find_gpu(text) is None


def test_every_listed_gpu_is_identified_by_its_name():
    assert all(find_gpu(name) == (name, gpu) for name, gpu in GPUS.items())


def test_all_figures_are_positive():
    assert all(gpu.tflops > 0 and gpu.memory > 0 and gpu.watts != 0 for gpu in GPUS.values())
