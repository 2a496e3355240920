// The page around the views: model facts, text, tokens, checkpoints, menu, and keyboard.

// Numbers of the overview by which the strip can color tokens. Number i belongs to token i + 1.
const COLORINGS = {
  loss: {read: ({loss}, i) => loss.data[i], max: 6, unit: "nats"},
  rank: {read: ({rank}, i) => Math.log2(1 + rank.data[i]), max: 8, unit: "log₂(1 + rank)"},
  entropy: {read: ({entropy}, i) => entropy.data[i], max: 4, unit: "nats"},
  difference: {read: ({loss}, i, other) => loss.data[i] - other.loss.data[i], max: 3, unit: "nats", scale: "signed"},
};

function drawSurroundings(context) {
  const {model, note} = context;
  byId("model-facts").replaceChildren(...info.models.map(({name, num_params, config, vocab_size, tokenizer}, i) =>
    div("", `${i ? "compared with " : ""}${name} · ${short(num_params.total)} parameters · `
      + `${config.n_layer} layers, ${config.n_head} heads, ${config.n_embd} channels · context ${config.block_size} · `
      + `${config.position} positions · ${short(vocab_size)} tokens (${tokenizer})`)));
  const box = byId("text");
  if (document.activeElement !== box) box.value = state.ids ? textOf(context.ids) : state.text;
  byId("input-note").textContent = note;
  drawChangeBadge(context);
  drawCheckpoints(model);
  drawStrip(context);
  drawMenu();
}

// Show a badge with the changes of the model and the text, and a button to reset them.
function drawChangeBadge({ids}) {
  const {heads_off, mlps_off} = state, replaced = replacements(ids).map(([position]) => position);
  const changes = [
    {after: "mask after the softmax", off: "no mask"}[state.mask], !state.scale && "no 1/√D",
    heads_off && `heads ${heads_off.replaceAll(",", ", ")} off`,
    mlps_off && `MLPs ${mlps_off.replaceAll(",", ", ")} off`,
    replaced.length && `token ${replaced.join(", ")} replaced`,
  ].filter(Boolean);
  byId("switched")?.remove();
  if (!changes.length) return;
  const original = replaced.length ? {ids: originalIds(ids).join(","), replaced: ""} : {};
  const reset = () => change({...NO_SWITCHES, ...original});
  byId("header").append(element("div", {id: "switched", role: "status", testid: "switched"},
    element("a", {href: link({view: "switches"})}, `Changed: ${changes.join(", ")}`), " ",
    element("button", {testid: "reset-switches", click: reset}, "reset")));
}

// The ids before tokens were replaced.
function originalIds(ids) {
  const before = new Map(replacements(ids));
  return ids.map((id, t) => before.get(t) ?? id);
}

// Update the checkpoint slider. A training run adds and removes checkpoints.
function drawCheckpoints(model) {
  const box = byId("checkpoints"), {checkpoints} = model, current = shownStep();
  if (checkpoints.length < 2) return box.replaceChildren();
  if (!box.firstChild) {
    box.append(slider("checkpoint", {
      id: "checkpoint", testid: "checkpoint", min: 0, value: 0,
      read: i => `step ${short(model.checkpoints[i])}`, move: i => change({step: model.checkpoints[i]}),
    }));
  }
  const [input, output] = box.querySelectorAll("input, output");
  input.max = checkpoints.length - 1;
  input.value = checkpoints.filter(other => other < current).length;
  const newest = checkpoints.at(-1);
  output.textContent = `step ${short(current)}${current < newest ? ` of ${short(newest)}` : ""}`;
}

let shownStrip = []; // arguments of the last drawStrip

