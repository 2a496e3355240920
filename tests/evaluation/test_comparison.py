"""Comparisons of checkpoints and of settings, against scipy's tests and simulated runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

stats = pytest.importorskip("scipy.stats")

from folio import UserError
from folio.checkpoints import foreign
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.tokenizer import CharTokenizer
from folio.evaluation.comparison import Design, choose_design, choose_sides, compare
from folio.evaluation.scores import Coverage, Evaluation, count_characters
from tests.support.evaluations import approx_interval, compare_models, measure_of
from tests.support.tolerances import binomial_range


def assert_matches(comparison: dict, expected) -> None:
    """Assert that a comparison has the p-value and interval of one of scipy's tests."""
    assert comparison["p"] == pytest.approx(expected.pvalue)
    assert (comparison["low"], comparison["high"]) == approx_interval(expected.confidence_interval())


def test_equal_weights_give_the_paired_t_test(seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(3, 1, 50)
    b = a + rng.normal(0.1, 0.3, 50)
    (comparison,) = compare_models([measure_of(a)], [measure_of(b)])
    assert_matches(comparison, stats.ttest_rel(b, a))


def test_a_comparison_names_the_better_checkpoint_or_none():
    """Only one seed was compared, and the sentence read as if it were about the settings."""

    def sentence_of(first: list[float], second: list[float], **settings: str) -> str:
        (comparison,) = compare_models([measure_of(first, **settings)], [measure_of(second, **settings)])
        assert "these two checkpoints, not their settings" in comparison["sentence"]
        return comparison["sentence"]

    same, worse = [2, 3, 2, 3], [2.5, 3.6, 2.5, 3.5]
    assert "the checkpoint a is better than b. The difference b minus a is +0.5250" in sentence_of(same, worse)
    assert "the checkpoint b is better than a. The difference b minus a is -0.5250" in sentence_of(worse, same)
    assert "the checkpoints a and b do not differ significantly" in sentence_of(same, [2.5, 2.4, 2.1, 3])
    assert "a is better than b" in sentence_of([1, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], better="higher")
    (identical,) = compare_models([measure_of(same)], [measure_of(same)])
    assert identical["p"] == 1 and identical["difference"] == 0
    (shifted,) = compare_models([measure_of([1, 2, 3])], [measure_of([2, 3, 4])])  # by the same for every document
    assert shifted["p"] == 0 and shifted["low"] == shifted["high"] == 1
    with pytest.raises(UserError, match="different documents"):
        compare_models([measure_of(same)], [measure_of([1, 2])])


def run_of(rng: np.random.Generator, difficulty: np.ndarray, seed_effect: float) -> Evaluation:
    """A simulated run: the loss of each document is its difficulty, plus the effect of the seed, plus noise."""
    losses = difficulty + seed_effect + rng.normal(0, 0.05, len(difficulty))
    return Evaluation("run", [measure_of(losses)], {"text": Coverage()})


@pytest.mark.parametrize("paired", [True, False])
def test_equal_settings_rarely_differ_and_a_true_difference_is_detected(paired, seed):
    """Runs that differ only in their seed: between settings, about 5 % of the comparisons report a difference. Between
    two checkpoints, most do, because the seed's effect is real on every document.
    """
    rng = np.random.default_rng(seed)
    between_settings = between_checkpoints = real_differences = 0
    for _ in range(300):
        difficulty = rng.normal(2, 0.5, 100)
        effects = rng.normal(0, 0.1, (2, 4))
        if paired:
            effects[1] += effects[0]  # runs with the same seed share an effect
        sides = [[run_of(rng, difficulty, effect) for effect in side] for side in effects]
        better = [run_of(rng, difficulty, effect - 1) for effect in effects[1]]
        design = Design([["run"] * 4] * 2, paired)
        between_settings += "are better" in compare(sides, design)[0]["sentence"]
        (improvement,) = compare([sides[0], better], design)
        real_differences += "the settings of B are better than those of A" in improvement["sentence"]
        checkpoints = [side[:1] for side in sides]
        between_checkpoints += "is better" in compare(checkpoints, Design([["a"], ["b"]]))[0]["sentence"]
    assert between_settings in binomial_range(300, 0.05, comparisons=2)
    # The effects of two seeds have a difference of standard deviation 0.1 or more, and the noise of the means of two
    # checkpoints one of 0.007: at least 85 % of the differences are more than twice that.
    assert between_checkpoints >= binomial_range(300, 0.85, comparisons=2)[0]
    assert real_differences == 300  # the settings differ by 1, which is at least 14 standard errors


def test_a_comparison_of_settings_is_over_runs():
    """Each run is one sample: its value on the whole text."""

    def side(*losses: float) -> list[Evaluation]:
        return [Evaluation("run", [measure_of([loss, loss + 1])], {"text": Coverage()}) for loss in losses]

    first, second = side(1.0, 1.1, 1.2), side(2.0, 2.1, 2.3)
    values = [[measure.ratio for run in runs for measure in run.measures] for runs in (first, second)]
    for paired, expected, name in (
        (True, stats.ttest_rel(*values[::-1]), "paired t-test"),
        (False, stats.ttest_ind(*values[::-1], equal_var=False), "Welch's t-test"),
    ):
        (comparison,) = compare([first, second], Design([["run"] * 3] * 2, paired))
        assert_matches(comparison, expected)
        assert comparison["over"] == "runs" and comparison["n"] == 6
        sentence = comparison["sentence"]
        assert "of A are better than those of B" in sentence and "2.6333 - 1.6000 = +1.0333 ±" in sentence
        assert f"3 + 3 runs, {name})." in sentence and "checkpoint" not in sentence
    (comparison,) = compare([side(1.0, 1.1), side(1.1, 1.3)], Design([["run"] * 2] * 2, True))
    assert "no significant difference between the settings" in comparison["sentence"]
    assert comparison["high"] - comparison["low"] > 1  # t of one degree of freedom is 12.7


# --- runs to compare --------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """The training settings that checkpoints record, by the name of the run. A test fills it in."""
    settings: dict[str, dict] = {}
    monkeypatch.setattr(foreign, "load", lambda run, _: Checkpoint(Path(run), {}, None, settings[run]))
    return settings


def design_of(*sides: str) -> Design:
    return choose_design(choose_sides(sides), "best", ["seed", "out_dir"])


def test_runs_with_the_same_seeds_are_paired(recorded_settings):
    for i, seed in enumerate((1, 2, 3, 3, 1, 2), start=1):
        settings = {"seed": seed, "out_dir": f"r{i}", "learning_rate": 0.1 if i < 4 else 0.2, "n_layer": 2}
        recorded_settings[f"r{i}"] = {"config": settings}
    recorded_settings["gpt2"] = recorded_settings["gpt2-medium"] = {"model": {}}
    design = design_of("r1,r2,r3", "r4,r5,r6")
    assert design.paired and design.sides == [["r1", "r2", "r3"], ["r5", "r6", "r4"]]
    assert design.lines[:2] == ["A: r1, r2, r3", "B: r5, r6, r4"]
    assert design.lines[2] == "Settings that differ: learning_rate 0.1 (A) and 0.2 (B)."
    assert "both sides have the seeds 1, 2, 3" in design.lines[3]
    design = design_of("r1,r2,r3", "r5,r6")
    assert not design.paired and "different seeds (1, 2, 3; 1, 2)" in design.lines[3]
    assert not design_of("r1,r2", "r4,r5").paired and "(1, 2; 3, 1)" in design_of("r1,r2", "r4,r5").lines[3]
    assert "not every run records its seed" in design_of("r1,r2", "gpt2,gpt2-medium").lines[3]
    assert "unknown, because" in design_of("r1,r2", "gpt2,gpt2-medium").lines[2]
    recorded_settings["r5"]["config"]["n_layer"] = 3
    differences = design_of("r1,r2,r3", "r4,r5,r6").lines[2]
    assert "n_layer 2 (A) and 2, 3 (B)" in differences and "within a side differ in n_layer" in differences
    with pytest.raises(UserError, match=r"^r3 and r4 have the same seed.*--seed"):
        design_of("r3,r4", "r1,r2")
    with pytest.raises(UserError, match="gpt2 and gpt2 have the same seed"):  # the same run twice
        design_of("gpt2,gpt2", "r1,r2")


def test_sides_that_cannot_be_compared_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="2 and 1 runs; give one run per side"):
        design_of("a,b", "c")
    with pytest.raises(UserError, match=r"two sides.* 3"):
        design_of("a", "b", "c")
    monkeypatch.chdir(tmp_path)
    for name in ("out-b", "out-a", "out,c"):
        (tmp_path / name).mkdir()
    (tmp_path / "out-a.log").touch()
    sides = choose_sides(["out-*, gpt2", "r1,r2,r3"])
    assert sides == [["out-a", "out-b", "gpt2"], ["r1", "r2", "r3"]]
    assert choose_sides(["out-a", "out,c"]) == [["out-a"], ["out,c"]]
    for sides in (("out-a,out-b", "r1,./out-b"), ("out-b", "out-b"), ("out-*", "out-b,r1")):
        with pytest.raises(UserError, match="out-b is on both sides"):
            design_of(*sides)
    with pytest.raises(UserError, match=r"^run\*: no folder matches this pattern$"):
        design_of("run*", "out-*")


