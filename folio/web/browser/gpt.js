"use strict";
// The forward pass of model.py in plain JavaScript: a few tokens at a time, with a KV cache.
//
// Dimensions: n tokens computed at once, T time, S keys, C channels, H heads, D head size (C / H),
// V vocabulary, L layers. All numbers are float32 in one memory, `kernels.floats`. Variables such as `x` or `weight`
// are indices of their first elements there. Activations are row-major, and the stride between their rows is a multiple
// of 4. Matrices that matmul multiplies by are packed.

// --- kernels ---------------------------------------------------------------------------------------------------------
//
// The functions that take nearly all the time exist twice: in kernels.wasm (source: kernels.wat), and in JavaScript for
// browsers without WebAssembly or SIMD. They compute 4 numbers at a time, and up to 3 more than needed. In packed
// matrices, these are zeros; elsewhere, they are finite, and the results are not used. A bias of 0 means none.

const PAGE_BYTES = 65536; // of WebAssembly memory
const ALIGNMENT = 16; // floats; a cache line

const ceil4 = n => n + 3 & ~3;
const sizeOf = shape => shape.reduce((product, size) => product * size, 1);

// The index of an element in a packed matrix: 4 rows are interleaved, 4 columns at a time, so that matmul reads the
// memory in order while it computes 4 sums. stride: number of columns, rounded up to a multiple of 4.
const packedIndex = (row, col, stride) => (row >> 2) * 4 * stride + (col >> 2) * 16 + (row & 3) * 4 + (col & 3);
const packedSize = (rows, cols) => ceil4(rows) * ceil4(cols);

// Write a row to a packed matrix at index w of an array.
function packRow(array, w, row, values) {
  const stride = ceil4(values.length);
  for (let col = 0; col < values.length; col++) array[w + packedIndex(row, col, stride)] = values[col];
}

// Copy n rows of `cols` numbers between arrays.
function copyRows(to, toStart, toStride, from, fromStart, fromStride, cols, n) {
  for (let i = 0; i < n; i++) {
    const start = fromStart + i * fromStride;
    to.set(from.subarray(start, start + cols), toStart + i * toStride);
  }
}

class PlainKernels {
  simd = false;
  slice = 4e6; // multiplications in about 5 ms
  used = ALIGNMENT; // allocated floats; index 0 means "none"
  floats = new Float32Array(this.used);

  // Allocate `size` zeros and return their index. The memory may move: views of it are valid until the next call.
  allocate(size) {
    const index = this.used, end = index + Math.ceil(size / ALIGNMENT) * ALIGNMENT;
    try {
      if (end > this.floats.length) this.grow(end);
    } catch {
      throw new Error("the model needs more memory than the browser allows");
    }
    this.used = end;
    return index;
  }

  grow(size) {
    const before = this.floats;
    this.floats = new Float32Array(Math.ceil(1.25 * size)); // with a reserve, because growing copies everything
    this.floats.set(before);
  }

  // y[i, r] = bias[r] + sum over c of x[i, c] w[r, c], for i < n, r < rows, c < cols. w is packed. xStride and yStride
  // are the distances between rows; wStride is that of packedIndex.
  matmul(y, x, w, bias, n, rows, cols, xStride, wStride, yStride) {
    const m = this.floats;
    for (let r = 0; r < rows; r += 4) {
      for (let i = 0; i < n; i++) { // the 4 rows of w stay in the CPU cache
        let a = x + i * xStride, b = w + r * wStride, sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
        for (const end = a + cols; a < end; a += 4, b += 16) {
          const x0 = m[a], x1 = m[a + 1], x2 = m[a + 2], x3 = m[a + 3];
          sum0 += x0 * m[b] + x1 * m[b + 1] + x2 * m[b + 2] + x3 * m[b + 3];
          sum1 += x0 * m[b + 4] + x1 * m[b + 5] + x2 * m[b + 6] + x3 * m[b + 7];
          sum2 += x0 * m[b + 8] + x1 * m[b + 9] + x2 * m[b + 10] + x3 * m[b + 11];
          sum3 += x0 * m[b + 12] + x1 * m[b + 13] + x2 * m[b + 14] + x3 * m[b + 15];
        }
        const to = y + i * yStride + r;
        m[to] = (bias && m[bias + r]) + sum0;
        m[to + 1] = (bias && m[bias + r + 1]) + sum1;
        m[to + 2] = (bias && m[bias + r + 2]) + sum2;
        m[to + 3] = (bias && m[bias + r + 3]) + sum3;
      }
    }
  }

