// Traces of a forward pass and statistics of attention heads, as in folio/decoding/trace.py.
//
// Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers. Arrays are float32 and row-major.

// Products of matrices that are not parameters.
class Products {
  // size: maximum size of a packed matrix w. width: maximum row length of any matrix.
  constructor(kernels, size, width) {
    const chunk = CHUNK_TOKENS * ceil4(width);
    this.kernels = kernels;
    [this.w, this.x, this.y] = [size, chunk, chunk].map(count => kernels.allocate(count));
  }

  // x (T, cols) w^T (cols, rows): (T, rows).
  *multiply(x, w, T, rows, cols) {
    const packed = new Float32Array(packedSize(rows, cols)), stride = ceil4(cols);
    for (let row = 0; row < rows; row++) packRow(packed, 0, row, w.subarray(row * cols, (row + 1) * cols));
    return yield* inSlices(x, T, cols, CHUNK_TOKENS, (part, n) => {
      const m = this.kernels.floats, result = new Float32Array(n * rows);
      m.set(packed, this.w);
      copyRows(m, this.x, stride, part, 0, cols, cols, n);
      this.kernels.matmul(this.y, this.x, this.w, 0, n, rows, cols, stride, stride, ceil4(rows));
      copyRows(result, 0, rows, m, this.y, ceil4(rows), rows, n);
      return result;
    });
  }
}

// Concatenate compute(rows, n) over slices of n rows of x (T, cols). Pauses after each slice.
function* inSlices(x, T, cols, slice, compute) {
  let result;
  for (let t = 0; t < T; t += slice) {
    const n = Math.min(slice, T - t), part = compute(x.subarray(t * cols, (t + n) * cols), n);
    result ??= new Float32Array(T / n * part.length);
    result.set(part, t / n * part.length);
    yield;
  }
  return result;
}

// A forward pass over token ids. switches: {mask, scale, headsOff, mlpsOff}, see Switches in folio/decoding/trace.py.
// Only the residual stream is stored; `layer` recomputes the values of a layer.
class Trace {
  constructor(gpt, products, ids, switches) {
    Object.assign(this, {gpt, products, ids, switches, T: ids.length, C: gpt.config.n_embd});
    this.starts = documentStarts(ids, gpt.config.document_token);
    this.positions = this.starts.map((start, t) => t - start); // in their documents
    this.lastLayer = null; // [index, layer], cache of `layer`
  }

  // Compute the stream (2L + 1, T, C): the input of each attention and MLP, and the final state. Runs the generator
  // onHeads(layer) for each layer.
  *compute(onHeads) {
    const {T, C} = this, {n_layer: L} = this.gpt.config;
    this.stream = new Float32Array((2 * L + 1) * T * C);
    this.stream.set(this.gpt.embed(this.ids, this.positions));
    for (let index = 0; index < L; index++) {
      const layer = yield* this.computeLayer(index);
      this.stream.set(layer.between, (2 * index + 1) * T * C);
      this.stream.set(layer.after, (2 * index + 2) * T * C);
      yield* onHeads(layer);
    }
  }

  // A state of the stream for n tokens: (n, C).
  state(index, token = 0, n = this.T) {
    const begin = (index * this.T + token) * this.C;
    return this.stream.subarray(begin, begin + n * this.C);
  }

  // --- one layer -----------------------------------------------------------------------------------------------------

  // The values of a layer. Caches only the last one, because weights are (H, T, T).
  *layer(index) {
    if (this.lastLayer?.[0] !== index) this.lastLayer = [index, yield* this.computeLayer(index)];
    return this.lastLayer[1];
  }

  // q, k, v and z are (H, T, D), weights (H, T, T), qkv (T, 3C), preactivation and hidden (T, 4C), all others (T, C).
  *computeLayer(index) {
    const {gpt, T, C} = this, name = `transformer.h.${index}`, before = this.state(2 * index);
    const ln_1 = gpt.layerNorm(before, `${name}.ln_1`, T), qkv = yield* this.linear(ln_1, `${name}.attn.c_attn`);
    const heads = yield* this.attend(index, qkv);
    const attention = yield* this.linear(this.merge(heads.z), `${name}.attn.c_proj`);
    const between = before.map((x, i) => x + attention[i]), ln_2 = gpt.layerNorm(between, `${name}.ln_2`, T);
    const preactivation = yield* this.linear(ln_2, `${name}.mlp.c_fc`);
    const hidden = yield* inSlices(preactivation, T, 4 * C, CHUNK_TOKENS, part => gpt.activation(part));
    const isOff = this.switches.mlpsOff.includes(index);
    const mlp = isOff ? new Float32Array(T * C) : yield* this.linear(hidden, `${name}.mlp.c_proj`);
    const after = between.map((x, i) => x + mlp[i]);
    return {...heads, ln_1, qkv, attention, between, ln_2, preactivation, hidden, mlp, after};
  }

