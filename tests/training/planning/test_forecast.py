"""Memory forecasts, against the tensors that autograd saves."""

import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from folio import UserError
from folio.machine import distributed, memory
from folio.machine.data_parallel import DataParallelLoss
from folio.machine.kernels import FusedAttention, adapt, compile_loss, make_cross_entropy
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.loader import resident_bytes
from folio.training.planning.data import open_data
from folio.training.planning.forecast import (
    Memory,
    loss_bytes,
    memory_per_process,
    memory_report,
    refuse_too_large,
    saved_bytes_per_token,
    suggest_memory_fix,
    training_memory,
)
from model import GPT, POSITIONS, GPTConfig
from tests.support.operators import MATMULS, OperatorRecorder
from train import TrainConfig, train

TINY = GPTConfig(block_size=64, vocab_size=100, n_layer=2, n_head=4, n_embd=64, bias=False)


class SavedStorages(saved_tensors_hooks):
    """The storages that autograd saves in this context, except the parameters of the model."""

    def __init__(self, model: GPT):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.sizes: dict[int, int] = {}  # bytes, by address
        self.tensors: list[torch.Tensor] = []  # kept alive, so that addresses are unique
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.tensors.append(tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def bytes_saved_by_autograd(config: GPTConfig, sequences: int, dtype: torch.dtype, recompute: bool = False) -> int:
    """Bytes of the storages that autograd saves in a forward pass, without the parameters, plus the attention mask."""
    model = GPT(config).train()
    adapt(model, Runtime(torch.device("cpu"), dtype, False, ""))
    if recompute:
        distributed.checkpoint_activations(model.transformer.h)
    saved = SavedStorages(model)

    def keep_mask(block: torch.nn.Module, inputs: tuple) -> None:
        _, _, mask, _ = inputs
        if mask.biases is not None:
            saved.pack(mask.biases)

    model.transformer.h[0].register_forward_pre_hook(keep_mask)
    idx = torch.zeros(sequences, config.block_size, dtype=torch.long)
    with saved, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(idx, idx)
    return saved.bytes


@pytest.mark.architecture(
    "folio/training/planning/forecast.py: saved_bytes_per_token, and training_memory for the rest"
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_forecast_of_a_blocks_activations_is_exact(dtype, dropout, position):
    """Against the bytes that autograd saves for one more layer. In bfloat16, these include the layer's cast weights."""
    config = replace(TINY, dropout=dropout, position=position)
    one, two = (bytes_saved_by_autograd(replace(config, n_layer=n), 4, dtype) for n in (1, 2))
    cast_weights = 0 if dtype == torch.float32 else 2 * 12 * 64 * 64
    assert (two - one - cast_weights) / (4 * 64) == saved_bytes_per_token(config, dtype, "cpu")


@pytest.mark.architecture(
    "folio/training/planning/forecast.py: saved_bytes_per_token, and training_memory for the rest"
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forecast_of_all_activations_is_an_upper_bound(dtype, recompute):
    """It exceeds the bytes that autograd saves by at most the logits, their gradients and recomputed tensors."""
    saved = bytes_saved_by_autograd(TINY, 4, dtype, recompute)
    forecast = forecast_of(TINY, dtype=dtype, recompute=recompute).activations
    block = 4 * 64 * saved_bytes_per_token(TINY, dtype, "cpu")
    recomputed = block + 2 * 2 * 12 * 64 * 64 if recompute else 0  # a block and cast weights, in the backward pass
    assert saved <= forecast <= saved + 4 * 64 * 100 * 14 + recomputed + 4 * 64 * 64 * 4


def forecast_of(config: GPTConfig, **changes) -> Memory:
    """The forecast for 4 sequences, by default with AdamW in float32 on a CPU."""
    return training_memory(GPT(config), 4, **{"optimizer": "adamw", "dtype": torch.float32, "device": "cpu", **changes})


@pytest.mark.parametrize("workers", [1, 3])
def test_each_worker_has_gradients_of_its_own(workers):
    runtime = Runtime(torch.device("cpu"), torch.float32, False, "", workers=workers)
    idx = torch.zeros(1, 64, dtype=torch.long)
    computed = [worker.loss(idx, idx, 1.0, True)[1] for worker in DataParallelLoss(GPT(TINY), runtime).workers]
    gradients = sum(grad.nbytes for gradients in computed for grad in gradients)
    assert forecast_of(TINY, workers=workers).gradients == gradients


@pytest.mark.architecture(
    "folio/training/planning/forecast.py: saved_bytes_per_token, and training_memory for the rest"
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.*is deprecated")  # from torch
@pytest.mark.parametrize(
    "dtype, position, recompute, chunks", [(torch.bfloat16, "rotary", False, 1), (torch.float32, "alibi", True, 4)]
)
def test_a_compiled_step_keeps_no_more_than_the_forecast(dtype, position, recompute, chunks, monkeypatch):
    """Between the passes, with a GPU's attention and the partitioner of torch.compile's default backend.

    At this time, no block is recomputed, and of the loss only log-probabilities exist, or if it is computed in chunks,
    two gradients. Its backward pass then has no matmul with the vocabulary.
    """
    config, tokens, s = replace(TINY, vocab_size=1000, position=position), 4 * 64, dtype.itemsize
    limit = tokens * 1000 // chunks
    monkeypatch.setattr("folio.machine.kernels.MAX_LOGITS_COMPILED", limit)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    model, runtime = GPT(config).train(), Runtime(torch.device("cpu"), dtype, True, "")
    adapt(model, runtime)
    model.kernel = FusedAttention()
    if recompute:
        distributed.checkpoint_activations(model.transformer.h)
    loss_fn, idx = compile_loss(model, runtime), torch.zeros(4, 64, dtype=torch.long)
    loss_fn(idx, idx).backward()  # compiles it
    saved, sizes = SavedStorages(model), set()  # of the dimensions in matmuls of the backward pass

    def record(name, args, result):
        if name in MATMULS:
            sizes.update(size for matrix in args if isinstance(matrix, torch.Tensor) for size in matrix.shape)

    with saved:
        loss = loss_fn(idx, idx)
    with OperatorRecorder(record):
        loss.backward()
    required = forecast_of(config, dtype=dtype, device="cuda", recompute=recompute, compiled=True)
    forecast = required.activations - loss_bytes(tokens, config, s, compiled=True)
    forecast += 4 * tokens * 1000 if chunks == 1 else s * (tokens + 1000) * 64
    if recompute:
        forecast -= tokens * saved_bytes_per_token(config, dtype, "cuda")
    # A block keeps at least the results of matmuls and attention that its backward pass needs, which are not recomputed
    # (q, k, v, heads, and the MLP's 4 C), or its input; the loss, the logits or gradients; and there are cast weights.
    values = s * tokens * 64 * (1 if recompute else 3 + 1 + 4) * config.n_layer
    values += s * 12 * 64**2 * config.n_layer + s * 1000 * 64 if s == 2 else 0
    values += s * (tokens * 1000 if chunks == 1 else (tokens + 1000) * 64)
    assert values <= saved.bytes <= forecast
    assert 64 in sizes and (1000 in sizes) == (chunks == 1)


class PeakBytes(OperatorRecorder):
    """Measures the peak number of bytes of live tensors that operations returned."""

    def __init__(self):
        super().__init__(self.count)
        self.peak, self.alive = 0, Counter()  # bytes; number of tensors by the address and size of their memory

    def count(self, name, args, result) -> None:
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            block = storage.data_ptr(), storage.nbytes()
            self.alive[block] += 1
            weakref.finalize(tensor, self.alive.subtract, [block])
        self.peak = max(self.peak, sum(size for (_, size), n in self.alive.items() if n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forecast_of_a_loss_in_chunks(dtype, monkeypatch):
    """Against the measured peak. The gradient of x and cast weights are counted elsewhere. Not counted are copies of
    both gradients, which the backward pass may return, a chunk's gradient of x, and a few numbers.
    """
    N, V, C, n = 240, 1000, 8, 60
    monkeypatch.setattr("folio.machine.kernels.MAX_LOGITS", n * V)
    config, s = GPTConfig(vocab_size=V, n_embd=C, n_head=1), dtype.itemsize
    x, weight = torch.randn(N, C, dtype=dtype, requires_grad=True), torch.randn(V, C, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), PeakBytes() as measured:
        make_cross_entropy(n * V)(x, weight, torch.arange(N))
    elsewhere = s * N * C + (s * V * C if dtype != torch.float32 else 0)
    not_counted = 4 * V * C + s * (N * C + n * C + 10)
    assert 0 <= measured.peak - elsewhere - loss_bytes(N, config, s) <= not_counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_forecast_of_a_compiled_loss(dtype, chunks, monkeypatch):
    """With chunks of 2^28 logits, in the run's dtype, the forecast was that of an eager loss, with 2^26. If matmuls are
    the only operations whose results are stored, a chunk has its logits and the gradient, an input of two matmuls.
    """
    N, V, C = 240, 1000, 8
    monkeypatch.setattr("folio.machine.kernels.MAX_LOGITS_COMPILED", N * V // chunks)
    config, s = GPTConfig(vocab_size=V, n_embd=C, n_head=1), dtype.itemsize
    matrices = []  # the largest result or input of each matmul

    def record(name, args, result):
        if name in MATMULS:
            matrices.append(max(tensor.nbytes for tensor in (*args, result) if isinstance(tensor, torch.Tensor)))

    model, runtime = GPT(config).train(), Runtime(torch.device("cpu"), dtype, True, "")
    adapt(model, runtime)
    x, weight = torch.randn(N, C, dtype=dtype, requires_grad=True), torch.randn(V, C, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), OperatorRecorder(record):
        model.cross_entropy(x, weight, torch.arange(N)).backward()
    assert len(matrices) == 3 * chunks and max(matrices) == s * N * V // chunks
    weights = (4 + s) * V * C if chunks > 1 else 4 * N * V  # gradients, or log-probabilities between the passes
    assert loss_bytes(N, config, s, compiled=True) == 2 * max(matrices) + weights


@pytest.mark.architecture("folio/training/planning/forecast.py: training_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_forecast_includes_the_bias_of_a_position_encoding(dtype, position):
    """Against the saved bytes without positions. Positions and angles are not counted: less than 1 % of the rest."""
    configs = replace(TINY, position=position), replace(TINY, position="none")
    saved, without = (bytes_saved_by_autograd(config, 4, dtype) for config in configs)
    forecasts = [forecast_of(config, dtype=dtype).activations for config in configs]
    assert forecasts[0] - forecasts[1] == pytest.approx(saved - without, abs=0.01 * without)


@pytest.mark.architecture("this test, which counts the weights of the blocks' matrices")
def test_memory_of_weights_gradients_and_optimizer_state():
    N = sum(p.numel() for p in GPT(TINY).parameters())
    adamw, sharded = forecast_of(TINY), forecast_of(TINY, shards=4)
    assert (adamw.weights, adamw.gradients, adamw.optimizer) == (4 * N, 4 * N, 8 * N)
    one_moment = 4 * 2 * 12 * 64 * 64  # for the blocks' matrices
    assert forecast_of(TINY, optimizer="muon").optimizer == 8 * N - one_moment
    assert sharded.weights == N and sharded.optimizer == 2 * N
    assert adamw.total == adamw.weights + adamw.gradients + adamw.optimizer + adamw.activations


def test_the_report_on_a_run_that_does_not_fit_suggests_options(tiny, monkeypatch):
    model, runtime = GPT(replace(TINY, n_layer=8)), resolve_runtime("cpu", "float32", False)
    cfg = tiny(batch_size=16, gradient_accumulation_steps=2, block_size=64)

    def required(cfg: TrainConfig) -> int:
        return memory_per_process(cfg, model, torch.float32, "cpu", 1).total

    def report(free: float | None) -> str:
        monkeypatch.setattr(memory, "free", lambda device: free)
        return memory_report(cfg, model, runtime, 0)

    assert "too little" not in report(memory.HEADROOM * required(cfg))
    half_a_batch = memory.HEADROOM * required(replace(cfg, batch_size=8))
    assert "too little; use --batch_size=8 --gradient_accumulation_steps=4; or shard it" in report(half_a_batch)
    assert "free" not in report(None)
    sequence = required(replace(cfg, batch_size=1))
    assert "--recompute=True" in suggest_memory_fix(cfg, lambda changed: required(changed) < sequence)
    assert suggest_memory_fix(cfg, lambda changed: False) is None


def test_a_fix_never_changes_the_sequences_per_step(tiny):
    """total_batch_tokens is rounded to micro-batches, differently for each batch_size."""
    cfg = tiny(total_batch_tokens=1000, batch_size=8, block_size=32)
    assert cfg.accumulation * cfg.batch_size == 32
    assert suggest_memory_fix(cfg, lambda changed: changed.batch_size <= 2) == "--batch_size=2"
    assert replace(cfg, batch_size=1).accumulation == 31  # 31.25 micro-batches of one sequence
    assert suggest_memory_fix(cfg, lambda changed: changed.batch_size == 1) is None


@pytest.mark.architecture("folio/training/planning/forecast.py: refuse_too_large")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_model_that_is_too_large_for_the_memory_is_refused(tiny, optimizer):
    """The forecast was only printed, and the allocator raised an exception or the system killed the run."""
    required, norms = forecast_of(TINY, optimizer=optimizer), 16 * 64 * 5
    size = required.weights + required.gradients + required.optimizer
    refuse_too_large(TINY, optimizer, size - norms)
    with pytest.raises(UserError, match=r"[\d,]+ parameters .* use a smaller n_layer or n_embd"):
        refuse_too_large(TINY, optimizer, size - norms - 1)
    refuse_too_large(TINY, optimizer, size / 3.9, shards=4)
    refuse_too_large(replace(TINY, position="none"), optimizer, size - norms - 16 * 64 * 64)  # no table
    with pytest.raises(UserError, match="use a smaller n_layer or n_embd"):
        train(tiny(n_layer=10**9))  # at once, because no layer is built


def test_the_report_includes_tokens_in_a_gpus_memory(tiny, monkeypatch):
    """They take up to a quarter of the free memory, but were not counted."""
    data, runtime = open_data(tiny()), resolve_runtime("cpu", "float32", False)
    monkeypatch.setattr(memory, "free", lambda device: 2**40)
    size = 2 * data.training_tokens  # uint16
    assert "data 0 MiB" in memory_report(tiny(), GPT(TINY), replace(runtime, device=torch.device("cuda")), size)
    cases = [("cuda", 4 * size), ("cuda", 4 * size - 1), ("cpu", 2**40)]
    assert [resident_bytes(data, *case, data.training_tokens) for case in cases] == [size, 0, 0]


def test_a_short_run_does_not_keep_tokens_in_a_gpus_memory(tiny):
    """Each of eight processes read and copied OpenWebText's 18 GB at each start, also for 20 steps."""
    data = open_data(tiny())
    steps = -(-data.training_tokens // 128)
    for is_kept, cfg, processes, step in [
        (True, tiny(max_iters=steps), 1, 0),
        (False, tiny(max_iters=steps - 1), 1, 0),
        (False, tiny(max_iters=steps), 1, 1),
        (False, tiny(max_iters=steps), 2, 0),
        (True, tiny(max_iters=2 * steps), 2, 0),
        (True, tiny(max_iters=1, minutes=1.0), 8, 0),
    ]:
        size = resident_bytes(data, "cuda", 2**40, cfg.tokens_to_read(processes, step))
        assert size == (2 * data.training_tokens if is_kept else 0)


@pytest.mark.architecture("folio/training/planning/forecast.py: refuse_too_large")
def test_a_run_needs_free_memory_for_its_parameters(tiny, monkeypatch):
    shape = dict(n_layer=4, n_embd=64, n_head=4)
    size = 16 * (12 * 4 * 64**2 + (43 + 32) * 64)
    refuse_too_large(GPTConfig(block_size=32, vocab_size=43, **shape), "adamw", size / 2, shards=2)
    for free, changes in ((size - 1, shape), (0, {})):  # none is free, which differs from unknown
        monkeypatch.setattr(memory, "free", lambda device, free=free: free)
        with pytest.raises(UserError, match="use a smaller n_layer"):
            train(tiny(**changes))
