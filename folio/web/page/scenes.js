// The scenes of the story: they follow the selected token through the model. Each has a question as its title, a
// picture, at most three sentences with the numbers of this model, the terms in them, a button that does the thing to
// try, and a link to a view.

const SCENES = [];
const STORY_TOKENS = 14; // before and including the selected token, in pictures of attention
const STORY_NEIGHBORS = 5;
const WORDS_WIDTH = 22.5, DETAIL_WIDTH = 18; // of the words beside a picture, and of a detail beside a grid, in rem
const MAX_LETTERS = 14; // of a token beside a grid
const TOP_NEURONS_SHOWN = 5; // tokens that a neuron raises or lowers

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

const isWide = () => window.innerWidth > 1000; // the words are beside the picture (see .scene in style.css)
const remToPixels = x => x * parseFloat(getComputedStyle(document.documentElement).fontSize);

// The width of the picture of a scene.
function stageWidth() {
  return fitWidth(Infinity) - (isWide() ? remToPixels(WORDS_WIDTH) : 0);
}

// The width of a picture in a pair of them (see .pair in style.css).
function pairWidth() {
  const width = stageWidth();
  return width > 892 ? (width - 32) / 2 : width;
}

// The height of one of n lines of a picture that fills the window.
function lineHeight(n, low, high) {
  return clamp(Math.floor((window.innerHeight - 80 - remToPixels(16)) / n), low, high);
}

// The token of the story if none is selected: the last one in a word, before another one. The model's expectation can
// be compared with the token after it.
function storyToken(labels) {
  const token = labels.slice(0, -1).findLastIndex(label => /[\p{L}\p{N}]/u.test(label));
  return token < 0 ? labels.length - 1 : token;
}

// The positions of the tokens in pictures of attention.
function storyTokens({token}) {
  const first = Math.max(0, token - STORY_TOKENS + 1);
  return range(token - first + 1).map(i => first + i);
}

// Words for the title of a picture that leaves out the first tokens.
function lastWords(context, tokens) {
  return tokens[0] ? `: the ${tokens.length} tokens up to ${tokenAt(context, context.token)}` : "";
}

// The head of the story: the strongest previous-token head, or the one that the reader has chosen after it.
function storyHead({overview: {tensors: {score_previous: {data}}}, config: {n_head}}) {
  const order = argsort(data), place = order[state.story_head % order.length];
  return {layer: Math.floor(place / n_head), head: place % n_head, share: data[place]};
}

const LOOKS_BACK = 0.3; // attention to the previous token, on average, from which on a head is about it

function describeHead(share) {
  if (state.story_head) return "It";
  return share < LOOKS_BACK ? "No head of this model looks at the previous token yet. The one that does it most"
    : "It is the strongest previous-token head of this model: it";
}

// The score of the query of tokens[i] and the key of tokens[j], with the bias for their distance if there is one.
function scoreOf(scores, bias, tokens, i, j) {
  const place = tokens[i] * scores.shape[1] + tokens[j];
  return scores.data[place] + (bias?.data[place] ?? 0);
}

function listed(ids) {
  return ids.map(id => quoted(pieces[id])).join(", ");
}

// A token with a small line of text below it.
function chip(label, below, attributes = {}) {
  return element(attributes.click ? "button" : "span", {class: "chip", ...attributes}, visible(label),
    element("small", {}, below));
}

// The most likely next tokens after a token, from the answer to "token": [[id, probability], ...]
function expected({tensors: {lens_ids: ids, lens_probabilities: p}}) {
  const last = ids.shape[0] - 1;
  return Array.from(rowOf(ids, last), (id, j) => [id, rowOf(p, last)[j]]);
}

// --- 1. tokens -------------------------------------------------------------------------------------------------------

const TOKEN_WORDS = {
  char: "one character. ␣ is a space, and ⏎ is the end of a line.", byte: "one byte of the text.",
  midi: "one event of the music: an instrument, a note, or a time to wait.",
};

function swapCase(text) {
  return [...text].map(c => c === c.toUpperCase() ? c.toLowerCase() : c.toUpperCase()).join("");
}

