"""What a run records about its data, and the comparison with the data on disk."""

import shutil
from pathlib import Path

import pytest

from folio import UserError
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.training_data import (
    changed_data,
    data_record,
    open_training_data,
    prepared_again,
    trained_on,
)
from folio.data.find_data import find_datasets
from folio.data.shards import open_dataset
from folio.data.windows import Mixture
from prepare import text as prepare_text

SETTINGS = dict(block_size=16, seed=1, sampling="epoch")
MIXTURE = "verse:0.7,prose:0.3"


def mixture_of(dataset: str, folder: str) -> Mixture:
    return Mixture(find_datasets(dataset, folder), **SETTINGS)


def checkpoint_of(dataset: str, folder: str) -> Checkpoint:
    """A checkpoint without weights of a run on the data sets in the folder."""
    data = mixture_of(dataset, folder)
    config = {"dataset": dataset, "data_dir": folder, **SETTINGS}
    return Checkpoint(Path("run"), {}, data.tokenizer, {"config": config, "dataset": data_record(dataset, data, None)})


def prepare_prose_again(folder: str) -> None:
    """Prepare the data set "prose" with another split."""
    settings = dict(tokenizer=str(Path(folder, "verse")), on_unknown="skip", val_fraction=0.3, overwrite=True)
    source = str(Path(folder).parent / "prose.txt")
    prepare_text.main(prepare_text.TextConfig(inputs=(source,), name="prose", data_dir=folder, **settings))


def test_each_data_set_of_a_mixture_is_compared(mixed_dir, tmp_path):
    """Only the hash of the whole mixture was recorded, so that it was unknown which of its data sets had changed."""
    saved = checkpoint_of(MIXTURE, mixed_dir)
    shutil.copytree(Path(mixed_dir, "prose"), tmp_path / "before" / "prose")

    def facts() -> list:
        datasets = [open_dataset(Path(mixed_dir, name)) for name in ("verse", "prose", "bytes")]
        changed = changed_data(saved.state, mixture_of(MIXTURE, mixed_dir))
        return [changed, [trained_on(saved, d) for d in datasets], [prepared_again(saved, d) for d in datasets]]

    assert facts() == [[], [True, True, False], [False, False, False]]
    assert [d.folder.name for d in open_training_data(saved, None)] == ["verse", "prose"]
    prepare_prose_again(mixed_dir)
    assert facts() == [["prose"], [True, False, False], [False, True, False]]
    with pytest.raises(UserError, match=r"^its training data, prose, has been prepared again since then$"):
        open_training_data(saved, None)
    assert trained_on(saved, open_dataset(tmp_path / "before" / "prose"))  # wherever it is


def test_other_shares_of_a_mixture(mixed_dir):
    saved = checkpoint_of(MIXTURE, mixed_dir)
    other_shares = mixture_of("verse:0.6,prose:0.4", mixed_dir)
    assert changed_data(saved.state, other_shares) == ["verse", "prose"]
    assert changed_data(saved.state, mixture_of(MIXTURE, mixed_dir)) == []
    saved.state.clear()  # like pretrained weights
    verse = open_dataset(Path(mixed_dir, "verse"))
    assert not prepared_again(saved, verse) and not trained_on(saved, verse)
