// The story: scenes that follow the selected token through the model. Each has a question as its title, a picture, at
// most three sentences with the numbers of this model, a button that does the thing to try, and a link to a view.

const STORY_TOKENS = 14; // before and including the selected token, in pictures of attention
const GRID_CELL = 34; // in pixels
const STORY_NEIGHBORS = 5;

const canMove = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;

// Call frame(t) with t from 0 to 1, as long as the node is shown. Without motion, only frame(1).
async function animate(node, milliseconds, frame) {
  const start = performance.now();
  for (let t = 0; canMove() && t < 1 && (t === 0 || node.isConnected);) {
    frame(t);
    const now = await new Promise(requestAnimationFrame);
    t = (now - start) / milliseconds;
  }
  frame(1);
}

// The width of a picture in a pair of them, beside the words (see .scene and .pair in style.css).
function pairWidth() {
  const width = fitWidth(Infinity), stage = window.innerWidth > 1000 ? width - 360 : width;
  return stage > 892 ? (stage - 32) / 2 : stage;
}

// The positions of the tokens in pictures of attention.
function storyTokens({token}) {
  const first = Math.max(0, token - STORY_TOKENS + 1);
  return range(token - first + 1).map(i => first + i);
}

// The head of the story: the strongest previous-token head, or the one that the reader has chosen after it.
function storyHead({overview: {tensors: {score_previous: {data}}}, config: {n_head}}) {
  const order = argsort(data), place = order[state.story_head % order.length];
  return {layer: Math.floor(place / n_head), head: place % n_head, score: data[place]};
}

function quoted(label) {
  return `“${visible(label)}”`;
}

// --- 1. tokens -------------------------------------------------------------------------------------------------------

function swapCase(text) {
  return [...text].map(c => c === c.toUpperCase() ? c.toLowerCase() : c.toUpperCase()).join("");
}

const SCENES = [];

SCENES.push({
  id: "tokens", title: "What does the model see?", closer: "tokens",
  draw({ids, labels, token, model}) {
    const chips = div("chips", reachByKeys(ids.map((id, t) => element("button", {
      class: t === token ? "chip selected" : "chip", click: () => selectToken(t), "aria-pressed": String(t === token),
    }, visible(labels[t]), element("small", {}, id))), token));
    return {
      picture: picture("story-tokens", "The text as tokens, with their ids", () => ({
        columns: ["position", "token", "id"], rows: ids.map((id, t) => [t, labels[t], id]),
      }), chips),
      words: [
        `The text is ${countTokens(ids.length)}. The model sees no letters, only ids: numbers from 0 to `
          + `${short(model.vocab_size - 1)}.`,
        `The selected token ${quoted(labels[token])} is id ${ids[token]}.`,
        "Neighboring ids mean nothing: the model has to learn what each token is.",
      ],
      action: model.tokenizer === "midi" ? ["Leave out the first event", () => change({ids: ids.slice(1).join(",")})]
        : ["Swap upper and lower case", () => change({text: swapCase(textOf(ids)), ids: ""})],
    };
  },
});

// --- 2. vectors ------------------------------------------------------------------------------------------------------

SCENES.push({
  id: "vector", title: "What is a token to the model?", closer: "embedding",
  async draw(context) {
    const {ids, labels, names, token, config, model} = context, {position} = config;
    const [{tensors: {embedding, position: added, states}}, {tensors: vocabulary}, {tensors: {angles, bias}}] =
      await Promise.all([context.ask("token", {token}), context.ask("vocabulary", {row: ids[token]}),
        context.ask("positions")]);
    const isAdded = ["learned", "sinusoidal"].includes(position), start = rowOf(states, 0);
    const near = Array.from(vocabulary.nearest.data, (id, i) => [id, vocabulary.similarity.data[i]])
      .filter(([id]) => id !== ids[token]).slice(0, STORY_NEIGHBORS);
    const strips = vectorPicture("story-vector", `Token ${names[token]} as ${config.n_embd} numbers`, [
      {label: "embedding", vector: embedding.data}, isAdded && {label: `position ${token}`, vector: added.data},
      isAdded && {label: "sum", vector: start, rule: true},
    ].filter(Boolean), {textWidth: 10, width: pairWidth()});
    const isMusic = model.tokenizer === "midi", names5 = near.map(([id]) => quoted(pieces[id])).join(", ");
    return {
      picture: div("pair", div("", strips, positionPicture(context, angles, bias)),
        vocabularyPicture(context, vocabulary)),
      words: [
        `Each id selects a row of a learned table: ${config.n_embd} numbers, a point in space.`,
        isMusic ? "" : `Training moved tokens with similar use together: the nearest to ${quoted(labels[token])} are `
          + `${names5}.`,
        POSITION_WORDS[position](token),
      ],
      action: ["Select the token before it", () => selectToken(Math.max(0, token - 1))],
    };
  },
});

