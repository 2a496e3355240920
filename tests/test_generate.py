import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_tokenizers import bpe
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from folio import UserError, kernels
from folio import generate as generation
from folio.generate import (
    Sampling,
    TextStream,
    default_prompt,
    generate,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    next_token_probabilities,
    sample_token,
    sampling_device,
    uniforms,
)
from folio.kernels import Int8Linear, PackedLinear, pack
from folio.kv_cache import KVCache
from folio.runtime import Runtime, resolve_runtime
from folio.tokenizer import CharTokenizer
from model import GPT, GPTConfig

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


@pytest.fixture
def model(seed: int) -> GPT:
    """Random weights, far enough apart that the model has opinions."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, dropout=0.5))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(model: GPT, prompts: list[list[int]], runtime: Runtime, **settings) -> list[list[int]]:
    """What follows each prompt."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, runtime, **{"max_new_tokens": 20, "sampling": GREEDY, **settings}):
        for row, token in zip(rows, step.tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=0.5, top_k=9, top_p=0.6),
        Sampling(temperature=1.5, min_p=0.1),
        Sampling(repetition_penalty=1.3, temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_the_distribution_is_that_of_transformers(sampling, seed):
    torch.manual_seed(seed)
    logits, before = torch.randn(4, 30) * 3, torch.randint(30, (4, 6))
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    theirs.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        theirs.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p:
        theirs.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        theirs.append(MinPLogitsWarper(sampling.min_p))
    occurred = torch.zeros(4, 30, dtype=torch.bool).scatter(1, before, True)
    torch.testing.assert_close(
        next_token_probabilities(logits, sampling, occurred), theirs(before, logits.clone()).softmax(-1)
    )


def test_filters_keep_what_they_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [True, True, False, False]
    assert keep_top_k(logits, 99).isfinite().all()
    for p, kept in ((0.01, 1), (0.5, 1), (0.51, 2), (0.9, 3), (1.0, 4)):
        assert keep_top_p(logits, p).isfinite().sum() == kept
    for p, kept in ((0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        assert keep_min_p(logits, p).isfinite().sum() == kept
    assert next_token_probabilities(logits, GREEDY).tolist() == [1, 0, 0, 0]


def test_a_tiny_top_p_keeps_the_likeliest():
    """A p that is 0 in float32 left no token at all, and the drawing crashed."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert keep_top_p(logits, 1e-60).isfinite().tolist() == [[True, False, False]]


def test_draws_fit_the_distribution(seed):
    """Chi-square over 20,000 draws; what is filtered out is never drawn."""
    sampling = Sampling(temperature=0.8, top_k=6)
    probabilities = next_token_probabilities(torch.linspace(-1, 1, 12), sampling)
    drawn = sample_token(probabilities.expand(20_000, -1), uniforms(seed, range(20_000), 3, 1))[:, 0]
    counts, expected = torch.bincount(drawn, minlength=12), 20_000 * probabilities
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 35  # 5 degrees of freedom: beyond this in fewer than 1 of 100,000


def test_the_first_and_the_last_token_can_be_drawn():
    probabilities = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]]).expand(4, -1)
    numbers = torch.tensor([0.0, 0.25, 0.7499, 1 - 2**-53], dtype=torch.float64)[:, None]
    assert sample_token(probabilities, numbers).flatten().tolist() == [1, 2, 2, 3]


def test_numbers_are_their_own(seed):
    """One of (seed, sample, position), evenly spread, and none like another."""
    numbers = uniforms(seed, range(100), 0, 100)
    assert torch.equal(numbers[7:9, 20:50], uniforms(seed, [7, 8], 20, 30))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 10_000
    assert not torch.equal(numbers, uniforms(seed + 1, range(100), 0, 100))
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # 9 degrees of freedom


# --- the cache --------------------------------------------------------------------------------------------------------


def uncached(model: GPT, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens by a full recomputation over the last block_size tokens."""
    context = list(prompt)
    for _ in range(count):
        context.append(model(torch.tensor([context[-model.config.block_size :]]))[0][0, -1].argmax().item())
    return context[len(prompt) :]


@pytest.mark.parametrize("length", [1, 3, 7, 8, 12])
def test_greedy_is_the_same_with_and_without_the_cache(length, model, runtime):
    """Up to the context's size, and beyond it with a window that moves by one."""
    prompt = list(range(length))
    assert tokens(model, [prompt], runtime, stride=1) == [uncached(model, prompt, 20)]
    upto = max(1, 8 - length)
    assert tokens(model, [prompt], runtime, max_new_tokens=upto) == [uncached(model, prompt, upto)]


@pytest.mark.parametrize("stride", [2, 4, 7, 8, 100])
def test_beyond_the_context_the_newest_tokens_are_read_again(stride, model, runtime):
    prompt = [1, 2, 3]
    context, window = list(prompt), list(prompt)
    for _ in range(20):
        if len(window) > 8:
            window = window[-max(1, 8 - stride + 1) :]
        context.append(model(torch.tensor([window]))[0][0, -1].argmax().item())
        window.append(context[-1])
    assert tokens(model, [prompt], runtime, stride=stride) == [context[3:]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)])
@pytest.mark.parametrize("stride", [1, None])
def test_a_batch_of_ragged_prompts_is_each_alone(sampling, stride, model, runtime):
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [7, 8], list(range(15)), [9, 1, 2]]
    together = tokens(model, prompts, runtime, sampling=sampling, stride=stride)
    for k, prompt in enumerate(prompts):
        assert tokens(model, [prompt], runtime, sampling=sampling, stride=stride, samples=[k]) == [together[k]]
    assert together[2] != together[3] or sampling is GREEDY


