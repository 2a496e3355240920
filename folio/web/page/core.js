"use strict";
// Core of the page: data from the model, state in the URL, and drawing.

// --- the trace provider ----------------------------------------------------------------------------------------------
//
// All data about a model comes from a provider: ask(question) returns {facts, tensors}, and generate(question, signal)
// yields events. This provider uses the server (folio/web/questions.py).

const server = {
  async ask(question) {
    return unpack(await (await post("/ask", question)).arrayBuffer());
  },

  async *generate(question, signal) {
    const response = await post("/generate", question, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    try {
      for (;;) {
        const {done, value} = await explainFailure(reader.read(), signal);
        if (done) return;
        const lines = (buffer + value).split("\n");
        buffer = lines.pop();
        for (const line of lines) {
          const event = JSON.parse(line);
          if (event.error) throw new Error(event.error);
          yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // stops the server if the caller stops early
    }
  },
};

async function post(path, value, signal) {
  const body = JSON.stringify(value), headers = {"content-type": "application/json"};
  const response = await explainFailure(fetch(path, {method: "POST", headers, body, signal}), signal);
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({}));
  throw new Error(error ?? `The server answered with status ${response.status}.`);
}

// Replace the error of a failed connection by a helpful message.
function explainFailure(promise, signal) {
  return promise.catch(problem => {
    if (signal?.aborted) throw problem;
    throw Object.assign(new Error("The server does not answer. Is tools/view.py still running?"), {isOffline: true});
  });
}

// Parse an answer: length of the header, header, and tensors, aligned to 4 bytes. A tensor is {shape, data}.
function unpack(buffer) {
  const types = {float32: Float32Array, int32: Int32Array, uint8: Uint8Array};
  const length = new DataView(buffer).getUint32(0, true);
  const {tensors: kinds, ...facts} = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const tensors = {};
  let offset = 4 + length;
  for (const [name, {dtype, shape}] of Object.entries(kinds)) {
    const size = shape.reduce((product, n) => product * n, 1);
    tensors[name] = {shape, data: new types[dtype](buffer, offset, size)};
    offset += Math.ceil(size * types[dtype].BYTES_PER_ELEMENT / 4) * 4;
  }
  return {facts, tensors};
}

let provider = server;
const answers = new Map(); // cache: {promise, answer, bytes} by question, the last used at the end
const CACHE_BYTES = 2 ** 26; // capacity of the cache
const FACTS_BYTES = 4096; // estimated size of an answer without its tensors

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
      if (total <= CACHE_BYTES || old === key) break;
      total -= bytes;
      answers.delete(old);
    }
  }, () => answers.delete(key));
  return entry.promise;
}

// The answer to a question if it is in the cache.
function cachedAnswer(question) {
  return answers.get(JSON.stringify(question))?.answer;
}

// --- state -----------------------------------------------------------------------------------------------------------
//
// The state is stored in the URL, without default values, so that links reproduce a view.

const NO_SWITCHES = {mask: "before", scale: 1, heads_off: "", mlps_off: ""};
const DEFAULTS = {
  view: "story", text: null, ids: "", layer: 0, head: 0, token: -1, step: -1, color: "loss",
  shade: "linear", hide_first: 0, ...NO_SWITCHES,
  temperature: 0.8, top_k: 200, top_p: 1, min_p: 0, seed: 1337,
  follow: 0, // 1: show each new checkpoint of a run that is training
  other_step: -1, // step of the compared checkpoint
  replaced: "", // replaced tokens in ids: comma-separated POSITION:BEFORE:AFTER
};

const state = {...DEFAULTS};
const views = {}; // by id: {id, title, about, draw(box, context)}, and perhaps keys, available(), defaultToken(labels)
let info; // the answer to "models"
let pieces; // text of each token id

// Register a view and the defaults of its state.
function defineView(view, defaults = {}) {
  views[view.id] = view;
  Object.assign(DEFAULTS, defaults);
}

