"""Compiled matrix products, against torch's in float64."""

import ctypes
import random

import pytest
import torch

from folio.decoding.cpu_decoder import DECODE_STEP
from folio.decoding.quantize import pack_int4, quantize_int8, round_trip
from folio.machine import compiled
from tests.support.tolerances import rounding_error

PORTABLE = ("float32", "bfloat16", "int8", "int4")
HAS_PAIRS = compiled.cpu_features().get("avx512bf16", False)


def native(name: str, format: str):
    """A compiled function, as a Python callable."""
    count = {"linear": 9, "mix": 9, "widen": 3}[name]
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)
    return kind(compiled.address(DECODE_STEP, name, format))


def stored(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored weights, and their values in float64, without the scales of int8."""
    if format == "int8":
        codes, _ = quantize_int8(weight)
        return codes, codes.double()
    if format == "int4":
        return pack_int4(weight), round_trip(weight, "int4").double()
    weight = weight.to(torch.bfloat16 if format.startswith("bfloat16") else torch.float32)
    return weight.contiguous(), weight.double()


@pytest.mark.parametrize("format", [*PORTABLE, *["bfloat16 pairs"] * HAS_PAIRS])
def test_products_of_matrices(format, seed):
    """y = x w^T for 1 to 9 rows and any number of outputs. Nothing else is written.

    Each sum is bitwise identical for any number of rows.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    linear, group = native("linear", format), 32 if format in ("int4", "bfloat16 pairs") else 16
    for rows in range(1, 10):
        n, outputs = group * rng.randint(1, 9), rng.randint(1, 23)
        weight, numbers = stored(torch.randn(outputs, n), format)
        x = torch.randn(rows, n).to(torch.bfloat16 if format == "bfloat16 pairs" else torch.float32)
        y = torch.full((rows + 1, outputs + 3), 7.0)
        w = weight.data_ptr(), weight.shape[1] * weight.itemsize
        linear(*w, x.data_ptr(), n * x.itemsize, rows, n, y.data_ptr(), 4 * (outputs + 3), outputs)
        assert_product(y, x, numbers.T)
        for row in range(rows):
            single = torch.zeros(outputs)
            linear(*w, x[row].data_ptr(), 0, 1, n, single.data_ptr(), 0, outputs)
            assert torch.equal(single, y[row, :outputs])


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_weighted_sums_of_rows(format, seed):
    """y = x w for 1 to 9 rows of x."""
    rng, mix = random.Random(seed), native("mix", format)
    torch.manual_seed(seed)
    for rows in range(1, 10):
        n, columns = rng.randint(0, 40), 16 * rng.randint(1, 9)
        weight, numbers = stored(torch.randn(n, columns), format)
        x, y = torch.randn(rows, n), torch.full((rows + 1, columns + 3), 7.0)
        stride = columns * weight.itemsize
        mix(x.data_ptr(), 4 * n, rows, n, weight.data_ptr(), stride, y.data_ptr(), 4 * (columns + 3), columns)
        assert_product(y, x, numbers)


def assert_product(y: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
    """Assert that y begins with x @ numbers, and that 7 was not overwritten in the row and the columns after it."""
    (rows, n), columns = x.shape, numbers.shape[1]
    error = rounding_error(n + 1) * (x.double().abs() @ numbers.abs())
    assert ((y[:rows, :columns] - x.double() @ numbers).abs() <= error).all()
    assert (y[rows] == 7).all() and (y[:, columns:] == 7).all()


@pytest.mark.parametrize("format", PORTABLE)
def test_widened_weights(format, seed):
    torch.manual_seed(seed)
    weight, numbers = stored(torch.randn(1, 96), format)
    y = torch.full((97,), 7.0)
    native("widen", format)(weight.data_ptr(), 96, y.data_ptr())
    assert torch.equal(y[:96], numbers[0].float()) and y[96] == 7
