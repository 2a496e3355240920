import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizers import bpe

from folio import UserError, corpus, tokenizer
from folio import prepare as prepare_module
from folio.corpus import Corpus, document_hash, find_sources
from folio.files import read_json, write_json
from folio.prepare import PrepareConfig, Seen, prepare
from folio.shards import open_dataset
from folio.windows import parse_mixture

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def texts(tmp_path: Path, seed: int) -> list[str]:
    """Some documents: one empty, one twice, one of several blocks, that also twice."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "γάμμα", "日本", "🎉", "the", "of", "\n", "it's"]
    found = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(120)]
    found[7], found[50], found[90] = "", found[20], " ".join(rng.choices(words, k=900))
    found[110] = found[90]
    return found


@pytest.fixture
def lines(texts: list[str], tmp_path: Path) -> Corpus:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return Corpus(find_sources([str(tmp_path / "texts.jsonl")]))


@pytest.fixture
def folder_of_texts(texts: list[str], tmp_path: Path) -> Corpus:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:03d}.txt").write_bytes(text.encode())
    return Corpus(find_sources([str(tmp_path / "texts")]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1000)


def config(tmp_path: Path, **settings) -> PrepareConfig:
    return PrepareConfig(**{"data_dir": str(tmp_path / "data"), "tokenizer": "byte", "val_fraction": 0.1, **settings})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def ids_of(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([shard.ids for shard in getattr(open_dataset(folder), split)])


def read_back(folder: Path, split: str) -> list[str]:
    """The documents of a split."""
    made_with = open_dataset(folder).load_tokenizer()
    ids = ids_of(folder, split)
    ends = np.flatnonzero(ids == made_with.eot)
    assert ends[-1] == len(ids) - 1
    return [made_with.decode(part[part != made_with.eot]) for part in np.split(ids, ends[:-1] + 1)]


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_every_document_is_in_one_split_with_its_end(kind, lines, folder_of_texts, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    folder = prepare(config(tmp_path, tokenizer=kind, vocab_size=300), lines, "a")
    train, val = read_back(folder, "train"), read_back(folder, "val")
    assert sorted(train + val) == sorted(text for text in texts if text)
    assert train == [text for text in texts if text in set(train)] and 2 <= len(val) <= 30
    other = prepare(config(tmp_path, tokenizer=kind, vocab_size=300), folder_of_texts, "b")
    assert content(other) == content(folder)  # files or lines: the same documents
    assert open_dataset(folder).load_tokenizer().kind == kind


def test_one_text_is_divided_at_its_tail_as_nanogpt_does_it(tmp_path, texts):
    text = "\n".join(texts)
    (tmp_path / "novel.txt").write_bytes(text.encode())
    found = Corpus(find_sources([str(tmp_path / "novel.txt")]))
    folder = prepare(config(tmp_path, tokenizer="char", val_fraction=None), found, "novel")
    data = open_dataset(folder)
    assert data.load_tokenizer().characters == "".join(sorted(set(text))) and data.load_tokenizer().eot is None
    cut = int(len(text) * 0.9)
    assert [data.load_tokenizer().decode(s.ids) for s in (*data.train, *data.val)] == [text[:cut], text[cut:]]
    assert read_json(folder / "meta.json")["val_fraction"] == 0.1


def test_more_documents_never_move_an_old_one(folder_of_texts, tmp_path):
    first = prepare(config(tmp_path), folder_of_texts, "first")
    (tmp_path / "texts" / "000a.txt").write_text("another one, early in the order")
    (tmp_path / "texts" / "zzz.txt").write_text("and one at the end")
    second = prepare(config(tmp_path), Corpus(find_sources([str(tmp_path / "texts")])), "second")
    for split in ("train", "val"):
        assert set(read_back(first, split)) <= set(read_back(second, split))


def test_the_defaults_for_validation_are_kept_in_meta_json(lines, folder_of_texts, tmp_path):
    folder = prepare(config(tmp_path, val_fraction=None), lines, "one_file")
    assert read_json(folder / "meta.json")["val_fraction"] == 0.1
    for number in range(300):
        (tmp_path / "texts" / f"more_{number}.txt").write_text(f"text number {number}")
    folder = prepare(config(tmp_path, val_fraction=None), Corpus(find_sources([str(tmp_path / "texts")])), "many_files")
    assert read_json(folder / "meta.json")["val_fraction"] == 0.01


def write_documents(folder: Path, texts: list[str]) -> Corpus:
    """A corpus of files."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return Corpus(find_sources([str(folder)]))


