// The page around the views: model facts, text, tokens, checkpoints, menu, and keyboard.

// Numbers of the overview by which the strip can color tokens. Number i belongs to token i + 1.
const COLORINGS = {
  loss: {
    read: ({loss}, i) => loss.data[i], max: maxLoss, unit: "nats",
    help: "how surprised the model was by the token: −ln of its probability, in nats. 0: certain",
  },
  rank: {
    read: ({rank}, i) => Math.log2(1 + rank.data[i]), max: () => Math.log2(pieces.length), unit: "log₂(1 + rank)",
    help: "how many tokens were more likely than the token",
  },
  entropy: {
    read: ({entropy}, i) => entropy.data[i], max: maxLoss, unit: "nats",
    help: "how uncertain the model was before the token, in nats. 0: certain",
  },
  difference: {
    help: "the loss minus that of the compared model or checkpoint",
    read: ({loss}, i, other) => loss.data[i] - other.loss.data[i], max: () => 3, unit: "nats", scale: "signed",
  },
};

// The loss of equal probabilities, in nats: the end of the color scale.
function maxLoss() {
  return Math.log(pieces.length);
}

function lossBar() {
  return colorBar("sequential", maxLoss(), ["0", `${short(maxLoss())} nats`]);
}

function drawSurroundings(context) {
  const {model, note} = context;
  byId("facts").firstChild.textContent = info.models.map(({name, num_params}) =>
    `${name}, ${short(num_params.total)} parameters`).join(" and ");
  byId("model-facts").replaceChildren(...info.models.map(({name, config, vocab_size, tokenizer}) =>
    div("", `${name}: ${counted(config.n_layer, "layer")}, ${counted(config.n_head, "head")}, `
      + `${config.n_embd} channels · context ${config.block_size} · ${config.position} positions · `
      + `${short(vocab_size)} tokens (${tokenizer})`)));
  if (!typingTimer) {
    shownText = state.ids ? textOf(context.ids) : state.text;
    showText();
  }
  byId("input-note").textContent = note;
  drawChangeBadge(context);
  drawCheckpoints(model);
  drawStrip(context);
  drawMenu();
  drawOverlap(context).catch(() => byId("training-note").textContent = ""); // the view reports the problem
}

// Say beside the losses how much of the text occurs in the training data: its loss is not that of new text.
async function drawOverlap({ids}) {
  const box = byId("training-note"), current = drawing;
  const answers = await Promise.all(info.models.map(({limit}, model) =>
    ask({kind: "overlap", ids: ids.slice(0, limit), ...model ? {model} : {}})));
  if (current !== drawing) return;
  box.classList.toggle("quoted", answers.some(({facts}) => facts.in_training));
  const lines = answers.map(({facts}) => describeOverlap(facts));
  const named = lines.map((line, model) => line && info.models[1] ? `${info.models[model].name}: ${line}` : line);
  box.textContent = named.filter(Boolean).join(" ");
}

function describeOverlap({reason, characters, in_training: count, searched, complete, init_from: base}) {
  if (reason) return `Not compared with the training data: ${reason}.`;
  const unit = isMusic() ? "event" : "character", data = "the training data";
  if (count) {
    return `${short(count)} of these ${counted(characters, unit)} occur in ${data}, so the loss is not that of new text.`;
  }
  const first = complete ? "" : `Only the first ${countTokens(searched)} of ${data} were searched for this text. `;
  return first + (base && !["scratch", "resume"].includes(base) ? `The training data of ${base} was not searched.` : "");
}

let shownText = "";

