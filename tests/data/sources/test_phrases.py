import random
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal

import pytest

from folio import UserError
from folio.data.sources.phrases import (
    FIRST_DATE,
    KINDS,
    LANGUAGES,
    LAST_DATE,
    TOPICS,
    UNITS,
    Coverage,
    Item,
    available_languages,
    draw_item,
    held_out_pairs,
    is_held_out,
    phrase,
    training_pairs,
)
from tests.support.tolerances import binomial_range

# Expected phrases of items, in the order of LANGUAGES.
PHRASES = """
date 2026-03-03: Tuesday, March 3, 2026 | Dienstag, 3. März 2026 | mardi 3 mars 2026 | martes, 3 de marzo de 2026 |
    martedì 3 marzo 2026 | wtorek, 3 marca 2026
date 2026-03-01: Sunday, March 1, 2026 | Sonntag, 1. März 2026 | dimanche 1er mars 2026 | domingo, 1 de marzo de 2026 |
    domenica 1 marzo 2026 | niedziela, 1 marca 2026
date 1999-12-31: Friday, December 31, 1999 | Freitag, 31. Dezember 1999 | vendredi 31 décembre 1999 |
    viernes, 31 de diciembre de 1999 | venerdì 31 dicembre 1999 | piątek, 31 grudnia 1999
cardinal 0: zero | null | zéro | cero | zero | zero
cardinal 21: twenty-one | einundzwanzig | vingt et un | veintiuno | ventuno | dwadzieścia jeden
cardinal 80: eighty | achtzig | quatre-vingts | ochenta | ottanta | osiemdziesiąt
cardinal 118: one hundred and eighteen | einhundertachtzehn | cent dix-huit | ciento dieciocho | centodiciotto |
    sto osiemnaście
cardinal 71023: seventy-one thousand and twenty-three | einundsiebzigtausenddreiundzwanzig |
    soixante et onze mille vingt-trois | setenta y un mil veintitrés | settantunomilaventitré |
    siedemdziesiąt jeden tysięcy dwadzieścia trzy
cardinal 121000: one hundred and twenty-one thousand | einhunderteinundzwanzigtausend | cent vingt et un mille |
    ciento veintiún mil | centoventunomila | sto dwadzieścia jeden tysięcy
cardinal 280601: two hundred and eighty thousand, six hundred and one | zweihundertachtzigtausendsechshunderteins |
    deux cent quatre-vingt mille six cent un | doscientos ochenta mil seiscientos uno | duecentottantamilaseicentouno |
    dwieście osiemdziesiąt tysięcy sześćset jeden
cardinal 501003: five hundred and one thousand and three | fünfhunderteintausenddrei | cinq cent un mille trois |
    quinientos un mil tres | cinquecentounomilatré | pięćset jeden tysięcy trzy
ordinal 1: first | erste | premier | primero | primo | pierwszy
ordinal 11: eleventh | elfte | onzième | decimoprimero | undicesimo | jedenasty
ordinal 80: eightieth | achtzigste | quatre-vingtième | octogésimo | ottantesimo | osiemdziesiąty
ordinal 110: one hundred and tenth | einhundertzehnte | cent dixième | centésimo décimo | centodecimo | sto dziesiąty
ordinal 200: two hundredth | zweihundertste | deux centième | ducentésimo | duecentesimo | dwusetny
ordinal 300: three hundredth | dreihundertste | trois centième | tricentésimo | trecentesimo | trzechsetny
ordinal 443: four hundred and forty-third | vierhundertdreiundvierzigste | quatre cent quarante-troisième |
    cuadringentésimo cuadragésimo tercero | quattrocentoquarantatreesimo | czterysta czterdziesty trzeci
ordinal 812: eight hundred and twelfth | achthundertzwölfte | huit cent douzième | octingentésimo decimosegundo |
    ottocentododicesimo | osiemset dwunasty
ordinal 1400: one thousand, four hundredth | eintausendvierhundertste | mille quatre centième |
    milésimo cuadringentésimo | millequattrocentesimo | tysiąc czterechsetny
ordinal 2718: two thousand, seven hundred and eighteenth | zweitausendsiebenhundertachtzehnte |
    deux mille sept cent dix-huitième | dosmilésimo septingentésimo décimo octavo | duemilasettecentodiciottesimo |
    dwa tysiące siedemset osiemnasty
unit 1 length-kilometer: 1 kilometer | 1 Kilometer | 1 kilomètre | 1 kilómetro | 1 chilometro | 1 kilometr
unit 22 length-kilometer: 22 kilometers | 22 Kilometer | 22 kilomètres | 22 kilómetros | 22 chilometri | 22 kilometry
unit 25 duration-week: 25 weeks | 25 Wochen | 25 semaines | 25 semanas | 25 settimane | 25 tygodni
unit 1.5 length-kilometer: 1.5 kilometers | 1,5 Kilometer | 1,5 kilomètre | 1,5 kilómetros | 1,5 chilometri |
    1,5 kilometra
unit 340.25 length-foot: 340.25 feet | 340,25 Fuß | 340,25 pieds | 340,25 pies | 340,25 piedi | 340,25 stopy
"""


