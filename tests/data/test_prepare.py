import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import ConfigError, check, load
from folio.data import prepare as prepare_module
from folio.data import tokenizer
from folio.data.blocks import document_hash
from folio.data.corpus import Corpus
from folio.data.inputs import SizeLimits
from folio.data.prepare import PrepareConfig, name_from, prepare
from folio.data.shards import MIN_DOCUMENTS, open_dataset
from folio.data.windows import parse_mixture
from folio.machine import compiled
from prepare.text import TextConfig
from tests.support.prepared import (
    SMALL_BLOCKS,
    assert_same_data_set,
    config,
    content,
    corpus_of,
    ids_of,
    interrupt,
    interrupted_after,
    read_all,
    read_back,
    read_report,
    small_tokenizer,
    write_documents,
)
from tests.support.processes import ROOT
from tests.support.tiny_tokenizers import bpe
from tests.support.tolerances import binomial_range

# --- the data set -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_every_document_is_in_one_split_and_ends_with_eot(
    kind, lines, folder_of_texts, texts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    cfg = config(tmp_path, tokenizer=kind, vocab_size=300, on_unknown="skip")
    folder = prepare(cfg, lines, "a")
    train, val = read_back(folder, "train"), read_back(folder, "val")
    assert sorted(train + val) == sorted(filter(None, texts))
    assert train == [text for text in texts if text in set(train)]
    assert len(set(val)) in binomial_range(len(set(texts) - {""}), cfg.val_fraction)
    assert read_report(folder)["unknown_characters"] == 0
    assert "not in the vocabulary" not in capsys.readouterr().out
    assert content(prepare(cfg, folder_of_texts, "b")) == content(folder)  # the same documents in files
    assert open_dataset(folder).load_tokenizer().kind == kind


def test_one_text_is_split_at_its_tail_as_in_nanogpt(tmp_path, texts):
    text = "\n".join(texts)
    (tmp_path / "novel.txt").write_bytes(text.encode())
    novel = corpus_of(tmp_path / "novel.txt", limits=SMALL_BLOCKS)
    folder = prepare(config(tmp_path, tokenizer="char", val_fraction=None), novel, "novel")
    encoding = open_dataset(folder).load_tokenizer()
    assert encoding.characters == "".join(sorted(set(text)))
    assert encoding.eot is None
    cut = int(len(text) * 0.9)
    assert encoding.decode(ids_of(folder, "train")) == text[:cut]
    assert encoding.decode(ids_of(folder, "val")) == text[cut:]
    assert read_json(folder / "meta.json")["val_fraction"] == 0.1


@pytest.mark.parametrize("fraction", [None, 1e-9, 0.01, 0.3, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 10, 168])
def test_two_or_more_documents_give_two_splits(count, fraction, tmp_path, seed, capsys):
    """168 files with the default of 0.01 caused the error "the validation split would be empty"."""
    rng = random.Random(seed)
    texts = [f"{number} {rng.random()}" for number in range(count)]
    cfg = config(tmp_path, val_fraction=fraction)
    folder = prepare(cfg, write_documents(tmp_path / "texts", texts), "a")
    val_fraction = fraction or 0.01
    by_hash = {text for text in texts if document_hash(text.encode()) < int(val_fraction * 2**64)}
    val = set(read_back(folder, "val"))
    assert val | set(read_back(folder, "train")) == set(texts)
    assert 0 < len(val) < count
    report, out = read_report(folder), capsys.readouterr().out
    if 0 < len(by_hash) < count:  # so other documents do not move a document to the other split
        assert val == by_hash
        assert report["validation"] == {"by": "hash", "val_fraction": val_fraction}
        assert f"validation: by a hash of each document (val_fraction={val_fraction})" in out
    else:
        expected = min(max(1, round(val_fraction * count)), count - 1)
        assert val == set(sorted(texts, key=lambda text: document_hash(text.encode()))[:expected])
        assert report["validation"] == {"by": "smallest hashes", "val_fraction": val_fraction}
        assert "validation: the documents with the smallest hashes, because" in out
    assert report["documents"] == {"train": count - len(val), "val": len(val)}
    meta = read_json(folder / "meta.json")
    assert meta["val_fraction"] == val_fraction
    assert meta["source"]["files"] == count
    other = prepare(cfg, write_documents(tmp_path / "reversed", texts[::-1]), "b")
    assert set(read_back(other, "val")) == val  # in any order of the documents
    prepare(cfg, corpus_of(tmp_path / "texts"), "a")
    assert "is already prepared" in capsys.readouterr().out