// Show the text, in one line unless the reader edits it.
function showText() {
  const box = byId("text");
  box.value = document.activeElement === box ? shownText : shownText.replaceAll("\n", "⏎ ");
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
  const box = byId("checkpoints"), {checkpoints} = model, current = shownStep(), {training} = run.facts;
  if (checkpoints.length < 2 && !training) return box.replaceChildren();
  if (!box.firstChild) {
    box.append(slider("checkpoint", {
      id: "checkpoint", testid: "checkpoint", min: 0, value: 0,
      read: i => `step ${short(model.checkpoints[i])}`, move: i => change({step: model.checkpoints[i]}),
    }), element("label", {}, element("input", {type: "checkbox", testid: "follow", change: ({target: {checked}}) =>
      change(checked ? {step: model.checkpoints.at(-1), follow: 1} : {follow: 0})}), " follow the newest checkpoint"));
  }
  const [input, output, follow] = box.querySelectorAll("input, output");
  follow.checked = state.follow;
  follow.parentNode.hidden = !training;
  input.max = checkpoints.length - 1;
  input.value = checkpoints.filter(other => other < current).length;
  const newest = checkpoints.at(-1);
  output.textContent = `step ${short(current)}${current < newest ? ` of ${short(newest)}` : ""}`;
}

const STRIP_LINE = 21; // in pixels, see #strip in style.css
let shownStrip = []; // arguments of the last drawStrip

function drawStrip({labels, names, token, overview, other}) {
  const available = Object.keys(COLORINGS).filter(name => name !== "difference" || isComparable());
  const color = available.includes(state.color) ? state.color : "loss";
  const {read, unit, scale = "sequential"} = COLORINGS[color], max = COLORINGS[color].max();
  const shown = [overview, other?.overview, color, token, palette()];
  if (shown.every((x, i) => x === shownStrip[i])) return;
  shownStrip = shown;
  byId("strip-bar").replaceChildren(
    select("color by", available, color, color => change({color}), {testid: "color", title: COLORINGS[color].help}),
    colorBar(scale, max, scale === "signed" ? [`loss − loss of ${other.name}: −${max}`, `${max} ${unit}`]
      : ["0", `${short(max)} ${unit}`]));
  const strip = byId("strip");
  strip.setAttribute("aria-activedescendant", `option-${token}`);
  const spans = tokenSpans(labels, token, t => {
    const x = t ? read(overview.tensors, t - 1, other?.overview.tensors) : NaN;
    return {
      id: `option-${t}`, role: "option", "aria-selected": String(t === token), style: onColor(scale, x / max),
      testid: `strip-${t}`, title: `${names[t]}${Number.isFinite(x) ? `: ${color} ${short(x)}` : ""}`,
    };
  });
  strip.replaceChildren(...withBreaks(spans, labels));
  const lines = (strip.children[token].getBoundingClientRect().top - strip.getBoundingClientRect().top) / STRIP_LINE;
  strip.scrollTop += STRIP_LINE * Math.floor(lines); // whole lines
}

// The views, in the order of the computation.
const MENU = {
  Story: ["story"],
  Model: ["map", "parameters"],
  Input: ["tokens", "tune", "embedding", "positions", "examples"],
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
  byId("view-list").replaceChildren(...Object.entries(MENU).map(([label, ids]) => [label, ids.filter(isAvailable)])
    .filter(([, ids]) => ids.length).map(([label, ids]) => element("optgroup", {label}, ids.map(value =>
      element("option", {value, selected: value === state.view}, views[value].title)))));
  byId("menu").replaceChildren(...Object.entries(MENU).flatMap(([group, ids]) => [
    element("h2", {}, group),
    ...ids.filter(isAvailable).map(id => element("a", {
      href: link({view: id}), "data-view": id, class: id === state.view && "selected",
      "aria-current": id === state.view && "page",
    }, id === "story" && state.story > 0 ? `Back to stop ${state.story}` : views[id].title)),
  ]));
}

let pageTitle; // without the view
let startedView; // the last view or stop that was drawn

// Name the page after the view or the stop of the story. When it shows another one than before, begin at the heading,
// which screen readers then read.
function startView(heading) {
  const view = state.view === "story" ? `stop ${state.story}` : state.view;
  const isNew = startedView && startedView !== view;
  document.title = `${heading.textContent} – ${pageTitle}`;
  startedView = view;
  heading.tabIndex = -1;
  drawKeys();
  if (!isNew) return;
  window.scrollTo(0, 0);
  const isInUse = document.activeElement.matches("textarea, input, select, #strip");
  if (!isInUse) heading.focus({preventScroll: true});
}

