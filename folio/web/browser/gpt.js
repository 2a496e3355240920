"use strict";
// The forward pass of model.py in plain JavaScript: a few tokens at a time, with a KV cache.
//
// Dimensions: n tokens computed at once, T time, S keys, C channels, H heads, D head size (C / H),
// V vocabulary, L layers. All numbers are float32 in one memory, `kernels.floats`. Variables such as `x` or `weight`
// are indices of their first elements there, and matrices are row-major.

// --- kernels ---------------------------------------------------------------------------------------------------------
//
// Nearly all time is spent in one function:
//
//   matmul(y, x, w, bias, n, rows, cols, xStride, wStride, yStride)   y[i, r] = bias[r] + sum over c of x[i, c] w[r, c]
//
// for i < n, r < rows, c < cols. A stride is the distance between two rows of a matrix; bias 0 means none. The kernel
// is matmul.wasm (source: matmul.wat), or the same in JavaScript if WebAssembly with SIMD is not available.

const PAGE_BYTES = 65536; // of WebAssembly memory
const ALIGNMENT = 16; // floats; a cache line

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

  matmul(y, x, w, bias, n, rows, cols, xStride, wStride, yStride) {
    const m = this.floats, unrolled = cols - cols % 4;
    for (let r = 0; r < rows; r++) {
      const begin = w + r * wStride, start = bias ? m[bias + r] : 0;
      for (let i = 0; i < n; i++) { // the row of weights stays in the CPU cache
        let a = x + i * xStride, b = begin, sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
        for (const end = b + unrolled; b < end; a += 4, b += 4) {
          sum0 += m[a] * m[b];
          sum1 += m[a + 1] * m[b + 1];
          sum2 += m[a + 2] * m[b + 2];
          sum3 += m[a + 3] * m[b + 3];
        }
        for (const end = begin + cols; b < end; a++, b++) sum0 += m[a] * m[b];
        m[y + i * yStride + r] = start + (sum0 + sum1) + (sum2 + sum3);
      }
    }
  }
}

class WasmKernels extends PlainKernels {
  simd = true;
  slice = 2e7;

  constructor(memory, instance) {
    super();
    this.memory = memory;
    this.instance = instance;
    this.floats = new Float32Array(memory.buffer);
  }

  grow(size) {
    this.memory.grow(Math.ceil((4 * size - this.memory.buffer.byteLength) / PAGE_BYTES));
    this.floats = new Float32Array(this.memory.buffer);
  }

  matmul(y, x, w, bias, n, rows, cols, xStride, wStride, yStride) {
    this.instance.exports.matmul(4 * y, 4 * x, 4 * w, 4 * bias, n, rows, cols, 4 * xStride, 4 * wStride, 4 * yStride);
  }
}

// wasm: the bytes of matmul.wasm, or null for plain JavaScript.
async function makeKernels(wasm) {
  try {
    const memory = new WebAssembly.Memory({initial: 1});
    const {instance} = await WebAssembly.instantiate(wasm, {memory: {memory}});
    return new WasmKernels(memory, instance);
  } catch { // no WebAssembly, no SIMD, or forbidden by the browser
    return new PlainKernels();
  }
}

