"use strict";
// What surrounds the views: the model's name, the text, the tokens, the checkpoints, the menu, and the keyboard.

const COLORINGS = {
  loss: {title: "loss", read: (tensors, t) => t ? tensors.loss.data[t - 1] : NaN, most: 6, unit: "nats"},
  rank: {title: "rank", read: (tensors, t) => t ? Math.log2(1 + tensors.rank.data[t - 1]) : NaN, most: 8, unit: "log₂(1 + rank)"},
  entropy: {title: "entropy", read: (tensors, t) => t ? tensors.entropy.data[t - 1] : NaN, most: 4, unit: "nats before the token"},
  difference: {
    title: "difference", read: ({loss}, t, {loss: other}) => t && t <= other.data.length ? loss.data[t - 1] - other.data[t - 1] : NaN,
    most: 3, unit: "nats", scale: "signed", offered: isComparable,
  },
};

function drawSurroundings(context) {
  const {model, note} = context, {config} = model;
  const names = described.models.map(model => model.name).join(" and ");
  document.title = `Folio: ${names}`;
  document.getElementById("model-facts").replaceChildren(
    `${names} · ${model.num_params.total.toLocaleString("en-US")} parameters · ${config.n_layer} layers, ${config.n_head} heads, `
    + `${config.n_embd} channels · context ${config.block_size} · ${config.position} positions · ${model.vocab_size.toLocaleString("en-US")} tokens (${model.tokenizer}) `);
  const box = document.getElementById("text");
  if (document.activeElement !== box) box.value = state.ids ? textOf(context.ids) : state.text;
  document.getElementById("input-note").textContent = note;
  drawSwitched(context);
  drawCheckpoints(model);
  drawStrip(context);
  drawMenu();
}

// A badge that says what is changed in the model or the text, with a button that undoes it.
function drawSwitched({ids}) {
  const heads = state.heads_off.split(",").filter(Boolean), mlps = state.mlps_off.split(",").filter(Boolean);
  const replaced = replacements(ids), list = (name, items) => items.length > 4 ? `${items.length} ${name}s off` : `${name} ${items.join(", ")} off`;
  const changes = [
    {after: "mask after the softmax", off: "no mask"}[state.mask], !state.scale && "no 1/√D",
    heads.length && list("head", heads), mlps.length && list("MLP", mlps),
    replaced.length && `token ${replaced.map(([position]) => position).join(", ")} replaced`,
  ].filter(Boolean);
  document.getElementById("switched")?.remove();
  if (!changes.length) return;
  document.getElementById("header").append(element("div", {id: "switched", role: "status", "data-testid": "switched"},
    element("a", {href: link({view: "switches"})}, `Changed: ${changes.join(", ")}`), " ",
    element("button", {"data-testid": "reset-switches", click: () => change({...UNCHANGED, ...restored(ids)})}, "reset")));
}

// The change of state that puts the replaced tokens back.
function restored(ids) {
  const before = new Map(replacements(ids));
  return before.size ? {ids: ids.map((id, t) => before.get(t) ?? id).join(","), replaced: ""} : {};
}

// The slider over the checkpoints, of which a run that is still training adds some and removes others.
function drawCheckpoints({checkpoints, step}) {
  const box = document.getElementById("checkpoints");
  if (checkpoints.length < 2) return box.replaceChildren();
  const current = state.step < 0 ? step : state.step;
  const move = event => change({step: described.models[0].checkpoints[Number(event.target.value)]});
  if (!box.firstChild) {
    box.append(element("label", {}, "checkpoint ", element("input", {
      type: "range", id: "checkpoint", "data-testid": "checkpoint", min: 0, step: 1, input: move,
    }), " ", element("output", {id: "checkpoint-step"})));
  }
  const slider = document.getElementById("checkpoint");
  slider.max = checkpoints.length - 1;
  slider.value = checkpoints.filter(other => other < current).length;
  document.getElementById("checkpoint-step").textContent = `step ${current.toLocaleString("en-US")}`;
}

