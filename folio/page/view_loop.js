"use strict";
// Views of generation: the loop that draws one token after another, and the key-value cache that makes it cheap.

// --- random numbers, as in folio/randomness.py and folio/generate.py ---------------------------------------------------

const U64 = x => BigInt.asUintN(64, x);

// A uint64 hash of integers: splitmix64's finalizer, applied to each in turn.
function hash64(...parts) {
  return parts.reduce((h, part) => {
    h = U64((h ^ U64(BigInt(part))) + 0x9E3779B97F4A7C15n);
    h = U64((h ^ (h >> 30n)) * 0xBF58476D1CE4E5B9n);
    h = U64((h ^ (h >> 27n)) * 0x94D049BB133111EBn);
    return h ^ (h >> 31n);
  }, 0n);
}

// The uniform number in [0, 1) with which a sample's token number `step` is drawn.
function uniform(seed, sample, step) {
  return Number(hash64(seed, sample, step) >> 11n) * 2 ** -53;
}

// --- the loop --------------------------------------------------------------------------------------------------------

const LIT = 110; // milliseconds that each part of the path is lit
const CANDIDATES = 16;
let nextToken = null; // appends the token that is drawn next, while the view is shown

// The ids with another token after them. If the context is full, its newest part is kept, as generate() does.
function appended(ids, id, {limit}) {
  return [...ids.length < limit ? ids : ids.slice(-(limit - Math.max(1, Math.floor(limit / 2)))), id];
}

// The distributions of each stage after a token; the parts {id, from, to} of the line from 0 to 1 that the tokens have;
// the random number u; and the part that it falls on.
function drawAfter(logits, step, {vocab_size}) {
  const stages = samplingStages(logits.subarray(0, vocab_size), state), {probabilities} = stages.at(-1);
  const total = probabilities.reduce((sum, p) => sum + p, 0), u = uniform(state.seed, 0, step), parts = [];
  let sum = 0;
  probabilities.forEach((p, id) => {
    if (p > 0) parts.push({id, from: sum / total, to: (sum + p) / total});
    sum += p;
  });
  return {stages, probabilities, parts, u, drawn: parts.find(({to}) => to > u) ?? parts.at(-1)};
}

