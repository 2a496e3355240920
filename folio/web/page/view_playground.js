// The playground: samples side by side, and branches of samples.

// Samples persist until others are generated. A sample is {title, before, prompt, tokens, ended}: the text and ids
// before it, its tokens {id, text, probability, runnersUp, chosen}, and the reason for its end ("" while running). Its
// elements are {card, text, scroll, status}; `drawn` is the number of tokens in the text. generatesAtOnce: generate
// when the view is first shown.
const playground = {samples: [], running: new Set(), timer: 0, pointed: null, generatesAtOnce: false};

const SETTINGS = {
  samples: "samples", max_new_tokens: "tokens per sample", temperature: "temperature", top_k: "top-k (0: off)",
  top_p: "top-p (1: off)",
  min_p: "min-p (0: off)", repetition_penalty: "repetition penalty", seed: "seed", stop: "stop at (\\n: line break)",
};
const ENDINGS = {stop: ", stop string", max_new_tokens: "", "end of text": ", end of text",
  stopped: ", stopped"};
defineView({
  id: "playground", title: "Playground",
  about: "Samples that continue the text above. Point at a token to see its most likely alternatives; click one to "
    + "generate a branch from there. sample.py generates the same samples with the same settings.",
  draw(box, context) {
    playground.parts ??= buildParts();
    playground.context = context;
    const {settings, bar, grid} = playground.parts;
    settings.replaceChildren(element("summary", {}, "Settings"), drawSettings());
    box.append(settings, bar, picture("samples", "Samples", samplesTable, grid,
      ["Tokens by −ln p.", lossBar()]));
    showStatus();
    if (playground.generatesAtOnce) startSamples().catch(showProblem);
    playground.generatesAtOnce = false;
  },
}, {samples: 3, max_new_tokens: 200, repetition_penalty: 1, stop: "", sampled_model: 0});

function buildParts() {
  const stop = element("button", {type: "button", testid: "stop", click: stopSamples}, "Stop");
  const generate = element("button", {class: "chosen", testid: "generate", form: "sampling"}, "Generate");
  const speed = element("output", {testid: "speed"}), notice = element("div", {class: "note", role: "status"});
  const problem = element("div", {class: "error", role: "alert", testid: "playground-error"});
  const schedule = (time, action, ...values) => {
    clearTimeout(playground.timer);
    playground.timer = setTimeout(action, time, ...values);
  };
  const menu = element("div", {class: "runners-up", testid: "runners-up", hidden: true,
    pointerenter: () => clearTimeout(playground.timer), pointerleave: () => schedule(300, hideMenu)});
  handleKeys(menu, key => {
    if (key !== "Escape") return false;
    playground.pointed.closest(".sample-scroll").focus();
    hideMenu();
  });
  const point = time => ({target}) => target.dataset.t && schedule(time, showMenu, target);
  const cards = element("div", {class: "samples", click: point(0), pointerover: point(100), // a delay
    pointerout: () => schedule(300, hideMenu)});
  const settings = element("details", {testid: "settings", open: window.innerWidth > 760});
  const bar = div("", controls(generate, stop, speed), notice, problem);
  return {settings, stop, speed, notice, problem, menu, cards, bar, grid: div("playground", cards, menu)};
}

// --- settings ---

function drawSettings() {
  const models = info.models.map(({name}, i) => [i, name]), {sampled_model} = state;
  return element("form", {id: "sampling", class: "settings", submit: event => {
    event.preventDefault();
    startSamples().catch(showProblem);
  }},
    models.length > 1 && select("model", models, sampled_model, i => remember({sampled_model: Number(i)})),
    Object.entries(SETTINGS).map(([name, title]) => element("label", {}, title, element("input", {
      type: name === "stop" ? "text" : "number", step: "any", value: state[name], testid: `setting-${name}`,
      input: ({target: {value}}) => remember({[name]: name === "stop" ? value : Number(value)}),
    }))));
}

// The settings of the filters in the format of the sampler: null is off.
function filterSettings({temperature, top_k, top_p, min_p}) {
  return {temperature, top_k: top_k || null, top_p: top_p === 1 ? null : top_p, min_p: min_p || null};
}

// The fields of a sampling request, except the prompt.
function samplingSettings(model) {
  const {max_new_tokens, repetition_penalty, stop, seed, step} = state;
  return {
    max_new_tokens, ...filterSettings(state), repetition_penalty, stop: stop.replaceAll("\\n", "\n") || null, seed,
    model, ...step >= 0 && !model ? {step} : {},
  };
}

// --- generating ---

function stopSamples() {
  for (const controller of playground.running) controller.abort();
}

