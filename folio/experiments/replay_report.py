"""Report on a replayed step: its loss, sequences, hardest tokens, gradients and updates.

Report holds the data; as_text formats it for a terminal, and as_page as an HTML file that opens offline.
"""

import math
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from folio.base.files import finite
from folio.base.number_format import counted
from folio.data.tokenizer import Tokenizer
from folio.data.windows import Place
from folio.experiments import static_page
from folio.experiments.replay import Comparison, ParameterChange, SequenceLosses

MAX_ROWS = 10  # per table in the terminal
PAGE_TOKENS = 30  # rows of the page's table of the hardest tokens
MAX_SHOWN_TOKENS = 50_000  # in the text on the page
SHOWN_AS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    """Return text on one line, without control characters."""
    shown = (SHOWN_AS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
    return "".join(shown)


def label(token: str) -> str:
    """Return a token's text with visible white space."""
    return visible(token).replace(" ", "␣") or "∅"


class HardToken(NamedTuple):
    """A token of a replayed step with its loss."""

    loss: float
    text: str
    guess: str
    guess_p: float
    before: str  # the preceding text
    sequence: SequenceLosses
    position: int  # in ids

    def cells(self) -> list[str]:
        """Return the loss, probability, token, preceding text, and most likely token."""
        guess = f"{label(self.guess)} ({self.guess_p:.1%})"
        return [f"{self.loss:.4f}", f"{math.exp(-self.loss):.2%}", label(self.text), f"…{visible(self.before)}", guess]


@dataclass(frozen=True)
class Report:
    """A replayed step."""

    run: str
    step: int
    start: str  # description of the checkpoint or weights it was replayed from
    comparison: Comparison
    grad_clip: float  # 0: off
    skipped: str | None  # reason; None: not skipped
    epochs: dict[str, float]  # of each data set, before the step
    sequences: list[SequenceLosses]
    parameters: list[ParameterChange]
    tokenizer: Tokenizer

    @property
    def targets(self) -> int:
        return int(sum(sequence.counted.sum() for sequence in self.sequences))

    @property
    def clip_factor(self) -> float:
        """Factor that multiplied the gradients, as torch's clip_grad_norm_ computes it."""
        return min(1.0, self.grad_clip / (self.comparison.judged.grad_norm + 1e-6)) if self.grad_clip else 1.0

    @property
    def hardest_sequences(self) -> list[SequenceLosses]:
        """Sequences by descending loss; NaN first, and sequences without targets last."""
        return sorted(self.sequences, key=lambda s: (not s.counted.any(), -math.inf if math.isnan(s.loss) else -s.loss))

    @property
    def largest_gradients(self) -> list[ParameterChange]:
        """Parameters by descending gradient norm; NaN first."""
        return sorted(self.parameters, key=lambda p: math.inf if math.isnan(p.gradient_norm) else p.gradient_norm)[::-1]

    def hardest_tokens(self, count: int) -> list[HardToken]:
        """Return up to `count` tokens with the highest losses; NaN first."""
        losses = np.concatenate([np.where(s.counted, s.losses, -np.inf) for s in self.sequences])  # NaN sorts last
        order = np.argsort(losses, kind="stable")[::-1][: min(count, self.targets)]
        T, tokens = len(self.sequences[0].losses), []
        for index in order.tolist():
            sequence, t = self.sequences[index // T], index % T
            before = self.tokenizer.decode(sequence.ids[max(0, t - 40) : t + 1])
            loss, guess_p = float(sequence.losses[t]), float(sequence.guess_p[t])
            texts = [self.tokenizer.piece(int(token)) for token in (sequence.ids[t + 1], sequence.guesses[t])]
            tokens.append(HardToken(loss, *texts, guess_p, before, sequence, t + 1))
        return tokens

    def rates(self) -> dict[tuple[str, float, float], list[str]]:
        """Return the names of parameters, grouped by (optimizer, learning rate, weight decay)."""
        groups: dict[tuple[str, float, float], list[str]] = {}
        for p in self.parameters:
            groups.setdefault((p.optimizer, p.learning_rate, p.weight_decay), []).append(p.name)
        return groups

    def summary(self) -> dict[str, str]:
        """Describe the whole step, by topic."""
        judged, comparison = self.comparison.judged, self.comparison
        clipped = "not clipped"
        if self.clip_factor < 1:
            clipped = f"clipped to {self.grad_clip:g}, by the factor {self.clip_factor:.4f}"
        rates = [f"{name} {rate:.4g}" for name, rate in dict.fromkeys(key[:2] for key in self.rates())]
        first = self.sequences[0].number
        sequences = f"{first:,} to {first + len(self.sequences) - 1:,}, with {counted(self.targets, 'target')}"
        epochs = ", ".join(f"{n:,.2f} epochs of {name}" for name, n in self.epochs.items())
        return {
            "replayed from": self.start,
            "loss": f"{judged.loss:.4f} nats per token; {comparison.compare_logged('loss')}",
            "gradient norm": f"{judged.grad_norm:.4f}, {clipped}; {comparison.compare_logged('grad_norm')}",
            "learning rate": ", ".join(rates),
            "skipped": f"yes: {self.skipped}" if self.skipped else "no",
            "sequences": f"{sequences}, after {epochs}",
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON. Numbers that are not finite become strings, such as "nan"."""
        judged, comparison = self.comparison.judged, self.comparison
        logged = comparison.logged or {}
        facts = {
            "run": self.run,
            "step": self.step,
            "replayed_from": self.start,
            "loss": judged.loss,
            "logged_loss": logged.get("loss"),
            "grad_norm": judged.grad_norm,
            "logged_grad_norm": logged.get("grad_norm"),
            "logged": comparison.logged is not None,
            "bitwise": comparison.bitwise,
            "equal_before": comparison.equal_before,
            "different_before": comparison.different_before,
            "remarks": comparison.lines(),
            "clip_factor": self.clip_factor,
            "skipped": self.skipped,
            "epochs": self.epochs,
            "learning_rates": [
                dict(zip(("optimizer", "learning_rate", "weight_decay"), key, strict=True), parameters=names)
                for key, names in self.rates().items()
            ],
            "parameters": [{**p._asdict(), "relative_update": p.relative_update} for p in self.largest_gradients],
            "sequences": [
                {
                    "number": s.number,
                    **s.place._asdict(),
                    "loss": s.loss if s.counted.any() else None,
                    "text": self.tokenizer.decode(s.ids),
                    "ids": s.ids.tolist(),
                    "losses": [x if c else None for x, c in zip(s.losses.tolist(), s.counted.tolist(), strict=True)],
                    "guesses": s.guesses.tolist(),
                    "guess_probabilities": s.guess_p.tolist(),
                }
                for s in self.sequences
            ],
        }
        return finite(facts, str)


def describe_place(place: Place) -> str:
    shard = f" of shard {place.shard + 1} of {place.shards}" if place.shards > 1 else ""
    return f"{place.dataset}, token {place.offset:,}{shard}"


def as_text(report: Report) -> str:
    """Format the report for a terminal."""
    remarks, sequences = report.comparison.lines(), report.hardest_sequences
    lines = [f"step {report.step:,} of {report.run}", ""]
    lines += [f"{name + ':':15}{fact}" for name, fact in report.summary().items()]
    lines += ["", *remarks] if remarks else []
    lines += ["", f"the hardest of {counted(len(sequences), 'sequence')}", "    loss      number  place and text"]
    for sequence in sequences[:MAX_ROWS]:
        text = visible(report.tokenizer.decode(sequence.ids))[:60]
        lines.append(f"{sequence.loss:8.4f}{sequence.number:12,}  {describe_place(sequence.place)}: {text}")
    lines += ["", "the hardest tokens", "    loss       p  token, preceding text; the most likely token"]
    for token in report.hardest_tokens(MAX_ROWS):
        loss, p, text, before, guess = token.cells()
        lines.append(f"{loss:>8}{p:>8}  {text}  after  {before[-40:]}; {guess}")
    lines += ["", "the largest gradients", "    norm  update / weights  parameter"]
    lines += [f"{p.gradient_norm:8.4f}{describe_update(p):>18}  {p.name}" for p in report.largest_gradients[:MAX_ROWS]]
    return "\n".join(lines)


def describe_update(p: ParameterChange) -> str:
    """Format the relative update; empty for weights of 0."""
    return "" if p.relative_update is None else f"{p.relative_update:.2e}"


# --- page -------------------------------------------------------------------------------------------------------------

STYLE = """
body { padding-bottom: 3rem; }
pre b { font-weight: inherit; }
.bar { display: inline-block; height: .7em; background: var(--accent); }
.uncounted { color: var(--soft); }
#token {
  position: fixed; bottom: 0; left: 0; right: 0; margin: 0; padding: .4rem 1rem; max-width: none;
  background: var(--ink); color: var(--paper); white-space: pre-wrap; overflow-wrap: anywhere;
}
@media print { #token { display: none; } }
"""
SCRIPT = """
const tokens = document.querySelectorAll("b[data-loss]"), colorBar = document.querySelector(".color-bar i");
const readout = document.getElementById("token");

// Color the tokens by their losses. NaN and infinity have the color of the maximum.
function colorTokens() {
  colorBar.style.background = `linear-gradient(to right, ${palette().sequential.map(css)})`;
  for (const token of tokens) {
    const share = token.dataset.loss / colorBar.dataset.max;
    Object.assign(token.style, onColor("sequential", Number.isNaN(share) ? 1 : share));
  }
}

colorTokens();
onNewPalette(colorTokens);
document.addEventListener("mouseover", event => {
  const token = event.target.closest("b[data-loss]");
  if (!token) return;
  const {loss, guess, p} = token.dataset, text = token.textContent.replaceAll(" ", "␣").replace("\\n", "");
  readout.textContent = `${text}  loss ${loss} nats, probability ${(100 * Math.exp(-loss)).toPrecision(3)} %; `
    + `most likely was  ${guess}  with ${p} %`;
});
"""


def as_page(report: Report) -> str:
    """Format the report as HTML."""
    parts = [
        static_page.summary(conclusion(report)),
        facts(report),
        "<p><a href='#tokens'>The hardest tokens</a> · <a href='#gradients'>Gradients and updates</a> · "
        "<a href='#sequences'>The sequences</a></p>",
        hardest_tokens(report),
        gradients(report),
        texts(report),
        "<p id='token'>Point at a token to see its loss.</p>",
    ]
    return static_page.page(f"Step {report.step:,} of {report.run}", parts, STYLE, SCRIPT)


def conclusion(report: Report) -> str:
    """Return one or two sentences: the loss and the gradient of the step, and its hardest sequence."""
    judged, hardest = report.comparison.judged, report.hardest_sequences[0]
    skipped = f"Skipped: {report.skipped}. " if report.skipped else ""
    text = f"{skipped}Loss {judged.loss:.4f} nats per token, gradient norm {judged.grad_norm:.4f}."
    if len(report.sequences) == 1:
        return text
    count = len(report.sequences)
    return f"{text} The hardest of {count:,} sequences is {hardest.number:,}, with a loss of {hardest.loss:.4f}."


def facts(report: Report) -> str:
    rows = [
        f"<tr><th>{escape(name)}</th><td class='text'>{escape(fact)}</td></tr>"
        for name, fact in report.summary().items()
    ]
    remarks = [f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in report.comparison.lines()]
    return f"<table id='facts'>{''.join(rows)}</table>{''.join(remarks)}"


def hardest_tokens(report: Report) -> str:
    rows = []
    for token in report.hardest_tokens(PAGE_TOKENS):
        number = token.sequence.number
        rows.append([*map(escape, token.cells()), f"<a href='#sequence-{number}'>{number:,}</a>"])
    heads = ["loss", "probability", "token", "preceding text", "most likely token", "sequence"]
    return f"<h2 id='tokens'>The hardest tokens</h2>{static_page.html_table(heads, rows)}"


def gradients(report: Report) -> str:
    """Return a table with a row per parameter and a bar for its gradient norm."""
    largest = max((p.gradient_norm for p in report.parameters if math.isfinite(p.gradient_norm)), default=0.0) or 1.0
    rows = []
    for p in report.largest_gradients:
        width = 200 * p.gradient_norm / largest if math.isfinite(p.gradient_norm) else 200
        bar = f"<span class='bar' style='width: {width:.1f}px'></span>"
        norms = [f"{norm:.4g}" for norm in (p.gradient_norm, p.weight_norm, p.update_norm)]
        group = f"{p.optimizer}, {p.learning_rate:.4g}, {p.weight_decay:g}"
        rows.append([escape(p.name), " x ".join(map(str, p.shape)), bar, *norms, describe_update(p), escape(group)])
    heads = ["parameter", "shape", "", "gradient", "weights", "update", "update / weights", "learning rate and decay"]
    note = "Norms of the gradient before clipping, of the weights before the step, and of their change."
    return f"<h2 id='gradients'>Gradients and updates</h2><p>{note}</p>{static_page.html_table(heads, rows)}"


def texts(report: Report) -> str:
    """Return the text of the hardest sequences, with tokens colored by loss, up to MAX_SHOWN_TOKENS tokens."""
    sequences, uniform = report.hardest_sequences, math.log(max(2, report.tokenizer.vocab_size))
    shown = sequences[: max(1, MAX_SHOWN_TOKENS // len(sequences[0].losses))]
    note = f"If all tokens were equally likely, the loss would be {uniform:.2f} nats. Gray tokens are not targets."
    if len(shown) < len(sequences):
        note += f" The {len(shown):,} hardest of {len(sequences):,} sequences are shown; --json writes all of them."
    bar = f"<div class='color-bar'>0 <i data-max='{uniform}'></i> {uniform:.2f} nats or more</div>"
    content = "".join(sequence_html(sequence, report) for sequence in shown)
    return f"<h2 id='sequences'>The sequences, the hardest first</h2><p>{note}</p>{bar}{content}"


def sequence_html(sequence: SequenceLosses, report: Report) -> str:
    """Return a sequence's text as HTML. The first token is not a target."""
    piece = report.tokenizer.piece
    parts = [f"<span class='uncounted'>{token_html(piece(int(sequence.ids[0])))}</span>"]
    columns = (sequence.ids[1:], sequence.losses, sequence.counted, sequence.guesses, sequence.guess_p)
    for token, loss, is_counted, guess, p in zip(*(column.tolist() for column in columns), strict=True):
        text = token_html(piece(token))
        if not is_counted:
            parts.append(f"<span class='uncounted'>{text}</span>")
            continue
        data = f"data-loss='{loss:.4f}' data-guess='{escape(label(piece(guess)))}' data-p='{100 * p:.3g}'"
        parts.append(f"<b {data}>{text}</b>")
    loss = f"loss {sequence.loss:.4f}" if sequence.counted.any() else "no targets"
    head = f"{loss}: sequence {sequence.number:,}, {describe_place(sequence.place)}"
    return f"<h4 id='sequence-{sequence.number}'>{escape(head)}</h4><pre>{''.join(parts)}</pre>"


def token_html(token: str) -> str:
    """Return a token's text as HTML with its line breaks."""
    return escape(visible(token)).replace(SHOWN_AS["\n"], SHOWN_AS["\n"] + "\n")
