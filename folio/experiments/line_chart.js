// Line charts of reports and of the viewer, in panels that share their x axis. A part can be enlarged, axes can be
// logarithmic, lines can be hidden and smoothed; the pointer and keys show values. Names are at the ends of lines.
//
// A chart is {name, title, x (name of the axis, or of several), panels, groups}: see charts.py, also for the defaults
// of a line. With several axes, a group has a column for each, and the x of its lines and marks are indices of them.
// Optional: logX (whether the x axis is logarithmic at first), the color of a group, the fill below a line, the marked
// `current` x, the maximum width in pixels, and `pick` for x that can be selected: {values, choose(x), tickTitle(x) (of
// marks at the values)}.

const DASHES = {dashed: "7 4", dotted: "1.5 4"};
const FAINT = 0.13; // opacity of lines that are not selected
const FIRST_COLOR = 0.5; // of a line, in the sequential palette; paler colors are too close to that of the paper
const MAX_GROUPS = 8; // with more groups, colors are from the palette, and the legend can be searched
const LEFT = 56, RIGHT = 18, EDGE = 4; // margins in pixels; EDGE avoids clipping lines at the edge of a panel
const LABEL_LINE = 14; // pixels between the names at the ends of lines
const LABEL_GAP = 22; // between the panel and the names, for the connecting lines
const MAX_LABEL = 22; // characters of a name; longer ones are shortened in the middle
const MIN_LABELED_WIDTH = 560, MIN_LABELED_HEIGHT = 180; // of charts and of panels with names at the ends of lines
const CLIPPED_SHARE = 0.05; // of the points of a line, the highest, which do not decide the y axis of a clipped panel
const SMOOTHINGS = [0, 0.005, 0.01, 0.02, 0.05, 0.1]; // half-lives of the moving average, relative to the x axis

const chartViews = new Map(); // by name of the chart: what the reader has chosen, also after it is drawn from new data

