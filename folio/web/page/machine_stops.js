// The stops of the story: places of the sheet that the camera shows. Each has a question as its title, at most three
// sentences with the numbers of this model, an act, the terms in the sentences, a thing to try, and a link to a view.
//
// show(context, sheet) returns {focus (a rectangle of the sheet), words, act, action, more, lit (heads), extra (an
// element), rises (whether the drawn token goes back to the top), isOverture (whether the first pass is played)}.

const STOPS = [];
const STORY_NEIGHBORS = 5; // of a token: the nearest ones, at most
const LOOKS_BACK = 0.3; // attention to a token some places back, on average, from which on a head is about it
const MAX_CANDIDATES = 8; // heads that are searched for one that looks some places back

// The token of the story if none is selected: the last one in a word, before another one. The model's expectation can
// be compared with the token after it.
function storyToken(labels) {
  const token = labels.slice(0, -1).findLastIndex(label => /[\p{L}\p{N}]/u.test(label));
  return token < 0 ? labels.length - 1 : token;
}

// The head of the story: the strongest previous-token head of the last checkpoint, or the one that the reader has
// chosen after it. share: the attention that it gives to the previous token, at the shown checkpoint and at the last one.
function storyHead({overview, lastOverview, config: {n_head}}) {
  const [now, last] = [overview, lastOverview].map(({tensors}) => tensors.score_previous.data), order = argsort(last);
  const place = order[((state.story_head % order.length) + order.length) % order.length];
  return {layer: Math.floor(place / n_head), head: place % n_head, share: now[place], lastShare: last[place]};
}

function listed(ids) {
  return ids.map(id => quoted(pieces[id])).join(", ");
}

// A rectangle with a margin.
function withMargin({x, y, width, height}, right, down = right) {
  return {x: x - right, y: y - down, width: width + 2 * right, height: height + 2 * down};
}

function tilesOf({layout: {tiles}}, fields) {
  return tiles.filter(tile => Object.entries(fields).every(([name, value]) => tile[name] === value));
}

function stateTile(sheet, index) {
  return tilesOf(sheet, {tensor: "states", state: index}).at(-1);
}

function laneOf({layout: {lanes}}, {layer, head}) {
  return lanes.find(lane => lane.layer === layer && lane.head === head);
}

// The part of a lane from a column of the window to the followed token.
function laneBox({layout: {X, followed, n}}, lane, column) {
  const x = X(clamp(column, 0, Math.max(0, n - 4)));
  return {x, y: lane.y - 4, width: followed + TILE - x, height: LANE - 8};
}

// The average attention of a head to the token `distance` places back.
async function lookingBack(context, {layer, head}, distance) {
  const {tensors: {weights}} = await context.ask("head", {layer, head}), [T] = weights.shape;
  return T > distance ? mean(range(T - distance).map(t => weights.data[(t + distance) * T + t])) : 0;
}

// The heads that look one, two, and three tokens back: [{layer, head, distance, share}], found by measuring.
async function readingHeads(context) {
  const {overview: {tensors: {score_offset: {data: offsets}}}, config: {n_head}} = context, found = [];
  for (const distance of [1, 2, 3]) {
    const places = [...offsets.keys()].filter(place => offsets[place] === distance).slice(0, MAX_CANDIDATES);
    const heads = await Promise.all(places.map(async place => {
      const head = {layer: Math.floor(place / n_head), head: place % n_head, distance};
      return {...head, share: await lookingBack(context, head, distance)};
    }));
    const [best] = heads.sort((a, b) => b.share - a.share);
    if (best?.share >= LOOKS_BACK) found.push(best);
  }
  return found;
}

const COUNTS = ["", "one", "two", "three"];