# --- texts ------------------------------------------------------------------------------------------------------------


def test_different_validation_sets_are_an_error():
    """Two data sets with the same number of blocks were compared as if they were the same text."""
    sides = [[Evaluation(name, [measure_of([1, 2, 3])], {name: Coverage(bytes=ord(name))})] for name in "ab"]
    with pytest.raises(UserError, match=r"different texts \(a and b\)"):
        compare(sides, Design([["a"], ["b"]]))


def test_models_that_read_different_characters_get_no_verdict(seed):
    """Bits per byte over different characters are not the same quantity."""
    rng = np.random.default_rng(seed)
    sides = []
    for name, tokenizer in (("a", CharTokenizer("abc")), ("b", CharTokenizer("abcd")), ("c", CharTokenizer("cab"))):
        coverage = count_characters(["abcabc", "abd", "xyz"], tokenizer)
        sides.append([Evaluation(name, [measure_of(rng.normal(2, 1, 3))], {"text": coverage})])
    assert sides[0][0].coverage["text"].unknown == {"d": 1, "x": 1, "y": 1, "z": 1}
    (comparison,) = compare(sides[:2], Design([["a"], ["b"]]))
    assert "no verdict, because the models left out different characters" in comparison["sentence"]
    first, second = (side[0].measures[0].ratio for side in sides[:2])
    assert comparison["p"] is None and comparison["difference"] == pytest.approx(second - first)
    for runs in (sides[0] * 2, sides[2] * 2):  # several runs per side
        (comparison,) = compare([sides[1] * 2, runs], Design([["b"] * 2, ["a"] * 2]))
        assert "no verdict" in comparison["sentence"]
    (comparison,) = compare([sides[0], sides[2]], Design([["a"], ["c"]]))
    assert "no verdict" not in comparison["sentence"]  # both left out the same characters
    assert "different characters" not in comparison["sentence"]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_few_different_characters_do_not_prevent_a_verdict(runs):
    """A single character of a novel that only one model knew prevented a verdict."""
    texts = ["abc" * 1000, "d" * 3, "e" * 2]  # 3,005 characters

    def side(name: str, characters: str, shift: float) -> list[Evaluation]:
        coverage = count_characters(texts, CharTokenizer(characters))
        return [Evaluation(name, [measure_of([1 + shift, 1.1 + shift])], {"text": coverage})] * runs

    design = Design([["a"] * runs, ["b"] * runs])
    (comparison,) = compare([side("a", "abcd", 0), side("b", "abce", 1)], design)
    counts = ", ".join(["a: 2"] * runs + ["b: 3"] * runs)
    assert comparison["p"] < 0.05 and comparison["low"] == pytest.approx(1) and "than" in comparison["sentence"]
    assert f"left out a few different characters ({counts} of 3,005)" in comparison["sentence"]
    texts.append("x")  # 4 of 3,006 characters exceed the limit
    (comparison,) = compare([side("a", "abcd", 0), side("b", "abce", 1)], design)
    assert "no verdict" in comparison["sentence"] and comparison["p"] is None
    texts[0] *= 2
    longer = [replace(evaluation, measures=[measure_of([1, 2, 3])]) for evaluation in side("a", "abcd", 0)]
    (comparison,) = compare([longer, side("b", "abce", 1)], design)  # different numbers of blocks
    assert ("no verdict" in comparison["sentence"]) == (runs == 1)
