// Views inside a layer: queries, keys and values, what heads and neurons add, and the residual stream.

const PARTS = ["query", "key", "value"];
const DIRECT_EFFECT = "Changes of logits are direct effects: through the last norm and the output matrix, without what "
  + "later layers make of the vector.";

function isHeadOff(layer, head) {
  return state.heads_off.split(",").includes(`${layer}.${head}`);
}

// The place in a vector of `size` numbers that is nearest to a number of the state.
function placeIn(size, x) {
  return clamp(Math.trunc(x), 0, size - 1);
}

// What vectorPicture needs so that a click chooses a place; state[name] is the chosen one.
function choosing(name, size) {
  return {place: placeIn(size, state[name]), click: (_, k) => change({[name]: k})};
}

// A line that checks that two vectors are the same.
function checkSame(text, x, y) {
  return checkLine(`${text}, largest difference`, largestDifference(x, y), largest(y));
}

function norm(x) {
  return Math.sqrt(dot(x, x));
}

function tokenTitle({names, token, layer}) {
  return `Token ${names[token]}, layer ${layer}`;
}

// A row of a parameter; nothing for biases that the model lacks.
async function parameterRow(context, name, row) {
  if (name.endsWith(".bias") && !context.config.bias) return null;
  return (await context.ask("parameter", {name, row})).tensors.row.data;
}

// A number of a linear layer's output: its row of weights, the products with the input, and their sum.
async function drawProducts(context, id, {name, row, input, output, inputName, outputName}) {
  const weights = await parameterRow(context, `${name}.weight`, row);
  const bias = (await parameterRow(context, `${name}.bias`, 0))?.[row] ?? 0;
  const products = Array.from(input, (x, c) => [c, x, weights[c], x * weights[c]]);
  const total = rows => sumOf(rows.map(row => row[3])), sum = total(products) + bias;
  const strongest = [...products].sort((a, b) => Math.abs(b[3]) - Math.abs(a[3])).slice(0, 8);
  const ends = [["bias", "", "", bias], ["sum", "", "", sum]], names = [inputName, "weight", "product"];
  return vectorPicture(id, `${outputName} = ${short(output)}`,
    names.map((label, i) => ({label, vector: products.map(row => row[i + 1]), own: true})), {
    textWidth: 10, table: () => ({columns: ["channel", ...names], rows: [...products, ...ends]}),
    note: `Row ${row} of ${name.replace("transformer.", "")}.weight times ${inputName}.`,
    below: [
      tableOf(["strongest channels", ...names],
        [...strongest, ["the others", "", "", sum - bias - total(strongest)], ...ends]),
      checkLine(`sum − ${outputName}`, sum - output, output),
    ],
  });
}

// The tokens that a vector pushes up and down, as two cells of a table: the first three, and the largest change.
function pushCells({up, down}) {
  const nameOf = ([id]) => SHOWN_AS.get(pieces[id]) ?? pieces[id];
  return [up, down].flatMap(pushed => [pushed.slice(0, 3).map(nameOf).join("  "), pushed[0][1]]);
}

const PUSH_COLUMNS = ["pushes up", "by at most", "pushes down", "by at most"];

// --- queries, keys and values ----------------------------------------------------------------------------------------

defineView({
  id: "qkv", title: "Query, key, value",
  about: "Each head makes three vectors from a token: the query says what the token looks for, the key what it offers "
    + "to the queries of others, and the value what it passes on to them. Click a number to see the weights behind it.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, D = C / config.n_head;
    const {tensors} = await context.ask("layer", {layer, token}), rotates = config.position === "rotary";
    const part = placeIn(3, state.qkv_part), channel = placeIn(D, state.head_channel);
    const projected = PARTS.map((_, i) => tensors.qkv.data.subarray(i * C + head * D, i * C + (head + 1) * D));
    const rows = PARTS.flatMap((label, i) => [
      {label, part: i, vector: projected[i]},
      i < 2 && rotates && {label: `${label} rotated`, part: i, vector: rowOf(tensors["qk"[i]], head)},
    ].filter(Boolean));
    box.append(headPicker(context),
      vectorPicture("qkv", `${tokenTitle(context)}, head ${head}: ${D} numbers each`, rows, {
        place: channel, chosen: (i, d) => rows[i].part === part && d === channel,
        click: (i, d) => change({qkv_part: rows[i].part, head_channel: d}),
      }),
      div("pair",
        await drawProducts(context, "qkv-products", {
          name: `transformer.h.${layer}.attn.c_attn`, row: part * C + head * D + channel, input: tensors.ln_1.data,
          output: projected[part][channel], inputName: "ln_1(x)",
          outputName: `${PARTS[part]}[${channel}]${part < 2 && rotates ? " before the rotation" : ""}`,
        }),
        tablePicture("qkv-numbers", "All numbers", ["channel", ...rows.map(({label}) => label)],
          upTo(D).map(d => [d, ...rows.map(({vector}) => vector[d])]),
          {selected: d => d === channel,
            click: (d, j) => change({head_channel: d, qkv_part: rows[j - 1]?.part ?? part})})));
  },
}, {qkv_part: 0, head_channel: 0});

