// Loads a model from the blocks of its file and answers messages of the page. Runs in a worker, or in the page itself.

const SLICE = 12; // milliseconds of work between pauses, in which messages are received and the page is drawn
const HEAD_START = 1000; // milliseconds in which questions wait for a new text
const TOLERANCE = 1e-4; // largest difference from the logits of model.py, relative to the largest logit

const REMEDY = "Download it again, or export it again: python tools/export.py --to=html RUN FILE";

const {port1: receiver, port2: sender} = new MessageChannel(), resolvers = []; // of pending pauses
let resumedAt = performance.now(); // end of the last pause

receiver.onmessage = () => {
  resumedAt = performance.now();
  resolvers.shift()();
};

// Let other tasks run. setTimeout would wait for 4 ms.
function pause() {
  return new Promise(resolve => {
    resolvers.push(resolve);
    sender.postMessage(null);
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

function refuseDamaged() {
  throw new Error(`The file is damaged. ${REMEDY}`);
}

// Receives messages {kind, ...}: first "header" {text, kernel} and one "weights" {text} per block, then "load", "ask"
// {question}, "generate" {question}, and "stop". Messages with an id are answered by send({id, ...}) with an answer,
// events, done, or an error.
class Host {
  blocks = []; // of weights
  generating = new Set(); // ids of running "generate" messages
  generatingSince = -Infinity; // time at which the newest of them began
  queues = {ask: Promise.resolve(), generate: Promise.resolve()}; // the last computation of each kind

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

  // Advance a generator to its next value or its end, with pauses. onPause() is called before each pause. After it, the
  // generator is closed unless isActive(). Generators of the same kind run one at a time; the two kinds take turns, so
  // that text is generated while a long question is answered. A new text first has HEAD_START for itself.
  async next(kind, generator, onPause = () => {}, isActive = () => true) {
    const previous = this.queues[kind];
    let end;
    this.queues[kind] = new Promise(resolve => end = resolve);
    await previous;
    try {
      for (;;) {
        while (kind === "ask" && this.generating.size && performance.now() < this.generatingSince + HEAD_START) {
          await pause();
        }
        const result = generator.next();
        if (performance.now() - resumedAt > SLICE) {
          onPause();
          await pause();
          if (!isActive()) return generator.return();
        }
        if (result.done || result.value !== undefined) return result;
      }
    } finally {
      end();
    }
  }

  async load() {
    const header = await this.header?.catch(refuseDamaged);
    if (!header) throw new Error(`The file is incomplete: it ends before the weights. ${REMEDY}`);
    const {index} = header, size = index?.end ?? header.storage.bytes;
    const bytes = new Uint8Array(size);
    let offset = 0;
    for (const decoded of this.blocks.splice(0)) {
      const {value: block} = await decoded.catch(refuseDamaged);
      if (offset + block.length <= size) bytes.set(block, offset);
      offset += block.length;
    }
    if (offset !== size) {
      throw new Error(`The file is incomplete: it has ${offset} of ${size} bytes of weights. ${REMEDY}`);
    }
    this.tokenizer = makeTokenizer(header.tokenizer);
    this.gpt = new GPT(header, await makeKernels(this.kernel));
    await this.next("ask", this.gpt.setWeights(bytes));
    const difference = (await this.next("ask", this.difference(header.check))).value;
    if (!(difference <= TOLERANCE)) { // also if it is NaN
      throw new Error(`The logits differ from those of model.py by ${difference.toExponential(1)} of the largest, so `
        + `the file is damaged. ${REMEDY}`);
    }
    const search = index && TrainingSearch.read(index, bytes, this.tokenizer);
    this.answers = new Answers(this.gpt, this.tokenizer, header, search);
    const {name, languages, losses, storage, traced} = header;
    return {name, languages, losses, storage, traced, indexed: Boolean(index), difference, simd: this.gpt.kernels.simd};
  }

  // The largest difference from model.py's logits in the header, relative to the largest of them.
  *difference({ids, logits: expected}) {
    const cache = this.gpt.newCache(), logits = yield* this.gpt.prefill(cache, this.gpt.context(ids));
    this.gpt.freeCache(cache);
    const largest = Math.max(...expected.map(([, logit]) => Math.abs(logit)));
    return Math.max(...expected.map(([token, logit]) => Math.abs(logits[token] - logit))) / largest;
  }

  async ask(id, question) {
    await this.loaded;
    const queue = question.kind === "tokens" ? "generate" : "ask"; // sampling must not wait for traces
    const {facts, tensors} = (await this.next(queue, this.answers.answer(question))).value;
    const buffers = Object.values(tensors).map(({data}) => data.buffer);
    this.send({id, answer: {facts, tensors}}, buffers);
  }

  // Send the events of samples, together for each slice.
  async generate(id, question) {
    this.generating.add(id);
    await this.loaded;
    this.generatingSince = performance.now();
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
