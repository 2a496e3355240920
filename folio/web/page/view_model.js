// Views of the architecture and the parameters.

// --- the map ---------------------------------------------------------------------------------------------------------

const MAP_BOX = {width: 134, height: 68, pitch: 92}; // in pixels; pitch: distance between rows
const MAP_COLUMNS = {embedding: 6, attentionUp: 184, attentionDown: 340, mlpUp: 504, mlpDown: 660, output: 840};
const MAP_WIDTH = 980;
const POSITION_BOXES = { // the box of the position method: column, row, title and dimensions
  learned: ["embedding", -1, "Position embedding", "T × C"],
  sinusoidal: ["embedding", -1, "Position sinusoids", "T × C"],
  rotary: ["attentionUp", 3, "Rotate by position", "H × T × D"],
  relative: ["attentionUp", 4, "+ bias by distance", "H × T × T"],
  alibi: ["attentionUp", 4, "− slope · distance", "H × T × T"],
};

// The computation as boxes: [column, row, title, dimensions as letters, view, thumbnail]. Rows count up from the
// residual stream; the position embedding is below it. thumbnail: the name of the selected token's values in valuesOf.
function boxesOf({config: {position, activation}}) {
  const added = POSITION_BOXES[position], top = added?.[0] === "attentionUp" ? 4 : 3;
  return [
    ["embedding", 2, "Tokens", "T", "tokens"],
    ["embedding", 1, "Token embedding", "T × C", "embedding", "embedding"],
    ["attentionUp", 0, "LayerNorm", "T × C", "qkv", "ln_1"],
    ["attentionUp", 1, "q, k, v = x W + b", "T × 3C", "qkv", "qkv"],
    ["attentionUp", 2, "Split into heads", "H × T × D", "head-split", "q"],
    added && [...added, "positions", "position"],
    ["attentionUp", added?.[1] === 3 ? 4 : 3, state.scale ? "Scores q kᵀ / √D" : "Scores q kᵀ", "H × T × T",
      "attention-row"],
    ["attentionDown", top, state.mask === "off" ? "Softmax, no mask" : "Mask, softmax", "H × T × T", "attention-table",
      "weights"],
    ["attentionDown", 2, "Weighted sum of v", "H × T × D", "weighted-sum", "z"],
    ["attentionDown", 1, "Merge heads", "T × C", "merge", "merged"],
    ["attentionDown", 0, "Project: W_O", "T × C", "merge", "attention"],
    ["mlpUp", 0, "LayerNorm", "T × C", "mlp", "ln_2"],
    ["mlpUp", 1, "Up", "T × 4C", "mlp", "preactivation"],
    ["mlpDown", 1, activation === "gelu_new" ? "GELU (tanh)" : "GELU", "T × 4C", "mlp", "hidden"],
    ["mlpDown", 0, "Down", "T × C", "mlp", "mlp"],
    ["output", 0, "LayerNorm", "T × C", "output"],
    ["output", 1, "Output: wteᵀ", "T × V", "output", "logits"],
    ["output", 2, "Softmax", "T × V", "output", "probabilities"],
    ["output", 3, "Sample, or loss", "T", "loop"],
  ].filter(Boolean);
}

// The values of the letters.
function sizesOf({config: {n_embd: C, n_head: H, vocab_size: V}, ids}) {
  return {T: ids.length, C, H, D: C / H, V, "3C": 3 * C, "4C": 4 * C};
}

const THUMBNAIL_TOKENS = 40; // most likely tokens in the thumbnails of the output

