"""A model in an HTML file: its contents, and its behavior in a browser, compared with torch and LanguageModel."""

import base64
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
import torch.nn.functional as F

import model as model_py
from folio import UserError
from folio.checkpoints.build_model import model_from_tensors
from folio.data.sources.pairs import make_pair, translation
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding.language_model import LanguageModel
from folio.web import html_file
from folio.web.html_file import find_languages, pack_weights, unpack_weights
from model import GPT
from tests.support.exports import read_html, run_export
from tests.support.music_models import SCORE, tokenizer_of
from tests.support.numpy_gpt import NumpyGPT, assert_same
from tests.support.stops import HOLD_PAUSES, STOPS, check_cells, random_cells, settle, show_stop
from tests.support.tiny_tokenizers import bpe, trained
from tests.support.tolerances import rounding_error
from tests.support.viewed_models import STRANGE, TEXT, save_random_run
from tests.support.viewers import Viewer, axe_violations, generate
from tests.support.waiting import wait_until

pytestmark = pytest.mark.architecture("folio/web/browser/gpt.js, which computes what model.py does, and html_file.py")

NAME = "a </script><b>&\"'name"
CHARACTERS = CharTokenizer.of(TEXT + STRANGE + "\n")
PHRASES = CharTokenizer.of("abcdefghij: |", eot=True)


@dataclass(frozen=True)
class Kind:
    """A kind of model, and the dtype of its file."""

    tokenizer: Tokenizer
    dtype: str = "float32"
    sizes: Any = None


SIZES = dict(block_size=48, n_layer=2, n_head=2, n_embd=32)
KINDS = {
    "char": Kind(CHARACTERS, sizes=dict(position="learned", n_head=4)),
    "gpt2": Kind(bpe(), "float16", dict(position="relative", bias=False, n_layer=3, activation="gelu")),
    "bpe": Kind(trained(), "int8", dict(position="alibi")),
    "byte": Kind(ByteTokenizer(), "float16", dict(position="rotary", vocab_size=260)),
    "midi": Kind(tokenizer_of(SCORE), sizes=dict(position="relative")),
    "phrases": Kind(PHRASES, sizes=dict(position="sinusoidal")),
}
LOSSES = [{"of": "some </b>", "tokens": 1234, "before": 1.25, "after": 1.2504}]


@dataclass
class Exported:
    """A file, and the model with the file's rounded weights. Takes the place of a viewer's server."""

    path: Path
    model: GPT
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def language_model(self) -> LanguageModel:
        return LanguageModel(self.model, self.tokenizer, "cpu", "float32")


@pytest.fixture
def seed() -> int:
    """A fixed seed: sometimes, rounding in float32 decides which token is sampled."""
    return 1337


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[..., Exported]:
    """Return a function that exports a model of one of KINDS."""
    files: dict[str, Exported] = {}

    def export_kind(kind: str, **header: Any) -> Exported:
        """header: fields to override."""
        key = f"{kind} {header}"
        if key not in files:
            folder, spec = tmp_path_factory.mktemp("exported"), KINDS[kind]
            model = save_random_run(folder / "run", spec.tokenizer, 3, {"dataset": "none"}, **{**SIZES, **spec.sizes})
            viewed = html_file.ViewedModel(str(folder / "run"), "best", torch.device("cpu"))
            weights = pack_weights(dict(model.named_parameters()), spec.dtype)
            stored = model_from_tensors(model.config, unpack_weights(weights)).eval()
            text = "" if kind == "midi" else TEXT
            full_header = html_file.make_header(viewed, stored, weights, spec.dtype, text, {"losses": LOSSES})
            html_file.write_html(folder / "model.html", full_header | {"name": NAME} | header, weights.content)
            files[key] = Exported(folder / "model.html", stored, spec.tokenizer)
        return files[key]

    return export_kind


# --- weights ----------------------------------------------------------------------------------------------------------


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors with a row of zeros, a large value, and a subnormal value."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, 7, generator=random)
    matrix[1], matrix[2, 3], matrix[3, 0] = 0, 1000.0, 3e-8
    return {"a.weight": matrix, "a.bias": torch.randn(3, generator=random), "b": torch.randn(3, 3, generator=random)}


