"""Tokenizers of other programs, compared with transformers on the same files."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from folio.base.files import read_json, write_json
from folio.checkpoints import foreign, foreign_tokenizers
from folio.data.tokenizer import byte_alphabet
from tests.support.foreign import (
    LONG,
    PAIRS,
    VOCAB,
    assert_refused,
    change_file,
    change_json,
    change_tensors,
    save_changed_checkpoint,
    save_nanogpt_checkpoint,
)
from tests.support.tiny_tokenizers import bpe

pytestmark = pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")

TEXT = "hello <|endoftext|> hell wörld's  日本\n"


def use_tokenizer_json(folder: Path, vocab: dict[str, int] = VOCAB) -> Path:
    """Replace merges.txt and vocab.json by transformers' tokenizer.json. Returns the folder."""
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    transformers.GPT2Tokenizer(vocab=dict(vocab), merges=PAIRS).save_pretrained(folder)
    return folder


def assert_same_ids(folder: Path) -> None:
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    text = TEXT.replace("<|endoftext|>", "")
    assert foreign.load(str(folder)).tokenizer.encode(text).tolist() == expected(text).input_ids


def test_the_vocabulary_next_to_the_merges_is_used(folder):
    """vocab.json was not read, so that text was tokenized wrongly if the ids were not in GPT-2's order."""
    assert_same_ids(folder)
    swapped = {**VOCAB, "a": VOCAB["b"], "b": VOCAB["a"]}  # bytes may be in any order
    (folder / "vocab.json").write_text(json.dumps(swapped), encoding="utf-8")
    assert_same_ids(folder)
    assert foreign.load(str(folder)).tokenizer.encode("ab").tolist() == [VOCAB["b"], VOCAB["a"]]
    (folder / "vocab.json").unlink()
    assert_refused(folder, r"vocab\.json is missing")


def added(token: str, i: int, **settings) -> dict:
    return {"added_tokens_decoder": {str(i): {"content": token, **settings}}}


EOT_FIRST = {token: (i + 1) % len(VOCAB) for token, i in VOCAB.items()}
WITHOUT_HELL = json.dumps({token: i for token, i in VOCAB.items() if token != "hell"})


@pytest.mark.parametrize(
    "file, changes, reason",
    [
        ("vocab.json", {"he": 257, "ll": 256}, "vocab.json: 'he' has the id 257, .* 256"),
        ("vocab.json", EOT_FIRST, "vocab.json: .* has the id "),
        ("vocab.json", {"<pad>": 260}, r"no merge .*'<pad>' \(id 260\).*<\|endoftext\|>"),
        ("vocab.json", {LONG: 1}, r"no merge .*'x+.*' \(id 1\)"),
        ("vocab.json", WITHOUT_HELL, "lacks the token 'hell'"),
        ("vocab.json", "[]", "is not a folder of Hugging Face's GPT-2"),
        ("vocab.json", '{"a": "b"}', "is not a folder of Hugging Face's GPT-2|vocab.json"),
        ("added_tokens.json", {"<|user|>": 260}, r"added_tokens\.json: no merge .*'<\|user\|>' \(id 260\)"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space=True; .*only False"),
        ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token=True; .*only False"),
        ("tokenizer_config.json", {"add_eos_token": True}, "add_eos_token=True; .*only False"),
        ("tokenizer_config.json", added(LONG, 260), "no merge .*'x+"),
        ("tokenizer_config.json", added("<|endoftext|>", 259, rstrip=True), r"'<\|endoftext\|>' has rstrip=True"),
        ("merges.txt", "h e\nl l\n", "no merge .*'he'"),
        ("merges.txt", "#version: 0.2\nhe ll\n", "the merge 'he ll' .*two earlier tokens"),
        ("merges.txt", "#version: 0.2\nh e\nh e\n", "the merge 'h e' .*new token"),
        ("merges.txt", "#version: 0.2\nh e l\n", "the merge 'h e l' .*two earlier tokens"),
        ("merges.txt", "", "no merge .*'he'"),
    ],
)
def test_unsupported_tokenizer_files_are_errors(file, changes, reason, folder):
    """The files that transformers reads in addition to merges.txt were ignored. Damaged merges ended in a traceback;
    without the version line, a merge was lost and all ids were shifted by one.
    """
    change_file(folder, file, changes)
    assert_refused(folder, reason)


def test_a_merge_that_never_applies_is_an_error(folder):
    """tiktoken merges by the result: it merged "ab" and "c" to "abc", transformers only "a" and "bc"."""
    pairs = [("a", "b"), ("b", "c"), ("a", "bc")]
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), "ab", "bc", "abc"])}
    hf_tokenizer = transformers.GPT2Tokenizer(vocab=vocab, merges=pairs)
    ranks = [token.encode() if len(token) > 1 else bytes([byte_alphabet()[token]]) for token in vocab]
    assert hf_tokenizer("abc").input_ids != foreign_tokenizers.GPT2Tokenizer(ranks).encode("abc").tolist()
    lines = "".join(" ".join(pair) + "\n" for pair in pairs)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    assert_refused(folder, "the merge 'a bc' never applies")