// The values of the selected token in the boxes: {shape: [rows, columns], data} by name.
async function valuesOf(context) {
  const {token, layer, config: {n_head, position}} = context, isAdded = POSITION_BOXES[position]?.[0] === "embedding";
  const row = ({data}, rows = 1) => ({shape: [rows, data.length / rows], data});
  const [{tensors: added}, {tensors: inner}, {tensors: {logits: {data: logits}}}] = await Promise.all([
    context.ask("token", {token}), context.ask("layer", {layer, token}), context.ask("logits", {token})]);
  const order = topIndices(logits, THUMBNAIL_TOKENS);
  const likely = values => row({data: Float32Array.from(order, id => values[id])});
  const names = ["ln_1", "qkv", "attention", "ln_2", "preactivation", "hidden", "mlp"];
  return {
    embedding: row(added.embedding), ...isAdded && {position: row(added.position)},
    ...Object.fromEntries(names.map(name => [name, row(inner[name])])),
    q: row(inner.q, n_head), z: row(inner.z, n_head), merged: row(inner.z), weights: inner.weights,
    logits: likely(logits), probabilities: likely(softmax(logits.slice())),
  };
}

function shapeOf(letters, sizes) {
  return letters.replace(/\w+/g, letter => sizes[letter]);
}

function drawMap(context, values) {
  const {config: {n_layer: L, position}, layer} = context, boxes = boxesOf(context), sizes = sizesOf(context);
  const {width, height, pitch} = MAP_BOX, rows = 1 + Math.max(...boxes.map(box => box[1])), stream = 96 + rows * pitch;
  const top = row => row < 0 ? stream + 38 : stream - height - 32 - row * pitch;
  const center = column => MAP_COLUMNS[column] + width / 2;
  const path = (d, options) => svg("path", {d, fill: "none", stroke: SOFT, "stroke-width": 1.3,
    "marker-end": "url(#arrowhead)", ...options});
  const text = (x, y, words, options) => svg("text", {x, y, class: "soft", ...options}, words);
  const linked = (view, ...children) => svg("a", {href: link({view})}, ...children);
  const frame = {x: MAP_COLUMNS.attentionUp - 18, y: 34, width: 646, height: stream - 8, rx: 10, stroke: PALE};

  const thumbnail = (name, x, y) => {
    const {shape: [rows, columns], data} = values[name], max = maxAbs(data);
    const scale = ["weights", "probabilities"].includes(name) ? "sequential" : "signed";
    const href = imageOf(data, rows, columns, scale, value => value / max).toDataURL();
    return svg("image", {x: x + 8, y: y + 54, width: width - 16, height: 9, preserveAspectRatio: "none", href,
      style: {imageRendering: "pixelated"}});
  };
  const drawBox = ([column, row, title, letters, view, name]) => {
    const x = MAP_COLUMNS[column], y = top(row), middle = {"text-anchor": "middle"}, isPosition = view === "positions";
    const card = shift => svg("rect", {x: x + shift, y: y - shift, width, height, rx: 6,
      fill: isPosition ? LIGHT : PAPER, stroke: isPosition ? ORANGE : BLUE});
    return linked(view, letters.startsWith("H") && [card(6), card(3)], card(0),
      text(center(column), y + 17, title, {...middle, class: "name"}), text(center(column), y + 33, letters, middle),
      text(center(column), y + 49, shapeOf(letters, sizes), {...middle, class: "shape"}),
      values[name] && thumbnail(name, x, y));
  };
  // Arrows between the boxes of a column, in the order of the computation.
  const arrows = (column, up) => {
    const tops = boxes.filter(box => box[0] === column).map(([, row]) => top(row)).sort((a, b) => a - b);
    return tops.slice(1).map((below, i) => {
      const above = tops[i] + height;
      return path(`M${center(column)} ${up ? `${below} V${above + 4}` : `${above} V${below - 10}`}`);
    });
  };
  const across = (from, to, row) => path(
    `M${MAP_COLUMNS[from] + width + 6} ${top(row) + height / 2} H${MAP_COLUMNS[to] - 4}`);
  const fromStream = column => path(`M${center(column)} ${stream} V${top(0) + height + 4}`);
  const toStream = (column, row = 0) => [path(`M${center(column)} ${top(row) + height} V${stream - 15}`),
    svg("circle", {cx: center(column), cy: stream, r: 11, fill: PAPER, stroke: BLUE, "stroke-width": 2}),
    text(center(column), stream + 5, "+", {class: "name", "text-anchor": "middle"})];
  const addsVector = POSITION_BOXES[position]?.[0] === "embedding";

  return svg("svg", {width: MAP_WIDTH, height: stream + (addsVector ? height + 44 : 32), class: "map"},
    svg("defs", {}, svg("marker", {id: "arrowhead", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7,
      markerHeight: 7, orient: "auto"},
      svg("path", {d: "M0 0 L8 4 L0 8 z", fill: SOFT}))),
    (L > 1 ? [8, 4, 0] : [0]).map(shift => svg("rect", {...frame, x: frame.x + shift, y: frame.y - shift,
      fill: shift ? PAPER : TINT})),
    text(MAP_COLUMNS.attentionUp, 56, `Layer ${layer}${L > 1 ? ` of ${L}` : ""}`, {class: "name"}),
    text(MAP_COLUMNS.mlpUp, top(1) - 12, "MLP: each token separately", {class: "name"}),
    path(`M${center("output")} ${top(3)} V14 H${center("embedding")} V${top(2) - 4}`, {"stroke-dasharray": "5 4"}),
    linked("loop", text(MAP_WIDTH / 2, 10, "the sampled token is appended, and the model predicts the next one",
      {"text-anchor": "middle"})),
    svg("line", {x1: center("embedding"), x2: center("output"), y1: stream, y2: stream, stroke: BLUE,
      "stroke-width": 4}),
    linked("stream", text(center("attentionDown") + 18, stream + 20, "residual stream, T × C", {class: "name"})),
    path(`M${center("embedding")} ${top(2) + height} V${top(1) - 4}`),
    addsVector ? [...toStream("embedding", 1), path(`M${center("embedding")} ${stream + 38} V${stream + 15}`)]
      : path(`M${center("embedding")} ${top(1) + height} V${stream - 4}`),
    ["attentionUp", "mlpUp", "output"].flatMap(column => [fromStream(column), ...arrows(column, true)]),
    across("attentionUp", "attentionDown", rows - 1), across("attentionUp", "attentionDown", 2),
    across("mlpUp", "mlpDown", 1),
    ["attentionDown", "mlpDown"].flatMap(column => [...arrows(column, false), ...toStream(column)]),
    text(MAP_COLUMNS.attentionDown - 14, top(2) + 20, "v"), text(center("attentionUp") + 8, top(2) - 9, "q, k"),
    boxes.map(drawBox));
}

