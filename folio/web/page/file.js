// Parts of the page for a model's HTML file: the provider is an engine in a worker or, if the browser allows none, in
// the page itself. Also adapts the views and the header.

// --- the engine ------------------------------------------------------------------------------------------------------

const requests = new Map(); // controllers of the streams of messages from the engine, by id
let lastId = 0;

// Resolves to a function that sends messages to the engine.
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
  if (!controller) return; // the request was stopped
  if (error !== undefined) return controller.error(new Error(error));
  for (const value of answer ? [answer] : events) controller.enqueue(value);
  if (answer || done) controller.close();
}

// Yield the replies of the engine to a message, until it is done or the caller stops.
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

const GENERATING_VIEWS = ["playground", "translate"];
const NOT_TRACED = { // an overview without numbers, which leaves the tokens uncolored
  facts: {}, tensors: Object.fromEntries(
    ["loss", "rank", "entropy"].map(name => [name, {shape: [0], data: new Float32Array()}])),
};

let firstOverview; // {key, answer, isDone}

// The first overview takes long: views that only generate do not wait for it, and are drawn again when it is complete.
async function askOverview(question) {
  await answerOf({kind: "ask", question: {...question, kind: "tokens"}}); // throws an Error if the ids are invalid
  if (!(await fileFacts).traced) return NOT_TRACED;
  const key = JSON.stringify(question);
  if (!firstOverview) {
    const answer = answerOf({kind: "ask", question}), finish = () => {
      firstOverview.isDone = true;
      if (GENERATING_VIEWS.includes(state.view)) draw(); // also after an error
    };
    firstOverview = {key, answer, isDone: false};
    answer.then(finish, finish);
  }
  if (key !== firstOverview.key) return answerOf({kind: "ask", question});
  if (!firstOverview.isDone) answers.delete(key); // ask again in the next view, which may need the numbers
  return firstOverview.isDone || !GENERATING_VIEWS.includes(state.view) ? firstOverview.answer : NOT_TRACED;
}

// --- loading ---------------------------------------------------------------------------------------------------------

// Facts about the file from host.js, once all of it is loaded.
const fileFacts = (async () => {
  const send = await engine, {waiting, kernel} = modelFile;
  let count = 0;
  modelFile.send = message => {
    send(message.kind === "header" ? {...message, kernel} : message);
    if (message.kind === "weights") byId("view").textContent = `Loading the model: ${++count} of ${modelFile.blocks}`;
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

playground.generatesAtOnce = true;
const SERVER_VIEWS = ["checkpoints", "compare", "run"]; // need the run's folder

function arrange({losses, storage, traced, indexed, languages}) {
  const isShown = id => id === "translate" ? languages : id === "memorized" ? traced && indexed
    : traced ? !SERVER_VIEWS.includes(id) : id === "playground";
  for (const id of Object.keys(views)) {
    if (!isShown(id)) delete views[id];
  }
  const {Sampling, ...others} = MENU, groups = {Sampling: ["translate", ...Sampling], ...others}; // default view first
  for (const [group, ids] of Object.entries(groups)) {
    delete MENU[group];
    if (ids.some(id => views[id])) MENU[group] = ids;
  }
  DEFAULTS.view = languages ? "translate" : "playground";
  if (views.story) linkToStory(["translate", "playground", "roll"]);
  if (storage.dtype !== "float32") {
    views.playground.about = views.playground.about.replace(/sample\.py.*/,
      "Because the weights in this file are rounded, sample.py may generate different samples.");
  }
  const measured = losses.map(({of, tokens, before, after}) =>
    ` Loss on ${short(tokens)} validation tokens of ${of}: ${after.toFixed(4)} nats per token`
    + (storage.dtype === "float32" ? "." : `; before rounding: ${before.toFixed(4)}.`));
  const stored = `Weights: ${storage.dtype}, ${short(storage.bytes / 1e6)} MB.`;
  byId("facts").append(element("div", {testid: "stored"}, stored, measured));
  byId("header").append(element("button", {testid: "copy-link", click: copyLink}, "Copy link"));
  if (!traced) {
    for (const hidden of [byId("strip-bar"), byId("training-note"), document.querySelector("footer")]) {
      hidden.style.display = "none";
    }
    byId("header").append(element("div", {class: "note", testid: "too-large"},
      "The model is too large to trace in a browser, so this page only generates. Use tools/view.py to look inside."));
  }
}

// Add a link to the story to views that a file may open with.
function linkToStory(ids) {
  for (const view of ids.map(id => views[id]).filter(Boolean)) {
    const {draw} = view;
    view.draw = (box, context) => {
      box.append(element("p", {testid: "story-link"}, "How does it work? ",
        element("a", {href: link({view: "story"})}, "Watch it compute")));
      return draw(box, context);
    };
  }
}

// Copy a link with the text and all settings.
async function copyLink({target}) {
  const url = new URL(link({}), location.href).href;
  try {
    await navigator.clipboard.writeText(url);
    target.textContent = "Copied";
    setTimeout(() => target.textContent = "Copy link", 1500);
  } catch {
    prompt("Link", url);
  }
}
