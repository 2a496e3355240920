"""The sheet of the machine in a browser: its layout, its numbers and colors compared with NumPy, and its camera."""

import random
import re

import numpy as np
import pytest

from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyGPT
from tests.support.stops import HOLD_PAUSES, STOPS, check_cells, random_cells, settle, show_stop
from tests.support.viewed_models import SHAPES, TOKENIZERS, build_model
from tests.support.viewers import Served, Viewer, axe_violations
from tests.support.waiting import wait_until

TOKEN = 17
SIZES = ((390, 844), (820, 1180), (1024, 768), (1280, 720), (1440, 900), (1920, 1080), (2560, 1440))  # of a window
OTHER_POSITIONS = ("sinusoidal", "alibi", "none")  # of no kind in SHAPES
CONFIGS = 40
MAX_DRAWS = {"overview": 700, "cached overview": 5}  # calls of drawImage per frame


@pytest.fixture
def calm_viewer(new_viewer, char) -> Viewer:
    """A page of the character model with reduced motion."""
    return new_viewer(char, reduced_motion="reduce").open("tokens")


# --- the layout -------------------------------------------------------------------------------------------------------

LAYOUT = """([config, fields]) => {
  const {tiles, lanes, folds, layers, heads, width, height} = machineLayout(config, fields);
  const numbers = tiles.map(({offset, count, columns, rows, x, y, width, height}) =>
    [offset, count, columns, rows, x, y, width, height]);
  const names = tiles.map(({tensor, row, layer = null, head = null, state = null, column}) =>
    [tensor, row, layer, head, state, column]);
  const misplaced = tiles.filter(tile => {
    const k = (7 * tile.offset + 3) % tile.count, i = Math.floor(k / tile.columns), j = k % tile.columns;
    const x = tile.x + (j + 0.5) * tile.width / tile.columns, y = tile.y + (i + 0.5) * tile.height / tile.rows;
    const found = cellAt({tiles}, x, y);
    return found?.[0] !== tile || found[1] !== k;
  });
  const texts = folds.map(({text}) => text);
  return {numbers, names, misplaced: misplaced.length, folds: texts, lanes, layers, heads, width, height};
}"""  # fmt: skip


def random_config(random_numbers: random.Random) -> tuple[dict, dict]:
    """The shape of a model, and the fields of a sheet."""
    L, H, D = (random_numbers.randint(*ends) for ends in ((1, 48), (1, 25), (2, 64)))
    fields = {"layer": random_numbers.randrange(L), "head": random_numbers.randrange(H)}
    window = {"n": random_numbers.randint(1, 14), "isEarlier": random_numbers.random() < 0.5}
    return {"n_layer": L, "n_head": H, "n_embd": H * D}, window | fields


def expected_rows(config: dict, n: int, layers: list[int], heads: list[int]) -> dict[str, tuple[int, int, int]]:
    """For each row of a sheet: the place of its first element in its tensor, the number of vectors, and their length.

    Of what is added to the stream, and of a head's result, only the followed token is drawn.
    """
    H, C = config["n_head"], config["n_embd"]
    D = C // H
    states = [0, *(2 * layer + i for layer in layers for i in (1, 2))]
    rows = {f"states.{state}": (state * n * C, n, C) for state in states}
    for layer in layers:
        rows |= {f"hidden.{layer}": (layer * n * 4 * C, n, 4 * C)}
        rows |= {f"{tensor}.{layer}": ((layer * n + n - 1) * C, 1, C) for tensor in ("attention", "mlp")}
        for index in (layer * H + head for head in heads):
            rows |= {f"{tensor}.{index}": (index * n * D, n, D) for tensor in "qkv"}
            rows[f"z.{index}"] = (index * D, 1, D)
    return rows


