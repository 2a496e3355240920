"""The law of losses that tools/scaling.py measured on a data set, in the data set's folder."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from folio import UserError
from folio.base.files import read_json, write_json
from folio.data.windows import Mixture
from folio.training.planning.law import Prior, RunSize, ScalingLaw

# In nats per byte, from 39 runs on four texts (docs/lab/model-size.md)
TYPICAL = Prior(mean=(-1.5, 5.9, 0.42, 10.4, 0.66, 0.32), std=(0.7, 0.7, 0.05, 0.8, 0.06, 0.05))
SAMPLE_TOKENS = 10_000  # whose bytes are counted
MAX_WEIGHTS_RATIO, MAX_TOKENS_RATIO = 8, 40  # beyond the measured runs, up to which the law is used


@dataclass(frozen=True)
class MeasuredLaw:
    """The runs that were measured, and the laws that were fitted to them."""

    data_hash: str
    runs: list[RunSize]
    losses: list[float]  # nats per token
    laws: list[ScalingLaw]  # the best fit, then others, whose spread is its uncertainty

    @classmethod
    def of(cls, data: Mixture) -> "MeasuredLaw | None":
        """The law of a data set. None if it was not measured, or the data has changed, or is a mixture."""
        path = law_file(data)
        if path is None or not path.is_file():
            return None
        try:
            saved = read_json(path)
            runs = [RunSize(*run) for run in saved["runs"]]
            laws = [ScalingLaw.from_parameters(parameters) for parameters in saved["laws"]]
            measured = cls(saved["data_hash"], runs, [float(loss) for loss in saved["losses"]], laws)
        except (OSError, ValueError, LookupError, TypeError) as error:
            remedy = "remove it, or measure again with tools/scaling.py"
            raise UserError(f"{path} is damaged ({error!r}); {remedy}") from None
        return measured if measured.data_hash == data.hash else None

    def save(self, data: Mixture) -> Path:
        """Write the law into the folder of the data set. Raises OSError."""
        path = law_file(data)
        laws = [law.parameters for law in self.laws]
        write_json(path, {"data_hash": self.data_hash, "runs": self.runs, "losses": self.losses, "laws": laws})
        return path

    def covers(self, run: RunSize) -> bool:
        """Whether a run is close enough to the measured ones for a forecast."""
        weights, tokens = ([run[i] for run in self.runs] for i in (0, 1))
        fits_weights = min(weights) / 2 <= run.weights <= MAX_WEIGHTS_RATIO * max(weights)
        return fits_weights and min(tokens) <= run.tokens <= MAX_TOKENS_RATIO * max(tokens)


def best_laws(data: Mixture) -> tuple[list[ScalingLaw], bool]:
    """The laws of a data set, the best fit first, and whether they were measured; otherwise, that of other texts."""
    if measured := MeasuredLaw.of(data):
        return measured.laws, True
    return [ScalingLaw.from_parameters(typical_law(data).mean)], False


def typical_law(data: Mixture) -> Prior:
    """What is known about the law of a text before it is measured, in nats per token."""
    ids, counts = np.unique(np.asarray(data.datasets[0][0].train[0].ids[:SAMPLE_TOKENS]), return_counts=True)
    sizes = [len(data.tokenizer.token_bytes(token)) for token in ids.tolist()]
    return TYPICAL.per_token(max(1.0, np.dot(sizes, counts) / counts.sum()))  # 1.0: music, which has no bytes


def law_file(data: Mixture) -> Path | None:
    """The file of a data set's law; None for a mixture of several."""
    return data.datasets[0][0].folder / "scaling.json" if len(data.datasets) == 1 else None