@pytest.mark.parametrize("dedup", [False, True])
def test_equal_documents_are_never_in_both_splits(dedup, tmp_path, seed):
    rng = random.Random(seed)
    for trial in range(10):
        texts = [f"text {rng.randrange(4)} {trial}" for _ in range(rng.randrange(2, 20))] + ["another", ""]
        documents = write_documents(tmp_path / f"texts{trial}", texts)
        folder = prepare(config(tmp_path, val_fraction=1e-9, dedup=dedup), documents, f"a{trial}")
        expected, repeated = texts[:-1], len(texts) - len(set(texts))
        counts = {"repeated": repeated, "val_in_train": 0, "left_out": 0}
        if dedup:
            expected, counts = set(expected), {"repeated": 0, "val_in_train": 0, "left_out": repeated}
        assert read_all(folder) == sorted(expected)
        assert not set(read_back(folder, "train")) & set(read_back(folder, "val"))
        assert read_report(folder)["duplicates"] == counts


@pytest.mark.parametrize(
    "texts, dedup, message",
    [
        (["the same"] * 3, False, "all 3 documents are the same.* add another"),
        (["the same"] * 3, True, "only one document.* add another"),
        (["alone", ""], False, r"only one document.* \.txt file"),
        (["", ""], False, "no text in the input"),
    ],
)
def test_fewer_than_two_different_documents_are_refused(texts, dedup, message, tmp_path):
    with pytest.raises(UserError, match=message):
        prepare(config(tmp_path, dedup=dedup), write_documents(tmp_path / "texts", texts), "a")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_split_needs_at_least_two_tokens(tmp_path):
    """These documents have one token each, and no end-of-text token. A split with one token has no target."""
    (tmp_path / "novel.txt").write_text("abcdefgh" * 10)
    novel = prepare(config(tmp_path, tokenizer="char"), corpus_of(tmp_path / "novel.txt"), "novel")
    settings = dict(tokenizer=str(novel), val_fraction=1e-9)
    folder = prepare(config(tmp_path, **settings), write_documents(tmp_path / "texts", list("abcdefgh")), "a")
    assert [len(ids_of(folder, split)) for split in ("train", "val")] == [6, 2]
    with pytest.raises(UserError, match="3 documents have 3 tokens, too few"):
        prepare(config(tmp_path, **settings), write_documents(tmp_path / "few", list("abc")), "b")


def test_an_unreadable_input_is_not_reported_as_a_full_disk(lines, tmp_path, monkeypatch):
    lines.sources[0].path.chmod(0)
    if os.access(lines.sources[0].path, os.R_OK):
        pytest.skip("root can read every file")
    with pytest.raises(UserError, match=r"texts\.jsonl cannot be read: Permission denied"):
        prepare(config(tmp_path), lines, "a")


@pytest.mark.parametrize("kind, start_method", [("char", "fork"), ("bpe", "spawn")])
def test_the_number_of_processes_does_not_change_the_result(kind, start_method, lines, tmp_path, monkeypatch):
    if start_method not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork processes")
    expected = prepare(config(tmp_path, tokenizer=kind, num_workers=0, shard_tokens=1500), lines, "one_process")
    context = multiprocessing.get_context(start_method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda *_: context)
    folder = prepare(config(tmp_path, tokenizer=kind, num_workers=2, shard_tokens=1500), lines, "workers")
    assert_same_data_set(folder, expected)
    assert len(content(folder)) > 3


def test_several_shards_contain_the_same_tokens_as_one(lines, tmp_path):
    one_shard = prepare(config(tmp_path), lines, "one_shard")
    assert list(content(one_shard)) == ["train.bin", "val.bin"]
    parts = prepare(config(tmp_path, shard_tokens=1000), lines, "parts")
    *full, last = map(len, open_dataset(parts).train)
    assert full == [1000] * len(full) and len(full) >= 5 and last <= 1000
    assert next(iter(content(parts))) == "train_000000.bin"
    for split in ("train", "val"):
        assert np.array_equal(ids_of(parts, split), ids_of(one_shard, split))


