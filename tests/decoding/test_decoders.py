"""Both decoders on a CPU, against the model without a cache; the choice of the decoder."""

import pytest
import torch

import model as model_file
from folio import UserError
from folio.decoding import sampling, torch_decoder
from folio.decoding.cpu_decoder import computes_filters, computes_model
from folio.decoding.decoders import make_decoder, print_once
from folio.decoding.sampling import Sampling, uniforms
from folio.decoding.scheduler import generate
from folio.decoding.torch_decoder import TorchDecoder
from folio.machine.kernels import FusedAttention
from folio.machine.runtime import resolve_runtime
from model import ACTIVATIONS, GPT
from tests.support.decoding import GREEDY, assert_same_tokens, decoder_in, generate_tokens, random_model
from tests.support.tolerances import logits_error, within

CPU = resolve_runtime("cpu", "float32", False)


def generate_without_cache(model: GPT, prompt: list[int], stride: int) -> list[int]:
    """Twenty greedy tokens, each by a full forward pass. A full context drops its oldest tokens."""
    S = model.config.block_size
    tokens, context = [], prompt[-S:]
    for _ in range(20):
        if len(context) > S:
            context = context[-max(1, S - stride + 1) :]
        tokens.append(model(torch.tensor([context]))[0][0, -1].argmax().item())
        context = [*context, tokens[-1]]
    return tokens


@pytest.mark.parametrize("stride", [1, 2, None, 7, 8, 100])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 12])
def test_greedy_tokens_match_full_forward_passes(length, stride, model, runtime):
    """Up to the context size, and beyond it. By default, a full context drops half of its tokens."""
    prompt = list(range(length))
    (tokens,) = generate_tokens(model, [prompt], runtime, stride=stride)
    expected = generate_without_cache(model, prompt, stride or 4)
    assert_same_tokens(tokens, expected, model, prompt, stride=stride)
    if stride == 1:
        assert model.generate(torch.tensor([prompt]), 20, top_k=1)[0, length:].tolist() == expected


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "int4", "torch float32", "torch bfloat16", "torch autocast"]
)
@pytest.mark.parametrize("stride", [1, None])
def test_rows_of_unequal_length_in_each_dtype(dtype, stride, model):
    """The logits of a row do not depend on the batch, also if rows end early or contexts are full.

    In bfloat16 and int8, writing to the cache, which is float32 on a CPU, crashed if rows had unequal lengths.
    """
    decoder = decoder_in(dtype, model)
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 8], list(range(15)), [9, 1, 2]]
    # Nearly uniform, so that the logits of different dtypes give the same tokens, except at a near tie.
    settings = dict(eot=5, stride=stride, sampling=Sampling(temperature=1e6))

    def generate_logits(rows: list[int]) -> list[tuple[list[int], list[torch.Tensor]]]:
        results = [([], []) for _ in rows]
        for step in generate(decoder, [prompts[row] for row in rows], max_new_tokens=20, samples=rows, **settings):
            for (tokens, logits), token, row_logits in zip(results, step.tokens, step.logits, strict=True):
                if token is not None:
                    tokens.append(token)
                    logits.append(row_logits.clone())
        return results

    batch = generate_logits(list(range(6)))
    lengths = {len(tokens) for tokens, _ in batch}
    assert len(lengths) > 2 and max(lengths) == 20  # some rows end early, some have full contexts
    exact = dtype in ("float32", "torch float32")
    error = logits_error(model.config, model.config.block_size, torch.float32 if exact else torch.bfloat16)
    for row, (tokens, logits) in enumerate(batch):
        ((expected_tokens, expected_logits),) = generate_logits([row])
        equal = assert_same_tokens(tokens, expected_tokens, decoder, prompts[row], samples=[row], **settings)
        for actual, expected in zip(logits[:equal], expected_logits, strict=False):
            torch.testing.assert_close(actual, expected, **within(expected, error))


def test_padding_ids_are_never_sampled(model, runtime):
    with torch.no_grad():
        model.transformer.wte.weight[15:] *= 3
    settings = dict(sampling=Sampling(temperature=2.0))
    unlimited = generate_tokens(model, [[1, 2]] * 20, runtime, **settings)
    limited = generate_tokens(model, [[1, 2]] * 20, runtime, **settings, vocab_size=15)
    assert max(map(max, unlimited)) >= 15 > max(map(max, limited))


@pytest.mark.parametrize("dtype", ["bfloat16", "torch bfloat16", "torch autocast"])
def test_bfloat16_weights_and_autocast_are_close_to_float32(dtype, model):
    exact = model(torch.tensor([[1, 2]]))[0][0, -1]
    steps = generate(decoder_in(dtype, model), [[1, 2]], max_new_tokens=20, sampling=GREEDY)
    first = next(steps)
    error = logits_error(model.config, 2, torch.bfloat16)
    torch.testing.assert_close(first.logits[0], exact, **within(exact, error))
    assert first.logits.dtype == torch.float32 and len(list(steps)) == 19


