// Charts of a page: lines (line_chart.js), samples (samples.js), bars, and parallel coordinates.
//
// A chart is a <figure class="chart"> that contains its data as JSON (charts.py has the fields).

const MAX_DISTANCE = 12; // pixels between the pointer and its target

// Add the heading, the buttons, and the note of a figure.
function addHeading(figure, {name, title, note}, buttons = []) {
  figure.append(
    element("figcaption", {}, element("h2", {}, title), div("buttons", buttons,
      button("SVG", () => saveSvg(name, figure), {title: "save the picture"}),
      button("PNG", () => savePng(name, figure), {title: "save the picture with twice the pixels"}))),
    ...note ? [div("note", note)] : []);
}

function lineFigure(figure, chart) {
  const node = div();
  addHeading(figure, chart);
  figure.append(node);
  lineChart(chart, node);
  figure.show = node.show;
}

// --- bars ------------------------------------------------------------------------------------------------------------

function barChart(figure, chart) {
  addHeading(figure, chart);
  addDrawing(figure, width => drawBars(chart, width));
}

// Each bar is below its name, which may be long, and left of its value.
function drawBars({title, bars}, width) {
  const row = 44, X = scaleOf([0, Math.max(...bars.map(([, value]) => value))], [0, width - 70]);
  const label = `${title}. ${bars.map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ")}`;
  return svgDrawing(width, row * bars.length, label, bars.map(([name, value], i) => [
    svgText(0, row * i + 14, name),
    svg("rect", {x: 0, y: row * i + 20, width: Math.max(1, X(value)), height: 14, fill: BLUE}),
    svgText(X(value) + 8, row * i + 31, value.toFixed(2)),
  ]));
}

// --- parallel coordinates --------------------------------------------------------------------------------------------

// Positions on an axis are fractions of its height, from 0 at the bottom.

function parallelChart(figure, chart) {
  const {axes} = chart;
  for (const axis of axes) {
    const {values, categories, bounds, log} = axis;
    axis.scale = scaleOf(categories.length ? [-0.5, categories.length - 0.5] : bounds ?? extentOf(values), [0, 1], log);
    axis.positions = values.map(axis.scale);
  }
  const losses = extentOf(axes.at(-1).values), hue = scaleOf(losses, [0, 1]);
  const rows = chart.rows.map((name, i) => ({
    name, positions: axes.map(axis => axis.positions[i]), loss: axes.at(-1).values[i],
    hue: hue(axes.at(-1).values[i]),
  }));
  const brushes = axes.map(() => null); // [low, high] on each axis, or null
  let drawn; // what is on the screen, as drawParallel returns it

  const count = element("span", {role: "status"});
  const reset = button("reset selection", () => {
    brushes.fill(null);
    update();
  });
  addHeading(figure, chart, [count, reset]);
  const holder = addDrawing(figure, width => {
    drawn = drawParallel(chart, rows, brushes, isSelected, width);
    return drawn.node;
  });
  const tooltip = tooltipOf(figure, holder);
  let brushed = null; // the axis of the selection in progress
  onPointer(holder, {move: point, drag: select, cancel: start => select(start, start, true), leave: clear});
  update();

  function isSelected(row) {
    return brushes.every((brush, i) => !brush || isInside(row.positions[i], brush));
  }

  function update() {
    const selected = rows.filter(isSelected).length;
    count.textContent = `${selected} of ${rows.length} selected`;
    reset.disabled = brushes.every(brush => !brush);
    holder.redraw();
  }

  function clear() {
    drawn.cursor.replaceChildren();
    tooltip.hide();
  }

  // Show the name of the row under the pointer.
  function point({x, y}) {
    const row = rows.filter(isSelected).reduce((best, row) => {
      const distance = Math.abs(yAt(row, x) - y);
      return distance < best.distance ? {row, distance} : best;
    }, {distance: MAX_DISTANCE}).row;
    if (!row || brushed !== null) return clear();
    drawn.cursor.replaceChildren(rowPath(row, drawn, {"stroke-width": 4}));
    tooltip.show(x, y, element("div", {}, row.name),
      element("div", {}, `${axes.at(-1).name} ${valueText(row.loss)}`));
  }

  // The y of a row's line at an x of the drawing.
  function yAt({positions}, x) {
    const {xs, Y} = drawn, i = clamp(xs.findIndex(end => end >= x), 1, xs.length - 1);
    const share = clamp((x - xs[i - 1]) / (xs[i] - xs[i - 1]), 0, 1);
    return Y(positions[i - 1] + share * (positions[i] - positions[i - 1]));
  }

  // Select the dragged range of an axis. A click on an axis removes its selection.
  function select(start, end, ended) {
    const {xs, Y} = drawn, axis = xs.findIndex(x => Math.abs(x - start.x) <= MAX_DISTANCE);
    brushed = ended || axis < 0 ? null : axis;
    if (axis < 0) return;
    const isClick = Math.abs(end.y - start.y) <= CLICK;
    brushes[axis] = isClick ? null : [start.y, end.y].map(y => clamp(Y.invert(y), -0.01, 1.01)).sort((a, b) => a - b);
    update();
  }
}