function readState() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const text = parameters.get(name);
    state[name] = text === null ? value : typeof value === "number" ? Number(text) || 0 : text;
  }
  state.text ??= info.text;
  if (!Object.hasOwn(views, state.view)) state.view = DEFAULTS.view;
}

// The step of the shown checkpoint.
function shownStep() {
  return state.step < 0 ? info.models[0].step : state.step;
}

function link(changes) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries({...state, ...changes})) {
    if (value !== DEFAULTS[name]) parameters.set(name, value);
  }
  return "#" + parameters;
}

// Selecting a checkpoint ends following the newest one.
function change(changes) {
  remember("step" in changes ? {follow: 0, ...changes} : changes);
  return draw();
}

function selectToken(token) {
  return change({token});
}

// Change the state without redrawing.
function remember(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", link({}));
  for (const node of document.querySelectorAll("#menu [data-view]")) node.href = link({view: node.dataset.view});
}

// A question about the current text. options: further fields, such as {model: 1}.
function question(kind, ids, {step, ...options} = {}) {
  const {mask, scale, heads_off, mlps_off} = state;
  const fields = {kind, ids, mask, scale: Boolean(scale), heads_off, mlps_off, ...options};
  if (step === undefined && state.step >= 0 && !fields.model) step = state.step;
  return step === undefined ? fields : {...fields, step};
}

// --- drawing ---------------------------------------------------------------------------------------------------------

let drawing = 0; // number of calls of draw; an older call stops when a newer one has begun

async function draw() {
  const current = ++drawing, box = byId("view"), restoreFocus = saveFocus();
  let context;
  box.classList.add("busy");
  document.body.classList.toggle("telling", state.view === "story");
  try {
    context = await loadContext();
    if (current !== drawing) return;
    drawSurroundings(context);
    restoreFocus();
    const view = views[state.view];
    const content = element("div", {testid: `view-${view.id}`},
      element("h2", {}, view.title), element("p", {}, view.about));
    await view.draw(content, context);
    if (current === drawing) {
      box.replaceChildren(content);
      startView(content.querySelector("h2"));
    }
  } catch (problem) {
    if (current !== drawing) return;
    if (!context) drawMenu(); // the URL is invalid
    byId("text").value ||= state.text;
    const {view, text} = state, href = link({...DEFAULTS, view, text});
    const canReset = !context && !problem.isOffline; // without the server, no link works
    box.replaceChildren(errorBox(problem), canReset ? element("a", {href}, "Reset this view") : "");
  } finally {
    if (current === drawing) {
      restoreFocus();
      box.classList.remove("busy");
      document.body.dataset.drawn = current;
      if (context) prefetch(context, current);
    }
  }
}

const PREFETCH_LIMIT = 20e6; // checkpoints of larger models load slowly

// Prefetch the view's answers for other checkpoints, the nearest first, until the page is drawn again. Makes the
// checkpoint slider respond immediately. For large models, prefetch only the next two.
async function prefetch({model, ids, asked}, current) {
  const {checkpoints} = model, index = checkpoints.indexOf(state.step);
  if (index < 0) return; // the slider was not moved
  const nearest = checkpoints.map((step, i) => [Math.abs(i - index), step]).sort((a, b) => a[0] - b[0]);
  for (const [, step] of nearest.slice(0, model.num_params.total < PREFETCH_LIMIT ? nearest.length : 3)) {
    for (const [kind, options] of asked) {
      if (current !== drawing) return;
      if (await ask(question(kind, ids, {step, ...options})).catch(() => null) === null) return;
    }
  }
}

// Return a function that restores the keyboard focus after drawing, to the control at the same position.
function saveFocus() {
  const focused = document.activeElement, box = focused?.closest("#menu, #strip-bar, #view");
  const isVisible = focused?.matches(":focus-visible"); // not after a click: the arrow keys then select tokens
  const selector = "a, button, input, select, textarea, [tabindex]";
  const controls = () => box && isVisible ? [...box.querySelectorAll(selector)] : [];
  const index = controls().indexOf(focused);
  return () => {
    const control = controls()[index];
    if (document.activeElement !== document.body || control?.tagName !== focused.tagName) return;
    if (focused.cell) control.cell = focused.cell; // the cursor of a grid
    control.focus({preventScroll: true});
  };
}

