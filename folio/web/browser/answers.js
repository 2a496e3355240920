// Answers the page's questions about a model with the same facts and tensors as folio/web/questions.py.
//
// Constants that no script declares, such as THUMBNAIL_SIZE, come from CONSTANTS in folio/web/html_file.py.
//
// Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers.

const MAX_TRACES = 4; // cached traces
const TABLE_ROWS = 64; // rows of the embedding table per matrix product
const MAX_POWER_ITERATIONS = 10_000;
const POWER_TOLERANCE = 1e-9; // change of a component of the unit vector per iteration
const PAUSE_INTERVAL = 1 << 18; // numbers processed between two pauses

// Fields of a question. See Question in folio/web/questions.py.
const OPTIONAL_INTEGER = {...INTEGER, default: null, optional: true};
const TEXT = {type: "text", default: ""};
const QUESTION = {
  kind: TEXT, model: INTEGER, step: OPTIONAL_INTEGER, layer: INTEGER, head: INTEGER, token: INTEGER, first: INTEGER,
  source: INTEGER, name: TEXT, row: OPTIONAL_INTEGER, since: INTEGER, text: TEXT,
  mask: {type: ["before", "after", "off"], default: "before"}, scale: {type: "True or False", default: true},
  heads_off: TEXT, mlps_off: TEXT, whole: {type: "True or False", default: false},
};
const NO_SWITCHES = {mask: "before", scale: true, headsOff: [], mlpsOff: []};

class Answers {
  // header: the file's header (see make_header in folio/web/html_file.py). search: a TrainingSearch, or null.
  constructor(gpt, tokenizer, header, search = null) {
    const {n_embd: C} = gpt.config, rows = Math.max(header.limit, TABLE_ROWS);
    Object.assign(this, {gpt, tokenizer, header, search, config: gpt.config});
    this.products = new Products(gpt.kernels, packedSize(rows, C), Math.max(rows, C));
    this.traces = new Map(); // by ids and switches, the last used at the end
    this.probe = null; // the prefix-matching scores (L, H)
    this.plane = null; // principal plane of the vocabulary
  }

  // Answer a question: {facts, tensors}. A tensor is {shape, data}, and its data is not shared. Throws an Error if the
  // question is invalid.
  *answer(body) {
    const question = readQuestion(QUESTION, body, this.tokenizer.vocabSize), {kind, ids} = question;
    const {limit} = this.header;
    if (!KINDS.includes(kind)) throw new Error(`kind=${quoted(kind)}: it must be one of ${KINDS.join(", ")}`);
    if (ids.length > limit) throw new Error(`ids has ${grouped(ids.length)} tokens; the limit is ${grouped(limit)}`);
    const {facts = {}, tensors = {}} = yield* this[kind](question);
    return {facts: finite(facts), tensors};
  }

  // --- parsing -------------------------------------------------------------------------------------------------------

  // Parse the switches of a question.
  switches({mask, scale, heads_off, mlps_off}) {
    const {n_layer: L, n_head: H} = this.config, split = text => text.split(",").filter(Boolean);
    const headsOff = split(heads_off).map(pair => pair.split(".").map(parseInteger));
    const mlpsOff = split(mlps_off).map(parseInteger), isBelow = (number, count) => number >= 0 && number < count;
    if (headsOff.some(pair => pair.length !== 2) || [...headsOff.flat(), ...mlpsOff].some(Number.isNaN)) {
      throw new Error("heads_off must be comma-separated LAYER.HEAD, and mlps_off comma-separated layers");
    }
    if (!headsOff.every(([layer, head]) => isBelow(layer, L) && isBelow(head, H))
      || !mlpsOff.every(layer => isBelow(layer, L))) {
      throw new Error(`the model has ${L} layers of ${H} heads`);
    }
    return {mask, scale, headsOff, mlpsOff};
  }

  // The trace for a question.
  *trace(question) {
    const {n_layer: L, n_head: H} = this.config, {ids, layer, head, token} = question;
    const switches = this.switches(question);
    requireIds(question);
    if (layer >= L || head >= H || token >= ids.length) {
      throw new Error(`layer, head, and token must be less than ${L}, ${H}, and ${grouped(ids.length)}`);
    }
    this.requireStep(question);
    const key = JSON.stringify([ids, switches]);
    const trace = this.traces.get(key) ?? (yield* this.newTrace(ids, switches));
    this.traces.delete(key);
    this.traces.set(key, trace);
    if (this.traces.size > MAX_TRACES) this.traces.delete(this.traces.keys().next().value);
    return trace;
  }

