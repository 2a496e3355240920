"""The losses of three seeds of the recipes in config/, to which other runs of the same recipe are compared."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from folio.base.files import read_json
from folio.base.roles import WITHOUT_EFFECT, names_without
from folio.base.settings import Settings

FILE = Path(__file__).with_name("reference_losses.json")
MIN_DISTANCE = 0.03  # share of the mean loss from which a loss is far from the reference
SPREADS = 3  # distance from the reference, in differences between the highest and the lowest loss of the seeds


class Reference(NamedTuple):
    """An entry of reference_losses.json."""

    recipe: str  # the config file
    data: str  # hash of the data set
    settings: dict[str, Any]  # those that determine the loss (roles.WITHOUT_EFFECT has the others)
    losses: dict[str, list[float]]  # step -> validation loss of each seed

    def remark(self, step: int, val_loss: float) -> str | None:
        """A line about a validation loss after `step` that is far from those of the seeds, or None."""
        losses = self.losses.get(str(step))
        if not losses:
            return None
        low, mean, high = min(losses), statistics.mean(losses), max(losses)
        if abs(val_loss - mean) <= max(MIN_DISTANCE * mean, SPREADS * (high - low)):
            return None
        direction = "above" if val_loss > mean else "below"
        return (
            f"a validation loss of {val_loss:.4f} is far {direction} the {low:.4f} to {high:.4f} of {len(losses)} "
            f"seeds of {self.recipe}, which has these settings and this data"
        )


def read_references(cls: type[Settings]) -> list[Reference]:
    """All references. A setting that is newer than an entry had its default value. cls: train.py's settings."""
    old_settings = {name: getattr(cls, name) for name in names_without(cls, WITHOUT_EFFECT)}
    references = [Reference(**entry) for entry in read_json(FILE)]
    return [reference._replace(settings={**old_settings, **reference.settings}) for reference in references]


def find_reference(config: Mapping[str, Any], cls: type[Settings], data_hash: str) -> Reference | None:
    """The reference of a run. config: all settings of the run, as in state.json. cls: train.py's settings."""
    for reference in read_references(cls):
        if reference.data == data_hash and reference.settings.items() <= config.items():
            return reference
    return None
