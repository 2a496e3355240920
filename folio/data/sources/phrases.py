"""Exact translations of dates, numbers, and units, from CLDR (Babel) and num2words.

An item is a date or a number, in words or with a unit. It has a phrase in each language, so items give any number of
translations, and every answer can be checked.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from folio import UserError
from folio.base.number_format import counted
from folio.data.blocks import document_hash
from folio.data.sources.pairs import translation

LANGUAGES = ("en", "de", "fr", "es", "it", "pl")  # the default
COMPARED = (*LANGUAGES, "eo", "fi", "id", "ja", "nl", "ru", "sv")  # languages whose words were compared with ICU 72
KINDS = ("date", "cardinal", "ordinal", "unit")
FIRST_DATE, LAST_DATE = date(1900, 1, 1), date(2099, 12, 31)
MAX_DIGITS = {"cardinal": 6, "ordinal": 4, "unit": 3}  # of integers; num2words has errors in larger ordinals
MINIMUM = {"cardinal": 0, "ordinal": 1, "unit": 0}
MAX_DECIMALS = 2  # of numbers with a unit
MIN_HELD_OUT = 100  # smaller integers are never held out: "premier" and the singular "kilometer" occur only with 1
# Babel has a long form of each unit in each of LANGUAGES (none for "day" in Italian), and all long forms are distinct.
UNITS = """
    duration-second duration-minute duration-hour duration-week duration-century
    length-millimeter length-centimeter length-meter length-kilometer length-inch length-foot length-mile
    mass-milligram mass-gram mass-kilogram volume-milliliter volume-liter volume-cubic-meter
    area-square-meter area-square-kilometer area-hectare speed-kilometer-per-hour speed-meter-per-second
    temperature-celsius energy-joule power-watt power-kilowatt electric-volt electric-ampere
    digital-megabyte graphics-pixel concentr-percent