// Fill an element with the legend, the buttons, and the drawing, and return it. Its show(chart) replaces the data.
function lineChart(chart, node = div()) {
  if (!chartViews.has(chart.name)) {
    chartViews.set(chart.name, {
      range: null, axis: 0, logX: Boolean(chart.logX), logY: false, smoothing: 0, hidden: new Set(), query: "",
    });
  }
  node.style.maxWidth = chart.width ? `${chart.width}px` : "";
  const view = chartViews.get(chart.name), place = {x: chart.current ?? -Infinity, panel: 0}; // of the keys
  let axes = [chart.x].flat(); // their names
  let groups, drawn; // with defaults; what is on the screen, as drawLines returns it
  let pointed = null; // {x, y}: the shown x, and the pointer's y in the drawing, if values are shown

  const entries = element("div", {class: "legend", role: "group", "aria-label": "lines"}), picker = div("picker");
  const reset = button("reset zoom", () => zoom(null), {disabled: !view.range});
  const logarithmic = (label, key) => toggle(label, isOn => {
    view[key] = isOn;
    update();
  }, view[key]);
  const isSmooth = chart.groups.some(({lines}) => lines.some(({smooth}) => smooth));
  const smoothings = SMOOTHINGS.map(share => [share, share ? `${100 * share}%` : "off"]);
  const axis = axes.length > 1 && select("x:", axes.map((name, i) => [i, name]), view.axis, i => {
      view.axis = Number(i);
      setData();
      zoom(null);
    });
  const buttons = div("buttons", axis, isSmooth && select("smoothing:", smoothings, view.smoothing, share => {
      view.smoothing = Number(share);
      setData();
      update();
    }, {title: "moving average; after this share of the x axis, the weight of a point is halved"}),
    logarithmic("log x", "logX"), logarithmic("log y", "logY"), reset);
  build(node, {class: "line-chart"}, [element("div", {}, element("div", {}, picker, entries), buttons)]);
  setData();
  setLegend();
  const holder = addDrawing(node, draw);
  const tooltip = tooltipOf(node, holder);
  build(holder, {"aria-label": chart.title, dblclick: () => zoom(null), style: {
    cursor: chart.pick ? "pointer" : "crosshair", touchAction: "pan-y", // dragging up and down scrolls the page
  }});
  onPointer(holder, {move: point, drag: mark, cancel: () => drawn.selection.replaceChildren(), leave: clear});
  onArrows(holder, {move, leave: clear, click: () => choose(drawn.X(place.x))});
  node.show = next => {
    const names = ({groups}) => groups.map(({name}) => name).join("\n"), isNew = names(next) !== names(chart);
    chart = next;
    setData();
    if (isNew || !entries.firstChild) setLegend();
    axes = [chart.x].flat();
    if (axis) axes.forEach((name, i) => axis.lastChild.options[i].textContent = name);
    update();
  };
  return node;

  function isShown({name}) {
    return !view.hidden.has(name);
  }

  // Fill in defaults, the values of the chosen x axis, and smoothed lines, whose given values are in `raw`.
  function setData() {
    groups = chart.groups.map(given => {
      const column = given.columns?.[view.axis], place = x => column ? column[x] : x;
      const group = {...given, marks: (given.marks ?? []).map(mark => ({...mark, x: place(mark.x)}))};
      group.lines = given.lines.map(line => ({panel: 0, width: 1.5, ...line, x: line.x.map(place), group}));
      return group;
    });
    const all = groups.flatMap(({lines}) => lines);
    const [low, high] = extentOf(all.flatMap(({x}) => x.filter(Number.isFinite)));
    if (!view.smoothing) return;
    for (const line of all.filter(({smooth}) => smooth)) {
      line.raw = line.y;
      line.y = smoothed(line, view.smoothing * (high - low));
    }
  }

  // The entries of the legend, and for many groups a search and buttons that show and hide them.
  function setLegend() {
    const isMany = groups.length > MAX_GROUPS;
    const nodes = groups.flatMap(({lines}) => lines).length > 1 ? groups.map((_, i) => legendEntry(i)) : [];
    entries.replaceChildren(...nodes);
    if (!isMany) return picker.replaceChildren();
    const isFound = ({name, about = ""}) => view.query.toLowerCase().split(/\s+/).every(word =>
      `${name} ${about}`.toLowerCase().includes(word));
    const setAll = isOn => () => {
      groups.forEach((group, i) => {
        const shown = isOn(isFound(group), isShown(group));
        view.hidden[shown ? "delete" : "add"](group.name);
        nodes[i].setAttribute("aria-pressed", shown);
      });
      update();
    };
    const count = element("span", {role: "status"});
    const show = button("", setAll((found, shown) => found || shown));
    const hide = button("", setAll((found, shown) => !found && shown));
    const only = button("only these", setAll(found => found));
    const input = element("input", {
      type: "search", placeholder: "search", "aria-label": "search lines", value: view.query, input: () => filter(),
    });
    picker.replaceChildren(input, show, hide, only, count);
    filter();

    function filter() {
      view.query = input.value;
      const found = groups.map(isFound), isFiltered = !found.every(Boolean);
      nodes.forEach((entry, i) => entry.hidden = !found[i]);
      show.textContent = isFiltered ? "show these" : "show all";
      hide.textContent = isFiltered ? "hide these" : "hide all";
      only.hidden = !isFiltered;
      count.textContent = isFiltered ? `${found.filter(Boolean).length} of ${groups.length} found` : "";
    }
  }

  function legendEntry(i) {
    const [on, off] = [true, false].map(isOn => () => emphasize(isOn ? groups[i] : null)), {name, about} = groups[i];
    return toggle([swatch(GRAY), name], isOn => { // gray until it is drawn
      view.hidden[isOn ? "delete" : "add"](name);
      update();
    }, isShown(groups[i]), {title: about, pointerenter: on, focus: on, pointerleave: off, blur: off});
  }

  function draw(width) {
    groups.forEach((group, i) => {
      group.color = chart.groups[i].color ?? groupColor(i, groups.length);
      const entry = entries.children[i];
      if (entry) entry.firstChild.style.borderBottomColor = group.color;
    });
    drawn = drawLines({...chart, x: axes[view.axis]}, groups.filter(isShown), view, width);
    for (const {node, line} of drawn.paths.filter(({isLabel}) => isLabel)) {
      build(node, {pointerenter: () => emphasize(line.group), pointerleave: () => emphasize(null)});
    }
    return drawn.node;
  }

  // Draw the current data, with the values below the pointer.
  function update() {
    holder.redraw();
    if (pointed) point({x: drawn.X(pointed.x), y: pointed.y});
    node.dispatchEvent(new CustomEvent("shownlines", {bubbles: true}));
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
    values.sort((a, b) => Math.abs(panel.Y(a.y) - y) - Math.abs(panel.Y(b.y) - y));
    const nearest = nearestTo(values.map(value => value.x), x), cursorX = drawn.X(nearest);
    pointed = {x: nearest, y};
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
        element("td", {}, valueText(value.given)),
        element("td", {}, [value.x !== nearest && `at ${valueText(value.x)}`,
          value.line.raw && `smoothed ${valueText(value.y)}`].filter(Boolean).join(", "))));
    const others = values.length - rows.length;
    return [
      element("div", {}, `${axes[view.axis]} ${valueText(nearest)}${title && `: ${title}`}`),
      element("table", {}, rows),
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
  function mark(start, end, ended) {
    const {X, right, panels, selection} = drawn, {top} = panels[0];
    const [from, to] = [start.x, end.x].map(x => clamp(x, LEFT, right)).sort((a, b) => a - b);
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
      best = {line, x, y: line.y[i], given: (line.raw ?? line.y)[i]};
    }
    return best;
  }
}

