"""Special features of torch's decoder. test_decoders.py checks its tokens."""

import copy
from itertools import islice

import pytest
import torch

from folio.decoding import kv_cache, torch_decoder
from folio.decoding.decoders import Decoder
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, Scheduler, generate
from folio.decoding.torch_decoder import CapturedFunction, TorchDecoder
from folio.machine.runtime import resolve_runtime
from model import GPT, POSITIONS
from tests.support.decoding import GREEDY, assert_same_tokens, generate_tokens, random_model, run_scheduler
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.waiting import in_thread


@pytest.mark.gpu
def test_cuda_graphs_generate_the_same(model, monkeypatch):
    """With several graphs, rows of unequal length, and more tokens than block_size."""
    monkeypatch.setattr(torch_decoder.CUDAGraphDecoder, "GRANULARITY", 4)
    cpu, cuda = resolve_runtime("cpu", "float32", False), resolve_runtime("cuda", "float32", False)
    prompts = [[1, 2], [3, 4, 5]]
    for settings in (dict(), dict(stride=1), dict(sampling=Sampling(top_k=5))):
        expected = generate_tokens(model.cpu(), prompts, cpu, **settings)
        actual = generate_tokens(model.cuda(), prompts, cuda, **settings)
        for k, prompt in enumerate(prompts):
            assert_same_tokens(actual[k], expected[k], model.cpu(), prompt, samples=[k], **settings)


def test_graphs_are_captured_on_the_models_device_in_any_thread():
    """The current device of a thread is 0, so a server with --device=cuda:1 captured empty graphs on GPU 0.

    So did a model on a second GPU of a process, because torch's default stream for captures was on the first one.
    """
    with SimulatedGPU(device_count=2) as gpu:
        x = torch.ones(2, 1, device="cuda:1")

        def capture() -> None:
            with gpu.modes():
                CapturedFunction(torch.exp, x)

        in_thread(capture)
    assert gpu.captures == 1


