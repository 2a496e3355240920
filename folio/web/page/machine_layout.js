// The layout of the machine's sheet: the place of each number of a forward pass. Pure functions of the model's shape.
//
// Columns are tokens, and the way down is the way through the model. Lengths are in units of the sheet. A tile is a
// vector as a grid of cells, one per number.
//
// Dimensions: n columns, C channels, H heads, D head size, L layers.

const TILE = 80, PITCH = 100; // width of a tile, and distance of columns
const EARLIER = 90; // width of the column of all tokens before the window
const STRIP = 5; // height of a query, key, value, or result of a head
const LANE = 56; // height of a head
const ARROW_SPAN = [20, 39]; // where the arrows of a head begin and end
const TOP = 60, GAP = 24, FOLD = 40, BARS = 170;
const SUM_ROOM = 14; // after the heads of a layer, so that the sign of the sum covers no result
const MAX_LANES = 24; // of all layers; more are folded
const MAX_HEADS = 6; // lanes per layer

// The number of columns of a grid of `count` cells that is about twice as wide as high.
function gridColumns(count) {
  const divisors = range(count).map(i => i + 1).filter(i => count % i === 0);
  const misfit = columns => Math.abs(Math.log(columns * columns / (2 * count)));
  return divisors.reduce((best, columns) => misfit(columns) <= misfit(best) ? columns : best);
}

// The layers that are drawn: all, or the first, the opened, and the last one.
function shownLayers({n_layer: L, n_head: H}, opened) {
  if (L * Math.min(H, MAX_HEADS) <= MAX_LANES) return range(L);
  return [...new Set([0, clamp(opened, 0, L - 1), L - 1])].sort((a, b) => a - b);
}

// The heads that are drawn: all, or the group of MAX_HEADS with the opened one.
function shownHeads({n_head: H}, opened) {
  const first = H > MAX_HEADS ? Math.floor(opened / MAX_HEADS) * MAX_HEADS : 0;
  return range(Math.min(MAX_HEADS, H - first)).map(i => first + i);
}

// The sheet of a window of n tokens, the last of which is followed. isEarlier: whether there are tokens before them.
// layer, head: opened, if not all are drawn.
//
// tiles: {row, tensor, offset, count, x, y, columns, rows, width, height, layer, head, column}; `row` names the tiles
// that share a color scale. lanes: {layer, head, y}. sums: {state, y, height}, where the stream is a sum. folds: {y,
// text}. labels: {y, height, kind, text, brief (for narrow stages)}.
function machineLayout(config, {n, isEarlier, layer: openedLayer, head: openedHead}) {
  const {n_head: H, n_embd: C} = config, D = C / H;
  const layers = shownLayers(config, openedLayer), heads = shownHeads(config, openedHead);
  const left = isEarlier ? EARLIER : 0, X = column => left + column * PITCH;
  const followed = X(n - 1), aside = followed + PITCH + 16; // x of what is added to the followed token
  const heightOf = (count, columns) => TILE / columns * count / columns;
  const stateColumns = gridColumns(C), stateHeight = heightOf(C, stateColumns);
  const hiddenColumns = gridColumns(4 * C), hiddenHeight = heightOf(4 * C, hiddenColumns);
  const tiles = [], lanes = [], sums = [], folds = [], labels = [];
  let y = TOP;

  const add = (place, tensor, row, offset, count, x, columns, height) => tiles.push({
    ...place, tensor, row, offset, count, x, y, columns, rows: count / columns, width: TILE, height,
  });
  const addRow = (place, tensor, index, count, columns, height) => range(n).forEach(column => add({...place, column},
    tensor, `${tensor}.${index}`, (index * n + column) * count, count, X(column), columns, height));
  const addState = state => {
    labels.push({y, height: stateHeight, kind: "state", text: state ? `+ ${stateName(state)}` : "E",
      brief: state ? `+ ${stateName(state).replace("attention", "attn")}` : "E"});
    if (state) {
      const layer = Math.floor((state - 1) / 2), tensor = state % 2 ? "attention" : "mlp";
      add({layer, column: n - 1}, tensor, `${tensor}.${layer}`, (layer * n + n - 1) * C, C, aside, stateColumns,
        stateHeight);
    }
    sums.push({state, y, height: stateHeight});
    addRow({state}, "states", state, C, stateColumns, stateHeight);
    y += stateHeight + GAP;
  };

  addState(0);
  layers.forEach((layer, i) => {
    const before = i ? layers[i - 1] + 1 : 0;
    if (layer > before) {
      folds.push({y: y + FOLD / 2, text: layer - before > 1 ? `layers ${before} to ${layer - 1}, not drawn`
        : `layer ${before}, not drawn`});
      y += FOLD + GAP;
    }
    for (const head of heads) {
      const top = y, index = layer * H + head;
      labels.push({y, height: LANE - 8, kind: "head", text: `head ${layer}.${head}`, brief: `${layer}.${head}`});
      for (const tensor of ["q", "k", "v"]) {
        addRow({layer, head}, tensor, index, D, D, STRIP);
        y += STRIP + 2;
      }
      y = top + ARROW_SPAN[1] + 3;
      add({layer, head, column: n - 1}, "z", `z.${index}`, index * D, D, followed, D, STRIP);
      lanes.push({layer, head, y: top});
      y = top + LANE;
    }
    y += SUM_ROOM;
    if (heads.length < H) {
      folds.push({y: y + FOLD / 2 - 8, text: `heads ${heads[0]} to ${heads.at(-1)} of ${H}`});
      y += FOLD;
    }
    addState(2 * layer + 1);
    labels.push({y, height: hiddenHeight, kind: "neurons", text: `${short(4 * C)} neurons`, brief: short(4 * C)});
    addRow({layer}, "hidden", layer, 4 * C, hiddenColumns, hiddenHeight);
    y += hiddenHeight + GAP;
    addState(2 * layer + 2);
  });
  const stem = [TOP - 14, y - GAP + 10], bars = {x: 0, y: y + GAP, width: aside + TILE + PITCH, height: BARS};
  return {n, isEarlier, layers, heads, tiles, lanes, sums, folds, labels, X, left, followed, aside, stem, bars,
    width: bars.width, height: bars.y + bars.height};
}

// The tile at a place, and the index of its cell there: [tile, k], or null.
function cellAt({tiles}, x, y) {
  const tile = tiles.find(tile => x >= tile.x && x < tile.x + tile.width && y >= tile.y && y < tile.y + tile.height);
  if (!tile) return null;
  const column = Math.floor((x - tile.x) / tile.width * tile.columns);
  return [tile, Math.floor((y - tile.y) / tile.height * tile.rows) * tile.columns + column];
}

// The smallest rectangle around rectangles: {x, y, width, height}.
function around(...boxes) {
  const x = Math.min(...boxes.map(box => box.x)), y = Math.min(...boxes.map(box => box.y));
  const right = Math.max(...boxes.map(box => box.x + box.width));
  return {x, y, width: right - x, height: Math.max(...boxes.map(box => box.y + box.height)) - y};
}
