// The acts of the machine: computations that the desk, the lower part of the stage, shows step by step.
//
// An act is {duration, height, frame(t), check}. frame(t) returns the rows of the desk at time t from 0 to 1: pure, so
// that the same t draws the same picture. Vectors fly from their tiles and fade in; each number and color is a value of
// the model, or a partial sum of its values. check: [what is compared, its largest difference, the largest number].
//
// Kinds of rows: strip {label, values, shown (first cells), max, text, tile (where it comes from), fly (0: in its tile,
// 1: at the desk), opacity, isResult}, bars {bars: [{label, value, text}], max, isSigned}, text {text, isResult}, and
// line {parts, u, drawn, fall} of drawAfter; fall is 1 when the random number has reached the line.

const STRIP_ROW = 26, BARS_ROW = 112, TEXT_ROW = 24, LINE_ROW = 70; // heights in pixels
const ADDED_VALUES = 5; // values, or neurons, that are added one by one
const ROW_HEIGHTS = {strip: STRIP_ROW, bars: BARS_ROW, text: TEXT_ROW, line: LINE_ROW};

// How much of the time from a to b has passed at t, from 0 to 1.
function passed(t, a, b) {
  return clamp((t - a) / (b - a), 0, 1);
}

// The number of n items that are shown at t: one after another from a to b.
function countAt(t, a, b, n) {
  return Math.floor(passed(t, a, b) * n + 1e-9);
}

function makeAct(duration, frame, check) {
  return {duration, frame, check, height: 22 + sumOf(frame(1).map(({kind}) => ROW_HEIGHTS[kind]))};
}

function plus(a, b) {
  return a.map((x, i) => x + b[i]);
}

// The score of a pair: the sum of the products of a query and a key, scaled, with the bias for the distance.
function scoreAct({query, key, names: [queryName, keyName], tiles, score, bias, isScaled}) {
  const D = query.length, products = query.map((x, d) => x * key[d]), total = sumOf(products);
  const max = [query, key, products].map(maxAbs), scale = isScaled ? Math.sqrt(D) : 1;
  return makeAct(5000, t => {
    const count = countAt(t, 0.25, 0.8, D), sum = count === D ? total : sumOf(products.subarray(0, count));
    return [
      {kind: "strip", label: `query of ${queryName}`, values: query, max: max[0],
        tile: tiles[0], fly: passed(t, 0, 0.12)},
      {kind: "strip", label: `key of ${keyName}`, values: key, max: max[1],
        tile: tiles[1], fly: passed(t, 0.08, 0.2)},
      {kind: "strip", label: "their products", values: products, max: max[2], shown: count},
      {kind: "text", text: `sum of ${count} products: ${short(sum)}`},
      {kind: "text", isResult: true, text: t < 0.88 ? "" : `${isScaled ? `divided by √${D}` : "not scaled"}`
        + `${bias === null ? "" : `, ${signed(bias)} for the distance`}: the score ${short(score)}`},
    ];
  }, ["the scaled sum of the products − the score", Math.abs(total / scale + (bias ?? 0) - score), Math.abs(score)]);
}

