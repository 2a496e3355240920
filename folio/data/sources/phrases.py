"""Exact translations of dates, numbers, and units in six languages, from CLDR (Babel) and num2words.

An item is a date or a number, in words or with a unit. It has a phrase in each language, so items give any number of
translations, and every answer can be checked.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from folio import UserError
from folio.data.blocks import document_hash
from folio.data.sources.pairs import translation

LANGUAGES = ("en", "de", "fr", "es", "it", "pl")  # languages whose phrases were checked
KINDS = ("date", "cardinal", "ordinal", "unit")
FIRST_DATE, LAST_DATE = date(1900, 1, 1), date(2099, 12, 31)
MAX_DIGITS = {"cardinal": 6, "ordinal": 4, "unit": 3}  # of integers; num2words has errors in larger ordinals
MAX_DECIMALS = 2  # of numbers with a unit
MIN_HELD_OUT = 100  # smaller integers are never held out: "premier" and the singular "kilometer" occur only with 1
# CLDR has a long form of each unit in each language (none for "day" in Italian), and all long forms are distinct.
UNITS = """
    duration-second duration-minute duration-hour duration-week duration-century
    length-millimeter length-centimeter length-meter length-kilometer length-inch length-foot length-mile
    mass-milligram mass-gram mass-kilogram volume-milliliter volume-liter volume-cubic-meter
    area-square-meter area-square-kilometer area-hectare speed-kilometer-per-hour speed-meter-per-second
    temperature-celsius energy-joule power-watt power-kilowatt electric-volt electric-ampere
    digital-megabyte graphics-pixel concentr-percent
""".split()
CORRECTIONS = {  # misspellings in num2words 0.5.14 and the correct spelling, in the order of replacement
    "de": [("einstausend", "eintausend")],
    "fr": [("vingtsième", "vingtième"), ("centsième", "centième")],
    "es": [
        ("veintiuno mil", "veintiún mil"),
        ("uno mil", "un mil"),
        ("décimoprimero", "decimoprimero"),
        ("décimosegundo", "decimosegundo"),
        ("quadragésimo", "cuadragésimo"),
        ("cuadrigentésimo", "cuadringentésimo"),
        ("septigentésimo", "septingentésimo"),
        ("octigentésimo", "octingentésimo"),
    ],
    "it": [("dicott", "diciott"), ("diecesimo", "decimo")],
    "pl": [("trzysetny", "trzechsetny"), ("czterysetny", "czterechsetny")],
}


class Item(NamedTuple):
    """The meaning of a phrase."""

    kind: str  # one of KINDS
    value: date | int | Decimal
    unit: str | None = None  # one of UNITS

    @property
    def key(self) -> str:
        """The date or number as text. Items with the same key are held out together, for every kind and unit."""
        return str(self.value)

    @property
    def name(self) -> str:
        """The unique name of the item."""
        return " ".join(filter(None, (self.kind, self.key, self.unit)))


@lru_cache(1 << 16)
def phrase(item: Item, language: str) -> str:
    """Return the phrase for an item. Non-breaking spaces, as in French, are replaced by spaces."""
    from babel.dates import format_date
    from babel.units import format_unit

    if item.kind == "date":
        text = format_date(item.value, "full", locale=language)
        if language == "fr":  # CLDR writes "1 mars"
            text = text.replace(" 1 ", " 1er ")
    elif item.kind == "unit":
        text = format_unit(item.value, item.unit, "long", locale=language)
    else:
        return spell_number(item.value, language, item.kind)
    return " ".join(text.split())


def spell_number(number: int, language: str, kind: str) -> str:
    """Return a number in words, in the masculine form if there are several. kind: "cardinal" or "ordinal"."""
    from num2words import num2words

    text = num2words(number, lang=language, to=kind)
    for wrong, right in CORRECTIONS.get(language, []):
        text = text.replace(wrong, right)
    if language == "it" and text.endswith("tre") and text != "tre":  # "ventitré", but "tre" and "ventitremila"
        text = f"{text[:-1]}é"
    return text


# --- random items -----------------------------------------------------------------------------------------------------


def is_held_out(item: Item, fraction: float) -> bool:
    """Whether an item is for validation. This fraction of all dates and numbers is held out, in all languages."""
    if isinstance(item.value, int) and item.value < MIN_HELD_OUT:
        return False
    return document_hash(item.key.encode()) < fraction * 2**64


def draw_item(kind: str, rng: random.Random) -> Item:
    """Draw a random item. Dates are uniformly distributed. Integers with d digits have a total weight of d.

    Small numbers, whose words are irregular, are therefore frequent. Numbers with a unit have 0, 1, or 2 decimals.
    """
    if kind == "date":
        return Item(kind, FIRST_DATE + timedelta(days=rng.randrange((LAST_DATE - FIRST_DATE).days + 1)))
    digits = range(1, MAX_DIGITS[kind] + 1)
    (n,) = rng.choices(digits, weights=digits)
    smallest = {"cardinal": 0, "ordinal": 1, "unit": 0}[kind]
    number = rng.randrange(10 ** (n - 1) if n > 1 else smallest, 10**n)
    if kind != "unit":
        return Item(kind, number)
    decimals = rng.randrange(MAX_DECIMALS + 1)
    value = number
    if decimals:
        last = rng.randrange(1, 10)  # not 0: CLDR writes 1.50 as 1.5
        value = number + Decimal(rng.randrange(10 ** (decimals - 1)) * 10 + last).scaleb(-decimals)
    return Item(kind, value, rng.choice(UNITS))


def draw_items(held_out: bool, fraction: float, rng: random.Random) -> Iterator[Item]:
    """Yield an endless stream of random items, cycling through KINDS: only held-out items, or only the others."""
    while True:
        for kind in KINDS:
            item = draw_item(kind, rng)
            while is_held_out(item, fraction) != held_out:
                item = draw_item(kind, rng)
            yield item


# --- pairs ------------------------------------------------------------------------------------------------------------


def training_pairs(count: int, languages: Sequence[str], fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield translations of items that are not held out, each between two random languages."""
    rng = random.Random(f"training {seed}")
    for _, item in zip(range(count), draw_items(False, fraction, rng), strict=False):
        source, target = rng.sample(languages, 2)
        yield translation(phrase(item, source), phrase(item, target), source, target)


def held_out_pairs(count: int, languages: Sequence[str], fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield translations of `count` distinct held-out items, each into every language from a random other one.

    Pairs also have the fields source, target, kind, and item. Raises UserError if there are too few ordinals.
    """
    rng = random.Random(f"validation {seed}")
    drawn: set[Item] = set()
    remaining = {kind: len(range(k, count, len(KINDS))) for k, kind in enumerate(KINDS)}
    ordinals = sum(is_held_out(Item("ordinal", n), fraction) for n in range(1, 10 ** MAX_DIGITS["ordinal"]))
    if ordinals < remaining["ordinal"]:
        raise UserError(
            f"val_fraction={fraction}: it holds out {ordinals:,} ordinals, fewer than a quarter of held_out={count:,}; "
            f"set a larger --val_fraction or a smaller --held_out"
        )
    for item in draw_items(True, fraction, rng):
        if item in drawn or not remaining[item.kind]:
            continue
        drawn.add(item)
        remaining[item.kind] -= 1
        for target in languages:
            source = rng.choice([language for language in languages if language != target])
            fields = {"source": source, "target": target, "kind": item.kind, "item": item.name}
            yield translation(phrase(item, source), phrase(item, target), source, target) | fields
        if not any(remaining.values()):
            return
