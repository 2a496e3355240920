"""The page about a replayed step."""

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from folio.experiments.replay_page import page
from tests.support.replays import CHARACTERS, random_report, replay
from tests.support.viewers import in_browser
from train import train


def test_the_text_of_each_sequence_is_on_the_page(seed):
    """Whatever is in it: HTML is escaped."""
    report = random_report(np.random.default_rng(seed))
    html = page(report)
    texts = [unescape(re.sub(r"<.*?>", "", text)) for text in re.findall(r"<pre>(.*?)</pre>", html, re.DOTALL)]
    expected = ["".join(CHARACTERS[i] for i in s.ids).replace("\n", "⏎\n") for s in report.hardest_sequences]
    assert texts == expected
    assert len(re.findall(r"<b class='s\d+' data-loss=", html)) == report.targets
    assert "<td>&lt;3&gt;</td>" in html and "<3>" not in html


@in_browser
def test_the_page_shows_the_loss_of_the_token_under_the_pointer(tiny, open_page):
    cfg = tiny()
    train(cfg)
    facts = replay(cfg, 9)
    page = open_page(Path(cfg.out_dir, "replay-9.html").read_text(encoding="utf-8"))
    hardest = max(facts["sequences"], key=lambda sequence: sequence["loss"])
    tokens = page.locator("pre").first.locator("b")
    assert tokens.count() == cfg.block_size
    assert page.locator("pre").first.inner_text().replace("⏎", "") == hardest["text"]
    for t in (0, 7, cfg.block_size - 1):
        tokens.nth(t).hover()
        assert f"loss {hardest['losses'][t]:.4f} nats" in page.locator("#token").inner_text()
    shades = [int(tokens.nth(t).get_attribute("class")[1:]) for t in range(cfg.block_size)]
    assert shades == sorted(shades, key=lambda s: s) or np.corrcoef(shades, hardest["losses"])[0, 1] > 0.9
    bars = page.locator(".gradients .bar").evaluate_all("bars => bars.map(bar => bar.offsetWidth)")
    norms = [p["gradient_norm"] for p in facts["parameters"]]
    assert norms == sorted(norms, reverse=True) and len(bars) == len(norms)
    assert bars == pytest.approx([200 * norm / norms[0] for norm in norms], abs=1)
    assert "equal to the logged loss, bit for bit" in page.locator("#facts").inner_text()
