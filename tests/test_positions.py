"""The position encodings of model.py, against transformers' models, and their properties."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folio.checkpoints.build_model import crop_block_size
from folio.decoding.cpu_decoder import FORMATS, CPUBatch
from folio.decoding.quantize import quantized
from folio.decoding.scheduler import generate
from folio.decoding.torch_decoder import TorchBatch
from model import (
    GPT,
    POSITIONS,
    AttentionKernel,
    CausalSelfAttention,
    GPTConfig,
    Mask,
    RotaryPositions,
    alibi_slopes,
    relative_bucket,
    rotate,
    score_biases,
    sinusoids,
)
from tests.support.decoding import decoder_in, random_model
from tests.support.tolerances import logits_error, rounding_error, within

RELATIVE = ("rotary", "relative", "alibi")
CPU = torch.device("cpu")


def attention_inputs(H: int = 4, T: int = 200, D: int = 8) -> Tensor:
    """q, k, v: (3, B, H, T, D)."""
    return torch.randn(3, 2, H, T, D)


def causal(T: int) -> Tensor:
    """(T, T): 0, and -inf for keys after the query."""
    return torch.full((T, T), -math.inf).triu(diagonal=1)


# --- against transformers and the papers ------------------------------------------------------------------------------


def test_rotary_matches_gpt_neox(seed):
    gpt_neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    torch.manual_seed(seed)
    q, k, _ = attention_inputs()
    neox = gpt_neox.GPTNeoXConfig(hidden_size=32, num_attention_heads=4)
    neox.rope_parameters["partial_rotary_factor"] = 1.0  # rotate all channels
    cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(neox)(q, torch.arange(200)[None])
    expected = gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    rotation = RotaryPositions(GPTConfig(n_embd=32, n_head=4, position="rotary")).rotation(torch.arange(200))
    # An angle, of up to 199, and so a rotated value, is off by that many times the rounding of its frequency.
    error = 2 * rounding_error(3 * 199)
    for ours, theirs in zip((rotate(q, rotation), rotate(k, rotation)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **within(theirs, error))


def test_relative_biases_match_t5(seed):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    torch.manual_seed(seed)
    q, k, v = attention_inputs()
    config = t5.T5Config(num_heads=4, d_model=32, d_kv=8, is_decoder=True)
    attention = t5.T5Attention(config, has_relative_attention_bias=True)
    model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=32, position="relative"))
    model.transformer.relative_bias.weight.data = attention.relative_attention_bias.weight.data
    expected = F.scaled_dot_product_attention(q, k, v, attention.compute_bias(200, 200) + causal(200))
    positions = torch.arange(200)
    mask = Mask(score_biases(model, positions, positions))
    error = 2 * rounding_error(8 + 2 * 200 + 5)  # scores, softmax, and sum over values
    attended = AttentionKernel()(model.transformer.h[0].attn, q, k, v, mask)
    torch.testing.assert_close(attended, expected, **within(v, error))
    distance = torch.arange(3000)
    theirs = t5.T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(relative_bucket(distance), theirs)


@pytest.mark.parametrize("H", [1, 2, 3, 4, 6, 8, 12, 20])
def test_alibi_matches_bloom(H, seed):
    """BLOOM's bias grows with the key's position; each row of the scores differs from ours by a constant."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    torch.manual_seed(seed)
    q, k, v = attention_inputs(H)
    bias = bloom.build_alibi_tensor(torch.ones(1, 200), H, torch.float32).view(1, H, 1, 200)
    expected = F.scaled_dot_product_attention(q, k, v, bias + causal(200))
    model = GPT(GPTConfig(n_layer=1, n_head=H, n_embd=8 * H, position="alibi"))
    positions = torch.arange(200)
    mask = Mask(score_biases(model, positions, positions))
    # Their biases and so their scores are up to 200 times the steepest slope, and rounded by as much.
    error = 2 * rounding_error(200 + 8 + 2 * 200 + 5)
    attended = AttentionKernel()(model.transformer.h[0].attn, q, k, v, mask)
    torch.testing.assert_close(attended, expected, **within(v, error))
    assert alibi_slopes(8, CPU).tolist() == [2.0**-h for h in range(1, 9)]  # the paper's example


@pytest.mark.parametrize("C", [2, 7, 64])
def test_sinusoids_match_the_paper(C):
    error = 3 * 300 * torch.finfo(torch.float32).eps / 2  # of an angle, up to 300, with three roundings
    for p, row in enumerate(sinusoids(torch.arange(300), C) * math.sqrt(C)):
        expected = [(math.cos if i % 2 else math.sin)(p / 10000 ** ((i - i % 2) / C)) for i in range(C)]
        assert row.tolist() == pytest.approx(expected, abs=error)


def test_without_positions_one_layer_ignores_the_order_of_earlier_tokens(seed):
    """All other encodings distinguish it."""
    torch.manual_seed(seed)
    idx, reordered = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[4, 2, 5, 1, 3, 6]])
    for position in POSITIONS:
        model = random_model(seed, position=position, n_layer=1)
        logits = model(idx)[0]
        same = torch.allclose(logits, model(reordered)[0], **within(logits, logits_error(model.config, 6)))
        assert same == (position == "none"), position


# --- properties of all encodings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_logits_do_not_depend_on_later_tokens(position, seed):
    model = random_model(seed, position=position)
    idx, embeddings = torch.arange(8)[None], []

    def record(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    model.transformer.wte.register_forward_hook(record)
    for t in (0, 3, 7):
        logits = model.logits(idx)
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embeddings[-1])
        assert (gradient[0].abs().sum(dim=-1) > 0).tolist() == [i <= t for i in range(8)]


