"""The compiled attention of a training step against float64, and its place in a model."""

import math

import pytest
import torch
from torch import Tensor, nn

from folio.machine import compiled
from folio.machine.compiled_attention import CAUSAL_ATTENTION, CompiledFunction, call
from folio.machine.kernels import CompiledAttention, CPUDropout, FusedAttention, adapt
from folio.machine.runtime import Runtime
from model import GPT, POSITIONS, AttentionKernel, GPTConfig, Mask
from tests.support.tolerances import binomial_range, gradients_error, network_tensors, norm_error, normal_limit

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX-512 BF16")
SHAPES = [(1, 1, 16, 16), (2, 3, 48, 32), (1, 2, 128, 48), (2, 1, 64, 80), (1, 2, 256, 64)]  # B, H, T, D


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factors: Tensor | float = 1.0) -> Tensor:
    """Attention in float64. factors: of the weights, for dropout."""
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    if mask is not None:
        scores = scores + mask
    return (scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1) * factors) @ v


def random_inputs(shape: tuple[int, ...], with_mask: bool = False) -> tuple[list[Tensor], Tensor]:
    """q, k, v and a mask or None; and the gradient of the result."""
    B, H, T, D = shape
    q, k, v = torch.randn(B, T, 3, H, D).bfloat16().permute(2, 0, 3, 1, 4)  # as in CausalSelfAttention
    mask = torch.randn(1, H, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf) if with_mask else None
    inputs = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, mask)]
    return inputs, torch.randn(B, T, H, D).bfloat16().transpose(1, 2)


def assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, x in zip(results, expected, strict=True):
        # At most four tensors in a row are rounded: the weights, y, the gradient of the scores, and the gradient.
        assert ((result.double() - x).norm() / x.norm()).item() < norm_error(4, torch.bfloat16)


def with_gradients(y: Tensor, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, [x for x in inputs if x is not None], grad)]


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(shape, with_mask, seed):
    torch.manual_seed(seed)
    inputs, grad = random_inputs(shape, with_mask)
    expected = exact_results(inputs, grad)
    for layout in (lambda x: x, torch.Tensor.contiguous):  # as they are, and as after a rotation
        arguments = [layout(x) for x in inputs[:3]]
        results = with_gradients(CompiledFunction.apply(*arguments, inputs[3], 0, 0), inputs, layout(grad))
        assert_close(results, expected)


