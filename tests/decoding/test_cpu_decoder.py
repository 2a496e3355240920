"""The CPU decoder against model.py: logits, memory, and threads."""

import _thread
import copy
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from folio.checkpoints.build_model import crop_block_size
from folio.decoding import cpu_decoder, decode_step
from folio.decoding.cpu_decoder import PREFILL, CPUBatch, CPUDecoder, computes_model
from folio.decoding.decoders import make_decoder
from folio.decoding.quantize import quantized
from folio.decoding.sampling import Sample, Sampling
from folio.decoding.scheduler import generate
from folio.decoding.torch_decoder import TorchDecoder
from folio.machine import compiled
from folio.machine.runtime import resolve_runtime
from model import ACTIVATIONS, GPT, POSITIONS
from tests.support.decoding import GREEDY, assert_same_tokens, generate_tokens, random_model
from tests.support.processes import ROOT
from tests.support.tolerances import logits_error, within
from tests.support.waiting import wait_until

CPU = resolve_runtime("cpu", "float32", False)


def batch_of(decoder: CPUDecoder, rows: int, sampling: Sampling = GREEDY) -> CPUBatch:
    batch = decoder.batch(rows)
    for row in range(rows):
        batch.start(row, Sample([0], row, sampling, seed=1))
    return batch


def random_ids(model: GPT, count: int) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,)).tolist()


# --- logits -----------------------------------------------------------------------------------------------------------

SHAPES = [  # n_embd, n_head, vocab_size, block_size: few are multiples of vector widths or tiles
    (6, 1, 1, 1),
    (6, 3, 7, 5),
    (24, 24, 33, 17),
    (40, 5, 65, 70),
    (36, 4, 101, 40),
    (65, 13, 97, 33),
    (66, 1, 130, 150),
]


