"use strict";
// Views of attention: which earlier tokens a token takes information from.

// --- choosing a layer and a head -------------------------------------------------------------------------------------

// The heads of the selected layer in small; a click selects one. heads: false for views of a whole layer.
function headPicker({config, layer, head, overview}, {heads: offered = true} = {}) {
  const layers = element("select", {"aria-label": "Layer", change: event => change({layer: Number(event.target.value)})},
    Array.from({length: config.n_layer}, (_, l) => element("option", {value: l, selected: l === layer}, `layer ${l}`)));
  const heads = Array.from({length: offered ? config.n_head : 0}, (_, h) => element("button", {
    "data-testid": `head-${layer}-${h}`, title: `layer ${layer}, head ${h}`, class: h === head ? "chosen" : null,
    "aria-pressed": String(h === head), click: () => change({head: h}),
  }, thumbnail(overview.tensors.thumbnails, layer, h, 40), element("br"), `head ${h}`));
  return element("div", {class: "controls"}, layers, ...heads);
}

// A head's attention weights over the text, at most 32 x 32 cells. Rows are queries.
function thumbnail({shape: [, heads, n], data}, layer, head, size) {
  const canvas = element("canvas", {width: n, height: n, style: {width: `${size}px`, height: `${size}px`, imageRendering: "pixelated"}});
  const context = canvas.getContext("2d"), image = context.createImageData(n, n);
  const first = (layer * heads + head) * n * n;
  for (let k = 0; k < n * n; k++) image.data.set([...colorOf("sequential", data[first + k] / 255), 255], 4 * k);
  context.putImageData(image, 0, 0);
  return canvas;
}

// How attention weights become colors. Often the first token has most of the weight, and hides the others.
const SHADES = {linear: "linear", sqrt: "square root", row: "relative to the row's largest"};

function shadeControls() {
  return element("div", {class: "controls"},
    element("label", {}, "colors: ", element("select", {change: event => change({shade: event.target.value})},
      Object.entries(SHADES).map(([name, title]) => element("option", {value: name, selected: state.shade === name}, title)))),
    element("label", {}, element("input", {
      type: "checkbox", checked: Boolean(state.hide_first), change: event => change({hide_first: Number(event.target.checked)}),
    }), " hide the first token"));
}

// The weights as they are colored, from 0 to 1: {shape: [T, T], data}.
function shaded({shape: [T, S], data}) {
  const result = new Float32Array(data);
  for (let i = 0; i < T; i++) {
    const row = result.subarray(i * S, (i + 1) * S);
    if (state.hide_first) row[0] = NaN;
    const most = state.shade === "row" ? largest(row) : 1;
    for (let j = 0; j < S; j++) row[j] = state.shade === "sqrt" ? Math.sqrt(row[j]) : row[j] / most;
  }
  return {shape: [T, S], data: result};
}

function dot(x, y) {
  return x.reduce((sum, value, i) => sum + value * y[i], 0);
}

function rowOf({shape, data}, i) {
  return data.subarray(i * shape[1], (i + 1) * shape[1]);
}

// --- looking back ----------------------------------------------------------------------------------------------------

defineView({
  id: "looking-back", title: "What a token looks at",
  about: "Attention moves information from earlier tokens to later ones. Hover over a token: the darker another one is, the "
    + "larger its weight in the sum of values that the token receives from this head.",
  async draw(box, context) {
    const {ids, labels, token, layer, head} = context;
    const {tensors: {weights}} = await context.ask("head", {layer, head});
    const shades = shaded(weights), T = ids.length;
    const readout = element("div", {class: "readout", "data-testid": "looking-back-readout"});
    const spans = labels.map((label, t) => element("span", {
      class: "token", "data-testid": `token-${t}`, pointerenter: () => show(t), click: () => change({token: t}),
    }, label === "\n" ? "⏎\n" : visible(label).replaceAll("␣", " ")));
    const text = element("div", {style: {font: "15px/1.8 monospace", whiteSpace: "pre-wrap", overflowWrap: "anywhere"},
      pointerleave: () => show(token)}, spans);
    const arcs = element("div", {class: "scroll"});
    let shown = -1;

    function show(query) {
      if (query === shown) return;
      const row = rowOf(weights, query), colors = rowOf(shades, query);
      for (let t = 0; t < T; t++) {
        const color = Number.isFinite(colors[t]) ? colorOf("sequential", colors[t]) : [255, 255, 255];
        spans[t].style.background = css(color);
        spans[t].style.color = textColorOn(color);
      }
      spans[shown]?.classList.remove("selected");
      spans[query].classList.add("selected");
      shown = query;
      const top = Array.from(row.keys()).sort((a, b) => row[b] - row[a]).slice(0, 5).filter(t => row[t] > 0.005);
      readout.textContent = `${query} ${visible(labels[query])} looks at  `
        + top.map(t => `${t} ${visible(labels[t])} ${percent(row[t])}`).join("   ");
    }

    show(token);
    arcs.append(drawArcs(labels, token, rowOf(weights, token)));
    box.append(headPicker(context), shadeControls(),
      picture("looking-back", `Layer ${layer}, head ${head}`,
        () => matrixTable("query \\ key", labels, labels, weights), element("div", {}, text, readout)),
      picture("arcs", `Arcs from token ${token}`,
        () => ({columns: ["key", "token", "weight"], rows: Array.from(rowOf(weights, token), (w, t) => [t, labels[t], w])}), arcs));
    requestAnimationFrame(() => arcs.scrollLeft = arcs.scrollWidth * (token + 1) / T - arcs.clientWidth + 60);
  },
});

