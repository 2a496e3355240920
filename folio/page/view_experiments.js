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

defineView({
  id: "all-heads", title: "All heads",
  about: "Every head in small: a row is a token that looks, a column a token that is looked at, and darker means more weight. "
    + "Heads specialize: sort them by what they do. Click one to see what its tokens look at.",
  draw(box, {overview: {tensors}, config: {n_head}, layer, head}) {
    const names = Object.keys(HEAD_SCORES), columns = ["layer", "head", ...names], at = columns.indexOf(state.sort);
    const rows = Array.from(tensors.score_previous.data, (_, i) =>
      [Math.floor(i / n_head), i % n_head, ...names.map(name => tensors[`score_${name}`].data[i])]);
    if (at >= 2) rows.sort((a, b) => b[at] - a[at]);
    const open = ([layer, head]) => change({layer, head, view: "looking-back"});
    const isSelected = row => row[0] === layer && row[1] === head, table = () => ({columns, rows});
    box.append(
      controls("sort by", ...["layer", ...names].map(name => element("button", {
        class: name === state.sort ? "chosen" : null, "aria-pressed": String(name === state.sort), click: () => change({sort: name}),
      }, name))),
      element("p", {}, at < 2 ? "Layer 0 is the first one." : `${state.sort}: ${HEAD_SCORES[state.sort]}; the mean over the text.`),
      picture("all-heads", `${rows.length} heads`, table, headGrid(rows, tensors.thumbnails, at, isSelected, open)),
      picture("head-scores", "Scores", table, tokenTable({columns, rows: rows.slice(0, TABLE_ROWS)},
        {selected: i => isSelected(rows[i]), click: i => open(rows[i])}),
      rows.length > TABLE_ROWS && `The first ${TABLE_ROWS}; the CSV has all.`));
  },
}, {sort: "layer"});

// Thumbnails on one canvas, because a thousand canvases are slow, under a button for each. By layer, a row is a layer.
function headGrid(rows, thumbnails, at, isSelected, open) {
  const available = roomFor(2000), gap = 6, caption = at < 2 ? 14 : 27, most = rows.length > 300 ? 38 : rows.length > 40 ? 64 : 96;
  const columns = at < 2 ? thumbnails.shape[1] : Math.floor(available / (most + gap));
  const size = clamp(Math.floor(available / columns) - gap, 32, most), down = size + caption + gap;
  const canvas = element("canvas", {width: columns * (size + gap), height: Math.ceil(rows.length / columns) * down});
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  return scrolling(element("div", {class: "head-grid"}, canvas, rows.map((row, i) => {
    const x = i % columns * (size + gap), y = Math.floor(i / columns) * down, name = `layer ${row[0]}, head ${row[1]}`;
    context.drawImage(thumbnail(thumbnails, row[0], row[1]), x, y, size, size);
    return element("button", {
      "data-testid": `head-${row[0]}-${row[1]}`, class: isSelected(row) ? "selected" : null, title: name, "aria-label": name,
      style: {left: `${x}px`, top: `${y}px`, width: `${size}px`, height: `${size + caption}px`, paddingTop: `${size}px`},
      click: () => open(row),
    }, `${row[0]}.${row[1]}`, at >= 2 && [element("br"), Math.abs(row[at]) < 10 ? row[at].toFixed(2) : row[at].toFixed(0)]);
  })));
}

// --- switches --------------------------------------------------------------------------------------------------------

const MASKS = [["before", "before the softmax: −∞ (as trained)"], ["after", "after the softmax: 0 (rows sum to less than 1)"],
  ["off", "off: attend to the future"]];
const SELECTABLE = 300; // tokens of a vocabulary that are offered in a list