def test_row_bytes_includes_the_logits_of_all_graphs(monkeypatch):
    """At 64 rows, up to 28 graphs were not counted."""
    monkeypatch.setattr(torch_decoder.CUDAGraphDecoder, "GRANULARITY", 4)
    with SimulatedGPU(), torch.inference_mode():
        model = random_model(1).to("cuda")
        decoder, S = TorchDecoder(model, resolve_runtime("cuda", "float32", False)), model.config.block_size
        batch, counts = decoder.batch(5), set()
        for rows in range(1, 6):
            for length in range(S):
                batch.cache.set_lengths([length] * 5)
                batch.new_logits(batch.sampled[: batch.padded_rows(rows)])
                counts.add(batch.padded_rows(rows))
        graphs = batch.new_logits.graphs
        storages = [graph.result.values.untyped_storage() for graph in graphs.values()]  # with the padded vocabulary
        kept = 2 * sum(storage.nbytes() for storage in storages)  # in the model's dtype, and in float32
        with_graphs = decoder.row_bytes
        monkeypatch.setattr(torch_decoder, "is_capturable", lambda model, runtime: False)
        counted = 5 * (with_graphs - decoder.row_bytes)
    assert counts == {1, 2, 4, 5} and len(graphs) == 4 * -(-S // 4) > 4
    assert kept <= counted <= 1.5 * kept


EOT = 19
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
SAMPLINGS = {
    "greedy": GREEDY,
    "filters": Sampling(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": Sampling(**PENALTIES, temperature=0.9, top_k=9),
    "bias": Sampling(**PENALTIES, temperature=0.9, top_k=9, logit_bias=((EOT, -100.0), (3, 1.0))),
}


def decode_requests(decoder: Decoder) -> list[Completion]:
    """Run requests that share three rows, with contexts of 8 tokens."""
    endless, ending = Sampling(logit_bias=((EOT, -100.0),)), Sampling(logit_bias=((EOT, 5.0),), top_p=0.95)
    completions = [
        Completion([1], SAMPLINGS["bias"], 22),
        Completion([3, 4, 5], endless, 16, sample=1, context_stride=3),  # prefills again, even if it could slide
        Completion([6, 7], ending, 40, sample=2),
        Completion([9, 10, 11], SAMPLINGS["filters"], 3, sample=3),  # the next two take the row of one that has ended
        Completion([1, 2, 12], GREEDY, 12, sample=4),
    ]
    run_scheduler(Scheduler(decoder, 3, eot=EOT), *completions)
    return completions


@pytest.mark.parametrize("position", POSITIONS)
def test_captured_steps_compute_what_eager_ones_do(position, seed, monkeypatch):
    """With CUDA graphs of 4 and 8 positions and 1 to 3 rows on a simulated GPU, which refuses to wait in a capture.

    Rows have unequal lengths, start and end at different times, slide or are prefilled again.
    """
    monkeypatch.setattr(torch_decoder.CUDAGraphDecoder, "GRANULARITY", 4)
    monkeypatch.setattr(torch_decoder.TokenSampler, "CAPTURE_STEP", 2)
    model = random_model(seed, position=position)
    decoder = TorchDecoder(model, resolve_runtime("cpu", "float32", False))
    expected = decode_requests(decoder)
    with SimulatedGPU() as gpu:
        runtime = resolve_runtime("cuda", "float32", False)
        actual = decode_requests(TorchDecoder(copy.deepcopy(model).to("cuda"), runtime))
    for captured, eager in zip(actual, expected, strict=True):
        settings = dict(sampling=eager.sampling, samples=[eager.sample], stride=eager.context_stride, eot=EOT)
        equal = assert_same_tokens(captured.tokens, eager.tokens, decoder, eager.prompt, **settings)
        assert captured.finish_reason == eager.finish_reason or equal < len(eager.tokens)
    assert gpu.captures >= 3 and gpu.replays >= 20
    assert len(expected[0].tokens) == 22 and expected[2].finish_reason == "stop"


@pytest.mark.parametrize("dtype, sampling", [("bfloat16", "greedy"), *(("float32", s) for s in SAMPLINGS)])
def test_the_host_waits_for_a_gpu_only_to_fetch_tokens(dtype, sampling, seed):
    """With penalties, each token copied a number to the GPU, and with a bias also the bias. Both copies wait.

    The rows and the graph stay the same during these steps; in one of them, sampling is captured. A forward pass with
    autocast is not captured, nor is sampling with a bias.
    """
    model = random_model(seed, position="rotary")
    with SimulatedGPU() as gpu:
        decoder = TorchDecoder(model.to("cuda"), resolve_runtime("cuda", dtype, False))
        steps = generate(decoder, [[1, 2], [3, 4, 5]], max_new_tokens=30, sampling=SAMPLINGS[sampling])
        list(islice(steps, 6))
        gpu.waits.clear()
        list(islice(steps, 20))
    assert gpu.waits == ["Event.synchronize"] * 20
    assert gpu.captures == (dtype == "float32") + (sampling != "bias")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cudnn_computes_only_attention_that_is_captured(model, dtype, monkeypatch):
    """It takes 45 ms for each new length, so that the first sample of a training run took 8 to 10 s on an H200."""
    in_use = []

    def attention(*args):
        in_use.append((torch.backends.cuda.cudnn_sdp_enabled(), gpu.capturing is not None))
        return torch.nn.functional.scaled_dot_product_attention(*args)

    monkeypatch.setattr(kv_cache, "scaled_dot_product_attention", attention)
    with SimulatedGPU() as gpu:
        generate_tokens(model.to("cuda"), [[1, 2], [3, 4, 5]], resolve_runtime("cuda", dtype, False))
    assert (True, True) in in_use or dtype == "bfloat16"  # with autocast, nothing is captured
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


@pytest.mark.parametrize("device, deterministic", [("mps", False), ("cuda", True)])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.2, 0.9, top_k=5, top_p=0.9, min_p=0.01)])
def test_tokens_are_sampled_on_the_cpu_for_devices_without_cumulative_sums(
    device, deterministic, sampling, seed, monkeypatch
):
    """On Apple's GPUs, a cumulative sum in float64 is an error, and in a deterministic run on CUDA any: its samples
    failed.
    """
    model, prompts, settings = random_model(seed), [[1, 2], [3]], dict(sampling=sampling, vocab_size=18)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    expected = generate_tokens(model, prompts, resolve_runtime("cpu", "float32", False, deterministic), **settings)
    with SimulatedGPU(device) as gpu:
        runtime = resolve_runtime(device, "float32", False, deterministic)
        actual = generate_tokens(copy.deepcopy(model).to(device), prompts, runtime, **settings)
    for k, prompt in enumerate(prompts):
        assert_same_tokens(actual[k], expected[k], model, prompt, samples=[k], **settings)
    assert "cumsum" not in gpu.operators[device]
    assert ("cumsum" in gpu.operators["cpu"]) == (sampling != GREEDY)


def test_a_step_of_torch_leaves_a_core_to_other_processes(monkeypatch, set_threads):
    """Its threads waited for each other: with another busy process, 999 tokens per second became 10."""
    used, forward = [], GPT.forward
    monkeypatch.setattr(
        GPT, "forward", lambda *args, **kw: used.append(torch.get_num_threads()) or forward(*args, **kw)
    )
    monkeypatch.setattr(torch_decoder, "default_threads", lambda: 4)
    runtime = resolve_runtime("cpu", "float32", False)
    for single_thread_bytes, expected in ((2**26, 1), (1, 3)):
        monkeypatch.setattr(torch_decoder, "SINGLE_THREAD_BYTES", single_thread_bytes)
        list(generate(torch_decoder.TorchDecoder(random_model(1), runtime), [[1]], max_new_tokens=3))
        assert used[-1] == expected and torch.get_num_threads() == 4