  // The output (T, rows) of the linear layer `name` for x (T, cols).
  *linear(x, name, T = this.T) {
    const {rows, cols} = this.gpt.module(name), limit = Math.floor(this.gpt.kernels.slice / (rows * cols));
    const slice = Math.max(1, Math.min(limit, CHUNK_TOKENS));
    return yield* inSlices(x, T, cols, slice, (part, n) => this.gpt.linear(part, name, n));
  }

  *attend(index, qkv) {
    const {T, C, switches} = this, {n_head: H} = this.gpt.config, D = C / H, {rotation, biases} = this.gpt;
    const [q, k, v] = [0, 1, 2].map(part => this.split(qkv, part)), z = new Float32Array(T * C);
    for (let t = 0; rotation && t < T; t++) {
      rotation.moveTo(t);
      for (let h = 0; h < H; h++) [q, k].forEach(array => rotation.rotate(array, (h * T + t) * D));
    }
    const heads = {q, k, v, z, weights: new Float32Array(H * T * T)};
    for (let h = 0; h < H; h++) {
      const weights = yield* this.scores(heads, h); // after the softmax
      for (let t = 0; t < T; t++) {
        const row = t * T, isMasked = switches.mask === "before";
        const first = isMasked ? this.starts[t] : 0, end = isMasked ? t + 1 : T; // of the keys
        for (let key = first; biases && key < end; key++) weights[row + key] += this.biasAt(h, t, key);
        softmax(weights.subarray(row + first, row + end));
        if (switches.mask !== "off") {
          const hidden = 0 * weights[row + t]; // 0 or NaN
          weights.fill(hidden, row, row + this.starts[t]);
          weights.fill(hidden, row + t + 1, row + T);
        }
        if (t % CHUNK_TOKENS === 0) yield;
      }
      heads.weights.set(weights, h * T * T);
      if (switches.headsOff.some(([layer, head]) => layer === index && head === h)) continue;
      const values = v.subarray(h * T * D, (h + 1) * T * D);
      z.set(yield* this.products.multiply(weights, transpose(values, T, D), T, D, T), h * T * D);
    }
    return heads;
  }

  // q k^T / sqrt(D) of a head, (T, T).
  *scores({q, k}, head) {
    const {T, C} = this, D = C / this.gpt.config.n_head, [a, b] = [head * T * D, (head + 1) * T * D];
    const scores = yield* this.products.multiply(q.subarray(a, b), k.subarray(a, b), T, T, D);
    return this.switches.scale ? scores.map(score => score / Math.sqrt(D)) : scores;
  }

  // The position bias of a score. Future keys get the bias of the same distance.
  biasAt(head, query, key) {
    return this.gpt.biases[head * this.gpt.config.block_size + Math.abs(query - key)];
  }

  // The arguments of the softmax for a token's query, (H, T): scores with bias and mask.
  maskedScores({q, k}, token) {
    const {T, C, switches} = this, H = this.gpt.config.n_head, D = C / H, result = new Float32Array(H * T);
    for (let h = 0; h < H; h++) {
      const vector = (array, t) => array.subarray((h * T + t) * D, (h * T + t + 1) * D), query = vector(q, token);
      for (let key = 0; key < T; key++) {
        const isHidden = switches.mask === "before" && (key > token || key < this.starts[token]);
        const score = dot(query, vector(k, key)) / (switches.scale ? Math.sqrt(D) : 1);
        result[h * T + key] = isHidden ? -Infinity : score + (this.gpt.biases ? this.biasAt(h, token, key) : 0);
      }
    }
    return result;
  }

  // The queries (part 0), keys or values in qkv (T, 3C) by head: (H, T, D).
  split(qkv, part) {
    const {T, C} = this, D = C / this.gpt.config.n_head, result = new Float32Array(T * C);
    for (let t = 0; t < T; t++) {
      for (let c = 0; c < C; c++) result[(Math.floor(c / D) * T + t) * D + c % D] = qkv[(3 * t + part) * C + c];
    }
    return result;
  }

