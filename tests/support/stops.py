"""The stops of the story in a page: the numbers that their words, their acts, and the sheet of the machine show."""

import math
import random
import re
from typing import Any

import numpy as np

from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyRun, assert_rounded, assert_same
from tests.support.viewers import Viewer

STOPS = ("machine", "tokens", "vector", "query", "mask", "values", "neuron", "guess", "choice", "training")
TIMES = np.linspace(0, 1, 41).tolist()  # of an act
CELLS = 200  # that are compared per stop
MIN_CELL = 3  # pixels: a smaller cell may share the pixel in its middle
SHARE_COLORED = 0.99  # of the numbers of a row, which are not beyond the ends of its color scale
Array = np.ndarray

SETTLE = """async () => {
  await new Promise(requestAnimationFrame); // the scene is shown in the frame after the drawing
  endMotion();
}"""
# Each frame is a list of rows. Without what says where and how a row is drawn.
FRAMES = """times => times.map(t => machine.scene.act.frame(t).map(row => {
  const {kind, label = "", text = "", values = [], bars = [], parts = [], u = null, fall = 0} = row;
  return {kind, label, text, values: Array.from(values), shown: row.shown ?? values.length, bars, parts, u, fall};
}))"""
# Random cells in the visible part of the sheet, with what probe() says, and the pixel in the middle of each, or at the
# top of a cell with a number in its middle.
CELLS_OF_THE_SHEET = """([numbers, minimum]) => {
  const {sheet, camera, stage, canvas} = machine, {toX, toY, zoom} = projection(camera, stage), all = [];
  const [top, , , left] = stage.insets, bottom = stage.height - deskHeight();
  for (const tile of sheet.layout.tiles) {
    const width = tile.width / tile.columns * zoom, height = tile.height / tile.rows * zoom;
    if (Math.min(width, height) < minimum) continue;
    const hasNumbers = width >= NUMBER_SIZE[0] && height >= NUMBER_SIZE[1];
    for (let k = 0; k < tile.count; k++) {
      const x = toX(tile.x) + (k % tile.columns + 0.5) * width;
      const y = toY(tile.y) + Math.floor(k / tile.columns) * height + (hasNumbers ? 1.1 : height / 2);
      if (x > left && x < stage.width && y > top && y < bottom) all.push([tile, k, x, y]);
    }
  }
  const {data, width} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return numbers.map(number => all[Math.floor(number * all.length)]).filter(Boolean).map(([tile, k, x, y]) => {
    const {tile: found, index, name, value, color} = probe(x, y), pixel = 4 * (Math.floor(y) * width + Math.floor(x));
    const {tensor, row, layer = null, head = null, state = null, column} = tile;
    return {tensor, row, layer, head, state, column, index: k, name, value, color,
      isFound: found === tile && index === k, pixel: Array.from(data.subarray(pixel, pixel + 3))};
  });
}"""
HOLD_PAUSES = """() => {
  const later = window.setTimeout;
  window.held = []; // what the sequences wait for
  window.setTimeout = (action, milliseconds, ...rest) => [WRITING_PAUSE, TRAINING_PAUSE].includes(milliseconds)
    ? held.push(action) : later(action, milliseconds, ...rest);
}"""
LAYOUT_ROWS = """() => {
  const {layout: {tiles, n}, first} = machine.sheet, rows = {};
  for (const {row, tensor, layer = null, head = null, state = null, column} of tiles) {
    rows[row] ??= {tensor, layer, head, state, columns: []};
    rows[row].columns.push(column);
  }
  return {rows, first};
}"""


def settle(viewer: Viewer) -> Viewer:
    """Wait until the drawn stop is shown, and end all motion."""
    viewer(SETTLE)
    return viewer


def show_stop(viewer: Viewer, stop: str, **state: Any) -> Viewer:
    """Show a stop at the end of its act."""
    number = viewer("availableStops().map(({id}) => id)").index(stop)
    return settle(viewer.show("story", story=number, **state))


def stop_text(viewer: Viewer) -> str:
    """The sentences of the shown stop."""
    return viewer("[...document.querySelectorAll('#view .words p')].map(({textContent}) => textContent).join(' ')")


def quoted(viewer: Viewer, token: int) -> str:
    return viewer("id => quoted(pieces[id])", int(token))


MINUS = "\N{MINUS SIGN}"
NUMBER = rf"(<?{MINUS}?\d[\d,.]*(?:e[+{MINUS}]?\d+)?%?)"


def check_number(text: str, pattern: str, expected: float, largest: float = 1.0) -> None:
    """Check a rounded number, or a percentage, of a text. pattern: with # in the place of the number. largest: of the
    numbers that it was computed from.
    """
    match = re.search(pattern.replace("#", NUMBER), text)
    assert match, f"{pattern!r} is not in {text!r}"
    shown = match[1].rstrip(".,").replace(MINUS, "-").replace(",", "")
    if shown.startswith("<"):  # <0.01%
        assert expected < 1e-4 * (1 + 1e-3)
    elif shown.endswith("%"):
        assert_rounded(float(shown[:-1]) / 100, expected, 3, largest)
    else:
        assert_rounded(float(shown), expected, 4, largest)


