import random

import pytest
import torch
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

from folio import UserError
from folio.data.tokenizer import CharTokenizer
from folio.decoding import torch_decoder
from folio.decoding.sampling import (
    Sampling,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    next_token_probabilities,
    sample_token,
    uniforms,
)
from folio.decoding.scheduler import generate
from folio.decoding.text_stream import TextStream, default_prompt
from folio.decoding.torch_decoder import TorchDecoder, sampling_device
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT, GPTConfig
from tests.support import decoding
from tests.support.decoding import GREEDY, decoder_in, generate_tokens, random_model
from tests.support.tiny_tokenizers import bpe


@pytest.fixture(params=["compiled", "torch"])
def runtime(request, monkeypatch) -> Runtime:
    """With both decoders in turn: that of a CPU, and that of other devices, on a CPU."""
    if request.param == "torch":
        monkeypatch.setattr(decoding, "make_decoder", TorchDecoder)
    return resolve_runtime("cpu", "float32", False)


@pytest.fixture
def model(seed: int) -> GPT:
    return random_model(seed)


@pytest.mark.parametrize("length", [3, 8, 11])
def test_greedy_tokens_are_those_of_the_models_own_generate(model, runtime, length):
    """model.generate recomputes everything at each step, with a window that moves by one token."""
    prompt = torch.arange(length)[None] % model.config.vocab_size
    expected = model.eval().generate(prompt, 12, top_k=1)[0, length:].tolist()
    (tokens,) = generate_tokens(model, prompt.tolist(), runtime, max_new_tokens=12, sampling=GREEDY, stride=1)
    assert tokens == expected


