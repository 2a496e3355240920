"""The setup of a run before its first step: data, runtime, memory, model, state, and time budget.

cfg: train.py's settings.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from folio import UserError
from folio.base.number_format import counted
from folio.checkpoints.schema import PartRecord, measured_text
from folio.checkpoints.training_data import data_record
from folio.data.find_data import open_mixture
from folio.data.windows import WINDOWS_VERSION, Mixture
from folio.machine import distributed, memory
from folio.machine.data_parallel import DataParallelLoss, with_workers
from folio.machine.kernels import adapt, compile_loss, dropout_contexts, pad_rows, pad_vocabulary
from folio.machine.runtime import Length, Runtime, resolve_runtime
from folio.training.guard import StepGuard
from folio.training.loader import BatchLoader, resident_bytes
from folio.training.optim import LearningRates, make_optimizer
from folio.training.planning import forecast
from folio.training.planning.budget import Budget, affordable_tokens, evaluation_seconds, with_time_budget
from folio.training.schedule import StepCounts
from folio.training.start import Start, changed_settings
from folio.training.state import TrainState
from model import GPT, GPTConfig

LossFunction = Callable[[Tensor, Tensor], Tensor]  # inputs and targets, (B, T) each -> mean loss
TrainStep = Callable[[TrainState, LossFunction, BatchLoader, LearningRates, float, int], None]  # train.py's


def open_data(cfg: Any, max_val_tokens: int | None = None) -> Mixture:
    """Open the data of train.py's settings. max_val_tokens: of each data set, see ValidationWindows."""
    return open_mixture(
        cfg.dataset,
        cfg.data_dir,
        block_size=cfg.block_size,
        seed=cfg.seed,
        sampling=cfg.sampling,
        max_val_tokens=max_val_tokens,
    )


def find_runtime(cfg: Any, start: Start, gpt_config: GPTConfig) -> Runtime:
    flops = cfg.max_iters * cfg.step_tokens * gpt_config.flops_per_token()["total"]
    length, resolved = Length(flops, cfg.minutes and 60 * cfg.minutes), start.last_part.get("resolved")
    runtime = resolve_runtime(cfg.device, cfg.dtype, cfg.compile, cfg.deterministic, resolved, length, cfg.backend)
    if cfg.parallel == "fsdp" and not runtime.group.gloo:
        raise UserError("parallel=fsdp: start it with torchrun, or use --parallel=ddp")
    if cfg.parallel == "fsdp" and runtime.dtype == torch.float16:
        raise UserError("parallel=fsdp: it does not support float16; use --dtype=bfloat16")
    return with_workers(runtime, cfg.workers, cfg.batch_size, cfg.block_size * cfg.n_embd, resolved)


def make_loss(net: nn.Module, runtime: Runtime) -> LossFunction:
    """The mean loss of a batch: divided among workers, compiled, or neither. net: from `wrap`."""
    return DataParallelLoss(net, runtime) if runtime.workers > 1 else compile_loss(net, runtime)


def check_memory(cfg: Any, start: Start, gpt_config: GPTConfig, runtime: Runtime, data: Mixture) -> None:
    """Print a memory forecast. Raises UserError if far too little memory is free."""
    available = forecast.available_to_process(runtime)
    if available is not None and not cfg.eval_only:
        shards = runtime.group.size if cfg.parallel == "fsdp" else 1
        forecast.refuse_too_large(gpt_config, cfg.optimizer, available, shards)
    vocab_size = max(gpt_config.vocab_size, start.checkpoint.state["model"]["vocab_size"] if start.checkpoint else 0)
    with torch.device("meta"):
        model = GPT(replace(gpt_config, vocab_size=vocab_size))
    resident = resident_bytes(data, runtime.device.type, memory.free(runtime.device))
    print(forecast.memory_report(cfg, model, runtime, resident))