  // LayerNorm: y (C,) = normalized x (C,), times the weight, plus the bias.
  norm(y, x, weight, bias, C) {
    const m = this.floats;
    let mean = 0, variance = 0;
    for (let c = 0; c < C; c++) mean += m[x + c] / C;
    for (let c = 0; c < C; c++) variance += (m[x + c] - mean) ** 2 / C;
    const scale = 1 / Math.sqrt(variance + EPSILON);
    for (let c = 0; c < C; c++) m[y + c] = (m[x + c] - mean) * scale * m[weight + c] + (bias && m[bias + c]);
  }

  // z (C,) = attention of a token with query, key and value qkv (3C,) to the first `count` slots. Stores its key in a
  // slot of `keys`, a packed matrix (slots, D) per head, and its value in `values`, a packed (D, slots) per head. The
  // biases of the slots begin at `biases` (0: none) for the first head, and biasStride later for each next one.
  attend(z, qkv, keys, values, scores, biases, H, D, slots, slot, count, biasStride) {
    const m = this.floats, scale = 1 / Math.sqrt(D), stride = ceil4(D);
    for (let h = 0; h < H; h++, keys += slots * stride, values += slots * stride) {
      const q = qkv + h * D, k = q + H * D, v = k + H * D, bias = biases && biases + h * biasStride;
      for (let d = 0; d < D; d++) {
        m[keys + packedIndex(slot, d, stride)] = m[k + d];
        m[values + packedIndex(d, slot, slots)] = m[v + d];
      }
      this.matmul(scores, q, keys, 0, 1, count, D, 0, stride, 0);
      for (let s = 0; s < count; s++) m[scores + s] = m[scores + s] * scale + (bias && m[bias + s]);
      softmax(m.subarray(scores, scores + count));
      m.fill(0, scores + count, scores + ceil4(count));
      this.matmul(z + h * D, scores, values, 0, 1, D, count, 0, slots, 0);
    }
  }

  // Apply an activation function to `count` numbers in place.
  activate(x, count, name) {
    const m = this.floats, activation = ACTIVATIONS[name];
    for (let i = x; i < x + count; i++) m[i] = activation(m[i]);
  }

  // Add `count` numbers to x.
  add(x, added, count) {
    const m = this.floats;
    for (let i = 0; i < count; i++) m[x + i] += m[added + i];
  }
}

class WasmKernels extends PlainKernels {
  simd = true;
  slice = 2e7;

  constructor(memory, wasm) {
    super();
    this.memory = memory;
    this.wasm = wasm; // exports of kernels.wasm
    this.floats = new Float32Array(memory.buffer);
  }

  grow(size) {
    this.memory.grow(Math.ceil((4 * size - this.memory.buffer.byteLength) / PAGE_BYTES));
    this.floats = new Float32Array(this.memory.buffer);
  }

  matmul(y, x, w, bias, n, rows, cols, xStride, wStride, yStride) {
    this.wasm.matmul(4 * y, 4 * x, 4 * w, 4 * bias, n, rows, cols, 4 * xStride, 4 * wStride, 4 * yStride);
  }

  norm(y, x, weight, bias, C) {
    if (C % 4) return super.norm(y, x, weight, bias, C);
    this.wasm.norm(4 * y, 4 * x, 4 * weight, 4 * bias, C);
  }

