"""Tokenizers of other programs, against transformers' reading of the same files."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from folio import UserError
from folio.checkpoints import foreign, foreign_tokenizers
from folio.data.tokenizer import byte_alphabet
from tests.support.foreign import (
    PAIRS,
    VOCAB,
    change_json,
    change_tensors,
    save_changed_checkpoint,
    save_nanogpt_checkpoint,
)
from tests.support.tiny_tokenizers import bpe

pytestmark = pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")

TEXT = "hello <|endoftext|> hell wörld's  日本\n"


def use_tokenizer_json(folder: Path, vocab: dict[str, int] = VOCAB) -> Path:
    """Replace merges.txt and vocab.json by tokenizer.json, as transformers writes it. Returns the folder."""
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    transformers.GPT2Tokenizer(vocab=dict(vocab), merges=PAIRS).save_pretrained(folder)
    return folder


def assert_same_ids(folder: Path) -> None:
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    text = TEXT.replace("<|endoftext|>", "")
    assert foreign.load(str(folder)).tokenizer.encode(text).tolist() == expected(text).input_ids


def test_the_vocabulary_next_to_the_merges_is_used(folder):
    """vocab.json was not read: with ids in another order than GPT-2's, text was silently tokenized wrongly."""
    assert_same_ids(folder)
    swapped = {**VOCAB, "a": VOCAB["b"], "b": VOCAB["a"]}  # bytes may be in any order
    (folder / "vocab.json").write_text(json.dumps(swapped), encoding="utf-8")
    assert_same_ids(folder)
    assert foreign.load(str(folder)).tokenizer.encode("ab").tolist() == [VOCAB["b"], VOCAB["a"]]
    first = {token: (i + 1) % len(VOCAB) for token, i in VOCAB.items()}  # the end-of-text token first
    for vocab, message in (
        ({**VOCAB, "he": 257, "ll": 256}, "vocab.json: 'he' has the id 257, but the order of the merges gives it 256"),
        (first, "vocab.json: .* has the id "),
        (
            {**VOCAB, "<pad>": 260},
            r"no merge makes the token '<pad>' \(id 260\), and the only token that Folio adds is",
        ),
        ({token: i for token, i in VOCAB.items() if token != "hell"}, "the vocabulary lacks the token 'hell'"),
        ([], "is not a folder of Hugging Face's GPT-2"),
        ({"a": "b"}, "is not a folder of Hugging Face's GPT-2|vocab.json"),
    ):
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            foreign.load(str(folder))
    (folder / "vocab.json").unlink()
    with pytest.raises(UserError, match=r"No such file.*vocab\.json"):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "added_tokens.json",
            {"<|user|>": 260},
            r"added_tokens\.json: no merge makes the token '<\|user\|>' \(id 260\)",
        ),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space=True; Folio supports only False"),
        ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token=True; Folio supports only False"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"260": {"content": "<x>"}}},
            "no merge makes the token '<x>'",
        ),
    ],
)
def test_added_tokens_and_other_rules_are_refused(name, changes, message, folder):
    """The files that transformers reads in addition to merges.txt were ignored."""
    change_json(folder, name, **changes)
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "merges, message",
    [
        ("h e\nl l\n", "does not make a new token from two|no merge makes the token 'he'"),
        ("#version: 0.2\nhe ll\n", "the merge 'he ll' does not make a new token from two earlier tokens"),
        ("#version: 0.2\nh e\nh e\n", "the merge 'h e' does not make a new token"),
        ("#version: 0.2\nh e l\n", "the merge 'h e l' does not make a new token"),
        ("#version: 0.2\n日 本\n", "does not make a new token from two earlier tokens"),
        ("", "no merge makes the token 'he'"),
        ("#version: 0.2\nh e\nl l\n", "no merge makes the token 'hell'"),
    ],
)
def test_damaged_merges_are_refused(merges, message, folder):
    """They ended in a traceback. Without the version line, merges.txt lost a merge and all ids were shifted by one."""
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def test_a_merge_that_never_applies_is_refused(folder):
    """tiktoken merges by the result: it merged "ab" and "c" to "abc", and transformers only "a" and "bc"."""
    pairs = [("a", "b"), ("b", "c"), ("a", "bc")]
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), "ab", "bc", "abc"])}
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=pairs)
    ranks = [token.encode() if len(token) > 1 else bytes([byte_alphabet()[token]]) for token in vocab]
    assert theirs("abc").input_ids != foreign_tokenizers.GPT2Tokenizer(ranks).encode("abc").tolist()
    lines = "".join(" ".join(pair) + "\n" for pair in pairs)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    with pytest.raises(UserError, match="the merge 'a bc' never applies, because earlier merges come first"):
        foreign.load(str(folder))


def test_merges_are_accepted_exactly_where_both_tokenizers_agree(seed):
    """Random merges over three letters. The oracle encodes each token with the merges before it, one by one."""
    rng = random.Random(seed)
    verdicts = set()
    for _ in range(300):
        rank = {letter: i for i, letter in enumerate("abc")}
        parts: dict[str, list[str]] = {}
        for _ in range(8):
            pair = [rng.choice(list(rank)) for _ in range(2)]
            token = "".join(pair)
            if token in rank:
                continue
            text = list(token)
            while True:  # byte-pair encoding by its definition: the lowest rank first, the leftmost of equal ranks
                merged = [text[i] + text[i + 1] for i in range(len(text) - 1)]
                best = min(merged, key=lambda t: rank.get(t, len(rank)))
                if best not in rank:
                    break
                at = merged.index(best)
                text[at : at + 2] = [best]
            verdicts.add(text == pair)
            assert foreign_tokenizers.merge_applies(*pair, rank, parts) == (text == pair), (parts, pair)
            if text == pair:
                rank[token], parts[token] = len(rank), pair
    assert verdicts == {True, False}


