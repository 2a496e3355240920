"use strict";
// Views inside a layer: queries, keys and values, what heads and neurons add, and the residual stream.

const PARTS = {q: "query", k: "key", v: "value"};

function isHeadOff(layer, head) {
  return state.heads_off.split(",").filter(Boolean).some(pair => pair.split(".").map(Number).join() === [layer, head].join());
}

function isMlpOff(layer) {
  return state.mlps_off.split(",").filter(Boolean).map(Number).includes(layer);
}

// The place in a vector of `size` numbers that is nearest to a number of the state.
function placeIn(size, x) {
  return clamp(Math.trunc(x), 0, size - 1);
}

function norm(x) {
  return Math.sqrt(dot(x, x));
}

function signedShort(x) {
  return (x > 0 ? "+" : "") + short(x);
}

// What the colors of vectors mean.
function colorNote(vectors) {
  return `Colors: dark −${short(largest(vectors.map(largest)))}, gray 0, light +${short(largest(vectors.map(largest)))}.`;
}

const OWN_COLORS = "Colors: dark negative, gray 0, light positive, relative to the largest number of each row.";

function tokenTitle({labels, token}) {
  return `Token ${token} ${visible(labels[token])}`;
}

// A row of a parameter.
async function parameterRow(context, name, row) {
  return (await context.ask("parameter", {name, row})).tensors.row.data;
}

// The bias of a linear layer; zeros if it has none.
function biasOf(context, name, size) {
  return context.config.bias ? parameterRow(context, `${name}.bias`, 0) : new Float32Array(size);
}

// A number that selects a channel or a neuron.
function numberInput(title, name, value, most) {
  return element("label", {}, `${title} `, element("input", {
    type: "number", min: 0, max: most, value, "data-testid": name, change: event => change({[name]: Number(event.target.value) || 0}),
  }));
}

// A number of a linear layer's output: its row of weights, the products with the input, and their sum.
async function drawProducts(context, id, {name, row, input, output, inputName, outputName}) {
  const {config} = context, weights = await parameterRow(context, `${name}.weight`, row), size = largest([output]);
  const bias = config.bias ? (await parameterRow(context, `${name}.bias`, 0))[row] : 0;
  const products = Float64Array.from(input, (x, c) => x * weights[c]);
  const sum = products.reduce((total, x) => total + x, 0);
  const order = Array.from(products.keys()).sort((a, b) => Math.abs(products[b]) - Math.abs(products[a])).slice(0, 8);
  const rest = sum - order.reduce((total, c) => total + products[c], 0);
  const rows = [
    ...order.map(c => [String(c), input[c], weights[c], products[c]]),
    ...(products.length > order.length ? [[`the other ${products.length - order.length}`, "", "", rest]] : []),
    ...(config.bias ? [["bias", "", "", bias]] : []), ["sum", "", "", sum + bias],
  ];
  const columns = [{title: "channel"}, {title: inputName}, {title: "weight"}, {title: "product"}];
  const names = [inputName, "weights", "products"];
  return picture(id, `${outputName} = ${short(output)}`,
    () => ({columns: columns.map(column => column.title), rows: [
      ...Array.from(products, (product, c) => [c, input[c], weights[c], product]), ["bias", "", "", bias], ["sum", "", "", sum + bias]]}),
    element("div", {},
      stackOfStrips([input, weights, products].map((vector, i) => ({label: names[i], vector, own: true})),
        {read: (i, c, x) => `channel ${c}: ${names[i]} ${short(x)}`, textWidth: 10}),
      numberTable(columns, rows, {selected: i => i === rows.length - 1}),
      checkLine(`sum of the products${config.bias ? " + bias" : ""} − ${outputName}`, sum + bias - output, size)),
    `Row ${row} of ${name}.weight times ${inputName}${config.bias ? ", plus a bias" : ""}. The largest products `
      + `are listed. ${OWN_COLORS}`);
}

// The tokens that a vector pushes up and down, as {up: [[id, change of the logit], ...], down}.
function drawPushes(id, title, {up, down}, note) {
  const most = Math.max(...[...up, ...down].map(([, x]) => Math.abs(x)), 1e-30);
  const labelWidth = 16 + 7.5 * Math.max(0, ...[...up, ...down].map(([token]) => visible(pieces[token]).length));
  const side = (name, pushed, color) => element("div", {}, element("div", {class: "note"}, name), bars(pushed.map(([token, x]) =>
    ({label: visible(pieces[token]), value: Math.abs(x), text: signedShort(x), color})), most, {width: 100, labelWidth}));
  return picture(id, title,
    () => ({columns: ["token id", "token", "change of the logit"], rows: [...up, ...down].map(([token, x]) => [token, pieces[token], x])}),
    element("div", {class: "row"}, side("up", up, "#1f5fbf"), side("down", down, "#c2410c")), note);
}

function pushedText(pushed) {
  return pushed.slice(0, 3).map(([token, x]) => `${visible(pieces[token])} ${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)}`).join("  ");
}

const NO_PUSHES = {up: [], down: []};
const DIRECT_EFFECT = "Direct effect: the vector goes through the last norm, which keeps the mean and deviation that the token "
  + "has there, and through the output matrix. What later layers make of it is not included.";

// --- queries, keys and values ----------------------------------------------------------------------------------------

