// What the machine draws: the numbers of a forward pass on their layout, with the color scales of its rows.

const WINDOW_TOKENS = [14, 8]; // drawn columns on wide and on narrow stages
const SHOWN_BARS = 8; // most likely next tokens
const COLORED = 0.99; // the share of numbers that are not beyond the ends of their color scale

const isWide = () => window.innerWidth > 1000; // the words are beside the stage (see .machine in style.css)
const windowSize = () => WINDOW_TOKENS[isWide() ? 0 : 1];

// --- the model -------------------------------------------------------------------------------------------------------

const shownModel = () => state.story_model && info.models.length === 2 ? 1 : 0;

// The context of the shown model, with askAbout(ids, kind, options) for questions about another text, and the overview
// of the last checkpoint, whose heads the story is about at all checkpoints. Its text ends where its context does.
async function contextOfModel(context) {
  const index = shownModel(), {ids: allIds, model: {checkpoints}} = context;
  if (!index) {
    const last = checkpoints.length > 1 && shownStep() !== checkpoints.at(-1) ? checkpoints.at(-1) : null;
    const reference = last !== null && await ask(question("overview", allIds, {step: last})).catch(() => null);
    const askAbout = (ids, kind, options) => ask(question(kind, ids, options));
    return {...context, askAbout, lastOverview: reference || context.overview};
  }
  const model = info.models[index], ids = allIds.slice(0, model.limit);
  const askAbout = (ids, kind, options) =>
    ask(question(kind, ids, {...existingSwitches(model), ...options, model: index}));
  const askModel = (kind, options) => askAbout(ids, kind, options), overview = await askModel("overview");
  return {...context, model, config: model.config, ids, labels: context.labels.slice(0, ids.length),
    token: Math.min(context.token, ids.length - 1), ask: askModel, askAbout, overview, lastOverview: overview};
}

// --- the sheet -------------------------------------------------------------------------------------------------------

// Ask for the numbers of the pass, and lay them out. Colors are those of the last checkpoint.
async function loadSheet(context, {id}) {
  if (id === "training" && isRecorded()) return recordedSheet(context);
  const {token, labels, ids, model, config} = context;
  const first = Math.max(0, token - windowSize() + 1), last = model.checkpoints.at(-1);
  const isEarlierStep = !shownModel() && model.checkpoints.length > 1 && shownStep() !== last;
  const [{tensors}, reference, {tensors: predictions}, {tensors: {logits}}] = await Promise.all([
    context.ask("machine", {token, first}),
    isEarlierStep ? ask(question("machine", ids, {token, first, step: last})).catch(() => null) : null,
    context.ask("token", {token}), context.ask("logits", {token})]);
  const {lens_ids: best, lens_probabilities: p} = predictions;
  const {layer, head} = storyHead(context), opened = id === "neuron" ? config.n_layer - 1 : layer;
  const layout = machineLayout(config, {n: token - first + 1, isEarlier: first > 0, layer: opened, head});
  const probabilities = softmax(logits.data.slice()); // of the model's padding, too, as in the logit lens
  const next = argsort(probabilities.slice(0, model.vocab_size)).slice(0, SHOWN_BARS);
  const draw = drawAfter(logits.data, drawnSteps(context), model);
  return makeSheet(layout, tensors, reference?.tensors ?? tensors, {
    config, first, labels: labels.slice(first, token + 1).map(visible),
    lens: range(best.shape[0]).map(s => ({label: pieces[rowOf(best, s)[0]], probability: rowOf(p, s)[0],
      isNext: rowOf(best, s)[0] === ids[token + 1]})),
    next: next.map(id => [id, probabilities[id]]), draw, chosen: draw.drawn.id,
  });
}

// The number of tokens that were drawn before the followed one.
function drawnSteps({ids, token}) {
  return state.ids ? Math.max(0, state.loop_step - (ids.length - token - 1)) : 0;
}

// Whether only the attention of the first text was recorded during the training: a file has one checkpoint.
function isRecorded() {
  const {training, checkpoints} = info.models[0];
  return Boolean(training) && checkpoints.length < 2;
}

// The index of the shown step of the recorded ones, by default the last.
function recordedStep() {
  const last = info.models[0].training.steps.length - 1;
  return state.story_step < 0 ? last : Math.min(state.story_step, last);
}

// A sheet with the recorded attention and predictions of a step, without tiles.
function recordedSheet({config}) {
  const {ids, token, first, weights, earlier, guess_ids, guess_probabilities} = info.models[0].training;
  const index = recordedStep(), n = token - first + 1;
  const layout = {...machineLayout(config, {n, isEarlier: first > 0, layer: 0, head: 0}), tiles: []};
  const tensors = {weights: {data: Float32Array.from(weights[index].flat(2))}, earlier: {data: earlier[index].flat()}};
  const next = guess_ids[index].map((id, i) => [id, guess_probabilities[index][i]]), [[guess, probability]] = next;
  return makeSheet(layout, tensors, {}, {
    config, first, labels: ids.slice(first, token + 1).map(id => visible(pieces[id])), next, chosen: null,
    lens: [...Array(2 * config.n_layer), {label: pieces[guess], probability, isNext: guess === ids[token + 1]}],
  });
}

