"""The page of tools/scaling.py: a summary, the best model per time, the measured runs, and the curves of the law."""

from collections.abc import Mapping, Sequence
from html import escape

from folio.base.number_format import counted
from folio.experiments.charts import Line, LineGroup, Panel, line_chart, page_with_charts
from folio.experiments.static_page import summary, table
from folio.training.planning.choice import Candidate
from folio.training.planning.law import RunSize
from folio.training.planning.measured_law import MAX_TOKENS_RATIO, MeasuredLaw

POINTS = 40  # of a curve
RUN_HEADS = ("layers x channels", "tokens", "validation loss", "tokens/s")
MAX_LOSS_RATIO = 1.25  # of a shown size to the best


def scaling_page(
    name: str,
    law: MeasuredLaw,
    runs: Sequence[list[str]],
    heads: Sequence[str],
    rows: Sequence[list[str]],
    answers: Mapping[str, Sequence[Candidate]],
) -> str:
    """Return the page as HTML.

    runs: rows of the table of measured runs; see RUN_HEADS. heads, rows: the table of answers, which are by minutes.
    """
    parts = [
        summary(conclusion(answers)),
        table([*heads], rows),
        "<p>Half and twice: the expected losses of models with about half and twice the weights.</p>",
        f"<p>The law in nats per token: {escape(str(law.laws[0]))}, for N weights and D effective tokens: those of "
        "repeated epochs count less.</p>",
        f"<p>The measured runs have up to {max(run.weights for run in law.runs):,} weights and "
        f"{max(run.tokens for run in law.runs):,} tokens. The law extrapolates to larger models and longer runs.</p>",
        sizes_chart(answers),
        lengths_chart(law),
        "<h2>Measured runs</h2>",
        table([*RUN_HEADS], runs),
    ]
    return page_with_charts(f"Folio: the best model for {name}", parts)


def conclusion(answers: Mapping[str, Sequence[Candidate]]) -> str:
    """Return a sentence: the expected loss of the best model for each time."""
    losses = [f"{best[0].forecast.loss:.3f} after {describe_time(minutes)}" for minutes, best in answers.items()]
    return f"Expected validation loss of the best model: {', '.join(losses)} of training."


def describe_time(minutes: str) -> str:
    return counted(float(minutes), "minute")


def sizes_chart(answers: Mapping[str, Sequence[Candidate]]) -> str:
    """Return a chart of the expected loss over the channels of a model, with a color per time."""
    groups = []
    for minutes, candidates in answers.items():
        name = describe_time(minutes)
        limit = MAX_LOSS_RATIO * candidates[0].forecast.loss
        shown = [candidate for candidate in candidates if candidate.forecast.loss <= limit]
        ordered = sorted(shown, key=lambda candidate: candidate.shape.n_embd)
        x = [candidate.shape.n_embd for candidate in ordered]
        lines = [Line(name, x, [candidate.forecast.loss for candidate in ordered], width=3, points=True)]
        for bound in ("low", "high"):
            y = [getattr(candidate.forecast, bound) for candidate in ordered]
            lines.append(Line(f"{name}, {bound} end of the interval", x, y, width=1, dash="dotted"))
        groups.append(LineGroup(name, lines))
    panels = [Panel("expected loss (nats per token)", 340)]
    note = "Dotted: intervals of 90%."
    return line_chart("sizes", "Which size in which time", "channels", panels, groups, note, log_x=True)


def lengths_chart(law: MeasuredLaw) -> str:
    """Return a chart of the loss over the tokens of a run, with a color per size: measured, and by the law."""
    groups, best = [], law.laws[0]
    for weights in sorted({run.weights for run in law.runs}):
        measured = sorted((run, loss) for run, loss in zip(law.runs, law.losses, strict=True) if run.weights == weights)
        first, last = measured[0][0], measured[-1][0]
        points = [(run.tokens, loss) for run, loss in measured]
        ratio = (MAX_TOKENS_RATIO * last.tokens / first.tokens) ** (1 / (POINTS - 1))
        tokens = [first.tokens * ratio**i for i in range(POINTS)]
        step = last.tokens / last.steps
        sizes = [RunSize(weights, round(n), max(1, round(n / step)), last.unique_tokens) for n in tokens]
        name = f"{weights:,} weights"
        lines = [
            Line(f"{name}, by the law", tokens, best.losses(sizes), dash="dashed"),
            Line(f"{name}, measured", *zip(*points, strict=True), width=3, points=True),
        ]
        groups.append(LineGroup(name, lines))
    panels = [Panel("loss (nats per token)", 340)]
    return line_chart("lengths", "Loss over tokens", "tokens", panels, groups, log_x=True)
