"""What a run is going to take, before it is started: parameters, memory, FLOPs, tokens, time, energy and price.

    python tools/plan.py config/shakespeare_char.py                           by a few steps on this machine
    python tools/plan.py config/gpt2_124m.py --device=H100 --gpus=8           by the GPU's data sheet
    python tools/plan.py config/gpt2_1558m.py --device=H100 --gpus=64 --parallel=fsdp --price=2.5

A data sheet knows nothing of the time that it takes to launch kernels: a small model will take longer than it says.
Every setting of train.py is taken. The forecast is also written to OUT_DIR/plan.json, where tools/report.py finds it
and sets it against what happened.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402

from folio import UserError, configurator, memory  # noqa: E402
from folio.files import write_json  # noqa: E402
from folio.loader import BatchLoader  # noqa: E402
from folio.optim import blocks_matrices  # noqa: E402
from folio.runtime import DTYPES, GPUS, compiled, resolve_runtime  # noqa: E402
from folio.windows import Mixture, parse_mixture  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import (  # noqa: E402
    DROPOUT,
    SHAPE,
    TrainConfig,
    leaner,
    memory_of,
    open_data,
    seconds_a_step,
)

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    # --- forecast ---
    gpus: int = 1  # how many, one process each
    mfu: float = 0.4  # share of the data sheet's FLOP/s that is reached, where nothing is measured
    bandwidth: float = 50.0  # GB/s that a GPU can send to others: 400 Gb/s; some 400 GB/s within one machine (NVLink)
    price: float | None = None  # of one device for an hour, in any currency; None: not told
    watts: float | None = None  # of one device; None: the data sheet's, where there is one

    def problems(self) -> list[tuple[str, str]]:
        """As for training."""
        found = super().problems()
        if self.gpus < 1:
            found.append(("gpus", "it must be at least 1"))
        if not 0 < self.mfu <= 1:
            found.append(("mfu", "it must be above 0 and at most 1"))
        if self.bandwidth <= 0:
            found.append(("bandwidth", "it must be above 0"))
        for name in ("price", "watts"):
            if (getattr(self, name) or 0.0) < 0:
                found.append((name, "it must not be negative"))
        return found


def main(cfg: PlanConfig) -> None:
    data = find_data(cfg)
    shape = {name: getattr(cfg, name) for name in SHAPE + DROPOUT}
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=data.vocab_size if data else GPT2_VOCABULARY, **shape))
    machine = by_data_sheet(cfg, model) if cfg.device in GPUS else by_measuring(cfg, model, data)
    if cfg.minutes:
        cfg = cfg.within(60 * cfg.minutes, machine.step_seconds, validation_tokens(cfg, data), cfg.origins)
    plan = forecast(cfg, model, data, machine)
    for name, value in told(cfg, model, data, machine, plan):
        print(f"{name:12}{value}")
    path = Path(cfg.out_dir) / "plan.json"
    try:
        write_json(path, plan)
    except OSError as error:
        raise UserError(f"out_dir={cfg.out_dir}: it cannot be written ({error}); choose another --out_dir") from None
    print(f"kept in {path}, for python tools/report.py {cfg.out_dir}")


def find_data(cfg: PlanConfig) -> Mixture | None:
    """The data sets, if all of them are prepared."""
    there = all((cfg.data_folder / name).exists() for name, _ in parse_mixture(cfg.dataset))
    return open_data(cfg) if there else None


def validation_tokens(cfg: PlanConfig, data: Mixture | None) -> int:
    """Of one evaluation; without data, those that eval_iters asks for."""
    return data.validation_tokens if data else (cfg.eval_iters or 0) * cfg.batch_size * cfg.block_size


class Machine(NamedTuple):
    """One of the devices that are to be used, and what a step takes on all of them."""

    described: str
    kind: str  # of torch's devices
    dtype: torch.dtype
    memory: int | None  # bytes there are
    step_seconds: float
    watts: float | None
    traffic: float = 0.0  # bytes that each sends a step


def by_data_sheet(cfg: PlanConfig, model: GPT) -> Machine:
    """A step takes what the process with the most sequences computes, or what it sends, whichever takes longer."""
    gpu = GPUS[cfg.device]
    dtype = DTYPES["bfloat16" if cfg.dtype == "auto" else cfg.dtype]
    computing = computing_seconds(cfg, model)
    sent = traffic(cfg, model, 4 if dtype == torch.float32 else 2)
    described = f"{cfg.gpus} x {cfg.device}, by its data sheet, at {cfg.mfu:.0%} of its {gpu.tflops:,.0f} TFLOP/s"
    seconds = max(computing, sent / (1e9 * cfg.bandwidth))
    return Machine(described, "cuda", dtype, gpu.memory * 10**9, seconds, gpu.watts, sent)


def computing_seconds(cfg: PlanConfig, model: GPT) -> float:
    """Of a step, on the GPU with the most sequences."""
    tokens = -(-cfg.accumulation * cfg.batch_size // cfg.gpus) * cfg.block_size
    return tokens * model.config.flops_per_token()["total"] / (cfg.mfu * 1e12 * GPUS[cfg.device].tflops)


def traffic(cfg: PlanConfig, model: GPT, s: int) -> float:
    """Bytes that a process sends in a step, by rings; s: bytes of a weight in matmuls.

    DDP sums the gradients, in float32: once around for the sums, once to tell them. FSDP gathers the weights for the
    forward and the backward pass of each micro-batch, and sums gradients without telling them. Muon gathers the updates
    of which each process has computed a share, and under FSDP also what they are computed from.
    """
    N = sum(p.numel() for p in model.parameters())
    sequences = -(-cfg.accumulation * cfg.batch_size // cfg.gpus)
    around = 2 * 4 * N
    if cfg.parallel == "fsdp":
        around = -(-sequences // cfg.batch_size) * (2 * s + 4) * N
    if cfg.optimizer == "muon":
        around += s * sum(p.numel() for p in blocks_matrices(model).values()) * (2 if cfg.parallel == "fsdp" else 1)
    return around * (cfg.gpus - 1) / cfg.gpus


def by_measuring(cfg: PlanConfig, model: GPT, data: Mixture | None) -> Machine:
    if cfg.gpus > 1:
        raise UserError(f"gpus={cfg.gpus}: say which, by --device={' or '.join(GPUS)}")
    if cfg.device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device={cfg.device}: take auto, cpu, cuda, mps, or one of {', '.join(GPUS)}")
    if data is None:
        raise UserError(f"dataset={cfg.dataset}: prepare it to measure steps here, or name a GPU, as --device=H100")
    runtime = resolve_runtime(cfg.device, cfg.dtype, False, cfg.deterministic)
    print(f"measuring some steps on {runtime.device}")
    available = memory.free(runtime.device)
    if available is not None:
        memory.refuse_too_large(model.config, cfg.optimizer, available)
    real = GPT(model.config, cfg.seed).to(runtime.device)
    loader = BatchLoader(data, runtime, cfg.batch_size, cfg.accumulation)
    seconds = seconds_a_step(cfg, real, real, compiled(real, runtime), loader)
    described = f"steps measured on {runtime.described}"
    return Machine(described, runtime.device.type, runtime.dtype, available, seconds, None)


def forecast(cfg: PlanConfig, model: GPT, data: Mixture | None, machine: Machine) -> dict[str, Any]:
    """The figures, as plan.json holds them; None where one cannot be known."""
    evaluating = cfg.evaluation_seconds(machine.step_seconds, validation_tokens(cfg, data))
    evaluating *= -(-cfg.max_iters // cfg.eval_steps)
    seconds = cfg.max_iters * machine.step_seconds + evaluating
    hours = cfg.gpus * seconds / 3600
    watts = machine.watts if cfg.watts is None else cfg.watts
    return {
        "by": machine.described,
        "parameters": model.num_params()["total"],
        "memory": memory_of(cfg, model, machine.dtype, machine.kind, cfg.gpus).total,
        "steps": cfg.max_iters,
        "tokens": cfg.max_iters * cfg.step_tokens,
        "flops": cfg.max_iters * cfg.step_tokens * model.config.flops_per_token()["total"],
        "traffic": machine.traffic,
        "tokens_per_second": cfg.step_tokens / machine.step_seconds,
        "evaluation_seconds": evaluating,
        "seconds": seconds,
        "kilowatt_hours": watts and watts * hours / 1000,
        "price": cfg.price and cfg.price * hours,
    }


def told(
    cfg: PlanConfig, model: GPT, data: Mixture | None, machine: Machine, plan: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """The plan in words, by lines of a name and what is to be said."""

    def needed(changed: TrainConfig) -> memory.Memory:
        return memory_of(changed, model, machine.dtype, machine.kind, cfg.gpus)

    yield "by", plan["by"]
    unknown = "" if data else f", with a vocabulary of {GPT2_VOCABULARY:,}, as {cfg.dataset} is not prepared"
    yield "parameters", f"{plan['parameters']:,}{unknown}"
    yield "memory", f"{needed(cfg)}{f' of {memory.in_words(machine.memory)}' if machine.memory else ''}"
    if machine.memory and not needed(cfg).fits(machine.memory):
        remedy = leaner(cfg, lambda changed: needed(changed).fits(machine.memory))
        yield "", f"too little; what would fit: {remedy or 'no batch_size; try --parallel=fsdp, or more --gpus'}"
    epochs = data.epochs(cfg.max_iters * cfg.accumulation * cfg.batch_size) if data else {}
    passed = "".join(f", {n:,.2f} epochs of {name}" for name, n in epochs.items())
    yield "tokens", f"{plan['tokens']:,}{passed}, in {plan['steps']:,} steps of {cfg.step_tokens:,}"
    yield "FLOPs", f"{plan['flops']:.3g}"
    speed = f"{machine.step_seconds:.3g} s a step, {plan['tokens_per_second']:,.0f} tokens/s"
    yield "time", f"{_hours(plan['seconds'])}: {speed}, and {_hours(plan['evaluation_seconds'])} of evaluations"
    if machine.traffic:
        breaks_even = f"{machine.traffic / computing_seconds(cfg, model) / 1e9:,.1f} GB/s"
        sent = f"{machine.traffic / 1e9:,.2f} GB a step from each, of {cfg.bandwidth:g} GB/s"
        yield "traffic", f"{sent}; computing takes as long at {breaks_even}"
    if plan["kilowatt_hours"]:
        yield "energy", f"{plan['kilowatt_hours']:,.2f} kWh, of the devices alone"
    if plan["price"]:
        yield "price", f"{plan['price']:,.2f}, at {cfg.price:g} a device and hour"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


if __name__ == "__main__":
    configurator.run_script(main, PlanConfig)