def test_float16_is_rounded_as_torch_does(seed):
    tensors = random_tensors(seed)
    stored = unpack_weights(pack_weights(tensors, "float16"))
    assert torch.equal(stored["a.weight"], tensors["a.weight"].half().float())
    assert torch.equal(stored["a.bias"], tensors["a.bias"])  # vectors are not rounded
    stored = unpack_weights(pack_weights(tensors, "float32"))
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_int8_rounds_to_the_nearest_of_255_steps_per_row(seed):
    tensors = random_tensors(seed)
    stored = unpack_weights(pack_weights(tensors, "int8"))
    for row, rounded in zip(tensors["a.weight"].tolist(), stored["a.weight"].tolist(), strict=True):
        step = max(map(abs, row)) / 127
        for weight, value in zip(row, rounded, strict=True):
            nearest = min(range(-127, 128), key=lambda q, weight=weight, step=step: abs(q * step - weight))
            assert value == pytest.approx(nearest * step, rel=rounding_error(3))  # of weight, step, and product
    assert torch.equal(stored["a.bias"], tensors["a.bias"])


def test_parameters_are_aligned(seed):
    tensors = random_tensors(seed)
    for dtype in html_file.DTYPES:
        weights = pack_weights(tensors, dtype)
        assert all(place % 4 == 0 for p in weights.parameters for place in (p["offset"], p.get("scales", 0)))


