"""The page about a replayed step: one HTML file that opens offline."""

import math
from html import escape

from folio.experiments import static_page
from folio.experiments.replay import SequenceLosses
from folio.experiments.replay_report import SHOWN_AS, HardToken, Report, describe_place, label, visible

MAX_SHOWN_TOKENS = 50_000  # whose text is shown
HARDEST = 30  # tokens in the table
SHADES = 10  # of a token's color
STYLE = """
body { padding-bottom: 3em }
.gradients td { white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #0072b2; height: .7em; display: inline-block }
pre { overflow-wrap: anywhere; margin: .2em 0 1em }
b { font-weight: inherit }
.uncounted { color: #888 }
h4 { margin: 1em 0 0 }
#token { position: fixed; bottom: 0; left: 0; right: 0; background: #222; color: #fff; padding: .4em 1em; margin: 0 }
#token { white-space: pre-wrap }
"""
SCRIPT = """
const shown = document.getElementById("token");
document.addEventListener("mouseover", event => {
  const token = event.target.closest("b[data-loss]");
  if (!token) return;
  const {loss, guess, p} = token.dataset, text = token.textContent.replaceAll(" ", "␣").replace("\\n", "");
  shown.textContent = `${text}  loss ${loss} nats, probability ${(100 * Math.exp(-loss)).toPrecision(3)} %; `
    + `most likely was  ${guess}  with ${p} %`;
});
"""


def page(report: Report) -> str:
    """The page."""
    shades = [f".s{i} {{ background: rgb(214 39 40 / {0.7 * i / SHADES:.2f}) }}" for i in range(SHADES + 1)]
    parts = [
        facts(report),
        "<p><a href='#tokens'>The hardest tokens</a> · <a href='#gradients'>Gradients and updates</a> · "
        "<a href='#sequences'>The sequences</a></p>",
        hardest_tokens(report.hardest_tokens(HARDEST)),
        gradients(report),
        texts(report),
        "<p id='token'>Point at a token to see its loss.</p>",
    ]
    return static_page.page(f"Step {report.step:,} of {report.run}", parts, STYLE + " ".join(shades), SCRIPT)


def facts(report: Report) -> str:
    facts = report.summary().items()
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts]
    remarks = [f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in report.comparison.lines()]
    return f"<table id='facts'>{''.join(rows)}</table>{''.join(remarks)}"


def gradients(report: Report) -> str:
    """A row per parameter, with a bar for the norm of its gradient."""
    largest = max((p.gradient_norm for p in report.parameters if math.isfinite(p.gradient_norm)), default=0.0) or 1.0
    rows = []
    for p in report.largest_gradients:
        width = 200 * p.gradient_norm / largest if math.isfinite(p.gradient_norm) else 200
        update = "" if p.relative_update is None else f"{p.relative_update:.2e}"
        numbers = [f"{p.gradient_norm:.4g}", f"{p.weight_norm:.4g}", f"{p.update_norm:.4g}", update]
        cells = "".join(f"<td class='number'>{number}</td>" for number in numbers)
        bar = f"<td><span class='bar' style='width: {width:.1f}px'></span></td>"
        group = f"{p.optimizer}, {p.learning_rate:.4g}, {p.weight_decay:g}"
        shape = " x ".join(map(str, p.shape))
        rows.append(f"<tr><td>{escape(p.name)}</td><td>{shape}</td>{bar}{cells}<td>{escape(group)}</td></tr>")
    heads = ["parameter", "shape", "", "gradient", "weights", "update", "update / weights", "learning rate and decay"]
    note = "Norms: of the gradient before it is clipped, of the weights before the step, and of their change."
    return (
        f"<h2 id='gradients'>Gradients and updates</h2><p>{note}</p>"
        f"<div class='wide'><table class='gradients'>{head_row(heads)}{''.join(rows)}</table></div>"
    )


def hardest_tokens(tokens: list[HardToken]) -> str:
    rows = []
    for token in tokens:
        cells = [
            f"{token.loss:.4f}",
            f"{math.exp(-token.loss):.2%}",
            label(token.text),
            visible(token.before),
            f"{label(token.guess)} ({token.guess_p:.1%})",
        ]
        link = f"<a href='#sequence-{token.sequence.number}'>{token.sequence.number:,}</a>"
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{link}</td></tr>")
    heads = ["loss", "probability", "token", "after the text", "the most likely token", "in sequence"]
    table = f"<div class='wide'><table class='tokens'>{head_row(heads)}{''.join(rows)}</table></div>"
    return f"<h2 id='tokens'>The hardest tokens</h2>{table}"


def texts(report: Report) -> str:
    """The sequences, the hardest first, with tokens colored by loss, as many as there is space for."""
    sequences, uniform = report.hardest_sequences, math.log(max(2, report.tokenizer.vocab_size))
    shown = sequences[: max(1, MAX_SHOWN_TOKENS // len(sequences[0].losses))]
    note = f"White is a loss of 0. The darkest red is {uniform:.2f} nats or more (all tokens equally likely)."
    note += " Gray tokens are only read."
    if len(shown) < len(sequences):
        note += f" The {len(shown):,} hardest of {len(sequences):,} sequences are shown; --json writes all of them."
    content = "".join(text_of(sequence, report, uniform) for sequence in shown)
    return f"<h2 id='sequences'>The sequences, the hardest first</h2><p>{note}</p>{content}"


def text_of(sequence: SequenceLosses, report: Report, uniform: float) -> str:
    """A sequence's text. The first token is only read."""
    piece = report.tokenizer.piece
    parts = [f"<span class='uncounted'>{token_html(piece(int(sequence.ids[0])))}</span>"]
    columns = (sequence.ids[1:], sequence.losses, sequence.counted, sequence.guesses, sequence.guess_p)
    for token, loss, counted, guess, p in zip(*(column.tolist() for column in columns), strict=True):
        text = token_html(piece(token))
        if not counted:
            parts.append(f"<span class='uncounted'>{text}</span>")
            continue
        shade = round(SHADES * min(1.0, loss / uniform)) if math.isfinite(loss) else SHADES
        data = f"data-loss='{loss:.4f}' data-guess='{escape(label(piece(guess)))}' data-p='{100 * p:.3g}'"
        parts.append(f"<b class='s{shade}' {data}>{text}</b>")
    loss = f"loss {sequence.loss:.4f}" if sequence.counted.any() else "no targets"
    head = f"{loss}: sequence {sequence.number:,}, {describe_place(sequence.place)}"
    return f"<h4 id='sequence-{sequence.number}'>{escape(head)}</h4><pre>{''.join(parts)}</pre>"


def token_html(token: str) -> str:
    """A token's text as HTML in which lines end where they do in the text."""
    return escape(visible(token)).replace(SHOWN_AS["\n"], SHOWN_AS["\n"] + "\n")


def head_row(cells: list[str]) -> str:
    return f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in cells)}</tr>"