  // A trace with headScores (L, H) by name and thumbnails (L, H, n, n) of uint8: square roots of max-pooled weights, so
  // that a thin diagonal remains.
  *newTrace(ids, switches) {
    const trace = new Trace(this.gpt, this.products, ids, switches), {n_head: H} = this.config, T = ids.length;
    trace.thumbnails = [];
    trace.headScores = Object.fromEntries(HEAD_SCORES.map(name => [name, []]));
    yield* trace.compute(function* ({weights}) {
      for (let h = 0, n = Math.min(THUMBNAIL_SIZE, T); h < H; h++) {
        const small = yield* pool(weights.subarray(h * T * T, (h + 1) * T * T), T, T, n, n, maxOf);
        trace.thumbnails.push(...small.map(x => Math.round(255 * Math.sqrt(Math.max(0, Math.min(x, 1))))));
      }
      const scores = yield* headScores(weights, ids, H);
      for (const name of HEAD_SCORES) trace.headScores[name].push(...scores[name]);
    });
    return trace;
  }

  // A file has one checkpoint.
  requireStep({step}) {
    const {name, step: own} = this.header;
    if (step !== null && step !== own) throw new Error(`${name} has no checkpoint of step ${grouped(step)}`);
  }

  // --- questions -----------------------------------------------------------------------------------------------------

  // The model, the text of all tokens, and the bytes (hexadecimal, by id) of tokens without text.
  *models() {
    const {header, tokenizer} = this, pieces = [], bytes = {};
    for (let id = 0; id < this.config.vocab_size; id++) {
      const piece = tokenizer.piece(id), hex = id < tokenizer.vocabSize ? hexOf(tokenizer.tokenBytes(id)) : "";
      if (!piece || hex !== hexOf(bytesOf(piece))) bytes[id] = hex;
      pieces.push(piece);
      if (id % 256 === 0) yield;
    }
    const {name, config, vocab_size, eot, step, checkpoints, limit, can_slide, num_params, text} = header;
    const model = {name, config, vocab_size, eot, step, checkpoints, limit, can_slide, num_params};
    model.tokenizer = tokenizer.kind;
    model.training = header.training;
    model.parameters = header.parameters.map(({name, shape}) => ({name, shape}));
    return {facts: {models: [model], pieces, bytes, text}};
  }

  // The ids of a text, as in sample.py. Unless `whole`, they are cut at the context length.
  *tokens({text, whole}) {
    const characters = Array.from(text).length;
    if (characters > MAX_CHARACTERS) {
      throw new Error(`text: it has ${grouped(characters)} characters; the limit is ${grouped(MAX_CHARACTERS)}`);
    }
    const {ids, unknown} = encodePrompt(this.tokenizer, text);
    return {facts: {ids: whole ? ids : ids.slice(0, this.header.limit), tokens: ids.length, unknown}};
  }

  // The loss of every token, and a thumbnail and scores of every head.
  *overview(question) {
    const trace = yield* this.trace(question), {T, C} = trace, {n_layer: L, n_head: H} = this.config;
    const {loss, rank, entropy, best, bestProbability} = trace.predictions ??= yield* trace.predict();
    const norms = Array.from({length: (2 * L + 1) * T}, (_, i) => normOf(trace.stream.subarray(i * C, (i + 1) * C)));
    const scores = {...trace.headScores, prefix: yield* this.prefixScores()}, n = Math.min(THUMBNAIL_SIZE, T);
    const tensors = {
      loss: floats([T - 1], loss),
      rank: integers([T - 1], rank),
      entropy: floats([T], entropy),
      best: integers([T], best),
      best_probability: floats([T], bestProbability),
      norms: floats([2 * L + 1, T], norms),
      thumbnails: {shape: [L, H, n, n], data: Uint8Array.from(trace.thumbnails)},
    };
    for (const name of HEAD_SCORES) tensors[`score_${name}`] = floats([L, H], scores[name]);
    return {facts: {mean_loss: meanOf(loss)}, tensors};
  }