// --- heads -----------------------------------------------------------------------------------------------------------

defineView({
  id: "head-split", title: "Split into heads",
  about: "One matrix computes the queries, keys and values of all heads as one long vector, which is cut into pieces. "
    + "A small matrix for each head would compute the same numbers, in many steps instead of one.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H;
    const {tensors: {qkv: {data: qkv}, separate_heads: {data: separate}}} = await context.ask("layer", {layer, token});
    const heads = upTo(H).map(h => ({
      label: `head ${h}`, text: h === head ? "← chosen" : "",
      vector: PARTS.flatMap((_, part) => Array.from(rowOf({shape: [3 * H, D], data: qkv}, part * H + h))),
    }));
    box.append(headPicker(context),
      vectorPicture("head-split-whole", `${tokenTitle(context)}: one vector of ${short(3 * C)} numbers`,
        PARTS.map((label, i) => ({label, vector: rowOf({shape: [3, C], data: qkv}, i)})), {
          group: D, note: "Cut into heads at the white lines.",
          click: (_, c) => change({head: Math.floor(c / D)}),
          read: (i, c, x) => `${PARTS[i]}, number ${c} = ${short(x)}, is number ${c % D} of head ${Math.floor(c / D)}`,
        }),
      vectorPicture("head-split", `${H} heads of ${D} numbers`, heads, {
        axis: "number", group: D, groups: PARTS, click: h => change({head: h}),
        read: (h, c, x) => `head ${h}, ${PARTS[Math.floor(c / D)]}[${c % D}] = ${short(x)}`,
        note: `The same numbers, in a row for each head. One matrix of ${3 * C} × ${C}, or ${3 * H} of ${D} × ${C}: `
          + `both have ${short(3 * C * C)} weights, and both ways are computed here.`,
        below: checkSame("one matrix − a matrix for each head", qkv, separate),
      }));
  },
});

const SHOWN_VALUES = 12; // tokens whose values are drawn; the others are summed

defineView({
  id: "weighted-sum", title: "The sum of values",
  about: "A head's output z for a token is the sum of the values of the tokens that it looks at, each multiplied by "
    + "its attention weight. Pale values have small weights.",
  async draw(box, context) {
    const {labels, names, token, layer, head, config} = context, D = config.n_embd / config.n_head;
    const [{tensors: {v, z, weights}}, {facts, tensors}] =
      await Promise.all([context.ask("head", {layer, head}), context.ask("layer", {layer, token})]);
    const row = rowOf(weights, token), total = rowOf(z, token), off = isHeadOff(layer, head);
    const seen = [...row.keys()].filter(t => t <= token || row[t] > 0);
    const strongest = [...seen].sort((a, b) => row[b] - row[a]).slice(0, SHOWN_VALUES).sort((a, b) => a - b);
    const others = seen.filter(t => !strongest.includes(t));
    const weigh = tokens => total.map((_, d) => sumOf(tokens.map(t => row[t] * v.data[t * D + d])));
    const text = (tokens, product) => `${percent(sumOf(tokens.map(t => row[t])))}: ${short(product[channel])}`;
    const sum = weigh(seen), channel = placeIn(D, state.head_channel), {up, down} = facts.heads[head];
    box.append(headPicker(context),
      vectorPicture("weighted-sum", `${tokenTitle(context)}, head ${head}: values, faded by their weights`, [
        ...strongest.map(t => ({
          label: names[t], vector: rowOf(v, t), fade: row[t] / largest(row), text: text([t], weigh([t])),
        })),
        others.length && {label: `${others.length} others`, vector: weigh(others), text: text(others, weigh(others))},
        {label: "sum", vector: sum, rule: true, text: text(seen, sum)},
        {label: off ? "z (off)" : "z", vector: total},
      ].filter(Boolean), {
        ...choosing("head_channel", D), textWidth: 130,
        table: () => ({columns: ["token", "text", "weight", ...upTo(D).map(d => `v[${d}]`)], rows: [
          ...seen.map(t => [t, labels[t], row[t], ...rowOf(v, t)]), ["z", "", "", ...total]]}),
        below: off ? [] : checkSame("weighted sum − z", sum, total),
        note: "Percentages are the weights; each number is a weight times the framed channel.",
      }),
      tablePicture("head-effect", "What the head does to the prediction", ["pushes up", "by", "pushes down", "by"],
        up.map(([id, x], i) => [pieces[id], x, pieces[down[i][0]], down[i][1]]),
        {note: `W_O turns z into a vector of length ${short(norm(rowOf(tensors.head_outputs, head)))}, which changes `
          + `what is predicted after ${visible(labels[token])}. ${DIRECT_EFFECT}`}));
  },
});

