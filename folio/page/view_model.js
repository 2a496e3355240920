"use strict";
// Views of the model as a whole: its architecture, and its parameters.

// --- the map ---------------------------------------------------------------------------------------------------------

const MAP_BOX = {width: 134, height: 56, pitch: 78}; // of the map, in pixels; pitch: from row to row
const MAP_COLUMNS = {embedding: 6, attentionUp: 184, attentionDown: 340, mlpUp: 504, mlpDown: 660, output: 840};
const MAP_WIDTH = 980;
const POSITION_BOXES = { // the box that the position method adds: its column, row, title and dimensions
  learned: ["embedding", -1, "Position embedding", "row of wpe, T × C"],
  sinusoidal: ["embedding", -1, "Position sinusoids", "T × C"],
  rotary: ["attentionUp", 3, "Rotate by position", "H × T × D"],
  relative: ["attentionUp", 4, "+ bias by distance", "H × T × T"],
  alibi: ["attentionUp", 4, "− slope · distance", "H × T × T"],
};

// What the model computes for this text, as boxes: {column, row, title, letters, shape, view}. Rows count upwards from
// the residual stream; the position embedding is below it.
function boxesOf({config, ids}) {
  const {n_head: H, n_embd: C, vocab_size: V, position, activation} = config, T = ids.length, D = C / H;
  const [column, row, title, letters] = POSITION_BOXES[position] ?? [], top = column === "attentionUp" ? 4 : 3;
  const box = (column, row, title, letters, shape, view, options) =>
    ({column, row, title, letters, shape, view, ...options});
  const heads = {heads: true};
  return [
    box("embedding", 2, "Tokens", "ids of the text, T", [T], "tokens"),
    box("embedding", 1, "Token embedding", "row of wte, T × C", [T, C], "embedding"),
    box("attentionUp", 0, "LayerNorm", "T × C", [T, C], "qkv"),
    box("attentionUp", 1, "q, k, v = x W + b", "T × 3C", [T, 3 * C], "qkv"),
    box("attentionUp", 2, "Split into heads", "H × T × D each", [H, T, D], "head-split", heads),
    title && box(column, row, title, letters, {"-1": [T, C], 3: [H, T, D], 4: [H, T, T]}[row], "positions",
      {position: true, heads: row > 0}),
    box("attentionUp", row === 3 ? 4 : 3, state.scale ? "Scores q kᵀ / √D" : "Scores q kᵀ", "H × T × T", [H, T, T],
      "attention-row", heads),
    box("attentionDown", top, state.mask === "off" ? "Softmax, no mask" : "Mask, softmax", "H × T × T", [H, T, T],
      "attention-table", heads),
    box("attentionDown", 2, "Weighted sum of v", "H × T × D", [H, T, D], "weighted-sum", heads),
    box("attentionDown", 1, "Merge heads", "T × C", [T, C], "merge"),
    box("attentionDown", 0, "Project: W_O", "T × C", [T, C], "merge"),
    box("mlpUp", 0, "LayerNorm", "T × C", [T, C], "mlp"),
    box("mlpUp", 1, "Up", "T × 4C", [T, 4 * C], "mlp"),
    box("mlpDown", 1, activation === "gelu_new" ? "GELU (tanh)" : "GELU", "T × 4C neurons", [T, 4 * C], "mlp"),
    box("mlpDown", 0, "Down", "T × C", [T, C], "mlp"),
    box("output", 0, "LayerNorm", "T × C", [T, C], "output"),
    box("output", 1, "Output matrix", "wteᵀ, tied: T × V", [T, V], "output"),
    box("output", 2, "Softmax", "probabilities, T × V", [T, V], "output"),
    box("output", 3.5, "Sample a token", "", null, "loop"),
    box("output", 3, `Loss of T − 1 = ${T - 1}`, "", null, "examples"),
  ].filter(Boolean);
}

