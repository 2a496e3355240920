"""The story in a browser: the numbers of its words and acts compared with NumPy, its buttons, and its keys.

The check of a stop is a function with @tells("its-id"). All checks of a model share a page. What the sheet shows is in
test_page_machine.py.
"""

import math
import re

import numpy as np
import torch

from folio.data.tokenizer import CharTokenizer
from folio.decoding.sampling import Sampling, next_token_probabilities, uniforms
from folio.web.html_export import story_token
from folio.web.questions import TOP_EFFECTS, TOP_NEURONS
from tests.support.decoding import random_model
from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyGPT, NumpyRun, assert_same, softmax
from tests.support.stops import (
    HOLD_PAUSES,
    STOPS,
    check_addition,
    check_number,
    check_partial_sums,
    frames,
    quoted,
    rows_of,
    settle,
    show_stop,
    stop_text,
)
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model
from tests.support.viewers import Checks, Place, Viewer, effect_of, language_model
from tests.support.waiting import wait_until

tells = Checks()
TIMES_SIGN = "\N{MULTIPLICATION SIGN}"
ADDED = 5  # values, or neurons, that an act adds one by one


def previous_token_head(run: NumpyRun, rank: int = 0) -> tuple[int, int]:
    """The head (layer, head) that gives the most attention to the previous token, or a later one in this order."""
    layers = range(run.gpt.config.n_layer)
    scores = np.array([run.layer(index).weights[:, 1:, :-1].diagonal(axis1=1, axis2=2).mean(1) for index in layers])
    layer, head = np.unravel_index(np.argsort(-scores, axis=None)[rank], scores.shape)
    return int(layer), int(head)


def window_of(viewer: Viewer, place: Place) -> np.ndarray:
    """The positions of the tokens on the sheet: the selected one, and up to 13 before it."""
    assert viewer("machine.sheet.first") == max(0, place.token - 13)
    return np.arange(max(0, place.token - 13), place.token + 1)


# --- numbers of the stops ---------------------------------------------------------------------------------------------


