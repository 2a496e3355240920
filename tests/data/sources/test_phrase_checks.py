import random
import re

import pytest

from folio import UserError
from folio.base.settings import ConfigError, load
from folio.data.shards import open_dataset
from folio.data.sources import phrase_checks
from folio.data.sources.pairs import translation as translation_pair
from folio.data.sources.pairs import validation_pairs
from folio.data.sources.phrase_checks import check_languages, drop_ambiguous, find_problems
from folio.data.sources.phrases import KINDS, LANGUAGES, TOPICS, draw_item, is_held_out, phrase, training_pairs
from prepare import translation
from prepare.translation import TranslationConfig

pytestmark = pytest.mark.needs("babel", "num2words")


def prepared_targets(folder, languages: str) -> dict[str, set[str]]:
    """Prepare phrases, and return the target languages of each kind in validation."""
    settings = dict(data_dir=str(folder), pairs=100, held_out=20, tokenizer="byte")
    translation.main(TranslationConfig(**settings, languages=languages))
    pairs = validation_pairs(open_dataset(folder / "translation"))
    return {kind: {p.fields["target"] for p in pairs if p.fields["kind"] == kind} for kind in KINDS}


def test_the_default_languages_have_all_phrases():
    assert check_languages(LANGUAGES) == ({topic: list(LANGUAGES) for topic in TOPICS}, [])


def test_the_checks_do_not_change_the_default_pairs(seed):
    """The pairs are those of the algorithm without coverage: any kind, between any two languages."""
    coverage, _ = check_languages(LANGUAGES)
    rng = random.Random(f"training {seed}")
    expected = []
    for kind in [*KINDS] * 100:
        item = draw_item(kind, rng)
        while is_held_out(item, 0.1):
            item = draw_item(kind, rng)
        source, target = rng.sample(LANGUAGES, 2)
        expected.append(translation_pair(phrase(item, source), phrase(item, target), source, target))
    assert list(training_pairs(400, coverage, 0.1, seed)) == expected


def test_swedish_and_dutch(tmp_path, capsys):
    assert prepared_targets(tmp_path, "en,sv,nl") == {kind: {"en", "sv", "nl"} for kind in KINDS}
    assert "left out" not in capsys.readouterr().out


def test_missing_ordinals_are_left_out(tmp_path, capsys):
    all_targets = {"en", "de", "cs"}
    assert prepared_targets(tmp_path, "en,de,cs") == {**dict.fromkeys(KINDS, all_targets), "ordinal": {"en", "de"}}
    out = capsys.readouterr().out
    assert re.search(r"left out in cs: ordinals: num2words has none for ([\d,]+) of \1 numbers", out)
    assert "spelling not checked: cs;" in out


@pytest.mark.parametrize(
    ("language", "topic", "reason"),
    [
        ("am", "cardinal", "num2words has none for .* such as 1,100"),  # TypeError
        ("vi", "ordinal", "such as cardinal 1 and ordinal 1"),
        ("tr", "cardinal", "171554"),  # written as 170554
        ("sr", "cardinal", "LATIN letters"),  # CLDR's Serbian is Cyrillic
        ("be", "ordinal", "LATIN letters"),  # one Latin letter in a Cyrillic word
        ("ce", "date", "no pattern"),
        ("tg", "duration-week", "a symbol"),
    ],
)
def test_errors_of_the_libraries(language, topic, reason):
    """A fixed version of the library makes one of these fail; then remove the line."""
    assert re.search(reason, find_problems(language)[topic])


def spell(n: int, kind: str) -> str:
    """A number in letters: "cardinal bc" for 12."""
    return f"{kind} {''.join('abcdefghij'[int(digit)] for digit in str(n))}"


@pytest.mark.parametrize(
    ("fake", "topics", "reason"),
    [
        (spell, "", ""),
        (lambda n, kind: f"{kind} {n}", "cardinal ordinal", "writes 0 as 'cardinal 0'"),
        (lambda n, kind: spell(n % 10, kind), "cardinal ordinal", r"(.+) of \1 have the text of another"),
        (lambda n, kind: spell(n - (n == 700), kind), "cardinal ordinal", "cardinal 699 and cardinal 700"),
        (lambda n, kind: spell(n, "cardinal"), "ordinal", "such as cardinal 1 and ordinal 1"),
        (lambda n, kind: spell(n, kind) if kind == "cardinal" else "", "ordinal", r"has none for (.+) of \1 numbers"),
        (lambda n, kind: spell(n, kind) if n != 300 else 1 / 0, "cardinal ordinal", "none for 1 of .* as 300"),
    ],
)
def test_errors_of_a_fake_num2words(monkeypatch, fake, topics, reason):
    from num2words import num2words as original

    choose = lambda n, lang, to: fake(n, to) if lang == "nl" else original(n, False, lang, to)  # noqa: E731
    monkeypatch.setattr("num2words.num2words", choose)
    phrase.cache_clear()
    try:
        problems = find_problems("nl")
    finally:
        phrase.cache_clear()
    assert problems.keys() == {*topics.split()}
    assert re.search(reason, " ".join(problems.values()))


def test_english_numbers_are_left_out(monkeypatch):
    english = {number: phrase_checks.number_texts("en", number) for number in ("cardinal", "ordinal")}
    monkeypatch.setattr(phrase_checks, "number_texts", lambda language, kind: english[kind])
    assert find_problems("nl") == dict.fromkeys(("cardinal", "ordinal"), "num2words writes English")
    assert find_problems("en_IN") == {}


def test_ambiguous_units_are_left_out(monkeypatch):
    """With one name for feet and inches, and pixels without their number."""

    def fake(item, language):
        inches = item._replace(unit="length-inch")
        return "pixels" if item.unit == "graphics-pixel" else phrase(inches if "foot" in item.name else item, language)

    monkeypatch.setattr(phrase_checks, "phrase", fake)
    assert find_problems("sv").keys() == {"length-foot", "length-inch", "graphics-pixel"}
    (line,) = phrase_checks.describe_problems(find_problems("sv"))
    assert line.startswith("3 units (length-inch, length-foot, graphics-pixel): ")


def test_prompts_with_another_answer_are_dropped():
    pairs = [{"prompt": prompt, "completion": text} for prompt, text in ("ab", "cd", "ab", "ae")]
    answers = {"c": "x"}
    assert list(drop_ambiguous(pairs, answers)) == [pairs[0], None, pairs[2], None]
    assert answers == {"c": "x", "a": "b"}


def test_languages_without_a_common_kind(monkeypatch):
    monkeypatch.setattr(phrase_checks, "find_problems", lambda language: dict.fromkeys(TOPICS, f"none in {language}"))
    with pytest.raises(UserError, match=r"^languages=en,sv: .*none in en.*none in sv"):
        check_languages(["en", "sv"])


def test_kinds_of_one_language_are_left_out():
    coverage, lines = check_languages(["en", "vi"])
    assert "ordinal" not in coverage and coverage["cardinal"] == ["en", "vi"]
    assert any(re.match("left out: ordinals, .*, which only one", line) for line in lines)


@pytest.mark.parametrize("code", ["tet", "kk", "fil", "pt-BR"])
def test_an_unavailable_language_is_an_error_that_lists_the_others(code):
    with pytest.raises(ConfigError, match=rf"no phrases in '{code}', only in am, ar, .*, pt, pt_BR, .*, sv, "):
        load(TranslationConfig, [f"--languages=en,{code}"])