defineView({
  id: "merge", title: "Heads put together",
  about: "The outputs z of all heads, one after the other, are one vector again. W_O turns it into what attention adds "
    + "to the residual stream: each head has its own columns of W_O, so the stream receives a sum of heads.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H;
    const {facts, tensors} = await context.ask("layer", {layer, token});
    const {z, head_outputs: written, attention, before, between} = tensors;
    const bias = await parameterRow(context, `transformer.h.${layer}.attn.c_proj.bias`, 0);
    const labelOf = h => `head ${h}${isHeadOff(layer, h) ? " (off)" : ""}`;
    const heads = upTo(H).map(h => ({label: labelOf(h), vector: rowOf(written, h)}));
    const parts = bias ? [...heads, {label: "bias", vector: bias}] : heads;
    const sum = attention.data.map((_, c) => sumOf(parts.map(({vector}) => vector[c])));
    box.append(layerPicker(context),
      vectorPicture("merge-z", `${tokenTitle(context)}: z of all heads`,
        heads.map(({label}, h) => ({label, vector: rowOf(z, h), text: `${h * D}–${(h + 1) * D - 1}`})),
        {axis: "number", click: h => change({head: h}), note: "At the right: the places in the merged vector."}),
      vectorPicture("merge", "What each head adds to the residual stream", [
        ...parts, {label: "attention", vector: attention.data, rule: true}, {label: "before", vector: before.data},
        {label: "between", vector: between.data, rule: true},
      ], {
        ...choosing("stream_channel", C),
        note: "Attention is the sum of the rows above it; between = attention + before.",
        below: [checkSame("heads − attention", sum, attention.data),
          checkSame("attention + before − between", before.data.map((x, c) => x + attention.data[c]), between.data)],
      }),
      tablePicture("merge-heads", "The heads", ["head", "length of z", "length added", ...PUSH_COLUMNS],
        heads.map(({vector}, h) => [h, norm(rowOf(z, h)), norm(vector), ...pushCells(facts.heads[h])]),
        {selected: h => h === head, click: h => change({head: h}), note: DIRECT_EFFECT}));
  },
}, {stream_channel: 0});

// --- the MLP ---------------------------------------------------------------------------------------------------------

defineView({
  id: "mlp", title: "Neurons",
  about: "The MLP works on each token alone. Its neurons compare the token with their weights; the activation function "
    + "lets through what is positive. Each neuron adds its own vector to the residual stream, times its activation.",
  async draw(box, context) {
    const {token, layer, config} = context, C = config.n_embd, name = `transformer.h.${layer}.mlp`;
    const {facts: {neurons}, tensors} = await context.ask("layer", {layer, token});
    const {preactivation: {data: before}, hidden: {data: after}, column_norms: {data: lengths}, mlp, between} = tensors;
    const N = before.length, writes = after.map((x, n) => Math.abs(x) * lengths[n]), neuron = placeIn(N, state.neuron);
    const bias = await parameterRow(context, `${name}.c_proj.bias`, 0), end = tensors.after.data;
    const sum = tensors.written.data.map((x, c) => x + (bias?.[c] ?? 0)), active = after.filter(x => x > 0).length;
    const off = state.mlps_off.split(",").includes(String(layer));
    box.append(layerPicker(context),
      off ? element("p", {class: "error"}, "This MLP is off: it adds 0. The neurons show what it would add.") : "",
      vectorPicture("mlp-activations", `${tokenTitle(context)}: ${short(N)} neurons`,
        [{label: "preactivation", vector: before, own: true}, {label: "activation", vector: after, own: true}],
        {...choosing("neuron", N), axis: "neuron", note: `${percent(active / N)} of the neurons are positive.`}),
      tablePicture("mlp-neurons", "The neurons that add most",
        ["neuron", "preactivation", "activation", "length of its vector", "length added", ...PUSH_COLUMNS],
        neurons.map(({index: n, ...pushes}) => [n, before[n], after[n], lengths[n], writes[n], ...pushCells(pushes)]),
        {selected: i => neurons[i].index === neuron, click: i => change({neuron: neurons[i].index}),
          note: `A neuron adds its activation times its vector, a column of c_proj. ${DIRECT_EFFECT}`}),
      vectorPicture("mlp-stream", "Into the residual stream", [
        {label: "between", vector: between.data}, {label: "MLP", vector: mlp.data},
        {label: "after", vector: end, rule: true},
      ], {
        ...choosing("stream_channel", C),
        below: [checkSame("between + MLP − after", between.data.map((x, c) => x + mlp.data[c]), end),
          !off && checkSame("all neurons − MLP", sum, mlp.data)],
      }),
      await drawProducts(context, "mlp-products", {
        name: `${name}.c_fc`, row: neuron, input: tensors.ln_2.data, output: before[neuron], inputName: "ln_2(x)",
        outputName: `preactivation[${neuron}]`,
      }));
  },
}, {neuron: 0});