@tells("machine")
def check_machine(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    probabilities = run.probabilities[place.token]  # of which those of padding ids are not shown
    probabilities, words = probabilities[: viewer.viewed.tokenizer.vocab_size], stop_text(viewer)
    assert f" and expects {quoted(viewer, probabilities.argmax())} " in words
    check_number(words, r"and expects “.*?” \(#\)", probabilities.max())
    assert viewer("machine.sheet.next.map(([id]) => id)") == np.argsort(-probabilities)[:8].tolist()
    assert_same(viewer("machine.sheet.next.map(([, p]) => p)"), np.sort(probabilities)[::-1][:8])
    check_list(viewer, run, place)


def check_list(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    """Check the ordered list of the operations."""
    lines, L = viewer.find("machine-list").locator("li").all_text_contents(), run.gpt.config.n_layer
    lens = softmax(run.logits_of(run.stream[:, place.token]))
    predictions = [f"{quoted(viewer, row.argmax())} (" for row in lens]
    for prediction, line in zip(predictions, [line for line in lines if "would predict" in line], strict=True):
        assert f"would predict {prediction}" in line
    window, heads = window_of(viewer, place), [line for line in lines if line.startswith("Head ")]
    assert len(heads) == L * run.gpt.config.n_head
    for i, line in enumerate(heads):
        layer, head = divmod(i, run.gpt.config.n_head)
        row = run.layer(layer).weights[head, place.token]
        best = int(window[row[window].argmax()])
        assert (
            line.startswith(f"Head {layer}.{head} takes ") and f" of {quoted(viewer, run.ids[best])} at {best}" in line
        )
        check_number(line, "takes # of ", row[best])
        if window[0] and row[: window[0]].sum():
            check_number(line, "# of earlier tokens", row[: window[0]].sum())
    for layer, line in enumerate(line for line in lines if "neurons of layer" in line):
        check_number(line, "^# of ", (run.layer(layer).hidden[place.token] > 0).sum())


@tells("tokens")
def check_tokens(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    token, words = run.ids[place.token], stop_text(viewer)
    check_number(words, "numbers from 0 to #", viewer.viewed.tokenizer.vocab_size - 1)
    assert f"{quoted(viewer, token)} is id {token}." in words
    assert f"the text goes on with {quoted(viewer, run.ids[place.token + 1])}," in words


@tells("vector")
def check_vector(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    config, token, wte = run.gpt.config, run.ids[place.token], run.gpt.parameters["wte.weight"]
    wte, words = wte[: viewer.viewed.tokenizer.vocab_size], stop_text(viewer)
    assert f"a learned table: {config.n_embd} numbers" in words
    cosine = wte @ wte[token] / np.linalg.norm(wte, axis=1) / np.linalg.norm(wte[token])
    near = [i for i in np.argsort(-cosine) if i != token][:5]
    threshold = 3 * round(1 / math.sqrt(config.n_embd), 2)
    clear = [quoted(viewer, i) for i in near if cosine[i] > threshold]
    nearest = f"near {quoted(viewer, token)} {'is' if len(clear) == 1 else 'are'} {', '.join(clear)}."
    assert (nearest if clear else f"No token is clearly near {quoted(viewer, token)}") in words
    if config.position in ("learned", "sinusoidal"):
        check_number(words, "position #, is" if config.position == "learned" else "position # are", place.token)
        parts = [run.embeddings[place.token], run.positions[place.token], run.stream[0, place.token]]
        check_addition(viewer, np.array(parts))
    else:
        assert not viewer("Boolean(machine.scene.act)") and "position" in words.lower()


@tells("query")
def check_query(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    activations, words, t = run.layer(layer), stop_text(viewer), place.token
    row, D = activations.weights[head, t], run.gpt.config.n_embd // run.gpt.config.n_head
    best = int(row.argmax())
    assert f"In this head, {layer}.{head}, " in words and f"a query of {D} numbers" in words
    assert f"{quoted(viewer, run.ids[t])} finds {quoted(viewer, run.ids[best])}." in words
    share = activations.weights[head, 1:, :-1].diagonal().mean()
    check_number(words, "gives # of its attention to the token just before", share)
    check_other_token(words, viewer, run, t, best, (layer, head))
    query, key = activations.q[head, t], activations.k[head, best]
    products, counts = query * key, []
    score = run.biased_scores(layer, head)[t, best]
    for frame in frames(viewer):
        assert_same([row["values"] for row in rows_of(frame, "strip")], np.array([query, key, products]))
        counts.append(rows_of(frame, "strip")[2]["shown"])
        total, result = (row["text"] for row in rows_of(frame, "text"))
        check_number(total, "sum of # products", counts[-1])
        check_number(total, "products: #$", products[: counts[-1]].sum(), np.abs(products).sum())
        if result:
            check_number(result, "the score #$", score, np.abs(products).sum())
    assert counts == sorted(counts) and {*counts} == {*range(D + 1)} and result
    assert (" for the distance" in result) == (run.gpt.bias(2) is not None)
    assert viewer.page.locator("#view .check").count() == 1


def check_other_token(words: str, viewer: Viewer, run: NumpyRun, t: int, best: int, place: tuple[int, int]) -> None:
    """Check what the head does with another token in the place of the found one."""
    others = [i for i in run.ids.tolist() if i not in (run.ids[best], run.ids[t])]
    if best == t:
        assert "in the place of" not in words
        return
    assert f"With {quoted(viewer, others[0])} in the place of {quoted(viewer, run.ids[best])}, it would " in words
    changed = run.gpt.run([others[0] if i == best else int(id) for i, id in enumerate(run.ids)])
    layer, head = place
    before, after = (each.layer(layer).weights[head, t, best] for each in (run, changed))
    check_number(words, "it would (?:still|only) get #", after)
    if abs(after - before / 2) > 1e-4:  # otherwise, either is right
        assert ("seems to look for a place, not for a token" in words) == (after > before / 2)


@tells("mask")
def check_mask(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    t, words, row = place.token, stop_text(viewer), run.layer(layer).weights[head, place.token]
    check_number(words, rf"head {layer}\.{head} is #, for ", row.max())
    assert f"for {quoted(viewer, run.ids[row.argmax()])}." in words
    assert f"The {len(run.ids) - 1 - t} tokens after " in words
    tokens = window_of(viewer, place)
    scores, weights = run.masked_scores(layer, head)[t], run.layer(layer).weights[head, t]
    exps = np.exp(scores - scores[tokens].max())
    has_earlier = weights[: tokens[0]].sum() > 0
    earlier = [[math.nan], [exps[: tokens[0]].sum()], [weights[: tokens[0]].sum()]] if has_earlier else [[], [], []]
    expected = [[*first, *values[tokens]] for first, values in zip(earlier, (scores, exps, weights), strict=True)]
    last = [0, 0, 0]
    for frame in frames(viewer):
        stage = int(frame[0]["text"][0]) - 1
        (bars,) = rows_of(frame, "bars")
        values = [bar["value"] for bar in bars["bars"]]
        shown = len(values) - next((i for i, bar in enumerate(reversed(bars["bars"])) if bar["text"]), len(values))
        last[stage] = shown
        numbers = [math.nan if value is None else value for value in values]
        expected_numbers = [*expected[stage][:shown], *[math.nan] * (len(values) - shown)]
        largest = np.abs(scores[np.isfinite(scores)]).max() * max(1, np.nanmax(np.abs(exps[tokens])))
        np.testing.assert_allclose(numbers, expected_numbers, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR * max(1, largest))
        for bar, value in zip(bars["bars"][:shown], expected[stage], strict=False):
            check_bar(bar["text"], value, stage)
    assert last == 3 * [len(expected[0])]
    result = frame[-1]["text"]
    check_number(result, "the largest is #, of ", row.max())


def check_bar(text: str, value: float, stage: int) -> None:
    """Check the text of a bar of stage 0 (a score), 1 (its exp), or 2 (its weight)."""
    if math.isnan(value):
        assert text == ""
    elif stage == 2:
        check_number(text, "^#$", value)
    elif math.isinf(value):
        assert text == "\N{MINUS SIGN}\N{INFINITY}"
    else:
        assert (
            abs(float(text.replace("\N{MINUS SIGN}", "-")) - value) <= (0.5 * 10 ** -(3 if stage else 1)) * 1.01 + 1e-4
        )


@tells("values")
def check_values(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, head = previous_token_head(run)
    activations, words = run.layer(layer), stop_text(viewer)
    weights, v = activations.weights[head, place.token], activations.v[head]
    order = [int(t) for t in np.argsort(-weights) if weights[t] > 0]
    for t in order[:2]:
        assert f" of the value of {quoted(viewer, run.ids[t])}" in words
    check_number(words, "takes # of the value of ", weights[order[0]])
    *items, total = rows_of(frames(viewer, [1.0])[0], "strip")
    parts = [*(weights[t] * v[t] for t in order[:ADDED])]
    assert_same([row["values"] for row in items[:ADDED]], v[order[:ADDED]])
    for t, row in zip(order, items[:ADDED], strict=False):
        check_number(row["text"], rf"^{TIMES_SIGN} #$", weights[t])
    if order[ADDED:]:
        parts.append(weights[order[ADDED:]] @ v[order[ADDED:]])
        assert_same(items[-1]["values"], parts[-1])
        check_number(items[-1]["label"], "^# tokens?$", len(order) - ADDED)
    assert_same(total["values"], activations.z[head, place.token])
    check_partial_sums(viewer, np.array(parts), np.abs(v).max())
    assert viewer.page.locator("#view .check").count() == 1


@tells("neuron")
def check_neuron(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    index = run.gpt.config.n_layer - 1
    layer, columns = run.layer(index), run.gpt.parameters[f"h.{index}.mlp.c_proj.weight"].T
    hidden, words = layer.hidden, stop_text(viewer)
    written = np.abs(hidden[place.token]) * np.linalg.norm(columns, axis=1)
    strongest = np.argsort(-written)[:TOP_NEURONS]
    check_number(words, "alone by # neurons", hidden.shape[1])
    check_number(words, "layer, # are active", (hidden[place.token] > 0).sum())
    guess, votes = run.logits[place.token].argmax(), []
    for neuron in strongest:
        effect = effect_of(run, columns[neuron] * hidden[place.token, neuron], place.token)
        votes.append(effect[guess] if guess in np.argsort(-effect)[:TOP_EFFECTS] else 0.0)
    neuron = strongest[np.argmax(votes)]
    if max(votes) > 0:
        assert f"Neuron {neuron} raises the score of {quoted(viewer, guess)}" in words
        check_number(words, "by #; it also", max(votes), np.abs(run.logits).max())
    else:
        assert "None of the strongest neurons votes clearly" in words
    most = np.argsort(-np.abs(hidden[:, neuron]))[:3]
    assert ", ".join(f"{quoted(viewer, run.ids[t])} ({t})" for t in most) in words
    rows, shown = rows_of(frames(viewer, [1.0])[0], "strip"), strongest[:ADDED]
    assert [row["label"] for row in rows[:ADDED]] == [f"neuron {i}" for i in shown]
    parts = hidden[place.token, shown, None] * columns[shown]
    assert_same([row["values"] for row in rows[:ADDED]], parts)
    for i, row in zip(shown, rows, strict=False):
        check_number(row["text"], rf"^{TIMES_SIGN} #$", hidden[place.token, i], np.abs(hidden).max())
    bias = run.gpt.parameters.get(f"h.{index}.mlp.c_proj.bias")
    all_neurons = hidden[place.token] @ columns
    rest = [all_neurons - parts.sum(0), *([] if bias is None else [bias])]
    assert_same([row["values"] for row in rows[ADDED:-1]], rest)
    check_number(rows[ADDED]["label"], "^# others$", len(columns) - ADDED)
    assert_same(rows[-1]["values"], layer.mlp[place.token])
    check_partial_sums(viewer, np.array([*parts, *rest]), np.abs(parts).max())


@tells("guess")
def check_guess(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    states, words = run.stream[:, place.token], stop_text(viewer)
    probabilities = softmax(run.logits_of(states))
    best, following = probabilities.argmax(1), run.ids[place.token + 1]
    known = next(s for s in range(len(best)) if (best[s:] == best[-1]).all())
    assert f"{quoted(viewer, best[-1])} is the top guess." in words
    assert ("Only in the last state" in words) == (known == len(best) - 1)
    check_number(words, "It ends with #", probabilities[-1, best[-1]])
    check_number(words, "goes on with “.*?”: # at the start", probabilities[0, following])
    check_number(words, "at the start, # at the end", probabilities[-1, following])
    state = max(1, known)  # where it becomes known
    check_addition(viewer, np.array([states[state - 1], states[state] - states[state - 1], states[state]]))
    lens = viewer("machine.sheet.lens.map(({probability, isNext}) => [probability, isNext])")
    assert_same([p for p, _ in lens], probabilities.max(1))
    assert [is_next for _, is_next in lens] == (best == following).tolist()


@tells("choice")
def check_choice(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    V, words = viewer.viewed.tokenizer.vocab_size, stop_text(viewer)
    logits = run.logits[place.token, :V]
    assert f"{quoted(viewer, logits.argmax())} has the highest score" in words
    check_number(words, "highest score: # at", softmax(logits).max())
    filtered = next_token_probabilities(torch.tensor(logits), Sampling(temperature=0.8, top_k=200)).numpy()
    u, ends = uniforms(1337, [0], 0, 1).item(), filtered.cumsum()
    drawn, fallen = int((ends > u).argmax()), []
    check_number(words, "random number, here # from", u)
    assert f"The token there, {quoted(viewer, drawn)}, follows {quoted(viewer, run.ids[place.token])}" in words
    for frame in frames(viewer):
        (line,) = rows_of(frame, "line")
        assert_same([part["to"] for part in line["parts"]], ends)
        assert_same([part["from"] for part in line["parts"]], [0, *ends[:-1]])
        assert [part["id"] for part in line["parts"]] == list(range(V)) and line["u"] == u
        fallen.append(line["fall"])
    assert fallen[0] == 0 and fallen[-1] == 1 and fallen == sorted(fallen)
    assert frame[-1]["text"] == f"u = {u:.4f} falls on {quoted(viewer, drawn)}"


@tells("training")
def check_training(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    steps, words, V = viewer("info.models[0].checkpoints"), stop_text(viewer), viewer.viewed.tokenizer.vocab_size
    assert len(steps) > 1
    check_number(words, rf"a loss of ln {V} = # nats", math.log(V))
    check_number(words, rf" to # at step {steps[-1]}", run.losses.mean())
    first = NumpyGPT(viewer.viewed.model_at(steps[0])).run(run.ids)
    check_number(words, rf" from # at step {steps[0]} ", first.losses.mean())
    assert ("the loss fell" in words) == (run.losses.mean() < first.losses.mean())


# --- tests ------------------------------------------------------------------------------------------------------------


def test_stops_equal_numpy(new_viewer, served, seed):
    """After one weight was changed. Each act ends with a check."""
    with served.perturbed(seed):
        viewer = new_viewer(served).open("tokens")
        run, place = viewer.run(), Place()
        assert [*tells] == [*STOPS] == viewer("availableStops().map(({id}) => id)")
        for stop in STOPS:
            tells.run(stop, show_stop(viewer, stop, token=place.token), run, place)
            assert 1 <= viewer.page.locator("#view .words p").count() <= 3
            checks = viewer.page.locator("#view .check").all_inner_texts()
            assert all(check.startswith("✓ ") for check in checks)
            assert len(checks) == bool(viewer("Boolean(machine.scene.act)")), stop


def test_other_documents_are_hidden_in_acts_that_begin_at_a_later_token(new_viewer, serve):
    """With a mask of documents. What is hidden follows from positions in the text, not on the sheet."""
    tokenizer, text = CharTokenizer("abcdef", eot=True), "abc<|endoftext|>fedcbafed<|endoftext|>abcdefabc"
    model = random_model(1, block_size=48, vocab_size=7, n_embd=32, document_token=tokenizer.eot)
    place = Place(token=20)  # a document begins at position 14, and the sheet at 7
    viewer = new_viewer(serve(model, tokenizer=tokenizer, text=text)).open("tokens")
    run = viewer.run()
    for stop in ("query", "mask", "values"):
        tells.run(stop, show_stop(viewer, stop, token=place.token), run, place)


def test_acts_of_a_changed_model_agree_with_it(new_viewer, char):
    """With another mask, the weights of the shown tokens do not sum to 1. A head that is off has no act."""
    viewer = new_viewer(char).open("tokens")
    for switches in (
        dict(mask="after"),
        dict(mask="off"),
        dict(scale=0),
        dict(mlps_off="1"),
        dict(heads_off="0.2,1.0"),
    ):
        for stop in STOPS[:-1]:
            show_stop(viewer, stop, token=17, **switches).text()
            assert viewer.page.locator("#view .check.wrong").all_inner_texts() == [], (stop, switches)


def test_buttons_keys_and_swipes_turn_the_pages(char_viewer):
    viewer = char_viewer.follow(char_viewer.served.url)
    heading, press = viewer.page.locator("#view h2"), viewer.page.keyboard.press
    assert heading.inner_text() == "How does this model choose the next token?"
    assert viewer.find("story-back").is_disabled() and viewer.state("story") == [0]
    assert viewer.after(viewer.find("story-next").click).state("story") == [1]
    viewer("document.activeElement.blur()")
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)):
        assert viewer.after(lambda key=key: press(key)).state("story") == [number]
    swipe = """dx => {
      const box = document.querySelector(".story h2"), touch = x => new Touch({identifier: 1, target: box, clientX: x,
        clientY: 300});
      box.dispatchEvent(new TouchEvent("touchstart", {bubbles: true, touches: [touch(400)]}));
      box.dispatchEvent(new TouchEvent("touchend", {bubbles: true, changedTouches: [touch(400 + dx)]}));
    }"""
    assert viewer.after(lambda: viewer(swipe, -150)).state("story") == [3]
    assert viewer.after(lambda: viewer(swipe, 150)).state("story") == [2]
    assert viewer.after(viewer.page.go_back).state("story") == [3]
    viewer.after(viewer.page.get_by_label("9 Training: How did it learn this?").click)
    assert heading.inner_text().startswith("9.") and viewer.find("story-next").is_disabled()
    assert viewer.page.url.endswith("story=9")
    assert viewer.follow(f"{viewer.served.url}#story=3").page.locator("#view h2").inner_text().startswith("3. ")
    for number in ("-3", "99", "x"):
        assert viewer.show("story", story=number).page.locator("#view [aria-current=step]").count() == 1


def test_another_stop_begins_at_its_heading(new_viewer, char):
    """On a phone, a stop opened in its middle, and screen readers were silent. PageDown turned the pages."""
    viewer = new_viewer(char, width=390).open("story", story=3)
    viewer("byId('view').querySelector('.words').scrollTo(0, 60)")
    viewer.page.keyboard.press("PageDown")
    assert viewer.state("story") == [3]
    viewer.after(lambda: viewer.page.keyboard.press("ArrowRight"))
    assert viewer.state("story") == [4] and viewer("byId('view').querySelector('.words').scrollTop") == 0
    assert viewer("document.activeElement === document.querySelector('#view h2')")


def test_a_head_is_not_praised_for_chance(char_viewer):
    """The strongest of the heads of an untrained model gave 4% to the previous token."""
    text = show_stop(char_viewer, "query", token=17, text=TEXT).text()
    share = float(re.search(r"gives ([\d.]+)% of its attention to the token just before", text)[1]) / 100
    assert ("It is the strongest previous-token head" in text) == (share >= 0.3)
    assert ("No head of this model looks at the previous token" in text) == (share < 0.3)


def test_the_head_stays_while_the_slider_moves(char_viewer):
    """Each checkpoint had its own strongest head, so the subject changed without a word."""
    show_stop(char_viewer, "query", token=17, text=TEXT)
    layer, head = previous_token_head(char_viewer.run())
    for step in (0, 10, 100):
        words = stop_text(show_stop(char_viewer, "query", token=17, text=TEXT, step=step))
        run = NumpyGPT(build_model("char", seed=step)).run(TOKENIZERS["char"].encode(TEXT))
        share = run.layer(layer).weights[head, 1:, :-1].diagonal().mean()
        assert f"In this head, {layer}.{head}, " in words
        check_number(words, "gives # of its attention to the token just before", share)


def test_the_button_of_each_stop_does_what_it_says(new_viewer, char):
    viewer = new_viewer(char, reduced_motion="reduce").open("tokens")
    run, page = viewer.run(), viewer.page

    def press(stop: str) -> Viewer:
        show_stop(viewer, stop, token=17)
        return settle(viewer.after(viewer.find("story-try").click))

    press("tokens")
    assert page.locator("#text").input_value() == TEXT.swapcase()
    assert press("vector").state("token") == [16]
    layer, head = previous_token_head(run, rank=1)
    assert f"In this head, {layer}.{head}, " in stop_text(press("query"))
    viewer("document.activeElement.blur()")
    assert viewer.press("]").state("story_head") == [2] and viewer.press("[", "[", "[").state("story_head") == [0]
    assert f"of head {layer}.{head} is " in stop_text(press("mask"))
    assert press("values").state("story_head") == [1]
    assert f"{layer}.{head}" == viewer("machine.scene.lit.map(({layer, head}) => `${layer}.${head}`).join()")
    before = stop_text(show_stop(viewer, "neuron", token=17))
    assert stop_text(press("neuron")) != before
    assert press("guess").state("token") == [18]
    for head in (-1, 1_000):
        show_stop(viewer, "query", token=17, story_head=head).text()


def test_the_temperature_of_the_choice(new_viewer, char):
    viewer = show_stop(new_viewer(char, reduced_motion="reduce").open("tokens"), "choice", token=17)
    viewer.after(lambda: viewer.find("story-temperature").fill("0.5"))
    logits = torch.tensor(viewer.run().logits[17, : viewer.viewed.tokenizer.vocab_size])
    ends = next_token_probabilities(logits, Sampling(temperature=0.5, top_k=200)).numpy().cumsum()
    (line,) = rows_of(frames(settle(viewer), [1.0])[0], "line")
    assert viewer.state("temperature") == [0.5]
    assert_same([part["to"] for part in line["parts"]], ends)


def test_the_default_token_is_in_a_word(char_viewer):
    """The views that a stop links to show the same token, and drawing continues from it."""
    viewer, last = char_viewer, max(t for t in range(19) if TEXT[t].isalpha())
    selected = viewer.show("story", story=3, text=TEXT[:20]).page.locator("#strip .selected")
    assert selected.get_attribute("data-testid") == f"strip-{last}"
    viewer.after(viewer.page.get_by_role("link", name="Look closer").click)
    assert viewer.state("view", "token") == ["qkv", last]
    viewer.show("story", text="  ")
    assert selected.get_attribute("data-testid") == "strip-1"
    show_stop(viewer, "choice", text=TEXT[:20])
    for token in range(last + 1, last + 4):
        assert settle(viewer.after(viewer.find("story-try").click)).state("token") == [token]
        assert len(viewer.state("ids")[0].split(",")) == token + 1


def test_the_recorded_training_follows_the_token_of_the_story(char_viewer):
    """Letters and digits of any script; an accent or a byte may be a token."""
    texts = [TEXT, *"a . a. .. 1! ½. 日本。 \u05d0\u200f! Ⅷ- 🎉🎉 e\u0301! __ \U0001d400+-".split()]
    for labels in [*map(list, texts), ["\\xe9", "\\x80", "."], ["<|endoftext|>", "", " "], ["", ""]]:
        assert story_token(labels) == char_viewer("labels => storyToken(labels)", labels), labels


def test_drawn_tokens_equal_those_of_language_model(char_viewer):
    show_stop(char_viewer, "choice", token=17, temperature=0.7, top_k=20, seed=5)
    for _ in range(6):
        settle(char_viewer.after(char_viewer.find("story-try").click))
    expected = language_model(char_viewer).generate(TEXT[:18], max_new_tokens=6, temperature=0.7, top_k=20, seed=5)
    assert TOKENIZERS["char"].decode([*map(int, char_viewer.state("ids")[0].split(","))]) == TEXT[:18] + expected


def test_write_on_stops_at_a_key(new_viewer, char):
    """It writes what sample.py does."""
    viewer = new_viewer(char, reduced_motion="reduce").open("tokens")
    show_stop(viewer, "machine", token=17)
    viewer(HOLD_PAUSES)
    settle(viewer.after(viewer.find("story-try").click))
    for _ in range(3):
        wait_until(lambda: viewer("held.length") == 1)
        settle(viewer.after(lambda: viewer("held.shift()()")))
    expected = language_model(viewer).generate(TEXT[:18], max_new_tokens=4, temperature=0.8, top_k=200, seed=1337)
    assert TOKENIZERS["char"].decode([*map(int, viewer.state("ids")[0].split(","))]) == TEXT[:18] + expected
    wait_until(lambda: viewer("held.length") == 1)
    viewer.page.keyboard.press("Shift")
    drawing = viewer("drawing")
    viewer("async () => { held.shift()(); await new Promise(requestAnimationFrame); }")
    assert viewer("drawing") == drawing and viewer("held.length") == 0
    assert len(viewer.state("ids")[0].split(",")) == 18 + 4


def test_write_on_in_a_hidden_tab(new_viewer, char):
    """There are no animation frames. It appended what the sheet of an earlier token had drawn."""
    viewer = show_stop(new_viewer(char, reduced_motion="reduce").open("tokens"), "machine", token=17)
    viewer(HOLD_PAUSES)
    viewer("() => void (window.requestAnimationFrame = () => 0)")
    viewer.after(lambda: viewer("document.querySelector('[data-testid=story-try]').click()"))
    for _ in range(3):
        wait_until(lambda: viewer("held.length") == 1)
        viewer.after(lambda: viewer("() => void held.shift()()"))
    expected = language_model(viewer).generate(TEXT[:18], max_new_tokens=4, temperature=0.8, top_k=200, seed=1337)
    assert TOKENIZERS["char"].decode([*map(int, viewer.state("ids")[0].split(","))]) == TEXT[:18] + expected


def test_presenting_shows_only_the_stop(new_viewer, char):
    viewer = new_viewer(char).open("story", story=3)
    viewer.press("p").page.locator("#header").wait_for(state="hidden")
    assert not viewer.page.locator("#menu, #header, #text, footer").filter(visible=True).count()
    viewer.page.keyboard.press("ArrowRight")
    viewer.page.get_by_role("heading", name="4. How much may it take from each?").wait_for()
    viewer("document.exitFullscreen()")
    viewer.page.locator("#header").wait_for()
    viewer.press("p").page.locator("#header").wait_for(state="hidden")
    viewer.page.keyboard.press("Escape")  # of the page, where the browser has no full screen
    viewer.page.locator("#header").wait_for()
    assert viewer.state("view", "story") == ["story", 4]


def test_stops_that_do_not_apply_are_left_out(new_viewer, serve):
    """A run with one checkpoint has no training to show; one token has no previous one."""
    viewer = new_viewer(serve(build_model("char", 1))).open("tokens")
    assert viewer("availableStops().map(({id}) => id)") == [*STOPS[:-1]]
    assert viewer.show("story", story=9).page.locator("#view h2").inner_text().startswith("8.")
    for number in range(len(STOPS)):
        settle(viewer.show("story", story=number, ids="5")).text()


def test_two_models(new_viewer, char, serve, tmp_path):
    """The story was that of the first one, without a word. The shorter context ends the text of the other model."""
    small = random_model(3, block_size=20, vocab_size=TOKENIZERS["char"].vocab_size, n_layer=1, n_embd=16)
    viewer = new_viewer(serve(build_model("char", 1), small), reduced_motion="reduce").open("tokens")
    first, second = (viewed.name for viewed in viewer.served.provider.viewed)
    runs = [viewer.run(), NumpyGPT(small).run(viewer.run().ids[:20])]
    show_stop(viewer, "machine", token=17)
    for run, name, other in zip(runs, (first, second), (second, first), strict=True):
        assert viewer.find("shown-model").inner_text() == f"This is {name}."
        assert viewer.find("switch-model").inner_text() == f"Show {other}"
        check_machine(viewer, run, Place())
        settle(viewer.after(viewer.find("switch-model").click))


def test_buttons_of_a_phone_are_in_reach_of_a_thumb(new_viewer, char):
    viewer = new_viewer(char, width=390, reduced_motion="reduce").open("story", story=3)
    viewer.page.set_viewport_size({"width": 390, "height": 844})
    for name in ("story-back", "machine-play", "story-next"):
        box = viewer.find(name).bounding_box()
        assert box["height"] >= 48 and box["width"] >= 48, name
        assert 844 - 100 < box["y"] and box["y"] + box["height"] <= 844, name