defineView({
  id: "qkv", title: "Query, key, value",
  about: "Each head makes three vectors from a token: the query says what the token looks for, the key what it offers to the "
    + "queries of others, and the value what it passes on to them. Click a number to see the weights behind it.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, D = C / config.n_head;
    const {tensors} = await context.ask("layer", {layer, token});
    const rotates = config.position === "rotary", parts = Object.keys(PARTS);
    const part = state.qkv_part in PARTS ? state.qkv_part : "q", channel = placeIn(D, state.head_channel);
    const first = name => parts.indexOf(name) * C + head * D;
    const projected = Object.fromEntries(parts.map(name => [name, tensors.qkv.data.subarray(first(name), first(name) + D)]));
    const rows = parts.flatMap(name => [
      {part: name, label: PARTS[name], vector: projected[name], clickable: true},
      ...(rotates && name !== "v" ? [{part: name, label: `${name} rotated`, vector: rowOf(tensors[name], head)}] : []),
    ]);
    for (const row of rows) row.text = `|${row.part}| ${short(norm(row.vector))}`;
    const columns = [{title: "channel"}, ...rows.map(row => ({title: row.label}))];
    const numbers = Array.from({length: D}, (_, d) => [d, ...rows.map(row => row.vector[d])]);
    const input = [["x", tensors.before.data], ["ln_1(x)", tensors.ln_1.data]];
    const name = `${part}[${channel}]`, all = picture("qkv-numbers", "All numbers",
      () => ({columns: columns.map(column => column.title), rows: numbers}),
      numberTable(columns, numbers, {selected: d => d === channel, click: d => change({head_channel: d})}));
    box.append(headPicker(context),
      shapeFlow(["x", C], "→ ln_1 →", ["ln_1(x)", C], `→ W: ${3 * C} × ${C}${config.bias ? ", + b" : ""} →`,
        ["q, k, v of all heads", 3 * C], `→ head ${head} →`, ["q, k, v", `${D} each`], rotates && "→ q and k are rotated"),
      picture("qkv-input", `${tokenTitle(context)}, layer ${layer}: what comes in`,
        () => ({columns: ["channel", ...input.map(([title]) => title)], rows: Array.from(input[0][1], (x, c) => [c, x, input[1][1][c]])}),
        stackOfStrips(input.map(([label, vector]) => ({label, vector, own: true, text: `norm ${short(norm(vector))}`})),
          {read: (i, c, x) => `${input[i][0]}[${c}] = ${short(x)}`, textWidth: 100}), `The token in the residual stream, and after the norm. ${OWN_COLORS}`),
      picture("qkv", `The three vectors of head ${head}, ${D} numbers each`,
        () => ({columns: columns.map(column => column.title), rows: numbers}),
        stackOfStrips(rows, {
          read: (i, d, x) => `${rows[i].label}[${d}] = ${short(x)}`, textWidth: 80, chosen: (i, d) => rows[i].part === part && rows[i].clickable && d === channel,
          click: (i, d) => change({qkv_part: rows[i].part, head_channel: d}),
        }), colorNote(rows.map(row => row.vector))),
      element("div", {class: "controls"}, parts.map(other => element("button", {
        class: other === part ? "chosen" : null, "aria-pressed": String(other === part), click: () => change({qkv_part: other}),
      }, PARTS[other])), numberInput("number", "head_channel", channel, D - 1)),
      element("div", {class: "pair"},
        await drawProducts(context, "qkv-products", {
          name: `transformer.h.${layer}.attn.c_attn`, row: first(part) + channel, input: tensors.ln_1.data,
          output: projected[part][channel], inputName: "ln_1(x)", outputName: rotates && part !== "v" ? `${name} before the rotation` : name,
        }),
        rotates ? await drawRotation(context, part, channel, projected[part], part !== "v" && rowOf(tensors[part], head)) : all),
      rotates ? all : "");
  },
}, {qkv_part: "q", head_channel: 0});

// How rotary positions rotate a query or a key: channels i and i + D / 2 are a point in a plane.
async function drawRotation(context, part, channel, before, after) {
  if (part === "v") return element("div", {class: "note"}, "Values are not rotated.");
  const {token} = context, half = before.length / 2, i = channel % half;
  const {tensors: {angles}} = await context.ask("positions");
  const turns = rowOf(angles, token);
  const turned = (pair, a = before[pair], b = before[pair + half], turn = turns[pair]) =>
    [a * Math.cos(turn) - b * Math.sin(turn), a * Math.sin(turn) + b * Math.cos(turn)];
  const computed = [0, 1].flatMap(side => Array.from({length: half}, (_, pair) => turned(pair)[side]));
  const [x, y] = [before[i], before[i + half]], [u, w] = turned(i), most = Math.hypot(x, y) || 1, size = 110;
  const at = (a, b) => ({x2: size + 90 * a / most, y2: size - 90 * b / most});
  const arrow = (a, b, color, dash, text) => {
    const {x2, y2} = at(a, b);
    return [svg("line", {x1: size, y1: size, x2, y2, stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash}),
      svg("circle", {cx: x2, cy: y2, r: 4, fill: color}),
      svg("text", {x: clamp(x2 + 6, 4, 150), y: clamp(y2 - 6, 12, 2 * size - 4)}, text)];
  };
  const angle = turns[i];
  return picture("rotation", `Rotation of ${part}[${i}] and ${part}[${i + half}]`,
    () => ({columns: ["channel", "other channel", "angle", "before", "other before", "after", "other after"],
      rows: Array.from({length: half}, (_, pair) => [pair, pair + half, turns[pair], before[pair], before[pair + half], after[pair], after[pair + half]])}),
    element("div", {}, svg("svg", {width: 2 * size, height: 2 * size, role: "img"},
      svg("line", {x1: 0, x2: 2 * size, y1: size, y2: size, stroke: "#d9dee6"}), svg("line", {x1: size, x2: size, y1: 0, y2: 2 * size, stroke: "#d9dee6"}),
      svg("circle", {cx: size, cy: size, r: 90, fill: "none", stroke: "#d9dee6"}),
      arrow(x, y, "#5d6878", "4 3", "before"), arrow(u, w, "#1f5fbf", null, "after")),
    element("div", {class: "readout"}, `angle = ${token} × ${short(token ? angle / token : 10000 ** (-i / half))} = ${short(angle)} radians\n`
      + `${short(x)} cos − ${short(y)} sin = ${short(after[i])}\n${short(x)} sin + ${short(y)} cos = ${short(after[i + half])}`),
    checkLine(`rotated here − ${part} of the model`, largestDifference(computed, after), largest(after))),
    `Position ${token} turns each pair of channels by its own angle. Horizontal: channel ${i}; vertical: channel ${i + half}.`);
}