@pytest.mark.parametrize("fraction", [None, 1e-9, 0.01, 0.3, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 10, 168])
def test_any_two_documents_or_more_give_two_splits(count, fraction, tmp_path, seed, capsys):
    """168 files by the default of 0.01 ended in "the validation split would be empty"."""
    rng = random.Random(seed)
    texts = [f"{number} {rng.random()}" for number in range(count)]
    folder = prepare(config(tmp_path, val_fraction=fraction), write_documents(tmp_path / "texts", texts), "a")
    asked = fraction or 0.01
    by_hash = {text for text in texts if document_hash(text.encode()) < int(asked * 2**64)}
    val = set(read_back(folder, "val"))
    assert val | set(read_back(folder, "train")) == set(texts) and 0 < len(val) < count
    report = read_json(folder / "report.json")
    if 0 < len(by_hash) < count:  # as it has always been
        assert val == by_hash and report["validation"] == {"by": "hash", "val_fraction": asked}
        assert f"validation: by a hash of each document (val_fraction={asked})" in capsys.readouterr().out
    else:
        wanted = min(max(1, round(asked * count)), count - 1)
        assert val == set(sorted(texts, key=lambda text: document_hash(text.encode()))[:wanted])
        assert report["validation"] == {"by": "smallest hashes", "val_fraction": asked}
        assert "validation: the documents with the smallest hashes, because" in capsys.readouterr().out
    assert report["documents"] == {"train": count - len(val), "val": len(val)}
    other = prepare(config(tmp_path, val_fraction=fraction), write_documents(tmp_path / "back", texts[::-1]), "b")
    assert set(read_back(other, "val")) == val  # whatever their order
    assert read_json(folder / "meta.json")["val_fraction"] == asked
    assert prepare(config(tmp_path, val_fraction=fraction), Corpus(find_sources([str(tmp_path / "texts")])), "a")
    assert "is prepared already" in capsys.readouterr().out


@pytest.mark.parametrize("dedup", [False, True])
def test_the_same_documents_are_never_in_both_splits(dedup, tmp_path, seed):
    rng = random.Random(seed)
    for trial in range(10):
        texts = [f"text {rng.randrange(4)} {trial}" for _ in range(rng.randrange(2, 20))] + ["another", ""]
        found = write_documents(tmp_path / f"texts{trial}", texts)
        folder = prepare(config(tmp_path, val_fraction=1e-9, dedup=dedup), found, f"a{trial}")
        train, val = read_back(folder, "train"), read_back(folder, "val")
        assert not set(train) & set(val) and sorted(train + val) == sorted(set(texts) - {""} if dedup else texts[:-1])


@pytest.mark.parametrize(
    "texts, dedup, message",
    [
        (["the same"] * 3, False, "all 3 documents are the same, and no document is in both splits; add another one"),
        (["the same"] * 3, True, "there is only one document, and no document is in both splits; add another one"),
        (["alone", ""], False, r"there is only one document.* or join all text in one \.txt file"),
        (["", ""], False, "there is no text in the input"),
    ],
)
def test_fewer_than_two_different_documents_are_refused(texts, dedup, message, tmp_path):
    with pytest.raises(UserError, match=message):
        prepare(config(tmp_path, dedup=dedup), write_documents(tmp_path / "texts", texts), "a")
    assert list((tmp_path / "data").iterdir()) == []


def test_documents_of_one_token(tmp_path):
    """Without an end-of-text token, each split needs two of them: a split of one token predicts nothing."""
    (tmp_path / "novel.txt").write_text("abcdefgh" * 10)
    novel = prepare(config(tmp_path, tokenizer="char"), Corpus(find_sources([str(tmp_path / "novel.txt")])), "novel")
    settings = dict(tokenizer=str(novel), val_fraction=1e-9)
    folder = prepare(config(tmp_path, **settings), write_documents(tmp_path / "texts", list("abcdefgh")), "a")
    assert [len(ids_of(folder, split)) for split in ("train", "val")] == [6, 2]
    with pytest.raises(UserError, match="the 3 documents have 3 tokens, too few for two splits"):
        prepare(config(tmp_path, **settings), write_documents(tmp_path / "few", list("abc")), "b")


