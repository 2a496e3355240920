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

// The first token at which the cumulative probability exceeds u, and the part of [0, 1] that it has: {id, from, to}.
function drawToken(probabilities, u) {
  const total = probabilities.reduce((sum, p) => sum + p, 0);
  let from = 0, last = null;
  for (let id = 0; id < probabilities.length; id++) {
    const to = from + probabilities[id];
    if (probabilities[id] > 0) last = {id, from: from / total, to: to / total};
    if (to > u * total) return last;
    from = to;
  }
  return last;
}

// --- the loop --------------------------------------------------------------------------------------------------------

const PATH = ["text", "ids", "model", "logits", "filters", "draw", "append"];
const LIT = 110; // milliseconds that each part of the path is lit
const CANDIDATES = 16;
let nextToken = null; // appends the token that is drawn next, while the view is shown

// Where the loop is: the number of tokens that were generated before the one after the selected token.
function loopStep(ids, token) {
  return state.ids ? Math.max(0, state.loop_step - (ids.length - 1 - token)) : 0;
}

// The ids with another token after the selected one. If the context is full, its newest part is kept as generate() does.
function appended(ids, token, id, {limit}) {
  const longer = [...ids.slice(0, token + 1), id];
  return longer.length > limit ? longer.slice(-(limit - Math.max(1, Math.floor(limit / 2))) - 1) : longer;
}

// The distributions of each stage after a token, the random number, and the token that is drawn.
function drawAfter(logits, step, {vocab_size}) {
  const stages = samplingStages(logits.subarray(0, vocab_size), state), probabilities = stages.at(-1).probabilities;
  const u = uniform(state.seed, 0, step);
  return {stages, probabilities, u, drawn: drawToken(probabilities, u)};
}