function drawStrip({labels, token, overview, other}) {
  const offered = Object.entries(COLORINGS).filter(([, coloring]) => coloring.offered?.() ?? true);
  const coloring = Object.fromEntries(offered)[state.color] ?? COLORINGS.loss, {scale = "sequential", most, unit} = coloring;
  document.getElementById("strip-bar").replaceChildren(
    element("label", {}, "color by ", element("select", {"data-testid": "color", change: event => change({color: event.target.value})},
      offered.map(([name, {title}]) => element("option", {value: name, selected: name === state.color}, title)))),
    scale === "signed" ? `loss − loss of ${other.name}: dark −${most} ${unit}, light ${most}` : `0 to ${most} ${unit}, light to dark`);
  const strip = document.getElementById("strip");
  strip.replaceChildren(...labels.map((label, t) => {
    const x = coloring.read(overview.tensors, t, other?.overview.tensors);
    const color = Number.isFinite(x) ? colorOf(scale, x / most) : [255, 255, 255];
    return element("span", {
      class: t === token ? "token selected" : "token", role: "option", "aria-selected": String(t === token),
      "data-testid": `strip-${t}`, title: `${t}: ${visible(label)}${Number.isFinite(x) ? ` ${coloring.title} ${short(x)}` : ""}`,
      style: {background: css(color), color: textColorOn(color)}, click: () => change({token: t}),
    }, label === "\n" ? "⏎\n" : label === " " ? " " : visible(label).replaceAll("␣", " "));
  }));
}

// The views in the order in which the model computes.
const MENU = {
  Model: ["map", "parameters"],
  Input: ["tokens", "embedding", "positions", "examples"],
  Attention: ["qkv", "head-split", "looking-back", "attention-row", "attention-table", "weighted-sum", "merge", "all-heads"],
  Layers: ["mlp", "stream"],
  Output: ["output", "loop", "cache"],
  Experiments: ["switches", "checkpoints", "compare", "memorized", "run"],
  Sampling: ["playground"],
};

// Whether a view makes sense for these models, such as "compare" for two of them.
function isOffered(id) {
  return id in views && (views[id].offered?.() ?? true);
}

function drawMenu() {
  document.getElementById("menu").replaceChildren(...Object.entries(MENU).flatMap(([group, ids]) => [
    element("h3", {}, group),
    ...ids.filter(isOffered).map(id => element("a", {
      href: link({view: id}), "data-view": id, class: id === state.view ? "selected" : null, "aria-current": id === state.view ? "page" : null,
    }, views[id].title)),
  ]), element("h3", {}, "Export"), element("a", {href: "#", click: event => {
    event.preventDefault();
    saveView();
  }}, "this view as HTML"));
}

// --- input -----------------------------------------------------------------------------------------------------------

let typing; // the timer that waits for the end of typing

document.getElementById("text").addEventListener("input", event => {
  clearTimeout(typing);
  typing = setTimeout(() => change({text: event.target.value, ids: "", token: -1}), 250);
});

window.addEventListener("hashchange", () => {
  readState();
  draw();
});

document.addEventListener("keydown", event => {
  if (!described || event.target.matches("textarea, input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const {n_layer, n_head} = described.models[0].config, steps = described.models[0].checkpoints;
  const count = document.getElementById("strip").childElementCount;
  const token = state.token < 0 ? count - 1 : state.token;
  const at = steps.indexOf(state.step < 0 ? described.models[0].step : state.step);
  if (views[state.view]?.keys?.[event.key]) {
    event.preventDefault();
    return views[state.view].keys[event.key]();
  }
  const menu = Object.values(MENU).flat().filter(isOffered), view = Math.max(0, menu.indexOf(state.view));
  const step = by => steps.length ? {step: steps[clamp(at + by, 0, steps.length - 1)]} : {};
  const changes = {
    ArrowLeft: {token: clamp(token - 1, 0, count - 1)}, ArrowRight: {token: clamp(token + 1, 0, count - 1)},
    ArrowUp: {layer: clamp(state.layer + 1, 0, n_layer - 1)}, ArrowDown: {layer: clamp(state.layer - 1, 0, n_layer - 1)},
    "[": {head: clamp(state.head - 1, 0, n_head - 1)}, "]": {head: clamp(state.head + 1, 0, n_head - 1)},
    ",": step(-1), ".": step(1),
    PageUp: {view: menu[clamp(view - 1, 0, menu.length - 1)]}, PageDown: {view: menu[clamp(view + 1, 0, menu.length - 1)]},
  }[event.key];
  if (!changes) return;
  event.preventDefault();
  change(changes);
});

async function start() {
  try {
    ({facts: described} = await provider.ask({kind: "models"}));
  } catch (problem) {
    return document.getElementById("view").replaceChildren(element("p", {class: "error", role: "alert"}, problem.message));
  }
  pieces = described.pieces;
  readState();
  await draw();
}

start();
