"""Phrases of dates, numbers, and units in six languages, from CLDR (Babel) and num2words: an exact translator.

An item is a date or a number, in words or with a unit. Its phrase exists in each language, so the items give any number
of translations, and every answer can be checked.
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

LANGUAGES = ("en", "de", "fr", "es", "it", "pl")  # whose phrases were checked
KINDS = ("date", "cardinal", "ordinal", "unit")
FIRST_DATE, LAST_DATE = date(1900, 1, 1), date(2099, 12, 31)
DIGITS = {"cardinal": 6, "ordinal": 4, "unit": 3}  # of the largest whole numbers; num2words errs in larger ordinals
MOST_DECIMALS = 2  # of a number with a unit
ALWAYS_TRAINED = 100  # whole numbers below are never held out: "premier" occurs in 1 only, and "kilometer" after 1 only
# CLDR has a long form of each in each language (it has none for an Italian day), and no two share one in any language.
UNITS = """
    duration-second duration-minute duration-hour duration-week duration-century
    length-millimeter length-centimeter length-meter length-kilometer length-inch length-foot length-mile
    mass-milligram mass-gram mass-kilogram volume-milliliter volume-liter volume-cubic-meter
    area-square-meter area-square-kilometer area-hectare speed-kilometer-per-hour speed-meter-per-second
    temperature-celsius energy-joule power-watt power-kilowatt electric-volt electric-ampere
    digital-megabyte graphics-pixel concentr-percent
""".split()
CORRECTIONS = {  # what num2words 0.5.14 misspells, and the right spelling, in the order of replacement
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
    """What a phrase says."""

    kind: str  # of KINDS
    value: date | int | Decimal
    unit: str | None = None  # of UNITS

    @property
    def key(self) -> str:
        """The date or the number alone, which is held out with every unit, as a cardinal and as an ordinal."""
        return str(self.value)

    @property
    def name(self) -> str:
        """A name that no other item has."""
        return " ".join(filter(None, (self.kind, self.key, self.unit)))


@lru_cache(1 << 16)
def phrase(item: Item, language: str) -> str:
    """The phrase for an item. Spaces are plain ones, also where CLDR does not allow a line break, as in French."""
    from babel.dates import format_date
    from babel.units import format_unit

    if item.kind == "date":
        text = format_date(item.value, "full", locale=language)
        if language == "fr":  # CLDR writes "1 mars"
            text = text.replace(" 1 ", " 1er ")
    elif item.kind == "unit":
        text = format_unit(item.value, item.unit, "long", locale=language)
    else:
        return in_words(item.value, language, item.kind)
    return " ".join(text.split())


def in_words(number: int, language: str, kind: str) -> str:
    """A number in words. kind: "cardinal" or "ordinal"; in the masculine, where a language distinguishes."""
    from num2words import num2words

    text = num2words(number, lang=language, to=kind)
    for wrong, right in CORRECTIONS.get(language, []):
        text = text.replace(wrong, right)
    if language == "it" and text.endswith("tre") and text != "tre":  # "ventitré", but "tre" and "ventitremila"
        text = f"{text[:-1]}é"
    return text


# --- which items ------------------------------------------------------------------------------------------------------


def is_held_out(item: Item, fraction: float) -> bool:
    """Whether an item is for validation: this fraction of all dates and numbers, in all languages at once."""
    if isinstance(item.value, int) and item.value < ALWAYS_TRAINED:
        return False
    return document_hash(item.key.encode()) < fraction * 2**64


def draw_item(kind: str, rng: random.Random) -> Item:
    """A random item. Dates are equally likely. Of a whole number, d digits have the weight d, so that small numbers,
    which teach the irregular words, occur often enough; with a unit, it has 0, 1, or 2 decimals.
    """
    if kind == "date":
        return Item(kind, FIRST_DATE + timedelta(days=rng.randrange((LAST_DATE - FIRST_DATE).days + 1)))
    digits = range(1, DIGITS[kind] + 1)
    (n,) = rng.choices(digits, weights=digits)
    smallest = {"cardinal": 0, "ordinal": 1, "unit": 0}[kind]
    number = rng.randrange(10 ** (n - 1) if n > 1 else smallest, 10**n)
    if kind != "unit":
        return Item(kind, number)
    decimals = rng.randrange(MOST_DECIMALS + 1)
    value = number
    if decimals:
        last = rng.randrange(1, 10)  # not 0: CLDR writes 1.50 as 1.5
        value = number + Decimal(rng.randrange(10 ** (decimals - 1)) * 10 + last).scaleb(-decimals)
    return Item(kind, value, rng.choice(UNITS))


def draw_items(held_out: bool, fraction: float, rng: random.Random) -> Iterator[Item]:
    """Endless items, equal parts of each kind, that are held out, or that are not."""
    while True:
        for kind in KINDS:
            item = draw_item(kind, rng)
            while is_held_out(item, fraction) != held_out:
                item = draw_item(kind, rng)
            yield item


# --- pairs ------------------------------------------------------------------------------------------------------------


def training_pairs(count: int, languages: Sequence[str], fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Translations of items that are not held out, each between two random languages."""
    rng = random.Random(f"training {seed}")
    for _, item in zip(range(count), draw_items(False, fraction, rng), strict=False):
        source, target = rng.sample(languages, 2)
        yield translation(phrase(item, source), phrase(item, target), source, target)


def held_out_pairs(count: int, languages: Sequence[str], fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Translations of `count` different items that are held out: each into every language, from another one.

    A pair also has the fields source, target, kind, and item. Raises UserError if there are too few ordinals.
    """
    rng = random.Random(f"validation {seed}")
    drawn: set[Item] = set()
    wanted = {kind: len(range(k, count, len(KINDS))) for k, kind in enumerate(KINDS)}
    ordinals = sum(is_held_out(Item("ordinal", n), fraction) for n in range(1, 10 ** DIGITS["ordinal"]))
    if ordinals < wanted["ordinal"]:
        raise UserError(
            f"val_fraction={fraction}: it holds out {ordinals:,} ordinals, fewer than {wanted['ordinal']:,}, a quarter "
            f"of held_out={count:,}; set a larger --val_fraction or a smaller --held_out"
        )
    for item in draw_items(True, fraction, rng):
        if item in drawn or not wanted[item.kind]:
            continue
        drawn.add(item)
        wanted[item.kind] -= 1
        for target in languages:
            source = rng.choice([language for language in languages if language != target])
            about = {"source": source, "target": target, "kind": item.kind, "item": item.name}
            yield translation(phrase(item, source), phrase(item, target), source, target) | about
        if not any(wanted.values()):
            return