def wrap(model: GPT | None, gpt_config: GPTConfig, cfg: Any, runtime: Runtime) -> tuple[GPT, nn.Module]:
    """Move the model to its device, or build a new one if it is None, and wrap it for several processes.

    Returns the model, and the module that computes its loss: DDP's, FSDP's, or the model itself. Under FSDP no process
    holds all of a new model: it is built on the meta device, and each process fills its shards with initial values,
    which depend only on the seed and the parameters' names.
    """
    group, device = runtime.group, runtime.device
    if cfg.parallel == "fsdp":
        weights = dict(model.named_parameters()) if model else {}
        with torch.device("meta"):
            model = GPT(model.config if model else gpt_config)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        pad_vocabulary(model, runtime.size_multiple)
        adapt(model, runtime)
        blocks = model.transformer.h
        if cfg.recompute:
            distributed.checkpoint_activations(blocks)
        if runtime.compile:
            model.cross_entropy = torch.compile(model.cross_entropy)
        distributed.shard(model, blocks, group, device, runtime.dtype, bool(runtime.compile))

        def full_value(name: str) -> Tensor:
            value = weights[name] if weights else model.initial_value(name, shapes[name], cfg.seed)
            return pad_rows(value, len(model.get_parameter(name)))

        distributed.fill_shards(model, full_value)
        return model, model
    model = (model or GPT(gpt_config, cfg.seed)).to(device)
    pad_vocabulary(model, runtime.size_multiple)
    adapt(model, runtime)
    if cfg.recompute:
        distributed.checkpoint_activations(model.transformer.h, dropout_contexts if runtime.workers > 1 else None)
    return model, distributed.replicate(model, device) if group.gloo else model


def build_optimizer(model: GPT, cfg: Any, runtime: Runtime) -> torch.optim.Optimizer:
    """Build the optimizer that `cfg` selects."""
    return make_optimizer(
        model,
        cfg.optimizer,
        cfg.learning_rate,
        (cfg.beta1, cfg.beta2),
        cfg.weight_decay,
        torch.bfloat16 if runtime.dtype == torch.bfloat16 else torch.float32,
        runtime.group,
        runtime.workers,
    )


def build_state(start: Start, model: GPT, net: nn.Module, runtime: Runtime) -> TrainState:
    """Build the training state, or restore that of the run to resume. model, net: from `wrap`."""
    cfg = start.cfg
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    guard = StepGuard(runtime.device, cfg.skip_spikes, start.saved_state.get("guard"))
    state = TrainState(model, net, build_optimizer(model, cfg, runtime), scaler, guard)
    if start.resuming:
        state.load(start.saved_state, start.checkpoint.optimizer())
    return state


def restart_history(start: Start, state: TrainState, data: Mixture) -> None:
    """Forget the validation losses of a resumed run if they were measured on other text, with which the next one must
    not be compared: as the best loss, for patience, and for a rollback. Prints a line.
    """
    if not start.resuming or measured_text(start.last_part) == measured_text(part_data(data)):
        return
    state.forget_evaluations()
    print(
        f"from now on, the validation loss is measured on other text than before "
        f"({counted(data.validation_tokens, 'token')}): the best loss, patience, and rollbacks consider only the "
        f"evaluations from step {state.step:,} on"
    )


def time_budget(
    cfg: Any,
    start: Start,
    state: TrainState,
    loss_fn: LossFunction,
    loader: BatchLoader,
    train_step: TrainStep,
    start_time: float,
) -> tuple[StepCounts, Budget | None]:
    """The run's step counts and, with cfg.minutes, its time budget. start_time: in time.perf_counter()'s seconds."""
    if not cfg.minutes or start.fits_minutes:
        return cfg.step_counts, None
    if start.resuming and not start.adds_minutes:
        saved = start.saved_state.get("budget")
        if not saved:
            return cfg.step_counts, None
        spent = saved["spent"] + time.perf_counter() - start_time
        return cfg.step_counts, Budget(cfg.minutes, **{**saved, "spent": spent}, step=state.step)
    step_seconds = measure_step(train_step, cfg, state.model, state.net, loss_fn, loader)
    timings = step_seconds, time.perf_counter() - start_time
    step_seconds, spent = loader.runtime.group.broadcast(timings)  # so that all ranks agree
    data = loader.data
    if not start.adds_minutes and (line := limit_validation(cfg, data, step_seconds)):
        print(line)
    evaluation = evaluation_seconds(data.validation_tokens, cfg.step_tokens, step_seconds)
    remaining = 60 * cfg.minutes - spent
    batches = data.validation_tokens / (cfg.batch_size * cfg.block_size)
    origins = cfg.origins
    if start.adds_minutes:  # the run so far is the recipe, from which only counts of the command line are kept
        origins = {**origins, "max_iters": "checkpoint"}
    counts, evaluates_less = with_time_budget(
        cfg.step_counts, cfg.minutes, remaining, step_seconds, evaluation, origins, batches
    )
    if start.adds_minutes:
        counts = replace(start.lengthened(state.step + counts.max_iters), eval_interval=counts.eval_steps)
    minutes = counted(cfg.minutes, "more minute" if start.adds_minutes else "minute")
    print(f"{minutes}, at {1000 * step_seconds:,.1f} ms per step: {counts}")
    if evaluates_less:
        print(
            f"an evaluation takes {evaluation:.2g} s, so the run evaluates every {counted(counts.eval_steps, 'step')}; "
            f"--eval_iters makes evaluations shorter"
        )
    spent = time.perf_counter() - start_time
    return counts, Budget(cfg.minutes, step_seconds, evaluation, spent=spent, step=state.step)


