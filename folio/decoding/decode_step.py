"""A decoding step on a CPU, compiled by numba: the forward pass of model.py for new tokens with a key-value cache, and
sampling with the filters of sampling.py.

All arguments are in the structs of cpu_structs.py. A step consists of phases, and a phase of parts, which threads claim
one by one.

Dimensions: N new tokens, C channels, D head size, S slots of the cache (block_size), V vocabulary.
"""

import math

import numpy as np
from numba import njit

from folio.decoding.cpu_structs import STRUCTS
from folio.machine import simd
from folio.machine.elementary import MAX_EXPONENT, compiled_sums, exp, exp_all, make_polynomial, maximum
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
    shorts,
    square_root,
)

inlined = njit(**OPTIONS, inline="always")  # for functions with one caller, which then compile faster
CACHE_LINE = 64  # bytes
MAX_QUERIES = 4  # queries of a row whose attention is computed at once
LAYER_NORM_EPSILON = np.float32(1e-5)

states, matrices, norms = (make_array_at(STRUCTS[name]) for name in ("state", "matrix", "norm"))
new_tokens, rows_at = (make_array_at(STRUCTS[name]) for name in ("token", "row"))
# Phases; the first four are the matrices of a layer, in order. They are not Python's ints, because numba would compile
# a function again for each of them.
ATTEND, PROJECT, EXPAND, CONTRACT, PREDICT, SAMPLE, EMBED, NORMALIZE = np.arange(8)
NO_LAYER = np.int64(0)

call_linear, call_widen, call_part = make_call(9), make_call(3), make_call(4)


def linear(format: str):
    return simd.make_linear(simd.FORMATS[format])


def mix(format: str):
    return simd.make_mix(simd.FORMATS[format])


def widen(format: str):
    return simd.make_widen(simd.FORMATS[format])


# --- scalar functions -------------------------------------------------------------------------------------------------

# Coefficients of t, t^2, ... for t = 1 / (1 + 0.3 |x|), fitted to exp(x^2 / 2) times the probability that a standard
# normal variable exceeds |x|; the relative error is below 5e-9 (also in folio/web/browser/gpt.js).
NORMAL_TAIL = tuple(
    np.float32(c)
    for c in (
        *(0.1196874067, 0.1195572413, 0.1103611909, 0.07778385839, 0.09795569746),
        *(-0.08284755081, 0.1959741857, -0.2314002865, 0.1138065163, -0.02087826143),
    )
)


normal_tail = make_polynomial(NORMAL_TAIL)


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
    return x / (np.float32(1) + exp(min(minus_2u, MAX_EXPONENT)))


@compiled_sums
def softmax(x, count, scale):
    """Compute the softmax of x * scale in place."""
    total = exp_all(x, count, maximum(x, count), scale)
    for i in range(count):
        x[i] /= total


# --- the parts of a layer ---------------------------------------------------------------------------------------------