// --- heads -----------------------------------------------------------------------------------------------------------

defineView({
  id: "head-split", title: "Split into heads",
  about: "One matrix computes the queries, keys and values of all heads as one long vector, which is cut into pieces. A small "
    + "matrix for each head would compute the same numbers, in many steps instead of one.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H, parts = Object.keys(PARTS);
    const {tensors: {qkv, separate_heads: separate}} = await context.ask("layer", {layer, token});
    const piece = ({data}, part, h) => data.subarray(part * C + h * D, part * C + (h + 1) * D);
    const whole = parts.map((part, i) => ({label: `${PARTS[part]} ${i * C}–${(i + 1) * C - 1}`, vector: qkv.data.subarray(i * C, (i + 1) * C)}));
    const cut = Array.from({length: H}, (_, h) => {
      const vector = new Float32Array(3 * D);
      parts.forEach((_, part) => vector.set(piece(qkv, part, h), part * D));
      return {label: `head ${h}`, vector};
    });
    const differences = Array.from({length: H}, (_, h) => parts.map((_, part) => Math.abs(largestDifference(piece(qkv, part, h), piece(separate, part, h)))));
    const both = [["one matrix, cut", qkv], ["a matrix per head", separate]].map(([label, numbers]) =>
      ({label, vector: Float32Array.from(parts.flatMap((_, part) => Array.from(piece(numbers, part, head))))}));
    const rotated = config.position === "rotary" ? " The rotation by positions comes after this." : "";
    box.append(headPicker(context),
      shapeFlow(["ln_1(x)", C], `→ W: ${3 * C} × ${C} →`, ["q, k, v", 3 * C], "→ cut in 3 →", ["q", C], ["k", C], ["v", C], "→ cut in H →",
        [`${H} heads`, `q, k, v of ${D}`]),
      picture("head-split-whole", `${tokenTitle(context)}, layer ${layer}: one vector of ${(3 * C).toLocaleString("en-US")} numbers`,
        () => ({columns: ["index", "part", "head", "channel", "value"], rows: Array.from(qkv.data, (x, i) =>
          [i, parts[Math.floor(i / C)], Math.floor(i % C / D), i % D, x])}),
        stackOfStrips(whole, {group: D, labelWidth: 130, textWidth: 10, click: (_, c) => change({head: Math.floor(c / D)}),
          read: (i, c, x) => `${PARTS[parts[i]]}, number ${i * C + c}: ${short(x)}; becomes number ${c % D} of head ${Math.floor(c / D)}`}),
        `The cuts between heads are white. ${colorNote([qkv.data])}`),
      picture("head-split", `${H} heads, with a query, a key and a value of ${D} numbers each`,
        () => ({columns: ["head", ...parts.flatMap(part => Array.from({length: D}, (_, d) => `${part}[${d}]`))], rows: cut.map(({vector}, h) => [h, ...vector])}),
        stackOfStrips(cut.map((row, h) => ({...row, text: h === head ? "← chosen" : ""})), {group: D, groups: Object.values(PARTS), textWidth: 80,
          read: (h, c, x) => `head ${h}, ${PARTS[parts[Math.floor(c / D)]]}[${c % D}] = ${short(x)}`, click: h => change({head: h})}),
        `The same numbers, in a row for each head.${rotated}`),
      picture("two-ways", `Both ways, for head ${head}`,
        () => ({columns: ["part", "head", "channel", "one matrix, cut", "a matrix for each head", "difference"], rows: Array.from(qkv.data, (x, i) =>
          [parts[Math.floor(i / C)], Math.floor(i % C / D), i % D, x, separate.data[i], x - separate.data[i]])}),
        element("div", {},
          stackOfStrips(both, {group: D, groups: Object.values(PARTS), labelWidth: 140, textWidth: 10,
            read: (i, c, x) => `head ${head}, ${PARTS[parts[Math.floor(c / D)]]}[${c % D}] = ${short(x)}, the other way ${short(both[1 - i].vector[c])}`}),
          numberTable(["head", ...parts.map(part => `largest difference of ${part}`)].map(title => ({title})), differences.map((row, h) => [h, ...row]),
            {selected: h => h === head, click: h => change({head: h})}),
          checkLine("largest difference of all numbers", largestDifference(qkv.data, separate.data), largest(qkv.data))),
        `One matrix of ${3 * C} × ${C}, or ${3 * H} matrices of ${D} × ${C}: both have ${(3 * C * C).toLocaleString("en-US")} weights. `
          + "Their products are computed apart; differences are rounding."));
  },
});