const POSITION_WORDS = {
  learned: token => `A second vector, for position ${token}, is added, so the model knows where the token is.`,
  sinusoidal: token => `Sines and cosines of position ${token} are added, so the model knows where the token is.`,
  rotary: token => `The position is not added: queries and keys turn with it, here to position ${token}.`,
  relative: () => "The position is not added: each head has a bias for the distance of two tokens.",
  alibi: () => "The position is not added: each head subtracts a slope times the distance of two tokens.",
  none: () => "This model has no positions: only the mask tells it what comes before.",
};

// The vocabulary's map, with lines from the selected token to its nearest.
function vocabularyPicture({ids, token}, {map, place, nearest, nearest_places: places}) {
  const width = Math.min(520, pairWidth()), height = Math.round(0.8 * width), id = ids[token];
  const all = new Map(range(map.shape[0]).map(i => [i, rowOf(map, i)])).set(id, place.data);
  const near = Array.from(nearest.data, (other, i) => [other, rowOf(places, i)]).filter(([other]) => other !== id)
    .slice(0, STORY_NEIGHBORS);
  near.forEach(([other, point]) => all.set(other, point));
  const points = [...all.values()], X = scaleOf(points.map(p => p[0]), 24, width - 24);
  const Y = scaleOf(points.map(p => p[1]), height - 24, 24), few = all.size <= 400;
  const text = (other, [x, y], attributes) => svg("text",
    {x: X(x), y: Y(y) + 4, "text-anchor": "middle", ...attributes}, visible(pieces[other]));
  return picture("story-map", "The vocabulary as the model sees it", () => ({
    columns: ["id", "token", "x", "y"], rows: [...all].map(([other, [x, y]]) => [other, pieces[other], x, y]),
  }), svg("svg", {width, height},
    [...all].filter(([other]) => other !== id && !near.some(([n]) => n === other)).map(([other, point]) => few
      ? text(other, point, {class: "soft"})
      : svg("circle", {cx: X(point[0]), cy: Y(point[1]), r: 1.5, fill: GRAY, opacity: 0.5})),
    near.map(([other, point]) => [
      svg("line", {x1: X(place.data[0]), y1: Y(place.data[1]), x2: X(point[0]), y2: Y(point[1]), stroke: BLUE,
        "stroke-width": 1.5}),
      text(other, point, {style: {fill: BLUE, fontWeight: 700}}),
    ]),
    svg("circle", {cx: X(place.data[0]), cy: Y(place.data[1]), r: 13, fill: LIGHT, stroke: ORANGE, "stroke-width": 2}),
    text(id, place.data, {style: {fontWeight: 700}})),
  `Two of its dimensions. Lines lead to the ${near.length} nearest tokens.`);
}

// A picture of the position method: arrows that turn, or biases by distance. Added vectors are strips.
function positionPicture({token, config: {n_head}, ...context}, angles, bias) {
  if (bias) {
    const {head} = storyHead({...context, config: {n_head}}), points = pointsOf(rowOf(bias, head).slice(0, token + 1));
    if (points.length < 2) return "";
    return chartPicture("story-bias", `Added to the scores of head ${head}`, [{name: "bias", points}],
      {width: fitWidth(430), height: 170, xTitle: "distance in tokens"});
  }
  if (!angles) return "";
  const pairs = Math.min(8, angles.shape[1]), size = 56;
  const shown = range(pairs).map(i => Math.floor(i * angles.shape[1] / pairs));
  const arrows = shown.map((pair, i) => svg("line", {x1: (i + 0.5) * size, y1: size / 2, stroke: BLUE,
    "stroke-width": 3, "marker-end": "url(#story-arrow)"}));
  const drawing = svg("svg", {width: pairs * size, height: size + 18}, arrowMarker("story-arrow", BLUE),
    shown.map((pair, i) => [svg("circle", {cx: (i + 0.5) * size, cy: size / 2, r: size / 2 - 4, fill: "none",
      stroke: PALE}), softText((i + 0.5) * size, size + 13, `pair ${pair}`, "middle")]), arrows);
  const turn = position => arrows.forEach((arrow, i) => {
    const angle = position * angles.data[(angles.shape[0] > 1 ? 1 : 0) * angles.shape[1] + shown[i]];
    arrow.setAttribute("x2", (i + 0.5) * size + (size / 2 - 10) * Math.cos(angle));
    arrow.setAttribute("y2", size / 2 - (size / 2 - 10) * Math.sin(angle));
  });
  turn(0);
  requestAnimationFrame(() => animate(drawing, 1200, t => turn(t * token)));
  return picture("story-rotary", `Turned to position ${token}`, () => ({
    columns: ["pair", "angle"], rows: shown.map(pair => [pair, angles.data[token * angles.shape[1] + pair]]),
  }), drawing, "Each pair of channels turns by its own angle per position: fast pairs see near tokens, slow ones far.");
}

