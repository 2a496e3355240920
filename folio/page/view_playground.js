"use strict";
// The playground: samples that continue the text, side by side, and branches of them.

// Samples stay until the next ones are generated, whatever is drawn meanwhile.
//
// A sample is {title, before, prompt, tokens, ended}: the text and the ids before it, its tokens {id, text, probability,
// runnersUp, chosen}, and why it ended ("" while it does not). Its elements are {card, text, status}; `drawn` counts the
// tokens that are in the text.
const playground = {samples: [], running: new Set(), notice: "", speed: "", scheduled: false, timer: 0, pointed: null};

const SETTINGS = [
  {name: "samples", title: "samples", min: 1, max: 16, step: 1},
  {name: "max_new_tokens", title: "tokens per sample", min: 1, max: 4096, step: 1},
  {name: "temperature", title: "temperature", min: 0, max: 1e6, step: "any"},
  {name: "top_k", title: "top-k", min: 0, step: 1, off: "0: off"},
  {name: "top_p", title: "top-p", min: 0, max: 1, step: "any", off: "1: off"},
  {name: "min_p", title: "min-p", min: 0, max: 1, step: "any", off: "0: off"},
  {name: "repetition_penalty", title: "repetition penalty", min: 1e-6, max: 1e6, step: "any"},
  {name: "seed", title: "seed", min: 0, step: 1},
  {name: "stop", title: "stop at", off: "\\n: line break"},
];
const ENDINGS = {stop: "ended at the stop text", max_new_tokens: "", "end of text": "ended the text"};
const MOST_LOSS = 6; // nats, as in the strip of tokens
const TAIL = 60; // characters of the prompt that a sample shows

defineView({
  id: "playground", title: "Playground",
  about: "Samples that continue the text above. Point at a token to see the most likely others; click one of these to "
    + "continue from there with it. With the same text and settings, sample.py generates the same samples.",
  draw(box, context) {
    const {parts} = playground;
    if (!parts) playground.parts = buildParts();
    playground.context = context;
    const {grid, bar} = playground.parts;
    box.append(drawSettings(), bar, picture("samples", "Samples", samplesTable, grid));
    showStatus();
  },
}, {samples: 3, max_new_tokens: 200, repetition_penalty: 1, stop: "", sampled_model: 0, shade_samples: 1});

function buildParts() {
  const stop = element("button", {type: "button", "data-testid": "stop", click: stopSamples}, "Stop");
  const speed = element("output", {"data-testid": "speed"}), notice = element("div", {class: "note", role: "status"});
  const problem = element("div", {class: "error", role: "alert", "data-testid": "playground-error"});
  const menu = element("div", {
    class: "runners-up", "data-testid": "runners-up", role: "dialog", "aria-label": "Other tokens", hidden: true,
    pointerenter: keepMenu, pointerleave: hideMenuSoon, keydown: moveInMenu,
  });
  const cards = element("div", {
    class: "samples", keydown: moveInSample, focusin: pointAtToken, click: pointAtToken, pointerleave: hideMenuSoon,
    pointermove: event => { // when the pointer rests on a token, not when a token comes to be under it
      if (tokenAt(event)) playground.timer = replaceTimer(pointAtToken, 80, event);
      else hideMenuSoon();
    },
  });
  const generate = element("button", {class: "chosen", "data-testid": "generate", form: "sampling"}, "Generate");
  const reseed = element("button", {type: "button", title: "Generate with a new random seed", click: () => {
    document.querySelector("[data-testid=setting-seed]").value = Math.floor(Math.random() * 2 ** 31);
    startSamples();
  }}, "New seed");
  const shade = element("label", {}, element("input", {
    type: "checkbox", checked: Boolean(state.shade_samples), "data-testid": "shade-samples",
    change: event => {
      remember({shade_samples: Number(event.target.checked)});
      cards.classList.toggle("plain", !event.target.checked);
    },
  }), ` shade by −ln p, 0 to ${MOST_LOSS} nats, light to dark`);
  const bar = element("div", {}, element("div", {class: "controls"}, generate, stop, reseed, shade, speed), notice, problem);
  return {bar, stop, speed, notice, problem, menu, cards, shade: shade.firstChild, grid: element("div", {class: "playground"}, cards, menu)};
}