defineView({
  id: "map", title: "Architecture",
  about: "The computation for this text, with the shape of each result. Each layer reads the residual stream and adds "
    + "the outputs of attention and the MLP to it. Click a box to see its numbers.",
  async draw(box, context) {
    const {config: {position, n_layer}} = context, boxes = boxesOf(context), sizes = sizesOf(context), {H, V} = sizes;
    const drawing = drawMap(context, await valuesOf(context));
    box.append(layerPicker(context),
      picture("map", `GPT with ${position === "none" ? "no" : position} positions`,
        () => ({columns: ["part", "dimensions", "shape", "view"],
          rows: boxes.map(([, , title, letters, view]) => [title, letters, shapeOf(letters, sizes), view])}),
        scrolling(drawing),
        `T = ${sizes.T} tokens, C = ${sizes.C} channels, H = ${H} heads of D = C / H = ${sizes.D}, V = `
          + `${short(V)} tokens in the vocabulary, ${n_layer} layers. The strips are the numbers of token `
          + `${context.names[context.token]}; those of the output are the ${THUMBNAIL_TOKENS} most likely tokens. `
          + "Orange: the position method."),
      element("p", {}, "This is a decoder: a token attends only to itself and to earlier tokens. It has no encoder "
        + "and no cross-attention, unlike the translation model of Vaswani et al. (2017)."));
  },
});

// --- the parameters --------------------------------------------------------------------------------------------------

