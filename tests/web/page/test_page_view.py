"""The viewer in a browser, compared with NumPy.

The test of a view is a function with @shows("its-id"), which compares the tables of its pictures with a NumpyRun. It
runs for each kind of model, after one weight was changed. Every view in the menu needs a test.
"""

import csv
import io
import math
import re
import shutil
import struct
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from folio import UserError
from folio.base import settings
from folio.data.tokenizer import CharTokenizer
from folio.decoding.prompts import encode_prompt
from folio.decoding.sampling import Sampling, next_token_probabilities
from folio.experiments.static_page import BASE_STYLE
from folio.web.viewer import PAGE
from model import GPT, GPTConfig
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyGPT, NumpyRun, assert_same, entropy
from tests.support.viewed_models import STRANGE, TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import (
    Place,
    Viewer,
    check_attention_table,
    check_output,
    check_tokens,
    in_browser,
    serving,
)
from tests.support.waiting import wait_until
from tools.bench import viewer as bench_view
from tools.bench.viewer import ViewBenchConfig
from tools.view import ViewConfig

# --- numbers of the views ---------------------------------------------------------------------------------------------

Check = Callable[[Viewer, NumpyRun, Place], None]
CHECKS: dict[str, Check] = {
    "tokens": check_tokens, "attention-table": check_attention_table, "output": check_output,
}  # fmt: skip


def shows(view: str) -> Callable[[Check], Check]:
    """Register a function that compares the pictures of a view with NumPy."""

    def register(check: Check) -> Check:
        CHECKS[view] = check
        return check

    return register


