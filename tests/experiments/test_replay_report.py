"""Reports on replayed steps, as text, JSON, and a page."""

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from folio.experiments.replay_report import as_page, conclusion, label, visible
from tests.support.replays import CHARACTERS, random_report, replay
from tests.support.waiting import wait_until


def test_visible_text_has_no_line_breaks_or_control_characters():
    assert visible("a\n\tb \x1b[0m\u202e") == "a⏎⇥b \\x1b[0m\\u202e"
    assert [label(token) for token in (" a", "", "\n")] == ["␣a", "∅", "⏎"]


def test_the_hardest_tokens_have_the_highest_unmasked_losses(seed):
    """The reference sorts all tokens. NaN is first."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        report = random_report(rng)
        losses = np.concatenate([s.losses[s.counted] for s in report.sequences])
        expected = np.sort(losses)[::-1]  # NaN is the largest
        tokens = report.hardest_tokens(10)
        np.testing.assert_array_equal([token.loss for token in tokens], expected[:10])
        for token in tokens:
            ids = token.sequence.ids[: token.position + 1]
            assert token.sequence.counted[token.position - 1]
            assert token.before + token.text == "".join(CHARACTERS[i] for i in ids)
        assert report.targets == len(expected) == len(report.hardest_tokens(10**6))


def test_a_report_is_json_with_strings_for_numbers_that_are_not_finite(seed):
    report = random_report(np.random.default_rng(seed))
    facts = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert facts["bitwise"] is True and facts["parameters"][0]["gradient_norm"] == "nan"
    assert facts["clip_factor"] == report.clip_factor == 1 / (2.0 + 1e-6)
    for s, expected in zip(facts["sequences"], report.sequences, strict=True):
        losses = [float(loss) for loss in s["losses"] if loss is not None]
        np.testing.assert_array_equal(losses, expected.losses[expected.counted])


def test_the_page_begins_with_the_hardest_sequence(seed):
    report = random_report(np.random.default_rng(seed))
    sentence, hardest = conclusion(report), report.hardest_sequences[0]
    count = f"{len(report.sequences)} sequences"
    assert sentence.endswith(f"The hardest of {count} is {hardest.number:,}, with a loss of {hardest.loss:.4f}.")
    assert as_page(report).index(sentence) < as_page(report).index("<table")


# --- page -------------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_text_of_each_sequence(seed):
    """HTML in the text is escaped."""
    report = random_report(np.random.default_rng(seed))
    html = as_page(report)
    texts = [unescape(re.sub(r"<.*?>", "", text)) for text in re.findall(r"<pre>(.*?)</pre>", html, re.DOTALL)]
    expected = ["".join(CHARACTERS[i] for i in s.ids).replace("\n", "⏎\n") for s in report.hardest_sequences]
    assert texts == expected
    assert len(re.findall(r"<b data-loss=", html)) == report.targets
    assert "<td class='text'>&lt;3&gt;</td>" in html and "<3>" not in html


def test_the_page_shows_the_loss_of_the_token_under_the_pointer(run, open_page):
    facts = replay(run, 19)
    page = open_page(Path(run, "replay-19.html").read_text(encoding="utf-8"))
    hardest = max(facts["sequences"], key=lambda sequence: sequence["loss"])
    tokens = page.locator("pre").first.locator("b")
    assert tokens.count() == len(hardest["losses"])
    assert page.locator("pre").first.inner_text().replace("⏎", "") == hardest["text"]
    for t in (0, 7, len(hardest["losses"]) - 1):
        tokens.nth(t).hover()
        assert f"loss {hardest['losses'][t]:.4f} nats" in page.locator("#token").inner_text()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        shares = [loss / float(page.locator(".color-bar i").get_attribute("data-max")) for loss in hardest["losses"]]
        script = """shares => shares.map(share => {
          const {background, color} = onColor("sequential", share), {style} = document.createElement("b");
          Object.assign(style, {background, color});
          return [style.background, style.color];
        })"""
        expected = page.evaluate(script, shares)
        assert len({*map(tuple, expected)}) > 3
        drawn = "tokens => tokens.map(token => [token.style.background, token.style.color])"
        wait_until(lambda drawn=drawn, expected=expected: tokens.evaluate_all(drawn) == expected)
    bars = page.locator(".bar").evaluate_all("bars => bars.map(bar => bar.offsetWidth)")
    norms = [p["gradient_norm"] for p in facts["parameters"]]
    assert norms == sorted(norms, reverse=True) and len(bars) == len(norms)
    assert bars == pytest.approx([200 * norm / norms[0] for norm in norms], abs=1)
    assert "bitwise identical to the logged loss" in page.locator("#facts").inner_text()
