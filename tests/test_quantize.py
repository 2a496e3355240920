import numpy as np
import pytest
import torch
from decoding import random_model

from folio.quantize import pack_int4, quantize_int4, quantize_int8, quantized, round_trip


def test_int8_rounds_to_the_nearest_of_255_numbers(seed):
    torch.manual_seed(seed)
    weight = torch.randn(9, 40)
    codes, scales = quantize_int8(weight)
    assert codes.abs().amax(dim=1).tolist() == [127] * 9  # the largest weight of each output is exact
    assert ((codes * scales[:, None] - weight).abs() <= scales[:, None] * 0.501).all()


def test_packed_int4_has_the_numbers_of_its_bytes(seed):
    """Decoded byte by byte, by the layout that the docstring describes."""
    torch.manual_seed(seed)
    weight = torch.randn(5, 64)
    packed, rounded = pack_int4(weight), round_trip(weight, "int4")
    assert packed.shape == (5, 2 * 18) and packed.dtype == torch.uint8
    for row in range(5):
        for group in range(2):
            block = packed[row, 18 * group : 18 * group + 18].numpy()
            scale = np.array([0, 0, *block[:2]], dtype=np.uint8).view("<f4")[0]
            codes = [int(byte) & 15 for byte in block[2:]] + [int(byte) >> 4 for byte in block[2:]]
            numbers = np.array([(code - 8) * scale for code in codes], dtype=np.float32)
            assert (numbers == rounded[row, 32 * group : 32 * group + 32].numpy()).all()


def test_int4_rounds_to_the_nearest_of_16_numbers(seed):
    """The largest weight is exact but for the rounding of the scale; the largest one of the other sign may be cut."""
    torch.manual_seed(seed)
    weight = torch.randn(7, 96)
    codes, scales = quantize_int4(weight)
    groups, size = weight.unflatten(1, (-1, 32)), scales.float().abs()
    nearest = (groups[..., None] - scales.float()[..., None] * torch.arange(-8, 8)).abs().amin(dim=-1)
    assert torch.allclose((codes * scales.float() - groups).abs(), nearest, atol=1e-6)
    assert (codes == -8).any(dim=-1).all() and (nearest <= size * 1.05).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_zeros_stay_zeros_and_numbers_that_are_not_finite_do_not_become_numbers(dtype):
    assert (round_trip(torch.zeros(3, 40), dtype) == 0).all()
    for value in (torch.nan, torch.inf):
        weight = torch.ones(1, 32)
        weight[0, 5] = value
        assert not round_trip(weight, dtype).isfinite().all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_quantized_model_is_a_copy_whose_matrices_are_rounded(dtype, weights, seed):
    """Embeddings are those of the output matrix. Norms, biases, and positions stay as they are."""
    model = random_model(seed, n_embd=40).to(weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = dict(quantized(model, dtype).named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        is_matrix = p.dim() == 2 and "wpe" not in name
        assert torch.equal(result[name], round_trip(p, dtype) if is_matrix else p.float()), name
