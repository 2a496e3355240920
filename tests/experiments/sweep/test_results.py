"""The table of a sweep, from outcomes in code."""

import json
import sys
from dataclasses import replace

import pytest

stats = pytest.importorskip("scipy.stats")

from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.results import as_json, conclusion, format_table, heads, label, notes, summarize

SEEDS = [1, 2, 3]


def outcome(point: int, seed: int, loss: float | None, state: str = "finished", **fields) -> Outcome:
    """A run of a trial with a learning rate of point / 10."""
    values = dict(params={"learning_rate": point / 10}, tokens=100, seconds=2.0, evaluations=[], error="")
    return Outcome(point=point, seed=seed, loss=loss, state=state, **{**values, **fields})


OUTCOMES = [
    *(outcome(1, seed, loss) for seed, loss in zip(SEEDS, (2.0, 2.1, 2.2), strict=True)),
    *(outcome(2, seed, loss) for seed, loss in zip(SEEDS, (1.0, 1.1, 1.3), strict=True)),
    outcome(3, 1, 1.5, evaluations=[(50, 1.6), (100, 1.5)]),
    outcome(3, 2, 1.7, "pruned", evaluations=[(50, 1.7)]),
    outcome(4, 1, None, "failed", error="memory ran out", tokens=None, seconds=None),
    outcome(5, 1, 1.4),
]


TWO = [outcome(1, 1, 2.0), outcome(2, 1, 1.0)]
OTHER_TEXT = [replace(trial, params={"dataset": text}, text=text) for trial, text in zip(TWO, "ab", strict=True)]


def test_complete_combinations_are_compared_over_all_seeds():
    rows = summarize(OUTCOMES, SEEDS)
    assert [row.point for row in rows] == [2, 1, 5, 3, 4]
    verdicts = ["best", "worse", "1 of 3 seeds are finished", "pruned after 1 evaluation, at 1.7000"]
    assert [row.verdict for row in rows] == [*verdicts, "failed with seed 1"]
    best, worse, one, _, failed = rows
    assert best.mean.value == pytest.approx(3.4 / 3) and best.losses == {1: 1.0, 2: 1.1, 3: 1.3}
    low, high = stats.ttest_1samp([2.0, 2.1, 2.2], 0).confidence_interval(0.95)
    assert (worse.mean.low, worse.mean.high) == pytest.approx((low, high))
    paired = stats.ttest_rel([2.0, 2.1, 2.2], [1.0, 1.1, 1.3])
    assert worse.difference.value == pytest.approx(2.9 / 3) and worse.difference.p == pytest.approx(paired.pvalue)
    assert one.mean.value == 1.4 and one.mean.half_width is None and one.difference is None
    assert failed.mean is None and failed.tokens is None and (best.tokens, best.seconds) == (100, 2.0)


def test_the_table_has_a_row_for_each_combination():
    rows = summarize(OUTCOMES, SEEDS)
    lines = format_table(["learning_rate"], rows).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == heads(["learning_rate"])
    assert len(lines) == 2 + 5 and len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[:2] == ["1", "0.1"] and cells[3].startswith("+0.9667 ± ") and cells[4:] == ["worse", "100", "2.0"]
    assert label(rows[0]) == "2: learning_rate=0.2"


def test_notes_list_failures_and_the_cost():
    text = "\n".join(notes(summarize(OUTCOMES, SEEDS), OUTCOMES, SEEDS, is_search=True))
    assert "best of 5 trials is optimistically biased" in text
    assert "Trial 4 failed with seed 1: memory ran out" in text and "--retry_failed" in text
    assert "Cost: 9 runs, 900 tokens, 18 s of training." in text
    rows = summarize(TWO, [1])
    assert "--seeds=3" in "\n".join(notes(rows, TWO, [1], is_search=False))
    assert [row.verdict for row in rows] == ["best", "unknown: one seed"]
    text = "\n".join(notes(summarize(OTHER_TEXT, [1]), TWO, [1], False))
    assert "different parts of the validation text (they differ in dataset)" in text


def test_without_scipy_there_are_means_and_a_hint_to_install_it(monkeypatch):
    """A grid ended with an error after all runs were trained."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    rows = summarize(OUTCOMES, SEEDS)
    assert [row.point for row in rows] == [2, 5, 3, 1, 4] and all(row.difference is None for row in rows)
    assert rows[0].mean.value == pytest.approx(3.4 / 3) and rows[0].mean.half_width > 0
    assert rows[0].verdict == "3 of 3 seeds are finished"
    text = "\n".join(notes(rows, OUTCOMES, SEEDS, is_search=False))
    assert "not compared" in text and "pip install -r requirements" in text
    assert [row.verdict for row in summarize(TWO, [1])] == ["best", "unknown: one seed"]


def test_the_conclusion_names_the_best_trial_and_those_that_are_not_worse():
    best, loss = "Trial 2 (learning_rate=0.2) has the lowest validation loss", "1.1333 ± 0.3795."
    assert conclusion(summarize(OUTCOMES, SEEDS)) == f"{best} of 4 trials: {loss}"
    assert conclusion(summarize(OUTCOMES[:6], SEEDS)) == f"{best} of 2 trials: {loss} The other is worse."
    assert conclusion(summarize(OUTCOMES[3:6], SEEDS)) == f"{best}: {loss}"
    similar = [outcome(6, seed, loss) for seed, loss in zip(SEEDS, (1.1, 1.0, 1.4), strict=True)]
    text = conclusion(summarize([*OUTCOMES, *similar], SEEDS))
    assert text.endswith(" 1 other has no significant difference from it.")
    assert conclusion(summarize([outcome(4, 1, None, "failed", error="e")], SEEDS)) == "No run has finished."
    assert conclusion(summarize(OTHER_TEXT, [1])).startswith("The losses are on different parts")


def test_losses_on_the_same_text_are_compared():
    """A sweep over batch_size with eval_iters changes the text; one over batch_size alone does not."""
    points = [outcome(n, 1, 2.0 + n, params={"batch_size": n}) for n in (1, 2)]
    assert "has the lowest validation loss" in conclusion(summarize(points, [1]))
    points[0] = replace(points[0], text="another")
    assert "(they differ in batch_size) and not comparable" in conclusion(summarize(points, [1]))


def test_results_are_json():
    rows = summarize(OUTCOMES, SEEDS)
    value = json.loads(json.dumps(as_json(rows, OUTCOMES, {"learning_rate": 1.0})))
    first = value["combinations"][0]
    assert first["mean"]["value"] == rows[0].mean.value and first["mean"]["low"] == rows[0].mean.low
    assert value["combinations"][-1]["mean"] is None and value["importances"] == {"learning_rate": 1.0}
    assert [trial["loss"] for trial in value["trials"]] == [o.loss for o in OUTCOMES]
