"""Config files and options (--key=value or --key value), parsed into a typed, frozen dataclass.

A config file holds assignments of constants, arithmetic and names defined above; it is parsed, never run. Files and
options apply from left to right. The dataclass defines the settings, their types and rules, and the --help.
"""

import ast
import difflib
import errno
import functools
import gc
import inspect
import math
import operator
import os
import re
import sys
import textwrap
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, astuple, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen

from folio import UserError
from folio.base import stop_signals
from folio.base.files import is_utf8, read_text, short_repr, shorten
from folio.base.packages import describe_missing
from folio.base.progress import filter_controls, note
from folio.base.streams import open_streams
from folio.base.workers import end_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND_LINE = "command line"
Config = TypeVar("Config", bound="Settings")
NOT_UTF8 = "it is not UTF-8; if it is a path, rename the file or folder"  # libraries such as safetensors need UTF-8
type_hints = functools.cache(get_type_hints)  # a call takes half a millisecond

# Types with rules, for the fields of settings.
INT64 = Lt(2**63)
PositiveInt = Annotated[int, Ge(1), INT64]
NonNegativeInt = Annotated[int, Ge(0), INT64]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Lt(1)]
NonEmptyStr = Annotated[str, MinLen(1)]
CommaSeparated = Sequence[str]  # a repeatable option; tuple[str, ...] is the type of positional arguments