const PARAMETER_MEANINGS = { // by the end of the name
  "wte.weight": "one row per token; also the output matrix", "wpe.weight": "one row per position",
  "relative_bias.weight": "one row per bucket of distances, one column per head",
  "c_attn.weight": "rows are q, then k, then v, head by head", "attn.c_proj.weight": "W_O",
  "c_fc.weight": "up, to the neurons", "mlp.c_proj.weight": "down, from the neurons",
};
// [name, layers, channels, context, size in its paper]: Radford et al. 2019, table 2; Brown et al. 2020, table 2.1
const PUBLISHED_MODELS = [
  ["GPT-2 small", 12, 768, 1024, "117M"], ["GPT-2 medium", 24, 1024, 1024, "345M"],
  ["GPT-2 large", 36, 1280, 1024, "762M"], ["GPT-2 XL", 48, 1600, 1024, "1542M"],
  ["GPT-3", 96, 12288, 2048, "175.0B"],
];
const GPT2_TOKENS = 50257, GPT1_TOKENS = 40478;

// The part of the model to which a parameter belongs, as in GPT.num_params.
function partOf(name) {
  if (name.includes(".ln_")) return "norms";
  if (name.endsWith("bias")) return "biases";
  if (name.includes(".attn.")) return "attention";
  if (name.includes(".mlp.")) return "MLP";
  return name.includes("wte") ? "embeddings" : "positions";
}

// The number of parameters of a GPT with L layers, C channels, T positions, V tokens, learned positions, and biases.
function countParameters(L, C, T, V) {
  const counts = {embeddings: V * C, positions: T * C, attention: 4 * L * C * C, MLP: 8 * L * C * C, biases: 9 * L * C,
    norms: 4 * L * C + 2 * C};
  return {...counts, total: sumOf(Object.values(counts))};
}

defineView({
  id: "parameters", title: "Parameters",
  about: "All learned tensors. Click one to see its values. The output matrix is tied to the token embeddings, so it "
    + "is counted once.",
  async draw(box, context) {
    const {model: {num_params: counts, parameters}, config: {n_embd: C, n_head: H}, layer} = context, D = C / H;
    const name = state.parameter.replace(".*.", `.${layer}.`);
    const selected = parameters.find(parameter => parameter.name === name) ?? parameters[0];
    const answer = await context.ask("parameter", {name: selected.name});
    box.append(parameterTable(context, selected),
      element("p", {}, "A head moves x W_V W_O, times an attention weight, from a token x to another token. W_V W_O is "
        + `a matrix of C × C = ${short(C * C)} numbers with rank at most ${D}: it is stored as a low-rank pair, W_V `
        + `(C × D) and the head's part of W_O (D × C), ${short(2 * C * D)} numbers.`),
      layerPicker(context), parameterPictures(selected, answer), ...publishedTable(counts));
  },
}, {parameter: "transformer.wte.weight"});

// One row per tensor, summed over layers.
function parameterTable({model: {num_params: counts, parameters}, config: {n_layer: L}}, selected) {
  const kindOf = name => name.replace(/\.h\.\d+\./, ".h.*."), size = shape => shape.reduce((a, b) => a * b, 1);
  const kinds = [], rows = [];
  const add = (kind, name, count, shape = "", meaning = "") => {
    kinds.push(kind);
    rows.push([name, count, count / counts.total, shape, meaning]);
  };
  for (const part of new Set(parameters.map(({name}) => partOf(name)))) {
    const tensors = parameters.filter(({name}) => partOf(name) === part);
    add(null, part, counts[part]);
    for (const kind of new Set(tensors.map(({name}) => kindOf(name)))) {
      const {shape} = tensors.find(({name}) => kindOf(name) === kind), layers = kind.includes("*") ? L : 1;
      add(kind, kind.replace("transformer.", ""), size(shape) * layers,
        (layers > 1 ? `${layers} × ` : "") + shape.join(" × "),
        Object.entries(PARAMETER_MEANINGS).find(([end]) => kind.endsWith(end))?.[1]);
    }
  }
  add(null, "total", counts.total);
  const shown = rows.map(([name, count, share, ...more], i) => {
    const strong = (text, testid) => kinds[i] ? text : element("strong", {testid}, text);
    return [strong(name), strong(short(count), `params-${name}`), strong(percent(share)), ...more];
  });
  return picture("parameters", `${short(counts.total)} parameters`, () => ({
    columns: ["name", "part", "shape", "parameters"],
    rows: parameters.map(({name, shape}) => [name, partOf(name), shape.join(" x "), size(shape)]),
  }), tableOf(["tensor", "parameters", "share", "shape", "meaning"], rows, {
    shown, selected: i => kinds[i] === kindOf(selected.name), click: i => kinds[i] && change({parameter: kinds[i]}),
  }));
}