  attend(z, qkv, keys, values, scores, biases, H, D, slots, slot, count, biasStride) {
    [z, qkv, keys, values] = [4 * z, 4 * qkv, 4 * keys, 4 * values];
    this.wasm.attend(z, qkv, keys, values, 4 * scores, 4 * biases, H, D, slots, slot, count, 4 * biasStride);
  }

  activate(x, count, name) {
    this.wasm[name](4 * x, count);
  }

  add(x, added, count) {
    this.wasm.add(4 * x, 4 * added, count);
  }
}

// wasm: the bytes of kernels.wasm, or null for plain JavaScript.
async function makeKernels(wasm) {
  try {
    const memory = new WebAssembly.Memory({initial: 1});
    const {instance} = await WebAssembly.instantiate(wasm, {memory: {memory}});
    return new WasmKernels(memory, instance.exports);
  } catch { // no WebAssembly, no SIMD, or forbidden by the browser
    return new PlainKernels();
  }
}

// --- activations and float16 -----------------------------------------------------------------------------------------

// Coefficients of t, t^2, ... with t = 1 / (1 + 0.3 |x|), fitted to exp(x^2 / 2) (1 - Phi(|x|)), where Phi is the
// standard normal CDF. The relative error is below 5e-9.
const NORMAL_TAIL = [
  0.1196874067, 0.1195572413, 0.1103611909, 0.07778385839, 0.09795569746,
  -0.08284755081, 0.1959741857, -0.2314002865, 0.1138065163, -0.02087826143,
];

const ACTIVATIONS = {
  gelu(x) { // x Phi(x)
    const t = 1 / (1 + 0.3 * Math.abs(x));
    let tail = 0;
    for (let i = NORMAL_TAIL.length - 1; i >= 0; i--) tail = (tail + NORMAL_TAIL[i]) * t;
    tail *= Math.exp(-0.5 * x * x);
    return x * (x < 0 ? tail : 1 - tail);
  },
  gelu_new(x) { // x / 2 (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh(u)) / 2 is
    return x / (1 + Math.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))); // the logistic function of 2u
  },
};

// Decode the 16 bits of an IEEE half-precision float.
function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}

let halfFloats = null; // all 65,536 values, by their bits

// A row of a parameter in the format of a file; see setWeights.
function readRow(bytes, {name, shape, dtype, offset, scales}, row) {
  const {buffer, byteOffset: base} = bytes, cols = shape.at(-1), begin = base + offset;
  if (dtype === "float32") return new Float32Array(buffer, begin + 4 * row * cols, cols);
  const values = new Float32Array(cols);
  if (dtype === "float16") {
    halfFloats ??= Float32Array.from({length: 65536}, (_, bits) => halfToFloat(bits));
    const halves = new Uint16Array(buffer, begin + 2 * row * cols, cols);
    for (let i = 0; i < cols; i++) values[i] = halfFloats[halves[i]];
  } else if (dtype === "int8") {
    const integers = new Int8Array(buffer, begin + row * cols, cols);
    const [scale] = new Float32Array(buffer, base + scales + 4 * row, 1);
    for (let i = 0; i < cols; i++) values[i] = integers[i] * scale;
  } else {
    throw new Error(`${name} has the unknown dtype ${dtype}`);
  }
  return values;
}

// --- positions: see model.py; in float32 -----------------------------------------------------------------------------

// 10000^(2i / size) for i = 0 ... size / 2 - 1: at position p, the angles are p divided by these.
function wavelengths(size) {
  return Float32Array.from({length: Math.ceil(size / 2)}, (_, i) => 10000 ** Math.fround(2 * i / size));
}

// The position embedding (C,) of Vaswani et al. 2017, divided by sqrt(C).
function sinusoids(position, C) {
  const angles = wavelengths(C).map(wavelength => position / wavelength);
  const waves = Float32Array.from({length: C}, (_, c) => c % 2 ? Math.cos(angles[c >> 1]) : Math.sin(angles[c >> 1]));
  return waves.map(wave => wave / Math.fround(Math.sqrt(C)));
}