def test_the_models_own_generate_samples_the_filtered_distribution(model, seed):
    torch.manual_seed(seed)
    prompt = torch.tensor([[1, 2, 3]])
    logits = model.eval()(prompt)[0][0, -1]
    expected = next_token_probabilities(logits, Sampling(temperature=0.7, top_k=3))
    counts = torch.bincount(model.generate(prompt.expand(4000, -1), 1, 0.7, 3)[:, -1], minlength=len(logits))
    assert ((counts / 4000 - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


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
def test_probabilities_match_transformers(sampling, seed):
    torch.manual_seed(seed)
    logits, context = torch.randn(4, 30) * 3, torch.randint(30, (4, 6))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    occurred = torch.zeros(4, 30, dtype=torch.bool).scatter(1, context, True)
    expected = processors(context, logits.clone()).softmax(-1)
    torch.testing.assert_close(next_token_probabilities(logits, sampling, occurred), expected)


def test_filters_keep_the_expected_number_of_tokens():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [True, True, False, False]
    assert keep_top_k(logits, 99).isfinite().all()
    for p, tokens in ((0.01, 1), (0.5, 1), (0.51, 2), (0.9, 3), (1.0, 4)):
        assert keep_top_p(logits, p).isfinite().sum() == tokens
    for p, tokens in ((0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        assert keep_min_p(logits, p).isfinite().sum() == tokens
    assert next_token_probabilities(logits, GREEDY).tolist() == [1, 0, 0, 0]


def test_a_tiny_top_p_keeps_the_most_likely_token():
    """A p that is 0 in float32 kept no token, and sampling crashed."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert keep_top_p(logits, 1e-60).isfinite().tolist() == [[True, False, False]]


# --- sampling a token -------------------------------------------------------------------------------------------------


def test_sampled_tokens_follow_the_distribution(seed):
    """A chi-square test of 20,000 samples. Tokens that are filtered out are never sampled."""
    sampling = Sampling(temperature=0.8, top_k=6)
    probabilities = next_token_probabilities(torch.linspace(-1, 1, 12), sampling)
    tokens = sample_token(probabilities.expand(20_000, -1), uniforms(seed, range(20_000), 3, 1))[:, 0]
    counts, expected = torch.bincount(tokens, minlength=12), 20_000 * probabilities
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 35  # 5 degrees of freedom: exceeded in fewer than 1 of 100,000 tests


def test_the_first_and_the_last_possible_token_can_be_sampled():
    probabilities = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]]).expand(4, -1)
    numbers = torch.tensor([0.0, 0.25, 0.7499, 1 - 2**-53], dtype=torch.float64)[:, None]
    assert sample_token(probabilities, numbers).flatten().tolist() == [1, 2, 2, 3]


def test_random_numbers_depend_on_seed_sample_and_position_alone(seed):
    """They are uniform and distinct."""
    numbers = uniforms(seed, range(100), 0, 100)
    assert torch.equal(numbers[7:9, 20:50], uniforms(seed, [7, 8], 20, 30))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 10_000
    assert not torch.equal(numbers, uniforms(seed + 1, range(100), 0, 100))
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # 9 degrees of freedom


# --- decoding with the cache ------------------------------------------------------------------------------------------


def generate_without_cache(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each by a full forward pass over the last block_size tokens."""
    context = list(prompt)
    for _ in range(count):
        context.append(model(torch.tensor([context[-model.config.block_size :]]))[0][0, -1].argmax().item())
    return context[len(prompt) :]


@pytest.mark.parametrize("length", [1, 3, 7, 8, 12])
def test_greedy_tokens_are_the_same_with_and_without_the_cache(length, model, runtime):
    """Up to the context size, and beyond it with a sliding window (stride=1)."""
    prompt = list(range(length))
    assert generate_tokens(model, [prompt], runtime, stride=1) == [generate_without_cache(model, prompt, 20)]
    count = max(1, 8 - length)  # as many as fit into the context
    expected = [generate_without_cache(model, prompt, count)]
    assert generate_tokens(model, [prompt], runtime, max_new_tokens=count) == expected


@pytest.mark.parametrize("stride", [2, 4, 7, 8, 100])
def test_a_full_context_drops_stride_tokens(stride, model, runtime):
    prompt = [1, 2, 3]
    context, window = list(prompt), list(prompt)
    for _ in range(20):
        if len(window) > 8:
            window = window[-max(1, 8 - stride + 1) :]
        context.append(model(torch.tensor([window]))[0][0, -1].argmax().item())
        window.append(context[-1])
    assert generate_tokens(model, [prompt], runtime, stride=stride) == [context[3:]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)])
@pytest.mark.parametrize("stride", [1, None])
def test_a_batch_of_prompts_of_unequal_length_equals_each_prompt_alone(sampling, stride, model, runtime):
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [7, 8], list(range(15)), [9, 1, 2]]
    settings = dict(sampling=sampling, stride=stride)
    rows = generate_tokens(model, prompts, runtime, **settings)
    for k, prompt in enumerate(prompts):
        assert generate_tokens(model, [prompt], runtime, **settings, samples=[k]) == [rows[k]]
    assert rows[2] != rows[3] or sampling is GREEDY


def test_rows_that_end_do_not_affect_the_others(model, runtime):
    prompts = [[1], [2, 3, 4], [5, 6]]
    full = generate_tokens(model, prompts, runtime)
    eot = full[0][4]
    until_eot = generate_tokens(model, prompts, runtime, eot=eot)
    assert until_eot == [row[: row.index(eot)] if eot in row else row for row in full]
    ended = [False] * 3  # set by the caller
    tokens = []
    steps = generate(decoding.make_decoder(model, runtime), prompts, max_new_tokens=20, sampling=GREEDY, ended=ended)
    for number, step in enumerate(steps):
        tokens.append(step.tokens)
        ended[1] = ended[1] or number == 2
        ended[0] = ended[2] = number >= 15
    assert [row[1] for row in tokens] == full[1][:3] + [None] * 13
    assert [row[2] for row in tokens] == full[2][:16]


@pytest.mark.parametrize("case", range(4))
def test_a_row_does_not_depend_on_its_batch(case, model, runtime, seed):
    """The tokens of (prompt, sample) are the same in any batch and in any order.

    With max_new_tokens=None the longest prompt of a batch limited the tokens of each row.
    """
    rng = random.Random(seed + case)
    requests = [([rng.randrange(20) for _ in range(rng.randint(1, 11))], rng.randrange(1000)) for _ in range(6)]
    requests += [(requests[0][0], 7), requests[1], requests[1]]  # another sample of a prompt, and one sample twice
    settings = dict(
        max_new_tokens=rng.choice([None, 1, 30]),
        sampling=rng.choice([GREEDY, Sampling(), Sampling(1.3, 0.9, top_k=8, top_p=0.9, min_p=0.01)]),
        stride=rng.choice([None, 1, 3, 8, 100]),
        eot=rng.choice([None, 3]),
        vocab_size=rng.choice([None, 18]),
        seed=rng.randrange(2**63),
    )
    print(settings)
    expected = {
        (*prompt, k): generate_tokens(model, [prompt], runtime, samples=[k], **settings)[0] for prompt, k in requests
    }
    for _ in range(3):
        rng.shuffle(requests)
        batch = requests[: rng.randint(2, len(requests))]
        prompts, samples = [prompt for prompt, _ in batch], [k for _, k in batch]
        rows = generate_tokens(model, prompts, runtime, samples=samples, **settings)
        for (prompt, k), row in zip(batch, rows, strict=True):
            assert row == expected[(*prompt, k)]


def test_without_a_limit_each_row_fills_its_own_context(model, runtime):
    prompts = [[1], [2, 3, 4, 5, 6], list(range(12))]
    assert [len(row) for row in generate_tokens(model, prompts, runtime, max_new_tokens=None)] == [7, 3, 1]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "int4", "torch float32", "torch bfloat16", "torch autocast"]
)
@pytest.mark.parametrize("stride", [1, None])
def test_rows_of_unequal_length_in_each_dtype(dtype, stride, model):
    """The logits of each row are those of the row alone, also if rows end early and if contexts are full.

    In bfloat16 and int8, writing to the cache, which is float32 on a CPU, crashed if rows had unequal lengths.
    """
    decoder = decoder_in(dtype, model)
    sampling = Sampling(temperature=1e6)  # nearly uniform, so that rounding hardly ever changes a token
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 8], list(range(15)), [9, 1, 2]]

    def generate_logits(rows: list[int]) -> list[list[torch.Tensor]]:
        settings = dict(samples=rows, max_new_tokens=20, eot=5, stride=stride, sampling=sampling)
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for step in generate(decoder, [prompts[row] for row in rows], **settings):
            for row, token in enumerate(step.tokens):
                if token is not None:
                    logits[row].append(step.logits[row].clone())
        return logits

    batch = generate_logits(list(range(6)))
    lengths = {len(row) for row in batch}
    assert len(lengths) > 2 and max(lengths) == 20  # some rows end early, some have full contexts
    exact = dtype in ("float32", "torch float32")
    tolerance = dict(atol=1e-4, rtol=1e-4) if exact else dict(atol=0.5, rtol=0.05)
    for row in range(6):
        for logits, expected in zip(batch[row], generate_logits([row])[0], strict=True):
            torch.testing.assert_close(logits, expected, **tolerance)