def test_layouts_of_random_models(calm_viewer, seed):
    """No two tiles overlap, each element of each row has one cell, and folds name what is not drawn."""
    random_numbers = random.Random(seed)
    for config, fields in (random_config(random_numbers) for _ in range(CONFIGS)):
        print(config, fields)
        layout = calm_viewer(LAYOUT, [config, fields])
        layers, heads, n = layout["layers"], layout["heads"], fields["n"]
        L = config["n_layer"]
        assert layers == sorted({*layers}) and {0, fields["layer"], L - 1} <= {*layers} <= {*range(L)}
        assert heads == list(range(heads[0], heads[-1] + 1)) and fields["head"] in heads
        assert [(lane["layer"], lane["head"]) for lane in layout["lanes"]] == [(i, j) for i in layers for j in heads]
        offsets, counts, columns, rows, x, y, width, height = np.array(layout["numbers"]).T
        assert (columns * rows == counts).all() and layout["misplaced"] == 0
        assert (x >= 0).all() and (y >= 0).all()
        assert (x + width <= layout["width"]).all() and (y + height <= layout["height"]).all()
        apart = ((a[:, None] >= (a + size)[None] - 1e-9) for a, size in ((x, width), (y, height)))
        right, below = apart
        assert (right | right.T | below | below.T | np.eye(len(x), dtype=bool)).all()
        drawn: dict[str, list[int]] = {}
        for (_, row, *_), offset, count in zip(layout["names"], offsets, counts, strict=True):
            drawn.setdefault(row, []).extend((int(offset), int(count)))
        for row, (first, vectors, length) in expected_rows(config, n, layers, heads).items():
            assert drawn.pop(row) == [number for i in range(vectors) for number in (first + i * length, length)], row
        assert drawn == {}
        check_folds(layout["folds"], config, layers, heads)


def check_folds(folds: list[str], config: dict, layers: list[int], heads: list[int]) -> None:
    """Check that the texts of folds name exactly the layers and heads that are not drawn."""
    folded_layers: list[int] = []
    for text in folds:
        if match := re.fullmatch(r"layers (\d+) to (\d+), not drawn", text):
            folded_layers += range(int(match[1]), int(match[2]) + 1)
        elif match := re.fullmatch(r"layer (\d+), not drawn", text):
            folded_layers.append(int(match[1]))
        else:
            assert text == f"heads {heads[0]} to {heads[-1]} of {config['n_head']}"
    assert folded_layers == sorted({*range(config["n_layer"])} - {*layers})
    about_heads = [text for text in folds if text.startswith("heads")]
    assert len(about_heads) == (len(layers) if len(heads) < config["n_head"] else 0)


# --- numbers and colors -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[*SHAPES, *OTHER_POSITIONS])
def each_served(request, servers, serve) -> Served:
    """Models of all position methods and tokenizers."""
    if request.param in SHAPES:
        return servers(request.param)
    sizes = dict(block_size=48, vocab_size=TOKENIZERS["char"].vocab_size, n_embd=32, n_head=4)
    return serve(random_model(1, position=request.param, **sizes).requires_grad_(False))


def on_a_large_screen(viewer: Viewer) -> Viewer:
    """Cells are large enough for pixels of their own at each stop."""
    viewer.page.set_viewport_size({"width": 2560, "height": 1440})
    return viewer


def test_random_cells_equal_numpy(new_viewer, each_served, seed):
    """At each stop, their values, their colors, and their pixels."""
    viewer = on_a_large_screen(new_viewer(each_served, reduced_motion="reduce").open("tokens"))
    run = viewer.run()
    for number, stop in enumerate(viewer("availableStops().map(({id}) => id)")):
        show_stop(viewer, stop, token=TOKEN)
        cells = random_cells(viewer, seed + number)
        assert len(cells) == 200
        check_cells(viewer, cells, run, run)
    assert {cell["tensor"] for cell in random_cells(viewer, seed, 2000)} == {
        *("states", "q", "k", "v", "z", "attention", "hidden", "mlp")
    }


def test_the_pointer_reads_a_cell(calm_viewer):
    """The value under the pointer, a click that marks it, and a double click that opens its view."""
    viewer = show_stop(calm_viewer, "query", token=TOKEN)
    place = """() => {
      const {sheet: {layout}, scene: {lit: [{layer, head}]}, camera, stage, canvas} = machine;
      const tile = layout.tiles.find(tile => tile.row === `q.${layer * 4 + head}` && tile.column === 12);
      const {toX, toY} = projection(camera, stage), {left, top} = canvas.getBoundingClientRect();
      const x = tile.x + 2.5 * tile.width / tile.columns;
      return [left + toX(x), top + toY(tile.y + tile.height / 2), layer, head];
    }"""
    x, y, layer, head = viewer(place)
    viewer.page.mouse.move(x, y)
    shown = viewer.find("machine-readout").inner_text()
    run = viewer.run()
    name = viewer(f"loadContext().then(({{names}}) => names[{TOKEN - 1}])")
    assert shown.startswith(f"query of head {layer}.{head}, {name}: number 2 is ")
    value = float(shown.split(" is ")[1].replace("\N{MINUS SIGN}", "-"))
    assert value == pytest.approx(run.layer(layer).q[head, TOKEN - 1, 2], rel=1e-3)
    viewer.page.mouse.click(x, y)
    assert viewer("machine.cursor[0].tensor") == "q" and viewer("machine.cursor[1]") == 2
    viewer.after(lambda: viewer.page.mouse.dblclick(x, y))
    assert viewer.state("view", "token", "layer", "head") == ["qkv", TOKEN - 1, layer, head]