// Rotary embedding: the rotation of queries and keys at a position. angles, cosines and sines are (D / 2,).
class Rotation {
  constructor(D) {
    this.wavelengths = wavelengths(D);
    [this.angles, this.cosines, this.sines] = [0, 1, 2].map(() => new Float32Array(D / 2));
  }

  moveTo(position) {
    if (position === this.position) return;
    this.position = position;
    for (let i = 0; i < this.angles.length; i++) {
      this.angles[i] = position / this.wavelengths[i];
      this.cosines[i] = Math.cos(this.angles[i]);
      this.sines[i] = Math.sin(this.angles[i]);
    }
  }

  // Rotate a query or key (D,) in place: channels i and i + D / 2 are a plane (Su et al. 2021).
  rotate(array, start) {
    const half = this.angles.length;
    for (let i = start; i < start + half; i++) {
      const cos = this.cosines[i - start], sin = this.sines[i - start], a = array[i], b = array[i + half];
      array[i] = a * cos - b * sin;
      array[i + half] = b * cos + a * sin;
    }
  }
}

// T5's bucket of a distance in tokens: 16 buckets for one distance each, and 16 of exponentially growing width.
function relativeBucket(distance) {
  if (distance < 16) return distance;
  const logDistance = Math.fround(Math.fround(Math.log(distance / 16)) / Math.log(8));
  return Math.min(16 + Math.floor(Math.fround(logDistance * 16)), 31);
}

// The slope of a head: penalty per token of distance (Press et al. 2022).
function alibiSlope(head, H) {
  const power = 2 ** Math.floor(Math.log2(H));
  const h = head < power ? head + 1 : head - power + 0.5;
  return Math.fround(2 ** (-8 * h / power));
}

// --- the model -------------------------------------------------------------------------------------------------------

const CHUNK_TOKENS = 16; // maximum number of tokens computed at once
const EPSILON = 1e-5; // of LayerNorm

// KV cache of the newest S tokens of a row: the token at position p is in slot p % S.
class Cache {
  length = 0; // tokens so far

  constructor(index) {
    this.index = index; // of the keys (H, slots, D) and values (H, D, slots) of each layer
  }
}

class GPT {
  // header: {config, parameters: [{name, shape, dtype, offset, scales}]}; see setWeights.
  constructor(header, kernels) {
    const {n_embd: C, n_head: H, n_layer: L, block_size: S, vocab_size: V, position} = header.config, n = CHUNK_TOKENS;
    this.header = header;
    this.config = header.config;
    this.kernels = kernels;
    this.parameters = new Map(); // {shape, index} by name
    for (const {name, shape} of header.parameters) {
      const size = shape.length === 1 ? shape[0] : packedSize(...shape);
      this.parameters.set(name, {shape, index: kernels.allocate(size)});
    }
    this.parameters.set("lm_head.weight", this.parameters.get("transformer.wte.weight")); // tied
    this.blocks = Array.from({length: L}, (_, layer) => `transformer.h.${layer}`).map(block => ({
      ln_1: this.module(`${block}.ln_1`),
      attn: {c_attn: this.module(`${block}.attn.c_attn`), c_proj: this.module(`${block}.attn.c_proj`)},
      ln_2: this.module(`${block}.ln_2`),
      mlp: {c_fc: this.module(`${block}.mlp.c_fc`), c_proj: this.module(`${block}.mlp.c_proj`)},
    }));
    this.ln_f = this.module("transformer.ln_f");
    this.lm_head = this.module("lm_head");

    // Buffers of a forward pass, in the order of computation. Kernels may write up to 4 numbers after the last row.
    this.width = ceil4(C); // stride between rows of C numbers
    this.x = kernels.allocate(n * this.width + 4); // the residual stream
    this.normed = kernels.allocate(n * this.width + 4);
    this.qkv = kernels.allocate(n * ceil4(3 * C) + 4);
    this.scores = kernels.allocate(S + 4); // of one query; becomes its weights
    this.z = kernels.allocate(n * this.width + 4); // the heads' outputs
    this.added = kernels.allocate(n * this.width + 4); // output of attention or the MLP
    this.hidden = kernels.allocate(n * 4 * C + 4); // neurons of the MLP
    this.logits = kernels.allocate(n * ceil4(V) + 4);

    this.input = kernels.allocate(n * 4 * C); // buffers of inChunks, which may run while a forward pass pauses
    this.output = kernels.allocate(n * ceil4(Math.max(V, 4 * C)));

    this.slots = ceil4(S); // in a cache
    this.layerSize = 2 * H * packedSize(S, C / H); // keys and values of a layer in a cache
    this.cacheSize = L * this.layerSize;
    this.freeCaches = [];
    this.rotation = position === "rotary" ? new Rotation(C / H) : null;
    this.canSlide = ["rotary", "relative", "alibi"].includes(position); // a full context can slide over cached keys
    this.biases = null; // see distanceBiases
    // The same in the memory, (H, 2S): in reverse order and twice, so that for a token in any slot, those of the slots
    // 0, 1, ... are consecutive.
    this.slotBiases = ["relative", "alibi"].includes(position) ? kernels.allocate(2 * H * S + 4) : 0;
    this.work = 0; // multiplications since the last pause
  }

