import numpy as np
import pytest
import torch

from folio import UserError
from folio.decoding.quantize import CANDIDATE_CODES, pack_int4, quantize_int8, quantized, round_trip
from folio.machine import memory
from tests.support.decoding import random_model
from tests.support.tolerances import rounding_error


def test_int8_rounds_to_the_nearest_of_255_numbers(seed):
    torch.manual_seed(seed)
    weight = torch.randn(9, 40)
    codes, scales = quantize_int8(weight)
    assert codes.abs().amax(dim=1).tolist() == [127] * 9  # the largest weight of each output is exact
    max_error = 1 / 2 + 127 * rounding_error(3)  # in steps: of the scale, the quotient, and the product
    assert ((codes * scales[:, None] - weight).abs() <= scales[:, None] * max_error).all()


def test_packed_int4_matches_a_bytewise_decoder(seed):
    """A decoder of the layout in the docstring of pack_int4."""
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


def min_error(group: np.ndarray) -> float:
    """The minimum squared error of 32 weights in int4, by brute force.

    Codes change only at scales where a weight is halfway between two codes. Between two such scales, the codes are
    those at the midpoint, and the best scale for them is that of least squares.
    """
    halfway = np.unique(np.abs(group[:, None] / (np.arange(8) + 0.5)))
    scales = np.outer([1, -1], halfway[1:] + halfway[:-1]).ravel() / 2
    codes = np.rint(group / scales[:, None]).clip(-8, 7)
    explained = (codes @ group) ** 2 / (codes**2).sum(axis=1).clip(min=1)
    return (group**2).sum() - explained.max()


@pytest.mark.parametrize("weights", ["normal", "heavy tails", "one sign"])
def test_the_error_of_int4_is_that_of_the_best_candidate(weights, seed):
    """In float64. Rounding a scale s to bfloat16, with the unit roundoff u, adds up to (u s)^2 |codes|^2."""
    torch.manual_seed(seed)
    weight = torch.randn(40, 64)
    weight = {"normal": weight, "heavy tails": weight**3, "one sign": weight.abs()}[weights]
    groups = weight.double().reshape(-1, 32)
    errors = (round_trip(weight, "int4").double().reshape(-1, 32) - groups).square().sum(dim=1)
    squares, largest = groups.square().sum(dim=1), groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    codes = (groups / largest * torch.tensor(CANDIDATE_CODES)[:, None, None]).round().clamp(-8, 7)  # (4, groups, 32)
    explained = ((codes * groups).sum(dim=2).square() / codes.square().sum(dim=2)).amax(dim=0)
    rounding = rounding_error(1, torch.bfloat16) ** 2 * explained
    # Candidates are compared in float32, after 2 sums of 32 products, a square, and a quotient.
    comparison = 2 * rounding_error(2 * 32 + 4) * squares
    excess = errors - (squares - explained)
    assert ((excess >= -comparison) & (excess <= rounding + comparison)).all()
    minimum = np.array([min_error(group) for group in groups.numpy()])
    assert (errors.numpy() >= minimum - rounding_error(2 * 32, torch.float64) * squares.numpy()).all()
    scales = largest / -8  # as in llama.cpp's Q4_0
    q4_0_errors = ((groups / scales).round().clamp(-8, 7) * scales - groups).square().sum(dim=1)
    assert errors.sum() < q4_0_errors.sum()


def test_weights_that_are_multiples_of_a_scale_are_exact(seed):
    torch.manual_seed(seed)
    codes = torch.randint(-8, 8, (9, 64)).float()
    codes[:, ::32] = -8
    weight = codes * 2.0 ** torch.randint(-130, 120, (9, 1))
    assert torch.equal(round_trip(weight, "int4"), weight)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_are_rounded_independently(dtype, seed, monkeypatch):
    """A large matrix is rounded in chunks of rows. It may be a transposed view, as from a Hugging Face folder."""
    torch.manual_seed(seed)
    weight = torch.randn(64, 11).T
    expected = torch.cat([round_trip(row[None], dtype) for row in weight])
    threads = torch.get_num_threads()
    for chunk_weights in (1, 200, 1 << 20):
        monkeypatch.setattr("folio.decoding.quantize.CHUNK_WEIGHTS", chunk_weights)
        assert torch.equal(round_trip(weight.requires_grad_(), dtype), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_zeros_stay_zeros_and_non_finite_weights_stay_non_finite(dtype):
    assert (round_trip(torch.zeros(3, 40), dtype) == 0).all()
    for value in (torch.nan, torch.inf):
        weight = torch.ones(1, 32)
        weight[0, 5] = value
        assert not round_trip(weight, dtype).isfinite().all()


def test_a_copy_that_does_not_fit_in_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    with pytest.raises(UserError, match=r"^dtype=int4: .* use a smaller model"):
        quantized(random_model(1), "int4")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_quantized_model_is_a_copy_whose_matrices_are_rounded(dtype, weights, seed):
    """Embeddings are tied to the output matrix. Norms, biases, and positions are not rounded."""
    model = random_model(seed, n_embd=40).to(weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = dict(quantized(model, dtype).named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        is_matrix = p.dim() == 2 and "wpe" not in name
        assert torch.equal(result[name], round_trip(p, dtype) if is_matrix else p.float()), name
