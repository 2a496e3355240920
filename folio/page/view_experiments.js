"use strict";
// Views of experiments: all heads at once, what changes when a part is switched off, and two models compared.

// --- all heads ---

const HEAD_SCORES = { // as in folio/trace.py
  previous: "the weight of the previous token: 1 for a previous-token head",
  first: "the weight of the first token, where heads often look that have nothing to find",
  itself: "the weight of the token itself",
  prefix: "the weight of what followed the token before, on random tokens that repeat: high for an induction head",
  entropy: "the entropy of the weights in nats: 0 if a token looks at one token, ln n if at n alike",
  distance: "how many tokens back a token looks, weighted",
};
const TABLE_ROWS = 200; // heads in the table; the CSV has all

defineView({
  id: "all-heads", title: "All heads",
  about: "A row is a token that looks, a column one that is looked at; darker is more weight. Heads specialize: sort "
    + "them by what they do, and click one.",
  draw(box, {overview: {tensors}, config: {n_head}, layer, head}) {
    const names = Object.keys(HEAD_SCORES), columns = ["layer", "head", ...names], at = columns.indexOf(state.sort);
    const rows = Array.from(tensors.score_previous.data, (_, i) =>
      [Math.floor(i / n_head), i % n_head, ...names.map(name => tensors[`score_${name}`].data[i])]);
    if (at >= 2) rows.sort((a, b) => b[at] - a[at]);
    const open = ([layer, head]) => change({layer, head, view: "looking-back"});
    const isSelected = row => row[0] === layer && row[1] === head, table = () => ({columns, rows});
    box.append(
      controls("sort by", ...["layer", ...names].map(name => element("button", {
        class: name === state.sort ? "chosen" : null, "aria-pressed": String(name === state.sort),
        click: () => change({sort: name}),
      }, name))),
      picture("all-heads", `${rows.length} heads`, table, headGrid(rows, tensors.thumbnails, at, isSelected, open),
        at >= 2 && `${state.sort}: ${HEAD_SCORES[state.sort]}; the mean over the text.`),
      picture("head-scores", "Their scores", table, tokenTable({columns, rows: rows.slice(0, TABLE_ROWS)},
        {selected: i => isSelected(rows[i]), click: i => open(rows[i])})));
  },
}, {sort: "layer"});

// Thumbnails on one canvas, because a thousand canvases are slow, under a button for each. By layer, a row is a layer.
function headGrid(rows, thumbnails, at, isSelected, open) {
  const width = rows.length > 300 ? 44 : rows.length > 40 ? 70 : 102, caption = at < 2 ? 14 : 27;
  const columns = at < 2 ? thumbnails.shape[1] : Math.floor(roomFor(2000) / width);
  const size = width - 6, height = width + caption;
  const canvas = element("canvas", {width: columns * width, height: Math.ceil(rows.length / columns) * height});
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  return scrolling(element("div", {class: "head-grid"}, canvas, rows.map((row, i) => {
    const [layer, head] = row, x = i % columns * width, y = Math.floor(i / columns) * height;
    context.drawImage(thumbnail(thumbnails, layer, head), x, y, size, size);
    return element("button", {
      "data-testid": `head-${layer}-${head}`, class: isSelected(row) ? "selected" : null,
      "aria-label": `layer ${layer}, head ${head}`,
      style: {
        left: `${x}px`, top: `${y}px`, width: `${size}px`, height: `${size + caption}px`, paddingTop: `${size}px`,
      },
      click: () => open(row),
    }, `${layer}.${head}`, at >= 2 && [element("br"), row[at].toFixed(row[at] < 10 ? 2 : 0)]);
  })));
}

// --- switches ---

const MASKS = [["before", "before the softmax: −∞ (as trained)"],
  ["after", "after the softmax: 0 (rows sum to less than 1)"],
  ["off", "off: attend to the future"]];
const SELECTABLE = 300; // tokens of a vocabulary that are offered in a list

