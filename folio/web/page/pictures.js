// Charts and heat maps. Every picture is a figure with a table, exported as CSV, and a drawing, exported as SVG or PNG.

// --- pixels ----------------------------------------------------------------------------------------------------------

const pixelScales = new Map(); // 1,024 pixels for the stops of a scale

function pixelScale(scale) {
  const stops = palette()[scale];
  if (!pixelScales.has(stops)) {
    pixelScales.set(stops, Uint32Array.from({length: 1024}, (_, i) => pixelOf(colorAt(scale, i / 1023))));
  }
  return pixelScales.get(stops);
}

function pixelOf([r, g, b]) {
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

const MARKED_CELL = 5, MAX_MARKED = 2 ** 16; // pixels of a cell, and cells of an image, with marks

// Draw numbers as an image with one pixel per number. In print, negative numbers have a mark like a minus sign.
function imageOf(data, rows, columns, scale, value) {
  const image = plainImageOf(data, rows, columns, scale, value);
  if (!isMarked(scale, -1) || data.length > MAX_MARKED) return image;
  const canvas = element("canvas", {width: MARKED_CELL * columns, height: MARKED_CELL * rows});
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  data.forEach((x, k) => isMarked(scale, value(x)) && context.fillRect(MARKED_CELL * (k % columns) + 1,
    MARKED_CELL * Math.floor(k / columns) + 2, MARKED_CELL - 2, 1));
  return canvas;
}

function plainImageOf(data, rows, columns, scale, value) {
  const canvas = element("canvas", {width: columns, height: rows}), context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
  const colors = pixelScale(scale), missing = pixelOf(palette().missing);
  data.forEach((x, k) => {
    pixels[k] = Number.isFinite(x) ? colors[Math.round(1023 * positionOnScale(scale, value(x)))] : missing;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

// --- figures ---------------------------------------------------------------------------------------------------------

// A drawn scale of colors. ends: the texts at its ends, by default the numbers of -max or 0, and max.
function colorBar(scale, max, ends) {
  const steps = 64, isSigned = scale === "signed";
  const canvas = imageOf(range(steps), 1, steps, scale, i => isSigned ? 2 * i / (steps - 1) - 1 : i / (steps - 1));
  build(canvas, {role: "img", "aria-label": "scale of colors"}, []);
  const [low, high] = ends || [isSigned ? `−${short(max)}` : "0", short(max)];
  return div("color-bar", low, canvas, high);
}

// A figure with caption and exports. id: for tests and file names. table(): {columns, rows}. drawing: an element.
function picture(id, title, table, drawing, note = "") {
  const save = (kind, help, action) =>
    element("button", {click: action, title: help, "aria-label": `${kind}: ${title}`}, kind);
  const exports = element("span", {class: "exports"},
    save("CSV", "save the numbers", () => download(`${id}.csv`, csv(table()), "text/csv")), " ",
    save("SVG", "save the picture", () => saveSvg(id, figure)), " ",
    save("PNG", "save the picture with twice the pixels", () => savePng(id, figure)));
  const figure = element("figure", {testid: id, "aria-labelledby": `title-${id}`},
    element("figcaption", {}, element("h3", {id: `title-${id}`}, title), exports),
    note && div("note", note), drawing);
  for (const image of figure.querySelectorAll("svg, canvas, [role=application]")) {
    if (image.hasAttribute("aria-label")) continue;
    if (!image.hasAttribute("role")) image.setAttribute("role", image.querySelector("a, [tabindex]") ? "group" : "img");
    image.setAttribute("aria-label", title);
  }
  figure.table = table;
  return figure;
}

function csv({columns, rows}) {
  const cell = x => /[",\n\r]/.test(x) ? `"${x.replaceAll('"', '""')}"` : x;
  return [columns, ...rows].map(row => Array.from(row, cell).join(",")).join("\n") + "\n";
}

// The table of a matrix {shape: [N, M], data}. Arguments for rows and columns: [name, labels].
function matrixTable([row, rowLabels], [column, columnLabels], matrix) {
  return {
    columns: [`${row} \\ ${column}`, ...columnLabels],
    rows: rowLabels.map((label, i) => [label, ...rowOf(matrix, i)]),
  };
}

// Save the current view as one self-contained HTML file.
function saveView() {
  const original = byId("view"), copy = original.cloneNode(true);
  const canvases = original.querySelectorAll("canvas");
  copy.querySelectorAll("canvas").forEach((canvas, i) => {
    const {style: {width, height}, dataset: {testid}} = canvases[i];
    canvas.replaceWith(element("img", {src: canvases[i].toDataURL(), style: {width, height}, testid}));
  });
  copy.querySelectorAll(".exports, .buttons, .values").forEach(node => node.remove());
  copy.querySelectorAll(".above").forEach(node => node.classList.remove("above")); // the copy is not scrolled
  const page = document.implementation.createHTMLDocument(document.title);
  page.documentElement.lang = document.documentElement.lang;
  page.head.prepend(element("meta", {charset: "utf-8"}), document.querySelector("meta[name=viewport]").cloneNode());
  page.head.append(element("style", {}, document.querySelector("style").textContent));
  page.body.append(copy);
  download(`${state.view}.html`, "<!doctype html>\n" + page.documentElement.outerHTML, "text/html");
}

// --- drawings --------------------------------------------------------------------------------------------------------

// Heat map of a matrix {shape: [N, M], data}. options: scale, max (number at its end), cell (width in pixels), height
// (of a cell), labels ([of rows, of columns]), decimals (of numbers in the cells; undefined: none), min (smallest
// number that is written), read(i, j) (text of the line below), click(i, j), selected [i, j] (null for a complete
// column or row), bar (the color bar).
function heatMap({shape: [rows, columns], data}, options) {
  const {scale = "sequential", max = 1, min, read, click, selected, labels, decimals} = options, value = x => x / max;
  const {cell = clamp(Math.floor(560 / Math.max(rows, columns)), 1, 22), bar = colorBar(scale, max)} = options;
  const hasNumbers = decimals !== undefined, height = options.height ?? (hasNumbers ? 24 : cell);
  const left = labels ? LABEL_WIDTH : 0, top = labels ? 20 : 0;
  let canvas = imageOf(data, rows, columns, scale, value);
  if (labels || hasNumbers) canvas = withText(canvas);
  Object.assign(canvas.style, {width: `${left + columns * cell}px`, height: `${top + rows * height}px`});
  const cursor = div("cursor"), readout = readoutLine();
  const box = div("heat", canvas, cursor);
  if (selected) box.append(frame(div("chosen"), ...selected));

  // Enlarge the image to two pixels per CSS pixel, and add labels and numbers.
  function withText(image) {
    const width = left + columns * cell;
    const large = element("canvas", {width: 2 * width, height: 2 * (top + rows * height)});
    const context = large.getContext("2d");
    const write = (text, i, j) => context.fillText(text, left + (j + 0.5) * cell, top + (i + 0.5) * height, cell - 1);
    context.scale(2, 2);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, top, columns * cell, rows * height);
    const size = `${clamp(height - 2, 8, 11)}px monospace`, fillStyle = getComputedStyle(document.body).color;
    Object.assign(context, {font: size, textAlign: "center", textBaseline: "middle", fillStyle});
    labels?.[0].forEach((label, i) => context.fillText(label, left / 2, top + (i + 0.5) * height, left - 4));
    labels?.[1].forEach((label, j) => context.fillText(label, left + (j + 0.5) * cell, top / 2, cell - 1));
    if (hasNumbers) data.forEach((x, k) => {
      if (x < min) return;
      context.fillStyle = textColorOn(Number.isFinite(x) ? colorOf(scale, value(x)) : palette().missing);
      write(Number.isFinite(x) ? x.toFixed(decimals).replace("-", "−") : "−∞", Math.floor(k / columns), k % columns);
    });
    return large;
  }

  function frame(node, i, j) {
    Object.assign(node.style, {
      left: `${left + (j ?? 0) * cell}px`, top: `${top + (i ?? 0) * height}px`,
      width: `${j === null ? columns * cell : cell}px`, height: `${i === null ? rows * height : height}px`,
    });
    return node;
  }

  function cellAt({offsetX, offsetY}) {
    const i = Math.floor((offsetY - top) / height), j = Math.floor((offsetX - left) / cell);
    return [clamp(i, 0, rows - 1), clamp(j, 0, columns - 1)];
  }

  const move = (i, j) => {
    frame(cursor, i, j).style.display = "block";
    readout.textContent = read(i, j);
  };
  const leave = () => {
    cursor.style.display = "none";
    readout.textContent = "";
  };
  canvas.addEventListener("pointermove", event => move(...cellAt(event)));
  canvas.addEventListener("pointerleave", leave);
  reachCells(box, rows, columns, [selected?.[0] ?? 0, selected?.[1] ?? 0], move, leave, click);
  if (click) canvas.addEventListener("click", event => click(...cellAt(event)));
  return div("", scrolling(box), bar, readout);
}

const LABEL_WIDTH = 44; // of the rows of a heat map

// A picture with the heat map of a matrix. rows, columns: [name, labels]. options: those of heatMap, drawn (matrix for
// the colors), note.
function matrixPicture(id, title, matrix, rows, columns, {drawn = matrix, note, ...options}) {
  const read = (i, j) => `${rows[0]} ${rows[1][i]}, ${columns[0]} ${columns[1][j]}: `
    + short(matrix.data[i * matrix.shape[1] + j]);
  const {scale = "sequential", max = 1, bar = colorBar(scale, max)} = options;
  bar?.append(element("span", {}, `${rows[0]} ↓ ${columns[0]} →`));
  return picture(id, title, () => matrixTable(rows, columns, matrix), heatMap(drawn, {read, ...options, bar}), note);
}

// The largest absolute value.
function maxAbs(values) {
  return values.reduce((max, x) => Number.isFinite(x) ? Math.max(max, Math.abs(x)) : max, 1e-30);
}

function softText(x, y, text, anchor = "start") {
  return svg("text", {x, y, "text-anchor": anchor, class: "soft"}, text);
}

// A table, scrolled to the selected row if it would be hidden. options: shown (cells to show instead), selected(i),
// click(i, j) (j is 0 for a key), barsFrom (the first column whose cells have bars).
function tableOf(columns, rows, {shown, selected = () => false, click, barsFrom = Infinity} = {}) {
  const show = x => typeof x === "number" ? Number.isNaN(x) ? "" : short(x) : shown ? x : x && visible(x);
  const kinds = columns.map((_, j) => rows.some(row => row[j] && typeof row[j] === "string") && "text");
  const largest = columns.map((_, j) => j >= barsFrom && maxAbs(rows.map(row => row[j])));
  const lines = (shown ?? rows).map((row, i) => element("tr", {
    class: `${selected(i) ? "selected" : ""} ${click ? "clickable" : ""}`,
    "aria-selected": click && String(selected(i)),
    click: click && (({target}) => click(i, target.closest("td")?.cellIndex ?? 0)),
  }, row.map((cell, j) => element("td", {
    class: kinds[j], style: j >= barsFrom ? barStyle(rows[i][j] / largest[j]) : {},
  }, show(cell)))));
  const table = scrolling(element("table", {role: click && "grid"},
    element("thead", {}, element("tr", {}, columns.map((title, j) =>
      element("th", {scope: "col", class: kinds[j]}, title)))),
    element("tbody", {}, lines)));
  if (click) reachByKeys(lines, lines.findIndex((_, i) => selected(i)));
  else table.tabIndex = 0; // keys can scroll it
  const markHidden = () => { // shadows where rows are hidden
    table.classList.toggle("above", table.scrollTop > 1);
    table.classList.toggle("below", table.scrollTop + table.clientHeight < table.scrollHeight - 1);
  };
  table.addEventListener("scroll", markHidden);
  requestAnimationFrame(() => {
    const row = table.querySelector(".selected"), height = table.clientHeight;
    if (row && row.offsetTop + row.offsetHeight > height) table.scrollTop = row.offsetTop - height / 2;
    markHidden();
  });
  return table;
}

// A cell with a bar for a number from -1 to 1.
function barStyle(x) {
  const end = `${100 * clamp(Math.abs(x) || 0, 0, 1)}%`, color = x < 0 ? "var(--fill)" : "var(--fill-mark)";
  return {background: `linear-gradient(to right, ${color} ${end}, transparent ${end})`};
}

// A picture with a table. options: those of tableOf, max (number of rows shown; the CSV has all), note.
function tablePicture(id, title, columns, rows, {max, note, ...options} = {}) {
  return picture(id, title, () => ({columns, rows}), tableOf(columns, rows.slice(0, max), options), note);
}

// A picture with a line chart. Its table has the lines, which have the same x.
function chartPicture(id, chart, note, lines = chart.groups.flatMap(group => group.lines)) {
  return picture(id, chart.title, () => ({
    columns: [chart.x, ...lines.map(({name}) => name)],
    rows: lines[0].x.map((x, i) => [x, ...lines.map(({y}) => y[i])]),
  }), lineChart({name: id, width: 620, ...chart}), note);
}

// A group of a line chart with one line. x: by default 0, 1, ... options: see line_chart.js.
function oneLine(name, y, {x = range(y.length), color, ...options} = {}) {
  return {name, color, lines: [{name, x, y: Array.from(y), ...options}]};
}

// A frame that is visible on every color.
const FRAME_STROKES = [{stroke: PAPER, "stroke-width": 4}, {stroke: "var(--ink)", "stroke-width": 1.5}];

// A picture of vectors as strips. rows: {label, vector, text (at the right), fade (opacity), ownScale (true: colors
// relative to this vector's maximum), rule (true: a line above, as over a sum)}. options: axis (name of the index),
// index (the selected one, whose numbers are at the right), selected(i, k) (whether a cell is framed), click(i, k),
// read(i, k, x) (text of the line below), group (cells per group, with the names in `groups` above), textWidth, table,
// note, below (elements).
function vectorPicture(id, title, rows, options = {}) {
  const {axis = "channel", index, selected = (_, k) => k === index, click, note, below = [], textWidth = 80} = options;
  const {group = 0, groups = [], read = (i, k, x) => `${rows[i].label}, ${axis} ${k}: ${short(x)}`} = options;
  const longest = Math.max(...rows.map(row => row.vector.length));
  const commonMax = maxAbs(rows.map(row => maxAbs(row.vector)));
  const labelWidth = 110, available = Math.max(120, fitWidth(640 + labelWidth + textWidth) - labelWidth - textWidth);
  const limit = Math.ceil(longest / Math.ceil(2.5 * longest / available)); // cells have 2.5 pixels or more
  const columns = group ? Math.max(group, Math.floor(limit / group) * group) : limit;
  const cell = Math.min(14, available / columns), line = longest > columns ? 9 : 16;
  const named = columns === longest ? groups : [], tops = [];
  const heights = rows.map(({vector}) => Math.ceil(vector.length / columns) * line);
  const height = rows.reduce((y, {rule}, i) => {
    tops.push(y + (rule ? 8 : 0));
    return tops[i] + heights[i] + 5;
  }, named.length ? 21 : 3);
  const frame = (i, k, name) => {
    const x = labelWidth + (k % columns) * cell - 1, y = tops[i] + Math.floor(k / columns) * line - 1;
    return svg("g", {class: name, "pointer-events": "none"}, FRAME_STROKES.map(stroke =>
      svg("rect", {x, y, width: cell + 2, height: line + 2, fill: "none", ...stroke})));
  };
  const width = labelWidth + columns * cell + textWidth, letters = Math.floor((labelWidth - 8) / 7.3);
  const style = {display: "block", cursor: click ? "pointer" : "default"};
  const drawing = svg("svg", {width, height, style},
    named.map((name, g) => softText(labelWidth + (g + 0.5) * group * cell, 12, name, "middle")),
    rows.map(({label, vector, text = index === undefined ? "" : short(vector[index]), fade = 1, ownScale, rule}, i) => {
      const used = Math.min(columns, vector.length), y = tops[i], middle = y + line / 2 + 5;
      const max = ownScale ? maxAbs(vector) : commonMax;
      const image = imageOf(vector, heights[i] / line, used, "signed", x => x / max);
      return [
        rule && svg("line", {x1: 0, x2: width, y1: y - 6, y2: y - 6, stroke: SOFT}),
        svg("text", {x: labelWidth - 8, y: middle, "text-anchor": "end"},
          label.length > letters ? `${label.slice(0, letters - 1)}…` : label),
        svg("image", {x: labelWidth, y, width: used * cell, height: heights[i], opacity: fade, href: image.toDataURL(),
          preserveAspectRatio: "none", style: {imageRendering: "pixelated"}}),
        softText(labelWidth + used * cell + 8, middle, text),
        group > 0 && range(Math.ceil(used / group) - 1).map(g =>
          svg("rect", {x: labelWidth + (g + 1) * group * cell - 1, y, width: 2, height: heights[i], fill: PAPER})),
        range(vector.length).filter(k => selected(i, k)).map(k => frame(i, k)),
      ];
    }));
  const readout = readoutLine();

  function cellAt(event) {
    const {left, top} = drawing.getBoundingClientRect(), x = event.clientX - left - labelWidth, y = event.clientY - top;
    const i = tops.findLastIndex(start => start <= y), column = Math.floor(x / cell);
    const k = Math.floor((y - tops[i]) / line) * columns + column;
    return i >= 0 && column >= 0 && column < columns && k < rows[i].vector.length ? [i, k] : null;
  }

  function leave() {
    drawing.querySelector(".pointed")?.remove();
    readout.textContent = "";
  }

  function move(i, k) {
    leave();
    if (k >= rows[i].vector.length) return;
    drawing.append(frame(i, k, "pointed"));
    readout.textContent = read(i, k, rows[i].vector[k]);
  }

  drawing.addEventListener("pointermove", event => cellAt(event) ? move(...cellAt(event)) : leave());
  drawing.addEventListener("pointerleave", leave);
  reachCells(drawing, rows.length, longest, [0, index ?? 0], move, leave, click);
  drawing.addEventListener("click", event => cellAt(event) && click?.(...cellAt(event)));
  const isRelative = rows.every(row => row.ownScale);
  const bar = colorBar("signed", commonMax, isRelative && ["−", "+, relative to each row's maximum"]);
  const notes = [
    note,
    index !== undefined && `Framed, with numbers at the right: ${axis} ${index}. Click to select another.`,
  ];
  const table = () => ({
    columns: [axis, ...rows.map(({label}) => label)],
    rows: range(rows[0].vector.length).map(k => [k, ...rows.map(({vector}) => vector[k])]),
  });
  return picture(id, title, options.table ?? table, div("", scrolling(drawing), bar, readout, below),
    notes.filter(Boolean).join(" "));
}

// A line that reports a check. size: magnitude of the compared numbers, for the tolerance.
function checkLine(text, difference, size = 1) {
  const passes = Math.abs(difference) <= 1e-4 * Math.max(1, size);
  return element("div", {class: passes ? "check" : "check wrong"},
    `${passes ? "✓" : "✗"} ${text}: ${short(Math.abs(difference))}`);
}

// The largest absolute difference of two vectors.
function maxDifference(x, y) {
  return x.reduce((max, value, i) => Math.max(max, Math.abs(value - y[i])), 0);
}

// A scatter plot of texts. points: {x, y, text, title, color, marked}, ordered by importance: a text that would overlap
// an earlier one becomes a dot. options: width, height, titles of the axes.
function textScatter(points, {width, height, xTitle, yTitle}) {
  const size = 13, line = size + 2, letter = 0.61 * size, edge = 20; // above and below the frame
  const X = scaleOf(extentOf(points.map(p => p.x)), [20, width - 20]);
  const Y = scaleOf(extentOf(points.map(p => p.y)), [height - edge - 20, edge + 20]);
  const placed = [], dots = [], texts = [];
  for (const {x, y, text, title, color, marked} of points) {
    const textWidth = letter * [...text].length, tooltip = svg("title", {}, title);
    const left = clamp(X(x) - textWidth / 2, 1, width - textWidth - 1), top = Y(y) - line / 2;
    if (placed.some(other => left < other.left + other.textWidth && other.left < left + textWidth
      && Math.abs(top - other.top) < 0.8 * line)) {
      dots.push(svg("circle", {cx: X(x), cy: Y(y), r: 1.8, fill: color, opacity: 0.5}, tooltip));
      continue;
    }
    placed.push({left, top, textWidth});
    if (marked) texts.push(svg("rect", {x: left - 1, y: top - 1, width: textWidth + 2, height: line + 2, rx: 3,
      fill: LIGHT, stroke: ORANGE, "stroke-width": 2}));
    texts.push(svg("text", {x: left + textWidth / 2, y: top + size - 1, "text-anchor": "middle",
      style: {fill: color, font: `${size}px monospace`}}, text, tooltip));
  }
  const frame = {x: 0.5, y: edge + 0.5, width: width - 1, height: height - 2 * edge - 1};
  return withTooltipKeys(svg("svg", {width, height}, svg("rect", {...frame, fill: "none", stroke: PALE}),
    softText(width, height - 6, `${xTitle} →`, "end"), softText(0, 14, `↑ ${yTitle}`),
    dots, texts));
}

// --- controls --------------------------------------------------------------------------------------------------------

// The width of a drawing: the width of the view, at most `max` pixels.
function fitWidth(max) {
  return clamp(byId("view").clientWidth - 42, 280, max);
}

function scrolling(...children) {
  return div("scroll", ...children);
}

function controls(...children) {
  return div("controls", ...children);
}

// A checkbox that sets a field of the state to 0 or 1.
function checkbox(name, title, attributes = {}) {
  return element("label", {}, element("input", {
    type: "checkbox", checked: Boolean(state[name]), ...attributes,
    change: event => change({[name]: Number(event.target.checked)}),
  }), ` ${title}`);
}

// A slider that shows its value and calls move(value).
function slider(title, {value, move, read = String, ...attributes}) {
  const output = element("output", {}, read(value));
  return element("label", {}, `${title} `, element("input", {type: "range", ...attributes, value, input({target}) {
    output.textContent = read(+target.value);
    move?.(+target.value);
  }}), " ", output);
}

// The tokens of a text. attributes(t): attributes of each token.
function tokenSpans(labels, selected, attributes) {
  return labels.map((label, t) => element("span", {
    class: t === selected ? "token selected" : "token", click: () => selectToken(t), ...attributes(t),
  }, inLine(label)));
}

// The elements of tokens, with line breaks between them.
function withBreaks(spans, labels) {
  return spans.flatMap((span, t) => labels[t] === "\n" ? [span, "\n"] : [span]);
}

function tokenStrip(labels, selected, attributes) {
  const spans = reachByKeys(tokenSpans(labels, selected, attributes), selected);
  return div("token-strip", withBreaks(spans, labels));
}

// A legend, if there are several items. items: {name, color}.
function legend(items) {
  return items.length > 1 && div("legend", items.map(({name, color}) => element("span", {}, swatch(color), name)));
}