function describeReading(heads) {
  if (heads.length < 2) return "";
  const join = words => `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
  const names = join(heads.map(({layer, head}) => `${layer}.${head}`));
  const places = join(heads.map(({distance}) => COUNTS[distance]));
  const shares = join(heads.map(({share}) => percent(share)));
  const unit = info.models[0].tokenizer === "char" && !isMusic() ? "letter" : "token";
  return `Heads ${names} (layer.head) look ${places} ${unit}s back, with ${shares} of their attention.`;
}

// Whether a head finds a key by its place or by its token: its weight if another token were there.
async function describeMatch(context, {layer, head}, key, weight) {
  const {ids, token} = context, other = ids.find(id => id !== ids[key] && id !== ids[token]);
  if (key === token || other === undefined) return "";
  const changed = ids.map((id, t) => t === key ? other : id);
  const {tensors: {weights}} = await context.askAbout(changed, "head", {layer, head});
  const after = rowOf(weights, token)[key];
  const [still, found, ignored] = after > weight / 2 ? ["still", "place", "token"] : ["only", "token", "place"];
  return `With ${quoted(pieces[other])} in the place of ${quoted(pieces[ids[key]])}, it would ${still} get `
    + `${percent(after)}: this head seems to look for a ${found}, not for a ${ignored}.`;
}

// --- 0. the machine --------------------------------------------------------------------------------------------------

STOPS.push({
  id: "machine", name: "Machine", title: "How does this model choose the next token?", closer: "map",
  terms: ({config: {n_layer, n_head, n_embd}}) => [
    ["Column", "a token. Only the last columns are drawn; the text before them is one column."],
    ["Row", `one computation, the same for every token. This model has ${counted(n_layer, "layer")} of `
      + `${counted(n_head, "head")}, and vectors of ${n_embd} numbers.`],
    ["Cell", "one number of the model, orange if it is positive and blue if it is negative. Each row has its own "
      + "scale, and its largest hundredth has the strongest color. Drag, scroll, or pinch to read the numbers."],
  ],
  show(context, sheet) {
    const {labels, token} = context, [[best, p]] = sheet.next;
    return {
      focus: wholeSheet(sheet), isOverture: true,
      words: [
        `It has read ${quoted(labels.slice(Math.max(0, token - 11), token + 1).map(inLine).join(""))} and expects `
          + `${quoted(pieces[best])} (${percent(p)}).`,
        "A column is a token. The way down is the way through the model: in each layer, heads fetch something from "
          + "earlier tokens (the arrows), and neurons process each token alone.",
        `The thick line is the vector of ${quoted(labels[token])}, to which every part adds. At its right is what the `
          + "model would predict if it stopped there.",
      ],
      action: ["Write on", writeOn],
    };
  },
});

// --- 1. tokens -------------------------------------------------------------------------------------------------------

const TOKEN_WORDS = {
  char: "one character. ␣ is a space, and ⏎ is the end of a line.", byte: "one byte of the text.",
  midi: "one event of the music: an instrument, a note, or a time to wait.",
};

function swapCase(text) {
  return [...text].map(c => c === c.toUpperCase() ? c.toLowerCase() : c.toUpperCase()).join("");
}

STOPS.push({
  id: "tokens", name: "Tokens", title: "What does the model see?", closer: "tokens",
  terms: ({model: {tokenizer}}) => [
    ["Token", `the unit that the model reads and writes, here ${TOKEN_WORDS[tokenizer] ?? "a word or a part of one."}`],
    ["Colors of the text above", "how surprised the model was by each token. Stop 9 says how this is measured."],
  ],
  show(context, sheet) {
    const {ids, labels, token, model} = context, {layout} = sheet, x = layout.X(Math.max(0, layout.n - 6));
    return {
      focus: {x, y: 0, width: layout.followed + 1.6 * PITCH - x, height: TOP + 70},
      words: [
        `A GPT does one thing: it predicts the next token. It sees no ${isMusic() ? "notes" : "letters"}, only ids: `
          + `numbers from 0 to ${short(model.vocab_size - 1)}. ${quoted(labels[token])} is id ${ids[token]}.`,
        "Neighboring ids mean nothing: the model has to learn what each token is."
          + (isMusic() ? "" : " Upper and lower case have unrelated ids."),
        token + 1 < ids.length ? `After ${quoted(labels[token])}, the text goes on with ${quoted(labels[token + 1])}, `
          + "which the model cannot see." : "",
      ],
      action: isMusic() ? ["Leave out the first event", () => change({ids: ids.slice(1).join(",")})]
        : [state.story_swapped ? "Swap the case back" : "Swap upper and lower case", () =>
          change({text: swapCase(textOf(ids)), ids: "", story_swapped: 1 - state.story_swapped})],
      more: isMusic() && ["roll", "Piano roll"],
    };
  },
});

// --- 2. vectors ------------------------------------------------------------------------------------------------------

// The standard deviation of the cosine of two random vectors with n channels.
function chanceOf(n) {
  return Number((1 / Math.sqrt(n)).toFixed(2));
}

const POSITION_WORDS = {
  learned: place => `A second vector, for position ${place}, is added, so the model knows where the token is.`,
  sinusoidal: place => `Sines and cosines of position ${place} are added, so the model knows where the token is.`,
  rotary: place => `The position is not added: queries and keys turn with it, here to position ${place}.`,
  relative: () => "The position is not added: each head has a bias for the distance of two tokens.",
  alibi: () => "The position is not added: each head subtracts a slope times the distance of two tokens.",
  none: () => "This model has no positions: only the mask tells it what comes before.",
};

STOPS.push({
  id: "vector", name: "Vectors", title: "What is a token to the model?", closer: "embedding",
  terms: ({config: {n_embd}}) => [
    ["Embedding", "the learned vector of a token: its row in a table with one row per id."],
    ["Near", "a small angle between two vectors: a cosine of 1 is the same direction. Vectors that have nothing to do "
      + `with each other have cosines of about ±${chanceOf(n_embd)}.`],
  ],
  async show(context, sheet) {
    const {ids, labels, token, config} = context, place = token - context.starts[token];
    const [{tensors: {embedding, position: added, states}}, {tensors: {nearest, similarity}}] = await Promise.all([
      context.ask("token", {token}), context.ask("vocabulary", {row: ids[token]})]);
    const near = range(nearest.data.length).filter(i => nearest.data[i] !== ids[token]).slice(0, STORY_NEIGHBORS);
    const clear = near.filter(i => similarity.data[i] > 3 * chanceOf(config.n_embd));
    const isAdded = ["learned", "sinusoidal"].includes(config.position), tile = stateTile(sheet, 0);
    return {
      focus: withMargin({...tile, height: tile.height + 6, y: tile.y - 6}, 20, 14),
      words: [
        `Each id selects a row of a learned table: ${config.n_embd} numbers, a point in space.`,
        clear.length ? `Training moved tokens with similar use together: clearly near ${quoted(labels[token])} `
          + `${clear.length > 1 ? "are" : "is"} ${listed(clear.map(i => nearest.data[i]))}.`
          : `No token is clearly near ${quoted(labels[token])}: its use is its own.`,
        POSITION_WORDS[config.position](place),
      ],
      act: isAdded && addAct({before: embedding.data, added: added.data, after: rowOf(states, 0),
        names: [`embedding of ${visible(labels[token])}`, `position ${place}`, "E, their sum"], tiles: [null, null]}),
      action: token ? ["Select the token before it", () => selectToken(token - 1)]
        : ["Select the token after it", () => selectToken(1)],
    };
  },
});

// --- 3. queries and keys ---------------------------------------------------------------------------------------------

const nextHead = () => change({story_head: state.story_head + 1});
const previousHead = () => change({story_head: Math.max(0, state.story_head - 1)});

function describeHead({share, lastShare}) {
  if (state.story_head) return "It";
  if (lastShare < LOOKS_BACK) return "No head of this model looks at the previous token. The one that does it most";
  return share < LOOKS_BACK ? "At the last checkpoint, it is the strongest previous-token head; here, it"
    : "It is the strongest previous-token head of this model: it";
}

STOPS.push({
  id: "query", name: "Queries", title: "What is the token looking for?", closer: "qkv",
  terms: ({config: {n_layer, n_head, n_embd}}) => [
    ["Layer", `a round of attention and an MLP. This model has ${n_layer}, counted from 0.`],
    ["Head", `one of ${n_head} searches per layer that run side by side, each with its own learned matrices.`],
    ["Query, key", "the vector of a token times one of these matrices, and times another. As in a library, the query "
      + "is a question, and a key is the title of a book. The value, at stop 5, is what the book says."],
    ["Score", `the sum of their products, divided by √${n_embd / n_head}: long vectors would have large scores.`],
    ["LayerNorm", "before each part, the vector is shifted and scaled to a mean of 0 and a standard deviation of 1, "
      + "and each number is multiplied by a learned weight. So a long vector is not louder than a short one."],
  ],
  async show(context, sheet) {
    const {labels, token, config} = context, D = config.n_embd / config.n_head;
    const place = storyHead(context), {layer, head, share} = place, lane = laneOf(sheet, {layer, head});
    const {tensors: {q, k, scores, bias, weights}} = await context.ask("head", {layer, head});
    const row = rowOf(weights, token), best = argsort(row)[0];
    const column = best - sheet.first; // negative: not drawn
    const ownBias = bias ? rowOf(bias, token)[best] : null, score = rowOf(scores, token)[best] + (ownBias ?? 0);
    const tile = (tensor, column) => tilesOf(sheet, {tensor, layer, head, column})[0];
    return {
      focus: withMargin(laneBox(sheet, lane, column - 1), 6, 2), lit: [{layer, head}],
      words: [
        `In this head, ${layer}.${head}, each token has a query of ${D} numbers, what it looks for, and a key, what it `
          + "can be found by. The product of the two is the score of a pair: "
          + `${quoted(labels[token])} finds ${quoted(labels[best])}.`,
        await describeMatch(context, {layer, head}, best, row[best]),
        token === 0 ? "The first token has no other token to look at: select a later one."
          : `${describeHead(place)} gives ${percent(share)} of its attention to the token just before, on average over `
            + "this text.",
      ],
      act: scoreAct({query: rowOf(q, token), key: rowOf(k, best),
        names: [visible(labels[token]), visible(labels[best])],
        tiles: [tile("q", sheet.layout.n - 1), tile("k", column) ?? null],
        score, bias: ownBias, isScaled: Boolean(state.scale)}),
      action: ["Try the next head in this order", nextHead],
      more: ["all-heads", "All heads"],
    };
  },
});

// --- 4. the mask and the softmax -------------------------------------------------------------------------------------

STOPS.push({
  id: "mask", name: "Weights", title: "How much may it take from each?", closer: "attention-table",
  terms: () => [
    ["Attention weights", "how much a token takes from each token. (The learned numbers are called weights, too.)"],
    ["Softmax", "takes exp of each score and divides by their sum: positive weights that sum to 1."],
    ["Mask", "the rule that a token sees itself and what came before it. In training, the next token is the answer, so "
      + "no token may look ahead: the mask sets the scores of later tokens to −∞, and exp(−∞) is exactly 0."],
  ],
  async show(context, sheet) {
    const {labels, token} = context, {layer, head} = storyHead(context), {first} = sheet;
    const [{tensors: {scores, bias, weights}}, heads] = await Promise.all([context.ask("head", {layer, head}),
      readingHeads(context)]);
    const row = rowOf(weights, token), best = argsort(row)[0], later = labels.length - 1 - token;
    const biased = rowOf(scores, token).map((x, t) => x + (bias ? rowOf(bias, token)[t] : 0));
    const lanes = sheet.layout.lanes.filter(lane => lane.layer === layer);
    const isReading = heads.some(other => other.layer === layer && other.head === head);
    return {
      focus: withMargin(around(...lanes.map(lane => laneBox(sheet, lane, sheet.layout.n - 7))), 10, 4),
      lit: isReading ? heads : [{layer, head}],
      words: [
        `The softmax turns the scores of ${quoted(labels[token])} into weights that sum to 1, the widths of the `
          + `arrows: the largest of head ${layer}.${head} is ${percent(row[best])}, for ${quoted(labels[best])}.`,
        describeMask(later, quoted(labels[token]), sumOf(row)),
        describeReading(heads),
      ],
      act: Number.isFinite(row[best]) && state.mask === "before" && softmaxAct({
        scores: biased.map((x, t) => isHidden(context, token, t) ? -Infinity : x), weights: row, first,
        names: labels.slice(first, token + 1).map(visible),
        result: `the largest is ${percent(row[best])}, of ${quoted(labels[best])}`}),
      action: ["Try the next head in this order", nextHead],
    };
  },
});

// What the mask does to the tokens after the followed one. sum: of the weights.
function describeMask(later, name, sum) {
  if (state.mask === "off") return "The mask is off: the weights include those of later tokens.";
  if (state.mask === "after") return `The mask is after the softmax, so the weights sum to ${percent(sum)} only.`;
  const tokens = later === 1 ? "token" : `${short(later)} tokens`;
  return (later ? `The ${tokens} after ${name} got` : "A later token would get")
    + " the score −∞ and the weight 0: no token may see what it has to predict.";
}

// --- 5. values -------------------------------------------------------------------------------------------------------

STOPS.push({
  id: "values", name: "Values", title: "What does the token take?", closer: "weighted-sum",
  terms: () => [
    ["Value", "what a token passes on to those that find it: its vector times a third matrix."],
    ["Residual stream", "E, the vector of a token, to which each layer adds. Stop 2 shows where it starts."],
  ],
  async show(context, sheet) {
    const {labels, token, config} = context, {layout, first} = sheet;
    const {layer, head} = storyHead(context), lane = laneOf(sheet, {layer, head});
    const isOff = state.heads_off.split(",").includes(`${layer}.${head}`);
    const {tensors: {v, z, weights}} = await context.ask("head", {layer, head}), row = rowOf(weights, token);
    const order = argsort(row).filter(t => row[t] > 0);
    const shown = order.slice(0, ADDED_VALUES), rest = order.slice(ADDED_VALUES);
    const others = rest.reduce((sum, t) => plus(sum, rowOf(v, t).map(x => row[t] * x)), new Float32Array(z.shape[1]));
    const taken = shown.slice(0, 2).map(t => `${percent(row[t])} of the value of ${quoted(labels[t])}`);
    return {
      focus: withMargin(laneBox(sheet, lane, layout.n - 6), 8, 4), lit: [{layer, head}],
      words: [
        `Each token has a third vector, its value: what it passes on. ${quoted(labels[token])} takes `
          + `${taken.join(", ")}, and so on, and the sum is what the head found.`,
        `A matrix turns the results of all ${config.n_head} heads into ΔE, which is added to the vector of the token, `
          + "where the ⊕ is: E becomes E + ΔE.",
        `This happens in each of the ${counted(config.n_layer, "layer")}, and after each time an MLP adds its own.`,
      ],
      act: !isOff && shown.length > 0 && valuesAct({
        items: shown.map(t => ({label: `value of ${visible(labels[t])}`, vector: rowOf(v, t), weight: row[t],
          tile: t < first ? null : tilesOf(sheet, {tensor: "v", layer, head, column: t - first})[0]})),
        others, countOfOthers: rest.length, result: rowOf(z, token)}),
      action: ["Try the next head in this order", nextHead],
      more: ["stream", "Residual stream"],
    };
  },
});

// --- 6. neurons ------------------------------------------------------------------------------------------------------

STOPS.push({
  id: "neuron", name: "Neurons", title: "What does the MLP add?", closer: "mlp",
  terms: () => [
    ["MLP", "two matrices with an activation function between them: the second half of each layer."],
    ["Neuron", "one of the numbers between the matrices, its activation: large if the token fits its weights, near 0 "
      + "otherwise. It adds its own vector to E, times the activation."],
  ],
  async show(context, sheet) {
    const {labels, token, config} = context, layer = config.n_layer - 1;
    const isOff = state.mlps_off.split(",").includes(String(layer)), [[guess]] = sheet.next;
    const [{facts: {neurons}, tensors}, bias] = await Promise.all([context.ask("layer", {layer, token}),
      parameterRow(context, `transformer.h.${layer}.mlp.c_proj.bias`, 0)]);
    const hidden = tensors.hidden.data, outputs = tensors.neuron_outputs;
    const countOfActive = hidden.filter(x => x > 0).length, shown = range(neurons.length).slice(0, ADDED_VALUES);
    const votes = neurons.map(({up}) => up.find(([id]) => id === guess)?.[1] ?? 0);
    const voters = votes.filter(x => x > 0).length;
    const place = argsort(votes)[state.story_neuron % Math.max(1, voters)], {index, up} = neurons[place];
    const alsoRaised = up.map(([id]) => id).filter(id => id !== guess).slice(0, 3);
    const values = rowOf(tensors.neuron_activations, place), top = argsort(Array.from(values, Math.abs)).slice(0, 3);
    const tiles = [...tilesOf(sheet, {tensor: "hidden", layer}).slice(-3), ...tilesOf(sheet, {tensor: "mlp", layer}),
      stateTile(sheet, 2 * layer + 2)];
    return {
      focus: withMargin(around(...tiles), 10, 8),
      words: [
        `After attention, each token is processed alone by ${short(hidden.length)} neurons per layer. Of those in the `
          + `last layer, ${short(countOfActive)} are active (positive) for ${quoted(labels[token])}.`,
        votes[place] > 0 ? `Neuron ${index} raises the score of ${quoted(pieces[guess])}, which the model expects, by `
          + `${short(votes[place])}; it also raises ${listed(alsoRaised)}.`
          : "None of the strongest neurons votes clearly for what the model expects.",
        `In this text, it is most active at ${top.map(t => `${quoted(labels[t])} (${t})`).join(", ")}.`,
      ],
      act: !isOff && neuronsAct({
        items: shown.map(i => ({label: `neuron ${neurons[i].index}`, vector: rowOf(outputs, i),
          text: `× ${short(hidden[neurons[i].index])}`})),
        all: tensors.written.data, bias, result: tensors.mlp.data, countOfOthers: hidden.length - shown.length}),
      action: voters > 1 ? ["Show the next neuron", () => change({story_neuron: state.story_neuron + 1})]
        : ["Select the token before it", () => selectToken(Math.max(0, token - 1))],
    };
  },
});

// --- 7. the stem -----------------------------------------------------------------------------------------------------

STOPS.push({
  id: "guess", name: "Layers", title: "When does the model know?", closer: "stream",
  terms: () => [["Logit lens", "reading a vector in the middle of the model as if it were the final one."]],
  async show(context, sheet) {
    const {ids, labels, token} = context, next = ids[token + 1], {width, height} = sheet.layout;
    const {tensors} = await context.ask("token", {token});
    const {lens_ids: best, lens_probabilities: p, next_probability: nextP, states} = tensors;
    const [count, shown] = best.shape, last = best.data[(count - 1) * shown];
    const known = range(count).findIndex(s => range(count - s).every(i => best.data[(s + i) * shown] === last));
    const layer = Math.max(0, Math.ceil(known / 2) - 1), added = known % 2 || !known ? "attention" : "mlp";
    const index = 2 * layer + (added === "mlp" ? 2 : 1), name = stateName(index); // of the state that the act adds up
    const {tensors: part} = await context.ask("layer", {layer, token});
    return {
      focus: {x: 0, y: 0, width, height: height - BARS},
      words: [
        "At the right of each sum is what the model would predict if it stopped there."
          + (best.data[0] === ids[token]
            ? ` At the start, the vector is that of ${quoted(labels[token])}, so it predicts itself.` : ""),
        `${known === count - 1 ? "Only in the last state" : `From ${stateName(known)} on`}, ${quoted(pieces[last])} is `
          + `the top guess. It ends with ${percent(p.data[(count - 1) * shown])}.`,
        next === undefined ? "" : `The text goes on with ${quoted(pieces[next])}: ${percent(nextP.data[0])} at the `
          + `start, ${percent(nextP.data.at(-1))} at the end.`,
      ],
      act: addAct({before: rowOf(states, index - 1), added: part[added].data, after: rowOf(states, index),
        names: ["E", `ΔE of ${name}`, "E + ΔE"],
        tiles: [stateTile(sheet, index - 1) ?? null, tilesOf(sheet, {tensor: added, layer})[0] ?? null]}),
      action: token + 1 < labels.length ? ["Go to the next token", () => selectToken(token + 1)]
        : ["Go to the token before", () => selectToken(Math.max(0, token - 1))],
    };
  },
});

// --- 8. the choice ---------------------------------------------------------------------------------------------------

STOPS.push({
  id: "choice", name: "Choice", title: "How does the model choose?", closer: "loop",
  terms: () => [
    ["Logits", "the scores of all tokens: products of the final vector with their embeddings. The softmax makes them "
      + "probabilities."],
    ["Temperature", "the logits are divided by it before the softmax. Below 1, likely tokens become more likely; above "
      + "1, the choice is more random; at 0, the most likely token is taken."],
    ["Seed", "a number that determines all random numbers: the same seed draws the same text, as in sample.py."],
  ],
  show(context, sheet) {
    const {labels, token, model} = context, {u, parts, drawn} = sheet.draw, [[best, p]] = sheet.next;
    const {bars, followed, sums} = sheet.layout, top = sums.at(-1).y - 10;
    const temperature = slider("temperature", {min: 0, max: 2, step: 0.05, value: state.temperature,
      testid: "story-temperature", move: () => {}, change: ({target}) => change({temperature: +target.value})});
    return {
      focus: {x: 0, y: top, width: Math.max(bars.width, followed + 2 * PITCH), height: bars.y + bars.height + 20 - top},
      extra: controls(temperature),
      words: [
        `The final vector is compared with all ${short(model.vocab_size)} tokens. ${quoted(pieces[best])} has the `
          + `highest score: ${percent(p)} at temperature 1 (the bars).`,
        "Does it take the best one? No: the temperature sharpens or flattens the probabilities, and then a random "
          + `number, here ${u.toFixed(4)} from the seed ${state.seed}, picks a place on the line from 0 to 1.`,
        `The token there, ${quoted(pieces[drawn.id])}, follows ${quoted(labels[token])}`
          + (token + 1 < labels.length ? ", instead of the rest of the text," : "")
          + " and becomes a new column at the top.",
      ],
      act: choiceAct({parts, u, drawn: drawn.id, temperature: state.temperature}), rises: true,
      action: ["Draw a token", () => appendDrawn(context, sheet)],
      more: ["output", "Next token"],
    };
  },
});

// --- 9. training -----------------------------------------------------------------------------------------------------

const STORY_SNAPSHOTS = 8; // steps whose loss is shown, at most

STOPS.push({
  id: "training", name: "Training", title: "How did it learn this?", closer: "checkpoints",
  available: () => !shownModel() && (info.models[0].checkpoints.length > 1 || info.models[0].training),
  terms: () => [
    ["Loss", "−ln of the probability of the token that came, in nats: 0 if the model was certain of it."],
    ["Step", "some texts, their loss, its gradient, and a small change of all weights that lowers the loss."],
    ["Weights", "here: all learned numbers of the model."],
  ],
  async show(context, sheet) {
    const {model} = context, {ids, steps, losses} = isRecorded() ? model.training : await trainingOf(context);
    const means = losses.map(mean), isBetter = means.at(-1) < means[0];
    const text = isRecorded() ? "the first text of this file" : "this text";
    return {
      focus: wholeSheet(sheet),
      extra: isRecorded() && controls(slider("recorded step", {min: 0, max: steps.length - 1, value: recordedStep(),
        testid: "story-step", read: i => short(steps[i]), move: i => change({story_step: i})})),
      words: [
        `A blind guess among ${short(model.vocab_size)} tokens has a loss of ln ${short(model.vocab_size)} = `
          + `${short(Math.log(model.vocab_size))} nats. `
          + (ids.length > 1 ? `On ${text}, the loss ${isBetter ? "fell" : "rose"} from ${short(means[0])} at step `
            + `${short(steps[0])} to ${short(means.at(-1))} at step ${short(steps.at(-1))}`
            + (isBetter ? "." : ": it is unlike the texts of the training.") : ""),
        "The gradient, computed backward through the model, tells for each of its numbers how the loss changes with "
          + "it. Each step moves it a little, so that the texts of the training become less surprising.",
        "Play the training: which arrows appear first?"
          + (isRecorded() ? " This file has the weights of one step, so that only the arrows and predictions of the "
            + "others are known." : ""),
      ],
      action: ["Play the training", playTraining],
    };
  },
});

// The losses of the text at up to STORY_SNAPSHOTS steps of the training.
async function trainingOf({ids, model: {checkpoints}}) {
  const last = checkpoints.length - 1, count = Math.min(STORY_SNAPSHOTS, checkpoints.length);
  const steps = range(count).map(i => checkpoints[Math.round(i * last / (count - 1))]);
  const overviews = await Promise.all(steps.map(step => ask(question("overview", ids, {step}))));
  return {ids, steps, losses: overviews.map(({tensors}) => Array.from(tensors.loss.data))};
}
