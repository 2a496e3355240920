"""The viewer's server, and its page in Chromium."""

import base64
import importlib.resources
import math
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folio.decoding.language_model import LanguageModel
from folio.web.questions import TraceProvider
from folio.web.server import listen, make_server
from folio.web.viewed_model import ViewedModel
from folio.web.viewer import make_app
from model import GPT
from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyGPT, NumpyRun, assert_same, assert_same_ranks
from tests.support.servers import running
from tests.support.viewed_models import TEXT
from tests.support.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
CPU = torch.device("cpu")
Array = np.ndarray


@dataclass
class Served:
    """A viewer's server in a thread."""

    provider: TraceProvider
    url: str

    @property
    def port(self) -> int:
        return urllib.parse.urlsplit(self.url).port

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[GPT]:
        """The opened model, with one weight of its layers changed inside the block."""
        model, random = self.provider.viewed[0].model, np.random.default_rng(seed)
        parameters = {name: p for name, p in model.named_parameters() if ".h." in name}
        name = random.choice(sorted(parameters))
        weights = parameters[name].view(-1)
        index = random.integers(len(weights))
        original = weights[index].item()
        print(f"changed: {name}, weight {index}")
        try:
            weights[index] = original + random.choice([-1, 1])
            self.forget()
            yield model
        finally:
            weights[index] = original
            self.forget()

    def forget(self) -> None:
        for cache in (self.provider.traces, self.provider.probes, self.provider.engines):
            cache.values.clear()


@contextmanager
def serving_provider(provider: Any) -> Iterator[Served]:
    listener = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with running(make_server(make_app(provider, frozenset([address]))), listener):
        yield Served(provider, f"http://{address}/")


def serving(runs: list[str], text: str = TEXT) -> AbstractContextManager[Served]:
    """Serve one or two runs."""
    return serving_provider(TraceProvider([ViewedModel(run, "best", CPU) for run in runs], text))