// Load the data that every view needs: model, ids of the text, selected token, and overview of the trace.
async function loadContext() {
  const model = info.models[0], {n_layer, n_head} = model.config;
  let ids, note = "";
  if (state.ids) {
    ids = state.ids.split(",").map(Number);
  } else {
    const {facts} = await ask({kind: "tokens", text: state.text});
    ids = facts.ids;
    if (facts.unknown) note += describeUnknown(facts.unknown, model);
    if ([...state.text].length === facts.unknown) {
      note += `The prompt is empty: the model starts from ${describeStart(pieces[ids[0]])}. `;
    }
    if (facts.tokens > ids.length) note += `The first ${ids.length} of ${facts.tokens} tokens are shown. `;
  }
  state.layer = clamp(state.layer, 0, n_layer - 1);
  state.head = clamp(state.head, 0, n_head - 1);
  const labels = ids.map(id => pieces[id]), {defaultToken = () => ids.length - 1} = views[state.view];
  const token = state.token < 0 ? defaultToken(labels) : Math.min(state.token, ids.length - 1);
  state.replaced = replacements(ids).map(entry => entry.join(":")).join(",");
  const asked = []; // questions of the view about the text, for prefetch
  const askAndRecord = (kind, options) => {
    asked.push([kind, options]);
    return ask(question(kind, ids, options));
  };
  const overview = await askAndRecord("overview");
  const {layer, head} = state;
  const names = labels.map((label, t) => `${t} ${visible(label)}`);
  return {
    model, ids, token, layer, head, note, overview, asked, config: model.config, labels, names, ask: askAndRecord,
    starts: documentStarts(ids, model.config.document_token),
    other: await loadOther(ids),
  };
}

// Whether the mask hides a key from a query: it comes later, or belongs to an earlier document.
function isHidden({starts}, query, key) {
  return key > query || key < starts[query];
}

// The token that an empty prompt becomes, as in sample.py.
function describeStart(piece) {
  return piece === "\n" ? "a line break" : `the token ${visible(piece)}`;
}

const MAX_NAMED_CHARACTERS = 8;

// A note about characters of the text that are not in the vocabulary.
function describeUnknown(count, {eot}) {
  const known = new Set(pieces), text = state.text.split(pieces[eot]).join(""); // without end-of-text tokens, if any
  const unknown = [...new Set(text)].filter(character => !known.has(character));
  const named = unknown.slice(0, MAX_NAMED_CHARACTERS).map(visible).join(" ");
  return (count === 1 ? "1 character is not in the vocabulary and is skipped: "
    : `${counted(count, "character")} are not in the vocabulary and are skipped: `)
    + `${named}${unknown.length > MAX_NAMED_CHARACTERS ? " …" : "."} `;
}

// The replaced tokens that are still in ids: [position, id before, id after].
function replacements(ids) {
  if (!state.ids) return [];
  return state.replaced.split(",").map(entry => entry.split(":").map(Number))
    .filter(([position, before, after]) => ids[position] === after && before in pieces);
}

// Load the second model, or another checkpoint of the only model, if they are compared. Its ids are cut to its context.
async function loadOther(allIds) {
  if (!isComparable() || state.view !== "compare" && state.color !== "difference") return null;
  const index = info.models.length - 1, model = info.models[index], ids = allIds.slice(0, model.limit);
  const defaultStep = index ? -1 : model.checkpoints[0];
  const step = state.other_step < 0 ? defaultStep : state.other_step;
  const otherAsk = (kind, options) => {
    const other = {...index ? {model: index} : {}, ...step < 0 ? {} : {step}};
    return ask(question(kind, ids, {...existingSwitches(model), ...options, ...other}));
  };
  const name = [index && model.name, step >= 0 && `step ${short(step)}`].filter(Boolean).join(", ");
  return {model, name, ids, step, overview: await otherAsk("overview"), ask: otherAsk};
}

