"""Special features of torch's decoder. test_decoders.py checks its tokens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from folio.decoding import kv_cache, torch_decoder
from folio.decoding.decoders import Decoder
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, Scheduler, generate
from folio.decoding.torch_decoder import CapturedFunction, TorchDecoder, sampling_device
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT, POSITIONS, GPTConfig
from tests.support.decoding import GREEDY, generate_tokens, random_model
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.waiting import in_thread


def test_tokens_that_are_fetched_one_step_late_are_the_same(model, monkeypatch):
    """On CUDA, the next step is launched before a step's tokens are on the host."""
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


class FakeCuda(threading.local):
    """torch.cuda with a current device per thread, which is 0 at first. Records where streams and graphs are created.

    The CPU, where the tensors of a test are, is the device on which they should be.
    """

    current = torch.device("cuda", 0)
    created: ClassVar[list[tuple[str, torch.device]]] = []  # of all threads

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def create(self, name: str, *args, stream: mock.MagicMock | None = None, **settings) -> mock.MagicMock:
        device = self.current
        if name == "graph":  # without a stream, the one of the first capture of the process
            device = stream.device if stream else torch.device("cuda", 0)
        self.created.append((name, device))
        return mock.MagicMock(device=device)


def test_graphs_are_captured_on_the_models_device_in_any_thread(model, monkeypatch):
    """The current device of a thread is 0, so a server with --device=cuda:1 captured empty graphs on GPU 0.

    So did a model on a second GPU of a process, because torch's default stream for captures was on the first one.
    """
    cuda = FakeCuda()
    for name in ("CUDAGraph", "Stream", "current_stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, partial(cuda.create, name))
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    in_thread(CapturedFunction, torch.exp, torch.ones(2, 1))
    assert {name for name, _ in cuda.created} >= {"CUDAGraph", "Stream", "current_stream", "graph"}
    assert {device for _, device in cuda.created} == {torch.device("cpu")}


EOT = 19
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
SAMPLINGS = {
    "greedy": GREEDY,
    "filters": Sampling(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": Sampling(**PENALTIES, temperature=0.9, top_k=9),
    "bias": Sampling(**PENALTIES, temperature=0.9, top_k=9, logit_bias=((EOT, -100.0), (3, 1.0))),
}


def decode_requests(decoder: Decoder) -> list[tuple[list[int], str]]:
    """The tokens and finish reasons of requests that share three rows, with contexts of 8 tokens."""
    endless, ending = Sampling(logit_bias=((EOT, -100.0),)), Sampling(logit_bias=((EOT, 5.0),), top_p=0.95)
    completions = [
        Completion([1], SAMPLINGS["bias"], 22),
        Completion([3, 4, 5], endless, 16, context_stride=3),  # prefills again, also if a context could slide
        Completion([6, 7], ending, 40),
        Completion([9, 10, 11], SAMPLINGS["filters"], 3),  # the next two take the row of one that has ended
        Completion([1, 2, 12], GREEDY, 12),
    ]
    scheduler = Scheduler(decoder, 3, eot=EOT)
    for number, completion in enumerate(completions):
        completion.sample = number
        scheduler.add(completion)
    while scheduler.is_busy:
        scheduler.step()
    return [(completion.tokens, completion.finish_reason) for completion in completions]


@pytest.mark.parametrize("position", POSITIONS)
def test_captured_steps_compute_what_eager_ones_do(position, seed, monkeypatch):
    """With CUDA graphs of 4 and 8 positions and 1 to 3 rows on a simulated GPU, which refuses to wait in a capture.

    Rows have unequal lengths, start and end at different times, slide or are prefilled again.
    """
    monkeypatch.setattr(torch_decoder.CUDAGraphDecoder, "GRANULARITY", 4)
    monkeypatch.setattr(torch_decoder.TokenSampler, "CAPTURE_STEP", 2)
    model = random_model(seed, position=position)
    expected = decode_requests(TorchDecoder(model, resolve_runtime("cpu", "float32", False)))
    with SimulatedGPU(monkeypatch) as gpu:
        assert decode_requests(TorchDecoder(model.to("cuda"), gpu.runtime())) == expected
    assert gpu.captures >= 3 and gpu.replays >= 20
    assert len(expected[0][0]) == 22 and expected[2][1] == "stop"


@pytest.mark.parametrize("dtype, sampling", [(torch.bfloat16, "greedy"), *((torch.float32, s) for s in SAMPLINGS)])
def test_the_host_waits_for_a_gpu_only_to_fetch_tokens(dtype, sampling, seed, monkeypatch):
    """With penalties, each token copied a number to the GPU, and with a bias also the bias. Both copies wait.

    The rows and the graph stay the same during these steps; in one of them, sampling is captured. A forward pass with
    autocast is not captured, nor is sampling with a bias.
    """
    model = random_model(seed, position="rotary")
    with SimulatedGPU(monkeypatch) as gpu:
        decoder = TorchDecoder(model.to("cuda"), gpu.runtime(dtype))
        steps = generate(decoder, [[1, 2], [3, 4, 5]], max_new_tokens=30, sampling=SAMPLINGS[sampling])
        for _ in zip(range(6), steps):  # noqa: B905
            pass
        gpu.waits.clear()
        for _ in zip(range(20), steps):  # noqa: B905
            pass
    assert gpu.waits == ["Event.synchronize"] * 20
    assert gpu.captures == (dtype == torch.float32) + (sampling != "bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cudnn_computes_only_attention_that_is_captured(model, dtype, monkeypatch):
    """It takes 45 ms for each new length, so that the first sample of a training run took 8 to 10 s on an H200."""
    in_use = []

    def attention(*args):
        in_use.append((torch.backends.cuda.cudnn_sdp_enabled(), gpu.capturing is not None))
        return torch.nn.functional.scaled_dot_product_attention(*args)

    monkeypatch.setattr(kv_cache, "scaled_dot_product_attention", attention)
    with SimulatedGPU(monkeypatch) as gpu:
        generate_tokens(model.to("cuda"), [[1, 2], [3, 4, 5]], gpu.runtime(dtype))
    assert (True, True) in in_use or dtype == torch.bfloat16  # with autocast, nothing is captured
    assert (False, False) in in_use and (False, True) not in in_use
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_nan_after_the_prefill_gives_ids_of_the_vocabulary(model, sampling):
    """An id beyond it was sampled, at which the embedding failed. On a GPU, this ends all work of a process."""
    with torch.no_grad():
        model.transformer.wpe.weight[4] = torch.nan
    decoder = TorchDecoder(model, resolve_runtime("cpu", "float32", False))
    (tokens,) = generate_tokens(decoder, [[1, 2]], sampling=SAMPLINGS[sampling], max_new_tokens=6, vocab_size=18)
    assert len(tokens) == 6 and max(tokens) < 18


class MetaWithoutFloat64(TorchDispatchMode):
    """The meta device with the limits of Apple's GPUs, no float64 and no asynchronous copies from it, and of CUDA under
    deterministic algorithms, no cumulative sums.

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
            assert not (tensor.is_meta and (tensor.dtype == torch.float64 or "cumsum" in str(function))), function
        return result


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.2, 0.9, top_k=5, top_p=0.9, min_p=0.01)])
def test_tokens_are_sampled_on_the_cpu_for_devices_without_cumulative_sums(sampling, monkeypatch):
    """On Apple's GPUs, a cumulative sum in float64 is an error, and in a deterministic run on CUDA any: its samples
    failed. The meta device simulates such a GPU.
    """
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert sampling_device(cpu) == sampling_device(torch.device("mps")) == cpu and sampling_device(gpu) == gpu
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert sampling_device(gpu) == cpu
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # does not accept the meta device
    monkeypatch.setattr(torch_decoder, "to_host", lambda ids: lambda: [1] * len(ids))
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    with MetaWithoutFloat64():
        runtime = Runtime(torch.device("meta"), torch.float32, False, "")
        rows = generate_tokens(model, [[1, 2], [3]], runtime, sampling=sampling, vocab_size=18)
    assert rows == [[1] * 20] * 2


def test_a_step_of_torch_leaves_a_core_to_other_processes(monkeypatch):
    """Its threads waited for each other: with another busy process, 999 tokens per second became 10."""
    used, forward = [], GPT.forward
    monkeypatch.setattr(
        GPT, "forward", lambda *args, **kw: used.append(torch.get_num_threads()) or forward(*args, **kw)
    )
    monkeypatch.setattr(torch_decoder, "default_threads", lambda: 4)
    before = torch.get_num_threads()
    try:
        for single_thread_bytes, expected in ((2**26, 1), (1, 3)):
            runtime = resolve_runtime("cpu", "float32", False)
            decoder = torch_decoder.TorchDecoder(random_model(1), runtime, single_thread_bytes)
            for _ in generate(decoder, [[1]], max_new_tokens=3):
                pass
            assert used[-1] == expected and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
