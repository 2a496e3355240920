"""The browser's tokenizers, prompts and notes compared with Python."""

import json
import random
from collections.abc import Iterator

import pytest

from folio import UserError
from folio.data.sources.music import EventFormat, pitch_name, place_notes
from folio.data.tokenizer import EOT_TEXT, BPETokenizer, ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer
from folio.decoding.prompts import encode_prompt
from folio.decoding.text_stream import TextStream
from tests.support.engine import Engine, engine_in
from tests.support.music_models import PERFORMANCE, SCORE, random_text, tokenizer_of
from tests.support.tiny_tokenizers import bpe, trained

STRINGS = 2_000  # per tokenizer
CODE = "def f(x):\n    return x + 1\n\n\nfor (let i = 0; i < 10; i++) {\n\t\tprint('it''s', \"they'll\");\r\n}  // 3.14"
PARTS = [  # of random strings
    *CODE.replace(" ", "~ ").split("~"),
    *"a b e h l o w the hello hell he world don't it's we'll I've they're 'S 'd ''s 1 12 2026 3.14 x² ½".split(),
    *[" ", "  ", "    ", "\n", "\n\n", " \n", "\r\n", "\r", "\t", "\t \t", " '", " hello", " world", " w", " 7", " !"],
    *map(chr, [0, 1, 8, *range(0xB, 0xD), *range(0x1B, 0x20), 0x7F, 0x85, 0xA0, 0xAD, 0x180E, 0xFEFF, 0xFFFD, 0xFFFF]),
    *map(chr, [0x1680, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000]),  # white space etc.
    *["é", "e\u0301", "ß", "İ", "ﬁ", "ǅ", "\u0301", "\u0308\u0323", "न\u0940", "한", "\u1112\u1161\u11ab", "ก็"],
    *["😀", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "𐐷", "𠀀", "\U0010ffff"],
    *["שלום", "مرحبا", "\u202e", "\u200f", "日本語", "カタカナ", "Привет", "Ωμέγα", "٣٤", "५", "Ⅻ", "①", "៥"],
    *["\ud800", "\udfff", "\ud83d", "\ude00"],  # surrogates, which may form pairs
    *["</script>", "<!--", "<|endoftext|>", "<|endof", "__proto__", "\\", '"'],
]
SPACES = " \n\t\xa0\u3000\x85\x1c"


def random_strings(rng: random.Random, count: int) -> list[str]:
    """Strings of PARTS, of known code points, of repeated parts, and with long white space."""
    known = [c for c in map(chr, range(0x20000)) if c.isprintable() or c.isspace()]

    def make() -> str:
        kind = rng.random()
        if kind < 0.9:
            return "".join(rng.choices(PARTS, k=rng.randint(0, 20)))
        if kind < 0.98:
            return "".join(rng.choices(known, k=rng.randint(1, 30)))
        return rng.choice(PARTS) * rng.randint(1, 200) + "".join(rng.choices(SPACES, k=99)) + rng.choice(PARTS)

    return [join_surrogates(make()) for _ in range(count)]