@inlined
def rotate(x, D, rotation):
    """Rotate channels i and i + D / 2 as a plane, like model.rotate. rotation: the address of cosines and sines."""
    cos, sin = floats(rotation, D // 2), floats(rotation + 2 * D, D // 2)
    for i in range(D // 2):
        a, b = x[i], x[i + D // 2]
        x[i] = a * cos[i] - b * sin[i]
        x[i + D // 2] = b * cos[i] + a * sin[i]


@inlined
def add_bias_by_distance(scores, count, scale, by_distance, newest, S):
    """scores[s] = scores[s] * scale + by_distance[distance from the newest token back to slot s]."""
    for s in range(newest + 1):
        scores[s] = scores[s] * scale + by_distance[newest - s]
    for s in range(newest + 1, count):
        scores[s] = scores[s] * scale + by_distance[newest - s + S]


@compiled
def copy_floats(values, count, address, item_bytes):
    """Copy float32 values to an address, as bfloat16 if item_bytes is 2."""
    if item_bytes == 2:
        bits = shorts(address, count)
        for i in range(count):
            bits[i] = bfloat16_bits(values[i])
    else:
        numbers = floats(address, count)
        for i in range(count):
            numbers[i] = values[i]


@compiled
def apply_linear(state, m, x, x_stride, N, y, y_stride, first, end):
    """Compute outputs first ... end - 1 of a linear layer for N inputs x; y[0] is output `first`. Strides in bytes."""
    count = end - first
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
    """Initialize the residual stream with the sum of token and position embeddings."""
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
    """Apply norm number `index` to a part of the new tokens."""
    C, norm = state.n_embd, norms(state.norms, 2 * state.n_layer + 1)[index]
    for n in range(PART_TOKENS * part, min(PART_TOKENS * (part + 1), state.count)):
        x, scratch = floats(state.stream + 4 * n * C, C), floats(state.output + 4 * n * C, C)
        layer_norm(state, x, norm, scratch, state.normed + n * state.x_stride)


@compiled
def fetch_all(address, count):
    """Prefetch `count` bytes into the second-level cache."""
    for line in range(0, count, CACHE_LINE):
        fetch_line(address + line)


@inlined
def attend(state, layer, head):
    """Compute one head: queries, keys, and values of the new tokens, and the weighted sums of values.

    In the last layer, sums are computed only for tokens whose logits are needed.
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
        apply_linear(state, m, state.normed, state.x_stride, N, address, stride, first, first + D)
    if state.rotation:
        for n in range(N):
            rotation = state.rotation + 4 * D * (tokens[n].position - state.rotation_first)
            rotate(floats(queries + n * stride, D), D, rotation)
            rotate(floats(keys + n * stride, D), D, rotation)
    for n in range(N):
        slot = tokens[n].row * row_bytes + tokens[n].position % S * vector_bytes
        copy_floats(floats(keys + n * stride, D), D, cached_keys + slot, state.cache_bytes)
        copy_floats(floats(values + n * stride, D), D, cached_values + slot, state.cache_bytes)
    scale, scores, n = np.float32(1) / square_root(np.float32(D)), state.scores + 4 * MAX_QUERIES * S * head, 0
    is_last, predicted = layer == state.n_layer - 1, integers(state.predicted, state.predicted_count)
    count = state.predicted_count if is_last else N
    while n < count:
        first = predicted[n] if is_last else n
        row, group = tokens[first].row, 1  # up to MAX_QUERIES tokens of a row
        while group < MAX_QUERIES and n + group < count and tokens[first + group].row == row:
            group += 1
        max_keys = min(tokens[first + group - 1].position + 1, S)  # of any token of the group
        query = queries + first * stride
        row_keys, row_values = cached_keys + row * row_bytes, cached_values + row * row_bytes
        next_token, next_bytes = tokens[min(first + group, N - 1)], 0
        if next_token.row != row:
            next_bytes = vector_bytes * min(next_token.position + 1, S)
        fetch_all(cached_keys + next_token.row * row_bytes, next_bytes)
        call_linear(state.score, row_keys, vector_bytes, query, stride, group, width, scores, 4 * S, max_keys)
        for g in range(group):
            position = tokens[first + g].position
            token_keys = min(position + 1, S)
            weights = floats(scores + 4 * g * S, max_keys)
            if state.bias:
                by_distance = floats(state.bias + 4 * head * S, S)
                add_bias_by_distance(weights, token_keys, scale, by_distance, position % S, S)
                softmax(weights, token_keys, np.float32(1))
            else:
                softmax(weights, token_keys, scale)
            for s in range(token_keys, max_keys):
                weights[s] = np.float32(0)
        fetch_all(cached_values + next_token.row * row_bytes, next_bytes)
        call_linear(state.mix, scores, 4 * S, group, max_keys, row_values, vector_bytes, query, stride, width)
        for g in range(group):  # the results have replaced the queries
            output = state.attended + (n + g) * state.x_stride + state.x_bytes * head * D
            copy_floats(floats(query + g * stride, D), D, output, state.x_bytes)
        n += group


@inlined
def keep_predicted(state):
    """Remove the new tokens whose logits are not needed."""
    C, predicted = state.n_embd, integers(state.predicted, state.predicted_count)
    tokens, stream = new_tokens(state.tokens, state.count), floats(state.stream, state.count * C)
    for n in range(state.predicted_count):
        tokens[n] = tokens[predicted[n]]
        for i in range(C):
            stream[n * C + i] = stream[predicted[n] * C + i]
    state.count = state.predicted_count


@inlined
def add_to_stream(state, m, x, x_stride, first, end):
    """Add outputs first ... end - 1 of a linear layer to the residual stream."""
    C = state.n_embd
    y = state.output + 4 * first
    apply_linear(state, m, x, x_stride, state.count, y, 4 * C, first, end)
    for n in range(state.count):
        values, stream = floats(y + 4 * n * C, end - first), floats(state.stream + 4 * (n * C + first), end - first)
        for i in range(end - first):
            stream[i] += values[i]


@inlined
def expand(state, m, first, end):
    """Compute outputs first ... end - 1 of the MLP's first layer, with the activation function."""
    y, stride = state.output + 4 * first, 4 * m.outputs
    apply_linear(state, m, state.normed, state.x_stride, state.count, y, stride, first, end)
    for n in range(state.count):
        values = floats(y + n * stride, end - first)
        if state.gelu_new:
            for i in range(end - first):
                values[i] = gelu_new(values[i])
        else:
            for i in range(end - first):
                values[i] = gelu(values[i])
        copy_floats(
            values, end - first, state.expanded + n * state.expanded_stride + state.x_bytes * first, state.x_bytes
        )


@inlined
def predict(state, m, first, end):
    """Compute logits first ... end - 1."""
    y, stride = state.output + 4 * first, 4 * m.outputs
    apply_linear(state, m, state.normed, state.x_stride, state.count, y, stride, first, end)
    tokens = new_tokens(state.tokens, state.count)
    for n in range(state.count):
        row = tokens[n].row
        values = floats(y + n * stride, end - first)
        logits = floats(state.logits + row * stride + 4 * first, end - first)
        for i in range(end - first):
            logits[i] = values[i]


# --- sampling ---------------------------------------------------------------------------------------------------------


@compiled
def sift_down(heap, start, count):
    """Restore the order of a max-heap after item `start` became smaller."""
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


BLOCK = 64  # logits that can be skipped at once


@compiled
def kth_largest(x, count, k, heap):
    """The k-th largest of `count` numbers. heap: scratch of k numbers, the negatives of the k largest so far."""
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
def keep_at_least(x, ids, count, threshold):
    """Move numbers >= threshold and their ids to the front. Returns their number."""
    size = 0
    for start in range(0, count, BLOCK):
        block = x[start : min(start + BLOCK, count)]
        if maximum(block, len(block)) >= threshold:
            for i in range(len(block)):
                if block[i] >= threshold:
                    x[size], ids[size] = block[i], ids[start + i]
                    size += 1
    return size


@compiled
def keep_nucleus(x, ids, count, p, heap):
    """Keep the smallest set of the largest numbers whose sum is at least p times the total. heap: scratch of `count`.

    Ties at the end of the set are broken by the lowest id.
    """
    total = sum_all(x, count)
    for i in range(count):
        heap[i] = x[i]
    for start in range(count // 2 - 1, -1, -1):
        sift_down(heap, start, count)
    smallest, ties, cumulative, heap_size = heap[0], 0, np.float64(0), count
    while heap_size and (ties == 0 or cumulative < p * total):
        ties = ties + 1 if heap[0] == smallest else 1
        smallest = heap[0]
        cumulative += smallest
        heap_size -= 1
        heap[0] = heap[heap_size]
        sift_down(heap, 0, heap_size)
    size = 0
    for i in range(count):
        if x[i] > smallest or (x[i] == smallest and ties > 0):
            ties -= x[i] == smallest
            x[size], ids[size] = x[i], ids[i]
            size += 1
    return size


@compiled_sums
def sum_all(x, count):
    total = np.float64(0)
    for i in range(count):
        total += x[i]
    return total


@compiled
def uniform(seed, sample, position):
    """A random number in [0, 1), a function of its arguments; see folio.decoding.sampling.uniforms."""
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
    """Apply the filters of folio.decoding.sampling.next_token_probabilities to logits x (V,), without penalties.

    On return, x has the unnormalized probabilities of the remaining tokens, and ids these tokens, in ascending order.
    Returns their number.
    """
    temperature = np.float32(row.temperature)
    for i in range(V):
        x[i] /= temperature
    count = V
    for i in range(V):
        ids[i] = i
    if row.top_k * BLOCK < V:  # the k-th largest maximum of a block is at most the k-th largest number
        blocks = V // BLOCK
        maxima = heap[row.top_k :]
        for block in range(blocks):
            maxima[block] = maximum(x[block * BLOCK :], BLOCK)
        count = keep_at_least(x, ids, count, kth_largest(maxima, blocks, row.top_k, heap))
    if row.top_k < count:
        count = keep_at_least(x, ids, count, kth_largest(x, count, row.top_k, heap))
    exp_all(x, count, maximum(x, count), np.float32(1))
    if row.top_p < 1:
        count = keep_nucleus(x, ids, count, np.float32(row.top_p), heap)
    if row.min_p > 0:
        count = keep_at_least(x, ids, count, np.float32(row.min_p))  # the most likely token has e^0 = 1
    return count


@inlined
def draw_index(x, count, number):
    """Sample by inverse transform: the first index at which the cumulative sum exceeds `number` times the total."""
    target, cumulative, last = number * sum_all(x, count), np.float64(0), 0
    for i in range(count):
        if x[i] > 0:
            cumulative += x[i]
            last = i
            if cumulative > target:
                break
    return last


@inlined
def sample(state, index):
    """Sample the next token of the row state.sampled[index]."""
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
        token = first_index(x, V, maximum(x, V))
    else:
        count = filter_tokens(row, x, ids, V, heap)
        token = ids[draw_index(x, count, uniform(row.seed, row.sample, row.drawn))]
    row.drawn += 1
    row.token = token
    if row.occurred:
        octets(row.occurred, V)[token] = 1
    if row.counts:
        floats(row.counts, V)[token] += np.float32(1)


@compiled
def first_index(x, count, value):
    """The first index of a value; 0 if it does not occur."""
    for i in range(count):
        if x[i] == value:
            return i
    return 0


@inlined
def append_sampled(state):
    """Make the last sampled tokens the new tokens of their rows."""
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
# `sync` consists of four cache lines:
#   0    the number of the phase and the number of unclaimed parts, in one integer
#   64   the kind of the phase and its layer
#   128  the number of completed parts
#   192  the number of helping threads, and whether a step is running
# A thread claims a part by decrementing the first integer, so a thread that is late, asleep, or preempted does not
# delay the others before it has claimed a part. The kind of the phase changes only while no part is left, and a claim
# fails if the phase has changed since its number was read.

PARTS_BITS = 20
PART_BYTES = 1 << 20  # maximum bytes of weights per part, so that threads finish a matrix at about the same time

PART_TOKENS = 16  # tokens per part of a norm
OUTPUT_MULTIPLE = 20  # parts have a multiple of 20 outputs, which tiles of 4 and 5 outputs divide
MAX_SPINS = 200_000  # per token, about 0.2 ms: a thread that takes longer for its part was preempted
MIN_BACKOFF, MAX_BACKOFF = 0.5e-3, 20e-3  # seconds to work without the other threads then; doubled each time
MAX_IDLE_SPINS = 50_000  # about 0.2 ms without work, after which a thread sleeps


@inlined
def phase_matrix(state, phase, layer):
    """The linear layer of a phase."""
    return matrices(state.matrices, 4 * state.n_layer + 1)[4 * state.n_layer if phase == PREDICT else 4 * layer + phase]


@inlined
def count_parts(state, m):
    """The number of parts into which the outputs of a linear layer are divided."""
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
        m = phase_matrix(state, phase, layer)
        parts = count_parts(state, m)
        first = m.outputs * part // parts // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
        end = m.outputs if part + 1 == parts else m.outputs * (part + 1) // parts // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
        if phase == PROJECT:
            add_to_stream(state, m, state.attended, state.x_stride, first, end)
        elif phase == EXPAND:
            expand(state, m, first, end)
        elif phase == CONTRACT:
            add_to_stream(state, m, state.expanded, state.expanded_stride, first, end)
        else:
            predict(state, m, first, end)
    return 0


@compiled
def claim_parts(address):
    """Run parts of the published phase until none is left. Returns their number."""
    state, completed = states(address, 1)[0], 0
    sync = state.sync
    while True:
        claim = atomic_load(sync)
        phase, layer = atomic_load(sync + 64), atomic_load(sync + 72)
        remaining = claim & ((1 << PARTS_BITS) - 1)
        if remaining == 0:
            return completed
        if compare_exchange(sync, claim, claim - 1):
            call_part(state.run_part, address, phase, layer, remaining - 1)
            atomic_add(sync + 128, 1)
            completed += 1


@compiled
def run_phase(address, phase, layer, count):
    """Run all parts of a phase, together with the threads that are awake."""
    state = states(address, 1)[0]
    sync = state.sync
    if state.threads == 1 or count == 1 or state.now < state.single_until:
        for part in range(count):
            call_part(state.run_part, address, phase, layer, part)  # run_part, above
        return
    state.phase = (state.phase + 1) % (1 << PARTS_BITS)
    atomic_store(sync + 128, 0)
    atomic_store(sync + 64, phase)
    atomic_store(sync + 72, layer)
    atomic_store(sync, (state.phase << PARTS_BITS) + count)
    claim_parts(address)
    spins = 0
    while atomic_load(sync + 128) < count:
        spins += 1
    if spins > MAX_SPINS * state.count and state.appends:  # parts of a prefill take longer
        state.single_until = state.now + state.next_backoff
        state.next_backoff = min(2 * state.next_backoff, MAX_BACKOFF)


@compiled
def run_linear(address, phase, layer):
    state = states(address, 1)[0]
    run_phase(address, phase, layer, count_parts(state, phase_matrix(state, phase, layer)))


@compiled
def run_norm(address, index):
    count = states(address, 1)[0].count
    run_phase(address, NORMALIZE, index, (count + PART_TOKENS - 1) // PART_TOKENS)


@compiled
def step(address):
    """Run the forward pass for the new tokens, if there are any, and sample a token for each row in state.sampled."""
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
    if state.now >= state.single_until:
        state.next_backoff = max(0.9 * state.next_backoff, MIN_BACKOFF)
    atomic_store(state.sync + 200, 0)
    return 0


@compiled
def help(address):
    """Run parts of the leader's steps until there has been no work for a moment."""
    sync, spins = states(address, 1)[0].sync, 0
    atomic_add(sync + 192, 1)
    while spins < MAX_IDLE_SPINS:
        spins = 0 if claim_parts(address) or atomic_load(sync + 200) else spins + 1
    atomic_add(sync + 192, -1)
    return 0
