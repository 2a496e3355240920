from pathlib import Path

import pytest

from folio import UserError
from folio.dataset import open_dataset
from folio.files import read_json
from prepare.shakespeare_char import PrepareConfig, main


def test_a_text_of_ones_own(tmp_path, capsys):
    source = tmp_path / "my novel.txt"
    source.write_text("Žluťoučký kůň 日本\n" * 50, encoding="utf-8")
    main(PrepareConfig(input=str(source), data_dir=str(tmp_path), val_fraction=0.2))
    data = open_dataset(tmp_path / "my novel")
    assert [len(data.train[0]), len(data.val[0])] == [680, 170]
    assert "'--dataset=my novel' '--out_dir=out-my novel'" in capsys.readouterr().out
    before = (tmp_path / "my novel" / "train.bin").read_bytes()
    main(PrepareConfig(input=str(source), data_dir=str(tmp_path), val_fraction=0.2))  # again: the same
    assert (tmp_path / "my novel" / "train.bin").read_bytes() == before


@pytest.mark.parametrize(
    "content, message", [(b"caf\xe9", "not UTF-8 at byte 3"), (b"", "is empty"), (None, "there is no such file")]
)
def test_bad_input_is_told_and_leaves_nothing(tmp_path, content, message):
    source = tmp_path / "text.txt"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(UserError, match=message):
        main(PrepareConfig(input=str(source), name="new", data_dir=str(tmp_path)))
    assert not (tmp_path / "new").exists()


@pytest.mark.network
def test_tiny_shakespeare(tmp_path):
    main(PrepareConfig(data_dir=str(tmp_path)))
    data = open_dataset(Path(tmp_path) / "shakespeare_char")
    assert (len(data.train[0]), len(data.val[0]), data.vocab_size) == (1_003_854, 111_540, 65)
    assert read_json(data.folder / "meta.json")["source"]["bytes"] == 1_115_394