def test_top_k_of_1_is_greedy(model, runtime):
    greedy = generate_tokens(model, [[1, 2]], runtime)
    assert generate_tokens(model, [[1, 2]], runtime, sampling=Sampling(top_k=1)) == greedy


def test_sample_k_does_not_depend_on_the_number_of_samples(model, runtime):
    prompts, sampling = [[1, 2]] * 5, Sampling(temperature=1.2)
    rows = generate_tokens(model, prompts, runtime, sampling=sampling)
    assert len({tuple(row) for row in rows}) == 5
    assert generate_tokens(model, prompts[:2], runtime, sampling=sampling, samples=[3, 1]) == [rows[3], rows[1]]
    assert generate_tokens(model, prompts, runtime, sampling=sampling, seed=2) != rows


def test_padding_ids_are_never_sampled(model, runtime):
    with torch.no_grad():
        model.transformer.wte.weight[15:] *= 3
    settings = dict(sampling=Sampling(temperature=2.0))
    unlimited = generate_tokens(model, [[1, 2]] * 20, runtime, **settings)
    limited = generate_tokens(model, [[1, 2]] * 20, runtime, **settings, vocab_size=15)
    assert max(map(max, unlimited)) >= 15 > max(map(max, limited))


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_transformers_generates_the_same(model, runtime):
    """Greedy, with the same weights, in a batch."""
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    ).eval()
    ours = GPT(GPTConfig(block_size=32, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(std=0.3)
            is_matrix = name.endswith("weight") and ".h." in name and p.dim() == 2  # Conv1D's shape is (in, out)
            dict(ours.named_parameters())[name].copy_(p.T if is_matrix else p)
    prompts = torch.randint(20, (3, 5))
    expected = theirs.generate(prompts, max_new_tokens=27, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert generate_tokens(ours, prompts.tolist(), runtime, max_new_tokens=27) == expected[:, 5:].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "torch bfloat16", "torch autocast"])
def test_bfloat16_weights_and_autocast_are_close_to_float32(dtype, model):
    exact = model(torch.tensor([[1, 2]]))[0][0, -1]
    steps = generate(decoder_in(dtype, model), [[1, 2]], max_new_tokens=20, sampling=GREEDY)
    first = next(steps)
    assert (first.logits[0] - exact).abs().max() < 0.1 * exact.abs().max()
    assert first.logits.dtype == torch.float32 and len(list(steps)) == 19


def test_a_model_that_computes_nan_is_an_error(model, runtime):
    """An id beyond the vocabulary was sampled, which crashed the embedding."""
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = torch.nan
    with pytest.raises(UserError, match="the model computes NaN: use another checkpoint"):
        generate_tokens(model, [[1, 2]], runtime, sampling=Sampling())


def test_tokens_are_the_same_if_they_are_fetched_one_step_late(model, monkeypatch):
    """As on CUDA, where the next step is launched before a step's tokens are known on the host."""
    decoder = TorchDecoder(model, resolve_runtime("cpu", "float32", False))
    for settings in (dict(eot=3), dict(max_new_tokens=1), dict(stride=1, sampling=Sampling(repetition_penalty=1.2))):
        monkeypatch.setattr(torch_decoder, "STEPS_AHEAD", {})
        expected = generate_tokens(decoder, [[1, 2], [3, 4, 5]], **settings)
        monkeypatch.setattr(torch_decoder, "STEPS_AHEAD", {"cpu": 1})
        assert generate_tokens(decoder, [[1, 2], [3, 4, 5]], **settings) == expected


@pytest.mark.gpu
def test_cuda_graphs_generate_the_same(model, monkeypatch):
    """With several graphs, rows of unequal length, and more tokens than block_size."""
    monkeypatch.setattr(torch_decoder.CUDAGraphDecoder, "GRANULARITY", 4)
    cpu, cuda = resolve_runtime("cpu", "float32", False), resolve_runtime("cuda", "float32", False)
    for settings in (dict(), dict(stride=1), dict(sampling=Sampling(top_k=5))):
        prompts = [[1, 2], [3, 4, 5]]
        expected = generate_tokens(model.cpu(), prompts, cpu, **settings)
        assert generate_tokens(model.cuda(), prompts, cuda, **settings) == expected


class MetaWithoutFloat64(TorchDispatchMode):
    """The meta device with the limits of Apple's GPUs: no float64, and no asynchronous copies from it.

    Copies to the CPU are zeros, and conditions are false.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not kwargs.get("non_blocking")
        if function is torch.ops.aten._local_scalar_dense.default:
            return False
        if kwargs.get("device") == torch.device("cpu") and args and getattr(args[0], "is_meta", False):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = function(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            assert not (tensor.is_meta and tensor.dtype == torch.float64), function
        return result


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.2, 0.9, top_k=5, top_p=0.9, min_p=0.01)])
def test_tokens_are_sampled_on_the_cpu_for_devices_without_float64(sampling, monkeypatch):
    """On Apple's GPUs the cumulative sum in float64 is an error. The meta device is used in place of such a GPU."""
    assert sampling_device(torch.device("mps")) == torch.device("cpu")
    assert sampling_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # does not accept the meta device
    monkeypatch.setattr(torch_decoder, "to_host", lambda chosen: lambda: [1] * len(chosen))
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    with MetaWithoutFloat64():
        runtime = Runtime(torch.device("meta"), torch.float32, False, "")
        rows = generate_tokens(model, [[1, 2], [3]], runtime, sampling=sampling, vocab_size=18)
    assert rows == [[1] * 20] * 2


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["\n\n", "aab", "x", "🎉", None])
def test_text_ends_before_the_stop_string_and_shows_no_part_of_a_character(stop):
    text = "caaab\n \n\nmore 🎉 aab"
    stream, pieces = TextStream(bpe(), stop), []
    for token in bpe().encode(text).tolist():
        pieces.append(stream.push(token))
        if stream.ended:
            break
    pieces.append(stream.push(None))
    assert "".join(pieces) == (text.split(stop)[0] if stop else text) and stream.push(5) == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_stop_strings_that_overlap_themselves(seed):
    """The text ends before the first stop string. Only text that may be the beginning of one is held back."""
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stop = "".join(rng.choices("ab", k=rng.randint(1, 6)))
        stream, shown, pushed = TextStream(CharTokenizer("ab"), stop), "", ""
        for character in text:
            shown, pushed = shown + stream.push("ab".index(character)), pushed + character
            assert pushed.split(stop)[0].startswith(shown)
            assert stream.ended or len(pushed) - len(shown) < len(stop)
        assert shown + stream.push(None) == text.split(stop)[0]


