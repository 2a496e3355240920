// Views of attention: which earlier tokens a token takes information from.

// --- choosing a layer and a head ---

function layerPicker({config, layer}, ...others) {
  return controls(select("layer", upTo(config.n_layer), layer, l => change({layer: Number(l)})), others);
}

// The layers, and the heads of the selected one in small.
function headPicker(context) {
  const {config, layer, head, overview} = context;
  return layerPicker(context, upTo(config.n_head).map(h => element("button", {
    testid: `head-${layer}-${h}`, class: h === head && "chosen", "aria-pressed": String(h === head),
    click: () => change({head: h}),
  }, thumbnail(overview.tensors.thumbnails, layer, h), element("br"), `head ${h}`)));
}

// A head's attention weights over the text, at most 32 x 32 cells. Rows are queries.
function thumbnail({shape: [, heads, n], data}, layer, head) {
  const weights = rowOf({shape: [0, n * n], data}, layer * heads + head);
  const canvas = imageOf(weights, n, n, "sequential", x => x / 255);
  Object.assign(canvas.style, {width: "40px", height: "40px"});
  return canvas;
}

// How attention weights become colors. Often the first token has most of the weight, and hides the others.
function shadeControls() {
  const shades = ["linear", ["sqrt", "square root"], ["row", "relative to the row's largest"]];
  return controls(select("colors:", shades, state.shade, shade => change({shade})),
    checkbox("hide_first", "hide the first token"));
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

// --- looking back ---

defineView({
  id: "looking-back", title: "What a token looks at",
  about: "Attention moves information from earlier tokens to later ones. Hover over a token: the darker another one, "
    + "the larger its weight in the sum of values that the token receives from this head.",
  async draw(box, context) {
    const {labels, names, token, layer, head} = context, {all_heads} = state;
    const {tensors: {weights}} = await context.ask("head", {layer, head});
    const ofToken = all_heads && (await context.ask("layer", {layer, token})).tensors.weights;
    const heads = arcHeads(context, h => all_heads ? rowOf(ofToken, h) : rowOf(weights, token));
    const shades = shaded(weights);
    const readout = element("div", {class: "readout", testid: "looking-back-readout"});
    const text = tokenStrip(labels, token, t => ({testid: `token-${t}`, pointerenter: () => show(t)}));
    const arcs = scrolling(drawArcs(context, heads));

    function show(query) {
      const row = rowOf(weights, query), colors = rowOf(shades, query);
      [...text.children].forEach((span, t) => {
        Object.assign(span.style, onColor("sequential", colors[t]));
        span.classList.toggle("selected", t === query);
      });
      const top = topIndices(row, 5).filter(t => row[t] > LEAST_WEIGHT);
      readout.textContent = `${names[query]} looks at  ` + top.map(t => `${names[t]} ${percent(row[t])}`).join("   ");
    }

    show(token);
    text.addEventListener("pointerleave", () => show(token));
    box.append(headPicker(context), shadeControls(),
      picture("looking-back", `Layer ${layer}, head ${head}`,
        () => matrixTable(["query", names], ["key", names], weights), div("", text, readout)),
      picture("arcs", `Arcs from token ${names[token]}`, () => ({
        columns: ["key", "token", ...heads.map(({name}) => name)],
        rows: labels.map((label, t) => [t, label, ...heads.map(({weights}) => weights[t])]),
      }), div("", controls(checkbox("all_heads", "arcs of all heads")),
        legend(heads), arcs)));
    requestAnimationFrame(() => arcs.scrollLeft = arcs.scrollWidth * (token + 1) / labels.length - arcs.clientWidth
      + 60);
  },
}, {all_heads: 0});

// The heads whose arcs are drawn: {name, weights, color}.
function arcHeads({config: {n_head}, head}, weightsOf) {
  return upTo(n_head).filter(h => state.all_heads || h === head).map(h => ({
    name: `head ${h}`, weights: weightsOf(h), color: state.all_heads ? LINE_COLORS[h % LINE_COLORS.length] : BLUE,
  }));
}

const LEAST_WEIGHT = 0.01; // that has an arc

// An arc along a path, as wide as a weight of a head. to: what has the weight.
function weightArc(d, weight, {name, color}, to) {
  return weight > LEAST_WEIGHT && svg("path", {
    d, fill: "none", stroke: color, "stroke-width": 0.5 + 7 * weight, opacity: 0.35 + 0.6 * weight,
  }, svg("title", {}, `${name}, ${to}: ${percent(weight)}`));
}

// The tokens on a line, with an arc from a token to each one that a head looks at; its width is the weight. heads:
// {name, weights, color}.
function drawArcs({labels, names, token: query}, heads) {
  let x = 8;
  const places = labels.map(label => {
    const width = 8 * [...visible(label)].length + 6;
    x += width;
    return x - width / 2;
  });
  const distances = places.map(place => Math.abs(places[query] - place));
  const reached = distances.filter((_, t) => heads.some(({weights}) => weights[t] > LEAST_WEIGHT));
  const height = clamp(Math.max(...reached) / 2, 20, 170), base = height + 8;
  return svg("svg", {width: x + 8, height: base + 24, role: "img"},
    heads.map(({weights, ...head}) => places.map((place, t) => {
      const rise = base - 1.3 * clamp(distances[t] / 2, 6, height);
      return weightArc(t === query ? `M${place - 6} ${base} a6 9 0 1 1 12 0`
        : `M${place} ${base} C${place} ${rise} ${places[query]} ${rise} ${places[query]} ${base}`,
      weights[t], head, names[t]);
    })),
    places.map((place, t) => svg("text", {
      x: place, y: base + 15, "text-anchor": "middle", "font-weight": t === query && "bold",
    }, visible(labels[t]))));
}

// --- one row ---

defineView({
  id: "attention-row", title: "One row in numbers",
  about: "How one head computes what a token looks at: the product of its query with every key, divided by √D, without "
    + "the future, and turned into weights by the softmax, exp(score) / Σ exp(score).",
  async draw(box, context) {
    const {labels, names, token, layer, head, config} = context, D = config.n_embd / config.n_head;
    const {tensors: {q, k, bias, weights: matrix}} = await context.ask("head", {layer, head});
    const scale = state.scale ? Math.sqrt(D) : 1, query = rowOf(q, token), weights = rowOf(matrix, token);
    const rows = labels.map((label, j) => {
      const product = dot(query, rowOf(k, j)), score = product / scale, added = bias ? [rowOf(bias, token)[j]] : [];
      const masked = j > token && state.mask === "before" ? -Infinity : score + sumOf(added);
      return [j, label, product, score, ...added, masked];
    });
    const most = Math.max(...rows.map(row => row.at(-1)));
    for (const row of rows) row.push(Math.exp(row.at(-1) - most), weights[row[0]]);
    const columns = ["key", "token", "q · k", `q · k / ${short(scale)}`, ...bias ? ["+ position bias"] : [], "masked",
      "exp(score − largest)", "weight"];
    box.append(headPicker(context), tablePicture("attention-row",
      `Token ${names[token]}, layer ${layer}, head ${head}`, columns, rows, {
        selected: j => j === token, click: selectToken,
        note: `The weights sum to ${sumOf(weights).toFixed(6)}. q and k have D = ${D} numbers each`
          + (config.position === "rotary" ? ", rotated by their positions." : "."),
      }));
  },
});

// --- the table ---

const NUMBERS_UP_TO = 24; // tokens whose matrices are written in numbers

defineView({
  id: "attention-table", title: "Scores, mask, softmax",
  about: "The same for all tokens at once. A row is a query, a column a key. The mask hides the future: each token may "
    + "look only at itself and at earlier ones. The softmax turns each row into weights.",
  async draw(box, context) {
    const {names, token, layer, head} = context, T = names.length, numbers = T <= NUMBERS_UP_TO;
    const {tensors: {scores, bias, weights}} = await context.ask("head", {layer, head});
    const biased = bias ? scores.data.map((x, i) => x + bias.data[i]) : scores.data, most = largest(biased);
    const masked = biased.map((x, i) => i % T > Math.floor(i / T) && state.mask === "before" ? -Infinity : x);
    const third = roomFor(1800) / 3 - 20, cell = numbers || third < 250 ? null : clamp(Math.floor(third / T), 1, 22);
    const map = (id, title, matrix, options) => matrixPicture(id, title, matrix, ["query", names], ["key", names],
      {cell, numbers, click: selectToken, chosen: [token, null], ...options});
    const scale = {scale: "signed", most};
    box.append(headPicker(context), shadeControls(), div("row",
      map("scores", state.scale ? "Scores: q kᵀ / √D" : "Scores: q kᵀ", scores, scale),
      map("masked", bias ? "+ position bias, masked" : "Masked", {shape: scores.shape, data: masked}, scale),
      map("weights", "Softmax: the weights", weights, {drawn: numbers ? weights : shaded(weights)})));
  },
});