class Viewer:
    """A page of the viewer. Collects errors and requests to other servers in `problems`."""

    def __init__(self, page: Any, served: Served):
        self.page, self.served, self.problems = page, served, []
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        own = (served.url, "data:", "blob:")
        page.on("request", lambda sent: sent.url.startswith(own) or self.problems.append(f"requested {sent.url}"))

    @property
    def viewed(self) -> ViewedModel:
        return self.served.provider.viewed[0]

    def run(self, **switches: Any) -> NumpyRun:
        """The shown text in NumPy."""
        return NumpyGPT(self.viewed.model, **switches).run(self("loadContext().then(context => context.ids)"))

    def open(self, view: str, **state: Any) -> "Viewer":
        """Load the page from a link, and wait until the view is drawn."""
        return self.follow(f"{self.served.url}#{urllib.parse.urlencode({'view': view, **state})}")

    def show(self, view: str, **state: Any) -> "Viewer":
        """Follow a link inside the open page, which is faster than open()."""
        hash = "#" + urllib.parse.urlencode({"view": view, **state})
        previous = self("hash => location.hash === hash ? -1 : (location.hash = hash, drawing)", hash)
        return self.wait(previous)

    def follow(self, url: str) -> "Viewer":
        self.page.goto("about:blank")  # otherwise only the part after # would change
        self.page.goto(url)
        return self.wait()

    def wait(self, previous: int = 0) -> "Viewer":
        """Wait until the newest drawing is complete. previous: the number of an earlier drawing.

        A chart is drawn before it has a width, and once more in the next frame, when it has one.
        """
        deadline = time.monotonic() + 60
        script = """previous => typeof drawing === "number" && drawing > previous
          && +document.body.dataset.drawn === drawing && !document.querySelector("[data-complete=false]")
          && [...document.querySelectorAll(".drawing")].every(holder => !holder.clientWidth
            || +holder.querySelector("svg").getAttribute("width") === Math.max(holder.clientWidth, MIN_WIDTH))"""
        while not self(script, previous):
            assert time.monotonic() < deadline, f"the page was not drawn: {self.problems}"
            time.sleep(0.01)
        return self

    def after(self, action: Callable[[], object]) -> "Viewer":
        """Perform an action that redraws the page, and wait until it is drawn."""
        previous = self("drawing")
        action()
        return self.wait(previous)

    def redrawn(self, script: str) -> Callable[[], list]:
        """A function that returns the values of an expression, evaluated each time that the view is drawn from now."""
        self("""() => {
          window.values = [];
          new MutationObserver(() => values.push(SCRIPT)).observe(document.getElementById("view"), {childList: true});
        }""".replace("SCRIPT", script))  # fmt: skip
        return lambda: self("values")

    def __call__(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def press(self, *keys: str) -> "Viewer":
        for key in keys:
            self.page.keyboard.press(key)
            self.wait()
        return self

    def find(self, testid: str) -> Any:
        return self.page.get_by_test_id(testid)

    def text(self) -> str:
        """The text of the view, which must not be an error or contain what JavaScript shows for missing values."""
        text = self.page.locator("#view").inner_text()
        assert not self.page.locator("#view [role=alert]:not(:empty)").count(), text
        assert {"NaN", "undefined", "false", "null"} & {*text.split()} == set(), text
        return text

    def state(self, *names: str) -> list:
        return self("names => names.map(name => state[name])", names)

    def views(self) -> list[str]:
        """The views in the menu."""
        return self("Object.values(MENU).flat().filter(isAvailable)")

    def pictures(self) -> list[str]:
        return self("Array.from(document.querySelectorAll('#view figure'), figure => figure.dataset.testid)")

    def table(self, picture: str) -> dict[str, list]:
        """The table of a picture: {"columns": [...], "rows": [[...], ...]}."""
        table = self(
            """id => {
              const {columns, rows} = document.querySelector(`#view figure[data-testid="${id}"]`).table();
              return {columns, rows: rows.map(row => Array.from(row))};
            }""",
            picture,
        )
        assert {len(row) for row in table["rows"]} <= {len(table["columns"])}
        return table

    def column(self, picture: str, title: str) -> list:
        table = self.table(picture)
        return [row[table["columns"].index(title)] for row in table["rows"]]

    def matrix(self, picture: str) -> Array:
        """A table of numbers, without the labels in its first column."""
        return np.array([row[1:] for row in self.table(picture)["rows"]])

    def download(self, button: Any) -> bytes:
        """The file saved by a click. Chromium ignores downloads in quick succession: use `exported` for the others."""
        with self.page.expect_download() as download:
            button.click()
        return Path(download.value.path()).read_bytes()

    def exported(self, button: Any) -> bytes:
        """The file that a click on a button would save, without a download."""
        script = """async button => {
          const save = download;
          const content = await new Promise(resolve => {
            download = (name, content) => resolve(content);
            button.click();
          });
          download = save;
          const reader = new FileReader();
          reader.readAsDataURL(new Blob([content]));
          await new Promise(resolve => reader.addEventListener("load", resolve));
          return reader.result;
        }"""
        return base64.b64decode(button.evaluate(script).partition(",")[2])


@dataclass(frozen=True)
class Place:
    """The selected layer, head and token."""

    layer: int = 1
    head: int = 1
    token: int = 17


Check = Callable[[Viewer, NumpyRun, Place], None]


class Checks(dict[str, Check]):
    """The functions that compare the views or the stops of the story with NumPy, by id."""

    def __call__(self, name: str) -> Callable[[Check], Check]:
        """A decorator that registers the check of a view."""
        return lambda check: self.setdefault(name, check)

    def run(self, name: str, viewer: Viewer, run: NumpyRun, place: Place) -> None:
        """Compare the shown view, which must not have an error."""
        viewer.text()
        self[name](viewer, run, place)


checks = Checks()


@checks("tokens")
def check_tokens(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    tokenizer = viewer.viewed.tokenizer
    assert viewer.column("tokens", "position") == list(range(len(run.ids)))
    assert viewer.column("tokens", "id") == run.ids.tolist()
    contents = [tokenizer.token_bytes(token) for token in run.ids]
    assert viewer.column("tokens", "bytes") == [content.hex(" ") for content in contents]
    assert_same(viewer.column("tokens", "loss (nats)"), [math.nan, *run.losses])
    first, *ranks = viewer.column("tokens", "rank")
    assert math.isnan(first)
    assert_same_ranks(ranks, run)
    assert_same(viewer.column("tokens", "its probability"), [math.nan, *run.probabilities[:-1].max(-1)])
    assert_same(viewer.column("tokens", "entropy of the next (nats)"), run.entropies)
    pieces = [viewer.viewed.tokenizer.piece(token) for token in run.probabilities.argmax(-1)]
    assert viewer.column("tokens", "most likely") == ["", *pieces[:-1]]


@checks("attention-table")
def check_attention_table(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer = run.layer(place.layer)
    assert_same(viewer.matrix("scores"), layer.scores[place.head])
    assert_same(viewer.matrix("masked"), run.masked_scores(place.layer, place.head))
    assert_same(viewer.matrix("weights"), layer.weights[place.head])


def effect_of(run: NumpyRun, vector: np.ndarray, token: int) -> np.ndarray:
    """Return the direct effect of a vector (C,) on the logits of a token: (V,)."""
    deviation = np.sqrt(run.stream[-1, token].var() + 1e-5)
    normed = (vector - vector.mean()) / deviation * run.gpt.parameters["ln_f.weight"]
    return run.gpt.parameters["wte.weight"] @ normed


@checks("mlp")
def check_mlp(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, t = run.layer(place.layer), place.token
    before, after = layer.preactivation[t], layer.hidden[t]
    columns = run.gpt.parameters[f"h.{place.layer}.mlp.c_proj.weight"]
    lengths = np.linalg.norm(columns, axis=0)
    assert_same(viewer.matrix("mlp-activations"), np.stack([before, after], 1))
    rows = viewer.table("mlp-neurons")["rows"]
    neurons = [row[0] for row in rows]
    assert_same([row[4] for row in rows], np.sort(np.abs(after) * lengths)[::-1][: len(rows)])
    assert_same([row[1:4] for row in rows], np.stack([before, after, lengths], 1)[neurons])
    effects = np.array([effect_of(run, columns[:, n] * after[n], t) for n in neurons])
    assert_same([[row[6], row[8]] for row in rows], np.stack([effects.max(-1), effects.min(-1)], 1))
    between = run.stream[2 * place.layer + 1, t]
    assert_same(viewer.matrix("mlp-stream"), np.stack([between, layer.mlp[t], between + layer.mlp[t]], 1))
    neuron = viewer.state("neuron")[0]
    check_products(viewer, "mlp-products", run, f"h.{place.layer}.mlp.c_fc", neuron, layer.ln_2[t])


def check_products(viewer: Viewer, picture: str, run: NumpyRun, name: str, row: int, x: Array) -> None:
    """Compare the products of an input and a row of a weight, the bias, and their sum."""
    bias = run.gpt.parameters.get(f"{name}.bias", np.zeros(row + 1))[row]
    terms = np.append(x * run.gpt.parameters[f"{name}.weight"][row], bias)
    *products, total = viewer.column(picture, "product")
    assert_same(products, terms)
    assert abs(total - terms.sum()) <= FLOAT32_ERROR * np.abs(terms).sum()


def assert_same_map(shown: Array, vectors: Array, table: Array) -> None:
    """Compare with vectors (N, C) on the two largest principal components of a table (V, C), up to the signs."""
    _, singular, components = np.linalg.svd(table - table.mean(0), full_matrices=False)
    projected = (vectors - table.mean(0)) @ components[:2].T
    # A singular vector turns by as much as the matrix changes, relative to the gap to the next singular value.
    error = FLOAT32_ERROR * singular[0] / np.diff(-singular[:3]).min()
    assert_same(shown, projected * np.sign((projected * shown).sum(0)), error)


@checks("output")
def check_output(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    table, logits = viewer.table("distribution"), run.logits[place.token]
    order = [row[0] for row in table["rows"]]
    assert sorted(order) == list(range(len(logits)))
    assert_same([row[2] for row in table["rows"]], logits[order])
    assert_same([row[3] for row in table["rows"]], run.probabilities[place.token, order])


def check_sample(viewer: Viewer, prompt: str, title: str) -> None:
    """Compare the probabilities of a sample in the playground with NumPy."""
    gpt = language_model(viewer)
    ids = gpt.tokenizer.encode(prompt).tolist()
    sample = [row for row in viewer.table("samples")["rows"] if row[0] == title]
    run = NumpyGPT(gpt.model).run([*ids, *(row[2] for row in sample)])
    probabilities = run.probabilities[len(ids) - 1 :]  # including the model's padding
    assert_same([row[5] for row in sample], [probabilities[t, row[2]] for t, row in enumerate(sample)])


def language_model(viewer: Viewer) -> LanguageModel:
    return LanguageModel(viewer.viewed.model, viewer.viewed.tokenizer, "cpu")


def axe_violations(viewer: Viewer, part: str = "html", **options: Any) -> list[str]:
    """The rules of axe-core that a part of the page violates, each with its first element. options: of axe.run."""
    package = pytest.importorskip("axe_playwright_python").__name__
    if viewer("typeof axe === 'undefined'"):
        viewer((importlib.resources.files(package) / "axe.min.js").read_text(encoding="utf-8"))
    script = "([part, options]) => axe.run(part, options).then(({violations}) => violations)"
    violations = viewer(script, [part, {"resultTypes": ["violations"], **options}])
    return [f"{violation['id']}: {violation['nodes'][0]['html']}" for violation in violations]


def generate(viewer: Viewer) -> list[str]:
    """Click on the generate button, and return the texts of all samples at their end."""
    viewer("stopSamples()")
    wait_until(lambda: viewer("playground.running.size === 0"))
    viewer("void (playground.samples = [])")
    viewer.find("generate").click()
    wait_until(lambda: viewer("playground.samples.length > 0 && playground.running.size === 0"))
    return viewer.find("sample-text").evaluate_all("nodes => nodes.map(node => node.textContent)")
