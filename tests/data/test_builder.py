"""Records of documents while shards are written, and resuming interrupted builds."""

import gzip
import random

import numpy as np
import pytest

from folio.base.files import read_json, write_json
from folio.data import builder
from folio.data.builder import DatasetBuilder, describe_unknown, split_by_number
from folio.data.inputs import SizeLimits
from folio.data.prepare import prepare
from tests.support.prepared import (
    SMALL_BLOCKS,
    assert_same_data_set,
    config,
    corpus_of,
    interrupt,
    read_all,
    read_back,
    read_report,
    small_tokenizer,
    write_documents,
)


@pytest.mark.parametrize("unknown, shown", [(2, "less than 0.1%"), (11_222, "11.2%"), (100_000, "100.0%")])
def test_the_share_of_unknown_characters_is_rounded(unknown, shown):
    assert f" ({shown}) are not" in describe_unknown(unknown, 100_000, "skip")
    assert describe_unknown(1, 1, "skip") == "1 of 1 character (100.0%) is not in the vocabulary and was left out"


def test_validation_documents_that_are_also_in_training_are_counted(lines, tmp_path):
    lines.split_rule = split_by_number(np.array([50, 51, 52]))
    folder = prepare(config(tmp_path), lines, "a")
    assert read_report(folder)["duplicates"]["val_in_train"] >= 1
    assert len(read_back(folder, "val")) == 3


def test_an_empty_document_in_parts_has_no_token(tmp_path):
    """It had an end-of-text token, which was no document of the report."""
    write_documents(tmp_path / "texts", [f"text {number}" for number in range(8)])
    for number in range(8):
        (tmp_path / "texts" / f"{number}-empty.txt.gz").write_bytes(gzip.compress(b""))
    folder = prepare(config(tmp_path, val_fraction=0.4), corpus_of(tmp_path / "texts"), "a")
    assert read_all(folder) == [f"text {number}" for number in range(8)]
    assert read_report(folder)["empty_documents"] == 8


def repeated_texts(rng: random.Random) -> list[str]:
    """Texts for which the corpus is read twice, because the validation split of one text would be empty."""
    texts = [" ".join(rng.choices(["alpha", "beta", "of"], k=rng.choice([40, 40, 600]))) for _ in range(16)]
    return texts + texts[:2]


def near_duplicates(rng: random.Random) -> list[str]:
    """A near duplicate was forgotten by an interruption, so that its exact copies were near duplicates, too."""
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=80)) for _ in range(16)]  # of about 400 bytes
    near = f"{texts[0]} {words[0]}"
    return [texts[0], near, *texts[1:8], near, *texts[8:], near, texts[0]]


BPE = dict(tokenizer="bpe", vocab_size=270, shard_tokens=500)
NEAR = dict(dedup="near", shard_tokens=900, val_fraction=0.3)


