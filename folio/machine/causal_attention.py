"""Causal attention in training, for a CPU with AVX-512 BF16, compiled by numba.

torch's matmuls also compute the scores of later keys, and its softmax reads and writes all scores several times. Here,
the scores of 16 queries are computed up to the last key that they attend to, and stay in the first-level cache until
they are weights. An instruction adds the products of two bfloat16 pairs to each of 16 sums; matrices are therefore
packed in pairs along the dimension that is summed over.

An address is an int64, a stride is in bytes, and T and D are multiples of 16.

Dimensions: B batch, H heads, T time, D head size.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from folio.machine.attention_arguments import ARGUMENTS, BLOCK
from folio.machine.elementary import LN_2_HIGH, LN_2_LOW, LOG2_E, MIN_EXPONENT, TAYLOR
from folio.machine.simd import (
    FLOAT,
    FORMATS,
    INT16,
    INT32,
    INT64,
    LANES,
    BFloat,
    add_lanes,
    broadcast,
    call,
    compiled,
    constant,
    floats,
    integers,
    integers_32,
    load,
    make_array_at,
    make_mixing_tile,
    multiply_add,
    reduce_lanes,
    square_root,
    vector,
    widen_bfloat16,
)

ROWS = 8  # of a tile; 8 rows by 2 vectors are 16 sums, in registers
tile_1, tile_2 = (make_mixing_tile(FORMATS["bfloat16 pairs"], ROWS, vectors) for vectors in (1, 2))
SOFTMAX_ROWS = 4  # that are computed together, because rows are short
MASKED = np.float32(-np.inf)

arguments_at = make_array_at(ARGUMENTS)


def step(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, bytes: int) -> ir.Value:
    return builder.add(base, builder.mul(index, ir.Constant(INT64, bytes)))


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def narrow(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Round float32 to bfloat16."""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BFloat()), x)
    return builder.bitcast(rounded, vector(INT16))