// --- settings --------------------------------------------------------------------------------------------------------

function drawSettings() {
  const models = described.models;
  return element("form", {id: "sampling", class: "settings", submit: event => {
    event.preventDefault();
    startSamples();
  }},
    models.length > 1 && element("label", {}, "model", element("select", {
      "data-testid": "setting-sampled_model", change: event => remember({sampled_model: Number(event.target.value)}),
    }, models.map((model, i) => element("option", {value: i, selected: i === state.sampled_model}, model.name)))),
    SETTINGS.map(({name, title, off, ...range}) => element("label", {}, off ? `${title} (${off})` : title, element("input", {
      name, type: "min" in range ? "number" : "text", value: state[name], "data-testid": `setting-${name}`, ...range,
      autocomplete: "off", input: readSettings,
    }))));
}

function readSettings() {
  const changes = {};
  for (const {name, min} of SETTINGS) {
    const {value} = document.querySelector(`[data-testid=setting-${name}]`);
    changes[name] = min === undefined ? value : Number(value);
  }
  remember(changes);
}

// What is asked about sampling, besides the prompt.
function samplingSettings() {
  const {max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed, sampled_model: model} = state;
  const asked = {
    max_new_tokens, temperature, top_k: top_k || null, top_p: top_p === 1 ? null : top_p, min_p: min_p || null,
    repetition_penalty, stop: stop ? stop.replaceAll("\\n", "\n") : null, seed, model: model < described.models.length ? model : 0,
  };
  if (state.step >= 0 && !asked.model) asked.step = state.step;
  return asked;
}

// --- generating ------------------------------------------------------------------------------------------------------

function stopSamples() {
  for (const controller of playground.running) controller.abort();
}

async function startSamples() {
  stopSamples();
  hideMenu();
  readSettings();
  playground.parts.problem.textContent = "";
  let prompt, before;
  try {
    ({prompt, before} = await readPrompt());
  } catch (problem) {
    return showProblem(problem);
  }
  playground.samples = Array.from({length: clamp(state.samples, 1, 16)}, (_, k) => newSample(`Sample ${k + 1}`, before, prompt));
  playground.parts.cards.replaceChildren(...playground.samples.map(sample => sample.card));
  const seen = described.models[0].config.block_size;
  playground.notice = prompt.length > seen ? `The text has ${prompt.length} tokens; the model sees the last ${seen}.` : "";
  await streamSamples(playground.samples, {ids: prompt, num_samples: state.samples, ...samplingSettings()});
}

// All of the text, however long, as text and ids.
async function readPrompt() {
  if (state.ids) return {prompt: playground.context.ids, before: playground.context.labels.join("")};
  const {facts} = await ask({kind: "tokens", text: state.text, whole: true});
  return {prompt: facts.ids, before: state.text};
}

// Continue a sample from its token t, with another token in its place, as a new sample beside it.
async function branch(sample, t, id, probability) {
  hideMenu();
  playground.parts.problem.textContent = "";
  const replaced = sample.tokens[t], others = replaced.runnersUp.filter(([other]) => other !== id);
  const runnersUp = [[replaced.id, replaced.probability], ...others].sort((a, b) => b[1] - a[1]);
  const tokens = [...sample.tokens.slice(0, t).map(token => ({...token, chosen: false})), {id, text: "", probability, runnersUp, chosen: true}];
  const next = newSample(`Branch of ${sample.title.replace("Branch of ", "").toLowerCase()}`, sample.before, sample.prompt);
  playground.samples.splice(playground.samples.indexOf(sample) + 1, 0, next);
  sample.card.after(next.card);
  next.card.scrollIntoView({block: "nearest"});
  const ids = [...sample.prompt, ...tokens.map(token => token.id)];
  await streamSamples([next], {ids, begun: tokens.length, num_samples: 1, ...samplingSettings()}, tokens);
}

