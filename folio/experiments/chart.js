// Charts of a page: lines in panels that share their x axis, bars, and parallel coordinates.
//
// A chart is a <figure class="chart"> that contains its data as JSON (charts.py has the fields). Names in the data are
// untrusted, so they only become text nodes and attributes, never HTML. Drawings are SVGs without rules of a style
// sheet, so they look the same in a file, in which the variables are replaced. colors.js has the colors.

const DASHES = {solid: null, dashed: "7 4", dotted: "1.5 4"};
const FAINT = 0.13; // opacity of lines that are not selected
const FIRST_COLOR = 0.5; // of a line, in the sequential palette; paler colors are too close to that of the paper
const FILE_WIDTH = 960; // pixels, of a drawing in a file
const MIN_WIDTH = 200; // pixels, of a drawing; narrower pages scroll
const TEXT_WIDTH = 7.3; // approximate pixels per character
const MAX_DISTANCE = 12; // pixels between the pointer and its target
const CLICK = 5; // maximum pixels of movement in a click
const MAX_GROUPS = 8; // with more groups, colors are from the palette, and buttons show or hide all

const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

// --- elements --------------------------------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity));
  return node;
}

function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function button(label, click, attributes = {}) {
  const node = html("button", {type: "button", ...attributes}, label);
  node.addEventListener("click", () => click(node));
  return node;
}

// A toggle button, which calls set(isOn).
function toggle(label, set, on = false) {
  return button(label, node => {
    const next = node.getAttribute("aria-pressed") !== "true";
    node.setAttribute("aria-pressed", next);
    set(next);
  }, {"aria-pressed": on});
}

function text(x, y, content, attributes = {}) {
  return svg("text", {x, y, fill: "currentColor", ...attributes}, content);
}

function rule(x1, y1, x2, y2, attributes = {}) {
  return svg("line", {x1, y1, x2, y2, stroke: "currentColor", ...attributes});
}

function drawing(width, height, label, ...children) {
  return svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, color: "var(--ink)",
    "font-family": "var(--mono)", "font-size": 12,
  }, children);
}

// --- numbers and colors ----------------------------------------------------------------------------------------------

// Return a function from numbers to positions, with its inverse. log: logarithmic scale.
function scaleOf([low, high], [from, to], log = false) {
  const warp = log ? Math.log10 : x => x, unwarp = log ? x => 10 ** x : x => x;
  const start = warp(low), rate = (to - from) / (warp(high) - start);
  const scale = x => from + rate * (warp(x) - start);
  scale.invert = position => unwarp(start + (position - from) / rate);
  scale.log = log;
  scale.ticks = count => log ? logTicks(low, high, count) : linearTicks(low, high, count);
  return scale;
}

// About `count` evenly spaced round numbers.
function linearTicks(low, high, count) {
  const distance = (high - low) / count, power = 10 ** Math.floor(Math.log10(distance));
  const step = [1, 2, 5, 10].map(n => n * power).find(size => size >= 0.7 * distance);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Powers of ten, with intermediate numbers if they fit. Below half a decade, linear ticks.
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.5) return linearTicks(low, high, count);
  const every = Math.ceil(decades / count);
  const multiples = decades < count / 2 ? [1, 2, 5] : decades < count ? [1, 3] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    ticks.push(...multiples.map(multiple => Number(`${multiple}e${power}`)));
  }
  return ticks.filter(x => x >= low && x <= high);
}

// The minimum and maximum of the numbers, extended if they are equal.
function extentOf(numbers, log = false) {
  let low = Infinity, high = -Infinity;
  for (const x of numbers) {
    low = Math.min(low, x);
    high = Math.max(high, x);
  }
  if (low > high) return [1, 10]; // no numbers
  if (low < high) return [low, high];
  return log ? [low / 2, low * 2] : [low - (Math.abs(low) / 2 || 1), low + (Math.abs(low) / 2 || 1)];
}

// A range with padding at both ends.
function padded([low, high], log) {
  const space = log ? (high / low) ** 0.04 : 0.04 * (high - low);
  return log ? [low / space, high * space] : [low - space, high + space];
}

