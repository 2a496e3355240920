"""Config files and --key=value arguments, turned into a typed, frozen dataclass.

A config file holds assignments of constants, arithmetic and names above them; it is parsed, never run. Files and
arguments apply from left to right. The dataclass is the list of settings, their types and the text of --help.
"""

import ast
import difflib
import inspect
import math
import operator
import os
import re
import sys
import textwrap
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from folio import UserError

ROOT = Path(__file__).resolve().parent.parent
COMMAND_LINE = "command line"
Config = TypeVar("Config", bound="Settings")


class ConfigError(UserError):
    """Settings that cannot be used; a line each."""


class Settings:
    """Base of the dataclasses of settings, frozen themselves. `load` adds where each setting was set."""

    origins: ClassVar[Mapping[str, str]] = MappingProxyType({})  # setting -> "command line", "config/x.py:7"

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to fix it) for everything that cannot work."""
        return []

    def following(self: Config, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> Config:
        """These settings, with those changed that a config file set for a value that the command line overrides.

        origins: where each setting was set. overridden: what a config file had set, by setting.
        """
        return self


def load(cls: type[Config], argv: list[str]) -> Config:
    """The configuration that `argv` asks for: config files and --key=value. `--help` prints the settings and exits.

    If the class has a field of type tuple[str, ...], words that are not --key=value go there, in place of config files.
    Everything that the class's `problems` finds is reported together. Raises ConfigError.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    types_of = get_type_hints(cls)
    hints = {field.name: types_of[field.name] for field in fields(cls)}
    values = {field.name: field.default for field in fields(cls)}
    words = next((name for name, hint in hints.items() if hint == tuple[str, ...]), None)
    origins: dict[str, str] = {}  # setting -> where it was set
    overridden: dict[str, Any] = {}  # what a config file had set, and the command line set again
    errors: list[str] = []

    def assign(name: str, value: Any, origin: str, from_text: bool) -> None:
        if name not in hints:
            errors.append(f"{origin}: there is no setting {name}{_did_you_mean(name, hints)}")
            return
        if hints[name] == tuple[str, ...]:
            errors.append(f"{origin}: name the {name} without --{name}=")
            return
        try:
            new = _from_text(value, hints[name]) if from_text else _coerce(value, hints[name])
            if from_text and origins.get(name, COMMAND_LINE) != COMMAND_LINE:
                overridden[name] = values[name]
            values[name], origins[name] = new, origin
        except (ValueError, OverflowError):
            errors.append(f"{origin}: {name}={value}: it takes {_describe(hints[name])}")

    for argument in argv:
        if words and (not argument.startswith("-") or argument == "-"):
            values[words] += (argument,)
            origins[words] = COMMAND_LINE
        elif argument.startswith("-"):
            name, equals, text = argument.lstrip("-").partition("=")
            if equals and argument.startswith("--"):
                assign(name, text, COMMAND_LINE, from_text=True)
            else:
                errors.append(f"command line: write --{name}=VALUE in place of {argument}")
        elif (path := _find_config(argument)) is None:
            errors.append(_no_such_file(argument, argv))
        else:
            for name, value, line in _parse(path, argument, values, errors):
                assign(name, value, f"{argument}:{line}", from_text=False)
    if errors:
        raise ConfigError("\n".join(errors))
    config = cls(**values).following(origins, overridden)
    object.__setattr__(config, "origins", MappingProxyType(origins))
    check(config)
    return config


def check(config: Settings) -> None:
    """Raise ConfigError with all of the config's problems, each with the setting's value and where it was set."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    problems = [
        (name, "it must be a finite number")
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    lines = [
        f"{config.origins.get(name, 'default')}: {name}={values[name]}: {problem}"
        for name, problem in problems or config.problems()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def run_script(main: Callable[[Any], Any], cls: type | None = None) -> None:
    """Call `main` with the settings that the command line asks for, or, without a class, with its words.

    A UserError prints its message and exits with its code.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # Windows' consoles have encodings of their own
    try:
        main(load(cls, sys.argv[1:]) if cls else sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


# --- files ------------------------------------------------------------------------------------------------------------


def _find_config(name: str) -> Path | None:
    """A config file by its path from here, or else from Folio's folder."""
    return next((path for path in (Path(name), ROOT / name) if path.is_file()), None)


def _no_such_file(name: str, argv: list[str]) -> str:
    before = argv[argv.index(name) - 1] if argv.index(name) else ""
    if before.startswith("--") and "=" not in before:
        return f"command line: write {before}={name} as one word"
    known = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "config").glob("*.py"))]
    hint = _did_you_mean(name, known) or f"; there are {', '.join(known)}"
    return f"command line: there is no config file {name}{hint}"


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