@pytest.mark.parametrize("position", POSITIONS)
@torch.inference_mode()
def test_weights_in_bfloat16_compute_nearly_the_same(position, seed):
    """float32 sinusoids made the residual stream float32, which bfloat16 norms do not accept."""
    model, idx = random_model(seed, position=position), torch.arange(8)[None]
    expected = model.logits(idx)
    logits = model.bfloat16().logits(idx)
    assert logits.dtype == torch.bfloat16
    error = logits_error(model.config, 8, torch.bfloat16)
    torch.testing.assert_close(logits.float(), expected, **within(expected, error))


class Shifted(AttentionKernel):
    """Attention over a sequence that begins at a later position."""

    def begin_forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(idx.shape[1]) + 5
        return positions, positions


@pytest.mark.parametrize("position", POSITIONS)
def test_only_position_embeddings_depend_on_a_shift_of_all_positions(position, seed):
    model = random_model(seed, position=position, block_size=16)
    idx = torch.arange(10)[None]
    logits = model.logits(idx)
    same = torch.allclose(model.logits(idx, Shifted()), logits, **within(logits, logits_error(model.config, 15)))
    assert same == (position in (*RELATIVE, "none"))


class Windowed(AttentionKernel):
    """Each token attends to itself and the size - 1 tokens before it."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        T = q.shape[2]
        too_far = torch.ones(T, T, dtype=torch.bool).tril(diagonal=-self.size)
        return super().__call__(layer, q, k, v, Mask(mask.tensor(q).masked_fill(too_far, -math.inf)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "torch float32", "torch bfloat16"])
@pytest.mark.parametrize("position", RELATIVE)
@torch.inference_mode()
def test_a_full_context_slides_without_being_prefilled_again(position, dtype, seed, monkeypatch):
    """For each step of batches with equal and unequal prompts, the logits match a forward pass over the whole text in
    which each token attends to block_size tokens.
    """
    assert POSITIONS[position].can_slide
    reference = random_model(seed, position=position)
    decoder = decoder_in(dtype, reference)
    if dtype in FORMATS and dtype.startswith("int"):
        reference = quantized(reference, dtype)
    prefills: list[tuple] = []
    for batch_class in (CPUBatch, TorchBatch):
        prefill = batch_class.prefill
        recorded = lambda *args, prefill=prefill: prefills.append(args) or prefill(*args)  # noqa: E731
        monkeypatch.setattr(batch_class, "prefill", recorded)
    for prompts in ([[1]], [[1, 2, 3], [4, 5, 6]], [list(range(8))], [[1], list(range(11)), [3, 4]]):
        contexts = [prompt[-8:] for prompt in prompts]
        logits: list[list[Tensor]] = [[] for _ in prompts]
        for step in generate(decoder, prompts, max_new_tokens=24):
            if not logits[0]:
                prefills.clear()
            for row, token in enumerate(step.tokens):
                logits[row].append(step.logits[row].clone())
                contexts[row] = [*contexts[row], token]
        assert not prefills
        for row, context in enumerate(contexts):
            idx = torch.tensor([context[:-1]])
            expected = reference.logits(idx, Windowed(8))[0, -24:]
            error = logits_error(reference.config, 8, torch.float32 if "float32" in dtype else torch.bfloat16)
            torch.testing.assert_close(torch.stack(logits[row]), expected, **within(expected, error))


@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
@pytest.mark.parametrize("position", POSITIONS)
@torch.inference_mode()
def test_cached_equals_recomputed_with_a_stride(position, dtype, seed):
    """If contexts are prefilled again, the logits match a forward pass over the remaining context.

    Models without positions need this: their loss on Tiny Shakespeare is 1.56, but 3.7 when the context slides.
    """
    model = random_model(seed, position=position)
    prompts = [[1], [2, 3, 4], list(range(10))]
    contexts = [prompt[-8:] for prompt in prompts]
    stride = 3 if position in RELATIVE else None  # None: 4 of 8
    remaining = 8 - (stride or 4)
    for step in generate(decoder_in(dtype, model), prompts, max_new_tokens=20, stride=stride):
        for row, token in enumerate(step.tokens):
            expected = model(torch.tensor([contexts[row]]))[0][0, -1]
            error = logits_error(model.config, len(contexts[row]))
            torch.testing.assert_close(step.logits[row], expected, **within(expected, error))
            context = contexts[row] if len(contexts[row]) < 8 else contexts[row][-remaining:]
            contexts[row] = [*context, token]


@pytest.mark.parametrize("position", POSITIONS)
def test_sequences_longer_than_the_trained_ones(position, seed):
    """Only a learned table has an end: see test_model.py. The logits of the first tokens do not change."""
    model, idx = random_model(seed, position=position), torch.arange(20)[None]
    if position != "learned":
        expected = model.logits(idx[:, :8])
        tolerance = within(expected, logits_error(model.config, 20))
        torch.testing.assert_close(model.logits(idx)[:, :8], expected, **tolerance)
        crop_block_size(model, 20)
        assert model.config.block_size == 20
    crop_block_size(model, 4)
    assert model.config.block_size == 4 and model(idx[:, :4])[0].isfinite().all()


def test_invalid_position_settings_are_refused():
    with pytest.raises(ValueError, match=f"'rope' is not one of {', '.join(POSITIONS)}"):
        GPTConfig(position="rope")
    with pytest.raises(ValueError, match="rotary positions need an even head size"):
        GPTConfig(position="rotary", n_head=4, n_embd=12)
