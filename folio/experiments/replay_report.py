"""What happened in a replayed step, as text and as JSON: its loss, sequences, hardest tokens, gradients and updates."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from folio.data.tokenizer import Tokenizer
from folio.data.windows import Place
from folio.experiments.replay import Comparison, ParameterChange, SequenceLosses

MOST_ROWS = 10  # of each table in the terminal
SHOWN_AS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    """Text in one line, without control characters."""
    shown = (SHOWN_AS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
    return "".join(shown)


def label(token: str) -> str:
    """A token's text by itself, with white space made visible."""
    return visible(token).replace(" ", "␣") or "∅"


class HardToken(NamedTuple):
    """A token with a high loss."""

    loss: float
    text: str
    guess: str
    guess_p: float
    before: str  # the text before it
    sequence: SequenceLosses
    position: int  # in ids


@dataclass(frozen=True)
class Report:
    """What happened in a step."""

    run: str
    step: int
    start: str  # what it was replayed from
    comparison: Comparison
    grad_clip: float  # 0: off
    skipped: str | None  # why
    epochs: dict[str, float]  # of each data set, before the step
    sequences: list[SequenceLosses]
    parameters: list[ParameterChange]
    tokenizer: Tokenizer

    @property
    def targets(self) -> int:
        return int(sum(sequence.counted.sum() for sequence in self.sequences))

    @property
    def clip_factor(self) -> float:
        """What the gradients were multiplied by, as torch's clip_grad_norm_ computes it."""
        return min(1.0, self.grad_clip / (self.comparison.judged.grad_norm + 1e-6)) if self.grad_clip else 1.0

    @property
    def hardest_sequences(self) -> list[SequenceLosses]:
        """The sequences by loss, the highest first, or not a number; those without a target last."""
        return sorted(self.sequences, key=lambda s: (not s.counted.any(), -math.inf if math.isnan(s.loss) else -s.loss))

    @property
    def largest_gradients(self) -> list[ParameterChange]:
        """The parameters by the norms of their gradients, the largest first; not a number before all others."""
        return sorted(self.parameters, key=lambda p: math.inf if math.isnan(p.gradient_norm) else p.gradient_norm)[::-1]

    def hardest_tokens(self, most: int) -> list[HardToken]:
        """The tokens with the highest losses."""
        losses = np.concatenate([np.where(s.counted, s.losses, -np.inf) for s in self.sequences])  # NaN sorts last
        order = np.argsort(losses, kind="stable")[::-1][: min(most, self.targets)]
        T, tokens = len(self.sequences[0].losses), []
        for place in order.tolist():
            sequence, t = self.sequences[place // T], place % T
            before = self.tokenizer.decode(sequence.ids[max(0, t - 40) : t + 1])
            loss, guess_p = float(sequence.losses[t]), float(sequence.guess_p[t])
            texts = [self.tokenizer.piece(int(token)) for token in (sequence.ids[t + 1], sequence.guesses[t])]
            tokens.append(HardToken(loss, *texts, guess_p, before, sequence, t + 1))
        return tokens

    def rates(self) -> dict[tuple[str, float, float], list[str]]:
        """The names of the parameters by optimizer, learning rate and weight decay."""
        groups: dict[tuple[str, float, float], list[str]] = {}
        for p in self.parameters:
            groups.setdefault((p.optimizer, p.learning_rate, p.weight_decay), []).append(p.name)
        return groups

    def summary(self) -> dict[str, str]:
        """The facts about the whole step, in words."""
        judged, comparison = self.comparison.judged, self.comparison
        clipped = "not clipped"
        if self.clip_factor < 1:
            clipped = f"clipped to {self.grad_clip:g}, by the factor {self.clip_factor:.4f}"
        rates = [f"{name} {rate:.4g}" for name, rate in dict.fromkeys(key[:2] for key in self.rates())]
        first = self.sequences[0].number
        numbers = f"{first:,} to {first + len(self.sequences) - 1:,}, with {self.targets:,} targets"
        epochs = ", ".join(f"{n:,.2f} epochs of {name}" for name, n in self.epochs.items())
        return {
            "replayed from": self.start,
            "loss": f"{judged.loss:.4f} nats per token; {comparison.beside('loss')}",
            "gradient norm": f"{judged.grad_norm:.4f}, {clipped}; {comparison.beside('grad_norm')}",
            "learning rate": ", ".join(rates),
            "skipped": f"yes: {self.skipped}" if self.skipped else "no",
            "sequences": f"{numbers}, after {epochs}",
        }

    def text(self) -> str:
        """The report for a terminal."""
        lines = [f"step {self.step:,} of {self.run}", ""]
        lines += [f"{name + ':':15}{fact}" for name, fact in self.summary().items()]
        lines += ["", *self.comparison.lines()] if self.comparison.lines() else []
        sequences = self.hardest_sequences
        lines += ["", f"the hardest of {len(sequences)} sequences", "    loss      number  place and text"]
        for sequence in sequences[:MOST_ROWS]:
            text = visible(self.tokenizer.decode(sequence.ids))[:60]
            lines.append(f"{sequence.loss:8.4f}{sequence.number:12,}  {describe_place(sequence.place)}: {text}")
        heads = "    loss       p  token, after which text; the most likely token"
        lines += ["", "the hardest tokens", heads]
        for token in self.hardest_tokens(MOST_ROWS):
            before, p = visible(token.before)[-40:], math.exp(-token.loss)
            guess = f"{label(token.guess)} ({token.guess_p:.1%})"
            lines.append(f"{token.loss:8.4f}{p:8.2%}  {label(token.text)}  after  {before}; {guess}")
        lines += ["", "the largest gradients", "    norm  update / weights  parameter"]
        for p in self.largest_gradients[:MOST_ROWS]:
            update = "" if p.relative_update is None else f"{p.relative_update:.2e}"
            lines.append(f"{p.gradient_norm:8.4f}{update:>18}  {p.name}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file of JSON. A number that is not finite is a text, such as "NaN"."""
        judged, comparison = self.comparison.judged, self.comparison
        logged = comparison.logged or {}
        return {
            "run": self.run,
            "step": self.step,
            "replayed_from": self.start,
            "loss": writable(judged.loss),
            "logged_loss": logged.get("loss"),
            "grad_norm": writable(judged.grad_norm),
            "logged_grad_norm": logged.get("grad_norm"),
            "logged": comparison.logged is not None,
            "bitwise": comparison.bitwise,
            "equal_before": comparison.equal_before,
            "different_before": comparison.different_before,
            "remarks": comparison.lines(),
            "clip_factor": writable(self.clip_factor),
            "skipped": self.skipped,
            "epochs": self.epochs,
            "learning_rates": [
                dict(zip(("optimizer", "learning_rate", "weight_decay"), key, strict=True), parameters=names)
                for key, names in self.rates().items()
            ],
            "parameters": [
                {name: writable(value) for name, value in p._asdict().items()}
                | {"relative_update": writable(p.relative_update)}
                for p in self.largest_gradients
            ],
            "sequences": [
                {
                    "number": s.number,
                    **s.place._asdict(),
                    "loss": writable(s.loss) if s.counted.any() else None,
                    "text": self.tokenizer.decode(s.ids),
                    "ids": s.ids.tolist(),
                    "losses": [
                        writable(x) if c else None for x, c in zip(s.losses.tolist(), s.counted.tolist(), strict=True)
                    ],
                    "guesses": s.guesses.tolist(),
                    "guess_probabilities": [writable(p) for p in s.guess_p.tolist()],
                }
                for s in self.sequences
            ],
        }


def writable(value: Any) -> Any:
    """The value, or a text if it is a number that JSON cannot hold."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def describe_place(place: Place) -> str:
    shard = f" of shard {place.shard + 1} of {place.shards}" if place.shards > 1 else ""
    return f"{place.dataset}, token {place.offset:,}{shard}"
