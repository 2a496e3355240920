"""Forecast a run before it is started: parameters, memory, FLOPs, tokens, time, energy and price.

    python tools/plan.py config/shakespeare_char.py                           measures a few steps on this machine
    python tools/plan.py config/gpt2_124m.py --device=H100 --gpus=8           uses the GPU's data sheet
    python tools/plan.py config/gpt2_1558m.py --device=H100 --gpus=64 --parallel=fsdp --price=2.5

A data sheet does not include the time to launch kernels, so a small model takes longer than it says. Every setting of
train.py is accepted. The forecast is also written to OUT_DIR/plan.json; tools/report.py compares it with the run.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402
from annotated_types import Gt, Le  # noqa: E402

from folio import UserError, configurator, memory  # noqa: E402
from folio.budget import evaluation_seconds, with_time_budget  # noqa: E402
from folio.configurator import NonNegativeFloat, PositiveFloat, PositiveInt  # noqa: E402
from folio.files import write_json  # noqa: E402
from folio.gpus import GPUS  # noqa: E402
from folio.kernels import adapt, compile_loss  # noqa: E402
from folio.loader import BatchLoader  # noqa: E402
from folio.optim import muon_matrices  # noqa: E402
from folio.runtime import DTYPES, resolve_runtime  # noqa: E402
from folio.schedule import StepCounts  # noqa: E402
from folio.shards import data_root  # noqa: E402
from folio.start import MODEL_SETTINGS  # noqa: E402
from folio.windows import Mixture, parse_mixture  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import TrainConfig, measure_step, open_data  # noqa: E402

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    # --- forecast ---
    gpus: PositiveInt = 1  # number of GPUs, one process each
    mfu: Annotated[float, Gt(0), Le(1)] = 0.4  # model FLOPs utilization to assume where nothing is measured
    bandwidth: PositiveFloat = 50.0  # GB/s that a GPU can send: 400 Gb/s; about 400 GB/s within one machine (NVLink)
    price: NonNegativeFloat | None = None  # of one device per hour, in any currency; None: not shown
    watts: NonNegativeFloat | None = None  # of one device; None: the data sheet's, if it has one


def main(cfg: PlanConfig) -> None:
    data = find_data(cfg)
    settings = {name: getattr(cfg, name) for name in MODEL_SETTINGS}
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=data.vocab_size if data else GPT2_VOCABULARY, **settings))
    machine = by_data_sheet(cfg, model) if cfg.device in GPUS else by_measuring(cfg, model, data)
    counts = cfg.step_counts
    if cfg.minutes:
        evaluation = evaluation_seconds(validation_tokens(cfg, data), cfg.step_tokens, machine.step_seconds)
        seconds = 60 * cfg.minutes
        counts = with_time_budget(counts, cfg.minutes, seconds, machine.step_seconds, evaluation, cfg.origins)
    plan = forecast(cfg, counts, model, data, machine)
    for name, value in describe(cfg, model, data, machine, plan):
        print(f"{name:12}{value}")
    path = Path(cfg.out_dir) / "plan.json"
    try:
        write_json(path, plan)
    except OSError as error:
        raise UserError(f"out_dir={cfg.out_dir}: it cannot be written ({error}); choose another --out_dir") from None
    print(f"saved in {path}, for python tools/report.py {cfg.out_dir}")


def find_data(cfg: PlanConfig) -> Mixture | None:
    """The data sets, if all of them are prepared."""
    root = data_root(cfg.data_dir)
    prepared = all((root / name).exists() for name, _ in parse_mixture(cfg.dataset))
    return open_data(cfg) if prepared else None


def validation_tokens(cfg: PlanConfig, data: Mixture | None) -> int:
    """Tokens per evaluation; without data, as many as eval_iters says."""
    return data.validation_tokens if data else (cfg.eval_iters or 0) * cfg.batch_size * cfg.block_size


class Machine(NamedTuple):
    """One of the devices, and what a step takes on all of them."""

    description: str
    device_type: str
    dtype: torch.dtype
    memory: int | None  # bytes
    step_seconds: float
    watts: float | None
    traffic: float = 0.0  # bytes that each device sends per step


def by_data_sheet(cfg: PlanConfig, model: GPT) -> Machine:
    """A step takes as long as the process with the most sequences computes or sends, whichever is longer."""
    gpu = GPUS[cfg.device]
    dtype = DTYPES["bfloat16" if cfg.dtype == "auto" else cfg.dtype]
    computing = computing_seconds(cfg, model)
    sent = traffic(cfg, model, 4 if dtype == torch.float32 else 2)
    description = f"{cfg.gpus} x {cfg.device}, by its data sheet, at {cfg.mfu:.0%} of its {gpu.tflops:,.0f} TFLOP/s"
    seconds = max(computing, sent / (1e9 * cfg.bandwidth))
    return Machine(description, "cuda", dtype, gpu.memory * 10**9, seconds, gpu.watts, sent)


def computing_seconds(cfg: PlanConfig, model: GPT) -> float:
    """Per step, on the GPU with the most sequences."""
    tokens = -(-cfg.accumulation * cfg.batch_size // cfg.gpus) * cfg.block_size
    return tokens * model.config.flops_per_token()["total"] / (cfg.mfu * 1e12 * GPUS[cfg.device].tflops)


def traffic(cfg: PlanConfig, model: GPT, s: int) -> float:
    """Bytes that a process sends per step, in ring collectives. s: bytes of a weight in matmuls.

    DDP all-reduces the gradients in float32, which sends them twice. FSDP gathers the weights for the forward and the
    backward pass of each micro-batch, and reduce-scatters the gradients. Muon gathers the updates, of which each
    process has computed a share, and under FSDP also what they are computed from.
    """
    N = sum(p.numel() for p in model.parameters())
    sequences = -(-cfg.accumulation * cfg.batch_size // cfg.gpus)
    sent = 2 * 4 * N
    if cfg.parallel == "fsdp":
        sent = -(-sequences // cfg.batch_size) * (2 * s + 4) * N
    if cfg.optimizer == "muon":
        sent += s * sum(p.numel() for p in muon_matrices(model).values()) * (2 if cfg.parallel == "fsdp" else 1)
    return sent * (cfg.gpus - 1) / cfg.gpus


def by_measuring(cfg: PlanConfig, model: GPT, data: Mixture | None) -> Machine:
    """Run a few steps here."""
    if cfg.gpus > 1:
        raise UserError(f"gpus={cfg.gpus}: name the GPU with --device={' or '.join(GPUS)}")
    if cfg.device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device={cfg.device}: use auto, cpu, cuda, mps, or one of {', '.join(GPUS)}")
    if data is None:
        raise UserError(f"dataset={cfg.dataset}: prepare it to measure steps here, or name a GPU, as --device=H100")
    runtime = resolve_runtime(cfg.device, cfg.dtype, False, cfg.deterministic)
    print(f"measuring steps on {runtime.device}")
    available = memory.free(runtime.device)
    if available is not None:
        memory.refuse_too_large(model.config, cfg.optimizer, available)
    real = GPT(model.config, cfg.seed).to(runtime.device)
    adapt(real, runtime)
    loader = BatchLoader(data, runtime, cfg.batch_size, cfg.accumulation)
    seconds = measure_step(cfg, real, real, compile_loss(real, runtime), loader)
    description = f"steps measured on {runtime.description}"
    return Machine(description, runtime.device.type, runtime.dtype, available, seconds, None)


def forecast(cfg: PlanConfig, counts: StepCounts, model: GPT, data: Mixture | None, machine: Machine) -> dict[str, Any]:
    """The figures of plan.json; None for those that are not known."""
    evaluation = evaluation_seconds(validation_tokens(cfg, data), cfg.step_tokens, machine.step_seconds)
    evaluating = evaluation * counts.evaluations
    seconds = counts.max_iters * machine.step_seconds + evaluating
    hours = cfg.gpus * seconds / 3600
    watts = machine.watts if cfg.watts is None else cfg.watts
    return {
        "by": machine.description,
        "parameters": model.num_params()["total"],
        "memory": memory.memory_of(cfg, model, machine.dtype, machine.device_type, cfg.gpus).total,
        "steps": counts.max_iters,
        "tokens": counts.max_iters * cfg.step_tokens,
        "flops": counts.max_iters * cfg.step_tokens * model.config.flops_per_token()["total"],
        "traffic": machine.traffic,
        "tokens_per_second": cfg.step_tokens / machine.step_seconds,
        "evaluation_seconds": evaluating,
        "seconds": seconds,
        "kilowatt_hours": watts and watts * hours / 1000,
        "price": cfg.price and cfg.price * hours,
    }


def describe(
    cfg: PlanConfig, model: GPT, data: Mixture | None, machine: Machine, plan: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """The plan as lines of a name and a text."""

    def memory_with(changed: TrainConfig) -> memory.Memory:
        return memory.memory_of(changed, model, machine.dtype, machine.device_type, cfg.gpus)

    yield "by", plan["by"]
    unknown = "" if data else f", with a vocabulary of {GPT2_VOCABULARY:,}, because {cfg.dataset} is not prepared"
    yield "parameters", f"{plan['parameters']:,}{unknown}"
    yield "memory", f"{memory_with(cfg)}{f' of {memory.format_bytes(machine.memory)}' if machine.memory else ''}"
    if machine.memory and not memory_with(cfg).fits(machine.memory):
        remedy = memory.suggest_memory_fix(cfg, lambda changed: memory_with(changed).fits(machine.memory))
        yield "", f"too little; what would fit: {remedy or 'no batch_size; try --parallel=fsdp, or more --gpus'}"
    epochs = data.epochs(plan["steps"] * cfg.accumulation * cfg.batch_size) if data else {}
    epochs_text = "".join(f", {n:,.2f} epochs of {name}" for name, n in epochs.items())
    yield "tokens", f"{plan['tokens']:,}{epochs_text}, in {plan['steps']:,} steps of {cfg.step_tokens:,}"
    yield "FLOPs", f"{plan['flops']:.3g}"
    speed = f"{machine.step_seconds:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s"
    yield "time", f"{_hours(plan['seconds'])}: {speed}, and {_hours(plan['evaluation_seconds'])} of evaluations"
    if machine.traffic:
        breaks_even = f"{machine.traffic / computing_seconds(cfg, model) / 1e9:,.1f} GB/s"
        sent = f"{machine.traffic / 1e9:,.2f} GB per step from each device, which sends {cfg.bandwidth:g} GB/s"
        yield "traffic", f"{sent}; computing takes as long at {breaks_even}"
    if plan["kilowatt_hours"]:
        yield "energy", f"{plan['kilowatt_hours']:,.2f} kWh, of the devices only"
    if plan["price"]:
        yield "price", f"{plan['price']:,.2f}, at {cfg.price:g} per device and hour"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


if __name__ == "__main__":
    configurator.run_script(main, PlanConfig)
