"use strict";
// The beginning of a model's file: takes the blocks of data that follow, while the browser reads them, and unpacks and
// runs the scripts.

// shared, engine, kernel: of the block "code". isStarted: whether it was there. blocks: how many of weights there are.
// waiting: messages for the engine that is not there yet. send: where messages go.
const modelFile = {
  shared: "", engine: "", kernel: "", isStarted: false, blocks: 0, waiting: [],
  send: message => modelFile.waiting.push(message),
};

// Follows each block.
function readBlock() {
  const {currentScript} = document, block = currentScript.previousElementSibling;
  const {kind, blocks} = block.dataset, text = block.textContent;
  block.remove();
  currentScript.remove();
  if (kind === "header") modelFile.blocks = blocks;
  if (kind !== "code") return modelFile.send({kind, text});
  modelFile.isStarted = true;
  unpackCode(text).catch(showStartProblem);
}

// host.js notices if something after the code is missing.
document.addEventListener("DOMContentLoaded", () => {
  if (!modelFile.isStarted) showStartProblem(new Error("The file is incomplete."));
});

async function unpackCode(base64) {
  if (!self.DecompressionStream) throw new Error("This file needs a browser of 2023 or later.");
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const {shared, page, engine, kernel} = JSON.parse(await new Response(stream).text());
  Object.assign(modelFile, {shared, engine, kernel});
  runScript(shared);
  runScript(page);
}

// Run a script, which the content security policy must know. It goes into the head, because readBlock expects each
// block directly before its script, and the browser may still be reading the body.
function runScript(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
}

function showStartProblem({message}) {
  (document.getElementById("view") ?? document.body).textContent = message;
}
