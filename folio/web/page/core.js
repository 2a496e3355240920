"use strict";
// What is looked at, where the numbers come from, and when the page is drawn.

// --- the trace provider ----------------------------------------------------------------------------------------------
//
// Everything the page knows about a model comes from a provider: ask(question) returns {facts, tensors}, and
// generate(question, signal) yields events. This one asks the server (folio/web/questions.py).

const server = {
  async ask(question) {
    return unpack(await (await post("/ask", question)).arrayBuffer());
  },

  async *generate(question, signal) {
    const response = await post("/generate", question, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const {done, value} = await reachable(reader.read(), signal);
        if (done) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const event = JSON.parse(line);
          if (event.error) throw new Error(event.error);
          yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // if the caller stops early, so does the server
    }
  },
};

async function post(path, value, signal) {
  const body = JSON.stringify(value), headers = {"content-type": "application/json"};
  const response = await reachable(fetch(path, {method: "POST", headers, body, signal}), signal);
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({}));
  throw new Error(error ?? `The server answered with status ${response.status}.`);
}

// The promise, with a message that helps if the server is gone.
function reachable(promise, signal) {
  return promise.catch(problem => {
    if (signal?.aborted) throw problem;
    throw new Error("The server does not answer. Is tools/view.py still running?");
  });
}

// An answer: the length of the header, the header, and the tensors, each aligned to 4 bytes. A tensor is {shape, data}.
function unpack(buffer) {
  const types = {float32: Float32Array, int32: Int32Array, uint8: Uint8Array};
  const length = new DataView(buffer).getUint32(0, true);
  const {tensors: kinds, ...facts} = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const tensors = {};
  let at = 4 + length;
  for (const [name, {dtype, shape}] of Object.entries(kinds)) {
    const size = shape.reduce((product, n) => product * n, 1);
    tensors[name] = {shape, data: new types[dtype](buffer, at, size)};
    at += Math.ceil(size * types[dtype].BYTES_PER_ELEMENT / 4) * 4;
  }
  return {facts, tensors};
}

let provider = server;
const answers = new Map(); // {promise, answer, bytes} by question, the newest last
const KEPT_BYTES = 2 ** 26; // of answers
const FACTS_BYTES = 4096; // about what an answer needs without its tensors

function ask(question) {
  const key = JSON.stringify(question);
  const entry = answers.get(key) ?? {promise: provider.ask(question), answer: null, bytes: FACTS_BYTES};
  answers.delete(key);
  answers.set(key, entry);
  if (entry.answer) return entry.promise;
  entry.promise.then(answer => {
    entry.answer = answer;
    entry.bytes = FACTS_BYTES + sumOf(Object.values(answer.tensors).map(({data}) => data.byteLength));
    let total = sumOf([...answers.values()].map(({bytes}) => bytes));
    for (const [old, {bytes}] of answers) {
      if (total <= KEPT_BYTES || old === key) break;
      total -= bytes;
      answers.delete(old);
    }
  }, () => answers.delete(key));
  return entry.promise;
}

// The answer to a question that was asked before, or nothing.
function kept(question) {
  return answers.get(JSON.stringify(question))?.answer;
}

// --- state -----------------------------------------------------------------------------------------------------------
//
// The state is in the URL, so that a link shows the same. Only what differs from the defaults is written.

const UNCHANGED = {mask: "before", scale: 1, heads_off: "", mlps_off: ""}; // the switches
const DEFAULTS = {
  view: "tokens", text: null, ids: "", layer: 0, head: 0, token: -1, step: -1, color: "loss",
  shade: "linear", hide_first: 0, ...UNCHANGED,
  temperature: 0.8, top_k: 200, top_p: 1, min_p: 0, seed: 1337,
  other_step: -1, // what "compare" compares with: a step of the second model, or of the only one
  replaced: "", // tokens that were replaced by others in ids: POSITION:BEFORE:AFTER, separated by commas
};

const state = {...DEFAULTS};
const views = {}; // by id: {id, title, about, draw(box, context)}; start.js has their order
let described; // the answer to "models"
let pieces; // the text of each token id

// A view, and what it adds to the state, by name: the default.
function defineView(view, defaults = {}) {
  views[view.id] = view;
  Object.assign(DEFAULTS, defaults);
}

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const text = given.get(name);
    state[name] = text === null ? value : typeof value === "number" ? Number(text) || 0 : text;
  }
  state.text ??= described.text;
  if (!Object.hasOwn(views, state.view)) state.view = DEFAULTS.view;
}

// The step of the checkpoint that is shown.
function shownStep() {
  return state.step < 0 ? described.models[0].step : state.step;
}

function link(changes) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries({...state, ...changes})) {
    if (value !== DEFAULTS[name]) parameters.set(name, value);
  }
  return "#" + parameters;
}

function change(changes) {
  remember(changes);
  return draw();
}