def parse_item(name: str) -> Item:
    kind, value, *unit = name.split()
    number = date.fromisoformat(value) if kind == "date" else Decimal(value) if "." in value else int(value)
    return Item(kind, number, *unit)


EXPECTED = dict(line.split(": ", 1) for line in PHRASES.strip().replace("|\n    ", "| ").splitlines())


def covering(languages: Sequence[str]) -> Coverage:
    return dict.fromkeys(TOPICS, languages)


@pytest.mark.needs("babel", "num2words")
@pytest.mark.parametrize("name", EXPECTED)
def test_phrases(name):
    item = parse_item(name)
    assert item.name == name
    assert [phrase(item, language) for language in LANGUAGES] == EXPECTED[name].split(" | ")


def test_cldr_has_a_long_form_of_each_unit_in_each_language():
    """Babel writes "3 duration-day" or an uninflected name where CLDR has none."""
    babel = pytest.importorskip("babel")
    samples = [0, 1, 2, 5, 22, Decimal("1.5")]
    for language in LANGUAGES:
        locale = babel.Locale(language)
        for unit in UNITS:
            patterns = locale._data["unit_patterns"][unit]["long"]
            assert {locale.plural_form(value) for value in samples} <= set(patterns), (unit, language)
            assert all(unit not in phrase(Item("unit", value, unit), language) for value in samples)


@pytest.mark.needs("babel", "num2words")
def test_no_two_items_share_a_phrase(seed):
    """Each text has one translation. (All cardinals, ordinals, and dates were compared once; these are samples.)"""
    rng = random.Random(seed)
    days = range((LAST_DATE - FIRST_DATE).days + 1)
    values = [*range(25), *(Decimal(k).scaleb(-1) for k in range(1, 25) if k % 10)]
    items = {
        *(Item("date", FIRST_DATE + timedelta(days=n)) for n in rng.sample(days, 1000)),
        *(Item("cardinal", n) for n in (*range(1000), *rng.sample(range(10**6), 1000))),
        *(Item("ordinal", n) for n in (*range(1, 1000), *rng.sample(range(1, 10**4), 1000))),
        *(Item("unit", value, unit) for value in values for unit in UNITS),
    }
    for language in LANGUAGES:
        assert len({phrase(item, language) for item in items}) == len(items)


def test_ranges(seed):
    rng = random.Random(seed)
    drawn = {kind: [draw_item(kind, rng) for _ in range(5000)] for kind in KINDS}
    dates = [item.value for item in drawn["date"]]
    assert date(1900, 1, 1) <= min(dates) < date(1902, 1, 1) and date(2098, 1, 1) < max(dates) <= date(2099, 12, 31)
    for kind, smallest, largest in (("cardinal", 0, 999_999), ("ordinal", 1, 9999), ("unit", 0, Decimal("999.99"))):
        values = [item.value for item in drawn[kind]]
        assert min(values) == smallest and largest * Decimal("0.99") < max(values) <= largest
    assert {item.unit for item in drawn["unit"]} == set(UNITS)
    decimals = Counter(len(str(item.value).partition(".")[2]) for item in drawn["unit"])
    assert set(decimals) == {0, 1, 2}
    assert all(count in binomial_range(5000, 1 / 3, comparisons=3) for count in decimals.values())
    assert not any(str(item.value).endswith(".0") for item in drawn["unit"])


def extract_number(text: str) -> str | None:
    """The number in digits in a phrase, with a decimal point."""
    match = re.search(r"\d+(?:[.,]\d+)?", text)
    return match and match[0].replace(",", ".")


@pytest.mark.needs("babel", "num2words")
def test_held_out_items_do_not_occur_in_training(seed):
    """In any language or kind: the cardinal, the ordinal, and the number with any unit are held out together."""
    validation = list(held_out_pairs(200, covering(LANGUAGES), 0.1, seed))
    training = list(training_pairs(8000, covering(LANGUAGES), 0.1, seed))
    assert len(training) == 8000
    assert len(validation) == 200 * len(LANGUAGES)
    texts = {part for pair in training for part in (pair["prompt"].split(" | ")[0][4:], pair["completion"][1:])}
    numbers = {extract_number(text) for text in texts if len(text.split()) < 6}
    targets: dict[Item, set[str]] = {}
    for pair in validation:
        targets.setdefault(parse_item(pair["item"]), set()).add(pair["target"])
    for item, languages in targets.items():
        assert languages == set(LANGUAGES)
        assert item.kind != "unit" or str(item.value) not in numbers
        for other in [item.kind] if item.kind in ("date", "unit") else ["cardinal", "ordinal"]:
            if other == "ordinal" and item.value > 9999:
                continue
            assert is_held_out(item._replace(kind=other), 0.1)
            assert not texts & {phrase(item._replace(kind=other), language) for language in LANGUAGES}


