"""Views of experiments and generation in a browser, compared with NumPy and folio.decoding."""

import math
import re
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from folio.data.tokenizer import GPT2Tokenizer
from folio.decoding import torch_decoder
from folio.decoding.language_model import LanguageModel
from folio.decoding.sampling import Sampling, uniforms
from folio.decoding.scheduler import generate
from model import GPT
from tests.support.decoding import decoder_in, generate_tokens, random_model
from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyGPT, NumpyRun, assert_rounded, assert_same
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model
from tests.support.viewers import Viewer
from tests.support.waiting import wait_until

TOKENIZER = TOKENIZERS["char"]
IDS = TOKENIZER.encode(TEXT).tolist()


@pytest.fixture
def open_models(new_viewer, serve) -> Callable[..., Viewer]:
    """Return a function that opens a page of one or two models."""
    return lambda *models, **options: new_viewer(serve(*models, **options), reduced_motion="reduce").open("tokens")


def char_model(seed: int, **sizes) -> GPT:
    sizes = dict(block_size=48, vocab_size=TOKENIZER.vocab_size, n_head=4, n_embd=32) | sizes
    return random_model(seed, **sizes).requires_grad_(False)


def check_difference(viewer: Viewer, picture: str, first: NumpyRun, second: NumpyRun) -> None:
    """Check the difference of two losses of each token in the table of a picture, and its mean in the title."""
    expected, largest = first.losses - second.losses, first.losses.max() + second.losses.max()
    assert np.abs(np.array(viewer.column(picture, "difference")) - expected).max() <= FLOAT32_ERROR * largest
    title = viewer.find(picture).locator("h3").inner_text().replace("\N{MINUS SIGN}", "-")
    shown = [float(number) for number in re.findall(r"-?\d[\d.e-]*", title)]
    assert_rounded(shown, [expected.mean(), expected.std(ddof=1) / math.sqrt(len(expected))], 4, largest)


def previous_scores(run: NumpyRun) -> list[float]:
    """The mean weight of the previous token for each head of layer 0."""
    return np.diagonal(run.layer(0).weights, -1, 1, 2).mean(-1).tolist()


# --- heads and switches -----------------------------------------------------------------------------------------------


def test_heads_can_be_sorted_and_opened(char_viewer):
    rows = char_viewer.show("all-heads", sort="previous").table("head-scores")["rows"]
    scores = char_viewer.column("head-scores", "previous")
    assert scores == sorted(scores, reverse=True)
    shown = {head: score for (layer, head, *_), score in zip(rows, scores, strict=True) if layer == 0}
    assert_same([shown[head] for head in range(4)], previous_scores(char_viewer.run()))
    buttons = char_viewer.find("view-all-heads").locator("[data-testid^=head-][aria-label]")
    names = buttons.evaluate_all("buttons => buttons.map(button => button.dataset.testid)")
    assert names == [f"head-{layer}-{head}" for layer, head, *_ in rows]
    char_viewer.after(char_viewer.find("head-1-2").click)
    assert char_viewer.state("view", "layer", "head") == ["looking-back", 1, 2]


@pytest.mark.parametrize(
    "control, switches",
    [("head-1-2", dict(heads_off=[(1, 2)])), ("mlp-1", dict(mlps_off=[1])), ("scale", dict(scale=False))],
)
def test_switches_show_the_loss_of_the_changed_model(control, switches, char_viewer):
    char_viewer.show("switches", layer=1)
    assert not char_viewer.find("switched").count()
    char_viewer.after(char_viewer.find(f"switch-{control}").click)
    trained, changed = char_viewer.run(), char_viewer.run(**switches)
    assert_same(char_viewer.column("switch-differences", "as trained"), trained.losses)
    assert_same(char_viewer.column("switch-differences", "changed"), changed.losses)
    check_difference(char_viewer, "switch-differences", changed, trained)
    char_viewer.after(char_viewer.find("reset-switches").click)
    assert not char_viewer.find("switched").count()


def test_switches_without_a_change_say_what_to_do(char_viewer):
    """The view showed a difference of 0 ± 0 nats and a gray text."""
    hint, differences = char_viewer.find("nothing-changed"), char_viewer.find("switch-differences")
    char_viewer.show("switches", token=5)
    assert "Press a head or an MLP" in hint.inner_text() and not differences.count()
    for changes in ({"heads_off": "0.1"}, {"mask": "off"}, {"scale": 0}):
        char_viewer.show("switches", **changes)
        assert differences.count() == 1 and not hint.count(), changes


