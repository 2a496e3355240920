"""Views of experiments and generation in a browser, compared with torch and folio.decoding."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folio.data.tokenizer import CharTokenizer, GPT2Tokenizer
from folio.decoding import torch_decoder
from folio.decoding.language_model import LanguageModel
from folio.decoding.sampling import Sampling, uniforms
from folio.decoding.scheduler import generate
from model import GPT
from tests.support.decoding import decoder_in, random_model
from tests.support.viewed_models import save_run
from tests.support.viewers import CHROMIUM, serving

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

TEXT = "the king shall love his crown"
TOKENIZER = CharTokenizer.of("abcdefghijklmnopqrstuvwxyz \n")
IDS = TOKENIZER.encode(TEXT).tolist()
SIZES = dict(block_size=48, vocab_size=TOKENIZER.vocab_size, n_layer=2, n_head=4, n_embd=32)
STEPS = (0, 1, 5, 20, 100)  # of the run; the last step has a complete checkpoint


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., str]]:
    """Return a function that serves runs, given as models by step, and returns the URL. The last step is complete."""
    with ExitStack() as servers:

        def start(*runs: dict[int, GPT]) -> str:
            folders = []
            for i, models in enumerate(runs):
                *snapshots, last = sorted(models)
                saved = {step: models[step] for step in snapshots}
                folders.append(save_run(tmp_path / f"run{i}", {last: models[last]}, TOKENIZER, saved, {}))
            return servers.enter_context(serving(folders, TEXT)).url

        yield start


@pytest.fixture
def page(browser, serve):
    """A page, which must not have errors."""
    errors = []
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(120_000)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors


def show(page, address: str, view: str, **state) -> None:
    """Open a view, and wait until it is drawn."""
    page.goto("about:blank")
    page.goto(address + "#" + "&".join(f"{name}={value}" for name, value in {"view": view, **state}.items()))
    page.wait_for_selector(f"[data-testid=view-{view}]")


def after(page, action: Callable[[], object]) -> None:
    """Perform an action that redraws the page, and wait until it is drawn."""
    drawn = page.evaluate("Number(document.body.dataset.drawn)")
    action()
    wait_until(page, f"Number(document.body.dataset.drawn) > {drawn}")


def wait_until(page, condition: str) -> None:
    """Wait for a JavaScript expression. (wait_for_function needs eval, which the page's policy forbids.)"""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def table(page, name: str) -> list[dict]:
    """Return the table of a picture as one dict per row."""
    content = page.get_by_test_id(name).evaluate("figure => figure.table()")
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def numbers_of_title(page, name: str) -> list[float]:
    """Return the numbers in the title of a picture."""
    title = page.get_by_test_id(name).locator("h3").inner_text().replace("\N{MINUS SIGN}", "-")
    return [float(number) for number in re.findall(r"-?\d[\d.e-]*", title)]


def column(page, picture: str, name: str) -> Tensor:
    return torch.tensor([row[name] for row in table(page, picture)], dtype=torch.float64)


def make(seed: int, **changes) -> GPT:
    return random_model(seed, **{**SIZES, **changes}).requires_grad_(False)


@torch.no_grad()
def losses(model: GPT, ids: list[int] = IDS) -> Tensor:
    """Compute the loss of each token except the first with torch."""
    idx = torch.tensor(ids)[None]
    return F.cross_entropy(model.eval().logits(idx)[0, :-1], idx[0, 1:], reduction="none").double()


def previous_scores(model: GPT, ids: list[int] = IDS) -> Tensor:
    """Compute the mean weight of the previous token for each head of layer 0."""
    return first_weights(model, ids).diagonal(-1, 1, 2).mean(-1)


@torch.no_grad()
def first_weights(model: GPT, ids: list[int] = IDS) -> Tensor:
    """Compute the attention weights of layer 0, (H, T, T), for a model with learned positions."""
    x = model.embed(torch.tensor(ids), torch.arange(len(ids)))
    block, D = model.transformer.h[0], model.config.n_embd // model.config.n_head
    q, k, _ = block.attn.c_attn(block.ln_1(x)).unflatten(-1, (3, model.config.n_head, D)).permute(1, 2, 0, 3)
    scores = q @ k.mT / math.sqrt(D) + torch.full((len(ids),) * 2, -math.inf).triu(1)
    return scores.softmax(-1).double()


# --- heads and switches -----------------------------------------------------------------------------------------------


def test_heads_can_be_sorted_and_opened(page, serve, seed):
    model = make(seed)
    show(page, serve({1: model}), "all-heads", sort="previous")
    rows = table(page, "head-scores")
    assert [row["previous"] for row in rows] == sorted((row["previous"] for row in rows), reverse=True)
    first_layer = {row["head"]: row["previous"] for row in rows if row["layer"] == 0}
    shown = torch.tensor([first_layer[head] for head in range(4)], dtype=torch.float64)
    torch.testing.assert_close(shown, previous_scores(model), atol=1e-6, rtol=0)
    buttons = page.get_by_test_id("view-all-heads").locator("[data-testid^=head-][aria-label]")
    names = buttons.evaluate_all("buttons => buttons.map(button => button.dataset.testid)")
    assert names == [f"head-{row['layer']}-{row['head']}" for row in rows]
    page.get_by_test_id("head-1-2").click()
    page.wait_for_selector("[data-testid=view-looking-back]")
    assert page.evaluate("[state.layer, state.head]") == [1, 2]


def switched(model: GPT, switch: str) -> GPT:
    """Return a copy of the model whose weights have the effect of the switch."""
    copy = GPT.from_tensors(model.config, {name: p.clone() for name, p in model.named_parameters()})
    block, D = copy.transformer.h[1], model.config.n_embd // model.config.n_head
    with torch.no_grad():
        if switch == "head":
            block.attn.c_proj.weight[:, 2 * D : 3 * D] = 0
        elif switch == "mlp":
            block.mlp.c_proj.weight.zero_()
            block.mlp.c_proj.bias.zero_()
        elif switch == "scale":
            for layer in copy.transformer.h:
                layer.attn.c_attn.weight[: model.config.n_embd] *= math.sqrt(D)
                layer.attn.c_attn.bias[: model.config.n_embd] *= math.sqrt(D)
    return copy


def test_switches_show_the_loss_of_the_changed_model(page, serve, seed):
    model = make(seed)
    show(page, serve({1: model}), "switches", layer=1)
    controls = {
        "head": lambda: page.get_by_test_id("switch-head-1-2").click(),
        "mlp": lambda: page.get_by_test_id("switch-mlp-1").click(),
        "scale": lambda: page.get_by_test_id("switch-scale").click(),
    }
    for switch, turn in controls.items():
        assert not page.get_by_test_id("switched").count()
        after(page, turn)
        torch.testing.assert_close(column(page, "switch-differences", "as trained"), losses(model), atol=2e-5, rtol=0)
        expected = losses(switched(model, switch))
        torch.testing.assert_close(column(page, "switch-differences", "changed"), expected, atol=2e-5, rtol=0)
        difference = expected - losses(model)
        shown = [difference.mean().item(), difference.std().item() / math.sqrt(len(difference))]
        assert numbers_of_title(page, "switch-differences") == pytest.approx(shown, rel=1e-3, abs=2e-5)
        after(page, lambda: page.get_by_test_id("reset-switches").click())


def test_switches_without_a_change_say_what_to_do(page, serve, seed):
    """The view showed a difference of 0 ± 0 nats and a gray text."""
    show(page, serve({1: make(seed)}), "switches", token=5)
    hint = page.get_by_test_id("nothing-changed")
    assert "Press a head or an MLP" in hint.inner_text() and not page.get_by_test_id("switch-differences").count()
    for changes in ({"heads_off": "0.1"}, {"mask": "off"}, {"scale": 0}):
        show(page, page.url.split("#")[0], "switches", **changes)
        assert page.get_by_test_id("switch-differences").count() == 1 and not hint.count()


def test_a_token_of_a_large_vocabulary_is_found_by_its_text(page, tmp_path, seed):
    """The text field had no suggestions, and ignored unknown texts."""
    letters = [f"{space}{a}{b}" for space in (" ", "") for a in "abcdefghij" for b in "abcdefghij"]
    tokenizer = GPT2Tokenizer([*(bytes([b]) for b in range(256)), *(text.encode() for text in letters)])
    folder = save_run(tmp_path / "run", {1: make(seed, vocab_size=tokenizer.vocab_size)}, tokenizer, {}, {})
    with serving([folder], "abcdef") as served:
        show(page, served.url, "switches", ids="300,301,302", token=1)
        box, options = page.get_by_test_id("switch-token"), page.locator("#suggestions option")
        ids = {text: 256 + i for i, text in enumerate(letters)}

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
            after(page, lambda: box.press("Enter"))
            assert page.evaluate("state.ids") == f"300,{id},302"


def test_rows_sum_to_less_than_1_if_the_mask_comes_after_the_softmax(page, serve, seed):
    model = make(seed)
    show(page, serve({1: model}), "switches", mask="after")
    sums = column(page, "row-sums", "sum")
    assert (sums[:-1] < 1).all() and sums[-1].item() == pytest.approx(1, abs=1e-6)
    after(page, lambda: page.get_by_test_id("switch-mask").select_option("before"))
    assert not page.get_by_test_id("row-sums").count()


def test_tokens_can_be_replaced_and_restored(page, serve, seed):
    model = make(seed)
    show(page, serve({1: model}), "switches", token=5)
    replaced = [*IDS[:5], (IDS[5] + 1) % SIZES["vocab_size"], *IDS[6:]]
    after(page, lambda: page.get_by_test_id("switch-token").select_option(str(replaced[5])))
    for name, ids in (("as trained", IDS), ("changed", replaced)):
        torch.testing.assert_close(column(page, "switch-differences", name), losses(model, ids), atol=2e-5, rtol=0)
    show(page, page.url.split("#")[0], **dict(pair.split("=", 1) for pair in page.url.split("#")[1].split("&")))
    assert "token 5 replaced" in page.get_by_test_id("switched").inner_text()
    after(page, lambda: page.get_by_test_id("reset-switches").click())
    assert page.evaluate("state.ids") == ",".join(map(str, IDS)) and not page.get_by_test_id("switched").count()


# --- models and checkpoints -------------------------------------------------------------------------------------------


def test_two_models_are_compared_token_by_token(page, serve, seed):
    first, second = make(seed), make(seed + 1, n_layer=1, n_head=2, position="rotary", block_size=20)
    show(page, serve({1: first}, {1: second}), "compare", token=7, color="difference", heads_off="1.3,0.1")
    after(page, lambda: page.get_by_test_id("reset-switches").click())
    assert not page.get_by_test_id("switched").count()
    expected = losses(first)[:19] - losses(second, IDS[:20])  # the second model has a context of 20
    torch.testing.assert_close(column(page, "compare-strip", "difference"), expected, atol=2e-5, rtol=0)
    shown = [expected.mean().item(), expected.std().item() / math.sqrt(19)]
    assert numbers_of_title(page, "compare-strip") == pytest.approx(shown, rel=1e-3, abs=2e-5)
    rows = {row["id"]: row for row in table(page, "compare-distribution")}
    for name, model in (("first", first), ("second", second)):
        probabilities = model(torch.tensor(IDS[:8])[None])[0][0, -1].softmax(-1)
        shown = torch.tensor([rows[i][name] for i in range(len(rows))])
        torch.testing.assert_close(shown, probabilities, atol=1e-5, rtol=0)
    assert page.get_by_test_id("strip-20").get_attribute("title") == f"20 {'␣' if TEXT[20] == ' ' else TEXT[20]}"


def test_heads_are_compared_up_to_the_shorter_context(page, serve, seed):
    first, second = make(seed), make(seed + 1, n_head=2, block_size=20)
    show(page, serve({1: first}, {1: second}), "compare", layer=0, head=3)  # the second model has heads 0 and 1
    shown = page.get_by_test_id("compare-head").evaluate("figure => figure.table()")["rows"]
    expected = first_weights(first)[3, :20, :20] - first_weights(second, IDS[:20])[1]
    torch.testing.assert_close(torch.tensor([row[1:] for row in shown]).double(), expected, atol=1e-5, rtol=0)


def test_curves_over_checkpoints(page, serve, seed):
    models = {step: make(seed + step) for step in STEPS}
    show(page, serve(models), "checkpoints")
    page.wait_for_selector("[data-complete=true]")
    torch.testing.assert_close(
        column(page, "losses-by-step", "mean loss"),
        torch.stack([losses(model).mean() for model in models.values()]),
        atol=2e-5,
        rtol=0,
    )
    for head in range(4):
        expected = torch.stack([previous_scores(model)[head] for model in models.values()])
        torch.testing.assert_close(column(page, "scores-by-step", f"0.{head}"), expected, atol=1e-6, rtol=0)
    chart = page.get_by_test_id("losses-by-step").locator("svg")
    after(page, lambda: chart.click(position={"x": 57, "y": 100}))
    assert page.evaluate("state.step") == 0
    torch.testing.assert_close(column(page, "losses-by-step", "step"), torch.tensor(STEPS, dtype=torch.float64))
    show(page, page.url.split("#")[0], "compare", step=20, other_step=5)
    expected = losses(models[20]) - losses(models[5])
    torch.testing.assert_close(column(page, "compare-strip", "difference"), expected, atol=2e-5, rtol=0)


def test_the_slider_uses_prefetched_answers(page, serve, seed):
    requests = []
    page.on("request", lambda request: requests.append(request.url) if request.url.endswith("/ask") else None)
    show(page, serve({step: make(seed + step) for step in STEPS}), "attention-row")
    slider = "document.getElementById('checkpoint')"
    slide = f"value => {{ {slider}.value = value; {slider}.dispatchEvent(new Event('input')); }}"
    after(page, lambda: page.evaluate(slide, 2))
    answered = f"cachedAnswer(question('head', {IDS}, {{step, layer: 0, head: 0}}))"
    wait_until(page, f"{list(STEPS)}.every(step => {answered})")
    count = len(requests)
    for index in (1, 4, 0):
        after(page, lambda index=index: page.evaluate(slide, index))
        assert page.evaluate("state.step") == STEPS[index]
    assert len(requests) == count


# --- generation -------------------------------------------------------------------------------------------------------


def test_the_loop_equals_generate(page, serve, seed):
    """Also beyond a full context. The padding of the model is never sampled."""
    model = make(seed, vocab_size=SIZES["vocab_size"] + 3)
    draws, number = 41, seed % 1000
    steps = generate(
        decoder_in("float32", model),
        [IDS],
        max_new_tokens=draws,
        sampling=Sampling(temperature=0.8, top_k=200),
        vocab_size=TOKENIZER.vocab_size,
        seed=number,
    )
    expected = [step.tokens[0] for step in steps]
    show(page, serve({1: model}), "loop", seed=number)
    after(page, lambda: page.keyboard.press("d"))
    for _ in range(2):
        after(page, lambda: page.get_by_test_id("loop-draw-20").click())
    ids = page.evaluate("state.ids.split(',').map(Number)")
    assert ids == [*IDS, *expected][-len(ids) :] and 24 <= len(ids) <= 48
    u = uniforms(number, [0], draws, 1).item()
    (drawn,) = [row for row in table(page, "draw") if row["from"] <= u < row["to"]]
    assert page.get_by_test_id("draw").locator("tr.selected td").first.inner_text() == str(drawn["id"])
    row = page.get_by_test_id("draw").locator("tbody tr").nth(3)
    candidate = int(row.locator("td").first.inner_text())
    after(page, row.click)
    assert page.evaluate("state.ids").endswith(f",{candidate}") and page.evaluate("state.loop_step") == draws + 1


FILTERS = [  # with ties at the boundary of each filter
    dict(temperature=0),
    dict(temperature=2.0, top_k=TOKENIZER.vocab_size // 2),
    dict(temperature=1.5, top_p=0.5),
    dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
]


def test_the_loop_equals_language_model_for_ties(page, serve, seed):
    """Ties are broken in the same way. The padding of the model has the largest logits."""
    model = make(seed, vocab_size=SIZES["vocab_size"] + 3)
    with torch.no_grad():
        model.transformer.wte.weight[:14] = 0  # exactly equal logits, independent of the order of summation
        model.transformer.wte.weight[SIZES["vocab_size"] :] *= 5
    address, prompt, number = serve({1: model}), TEXT[:10], seed % 1000
    gpt = LanguageModel(model, TOKENIZER, "cpu", "float32")
    for filters in FILTERS:
        expected = gpt.generate(prompt, max_new_tokens=21, seed=number, **filters)
        show(page, address, "loop", token=9, seed=number, **filters)
        after(page, lambda: page.get_by_test_id("loop-draw-20").click())
        after(page, lambda: page.keyboard.press("d"))
        assert TOKENIZER.decode(page.evaluate("state.ids.split(',').map(Number)")) == prompt + expected, filters


@pytest.mark.parametrize("position", ["learned", "relative"])
@pytest.mark.parametrize("prompt", [3, 29])
def test_the_cache_view_equals_the_cache_of_generate(page, serve, seed, position, prompt):
    """Compare the contents of all slots and the number of computed tokens after each step."""
    model = make(seed, position=position, n_layer=1, block_size=32)
    show(page, serve({1: model}), "cache", token=prompt - 1)
    draws, batches, computed = 32 - prompt + 32 + 1, [], []

    class Recorded(torch_decoder.TorchBatch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            batches.append(self)

    def keys_of(token: int, position: int) -> Tensor:
        block = model.transformer.h[0]
        x = model.embed(torch.tensor([[token]]), torch.tensor([position]))
        return block.attn.c_attn(block.ln_1(x))[0, 0, 32:64].view(4, 8)

    forward = model.forward
    model.forward = lambda idx, *rest, **named: computed.append(idx.shape[1]) or forward(idx, *rest, **named)
    ids = IDS[:prompt]
    with mock.patch.object(torch_decoder, "TorchBatch", Recorded):
        steps = generate(decoder_in("torch float32", model), [ids], max_new_tokens=draws, seed=seed)
        shown = page.evaluate("([p, n, s]) => cacheSteps(p, n, 32, s)", [prompt, draws, position == "relative"])
        assert len(shown) == draws
        for n, step in enumerate(steps):
            slots, batch = shown[n]["slots"], batches[0]
            assert len(slots) == min(batch.lengths[0], 32)
            for slot in {0, len(slots) - 1, *range(n % 5, len(slots), 5)}:
                assert torch.allclose(batch.cache.kv[0, 0, 0, :, slot], keys_of(ids[slots[slot]], slot), atol=1e-5)
            assert shown[n]["computed"] == sum(computed)
            computed.clear()
            ids.append(step.tokens[0])
    facts = {row["fact"]: row["number"] for row in table(page, "cache-numbers")}
    assert facts["bytes allocated"] == batches[0].cache.kv.nbytes