  // (H, T, D) to (T, C)
  merge(z) {
    const {T, C} = this, D = C / this.gpt.config.n_head, result = new Float32Array(T * C);
    for (let t = 0; t < T; t++) {
      for (let c = 0; c < C; c++) result[t * C + c] = z[(Math.floor(c / D) * T + t) * D + c % D];
    }
    return result;
  }

  // What each head adds to the residual stream of a token, (H, C), without c_proj's bias.
  headOutputs(index, {z}, token) {
    const {T, C} = this, H = this.gpt.config.n_head, D = C / H, result = new Float32Array(H * C);
    const {data: weight} = this.gpt.param(`transformer.h.${index}.attn.c_proj.weight`); // (C, C)
    for (let h = 0; h < H; h++) {
      for (let c = 0; c < C; c++) {
        let sum = 0;
        for (let d = 0; d < D; d++) sum += weight[c * C + h * D + d] * z[(h * T + token) * D + d];
        result[h * C + c] = sum;
      }
    }
    return result;
  }

  // A token's queries, keys and values, (3, H, D), computed with one matrix per head; before the rotation. Equal to
  // `qkv`, which is computed with one matrix for all heads.
  separateHeads(index, {ln_1}, token) {
    const {C} = this, x = ln_1.subarray(token * C, (token + 1) * C);
    const name = `transformer.h.${index}.attn.c_attn`, {data: weight} = this.gpt.param(`${name}.weight`); // (3C, C)
    const {bias} = this.gpt.module(name), m = this.gpt.kernels.floats, result = new Float32Array(3 * C);
    for (let row = 0; row < 3 * C; row++) {
      let sum = bias && m[bias + row];
      for (let c = 0; c < C; c++) sum += weight[row * C + c] * x[c];
      result[row] = sum;
    }
    return result;
  }

  // --- predictions ---------------------------------------------------------------------------------------------------

  // The logits (n, V) of n states of the residual stream.
  *logits(states, n) {
    return yield* this.linear(this.gpt.layerNorm(states, "transformer.ln_f", n), "lm_head", n);
  }

  // Call callback(log-probabilities of the next token (V,), i) for each of n states.
  *predictEach(states, n, callback) {
    const {C} = this, {vocab_size: V} = this.gpt.config;
    for (let i = 0; i < n; i += CHUNK_TOKENS) {
      const count = Math.min(CHUNK_TOKENS, n - i);
      const logits = yield* this.logits(states.subarray(i * C, (i + count) * C), count);
      for (let row = 0; row < count; row++) {
        callback(logSoftmax(logits.subarray(row * V, (row + 1) * V)), i + row);
        yield;
      }
    }
  }

  // Logit lens (nostalgebraist 2020): the k most likely next tokens of n states, {ids, probabilities}: (n, k); and the
  // probability and rank, (n,), of the token `target` (or null).
  *lens(states, n, k, target = null) {
    const lens = {ids: [], probabilities: [], targetProbability: [], targetRank: []};
    yield* this.predictEach(states, n, logs => {
      const best = topIndices(logs, k);
      lens.ids.push(...best);
      lens.probabilities.push(...best.map(id => Math.exp(logs[id])));
      if (target === null) return;
      lens.targetProbability.push(Math.exp(logs[target]));
      lens.targetRank.push(rankOf(logs, target));
    });
    return lens;
  }

  // Direct effect on a token's logits, (n, V), of n vectors added to its residual stream. The final norm uses the
  // token's own mean and standard deviation.
  *logitEffect(added, n, token) {
    const {C} = this, final = this.state(2 * this.gpt.config.n_layer, token, 1), center = meanOf(final);
    const {data: weight} = this.gpt.param("transformer.ln_f.weight");
    const deviation = Math.sqrt(meanOf(final.map(x => (x - center) ** 2)) + EPSILON), normed = new Float32Array(n * C);
    for (let i = 0; i < n; i++) {
      const vector = added.subarray(i * C, (i + 1) * C), mean = meanOf(vector);
      normed.set(vector.map((x, c) => (x - mean) / deviation * weight[c]), i * C);
    }
    return yield* this.linear(normed, "lm_head", n);
  }