const SHOWN_VALUES = 12; // tokens whose values are drawn; the others are summed

defineView({
  id: "weighted-sum", title: "The sum of values",
  about: "A head's output z for a token is the sum of the values of the tokens that it looks at, each multiplied by its attention "
    + "weight. Pale values have small weights.",
  async draw(box, context) {
    const {ids, labels, token, layer, head, config} = context, D = config.n_embd / config.n_head;
    const [{tensors: {v, z, weights}}, {facts, tensors}] =
      await Promise.all([context.ask("head", {layer, head}), context.ask("layer", {layer, token})]);
    const row = rowOf(weights, token), total = rowOf(z, token), channel = placeIn(D, state.head_channel);
    const seen = Array.from(row.keys()).filter(t => t <= token || row[t] > 0);
    const strongest = [...seen].sort((a, b) => row[b] - row[a]).slice(0, SHOWN_VALUES).sort((a, b) => a - b);
    const others = seen.filter(t => !strongest.includes(t)), most = largest(row);
    const sumOf = tokens => Float32Array.from({length: D}, (_, d) => tokens.reduce((sum, t) => sum + row[t] * v.data[t * D + d], 0));
    const sum = sumOf(seen), off = isHeadOff(layer, head), labelOf = t => `${t} ${visible(labels[t])}`;
    const rows = [
      ...strongest.map(t => ({label: labelOf(t), vector: rowOf(v, t), fade: row[t] / most, text: percent(row[t])})),
      ...(others.length ? [{label: `the other ${others.length}`, vector: sumOf(others), text: percent(others.reduce((s, t) => s + row[t], 0))}] : []),
      {label: off ? "sum" : "sum = z", vector: sum, rule: true}, ...(off ? [{label: "z (off)", vector: total}] : []),
    ];
    const columns = [{title: "token"}, {title: "", text: true}, {title: "weight"}, {title: `v[${channel}]`}, {title: `weight × v[${channel}]`}];
    const numbers = t => [t, labels[t], row[t], v.data[t * D + channel], row[t] * v.data[t * D + channel]];
    const table = [...[...seen].sort((a, b) => row[b] - row[a]).slice(0, SHOWN_VALUES).map(t => numbers(t).with(1, visible(labels[t]))),
      ...(others.length ? [[`the other ${others.length}`, "", others.reduce((s, t) => s + row[t], 0), "", sumOf(others)[channel]]] : []),
      ["sum", "", row.reduce((s, x) => s + x, 0), "", sum[channel]]];
    const written = rowOf(tensors.head_outputs, head);
    const check = off ? element("div", {class: "check"}, "This head is switched off: z is set to 0.")
      : checkLine("weighted sum − z, largest difference", largestDifference(sum, total), largest(total));
    box.append(headPicker(context),
      picture("weighted-sum", `${tokenTitle(context)}, layer ${layer}, head ${head}: values, faded by their weights`,
        () => ({columns: ["token", "text", "weight", ...Array.from({length: D}, (_, d) => `v[${d}]`)], rows: [
          ...seen.map(t => [t, labels[t], row[t], ...rowOf(v, t)]), ["z", "", "", ...total]]}),
        element("div", {}, stackOfStrips(rows, {
          textWidth: 60, chosen: (_, d) => d === channel, click: (_, d) => change({head_channel: d}),
          read: (i, d, x) => `${rows[i].label}: ${i < strongest.length ? "v" : "sum"}[${d}] = ${short(x)}`
            + (i < strongest.length ? `, × ${percent(row[strongest[i]])} = ${short(x * row[strongest[i]])}` : ""),
        }), check),
        `The values with the ${strongest.length} largest weights, in the order of the text; at the right the weights, which fade them. `
          + `All weights sum to ${row.reduce((s, x) => s + x, 0).toFixed(4)}. ${colorNote(rows.map(r => r.vector))} The frame marks channel ${channel}, a click another one.`),
      element("div", {class: "pair"},
        picture("weighted-sum-numbers", `Channel ${channel} in numbers`,
          () => ({columns: columns.map(column => column.title), rows: seen.map(numbers)}),
          element("div", {}, numberTable(columns, table, {selected: i => i === table.length - 1}), off ? null
            : checkLine(`sum − z[${channel}]`, sum[channel] - total[channel], largest(total))), numberInput("channel", "head_channel", channel, D - 1)),
        drawPushes("head-effect", "What the head's output does to the prediction", off ? NO_PUSHES : facts.heads[head],
          off ? "The head is switched off, so it changes nothing." : `W_O writes z into the residual stream as a vector with norm ${short(norm(written))}, which `
            + `changes the logits of the token after ${labelOf(token)}. ${DIRECT_EFFECT}`)));
  },
}, {head_channel: 0});