def test_rows_that_end_do_not_disturb_the_others(model, runtime):
    prompts = [[1], [2, 3, 4], [5, 6]]
    free = tokens(model, prompts, runtime)
    eot = free[0][4]
    ended = tokens(model, prompts, runtime, eot=eot)
    assert ended == [row[: row.index(eot)] if eot in row else row for row in free]
    asked = [False] * 3
    steps = generate(model, prompts, runtime, max_new_tokens=20, sampling=GREEDY, ended=asked)
    seen = []
    for number, step in enumerate(steps):
        seen.append(step.tokens)
        asked[1] = asked[1] or number == 2
        asked[0] = asked[2] = number >= 15
    assert [row[1] for row in seen] == free[1][:3] + [None] * 13
    assert [row[2] for row in seen] == free[2][:16]


@pytest.mark.parametrize("case", range(4))
def test_a_row_does_not_depend_on_its_batch(case, model, runtime, seed):
    """The tokens of (prompt, sample) are the same whatever else is generated beside it, and in whatever order.

    With max_new_tokens=None the longest prompt of a batch decided how many tokens each row got.
    """
    rng = random.Random(seed + case)
    rows = [([rng.randrange(20) for _ in range(rng.randint(1, 11))], rng.randrange(1000)) for _ in range(6)]
    rows += [(rows[0][0], 7), rows[1], rows[1]]  # another sample of one prompt; and the same one twice
    settings = dict(
        max_new_tokens=rng.choice([None, 1, 30]),
        sampling=rng.choice([GREEDY, Sampling(), Sampling(1.3, 0.9, top_k=8, top_p=0.9, min_p=0.01)]),
        stride=rng.choice([None, 1, 3, 8, 100]),
        eot=rng.choice([None, 3]),
        vocab_size=rng.choice([None, 18]),
        seed=rng.randrange(2**63),
    )
    print(settings)
    alone = {(*prompt, k): tokens(model, [prompt], runtime, samples=[k], **settings)[0] for prompt, k in rows}
    for _ in range(3):
        rng.shuffle(rows)
        batch = rows[: rng.randint(2, len(rows))]
        together = tokens(model, [prompt for prompt, _ in batch], runtime, samples=[k for _, k in batch], **settings)
        for (prompt, k), row in zip(batch, together, strict=True):
            assert row == alone[(*prompt, k)]


def test_without_a_limit_each_row_fills_its_own_context(model, runtime):
    prompts = [[1], [2, 3, 4, 5, 6], list(range(12))]
    assert [len(row) for row in tokens(model, prompts, runtime, max_new_tokens=None)] == [7, 3, 1]


