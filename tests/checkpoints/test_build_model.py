import pytest
import torch

from folio.checkpoints.build_model import crop_block_size, model_from_tensors
from folio.machine.kernels import FusedAttention
from model import GPT, GPTConfig
from tests.support.models import SMALL, tokens


@pytest.mark.architecture("model.py: GPT.tie_weights")
def test_embeddings_stay_tied_after_loading():
    model = GPT(GPTConfig(**SMALL))
    loaded = model_from_tensors(model.config, dict(model.named_parameters()))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_crop_block_size_keeps_the_first_positions(seed):
    torch.manual_seed(seed)
    model, idx = GPT(GPTConfig(**SMALL)), tokens(2, 8)
    before = model.logits(idx)
    crop_block_size(model, 8)
    assert torch.equal(model.logits(idx), before)
    assert model.transformer.wpe.weight.requires_grad
    with pytest.raises(ValueError, match="more than the model's 8 positions"):
        crop_block_size(model, 9)
    with pytest.raises(ValueError, match="longer than block_size=8"):
        model(tokens(1, 9))


def test_a_loaded_model_has_torchs_attention():
    """Evaluation and exports compute with it, as before model.py had the definition, so that losses stay the same."""
    model = GPT(GPTConfig(**SMALL))
    assert isinstance(model_from_tensors(model.config, dict(model.named_parameters())).kernel, FusedAttention)


def test_weights_of_another_number_of_layers_are_refused():
    """Before the layers are built: a damaged state.json may ask for a million."""
    model = GPT(GPTConfig(**SMALL))
    with pytest.raises(ValueError, match="not the weights of 1000000 layers"):
        model_from_tensors(GPTConfig(**{**SMALL, "n_layer": 10**6}), dict(model.named_parameters()))