def test_the_training_shows_each_checkpoint_with_the_colors_of_the_last(calm_viewer, seed):
    """Played at the last stop, with the values of each checkpoint."""
    viewer = on_a_large_screen(calm_viewer)
    ids, last = viewer.run().ids, NumpyGPT(build_model("char", seed=200)).run(viewer.run().ids)
    show_stop(viewer, "training", token=TOKEN)
    viewer(HOLD_PAUSES)
    viewer.after(viewer.find("story-try").click)
    for step in (0, 10, 100, 200):
        wait_until(lambda: viewer("held.length") == 1)
        assert settle(viewer).state("step", "story") == [step, 9]
        run = NumpyGPT(build_model("char", seed=step)).run(ids)
        check_cells(viewer, random_cells(viewer, seed + step), run, last)
        resume = "() => void held.shift()()"
        if step < 200:
            viewer.after(lambda resume=resume: viewer(resume))
    show_stop(viewer, "query", token=TOKEN, step=10)  # and at another stop
    check_cells(viewer, random_cells(viewer, seed), NumpyGPT(build_model("char", seed=10)).run(ids), last)


# --- the camera -------------------------------------------------------------------------------------------------------

FLIGHTS = """([count, numbers]) => {
  const next = () => numbers.shift(), problems = [], near = (a, b) => Math.abs(a - b) <= 1e-6 * (1 + Math.abs(b));
  for (let i = 0; i < count; i++) {
    const stage = {width: 300 + 2000 * next(), height: 300 + 1000 * next(), insets: [30, 60, 10, 60]};
    const size = longest => 20 + longest * next() ** 3;
    const box = () => ({x: 2000 * next(), y: 4000 * next(), width: size(1500), height: size(3000)});
    const [from, to] = [fitCamera(box(), stage), fitCamera(i % 5 ? box() : {...box(), x: 0, y: 0}, stage)];
    const path = flight(from, i % 7 ? to : {...to, x: from.x, y: from.y}, stage.width), end = path(1);
    const places = Array.from({length: 401}, (_, i) => path(i / 400));
    const isStart = near(places[0].x, from.x) && near(places[0].y, from.y) && near(places[0].zoom, from.zoom);
    const isEnd = i % 7 ? end === to : end.x === from.x && end.zoom === to.zoom;
    const steps = places.slice(1).map((place, i) => Math.abs(Math.log(place.zoom / places[i].zoom))
      + Math.hypot(place.x - places[i].x, place.y - places[i].y) * Math.max(place.zoom, places[i].zoom) / stage.width);
    const mean = steps.reduce((a, b) => a + b) / 400;
    const longest = Math.max(...steps);
    if (!isStart || !isEnd || !(longest <= 4 * mean + 1e-9)) problems.push([isStart, isEnd, longest, mean]);
  }
  return problems;
}"""  # fmt: skip


def test_flights_of_the_camera(calm_viewer, seed):
    """They begin and end where they should, and no step is much longer than the others, in widths of the stage."""
    random_numbers = random.Random(seed)
    assert calm_viewer(FLIGHTS, [60, [random_numbers.random() for _ in range(60 * 12)]]) == []


