"""The page around the views in a browser, and what all views have: exports, layout, colors, and sampling."""

import csv
import io
import math
import re
import struct
import xml.etree.ElementTree

import numpy as np
import pytest
import torch

from folio.decoding.sampling import Sampling, next_token_probabilities
from folio.experiments.charts import CHART_STYLE
from folio.experiments.static_page import BASE_STYLE
from folio.web.viewer import PAGE
from model import GPT, GPTConfig
from tests.support.numpy_gpt import NumpyGPT, assert_rounded, assert_same, entropy
from tests.support.tolerances import rounding_error
from tests.support.viewed_models import STRANGE, TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import Place, Viewer, checks, serving
from tests.support.waiting import wait_until


def losses(model: GPT, viewer: Viewer) -> list[float]:
    """The column of losses that the view of tokens must have."""
    return [math.nan, *NumpyGPT(model).run(viewer.column("tokens", "id")).losses]


def test_heat_maps_have_the_colors_of_their_numbers(char_viewer):
    """Check the pixels."""
    char_viewer.show("attention-table", token=9)
    largest = np.abs(char_viewer.matrix("scores")).max()  # learned positions have no bias
    for picture, scale, end in (
        ("scores", "signed", largest),
        ("masked", "signed", largest),
        ("weights", "sequential", 1),
    ):
        numbers = char_viewer.matrix(picture)
        values = np.where(np.isfinite(numbers), numbers / end, math.nan)
        pixels, colors = char_viewer(
            """([id, scale, rows]) => {
              const canvas = document.querySelector(`figure[data-testid="${id}"] .heat canvas`);
              const {width, height} = canvas;
              return [Array.from(canvas.getContext("2d").getImageData(0, 0, width, height).data),
                rows.map(row => row.map(x => Number.isNaN(x) ? [208, 212, 218] : colorOf(scale, x)))];
            }""",
            [picture, scale, values.tolist()],
        )
        shown = np.array(pixels).reshape(*numbers.shape, 4)
        assert (shown[..., 3] == 255).all()
        assert np.abs(shown[..., :3] - np.array(colors)).max() <= 1  # rounded to integers


def test_views_of_one_and_two_tokens(char_viewer):
    views = char_viewer.show("tokens").views()
    for ids in ("5,7", "5"):
        for view in views:
            char_viewer.show(view, ids=ids).text()
            assert char_viewer.find("strip").locator(".token").count() == len(ids.split(",")), view
    assert char_viewer.show("attention-table", ids="5").matrix("weights").tolist() == [[1.0]]


# --- the page around the views ----------------------------------------------------------------------------------------


def test_colors_of_the_strip(char_viewer):
    run, blind = char_viewer.show("tokens").run(), math.log(char_viewer("pieces.length"))  # loss of equal probabilities
    ranks = np.log2(1 + run.ranks) * math.log(2)
    for color, values in {"loss": run.losses, "rank": ranks, "entropy": run.entropies[:-1]}.items():
        char_viewer.after(lambda color=color: char_viewer.find("color").select_option(color))
        shown = char_viewer("Array.from(document.querySelectorAll('#strip .token'), token => token.style.background)")
        expected = char_viewer("values => values.map(x => css(colorOf('sequential', x)))", (values / blind).tolist())
        first, *numbers = [list(map(int, re.findall(r"\d+", text))) for text in [*shown, *expected]]
        assert first == [255, 255, 255]  # the first token has no prediction
        assert np.abs(np.subtract(numbers[: len(values)], numbers[len(values) :])).max() <= 1, color


def test_hovering_over_a_token_shows_its_attention(char_viewer):
    char_viewer.show("looking-back", layer=1, head=2, token=30, shade="sqrt")
    weights = char_viewer.matrix("looking-back")
    for query in (41, 7, 0):
        char_viewer.find(f"token-{query}").hover()
        text = char_viewer.find("looking-back-readout").text_content()
        best = int(weights[query].argmax())
        percent = float(re.search(rf"\s{best} \S+ ([\d.]+)%", text)[1])
        assert text.startswith(f"{query} ")
        assert_rounded(percent, 100 * weights[query, best], 3, largest=0)
        shown = char_viewer("Array.from(document.querySelectorAll('#view .token'), token => token.style.background)")
        expected = char_viewer("row => row.map(x => css(colorOf('sequential', Math.sqrt(x))))", weights[query].tolist())
        assert [re.sub(r"\s", "", color) for color in shown] == expected