def join_surrogates(text: str) -> str:
    """Join pairs of a high and a low surrogate into one character, as JSON does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def random_ranks(rng: random.Random) -> list[bytes]:
    """Tokens in random order: some are unreachable, and others are merged before their parts."""
    tokens = {"".join(rng.choices("abé ", k=rng.randint(2, 6))).encode() for _ in range(300)}
    return [bytes([b]) for b in range(256)] + rng.sample(sorted(tokens), len(tokens))


@pytest.fixture(scope="module")
def engine(browser) -> Iterator[Engine]:
    with engine_in(browser, "tokenizers.js", "questions.js", "music.js") as engine:
        yield engine


def compute(engine: Engine, expression: str, tokenizer: Tokenizer, values: list) -> list:
    """Evaluate an expression of `tokenizer` and `value` for each value."""
    script = f"(tokenizer => values.map(value => {expression}))(makeTokenizer(json))"
    return engine(script, json=tokenizer.to_json() | {"kind": tokenizer.kind}, values=values)


def make_tokenizers(rng: random.Random, texts: list[str]) -> dict[str, Tokenizer]:
    # The trainer of the tokenizers library does not accept surrogates.
    learned = BPETokenizer.train([text.encode("utf-8", "replace").decode() for text in texts], 1500)
    some = set("".join(texts[: len(texts) // 2])) - set("xyz")  # about half of the characters
    return {
        "char": CharTokenizer("".join(c for c in sorted(some) if not 0xD800 <= ord(c) < 0xE000)),
        "char with eot": CharTokenizer.of("banana\n", eot=True),
        "byte": ByteTokenizer(),
        "byte, all line ends": ByteTokenizer().with_keep_line_ends(True),
        "bpe": learned,
        "gpt2": GPT2Tokenizer(learned.ranks),
        "few merges": bpe(),
        "overlapping merges": GPT2Tokenizer(random_ranks(rng)),
    }


def test_prompt_ids_equal_python(engine, seed):
    rng = random.Random(seed)
    strings = random_strings(rng, STRINGS)
    words = ["".join(rng.choices("abé ", k=rng.randint(0, 40))) for _ in range(STRINGS // 5)]
    for name, tokenizer in make_tokenizers(rng, strings[:300]).items():
        prompts = strings + (words if name == "overlapping merges" else [])
        actual = compute(engine, "encodePrompt(tokenizer, value)", tokenizer, prompts)
        for text, prompt in zip(prompts, actual, strict=True):
            ids, _, unknown = encode_prompt(tokenizer, text, "skip")
            assert prompt == {"ids": ids, "unknown": unknown}, (name, text)
        facts = "[tokenizer.kind, tokenizer.vocabSize, tokenizer.eot]"
        assert compute(engine, facts, tokenizer, [0]) == [[tokenizer.kind, tokenizer.vocab_size, tokenizer.eot]]


def test_long_words_and_long_white_space(engine, seed):
    """Would time out if each merge scanned the whole word."""
    rng = random.Random(seed)
    texts = ["ab" * 50_000, "".join(rng.choices("abé", k=99_999)), " " * 100_000, "\n" * 99_999 + "a", "é" * 33_333]
    for tokenizer in (trained(), GPT2Tokenizer(random_ranks(rng))):
        expected = [tokenizer.encode(text).tolist() for text in texts]
        assert compute(engine, "tokenizer.encode(value)", tokenizer, texts) == expected


def test_token_texts_equal_python(engine, seed):
    rng = random.Random(seed)
    strange = bytes(rng.choices([0x41, 0x80, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xFF], k=3000))
    parts = {strange[i : i + rng.randint(2, 5)] for i in range(2900)} | {"\ufeffé".encode(), "\ufffd€".encode()}
    broken = GPT2Tokenizer([bytes([b]) for b in range(256)] + sorted(parts))
    tokenizers = [broken, *make_tokenizers(rng, random_strings(rng, 50)).values(), tokenizer_of(SCORE)]
    for tokenizer in tokenizers:
        ids = list(range(tokenizer.vocab_size))
        assert compute(engine, "tokenizer.piece(value)", tokenizer, [*ids, 10**6]) == [*map(tokenizer.piece, ids), ""]
        contents = compute(engine, "Array.from(tokenizer.tokenBytes(value))", tokenizer, ids)
        assert contents == [list(tokenizer.token_bytes(i)) for i in ids]
        rows = [rng.choices(ids, k=rng.randint(0, 12)) for _ in range(300)]
        assert compute(engine, "tokenizer.decode(value)", tokenizer, rows) == [tokenizer.decode(row) for row in rows]


def test_streamed_text_equals_python(engine, seed):
    """Incomplete characters and possible beginnings of the stop string are held back."""
    rng = random.Random(seed)
    leads = [0x61, 0x62, 0x80, 0x9F, 0xA0, 0xBF, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]
    stops = [None, "ab", "aab", "é", "\ufffd", "\ufffda", "😀", "a😀", "\ude00", "a\ud83d", "\ud83da", "abé"]
    cases = []
    for _ in range(3000):
        content = "".join(rng.choices(["a", "b", "é", "😀", "€"], k=6)).encode() + bytes(rng.choices(leads, k=6))
        ids = list(content) if rng.random() < 0.5 else rng.choices([*leads, 256], k=12)
        cases.append([ids, rng.choice(stops)])
    expression = """(stream => [...value[0], null].map(id => [stream.push(id), stream.ended]))(
      new TextStream(tokenizer, value[1]))"""
    for (ids, stop), shown in zip(cases, compute(engine, expression, ByteTokenizer(), cases), strict=True):
        stream = TextStream(ByteTokenizer(), stop)
        assert shown == [[stream.push(token), stream.ended] for token in [*ids, None]], (ids, stop)


def test_stop_strings_are_those_of_python(engine):
    """They have the line ends of the training data, and cannot contain the special token."""
    stops = ["a\r\nb\r", EOT_TEXT, f"'{EOT_TEXT}\n"]
    stream = "new TextStream(tokenizer, value)"
    expression = f"errorOf(() => {stream}) ?? {stream}.stop"
    for tokenizer in (ByteTokenizer(), ByteTokenizer().with_keep_line_ends(True), CharTokenizer("ab\r")):
        for stop, shown in zip(stops, compute(engine, expression, tokenizer, stops), strict=True):
            try:
                (expected,) = TextStream(tokenizer, stop).stop
            except UserError as error:
                expected = str(error)
            assert shown == expected


def notes_in_python(text: str, format: EventFormat) -> list:
    notes, times = place_notes(text.split(), format)
    return [[[pitch_name(note.pitch), *note, *places] for note, *places in notes], times]


@pytest.mark.parametrize("format", [SCORE, PERFORMANCE], ids=["score", "performance"])
def test_notes_equal_python(engine, format, seed):
    tokenizer = tokenizer_of(format)
    texts = [random_text(tokenizer, seed + i, 60) for i in range(100)]
    expression = """(({notes, times}) => [notes.map(({start, end, pitch, velocity, positions}) =>
      [pitchName(pitch), start, end, pitch, velocity, ...positions]), times])(placeNotes(value.split(" "), FORMAT))"""
    actual = compute(engine, expression.replace("FORMAT", json.dumps(tokenizer.format)), tokenizer, texts)
    assert actual == [notes_in_python(text, format) for text in texts]
    separated = [text.replace(" ", "\x1c\u3000", 3) for text in texts]
    expected = [tokenizer.encode(text).tolist() for text in texts]
    assert compute(engine, "tokenizer.encode(value)", tokenizer, separated) == expected


def test_unknown_events_have_the_message_of_python(engine):
    tokenizer, words = tokenizer_of(SCORE), ["a", "NoteOn_", "é'\ud800", "'\"\\\n\u200b\U000e0001", "x" * 41, "\ufeff"]
    texts = [f" \xa0NoteOn_55\u3000{word} b" for word in words]
    for text, actual in zip(
        texts, compute(engine, "errorOf(() => tokenizer.encode(value))", tokenizer, texts), strict=True
    ):
        with pytest.raises(UserError) as raised:
            tokenizer.encode(text)
        assert actual == str(raised.value)
