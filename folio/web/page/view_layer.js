// Views of a layer: queries, keys and values, outputs of heads and neurons, and the residual stream.

const PARTS = ["query", "key", "value"];
const DIRECT_EFFECT = "Logit effects are direct: through the final norm and the output matrix, without later layers.";

function isHeadOff(layer, head) {
  return state.heads_off.split(",").includes(`${layer}.${head}`);
}

// An index below `size` from a number of the state.
function clampIndex(size, x) {
  return clamp(Math.trunc(x), 0, size - 1);
}

// Options of vectorPicture for an index in state[name] that is selected by a click.
function selectable(name, size) {
  return {index: clampIndex(size, state[name]), click: (_, k) => change({[name]: k})};
}

// A line that checks that two vectors are equal.
function checkSame(text, x, y) {
  return checkLine(`${text}, largest difference`, maxDifference(x, y), maxAbs(y));
}

function norm(x) {
  return Math.sqrt(dot(x, x));
}

function tokenTitle(context) {
  const {token, layer} = context;
  return `Token ${tokenAt(context, token)}, layer ${layer}`;
}

// A row of a parameter; null for biases of a model without biases.
async function parameterRow(context, name, row) {
  if (name.endsWith(".bias") && !context.config.bias) return null;
  return (await context.ask("parameter", {name, row})).tensors.row.data;
}

// One output of a linear layer: its row of weights, the products with the input, and their sum.
async function drawProducts(context, id, {name, row, input, output, inputName, outputName}) {
  const weights = await parameterRow(context, `${name}.weight`, row);
  const bias = (await parameterRow(context, `${name}.bias`, 0))?.[row] ?? 0;
  const products = Array.from(input, (x, c) => [c, x, weights[c], x * weights[c]]);
  const total = rows => sumOf(rows.map(row => row[3])), sum = total(products) + bias;
  const strongest = [...products].sort((a, b) => Math.abs(b[3]) - Math.abs(a[3])).slice(0, 8);
  const ends = [["bias", "", "", bias], ["sum", "", "", sum]], names = [inputName, "weight", "product"];
  return vectorPicture(id, `${outputName} = ${short(output)}`,
    names.map((label, i) => ({label, vector: products.map(row => row[i + 1]), ownScale: true})), {
    textWidth: 10, table: () => ({columns: ["channel", ...names], rows: [...products, ...ends]}),
    note: `Row ${row} of ${name.replace("transformer.", "")}.weight times ${inputName}.`,
    below: [
      tableOf(["largest products", ...names],
        [...strongest, ["others", "", "", sum - bias - total(strongest)], ...ends]),
      checkLine(`sum − ${outputName}`, sum - output, output),
    ],
  });
}

// Table cells of the logit effects of a vector: three tokens up and down, and the largest change.
function effectCells({up, down}) {
  const nameOf = ([id]) => SYMBOLS.get(pieces[id]) ?? pieces[id];
  return [up, down].flatMap(effects => [effects.slice(0, 3).map(nameOf).join("  "), effects[0][1]]);
}

const EFFECT_COLUMNS = ["raises", "by up to", "lowers", "by up to"];

// --- queries, keys and values ----------------------------------------------------------------------------------------

defineView({
  id: "qkv", title: "Query, key, value",
  about: "Each head computes three vectors per token: the query is what the token searches for, the key is what others "
    + "can find, and the value is the information passed on. Click a number to see its computation.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, D = C / config.n_head;
    const {tensors} = await context.ask("layer", {layer, token}), rotates = config.position === "rotary";
    const part = clampIndex(3, state.qkv_part), channel = clampIndex(D, state.head_channel);
    const projected = PARTS.map((_, i) => tensors.qkv.data.subarray(i * C + head * D, i * C + (head + 1) * D));
    const rows = PARTS.flatMap((label, i) => [
      {label, part: i, vector: projected[i]},
      i < 2 && rotates && {label: `${label} rotated`, part: i, vector: rowOf(tensors["qk"[i]], head)},
    ].filter(Boolean));
    box.append(headPicker(context),
      vectorPicture("qkv", `${tokenTitle(context)}, head ${head}: ${D} numbers each`, rows, {
        index: channel, selected: (i, d) => rows[i].part === part && d === channel,
        click: (i, d) => change({qkv_part: rows[i].part, head_channel: d}),
      }),
      div("pair",
        await drawProducts(context, "qkv-products", {
          name: `transformer.h.${layer}.attn.c_attn`, row: part * C + head * D + channel, input: tensors.ln_1.data,
          output: projected[part][channel], inputName: "ln_1(x)",
          outputName: `${PARTS[part]}[${channel}]${part < 2 && rotates ? " before the rotation" : ""}`,
        }),
        tablePicture("qkv-numbers", "All numbers", ["channel", ...rows.map(({label}) => label)],
          range(D).map(d => [d, ...rows.map(({vector}) => vector[d])]),
          {selected: d => d === channel,
            click: (d, j) => change({head_channel: d, qkv_part: rows[j - 1]?.part ?? part})})));
  },
}, {qkv_part: 0, head_channel: 0});

