"""Everything that is decided before the first step of a run, in one place and in one value.

What trains reads the plan, and neither asks who set a value nor chooses for "auto". The number of steps of a run of
`minutes` follows when a step of its model has been measured (fit_minutes).
"""

import sys
import time
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch

from folio import UserError
from folio.base import settings
from folio.base.number_format import counted
from folio.base.roles import INEXACT, names_with
from folio.base.settings import COMMAND_LINE
from folio.base.terminal import say
from folio.checkpoints.checkpoint import MODEL_SETTINGS, Checkpoint
from folio.checkpoints.schema import PartRecord, measured_text
from folio.checkpoints.training_data import data_record
from folio.data.tokenizer import Tokenizer
from folio.data.windows import WINDOWS_VERSION, Mixture
from folio.machine import distributed, memory
from folio.machine.data_parallel import with_workers
from folio.machine.kernels import adapt, describe_attention
from folio.machine.runtime import Length, Runtime, resolve_runtime
from folio.training.loader import BatchShape, resident_bytes
from folio.training.loggers import require_packages
from folio.training.planning import forecast
from folio.training.planning.auto_size import choose_size
from folio.training.planning.budget import Budget, NoBudget, evaluation_seconds, with_time_budget
from folio.training.planning.data import adds_eot, check_data, limit_validation, open_data
from folio.training.planning.race import Evaluate, Race, TimedStep
from folio.training.planning.resume import DROPOUT, Draft, SavedRun, changed_settings, merge_checkpoint
from folio.training.planning.run_plan import Plan, TimeLimit
from folio.training.planning.train_settings import TrainSettings
from folio.training.schedule import Schedule, StepCounts
from folio.training.setup import OpenRun, open_run
from model import GPT, GPTConfig


def resolve(user_cfg: TrainSettings, timed_step: TimedStep, evaluate: Evaluate) -> Plan:
    """Resolve the user's settings with the checkpoint, the data and the machine. Raises UserError.

    timed_step, evaluate: train.py's, for size="auto", which trains models to compare them.
    """
    settings.check(user_cfg)
    lines: list[str] = []
    try:
        draft = merge_checkpoint(user_cfg, lines)
        require_packages(draft.cfg)
        if draft.cfg.size and not draft.weights:
            draft = choose_size(draft, Race(draft, open_draft, timed_step, evaluate))
        return make_plan(draft)
    except UserError:
        if lines and distributed.rank_from_env() == 0:
            say(*lines)  # they may explain the error
        raise


def open_draft(draft: Draft) -> tuple[Plan, OpenRun]:
    plan = make_plan(draft)
    return plan, open_run(plan)


def make_plan(draft: Draft) -> Plan:
    """Resolve what the settings of a draft leave open. Raises UserError."""
    cfg, saved = draft.cfg, draft.saved
    data = open_data(cfg, draft.max_val_tokens)
    now = time.perf_counter()
    start_time = now if draft.start_time is None else draft.start_time  # the budget excludes preparing the data set
    check_data(draft, data)
    config = model_config(cfg, draft.weights, data)
    runtime = find_runtime(cfg, saved, config)
    state = saved.state if saved else {}
    runtime.group.require_same(
        "checkpoints, data or settings", [state.get("step"), data.hash[:8], crc32(repr(cfg).encode())]
    )
    record, lines = make_record(draft, config, data, runtime), draft.lines
    lines.append(runtime.description)
    if saved:
        lines.append(describe_resume(saved, record["parts"][-1]))
    model = meta_model(cfg, config, runtime)
    resident = resident_memory(cfg, model, runtime, data, state.get("step", 0))
    lines.append(forecast.memory_report(cfg, model, runtime, resident))
    batch = BatchShape.of(cfg.batch_size, cfg.accumulation, runtime.group, resident > 0)
    schedule = cfg.schedule(cfg.step_counts, draft.part)
    lines += [*describe_model(draft, model, runtime), *describe_settings(cfg, batch, runtime)]
    forgets_evaluations = bool(saved) and measured_text(saved.part) != measured_text(record["parts"][-1])
    if forgets_evaluations and not cfg.eval_only:
        lines.append(
            f"from now on, the validation loss is measured on other text than before "
            f"({counted(data.validation_tokens, 'token')}): the best loss, patience, and rollbacks consider only the "
            f"evaluations from step {saved.step:,} on"
        )

    time_limit, budget = None, NoBudget()
    continues = bool(draft.head_start) and not runtime.compile  # the race was not compiled
    is_continued = bool(saved) and not draft.adds_minutes  # so that any time budget of the run continues
    if cfg.minutes and is_continued and state["budget"]:
        spent = state["budget"]["spent"] + time.perf_counter() - start_time
        budget = Budget(cfg.minutes, **{**state["budget"], "spent": spent}, step=saved.step)
    elif cfg.minutes and not is_continued and not draft.fits_minutes and not cfg.eval_only:
        lengthening = draft.lengthening if draft.adds_minutes else []
        time_limit = TimeLimit(
            cfg.minutes,
            start_time,
            draft.scaling,
            lengthening,
            draft.adds_minutes,
            draft.step_seconds if continues else None,
        )
    return Plan(
        settings=resolved_settings(cfg, runtime, schedule),
        data=data,
        model=config,
        runtime=runtime,
        batch=batch,
        counts=cfg.step_counts,
        schedule=schedule,
        budget=budget,
        time_limit=time_limit,
        weights=draft.weights,
        saved=saved,
        head_start=draft.head_start if continues else None,
        forgets_evaluations=forgets_evaluations,
        record=record,
        lines=lines,
    )