DTYPES = ["float32", "bfloat16", "int8", "autocast"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, None])
def test_ragged_rows_in_each_dtype(dtype, stride, model, monkeypatch):
    """Logits of a ragged batch are those of each row alone, also where rows end early and where contexts slide.

    In bfloat16 and int8 the write into the cache, which is float32 on a CPU, crashed once rows differed in length.
    """
    monkeypatch.setattr(generation, "sample_token", lambda p, numbers: (numbers * 20).long())  # whatever the logits
    runtime = resolve_runtime("cpu", "float32" if dtype == "float32" else "bfloat16", False)
    model = model if dtype in ("float32", "autocast") else model.to(torch.bfloat16)
    if dtype == "int8":
        pack(model, int8=True)
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 8], list(range(15)), [9, 1, 2]]

    def run(rows: list[int]) -> list[list[torch.Tensor]]:
        settings = dict(samples=rows, max_new_tokens=20, eot=5, stride=stride)
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for step in generate(model, [prompts[row] for row in rows], runtime, **settings):
            for row, token in enumerate(step.tokens):
                if token is not None:
                    logits[row].append(step.logits[row].clone())
        return logits

    together = run(list(range(6)))
    lengths = {len(row) for row in together}
    assert len(lengths) > 2 and max(lengths) == 20  # some end early, some slide
    close = dict(atol=1e-4, rtol=1e-4) if dtype == "float32" else dict(atol=0.5, rtol=0.05)
    for row in range(6):
        for ours, expected in zip(together[row], run([row])[0], strict=True):
            torch.testing.assert_close(ours, expected, **close)


def test_one_likeliest_is_greedy(model, runtime):
    assert tokens(model, [[1, 2]], runtime, sampling=Sampling(top_k=1)) == tokens(model, [[1, 2]], runtime)


def test_sample_k_is_sample_k(model, runtime):
    prompts, sampling = [[1, 2]] * 5, Sampling(temperature=1.2)
    five = tokens(model, prompts, runtime, sampling=sampling)
    assert len({tuple(row) for row in five}) == 5
    assert tokens(model, prompts[:2], runtime, sampling=sampling, samples=[3, 1]) == [five[3], five[1]]
    assert tokens(model, prompts, runtime, sampling=sampling, seed=2) != five


def test_padding_is_never_drawn(model, runtime):
    with torch.no_grad():
        model.transformer.wte.weight[15:] *= 3
    free = tokens(model, [[1, 2]] * 20, runtime, sampling=Sampling(temperature=2.0))
    held = tokens(model, [[1, 2]] * 20, runtime, sampling=Sampling(temperature=2.0), vocab_size=15)
    assert max(map(max, free)) >= 15 > max(map(max, held))