// The switches without layers and heads that a model does not have.
function existingSwitches({config: {n_layer, n_head}}) {
  const exists = (layer, head = 0) => Number(layer) < n_layer && Number(head) < n_head;
  return {
    heads_off: state.heads_off.split(",").filter(pair => exists(...pair.split("."))).join(","),
    mlps_off: state.mlps_off.split(",").filter(layer => exists(layer)).join(","),
  };
}

function isComparable() {
  return info.models.length === 2 || info.models[0].checkpoints.length > 1;
}

function byId(id) {
  return document.getElementById(id);
}

function errorBox({message}) {
  return element("p", {class: "error", role: "alert"}, message);
}

const SYMBOLS = new Map([["\n", "⏎"], ["\t", "⇥"], ["\r", "␍"], [" ", "␣"], ["", "∅"]]);
const CONTROL_CHARACTERS = /[\0-\x1f\x7f]/g; // have symbols in Unicode
const INVISIBLE =
  /[\x80-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]/;

// The label of a token: white space and control characters become visible, and right-to-left text is isolated.
function visible(text) {
  if (SYMBOLS.has(text)) return SYMBOLS.get(text);
  const symbol = code => String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
  const shown = text.replace(CONTROL_CHARACTERS, c => symbol(c.charCodeAt(0)))
    .replace(INVISIBLE, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  if (RIGHT_TO_LEFT.test(shown)) return `\u2068${shown}\u2069`;
  return isMusic() ? shown : shown.replace(/^ /, "␣");
}

// The label of a token in a sentence.
function quoted(label) {
  return `“${isMusic() ? label.trim() : visible(label)}”`;
}

// Whether the tokens are events of music. Their leading spaces only separate them.
function isMusic() {
  return info?.models[0].tokenizer === "midi";
}

// A token and its position in a title.
function tokenAt({labels}, t) {
  return `${t} ${quoted(labels[t])}`;
}

// The label of a token within a line of text, with normal spaces.
function inLine(label) {
  return visible(label).replaceAll("␣", " ");
}

const encoder = new TextEncoder();

// The text of token ids, which may be parts of characters.
function textOf(ids) {
  const bytes = ids.flatMap(id => info.bytes[id]
    ? info.bytes[id].split(" ").map(byte => parseInt(byte, 16)) : [...encoder.encode(pieces[id])]);
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(Uint8Array.from(bytes));
}

const INTEGER_FORMAT = new Intl.NumberFormat("en-US", {signDisplay: "negative"}); // without −0

// Format a number: integers exactly, others with four significant digits.
function short(x) {
  if (!Number.isFinite(x)) return x > 0 ? "∞" : x < 0 ? "−∞" : "NaN"; // also for null, which is NaN in JSON
  const size = Math.abs(x), text = Number.isSafeInteger(x) ? INTEGER_FORMAT.format(x)
    : size >= 1e5 || size < 1e-3 ? x.toExponential(3) : x.toPrecision(4);
  return text.replaceAll("-", "−");
}

// A number and a noun: 1 token, 2,000 tokens.
function counted(n, noun) {
  return `${short(n)} ${noun}${n === 1 ? "" : "s"}`;
}

function countTokens(n) {
  return counted(n, "token");
}

function signed(x) {
  return (x > 0 ? "+" : "") + short(x);
}

// Format a probability. The exports have all digits.
function percent(p) {
  return p === 0 ? "0%" : p < 1e-4 ? "<0.01%" : `${(100 * p).toPrecision(3)}%`;
}

function sumOf(values) {
  return values.reduce((sum, x) => sum + x, 0);
}

function mean(values) {
  return sumOf(values) / values.length;
}

// The indices that sort an array in descending order.
function argsort(values) {
  return [...values.keys()].sort((a, b) => values[b] - values[a]);
}

// 0, 1, ..., n - 1
function range(n) {
  return Array.from({length: n}, (_, i) => i);
}

// A row of a matrix {shape: [N, M], data}.
function rowOf({shape, data}, i) {
  return data.subarray(i * shape[1], (i + 1) * shape[1]);
}
