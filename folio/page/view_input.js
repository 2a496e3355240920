"use strict";
// Views of the input: tokens, and what they are before the first layer.

// What each token of the text is, and how well the model predicted it.
defineView({
  id: "tokens", title: "Tokens",
  about: "The model reads ids, not text. The tokenizer maps pieces of text to ids. Each token but the first was predicted "
    + "from the ones before it: its loss is −ln p, its rank how many tokens were more likely.",
  draw(box, {ids, labels, token, overview}) {
    const {loss, rank, entropy, best, best_probability: probability} = overview.tensors;
    const rows = ids.map((id, t) => [
      t, visible(labels[t]), id, described.bytes[id] ?? hexadecimal(labels[t]),
      t ? loss.data[t - 1] : NaN, t ? rank.data[t - 1] : NaN,
      t ? visible(pieces[best.data[t - 1]]) : "", t ? probability.data[t - 1] : NaN, entropy.data[t],
    ]);
    const columns = [
      {title: "position"}, {title: "token", text: true}, {title: "id"}, {title: "bytes", text: true},
      {title: "loss (nats)"}, {title: "rank"}, {title: "predicted instead", text: true}, {title: "its probability"},
      {title: "entropy of the next (nats)"},
    ];
    const table = numberTable(columns, rows.map(row => row.map(x => Number.isNaN(x) ? "" : x)),
      {selected: t => t === token, click: t => change({token: t})});
    const exported = () => ({
      columns: columns.map(column => column.title),
      rows: rows.map((row, t) => [row[0], labels[t], ...row.slice(2, 6), t ? pieces[best.data[t - 1]] : "", ...row.slice(7)]),
    });
    box.append(picture("tokens", `${ids.length} tokens`, exported, table,
      overview.facts.mean_loss === null ? "" : `Mean loss: ${short(overview.facts.mean_loss)} nats per token, `
        + `perplexity ${short(Math.exp(overview.facts.mean_loss))}.`));
  },
});

function hexadecimal(text) {
  return Array.from(encoder.encode(text), byte => byte.toString(16).padStart(2, "0")).join(" ");
}

// --- embedding -------------------------------------------------------------------------------------------------------

const TOKEN_KINDS = { // of tokens, by color on the map of the vocabulary
  vowel: {title: "lowercase vowels", color: "#c2410c"},
  consonant: {title: "lowercase consonants", color: "#1f5fbf"},
  word: {title: "lowercase after a space", color: "#1f5fbf"},
  piece: {title: "lowercase without a space", color: "#0f766e"},
  capital: {title: "capitals", color: "#7c3aed"},
  digit: {title: "digits", color: "#a16207"},
  other: {title: "punctuation and spaces", color: "#334155"},
};

function kindOfToken(piece, characters) {
  const text = piece.trim();
  if (/^\p{Lu}/u.test(text)) return "capital";
  if (/^\p{Ll}/u.test(text)) {
    if (characters) return /^[aeiou]$/.test(text) ? "vowel" : "consonant";
    return piece.startsWith(" ") ? "word" : "piece";
  }
  return /^\p{N}/u.test(text) ? "digit" : "other";
}

// Vectors of the same length, {title, data} each, as strips in the same colors; a line below reads all of them.
function alignedStrips(vectors, read) {
  const size = vectors[0].data.length, width = Math.min(size, 128), rows = Math.ceil(size / width);
  const most = Math.max(...vectors.map(({data}) => largest(data)));
  const readout = element("div", {class: "readout"});
  const strips = vectors.map(({title, data}) => {
    const cells = new Float32Array(rows * width).fill(NaN);
    cells.set(data);
    const drawn = heatMap({shape: [rows, width], data: cells}, {
      scale: "signed", value: x => x / most, cell: clamp(Math.floor(640 / width), 4, 16), height: rows > 1 ? 10 : 20,
    });
    drawn.addEventListener("pointermove", event => {
      const bounds = drawn.querySelector("canvas").getBoundingClientRect();
      const i = Math.floor((event.clientY - bounds.top) / bounds.height * rows) * width
        + Math.floor((event.clientX - bounds.left) / bounds.width * width);
      readout.textContent = i >= 0 && i < size ? read(i) : "";
    });
    return [element("div", {class: "note"}, title), drawn];
  });
  return element("div", {}, strips.flat(), readout, element("div", {class: "note"},
    `Dark is −${short(most)}, gray 0, light ${short(most)}${vectors.length > 1 ? ", in all strips" : ""}.`));
}

