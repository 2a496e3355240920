// The stage of the machine: the canvas with the sheet, the motion of its camera, and reading it with pointer and keys.

const OVERTURE = 6000; // milliseconds of the first pass
const INSETS = {wide: [38, 104, 10, 96], narrow: [30, 62, 8, 58]}; // around the sheet: top, right, bottom, left

// The canvas stays when the page is drawn again, so that the camera can move from one place to the next.
//
// context, sheet, scene: what it shows; scene: what the stop's show returned. place: of the story; a new one moves the
// camera. stage: its size (see stageSize). start: when the camera left, in milliseconds; null: nothing moves. path: of
// the camera. isOverture: whether the first pass is played, not an act. frame: the requested animation frame. cursor:
// [tile, index]. isFree: whether the reader has moved the camera. isWide: see isWide, when the sheet was made.
const machine = {
  canvas: null, context: null, sheet: null, scene: null, place: "", stage: null, camera: null, path: null, start: null,
  isOverture: false, frame: 0, cursor: null, isFree: false, isWide: true,
};

const canMove = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;

// --- the canvas ------------------------------------------------------------------------------------------------------

function canvasOf(context) {
  if (!machine.canvas) {
    machine.canvas = element("canvas", {testid: "machine", tabindex: 0, role: "application", dblclick: lookCloser,
      pointermove: pointAt, pointerleave: () => readOut(""), "aria-describedby": "machine-readout"});
    steerCamera(machine.canvas, takeCamera, setCamera, clickAt);
    handleKeys(machine.canvas, canvasKey);
    new ResizeObserver(() => resizeStage()).observe(machine.canvas);
  }
  machine.canvas.setAttribute("aria-label", `The pass of ${tokenAt(context, context.token)} through the model. Arrow `
    + "keys move along the wires: up and down through the model, left and right between tokens.");
  Object.assign(machine, {context, isWide: isWide()});
  return machine.canvas;
}

// A button of the stage. On phones, it has only its symbol.
function stageButton(symbol, title, click, testid) {
  return element("button", {click, title, "aria-label": title, testid}, symbol, element("span", {}, ` ${title}`));
}

// Show the whole sheet or, if the camera has left the stop, what the stop is about.
function showWhole() {
  if (machine.isFree) recenter();
  else flyTo(wholeSheet(machine.sheet), true);
}

// Let the button of showWhole say what it does now.
function updateWholeButton() {
  const button = document.querySelector("[data-testid=machine-whole]");
  const [symbol, title] = machine.isFree ? ["↩", "Back to the stop"] : ["⤢", "Whole sheet"];
  if (!button || button.title === title) return;
  build(button, {title, "aria-label": title});
  button.replaceChildren(...stageButton(symbol, title).childNodes);
}

// The stage in pixels. The desk takes its lower part while an act is shown.
function stageSize() {
  const {clientWidth: width, clientHeight: height} = machine.canvas, narrow = width < 560;
  const [top, right, bottom, left] = INSETS[narrow ? "narrow" : "wide"], desk = deskHeight();
  return {width, height, insets: [top, right, desk ? desk + 4 : bottom, left]};
}

function deskHeight() {
  const {scene, isFree, canvas} = machine;
  return scene?.act && !isFree ? Math.min(scene.act.height, 0.62 * canvas.clientHeight) : 0;
}

// --- motion ----------------------------------------------------------------------------------------------------------

// Show a stop. Another place moves the camera and plays the act; the same place with other numbers shows its end.
function showScene(sheet, scene, place) {
  const isNew = place !== machine.place, isFirst = !machine.place;
  Object.assign(machine, {sheet, scene, place, cursor: null});
  if (isNew) machine.isFree = false;
  machine.stage = stageSize();
  if (!machine.stage.width) return;
  resizeCanvas();
  cacheWholeSheet();
  if (!isNew) {
    endMotion();
    if (!machine.isFree) machine.camera = fitCamera(scene.focus, machine.stage);
    return renderStage();
  }
  if (isFirst) machine.camera = fitCamera(scene.isOverture ? scene.focus : wholeSheet(sheet), machine.stage);
  flyTo(scene.focus, false, scene.isOverture && isFirst);
}