  // The prefix-matching scores of all heads on repeated random tokens: (L, H).
  *prefixScores() {
    this.probe ??= (yield* this.newTrace(this.header.probe_ids, NO_SWITCHES)).headScores.prefix;
    return this.probe;
  }

  // All intermediate values of a head.
  *head(question) {
    const {head} = question, trace = yield* this.trace(question), {T} = trace, D = trace.C / this.config.n_head;
    const layer = yield* trace.layer(question.layer), {biases} = this.gpt;
    const scores = floats([T, T], yield* trace.scores(layer, head));
    const ofHead = (name, cols) => floats([T, cols], layer[name].subarray(head * T * cols, (head + 1) * T * cols));
    const tensors = {q: ofHead("q", D), k: ofHead("k", D), v: ofHead("v", D), scores};
    if (biases) tensors.bias = floats([T, T], range(T * T).map(i => trace.biasAt(head, Math.floor(i / T), i % T)));
    return {tensors: {...tensors, weights: ofHead("weights", T), z: ofHead("z", D)}};
  }

  // The values of a layer for a token, and their effects on the prediction.
  *layer(question) {
    const {layer: index, token} = question, trace = yield* this.trace(question), layer = yield* trace.layer(index);
    const {T, C} = trace, {n_head: H} = this.config, D = C / H;
    const ofToken = (name, size) => floats([size], layer[name].subarray(token * size, (token + 1) * size)); // (T, size)
    const byHead = (name, size) => floats([H, size], Float32Array.from({length: H * size}, // (H, T, size)
      (_, i) => layer[name][(Math.floor(i / size) * T + token) * size + i % size]));

    const {data: weight} = this.gpt.param(`transformer.h.${index}.mlp.c_proj.weight`); // (C, 4C)
    const {data: hidden} = ofToken("hidden", 4 * C), headOutputs = trace.headOutputs(index, layer, token);
    const column = neuron => Float32Array.from({length: C}, (_, c) => weight[4 * C * c + neuron]);
    const columnNorms = new Float32Array(4 * C), written = new Float32Array(C);
    for (let c = 0; c < C; c++) {
      const row = weight.subarray(4 * C * c, 4 * C * (c + 1));
      for (let neuron = 0; neuron < 4 * C; neuron++) columnNorms[neuron] += row[neuron] ** 2;
      written[c] = dot(row, hidden);
    }
    for (let neuron = 0; neuron < 4 * C; neuron++) columnNorms[neuron] = Math.sqrt(columnNorms[neuron]);
    const strongest = topIndices(columnNorms.map((norm, neuron) => norm * Math.abs(hidden[neuron])), TOP_NEURONS);
    const added = new Float32Array((H + strongest.length) * C);
    added.set(headOutputs);
    strongest.forEach((neuron, i) => added.set(column(neuron).map(x => x * hidden[neuron]), (H + i) * C));
    const effects = logitEffects(yield* trace.logitEffect(added, H + strongest.length, token), this.config.vocab_size);

    const neurons = strongest.map((neuron, i) => ({index: neuron, ...effects[H + i]}));
    return {facts: {heads: effects.slice(0, H), neurons}, tensors: {
      ln_1: ofToken("ln_1", C),
      qkv: ofToken("qkv", 3 * C),
      attention: ofToken("attention", C),
      ln_2: ofToken("ln_2", C),
      preactivation: ofToken("preactivation", 4 * C),
      hidden: ofToken("hidden", 4 * C),
      mlp: ofToken("mlp", C),
      q: byHead("q", D),
      k: byHead("k", D),
      v: byHead("v", D),
      z: byHead("z", D),
      weights: byHead("weights", T),
      head_outputs: floats([H, C], headOutputs),
      separate_heads: floats([3, H, D], trace.separateHeads(index, layer, token)),
      column_norms: floats([4 * C], columnNorms), // norms of the output of a neuron with activation 1
      neuron_activations: floats([strongest.length, T], // of the strongest neurons for all tokens
        strongest.flatMap(neuron => range(T).map(t => layer.hidden[4 * C * t + neuron]))),
      neuron_outputs: floats([strongest.length, C], added.slice(H * C)), // what they add to the token
      written: floats([C], written), // sum over all neurons, without c_proj's bias, even if the MLP is off
      before: floats([C], trace.state(2 * index, token, 1)),
      between: floats([C], trace.state(2 * index + 1, token, 1)),
      after: floats([C], trace.state(2 * index + 2, token, 1)),
    }};
  }