def test_a_model_that_computes_nan_is_an_error(model, runtime):
    """An id beyond the vocabulary was sampled, which crashed the embedding."""
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = torch.nan
    with pytest.raises(UserError, match="the model computes NaN: use another checkpoint"):
        generate_tokens(model, [[1, 2]], runtime, sampling=Sampling())


# --- near ties --------------------------------------------------------------------------------------------------------


def test_tokens_may_differ_only_where_rounding_decides(model):
    """The tests of both decoders failed by chance, if a seed brought two logits close to each other."""
    model.requires_grad_(False)
    model.transformer.ln_f.weight[:], model.transformer.ln_f.bias[:] = 0, 1  # a logit is the sum of a row
    model.transformer.wte.weight[1:3] = 1  # the most likely tokens
    model.transformer.wte.weight[2, 0] += 1e-6
    (greedy,) = generate_tokens(model, [[5]], CPU)
    assert greedy[0] in (1, 2)
    assert assert_same_tokens([3 - greedy[0], 7], greedy, model, [5]) == 0
    model.transformer.wte.weight[:] = 1  # uniform
    sample = uniforms(1337, range(10**6), 0, 1)[:, 0].sub(0.5).abs().argmin().item()  # between the tokens 9 and 10
    settings = dict(sampling=Sampling(), samples=[sample])
    (drawn,) = generate_tokens(model, [[5]], CPU, **settings)
    assert drawn[0] in (9, 10)
    assert assert_same_tokens([19 - drawn[0]], drawn, model, [5], **settings) == 0
    for wrong in ([8], [11], []):
        with pytest.raises(AssertionError, match="must be in"):
            assert_same_tokens(wrong, drawn, model, [5], **settings)
    with pytest.raises(AssertionError):  # its logits are bitwise independent of the batch
        assert_same_tokens([19 - drawn[0]], drawn, make_decoder(model, CPU), [5], **settings)


# --- the choice of a decoder ------------------------------------------------------------------------------------------


def with_reversed_layers(self, *arguments):
    self.transformer.h, h = self.transformer.h[::-1], self.transformer.h
    try:
        return HIDDEN_STATES(self, *arguments)
    finally:
        self.transformer.h = h


def with_swapped_norms(self, x, *attention):
    x = x + self.attn(self.ln_2(x), *attention)
    return x + self.mlp(self.ln_1(x))


HIDDEN_STATES, ATTEND = GPT.hidden_states, model_file.AttentionKernel.__call__
CHANGES = {  # owner, name, and other value
    "epsilon": (model_file, "LayerNorm", lambda size, bias: torch.nn.LayerNorm(size, eps=1e-6, bias=bias)),
    "order of layers": (GPT, "hidden_states", with_reversed_layers),
    "norms": (model_file.Block, "forward", with_swapped_norms),
    "activation": (model_file, "ACTIVATIONS", {**ACTIVATIONS, "gelu_new": ACTIVATIONS["gelu"]}),
    "scale": (model_file.AttentionKernel, "__call__", lambda self, layer, q, *a: ATTEND(self, layer, q * 1.001, *a)),
    "weights": (model_file, "LayerNorm", lambda size, bias: torch.nn.LayerNorm(size, elementwise_affine=False)),
    "error": (model_file.MLP, "forward", lambda self, x: 1 / 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_are_decoded_by_torch(change, monkeypatch, capsys):
    """All layers and vectors had equal weights in the check, so that a changed order or epsilon was not noticed. The
    line was about sampling.py if no decoder could be built for the changed model.
    """
    monkeypatch.setattr(*CHANGES[change])
    computes_filters.cache_clear()
    assert not computes_model(random_model(1))
    print_once.cache_clear()
    assert isinstance(make_decoder(random_model(1), CPU), TorchDecoder)
    line = "torch decodes, which is slower, because model.py or the model was changed\n"
    assert capsys.readouterr().err == line  # sampling was 12 times slower without a message
    with pytest.raises(UserError, match=r"dtype=int8: .* model\.py or the model was changed; use --dtype=auto"):
        make_decoder(random_model(1), CPU, "int8")
    computes_filters.cache_clear()


def test_changed_attention_is_noticed_in_the_definition_and_in_the_models_kernel(monkeypatch):
    """A loaded model has torch's kernel, so that a changed definition in model.py would not be noticed in it."""
    model = random_model(1)
    model.kernel = FusedAttention()
    assert computes_model(model)
    with monkeypatch.context() as patch:
        patch.setattr(*CHANGES["scale"])
        assert not computes_model(model)
    monkeypatch.setattr(FusedAttention, "__call__", lambda self, layer, q, *a: ATTEND(self, layer, q * 1.001, *a))
    assert not computes_model(model)


@pytest.mark.parametrize("name", ["penalize", "keep_top_k", "keep_top_p", "keep_min_p", "uniforms"])
def test_a_changed_filter_is_not_ignored(name, monkeypatch):
    """A changed filter with the same settings was ignored."""
    computes_filters.cache_clear()
    assert computes_filters()
    original = getattr(sampling, name)
    for module in (sampling, torch_decoder):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *arguments: original(*arguments).flip(-1))
    computes_filters.cache_clear()
    assert isinstance(make_decoder(random_model(1), CPU), TorchDecoder)
    computes_filters.cache_clear()