# --- the file ---------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The tags of a file with their attributes and the text after them."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any], list[str]]] = [("", {}, [])]
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag: str) -> None:
        self.handle_starttag(f"/{tag}", [])

    def handle_data(self, data: str) -> None:
        self.elements[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        """Return the texts of elements without a type."""
        return ["".join(texts) for name, attributes, texts in self.elements if name == tag and "type" not in attributes]


@pytest.mark.parametrize("kind", KINDS)
def test_files_can_be_read(kind, exported):
    file = exported(kind)
    read = read_html(file.path)
    header, stored = read.header, unpack_weights(read.weights)
    parameters = dict(file.model.named_parameters())
    assert stored.keys() == parameters.keys()
    assert all(torch.equal(stored[name], p) for name, p in parameters.items())
    assert header["name"] == NAME and header["losses"] == LOSSES
    assert header["tokenizer"] == file.tokenizer.to_json() | {"kind": file.tokenizer.kind}
    assert header["config"]["position"] == KINDS[kind].sizes["position"]
    run = NumpyGPT(file.model).run(header["check"]["ids"])
    ids, logits = zip(*header["check"]["logits"], strict=True)
    assert_same(logits, run.logits[-1][list(ids)])
    assert len(set(ids)) >= 10 and len(header["check"]["ids"]) == 8


def test_names_and_vocabularies_cannot_inject_markup(exported):
    plain, strange = (Elements(exported("char", name=name).path) for name in ("run", NAME))
    assert [tag for tag, _, _ in strange.elements] == [tag for tag, _, _ in plain.elements]
    assert strange.texts("title") == [NAME] and "<b>" not in exported("char").path.read_text(encoding="utf-8")


def test_content_security_policy_of_a_file(exported):
    elements, code = Elements(exported("char").path), read_html(exported("char").path).code
    (policy,) = (a["content"] for tag, a, _ in elements.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def hashes(texts: set[str]) -> set[str]:
        return {f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts}

    scripts = {*elements.texts("script"), code["shared"], code["page"], code["engine"]}
    assert set(rules["script-src"].split()) == {*hashes(scripts), "'wasm-unsafe-eval'"}
    assert set(rules["style-src"].split()) == hashes({*elements.texts("style")})
    assert {rules[name] for name in ("default-src", "connect-src", "base-uri", "form-action")} == {"'none'"}
    assert rules["worker-src"] == "blob:" and not any("src" in a for tag, a, _ in elements.elements)


def test_the_engine_is_one_scope(exported):
    """Two declarations of a name are a syntax error, and the engine's names must not become the page's."""
    source = "\n".join((html_file.ENGINE / name).read_text(encoding="utf-8") for name in html_file.ENGINE_SCRIPTS)
    source += html_file.engine_constants()
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", source, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert {path.name for path in html_file.ENGINE.glob("*.js")} == {*html_file.ENGINE_SCRIPTS}
    engine = read_html(exported("char").path).code["engine"]
    assert engine.startswith('"use strict";\n{')


@pytest.mark.parametrize("dtype", html_file.DTYPES)
def test_file_size(dtype, tmp_path):
    tensors = {"weight": torch.randn(1000, 1000)}
    weights = pack_weights(tensors, dtype)
    html_file.write_html(tmp_path / "model.html", {"name": "a", "parameters": weights.parameters}, weights.content)
    assert len(weights.content) == {"float32": 4_000_000, "float16": 2_000_000, "int8": 1_004_000}[dtype]
    text = (tmp_path / "model.html").read_text(encoding="utf-8")
    blocks = re.findall(r'data-kind="weights">([^<]*)<', text)
    assert {len(block) for block in blocks[:-1]} == {2**20} and len(blocks[-1]) <= 2**20
    assert base64.b64decode("".join(blocks)) == weights.content
    assert len(text) - sum(map(len, blocks)) <= 190_000  # for the page and the engine


def test_scripts_contain_no_end_tag():
    for path in (*html_file.PAGE.glob("*.js"), *html_file.ENGINE.glob("*.js")):
        assert "</script" not in path.read_text(encoding="utf-8").lower(), path.name


def test_a_file_with_other_content_when_it_is_read_back_is_an_error(tmp_path, monkeypatch):
    contents = iter([[b"a", b"b"], [b"a", b"c"]])
    monkeypatch.setattr(html_file, "html_parts", lambda *_: next(contents))
    with pytest.raises(OSError, match="not what was written"):
        html_file.write_html(tmp_path / "model.html", {}, b"")
    assert not (tmp_path / "model.html").exists()


# --- refused models ---------------------------------------------------------------------------------------------------


def test_models_that_are_refused(tmp_path, monkeypatch):
    save_random_run(tmp_path / "run", CHARACTERS, 3, **SIZES)
    output = tmp_path / "model.html"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="at most 1,000 parameters"):
        patch.setattr(html_file, "MAX_PARAMETERS", 1000)
        run_export(tmp_path / "run", output, "--to=html")
    assert not output.exists()
    viewed = html_file.ViewedModel(str(tmp_path / "run"), "best", torch.device("cpu"))
    loaded = replace(viewed.checkpoint, model=dict(viewed.model.named_parameters()))

    def refuse_changed(message: str, tensors: dict[str, torch.Tensor], **settings: Any) -> None:
        changed = replace(loaded, model={**loaded.model, **tensors}, state={"model": loaded.state["model"] | settings})
        with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
            html_file.check_fits(changed)

    bias = loaded.model["transformer.ln_f.bias"].clone()
    html_file.check_fits(loaded)
    refuse_changed("ln_f.bias contains NaN or infinity", {"transformer.ln_f.bias": bias * math.inf})
    refuse_changed("transformer.gate", {"transformer.gate": bias})
    refuse_changed("does not support the model's setting window=8", {}, window=8)
    monkeypatch.setattr(model_py, "ACTIVATIONS", {**model_py.ACTIVATIONS, "relu": F.relu})
    refuse_changed("activation='relu', only gelu_new, gelu", {}, activation="relu")
    monkeypatch.setitem(model_py.POSITIONS, "fourier", model_py.PositionEncoding)
    refuse_changed("position='fourier'", {}, position="fourier")
    with pytest.raises(UserError, match=r"^wte .*--dtype=float32$"):
        pack_weights({"wte": torch.full((2, 2), 70_000.0)}, "float16")
    for parameter in viewed.model.parameters():
        parameter.data.fill_(3e38)  # finite, but the logits are not
    with pytest.raises(UserError, match="NaN or infinity: use another checkpoint"):
        html_file.expected_logits(viewed.model, 20)


def test_find_languages():
    assert find_languages([make_pair(translation("two: a | b", "u", "en", "pt-BR"))]) == {
        "pairs": [["en", "pt-BR"]],
        "template": "{source}: {text} | {target}:",
        "examples": [{"source": "en", "target": "pt-BR", "text": "two: a | b"}],
    }
    pairs = [make_pair(translation(f"text {i}", "u", "en", "de")) for i in range(10)]
    assert [example["text"] for example in find_languages(pairs)["examples"]] == [f"text {i}" for i in (0, 2, 4, 6)]
    assert find_languages([]) is None
    assert find_languages([make_pair({"prompt": "Q: 1 + 1", "completion": " 2"})]) is None


# --- in a browser -----------------------------------------------------------------------------------------------------

CLIPBOARD = "if (navigator.clipboard) navigator.clipboard.writeText = async text => { self.copied = text; }"
NO_WORKER = "delete self.Worker"
NO_WASM = "delete self.WebAssembly"
COUNT_STEPS = """
(() => {
  const receiveBefore = receive;
  self.steps = {count: 0, done: false};
  self.receive = message => {
    steps.count += message.events?.length ?? 0;
    steps.done ||= message.done;
    receiveBefore(message);
  };
})()
"""
HOLD = """
{
  const {postMessage} = Worker.prototype, held = [];
  Worker.prototype.postMessage = function (message, ...more) {
    const send = () => postMessage.call(this, message, ...more);
    (message.question?.kind ?? message.kind) === "KIND" && self.release ? held.push(send) : send();
  };
  self.heldCount = () => held.length;
  self.release = () => {
    delete self.release;
    held.forEach(send => send());
  };
}
"""  # holds back messages of a kind to the engine until release() is called
FOLLOW = """hash => new Promise(resolve => {
  addEventListener("hashchange", resolve, {once: true}); // after the page's own listener
  location.hash = hash;
})"""
STOP_EARLY = """
const timer = setInterval(() => {
  if (!(document.querySelector("[data-testid=sample-text]")?.textContent.length > 30)) return;
  clearInterval(timer);
  document.querySelector("[data-testid=stop]").click();
});
"""  # once there is some text, because the engine may be faster than a call from here
LANGUAGES = {
    "pairs": [["ab", "cd"], ["ab", "ef"], ["cd", "ab"]],
    "template": "{source}: {text} | {target}:",
    "examples": [
        {"source": "ab", "target": "cd", "text": "face"},
        {"source": "cd", "target": "ab", "text": "deed"},
    ],
}


@pytest.fixture
def open_file(new_viewer) -> Callable[..., Viewer]:
    """Return a function that opens a file without a network and waits until it is drawn."""

    def open_file(file: Exported, *scripts: str, hash: str = "", waits: bool = True) -> Viewer:
        """scripts: run before the page's. waits: wait until the page is drawn."""
        viewer = new_viewer(file, offline=True)
        for script in scripts:
            viewer.page.add_init_script(script)
        if waits:
            return viewer.follow(file.url + hash)
        viewer.page.goto(file.url + hash)
        return viewer

    return open_file


@pytest.mark.parametrize("kind", KINDS)
def test_samples_equal_those_of_the_python_api(kind, exported, open_file, seed):
    """With the same seed, for all tokenizers and position methods, also beyond the context.

    Then every view is drawn, except those that need the run's folder, which are not in the menu.
    """
    file = exported(kind)
    viewer = open_file(file, hash=f"#view=playground&seed={seed}&max_new_tokens=70")
    text = viewer("state.text")
    assert text == ("" if kind == "midi" else TEXT)
    settings = dict(num_samples=3, max_new_tokens=70, seed=seed, on_unknown="skip")
    assert generate(viewer) == file.language_model().generate(text, **settings)
    assert "tokens/s" in viewer.find("speed").inner_text()
    assert viewer.page.title() == f"Playground \N{EN DASH} {NAME}"
    rounded = "" if KINDS[kind].dtype == "float32" else "; before rounding: 1.2500"
    assert f"1.2504 nats per token{rounded}." in viewer.find("stored").text_content()
    views = viewer.views()
    assert len(views) >= 17 and not {"checkpoints", "compare", "memorized", "run", "translate"} & {*views}
    for view in views:
        viewer.show(view)
        assert viewer("document.querySelector('#view .error:not(:empty)')?.textContent ?? null") is None, view
        assert viewer.find(f"view-{view}").is_visible() and len(viewer.find(f"view-{view}").inner_text()) > 50


@pytest.mark.parametrize("kind, views", [("midi", ["roll", "playground"]), ("phrases", ["translate"])])
def test_axe_finds_nothing(kind, views, exported, open_file):
    """In views that are only in files, or have parts that are. For the others, see page/test_page_accessibility.py."""
    viewer = open_file(exported(kind, languages=LANGUAGES if kind == "phrases" else None))
    for view in (*views, "story", "tokens"):
        assert view in viewer.show(view, text="" if kind == "midi" else "abc: def").views()
        assert axe_violations(viewer) == [], view


@pytest.mark.parametrize("scripts", [[], [NO_WORKER], [NO_WASM, NO_WORKER]], ids=["worker", "in-page", "no wasm"])
def test_the_stop_button_stops_the_engine(scripts, exported, open_file, seed):
    """In the page, this works only because the engine pauses."""
    settings = dict(seed=seed, temperature=0.9, top_p=0.9)
    state = dict(max_new_tokens=4096, text=TEXT, **settings)
    viewer = open_file(exported("char"), *scripts, hash=f"#{urlencode(state | {'view': 'tokens'})}")
    assert viewer("fileFacts.then(({simd}) => simd)") == (NO_WASM not in scripts)
    viewer(COUNT_STEPS)
    viewer("playground.generatesAtOnce = false")
    viewer.show("playground", **state)
    viewer(STOP_EARLY)
    viewer.find("generate").click()
    wait_until(lambda: viewer("steps.done"))
    wait_until(lambda: viewer("playground.running.size === 0"))
    assert 30 < viewer("steps.count") < 4096
    assert viewer("requests.size") == 0
    counts = viewer("playground.samples.map(sample => sample.tokens.length)")
    assert len(counts) == 3 and 30 < min(counts) and max(counts) < 4096
    viewer.find("setting-max_new_tokens").fill("100")
    expected = exported("char").language_model().generate(TEXT, num_samples=3, max_new_tokens=100, **settings)
    assert generate(viewer) == expected


def test_a_file_labels_its_first_text(exported, open_file):
    """Its loss was shown as if the text were new."""
    facts = dict(reason=None, characters=42, in_training=40, searched=9, complete=True, init_from="scratch")
    overlap = {"ids": CHARACTERS.encode(TEXT).tolist(), "facts": facts}
    viewer = open_file(exported("char", initial_overlap=overlap), hash="#view=tokens")
    note = viewer.find("training-note")
    wait_until(lambda: note.inner_text().startswith("40 of these 42 characters occur in the training data"))
    viewer.show("tokens", text="to be")
    wait_until(lambda: note.inner_text() == "Not compared with the training data: this file has no index of it.")


def test_a_file_generates_once_by_itself_and_links_to_the_story(exported, open_file):
    """It opened with an empty form. With an empty prompt, it showed a line break that no one had typed."""
    file = exported("char")
    viewer = open_file(file, hash="#text=&max_new_tokens=40")
    assert viewer.page.locator("#strip").is_hidden()
    assert viewer.page.locator("#input-note").inner_text() == "The prompt is empty: the model starts from a line break."
    for text in ("", TEXT):  # the second one is the file's
        wait_until(lambda: viewer("playground.samples.length > 0 && playground.running.size === 0"))
        expected = file.language_model().generate(text, num_samples=3, max_new_tokens=40)
        assert viewer.find("sample-text").evaluate_all("nodes => nodes.map(node => node.textContent)") == expected
        if text == "":
            viewer.follow(f"{file.url}#max_new_tokens=40")
    assert viewer.page.locator("#strip").is_visible() and viewer.page.locator("#input-note").inner_text() == ""
    viewer("playground.samples = []")
    viewer.show("tokens").show("playground", max_new_tokens=40)
    assert viewer("playground.samples.length + playground.running.size") == 0
    viewer.find("story-link").get_by_role("link").click()
    wait_until(lambda: viewer.state("view") == ["story"])
    assert settle(viewer.wait()).page.locator("#view h2").inner_text() == "How does this model choose the next token?"


def test_the_first_samples_can_be_stopped(exported, open_file):
    viewer = open_file(exported("char"), STOP_EARLY, hash="#max_new_tokens=4096")
    wait_until(lambda: viewer("playground.samples.length === 3 && playground.running.size === 0"))
    assert viewer("playground.samples.every(({ended, tokens}) => ended === 'stopped' && tokens.length < 4096)")


def test_a_phone_shows_the_samples_before_the_settings(exported, open_file):
    viewer = open_file(exported("char"))
    assert viewer.find("setting-seed").is_visible()
    viewer.page.set_viewport_size({"width": 390, "height": 844})
    viewer.follow(viewer.served.url)
    assert viewer.find("setting-seed").is_hidden()
    viewer.find("settings").locator("summary").click()
    assert viewer.find("setting-seed").is_visible()


def test_links_restore_prompt_and_settings(exported, open_file, seed):
    viewer = open_file(exported("char"), CLIPBOARD)
    assert viewer("fileFacts.then(({simd}) => simd)") and viewer.state("view") == ["playground"]
    settings = dict(samples=2, temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.1, seed=seed)
    for name, value in {**settings, "max_new_tokens": 25, "stop": "q\\n"}.items():
        viewer.find(f"setting-{name}").fill(str(value))
    before = viewer("drawing")
    viewer.page.locator("#text").fill("not to be:\n")
    wait_until(lambda: viewer("drawing") > before and viewer("+document.body.dataset.drawn === drawing"))
    texts = generate(viewer)
    viewer.find("copy-link").click()
    wait_until(lambda: viewer("self.copied !== undefined"))
    other = open_file(exported("char"), hash=viewer("new URL(self.copied).hash"))
    assert other("state") == viewer("state") and other.page.locator("#text").input_value() == "not to be:⏎ "
    assert generate(other) == texts and len(texts) == 2


def test_invalid_links_show_the_playground(exported, open_file):
    viewer = open_file(exported("char"), hash="#view=run")
    assert viewer.state("view") == ["playground"]
    for hash in ("#view=nothing", "#view=__proto__", "#%00&=&&&samples=x&text=%E2", "#token=1e9&layer=-7"):
        viewer(FOLLOW, hash)
        assert viewer.wait().state("view") == ["playground"] and viewer.find("generate").is_visible(), hash
    viewer.show("playground", samples="1e9", ids="1,2,3").find("generate").click()
    wait_until(lambda: "num_samples" in viewer.find("playground-error").inner_text())


INVALID_IDS = f"ids must be a list of token ids from 0 to {CHARACTERS.vocab_size - 1}"


@pytest.mark.parametrize(
    "hash, is_traced, message",
    [
        ("#ids=1,99999", True, INVALID_IDS),
        ("#ids=1.5,-2", False, INVALID_IDS),  # the model is too large to trace
        ("#ids=abc", False, INVALID_IDS),
        ("#heads_off=9.9", True, "the model has 2 layers of 4 heads"),
    ],
)
def test_errors_of_the_first_overview_are_shown(hash, is_traced, message, exported, open_file):
    page = open_file(exported("char", traced=is_traced), hash=hash, waits=False).page
    page.locator("#view .error").wait_for()
    assert page.locator("#view .error").inner_text() == message


def test_generating_does_not_wait_for_the_first_overview(exported, open_file):
    """Only views that show its numbers do."""
    viewer = open_file(exported("char"), HOLD.replace("KIND", "overview"))
    wait_until(lambda: viewer("heldCount() === 1"))
    for view in ("all-heads", "tokens", "playground", "examples"):
        before = viewer("drawing")
        viewer(FOLLOW, f"#view={view}")
        viewer("answerOf({kind: 'ask', question: {kind: 'tokens', text: 'x'}})")  # after the questions of the view
        if view == "playground":
            viewer.wait(before)
        assert (viewer("+document.body.dataset.drawn") > before) == (view == "playground"), view
        assert viewer.page.locator("#view .error:not(:empty)").count() == 0, view
    before = viewer("drawing")
    assert viewer("heldCount()") == 1
    viewer("release()")
    wait_until(lambda: viewer("+document.body.dataset.drawn === drawing"))
    assert viewer.find("view-examples").is_visible()
    assert viewer("drawing") == before


def test_the_page_waits_until_the_model_is_loaded(exported, open_file):
    """The text field is disabled until then, and the latest link wins."""
    viewer = open_file(exported("char"), HOLD.replace("KIND", "load"), waits=False)
    wait_until(lambda: viewer("heldCount() === 1"))
    assert viewer.page.locator("#text").is_disabled()
    viewer(FOLLOW, "#view=tokens&text=to")
    viewer("release()")
    viewer.wait()
    assert viewer.state("view") == ["tokens"] and viewer.page.locator("#text").input_value() == "to"
    before = viewer("drawing")
    viewer.page.locator("#text").fill("be")
    viewer.wait(before)
    assert viewer.state("text") == ["be"]


RECORDED = {  # of a model with 2 layers of 4 heads
    "ids": [3, 4, 5], "steps": [0, 70], "losses": [[4.0, 3.0], [2.0, 1.0]], "best": [[3, 3], [4, 5]],
    "token": 1, "first": 0, "weights": [[4 * [[0.25, 0.75]], 4 * [[0.5, 0.5]]], [4 * [[0.8, 0.2]], 4 * [[0.9, 0.1]]]],
    "earlier": 2 * [2 * [4 * [0.0]]], "guess_ids": [[3, 4, 5], [5, 4, 3]],
    "guess_probabilities": [[0.5, 0.25, 0.1], [0.6, 0.2, 0.1]],
}  # fmt: skip


def test_the_story_with_a_recorded_training(exported, open_file):
    """The weights of other steps are not in the file. Its last stop shows the recorded attention."""
    viewer = open_file(exported("char", training=RECORDED))
    for number in range(10):
        settle(viewer.show("story", story=number))
        assert viewer.page.locator("#view h2").inner_text().startswith(f"{number}. " if number else "How ")
        assert not {"NaN", "undefined", "null"} & {*viewer.page.locator("#view").inner_text().split()}
        closer = viewer.page.get_by_role("link", name="Look closer")
        assert closer.count() == (number < 9)  # the view of checkpoints needs the run
    assert "fell from 3.500 at step 0 to 1.500 at step 70" in viewer.page.locator("#view").inner_text()
    viewer(HOLD_PAUSES)
    viewer.after(viewer.find("story-try").click)
    for step, weights in enumerate(RECORDED["weights"]):
        wait_until(lambda: viewer("held.length") == 1)
        assert settle(viewer).state("story_step") == [step]
        shown = viewer("Array.from(machine.sheet.tensors.weights.data)")
        assert shown == torch.tensor(weights).flatten().tolist()
        lines = viewer.find("machine-list").locator("li").all_text_contents()
        best = max(weights[1][3])
        assert f"Head 1.3 takes {100 * best:.1f}% of " in lines[7]
        assert f"({100 * RECORDED['guess_probabilities'][step][0]:.1f}%)" in lines[-1]
        if step == 0:
            viewer.after(lambda: viewer("() => void held.shift()()"))
    viewer.after(lambda: viewer.find("story-step").fill("0"))
    assert viewer.state("story_step") == [0]


@pytest.mark.parametrize("kind", ["char", "gpt2", "byte", "midi"])
def test_the_machine_of_a_file_equals_numpy(kind, exported, open_file, seed):
    """Its numbers, colors, and pixels at each stop, computed by the file's own engine."""
    file = exported(kind)
    viewer = open_file(file, hash="#view=tokens")
    viewer.page.set_viewport_size({"width": 2560, "height": 1440})
    ids = [1 + 7 * i % (file.tokenizer.vocab_size - 1) for i in range(40)]
    run = NumpyGPT(file.model).run(ids)
    for number, stop in enumerate(STOPS[:-1]):
        show_stop(viewer, stop, ids=",".join(map(str, ids)), token=20).text()
        assert viewer.page.locator("#view .check.wrong").count() == 0
        cells = random_cells(viewer, seed + number)
        assert len(cells) > 0
        check_cells(viewer, cells, run, run)


def test_music_has_a_piano_roll(exported, open_file):
    file = exported("midi")
    viewer = open_file(file, hash="")
    assert viewer.state("view") == ["roll"]
    before = viewer("byId('text').value")
    viewer.page.get_by_role("button", name="Continue the piece").click()
    wait_until(lambda: viewer("!isContinuing && state.ids.includes(',')"))  # the piece may end early
    viewer.wait()
    expected = file.language_model().generate("", max_new_tokens=48 - 1)
    assert file.tokenizer.decode(viewer("state.ids.split(',').map(Number)")) == expected and before == ""


def test_a_translation(exported, open_file):
    """The page writes the prompt, and the model answers at temperature 0."""
    file = exported("phrases", languages=LANGUAGES)
    viewer = open_file(file)
    assert viewer.state("view") == ["translate"] and viewer.find("phrase").input_value() == "face"
    wait_until(lambda: viewer.state("text")[0].startswith("ab: face | cd:"))  # translated by itself
    assert viewer.find("translation").text_content() and viewer.find("story-link").is_visible()
    assert viewer.find("target").locator("option").all_inner_texts() == ["cd", "ef"]
    viewer.find("target").select_option("ef")
    viewer.wait()
    viewer.find("phrase").fill("a bad idea? ")
    viewer.find("translate").click()
    prompt = "ab: a bad idea?  | ef:"
    wait_until(lambda: viewer("state.text").startswith(prompt))
    expected = file.language_model().generate(
        prompt, temperature=0, on_unknown="skip", max_new_tokens=max(1, 48 - len(prompt) + 1)
    )
    assert viewer.find("translation").text_content() == expected.strip()
    translated = viewer.find("translated").inner_text()
    assert "tokens/s; skipped: 1 character not in the vocabulary" in translated
    assert viewer.find("stop").is_disabled()
    again = open_file(file, hash=viewer("location.hash"))
    assert again.find("target").input_value() == "ef" and again.find("phrase").input_value() == "a bad idea? "
    assert viewer.state("text") == [prompt + expected]


def test_a_large_model_only_generates(exported, open_file, seed):
    file = exported("char", traced=False)
    viewer = open_file(file, hash=f"#view=tokens&seed={seed}")
    assert viewer.views() == ["playground"] and not viewer.find("color").is_visible()
    assert viewer.page.locator("#menu h2").all_inner_texts() == ["SAMPLING"]
    assert "too large" in viewer.find("too-large").inner_text()
    assert viewer("!!cachedAnswer({kind: 'tokens', text: state.text})")  # later questions did not replace it
    assert viewer("firstOverview") is None  # no trace
    assert generate(viewer) == file.language_model().generate(TEXT, num_samples=3, max_new_tokens=200, seed=seed)


def test_differing_logits_are_detected(exported, open_file):
    header = read_html(exported("char").path).header
    logits = [[token, 1.001 * logit] for token, logit in header["check"]["logits"]]
    page = open_file(exported("char", check=header["check"] | {"logits": logits}), waits=False).page
    page.locator("#view .error").wait_for()
    error = page.locator("#view .error").inner_text()
    assert "1.0e-3" in error and "model.py" in error and "python tools/export.py --to=html" in error


def test_damaged_and_incomplete_files_say_what_to_do(exported, open_file, tmp_path):
    """The browser's own message for invalid base64 or gzip says nothing about the file."""
    text = exported("char").path.read_text(encoding="utf-8")
    blocks = [text.index(f'data-kind="{kind}"') for kind in ("code", "header", "weights")]
    texts = [text.index(">", block) + 1 for block in blocks]
    ends = [text.index("<header"), text.index("<header") + 200, *(start + 400 for start in texts)]
    ends += [text.rindex("<script", 0, block) for block in blocks]
    ends += [text.index("<script>readBlock", block) for block in blocks]
    part = replace(exported("char"), path=tmp_path / "part.html")
    part.path.write_text("", encoding="utf-8")
    viewer = open_file(part, waits=False)

    def check(content: str, message: str) -> None:
        part.path.write_text(content, encoding="utf-8")
        viewer.page.goto(part.url)
        wait_until(lambda: viewer("document.body.innerText").count(message) == 1)

    for end in ends:
        check(text[:end], "The file is incomplete")
    for start in texts:
        check(text[:start] + "!" * 40 + text[start + 40 :], "damaged. Download it again, or export it")
    viewer.problems.clear()


@pytest.mark.browser
@pytest.mark.needs("websockets")
def test_firefox_generates_the_same_samples_with_and_without_webassembly(exported, seed):
    from tests.support.firefox import firefox

    file = exported("byte")
    expected = file.language_model().generate(TEXT, num_samples=2, max_new_tokens=100, seed=seed)
    drawn = "new Promise(resolve => {const timer = setInterval(() => %s && resolve(clearInterval(timer)), 20)})"
    with firefox() as browser:
        for has_wasm in (True, False):
            if not has_wasm:
                browser.before_pages("() => { delete self.WebAssembly; delete self.Worker; }")
            browser.goto("about:blank")
            browser.goto(f"{file.url}#samples=2&max_new_tokens=100&seed={seed}")
            browser.evaluate(drawn % "document.body.dataset.drawn")
            assert browser.evaluate("fileFacts.then(({simd}) => simd)") is has_wasm
            browser.evaluate("document.querySelector('[data-testid=generate]').click()")
            # A sample has ended before its last tokens are drawn, in the next frame.
            are_drawn = "playground.samples.every(({ended, drawn, tokens}) => ended && drawn === tokens.length)"
            browser.evaluate(drawn % f"playground.samples.length && {are_drawn}")
            assert browser.evaluate("playground.samples.map(({text}) => text.textContent)") == expected