  // The values of all layers for a window of n tokens, from `first` to `token`. See TraceProvider.machine.
  *machine(question) {
    const {first, token} = question, end = token + 1, n = end - first;
    if (first > token) throw new Error(`first=${first}: it must be at most token=${token}`);
    const trace = yield* this.trace(question), {T, C} = trace, {n_layer: L, n_head: H} = this.config, D = C / H;
    const zeros = shape => ({shape, data: new Float32Array(shape.reduce((a, b) => a * b))});
    const ofHeads = [L, H, n, D], ofKeys = [L, H, n], ofTokens = [L, n, C];
    const tensors = {
      states: floats([2 * L + 1, n, C], rowsOf(trace.stream, T, C, first, end)),
      q: zeros(ofHeads), k: zeros(ofHeads), v: zeros(ofHeads), scores: zeros(ofKeys), weights: zeros(ofKeys),
      earlier: zeros([L, H]), z: zeros([L, H, D]),
      attention: zeros(ofTokens), hidden: zeros([L, n, 4 * C]), mlp: zeros(ofTokens),
    };
    for (let index = 0; index < L; index++) {
      const layer = yield* trace.layer(index), weights = rowsOf(layer.weights, T, T, token, end); // (H, T)
      const put = (name, values) => tensors[name].data.set(values, index * values.length);
      for (const name of ["q", "k", "v"]) put(name, rowsOf(layer[name], T, D, first, end));
      put("scores", rowsOf(trace.maskedScores(layer, token), T, 1, first, end));
      put("weights", rowsOf(weights, T, 1, first, end));
      put("earlier", range(H).map(h => weights.subarray(h * T, h * T + first).reduce((sum, x) => sum + x, 0)));
      put("z", rowsOf(layer.z, T, D, token, end));
      for (const name of ["attention", "mlp"]) put(name, rowsOf(layer[name], T, C, first, end));
      put("hidden", rowsOf(layer.hidden, T, 4 * C, first, end));
    }
    return {tensors};
  }

  // A head's attention weights (N, S) from the tokens from `token` on to the first S = `source` tokens. heads: [layer,
  // head, coverage] of all heads, by decreasing coverage: the largest weight of each source token, averaged.
  *alignment(question) {
    const trace = yield* this.trace(question), {T} = trace, {n_layer: L, n_head: H} = this.config, {token} = question;
    const S = Math.min(question.source, T), N = T - token, heads = [], weights = new Float32Array(N * S);
    for (let layer = 0; layer < L; layer++) {
      const {weights: all} = yield* trace.layer(layer);
      for (let head = 0; head < H; head++) {
        const best = new Float32Array(S);
        for (let n = 0; n < N; n++) {
          const begin = (head * T + token + n) * T, row = all.subarray(begin, begin + S);
          row.forEach((weight, s) => best[s] = Math.max(best[s], weight));
          if (layer === question.layer && head === question.head) weights.set(row, n * S);
        }
        heads.push([layer, head, meanOf(best)]);
      }
    }
    return {facts: {heads: heads.sort((a, b) => b[2] - a[2])}, tensors: {weights: floats([N, S], weights)}};
  }

  // The notes of a piece, and each head's attention from a token to them: weights (H, N + 1); the last column sums all
  // other events. See TraceProvider.notes for the facts.
  *notes(question) {
    const trace = yield* this.trace(question), {T} = trace, {token, ids} = question, {music} = this.header;
    if (!music) throw new Error("this is not a model of music");
    const {notes, times} = placeNotes(ids.map(id => this.tokenizer.piece(id).trim()), music), {steps} = music;
    const {weights} = yield* trace.layer(question.layer), {n_head: H} = this.config, N = notes.length;
    const owner = new Array(T).fill(N), byNote = new Float32Array(H * (N + 1));
    notes.forEach(({positions}, number) => positions.forEach(t => t === null || (owner[t] = number)));
    for (let h = 0; h < H; h++) {
      for (let t = 0; t < T; t++) byNote[h * (N + 1) + owner[t]] += weights[(h * T + token) * T + t];
    }
    const facts = {
      notes: notes.map(({start, end, pitch, velocity, positions: [on, , off]}) =>
        ({name: pitchName(pitch), start: start / steps, end: end / steps, pitch, velocity, on, off})),
      unit: music.time,
      seconds: 60 / music.tempo / steps * steps,
      note: owner[token] < N ? owner[token] : -1,
      before: token ? times[token - 1] / steps : 0,
      time: times[token] / steps,
      end: times.at(-1) / steps,
    };
    return {facts, tensors: {weights: floats([H, N + 1], byNote)}};
  }