const ADDS_NO_VECTOR = {
  rotary: "Rotary positions add nothing to the embedding: they rotate queries and keys in each layer.",
  relative: "Relative positions add nothing to the embedding: they add a number to each score of attention.",
  alibi: "ALiBi adds nothing to the embedding: it subtracts from the scores of attention.",
  none: "This model has no positions: the embedding is all that enters the first layer.",
};

defineView({
  id: "embedding", title: "Embedding",
  about: "Each token id selects a row of the embedding table: a vector of C numbers, which the model has learned. "
    + "Tokens that are used alike get similar vectors. The vector, with that of its position if the method adds one, "
    + "is where the residual stream starts.",
  async draw(box, context) {
    const {ids, labels, token, config} = context, id = ids[token];
    const [{tensors: {embedding, position, states}}, vocabulary] = await Promise.all([
      context.ask("token", {token}), context.ask("vocabulary", {row: id}),
    ]);
    const added = !(config.position in ADDS_NO_VECTOR), start = rowOf(states, 0);
    const method = config.position === "learned" ? `row ${token} of wpe` : `the sinusoids of position ${token}`;
    const sum = Float32Array.from(embedding.data, (x, i) => added ? x + position.data[i] : x);
    const difference = largest(sum.map((x, i) => x - start[i]));
    const vectors = [
      {title: `Row ${id} of wte: the token ${visible(labels[token])}`, data: embedding.data},
      added && {title: `+ ${method}`, data: position.data},
      added && {title: "= x₀, the start of the residual stream", data: start},
    ].filter(Boolean);
    const read = i => `channel ${i}: ${vectors.map(({data}, k) => `${["", " + ", " = "][k]}${short(data[i])}`).join("")}`;
    const norms = vectors.map(({data}) => short(Math.hypot(...data)));
    const exported = () => ({
      columns: ["channel", "embedding", "position", "x0"],
      rows: Array.from(embedding.data, (x, i) => [i, x, position.data[i], start[i]]),
    });
    box.append(
      picture("embedding", `Token ${token} ${visible(labels[token])}, ${config.n_embd} channels`, exported,
        alignedStrips(vectors, read), added ? "" : ADDS_NO_VECTOR[config.position]),
      element("p", {"data-testid": "embedding-sum"},
        `Sum of parts − x₀: ${difference.toFixed(4)} in the channel where it differs most. `
        + (added ? `Lengths: ${norms[0]} for the token, ${norms[1]} for the position, ${norms[2]} for the sum.`
          : `Length: ${norms[0]}.`)),
      element("div", {class: "row pair"}, vocabularyMap(id, vocabulary, config), nearestTokens(id, vocabulary)));
  },
});

function nearestTokens(id, {tensors: {nearest, similarity}}) {
  const rows = Array.from(nearest.data, (other, i) => [other, pieces[other], similarity.data[i]])
    .filter(([other]) => other !== id);
  const columns = [{title: "id"}, {title: "token", text: true}, {title: "cosine"}];
  return picture("nearest", `Nearest to ${visible(pieces[id])}`,
    () => ({columns: columns.map(column => column.title), rows}),
    numberTable(columns, rows.map(([other, piece, cosine]) => [other, visible(piece), cosine.toFixed(3)])),
    "By the cosine of their embeddings.");
}

