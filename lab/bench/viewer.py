"""Measure the viewer in headless Chromium: page load, traces, changing heads, hovering, frames, and memory.

    python lab/bench/viewer.py                             a small model, and random weights of GPT-2's 124M shape
    python lab/bench/viewer.py --models="char 0.8M" --repeats=10

The models have random weights. Requires Chromium, and playwright from requirements-dev.txt. Measure on a quiet machine.
Page load is measured from outside the page, and everything else inside: from a question, a change, or an event.
"""

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import comma_separated, run_script  # noqa: E402
from folio.checkpoints import checkpoint  # noqa: E402
from folio.data.tokenizer import ByteTokenizer, Tokenizer  # noqa: E402
from folio.training.guard import StepGuard  # noqa: E402
from folio.training.planning.resolve import versions  # noqa: E402
from lab.bench.timing import (  # noqa: E402
    BenchConfig,
    busy_processes,
    describe_device,
    headless_chromium,
    print_table,
    running_server,
    unknown_names,
)
from model import GPT, GPTConfig  # noqa: E402

MODELS = {  # name -> arguments of GPTConfig
    "char 0.8M": dict(block_size=256, vocab_size=257, n_layer=4, n_head=4, n_embd=128, bias=False),
    "GPT-2 124M": dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768),
}
SHORT = 128  # tokens of a short text
HOVER_TOKENS = 256  # maximum text length with a limit for hovering
HOVERS = 60  # number of tokens that the pointer enters
MAX_CHANGES = 12  # maximum numbers of heads and layers to select

# The scripts return milliseconds. ASK: a question from the page to the server.
ASK = """async question => {
  const began = performance.now();
  await provider.ask(question);
  return performance.now() - began;
}"""
# HOVER: the pointer enters a token; until the handler returns, styles and layout are computed, and the next frame.
HOVER = """token => new Promise(done => {
  const node = document.querySelector(`#view [data-testid="token-${token}"]`);
  requestAnimationFrame(() => {
    const began = performance.now();
    node.dispatchEvent(new PointerEvent("pointerenter"));
    const handled = performance.now();
    node.getBoundingClientRect(); // computes styles and layout
    const laidOut = performance.now();
    requestAnimationFrame(() => done([handled - began, laidOut - began, performance.now() - began]));
  });
})"""
# CHANGE: a change of the state, until the view is drawn.
CHANGE = """async changes => {
  const began = performance.now();
  await change(changes);
  return performance.now() - began;
}"""
# FRAMES: the camera of the machine moves from the whole sheet to the stop and plays its act: milliseconds per frame.
FRAMES = """() => new Promise(done => {
  const began = performance.now();
  let count = 0;
  flyTo(machine.scene.focus, false);
  requestAnimationFrame(function next() {
    count++;
    if (machine.start !== null) return requestAnimationFrame(next);
    done((performance.now() - began) / count);
  });
})"""
THROTTLED = 6  # times slower, as a phone
DRAWN = "typeof drawing === 'number' && drawing > 0 && Number(document.body.dataset.drawn) === drawing"


@dataclass(frozen=True)
class ViewBenchConfig(BenchConfig):
    # --- measurements ---
    models: str = "char 0.8M,GPT-2 124M"  # comma-separated
    browser: str | None = None  # path of the program; None: chromium or google-chrome on the PATH

    def problems(self) -> list[tuple[str, str]]:
        """Require known models."""
        return [*super().problems(), *unknown_names("models", self.models, MODELS)]


def main(cfg: ViewBenchConfig) -> None:
    with headless_chromium(cfg.browser) as browser, tempfile.TemporaryDirectory() as folder:
        print(f"{describe_device(cfg.device)}, Chromium {browser.version}\n")
        for name in comma_separated(cfg.models):
            run = write_run(Path(folder) / "run", MODELS[name], ByteTokenizer())
            server = running_server("view.py", str(run), "--open=False", f"--device={cfg.device}", "--text=To be")
            with busy_processes(cfg.busy), server as (_, url):
                rows = measure(browser, url, MODELS[name]["block_size"], cfg.repeats)
            print_table((name, "median", "worst", "at most"), [row.cells for row in rows])
            shutil.rmtree(run)


