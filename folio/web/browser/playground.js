// Samples of the playground, token by token: the same questions and events as in folio/web/playground.py.

// --- settings --------------------------------------------------------------------------------------------------------

const SETTINGS = { // see GenerationQuestion in folio/web/playground.py
  num_samples: {type: "an integer", default: 1, min: 1, max: MAX_SAMPLES},
  max_new_tokens: {type: "an integer", default: 200, min: 1, max: MAX_NEW_TOKENS},
  stop: {type: "text", optional: true, default: null},
  context_stride: {type: "an integer", optional: true, default: null, min: 1},
  temperature: {type: "a number", default: 0.8, min: 0},
  top_k: {type: "an integer", optional: true, default: 200, min: 1},
  top_p: {type: "a number", optional: true, default: null, above: 0, max: 1},
  min_p: {type: "a number", optional: true, default: null, above: 0, max: 1},
  repetition_penalty: {type: "a number", default: 1, min: 1e-6, max: 1e6},
  seed: {...INTEGER, default: 1337},
  model: INTEGER,
  begun: INTEGER, // number of ids, from the end, that already belong to the samples
};

// Parse the settings of a question. Throws an Error if they are invalid.
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

// Divide positive logits of tokens that occurred by the penalty, and multiply negative ones (Keskar et al. 2019).
function penalize(logits, occurred, penalty) {
  const divisor = roundedAs(logits, penalty);
  for (let id = 0; id < logits.length; id++) {
    if (occurred[id]) logits[id] = logits[id] < 0 ? logits[id] * divisor : logits[id] / divisor;
  }
}

// Convert logits (V,) in place to the probabilities for sampling. occurred: 1 for each token of the text so far.
function toProbabilities(logits, occurred, settings) {
  if (settings.repetition_penalty !== 1) penalize(logits, occurred, settings.repetition_penalty);
  for (const [name, filter] of Object.entries(FILTERS)) if (settings[name] !== null) filter(logits, settings[name]);
  softmax(logits);
}

// --- samples ---------------------------------------------------------------------------------------------------------

// A sample in progress.
class Sample {
  count = 0; // tokens so far
  ended = false;
  reported = false; // whether its end was sent

  constructor(gpt, tokenizer, settings, index) {
    this.settings = settings;
    this.index = index; // number of the sample, for its random numbers
    this.cache = gpt.newCache();
    this.context = gpt.context(settings.ids); // tokens in the context
    this.text = new TextStream(tokenizer, settings.stop);
    this.occurred = new Uint8Array(tokenizer.vocabSize); // 1 for each token of the text so far
    for (const id of settings.ids) this.occurred[id] = 1;
  }

  // Sample a token from logits, which are overwritten. Probabilities of the token and its alternatives are the model's
  // own, before temperature and filters, and include the padding, as in the loss.
  sample(allLogits) {
    const V = this.occurred.length, logits = allLogits.subarray(0, V), probabilities = softmax(allLogits.slice());
    const top = topIndices(probabilities.subarray(0, V), Math.min(RUNNERS_UP + 1, V));
    if (!Number.isFinite(probabilities[top[0]])) {
      throw new Error("the model computes NaN or infinity: use another checkpoint");
    }
    toProbabilities(logits, this.occurred, this.settings);
    const id = this.token = sampleToken(logits, uniform(this.settings.seed, this.index, this.count));
    this.runnersUp = top.filter(other => other !== id).slice(0, RUNNERS_UP).map(other => [other, probabilities[other]]);
    this.probability = probabilities[id];
  }

  // The event of the sampled token.
  push() {
    this.count++;
    this.context.push(this.token);
    this.occurred[this.token] = 1;
    return [this.token, this.text.push(this.token), this.probability, this.runnersUp];
  }

  // The event of the end, only once.
  end() {
    if (this.reported) return null;
    this.reported = true;
    const limit = this.count === this.settings.max_new_tokens ? "max_new_tokens" : "end of text";
    const reason = this.text.ended ? "stop" : limit;
    return [null, this.text.push(null), reason];
  }
}

// Yield the events of samples that continue the ids of a question (see TraceProvider.sampler), and undefined where the
// caller may pause.
function* generate(gpt, tokenizer, question) {
  const settings = readSettings(question, tokenizer.vocabSize), {ids, begun, context_stride: stride} = settings;
  const {block_size: S, vocab_size, document_token} = gpt.config;
  // When the context is full, its newest `window` tokens are recomputed at positions 0, 1, ... Models with relative
  // positions do not need this: a new token replaces the oldest one in the cache.
  const slides = stride === null && gpt.canSlide;
  const window = S - Math.min(stride ?? Math.max(1, Math.floor(S / 2)), S);
  const samples = [];
  try {
    while (samples.length < settings.num_samples) samples.push(new Sample(gpt, tokenizer, settings, samples.length));
    const firstIds = ids.slice(Math.max(0, ids.length - begun));
    const texts = samples.map(sample => firstIds.map(id => sample.text.push(id)));
    for (const sample of samples) sample.ended = sample.text.ended;
    yield {begun: texts[0]};

    const promptLogits = yield* gpt.prefill(samples[0].cache, samples[0].context);
    for (const sample of samples) {
      if (sample !== samples[0]) gpt.copyCache(sample.cache, samples[0].cache);
      sample.sample(promptLogits.slice());
    }
    for (let count = 1; ; count++) {
      for (const sample of samples) sample.ended ||= sample.token === tokenizer.eot;
      if (samples.every(sample => sample.ended)) break;
      yield {samples: samples.map(sample => sample.ended ? sample.end() : sample.push())};
      for (const sample of samples) sample.ended ||= sample.text.ended || count === settings.max_new_tokens;
      const active = samples.filter(sample => !sample.ended);
      if (!active.length) break;
      for (const {cache, context} of active) {
        if (context.at(-2) === document_token) { // the newest token begins a document
          context.splice(0, context.length - 1);
          cache.length = 0;
        }
        if (slides || cache.length < S) continue;
        context.splice(0, context.length - 1 - window);
        yield* gpt.prefill(cache, context.slice(0, -1)); // without the newest token, which follows
      }
      const logits = yield* gpt.step(active.map(({cache}) => cache), active.map(({token}) => token));
      active.forEach((sample, i) => sample.sample(logits.slice(i * vocab_size, (i + 1) * vocab_size)));
    }
    yield {samples: samples.map(sample => sample.end())};
  } finally {
    for (const sample of samples) gpt.freeCache(sample.cache);
  }
}
