import re

import pytest
import torch

from folio import UserError
from folio.checkpoints import export_formats, foreign_tokenizers
from folio.checkpoints.export_formats import FORMATS, with_position_table
from folio.evaluation.export_checks import OTHER_GELU_TOLERANCE, check_computes_gpt2, compare_export
from tests.support.exports import checkpoint_of, output_path
from tests.support.tiny_tokenizers import bpe

pytestmark = pytest.mark.architecture("folio/checkpoints/export_formats.py, which writes GPT-2's weights only")


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", export_formats.GELUS)
@pytest.mark.parametrize("to", FORMATS)
def test_gpt2_passes(to, bias, activation):
    loaded = checkpoint_of(bpe(), bias, 5, activation)
    check_computes_gpt2(loaded, with_position_table(loaded), to)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("to, activation", [("nanogpt", "gelu_new"), ("gguf", "gelu")])
def test_the_gelu_approximation_is_close(to, activation, tmp_path, monkeypatch):
    """The error of GPT-2's approximation of GELU is within OTHER_GELU_TOLERANCE and exceeds TOLERANCE."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(foreign_tokenizers, "is_gpt2_size", lambda size: True)
    loaded = checkpoint_of(bpe(), False, activation=activation)
    path = output_path(tmp_path, to)
    FORMATS[to].write(loaded, path)
    with pytest.raises(UserError, match="logits differ by"):
        compare_export(loaded, FORMATS[to].open(path))
    report = compare_export(loaded, FORMATS[to].open(path), OTHER_GELU_TOLERANCE)
    assert re.search(r"difference of logits is \de-04$", report)


def test_logits_that_are_nan_are_refused():
    """The maximum of 0 and NaN is 0 in Python: NaN counted as equal."""
    loaded = checkpoint_of(bpe(), True)
    exported = export_formats.ExportedModel(
        encode=lambda text: loaded.tokenizer.encode(text).tolist(),
        decode=loaded.tokenizer.decode,
        logits=lambda ids: torch.full((*ids.shape, loaded.tokenizer.vocab_size), torch.nan),
    )
    with pytest.raises(UserError, match="logits differ by nan"):
        compare_export(loaded, exported)
