"use strict";
// Views of experiments: all heads at once, what changes when a part is switched off, and two models compared.

// --- all heads -------------------------------------------------------------------------------------------------------

const HEAD_SCORES = { // as in folio/trace.py
  previous: "the weight of the previous token: 1 for a previous-token head",
  first: "the weight of the first token, where heads often look that have nothing to find",
  itself: "the weight of the token itself",
  prefix: "the weight of what followed earlier occurrences of the same token, on random tokens that repeat: high for an induction head",
  entropy: "the entropy of a token's weights in nats: 0 if it looks at one token, ln n if at n tokens alike",
  distance: "how many tokens back a token looks, weighted",
};
const TABLE_ROWS = 200; // heads in the table; the export has all

// All heads as {layer, head, scores: {name: number}}, by layer.
function headsOf({shape: [layers, heads]}, tensors) {
  return Array.from({length: layers * heads}, (_, i) => ({
    layer: Math.floor(i / heads), head: i % heads,
    scores: Object.fromEntries(Object.keys(HEAD_SCORES).map(name => [name, tensors[`score_${name}`].data[i]])),
  }));
}

defineView({
  id: "all-heads", title: "All heads",
  about: "Every head in small: a row is a token that looks, a column a token that is looked at, and darker means more weight. "
    + "Heads specialize: sort them by what they do. Click one to see what its tokens look at.",
  draw(box, {overview: {tensors}, layer, head}) {
    const all = headsOf(tensors.score_previous, tensors), byScore = state.sort in HEAD_SCORES;
    const sorted = byScore ? [...all].sort((a, b) => b.scores[state.sort] - a.scores[state.sort]) : all;
    const open = chosen => change({layer: chosen.layer, head: chosen.head, view: "looking-back"});
    const names = Object.keys(HEAD_SCORES), numbers = ({layer, head, scores}) => [layer, head, ...names.map(name => scores[name])];
    const columns = ["layer", "head", ...names], isSelected = one => one.layer === layer && one.head === head;
    const heading = name => element("button", {
      class: name === state.sort ? "chosen" : null, "aria-pressed": String(name === state.sort), click: () => change({sort: name}),
    }, name);
    box.append(
      element("div", {class: "controls"}, "sort by", ["layer", ...names].map(heading)),
      element("p", {}, byScore ? `${state.sort}: ${HEAD_SCORES[state.sort]}; the mean over the text.` : "Layer 0 is the first one."),
      picture("all-heads", `${all.length} heads`, () => ({columns, rows: sorted.map(numbers)}),
        headGrid(sorted, tensors.thumbnails, {byScore, isSelected, open})),
      picture("head-scores", "Scores", () => ({columns, rows: sorted.map(numbers)}),
        numberTable(columns.map(title => ({title})), sorted.slice(0, TABLE_ROWS).map(numbers),
          {selected: i => isSelected(sorted[i]), click: i => open(sorted[i])}),
        (sorted.length > TABLE_ROWS ? `The first ${TABLE_ROWS}; the CSV has all. ` : "") + "Means over the text from its second token on."),
      element("dl", {class: "terms"}, names.map(name => [element("dt", {}, name), element("dd", {}, HEAD_SCORES[name])]).flat()));
  },
}, {sort: "layer"});

