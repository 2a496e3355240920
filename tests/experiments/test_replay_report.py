"""What a report says about a replayed step."""

import json

import numpy as np

from folio.experiments.replay_report import label, visible
from tests.support.replays import CHARACTERS, random_report


def test_text_is_shown_in_one_line_without_control_characters():
    assert visible("a\n\tb \x1b[0m\u202e") == "a⏎⇥b \\x1b[0m\\u202e"
    assert [label(token) for token in (" a", "", "\n")] == ["␣a", "∅", "⏎"]


def test_the_hardest_tokens_are_those_with_the_highest_losses_that_count(seed):
    """Against sorting all of them. A loss that is not a number comes first."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        report = random_report(rng)
        expected = sorted(
            (
                (np.isnan(loss), loss if loss == loss else 0.0)
                for s in report.sequences
                for loss, counted in zip(s.losses.tolist(), s.counted.tolist(), strict=True)
                if counted
            ),
            reverse=True,
        )
        tokens = report.hardest_tokens(10)
        assert [(np.isnan(t.loss), t.loss if t.loss == t.loss else 0.0) for t in tokens] == expected[:10]
        for token in tokens:
            ids = token.sequence.ids[: token.position + 1]
            assert token.sequence.counted[token.position - 1]
            assert token.before + token.text == "".join(CHARACTERS[i] for i in ids)
        assert report.targets == len(expected) == len(report.hardest_tokens(10**6))


def test_a_report_is_json_in_which_numbers_that_are_not_finite_are_text(seed):
    report = random_report(np.random.default_rng(seed))
    facts = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert facts["bitwise"] is True and facts["parameters"][0]["gradient_norm"] == "nan"
    assert facts["clip_factor"] == report.clip_factor == 1 / (2.0 + 1e-6)
    for s, expected in zip(facts["sequences"], report.sequences, strict=True):
        losses = [float(loss) for loss in s["losses"] if loss is not None]
        np.testing.assert_array_equal(losses, expected.losses[expected.counted])
