// Draws the sheet of the machine on a canvas: tiles as bitmaps, arrows, the stem, and texts of a constant size.
//
// Each drawn cell is a number of the model: positions and opacities of tiles may move, colors and numbers never do.
// Texts at the edges stay in the window, like the headings of a table.

const NUMBER_SIZE = [34, 13]; // smallest cell with its number, in pixels
const MIN_ARROW = 0.004; // smallest weight that is drawn
const MAX_CACHE = 8e6; // pixels of the cached overview
const LENS_WIDTH = 92; // of the bar of a state's prediction, in pixels
const DIMMED = 0.12; // opacity of what the first pass has not reached

// The colors of the page. Paper is white in print, also in dark mode.
function themeColors() {
  const style = getComputedStyle(document.documentElement), names = ["ink", "soft", "line", "accent", "mark", "fill"];
  const colors = Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
  return {...colors, paper: css(colorOf("signed", 0))};
}

// Draw the sheet. options: ratio (canvas pixels per CSS pixel), front (y that the first pass has reached), cursor (a
// tile and the index of a cell), lit (heads [{layer, head}] whose arrows are emphasized; null: all), rise (how far the
// drawn token is on its way to the top, from 0 to 1), isMoving (whether the camera moves).
function drawSheet(g, sheet, camera, stage, options) {
  const {ratio, front = Infinity, cursor = null, lit = null, rise = 0, isMoving = false} = options;
  const view = projection(camera, stage), theme = themeColors();
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.globalAlpha = 1;
  g.fillStyle = theme.paper;
  g.fillRect(0, 0, stage.width, stage.height);
  g.imageSmoothingEnabled = false;
  drawStems(g, sheet, view, theme, front);
  drawArrows(g, sheet, view, theme, {front, lit});
  drawTiles(g, sheet, view, stage, ratio, {front, isMoving});
  drawSums(g, sheet, view, stage, theme, front);
  drawBars(g, sheet, view, theme, {front, rise});
  drawHeadings(g, sheet, view, stage, theme);
  if (cursor) drawCursor(g, view, theme, ...cursor);
}

// The residual streams. That of the followed token is a thick line in a light column.
function drawStems(g, {layout: {n, X, followed, stem: [top, bottom]}}, {toX, toY, zoom}, theme, front) {
  const end = Math.max(top, Math.min(bottom, front)), height = toY(end) - toY(top);
  g.fillStyle = theme.fill;
  g.globalAlpha = 0.4;
  g.fillRect(toX(followed - 7), toY(top), (TILE + 14) * zoom, height);
  g.fillStyle = theme.accent;
  for (const column of range(n)) {
    const isFollowed = column === n - 1, width = isFollowed ? clamp(9 * zoom, 3, 16) : clamp(1.2 * zoom, 1, 3);
    g.globalAlpha = isFollowed ? 1 : 0.35;
    g.fillRect(toX(X(column) + TILE / 2) - width / 2, toY(top), width, height);
  }
  g.globalAlpha = 1;
}

// The curve from the value of a column to the followed token: the points of a Bezier curve, in units of the sheet.
function arrowCurve({X, followed, left}, column, y) {
  const from = column < 0 ? left / 2 - 10 : X(column) + TILE / 2, to = followed + TILE / 2, [begin, end] = ARROW_SPAN;
  const bend = 0.9 * (end - begin);
  return [from, y + begin, from, y + begin + bend, to - 0.25 * (to - from), y + end - 4, to, y + end + 2];
}

function drawArrows(g, sheet, {toX, toY, zoom}, theme, {front, lit}) {
  const {layout} = sheet;
  g.strokeStyle = theme.mark;
  g.lineCap = "butt";
  for (const lane of layout.lanes) {
    if (lane.y + ARROW_SPAN[0] > front) continue;
    const {weights, before} = weightsOf(sheet, lane);
    const isLit = !lit || lit.some(({layer, head}) => layer === lane.layer && head === lane.head);
    [...weights, before].forEach((weight, column) => {
      if (!(weight > MIN_ARROW)) return;
      const points = arrowCurve(layout, column < layout.n ? column : -1, lane.y);
      g.globalAlpha = (isLit ? 1 : 0.3) * Math.min(1, 0.12 + 1.1 * weight);
      g.lineWidth = Math.max(0.6, (0.6 + 7 * weight) * zoom);
      const [x0, y0, ...rest] = points.map((value, i) => i % 2 ? toY(value) : toX(value));
      g.beginPath();
      g.moveTo(x0, y0);
      g.bezierCurveTo(...rest);
      g.stroke();
    });
  }
  g.globalAlpha = 1;
}