@intrinsic
def interleave(context, x, y, count, pairs):
    """pairs[i] = (x[i], y[i]) for `count` bfloat16, a multiple of 16."""

    def generate(context, builder, signature, arguments):
        x, y, count, pairs = arguments
        order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(INT64, LANES))) as loop:
            first, second = (load(builder, step(builder, row, loop.index, 32), vector(INT16)) for row in (x, y))
            both = builder.shuffle_vector(first, second, ir.Constant(vector(INT32, 2 * LANES), order))
            store(builder, both, step(builder, pairs, loop.index, 64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def narrow_all(context, x, count, factor, y):
    """y = factor x in bfloat16, for `count` float32, a multiple of 16."""

    def generate(context, builder, signature, arguments):
        x, count, factor, y = arguments
        factors = broadcast(builder, factor)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(INT64, LANES))) as loop:
            values = builder.fmul(load(builder, step(builder, x, loop.index, 64), vector(FLOAT)), factors)
            store(builder, narrow(builder, values), step(builder, y, loop.index, 32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """elementary.exp in every lane."""

    def unary(name: str, value: ir.Value) -> ir.Value:
        return call(builder, f"llvm.{name}.v{LANES}f32", vector(FLOAT), value)

    is_small = builder.fcmp_ordered("<", x, constant(FLOAT, MIN_EXPONENT))
    x = builder.select(is_small, constant(FLOAT, MIN_EXPONENT), x)
    n = unary("rint", builder.fmul(x, constant(FLOAT, LOG2_E)))
    for part in (LN_2_HIGH, LN_2_LOW):
        x = multiply_add(builder, n, constant(FLOAT, -part), x)
    total = constant(FLOAT, TAYLOR[-1])
    for coefficient in TAYLOR[-2::-1]:
        total = multiply_add(builder, total, x, constant(FLOAT, coefficient))
    exponent = builder.add(builder.fptosi(n, vector(INT32)), constant(INT32, 127))
    power = builder.bitcast(builder.shl(exponent, constant(INT32, 23)), vector(FLOAT))
    return builder.select(is_small, constant(FLOAT, 0.0), builder.fmul(total, power))


@intrinsic
def exp_rows(context, x, row, count, scale, totals):
    """Compute e^((x - max(x)) scale) in each of SOFTMAX_ROWS rows of `count` float32, a multiple of 16, in place.

    totals: the sum of each row, float32.
    """

    def generate(context, builder, signature, arguments):
        x, row, count, scale, totals = arguments

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        steps, scales = builder.udiv(count, ir.Constant(INT64, LANES)), broadcast(builder, scale)
        rows = [builder.add(x, builder.mul(row, ir.Constant(INT64, r))) for r in range(SOFTMAX_ROWS)]
        largest = [cgutils.alloca_once_value(builder, constant(FLOAT, -math.inf)) for _ in rows]
        sums = [cgutils.alloca_once_value(builder, constant(FLOAT, 0.0)) for _ in rows]
        with cgutils.for_range(builder, steps) as loop:
            for address, maximum in zip(rows, largest, strict=True):
                values = load(builder, step(builder, address, loop.index, 64), vector(FLOAT))
                builder.store(larger(values, builder.load(maximum)), maximum)
        shifts = [broadcast(builder, reduce_lanes(builder, builder.load(maximum), larger)) for maximum in largest]
        with cgutils.for_range(builder, steps) as loop:
            for address, shift, total in zip(rows, shifts, sums, strict=True):
                at = step(builder, address, loop.index, 64)
                e = emit_exp(builder, builder.fmul(builder.fsub(load(builder, at, vector(FLOAT)), shift), scales))
                store(builder, e, at)
                builder.store(builder.fadd(builder.load(total), e), total)
        for r, total in enumerate(sums):
            store(builder, add_lanes(builder, builder.load(total)), builder.add(totals, ir.Constant(INT64, 4 * r)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def keep_positive(context, x, count, factor, y):
    """y = factor max(x, 0) for `count` bfloat16, a multiple of 16."""

    def generate(context, builder, signature, arguments):
        x, count, factor, y = arguments
        factors = broadcast(builder, factor)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(INT64, LANES))) as loop:
            values = widen_bfloat16(builder, load(builder, step(builder, x, loop.index, 32), vector(INT16)))
            is_positive = builder.fcmp_ordered(">", values, constant(FLOAT, 0.0))
            kept = builder.select(is_positive, builder.fmul(values, factors), constant(FLOAT, 0.0))
            store(builder, narrow(builder, kept), step(builder, y, loop.index, 32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def softmax_gradient(context, weights, grad, count, factor, result):
    """grad = |weights| (g - the sum of |weights| g), which is also stored in bfloat16 in `result`.

    g = factor grad, and 0 where weights were dropped, which are negative. weights: `count` bfloat16, a multiple of 16.
    grad: float32.
    """

    def generate(context, builder, signature, arguments):
        weights, grad, count, factor, result = arguments
        factors, zeros = broadcast(builder, factor), constant(FLOAT, 0.0)
        steps, total = builder.udiv(count, ir.Constant(INT64, LANES)), cgutils.alloca_once_value(builder, zeros)

        def load_both(index: ir.Value) -> tuple[ir.Value, ir.Value]:
            w = widen_bfloat16(builder, load(builder, step(builder, weights, index, 32), vector(INT16)))
            g = builder.fmul(load(builder, step(builder, grad, index, 64), vector(FLOAT)), factors)
            g = builder.select(builder.fcmp_ordered("<", w, zeros), zeros, g)
            return call(builder, f"llvm.fabs.v{LANES}f32", vector(FLOAT), w), g

        with cgutils.for_range(builder, steps) as loop:
            builder.store(multiply_add(builder, *load_both(loop.index), builder.load(total)), total)
        mean = broadcast(builder, add_lanes(builder, builder.load(total)))
        with cgutils.for_range(builder, steps) as loop:
            w, g = load_both(loop.index)
            values = builder.fmul(w, builder.fsub(g, mean))
            store(builder, values, step(builder, grad, loop.index, 64))
            store(builder, narrow(builder, values), step(builder, result, loop.index, 32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate


@compiled
def multiply(a, a_pair, a_row, b, b_pair, pairs, c, c_row, columns):
    """c = a b with BLOCK rows, by tiles, with the arguments of make_mixing_tile. columns: a multiple of 16."""
    for r in range(0, BLOCK, ROWS):
        a_r, c_r, n = a + r * a_row, c + r * c_row, 0
        while n + 2 * LANES <= columns:
            tile_2(a_r, a_pair, a_row, b + 4 * n, b_pair, pairs, c_r + 4 * n, c_row)
            n += 2 * LANES
        if n < columns:
            tile_1(a_r, a_pair, a_row, b + 4 * n, b_pair, pairs, c_r + 4 * n, c_row)
    return 0


@compiled
def pack_rows(x, x_row, T, D, packed):
    """packed (T / 2, D, 2): pairs of consecutive rows of x (T, D)."""
    for t in range(0, T, 2):
        interleave(x + t * x_row, x + (t + 1) * x_row, D, packed + t * D * 2)
    return 0


@compiled
def pack_columns(x, x_row, T, D, packed):
    """packed (D / 2, T, 2): pairs of consecutive columns of x (T, D)."""
    pairs = integers_32(packed, D // 2 * T)
    for t in range(T):
        row = integers_32(x + t * x_row, D // 2)
        for d in range(D // 2):
            pairs[d * T + t] = row[d]
    return 0


@compiled
def mix(x):
    """A hash of 32 bits (Wellons 2018, "lowbias32")."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def mark_dropped(x, count, seed, threshold):
    """Negate each of `count` numbers with probability threshold / 2^32."""
    for i in range(count):
        x[i] = -x[i] if mix(np.uint32(seed + np.uint32(i))) < threshold else x[i]
    return 0


@compiled
def inverse(x):
    return np.float32(1) / x


@compiled
def hide(x, count):
    for i in range(count):
        x[i] = MASKED
    return 0


@compiled
def add_mask(x, mask, count, scale):
    for i in range(count):
        x[i] = x[i] * scale + mask[i]
    return 0


@compiled
def add_all(x, y, count):
    for i in range(count):
        y[i] += x[i]
    return 0


@compiled
def forward(arguments):
    """Compute y and the weights. See ARGUMENTS. Weights in later blocks of keys are not written."""
    a = arguments_at(arguments, 1)[0]
    B, H, T, D = a.B, a.H, a.T, a.D
    scale, dropped = inverse(square_root(np.float32(D))), np.uint32(a.dropped)
    keep = np.float32(1 / (1 - a.dropped / 2**32))
    keys = a.scratch
    values = keys + 2 * T * D
    kept = values + 2 * T * D
    scores = kept + 2 * BLOCK * T
    totals = scores + 4 * BLOCK * max(T, D)
    row_scale = np.float32(1) if a.mask else scale
    for b in range(B):
        for h in range(H):
            q = a.q + b * a.q_batch + h * a.q_head
            y = a.y + b * a.y_batch + h * a.y_head
            weights = a.weights + (b * H + h) * T * T * 2
            pack_columns(a.k + b * a.k_batch + h * a.k_head, a.k_row, T, D, keys)
            pack_rows(a.v + b * a.v_batch + h * a.v_head, a.v_row, T, D, values)
            for i in range(0, T, BLOCK):
                end, block = i + BLOCK, weights + i * T * 2
                multiply(q + i * a.q_row, 4, a.q_row, keys, 4 * T, D // 2, scores, 4 * T, end)
                for r in range(BLOCK):
                    row = floats(scores + r * T * 4, T)
                    if a.mask:
                        add_mask(row, floats(a.mask + ((h * T + i + r) * T) * 4, T), i + r + 1, scale)
                    for j in range(i + r + 1, end):
                        row[j] = MASKED
                    if a.first_keys:
                        hide(row, integers(a.first_keys + (b * T + i + r) * 8, 1)[0])
                for r in range(0, BLOCK, SOFTMAX_ROWS):
                    exp_rows(scores + r * T * 4, T * 4, end, row_scale, totals + 4 * r)
                for r in range(BLOCK):
                    if dropped:
                        row = floats(scores + r * T * 4, T)
                        mark_dropped(row, end, mix(np.uint32(a.seed + (b * H + h) * T + i + r)), dropped)
                    narrow_all(scores + r * T * 4, end, inverse(floats(totals, BLOCK)[r]), block + r * T * 2)
                    if dropped:
                        keep_positive(block + r * T * 2, end, keep, kept + r * T * 2)
                multiply(kept if dropped else block, 4, T * 2, values, 4 * D, end // 2, scores, 4 * D, D)
                for r in range(BLOCK):
                    narrow_all(scores + r * D * 4, D, np.float32(1), y + (i + r) * a.y_row)
    return 0


@compiled
def backward(arguments):
    """Compute the gradients with respect to q, k, v and, if there is one, the mask. See ARGUMENTS."""
    a = arguments_at(arguments, 1)[0]
    B, H, T, D = a.B, a.H, a.T, a.D
    scale, dropped = inverse(square_root(np.float32(D))), np.uint32(a.dropped)
    keep = np.float32(1 / (1 - a.dropped / 2**32))
    values = a.scratch
    keys = values + 2 * T * D
    queries = keys + 2 * T * D
    grads = queries + 2 * T * D
    weight_pairs = grads + 2 * T * D
    score_pairs = weight_pairs + 2 * T * T
    score_grads = score_pairs + 2 * T * T
    kept = score_grads + 2 * BLOCK * T
    scores = kept + 2 * BLOCK * T
    for b in range(B):
        for h in range(H):
            q = a.q + b * a.q_batch + h * a.q_head
            grad = a.y + b * a.y_batch + h * a.y_head
            weights, offset = a.weights + (b * H + h) * T * T * 2, (b * H + h) * T * D * 2
            pack_columns(a.v + b * a.v_batch + h * a.v_head, a.v_row, T, D, values)
            pack_rows(a.k + b * a.k_batch + h * a.k_head, a.k_row, T, D, keys)
            pack_rows(q, a.q_row, T, D, queries)
            pack_rows(grad, a.y_row, T, D, grads)
            for i in range(0, T, BLOCK):
                end, block = i + BLOCK, weights + i * T * 2
                multiply(grad + i * a.y_row, 4, a.y_row, values, 4 * T, D // 2, scores, 4 * T, end)
                for r in range(BLOCK):
                    row = scores + r * T * 4
                    softmax_gradient(block + r * T * 2, row, end, keep, score_grads + r * T * 2)
                    if a.mask:
                        add_all(floats(row, end), floats(a.mask + ((h * T + i + r) * T) * 4, end), i + r + 1)
                    if dropped:
                        keep_positive(block + r * T * 2, end, keep, kept + r * T * 2)
                used = kept if dropped else block
                for r in range(0, BLOCK, 2):
                    row, pairs = r * T * 2, (i + r) * T * 2
                    interleave(used + row, used + row + T * 2, end, weight_pairs + pairs)
                    interleave(score_grads + row, score_grads + row + T * 2, end, score_pairs + pairs)
                multiply(score_grads, 4, T * 2, keys, 4 * D, end // 2, scores, 4 * D, D)
                narrow_all(scores, BLOCK * D, scale, a.grad_q + offset + i * D * 2)
            for j in range(0, T, BLOCK):  # keys, from the queries j, j + 1, ...
                pairs, first, row = (T - j) // 2, j * T * 2 + j * 4, j * D * 2
                multiply(score_pairs + first, 4 * T, 4, queries + row, 4 * D, pairs, scores, 4 * D, D)
                narrow_all(scores, BLOCK * D, scale, a.grad_k + offset + row)
                multiply(weight_pairs + first, 4 * T, 4, grads + row, 4 * D, pairs, scores, 4 * D, D)
                narrow_all(scores, BLOCK * D, np.float32(1), a.grad_v + offset + row)
    return 0