async function startSamples() {
  const {context, parts: {cards}} = playground;
  const before = state.ids ? context.labels.join("") : state.text; // not cut at the context length
  const prompt = state.ids ? context.ids : (await ask({kind: "tokens", text: before, whole: true})).facts.ids;
  const {samples: num_samples} = state;
  stopSamples();
  stopPlaying();
  hideMenu();
  await streamSamples(() => {
    const samples = range(num_samples).map(k => newSample(`Sample ${k + 1}`, before, prompt));
    cards.replaceChildren(...samples.map(sample => sample.card));
    return playground.samples = samples;
  }, {ids: prompt, num_samples, ...samplingSettings(state.sampled_model)});
}

// Generate a new sample that replaces token t of a sample by another token.
async function branch(sample, t, id, probability) {
  hideMenu();
  const replaced = sample.tokens[t], others = replaced.runnersUp.filter(([other]) => other !== id);
  const runnersUp = [[replaced.id, replaced.probability], ...others].sort((a, b) => b[1] - a[1]);
  const tokens = [...sample.tokens.slice(0, t).map(token => ({...token, chosen: false})),
    {id, probability, runnersUp, chosen: true}];
  const title = `Branch of ${sample.title.replace("Branch of ", "").toLowerCase()}`;
  const ids = [...sample.prompt, ...tokens.map(token => token.id)];
  await streamSamples(() => {
    const next = newSample(title, sample.before, sample.prompt);
    playground.samples.splice(playground.samples.indexOf(sample) + 1, 0, next);
    sample.card.after(next.card);
    return [next];
  }, {ids, begun: tokens.length, num_samples: 1, ...samplingSettings(state.sampled_model)}, tokens);
}

