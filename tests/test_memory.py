from dataclasses import replace

import pytest
import torch

from folio import UserError, distributed, memory
from folio.kernels import adapt
from folio.loader import resident_bytes
from folio.memory import memory_of, memory_report, suggest_memory_fix
from folio.runtime import Runtime, resolve_runtime
from model import GPT, GPTConfig
from train import open_data, train

TINY = GPTConfig(block_size=64, vocab_size=100, n_layer=2, n_head=4, n_embd=64, bias=False)


def kept_by_autograd(config: GPTConfig, sequences: int, dtype: torch.dtype, recompute: bool = False) -> int:
    """Bytes of the distinct pieces of memory that a forward pass keeps for the backward one, parameters aside."""
    model = GPT(config).train()
    adapt(model, Runtime(torch.device("cpu"), dtype, False, ""))
    if recompute:
        distributed.checkpoint_activations(model.transformer.h)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other takes its place
        return tensor

    idx = torch.zeros(sequences, config.block_size, dtype=torch.long)
    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(idx, idx)
    return sum(sizes.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_autograd_says(dtype, dropout):
    """The difference that one more layer makes, to the byte; in bfloat16, with the layer's weights cast."""
    config = replace(TINY, dropout=dropout)
    one, two = (kept_by_autograd(replace(config, n_layer=n), 4, dtype) for n in (1, 2))
    cast = 0 if dtype == torch.float32 else 2 * 12 * 64 * 64
    assert (two - one - cast) / (4 * 64) == memory.bytes_kept_by_block(config, dtype, "cpu")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_is_kept_is_foreseen(dtype, recompute):
    """Not less than autograd keeps, and of the rest no more than the logits and their gradients."""
    found = kept_by_autograd(TINY, 4, dtype, recompute)
    foreseen = memory.training_memory(
        GPT(TINY), 4, optimizer="adamw", dtype=dtype, device="cpu", recompute=recompute
    ).activations
    of_block = 4 * 64 * memory.bytes_kept_by_block(TINY, dtype, "cpu")
    again = of_block + 2 * 2 * 12 * 64 * 64 if recompute else 0  # a block and cast weights, in the backward pass
    assert found <= foreseen <= found + 4 * 64 * 100 * 14 + again + 4 * 64 * 64 * 4


def test_parameters_and_moments():
    model = GPT(TINY)
    N = sum(p.numel() for p in model.parameters())
    adamw = memory.training_memory(model, 1, optimizer="adamw", dtype=torch.float32, device="cpu")
    assert (adamw.weights, adamw.gradients, adamw.optimizer) == (4 * N, 4 * N, 8 * N)
    muon = memory.training_memory(model, 1, optimizer="muon", dtype=torch.float32, device="cpu")
    assert muon.optimizer == 8 * N - 4 * 2 * 12 * 64 * 64  # one moment for the blocks' matrices
    spread = memory.training_memory(model, 1, optimizer="adamw", dtype=torch.float32, device="cpu", shards=4)
    assert spread.weights == N and spread.optimizer == 2 * N
    assert adamw.total == adamw.weights + adamw.gradients + adamw.optimizer + adamw.activations


def test_what_does_not_fit_is_told_with_what_would(tiny, monkeypatch):
    model, runtime = GPT(replace(TINY, n_layer=8)), resolve_runtime("cpu", "float32", False)
    cfg = tiny(batch_size=16, gradient_accumulation_steps=2, block_size=64)
    whole = memory_of(cfg, model, torch.float32, "cpu", 1).total
    half = memory_of(replace(cfg, batch_size=8), model, torch.float32, "cpu", 1).total
    monkeypatch.setattr(memory, "free", lambda device: memory.HEADROOM * whole)
    assert "too little" not in memory_report(cfg, model, runtime, 0)
    monkeypatch.setattr(memory, "free", lambda device: memory.HEADROOM * half)
    told = memory_report(cfg, model, runtime, 0)
    assert "too little; what would fit: --batch_size=8 --gradient_accumulation_steps=4; or shard it" in told
    one = memory_of(replace(cfg, batch_size=1), model, torch.float32, "cpu", 1).total
    fix = suggest_memory_fix(cfg, lambda changed: memory_of(changed, model, torch.float32, "cpu", 1).total < one)
    assert "--recompute=True" in fix
    assert suggest_memory_fix(cfg, lambda c: False) is None
    monkeypatch.setattr(memory, "free", lambda device: None)
    assert "free" not in memory_report(cfg, model, runtime, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_model_too_large_for_the_memory_is_refused(tiny, monkeypatch, optimizer):
    """The forecast was only printed, and the run ended in the allocator's traceback or was killed by the system."""
    needed = memory.training_memory(GPT(TINY), 1, optimizer=optimizer, dtype=torch.float32, device="cpu")
    size = needed.weights + needed.gradients + needed.optimizer
    norms = 16 * 64 * 5
    memory.refuse_too_large(TINY, optimizer, size - norms)
    with pytest.raises(UserError, match=r"[\d,]+ parameters take . MiB .* free: use a smaller n_layer or"):
        memory.refuse_too_large(TINY, optimizer, size - norms - 1)
    memory.refuse_too_large(TINY, optimizer, size / 3.9, shards=4)
    with pytest.raises(UserError, match="use a smaller n_layer or n_embd"):
        train(tiny(n_layer=10**9))  # at once, as nothing of it is built


def test_tokens_that_stay_on_a_gpu_are_in_the_forecast(tiny, monkeypatch):
    """They were not counted, though they take up to a quarter of what is free."""
    model, data = GPT(TINY), open_data(tiny())
    runtime = replace(resolve_runtime("cpu", "float32", False), device=torch.device("cuda"))
    monkeypatch.setattr(memory, "free", lambda device: 2**40)
    size = 4 * data.training_tokens
    assert "data 0 MiB" in memory_report(tiny(), model, runtime, size)
    assert resident_bytes(data, "cuda", 4 * size) == size
    assert not any(resident_bytes(data, *on) for on in (("cuda", 4 * size - 1), ("cuda", None), ("cpu", 2**40)))


def test_a_containers_file_cache_is_free(tmp_path, monkeypatch):
    """It counted as used, so that after reading large files there seemed to be no memory for any model."""
    for name, content in (
        ("memory.max", 2**30),
        ("memory.current", 2**30),
        ("memory.stat", "anon 5\ninactive_file 900"),
    ):
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free(torch.device("cpu")) == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free(torch.device("cpu")) > 2**20


def test_under_fsdp_a_model_may_be_larger(tiny, monkeypatch):
    shared = dict(n_layer=4, n_embd=64, n_head=4)
    size = 16 * (12 * 4 * 64**2 + (43 + 32) * 64)
    memory.refuse_too_large(GPTConfig(block_size=32, vocab_size=43, **shared), "adamw", size / 2, shards=2)
    monkeypatch.setattr(memory, "free", lambda device: size - 1)
    with pytest.raises(UserError, match="use a smaller n_layer"):
        train(tiny(**shared))
    monkeypatch.setattr(memory, "free", lambda device: 0)  # none at all is not the same as unknown
    with pytest.raises(UserError, match="use a smaller n_layer"):
        train(tiny())


def test_what_is_free_here():
    assert 2**20 < memory.free(torch.device("cpu")) < 2**45