function parameterPictures({name, shape}, {facts: {edges, counts, mean, deviation}, tensors: {picture: values}}) {
  const [rows, columns] = shape.length > 1 ? shape : [1, ...shape], [shownRows, shownColumns] = values.shape;
  const cellLabel = (i, size, shown) => size === shown ? String(i)
    : `${Math.floor(i * size / shown)}–${Math.ceil((i + 1) * size / shown) - 1}`;
  const labels = (size, shown) => range(shown).map(i => cellLabel(i, size, shown));
  const token = i => name.endsWith("wte.weight") && rows === shownRows ? ` ${visible(pieces[i])}` : "";
  const max = maxAbs(values.data), cell = clamp(Math.floor(512 / maxAbs(values.shape)), 2, 12);
  const block = [rows / shownRows, columns / shownColumns].map(Math.ceil);
  const outline = oneLine("count", counts.flatMap(count => [count, count]),
    {x: counts.flatMap((_, i) => [edges[i], edges[i + 1]]), fill: FILL});
  return div("pair",
    matrixPicture("tensor", `${name.replace("transformer.", "")}, ${shape.join(" × ")}`, values,
      ["row", labels(rows, shownRows).map((label, i) => label + token(i))], ["column", labels(columns, shownColumns)], {
        scale: "signed", max, cell, height: rows === 1 ? 24 : cell,
        note: Math.max(...block) > 1 && `A cell is the mean of about ${block.join(" × ")} values.`,
      }),
    picture("histogram", "Histogram",
      () => ({columns: ["from", "to", "count"], rows: counts.map((count, i) => [edges[i], edges[i + 1], count])}),
      lineChart({
        name: `histogram of ${name}`, title: "Histogram", x: "value", width: 420, groups: [outline],
        panels: [{title: "count", height: 170, from_zero: true}],
      }),
      `Mean ${short(mean)}, standard deviation ${short(deviation)}.`));
}

function publishedTable(counts) {
  const models = PUBLISHED_MODELS.map(([name, L, C, T, paper]) => ({name, paper,
    counts: countParameters(L, C, T, GPT2_TOKENS), gpt1Total: countParameters(L, C, T, GPT1_TOKENS).total}));
  const gpt3 = models.at(-1).counts, {total, ...parts} = models[0].counts;
  return [
    tablePicture("published", "GPT-2 and GPT-3", ["model", "total", "paper", ...Object.keys(parts)],
      [{name: "this model", paper: "", counts}, ...models].map(({name, paper, counts}) =>
        [name, counts.total, paper, ...Object.keys(parts).map(part => counts[part])]), {
        selected: i => i === 0,
        note: "With L layers, C channels, T positions and V tokens: V C embeddings, T C positions, 4 L C² attention, "
          + `8 L C² MLP, 9 L C biases, and (4 L + 2) C norms. V = ${short(GPT2_TOKENS)}.`,
      }),
    element("p", {}, `GPT-2 small has ${short(total)} parameters, but its paper says 117M, which OpenAI later called `
      + `an error. The numbers of the paper follow from the ${short(GPT1_TOKENS)} tokens of GPT-1: `
      + `${models.slice(0, 4).map(({gpt1Total}) => short(gpt1Total)).join(", ")}. Attention has `
      + `${short(gpt3.attention)} of GPT-3's ${short(gpt3.total)} parameters; the MLPs have most others.`)];
}
