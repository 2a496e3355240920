"""Every setting of every script, tool, and request refuses each wrong value in one line that says what is right.

So other tests need no examples of values that have a wrong type, are out of bounds, or are not among the choices.
"""

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from annotated_types import MinLen

from folio.base import settings
from folio.base.settings import CommaSeparated, ConfigError, Settings, setting_names
from prepare.translation import TranslationConfig
from tests.support.repository import ROOT, shipped

NUMBERS = [-(10**30), -1.5, -1, 0, 0.5, 1, 1.0, 1.5, 7, 2**63, 10**30, 1e300, math.inf, -math.inf]
VALUES = [*NUMBERS, True, False, None, "", " ", "no such choice"]
WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def settings_classes() -> list[type[Settings]]:
    """The settings dataclasses of all files of the repository."""
    for path in shipped():
        if re.search(r"^class \w+\((\w*Config|Settings)\):", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))

    def subclasses(cls: type) -> Iterator[type]:
        for subclass in cls.__subclasses__():
            yield from (subclass, *subclasses(subclass))

    ours = {cls for cls in subclasses(Settings) if is_dataclass(cls) and not cls.__module__.startswith("tests")}
    return sorted(ours, key=lambda cls: (cls.__module__, cls.__name__))


CLASSES = settings_classes()


def own_settings(cls: type[Settings]) -> dict[str, Any]:
    """The settings that a class defines, and their types. Those of a base class are tested there."""
    hints = get_type_hints(cls, include_extras=True)
    other_kinds = (tuple[str, ...], tuple[int, ...])  # positional arguments; token ids, which another function checks
    names = [name for name in setting_names(cls) if name in cls.__annotations__]
    return {name: hints[name] for name in names if hints[name] not in other_kinds}


def alternatives(hint: Any) -> list[tuple[Any, list[Any]]]:
    """The types that a value may have, each with its rules. The type of a choice is the choice."""
    if get_origin(hint) is Annotated:
        base, *rules = get_args(hint)
        return [(kind, [*more, *rules]) for kind, more in alternatives(base)]
    if get_origin(hint) is Literal:
        return [(choice, []) for choice in get_args(hint)]
    if hint == CommaSeparated:
        return [(str, [])]
    return [(hint, [])] if isinstance(hint, type) else [kind for each in get_args(hint) for kind in alternatives(each)]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def has_type(value: Any, kind: Any) -> bool:
    if isinstance(kind, str):
        return isinstance(value, str) and value == kind
    if kind not in (int, float):
        return isinstance(value, kind)
    return is_number(value) and math.isfinite(value) and (kind is float or value == math.floor(value))


def obeys(value: Any, rule: Any) -> bool:
    if isinstance(rule, MinLen):
        return bool(value.strip())
    ge, gt, le, lt = (getattr(rule, name, None) for name in ("ge", "gt", "le", "lt"))
    is_high = (ge is None or value >= ge) and (gt is None or value > gt)
    return is_high and (le is None or value <= le) and (lt is None or value < lt)


def bounds_of(hint: Any) -> list[float]:
    """The bounds in the rules of a type."""
    rules = [rule for _, rules in alternatives(hint) for rule in rules]
    return [getattr(rule, name) for rule in rules for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)]


def is_right(value: Any, hint: Any) -> bool:
    return any(
        has_type(value, kind) and all(obeys(value, rule) for rule in rules) for kind, rules in alternatives(hint)
    )


def readings(text: str) -> list[Any]:
    """The values that a text on the command line may be."""
    values = [text, *{"true": [True], "false": [False], "none": [None]}.get(text.lower(), [])]
    for kind in (int, float):
        with suppress(ValueError):
            values.append(kind(text))
    return values


def remedies(values: list[Any], hint: Any) -> list[str]:
    """What the message contains: the rule that a value of a right type breaks, or else all right types."""
    broken = [
        (value, rule)
        for value in values
        for kind, rules in alternatives(hint)
        for rule in rules
        if has_type(value, kind) and not obeys(value, rule)
    ]
    for _, rule in broken:
        bounds = [getattr(rule, name) for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)]
        return ["it must be", "2**63" if bounds == [2**63] else str(bounds[0])] if bounds else ["it must not be empty"]
    if any(kind is float for kind, _ in alternatives(hint)) and math.inf in map(abs, filter(is_number, values)):
        return ["it must be a finite number"]
    return ["expected", *(WORDS.get(kind) or repr(kind) for kind, _ in alternatives(hint))]


def is_about_a_type(line: str, hint: Any) -> bool:
    """Whether a message is about a wrong type or a bound in it, rather than a rule that involves other settings."""
    bounds = "|".join(re.escape(str(bound)) for bound in bounds_of(hint))
    return "expected" in line or bool(bounds and re.search(rf"it must be .*\b({bounds})(, or None)?$", line))


def refusals(load: Callable[[], Any], name: str, origin: str) -> list[str]:
    """The lines about a setting in the error that `load` raises. It may have others, about settings without a value."""
    try:
        load()
    except ConfigError as error:
        return [line for line in str(error).splitlines() if re.match(rf"{origin}{name}\b", line)]
    return []


def test_all_settings_are_found():
    names = {(cls, name) for cls in CLASSES for name in own_settings(cls)}
    assert {cls.__name__ for cls in CLASSES} >= {"TrainConfig", "SampleConfig", "PlanConfig", "Question", "ChatFields"}
    assert len(names) > 340


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_wrong_value_is_refused_in_one_line_with_a_remedy(cls, write):
    if cls is TranslationConfig:
        pytest.importorskip("babel")  # knows the languages
    has_config_files = tuple[str, ...] not in get_type_hints(cls).values()
    for name, hint in own_settings(cls).items():
        for value in [*VALUES, *(bound + step for bound in bounds_of(hint) for step in (-1, 0, 1))]:
            sources = [
                ("", [value], partial(settings.from_json, cls, {name: value})),
                ("command line: ", readings(str(value)), partial(settings.load, cls, [f"--{name}={value}"])),
            ]
            if has_config_files:
                path = write(f"{name} = {value!r}".replace("inf", "1e999"))
                sources.append(("x.py:1: ", [value], partial(settings.load, cls, [path])))
            for origin, values, load in sources:
                lines = refusals(load, name, origin)
                place = f"{origin}{cls.__name__}.{name}={value!r}: {lines}"
                if any(is_right(value, hint) for value in values):
                    assert not any(is_about_a_type(line, hint) for line in lines), place
                else:
                    assert len(lines) == 1, place
                    assert all(remedy in lines[0] for remedy in remedies(values, hint)), place