def limit_validation(cfg: Any, data: Mixture, step_seconds: float) -> str | None:
    """Evaluate a part of the validation set if even two evaluations would exceed their share of a run of cfg.minutes.

    Returns a line about it, or None. A part that the user chose with eval_iters stays.
    """
    tokens = [windows.tokens for windows in data.validation.values()]
    seconds_per_token = evaluation_seconds(1, cfg.step_tokens, step_seconds)
    limit = None if cfg.eval_iters else affordable_tokens(cfg.minutes, tokens, seconds_per_token)
    if limit is None:
        return None
    data.limit_validation(limit)
    return (
        f"validation: {data.validation_tokens:,} of {sum(tokens):,} tokens, in evenly spaced contexts, the same ones "
        f"throughout, because evaluations may take a tenth of the time; --eval_iters chooses another part"
    )


def measure_step(
    train_step: TrainStep, cfg: Any, model: GPT, net: nn.Module, loss_fn: LossFunction, loader: BatchLoader
) -> float:
    """Measure the seconds per step: the median over 2 seconds, at least 5 steps, after 2 warmup steps.

    It changes no weights: the learning rates are 0, and the optimizer a new one. On a slow machine, it takes a tenth of
    cfg.minutes, but at least one warmup step and another one.
    """
    runtime = loader.runtime
    limit = 6 * cfg.minutes if cfg.minutes else math.inf  # seconds
    guard, scaler = StepGuard(runtime.device, None, None), torch.amp.GradScaler("cpu", enabled=False)
    state = TrainState(model, net, build_optimizer(model, cfg, runtime), scaler, guard)
    times: list[float] = []
    while runtime.group.broadcast(len(times) < 2 or (sum(times) < limit and (len(times) < 7 or sum(times[2:]) < 2))):
        step_start = time.perf_counter()
        train_step(state, loss_fn, loader, LearningRates(0.0, 0.0), cfg.grad_clip, cfg.seed)
        guard.send()
        guard.read(state.step)  # waits for the device
        times.append(time.perf_counter() - step_start)
    return statistics.median(times[2:] or times[1:])


def part_data(data: Mixture) -> dict[str, Any]:
    """The fields of a PartRecord about the data."""
    return {"windows": WINDOWS_VERSION, "max_val_tokens": data.max_val_tokens}


def run_record(start: Start, model: GPT, data: Mixture, counts: StepCounts, parts: list[PartRecord]) -> dict[str, Any]:
    """The content of state.json, without the progress."""
    if start.resuming:
        parts[-1]["changes"] = changed_settings(start.saved_cfg, start.cfg.replace(**asdict(counts)))
    order = {"without_targets": data.without_targets} if data.without_targets else {}
    return {
        "run_id": start.saved_state.get("run_id") if start.resuming else uuid4().hex,
        "model": asdict(model.config),
        "config": asdict(start.cfg) | asdict(counts),
        "origins": dict(start.cfg.origins),
        "dataset": data_record(start.cfg.dataset, data, start.checkpoint),
        "parts": [*parts[:-1], {**parts[-1], **part_data(data), **order}],
        "torchrun": distributed.run_id(),
    }