// Receive the samples of one request. begun: first tokens of the sample, if it is a branch. add() creates the samples
// once the settings are accepted. Stops when another view is shown.
async function streamSamples(add, question, begun = []) {
  const controller = new AbortController(), {signal} = controller, {running, parts: {problem, speed}} = playground;
  const startTime = performance.now();
  let samples = [], count = 0, frame = 0;
  problem.textContent = "";
  running.add(controller);
  showStatus();
  try {
    for await (const event of provider.generate(question, signal)) {
      if (state.view !== "playground" || signal.aborted) break;
      if (event.begun) samples = add();
      event.begun?.forEach((text, t) => samples[0].tokens.push({...begun[t], text}));
      event.samples?.forEach((entry, k) => {
        if (!entry) return;
        const [id, text, ...more] = entry;
        if (id === null) return Object.assign(samples[k], {rest: text, ended: more[0]});
        samples[k].tokens.push({id, text, probability: more[0], runnersUp: more[1]});
        count++;
      });
      const seconds = (performance.now() - startTime) / 1000;
      speed.textContent = `${countTokens(count)}, ${short(Math.round(count / seconds))} tokens/s`;
      frame ||= requestAnimationFrame(() => frame = drawSamples() ?? 0);
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    controller.abort();
    running.delete(controller);
    for (const sample of samples) sample.ended ||= "stopped";
    drawSamples();
  }
}

function showProblem({message}) {
  playground.parts.problem.textContent = message;
}

// --- samples ---

function newSample(title, before, prompt) {
  const status = element("span", {class: "note"});
  const text = element("div", {class: "sample-text", testid: "sample-text"});
  const scroll = element("div", {class: "sample-scroll", tabindex: 0}, text);
  reachTokens(scroll);
  const useAsText = () => {
    stopSamples();
    change({text: before + text.textContent, ids: "", token: -1});
  };
  const sample = {title, before, prompt, tokens: [], rest: "", ended: "", drawn: 0, text, status, scroll};
  sample.play = playButton(sample, () => pieceOf(sample));
  sample.card = element("section", {class: "sample", testid: "sample", "aria-label": title},
    element("header", {}, element("h4", {}, title), status, sample.play,
      element("button", {testid: "take", click: useAsText}, "Use as text")), scroll);
  return sample.card.sample = sample;
}

// The notes of a sample and its prompt, as {notes, seconds}: of a model of music, or a tune in ABC notation.
async function pieceOf({before, prompt, tokens, text}) {
  if (!isMusic()) return tunePiece(before + text.textContent);
  const ids = [...prompt, ...tokens.map(({id}) => id)];
  return (await ask(question("notes", ids, {layer: 0, token: ids.length - 1}))).facts;
}

// Whether the notes of a sample are known: tokens beyond the context have none.
function isPlayable({before, prompt, tokens, text}) {
  if (isMusic()) return prompt.length + tokens.length <= info.models[0].limit;
  return isTune(before) && tunePiece(before + text.textContent).notes.length > 0;
}

// The left and right arrows move over the tokens of a sample, and Enter moves to the alternatives of a token.
function reachTokens(scroll) {
  handleKeys(scroll, key => {
    const tokens = [...scroll.querySelectorAll(".token")], place = tokens.indexOf(playground.pointed);
    if (key === "Enter" && place >= 0) return playground.parts.menu.querySelector("button")?.focus();
    if (!ARROWS[key]?.[0] || !tokens.length) return false;
    const next = tokens[clamp(place + ARROWS[key][0], 0, tokens.length - 1)];
    next.scrollIntoView({block: "nearest"});
    showMenu(next);
  });
}

// Append the tokens that are not drawn yet. Reads the layout first, so that it is computed only once.
function drawSamples() {
  const {samples, parts: {menu}} = playground;
  const scrolledToEnd = samples.filter(({scroll}) => menu.hidden
    && scroll.scrollTop + scroll.clientHeight >= scroll.scrollHeight - 4);
  for (const sample of samples) {
    const {tokens, drawn, rest, ended} = sample;
    tokens.slice(drawn).forEach((token, i) => append(sample, tokenSpan(token, drawn + i)));
    if (rest) append(sample, document.createTextNode(rest));
    Object.assign(sample, {drawn: tokens.length, rest: ""});
    sample.play.hidden = !ended || !isPlayable(sample);
    sample.status.textContent = `${countTokens(tokens.length)}${ended && ENDINGS[ended]}`;
  }
  for (const {scroll} of scrolledToEnd) scroll.scrollTop = 1e9;
  showStatus();
}

// Lines are blocks, so that the browser computes only the layout of the last line.
function append({text}, node) {
  if (text.lastChild?.textContent.endsWith("\n") ?? true) text.append(div("line"));
  text.lastChild.append(node);
}

function tokenSpan({text, probability, chosen}, t) {
  const kind = text === "\n" ? "break" : text ? "" : "part";
  return element("span", {class: `token ${kind} ${chosen ? "replaced" : ""}`, "data-t": t,
    style: onColor("sequential", Math.min(1, -Math.log(probability) / maxLoss()))}, text);
}

function showStatus() {
  const {running, parts: {stop, notice}} = playground, {scale, mask, heads_off, mlps_off} = state;
  stop.disabled = !running.size;
  notice.textContent = !scale || mask !== "before" || heads_off || mlps_off
    ? "Samples come from the unchanged model: the switches do not apply." : "";
}

function samplesTable() {
  const rows = playground.samples.flatMap(({title, tokens}) =>
    tokens.map(({id, text, probability}, t) => [title, t, id, pieces[id], text, probability]));
  return {columns: ["sample", "position", "id", "token", "text", "probability"], rows};
}

// --- alternatives of a token ---

function hideMenu() {
  playground.parts.menu.hidden = true;
  playground.pointed?.classList.remove("pointed");
  playground.pointed = null;
}

function showMenu(span) {
  const {menu, grid} = playground.parts;
  if (playground.pointed === span || !span.isConnected) return;
  hideMenu();
  playground.pointed = span;
  span.classList.add("pointed");
  const {sample} = span.closest(".sample"), t = Number(span.dataset.t), {id, probability, runnersUp} = sample.tokens[t];
  const max = Math.max(probability, ...runnersUp.map(([, p]) => p));
  const row = (id, p) => [
    element("span", {class: "name"}, visible(pieces[id])),
    element("span", {class: "track"}, element("span", {class: "bar", style: {width: `${100 * p / max}%`}})),
    element("span", {class: "percent"}, percent(p)),
  ];
  menu.replaceChildren(
    element("div", {class: "runner-up sampled", testid: "sampled"}, row(id, probability)),
    ...runnersUp.map(([other, p]) => element("button", {
      class: "runner-up", testid: `runner-up-${other}`,
      click: () => branch(sample, t, other, p).catch(showProblem),
    }, row(other, p))),
    div("note", "Probabilities before temperature and filters"));
  reachByKeys([...menu.querySelectorAll("button")]);
  menu.hidden = false;
  const outer = grid.getBoundingClientRect(), spot = [...span.getClientRects()].at(-1) ?? span.getBoundingClientRect();
  const below = spot.bottom + menu.offsetHeight <= window.innerHeight || spot.top < menu.offsetHeight;
  Object.assign(menu.style, {left: `${clamp(spot.left - outer.left, 0, Math.max(0, outer.width - menu.offsetWidth))}px`,
    top: `${(below ? spot.bottom : spot.top - menu.offsetHeight) - outer.top}px`});
}