defineView({
  id: "switches", title: "Switch parts off",
  about: "What a part is for shows when it is missing. The switches act on all views until they are reset.",
  async draw(box, context) {
    const {ids, token, config, model} = context, replaced = new Map(replacements(ids));
    const original = ids.map((id, t) => replaced.get(t) ?? id), was = original[token];
    const before = await ask(question("overview", original, {...UNCHANGED, scale: true}));
    const [whole, changed] = [before, context.overview].map(({tensors}) => tensors.loss.data);
    const choose = {"data-testid": "switch-token", "aria-label": "Another token or its id"};
    const tokens = pieces.slice(0, model.vocab_size).map((piece, id) => [id, `${visible(piece)} (${id})`]);
    const rows = Array.from({length: config.n_layer}, (_, l) => element("tr", {}, element("th", {}, `layer ${l}`),
      Array.from({length: config.n_head}, (_, h) => part("heads_off", `${l}.${h}`, h, `switch-head-${l}-${h}`)),
      part("mlps_off", `${l}`, "MLP", `switch-mlp-${l}`)));
    box.append(
      controls("mask", select(MASKS, state.mask, mask => change({mask}), {"data-testid": "switch-mask"}),
        checkbox("scale", "divide scores by √D", {"data-testid": "switch-scale"})),
      controls(`replace token ${token}, ${visible(pieces[was])}, by`, tokens.length <= SELECTABLE
        ? select(tokens, ids[token], replace, choose) : element("input", {...choose, type: "text", change: event => {
          const {value} = event.target;
          replace(pieces.includes(value) ? pieces.indexOf(value) : value);
        }})),
      element("p", {}, "Click a head or an MLP to remove what it adds to the residual stream."),
      scrolling(element("table", {class: "parts", style: {marginBottom: "1rem"}}, rows)));
    if (ids.length > 1) box.append(...lossPictures());
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

    function lossPictures() {
      const a = mean(whole), b = mean(changed);
      return [
        picture("switch-losses", `Mean loss: ${short(a)} → ${short(b)}, a change of ${signed(b - a)} nats per token`,
          () => ({columns: ["as trained", "changed", "change"], rows: [[a, b, b - a]]}), element("div")),
        differencePicture("switch-differences", context, "as trained", whole, "changed", changed)];
    }
  },
});

// The tokens in the colors of the differences of two lists of losses.
function differencePicture(id, {labels, token}, name, losses, otherName, others) {
  const differences = Array.from(others, (x, i) => x - losses[i]),
    columns = ["position", "token", name, otherName, "difference"];
  const most = Math.max(largest(differences), 0.01), readout = element("div", {class: "readout"});
  const text = tokenStrip(labels, token, t => {
    const isCompared = t - 1 in differences, x = differences[t - 1];
    return {
      style: onColor(isCompared ? colorOf("signed", x / most) : [255, 255, 255]),
      pointerenter: () => readout.textContent = `${t} ${visible(labels[t])}: ${isCompared ? signed(x) : "–"}`,
    };
  });
  return picture(id, "Difference of each token's loss",
    () => ({columns, rows: differences.map((x, i) => [i + 1, labels[i + 1], losses[i], others[i], x])}),
    element("div", {}, text, readout),
    `${otherName} − ${name}: dark −${short(most)} nats, light ${short(most)}. White: not compared.`);
}

// The entropy of each row of the selected head, with and without 1/sqrt(D), and the sums of its rows.
async function entropyPictures(context) {
  const {labels, layer, head, config, token} = context, D = config.n_embd / config.n_head;
  const answers = await Promise.all([true, false].map(scale => context.ask("head", {layer, head, scale})));
  const [divided, plain] = answers.map(({tensors: {weights}}) => labels.map((_, t) => rowOf(weights, t)));
  const sumOf = row => row.reduce((sum, w) => sum + w, 0);
  const entropy = row => entropyOf(Array.from(row, w => w / sumOf(row)));
  const chart = (id, title, curves, note, options) => {
    const lines = Object.entries(curves).map(([name, values], i) =>
      ({name, color: LINE_COLORS[i], points: values.map((y, t) => [t, y])}));
    const rows = labels.map((label, t) => [t, label, ...Object.values(curves).map(values => values[t])]);
    const more = {width: roomFor(620), from: 0, xTitle: "query", mark: token, click: t => change({token: t}), ...options};
    return picture(id, title, () => ({columns: ["query", "token", ...Object.keys(curves)], rows}),
      element("div", {}, legend(lines), scrolling(lineChart(lines, more))), note);
  };
  const result = [headPicker(context), chart("row-entropies", `Entropy (nats) of the rows of head ${layer}.${head}`,
    {"divided by √D": divided.map(entropy), "not divided": plain.map(entropy)},
    `Without the division, scores are √${D} times as large: few tokens have most of the weight (low entropy), and the `
    + "gradient, w (1 − w), is nearly 0. This is why Vaswani et al. divide.")];
  if (state.mask === "after") {
    result.push(chart("row-sums", "Sum of the weights of each row", {sum: (state.scale ? divided : plain).map(sumOf)},
      "What the future had is lost. With −∞ before the softmax, each row sums to 1.", {to: 1}));
  }
  return result;
}