def test_links_reproduce_views(char_viewer, new_viewer, char):
    page, after = char_viewer.show("tokens").page, char_viewer.after
    after(lambda: page.locator("#text").fill("To be? That is a question."))
    char_viewer("document.getElementById('text').blur()")
    after(char_viewer.find("strip-12").click)
    after(lambda: char_viewer.find("color").select_option("entropy"))
    after(page.get_by_role("link", name="What a token attends to").click)
    after(char_viewer.find("head-0-2").click)
    after(page.get_by_label("hide the first token").check)
    after(lambda: page.get_by_label("colors:").select_option("row"))
    char_viewer.press("ArrowDown", ",")
    assert char_viewer.state("view", "layer", "head", "token", "step", "color", "shade", "hide_first") == [
        "looking-back", 1, 2, 12, 100, "entropy", "row", 1,
    ]  # fmt: skip
    other = new_viewer(char).follow(page.url)
    for part in ("#view", "#strip", "#menu", "#checkpoints", "#model-facts"):
        assert other.page.locator(part).inner_html() == page.locator(part).inner_html()
    assert other.page.locator("#text").input_value() == "To be? That is a question."
    for picture in char_viewer.pictures():
        assert other.table(picture) == char_viewer.table(picture)


def test_sliders_persist_in_other_views(char_viewer):
    """Menu links had the values from before a slider was moved."""
    char_viewer.show("output", token=5)
    char_viewer.find("slider-temperature").fill("0.5")
    char_viewer.find("slider-min_p").fill("0.1")
    char_viewer.after(char_viewer.page.get_by_role("link", name="Tokens", exact=True).click)
    assert char_viewer.state("view", "temperature", "min_p", "token") == ["tokens", 0.5, 0.1, 5]
    char_viewer.after(char_viewer.page.go_back)
    assert char_viewer.state("view", "temperature", "min_p", "token") == ["output", 0.5, 0.1, 5]


def test_going_back_restores_the_initial_text(char_viewer):
    """A URL without a text was treated as an empty text."""
    box = char_viewer.follow(char_viewer.served.url).page.locator("#text")
    char_viewer.after(char_viewer.find("story-next").click).after(char_viewer.page.go_back)
    assert box.input_value() == TEXT
    assert char_viewer.find("strip").locator(".token").count() == len(TEXT)
    char_viewer.after(lambda: box.fill("")).follow(char_viewer.page.url)
    assert box.input_value() == ""


def test_going_back_restores_the_text_before_a_typed_change(new_viewer, char):
    """Keys of one change share an entry of the history. The text field keeps the focus."""
    viewer = new_viewer(char)
    viewer.page.clock.install()
    viewer.open("tokens", text="To be").page.clock.pause_at("2100-01-01")
    box, entries = viewer.page.locator("#text"), viewer("history.length")
    for text in ("That", "is"):
        viewer.page.clock.run_for(1600)  # a pause in typing
        box.select_text()
        for key in text:
            box.press(key)
            viewer.after(lambda: viewer.page.clock.run_for(300))  # the page is drawn between two keys
        assert viewer.state("text") == [text]
    assert viewer("history.length") == entries + 2
    for text in ("That", "To be"):
        assert viewer.after(viewer.page.go_back).state("text") == [text]
        assert box.input_value() == text
    assert viewer("document.activeElement.id") == "text"


def test_the_text_is_in_one_line_until_it_is_edited(char_viewer):
    """The box showed only the first line, above tokens of a later one."""
    box = char_viewer.show("tokens", text="to be,\nor not").page.locator("#text")
    assert box.input_value() == "to be,⏎ or not"
    box.focus()
    assert box.input_value() == "to be,\nor not"
    top, token = (char_viewer.page.locator(place).bounding_box() for place in ("#text", "#strip"))
    assert token["y"] >= top["y"] + top["height"]  # the tokens are not covered
    assert char_viewer.after(lambda: box.press_sequentially("!")).state("text") == ["to be,\nor not!"]
    char_viewer("document.activeElement.blur()")
    assert box.input_value() == "to be,⏎ or not!"


