"""Forecast a run before it is started: parameters, memory, FLOPs, tokens, time, energy and price.

    python tools/plan.py config/shakespeare_char.py                           measures a micro-batch on this machine
    python tools/plan.py config/gpt2_124m.py --device=H100 --gpus=8           uses the GPU's data sheet
    python tools/plan.py config/gpt2_124m.py --device=24GB --tflops=120       for a GPU that is not listed
    python tools/plan.py config/gpt2_1558m.py --device=H100 --gpus=64 --parallel=fsdp --price=2.5

A forecast from a data sheet does not include kernel launches, so a small model takes longer. Every setting of train.py
is accepted.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402
from annotated_types import Gt, Le  # noqa: E402

import train  # noqa: E402
from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.commands import command  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.settings import NonNegativeFloat, PositiveFloat, PositiveInt  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.checkpoints.checkpoint import MODEL_SETTINGS, Checkpoint  # noqa: E402
from folio.data.find_data import SCRIPTS_FOR_ANY_INPUT  # noqa: E402
from folio.data.shards import data_root, has_data  # noqa: E402
from folio.data.windows import Mixture, parse_mixture  # noqa: E402
from folio.machine import memory  # noqa: E402
from folio.machine.data_parallel import with_workers  # noqa: E402
from folio.machine.gpus import GPU, GPUS, TYPICAL_MFU, find_gpu  # noqa: E402
from folio.machine.runtime import DTYPES, resolve_runtime  # noqa: E402
from folio.training.loader import BatchShape, resident_bytes  # noqa: E402
from folio.training.optim import muon_matrices  # noqa: E402
from folio.training.planning.auto_size import MAX_SHARE, TURN_STEPS, TURNS, with_candidate  # noqa: E402
from folio.training.planning.budget import affordable_evaluations, evaluation_seconds, with_time_budget  # noqa: E402
from folio.training.planning.choice import Candidate, choose, rank_shapes, recipes_shape, seconds_by_flops  # noqa: E402
from folio.training.planning.data import limit_validation, open_data  # noqa: E402
from folio.training.planning.forecast import Memory, memory_per_process, suggest_memory_fix  # noqa: E402
from folio.training.planning.law import Forecast, RunSize  # noqa: E402
from folio.training.planning.law import forecast as forecast_loss  # noqa: E402
from folio.training.planning.measured_law import MeasuredLaw, best_laws  # noqa: E402
from folio.training.planning.resolve import model_config, resident_memory  # noqa: E402
from folio.training.planning.resume import merge_checkpoint, resolve_latest  # noqa: E402
from folio.training.planning.shapes import Shape  # noqa: E402
from folio.training.planning.step_times import StepTimes  # noqa: E402
from folio.training.schedule import StepCounts  # noqa: E402
from folio.training.setup import build_run  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import TrainConfig  # noqa: E402

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    # --- forecast ---
    device: str = "auto"  # auto, cpu, cuda, mps: measure here; or a GPU ("RTX 4090"), or a GPU's memory ("24GB")
    gpus: PositiveInt = 1  # number of GPUs, one process each
    tflops: PositiveFloat | None = None  # dense bfloat16 TFLOP/s per GPU; None: from the data sheet
    mfu: Annotated[float, Gt(0), Le(1)] = TYPICAL_MFU  # assumed model FLOPs utilization if steps are not measured
    bandwidth: PositiveFloat = 50.0  # GB/s sent per GPU: 50 for 400 Gb/s networks; about 400 with NVLink
    price: NonNegativeFloat | None = None  # per device and hour, in any currency; None: not shown
    watts: NonNegativeFloat | None = None  # per device; None: from the data sheet
    save: bool = False  # True: write OUT_DIR/plan.json, which tools/report.py compares with the run

    @property
    def planned_gpu(self) -> tuple[str, GPU] | None:
        """Name and entry of the GPU that `device` names; None if `device` is one of this machine, as in train.py."""
        return find_gpu(self.device)

    def problems(self) -> list[tuple[str, str]]:
        """Check the settings of training, and require a named GPU for --gpus and --tflops."""
        problems = super().problems()
        if self.planned_gpu:
            return problems
        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            gpus = ", ".join(GPUS)
            remedy = f"use auto, cpu, cuda, mps, a GPU ({gpus}), or for another GPU --device=12GB --tflops=N"
            return [*problems, ("device", remedy)]
        remedy = "name a GPU, such as --device=H100, or its memory, such as --device=24GB"
        if self.gpus > 1:
            problems.append(("gpus", remedy))
        if self.tflops:
            problems.append(("tflops", remedy))
        return problems


def main(user_cfg: PlanConfig) -> None:
    draft = merge_checkpoint(resolve_latest(user_cfg), [], writes=False)  # the shape may be that of trained weights
    cfg, data = draft.cfg, find_data(draft.cfg)
    if cfg.size and not draft.weights:
        cfg = choose_size(cfg, data)
        data = find_data(cfg)
    model, machine = forecast_machine(cfg, data, draft.weights)
    counts = cfg.step_counts
    if cfg.minutes:
        if machine.step_seconds is None:
            raise UserError(f"minutes={cfg.minutes:g}: the time of a step is {machine.unknown}; or set --max_iters")
        if data:
            limit_validation(cfg, data, machine.step_seconds)
        evaluation = evaluation_seconds(validation_tokens(cfg, data), cfg.step_tokens, machine.step_seconds)
        seconds, scaling = 60 * cfg.minutes, counts.scaling_with_max_iters(cfg.origins)
        batches = validation_tokens(cfg, data) / (cfg.batch_size * cfg.block_size)
        counts, _ = with_time_budget(counts, cfg.minutes, seconds, machine.step_seconds, evaluation, scaling, batches)
    plan = forecast(cfg, counts, model, data, machine)
    for name, value in describe(cfg, model, data, machine, plan):
        say(f"{name:12}{value}", indent=12)
    path = Path(cfg.out_dir) / "plan.json"
    if not cfg.save:
        say(f"add --save to write {path}, which tools/report.py compares with the run")
        return
    try:
        write_json(path, plan)
    except OSError as error:
        raise UserError(f"out_dir={cfg.out_dir} cannot be written ({error}); choose another --out_dir") from None
    say(f"saved in {path}, for python tools/report.py {cfg.out_dir}")


def forecast_machine(cfg: PlanConfig, data: Mixture | None, weights: Checkpoint | None) -> tuple[GPT, "Machine"]:
    """The model of a run, on the meta device, and its machine."""
    shape = {name: getattr(cfg, name) for name in MODEL_SETTINGS}
    config = model_config(cfg, weights, data) if data else GPTConfig(vocab_size=GPT2_VOCABULARY, **shape)
    with torch.device("meta"):
        model = GPT(config)
    return model, from_data_sheet(cfg, model, data) if cfg.planned_gpu else from_measurement(cfg, model, data)


def choose_size(cfg: PlanConfig, data: Mixture | None) -> PlanConfig:
    """The settings with the model that size="auto" will probably choose. Prints what the race before it costs.

    From the time of a step of the recipe's model on this machine, or from a data sheet, follow those of the others.
    Raises UserError.
    """
    if data is None:
        raise UserError(f"size=auto: the choice depends on the text; prepare {cfg.dataset} first")
    (laws, is_measured), step_times = best_laws(data), StepTimes(data.vocab_size)

    def rank() -> list[Candidate]:
        ranked = rank_shapes(laws, step_times, 60 * cfg.minutes, data.training_tokens, data.vocab_size)
        if not ranked:
            raise UserError(f"minutes={cfg.minutes:g}: size=auto needs more time, or more text than {cfg.dataset} has")
        return ranked

    recipe = recipes_shape(rank())
    if cfg.planned_gpu:
        tflops = cfg.tflops or cfg.planned_gpu[1].tflops
        if tflops is None:
            raise UserError(
                "size=auto: the time of a step is unknown; name a GPU, such as --device=H100, or set --tflops"
            )
        step_times = seconds_by_flops(cfg.mfu * 1e12 * tflops, data.vocab_size)
    else:
        trial = with_candidate(cfg, recipe)
        _, machine = forecast_machine(trial, find_data(trial), None)
        if machine.step_seconds:
            step_times.measured(recipe.shape, recipe.step_tokens, machine.step_seconds)
    best = choose(rank(), is_measured)
    turns = {entry.name: step_times(entry.shape, entry.step_tokens) for entry in (recipe, best)}
    line = f"about {_hours(TURNS * TURN_STEPS * sum(turns.values()))} for the speed of {' and '.join(turns)}"
    sized = with_candidate(cfg, best)
    if step_times(best.shape, best.step_tokens) * best.size.steps < 0.9 * 60 * cfg.minutes:
        line += f", and at most {MAX_SHARE:.0%} of the minutes for complete runs, because the text is small"
        sized = sized.replace(minutes=None)  # the run has fewer steps than fit
    say(f"{'race':12}{line}", indent=12)
    return sized


def find_data(cfg: PlanConfig) -> Mixture | None:
    """Open the data sets if all of them are prepared."""
    root = data_root(cfg.data_dir)
    prepared = all(has_data(root / name) for name, _ in parse_mixture(cfg.dataset))
    return open_data(cfg, cfg.max_val_tokens) if prepared else None


def validation_tokens(cfg: PlanConfig, data: Mixture | None) -> int:
    """Return the tokens per evaluation; without data, by eval_iters."""
    return data.validation_tokens if data else cfg.max_val_tokens or 0


class Machine(NamedTuple):
    """The devices of a run, and the cost of a step. None: unknown."""

    description: str
    device_type: str
    dtype: torch.dtype
    memory: int | None  # bytes per device
    step_seconds: float | None
    watts: float | None  # per device
    traffic: float = 0.0  # bytes that each device sends per step
    compute_seconds: float | None = None  # per step, on the device with the most sequences, without communication
    unknown: str = ""  # why step_seconds is None
    workers: int = 1  # on a CPU
    resident_data: int = 0  # bytes of training tokens that each device keeps

    def required_memory(self, cfg: PlanConfig, model: GPT) -> Memory:
        """The memory of each process."""
        compiled = cfg.compile if cfg.compile != "auto" else self.device_type == "cuda"  # if it is a long run
        required = memory_per_process(
            cfg, model, self.dtype, self.device_type, cfg.gpus, self.workers, compiled=bool(compiled)
        )
        return replace(required, data=self.resident_data)


def from_data_sheet(cfg: PlanConfig, model: GPT, data: Mixture | None) -> Machine:
    """Forecast a step as the maximum of compute and communication time of the process with the most sequences."""
    name, gpu = cfg.planned_gpu
    dtype = DTYPES["bfloat16" if cfg.dtype == "auto" else cfg.dtype]
    sent = traffic(cfg, model, 4 if dtype == torch.float32 else 2)
    description, available = f"{cfg.gpus} x {name}", gpu.memory * 10**9
    machine = Machine(description, "cuda", dtype, available, None, gpu.watts, sent)
    if data:
        free = available - machine.required_memory(cfg, model).total
        machine = machine._replace(resident_data=resident_bytes(data, "cuda", free, cfg.tokens_to_read(cfg.gpus)))
    tflops = cfg.tflops or gpu.tflops
    if tflops is None:
        return machine._replace(unknown="unknown: name a GPU, such as --device=H100, or set --tflops")
    source = "" if cfg.tflops else ", from its data sheet"
    description += f"{source}, at {cfg.mfu:.0%} of {tflops:,.0f} TFLOP/s"
    tokens = -(-cfg.accumulation * cfg.batch_size // cfg.gpus) * cfg.block_size
    compute_seconds = tokens * model.config.flops_per_token()["total"] / (cfg.mfu * 1e12 * tflops)
    seconds = max(compute_seconds, sent / (1e9 * cfg.bandwidth))
    return machine._replace(description=description, step_seconds=seconds, compute_seconds=compute_seconds)


def traffic(cfg: PlanConfig, model: GPT, weight_bytes: int) -> float:
    """Return the bytes that a process sends per step in ring collectives. weight_bytes: bytes of a weight in matmuls.

    DDP all-reduces the gradients in float32, which sends them twice. In each micro-batch, FSDP all-gathers the weights
    of the blocks for the forward and again for the backward pass, the other weights once, and reduce-scatters the
    gradients. Muon all-gathers the updates, of which each process computes a share, and under FSDP also their inputs.
    """
    N = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.transformer.h.parameters())
    sequences = -(-cfg.accumulation * cfg.batch_size // cfg.gpus)
    sent = 2 * 4 * N
    if cfg.parallel == "fsdp":
        sent = -(-sequences // cfg.batch_size) * (weight_bytes * (N + blocks) + 4 * N)
    if cfg.optimizer == "muon":
        gathers = 2 if cfg.parallel == "fsdp" else 1
        sent += gathers * weight_bytes * sum(p.numel() for p in muon_matrices(model).values())
    return sent * (cfg.gpus - 1) / cfg.gpus


def from_measurement(cfg: PlanConfig, model: GPT, data: Mixture | None) -> Machine:
    """Measure steps of one micro-batch on this machine, if they fit into memory.

    The time multiplied by the micro-batches per step is slightly too long, because it includes an update each time.
    """
    if data is None:
        raise UserError(f"dataset={cfg.dataset}: {how_to_measure(cfg)}; to estimate, name a GPU, such as --device=H100")
    runtime = resolve_runtime(cfg.device, cfg.dtype, False, cfg.deterministic)
    runtime = with_workers(runtime, cfg.workers, cfg.batch_size, cfg.block_size * cfg.n_embd)
    available = memory.free(runtime.device)
    device_type, dtype = runtime.device.type, runtime.dtype
    measured_on = f"steps measured on {runtime.description}"
    resident = resident_memory(cfg, model, runtime, data)
    machine = Machine(
        measured_on, device_type, dtype, available, None, None, workers=runtime.workers, resident_data=resident
    )
    if available is not None and not machine.required_memory(cfg, model).fits(available):
        unknown = "not measured, because the run does not fit into memory"
        return machine._replace(description=runtime.description, unknown=unknown)
    say(f"measuring one micro-batch on {runtime.device}; memory: {describe_memory(cfg, model, machine)}")
    micro_batch = BatchShape.of(cfg.batch_size, 1, runtime.group, resident > 0)
    run = build_run(None, model.config, cfg.replace(parallel="ddp"), data, runtime, micro_batch)
    seconds = cfg.accumulation * train.measure_step(run, cfg)
    if cfg.accumulation == 1:
        return machine._replace(step_seconds=seconds)
    description = f"one micro-batch of {cfg.accumulation:,} per step measured on {runtime.description}"
    return machine._replace(description=description, step_seconds=seconds)


def how_to_measure(cfg: PlanConfig) -> str:
    """Describe how to make it possible to measure steps here if a data set is not prepared."""
    data_dir = [f"--data_dir={cfg.data_dir}"] if cfg.data_dir else []
    names = [name for name, _ in parse_mixture(cfg.dataset) if not has_data(data_root(cfg.data_dir) / name)]
    scripts = [f"prepare/{name}.py" for name in names if name not in SCRIPTS_FOR_ANY_INPUT]
    commands = [command(script, *data_dir) for script in scripts if (ROOT / script).is_file()]
    prepare = f" ({' and '.join(commands)})" if commands else ""
    return f"to measure steps here, prepare it{prepare} or name a prepared data set with the same vocabulary size"


def forecast(cfg: PlanConfig, counts: StepCounts, model: GPT, data: Mixture | None, machine: Machine) -> dict[str, Any]:
    """Return the values of plan.json; None if unknown."""
    return {
        "by": machine.description,
        "parameters": model.num_params()["total"],
        "memory": machine.required_memory(cfg, model).total,
        "steps": counts.max_iters,
        "tokens": counts.max_iters * cfg.step_tokens,
        "flops": counts.max_iters * cfg.step_tokens * model.config.flops_per_token()["total"],
        "traffic": machine.traffic,
        **forecast_time(cfg, counts, data, machine),
    }


def forecast_time(
    cfg: PlanConfig, counts: StepCounts, data: Mixture | None, machine: Machine
) -> dict[str, float | None]:
    """Return the values of plan.json that depend on the time of a step."""
    if machine.step_seconds is None:
        return dict.fromkeys(("tokens_per_second", "evaluation_seconds", "seconds", "kilowatt_hours", "price"))
    evaluation = evaluation_seconds(validation_tokens(cfg, data), cfg.step_tokens, machine.step_seconds)
    evaluations = counts.evaluations
    if not cfg.minutes or affordable_evaluations(cfg.minutes, evaluation) >= 2:
        evaluations += 1  # the evaluation before the first step
    total_evaluation = evaluation * evaluations
    seconds = counts.max_iters * machine.step_seconds + total_evaluation
    hours = cfg.gpus * seconds / 3600
    watts = machine.watts if cfg.watts is None else cfg.watts
    return {
        "tokens_per_second": cfg.step_tokens / machine.step_seconds,
        "evaluation_seconds": total_evaluation,
        "seconds": seconds,
        "kilowatt_hours": watts and watts * hours / 1000,
        "price": cfg.price and cfg.price * hours,
    }


def describe(
    cfg: PlanConfig, model: GPT, data: Mixture | None, machine: Machine, plan: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the plan as pairs of a name and a text."""
    yield "basis", plan["by"]
    unknown = "" if data else f", with a vocabulary of {GPT2_VOCABULARY:,}, because {cfg.dataset} is not prepared"
    yield "parameters", f"{plan['parameters']:,}{unknown}"
    yield "memory", describe_memory(cfg, model, machine)
    epochs = data.epochs(plan["steps"] * cfg.accumulation * cfg.batch_size) if data else {}
    epochs_text = "".join(f", {n:,.2f} epochs of {name}" for name, n in epochs.items())
    yield "tokens", f"{plan['tokens']:,}{epochs_text}, in {plan['steps']:,} steps of {cfg.step_tokens:,}"
    if expected := expected_loss(model, data, plan):
        yield "loss", f"{expected}, by the law that tools/scaling.py measured on this data set"
    yield "FLOPs", f"{plan['flops']:.3g}"
    if machine.step_seconds is None:
        yield "time", machine.unknown
    else:
        speed = f"{machine.step_seconds:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s"
        yield "time", f"{_hours(plan['seconds'])}: {speed}, and {_hours(plan['evaluation_seconds'])} of evaluations"
    if machine.traffic:
        sent = f"{machine.traffic / 1e9:,.2f} GB per step from each device"
        if machine.compute_seconds:
            break_even = f"{machine.traffic / machine.compute_seconds / 1e9:,.1f} GB/s"
            sent += f", at {cfg.bandwidth:g} GB/s; at {break_even}, communication takes as long as computation"
        yield "traffic", sent
    if plan["kilowatt_hours"]:
        yield "energy", f"{plan['kilowatt_hours']:,.2f} kWh, of the devices only"
    if plan["price"]:
        yield "price", f"{plan['price']:,.2f}, at {cfg.price:g} per device and hour"


