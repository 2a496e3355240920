"""NVIDIA's data sheets, for forecasts and for the MFU of a run."""

import re
from typing import NamedTuple


class GPU(NamedTuple):
    """Figures from a data sheet; None where unknown."""

    tflops: float | None  # dense TFLOP/s in bfloat16, or float16, with float32 accumulation
    memory: int  # GB
    watts: int | None


TYPICAL_MFU = 0.4  # model FLOPs utilization, where no step was measured
GPUS = {
    "B300": GPU(2250.0, 288, None),
    "GB200": GPU(2500.0, 186, 1200),
    "B200": GPU(2250.0, 180, 1000),
    "GH200": GPU(989.4, 96, None),
    "H200 NVL": GPU(835.5, 141, 600),
    "H200": GPU(989.4, 141, 700),
    "H100 PCIe": GPU(756.0, 80, 350),
    "H100 NVL": GPU(835.0, 94, 400),
    "H100": GPU(989.4, 80, 700),
    "A100": GPU(312.0, 80, 400),
    "L40S": GPU(362.0, 48, 350),
    "L4": GPU(121.0, 24, 72),
    "A40": GPU(149.7, 48, 300),
    "A10G": GPU(70.0, 24, 300),
    "A10": GPU(125.0, 24, 150),
    "RTX 6000 Ada": GPU(364.2, 48, 300),
    "RTX A6000": GPU(154.8, 48, 300),
    "RTX 5090": GPU(209.5, 32, 575),
    "RTX 4090": GPU(165.2, 24, 450),
    "RTX 3090 Ti": GPU(80.0, 24, 450),
    "RTX 3090": GPU(71.0, 24, 350),
    "RTX 3080 Ti": GPU(68.2, 12, 350),
    "RTX 3080": GPU(59.5, 10, 320),
    "RTX 3070 Ti": GPU(43.5, 8, 290),
    "RTX 3070": GPU(40.6, 8, 220),
    "RTX 3060 Ti": GPU(32.4, 8, 200),
    "RTX 3060": GPU(25.5, 12, 170),
    "V100": GPU(125.0, 32, 300),
    "T4": GPU(65.0, 16, 70),
}


def data_sheet(name: str) -> GPU | None:
    """The entry of GPUS for a device name from the driver, such as "NVIDIA H100 80GB HBM3"; None if it is not listed.

    Only a form factor and a memory size may follow the model name: an "L40" is not an "L4", an "RTX 4090 Laptop GPU" is
    not an "RTX 4090", and a MIG slice of an H100 is not an H100.
    """
    model = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", name)
    for key in sorted(GPUS, key=len, reverse=True):  # "H100 PCIe" before "H100"
        if re.fullmatch(rf"{key}([ -](SXM\d?|AC|PCIe|HBM\w*|\d+GB|Generation))*", model, re.IGNORECASE):
            return GPUS[key]
    return None


def find_gpu(text: str) -> tuple[str, GPU] | None:
    """The name and entry of a GPU that a user typed: "4090", "rtx-4090", "NVIDIA H100", "h100pcie", or "24GB" for any
    card with that much memory. None if it is not listed.

    Ignores case, spaces and vendor prefixes; otherwise the full name must match, as in `data_sheet`. A size after the
    name is the memory, as in "A100 40GB".
    """
    size = re.search(r"\b(\d+) ?GB?\b", text, re.IGNORECASE)
    model = _normalize(text.replace(size[0], "") if size else text)
    if size and not model:
        return f"card with {size[1]} GB", GPU(None, int(size[1]), None)
    for name, gpu in GPUS.items():
        if _normalize(name) == model or data_sheet(text) is gpu:
            return name, gpu._replace(memory=int(size[1])) if size else gpu
    return None


def _normalize(name: str) -> str:
    """A GPU's name without vendor prefixes, in lowercase letters and digits only."""
    return re.sub(r"nvidia|tesla|geforce|rtx|[^a-z0-9]", "", name.lower())