""".split()
TOPICS = ("date", "cardinal", "ordinal", *UNITS)
Coverage = Mapping[str, Sequence[str]]  # topic -> two or more languages; topics without them are absent
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
    "sv": [("förtio", "fyrtio"), ("etttusen", "ettusen"), ("tjugode", "tjugonde")],
}


class Item(NamedTuple):
    """The meaning of a phrase."""

    kind: str  # one of KINDS
    value: date | int | Decimal
    unit: str | None = None  # one of UNITS

    @property
    def topic(self) -> str:
        """One of TOPICS."""
        return self.unit or self.kind

    @property
    def key(self) -> str:
        """The date or number as text. Items with the same key are held out together, for every kind and unit."""
        return str(self.value)

    @property
    def name(self) -> str:
        """The unique name of the item."""
        return " ".join(filter(None, (self.kind, self.key, self.unit)))


def available_languages() -> list[str]:
    """Return the codes of the languages that both CLDR and num2words have.

    num2words also accepts other codes that begin with one of its own: "fil" (Filipino) would be Finnish.
    """
    from babel.localedata import locale_identifiers
    from num2words import CONVERTER_CLASSES

    return sorted(set(CONVERTER_CLASSES) & set(locale_identifiers()))


@lru_cache(1 << 16)
def phrase(item: Item, language: str) -> str:
    """Return the phrase for an item. Non-breaking spaces, as in French, are replaced by spaces."""
    from babel.dates import format_date
    from babel.units import format_unit

    if item.kind == "date":
        text = format_date(item.value, "full", locale=language)
        if base_language(language) == "fr":  # CLDR writes "1 mars"
            text = text.replace(" 1 ", " 1er ")
    elif item.kind == "unit":
        text = format_unit(item.value, item.unit, unit_length(item.unit, language), locale=language)
    else:
        return spell_number(item.value, language, item.kind)
    return " ".join(text.split())


@lru_cache(1 << 12)
def unit_patterns(unit: str, language: str, length: str) -> dict[str, str]:
    """Return CLDR's pattern for each plural form of a unit, such as {"one": "{0} week", "other": "{0} weeks"}.

    length: "long", or "short". Empty if there are none.
    """
    from babel import localedata

    patterns = localedata.LocaleDataDict(localedata.load(language))["unit_patterns"]
    forms = dict(patterns.get(unit, {}).get(length, {}))
    return {form: pattern for form, pattern in forms.items() if form != "per"}  # "per": "3 meters per week"


def unit_length(unit: str, language: str) -> str:
    """Return the length of the unit's full names in Babel: "long", or "short".

    CLDR omits long forms that are the same as the short ones (an alias in its root.xml), and Babel does not add them.
    """
    return "long" if unit_patterns(unit, language, "long") else "short"


def base_language(language: str) -> str:
    """Return the language without a region: "fr" for "fr_CH"."""
    return language.partition("_")[0]


def spell_number(number: int, language: str, kind: str) -> str:
    """Return a number in words, in the masculine form if there are several. kind: "cardinal" or "ordinal".

    Raises the exceptions of num2words, which has no ordinals for some languages.
    """
    from num2words import num2words

    text = num2words(number, lang=language, to=kind)
    for wrong, right in CORRECTIONS.get(base_language(language), []):
        text = text.replace(wrong, right)
    if language == "it" and text.endswith("tre") and text != "tre":  # "ventitré", but "tre" and "ventitremila"
        text = f"{text[:-1]}é"
    return " ".join(text.split())


# --- random items -----------------------------------------------------------------------------------------------------


def is_held_out(item: Item, fraction: float) -> bool:
    """Whether an item is for validation. This fraction of all dates and numbers is held out, in all languages."""
    if isinstance(item.value, int) and item.value < MIN_HELD_OUT:
        return False
    return document_hash(item.key.encode()) < fraction * 2**64


def draw_item(kind: str, rng: random.Random, units: Sequence[str] = UNITS) -> Item:
    """Draw a random item. Dates are uniformly distributed. Integers with d digits have a total weight of d.

    Small numbers, whose words are irregular, are therefore frequent. Numbers with a unit, which is one of `units`, have
    0, 1, or 2 decimals.
    """
    if kind == "date":
        return Item(kind, FIRST_DATE + timedelta(days=rng.randrange((LAST_DATE - FIRST_DATE).days + 1)))
    digits = range(1, MAX_DIGITS[kind] + 1)
    (n,) = rng.choices(digits, weights=digits)
    number = rng.randrange(10 ** (n - 1) if n > 1 else MINIMUM[kind], 10**n)
    if kind != "unit":
        return Item(kind, number)
    decimals = rng.randrange(MAX_DECIMALS + 1)
    value = number
    if decimals:
        last = rng.randrange(1, 10)  # not 0: CLDR writes 1.50 as 1.5
        value = number + Decimal(rng.randrange(10 ** (decimals - 1)) * 10 + last).scaleb(-decimals)
    return Item(kind, value, rng.choice(units))


def covered_kinds(coverage: Coverage) -> list[str]:
    """Return the kinds of the topics in `coverage`, in the order of KINDS."""
    topics = {*coverage}
    return [kind for kind in KINDS if kind in topics or (kind == "unit" and topics & {*UNITS})]


def all_items(kind: str, coverage: Coverage) -> Iterator[Item]:
    """Yield each item of a kind; of the numbers with a unit, only those with two decimals."""
    if kind == "date":
        yield from (Item(kind, FIRST_DATE + timedelta(days=n)) for n in range((LAST_DATE - FIRST_DATE).days + 1))
    elif kind == "unit":
        values = (Decimal(n).scaleb(-2) for n in range(10 ** (MAX_DIGITS[kind] + 2)) if n % 10)
        yield from (Item(kind, value, unit) for value in values for unit in UNITS if unit in coverage)
    else:
        yield from (Item(kind, n) for n in range(MINIMUM[kind], 10 ** MAX_DIGITS[kind]))


def draw_items(held_out: bool, fraction: float, coverage: Coverage, rng: random.Random) -> Iterator[Item]:
    """Yield an endless stream of random items, cycling through the kinds: only held-out items, or only the others."""
    units = [unit for unit in UNITS if unit in coverage]
    while True:
        for kind in covered_kinds(coverage):
            item = draw_item(kind, rng, units)
            while is_held_out(item, fraction) != held_out:
                item = draw_item(kind, rng, units)
            yield item


# --- pairs ------------------------------------------------------------------------------------------------------------


def training_pairs(count: int, coverage: Coverage, fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield translations of items that are not held out, each between two random languages that have its topic."""
    rng = random.Random(f"training {seed}")
    for _, item in zip(range(count), draw_items(False, fraction, coverage, rng), strict=False):
        source, target = rng.sample(coverage[item.topic], 2)
        yield translation(phrase(item, source), phrase(item, target), source, target)


def held_out_pairs(count: int, coverage: Coverage, fraction: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield translations of `count` distinct held-out items, each into every language from a random other one.

    The languages are those that have the item's topic.

    Pairs also have the fields source, target, kind, and item. Raises UserError if too few items are held out.
    """
    rng = random.Random(f"validation {seed}")
    drawn: set[Item] = set()
    kinds = covered_kinds(coverage)
    remaining = {kind: len(range(k, count, len(kinds))) for k, kind in enumerate(kinds)}
    for kind, needed in remaining.items():
        held_out = (item for item in all_items(kind, coverage) if is_held_out(item, fraction))
        if (available := sum(1 for _ in islice(held_out, needed))) < needed:
            raise UserError(
                f"val_fraction={fraction}: it holds out {counted(available, kind)}, but held_out={count:,} needs "
                f"{needed:,}; set a larger --val_fraction or a smaller --held_out"
            )
    for item in draw_items(True, fraction, coverage, rng):
        if item in drawn or not remaining[item.kind]:
            continue
        drawn.add(item)
        remaining[item.kind] -= 1
        languages = coverage[item.topic]
        for target in languages:
            source = rng.choice([language for language in languages if language != target])
            fields = {"source": source, "target": target, "kind": item.kind, "item": item.name}
            yield translation(phrase(item, source), phrase(item, target), source, target) | fields
        if not any(remaining.values()):
            return