// Draw the tiles: from the bitmap of the overview if the sheet is small or, while the camera moves, nearly so.
function drawTiles(g, sheet, view, stage, ratio, {front, isMoving}) {
  const {layout, overview} = sheet, {toX, toY, zoom} = view, enlarged = overview && zoom * ratio / overview.scale;
  if (overview && enlarged <= (isMoving ? 2 : 1.01)) {
    const {canvas, scale} = overview, split = Math.round(clamp(front * scale, 0, canvas.height));
    const draw = (from, to) => to > from && g.drawImage(canvas, 0, from, canvas.width, to - from,
      toX(0), toY(from / scale), canvas.width / scale * zoom, (to - from) / scale * zoom);
    draw(0, split);
    g.globalAlpha = DIMMED;
    draw(split, canvas.height);
    g.globalAlpha = 1;
    return;
  }
  const left = view.fromX(0), right = view.fromX(stage.width), top = view.fromY(0), bottom = view.fromY(stage.height);
  for (const tile of layout.tiles) {
    if (tile.x > right || tile.y > bottom || tile.x + tile.width < left || tile.y + tile.height < top) continue;
    g.globalAlpha = tile.y > front ? DIMMED : 1;
    g.drawImage(bitmapOf(sheet, tile), toX(tile.x), toY(tile.y), tile.width * zoom, tile.height * zoom);
    const width = tile.width / tile.columns * zoom, height = tile.height / tile.rows * zoom;
    if (width >= NUMBER_SIZE[0] && height >= NUMBER_SIZE[1]) drawNumbers(g, sheet, tile, view, stage, width, height);
  }
  g.globalAlpha = 1;
}

function drawNumbers(g, sheet, tile, {toX, toY}, stage, width, height) {
  g.font = `${clamp(width / 3.6, 11, 17)}px ui-monospace, Menlo, Consolas, monospace`;
  g.textAlign = "center";
  g.textBaseline = "middle";
  tileValues(sheet, tile).forEach((value, k) => {
    const x = toX(tile.x) + (k % tile.columns + 0.5) * width;
    const y = toY(tile.y) + (Math.floor(k / tile.columns) + 0.5) * height;
    if (x < -width || y < -height || x > stage.width + width || y > stage.height + height) return;
    g.fillStyle = textColorOn(cellColor(sheet, tile, k));
    g.fillText(value.toFixed(2).replace(/^-/, "−"), x, y, width - 2);
  });
}

// Keep all tiles as one bitmap for a camera that shows the whole sheet. Each pixel has the color of the cell at its
// middle.
function cacheOverview(sheet, zoom, ratio) {
  const {layout} = sheet, scale = zoom * ratio, [width, height] = [layout.width, layout.height].map(size =>
    Math.ceil(size * scale));
  if (sheet.overview?.scale === scale || width * height > MAX_CACHE || !width || !height || isPrinting) return;
  const canvas = element("canvas", {width, height}), g = canvas.getContext("2d");
  const image = g.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  for (const tile of layout.tiles) {
    const colors = cellPixels(sheet, tile), first = edge => Math.ceil(edge * scale - 0.5); // pixel after an edge
    for (let y = first(tile.y); y < first(tile.y + tile.height); y++) {
      const row = Math.floor(((y + 0.5) / scale - tile.y) / tile.height * tile.rows);
      for (let x = first(tile.x); x < first(tile.x + tile.width); x++) {
        const column = Math.floor(((x + 0.5) / scale - tile.x) / tile.width * tile.columns);
        pixels[y * width + x] = colors[row * tile.columns + column];
      }
    }
  }
  g.putImageData(image, 0, 0);
  sheet.overview = {canvas, scale};
}