function drawStrip({labels, names, token, overview, other}) {
  const available = Object.keys(COLORINGS).filter(name => name !== "difference" || isComparable());
  const color = available.includes(state.color) ? state.color : "loss";
  const {read, max, unit, scale = "sequential"} = COLORINGS[color];
  const shown = [overview, other?.overview, color, token];
  if (shown.every((x, i) => x === shownStrip[i])) return;
  shownStrip = shown;
  byId("strip-bar").replaceChildren(
    select("color by", available, color, color => change({color}), {testid: "color"}),
    scale === "signed" ? `loss − loss of ${other.name}: dark −${max} ${unit}, light ${max}`
      : `0 to ${max} ${unit}, light to dark`);
  byId("strip").replaceChildren(...tokenStrip(labels, token, t => {
    const x = t ? read(overview.tensors, t - 1, other?.overview.tensors) : NaN;
    return {
      role: "option", "aria-selected": String(t === token), style: onColor(scale, x / max),
      testid: `strip-${t}`, title: `${names[t]}${Number.isFinite(x) ? `: ${color} ${short(x)}` : ""}`,
    };
  }).children);
}

// The views, in the order of the computation.
const MENU = {
  Model: ["map", "parameters"],
  Input: ["tokens", "embedding", "positions", "examples"],
  Attention: ["qkv", "head-split", "looking-back", "roll", "attention-row", "attention-table", "weighted-sum", "merge",
    "all-heads"],
  Layers: ["mlp", "stream"],
  Output: ["output", "loop", "alignment", "cache"],
  Experiments: ["switches", "checkpoints", "compare", "memorized", "run"],
  Sampling: ["playground"],
};

// Whether a view is available for these models.
function isAvailable(id) {
  return id in views && (views[id].available?.() ?? true);
}

function drawMenu() {
  byId("menu").replaceChildren(...Object.entries(MENU).flatMap(([group, ids]) => [
    element("h3", {}, group),
    ...ids.filter(isAvailable).map(id => element("a", {
      href: link({view: id}), "data-view": id, class: id === state.view && "selected",
      "aria-current": id === state.view && "page",
    }, views[id].title)),
  ]), element("h3", {}, "Export"), element("a", {href: "#", click: event => {
    event.preventDefault();
    saveView();
  }}, "This view as HTML"));
}

// --- input -----------------------------------------------------------------------------------------------------------

let typingTimer; // redraws after a pause in typing

byId("text").addEventListener("input", event => {
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => change({text: event.target.value, ids: "", token: -1}), 250);
});

window.addEventListener("hashchange", async () => {
  if (!info) return;
  const {view} = state, box = byId("view");
  readState();
  await draw();
  const {top} = box.getBoundingClientRect();
  if (view !== state.view && (top < 0 || top > window.innerHeight / 2)) box.scrollIntoView();
});

document.addEventListener("keydown", event => {
  const isTyping = event.target.matches("textarea, input, select");
  if (!info || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const [{config: {n_layer, n_head}, checkpoints: steps}] = info.models, index = steps.indexOf(shownStep());
  const count = byId("strip").childElementCount, token = state.token < 0 ? count - 1 : state.token;
  const action = views[state.view].keys?.[event.key]; // a key of the view
  if (action) {
    event.preventDefault();
    return action();
  }
  const menu = Object.values(MENU).flat().filter(isAvailable), view = menu.indexOf(state.view);
  const move = (name, to, length) => ({[name]: clamp(to, 0, length - 1)});
  const choose = (name, values, to) => values.length > 1 ? {[name]: values[clamp(to, 0, values.length - 1)]} : {};
  const changes = {
    ArrowLeft: move("token", token - 1, count), ArrowRight: move("token", token + 1, count),
    ArrowUp: move("layer", state.layer - 1, n_layer), ArrowDown: move("layer", state.layer + 1, n_layer),
    "[": move("head", state.head - 1, n_head), "]": move("head", state.head + 1, n_head),
    ",": choose("step", steps, index - 1), ".": choose("step", steps, index + 1),
    PageUp: choose("view", menu, view - 1), PageDown: choose("view", menu, view + 1),
  }[event.key];
  if (!changes) return;
  event.preventDefault();
  change(changes);
});

async function start() {
  try {
    ({facts: info} = await provider.ask({kind: "models"}));
  } catch (problem) {
    return byId("view").replaceChildren(errorBox(problem));
  }
  pieces = info.pieces;
  byId("text").disabled = false;
  document.title ||= `Folio: ${info.models.map(({name}) => name).join(" and ")}`;
  if (isAvailable("roll")) DEFAULTS.view = "roll"; // for music
  readState();
  await draw();
}

start();
