"""The inputs of evaluations: texts and pairs."""

from pathlib import Path

import numpy as np
import pytest

from folio import UserError
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.shards import open_dataset
from folio.data.sources.pairs import Pair
from folio.data.tokenizer import ByteTokenizer
from folio.evaluation.scores import Coverage
from folio.evaluation.texts import open_datasets, open_files, open_pairs, open_validation_set


def checkpoint_of(folder: Path, **config) -> Checkpoint:
    """A checkpoint without weights of a run on the data set "verse" in the folder."""
    state = {"config": {"dataset": "verse", "data_dir": str(folder), **config}}
    return Checkpoint(Path("run"), {}, open_dataset(folder / "verse").load_tokenizer(), state)


def test_files_form_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("one--two", encoding="utf-8")
    (tmp_path / "b.txt").write_text("three", encoding="utf-8")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    text = open_files(files, "text", "--", ByteTokenizer())
    (stream,) = text.streams
    assert text.name == f"{files[0]}, {files[1]}" and text.dataset is None
    assert np.bincount(stream.document).tolist() == [4, 4, 6] and text.coverage.characters == 11
    (tmp_path / "c.txt").write_text("one\n\ntwo", encoding="utf-8")
    (stream,) = open_files([str(tmp_path / "c.txt")], "text", "\\n\\n", ByteTokenizer()).streams  # as in a shell
    assert np.bincount(stream.document).tolist() == [4, 4]


def test_the_default_is_the_training_runs_validation_set(data_dir, text):
    saved = checkpoint_of(data_dir)
    (dataset,) = open_datasets(saved, None, None, "--text")
    opened = open_validation_set(dataset, saved)
    ids = np.concatenate([shard.ids for shard in dataset.val])
    assert opened.name == "verse, validation" and opened.dataset is dataset
    assert np.concatenate([stream.ids for stream in opened.streams]).tolist() == ids.tolist()
    assert opened.coverage.bytes == len(saved.tokenizer.decode(ids).encode()) and opened.coverage.characters is None


def test_other_data_sets(mixed_dir, data_dir):
    saved = checkpoint_of(data_dir)
    assert [d.folder.name for d in open_datasets(saved, "prose,verse", mixed_dir, "--text")] == ["prose", "verse"]
    (dataset,) = open_datasets(saved, "bytes", mixed_dir, "--text")
    with pytest.raises(UserError, match=r"bytes .*different tokenizer.*--text"):
        open_validation_set(dataset, saved)
    saved.state.clear()  # like pretrained weights
    with pytest.raises(UserError, match=r"run does not record .*--dataset or --pairs"):
        open_datasets(saved, None, mixed_dir, "--pairs")


def test_pairs_have_the_tokens_of_their_data_set(data_dir):
    """A prompt and its completion are tokenized separately, and end-of-text tokens are around each pair."""
    pairs, tokenizer = [Pair("é:", " a", {}), Pair("b:", " cd", {})], ByteTokenizer()
    text = open_pairs("pairs", pairs, Coverage(9), tokenizer)
    (stream,) = text.streams
    end = [tokenizer.eot]
    assert stream.ids.tolist() == [*end, *"é: a".encode(), *end, *end, *b"b: cd", *end]
    assert np.bincount(stream.document).tolist() == [7, 7]
    assert text.are_pairs and text.dataset is None and text.coverage.characters == 9


def test_the_format_of_a_text_can_be_set(tmp_path, capsys):
    """A note proposed --format, which tools/evaluate.py did not have, and --keep_line_ends."""
    (tmp_path / "log.txt").write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
    open_files([str(tmp_path / "log.txt")], "text", None, ByteTokenizer())
    assert "--format=text" in capsys.readouterr().err
    (stream,) = open_files([str(tmp_path / "log.txt")], "text", None, ByteTokenizer(), "text").streams
    assert bytes(stream.ids[:-1].tolist()) == b'{"text": "a"}\n{"text": "b"}\n'
    said = capsys.readouterr().err
    assert "are now \\n, as in the training data" in said and "--keep_line_ends" not in said