  // Predictions of the next token: loss (T - 1,), in nats; rank (T - 1,): number of more likely tokens; entropy (T,);
  // best (T,): most likely token; bestProbability (T,).
  *predict() {
    const {T, ids} = this, predictions = {loss: [], rank: [], entropy: [], best: [], bestProbability: []};
    yield* this.predictEach(this.state(2 * this.gpt.config.n_layer), T, (logs, t) => {
      const [best] = topIndices(logs, 1);
      predictions.entropy.push(-logs.reduce((sum, log) => sum + Math.exp(log) * log, 0));
      predictions.best.push(best);
      predictions.bestProbability.push(Math.exp(logs[best]));
      if (t + 1 === T) return;
      predictions.loss.push(-logs[ids[t + 1]]);
      predictions.rank.push(rankOf(logs, ids[t + 1]));
    });
    return predictions;
  }
}

// --- head scores -----------------------------------------------------------------------------------------------------

// Statistics of attention weights (H, T, T) over token ids, (H,) by name. See head_scores in folio/decoding/trace.py.
function* headScores(weights, ids, H) {
  const T = ids.length, scores = Object.fromEntries(HEAD_SCORES.map(name => [name, new Array(H).fill(0)]));
  const after = []; // by query: keys after an earlier occurrence of its token
  for (const [t, id] of ids.entries()) {
    after.push(range(t).filter(key => ids[key] === id).map(key => key + 1));
    yield;
  }
  const matched = after.filter(keys => keys.length).length;
  for (let h = 0; h < H; h++) {
    const byDistance = new Float64Array(T);
    for (let t = 0; t < T; t++) {
      const row = weights.subarray((h * T + t) * T, (h * T + t + 1) * T);
      for (const key of after[t]) scores.prefix[h] += row[key] / matched;
      if (t === 0) continue;
      scores.previous[h] += row[t - 1] / (T - 1);
      scores.first[h] += row[0] / (T - 1);
      scores.itself[h] += row[t] / (T - 1);
      for (let key = 0; key < T; key++) {
        scores.distance[h] += row[key] * (t - key) / (T - 1);
        if (key <= t) byDistance[t - key] += row[key];
        if (row[key] !== 0) scores.entropy[h] -= row[key] * Math.log(row[key]) / (T - 1);
      }
      if (t % CHUNK_TOKENS === 0) yield;
    }
    scores.offset[h] = Math.max(0, byDistance.indexOf(Math.max(...byDistance))); // 0 if they are NaN
  }
  return scores;
}

// --- arrays ----------------------------------------------------------------------------------------------------------

// Adaptive pooling, as in torch: summarize(numbers of each of (height, width) blocks) of an array (rows, cols).
function* pool(array, rows, cols, height, width, summarize) {
  const result = new Float32Array(height * width), numbers = new Float32Array(array.length);
  const bounds = (i, count, size) => [Math.floor(i * size / count), Math.ceil((i + 1) * size / count)];
  for (let i = 0; i < result.length; i++) {
    const [first, end] = bounds(Math.floor(i / width), height, rows), [left, right] = bounds(i % width, width, cols);
    let size = 0;
    for (let row = first; row < end; row++, size += right - left) {
      numbers.set(array.subarray(row * cols + left, row * cols + right), size);
    }
    result[i] = summarize(numbers.subarray(0, size));
    if (i % width === 0) yield;
  }
  return result;
}

// Rows first to end - 1 of each matrix (rows, cols) of an array.
function rowsOf(array, rows, cols, first, end) {
  const count = array.length / (rows * cols), size = (end - first) * cols, result = new Float32Array(count * size);
  for (let i = 0; i < count; i++) {
    const begin = (i * rows + first) * cols;
    result.set(array.subarray(begin, begin + size), i * size);
  }
  return result;
}

// (rows, cols) to (cols, rows)
function transpose(array, rows, cols) {
  const result = new Float32Array(rows * cols);
  for (let row = 0; row < rows; row++) {
    for (let col = 0; col < cols; col++) result[col * rows + row] = array[row * cols + col];
  }
  return result;
}

function logSoftmax(logits) {
  const max = maxOf(logits);
  const logSum = Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - max), 0));
  return logits.map(logit => logit - max - logSum);
}

// 0, 1, ..., n - 1
function range(n) {
  return Array.from({length: n}, (_, i) => i);
}

// The number of values larger than values[index].
function rankOf(values, index) {
  return values.reduce((count, value) => count + (value > values[index] ? 1 : 0), 0);
}

function maxOf(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

function meanOf(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function normOf(values) {
  return Math.sqrt(dot(values, values));
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}