@pytest.mark.parametrize("dedup", [False, True])
def test_interrupted_in_the_second_pass_it_resumes_there(dedup, tmp_path, monkeypatch, seed):
    """A corpus whose split is empty is gone through twice, and may be interrupted at any block of both."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(["alpha", "beta", "of"], k=rng.choice([40, 40, 600]))) for _ in range(16)]
    found = write_documents(tmp_path / "texts", texts + texts[:2])
    settings = dict(tokenizer="bpe", vocab_size=270, val_fraction=1e-9, shard_tokens=500, dedup=dedup)
    add, seen = prepare_module.Build.add, []

    def interrupted(build, block, encoded):
        seen.append(build.notes["bound"])
        add(build, block, encoded)
        if len(seen) == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module.Build, "add", interrupted)
    stop = None
    straight = prepare(config(tmp_path, **settings), found, "straight")
    in_all = len(seen)
    assert len(read_back(straight, "val")) == 1 and seen[0] is None and seen[-1] is not None
    resumed = 0
    for at in range(1, in_all, 2):
        seen, stop = [], at
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path, **settings), found, f"cut{at}")
        seen, stop = [], None
        folder = prepare(config(tmp_path, **settings), found, f"cut{at}")
        resumed += seen[0] is not None
        assert content(folder) == content(straight)
        assert (folder / "report.json").read_bytes() == (straight / "report.json").read_bytes()
        assert {path.name for path in folder.iterdir()} == {path.name for path in straight.iterdir()}
    assert resumed  # in the second pass, without the first


@pytest.mark.parametrize("form", ["text", "jsonl", "split_on"])
def test_white_space_beyond_the_limit_is_named_with_its_byte_in_the_file(form, tmp_path, monkeypatch):
    """A million white-space characters ended in a traceback of tiktoken's."""
    monkeypatch.setattr(tokenizer, "LONG_SPACES", 10)
    monkeypatch.setattr(tokenizer, "MOST_SPACES", 30)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    before, spaces = "größer " * 400 + "é", "\t" * 31
    path = tmp_path / ("x.jsonl" if form == "jsonl" else "x.txt")
    if form == "jsonl":
        path.write_text(json.dumps({"text": "a"}) + "\n\n" + json.dumps({"text": before + spaces + "b"}))
        place = rf"x\.jsonl:3, byte {len(before.encode()):,} of its text"
    else:
        path.write_text((before + spaces + "b") if form == "text" else f"a--b--{before}{spaces}b")
        place = rf"x\.txt, from byte {len(before.encode()) + 6 * (form == 'split_on'):,}"
    found = Corpus(find_sources([str(path)]), split_on="--" if form == "split_on" else None)
    for workers in (0, 1):
        with pytest.raises(
            UserError, match=rf"^\S*{place}: more than 30 white-space characters in a row.* char or byte$"
        ):
            prepare(config(tmp_path, tokenizer="gpt2", val_fraction=0.5, num_workers=workers), found, "a")
    path.write_text(path.read_text().replace(spaces, spaces[1:]).replace(r"\t" * 31, r"\t" * 30))
    found = Corpus(find_sources([str(path)]), split_on="--" if form == "split_on" else None)
    prepare(config(tmp_path, tokenizer="gpt2", val_fraction=0.5), found, "a")


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(kind, tmp_path, monkeypatch):
    """json.loads gives a string that UTF-8 cannot hold, at which writing the tokenizer broke."""
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    (tmp_path / "x.jsonl").write_text('{"text": "a \\ud83d b \\ud83d\\ude00 c"}\n' * 2 + '{"text": "more"}\n' * 2)
    found = Corpus(find_sources([str(tmp_path / "x.jsonl")]))
    chosen = prepare_module.by_number(np.array([1]))
    folder = prepare(config(tmp_path, tokenizer=kind, vocab_size=258), found, "a", split=chosen)
    assert read_back(folder, "val") == ["a ? b 😀 c"]


