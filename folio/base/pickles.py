"""Checks a foreign pickle opcode by opcode before it is loaded.

The check traces the opcodes without executing them: nothing is called, and a shared value is not copied.
"""

import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from folio.base.files import short_repr

MAX_OPCODES = 1 << 20
MAX_DEPTH = 50  # of nested values
MAX_VALUES = 1 << 20  # a shared value counts at each occurrence, as when it is printed or compared

ORDERED_DICT = "collections OrderedDict"
SCALARS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE"),
    *("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "GLOBAL"),
}
EMPTY = {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"}
# Number of values that an opcode pops from the stack; None: all after the last MARK.
CREATES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "BINPERSID": 1, "REDUCE": 2}
EXTENDS = {"APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "BUILD": 1}  # the value below them
DICTS = {"PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "SETITEM", "SETITEMS"}
MEMO = {"MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
PLAIN = DICTS | MEMO | {"BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE"}  # dicts, strings and integers
ALL = DICTS | MEMO | SCALARS | EMPTY | CREATES.keys() | EXTENDS.keys()  # the opcodes that torch.save writes


class PickledValues(list):
    """The values of a list, dict or tuple, or the arguments of an object's constructor."""


@dataclass
class Content:
    """The content of a pickle."""

    value: Any = None  # PickledValues, a scalar, or the name of a global as "MODULE NAME"
    persistent: list[PickledValues] = field(default_factory=list)  # persistent ids, which refer to the data of tensors


def check(file: BinaryIO, opcodes: Collection[str] = ALL, names: Collection[str] = ()) -> Content:
    """Read one pickle and return its content. opcodes, names: the allowed opcodes and globals.

    Raises ValueError for any other opcode or global, for a key that is not a scalar (hashing a nested tuple can take
    exponential time), and for too many or too deeply nested values.
    """
    content = Content()
    memo: dict[int, Any] = {}
    outer: list[PickledValues] = []  # the stacks before each MARK
    stack = PickledValues()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            name = opcode.name
            if name not in opcodes or (name == "GLOBAL" and argument not in names):
                raise ValueError(f"it uses {name if name not in opcodes else short_repr(argument)}")
            if count == MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES:,} opcodes")
            if name in SCALARS:
                stack.append(argument)
            elif name in EMPTY:
                stack.append(PickledValues())
            elif name in CREATES:
                values = PickledValues(_pop(stack, CREATES[name])) if CREATES[name] else stack
                stack = stack if CREATES[name] else outer.pop()
                if name == "BINPERSID":
                    content.persistent.append(values)
                elif name == "REDUCE" and values[0] == ORDERED_DICT and values[1]:
                    raise ValueError("it makes an OrderedDict from items")
                stack.append(values)
            elif name in EXTENDS:
                values = _pop(stack, EXTENDS[name]) if EXTENDS[name] else stack
                stack = stack if EXTENDS[name] else outer.pop()
                if name.startswith("SETITEM") and any(isinstance(key, PickledValues) for key in values[::2]):
                    raise ValueError("a key of a dict is not a string or a number")
                stack[-1].extend(values)
            elif name == "MARK":
                outer.append(stack)
                stack = PickledValues()
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name.endswith("PUT"):
                if argument > count:  # the unpickler allocates that many entries
                    raise ValueError(f"it uses {name} with the index {argument:,}")
                memo[argument] = stack[-1]
            elif name.endswith("GET"):
                stack.append(memo[argument])
        content.value = stack.pop()
    except (LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    _check_size(content.value)
    return content


def _pop(stack: PickledValues, count: int) -> PickledValues:
    """Pop the last `count` values from the stack. Raises IndexError if it has fewer."""
    values = stack[-count:]
    if len(values) < count:
        raise IndexError
    del stack[-count:]
    return values


def _check_size(root: Any) -> None:
    """Raise ValueError if a value is nested too deeply or has too many values, or contains itself."""
    sizes: dict[int, tuple[int, int]] = {}  # by id: values and depth
    path: set[int] = set()  # ids of the last value in `remaining` and of the values that contain it
    remaining = [root] if isinstance(root, PickledValues) else []
    while remaining:
        values = remaining[-1]
        if id(values) in sizes:
            remaining.pop()
            continue
        inner = [value for value in values if isinstance(value, PickledValues)]
        if id(values) not in path:
            path.add(id(values))
            if any(id(value) in path for value in inner):
                raise ValueError("a value contains itself")
            remaining += [value for value in inner if id(value) not in sizes]
        else:
            path.remove(id(values))
            size = len(values) + sum(sizes[id(value)][0] for value in inner)
            depth = 1 + max((sizes[id(value)][1] for value in inner), default=0)
            if size > MAX_VALUES or depth > MAX_DEPTH:
                raise ValueError("its values are nested too deeply" if depth > MAX_DEPTH else "it has too many values")
            sizes[id(values)] = size, depth
