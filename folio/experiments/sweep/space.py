"""The settings that a sweep varies: lists of values for a grid, and ranges for a search."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from folio.base.number_format import format_value
from folio.base.settings import ConfigError, Settings, comma_separated, parse_setting

RANGE = re.compile(r"(?P<low>[^,]*)\.\.(?P<high>[^,:]*)(?P<log>:log)?")
HOW = "write NAME=VALUE,VALUE for a list, or NAME=LOW..HIGH for a range (:log after it for a logarithmic one)"


@dataclass(frozen=True)
class Values:
    """The values of one setting."""

    name: str
    values: tuple[Any, ...]

    def suggest(self, trial: Any) -> Any:
        """One of the values, chosen by optuna, for which they are unordered categories."""
        return trial.suggest_categorical(self.name, self.values)

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(str, self.values))}"


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included. log: as many from 1 to 10 as from 10 to 100."""

    name: str
    low: float
    high: float
    log: bool = False

    def suggest(self, trial: Any) -> float:
        """A number in the range, chosen by optuna."""
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{self.name}={self.low}..{self.high}{':log' if self.log else ''}"


Dimension = Values | Range


def parse_space(cls: type[Settings], arguments: list[str]) -> list[Dimension]:
    """What "learning_rate=1e-3,3e-3" and "dropout=0..0.3" mean for these settings. Raises ConfigError."""
    space = [parse_dimension(cls, *argument.split("=", 1)) for argument in arguments]
    names = [dimension.name for dimension in space]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{repeated[0]} is given twice; give all its values at once, as in {repeated[0]}=1,2")
    return space


def parse_dimension(cls: type[Settings], name: str, text: str) -> Dimension:
    match = RANGE.fullmatch(text)
    if match and is_numeric(cls, name):
        return parse_range(cls, name, text, match)
    values = tuple(parse_setting(cls, name, part) for part in comma_separated(text))
    if not values:
        raise ConfigError(f"{name}={text}: there is no value; {HOW}")
    if repeated := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{name}={text}: {repeated[0]} is given twice")
    return Values(name, values)


def parse_range(cls: type[Settings], name: str, text: str, match: re.Match[str]) -> Range:
    if not (match["low"] and match["high"]):
        raise ConfigError(f"{name}={text}: a bound is missing; {HOW}")
    low, high = (parse_setting(cls, name, match[bound]) for bound in ("low", "high"))
    if None in (low, high):
        raise ConfigError(f"{name}={text}: None is not a bound; {HOW}")
    if low >= high:
        raise ConfigError(f"{name}={text}: the range is empty; write the smaller number first")
    if match["log"] and low <= 0:
        raise ConfigError(f"{name}={text}: a logarithmic range begins above 0")
    return Range(name, low, high, bool(match["log"]))


def is_numeric(cls: type[Settings], name: str) -> bool:
    """Whether the setting is a number, so that ".." in its value means a range; in a name, it may be a folder's."""
    hint = get_type_hints(cls).get(name)
    return hint is None or any(kind in (int, float) for kind in getattr(hint, "__args__", (hint,)))


def grid(space: list[Dimension]) -> list[dict[str, Any]]:
    """Every combination of the values, the last setting first to change. Raises ConfigError if there is a range."""
    for dimension in space:
        if isinstance(dimension, Range):
            raise ConfigError(f"{dimension}: a range is searched; say how many trials, as in --trials=40")
    names = [dimension.name for dimension in space]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(d.values for d in space))]


def corners(space: list[Dimension]) -> Iterator[dict[str, Any]]:
    """Combinations of the listed values and of the bounds of the ranges."""
    choices = (d.values if isinstance(d, Values) else (d.low, d.high) for d in space)
    return (dict(zip([d.name for d in space], values, strict=True)) for values in itertools.product(*choices))


def describe_point(params: dict[str, Any]) -> str:
    """The values of one trial."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in params.items())