// Where a vector is added to the stream: the sum sign on the stem, the way of what is added, and what the state
// predicts.
function drawSums(g, sheet, {toX, toY, zoom}, stage, theme, front) {
  const {layout: {sums, followed, aside, lanes}, lens} = sheet;
  sums.forEach(({state, y, height}) => {
    if (y > front) return;
    const stemX = toX(followed + TILE / 2), middle = toY(y + height / 2), radius = Math.max(3, 6 * zoom);
    if (state) {
      const sumY = toY(y - 11), bus = toX(followed + TILE + 14);
      const lane = lanes.find(({layer}) => 2 * layer + 1 === state);
      g.strokeStyle = theme.mark;
      g.lineWidth = Math.max(1, 1.6 * zoom);
      g.beginPath();
      g.moveTo(toX(aside + TILE / 2), toY(y));
      g.lineTo(toX(aside + TILE / 2), sumY);
      g.lineTo(stemX + radius, sumY);
      if (lane) { // from the results of the heads to what they add
        g.moveTo(bus, toY(lane.y + ARROW_SPAN[1] + 5));
      } else { // from the neurons
        g.moveTo(toX(followed + TILE), toY(y - GAP - 8));
        g.lineTo(bus, toY(y - GAP - 8));
      }
      g.lineTo(bus, middle);
      g.lineTo(toX(aside), middle);
      g.stroke();
      g.fillStyle = theme.paper;
      g.lineWidth = Math.max(1, 1.8 * zoom);
      g.beginPath();
      g.arc(stemX, sumY, radius, 0, 2 * Math.PI);
      g.fill();
      g.stroke();
      g.beginPath();
      g.moveTo(stemX - radius * 0.6, sumY);
      g.lineTo(stemX + radius * 0.6, sumY);
      g.moveTo(stemX, sumY - radius * 0.6);
      g.lineTo(stemX, sumY + radius * 0.6);
      g.stroke();
    }
    const prediction = lens[state], x = toX(aside + (state ? TILE : -16)) + 6;
    const room = Math.min(LENS_WIDTH, stage.width - x - 4);
    if (!prediction || middle < stage.insets[0] || middle > stage.height || room < 50) return;
    g.fillStyle = theme.fill;
    const {label, probability, isNext} = prediction;
    g.fillRect(x, middle - 8, room * probability, 16);
    write(g, `${visible(label)} ${percent(probability)}`, x + 3, middle, {fill: isNext ? theme.mark : theme.ink,
      size: 12, weight: isNext ? 700 : 400, mono: true, width: room});
  });
}

// Text with a size in pixels. halo: the color of a rim that separates it from what is below.
function write(g, text, x, y, {fill, size = 12, align = "left", weight = 400, mono = false, halo = null, width}) {
  g.font = `${weight} ${size}px ${mono ? "ui-monospace, Menlo, Consolas, monospace" : "system-ui, sans-serif"}`;
  g.textAlign = align;
  g.textBaseline = "middle";
  if (halo) {
    g.strokeStyle = halo;
    g.lineWidth = 4;
    g.lineJoin = "round";
    g.strokeText(text, x, y, width);
  }
  g.fillStyle = fill;
  g.fillText(text, x, y, width);
}

// The most likely next tokens, and the way of the drawn one back to the top, where it is the next column.
function drawBars(g, {layout, next, chosen}, {toX, toY, zoom}, theme, {front, rise}) {
  const {bars, followed} = layout, pitch = bars.width / SHOWN_BARS, room = bars.height - 60;
  if (bars.y > front) return;
  const largest = next[0][1], size = clamp(24 * zoom, 11, 26), center = {align: "center", width: pitch * zoom};
  const base = bars.y + 24 + room, below = 1.7 * size / zoom; // room for the tokens
  next.forEach(([id, p], i) => {
    const x = bars.x + (i + 0.5) * pitch, height = room * p / largest;
    g.fillStyle = id === chosen ? theme.mark : theme.accent;
    g.fillRect(toX(x - 0.3 * pitch), toY(base - height), 0.6 * pitch * zoom, height * zoom);
    write(g, percent(p), toX(x), toY(base - height) - 0.7 * size, {...center, fill: theme.soft, size: 0.8 * size});
    write(g, visible(pieces[id]), toX(x), toY(base) + 0.85 * size, {...center, fill: theme.ink, size, weight: 600,
      mono: true});
  });
  if (chosen === null) return;
  const place = next.findIndex(([id]) => id === chosen), rim = layout.width + 14, bottom = base + below + 6;
  const from = place < 0 ? layout.width : bars.x + (place + 0.5) * pitch;
  const way = [[from, base + below], [from, bottom], [rim, bottom], [rim, 24], [followed + PITCH + TILE / 2 + 12, 24]];
  g.strokeStyle = theme.mark;
  g.lineWidth = Math.max(1, 1.6 * zoom);
  g.setLineDash([4, 4]);
  g.beginPath();
  way.forEach(([x, y], i) => i ? g.lineTo(toX(x), toY(y)) : g.moveTo(toX(x), toY(y)));
  g.stroke();
  g.setLineDash([]);
  if (!(rise > 0 && rise < 1)) return;
  const [x, y] = placeOnWay(way, rise);
  write(g, visible(pieces[chosen]), toX(x), toY(y), {fill: theme.mark, size: 1.2 * size, align: "center", weight: 700,
    mono: true, halo: theme.paper});
}

