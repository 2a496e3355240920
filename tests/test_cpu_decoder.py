"""The decoder of a CPU against model.py: its logits, memory, and threads."""

import copy
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from decoding import GREEDY, generate_tokens, random_model
from repository import ROOT

import model as model_file
from folio import UserError, compiled, cpu_decoder, decode_step
from folio.cpu_decoder import CPUBatch, CPUDecoder, computes_model
from folio.generate import Sampling, generate, make_decoder
from folio.quantize import quantized
from folio.runtime import resolve_runtime
from folio.torch_decoder import TorchDecoder
from model import ACTIVATIONS, GPT, POSITIONS, GPTConfig

CPU = resolve_runtime("cpu", "float32", False)


def batch_of(decoder: CPUDecoder, rows: int, sampling: Sampling = GREEDY) -> CPUBatch:
    return decoder.batch([[0]] * rows, range(rows), sampling, 1, None)


def random_ids(model: GPT, count: int) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,)).tolist()


# --- logits -----------------------------------------------------------------------------------------------------------

SHAPES = [  # n_embd, n_head, vocab_size, block_size: hardly any is a multiple of what is computed together
    (6, 1, 1, 1),
    (6, 3, 7, 5),
    (24, 24, 33, 17),
    (40, 5, 65, 70),
    (36, 4, 101, 40),
    (65, 13, 97, 33),
    (66, 1, 130, 150),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_logits_of_odd_shapes_are_those_of_the_model(shape, dtype, seed):
    """At the end of each prompt and after each token. With int8 and int4, they are those of the rounded weights; the
    cache is in bfloat16.
    """
    torch.manual_seed(seed)
    n_embd, n_head, V, S = shape
    position = random.Random(seed).choice([p for p in POSITIONS if p != "rotary" or n_embd // n_head % 2 == 0])
    settings = dict(n_embd=n_embd, n_head=n_head, vocab_size=V, block_size=S, position=position)
    model = random_model(seed, **settings, bias=seed % 2 == 0, activation=random.Random(seed).choice([*ACTIVATIONS]))
    print(model.config)
    reference = model if dtype == "float32" else quantized(model, dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.05
    prompts = [random_ids(model, length) for length in {1, max(1, S // 2), max(1, S - 2), S}]
    steps = generate(CPUDecoder(model, dtype), prompts, max_new_tokens=None, sampling=Sampling())
    for step in steps:
        for row, token in enumerate(step.tokens):
            if token is not None:
                expected = reference(torch.tensor([prompts[row]]))[0][0, -1]
                assert (step.logits[row] - expected).abs().max() <= tolerance * expected.abs().max()
                prompts[row].append(token)


@pytest.mark.parametrize("position", POSITIONS)
def test_logits_of_each_position_method(position, seed):
    """With prompts that are prefilled in several parts, and distances that share a bucket."""
    torch.manual_seed(seed)
    model = random_model(seed, position=position, block_size=160, n_head=4)
    ids = random_ids(model, 160)
    batch = batch_of(CPUDecoder(model, "float32"), 2)
    batch.prefill({0: ids[:150], 1: ids[:63]})
    batch.rows["token"] = ids[150], ids[63]
    for position in range(10):
        for row, length in enumerate((150 + position, 63 + position)):
            expected = model(torch.tensor([ids[:length]]))[0][0, -1]
            torch.testing.assert_close(batch.logits[row], expected, atol=1e-4, rtol=1e-4)
        batch.rows["token"] = ids[150 + position], ids[63 + position]
        batch.step([0, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_rows_logits_are_bitwise_equal_in_any_batch_and_with_any_number_of_threads(dtype, seed, monkeypatch):
    torch.manual_seed(seed)
    model = random_model(seed, block_size=40, n_embd=48, n_head=3, vocab_size=77)
    decoder = CPUDecoder(model.bfloat16() if dtype == "bfloat16" else model, dtype)
    prompts = [random_ids(model, 1 + 3 * row) for row in range(9)]

    def logits(rows: list[int], threads: int) -> list[torch.Tensor]:
        monkeypatch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: threads)
        steps = generate(decoder, [prompts[row] for row in rows], max_new_tokens=8, samples=rows)
        return torch.stack([step.logits.clone() for step in steps]).unbind(1)

    expected = logits(list(range(9)), 1)
    for threads in (1, 2, 3):
        for rows in ([4], [2, 7], [8, 0, 5], [1, 2, 3, 4, 5], list(range(9))):
            for row, of_row in zip(rows, logits(rows, threads), strict=True):
                assert torch.equal(of_row, expected[row]), (row, rows, threads)


def test_many_rows(seed):
    """More than the tokens that are prefilled together."""
    torch.manual_seed(seed)
    model = random_model(seed)
    prompts = [random_ids(model, 1 + row % 8) for row in range(100)]
    rows = generate_tokens(model, prompts, CPU, sampling=Sampling(), max_new_tokens=6)
    for row in (0, 63, 64, 99):
        assert generate_tokens(model, [prompts[row]], CPU, samples=[row], sampling=Sampling(), max_new_tokens=6) == [
            rows[row]
        ]


# --- weights and memory -----------------------------------------------------------------------------------------------


def test_weights_that_are_not_contiguous_or_not_aligned_or_of_other_dtypes(seed):
    """A weight in bfloat16 among others in float32 was read as float32, beyond its end."""
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
    batch.prefill({0: ids})
    expected = model.float()(torch.tensor([ids]))[0][0, -1]
    assert (batch.logits[0] - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("ids", [[20], [-1], [1, 2**40, 3]])
def test_ids_beyond_the_vocabulary_are_an_error(ids):
    """The memory beyond the embeddings was read."""
    decoder = CPUDecoder(random_model(1), "float32")
    with pytest.raises(IndexError, match=r"the vocabulary 20 ids"):
        next(generate(decoder, [[1, 2], ids], max_new_tokens=1))


def test_the_memory_that_addresses_refer_to_is_kept(seed):
    """Of a model, prompts, and decoder that nothing else refers to."""
    model = random_model(seed, n_embd=48)
    expected = generate_tokens(copy.deepcopy(model), [[1, 2]], CPU, sampling=Sampling(repetition_penalty=1.2))
    steps = generate(
        make_decoder(copy.deepcopy(model), CPU),
        [[1, 2]],
        max_new_tokens=20,
        sampling=Sampling(repetition_penalty=1.2),
    )
    tokens = []
    for step in steps:
        tokens.append(step.tokens[0])
        for size in (48, 4 * 48, 48 * 48, 48 * 4 * 48):  # memory that was freed would be used again
            torch.full((size,), torch.nan)
    assert [tokens] == expected


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_models_of_model_py_are_computed(position, activation, bias):
    assert computes_model(random_model(1, position=position, activation=activation, bias=bias))
    assert computes_model(random_model(1, position=position, activation=activation, bias=bias).bfloat16())


def other_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_norm = torch.nn.LayerNorm
    monkeypatch.setattr(model_file.nn, "LayerNorm", lambda size, bias: layer_norm(size, eps=1e-6, bias=bias))


def other_order_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    of_model = GPT.hidden_states

    def hidden_states(self, *arguments):
        self.transformer.h, h = self.transformer.h[::-1], self.transformer.h
        try:
            return of_model(self, *arguments)
        finally:
            self.transformer.h = h

    monkeypatch.setattr(GPT, "hidden_states", hidden_states)


def swapped_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x, rotation, mask, attend):
        x = x + self.attn(self.ln_2(x), rotation, mask, attend)
        return x + self.mlp(self.ln_1(x))

    monkeypatch.setattr(model_file.Block, "forward", forward)


def other_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "gelu_new", ACTIVATIONS["gelu"])


def other_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = model_file.Attention.__call__
    monkeypatch.setattr(model_file.Attention, "__call__", lambda self, layer, q, *rest: attend(self, layer, q * 1.001, *rest))


def failing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x):
        raise AssertionError

    monkeypatch.setattr(model_file.MLP, "forward", forward)


@pytest.mark.parametrize(
    "change", [other_epsilon, other_order_of_layers, swapped_norms, other_activation, other_scale, failing_parts]
)
def test_changed_models_are_not_computed(change, monkeypatch):
    """They are decoded with torch. Two layers and all vectors had equal weights, so that a change of their order was
    not noticed, nor was one of the epsilon.
    """
    change(monkeypatch)
    assert not computes_model(random_model(1))
    assert isinstance(make_decoder(random_model(1), CPU), TorchDecoder)
    with pytest.raises(UserError, match="dtype=int8: it requires model.py as it was"):
        make_decoder(random_model(1), CPU, "int8")


def test_changed_parts_of_a_model_are_not_ignored():
    """A hook or another module of this model was."""
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
    """More than the tests' one core. The helpers are new ones, whose steps nobody else takes."""
    monkeypatch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: 3)
    monkeypatch.setattr(cpu_decoder, "_helpers", [])
    yield 3


@pytest.fixture
def decoder() -> CPUDecoder:
    return CPUDecoder(random_model(3, n_embd=48, n_head=3, n_layer=3, block_size=64), "float32")


def expected_tokens(decoder: CPUDecoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """With one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_decoder, "choose_threads", lambda decoder, rows: 1)
        return generate_tokens(decoder, prompts, max_new_tokens=count, sampling=Sampling())


def test_threads_take_part_and_sleep_when_there_is_nothing_to_do(threads, decoder):
    prompts = [[1, 2], [3]]
    assert generate_tokens(decoder, prompts, max_new_tokens=60, sampling=Sampling()) == expected_tokens(
        decoder, prompts, 60
    )
    assert len(cpu_decoder._helpers) == threads - 1
    time.sleep(0.1)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.1  # two helpers that are awake take 0.3 s or more


def test_batches_in_turn_and_of_several_threads_at_once(threads, decoder):
    prompts = [[[row], [row, 2]] for row in range(4)]
    expected = [expected_tokens(decoder, pair, 40) for pair in prompts]
    steps = [generate(decoder, pair, max_new_tokens=40, sampling=Sampling()) for pair in prompts]
    tokens = [list(map(list, zip(*[step.tokens for step in of_batch], strict=True))) for of_batch in zip(*steps)]
    in_turn = [[[step[batch].tokens[row] for step in zip()] for row in range(2)] for batch in range(0)]
    assert in_turn == [] and len(tokens) == 40
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            at_once = pool.map(lambda pair: generate_tokens(decoder, pair, max_new_tokens=40, sampling=Sampling()), prompts)
            assert list(at_once) == expected