function drawMap(context) {
  const {config, ids, layer} = context, {n_layer: L, n_head: H, n_embd: C, position} = config;
  const boxes = boxesOf(context), rows = 1 + Math.floor(Math.max(...boxes.map(box => box.row)));
  const stream = 96 + rows * MAP_BOX.pitch, height = stream + 102;
  const place = ({column, row}) => row < 0 ? {x: MAP_COLUMNS[column], y: stream + 38}
    : {x: MAP_COLUMNS[column], y: stream - 88 - row * MAP_BOX.pitch};
  const center = column => MAP_COLUMNS[column] + MAP_BOX.width / 2;
  const path = (d, options = {}) => svg("path", {d, fill: "none", stroke: "#5d6878", "stroke-width": 1.3,
    "marker-end": "url(#arrowhead)", ...options});
  const text = (x, y, words, options = {}) => svg("text", {x, y, class: "soft", ...options}, words);
  const linked = (view, ...children) => isOffered(view) ? svg("a", {href: link({view})}, ...children)
    : svg("g", {}, ...children);

  function drawBox(box) {
    const {x, y} = place(box), small = !box.shape, tall = small ? 25 : MAP_BOX.height;
    const top = small ? stream - 88 - 3 * MAP_BOX.pitch + (box.row === 3 ? 31 : 0) : y;
    const card = shift => svg("rect", {
      x: x + shift, y: top - shift, width: MAP_BOX.width, height: tall, rx: 6,
      fill: box.position ? "#fdeee4" : "#ffffff", stroke: box.position ? "#c2410c" : "#1f5fbf",
    });
    return linked(box.view, svg("title", {}, `${box.title}: open the view`), box.heads && H > 1 && [card(6), card(3)],
      card(0),
      text(x + MAP_BOX.width / 2, top + 17, box.title, {class: "name", "text-anchor": "middle"}),
      text(x + MAP_BOX.width / 2, top + 33, box.letters, {"text-anchor": "middle"}),
      text(x + MAP_BOX.width / 2, top + 49, box.shape?.join(" × ") ?? "", {class: "shape", "text-anchor": "middle"}));
  }

  // From each box to the next one of its column, upwards or downwards, in the order of the computation.
  function arrows(column, direction) {
    const inside = boxes.filter(box => box.column === column && box.row >= 0 && box.shape);
    inside.sort((a, b) => a.row - b.row);
    return inside.slice(1).map((upper, i) => {
      const lower = place(inside[i]).y, bottom = place(upper).y + MAP_BOX.height, x = center(column);
      return direction === "up" ? path(`M${x} ${lower} V${bottom + 4}`)
        : path(`M${x} ${bottom} V${lower - (inside[i].heads ? 10 : 4)}`);
    });
  }

  const across = (from, to, row) => {
    const y = place({column: from, row}).y + MAP_BOX.height / 2;
    return path(`M${MAP_COLUMNS[from] + MAP_BOX.width + (from === "attentionUp" ? 6 : 0)} ${y} `
      + `H${MAP_COLUMNS[to] - 4}`);
  };
  const plus = x => [svg("circle", {cx: x, cy: stream, r: 11, fill: "#ffffff", stroke: "#1f5fbf", "stroke-width": 2}),
    svg("text", {x, y: stream + 5, "text-anchor": "middle", class: "name"}, "+")];
  const tap = column => path(`M${center(column)} ${stream} V${stream - 88 + MAP_BOX.height + 4}`);
  const back = column => path(`M${center(column)} ${stream - 88 + MAP_BOX.height} V${stream - 15}`);
  const left = MAP_COLUMNS.attentionUp - 18, right = MAP_COLUMNS.mlpDown + MAP_BOX.width + 18;
  const frame = {x: left, y: 34, width: right - left, height: stream + 40};
  const addsVector = position in POSITION_BOXES && POSITION_BOXES[position][0] === "embedding";
  const tokensTop = place({column: "embedding", row: 2}).y;
  const legend = [`T = ${ids.length} tokens of the text`, `C = ${C} channels`, `H = ${H} heads of D = C / H = ${C / H}`,
    `4C = ${4 * C} neurons in each layer`, `V = ${config.vocab_size.toLocaleString("en-US")} tokens in the vocabulary`,
    `L = ${L} ${L > 1 ? "layers" : "layer"}`];
  const legendTop = stream - 88 - MAP_BOX.pitch - 36 - 17 * legend.length;
  const below = [["all-heads", `the ${H} heads in small`], ["looking-back", "what a token looks at"],
    ["cache", "keys and values kept"]];

  return svg("svg", {width: MAP_WIDTH, height, class: "map", role: "img", viewBox: `0 0 ${MAP_WIDTH} ${height}`},
    svg("defs", {}, svg("marker", {id: "arrowhead", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7,
      markerHeight: 7, orient: "auto"},
      svg("path", {d: "M0 0 L8 4 L0 8 z", fill: "#5d6878"}))),
    L > 1 && [8, 4].map(shift => svg("rect", {...frame, x: frame.x + shift, y: frame.y - shift, rx: 10, fill: "#ffffff",
      stroke: "#d9dee6"})),
    svg("rect", {...frame, rx: 10, fill: "#f4f6f9", stroke: "#d9dee6"}),
    text(MAP_COLUMNS.attentionUp, 56, `Layer ${layer}`, {class: "name"}),
    L > 1 && text(frame.x + frame.width - 12, 56, `× ${L}, one after another`, {class: "name", "text-anchor": "end"}),
    // the loop
    path(`M${center("output")} ${stream - 88 - 3 * MAP_BOX.pitch} V14 H${center("embedding")} V${tokensTop - 4}`,
      {"stroke-dasharray": "5 4"}),
    linked("loop", text(MAP_WIDTH / 2, 10, "the sampled token is appended, and the model predicts the next one",
      {"text-anchor": "middle"})),
    // the residual stream
    svg("line", {x1: center("embedding") - 2, x2: center("output") + 2, y1: stream, y2: stream, stroke: "#1f5fbf",
      "stroke-width": 4}),
    linked("stream", text(center("attentionDown") + 18, stream + 20, `residual stream, T × C = ${ids.length} × ${C}`,
      {class: "name"})),
    path(`M${center("embedding")} ${place({column: "embedding", row: 1}).y + MAP_BOX.height} `
      + `V${stream - (addsVector ? 15 : 4)}`),
    addsVector && [path(`M${center("embedding")} ${stream + 38} V${stream + 15}`), ...plus(center("embedding"))],
    position === "none" && linked("positions", text(MAP_COLUMNS.embedding, stream + 28, "No positions are added:"),
      text(MAP_COLUMNS.embedding, stream + 44, "only the mask tells"),
      text(MAP_COLUMNS.embedding, stream + 60, "earlier from later.")),
    // attention, and the MLP
    tap("attentionUp"), arrows("attentionUp", "up"), across("attentionUp", "attentionDown", rows - 1),
    across("attentionUp", "attentionDown", 2), arrows("attentionDown", "down"),
    text(MAP_COLUMNS.attentionDown - 14, place({column: "attentionDown", row: 2}).y + 20, "v"),
    text(center("attentionUp") + 8, place({column: "attentionUp", row: 2}).y - 9, "q, k"),
    back("attentionDown"), plus(center("attentionDown")),
    tap("mlpUp"), arrows("mlpUp", "up"), across("mlpUp", "mlpDown", 1), arrows("mlpDown", "down"),
    back("mlpDown"), plus(center("mlpDown")),
    text(MAP_COLUMNS.mlpUp, stream - 88 - MAP_BOX.pitch - 12, "MLP: each token by itself", {class: "name"}),
    text(MAP_COLUMNS.attentionUp, 73, "Attention: between tokens", {class: "name"}),
    // the output
    tap("output"), arrows("output", "up"), path(`M${center("output")} ${place({column: "output", row: 2}).y} v-14`),
    // words
    legend.map((line, i) => text(MAP_COLUMNS.mlpUp, legendTop + 17 * i, line)),
    below.map(([view, title], i) => linked(view, text(frame.x + 12 + [0, 200, 400][i], stream + 60, `› ${title}`))),
    boxes.map(drawBox));
}