  // A token's embedding and its states in the residual stream, with the logit lens.
  *token(question) {
    const trace = yield* this.trace(question), {C, ids} = trace, {token} = question, n = 2 * this.config.n_layer + 1;
    const states = new Float32Array(n * C), target = ids[token + 1] ?? null;
    for (let i = 0; i < n; i++) states.set(trace.state(i, token, 1), i * C);
    const lens = yield* trace.lens(states, n, LENS_TOP_K, target), k = lens.ids.length / n;
    const embedding = this.gpt.row("transformer.wte.weight", ids[token]);
    const position = this.gpt.embed([ids[token]], [trace.positions[token]]).map((x, c) => x - embedding[c]);
    const tensors = {
      states: floats([n, C], states),
      lens_ids: integers([n, k], lens.ids),
      lens_probabilities: floats([n, k], lens.probabilities),
      embedding: floats([C], embedding),
      position: floats([C], position),
    };
    if (target === null) return {tensors};
    const next_probability = floats([n], lens.targetProbability), next_rank = integers([n], lens.targetRank);
    return {tensors: {...tensors, next_probability, next_rank}};
  }

  // The most likely next token of each state, (2L + 1, N), for the N tokens around `token`.
  *lens(question) {
    const trace = yield* this.trace(question), {T} = trace, n = 2 * this.config.n_layer + 1;
    const first = Math.max(0, Math.min(question.token - LENS_POSITIONS / 2, T - LENS_POSITIONS));
    const N = Math.min(LENS_POSITIONS, T - first), ids = [], probabilities = [];
    for (let i = 0; i < n; i++) {
      const lens = yield* trace.lens(trace.state(i, first, N), N, 1);
      ids.push(...lens.ids);
      probabilities.push(...lens.probabilities);
    }
    return {facts: {first}, tensors: {ids: integers([n, N], ids), probabilities: floats([n, N], probabilities)}};
  }

  // The logits after a token, before any filter.
  *logits(question) {
    const trace = yield* this.trace(question), last = trace.state(2 * this.config.n_layer, question.token, 1);
    return {tensors: {logits: floats([this.config.vocab_size], yield* trace.logits(last, 1))}};
  }

  // A parameter, downsampled if it is large, with a histogram of its finite values; or one row of it.
  *parameter(question) {
    const {name, row} = question;
    this.requireStep(question);
    if (!this.header.parameters.some(parameter => parameter.name === name)) {
      throw new Error(`name=${quoted(name)}: it is not a parameter of the model`);
    }
    const {data, shape} = this.gpt.param(name);
    const cols = shape.at(-1), rows = data.length / cols;
    if (row !== null) {
      if (row >= rows) throw new Error(`row=${row}: ${name} has ${grouped(rows)} rows`);
      return {tensors: {row: floats([cols], data.subarray(row * cols, (row + 1) * cols))}};
    }
    const [height, width] = [rows, cols].map(size => Math.min(size, MAX_HEATMAP_SIZE));
    const picture = yield* pool(data, rows, cols, height, width, meanOf);
    return {facts: yield* distribution(data), tensors: {picture: floats([height, width], picture)}};
  }

