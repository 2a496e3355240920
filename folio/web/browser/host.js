// Loads a model from the blocks of its file, and answers the messages of the page: in a worker, or in the page itself.

const SLICE = 12; // milliseconds of work before messages are read, and before the page is drawn
const TOLERANCE = 1e-4; // largest difference of the logits from those of model.py, relative to the largest logit

const {port1: pauses, port2: ends} = new MessageChannel(), paused = []; // who waits for the end of a pause
let worked = performance.now(); // since when, without a pause

pauses.onmessage = () => {
  worked = performance.now();
  paused.shift()();
};

// Wait until other tasks have run. setTimeout would wait for 4 ms.
function pause() {
  return new Promise(resolve => {
    paused.push(resolve);
    ends.postMessage(null);
  });
}

function decodeBase64(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function* decodeBlock(base64) {
  return decodeBase64(base64);
}

async function unzip(base64) {
  const stream = new Blob([decodeBase64(base64)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Messages to it are {kind, ...}: first "header" {text, kernel} and "weights" {text} for each block, then "load",
// "ask" {question}, "generate" {question}, and "stop". Those with an id are answered by send({id, ...}): with the
// answer, some events, done, or an error.
class Host {
  blocks = []; // of weights
  generating = new Set(); // ids of what was not stopped
  turns = {ask: Promise.resolve(), generate: Promise.resolve()}; // each ends when nothing of its kind computes

  constructor(send) {
    this.send = send;
  }

  async receive({kind, id, ...message}) {
    if (kind === "header") {
      this.header = unzip(message.text);
      this.kernel = decodeBase64(message.kernel);
    }
    if (kind === "weights") this.blocks.push(this.next("ask", decodeBlock(message.text)));
    if (kind === "stop") this.generating.delete(id);
    try {
      if (kind === "load") this.send({id, answer: await (this.loaded = this.load())});
      if (kind === "ask") await this.ask(id, message.question);
      if (kind === "generate") await this.generate(id, message.question);
    } catch (problem) {
      this.send({id, error: problem.message});
    }
  }

  // Run a generator to the next value that it yields, or to its end, with pauses. pausing() is called before each. After
  // it, a generator that is no longer wanted ends. One of a kind runs at a time. Those of two kinds take turns in their
  // pauses, so that a text is generated while a long question is answered.
  async next(kind, generator, pausing = () => {}, isWanted = () => true) {
    const before = this.turns[kind];
    let end;
    this.turns[kind] = new Promise(resolve => end = resolve);
    await before;
    try {
      for (;;) {
        const result = generator.next();
        if (performance.now() - worked > SLICE) {
          pausing();
          await pause();
          if (!isWanted()) return generator.return();
        }
        if (result.done || result.value !== undefined) return result;
      }
    } finally {
      end();
    }
  }

  async load() {
    const header = await this.header;
    if (!header) throw new Error("The file is incomplete: it ends before the weights.");
    const {index} = header, size = index?.end ?? header.storage.bytes;
    const bytes = new Uint8Array(size);
    let at = 0;
    for (const decoded of this.blocks.splice(0)) {
      const {value: block} = await decoded;
      if (at + block.length <= size) bytes.set(block, at);
      at += block.length;
    }
    if (at !== size) throw new Error(`The file is incomplete: it has ${at} of ${size} bytes of weights.`);
    this.tokenizer = makeTokenizer(header.tokenizer);
    this.gpt = new GPT(header, await makeKernels(this.kernel));
    await this.next("ask", this.gpt.setWeights(bytes));
    const difference = (await this.next("ask", this.difference(header.check))).value;
    if (!(difference <= TOLERANCE)) { // also if it is NaN
      throw new Error(`The logits differ by ${difference.toExponential(1)} of the largest from those of model.py.`);
    }
    const search = index && TrainingSearch.read(index, bytes, this.tokenizer);
    this.answers = new Answers(this.gpt, this.tokenizer, header, search);
    const {name, languages, losses, storage, traced} = header;
    return {name, languages, losses, storage, traced, indexed: Boolean(index), difference, simd: this.gpt.kernels.simd};
  }

  // The largest difference of the logits from those of model.py that the header has, relative to the largest of them.
  *difference({ids, logits: expected}) {
    const cache = this.gpt.newCache(), logits = yield* this.gpt.prefill(cache, ids);
    this.gpt.freeCache(cache);
    const most = Math.max(...expected.map(([, logit]) => Math.abs(logit)));
    return Math.max(...expected.map(([token, logit]) => Math.abs(logits[token] - logit))) / most;
  }

  async ask(id, question) {
    await this.loaded;
    const turn = question.kind === "tokens" ? "generate" : "ask"; // sampling waits for tokens, but not for traces
    const {facts, tensors} = (await this.next(turn, this.answers.answer(question))).value;
    const buffers = Object.values(tensors).map(({data}) => data.buffer);
    this.send({id, answer: {facts, tensors}}, buffers);
  }

  // Send the events of sampling, those of a slice together.
  async generate(id, question) {
    this.generating.add(id);
    await this.loaded;
    const generator = generate(this.gpt, this.tokenizer, question);
    let events = [];
    const flush = () => events.length && this.send({id, events: events.splice(0)});
    try {
      while (this.generating.has(id)) {
        const {done, value} = await this.next("generate", generator, flush, () => this.generating.has(id));
        if (done) break;
        events.push(value);
      }
    } finally {
      flush();
      generator.return();
      this.generating.delete(id);
    }
    this.send({id, done: true});
  }
}

if (self.document) {
  self.EngineHost = Host;
} else {
  const host = new Host((message, buffers) => postMessage(message, buffers));
  onmessage = ({data}) => host.receive(data);
  postMessage({ready: true});
}