SCENES.push({
  id: "tokens", name: "Tokens", title: "What does the model see?", closer: "tokens",
  terms: ({model: {tokenizer}}) => [
    ["Token", `the unit that the model reads and writes, here ${TOKEN_WORDS[tokenizer] ?? "a word or a part of one."}`],
    ["Framed", "the token that the story follows. Click another one to follow it."],
    ...isWide() ? [["At the top right", "the way of the token through the model: its vector after each part, and what "
      + "the model would predict there. Scene 7 says more."]] : [],
    ["Colors of the text", "how surprised the model was by each token. Scene 9 says how this is measured."],
  ],
  async draw(context) {
    const {ids, labels, token, model} = context, next = expected(await context.ask("token", {token}));
    const chips = div("chips large", reachByKeys(ids.map((id, t) => chip(labels[t], id, {
      class: t === token ? "chip selected" : "chip", click: () => selectToken(t), "aria-pressed": String(t === token),
    })), token));
    const [[best, p]] = next;
    return {
      picture: div("", picture("story-tokens", "The text as tokens, with their ids", () => ({
        columns: ["position", "token", "id"], rows: ids.map((id, t) => [t, labels[t], id]),
      }), chips), picture("story-expected", `After ${quoted(labels[token])}, the model expects`, () => ({
        columns: ["id", "token", "probability"], rows: next.map(([id, p]) => [id, pieces[id], p]),
      }), div("chips large", next.map(([id, p]) => chip(pieces[id], percent(p), {class: "chip expected"}))))),
      words: [
        `A GPT does one thing: it predicts the next token. After ${quoted(labels[token])}, this model expects `
          + `${quoted(pieces[best])} (${percent(p)})`
          + `${token + 1 < ids.length ? `; the text goes on with ${quoted(labels[token + 1])}` : ""}.`,
        `It sees no ${isMusic() ? "notes" : "letters"}, only ids: numbers from 0 to ${short(model.vocab_size - 1)}. `
          + `${quoted(labels[token])} is id ${ids[token]}.`,
        "Neighboring ids mean nothing: the model has to learn what each token is."
          + (isMusic() ? "" : " Upper and lower case have unrelated ids."),
      ],
      action: isMusic() ? ["Leave out the first event", () => change({ids: ids.slice(1).join(",")})]
        : [state.story_swapped ? "Swap the case back" : "Swap upper and lower case", () =>
          change({text: swapCase(textOf(ids)), ids: "", story_swapped: 1 - state.story_swapped})],
      more: isMusic() && ["roll", "Piano roll"],
      start() {
        const {offsetTop} = chips.querySelector(".selected");
        chips.scrollTop = offsetTop - chips.clientHeight / 2;
      },
    };
  },
});

// --- 2. vectors ------------------------------------------------------------------------------------------------------

SCENES.push({
  id: "vector", name: "Vectors", title: "What is a token to the model?", closer: "embedding",
  terms: ({config: {n_embd}}) => [
    ["Embedding", "the learned vector of a token: its row in a table with one row per id."],
    ["Near", "a small angle between two vectors: a cosine of 1 is the same direction. Vectors that have nothing to do "
      + `with each other have cosines of about ±${chanceOf(n_embd)}.`],
  ],
  async draw(context) {
    const {ids, labels, token, config} = context, {position} = config, place = token - context.starts[token];
    const [{tensors: {embedding, position: added, states}}, {tensors: vocabulary}, {tensors: {angles, bias}}] =
      await Promise.all([context.ask("token", {token}), context.ask("vocabulary", {row: ids[token]}),
        context.ask("positions")]);
    const isAdded = ["learned", "sinusoidal"].includes(position), start = rowOf(states, 0), width = pairWidth();
    const {nearest, similarity, nearest_vectors: vectors} = vocabulary;
    const near = range(nearest.data.length).filter(i => nearest.data[i] !== ids[token]).slice(0, STORY_NEIGHBORS);
    const clear = near.filter(i => similarity.data[i] > 3 * chanceOf(config.n_embd));
    const strips = vectorPicture("story-vector", `Token ${tokenAt(context, token)} as ${config.n_embd} numbers`, [
      {label: "embedding", vector: embedding.data}, isAdded && {label: `position ${place}`, vector: added.data},
      isAdded && {label: "sum", vector: start, rule: true},
    ].filter(Boolean), {textWidth: 60, width});
    const neighbors = vectorPicture("story-near", `Nearest to ${quoted(labels[token])}, with cosine`, [
      {label: visible(labels[token]), vector: embedding.data},
      ...near.map((i, k) => ({label: visible(pieces[nearest.data[i]]), vector: rowOf(vectors, i), rule: !k,
        text: similarity.data[i].toFixed(2)})),
    ], {textWidth: 60, width});
    return {
      picture: div("pair", div("", strips, positionPicture(context, angles, bias), neighbors),
        vocabularyPicture(context, vocabulary)),
      words: [
        `Each id selects a row of a learned table: ${config.n_embd} numbers, a point in space.`,
        clear.length ? `Training moved tokens with similar use together: clearly near ${quoted(labels[token])} `
          + `${clear.length > 1 ? "are" : "is"} ${listed(clear.map(i => nearest.data[i]))}.`
          : `No token is clearly near ${quoted(labels[token])}: its use is its own.`,
        POSITION_WORDS[position](place),
      ],
      action: token ? ["Select the token before it", () => selectToken(token - 1)]
        : ["Select the token after it", () => selectToken(1)],
    };
  },
});

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

// The vocabulary's map, with lines from the selected token to its nearest.
function vocabularyPicture({ids, token}, {map, share, place, nearest, nearest_places: places}) {
  const width = Math.min(620, pairWidth()), id = ids[token];
  const near = range(nearest.data.length).filter(i => nearest.data[i] !== id).slice(0, STORY_NEIGHBORS);
  const points = new Map([[id, place.data], ...near.map(i => [nearest.data[i], rowOf(places, i)])]);
  const named = points.size;
  for (const other of range(map.shape[0])) points.set(other, points.get(other) ?? rowOf(map, other));
  const texts = vocabularyTexts(points, id), [{x: x1, y: y1}] = texts;
  return picture("story-map", "The vocabulary as the model sees it", () => ({
    columns: ["id", "token", "x", "y"], rows: [...points].map(([other, [x, y]]) => [other, pieces[other], x, y]),
  }), div("", !isMusic() && legend(kindsOf(points.keys())), textScatter(texts, {
    width, height: Math.round(0.85 * width), size: 16, ...mapTitles(share),
    below: (X, Y) => texts.slice(1, named).map(({x, y}) =>
      svg("line", {x1: X(x1), y1: Y(y1), x2: X(x), y2: Y(y), stroke: GRAY, "stroke-width": 1.5})),
  })), "Two dimensions of many. Lines lead to the nearest tokens. Dots are tokens whose text does not fit. Outliers "
    + "are at the edge.");
}

