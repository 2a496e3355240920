"use strict";
// Pictures, and the numbers behind them. Every picture is a figure with a table, which it exports as CSV; drawings export
// as SVG or PNG.

// --- colors ----------------------------------------------------------------------------------------------------------
//
// Both scales are monotone in luminance, so that they can be read without hues: `sequential` from light (0) to dark (1),
// `signed` from dark (-1) through gray to light (1).

const STOPS = {
  sequential: [[255, 255, 255], [255, 237, 160], [254, 178, 76], [240, 90, 40], [165, 15, 60], [60, 0, 50]],
  signed: [[20, 24, 80], [45, 90, 150], [120, 150, 165], [190, 190, 170], [240, 215, 130], [255, 252, 215]],
};

function colorOf(scale, x) {
  const stops = STOPS[scale], last = stops.length - 1;
  const at = clamp(scale === "signed" ? (x + 1) / 2 : x, 0, 1) * last;
  const i = Math.min(Math.floor(at), last - 1);
  return stops[i].map((c, channel) => Math.round(c + (at - i) * (stops[i + 1][channel] - c)));
}

const MISSING = [225, 228, 233]; // the color of -∞ and NaN
const palettes = {};

// The colors of a scale from one end to the other as pixels of an image.
function paletteOf(scale) {
  const at = i => scale === "signed" ? i / 511.5 - 1 : i / 1023;
  return palettes[scale] ??= Uint32Array.from({length: 1024}, (_, i) => pixelOf(colorOf(scale, at(i))));
}

