"""Results of a sweep: each combination's mean over its seeds, and its difference from the best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from folio.base.number_format import counted, format_value
from folio.base.packages import describe_missing, is_installed
from folio.base.terminal import table
from folio.evaluation.intervals import Estimate, differences_to_best, estimate_mean, plus_minus
from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.space import describe_point

MAX_FAILURES = 5  # number of failures to list
WORSE, NOT_SIGNIFICANT = "worse", "no significant difference"  # verdicts


@dataclass(frozen=True)
class Row:
    """The result of one combination of settings. Losses are validation losses in nats per token."""

    point: int
    params: dict[str, Any]
    losses: dict[int, float]  # lowest loss of each finished run, by seed
    texts: tuple[str | None, ...]  # Outcome.text of these losses, each once
    mean: Estimate | None  # over seeds; None: no run has finished
    difference: Estimate | None  # from the best, paired by seed; None: some seeds are missing
    verdict: str
    tokens: float | None  # per run
    seconds: float | None  # per run

    def cells(self, names: Sequence[str]) -> list[str]:
        """Return the cells of a table row; see heads()."""
        difference = "" if self.difference is None or self.verdict == "best" else plus_minus(self.difference, "+")
        return [
            str(self.point),
            *(format_value(self.params[name]) if name in self.params else "" for name in names),
            plus_minus(self.mean) if self.mean else "",
            difference,
            self.verdict,
            f"{self.tokens:,.0f}" if self.tokens else "",
            f"{self.seconds:,.1f}" if self.seconds else "",
        ]


def heads(names: Sequence[str]) -> list[str]:
    return ["trial", *names, "validation loss", "above the best", "verdict", "tokens", "seconds"]


def summarize(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> list[Row]:
    """Return a row per combination, the lowest mean first, followed by those without a result."""
    by_point: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_point.setdefault(outcome.point, []).append(outcome)
    losses = {point: {o.seed: o.loss for o in group if o.state == "finished"} for point, group in by_point.items()}
    complete = [point for point, losses_by_seed in losses.items() if set(seeds) <= losses_by_seed.keys()]
    differences: dict[int, Estimate] = {}
    if complete and (len(seeds) == 1 or is_installed("scipy")):
        matrix = np.array([[losses[point][seed] for seed in seeds] for point in complete])  # (points, seeds)
        differences = dict(zip(complete, differences_to_best(matrix), strict=True))
        best = complete[int(matrix.mean(axis=1).argmin())]
    rows = []
    for point, group in by_point.items():
        difference = differences.get(point)
        verdict = describe_state(group, seeds)
        if difference:
            verdict = "best" if point == best else describe_difference(difference)
        rows.append(
            Row(
                point,
                next((o.params for o in group if o.params), {}),
                losses[point],
                tuple(dict.fromkeys(o.text for o in group if o.state == "finished")),
                estimate_mean(np.array(list(losses[point].values()))) if losses[point] else None,
                difference,
                verdict,
                known_mean([o.tokens for o in group if o.state == "finished"]),
                known_mean([o.seconds for o in group if o.state == "finished"]),
            )
        )
    return sorted(rows, key=lambda row: (row.difference is None, row.mean is None, (row.mean and row.mean.value) or 0))


def describe_difference(difference: Estimate) -> str:
    if difference.half_width is None:
        return "unknown: one seed"
    return WORSE if difference.low > 0 else NOT_SIGNIFICANT


def describe_state(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    """Describe why a combination is not compared. outcomes: of its runs."""
    if failed := [outcome for outcome in outcomes if outcome.state == "failed"]:
        return f"failed with seed {failed[0].seed}"
    if pruned := [outcome for outcome in outcomes if outcome.state == "pruned"]:
        return f"pruned after {counted(len(pruned[0].evaluations), 'evaluation')}, at {pruned[0].loss:.4f}"
    finished = sum(outcome.state == "finished" for outcome in outcomes)
    return f"{finished} of {len(seeds)} seeds are finished"


def known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def conclusion(rows: Sequence[Row]) -> str:
    """Return a sentence or two: which combination is the best, and whether others are as good."""
    if warning := describe_other_text(rows):
        return warning
    finished = [row for row in rows if row.mean]
    if not finished:
        return "No run has finished."
    best, others = finished[0], finished[1:]
    of = f" of {len(finished)} trials" if others else ""
    which = f"Trial {best.point} ({describe_point(best.params)})"
    text = f"{which} has the lowest validation loss{of}: {plus_minus(best.mean)}."
    similar = sum(row.verdict == NOT_SIGNIFICANT for row in others)
    if similar:
        text += f" {counted(similar, 'other')} {'has' if similar == 1 else 'have'} {NOT_SIGNIFICANT} from it."
    elif others and all(row.verdict == WORSE for row in others):
        text += " All others are worse." if len(others) > 1 else " The other is worse."
    return text


def describe_other_text(rows: Sequence[Row]) -> str:
    """Return a warning if the losses are not all on the same text; empty if they are."""
    if len({text for row in rows for text in row.texts}) < 2:
        return ""
    changing = {"dataset", "eval_iters", "batch_size", "block_size"} & {name for row in rows for name in row.params}
    settings = f" (they differ in {' and '.join(sorted(changing))})" if changing else ""
    return f"The losses are on different parts of the validation text{settings} and not comparable."


def notes(rows: Sequence[Row], outcomes: Sequence[Outcome], seeds: Sequence[int], is_search: bool) -> list[str]:
    """Return explanations of the table, failures, and the cost."""
    compared = [row for row in rows if row.difference is not None]
    lines = [
        "Validation loss: lowest of each run (nats per token), mean ± half-width of the 95 % interval over seeds. "
        "Tokens and seconds: training only, mean per run."
    ]
    if len(seeds) == 1:
        lines.append("One seed gives no estimate of the variance: the same command with --seeds=3 adds two more.")
    elif len(compared) > 1:
        lines.append(
            f"Above the best: paired over the seeds {seeds[0]} to {seeds[-1]}, with simultaneous intervals; worse "
            f"means that the interval is above 0."
        )
    elif not is_installed("scipy"):
        lines.append(
            f"Above the best: not compared, because {describe_missing('scipy')}; then repeat the command, which does "
            f"not train again."
        )
    if warning := describe_other_text(rows):
        lines.append(warning)
    if is_search and compared:
        lines.append(
            f"The mean of the best of {len(rows)} trials is optimistically biased, because the same runs selected it: "
            f"train it with other seeds to estimate its loss."
        )
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    lines += [
        f"Trial {outcome.point} failed with seed {outcome.seed}: {outcome.error}" for outcome in failed[:MAX_FAILURES]
    ]
    if failed:
        lines.append(
            f"Failed: {len(failed)} of {len(outcomes)} runs; the same command with --retry_failed retries them."
        )
    trained = [outcome for outcome in outcomes if outcome.tokens]
    tokens, seconds = (sum(getattr(o, name) or 0 for o in trained) for name in ("tokens", "seconds"))
    lines.append(f"Cost: {counted(len(trained), 'run')}, {tokens:,} tokens, {seconds:,.0f} s of training.")
    return lines


def format_table(names: Sequence[str], rows: Sequence[Row], width: int | None = None) -> str:
    """Format the table. width: of the terminal; None: Markdown."""
    return table(heads(names), [row.cells(names) for row in rows], width)


def as_json(rows: Sequence[Row], outcomes: Sequence[Outcome], importances: dict[str, float]) -> dict[str, Any]:
    """Return all results of a sweep."""

    def interval(estimate: Estimate | None) -> dict[str, float | None] | None:
        if estimate is None:
            return None
        return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "p": estimate.p}

    return {
        "combinations": [
            {**asdict(row), "mean": interval(row.mean), "difference": interval(row.difference)} for row in rows
        ],
        "importances": importances,
        "trials": [asdict(outcome) for outcome in outcomes],
    }


def label(row: Row) -> str:
    return f"{row.point}: {describe_point(row.params)}"