// --- heads -----------------------------------------------------------------------------------------------------------

defineView({
  id: "head-split", title: "Split into heads",
  about: "One matrix computes the queries, keys and values of all heads as one vector, which is split. One small "
    + "matrix per head would compute the same numbers, but in many steps.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H;
    const {tensors: {qkv: {data: qkv}, separate_heads: {data: separate}}} = await context.ask("layer", {layer, token});
    const heads = range(H).map(h => ({
      label: `head ${h}`, text: h === head ? "← selected" : "",
      vector: PARTS.flatMap((_, part) => Array.from(rowOf({shape: [3 * H, D], data: qkv}, part * H + h))),
    }));
    box.append(headPicker(context),
      vectorPicture("head-split-whole", `${tokenTitle(context)}: one vector of ${short(3 * C)} numbers`,
        PARTS.map((label, i) => ({label, vector: rowOf({shape: [3, C], data: qkv}, i)})), {
          group: D, note: "Split into heads at the gaps.",
          click: (_, c) => change({head: Math.floor(c / D)}),
          read: (i, c, x) => `${PARTS[i]}, number ${c} = ${short(x)}, is number ${c % D} of head ${Math.floor(c / D)}`,
        }),
      vectorPicture("head-split", `${counted(H, "head")} of ${D} numbers`, heads, {
        axis: "number", group: D, groups: PARTS, click: h => change({head: h}),
        read: (h, c, x) => `head ${h}, ${PARTS[Math.floor(c / D)]}[${c % D}] = ${short(x)}`,
        note: `The same numbers, by head. One matrix of ${3 * C} × ${C}, or ${3 * H} of ${D} × ${C}: both have `
          + `${short(3 * C * C)} weights, and both are computed here.`,
        below: checkSame("one matrix − one matrix per head", qkv, separate),
      }));
  },
});

const MAX_VALUE_ROWS = 12; // tokens with their own row; the others are summed

defineView({
  id: "weighted-sum", title: "Weighted sum of values",
  about: "A head's output z for a token: the sum of all values, times their attention weights. Pale values have small "
    + "weights.",
  async draw(box, context) {
    const {labels, names, token, layer, head, config} = context, D = config.n_embd / config.n_head;
    const [{tensors: {v, z, weights}}, {facts, tensors}] =
      await Promise.all([context.ask("head", {layer, head}), context.ask("layer", {layer, token})]);
    const row = rowOf(weights, token), total = rowOf(z, token), isOff = isHeadOff(layer, head);
    const keys = [...row.keys()].filter(t => t <= token || row[t] > 0);
    const strongest = [...keys].sort((a, b) => row[b] - row[a]).slice(0, MAX_VALUE_ROWS).sort((a, b) => a - b);
    const others = keys.filter(t => !strongest.includes(t));
    const weigh = tokens => total.map((_, d) => sumOf(tokens.map(t => row[t] * v.data[t * D + d])));
    const text = (tokens, product) => `${percent(sumOf(tokens.map(t => row[t])))}: ${short(product[channel])}`;
    const sum = weigh(keys), channel = clampIndex(D, state.head_channel), {up, down} = facts.heads[head];
    box.append(headPicker(context),
      vectorPicture("weighted-sum", `${tokenTitle(context)}, head ${head}: values, faded by their weights`, [
        ...strongest.map(t => ({
          label: names[t], vector: rowOf(v, t), fade: row[t] / maxAbs(row), text: text([t], weigh([t])),
        })),
        others.length && {
          label: counted(others.length, "other"), vector: weigh(others), text: text(others, weigh(others)),
        },
        {label: "sum", vector: sum, rule: true, text: text(keys, sum)},
        {label: isOff ? "z (off)" : "z", vector: total},
      ].filter(Boolean), {
        ...selectable("head_channel", D), textWidth: 130,
        table: () => ({columns: ["token", "text", "weight", ...range(D).map(d => `v[${d}]`)], rows: [
          ...keys.map(t => [t, labels[t], row[t], ...rowOf(v, t)]), ["z", "", "", ...total]]}),
        below: isOff ? [] : checkSame("weighted sum − z", sum, total),
        note: "Percentages are weights; each number is a weight times the framed channel.",
      }),
      tablePicture("head-effect", "Logit effects of the head", ["raises", "by", "lowers", "by"],
        up.map(([id, x], i) => [pieces[id], x, pieces[down[i][0]], down[i][1]]),
        {note: `W_O maps z to a vector of norm ${short(norm(rowOf(tensors.head_outputs, head)))}, which changes the `
          + `logits after ${visible(labels[token])}. ${DIRECT_EFFECT}`}));
  },
});

