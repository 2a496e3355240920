// A model's file: the provider is an engine in a worker or, where the browser allows none, in the page itself. The page
// then differs from the viewer's, too.

// --- the engine ------------------------------------------------------------------------------------------------------

const requests = new Map(); // the controllers of the streams of messages from the engine, by id
let lastId = 0;

// A function that sends messages to the engine.
const engine = new Promise((resolve, reject) => {
  const inPage = () => {
    runScript(modelFile.engine); // the shared script has run
    if (!self.EngineHost) return reject(new Error("The engine cannot run in this browser."));
    const host = new EngineHost(message => receive(message));
    resolve(message => host.receive(message));
  };
  try {
    const scripts = new Blob([modelFile.shared, modelFile.engine], {type: "text/javascript"});
    const worker = new Worker(URL.createObjectURL(scripts));
    worker.onerror = inPage;
    worker.onmessage = ({data}) => {
      if (!data.ready) return receive(data);
      worker.onerror = ({message}) => requests.forEach(controller => controller.error(new Error(message)));
      resolve(message => worker.postMessage(message));
    };
  } catch {
    inPage();
  }
});

function receive({id, answer, events = [], done, error}) {
  const controller = requests.get(id);
  if (!controller) return; // it was stopped
  if (error !== undefined) return controller.error(new Error(error));
  for (const value of answer ? [answer] : events) controller.enqueue(value);
  if (answer || done) controller.close();
}

// What the engine sends for a message, until it is done or the caller stops.
async function* exchange(message, signal) {
  const id = ++lastId, send = await engine;
  const reader = new ReadableStream({start: controller => void requests.set(id, controller)}).getReader();
  signal?.addEventListener("abort", () => requests.get(id)?.error(signal.reason));
  send({id, ...message});
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    requests.delete(id);
    send({id, kind: "stop"});
  }
}

async function answerOf(message) {
  for await (const answer of exchange(message)) return answer;
}

provider = {
  async ask(question) {
    await fileFacts;
    return question.kind === "overview" ? askOverview(question) : answerOf({kind: "ask", question});
  },

  async *generate(question, signal) {
    await fileFacts;
    yield* exchange({kind: "generate", question}, signal);
  },
};

const GENERATING = ["playground", "translate"]; // views
const NOT_TRACED = { // an overview without the numbers that color the tokens
  facts: {}, tensors: Object.fromEntries(
    ["loss", "rank", "entropy"].map(name => [name, {shape: [0], data: new Float32Array()}])),
};

let firstOverview; // {key, answer, isDone}

// The views that only generate do not wait for the first overview, and are drawn again when it is there.
async function askOverview(question) {
  await answerOf({kind: "ask", question: {...question, kind: "tokens"}}); // throws an Error if the ids make no sense
  if (!(await fileFacts).traced) return NOT_TRACED;
  const key = JSON.stringify(question);
  if (!firstOverview) {
    const answer = answerOf({kind: "ask", question}), finish = () => {
      firstOverview.isDone = true;
      if (GENERATING.includes(state.view)) draw(); // also an error
    };
    firstOverview = {key, answer, isDone: false};
    answer.then(finish, finish);
  }
  if (key !== firstOverview.key) return answerOf({kind: "ask", question});
  if (!firstOverview.isDone) answers.delete(key); // the next view asks again, because it may get the other one
  return firstOverview.isDone || !GENERATING.includes(state.view) ? firstOverview.answer : NOT_TRACED;
}

// --- loading ---------------------------------------------------------------------------------------------------------

// What host.js says about the file, when all of it has been read.
const fileFacts = (async () => {
  const send = await engine, {waiting, kernel} = modelFile;
  let read = 0;
  modelFile.send = message => {
    send(message.kind === "header" ? {...message, kernel} : message);
    if (message.kind === "weights") byId("view").textContent = `Loading the model: ${++read} of ${modelFile.blocks}`;
  };
  waiting.splice(0).forEach(modelFile.send);
  if (document.readyState === "loading") {
    await new Promise(resolve => document.addEventListener("DOMContentLoaded", resolve));
  }
  const facts = await answerOf({kind: "load"});
  arrange(facts);
  return facts;
})();

// --- the page --------------------------------------------------------------------------------------------------------

const SERVED = ["checkpoints", "compare", "run"]; // views that need the run's folder

function arrange({losses, storage, traced, indexed, languages}) {
  const isShown = id => id === "translate" ? languages : id === "memorized" ? traced && indexed
    : traced ? !SERVED.includes(id) : id === "playground";
  for (const id of Object.keys(views)) {
    if (!isShown(id)) delete views[id];
  }
  const {Sampling, ...others} = MENU, groups = {Sampling: ["translate", ...Sampling], ...others}; // what opens is first
  for (const [group, ids] of Object.entries(groups)) {
    delete MENU[group];
    if (ids.some(id => views[id])) MENU[group] = ids;
  }
  DEFAULTS.view = languages ? "translate" : "playground";
  if (storage.dtype !== "float32") {
    views.playground.about = views.playground.about.replace(/sample\.py.*/,
      "A file with float32 weights generates what sample.py does with the same settings; this one's are rounded.");
  }
  const measured = losses.map(({of, tokens, before, after}) =>
    ` The loss on ${short(tokens)} validation tokens of ${of} is ${after.toFixed(4)} nats per token`
    + (storage.dtype === "float32" ? "." : `; before rounding, it was ${before.toFixed(4)}.`));
  const stored = `The weights are stored as ${storage.dtype} (${short(storage.bytes / 1e6)} MB).`;
  byId("header").append(element("div", {class: "note", testid: "stored"}, stored, measured),
    element("button", {testid: "copy-link", click: copyLink}, "Copy link"));
  if (!traced) {
    byId("strip-bar").style.display = document.querySelector("footer").style.display = "none";
    byId("header").append(element("div", {class: "note", testid: "too-large"},
      "The model is too large to look inside it in a browser, so this page only generates. tools/view.py shows more."));
  }
}

// Copy the address of what is shown: the text and all settings.
async function copyLink({target}) {
  const url = new URL(link({}), location.href).href;
  try {
    await navigator.clipboard.writeText(url);
    target.textContent = "Copied";
    setTimeout(() => target.textContent = "Copy link", 1500);
  } catch {
    prompt("The link", url);
  }
}
