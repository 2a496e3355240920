// Parts of drawings that can be pointed at: SVG elements, scales with ticks, pointers, and values in a box.
//
// Names in the data of a page are untrusted, so they only become text nodes and attributes, never HTML. Drawings are
// SVGs without rules of a style sheet, so they look the same in a file, in which the variables are replaced.

const MIN_WIDTH = 200; // pixels, of a drawing; narrower pages scroll
const TEXT_WIDTH = 7.3; // approximate pixels per character
const CLICK = 5; // maximum pixels of movement in a click

// --- elements --------------------------------------------------------------------------------------------------------

function button(label, click, attributes = {}) {
  return element("button", {type: "button", click, ...attributes}, label);
}

// A toggle button, which calls set(isOn).
function toggle(label, set, isOn, attributes = {}) {
  return button(label, ({currentTarget: node}) => {
    const next = node.getAttribute("aria-pressed") !== "true";
    node.setAttribute("aria-pressed", next);
    set(next);
  }, {"aria-pressed": String(isOn), ...attributes});
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

function svgText(x, y, content, attributes = {}) {
  return svg("text", {x, y, fill: "currentColor", ...attributes}, content);
}

function svgLine(x1, y1, x2, y2, attributes = {}) {
  return svg("line", {x1, y1, x2, y2, stroke: "currentColor", ...attributes});
}

function svgDrawing(width, height, label, ...children) {
  return svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, color: "var(--ink)",
    "font-family": "var(--mono)", "font-size": 12,
  }, children);
}

// Add an element with a drawing to another one, which is as wide. draw(width) returns the SVG; redraw() of the element
// draws it again.
function addDrawing(outer, draw) {
  const holder = div("drawing");
  let width;
  holder.redraw = () => {
    width = holder.clientWidth;
    holder.replaceChildren(draw(Math.max(width, MIN_WIDTH)));
  };
  outer.append(holder);
  holder.redraw();
  new ResizeObserver(() => holder.clientWidth !== width && holder.redraw()).observe(holder);
  return holder;
}

onNewPalette(() => document.querySelectorAll(".drawing").forEach(holder => holder.redraw()));

function swatch(color) {
  return element("i", {style: {borderBottom: `6px solid ${color}`}});
}

// --- scales ----------------------------------------------------------------------------------------------------------

// Return a function from numbers to positions, with its inverse. log: logarithmic scale, on which 0 has the position of
// the number `zero`, if that is given, and other numbers up to 0 have none.
function scaleOf([low, high], [from, to], log = false, zero = 0) {
  const warp = log ? x => Math.log10(x || zero) : x => x;
  const unwarp = log ? x => 10 ** x < 1.01 * zero ? 0 : 10 ** x : x => x;
  const start = warp(low), rate = (to - from) / (warp(high) - start);
  const scale = x => from + rate * (warp(x) - start);
  scale.invert = position => unwarp(start + (position - from) / rate);
  scale.has = x => isOnScale(x, log, zero);
  scale.ticks = count => !log ? linearTicks(low, high, count)
    : low ? logTicks(low, high, count) : [0, ...logTicks(2 * zero, high, count)];
  return scale;
}

function isOnScale(x, log, zero = 0) {
  return Number.isFinite(x) && (!log || x > 0 || x === 0 && zero > 0);
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
  if (decades <= 0) return [];
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

function isInside(x, [low, high]) {
  return x >= low && x <= high;
}

// A short number for an axis: 20k, 0.05, 3e-4.
function tickText(x) {
  const size = Math.abs(x);
  const [unit, letter] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([unit]) =>
    size >= unit && Number((x / unit).toFixed(2)) === x / unit) ?? [1, ""];
  const text = size && size < 1e-3 ? x.toExponential()
    : (x / unit).toLocaleString("en-US", {maximumFractionDigits: 9}) + letter;
  return text.replace(/^-/, "−");
}

// A number with six significant digits, or an integer with all digits.
function valueText(x) {
  const text = Number.isInteger(x) ? x.toLocaleString("en-US")
    : Math.abs(x) < 1e-4 ? String(Number(x.toPrecision(6))) : x.toLocaleString("en-US", {maximumSignificantDigits: 6});
  return text.replace(/^-/, "−");
}

// --- pointers --------------------------------------------------------------------------------------------------------

// Call move(point) for a mouse over the holder or a touch, drag(start, point, hasEnded) between press and release,
// cancel(start) instead of the end if the finger scrolls the page, and leave(). A point is {x, y} in the drawing.
function onPointer(holder, {move, drag, cancel, leave}) {
  let start = null;
  const pointOf = event => {
    const {left, top} = holder.firstChild.getBoundingClientRect();
    return {x: event.clientX - left, y: event.clientY - top};
  };
  build(holder, {
    pointerdown(event) {
      if (event.button) return;
      start = pointOf(event);
      holder.setPointerCapture(event.pointerId);
      move(start);
    },
    pointermove(event) {
      move(pointOf(event));
      if (start) drag(start, pointOf(event), false);
    },
    pointerup(event) {
      const pressed = start;
      start = null;
      if (pressed) drag(pressed, pointOf(event), true);
    },
    pointercancel() {
      if (start) cancel(start);
      start = null;
    },
    pointerleave: event => event.pointerType !== "touch" && leave(),
  });
  holder.leave = leave;
}

// The values at a touched point stay until the next touch.
document.addEventListener("pointerdown", ({target}) => document.querySelectorAll(".drawing").forEach(holder =>
  holder.contains(target) || holder.leave?.()));

// A box of values near the pointer, in an element around a drawing. show(x, y, nodes): coordinates in the drawing.
function tooltipOf(outer, holder) {
  const box = element("div", {class: "values", "aria-live": "polite", hidden: true});
  outer.append(box);
  return {
    show(x, y, ...nodes) {
      box.replaceChildren(...nodes);
      box.hidden = false;
      const {width, top} = outer.getBoundingClientRect(), inner = holder.getBoundingClientRect();
      const left = x - holder.scrollLeft, fitsRight = left + 16 + box.offsetWidth <= width;
      box.style.left = `${Math.max(0, fitsRight ? left + 16 : left - 16 - box.offsetWidth)}px`;
      const maxTop = innerHeight - top - box.offsetHeight - 4; // inside the window
      box.style.top = `${Math.max(Math.min(inner.top - top + y + 12, maxTop), 4 - top)}px`;
    },
    hide() {
      box.hidden = true;
    },
    isTooHigh: () => box.offsetHeight > 0.5 * innerHeight,
  };
}