  // The nearest neighbors of a token id (`row`) by cosine similarity, and a map of the vocabulary: its first tokens
  // projected onto the two largest principal components of all. place, nearest_places: coordinates of the token and its
  // neighbors.
  *vocabulary(question) {
    this.requireStep(question);
    const V = this.tokenizer.vocabSize, {n_embd: C} = this.config, token = question.row ?? 0;
    if (token >= V) throw new Error(`row=${token}: the vocabulary has ${grouped(V)} tokens`);
    const table = this.gpt.param("transformer.wte.weight").data.subarray(0, V * C); // (V, C)
    const row = id => table.subarray(id * C, (id + 1) * C);
    if (!table.every(Number.isFinite)) throw new Error("the token embeddings contain NaN or infinity");
    const {mean, axes, share} = this.plane ??= yield* principalPlane(table, V, C, this.products);
    const similarity = new Float32Array(V), length = id => Math.max(normOf(row(id)), 1e-8);
    for (let id = 0; id < V; id++) {
      similarity[id] = dot(row(id), row(token)) / length(id) / length(token);
      if (id % 1000 === 0) yield;
    }
    const project = id => axes.map(axis => row(id).reduce((sum, x, c) => sum + (x - mean[c]) * axis[c], 0));
    const ids = range(Math.min(V, MAP_TOKENS)), nearest = topIndices(similarity, NEIGHBORS + 1);
    return {tensors: {
      map: floats([ids.length, axes.length], ids.flatMap(project)),
      share: floats([axes.length], share),
      nearest: integers([nearest.length], nearest),
      similarity: floats([nearest.length], nearest.map(id => similarity[id])),
      place: floats([axes.length], project(token)),
      nearest_places: floats([nearest.length, axes.length], nearest.flatMap(project)),
    }};
  }

  // The position embeddings, rotation angles, or score biases of the position method. See TraceProvider.positions.
  *positions(question) {
    this.requireStep(question);
    const {n_embd: C, n_head: H, position: method, block_size: S} = this.config, {limit: T} = this.header, tensors = {};
    const {rotation, biases} = this.gpt, positions = range(T);
    if (method === "learned" || method === "sinusoidal") {
      const embedding = this.gpt.row("transformer.wte.weight", 0);
      const table = this.gpt.embed(positions.map(() => 0), positions).map((x, i) => x - embedding[i % C]);
      const normed = new Float32Array(T * C), waves = new Float32Array(T * C);
      for (const t of positions) {
        const row = table.subarray(t * C, (t + 1) * C), length = Math.max(normOf(row), 1e-12);
        normed.set(row.map(x => x / length), t * C);
        waves.set(sinusoids(t, C), t * C);
        yield;
      }
      tensors.table = floats([T, C], table);
      tensors.similarity = floats([T, T], yield* this.products.multiply(normed, normed, T, T, C));
      tensors.sinusoids = floats([T, C], waves);
    } else if (rotation) {
      const angles = positions.flatMap(t => (rotation.moveTo(t), Array.from(rotation.angles)));
      tensors.angles = floats([T, rotation.angles.length], angles);
    } else if (biases) {
      tensors.bias = floats([H, T], range(H).flatMap(h => Array.from(biases.subarray(h * S, h * S + T))));
    }
    return {facts: {method}, tensors};
  }

  // The spans of the text that occur in the training data, if the file has an index.
  *memorized(question) {
    requireIds(question);
    if (!this.search) return {facts: {reason: "this file has no index of the training data"}};
    const {facts, longest} = yield* this.search.search(question.ids), T = longest.length;
    return {
      facts: {reason: null, ...facts, init_from: this.search.index.init_from},
      tensors: {longest: integers([T], longest), covering: integers([T], coveringLengths(longest))},
    };
  }

  // How much of the text occurs in the training data. Without an index, the file knows it only for its initial text.
  *overlap(question) {
    requireIds(question);
    const {ids} = question, {initial_overlap: initial} = this.header;
    if (this.search) {
      return {facts: {reason: null, ...yield* this.search.overlap(ids), init_from: this.search.index.init_from}};
    }
    const isInitial = initial && `${initial.ids}` === `${ids}`;
    return {facts: isInitial ? initial.facts : {reason: "this file has no index of it"}};
  }

  // A file has no run.
  *run() {
    return {};
  }
}

// Tensors with a copy of the data.
function floats(shape, data) {
  return {shape, data: Float32Array.from(data)};
}

function integers(shape, data) {
  return {shape, data: Int32Array.from(data)};
}

// Replace NaN and infinity by null in JSON values.
function finite(value) {
  if (Array.isArray(value)) return value.map(finite);
  if (typeof value === "number") return Number.isFinite(value) ? value : null;
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, finite(item)]));
}