# --- acts -------------------------------------------------------------------------------------------------------------


def frames(viewer: Viewer, times: list[float] = TIMES) -> list[list[dict[str, Any]]]:
    """The rows of the shown act at each time. The last frame is the one that is drawn after all motion has ended."""
    return viewer(FRAMES, times)


def rows_of(frame: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in frame if row["kind"] == kind]


def check_addition(viewer: Viewer, vectors: Array) -> None:
    """Check an act that adds the first of three vectors (3, N) to the second, number by number."""
    counts = []
    for frame in frames(viewer):
        assert_same([row["values"] for row in frame], vectors)
        *added, shown = (row["shown"] for row in frame)
        assert added == 2 * [vectors.shape[1]]
        counts.append(shown)
    assert counts == sorted(counts) and {0, vectors.shape[1]} <= {*counts} and len({*counts}) > 5
    assert_same(vectors[0] + vectors[1], vectors[2])


def check_partial_sums(viewer: Viewer, terms: Array, largest: float) -> None:
    """Check an act that adds vectors (N, D) one by one. Its last row is the sum so far, and at t = 1 that of all.

    largest: of the numbers that they were computed from.
    """
    sums, counts = np.vstack([0 * terms[:1], terms.cumsum(0)]), []
    for frame in frames(viewer):
        shown = np.array(rows_of(frame, "strip")[-1]["values"])
        differences = np.abs(sums - shown).max(1)
        counts.append(int(differences.argmin()))
        assert differences.min() <= FLOAT32_ERROR * largest, f"{shown} is not a partial sum"
    assert counts[0] == 0 and counts[-1] == len(terms) and counts == sorted(counts) and {*counts} == {*range(len(sums))}


# --- the sheet --------------------------------------------------------------------------------------------------------


class SheetInNumPy:
    """The numbers of the sheet, computed with NumPy. first: the first token of the window that ends with `token`."""

    def __init__(self, run: NumpyRun, first: int, token: int):
        self.run, self.first, self.token = run, first, token
        self.layers = [run.layer(index) for index in range(run.gpt.config.n_layer)]

    def vector(self, tensor: str, layer: int | None, head: int | None, state: int | None, column: int) -> Array:
        """The numbers of a tile."""
        t = self.first + column
        if tensor == "states":
            return self.run.stream[state, t]
        values = getattr(self.layers[layer], tensor)
        return values[t] if head is None else values[head, t]

    def row(self, columns: list[int], **place: Any) -> Array:
        """The numbers of a row of tiles."""
        return np.concatenate([self.vector(**place, column=column) for column in columns])

    def limit(self, **row: Any) -> float:
        """The end of the color scale of a row of tiles."""
        sizes = np.sort(np.abs(self.row(**row)))
        return sizes[math.ceil(SHARE_COLORED * (len(sizes) - 1))]


def random_cells(viewer: Viewer, seed: int, count: int = CELLS, min_size: float = MIN_CELL) -> list[dict[str, Any]]:
    """Random visible cells of the shown sheet, each with a width and a height of at least min_size pixels."""
    random_numbers = random.Random(seed)
    return viewer(CELLS_OF_THE_SHEET, [[random_numbers.random() for _ in range(count)], min_size])


def check_cells(viewer: Viewer, cells: list[dict[str, Any]], run: NumpyRun, reference: NumpyRun) -> None:
    """Compare values, colors, and pixels of cells with NumPy. reference: of the last checkpoint, whose color scale each
    row has.
    """
    facts = viewer(LAYOUT_ROWS)
    token = facts["first"] + max(column for row in facts["rows"].values() for column in row["columns"])
    sheet, scales = (SheetInNumPy(computed, facts["first"], token) for computed in (run, reference))
    limits = {name: scales.limit(**row) for name, row in facts["rows"].items()}
    largest = {name: np.abs(sheet.row(**row)).max() for name, row in facts["rows"].items()}
    values, places = [], ("tensor", "layer", "head", "state", "column")
    for cell in cells:
        assert cell["isFound"], cell
        values.append(sheet.vector(*(cell[name] for name in places))[cell["index"]])
        assert_rounded(cell["value"], values[-1], 15, largest[cell["row"]])
    shares = [value / limits[cell["row"]] for value, cell in zip(values, cells, strict=True)]
    colors = viewer("shares => shares.map(share => colorOf('signed', share))", shares)
    for name, error in (("color", 1), ("pixel", 2)):  # a tile has 1,024 different colors
        differences = np.abs(np.array([cell[name] for cell in cells]) - colors).max(1)
        worst = int(differences.argmax())
        assert differences[worst] <= error, (name, cells[worst], colors[worst])
