"""The story in a browser: its numbers compared with NumPy, its buttons, and its keys.

The check of a scene is a function with @tells("its-id"). All checks of a model share a page.
"""

import itertools
import math

import numpy as np
import torch

from folio.data.tokenizer import CharTokenizer
from folio.decoding.sampling import Sampling, next_token_probabilities
from folio.web.html_export import story_token
from folio.web.questions import TOP_EFFECTS, TOP_NEURONS
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyRun, assert_rounded, assert_same, softmax
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model
from tests.support.viewers import Checks, Place, Viewer, assert_same_map, effect_of, language_model
from tests.support.waiting import wait_until

tells = Checks()
SCENES = ("tokens", "vector", "query", "mask", "values", "neuron", "guess", "choice", "training")


def show_scene(viewer: Viewer, scene: str, **state) -> Viewer:
    number = 1 + viewer("availableScenes().map(({id}) => id)").index(scene)
    return viewer.show("story", story=number, **state)


def tokens_shown(place: Place) -> np.ndarray:
    """The positions in pictures of attention: the selected token and up to 13 before it."""
    return np.arange(max(0, place.token - 13), place.token + 1)


def previous_token_head(run: NumpyRun, rank: int = 0) -> tuple[int, int]:
    """The head (layer, head) that gives the most attention to the previous token, or a later one in this order."""
    layers = range(run.gpt.config.n_layer)
    scores = np.array([run.layer(index).weights[:, 1:, :-1].diagonal(axis1=1, axis2=2).mean(1) for index in layers])
    layer, head = np.unravel_index(np.argsort(-scores, axis=None)[rank], scores.shape)
    return int(layer), int(head)


# --- numbers of the scenes --------------------------------------------------------------------------------------------


