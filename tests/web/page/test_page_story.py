"""The story in a browser: its numbers compared with NumPy, its buttons, and its keys.

The check of a scene is a function with @tells("its-id"). All checks of a model share a page.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from folio.data.tokenizer import CharTokenizer
from folio.decoding.prompts import encode_prompt
from folio.decoding.sampling import Sampling, next_token_probabilities
from folio.web.questions import TOP_EFFECTS, TOP_NEURONS
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyGPT, NumpyRun, alibi_slopes, assert_same, softmax, t5_bucket
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import Place, Viewer, effect_of, in_browser, language_model, serving

Check = Callable[[Viewer, NumpyRun, Place], None]
CHECKS: dict[str, Check] = {}
SCENES = ("tokens", "vector", "query", "mask", "values", "neuron", "guess", "choice", "training")


def tells(scene: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[scene] = check
        return check

    return register


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
    wte = wte[: viewer.served.provider.models[0].tokenizer.vocab_size]
    cosine = wte @ wte[token] / np.linalg.norm(wte, axis=1) / np.linalg.norm(wte[token])
    near = [token, *(i for i in np.argsort(-cosine) if i != token)][:6]
    assert_same(viewer.matrix("story-near"), wte[near].T)
    marked = viewer("Array.from(document.querySelectorAll('#view line[stroke-width=\"1.5\"]')).length")
    assert marked == 5 and {*near} <= {*viewer.column("story-map", "id")}
    shown = np.array([[row[0], *row[2:]] for row in viewer.table("story-map")["rows"]])
    projected = project(wte, wte)[shown[:, 0].astype(int)]
    assert_same(shown[:, 1:], projected * np.sign((projected * shown[:, 1:]).sum(0)), 1e-4)
    if config.position == "rotary":
        pairs = config.n_embd // config.n_head // 2
        shown = [math.floor(i * pairs / min(8, pairs)) for i in range(min(8, pairs))]
        assert_same(viewer.column("story-rotary", "angle"), place.token * 10000.0 ** (-np.array(shown) / pairs))
    if config.position in ("relative", "alibi"):
        distance = np.arange(place.token + 1)
        _, head = previous_token_head(run)
        relative = config.position == "relative" and run.gpt.parameters["relative_bias.weight"][t5_bucket(distance)]
        expected = relative[:, head] if config.position == "relative" else -alibi_slopes(config.n_head)[head] * distance
        assert_same(viewer.column("story-bias", "bias"), expected)


def project(vectors: np.ndarray, wte: np.ndarray) -> np.ndarray:
    """Project vectors on the two principal components of the embeddings."""
    centered = wte - wte.mean(0)
    return (vectors - wte.mean(0)) @ np.linalg.svd(centered, full_matrices=False)[2][:2].T


@tells("query")
def check_query(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    tokens = tokens_shown(place)
    assert f"Layer {layer}, head {head}" in viewer.find("story-query").inner_text()
    scores, bias = run.layer(layer).scores[head], run.layer(layer).bias
    products = scores[place.token]
    scores = scores if bias is None else scores + bias[head]
    assert_same(viewer.matrix("story-query"), scores[np.ix_(tokens, tokens)])
    best = tokens[run.layer(layer).weights[head, place.token, tokens].argmax()]  # of those in the grid
    detail = viewer.find("story-query").locator(".detail").inner_text()
    assert f"query of {place.token} " in detail and f"key of {best} " in detail
    assert number_after(detail, "score: ") == pytest.approx(scores[place.token, best], abs=1e-3)
    D = run.gpt.config.n_embd // run.gpt.config.n_head
    assert number_after(detail, "sum: ") == pytest.approx(products[best] * D**0.5, abs=1e-2)


def number_after(text: str, words: str) -> float:
    return float(text.split(words)[1].split()[0].strip(".,").replace("\N{MINUS SIGN}", "-"))


@tells("mask")
def check_mask(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    tokens, activations = tokens_shown(place), run.layer(layer)
    scores = activations.scores if activations.bias is None else activations.scores + activations.bias
    masked = np.where(run.hidden_keys, -np.inf, scores[head])
    for stage, expected in {"Scores": scores[head], "Masked": masked, "Weights": activations.weights[head]}.items():
        assert_same(viewer.column("story-mask", stage), expected[np.ix_(tokens, tokens)].flatten())
    row = activations.weights[head, place.token]
    bars = viewer.find("story-mask").locator(".weight").all_inner_texts()
    shown = [float(bar.split("\n")[-1].strip("<%")) / 100 for bar in bars]
    earlier = [row[: tokens[0]].sum()] if tokens[0] else []
    assert shown == pytest.approx([*earlier, *row[tokens], 1], rel=0.006, abs=1e-4)


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
    wte = run.gpt.parameters["wte.weight"][: viewer.served.provider.models[0].tokenizer.vocab_size]
    states = run.stream[:, place.token]
    length = np.linalg.norm(states, axis=1, keepdims=True)
    path = project(states * length[0] / length, wte)
    shown = viewer.matrix("story-path")
    assert_same(shown, path * np.sign((path * shown).sum(0)), 1e-4)


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
        assert number_after(words, ", by ") == pytest.approx(max(votes), rel=1e-3)
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
    assert sorted(ids) == list(range(viewer.served.provider.models[0].tokenizer.vocab_size))
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


@in_browser
def test_scenes_equal_numpy(new_viewer, served, seed):
    """After one weight was changed."""
    viewer, place = new_viewer(served), Place()
    with served.perturbed(seed) as model:
        run = NumpyGPT(model).run(viewer.open("tokens").column("tokens", "id"))
        assert [*CHECKS] == [*SCENES] == viewer("availableScenes().map(({id}) => id)")
        for scene, check in CHECKS.items():
            show_scene(viewer, scene, token=place.token)
            text = viewer.page.locator("#view").inner_text()
            assert not {"NaN", "undefined", "false", "null"} & {*text.split()}
            assert 1 <= viewer.page.locator("#view .words p").count() <= 3
            check(viewer, run, place)


@in_browser
def test_other_documents_are_hidden_in_pictures_that_begin_at_a_later_token(new_viewer, tmp_path):
    """With a mask of documents. What is hidden follows from positions in the text, not in the picture."""
    tokenizer, text = CharTokenizer("abcdef", eot=True), "abc<|endoftext|>fedcbafed<|endoftext|>abcdefabc"
    model = random_model(1, block_size=48, vocab_size=7, n_embd=32, document_token=tokenizer.eot)
    run, place = NumpyGPT(model).run(encode_prompt(tokenizer, text).ids), Place(token=20)
    assert 0 < tokens_shown(place)[0] < 14 < place.token  # a document begins at position 14
    with serving([save_run(tmp_path / "run", {1: model}, tokenizer, {})], text) as served:
        viewer = new_viewer(served).open("tokens", token=place.token)
        for scene in ("query", "mask", "values"):
            CHECKS[scene](show_scene(viewer, scene, token=place.token), run, place)


@in_browser
def test_buttons_keys_and_swipes_turn_the_pages(new_viewer, char):
    viewer = new_viewer(char).follow(char.url)
    heading = viewer.page.locator("#view h2")
    assert heading.inner_text() == "1. What does the model see?" and viewer.find("story-back").is_disabled()

    def turn(action: Callable[[], object]) -> int:
        drawn = viewer("drawing")
        action()
        return viewer.wait(drawn).state("story")[0]

    assert turn(viewer.find("story-next").click) == 2
    viewer("document.activeElement.blur()")
    for key, number in (("ArrowRight", 3), ("PageDown", 4), ("ArrowLeft", 3)):
        assert turn(lambda key=key: viewer.page.keyboard.press(key)) == number
    swipe = """dx => {
      const box = document.querySelector(".story h2"), touch = x => new Touch({identifier: 1, target: box, clientX: x,
        clientY: 300});
      box.dispatchEvent(new TouchEvent("touchstart", {bubbles: true, touches: [touch(400)]}));
      box.dispatchEvent(new TouchEvent("touchend", {bubbles: true, changedTouches: [touch(400 + dx)]}));
    }"""
    assert turn(lambda: viewer(swipe, -150)) == 4 and turn(lambda: viewer(swipe, 150)) == 3
    viewer.page.go_back()
    assert viewer.wait().state("story") == [4]
    turn(lambda: viewer.page.get_by_label("9 Training: How did it learn this?").click())
    assert heading.inner_text().startswith("9.") and viewer.find("story-next").is_disabled()
    assert viewer.page.url.endswith("story=9")


@in_browser
def test_the_button_of_each_scene_does_what_it_says(new_viewer, char):
    viewer = new_viewer(char, reduced_motion="reduce").open("tokens")
    run = NumpyGPT(viewer.served.provider.models[0].model).run(viewer.column("tokens", "id"))

    def press(scene: str) -> Viewer:
        show_scene(viewer, scene, token=17)
        return press_again()

    def press_again() -> Viewer:
        viewer.find("story-try").click()
        return viewer.wait()

    press("tokens")
    assert viewer.page.locator("#text").input_value() == TEXT.swapcase()
    assert press("vector").state("token") == [16]
    layer, head = previous_token_head(run, rank=1)
    assert f"Layer {layer}, head {head}" in press("query").find("story-query").inner_text()
    viewer("document.activeElement.blur()")
    assert viewer.press("]").state("story_head") == [2] and viewer.press("[", "[", "[").state("story_head") == [0]
    stages = [press("mask"), press_again(), press_again()]
    assert viewer.page.locator("#view svg.grid").get_attribute("data-stage") == "Scores" and len(stages) == 3
    arrows = press("values").page.locator("[data-testid=story-path] line")
    assert arrows.count() == 2 * run.gpt.config.n_layer
    before = show_scene(viewer, "neuron", token=17).find("story-neuron").inner_text()
    assert press_again().find("story-neuron").inner_text() != before
    assert press("guess").state("token") == [18]
    assert press("training").page.locator("tr.hidden").count() == 0


@in_browser
def test_the_default_token_is_in_a_word(new_viewer, char):
    """The views that a scene links to show the same token, and drawing continues from it."""
    last = max(t for t in range(19) if TEXT[t].isalpha())
    viewer = new_viewer(char).open("story", story=3, text=TEXT[:20])
    selected = viewer.page.locator("#strip .selected")
    assert selected.get_attribute("data-testid") == f"strip-{last}"
    drawn = viewer("drawing")
    viewer.page.get_by_role("link", name="Look closer").click()
    assert viewer.wait(drawn).state("view", "token") == ["qkv", last]
    assert viewer.show("story", text="  ").page.locator("#strip .selected").get_attribute("data-testid") == "strip-1"
    viewer.show("story", story=8, text=TEXT[:20])
    for token in range(last + 1, last + 4):
        drawn = viewer("drawing")
        viewer.find("story-try").click()
        assert viewer.wait(drawn).state("token") == [token] == [len(viewer.state("ids")[0].split(",")) - 1]


@in_browser
def test_the_thread_shows_the_states_of_the_token(new_viewer, char):
    """What the logit lens reads in each, and what the scene is about."""
    viewer = new_viewer(char).open("story", story=3, token=17)
    run = NumpyGPT(viewer.served.provider.models[0].model).run(TOKENIZERS["char"].encode(TEXT).tolist())
    probabilities = softmax(run.logits_of(run.stream[:, 17]))
    parts = viewer.find("story-thread").locator("a")
    pieces = [viewer("id => visible(pieces[id])", int(token)) for token in probabilities.argmax(1)]
    assert parts.locator("> small").all_text_contents()[1:-1] == pieces
    layer, _ = previous_token_head(run)
    marked = "nodes => nodes.map((node, i) => node.matches('.marked') ? i : -1).filter(i => i >= 0)"
    assert parts.evaluate_all(marked) == [2 * layer + 2]
    drawn = viewer("drawing")
    parts.last.click()
    assert viewer.wait(drawn).state("story") == [8] and parts.evaluate_all(marked) == [len(pieces) + 1]


@in_browser
def test_weights_of_the_future_are_blank(new_viewer, char):
    viewer = new_viewer(char).open("story", story=4, token=8, story_stage=2)
    cells = np.array(viewer.page.locator("#view .cell").all_text_contents()).reshape(9, 9)
    assert (cells[np.triu_indices(9, 1)] == "").all() and (cells[np.tril_indices(9)] != "").all()


@in_browser
def test_on_phones_the_words_begin_before_the_picture(new_viewer, char):
    viewer = new_viewer(char, width=390)
    for number in range(1, len(SCENES) + 1):
        viewer.open("story", story=number)
        first, stage, second = (
            viewer.page.locator(f"#view {selector}").first.bounding_box()
            for selector in (".words p", ".stage", ".words .controls")
        )
        assert first["y"] < stage["y"] < 500 < second["y"], number


@in_browser
def test_drawn_tokens_equal_those_of_language_model(new_viewer, char):
    viewer = new_viewer(char)
    viewer.open("story", story=8, token=17, temperature=0.7, top_k=20, seed=5)
    for _ in range(6):
        drawn = viewer("drawing")
        viewer.find("story-try").click()
        viewer.wait(drawn)
    expected = language_model(viewer).generate(TEXT[:18], max_new_tokens=6, temperature=0.7, top_k=20, seed=5)
    text = TOKENIZERS["char"].decode([*map(int, viewer.state("ids")[0].split(","))])
    assert text == TEXT[:18] + expected


@in_browser
def test_presenting_shows_only_the_scene(new_viewer, char):
    viewer = new_viewer(char).open("story", story=3)
    viewer.press("p").page.locator("#header").wait_for(state="hidden")
    assert not viewer.page.locator("#menu, #header, #text, footer").filter(visible=True).count()
    viewer.page.keyboard.press("ArrowRight")
    viewer.page.get_by_role("heading", name="4. What may it see?").wait_for()
    viewer("document.exitFullscreen()")
    viewer.page.locator("#header").wait_for()


@in_browser
def test_scenes_that_do_not_apply_are_left_out(new_viewer, tmp_path):
    """A run with one checkpoint has no training to show; one token has no previous one."""
    run = save_run(tmp_path / "run", {100: build_model("char", 1)}, TOKENIZERS["char"], {})
    with serving([run]) as served:
        viewer = new_viewer(served)
        assert viewer.open("tokens")("availableScenes().length") == len(SCENES) - 1
        assert viewer.open("story", story=9).page.locator("#view h2").inner_text().startswith("8.")
        for number in range(1, 9):
            viewer.show("story", story=number, ids="5")
            assert not viewer.page.locator("#view .error:not(:empty)").count()
            assert not {"NaN", "undefined", "null"} & {*viewer.page.locator("#view").inner_text().split()}


@in_browser
@pytest.mark.parametrize("width", [1290, 1300, 1400])
def test_pictures_beside_each_other_fit(width, new_viewer, char):
    """The map ran under the words, and strips were cut off."""
    viewer = new_viewer(char, width=width)
    for scene in (2, 5):
        viewer.open("story", story=scene)
        assert all(
            viewer(
                """() => Array.from(document.querySelectorAll("#view .stage figure"), figure => {
                  const {right} = figure.getBoundingClientRect();
                  return Array.from(figure.querySelectorAll("svg")).every(drawing =>
                    drawing.getBoundingClientRect().right <= right + 1);
                })"""
            )
        )