// From scores to weights: exp of each score, divided by their sum. scores, weights: of all tokens, -Infinity and 0 if
// the mask hides them; those from `first` on are shown. names: of the shown tokens. result: in words.
function softmaxAct({scores, weights, first, names, result}) {
  const end = first + names.length, shown = scores.subarray(first, end), finite = shown.filter(Number.isFinite);
  const top = Math.max(...finite), exps = Float64Array.from(scores, x => Math.exp(x - top)), total = sumOf(exps);
  const before = sumOf(weights.subarray(0, first)), expsBefore = sumOf(exps.subarray(0, first));
  const withEarlier = (earlier, rest) => before ? [earlier, ...rest] : [...rest];
  const labels = withEarlier("earlier", names);
  const stages = [
    {title: "1. The scores of its query with each key", values: withEarlier(null, shown), max: maxAbs(finite)},
    {title: `2. exp(score − ${short(top)}): all positive, and the largest of these keys is 1`,
      values: withEarlier(expsBefore, exps.subarray(first, end)), max: Math.max(1, expsBefore)},
    {title: `3. Divided by their sum, ${short(total)}: weights, which sum to 1`,
      values: withEarlier(before, weights.subarray(first, end)), max: 1},
  ];
  const textOf = (value, stage) => stage === 2 ? percent(value)
    : Number.isFinite(value) ? value.toFixed(stage ? 3 : 1).replace("-", "−") : "−∞";
  return makeAct(6500, t => {
    const stage = Math.min(2, Math.floor(t * 3)), {title, values, max} = stages[stage];
    const count = countAt(3 * t - stage, 0, 0.75, values.length);
    return [
      {kind: "text", text: title},
      {kind: "bars", max, isSigned: stage === 0, bars: Array.from(values, (value, i) => ({
        label: labels[i], value: i < count ? value : null,
        text: value === null || i >= count ? "" : textOf(value, stage),
      }))},
      {kind: "text", isResult: true, text: stage === 2 && t > 0.9 ? result : ""},
    ];
  }, ["the softmax of all scores − the weights", maxDifference(softmax(scores.slice()), weights), 1]);
}

// The result of a head: values times weights, added one by one. items: {label, vector (the value), weight, tile}, the
// largest weight first. others: the sum of the rest.
function valuesAct({items, others, countOfOthers, result}) {
  const D = result.length, max = maxAbs(items.map(({vector}) => maxAbs(vector))), sums = [new Float32Array(D)];
  for (const {vector, weight} of items) sums.push(plus(sums.at(-1), vector.map(x => weight * x)));
  if (countOfOthers) sums.push(plus(sums.at(-1), others));
  const largest = items[0].weight;
  return makeAct(6000, t => {
    const count = countAt(t, 0.1, 0.9, sums.length - 1), step = 0.8 / (sums.length - 1);
    const rest = countOfOthers ? [{kind: "strip", label: countTokens(countOfOthers), values: others, max,
      shown: count >= sums.length - 1 ? D : 0, text: "the rest"}] : [];
    return [
      ...items.map(({label, vector, weight, tile}, i) => ({kind: "strip", label, values: vector, max, tile,
        fly: passed(t, 0.02 + step * i, 0.1 + step * (i + 1)), opacity: 0.15 + 0.85 * weight / largest,
        text: `× ${percent(weight)}`})),
      ...rest,
      {kind: "strip", label: "sum so far", values: sums[count], max: maxAbs(result), isResult: true},
    ];
  }, ["the sum − the vector of the model", maxAbs(sums.at(-1).map((x, d) => x - result[d])), maxAbs(result)]);
}

// What an MLP adds: the vectors of its neurons, times their activations. items: {label, vector (times the activation),
// text} of the strongest. all: the sum over all neurons. bias: added at the end, or null.
function neuronsAct({items, all, bias, result, countOfOthers}) {
  const sums = [new Float32Array(result.length)];
  for (const {vector} of items) sums.push(plus(sums.at(-1), vector));
  const rest = [{label: `${short(countOfOthers)} others`, vector: all.map((x, c) => x - sums.at(-1)[c])}];
  if (bias) rest.push({label: "the bias", vector: bias});
  const parts = [...items, ...rest];
  for (const {vector} of rest) sums.push(plus(sums.at(-1), vector));
  const max = maxAbs([...parts.map(({vector}) => maxAbs(vector)), maxAbs(result)]);
  return makeAct(6500, t => {
    const count = countAt(t, 0.1, 0.9, parts.length);
    return [
      ...parts.map(({label, vector, text}, i) => ({kind: "strip", label, values: vector, max, text,
        shown: i < count ? vector.length : 0})),
      {kind: "strip", label: "sum so far", values: sums[count], max, isResult: true},
    ];
  }, ["the sum − the vector of the model", maxDifference(sums.at(-1), result), maxAbs(result)]);
}