defineView({
  id: "switches", title: "Switch parts off",
  about: "What each part is for shows when it is missing: without it, the tokens are predicted worse, or as well as before. "
    + "The switches act on all views until they are reset.",
  async draw(box, context) {
    const {ids, labels, token, config, model} = context, replaced = new Map(replacements(ids)), was = replaced.get(token) ?? ids[token];
    const before = await ask(question("overview", ids.map((id, t) => replaced.get(t) ?? id), {...UNCHANGED, scale: true}));
    const [whole, changed] = [before, context.overview].map(({tensors}) => tensors.loss.data);
    const choose = {"data-testid": "switch-token", "aria-label": "Another token"};
    box.append(
      controls(element("label", {}, "mask ", select(MASKS, state.mask, mask => change({mask}), {"data-testid": "switch-mask"})),
        checkbox("scale", "divide scores by √D", {"data-testid": "switch-scale"})),
      controls(`replace token ${token}, ${visible(pieces[was])}, by`, model.vocab_size <= SELECTABLE
        ? select(pieces.slice(0, model.vocab_size).map((piece, id) => [id, `${visible(piece)} (${id})`]), ids[token], replace, choose)
        : element("input", {...choose, type: "text", size: 14, placeholder: "token or id", change: ({target: {value}}) =>
          replace(pieces.includes(value) ? pieces.indexOf(value) : value)})),
      element("p", {}, "Click a head to remove what it adds to the residual stream, or an MLP. Crossed out: off."),
      scrolling(element("table", {class: "parts"}, Array.from({length: config.n_layer}, (_, l) => element("tr", {},
        element("th", {scope: "row"}, `layer ${l}`),
        Array.from({length: config.n_head}, (_, h) => part("heads_off", `${l}.${h}`, h, `switch-head-${l}-${h}`)),
        part("mlps_off", `${l}`, "MLP", `switch-mlp-${l}`))))));
    if (ids.length > 1) box.append(lossPicture(differencesOf(labels, "as trained", whole, "changed", changed)));
    box.append(...await entropyPictures(context));

    function part(list, name, text, id) {
      const off = state[list].split(",").filter(Boolean), isOff = off.includes(name);
      return element("td", {}, element("button", {
        class: isOff ? "off" : null, "aria-pressed": String(isOff), "data-testid": id,
        click: () => change({[list]: (isOff ? off.filter(other => other !== name) : [...off, name]).join(",")}),
      }, text));
    }

    function replace(id) {
      if (pieces[parseInt(id)] === undefined) return;
      const others = replacements(ids).filter(([t]) => t !== token).map(([t, from]) => [t, from, ids[t]]);
      const entries = Number(id) === was ? others : [...others, [token, was, id]];
      change({ids: ids.with(token, id).join(","), token, replaced: entries.map(entry => entry.join(":")).join(",")});
    }

    function lossPicture({table, drawing}) {
      const [a, b] = [mean(whole), mean(changed)], columns = ["as trained", "changed", "change"];
      return element("div", {},
        picture("switch-losses", `Mean loss: ${short(a)} → ${short(b)}, a change of ${signed(b - a)} nats per token`,
          () => ({columns, rows: [[a, b, b - a]]}), element("div"), `Perplexity: ${short(Math.exp(a))} → ${short(Math.exp(b))}.`),
        picture("switch-differences", "Change of each token's loss", table, drawing(token),
          "Dark: predicted better than before. Light: predicted worse."));
    }
  },
});

// Two lists of losses, of all tokens but the first: a table, and a drawing of the tokens in the colors of the differences.
// The scale is symmetric, up to the largest one.
function differencesOf(labels, name, losses, otherName, others) {
  const differences = Array.from(others, (x, i) => x - losses[i]), columns = ["position", "token", name, otherName, "difference"];
  const most = Math.max(largest(differences), 0.01), readout = element("div", {class: "readout"});
  const key = [-1, -0.5, 0, 0.5, 1].map(x => element("span", {style: onColor(colorOf("signed", x))}, signed(x * most)));
  return {
    differences, table: () => ({columns, rows: differences.map((x, i) => [i + 1, labels[i + 1], losses[i], others[i], x])}),
    drawing: token => element("div", {}, element("div", {class: "token-strip"}, tokenSpans(labels, t => {
      const x = differences[t - 1], text = `${t} ${visible(labels[t])}: ${x === undefined ? "not compared" : `${signed(x)} nats`}`;
      return {class: t === token ? "token selected" : "token", title: text, pointerenter: () => readout.textContent = text,
        style: onColor(x === undefined ? [255, 255, 255] : colorOf("signed", x / most))};
    })), element("div", {class: "color-key"}, key), readout),
  };
}

// The entropy of each row of the selected head, with and without 1/sqrt(D), and the sums of its rows.
async function entropyPictures(context) {
  const {labels, layer, head, config, token} = context, T = labels.length, D = config.n_embd / config.n_head;
  const answers = await Promise.all([1, 0].map(scale => context.ask("head", {layer, head, scale: Boolean(scale)})));
  const [divided, plain] = answers.map(({tensors: {weights}}) => labels.map((_, t) => rowOf(weights, t)));
  const sumOf = row => row.reduce((sum, w) => sum + w, 0), entropy = row => entropyOf(Array.from(row, w => w / sumOf(row)));
  const names = ["divided by √D", "not divided", "all tokens alike"], colors = ["#1f5fbf", "#c2410c", "#8a94a3"];
  const curves = [divided.map(entropy), plain.map(entropy), labels.map((_, t) => Math.log(state.mask === "before" ? t + 1 : T))];
  const chart = (id, title, names, curves, options, note) => {
    const lines = names.map((name, i) => ({name, color: colors[i], points: curves[i].map((y, t) => [t, y])}));
    const table = () => ({columns: ["query", "token", ...names], rows: labels.map((label, t) => [t, label, ...curves.map(curve => curve[t])])});
    return picture(id, title, table, element("div", {}, names.length > 1 && legend(lines), scrolling(lineChart(lines,
      {width: roomFor(620), from: 0, xTitle: "query (position)", mark: token, click: t => change({token: t}), ...options}))), note);
  };
  return [headPicker(context),
    chart("row-entropies", `Entropy of each row, layer ${layer}, head ${head}`, names, curves, {yTitle: "nats"},
      `Without the division, scores are √${D} times as large: the softmax gives most weight to few tokens (low entropy), and `
      + "its gradient, w (1 − w), is nearly 0 for weights near 0 and 1. This is why Vaswani et al. divide."),
    state.mask === "after" && chart("row-sums", "Sum of the weights of each row", ["sum"],
      [(state.scale ? divided : plain).map(sumOf)], {to: 1},
      "The softmax shared the weight among all tokens; what the future had is lost. With −∞ before the softmax, each row sums to 1."),
  ].filter(Boolean);
}