defineView({
  id: "merge", title: "Heads put together",
  about: "The outputs z of all heads, one after the other, are one vector again. The matrix W_O turns it into what attention adds "
    + "to the residual stream: each head has its own columns of W_O, so the stream receives a sum of the heads.",
  async draw(box, context) {
    const {token, layer, head, config} = context, C = config.n_embd, H = config.n_head, D = C / H;
    const {facts, tensors} = await context.ask("layer", {layer, token}), {z, head_outputs: written} = tensors;
    const plusBias = config.bias ? " + bias" : "", bias = await biasOf(context, `transformer.h.${layer}.attn.c_proj`, C), channel = placeIn(C, state.stream_channel);
    const heads = Array.from({length: H}, (_, h) => ({
      label: `head ${h}${isHeadOff(layer, h) ? " (off)" : ""}`, z: rowOf(z, h), vector: rowOf(written, h), norm: norm(rowOf(written, h)),
    }));
    const attention = tensors.attention.data, before = tensors.before.data, between = tensors.between.data;
    const sum = bias.map((b, c) => heads.reduce((total, {vector}) => total + vector[c], b));
    const parts = [...heads.map(({label, vector}) => ({label, vector})), ...(config.bias ? [{label: "bias", vector: bias}] : [])];
    const rows = [...parts, {label: "attention", vector: attention, rule: true}].map(row => ({...row, text: `norm ${short(norm(row.vector))}`}));
    const stream = [{label: "before", vector: before}, {label: "+ attention", vector: attention}, {label: "between", vector: between, rule: true}]
      .map(row => ({...row, text: `norm ${short(norm(row.vector))}`}));
    const strips = shown => stackOfStrips(shown, {
      textWidth: 95, chosen: (_, c) => c === channel, click: (_, c) => change({stream_channel: c}), read: (i, c, x) => `${shown[i].label}[${c}] = ${short(x)}`,
    });
    const channels = (shown, name = "channel") => () => ({columns: [name, ...shown.map(row => row.label)], rows: Array.from(shown[0].vector, (_, c) => [c, ...shown.map(row => row.vector[c])])});
    const columns = [{title: "head"}, {title: "norm of z"}, {title: "norm written"}, {title: "pushes up", text: true}, {title: "pushes down", text: true}];
    const off = h => isHeadOff(layer, h);
    box.append(headPicker(context, {heads: false}),
      shapeFlow([`z of ${H} heads`, `${D} each`], "→ one after the other →", ["z", C], `→ W_O: ${C} × ${C}${config.bias ? ", + b" : ""} →`,
        ["attention", C], "→ + x →", ["between", C]),
      picture("merge-z", `${tokenTitle(context)}, layer ${layer}: the heads' z`,
        () => ({columns: ["head", ...Array.from({length: D}, (_, d) => `z[${d}]`)], rows: heads.map((row, h) => [h, ...row.z])}),
        stackOfStrips(heads.map((row, h) => ({label: row.label, vector: row.z, text: `${h * D}–${(h + 1) * D - 1}`})), {
          textWidth: 90, read: (h, d, x) => `head ${h}: z[${d}] = ${short(x)}, number ${h * D + d} of the whole`, click: h => change({head: h}),
        }), `At the right: the places of the head in the vector of ${C} numbers. ${colorNote(heads.map(row => row.z))}`),
      picture("merge", "What each head writes into the residual stream", channels([...rows.slice(0, -1), {label: "attention", vector: attention}]),
        element("div", {}, strips(rows), checkLine(`heads${plusBias} − attention, largest difference`, largestDifference(sum, attention), largest(attention))),
        `W_O z of each head${config.bias ? ", the bias," : ""} and their sum. ${colorNote(rows.map(row => row.vector))} A click chooses a channel.`),
      picture("merge-heads", "The heads", () => ({columns: ["head", "norm of z", "norm of what it writes", "pushes up", "change", "pushes down", "change"],
        rows: heads.map((row, h) => [h, norm(row.z), row.norm, ...[facts.heads[h].up[0], facts.heads[h].down[0]].flatMap(([id, x]) => [pieces[id], x])])}),
        numberTable(columns, heads.map((row, h) => [row.label, norm(row.z), row.norm, off(h) ? "" : pushedText(facts.heads[h].up), off(h) ? "" : pushedText(facts.heads[h].down)]),
          {selected: h => h === head, click: h => change({head: h})}), `The tokens whose logits each one raises and lowers most. ${DIRECT_EFFECT}`),
      picture("merge-stream", "Into the residual stream", channels(stream.map(({label, vector}) => ({label: label.replace("+ ", ""), vector}))),
        element("div", {}, strips(stream), checkLine("before + attention − between, largest difference",
          largestDifference(before.map((x, c) => x + attention[c]), between), largest(between))), colorNote(stream.map(row => row.vector))),
      element("div", {class: "pair"},
        picture("merge-norms", "Norms of what they write", () => ({columns: ["head", "norm"], rows: heads.map((row, h) => [h, row.norm])}),
          bars(heads.map((row, h) => ({label: row.label, value: row.norm, text: short(row.norm), click: () => change({head: h}), dim: off(h)})),
            largest(heads.map(row => row.norm)), {width: 200})),
        picture("merge-numbers", `Channel ${channel} in numbers`,
        () => ({columns: ["part", "value"], rows: [...parts, {label: "attention", vector: attention}, {label: "before", vector: before}, {label: "between", vector: between}]
          .map(({label, vector}) => [label, vector[channel]])}),
        element("div", {}, numberTable([{title: "part"}, {title: `channel ${channel}`}], [
          ...parts.map(({label, vector}) => [label, vector[channel]]), ["= attention", attention[channel]], ["+ before", before[channel]], ["= between", between[channel]]]),
        checkLine(`heads${plusBias} + before − between`, sum[channel] + before[channel] - between[channel], largest(between))),
        numberInput("channel", "stream_channel", channel, C - 1))));
  },
}, {stream_channel: 0});

