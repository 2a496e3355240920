// Views of generation: the sampling loop and the KV cache.

// --- the loop ---

let generateTokens = null; // generate(count) of the shown view

// Append an id. If the context is full, the older half is dropped, as in generate().
function appended(ids, id, {limit}) {
  return [...ids.length < limit ? ids : ids.slice(Math.max(1, Math.floor(limit / 2))), id];
}

// Draw a token: the distributions after each filter; the interval {id, from, to} of each token between 0 and 1; the
// random number u; and the interval that contains u.
function drawAfter(logits, step, {vocab_size}) {
  const stages = samplingStages(logits.subarray(0, vocab_size), state), {probabilities} = stages.at(-1);
  const u = uniform(state.seed, 0, step), sums = cumulativeSums(probabilities), total = sums.at(-1);
  const parts = Array.from(sums, (to, id) => ({id, from: id && sums[id - 1] / total, to: to / total}));
  return {stages, probabilities, parts, u, drawn: parts[sampleToken(probabilities, u)]};
}

let isContinuing = false; // whether continueText runs; setting it to false stops it

// Generate a continuation of ids and redraw after each token, until another token, text, or view is selected.
async function continueText(ids, settings) {
  const {view} = state, show = () => change({ids: ids.join(","), token: -1});
  isContinuing = true;
  await show();
  try {
    for await (const {samples} of provider.generate({
      ...samplingSettings(0), ids, max_new_tokens: info.models[0].limit - ids.length, ...settings,
    })) {
      if (!isContinuing || state.view !== view || state.token >= 0 || state.ids !== ids.join(",")) break;
      const id = samples?.[0]?.[0] ?? null;
      if (id !== null) await show(ids = [...ids, id]);
    }
  } catch (problem) {
    byId("view").append(errorBox(problem));
  }
  isContinuing = false;
}

defineView({
  id: "loop", title: "Generation loop",
  about: "Each step samples a token and appends it to the input. Random numbers are determined by the seed, so "
    + "sample.py samples the same tokens.",
  keys: {d: () => generateTokens?.(1)},
  async draw(box, context) {
    const {labels, token, model, config} = context, ids = context.ids.slice(0, token + 1), T = ids.length;
    const step = state.ids ? Math.max(0, state.loop_step - (context.ids.length - T)) : 0; // tokens generated so far
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const path = div("flow"), detail = element("div");
    const draw = element("button", {class: "chosen", testid: "loop-draw", click: () => generate(1)},
      "Sample a token ", element("kbd", {}, "d"));
    const many = element("button", {testid: "loop-draw-20", click: () => generate(20)}, "20 tokens");
    const text = tokenStrip(labels.slice(0, T), token, t => t < T - step ? {} : {class: "token generated"});
    update();
    box.append(controls(draw, many, `seed ${state.seed} (playground)`), path, text, samplingControls(update), detail);
    generateTokens = generate;

    // Generate tokens. For a single token, highlight the steps one after another.
    async function generate(count) {
      if (draw.disabled) return;
      draw.disabled = many.disabled = true;
      if (count === 1 && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
        for (const part of path.querySelectorAll(".shape")) {
          part.classList.add("lit");
          await new Promise(resolve => setTimeout(resolve, 110));
        }
      }
      let next = ids, n = 0;
      for (; n < count; n++) {
        const answer = await ask(question("logits", next, {token: next.length - 1}));
        const {id} = drawAfter(answer.tensors.logits.data, step + n, model).drawn;
        if (id === model.eot) break;
        next = appended(next, id, model);
      }
      if (draw.isConnected) show(next, n);
    }

    function show(next, count) {
      change({ids: next.join(","), token: next.length - 1, loop_step: step + count});
    }

    function update() {
      const {stages, probabilities, parts, u, drawn} = drawAfter(logits, step, model), ends = drawn.id === model.eot;
      const [best] = topIndices(logits, 1), piece = visible(pieces[drawn.id]);
      path.replaceChildren(...[
        ["text", `${T} tokens`, `…${labels.slice(Math.max(0, T - 8), T).map(visible).join("")}`],
        ["ids", `${T} ids`, `…${ids.slice(-3).join(" ")}`],
        ["model", `${config.n_layer} layers`, `${T} × ${config.n_embd} numbers`],
        ["logits", `${short(logits.length)} numbers`, `largest: ${visible(pieces[best])} ${short(logits[best])}`],
        ["filters", `${probabilities.filter(p => p > 0).length} left`, `entropy ${short(entropyOf(probabilities))}`],
        ["draw", `u = ${u.toFixed(4)}`, `selects ${piece}`],
        ["append", ...ends ? ["the text ends"] : [`${piece}, id ${drawn.id}`, "next step"]],
      ].flatMap(([name, ...lines], i) => [i ? "→" : "",
        element("span", {class: "shape"}, name, lines.map(line => element("small", {}, line)))]));
      draw.disabled = many.disabled = ends;
      detail.replaceChildren(drawPicture(stages[0].probabilities, probabilities, parts, u, drawn.id));
    }

    function drawPicture(before, after, parts, u, drawn) {
      const order = argsort(before);
      const columns = ["id", "token", "logit", "probability", "after the filters", "from", "to"];
      const row = id => [id, pieces[id], logits[id], before[id], after[id], parts[id].from, parts[id].to];
      const shown = [...new Set([...order.slice(0, SHOWN_TOKENS), drawn])];
      const cells = id => [id, visible(pieces[id]), ...row(id).slice(2, -2), ...intervalEnds(parts[id])];
      const full = T < model.limit ? "" : " The context is full: the next step keeps only its newest half"
        + (model.can_slide ? ". (sample.py slides the cache, so its tokens may differ.)" : ", as in sample.py.");
      return picture("draw", `Step ${step}: ${visible(pieces[drawn])}`, () => ({columns, rows: order.map(row)}),
        div("", cumulativeBar(parts, u, drawn), tableOf(columns, shown.map(row), {
          shown: shown.map(cells), selected: i => shown[i] === drawn,
          click: i => show(appended(ids, shown[i], model), 1),
        })),
        "The probabilities divide the line from 0 to 1, in the order of the ids; u selects a token. The table is "
          + `sorted by probability. Click a token to append it instead.${full}`);
    }
  },
}, {loop_step: 0});