function pixelOf([r, g, b]) {
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

function css(color) {
  return `rgb(${color.join(",")})`;
}

// Black or white, whichever has the larger contrast by WCAG 2, which is at least 4.5.
function textColorOn(color) {
  const [r, g, b] = color.map(c => c <= 10 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// --- figures ---------------------------------------------------------------------------------------------------------

// A picture with its caption and exports. id: for tests and file names. table: {columns, rows}. drawing: an element.
function picture(id, title, table, drawing, note = "") {
  const exports = element("span", {class: "exports"},
    element("button", {click: () => download(`${id}.csv`, csv(table()), "text/csv"), title: "Download the numbers"}, "CSV"));
  const figure = element("figure", {"data-testid": id},
    element("figcaption", {}, element("h3", {}, title), exports),
    note && element("div", {class: "note"}, note), drawing);
  const save = kind => element("button", {click: () => savePicture(id, figure, kind)}, kind.toUpperCase());
  if (drawing.matches("svg") || drawing.querySelector("svg")) exports.append(" ", save("svg"));
  else if (drawing.querySelector("canvas")) exports.append(" ", save("png"));
  figure.table = table;
  return figure;
}

// Numbers are written so that reading them gives the same float32 again.
function csv({columns, rows}) {
  const cell = x => typeof x === "number"
    ? (Number.isFinite(x) ? String(x) : x < 0 ? "-inf" : Number.isNaN(x) ? "nan" : "inf")
    : /[",\n\r]/.test(x) ? `"${x.replaceAll('"', '""')}"` : x;
  return [columns, ...rows].map(row => Array.from(row, cell).join(",")).join("\n") + "\n";
}

// The table of a matrix {shape: [N, M], data}, with labels of its rows and columns.
function matrixTable(corner, rowLabels, columnLabels, {shape: [rows, columns], data}) {
  return {
    columns: [corner, ...columnLabels],
    rows: Array.from({length: rows}, (_, i) => [rowLabels[i], ...data.subarray(i * columns, (i + 1) * columns)]),
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
  const style = "text{font:12px monospace;fill:#1d2430}.soft{fill:#5d6878}";
  copy.prepend(svg("style", {}, style));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  download(`${id}.svg`, new XMLSerializer().serializeToString(copy), "image/svg+xml");
}

// The current view as one HTML file that needs nothing else.
function saveView() {
  const original = document.getElementById("view"), copy = original.cloneNode(true);
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

// A matrix as a heat map {shape: [N, M], data}. value(x) gives the color's place on the scale; options: scale, cell (in
// pixels), numbers (write them into the cells), read(i, j, x) for the line below, click(i, j), chosen [i, j] (i or j may
// be null, for a whole column or row).
function heatMap({shape: [rows, columns], data}, options) {
  const {scale = "sequential", value = x => x, read, click, chosen, numbers = false} = options;
  const cell = options.cell ?? (numbers ? 44 : clamp(Math.floor(560 / Math.max(rows, columns)), 1, 22));
  const height = options.height ?? (numbers ? 24 : cell);
  const canvas = element("canvas", {width: columns * (numbers ? cell : 1), height: rows * (numbers ? height : 1)});
  Object.assign(canvas.style, {width: `${columns * cell}px`, height: `${rows * height}px`});
  paint(canvas.getContext("2d"));
  const cursor = element("div", {class: "cursor"}), readout = element("div", {class: "readout"});
  const box = element("div", {class: "heat"}, canvas, cursor);
  if (chosen) box.append(frame(element("div", {class: "chosen"}), ...chosen));

  function paint(context) {
    if (!numbers) {
      const image = context.createImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
      const palette = paletteOf(scale), [from, to] = scale === "signed" ? [-1, 1] : [0, 1], last = palette.length - 1;
      for (let k = 0; k < rows * columns; k++) {
        const x = (value(data[k]) - from) / (to - from);
        pixels[k] = Number.isFinite(data[k]) ? palette[Math.round(clamp(x, 0, 1) * last)] : pixelOf(MISSING);
      }
      return context.putImageData(image, 0, 0);
    }
    context.font = "11px monospace";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        const x = data[i * columns + j];
        const color = Number.isFinite(x) ? colorOf(scale, value(x)) : MISSING;
        context.fillStyle = css(color);
        context.fillRect(j * cell, i * height, cell, height);
        context.fillStyle = textColorOn(color);
        context.fillText(Number.isFinite(x) ? x.toFixed(2) : "−∞", (j + 0.5) * cell, (i + 0.5) * height);
      }
    }
  }

  function frame(node, i, j) {
    Object.assign(node.style, {
      left: `${(j ?? 0) * cell}px`, top: `${(i ?? 0) * height}px`,
      width: `${j === null ? columns * cell : cell}px`, height: `${i === null ? rows * height : height}px`,
    });
    return node;
  }

  function at(event) {
    const bounds = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientY - bounds.top) / height), j = Math.floor((event.clientX - bounds.left) / cell);
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  }

  canvas.addEventListener("pointermove", event => {
    const place = at(event);
    cursor.style.display = place ? "block" : "none";
    if (!place) return;
    frame(cursor, ...place);
    if (read) readout.textContent = read(...place, data[place[0] * columns + place[1]]);
  });
  canvas.addEventListener("pointerleave", () => {
    cursor.style.display = "none";
    readout.textContent = "";
  });
  if (click) canvas.addEventListener("click", event => at(event) && click(...at(event)));
  return element("div", {}, element("div", {class: "scroll"}, box), read && readout);
}

// A vector as a strip of cells, wrapped to rows of `width`; colors are relative to the largest absolute value.
function strip(vector, read, options = {}) {
  const most = largest(vector), width = options.width ?? Math.min(vector.length, 128);
  const rows = Math.ceil(vector.length / width), data = new Float32Array(rows * width).fill(NaN);
  data.set(vector);
  return heatMap({shape: [rows, width], data}, {
    scale: "signed", value: x => x / most, cell: options.cell ?? clamp(Math.floor(640 / width), 4, 12), height: 14,
    read: (i, j, x) => i * width + j < vector.length ? read(i * width + j, x) : "",
    click: options.click && ((i, j) => i * width + j < vector.length && options.click(i * width + j)),
  });
}

function largest(values) {
  return values.reduce((most, x) => Number.isFinite(x) ? Math.max(most, Math.abs(x)) : most, 1e-30);
}

// Horizontal bars. items: {label, value, text, dim, click}, values from 0 to most.
function bars(items, most, options = {}) {
  const {labelWidth = 90, line = 20} = options;
  const width = options.width ?? clamp(document.getElementById("view").clientWidth - labelWidth - 120, 60, 300);
  const x = value => width * clamp(value / most, 0, 1);
  return svg("svg", {width: labelWidth + width + 90, height: items.length * line + 4, role: "img"},
    items.map((item, i) => svg("g", {
      transform: `translate(0, ${i * line})`, opacity: item.dim ? 0.35 : 1,
      click: item.click ?? null, style: item.click ? {cursor: "pointer"} : {},
    },
      svg("text", {x: labelWidth - 6, y: 14, "text-anchor": "end"}, item.label),
      svg("rect", {x: labelWidth, y: 3, width: Math.max(x(item.value), 0.5), height: line - 6, fill: item.color ?? "#1f5fbf"}),
      svg("text", {x: labelWidth + x(item.value) + 6, y: 14, class: "soft"}, item.text))));
}

// A table of text and numbers. columns: {title, text: true for text}. options: selected(row index), click(row index).
function numberTable(columns, rows, options = {}) {
  const {selected = () => false, click} = options;
  return element("div", {class: "scroll"}, element("table", {},
    element("thead", {}, element("tr", {}, columns.map(column => element("th", {scope: "col"}, column.title)))),
    element("tbody", {}, rows.map((row, i) => element("tr", {
      class: `${selected(i) ? "selected" : ""} ${click ? "clickable" : ""}`, click: click ? () => click(i) : null,
    }, row.map((cell, j) => element("td", {class: columns[j].text ? "text" : null},
      typeof cell === "number" ? short(cell) : cell)))))));
}

// Lines over x. series: {name, points: [[x, y], ...], color}. options: width, height, logX, xTitle, yTitle, mark (an x),
// click(x).
const LINE_COLORS = ["#1f5fbf", "#c2410c", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#334155", "#15803d"];

function lineChart(series, options = {}) {
  const {width = 620, height = 240, logX = false, xTitle = "", yTitle = "", mark, click} = options;
  const left = 56, bottom = 34, top = 10, right = 12;
  const points = series.flatMap(s => s.points), xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const warp = x => logX ? Math.log10(Math.max(x, 0) + 1) : x;
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)].map(warp);
  const [y0, y1] = [options.from ?? Math.min(...ys), options.to ?? Math.max(...ys)];
  const X = x => left + (width - left - right) * (warp(x) - x0) / (x1 - x0 || 1);
  const Y = y => height - bottom - (height - bottom - top) * (y - y0) / (y1 - y0 || 1);
  const ticks = ticksOf(y0, y1, 5), xTicks = logX ? [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000, 300000].filter(x => warp(x) >= x0 && warp(x) <= x1) : ticksOf(x0, x1, 7);
  const chart = svg("svg", {width, height, role: "img"},
    ticks.map(y => [svg("line", {x1: left, x2: width - right, y1: Y(y), y2: Y(y), stroke: "#e3e7ed"}),
      svg("text", {x: left - 6, y: Y(y) + 4, "text-anchor": "end", class: "soft"}, short(y))]).flat(),
    xTicks.map(x => svg("text", {x: X(x), y: height - bottom + 16, "text-anchor": "middle", class: "soft"}, short(x))),
    svg("text", {x: (left + width) / 2, y: height - 3, "text-anchor": "middle", class: "soft"}, xTitle),
    svg("text", {x: left, y: top, class: "soft"}, yTitle),
    mark !== undefined && svg("line", {x1: X(mark), x2: X(mark), y1: top, y2: height - bottom, stroke: "#c2410c", "stroke-dasharray": "3 3"}),
    series.map((s, i) => svg("polyline", {
      points: s.points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" "), fill: "none",
      stroke: s.color ?? LINE_COLORS[i % LINE_COLORS.length], "stroke-width": s.width ?? 1.6, "stroke-dasharray": s.dash ?? null,
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

function ticksOf(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low || 1) / count));
  const size = [1, 2, 5, 10].map(n => n * step).find(size => (high - low) / size <= count);
  return Array.from({length: count + 2}, (_, i) => (Math.ceil(low / size) + i) * size).filter(x => x <= high + 1e-12);
}