defineView({
  id: "merge", title: "Merging the heads",
  about: "The outputs z of all heads are concatenated, and W_O maps them to the output of attention. Each head has its "
    + "own columns of W_O, so the output is a sum over heads.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H;
    const {facts, tensors} = await context.ask("layer", {layer, token});
    const {z, head_outputs: outputs, attention, before, between} = tensors;
    const bias = await parameterRow(context, `transformer.h.${layer}.attn.c_proj.bias`, 0);
    const labelOf = h => `head ${h}${isHeadOff(layer, h) ? " (off)" : ""}`;
    const heads = range(H).map(h => ({label: labelOf(h), vector: rowOf(outputs, h)}));
    const parts = bias ? [...heads, {label: "bias", vector: bias}] : heads;
    const sum = attention.data.map((_, c) => sumOf(parts.map(({vector}) => vector[c])));
    box.append(layerPicker(context),
      vectorPicture("merge-z", `${tokenTitle(context)}: z of all heads`,
        heads.map(({label}, h) => ({label, vector: rowOf(z, h), text: `${h * D}–${(h + 1) * D - 1}`})),
        {axis: "number", click: h => change({head: h}), note: "At the right: the indices in the merged vector."}),
      vectorPicture("merge", "Outputs of the heads", [
        ...parts, {label: "attention", vector: attention.data, rule: true}, {label: "before", vector: before.data},
        {label: "between", vector: between.data, rule: true},
      ], {
        ...selectable("stream_channel", C),
        note: "Attention is the sum of the rows above it; between = before + attention.",
        below: [checkSame("heads − attention", sum, attention.data),
          checkSame("attention + before − between", before.data.map((x, c) => x + attention.data[c]), between.data)],
      }),
      tablePicture("merge-heads", "Heads", ["head", "norm of z", "norm of output", ...EFFECT_COLUMNS],
        heads.map(({vector}, h) => [h, norm(rowOf(z, h)), norm(vector), ...effectCells(facts.heads[h])]),
        {selected: h => h === head, click: h => change({head: h}), note: DIRECT_EFFECT}));
  },
}, {stream_channel: 0});

// --- the MLP ---------------------------------------------------------------------------------------------------------

defineView({
  id: "mlp", title: "Neurons",
  about: "The MLP processes each token separately. Each neuron multiplies the token by its weights; the activation "
    + "function suppresses negative values. Its output vector, times its activation, is added to the residual stream.",
  async draw(box, context) {
    const {token, layer, config} = context, C = config.n_embd, name = `transformer.h.${layer}.mlp`;
    const {facts: {neurons}, tensors} = await context.ask("layer", {layer, token});
    const {mlp, between, preactivation: {data: before}, hidden: {data: after}} = tensors;
    const columnNorms = tensors.column_norms.data;
    const N = before.length, outputNorms = after.map((x, n) => Math.abs(x) * columnNorms[n]);
    const neuron = clampIndex(N, state.neuron);
    const bias = await parameterRow(context, `${name}.c_proj.bias`, 0), end = tensors.after.data;
    const sum = tensors.written.data.map((x, c) => x + (bias?.[c] ?? 0)), active = after.filter(x => x > 0).length;
    const isOff = state.mlps_off.split(",").includes(String(layer));
    box.append(layerPicker(context),
      isOff ? element("p", {class: "error"}, "This MLP is off: it adds 0. The neurons show what it would add.") : "",
      vectorPicture("mlp-activations", `${tokenTitle(context)}: ${short(N)} neurons`,
        [{label: "preactivation", vector: before}, {label: "activation", vector: after}]
          .map(row => ({...row, ownScale: true})),
        {...selectable("neuron", N), axis: "neuron", note: `${percent(active / N)} of the neurons are positive.`}),
      tablePicture("mlp-neurons", "Strongest neurons",
        ["neuron", "preactivation", "activation", "norm of column", "norm of output", ...EFFECT_COLUMNS],
        neurons.map(({index: n, ...effects}) =>
          [n, before[n], after[n], columnNorms[n], outputNorms[n], ...effectCells(effects)]),
        {selected: i => neurons[i].index === neuron, click: i => change({neuron: neurons[i].index}),
          note: `The output of a neuron is its activation times its column of c_proj. ${DIRECT_EFFECT}`}),
      vectorPicture("mlp-stream", "Residual stream", [
        {label: "between", vector: between.data}, {label: "MLP", vector: mlp.data},
        {label: "after", vector: end, rule: true},
      ], {
        ...selectable("stream_channel", C),
        below: [checkSame("between + MLP − after", between.data.map((x, c) => x + mlp.data[c]), end),
          !isOff && checkSame("all neurons − MLP", sum, mlp.data)],
      }),
      await drawProducts(context, "mlp-products", {
        name: `${name}.c_fc`, row: neuron, input: tensors.ln_2.data, output: before[neuron], inputName: "ln_2(x)",
        outputName: `preactivation[${neuron}]`,
      }));
  },
}, {neuron: 0});

