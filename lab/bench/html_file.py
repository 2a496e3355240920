"""Measure generation of an HTML file in headless Chromium against sample.py, alternating in one run.

    python lab/bench/html_file.py                      random weights of three sizes
    python lab/bench/html_file.py out-shakespeare-char  a run
    python lab/bench/html_file.py model.html           a file from tools/export.py, without sample.py

Tokens per second are for one text with the default settings of sample.py, far beyond the context. Both must generate
the same text, because the weights are stored as float32. The time to the first token includes opening the file, in
float16. Requires Chromium, and playwright from requirements-dev.txt. Measure on a quiet machine.
"""

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import PositiveInt, comma_separated, run_script  # noqa: E402
from folio.data.tokenizer import CharTokenizer  # noqa: E402
from lab.bench.timing import (  # noqa: E402
    BenchConfig,
    alternate,
    busy_processes,
    describe_device,
    format_median,
    format_ratios,
    headless_chromium,
    print_table,
    unknown_names,
)
from lab.bench.viewer import write_run  # noqa: E402


class Size(NamedTuple):
    """The shape of a random model, and the limit for its median time to the first token."""

    shape: dict[str, Any]  # arguments of GPTConfig
    max_first_token: float  # seconds


MODELS = {
    "0.6M": Size(dict(block_size=128, n_layer=3, n_head=4, n_embd=128, activation="gelu"), 0.3),
    "4.8M": Size(dict(block_size=256, n_layer=6, n_head=8, n_embd=256, activation="gelu"), 0.6),
    "10.7M": Size(dict(block_size=256, n_layer=6, n_head=6, n_embd=384, bias=False, activation="gelu"), 1.0),
}
CHARACTERS = CharTokenizer("\n" + "".join(map(chr, range(32, 96))))  # 65, as in Tiny Shakespeare
PROMPT = "TO BE"
MIN_RATIO = 0.5  # of sample.py's tokens per second

# Runs in the page of a file once its scripts are loaded. Returns the text after the prompt, tokens per second, and the
# seconds from opening the page to the first token.
GENERATE = """async ({prompt, count}) => {
  const ready = () => typeof fileFacts !== "undefined";
  while (!ready()) await new Promise(resolve => setTimeout(resolve, 1));
  playground.generatesAtOnce = false; // only the text that is measured
  const {facts: {ids}} = await provider.ask({kind: "tokens", text: prompt, whole: true});
  const began = performance.now(), {signal} = new AbortController();
  let text = "", tokens = 0, first = 0;
  for await (const {samples} of provider.generate({ids, max_new_tokens: count}, signal)) {
    if (!samples?.[0]) continue;
    first ||= performance.now();
    text += samples[0][1];
    if (samples[0][0] !== null) tokens++;
  }
  return {text, speed: 1000 * tokens / (performance.now() - began), first: first / 1000};
}"""


@dataclass(frozen=True)
class HtmlBenchConfig(BenchConfig):
    # --- measurements ---
    paths: tuple[str, ...] = ()  # runs, and files from tools/export.py; default: --models
    models: str = "0.6M,4.8M,10.7M"  # comma-separated
    tokens: PositiveInt = 500  # number of tokens to generate
    browser: str | None = None  # path of the program; None: chromium or google-chrome on the PATH

    def problems(self) -> list[tuple[str, str]]:
        """Require known models."""
        return [*super().problems(), *unknown_names("models", self.models, MODELS)]


class Generated(NamedTuple):
    """A generated text."""

    text: str  # without the prompt
    speed: float  # tokens per second
    first: float  # seconds until the first token; 0 if not measured


def main(cfg: HtmlBenchConfig) -> None:
    with headless_chromium(cfg.browser) as browser:
        print(f"{describe_device(cfg.device)}, Chromium {browser.version}; medians of {cfg.repeats}\n")
        rows = [make_row(Path(path).name, measure(browser, Path(path), cfg)) for path in cfg.paths]
        for name in [] if cfg.paths else comma_separated(cfg.models):
            with tempfile.TemporaryDirectory() as folder:
                run = write_run(Path(folder) / "run", MODELS[name].shape, CHARACTERS)
                rows.append(make_row(name, measure(browser, run, cfg), MODELS[name].max_first_token))
    heads = ("model", "sample.py, tokens/s", "file, tokens/s", "ratio", "at least", "first token, s", "at most")
    print_table(heads, rows)


def measure(browser: Any, path: Path, cfg: HtmlBenchConfig) -> dict[str, list[Generated]]:
    """Measure a run, or a file without sample.py. Raises UserError if the generated texts differ."""
    with exported(path, "float32") as fast, exported(path, "float16") as small, busy_processes(cfg.busy):
        methods = {"file": partial(generate, browser, fast, cfg.tokens)}
        methods["first token"] = partial(generate, browser, small, 1)
        if path.is_dir():
            methods["sample.py"] = partial(run_sample, path, cfg.tokens)
        results = alternate(methods, cfg.repeats, warmup=False)
    texts = {result.text.strip() for method in ("file", "sample.py") for result in results.get(method, [])}
    if len(texts) > 1:
        raise UserError(f"{path}: sample.py and the file generate different texts")
    return results


def make_row(name: str, results: dict[str, list[Generated]], max_first_token: float | str = "") -> list[Any]:
    """Return a table row of medians."""
    first_token = statistics.median(result.first for result in results["first token"])
    file, sample = ([result.speed for result in results.get(method, [])] for method in ("file", "sample.py"))
    speeds = ("", format_median(file), "", "")
    if sample:
        speeds = (format_median(sample), format_median(file), format_ratios(file, sample), MIN_RATIO)
    return [name, *speeds, f"{first_token:.2f}", max_first_token]


@contextlib.contextmanager
def exported(path: Path, dtype: str) -> Iterator[Path]:
    """Export a run to a temporary HTML file, or yield `path` if it is one."""
    if path.suffix == ".html":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.html"
        run_script_file("tools/export.py", str(path), str(file), "--to=html", f"--dtype={dtype}")
        yield file


def generate(browser: Any, file: Path, count: int) -> Generated:
    """Open the file in a new page, and generate a text."""
    page = browser.new_page()
    page.goto(file.resolve().as_uri(), wait_until="commit")
    result = page.evaluate(GENERATE, {"prompt": PROMPT, "count": count})
    page.close()
    return Generated(**result)


def run_sample(run: Path, count: int) -> Generated:
    """Generate a text after the prompt with sample.py."""
    options = [f"--out_dir={run}", "--dtype=float32", "--device=cpu", f"--max_new_tokens={count}", f"--start={PROMPT}"]
    completed = run_script_file("sample.py", *options)
    speed = re.search(r"([\d,]+) tokens/s", completed.stderr)
    return Generated(completed.stdout.removeprefix(PROMPT), float(speed[1].replace(",", "")), first=0.0)


def run_script_file(script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / script), *options]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True)


if __name__ == "__main__":
    run_script(main, HtmlBenchConfig)
