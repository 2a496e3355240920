"""The search space of a sweep: lists of values for a grid, and ranges for a search."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from folio.base.number_format import format_value
from folio.base.settings import ConfigError, Settings, comma_separated, parse_setting
from folio.experiments.sweep.arms import CODE

RANGE = re.compile(r"(?P<low>[^,]*)\.\.(?P<high>[^,:]*)(?P<log>:log)?")
SYNTAX = "write NAME=VALUE,VALUE for a list, NAME=LOW..HIGH for a range, or NAME=LOW..HIGH:log for a logarithmic range"


@dataclass(frozen=True)
class Values:
    """The values of one setting."""

    name: str
    values: tuple[Any, ...]

    def suggest(self, trial: Any) -> Any:
        """Let optuna choose one of the values, as unordered categories."""
        return trial.suggest_categorical(self.name, self.values)

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(str, self.values))}"


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, inclusive. log: sample uniformly on a logarithmic scale."""

    name: str
    low: float
    high: float
    log: bool = False

    def suggest(self, trial: Any) -> float:
        """Let optuna choose a number in the range."""
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{self.name}={self.low}..{self.high}{':log' if self.log else ''}"


Dimension = Values | Range


def parse_space(cls: type[Settings], arguments: list[str]) -> list[Dimension]:
    """Parse arguments such as "learning_rate=1e-3,3e-3" and "dropout=0..0.3". cls: the settings. Raises ConfigError."""
    space = [parse_dimension(cls, *argument.split("=", 1)) for argument in arguments]
    names = [dimension.name for dimension in space]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{repeated[0]} is given twice; give all values at once, as in {repeated[0]}=1,2")
    return space


def parse_dimension(cls: type[Settings], name: str, text: str) -> Dimension:
    parts, match = comma_separated(text), RANGE.fullmatch(text)
    if match and name != CODE and is_numeric(cls, name):
        return parse_range(cls, name, text, match)
    values = tuple(parts if name == CODE else (parse_setting(cls, name, part) for part in parts))
    if not values:
        raise ConfigError(f"{name}={text}: no value is given; {SYNTAX}")
    if repeated := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{name}={text}: {repeated[0]} is given twice")
    return Values(name, values)


def parse_range(cls: type[Settings], name: str, text: str, match: re.Match[str]) -> Range:
    if not (match["low"] and match["high"]):
        raise ConfigError(f"{name}={text}: a bound is missing; {SYNTAX}")
    low, high = (parse_setting(cls, name, match[bound]) for bound in ("low", "high"))
    if None in (low, high):
        raise ConfigError(f"{name}={text}: None is not a bound; {SYNTAX}")
    if low >= high:
        raise ConfigError(f"{name}={text}: the range is empty; write the smaller number first")
    if match["log"] and low <= 0:
        raise ConfigError(f"{name}={text}: a logarithmic range must be above 0")
    return Range(name, low, high, bool(match["log"]))


def is_numeric(cls: type[Settings], name: str) -> bool:
    """Return whether the setting is numeric. Only then does ".." mean a range; otherwise it may be part of a path."""
    hint = get_type_hints(cls).get(name)
    return hint is None or any(kind in (int, float) for kind in getattr(hint, "__args__", (hint,)))


def grid(space: list[Dimension]) -> list[dict[str, Any]]:
    """Return every combination of the values; the last setting changes fastest. Raises ConfigError for a range."""
    for dimension in space:
        if isinstance(dimension, Range):
            raise ConfigError(f"{dimension}: a range needs a number of trials, as in --trials=40")
    names = [dimension.name for dimension in space]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(d.values for d in space))]


def corners(space: list[Dimension]) -> Iterator[dict[str, Any]]:
    """Yield the combinations of listed values and bounds of ranges."""
    choices = (d.values if isinstance(d, Values) else (d.low, d.high) for d in space)
    return (dict(zip([d.name for d in space], values, strict=True)) for values in itertools.product(*choices))


def describe_point(params: dict[str, Any]) -> str:
    """Format the values of one trial."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in params.items())