def test_an_input_that_cannot_be_opened_is_not_taken_for_a_full_disk(lines, tmp_path, monkeypatch):
    lines.sources[0].path.chmod(0)
    if os.access(lines.sources[0].path, os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(UserError, match=r"texts\.jsonl cannot be read: Permission denied"):
        prepare(config(tmp_path), lines, "a")


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_processes_and_their_number_change_nothing(kind, lines, tmp_path, monkeypatch):
    plain = prepare(config(tmp_path, tokenizer=kind, num_workers=0, shard_tokens=1500), lines, "plain")
    for start_method in ("fork", "spawn") if "fork" in multiprocessing.get_all_start_methods() else ("spawn",):
        context = multiprocessing.get_context(start_method)
        monkeypatch.setattr(multiprocessing, "get_context", lambda *_, context=context: context)
        name = f"workers_{start_method}"
        folder = prepare(config(tmp_path, tokenizer=kind, num_workers=2, shard_tokens=1500), lines, name)
        assert content(folder) == content(plain) and len(content(folder)) > 3
        assert (folder / "report.json").read_bytes() == (plain / "report.json").read_bytes()


def test_shards_of_a_size_are_one_data_set(lines, tmp_path):
    whole = prepare(config(tmp_path), lines, "whole")
    assert list(content(whole)) == ["train.bin", "val.bin"]
    parts = prepare(config(tmp_path, shard_tokens=1000), lines, "parts")
    data = open_dataset(parts)
    assert {len(shard) for shard in data.train[:-1]} == {1000} and len(data.train[-1]) <= 1000 and len(data.train) > 5
    assert next(iter(content(parts))) == "train_000000.bin"
    for split in ("train", "val"):
        assert np.array_equal(ids_of(parts, split), ids_of(whole, split))


def test_a_tokenizer_of_another_data_set_is_taken_over(lines, tmp_path):
    first = prepare(config(tmp_path, tokenizer="char"), lines, "first")
    (tmp_path / "more.txt").write_text("alpha beta Ω alpha")
    more = Corpus(find_sources([str(tmp_path / "more.txt")]))
    with pytest.raises(
        UserError, match=r"more\.txt, from byte 10: the character 'Ω' \(U\+03A9\) at position 1 .*--on_unknown=skip"
    ):
        prepare(config(tmp_path, tokenizer=str(first), val_fraction=0.3), more, "more")
    second = prepare(config(tmp_path, tokenizer=str(first), val_fraction=0.3, on_unknown="skip"), more, "more")
    assert open_dataset(second).load_tokenizer().hash == open_dataset(first).load_tokenizer().hash
    with pytest.raises(UserError, match="take char, byte, gpt2, bpe, or the folder"):
        prepare(config(tmp_path, tokenizer="word"), more, "third")


# --- duplicates and the report ----------------------------------------------------------------------------------------


def test_the_report_counts_what_is_there(lines, texts, tmp_path, capsys):
    folder = prepare(config(tmp_path), lines, "a")
    report = read_json(folder / "report.json")
    there = [text for text in texts if text]
    assert sum(report["documents"].values()) == len(there) == 119 and report["empty_documents"] == 1
    assert report["bytes"] == sum(len(text.encode()) for text in there)
    assert sum(report["tokens"].values()) == report["bytes"] + 119
    assert report["longest_document"] == {"number": 90, "tokens": len(texts[90].encode()) + 1}
    again = len(there) - len(set(there))
    assert report["duplicates"] == {"repeated": again, "val_in_train": 0, "left_out": 0} and again >= 1
    counts = {token["text"]: token["count"] for token in report["most_common_tokens"]}
    assert counts[" "] == sum(text.count(" ") for text in there) == max(counts.values())
    out = capsys.readouterr().out
    assert (
        f"{again} documents repeat another one" in out and f"--dataset=a --out_dir=out-a --data_dir={tmp_path}" in out
    )


@pytest.mark.parametrize("form", ["lines", "folder_of_texts"])
def test_duplicates_are_left_out_on_request(form, texts, tmp_path, request):
    folder = prepare(config(tmp_path, dedup=True), request.getfixturevalue(form), "a")
    again = 119 - len(set(texts) - {""})
    assert read_json(folder / "report.json")["duplicates"] == {"repeated": 0, "val_in_train": 0, "left_out": again}
    assert sorted(read_back(folder, "train") + read_back(folder, "val")) == sorted(set(texts) - {""})


def test_documents_of_validation_that_stand_in_training_are_counted(lines, tmp_path):
    folder = prepare(config(tmp_path), lines, "a", split=prepare_module.by_number(np.array([50, 51, 52])))
    assert read_json(folder / "report.json")["duplicates"]["val_in_train"] >= 1
    assert len(read_back(folder, "val")) == 3


def test_seen_is_a_set(seed):
    rng, seen, known = np.random.default_rng(seed), Seen(), set()
    for _ in range(300):
        hashes = rng.integers(0, 2000, size=rng.integers(0, 30)).astype(np.uint64)
        expected = []
        for value in hashes.tolist():
            expected.append(value in known)
            known.add(value)
        assert seen.add(hashes).tolist() == expected
    assert sum(map(len, seen.levels)) == len(known) and len(seen.levels) < 12


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("form", ["lines", "folder_of_texts"])
def test_an_interrupted_run_goes_on_behind_the_last_whole_shard(form, dedup, tmp_path, monkeypatch, request, capsys):
    """Wherever it is interrupted, it ends with the same bytes, and does not write a whole shard again."""
    found = request.getfixturevalue(form)
    settings = dict(tokenizer="bpe", vocab_size=300, shard_tokens=700, dedup=dedup)
    straight = prepare(config(tmp_path, **settings), found, "straight")
    add, blocks = prepare_module.Build.add, 0

    def interrupted(build, block, encoded):
        nonlocal blocks
        blocks += 1
        add(build, block, encoded)
        if build.progress.blocks == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module.Build, "add", interrupted)
    stop = None
    prepare(config(tmp_path, **settings), found, "counted")
    in_all = blocks
    for at in range(1, in_all, 3):
        blocks, stop = 0, at
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path, **settings), found, f"cut{at}")
        part = tmp_path / "data" / f".cut{at}.part"
        assert not (tmp_path / "data" / f"cut{at}").exists()
        assert part.exists() == ("the same command goes on" in capsys.readouterr().err)
        whole = {path: path.stat().st_mtime_ns for path in part.glob("*.bin")}
        stop = None
        folder = prepare(config(tmp_path, **settings), found, f"cut{at}")
        assert content(folder) == content(straight)
        assert (folder / "report.json").read_bytes() == (straight / "report.json").read_bytes()
        assert all((folder / path.name).stat().st_mtime_ns == before for path, before in whole.items())
        if whole:
            assert blocks < in_all + at
    assert not [path for path in (tmp_path / "data").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("note", [2, 5])
def test_killed_between_a_shard_and_the_note_of_it(note, lines, tmp_path, monkeypatch):
    """The shard has its name, and progress.json still speaks of the file before it: zeros came in its place once."""
    straight = prepare(config(tmp_path, shard_tokens=700), lines, "straight")
    notes = 0

    def killed(path, value):
        nonlocal notes
        notes += path.name == "progress.json"
        if notes == note:
            raise KeyboardInterrupt
        write_json(path, value)

    monkeypatch.setattr(prepare_module, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path, shard_tokens=700), lines, "cut")
    assert content(prepare(config(tmp_path, shard_tokens=700), lines, "cut")) == content(straight)


