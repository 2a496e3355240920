"""What NVIDIA's data sheets say of its GPUs: for forecasts, and for the MFU of a run."""

import re
from typing import NamedTuple


class GPU(NamedTuple):
    """The figures of a data sheet."""

    tflops: float  # dense TFLOP/s in bfloat16, or float16, with float32 accumulation
    memory: int  # GB
    watts: int


GPUS = {
    "B200": GPU(2250.0, 180, 1000),
    "H200": GPU(989.4, 141, 700),
    "H100 PCIe": GPU(756.0, 80, 350),
    "H100 NVL": GPU(835.0, 94, 400),
    "H100": GPU(989.4, 80, 700),
    "A100": GPU(312.0, 80, 400),
    "L40S": GPU(362.0, 48, 350),
    "L4": GPU(121.0, 24, 72),
    "A10G": GPU(70.0, 24, 300),
    "RTX 4090": GPU(165.2, 24, 450),
    "RTX 3090": GPU(71.0, 24, 350),
    "V100": GPU(125.0, 32, 300),
    "T4": GPU(65.0, 16, 70),
}


def data_sheet(name: str) -> GPU | None:
    """The entry of GPUS for the driver's name of a device, such as "NVIDIA H100 80GB HBM3". None if it is not listed.

    Only words for socket and memory may follow the model's name: an "L40" is not an "L4", an "RTX 4090 Laptop GPU" is
    not an "RTX 4090", and a MIG slice of an H100 is not an H100.
    """
    model = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", name)
    for key in sorted(GPUS, key=len, reverse=True):  # "H100 PCIe" before "H100"
        if re.fullmatch(rf"{key}([ -](SXM\d?|PCIe|HBM\w*|\d+GB))*", model, re.IGNORECASE):
            return GPUS[key]
    return None