function groupColor(i, count) {
  return count > MAX_GROUPS ? lineColorAt(i / (count - 1)) : LINE_COLORS[i];
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
  xs = xs.filter(Number.isFinite);
  const positive = xs.filter(x => x > 0), hasZero = xs.includes(0) && positive.length > 0;
  let range = extentOf(logX ? positive : xs, logX);
  const zero = logX && hasZero ? range[0] / 2 : 0;
  if (zero) range[0] = 0;
  if (chosen && chosen[1] > range[0] && chosen[0] < range[1]) {
    range = logX && chosen[0] <= 0 ? [range[0], chosen[1]] : chosen;
  }
  return {X: scaleOf(range, ends, logX, zero), range};
}

// A moving average of a line's values. After `halfLife` on the x axis, the weight of a point is halved.
function smoothed({x, y}, halfLife) {
  let sum = 0, weight = 0, last = -Infinity;
  return y.map((value, i) => {
    if (!Number.isFinite(value) || !Number.isFinite(x[i])) return null;
    const decay = 0.5 ** ((x[i] - last) / halfLife);
    [sum, weight, last] = [sum * decay + value, weight * decay + 1, x[i]];
    return sum / weight;
  });
}

// The SVG of the lines of groups, and the geometry for pointer events.
function drawLines({title, x, panels: given, pick = {values: []}, current, groups: all}, groups, view, width) {
  const lines = groups.flatMap(group => group.lines), xs = [...lines.flatMap(line => line.x), ...pick.values];
  const isLabeled = all.length > 1 && groups.length && width >= MIN_LABELED_WIDTH
    && given.some(panel => panel.height >= MIN_LABELED_HEIGHT);
  const longest = isLabeled ? Math.max(...groups.map(({name}) => Math.min(MAX_LABEL, name.length))) : 0;
  const right = width - (isLabeled ? LABEL_GAP + TEXT_WIDTH * longest : RIGHT);
  const {X, range} = scaleOfX(xs, view, [LEFT, right]);
  const shared = {X, range, groups, pick, current, right, isLabeled, logY: view.logY};
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
    svgText((LEFT + right) / 2, bottom + 12, x, {"text-anchor": "middle"}));
  return {node, right, X, range, panels, cursor, selection, paths: panels.flatMap(panel => panel.paths)};
}

// The range of the y axis. In a clipped panel, neither the first point of a line (before training, it is far above all
// others) nor the highest share of its points decides it. Zoomed into these points, it has them.
function limitsOf(panel, lines, {X, range, logY}) {
  const hasY = y => isOnScale(y, logY);
  const valuesOf = ({x, y, raw = y}, isIncluded) =>
    [...drawable({x, y: raw}, X.has, hasY)].filter(i => isIncluded(x[i], i)).map(i => raw[i]);
  const isIn = x => isInside(x, range), isLater = (x, i) => i > 0 && isIn(x);
  const all = lines.flatMap(line => valuesOf(line, isIn));
  const later = panel.clip ? lines.map(line => valuesOf(line, isLater)) : [];
  const kept = later.flatMap(ys => ys.sort((a, b) => a - b).slice(0, Math.ceil((1 - CLIPPED_SHARE) * ys.length)));
  const ys = kept.length ? kept : all.length ? all : lines.flatMap(line => valuesOf(line, () => true));
  const extent = extentOf(ys, logY);
  const limits = panel.from_zero && !logY ? [0, extent[1] > 0 ? extent[1] : 1] : padded(extent, logY);
  const highest = Math.max(...all);
  return {limits, above: highest > limits[1] ? highest : null};
}

function drawPanel(panel, lines, top, shared) {
  const {X, groups, pick, current, right, isLabeled, logY} = shared, bottom = top + panel.height;
  const {limits, above} = limitsOf(panel, lines, shared);
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
  const paths = lines.map(line => ({line, node: drawLine(line, X, Y, bottom, panel.clip)}));
  const inner = svg("svg", { // clips its content
    x: LEFT - EDGE, y: top - EDGE, width: right - LEFT + 2 * EDGE, height: panel.height + 2 * EDGE,
    viewBox: `${LEFT - EDGE} ${top - EDGE} ${right - LEFT + 2 * EDGE} ${panel.height + 2 * EDGE}`,
  }, marks, ticks, cursor, paths.map(({node}) => node).reverse()); // the first lines are on top
  const title = svgText(LEFT, top - 8, [panel.title, above !== null && svg("tspan", {
    dx: panel.title ? 12 : 0, style: {fontWeight: 400, fill: SOFT},
  }, `↑ up to ${tickText(Number(above.toPrecision(4)))}`)], {style: {fontWeight: 600}});
  const hasLabels = isLabeled && panel.height >= MIN_LABELED_HEIGHT;
  const labels = hasLabels ? drawLabels(groups, lines, top, bottom, Y, shared) : [];
  return {
    ...panel, top, bottom, Y, lines, paths: [...paths, ...labels],
    nodes: [title, grid, below, inner, labels.map(({node}) => node)],
  };
}

