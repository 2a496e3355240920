"""Tunes in ABC notation (https://abcnotation.com/wiki/abc:standard), reduced to what is music.

A tune is a text of ASCII characters: the fields X, M (meter), L (length of a note without a number) and K (key), then
the notes. Titles, sources, transcribers, lyrics and comments are left out.
"""

import re
from collections.abc import Iterator

SUFFIXES = (".abc",)
START = re.compile(r"^(?=X:)", re.MULTILINE)
FIELD = re.compile(r"(?![A-Ga-g]:[|:])([A-Za-z+]):(.*)")  # a line may also begin with a last note and a repeat, "A:|"
HEADER = "MLK"  # the fields of the header that are kept, in this order, after X
MAX_DIGITS = 9  # of a number in a meter
NOTES = re.compile(r"[A-Ga-g]")


class TuneError(ValueError):
    """A tune that cannot be used: the reason."""


def decode(content: bytes) -> str:
    """The text of an ABC file: UTF-8, or else Latin-1, as in files of the 1990s. Lines end with a line feed."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return re.sub(r"\r\n?", "\n", text)


def split_tunes(text: str) -> Iterator[tuple[str, str]]:
    """Each tune of an ABC file: its number, such as "X:12", and its whole text."""
    for tune in START.split(text):
        if tune.startswith("X:"):
            yield re.match(r"X: *\d{0,9}", tune)[0], tune


def reduce_tune(text: str) -> str:
    """A tune with the fields X:1, M, L and K and its notes only. Raises TuneError if it is not one for one voice."""
    header, body = {"M": "none"}, []
    for line in filter(None, map(_clean, text.partition("\n\n")[0].splitlines())):
        field = FIELD.match(line)
        if field is None:
            if "K" in header:
                body.append(line)
        elif field[1] == "V":
            raise TuneError("it has several voices")
        elif field[1] in HEADER:
            value = " ".join(field[2].split())
            if "K" in header:
                body.append(f"{field[1]}:{value}")
            else:
                header[field[1]] = value
    if "K" not in header:
        raise TuneError("it has no key, K:")
    header.setdefault("L", _default_length(header["M"]))
    tune = "\n".join(["X:1", *(f"{name}:{header[name]}" for name in HEADER), *body, ""])
    if not NOTES.search("".join(line for line in body if not FIELD.match(line))):
        raise TuneError("it has no notes")
    if not (tune.isascii() and tune.replace("\n", "").isprintable()):
        raise TuneError("it has characters that are not ABC's")
    return tune


def _clean(line: str) -> str:
    """A line without its comment, and without what only concerns typesetting: continuation, beams, extra spaces."""
    line = re.sub(r"(?<!\\)%.*", "", line).replace("`", "")
    return re.sub(r"[ \t]+", " ", line).lstrip().rstrip(" \\")


def _default_length(meter: str) -> str:
    """The length of a note without a number if there is no field L: the standard's rule. Raises TuneError."""
    fraction = re.fullmatch(r"(\d+)/(\d+)", meter)
    if fraction and max(map(len, fraction.groups())) > MAX_DIGITS:
        raise TuneError(f"its meter, M:, has a number of more than {MAX_DIGITS} digits")
    return "1/16" if fraction and int(fraction[1]) < 0.75 * int(fraction[2]) else "1/8"


def without_spaces(tune: str) -> str:
    """The tune without white space: tunes that are equal in this form are the same."""
    return re.sub(r"\s+", "", tune)


def distinct(tunes: list[str]) -> list[str]:
    """The tunes without repetitions, in order."""
    return list({without_spaces(tune): tune for tune in reversed(tunes)}.values())[::-1]
