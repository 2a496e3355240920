"""Operations that numba lacks, written as LLVM instructions: dot products of vectors, addresses, atomics.

They are called from code that numba compiles (folio/decoding/decode_step.py). An address is an int64.

Dimensions: R rows of activations, O outputs of a linear layer (rows of its weights), n inputs.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from folio.machine.compiled import GROUP, LANES

BIT, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
# Division by 0 gives infinity, without a check. Only compiled functions call these, so they need no wrappers.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compiled = njit(**OPTIONS)
HAS_AVX512 = llvm.get_host_cpu_features().get("avx512f", False)


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def constant(element: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(vector(element, lanes), [value] * lanes)


def broadcast(builder: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """The value in every lane."""
    undefined = ir.Constant(vector(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, constant(INT32, 0, lanes))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM function or intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a b + c in every lane."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", vector(FLOAT), a, b, c)


def widen_bfloat16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert bfloat16, the upper half of a float32, to float32."""
    shifted = builder.shl(builder.zext(bits, vector(INT32)), constant(INT32, 16))
    return builder.bitcast(shifted, vector(FLOAT))


# --- dot products -----------------------------------------------------------------------------------------------------
#
# A format defines how weights are stored. A step of a dot product loads the weights and activations of `inputs` inputs
# and adds their products to sums of 16 lanes.