defineView({
  id: "map", title: "The architecture",
  about: "What the model computes for this text, with the shape of each result. Each layer reads the residual stream, "
    + "and adds to it twice: what attention and what the MLP computed. Click a box to see its numbers.",
  draw(box, context) {
    const {config, layer, model} = context, boxes = boxesOf(context);
    const table = () => ({
      columns: ["part", "dimensions", "shape", "view"],
      rows: boxes.map(({title, letters, shape, view}) => [title, letters, shape?.join(" x ") ?? "", view]),
    });
    const layers = element("div", {class: "controls"}, element("label", {}, "boxes open layer ",
      element("select", {"data-testid": "map-layer", change: event => change({layer: Number(event.target.value)})},
        Array.from({length: config.n_layer},
          (_, l) => element("option", {value: l, selected: l === layer}, String(l))))),
      element("a", {href: link({view: "parameters"})}, `${model.num_params.total.toLocaleString("en-US")} parameters`));
    box.append(layers,
      picture("map", `GPT with ${config.position === "none" ? "no" : config.position} positions`, table,
        element("div", {class: "wide"}, drawMap(context)),
        config.position === "none" ? "" : "The orange box is where the positions of the tokens come in."),
      element("p", {}, "This is a decoder. It has no encoder and no cross-attention, which the translation model of "
        + "Vaswani et al. (2017) has: a token attends only to itself and to earlier tokens of the same text."));
  },
});