def write_run(folder: Path, shape: dict[str, Any], tokenizer: Tokenizer) -> Path:
    """Write a run's folder with random weights. shape: arguments of GPTConfig."""
    config = GPTConfig(**{"vocab_size": tokenizer.vocab_size, **shape})
    weights = dict(GPT(config).named_parameters())
    guard = StepGuard(torch.device("cpu"), None).state() | {"val_losses": [], "evaluated_at": 0}
    progress = dict(next_sequence=0, best_val_loss=None, best_step=0, evaluations_since_best=0, guard=guard)
    resolved = dict(device="cpu", dtype="float32", compile=False)
    part = dict(from_step=0, init_from="scratch", after=None, changes={}, exact=True, threads=1)
    part |= dict(resolved=resolved, versions=versions(), decisions=[(0, 1)], max_val_tokens=None)
    dataset = dict(folder="", hash="", parts={}, not_held_out=[], prompt_format=None)
    run = dict(run_id="", config={}, origins={}, dataset=dataset, parts=[part], grad_scaler={})
    unknown = dict.fromkeys(("torchrun", "stopped_by", "wandb_id", "budget"))
    state = {"model": asdict(config), **progress, **run, **unknown}
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder, 0, weights, {"none": torch.zeros(1)}, tokenizer, state)
    return folder


@dataclass(frozen=True)
class Measurement:
    """A row of the table."""

    name: str
    values: list[float]
    limit: float | None  # for the median
    unit: str = "s"

    @property
    def cells(self) -> list[str]:
        results = (statistics.median(self.values), max(self.values))
        limit = "" if self.limit is None else f"{self.limit:g} {self.unit}"
        return [self.name, *(f"{value:.3g} {self.unit}" for value in results), limit]


def measure(browser: Any, url: str, context: int, repeats: int) -> list[Measurement]:
    """Return all measurements of a model. context: block_size of the model."""
    is_large = context > HOVER_TOKENS
    full, short = ([1 + i % 250 for i in range(count)] for count in (context, min(SHORT, context)))
    page = browser.new_page()
    rows = [Measurement("page usable", [open_page(page, url) for _ in range(repeats)], 1.0)]

    def trace(ids: list[int]) -> list[float]:
        """Return the seconds per overview, each of a different text, so that no trace is cached."""
        texts = ([1 + repeat, *ids[1:]] for repeat in range(repeats))
        return [page.evaluate(ASK, {"kind": "overview", "ids": text}) / 1000 for text in texts]

    trace(short)  # warmup
    rows.append(Measurement(f"trace of {len(short)} tokens", trace([2, 2, *short[2:]]), None if is_large else 0.3))
    if is_large:
        rows.append(Measurement(f"trace of {context:,} tokens", trace(full), 4.0))
    open_page(page, f"{url}#view=looking-back&ids={','.join(map(str, full))}")
    heads = range(1, min(MAX_CHANGES, page.evaluate("info.models[0].config.n_head")))
    changes = [page.evaluate(CHANGE, {"head": head}) / 1000 for head in heads]
    rows.append(Measurement(f"another head at T = {context:,}", changes, 0.2 if is_large else None))
    layers = range(1, min(MAX_CHANGES, page.evaluate("info.models[0].config.n_layer")))
    changes = [page.evaluate(CHANGE, {"layer": layer}) / 1000 for layer in layers]
    rows.append(Measurement(f"another layer at T = {context:,}", changes, None))
    tokens = range(0, context, max(1, context // HOVERS))
    hovers = zip(*(page.evaluate(HOVER, token) for token in tokens), strict=True)
    for values, end in zip(hovers, ("handler", "and layout", "until the next frame"), strict=True):
        limit = 16.0 if end == "and layout" and not is_large else None  # a frame takes 16.7 ms
        rows.append(Measurement(f"hovering at T = {context:,}: {end}", list(values), limit, "ms"))
    for again in ("", " again"):
        stops = range(page.evaluate("availableStops().length"))
        text = {"ids": ",".join(map(str, short)), "view": "story"}
        changes = [page.evaluate(CHANGE, {**text, "story": stop}) for stop in stops]
        rows.append(Measurement(f"each stop{again} at T = {len(short)}", changes, None if is_large else 100.0, "ms"))
    page.evaluate(CHANGE, {"view": "story", "story": 3})
    throttle = page.context.new_cdp_session(page)
    for rate, name in ((1, ""), (THROTTLED, f", a CPU {THROTTLED} times slower")):
        throttle.send("Emulation.setCPUThrottlingRate", {"rate": rate})
        frames = [page.evaluate(FRAMES) for _ in range(repeats)]
        rows.append(Measurement(f"each frame of the machine{name}", frames, None, "ms"))
    throttle.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    count = len(heads) + len(layers) + 1
    rows.append(Measurement(f"JavaScript memory after {count} heads", [heap(page)], 300.0, "MB"))
    page.close()
    return rows


def open_page(page: Any, url: str) -> float:
    """Return the seconds from opening the page until its view is drawn."""
    page.goto("about:blank")
    start_time = time.perf_counter()
    page.goto(url)
    while not page.evaluate(DRAWN):
        time.sleep(0.002)
    return time.perf_counter() - start_time


def heap(page: Any) -> float:
    """Return the megabytes of JavaScript objects and buffers after garbage collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    return (usage["usedSize"] + usage.get("backingStorageSize", 0)) / 1e6


if __name__ == "__main__":
    run_script(main, ViewBenchConfig)