defineView({
  id: "loop", title: "The loop, step by step",
  about: "A model computes one token at a time. The token is drawn, appended, and the whole text is the input of the next step. "
    + "The random numbers follow from the seed, so sample.py draws the same tokens.",
  keys: {d: () => nextToken?.(1)},
  async draw(box, context) {
    const {ids, labels, token, model} = context, step = loopStep(ids, token);
    const {tensors: {logits}} = await context.ask("logits", {token});
    const parts = element("ol", {class: "path", "data-testid": "loop-path"}), detail = element("div");
    const draw = element("button", {class: "chosen", "data-testid": "loop-draw", click: () => generate(1)}, "Draw a token ", element("kbd", {}, "d"));
    const many = element("button", {"data-testid": "loop-draw-20", click: () => generate(20)}, "20 tokens");
    const undo = element("button", {disabled: step === 0, click: () => change({ids: ids.slice(0, token).join(","), token: token - 1, loop_step: step - 1})}, "take one back");
    const seed = element("label", {}, "seed ", element("input", {type: "number", min: 0, value: state.seed, "data-testid": "seed",
      change: event => change({seed: clamp(Math.floor(Number(event.target.value)) || 0, 0, Number.MAX_SAFE_INTEGER)})}));
    let current;
    update();
    box.append(element("div", {class: "controls"}, draw, many, undo, seed), parts, textSoFar(), samplingControls(update), detail);
    nextToken = generate;

    // Draw tokens. A single one lights the path on its way.
    async function generate(count) {
      if (draw.disabled) return;
      draw.disabled = many.disabled = true;
      if (count === 1 && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
        for (const part of parts.children) {
          part.classList.add("lit");
          await new Promise(resolve => setTimeout(resolve, LIT));
        }
      }
      let next = ids.slice(0, token + 1), n = 0;
      for (; n < count; n++) {
        const answer = await ask(question("logits", next, {token: next.length - 1}));
        const {drawn} = drawAfter(answer.tensors.logits.data, step + n, model);
        if (drawn.id === model.eot) break;
        next = appended(next, next.length - 1, drawn.id, model);
        many.textContent = `${n + 1} tokens`;
      }
      if (draw.isConnected) show(next, n);
    }

    function show(next, count) {
      change({ids: next.join(","), token: next.length - 1, loop_step: step + count});
    }

    function textSoFar() {
      const first = Math.max(0, token + 1 - step);
      return element("div", {class: "token-strip", "data-testid": "loop-text"}, labels.slice(0, token + 1).map((label, t) =>
        element("span", {class: t >= first ? "token generated" : "token", title: t >= first ? "generated" : "prompt", click: () => change({token: t})},
          label === "\n" ? "⏎\n" : visible(label).replaceAll("␣", " "))), element("span", {class: "caret"}, "▏"));
    }

    function update() {
      current = drawAfter(logits.data, step, model);
      const {stages, probabilities, u, drawn} = current, T = token + 1, piece = visible(pieces[drawn.id]);
      const allowed = probabilities.reduce((count, p) => count + (p > 0), 0), ends = drawn.id === model.eot;
      const {n_layer, n_embd} = context.config, best = logits.data.reduce((a, x, i) => x > logits.data[a] ? i : a, 0);
      const content = {
        text: [`${T} tokens`, `…${labels.slice(Math.max(0, T - 8), T).map(visible).join("")}`],
        ids: [`${T} numbers`, `…${ids.slice(Math.max(0, T - 3), T).join(" ")}`],
        model: [`${n_layer} layers`, `${T} × ${n_embd} numbers`],
        logits: [`${logits.data.length.toLocaleString("en-US")} numbers`, `largest: ${visible(pieces[best])} ${short(logits.data[best])}`],
        filters: [`${allowed.toLocaleString("en-US")} tokens left`, `entropy ${short(entropyOf(probabilities))}`],
        draw: [`u = ${u.toFixed(4)}`, `falls on ${piece}`],
        append: [ends ? "the end of the text" : `${piece}, id ${drawn.id}`, ends ? "nothing is appended" : "and again"],
      };
      parts.replaceChildren(...PATH.map(name => element("li", {}, element("b", {}, name), ...content[name].map(line => element("span", {}, line)))));
      draw.disabled = many.disabled = ends;
      detail.replaceChildren(drawPicture(stages, probabilities, u, drawn), ...T >= model.limit ? [fullNote()] : []);
    }

    function fullNote() {
      const left = Math.max(1, Math.floor(model.limit / 2));
      return element("p", {}, `The context of ${model.limit} tokens is full. The next step begins with the newest ${model.limit - left} tokens and the drawn one`
        + (model.can_slide ? ". (sample.py slides over the cache instead, so its tokens may differ from here on: see the key-value cache.)" : ", as in sample.py."));
    }

    function drawPicture(stages, probabilities, u, drawn) {
      const intervals = [];
      let sum = 0;
      const total = probabilities.reduce((a, b) => a + b, 0);
      probabilities.forEach((p, id) => {
        if (p > 0) intervals.push({id, from: sum / total, to: (sum + p) / total});
        sum += p;
      });
      const place = new Map(intervals.map(interval => [interval.id, interval]));
      const order = Array.from(probabilities.keys()).sort((a, b) => probabilities[b] - probabilities[a] || logits.data[b] - logits.data[a]);
      const row = id => [id, pieces[id], logits.data[id], stages[0].probabilities[id], probabilities[id], place.get(id)?.from ?? NaN, place.get(id)?.to ?? NaN];
      const columns = [{title: "id"}, {title: "token", text: true}, {title: "logit"}, {title: "probability"}, {title: "after the filters"}, {title: "from"}, {title: "to"}];
      const shown = order.slice(0, CANDIDATES);
      if (!shown.includes(drawn.id)) shown.push(drawn.id);
      return picture("draw", `Draw number ${step}: ${visible(pieces[drawn.id])}`,
        () => ({columns: [...columns.map(column => column.title), "u", "drawn"], rows: order.map(id => [...row(id), u, Number(id === drawn.id)])}),
        element("div", {}, element("div", {class: "scroll"}, cumulativeBar(intervals, u, drawn.id)),
          numberTable(columns, shown.map(id => row(id).with(1, visible(pieces[id])).map(x => Number.isNaN(x) ? "" : x)),
            {selected: i => shown[i] === drawn.id, click: i => show(appended(ids, token, shown[i], model), 1)})),
        `The probabilities of all tokens, one after another by id, fill the line from 0 to 1. The random number u = ${u.toFixed(6)} falls on `
        + `${visible(pieces[drawn.id])}. Click a candidate to take it instead.`);
    }
  },
}, {loop_step: 0});

