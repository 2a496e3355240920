// Line charts of reports and of the viewer, in panels that share their x axis. A part can be enlarged, axes can be
// logarithmic, and lines can be hidden; the pointer and keys show values.
//
// A chart is {name, title, x (name of the axis), panels, groups}: see charts.py, also for the defaults of a line.
// Optional: logX (whether the x axis is logarithmic at first), the color of a group, the fill below a line, the marked
// `current` x, the maximum width in pixels, and `pick` for x that can be selected: {values, choose(x), tickTitle(x) (of
// marks at the values)}.

const DASHES = {dashed: "7 4", dotted: "1.5 4"};
const FAINT = 0.13; // opacity of lines that are not selected
const FIRST_COLOR = 0.5; // of a line, in the sequential palette; paler colors are too close to that of the paper
const MAX_GROUPS = 8; // with more groups, colors are from the palette, and buttons show or hide all
const LEFT = 56, RIGHT = 18, EDGE = 4; // margins in pixels; EDGE avoids clipping lines at the edge of a panel

const chartViews = new Map(); // by name of the chart: what the reader has chosen, also after it is drawn from new data

// Fill an element with the legend, the buttons, and the drawing, and return it. Its show(chart) replaces the data.
function lineChart(chart, node = div()) {
  if (!chartViews.has(chart.name)) {
    chartViews.set(chart.name, {range: null, logX: Boolean(chart.logX), logY: false, hidden: new Set()});
  }
  node.style.maxWidth = chart.width ? `${chart.width}px` : "";
  const view = chartViews.get(chart.name), place = {x: chart.current ?? -Infinity, panel: 0}; // of the keys
  let groups, drawn; // with defaults; what is on the screen, as drawLines returns it
  let pointed = null; // the place of the pointer in the drawing, if values are shown

  const legend = element("div", {class: "legend", role: "group", "aria-label": "lines"});
  const reset = button("reset zoom", () => zoom(null), {disabled: !view.range});
  const logarithmic = (label, key) => toggle(label, isOn => {
    view[key] = isOn;
    update();
  }, view[key]);
  const buttons = div("buttons", logarithmic("log x", "logX"), logarithmic("log y", "logY"), reset);
  build(node, {class: "line-chart"}, [element("div", {}, legend, buttons)]);
  setData();
  const holder = addDrawing(node, draw);
  const tooltip = tooltipOf(node, holder);
  build(holder, {"aria-label": chart.title, dblclick: () => zoom(null), style: {
    cursor: chart.pick ? "pointer" : "crosshair", touchAction: "pan-y", // dragging up and down scrolls the page
  }});
  onPointer(holder, {move: point, drag: select, cancel: () => drawn.selection.replaceChildren(), leave: clear});
  onArrows(holder, {move, leave: clear, click: () => choose(drawn.X(place.x))});
  node.show = next => {
    chart = next;
    setData();
    update();
  };
  return node;

  function isShown({name}) {
    return !view.hidden.has(name);
  }

  function setData() {
    groups = chart.groups.map(given => {
      const group = {marks: [], ...given};
      group.lines = given.lines.map(line => ({panel: 0, width: 1.5, ...line, group}));
      return group;
    });
    const all = (label, names) => button(label, () => {
      view.hidden = new Set(names);
      for (const entry of legend.querySelectorAll("[aria-pressed]")) entry.setAttribute("aria-pressed", !names.length);
      update();
    });
    legend.replaceChildren(
      ...groups.length > MAX_GROUPS ? [all("show all", []), all("hide all", groups.map(({name}) => name))] : [],
      ...groups.flatMap(({lines}) => lines).length > 1 ? groups.map(legendEntry) : []);
  }

  function legendEntry(group) {
    const [on, off] = [group, null].map(shown => () => emphasize(shown)), {name} = group;
    group.swatch = swatch(GRAY); // until it is drawn
    return toggle([group.swatch, name], isOn => {
      view.hidden[isOn ? "delete" : "add"](name);
      update();
    }, isShown(group), {pointerenter: on, focus: on, pointerleave: off, blur: off});
  }

  function draw(width) {
    groups.forEach((group, i) => {
      const isScale = groups.length > MAX_GROUPS;
      group.color = chart.groups[i].color ?? (isScale ? lineColorAt(i / (groups.length - 1)) : LINE_COLORS[i]);
      if (group.swatch) group.swatch.style.borderBottomColor = group.color;
    });
    drawn = drawLines(chart, groups.filter(isShown), view, width);
    return drawn.node;
  }

  // Draw the current data, with the values below the pointer.
  function update() {
    holder.redraw();
    if (pointed) point(pointed);
  }

  // Show the values at the next x to the right or to the left, or of the next panel.
  function move(right, down) {
    place.panel = clamp(place.panel + down, 0, drawn.panels.length - 1);
    const panel = drawn.panels[place.panel];
    const drawnXs = panel.lines.flatMap(line => [...drawable(line, drawn.X.has, panel.Y.has)].map(i => line.x[i]));
    const xs = [...new Set(drawnXs)].filter(x => isInside(x, drawn.range)).sort((a, b) => a - b);
    if (!xs.length) return clear();
    const current = xs.findIndex(x => x >= place.x);
    place.x = xs[clamp((current < 0 ? xs.length - 1 : current) + right, 0, xs.length - 1)];
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
      node.setAttribute("opacity", group && group !== line.group && isShown(group) ? FAINT : 1);
    }
  }

  function clear() {
    pointed = null;
    drawn.cursor.replaceChildren();
    tooltip.hide();
  }

  // Show the values of a panel's lines at the x nearest to the pointer: all, or the nearest that fit.
  function point({x, y}) {
    const panel = drawn.panels.find(({bottom}) => y <= bottom) ?? drawn.panels.at(-1);
    const values = panel.lines.map(line => nearestPoint(line, panel, x)).filter(value => value);
    if (!values.length) return clear();
    pointed = {x, y};
    values.sort((a, b) => Math.abs(panel.Y(a.y) - y) - Math.abs(panel.Y(b.y) - y));
    const nearest = nearestTo(values.map(value => value.x), x), cursorX = drawn.X(nearest);
    drawn.cursor.replaceChildren(
      svgLine(cursorX, drawn.panels[0].top, cursorX, drawn.panels.at(-1).bottom, {opacity: 0.4}),
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
  function describe(values, count, nearest, {title}) {
    const rows = values.slice(0, count).sort((a, b) => b.y - a.y).map(value =>
      element("tr", {class: values.length > 1 && value === values[0] && "nearest"},
        element("td", {}, swatch(value.line.group.color), value.line.name),
        element("td", {}, valueText(value.y)),
        element("td", {}, value.x === nearest ? "" : `at ${valueText(value.x)}`)));
    const others = values.length - rows.length;
    return [
      element("div", {}, `${chart.x} ${valueText(nearest)}${title && `: ${title}`}`), element("table", {}, rows),
      ...(others ? [element("div", {}, `and ${others} more lines, farther from the pointer`)] : []),
    ];
  }

  // The x nearest to a pixel position.
  function nearestTo(xs, position) {
    const distance = x => Math.abs(drawn.X(x) - position);
    return xs.reduce((best, x) => distance(x) < distance(best) ? x : best);
  }

  function choose(position) {
    if (chart.pick) chart.pick.choose(nearestTo(chart.pick.values, position));
  }

  // Mark the dragged range of the x axis, and zoom into it when the drag ends. A click selects an x.
  function select(start, end, ended) {
    const {X, width, panels, selection} = drawn, {top} = panels[0];
    const [from, to] = [start.x, end.x].map(x => clamp(x, LEFT, width - RIGHT)).sort((a, b) => a - b);
    selection.replaceChildren();
    if (ended && Math.hypot(end.x - start.x, end.y - start.y) <= CLICK) return choose(end.x);
    if (to - from <= CLICK) return;
    if (ended) return zoom([X.invert(from), X.invert(to)]);
    selection.append(svg("rect", {
      x: from, y: top, width: to - from, height: panels.at(-1).bottom - top, opacity: FAINT,
    }));
  }

  // {line, x, y} of the line's drawn point nearest to a pixel position; undefined without any.
  function nearestPoint(line, panel, position) {
    let best, minDistance = Infinity;
    for (const i of drawable(line, drawn.X.has, panel.Y.has)) {
      const x = line.x[i], distance = Math.abs(drawn.X(x) - position);
      if (distance >= minDistance || !isInside(x, drawn.range)) continue;
      minDistance = distance;
      best = {line, x, y: line.y[i]};
    }
    return best;
  }
}

// The color of a line at a position, from 0 to 1, in a sequence of lines.
function lineColorAt(position) {
  return css(colorOf("sequential", FIRST_COLOR + (1 - FIRST_COLOR) * position));
}

// The indices of the points that can be drawn.
function* drawable({x, y}, hasX, hasY) {
  for (let i = 0; i < x.length; i++) {
    if (hasX(x[i]) && hasY(y[i])) yield i;
  }
}

// The scale of the x axis, with its range. Near the smallest positive x, a logarithmic axis has a place for 0.
function scaleOfX(xs, {range: chosen, logX}, ends) {
  const positive = xs.filter(x => x > 0), hasZero = xs.includes(0) && positive.length > 0;
  let range = extentOf(logX ? positive : xs, logX);
  const zero = logX && hasZero ? range[0] / 2 : 0;
  if (zero) range[0] = 0;
  if (chosen && chosen[1] > range[0] && chosen[0] < range[1]) {
    range = logX && chosen[0] <= 0 ? [range[0], chosen[1]] : chosen;
  }
  return {X: scaleOf(range, ends, logX, zero), range};
}

// The SVG of the lines of groups, and the geometry for pointer events.
function drawLines({title, x, panels: given, pick = {values: []}, current}, groups, view, width) {
  const lines = groups.flatMap(group => group.lines), xs = [...lines.flatMap(line => line.x), ...pick.values];
  const {X, range} = scaleOfX(xs, view, [LEFT, width - RIGHT]);
  const shared = {X, range, groups, pick, current, width, logY: view.logY};
  let bottom = 0;
  const panels = given.map((panel, i) => {
    const top = bottom + (panel.title ? 26 : 12);
    bottom = top + panel.height + 22;
    return drawPanel(panel, lines.filter(line => line.panel === i), top, shared);
  });
  const cursor = svg("g"), selection = svg("g"), names = groups.map(({name}) => name);
  const titles = given.map(panel => panel.title).filter(Boolean);
  const label = `${[title, titles.join(", ")].filter(Boolean).join(". ")} over ${x}. `
    + (names.length > MAX_GROUPS ? `Lines of ${names.length} entries of the legend.` : `Lines: ${names.join(", ")}.`);
  const node = svgDrawing(width, bottom + 20, label, panels.map(panel => panel.nodes), cursor, selection,
    svgText((LEFT + width - RIGHT) / 2, bottom + 12, x, {"text-anchor": "middle"}));
  return {node, width, X, range, panels, cursor, selection, paths: panels.flatMap(panel => panel.paths)};
}

function drawPanel(panel, lines, top, {X, range, groups, pick, current, width, logY}) {
  const bottom = top + panel.height, right = width - RIGHT, hasY = y => isOnScale(y, logY);
  const points = lines.flatMap(line => [...drawable(line, X.has, hasY)].map(i => [line.x[i], line.y[i]]));
  const inside = points.filter(([x]) => isInside(x, range));
  const extent = extentOf((inside.length ? inside : points).map(([, y]) => y), logY);
  const limits = panel.from_zero && !logY ? [0, extent[1] > 0 ? extent[1] : 1] : padded(extent, logY);
  const Y = scaleOf(limits, [bottom, top], logY);
  const grid = Y.ticks(Math.round(panel.height / 45)).map(y => [
    svgLine(LEFT, Y(y), right, Y(y), {stroke: PALE}),
    svgText(LEFT - 6, Y(y) + 4, tickText(y), {"text-anchor": "end", style: {fill: SOFT}})]);
  const below = X.ticks(Math.ceil((right - LEFT) / 80)).map(x => [
    svgLine(X(x), top, X(x), bottom, {stroke: PALE}),
    svgText(X(x), bottom + 15, tickText(x), {"text-anchor": "middle", style: {fill: SOFT}})]);
  const upright = (x, attributes, ...children) => X.has(x)
    && svg("line", {x1: X(x), x2: X(x), y1: top, y2: bottom, ...attributes}, ...children);
  const marks = groups.flatMap(({marks, color}) =>
    marks.map(({x, dash}) => upright(x, {stroke: color, "stroke-dasharray": DASHES[dash]})));
  const ticks = pick.tickTitle ? pick.values.map(x =>
    upright(x, {stroke: GRAY, "stroke-width": 1.5, y1: bottom - 6}, svg("title", {}, pick.tickTitle(x)))) : [];
  const cursor = current !== undefined && upright(current, {stroke: ORANGE, "stroke-dasharray": "3 3"});
  const paths = lines.map(line => ({line, node: drawLine(line, X, Y, bottom)}));
  const inner = svg("svg", { // clips its content
    x: LEFT - EDGE, y: top - EDGE, width: right - LEFT + 2 * EDGE, height: panel.height + 2 * EDGE,
    viewBox: `${LEFT - EDGE} ${top - EDGE} ${right - LEFT + 2 * EDGE} ${panel.height + 2 * EDGE}`,
  }, marks, ticks, cursor, paths.map(({node}) => node).reverse()); // the first lines are on top
  const title = svgText(LEFT, top - 8, panel.title, {style: {fontWeight: 600}});
  return {...panel, top, bottom, Y, lines, paths, nodes: [title, grid, below, inner]};
}

function drawLine(line, X, Y, bottom) {
  const parts = []; // without gaps
  let points = "", previous = null;
  for (const i of drawable(line, X.has, Y.has)) {
    const position = `${X(line.x[i]).toFixed(1)} ${Y(line.y[i]).toFixed(1)}`;
    if (i - 1 !== previous) parts.push([]);
    parts.at(-1).push(position);
    points += `M${position}h0`; // drawn as a dot by the round line cap
    previous = i;
  }
  const style = {fill: "none", stroke: line.group.color, "stroke-linejoin": "round", "stroke-linecap": "round"};
  const area = part => `M${part.join("L")}V${bottom}H${part[0].split(" ")[0]}Z`;
  return svg("g", {},
    svg("title", {}, line.name),
    line.fill && svg("path", {d: parts.map(area).join(""), fill: line.fill}),
    svg("path", {
      d: parts.map(part => `M${part.join("L")}`).join(""), "stroke-width": line.width,
      "stroke-dasharray": DASHES[line.dash], ...style,
    }),
    (line.points || line.x.length === 1) && svg("path", {d: points, "stroke-width": line.width + 3, ...style}));
}