function vocabularyMap(id, {tensors: {map, share, place, nearest, nearest_places: places}}, {vocab_size: V}) {
  const shown = map.shape[0];
  const characters = pieces.slice(0, shown).every(piece => [...piece].length <= 1 || piece.startsWith("<|"));
  const point = (token, [x, y], marked) => {
    const kind = kindOfToken(pieces[token], characters);
    return {x, y, kind, id: token, marked, text: visible(pieces[token]), color: TOKEN_KINDS[kind].color,
      title: `${token} ${visible(pieces[token])}`};
  };
  const points = new Map([[id, point(id, place.data, true)]]);
  nearest.data.forEach((token, i) => points.has(token) || points.set(token, point(token, rowOf(places, i), false)));
  for (let token = 0; token < shown; token++) {
    if (!points.has(token)) points.set(token, point(token, rowOf(map, token), false));
  }
  const all = [...points.values()], used = new Set(all.map(({kind}) => kind));
  const legend = element("div", {class: "legend"}, Object.entries(TOKEN_KINDS).filter(([kind]) => used.has(kind))
    .map(([, {title, color}]) => element("span", {style: {color}}, `■ ${title}`)));
  const axis = i => `component ${i + 1}: ${percent(share.data[i])} of the variance`;
  const width = clamp(innerWidth - 40, 300, 640);
  const which = shown < V ? `The first ${withCommas(shown)} of ${withCommas(V)} tokens, the selected one, and the `
    + "nearest ones. Dots are tokens without room for their text." : "The selected token is framed.";
  return picture("vocabulary-map", "A map of the vocabulary",
    () => ({columns: ["id", "token", "component 1", "component 2"],
      rows: all.map(({id, x, y}) => [id, pieces[id], x, y]).sort((a, b) => a[0] - b[0])}),
    element("div", {}, textScatter(all, {width, height: Math.round(0.78 * width), xTitle: axis(0), yTitle: axis(1)}),
      legend),
    `The embeddings in the plane of their two largest principal components. ${which}`);
}

// --- positions -------------------------------------------------------------------------------------------------------

const POSITION_METHODS = {
  learned: "A table of vectors, one for each position, is added to the token embeddings; the model has learned it. "
    + "Positions beyond the table cannot be used.",
  sinusoidal: "Sines and cosines of different wavelengths are added to the token embeddings. Nothing is learned.",
  rotary: "Queries and keys are rotated in each layer: channels i and i + D / 2 are a plane, which turns by position / "
    + "10000^(2i / D). The product of a query and a key then depends on their positions only through the distance. "
    + "Nothing is learned.",
  relative: "Each head adds a learned number to its scores, which depends on the distance from the query to the key. "
    + "Larger distances share one number, and all layers use the same numbers.",
  alibi: "Each head subtracts its slope times the distance from its scores, so that far keys get less weight. Nothing "
    + "is learned.",
  none: "This model has no position method. Only the mask distinguishes positions: a token attends to itself and "
    + "earlier ones, so a layer can tell how many tokens come before. Set --position to train with another method.",
};

defineView({
  id: "positions", title: "Positions",
  about: "Attention compares tokens without regard to their order. This is how the model knows where a token is.",
  async draw(box, context) {
    const {config, token} = context;
    box.append(element("p", {"data-testid": "position-method"}, element("b", {}, `${config.position}: `),
      POSITION_METHODS[config.position]));
    if (config.position === "none") return;
    const {tensors} = await context.ask("positions");
    if (tensors.table) box.append(...addedPositions(tensors, context));
    if (tensors.angles) box.append(...rotations(tensors.angles, context));
    if (tensors.bias) box.append(...biases(tensors.bias, context));
    if (!tensors.bias) box.append(element("p", {}, `The frames mark position ${token}, that of the selected token.`));
  },
});

function upTo(n) {
  return Array.from({length: n}, (_, i) => i);
}

function chartWidth() {
  return clamp(innerWidth - 40, 300, 560);
}

const drawnTables = new WeakMap(); // figures by their matrices, which may have millions of cells

