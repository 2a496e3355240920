"""Attention in training on a CPU, by the compiled functions of causal_attention.py.

Dimensions: B batch, H heads, T time, D head size.
"""

import numpy as np
import torch
from torch import Tensor

from folio.machine import compiled
from folio.machine.attention_arguments import ARGUMENTS, BLOCK, scratch_bytes
from folio.machine.compiled import CompiledModule

CAUSAL_ATTENTION = CompiledModule(
    "folio.machine.causal_attention",
    imports=("folio.machine.attention_arguments", "folio.machine.elementary", "folio.machine.simd"),
)


def is_available() -> bool:
    """Whether this machine can compile and run it, which needs AVX-512 BF16."""
    return torch.cpu._is_avx512_bf16_supported() and not compiled.why_unavailable(CAUSAL_ATTENTION, "forward")


def can_compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether CompiledFunction supports these queries, keys and values, (B, H, T, D) each, and this mask."""
    H, T, D = q.shape[1:]
    is_one_mask = mask is None or (mask.shape == (1, H, T, T) and mask.dtype == torch.float32 and mask.is_contiguous())
    has_dtype = q.dtype == k.dtype == v.dtype == torch.bfloat16
    return has_dtype and q.shape == k.shape == v.shape and T % BLOCK == D % BLOCK == 0 and is_one_mask


class CompiledFunction(torch.autograd.Function):
    """dropout(softmax(q k^T / sqrt(D) + mask)) v for one mask of all sequences; None: the causal one.

    first_keys: the first key that each query attends to, (B, T); None: 0.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropped: int,
        seed: int,
        first_keys: Tensor | None = None,
    ) -> Tensor:
        B, H, T, D = q.shape
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        y = q.new_empty(B, T, H, D).transpose(1, 2)  # the layout of the next matmul's input
        weights = q.new_empty(B, H, T, T)
        call("forward", q, k, v, y, weights, mask, (), dropped, seed, first_keys)
        ctx.save_for_backward(q, k, v, weights)
        ctx.dropped, ctx.mask_shape = dropped, mask.shape if mask is not None and mask.requires_grad else None
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        gradients = q.new_empty(3, *q.shape).unbind()
        grad_mask = None if ctx.mask_shape is None else torch.zeros(ctx.mask_shape)
        call("backward", q, k, v, grad, weights, grad_mask, gradients, ctx.dropped, 0)
        return *gradients, grad_mask, None, None, None


def call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    gradients: tuple[Tensor, ...],
    dropped: int,
    seed: int,
    first_keys: Tensor | None = None,
) -> None:
    """Call a function of causal_attention.py. y: in the backward pass, its gradient."""
    B, H, T, D = q.shape
    scratch = torch.empty(scratch_bytes(T, D), dtype=torch.uint8)
    values = {"B": B, "H": H, "T": T, "D": D, "weights": weights.data_ptr(), "dropped": dropped, "seed": seed}
    for name, x in zip("qkvy", (q, k, v, y), strict=True):
        names = (f"{name}{dimension}" for dimension in ("", "_batch", "_head", "_row"))
        strides = (stride * x.itemsize for stride in x.stride()[:3])
        values |= zip(names, (x.data_ptr(), *strides), strict=True)
    values |= {"scratch": scratch.data_ptr()}
    for name, x in (("mask", mask), ("first_keys", first_keys)):
        values[name] = 0 if x is None else x.data_ptr()
    values |= {f"grad_{name}": x.data_ptr() for name, x in zip("qkv", gradients, strict=False)}
    arguments = np.array(tuple(values.get(name, 0) for name in ARGUMENTS.names), dtype=ARGUMENTS)
    compiled.function(CAUSAL_ATTENTION, function)(arguments.ctypes.data)