function arrowMarker(id, fill) {
  return svg("defs", {}, svg("marker", {id, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 4, markerHeight: 4,
    orient: "auto"}, svg("path", {d: "M0 0 L8 4 L0 8 z", fill})));
}

// --- 3. queries and keys ---------------------------------------------------------------------------------------------

// A grid of queries (rows) and keys (columns). cells: the elements of cell (i, j) at x, y. point(i, j): called for the
// cell under the pointer, or null. hasStrips: leave room for vectors beside the labels.
function attentionGrid({labels, token}, tokens, cells, point, hasStrips = false) {
  const left = hasStrips ? 130 : 70, top = hasStrips ? 92 : 24, n = tokens.length;
  const size = Math.min(GRID_CELL, Math.floor((fitWidth(640) - left) / n));
  const X = j => left + j * size, Y = i => top + i * size;
  const row = svg("rect", {class: "grid-row", x: left, width: n * size, height: size, y: Y(n - 1)});
  const cursor = svg("rect", {class: "grid-cursor", width: size, height: size});
  const drawing = svg("svg", {width: left + n * size + 4, height: top + n * size + 4, class: "grid"}, row,
    hasStrips && svg("text", {x: left - 8, y: top - 10, "text-anchor": "end", class: "soft"}, "query ↓  key →"),
    tokens.map((t, i) => [
      svg("text", {
        x: left - (hasStrips ? 72 : 8), y: Y(i) + size / 2 + 4, "text-anchor": "end",
        "font-weight": t === token && "bold",
      }, visible(labels[t])),
      svg("text", {x: X(i) + size / 2, y: 14, "text-anchor": "middle"}, visible(labels[t])),
    ]),
    tokens.map((_, i) => tokens.map((_, j) => cells(i, j, X(j), Y(i), size))), cursor);
  const move = (i, j) => {
    row.setAttribute("y", Y(i));
    cursor.setAttribute("x", X(j));
    cursor.setAttribute("y", Y(i));
    cursor.style.display = "block";
    point([i, j]);
  };
  const leave = () => {
    row.setAttribute("y", Y(n - 1));
    cursor.style.display = "none";
    point(null);
  };
  drawing.addEventListener("pointermove", event => {
    const box = drawing.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const i = Math.floor((y - top) / size), j = Math.floor((x - left) / size);
    if (i >= 0 && j >= 0 && i < n && j < n) move(i, j);
    else leave();
  });
  drawing.addEventListener("pointerleave", leave);
  reachCells(drawing, n, n, [n - 1, n - 1], move, leave);
  return {drawing, X, Y, size, left, top};
}

// A vector as a strip of colors, in a grid: beside a row, or above a column.
function gridStrip(vector, max, attributes) {
  const isRow = attributes.width > attributes.height;
  const image = imageOf(vector, isRow ? 1 : vector.length, isRow ? vector.length : 1, "signed", x => x / max);
  return svg("image", {...attributes, href: image.toDataURL(), preserveAspectRatio: "none",
    style: {imageRendering: "pixelated"}});
}

// Mark the tokens of the strip that the pointer is on.
function pointAtTokens(...tokens) {
  [...byId("strip").children].forEach((node, t) => node.classList.toggle("pointed", tokens.includes(t)));
}

const nextHead = () => change({story_head: state.story_head + 1});
const previousHead = () => change({story_head: Math.max(0, state.story_head - 1)});