// Move the camera to a rectangle, and then play the act or, at the beginning, the first pass.
function flyTo(focus, isFree, isOverture = false) {
  machine.isFree = isFree;
  machine.stage = stageSize();
  const target = fitCamera(focus, machine.stage);
  cacheWholeSheet();
  machine.path = flight(machine.camera, target, machine.stage.width);
  machine.isOverture = isOverture;
  machine.start = performance.now();
  if (!canMove()) endMotion();
  else tick();
}

function recenter() {
  if (machine.scene) flyTo(machine.scene.focus, false);
}

function replay() {
  endSequence();
  if (machine.scene) flyTo(machine.scene.focus, false, Boolean(machine.scene.isOverture));
}

// The reader takes the camera where it is. The desk of an act goes, and the picture stays in its place.
function takeCamera() {
  const {camera} = machine;
  endMotion();
  if (!machine.isFree) {
    const before = projection(camera, machine.stage);
    machine.isFree = true;
    machine.stage = stageSize();
    const after = projection(camera, machine.stage);
    machine.camera = {...camera, x: camera.x + before.fromX(0) - after.fromX(0),
      y: camera.y + before.fromY(0) - after.fromY(0)};
  }
  return machine;
}

function zoomBy(factor) {
  const {camera} = takeCamera();
  setCamera({...camera, zoom: clamp(camera.zoom * factor, 0.02, MAX_ZOOM)});
}

function setCamera(camera) {
  machine.camera = camera;
  machine.stage = stageSize();
  requestRender();
}

// End all motion: the camera is at its target, and the act at its end.
function endMotion() {
  if (machine.start === null) return;
  machine.camera = machine.path(1);
  machine.start = null;
  renderStage();
}

const playTime = () => machine.isOverture ? OVERTURE : machine.scene.act?.duration ?? 0;

function tick() {
  cancelAnimationFrame(machine.frame);
  machine.frame = requestAnimationFrame(now => {
    if (machine.start === null) return;
    if (!machine.canvas.isConnected) return endMotion(); // another view is shown
    const elapsed = now - machine.start;
    machine.camera = machine.path(clamp(elapsed / FLIGHT, 0, 1));
    if (elapsed >= FLIGHT + (machine.isFree ? 0 : playTime())) return endMotion();
    renderStage(elapsed);
    tick();
  });
}

// --- rendering -------------------------------------------------------------------------------------------------------

function requestRender() {
  if (machine.start !== null) return; // the next tick renders
  cancelAnimationFrame(machine.frame);
  machine.frame = requestAnimationFrame(() => renderStage());
}

const pixelRatio = () => Math.min(2, window.devicePixelRatio || 1);

function resizeCanvas() {
  const {canvas, stage: {width, height}} = machine, ratio = pixelRatio();
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
}

function resizeStage() {
  if (!machine.sheet || !machine.canvas.isConnected || !machine.canvas.clientWidth) return;
  const {width, height} = machine.stage ?? {};
  machine.stage = stageSize();
  if (machine.stage.width === width && machine.stage.height === height) return;
  if (machine.isWide !== isWide()) draw(); // with another number of columns
  resizeCanvas();
  cacheWholeSheet();
  endMotion();
  if (!machine.isFree) machine.camera = fitCamera(machine.scene.focus, machine.stage);
  renderStage();
}

function cacheWholeSheet() {
  const {sheet, stage} = machine;
  cacheOverview(sheet, fitCamera(wholeSheet(sheet), stage).zoom, pixelRatio());
}

// Draw the stage. elapsed: milliseconds since the camera left; infinite: all motion has ended.
function renderStage(elapsed = Infinity) {
  const {canvas, sheet, scene, camera, stage, cursor, isOverture, isFree} = machine, g = canvas.getContext("2d");
  if (!sheet || !camera) return;
  if (sheet.palette !== palette()) Object.assign(sheet, {palette: palette(), bitmaps: new Map(), overview: null});
  const isMoving = elapsed !== Infinity, played = elapsed - (isOverture ? 0 : FLIGHT);
  const t = clamp(played / Math.max(1, playTime()), 0, 1);
  const front = isOverture && isMoving ? TOP + t * (sheet.layout.height - TOP) : Infinity;
  const rise = scene.rises && isMoving ? passed(t, 0.72, 1) : 0;
  const lit = isFree ? null : scene.lit ?? null;
  drawSheet(g, sheet, camera, stage, {ratio: pixelRatio(), front, cursor, rise, lit, isMoving: elapsed < FLIGHT});
  if (deskHeight()) drawDesk(g, camera, stage, scene.act.frame(t), deskHeight());
  canvas.dataset.moving = String(isMoving);
  updateWholeButton();
}