def test_the_tokenizer_of_another_data_set_can_be_used(lines, tmp_path):
    first = prepare(config(tmp_path, tokenizer="char"), lines, "first")
    (tmp_path / "more.txt").write_text("alpha beta Ω alpha")
    more = corpus_of(tmp_path / "more.txt")
    with pytest.raises(UserError, match=r"more\.txt:1, byte 10 of the line: .*'Ω' .* position 1 .*--on_unknown=skip"):
        prepare(config(tmp_path, tokenizer=str(first), val_fraction=0.3), more, "more")
    second = prepare(config(tmp_path, tokenizer=str(first), val_fraction=0.3, on_unknown="skip"), more, "more")
    assert open_dataset(second).load_tokenizer().hash == open_dataset(first).load_tokenizer().hash
    with pytest.raises(UserError, match=r"tokenizer=word: use char, byte, gpt2, bpe, or .*folder"):
        prepare(config(tmp_path, tokenizer="word"), more, "third")


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("on_unknown, outcome", [("skip", "left out"), ("replace", r"replaced by U\+FFFD")])
@pytest.mark.parametrize("form", ["lines", "folder_of_texts"])
def test_unknown_characters_are_counted(form, on_unknown, outcome, dedup, texts, tmp_path, request, capsys):
    """--on_unknown=skip dropped 11% of a text without a message."""
    documents, known = request.getfixturevalue(form), "abehlpt o\ufffd"
    settings = dict(tokenizer=small_tokenizer(tmp_path, known), on_unknown=on_unknown, dedup=dedup)
    counted = list(dict.fromkeys(texts)) if dedup else texts
    characters, unknown = sum(map(len, counted)), sum(c not in known for text in counted for c in text)
    for workers in (0, 2) if dedup else (0,):
        folder = prepare(config(tmp_path, num_workers=workers, **settings), documents, f"workers{workers}")
        report = read_report(folder)
        assert report["characters"] == characters
        assert report["unknown_characters"] == unknown
        assert sum(report["account"].get("characters outside the vocabulary", {}).values()) == unknown
        share = rf"{unknown:,} of {characters:,} characters \({unknown / characters:.1%}\)"
        assert re.search(rf"^{share} are not in the vocabulary and were {outcome}$", capsys.readouterr().out, re.M)
        replacement = "\ufffd" if on_unknown == "replace" else ""
        expected = ["".join(c if c in known else replacement for c in text) for text in counted if text]
        assert read_all(folder) == sorted(expected)


@pytest.mark.parametrize("files", [1, 3])
def test_the_error_for_a_text_of_unknown_characters_names_them(files, tmp_path):
    """The error said only that the text has 0 tokens."""
    chinese = write_documents(tmp_path / "texts", [f"{'日本' * 50}{n}" for n in range(files)])
    settings = dict(tokenizer=small_tokenizer(tmp_path, "abc", eot=False), on_unknown="skip")
    with pytest.raises(UserError, match=rf"0 tokens.* \({101 * files} of {101 * files} characters"):
        prepare(config(tmp_path, **settings), chinese, "a")


@pytest.mark.parametrize("kind", ["bpe", "gpt2", "char", "folder"])
def test_a_vocabulary_too_large_for_the_text_is_reported(kind, lines, tmp_path, capsys, monkeypatch):
    """Only if the model learns the vocabulary from this text."""
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(tokenizer, "TOKENS_PER_ENTRY", 1000)
    if kind == "folder":
        kind = str(prepare(config(tmp_path, tokenizer="bpe", vocab_size=270), lines, "other"))
        capsys.readouterr()
    tokens = read_report(prepare(config(tmp_path, tokenizer=kind, vocab_size=270), lines, "a"))["tokens"]
    out = capsys.readouterr().out
    if kind in ("bpe", "gpt2"):
        size = 270 if kind == "bpe" else 262
        shown = f"{size} is large for {tokens['train']:,} training tokens ({tokens['train'] / size:.1f} per entry)"
        assert f"the vocabulary of {shown}: " in out
        assert "prepare the text with --tokenizer=char, and --overwrite" in out
    else:
        assert "is large for" not in out