function hexOf(bytes) {
  return Array.from(bytes, byte => byte.toString(16).padStart(2, "0")).join(" ");
}

// The tokens whose logits each vector raises and lowers most. effect: changes of logits, (vectors, V).
function logitEffects(effect, V) {
  return Array.from({length: effect.length / V}, (_, i) => {
    const row = effect.subarray(i * V, (i + 1) * V), withValues = ids => ids.map(id => [id, row[id]]);
    return {up: withValues(topIndices(row, TOP_EFFECTS)), down: withValues(topIndices(row.map(x => -x), TOP_EFFECTS))};
  });
}

// --- statistics ------------------------------------------------------------------------------------------------------

// The mean, standard deviation, and histogram of the finite values, as in NumPy.
function* distribution(values) {
  let low = Infinity, high = -Infinity, count = 0, sum = 0, squares = 0;
  for (let i = 0; i < values.length; i++) {
    if (i % PAUSE_INTERVAL === 0) yield;
    if (!Number.isFinite(values[i])) continue;
    low = Math.min(low, values[i]);
    high = Math.max(high, values[i]);
    sum += values[i];
    count++;
  }
  const mean = count ? sum / count : null, counts = new Array(HISTOGRAM_BINS).fill(0);
  if (!count) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const edges = counts.map((_, i) => low + i * ((high - low) / HISTOGRAM_BINS)).concat(high);
  for (let i = 0; i < values.length; i++) {
    if (i % PAUSE_INTERVAL === 0) yield;
    if (!Number.isFinite(values[i])) continue;
    const bin = Math.floor((values[i] - low) / (high - low) * HISTOGRAM_BINS); // exact: values are float32
    counts[Math.min(bin, HISTOGRAM_BINS - 1)]++;
    squares += (values[i] - mean) ** 2;
  }
  return {mean, deviation: count ? Math.sqrt(squares / count) : null, edges, counts};
}

// Principal component analysis of a table (V, C): the mean row, the two largest components (axes), and their shares of
// the variance.
function* principalPlane(table, V, C, products) {
  const mean = new Float64Array(C), covariance = new Float64Array(C * C), axes = [], share = [];
  for (let i = 0; i < V * C; i++) {
    mean[i % C] += table[i] / V;
    if (i % PAUSE_INTERVAL === 0) yield;
  }
  for (let first = 0; first < V; first += TABLE_ROWS) {
    const n = Math.min(TABLE_ROWS, V - first), rows = table.subarray(first * C, (first + n) * C);
    const columns = transpose(rows.map((x, i) => x - mean[i % C]), n, C); // (C, n)
    const product = yield* products.multiply(columns, columns, C, C, n);
    for (let i = 0; i < C * C; i++) covariance[i] += product[i];
  }
  const total = Array.from(mean, (_, c) => covariance[c * C + c]).reduce((sum, x) => sum + x);
  while (axes.length < Math.min(2, C)) {
    const {axis, variance} = yield* principalAxis(covariance, C, total);
    for (let i = 0; i < C * C; i++) covariance[i] -= variance * axis[Math.floor(i / C)] * axis[i % C];
    const sign = axis.reduce((sum, x) => sum + x) < 0 ? -1 : 1; // the sign of an eigenvector is arbitrary
    axes.push(axis.map(x => sign * x));
    share.push(variance / Math.max(total, 1e-30));
  }
  return {mean, axes, share};
}

// The eigenvector of a covariance (C, C) with the largest eigenvalue, by power iteration.
function* principalAxis(covariance, C, total) {
  const row = c => covariance.subarray(c * C, (c + 1) * C);
  const norms = Array.from({length: C}, (_, c) => normOf(row(c)));
  let axis = new Float64Array(C), variance = 0;
  axis[norms.indexOf(Math.max(...norms))] = 1;
  for (let step = 0; step < MAX_POWER_ITERATIONS; step++) {
    const next = axis.map((_, c) => dot(row(c), axis));
    variance = normOf(next);
    if (variance <= 1e-12 * total) break; // no variance is left
    let change = 0;
    for (let c = 0; c < C; c++) {
      next[c] /= variance;
      change = Math.max(change, Math.abs(next[c] - axis[c]));
    }
    axis = next;
    if (change < POWER_TOLERANCE) break;
    yield;
  }
  return {axis, variance};
}
