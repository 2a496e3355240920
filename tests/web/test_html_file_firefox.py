"""A model in an HTML file in Firefox, with and without WebAssembly."""

import pytest

from folio.base import settings
from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import LanguageModel
from tests.support.firefox import FIREFOX, firefox
from tests.support.viewed_models import save_random_run
from tools import export

TEXT = "To be, or not to be"
SEED = 1337
DRAWN = "new Promise(resolve => {const timer = setInterval(() => %s && resolve(clearInterval(timer)), 20)})"


@pytest.mark.browser
@pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed")
def test_a_file_generates_the_samples_of_the_python_api(tmp_path):
    tokenizer = CharTokenizer.of(TEXT + "\n")
    model = save_random_run(
        tmp_path / "run", tokenizer, SEED, block_size=48, n_layer=2, n_head=2, n_embd=32, position="rotary"
    )
    arguments = [str(tmp_path / "run"), str(tmp_path / "model.html"), "--to=html", "--dtype=float32", f"--text={TEXT}"]
    export.main(settings.load(export.ExportConfig, arguments))
    expected = LanguageModel(model, tokenizer, "cpu", "float32").generate(
        TEXT, num_samples=2, max_new_tokens=100, seed=SEED
    )
    with firefox() as browser:
        for has_wasm in (True, False):
            if not has_wasm:
                browser.before_pages("() => { delete self.WebAssembly; delete self.Worker; }")
            browser.goto("about:blank")
            browser.goto(f"{(tmp_path / 'model.html').as_uri()}#samples=2&max_new_tokens=100&seed={SEED}")
            browser.evaluate(DRAWN % "document.body.dataset.drawn")
            assert browser.evaluate("fileFacts.then(({simd}) => simd)") is has_wasm
            browser.evaluate("document.querySelector('[data-testid=generate]').click()")
            browser.evaluate(DRAWN % "playground.samples.length && playground.samples.every(({ended}) => ended)")
            samples = browser.evaluate("playground.samples.map(({text}) => text.textContent)")
            assert samples == expected