// Thumbnails on one canvas, because a thousand canvases are slow, under a button for each.
function headGrid(heads, {shape: [layers, perLayer, n], data}, {byScore, isSelected, open}) {
  const available = roomFor(2000) - 30, gap = 6, left = byScore ? 0 : 26;
  const caption = byScore ? 26 : 14, width = heads.length > 300 ? 32 : heads.length > 40 ? 64 : 96;
  const columns = byScore ? Math.max(1, Math.floor(available / (width + gap))) : perLayer;
  const rows = Math.ceil(heads.length / columns), size = clamp(Math.floor(available / columns) - gap, 28, width);
  const across = size + gap, down = size + caption + gap;
  const canvas = element("canvas", {width: columns * across, height: rows * down, "aria-hidden": "true"});
  const image = new ImageData(canvas.width, canvas.height), pixels = new Uint32Array(image.data.buffer);
  const palette = Uint32Array.from({length: 256}, (_, x) => {
    const [r, g, b] = colorOf("sequential", x / 255);
    return new Uint32Array(new Uint8Array([r, g, b, 255]).buffer)[0];
  });
  const buttons = heads.map((one, i) => {
    const x = i % columns * across, y = Math.floor(i / columns) * down, first = (one.layer * perLayer + one.head) * n * n;
    for (let v = 0; v < size; v++) {
      const from = first + Math.floor(v * n / size) * n, to = (y + v) * canvas.width + x;
      for (let u = 0; u < size; u++) pixels[to + u] = palette[data[from + Math.floor(u * n / size)]];
    }
    const name = `layer ${one.layer}, head ${one.head}`;
    return element("button", {
      "data-testid": `head-${one.layer}-${one.head}`, class: isSelected(one) ? "selected" : null, title: name, "aria-label": name,
      style: {left: `${left + x}px`, top: `${y}px`, width: `${size}px`, height: `${size + caption}px`, paddingTop: `${size}px`},
      click: () => open(one),
    }, byScore || size >= 40 ? `${one.layer}.${one.head}` : one.head, byScore && element("br"), byScore && shortest(one.scores[state.sort]));
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.marginLeft = `${left}px`;
  const names = byScore ? [] : Array.from({length: layers}, (_, l) =>
    element("span", {style: {top: `${l * down + size / 2 - 8}px`}}, `L${l}`));
  const grid = element("div", {class: "head-grid"}, canvas, names, buttons);
  return element("div", {class: "scroll", style: {maxHeight: "44rem"}}, grid);
}

// A number with two significant digits.
function shortest(x) {
  return Math.abs(x) < 0.005 ? "0" : Math.abs(x) >= 10 ? x.toFixed(0) : x.toPrecision(2);
}

// --- switches --------------------------------------------------------------------------------------------------------

const MASKS = {before: "before the softmax: −∞ (as trained)", after: "after the softmax: 0 (rows sum to less than 1)", off: "off: attend to the future"};

defineView({
  id: "switches", title: "Switch parts off",
  about: "What each part is for shows when it is missing: without it, the tokens are predicted worse, or as well as before. "
    + "The switches act on all views until they are reset.",
  async draw(box, context) {
    const {ids, labels, token, layer, head, config} = context, replaced = new Map(replacements(ids));
    const original = ids.map((id, t) => replaced.get(t) ?? id);
    const before = await ask(question("overview", original, UNCHANGED_QUESTION));
    const after = context.overview, size = ids.length - 1;
    const [whole, changed] = [before, after].map(({tensors}) => tensors.loss.data);
    const isOff = (list, name) => state[list].split(",").includes(name);
    const toggle = (list, name) => {
      const others = state[list].split(",").filter(other => other && other !== name);
      change({[list]: (isOff(list, name) ? others : [...others, name]).sort((a, b) => a - b).join(",")});
    };
    box.append(...controls());
    if (size > 0) box.append(lossPicture(), effectPicture());
    box.append(...await entropyPictures(context));

    function controls() {
      const masks = element("select", {"data-testid": "switch-mask", change: event => change({mask: event.target.value})},
        Object.entries(MASKS).map(([name, title]) => element("option", {value: name, selected: name === state.mask}, title)));
      const scale = element("input", {
        type: "checkbox", "data-testid": "switch-scale", checked: Boolean(state.scale), change: event => change({scale: Number(event.target.checked)}),
      });
      const button = (list, name, text, title, id) => element("button", {
        class: isOff(list, name) ? "off" : null, "aria-pressed": String(isOff(list, name)), title, "data-testid": id, click: () => toggle(list, name),
      }, text);
      const parts = element("table", {class: "parts"}, element("tbody", {}, Array.from({length: config.n_layer}, (_, l) => element("tr", {},
        element("th", {scope: "row"}, `layer ${l}`),
        Array.from({length: config.n_head}, (_, h) => element("td", {},
          button("heads_off", `${l}.${h}`, String(h), `head ${h} of layer ${l}`, `switch-head-${l}-${h}`))),
        element("td", {}, button("mlps_off", String(l), "MLP", `the MLP of layer ${l}`, `switch-mlp-${l}`))))));
      return [
        element("div", {class: "controls"}, element("label", {}, "mask ", masks), element("label", {}, scale, " divide scores by √D")),
        element("div", {class: "controls"}, replacement()),
        element("h3", {}, "Heads and MLPs"),
        element("p", {}, "Click a head to remove what it adds to the residual stream, or an MLP. Crossed out: off."),
        element("div", {class: "scroll", style: {maxHeight: "20rem", marginBottom: "1rem"}}, parts),
      ];
    }

    // A choice of another token for the selected position.
    function replacement() {
      const list = element("datalist", {id: "vocabulary"}), select = context.model.vocab_size <= 300 && element("select", {
        "data-testid": "switch-token", "aria-label": "Another token", change: event => replace(Number(event.target.value)),
      }, pieces.slice(0, context.model.vocab_size).map((piece, id) => element("option", {value: id, selected: id === ids[token]}, `${visible(piece)} (${id})`)));
      const typed = element("input", {type: "text", size: 14, placeholder: "text or id", "data-testid": "switch-token", change: async event => {
        const text = event.target.value, found = pieces.indexOf(text);
        const id = found >= 0 ? found : /^\d+$/.test(text) ? Number(text) : (await ask({kind: "tokens", text})).facts.ids[0];
        if (id in pieces) replace(id);
      }});
      const was = replaced.get(token);
      return [element("label", {}, `replace token ${token}, ${visible(pieces[was ?? ids[token]])}, by `, select || [typed, list]),
        was !== undefined && element("button", {click: () => replace(was)}, `back to ${visible(pieces[was])}`)];
    }

    function replace(id) {
      const entries = new Map(replacements(ids).map(([t, from]) => [t, [from, ids[t]]]));
      const from = replaced.get(token) ?? ids[token];
      entries.delete(token);
      if (id !== from) entries.set(token, [from, id]);
      change({ids: ids.with(token, id).join(","), token, replaced: [...entries].map(([t, [from, to]]) => `${t}:${from}:${to}`).join(",")});
    }

    function lossPicture() {
      const [a, b] = [mean(whole), mean(changed)];
      const items = [{label: "as trained", value: a, text: `${short(a)} nats`},
        {label: "changed", value: b, text: `${short(b)} nats`, color: "#c2410c"}];
      return picture("switch-losses", `Mean loss: ${short(a)} → ${short(b)}, a change of ${signed(b - a)} nats`,
        () => ({columns: ["as trained", "changed", "change"], rows: [[a, b, b - a]]}),
        element("div", {class: "scroll"}, bars(items, Math.max(a, b), {labelWidth: 80, width: roomFor(430) - 170})),
        `Per token, over ${size} tokens. Perplexity: ${short(Math.exp(a))} → ${short(Math.exp(b))}.`);
    }

    function effectPicture() {
      const differences = changed.map((x, i) => x - whole[i]);
      return picture("switch-differences", "Change of each token's loss",
        () => ({columns: ["position", "token", "as trained", "changed", "change"],
          rows: Array.from(differences, (x, i) => [i + 1, labels[i + 1], whole[i], changed[i], x])}),
        tokenStrip(labels, [NaN, ...differences], token),
        "Dark: predicted better than before. Light: predicted worse.");
    }
  },
}, {});

const UNCHANGED_QUESTION = {...UNCHANGED, scale: true};

// The entropy of each row of the selected head, with and without 1/sqrt(D), and the sums of its rows.
async function entropyPictures(context) {
  const {labels, layer, head, config} = context, T = labels.length;
  const [divided, plain] = await Promise.all([true, false].map(scale => context.ask("head", {layer, head, scale})));
  const rowsOf = ({tensors: {weights}}) => Array.from({length: T}, (_, t) => rowOf(weights, t));
  const sumOf = row => row.reduce((sum, w) => sum + w, 0), sums = rowsOf(state.scale ? divided : plain).map(sumOf);
  const [entropies, undivided] = [divided, plain].map(answer => rowsOf(answer).map(row => entropyOf(row.map(w => w / sumOf(row)))));
  const most = Array.from({length: T}, (_, t) => Math.log(state.mask === "before" ? t + 1 : T));
  const line = (name, values, color, dash) => ({name, points: Array.from(values, (y, x) => [x, y]), color, dash});
  const lines = [line("divided by √D", entropies, "#1f5fbf"), line("not divided", undivided, "#c2410c"), line("all tokens alike", most, "#8a94a3", "4 3")];
  const D = config.n_embd / config.n_head;
  const result = [picture("row-entropies", `Entropy of each row, layer ${layer}, head ${head}`,
    () => ({columns: ["query", "token", "divided by √D", "not divided", "largest possible"],
      rows: labels.map((label, t) => [t, label, entropies[t], undivided[t], most[t]])}),
    element("div", {}, headPicker(context), legend(lines),
      element("div", {class: "scroll"}, lineChart(lines, {width: roomFor(620), from: 0, xTitle: "query (position)", yTitle: "nats", mark: context.token, click: token => change({token})}))),
    `Without the division, scores are √${D} times as large: the softmax gives most weight to few tokens (low entropy), and its `
    + "gradient, w (1 − w), is nearly 0 for weights near 0 and 1. This is why Vaswani et al. divide. "
    + `Means here: ${short(mean(entropies))} and ${short(mean(undivided))} nats.`)];
  if (state.mask === "after") {
    result.push(picture("row-sums", "Sum of the weights of each row",
      () => ({columns: ["query", "token", "sum"], rows: sums.map((sum, t) => [t, labels[t], sum])}),
      element("div", {class: "scroll"}, lineChart([line("sum", sums)], {width: roomFor(620), from: 0, to: 1, xTitle: "query (position)"})),
      "The softmax shared the weight among all tokens; what the future had is lost. With −∞ before the softmax, each row sums to 1."));
  }
  return result;
}

// The width of a drawing: at most so many pixels, and what the view has.
function roomFor(most) {
  return clamp(document.getElementById("view").clientWidth - 42, 280, most);
}

function mean(values) {
  return values.reduce((sum, x) => sum + x, 0) / values.length;
}

function signed(x) {
  return (x > 0 ? "+" : "") + short(x);
}

// The names of lines in their colors.
function legend(lines) {
  return element("div", {class: "legend"}, lines.map(({name, color, dash, click, selected}) => element(click ? "button" : "span",
    {class: selected ? "selected" : null, click: click ?? null},
    element("i", {style: {borderTop: `3px ${dash ? "dashed" : "solid"} ${color}`}}), name)));
}

// Tokens colored by a signed number each; NaN for none. The scale is symmetric, up to the largest.
function tokenStrip(labels, values, token) {
  const most = Math.max(largest(values), 0.01), readout = element("div", {class: "readout"});
  const spans = labels.map((label, t) => {
    const x = values[t], color = Number.isFinite(x) ? colorOf("signed", x / most) : [255, 255, 255];
    const text = `${t} ${visible(label)}: ${Number.isFinite(x) ? `${signed(x)} nats` : "not predicted"}`;
    return element("span", {
      class: t === token ? "token selected" : "token", title: text, style: {background: css(color), color: textColorOn(color)},
      pointerenter: () => readout.textContent = text, click: () => change({token: t}),
    }, label === "\n" ? "⏎\n" : visible(label).replaceAll("␣", " "));
  });
  const key = [-1, -0.5, 0, 0.5, 1].map(x => {
    const color = colorOf("signed", x);
    return element("span", {style: {background: css(color), color: textColorOn(color)}}, signed(x * most));
  });
  return element("div", {}, element("div", {class: "token-strip"}, spans), element("div", {class: "color-key"}, key), readout);
}

// --- compare ---------------------------------------------------------------------------------------------------------

const MOST_DIFFERENT = 40; // tokens in the table; the export has all
const COMPARED = 20; // next tokens

defineView({
  id: "compare", title: "Compare two", offered: isComparable,
  about: "Two models, or two checkpoints of a run, on the same text: which tokens does one predict better? A difference is the "
    + "first one's loss minus the second one's.",
  async draw(box, context) {
    const {ids, labels, token, layer, head, model, overview, other, config} = context;
    const names = [described.models.length === 2 ? model.name : `step ${(state.step < 0 ? model.step : state.step).toLocaleString("en-US")}`, other.name];
    const loss = overview.tensors.loss.data, otherLoss = other.overview.tensors.loss.data, n = otherLoss.length;
    const differences = Array.from(otherLoss, (x, i) => loss[i] - x);
    box.append(stepControls());
    if (other.ids.length < ids.length) box.append(element("p", {}, `${other.name} has a context of ${other.ids.length} tokens; the others are not compared.`));
    if (n) box.append(meansPicture(), stripPicture(), tablePicture());
    box.append(await distributionPicture(), await headsPicture());

    function stepControls() {
      const {checkpoints} = other.model;
      if (checkpoints.length < 2) return "";
      const output = element("output", {}, names[1]);
      return element("div", {class: "controls"}, element("label", {}, "second: ", element("input", {
        type: "range", min: 0, max: checkpoints.length - 1, value: checkpoints.indexOf(other.step < 0 ? other.model.step : other.step),
        "data-testid": "other-step", "aria-label": "Checkpoint of the second", change: event => change({other_step: checkpoints[Number(event.target.value)]}),
        input: event => output.textContent = `step ${checkpoints[Number(event.target.value)].toLocaleString("en-US")}`,
      }), " ", output));
    }

    function meansPicture() {
      const means = [mean(loss.subarray(0, n)), mean(otherLoss)], difference = mean(differences);
      const variance = differences.reduce((sum, x) => sum + (x - difference) ** 2, 0) / (n - 1), error = Math.sqrt(variance / n);
      const better = differences.filter(x => x < 0).length;
      return picture("compare-means", `Difference of the mean losses: ${signed(difference)} ± ${short(error)} nats per token`,
        () => ({columns: ["first", "second", "difference", "standard error", "first is better at", "tokens"], rows: [[...means, difference, error, better, n]]}),
        element("div", {class: "scroll"}, bars(names.map((name, i) => ({
          label: i ? "second" : "first", value: means[i], text: `${short(means[i])} nats`, color: i ? "#c2410c" : "#1f5fbf",
        })), Math.max(...means), {labelWidth: 60, width: roomFor(410) - 150})),
        `First: ${names[0]}. Second: ${names[1]}. ±: the standard error over ${n} tokens, paired. The first is better at ${better} of them. (Tokens of one text are not `
        + "independent, so the true error is larger.)");
    }

    function stripPicture() {
      return picture("compare-strip", "Each token's difference", rows, tokenStrip(labels, [NaN, ...differences, ...labels.slice(n + 1).fill(NaN)], token),
        "Dark: the first predicted it better. Light: the second did.");
    }

    function rows() {
      return {
        columns: ["position", "token", "first", "second", "difference"],
        rows: differences.map((x, i) => [i + 1, labels[i + 1], loss[i], otherLoss[i], x]),
      };
    }

    function tablePicture() {
      const order = Array.from(differences.keys()).sort((a, b) => Math.abs(differences[b]) - Math.abs(differences[a])).slice(0, MOST_DIFFERENT);
      const columns = [{title: "position"}, {title: "after", text: true}, {title: "token", text: true}, {title: "first (nats)"}, {title: "second (nats)"}, {title: "difference"}];
      return picture("compare-tokens", "The largest differences", rows, numberTable(columns,
        order.map(i => [i + 1, labels.slice(Math.max(0, i - 11), i + 1).map(visible).join(""), visible(labels[i + 1]), loss[i], otherLoss[i], differences[i]]),
        {selected: k => order[k] + 1 === token, click: k => change({token: order[k] + 1})}));
    }

    async function distributionPicture() {
      if (token >= other.ids.length) return "";
      const answers = await Promise.all([context, other].map(side => side.ask("logits", {token})));
      const [p, q] = answers.map(({tensors: {logits}}) => softmax(logits.data.subarray(0, model.vocab_size)));
      const order = Array.from(p.keys()).sort((a, b) => Math.max(p[b], q[b]) - Math.max(p[a], q[a]));
      const divergence = p.reduce((sum, x, i) => x > 0 ? sum + x * Math.log(x / q[i]) : sum, 0);
      const numbers = id => [id, pieces[id], p[id], q[id], p[id] - q[id]], shown = order.slice(0, COMPARED);
      const columns = ["id", "token", "first", "second", "difference"], most = Math.max(p[order[0]], q[order[0]]);
      return picture("compare-distribution", `The next token after ${token} ${visible(labels[token])}`,
        () => ({columns, rows: order.map(numbers)}),
        element("div", {class: "scroll"}, pairBars(shown.map(id => ({label: visible(pieces[id]), values: [p[id], q[id]]})), most)),
        `Blue: first, orange: second. Σ p ln(p / q) = ${short(divergence)} nats.${ids[token + 1] === undefined ? "" : ` In the text: ${visible(labels[token + 1])}.`}`);
    }

    async function headsPicture() {
      const {n_layer, n_head} = other.model.config;
      const otherLayer = clamp(state.other_layer < 0 ? layer : state.other_layer, 0, n_layer - 1);
      const otherHead = clamp(state.other_head < 0 ? head : state.other_head, 0, n_head - 1);
      const [a, b] = await Promise.all([context.ask("head", {layer, head}), other.ask("head", {layer: otherLayer, head: otherHead})]);
      const choose = (name, value, count, least) => element("select", {"aria-label": name, change: event => change({[name]: Number(event.target.value)})},
        least < 0 && element("option", {value: -1, selected: state[name] < 0}, `same ${name.replace("other_", "")}`),
        Array.from({length: count}, (_, i) => element("option", {value: i, selected: i === value}, `${name.replace("other_", "")} ${i}`)));
      const map = (id, name, {tensors: {weights}}, chosenLayer, chosenHead, choices) => {
        const own = labels.slice(0, weights.shape[0]);
        return picture(id, `${name}: layer ${chosenLayer}, head ${chosenHead}`, () => matrixTable("query \\ key", own, own, weights),
          element("div", {}, element("div", {class: "controls"}, choices), heatMap(shaded(weights), {
            cell: clamp(Math.floor(400 / own.length), 1, 22), chosen: [token, null], click: t => change({token: t}),
            read: (i, j) => `${i} ${visible(own[i])} → ${j} ${visible(own[j])}: ${short(weights.data[i * own.length + j])}`,
          })));
      };
      return element("div", {}, shadeControls(), element("div", {class: "row"},
        map("compare-head-first", "First", a, layer, head,
          [choose("layer", layer, config.n_layer, 0), choose("head", head, config.n_head, 0)]),
        map("compare-head-second", "Second", b, otherLayer, otherHead,
          [choose("other_layer", state.other_layer, n_layer, -1), choose("other_head", state.other_head, n_head, -1)])));
    }
  },
}, {other_layer: -1, other_head: -1});

// Two bars for each item {label, values}.
function pairBars(items, most) {
  const left = 70, width = roomFor(450) - 150, line = 26, colors = ["#1f5fbf", "#e08a4a"];
  return svg("svg", {width: left + width + 80, height: items.length * line + 4, role: "img"}, items.map(({label, values}, i) =>
    svg("g", {transform: `translate(0, ${i * line})`}, svg("text", {x: left - 6, y: 16, "text-anchor": "end"}, label),
      values.flatMap((value, k) => [
        svg("rect", {x: left, y: 2 + 11 * k, width: Math.max(width * value / most, 0.5), height: 9, fill: colors[k]}),
        svg("text", {x: left + width * value / most + 6, y: 10 + 11 * k, class: "soft", "font-size": 10}, percent(value)),
      ]))));
}