// --- the MLP ---------------------------------------------------------------------------------------------------------

const ACTIVATION_BINS = [0, 0.01, 0.1, 0.5, 1, Infinity]; // of a neuron's absolute activation

defineView({
  id: "mlp", title: "Neurons",
  about: "The MLP works on each token alone. Its neurons compare the token with their weights; the activation function lets "
    + "through what is positive. Each neuron then adds its own vector to the residual stream, times its activation.",
  async draw(box, context) {
    const {token, layer, config} = context, C = config.n_embd;
    const {facts, tensors} = await context.ask("layer", {layer, token});
    const before = tensors.preactivation.data, after = tensors.hidden.data, columnNorms = tensors.column_norms.data, N = before.length;
    const writes = after.map((x, n) => Math.abs(x) * columnNorms[n]), off = isMlpOff(layer), {neurons} = facts;
    const neuron = state.neuron < 0 ? neurons[0].index : placeIn(N, state.neuron), channel = placeIn(C, state.stream_channel);
    const name = `transformer.h.${layer}.mlp`, bias = await biasOf(context, `${name}.c_proj`, C);
    const sum = tensors.written.data.map((x, c) => x + bias[c]), mlp = tensors.mlp.data, between = tensors.between.data, result = tensors.after.data;
    const activations = [{label: "before", vector: before, own: true}, {label: "after", vector: after, own: true}];
    const columns = [{title: "neuron"}, {title: "preactivation"}, {title: "activation"}, {title: "vector norm"}, {title: "norm written"},
      {title: "pushes up", text: true}, {title: "pushes down", text: true}];
    const counts = ACTIVATION_BINS.slice(1).map((high, i) => after.reduce((n, x) => n + (Math.abs(x) >= ACTIVATION_BINS[i] && Math.abs(x) < high), 0));
    const binNames = counts.map((_, i) => i === 0 ? "below 0.01" : i === counts.length - 1 ? "1 or more" : `${ACTIVATION_BINS[i]} to ${ACTIVATION_BINS[i + 1]}`);
    const curve = Array.from(before.keys()).sort((a, b) => before[a] - before[b]).map(n => [before[n], after[n]]);
    const choose = n => change({neuron: n});
    const stream = [{label: "between", vector: between}, {label: "+ MLP", vector: mlp}, {label: "after", vector: result, rule: true}]
      .map(row => ({...row, text: `norm ${short(norm(row.vector))}`}));
    const strong = new Set(neurons.map(({index}) => index));
    box.append(headPicker(context, {heads: false}),
      element("p", {class: "error"}, off && "This MLP is switched off: it adds 0. The neurons below show what it would write."),
      shapeFlow(["between", C], "→ ln_2 →", ["ln_2(x)", C], `→ W: ${N} × ${C}${config.bias ? ", + b" : ""} →`, ["preactivation", N], `→ ${config.activation} →`,
        ["neurons", N], `→ W: ${C} × ${N}${config.bias ? ", + b" : ""} →`, ["MLP", C], "→ + x →", ["after", C]),
      picture("mlp-activations", `${tokenTitle(context)}, layer ${layer}: ${N.toLocaleString("en-US")} neurons`,
        () => ({columns: ["neuron", "preactivation", "activation", "norm of its vector", "norm of what it writes"],
          rows: Array.from(before, (x, n) => [n, x, after[n], columnNorms[n], writes[n]])}),
        stackOfStrips(activations, {textWidth: 10, labelWidth: 60, chosen: (_, n) => n === neuron, click: (_, n) => choose(n),
          read: (_, n) => `neuron ${n}: ${short(before[n])} → ${short(after[n])}, writes a vector of norm ${short(writes[n])}${strong.has(n) ? ", one of the strongest" : ""}`}),
        `Before and after the activation function. ${OWN_COLORS} The frame marks neuron ${neuron}, a click another one.`),
      picture("mlp-neurons", "The neurons that write most",
        () => ({columns: ["neuron", "preactivation", "activation", "norm of its vector", "norm of what it writes", "pushes up", "change", "pushes down", "change"],
          rows: neurons.map(({index: n, up, down}) => [n, before[n], after[n], columnNorms[n], writes[n], ...[up[0], down[0]].flatMap(([id, x]) => [pieces[id], x])])}),
        numberTable(columns, neurons.map(({index: n, up, down}) => [n, before[n], after[n], columnNorms[n], writes[n], pushedText(up), pushedText(down)]),
          {selected: i => neurons[i].index === neuron, click: i => choose(neurons[i].index)}),
        `What a neuron writes is its activation times its vector, a column of c_proj. The tokens whose logits that raises and lowers most. ${DIRECT_EFFECT}`),
      element("div", {class: "pair"},
        picture("mlp-share", "How many neurons are active", () => ({columns: ["absolute activation", "neurons", "share"], rows: counts.map((n, i) => [binNames[i], n, n / N])}),
          bars(counts.map((n, i) => ({label: binNames[i], value: n, text: `${n}, ${percent(n / N)}`})), Math.max(...counts), {width: 180, labelWidth: 100}),
          `By absolute activation. ${percent(counts[0] / N)} of the neurons are near zero (below 0.01); ${percent(after.reduce((n, x) => n + (x > 0), 0) / N)} are positive.`),
        picture("mlp-curve", `The activation function ${config.activation}`, () => ({columns: ["preactivation", "activation"], rows: curve}),
          lineChart([{name: config.activation, points: curve}], {width: 420, height: 200, xTitle: "preactivation", yTitle: "activation", mark: before[neuron]}),
          `Through this token's neurons, from ${short(curve[0][0])} to ${short(curve.at(-1)[0])}; dashed: neuron ${neuron}.`)),
      picture("mlp-stream", "Into the residual stream",
        () => ({columns: ["channel", "between", "MLP", "after"], rows: Array.from(between, (x, c) => [c, x, mlp[c], result[c]])}),
        element("div", {},
          stackOfStrips(stream, {textWidth: 95, chosen: (_, c) => c === channel, click: (_, c) => change({stream_channel: c}), read: (i, c, x) => `${stream[i].label}[${c}] = ${short(x)}`}),
          element("div", {class: "readout"}, `channel ${channel}: ${short(between[channel])} + ${short(mlp[channel])} = ${short(result[channel])}`),
          checkLine("between + MLP − after, largest difference", largestDifference(between.map((x, c) => x + mlp[c]), result), largest(result)),
          off ? null : checkLine(`all neurons${config.bias ? " + bias" : ""} − MLP, largest difference`, largestDifference(sum, mlp), largest(mlp))),
        colorNote(stream.map(row => row.vector))),
      drawPushes("mlp-effect", "What the whole MLP does to the prediction", off ? NO_PUSHES : facts.mlp_pushes, off ? "The MLP is switched off, so it changes nothing." : DIRECT_EFFECT),
      element("div", {class: "controls"}, numberInput("neuron", "neuron", neuron, N - 1)),
      await drawProducts(context, "mlp-products", {
        name: `${name}.c_fc`, row: neuron, input: tensors.ln_2.data, output: before[neuron], inputName: "ln_2(x)", outputName: `preactivation[${neuron}]`,
      }));
  },
}, {neuron: -1, stream_channel: 0});