// --- the parameters --------------------------------------------------------------------------------------------------

const PARAMETER_MEANINGS = { // what a tensor is, by the end of its name
  "wte.weight": "a vector per token; also the output matrix", "wpe.weight": "a vector per position",
  "relative_bias.weight": "a bias per distance and head",
  "attn.c_attn.weight": "W_Q, W_K, W_V of all heads", "attn.c_proj.weight": "W_O",
  "mlp.c_fc.weight": "up, to the neurons",
  "mlp.c_proj.weight": "down, from the neurons", "attn.c_attn.bias": "of q, k, v", "attn.c_proj.bias": "after W_O",
  "mlp.c_fc.bias": "of the neurons", "mlp.c_proj.bias": "after the neurons", "ln_1.weight": "gains before attention",
  "ln_1.bias": "shifts before attention", "ln_2.weight": "gains before the MLP", "ln_2.bias": "shifts before the MLP",
  "ln_f.weight": "gains before the output", "ln_f.bias": "shifts before the output",
};
const PARAMETER_PARTS = ["embeddings", "positions", "attention", "MLP", "biases", "norms"];
const PUBLISHED_MODELS = [ // GPT-2: table 2 of Radford et al. 2019; GPT-3: table 2.1 of Brown et al. 2020
  {name: "GPT-2 small", n_layer: 12, n_head: 12, n_embd: 768, block_size: 1024, paper: "117M"},
  {name: "GPT-2 medium", n_layer: 24, n_head: 16, n_embd: 1024, block_size: 1024, paper: "345M"},
  {name: "GPT-2 large", n_layer: 36, n_head: 20, n_embd: 1280, block_size: 1024, paper: "762M"},
  {name: "GPT-2 XL", n_layer: 48, n_head: 25, n_embd: 1600, block_size: 1024, paper: "1542M"},
  {name: "GPT-3", n_layer: 96, n_head: 96, n_embd: 12288, block_size: 2048, paper: "175.0B"},
];
const GPT2_TOKENS = 50257, GPT1_TOKENS = 40478;

// The part of a parameter, as in GPT.num_params.
function partOf(name) {
  if (name.includes(".ln_")) return "norms";
  if (name.endsWith("bias")) return "biases";
  if (name.includes(".attn.")) return "attention";
  if (name.includes(".mlp.")) return "MLP";
  return name.includes("wte") ? "embeddings" : "positions";
}

// How many parameters a GPT with learned positions and biases has, by part.
function countParameters({n_layer: L, n_embd: C, block_size: T}, V) {
  const counts = {embeddings: V * C, positions: T * C, attention: 4 * L * C * C, MLP: 8 * L * C * C, biases: 9 * L * C,
    norms: 4 * L * C + 2 * C};
  return {...counts, total: Object.values(counts).reduce((a, b) => a + b)};
}

function withCommas(n) {
  return n.toLocaleString("en-US");
}

function sizeOfShape(shape) {
  return shape.reduce((a, b) => a * b, 1);
}

defineView({
  id: "parameters", title: "The parameters",
  about: "Everything that the model has learned is in these tensors. Click one to see its values. The output matrix is "
    + "the table of token embeddings, so it is counted once.",
  async draw(box, context) {
    const {model, config, layer} = context, {num_params: counts, parameters} = model;
    const name = state.parameter.replace(".*.", `.${layer}.`);
    const chosen = parameters.find(parameter => parameter.name === name) ?? parameters[0];
    const answer = await context.ask("parameter", {name: chosen.name});
    box.append(parameterTable(context, chosen), element("p", {"data-testid": "low-rank"}, lowRank(config)),
      ...parameterPictures(chosen, answer, config), ...publishedTable(config, counts));
  },
}, {parameter: "transformer.wte.weight"});