  // The weight of a linear layer or norm, (rows, cols) or (cols,), and its bias, or 0.
  module(name) {
    const {shape, index} = this.parameters.get(`${name}.weight`);
    return {weight: index, bias: this.parameters.get(`${name}.bias`)?.index ?? 0, rows: shape[0], cols: shape.at(-1)};
  }

  // bytes: all parameters in the format of a file, little-endian. int8 has a float32 scale per row, at the offset
  // `scales`: a weight is its integer times the scale.
  *setWeights(bytes) {
    for (const parameter of this.header.parameters) {
      const {shape, index} = this.parameters.get(parameter.name), cols = shape.at(-1);
      for (let row = 0; row < sizeOf(shape) / cols; row++) {
        const values = readRow(bytes, parameter, row), m = this.kernels.floats;
        if (shape.length === 1) m.set(values, index);
        else packRow(m, index, row, values);
        if (this.needsPause(cols)) yield;
      }
    }
    this.biases = this.distanceBiases();
    const {n_head: H, block_size: S} = this.config, m = this.kernels.floats;
    for (let i = 0; this.biases && i < 2 * H * S; i++) {
      m[this.slotBiases + i] = this.biases[Math.floor(i / (2 * S)) * S + (2 * S - i % (2 * S)) % S];
    }
  }

  // The position bias of a score, by head and distance: (H, S), or null.
  distanceBiases() {
    const {position, n_head: H, block_size: S} = this.config;
    if (position === "alibi") {
      return Float32Array.from({length: H * S}, (_, i) => -alibiSlope(Math.floor(i / S), H) * (i % S));
    }
    if (position !== "relative") return null;
    const {data} = this.param("transformer.relative_bias.weight"); // (32, H)
    return Float32Array.from({length: H * S}, (_, i) => data[relativeBucket(i % S) * H + Math.floor(i / S)]);
  }

  // A copy of a parameter as {data, shape}.
  param(name) {
    const {shape, index} = this.parameters.get(name), data = new Float32Array(sizeOf(shape)), cols = shape.at(-1);
    if (shape.length === 1) data.set(this.kernels.floats.subarray(index, index + cols));
    else for (let row = 0; row < shape[0]; row++) data.set(this.row(name, row), row * cols);
    return {data, shape};
  }

  // A copy of a row of a matrix.
  row(name, row) {
    const {shape: [, cols], index} = this.parameters.get(name), m = this.kernels.floats, stride = ceil4(cols);
    const result = new Float32Array(cols);
    for (let col = 0; col < cols; col++) result[col] = m[index + packedIndex(row, col, stride)];
    return result;
  }

  // --- the forward pass ----------------------------------------------------------------------------------------------