class ConfigError(UserError):
    """Invalid settings, one per line."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of frozen settings dataclasses. A rule for one setting is in its type: `Annotated[int, Ge(1)]`."""

    # setting -> "command line" or "config/x.py:7", by load. Not a field, so not a setting, but copied by replace.
    origins: InitVar[Mapping[str, str] | None] = None
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({})  # name used elsewhere -> setting, for a message
    accepts_any_path: ClassVar[bool] = False  # whether positional arguments may be paths that are not UTF-8

    def __post_init__(self, origins: Mapping[str, str] | None) -> None:
        object.__setattr__(self, "origins", dict(origins or {}))

    def problems(self) -> list[tuple[str, str]]:
        """Violations of rules that involve several settings: (setting, what is wrong and how to fix it) for each.

        Also called if a setting breaks the rules in its type.
        """
        return []

    def with_overrides(self: Config, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> Config:
        """Adapt settings from config files to overrides on the command line. The default changes nothing.

        origins: where each setting was set. overridden: values from config files that the command line replaced.
        """
        return self

    def is_set(self, name: str) -> bool:
        """Whether a setting was set: in a file, on the command line, or in Python to a value other than the default."""
        return name in self.origins or getattr(self, name) != type(self).__dataclass_fields__[name].default

    def is_from_file(self, name: str) -> bool:
        """Whether a setting was set in a config file."""
        return self.origins.get(name, COMMAND_LINE) != COMMAND_LINE

    def replace(self: Config, origins: Mapping[str, str] | None = None, **changes: Any) -> Config:
        """A copy with changes, with the same origins or new ones."""
        return replace(self, **changes, origins=self.origins if origins is None else origins)


def load(cls: type[Config], argv: list[str]) -> Config:
    """Parse the config files and options in `argv`. `--help` prints the settings and exits.

    If the class has a field of type tuple[str, ...], it receives the positional arguments, which then are not config
    files. Raises ConfigError with all problems.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    all_hints = type_hints(cls)
    hints = {field.name: all_hints[field.name] for field in fields(cls)}
    values = {field.name: field.default for field in fields(cls)}
    positional = next((name for name, hint in hints.items() if hint == tuple[str, ...]), None)
    origins: dict[str, str] = {}  # setting -> where it was set
    overridden: dict[str, Any] = {}  # values from config files that the command line replaced
    errors: list[str] = []

    def assign(name: str, value: Any, origin: str, from_text: bool) -> None:
        if name == "config" and not positional:
            errors.append(f"{origin}: name the config file {value} without --config")
            return
        if name not in hints:
            errors.append(f"{origin}: {_not_a_setting(cls, name)}")
            return
        if hints[name] == tuple[str, ...]:
            errors.append(f"{origin}: name the {name} without --{name}")
            return
        if isinstance(value, str) and not is_utf8(value):
            errors.append(f"{origin}: {name}={shorten(value)}: {NOT_UTF8}")
            return
        try:
            converted = _from_text(value, hints[name]) if from_text else convert(value, hints[name])
            if hints[name] == CommaSeparated:
                converted = (*values[name], *converted)
            if from_text and origins.get(name, COMMAND_LINE) != COMMAND_LINE:
                overridden[name] = values[name]
            values[name], origins[name] = converted, origin
        except ValueError:
            errors.append(f"{origin}: {name}={shorten(str(value))}: expected {_describe(hints[name])}")

    for option, text in _split_options(argv, hints, errors):
        if option:
            assign(option, text, COMMAND_LINE, from_text=True)
        elif not (is_utf8(text) or cls.accepts_any_path):
            errors.append(f"{COMMAND_LINE}: {shorten(text)}: {NOT_UTF8}")
        elif positional:
            values[positional] += (text,)
            origins[positional] = COMMAND_LINE
        elif (path := find_config(text)) is None:
            errors.append(_no_such_file(text, hints))
        else:
            try:
                for name, value, line in _assignments(path, text, values):
                    assign(name, value, f"{text}:{line}", from_text=False)
            except ConfigError as error:
                errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    config = cls(**values, origins=origins).with_overrides(origins, overridden)
    check(config)
    return config


def parse_setting(cls: type[Config], name: str, text: str) -> Any:
    """Parse the value of one setting as on the command line. Raises ConfigError."""
    annotated_hints, hints = type_hints(cls, include_extras=True), type_hints(cls)
    if name not in setting_names(cls):
        raise ConfigError(_not_a_setting(cls, name))
    try:
        value = _from_text(text, hints[name])
    except ValueError:
        raise ConfigError(f"{name}={text}: expected {_describe(hints[name])}") from None
    if rule := broken_rule(value, annotated_hints[name]):
        raise ConfigError(f"{name}={text}: {rule}")
    return value


def split_arguments(cls: type[Settings], others: type[Settings], argv: list[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into options for fields of `cls`, as --name=value, and all other arguments, for `others`.

    Raises ConfigError for an option that is not of the form --name=value or --name value.
    """
    errors: list[str] = []
    hints = {**get_type_hints(others), **get_type_hints(cls)}
    own, rest = [], []
    for name, text in _split_options(argv, hints, errors):
        argument = f"--{name}={text}" if name else text
        (own if name in setting_names(cls) else rest).append(argument)
    if errors:
        raise ConfigError("\n".join(errors))
    return own, rest


def from_json(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """Settings from JSON values. Unknown names are ignored; missing ones have their defaults.

    Raises ConfigError if a value has the wrong type or breaks a rule.
    """
    hints = type_hints(cls)
    typed = {}
    for name in values.keys() & setting_names(cls):
        try:
            typed[name] = convert(values[name], hints[name])
        except ValueError:
            raise ConfigError(f"{name}={short_repr(values[name])}: expected {_describe(hints[name])}") from None
    config = cls(**typed)
    check(config)
    return config


def setting_names(cls: type[Settings]) -> list[str]:
    """The names of a class's settings, without its class variables."""
    return [field.name for field in fields(cls)]


def _not_a_setting(cls: type[Settings], name: str) -> str:
    setting = cls.other_names.get(name)
    hint = f"; write --{setting}" if setting else _did_you_mean(name, setting_names(cls))
    return f"{shorten(name)} is not a setting{hint}"


def _split_options(argv: list[str], hints: Mapping[str, Any], errors: list[str]) -> Iterator[tuple[str | None, str]]:
    """Yield each option's name and value, and (None, argument) for each other argument.

    --key value is the same as --key=value, and a boolean option without a value means True. Messages about malformed
    options are appended to `errors`.
    """
    remaining = deque(argv)
    while remaining:
        argument = remaining.popleft()
        name, equals, text = argument.lstrip("-").partition("=")
        next_argument = remaining[0] if remaining else "--"
        if not argument.startswith("-") or argument == "-":
            yield None, argument
        elif not argument.startswith("--"):
            errors.append(f"{COMMAND_LINE}: write --{name}=VALUE instead of {argument}")
        elif equals:
            yield name, text
        elif bool in _options(hints.get(name)) and not _is_value(next_argument, hints[name]):
            yield name, "True"
        elif next_argument.startswith("--") and name in hints:
            errors.append(f"{COMMAND_LINE}: --{name} needs a value: --{name}=VALUE")
        elif next_argument.startswith("--"):
            yield name, ""
        else:
            yield name, remaining.popleft()


def check(config: Settings) -> None:
    """Raise ConfigError with all broken rules, each with the setting's value and origin.

    If a setting breaks the rule in its type, its other problems are not reported.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    hints = type_hints(type(config), include_extras=True)
    broken = {name: rule for name, value in values.items() if (rule := broken_rule(value, hints[name]))}
    problems = [*broken.items(), *(problem for problem in config.problems() if problem[0] not in broken)]
    if problems:
        raise ConfigError("\n".join(_describe_setting(config, name) + problem for name, problem in problems))


def _describe_setting(config: Settings, name: str) -> str:
    """The start of a message about a setting: its origin, unless it is a default, its name and its value."""
    value = getattr(config, name)
    if isinstance(value, tuple):
        value = " ".join(value) or None
    shown = f"{name}: " if value is None else f"{name}={shorten(str(value))}: "
    return f"{config.origins[name]}: {shown}" if name in config.origins else shown


BOUNDS = {  # rule -> the comparison of a value with its bound, and words for it
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "less than"),
}


def broken_rule(value: Any, hint: Any) -> str | None:
    """Describe the rules of a type that `value` breaks; None if it breaks none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be a finite number"
    options = _options(hint)
    extras = [extra for option in options if get_origin(option) is Annotated for extra in option.__metadata__]
    if value is None:
        return None
    if any(isinstance(extra, MinLen) for extra in extras) and not value.strip():
        return "it must not be empty"
    bounds = [(*BOUNDS[type(rule)], *astuple(rule)) for rule in extras if type(rule) in BOUNDS]
    if all(obeys(value, bound) for obeys, _, bound in bounds):
        return None
    if INT64 in extras and value >= INT64.lt:
        return "it must be less than 2**63"
    shown = [f"{words} {bound}" for _, words, bound in bounds if bound != INT64.lt]
    return f"it must be {' and '.join(shown)}{', or None' if type(None) in options else ''}"


def run_script(main: Callable[[Any], Any], cls: type | None = None, needs_output: bool = True) -> None:
    """Call `main` with settings of class `cls` from the command line, or, without a class, with the arguments.

    For a UserError, prints its message and exits with its code; likewise for a path whose name is too long or whose
    folder is not accessible, and for a package that is not installed. A signal that stops the script raises
    KeyboardInterrupt; a line names it, and the exit status is 128 plus its number.

    needs_output: False if the result is in files or the script is a server, so that it continues if standard output
    cannot be written, for example because a `tee` that reads it has ended.
    """
    gc.freeze()  # excludes imported modules from full collections, which scan torch's objects for 60 ms each
    open_streams(needs_output)
    sys.stdout = filter_controls(sys.stdout)
    end_with_parent()
    with stop_signals.raised():
        try:
            try:
                main(load(cls, sys.argv[1:]) if cls else sys.argv[1:])
            finally:
                sys.stdout.flush()  # here, a failure is handled
        except UserError as error:
            note(f"error: {error}")
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt as error:
            line_break = "\n" if sys.stderr.isatty() else ""  # after ^C
            note(f"{line_break}{stop_signals.describe(error)}")
            raise SystemExit(128 + stop_signals.number_of(error)) from None
        except BrokenPipeError:  # the reader of the output has ended
            raise SystemExit(1) from None
        except ModuleNotFoundError as error:
            if (line := describe_missing(error.name)) is None:
                raise
            note(f"error: {line}")
            raise SystemExit(UserError.exit_code) from None
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.EACCES) or error.filename is None:
                raise
            note(f"error: {shorten(str(error.filename))}: {error.strerror}")
            raise SystemExit(UserError.exit_code) from None


# --- files ------------------------------------------------------------------------------------------------------------


def find_config(name: str) -> Path | None:
    """The path of a config file, relative to the working directory or else to Folio's folder."""
    return next((path for path in (Path(name), ROOT / name) if os.path.isfile(path)), None)


def read_config(name: str) -> dict[str, Any]:
    """The assignments of a config file. Raises ConfigError."""
    return {setting: value for setting, value, _ in _assignments(find_config(name), name, {})}


NANOGPT_CONFIGS = {  # nanoGPT's config files and their replacements
    "train_shakespeare_char.py": "config/nanogpt_char.py, nanoGPT's recipe, or config/shakespeare_char.py",
    "train_gpt2.py": "config/gpt2_124m.py",
    "eval_gpt2.py": "--init_from=gpt2 --dataset=openwebtext --eval_only=True",
    "eval_gpt2_medium.py": "--init_from=gpt2-medium --dataset=openwebtext --eval_only=True",
    "eval_gpt2_large.py": "--init_from=gpt2-large --dataset=openwebtext --eval_only=True",
    "eval_gpt2_xl.py": "--init_from=gpt2-xl --dataset=openwebtext --eval_only=True",
}


def _no_such_file(name: str, hints: Mapping[str, Any]) -> str:
    if "out_dir" in hints and name and os.path.isdir(name):
        return f"{COMMAND_LINE}: {name} is a folder, not a config file; name a run with --out_dir={name}"
    if "init_from" in hints and (replacement := NANOGPT_CONFIGS.get(Path(name).name)):
        return f"{COMMAND_LINE}: no config file {shorten(name)} exists; write {replacement}"
    if name.partition("=")[0] in hints:
        return f"{COMMAND_LINE}: no config file {shorten(name)} exists; to change the setting, write --{shorten(name)}"
    known = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "config").glob("*.py"))]
    hint = _did_you_mean(name, known) or f"; Folio has {', '.join(known)}"
    return f"{COMMAND_LINE}: no config file {shorten(name)} exists{hint}"


