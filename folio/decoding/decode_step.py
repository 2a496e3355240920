"""A step of decoding on a CPU, compiled by numba: the forward pass of model.py for new tokens with a key-value cache,
the sampling filters of sampling.py, and the draw.

All arguments are in the records of cpu_records.py. A step consists of phases, and a phase of parts, which the
threads claim one by one.

Dimensions: N new tokens, C channels, D head size, S slots of the cache (block_size), V vocabulary.
"""

import math

import numpy as np
from numba import njit

from folio.decoding.cpu_records import RECORDS
from folio.machine import simd
from folio.machine.simd import (
    OPTIONS,
    atomic_add,
    atomic_load,
    atomic_store,
    bfloat16_bits,
    compare_exchange,
    compiled,
    fetch_line,
    floats,
    fused,
    integers,
    integers_32,
    make_array_at,
    make_call,
    octets,
    power_of_two,
    round_to_integer,
    shorts,
    square_root,
)

inlined = njit(**OPTIONS, inline="always")  # for functions with one caller: they compile faster as part of it
# A sum may be reordered, so that it is computed in vectors.
compiled_sums = njit(**OPTIONS, fastmath={"reassoc", "contract"})
compiled_largest = njit(**OPTIONS, fastmath={"nnan", "nsz"})  # NaN is reported after the prefill
CACHE_LINE = 64  # bytes
MOST_QUERIES = 4  # of a row, whose attention is computed together
LAYER_NORM_EPSILON = np.float32(1e-5)

states, matrices, norms = (make_array_at(RECORDS[name]) for name in ("state", "matrix", "norm"))
new_tokens, rows_at = (make_array_at(RECORDS[name]) for name in ("token", "row"))
# Phases; the first four are a layer's matrices in turn. numba would compile a function again for each constant that is
# an int of Python.
ATTEND, PROJECT, EXPAND, CONTRACT, PREDICT, SAMPLE, EMBED, NORMALIZE = np.arange(8)
NO_LAYER = np.int64(0)

call_linear, call_widen, call_part = make_call(9), make_call(3), make_call(4)


def linear(format: str):
    return simd.make_linear(simd.FORMATS[format])


def mix(format: str):
    return simd.make_mix(simd.FORMATS[format])


def widen(format: str):
    return simd.make_widen(simd.FORMATS[format])


# --- functions of a number --------------------------------------------------------------------------------------------

LOG2_E, LN_2, LN_2_REST = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
SMALLEST_EXPONENT, LARGEST_EXPONENT = np.float32(-87.3), np.float32(88.0)
TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in range(8))

# Coefficients of t, t^2, ... for t = 1 / (1 + 0.3 |x|), fitted to exp(x^2 / 2) times the probability that a standard
# normal variable exceeds |x|; the relative error is below 5e-9 (also in folio/web/browser/gpt.js).
NORMAL_TAIL = tuple(
    np.float32(c)
    for c in (
        *(0.1196874067, 0.1195572413, 0.1103611909, 0.07778385839, 0.09795569746),
        *(-0.08284755081, 0.1959741857, -0.2314002865, 0.1138065163, -0.02087826143),
    )
)


def make_polynomial(coefficients: tuple[np.float32, ...]):
    """polynomial(x): the sum of coefficients[n] x^n, by Horner's rule, as one expression that is fast in vectors."""
    body = f"c{len(coefficients) - 1}"
    for n in range(len(coefficients) - 2, -1, -1):
        body = f"fused({body}, x, c{n})"
    names = {f"c{n}": c for n, c in enumerate(coefficients)}
    return compiled(eval(f"lambda x: {body}", {"fused": fused, **names}))


taylor, normal_tail = make_polynomial(TAYLOR), make_polynomial(NORMAL_TAIL)


@compiled
def exp(x):
    """e^x in float32, for x up to 88: 2^n e^r with |r| <= ln(2) / 2. 0 below -87.3."""
    n = round_to_integer(max(x, SMALLEST_EXPONENT) * LOG2_E)
    r = fused(n, -LN_2_REST, fused(n, -LN_2, max(x, SMALLEST_EXPONENT)))
    return taylor(r) * power_of_two(n) if x >= SMALLEST_EXPONENT else np.float32(0)


