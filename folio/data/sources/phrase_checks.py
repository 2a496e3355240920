"""Finds the phrases that are not usable in a language: forms that CLDR does not have, and errors of num2words.

The checks find errors that show without a dictionary, such as exceptions, ordinals that are cardinals, and two numbers
with the same words. They do not find misspelled words.
"""

import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.data.sources.phrases import (
    COMPARED,
    FIRST_DATE,
    MAX_DIGITS,
    MINIMUM,
    TOPICS,
    UNITS,
    Coverage,
    Item,
    base_language,
    phrase,
    unit_length,
    unit_patterns,
)

Problems = dict[str, str]  # topic -> why its phrases are left out
CHECKED_DAYS = 800  # more than two years
RANDOM_NUMBERS = 150  # in addition to numbers with few digits other than 0
UNIT_VALUES = [
    *range(201),
    *range(300, 1000, 100),
    *(Decimal(n).scaleb(-k) for k in (1, 2) for n in range(250) if n % 10),
]
WORD_CATEGORIES = ("L", "M", "Zs", "Pd", "Po")  # of Unicode: letters, marks, spaces, hyphens, commas and apostrophes


def check_languages(languages: Sequence[str]) -> tuple[Coverage, list[str]]:
    """Return the languages that have usable phrases of each topic, and lines on phrases that are left out or unchecked.

    A topic needs two languages. Takes less than a second per language. Raises UserError if no topic has two.
    """
    problems = {language: find_problems(language) for language in languages}
    usable = {topic: [name for name in languages if topic not in problems[name]] for topic in TOPICS}
    coverage = {topic: names for topic, names in usable.items() if len(names) > 1}
    lines = [f"left out in {name}: {line}" for name in languages for line in describe_problems(problems[name])]
    if single := [topic for topic, names in usable.items() if len(names) == 1]:
        lines.append(f"left out: {name_topics(single)}, which only one of the languages has")
    if unchecked := [name for name in languages if name not in COMPARED]:
        lines.append(f"spelling not checked: {', '.join(unchecked)}; num2words misspells numbers in some languages")
    if not coverage:
        raise UserError(f"languages={','.join(languages)}: no kind of phrase has two languages; {'; '.join(lines)}")
    return coverage, lines


def find_problems(language: str) -> Problems:
    """Return why topics are left out in a language."""
    dates = date_texts(language)
    cardinals, ordinals = (number_texts(language, kind) for kind in ("cardinal", "ordinal"))
    reasons = {
        "date": date_problem(language, dates),
        "cardinal": number_problem(language, cardinals, {}, dates),
        "ordinal": number_problem(language, ordinals, cardinals, dates),
    }
    return {topic: reason for topic, reason in reasons.items() if reason} | unit_problems(language)


def describe_problems(problems: Problems) -> list[str]:
    """Return a line for each reason, with the number of units."""
    reasons = dict.fromkeys(problems.values())
    return [f"{name_topics([t for t in problems if problems[t] == reason])}: {reason}" for reason in reasons]


def name_topics(topics: Sequence[str]) -> str:
    """Return topics as text: "dates, 2 units (duration-week, mass-gram)". At most three units are named."""
    units = [topic for topic in topics if topic in UNITS]
    names = [f"{topic}s" for topic in topics if topic not in UNITS]
    if units:
        names.append(f"{counted(len(units), 'unit')} ({', '.join(units[:3])}{', ...' if len(units) > 3 else ''})")
    return ", ".join(names)


# --- the kinds --------------------------------------------------------------------------------------------------------


def date_texts(language: str) -> dict[Item, str]:
    """Return the phrases of consecutive days."""
    items = [Item("date", FIRST_DATE + timedelta(days=n)) for n in range(CHECKED_DAYS)]
    return {item: phrase(item, language) for item in items}


def date_problem(language: str, texts: Mapping[Item, str]) -> str | None:
    """Return why dates are left out: the pattern or a name is that of CLDR's root locale, or dates share a text."""
    from babel import Locale

    locale, root = Locale.parse(language), Locale("root")
    if locale.date_formats["full"].pattern == root.date_formats["full"].pattern:
        return "CLDR has no pattern for full dates"
    for noun, names, defaults in (("month", locale.months, root.months), ("weekday", locale.days, root.days)):
        names, defaults = names["format"]["wide"], defaults["format"]["wide"]
        if missing := sum(names[k] == defaults[k] for k in defaults):
            return f"CLDR has no names for {counted(missing, noun)}"
    return describe_shared(texts, texts)


