"""Tiny Shakespeare: its download and its data sets."""

import pytest

from folio.data.shards import open_dataset
from prepare import shakespeare, shakespeare_char


@pytest.mark.network
def test_tiny_shakespeare_has_the_documented_totals(tmp_path):
    shakespeare_char.main(shakespeare_char.ShakespeareCharConfig(data_dir=str(tmp_path)))
    data = open_dataset(tmp_path / "shakespeare_char")
    assert (len(data.train[0]), len(data.val[0]), data.vocab_size) == (1_003_854, 111_540, 65)
    shakespeare.main(shakespeare.ShakespeareConfig(data_dir=str(tmp_path)))
    data = open_dataset(tmp_path / "shakespeare")
    assert (len(data.train[0]), len(data.val[0]), data.vocab_size) == (301_966, 36_059, 50_257)