function addedPositions({table, similarity, sinusoids}, {token, config}) {
  const [T, C] = table.shape, learned = config.position === "learned";
  const map = (id, title, matrix, most, columns, read, note) => {
    const cell = clamp(Math.floor(440 / Math.max(...matrix.shape)), 1, 6);
    if (!drawnTables.has(matrix)) {
      const table = () => matrixTable(`position \\ ${columns}`, upTo(T), upTo(matrix.shape[1]), matrix);
      const drawing = heatMap(matrix, {
        scale: "signed", value: x => x / most, cell, read, chosen: [token, null], click: i => change({token: i}),
      });
      drawnTables.set(matrix, picture(id, title, table, drawing, `${note} Dark is −${short(most)}, light ${short(most)}.`));
    }
    const figure = drawnTables.get(matrix);
    figure.querySelector(".chosen").style.top = `${token * cell}px`;
    return figure;
  };
  const added = (id, title, matrix, note) => map(id, title, matrix, largest(matrix.data), "channel",
    (i, j, x) => `position ${i}, channel ${j}: ${short(x)}`, note);
  const series = [{name: config.position, points: Array.from(rowOf(similarity, token), (y, p) => [p, y])}];
  if (learned) {
    const normed = unitRows(sinusoids), points = upTo(T).map(p => [p, dot(rowOf(normed, p), rowOf(normed, token))]);
    series.push({name: "sinusoidal, for comparison", points, dash: "4 3", color: "#64748b"});
  }
  return [
    element("div", {class: "row pair"},
      added("position-table", learned ? "The learned table, wpe" : "The sinusoids", table,
        "Rows are positions, columns channels."),
      learned && added("sinusoids", "Sinusoids, for comparison", sinusoids,
        "What Vaswani et al. (2017) add instead, divided by √C.")),
    element("div", {class: "row pair"},
      map("position-similarity", "How similar positions are", similarity, 1, "position",
        (i, j, x) => `positions ${i} and ${j}: cosine ${short(x)}`,
        "Cosines between the rows of the table."),
      picture("position-row", `Cosine similarity to position ${token}`,
        () => ({columns: ["position", ...series.map(({name}) => name)],
          rows: upTo(T).map(p => [p, ...series.map(({points}) => points[p][1])])}),
        element("div", {}, lineChart(series, {width: chartWidth(), xTitle: "position", mark: token, to: 1}),
          lineLegend(series)))),
  ];
}

function unitRows({shape: [N, C], data}) {
  const result = new Float32Array(data);
  for (let i = 0; i < N; i++) {
    const row = result.subarray(i * C, (i + 1) * C), norm = Math.hypot(...row) || 1;
    for (let j = 0; j < C; j++) row[j] /= norm;
  }
  return {shape: [N, C], data: result};
}

function rotations(angles, {token}) {
  const [T, pairs] = angles.shape, cosines = {shape: [pairs, T], data: new Float32Array(T * pairs)};
  angles.data.forEach((angle, k) => cosines.data[(k % pairs) * T + Math.floor(k / pairs)] = Math.cos(angle));
  const mean = upTo(T).map(p => [p, upTo(pairs).reduce((sum, i) => sum + cosines.data[i * T + p], 0) / pairs]);
  const turns = i => angles.data[(T - 1) * pairs + i] / (2 * Math.PI);
  return [
    picture("rotary-angles", "Cosines of the angles",
      () => matrixTable("pair \\ position", upTo(pairs), upTo(T), cosines), heatMap(cosines, {
      scale: "signed", cell: clamp(Math.floor(640 / T), 1, 10), height: clamp(Math.floor(320 / pairs), 6, 20),
      chosen: [null, token], click: (i, p) => change({token: p}),
      read: (i, p, x) => `position ${p}, channels ${i} and ${i + pairs}: ${short(angles.data[p * pairs + i])} radians, `
        + `cosine ${short(x)}`,
    }), "Columns are positions, rows pairs of channels of a head; all heads and layers have the same angles. Dark is "
      + `−1, light 1. The first pair turns ${short(turns(0))} times in ${T} tokens, the last one `
      + `${short(turns(pairs - 1))} times.`),
    picture("rotary-distance", "What a distance does to a product",
      () => ({columns: ["distance", "factor"], rows: mean}),
      lineChart([{name: "factor", points: mean}], {width: chartWidth(), xTitle: "distance in tokens", to: 1,
        mark: token}),
      "The product of a query with an equal key, if all its channels are equally large, relative to that at distance "
        + "0: the mean of the cosines.")];
}

function biases(bias, {token, config, head}) {
  const [H, T] = bias.shape, dashes = [null, "7 3", "2 3", "8 2 2 2"], most = largest(bias.data);
  const series = upTo(H).map(h => ({
    name: `head ${h}`, points: Array.from(rowOf(bias, h), (y, distance) => [distance, y]),
    dash: dashes[Math.floor(h / LINE_COLORS.length) % dashes.length], width: h === head ? 3.2 : 1.4,
  }));
  return [
    picture("position-bias", "Added to a score, by distance and head",
      () => matrixTable("head \\ distance", upTo(H), upTo(T), bias),
      element("div", {}, lineChart(series, {width: chartWidth(), height: 280, xTitle: "distance in tokens", mark: token,
        logX: config.position === "relative"}),
        lineLegend(series)),
      `The selected head is thick. The selected token sees distances from 0 to ${token}.`),
    picture("position-bias-map", "The same as a heat map",
      () => matrixTable("head \\ distance", upTo(H), upTo(T), bias), heatMap(bias, {
      scale: "signed", value: x => x / most, cell: clamp(Math.floor(620 / T), 1, 8), height: 16, chosen: [head, null],
      read: (h, d, x) => `head ${h}, distance ${d}: ${short(x)}`, click: h => change({head: h}),
    }), `Rows are heads, columns distances from 0 on. Dark is −${short(most)}, gray 0, light ${short(most)}.`),
  ];
}