class WeightFormat:
    """float32 weights and activations; the base class of the other formats."""

    outputs = 5  # per tile of several rows: 5 rows by 5 outputs are 25 sums, which leave 7 registers of AVX-512
    single_row_outputs = 1  # per tile of a single row; one output reads memory sequentially, which is fastest
    inputs = LANES  # per step
    weight_bytes, activation_bytes = 64, 64  # per step
    activation = vector(FLOAT)
    factor = FLOAT  # of a row of weights, in make_mixing_tile

    def weights(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """Load the weights of a step as one vector."""
        return load(builder, address, vector(FLOAT))

    def accumulate(self, builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        return multiply_add(builder, weights, activations, sums)


class BFloat16(WeightFormat):
    weight_bytes = 32

    def weights(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return widen_bfloat16(builder, load(builder, address, vector(INT16)))


class BFloat16Pairs(WeightFormat):
    """AVX-512 BF16: one instruction adds two products to each lane. The activations are also bfloat16."""

    inputs = 2 * LANES
    activation = vector(INT16, 2 * LANES)
    factor = INT32  # a pair

    def weights(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return load(builder, address, self.activation)

    def accumulate(self, builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        pairs = vector(BFloat(), 2 * LANES)
        a, b = builder.bitcast(weights, pairs), builder.bitcast(activations, pairs)
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vector(FLOAT), sums, a, b)


class Int8(WeightFormat):
    """int8 weights. The caller multiplies each sum by the scale of its row of weights."""

    single_row_outputs = 8  # several independent sums hide the latency of converting weights
    weight_bytes = 16

    def weights(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.sitofp(builder.sext(load(builder, address, vector(INT8)), vector(INT32)), vector(FLOAT))


class Int4(WeightFormat):
    """Groups of 32 weights: a bfloat16 scale and 16 bytes. Byte i holds weights i and i + 16, plus 8, in its halves."""

    outputs, single_row_outputs = 4, 8  # a step's weights take two registers
    inputs = GROUP
    weight_bytes, activation_bytes = 18, 128
    activation = vector(FLOAT, GROUP)

    def weights(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        scales = broadcast(builder, load(builder, address, INT16), 2 * LANES)  # in both halves of each lane
        pairs = builder.bitcast(scales, vector(INT32))
        scale = builder.bitcast(builder.shl(pairs, constant(INT32, 16)), vector(FLOAT))
        packed = load(builder, builder.add(address, ir.Constant(INT64, 2)), vector(INT8))
        low = builder.zext(packed, vector(INT32))
        high = builder.lshr(low, constant(INT32, 4))
        if HAS_AVX512:  # 16 floats in a register are a table, of which an instruction uses the lower 4 bits of an index
            numbers = ir.Constant(vector(FLOAT), [code - 8.0 for code in range(16)])
            table, look_up = builder.fmul(numbers, scale), "llvm.x86.avx512.permvar.sf.512"
            floats = [call(builder, look_up, vector(FLOAT), table, codes) for codes in (low, high)]
        else:
            floats = []
            for codes in (builder.and_(low, constant(INT32, 15)), high):
                number = builder.sitofp(builder.sub(codes, constant(INT32, 8)), vector(FLOAT))
                floats.append(builder.fmul(number, scale))
        return builder.shuffle_vector(*floats, ir.Constant(vector(INT32, GROUP), list(range(GROUP))))

    def accumulate(self, builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        for half in range(2):
            mask = ir.Constant(vector(INT32), [half * LANES + lane for lane in range(LANES)])
            w, x = (builder.shuffle_vector(v, v, mask) for v in (weights, activations))
            sums = multiply_add(builder, w, x, sums)
        return sums


FORMATS = {
    "float32": WeightFormat(),
    "bfloat16": BFloat16(),
    "bfloat16 pairs": BFloat16Pairs(),
    "int8": Int8(),
    "int4": Int4(),
}


def make_tile(format: WeightFormat, rows: int, outputs: int, prefetch: bool = True):
    """tile(w, w_stride, x, x_stride, n, y, y_stride, ahead): y[r, o] = sum of w[o, i] x[r, i] over n inputs.

    w, x, y, ahead are addresses, strides are in bytes, and y is float32. rows, outputs: the size of y. A sum has 16
    lanes, which are added at the end, so that it does not depend on the number of rows. prefetch: whether to prefetch
    the next weights, from `ahead`, into the second-level cache in memory order. Without it, tiles of several outputs
    read large matrices at half the speed.
    """

    @intrinsic
    def tile(context, w, w_stride, x, x_stride, n, y, y_stride, ahead):
        def generate(context, builder, signature, arguments):
            w, w_stride, x, x_stride, n, y, y_stride, ahead = arguments

            def at(base: ir.Value, stride: ir.Value, index: int) -> ir.Value:
                return builder.add(base, builder.mul(stride, ir.Constant(INT64, index)))

            weights = [at(w, w_stride, o) for o in range(outputs)]
            activations = [at(x, x_stride, r) for r in range(rows)]
            zeros = constant(FLOAT, 0.0)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(outputs)] for _ in range(rows)]
            with cgutils.for_range(builder, builder.udiv(n, ir.Constant(INT64, format.inputs))) as loop:
                w_offset = builder.mul(loop.index, ir.Constant(INT64, format.weight_bytes))
                x_offset = builder.mul(loop.index, ir.Constant(INT64, format.activation_bytes))
                first = builder.add(ahead, builder.mul(w_offset, ir.Constant(INT64, outputs)))
                for o in range(outputs if prefetch else 0):
                    emit_prefetch(builder, builder.add(first, ir.Constant(INT64, o * format.weight_bytes)))
                w_vectors = [format.weights(builder, builder.add(address, w_offset)) for address in weights]
                for r in range(rows):
                    x_vector = load(builder, builder.add(activations[r], x_offset), format.activation)
                    for o in range(outputs):
                        total = format.accumulate(builder, builder.load(sums[r][o]), w_vectors[o], x_vector)
                        builder.store(total, sums[r][o])
            for r in range(rows):
                for o in range(outputs):
                    total = add_lanes(builder, builder.load(sums[r][o]))
                    address = builder.add(at(y, y_stride, r), ir.Constant(INT64, 4 * o))
                    builder.store(total, builder.inttoptr(address, FLOAT.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


def make_mixing_tile(format: WeightFormat, rows: int, vectors: int):
    """tile(x, x_column, x_row, w, w_row, n, y, y_row): y[r, c] = sum of x[r, i] w[i, c] over n rows of w.

    rows: of x and y. vectors: of 16 columns each. x[r, i] is at x + r x_row + i x_column. x and y are float32, except
    that with pairs of bfloat16, x[r, i] and w[i, c] are pairs.
    """

    @intrinsic
    def tile(context, x, x_column, x_row, w, w_row, n, y, y_row):
        def generate(context, builder, signature, arguments):
            x, x_column, x_row, w, w_row, n, y, y_row = arguments

            def at(base: ir.Value, stride: ir.Value, index: int) -> ir.Value:
                return builder.add(base, builder.mul(stride, ir.Constant(INT64, index)))

            zeros, x_rows = constant(FLOAT, 0.0), [at(x, x_row, r) for r in range(rows)]
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(rows)]
            with cgutils.for_range(builder, n) as loop:
                w_i = builder.add(w, builder.mul(w_row, loop.index))
                x_offset = builder.mul(x_column, loop.index)
                w_vectors = [
                    format.weights(builder, builder.add(w_i, ir.Constant(INT64, v * format.weight_bytes)))
                    for v in range(vectors)
                ]
                for r in range(rows):
                    factor = broadcast(builder, load(builder, builder.add(x_rows[r], x_offset), format.factor))
                    for v in range(vectors):
                        total = format.accumulate(builder, builder.load(sums[r][v]), w_vectors[v], factor)
                        builder.store(total, sums[r][v])
            for r in range(rows):
                for v in range(vectors):
                    address = builder.add(at(y, y_row, r), ir.Constant(INT64, 4 * LANES * v))
                    total = builder.load(sums[r][v])
                    builder.store(total, builder.inttoptr(address, total.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


def make_mix(format: WeightFormat):
    """mix(x, x_stride, rows, n, w, w_stride, y, y_stride, columns): y = x w, with the arguments of make_mixing_tile.
    columns: a multiple of 16.
    """
    tile_4x4, tile_4x1 = make_mixing_tile(format, 4, 4), make_mixing_tile(format, 4, 1)
    tile_1x4, tile_1x1 = make_mixing_tile(format, 1, 4), make_mixing_tile(format, 1, 1)
    column_bytes = format.weight_bytes // LANES

    @compiled
    def mix(x, x_stride, rows, n, w, w_stride, y, y_stride, columns):
        c = 0
        while c < columns:
            w_c, r = w + c * column_bytes, 0
            wide = c + 4 * LANES <= columns
            while r + 4 <= rows:
                x_r, y_r = x + r * x_stride, y + r * y_stride + 4 * c
                if wide:
                    tile_4x4(x_r, 4, x_stride, w_c, w_stride, n, y_r, y_stride)
                else:
                    tile_4x1(x_r, 4, x_stride, w_c, w_stride, n, y_r, y_stride)
                r += 4
            while r < rows:
                x_r, y_r = x + r * x_stride, y + r * y_stride + 4 * c
                if wide:
                    tile_1x4(x_r, 4, x_stride, w_c, w_stride, n, y_r, y_stride)
                else:
                    tile_1x1(x_r, 4, x_stride, w_c, w_stride, n, y_r, y_stride)
                r += 1
            c += 4 * LANES if wide else LANES
        return 0

    return mix


@intrinsic
def fetch_line(context, address):
    """Prefetch a cache line into the second-level cache."""

    def generate(context, builder, signature, arguments):
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Emit a prefetch instruction into the function that is being built."""
    pointer = builder.inttoptr(address, INT8.as_pointer())
    read, second_level, data = ir.Constant(INT32, 0), ir.Constant(INT32, 2), ir.Constant(INT32, 1)
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, read, second_level, data)


def add_lanes(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """The sum of a vector's lanes."""
    return reduce_lanes(builder, lanes, builder.fadd)


def reduce_lanes(builder: ir.IRBuilder, lanes: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combine a vector's lanes to one value, by combining halves."""
    count = lanes.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(lanes, lanes, ir.Constant(vector(INT32, count), list(range(first, first + count))))
            for first in (0, count)
        ]
        lanes = combine(*halves)
    return builder.extract_element(lanes, ir.Constant(INT32, 0))


MAX_TILE_ROWS = 5  # whose sums fit into registers
BLOCKS_AHEAD = 2  # distance of prefetching, in blocks of weights; each further tile of rows prefetches one block more


def make_linear(format: WeightFormat):
    """linear(w, w_stride, x, x_stride, rows, n, y, y_stride, outputs): y = x w^T, with the arguments of make_tile.

    Rows are divided into tiles of 2 to 5. If the outputs are not a multiple of a block, the last block overlaps with
    the one before.
    """
    single_block, multi_block = format.single_row_outputs, format.outputs
    tile_1, tile_1x1 = make_tile(format, 1, single_block, single_block > 1), make_tile(format, 1, 1, False)
    tile_2, tile_3, tile_4, tile_5 = (make_tile(format, rows, multi_block) for rows in range(2, MAX_TILE_ROWS + 1))

    @compiled
    def linear(w, w_stride, x, x_stride, rows, n, y, y_stride, outputs):
        block = single_block if rows == 1 else multi_block
        if outputs < block:
            for r in range(rows):
                for o in range(outputs):
                    w_o, x_r, y_r = w + o * w_stride, x + r * x_stride, y + r * y_stride + 4 * o
                    tile_1x1(w_o, w_stride, x_r, x_stride, n, y_r, y_stride, w)
            return 0
        if rows == 1:
            for start in range(0, outputs, block):
                o = min(start, outputs - block)
                w_o = w + o * w_stride
                tile_1(w_o, w_stride, x, x_stride, n, y + 4 * o, y_stride, w_o + BLOCKS_AHEAD * block * w_stride)
            return 0
        tiles = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
        for start in range(0, outputs, block):
            o = min(start, outputs - block)
            w_o, y_o, r = w + o * w_stride, y + 4 * o, 0
            ahead = w_o + BLOCKS_AHEAD * block * w_stride
            for t in range(tiles):
                x_r, y_r, count = x + r * x_stride, y_o + r * y_stride, (rows + t) // tiles
                if count == 5:
                    tile_5(w_o, w_stride, x_r, x_stride, n, y_r, y_stride, ahead)
                elif count == 4:
                    tile_4(w_o, w_stride, x_r, x_stride, n, y_r, y_stride, ahead)
                elif count == 3:
                    tile_3(w_o, w_stride, x_r, x_stride, n, y_r, y_stride, ahead)
                else:
                    tile_2(w_o, w_stride, x_r, x_stride, n, y_r, y_stride, ahead)
                r += count
                ahead += block * w_stride
        return 0

    return linear


def make_widen(format: WeightFormat):
    """widen(w, n, y): convert n weights to float32, without the scales of int8. w, y are addresses."""
    if isinstance(format, BFloat16Pairs):
        format = FORMATS["bfloat16"]

    @intrinsic
    def widen_all(context, w, n, y):
        def generate(context, builder, signature, arguments):
            w, n, y = arguments
            with cgutils.for_range(builder, builder.udiv(n, ir.Constant(INT64, format.inputs))) as loop:
                weights = format.weights(
                    builder, builder.add(w, builder.mul(loop.index, ir.Constant(INT64, format.weight_bytes)))
                )
                address = builder.add(y, builder.mul(loop.index, ir.Constant(INT64, 4 * format.inputs)))
                builder.store(weights, builder.inttoptr(address, weights.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    @compiled
    def widen(w, n, y):
        widen_all(w, n, y)
        return 0

    return widen


# --- memory -----------------------------------------------------------------------------------------------------------


@intrinsic
def _pointer(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def make_call(count: int):
    """call(function, *arguments): call the compiled function at an address. count: the number of int64 arguments."""
    kind = ir.FunctionType(INT64, [INT64] * count)

    @intrinsic
    def call_address(context, function, *arguments):
        def generate(context, builder, signature, arguments):
            function, packed = arguments
            values = [builder.extract_value(packed, i) for i in range(count)]
            return builder.call(builder.inttoptr(function, kind.as_pointer()), values)

        return types.int64(types.int64, types.StarArgTuple.from_types([types.int64] * count)), generate

    return call_address


def make_array_at(dtype):
    """array_at(address, count): the array of `count` elements at an address."""

    @compiled
    def array_at(address, count):
        return carray(_pointer(address), (count,), dtype)

    return array_at


floats, shorts = make_array_at(np.float32), make_array_at(np.uint16)
integers, integers_32, octets = make_array_at(np.int64), make_array_at(np.int32), make_array_at(np.uint8)


def _int64_pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, INT64.as_pointer())


@intrinsic
def atomic_load(context, address):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_int64_pointer(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(context, address, value):
    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _int64_pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(context, address, value):
    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _int64_pointer(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_exchange(context, address, expected, value):
    """Store `value` if the current value is `expected`. Returns whether it was."""

    def generate(context, builder, signature, arguments):
        pointer = _int64_pointer(builder, arguments[0])
        pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


# --- numbers ----------------------------------------------------------------------------------------------------------


@intrinsic
def fused(context, a, b, c):
    """a b + c."""

    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.fmuladd.f32", FLOAT, *arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def round_to_integer(context, x):
    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.rint.f32", FLOAT, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def square_root(context, x):
    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.sqrt.f32", FLOAT, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def power_of_two(context, n):
    """2^n for an integer n from -126 to 127."""

    def generate(context, builder, signature, arguments):
        exponent = builder.add(builder.fptosi(arguments[0], INT32), ir.Constant(INT32, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(INT32, 23)), FLOAT)

    return types.float32(types.float32), generate


@intrinsic
def bfloat16_bits(context, x):
    """The bits of the nearest bfloat16; ties round to even."""

    def generate(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], INT32)
        last = builder.and_(builder.lshr(bits, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
        rounded = builder.add(bits, builder.add(last, ir.Constant(INT32, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(INT32, 16)), INT16)

    return types.uint16(types.float32), generate