def resolved_settings(cfg: TrainSettings, runtime: Runtime, schedule: Schedule) -> TrainSettings:
    """The settings with a value for each "auto" and each default that depends on others, without their origins."""
    return cfg.replace(
        {},
        **asdict(schedule.counts),
        min_lr=schedule.min_lr,
        gradient_accumulation_steps=cfg.accumulation,
        total_batch_tokens=None,
        size=None,
        device=str(runtime.device),
        dtype=runtime.resolved["dtype"],
        compile=runtime.compile,
        workers=runtime.workers,
    )


# --- model and machine ------------------------------------------------------------------------------------------------


def model_config(cfg: TrainSettings, ckpt: Checkpoint | None, data: Mixture) -> GPTConfig:
    """The model's configuration. A checkpoint's gets the run's dropout, context and mask. Raises UserError.

    If the data's tokenizer adds an end-of-text token, the embedding table gets a row for it.
    """
    tokenizer, token = data.tokenizer, document_token(cfg, data.tokenizer)
    if not ckpt:
        shape = {name: getattr(cfg, name) for name in MODEL_SETTINGS}
        return GPTConfig(vocab_size=data.vocab_size, document_token=token, **shape)
    config = ckpt.config(**{name: getattr(cfg, name) for name in DROPOUT})
    vocab_size = config.vocab_size
    if adds_eot(ckpt, tokenizer):
        vocab_size = max(vocab_size, tokenizer.vocab_size)
    return replace(config, block_size=cfg.block_size, vocab_size=vocab_size, document_token=token)


def document_token(cfg: TrainSettings, tokenizer: Tokenizer) -> int | None:
    """The token that ends a document in the data, if attention is confined to documents.

    Raises UserError if the data have none.
    """
    if cfg.mask_documents and tokenizer.eot is None:
        raise UserError("mask_documents=True: the data is one text, without end-of-text tokens; leave it out")
    return tokenizer.eot if cfg.mask_documents else None


def find_runtime(cfg: TrainSettings, saved: SavedRun | None, config: GPTConfig) -> Runtime:
    """Resolve device, dtype, compilation, processes and workers. Sets global modes of torch. Raises UserError."""
    flops = cfg.max_iters * cfg.step_tokens * config.flops_per_token()["total"]
    layers = cfg.max_iters * cfg.accumulation * config.n_layer
    length = Length(flops, cfg.minutes and 60 * cfg.minutes, layers)
    resolved = saved.part["resolved"] if saved else None
    runtime = resolve_runtime(cfg.device, cfg.dtype, cfg.compile, cfg.deterministic, resolved, length, cfg.backend)
    if cfg.parallel == "fsdp" and not runtime.group.gloo:
        raise UserError("parallel=fsdp: start it with torchrun, or use --parallel=ddp")
    if cfg.parallel == "fsdp" and runtime.dtype == torch.float16:
        raise UserError("parallel=fsdp: it does not support float16; use --dtype=bfloat16")
    if cfg.step_graph and (runtime.device.type != "cuda" or runtime.group.gloo):
        raise UserError("step_graph=True: it needs one GPU with CUDA, without torchrun; leave it out")
    if cfg.step_graph and cfg.recompute:  # torch reads the generator's state on the host, which a capture forbids
        raise UserError("step_graph=True: a step that recomputes activations cannot be captured; use --recompute=False")
    if cfg.step_graph and isinstance(runtime.compile, str):
        raise UserError(f"step_graph=True: compile={runtime.compile} has graphs of its own; use --compile=True")
    return with_workers(runtime, cfg.workers, cfg.batch_size, cfg.block_size * cfg.n_embd, resolved)