def typed(tmp_path: Path, *words: str, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "prepare" / "text.py"), *words, f"--data_dir={tmp_path / 'data'}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    return subprocess.Popen(command, **pipes, **options)


@pytest.fixture
def large(tmp_path: Path, seed: int) -> str:
    """A JSONL file that takes a second or two."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "日本", "of", "the"]
    with open(tmp_path / "large.jsonl", "w", encoding="utf-8") as file:
        for _ in range(30_000):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=60))}) + "\n")
    return str(tmp_path / "large.jsonl")


def test_killed_at_any_moment_it_ends_with_the_same_bytes(large, tmp_path, seed):
    """SIGKILL gives no time for anything: what is on the disk must do."""
    words = (large, "--tokenizer=byte", "--shard_tokens=300000", "--num_workers=2")
    began = time.perf_counter()
    straight = typed(tmp_path, *words, "--name=straight")
    _, err = straight.communicate()
    assert straight.returncode == 0, err
    whole, rng, gone_on = time.perf_counter() - began, random.Random(seed), 0
    for kill in range(4):
        process = typed(tmp_path, *words, "--name=killed", start_new_session=True)
        time.sleep(whole * (0.3 + 0.6 * rng.random()) if kill else whole * 0.7)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = typed(tmp_path, *words, "--name=killed")
    out, err = process.communicate()
    assert process.returncode == 0, err
    gone_on += "going on behind" in out or "is prepared already" in out
    assert gone_on and content(tmp_path / "data" / "killed") == content(tmp_path / "data" / "straight")


def test_ctrl_c_ends_it_in_one_line(large, tmp_path):
    process = typed(tmp_path, large, "--tokenizer=byte", "--num_workers=2", start_new_session=True)
    while not list((tmp_path / "data").glob(".large.part/.train.part")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and out == ""
    assert err.strip().splitlines()[-1] == "stopped; nothing was kept" and "Traceback" not in err
    assert not [path for path in (tmp_path / "data").iterdir() if not path.name.endswith(".lock")]


def test_a_worker_that_is_killed_is_told(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "encode", dies)
    with pytest.raises(UserError, match="a smaller --num_workers"):
        prepare(config(tmp_path, num_workers=1), lines, "a")
    assert not (tmp_path / "data" / ".a.part").exists()


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_another_data_set_is_not_overwritten_unasked(lines, tmp_path, capsys):
    folder = prepare(config(tmp_path), lines, "a")
    before = content(folder)
    capsys.readouterr()
    assert prepare(config(tmp_path), lines, "a") == folder  # the same again is no work
    assert "is prepared already" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"another data set \(byte, 257 tokens.*would be char.*--overwrite=True"):
        prepare(config(tmp_path, tokenizer="char"), lines, "a")
    assert content(folder) == before
    prepare(config(tmp_path, tokenizer="char", overwrite=True), lines, "a")
    assert content(folder) != before and open_dataset(folder).load_tokenizer().kind == "char"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]
    (tmp_path / "data" / "mine").mkdir()
    (tmp_path / "data" / "mine" / "thesis.odt").write_text("all of it")
    with pytest.raises(UserError, match="holds other files"):
        prepare(config(tmp_path), lines, "mine")


@pytest.mark.parametrize(
    "name, bad, message",
    [
        ("x.txt", b"", "x.txt is empty; there is nothing to learn from"),
        ("x.txt", b"a", "split would be empty: 2 documents|there is no text|split would be empty"),
        ("x.jsonl", b'{"text": ""}\n' * 5, "nothing to learn from"),
        ("x.txt", b"caf\xe9 au lait", "is not UTF-8 text at byte 3"),
        ("x.jsonl", b'{"text": "a"}\n' * 2000 + b"{", r"x\.jsonl:2001: this line is not JSON"),
    ],
)
@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_input_leaves_nothing(name, bad, message, kind, workers, tmp_path):
    (tmp_path / name).write_bytes(bad)
    found = Corpus(find_sources([str(tmp_path / name)]))
    expected = message if kind == "char" else message.replace("x.txt is empty", "there is no text in the input")
    with pytest.raises(UserError, match=expected):
        prepare(config(tmp_path, tokenizer=kind, num_workers=workers, shard_tokens=500), found, "new")
    assert list((tmp_path / "data").iterdir()) == []


def test_room_on_the_disk_is_checked_first(lines, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"has 0\.00 GB free, and the shards will take about 0\.00 GB; make room"):
        prepare(config(tmp_path), lines, "a")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the quota is a limit of Linux's")
def test_a_full_disk_is_told_and_room_lets_it_go_on(large, tmp_path):
    import resource

    words = (large, "--tokenizer=byte", "--name=full")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))  # noqa: E731
    process = typed(tmp_path, *words, preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 2 and "could not be written" in err and err.strip().endswith("nothing was kept")
    assert "Traceback" not in err and list((tmp_path / "data").iterdir()) == []
    process = typed(tmp_path, *words, "--shard_tokens=1000000", preexec_fn=limit)  # what fits in under the limit
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_one_at_a_time(lines, tmp_path):
    from filelock import FileLock

    (tmp_path / "data").mkdir()
    with (
        FileLock(tmp_path / "data" / ".a.lock"),
        pytest.raises(UserError, match="another process is preparing this data set"),
    ):
        prepare(config(tmp_path), lines, "a")


def test_what_cannot_be_written_is_told(lines, tmp_path):
    (tmp_path / "data").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(config(tmp_path), lines, "a")


@pytest.mark.parametrize(
    "settings",
    [
        dict(val_fraction=0.0),
        dict(val_fraction=1.0),
        dict(shard_tokens=1),
        dict(vocab_size=100),
        dict(num_workers=-1),
        dict(name="a/b"),
        dict(name=".hidden"),
        dict(name=". .hidden"),
        dict(name=""),
        dict(name="a,b"),
        dict(name="a:0.5"),
        dict(name=" a"),
        dict(name="a\u3000"),
        dict(name="a\nb"),
        dict(name="caf\udce9"),
        dict(name="é" * 101),
    ],
)
def test_impossible_settings_are_named(settings):
    assert [name for name, _ in PrepareConfig(**settings).problems()] == list(settings)


def test_a_name_becomes_one_that_a_mixture_can_hold(seed):
    rng = random.Random(seed)
    for _ in range(300):
        name = prepare_module.name_from(
            "".join(rng.choices("ab. ,:/\n\u3000\udce9é🎉" + "x" * 5, k=rng.randrange(150)))
        )
        assert name == prepare_module.name_from(name) and len(name.encode()) <= 200
        if name:
            assert PrepareConfig(name=name).problems() == []
            assert parse_mixture(f"{name}:0.5,b") == [(name, 0.5), ("b", 1.0)] and parse_mixture(name) == [(name, 1.0)]
    for name in ("my novel", "None", "a.b", "größer", "日本", "a-b_c (2)"):  # names that have always worked
        assert prepare_module.name_from(name) == name


def test_a_file_of_that_name_is_not_a_data_set(lines, tmp_path):
    """It ended in a NotADirectoryError."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"a is a file, not the folder of a data set; give it another --name"):
            prepare(config(tmp_path, overwrite=overwrite), lines, "a")
    assert (tmp_path / "data" / "a").read_text() == "mine"


