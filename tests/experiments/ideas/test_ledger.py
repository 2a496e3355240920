import numpy as np
import pytest

from folio.evaluation.sequential import lord_levels
from folio.experiments.ideas import ledger


def entry(number: int, losses: list[tuple[float, float]], verdict: str = "better", **fields) -> dict:
    """A line of the ledger."""
    arm = {"name": "idea", "commit": None, "hash": f"{number}", "options": []}
    known = {"recipe": "r", "config": "mine.py", "losses": losses, "verdict": verdict, "a": arm, "b": arm, "seed": 1}
    return ledger.new_entry(f"{number:03d}-idea", f"2026-01-{number:02d}T00:00:00+00:00", **known | fields)


NOISY = [(2.0, 1.9), (2.0, 1.7)]


def test_of_lines_with_the_same_id_the_last_counts_and_ledgers_are_merged_by_concatenation(tmp_path):
    assert ledger.read(tmp_path) == []
    first, second = entry(1, NOISY, "unfinished"), entry(2, NOISY)
    for line in (second, first, {**first, "verdict": "worse"}):
        ledger.append(tmp_path, line)
    assert [(e["name"], e["verdict"]) for e in ledger.read(tmp_path)] == [("001-idea", "worse"), ("002-idea", "better")]


def test_the_spread_is_that_of_tested_experiments_with_the_same_recipe():
    entries = [entry(1, NOISY), entry(2, NOISY, "failed"), entry(3, NOISY, recipe="other"), entry(4, [(2.0, 1.0)])]
    spread = ledger.spread_for(entries, "r")
    assert (spread.value, spread.df) == (pytest.approx(np.std([-0.1, -0.3], ddof=1)), 1)
    assert ledger.spread_for(entries, "new") is None


def test_an_idea_is_kept_at_the_level_that_earlier_experiments_left():
    sure, luck = [(2.0, 1.0 + 0.001 * i) for i in range(4)], [(2.0, 1.99 + 0.02 * (i % 2)) for i in range(4)]
    entries = [entry(1, luck), entry(2, sure), entry(3, [], "failed"), entry(4, luck, "undecided")]
    assert ledger.are_kept(entries) == [False, True, False, False]
    assert ledger.level_for(entries, entries[0]["began"]) == lord_levels([])[-1]
    later = "2027-01-01T00:00:00+00:00"
    assert ledger.level_for(entries, later) > ledger.level_for([entries[0], entries[3]], later)  # by the kept one
    assert "better: 2, kept: 1 of 4 ideas" in ledger.summary(entries)


def test_the_best_loss_is_shown_as_selected_and_as_measured_again():
    entries = [entry(1, NOISY), entry(2, [(2.0, 1.5)])]
    (line,) = ledger.best_lines(entries)
    assert "1.5000 (002-idea), as selected; selecting it makes this too low" in line
    again = entry(3, [(2.0, 1.6)])
    again["b"] = entries[1]["b"]
    (line,) = ledger.best_lines([*entries, again])
    assert "1.5000 (002-idea), as selected; 1.6000 measured again" in line