def test_a_click_after_typing_is_not_lost(char_viewer):
    """The text field shrinks when it loses the focus. The page must not move before the button is released."""
    char_viewer.show("looking-back", layer=0, head=0, text=TEXT).page.locator("#text").focus()
    assert char_viewer.after(char_viewer.find("head-0-2").click).state("head") == [2]


def test_keyboard_navigation(char_viewer):
    char_viewer.show("looking-back", token=3)
    moves = {
        "ArrowLeft": ("token", 2), "ArrowRight": ("token", 3), "ArrowDown": ("layer", 1), "ArrowUp": ("layer", 0),
        "]": ("head", 1), "[": ("head", 0), ",": ("step", 100), ".": ("step", 200),
    }  # fmt: skip
    for key, (name, value) in moves.items():
        assert char_viewer.press(key).state(name) == [value], key
    place = ("layer", "head", "step", "token")
    assert char_viewer.press("ArrowUp", "[", ".", *["ArrowLeft"] * 5).state(*place) == [0, 0, 200, 0]
    assert char_viewer.press(*["ArrowDown"] * 3, *["]"] * 5, *[","] * 5).state(*place) == [1, 3, 0, 0]
    views = [view for view in char_viewer.views() if view != "story"]  # whose keys turn its pages
    char_viewer.show(views[0])
    visited = [char_viewer.press("j").state("view")[0] for _ in views]
    assert visited == [*views[1:], views[-1]]
    char_viewer.page.locator("#text").focus()
    before = char_viewer.state(*place, "view")
    assert char_viewer.press("ArrowLeft", "[", ".").state(*place, "view") == before  # not while typing


def test_keys_before_the_model_is_loaded_are_ignored(new_viewer, char):
    """Keys caused an error."""
    viewer, requests = new_viewer(char), []
    viewer.page.route("**/ask", lambda request: requests.append(request), times=1)
    viewer.page.goto(char.url)
    viewer.page.keyboard.press("ArrowLeft")
    wait_until(lambda: viewer("document.readyState") == "complete" and requests != [])
    requests[0].continue_()
    viewer.wait()


def test_redrawing_preserves_the_focus(char_viewer):
    """The focus was lost, so a setting could not be changed twice with the keyboard."""
    layer = char_viewer.show("looking-back", layer=0).page.get_by_role("combobox", name="layer")
    layer.focus()
    char_viewer.after(lambda: layer.select_option("1"))
    assert char_viewer("document.activeElement.labels[0].firstChild.data.trim()") == "layer"
    char_viewer.find("head-1-2").focus()
    assert char_viewer.press("Enter").state("head") == [2]
    assert char_viewer("document.activeElement.dataset.testid") == "head-1-2"
    char_viewer.find("color").focus()
    assert char_viewer.press("ArrowDown")("document.activeElement.dataset.testid") == "color"


def test_the_checkpoint_slider(char_viewer):
    char_viewer.show("tokens", step=100, token=5)
    for index, step in enumerate((0, 10, 100, 200)):
        char_viewer.find("checkpoint").fill(str(index))
        assert char_viewer.wait().state("step") == [step]
        shown = "step 200" if step == 200 else f"step {step} of 200"
        assert char_viewer.page.locator("#checkpoints output").inner_text() == shown
        assert_same(char_viewer.column("tokens", "loss (nats)"), losses(build_model("char", seed=step), char_viewer))
    ids = char_viewer.column("tokens", "id")
    char_viewer.show("looking-back", step=10, layer=1)
    assert_same(char_viewer.matrix("looking-back"), NumpyGPT(build_model("char", seed=10)).run(ids).layer(1).weights[0])


