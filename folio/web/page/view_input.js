// Views of the input: tokens, embeddings, positions, and training examples.

defineView({
  id: "tokens", title: "Tokens",
  about: "The tokenizer maps pieces of text to ids, which the model reads. Each token except the first is predicted "
    + "from the tokens before it: its loss is −ln p; its rank is the number of more likely tokens.",
  draw(box, {ids, labels, token, overview: {tensors, facts: {mean_loss: mean}}}) {
    const {loss, rank, entropy, best, best_probability: probability} = tensors;
    const predicted = ({data}, t) => t ? data[t - 1] : NaN;
    const columns = ["position", "token", "id", "bytes", "loss (nats)", "rank", "most likely", "its probability",
      "entropy of the next (nats)"];
    box.append(tablePicture("tokens", countTokens(ids.length), columns, ids.map((id, t) => [
      t, labels[t], id, info.bytes[id] ?? hexadecimal(labels[t]), predicted(loss, t), predicted(rank, t),
      t ? pieces[best.data[t - 1]] : "", predicted(probability, t), entropy.data[t],
    ]), {
      selected: t => t === token, click: selectToken,
      note: mean === null ? "" : `Mean loss: ${short(mean)} nats per token, perplexity ${short(Math.exp(mean))}.`,
    }));
  },
});

function hexadecimal(text) {
  return Array.from(encoder.encode(text), byte => byte.toString(16).padStart(2, "0")).join(" ");
}

// --- embedding -------------------------------------------------------------------------------------------------------

const TOKEN_KINDS = [ // colors on the map of the vocabulary; the first match applies
  {name: "vowels", color: ORANGE, fits: /^[aeiou]$/},
  {name: "lowercase after a space", color: LINE_COLORS[2], fits: /^ \p{Ll}/u},
  {name: "lowercase", color: BLUE, fits: /^\p{Ll}/u}, {name: "capitals", color: LINE_COLORS[3], fits: /^ ?\p{Lu}/u},
  {name: "digits", color: LINE_COLORS[4], fits: /^ ?\p{N}/u}, {name: "others", color: LINE_COLORS[6], fits: /^/},
];

defineView({
  id: "embedding", title: "Embedding",
  about: "Each token id selects a row of the learned embedding table. Tokens with similar use have similar vectors. "
    + "The residual stream starts with this vector, plus a position embedding if there is one.",
  async draw(box, context) {
    const {ids, labels, token, config} = context, id = ids[token];
    const [{tensors: {embedding, position, states}}, {tensors: vocabulary}] = await Promise.all([
      context.ask("token", {token}), context.ask("vocabulary", {row: id}),
    ]);
    const sum = embedding.data.map((x, c) => x + position.data[c]), start = rowOf(states, 0);
    box.append(
      vectorPicture("embedding", `Token ${tokenAt(context, token)}, ${config.n_embd} channels`, [
        {label: "embedding", vector: embedding.data}, {label: "position", vector: position.data},
        {label: "x0", vector: start, rule: true},
      ], {
        ...selectable("stream_channel", config.n_embd),
        below: checkSame("embedding + position − x0", sum, start),
        note: `Row ${id} of wte, the embedding of position ${token} (0 if there is none), and their sum.`,
      }),
      vocabularyMap(id, vocabulary),
      tablePicture("nearest", `Nearest to ${visible(labels[token])}`, ["id", "token", "cosine"],
        Array.from(vocabulary.nearest.data, (other, i) => [other, pieces[other], vocabulary.similarity.data[i]])
          .filter(([other]) => other !== id),
        {note: "By cosine similarity of the embeddings."}));
  },
});

function vocabularyMap(id, {map, share, place, nearest, nearest_places: places}) {
  const all = new Map([[id, place.data]]);
  nearest.data.forEach((token, i) => all.set(token, all.get(token) ?? rowOf(places, i)));
  for (let token = 0; token < map.shape[0]; token++) all.set(token, all.get(token) ?? rowOf(map, token));
  const width = fitWidth(640);
  return picture("vocabulary-map", "Map of the vocabulary",
    () => ({columns: ["id", "token", "component 1", "component 2"],
      rows: [...all].map(([token, [x, y]]) => [token, pieces[token], x, y]).sort((a, b) => a[0] - b[0])}),
    div("", textScatter(vocabularyTexts(all, id), {width, height: Math.round(0.78 * width), ...mapTitles(share)}),
      legend(kindsOf(all.keys()))),
    `The embeddings of ${short(all.size)} tokens, projected onto the two largest principal components. The `
      + "selected token is framed; dots are tokens whose text does not fit. Outliers are at the edge.");
}

function kindOf(token) {
  return TOKEN_KINDS.find(({fits}) => fits.test(pieces[token]));
}

// The kinds of tokens, in the order of TOKEN_KINDS.
function kindsOf(tokens) {
  const kinds = new Set([...tokens].map(kindOf));
  return TOKEN_KINDS.filter(kind => kinds.has(kind));
}

// The points of textScatter for tokens at [x, y] by id. A few outliers are at the edge, so that the others have room.
function vocabularyTexts(places, selected) {
  const [limitX, limitY] = [0, 1].map(axis => limitOf([...places.values()].map(place => place[axis])));
  return [...places].map(([token, [x, y]]) => ({
    x: limitX(x), y: limitY(y), text: visible(pieces[token]), title: `${token} ${visible(pieces[token])}`,
    marked: token === selected, color: kindOf(token).color,
  }));
}

// A function that moves values far outside of the central 98% to their edge.
function limitOf(values) {
  const sorted = values.toSorted((a, b) => a - b), cut = Math.floor(0.01 * values.length);
  const low = sorted[cut], high = sorted[values.length - 1 - cut], margin = (high - low) / 4;
  return x => clamp(x, low - margin, high + margin);
}