def test_transformers_writes_the_same(model, runtime):
    """Greedy, on the same weights, in a batch."""
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    ).eval()
    ours = GPT(GPTConfig(block_size=32, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(std=0.3)
            matrix = name.endswith("weight") and ".h." in name and p.dim() == 2  # Conv1D keeps (in, out)
            dict(ours.named_parameters())[name].copy_(p.T if matrix else p)
    prompts = torch.randint(20, (3, 5))
    expected = theirs.generate(prompts, max_new_tokens=27, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert tokens(ours, prompts.tolist(), runtime, max_new_tokens=27) == expected[:, 5:].tolist()


def test_weights_in_bfloat16_are_not_cast_again(model):
    runtime = resolve_runtime("cpu", "bfloat16", False)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    steps = list(generate(cast, [[1, 2]], runtime, max_new_tokens=20, sampling=GREEDY))
    assert len(steps) == 20 and steps[0].logits.dtype == torch.float32
    for kept in (model, cast):  # under autocast, too
        first = next(generate(kept, [[1, 2]], runtime, max_new_tokens=1, sampling=GREEDY))
        exact = model(torch.tensor([[1, 2]]))[0][0, -1]
        assert (first.logits[0] - exact).abs().max() < 0.1 * exact.abs().max()


def test_packed_layers_compute_the_same(runtime, monkeypatch, seed):
    """In float32 the same greedy text, up to and beyond the context; in bfloat16 the same logits but for rounding."""
    monkeypatch.setattr(kernels, "PACKED_FROM", {torch.bfloat16: 0, torch.float32: 0})
    torch.manual_seed(seed)
    plain = GPT(GPTConfig(block_size=16, vocab_size=60, n_layer=2, n_head=2, n_embd=64)).eval()
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.2)
    packed = copy.deepcopy(plain)
    pack(packed)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 9
    prompts = [[1, 2], [3, 4, 5], [6]]
    assert tokens(packed, prompts, runtime, max_new_tokens=40) == tokens(plain, prompts, runtime, max_new_tokens=40)
    half, half_packed = copy.deepcopy(plain).bfloat16(), copy.deepcopy(plain).bfloat16()
    pack(half_packed)
    x = torch.randint(60, (3, 16))
    expected = half(x)[0].float()
    torch.testing.assert_close(half_packed(x)[0].float(), expected, atol=0.03 * expected.abs().max().item(), rtol=0)


def test_int8_weights_are_within_half_a_step_of_the_weights(seed):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(64, 48).bfloat16()
    made = Int8Linear(linear)
    weight, step = linear.weight.float(), linear.weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert ((made.weight * step - weight).abs() <= 0.51 * step).all()
    x = torch.randn(2, 5, 64).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight, linear.bias.float())
    assert (made(x).float() - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("inputs", [1, 2, 8, 15, 16, 17, 24, 33, 40, 100, 192, 200])
def test_int8_layers_of_any_shape(inputs, seed):
    """torch's kernel read past the rows of what is not a multiple of 16 inputs (NaN, or a crash), and took a batch that
    is a slice of a longer one, as the output layer's is, for a contiguous one.
    """
    torch.manual_seed(seed)
    for outputs in (1, 3, 4, 16, 65, 257):
        made = Int8Linear(torch.nn.Linear(inputs, outputs, bias=outputs % 2 == 0).bfloat16())
        weight = made.weight[:, :inputs].double() * made.scale.double()[:, None]
        for x in (torch.randn(1, inputs), torch.randn(7, inputs), torch.randn(3, 5, inputs)[:, -1:]):
            x = x.bfloat16()
            expected = x.double() @ weight.T + (0 if made.bias is None else made.bias.double())
            assert made(x).shape == expected.shape
            torch.testing.assert_close(made(x).double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("n_embd", [6, 24, 40])
def test_int8_models_of_any_width(n_embd, seed):
    """With a width that is not a multiple of 16, and an odd vocabulary, near to the model in float32."""
    torch.manual_seed(seed)
    plain = GPT(GPTConfig(block_size=8, vocab_size=65, n_layer=2, n_head=2, n_embd=n_embd)).eval()
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = torch.randint(65, (3, 8))
    expected = plain(x)[0]
    made = copy.deepcopy(plain).bfloat16()
    pack(made, int8=True)
    assert (made(x)[0].float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_bfloat16_on_a_cpu_without_avx512():
    """oneDNN has no bfloat16 there, and packing the layers crashed; torch computes in it by itself."""
    code = (
        "import torch; from model import *; from folio.kernels import pack; m = GPT(GPTConfig(8, 9, 1, 1, 4)).eval();"
        "m.bfloat16(); pack(m); assert m(torch.tensor([[1, 2]]))[0].isfinite().all()"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, env=environment)


def test_a_model_that_computes_nan_is_told(model, runtime):
    """The drawing gave an id beyond the vocabulary, which crashed the embedding."""
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = torch.nan
    with pytest.raises(UserError, match="the model computes NaN: use another checkpoint"):
        tokens(model, [[1, 2]], runtime, sampling=Sampling())


class WithoutFloat64(TorchDispatchMode):
    """The meta device in the part of Apple's: it has no float64, and nothing is copied from it without a wait.

    What comes back to the CPU is zeros, or false.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not kwargs.get("non_blocking")
        if function is torch.ops.aten.is_nonzero.default:
            return False
        if kwargs.get("device") == torch.device("cpu") and args and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        made = function(*args, **kwargs)
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            assert not (tensor.is_meta and tensor.dtype == torch.float64), function
        return made


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.2, 0.9, top_k=5, top_p=0.9, min_p=0.01)])
def test_on_devices_without_float64_tokens_are_drawn_on_the_cpu(sampling, monkeypatch):
    """On Apple's GPUs the cumulative sum in float64 is an error. None was here to run on; another device stands in."""
    assert sampling_device(torch.device("mps")) == torch.device("cpu")
    assert sampling_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which does not know meta
    monkeypatch.setattr(generation, "to_host", lambda chosen: lambda: [[1]] * len(chosen))
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    with WithoutFloat64():
        runtime = Runtime(torch.device("meta"), torch.float32, False, "")
        drawn = tokens(model, [[1, 2], [3]], runtime, sampling=sampling, vocab_size=18)
    assert drawn == [[1] * 20] * 2


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["\n\n", "aab", "x", "🎉", None])
def test_text_ends_before_the_stop_and_never_shows_half_a_character(stop):
    written = "caaab\n \n\nmore 🎉 aab"
    text, shown = TextStream(bpe(), stop), []
    for token in bpe().encode(written).tolist():
        shown.append(text.push(token))
        if text.ended:
            break
    shown.append(text.push(None))
    assert "".join(shown) == (written.split(stop)[0] if stop else written) and text.push(5) == ""
    assert not any("\ufffd" in piece for piece in shown)


def test_stops_that_overlap_themselves_are_found(seed):
    """The text is what comes before the first stop, and only what may be its beginning is held back."""
    rng = random.Random(seed)
    for _ in range(300):
        written = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stop = "".join(rng.choices("ab", k=rng.randint(1, 6)))
        text, shown, seen = TextStream(CharTokenizer("ab"), stop), "", ""
        for character in written:
            shown, seen = shown + text.push("ab".index(character)), seen + character
            assert seen.split(stop)[0].startswith(shown)
            assert text.ended or len(seen) - len(shown) < len(stop)
        assert shown + text.push(None) == written.split(stop)[0]


def test_a_text_never_shows_half_a_character():
    text = TextStream(bpe())
    pieces = [text.push(token) for token in [*bpe().encode("a🎉b").tolist(), None]]
    assert pieces == ["a", "", "", "", "🎉", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_such():
    text = TextStream(bpe())
    assert [text.push(token) for token in [*bpe().encode("a🎉")[:3].tolist(), None]] == ["a", "", "", "\ufffd"]


def test_text_out_of_nothing():
    assert default_prompt(CharTokenizer("\nab")) == [0] and default_prompt(CharTokenizer("ab\n")) == [2]
    assert default_prompt(CharTokenizer("ab")) == [0] and default_prompt(bpe()) == [261]


@torch.inference_mode()
def test_the_cache_holds_what_was_asked_for(model):
    cache = KVCache(model.config, 3, torch.float32, torch.device("cpu"))
    assert cache.kv.shape == (2, 2, 3, 2, 8, 8)  # (L, 2, B, H, T, D)
    x = torch.from_numpy(np.array([[1, 2, 3]] * 3))
    whole, _ = model(torch.cat([x, x[:, :1]], dim=1))
    model(x, attend=cache)
    one, _ = model(x[:, :1], attend=cache)
    torch.testing.assert_close(one, whole)
    assert cache.lengths == [4] * 3 and (cache.kv[..., 4:, :] == 0).all()


@torch.inference_mode()
def test_a_step_that_can_be_captured_computes_the_same(model):
    """With `capacity` set, positions and masks come from tensors alone, whatever the number of tokens."""
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    new = torch.tensor([[7], [8]])
    plain, fixed = (KVCache(model.config, 2, torch.float32, torch.device("cpu")) for _ in range(2))
    place = fixed.last.data_ptr()
    for cache in (plain, fixed):
        model(prompts, attend=cache)
        cache.set_lengths([3, 2])  # the second row forgets its last
    assert fixed.last.data_ptr() == place  # where a graph reads it
    fixed.capacity = 8
    for _ in range(3):
        torch.testing.assert_close(model(new, attend=fixed)[0], model(new, attend=plain)[0])
    assert fixed.lengths == plain.lengths == [6, 5]


def test_tokens_that_are_fetched_late_are_the_same(model, runtime, monkeypatch):
    """As on CUDA, where the next step is launched before a step's tokens are known on the host."""
    for settings in (dict(eot=3), dict(max_new_tokens=1), dict(stride=1, sampling=Sampling(repetition_penalty=1.2))):
        monkeypatch.setattr(generation, "STEPS_AHEAD", {})
        expected = tokens(model, [[1, 2], [3, 4, 5]], runtime, **settings)
        monkeypatch.setattr(generation, "STEPS_AHEAD", {"cpu": 1})
        assert tokens(model, [[1, 2], [3, 4, 5]], runtime, **settings) == expected


@pytest.mark.gpu
def test_captured_graphs_write_the_same(model, monkeypatch):
    """Across several graphs, in rows of unequal length, and beyond block_size."""
    monkeypatch.setattr(generation.CUDAGraphDecoder, "GRANULARITY", 4)
    here, there = resolve_runtime("cpu", "float32", False), resolve_runtime("cuda", "float32", False)
    for settings in (dict(), dict(stride=1), dict(sampling=Sampling(top_k=5))):
        prompts = [[1, 2], [3, 4, 5]]
        expected = tokens(model.cpu(), prompts, here, **settings)
        assert tokens(model.cuda(), prompts, there, **settings) == expected