// A short number for an axis: 20k, 0.05, 3e-4.
function tickText(x) {
  const size = Math.abs(x);
  const [unit, letter] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([unit]) =>
    size >= unit && Number((x / unit).toFixed(2)) === x / unit) ?? [1, ""];
  if (size && size < 1e-3) return x.toExponential();
  return (x / unit).toLocaleString("en-US", {maximumFractionDigits: 9}) + letter;
}

// A number with six significant digits, or an integer with all digits.
function valueText(x) {
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  if (Math.abs(x) < 1e-4) return String(Number(x.toPrecision(6)));
  return x.toLocaleString("en-US", {maximumSignificantDigits: 6});
}

// The color of a line at a position, from 0 to 1, in a sequence of lines.
function lineColorAt(position) {
  return css(colorOf("sequential", FIRST_COLOR + (1 - FIRST_COLOR) * position));
}

// --- frames ----------------------------------------------------------------------------------------------------------

// Create the heading, the buttons, and a drawing as wide as the page. draw(width, isFile) returns the SVG. Returns the
// element that contains the drawing, and a function that redraws it.
function frameOf(figure, chart, draw, buttons = [], legend = []) {
  const holder = html("div", {class: "drawing"});
  const save = button("SVG", () => download(`${chart.name}.svg`, draw(FILE_WIDTH, true)), {title: "save the drawing"});
  figure.append(
    html("figcaption", {}, html("h2", {}, chart.title), html("div", {class: "buttons"}, buttons, save)),
    ...(chart.note ? [html("div", {class: "note"}, chart.note)] : []), ...legend, holder);
  let width;
  const redraw = () => {
    width = holder.clientWidth;
    holder.replaceChildren(draw(Math.max(width, MIN_WIDTH), false));
  };
  redraw();
  onNewPalette(redraw);
  new ResizeObserver(() => holder.clientWidth !== width && redraw()).observe(holder);
  return {holder, redraw};
}

// Add a title above a drawing, and the names of its lines below it.
function withTitle(drawn, title, names = []) {
  const top = 30, [width, height] = ["width", "height"].map(name => Number(drawn.getAttribute(name)));
  const full = height + top + 18 * names.length + 8;
  const legend = names.map(({name, color}, i) => {
    const y = height + top + 18 * i + 9;
    return [rule(56, y, 78, y, {stroke: color, "stroke-width": 3}), text(86, y + 4, name)];
  });
  drawn.setAttribute("y", top);
  return drawing(width, full, drawn.getAttribute("aria-label"),
    svg("rect", {width, height: full, fill: PAPER}), text(12, 22, title, {"font-size": 15, "font-weight": 600}),
    drawn, legend);
}