def meta_model(cfg: TrainSettings, config: GPTConfig, runtime: Runtime) -> GPT:
    """The model on the meta device, without values. Raises UserError if it is far too large for the free memory."""
    available = forecast.available_to_process(runtime)
    if available is not None and not cfg.eval_only:
        shards = runtime.group.size if cfg.parallel == "fsdp" else 1
        forecast.refuse_too_large(config, cfg.optimizer, available, shards)
    with torch.device("meta"):
        return GPT(config)


def resident_memory(cfg: TrainSettings, model: GPT, runtime: Runtime, data: Mixture, step: int = 0) -> int:
    """Bytes of training tokens to keep in device memory from a step on, beside the model. See resident_bytes."""
    free = memory.free(runtime.device)
    if free is None or cfg.eval_only:
        return 0
    free -= forecast.memory_on(cfg, model, runtime).total
    return resident_bytes(data, runtime.device.type, free, cfg.tokens_to_read(runtime.group.size, step))


# --- what is printed and recorded -------------------------------------------------------------------------------------


def describe_resume(saved: SavedRun, part: PartRecord) -> str:
    changes = "".join(f", {name} {new} (was {old})" for name, (old, new) in part["changes"].items())
    return f"resuming from {saved.checkpoint.path}{changes}{'' if part['exact'] else '; not bitwise identical'}"


def describe_model(draft: Draft, model: GPT, runtime: Runtime) -> list[str]:
    """Describe the model, and how it differs from the checkpoint's. model: on the meta device."""
    config, lines = model.config, []
    if draft.weights:
        trained = draft.weights.config()
        if config.vocab_size > trained.vocab_size:
            token = config.vocab_size - 1
            lines.append(f"the data has an end-of-text token, which the model learns as id {token:,}")
        if config.block_size != trained.block_size:
            change = f"the model was trained with {trained.block_size}"
            if config.position == "learned":
                change = f"the first {config.block_size} of the {trained.block_size} trained positions are used"
            lines.append(f"block_size {config.block_size}: {change}")
    adapt(model, runtime)
    if runtime.compile:
        lines.append("compiling the model: the first step and the first evaluation may take a few minutes")
    parameters, attention = model.num_params()["total"], describe_attention(runtime, model)
    positions = f"{config.position} positions, dropout {config.dropout}"
    return [*lines, f"{parameters:,} parameters, {positions}, attention by {attention}"]


def describe_settings(cfg: TrainSettings, batch: BatchShape, runtime: Runtime) -> list[str]:
    """Describe settings that have no effect or a surprising one, and the sequences of a step."""
    lines = []
    if cfg.eval_only:
        return lines
    by_command = [name for name, origin in cfg.origins.items() if origin == COMMAND_LINE]
    if cfg.optimizer == "muon" and "learning_rate" in by_command and "muon_learning_rate" not in by_command:
        lines.append(
            f"learning_rate={cfg.learning_rate:g} is AdamW's, for embeddings, norms and biases; the blocks' matrices "
            f"use muon_learning_rate={cfg.muon_learning_rate:g}"
        )
    if unused := cfg.unused(runtime):
        described = [f"{name}={getattr(cfg, name)} ({reason})" for name, reason in unused.items()]
        lines.append(f"settings without effect: {', '.join(described)}")
    step = (
        f"per step: {counted(cfg.batch_size, 'sequence')} x {counted(cfg.block_size, 'token')} x "
        f"{counted(cfg.accumulation, 'micro-batch', 'micro-batches')} = {counted(cfg.step_tokens, 'token')}"
    )
    if cfg.total_batch_tokens not in (None, cfg.step_tokens):
        step += f" (the nearest to total_batch_tokens={cfg.total_batch_tokens:,})"
    if runtime.group.size > 1:
        step += f"; each process computes {batch.count} x {batch.rows} of the sequences"
    return [*lines, step]


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