defineView({
  id: "loop", title: "The loop, step by step",
  about: "A model computes one token at a time. The token is drawn, appended, and the whole text is the input of the next step. "
    + "The random numbers follow from the seed, so sample.py draws the same tokens.",
  keys: {d: () => nextToken?.(1)},
  async draw(box, context) {
    const {labels, token, model, config} = context, ids = context.ids.slice(0, token + 1), T = ids.length;
    const step = state.ids ? Math.max(0, state.loop_step - (context.ids.length - T)) : 0; // tokens that were generated before
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const path = element("ol", {class: "path", "data-testid": "loop-path"}), detail = element("div");
    const button = (text, attributes, ...more) => element("button", attributes, text, ...more);
    const draw = button("Draw a token ", {class: "chosen", "data-testid": "loop-draw", click: () => generate(1)}, element("kbd", {}, "d"));
    const many = button("20 tokens", {"data-testid": "loop-draw-20", click: () => generate(20)});
    const undo = button("take one back", {disabled: step === 0, click: () => show(ids.slice(0, -1), -1)});
    const seed = element("label", {}, "seed ", element("input", {type: "number", min: 0, value: state.seed, "data-testid": "seed",
      change: event => change({seed: clamp(Math.floor(event.target.value), 0, Number.MAX_SAFE_INTEGER)})}));
    const text = tokenSpans(labels.slice(0, T), t => t >= T - step ? {class: "token generated", title: "generated"} : {});
    update();
    box.append(controls(draw, many, undo, seed), path, element("div", {class: "token-strip", "data-testid": "loop-text"}, text),
      samplingControls(update), detail);
    nextToken = generate;

    // Draw tokens. A single one lights the path on its way.
    async function generate(count) {
      if (draw.disabled) return;
      draw.disabled = many.disabled = true;
      if (count === 1 && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
        for (const part of path.children) {
          part.classList.add("lit");
          await new Promise(resolve => setTimeout(resolve, LIT));
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
      const best = logits.indexOf(logits.reduce((a, b) => Math.max(a, b))), piece = visible(pieces[drawn.id]);
      const lines = {
        text: [`${T} tokens`, `…${labels.slice(Math.max(0, T - 8), T).map(visible).join("")}`],
        ids: [`${T} numbers`, `…${ids.slice(-3).join(" ")}`],
        model: [`${config.n_layer} layers`, `${T} × ${config.n_embd} numbers`],
        logits: [`${grouped(logits.length)} numbers`, `largest: ${visible(pieces[best])} ${short(logits[best])}`],
        filters: [`${grouped(parts.length)} tokens left`, `entropy ${short(entropyOf(probabilities))}`],
        draw: [`u = ${u.toFixed(4)}`, `falls on ${piece}`],
        append: ends ? ["the end of the text", "nothing is appended"] : [`${piece}, id ${drawn.id}`, "and again"],
      };
      path.replaceChildren(...Object.entries(lines).map(([name, lines]) => element("li", {},
        element("b", {}, name), lines.map(line => element("span", {}, line)))));
      draw.disabled = many.disabled = ends;
      detail.replaceChildren(drawPicture(stages[0].probabilities, probabilities, parts, u, drawn.id));
    }

    function drawPicture(before, after, parts, u, drawn) {
      const place = new Map(parts.map(part => [part.id, part]));
      const order = Array.from(after.keys()).sort((a, b) => after[b] - after[a] || logits[b] - logits[a]);
      const columns = ["id", "token", "logit", "probability", "after the filters", "from", "to", "u", "drawn"];
      const row = id => [id, pieces[id], logits[id], before[id], after[id], place.get(id)?.from ?? NaN, place.get(id)?.to ?? NaN,
        u, Number(id === drawn)];
      const shown = [...new Set([...order.slice(0, CANDIDATES), drawn])];
      const rows = shown.map(id => row(id).slice(0, 7).map(x => Number.isNaN(x) ? "" : x));
      const full = T < model.limit ? "" : ` The context of ${model.limit} tokens is full: the next step begins with its newest half`
        + (model.can_slide ? ". (sample.py slides over the cache instead, so its tokens may differ from here on.)" : ", as in sample.py.");
      return picture("draw", `Draw number ${step}: ${visible(pieces[drawn])}`, () => ({columns, rows: order.map(row)}),
        element("div", {}, scrolling(cumulativeBar(parts, u, drawn)), tokenTable({columns: columns.slice(0, 7), rows},
          {selected: i => shown[i] === drawn, click: i => show(appended(ids, shown[i], model), 1)})),
        `The probabilities of all tokens, one after another by id, fill the line from 0 to 1. The random number u = ${u.toFixed(6)} `
        + `falls on ${visible(pieces[drawn])}. Click a candidate to take it instead.${full}`);
    }
  },
}, {loop_step: 0});

// The line from 0 to 1, divided among the tokens, with u on it.
function cumulativeBar(parts, u, drawn) {
  const width = roomFor(900), left = 8, X = x => left + (width - 2 * left) * x, shades = ["#dfe6f0", "#c3d0e2"];
  const middle = {"text-anchor": "middle"};
  return svg("svg", {width, height: 74, role: "img"},
    parts.flatMap(({id, from, to}, i) => {
      const wide = X(to) - X(from), name = visible(pieces[id]), fill = id === drawn ? "#1f5fbf" : shades[i % 2];
      return [svg("rect", {x: X(from), y: 20, width: Math.max(wide, 0.3), height: 28, fill}, svg("title", {}, `${name}: ${percent(to - from)}`)),
        wide > 8 * name.length + 4 && svg("text", {x: (X(from) + X(to)) / 2, y: 38, ...middle, style: id === drawn ? {fill: "#fff"} : {}}, name)];
    }),
    svg("line", {x1: X(u), x2: X(u), y1: 12, y2: 56, stroke: "#c2410c", "stroke-width": 2}),
    svg("text", {x: clamp(X(u), 40, width - 40), y: 10, ...middle}, `u = ${u.toFixed(4)}`),
    [0, 0.25, 0.5, 0.75, 1].map(x => svg("text", {x: clamp(X(x), 14, width - 14), y: 70, ...middle, class: "soft"}, x)));
}

// --- the cache -------------------------------------------------------------------------------------------------------

// What generate() of folio/generate.py has in its cache when it draws token number 0, 1, ..., draws - 1 after a prompt of so
// many tokens. A run of slots is {slot, first, count, kind}: count tokens from number `first` on; kind: kept, new, or
// recomputed. Returns for each draw {runs, computed (tokens in its forward passes), recomputed}.
function cacheSteps(prompt, draws, blockSize, slides) {
  const stride = Math.max(1, Math.floor(blockSize / 2)), window = blockSize - stride, start = Math.max(0, prompt - blockSize);
  let first = start, length = prompt - start; // the cache holds tokens first ... first + length - 1 at positions 0, 1, ...
  const steps = [{runs: [{slot: 0, first, count: length, kind: "new"}], computed: length, recomputed: 0}];
  for (let n = 1; n < draws; n++) {
    let runs, recomputed = 0;
    if (slides && length >= blockSize) { // the oldest one is replaced
      const slot = length % blockSize, oldest = first + length - blockSize;
      runs = [{slot: 0, first: oldest + blockSize - slot, count: slot, kind: "kept"}, {slot, first: first + length, count: 1, kind: "new"},
        {slot: slot + 1, first: oldest + 1, count: blockSize - slot - 1, kind: "kept"}];
    } else {
      if (length === blockSize) { // the newest ones are prefilled again
        first += length - window;
        length = recomputed = window;
      }
      runs = [{slot: 0, first, count: length, kind: recomputed ? "recomputed" : "kept"}, {slot: length, first: first + length, count: 1, kind: "new"}];
    }
    length++;
    steps.push({runs: runs.filter(({count}) => count), computed: recomputed + 1, recomputed});
  }
  return steps;
}

const KINDS = { // their colors, from 0 to 1
  kept: {color: 0.2, title: "kept from earlier steps"}, recomputed: {color: 0.5, title: "computed again in this step"},
  new: {color: 0.9, title: "new: computed in this step"},
};

defineView({
  id: "cache", title: "The key-value cache",
  about: "A new token looks at the keys and values of the tokens before it. They do not change, so they are kept: each step "
    + "computes one token instead of all. When the context is full, something has to go.",
  draw(box, {labels, token, config: {n_layer: L, n_embd: C, block_size: S, position}, model}) {
    const prompt = token + 1, full = Math.max(1, S - prompt + 1), most = full + S, steps = cacheSteps(prompt, most, S, model.can_slide);
    const result = element("div"), value = clamp(state.draws, 1, most), text = t => t < prompt ? visible(labels[t]) : `generated ${t - prompt}`;
    box.append(controls(slider("drawn tokens", {min: 1, max: most, value, "data-testid": "cache-draws", move: draws => {
      remember({draws});
      update(draws);
    }})), result);
    update(value);

    function update(n) {
      const {runs, computed, recomputed} = steps[n - 1], past = steps.slice(0, n), tokenBytes = 2 * L * C * 4;
      const slots = runs.flatMap(run => Array.from({length: run.count}, (_, i) => [run.slot + i, run.first + i, run.kind]));
      slots.sort((a, b) => a[0] - b[0]);
      const sum = numbers => numbers.reduce((a, b) => a + b, 0), used = slots.length;
      const total = sum(past.map(step => step.computed)), without = sum(past.map((_, i) => Math.min(prompt + i, S)));
      const row = Float32Array.from({length: S}, (_, slot) => slots[slot] ? KINDS[slots[slot][2]].color : NaN);
      const room = roomFor(1000), newest = runs.find(run => run.kind === "new"), width = clamp(Math.floor(room / S), 1, 22);
      const bytes = `2 · ${L} layers · ${C} channels · 4 bytes = ${grouped(tokenBytes)} per token`;
      const facts = [
        ["tokens in the cache", used, `of ${grouped(S)}`], ["bytes used", tokenBytes * used, bytes],
        ["bytes allocated", tokenBytes * S, `for ${grouped(S)} tokens`],
        ["tokens computed so far", total, `${grouped(sum(past.map(step => step.recomputed)))} of them again`],
        ["without a cache", without, `${(without / total).toFixed(1)} times as many`],
      ];
      const event = recomputed ? `The context was full: its newest ${recomputed} tokens were computed again at positions 0 to ${recomputed - 1}, and the others dropped.`
        : n === 1 ? "The prompt is computed in one pass (prefill)."
          : model.can_slide && n > full ? "The context is full: the new token takes the place of the oldest one."
            : "One token is computed; it looks at all that are kept.";
      const numbers = steps.map((step, i) => [i + 1, step.computed, step.recomputed]);
      result.replaceChildren(
        picture("cache", `Draw ${n}: ${computed === 1 ? "1 token" : `${grouped(computed)} tokens`} computed`,
          () => ({columns: ["slot", "token", "kind"], rows: slots}), element("div", {},
            legend(Object.values(KINDS).map(({color, title}) => ({name: title, color: css(colorOf("sequential", color))}))),
            heatMap({shape: [L, S], data: Float32Array.from({length: L * S}, (_, i) => row[i % S])}, {
              cell: width, height: clamp(Math.floor(160 / L), 5, 22), chosen: newest.count === 1 ? [null, newest.slot] : undefined,
              read: (layer, slot) => `layer ${layer}, slot ${slot}: ${slots[slot] ? `${text(slots[slot][1])}, ${KINDS[slots[slot][2]].title}` : "empty"}`,
            })), `${event} A row is a layer, a column a slot: the position modulo the context. Gray: empty.`),
        element("div", {class: "row"},
          picture("cache-numbers", "In numbers", () => ({columns: ["fact", "number"], rows: facts.map(fact => fact.slice(0, 2))}),
            numberTable(["", "number", ""].map((title, j) => ({title, text: j === 2})), facts.map(([name, number, note]) => [name, grouped(number), note]))),
          picture("cache-costs", "Tokens computed for each draw", () => ({columns: ["draw", "computed", "recomputed"], rows: numbers}),
            scrolling(lineChart([{name: "computed", points: numbers}],
              {width: roomFor(460), height: 180, from: 0, mark: n, xTitle: "draw", click: draws => change({draws})})),
            model.can_slide ? "The prompt, and then one each: with these positions, a full cache can slide." :
              `With ${position} positions, kept keys belong to their positions, so a full cache cannot slide: half is computed again.`)));
    }
  },
}, {draws: 1});