@compiled
def gelu(x):
    """x times the probability that a standard normal variable is below x."""
    t = np.float32(1) / fused(np.float32(0.3), abs(x), np.float32(1))
    tail = normal_tail(t) * t * exp(np.float32(-0.5) * x * x)
    return x * (tail if x < 0 else np.float32(1) - tail)


@compiled
def gelu_new(x):
    """x / 2 (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u))."""
    minus_2u = np.float32(-2 * math.sqrt(2 / math.pi)) * x * fused(np.float32(0.044715) * x, x, np.float32(1))
    return x / (np.float32(1) + exp(min(minus_2u, LARGEST_EXPONENT)))


@compiled_sums
def exp_all(x, count, shift, scale):
    """In place: e^((x - shift) scale). Returns their sum."""
    total = np.float32(0)
    for i in range(count):
        e = exp((x[i] - shift) * scale)
        x[i] = e
        total += e
    return total


@compiled_largest
def largest_of(x, count):
    largest = x[0]
    for i in range(count):
        largest = max(largest, x[i])
    return largest


@compiled_sums
def softmax(x, count, scale):
    """In place: the softmax of x scale."""
    total = exp_all(x, count, largest_of(x, count), scale)
    for i in range(count):
        x[i] /= total


# --- the parts of a layer ---------------------------------------------------------------------------------------------


