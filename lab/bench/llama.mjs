// Measures llama.cpp's generation speed on a CPU, for lab/bench/sampling.py --llama=FOLDER.
//
//   npm install --prefix FOLDER node-llama-cpp
//   node lab/bench/llama.mjs FOLDER model.gguf --threads=1 --rows=10 --prompt=464,2068 --tokens=64 --temperature=0
//
// Prints one line of JSON: the seconds from the prompt to the first tokens ("first") and to the last ones ("seconds"),
// the seconds in llama_decode ("decode"), and the ids of the first row ("ids"). Dispatching to node's threads adds
// 0.1 ms per token: 1 to 2 % at 124M, but a third at 0.8M.

import {createRequire} from "node:module";
import path from "node:path";
import {parseArgs} from "node:util";
import {pathToFileURL} from "node:url";

const BATCH = 512; // tokens per llama_decode: llama.cpp's default
const TOP_K = 200; // as in sample.py and nanoGPT

const names = ["threads", "rows", "prompt", "tokens", "temperature"];
const {values, positionals} = parseArgs({
  options: Object.fromEntries(names.map((name) => [name, {type: "string"}])),
  allowPositionals: true,
});
const [folder, file] = positionals;
const [threads, rows, temperature] = [values.threads, values.rows, values.temperature].map(Number);
const prompt = Uint32Array.from(values.prompt.split(","), Number);

const library = createRequire(path.resolve(folder, "package.json")).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(library));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: path.resolve(file)});
const tokens = Math.min(Number(values.tokens), model.trainContextSize - prompt.length);
const context = await model.createContext({
  sequences: rows, contextSize: prompt.length + tokens, batchSize: BATCH, threads, flashAttention: "auto",
});
// Low-level objects without node-llama-cpp's queues: their methods call llama_decode and llama_sampler_apply in a thread.
const native = context._ctx, sampler = new llama._bindings.AddonSampler(model._model);
sampler.applyConfig(temperature ? {temperature, topK: TOP_K, seed: 1} : {temperature});

const seconds = () => performance.now() / 1000;
let decode; // seconds in llama_decode

// Appends a piece to each row at this position, and returns each row's next token.
const append = async (pieces, position) => {
  native.initBatch(pieces.length * pieces[0].length);
  const last = Uint32Array.of(pieces[0].length - 1);
  const indices = pieces.map((piece, row) => native.addToBatch(row, position, piece, last)[0]);
  const began = seconds();
  await native.decodeBatch();
  decode += seconds() - began;
  const next = [];
  for (const index of indices) next.push(await native.sampleToken(index, sampler));
  return next;
};

const generate = async (count) => {
  decode = 0;
  const began = seconds(), ids = [], pieceSize = Math.floor(BATCH / rows);
  let next, first;
  for (let start = 0; start < prompt.length; start += pieceSize) {
    next = await append(Array(rows).fill(prompt.subarray(start, start + pieceSize)), start);
  }
  for (let position = prompt.length; ; position++) {
    first ??= seconds() - began;
    ids.push(next[0]);
    if (ids.length === count) break;
    next = await append(next.map((token) => Uint32Array.of(token)), position);
  }
  const result = {first, seconds: seconds() - began, decode, ids};
  for (let row = 0; row < rows; row++) native.disposeSequence(row);
  return result;
};

await generate(1); // warmup: reads the weights and allocates
console.log(JSON.stringify(await generate(tokens)));
process.exit(0); // without waiting for the library's threads