// The place at a share of the length of a way of points.
function placeOnWay(points, share) {
  const lengths = points.slice(1).map(([x, y], i) => Math.hypot(x - points[i][0], y - points[i][1]));
  let rest = share * sumOf(lengths);
  for (const [i, length] of lengths.entries()) {
    const part = length ? rest / length : 0, [[x0, y0], [x1, y1]] = [points[i], points[i + 1]];
    if (part <= 1) return [x0 + part * (x1 - x0), y0 + part * (y1 - y0)];
    rest -= length;
  }
  return points.at(-1);
}

// The tokens above the columns, and the names of the rows at their left.
function drawHeadings(g, {layout, labels, first, chosen}, {toX, toY, zoom}, stage, theme) {
  const {n, X, isEarlier, followed} = layout, [top, , , left] = stage.insets, y = Math.max(toY(24), top / 2);
  g.globalAlpha = 0.93;
  g.fillStyle = theme.paper;
  if (toY(TOP) < top) g.fillRect(0, 0, stage.width, top);
  g.fillRect(0, 0, left - 4, stage.height);
  g.globalAlpha = 1;
  const size = clamp(34 * zoom, 12, top - 8);
  range(n).forEach(column => {
    const x = toX(X(column) + TILE / 2), isFollowed = column === n - 1;
    if (x < left) return;
    write(g, labels[column], x, y, {fill: isFollowed ? theme.mark : theme.ink, size, align: "center", weight: 600,
      mono: true, width: (PITCH - 6) * zoom});
  });
  if (isEarlier && toX(layout.left / 2 - 10) > left - 30) {
    write(g, `${first} earlier`, toX(layout.left / 2 - 10), y, {fill: theme.soft, size: Math.min(12, size),
      align: "center", width: (EARLIER - 4) * zoom});
  }
  if (chosen !== null) {
    write(g, visible(pieces[chosen]), toX(followed + PITCH + TILE / 2 - 8), y, {fill: theme.mark, size, align: "center",
      weight: 600, mono: true, width: (PITCH - 6) * zoom});
  }
  let lastY = -Infinity; // of a name that was written: closer ones would overlap it
  for (const label of layout.labels) {
    const middle = toY(label.y + label.height / 2);
    const isClose = label.kind === "head" && (STRIP + 2) * zoom >= 12; // each vector of the head has a name
    if (isClose) {
      ["query", "key", "value"].forEach((name, i) => {
        const at = toY(label.y + i * (STRIP + 2) + STRIP / 2);
        if (at > top) write(g, name, left - 10, at, {fill: theme.soft, align: "right"});
      });
    }
    const at = isClose ? toY(label.y + ARROW_SPAN[0] + 18) : middle;
    if (at < top || at > stage.height || at - lastY < 13) continue;
    lastY = at;
    write(g, left < INSETS.wide[3] ? label.brief : label.text, left - 10, at, {fill: theme.soft, size: 11.5,
      align: "right", width: left - 12});
  }
  for (const {y: fold, text} of layout.folds) {
    const at = toY(fold);
    if (at <= top || at >= stage.height) continue;
    write(g, `⋯ ${text} ⋯`, toX((X(0) + followed + TILE) / 2), at, {fill: theme.soft, size: 12, align: "center"});
  }
}

function drawCursor(g, {toX, toY, zoom}, theme, tile, k) {
  const width = tile.width / tile.columns, height = tile.height / tile.rows;
  const x = toX(tile.x + (k % tile.columns) * width), y = toY(tile.y + Math.floor(k / tile.columns) * height);
  const w = Math.max(4, width * zoom), h = Math.max(4, height * zoom);
  g.lineWidth = 3;
  g.strokeStyle = theme.paper;
  g.strokeRect(x - 1, y - 1, w + 2, h + 2);
  g.lineWidth = 1.5;
  g.strokeStyle = theme.ink;
  g.strokeRect(x - 1, y - 1, w + 2, h + 2);
}