def make_record(draft: Draft, config: GPTConfig, data: Mixture, runtime: Runtime) -> dict[str, Any]:
    """The content of state.json, without the progress."""
    cfg, saved = draft.cfg, draft.saved
    part: PartRecord = {
        "from_step": saved.step if saved else 0,
        "init_from": cfg.init_from,
        "after": (saved.state.get("stopped_by") or "a kill") if saved else None,
        "changes": changed_settings(type(cfg), asdict(saved.settings), asdict(cfg)) if saved else {},
        "exact": True,
        "resolved": runtime.resolved,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "decisions": None,  # Session.save fills them in
        "windows": WINDOWS_VERSION,
        "max_val_tokens": data.max_val_tokens,
    }
    if draft.turns:
        part["race"] = draft.turns
    if data.without_targets:
        part["without_targets"] = data.without_targets
    parts = []
    if saved:
        part |= {name: saved.part[name] for name in ("rollbacks", "lr_factor") if name in saved.part}
        same_machine = all(saved.part[name] == part[name] for name in ("resolved", "versions"))
        keeps_its_length = not (draft.adds_minutes or (saved.state.get("budget") and cfg.minutes))
        is_inexact = part["changes"].keys() & names_with(type(cfg), INEXACT)
        part["exact"] = same_machine and keeps_its_length and not is_inexact
        parts = saved.state["parts"]
    return {
        "run_id": saved.state.get("run_id") if saved else uuid4().hex,
        "model": asdict(config),
        "config": asdict(cfg),
        "origins": dict(cfg.origins),
        "dataset": data_record(cfg.dataset, data, draft.weights),
        "parts": [*parts, part],
        "torchrun": distributed.run_id(),
    }


# --- the number of steps of a run of `minutes` ------------------------------------------------------------------------


def fit_minutes(plan: Plan, step_seconds: float) -> Plan:
    """The plan with the number of steps that fit into its time limit, at these seconds per step. Prints lines, and may
    limit the validation text of the plan's data.

    Raises UserError if not even one step fits.
    """
    cfg, data, group, limit = plan.settings, plan.data, plan.runtime.group, plan.time_limit
    timings = step_seconds, time.perf_counter() - limit.start_time
    step_seconds, spent = group.broadcast(timings)  # so that all ranks agree
    if not limit.adds_minutes and (line := limit_validation(cfg, data, step_seconds)):
        say(line)
    evaluation = evaluation_seconds(data.validation_tokens, cfg.step_tokens, step_seconds)
    batches = data.validation_tokens / (cfg.batch_size * cfg.block_size)
    remaining = 60 * limit.minutes - spent
    counts, evaluates_less = with_time_budget(
        plan.counts, limit.minutes, remaining, step_seconds, evaluation, limit.scaling, batches
    )
    if plan.head_start:
        counts = counts.continued(plan.step, limit.scaling)
    if limit.adds_minutes:
        counts = replace(lengthened(plan, plan.step + counts.max_iters), eval_interval=counts.eval_steps)
    minutes = counted(limit.minutes, "more minute" if limit.adds_minutes else "minute")
    say(f"{minutes}, at {1000 * step_seconds:,.1f} ms per step: {counts}")
    if evaluates_less:
        say(
            f"an evaluation takes {evaluation:.2g} s, so the run evaluates every {counted(counts.eval_steps, 'step')}; "
            f"--eval_iters makes evaluations shorter"
        )
    spent = time.perf_counter() - limit.start_time
    budget = Budget(limit.minutes, step_seconds, evaluation, spent=spent, step=plan.step)
    return with_counts(plan, counts, budget)


def lengthened(plan: Plan, max_iters: int) -> StepCounts:
    """The step counts of a resumed run for another total number of steps."""
    saved_counts = plan.saved.settings.step_counts
    counts = replace(plan.counts, max_iters=saved_counts.max_iters).scaled(max_iters, plan.time_limit.lengthening)
    if plan.counts.warmup_iters == saved_counts.warmup_iters:
        counts = counts.without_second_warmup(saved_counts, plan.step)
    return counts


def with_counts(plan: Plan, counts: StepCounts, budget: Budget) -> Plan:
    """The plan with other step counts, in its schedule and in the record of the run."""
    *parts, recorded_part = plan.record["parts"]
    schedule = plan.settings.schedule(counts, recorded_part)
    config = plan.record["config"] | asdict(counts)
    part = {**recorded_part, "max_val_tokens": plan.data.max_val_tokens}
    if plan.saved:
        part["changes"] = changed_settings(type(plan.settings), asdict(plan.saved.settings), config)
    return replace(
        plan,
        settings=plan.settings.replace(**asdict(schedule.counts)),
        counts=counts,
        schedule=schedule,
        budget=budget,
        time_limit=None,
        record={**plan.record, "config": config, "parts": [*parts, part]},
    )
