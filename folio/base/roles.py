"""The roles of train.py's settings: what a setting is about decides how every command treats it.

A field of TrainConfig names its role around its type: `n_layer: Fixed[PositiveInt] = 12`. A setting without a role is
part of the recipe: it may change when a run is resumed, and is shown wherever runs differ in it.
"""

from enum import Flag, auto
from functools import cache
from typing import Annotated, TypeVar, get_args

from folio.base.settings import Settings, setting_names, type_hints

T = TypeVar("T")


class Role(Flag):
    """What a setting is about."""

    COMMAND = auto()  # this command, not the run; a resumed run does not take it from its checkpoint
    INITIAL = auto()  # the weights that the run starts from; a resumed run starts from its checkpoint
    PLACE = auto()  # a place on this machine; the run is the same elsewhere
    DATA = auto()  # the name of the data, whose content is compared when a run is resumed
    FIXED = auto()  # the model or the order of the sequences, which cannot change when a run is resumed
    SEED = auto()  # as FIXED, but repetitions of a run differ in it
    BATCH = auto()  # the division of a step's sequences, whose number cannot change when a run is resumed
    BUDGET = auto()  # the time of the run, to which only the command line can add when the run is resumed
    ROUNDING = auto()  # how numbers are computed; after a change, the run is no longer bitwise identical
    MACHINE = auto()  # where they are computed; what it was resolved to is compared when a run is resumed
    OUTPUT = auto()  # what the run writes, and when; no effect on its weights


Command = Annotated[T, Role.COMMAND]
Initial = Annotated[T, Role.INITIAL]
Place = Annotated[T, Role.PLACE]
Data = Annotated[T, Role.DATA]
Fixed = Annotated[T, Role.FIXED]
Seed = Annotated[T, Role.SEED]
Batch = Annotated[T, Role.BATCH]
Budget = Annotated[T, Role.BUDGET]
Rounding = Annotated[T, Role.ROUNDING]
Machine = Annotated[T, Role.MACHINE]
Output = Annotated[T, Role.OUTPUT]

# When a run is resumed:
OF_THE_COMMAND = Role.COMMAND | Role.INITIAL  # not taken from the checkpoint
UNCHANGEABLE = Role.FIXED | Role.SEED  # another value on the command line is an error
KEPT = UNCHANGEABLE | Role.BATCH | Role.DATA | Role.BUDGET  # the checkpoint's value, not a config file's
UNREPORTED = OF_THE_COMMAND | Role.PLACE | Role.DATA  # a change is not mentioned
INEXACT = Role.BATCH | Role.ROUNDING  # after a change, the run is no longer bitwise identical
# When runs are compared:
UNLISTED = Role.COMMAND | Role.PLACE | Role.OUTPUT  # not in lists of different settings
UNCOMPARED = UNLISTED | Role.SEED  # not a difference between two groups of runs
WITHOUT_EFFECT = UNCOMPARED | Role.DATA | Role.BUDGET | Role.ROUNDING | Role.MACHINE  # on losses, up to their noise
UNVARIED = Role.COMMAND | Role.PLACE | Role.SEED | Role.BUDGET  # not varied by a sweep


@cache
def role_of(cls: type[Settings], name: str) -> Role:
    """The role of a setting; Role(0) if it has none."""
    hint = type_hints(cls, include_extras=True)[name]
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Role)), Role(0))


def names_with(cls: type[Settings], roles: Role) -> list[str]:
    """The settings with one of the roles, in the order of the class."""
    return [name for name in setting_names(cls) if role_of(cls, name) & roles]


def names_without(cls: type[Settings], roles: Role) -> list[str]:
    """The settings with none of the roles, in the order of the class."""
    return [name for name in setting_names(cls) if not role_of(cls, name) & roles]
