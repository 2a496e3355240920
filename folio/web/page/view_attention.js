// Views of attention: the flow of information from earlier tokens.

// --- choosing a layer and a head ---

function layerPicker({config, layer}, ...others) {
  const choose = l => change({layer: Number(l)});
  return controls(select("layer", range(config.n_layer), layer, choose, {name: "layer"}), others);
}

// Controls for the layer, and for the head with thumbnails.
function headPicker(context) {
  const {config, layer, head, overview} = context;
  return layerPicker(context, range(config.n_head).map(h => element("button", {
    testid: `head-${layer}-${h}`, name: "head", class: h === head && "chosen", "aria-pressed": String(h === head),
    click: () => change({head: h}),
  }, thumbnail(overview.tensors.thumbnails, layer, h), element("br"), `head ${h}`)));
}

// A thumbnail of a head's attention weights, at most 64 x 64 cells. Rows are queries.
function thumbnail({shape: [, heads, n], data}, layer, head) {
  const weights = rowOf({shape: [0, n * n], data}, layer * heads + head);
  const canvas = imageOf(weights, n, n, "sequential", x => x / 255);
  Object.assign(canvas.style, {width: "40px", height: "40px"});
  return canvas;
}

// Controls for the colors of attention weights. Often, the large weight of the first token hides the others.
function shadeControls() {
  const shades = ["linear", ["sqrt", "square root"], ["row", "relative to the row's maximum"]];
  return controls(select("colors:", shades, state.shade, shade => change({shade})),
    checkbox("hide_first", "hide the first token"));
}

// The weights scaled for colors, from 0 to 1: {shape: [T, T], data}.
function shaded({shape: [T, S], data}) {
  const result = new Float32Array(data);
  for (let i = 0; i < T; i++) {
    const row = result.subarray(i * S, (i + 1) * S);
    if (state.hide_first) row[0] = NaN;
    const max = state.shade === "row" ? maxAbs(row) : 1;
    for (let j = 0; j < S; j++) row[j] = state.shade === "sqrt" ? Math.sqrt(row[j]) : row[j] / max;
  }
  return {shape: [T, S], data: result};
}

function shadeBar() {
  return colorBar("sequential", 1, state.shade === "row" && ["0", "the row's maximum"]);
}

function dot(x, y) {
  return x.reduce((sum, value, i) => sum + value * y[i], 0);
}

// --- attention of a token ---

defineView({
  id: "looking-back", title: "What a token attends to",
  about: "Attention moves information from earlier tokens to later ones. Point at a token to see its attention "
    + "weights: tokens with a stronger color have larger weights in this head.",
  async draw(box, context) {
    const {labels, names, token, layer, head} = context;
    const shownHeads = range(context.config.n_head).filter(h => state.all_heads || h === head);
    const matrices = (await Promise.all(shownHeads.map(h => context.ask("head", {layer, head: h}))))
      .map(({tensors}) => tensors.weights);
    const weights = matrices[shownHeads.indexOf(head)], shades = shaded(weights);
    const readout = readoutLine({testid: "looking-back-readout"}), arcs = scrolling();
    const text = tokenStrip(labels, token, t => ({testid: `token-${t}`, pointerenter: () => show(t)}));

    function show(query) {
      const row = rowOf(weights, query), colors = rowOf(shades, query);
      [...text.children].forEach((span, t) => {
        Object.assign(span.style, onColor("sequential", colors[t]));
        span.classList.toggle("selected", t === query);
      });
      const top = topIndices(row, 5).filter(t => row[t] > MIN_WEIGHT);
      readout.textContent = `${names[query]} attends to  ` + top.map(t => `${names[t]} ${percent(row[t])}`).join("   ");
      const title = `Arcs from token ${tokenAt(context, query)}`;
      arcs.replaceChildren(withTooltipKeys(drawArcs(context, query, headsFor(query)), title));
      arcsPicture.querySelector("h3").textContent = title;
    }

    const headsFor = query => arcHeads(context, h => rowOf(matrices[shownHeads.indexOf(h)], query));
    const heads = headsFor(token), arcsPicture = picture("arcs", "", () => ({
      columns: ["key", "token", ...heads.map(({name}) => name)],
      rows: labels.map((label, t) => [t, label, ...heads.map(({weights}) => weights[t])]),
    }), div("", controls(checkbox("all_heads", "arcs of all heads")), arcs));
    show(token);
    text.addEventListener("pointerleave", () => show(token));
    box.append(headPicker(context), shadeControls(),
      picture("looking-back", `Layer ${layer}, head ${head}`,
        () => matrixTable(["query", names], ["key", names], weights), div("", text, shadeBar(), readout)),
      arcsPicture);
    requestAnimationFrame(() => arcs.scrollLeft = arcs.scrollWidth * (token + 1) / labels.length - arcs.clientWidth
      + 60);
  },
}, {all_heads: 0});

// The heads whose arcs are drawn: {name, weights, color}.
function arcHeads({config: {n_head}, head}, weightsOf) {
  return range(n_head).filter(h => state.all_heads || h === head).map(h => ({
    name: `head ${h}`, weights: weightsOf(h), color: state.all_heads ? LINE_COLORS[h % LINE_COLORS.length] : BLUE,
  }));
}

const MIN_WEIGHT = 0.01; // smaller weights have no arc