// An addition to the stream: number by number. names: of the three vectors. tiles: of the first two; null: not drawn.
function addAct({before, added, after, names, tiles}) {
  const max = maxAbs([before, added, after].map(maxAbs)), C = before.length;
  return makeAct(4500, t => {
    const count = countAt(t, 0.3, 0.85, C);
    return [
      {kind: "strip", label: names[0], values: before, max, tile: tiles[0], fly: passed(t, 0, 0.15)},
      {kind: "strip", label: names[1], values: added, max, tile: tiles[1], fly: passed(t, 0.1, 0.25)},
      {kind: "strip", label: names[2], values: after, max, shown: count, isResult: true},
    ];
  }, ["the sum − the vector of the model", maxAbs(after.map((x, c) => before[c] + added[c] - x)), maxAbs(after)]);
}

// The choice of the next token: a random number falls on a line that the probabilities divide.
function choiceAct({parts, u, drawn, temperature}) {
  return makeAct(5000, t => [
    {kind: "text", text: `The probabilities at temperature ${temperature}, side by side, from 0 to 1`},
    {kind: "line", parts, u, drawn, fall: passed(t, 0.15, 0.5)},
    {kind: "text", isResult: true, text: t < 0.55 ? "" : `u = ${u.toFixed(4)} falls on ${quoted(pieces[drawn])}`},
  ], ["the sum of all probabilities − 1", Math.abs(sumOf(parts.map(({from, to}) => to - from)) - 1), 1]);
}

// --- the desk --------------------------------------------------------------------------------------------------------

// Draw the rows of an act into the lower part of the stage.
function drawDesk(g, camera, stage, rows, height) {
  const theme = themeColors(), top = stage.height - height, view = projection(camera, stage);
  g.fillStyle = theme.paper;
  g.fillRect(0, top, stage.width, height);
  g.fillStyle = theme.line;
  g.fillRect(0, top, stage.width, 1);
  const isNarrow = stage.width < 560, left = isNarrow ? 96 : 150, right = isNarrow ? 58 : 110;
  const box = {x: left, width: stage.width - left - right};
  const flying = []; // functions that draw strips on their way, above the rows
  let y = top + 10;
  for (const row of rows) {
    const middle = y + ROW_HEIGHTS[row.kind] / 2;
    if (row.kind === "strip") drawDeskStrip(g, view, theme, row, box, middle, flying);
    else if (row.kind === "bars") drawDeskBars(g, theme, row, stage, y);
    else if (row.kind === "line") drawDeskLine(g, theme, row, stage, y);
    else {
      write(g, row.text, 14, middle, {fill: row.isResult ? theme.mark : theme.soft, size: isNarrow ? 12 : 14,
        weight: row.isResult ? 600 : 400, width: stage.width - 20});
    }
    y += ROW_HEIGHTS[row.kind];
  }
  flying.forEach(draw => draw());
}

const stripBitmaps = new WeakMap(); // by values: {max, rows, palette, bitmap}
const READABLE_CELL = 12; // pixels; narrower cells are drawn in two rows

function stripBitmap(values, rows, max) {
  let entry = stripBitmaps.get(values);
  if (entry?.max !== max || entry.rows !== rows || entry.palette !== palette()) {
    const bitmap = imageOf(values, rows, values.length / rows, "signed", x => x / max);
    entry = {max, rows, palette: palette(), bitmap};
    stripBitmaps.set(values, entry);
  }
  return entry.bitmap;
}