// --- the residual stream ---------------------------------------------------------------------------------------------

// The name of a state: before the first layer, after attention and after the MLP of each layer.
function stateName(s) {
  return s === 0 ? "embedding" : `${s % 2 ? "attention" : "MLP"} ${Math.floor((s - 1) / 2)}`;
}

// A cell of the logit lens: the darker, the more probable.
function lensCell(id, probability, next) {
  return element("td", {class: id === next && "next", style: onColor("sequential", 0.85 * probability)},
    visible(pieces[id]), element("small", {}, smallPercent(probability)));
}

function smallPercent(p) {
  return p < 1e-4 ? "<0.01%" : percent(p);
}

defineView({
  id: "stream", title: "The residual stream",
  about: "A token is one vector that every layer adds to: attention first, then the MLP. The logit lens reads each "
    + "state as if it were the last one: what would be predicted there?",
  async draw(box, context) {
    const {ids, labels, names: tokens, token, layer, overview: {tensors: {norms: allNorms}}} = context;
    const [{tensors}, {facts: {first}, tensors: around}] =
      await Promise.all([context.ask("token", {token}), context.ask("lens", {token})]);
    const {states, lens_ids: best, lens_probabilities: ofBest, next_probability: ofNext, next_rank: rank} = tensors;
    const vectors = upTo(states.shape[0]).map(s => rowOf(states, s)), norms = vectors.map(norm);
    const names = vectors.map((_, s) => stateName(s));
    const added = vectors.map((x, s) => s ? norm(x.map((value, c) => value - vectors[s - 1][c])) : norms[0]);
    const next = ids[token + 1], top = upTo(best.shape[1]), window = upTo(around.ids.shape[1]);
    const at = ({data, shape}, s, j) => data[s * shape[1] + j];
    const lens = (heads, cells) => scrolling(element("table", {class: "lens"},
      element("thead", {}, element("tr", {}, element("th", {}, "after"), heads)),
      element("tbody", {}, names.map((name, s) => element("tr", {},
        element("th", {scope: "row", class: s > 0 && Math.floor((s - 1) / 2) === layer && "selected"}, name),
        cells(s))))));
    box.append(layerPicker(context),
      picture("lens", `Token ${tokens[token]}: what would come next`,
        () => ({columns: ["state", "length", "length added", "probability of the next token", "rank of the next token",
          ...top.flatMap(j => [`token ${j + 1}`, `probability ${j + 1}`])],
        rows: names.map((name, s) => [name, norms[s], added[s], ofNext?.data[s] ?? NaN, rank?.data[s] ?? NaN,
          ...top.flatMap(j => [pieces[at(best, s, j)], at(ofBest, s, j)])])}),
        lens(
          [...top.map(j => `${j + 1}.`), "p(next)", "rank", "length", "added"].map(text => element("th", {}, text)),
          s => [...top.map(j => lensCell(at(best, s, j), at(ofBest, s, j), next)),
            ...[ofNext && smallPercent(ofNext.data[s]), rank && short(rank.data[s]), short(norms[s]), short(added[s])]
              .map(text => element("td", {}, text))]),
        "Darker is more probable; added is the length of what attention or the MLP added."
          + (next === undefined ? ""
            : ` Framed: ${visible(pieces[next])}, which is next; its rank is the number of more likely tokens.`)),
      picture("lens-window", "The tokens around it",
        () => ({columns: ["position", "token", "state", "most likely", "probability"],
          rows: window.flatMap(j => names.map((name, s) =>
            [first + j, labels[first + j], name, pieces[at(around.ids, s, j)], at(around.probabilities, s, j)]))}),
        lens(window.map(j => element("th", {
          class: first + j === token && "selected", style: {cursor: "pointer"},
          click: () => selectToken(first + j),
        }, element("small", {}, first + j), element("br"), visible(labels[first + j]))),
        s => window.map(j => lensCell(at(around.ids, s, j), at(around.probabilities, s, j), ids[first + j + 1]))),
        "A column is a token, a row a state of its stream: the most likely next token there, framed if it is what "
          + "follows."),
      vectorPicture("stream", "The states", vectors.map((vector, s) => ({label: names[s], vector})),
        {note: "The vector of the token after each half layer."}),
      vectorPicture("stream-norms", "Lengths of all tokens",
        names.map((label, s) => ({label, vector: rowOf(allNorms, s)})),
        {axis: "token", place: token, click: (_, t) => selectToken(t),
          note: "The lengths of the vectors of all tokens after each half layer."}));
  },
});
