"""Measure how fast a model in an HTML file generates, in headless Chromium, against sample.py, alternating in one run.

    python tools/bench/html_file.py                      random weights of three sizes
    python tools/bench/html_file.py out-shakespeare-char  a run
    python tools/bench/html_file.py model.html           a file that tools/export.py has written, without sample.py

Tokens per second are those of one text at the default settings of sample.py, far beyond the context. Both print their
text, which must be the same, because the weights are stored as float32. The first token is that of a file in float16,
from opening it. It needs Chromium, and playwright of requirements-dev.txt. Measure on a quiet machine.
"""

import contextlib
import io
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
from tools import export  # noqa: E402
from tools.bench.timing import (  # noqa: E402
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
from tools.bench.viewer import write_run  # noqa: E402
from tools.export import ExportConfig  # noqa: E402


class Size(NamedTuple):
    """A model with random weights, and the largest median of the seconds until its first token."""

    shape: dict[str, Any]  # arguments of GPTConfig
    first_token: float


MODELS = {
    "0.6M": Size(dict(block_size=128, n_layer=3, n_head=4, n_embd=128, activation="gelu"), 0.3),
    "4.8M": Size(dict(block_size=256, n_layer=6, n_head=8, n_embd=256, activation="gelu"), 0.6),
    "10.7M": Size(dict(block_size=256, n_layer=6, n_head=6, n_embd=384, bias=False, activation="gelu"), 1.0),
}
CHARACTERS = CharTokenizer("\n" + "".join(map(chr, range(32, 96))))  # 65, as many as Tiny Shakespeare has
PROMPT = "TO BE"
RATIO = 0.5  # of sample.py's tokens per second, at least

# In the page of a file, as soon as its scripts run: the text that follows the prompt, tokens per second, and the time
# from opening the page to the first token, in seconds.
GENERATE = """async ({prompt, count}) => {
  const ready = () => typeof fileFacts !== "undefined";
  while (!ready()) await new Promise(resolve => setTimeout(resolve, 1));
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
    # --- what is measured ---
    paths: tuple[str, ...] = ()  # runs, and files of tools/export.py; none: the models
    models: str = "0.6M,4.8M,10.7M"  # separated by commas
    tokens: PositiveInt = 500  # to generate
    browser: str | None = None  # the program; None: chromium or google-chrome, where the system finds it

    def problems(self) -> list[tuple[str, str]]:
        """The models are known."""
        return [*super().problems(), *unknown_names("models", self.models, MODELS)]


class Generated(NamedTuple):
    """One text."""

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
                rows.append(make_row(name, measure(browser, run, cfg), MODELS[name].first_token))
    heads = ("model", "sample.py, tokens/s", "file, tokens/s", "ratio", "at least", "first token, s", "at most")
    print_table(heads, rows)


def measure(browser: Any, path: Path, cfg: HtmlBenchConfig) -> dict[str, list[Generated]]:
    """What a run, or a file without sample.py, generates. Raises UserError if sample.py and the file differ."""
    with exported(path, "float32") as fast, exported(path, "float16") as small, busy_processes(cfg.busy):
        methods = {"file": partial(generate, browser, fast, cfg.tokens)}
        methods["first token"] = partial(generate, browser, small, 1)
        if path.is_dir():
            methods["sample.py"] = partial(run_sample, path, cfg.tokens)
        measured = alternate(methods, cfg.repeats, warmup=False)
    texts = {each.text.strip() for method in ("file", "sample.py") for each in measured.get(method, [])}
    if len(texts) > 1:
        raise UserError(f"{path}: sample.py and the file generate different texts")
    return measured


def make_row(name: str, measured: dict[str, list[Generated]], most: float | str = "") -> list[Any]:
    """The medians of a model; most: seconds until its first token."""
    first_token = statistics.median(each.first for each in measured["first token"])
    file, sample = ([each.speed for each in measured.get(method, [])] for method in ("file", "sample.py"))
    speeds = ("", format_median(file), "", "")
    if sample:
        speeds = (format_median(sample), format_median(file), format_ratios(file, sample), RATIO)
    return [name, *speeds, f"{first_token:.2f}", most]


@contextlib.contextmanager
def exported(path: Path, dtype: str) -> Iterator[Path]:
    """The HTML file of a run, which is removed afterwards; or the file itself."""
    if path.suffix == ".html":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.html"
        with contextlib.redirect_stdout(io.StringIO()):
            export.main(ExportConfig(paths=(str(path), str(file)), to="html", dtype=dtype))
        yield file


def generate(browser: Any, file: Path, count: int) -> Generated:
    """What GENERATE returns for a new page."""
    page = browser.new_page()
    page.goto(file.resolve().as_uri(), wait_until="commit")
    result = page.evaluate(GENERATE, {"prompt": PROMPT, "count": count})
    page.close()
    return Generated(**result)


def run_sample(run: Path, count: int) -> Generated:
    """The text that sample.py generates after the prompt."""
    options = [f"--out_dir={run}", "--dtype=float32", "--device=cpu", f"--max_new_tokens={count}", f"--start={PROMPT}"]
    command = [sys.executable, str(ROOT / "sample.py"), *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    speed = re.search(r"([\d,]+) tokens/s", done.stderr)
    return Generated(done.stdout.removeprefix(PROMPT), float(speed[1].replace(",", "")), first=0.0)


if __name__ == "__main__":
    run_script(main, HtmlBenchConfig)