def test_the_newest_checkpoint_is_followed(new_viewer, tmp_path):
    """While the run is training. Selecting another checkpoint ends it."""
    fcntl = pytest.importorskip("fcntl")
    folder, models = tmp_path / "run", {step: build_model("char", seed=step) for step in (100, 200, 300, 400)}

    def save(step: int) -> str:
        return save_run(folder, {step: models[step]}, TOKENIZERS["char"], {})

    with serving([save(100)]) as served, open(folder / ".lock", "w") as lock:
        viewer = new_viewer(served)
        viewer.page.clock.install()

        def wait(condition: str) -> None:
            """Wait for an expression. The page asks for new checkpoints every two seconds of its clock."""
            wait_until(lambda: viewer.page.clock.run_for(2000) or viewer(condition))
            viewer.wait()

        assert not viewer.open("tokens").find("follow").is_visible()
        fcntl.flock(lock, fcntl.LOCK_EX)
        viewer.open("tokens").find("follow").check()
        save(200)
        wait("state.step === 200")
        assert "follow=1" in viewer.page.url
        assert_same(viewer.column("tokens", "loss (nats)"), losses(models[200], viewer))
        viewer.show("run", follow=1, step=200)
        save(300)
        wait("state.step === 300")
        viewer.find("checkpoint").fill("0")
        assert viewer.wait().state("step", "follow") == [100, 0]
        assert not viewer.find("follow").is_checked()
        save(400)
        wait("info.models[0].checkpoints.at(-1) === 400")
        assert viewer.state("step") == [100]
        fcntl.flock(lock, fcntl.LOCK_UN)
        wait("document.querySelector('[data-testid=follow]').parentNode.hidden")


def test_the_latest_change_wins(char_viewer):
    """Late answers do not replace newer ones."""
    char_viewer.show("tokens")
    for step in (0, 200, 10, 100) * 3:
        char_viewer("step => void change({step})", step)
    assert char_viewer.wait().page.locator("#checkpoints output").inner_text() == "step 100 of 200"
    assert_same(char_viewer.column("tokens", "loss (nats)"), losses(build_model("char", seed=100), char_viewer))