// What is drawn: the layout, the tensors of the answer to "machine", and the ends of the color scale of each row of
// tiles. They are those of `reference`, the answer for the last checkpoint, so that a color means the same at all
// checkpoints. One number of a hundred is beyond them: a single large channel would make all others pale.
//
// facts: config; first (token of the window); labels (of its tokens); lens (by state: {label, probability, isNext}, the
// prediction if the model stopped there); next ([id, probability], the most likely first); chosen (the id of the drawn
// token, or null) and draw (how it was drawn, by drawAfter).
function makeSheet(layout, tensors, reference, facts) {
  const sheet = {layout, tensors, ...facts, bitmaps: new Map(), limits: new Map(), overview: null, palette: palette()};
  const rows = new Map(); // their magnitudes
  for (const {row, tensor, offset, count} of layout.tiles) {
    if (!rows.has(row)) rows.set(row, []);
    rows.get(row).push(...reference[tensor].data.subarray(offset, offset + count).map(Math.abs));
  }
  for (const [row, sizes] of rows) {
    const sorted = sizes.filter(Number.isFinite).sort((a, b) => a - b);
    sheet.limits.set(row, Math.max(1e-30, sorted[Math.ceil(COLORED * (sorted.length - 1))] ?? 0));
  }
  return sheet;
}

function wholeSheet({layout: {width, height}}) {
  return {x: 0, y: 0, width: width + 20, height: height + 12};
}

// --- its numbers -----------------------------------------------------------------------------------------------------

function tileValues({tensors}, {tensor, offset, count}) {
  return tensors[tensor].data.subarray(offset, offset + count);
}

function cellColor(sheet, tile, k) {
  const x = tileValues(sheet, tile)[k];
  return Number.isFinite(x) ? colorOf("signed", x / sheet.limits.get(tile.row)) : palette().missing;
}

// The colors of the cells of a tile, as pixels of a canvas.
function cellPixels(sheet, tile) {
  const colors = pixelScale("signed"), missing = pixelOf(palette().missing), max = sheet.limits.get(tile.row);
  return Uint32Array.from(tileValues(sheet, tile), x => Number.isFinite(x)
    ? colors[Math.round(1023 * positionOnScale("signed", x / max))] : missing);
}

function bitmapOf(sheet, tile) {
  let bitmap = sheet.bitmaps.get(tile);
  if (!bitmap) {
    const max = sheet.limits.get(tile.row);
    bitmap = imageOf(tileValues(sheet, tile), tile.rows, tile.columns, "signed", x => x / max);
    sheet.bitmaps.set(tile, bitmap);
  }
  return bitmap;
}

// The weights of the followed token in a head: of the window's tokens, and of all earlier ones.
function weightsOf({tensors: {weights, earlier}, layout: {n}, config: {n_head}}, {layer, head}) {
  const index = layer * n_head + head;
  return {weights: weights.data.subarray(index * n, (index + 1) * n), before: earlier.data[index]};
}

function sheetTitle(context, {tensors, layout: {n}}) {
  if (!tensors.states) return "The recorded attention of the first text";
  return `Token ${tokenAt(context, context.token)}${n > 1 ? ` and the ${countTokens(n - 1)} before it` : ""}`;
}

// All drawn numbers, for the export.
function sheetTable({names}, sheet) {
  return {
    columns: ["vector", "token", "index", "number"],
    rows: sheet.layout.tiles.flatMap(tile => Array.from(tileValues(sheet, tile), (value, index) =>
      [vectorName(tile), names[sheet.first + tile.column], index, value])),
  };
}

const VECTOR_NAMES = {
  states: ({state}) => state ? `E after ${stateName(state)}` : "E, embedding",
  q: ({layer, head}) => `query of head ${layer}.${head}`,
  k: ({layer, head}) => `key of head ${layer}.${head}`,
  v: ({layer, head}) => `value of head ${layer}.${head}`,
  z: ({layer, head}) => `result of head ${layer}.${head}`,
  attention: ({layer}) => `ΔE of attention ${layer}`,
  hidden: ({layer}) => `neurons of layer ${layer}`,
  mlp: ({layer}) => `ΔE of MLP ${layer}`,
};

function vectorName(tile) {
  return VECTOR_NAMES[tile.tensor](tile);
}

// The operations of the pass, in the order of the computation: what the sheet shows, for those who cannot see it.
function passInWords({labels, token}, sheet) {
  const {layout: {layers, heads, n}, first, tensors: {hidden}, lens, config: {n_embd, n_layer}} = sheet, lines = [];
  const prediction = s => `${quoted(lens[s].label)} (${percent(lens[s].probability)})`;
  if (hidden) {
    lines.push(`${quoted(labels[token])} becomes a vector of ${n_embd} numbers, which would predict ${prediction(0)}.`);
  }
  layers.forEach((layer, i) => {
    const skipped = layer - (i ? layers[i - 1] + 1 : 0);
    if (skipped) lines.push(`${counted(skipped, "layer")} between, not shown.`);
    for (const head of heads) {
      const {weights, before} = weightsOf(sheet, {layer, head}), order = argsort(weights).slice(0, 2);
      const parts = order.map(t => `${percent(weights[t])} of ${quoted(sheet.labels[t])} at ${first + t}`);
      if (before) parts.push(`${percent(before)} of earlier tokens`);
      lines.push(`Head ${layer}.${head} takes ${parts.join(", ")}.`);
    }
    if (!hidden) return;
    const activations = hidden.data.subarray((layer * n + n - 1) * 4 * n_embd, (layer * n + n) * 4 * n_embd);
    lines.push(`After attention ${layer}, it would predict ${prediction(2 * layer + 1)}.`,
      `${short(activations.filter(x => x > 0).length)} of ${counted(activations.length, "neuron")} of layer ${layer} `
      + `are active; then it would predict ${prediction(2 * layer + 2)}.`);
  });
  if (layers.at(-1) < n_layer - 1) lines.push("The last layers are not shown.");
  lines.push(hidden ? `The random number chooses ${quoted(pieces[sheet.chosen])}.`
    : `It would predict ${prediction(2 * n_layer)}.`);
  return lines;
}
