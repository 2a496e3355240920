// Charts and heat maps. Every picture is a figure with a table, exported as CSV, and a drawing, exported as SVG or PNG.

// --- colors ----------------------------------------------------------------------------------------------------------
//
// Both scales are monotone in luminance, so that they can be read without color: `sequential` from light (0) to dark
// (1), `signed` from dark (-1) through gray to light (1).

const STOPS = {
  sequential: [[255, 255, 255], [255, 237, 160], [254, 178, 76], [240, 90, 40], [165, 15, 60], [60, 0, 50]],
  signed: [[20, 24, 80], [45, 90, 150], [120, 150, 165], [190, 190, 170], [240, 215, 130], [255, 252, 215]],
};

const MISSING = [225, 228, 233]; // the color of -∞ and NaN
const BLUE = "#1f5fbf", ORANGE = "#c2410c", LIGHT = "#fdeee4", SOFT = "#5d6878", PALE = "#d9dee6"; // as in style.css

// The position of a number on a scale, from 0 to 1.
function positionOnScale(scale, x) {
  return clamp(scale === "signed" ? (x + 1) / 2 : x, 0, 1);
}

function colorAt(scale, position) {
  const stops = STOPS[scale], x = position * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2);
  return stops[i].map((c, channel) => Math.round(c + (x - i) * (stops[i + 1][channel] - c)));
}

function colorOf(scale, x) {
  return colorAt(scale, positionOnScale(scale, x));
}

const palettes = {}; // 1,024 colors per scale, as pixels of an image

function paletteOf(scale) {
  return palettes[scale] ??= Uint32Array.from({length: 1024}, (_, i) => pixelOf(colorAt(scale, i / 1023)));
}