def test_the_cache_of_answers_has_a_limit(new_viewer, char):
    """The page cached 64 answers of any size: 540 MB for heads of 1,024 tokens."""
    count, *totals = new_viewer(char).open("tokens")(
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
    assert count == 5 and max(totals[:-1]) <= 2**26 and 9e7 <= totals[-1] < 1e8  # "b" was requested once; "e" is last


def test_notes_on_a_text(char_viewer):
    """Long texts are cut, and unknown characters named. The note was "1 characters are not in the vocabulary"."""
    long, empty = 3 * TEXT + "#€", "The prompt is empty: the model starts from a line break."
    for text, note in {
        TEXT: "",
        "To\u200b": "1 character is not in the vocabulary and is skipped: \\u200b.",
        "##To#": "3 characters are not in the vocabulary and are skipped: #.",
        "#$%^*()+=": f"9 characters are not in the vocabulary and are skipped: # $ % ^ * ( ) + … {empty}",
        long: "2 characters are not in the vocabulary and are skipped: # €. "
        f"The first 48 of {3 * len(TEXT)} tokens are shown.",
    }.items():
        assert char_viewer.show("tokens", text=text).page.locator("#input-note").inner_text().strip() == note
    assert len(char_viewer.table("tokens")["rows"]) == 48


def test_invalid_links_show_an_error(char_viewer):
    for state, message in (
        (dict(step=7), "has no checkpoint of step 7"),
        (dict(ids="1,99"), "ids must be a list of token ids"),
        (dict(ids=",".join(["1"] * 49)), "the limit is 48"),
        (dict(mask="on"), "mask='on'"),
        (dict(heads_off="9.9"), "the model has 2 layers of 4 heads"),
    ):
        char_viewer.show("tokens", **state)
        assert message in char_viewer.page.get_by_role("alert").inner_text()
        assert len(char_viewer.problems) == 1 and "400" in char_viewer.problems.pop()  # the browser reports the status
        char_viewer.after(char_viewer.page.get_by_role("link", name="Reset this view").click).text()


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


def test_the_page_works_after_an_invalid_first_link(new_viewer, char):
    viewer = new_viewer(char).open("tokens", step=7)
    assert len(viewer.problems) == 1 and "400" in viewer.problems.pop()
    viewer.page.get_by_role("link", name="Reset this view").click()
    viewer.page.get_by_role("link", name="Next token").wait_for()
    assert viewer.open("tokens", layer=-3, head=99, token=10**9).find("tokens").count() == 1


@pytest.mark.parametrize("kind", ["char", "bpe", "rotary"])
def test_a_click_on_the_distribution_appends_the_token(kind, new_viewer, servers):
    viewer = new_viewer(servers(kind)).open("output", token=10)
    ids = viewer.run().ids[:11].tolist()
    best = viewer.column("distribution", "id")[0]
    first = viewer.find("distribution").locator("tbody tr").first
    assert viewer.after(first.click).state("ids", "token") == [",".join(map(str, [*ids, best])), 11]
    checks.run("output", viewer, viewer.run(), Place(token=11))


def test_appending_to_a_full_context_drops_the_oldest_tokens(char_viewer):
    """The page asked for one token more than the context has, which broke every view."""
    ids = [str(1 + i % 20) for i in range(48)]
    char_viewer.show("output", ids=",".join(ids))
    best = str(char_viewer.column("distribution", "id")[0])
    char_viewer.after(char_viewer.find("distribution").locator("tbody tr").first.click)
    assert char_viewer.state("ids", "token") == [",".join([*ids[24:], best]), 24]
    assert char_viewer.after(char_viewer.page.go_back).state("ids") == [",".join(ids)]


def test_a_click_selects_a_number_of_the_query_key_or_value(char_viewer):
    """A click on a key or a value selected the query."""
    numbers = char_viewer.show("qkv", token=5).find("qkv-numbers")
    numbers.locator("tbody tr").nth(3).locator("td").nth(2).click()
    assert char_viewer.wait().state("qkv_part", "head_channel") == [1, 3]


def test_tables_show_that_rows_are_hidden(char_viewer):
    """Tables scrolled to the selected row even if it was visible, and did not show that they had scrolled."""
    for token, classes in ((3, "scroll below"), (26, "scroll above below"), (41, "scroll above")):
        table = char_viewer.show("tokens", token=token, text=TEXT).find("tokens").locator(".scroll")
        wait_until(lambda table=table, classes=classes: table.get_attribute("class") == classes)
        assert (table.evaluate("table => table.scrollTop") > 0) == ("above" in classes)
        shadow = table.locator("th").first.evaluate("th => getComputedStyle(th, '::after').backgroundImage")
        assert shadow.startswith("linear-gradient") == ("above" in classes)
        row, box = (one.bounding_box() for one in (table.locator("tr.selected"), table))
        assert box["y"] < row["y"] and row["y"] + row["height"] <= box["y"] + box["height"]


def test_the_labels_of_a_chart_are_not_clipped(char_viewer):
    """At 390 pixels, the last label of a run's steps was "10,0"."""
    script = """last => {
      const groups = [oneLine("a", [0, 1], {x: [0, last]})];
      const outer = div(), node = outer.appendChild(div());
      outer.style.width = "330px";
      byId("view").append(outer);
      lineChart({name: "labels", title: "a", x: "step", panels: [{title: "", height: 200}], groups}, node);
      const texts = node.querySelectorAll("text");
      const right = Math.max(...Array.from(texts, node => node.getBBox()).map(({x, width}) => x + width));
      outer.remove();
      return [right, texts.length];
    }"""
    for last in (1000, 10_000, 2_000_000):
        right, count = char_viewer.show("tokens")(script, last)
        assert right <= 330 and count > 8, last


def test_row_headings_of_the_lens_stay_in_their_rows(char_viewer):
    """They stuck to the top of a table that was scrolled down, over its heading."""
    headings = char_viewer.show("stream").page.locator(".lens tbody th")
    assert headings.evaluate_all("nodes => [...new Set(nodes.map(node => getComputedStyle(node).top))]") == ["auto"]


def test_small_numbers(char_viewer):
    """They were "0.00000258%", "0.0000" in checks, and 1.000 for both ends of an interval."""
    char_viewer.show("tokens")
    shown = char_viewer("[1, 0.5, 1e-4, 9e-5, 2.58e-8, 0].map(percent)")
    assert shown == ["100%", "50.0%", "0.0100%", "<0.01%", "<0.01%", "0%"]
    assert char_viewer("checkLine('sum', -3e-7).textContent") == "✓ sum: 3.000e\N{MINUS SIGN}7"
    bars = char_viewer.show("output", temperature=0).find("distribution").locator("svg text.soft")
    assert bars.all_text_contents() == ["100%"]  # other tokens cannot be sampled
    cells = char_viewer.show("loop", token=8, temperature=0.1, top_k=0).find("draw").locator("tbody tr td")
    texts = np.array(cells.all_text_contents()).reshape(-1, len(char_viewer.table("draw")["columns"]))[:, -2:]
    intervals = [row[-2:] for row in char_viewer.table("draw")["rows"]]
    for (begin, end), shown in zip(intervals, texts, strict=False):
        assert (shown[0] == shown[1]) == (begin == end)
    narrow = [begin < end and f"{begin:.4g}" == f"{end:.4g}" for begin, end in intervals[: len(texts)]]
    assert sum(narrow) > 3


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, text", [("char", STRANGE + TEXT[:20]), ("bpe", STRANGE)])
def test_strange_text_is_shown_as_text_in_narrow_windows(kind, text, new_viewer, servers):
    """It adds no markup and no invisible characters, and no view needs horizontal scrolling."""
    viewer = new_viewer(servers(kind), width=360)
    viewed, ids = viewer.viewed, TOKENIZERS[kind].encode(text).tolist()[:48]
    invisible = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e]")
    scripts = viewer.open("tokens")("document.scripts.length")
    viewer.after(lambda: viewer.page.locator("#text").fill(text))
    assert viewer.column("tokens", "token") == [viewed.tokenizer.piece(token) for token in ids]
    for view in viewer.views():
        viewer.show(view, text=text, layer=1, token=1)
        assert viewer("document.scripts.length") == scripts and not viewer.page.locator("b, #view script").count(), view
        assert not invisible.search(viewer("document.body.innerText")), view
        width, widest = viewer(
            """() => [document.documentElement.scrollWidth, Array.from(document.querySelectorAll("body *"))
              .filter(node => node.getBoundingClientRect().right > 361 && !node.closest(".scroll"))
              .map(node => `${node.tagName} ${node.id} ${node.className}`).slice(0, 5)]"""
        )
        assert width <= 360 and not widest, (view, widest)
    shown = viewer("Array.from(document.querySelectorAll('#strip .token'), token => token.textContent)")
    assert len(shown) == len(ids) and all(shown)
    for token, label in zip(ids, shown, strict=True):
        piece = viewed.tokenizer.piece(token)
        assert label == piece or not (piece.isascii() and piece.isprintable()) or piece == " "