// The names of groups, right of the ends of their lines, as entries of `paths`. As many as fit, the first ones.
function drawLabels(groups, lines, top, bottom, Y, {X, range, right}) {
  const ends = groups.flatMap(group => {
    const own = lines.filter(line => line.group === group), line = own.find(({points}) => points) ?? own[0];
    const i = line ? [...drawable(line, X.has, Y.has)].findLast(i => isInside(line.x[i], range)) : undefined;
    return i === undefined ? [] : [{group, x: X(line.x[i]), y: clamp(Y(line.y[i]), top, bottom)}];
  }).slice(0, Math.floor((bottom - top) / LABEL_LINE) + 1).sort((a, b) => a.y - b.y);
  const places = spread(ends.map(({y}) => y), LABEL_LINE, [top, bottom]);
  return ends.map(({group, x, y}, i) => {
    const {name, color} = group, half = Math.floor(MAX_LABEL / 2);
    const shown = name.length > MAX_LABEL ? `${name.slice(0, half)}…${name.slice(1 - half)}` : name;
    const connect = (d, style) => svg("path", {d, fill: "none", stroke: color, ...style});
    return {line: {group}, isLabel: true, node: svg("g", {testid: "line-name"},
      right - x > EDGE && connect(`M${x + 3} ${y}H${right}`, {"stroke-dasharray": "1 4", opacity: 0.6}),
      connect(`M${right + 2} ${y}L${right + LABEL_GAP - 10} ${places[i]}h6`, {"stroke-width": 1.5}),
      svgText(right + LABEL_GAP, places[i] + 4, [shown, shown !== name && svg("title", {}, name)]))};
  });
}

// Positions near ascending ones, inside a range, and at least this far from each other. Positions that are too close
// are centered around their mean.
function spread(positions, distance, [low, high]) {
  const blocks = []; // {sum of the wished first positions, count}
  const start = ({sum, count}) => clamp(sum / count, low, Math.max(low, high - (count - 1) * distance));
  for (const position of positions) {
    blocks.push({sum: position, count: 1});
    while (blocks.length > 1) {
      const [before, last] = blocks.slice(-2);
      if (start(before) + before.count * distance <= start(last) + 1e-9) break;
      blocks.splice(-2, 2, {
        sum: before.sum + last.sum - last.count * before.count * distance, count: before.count + last.count,
      });
    }
  }
  return blocks.flatMap(block => Array.from({length: block.count}, (_, i) => start(block) + i * distance));
}

// The connected points of a line, as positions in the drawing.
function partsOf(x, y, X, Y) {
  const parts = [];
  let previous = null;
  for (const i of drawable({x, y}, X.has, Y.has)) {
    if (i - 1 !== previous) parts.push([]);
    parts.at(-1).push(`${X(x[i]).toFixed(1)} ${Y(y[i]).toFixed(1)}`);
    previous = i;
  }
  return parts;
}

// In a clipped panel, markers are connected from 0 to the next by a thin dashed line: nothing was measured in between.
function drawLine(line, X, Y, bottom, isClipped) {
  const parts = partsOf(line.x, line.y, X, Y), dots = parts.flat();
  const hasStart = isClipped && line.points && line.x[0] === 0 && parts[0]?.length > 1;
  const start = hasStart && parts[0].slice(0, 2);
  if (hasStart) parts[0].shift();
  const stroke = {fill: "none", stroke: line.group.color, "stroke-linejoin": "round", "stroke-linecap": "round"};
  const area = part => `M${part.join("L")}V${bottom}H${part[0].split(" ")[0]}Z`;
  const curve = (parts, attributes) =>
    svg("path", {d: parts.map(part => `M${part.join("L")}`).join(""), ...stroke, ...attributes});
  return svg("g", {},
    svg("title", {}, line.name),
    line.fill && svg("path", {d: parts.map(area).join(""), fill: line.fill}),
    line.raw && curve(partsOf(line.x, line.raw, X, Y), {"stroke-width": line.width, opacity: 0.3}),
    start && curve([start], {"stroke-width": 1, "stroke-dasharray": "3 4"}),
    curve(parts, {"stroke-width": line.raw ? line.width + 0.8 : line.width, "stroke-dasharray": DASHES[line.dash]}),
    (line.points || line.x.length === 1) && svg("path", { // dots by the round line cap
      d: dots.map(position => `M${position}h0`).join(""), "stroke-width": line.width + 3, ...stroke,
    }));
}
