// Samples of the playground, token by token: the questions and the events of folio/web/playground.py.

// --- what is asked ---------------------------------------------------------------------------------------------------

const SETTINGS = { // as GenerationQuestion in folio/web/playground.py
  num_samples: {takes: "an integer", value: 1, least: 1, most: MAX_SAMPLES},
  max_new_tokens: {takes: "an integer", value: 200, least: 1, most: MAX_NEW_TOKENS},
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

// Divide the logits of tokens that occurred by the penalty; negative ones are multiplied by it (Keskar et al. 2019).
function penalize(logits, occurred, penalty) {
  const divisor = roundedAs(logits, penalty);
  for (let id = 0; id < logits.length; id++) {
    if (occurred[id]) logits[id] = logits[id] < 0 ? logits[id] * divisor : logits[id] / divisor;
  }
}

// Logits (V,) become the distribution that the next token is sampled from. occurred: 1 for each token of the text so
// far.
function toProbabilities(logits, occurred, settings) {
  if (settings.repetition_penalty !== 1) penalize(logits, occurred, settings.repetition_penalty);
  for (const [name, filter] of Object.entries(FILTERS)) if (settings[name] !== null) filter(logits, settings[name]);
  softmax(logits);
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
    softmax(own);
    const top = topIndices(own.subarray(0, V), Math.min(RUNNERS_UP + 1, V));
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

// The events of samples that continue the ids of a question, as TraceProvider.sampler describes them; and nothing
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