SCENES.push({
  id: "query", title: "What is the token looking for?", closer: "qkv",
  async draw(context) {
    const {labels, names, token, config} = context, tokens = storyTokens(context);
    const {layer, head, score} = storyHead(context);
    const {tensors: {q, k, scores, weights}} = await context.ask("head", {layer, head}), T = names.length;
    const at = ({data}, i, j) => data[tokens[i] * T + tokens[j]];
    const max = maxAbs(tokens.flatMap((_, i) => tokens.slice(0, i + 1).map((_, j) => at(scores, i, j))));
    const readout = readoutLine(), last = tokens.length - 1;
    const describe = cell => {
      const [i, j] = cell ?? [last, argsort(tokens.map((_, j) => at(scores, last, j)))[0]];
      readout.textContent = `query of ${names[tokens[i]]} · key of ${names[tokens[j]]}`
        + `${state.scale ? " / √D" : ""} = ${short(at(scores, i, j))}${j > i ? ", hidden by the mask" : ""}`;
      pointAtTokens(tokens[i], tokens[j]);
    };
    const {drawing, X, Y, size, left} = attentionGrid(context, tokens, (i, j, x, y, size) => {
      const value = at(scores, i, j), isFuture = j > i;
      return svg("circle", {cx: x + size / 2, cy: y + size / 2, r: Math.sqrt(Math.abs(value) / max) * (size / 2 - 1.5),
        fill: isFuture ? "none" : css(colorOf("signed", value / max)), stroke: isFuture ? PALE : GRAY,
        "stroke-width": isFuture ? 1 : 0.5});
    }, describe, true);
    const [maxQuery, maxKey] = [q, k].map(matrix => maxAbs(tokens.map(t => maxAbs(rowOf(matrix, t)))));
    drawing.append(...tokens.flatMap((t, i) => [
      gridStrip(rowOf(q, t), maxQuery, {x: left - 66, y: Y(i) + 4, width: 60, height: size - 8}),
      gridStrip(rowOf(k, t), maxKey, {x: X(i) + 5, y: 22, width: size - 10, height: 60})]));
    describe(null);
    const best = argsort(rowOf(weights, token))[0], D = config.n_embd / config.n_head;
    return {
      picture: picture("story-query", `Layer ${layer}, head ${head}: products of queries and keys`,
        () => matrixTable(["query", tokens.map(t => names[t])], ["key", tokens.map(t => names[t])], {
          shape: [tokens.length, tokens.length], data: Float32Array.from(tokens.flatMap((_, i) => tokens.map((_, j) =>
            at(scores, i, j)))),
        }), div("", scrolling(drawing), colorBar("signed", max), readout)),
      words: [
        `In this head, ${quoted(labels[token])} asks with its query (${D} numbers, at the left), and every token `
          + "answers with its key (above).",
        `A large orange dot is a good match: here ${quoted(labels[token])} finds ${quoted(labels[best])}, at position `
          + `${best}.`,
        `On average, this head gives ${percent(score)} of its attention to the previous token`
          + `${best === token - 1 ? "." : ", but not here."}`,
      ],
      action: ["Try another head", nextHead],
      more: ["all-heads", "All heads"],
    };
  },
}, {
  id: "mask", title: "What may it see?", closer: "attention-table",
  async draw(context) {
    const {labels, names, token} = context, {layer, head} = storyHead(context), tokens = storyTokens(context);
    const {tensors: {scores, bias, weights}} = await context.ask("head", {layer, head}), T = names.length;
    const at = ({data}, i, j) => data[tokens[i] * T + tokens[j]];
    const score = (i, j) => at(scores, i, j) + (bias ? at(bias, i, j) : 0);
    const max = maxAbs(tokens.flatMap((_, i) => tokens.map((_, j) => score(i, j))));
    const stages = [
      {name: "Scores", value: score, scale: "signed", max},
      {name: "Masked", value: (i, j) => j > i && state.mask === "before" ? -Infinity : score(i, j), scale: "signed",
        max},
      {name: "Weights", value: (i, j) => at(weights, i, j), scale: "sequential", max: 1},
    ];
    const rects = [], texts = [], caption = element("strong"), readout = readoutLine(), bar = div("");
    const point = cell => {
      const [i, j] = cell ?? [tokens.length - 1, tokens.length - 1], {name, value} = stages[state.story_stage];
      readout.textContent = `${name}, ${names[tokens[i]]} to ${names[tokens[j]]}: ${short(value(i, j))}`;
      pointAtTokens(tokens[i], tokens[j]);
    };
    const {drawing} = attentionGrid(context, tokens, (i, j, x, y, size) => {
      rects.push(svg("rect", {x, y, width: size - 1, height: size - 1, class: "moving"}));
      texts.push(svg("text", {x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", class: "cell moving"}));
      return [rects.at(-1), size > 26 && texts.at(-1)];
    }, point);
    const show = stage => {
      const {name, value, scale, max} = stages[stage];
      remember({story_stage: stage});
      caption.textContent = STAGE_WORDS[stage];
      rects.forEach((rect, place) => {
        const i = Math.floor(place / tokens.length), j = place % tokens.length, x = value(i, j);
        const color = Number.isFinite(x) ? colorOf(scale, x / max) : palette().missing;
        rect.style.fill = css(color);
        texts[place].style.fill = textColorOn(color);
        texts[place].textContent = Number.isFinite(x) ? x.toFixed(scale === "signed" ? 1 : 2).replace("-", "−") : "−∞";
      });
      bar.replaceChildren(colorBar(scale, max));
      drawing.dataset.stage = name;
      point(null);
    };
    show(state.story_stage % 3);
    const row = rowOf(weights, token), best = argsort(row)[0], future = T - 1 - token;
    return {
      picture: picture("story-mask", `Layer ${layer}, head ${head}`, () => ({
        columns: ["query", "key", ...stages.map(({name}) => name)],
        rows: tokens.flatMap((t, i) => tokens.map((s, j) =>
          [names[t], names[s], ...stages.map(({value}) => value(i, j))])),
      }), div("", caption, scrolling(drawing), bar, readout)),
      words: [
        "In training, the next token is the answer, so no token may look ahead: the mask sets future scores to −∞.",
        "The softmax turns each row into weights that sum to 1, and exp(−∞) is exactly 0. Masking after it would leave "
          + "rows that sum to less than 1.",
        `The largest weight of ${quoted(labels[token])} is ${percent(row[best])}, for ${quoted(labels[best])}`
          + `${future ? `; the ${countTokens(future)} after it get 0` : ""}.`,
      ],
      action: ["Next stage", () => show((state.story_stage + 1) % 3)],
    };
  },
});

const STAGE_WORDS = ["1. Scores: how well each query matches each key", "2. Masked: the future becomes −∞",
  "3. Softmax: each row becomes weights that sum to 1"];

// --- 5. values and the residual stream -------------------------------------------------------------------------------

SCENES.push({
  id: "values", title: "What does the token take?", closer: "weighted-sum",
  async draw(context) {
    const {ids, labels, names, token, config} = context, {layer, head} = storyHead(context);
    const [{tensors: {v, z, weights}}, {tensors: {states, lens_ids: best}}, {tensors: vocabulary}] = await Promise.all([
      context.ask("head", {layer, head}), context.ask("token", {token}), context.ask("vocabulary", {row: ids[token]})]);
    const row = rowOf(weights, token), strongest = argsort(row).filter(t => row[t] > 0).slice(0, 4);
    const strips = vectorPicture("story-values", `Layer ${layer}, head ${head}: values times weights`, [
      ...strongest.map(t => ({label: names[t], vector: rowOf(v, t), fade: 0.15 + 0.85 * row[t] / row[strongest[0]],
        text: percent(row[t])})),
      {label: "sum of all", vector: rowOf(z, token), rule: true},
    ], {textWidth: 70, width: pairWidth()});
    const taken = strongest.slice(0, 2).map(t => `${percent(row[t])} of the value of ${quoted(labels[t])}`);
    const path = streamPath(context, states, vocabulary), final = best.data[best.data.length - best.shape[1]];
    return {
      picture: div("pair", strips, path.picture),
      words: [
        `The head takes ${taken.join(", ")}, and so on.`,
        `All heads add their result to the token's vector: E becomes E + ΔE, ${config.n_layer} times, and the MLPs add `
          + "theirs.",
        `At the end of this path, the model expects ${quoted(pieces[final])} next. The map shows two of the `
          + `${config.n_embd} dimensions.`,
      ],
      action: ["Walk through the layers", path.walk],
      more: ["stream", "Residual stream"],
    };
  },
});

// The path of a token's states on the map of the vocabulary. Each state is drawn with the length of the first.
function streamPath({ids, token}, states, {map, mean, plane}) {
  const vectors = range(states.shape[0]).map(s => rowOf(states, s)), length = norm(vectors[0]);
  const project = x => range(2).map(axis => sumOf(Array.from(x, (value, c) =>
    (value * length / norm(x) - mean.data[c]) * plane.data[2 * c + axis])));
  const path = vectors.map(project), dots = range(Math.min(map.shape[0], 400)).map(i => rowOf(map, i));
  const width = Math.min(520, pairWidth()), height = Math.round(0.8 * width), all = [...path, ...dots];
  const X = scaleOf(all.map(p => p[0]), 24, width - 24), Y = scaleOf(all.map(p => p[1]), height - 24, 24);
  const steps = path.slice(1).map(([x, y], s) => svg("line", {
    x1: X(path[s][0]), y1: Y(path[s][1]), x2: X(x), y2: Y(y), stroke: s % 2 ? ORANGE : BLUE, "stroke-width": 2.5,
    "marker-end": `url(#path-${s % 2})`,
  }, svg("title", {}, `+ ${stateName(s + 1)}`)));
  const labels = [[0, visible(pieces[ids[token]])], [path.length - 1, "end"]].map(([s, text]) => svg("text",
    {x: X(path[s][0]) + 8, y: Y(path[s][1]) - 8, style: {fontWeight: 700}}, text));
  const drawing = svg("svg", {width, height}, arrowMarker("path-0", BLUE), arrowMarker("path-1", ORANGE),
    dots.map(([x, y], i) => softText(X(x), Y(y) + 4, visible(pieces[i]), "middle")),
    steps, svg("circle", {cx: X(path[0][0]), cy: Y(path[0][1]), r: 5, fill: ORANGE}), labels);
  const walk = () => animate(drawing, 700 * steps.length, t => steps.forEach((line, s) => {
    const part = clamp(t * steps.length - s, 0, 1), [[x1, y1], [x2, y2]] = [path[s], path[s + 1]];
    line.style.visibility = part > 0 ? "visible" : "hidden";
    line.setAttribute("x2", X(x1 + part * (x2 - x1)));
    line.setAttribute("y2", Y(y1 + part * (y2 - y1)));
  }));
  return {walk, picture: picture("story-path", "The path through the layers", () => ({
    columns: ["state", "x", "y"], rows: path.map(([x, y], s) => [stateName(s), x, y]),
  }), div("", legend([{name: "attention adds", color: BLUE}, {name: "an MLP adds", color: ORANGE}]), drawing),
  "On the map of the vocabulary. Each vector is drawn with the length of the first.")};
}

// --- 6. neurons ------------------------------------------------------------------------------------------------------

SCENES.push({
  id: "neuron", title: "What does the MLP add?", closer: "mlp",
  async draw(context) {
    const {labels, names, token, config} = context, layer = config.n_layer - 1;
    const {facts: {neurons}, tensors: {neuron_activations: active}} = await context.ask("layer", {layer, token});
    const place = state.story_neuron % neurons.length, {index, up, down} = neurons[place];
    const values = rowOf(active, place), max = maxAbs(values), readout = readoutLine();
    const top = argsort(Array.from(values, Math.abs)).slice(0, 3);
    const text = tokenStrip(labels, token, t => {
      const title = `${names[t]}: ${short(values[t])}`;
      return {style: onColor("signed", values[t] / max), title, pointerenter: () => readout.textContent = title};
    });
    const effects = [["raises", up, BLUE], ["lowers", down, ORANGE]];
    return {
      picture: picture("story-neuron", `Layer ${layer}, neuron ${index} on the text`, () => ({
        columns: ["position", "token", "activation"], rows: labels.map((label, t) => [t, label, values[t]]),
      }), div("", text, colorBar("signed", max), readout, effects.map(([verb, tokens]) => div("effects",
        `${verb} `, tokens.slice(0, 6).map(([id, x]) => element("span", {class: "chip"}, visible(pieces[id]),
          element("small", {}, signed(x)))))))),
      words: [
        `After attention, each token is processed alone by ${short(4 * config.n_embd)} neurons per layer.`,
        `Neuron ${index} is number ${place + 1} of those that write most for ${quoted(labels[token])}; its activation `
          + `is ${short(values[token])}. In this text, it is strongest at `
          + `${top.map(t => `${quoted(labels[t])} (${t})`).join(", ")}.`,
        `Here it makes ${up.slice(0, 3).map(([id]) => quoted(pieces[id])).join(", ")} more likely to follow.`,
      ],
      action: ["Show the next neuron", () => change({story_neuron: state.story_neuron + 1})],
    };
  },
});

// --- 7. the guess through the layers ---------------------------------------------------------------------------------

SCENES.push({
  id: "guess", title: "When does the model know?", closer: "stream",
  async draw(context) {
    const {ids, labels, names, token} = context, {tensors} = await context.ask("token", {token}), next = ids[token + 1];
    const {lens_ids: best, lens_probabilities: p, next_probability: nextP} = tensors, [states, shown] = best.shape;
    const width = fitWidth(860), left = 110, line = 34, room = width - left - 10, bars = [];
    const drawing = svg("svg", {width, height: states * line + 4}, range(states).map(s => {
      let x = left;
      return [svg("text", {x: left - 8, y: s * line + 22, "text-anchor": "end", class: "soft"}, stateName(s)),
        range(shown).map(j => {
          const id = best.data[s * shown + j], share = p.data[s * shown + j], part = share * room, start = x;
          const label = visible(pieces[id]), node = svg("rect", {
            x: start, y: s * line + 3, width: Math.max(0, part - 1), height: line - 7,
            fill: id === next ? ORANGE : j % 2 ? PALE : FILL,
          }, svg("title", {}, `${label}: ${percent(share)}`));
          x += part;
          bars.push({node, part});
          return [node, part > 9 * label.length + 6 && svg("text", {x: start + part / 2, y: s * line + 22,
            "text-anchor": "middle", style: id === next ? {fill: PAPER, fontWeight: 700} : {}}, label)];
        })];
    }));
    const grow = () => animate(drawing, 900, t => bars.forEach(({node, part}) =>
      node.setAttribute("width", Math.max(0, part * t - 1))));
    const last = best.data[(states - 1) * shown], known = range(states).findIndex(s =>
      range(states - s).every(i => best.data[(s + i) * shown] === last));
    return {
      picture: picture("story-guess", `What the state of ${names[token]} predicts`, () => ({
        columns: ["state", ...range(shown).flatMap(j => [`token ${j + 1}`, `probability ${j + 1}`])],
        rows: range(states).map(s => [stateName(s), ...range(shown).flatMap(j =>
          [pieces[best.data[s * shown + j]], p.data[s * shown + j]])]),
      }), div("", next !== undefined && legend([{name: "the next token of the text", color: ORANGE},
        {name: "other tokens", color: FILL}]), scrolling(drawing))),
      words: [
        "Each bar shows what the model would predict if it stopped there, from the most likely token on.",
        `Its final guess, ${quoted(pieces[last])}, is the first from ${stateName(known)} on, and ends with `
          + `${percent(p.data[(states - 1) * shown])}.`,
        next === undefined ? "" : `The text goes on with ${quoted(pieces[next])}: ${percent(nextP.data[0])} at the `
          + `start, ${percent(nextP.data.at(-1))} at the end.`,
      ],
      action: token + 1 < labels.length ? ["Go to the next token", () => selectToken(token + 1)]
        : ["Show it again", grow],
      start: grow,
    };
  },
});

// --- 8. the choice ---------------------------------------------------------------------------------------------------

SCENES.push({
  id: "choice", title: "How does the model choose?", closer: "loop", more: ["output", "Next token"],
  async draw(context) {
    const {labels, token, model} = context, ids = context.ids.slice(0, token + 1);
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const step = state.ids ? Math.max(0, state.loop_step - (context.ids.length - ids.length)) : 0;
    const box = div(""), sliders = controls(slider("temperature", {min: 0, max: 2, step: 0.05, value: state.temperature,
      testid: "story-temperature", move: temperature => {
        remember({temperature});
        update();
      }}));
    let drawn;
    const update = () => {
      const result = drawAfter(logits, step, model), order = argsort(result.stages[0].probabilities).slice(0, 10);
      drawn = result.drawn;
      box.replaceChildren(cumulativeBar(result.parts, result.u, drawn.id),
        probabilityBars(order, result.probabilities));
    };
    update();
    const append = () => drawn.id !== model.eot && change({
      ids: appended(ids, drawn.id, model).join(","), token: -1, loop_step: step + 1,
    });
    const {u} = drawAfter(logits, step, model), [best] = topIndices(logits, 1);
    return {
      picture: picture("story-choice", `After ${quoted(labels[token])}`, () => {
        const {stages, probabilities, parts} = drawAfter(logits, step, model);
        return {columns: ["id", "token", "logit", "probability", "after the filters", "from", "to"],
          rows: argsort(logits).filter(id => id < model.vocab_size).map(id => [id, pieces[id], logits[id],
            stages[0].probabilities[id], probabilities[id], parts[id].from, parts[id].to])};
      }, div("", sliders, box)),
      words: [
        `The last vector is compared with all ${short(model.vocab_size)} tokens; ${quoted(pieces[best])} scores `
          + "highest.",
        "The temperature divides the scores: below 1, likely tokens become more likely; at 0, only the first remains.",
        `Then a random number, here ${u.toFixed(4)} from the seed ${state.seed}, picks a place on the line, and the `
          + "token there is appended, as in sample.py. At temperature 0, the first token is taken.",
      ],
      action: ["Draw a token", append],
    };
  },
});

// --- 9. training -----------------------------------------------------------------------------------------------------

const STORY_SNAPSHOTS = 8;

SCENES.push({
  id: "training", title: "How did it learn this?", closer: "checkpoints",
  available: () => info.models[0].checkpoints.length > 1 || info.models[0].training,
  async draw(context) {
    const {ids, steps, losses, best} = context.model.training ?? await trainingOf(context), means = losses.map(mean);
    const labels = ids.map(id => pieces[id]), names = labels.map((label, t) => `${t} ${visible(label)}`);
    const rows = steps.map((step, i) => {
      const strip = tokenStrip(labels, -1, t => ({
        style: onColor("sequential", t ? losses[i][t - 1] / maxLoss() : NaN),
        title: t ? `${names[t]}: ${short(losses[i][t - 1])} nats; most likely: ${visible(pieces[best[i][t - 1]])}` : "",
      }));
      return element("tr", {class: "snapshot"}, element("th", {scope: "row"}, `step ${short(step)}`),
        element("td", {class: "text"}, strip), element("td", {}, ids.length > 1 && short(means[i])));
    });
    const table = element("table", {class: "snapshots"}, element("thead", {}, element("tr", {},
      ["", "text, colored by loss", "mean loss"].map((text, i) => element("th", {scope: "col", class: i < 2 && "text"},
        text)))),
    element("tbody", {}, rows));
    const play = () => animate(table, 500 * rows.length, t => rows.forEach((row, i) =>
      row.classList.toggle("hidden", i > t * rows.length)));
    return {
      picture: picture("story-training", "The same text during training", () => ({
        columns: ["step", "mean loss", ...names.slice(1)],
        rows: steps.map((step, i) => [step, means[i], ...losses[i]]),
      }), div("", scrolling(table), lossBar())),
      words: [
        `A blind guess among ${short(pieces.length)} tokens has a loss of ${short(maxLoss())} nats.`,
        ids.length > 1 && `On this text, the loss fell from ${short(means[0])} at step ${short(steps[0])} to `
          + `${short(means.at(-1))} at step ${short(steps.at(-1))}.`,
        "Each step changed every number in the model a little, so that the next token became a bit less surprising.",
      ],
      action: ["Play the training", play],
    };
  },
});

// The losses and the most likely tokens of the text at up to STORY_SNAPSHOTS steps of the training.
async function trainingOf({ids, model: {checkpoints}}) {
  const last = checkpoints.length - 1, count = Math.min(STORY_SNAPSHOTS, checkpoints.length);
  const steps = range(count).map(i => checkpoints[Math.round(i * last / (count - 1))]);
  const overviews = await Promise.all(steps.map(step => ask(question("overview", ids, {step}))));
  const numbers = name => overviews.map(({tensors}) => Array.from(tensors[name].data));
  return {ids, steps, losses: numbers("loss"), best: numbers("best")};
}

// --- the frame -------------------------------------------------------------------------------------------------------

function availableScenes() {
  return SCENES.filter(({available = () => true}) => available());
}

const turnPage = pages => () => goToScene(state.story + pages);

function goToScene(scene) {
  const story = clamp(scene, 1, availableScenes().length);
  if (story !== state.story) location.hash = link({story});
}

async function present() {
  document.body.classList.add("presenting");
  await document.documentElement.requestFullscreen?.().catch(() => {});
  draw();
}

document.addEventListener("fullscreenchange", () => {
  if (document.fullscreenElement || !document.body.classList.contains("presenting")) return;
  document.body.classList.remove("presenting");
  draw();
});

let touchStart = null; // where a swipe began

defineView({
  id: "story", title: "The story", about: "",
  keys: {ArrowRight: turnPage(1), ArrowLeft: turnPage(-1), PageDown: turnPage(1), PageUp: turnPage(-1), p: present,
    "]": nextHead, "[": previousHead},
  async draw(box, context) {
    const scenes = availableScenes(), number = clamp(state.story, 1, scenes.length), scene = scenes[number - 1];
    const {picture, words, action: [label, act], more = scene.more, start} = await scene.draw(context);
    const place = headOf(context, scene);
    const closer = (view, title) => element("a", {class: "button", href: link({view, ...place})}, title);
    const arrow = (text, title, pages, isOff) => element("button", {
      click: turnPage(pages), disabled: isOff, "aria-label": title, testid: `story-${pages > 0 ? "next" : "back"}`,
    }, text);
    box.classList.add("story");
    box.replaceChildren(
      element("nav", {class: "controls", "aria-label": "Scenes"},
        arrow(["← ", element("span", {}, "Back")], "back", -1, number === 1),
        scenes.map(({title}, i) => element("a", {
          class: "step", href: link({story: i + 1}), title, "aria-label": `${i + 1}. ${title}`,
          "aria-current": i + 1 === number && "step",
        }, i + 1)),
        arrow([element("span", {}, "Next"), " →"], "next", 1, number === scenes.length),
        element("a", {class: "button aside", href: link({view: "map"})}, "All views"),
        element("button", {click: present, testid: "present"}, "Present")),
      element("h2", {}, `${number}. ${scene.title}`),
      div("scene", div("stage", picture), div("words",
        words.filter(Boolean).map(sentence => element("p", {}, sentence)),
        controls(element("button", {class: "chosen", click: act, testid: "story-try"}, label),
          isAvailable(scene.closer) && closer(scene.closer, "Look closer"), more && closer(...more)))));
    box.addEventListener("touchstart", event => {
      touchStart = event.target.closest(".scroll") ? null : event.touches[0];
    }, {passive: true});
    box.addEventListener("touchend", ({changedTouches: [end]}) => {
      if (!touchStart) return;
      const x = end.clientX - touchStart.clientX, y = end.clientY - touchStart.clientY;
      if (Math.abs(x) > 60 && Math.abs(x) > 2 * Math.abs(y)) turnPage(x < 0 ? 1 : -1)();
    });
    if (start) requestAnimationFrame(start);
  },
}, {story: 1, story_head: 0, story_stage: 0, story_neuron: 0});

// The layer and head of a scene, for its reference view.
function headOf(context, {id}) {
  if (id === "neuron") return {layer: context.config.n_layer - 1};
  if (!["query", "mask", "values"].includes(id)) return {};
  const {layer, head} = storyHead(context);
  return {layer, head};
}