def test_a_token_of_a_large_vocabulary_is_found_by_its_text(open_models):
    """The text field had no suggestions, and ignored unknown texts."""
    letters = [f"{space}{a}{b}" for space in (" ", "") for a in "abcdefghij" for b in "abcdefghij"]
    ids = {text: 256 + i for i, text in enumerate(letters)}
    tokenizer = GPT2Tokenizer([*(bytes([b]) for b in range(256)), *(text.encode() for text in letters)])
    model = char_model(1, vocab_size=tokenizer.vocab_size)
    viewer = open_models(model, tokenizer=tokenizer, text="abcdef").show("switches", ids="300,301,302", token=1)
    box, options = viewer.find("switch-token"), viewer.page.locator("#suggestions option")

    def suggested() -> list[str]:
        return options.evaluate_all("options => options.map(option => option.value)")

    box.fill("ac")
    assert suggested() == [f"ac ({ids['ac']})", f"␣ac ({ids[' ac']})"]
    box.fill(" a")
    assert box.input_value() == "␣a" and suggested()[0] == f"␣aa ({ids[' aa']})" and len(suggested()) == 10
    box.fill("nothing")
    box.press("Tab")
    assert suggested() == [] and "No token has this text" in box.evaluate("box => box.validationMessage")
    for typed, id in ((f"␣ac ({ids[' ac']})", ids[" ac"]), (" ac", ids[" ac"]), ("ac", ids["ac"]), ("259", 259)):
        box.fill(typed)
        assert viewer.after(lambda: box.press("Enter")).state("ids") == [f"300,{id},302"]


def test_rows_sum_to_less_than_1_if_the_mask_comes_after_the_softmax(char_viewer):
    *sums, last = char_viewer.show("switches", mask="after").column("row-sums", "sum")
    assert max(sums) < 1
    assert_same(last, 1)
    char_viewer.after(lambda: char_viewer.find("switch-mask").select_option("before"))
    assert not char_viewer.find("row-sums").count()


def test_tokens_can_be_replaced_and_restored(char_viewer):
    trained = char_viewer.show("switches", token=5).run()
    replacement = str((IDS[5] + 1) % TOKENIZER.vocab_size)
    char_viewer.after(lambda: char_viewer.find("switch-token").select_option(replacement))
    changed = char_viewer.run()
    assert changed.ids.tolist() == [*IDS[:5], int(replacement), *IDS[6:]]
    assert_same(char_viewer.column("switch-differences", "as trained"), trained.losses)
    assert_same(char_viewer.column("switch-differences", "changed"), changed.losses)
    char_viewer.follow(char_viewer.page.url)
    assert "token 5 replaced" in char_viewer.find("switched").inner_text()
    char_viewer.after(char_viewer.find("reset-switches").click)
    assert char_viewer.state("ids") == [",".join(map(str, IDS))] and not char_viewer.find("switched").count()


# --- models and checkpoints -------------------------------------------------------------------------------------------


def test_two_models_are_compared(open_models, seed):
    """Up to the shorter context. The second model has heads 0 and 1."""
    models = [char_model(seed), char_model(seed + 1, n_layer=1, n_head=2, position="rotary", block_size=20)]
    viewer = open_models(*models).show("compare", token=7, head=3, color="difference", heads_off="1.3,0.1")
    viewer.after(viewer.find("reset-switches").click)
    assert not viewer.find("switched").count()
    first, second = (NumpyGPT(model).run(IDS[:20]) for model in models)
    check_difference(viewer, "compare-strip", first, second)
    rows = {row[0]: row for row in viewer.table("compare-distribution")["rows"]}
    for name, run in (("first", first), ("second", second)):
        column = viewer.table("compare-distribution")["columns"].index(name)
        assert_same([rows[i][column] for i in range(len(rows))], run.probabilities[7])
    difference = first.layer(0).weights[3] - second.layer(0).weights[1]
    assert np.abs(viewer.matrix("compare-head") - difference).max() <= 2 * FLOAT32_ERROR
    assert viewer.find("strip-20").get_attribute("title") == f"20 {TEXT[20].replace(' ', '␣')}"


def test_curves_over_checkpoints(char_viewer):
    char_viewer.show("checkpoints")
    runs = {step: NumpyGPT(build_model("char", step)).run(IDS) for step in (0, 10, 100, 200)}
    assert_same(char_viewer.column("losses-by-step", "mean loss"), [run.losses.mean() for run in runs.values()])
    for head in range(4):
        expected = [previous_scores(run)[head] for run in runs.values()]
        assert_same(char_viewer.column("scores-by-step", f"0.{head}"), expected)
    chart = char_viewer.find("losses-by-step").locator(".drawing")
    assert char_viewer.after(lambda: chart.click(position={"x": 57, "y": 100})).state("step") == [0]
    assert char_viewer.column("losses-by-step", "step") == [*runs]
    check_difference(char_viewer.show("compare", step=100, other_step=10), "compare-strip", runs[100], runs[10])


def test_the_slider_uses_prefetched_answers(new_viewer, char):
    viewer, requests = new_viewer(char), []
    viewer.page.on("request", lambda request: request.url.endswith("/ask") and requests.append(request.url))
    viewer.open("attention-row")
    slide = "value => { byId('checkpoint').value = value; byId('checkpoint').dispatchEvent(new Event('input')); }"
    viewer.after(lambda: viewer(slide, 2))
    answered = f"cachedAnswer(question('head', {IDS}, {{step, layer: 0, head: 0}}))"
    wait_until(lambda: viewer(f"[0, 10, 100, 200].every(step => {answered})"))
    count = len(requests)
    for index, step in ((1, 10), (3, 200), (0, 0)):
        assert viewer.after(lambda index=index: viewer(slide, index)).state("step") == [step]
    assert len(requests) == count


