"use strict";
// What is looked at, where the numbers come from, and when the page is drawn.

// --- the trace provider ----------------------------------------------------------------------------------------------
//
// Everything the page knows about a model comes from a provider: ask(question) returns {facts, tensors}, and
// generate(question, signal) yields events. This one asks the server (folio/trace_provider.py).

const server = {
  async ask(question) {
    const response = await fetch("/ask", post(question));
    if (!response.ok) throw new Error((await response.json()).error);
    return unpack(await response.arrayBuffer());
  },

  async *generate(question, signal) {
    const response = await fetch("/generate", {...post(question), signal});
    if (!response.ok) throw new Error((await response.json()).error);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  },
};

function post(value) {
  return {method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(value)};
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
const answers = new Map(); // by question, the newest last: {promise, size in bytes}
const KEPT_BYTES = 64e6;

function ask(question) {
  const key = JSON.stringify(question);
  const answer = answers.get(key) ?? {promise: provider.ask(question), size: 0};
  answers.delete(key);
  answers.set(key, answer);
  answer.promise.then(({tensors}) => {
    answer.size = Object.values(tensors).reduce((sum, {data}) => sum + data.byteLength, 0);
    forgetAnswers();
  }, () => answers.delete(key));
  return answer.promise;
}

// Forget the oldest answers, but never the newest one.
function forgetAnswers() {
  let size = 0;
  for (const [key, answer] of Array.from(answers).reverse()) {
    size += answer.size;
    if (size > KEPT_BYTES && size > answer.size) answers.delete(key);
  }
}

// --- state -----------------------------------------------------------------------------------------------------------
//
// The state is in the URL, so that a link shows the same. Only what differs from the defaults is written.

const DEFAULTS = {
  view: "tokens", text: null, ids: "", layer: 0, head: 0, token: -1, step: -1, color: "loss",
  shade: "linear", hide_first: 0, mask: "before", scale: 1, heads_off: "", mlps_off: "",
  temperature: 0.8, top_k: 200, top_p: 1, min_p: 0, seed: 1337,
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

// Change the state without drawing, for a view that updates itself.
function remember(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", link({}));
  for (const node of document.querySelectorAll("#menu [data-view]")) node.href = link({view: node.dataset.view});
}

// What a question about the current text starts with. options: other fields, such as {model: 1}.
function question(kind, ids, options = {}) {
  const {mask, scale, heads_off, mlps_off} = state;
  const asked = {kind, ids, mask, scale: Boolean(scale), heads_off, mlps_off, ...options};
  if (state.step >= 0 && !asked.model) asked.step = state.step;
  return asked;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

let drawing = 0; // counts the calls of draw; an older one stops when a newer one has begun

async function draw() {
  const mine = ++drawing, box = document.getElementById("view"), giveFocusBack = keepFocus();
  box.classList.add("busy");
  try {
    const context = await loadContext();
    if (mine !== drawing) return;
    drawSurroundings(context);
    giveFocusBack();
    const view = views[state.view] ?? views.tokens;
    const content = element("div", {"data-testid": `view-${view.id}`},
      element("h2", {}, view.title), element("p", {}, view.about));
    await view.draw(content, context);
    if (mine === drawing) box.replaceChildren(content);
  } catch (problem) {
    if (mine === drawing) box.replaceChildren(element("p", {class: "error", role: "alert"}, problem.message));
  } finally {
    if (mine === drawing) {
      giveFocusBack();
      box.classList.remove("busy");
      document.body.dataset.drawn = mine;
    }
  }
}

// Remember which control has the keyboard's focus. Returns a function that gives it to the one in the same place after
// drawing.
function keepFocus() {
  const focused = document.activeElement, box = focused?.closest("#menu, #strip-bar, #view");
  const isVisible = focused?.matches(":focus-visible"); // not after a click, so that the arrow keys then select tokens
  const controls = () => box && isVisible ? Array.from(box.querySelectorAll("a, button, input, select, textarea")) : [];
  const place = controls().indexOf(focused);
  return () => {
    const control = controls()[place];
    if (document.activeElement === document.body && control?.tagName === focused.tagName) control.focus({preventScroll: true});
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
  const overview = await ask(question("overview", ids));
  const {layer, head} = state;
  return {
    model, ids, token, layer, head, note, overview, config: model.config,
    labels: ids.map(id => pieces[id]),
    ask: (kind, options) => ask(question(kind, ids, options)),
  };
}

function clamp(x, low, high) {
  return Math.max(low, Math.min(high, x));
}

// An element with attributes and children. Attributes that are functions are event handlers; children that are strings
// become text, never markup.
function element(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

const SHOWN_AS = new Map([["\n", "⏎"], ["\t", "⇥"], ["\r", "␍"], [" ", "␣"], ["", "∅"]]);
const CONTROL_CHARACTERS = /[\0-\x1f\x7f]/g; // have symbols in Unicode
const INVISIBLE_CHARACTERS = /[\x80-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]/;

// A token as it is shown: white space and control characters are made visible, and nothing reverses the text beside it.
function visible(text) {
  if (SHOWN_AS.has(text)) return SHOWN_AS.get(text);
  const shown = text.replace(CONTROL_CHARACTERS, c => String.fromCharCode(0x2400 + (c === "\x7f" ? 33 : c.charCodeAt(0))))
    .replace(INVISIBLE_CHARACTERS, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return RIGHT_TO_LEFT.test(shown) ? `\u2068${shown}\u2069` : shown;
}

const encoder = new TextEncoder();

// The text of token ids, of which some may be parts of a character.
function textOf(ids) {
  const bytes = ids.flatMap(id => described.bytes[id]
    ? described.bytes[id].split(" ").map(byte => parseInt(byte, 16)) : Array.from(encoder.encode(pieces[id])));
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(Uint8Array.from(bytes));
}

// A number with four significant digits.
function short(x) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x).replace("-", "−");
  const size = Math.abs(x);
  return (size >= 1e5 || size < 1e-3 ? x.toExponential(2) : x.toPrecision(4)).replace("-", "−");
}

function percent(p) {
  return `${(100 * p).toPrecision(3)}%`;
}