def test_merges_are_accepted_exactly_where_both_tokenizers_agree(seed):
    """Random merges over three letters. The reference encodes each token step by step with the merges before it."""
    rng = random.Random(seed)
    results = set()
    for _ in range(300):
        rank = {letter: i for i, letter in enumerate("abc")}
        parts: dict[str, list[str]] = {}
        for _ in range(8):
            pair = [rng.choice(list(rank)) for _ in range(2)]
            token = "".join(pair)
            if token in rank:
                continue
            text = list(token)
            while True:  # byte-pair encoding by definition: lowest rank first, leftmost of equal ranks
                merged = [text[i] + text[i + 1] for i in range(len(text) - 1)]
                best = min(merged, key=lambda t: rank.get(t, len(rank)))
                if best not in rank:
                    break
                position = merged.index(best)
                text[position : position + 2] = [best]
            results.add(text == pair)
            assert foreign_tokenizers.merge_applies(*pair, rank, parts) == (text == pair), (parts, pair)
            if text == pair:
                rank[token], parts[token] = len(rank), pair
    assert results == {True, False}


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
    """GPT-2's file on the hub: merges are strings, and the model has no type."""
    content = read_json(use_tokenizer_json(folder) / "tokenizer.json")
    content["model"] = {"vocab": VOCAB, "merges": [" ".join(pair) for pair in PAIRS]}
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    write_json(folder / "tokenizer.json", content)
    assert_same_ids(folder)


NOT_GPT2 = "not a byte-level BPE with GPT-2's pre-tokenizer"
TOKEN = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda c: c["added_tokens"].append({"id": 260, "content": "<|user|>", **TOKEN}), "added token"),
        (lambda c: c["added_tokens"][0].update(lstrip=True), "'<|endoftext|>' has lstrip=True"),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), NOT_GPT2),
        (lambda c: c["pre_tokenizer"].update(use_regex=False), NOT_GPT2),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), NOT_GPT2),
        (lambda c: c["model"].update(dropout=0.1), NOT_GPT2),
        (lambda c: c["model"].update(type=LONG), "'x+.*only byte-level BPE"),
        (lambda c: c["post_processor"].update(special_tokens={"<s>": {}}), "post_processor"),
        (lambda c: c["model"]["vocab"].update(he=257, ll=256), "'he' has the id 257"),
        (lambda c: c.pop("model"), "it has no 'model'"),
    ],
)
def test_an_unsupported_tokenizer_json_is_an_error(change, reason, folder):
    content = read_json(use_tokenizer_json(folder) / "tokenizer.json")
    change(content)
    write_json(folder / "tokenizer.json", content)
    assert_refused(folder, reason)


def test_tokenizer_files_that_disagree_are_an_error(folder):
    saved = {name: (folder / name).read_text(encoding="utf-8") for name in ("merges.txt", "vocab.json")}
    use_tokenizer_json(folder)
    for name, content in saved.items():
        (folder / name).write_text(content, encoding="utf-8")
    assert_same_ids(folder)
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nl o\n", encoding="utf-8")
    (folder / "vocab.json").write_text(saved["vocab.json"].replace('"hell"', '"lo"'), encoding="utf-8")
    assert_refused(folder, r"merges\.txt and tokenizer\.json .*different tokens")


@pytest.mark.parametrize(
    "vocab_size, gpt2", [(50257, True), (50304, True), (50300, False), (51264, False), (260, False)]
)
def test_without_a_tokenizer_the_vocabulary_size_must_be_gpt2s(vocab_size, gpt2, folder, tmp_path, monkeypatch):
    """Any vocabulary of 50,257 tokens or more was assumed to be GPT-2's; nanoGPT pads it to 50,304."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    rows = {"transformer.wte.weight": torch.zeros(vocab_size, 16)}
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    change_json(folder, "config.json", vocab_size=vocab_size)
    change_tensors(folder, rows)
    rows["lm_head.weight"] = rows["transformer.wte.weight"]
    changes = dict(model=rows, model_args={"vocab_size": vocab_size}, config={"dataset": "openwebtext"})
    save_changed_checkpoint(tmp_path / "out" / "ckpt.pt", **changes)
    for path, remedy in ((folder, "add the tokenizer's files"), (tmp_path / "out" / "ckpt.pt", "meta.pkl")):
        if gpt2:
            assert foreign.load(str(path)).tokenizer.vocab_size == bpe().vocab_size
        else:
            assert_refused(path, f"vocabulary of {vocab_size:,} tokens is not GPT-2's.*{remedy}")


def test_a_meta_pkl_with_another_vocabulary_is_an_error(tmp_path):
    """After the data set was prepared again with fewer characters, the model's ids decoded to other characters."""
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    (tmp_path / "data" / "abc" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}}))
    assert_refused(tmp_path / "out" / "ckpt.pt", r"meta\.pkl has a vocabulary of 2.* 3")