const sizeOf = shape => shape.reduce((product, size) => product * size, 1);

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
    this.index = index; // of the keys (L, H, S, D), which are followed by the values (L, H, D, S)
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
      this.parameters.set(name, {shape, index: kernels.allocate(sizeOf(shape))});
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

    // Buffers of a forward pass, in the order of computation.
    this.x = kernels.allocate(n * C); // the residual stream
    this.normed = kernels.allocate(n * C);
    this.qkv = kernels.allocate(n * 3 * C);
    this.scores = kernels.allocate(S); // of one query; becomes its weights
    this.z = kernels.allocate(n * C); // the heads' outputs
    this.added = kernels.allocate(n * C); // output of attention or the MLP
    this.hidden = kernels.allocate(n * 4 * C); // neurons of the MLP
    this.logits = kernels.allocate(n * V);

    this.input = kernels.allocate(n * 4 * C); // buffers of inChunks, which may run while a forward pass pauses
    this.output = kernels.allocate(n * Math.max(V, 4 * C));

    this.valueStride = Math.ceil(S / 4) * 4; // stride between channels of the cached values
    this.cacheSize = L * C * (S + this.valueStride);
    this.freeCaches = [];
    this.rotation = position === "rotary" ? new Rotation(C / H) : null;
    this.canSlide = ["rotary", "relative", "alibi"].includes(position); // a full context can slide over cached keys
    this.biases = null; // see distanceBiases
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
    const base = bytes.byteOffset;
    for (const {name, shape, dtype, offset, scales} of this.header.parameters) {
      const m = this.kernels.floats, begin = this.parameters.get(name).index, size = sizeOf(shape);
      if (dtype === "float32") {
        m.set(new Float32Array(bytes.buffer, base + offset, size), begin);
      } else if (dtype === "float16") {
        halfFloats ??= Float32Array.from({length: 65536}, (_, bits) => halfToFloat(bits));
        const halves = new Uint16Array(bytes.buffer, base + offset, size);
        for (let i = 0; i < size; i++) m[begin + i] = halfFloats[halves[i]];
      } else if (dtype === "int8") {
        const integers = new Int8Array(bytes.buffer, base + offset, size), cols = shape.at(-1);
        const rowScales = new Float32Array(bytes.buffer, base + scales, size / cols);
        for (let row = 0, i = 0; row < rowScales.length; row++) {
          for (const end = i + cols; i < end; i++) m[begin + i] = integers[i] * rowScales[row];
        }
      } else {
        throw new Error(`${name} has the unknown dtype ${dtype}`);
      }
      if (this.needsPause(size)) yield;
    }
    this.biases = this.distanceBiases();
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

  // A parameter as {data, shape}. The data is valid until memory is allocated, for example by newCache.
  param(name) {
    const {shape, index} = this.parameters.get(name);
    return {data: this.kernels.floats.subarray(index, index + sizeOf(shape)), shape};
  }

  // --- the forward pass ----------------------------------------------------------------------------------------------

  // Compute n tokens: ids[i] is appended to caches[i]. Several tokens may belong to the same cache, in order. Returns
  // the logits (logitCount, V) of the last `logitCount` tokens, or null; they are valid until the next call or
  // allocation. During pauses, anything but another forward pass may be computed.
  *forward(caches, ids, logitCount) {
    const {n_embd: C, vocab_size: V} = this.config, n = ids.length;
    const positions = caches.map(cache => cache.length++);
    for (let i = 0; i < n; i++) this.embedToken(this.x + i * C, ids[i], positions[i]);
    for (const [layer, block] of this.blocks.entries()) {
      this.norm(this.normed, this.x, block.ln_1, n);
      yield* this.linearInSlices(this.qkv, this.normed, block.attn.c_attn, n);
      for (let i = 0; i < n; i++) {
        this.attend(this.z + i * C, this.qkv + i * 3 * C, layer, caches[i], positions[i]);
        if (this.needsPause(2 * C * Math.min(positions[i] + 1, this.config.block_size))) yield;
      }
      yield* this.linearInSlices(this.added, this.z, block.attn.c_proj, n);
      this.add(this.x, this.added, n * C);

      this.norm(this.normed, this.x, block.ln_2, n);
      yield* this.linearInSlices(this.hidden, this.normed, block.mlp.c_fc, n);
      this.activate(this.hidden, n * 4 * C);
      yield* this.linearInSlices(this.added, this.hidden, block.mlp.c_proj, n);
      this.add(this.x, this.added, n * C);
    }
    if (logitCount === 0) return null;
    this.norm(this.normed, this.x + (n - logitCount) * C, this.ln_f, logitCount);
    yield* this.linearInSlices(this.logits, this.normed, this.lm_head, logitCount);
    return this.kernels.floats.subarray(this.logits, this.logits + logitCount * V);
  }

  // x (C,) = the token embedding, plus the position embedding if there is one.
  embedToken(x, id, position) {
    const m = this.kernels.floats, C = this.config.n_embd;
    const wte = this.parameters.get("transformer.wte.weight").index + id * C;
    m.copyWithin(x, wte, wte + C);
    if (this.config.position === "learned") {
      this.add(x, this.parameters.get("transformer.wpe.weight").index + position * C, C);
    } else if (this.config.position === "sinusoidal") {
      const added = sinusoids(position, C);
      for (let c = 0; c < C; c++) m[x + c] += added[c];
    }
  }

  // LayerNorm: y (n, C) = normalized rows of x (n, C), times the weight, plus the bias.
  norm(y, x, {weight, bias, cols: C}, n) {
    const m = this.kernels.floats;
    for (let i = 0; i < n; i++, x += C, y += C) {
      let mean = 0, variance = 0;
      for (let c = 0; c < C; c++) mean += m[x + c] / C;
      for (let c = 0; c < C; c++) variance += (m[x + c] - mean) ** 2 / C;
      const scale = 1 / Math.sqrt(variance + EPSILON);
      for (let c = 0; c < C; c++) m[y + c] = (m[x + c] - mean) * scale * m[weight + c] + (bias && m[bias + c]);
    }
  }

  // y (n, rows) = x (n, cols) weight^T + bias.
  *linearInSlices(y, x, {weight, bias, rows, cols}, n) {
    const slice = Math.ceil(this.kernels.slice / (n * cols)); // rows of the weight
    for (let row = 0; row < rows; row += slice) {
      const count = Math.min(slice, rows - row), w = weight + row * cols;
      this.kernels.matmul(y + row, x, w, bias && bias + row, n, count, cols, cols, cols, rows);
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
    const {n_embd: C, n_head: H, block_size: S} = this.config, D = C / H, m = this.kernels.floats;
    const slot = position % S, keyCount = Math.min(position + 1, S), stride = this.valueStride;
    const scale = 1 / Math.sqrt(D), scores = this.scores;
    const keys = cache.index + layer * C * (S + stride), values = keys + C * S; // (H, S, D) and (H, D, S)
    this.rotation?.moveTo(position);
    for (let h = 0; h < H; h++) {
      const q = qkv + h * D, k = q + C, v = k + C, headKeys = keys + h * S * D, headValues = values + h * D * stride;
      this.rotation?.rotate(m, q);
      this.rotation?.rotate(m, k);
      m.copyWithin(headKeys + slot * D, k, k + D);
      for (let d = 0; d < D; d++) m[headValues + d * stride + slot] = m[v + d];

      this.kernels.matmul(scores, q, headKeys, 0, 1, keyCount, D, D, D, keyCount);
      for (let s = 0; s < keyCount; s++) {
        m[scores + s] *= scale;
        if (this.biases) m[scores + s] += this.biases[h * S + (position - s) % S]; // the distance of slot s
      }
      softmax(m.subarray(scores, scores + keyCount));
      this.kernels.matmul(z + h * D, scores, headValues, 0, 1, D, keyCount, keyCount, stride, D);
    }
  }

  // Add `count` numbers to x.
  add(x, added, count) {
    const m = this.kernels.floats;
    for (let i = 0; i < count; i++) m[x + i] += m[added + i];
  }

  // Apply the activation function to `count` numbers in place.
  activate(x, count) {
    const m = this.kernels.floats, activation = ACTIVATIONS[this.config.activation];
    for (let i = x; i < x + count; i++) m[i] = activation(m[i]);
  }

  // --- decoding ------------------------------------------------------------------------------------------------------

  // Return an empty cache for one row. Release it with freeCache.
  newCache() {
    const cache = this.freeCaches.pop() ?? new Cache(this.kernels.allocate(this.cacheSize));
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

  // Replace the contents of the cache by at most S tokens. Returns the logits (V,) after the last one, or null.
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
      this.kernels.matmul(y, input, weight, bias, n, rows, cols, cols, cols, rows));
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
      m.set(x.subarray(t * cols, (t + n) * cols), input);
      compute(output, input, n);
      result.set(m.subarray(output, output + n * rows), t * rows);
    }
    return result;
  }
}