// A picture of the position method: arrows that turn, or biases by distance. Added vectors are strips.
function positionPicture({token, starts, config: {n_head}, ...context}, angles, bias) {
  const place = token - starts[token];
  if (bias) {
    const {head} = storyHead({...context, config: {n_head}}), biases = rowOf(bias, head).slice(0, place + 1);
    if (biases.length < 2) return "";
    return chartPicture("story-bias", {
      title: `Added to the scores of head ${head}`, x: "distance in tokens", panels: [{title: "", height: 120}],
      groups: [oneLine("bias", biases)], width: 430,
    });
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
  requestAnimationFrame(() => animate(drawing, 1200, t => turn(t * place)));
  return picture("story-rotary", `Turned to position ${place}`, () => ({
    columns: ["pair", "angle"], rows: shown.map(pair => [pair, angles.data[place * angles.shape[1] + pair]]),
  }), drawing, "Each pair of channels turns by its own angle per position: fast pairs see near tokens, slow ones far.");
}

function arrowMarker(id, fill) {
  return svg("defs", {}, svg("marker", {id, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 4, markerHeight: 4,
    orient: "auto"}, svg("path", {d: "M0 0 L8 4 L0 8 z", fill})));
}

// --- 3. queries and keys ---------------------------------------------------------------------------------------------

// A grid of queries (rows) and keys (columns), with room for a detail beside it. cells: the elements of cell (i, j) at
// x, y. point(i, j): called for the cell under the pointer, or null. strip: room for vectors beside the labels, in
// pixels.
function attentionGrid({labels, token}, tokens, cells, point, strip = 0) {
  const names = tokens.map(t => visible(labels[t]).trim().slice(0, MAX_LETTERS)), n = tokens.length;
  const letters = Math.max(...names.map(name => [...name].length)), isLong = letters > 3;
  const above = isLong ? 8 * letters : 16; // the height of the names of keys
  const left = strip + Math.max(strip && 70, 8 * letters + 24), top = above + (strip ? strip + 14 : 6);
  const width = stageWidth() - left - 8, room = window.innerWidth > 1200 ? width - remToPixels(DETAIL_WIDTH) : width;
  const size = Math.max(8, Math.min(lineHeight(n + top / 30, 18, 46), Math.floor(room / n)));
  const X = j => left + j * size, Y = i => top + i * size;
  const row = svg("rect", {class: "grid-row", x: left, width: n * size, height: size, y: Y(n - 1)});
  const cursor = svg("rect", {class: "grid-cursor", width: size, height: size});
  const drawing = svg("svg", {width: left + n * size + 4, height: top + n * size + 4, class: "grid"}, row,
    strip > 0 && svg("text", {x: left - 8, y: top - 10, "text-anchor": "end", class: "soft"}, "query ↓  key →"),
    tokens.map((t, i) => [
      svg("text", {
        x: left - (strip ? strip + 12 : 8), y: Y(i) + size / 2 + 4, "text-anchor": "end",
        "font-weight": t === token && "bold",
      }, names[i]),
      svg("text", isLong ? {transform: `translate(${X(i) + size / 2 + 4} ${above}) rotate(-90)`}
        : {x: X(i) + size / 2, y: 14, "text-anchor": "middle"}, names[i]),
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
  return {drawing, X, Y, size, left, above};
}

// A vector as a strip of colors, in a grid: beside a row, or above a column.
function gridStrip(vector, max, attributes) {
  const isRow = attributes.width > attributes.height;
  const image = imageOf(vector, isRow ? 1 : vector.length, isRow ? vector.length : 1, "signed", x => x / max);
  return svg("image", {...attributes, href: image.toDataURL(), preserveAspectRatio: "none",
    style: {imageRendering: "pixelated"}});
}

// A vector as a strip of colors with a title above it.
function titledStrip(title, vector) {
  const max = maxAbs(vector), strip = imageOf(vector, 1, vector.length, "signed", x => x / max);
  build(strip, {class: "strip", role: "img", "aria-label": title}, []);
  return [div("note", title), strip];
}

// Mark the tokens of the strip that the pointer is on.
function pointAtTokens(...tokens) {
  [...byId("strip").children].forEach((node, t) => node.classList.toggle("pointed", tokens.includes(t)));
}

const nextHead = () => change({story_head: state.story_head + 1});
const previousHead = () => change({story_head: Math.max(0, state.story_head - 1)});

SCENES.push({
  id: "query", name: "Queries", title: "What is the token looking for?", closer: "qkv",
  terms: ({config: {n_layer, n_head, n_embd}}) => [
    ["Layer", `a round of attention and an MLP. This model has ${n_layer}, counted from 0.`],
    ["Attention", "tokens take something from the tokens that they find. The next scene shows how much."],
    ["Head", `one of ${n_head} searches per layer that run side by side, each with its own learned matrices.`],
    ["Query, key", "the vector of a token times one of these matrices, and times another. As in a library, the query "
      + "is a question, and a key is the title of a book. The value, in scene 5, is what the book says."],
    ["Score", `the sum of their products, divided by √${n_embd / n_head}: long vectors would have large scores.`],
  ],
  async draw(context) {
    const {labels, names, token, config} = context, tokens = storyTokens(context);
    const {layer, head, share} = storyHead(context), D = config.n_embd / config.n_head;
    const {tensors: {q, k, scores, bias, weights}} = await context.ask("head", {layer, head}), T = names.length;
    const row = rowOf(weights, token), best = argsort(row)[0], score = (i, j) => scoreOf(scores, bias, tokens, i, j);
    const max = maxAbs(tokens.flatMap((_, i) => tokens.slice(0, i + 1).map((_, j) => score(i, j))));
    const detail = readoutLine({class: "detail"}), last = tokens.length - 1;
    const describe = cell => {
      const [i, j] = cell ?? [last, argsort(tokens.map(t => row[t]))[0]];
      const query = rowOf(q, tokens[i]), key = rowOf(k, tokens[j]), products = query.map((x, d) => x * key[d]);
      const sum = `sum: ${short(sumOf(products))}`;
      detail.replaceChildren(
        ...titledStrip(`query of ${names[tokens[i]]}`, query), ...titledStrip(`key of ${names[tokens[j]]}`, key),
        ...titledStrip("their products", products),
        element("p", {}, `${sum}${state.scale ? `, divided by √${D}` : ""}`),
        bias ? element("p", {}, `bias for the distance: ${signed(bias.data[tokens[i] * T + tokens[j]])}`) : "",
        element("p", {class: "result"}, `score: ${short(score(i, j))}`),
        isHidden(context, tokens[i], tokens[j]) ? element("p", {},
          `hidden by the mask: the key ${j > i ? "comes later" : "belongs to an earlier document"}`) : "");
      pointAtTokens(tokens[i], tokens[j]);
    };
    const strip = isWide() ? 60 : 40;
    const {drawing, X, Y, size, left, above} = attentionGrid(context, tokens, (i, j, x, y, size) => {
      const value = score(i, j), hidden = isHidden(context, tokens[i], tokens[j]);
      return svg("circle", {cx: x + size / 2, cy: y + size / 2, r: Math.sqrt(Math.abs(value) / max) * (size / 2 - 1.5),
        fill: hidden ? "none" : css(colorOf("signed", value / max)), stroke: hidden ? PALE : GRAY,
        "stroke-width": hidden ? 1 : 0.5});
    }, describe, strip);
    const [maxQuery, maxKey] = [q, k].map(matrix => maxAbs(tokens.map(t => maxAbs(rowOf(matrix, t)))));
    drawing.append(...tokens.flatMap((t, i) => [
      gridStrip(rowOf(q, t), maxQuery, {x: left - strip - 6, y: Y(i) + 4, width: strip, height: size - 8}),
      gridStrip(rowOf(k, t), maxKey, {x: X(i) + size * 0.15, y: above + 6, width: size * 0.7, height: strip})]));
    describe(null);
    return {
      picture: picture("story-query", `Layer ${layer}, head ${head}${lastWords(context, tokens)}`,
        () => matrixTable(["query", tokens.map(t => names[t])], ["key", tokens.map(t => names[t])], {
          shape: [tokens.length, tokens.length], data: Float32Array.from(tokens.flatMap((_, i) => tokens.map((_, j) =>
            score(i, j)))),
        }), div("beside", div("", scrolling(drawing), colorBar("signed", max),
          div("note", "Hollow: keys that come later"
            + (context.starts[token] > tokens[0] ? ", or belong to an earlier document" : "")
            + ", which the next scene hides.")), detail)),
      words: [
        `In this head, each token has a query of ${D} numbers, what it looks for (at the left), and a key, what it can `
          + "be found by (above).",
        "Their product is the score of a pair: a large dot at the orange end of the scale is a good match. "
          + `${quoted(labels[token])} finds ${quoted(labels[best])}, at position ${best}.`,
        token === 0 ? "The first token has no other token to look at: select a later one." :
          `${describeHead(share)} gives ${percent(share)} of its attention to the token just before, on average over this text`
          + `${best === token - 1 ? "." : `; here, it gives ${percent(row[best])} to ${quoted(labels[best])}.`}`,
      ],
      action: ["Try the next head in this order", nextHead],
      more: ["all-heads", "All heads"],
    };
  },
}, {
  id: "mask", name: "Mask", title: "What may it see?", closer: "attention-table",
  terms: () => [
    ["Attention weights", "how much a token takes from each token. (The learned numbers are called weights, too.)"],
    ["Softmax", "takes exp of each score and divides by their sum: positive weights that sum to 1."],
    ["Mask", "the rule that a token sees itself and what came before it."],
  ],
  async draw(context) {
    const {labels, names, token} = context, {layer, head} = storyHead(context), tokens = storyTokens(context);
    const {tensors: {scores, bias, weights}} = await context.ask("head", {layer, head}), T = names.length;
    const isMasked = (i, j) => isHidden(context, tokens[i], tokens[j]) && state.mask === "before";
    const score = (i, j) => scoreOf(scores, bias, tokens, i, j);
    const max = maxAbs(tokens.flatMap((_, i) => tokens.map((_, j) => score(i, j))));
    const stages = [
      {name: "Scores", value: score, scale: "signed", max},
      {name: "Masked", value: (i, j) => isMasked(i, j) ? -Infinity : score(i, j), scale: "signed", max},
      {name: "Weights", value: (i, j) => weights.data[tokens[i] * T + tokens[j]], scale: "sequential", max: 1},
    ];
    const rects = [], texts = [], caption = element("strong"), detail = readoutLine({class: "detail"}), bar = div("");
    const point = cell => {
      const [i, j] = cell ?? [tokens.length - 1, -1], row = rowOf(weights, tokens[i]), {name, value} =
        stages[state.story_stage % 3];
      detail.replaceChildren(...weightBars(context, tokens, row, tokens[i], tokens[j]),
        cell ? element("p", {}, `${name}, ${names[tokens[i]]} to ${names[tokens[j]]}: ${short(value(i, j))}`) : "");
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
      caption.textContent = STAGE_WORDS[stage] + (stage === 2 && tokens[0] ? ", with the earlier tokens" : "");
      rects.forEach((rect, place) => {
        const i = Math.floor(place / tokens.length), j = place % tokens.length, x = value(i, j);
        const color = Number.isFinite(x) ? colorOf(scale, x / max) : palette().missing;
        const number = x.toFixed(scale === "signed" ? 1 : 2).replace(/^-0\.0$/, "0.0").replace("-", "−");
        rect.style.fill = css(color);
        texts[place].style.fill = textColorOn(color);
        texts[place].textContent = !Number.isFinite(x) ? "−∞" : scale === "sequential" && isMasked(i, j) ? "" : number;
      });
      bar.replaceChildren(colorBar(scale, max));
      drawing.dataset.stage = name;
      point(null);
    };
    show(state.story_stage % 3);
    const row = rowOf(weights, token), best = argsort(row)[0], future = T - 1 - token;
    return {
      picture: picture("story-mask", `Layer ${layer}, head ${head}${lastWords(context, tokens)}`, () => ({
        columns: ["query", "key", ...stages.map(({name}) => name)],
        rows: tokens.flatMap((t, i) => tokens.map((s, j) =>
          [names[t], names[s], ...stages.map(({value}) => value(i, j))])),
      }), div("", caption, div("beside", div("", scrolling(drawing), bar), detail))),
      words: [
        "In training, the next token is the answer, so no token may look ahead: the mask sets future scores to −∞.",
        "The softmax turns each row into weights that sum to 1, and exp(−∞) is exactly 0. Masking after it would leave "
          + "rows that sum to less than 1.",
        `The largest weight of ${quoted(labels[token])} is ${percent(row[best])}, for ${quoted(labels[best])}`
          + `${future ? "; what comes after it gets 0" : ""}.`,
      ],
      action: ["Next stage", () => show((state.story_stage + 1) % 3)],
    };
  },
});

const STAGE_WORDS = ["1. Scores: how well each query matches each key", "2. Masked: the future becomes −∞",
  "3. Softmax: each row becomes weights that sum to 1"];

// The weights of a query as bars, which sum to 1. The tokens before those of the grid share a bar.
function weightBars({names}, tokens, row, query, pointed) {
  const keys = tokens.filter(t => t <= query || row[t] > 0), earlier = row.subarray(0, tokens[0]);
  const bar = (label, weight, isPointed) => div(isPointed ? "weight pointed" : "weight", element("span", {}, label),
    element("span", {class: "track"}, element("i", {style: {width: `${100 * weight}%`}})),
    element("span", {}, percent(weight)));
  return [
    element("strong", {}, `Weights of ${names[query]}, after the softmax`),
    earlier.length ? bar("earlier", sumOf(earlier)) : "",
    ...keys.map(t => bar(names[t], row[t], t === pointed)), bar("sum", sumOf(row)),
  ];
}

// --- 5. values and the residual stream -------------------------------------------------------------------------------

SCENES.push({
  id: "values", name: "Values", title: "What does the token take?", closer: "weighted-sum",
  terms: () => [
    ["Value", "what a token passes on to those that find it: its vector times a third matrix."],
    ["Residual stream", "E, the vector of a token, to which each layer adds. Scene 2 shows where it starts."],
    ["MLP", "the other half of a layer, which the next scene shows."],
  ],
  async draw(context) {
    const {ids, labels, names, token, config} = context, {layer, head} = storyHead(context), width = pairWidth();
    const [{tensors: {v, z, weights}}, {tensors: {before, attention, between}}, answer, {tensors: vocabulary}] =
      await Promise.all([context.ask("head", {layer, head}), context.ask("layer", {layer, token}),
        context.ask("token", {token}), context.ask("vocabulary", {row: ids[token]})]);
    const row = rowOf(weights, token), strongest = argsort(row).filter(t => row[t] > 0).slice(0, 4);
    const strips = vectorPicture("story-values", `Layer ${layer}, head ${head}: values times weights`, [
      ...strongest.map(t => ({label: names[t], vector: rowOf(v, t), fade: 0.15 + 0.85 * row[t] / row[strongest[0]],
        text: percent(row[t])})),
      {label: "sum of all", vector: rowOf(z, token), rule: true},
    ], {textWidth: 70, width});
    const sum = vectorPicture("story-sum", `Layer ${layer}: all ${config.n_head} heads add ΔE to E`, [
      {label: "E", vector: before.data}, {label: "ΔE", vector: attention.data},
      {label: "E + ΔE", vector: between.data, rule: true},
    ], {textWidth: 10, width});
    const taken = strongest.slice(0, 2).map(t => `${percent(row[t])} of the value of ${quoted(labels[t])}`);
    const path = streamPath(context, answer.tensors.states, vocabulary), [[final]] = expected(answer);
    return {
      picture: div("pair", div("", strips, sum), path.picture),
      words: [
        `The head takes ${taken.join(", ")}, and so on. The sum is what it found.`,
        "A matrix turns the results of all heads into ΔE, which is added to the token's vector: E becomes E + ΔE, "
          + `${config.n_layer} times, and after each time an MLP adds its own.`,
        `The map shows the path of E in 2 of its ${config.n_embd} dimensions. At its end, E matches `
          + `${quoted(pieces[final])} best, which counts all of them.`,
      ],
      action: ["Walk through the layers", path.walk],
      more: ["stream", "Residual stream"],
    };
  },
});

// The path of a token's states on the map of the vocabulary. Each state is drawn with the length of the first.
function streamPath({ids, token}, states, {map, mean, plane, share}) {
  const vectors = range(states.shape[0]).map(s => rowOf(states, s)), length = norm(vectors[0]);
  const project = x => range(2).map(axis => sumOf(Array.from(x, (value, c) =>
    (value * length / norm(x) - mean.data[c]) * plane.data[2 * c + axis])));
  const path = vectors.map(project), width = Math.min(620, pairWidth());
  const points = new Map(range(map.shape[0]).map(i => [i, rowOf(map, i)])), others = path.map(([x, y]) => ({x, y}));
  let steps, places; // lines, and the pixels of their ends
  const drawing = textScatter(vocabularyTexts(points), {
    width, height: Math.round(0.85 * width), size: 16, ...mapTitles(share), others, above: (X, Y) => {
      places = path.map(([x, y]) => [X(x), Y(y)]);
      steps = range(path.length - 1).map(s => svg("line", {
        x1: places[s][0], y1: places[s][1], x2: places[s + 1][0], y2: places[s + 1][1], stroke: s % 2 ? ORANGE : BLUE,
        "stroke-width": 2.5, "marker-end": `url(#path-${s % 2})`,
      }, svg("title", {}, `+ ${stateName(s + 1)}`)));
      const ends = [[places[0], visible(pieces[ids[token]])], [places.at(-1), "end"]];
      return [arrowMarker("path-0", BLUE), arrowMarker("path-1", ORANGE), steps,
        svg("circle", {cx: places[0][0], cy: places[0][1], r: 5, fill: ORANGE}),
        ends.map(([[x, y], text]) => svg("text", {x: x + 8, y: y - 8, style: {fontWeight: 700}}, text))];
    },
  });
  const walk = () => animate(drawing, 700 * steps.length, t => steps.forEach((line, s) => {
    const part = clamp(t * steps.length - s, 0, 1), [[x1, y1], [x2, y2]] = [places[s], places[s + 1]];
    line.style.visibility = part > 0 ? "visible" : "hidden";
    line.setAttribute("x2", x1 + part * (x2 - x1));
    line.setAttribute("y2", y1 + part * (y2 - y1));
  }));
  return {walk, picture: picture("story-path", "The path through the layers", () => ({
    columns: ["state", "x", "y"], rows: path.map(([x, y], s) => [stateName(s), x, y]),
  }), div("", legend([{name: "attention adds", color: BLUE}, {name: "an MLP adds", color: ORANGE}]), drawing),
  "On the map of scene 2. Only directions count: each vector is drawn with the length of the first.")};
}

// --- 6. neurons ------------------------------------------------------------------------------------------------------

SCENES.push({
  id: "neuron", name: "Neurons", title: "What does the MLP add?", closer: "mlp",
  terms: () => [
    ["MLP", "two matrices with an activation function between them: the second half of each layer."],
    ["Neuron", "one of the numbers between the matrices, its activation: large if the token fits its weights, near 0 "
      + "otherwise. It adds its own vector to E, times the activation."],
  ],
  async draw(context) {
    const {labels, names, token, config} = context, layer = config.n_layer - 1;
    const [{facts: {neurons}, tensors}, answer] = await Promise.all([
      context.ask("layer", {layer, token}), context.ask("token", {token})]);
    const [[guess]] = expected(answer), votes = neurons.map(({up}) => up.find(([id]) => id === guess)?.[1] ?? 0);
    const hidden = tensors.hidden.data, N = hidden.length, columns = 2 ** Math.ceil(Math.log2(2 * N) / 2);
    const place = argsort(votes)[state.story_neuron % neurons.length], {index, up, down} = neurons[place];
    const values = rowOf(tensors.neuron_activations, place), max = maxAbs(values), readout = readoutLine();
    const top = argsort(Array.from(values, Math.abs)).slice(0, 3), shape = [Math.ceil(N / columns), columns];
    const all = new Float32Array(shape[0] * columns).fill(NaN);
    all.set(hidden);
    const text = tokenStrip(labels, token, t => {
      const title = `${names[t]}: ${short(values[t])}`;
      return {style: onColor("signed", values[t] / max), title, pointerenter: () => readout.textContent = title};
    });
    const cell = clamp(Math.floor((stageWidth() - 8) / columns), 3, 40), height = lineHeight(2.5 * shape[0], 5, 18);
    const title = `Layer ${layer}: the ${short(N)} neurons of ${tokenAt(context, token)}`;
    const layerPicture = matrixPicture("story-neurons", title,
      {shape, data: all}, ["row", range(shape[0])], ["column", range(columns)], {
        scale: "signed", max: maxAbs(hidden), cell, height, selected: [Math.floor(index / columns), index % columns],
        read: (i, j) => `neuron ${i * columns + j}: ${short(all[i * columns + j])}`, bar: null,
        note: "In the order of the matrix, row by row. Framed: the neuron below.",
      });
    return {
      picture: div("", layerPicture, picture("story-neuron", `Neuron ${index} on the text`, () => ({
        columns: ["position", "token", "activation"], rows: labels.map((label, t) => [t, label, values[t]]),
      }), div("", text, colorBar("signed", max), readout, [["raises", up], ["lowers", down]].map(([verb, tokens]) =>
        div("effects", element("span", {}, `${verb} the scores of`), tokens.slice(0, TOP_NEURONS_SHOWN).map(([id, x]) =>
          chip(pieces[id], signed(x)))))))),
      words: [
        `After attention, each token is processed alone by ${short(N)} neurons per layer. Of those in the last layer, `
          + `${short(hidden.filter(x => x > 0).length)} are active (positive) for ${quoted(labels[token])}.`,
        `Neuron ${index} is one of the ${neurons.length} that add most. It `
          + (votes[place] > 0 ? `raises the score of the token that the model expects, ${quoted(pieces[guess])}, by `
            + `${short(votes[place])}.` : `does not vote for what the model expects, ${quoted(pieces[guess])}.`),
        `In this text, it is most active at ${top.map(t => `${quoted(labels[t])} (${t})`).join(", ")}.`,
      ],
      action: ["Show the next neuron", () => change({story_neuron: state.story_neuron + 1})],
    };
  },
});

// --- 7. the guess through the layers ---------------------------------------------------------------------------------

SCENES.push({
  id: "guess", name: "Layers", title: "When does the model know?", closer: "stream",
  terms: () => [["Logit lens", "reading a vector in the middle of the model as if it were the final one."]],
  async draw(context) {
    const {ids, labels, token} = context, {tensors} = await context.ask("token", {token}), next = ids[token + 1];
    const {lens_ids: best, lens_probabilities: p, next_probability: nextP} = tensors, [states, shown] = best.shape;
    const width = stageWidth(), left = 110, line = lineHeight(states, 24, 60), room = width - left - 10;
    const drawing = svg("svg", {width, height: states * line + 4, class: "guess"}, range(states).map(s => {
      let x = left;
      const y = s * line + line / 2 + 4;
      return [svg("text", {x: left - 8, y, "text-anchor": "end", class: "soft"}, stateName(s)),
        range(shown).map(j => {
          const id = best.data[s * shown + j], share = p.data[s * shown + j], part = share * room, start = x;
          const label = visible(pieces[id]), full = `${label} ${percent(share)}`, fits = text => part > 9 * text.length;
          const isNext = id === next, fill = isNext ? ORANGE : FILL;
          const node = svg("rect", {x: start, y: s * line + 3, width: Math.max(0, part - 1), height: line - 7, fill},
            svg("title", {}, full));
          x += part;
          return [node, fits(label) && svg("text", {x: start + part / 2, y, "text-anchor": "middle",
            style: isNext ? {fill: PAPER, fontWeight: 700} : {}}, fits(`${full}  `) ? full : label)];
        })];
    }));
    const grow = () => animate(drawing, 500, t => drawing.style.clipPath = `inset(0 ${100 * (1 - t)}% 0 0)`);
    const last = best.data[(states - 1) * shown], known = range(states).findIndex(s =>
      range(states - s).every(i => best.data[(s + i) * shown] === last));
    const repeats = best.data[0] === ids[token];
    return {
      picture: picture("story-guess", `What the state of ${tokenAt(context, token)} predicts`, () => ({
        columns: ["state", ...range(shown).flatMap(j => [`token ${j + 1}`, `probability ${j + 1}`])],
        rows: range(states).map(s => [stateName(s), ...range(shown).flatMap(j =>
          [pieces[best.data[s * shown + j]], p.data[s * shown + j]])]),
      }), div("", next !== undefined && legend([{name: "the next token of the text", color: ORANGE},
        {name: "other tokens", color: FILL}]), scrolling(withTooltipKeys(drawing)))),
      words: [
        `Each bar shows what the model would predict if it stopped there: the ${shown} most likely tokens.`
          + (repeats ? ` At the start, the vector is that of ${quoted(labels[token])}, so it predicts itself.` : ""),
        `${known === states - 1 ? "Only in the last state" : `From ${stateName(known)} on`}, `
          + `${quoted(pieces[last])} is the top guess. It ends with ${percent(p.data[(states - 1) * shown])}.`,
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
  id: "choice", name: "Choice", title: "How does the model choose?", closer: "loop", more: ["output", "Next token"],
  terms: () => [
    ["Logits", "the scores of all tokens: products of the final vector with their embeddings. The softmax makes them "
      + "probabilities."],
    ["Seed", "a number that determines all random numbers: the same seed draws the same text, as in sample.py."],
  ],
  async draw(context) {
    const {labels, token, model} = context, ids = context.ids.slice(0, token + 1);
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const step = state.ids ? Math.max(0, state.loop_step - (context.ids.length - ids.length)) : 0;
    const box = div(""), width = Math.min(900, stageWidth());
    const sliders = controls(slider("temperature", {min: 0, max: 2, step: 0.05, value: state.temperature,
      testid: "story-temperature", move: temperature => {
        remember({temperature});
        update();
      }}));
    let drawn;
    const update = () => {
      const result = drawAfter(logits, step, model), before = result.stages[0].probabilities;
      drawn = result.drawn;
      box.replaceChildren(cumulativeBar(result.parts, result.u, drawn.id, width),
        div("note", "The line has a part for each token, in the order of the ids, as long as its probability."),
        legend([{name: "probability", color: BLUE}, {name: "at temperature 1", color: FILL}]),
        probabilityBars(argsort(before).slice(0, 10), result.probabilities, {before, width}));
    };
    update();
    const append = () => {
      const next = appended(ids, drawn.id, model);
      if (drawn.id !== model.eot) change({ids: next.join(","), token: next.length - 1, loop_step: step + 1});
    };
    const {u, stages} = drawAfter(logits, step, model), [best] = topIndices(logits, 1);
    return {
      picture: picture("story-choice", `After ${quoted(labels[token])}`, () => {
        const {stages, probabilities, parts} = drawAfter(logits, step, model);
        return {columns: ["id", "token", "logit", "probability", "after the filters", "from", "to"],
          rows: argsort(logits).filter(id => id < model.vocab_size).map(id => [id, pieces[id], logits[id],
            stages[0].probabilities[id], probabilities[id], parts[id].from, parts[id].to])};
      }, div("", sliders, box)),
      words: [
        `The final vector is compared with all ${short(model.vocab_size)} tokens. ${quoted(pieces[best])} has the `
          + `highest score: ${percent(stages[0].probabilities[best])} at temperature 1 (the light bar).`,
        "The temperature divides the scores first: below 1, likely tokens become more likely; above 1, the choice is "
          + "more random; at 0, the most likely token is taken.",
        `Then a random number, here ${u.toFixed(4)} from the seed ${state.seed}, picks a place on the line, and the `
          + `token there follows ${quoted(labels[token])}`
          + `${token + 1 < labels.length ? ", instead of the rest of the text." : "."}`,
      ],
      action: ["Draw a token", append],
    };
  },
});

// --- 9. training -----------------------------------------------------------------------------------------------------

const STORY_SNAPSHOTS = 8;

SCENES.push({
  id: "training", name: "Training", title: "How did it learn this?", closer: "checkpoints",
  available: () => info.models[0].checkpoints.length > 1 || info.models[0].training,
  terms: () => [
    ["Loss", "−ln of the probability of the token that came, in nats: 0 if the model was certain of it."],
    ["Step", "some texts, their loss, its gradient, and a small change of all weights that lowers the loss."],
    ["Weights", "here: all learned numbers of the model."],
  ],
  async draw(context) {
    const {ids, steps, losses, best} = context.model.training ?? await trainingOf(context), means = losses.map(mean);
    const labels = ids.map(id => pieces[id]), names = labels.map((label, t) => `${t} ${visible(label)}`);
    const rows = steps.map((step, i) => {
      const strip = tokenStrip(labels, -1, t => ({
        style: onColor("sequential", t ? losses[i][t - 1] / maxLoss() : NaN),
        title: t ? `${names[t]}: ${short(losses[i][t - 1])} nats; most likely: ${visible(pieces[best[i][t - 1]])}` : "",
      }));
      return element("tr", {class: "snapshot"}, element("th", {scope: "row"}, `step ${short(step)}`),
        element("td", {class: "text"}, strip),
        element("td", {style: barStyle(means[i] / maxAbs(means))}, ids.length > 1 && short(means[i])));
    });
    const table = element("table", {class: "snapshots"}, element("thead", {}, element("tr", {},
      ["checkpoint", "text, colored by loss", "mean loss"].map((text, i) =>
        element("th", {scope: "col", class: i < 2 && "text"}, text)))),
    element("tbody", {}, rows));
    const play = () => animate(table, 500 * rows.length, t => {
      rows.forEach((row, i) => row.classList.toggle("hidden", i > t * rows.length));
      rows[Math.min(Math.floor(t * rows.length), rows.length - 1)].scrollIntoView({block: "nearest"});
    });
    return {
      picture: picture("story-training", "The same text during training", () => ({
        columns: ["step", "mean loss", ...names.slice(1)],
        rows: steps.map((step, i) => [step, means[i], ...losses[i]]),
      }), div("", scrolling(table), lossBar())),
      words: [
        `A blind guess among ${short(pieces.length)} tokens has a loss of ln ${short(pieces.length)} = `
          + `${short(maxLoss())} nats.`,
        ids.length > 1 && `On this text, the loss ${means.at(-1) < means[0] ? "fell" : "rose"} from ${short(means[0])} `
          + `at step ${short(steps[0])} to ${short(means.at(-1))} at step ${short(steps.at(-1))}`
          + `${means.at(-1) < means[0] ? "." : ": it is unlike the texts of the training."}`,
        "The gradient, computed backward through the model, tells for each of its numbers how the loss changes with "
          + "it. Each step moves it a little, so that the texts of the training become less surprising.",
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