@inlined
def rotate(x, D, rotation):
    """Rotate channels i and i + D / 2 as a plane, as model.rotate does. rotation: the address of cosines and sines."""
    cos, sin = floats(rotation, D // 2), floats(rotation + 2 * D, D // 2)
    for i in range(D // 2):
        a, b = x[i], x[i + D // 2]
        x[i] = a * cos[i] - b * sin[i]
        x[i + D // 2] = b * cos[i] + a * sin[i]


@inlined
def add_bias_by_distance(scores, count, scale, by_distance, newest, S):
    """scores[s] = scores[s] scale + by_distance[distance of slot s from the newest token's]."""
    for s in range(newest + 1):
        scores[s] = scores[s] * scale + by_distance[newest - s]
    for s in range(newest + 1, count):
        scores[s] = scores[s] * scale + by_distance[newest - s + S]


@compiled
def copy_floats(values, count, address, item_bytes):
    """Copy float32 values to an address, as bfloat16 if an item has two bytes."""
    if item_bytes == 2:
        bits = shorts(address, count)
        for i in range(count):
            bits[i] = bfloat16_bits(values[i])
    else:
        numbers = floats(address, count)
        for i in range(count):
            numbers[i] = values[i]


@compiled
def apply(state, m, x, x_stride, N, y, y_stride, first, last):
    """Outputs first ... last - 1 of a linear layer for N inputs x; y[0] is output `first`. Strides are in bytes."""
    count = last - first
    call_linear(state.linear, m.weight + first * m.stride, m.stride, x, x_stride, N, m.inputs, y, y_stride, count)
    for n in range(N):
        values = floats(y + n * y_stride, count)
        if m.scale:
            scale = floats(m.scale + 4 * first, count)
            for i in range(count):
                values[i] *= scale[i]
        if m.bias:
            bias = floats(m.bias + 4 * first, count)
            for i in range(count):
                values[i] += bias[i]


@inlined
def embed(state):
    """The sum of token and position embeddings, as the residual stream."""
    C, tokens = state.n_embd, new_tokens(state.tokens, state.count)
    m = matrices(state.matrices, 4 * state.n_layer + 1)[4 * state.n_layer]
    widened = floats(state.output, m.inputs)
    for n in range(state.count):
        call_widen(state.widen, m.weight + tokens[n].id * m.stride, m.inputs, state.output)
        scale = floats(m.scale, m.outputs)[tokens[n].id] if m.scale else np.float32(1)
        x = floats(state.stream + 4 * n * C, C)
        for i in range(C):
            x[i] = widened[i] * scale
        if state.positions:
            position = floats(state.positions + 4 * C * tokens[n].position, C)
            for i in range(C):
                x[i] += position[i]


@compiled_sums
def layer_norm(state, x, norm, scratch, output):
    C = state.n_embd
    gain, total, squares = floats(norm.gain, C), np.float32(0), np.float32(0)
    for i in range(C):
        total += x[i]
    mean = total / np.float32(C)
    for i in range(C):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1) / square_root(squares / np.float32(C) + LAYER_NORM_EPSILON)
    for i in range(C):
        scratch[i] = (x[i] - mean) * scale * gain[i]
    if norm.bias:
        bias = floats(norm.bias, C)
        for i in range(C):
            scratch[i] += bias[i]
    copy_floats(scratch, C, output, state.x_bytes)


@inlined
def normalize(state, index, part):
    """The norm of that index for a part of the new tokens."""
    C, norm = state.n_embd, norms(state.norms, 2 * state.n_layer + 1)[index]
    for n in range(PART_TOKENS * part, min(PART_TOKENS * (part + 1), state.count)):
        x, scratch = floats(state.stream + 4 * n * C, C), floats(state.output + 4 * n * C, C)
        layer_norm(state, x, norm, scratch, state.normed + n * state.x_stride)


@compiled
def fetch_all(address, count):
    """Have so many bytes read into the second-level cache while something else is computed."""
    for line in range(0, count, CACHE_LINE):
        fetch_line(address + line)


@inlined
def attend(state, layer, head):
    """One head: queries, keys, and values of the new tokens, and the weighted sums of values.

    In the last layer, only the tokens whose logits are needed attend to others.
    """
    m = matrices(state.matrices, 4 * state.n_layer)[4 * layer + ATTEND]
    tokens, N = new_tokens(state.tokens, state.count), state.count
    C, D, S, width = state.n_embd, state.head_size, state.block_size, state.head_width
    stride = 4 * state.n_head * width  # bytes of the queries, keys, or values of a token
    queries = state.qkv + 4 * head * width
    keys, values = queries + N * stride, queries + 2 * N * stride
    vector_bytes = state.cache_bytes * width  # a key or value in the cache
    row_bytes = state.n_head * S * vector_bytes
    cached_keys = state.cache + 2 * layer * state.rows * row_bytes + head * S * vector_bytes
    cached_values = cached_keys + state.rows * row_bytes
    for part, address in enumerate((queries, keys, values)):
        first = part * C + head * D
        apply(state, m, state.normed, state.x_stride, N, address, stride, first, first + D)
    if state.rotation:
        for n in range(N):
            rotation = state.rotation + 4 * D * (tokens[n].position - state.rotation_first)
            rotate(floats(queries + n * stride, D), D, rotation)
            rotate(floats(keys + n * stride, D), D, rotation)
    for n in range(N):
        slot = tokens[n].row * row_bytes + tokens[n].position % S * vector_bytes
        copy_floats(floats(keys + n * stride, D), D, cached_keys + slot, state.cache_bytes)
        copy_floats(floats(values + n * stride, D), D, cached_values + slot, state.cache_bytes)
    scale, scores, n = np.float32(1) / square_root(np.float32(D)), state.scores + 4 * MOST_QUERIES * S * head, 0
    is_last, predicted = layer == state.n_layer - 1, integers(state.predicted, state.predicted_count)
    count = state.predicted_count if is_last else N
    while n < count:
        first = predicted[n] if is_last else n
        row, group = tokens[first].row, 1  # up to four tokens of a row at a time
        while group < MOST_QUERIES and n + group < count and tokens[first + group].row == row:
            group += 1
        most = min(tokens[first + group - 1].position + 1, S)  # keys that one of them attends to
        query = queries + first * stride
        row_keys, row_values = cached_keys + row * row_bytes, cached_values + row * row_bytes
        later, later_bytes = tokens[min(first + group, N - 1)], 0
        if later.row != row:
            later_bytes = vector_bytes * min(later.position + 1, S)
        fetch_all(cached_keys + later.row * row_bytes, later_bytes)
        call_linear(state.score, row_keys, vector_bytes, query, stride, group, width, scores, 4 * S, most)
        for g in range(group):
            position = tokens[first + g].position
            keys_of_token = min(position + 1, S)
            weights = floats(scores + 4 * g * S, most)
            if state.bias:
                by_distance = floats(state.bias + 4 * head * S, S)
                add_bias_by_distance(weights, keys_of_token, scale, by_distance, position % S, S)
                softmax(weights, keys_of_token, np.float32(1))
            else:
                softmax(weights, keys_of_token, scale)
            for s in range(keys_of_token, most):
                weights[s] = np.float32(0)
        fetch_all(cached_values + later.row * row_bytes, later_bytes)
        call_linear(state.mix, scores, 4 * S, group, most, row_values, vector_bytes, query, stride, width)
        for g in range(group):  # the results take the place of the queries
            output = state.attended + (n + g) * state.x_stride + state.x_bytes * head * D
            copy_floats(floats(query + g * stride, D), D, output, state.x_bytes)
        n += group


@inlined
def keep_predicted(state):
    """Forget the new tokens whose logits are not needed."""
    C, predicted = state.n_embd, integers(state.predicted, state.predicted_count)
    tokens, stream = new_tokens(state.tokens, state.count), floats(state.stream, state.count * C)
    for n in range(state.predicted_count):
        tokens[n] = tokens[predicted[n]]
        for i in range(C):
            stream[n * C + i] = stream[predicted[n] * C + i]
    state.count = state.predicted_count


@inlined
def add_to_stream(state, m, x, x_stride, first, last):
    """Add outputs first ... last - 1 of a linear layer to the residual stream."""
    C = state.n_embd
    y = state.output + 4 * first
    apply(state, m, x, x_stride, state.count, y, 4 * C, first, last)
    for n in range(state.count):
        values, stream = floats(y + 4 * n * C, last - first), floats(state.stream + 4 * (n * C + first), last - first)
        for i in range(last - first):
            stream[i] += values[i]


@inlined
def expand(state, m, first, last):
    """Outputs first ... last - 1 of the MLP's first layer, and the activation function."""
    y, stride = state.output + 4 * first, 4 * m.outputs
    apply(state, m, state.normed, state.x_stride, state.count, y, stride, first, last)
    for n in range(state.count):
        values = floats(y + n * stride, last - first)
        if state.gelu_new:
            for i in range(last - first):
                values[i] = gelu_new(values[i])
        else:
            for i in range(last - first):
                values[i] = gelu(values[i])
        copy_floats(
            values, last - first, state.expanded + n * state.expanded_stride + state.x_bytes * first, state.x_bytes
        )


@inlined
def predict(state, m, first, last):
    """Logits first ... last - 1."""
    y, stride = state.output + 4 * first, 4 * m.outputs
    apply(state, m, state.normed, state.x_stride, state.count, y, stride, first, last)
    tokens = new_tokens(state.tokens, state.count)
    for n in range(state.count):
        row = tokens[n].row
        values = floats(y + n * stride, last - first)
        logits = floats(state.logits + row * stride + 4 * first, last - first)
        for i in range(last - first):
            logits[i] = values[i]


# --- sampling ---------------------------------------------------------------------------------------------------------


@compiled
def sift_down(heap, start, count):
    """Restore the order of a heap, the largest number first, after its item `start` became smaller."""
    value, parent = heap[start], start
    while 2 * parent + 1 < count:
        child = 2 * parent + 1
        if child + 1 < count and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= value:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = value


BLOCK = 64  # logits of which most can be skipped together


@compiled
def kth_largest(x, count, k, heap):
    """heap: scratch of k numbers, the negatives of the k largest so far."""
    for i in range(k):
        heap[i] = -x[i]
    for start in range(k // 2 - 1, -1, -1):
        sift_down(heap, start, k)
    for i in range(k, count):
        if -x[i] < heap[0]:
            heap[0] = -x[i]
            sift_down(heap, 0, k)
    return -heap[0]


@compiled
def keep_from(x, ids, count, least):
    """Move the numbers from `least` on to the front, and their ids. Returns how many there are."""
    kept = 0
    for start in range(0, count, BLOCK):
        block = x[start : min(start + BLOCK, count)]
        if largest_of(block, len(block)) >= least:
            for i in range(len(block)):
                if block[i] >= least:
                    x[kept], ids[kept] = block[i], ids[start + i]
                    kept += 1
    return kept


@compiled
def keep_nucleus(x, ids, count, p, heap):
    """Keep the smallest set of the largest numbers that sum to a share of p or more of all. heap: scratch of `count`.

    Of equal numbers at the end of the set, those with the lowest ids are kept.
    """
    total = sum_of(x, count)
    for i in range(count):
        heap[i] = x[i]
    for start in range(count // 2 - 1, -1, -1):
        sift_down(heap, start, count)
    least, ties, covered, size = heap[0], 0, np.float64(0), count
    while size and (ties == 0 or covered < p * total):
        ties = ties + 1 if heap[0] == least else 1
        least = heap[0]
        covered += least
        size -= 1
        heap[0] = heap[size]
        sift_down(heap, 0, size)
    kept = 0
    for i in range(count):
        if x[i] > least or (x[i] == least and ties > 0):
            ties -= x[i] == least
            x[kept], ids[kept] = x[i], ids[i]
            kept += 1
    return kept


@compiled_sums
def sum_of(x, count):
    total = np.float64(0)
    for i in range(count):
        total += x[i]
    return total


@compiled
def uniform(seed, sample, position):
    """A number in [0, 1) that is a function of its arguments, as folio.decoding.sampling.uniforms."""
    h = np.uint64(0)
    for part in (np.uint64(seed), np.uint64(sample), np.uint64(position)):
        h = (h ^ part) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return np.float64(h >> np.uint64(11)) * 2.0**-53


@inlined
def penalize(x, V, occurred, penalty):
    """Divide the logits of tokens that occurred by the penalty; negative ones are multiplied by it."""
    for i in range(V):
        if occurred[i]:
            x[i] = x[i] * penalty if x[i] < 0 else x[i] / penalty


@inlined
def filter_tokens(row, x, ids, V, heap):
    """Apply the filters of folio.decoding.sampling.next_token_probabilities, but for the penalties, to logits x (V,).

    x becomes the probabilities of the tokens that are left, not normalized, and ids these tokens, in ascending order.
    Returns how many there are.
    """
    temperature = np.float32(row.temperature)
    for i in range(V):
        x[i] /= temperature
    count = V
    for i in range(V):
        ids[i] = i
    if row.top_k * BLOCK < V:  # then the k-th largest of the blocks' maxima is not above the k-th largest number
        blocks = V // BLOCK
        maxima = heap[row.top_k :]
        for block in range(blocks):
            maxima[block] = largest_of(x[block * BLOCK :], BLOCK)
        count = keep_from(x, ids, count, kth_largest(maxima, blocks, row.top_k, heap))
    if row.top_k < count:
        count = keep_from(x, ids, count, kth_largest(x, count, row.top_k, heap))
    exp_all(x, count, largest_of(x, count), np.float32(1))
    if row.top_p < 1:
        count = keep_nucleus(x, ids, count, np.float32(row.top_p), heap)
    if row.min_p > 0:
        count = keep_from(x, ids, count, np.float32(row.min_p))  # the most likely token has e^0 = 1
    return count


@inlined
def draw(x, count, number):
    """The first index at which the cumulative sum exceeds a share of `number`: inverse transform sampling."""
    target, cumulative, last = number * sum_of(x, count), np.float64(0), 0
    for i in range(count):
        if x[i] > 0:
            cumulative += x[i]
            last = i
            if cumulative > target:
                break
    return last


@inlined
def sample(state, index):
    """Sample the next token of a row, the one in that place of the list of rows that are sampled."""
    number = integers(state.sampled, state.sampled_count)[index]
    row = rows_at(state.row_table, state.rows)[number]
    V = row.vocab_size  # without padding
    logits = floats(state.logits + 4 * state.vocab_size * number, V)
    scratch = state.filtered + 3 * 4 * state.vocab_size * index
    x, heap = floats(scratch, V), floats(scratch + 4 * state.vocab_size, V)
    ids = integers_32(scratch + 8 * state.vocab_size, V)
    for i in range(V):
        x[i] = logits[i]
    if row.logit_bias:
        bias = floats(row.logit_bias, V)
        for i in range(V):
            x[i] += bias[i]
    if row.occurred:
        penalize(x, V, octets(row.occurred, V), np.float32(row.repetition_penalty))
    if row.counts:
        presence, frequency = np.float32(row.presence_penalty), np.float32(row.frequency_penalty)
        counts = floats(row.counts, V)
        for i in range(V):
            if counts[i] > 0:
                x[i] -= frequency * counts[i] + presence
    if row.temperature == 0:
        token = index_of(x, V, largest_of(x, V))
    else:
        count = filter_tokens(row, x, ids, V, heap)
        token = ids[draw(x, count, uniform(row.seed, row.sample, row.drawn))]
    row.drawn += 1
    row.token = token
    if row.occurred:
        octets(row.occurred, V)[token] = 1
    if row.counts:
        floats(row.counts, V)[token] += np.float32(1)


@compiled
def index_of(x, count, value):
    """The first place of a value; 0 if there is none."""
    for i in range(count):
        if x[i] == value:
            return i
    return 0


@inlined
def append_sampled(state):
    """Make the tokens that were drawn last the new tokens of their rows."""
    rows, sampled = rows_at(state.row_table, state.rows), integers(state.sampled, state.sampled_count)
    tokens, predicted = new_tokens(state.tokens, state.sampled_count), integers(state.predicted, state.sampled_count)
    for n in range(state.sampled_count):
        row = rows[sampled[n]]
        tokens[n].id, tokens[n].row, tokens[n].position = row.token, sampled[n], row.length
        row.length += 1
        predicted[n] = n
    state.count = state.predicted_count = state.sampled_count


# --- phases and threads -----------------------------------------------------------------------------------------------
#
# `sync` is four cache lines: the number of the phase and how many of its parts nobody has claimed, in one integer; what
# the phase is; how many parts are done; how many threads are helping, and whether a step is running. A thread claims a
# part by decreasing the first integer, so that one that is late, asleep, or without a core delays nobody before it has
# claimed. What the phase is changes only while no part is left, and a claim fails if the phase has changed since its
# number was read.

PARTS_BITS = 20
PART_BYTES = 1 << 20  # of weights, at most, so that threads that share a matrix end nearly together
PART_TOKENS = 16  # whose norms are a part
EVEN = 20  # outputs of a part are a multiple of it, which tiles of 4 and 5 outputs divide
PATIENCE = 200_000  # times to look per token, some 0.2 ms: a thread that takes longer for its part has lost its core
SHORTEST_BREAK, LONGEST_BREAK = 0.5e-3, 20e-3  # seconds without the other threads then; twice as many each time
IDLE = 50_000  # times to look for work, some 0.2 ms, before a thread sleeps


@inlined
def matrix_of(state, phase, layer):
    """The linear layer of a phase."""
    return matrices(state.matrices, 4 * state.n_layer + 1)[4 * state.n_layer if phase == PREDICT else 4 * layer + phase]


@inlined
def count_parts(state, m):
    """How many parts the outputs of a linear layer are divided into."""
    return 1 if state.threads == 1 else max(state.threads, m.outputs * m.stride // PART_BYTES)


@compiled
def run_part(address, phase, layer, part):
    state = states(address, 1)[0]
    if phase == EMBED:
        embed(state)
    elif phase == NORMALIZE:
        normalize(state, layer, part)
    elif phase == ATTEND:
        attend(state, layer, part)
    elif phase == SAMPLE:
        sample(state, part)
    else:
        m = matrix_of(state, phase, layer)
        parts = count_parts(state, m)
        first = m.outputs * part // parts // EVEN * EVEN
        last = m.outputs if part + 1 == parts else m.outputs * (part + 1) // parts // EVEN * EVEN
        if phase == PROJECT:
            add_to_stream(state, m, state.attended, state.x_stride, first, last)
        elif phase == EXPAND:
            expand(state, m, first, last)
        elif phase == CONTRACT:
            add_to_stream(state, m, state.expanded, state.expanded_stride, first, last)
        else:
            predict(state, m, first, last)
    return 0


@compiled
def claim_parts(address):
    """Run parts of the published phase until none is left. Returns how many."""
    state, ran = states(address, 1)[0], 0
    sync = state.sync
    while True:
        claim = atomic_load(sync)
        phase, layer = atomic_load(sync + 64), atomic_load(sync + 72)
        left = claim & ((1 << PARTS_BITS) - 1)
        if left == 0:
            return ran
        if compare_exchange(sync, claim, claim - 1):
            call_part(state.run_part, address, phase, layer, left - 1)
            atomic_add(sync + 128, 1)
            ran += 1


@compiled
def run_phase(address, phase, layer, count):
    """Run all parts of a phase, with the threads that are awake."""
    state = states(address, 1)[0]
    sync = state.sync
    if state.threads == 1 or count == 1 or state.now < state.alone_until:
        for part in range(count):
            call_part(state.run_part, address, phase, layer, part)  # run_part, above
        return
    state.phase = (state.phase + 1) % (1 << PARTS_BITS)
    atomic_store(sync + 128, 0)
    atomic_store(sync + 64, phase)
    atomic_store(sync + 72, layer)
    atomic_store(sync, (state.phase << PARTS_BITS) + count)
    claim_parts(address)
    looks = 0
    while atomic_load(sync + 128) < count:
        looks += 1
    if looks > PATIENCE * state.count and state.appends:  # parts of a prefill take longer
        state.alone_until = state.now + state.next_break
        state.next_break = min(2 * state.next_break, LONGEST_BREAK)


@compiled
def run_linear(address, phase, layer):
    state = states(address, 1)[0]
    run_phase(address, phase, layer, count_parts(state, matrix_of(state, phase, layer)))


@compiled
def run_norm(address, index):
    count = states(address, 1)[0].count
    run_phase(address, NORMALIZE, index, (count + PART_TOKENS - 1) // PART_TOKENS)


@compiled
def step(address):
    """The forward pass for the new tokens, if there are any, and a draw for each of the rows to sample."""
    state = states(address, 1)[0]
    atomic_store(state.sync + 200, 1)
    if state.appends:
        append_sampled(state)
    if state.count:
        run_phase(address, EMBED, NO_LAYER, np.int64(1))
        for layer in range(state.n_layer):
            run_norm(address, 2 * layer)
            run_phase(address, ATTEND, layer, state.n_head)
            if layer == state.n_layer - 1:
                keep_predicted(state)
            run_linear(address, PROJECT, layer)
            run_norm(address, 2 * layer + 1)
            run_linear(address, EXPAND, layer)
            run_linear(address, CONTRACT, layer)
        run_norm(address, 2 * state.n_layer)
        run_linear(address, PREDICT, NO_LAYER)
    run_phase(address, SAMPLE, NO_LAYER, state.sampled_count)
    if state.now >= state.alone_until:
        state.next_break = max(0.9 * state.next_break, SHORTEST_BREAK)
    atomic_store(state.sync + 200, 0)
    return 0


@compiled
def help(address):
    """Take part in the leader's steps until there has been none for a moment."""
    sync, looks = states(address, 1)[0].sync, 0
    atomic_add(sync + 192, 1)
    while looks < IDLE:
        looks = 0 if claim_parts(address) or atomic_load(sync + 200) else looks + 1
    atomic_add(sync + 192, -1)
    return 0