// Show the keys that change something in the view.
function drawKeys() {
  const has = name => byId("view").querySelector(`[name=${name}]`);
  const keys = [
    ["←", "→", "token"], (has("layer") || has("head")) && ["↑", "↓", "layer"], has("head") && ["[", "]", "head"],
    info.models[0].checkpoints.length > 1 && [",", ".", "checkpoint"], ["k", "j", "view"],
  ];
  byId("keys").replaceChildren("Keys:", ...keys.filter(Boolean).flatMap(([back, forth, name]) =>
    [" ", element("kbd", {}, back), " ", element("kbd", {}, forth), ` ${name}`]), ".");
}

// --- input -----------------------------------------------------------------------------------------------------------

byId("view-list").addEventListener("change", ({target}) => location.hash = link({view: target.value}));
byId("save-view").addEventListener("click", event => {
  event.preventDefault();
  saveView();
});
byId("skip").addEventListener("click", () => byId("view").focus());

const TYPING_PAUSE = 1500; // milliseconds; a later change of the text can be undone by the browser's Back button
let typingTimer = 0; // redraws after a short pause in typing
let typedAt = -Infinity; // time of the last change

byId("text").addEventListener("focus", showText);
byId("text").addEventListener("blur", showText);
byId("text").addEventListener("input", ({target, timeStamp}) => {
  shownText = target.value;
  if (timeStamp - typedAt > TYPING_PAUSE) history.pushState(null, "");
  typedAt = timeStamp;
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => {
    typingTimer = 0;
    change({text: target.value, ids: "", token: -1});
  }, 250);
});

window.addEventListener("hashchange", () => {
  if (!info) return;
  readState();
  draw();
});

document.addEventListener("keydown", event => {
  const hasOwnKeys = event.target.matches("textarea, input, select, .scroll, .sample-scroll");
  if (!info || hasOwnKeys || event.ctrlKey || event.metaKey || event.altKey) return;
  const [{config: {n_layer, n_head}, checkpoints: steps}] = info.models, index = steps.indexOf(shownStep());
  const tokens = [...byId("strip").children], token = tokens.findIndex(node => node.matches(".selected"));
  const action = event.target.id !== "strip" && views[state.view].keys?.[event.key]; // a key of the view
  if (action) {
    event.preventDefault();
    return action();
  }
  const menu = Object.values(MENU).flat().filter(isAvailable), view = menu.indexOf(state.view);
  const move = (name, to, length) => ({[name]: clamp(to, 0, length - 1)});
  const choose = (name, values, to) => values.length > 1 ? {[name]: values[clamp(to, 0, values.length - 1)]} : {};
  const changes = {
    ArrowLeft: move("token", token - 1, tokens.length), ArrowRight: move("token", token + 1, tokens.length),
    ArrowUp: move("layer", state.layer - 1, n_layer), ArrowDown: move("layer", state.layer + 1, n_layer),
    "[": move("head", state.head - 1, n_head), "]": move("head", state.head + 1, n_head),
    ",": choose("step", steps, index - 1), ".": choose("step", steps, index + 1),
    k: choose("view", menu, view - 1), j: choose("view", menu, view + 1),
  }[event.key];
  if (!changes) return;
  event.preventDefault();
  change(changes);
});

onNewPalette(() => info && draw()); // complete before the page is printed: answers are cached

async function start() {
  try {
    ({facts: info} = await provider.ask({kind: "models"}));
  } catch (problem) {
    return byId("view").replaceChildren(errorBox(problem));
  }
  pieces = info.pieces;
  if (DEFAULTS.view === "playground" && isAvailable("roll")) DEFAULTS.view = "roll"; // a file of a model of music
  byId("text").disabled = false;
  pageTitle = document.title || `${info.models.map(({name}) => name).join(" and ")} – Folio`;
  readState();
  await draw();
  watchRun();
}

start();