// The tokens on a line, with an arc from a token to each one that it looks at; its width is the weight.
function drawArcs(labels, query, weights) {
  let x = 8;
  const places = labels.map(label => {
    const width = 8 * Math.max(1, [...visible(label)].length) + 6;
    x += width;
    return x - width / 2;
  });
  const farthest = Math.max(...places.map((place, t) => weights[t] > 0.01 ? Math.abs(places[query] - place) : 0));
  const height = clamp(farthest / 2, 20, 170), base = height + 8;
  return svg("svg", {width: x + 8, height: base + 24, role: "img"},
    places.map((place, t) => {
      if (weights[t] <= 0.01) return null;
      const rise = clamp(Math.abs(places[query] - place) / 2, 6, height);
      const path = t === query ? `M${place - 4} ${base} a4 6 0 1 1 8 0`
        : `M${place} ${base} C${place} ${base - rise * 1.3} ${places[query]} ${base - rise * 1.3} ${places[query]} ${base}`;
      return svg("path", {d: path, fill: "none", stroke: "#1f5fbf", "stroke-width": 0.5 + 7 * weights[t], opacity: 0.35 + 0.6 * weights[t]},
        svg("title", {}, `${t} ${visible(labels[t])}: ${percent(weights[t])}`));
    }),
    places.map((place, t) => svg("text", {x: place, y: base + 15, "text-anchor": "middle", "font-weight": t === query ? "bold" : null},
      visible(labels[t]))));
}

// --- one row ---------------------------------------------------------------------------------------------------------

defineView({
  id: "attention-row", title: "One row in numbers",
  about: "How one head computes what one token looks at: the product of its query with every key, divided by √D, without the "
    + "future, and turned into weights that sum to 1 by the softmax, exp(score) / Σ exp(score).",
  async draw(box, context) {
    const {ids, labels, token, layer, head, config} = context;
    const {tensors: {q, k, bias, weights}} = await context.ask("head", {layer, head});
    const scale = state.scale ? Math.sqrt(config.n_embd / config.n_head) : 1, query = rowOf(q, token);
    const rows = ids.map((_, j) => {
      const product = dot(query, rowOf(k, j)), score = product / scale, added = bias ? rowOf(bias, token)[j] : 0;
      const masked = j > token && state.mask === "before" ? -Infinity : score + added;
      return {j, product, score, added, masked, weight: rowOf(weights, token)[j]};
    });
    const most = Math.max(...rows.map(row => row.masked));
    const columns = [{title: "key"}, {title: "token", text: true}, {title: "q · k"}, {title: `q · k / ${short(scale)}`},
      ...(bias ? [{title: "+ position bias"}] : []), {title: "masked"}, {title: "exp(score − largest)"}, {title: "weight"}];
    const numbers = row => [row.j, labels[row.j], row.product, row.score, ...(bias ? [row.added] : []), row.masked,
      Math.exp(row.masked - most), row.weight];
    const shown = rows.map(row => numbers(row).with(1, visible(labels[row.j])));
    const sum = rows.reduce((total, row) => total + row.weight, 0);
    box.append(headPicker(context), picture("attention-row",
      `Token ${token} ${visible(labels[token])}, layer ${layer}, head ${head}`,
      () => ({columns: columns.map(column => column.title), rows: rows.map(numbers)}),
      element("div", {class: "row"}, numberTable(columns, shown, {selected: j => j === token, click: j => change({token: j})}),
        bars(rows.map(row => ({label: `${row.j} ${visible(labels[row.j])}`, value: row.weight, text: percent(row.weight), dim: row.j > token})),
          Math.max(...rows.map(row => row.weight)))),
      `The weights sum to ${sum.toFixed(6)}. The query and the keys have D = ${config.n_embd / config.n_head} numbers each`
        + (config.position === "rotary" ? ", rotated by their positions." : ".")));
  },
});

// --- the table -------------------------------------------------------------------------------------------------------

const NUMBERS_UP_TO = 24; // tokens whose matrices are written in numbers

defineView({
  id: "attention-table", title: "Scores, mask, softmax",
  about: "The same for all tokens at once. A row is a query, a column a key. The mask hides the future: each token may look "
    + "only at itself and at earlier ones. The softmax turns each row into weights.",
  async draw(box, context) {
    const {ids, labels, token, layer, head} = context;
    const {tensors: {scores, bias, weights}} = await context.ask("head", {layer, head});
    const T = ids.length, numbers = T <= NUMBERS_UP_TO;
    const biased = bias ? scores.data.map((x, i) => x + bias.data[i]) : scores.data;
    const masked = {shape: scores.shape, data: biased.map((x, i) => i % T > Math.floor(i / T) && state.mask === "before" ? -Infinity : x)};
    const most = largest(biased), shades = shaded(weights);
    const read = (i, j, x) => `${i} ${visible(labels[i])} → ${j} ${visible(labels[j])}: ${short(x)}`;
    const common = {numbers, read, click: i => change({token: i}), chosen: [token, null]};
    const signed = {...common, scale: "signed", value: x => x / most};
    const map = (id, title, matrix, drawn, options) =>
      picture(id, title, () => matrixTable("query \\ key", labels, labels, matrix), heatMap(drawn, options));
    box.append(headPicker(context), shadeControls(), element("div", {class: "row"},
      map("scores", state.scale ? "Scores: q kᵀ / √D" : "Scores: q kᵀ", scores, scores, signed),
      map("masked", bias ? "+ position bias, masked" : "Masked", masked, masked, signed),
      map("weights", "Softmax: the weights", weights, numbers ? weights : shades,
        {...common, value: x => x, read: (i, j) => read(i, j, weights.data[i * T + j])})));
  },
});