// The ends of an interval, with enough digits to differ.
function intervalEnds({from, to}) {
  if (to === from || short(from) !== short(to)) return [from, to];
  const digits = Math.min(17, 2 - Math.floor(Math.log10(to - from)));
  return [from.toFixed(digits), to.toFixed(digits)];
}

// The line from 0 to 1, divided by the probabilities, with u.
function cumulativeBar(parts, u, drawn) {
  const width = fitWidth(900), left = 8, X = x => left + (width - 2 * left) * x, shades = [FILL, PALE];
  const middle = {"text-anchor": "middle"};
  return withTooltipKeys(svg("svg", {width, height: 74},
    parts.filter(({from, to}) => to > from).flatMap(({id, from, to}, i) => {
      const barWidth = X(to) - X(from), name = visible(pieces[id]), fill = id === drawn ? BLUE : shades[i % 2];
      return [svg("rect", {x: X(from), y: 20, width: Math.max(barWidth, 0.3), height: 28, fill},
        svg("title", {}, `${name}: ${percent(to - from)}`)),
        barWidth > 8 * name.length + 4 && svg("text", {x: X((from + to) / 2), y: 38, ...middle,
          style: id === drawn ? {fill: PAPER} : {}}, name)];
    }),
    svg("line", {x1: X(u), x2: X(u), y1: 12, y2: 56, stroke: ORANGE, "stroke-width": 2}),
    svg("text", {x: clamp(X(u), 40, width - 40), y: 10, ...middle}, `u = ${u.toFixed(4)}`),
    [0, 0.25, 0.5, 0.75, 1].map(x => softText(X(x), 70, x, "middle"))), "Probabilities from 0 to 1");
}

// --- the cache ---