def exact_results(inputs: list[Tensor | None], grad: Tensor, factors: Tensor | float = 1.0) -> list[Tensor]:
    """The result and the gradients in float64."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    return with_gradients(reference(*exact, factors), exact, grad.double())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("with_mask", [False, True])
def test_dropout(p, with_mask, seed):
    """Weights are dropped independently of each other, and the same ones in the backward pass."""
    torch.manual_seed(seed)
    (B, H, T, D), dropped, key = (2, 2, 128, 32), round(p * 2**32), 2**62 + seed
    inputs, grad = random_inputs((B, H, T, D), with_mask)
    weights = torch.empty(B, H, T, T, dtype=torch.bfloat16)
    with torch.no_grad():
        call("forward", *inputs[:3], torch.empty_like(grad), weights, inputs[3], (), dropped, key)
    seen = torch.ones(T, T).tril().bool()
    is_dropped = (weights < 0) & seen
    assert is_dropped.sum().item() in binomial_range(B * H * seen.sum().item(), p, comparisons=5)
    square = is_dropped[:, :, 64:, :64].float()
    for dim in range(4):  # neighbors
        a, b = (square.narrow(dim, first, square.shape[dim] - 1) for first in (0, 1))
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < normal_limit(5) / math.sqrt(a.numel())
    expected = exact_results(inputs, grad, ~is_dropped / (1 - p))
    assert_close(with_gradients(CompiledFunction.apply(*inputs, dropped, key), inputs, grad), expected)


def test_dropout_is_repeated_with_the_generators_state(seed):
    q, k, v = random_inputs((2, 2, 64, 32))[0][:3]
    layer = nn.Module()
    layer.attn_dropout = CPUDropout(0.3)
    layer.attn_dropout.generator = torch.Generator()
    results = []
    for number in (seed, seed, seed + 1):
        layer.attn_dropout.generator.manual_seed(number)
        results.append(CompiledAttention()(layer, q, k, v, Mask()))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    layer.eval()
    assert torch.equal(CompiledAttention()(layer, q, k, v, Mask()), CompiledFunction.apply(q, k, v, None, 0, 0))


@pytest.mark.parametrize("part", range(3))
def test_nan_remains(part):
    """A step that is not finite must be noticed."""
    inputs, _ = random_inputs((1, 1, 32, 16))
    with torch.no_grad():
        inputs[part][0, 0, 3] = math.nan
    y = CompiledFunction.apply(*inputs, 0, 0)[0, 0]
    assert y[3].isnan().all() and (part == 0 or y[3:].isnan().all())
    assert part == 2 or y[:3].isfinite().all()


@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_computes_the_same(position, seed):
    """The compiled function is as close to float32 as matmuls are."""
    runtime = Runtime(torch.device("cpu"), torch.bfloat16, False, "", workers=2)
    config = GPTConfig(block_size=64, vocab_size=50, n_layer=2, n_head=2, n_embd=64, position=position)
    model, results = GPT(config), []
    adapt(model, runtime)
    idx, targets = torch.randint(50, (2, 3, 64), generator=torch.Generator().manual_seed(seed))
    for kernel in (FusedAttention, AttentionKernel, CompiledAttention):
        model.kernel = kernel()
        with runtime.autocast() if kernel != FusedAttention else torch.enable_grad():
            loss = model(idx, targets)[1]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
    (exact_loss, exact), (_, manual), (loss, compiled_gradients) = results
    logit = 0.02 * math.sqrt(config.n_embd)  # the standard deviation of a new model's logits
    assert loss == pytest.approx(exact_loss, abs=norm_error(network_tensors(config), torch.bfloat16) * logit)
    errors = [((g - exact).norm() / exact.norm()).item() for g in (manual, compiled_gradients)]
    assert errors[1] < 1.2 * errors[0]  # it rounds no more tensors, and errors of so many values vary by a few percent
    assert errors[0] < gradients_error(config, 3, 64, torch.bfloat16)


@pytest.mark.parametrize("T, D", [(24, 16), (32, 24)])
def test_other_sizes_are_computed_by_matmuls(T, D):
    layer = nn.Module()
    layer.attn_dropout = nn.Dropout(0.0)
    q, k, v = torch.randn(3, 2, 2, T, D).bfloat16()
    assert torch.equal(CompiledAttention()(layer, q, k, v, Mask()), AttentionKernel()(layer, q, k, v, Mask()))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_other_dtypes_are_computed_by_matmuls(name, seed):
    """With keys or values in float32 beside queries in bfloat16, their bytes were read as bfloat16."""
    torch.manual_seed(seed)
    layer = nn.Module()
    layer.attn_dropout = nn.Dropout(0.0)
    inputs = dict(zip("qkv", torch.randn(3, 2, 2, 32, 16).bfloat16(), strict=True))
    inputs[name] = inputs[name].float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = AttentionKernel()(layer, **inputs, mask=Mask())
        assert torch.equal(CompiledAttention()(layer, **inputs, mask=Mask()), expected)


def test_it_is_used_by_several_workers_where_it_can_be(monkeypatch):
    def kernel(workers: int = 2, dtype: torch.dtype = torch.bfloat16) -> type:
        runtime, model = Runtime(torch.device("cpu"), dtype, False, "", workers=workers), GPT(config)
        adapt(model, runtime)
        return type(model.kernel)

    config = GPTConfig(block_size=32, vocab_size=50, n_layer=1, n_head=2, n_embd=32)
    assert kernel() is CompiledAttention
    assert kernel(workers=1) is AttentionKernel and kernel(dtype=torch.float32) is FusedAttention
    monkeypatch.setattr(compiled, "why_unavailable", lambda module, function: "numba is missing")
    assert kernel() is AttentionKernel
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert kernel() is AttentionKernel
    assert compiled.why_unavailable(CAUSAL_ATTENTION, "backward") is None


def test_the_machine_code_is_cached():
    """A function that calls another library's was compiled at each start, in 1.6 s."""
    for function in ("forward", "backward"):
        compiled.address(CAUSAL_ATTENTION, function)
        assert compiled.cache_file(CAUSAL_ATTENTION, function, None).is_file()
