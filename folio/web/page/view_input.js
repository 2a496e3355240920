// Views of the input: tokens, and what they are before the first layer.

// What each token of the text is, and how well the model predicted it.
defineView({
  id: "tokens", title: "Tokens",
  about: "The model reads ids, not text. The tokenizer maps pieces of text to ids. Each token but the first was "
    + "predicted from the ones before it: its loss is −ln p, its rank how many tokens were more likely.",
  draw(box, {ids, labels, token, overview: {tensors, facts: {mean_loss: mean}}}) {
    const {loss, rank, entropy, best, best_probability: probability} = tensors;
    const before = ({data}, t) => t ? data[t - 1] : NaN;
    const columns = ["position", "token", "id", "bytes", "loss (nats)", "rank", "most likely", "its probability",
      "entropy of the next (nats)"];
    box.append(tablePicture("tokens", `${ids.length} tokens`, columns, ids.map((id, t) => [
      t, labels[t], id, described.bytes[id] ?? hexadecimal(labels[t]), before(loss, t), before(rank, t),
      t ? pieces[best.data[t - 1]] : "", before(probability, t), entropy.data[t],
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

const TOKEN_KINDS = [ // of tokens, by color on the map of the vocabulary; the first one that fits
  {name: "vowels", color: ORANGE, fits: /^[aeiou]$/},
  {name: "lowercase after a space", color: "#0f766e", fits: /^ \p{Ll}/u},
  {name: "lowercase", color: BLUE, fits: /^\p{Ll}/u}, {name: "capitals", color: "#7c3aed", fits: /^ ?\p{Lu}/u},
  {name: "digits", color: "#a16207", fits: /^ ?\p{N}/u}, {name: "others", color: "#334155", fits: /^/},
];

defineView({
  id: "embedding", title: "Embedding",
  about: "Each token id selects a row of the embedding table, a vector that the model has learned. Tokens that are "
    + "used alike get similar vectors. The residual stream starts with it, plus a vector of the position if the method "
    + "adds one.",
  async draw(box, context) {
    const {ids, labels, names, token, config} = context, id = ids[token];
    const [{tensors: {embedding, position, states}}, {tensors: vocabulary}] = await Promise.all([
      context.ask("token", {token}), context.ask("vocabulary", {row: id}),
    ]);
    const sum = embedding.data.map((x, c) => x + position.data[c]), start = rowOf(states, 0);
    box.append(
      vectorPicture("embedding", `Token ${names[token]}, ${config.n_embd} channels`, [
        {label: "embedding", vector: embedding.data}, {label: "position", vector: position.data},
        {label: "x0", vector: start, rule: true},
      ], {
        ...choosing("stream_channel", config.n_embd),
        below: checkSame("embedding + position − x0", sum, start),
        note: `Row ${id} of wte, the vector of position ${token} (0 if the method adds none), and the sum.`,
      }),
      vocabularyMap(id, vocabulary),
      tablePicture("nearest", `Nearest to ${visible(labels[token])}`, ["id", "token", "cosine"],
        Array.from(vocabulary.nearest.data, (other, i) => [other, pieces[other], vocabulary.similarity.data[i]])
          .filter(([other]) => other !== id),
        {note: "By the cosine of their embeddings."}));
  },
});

function vocabularyMap(id, {map, share, place, nearest, nearest_places: places}) {
  const all = new Map([[id, place.data]]);
  nearest.data.forEach((token, i) => all.set(token, all.get(token) ?? rowOf(places, i)));
  for (let token = 0; token < map.shape[0]; token++) all.set(token, all.get(token) ?? rowOf(map, token));
  const kindOf = token => TOKEN_KINDS.find(({fits}) => fits.test(pieces[token]));
  const axis = i => `component ${i + 1}: ${percent(share.data[i])} of the variance`;
  const width = roomFor(640);
  return picture("vocabulary-map", "A map of the vocabulary",
    () => ({columns: ["id", "token", "component 1", "component 2"],
      rows: [...all].map(([token, [x, y]]) => [token, pieces[token], x, y]).sort((a, b) => a[0] - b[0])}),
    div("", textScatter([...all].map(([token, [x, y]]) => ({
      x, y, marked: token === id, text: visible(pieces[token]), title: `${token} ${visible(pieces[token])}`,
      color: kindOf(token).color,
    })), {width, height: Math.round(0.78 * width), xTitle: axis(0), yTitle: axis(1)}),
    legend(TOKEN_KINDS.filter(kind => [...all.keys()].some(token => kindOf(token) === kind)))),
    `The embeddings of ${short(all.size)} tokens in the plane of their two largest principal components. The `
      + "selected one is framed; dots are tokens without room for their text.");
}

// --- positions -------------------------------------------------------------------------------------------------------

const POSITION_METHODS = {
  learned: "A table of vectors, one for each position, is added to the token embeddings; the model has learned it. It "
    + "ends at the last position.",
  sinusoidal: "Sines and cosines of different wavelengths are added to the token embeddings. Nothing is learned.",
  rotary: "Queries and keys are rotated in each layer: channels i and i + D / 2 are a plane, which turns by position / "
    + "10000^(2i / D). Their products then depend on positions only through the distance.",
  relative: "Each head adds a learned number to its scores, which depends on the distance from the query to the key. "
    + "Larger distances share one number, and all layers use the same ones.",
  alibi: "Each head subtracts its slope times the distance from its scores, so that far keys get less weight.",
  none: "This model has no position method. Only the mask distinguishes positions: a token attends to itself and "
    + "earlier ones.",
};

defineView({
  id: "positions", title: "Positions",
  about: "Attention compares tokens without regard to their order. This is how the model knows where a token is.",
  async draw(box, context) {
    const {config: {position}, token, head} = context;
    const {tensors: {table, sinusoids, similarity, angles, bias}} = await context.ask("positions");
    const options = {width: roomFor(430), mark: token};
    const map = (id, title, matrix, column, note) => {
      const most = largest(matrix.data), [rows, columns] = matrix.shape.map(upTo);
      return matrixPicture(id, title, matrix, ["position", rows], [column, columns], {
        scale: "signed", most, cell: clamp(Math.floor(440 / largest(matrix.shape)), 1, 6), chosen: [token, null],
        click: selectToken, note: `${note} ${signedNote(most)}`,
      });
    };
    box.append(element("p", {}, element("strong", {}, `${position}: `),
      POSITION_METHODS[position]));
    if (table) {
      box.append(div("pair",
        map("position-table", position === "learned" ? "The learned table, wpe" : "The sinusoids", table, "channel",
          "Rows are positions, columns channels."),
        position === "learned" && map("sinusoids", "Sinusoids, for comparison", sinusoids, "channel",
          "What Vaswani et al. (2017) add, divided by √C."),
        map("position-similarity", "How similar positions are", similarity, "position",
          "Cosines between the rows of the table."),
        chartPicture("position-row", `Cosine similarity to position ${token}`,
          [{name: "cosine", points: pointsOf(rowOf(similarity, token))}], {...options, xTitle: "position", to: 1})));
    }
    if (angles) {
      const [T, pairs] = angles.shape, turned = {shape: [pairs, T], data: new Float32Array(T * pairs)};
      angles.data.forEach((angle, k) => turned.data[k % pairs * T + Math.floor(k / pairs)] = Math.cos(angle));
      box.append(matrixPicture("rotary-angles", "Cosines of the angles", turned, ["pair", upTo(pairs)],
        ["position", upTo(T)], {
          scale: "signed", cell: clamp(Math.floor(640 / T), 1, 10), height: clamp(Math.floor(320 / pairs), 6, 20),
          chosen: [null, token], click: (i, t) => selectToken(t),
          note: "Columns are positions, rows pairs of channels of a head; all heads and layers have the same angles. "
            + signedNote(1),
        }));
    }
    if (bias) {
      const lines = upTo(bias.shape[0]).map(h => ({
        name: `head ${h}`, points: pointsOf(rowOf(bias, h)), color: h === head ? ORANGE : "#8fa3bd",
        width: h === head ? 3 : 1.4,
      }));
      box.append(headPicker(context), chartPicture("position-bias", "Added to a score, by distance and head", lines, {
        ...options, named: [], height: 280, logX: position === "relative", xTitle: "distance in tokens",
        note: "A line for each head; the selected one is orange. The token sees distances up to the dashed line.",
      }));
    }
  },
});

// --- examples --------------------------------------------------------------------------------------------------------

defineView({
  id: "examples", title: "Training examples",
  about: "Training asks for the next token after each prefix of a text: T tokens are T − 1 examples. One forward "
    + "pass computes all of them, because the mask hides what comes after each prefix. The loss of an example is "
    + "−ln p, for the probability p that the model gives to the token that follows.",
  draw(box, {ids, labels, token, overview: {tensors: {loss, best, best_probability: probability}, facts}}) {
    const count = ids.length - 1;
    const rows = upTo(count).map(i => [i + 1, labels.slice(0, i + 1).join(""), labels[i + 1], loss.data[i],
      Math.exp(-loss.data[i]), pieces[best.data[i]], probability.data[i]]);
    const most = innerWidth > 760 ? 44 : 10, right = rows.filter(row => row[2] === row[5]).length;
    const end = text => [...text].slice(-most).map(inLine).join("");
    const shown = rows.map(([t, prefix, next, nats, p, guess, ofGuess]) => [
      t, (prefix.length > most ? "…" : "") + end(prefix), visible(next), nats, p,
      guess === next ? element("strong", {}, `${visible(guess)} ✓`) : visible(guess), ofGuess]);
    const columns = ["length", "prefix", "next", "loss", "probability", "guess", "probability of the guess"];
    box.append(tablePicture("examples", `${count} examples`, columns, rows, {
      shown, selected: i => i + 1 === token, click: i => change({token: i + 1}),
      note: !count ? "One token has no next one. Type more text." : `The most likely token is right in ${right} of `
        + `${count}. Training makes the mean loss smaller: ${short(facts.mean_loss)} nats.`,
    }));
  },
});
