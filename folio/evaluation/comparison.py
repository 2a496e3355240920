"""Compare evaluated models: two checkpoints over documents, or two settings over runs with different seeds."""

import math
import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from folio import UserError
from folio.checkpoints import foreign
from folio.checkpoints.find_runs import expand_runs
from folio.evaluation import intervals
from folio.evaluation.intervals import Estimate, plus_minus, ratio_difference
from folio.evaluation.scores import LOSS, Evaluation, Measure

MAX_LEFT_OUT = 0.001  # fraction of a text's characters; no verdict if models left out more, and different ones


class Design(NamedTuple):
    """How to compare two sides: one run each as checkpoints, several runs each as settings."""

    sides: list[list[str]]  # the runs of both sides, sorted by seed if paired
    paired: bool = False  # whether the runs of both sides have the same seeds
    lines: Sequence[str] = ()  # what to print before the results


def choose_sides(sides: Sequence[str]) -> list[list[str]]:
    """Return the runs of both sides by expand_runs. Raises UserError if they cannot be compared."""
    command = f"compare {' '.join(sides)}"
    if len(sides) != 2:
        raise UserError(
            f"compare takes two sides, but {len(sides)} were given: separate the runs of one side by commas, or "
            f'use a quoted pattern, as in tools/compare.py "out-a*" "out-b*"'
        )
    first, second = (expand_runs([side]) for side in sides)
    folders = [os.path.realpath(run) for run in second]
    if shared_runs := [run for run in first if os.path.realpath(run) in folders]:
        raise UserError(f"{command}: {shared_runs[0]} is on both sides; give each side different runs")
    sizes = [len(first), len(second)]
    if 1 in sizes and sizes != [1, 1]:
        raise UserError(
            f"{command}: the sides have {sizes[0]} and {sizes[1]} runs; give one run per side to compare two "
            f"checkpoints, or several runs per side, separated by commas, to compare settings"
        )
    return [first, second]


def choose_design(sides: list[list[str]], checkpoint: str, uncompared: Collection[str]) -> Design:
    """Choose how to compare two sides.

    checkpoint: read the settings from "best" or "last". uncompared: the settings in which repetitions of a run differ,
    such as the seed. Raises UserError if two runs of a side have the same seed.
    """
    if len(sides[0]) == 1:
        line = "To compare settings rather than two checkpoints, give several runs with different seeds per side."
        return Design(sides, lines=[line])
    settings = [[foreign.load(run, checkpoint).settings() for run in side] for side in sides]
    seeds = [find_seeds(side, side_settings) for side, side_settings in zip(sides, settings, strict=True)]
    known = None not in seeds[0] + seeds[1]
    paired = known and sorted(seeds[0]) == sorted(seeds[1])
    if paired:
        sides = [
            [run for _, run in sorted(zip(side_seeds, side, strict=True))]
            for side_seeds, side in zip(seeds, sides, strict=True)
        ]
        test = f"Test: paired t-test over runs, because both sides have the seeds {join(sorted(seeds[0]))}, and "
        test += "runs with the same seed see the same sequences."
    else:
        reason = f"the sides have different seeds ({join(seeds[0])}; {join(seeds[1])})"
        test = f"Test: Welch's t-test over runs, because {reason if known else 'not every run records its seed'}."
    lines = [f"{name}: {join(side)}" for name, side in zip("AB", sides, strict=True)]
    return Design(sides, paired, [*lines, describe_settings(settings, uncompared), test])


def find_seeds(runs: list[str], settings: list[dict[str, Any]]) -> list[int | None]:
    """Return the seeds of one side's runs, None where unrecorded. Raises UserError if two runs have the same seed."""
    keys = [config.get("seed", os.path.realpath(run)) for run, config in zip(runs, settings, strict=True)]
    for i, key in enumerate(keys):
        if (first := keys.index(key)) < i:
            raise UserError(
                f"{runs[first]} and {runs[i]} have the same seed, so they are not independent: train the runs of each "
                f"side with different values of --seed"
            )
    return [config.get("seed") for config in settings]


def describe_settings(sides: list[list[dict[str, Any]]], uncompared: Collection[str]) -> str:
    """Describe the training settings that differ between the runs, with both sides' values, without `uncompared`."""
    if not all(settings for side in sides for settings in side):
        return "Settings that differ: unknown, because not every run records its settings."
    names = {name for side in sides for settings in side for name in settings} - {*uncompared}
    differences, mixed = [], []
    for name in sorted(names):
        values = [list(dict.fromkeys(str(settings.get(name)) for settings in side)) for side in sides]
        if len({*values[0], *values[1]}) > 1:
            differences.append(f"{name} {join(values[0])} (A) and {join(values[1])} (B)")
        if max(map(len, values)) > 1:
            mixed.append(name)
    line = f"Settings that differ: {'; '.join(differences) or 'none but the seed'}."
    if mixed:
        line += f" The runs within a side differ in {join(mixed)}, so its variance is not due to the seed alone."
    return line