// --- compare ---

const COMPARED = 20; // next tokens

defineView({
  id: "compare", title: "Compare two", offered: isComparable,
  about: "Two models, or two checkpoints of a run, on the same text: which tokens does one predict better?",
  async draw(box, context) {
    const {labels, token, model, overview, other} = context, {checkpoints, config, step} = other.model;
    const first = described.models.length === 2 ? model.name
      : `step ${grouped(state.step < 0 ? model.step : state.step)}`;
    const losses = [overview, other.overview].map(({tensors}) => tensors.loss.data), n = losses[1].length;
    if (checkpoints.length > 1) {
      box.append(controls(slider("second:", {
        min: 0, max: checkpoints.length - 1, value: checkpoints.indexOf(other.step < 0 ? step : other.step),
        "data-testid": "other-step", read: i => `step ${grouped(checkpoints[i])}`,
        change: event => change({other_step: checkpoints[event.target.value]}),
      })));
    }
    if (n) box.append(...lossPictures());
    if (token < other.ids.length) box.append(await distributionPicture());
    box.append(headPicker(context), await headPicture());

    function lossPictures() {
      const a = losses[0].subarray(0, n), b = losses[1];
      const differences = a.map((x, i) => x - b[i]), difference = mean(differences);
      const error = Math.sqrt(mean(differences.map(x => (x - difference) ** 2)) / (n - 1));
      return [picture("compare-means",
        `Difference of the mean losses: ${signed(difference)} ± ${short(error)} nats per token`,
        () => ({columns: ["first", "second", "difference", "standard error"],
          rows: [[mean(a), mean(b), difference, error]]}), element("div"),
        `First: ${first}, ${short(mean(a))}. Second: ${other.name}, ${short(mean(b))}. ±: the standard error.`),
      differencePicture("compare-strip", context, "second", b, "first", a)];
    }

    async function distributionPicture() {
      const answers = await Promise.all([context, other].map(side => side.ask("logits", {token})));
      const [p, q] = answers.map(({tensors: {logits}}) => softmax(logits.data.subarray(0, model.vocab_size)));
      const rows = Array.from(p, (x, id) => [id, pieces[id], x, q[id], x - q[id]]);
      rows.sort((a, b) => Math.max(b[2], b[3]) - Math.max(a[2], a[3]));
      const columns = ["id", "token", "first", "second", "difference"];
      return picture("compare-distribution", `The next token after ${token} ${visible(labels[token])}`,
        () => ({columns, rows}),
        tokenTable({columns, rows: rows.slice(0, COMPARED)}, {selected: i => rows[i][0] === context.ids[token + 1]}));
    }

    async function headPicture() {
      const layer = Math.min(context.layer, config.n_layer - 1), head = Math.min(context.head, config.n_head - 1);
      const answers = await Promise.all([context.ask("head", {layer: context.layer, head: context.head}),
        other.ask("head", {layer, head})]);
      const [first, second] = answers.map(({tensors: {weights}}) => weights), T = n + 1, own = labels.slice(0, T);
      const data = second.data.map((w, k) => first.data[Math.floor(k / T) * labels.length + k % T] - w);
      const weights = {shape: [T, T], data};
      return picture("compare-head",
        `Attention: head ${context.layer}.${context.head} of the first − head ${layer}.${head} of the second`,
        () => matrixTable("query \\ key", own, own, weights), heatMap(weights, {
          scale: "signed", chosen: token < T && [token, null], click: t => change({token: t}),
          read: (i, j, x) => `${i} ${visible(own[i])} → ${j} ${visible(own[j])}: ${signed(x)}`,
        }), "Rows look at columns. Light: the first looks there more. Dark: the second does.");
    }
  },
});