@pytest.mark.needs("babel", "num2words")
def test_training_has_equal_parts_in_all_directions(seed):
    pairs = list(training_pairs(4000, covering(("en", "de", "pl")), 0.1, seed))
    kinds = Counter()
    for k, pair in enumerate(pairs):
        source, target = re.fullmatch(r"(..): .* \| (..):", pair["prompt"]).groups()
        kinds[KINDS[k % 4], source, target] += 1
    assert len(kinds) == 4 * 6
    assert all(count in binomial_range(1000, 1 / 6, comparisons=24) for count in kinds.values())
    assert all(re.match(r" (Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, ", pair["completion"])
               for pair in pairs[::4] if pair["prompt"].endswith("| en:"))  # fmt: skip
    assert pairs == list(training_pairs(4000, covering(("en", "de", "pl")), 0.1, seed))


@pytest.mark.needs("babel", "num2words")
def test_validation_has_equal_parts_and_different_items(seed):
    pairs = list(held_out_pairs(402, covering(("en", "fr")), 0.1, seed))
    assert Counter(pair["kind"] for pair in pairs) == {"date": 202, "cardinal": 202, "ordinal": 200, "unit": 200}
    assert set(Counter(pair["item"] for pair in pairs).values()) == {2}
    example = next(pair for pair in pairs if pair["target"] == "fr" and pair["kind"] == "cardinal")
    number = int(example["item"].split()[1])
    assert example["prompt"] == f"en: {phrase(Item('cardinal', number), 'en')} | fr:"
    assert example["completion"] == f" {phrase(Item('cardinal', number), 'fr')}"


def test_small_integers_are_never_held_out():
    for item in (Item("ordinal", 1), Item("unit", 1, "length-meter"), Item("cardinal", 16)):
        assert not is_held_out(item, 0.999999)
    assert is_held_out(Item("unit", Decimal("1.5"), "length-meter"), 0.999999)


def test_too_few_held_out_items_are_an_error():
    with pytest.raises(UserError, match=r"^val_fraction=0.01: .* ordinals, .*held_out=2,000 .* --val_fraction"):
        next(held_out_pairs(2000, covering(LANGUAGES), 0.01, 1))
    with pytest.raises(UserError, match=r"^val_fraction=0.01: .* dates, .*needs 2,000; .*--held_out"):
        next(held_out_pairs(2000, {"date": LANGUAGES}, 0.01, 1))


@pytest.mark.needs("babel", "num2words")
def test_topics_have_their_own_languages(seed):
    coverage = {"cardinal": ["en", "de", "pl"], "duration-week": ["en", "fr"], "mass-gram": ["de", "pl"]}
    training = list(training_pairs(400, coverage, 0.1, seed))
    assert len(training) == 400 and {pair["prompt"][:2] for pair in training[::2]} == {"en", "de", "pl"}
    held_out = list(held_out_pairs(40, coverage, 0.1, seed))
    targets: dict[str, set[str]] = {}
    for pair in held_out:
        kind, _, *unit = pair["item"].split()
        targets.setdefault(unit[0] if unit else kind, set()).add(pair["target"])
    assert targets == {topic: {*languages} for topic, languages in coverage.items()}


@pytest.mark.needs("babel", "num2words")
def test_available_languages():
    """num2words would answer in Finnish for "fil", and has "kz" where CLDR has "kk"."""
    assert {*LANGUAGES, "sv", "nl", "pt_BR"} <= {*available_languages()}
    assert not {"fil", "kz", "kk"} & {*available_languages()}


@pytest.mark.needs("babel", "num2words")
def test_corrections_of_swedish_and_of_regions():
    numbers = {40: "fyrtio", 1000: "ettusen", 41_101: "fyrtioettusen etthundraett"}
    assert {n: phrase(Item("cardinal", n), "sv") for n in numbers} == numbers
    assert phrase(Item("ordinal", 120), "sv") == "etthundratjugonde"
    assert phrase(Item("cardinal", 21_000), "es_CO") == "veintiún mil"
    assert phrase(Item("date", date(2026, 3, 1)), "fr_CH") == "dimanche, 1er mars 2026"


@pytest.mark.needs("babel", "num2words")
def test_long_forms_that_cldr_omits_because_they_are_the_short_ones():
    hours = [Item("unit", n, "duration-hour") for n in (1, 3)]
    assert [phrase(item, language) for language in ("nl", "ja", "da") for item in hours] == [
        *("1 uur", "3 uur"),
        *("1 時間", "3 時間"),
        *("1 time", "3 timer"),
    ]