function selectToken(token) {
  return change({token});
}

// Change the state without drawing, for a view that updates itself.
function remember(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", link({}));
  for (const node of document.querySelectorAll("#menu [data-view]")) node.href = link({view: node.dataset.view});
}

// What a question about the current text starts with. options: other fields, such as {model: 1}.
function question(kind, ids, {step, ...options} = {}) {
  const {mask, scale, heads_off, mlps_off} = state;
  const asked = {kind, ids, mask, scale: Boolean(scale), heads_off, mlps_off, ...options};
  if (step === undefined && state.step >= 0 && !asked.model) step = state.step;
  return step === undefined ? asked : {...asked, step};
}

// --- drawing ---------------------------------------------------------------------------------------------------------

let drawing = 0; // counts the calls of draw; an older one stops when a newer one has begun

async function draw() {
  const mine = ++drawing, box = byId("view"), giveFocusBack = keepFocus();
  let context;
  box.classList.add("busy");
  try {
    context = await loadContext();
    if (mine !== drawing) return;
    drawSurroundings(context);
    giveFocusBack();
    const view = views[state.view];
    const content = element("div", {testid: `view-${view.id}`},
      element("h2", {}, view.title), element("p", {}, view.about));
    await view.draw(content, context);
    if (mine === drawing) box.replaceChildren(content);
  } catch (problem) {
    if (mine !== drawing) return;
    if (!context) drawMenu(); // the address asks for what there is not
    byId("text").value ||= state.text;
    const {view, text} = state, again = link({...DEFAULTS, view, text});
    box.replaceChildren(errorBox(problem), context ? "" : element("a", {href: again}, "Show this view of the text"));
  } finally {
    if (mine === drawing) {
      giveFocusBack();
      box.classList.remove("busy");
      document.body.dataset.drawn = mine;
      if (context) askAhead(context, mine);
    }
  }
}

const SMALL = 20e6; // parameters; the checkpoints of larger models are slow to load

// Ask for the other checkpoints what the view asked for this one, the nearest first, until something else is drawn, so
// that the slider of checkpoints moves at once. Of a large model, ask for the next two only.
async function askAhead({model, ids, asked}, mine) {
  const {checkpoints} = model, at = checkpoints.indexOf(state.step);
  if (at < 0) return; // the slider was not moved
  const nearest = checkpoints.map((step, i) => [Math.abs(i - at), step]).sort((a, b) => a[0] - b[0]);
  for (const [, step] of nearest.slice(0, model.num_params.total < SMALL ? nearest.length : 3)) {
    for (const [kind, options] of asked) {
      if (mine !== drawing) return;
      if (await ask(question(kind, ids, {step, ...options})).catch(() => null) === null) return;
    }
  }
}

// Remember which control has the keyboard's focus. Returns a function that gives it to the one in the same place after
// drawing.
function keepFocus() {
  const focused = document.activeElement, box = focused?.closest("#menu, #strip-bar, #view");
  const isVisible = focused?.matches(":focus-visible"); // not after a click, so that the arrow keys then select tokens
  const controls = () => box && isVisible ? [...box.querySelectorAll("a, button, input, select, textarea")] : [];
  const place = controls().indexOf(focused);
  return () => {
    const control = controls()[place];
    if (document.activeElement !== document.body || control?.tagName !== focused.tagName) return;
    control.focus({preventScroll: true});
  };
}

// What every view needs: the model, the ids of the text, the selected token, and the overview of the trace.
async function loadContext() {
  const model = described.models[0], {n_layer, n_head} = model.config;
  let ids, note = "";
  if (state.ids) {
    ids = state.ids.split(",").map(Number);
  } else {
    const {facts} = await ask({kind: "tokens", text: state.text});
    ids = facts.ids;
    if (facts.unknown) note += `${facts.unknown} characters are not in the vocabulary, and are left out. `;
    if (facts.tokens > ids.length) note += `The first ${ids.length} of ${facts.tokens} tokens are shown. `;
  }
  state.layer = clamp(state.layer, 0, n_layer - 1);
  state.head = clamp(state.head, 0, n_head - 1);
  const token = state.token < 0 ? ids.length - 1 : Math.min(state.token, ids.length - 1);
  state.replaced = replacements(ids).map(entry => entry.join(":")).join(",");
  const asked = []; // what the view asks about the text
  const ownAsk = (kind, options) => {
    asked.push([kind, options]);
    return ask(question(kind, ids, options));
  };
  const overview = await ownAsk("overview");
  const {layer, head} = state, labels = ids.map(id => pieces[id]);
  const names = labels.map((label, t) => `${t} ${visible(label)}`);
  return {
    model, ids, token, layer, head, note, overview, asked, config: model.config, labels, names, ask: ownAsk,
    other: await loadOther(ids),
  };
}