// The cache of generate() after a prompt of `prompt` tokens, at steps 0, 1, ..., stepCount - 1: {slots (position of the
// token in each slot), computed (tokens computed in this step)}. start: of the prompt's last document. isComplete:
// whether the prompt ends it, so that the next token begins another one.
function cacheSteps(prompt, stepCount, size, slides, start = 0, isComplete = false) {
  const window = size - Math.max(1, Math.floor(size / 2));
  let first = Math.max(start, prompt - size);
  let slots = range(prompt - first).map(i => first + i);
  const steps = [{slots, computed: slots.length}];
  for (let token = prompt; steps.length < stepCount; token++) {
    let computed = 1;
    if (isComplete && token === prompt) [slots, first] = [[], prompt];
    if (slots.length < size) {
      slots = [...slots, token];
    } else if (slides) { // replace the oldest token
      slots = slots.with((token - first) % size, token);
    } else { // recompute the newest tokens
      computed += window;
      slots = [...slots.slice(-window), token];
    }
    steps.push({slots, computed});
  }
  return steps;
}

const CACHE_COLORS = { // from 0 to 1
  "from earlier steps": 0.2, "recomputed in this step": 0.5, "new in this step": 0.9,
};

defineView({
  id: "cache", title: "KV cache",
  about: "Keys and values of earlier tokens are cached, so each step computes only one token. When the context is "
    + "full, old tokens are dropped.",
  draw(box, {ids, names, starts, token, config: {n_layer: L, n_embd: C, block_size: S, position, ...config}, model}) {
    const prompt = token + 1, max = Math.max(0, S - prompt) + S + 1, isComplete = ids[token] === config.document_token;
    const steps = cacheSteps(prompt, max, S, model.can_slide, starts[token], isComplete);
    const result = element("div"), value = clamp(state.draws, 1, max), kinds = Object.keys(CACHE_COLORS);
    box.append(controls(slider("generated tokens", {min: 1, max, value, move: draws => {
      remember({draws});
      update(draws);
    }})), result);
    update(value);

    function update(n) {
      const {slots, computed} = steps[n - 1], past = steps.slice(0, n);
      const newest = prompt + n - 2, used = slots.length;
      const total = sumOf(past.map(step => step.computed)), bytes = 2 * L * C * 4;
      const uncached = sumOf(past.map((_, i) => Math.min(isComplete && i ? i : prompt - starts[token] + i, S)));
      const kind = t => kinds[n === 1 || t === newest ? 2 : computed > 1 ? 1 : 0];
      const data = Float32Array.from({length: L * S}, (_, i) => i % S < used ? CACHE_COLORS[kind(slots[i % S])] : NaN);
      const facts = [["tokens in the cache", used], ["bytes used", bytes * used], ["bytes allocated", bytes * S],
        ["tokens computed so far", total], ["without a cache", uncached]];
      const text = t => t < prompt ? `token ${names[t]}` : `generated token ${t - prompt}`;
      result.replaceChildren(
        picture("cache", `Step ${n}: ${countTokens(computed)} computed`,
          () => ({columns: ["slot", "token", "kind"], rows: slots.map((t, slot) => [slot, t, kind(t)])}),
          div("",
            legend(kinds.map(name => ({name, color: css(colorOf("sequential", CACHE_COLORS[name]))}))),
            heatMap({shape: [L, S], data}, {
              cell: clamp(Math.floor(fitWidth(1000) / S), 1, 22), height: clamp(Math.floor(160 / L), 5, 22),
              bar: null, selected: n > 1 && [null, slots.indexOf(newest)], read: (layer, slot) =>
                `layer ${layer}, slot ${slot}: ${slot < used ? `${text(slots[slot])}, ${kind(slots[slot])}` : "empty"}`,
            })), "Rows are layers, columns are slots: the position modulo the context length. Gray: empty."),
        tablePicture("cache-numbers", "Size and cost", ["fact", "number"], facts,
          {note: `Each token takes 2 · ${L} layers · ${C} channels · 4 bytes = ${short(bytes)} bytes. `
            + (model.can_slide ? "With this position method, a full cache can slide."
              : `With ${position} positions, keys depend on their positions: half of a full cache is recomputed.`),
          }));
    }
  },
}, {draws: 1});
