from folio.machine.gpus import GPU, GPUS, data_sheet, find_gpu

NAMES = {  # as drivers report them
    "H100": ["NVIDIA H100 80GB HBM3"],
    "H100 PCIe": ["NVIDIA H100 PCIe"],
    "H100 NVL": ["NVIDIA H100 NVL"],
    "H200": ["NVIDIA H200"],
    "H200 NVL": ["NVIDIA H200 NVL"],
    "GH200": ["NVIDIA GH200 480GB"],
    "B300": ["NVIDIA B300 SXM6 AC"],
    "A100": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"],
    "A10G": ["NVIDIA A10G"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "RTX A6000": ["NVIDIA RTX A6000"],
    "RTX 3080 Ti": ["NVIDIA GeForce RTX 3080 Ti"],
    "T4": ["Tesla T4"],
}
UNLISTED = ["NVIDIA L40", "NVIDIA T400 4GB", "NVIDIA A1000", "NVIDIA GeForce RTX 4090 Laptop GPU"]
UNLISTED += ["NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
SPELLINGS = {  # card and memory -> what people type
    ("RTX 4090", 24): ["rtx 4090", "RTX4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090"],
    ("H100", 80): ["h100", "H100 SXM", "NVIDIA H100 80GB HBM3"],
    ("H100 PCIe", 80): ["h100-pcie", "H100PCIe 80GB"],
    ("A100", 40): ["A100 40GB", "NVIDIA A100-SXM4-40GB"],
    ("V100", 16): ["v100 16 gb", "Tesla V100-SXM2-16GB"],
    ("T4", 16): ["Tesla T4"],
}


def test_a_gpu_is_identified_by_its_full_name():
    """A part of the name was enough, so that an "L40" was identified as an "L4" and a "T400" as a "T4"."""
    for card, names in NAMES.items():
        assert [data_sheet(name) for name in names] == [GPUS[card]] * len(names)
    assert [data_sheet(name) for name in UNLISTED] == [None] * len(UNLISTED)


def test_common_spellings_of_a_gpu_are_understood():
    """tools/plan.py only knew "RTX 4090", not "4090" or "RTX4090"."""
    for (card, memory), texts in SPELLINGS.items():
        for text in texts:
            assert find_gpu(text) == (card, GPUS[card]._replace(memory=memory)), text
    for text in ("24GB", "24 gb", "24G"):
        assert find_gpu(text) == ("card with 24 GB", GPU(tflops=None, memory=24, watts=None)), text
    for text in ("", "rtx", "NVIDIA", "H1000", "100", "L40", "4090 laptop", "4090D", "A16", "GB", "cpu"):
        assert find_gpu(text) is None, text


def test_every_listed_gpu_is_identified_by_its_name_and_has_figures():
    for name, gpu in GPUS.items():
        assert find_gpu(name) == (name, gpu) and data_sheet(name) is gpu
        assert gpu.tflops > 0 and gpu.memory > 0 and gpu.watts != 0