@shows("looking-back")
def check_looking_back(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    weights = run.layer(place.layer).weights[place.head]
    assert_same(viewer.matrix("looking-back"), weights)
    assert_same(viewer.column("arcs", f"head {place.head}"), weights[place.token])
    viewer.page.get_by_label("arcs of all heads").check()
    viewer.wait()
    for head, head_weights in enumerate(run.layer(place.layer).weights):
        assert_same(viewer.column("arcs", f"head {head}"), head_weights[place.token])
    viewer.page.get_by_label("arcs of all heads").uncheck()
    viewer.wait()


@shows("attention-row")
def check_attention_row(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, D = run.layer(place.layer), run.gpt.config.n_embd // run.gpt.config.n_head
    scores = layer.scores[place.head, place.token]
    bias = [] if layer.bias is None else [layer.bias[place.head, place.token]]
    masked = np.where(run.hidden_keys[place.token], -np.inf, scores + sum(bias))
    weights = layer.weights[place.head, place.token]
    columns = [scores * math.sqrt(D), scores, *bias, masked, np.exp(masked - masked.max()), weights]
    table = np.array([row[:1] + row[2:] for row in viewer.table("attention-row")["rows"]], dtype=np.float64)
    for shown, expected in zip(table.T, [np.arange(len(run.ids)), *columns], strict=True):
        assert_same(shown, expected)


# --- tests of the views -----------------------------------------------------------------------------------------------


@in_browser
def test_views_equal_numpy(new_viewer, served, seed):
    """After one weight was changed."""
    viewer, place = new_viewer(served), Place()
    with served.perturbed(seed) as model:
        run = NumpyGPT(model).run(viewer.open("tokens", token=place.token).column("tokens", "id"))
        for view, check in CHECKS.items():
            check(viewer.show(view, **vars(place)), run, place)


@in_browser
@pytest.mark.parametrize("position", ["learned", "alibi"])
def test_views_of_several_documents_equal_numpy(position, new_viewer, tmp_path):
    """With a mask of documents. The page showed scores of the other documents, and positions from the first one."""
    tokenizer, text = CharTokenizer("abcdef", eot=True), "abc<|endoftext|>fed<|endoftext|>abcdef"
    model = random_model(1, block_size=48, vocab_size=7, n_embd=32, position=position, document_token=tokenizer.eot)
    run, place = NumpyGPT(model).run(encode_prompt(tokenizer, text).ids), Place(layer=1, head=0, token=10)
    with serving([save_run(tmp_path / "run", {1: model}, tokenizer, {})], text) as served:
        viewer = new_viewer(served).open("tokens", token=place.token)
        assert viewer.column("tokens", "id") == run.ids.tolist()
        for view in viewer.views():
            viewer.show(view, **vars(place))
            assert not viewer.page.locator("#view .error:not(:empty)").count(), view
            if view in CHECKS and view != "training-examples":
                CHECKS[view](viewer, run, place)
        masked = viewer.show("story", story=4, token=place.token).column("story-mask", "Masked")
        assert np.isinf(masked).tolist() == run.hidden_keys[:11, :11].flatten().tolist()
        if position == "learned":
            assert "position 2," in viewer.show("story", story=2, token=place.token).page.locator("#view").inner_text()


SWITCHES = {  # by kind of model: state in the link, arguments of NumpyGPT
    "char": (dict(mask="after"), dict(mask="after")),
    "bpe": (dict(mask="off", scale=0), dict(mask="off", scale=False)),
    "rotary": (dict(heads_off="0.1,1.0", mlps_off="0"), dict(heads_off=((0, 1), (1, 0)), mlps_off=(0,))),
}


@in_browser
@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_equal_numpy(kind, new_viewer, servers):
    """In the views of one head and of the output."""
    state, switches = SWITCHES[kind]
    viewer, place = new_viewer(servers(kind)), Place()
    state = {**vars(place), **state}
    ids = viewer.open("looking-back", **state)("loadContext().then(context => context.ids)")
    run = NumpyGPT(viewer.served.provider.models[0].model, **switches).run(ids)
    CHECKS["looking-back"](viewer, run, place)
    viewer.show("attention-table", **state)
    assert_same(viewer.matrix("scores"), run.layer(place.layer).scores[place.head])
    assert_same(viewer.matrix("weights"), run.layer(place.layer).weights[place.head])
    viewer.show("attention-row", **state)
    assert_same(viewer.column("attention-row", "weight"), run.layer(place.layer).weights[place.head, place.token])
    if "mask" in switches:  # the future is visible
        assert np.isfinite(viewer.column("attention-row", "masked")).all()
    CHECKS["output"](viewer.show("output", **state), run, place)


@in_browser
def test_tables_show_the_exported_numbers(char_viewer):
    """Rounded to four digits."""
    compared = 0
    for view in char_viewer.show("tokens").views():
        for title, shown, exact in char_viewer.show(view, token=20, layer=1)(
            """() => Array.from(document.querySelectorAll("#view figure")).flatMap(figure => {
              const {columns, rows} = figure.table(), table = figure.querySelector("table");
              const titles = table && Array.from(table.querySelectorAll("thead th"), th => th.textContent);
              if (!table || titles.join() !== columns.join()) return [];
              return Array.from(table.querySelectorAll("tbody tr")).flatMap((tr, i) => Array.from(tr.cells, (td, j) =>
                [`${figure.dataset.testid}, ${columns[j]}`, td.textContent, rows[i][j]]));
            })"""
        ):
            if isinstance(exact, str) or math.isnan(exact):
                continue
            text = shown.replace("\N{MINUS SIGN}", "-").replace("∞", "inf").replace(",", "")
            assert text != "" and float(text) == pytest.approx(exact, rel=6e-4, abs=1e-30), title
            compared += 1
    assert compared > 500


@in_browser
def test_heat_maps_have_the_colors_of_their_numbers(char_viewer):
    """Check the pixels."""
    char_viewer.show("attention-table", token=9)
    for picture, scale in (("scores", "signed"), ("masked", "signed"), ("weights", "sequential")):
        numbers = char_viewer.matrix(picture)
        biased = np.abs(char_viewer.matrix("scores")).max()  # learned positions have no bias
        values = numbers / biased if scale == "signed" else numbers
        expected = np.where(np.isfinite(numbers), values, math.nan)
        pixels, colors = char_viewer(
            """([id, scale, rows]) => {
              const canvas = document.querySelector(`figure[data-testid="${id}"] .heat canvas`);
              const {width, height} = canvas;
              return [Array.from(canvas.getContext("2d").getImageData(0, 0, width, height).data),
                rows.map(row => row.map(x => Number.isNaN(x) ? [208, 212, 218] : colorOf(scale, x)))];
            }""",
            [picture, scale, expected.tolist()],
        )
        T = len(numbers)
        shown = np.array(pixels).reshape(T, T, 4)
        assert (shown[..., 3] == 255).all() and np.abs(shown[..., :3] - np.array(colors)).max() <= 1


@in_browser
def test_views_of_one_and_two_tokens(char_viewer):
    views = char_viewer.show("tokens").views()
    for ids in ("5,7", "5"):
        for view in views:
            char_viewer.show(view, ids=ids)
            assert char_viewer.find("strip").locator(".token").count() == len(ids.split(","))
            assert not char_viewer.page.locator("#view .error:not(:empty)").count(), char_viewer.page.locator(
                "#view"
            ).inner_text()
    assert char_viewer.show("attention-table", ids="5").matrix("weights").tolist() == [[1.0]]


# --- the page around the views ----------------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("color", ["loss", "rank", "entropy"])
def test_colors_of_the_strip(color, char_viewer):
    char_viewer.show("tokens")
    char_viewer.find("color").select_option(color)
    char_viewer.wait()
    run = NumpyGPT(char_viewer.served.provider.models[0].model).run(char_viewer.column("tokens", "id"))
    V = char_viewer("pieces.length")
    blind = math.log(V)  # the loss of equal probabilities
    values = {
        "loss": run.losses / blind,
        "rank": np.log2(1 + run.ranks) / math.log2(V),
        "entropy": run.entropies[:-1] / blind,
    }
    shown = char_viewer("Array.from(document.querySelectorAll('#strip .token'), token => token.style.background)")
    expected = char_viewer("values => values.map(x => css(colorOf('sequential', x)))", values[color].tolist())
    numbers = [list(map(int, re.findall(r"\d+", text))) for text in [*shown, *expected]]
    assert numbers[0] == [255, 255, 255]  # the first token has no prediction
    assert np.abs(np.subtract(numbers[1 : len(shown)], numbers[len(shown) :])).max() <= 1


@in_browser
def test_hovering_over_a_token_shows_its_attention(char_viewer):
    char_viewer.show("looking-back", layer=1, head=2, token=30, shade="sqrt")
    weights = char_viewer.matrix("looking-back")
    for query in (41, 7, 0):
        char_viewer.find(f"token-{query}").hover()
        text = char_viewer.find("looking-back-readout").text_content()
        best = int(weights[query].argmax())
        percent = re.search(rf"\s{best} \S+ ([\d.]+)%", text)[1]
        assert text.startswith(f"{query} ") and float(percent) == pytest.approx(100 * weights[query, best], rel=6e-3)
        shown = char_viewer("Array.from(document.querySelectorAll('#view .token'), token => token.style.background)")
        expected = char_viewer("row => row.map(x => css(colorOf('sequential', Math.sqrt(x))))", weights[query].tolist())
        assert [re.sub(r"\s", "", color) for color in shown] == expected


@in_browser
def test_links_reproduce_views(char_viewer, new_viewer, char):
    char_viewer.show("tokens")
    char_viewer.page.locator("#text").fill("To be? That is a question.")
    char_viewer("document.getElementById('text').blur()")
    char_viewer.page.wait_for_timeout(300)  # the page waits for the end of typing
    char_viewer.wait()
    char_viewer.find("strip-12").click()
    char_viewer.wait().find("color").select_option("entropy")
    char_viewer.wait().page.get_by_role("link", name="What a token attends to").click()
    char_viewer.wait().find("head-0-2").click()
    char_viewer.wait().page.get_by_label("hide the first token").check()
    char_viewer.wait().page.get_by_label("colors:").select_option("row")
    char_viewer.wait().press("ArrowDown", ",")
    assert char_viewer.state("view", "layer", "head", "token", "step", "color", "shade", "hide_first") == [
        "looking-back", 1, 2, 12, 100, "entropy", "row", 1,
    ]  # fmt: skip
    other = new_viewer(char).follow(char_viewer.page.url)
    for part in ("#view", "#strip", "#menu", "#checkpoints", "#model-facts"):
        assert other.page.locator(part).inner_html() == char_viewer.page.locator(part).inner_html()
    assert other.page.locator("#text").input_value() == "To be? That is a question."
    for picture in char_viewer.pictures():
        assert other.table(picture) == char_viewer.table(picture)


@in_browser
def test_sliders_persist_in_other_views(char_viewer):
    """Menu links had the values from before a slider was moved."""
    char_viewer.show("output", token=5)
    char_viewer.find("slider-temperature").fill("0.5")
    char_viewer.find("slider-min_p").fill("0.1")
    for go, view in (
        (char_viewer.page.get_by_role("link", name="Tokens", exact=True).click, "tokens"),
        (char_viewer.page.go_back, "output"),
    ):
        drawn = char_viewer("drawing")
        go()
        assert char_viewer.wait(drawn).state("view", "temperature", "min_p", "token") == [view, 0.5, 0.1, 5]


@in_browser
def test_going_back_restores_the_initial_text(char_viewer):
    """A URL without a text was treated as an empty text."""
    char_viewer.follow(char_viewer.served.url)
    char_viewer.find("story-next").click()
    char_viewer.wait().page.go_back()
    assert char_viewer.wait().page.locator("#text").input_value() == TEXT
    assert char_viewer.find("strip").locator(".token").count() == len(TEXT)
    char_viewer.page.locator("#text").fill("")
    char_viewer.page.wait_for_timeout(300)
    char_viewer.wait().follow(char_viewer.page.url)
    assert char_viewer.page.locator("#text").input_value() == ""


@in_browser
def test_going_back_restores_the_text_before_a_typed_change(new_viewer, char):
    """Keys of one change share an entry of the history. The text field keeps the focus."""
    viewer = new_viewer(char).open("tokens", text="To be")
    box, entries = viewer.page.locator("#text"), viewer("history.length")
    box.focus()
    for text in ("That is", "question"):
        viewer.page.wait_for_timeout(1600)
        box.select_text()
        box.press_sequentially(text, delay=300)  # the page is drawn between two keys
        wait_until(lambda text=text: viewer.state("text") == [text])
        viewer.wait()
    assert viewer("history.length") == entries + 2
    for text in ("That is", "To be"):
        drawn = viewer("drawing")
        viewer.page.go_back()
        assert viewer.wait(drawn).state("text") == [text] and box.input_value() == text
    assert viewer("document.activeElement.id") == "text"


@in_browser
def test_the_text_is_in_one_line_until_it_is_edited(char_viewer):
    """The box showed only the first line, above tokens of a later one."""
    box = char_viewer.show("tokens", text="to be,\nor not").page.locator("#text")
    assert box.input_value() == "to be,⏎ or not"
    box.focus()
    assert box.input_value() == "to be,\nor not"
    top, token = (char_viewer.page.locator(place).bounding_box() for place in ("#text", "#strip"))
    assert token["y"] >= top["y"] + top["height"]  # the tokens are not covered
    drawn = char_viewer("drawing")
    box.press_sequentially("!")
    assert char_viewer.wait(drawn).state("text") == ["to be,\nor not!"]
    char_viewer("document.activeElement.blur()")
    assert box.input_value() == "to be,⏎ or not!"


@in_browser
def test_a_click_after_typing_is_not_lost(char_viewer):
    """The text field shrinks when it loses the focus. The page must not move before the button is released."""
    char_viewer.show("looking-back", layer=0, head=0, text=TEXT)
    char_viewer.page.locator("#text").focus()
    char_viewer.find("head-0-2").click()
    assert char_viewer.wait().state("head") == [2]


@in_browser
def test_keyboard_navigation(char_viewer):
    char_viewer.show("looking-back", token=3)
    moves = {
        "ArrowLeft": ("token", 2), "ArrowRight": ("token", 3), "ArrowDown": ("layer", 1), "ArrowUp": ("layer", 0),
        "]": ("head", 1), "[": ("head", 0), ",": ("step", 100), ".": ("step", 200),
    }  # fmt: skip
    for key, (name, value) in moves.items():
        assert char_viewer.press(key).state(name) == [value], key
    assert char_viewer.press("ArrowUp", "[", ".", *["ArrowLeft"] * 5).state("layer", "head", "step", "token") == [
        0, 0, 200, 0,
    ]  # fmt: skip
    assert char_viewer.press(*["ArrowDown"] * 3, *["]"] * 5, *[","] * 5).state("layer", "head", "step") == [1, 3, 0]
    views = [view for view in char_viewer.views() if view != "story"]  # whose keys turn its pages
    char_viewer.show(views[0])
    visited = [char_viewer.state("view")[0], *(char_viewer.press("PageDown").state("view")[0] for _ in views)]
    assert visited == [*views, views[-1]]
    box = char_viewer.page.locator("#text")
    box.focus()
    before = char_viewer.state("token", "layer", "head", "step", "view")
    char_viewer.press("ArrowLeft", "[", ".")
    assert char_viewer.state("token", "layer", "head", "step", "view") == before  # not while typing


@in_browser
def test_keys_before_the_model_is_loaded_are_ignored(new_viewer, char):
    """Keys caused an error."""
    viewer = new_viewer(char)
    viewer.page.route("**/ask", lambda route: (time.sleep(0.2), route.continue_()))
    viewer.page.goto(char.url)
    viewer.page.keyboard.press("ArrowLeft")
    viewer.wait()
    viewer.page.unroute("**/ask")


@in_browser
def test_redrawing_preserves_the_focus(char_viewer):
    """The focus was lost, so a setting could not be changed twice with the keyboard."""
    char_viewer.show("looking-back", layer=0)
    layer = char_viewer.page.get_by_role("combobox", name="layer")
    layer.focus()
    layer.select_option("1")
    assert char_viewer.wait()("document.activeElement.labels[0].firstChild.data.trim()") == "layer"
    char_viewer.find("head-1-2").focus()
    char_viewer.press("Enter")
    assert char_viewer.state("head") == [2]
    assert char_viewer("document.activeElement.dataset.testid") == "head-1-2"
    char_viewer.find("color").focus()
    char_viewer.press("ArrowDown")
    assert char_viewer("document.activeElement.dataset.testid") == "color"


@in_browser
def test_the_checkpoint_slider(char_viewer):
    char_viewer.show("tokens", token=5)
    ids = char_viewer.column("tokens", "id")
    for index, step in enumerate((0, 10, 100, 200)):
        char_viewer.find("checkpoint").fill(str(index))
        assert char_viewer.wait().state("step") == [step]
        shown = "step 200" if step == 200 else f"step {step} of 200"
        assert char_viewer.page.locator("#checkpoints output").inner_text() == shown
        run = NumpyGPT(build_model("char", seed=step)).run(ids)
        assert_same(char_viewer.column("tokens", "loss (nats)"), [math.nan, *run.losses])
    char_viewer.show("looking-back", step=10, layer=1)
    assert_same(char_viewer.matrix("looking-back"), NumpyGPT(build_model("char", seed=10)).run(ids).layer(1).weights[0])


@in_browser
def test_the_newest_checkpoint_is_followed(new_viewer, tmp_path):
    """While the run is training. Selecting another checkpoint ends it."""
    fcntl = pytest.importorskip("fcntl")
    folder, models = tmp_path / "run", {step: build_model("char", seed=step) for step in (100, 200, 300, 400)}
    run = save_run(folder, {100: models[100]}, TOKENIZERS["char"], {})
    with serving([run]) as served, open(folder / ".lock", "w") as lock:
        assert not new_viewer(served).open("tokens").find("follow").is_visible()
        fcntl.flock(lock, fcntl.LOCK_EX)
        viewer = new_viewer(served).open("tokens")
        viewer.find("follow").check()
        save_run(folder, {200: models[200]}, TOKENIZERS["char"], {})
        wait_until(lambda: viewer.state("step") == [200])
        assert "follow=1" in viewer.page.url
        expected = NumpyGPT(models[200]).run(viewer.wait().column("tokens", "id")).losses
        assert_same(viewer.column("tokens", "loss (nats)"), [math.nan, *expected])
        viewer.show("run", follow=1, step=200)
        save_run(folder, {300: models[300]}, TOKENIZERS["char"], {})
        wait_until(lambda: viewer.state("step") == [300])
        viewer.wait().find("checkpoint").fill("0")
        assert viewer.wait().state("step", "follow") == [100, 0] and not viewer.find("follow").is_checked()
        save_run(folder, {400: models[400]}, TOKENIZERS["char"], {})
        wait_until(lambda: viewer("info.models[0].checkpoints.at(-1)") == 400)
        assert viewer.wait().state("step") == [100]
        fcntl.flock(lock, fcntl.LOCK_UN)
        wait_until(lambda: not viewer.find("follow").is_visible())


@in_browser
def test_the_latest_change_wins(char_viewer):
    """Late answers do not replace newer ones."""
    char_viewer.show("tokens")
    for step in (0, 200, 10, 100) * 3:
        char_viewer("step => void change({step})", step)
    assert char_viewer.wait().page.locator("#checkpoints output").inner_text() == "step 100 of 200"
    run = NumpyGPT(build_model("char", seed=100)).run(char_viewer.column("tokens", "id"))
    assert_same(char_viewer.column("tokens", "loss (nats)"), [math.nan, *run.losses])


@in_browser
def test_the_cache_of_answers_has_a_limit(new_viewer, char):
    """The page cached 64 answers of any size: 540 MB for heads of 1,024 tokens."""
    sizes = new_viewer(char).open("tokens")(
        """async () => {
          let count = 0;
          provider = {ask: async ({size}) => (count++, {facts: {}, tensors: {x: {data: new Uint8Array(size)}}})};
          const totals = [];
          for (const name of ["a", "b", "c", "b", "d", "b", "e"]) {
            await ask({name, size: name === "e" ? 9e7 : 3e7});
            totals.push(Array.from(answers.values()).reduce((sum, answer) => sum + answer.bytes, 0));
          }
          return [count, ...totals];
        }"""
    )
    count, *totals = sizes
    assert count == 5 and max(totals[:-1]) <= 2**26 and 9e7 <= totals[-1] < 1e8  # "b" was requested once; "e" is last


@in_browser
def test_long_texts_are_cut(char_viewer):
    char_viewer.show("tokens", text=TEXT * 3 + "#€")
    note = char_viewer.page.locator("#input-note").inner_text()
    assert "2 characters are not in the vocabulary and are skipped: # €." in note
    assert f"The first 48 of {3 * len(TEXT)} tokens are shown." in note
    assert len(char_viewer.table("tokens")["rows"]) == 48
    assert char_viewer.show("tokens", text=TEXT).page.locator("#input-note").inner_text() == ""


@in_browser
def test_unknown_characters_are_named(char_viewer):
    """The note was "1 characters are not in the vocabulary"."""
    for text, note in (
        ("To\u200b", "1 character is not in the vocabulary and is skipped: \\u200b."),
        ("##To#", "3 characters are not in the vocabulary and are skipped: #."),
        (
            "#$%^*()+=",
            "9 characters are not in the vocabulary and are skipped: # $ % ^ * ( ) + … "
            "The prompt is empty: the model starts from a line break.",
        ),
    ):
        assert char_viewer.show("tokens", text=text).page.locator("#input-note").inner_text().strip() == note


@in_browser
@pytest.mark.parametrize(
    "state, message",
    [
        (dict(step=7), "has no checkpoint of step 7"),
        (dict(ids="1,99"), "ids must be a list of token ids"),
        (dict(ids=",".join(["1"] * 49)), "the limit is 48"),
        (dict(mask="on"), "mask='on'"),
        (dict(heads_off="9.9"), "the model has 2 layers of 4 heads"),
    ],
    ids=str,
)
def test_invalid_links_show_an_error(state, message, char_viewer):
    char_viewer.show("tokens", **state)
    assert message in char_viewer.page.get_by_role("alert").inner_text()
    assert len(char_viewer.problems) == 1 and "400" in char_viewer.problems.pop()  # the browser reports the status
    char_viewer.page.get_by_role("link", name="Reset this view").click()
    char_viewer.page.get_by_test_id("view-tokens").wait_for()


@in_browser
def test_without_the_server_no_link_is_offered(new_viewer, char):
    """The link would fail, too."""
    viewer = new_viewer(char).open("tokens")
    viewer.page.route("**/ask", lambda route: route.abort())
    viewer("void change({text: 'To'})")
    assert "Is tools/view.py still running?" in viewer.wait().page.get_by_role("alert").inner_text()
    assert not viewer.page.locator("#view a").count()
    viewer.page.unroute("**/ask")
    viewer("void change({text: 'To be'})")
    assert len(viewer.wait().column("tokens", "id")) == 5
    assert all("ERR_FAILED" in problem for problem in viewer.problems)
    viewer.problems.clear()


@in_browser
def test_the_page_works_after_an_invalid_first_link(new_viewer, char):
    viewer = new_viewer(char).open("tokens", step=7)
    assert len(viewer.problems) == 1 and "400" in viewer.problems.pop()
    viewer.page.get_by_role("link", name="Reset this view").click()
    viewer.page.get_by_role("link", name="Next token").wait_for()
    assert viewer.open("tokens", layer=-3, head=99, token=10**9).find("tokens").count() == 1


@in_browser
def test_appending_to_a_full_context_drops_the_oldest_tokens(char_viewer):
    """The page asked for one token more than the context has, which broke every view."""
    ids = [1 + i % 20 for i in range(48)]
    char_viewer.show("output", ids=",".join(map(str, ids)))
    best = char_viewer.table("distribution")["rows"][0][0]
    before = char_viewer("drawing")
    char_viewer.find("distribution").locator("tbody tr").first.click()
    char_viewer.wait(before)
    assert char_viewer.state("ids", "token") == [",".join(map(str, [*ids[24:], best])), 24]
    before = char_viewer("drawing")
    char_viewer.page.go_back()
    char_viewer.wait(before)
    assert char_viewer.state("ids") == [",".join(map(str, ids))]


@in_browser
def test_a_click_selects_a_number_of_the_query_key_or_value(char_viewer):
    """A click on a key or a value selected the query."""
    char_viewer.show("qkv", token=5)
    char_viewer.find("qkv-numbers").locator("tbody tr").nth(3).locator("td").nth(2).click()
    assert char_viewer.wait().state("qkv_part", "head_channel") == [1, 3]


@in_browser
def test_tables_show_that_rows_are_hidden(char_viewer):
    """Tables scrolled to the selected row even if it was visible, and did not show that they had scrolled."""
    for token, classes in ((3, "scroll below"), (26, "scroll above below"), (41, "scroll above")):
        char_viewer.show("tokens", token=token, text=TEXT)
        table = char_viewer.find("tokens").locator(".scroll")
        wait_until(lambda table=table, classes=classes: table.get_attribute("class") == classes)
        assert (table.evaluate("table => table.scrollTop") > 0) == ("above" in classes)
        shadow = table.locator("th").first.evaluate("th => getComputedStyle(th, '::after').backgroundImage")
        assert shadow.startswith("linear-gradient") == ("above" in classes)
        row, box = (one.bounding_box() for one in (table.locator("tr.selected"), table))
        assert box["y"] < row["y"] and row["y"] + row["height"] <= box["y"] + box["height"]


@in_browser
@pytest.mark.parametrize("last", [1000, 10_000, 2_000_000])
def test_the_labels_of_a_chart_are_not_clipped(last, char_viewer):
    """At 390 pixels, the last label of a run's steps was "10,0"."""
    script = """last => {
      const chart = lineChart([{name: "a", points: [[0, 0], [last, 1]]}], {width: 330});
      byId("view").append(chart);
      const right = Math.max(...Array.from(chart.querySelectorAll("text"), node => node.getBBox()).map(
        ({x, width}) => x + width));
      chart.remove();
      return [right, chart.querySelectorAll("text").length];
    }"""
    right, count = char_viewer.show("tokens")(script, last)
    assert right <= 330 and count > 8


@in_browser
def test_row_headings_of_the_lens_stay_in_their_rows(char_viewer):
    """They stuck to the top of a table that was scrolled down, over its heading."""
    headings = char_viewer.show("stream").page.locator(".lens tbody th")
    assert headings.evaluate_all("nodes => [...new Set(nodes.map(node => getComputedStyle(node).top))]") == ["auto"]


@in_browser
def test_small_numbers(char_viewer):
    """They were "0.00000258%", "0.0000" in checks, and 1.000 for both ends of an interval."""
    char_viewer.show("tokens")
    shown = char_viewer("[1, 0.5, 1e-4, 9e-5, 2.58e-8, 0].map(percent)")
    assert shown == ["100%", "50.0%", "0.0100%", "<0.01%", "<0.01%", "0%"]
    assert char_viewer("checkLine('sum', -3e-7).textContent") == "✓ sum: 3.000e\N{MINUS SIGN}7"
    char_viewer.show("output", temperature=0)
    bars = char_viewer.find("distribution").locator("svg text.soft")
    assert bars.all_text_contents() == ["100%"]  # other tokens cannot be sampled
    char_viewer.show("loop", token=8, temperature=0.1, top_k=0)
    intervals = [row[-2:] for row in char_viewer.table("draw")["rows"]]
    cells = (
        char_viewer.find("draw")
        .locator("tbody tr")
        .evaluate_all("rows => rows.map(row => Array.from(row.cells, cell => cell.textContent).slice(-2))")
    )
    compared = 0
    for (begin, end), shown in zip(intervals, cells, strict=False):
        assert (shown[0] == shown[1]) == (begin == end)
        compared += f"{begin:.4g}" == f"{end:.4g}" and begin < end
    assert compared > 3


# --- text -------------------------------------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_text_cannot_inject_markup(kind, new_viewer, servers):
    viewer = new_viewer(servers(kind))
    viewed = viewer.served.provider.models[0]
    ids = viewed.tokenizer.encode(STRANGE).tolist()[:48]
    scripts = viewer.open("tokens", text=STRANGE)("document.scripts.length")
    assert viewer.column("tokens", "token") == [viewed.piece(token) for token in ids]
    for view in viewer.views():
        viewer.show(view, text=STRANGE, layer=1, token=1)
        assert viewer("document.scripts.length") == scripts and not viewer.page.locator("b, #view script").count()
        text = viewer("document.body.innerText")
        assert not re.search(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e]", text), view
    shown = viewer("Array.from(document.querySelectorAll('#strip .token'), token => token.textContent)")
    assert len(shown) == len(ids) and all(shown)
    for token, label in zip(ids, shown, strict=True):
        piece = viewed.piece(token)
        if piece.isascii() and piece.isprintable():
            assert label == piece


@in_browser
def test_incomplete_characters_are_shown_as_bytes(new_viewer, servers):
    """The column of bytes had the bytes of the escaped text."""
    viewer = new_viewer(servers("bpe")).open("tokens", text="é")
    assert viewer.column("tokens", "token") == ["\\xc3", "\\xa9"]
    assert viewer.column("tokens", "bytes") == ["c3", "a9"]
    viewer.open("tokens", ids="261,195,169")  # the end-of-text token, and é
    assert viewer.column("tokens", "token")[0] == "<|endoftext|>" and viewer.column("tokens", "bytes")[0] == ""
    assert viewer.page.locator("#text").input_value() == "<|endoftext|>é"
    assert viewer("['constructor', 'toString'].map(visible)") == ["constructor", "toString"]  # were functions


@in_browser
def test_typed_text_is_shown(char_viewer):
    char_viewer.show("tokens", text="To")
    char_viewer.page.locator("#text").fill("</script>")
    char_viewer.page.wait_for_timeout(300)
    assert char_viewer.wait().column("tokens", "token") == list("</script>")
    assert char_viewer.find("strip").inner_text() == "</script>"


@in_browser
def test_a_click_on_the_distribution_appends_the_token(new_viewer, served):
    viewer = new_viewer(served).open("output", token=10)
    ids = viewer("loadContext().then(context => context.ids)")
    best = viewer.column("distribution", "id")[0]
    viewer.find("distribution").locator("tbody tr").first.click()
    assert viewer.wait().state("ids", "token") == [",".join(map(str, [*ids[:11], best])), 11]
    run = NumpyGPT(viewer.served.provider.models[0].model).run([*ids[:11], best])
    CHECKS["output"](viewer, run, Place(token=11))


# --- exports ----------------------------------------------------------------------------------------------------------


@in_browser
def test_pictures_are_exported(char_viewer):
    viewer, kinds = char_viewer, set()
    for view in viewer.views():
        viewer.show(view, text=STRANGE + TEXT[:20], layer=1, token=24)
        assert viewer.pictures() or view in ("memorized", "run"), view  # these need files of the run
        for picture in viewer.pictures():
            table = viewer.table(picture)
            buttons = {button.inner_text(): button for button in viewer.find(picture).locator(".exports button").all()}
            files = {kind: viewer.exported(button) for kind, button in buttons.items()}
            heads, *rows = csv.reader(io.StringIO(files["CSV"].decode(), newline=""))
            assert heads == list(map(str, table["columns"]))
            for row, expected in zip(rows, table["rows"], strict=True):
                for cell, value in zip(row, expected, strict=True):
                    if isinstance(value, str):
                        assert cell == value
                    else:
                        assert float(cell) == value or (math.isnan(float(cell)) and math.isnan(value))
            root = xml.etree.ElementTree.fromstring(files["SVG"])
            texts = "".join(root.itertext())
            assert (
                root.tag == "{http://www.w3.org/2000/svg}svg"
                and viewer.find(picture).locator("h3").inner_text() in texts
            )
            assert files["PNG"].startswith(b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", files["PNG"][16:24])
            assert width == 2 * math.ceil(float(root.get("width"))) and height == 2 * math.ceil(
                float(root.get("height"))
            )
            for kind in files.keys() - kinds:
                viewer.page.wait_for_timeout(200)  # Chromium ignores downloads in quick succession
                assert viewer.download(buttons[kind]) == files[kind]
                kinds.add(kind)
    assert kinds == {"CSV", "SVG", "PNG"}


@in_browser
def test_exported_views_work_offline(char_viewer, browser, tmp_path):
    viewer, file = char_viewer, tmp_path / "view.html"
    testids = "Array.from(document.querySelectorAll('#view [data-testid]'), node => node.dataset.testid)"
    context = browser.new_context(offline=True)
    page, problems = context.new_page(), []
    page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
    link = viewer.page.get_by_role("link", name="This view as HTML")
    for view in viewer.views():
        viewer.show(view, text=STRANGE + TEXT[:20], layer=1, token=24)
        file.write_bytes(viewer.exported(link))
        page.goto(file.as_uri())
        assert page.evaluate(testids) == viewer(testids) and page.evaluate("document.scripts.length") == 0
        saved = file.read_text(encoding="utf-8")
        assert '<meta charset="utf-8">' in saved and '<html lang="en">' in saved and 'name="viewport"' in saved
        assert page.locator("h2").inner_text() == viewer.page.locator("#view h2").inner_text()
        drawn = "document.querySelectorAll('#view canvas, #view img').length"
        assert page.evaluate(drawn) == viewer(drawn)
        assert page.evaluate("Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)")
    assert viewer.download(link) == file.read_bytes()
    context.close()
    assert problems == []


# --- layout and colors ------------------------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("kind, text", [("char", TEXT), ("bpe", STRANGE)])
def test_narrow_windows_need_no_horizontal_scrolling(kind, text, new_viewer, servers):
    viewer = new_viewer(servers(kind), width=360)
    for view in viewer.open("tokens").views():
        viewer.show(view, text=text, layer=1)
        width, widest = viewer(
            """() => [document.documentElement.scrollWidth, Array.from(document.querySelectorAll("body *"))
              .filter(node => node.getBoundingClientRect().right > 361 && !node.closest(".scroll"))
              .map(node => `${node.tagName} ${node.id} ${node.className}`).slice(0, 5)]"""
        )
        assert width <= 360 and not widest, (view, widest)


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_sequential_colors_are_monotone_and_signed_ones_symmetric_in_luminance(theme, char_viewer):
    """By WCAG 2. x and -x differ in hue only, and 0 is the color of the page."""
    char_viewer.page.emulate_media(color_scheme=theme)
    char_viewer.show("tokens")
    script = "([scale, first]) => Array.from({length: 1001}, (_, i) => colorOf(scale, first + (1 - first) * i / 1000))"
    paper = re.findall(r"\d+", char_viewer("getComputedStyle(document.body).backgroundColor"))
    sign = -1 if theme == "light" else 1
    for scale, first in (("sequential", 0), ("signed", -1)):
        colors = np.array(char_viewer(script, [scale, first]))
        values = luminance(colors)
        assert colors[0 if scale == "sequential" else 500].tolist() == list(map(int, paper))
        away = sign * values[500:] if scale == "signed" else sign * values
        assert (np.diff(away[::10]) > 0).all() and (np.diff(away) > -2e-3).all()  # single steps are rounded to integers
        assert abs(away[-1] - away[0]) > 0.5
        if scale == "signed":
            assert np.abs(values - values[::-1]).max() < 0.012
            blue, orange = colors[0], colors[-1]
            assert blue[2] > blue[0] + 50 and orange[0] > orange[2] + 50
    char_viewer.page.emulate_media(color_scheme="light")


def luminance(colors: np.ndarray) -> np.ndarray:
    """By WCAG 2. colors: from 0 to 255, (..., 3)."""
    colors = np.asarray(colors) / 255
    return np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_on_colors_has_enough_contrast(theme, char_viewer):
    """At least 4.5, as required by WCAG 2."""
    char_viewer.page.emulate_media(color_scheme=theme)
    char_viewer.show("tokens")
    for scale in ("sequential", "signed"):
        pairs = char_viewer(
            """scale => Array.from({length: 201}, (_, i) => {
              const color = colorOf(scale, i / 100 - 1);
              return [color, textColorOn(color) === "#fff" ? [255, 255, 255] : [0, 0, 0]];
            })""",
            scale,
        )
        light = np.sort(luminance(pairs), axis=-1)
        assert ((light[:, 1] + 0.05) / (light[:, 0] + 0.05)).min() >= 4.5
    char_viewer.page.emulate_media(color_scheme="light")


# --- sampling in JavaScript -------------------------------------------------------------------------------------------


@in_browser
def test_sampling_stages_equal_python(char_viewer, seed):
    """With random logits and settings; half of the cases have ties."""
    random = np.random.default_rng(seed)
    cases = []
    for case in range(300):
        logits = random.normal(scale=random.choice([0.3, 3.0, 30.0]), size=random.integers(1, 300))
        logits = np.round(logits) if case % 2 else logits.astype(np.float32).astype(np.float64)
        cases.append(
            dict(
                logits=logits.tolist(),
                temperature=random.choice([0.0, 0.05, 0.8, 1.0, 2.0], p=[0.1, 0.2, 0.3, 0.2, 0.2]),
                top_k=int(random.choice([0, random.integers(1, 300)])),
                top_p=float(random.choice([1.0, random.uniform(0.001, 0.999)])),
                min_p=float(random.choice([0.0, random.uniform(0.001, 0.999), 1.0])),
            )
        )
    answers = char_viewer.show("tokens")(
        "cases => cases.map(({logits, ...settings}) => samplingStages(Float64Array.from(logits), settings)"
        ".map(({name, probabilities}) => [name, Array.from(probabilities), entropyOf(probabilities)]))",
        cases,
    )
    for case, stages in zip(cases, answers, strict=True):
        logits, settings = torch.tensor(case.pop("logits"), dtype=torch.float64), dict(temperature=case["temperature"])
        expected = [logits.softmax(-1), next_token_probabilities(logits, Sampling(**settings))]
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if case[name] != off and (name != "top_k" or case[name] < len(logits)):
                settings[name] = case[name]
                expected.append(next_token_probabilities(logits, Sampling(**settings)))
        assert [name.split()[0] for name, *_ in stages] == ["softmax"] + [name.replace("_", "-") for name in settings]
        for (name, shown, shown_entropy), probabilities in zip(stages, expected, strict=True):
            shown, probabilities = np.array(shown), probabilities.numpy()
            np.testing.assert_allclose(np.sort(shown), np.sort(probabilities), rtol=1e-9, atol=1e-12, err_msg=str(case))
            others = ~np.isclose(shown, probabilities, rtol=1e-9, atol=1e-12)  # top-p may keep any of equal logits
            assert (logits.numpy()[others] == logits.numpy()[probabilities > 0].min()).all(), (name, case)
            assert shown_entropy == pytest.approx(entropy(probabilities), abs=1e-9)


@in_browser
def test_the_sliders_change_the_distribution(char_viewer):
    char_viewer.show("output", token=8, temperature=1, top_k=0)
    logits = np.array(char_viewer.column("distribution", "logit"))
    for name, value in (("temperature", 0.5), ("top_k", 7), ("top_p", 0.9), ("min_p", 0.05)):
        char_viewer.find(f"slider-{name}").fill(str(value))
    settings = Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.05)
    expected = next_token_probabilities(torch.from_numpy(logits), settings)
    assert_same(char_viewer.column("distribution", "min-p 0.05"), expected)
    text = char_viewer.find("distribution").inner_text()
    assert f"{(expected > 0).sum()} of {len(logits)} tokens can be sampled" in text


@in_browser
def test_padding_ids_are_never_sampled(new_viewer, servers):
    """The page included them; folio/decoding/sampling.py excludes them."""
    viewer = new_viewer(servers("rotary")).open("output", token=8, temperature=1, top_k=0)
    table = viewer.table("distribution")
    by_id = {row[0]: row for row in table["rows"]}
    logits = torch.tensor([by_id[token][2] for token in range(260)])
    expected = next_token_probabilities(logits[:257], Sampling())
    assert_same([by_id[token][-1] for token in range(260)], [*expected, 0, 0, 0])
    assert_same([by_id[token][3] for token in range(260)], logits.softmax(-1))  # the model's own
    assert "257 of 260 tokens can be sampled" in viewer.find("distribution").inner_text()


# --- a large model ----------------------------------------------------------------------------------------------------


@in_browser
@pytest.mark.slow
def test_gpt2_size_with_a_full_context(new_viewer, tmp_path, seed):
    model = GPT(GPTConfig(), seed).requires_grad_(False).eval()
    run = save_run(tmp_path / "run", {1: model}, TOKENIZERS["bpe"], {})
    ids = np.random.default_rng(seed).integers(TOKENIZERS["bpe"].vocab_size, size=1024)
    with serving([run]) as served:
        numpy = NumpyGPT(model, np.float32).run(ids)
        viewer = new_viewer(served)
        state = dict(ids=",".join(map(str, ids)), layer=5, head=7, token=900)
        place = Place(layer=5, head=7, token=900)
        viewer.open("tokens", **state)
        assert_same(viewer.column("tokens", "loss (nats)"), [math.nan, *numpy.losses])
        viewer.open("looking-back", **state)
        weights = numpy.layer(5).weights[7]
        assert_same(viewer.column("arcs", "head 7"), weights[900])
        for view in ("attention-row", "output"):
            viewer.open(view, **state)
            CHECKS[view](viewer, numpy, place)
        for head in range(12):  # the cache holds only some of them
            viewer.press("[" if head < 7 else "]")
        heap = viewer.page.context.new_cdp_session(viewer.page).send("Runtime.getHeapUsage")
        assert heap["usedSize"] + heap.get("backingStorageSize", 0) < 300e6


# --- the benchmark ----------------------------------------------------------------------------------------------------


@in_browser
def test_the_benchmark_measures_everything(browser, monkeypatch, capsys):
    @contextmanager
    def serve_here(tool: str, run: str, *options: str) -> Iterator[tuple[int, str]]:
        settings.load(ViewConfig, [run, *options])
        with serving([run]) as served:
            yield 0, served.url

    monkeypatch.setattr(bench_view, "running_server", serve_here)
    monkeypatch.setattr(bench_view, "headless_chromium", lambda program: nullcontext(browser))
    shape = dict(block_size=24, vocab_size=257, n_layer=2, n_head=3, n_embd=12)
    for name, value in {"MODELS": {"tiny": shape}, "SHORT": 8, "HOVER_TOKENS": 16}.items():
        monkeypatch.setattr(bench_view, name, value)
    bench_view.main(ViewBenchConfig(models="tiny", repeats=1))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line.startswith("|")}
    for name, bar in (
        ("page usable", "1 s"),
        ("trace of 24 tokens", "4 s"),
        ("another head at T = 24", "0.2 s"),
        ("hovering at T = 24: and layout", ""),
        ("JavaScript memory after 4 heads", "300 MB"),
    ):
        median, worst, at_most = (cell.strip() for cell in rows[name])
        assert 0 < float(median.split()[0]) <= float(worst.split()[0]) and at_most == bar, name


def test_the_benchmark_needs_a_browser(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"chromium and google-chrome were not found.*--browser="):
        bench_view.main(ViewBenchConfig())


@in_browser
def test_the_minified_style_sheet_has_the_same_rules(char_viewer):
    """Except for spaces in the value of a variable."""
    script = """style => {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(style);
      return [sheet, document.styleSheets[0]].map(({cssRules}) =>
        Array.from(cssRules, ({cssText}) => cssText.replace(/(--mono:.*?);/, value => value.replaceAll(" ", ""))));
    }"""
    original, minified = char_viewer.show("tokens")(
        script, "".join(path.read_text("utf-8") for path in (BASE_STYLE, PAGE / "style.css"))
    )
    assert minified == original and len(minified) > 50