// --- compare ---------------------------------------------------------------------------------------------------------

const COMPARED = 20; // next tokens

defineView({
  id: "compare", title: "Compare two", offered: isComparable,
  about: "Two models, or two checkpoints of a run, on the same text: which tokens does one predict better? A difference is the "
    + "first one's loss minus the second one's.",
  async draw(box, context) {
    const {labels, token, model, overview, other} = context, {checkpoints, config, step} = other.model;
    const first = described.models.length === 2 ? model.name : `step ${grouped(state.step < 0 ? model.step : state.step)}`;
    const losses = [overview, other.overview].map(({tensors}) => tensors.loss.data), n = losses[1].length;
    if (checkpoints.length > 1) {
      box.append(controls(slider("second:", {
        min: 0, max: checkpoints.length - 1, value: checkpoints.indexOf(other.step < 0 ? step : other.step), "data-testid": "other-step",
        read: i => `step ${grouped(checkpoints[i])}`, change: event => change({other_step: checkpoints[event.target.value]}),
      })));
    }
    if (n) box.append(meansPicture());
    const places = [[context, context], [other, {
      layer: Math.min(context.layer, config.n_layer - 1), head: Math.min(context.head, config.n_head - 1),
    }]];
    if (token < other.ids.length) box.append(await distributionPicture());
    box.append(headPicker(context), shadeControls(),
      element("div", {class: "row"}, await Promise.all(["first", "second"].map((name, i) => headPicture(name, ...places[i])))));

    function meansPicture() {
      const {differences, table, drawing} = differencesOf(labels, "second", losses[1], "first", losses[0].subarray(0, n));
      const difference = mean(differences), means = [mean(losses[0].subarray(0, n)), mean(losses[1])];
      const error = Math.sqrt(differences.reduce((sum, x) => sum + (x - difference) ** 2, 0) / (n - 1) / n);
      return element("div", {}, picture("compare-means",
        `Difference of the mean losses: ${signed(difference)} ± ${short(error)} nats per token`,
        () => ({columns: ["first", "second", "difference", "standard error", "tokens"], rows: [[...means, difference, error, n]]}),
        element("div"), `First: ${first}, ${short(means[0])} nats. Second: ${other.name}, ${short(means[1])} nats. ±: the standard `
        + `error over ${n} tokens, paired; these are not independent, so the true error is larger.`),
      picture("compare-strip", "Each token's difference", table, drawing(token),
        `Dark: the first predicted it better. Light: the second did.${labels.length > n + 1 ? " White: beyond its context." : ""}`));
    }

    async function distributionPicture() {
      const answers = await Promise.all([context, other].map(side => side.ask("logits", {token})));
      const [p, q] = answers.map(({tensors: {logits}}) => softmax(logits.data.subarray(0, model.vocab_size)));
      const divergence = p.reduce((sum, x, i) => x > 0 ? sum + x * Math.log(x / q[i]) : sum, 0);
      const rows = Array.from(p, (x, id) => [id, pieces[id], x, q[id], x - q[id]]);
      rows.sort((a, b) => Math.max(b[2], b[3]) - Math.max(a[2], a[3]));
      const columns = ["id", "token", "first", "second", "difference"];
      return picture("compare-distribution", `The next token after ${token} ${visible(labels[token])}`, () => ({columns, rows}),
        tokenTable({columns, rows: rows.slice(0, COMPARED)}, {selected: i => rows[i][0] === context.ids[token + 1]}),
        `p: first, q: second. Σ p ln(p / q) = ${short(divergence)} nats.`);
    }

    async function headPicture(name, side, {layer, head}) {
      const {tensors: {weights}} = await side.ask("head", {layer, head}), own = labels.slice(0, weights.shape[0]);
      return picture(`compare-head-${name}`, `${name}: layer ${layer}, head ${head}`, () => matrixTable("query \\ key", own, own, weights),
        heatMap(shaded(weights), {
          cell: clamp(Math.floor(400 / own.length), 1, 22), chosen: [token, null], click: t => change({token: t}),
          read: (i, j) => `${i} ${visible(own[i])} → ${j} ${visible(own[j])}: ${short(weights.data[i * own.length + j])}`,
        }));
    }
  },
});