// --- the residual stream ---------------------------------------------------------------------------------------------

// The name of a state: before the first layer, after attention and after the MLP of each layer.
function stateName(s) {
  return s === 0 ? "embedding" : `${s % 2 ? "attention" : "MLP"} ${Math.floor((s - 1) / 2)}`;
}

// A cell of the logit lens: the darker, the more probable.
function lensCell(id, probability, entropy, next) {
  const color = colorOf("sequential", 0.85 * probability);
  return element("td", {class: id === next ? "next" : null, style: {background: css(color), color: textColorOn(color)},
    title: `${percent(probability)}${entropy === null ? "" : `, entropy ${short(entropy)} nats`}`}, visible(pieces[id]), element("small", {}, smallPercent(probability)));
}

function smallPercent(p) {
  return p < 1e-4 ? "<0.01%" : percent(p);
}

function lensTable(head, rows) {
  return element("div", {class: "scroll"}, element("table", {class: "lens"},
    element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows.map(cells => element("tr", {}, cells)))));
}

defineView({
  id: "stream", title: "The residual stream",
  about: "A token is one vector that every layer adds to: attention first, then the MLP. The logit lens reads each state as if "
    + "it were the last one, through the last norm and the output matrix: what would be predicted there?",
  async draw(box, context) {
    const {ids, labels, token, layer, overview, config} = context, S = 2 * config.n_layer + 1;
    const [{tensors}, range] = await Promise.all([context.ask("token", {token}), context.ask("lens", {token})]);
    const {states, lens_ids: lensIds, lens_probabilities: lensProbabilities, lens_entropy: entropy, next_probability: nextProbability, next_rank: nextRank} = tensors;
    const vectors = Array.from({length: S}, (_, s) => rowOf(states, s)), final = vectors[S - 1], next = ids[token + 1];
    const norms = vectors.map(norm), added = vectors.map((x, s) => s ? norm(x.map((value, c) => value - vectors[s - 1][c])) : norms[0]);
    const cosine = vectors.map((x, s) => dot(x, final) / (norms[s] * norms[S - 1] || 1));
    const names = vectors.map((_, s) => stateName(s)), ofLayer = s => Math.floor((s - 1) / 2) === layer && s > 0;
    const named = s => element("th", {scope: "row", class: ofLayer(s) ? "selected" : null}, names[s]);
    const probability = s => nextProbability ? nextProbability.data[s] : NaN, rank = s => nextRank ? nextRank.data[s] : NaN;
    const k = lensIds.shape[1], top = Array.from({length: k}, (_, j) => j);
    const last = next === undefined ? "" : ` The actual next token is ${visible(pieces[next])}, framed where it is listed; its rank is the number of more likely ones.`;
    const plain = x => element("td", {}, typeof x === "number" ? Number.isNaN(x) ? "" : short(x) : x);
    const {first} = range.facts, {shape: [, count]} = range.tensors.ids, window = Array.from({length: count}, (_, j) => j);
    const at = (tensor, s, j) => tensor.data[s * count + j];
    const most = norms.reduce((a, b) => Math.max(a, b), 1e-30);
    const {data: allNorms} = overview.tensors.norms, high = Math.log(largest(allNorms)), low = Math.log(allNorms.reduce((a, b) => Math.min(a, b), Infinity) || 1e-6);
    const height = clamp(Math.floor(400 / S), 8, 18);
    box.append(headPicker(context, {heads: false}),
      picture("lens", `${tokenTitle(context)}: what would come next`,
        () => ({columns: ["state", "norm", "norm of what was added", "cosine to the last state", "entropy", "probability of the next token", "rank of the next token",
          ...top.flatMap(j => [`token ${j + 1}`, `probability ${j + 1}`])],
        rows: vectors.map((_, s) => [names[s], norms[s], added[s], cosine[s], entropy.data[s], probability(s), rank(s),
          ...top.flatMap(j => [pieces[lensIds.data[s * k + j]], lensProbabilities.data[s * k + j]])])}),
        element("div", {}, lensTable(
          ["after", ...top.map(j => j === 0 ? "most likely" : `${j + 1}.`), "p(next)", "rank", "entropy", "norm", "added", "cosine"].map(title => element("th", {scope: "col"}, title)),
          vectors.map((_, s) => [named(s), ...top.map(j => lensCell(lensIds.data[s * k + j], lensProbabilities.data[s * k + j], null, next)),
            nextProbability ? plain(smallPercent(probability(s))) : plain(""), plain(rank(s)), plain(entropy.data[s]), plain(norms[s]), plain(added[s]), plain(cosine[s])])),
        nextProbability ? checkLine("p(next) of the last state − exp(−loss)", probability(S - 1) - Math.exp(-overview.tensors.loss.data[token])) : null),
        `Darker is more probable.${last} Added: the norm of what attention or the MLP added. Cosine: to the last state. Entropy in nats.`),
      picture("lens-window", "The tokens around it",
        () => ({columns: ["position", "token", "state", "most likely", "probability", "entropy"], rows: window.flatMap(j => vectors.map((_, s) =>
          [first + j, labels[first + j], names[s], pieces[at(range.tensors.ids, s, j)], at(range.tensors.probabilities, s, j), at(range.tensors.entropy, s, j)]))}),
        lensTable([element("th", {scope: "col"}, "after"), ...window.map(j => element("th", {
          scope: "col", class: first + j === token ? "selected" : null, style: {cursor: "pointer"}, click: () => change({token: first + j})},
        element("small", {}, first + j), element("br"), visible(labels[first + j])))],
        vectors.map((_, s) => [named(s), ...window.map(j => lensCell(at(range.tensors.ids, s, j), at(range.tensors.probabilities, s, j), at(range.tensors.entropy, s, j), ids[first + j + 1]))])),
        "A column is a token of the text, a row a state of its stream: the most likely next token there. Darker is more probable; framed: it is what follows. A click on a token selects it."),
      picture("stream-added", "What each half layer adds", () => ({columns: ["state", "norm of what was added", "norm"], rows: vectors.map((_, s) => [names[s], added[s], norms[s]])}),
        element("div", {class: "row"},
          bars(vectors.map((_, s) => ({label: names[s], value: added[s], text: short(added[s]), color: !s ? "#5d6878" : s % 2 ? "#1f5fbf" : "#0f766e"})), largest(added), {width: 150, labelWidth: 100}),
          bars(vectors.map((_, s) => ({label: names[s], value: norms[s], text: short(norms[s]), color: "#5d6878"})), most, {width: 150, labelWidth: 100})),
        "Left: the norm of what attention or the MLP added. Right: the norm of the stream after it. An MLP that is switched off adds 0."),
      picture("stream", "The states", () => ({columns: ["channel", ...names], rows: Array.from(final, (_, c) => [c, ...vectors.map(x => x[c])])}),
        stackOfStrips(vectors.map((vector, s) => ({label: names[s], vector, text: `norm ${short(norms[s])}`})),
          {textWidth: 95, read: (s, c, x) => `after ${names[s]}, channel ${c}: ${short(x)}`}), `The token's vector after each half layer. ${colorNote(vectors)}`),
      picture("stream-norms", "Norms of all tokens", () => matrixTable("state", names, labels, overview.tensors.norms),
        element("div", {class: "labeled"},
          element("div", {class: "names", style: {lineHeight: `${height}px`, fontSize: `${Math.min(11, height)}px`}}, names.map(name => element("div", {}, name))),
          heatMap(overview.tensors.norms, {value: x => (Math.log(x) - low) / (high - low || 1), height, cell: clamp(Math.floor(620 / ids.length), 1, 22),
            read: (s, t, x) => `${t} ${visible(labels[t])}, after ${names[s]}: norm ${short(x)}`, click: (_, t) => change({token: t}), chosen: [null, token]})),
        `A row is a state, a column a token. Light ${short(Math.exp(low))} to dark ${short(Math.exp(high))}, on a log scale.`));
  },
});