// --- the residual stream ---------------------------------------------------------------------------------------------

// The name of a state of the residual stream.
function stateName(s) {
  return s === 0 ? "embedding" : `${s % 2 ? "attention" : "MLP"} ${Math.floor((s - 1) / 2)}`;
}

// A cell of the logit lens. Cells with a stronger color are more probable.
function lensCell(id, probability, next) {
  return element("td", {class: id === next && "next", style: onColor("sequential", 0.85 * probability)},
    visible(pieces[id]), element("small", {}, percent(probability)));
}

defineView({
  id: "stream", title: "Residual stream",
  about: "Each token has one vector, to which every layer adds the outputs of attention and the MLP. The logit lens "
    + "predicts the next token from each state as if it were the final state.",
  async draw(box, context) {
    const {ids, labels, names: tokens, token, layer, overview: {tensors: {norms: allNorms}}} = context;
    const [{tensors}, {facts: {first}, tensors: around}] =
      await Promise.all([context.ask("token", {token}), context.ask("lens", {token})]);
    const {states, lens_ids: best, lens_probabilities: bestP, next_probability: nextP, next_rank: rank} = tensors;
    const vectors = range(states.shape[0]).map(s => rowOf(states, s)), norms = vectors.map(norm);
    const names = vectors.map((_, s) => stateName(s));
    const added = vectors.map((x, s) => s ? norm(x.map((value, c) => value - vectors[s - 1][c])) : norms[0]);
    const next = ids[token + 1], top = range(best.shape[1]), window = range(around.ids.shape[1]);
    const valueAt = ({data, shape}, s, j) => data[s * shape[1] + j];
    const lens = (heads, cells, role) => element("div", {class: "scroll", tabindex: !role && 0}, element("table",
      {class: "lens", role},
      element("thead", {}, element("tr", {}, element("th", {}, "after"), heads)),
      element("tbody", {}, names.map((name, s) => element("tr", {},
        element("th", {scope: "row", class: s > 0 && Math.floor((s - 1) / 2) === layer && "selected"}, name),
        cells(s))))));
    box.append(layerPicker(context),
      picture("lens", `Logit lens of token ${tokenAt(context, token)}`,
        () => ({columns: ["state", "norm", "norm added", "probability of the next token", "rank of the next token",
          ...top.flatMap(j => [`token ${j + 1}`, `probability ${j + 1}`])],
        rows: names.map((name, s) => [name, norms[s], added[s], nextP?.data[s] ?? NaN, rank?.data[s] ?? NaN,
          ...top.flatMap(j => [pieces[valueAt(best, s, j)], valueAt(bestP, s, j)])])}),
        lens(
          [...top.map(j => `${j + 1}.`), "p(next)", "rank", "norm", "added"].map(text => element("th", {}, text)),
          s => [...top.map(j => lensCell(valueAt(best, s, j), valueAt(bestP, s, j), next)),
            ...[nextP && percent(nextP.data[s]), rank && short(rank.data[s]), short(norms[s]), short(added[s])]
              .map(text => element("td", {}, text))]),
        "A stronger color is more probable; added: norm of the output of attention or the MLP."
          + (next === undefined ? ""
            : ` Framed: the next token, ${visible(pieces[next])}; its rank is the number of more likely tokens.`)),
      picture("lens-window", "Surrounding tokens",
        () => ({columns: ["position", "token", "state", "most likely", "probability"],
          rows: window.flatMap(j => names.map((name, s) =>
            [first + j, labels[first + j], name, pieces[valueAt(around.ids, s, j)],
              valueAt(around.probabilities, s, j)]))}),
        lens(reachByKeys(window.map(j => element("th", {
          class: first + j === token && "selected", style: {cursor: "pointer"},
          click: () => selectToken(first + j),
        }, element("small", {}, first + j), element("br"), visible(labels[first + j]))), token - first),
        s => window.map(j =>
          lensCell(valueAt(around.ids, s, j), valueAt(around.probabilities, s, j), ids[first + j + 1])), "grid"),
        "Columns are tokens, rows are states: the most likely next token, framed if it is the actual next token."),
      vectorPicture("stream", "States", vectors.map((vector, s) => ({label: names[s], vector})),
        {note: "The vector of the token after each attention and MLP."}),
      vectorPicture("stream-norms", "Norms of all tokens",
        names.map((label, s) => ({label, vector: rowOf(allNorms, s)})),
        {axis: "token", index: token, click: (_, t) => selectToken(t),
          note: "The norms of the vectors of all tokens after each attention and MLP."}));
  },
});