def join(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def compare(sides: list[list[Evaluation]], design: Design) -> list[dict[str, Any]]:
    """Return the difference of the sides, second minus first, in each comparable measure.

    Perplexity is left out, because it is a function of the loss. So is the loss if the tokenizers split the text
    differently; bits per byte are comparable then. Raises UserError if the texts differ.
    """
    models = [model for side in sides for model in side]
    n = len(sides[0])  # runs per side; settings are compared if there are several
    require_same_text(models)
    comparisons = []
    for measures in zip(*(model.measures for model in models), strict=True):  # the same measure of each model
        first = measures[0]
        same_tokens = all(np.array_equal(first.weights, measure.weights) for measure in measures)
        if first.transform is math.exp or (first.name == LOSS and not same_tokens):
            continue
        coverage = [model.coverage[measure.source] for model, measure in zip(models, measures, strict=True)]
        # A share of correct answers is the same quantity for all models, whatever they can read.
        same_characters = first.is_share or all(c.unknown == coverage[0].unknown for c in coverage)
        few_left_out = same_characters or all(c.left_out < MAX_LEFT_OUT * c.characters for c in coverage)
        same_number = n > 1 or len(first.values) == len(measures[1].values)  # of documents or blocks
        if not same_characters and not (few_left_out and same_number):
            comparison = without_verdict(measures[:n], measures[n:])
        elif n > 1:
            comparison = compare_settings(measures[:n], measures[n:], design.paired)
        else:
            comparison = compare_checkpoints(models[0].run, models[1].run, *measures)
        trained = [model.run for model, c in zip(models, coverage, strict=True) if c.may_be_trained_on]
        comparison["may_be_trained_on"] = trained
        if trained:
            comparison["sentence"] += (
                f" {join(trained)} may have been trained on this text (see above), so this says little about new text."
            )
        if not same_characters and comparison["p"] is not None:
            counts = [f"{model.run}: {c.left_out:,}" for model, c in zip(models, coverage, strict=True)]
            comparison["sentence"] += (
                f" The models left out a few different characters ({join(counts)} of {coverage[0].characters:,}), "
                f"which is less than {MAX_LEFT_OUT:.1%} of the text."
            )
        comparisons.append(comparison)
    return comparisons


def require_same_text(models: list[Evaluation]) -> None:
    """Raise UserError if the models were evaluated on different validation sets."""
    sizes = [[c.bytes for c in model.coverage.values()] for model in models]
    for model, model_sizes in zip(models, sizes, strict=True):
        if model_sizes != sizes[0]:
            raise UserError(
                f"{models[0].run} and {model.run} were evaluated on different texts ({join(models[0].coverage)} and "
                f"{join(model.coverage)}): give both the same --text or --dataset"
            )


def compare_checkpoints(first: str, second: str, a: Measure, b: Measure) -> dict[str, Any]:
    """Compare two models by the paired t-test over documents. Raises UserError if the documents differ."""
    if len(a.values) != len(b.values):
        raise UserError(f"{first} and {second} were measured on different documents of {a.source}; give a --text")
    weights = a.weights / a.weights.sum() + b.weights / b.weights.sum()  # equal, unless some characters were left out
    difference = ratio_difference(b.ratio - a.ratio, b.influence - a.influence, weights)
    verdict = f"the checkpoints {first} and {second} do not differ significantly"
    if difference.p < 0.05:
        winner, loser = better_first(first, second, difference, a)
        verdict = f"the checkpoint {winner} is better than {loser}"
    return {
        **comparison_row(a, difference),
        "n": len(a.values),
        "over": a.unit,
        "sentence": f"{a.source}, {a.name}: on this text, {verdict}. The difference {second} minus {first} is "
        f"{plus_minus(difference, '+')} (p = {difference.p:.2g}, {len(a.values):,} {a.unit}). This compares "
        f"these two checkpoints, not their settings: other seeds may give another result.",
    }


def compare_settings(first: Sequence[Measure], second: Sequence[Measure], paired: bool) -> dict[str, Any]:
    """Compare the settings A and B over runs. first, second: the same measure of each run of A and B.

    paired: run i of both sides has the same seed.
    """
    a, b = (np.array([measure.ratio for measure in side]) for side in (first, second))  # (n,), (m,)
    difference = (intervals.paired_difference if paired else intervals.welch_difference)(a, b)
    runs = f"{len(a)} + {len(b)} runs"
    verdict = f"there is no significant difference between the settings of A and B with {runs}"
    if difference.p < 0.05:
        winner, loser = better_first("A", "B", difference, first[0])
        verdict = f"the settings of {winner} are better than those of {loser}"
    test = "paired t-test" if paired else "Welch's t-test"
    return {
        **comparison_row(first[0], difference),
        "n": len(a) + len(b),
        "over": "runs",
        "test": test,
        "sentence": f"{first[0].source}, {first[0].name}: on this text, {verdict}. The difference of the means, "
        f"B minus A, is {b.mean():.4f} - {a.mean():.4f} = {plus_minus(difference, '+')} "
        f"(p = {difference.p:.2g}, {runs}, {test}).",
    }


def without_verdict(first: Sequence[Measure], second: Sequence[Measure]) -> dict[str, Any]:
    """Return the difference of two sides that left out different characters, without a test."""
    means = [float(np.mean([measure.ratio for measure in side])) for side in (first, second)]
    difference = Estimate(means[1] - means[0], None, 1.0)
    return {
        **comparison_row(first[0], difference),
        "p": None,
        "sentence": f"{first[0].source}, {first[0].name}: no verdict, because the models left out different characters "
        f"(listed above), so their values are not comparable. The second minus the first is {difference.value:+.4f}. "
        f"To compare the models, remove these characters from the text.",
    }


def better_first(first: str, second: str, difference: Estimate, measure: Measure) -> tuple[str, str]:
    """Return the two names, the better one first. difference: second minus first."""
    second_wins = (difference.value < 0) == (measure.better == "lower")
    return (second, first) if second_wins else (first, second)


def comparison_row(measure: Measure, difference: Estimate) -> dict[str, Any]:
    return {
        "of": measure.source,
        "measure": measure.name,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "p": difference.p,
    }