function lowRank({n_embd: C, n_head: H}) {
  const D = C / H;
  return "What a head moves from a token x to another one is x W_V W_O, times a weight. W_V W_O is a matrix of C × C = "
    + `${withCommas(C * C)} numbers, but of rank ${D} at most: it is stored as a low-rank pair, W_V (C × D = ${C} × `
    + `${D}) and the head's part of W_O (D × C = ${D} × ${C}), ${withCommas(2 * C * D)} numbers.`;
}

// One row for each tensor, of all layers together.
function parameterTable({model: {num_params: counts, parameters}, config}, chosen) {
  const share = count => percent(count / counts.total), L = config.n_layer;
  const kindOf = name => name.replace(/\.h\.\d+\./, ".h.*.");
  const shownName = name => name.replace("transformer.", "").replace("h.*.", L > 1 ? `h.0–${L - 1}.` : "h.0.");
  const rows = [], kinds = [];
  const add = (kind, cells) => {
    kinds.push(kind);
    rows.push(cells);
  };
  for (const part of PARAMETER_PARTS) {
    const tensors = parameters.filter(({name}) => partOf(name) === part);
    if (!tensors.length) continue;
    add(null, [element("b", {}, part), element("b", {}, withCommas(counts[part])),
      element("b", {}, share(counts[part])), "", "", ""]);
    for (const kind of new Set(tensors.map(({name}) => kindOf(name)))) {
      const same = tensors.filter(({name}) => kindOf(name) === kind), {shape} = same[0];
      const count = sizeOfShape(shape) * same.length;
      const meaning = Object.entries(PARAMETER_MEANINGS).find(([end]) => kind.endsWith(end))?.[1] ?? "";
      add(kind, [`  ${shownName(kind)}`, withCommas(count), share(count), shape.join(" × "),
        kind.includes("*") ? `× ${L}` : "", meaning]);
    }
    const tied = ["  lm_head.weight", "0", "", "", "", "the output matrix: the same tensor as wte"];
    if (part === "embeddings") add(null, tied);
  }
  const total = element("b", {"data-testid": "params-total"}, withCommas(counts.total));
  add(null, [element("b", {}, "total"), total, element("b", {}, "100%"), "", "", ""]);
  const columns = [{title: "tensor"}, {title: "parameters"}, {title: "share"}, {title: "shape"}, {title: "layers"},
    {title: "what it is", text: true}];
  const drawn = numberTable(columns, rows, {
    selected: i => kinds[i] === kindOf(chosen.name), click: i => kinds[i] && change({parameter: kinds[i]}),
  });
  drawn.classList.add("parameters");
  drawn.querySelectorAll("tbody tr").forEach((row, i) => kinds[i] || row.classList.remove("clickable"));
  const table = () => ({
    columns: ["tensor", "part", "shape", "parameters", "share"],
    rows: parameters.map(({name, shape}) => [name, partOf(name), shape.join(" x "), sizeOfShape(shape),
      sizeOfShape(shape) / counts.total]),
  });
  return picture("parameters", `${withCommas(counts.total)} parameters`, table, drawn);
}

// What the rows and the columns of a matrix are.
function axesOf(name) {
  if (name.endsWith("wte.weight")) return "Rows are tokens, columns channels.";
  if (name.endsWith("wpe.weight")) return "Rows are positions, columns channels.";
  if (name.endsWith("relative_bias.weight")) return "Rows are buckets of distances, columns heads.";
  if (name.endsWith("c_attn.weight")) return "Rows are outputs: q, then k, then v, head by head; columns are inputs.";
  return "Rows are outputs, columns inputs.";
}