def test_few_documents_in_the_validation_split_are_reported(tmp_path, capsys):
    """The largest of three files was for validation: 46 % of the tokens instead of the requested 1 %. One of 13 files
    was for validation; its loss of 1.76 beside 0.85 in training looked like overfitting.
    """
    large = ["".join(f"words {i} of {' abc'[n]}\n" for i in range(100 * n)) for n in (1, 2, 3)]
    sources = write_documents(tmp_path / "large", large).inputs
    report = read_report(prepare(config(tmp_path, val_fraction=None), Corpus(sources), "three"))
    share = report["tokens"]["val"] / sum(report["tokens"].values())
    out = capsys.readouterr().out
    assert f"validation has {share:.0%} of the tokens, more than val_fraction=0.01, because" in out
    assert out.count("--split_on") == 1
    files = write_documents(tmp_path / "files", [f"file {number}\n" * 50 for number in range(13)])
    report = read_report(prepare(config(tmp_path, val_fraction=0.05), files, "files"))
    documents, tokens = report["documents"]["val"], report["tokens"]["val"]
    assert documents < MIN_DOCUMENTS
    out = capsys.readouterr().out
    assert f"the validation set is only {documents} document" in out and f", {tokens:,} tokens, which" in out
    assert "a larger --val_fraction or with --split_on" in out
    prepare(config(tmp_path, val_fraction=None), Corpus(sources, split_on="\n"), "lines")
    prepare(config(tmp_path, val_fraction=None), corpus_of(tmp_path / "files" / "000.txt"), "one")  # the tail of it
    out = capsys.readouterr().out
    assert "validation has" not in out
    assert "the validation set is only" not in out


def test_the_suggested_vocabulary_is_not_too_large(tmp_path, capsys, seed):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(3000)]
    (tmp_path / "novel.txt").write_text(" ".join(rng.choices(words, k=70_000)))
    novel = corpus_of(tmp_path / "novel.txt", limits=SMALL_BLOCKS)
    prepare(config(tmp_path, tokenizer="bpe", vocab_size=4096), novel, "a")
    (suggested,) = re.findall(r"with --tokenizer=bpe --vocab_size=(\d+) or", capsys.readouterr().out)
    prepare(config(tmp_path, tokenizer="bpe", vocab_size=int(suggested), overwrite=True), novel, "a")
    assert "is large for" not in capsys.readouterr().out


# --- duplicates and the report ----------------------------------------------------------------------------------------


def test_the_report_counts_documents_bytes_and_tokens(lines, texts, tmp_path, capsys):
    report = read_report(prepare(config(tmp_path), lines, "a"))
    not_empty = [text for text in texts if text]
    assert sum(report["documents"].values()) == len(not_empty) == 119
    assert report["empty_documents"] == 1
    assert report["bytes"] == sum(len(text.encode()) for text in not_empty)
    assert sum(report["tokens"].values()) == report["bytes"] + 119
    assert report["longest_document"] == {"number": 90, "tokens": len(texts[90].encode()) + 1}
    lengths = sorted(len(text.encode()) + 1 for text in not_empty)
    shares = {"median": lengths[59], "90%": lengths[107], "99%": lengths[117], "maximum": lengths[118]}
    assert report["document_lengths"] == shares
    repeated = len(not_empty) - len(set(not_empty))
    assert report["duplicates"] == {"repeated": repeated, "val_in_train": 0, "left_out": 0} and repeated >= 1
    counts = {token["text"]: token["count"] for token in report["most_common_tokens"]}
    assert counts[" "] == sum(text.count(" ") for text in not_empty) == max(counts.values())
    out = capsys.readouterr().out
    assert f"{repeated} documents repeat another one exactly" in out
    assert f"--dataset=a --size=auto --minutes=30 --out_dir=out-a --data_dir={tmp_path}" in out


def test_one_is_counted_in_the_singular(tmp_path, capsys):
    """The report said "1 documents repeat another one" and "1 duplicates were left out"."""
    repeated = write_documents(tmp_path / "repeated", ["a b c d", "a b c d", "x y", "z"])
    for dedup in (False, True):
        prepare(config(tmp_path, val_fraction=0.3, dedup=dedup), repeated, f"dedup{dedup}")
    prepare(config(tmp_path), write_documents(tmp_path / "two", ["a", "b"]), "two")
    out = capsys.readouterr().out
    assert "1 document repeats another one exactly" in out
    assert "1 document nearly repeats a previous one" in out
    assert "1 duplicate was left out" in out
    assert "1 training document and 1 validation document, 2 bytes" in out