AT_A_SIZE = """async () => {
  const frame = () => new Promise(requestAnimationFrame), problems = [];
  await frame();
  await draw();
  await frame();
  endMotion();
  const {canvas, camera, stage, scene: {focus}} = machine, {toX, toY} = projection(camera, stage);
  const [top, , , left] = stage.insets, bottom = stage.height - deskHeight();
  const x0 = toX(focus.x), x1 = toX(focus.x + focus.width), y0 = toY(focus.y), y1 = toY(focus.y + focus.height);
  const isFree = x0 > left - 1 && y0 > top - 1 && x1 < stage.width + 1 && y1 < bottom + 1;
  if (!isFree) problems.push(`the focus, ${[x0, y0, x1, y1]}, is not in the free part of ${stage.width}, ${bottom}`);
  if (Math.max(x1 - x0, y1 - y0) < 60) problems.push("the focus is small");
  const box = canvas.getBoundingClientRect(), isInWindow = ({left, top, right, bottom}) =>
    left >= 0 && top >= 0 && right < innerWidth + 1 && bottom < innerHeight + 1;
  if (!isInWindow(box)) problems.push("the stage is not in the window");
  for (const [x, y] of [[x0 + 1, y0 + 1], [x1 - 1, y1 - 1], [(x0 + x1) / 2, (y0 + y1) / 2]]) {
    const found = document.elementFromPoint(box.left + x, box.top + y);
    if (found !== canvas) problems.push(`${found?.outerHTML.slice(0, 80)} covers the focus`);
  }
  const words = document.querySelector("#view .words"), edges = words.getBoundingClientRect();
  for (const node of words.querySelectorAll("*")) {
    const {left, right, width} = node.getBoundingClientRect();
    const isCut = width && (left < edges.left - 1 || right > edges.right + 1);
    if (isCut) problems.push(`cut off: ${node.outerHTML.slice(0, 80)}`);
  }
  const canScroll = ["auto", "scroll"].includes(getComputedStyle(words).overflowY);
  if (words.scrollHeight > words.clientHeight + 1 && !canScroll) problems.push("the words are cut off");
  if (!isInWindow(edges) || words.clientHeight < 100) problems.push("the words are not in the window");
  const {scrollHeight, scrollWidth} = document.scrollingElement;
  if (scrollHeight > innerHeight || scrollWidth > innerWidth) problems.push("the page scrolls");
  return problems;
}"""  # fmt: skip


def test_the_focus_and_the_words_fit_at_every_size(calm_viewer):
    """From a phone to a large screen, also while presenting. What a stop is about was cut off, or below the window."""
    viewer, problems = calm_viewer, []
    viewer("() => void (document.documentElement.requestFullscreen = undefined)")
    for presenting, sizes in ((False, SIZES), (True, SIZES[::3])):
        if presenting:
            viewer("document.activeElement.blur()")
            viewer.press("p")
        for stop in STOPS:
            show_stop(viewer, stop, token=TOKEN)
            for width, height in sizes:
                viewer.page.set_viewport_size({"width": width, "height": height})
                found = viewer(AT_A_SIZE)
                problems += [(stop, width, height, presenting, problem) for problem in found]
    assert problems == []


def test_dragging_and_zooming_and_the_way_back(calm_viewer):
    viewer = show_stop(calm_viewer, "query", token=TOKEN)
    under_pointer = """([x, y]) => {
      const {canvas, camera, stage} = machine, {left, top} = canvas.getBoundingClientRect();
      const {fromX, fromY} = projection(camera, stage);
      return [fromX(x - left), fromY(y - top)];
    }"""
    camera, canvas = viewer("machine.camera"), viewer.find("machine").bounding_box()
    x, y = round(canvas["x"] + canvas["width"] / 2), round(canvas["y"] + 150)
    grasped = viewer(under_pointer, [x, y])
    viewer.page.mouse.move(x, y)
    viewer.page.mouse.down()
    viewer.page.mouse.move(x + 50, y + 20, steps=5)
    viewer.page.mouse.up()
    moved = viewer("machine.camera")
    assert moved["zoom"] == camera["zoom"] and viewer("machine.isFree")
    assert camera["x"] - moved["x"] == pytest.approx(50 / camera["zoom"])
    # It jumped by half the height of the desk, which is not drawn while the reader steers.
    assert viewer(under_pointer, [x + 50, y + 20]) == pytest.approx(grasped, abs=1e-6)
    viewer.page.mouse.wheel(0, -100)
    wait_until(lambda: viewer("machine.camera.zoom") > moved["zoom"])
    assert viewer(under_pointer, [x + 50, y + 20]) == pytest.approx(grasped, abs=1e-6)
    viewer.page.keyboard.press("Escape")
    assert viewer("machine.camera") == camera and not viewer("machine.isFree")
    viewer.find("machine-whole").click()
    whole = viewer("[machine.camera, fitCamera(wholeSheet(machine.sheet), machine.stage)]")
    assert whole[0] == whole[1] and viewer("deskHeight()") == 0
    viewer.find("machine-whole").focus()
    viewer.page.keyboard.press("Enter")  # and back
    assert viewer("machine.camera") == camera
    assert viewer("document.activeElement.dataset.testid") == "machine-whole"  # for the next key