def sample_numbers(kind: str) -> list[int]:
    """Return numbers in the range of cardinals or ordinals, in which irregular and ambiguous words occur.

    These are all numbers below 1,000, the same in thousands, all with two digits other than 0, and random ones, also
    with each digit replaced by 0, because a digit may be missing in the words.
    """
    end = 10 ** MAX_DIGITS[kind]
    powers = [10**k for k in range(MAX_DIGITS[kind])]
    drawn = random.Random(f"check {kind}").sample(range(end), RANDOM_NUMBERS)
    numbers = {*range(1000), *range(0, end, 1000), *drawn}
    numbers |= {a * p + b * q for p in powers for q in powers if q < p for a in range(1, 10) for b in range(10)}
    numbers |= {number - number // power % 10 * power for number in drawn for power in powers}
    return sorted(number for number in numbers if number >= MINIMUM[kind])


def number_texts(language: str, kind: str) -> dict[Item, str]:
    """Return sampled numbers in words. The text is empty where num2words raises an exception."""
    texts = {}
    for item in (Item(kind, number) for number in sample_numbers(kind)):
        try:
            texts[item] = phrase(item, language)
        except Exception:  # among others NotImplementedError, KeyError, TypeError
            texts[item] = ""
    return texts


def number_problem(
    language: str, texts: Mapping[Item, str], others: Mapping[Item, str], dates: Mapping[Item, str]
) -> str | None:
    """Return why cardinals or ordinals are left out.

    others: phrases that must be different from `texts`. dates: phrases in the script of the language.
    """
    if missing := [item for item, text in texts.items() if not text]:
        return f"num2words has none for {len(missing):,} of {len(texts):,} numbers, such as {missing[0].value:,}"
    for item, text in texts.items():
        if not all(unicodedata.category(character).startswith(WORD_CATEGORIES) for character in text):
            return f"num2words writes {item.value:,} as {text!r}"
    if unknown := find_scripts(texts.values()) - find_scripts(dates.values()):
        return f"num2words writes {', '.join(sorted(unknown))} letters, unlike CLDR"
    small = [item for item in texts if item.value < 100]
    if base_language(language) != "en" and 2 * sum(texts[item] == phrase(item, "en") for item in small) > len(small):
        return "num2words writes English"
    return describe_shared(texts, {**others, **texts})


def unit_problems(language: str) -> Problems:
    """Return why units are left out: CLDR has no name for a number, or the text is not unique."""
    from babel import Locale

    values_by_form: dict[str, list[int | Decimal]] = {}
    for value in UNIT_VALUES:
        values_by_form.setdefault(Locale.parse(language).plural_form(value), []).append(value)
    missing = [unit for unit in UNITS if not values_by_form.keys() <= named_forms(unit, language).keys()]
    values = [value for values in values_by_form.values() for value in values[:5]]
    items = [Item("unit", value, unit) for unit in UNITS if unit not in missing for value in values]
    texts = {item: phrase(item, language) for item in items}
    shared = dict.fromkeys(item.unit for item in find_shared(texts))
    return {
        **dict.fromkeys(missing, "CLDR has a symbol, or not every plural form"),
        **dict.fromkeys(shared, "different units or numbers have the same text"),
    }


def named_forms(unit: str, language: str) -> dict[str, str]:
    """Return the patterns of a unit's plural forms. Empty if they are symbols that are the same in all languages."""
    patterns = unit_patterns(unit, language, unit_length(unit, language))
    symbols = unit_patterns(unit, "root", "short")
    return {} if {*patterns.values()} <= {*symbols.values()} else patterns


def drop_ambiguous(pairs: Iterable[dict[str, Any]], answers: dict[str, str]) -> Iterator[dict[str, Any] | None]:
    """Yield pairs, or None instead of a pair whose prompt already has another completion.

    answers: the completion of each previous prompt; those of `pairs` are added.
    """
    for pair in pairs:
        is_same = answers.setdefault(pair["prompt"], pair["completion"]) == pair["completion"]
        yield pair if is_same else None


# --- texts ------------------------------------------------------------------------------------------------------------


def find_shared(texts: Mapping[Item, str]) -> list[Item]:
    """Return the items whose text is also that of another item."""
    counts = Counter(texts.values())
    return [item for item, text in texts.items() if counts[text] > 1]


def describe_shared(texts: Mapping[Item, str], all_texts: Mapping[Item, str]) -> str | None:
    """Return how many of `texts` are also the text of another item in `all_texts`, with an example, or None."""
    shared = [item for item in find_shared(all_texts) if item in texts]
    if not shared:
        return None
    text = texts[shared[0]]
    first, second, *_ = (item.name for item in all_texts if all_texts[item] == text)
    return f"{len(shared):,} of {len(texts):,} have the text of another, such as {first} and {second}: {text!r}"


def find_scripts(texts: Iterable[str]) -> set[str]:
    """Return the scripts of the letters, as in their names in Unicode: LATIN, CYRILLIC, ..."""
    letters = {character for character in set("".join(texts)) if character.isalpha()}
    return {unicodedata.name(letter).split()[0] for letter in letters}
