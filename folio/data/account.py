"""The account of an input: everything that was read is used, or is left out with a reason and a count."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from folio import UserError
from folio.base.number_format import counted
from folio.data.tokenizer import EOT_TEXT

UNUSED_FIELDS = "unused fields"  # the unit whose categories are names from the input: nothing adds up to them
IN = "in"  # the category of what entered, counted at the door; the other categories of a unit add up to it
MAX_NAMED = 8  # reasons or fields per printed line; report.json lists all


class Account:
    """Counts by unit and category. Each category is counted where it occurs, never by subtraction.

    The units are "files" (and folders) of the inputs, "bytes" of their decompressed content, "records" (JSON objects
    and rows), "characters" of the text in the records' fields, and "documents" and "document bytes".
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]] | None = None):
        self._counts = defaultdict(Counter, {unit: Counter(parts) for unit, parts in (counts or {}).items()})

    def __getitem__(self, unit: str) -> Counter[str]:
        """The counts of a unit by category."""
        return self._counts[unit]

    def add(self, other: "Account") -> None:
        """Add the counts of another account."""
        for unit, categories in other._counts.items():
            self[unit].update(categories)

    def take(self) -> "Account":
        """Return the counts, and start again at 0."""
        taken = Account()
        taken._counts, self._counts = self._counts, taken._counts
        return taken

    def to_json(self) -> dict[str, dict[str, int]]:
        """The counts that are not 0, sorted by name."""
        counts = {unit: {name: n for name, n in sorted(parts.items()) if n} for unit, parts in self._counts.items()}
        return {unit: parts for unit, parts in sorted(counts.items()) if parts}

    def check(self) -> None:
        """Raise UserError if the categories of a unit do not add up to what entered."""
        for unit, categories in self._counts.items():
            if unit == UNUSED_FIELDS or IN not in categories:
                continue
            if (total := sum(categories.values()) - categories[IN]) != categories[IN]:
                raise UserError(
                    f"{categories[IN]:,} {unit} were read, but {total:,} were used or left out: a file has changed "
                    f"while it was read, or Folio has an error; repeat it"
                )


READ_AS = "read as "  # begins the categories of files that are used
USED_RECORDS = (IN, "documents")
PARTS_LEFT_OUT = ("times", "numbers of subtitles", "notes in subtitles")  # categories of bytes that are named


def describe(account: Account, separator: str | None = None, can_keep: bool = True) -> Iterator[str]:
    """Yield lines on what was left out or changed.

    separator: the text between documents, if any. can_keep: whether a setting keeps the line ends.
    """
    files = {reason: n for reason, n in account["files"].items() if reason != IN and not reason.startswith(READ_AS)}
    records = {reason: n for reason, n in account["records"].items() if reason not in USED_RECORDS}
    sizes = {f"byte of {reason}": account["bytes"][reason] for reason in PARTS_LEFT_OUT}
    if parts := [
        part for counts in (files, records, account["left out of records"], sizes) for part in _largest(counts)
    ]:
        yield f"left out: {', '.join(parts)}"
    if unused := sorted(name or "(without a name)" for name in account[UNUSED_FIELDS]):
        others = f", and {len(unused) - MAX_NAMED:,} others (report.json)" if len(unused) > MAX_NAMED else ""
        yield f"unused fields: {', '.join(unused[:MAX_NAMED])}{others}"
    if account["line ends"].total():
        advice = "; --keep_line_ends=True keeps them" if can_keep else ", as in the training data"
        kinds = " and ".join(sorted(kind for kind, n in account["line ends"].items() if n))
        yield f"line ends: {account['line ends'].total():,} {kinds} are now \\n{advice}"
    if changed := _largest(account["changed"]):
        yield f"changed: {', '.join(changed)}"
    texts, records = account["special text"]["in text"], account["special text"]["in records"]
    if (texts or records) and separator != EOT_TEXT:
        advice = f"to end documents there: --split_on='{EOT_TEXT}'" if texts else "it does not end documents; remove it"
        yield f"{EOT_TEXT} occurs {counted(texts + records, 'time')} as text; {advice}"


def _largest(counts: Mapping[str, int]) -> list[str]:
    """Return ["30 .srt files", "2 hidden files"], largest first. The last entry is the number of further reasons.

    counts: by singular noun phrases.
    """
    ordered = sorted((reason for reason in counts if counts[reason]), key=lambda reason: (-counts[reason], reason))
    shown = [counted(counts[reason], reason, _plural(reason)) for reason in ordered[:MAX_NAMED]]
    return shown + [f"{len(ordered) - MAX_NAMED:,} other kinds (report.json)"] * (len(ordered) > MAX_NAMED)


def _plural(phrase: str) -> str:
    """Return "records after --limit" for "record after --limit"."""
    noun, *rest = re.split(r"(?= (?:of|with|without|that|after|\())", phrase, maxsplit=1)
    return "".join([f"{noun}s", *rest]).replace(" that matches ", " that match ")