def test_fingers(new_viewer, char):
    """One moves the sheet, two zoom. The page itself does neither."""
    viewer = new_viewer(char, width=390, reduced_motion="reduce", has_touch=True).open("tokens")
    show_stop(viewer, "machine", token=TOKEN)
    box, session = viewer.find("machine").bounding_box(), viewer.page.context.new_cdp_session(viewer.page)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def touch(kind: str, *points: tuple[float, float]) -> None:
        touched = [{"x": px, "y": py, "id": i} for i, (px, py) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})

    before = viewer("machine.camera")
    touch("touchStart", (x, y))
    for distance in range(10, 70, 10):
        touch("touchMove", (x + distance, y + distance))
    touch("touchEnd")
    wait_until(lambda: viewer("machine.isFree"))
    moved = viewer("machine.camera")
    assert before["x"] - moved["x"] == pytest.approx(60 / before["zoom"], rel=0.1)
    assert before["y"] - moved["y"] == pytest.approx(60 / before["zoom"], rel=0.1)
    touch("touchStart", (x - 20, y), (x + 20, y))
    for distance in range(25, 65, 5):
        touch("touchMove", (x - distance, y), (x + distance, y))
    touch("touchEnd")
    assert viewer("machine.camera.zoom") == pytest.approx(3 * moved["zoom"], rel=0.15)
    assert viewer("[scrollX, scrollY, visualViewport.scale]") == [0, 0, 1] and viewer.state("story") == [0]


# --- work -------------------------------------------------------------------------------------------------------------

COUNT_DRAWS = """() => {
  const {prototype} = CanvasRenderingContext2D, draw = prototype.drawImage;
  window.draws = 0;
  prototype.drawImage = function (...values) {
    draws++;
    return draw.apply(this, values);
  };
}"""
DRAWS = """isCached => {
  renderStage(); // creates the bitmaps
  if (!isCached) machine.sheet.overview = null;
  window.draws = 0;
  renderStage();
  return draws;
}"""


def test_an_overview_needs_few_draws(new_viewer, serve):
    """Of a model with the recipe's layers and heads. Other stops draw only what they show."""
    model = random_model(1, block_size=48, vocab_size=TOKENIZERS["char"].vocab_size, n_layer=3, n_head=4, n_embd=32)
    viewer = new_viewer(serve(model), reduced_motion="reduce").open("tokens")
    viewer(COUNT_DRAWS)
    for stop in STOPS[:-1]:
        show_stop(viewer, stop, token=TOKEN)
        whole = viewer("machine.sheet.layout.tiles.length")
        if stop == "machine":
            assert viewer(DRAWS, True) <= MAX_DRAWS["cached overview"]
            assert whole <= viewer(DRAWS, False) <= MAX_DRAWS["overview"]
        else:
            assert viewer(DRAWS, False) <= MAX_DRAWS["overview"]  # with those of the act
    assert show_stop(viewer, "vector", token=TOKEN)(DRAWS, False) < whole / 4  # the others are outside the stage


@pytest.mark.parametrize("reduced_motion", ["reduce", "no-preference"])
def test_motion(reduced_motion, new_viewer, char):
    """With reduced motion, each stop is one frame, and the first pass is skipped. A key ends it otherwise, too."""
    viewer = new_viewer(char, reduced_motion=reduced_motion).open("tokens")
    viewer("""() => {
      const render = renderStage;
      window.rendered = [];
      renderStage = elapsed => {
        rendered.push(elapsed ?? null);
        return render(elapsed);
      };
    }""")  # fmt: skip
    is_still = reduced_motion == "reduce"
    for stop in STOPS:
        viewer("window.rendered = []")
        viewer.show("story", story=STOPS.index(stop), token=TOKEN)
        viewer("async () => { for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame); }")
        frames = viewer("rendered")
        assert (frames == [None]) == is_still, (stop, frames)
        assert viewer("machine.isOverture") == (stop == "machine")
        assert viewer("machine.canvas.dataset.moving") == str(not is_still).lower()
        viewer("endMotion()")
        assert viewer("[machine.canvas.dataset.moving, machine.start]") == ["false", None]
        assert viewer("machine.camera") == viewer("fitCamera(machine.scene.focus, machine.stage)")