// The line from 0 to 1, divided among the tokens, with u on it.
function cumulativeBar(intervals, u, drawn) {
  const width = roomFor(900), left = 8, X = x => left + (width - 2 * left) * x;
  const shades = ["#dfe6f0", "#c3d0e2"];
  return svg("svg", {width, height: 74, role: "img"},
    intervals.flatMap(({id, from, to}, i) => {
      const wide = X(to) - X(from), chosen = id === drawn, name = visible(pieces[id]);
      return [svg("rect", {x: X(from), y: 20, width: Math.max(wide, 0.3), height: 28, fill: chosen ? "#1f5fbf" : shades[i % 2]}, svg("title", {}, `${name}: ${percent(to - from)}`)),
        wide > 8 * [...name].length + 4 && svg("text", {x: (X(from) + X(to)) / 2, y: 38, "text-anchor": "middle", style: chosen ? {fill: "#fff"} : {}}, name)];
    }),
    svg("line", {x1: X(u), x2: X(u), y1: 12, y2: 56, stroke: "#c2410c", "stroke-width": 2}),
    svg("text", {x: clamp(X(u), 40, width - 40), y: 10, "text-anchor": "middle"}, `u = ${u.toFixed(4)}`),
    [0, 0.25, 0.5, 0.75, 1].map(x => svg("text", {x: X(x), y: 70, "text-anchor": x === 0 ? "start" : x === 1 ? "end" : "middle", class: "soft"}, x)));
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

const KINDS = {
  kept: {color: "#9fb3cf", title: "kept from earlier steps"}, new: {color: "#123a7a", title: "new: computed in this step"},
  recomputed: {color: "#e08a4a", title: "computed again in this step"}, empty: {color: "#f4f6f9", title: "empty"},
};

defineView({
  id: "cache", title: "The key-value cache",
  about: "A new token looks at the keys and values of the tokens before it. They do not change, so they are kept: each step "
    + "computes one token instead of all. When the context is full, something has to go.",
  draw(box, {ids, labels, token, config, model}) {
    const {n_layer: L, n_embd: C, block_size: S} = config, prompt = token + 1, most = S - Math.min(prompt, S) + S + 1;
    const steps = cacheSteps(prompt, most, S, model.can_slide);
    const output = element("output"), result = element("div");
    const slider = element("input", {
      type: "range", min: 1, max: most, value: clamp(state.draws, 1, most), "data-testid": "cache-draws", "aria-label": "Tokens drawn",
      style: {width: "min(26rem, 45vw)"}, input: event => {
        remember({draws: Number(event.target.value)});
        update();
      },
    });
    const go = by => element("button", {"aria-label": by < 0 ? "one less" : "one more", click: () => {
      remember({draws: clamp(Number(slider.value) + by, 1, most)});
      slider.value = state.draws;
      update();
    }}, by < 0 ? "−" : "+");
    const full = Math.max(1, S - prompt + 1); // draws with the cache just full
    const jump = element("button", {click: () => change({draws: Math.min(full + 1, most)})}, "where it is full");
    box.append(element("div", {class: "controls"}, element("label", {}, "drawn tokens ", slider, " ", output), go(-1), go(1), jump), result);
    update();

    function update() {
      const n = clamp(state.draws, 1, most), {runs, computed, recomputed} = steps[n - 1], past = steps.slice(0, n);
      const count = kind => runs.reduce((sum, run) => run.kind === kind ? sum + run.count : sum, 0);
      const used = runs.reduce((sum, run) => sum + run.count, 0), bytes = 2 * L * C * 4, perToken = bytes.toLocaleString("en-US");
      const total = past.reduce((sum, step) => sum + step.computed, 0), again = past.reduce((sum, step) => sum + step.recomputed, 0);
      const without = past.reduce((sum, _, i) => sum + Math.min(prompt + i, S), 0);
      output.textContent = `${n}`;
      const text = t => t < prompt ? `token ${t} ${visible(labels[t])}` : `generated token ${t - prompt}`;
      const rows = runs.flatMap(run => Array.from({length: run.count}, (_, i) => [run.slot + i, run.first + i, run.kind]));
      const facts = [
        ["tokens in the cache", used, `of ${S.toLocaleString("en-US")}`], ["kept", count("kept"), ""], ["new", count("new"), n === 1 ? "the prompt, in one pass" : ""],
        ["computed again", count("recomputed"), ""],
        ["bytes used", bytes * used, `2 · ${L} layers · ${C} channels · ${used} tokens · 4 bytes = ${size(bytes * used)}`],
        ["bytes allocated", bytes * S, `the same for ${S.toLocaleString("en-US")} tokens = ${size(bytes * S)}; ${perToken} per token`],
        ["tokens computed so far", total, `${again.toLocaleString("en-US")} of them again`],
        ["without a cache", without, `${(without / total).toFixed(1)} times as many`],
      ];
      const event = recomputed ? `The context was full: its newest ${recomputed} tokens were computed again at positions 0 to ${recomputed - 1}, and the other ${S - recomputed} were dropped.`
        : used === S && runs.length && n > full ? `The context is full: the new token takes the place of the oldest one.`
          : n === 1 ? "The prompt is computed in one pass (prefill)." : "One token is computed; it looks at all that are kept.";
      result.replaceChildren(
        picture("cache", `Draw ${n}: ${computed.toLocaleString("en-US")} ${computed === 1 ? "token" : "tokens"} computed`,
          () => ({columns: ["slot", "token", "kind"], rows}),
          element("div", {}, element("div", {class: "legend"}, Object.values(KINDS).map(({color, title}) =>
            element("span", {}, element("i", {class: "swatch", style: {background: color}}), title))),
          element("div", {class: "scroll"}, cacheGrid(runs, L, S, text))), event),
        element("div", {class: "row"},
          picture("cache-numbers", "In numbers", () => ({columns: ["fact", "number"], rows: facts.map(([name, number]) => [name, number])}),
            numberTable([{title: ""}, {title: "number"}, {title: "", text: true}], facts.map(([name, number, note]) => [name, number.toLocaleString("en-US"), note]))),
          picture("cache-costs", "Tokens computed for each draw", () => ({columns: ["draw", "computed", "recomputed"], rows: steps.map((step, i) => [i + 1, step.computed, step.recomputed])}),
            element("div", {class: "scroll"}, lineChart([{name: "computed", points: steps.map((step, i) => [i + 1, step.computed])}],
              {width: roomFor(460), height: 180, from: 0, mark: n, xTitle: "draw", click: x => change({draws: x})})),
            model.can_slide ? "The prompt, and then one each: with these positions, a full cache can slide." :
              `The prompt, then one each. With ${config.position} positions, the kept keys belong to their positions, so a full cache cannot slide: half is computed again.`)));
    }
  },
}, {draws: 1});

function size(bytes) {
  const unit = Math.min(3, Math.floor(Math.log2(bytes) / 10));
  return unit ? `${(bytes / 1024 ** unit).toPrecision(3)} ${["", "KiB", "MiB", "GiB"][unit]}` : `${bytes} bytes`;
}

// Layers (rows) by slots (columns), in the colors of what happened to them.
function cacheGrid(runs, layers, slots, text) {
  const left = 70, available = roomFor(1000) - left - 26;
  const cell = Math.max(1, available / slots), height = clamp(Math.floor(160 / layers), 5, 26), width = cell * slots, top = 4;
  const step = ticksOf(0, slots, 8)[1] || 1, bottom = top + layers * height;
  return svg("svg", {width: left + width + 24, height: bottom + 34, role: "img"},
    Array.from({length: layers}, (_, layer) => layer).flatMap(layer => [
      (height > 11 || layer % 6 === 0) && svg("text", {x: left - 6, y: top + (layer + 0.5) * height + 4, "text-anchor": "end", class: "soft"}, `layer ${layer}`),
      svg("rect", {x: left, y: top + layer * height, width, height: height - 1, fill: KINDS.empty.color, stroke: "#d9dee6", "stroke-width": 0.5}),
      ...runs.map(run => svg("rect", {
        x: left + run.slot * cell, y: top + layer * height, width: Math.max(run.count * cell - (cell > 3 ? 0.5 : 0), 2), height: height - 1, fill: KINDS[run.kind].color,
      }, svg("title", {}, `slots ${run.slot} to ${run.slot + run.count - 1}: ${run.kind}, ${text(run.first)} to ${text(run.first + run.count - 1)}`))),
    ]),
    Array.from({length: Math.floor(slots / step) + 1}, (_, i) => i * step).map(slot =>
      svg("text", {x: left + slot * cell, y: bottom + 14, "text-anchor": "middle", class: "soft"}, slot)),
    svg("text", {x: left + width / 2, y: bottom + 29, "text-anchor": "middle", class: "soft"}, "slot (position, modulo the context)"));
}