function drawParallel(chart, rows, brushes, isSelected, available) {
  const {axes} = chart, top = 40, height = 300, bottom = top + height, Y = scaleOf([0, 1], [bottom, top]);
  const ticks = axes.map(axis => ticksOf(axis, height));
  const widths = axes.map(({name}, i) =>
    TEXT_WIDTH * Math.max(name.length, ...ticks[i].map(({label}) => label.length)));
  const left = widths[0] + 10, right = widths.at(-1) / 2 + 12, minDistance = Math.max(...widths) + 24;
  const distance = Math.max(minDistance, (available - left - right) / (axes.length - 1));
  const width = left + right + distance * (axes.length - 1), xs = axes.map((_, i) => left + distance * i);
  const selected = rows.filter(isSelected), others = rows.filter(row => !isSelected(row));
  const cursor = svg("g"), last = xs.at(-1);
  const grip = {touchAction: "pan-x", cursor: "ns-resize"}; // touch selects on an axis, and scrolls the page elsewhere
  const strip = Array.from({length: 30}, (_, i) => svg("rect", { // the colors of the losses, along the last axis
    x: last - 4, y: Y((i + 1) / 30), width: 8, height: height / 30 + 0.5, fill: lineColorAt((i + 0.5) / 30),
  }));
  const parts = axes.map(({name}, i) => [
    svgLine(xs[i], top, xs[i], bottom, {stroke: SOFT}),
    svgText(xs[i], top - 18, name, {"text-anchor": "middle", "font-weight": 600}),
    ticks[i].map(({position, label, full}) => svgText(xs[i] - 8, Y(position) + 4, [label, svg("title", {}, full)], {
      "text-anchor": "end", stroke: PAPER, "stroke-width": 3, "paint-order": "stroke", "stroke-linejoin": "round",
    })),
    brushes[i] ? svg("rect", {
      x: xs[i] - 7, y: Y(brushes[i][1]), width: 14, height: Y(brushes[i][0]) - Y(brushes[i][1]),
      fill: "currentColor", "fill-opacity": 0.2, stroke: "currentColor",
    }) : [],
    svg("rect", {
      x: xs[i] - MAX_DISTANCE, y: top, width: 2 * MAX_DISTANCE, height,
      fill: "none", "pointer-events": "all", style: grip,
    }),
  ]);
  const label = `${chart.title}. Axes: ${axes.map(({name}) => name).join(", ")}. ${rows.length} lines.`;
  const node = svgDrawing(width, bottom + 16, label,
    others.map(row => rowPath(row, {xs, Y}, {opacity: FAINT, stroke: "currentColor"})),
    selected.toReversed().map(row => rowPath(row, {xs, Y})), strip, parts, cursor);
  return {node, xs, Y, cursor};
}

function rowPath({name, positions, hue}, {xs, Y}, style = {}) {
  const path = positions.map((y, i) => `${i ? "L" : "M"}${xs[i].toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  return svg("path", {
    d: path, fill: "none", stroke: lineColorAt(hue), "stroke-width": 1.6, "stroke-linejoin": "round", ...style,
  }, svg("title", {}, name));
}

// The labels of an axis of parallel coordinates, as {position, label, full}. Long categories are shortened.
function ticksOf({categories, scale}, height) {
  if (!categories.length) {
    return scale.ticks(6).map(x => ({position: scale(x), label: tickText(x), full: tickText(x)}));
  }
  const every = Math.ceil(categories.length * 15 / height);
  const shorten = name => name.length > 16 ? `${name.slice(0, 15)}…` : name;
  const ticks = categories.map((full, i) => ({position: scale(i), label: shorten(full), full}));
  return ticks.filter((_, i) => i % every === 0);
}

// --- page ------------------------------------------------------------------------------------------------------------

const CHARTS = {lines: lineFigure, samples: samplesFigure, bars: barChart, parallel: parallelChart};

function chartOf(figure) {
  return JSON.parse(figure.firstChild.textContent);
}

function drawFigure(figure) {
  const chart = chartOf(figure);
  figure.dataset.name = chart.name;
  CHARTS[chart.kind](figure, chart);
}

document.querySelectorAll("figure.chart").forEach(drawFigure);