function parameterPictures({name, shape}, {facts, tensors: {picture: values}}, config) {
  const {edges, counts, mean, deviation} = facts, most = largest(values.data);
  const [rows, columns] = shape.length > 1 ? shape : [1, shape[0]], [shownRows, shownColumns] = values.shape;
  const averaged = rows > shownRows || columns > shownColumns;
  const range = (i, size, shown) => size === shown ? String(i)
    : `${Math.floor(i * size / shown)}–${Math.ceil((i + 1) * size / shown) - 1}`;
  const token = i => name.endsWith("wte.weight") && rows === shownRows ? ` ${visible(pieces[i])}` : "";
  const read = (i, j, x) => `row ${range(i, rows, shownRows)}${token(i)}, column ${range(j, columns, shownColumns)}: `
    + `${short(x)}`;
  const drawing = shape.length > 1
    ? heatMap(values, {scale: "signed", value: x => x / most, read, cell: clamp(Math.floor(512 / largest(values.shape)), 2, 12)})
    : strip(values.data, (i, x) => `${range(i, columns, shownColumns)}: ${short(x)}`,
      {width: Math.min(64, shownColumns), cell: 8});
  const open = event => change({layer: Number(event.target.value), parameter: name.replace(/\.h\.\d+\./, ".h.*.")});
  const layers = name.includes(".h.") && element("label", {}, "layer ", element("select", {change: open},
    Array.from({length: config.n_layer},
      (_, l) => element("option", {value: l, selected: name.includes(`.h.${l}.`)}, String(l)))));
  const scale = `Dark is −${short(most)}, gray 0, light ${short(most)}.`;
  const means = averaged
    ? ` Each cell is the mean of about ${Math.ceil(rows / shownRows)} × ${Math.ceil(columns / shownColumns)} values.`
    : "";
  const labels = (size, shown) => Array.from({length: shown}, (_, i) => range(i, size, shown));
  return [element("div", {class: "controls"}, layers), element("div", {class: "row pair"},
    picture("tensor", `${name.replace("transformer.", "")}, ${shape.join(" × ")}`,
      () => matrixTable("row", labels(rows, shownRows), labels(columns, shownColumns), values),
      drawing, `${shape.length > 1 ? `${axesOf(name)} ` : ""}${scale}${means}`),
    picture("histogram", "Its values",
      () => ({columns: ["from", "to", "count"], rows: counts.map((count, i) => [edges[i], edges[i + 1], count])}),
      histogramOf(edges, counts, {mean, deviation}),
      mean === null ? "No value is finite."
        : `Mean ${short(mean)}, standard deviation ${short(deviation)}, from ${short(edges[0])} to `
          + `${short(edges.at(-1))}. Dashed: a normal distribution.`))];
}

function publishedTable(config, counts) {
  const models = PUBLISHED_MODELS.map(shape => ({...shape, counts: countParameters(shape, GPT2_TOKENS),
    early: countParameters(shape, GPT1_TOKENS).total}));
  const small = models[0], gpt3 = models.at(-1);
  const all = [{...config, name: "this model", counts}, ...models];
  const columns = ["model", "total", "in its paper", ...PARAMETER_PARTS, "layers", "heads", "channels", "context"];
  const cells = ({name, n_layer, n_head, n_embd, block_size, counts, paper}) =>
    [name, counts.total, paper ?? "", ...PARAMETER_PARTS.map(part => counts[part]), n_layer, n_head, n_embd,
      block_size];
  const texts = model => {
    const all = cells(model).map(x => typeof x === "number" ? withCommas(x) : x), shape = all.splice(-4);
    return [element("b", {}, all[0]), element("b", {}, all[1]), ...all.slice(2), shape.join(" · ")];
  };
  return [picture("published", "Beside GPT-2 and GPT-3", () => ({columns, rows: all.map(cells)}),
    numberTable([...columns.slice(0, -4), "L · H · C · T"].map(title => ({title})), all.map(texts),
      {selected: i => i === 0}),
    "Computed from the shapes: V C embeddings, T C positions, and in each layer 4 C² for attention, 8 C² for the MLP, "
      + `9 C biases, and 4 C for the two norms; the last norm has 2 C. V = ${withCommas(GPT2_TOKENS)} tokens.`),
  element("p", {}, `GPT-2 small has ${withCommas(small.counts.total)} parameters; its paper says 117M. OpenAI later `
    + "called the paper's four numbers an error. They are what the same formula gives for the vocabulary of GPT-1, "
    + `${withCommas(GPT1_TOKENS)} tokens: ${models.slice(0, 4).map(model => withCommas(model.early)).join(", ")}.`),
  element("p", {}, `Attention is ${withCommas(gpt3.counts.attention)} of GPT-3's ${withCommas(gpt3.counts.total)} `
    + "parameters, a third; the MLPs are almost all of the rest.")];
}