// An arc whose width shows an attention weight. label: the key.
function weightArc(d, weight, {name, color}, label) {
  return weight > MIN_WEIGHT && svg("path", {
    d, fill: "none", stroke: color, "stroke-width": 1 + 3 * weight, opacity: 0.2 + 0.8 * weight,
  }, svg("title", {}, `${name}, ${label}: ${percent(weight)}`));
}

// A lane per head, with arcs from the query to the tokens that it attends to. heads: {name, weights, color}.
function drawArcs({labels, names}, query, heads) {
  let x = heads.length > 1 ? 64 : 8;
  const left = x, centers = labels.map(label => {
    const width = 8 * [...visible(label)].length + 6;
    x += width;
    return x - width / 2;
  });
  const distances = centers.map(center => Math.abs(centers[query] - center));
  const widest = Math.max(...distances.filter((_, t) => heads.some(({weights}) => weights[t] > MIN_WEIGHT)));
  const rise = clamp(widest / 2, 14, heads.length > 1 ? 44 : 150), lane = rise + 14;
  return svg("svg", {width: x + 8, height: heads.length * lane + 22}, heads.map(({weights, ...head}, h) => {
    const base = (h + 1) * lane - 2;
    return [heads.length > 1 && softText(left - 10, base - 2, head.name, "end"),
      svg("line", {x1: left, x2: x, y1: base, y2: base, stroke: PALE}),
      centers.map((center, t) => {
        const radius = distances[t] / 2, [end, start] = [center, centers[query]].sort((a, b) => a - b);
        return weightArc(t === query ? `M${center - 5} ${base} a5 7 0 1 1 10 0`
          : `M${start} ${base} A${radius} ${Math.min(radius, rise)} 0 0 0 ${end} ${base}`, weights[t], head, names[t]);
      })];
  }), centers.map((center, t) => svg("text", {
    x: center, y: heads.length * lane + 15, "text-anchor": "middle", "font-weight": t === query && "bold",
  }, visible(labels[t]))));
}

// --- one row ---

defineView({
  id: "attention-row", title: "One row in numbers",
  about: "The attention weights of one token: products of its query with all keys, divided by √D; the mask, which "
    + "removes the future; and the softmax, exp(score) / Σ exp(score).",
  async draw(box, context) {
    const {labels, token, layer, head, config} = context, D = config.n_embd / config.n_head;
    const {tensors: {q, k, bias, weights: matrix}} = await context.ask("head", {layer, head});
    const scale = state.scale ? Math.sqrt(D) : 1, query = rowOf(q, token), weights = rowOf(matrix, token);
    const rows = labels.map((label, j) => {
      const product = dot(query, rowOf(k, j)), score = product / scale, added = bias ? [rowOf(bias, token)[j]] : [];
      const masked = isHidden(context, token, j) && state.mask === "before" ? -Infinity : score + sumOf(added);
      return [j, label, product, score, ...added, masked];
    });
    const max = Math.max(...rows.map(row => row.at(-1)));
    for (const row of rows) row.push(Math.exp(row.at(-1) - max), weights[row[0]]);
    const columns = ["key", "token", "q · k", `q · k / ${short(scale)}`, ...bias ? ["+ position bias"] : [], "masked",
      "exp(score − max)", "weight"];
    box.append(headPicker(context), tablePicture("attention-row",
      `Token ${tokenAt(context, token)}, layer ${layer}, head ${head}`, columns, rows, {
        selected: j => j === token, click: selectToken, barsFrom: columns.indexOf("q · k") + 1,
        note: `The weights sum to ${sumOf(weights).toFixed(6)}. q and k have D = ${D} numbers each`
          + (config.position === "rotary" ? ", rotated by their positions." : "."),
      }));
  },
});

// --- the table ---

const MIN_LABELED_CELL = 11, MIN_NUMBER_CELL = 25; // width in pixels

defineView({
  id: "attention-table", title: "Scores, mask, softmax",
  about: "Attention of all tokens. Rows are queries, columns are keys. The mask hides the future: each token attends "
    + "only to itself and to earlier tokens. The softmax turns each row into weights.",
  async draw(box, context) {
    const {names, labels, token, layer, head} = context, T = names.length;
    const {tensors: {scores, bias, weights}} = await context.ask("head", {layer, head});
    const biased = bias ? scores.data.map((x, i) => x + bias.data[i]) : scores.data, max = maxAbs(biased);
    const masked = biased.map((x, i) =>
      isHidden(context, Math.floor(i / T), i % T) && state.mask === "before" ? -Infinity : x);
    const total = fitWidth(1800), room = (total < 760 ? total : total / 3 - 20) - LABEL_WIDTH;
    const cell = clamp(Math.floor(room / T), 1, 44), numbers = cell >= MIN_NUMBER_CELL;
    const map = (id, title, matrix, options) => matrixPicture(id, title, matrix, ["query", names], ["key", names], {
      cell, labels: cell >= MIN_LABELED_CELL && [names, labels.map(visible)],
      decimals: numbers ? cell < 40 ? 1 : 2 : undefined, click: selectToken, selected: [token, null], ...options,
    });
    const scale = {scale: "signed", max};
    box.append(headPicker(context), shadeControls(), div("row",
      map("scores", state.scale ? "Scores: q kᵀ / √D" : "Scores: q kᵀ", scores, scale),
      map("masked", bias ? "+ position bias, masked" : "Masked", {shape: scores.shape, data: masked}, scale),
      map("weights", "Softmax: weights", weights, {
        drawn: numbers ? weights : shaded(weights), bar: numbers ? undefined : shadeBar(),
      })));
  },
});