_CONFIG_RULE = "a config file holds assignments of constants, arithmetic and names defined above"
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


def _assignments(path: Path, shown: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield the assignments (name, value, line) of a config file. Raises ConfigError at the first invalid line.

    shown: the path in messages. values: names that expressions may use.
    """
    scope, lines, line = dict(values), {}, 1
    try:
        for node in ast.parse(read_text(path)).body:
            line, targets = node.lineno, []
            match node:
                case ast.Expr(ast.Constant(str())) | ast.Import([ast.alias("time", None)]):
                    continue  # a docstring, and what nanoGPT's finetune_shakespeare.py does before str(time.time())
                case ast.Assign(targets, expression):
                    pass
                case ast.AnnAssign(target, _, ast.expr() as expression):
                    targets = [target]
            if not targets or not all(isinstance(target, ast.Name) for target in targets):
                raise ValueError(f"{_source(node)} is not an assignment to a setting")
            value = _evaluate(expression, scope)
            str(value)  # raises ValueError for an integer of thousands of digits, which messages could not show
            for name in (target.id for target in targets):
                scope[name] = value
                if name in lines:
                    raise ConfigError(f"{shown}:{line}: line {lines[name]} also sets {name}; remove one of the two")
                if not name.startswith("_"):
                    lines[name] = line
                    yield name, value, line
    except SyntaxError as error:
        raise ConfigError(f"{shown}:{error.lineno or 1}: this is not Python: {error.msg}; {_CONFIG_RULE}") from None
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        problem = shorten(str(error)) or "an expression is too long"
        raise ConfigError(f"{shown}:{line}: {problem}; {_CONFIG_RULE}") from None


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Evaluate a constant expression. Raises ValueError for any other, and what its operators raise."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in scope:
            return scope[name]
        case ast.Name():
            raise ValueError(f"{_source(node)} is not defined above")
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, scope))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, scope), _evaluate(right, scope))
        case ast.Call() if ast.unparse(node) == "str(time.time())":
            return str(time.time())
    raise ValueError(f"{_source(node)} is not a constant")


def _source(node: ast.AST) -> str:
    """The first line of a statement or expression, for a message."""
    return f"`{shorten(ast.unparse(node).splitlines()[0], 100)}`"


# --- types ------------------------------------------------------------------------------------------------------------


def line_breaks(text: str) -> str:
    """Replace \\n, \\r, and \\t, as typed in a shell, by line ends and tabs."""
    return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


def comma_separated(text: str) -> list[str]:
    """Split a list setting at commas, without empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_paths(text: str) -> list[str]:
    """Split a list setting into paths. An existing file or folder is one path, even if its name has a comma."""
    return [text] if os.path.exists(text) else comma_separated(text)


def _options(hint: Any) -> tuple[Any, ...]:
    """The options of a union, which may be annotated as a whole, or the only type."""
    if get_origin(hint) is Annotated and get_origin(hint.__origin__) in (Union, types.UnionType):
        hint = hint.__origin__
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def convert(value: Any, hint: Any) -> Any:
    """Convert a value from JSON or a config file to a type: 1 to a float, 5e3 to an integer. Raises ValueError.

    hint: Any, a class, a Literal of strings, an Annotated type, whose rules must hold, or a union, list, tuple, dict or
    TypedDict of these. A bool is not a number. A tuple is a list in JSON. A TypedDict may have additional keys.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        converted = convert(value, arguments[0])
        if broken_rule(converted, hint) is None:
            return converted
    elif kind in (Union, types.UnionType):
        for option in arguments:
            with suppress(ValueError):
                return convert(value, option)
    elif is_typeddict(hint) and isinstance(value, dict) and value.keys() >= hint.__required_keys__:
        hints = type_hints(hint, include_extras=True)
        return {name: convert(item, hints.get(name, Any)) for name, item in value.items()}
    elif kind is dict and isinstance(value, dict):
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    elif kind is list and isinstance(value, list):
        return [convert(item, arguments[0]) for item in value]
    elif kind is tuple and isinstance(value, list) and len(value) == len(arguments):
        return [*map(convert, value, arguments)]
    elif hint == CommaSeparated and isinstance(value, str):
        return (*comma_separated(value),)
    elif hint is float and type(value) in (int, float):
        with suppress(OverflowError):
            return float(value)
    elif hint is int and type(value) is float and value.is_integer():
        return int(value)
    elif hint is Any or type(value) is hint or (kind is Literal and type(value) is str and value in arguments):
        return value
    raise ValueError(value)


def _from_text(text: str, hint: Any) -> Any:
    """Parse a value from the command line. Raises ValueError."""
    options = _options(hint)
    if type(None) in options and text.lower() == "none":
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if CommaSeparated in options:
        return convert(text, hint)
    if str in options or any(get_origin(option) is Literal and text in get_args(option) for option in options):
        return text
    return convert(float(text) if re.search(r"[.einf]", text, re.IGNORECASE) else int(text), hint)


def _is_value(text: str, hint: Any) -> bool:
    """Whether text from the command line is a value of this type."""
    try:
        _from_text(text, hint)
    except ValueError:
        return False
    return True


def _describe(hint: Any) -> str:
    words = {int: "an integer", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    words[CommaSeparated] = "text, with commas between several values"
    names: list[str] = []
    for option in _options(hint):
        names += [repr(o) for o in get_args(option)] if get_origin(option) is Literal else [words[option]]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- help -------------------------------------------------------------------------------------------------------------


class DescribedField(NamedTuple):
    """A field of a settings dataclass, as its source describes it."""

    name: str
    group: str  # the comment heading above it, or ""
    default: str  # as it is typed
    description: tuple[str, ...]  # the lines of its comment
    is_positional: bool


def describe_fields(cls: type) -> list[DescribedField]:
    """The fields of a settings dataclass in the order of the source, those of its base classes last."""
    described: list[DescribedField] = []
    names, group = set(setting_names(cls)), ""
    bases = [base for base in cls.__mro__ if is_dataclass(base)]  # an overridden field is shown with the subclass
    for line in "\n".join(textwrap.dedent(inspect.getsource(base)) for base in bases).splitlines():
        heading = re.match(r"    # --- (.*?) -*$", line)
        field = re.match(r"    (\w+): .*? = (.*?)(?:  # (.*))?$", line)
        if heading:
            group = heading[1]
        elif field and field[1] in names:
            names.remove(field[1])
            is_constant = re.fullmatch(r"[A-Z]\w*\.\w+", field[2])
            default = repr(getattr(cls, field[1])) if is_constant else field[2].replace("()", "")
            comment = (field[3],) if field[3] else ()
            described.append(DescribedField(field[1], group, default, comment, "tuple[" in line))
        elif described and (continuation := re.match(r"      +# (.*)", line)):
            last = described[-1]
            described[-1] = last._replace(description=(*last.description, continuation[1]))
    return described


def help_text(cls: type) -> str:
    """The script's docstring and the fields of its dataclass, grouped under their comment headings as in the source."""
    lines, group = [inspect.cleandoc(sys.modules[cls.__module__].__doc__ or ""), ""], ""
    for field in describe_fields(cls):
        if field.group != group:
            group = field.group
            lines.append(f"\n{group}:")
        usage = f"{field.name.upper()} ..." if field.is_positional else f"--{field.name}={field.default}"
        first, *others = field.description or ("",)
        lines.append(f"  {usage:42} {first}".rstrip())
        lines += [" " * 43 + line for line in others]
    return "\n".join(lines)