  // Compute n tokens: ids[i] is appended to caches[i]. Several tokens may belong to the same cache, in order. Returns
  // the logits (logitCount, V) of the last `logitCount` tokens, or null; they are valid until the next call or
  // allocation. During pauses, anything but another forward pass may be computed.
  *forward(caches, ids, logitCount) {
    const {n_embd: C, vocab_size: V, block_size: S, activation} = this.config, {kernels, width} = this, n = ids.length;
    const positions = caches.map(cache => cache.length++);
    for (let i = 0; i < n; i++) this.embedToken(this.x + i * width, ids[i], positions[i]);
    for (const [layer, block] of this.blocks.entries()) {
      this.norm(this.normed, this.x, block.ln_1, n);
      yield* this.linearInSlices(this.qkv, this.normed, block.attn.c_attn, n);
      for (let i = 0; i < n; i++) {
        this.attend(this.z + i * width, this.qkv + i * ceil4(3 * C), layer, caches[i], positions[i]);
        if (this.needsPause(2 * C * Math.min(positions[i] + 1, S))) yield;
      }
      yield* this.linearInSlices(this.added, this.z, block.attn.c_proj, n);
      kernels.add(this.x, this.added, n * width);

      this.norm(this.normed, this.x, block.ln_2, n);
      yield* this.linearInSlices(this.hidden, this.normed, block.mlp.c_fc, n);
      kernels.activate(this.hidden, n * 4 * C, activation);
      yield* this.linearInSlices(this.added, this.hidden, block.mlp.c_proj, n);
      kernels.add(this.x, this.added, n * width);
    }
    if (logitCount === 0) return null;
    this.norm(this.normed, this.x + (n - logitCount) * width, this.ln_f, logitCount);
    yield* this.linearInSlices(this.logits, this.normed, this.lm_head, logitCount);
    copyRows(kernels.floats, this.logits, V, kernels.floats, this.logits, ceil4(V), V, logitCount);
    return kernels.floats.subarray(this.logits, this.logits + logitCount * V);
  }

  // x (C,) = the token embedding, plus the position embedding if there is one.
  embedToken(x, id, position) {
    const {n_embd: C, position: method} = this.config, m = this.kernels.floats;
    const wte = this.parameters.get("transformer.wte.weight").index;
    for (let c = 0; c < C; c++) m[x + c] = m[wte + packedIndex(id, c, this.width)];
    if (method === "learned") {
      const wpe = this.parameters.get("transformer.wpe.weight").index;
      for (let c = 0; c < C; c++) m[x + c] += m[wpe + packedIndex(position, c, this.width)];
    } else if (method === "sinusoidal") {
      const added = sinusoids(position, C);
      for (let c = 0; c < C; c++) m[x + c] += added[c];
    }
  }

  // LayerNorm: y (n, C) = normalized rows of x (n, C), times the weight, plus the bias.
  norm(y, x, {weight, bias, cols: C}, n) {
    for (let i = 0; i < n; i++) this.kernels.norm(y + i * this.width, x + i * this.width, weight, bias, C);
  }

  // y (n, rows) = x (n, cols) weight^T + bias.
  *linearInSlices(y, x, {weight, bias, rows, cols}, n) {
    const stride = ceil4(cols), slice = ceil4(Math.ceil(this.kernels.slice / (n * cols))); // rows of the weight
    for (let row = 0; row < rows; row += slice) {
      const count = Math.min(slice, rows - row), w = weight + row * stride;
      this.kernels.matmul(y + row, x, w, bias && bias + row, n, count, cols, stride, stride, ceil4(rows));
      if (this.needsPause(n * count * cols)) yield;
    }
  }

  // Whether to pause after `work` further multiplications.
  needsPause(work) {
    this.work += work;
    if (this.work < this.kernels.slice) return false;
    this.work = 0;
    return true;
  }