// Receive the samples of one question, which may begin with tokens. It stops when the view is left.
async function streamSamples(samples, question, begun = []) {
  const controller = new AbortController(), {running} = playground;
  running.add(controller);
  showStatus();
  let began, count = 0;
  try {
    for await (const event of provider.generate(question, controller.signal)) {
      if (state.view !== "playground" || controller.signal.aborted) break;
      began ??= performance.now();
      event.begun?.forEach((text, t) => samples[0].tokens.push({...begun[t], text}));
      event.samples?.forEach((entry, k) => {
        if (!entry) return;
        const [id, text, ...more] = entry, sample = samples[k];
        if (id === null) {
          sample.rest = text;
          sample.ended = more[0];
        } else {
          sample.tokens.push({id, text, probability: more[0], runnersUp: more[1]});
          count++;
        }
      });
      const seconds = (performance.now() - began) / 1000;
      playground.speed = `${count.toLocaleString("en-US")} tokens, ${Math.round(count / Math.max(seconds, 0.001)).toLocaleString("en-US")} tokens/s`;
      drawSoon();
    }
  } catch (problem) {
    if (!controller.signal.aborted) showProblem(problem);
  } finally {
    controller.abort();
    running.delete(controller);
    for (const sample of samples) sample.ended ||= "stopped";
    drawSamples();
  }
}

// --- samples ---------------------------------------------------------------------------------------------------------

function newSample(title, before, prompt) {
  const characters = Array.from(before), tail = (characters.length > TAIL ? "…" : "") + characters.slice(-TAIL).join("");
  const status = element("span", {class: "note"});
  const text = element("div", {class: "sample-text", "data-testid": "sample-text"});
  const scroll = element("div", {class: "sample-scroll", tabindex: 0}, element("span", {class: "before"}, tail), text);
  const sample = {title, before, prompt, tokens: [], rest: "", ended: "", drawn: 0, lineEnds: false, text, status, scroll};
  const take = element("button", {
    type: "button", "data-testid": "take", title: "Put the text of this sample into the text box, for all views",
    click: () => {
      stopSamples();
      change({text: before + text.textContent, ids: "", token: -1});
    },
  }, "Use as text");
  sample.card = element("section", {class: "sample", "data-testid": "sample", "aria-label": title},
    element("header", {}, element("h4", {}, title), status, take), scroll);
  sample.card.sample = sample;
  return sample;
}

function drawSoon() {
  if (playground.scheduled) return;
  playground.scheduled = true;
  requestAnimationFrame(() => {
    playground.scheduled = false;
    drawSamples();
  });
}

// Append the tokens that are not drawn yet. All reading of the layout comes first, so that it is computed once.
function drawSamples() {
  const {samples, parts: {menu}} = playground;
  const following = menu.hidden ? samples.filter(({scroll}) => scroll.scrollTop + scroll.clientHeight >= scroll.scrollHeight - 4) : [];
  for (const sample of samples) {
    const {tokens, drawn} = sample;
    tokens.slice(drawn).forEach((token, i) => append(sample, tokenSpan(token, drawn + i)));
    if (sample.rest) append(sample, document.createTextNode(sample.rest));
    Object.assign(sample, {drawn: tokens.length, rest: ""});
    const ending = ENDINGS[sample.ended] ?? sample.ended;
    sample.status.textContent = `${tokens.length} tokens${ending && `, ${ending}`}`;
  }
  for (const {scroll} of following) scroll.scrollTop = 1e9;
  showStatus();
}

// Lines are blocks, so that the browser computes the layout of the last one only.
function append(sample, node) {
  const {text} = sample;
  if (!text.lastChild || sample.lineEnds) text.append(element("div", {class: "line"}));
  text.lastChild.append(node);
  sample.lineEnds = node.textContent.endsWith("\n");
}

function tokenSpan({text, probability, chosen}, t) {
  const color = colorOf("sequential", Math.min(1, -Math.log(probability) / MOST_LOSS));
  const kind = text === "\n" ? "break" : text === "" ? "part" : "";
  return element("span", {
    class: `token ${kind} ${chosen ? "replaced" : ""}`, "data-t": t, tabindex: -1, style: {background: css(color), color: textColorOn(color)},
  }, text);
}

function showStatus() {
  const {stop, speed, notice, cards, shade} = playground.parts, {scale, mask, heads_off, mlps_off} = state;
  stop.disabled = !playground.running.size;
  speed.textContent = playground.speed;
  const changed = !scale || mask !== DEFAULTS.mask || heads_off || mlps_off;
  notice.textContent = [playground.notice, changed && "Samples are of the unchanged model: the switches do not apply."].filter(Boolean).join(" ");
  shade.checked = Boolean(state.shade_samples);
  cards.classList.toggle("plain", !state.shade_samples);
}