@pytest.mark.parametrize("vocab_size", [260, 50304])
def test_tokenizer_json_is_read_at_any_vocabulary_size(vocab_size, folder):
    """With 50,257 tokens or more, GPT-2's own tokenizer was used instead of the one in the folder."""
    use_tokenizer_json(folder)
    change_json(folder, "config.json", vocab_size=vocab_size)
    rows = torch.zeros(vocab_size - 260, 16)
    wte = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_tensors(folder, {"transformer.wte.weight": torch.cat([wte, rows])})
    assert_same_ids(folder)
    assert foreign.load(str(folder)).tokenizer.eot == 259


def test_tokenizer_json_in_the_older_format_is_read(folder):
    """GPT-2's own on the hub: merges are strings, and the model has no type."""
    content = json.loads((use_tokenizer_json(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] = {"vocab": VOCAB, "merges": [" ".join(pair) for pair in PAIRS]}
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert_same_ids(folder)


NOT_GPT2 = "not a byte-level BPE with GPT-2's pre-tokenizer"


TOKEN = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda c: c["added_tokens"].append({"id": 260, "content": "<|user|>", **TOKEN}),
            r"its one added token must be",
        ),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), NOT_GPT2),
        (lambda c: c["pre_tokenizer"].update(use_regex=False), NOT_GPT2),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), NOT_GPT2),
        (lambda c: c["model"].update(dropout=0.1), NOT_GPT2),
        (lambda c: c["model"].update(type="Unigram"), "'Unigram' is not a byte-level BPE with GPT-2's pre-tokenizer"),
        (
            lambda c: c["post_processor"].update(special_tokens={"<s>": {}}),
            "a post_processor that adds tokens to each text",
        ),
        (lambda c: c["model"]["vocab"].update(he=257, ll=256), "'he' has the id 257"),
        (lambda c: c.pop("model"), "it has no 'model'"),
    ],
)
def test_tokenizer_json_of_another_kind_is_refused(change, message, folder):
    content = json.loads((use_tokenizer_json(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def test_tokenizer_files_that_disagree_are_refused(folder):
    saved = {name: (folder / name).read_text(encoding="utf-8") for name in ("merges.txt", "vocab.json")}
    use_tokenizer_json(folder)
    for name, content in saved.items():
        (folder / name).write_text(content, encoding="utf-8")
    assert_same_ids(folder)
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nl o\n", encoding="utf-8")
    (folder / "vocab.json").write_text(saved["vocab.json"].replace('"hell"', '"lo"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"merges\.txt and tokenizer\.json have different tokens"):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "vocab_size, gpt2", [(50257, True), (50304, True), (50260, False), (60000, False), (260, False)]
)
def test_without_a_tokenizer_the_vocabulary_size_must_be_gpt2s(vocab_size, gpt2, folder, monkeypatch):
    """Any vocabulary of 50,257 tokens or more was assumed to be GPT-2's."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    change_json(folder, "config.json", vocab_size=vocab_size)
    change_tensors(folder, {"transformer.wte.weight": torch.zeros(vocab_size, 16)})
    if gpt2:
        assert foreign.load(str(folder)).tokenizer.vocab_size == bpe().vocab_size
        return
    with pytest.raises(UserError, match=f"no tokenizer.json, and a vocabulary of {vocab_size:,} tokens is not GPT-2's"):
        foreign.load(str(folder))


@pytest.mark.parametrize("vocab_size, gpt2", [(50257, True), (50304, True), (50300, False), (100288, False)])
def test_a_nanogpt_checkpoint_without_meta_pkl_must_have_gpt2s_size(vocab_size, gpt2, tmp_path, monkeypatch):
    """Any vocabulary of 50,257 tokens or more was assumed to be GPT-2's; nanoGPT pads it to 50,304."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    rows = {"transformer.wte.weight": torch.zeros(vocab_size, 16), "lm_head.weight": torch.zeros(vocab_size, 16)}
    changes = dict(model=rows, model_args={"vocab_size": vocab_size}, config={"dataset": "openwebtext"})
    save_changed_checkpoint(tmp_path / "out" / "ckpt.pt", **changes)
    if gpt2:
        assert foreign.load(str(tmp_path / "out" / "ckpt.pt")).tokenizer.vocab_size == bpe().vocab_size
        return
    with pytest.raises(UserError, match=f"a vocabulary of {vocab_size:,} tokens is not GPT-2's, and no meta.pkl"):
        foreign.load(str(tmp_path / "out" / "ckpt.pt"))


def test_the_meta_pkl_of_another_vocabulary_is_refused(tmp_path):
    """With a data set that was prepared again with fewer characters, the model's ids decoded to other characters."""
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    (tmp_path / "data" / "abc" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}}))
    with pytest.raises(UserError, match=r"meta\.pkl has a vocabulary of 2, but the model has one of 3"):
        foreign.load(str(tmp_path / "out" / "ckpt.pt"))