function download(name, drawn) {
  const content = resolveVariables(new XMLSerializer().serializeToString(drawn));
  const url = URL.createObjectURL(new Blob([content], {type: "image/svg+xml"}));
  html("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// A tooltip near the pointer. show(x, y, nodes): coordinates in the holder.
function tooltipOf(figure, holder) {
  const box = html("div", {class: "values", "aria-live": "polite", hidden: ""});
  figure.append(box);
  return {
    show(x, y, ...nodes) {
      box.replaceChildren(...nodes);
      box.hidden = false;
      const outer = figure.getBoundingClientRect(), inner = holder.getBoundingClientRect();
      const fitsRight = x + 16 + box.offsetWidth <= outer.width;
      box.style.left = `${Math.max(0, fitsRight ? x + 16 : x - 16 - box.offsetWidth)}px`;
      const maxTop = innerHeight - outer.top - box.offsetHeight - 4; // inside the window
      box.style.top = `${Math.max(Math.min(inner.top - outer.top + y + 12, maxTop), 4 - outer.top)}px`;
    },
    hide() {
      box.hidden = true;
    },
    isTooHigh: () => box.offsetHeight > 0.5 * innerHeight,
  };
}

function swatch(color) {
  const node = html("i");
  node.style.borderTop = `6px solid ${color}`;
  return node;
}

// Call move(point) for a mouse over the holder or a touch, drag(start, point, hasEnded) between press and release, and
// leave(). A point is {x, y} in the drawing.
function onPointer(holder, {move, drag, leave}) {
  let start = null;
  const pointOf = event => {
    const {left, top} = holder.firstChild.getBoundingClientRect();
    return {x: event.clientX - left, y: event.clientY - top};
  };
  holder.addEventListener("pointerdown", event => {
    if (event.button) return;
    start = pointOf(event);
    holder.setPointerCapture(event.pointerId);
    move(start);
  });
  holder.addEventListener("pointermove", event => {
    move(pointOf(event));
    if (start) drag(start, pointOf(event), false);
  });
  holder.addEventListener("pointerup", event => {
    if (start) drag(start, pointOf(event), true);
    start = null;
  });
  holder.addEventListener("pointercancel", () => { // the finger scrolls the page
    if (start) drag(start, start, true);
    start = null;
  });
  // The values at a touched point stay until the next touch.
  holder.addEventListener("pointerleave", event => event.pointerType !== "touch" && leave());
  document.addEventListener("pointerdown", event => holder.contains(event.target) || leave());
}

const ARROWS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

// Call move(right, down) for arrow keys in the holder, move(0, 0) when it gets the focus by a key, and leave() when it
// loses it.
function onArrows(holder, title, {move, leave}) {
  fill(holder, {tabindex: 0, role: "application", "aria-label": title}, []); // screen readers leave the arrows to it
  holder.addEventListener("focus", () => holder.matches(":focus-visible") && move(0, 0));
  holder.addEventListener("blur", leave);
  holder.addEventListener("keydown", event => {
    if (!ARROWS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(...ARROWS[event.key]);
  });
}

// --- lines -----------------------------------------------------------------------------------------------------------

const LEFT = 56, RIGHT = 18, EDGE = 4; // margins in pixels; EDGE avoids clipping lines at the edge of a panel

function lineChart(figure, chart) {
  const {groups} = chart, view = {range: null, logX: false, logY: false, hidden: new Set()};
  for (const group of groups) {
    group.swatch = html("i");
    for (const line of group.lines) Object.assign(line, {group});
  }
  let drawn; // what is on the screen, as drawLines returns it

  const entries = groups.map(group => {
    const entry = toggle("", on => {
      if (on) view.hidden.delete(group);
      else view.hidden.add(group);
      update();
    }, true);
    entry.append(group.swatch, group.name);
    for (const [event, shown] of [["pointerenter", group], ["focus", group], ["pointerleave", null], ["blur", null]]) {
      entry.addEventListener(event, () => emphasize(shown));
    }
    return entry;
  });
  const all = (label, on) => button(label, () => {
    view.hidden = new Set(on ? [] : groups);
    for (const entry of entries) entry.setAttribute("aria-pressed", on);
    update();
  });
  const legend = html("div", {class: "legend", role: "group", "aria-label": "lines"},
    groups.length > MAX_GROUPS ? [all("show all", true), all("hide all", false)] : [], entries);
  const reset = button("reset zoom", () => zoom(null), {disabled: ""});
  const logarithmic = (name, key) => toggle(name, on => {
    view[key] = on;
    update();
  });
  const {holder, redraw} = frameOf(figure, chart, (width, isFile) => {
    colorGroups(groups);
    const result = drawLines(chart, view, width);
    if (isFile) return withTitle(result.node, chart.title, groups.filter(group => !view.hidden.has(group)));
    drawn = result;
    return result.node;
  }, [logarithmic("log x", "logX"), logarithmic("log y", "logY"), reset], [legend]);
  holder.style.cursor = "crosshair";
  holder.style.touchAction = "pan-y"; // dragging up and down scrolls the page
  const tooltip = tooltipOf(figure, holder);
  onPointer(holder, {move: point, drag: select, leave: clear});
  holder.addEventListener("dblclick", () => zoom(null));
  const place = {x: -Infinity, panel: 0}; // of the keys
  onArrows(holder, chart.title, {move, leave: clear});

  function update() {
    clear();
    redraw();
  }

  // Show the values at the next x to the right or to the left, or of the next panel.
  function move(right, down) {
    place.panel = clamp(place.panel + down, 0, drawn.panels.length - 1);
    const panel = drawn.panels[place.panel];
    const drawnXs = panel.lines.flatMap(line => [...drawable(line, drawn.X.log, panel.Y.log)].map(i => line.x[i]));
    const xs = [...new Set(drawnXs)].filter(x => isInside(x, drawn.range)).sort((a, b) => a - b);
    if (!xs.length) return clear();
    const current = Math.max(0, xs.findIndex(x => x >= place.x));
    place.x = xs[clamp(current + right, 0, xs.length - 1)];
    point({x: drawn.X(place.x), y: (panel.top + panel.bottom) / 2});
  }

  function zoom(range) {
    view.range = range;
    reset.disabled = !range;
    update();
  }

  // Fade the lines of other groups.
  function emphasize(group) {
    for (const {node, line} of drawn.paths) {
      node.setAttribute("opacity", group && group !== line.group && !view.hidden.has(group) ? FAINT : 1);
    }
  }

  function clear() {
    drawn.cursor.replaceChildren();
    tooltip.hide();
  }

  // Show the values of a panel's lines at the x nearest to the pointer: all, or the nearest that fit.
  function point({x, y}) {
    const panel = drawn.panels.find(({bottom}) => y <= bottom) ?? drawn.panels.at(-1);
    const values = panel.lines.map(line => nearestPoint(line, panel, x)).filter(value => value);
    if (!values.length) return clear();
    values.sort((a, b) => Math.abs(panel.Y(a.y) - y) - Math.abs(panel.Y(b.y) - y));
    const nearest = values.reduce((best, value) => distanceTo(value, x) < distanceTo(best, x) ? value : best).x;
    const cursorX = drawn.X(nearest);
    drawn.cursor.replaceChildren(
      rule(cursorX, drawn.panels[0].top, cursorX, drawn.panels.at(-1).bottom, {opacity: 0.4}),
      ...values.map(({line, x, y}) => svg("circle", {
        cx: drawn.X(x), cy: panel.Y(y), r: 4, fill: line.group.color, stroke: PAPER,
      })));
    let count = values.length;
    do {
      tooltip.show(cursorX, y, ...describe(values, count, nearest, panel));
      count = Math.floor(0.8 * count);
    } while (count > 3 && tooltip.isTooHigh());
  }

  // Elements with the values of the `count` nearest lines, in descending order.
  function describe(values, count, nearest, panel) {
    const rows = values.slice(0, count).sort((a, b) => b.y - a.y).map(value =>
      html("tr", {class: value === values[0] ? "nearest" : null},
        html("td", {}, swatch(value.line.group.color), value.line.name),
        html("td", {}, valueText(value.y)),
        html("td", {}, value.x === nearest ? "" : `at ${valueText(value.x)}`)));
    const others = values.length - rows.length;
    return [
      html("div", {}, `${chart.x} ${valueText(nearest)}: ${panel.title}`), html("table", {}, rows),
      ...(others ? [html("div", {}, `and ${others} more lines, farther from the pointer`)] : []),
    ];
  }

  function distanceTo(value, x) {
    return Math.abs(drawn.X(value.x) - x);
  }

  // Mark the dragged range of the x axis, and zoom into it when the drag ends.
  function select({x: start}, {x: end}, ended) {
    const {X, width, panels, selection} = drawn, {top} = panels[0];
    const [from, to] = [start, end].map(x => clamp(x, LEFT, width - RIGHT)).sort((a, b) => a - b);
    if (to - from <= CLICK) return selection.replaceChildren();
    if (ended) return zoom([X.invert(from), X.invert(to)]);
    selection.replaceChildren(svg("rect", {
      x: from, y: top, width: to - from, height: panels.at(-1).bottom - top, opacity: FAINT,
    }));
  }

  // {line, x, y} of the line's drawn point nearest to a pixel position; undefined without any.
  function nearestPoint(line, panel, position) {
    let best, minDistance = Infinity;
    for (const i of drawable(line, drawn.X.log, panel.Y.log)) {
      const x = line.x[i], distance = Math.abs(drawn.X(x) - position);
      if (distance >= minDistance || !isInside(x, drawn.range)) continue;
      minDistance = distance;
      best = {line, x, y: line.y[i]};
    }
    return best;
  }
}

// Set the color of each group, and of its entry in the legend.
function colorGroups(groups) {
  groups.forEach((group, i) => {
    group.color = groups.length > MAX_GROUPS ? lineColorAt(i / (groups.length - 1)) : LINE_COLORS[i];
    group.swatch.style.borderTop = `6px solid ${group.color}`;
  });
}

function isInside(x, [low, high]) {
  return x >= low && x <= high;
}

// The indices of the points that can be drawn: not missing, and positive on logarithmic axes.
function* drawable({x, y}, logX, logY) {
  for (let i = 0; i < x.length; i++) {
    if (y[i] !== null && (!logX || x[i] > 0) && (!logY || y[i] > 0)) yield i;
  }
}

// The shown range of the x axis.
function rangeOf(lines, {range, logX}) {
  const full = extentOf(lines.flatMap(line => line.x).filter(x => !logX || x > 0), logX);
  if (!range) return full;
  return logX && range[0] <= 0 ? [full[0], range[1]] : range;
}

// The SVG of the lines, and the geometry for pointer events.
function drawLines(chart, view, width) {
  const shown = chart.groups.filter(group => !view.hidden.has(group)), lines = shown.flatMap(group => group.lines);
  const range = rangeOf(lines, view), X = scaleOf(range, [LEFT, width - RIGHT], view.logX);
  let bottom = 0;
  const panels = chart.panels.map((panel, i) => {
    const top = bottom + 26;
    bottom = top + panel.height + 22;
    return drawPanel(panel, lines.filter(line => line.panel === i), shown, {X, range, view, width, top});
  });
  const cursor = svg("g"), selection = svg("g"), names = shown.map(({name}) => name);
  const label = `${chart.title}. ${chart.panels.map(({title}) => title).join(", ")} over ${chart.x}. `
    + (names.length > MAX_GROUPS ? `Lines of ${names.length} entries of the legend.` : `Lines: ${names.join(", ")}.`);
  const node = drawing(width, bottom + 20, label, panels.map(panel => panel.nodes), cursor, selection,
    text((LEFT + width - RIGHT) / 2, bottom + 12, chart.x, {"text-anchor": "middle"}));
  return {node, width, X, range, panels, cursor, selection, paths: panels.flatMap(panel => panel.paths)};
}

function drawPanel(panel, lines, groups, {X, range, view, width, top}) {
  const bottom = top + panel.height, right = width - RIGHT, log = view.logY && !panel.from_zero;
  const points = lines.flatMap(({x, y}) => [...drawable({x, y}, X.log, log)].map(i => [x[i], y[i]]));
  const inside = points.filter(([x]) => isInside(x, range));
  const extent = extentOf((inside.length ? inside : points).map(([, y]) => y), log);
  const Y = scaleOf(panel.from_zero ? [0, Math.max(extent[1], 1)] : padded(extent, log), [bottom, top], log);
  const grid = Y.ticks(Math.round(panel.height / 45)).map(y => [
    rule(LEFT, Y(y), right, Y(y), {stroke: PALE}),
    text(LEFT - 6, Y(y) + 4, tickText(y), {"text-anchor": "end", fill: SOFT})]);
  const below = X.ticks(Math.ceil((right - LEFT) / 80)).map(x => [
    rule(X(x), top, X(x), bottom, {stroke: PALE}),
    text(X(x), bottom + 15, tickText(x), {"text-anchor": "middle", fill: SOFT})]);
  const marks = groups.flatMap(({marks, color}) => marks.filter(({x}) => !X.log || x > 0).map(({x, dash}) =>
    rule(X(x), top, X(x), bottom, {stroke: color, "stroke-dasharray": DASHES[dash]})));
  const paths = lines.map(line => ({line, node: drawLine(line, X, Y)}));
  const inner = svg("svg", { // clips its content
    x: LEFT - EDGE, y: top - EDGE, width: right - LEFT + 2 * EDGE, height: panel.height + 2 * EDGE,
    viewBox: `${LEFT - EDGE} ${top - EDGE} ${right - LEFT + 2 * EDGE} ${panel.height + 2 * EDGE}`,
  }, marks, paths.map(({node}) => node).reverse()); // the first lines are on top
  const title = text(LEFT, top - 8, panel.title, {"font-weight": 600});
  return {...panel, top, bottom, Y, lines, paths, nodes: [title, grid, below, inner]};
}

function drawLine(line, X, Y) {
  let path = "", points = "", previous = null;
  for (const i of drawable(line, X.log, Y.log)) {
    const position = `${X(line.x[i]).toFixed(1)} ${Y(line.y[i]).toFixed(1)}`;
    path += (i - 1 === previous ? "L" : "M") + position;
    points += `M${position}h0`; // drawn as a dot by the round line cap
    previous = i;
  }
  const style = {fill: "none", stroke: line.group.color, "stroke-linejoin": "round", "stroke-linecap": "round"};
  return svg("g", {},
    svg("title", {}, line.name),
    svg("path", {d: path, "stroke-width": line.width, "stroke-dasharray": DASHES[line.dash], ...style}),
    line.points || line.x.length === 1 ? svg("path", {d: points, "stroke-width": line.width + 3, ...style}) : []);
}

// --- bars ------------------------------------------------------------------------------------------------------------

function barChart(figure, chart) {
  frameOf(figure, chart, (width, isFile) => {
    const drawn = drawBars(chart, width);
    return isFile ? withTitle(drawn, chart.title) : drawn;
  });
}

// Each bar is below its name, which may be long, and left of its value.
function drawBars({title, bars}, width) {
  const row = 44, X = scaleOf([0, Math.max(...bars.map(([, value]) => value))], [0, width - 70]);
  const label = `${title}. ${bars.map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ")}`;
  return drawing(width, row * bars.length, label, bars.map(([name, value], i) => [
    text(0, row * i + 14, name),
    svg("rect", {x: 0, y: row * i + 20, width: Math.max(1, X(value)), height: 14, fill: BLUE}),
    text(X(value) + 8, row * i + 31, value.toFixed(2)),
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

  const count = html("span", {role: "status"});
  const reset = button("reset selection", () => {
    brushes.fill(null);
    update();
  });
  const {holder, redraw} = frameOf(figure, chart, (width, isFile) => {
    const result = drawParallel(chart, rows, brushes, isSelected, width);
    if (isFile) return withTitle(result.node, chart.title);
    drawn = result;
    return result.node;
  }, [count, reset]);
  const tooltip = tooltipOf(figure, holder);
  let brushed = null; // the axis of the selection in progress
  onPointer(holder, {move: point, drag: select, leave: clear});
  update();

  function isSelected(row) {
    return brushes.every((brush, i) => !brush || isInside(row.positions[i], brush));
  }

  function update() {
    const selected = rows.filter(isSelected).length;
    count.textContent = `${selected} of ${rows.length} selected`;
    reset.disabled = brushes.every(brush => !brush);
    redraw();
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
    tooltip.show(x - holder.scrollLeft, y, html("div", {}, row.name),
      html("div", {}, `${axes.at(-1).name} ${valueText(row.loss)}`));
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
  const grip = "touch-action: pan-x; cursor: ns-resize"; // touch selects on an axis, and scrolls the page elsewhere
  const strip = Array.from({length: 30}, (_, i) => svg("rect", { // the colors of the losses, along the last axis
    x: last - 4, y: Y((i + 1) / 30), width: 8, height: height / 30 + 0.5, fill: lineColorAt((i + 0.5) / 30),
  }));
  const parts = axes.map(({name}, i) => [
    rule(xs[i], top, xs[i], bottom, {stroke: SOFT}),
    text(xs[i], top - 18, name, {"text-anchor": "middle", "font-weight": 600}),
    ticks[i].map(({position, label, full}) => text(xs[i] - 8, Y(position) + 4, [label, svg("title", {}, full)], {
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
  const node = drawing(width, bottom + 16, label,
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

const CHARTS = {lines: lineChart, bars: barChart, parallel: parallelChart};
for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = JSON.parse(figure.firstChild.textContent);
  CHARTS[chart.kind](figure, chart);
}
