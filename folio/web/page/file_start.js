"use strict";
// First script of a model's HTML file: reads the following blocks of data while the browser parses them, and unpacks
// and runs the scripts.

// shared, engine, kernel: contents of the block "code". isStarted: whether it was read. blocks: number of weight
// blocks. waiting: messages queued until the engine runs. send: sends or queues a message.
const modelFile = {
  shared: "", engine: "", kernel: "", isStarted: false, blocks: 0, waiting: [],
  send: message => modelFile.waiting.push(message),
};

const DAMAGE = {message: "The file is incomplete or damaged. Download it again, or export it again: "
  + "python tools/export.py --to=html RUN FILE"};

// Called after each block.
function readBlock() {
  const {currentScript} = document, block = currentScript.previousElementSibling;
  const {kind, blocks} = block.dataset, text = block.textContent;
  block.remove();
  currentScript.remove();
  if (kind === "header") modelFile.blocks = blocks;
  if (kind !== "code") return modelFile.send({kind, text});
  modelFile.isStarted = true;
  unpackCode(text).catch(problem => showStartProblem(self.DecompressionStream ? DAMAGE : problem));
}

// host.js detects missing data after the code.
document.addEventListener("DOMContentLoaded", () => {
  if (!modelFile.isStarted) showStartProblem(DAMAGE);
});

async function unpackCode(base64) {
  if (!self.DecompressionStream) throw new Error("This file needs a browser from 2023 or later.");
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const {shared, page, engine, kernel} = JSON.parse(await new Response(stream).text());
  Object.assign(modelFile, {shared, engine, kernel});
  runScript(shared);
  runScript(page);
}

// Run a script whose hash is in the content security policy. It is added to the head: in the body, readBlock expects
// each block directly before its script, and the browser may still be parsing.
function runScript(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
}

function showStartProblem({message}) {
  (document.getElementById("view") ?? document.body).textContent = message;
}