def test_incomplete_characters_are_shown_as_bytes(new_viewer, servers):
    """The column of bytes had the bytes of the escaped text."""
    viewer = new_viewer(servers("bpe")).open("tokens", text="é")
    assert viewer.column("tokens", "token") == ["\\xc3", "\\xa9"]
    assert viewer.column("tokens", "bytes") == ["c3", "a9"]
    viewer.show("tokens", ids="261,195,169")  # the end-of-text token, and é
    assert viewer.column("tokens", "token")[0] == "<|endoftext|>" and viewer.column("tokens", "bytes")[0] == ""
    assert viewer.page.locator("#text").input_value() == "<|endoftext|>é"
    assert viewer("['constructor', 'toString'].map(visible)") == ["constructor", "toString"]  # were functions


# --- exports ----------------------------------------------------------------------------------------------------------


def is_number(text: str, exact: float, error: float = 0) -> bool:
    """Whether a cell shows a number, with a relative error."""
    number = float(text.replace("\N{MINUS SIGN}", "-").replace("∞", "inf").replace(",", ""))
    return number == pytest.approx(exact, rel=error, abs=0, nan_ok=True)


def test_pictures_are_exported(char_viewer):
    """Tables in the page have the exported numbers, rounded to four digits: by at most half of 1e-3."""
    viewer, other_tables = char_viewer, set()
    for view in viewer.views():
        viewer.show(view, text=STRANGE + TEXT[:20], layer=1, token=24)
        assert viewer.pictures() or view in ("memorized", "run"), view  # these need files of the run
        for picture in viewer.pictures():
            figure, table = viewer.find(picture), viewer.table(picture)
            rows, heads = table["rows"], list(map(str, table["columns"]))
            shown_heads = figure.locator("thead th").all_text_contents()
            if shown_heads == heads:
                cells = figure.locator("tbody").locator("td, th").all_text_contents()
                values = [value for row in rows for value in row][: len(cells)]
                pairs = [pair for pair in zip(cells, values, strict=True) if not isinstance(pair[1], str)]
                assert pairs and all(math.isnan(x) or is_number(shown, x, 5e-4) for shown, x in pairs), picture
            elif shown_heads:
                other_tables.add(picture)
            buttons = {button.inner_text(): button for button in figure.locator(".exports button").all()}
            files = {kind: viewer.exported(button) for kind, button in buttons.items()}
            saved_heads, *saved_rows = csv.reader(io.StringIO(files["CSV"].decode(), newline=""))
            assert saved_heads == heads
            for row, expected in zip(saved_rows, rows, strict=True):
                for cell, x in zip(row, expected, strict=True):
                    assert cell == x if isinstance(x, str) else is_number(cell, x), picture
            root = xml.etree.ElementTree.fromstring(files["SVG"])
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert figure.locator("h3").inner_text() in "".join(root.itertext())
            assert files["PNG"].startswith(b"\x89PNG\r\n\x1a\n")
            size = [2 * math.ceil(float(root.get(name))) for name in ("width", "height")]
            assert list(struct.unpack(">II", files["PNG"][16:24])) == size
    assert other_tables == {"parameters", "qkv-products", "mlp-products", "lens", "lens-window"}
    assert viewer.download(buttons["PNG"]) == files["PNG"]


