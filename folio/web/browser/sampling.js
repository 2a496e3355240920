// Sampling: the filters and random numbers of folio/decoding/sampling.py, and the events of folio/web/playground.py.
//
// Dimensions: V vocabulary of the tokenizer; a model's logits may have more, its padding, which is never sampled.

const MOST_SAMPLES = 16; // at a time
const MOST_NEW_TOKENS = 4096;
const RUNNERS_UP = 10; // tokens that could have been sampled instead

// --- filters ---------------------------------------------------------------------------------------------------------
//
// Each changes logits (V,) in place, in float32 as torch does. They apply in this order.

// Divide the logits of tokens that occurred by the penalty; negative ones are multiplied by it (Keskar et al. 2019).
function penalize(logits, occurred, penalty) {
  const divisor = Math.fround(penalty);
  for (let id = 0; id < logits.length; id++) {
    if (occurred[id]) logits[id] = logits[id] < 0 ? logits[id] * divisor : logits[id] / divisor;
  }
}

function divideByTemperature(logits, temperature) {
  const divisor = Math.fround(temperature);
  for (let id = 0; id < logits.length; id++) logits[id] /= divisor;
}

// Set all but the k largest logits to -Infinity. Ties with the k-th largest are kept.
function keepTopK(logits, k) {
  if (k < logits.length) keepAtLeast(logits, logits[largest(logits, k)[k - 1]]);
}

// Keep the smallest set of most likely tokens whose probabilities sum to p or more (Holtzman et al. 2020). The most
// likely token is always kept; of equally likely ones, those with the lowest ids are, which torch leaves open.
function keepTopP(logits, p) {
  const ordered = logits.filter(logit => logit > -Infinity).sort().reverse(), probabilities = ordered.slice();
  softmax(probabilities, 0, probabilities.length);
  let kept = 0, sum = 0;
  do sum += probabilities[kept++];
  while (kept < ordered.length && Math.fround(Math.fround(sum + probabilities[kept]) - probabilities[kept])
    < Math.fround(p));
  const least = ordered[kept - 1], ties = kept - ordered.indexOf(least); // how many tokens with this logit are kept
  keepAtLeast(logits, least);
  for (let id = 0, tied = 0; id < logits.length; id++) {
    if (logits[id] === least && ++tied > ties) logits[id] = -Infinity;
  }
}

// Keep the tokens whose probability is at least p times the largest (Nguyen et al. 2024).
function keepMinP(logits, p) {
  const probabilities = logits.slice();
  softmax(probabilities, 0, logits.length);
  const least = Math.fround(Math.fround(p) * probabilities.reduce((a, b) => Math.max(a, b)));
  for (let id = 0; id < logits.length; id++) if (probabilities[id] < least) logits[id] = -Infinity;
}

function keepAtLeast(logits, least) {
  for (let id = 0; id < logits.length; id++) if (logits[id] < least) logits[id] = -Infinity;
}

// Logits (V,) become the distribution that the next token is sampled from. occurred: 1 for each token of the text so
// far. Temperature 0 gives the most likely token probability 1.
function toProbabilities(logits, occurred, {repetition_penalty, temperature, top_k, top_p, min_p}) {
  if (repetition_penalty !== 1) penalize(logits, occurred, repetition_penalty);
  if (temperature === 0) {
    const [best] = largest(logits, 1);
    logits.fill(0);
    logits[best] = 1;
    return;
  }
  divideByTemperature(logits, temperature);
  if (top_k !== null) keepTopK(logits, top_k);
  if (top_p !== null) keepTopP(logits, top_p);
  if (min_p !== null) keepMinP(logits, min_p);
  softmax(logits, 0, logits.length);
}

// The indices of the k largest values, the largest first; of equal ones the first.
function largest(values, k) {
  const indices = [];
  for (let i = 0; i < values.length; i++) {
    if (indices.length === k && !(values[i] > values[indices[k - 1]])) continue;
    let place = Math.min(indices.length, k - 1);
    for (; place > 0 && values[i] > values[indices[place - 1]]; place--) indices[place] = indices[place - 1];
    indices[place] = i;
  }
  return indices;
}

// --- random numbers --------------------------------------------------------------------------------------------------

const UINT64 = number => BigInt.asUintN(64, number);

// hash64 of folio/base/randomness.py, of one more number after those with the hash h: splitmix64's finalizer.
function hashNext(h, number) {
  h = UINT64((h ^ UINT64(BigInt(number))) + 0x9E3779B97F4A7C15n);
  h = UINT64((h ^ h >> 30n) * 0xBF58476D1CE4E5B9n);
  h = UINT64((h ^ h >> 27n) * 0x94D049BB133111EBn);
  return h ^ h >> 31n;
}

// A uniform number in [0, 1), a function of (seed, sample, position): sample k is the same however many there are.
function uniform(seed, sample, position) {
  return Number([seed, sample, position].reduce(hashNext, 0n) >> 11n) * 2 ** -53;
}

// The first token at which the cumulative probability exceeds `uniform` times the sum of all.
function sampleToken(probabilities, uniform) {
  let sum = 0, id = 0;
  for (const probability of probabilities) sum += probability;
  const target = uniform * sum;
  sum = probabilities[0];
  while (sum <= target) sum += probabilities[++id];
  return id;
}

// --- what is asked ---------------------------------------------------------------------------------------------------