// The replaced tokens that are still in ids: [position, id before, id after].
function replacements(ids) {
  if (!state.ids) return [];
  return state.replaced.split(",").map(entry => entry.split(":").map(Number))
    .filter(([position, before, after]) => ids[position] === after && before in pieces);
}

// What is compared with, if it is: the second model, or another checkpoint of the only one. It has fewer ids if its
// context is shorter.
async function loadOther(allIds) {
  if (!isComparable() || state.view !== "compare" && state.color !== "difference") return null;
  const index = described.models.length - 1, model = described.models[index], ids = allIds.slice(0, model.limit);
  const first = index ? -1 : model.checkpoints[0], step = state.other_step < 0 ? first : state.other_step;
  const exists = (layer, head = 0) => Number(layer) < model.config.n_layer && Number(head) < model.config.n_head;
  const switches = { // without the layers and heads that it lacks
    heads_off: state.heads_off.split(",").filter(pair => exists(...pair.split("."))).join(","),
    mlps_off: state.mlps_off.split(",").filter(layer => exists(layer)).join(","),
  };
  const otherAsk = (kind, options) => {
    const which = index ? {model: index} : {};
    return ask(question(kind, ids, {...switches, ...options, ...which, ...step < 0 ? {} : {step}}));
  };
  const name = [index && model.name, step >= 0 && `step ${short(step)}`].filter(Boolean).join(", ");
  return {model, name, ids, step, overview: await otherAsk("overview"), ask: otherAsk};
}

function isComparable() {
  return described.models.length === 2 || described.models[0].checkpoints.length > 1;
}

function byId(id) {
  return document.getElementById(id);
}

function clamp(x, low, high) {
  return Math.max(low, Math.min(high, x));
}

// An element with attributes and children. Attributes that are functions are event handlers, and testid is data-testid;
// children that are strings become text, never markup.
function element(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

function div(className, ...children) {
  return element("div", {class: className}, ...children);
}

function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if ((value ?? false) !== false) node.setAttribute(name === "testid" ? "data-testid" : name, value);
  }
  node.append(...children.flat(Infinity).filter(child => (child ?? false) !== false));
  return node;
}

function errorBox({message}) {
  return element("p", {class: "error", role: "alert"}, message);
}

const SHOWN_AS = new Map([["\n", "⏎"], ["\t", "⇥"], ["\r", "␍"], [" ", "␣"], ["", "∅"]]);
const CONTROL_CHARACTERS = /[\0-\x1f\x7f]/g; // have symbols in Unicode
const INVISIBLE =
  /[\x80-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]/;

// A token as it is shown: white space and control characters are made visible, and nothing reverses the text beside it.
function visible(text) {
  if (SHOWN_AS.has(text)) return SHOWN_AS.get(text);
  const symbol = code => String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
  const shown = text.replace(CONTROL_CHARACTERS, c => symbol(c.charCodeAt(0)))
    .replace(INVISIBLE, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return RIGHT_TO_LEFT.test(shown) ? `\u2068${shown}\u2069` : shown;
}

// The same within a line of text, which keeps its spaces.
function inLine(label) {
  return visible(label).replaceAll("␣", " ");
}

// The same within a text, which keeps its line breaks.
function inText(label) {
  return label === "\n" ? "⏎\n" : inLine(label);
}

const encoder = new TextEncoder();

// The text of token ids, of which some may be parts of a character.
function textOf(ids) {
  const bytes = ids.flatMap(id => described.bytes[id]
    ? described.bytes[id].split(" ").map(byte => parseInt(byte, 16)) : [...encoder.encode(pieces[id])]);
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(Uint8Array.from(bytes));
}

const WHOLE = new Intl.NumberFormat("en-US", {signDisplay: "negative"}); // without −0

// A whole number, or one with four significant digits.
function short(x) {
  if (!Number.isFinite(x)) return x > 0 ? "∞" : x < 0 ? "−∞" : "NaN"; // also for null, as NaN is in JSON
  const size = Math.abs(x), text = Number.isSafeInteger(x) ? WHOLE.format(x)
    : size >= 1e5 || size < 1e-3 ? x.toExponential(3) : x.toPrecision(4);
  return text.replaceAll("-", "−");
}

function signed(x) {
  return (x > 0 ? "+" : "") + short(x);
}

function percent(p) {
  return `${(100 * p).toPrecision(3)}%`;
}

function sumOf(values) {
  return values.reduce((sum, x) => sum + x, 0);
}

function mean(values) {
  return sumOf(values) / values.length;
}

// The places of numbers in an array, that of the largest first.
function ranked(values) {
  return [...values.keys()].sort((a, b) => values[b] - values[a]);
}

// 0, 1, ..., n - 1
function upTo(n) {
  return Array.from({length: n}, (_, i) => i);
}

// A row of a matrix {shape: [N, M], data}.
function rowOf({shape, data}, i) {
  return data.subarray(i * shape[1], (i + 1) * shape[1]);
}