  // z (C,) = attention of a token with query, key and value qkv (3C,). Appends the key and value to the cache.
  attend(z, qkv, layer, cache, position) {
    const {n_embd: C, n_head: H, block_size: S} = this.config, D = C / H, {kernels, slots, rotation} = this;
    if (rotation) {
      rotation.moveTo(position);
      for (let head = 0; head < 2 * H; head++) rotation.rotate(kernels.floats, qkv + head * D); // queries and keys
    }
    const slot = position % S, keys = cache.index + layer * this.layerSize, values = keys + this.layerSize / 2;
    const biases = this.slotBiases && this.slotBiases + (S - slot) % S;
    kernels.attend(z, qkv, keys, values, this.scores, biases, H, D, slots, slot, Math.min(position + 1, S), 2 * S);
  }

  // --- decoding ------------------------------------------------------------------------------------------------------

  // Return an empty cache for one row. Release it with freeCache.
  newCache() {
    const cache = this.freeCaches.pop() ?? new Cache(this.kernels.allocate(this.cacheSize));
    this.kernels.floats.fill(0, cache.index, cache.index + this.cacheSize); // it may contain NaN
    cache.length = 0;
    return cache;
  }

  freeCache(cache) {
    this.freeCaches.push(cache);
  }

  copyCache(to, from) {
    to.length = from.length;
    this.kernels.floats.copyWithin(to.index, from.index, from.index + this.cacheSize);
  }

  // The tokens that predict the next one: those of the last document, at most S.
  context(ids) {
    const {document_token, block_size: S} = this.config;
    return ids.slice(Math.max(documentStarts(ids, document_token).at(-1), ids.length - S));
  }

  // Replace the contents of the cache by at most S tokens of one document. Returns the logits (V,) after the last one,
  // or null.
  *prefill(cache, ids) {
    let logits = null;
    cache.length = 0;
    for (let t = 0; t < ids.length; t += CHUNK_TOKENS) {
      const chunk = ids.slice(t, t + CHUNK_TOKENS), isLast = t + CHUNK_TOKENS >= ids.length;
      logits = yield* this.forward(chunk.map(() => cache), chunk, isLast ? 1 : 0);
    }
    return logits;
  }

  // Append one token per row and return the logits (n, V). At most CHUNK_TOKENS rows.
  step(caches, ids) {
    return this.forward(caches, ids, ids.length);
  }

  // --- single modules, for trace.js ----------------------------------------------------------------------------------
  //
  // Inputs and outputs are arrays outside the memory, such as x (T, C).

  // The output (T, rows) of the linear layer `name` for x (T, cols).
  linear(x, name, T) {
    const {weight, bias, rows, cols} = this.module(name);
    return this.inChunks(x, T, cols, rows, (y, input, n) =>
      this.kernels.matmul(y, input, weight, bias, n, rows, cols, ceil4(cols), ceil4(cols), ceil4(rows)));
  }

  // The output (T, C) of the norm `name` for x (T, C).
  layerNorm(x, name, T) {
    const norm = this.module(name);
    return this.inChunks(x, T, norm.cols, norm.cols, (y, input, n) => this.norm(y, input, norm, n));
  }

  activation(x) {
    return x.map(ACTIVATIONS[this.config.activation]);
  }

  // The embeddings (T, C) of tokens at these positions.
  embed(ids, positions) {
    const C = this.config.n_embd, x = new Float32Array(ids.length * C);
    ids.forEach((id, t) => {
      this.embedToken(this.input, id, positions[t]);
      x.set(this.kernels.floats.subarray(this.input, this.input + C), t * C);
    });
    return x;
  }

  // Call compute(y, x, n) for chunks of n rows, copied into the memory: (T, cols) to (T, rows).
  inChunks(x, T, cols, rows, compute) {
    const {input, output} = this, m = this.kernels.floats, result = new Float32Array(T * rows);
    for (let t = 0; t < T; t += CHUNK_TOKENS) {
      const n = Math.min(CHUNK_TOKENS, T - t);
      copyRows(m, input, ceil4(cols), x, t * cols, cols, cols, n);
      compute(output, input, n);
      copyRows(result, t * rows, rows, m, output, ceil4(rows), rows, n);
    }
    return result;
  }
}