def describe_memory(cfg: PlanConfig, model: GPT, machine: Machine) -> str:
    """Describe the required memory, whether it fits, and if not, a remedy."""

    required, available = machine.required_memory(cfg, model), machine.memory
    if available is None:
        return str(required)
    if required.fits(available):
        return f"{required} of {memory.format_bytes(available)}: fits"
    remedy = suggest_memory_fix(cfg, lambda changed: machine.required_memory(changed, model).fits(available))
    if remedy is None:
        remedy = "a smaller model"
        if machine.device_type == "cuda":
            remedy += ", or --parallel=fsdp with more --gpus"
    nearly = f" ({memory.HEADROOM:g} times as much must be available)" if required.total <= available else ""
    return f"{required} of {memory.format_bytes(available)}: does not fit{nearly}; use {remedy}"


def expected_loss(model: GPT, data: Mixture | None, plan: dict[str, Any]) -> Forecast | None:
    """Return the expected validation loss, if the run is within the range of the data set's law."""
    law = MeasuredLaw.of(data) if data else None
    if law is None:
        return None
    config = model.config
    shape = Shape(config.n_layer, config.n_head, config.n_embd, config.block_size)
    run = RunSize(shape.matrix_weights(config.vocab_size), plan["tokens"], plan["steps"], data.training_tokens)
    return forecast_loss(law.laws, run) if law.covers(run) else None


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


if __name__ == "__main__":
    settings.run_script(main, PlanConfig)