// The axes of a map of the vocabulary, with the share of the differences between tokens that each has.
function mapTitles({data}) {
  const [xTitle, yTitle] = [0, 1].map(i => `component ${i + 1}: ${percent(data[i])} of the variance`);
  return {xTitle, yTitle};
}

// --- positions -------------------------------------------------------------------------------------------------------

const POSITION_METHODS = {
  learned: "A learned table with one vector per position is added to the token embeddings. It ends at the last "
    + "position.",
  sinusoidal: "Sines and cosines of different wavelengths are added to the token embeddings. Nothing is learned.",
  rotary: "Queries and keys are rotated in each layer: channels i and i + D / 2 by the angle position / "
    + "10000^(2i / D). Scores then depend only on the distance of positions.",
  relative: "Each head adds a learned bias to its scores, which depends on the distance from the query to the key. "
    + "Larger distances share a bias, and all layers use the same biases.",
  alibi: "Each head subtracts its slope times the distance from its scores, so that distant keys get less weight.",
  none: "This model has no position method. Only the mask distinguishes positions.",
};

defineView({
  id: "positions", title: "Positions",
  about: "Attention itself ignores the order of tokens. The position method adds this information.",
  async draw(box, context) {
    const {config: {position}, token, head} = context;
    const {tensors: {table, sinusoids, similarity, angles, bias}} = await context.ask("positions");
    const map = (id, title, matrix, column, note) => {
      const max = maxAbs(matrix.data), [rows, columns] = matrix.shape.map(range);
      return matrixPicture(id, title, matrix, ["position", rows], [column, columns], {
        scale: "signed", max, cell: clamp(Math.floor(440 / maxAbs(matrix.shape)), 1, 6), selected: [token, null],
        click: selectToken, note,
      });
    };
    box.append(element("p", {}, element("strong", {}, `${position}: `),
      POSITION_METHODS[position]));
    if (table) {
      box.append(div("pair",
        map("position-table", position === "learned" ? "Learned table, wpe" : "Sinusoids", table, "channel",
          "Rows are positions, columns channels."),
        position === "learned" && map("sinusoids", "Sinusoids, for comparison", sinusoids, "channel",
          "The position encoding of Vaswani et al. (2017), divided by √C."),
        map("position-similarity", "Similarity of positions", similarity, "position",
          "Cosine similarity of the rows of the table."),
        chartPicture("position-row", {
          title: `Cosine similarity to position ${token}`, x: "position", panels: [{title: "", height: 190}],
          groups: [oneLine("cosine", rowOf(similarity, token))], current: token, width: 430,
        })));
    }
    if (angles) {
      const [T, pairs] = angles.shape, cosines = {shape: [pairs, T], data: new Float32Array(T * pairs)};
      angles.data.forEach((angle, k) => cosines.data[k % pairs * T + Math.floor(k / pairs)] = Math.cos(angle));
      box.append(matrixPicture("rotary-angles", "Cosines of the angles", cosines, ["pair", range(pairs)],
        ["position", range(T)], {
          scale: "signed", cell: clamp(Math.floor(640 / T), 1, 10), height: clamp(Math.floor(320 / pairs), 6, 20),
          selected: [null, token], click: (i, t) => selectToken(t),
          note: "Columns are positions, rows are pairs of channels; all heads and layers have the same angles.",
        }));
    }
    if (bias) {
      const lines = range(bias.shape[0]).map(h =>
        oneLine(`head ${h}`, rowOf(bias, h), {width: h === head ? 3 : 1.4}).lines[0]);
      box.append(headPicker(context), chartPicture("position-bias", {
        title: "Added to a score, by distance and head", x: "distance in tokens", panels: [{title: "", height: 230}],
        groups: [
          {name: `head ${head}`, color: ORANGE, lines: [lines[head]]},
          {name: "other heads", color: GRAY, lines: lines.toSpliced(head, 1)},
        ],
        current: token, logX: position === "relative", width: 430,
      }, "The selected head is orange. The token attends to distances up to the dashed line.", lines));
    }
  },
});

// --- examples --------------------------------------------------------------------------------------------------------

defineView({
  id: "examples", title: "Training examples",
  about: "The model learns to predict the next token after each prefix of a text: T tokens are T − 1 examples, "
    + "computed in one forward pass, because the mask hides later tokens. The loss of an example is −ln p, where p is "
    + "the probability of the next token.",
  draw(box, {ids, labels, token, overview: {tensors: {loss, best, best_probability: probability}, facts}}) {
    const count = ids.length - 1;
    const rows = range(count).map(i => [i + 1, labels.slice(0, i + 1).join(""), labels[i + 1], loss.data[i],
      Math.exp(-loss.data[i]), pieces[best.data[i]], probability.data[i]]);
    const maxLength = innerWidth > 760 ? 44 : 10, correct = rows.filter(row => row[2] === row[5]).length;
    const end = text => [...text].slice(-maxLength).map(inLine).join("");
    const shown = rows.map(([t, prefix, next, nats, p, guess, guessP]) => [
      t, (prefix.length > maxLength ? "…" : "") + end(prefix), visible(next), nats, p,
      guess === next ? element("strong", {}, `${visible(guess)} ✓`) : visible(guess), guessP]);
    const columns = ["length", "prefix", "next", "loss", "probability", "guess", "probability of the guess"];
    box.append(tablePicture("examples", `${count} examples`, columns, rows, {
      shown, selected: i => i + 1 === token, click: i => change({token: i + 1}),
      note: !count ? "One token gives no example. Type more text." : `The most likely token is correct in ${correct} `
        + `of ${count}. Training reduces the mean loss, here ${short(facts.mean_loss)} nats.`,
    }));
  },
});