def test_of_several_stop_strings_the_one_that_is_complete_first_ends_the_text(seed):
    """However the text is cut into tokens."""
    rng, tokens = random.Random(seed), bpe()
    for _ in range(300):
        text = "".join(rng.choices("helo w", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("helo w", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
        ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))]
        matches = [stop for stop in stops if ends and text[: ends[0]].endswith(stop)]
        expected = text[: ends[0] - max(map(len, matches))] if ends else text
        for ids in (tokens.encode(text).tolist(), [*text.encode()]):
            stream = TextStream(tokens, stops)
            assert "".join(stream.push(token) for token in [*ids, None]) == expected, (text, stops)


def test_a_character_is_shown_when_its_last_byte_arrives():
    stream = TextStream(bpe())
    pieces = [stream.push(token) for token in [*bpe().encode("a🎉b").tolist(), None]]
    assert pieces == ["a", "", "", "", "🎉", "b", ""]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    stream = TextStream(bpe())
    tokens = bpe().encode("a🎉")[:3].tolist()
    assert [stream.push(token) for token in [*tokens, None]] == ["a", "", "", "\ufffd"]


def test_the_default_prompt_is_a_line_break_or_the_end_of_text():
    assert default_prompt(CharTokenizer("\nab")) == [0] and default_prompt(CharTokenizer("ab\n")) == [2]
    assert default_prompt(CharTokenizer("ab")) == [0] and default_prompt(bpe()) == [261]


def test_a_step_of_torch_leaves_a_core_to_other_processes(monkeypatch):
    """Its threads waited for each other: beside a busy process, 999 tokens per second became 10."""
    used, forward = [], GPT.forward
    monkeypatch.setattr(
        GPT, "forward", lambda *args, **kw: used.append(torch.get_num_threads()) or forward(*args, **kw)
    )
    monkeypatch.setattr(torch_decoder, "default_threads", lambda: 4)
    before = torch.get_num_threads()
    try:
        for small, expected in ((2**26, 1), (1, 3)):
            monkeypatch.setattr(torch_decoder, "SMALL", small)
            decoder = torch_decoder.TorchDecoder(random_model(1), resolve_runtime("cpu", "float32", False))
            for _ in generate(decoder, [[1]], max_new_tokens=3):
                pass
            assert used[-1] == expected and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