function pixelOf([r, g, b]) {
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

// Draw numbers as an image with one pixel per number.
function imageOf(data, rows, columns, scale, value) {
  const canvas = element("canvas", {width: columns, height: rows}), context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
  const palette = paletteOf(scale), color = x => palette[Math.round(1023 * positionOnScale(scale, value(x)))];
  data.forEach((x, k) => pixels[k] = Number.isFinite(x) ? color(x) : pixelOf(MISSING));
  context.putImageData(image, 0, 0);
  return canvas;
}

function css(color) {
  return `rgb(${color.join(",")})`;
}

// Black or white, whichever has more contrast by WCAG 2 (at least 4.5).
function textColorOn(color) {
  const [r, g, b] = color.map(c => c <= 10 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// --- figures ---------------------------------------------------------------------------------------------------------

// A figure with caption and exports. id: for tests and file names. table(): {columns, rows}. drawing: an element.
function picture(id, title, table, drawing, note = "") {
  const exports = element("span", {class: "exports"},
    element("button", {click: () => download(`${id}.csv`, csv(table()), "text/csv"), title: "save numbers"}, "CSV"));
  const figure = element("figure", {testid: id},
    element("figcaption", {}, element("h3", {}, title), exports),
    note && div("note", note), drawing);
  const kind = figure.querySelector("svg") ? "svg" : figure.querySelector("canvas") && "png";
  if (kind) exports.append(" ", element("button", {click: () => savePicture(id, figure, kind)}, kind.toUpperCase()));
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

function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type}));
  element("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function savePicture(id, figure, kind) {
  if (kind === "png") return figure.querySelector("canvas").toBlob(blob => download(`${id}.png`, blob));
  const copy = figure.querySelector("svg").cloneNode(true);
  copy.prepend(svg("style", {}, "text{font:12px monospace;fill:#1d2430}.soft{fill:#5d6878}"));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  download(`${id}.svg`, new XMLSerializer().serializeToString(copy), "image/svg+xml");
}

// Save the current view as one self-contained HTML file.
function saveView() {
  const original = byId("view"), copy = original.cloneNode(true);
  const canvases = original.querySelectorAll("canvas");
  copy.querySelectorAll("canvas").forEach((canvas, i) => {
    const {width, height} = canvases[i].style;
    canvas.replaceWith(element("img", {src: canvases[i].toDataURL(), style: {width, height}}));
  });
  copy.querySelectorAll(".exports").forEach(node => node.remove());
  const page = document.implementation.createHTMLDocument(document.title);
  page.head.prepend(element("meta", {charset: "utf-8"}));
  page.head.append(element("style", {}, document.querySelector("style").textContent));
  page.body.append(copy);
  download(`${state.view}.html`, "<!doctype html>\n" + page.documentElement.outerHTML, "text/html");
}

// --- drawings --------------------------------------------------------------------------------------------------------

// Heat map of a matrix {shape: [N, M], data}. options: scale, max (number at its end), cell (width in pixels), height
// (of a cell), numbers ([row labels, column labels]: write numbers of at least `min` into the cells), read(i, j) (text
// of the line below), click(i, j), selected [i, j] (null for a complete column or row).
function heatMap({shape: [rows, columns], data}, options) {
  const {scale = "sequential", max = 1, min, read, click, selected, numbers} = options, value = x => x / max;
  const cell = options.cell ?? (numbers ? 44 : clamp(Math.floor(560 / Math.max(rows, columns)), 1, 22));
  const height = options.height ?? (numbers ? 24 : cell), left = numbers ? 44 : 0, top = numbers ? 20 : 0;
  let canvas = imageOf(data, rows, columns, scale, value);
  if (numbers) canvas = withNumbers(canvas);
  Object.assign(canvas.style, {width: `${left + columns * cell}px`, height: `${top + rows * height}px`});
  const cursor = div("cursor"), readout = div("readout");
  const box = div("heat", canvas, cursor);
  if (selected) box.append(frame(div("chosen"), ...selected));

  // Enlarge the image and add numbers and labels.
  function withNumbers(image) {
    const width = left + columns * cell, large = element("canvas", {width, height: top + rows * height});
    const context = large.getContext("2d");
    const write = (text, i, j) => context.fillText(text, left + (j + 0.5) * cell, top + (i + 0.5) * height, cell - 4);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, top, columns * cell, rows * height);
    Object.assign(context, {font: "11px monospace", textAlign: "center", textBaseline: "middle"});
    numbers[0].forEach((label, i) => context.fillText(label, left / 2, top + (i + 0.5) * height, left - 4));
    numbers[1].forEach((label, j) => write(label, -0.9, j));
    data.forEach((x, k) => {
      if (x < min) return;
      context.fillStyle = textColorOn(Number.isFinite(x) ? colorOf(scale, value(x)) : MISSING);
      write(Number.isFinite(x) ? x.toFixed(2).replace("-", "−") : "−∞", Math.floor(k / columns), k % columns);
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

  canvas.addEventListener("pointermove", event => {
    const [i, j] = cellAt(event);
    frame(cursor, i, j).style.display = "block";
    readout.textContent = read(i, j);
  });
  canvas.addEventListener("pointerleave", () => {
    cursor.style.display = "none";
    readout.textContent = "";
  });
  if (click) canvas.addEventListener("click", event => click(...cellAt(event)));
  return div("", scrolling(box), readout);
}

// A picture with the heat map of a matrix. rows, columns: [name, labels]. options: those of heatMap, drawn (matrix for
// the colors), numbers (whether to write numbers into the cells), note.
function matrixPicture(id, title, matrix, rows, columns, {drawn = matrix, numbers, note, ...options}) {
  const read = (i, j) => `${rows[0]} ${rows[1][i]}, ${columns[0]} ${columns[1][j]}: `
    + short(matrix.data[i * matrix.shape[1] + j]);
  return picture(id, title, () => matrixTable(rows, columns, matrix), heatMap(drawn, {
    read, numbers: numbers && [rows[1], columns[1]], ...options,
  }), note);
}

// The largest absolute value.
function maxAbs(values) {
  return values.reduce((max, x) => Number.isFinite(x) ? Math.max(max, Math.abs(x)) : max, 1e-30);
}

function softText(x, y, text, anchor = "start") {
  return svg("text", {x, y, "text-anchor": anchor, class: "soft"}, text);
}

// A table, scrolled to the selected row. options: shown (cells to show instead), selected(i), click(i, j).
function tableOf(columns, rows, {shown, selected = () => false, click} = {}) {
  const show = x => typeof x === "number" ? Number.isNaN(x) ? "" : short(x) : shown ? x : x && visible(x);
  const kinds = columns.map((_, j) => rows.some(row => row[j] && typeof row[j] === "string") && "text");
  const table = scrolling(element("table", {},
    element("thead", {}, element("tr", {}, columns.map((title, j) =>
      element("th", {scope: "col", class: kinds[j]}, title)))),
    element("tbody", {}, (shown ?? rows).map((row, i) => element("tr", {
      class: `${selected(i) ? "selected" : ""} ${click ? "clickable" : ""}`,
    }, row.map((cell, j) => element("td", {class: kinds[j], click: click && (() => click(i, j))}, show(cell))))))));
  requestAnimationFrame(() => {
    table.scrollTop = (table.querySelector(".selected")?.offsetTop ?? 0) - table.clientHeight / 2;
  });
  return table;
}

// A picture with a table. options: those of tableOf, max (number of rows shown; the CSV has all), note.
function tablePicture(id, title, columns, rows, {max, note, ...options} = {}) {
  return picture(id, title, () => ({columns, rows}), tableOf(columns, rows.slice(0, max), options), note);
}

// A line chart. series: {name, points: [[x, y], ...], color, width, fill}. options: width, height, logX, from and to
// (limits of y), xTitle, yTitle, mark (a value of x), click(x).
const LINE_COLORS = [BLUE, ORANGE, "#0f766e", "#7c3aed", "#a16207", "#be185d", "#334155", "#15803d"];

function lineChart(series, options = {}) {
  const {width = fitWidth(620), height = 240, logX = false, xTitle = "", yTitle = "", mark, click} = options;
  const left = 56, bottom = 34, top = yTitle ? 22 : 10, right = 12;
  const points = series.flatMap(s => s.points), xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const warp = x => logX ? Math.log10(Math.max(x, 0) + 1) : x;
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [y0, y1] = [options.from ?? Math.min(...ys), options.to ?? Math.max(...ys)];
  const scaleX = scaleOf([warp(x0), warp(x1)], left, width - right), X = x => scaleX(warp(x));
  const Y = scaleOf([y0, y1], height - bottom, top);
  const powers = [0, ...range(6).flatMap(i => [10 ** i, 3 * 10 ** i])].filter(x => x >= x0 && x <= x1);
  const tick = x => Number(x.toPrecision(4)).toLocaleString("en-US", {maximumFractionDigits: 9}).replace("-", "−");
  const ruler = (x1, x2, y1, y2, options) => svg("line", {x1, x2, y1, y2, ...options});
  const chart = svg("svg", {width, height, role: "img"},
    ticksOf(y0, y1, 5).map(y => [ruler(left, width - right, Y(y), Y(y), {stroke: PALE}),
      softText(left - 6, Y(y) + 4, tick(y), "end")]),
    (logX ? powers : ticksOf(x0, x1, 7)).map(x => softText(X(x), height - bottom + 16, tick(x), "middle")),
    softText((left + width) / 2, height - 3, xTitle, "middle"), softText(left, 11, yTitle),
    mark !== undefined && ruler(X(mark), X(mark), top, height - bottom, {stroke: ORANGE, "stroke-dasharray": "3 3"}),
    series.map((s, i) => svg("polyline", {
      points: s.points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" "), fill: s.fill ?? "none",
      stroke: s.color ?? LINE_COLORS[i % LINE_COLORS.length], "stroke-width": s.width ?? 1.6,
    }, svg("title", {}, s.name))));
  if (click) {
    chart.style.cursor = "pointer";
    chart.addEventListener("click", event => {
      const x = event.clientX - chart.getBoundingClientRect().left;
      click(xs.reduce((best, value) => Math.abs(X(value) - x) < Math.abs(X(best) - x) ? value : best, xs[0]));
    });
  }
  return chart;
}

// A picture with a line chart of lines with the same x. options: those of lineChart, named (legend), note.
function chartPicture(id, title, lines, {named = lines, note, ...options}) {
  return picture(id, title, () => ({
    columns: [options.xTitle, ...lines.map(({name}) => name)],
    rows: lines[0].points.map(([x], i) => [x, ...lines.map(({points}) => points[i][1])]),
  }), element("div", {}, legend(named), lineChart(lines, options)), note);
}

// The points (0, values[0]), (1, values[1]), ...
function pointsOf(values) {
  return Array.from(values, (y, x) => [x, y]);
}

// A linear scale that maps the smallest value to `from` and the largest to `to`.
function scaleOf(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values);
  return x => from + (to - from) * (x - low) / (high - low || 1);
}

function ticksOf(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low || 1) / count));
  const size = [1, 2, 5, 10].map(n => n * step).find(size => (high - low) / size <= count);
  return range(count + 2).map(i => (Math.ceil(low / size) + i) * size).filter(x => x <= high + 1e-12);
}

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
  const frame = (i, k, stroke, name) => svg("rect", {
    x: labelWidth + (k % columns) * cell - 1, y: tops[i] + Math.floor(k / columns) * line - 1, width: cell + 2,
    height: line + 2, fill: "none", stroke, "stroke-width": 1.5, class: name, "pointer-events": "none",
  });
  const width = labelWidth + columns * cell + textWidth, letters = Math.floor((labelWidth - 8) / 7.3);
  const style = {display: "block", cursor: click ? "pointer" : "default"};
  const drawing = svg("svg", {width, height, role: "img", style},
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
          svg("rect", {x: labelWidth + (g + 1) * group * cell - 1, y, width: 2, height: heights[i], fill: "#fff"})),
        range(vector.length).filter(k => selected(i, k)).map(k => frame(i, k, BLUE)),
      ];
    }));
  const readout = div("readout");

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

  drawing.addEventListener("pointermove", event => {
    const cell = cellAt(event);
    leave();
    if (!cell) return;
    const [i, k] = cell;
    drawing.append(frame(i, k, ORANGE, "pointed"));
    readout.textContent = read(i, k, rows[i].vector[k]);
  });
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("click", event => cellAt(event) && click?.(...cellAt(event)));
  const notes = [
    note, rows.every(row => row.ownScale) ? "Dark: negative, gray: 0, light: positive, relative to each row's maximum."
      : signedNote(commonMax),
    index !== undefined && `Framed, with numbers at the right: ${axis} ${index}. Click to select another.`,
  ];
  const table = () => ({
    columns: [axis, ...rows.map(({label}) => label)],
    rows: range(rows[0].vector.length).map(k => [k, ...rows.map(({vector}) => vector[k])]),
  });
  return picture(id, title, options.table ?? table, div("", scrolling(drawing), readout, below),
    notes.filter(Boolean).join(" "));
}

