"""Exponentials and maxima in float32, compiled by numba and vectorized in loops."""

import math

import numpy as np
from numba import njit

from folio.machine.simd import OPTIONS, compiled, fused, power_of_two, round_to_integer

# Sums may be reordered, so that they are vectorized.
compiled_sums = njit(**OPTIONS, fastmath={"reassoc", "contract"})
compiled_max = njit(**OPTIONS, fastmath={"nnan", "nsz"})  # NaN is reported after the prefill
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
MIN_EXPONENT, MAX_EXPONENT = np.float32(-87.3), np.float32(88.0)
TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in range(8))


def make_polynomial(coefficients: tuple[np.float32, ...]):
    """polynomial(x): the sum of coefficients[n] x^n by Horner's rule, as one expression, which is vectorized."""
    body = f"c{len(coefficients) - 1}"
    for n in range(len(coefficients) - 2, -1, -1):
        body = f"fused({body}, x, c{n})"
    names = {f"c{n}": c for n, c in enumerate(coefficients)}
    return compiled(eval(f"lambda x: {body}", {"fused": fused, **names}))


taylor = make_polynomial(TAYLOR)


@compiled
def exp(x):
    """e^x in float32, for x up to 88: 2^n e^r with |r| <= ln(2) / 2. 0 below -87.3."""
    n = round_to_integer(max(x, MIN_EXPONENT) * LOG2_E)
    r = fused(n, -LN_2_LOW, fused(n, -LN_2_HIGH, max(x, MIN_EXPONENT)))
    return np.float32(0) if x < MIN_EXPONENT else taylor(r) * power_of_two(n)  # NaN stays NaN


@compiled_sums
def exp_all(x, count, shift, scale):
    """Compute e^((x - shift) scale) in place, and return the sum."""
    total = np.float32(0)
    for i in range(count):
        e = exp((x[i] - shift) * scale)
        x[i] = e
        total += e
    return total


@compiled_max
def maximum(x, count):
    largest = x[0]
    for i in range(count):
        largest = max(largest, x[i])
    return largest
