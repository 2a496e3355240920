"""Tunes in ABC notation (https://abcnotation.com/wiki/abc:standard), reduced to the music.

A tune is ASCII text: the fields X, M (meter), L (length of a note without a number) and K (key), followed by the notes.
Titles, sources, transcribers, lyrics and comments are removed.
"""

import re
from collections import Counter
from collections.abc import Iterator

SUFFIXES = (".abc",)
START = re.compile(r"^(?=X:)", re.MULTILINE)
FIELD = re.compile(r"(?![A-Ga-g]:[|:])([A-Za-z+]):(.*)")  # a line may also begin with a last note and a repeat, "A:|"
HEADER = "MLK"  # header fields to keep after X, in this order
MAX_DIGITS = 9  # per number in a meter
NOTES = re.compile(r"[A-Ga-g]")


class TuneError(ValueError):
    """A tune that cannot be used, with the reason."""


def decode(content: bytes) -> str:
    """Decode an ABC file as UTF-8, or else as Latin-1, as in files from the 1990s. Lines end with a line feed."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return re.sub(r"\r\n?", "\n", text)


def split_tunes(text: str, counts: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the number, such as "X:12", and the text of each tune in an ABC file. counts: as in `reduce_tune`."""
    for tune in START.split(text):
        if tune.startswith("X:"):
            yield re.match(r"X: *\d{0,9}", tune)[0], tune
        elif counts is not None:
            counts["text before tunes"] += len(tune)


def reduce_tune(text: str, counts: Counter[str] | None = None) -> str:
    """Return a tune with only the fields X:1, M, L and K and the notes. Raises TuneError unless it has one voice.

    counts: receives the characters of the text by what becomes of them.
    """
    header, body = {"M": "none"}, []
    read: Counter[str] = Counter()
    music = text.partition("\n\n")[0]
    read["text after tunes"] = len(text) - len(music)
    for raw in music.splitlines(keepends=True):
        line = _clean("".join(raw.splitlines()))
        read["comments, spaces, and line ends"] += len(raw) - len(line)
        field = FIELD.match(line)
        is_used = "K" in header if field is None else field[1] in HEADER
        read["used" if is_used else "titles, lyrics, and other fields"] += len(line)
        if field is None:
            if line and is_used:
                body.append(line)
        elif field[1] == "V":
            raise TuneError("it has several voices")
        elif is_used:
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
        raise TuneError("it has characters that are not valid in ABC")
    if counts is not None:
        counts.update(read)
    return tune


def _clean(line: str) -> str:
    """Remove comments and typesetting from a line: continuations, beams, extra spaces."""
    line = re.sub(r"(?<!\\)%.*", "", line).replace("`", "")
    return re.sub(r"[ \t]+", " ", line).lstrip().rstrip(" \\")


def _default_length(meter: str) -> str:
    """Return the value of a missing field L according to the standard. Raises TuneError."""
    fraction = re.fullmatch(r"(\d+)/(\d+)", meter)
    if fraction and max(map(len, fraction.groups())) > MAX_DIGITS:
        raise TuneError(f"its meter, M:, has a number of more than {MAX_DIGITS} digits")
    return "1/16" if fraction and int(fraction[1]) < 0.75 * int(fraction[2]) else "1/8"


def without_spaces(tune: str) -> str:
    """Remove white space from a tune, to compare it with others."""
    return re.sub(r"\s+", "", tune)


def remove_duplicates(tunes: list[str]) -> list[str]:
    """Return the tunes without repetitions, in order."""
    return list({without_spaces(tune): tune for tune in reversed(tunes)}.values())[::-1]