@tells("tokens")
def check_tokens(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    assert viewer.column("story-tokens", "id") == run.ids.tolist()
    chips = viewer.find("story-tokens").locator(".chip")
    assert chips.count() == len(run.ids) and chips.nth(place.token).get_attribute("aria-pressed") == "true"
    probabilities = softmax(run.logits[place.token])
    best = np.argsort(-probabilities)[:5]
    assert viewer.column("story-expected", "id") == best.tolist()
    assert_same(viewer.column("story-expected", "probability"), probabilities[best])


@tells("vector")
def check_vector(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    config, token, wte = run.gpt.config, run.ids[place.token], run.gpt.parameters["wte.weight"]
    parts = [run.embeddings[place.token]]
    if config.position in ("learned", "sinusoidal"):
        parts += [run.positions[place.token], run.stream[0, place.token]]
    assert_same(viewer.matrix("story-vector"), np.stack(parts, 1))
    wte = wte[: viewer.viewed.tokenizer.vocab_size]
    cosine = wte @ wte[token] / np.linalg.norm(wte, axis=1) / np.linalg.norm(wte[token])
    near = [token, *(i for i in np.argsort(-cosine) if i != token)][:6]
    assert_same(viewer.matrix("story-near"), wte[near].T)
    marked = viewer("Array.from(document.querySelectorAll('#view line[stroke-width=\"1.5\"]')).length")
    assert marked == 5 and {*near} <= {*viewer.column("story-map", "id")}
    shown = np.array([[row[0], *row[2:]] for row in viewer.table("story-map")["rows"]])
    assert_same_map(shown[:, 1:], wte[shown[:, 0].astype(int)], wte)
    if config.position == "rotary":
        pairs = config.n_embd // config.n_head // 2
        shown = [math.floor(i * pairs / min(8, pairs)) for i in range(min(8, pairs))]
        assert_same(viewer.column("story-rotary", "angle"), place.token * 10000.0 ** (-np.array(shown) / pairs))
    if config.position in ("relative", "alibi"):
        _, head = previous_token_head(run)
        assert_same(viewer.column("story-bias", "bias"), run.gpt.bias(place.token + 1)[head, -1, ::-1])


@tells("query")
def check_query(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    tokens = tokens_shown(place)
    assert f"Layer {layer}, head {head}" in viewer.find("story-query").inner_text()
    activations, scores = run.layer(layer), run.biased_scores(layer, head)
    assert_same(viewer.matrix("story-query"), scores[np.ix_(tokens, tokens)])
    best = tokens[activations.weights[head, place.token, tokens].argmax()]  # of those in the grid
    detail = viewer.find("story-query").locator(".detail").inner_text()
    assert f"query of {place.token} " in detail and f"key of {best} " in detail
    check_number(detail, "score: ", scores[place.token, best], np.abs(scores).max())
    products = activations.scores[head] * math.sqrt(run.gpt.config.n_embd / run.gpt.config.n_head)
    check_number(detail, "sum: ", products[place.token, best], np.abs(products).max())


def check_number(text: str, words: str, expected: float, largest: float) -> None:
    """Check a number of four digits after some words. largest: of the numbers that it was computed from."""
    shown = float(text.split(words)[1].split()[0].strip(".,").replace("\N{MINUS SIGN}", "-"))
    assert_rounded(shown, expected, 4, largest)


@tells("mask")
def check_mask(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    tokens, scores, weights = tokens_shown(place), run.biased_scores(layer, head), run.layer(layer).weights[head]
    for stage, expected in {"Scores": scores, "Masked": run.masked_scores(layer, head), "Weights": weights}.items():
        assert_same(viewer.column("story-mask", stage), expected[np.ix_(tokens, tokens)].flatten())
    row = weights[place.token]
    bars = viewer.find("story-mask").locator(".weight").all_inner_texts()
    shown = [float(bar.split("\n")[-1].strip("<%")) / 100 for bar in bars]
    earlier = [row[: tokens[0]].sum()] if tokens[0] else []
    expected = [*earlier, *row[tokens], 1]
    assert_rounded(np.where(np.array(expected) < 1e-4, expected, shown), expected, 3, 1)


@tells("values")
def check_values(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    activations = run.layer(layer)
    weights = activations.weights[head, place.token]
    strongest = np.argsort(-weights)[:4]
    expected = np.stack([*activations.v[head, strongest], activations.z[head, place.token]], 1)
    assert_same(viewer.matrix("story-values"), expected)
    before, between = run.stream[2 * layer, place.token], run.stream[2 * layer + 1, place.token]
    assert_same(viewer.matrix("story-sum"), np.stack([before, between - before, between], 1))
    wte = run.gpt.parameters["wte.weight"][: viewer.viewed.tokenizer.vocab_size]
    states = run.stream[:, place.token]
    length = np.linalg.norm(states, axis=1, keepdims=True)
    assert_same_map(viewer.matrix("story-path"), states * length[0] / length, wte)


@tells("neuron")
def check_neuron(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    index = run.gpt.config.n_layer - 1
    hidden = run.layer(index).hidden
    written = np.abs(hidden[place.token]) * np.linalg.norm(run.gpt.parameters[f"h.{index}.mlp.c_proj.weight"], axis=0)
    strongest, columns = np.argsort(-written)[:TOP_NEURONS], run.gpt.parameters[f"h.{index}.mlp.c_proj.weight"].T
    guess, votes = run.logits[place.token].argmax(), []
    for neuron in strongest:
        effect = effect_of(run, columns[neuron] * hidden[place.token, neuron], place.token)
        votes.append(effect[guess] if guess in np.argsort(-effect)[:TOP_EFFECTS] else 0.0)
    neuron = strongest[np.argmax(votes)]
    assert f"Neuron {neuron} " in viewer.find("story-neuron").inner_text()
    if max(votes) > 0:
        words = viewer.page.locator("#view .words p").nth(1).inner_text()
        check_number(words, ", by ", max(votes), np.abs(run.logits).max())
    grid = viewer.matrix("story-neurons").flatten()
    assert_same(grid[: hidden.shape[1]], hidden[place.token])
    assert np.isnan(grid[hidden.shape[1] :]).all()
    assert_same(viewer.column("story-neuron", "activation"), hidden[:, neuron])


@tells("guess")
def check_guess(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    probabilities = softmax(run.logits_of(run.stream[:, place.token]))  # (2L + 1, V)
    shown = [viewer.column("story-guess", f"probability {j + 1}") for j in range(5)]
    assert_same(shown, np.sort(probabilities, axis=-1)[:, ::-1][:, :5].T)
    best = viewer("ids => ids.map(id => visible(pieces[id]))", np.argsort(-probabilities)[:, :5].flatten().tolist())
    bars = viewer.find("story-guess").locator("rect title").all_text_contents()
    assert [bar.rpartition(" ")[0] for bar in bars] == best


@tells("choice")
def check_choice(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    logits, ids = run.logits[place.token], viewer.column("story-choice", "id")
    assert sorted(ids) == list(range(viewer.viewed.tokenizer.vocab_size))
    assert_same(viewer.column("story-choice", "logit"), logits[ids])
    assert_same(viewer.column("story-choice", "probability"), softmax(logits[: len(ids)])[ids])
    defaults = Sampling(temperature=0.8, top_k=200)
    filtered = next_token_probabilities(torch.tensor(logits[: len(ids)]), defaults).numpy()
    assert_same(viewer.column("story-choice", "after the filters"), filtered[ids])


@tells("training")
def check_training(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    steps, *_, last = viewer.column("story-training", "step"), *viewer.matrix("story-training")
    assert steps == viewer("info.models[0].checkpoints") and len(steps) > 1
    assert_same(last, [run.losses.mean(), *run.losses])


# --- tests ------------------------------------------------------------------------------------------------------------


def test_scenes_equal_numpy(new_viewer, served, seed):
    """After one weight was changed."""
    with served.perturbed(seed):
        viewer = new_viewer(served).open("tokens")
        run, place = viewer.run(), Place()
        assert [*tells] == [*SCENES] == viewer("availableScenes().map(({id}) => id)")
        for scene in tells:
            tells.run(scene, show_scene(viewer, scene, token=place.token), run, place)
            assert 1 <= viewer.page.locator("#view .words p").count() <= 3


def test_other_documents_are_hidden_in_pictures_that_begin_at_a_later_token(new_viewer, serve):
    """With a mask of documents. What is hidden follows from positions in the text, not in the picture."""
    tokenizer, text = CharTokenizer("abcdef", eot=True), "abc<|endoftext|>fedcbafed<|endoftext|>abcdefabc"
    model = random_model(1, block_size=48, vocab_size=7, n_embd=32, document_token=tokenizer.eot)
    place = Place(token=20)
    assert 0 < tokens_shown(place)[0] < 14 < place.token  # a document begins at position 14
    viewer = new_viewer(serve(model, tokenizer=tokenizer, text=text)).open("tokens")
    run = viewer.run()
    for scene in ("query", "mask", "values"):
        tells.run(scene, show_scene(viewer, scene, token=place.token), run, place)


def test_buttons_keys_and_swipes_turn_the_pages(char_viewer):
    viewer = char_viewer.follow(char_viewer.served.url)
    heading, press = viewer.page.locator("#view h2"), viewer.page.keyboard.press
    assert heading.inner_text() == "1. What does the model see?" and viewer.find("story-back").is_disabled()
    assert viewer.after(viewer.find("story-next").click).state("story") == [2]
    viewer("document.activeElement.blur()")
    for key, number in (("ArrowRight", 3), ("ArrowRight", 4), ("ArrowLeft", 3)):
        assert viewer.after(lambda key=key: press(key)).state("story") == [number]
    swipe = """dx => {
      const box = document.querySelector(".story h2"), touch = x => new Touch({identifier: 1, target: box, clientX: x,
        clientY: 300});
      box.dispatchEvent(new TouchEvent("touchstart", {bubbles: true, touches: [touch(400)]}));
      box.dispatchEvent(new TouchEvent("touchend", {bubbles: true, changedTouches: [touch(400 + dx)]}));
    }"""
    assert viewer.after(lambda: viewer(swipe, -150)).state("story") == [4]
    assert viewer.after(lambda: viewer(swipe, 150)).state("story") == [3]
    assert viewer.after(viewer.page.go_back).state("story") == [4]
    viewer.after(viewer.page.get_by_label("9 Training: How did it learn this?").click)
    assert heading.inner_text().startswith("9.") and viewer.find("story-next").is_disabled()
    assert viewer.page.url.endswith("story=9")


def test_another_scene_begins_at_its_heading(new_viewer, char):
    """On a phone, a scene opened in its middle, and screen readers were silent. PageDown turned the pages."""
    viewer = new_viewer(char, width=390).open("story", story=3)
    viewer("window.scrollTo(0, 400)")
    viewer.page.keyboard.press("PageDown")
    wait_until(lambda: viewer("scrollY") > 400)
    assert viewer.state("story") == [3]
    is_still = """async () => {
      const before = scrollY, frame = () => new Promise(requestAnimationFrame);
      for (let i = 0; i < 5; i++) await frame();
      return before === scrollY;
    }"""
    wait_until(lambda: viewer(is_still))  # the browser's animation has ended
    viewer.after(lambda: viewer.page.keyboard.press("ArrowRight"))
    assert viewer("scrollY") == 0
    assert viewer("document.activeElement === document.querySelector('#view h2')")
    box = viewer.find("story-next").bounding_box()  # in reach of a thumb
    assert box["height"] >= 48 and box["width"] >= 48
    height = viewer("innerHeight")
    assert height - 70 < box["y"] + box["height"] <= height


SIZES = ((390, 844), (820, 1180), (1024, 768), (1280, 720), (1440, 900), (1920, 1080), (2560, 1440))


def test_nothing_in_a_picture_is_cut_off(new_viewer, char):
    """The row that scene 3 is about was below the end of its box on a large screen."""
    viewer = new_viewer(char).open("tokens")
    cut = """() => [...document.querySelectorAll('.story .stage .scroll')].filter(box =>
      box.scrollHeight > box.clientHeight + 1).length"""
    for width, height in SIZES:
        viewer.page.set_viewport_size({"width": width, "height": height})
        for number in range(1, len(SCENES) + 1):
            viewer.show("story", story=number)
            assert viewer(cut) == 0, (width, height, number)


def test_a_head_is_not_praised_for_chance(char_viewer):
    """The strongest of the heads of an untrained model gave 4% to the previous token."""
    text = char_viewer.show("story", story=3, token=17, text=TEXT).text()
    share = float(text.split(" of its attention to the token just before")[0].split()[-1].strip("%")) / 100
    assert ("It is the strongest previous-token head" in text) == (share >= 0.3)
    assert ("No head of this model looks at the previous token yet" in text) == (share < 0.3)


def test_the_button_of_each_scene_does_what_it_says(new_viewer, char):
    viewer = new_viewer(char, reduced_motion="reduce").open("tokens")
    run, page = viewer.run(), viewer.page

    def press(scene: str = "") -> Viewer:
        if scene:
            show_scene(viewer, scene, token=17)
        viewer.find("story-try").click()
        return viewer.wait()

    press("tokens")
    assert page.locator("#text").input_value() == TEXT.swapcase()
    assert press("vector").state("token") == [16]
    layer, head = previous_token_head(run, rank=1)
    assert f"Layer {layer}, head {head}" in press("query").find("story-query").inner_text()
    viewer("document.activeElement.blur()")
    assert viewer.press("]").state("story_head") == [2] and viewer.press("[", "[", "[").state("story_head") == [0]
    press("mask"), press(), press()
    assert page.locator("#view svg.grid").get_attribute("data-stage") == "Scores"
    assert press("values").page.locator("[data-testid=story-path] line").count() == 2 * run.gpt.config.n_layer
    before = show_scene(viewer, "neuron", token=17).find("story-neuron").inner_text()
    assert press().find("story-neuron").inner_text() != before
    assert press("guess").state("token") == [18]
    assert press("training").page.locator("tr.hidden").count() == 0


def test_the_default_token_is_in_a_word(char_viewer):
    """The views that a scene links to show the same token, and drawing continues from it."""
    viewer, last = char_viewer, max(t for t in range(19) if TEXT[t].isalpha())
    selected = viewer.show("story", story=3, text=TEXT[:20]).page.locator("#strip .selected")
    assert selected.get_attribute("data-testid") == f"strip-{last}"
    viewer.after(viewer.page.get_by_role("link", name="Look closer").click)
    assert viewer.state("view", "token") == ["qkv", last]
    viewer.show("story", text="  ")
    assert selected.get_attribute("data-testid") == "strip-1"
    viewer.show("story", story=8, text=TEXT[:20])
    for token in range(last + 1, last + 4):
        assert viewer.after(viewer.find("story-try").click).state("token") == [token]
        assert len(viewer.state("ids")[0].split(",")) == token + 1


def test_the_recorded_training_follows_the_token_of_the_story(char_viewer):
    """Letters and digits of any script; an accent or a byte may be a token."""
    texts = [TEXT, *"a . a. .. 1! ½. 日本。 \u05d0\u200f! Ⅷ- 🎉🎉 e\u0301! __ \U0001d400+-".split()]
    for labels in [*map(list, texts), ["\\xe9", "\\x80", "."], ["<|endoftext|>", "", " "], ["", ""]]:
        assert story_token(labels) == char_viewer("labels => storyToken(labels)", labels), labels


def test_the_thread_shows_the_states_of_the_token(char_viewer):
    """What the logit lens reads in each, and what the scene is about."""
    viewer = char_viewer.show("story", story=3, token=17)
    run, parts = viewer.run(), viewer.find("story-thread").locator("a")
    tokens = run.logits_of(run.stream[:, 17]).argmax(1)
    pieces = viewer("ids => ids.map(id => visible(pieces[id]))", tokens.tolist())
    assert parts.locator("> small").all_text_contents()[1:-1] == pieces
    layer, _ = previous_token_head(run)
    marked = "nodes => nodes.map((node, i) => node.matches('.marked') ? i : -1).filter(i => i >= 0)"
    assert parts.evaluate_all(marked) == [2 * layer + 2]
    assert viewer.after(parts.last.click).state("story") == [8]
    assert parts.evaluate_all(marked) == [len(pieces) + 1]


def test_weights_of_the_future_are_blank(char_viewer):
    char_viewer.show("story", story=4, token=8, story_stage=2)
    cells = np.array(char_viewer.page.locator("#view .cell").all_text_contents()).reshape(9, 9)
    assert (cells[np.triu_indices(9, 1)] == "").all() and (cells[np.tril_indices(9)] != "").all()


def test_on_phones_the_words_begin_before_the_picture(new_viewer, char):
    viewer = new_viewer(char, width=390).open("tokens")
    for number in range(1, len(SCENES) + 1):
        viewer.show("story", story=number)("window.scrollTo(0, 0)")
        first, stage, second = (
            viewer.page.locator(f"#view {selector}").first.bounding_box()
            for selector in (".words p", ".stage", ".words .controls")
        )
        assert first["y"] < stage["y"] < 500 < second["y"], number


def test_drawn_tokens_equal_those_of_language_model(char_viewer):
    char_viewer.show("story", story=8, token=17, temperature=0.7, top_k=20, seed=5)
    for _ in range(6):
        char_viewer.after(char_viewer.find("story-try").click)
    expected = language_model(char_viewer).generate(TEXT[:18], max_new_tokens=6, temperature=0.7, top_k=20, seed=5)
    assert TOKENIZERS["char"].decode([*map(int, char_viewer.state("ids")[0].split(","))]) == TEXT[:18] + expected


def test_presenting_shows_only_the_scene(new_viewer, char):
    viewer = new_viewer(char).open("story", story=3)
    viewer.press("p").page.locator("#header").wait_for(state="hidden")
    assert not viewer.page.locator("#menu, #header, #text, footer").filter(visible=True).count()
    viewer.page.keyboard.press("ArrowRight")
    viewer.page.get_by_role("heading", name="4. What may it see?").wait_for()
    viewer("document.exitFullscreen()")
    viewer.page.locator("#header").wait_for()


def test_scenes_that_do_not_apply_are_left_out(new_viewer, serve):
    """A run with one checkpoint has no training to show; one token has no previous one."""
    viewer = new_viewer(serve(build_model("char", 1))).open("tokens")
    assert viewer("availableScenes().length") == len(SCENES) - 1
    assert viewer.show("story", story=9).page.locator("#view h2").inner_text().startswith("8.")
    for number in range(1, len(SCENES)):
        viewer.show("story", story=number, ids="5").text()


def test_pictures_beside_each_other_fit(new_viewer, char):
    """The map ran under the words, and strips were cut off."""
    viewer = new_viewer(char).open("tokens")
    for width, scene in itertools.product((1290, 1300, 1400), (2, 5)):
        viewer.page.set_viewport_size({"width": width, "height": 900})
        assert viewer.show("tokens").show("story", story=scene)(
            """() => Array.from(document.querySelectorAll("#view .stage figure"), figure => {
              const {right} = figure.getBoundingClientRect();
              return Array.from(figure.querySelectorAll("svg")).every(drawing =>
                drawing.getBoundingClientRect().right <= right + 1);
            })"""
        ), (width, scene)