function showProblem(problem) {
  playground.parts.problem.textContent = problem.message;
}

function samplesTable() {
  const most = Math.max(0, ...playground.samples.flatMap(sample => sample.tokens.map(token => token.runnersUp.length)));
  const others = Array.from({length: most}, (_, i) => [`other ${i + 1}`, `its probability ${i + 1}`]).flat();
  return {
    columns: ["sample", "position", "id", "token", "text", "probability", ...others],
    rows: playground.samples.flatMap(({title, tokens}) => tokens.map(({id, text, probability, runnersUp}, t) => [
      title, t, id, pieces[id], text, probability,
      ...Array.from({length: most}, (_, i) => runnersUp[i] ?? ["", ""]).flatMap(([other, p]) => [other, p]),
    ])),
  };
}

// --- the other tokens ------------------------------------------------------------------------------------------------

function tokenAt(event) {
  return event.target.closest("[data-t]");
}

function pointAtToken(event) {
  if (!tokenAt(event)) return;
  keepMenu();
  showMenu(tokenAt(event));
}

function keepMenu() {
  clearTimeout(playground.timer);
}

function replaceTimer(...timer) {
  clearTimeout(playground.timer);
  return setTimeout(...timer);
}

function hideMenuSoon() {
  playground.timer = replaceTimer(hideMenu, 300);
}

function hideMenu() {
  playground.parts.menu.hidden = true;
  playground.pointed?.classList.remove("pointed");
  playground.pointed = null;
}

function showMenu(span) {
  const {menu, grid} = playground.parts;
  if (playground.pointed === span) return;
  hideMenu();
  playground.pointed = span;
  span.classList.add("pointed");
  const {sample} = span.closest(".sample"), t = Number(span.dataset.t), token = sample.tokens[t];
  const most = Math.max(token.probability, ...token.runnersUp.map(([, p]) => p));
  const row = (id, p) => [
    element("span", {class: "name"}, visible(pieces[id])),
    element("span", {class: "track"}, element("span", {class: "bar", style: {width: `${100 * p / most}%`}})),
    element("span", {class: "percent"}, percent(p)),
  ];
  menu.replaceChildren(
    element("div", {class: "runner-up sampled", "data-testid": "sampled"}, row(token.id, token.probability)),
    ...token.runnersUp.map(([id, p]) => element("button", {
      type: "button", class: "runner-up", "data-testid": `runner-up-${id}`, click: () => branch(sample, t, id, p),
    }, row(id, p))),
    element("div", {class: "note"}, "Probabilities before temperature and filters"));
  menu.hidden = false;
  const outer = grid.getBoundingClientRect(), rects = span.getClientRects();
  const at = rects[rects.length - 1] ?? span.getBoundingClientRect();
  const left = clamp(at.left - outer.left, 0, Math.max(0, outer.width - menu.offsetWidth));
  const below = at.bottom + menu.offsetHeight <= window.innerHeight || at.top < menu.offsetHeight;
  Object.assign(menu.style, {left: `${left}px`, top: `${below ? at.bottom - outer.top : at.top - outer.top - menu.offsetHeight}px`});
}

// Keys in a sample: left and right move through its tokens, Enter or down goes to the other tokens.
function moveInSample(event) {
  const scroll = event.target.closest(".sample-scroll");
  if (!scroll || event.ctrlKey || event.metaKey || event.altKey) return;
  const spans = scroll.querySelectorAll("[data-t]"), t = Number(event.target.dataset.t ?? -1);
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    spans[clamp(t + (event.key === "ArrowLeft" ? -1 : 1), 0, spans.length - 1)]?.focus();
  } else if ((event.key === "ArrowDown" || event.key === "Enter") && t >= 0) {
    playground.parts.menu.querySelector("button")?.focus();
  } else if (event.key === "Escape") {
    hideMenu();
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
}

function moveInMenu(event) {
  const buttons = [...playground.parts.menu.querySelectorAll("button")], at = buttons.indexOf(event.target);
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    buttons[clamp(at + (event.key === "ArrowUp" ? -1 : 1), 0, buttons.length - 1)].focus();
  } else if (event.key === "Escape") {
    playground.pointed?.focus();
    hideMenu();
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
}
