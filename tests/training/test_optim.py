import math
import random
from dataclasses import replace

import pytest
import torch

from folio.machine import distributed
from folio.machine.distributed import Group
from folio.training import optim
from folio.training.schedule import Schedule, StepCounts
from model import GPT, GPTConfig
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tolerances import norm_error, rounding_error, within

CONFIG = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16, bias=True)


def adamw_for(model: torch.nn.Module) -> torch.optim.AdamW:
    return optim.make_optimizer(model, "adamw", 1e-2, (0.9, 0.95), 0.1)


def run_steps(model: GPT, optimizer: torch.optim.Optimizer, n: int) -> None:
    idx = torch.arange(16).view(2, 8)
    for _ in range(n):
        model(idx, idx + 1)[1].backward()
        optimizer.step()
        optimizer.zero_grad()


# --- AdamW ------------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_vectors_do_not():
    model = GPT(CONFIG)
    decayed, not_decayed = (set(map(id, group["params"])) for group in adamw_for(model).param_groups)
    for name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.dim() == 2) != (id(p) in not_decayed), name


def test_adamw_matches_its_definition(seed):
    """The algorithm of Loshchilov & Hutter 2019, in float64."""
    torch.manual_seed(seed)
    model = GPT(CONFIG).double()
    optimizer = adamw_for(model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in expected.items()}
    v = {name: torch.zeros_like(p) for name, p in expected.items()}
    for t in range(1, 4):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            m[name] = 0.9 * m[name] + 0.1 * p.grad
            v[name] = 0.95 * v[name] + 0.05 * p.grad**2
            step = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            decay = 0.1 if p.dim() == 2 else 0.0
            expected[name] = expected[name] * (1 - 1e-2 * decay) - 1e-2 * step
        optimizer.step()
    for name, p in model.named_parameters():  # each step has less than 20 roundings in a row
        torch.testing.assert_close(
            p.detach(), expected[name], **within(expected[name], rounding_error(2 * 3 * 20, torch.float64))
        )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizers_state_is_restored_by_name(kind):
    config = replace(CONFIG, position="relative")
    models = [GPT(config), GPT(config)]
    optimizers = [optim.make_optimizer(model, kind, 1e-2, (0.9, 0.95), 0.1) for model in models]
    run_steps(models[0], optimizers[0], 3)
    models[1].load_state_dict(models[0].state_dict())
    saved = {name: tensor.clone() for name, tensor in optim.state_tensors(models[0], optimizers[0]).items()}
    matrix_state = "momentum_buffer" if kind == "muon" else "exp_avg"
    assert f"transformer.h.0.attn.c_attn.weight/{matrix_state}" in saved
    assert {"transformer.wte.weight/exp_avg", "transformer.relative_bias.weight/exp_avg"} <= saved.keys()
    optim.load_state_tensors(models[1], optimizers[1], saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        run_steps(model, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_an_optimizer_on_an_apple_gpu_is_restored():
    """Muon's step counts were restored on the CPU, and the first step after a resume or a rollback was an error."""
    idx, saved, changes = torch.arange(16).view(2, 8), {}, {}
    with SimulatedGPU("mps"):
        model = GPT(CONFIG).to("mps")
        for is_restored in (False, True):
            optimizer = muon_for(model)
            if is_restored:
                optim.load_state_tensors(model, optimizer, saved)
            for step in (0, 1):
                model(idx.to("mps"), (idx + 1).to("mps"))[1].backward()
                optim.update(optimizer, optim.LearningRates(1e-2, 1e-2), step, torch.zeros((), device="mps"))
            saved = {name: tensor.cpu() for name, tensor in optim.state_tensors(model, optimizer).items()}
            changes[is_restored] = {tensor.item() for name, tensor in saved.items() if name.endswith("/step")}
    assert changes == {False: {2.0}, True: {4.0}}


def test_the_optimizer_is_fused_only_on_devices_that_support_found_inf():
    """It was also fused on Apple's GPUs, where nothing says that found_inf keeps a bad step from the weights."""
    with torch.device("meta"):
        other_device = GPT(CONFIG)
    assert not adamw_for(other_device).defaults["fused"] and adamw_for(GPT(CONFIG)).defaults["fused"]


def assert_a_bad_step_changes_nothing(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """A step with NaN gradients that is to be skipped leaves the weights and the optimizer's state as they are."""
    weights = [p.detach().clone() for p in model.parameters()]
    state = {name: tensor.clone() for name, tensor in optim.state_tensors(model, optimizer).items()}
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optim.update(optimizer, optim.LearningRates(1e-2, 1e-2), 2, torch.ones(()))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in optim.state_tensors(model, optimizer).items())


def test_an_optimizer_that_does_not_read_found_inf_skips_a_bad_step(monkeypatch):
    """torch's other optimizers ignore found_inf, so an entry in BUILDERS would have put a NaN into the weights."""
    build = lambda groups, fused, **settings: torch.optim.NAdam(groups, **settings)  # noqa: E731
    monkeypatch.setitem(optim.BUILDERS, "nadam", build)
    model = GPT(CONFIG)
    optimizer = optim.make_optimizer(model, "nadam", 1e-2, (0.9, 0.95), 0.1)
    run_steps(model, optimizer, 2)
    weights = [p.detach().clone() for p in model.parameters()]
    assert_a_bad_step_changes_nothing(model, optimizer)
    run_steps(model, optimizer, 1)
    assert not any(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


def test_a_name_without_an_optimizer_or_a_schedule_is_an_error():
    """An unknown optimizer was AdamW, and a schedule that was only named, without its formula, was "linear"."""
    with pytest.raises(KeyError, match="steepest"):
        optim.make_optimizer(GPT(CONFIG), "steepest", 1e-2, (0.9, 0.95), 0.1)
    with pytest.raises(KeyError, match="staircase"):
        Schedule(StepCounts(110), "staircase", 1.0).learning_rates_at(0)


# --- learning rate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", optim.LR_SCHEDULES)
def test_learning_rates_equal_each_schedules_formula_exactly(schedule, seed):
    """Bitwise: a resumed run computes its learning rates again, with whatever version resumes it.

    A decay of 0 steps divided by zero: --lr_schedule=wsd --max_iters=4.
    """
    rng = random.Random(seed)
    for longest in [7] * 1000 + [500] * 2000:
        lr, warmup, end, tail = 10 ** rng.uniform(-5, 0), *(rng.randrange(n) for n in (50, longest, 600))
        warmup, end, tail = warmup % longest, end + 1, tail % (longest + 1)
        low, step = lr * rng.choice([0.0, 0.1, rng.random()]), rng.choice([rng.randrange(600), rng.uniform(0, 600)])
        step %= 1.2 * longest
        begin = max(warmup, end - tail) if schedule == "wsd" else warmup  # of the decay
        if step < warmup:
            expected = lr * (step + 1) / (warmup + 1)
        elif schedule == "constant":
            expected = lr
        elif step >= end:
            expected = low
        elif step < begin:
            expected = lr
        elif schedule == "cosine":
            expected = low + 0.5 * (1.0 + math.cos(math.pi * ((step - begin) / (end - begin)))) * (lr - low)
        else:
            expected = low + (1.0 - (step - begin) / (end - begin)) * (lr - low)
        made = Schedule(StepCounts(longest, warmup, end, tail), schedule, lr, low)
        assert made.recipe_rate(step) == expected, (step, vars(made))


# --- Muon -------------------------------------------------------------------------------------------------------------


def muon_for(model: torch.nn.Module) -> optim.Muon:
    return optim.make_optimizer(model, "muon", 1e-2, (0.9, 0.95), 0.1)


@pytest.mark.parametrize("name, expected", [("float32",) * 2, ("bfloat16",) * 2, ("float16", "float32")])
def test_muon_never_multiplies_in_float16(name, expected):
    """On a GPU without bfloat16, lab/bench/training.py measured Muon in float16, with which no run trains."""
    optimizer = optim.make_optimizer(GPT(CONFIG), "muon", 1e-2, (0.9, 0.95), 0.1, getattr(torch, name))
    assert {group["dtype"] for group in optimizer.matrices()} == {getattr(torch, expected)}


def test_muon_matches_torchs_muon_and_adamw(seed):
    """torch's Muon gets queries, keys and values as three matrices. The other parameters are bitwise AdamW's."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, bias=True)
    model, adamw_model = GPT(config), GPT(config)
    muon, adamw = muon_for(model), adamw_for(adamw_model)
    for group in muon.matrices():
        group["lr"] = 0.02
    matrices: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            parts = p.detach().clone().chunk(3 if "c_attn" in name else 1)
            matrices[name] = [torch.nn.Parameter(part.clone()) for part in parts]
    torchs_muon = torch.optim.Muon([p for parts in matrices.values() for p in parts], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        for (name, p), other in zip(model.named_parameters(), adamw_model.parameters(), strict=True):
            gradient = torch.randn_like(p)
            p.grad, other.grad = gradient.clone(), gradient.clone()
            parts = matrices.get(name, [])
            for part, part_gradient in zip(parts, gradient.chunk(max(1, len(parts))), strict=False):
                part.grad = part_gradient.clone()
        for optimizer in (muon, adamw, torchs_muon):
            optimizer.step()
    for (name, p), other in zip(model.named_parameters(), adamw_model.parameters(), strict=True):
        if name in matrices:
            expected = torch.cat([part.detach() for part in matrices[name]])
            change = (expected - GPT(config).get_parameter(name)).norm()
            # 4 steps of 5 iterations, each with 4 tensors in bfloat16 that are products of the ones before
            assert (p - expected).norm() < norm_error(4 * 5 * 4, torch.bfloat16) * change, name
        else:
            assert torch.equal(p, other), name


def iterated(x: torch.Tensor) -> torch.Tensor:
    """Five iterations of the polynomial of Jordan et al. 2024."""
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


def test_orthogonalize_makes_large_singular_values_close_to_one(seed):
    """It changes only singular values, by a polynomial of them.

    The polynomial's slope is at most 4.3 up to 1.21, so that five iterations multiply errors by up to 4.3**5. Each one
    multiplies up to five matrices, whose norms, sqrt(16) * 1.21, are less than 5.
    """
    torch.manual_seed(seed)
    for rows, columns in ((16, 16), (16, 64)):
        matrices = torch.randn(3, rows, columns, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
        relative = s / s.norm(dim=1, keepdim=True)
        error = 4.3**5 * 5**5 * rounding_error(5 * (columns + 2 * rows), torch.float64)
        expected = u @ (iterated(relative)[..., None] * vh)
        torch.testing.assert_close(optim.orthogonalize(matrices), expected, rtol=0, atol=error)
    large = iterated(torch.linspace(0.002, 1, 100_000, dtype=torch.float64))
    assert large.min() > 0.68 and large.max() < 1.21
    assert optim.orthogonalize(torch.zeros(1, 4, 4)).eq(0).all()


def test_a_bad_step_changes_no_weights_or_state_of_muon():
    model = GPT(CONFIG)
    optimizer = muon_for(model)
    run_steps(model, optimizer, 2)
    assert_a_bad_step_changes_nothing(model, optimizer)


def test_the_momentum_of_other_optimizers_does_not_change():
    """An optimizer with a momentum that was added to BUILDERS got Muon's momentum."""
    p = torch.nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD([{"params": [p]}], lr=0.1, momentum=0.5)
    optim.update(optimizer, optim.LearningRates(0.1, 0.0), 0, torch.zeros(()))
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_muons_momentum_rises_from_0_85_to_0_95():
    assert [optim.muon_momentum_at(step) for step in (0, 150, 300, 5000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])


@pytest.mark.parametrize("shape", [(8, 4), (4, 8)])
def test_muon_gathers_contiguous_tensors(monkeypatch, shape):
    """Muon gathered transposed matrices, which gloo copies but NCCL refuses, so it failed on GPUs."""
    gathered = []

    def strict_all_gather(outputs, part):
        assert part.is_contiguous() and all(output.is_contiguous() for output in outputs)
        gathered.append(part)
        for output in outputs:
            output.copy_(part)

    monkeypatch.setattr(distributed.dist, "all_gather", strict_all_gather)
    weight = torch.nn.Parameter(torch.randn(shape))
    settings = dict(params=[weight], lr=1.0, weight_decay=0.0, shape=(4, 8), dtype=torch.float32)
    weight.grad = torch.randn(shape)
    optim.Muon([settings], Group(rank=1, size=2, gloo="a group")).step()
    assert len(gathered) == 1