const SETTINGS = { // as GenerationQuestion in folio/web/playground.py
  num_samples: {takes: "an integer", value: 1, least: 1, most: MOST_SAMPLES},
  max_new_tokens: {takes: "an integer", value: 200, least: 1, most: MOST_NEW_TOKENS},
  stop: {takes: "text", orNone: true, value: null},
  context_stride: {takes: "an integer", orNone: true, value: null, least: 1},
  temperature: {takes: "a number", value: 0.8, least: 0},
  top_k: {takes: "an integer", orNone: true, value: 200, least: 1},
  top_p: {takes: "a number", orNone: true, value: null, above: 0, most: 1},
  min_p: {takes: "a number", orNone: true, value: null, above: 0, most: 1},
  repetition_penalty: {takes: "a number", value: 1, least: 1e-6, most: 1e6},
  seed: {takes: "an integer", value: 1337, least: 0},
  model: {takes: "an integer", value: 0, least: 0},
  begun: {takes: "an integer", value: 0, least: 0}, // how many of the ids, the last ones, begin the samples
};

// The settings of a question, with defaults. Throws an Error for a mistake.
function readSettings(question, vocabSize) {
  const settings = readQuestion(SETTINGS, question, vocabSize, function* ({temperature, stop, seed}) {
    if (seed > Number.MAX_SAFE_INTEGER) yield ["seed", "a browser rounds whole numbers above 2**53 - 1"];
    if (temperature && !(temperature >= 1e-6 && temperature <= 1e6)) {
      yield ["temperature", "it must be from 1e-6 to 1e6, or 0 for the most likely token"];
    }
    if (stop === "") yield ["stop", "it must not be empty; None turns it off"];
  });
  requireIds(settings);
  return settings;
}

// --- samples ---------------------------------------------------------------------------------------------------------

// A sample while it is generated.
class Sample {
  count = 0; // tokens so far
  ended = false;
  reported = false; // whether its end has been

  constructor(gpt, tokenizer, settings, index) {
    this.settings = settings;
    this.index = index; // of the sample, for its random numbers
    this.cache = gpt.newCache();
    this.context = settings.ids.slice(-gpt.config.block_size); // tokens that it may depend on
    this.text = new TextStream(tokenizer, settings.stop);
    this.occurred = new Uint8Array(tokenizer.vocabSize); // 1 for each token of the text so far
    for (const id of settings.ids) this.occurred[id] = 1;
  }

  // Sample a token from logits, which become something else, and keep what its event says: the probabilities of the
  // token and of the most likely others are the model's own, before temperature and filters. As in the loss, the
  // padding has a share.
  sample(allLogits) {
    const V = this.occurred.length, logits = allLogits.subarray(0, V), own = allLogits.slice();
    softmax(own, 0, own.length);
    const top = largest(own.subarray(0, V), Math.min(RUNNERS_UP + 1, V));
    if (!Number.isFinite(own[top[0]])) throw new Error("the model computes NaN or infinity: use another checkpoint");
    toProbabilities(logits, this.occurred, this.settings);
    const id = this.token = sampleToken(logits, uniform(this.settings.seed, this.index, this.count));
    this.runnersUp = top.filter(other => other !== id).slice(0, RUNNERS_UP).map(other => [other, own[other]]);
    this.probability = own[id];
  }

  // The event of the token that was sampled.
  push() {
    this.count++;
    this.context.push(this.token);
    this.occurred[this.token] = 1;
    return [this.token, this.text.push(this.token), this.probability, this.runnersUp];
  }

  // The event of its end, which there is only once.
  end() {
    if (this.reported) return null;
    this.reported = true;
    const length = this.count === this.settings.max_new_tokens ? "max_new_tokens" : "end of text";
    const why = this.text.ended ? "stop" : length;
    return [null, this.text.push(null), why];
  }
}

// The events of samples that continue the ids of a question, as TraceProvider.generate describes them; and nothing
// (undefined) where the caller may pause.
function* generate(gpt, tokenizer, question) {
  const settings = readSettings(question, tokenizer.vocabSize), {ids, begun, context_stride: stride} = settings;
  const {block_size: S, vocab_size} = gpt.config;
  // When a context is full, its newest tokens are computed again at positions 0, 1, ..., so many of them. A model
  // that knows only distances needs no such thing: a new token takes the place of the oldest one in the cache.
  const slides = stride === null && gpt.canSlide;
  const window = S - Math.min(stride ?? Math.max(1, Math.floor(S / 2)), S);
  const samples = [];
  try {
    while (samples.length < settings.num_samples) samples.push(new Sample(gpt, tokenizer, settings, samples.length));
    const beginning = ids.slice(Math.max(0, ids.length - begun));
    const texts = samples.map(sample => beginning.map(id => sample.text.push(id)));
    for (const sample of samples) sample.ended = sample.text.ended;
    yield {begun: texts[0]};

    const first = yield* gpt.prefill(samples[0].cache, samples[0].context);
    for (const sample of samples) {
      if (sample !== samples[0]) gpt.copyCache(sample.cache, samples[0].cache);
      sample.sample(first.slice());
    }
    for (let count = 1; ; count++) {
      for (const sample of samples) sample.ended ||= sample.token === tokenizer.eot;
      if (samples.every(sample => sample.ended)) break;
      yield {samples: samples.map(sample => sample.ended ? sample.end() : sample.push())};
      for (const sample of samples) sample.ended ||= sample.text.ended || count === settings.max_new_tokens;
      const going = samples.filter(sample => !sample.ended);
      if (!going.length) break;
      for (const {cache, context} of going) {
        if (slides || cache.length < S) continue;
        context.splice(0, context.length - 1 - window);
        yield* gpt.prefill(cache, context.slice(0, -1)); // without the newest token, which follows
      }
      const logits = yield* gpt.step(going.map(({cache}) => cache), going.map(({token}) => token));
      going.forEach((sample, i) => sample.sample(logits.slice(i * vocab_size, (i + 1) * vocab_size)));
    }
    yield {samples: samples.map(sample => sample.end())};
  } finally {
    for (const sample of samples) gpt.freeCache(sample.cache);
  }
}