# --- generation -------------------------------------------------------------------------------------------------------


def shown_ids(viewer: Viewer) -> list[int]:
    return [int(id) for id in viewer.state("ids")[0].split(",")]


def test_the_loop_equals_generate(open_models, seed):
    """Also beyond a full context. The padding of the model is never sampled."""
    model, number = char_model(seed, vocab_size=TOKENIZER.vocab_size + 3), seed % 1000
    settings = dict(sampling=Sampling(temperature=0.8, top_k=200), vocab_size=TOKENIZER.vocab_size, seed=number)
    (expected,) = generate_tokens(decoder_in("float32", model), [IDS], max_new_tokens=41, **settings)
    viewer = open_models(model).show("loop", seed=number)
    viewer.after(lambda: viewer.page.keyboard.press("d"))
    for _ in range(2):
        viewer.after(viewer.find("loop-draw-20").click)
    shown = shown_ids(viewer)
    assert shown == [*IDS, *expected][-len(shown) :] and 24 <= len(shown) <= 48
    u = uniforms(number, [0], 41, 1).item()
    (drawn,) = [row[0] for row in viewer.table("draw")["rows"] if row[-2] <= u < row[-1]]
    assert viewer.find("draw").locator("tr.selected td").first.inner_text() == str(drawn)
    row = viewer.find("draw").locator("tbody tr").nth(3)
    candidate = int(row.locator("td").first.inner_text())
    viewer.after(row.click)
    assert shown_ids(viewer)[-1] == candidate and viewer.state("loop_step") == [42]


def test_the_loop_equals_language_model_for_ties(open_models, seed):
    """At the boundary of each filter. The padding of the model has the largest logits."""
    model = char_model(seed, vocab_size=TOKENIZER.vocab_size + 3)
    model.transformer.wte.weight[: TOKENIZER.vocab_size // 2] = 0  # equal logits, independent of the order of summation
    model.transformer.wte.weight[TOKENIZER.vocab_size :] *= 5
    prompt, number = TEXT[:10], seed % 1000
    gpt, viewer = LanguageModel(model, TOKENIZER, "cpu", "float32"), open_models(model)
    for filters in (
        dict(temperature=0),
        dict(temperature=2.0, top_k=TOKENIZER.vocab_size // 2),
        dict(temperature=1.5, top_p=0.5),
        dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ):
        viewer.show("loop", token=9, seed=number, **filters)
        viewer.after(viewer.find("loop-draw-20").click)
        viewer.after(lambda: viewer.page.keyboard.press("d"))
        expected = gpt.generate(prompt, max_new_tokens=21, seed=number, **filters)
        assert TOKENIZER.decode(shown_ids(viewer)) == prompt + expected, filters


@pytest.mark.parametrize("kind", ["char", "bpe"])  # learned and relative positions
@pytest.mark.parametrize("prompt", [3, 41])
def test_the_cache_view_equals_the_cache_of_generate(new_viewer, servers, seed, kind, prompt):
    """Compare the contents of all slots and the number of computed tokens after each step."""
    viewer = new_viewer(servers(kind)).open("cache", token=prompt - 1)
    model, ids = viewer.viewed.model, viewer.run().ids[:prompt].tolist()
    draws, batches, computed, block = 48 - prompt + 48 + 1, [], [], model.transformer.h[0]

    class Recorded(torch_decoder.TorchBatch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            batches.append(self)

    def keys_of(token: int, position: int) -> torch.Tensor:
        x = model.embed(torch.tensor([[token]]), torch.tensor([position]))
        return block.attn.c_attn(block.ln_1(x))[0, 0, 32:64].view(model.config.n_head, -1)

    forward = model.forward

    def counted(idx: torch.Tensor, *rest, **named):
        computed.append(idx.shape[1])
        return forward(idx, *rest, **named)

    with mock.patch.object(torch_decoder, "TorchBatch", Recorded), mock.patch.object(model, "forward", counted):
        steps = generate(decoder_in("torch float32", model), [ids], max_new_tokens=draws, seed=seed)
        shown = viewer("([p, n, s]) => cacheSteps(p, n, 48, s)", [prompt, draws, kind == "bpe"])
        assert len(shown) == draws
        for n, step in enumerate(steps):
            slots, batch = shown[n]["slots"], batches[0]
            assert len(slots) == min(batch.lengths[0], 48)
            for slot in {0, len(slots) - 1, *range(n % 5, len(slots), 5)}:
                assert_same(batch.cache.kv[0, 0, 0, :, slot], keys_of(ids[slots[slot]], slot))
            assert shown[n]["computed"] == sum(computed)
            computed.clear()
            ids.append(step.tokens[0])
    facts = dict(viewer.table("cache-numbers")["rows"])
    assert facts["bytes allocated"] == batches[0].cache.kv.nbytes
