"""Measure how often the 95 % intervals of tools/evaluate.py contain the true loss, on simulated texts.

    python lab/bench/intervals.py
    python lab/bench/intervals.py --spread=0.1 --texts=1000

The lengths of the documents of a text are lognormal: the standard deviation of the logarithm is `sigma`, and the median
is 1,000 tokens. The mean loss of a document is normal, and its standard deviation is `spread`; the correlation of the
mean with the logarithm of the length is `rho`. The losses of the tokens of a document vary around its mean with a
standard deviation of 2.5 nats. The true value is the expected loss of the documents, weighted by their lengths.

The columns are methods, with the percentage of the intervals that contain the true value, and their median half width
in nats:

    used            Measure.row: standard errors and degrees of freedom of Bell and McCaffrey
    n - 1           the linearized standard error, and Student's t with n - 1 degrees of freedom
    effective       the same with the effective number of documents (at least 2) in place of n
    jackknife       the delete-one jackknife, and n - 1 degrees of freedom
    bootstrap-t     quantiles of t over resampled documents (Efron and Tibshirani 1993, section 12.5)
    blocks          blocks of 256 tokens as the samples, as if there were one document
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings, run_script  # noqa: E402
from folio.evaluation.intervals import effective_number, ratio_influence, student_t_975  # noqa: E402
from folio.evaluation.scores import LOSS, Measure  # noqa: E402

SIGMAS = (0.0, 0.5, 1.0, 1.8)
CORRELATIONS = (0.0, 0.5, 0.9)
DOCUMENTS = (2, 3, 5, 12, 40, 200)
MEDIAN_TOKENS = 1000
BLOCK_TOKENS = 256  # about 1,024 bytes in GPT-2's vocabulary
MEAN = 3.0  # nats per token
TOKEN_SPREAD = 2.5  # nats
RESAMPLES = 499


@dataclass(frozen=True)
class IntervalBenchConfig(Settings):
    texts: PositiveInt = 2000  # simulated texts per row of the table
    spread: NonNegativeFloat = 0.3  # standard deviation of the documents' mean losses, nats
    seed: NonNegativeInt = 0  # random seed of the texts


class Text(NamedTuple):
    """A simulated text: the length, mean loss, and number of blocks of each document, and the blocks' losses."""

    tokens: np.ndarray  # (n,)
    nats: np.ndarray  # (n,) total loss of each document
    block_tokens: np.ndarray  # (blocks,)
    block_nats: np.ndarray  # (blocks,)


Interval = tuple[float, float]


def simulate(rng: np.random.Generator, n: int, sigma: float, spread: float, rho: float) -> Text:
    """Return a text of n documents."""
    z = rng.normal(size=n)
    tokens = np.ceil(MEDIAN_TOKENS * np.exp(sigma * z)).astype(np.int64)
    means = MEAN + spread * (rho * z + math.sqrt(1 - rho**2) * rng.normal(size=n))
    blocks = -(-tokens // BLOCK_TOKENS)  # of each document; the last one is shorter
    document = np.repeat(np.arange(n), blocks)
    block_tokens = np.full(len(document), BLOCK_TOKENS)
    block_tokens[np.cumsum(blocks) - 1] = tokens - (blocks - 1) * BLOCK_TOKENS
    noise = rng.normal(size=len(document)) * TOKEN_SPREAD * np.sqrt(block_tokens)
    block_nats = means[document] * block_tokens + noise
    return Text(tokens, np.bincount(document, block_nats), block_tokens, block_nats)


def true_loss(sigma: float, spread: float, rho: float) -> float:
    """Return the loss per token of all documents: lengths weight z, a standard normal variable, to the mean sigma."""
    return MEAN + spread * rho * sigma


def used(text: Text) -> Interval:
    row = Measure("text", LOSS, "documents", text.nats, text.tokens).row()
    return row["low"], row["high"]


def linearized(values: np.ndarray, weights: np.ndarray, n: float) -> Interval:
    ratio, shares = values.sum() / weights.sum(), ratio_influence(values, weights) / len(values)
    half_width = student_t_975(n - 1) * math.sqrt(float(shares @ shares) * n / (n - 1))
    return ratio - half_width, ratio + half_width


def jackknife(text: Text) -> Interval:
    n = len(text.tokens)
    without = (text.nats.sum() - text.nats) / (text.tokens.sum() - text.tokens)
    half_width = student_t_975(n - 1) * math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    ratio = text.nats.sum() / text.tokens.sum()
    return ratio - half_width, ratio + half_width


def bootstrap_t(text: Text, rng: np.random.Generator) -> Interval:
    n = len(text.tokens)
    counts = np.vstack([np.ones(n), rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)])  # the first is the text
    tokens = counts @ text.tokens
    ratios = counts @ text.nats / tokens
    residuals = text.nats - ratios[:, None] * text.tokens  # (1 + R, n)
    errors = np.sqrt((counts * residuals**2).sum(axis=1) * n / (n - 1)) / tokens
    varied = errors[1:] > 1e-9  # a resample may consist of one document
    if not varied.any():
        return ratios[0], ratios[0]
    low, high = np.quantile((ratios[1:] - ratios[0])[varied] / errors[1:][varied], [0.025, 0.975])
    return ratios[0] - high * errors[0], ratios[0] - low * errors[0]


def intervals_of(text: Text, rng: np.random.Generator) -> dict[str, Interval]:
    n = len(text.tokens)
    return {
        "used": used(text),
        "n - 1": linearized(text.nats, text.tokens, n),
        "effective": linearized(text.nats, text.tokens, max(effective_number(text.tokens), 2.0)),
        "jackknife": jackknife(text),
        "bootstrap-t": bootstrap_t(text, rng),
        "blocks": linearized(text.block_nats, text.block_tokens, len(text.block_nats)),
    }


def measure(cfg: IntervalBenchConfig, n: int, sigma: float, rho: float) -> dict[str, str]:
    """Return the cells of a row: the coverage and the median half width by method."""
    rng, truth = np.random.default_rng(cfg.seed), true_loss(sigma, cfg.spread, rho)
    rows = [intervals_of(simulate(rng, n, sigma, cfg.spread, rho), rng) for _ in range(cfg.texts)]
    cells = {}
    for name in rows[0]:
        low, high = np.array([row[name] for row in rows]).T  # (texts,)
        hits = ((low <= truth) & (truth <= high)).mean()
        cells[name] = f"{100 * hits:.1f} (± {np.median(high - low) / 2:.3f})"
    return cells


def main(cfg: IntervalBenchConfig) -> None:
    header = ["sigma", "rho", "documents"]
    rows = [(rho, sigma, n) for rho in CORRELATIONS for sigma in SIGMAS for n in DOCUMENTS if sigma or not rho]
    for index, (rho, sigma, n) in enumerate(rows):
        cells = measure(cfg, n, sigma, rho)
        if index == 0:
            print(f"| {' | '.join([*header, *cells])} |\n|{'---|' * (len(header) + len(cells))}")
        print(f"| {sigma:g} | {rho:g} | {n} | {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    run_script(main, IntervalBenchConfig)