@pytest.mark.parametrize(
    "case, settings",
    [
        *((case, BPE | dict(dedup=dedup)) for case in ("lines", "folder_of_texts") for dedup in (False, True, "near")),
        *(("repeated texts", BPE | dict(dedup=dedup, val_fraction=1e-9)) for dedup in (False, True)),
        ("near duplicates", NEAR),
        ("near duplicates in parts", NEAR),
        ("lines", dict(shard_tokens=700, on_unknown="skip")),
    ],
)
def test_an_interrupted_run_resumes_after_the_last_full_shard(case, settings, tmp_path, monkeypatch, request, seed):
    """The result is bitwise identical wherever the interruption occurs, and no full shard is written again."""
    rng = random.Random(seed)
    if case in ("lines", "folder_of_texts"):
        documents = request.getfixturevalue(case)
    else:
        texts = repeated_texts(rng) if case == "repeated texts" else near_duplicates(rng)
        limits = SizeLimits(block=300 if "in parts" in case else 1000)
        documents = write_documents(tmp_path / "texts", texts, limits)
    if "on_unknown" in settings:
        settings = dict(settings, tokenizer=small_tokenizer(tmp_path, "abehlpt o"))
    cfg = config(tmp_path, **settings)
    add, bounds = DatasetBuilder.add, []

    def interrupted(builder, block, encoded):
        bounds.append(builder.metadata["bound"])
        add(builder, block, encoded)
        if len(bounds) == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(DatasetBuilder, "add", interrupted)
    stop_after = None
    straight = prepare(cfg, documents, "straight")
    total, report, has_two_passes, resumed = len(bounds), read_report(straight), bounds[-1] is not None, 0
    if case == "repeated texts":
        assert len(set(read_back(straight, "val"))) == 1
        assert has_two_passes
    if "duplicates" in case:
        assert report["duplicates"]["left_out"] == 3
        assert report["near_duplicates"]["left_out"] == 1
    assert (report["unknown_characters"] > 1000) == ("on_unknown" in settings)
    for block_number in {*rng.sample(range(1, total), 4), total - 1}:
        name = f"cut{block_number}"
        bounds, stop_after = [], block_number
        with pytest.raises(KeyboardInterrupt) as stop:
            prepare(cfg, documents, name)
        part = tmp_path / "data" / f".{name}.part"
        assert not (tmp_path / "data" / name).exists()
        assert part.exists() == ("the same command resumes after them" in str(stop.value))
        if part.exists():
            (part / ".progress.json.123.tmp").touch()  # left by a killed process; it remained in the data set
        are_last = bounds[-1] is not None or not has_two_passes  # the second pass deletes the shards of the first
        full_shards = {path: path.stat().st_mtime_ns for path in part.glob("*.bin") if are_last}
        bounds, stop_after = [], None
        folder = prepare(cfg, documents, name)
        assert_same_data_set(folder, straight)
        assert all((folder / path.name).stat().st_mtime_ns == before for path, before in full_shards.items())
        assert len(bounds) < total or not full_shards
        resumed += bounds[0] is not None
    assert resumed or case != "repeated texts"  # in the second pass, without repeating the first
    assert not [path for path in (tmp_path / "data").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("save", [2, 5])
def test_a_process_killed_between_finishing_a_shard_and_saving_progress_is_resumed(save, lines, tmp_path, monkeypatch):
    """The shard had its final name while progress.json described the incomplete file. It was replaced by zeros."""
    straight = prepare(config(tmp_path, shard_tokens=700), lines, "straight")
    saves = 0

    def killed(path, value):
        nonlocal saves
        saves += path.name == "progress.json"
        if saves == save:
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(builder, "write_json", killed)
        prepare(config(tmp_path, shard_tokens=700), lines, "killed")
    assert_same_data_set(prepare(config(tmp_path, shard_tokens=700), lines, "killed"), straight)


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: {**saved, "version": 2, "progress": {**saved["progress"], "blocks": 1}},  # with other blocks
        lambda saved: [1],
        lambda saved: {**saved, "progress": {"blocks_done": 3}},
    ],
)
def test_invalid_progress_and_that_of_another_version_are_not_resumed(damage, lines, tmp_path, monkeypatch):
    """A resumed run would omit or repeat text."""
    straight = prepare(config(tmp_path, shard_tokens=700), lines, "straight")
    interrupt(lines, tmp_path, monkeypatch)
    path = tmp_path / "data" / ".a.part" / "progress.json"
    write_json(path, damage(read_json(path)))
    assert_same_data_set(prepare(config(tmp_path, shard_tokens=700), lines, "a"), straight)


def test_a_changed_source_is_not_resumed(lines, tmp_path, monkeypatch):
    """Shards of the old text must not be mixed with the new text."""
    interrupt(lines, tmp_path, monkeypatch)
    assert (tmp_path / "data" / ".a.part" / "progress.json").exists()
    path = lines.sources[0].path
    path.write_text(path.read_text().replace("alpha", "omega"))
    folder = prepare(config(tmp_path, shard_tokens=700), corpus_of(path, limits=SMALL_BLOCKS), "a")
    assert "alpha" not in "".join(read_back(folder, "train"))