# --- near duplicates and shared n-grams -------------------------------------------------------------------------------


def planted_documents(rng: random.Random) -> list[str]:
    """60 documents of 80 random words, 20 copies with 3 words replaced, and 5 with other case and punctuation.

    The replaced words are adjacent, so that 83 % of the 5-grams are equal, and the probability that no band of two
    signatures is equal is 1e-9. With words replaced at three places, 67 % are equal, and one pair in 1,300 was missed.
    """
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(400)]
    texts = [rng.choices(words, k=80) for _ in range(60)]
    near = []
    for text in texts[:20]:
        near.append(list(text))
        start = rng.randrange(78)
        near[-1][start : start + 3] = rng.choices(words, k=3)
    documents = [" ".join(text) for text in texts + near] + [", ".join(text).upper() for text in texts[20:25]]
    rng.shuffle(documents)
    return documents


def similarity(first: str, second: str) -> float:
    """The Jaccard index of the 5-grams of two texts."""
    words = (re.findall("[a-z]+", text.lower()) for text in (first, second))
    a, b = ({tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in words)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("form", ["lines", "separated", "files in parts"])
def test_near_duplicates_are_counted_and_left_out(form, tmp_path, monkeypatch, capsys, seed):
    """The result is independent of the number of processes and of interruptions."""
    texts = planted_documents(random.Random(seed))
    in_parts = form == "files in parts"
    limits = SizeLimits(block=300 if in_parts else 5000)  # the documents have about 400 bytes
    source = tmp_path / "texts.txt"
    if form == "separated":
        source.write_text("\n\n".join(texts), encoding="utf-8")
        documents = corpus_of(source, limits=limits, split_on="\n\n")
    elif form == "lines":
        source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        documents = corpus_of(source, format="jsonl", limits=limits)
    else:
        documents = write_documents(tmp_path / "texts", texts, limits)
    settings = dict(val_fraction=0.3, shard_tokens=2500)
    plain = prepare(config(tmp_path, **settings), documents, "plain")
    out = capsys.readouterr().out
    near_duplicates = {(a, b) for a in texts for b in texts if a != b and similarity(a, b) > 0.5}
    val, train = read_back(plain, "val"), read_back(plain, "train")
    leaked = sum(any((text, other) in near_duplicates for other in train) for text in val)
    if not in_parts:  # a document in parts has the signature of its first part
        assert read_report(plain)["near_duplicates"] == {"repeated": 25, "val_in_train": leaked, "left_out": 0}
        assert f"25 documents nearly repeat a previous one, and {leaked} of {len(val)} validation documents" in out

    settings |= dict(dedup="near")
    straight = prepare(config(tmp_path, num_workers=0, **settings), documents, "straight")
    remaining = read_all(straight)
    left_out = len(texts) - len(remaining)
    assert 10 < left_out <= 25
    assert read_report(straight)["near_duplicates"] == {"repeated": 0, "val_in_train": 0, "left_out": left_out}
    if not in_parts:
        unique = [text for i, text in enumerate(texts) if not any((text, a) in near_duplicates for a in texts[:i])]
        assert remaining == sorted(unique)
        assert "25 near duplicates were left out" in capsys.readouterr().out
    assert_same_data_set(prepare(config(tmp_path, num_workers=2, **settings), documents, "again"), straight)
    for stop_after in (70, 111) if in_parts else (4,):
        with interrupted_after(stop_after, monkeypatch):
            prepare(config(tmp_path, **settings), documents, f"cut{stop_after}")
        assert list((tmp_path / "data" / f".cut{stop_after}.part").glob("*_0*.bin"))  # shards to resume from
        assert_same_data_set(prepare(config(tmp_path, **settings), documents, f"cut{stop_after}"), straight)


@pytest.mark.parametrize("form", ["lines", "one text"])
@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_shared_ngrams_are_those_of_all_windows(kind, form, tmp_path, capsys, seed):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(300)]
    texts = [rng.choices(words, k=100) for _ in range(40)]
    for text in texts[20:]:  # quotes of 11 to 16 words, of which 13 count
        quote, start, length = rng.choice(texts[:20]), rng.randrange(80), rng.randrange(11, 17)
        text[50 : 50 + length] = quote[start : start + length]
    documents = [" ".join(text) for text in texts]
    source = tmp_path / ("texts.jsonl" if form == "lines" else "texts.txt")
    source.write_text("\n".join(json.dumps({"text": d}) if form == "lines" else d for d in documents))
    cfg = config(tmp_path, val_fraction=0.4, tokenizer=kind, vocab_size=300)
    folder = prepare(cfg, corpus_of(source, limits=SMALL_BLOCKS), "a")

    def words_of(split: str) -> list[list[str]]:
        decode = open_dataset(folder).load_tokenizer().decode
        found = read_back(folder, split) if form == "lines" else [decode(ids_of(folder, split))]
        return [re.findall("[a-z]+", text) for text in found]

    val = words_of("val")
    windows = {tuple(d[i : i + 13]) for d in words_of("train") for i in range(len(d) - 12)}
    covered = [{i + k for i in range(len(d) - 12) if tuple(d[i : i + 13]) in windows for k in range(13)} for d in val]
    n_words, n_covered = sum(map(len, val)), sum(map(len, covered))
    assert read_report(folder)["ngram_overlap"] == {
        "words": n_words,
        "words_in_overlap": n_covered,
        "documents_with_overlap": sum(map(bool, covered)),
    }
    line = f"{n_covered / n_words:.2%} of the words for validation are in 13-grams that occur in training"
    assert (line in capsys.readouterr().out) == (n_covered > 0)