function drawDeskStrip(g, {toX, toY, zoom}, theme, row, {x, width}, middle, flying) {
  const {label, values, max, text = "", shown = values.length, tile, fly = 1, opacity = 1, isResult} = row;
  const rows = width / values.length < READABLE_CELL && values.length % 2 === 0 && values.length > 1 ? 2 : 1;
  const columns = values.length / rows, cell = width / columns;
  const height = STRIP_ROW - (rows > 1 ? 4 : 9), size = 12.5;
  write(g, label, x - 10, middle, {fill: isResult ? theme.mark : theme.ink, size, align: "right",
    weight: isResult ? 600 : 400, width: x - 14});
  g.strokeStyle = theme.line;
  g.lineWidth = 1;
  g.strokeRect(x - 0.5, middle - height / 2 - 0.5, width + 1, height + 1);
  if (fly > 0.98 || !tile) write(g, text, x + width + 8, middle, {fill: theme.soft, size, mono: true});
  if (!shown || tile && fly <= 0) return;
  const draw = () => {
    const part = fly * fly * (3 - 2 * fly), bitmap = stripBitmap(values, rows, max);
    const from = tile && [toX(tile.x), toY(tile.y), tile.width * zoom, tile.height * zoom];
    const [left, top, fullWidth, fullHeight] = [x, middle - height / 2, width, height].map((to, i) =>
      from ? from[i] + part * (to - from[i]) : to);
    g.globalAlpha = opacity;
    range(rows).forEach(i => {
      const count = clamp(shown - i * columns, 0, columns);
      if (count) g.drawImage(bitmap, 0, i, count, 1, left, top + i * fullHeight / rows, fullWidth * count / columns,
        fullHeight / rows);
    });
    g.globalAlpha = 1;
    if (fly < 1 || rows > 1 || cell < NUMBER_SIZE[0]) return;
    values.subarray(0, shown).forEach((value, k) => {
      write(g, value.toFixed(2).replace("-", "−"), x + (k + 0.5) * cell, middle,
        {fill: textColorOn(colorOf("signed", value / max)), size: 11, align: "center", mono: true});
    });
  };
  if (tile && fly < 1) flying.push(draw);
  else draw();
}

function drawDeskBars(g, theme, {bars, max, isSigned}, stage, y) {
  const pitch = (stage.width - 28) / bars.length, room = BARS_ROW - 44, zero = y + 16 + (isSigned ? room / 2 : room);
  g.fillStyle = theme.line;
  g.fillRect(14, zero, stage.width - 28, 1);
  bars.forEach(({label, value, text}, i) => {
    const x = 14 + (i + 0.5) * pitch, width = Math.min(46, 0.62 * pitch);
    const length = Number.isFinite(value) && value !== null ? (isSigned ? room / 2 : room) * value / max : 0;
    g.fillStyle = theme.accent;
    g.fillRect(x - width / 2, Math.min(zero, zero - length), width, Math.abs(length));
    write(g, text, x, length < 0 ? zero - length + 8 : zero - length - 8, {fill: theme.soft, size: 11, align: "center",
      mono: true, width: pitch});
    write(g, label, x, y + BARS_ROW - 10, {fill: theme.ink, size: 14, align: "center", weight: 600, mono: true,
      width: pitch - 4});
  });
}

function drawDeskLine(g, theme, {parts, u, drawn, fall}, stage, y) {
  const X = share => 14 + (stage.width - 28) * share, top = y + 22, height = 30;
  parts.filter(({from, to}) => to > from).forEach(({id, from, to}, i) => {
    const isDrawn = id === drawn && fall === 1, width = X(to) - X(from);
    g.fillStyle = isDrawn ? theme.mark : i % 2 ? theme.line : theme.fill;
    g.fillRect(X(from), top, Math.max(0.5, width), height);
    const text = visible(pieces[id]);
    if (width <= 9 * text.length) return;
    write(g, text, X((from + to) / 2), top + height / 2, {fill: isDrawn ? theme.paper : theme.ink, size: 14,
      align: "center", mono: true});
  });
  if (!fall) return;
  const at = y + fall * fall * (top + height - y);
  g.fillStyle = theme.mark;
  g.beginPath();
  g.arc(X(u), Math.min(at, top - 5), 6, 0, 2 * Math.PI);
  g.fill();
  if (fall === 1) g.fillRect(X(u) - 1, top - 5, 2, height + 12);
}