def test_the_first_pass_ends_at_a_press(new_viewer, char):
    viewer = new_viewer(char).open("story", token=TOKEN)
    wait_until(lambda: viewer("machine.isOverture && machine.start !== null"))
    viewer.page.mouse.click(5, 5)
    assert viewer("machine.start") is None
    settle(viewer.show("story", story=1, token=TOKEN))
    viewer.show("story", story=0, token=TOKEN)
    wait_until(lambda: viewer("machine.place.startsWith('machine ')"))
    assert not viewer("machine.isOverture")  # the pass runs once
    viewer.find("machine-play").click()
    assert viewer("machine.isOverture && machine.start !== null")  # and again on demand


# --- accessibility ----------------------------------------------------------------------------------------------------

REACHED = """() => {
  const {tiles} = machine.sheet.layout, reached = new Set(), render = renderStage, queue = [], names = new Set();
  renderStage = () => {};
  const visit = () => {
    const tile = machine.cursor[0];
    if (!reached.has(tile)) queue.push(tile);
    reached.add(tile);
    names.add(byId("machine-readout").textContent.split(":")[0]);
  };
  canvasKey("ArrowDown");
  visit();
  while (queue.length) {
    const tile = queue.shift();
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]) {
      machine.cursor = [tile, 0];
      canvasKey(key);
      visit();
    }
  }
  renderStage = render;
  const missing = tiles.filter(tile => !reached.has(tile)).map(({row, column}) => `${row} of column ${column}`);
  return {missing, count: tiles.length, names: names.size};
}"""


def test_arrows_reach_each_tile(calm_viewer):
    viewer = show_stop(calm_viewer, "machine", token=TOKEN)
    reached = viewer(REACHED)
    assert reached["missing"] == [] and reached["names"] == reached["count"]


def test_arrows_move_along_the_wires(calm_viewer):
    """They do not turn the pages, and Enter opens the view of the tile."""
    viewer = show_stop(calm_viewer, "query", token=TOKEN)
    viewer.find("machine").focus()
    run, readout = viewer.run(), viewer.find("machine-readout")
    name = viewer(f"loadContext().then(({{names}}) => names[{TOKEN}])")
    assert readout.get_attribute("aria-live") == "polite"
    assert viewer.find("machine").get_attribute("aria-label").startswith(f"The pass of {TOKEN} ")
    for key, place, values in (
        ("ArrowDown", "E, embedding", run.stream[0, TOKEN]),
        ("ArrowDown", "query of head 0.0", run.layer(0).q[0, TOKEN]),
        ("ArrowDown", "key of head 0.0", run.layer(0).k[0, TOKEN]),
        ("ArrowUp", "query of head 0.0", run.layer(0).q[0, TOKEN]),
        ("ArrowUp", "E, embedding", run.stream[0, TOKEN]),
    ):
        viewer.page.keyboard.press(key)
        largest = int(np.abs(values).argmax())
        shown = readout.inner_text()
        assert shown.startswith(f"{place}, {name}: {len(values)} numbers, the largest is number {largest}, ")
        value = float(shown.rsplit(", ", 1)[1].replace("\N{MINUS SIGN}", "-"))
        assert value == pytest.approx(values[largest], rel=1e-3)
    viewer.page.keyboard.press("ArrowLeft")
    assert f", {TOKEN - 1} " in readout.inner_text() and viewer.state("story") == [3]
    viewer.page.keyboard.press("Escape")
    assert readout.inner_text() == "" and viewer("machine.cursor") is None
    viewer.page.keyboard.press("ArrowDown")
    viewer.after(lambda: viewer.page.keyboard.press("Enter"))
    assert viewer.state("view", "token") == ["stream", TOKEN]


def test_axe_finds_nothing_on_a_phone(new_viewer, char):
    """With the terms and the pass in words open."""
    viewer = new_viewer(char, width=390, reduced_motion="reduce").open("tokens")
    viewer.page.set_viewport_size({"width": 390, "height": 844})
    problems = []
    for stop in STOPS:
        show_stop(viewer, stop, token=TOKEN)
        viewer("document.querySelectorAll('#view details').forEach(node => node.open = true)")
        problems += [(stop, violation) for violation in axe_violations(viewer)]
    assert problems == []
