// The camera over the sheet of the machine: {x, y, zoom} puts a place of the sheet into the middle of the free part of
// the stage, with `zoom` pixels per unit.

const MAX_ZOOM = 60;
const CURVE = 1.3; // how far out the camera zooms on its way
const FLIGHT = 1300; // milliseconds at most

// The camera that shows a rectangle in a stage. stage: {width, height, insets: [top, right, bottom, left]}.
function fitCamera({x, y, width, height}, stage) {
  const [freeWidth, freeHeight] = freeSize(stage);
  const zoom = clamp(Math.min(freeWidth / width, freeHeight / height), 0.001, MAX_ZOOM);
  return {x: x + width / 2, y: y + height / 2, zoom};
}

function freeSize({width, height, insets: [top, right, bottom, left]}) {
  return [Math.max(40, width - left - right), Math.max(40, height - top - bottom)];
}

// Functions from the sheet to pixels of the stage, and back.
function projection({x, y, zoom}, stage) {
  const [width, height] = freeSize(stage), [top, , , left] = stage.insets;
  const centerX = left + width / 2, centerY = top + height / 2;
  return {
    zoom,
    toX: u => (u - x) * zoom + centerX, toY: v => (v - y) * zoom + centerY,
    fromX: px => (px - centerX) / zoom + x, fromY: px => (px - centerY) / zoom + y,
  };
}

// A smooth way between two cameras, as a function of t from 0 to 1, which zooms out and in again if they are far apart
// (van Wijk and Nuij 2003). width: of the stage, in pixels.
function flight(from, to, width) {
  const w0 = width / from.zoom, w1 = width / to.zoom, dx = to.x - from.x, dy = to.y - from.y;
  const distance = Math.hypot(dx, dy), rho2 = CURVE * CURVE;
  const at = (share, w) => ({x: from.x + share * dx, y: from.y + share * dy, zoom: width / w});
  if (distance < 1e-6 * w0) return t => t < 1 ? at(0, w0 * (w1 / w0) ** t) : to;
  const b = (w, sign) => (w1 * w1 - w0 * w0 + sign * rho2 * rho2 * distance * distance) / (2 * w * rho2 * distance);
  const r = x => Math.log(Math.sqrt(x * x + 1) - x), r0 = r(b(w0, 1)), r1 = r(b(w1, -1));
  const length = (r1 - r0) / CURVE;
  return t => {
    if (t >= 1) return to;
    const s = CURVE * t * length + r0, u = w0 / rho2 * (Math.cosh(r0) * Math.tanh(s) - Math.sinh(r0));
    return at(u / distance, w0 * Math.cosh(r0) / Math.cosh(s));
  };
}

// Drag, wheel, and pinch on a canvas move its camera. take(): stops its motion and returns {camera, stage}.
// move(camera): called with the new one. click(x, y): a press without a drag.
function steerCamera(canvas, take, move, click) {
  const fingers = new Map(); // by id: last place
  let moved = 0; // pixels since the press
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const zoomAt = (px, py, factor) => {
    const {camera, stage} = take(), {fromX, fromY} = projection(camera, stage);
    const zoom = clamp(camera.zoom * factor, 0.02, MAX_ZOOM), share = 1 - camera.zoom / zoom;
    move({x: camera.x + (fromX(px) - camera.x) * share, y: camera.y + (fromY(py) - camera.y) * share, zoom});
  };
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoomAt(...place(event), Math.exp(-clamp(event.deltaY, -100, 100) / 250));
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, place(event));
    if (fingers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", event => {
    const before = fingers.get(event.pointerId), now = place(event);
    if (!before) return;
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const distance = Math.hypot(now[0] - before[0], now[1] - before[1]);
    moved += distance;
    fingers.set(event.pointerId, now);
    if (moved < 4) return;
    const {camera} = take(), share = 1 / (others.length + 1);
    move({...camera, x: camera.x - (now[0] - before[0]) * share / camera.zoom,
      y: camera.y - (now[1] - before[1]) * share / camera.zoom});
    if (!others.length) return;
    const [ox, oy] = others[0], size = ([x, y]) => Math.max(1, Math.hypot(x - ox, y - oy));
    zoomAt((now[0] + ox) / 2, (now[1] + oy) / 2, size(now) / size(before));
  });
  const end = event => {
    const isLast = fingers.delete(event.pointerId) && !fingers.size;
    if (isLast && event.type === "pointerup" && moved < 4) click(...place(event));
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}
