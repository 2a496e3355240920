"""Weights as integers with scales, for decoding on a CPU: int8 with a scale per output, int4 with one per 32 inputs."""

import copy

import torch
from torch import Tensor, nn

from model import GPT

GROUP = 32  # inputs that share a scale in int4


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, int8 (O, I), and scales, float32 (O,): the weight is about codes * scales[:, None]."""
    scales = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from -8 to 7, int8 (O, I / 32, 32), and scales, bfloat16 (O, I / 32, 1). 32 must divide I.

    The largest weight of a group, with its sign, has the code -8, as in llama.cpp's Q4_0.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scales = (largest / -8).bfloat16()
    divisors = torch.where(scales == 0, 1, scales.float())
    return (groups / divisors).round().clamp(-8, 7).to(torch.int8), scales


def pack_int4(weight: Tensor) -> Tensor:
    """quantize_int4 as bytes, uint8 (O, I / 32 * 18).

    A group is its scale, 2 bytes, and the codes i and i + 16, plus 8, as the lower and the upper half of byte 2 + i.
    """
    codes, scales = quantize_int4(weight)
    low, high = (codes + 8).to(torch.uint8).split(GROUP // 2, dim=-1)
    return torch.cat([scales.view(torch.uint8), low | high << 4], dim=-1).flatten(1)


def round_trip(weight: Tensor, dtype: str) -> Tensor:
    """The weights, float32 (O, I), that are computed with instead of these in "int8" or "int4"."""
    if dtype == "int8":
        codes, scales = quantize_int8(weight)
        return codes * scales[:, None]
    inputs = weight.shape[1]
    codes, scales = quantize_int4(nn.functional.pad(weight, (0, -inputs % GROUP)))
    return (codes * scales.float()).flatten(1)[:, :inputs]


@torch.no_grad()
def quantized(model: GPT, dtype: str) -> GPT:
    """A copy of the model with the weights that are computed with in "int8" or "int4", in float32."""
    model = copy.deepcopy(model).float()
    for module in model.modules():
        if isinstance(module, nn.Linear):  # with the output matrix, which is the table of token embeddings
            module.weight.copy_(round_trip(module.weight, dtype))
    return model