def _parse(path: Path, shown: str, values: dict[str, Any], errors: list[str]) -> list[tuple[str, Any, int]]:
    """The assignments (name, value, line) of a config file; what is wrong with others goes to `errors`."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=shown)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        errors.append(f"{shown}:{line}: this is not Python: {getattr(error, 'msg', error)}")
        return []
    scope, found = dict(values), []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring
        if ast.unparse(node) == "import time":
            continue  # nanoGPT's finetune_shakespeare.py names its wandb run with str(time.time())
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else []
        try:
            if not targets or not all(isinstance(target, ast.Name) for target in targets):
                raise ValueError(f"`{ast.unparse(node).splitlines()[0]}` is not an assignment to a setting")
            value = _evaluate(node.value, scope)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            rule = "a config file holds assignments of constants, arithmetic and names above"
            errors.append(f"{shown}:{node.lineno}: {error}; {rule}")
            continue
        for target in targets:
            scope[target.id] = value
            if not target.id.startswith("_"):
                found.append((target.id, value, node.lineno))
    return found


def _evaluate(node: ast.expr, scope: dict[str, Any]) -> Any:
    """The value of a constant expression. Raises ValueError for anything that is not one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, type(None))):
        return node.value
    if ast.unparse(node) == "str(time.time())":
        return str(time.time())
    if isinstance(node, ast.Name):
        if node.id not in scope:
            raise ValueError(f"`{node.id}` is not defined above")
        return scope[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand, scope))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, scope), _evaluate(node.right, scope)
        numbers = all(isinstance(side, (int, float)) and abs(side) < 1e18 for side in (left, right))
        joined = isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str)
        if not (numbers or joined) or (isinstance(node.op, ast.Pow) and abs(right) > 64):
            raise ValueError(f"`{ast.unparse(node)}` is not arithmetic with numbers of a usual size")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"`{ast.unparse(node)}` is not a constant")


# --- types ------------------------------------------------------------------------------------------------------------


def line_breaks(text: str) -> str:
    """The text with each \\n, as one types it in a shell, made a line break."""
    return text.replace("\\n", "\n")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _coerce(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` means it: 1 is a float where one is asked for, 5e3 an integer. Raises ValueError."""
    for option in _options(hint):
        if get_origin(option) is Literal:
            if value in get_args(option) and isinstance(value, str):
                return value
        elif option is type(None):
            if value is None:
                return None
        elif isinstance(value, bool) or option is bool:
            if isinstance(value, bool) and option is bool:
                return value
        elif option is int and isinstance(value, (int, float)) and value == value // 1:
            return int(value)
        elif option is float and isinstance(value, (int, float)):
            return float(value)
        elif option is str and isinstance(value, str):
            return value
    raise ValueError


def _from_text(text: str, hint: Any) -> Any:
    """A value from the command line. Raises ValueError."""
    options = _options(hint)
    if type(None) in options and text.lower() == "none":
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if str in options or any(get_origin(option) is Literal and text in get_args(option) for option in options):
        return text
    return _coerce(float(text) if re.search(r"[.einf]", text, re.IGNORECASE) else int(text), hint)


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    names: list[str] = []
    for option in _options(hint):
        names += [repr(o) for o in get_args(option)] if get_origin(option) is Literal else [words[option]]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- help -------------------------------------------------------------------------------------------------------------


def help_text(cls: type) -> str:
    """The script's docstring and the fields of its dataclass, grouped under their comment headings as in the source."""
    lines = [inspect.cleandoc(sys.modules[cls.__module__].__doc__ or ""), ""]
    names = {field.name for field in fields(cls)}
    bases = [base for base in cls.__mro__ if is_dataclass(base)]  # what a class sets anew is shown where it does so
    for line in "\n".join(textwrap.dedent(inspect.getsource(base)) for base in bases).splitlines():
        heading = re.match(r"    # --- (.*?) -*$", line)
        field = re.match(r"    (\w+): .*? = (.*?)(?:  # (.*))?$", line)
        if heading:
            lines.append(f"\n{heading[1]}:")
        elif field and field[1] in names:
            names.remove(field[1])
            shown = f"{field[1].upper()} ..." if "tuple[" in line else f"--{field[1]}={field[2]}"
            lines.append(f"  {shown:42} {field[3] or ''}".rstrip())
        elif more := re.match(r"      +# (.*)", line):
            lines.append(" " * 43 + more[1])
    return "\n".join(lines)