def test_exported_views_work_offline(char_viewer, open_page, tmp_path):
    viewer, page = char_viewer, open_page("", offline=True)
    testids = "Array.from(document.querySelectorAll('#view [data-testid]'), node => node.dataset.testid)"
    drawn = "document.querySelectorAll('#view canvas, #view img').length"
    link, file = viewer.page.get_by_role("link", name="This view as HTML"), tmp_path / "view.html"
    for view in viewer.views():
        file.write_bytes(viewer.show(view, text=STRANGE + TEXT[:20], layer=1, token=24).exported(link))
        page.goto(file.as_uri())
        assert page.evaluate(testids) == viewer(testids) and page.evaluate("document.scripts.length") == 0
        saved = file.read_text(encoding="utf-8")
        assert '<meta charset="utf-8">' in saved and '<html lang="en">' in saved and 'name="viewport"' in saved
        assert page.locator("h2").inner_text() == viewer.page.locator("#view h2").inner_text()
        assert page.evaluate(drawn) == viewer(drawn)
        assert page.evaluate("Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)")
    assert viewer.download(link) == file.read_bytes()


# --- colors -----------------------------------------------------------------------------------------------------------


def luminance(colors: np.ndarray) -> np.ndarray:
    """By WCAG 2. colors: from 0 to 255, (..., 3)."""
    colors = np.asarray(colors) / 255
    return np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_have_the_luminance_of_their_numbers_and_enough_contrast(theme, new_viewer, char):
    """By WCAG 2. x and -x differ in hue only, and 0 is the color of the page."""
    viewer, sign = new_viewer(char, color_scheme=theme).open("tokens"), -1 if theme == "light" else 1
    paper = list(map(int, re.findall(r"\d+", viewer("getComputedStyle(document.body).backgroundColor"))))
    rounding = 0.5 / 255 * 2.4 / 1.055  # of a color to integers, times the largest derivative of the luminance
    for scale in ("sequential", "signed"):
        colors = np.array(viewer("scale => Array.from({length: 2001}, (_, i) => colorOf(scale, i / 1000 - 1))", scale))
        away = sign * luminance(colors[1000:])
        assert colors[1000].tolist() == paper
        assert (np.diff(away[::10]) > 0).all() and (np.diff(away) > -2e-3).all()  # single steps are rounded to integers
        assert away[-1] - away[0] > 0.5
        white = viewer("colors => colors.map(color => textColorOn(color) === '#fff')", colors.tolist())
        values, text = luminance(colors), np.array(white, float)
        assert ((np.maximum(values, text) + 0.05) / (np.minimum(values, text) + 0.05)).min() >= 4.5
    assert np.abs(values - values[::-1]).max() <= 2 * rounding
    blue, orange = colors[0], colors[-1]
    assert blue[2] > blue[0] + 50 and orange[0] > orange[2] + 50