def interrupt(lines, tmp_path, monkeypatch) -> None:
    """Begin the data set "a", and stop after eight blocks, some shards of which are whole."""
    add = prepare_module.Build.add

    def interrupted(build, block, encoded):
        add(build, block, encoded)
        if build.progress.blocks == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module.Build, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path, shard_tokens=700), lines, "a")


def test_progress_of_another_version_begins_anew(lines, tmp_path, monkeypatch):
    """Blocks were other ones then, so that a resumed run would leave out text or take it twice."""
    straight = prepare(config(tmp_path, shard_tokens=700), lines, "straight")
    interrupt(lines, tmp_path, monkeypatch)
    path = tmp_path / "data" / ".a.part" / "progress.json"
    saved = read_json(path)
    saved["progress"]["blocks"] += 1
    write_json(path, {**saved, "version": 1})
    assert content(prepare(config(tmp_path, shard_tokens=700), lines, "a")) == content(straight)


def test_a_changed_source_begins_anew(lines, tmp_path, monkeypatch):
    """Shards of the old text must not be mixed with the new."""
    interrupt(lines, tmp_path, monkeypatch)
    assert (tmp_path / "data" / ".a.part" / "progress.json").exists()
    path = lines.sources[0].path
    path.write_text(path.read_text().replace("alpha", "omega"))
    folder = prepare(config(tmp_path, shard_tokens=700), Corpus(find_sources([str(path)])), "a")
    assert "alpha" not in "".join(read_back(folder, "train"))


def test_a_strange_progress_file_begins_anew(lines, tmp_path):
    write_json(tmp_path / "data" / ".a.part" / "progress.json", [1])
    assert read_back(prepare(config(tmp_path), lines, "a"), "train")