// The names of the lines of a chart.
function lineLegend(series) {
  return element("div", {class: "legend"}, series.map(({name, color, dash}, i) => element("span", {},
    svg("svg", {width: 26, height: 8}, svg("line", {
      x1: 0, x2: 26, y1: 4, y2: 4, stroke: color ?? LINE_COLORS[i % LINE_COLORS.length], "stroke-width": 2,
      "stroke-dasharray": dash ?? null,
    })), ` ${name}`)));
}

// --- examples --------------------------------------------------------------------------------------------------------

const SHOWN_EXAMPLES = 60; // rows at once
const SHOWN_PREFIX = {wide: 44, narrow: 10}; // characters of a prefix, by the width of the page

defineView({
  id: "examples", title: "Training examples",
  about: "Training shows the model a text and asks for the next token after each prefix. The loss of an example is −ln "
    + "p, for the probability p that the model gives to the token that follows.",
  draw(box, {ids, labels, token, overview}) {
    const {loss, best, best_probability: probability} = overview.tensors, count = ids.length - 1;
    box.append(element("p", {"data-testid": "one-pass"},
      `A text of T = ${ids.length} tokens is T − 1 = ${count} examples. One forward pass computes all of them, because `
      + "the mask hides the future: what the model predicts after a prefix does not depend on the tokens after it."));
    const changed = "The mask is changed now, so the model may see the tokens that it should predict.";
    if (state.mask !== "before") box.append(element("p", {class: "error"}, changed));
    if (!count) return box.append(element("p", {}, "One token has no next one. Type more text."));
    const row = t => [t, labels.slice(0, t).join(""), labels[t], loss.data[t - 1], Math.exp(-loss.data[t - 1]),
      pieces[best.data[t - 1]], probability.data[t - 1]];
    const first = clamp(token - SHOWN_EXAMPLES / 2, 1, Math.max(1, count - SHOWN_EXAMPLES + 1));
    const shown = upTo(Math.min(SHOWN_EXAMPLES, count)).map(i => first + i);
    const columns = [{title: "length"}, {title: "prefix"}, {title: "next", text: true}, {title: "loss (nats)"},
      {title: "its probability"}, {title: "the model's guess", text: true}, {title: "its probability"}];
    const most = innerWidth > 760 ? SHOWN_PREFIX.wide : SHOWN_PREFIX.narrow;
    const cut = text => {
      const characters = [...text].map(visible).join("").replaceAll("␣", " ");
      return [...characters].length > most ? `…${[...characters].slice(-most).join("")}` : characters;
    };
    const drawn = shown.map(row).map(([t, prefix, next, nats, p, guess, ofGuess]) => [t,
      element("span", {class: "prefix"}, cut(prefix)), visible(next),
      nats, percent(p), guess === next ? element("b", {}, `${visible(guess)} ✓`) : visible(guess), percent(ofGuess)]);
    const right = upTo(count).filter(i => best.data[i] === ids[i + 1]).length;
    const selection = {selected: i => shown[i] === token, click: i => change({token: shown[i]})};
    const table = numberTable(columns, drawn, selection);
    box.append(picture("examples",
      count > SHOWN_EXAMPLES ? `Examples ${first} to ${first + shown.length - 1} of ${count}` : `${count} examples`,
      () => ({
        columns: ["length", "prefix", "next", "loss", "probability", "guess", "probability of the guess"],
        rows: upTo(count).map(i => row(i + 1)),
      }),
      table,
      `The most likely token is right in ${right} of ${count}. The mean loss is ${short(overview.facts.mean_loss)} `
        + "nats, which training makes smaller."));
    const selected = table.querySelector(".selected");
    if (selected) requestAnimationFrame(() => table.scrollTop = selected.offsetTop - table.clientHeight / 2);
  },
});