# --- sampling in JavaScript -------------------------------------------------------------------------------------------


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
        # An exponent is rounded as a difference of logits and as a quotient, relative to its size; then come two sums.
        size = max(1, np.ptp(logits.numpy())) / min(1, case["temperature"] or 1)
        error = 2 * rounding_error(3, torch.float64) * size + 2 * rounding_error(2 * len(logits), torch.float64)
        for (name, shown, shown_entropy), probabilities in zip(stages, expected, strict=True):
            probabilities = probabilities.numpy()
            np.testing.assert_allclose(shown, probabilities, rtol=error, atol=0, err_msg=f"{name} {case}")
            assert shown_entropy == pytest.approx(entropy(probabilities), abs=2 * error * max(1, math.log(len(logits))))


def test_the_sliders_change_the_distribution(new_viewer, servers):
    """Padding ids are never sampled. The page included them; folio/decoding/sampling.py excludes them."""
    viewer = new_viewer(servers("rotary")).open("output", token=8, temperature=1, top_k=0)
    for values in ({}, dict(temperature=0.5, top_k=7, top_p=0.9, min_p=0.05)):
        for name, value in values.items():
            viewer.find(f"slider-{name}").fill(str(value))
        by_id = np.array([[row[0], *row[2:]] for row in sorted(viewer.table("distribution")["rows"])])
        logits = torch.from_numpy(by_id[:, 1])
        expected = next_token_probabilities(logits[:257], Sampling(**values))
        assert_same(by_id[:, -1], [*expected, 0, 0, 0])
        assert_same(by_id[:, 2], logits.softmax(-1))  # the model's own
        count = (expected > 0).sum()
        assert f"{count} of 260 tokens can be sampled" in viewer.find("distribution").inner_text()


# --- a large model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpt2_size_with_a_full_context(new_viewer, serve, seed):
    model = GPT(GPTConfig(), seed).requires_grad_(False).eval()
    ids = np.random.default_rng(seed).integers(TOKENIZERS["bpe"].vocab_size, size=1024)
    place = Place(layer=5, head=7, token=900)
    state = dict(ids=",".join(map(str, ids)), **vars(place))
    numpy, viewer = NumpyGPT(model, np.float32).run(ids), new_viewer(serve(model, tokenizer=TOKENIZERS["bpe"]))
    viewer.open("tokens", **state)
    assert_same(viewer.column("tokens", "loss (nats)"), [math.nan, *numpy.losses])
    viewer.open("looking-back", **state)
    assert_same(viewer.column("arcs", "head 7"), numpy.layer(5).weights[7, 900])
    viewer.open("attention-row", **state)
    assert_same(viewer.column("attention-row", "weight"), numpy.layer(5).weights[7, 900])
    checks.run("output", viewer.open("output", **state), numpy, place)
    for head in range(12):  # the cache holds only some of them
        viewer.press("[" if head < 7 else "]")
    heap = viewer.page.context.new_cdp_session(viewer.page).send("Runtime.getHeapUsage")
    assert heap["usedSize"] + heap.get("backingStorageSize", 0) < 300e6


def test_the_minified_style_sheet_has_the_same_rules(char_viewer):
    """Except for spaces in the value of a variable."""
    script = """style => {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(style);
      return [sheet, document.styleSheets[0]].map(({cssRules}) =>
        Array.from(cssRules, ({cssText}) => cssText.replace(/(--mono:.*?);/, value => value.replaceAll(" ", ""))));
    }"""
    style = "".join(path.read_text("utf-8") for path in (BASE_STYLE, CHART_STYLE, PAGE / "style.css"))
    original, minified = char_viewer.show("tokens")(script, style)
    assert minified == original and len(minified) > 50