// Legend of signed colors.
function signedNote(max) {
  return `Dark: −${short(max)}, gray: 0, light: ${short(max)}.`;
}

// A line that reports a check. size: magnitude of the compared numbers, for the tolerance.
function checkLine(text, difference, size = 1) {
  const passes = Math.abs(difference) <= 1e-4 * Math.max(1, size);
  return element("div", {class: passes ? "check" : "check wrong"},
    `${passes ? "✓" : "✗"} ${text}: ${Math.abs(difference).toFixed(4)}`);
}

// The largest absolute difference of two vectors.
function maxDifference(x, y) {
  return x.reduce((max, value, i) => Math.max(max, Math.abs(value - y[i])), 0);
}

// A scatter plot of texts. points: {x, y, text, title, color, marked}, ordered by importance: a text that would overlap
// an earlier one becomes a dot.
function textScatter(points, {width, height, xTitle, yTitle}) {
  const line = 15, letter = 8, edge = 20; // above and below the frame
  const X = scaleOf(points.map(p => p.x), 20, width - 20);
  const Y = scaleOf(points.map(p => p.y), height - edge - 20, edge + 20);
  const placed = [], dots = [], texts = [];
  for (const {x, y, text, title, color, marked} of points) {
    const textWidth = letter * [...text].length, tooltip = svg("title", {}, title);
    const left = clamp(X(x) - textWidth / 2, 1, width - textWidth - 1), top = Y(y) - line / 2;
    if (placed.some(other => left < other.left + other.textWidth && other.left < left + textWidth
      && Math.abs(top - other.top) < 10)) {
      dots.push(svg("circle", {cx: X(x), cy: Y(y), r: 1.8, fill: color, opacity: 0.5}, tooltip));
      continue;
    }
    placed.push({left, top, textWidth});
    if (marked) texts.push(svg("rect", {x: left - 1, y: top - 1, width: textWidth + 2, height: line + 2, rx: 3,
      fill: LIGHT, stroke: ORANGE, "stroke-width": 2}));
    texts.push(svg("text", {x: left + textWidth / 2, y: top + 12, "text-anchor": "middle",
      style: {fill: color, font: "13px monospace"}}, text, tooltip));
  }
  const frame = {x: 0.5, y: edge + 0.5, width: width - 1, height: height - 2 * edge - 1};
  return svg("svg", {width, height, role: "img"}, svg("rect", {...frame, fill: "none", stroke: PALE}),
    softText(width, height - 6, `${xTitle} →`, "end"), softText(0, 14, `↑ ${yTitle}`),
    dots, texts);
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

// A drop-down list. choices: values, or [value, text].
function select(title, choices, selected, onSelect, attributes = {}) {
  const change = ({target}) => onSelect(target.value);
  return element("label", {}, `${title} `, element("select", {...attributes, change},
    choices.map(choice => {
      const [value, text = value] = [choice].flat();
      return element("option", {value, selected: String(value) === String(selected)}, text);
    })));
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
function tokenStrip(labels, selected, attributes) {
  return div("token-strip", labels.map((label, t) => element("span", {
    class: t === selected ? "token selected" : "token", click: () => selectToken(t), ...attributes(t),
  }, inText(label))));
}

// The style of text on the color of a number, or on white if the number is not finite.
function onColor(scale, x) {
  const color = Number.isFinite(x) ? colorOf(scale, x) : [255, 255, 255];
  return {background: css(color), color: textColorOn(color)};
}

// A legend, if there are several items. items: {name, color, click, selected}.
function legend(items) {
  return items.length > 1 && div("legend", items.map(({name, color, click, selected}) => element(
    click ? "button" : "span", {class: selected && "selected", click},
    element("i", {style: {borderTop: `6px solid ${color}`}}), name)));
}