def test_dedup_without_a_value_is_true():
    for words, expected in (([], False), (["--dedup"], True), (["--dedup", "near"], "near"), (["--dedup=True"], True)):
        cfg = load(TextConfig, [*words, "--name=a", "a.txt"])
        assert cfg.dedup == expected
        assert cfg.inputs == ("a.txt",)
    assert load(TextConfig, ["--dedup", "a.txt"]).dedup is True


def test_a_large_text_is_checked_only_on_request(lines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("folio.data.prepare.MAX_CHECKED_BYTES", 1000)
    report = read_report(prepare(config(tmp_path), lines, "large"))
    line = "was not counted, because the text has more than 1e-06 GB; --check_leakage=True"
    assert line in capsys.readouterr().out
    assert report["ngram_overlap"] is None
    assert report["near_duplicates"] == {"repeated": None, "val_in_train": None, "left_out": 0}
    monkeypatch.setattr("folio.data.prepare.MAX_COMPARED_DOCUMENTS", 100)
    asked = prepare(config(tmp_path, check_leakage=True), lines, "asked")
    assert "not counted" not in capsys.readouterr().out
    assert read_report(asked)["ngram_overlap"]["words"] > 0
    assert read_report(asked)["near_duplicates"]["repeated"] >= 1
    monkeypatch.setattr("folio.data.prepare.MAX_CHECKED_BYTES", 10**9)
    prepare(config(tmp_path), lines, "many")
    line = "near duplicates were not counted, because there are more than 100 documents; --check_leakage=True"
    assert line in capsys.readouterr().out
    never = prepare(config(tmp_path, check_leakage=False), lines, "never")
    assert "counted" not in capsys.readouterr().out
    assert content(never) == content(asked)


def test_worker_processes_compile_nothing(lines, tmp_path, monkeypatch):
    """The line about compilation is printed once."""
    monkeypatch.setattr("folio.data.tokenizer.CACHE_WORDS_AFTER", 10)
    loaded, address = tmp_path / "loaded", compiled.address

    def record_and_load(module, function, *arguments):
        with open(loaded, "a") as file:
            print(os.getpid(), function, file=file)
        return address(module, function, *arguments)

    monkeypatch.setattr(compiled, "address", record_and_load)
    compiled.function.cache_clear()
    prepare(config(tmp_path, num_workers=2, tokenizer="bpe", vocab_size=300), lines, "a")
    processes, names = zip(*(line.split() for line in loaded.read_text().splitlines()), strict=True)
    assert set(processes) == {str(os.getpid())}
    assert {"encode_words", "hash_words", "hash_ngrams", "find_in_filter", "join_tokens"} <= set(names)


# --- interruptions ----------------------------------------------------------------------------------------------------


def start_script(tmp_path: Path, *words: str, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "prepare" / "text.py"), *words, f"--data_dir={tmp_path / 'data'}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    return subprocess.Popen(command, **pipes, **options)


@pytest.fixture
def large(tmp_path: Path, seed: int) -> str:
    """A JSONL file that takes about a second to prepare."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "日本", "of", "the"]
    with open(tmp_path / "large.jsonl", "w", encoding="utf-8") as file:
        for _ in range(15_000):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=60))}) + "\n")
    return str(tmp_path / "large.jsonl")


def test_a_killed_process_is_resumed_with_a_bitwise_identical_result(large, tmp_path, seed):
    """SIGKILL allows no cleanup."""
    words = (large, "--tokenizer=byte", "--shard_tokens=150000", "--num_workers=2")
    started = time.perf_counter()
    straight = start_script(tmp_path, *words, "--name=straight")
    _, err = straight.communicate()
    assert straight.returncode == 0, err
    duration, rng = time.perf_counter() - started, random.Random(seed)
    progress = tmp_path / "data" / ".killed.part" / "progress.json"
    for kill in range(2):
        process = start_script(tmp_path, *words, "--name=killed", start_new_session=True)
        if kill:
            time.sleep(duration * (0.3 + 0.6 * rng.random()))
        while process.poll() is None and not progress.exists():
            time.sleep(0.01)  # until there is a full shard to resume from
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = start_script(tmp_path, *words, "--name=killed")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "resuming after" in out or "is already prepared" in out
    assert content(tmp_path / "data" / "killed") == content(tmp_path / "data" / "straight")


def test_ctrl_c_prints_one_line(large, tmp_path):
    process = start_script(tmp_path, large, "--tokenizer=byte", "--num_workers=2", start_new_session=True)
    while not list((tmp_path / "data").glob(".large.part/.train.part")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # to the workers too, as a terminal does
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out == "", err
    assert err.strip().splitlines()[-1] == "stopped by SIGINT; nothing was kept" and "Traceback" not in err, err
    assert not [path for path in (tmp_path / "data").iterdir() if not path.name.endswith(".lock")]


def test_a_data_set_whose_replacement_was_killed_is_restored(lines, tmp_path, capsys):
    """The data set was missing, and the next preparation removed it."""
    folder = prepare(config(tmp_path), lines, "a")
    before = content(folder)
    (tmp_path / "data" / ".a.replaced").mkdir()
    folder.rename(tmp_path / "data" / ".a.replaced" / "a")
    assert prepare(config(tmp_path), lines, "a") == folder and "is already prepared" in capsys.readouterr().out
    assert content(folder) == before and [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def kill_itself(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_reported(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "encode", kill_itself)
    with pytest.raises(UserError, match="a smaller --num_workers"):
        prepare(config(tmp_path, num_workers=1), lines, "a")
    assert not (tmp_path / "data" / ".a.part").exists()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_another_data_set_is_not_overwritten_by_default(lines, tmp_path, capsys):
    folder = prepare(config(tmp_path), lines, "a")
    before = content(folder)
    capsys.readouterr()
    assert prepare(config(tmp_path), lines, "a") == folder  # the same data set is not prepared again
    assert "is already prepared" in capsys.readouterr().out
    message = r"another data set \(byte, 257 tokens.*tokenizer byte \(now char\).*--overwrite=True"
    with pytest.raises(UserError, match=message):
        prepare(config(tmp_path, tokenizer="char"), lines, "a")
    assert content(folder) == before
    prepare(config(tmp_path, tokenizer="char", overwrite=True), lines, "a")
    assert content(folder) != before
    assert open_dataset(folder).load_tokenizer().kind == "char"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]
    (tmp_path / "data" / "mine").mkdir()
    (tmp_path / "data" / "mine" / "thesis.odt").write_text("a text")
    with pytest.raises(UserError, match="contains other files"):
        prepare(config(tmp_path), lines, "mine")


@pytest.mark.parametrize(
    "name, damaged, message",
    [
        ("x.txt", b"", "x.txt is empty"),
        ("x.txt", b"a", "split would be empty"),
        ("x.txt", b"caf\xe9 au lait", "byte 3 of the line is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n' * 2000 + b"{", r"x\.jsonl:2001: .*not JSON"),
    ],
)
@pytest.mark.parametrize("kind, workers", [("char", 1), ("byte", 0), ("byte", 1)])
def test_invalid_input_leaves_no_files(name, damaged, message, kind, workers, tmp_path):
    (tmp_path / name).write_bytes(damaged)
    damaged_corpus = corpus_of(tmp_path / name, limits=SMALL_BLOCKS)
    expected = message if kind == "char" else message.replace("x.txt is empty", "no text in the input")
    with pytest.raises(UserError, match=expected):
        prepare(config(tmp_path, tokenizer=kind, num_workers=workers, shard_tokens=500), damaged_corpus, "new")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_prepare_script_in_the_folder_is_kept(lines, tmp_path, monkeypatch):
    """nanoGPT has one in the folder of each data set."""
    script = tmp_path / "data" / "a" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text("print('mine')")
    interrupt(lines, tmp_path, monkeypatch)
    assert [path.name for path in script.parent.iterdir()] == ["prepare.py"]
    for settings in (dict(), dict(overwrite=True), dict(overwrite=True, tokenizer="char")):
        folder = prepare(config(tmp_path, shard_tokens=700, **settings), lines, "a")
        assert open_dataset(folder) and script.read_text() == "print('mine')"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def test_a_text_in_the_folder_of_the_data_set_is_not_deleted(texts, tmp_path):
    """--overwrite=True replaced the folder, and the text was lost."""
    documents = write_documents(tmp_path / "data" / "a", texts[:5])
    with pytest.raises(UserError, match=r"000\.txt is in \S+a, .*set another --name"):
        prepare(config(tmp_path, overwrite=True), documents, "a")
    assert len(list((tmp_path / "data" / "a").iterdir())) == 5


def test_the_free_disk_space_is_checked_first(lines, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"0\.00 GB free, .* 0\.00 GB; free some space"):
        prepare(config(tmp_path), lines, "a")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="uses a limit of Linux")
def test_a_full_disk_is_reported(large, tmp_path):
    import resource

    words = (large, "--tokenizer=byte", "--name=full")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))  # noqa: E731
    process = start_script(tmp_path, *words, preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 2 and "could not be written" in err and err.strip().endswith("nothing was kept")
    assert "Traceback" not in err and list((tmp_path / "data").iterdir()) == []
    words += ("--shard_tokens=1000000", "--check_leakage=False")  # each file stays below the limit
    process = start_script(tmp_path, *words, preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_only_one_process_prepares_a_data_set(lines, tmp_path):
    (tmp_path / "data").mkdir()
    with filelock.FileLock(tmp_path / "data" / ".a.lock"), pytest.raises(UserError, match="another process"):
        prepare(config(tmp_path), lines, "a")


def test_a_file_in_the_way_is_not_replaced(lines, tmp_path):
    """The name of a file as that of the data set raised NotADirectoryError."""
    file = tmp_path / "data"
    file.write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(config(tmp_path), lines, "a")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"data is a file, .*set another --name"):
            prepare(config(tmp_path, data_dir=str(tmp_path), overwrite=overwrite), lines, "data")
    assert file.read_text() == "mine"


@given(st.text(st.sampled_from("abx. ,:/\n\u3000\udce9é🎉"), max_size=150))
@example("None")
@example("a-b_c (2)")
@example("é" * 101)
@example("é" * 100)
def test_a_name_is_valid_if_it_is_what_name_from_returns(text):
    name = name_from(text)
    assert name == name_from(name)
    assert len(name.encode()) <= 200
    is_valid = bool(text) and len(text.encode("utf-8", "surrogateescape")) <= 200 and text == text.strip()
    is_valid &= not text.startswith(".") and not set(text) & set("/,:\n\udce9")
    assert is_valid == (text == name != "")
    if is_valid:
        check(PrepareConfig(name=text))
        assert parse_mixture(f"{text}:0.5,b") == [(text, 0.5), ("b", 1.0)]
        assert parse_mixture(text) == [(text, 1.0)]
    else:
        with pytest.raises(ConfigError, match=rf"^name={re.escape(text)}: for use with --dataset"):
            check(PrepareConfig(name=text))