// --- reading the sheet -----------------------------------------------------------------------------------------------

const TENSOR_VIEWS = {
  states: "stream", q: "qkv", k: "qkv", v: "qkv", z: "weighted-sum", attention: "merge", hidden: "mlp", mlp: "mlp",
};

// The number of the model at a place of the canvas, in CSS pixels: {tile, index, name, value, color}, or null.
function probe(x, y) {
  const {sheet, camera, stage} = machine, {fromX, fromY} = projection(camera, stage), [top, , , left] = stage.insets;
  if (y < top || x < left || y > stage.height - deskHeight()) return null;
  const cell = cellAt(sheet.layout, fromX(x), fromY(y));
  if (!cell) return null;
  const [tile, index] = cell;
  return {tile, index, name: nameOfTile(tile), value: tileValues(sheet, tile)[index],
    color: cellColor(sheet, tile, index)};
}

function nameOfTile(tile) {
  return `${vectorName(tile)}, ${machine.context.names[machine.sheet.first + tile.column]}`;
}

function readOut(text) {
  byId("machine-readout").textContent = text;
}

function pointAt({offsetX, offsetY}) {
  const found = machine.sheet && probe(offsetX, offsetY);
  readOut(found ? `${found.name}: number ${found.index} is ${short(found.value)}` : "");
}

// A click on the name of a column follows its token; a click on a cell marks it.
function clickAt(x, y) {
  const {sheet, camera, stage} = machine, {fromX} = projection(camera, stage), found = probe(x, y);
  endMotion();
  if (y < stage.insets[0] && sheet.layout.tiles.length) {
    const column = Math.floor((fromX(x) - sheet.layout.left + (PITCH - TILE) / 2) / PITCH);
    return column >= 0 && column < sheet.layout.n ? selectToken(sheet.first + column) : undefined;
  }
  machine.cursor = found && [found.tile, found.index];
  requestRender();
}

// Open the view with all numbers of the marked tile.
function lookCloser() {
  if (!machine.cursor || shownModel()) return; // the views show the first model
  const [{tensor, layer = state.layer, head = state.head, column}] = machine.cursor;
  location.hash = link({view: TENSOR_VIEWS[tensor], token: machine.sheet.first + column, layer, head});
}

function canvasKey(key) {
  const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  if (key === "Enter") return lookCloser();
  if (key === "+" || key === "-") return zoomBy(key === "+" ? 1.6 : 1 / 1.6);
  if (key === "Escape" && machine.cursor) {
    machine.cursor = null;
    readOut("");
    return recenter();
  }
  if (!moves[key] || !machine.sheet) return false;
  moveCursor(...moves[key]);
}

// Move the cursor along the wires: to the nearest tile in a direction.
function moveCursor(right, down) {
  endMotion();
  const {sheet, camera, stage} = machine, next = tileBeside(sheet.layout, machine.cursor?.[0], right, down);
  if (!next) return;
  const values = tileValues(sheet, next), largest = argsort(Array.from(values, Math.abs))[0];
  machine.cursor = [next, largest];
  readOut(`${nameOfTile(next)}: ${counted(values.length, "number")}, the largest is number ${largest}, `
    + short(values[largest]));
  const {toX, toY} = projection(camera, stage), center = {x: next.x + TILE / 2, y: next.y + next.height / 2};
  const x = toX(center.x), y = toY(center.y), [top, , , left] = stage.insets;
  if (x < left || y < top || x > stage.width - 20 || y > stage.height - deskHeight() - 10) {
    machine.camera = {...takeCamera().camera, ...center};
  }
  renderStage();
}

// The nearest tile to the right (1) or left (-1), or down (1) or up (-1). Without a tile to start from, the embedding
// of the followed token.
function tileBeside({tiles, followed}, from, right, down) {
  if (!from) return tiles.find(tile => tile.tensor === "states" && tile.x === followed);
  const ahead = tile => right ? right * (tile.x - from.x) : down * (tile.y - from.y);
  const beside = tile => right ? Math.abs(tile.y + tile.height / 2 - from.y - from.height / 2)
    : Math.abs(tile.x - from.x);
  const distance = tile => ahead(tile) + 3 * beside(tile);
  return tiles.filter(tile => ahead(tile) > 1 && beside(tile) < (right ? LANE : PITCH / 2))
    .sort((a, b) => distance(a) - distance(b))[0];
}