@pytest.mark.parametrize(
    "shape, dtype, position",
    [
        *((shape, dtype, None) for shape in SHAPES for dtype in ("float32", "int8", "int4")),
        *(((16, 4, 20, 160), "float32", position) for position in POSITIONS),
    ],
)
def test_logits_match_the_model(shape, dtype, position, seed):
    """After each prompt, some in several chunks, and each token. With int8 and int4, the reference has the rounded
    weights, and the cache is bfloat16. position: None for a random one.
    """
    torch.manual_seed(seed)
    n_embd, n_head, V, S = shape
    rng = random.Random(seed)
    position = position or rng.choice([p for p in POSITIONS if p != "rotary" or n_embd // n_head % 2 == 0])
    settings = dict(n_embd=n_embd, n_head=n_head, vocab_size=V, block_size=S, position=position)
    model = random_model(seed, **settings, bias=rng.random() < 0.5, activation=rng.choice([*ACTIVATIONS]))
    print(model.config)
    reference = model if dtype == "float32" else quantized(model, dtype)
    error = logits_error(model.config, S, torch.float32 if dtype == "float32" else torch.bfloat16)
    typical_logit = reference.lm_head.weight.norm(dim=1).mean()  # std of w h for a normalized h
    prompts = [random_ids(model, length) for length in {1, max(1, S // 2), max(1, S - 2), S}]
    max_new_tokens = None if S < 100 else 10
    for step in generate(CPUDecoder(model, dtype), prompts, max_new_tokens=max_new_tokens, sampling=Sampling()):
        for row, token in enumerate(step.tokens):
            if token is not None and len(prompts[row]) <= S:
                expected = reference(torch.tensor([prompts[row]]))[0][0, -1]
                scale = torch.maximum(expected.abs().max(), typical_logit)
                assert (step.logits[row] - expected).abs().max() <= error * scale
                prompts[row].append(token)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_logits_are_bitwise_independent_of_the_batch_and_the_threads(dtype, seed, monkeypatch):
    """Also with more rows than tokens that are prefilled at once."""
    torch.manual_seed(seed)
    model = random_model(seed, block_size=40, n_embd=48, n_head=3, vocab_size=77)
    decoder = CPUDecoder(model.bfloat16() if dtype == "bfloat16" else model, dtype)
    prompts = [random_ids(model, 1 + 3 * row % 25) for row in range(70)]

    def logits(rows: list[int], threads: int) -> list[torch.Tensor]:
        monkeypatch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: threads)
        steps = generate(decoder, [prompts[row] for row in rows], max_new_tokens=8, samples=rows)
        return torch.stack([step.logits.clone() for step in steps]).unbind(1)

    expected = logits(list(range(70)), 1)
    for threads in (1, 2, 3):
        for rows in ([4], [2, 7], [8, 0, 64], [1, 2, 3, 63, 5], list(range(70))):
            for row, row_logits in zip(rows, logits(rows, threads), strict=True):
                assert torch.equal(row_logits, expected[row]), (row, rows, threads)


# --- weights and memory -----------------------------------------------------------------------------------------------


def test_weights_that_are_not_contiguous_or_not_aligned_or_of_other_dtypes(seed):
    """A bfloat16 weight among float32 weights was read as float32, beyond its end."""
    torch.manual_seed(seed)
    model = random_model(seed, n_embd=32)
    expected = generate_tokens(CPUDecoder(model, "float32"), [[1, 2, 3]])
    first, second = model.transformer.h
    first.attn.c_attn.weight.data = first.attn.c_attn.weight.data.T.contiguous().T
    memory = torch.zeros(first.mlp.c_fc.weight.numel() + 1)
    memory[1:] = first.mlp.c_fc.weight.flatten()
    first.mlp.c_fc.weight.data = memory[1:].view_as(first.mlp.c_fc.weight)
    del memory
    second.mlp.c_fc.weight.data = second.mlp.c_fc.weight.data.bfloat16().float()
    expected_rounded = generate_tokens(CPUDecoder(model, "float32"), [[1, 2, 3]])
    second.mlp.c_fc.weight.data = second.mlp.c_fc.weight.data.bfloat16()
    assert generate_tokens(CPUDecoder(model, "float32"), [[1, 2, 3]]) == expected_rounded
    assert len(expected[0]) == len(expected_rounded[0]) == 20


def test_float32_and_bfloat16_weights_are_not_copied():
    model = random_model(1, n_embd=64)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = CPUDecoder(model.to(dtype), str(dtype).removeprefix("torch."))
        addresses = [model.transformer.h[0].mlp.c_fc.weight.data_ptr(), model.transformer.wte.weight.data_ptr()]
        assert decoder.matrices["weight"][[2, -1]].tolist() == addresses


def test_a_cpu_without_bfloat16_instructions(monkeypatch, seed):
    torch.manual_seed(seed)
    model = random_model(seed, n_embd=40, block_size=32).bfloat16()
    monkeypatch.setattr(compiled, "cpu_features", dict)
    decoder = CPUDecoder(model, "bfloat16")
    assert decoder.x_bytes == 4 and decoder.multiple == 16
    ids = random_ids(model, 32)
    batch = batch_of(decoder, 1)
    batch.prefill({0: ids}, {})
    expected = model.float()(torch.tensor([ids]))[0][0, -1]
    error = logits_error(model.config, 32, torch.bfloat16)
    torch.testing.assert_close(batch.logits[0], expected, **within(expected, error))


@pytest.mark.parametrize("ids", [[20], [-1], [1, 2**40, 3]])
def test_ids_beyond_the_vocabulary_are_an_error(ids):
    """The memory beyond the embeddings was read."""
    decoder = CPUDecoder(random_model(1), "float32")
    with pytest.raises(IndexError, match=r"the vocabulary 20 ids"):
        next(generate(decoder, [[1, 2], ids], max_new_tokens=1))


def test_the_memory_behind_addresses_is_kept(seed):
    """No other references to the model, the prompts, or the decoder exist."""
    model = random_model(seed, n_embd=48)
    settings = dict(sampling=Sampling(repetition_penalty=1.2), max_new_tokens=20)
    expected = generate_tokens(copy.deepcopy(model), [[1, 2]], CPU, **settings)
    tokens = []
    for step in generate(make_decoder(copy.deepcopy(model), CPU), [[1, 2]], **settings):
        tokens.append(step.tokens[0])
        for size in (48, 4 * 48, 48 * 48, 48 * 4 * 48):  # would reuse freed memory
            torch.full((size,), torch.nan)
    assert [tokens] == expected


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_row_bytes_is_the_memory_of_a_row(dtype):
    """It determines how many texts are generated at once. Not counted are the activations of a token."""
    V, C = 3000, 32  # more logits than outputs of a layer, and heads without padding
    decoder = CPUDecoder(random_model(1, vocab_size=V, block_size=64, n_embd=C, n_head=2), dtype)
    few, many = (batch_of(decoder, PREFILL + rows) for rows in (0, 100))
    few, many = (
        sum(tensor.nbytes for tensor in (batch.cache, batch.logits, batch.output, *batch.memory))
        for batch in (few, many)
    )
    activations = 4 * (1 + 2 + 4 + 3) * C  # float32: the stream, inputs of layers, the MLP's, and queries, keys, values
    assert many - few == 100 * (decoder.row_bytes + activations)


def test_the_memory_of_a_sliding_context_does_not_grow(seed):
    """The rows start to slide at different steps. The cosines of all positions were kept."""
    model = random_model(seed, position="rotary", block_size=8)
    prompts = [random_ids(model, length) for length in (1, 8, 3)]
    decoder = CPUDecoder(model, "float32")
    batch = batch_of(decoder, 3)
    batch.prefill(dict(enumerate(prompts)), {})
    tokens = [batch.sample([0, 1, 2])()] + [batch.step([0, 1, 2])() for _ in range(99)]
    assert batch.lengths == [100, 107, 102] and len(batch.rotation) <= 2 * 8 + 8
    expected = generate_tokens(TorchDecoder(model, CPU), prompts, max_new_tokens=100)
    for prompt, row, expected_row in zip(prompts, zip(*tokens, strict=True), expected, strict=True):
        assert_same_tokens(row, expected_row, model, prompt)


# --- supported models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_models_of_model_py_are_supported(position):
    """crop_block_size left a layer of another class, so that torch decoded, because "the model was changed"."""
    for activation, bias in itertools.product(ACTIVATIONS, (True, False)):
        model = random_model(1, position=position, activation=activation, bias=bias)
        assert computes_model(model)
        assert computes_model(model.bfloat16())
        crop_block_size(model.float(), model.config.block_size // 2)
        assert computes_model(model)


def test_hooks_and_changed_modules_are_not_ignored():
    model = random_model(1)
    handle = model.transformer.h[1].register_forward_hook(lambda module, inputs, x: 2 * x)
    assert not computes_model(model)
    handle.remove()
    assert computes_model(model)
    model.transformer.h[1].mlp = torch.nn.Identity()
    assert not computes_model(model)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch) -> Iterator[int]:
    """More threads than the tests' one core. The helpers are new ones, which no other batch uses."""
    monkeypatch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: 3)
    monkeypatch.setattr(cpu_decoder, "_helpers", {})
    yield 3
    cpu_decoder.stop_helpers()


@pytest.fixture
def decoder() -> CPUDecoder:
    return CPUDecoder(random_model(3, n_embd=48, n_head=3, n_layer=3, block_size=64), "float32")


def sampled_tokens(decoder: CPUDecoder, prompts: list[list[int]]) -> list[list[int]]:
    return generate_tokens(decoder, prompts, max_new_tokens=40, sampling=Sampling())


def expected_tokens(decoder: CPUDecoder, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that one thread generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: 1)
        return sampled_tokens(decoder, prompts)


def test_threads_help_and_sleep_without_work(threads, decoder):
    """Without work, a helper leaves the compiled function, in which it is awake, and waits for an event."""
    entered, left, run_help = [], [], decoder.run_help

    def record(address):
        entered.append(address)
        run_help(address)
        left.append(address)

    decoder.run_help = record
    assert sampled_tokens(decoder, [[1, 2], [3]]) == expected_tokens(decoder, [[1, 2], [3]])
    helpers = cpu_decoder._helpers[os.getpid()]
    assert len(helpers) == threads - 1
    wait_until(lambda: not any(helper.wake_event.is_set() for helper in helpers) and len(entered) == len(left) > 0)


def test_interleaved_and_concurrent_batches(threads, decoder):
    prompts = [[[row], [row, 2]] for row in range(4)]
    expected = [expected_tokens(decoder, pair) for pair in prompts]
    steps = [generate(decoder, pair, max_new_tokens=40, sampling=Sampling()) for pair in prompts]
    tokens = [[step.tokens for step in batches] for batches in zip(*steps, strict=True)]  # (steps, batches, rows)
    assert torch.tensor(tokens).permute(1, 2, 0).tolist() == expected
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: sampled_tokens(decoder, pair), prompts)) == expected


def test_a_batch_may_be_freed_while_threads_still_poll_it(threads, seed):
    for _ in range(20):
        decoder = CPUDecoder(random_model(seed, n_embd=48), "float32")
        list(generate(decoder, [[1], [2]], max_new_tokens=3))
        del decoder
    torch.full((1000, 1000), torch.nan)


def test_a_thread_that_never_runs_does_not_delay_the_others(threads, decoder, monkeypatch):
    """It was started, but gets no core."""
    monkeypatch.setattr(cpu_decoder.Helper, "run", lambda self: None)
    assert sampled_tokens(decoder, [[1, 2]]) == expected_tokens(decoder, [[1, 2]])


def test_no_part_is_claimed_before_its_phase_is_published(threads, decoder):
    """If the leader was preempted between storing the kind of the phase and its number, parts of the next phase ran
    twice, or parts of the last one with numbers beyond its end.
    """
    batch = batch_of(decoder, 1)
    batch.threads = 1  # wakes no helpers; the compiled step still divides its phases
    batch.prefill({0: [1, 2, 3]}, {})
    sync, logits = batch.sync, batch.logits.clone()
    before = sync.clone()
    sync[2, 0] = 0  # like decode_step.run_phase, without the last store
    sync[1, :3] = torch.tensor([decode_step.PREDICT, 0, 9])
    batch.logits.zero_()
    decoder.run_help(batch.address)
    assert (batch.logits == 0).all() and sync[2, 0] == 0 and sync[0, 0] == before[0, 0]
    sync[0, 0] = (int(batch.state["phase"][0]) + 1 << decode_step.PARTS_BITS) + 3  # the last store
    decoder.run_help(batch.address)
    assert torch.equal(batch.logits, logits) and sync[2, 0] == 3


def test_an_interrupt_is_raised_after_the_step(threads, decoder):
    """The batch can still be used."""
    batch = batch_of(decoder, 1)
    batch.prefill({0: [1]}, {})
    batch.sample([0])
    with pytest.raises(KeyboardInterrupt):
        _thread.interrupt_main()
        for _ in range(50):
            batch.step([0])
    length = batch.lengths[0]
    batch.step([0])
    assert batch.lengths == [length + 1]


def generate_in_child(connection, decoder: CPUDecoder) -> None:
    tokens = sampled_tokens(decoder, [[1, 2]])
    connection.send((tokens, [helper.is_alive() for helper in cpu_decoder._helpers[os.getpid()]]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_starts_its_own_threads(threads, decoder):
    """It does not have its parent's threads."""
    expected = sampled_tokens(decoder, [[1, 2]])
    context = multiprocessing.get_context("fork")
    connection, child_connection = context.Pipe()
    child = context.Process(target=generate_in_child, args=(child_connection, decoder))
    child.start()
    assert connection.poll(20)
    assert connection.recv() == (expected, [True] * (threads - 1))
    child.join()
    assert child.exitcode == 0


def test_a_process_may_exit_right_after_a_step_with_several_threads():
    code = """
from tests.support.decoding import random_model
from folio.decoding import cpu_decoder
from folio.decoding.scheduler import generate
from folio.decoding.sampling import Sample, Sampling
cpu_decoder.choose_threads = lambda decoder, rows: 3
decoder = cpu_decoder.CPUDecoder(random_model(1), "float32")
print(sum(1 for _ in generate(decoder, [[1]], max_new_tokens=7)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "7\n"), run.stderr
