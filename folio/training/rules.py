"""Rules across train.py's settings, and settings that are derived from others."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from folio.base.roles import Role, names_with
from folio.base.settings import COMMAND_LINE
from folio.base.workers import under_torchrun
from folio.checkpoints.find_runs import LATEST
from folio.machine import distributed
from folio.machine.runtime import Runtime
from folio.training.guard import MIN_STEPS
from folio.training.planning.shapes import Shape
from folio.training.schedule import STEP_COUNTS, Schedule, scaled_to_override
from model import POSITIONS


def setting_problems(cfg: Any) -> list[tuple[str, str]]:
    """Violations of rules that involve several settings, as (setting, problem and remedy)."""
    problems = []
    is_complete = cfg.init_from != "resume" or cfg.origins.keys() >= asdict(cfg).keys()  # else start.py adds settings
    if is_complete and cfg.min_lr is not None and cfg.min_lr > cfg.learning_rate:
        problems.append(("min_lr", "it must be at most learning_rate"))
    multiple = POSITIONS[cfg.position].head_multiple
    divisor = multiple * cfg.n_head
    if cfg.init_from == "scratch" and cfg.n_head > 0 and cfg.n_embd % divisor:  # a checkpoint has a valid shape
        candidates = [h for h in range(1, min(cfg.n_embd, 4096) + 1) if cfg.n_embd % (multiple * h) == 0]
        nearest = sorted(sorted(candidates, key=lambda h: abs(h - cfg.n_head))[:3])
        rule = f"it must divide n_embd={cfg.n_embd}"
        if cfg.n_embd % cfg.n_head == 0:
            rule = f"position={cfg.position} needs an even head size, and n_embd / n_head is {cfg.n_embd // cfg.n_head}"
        remedy = (
            " or ".join(", ".join(map(str, nearest)).rsplit(", ", 1)) or f"n_embd={-(-cfg.n_embd // divisor) * divisor}"
        )
        problems.append(("n_head", f"{rule}; use {remedy}"))
    if cfg.out_dir == LATEST and cfg.init_from != "resume" and not Path(LATEST).is_dir():
        rule = "it names the newest run; resume that with --init_from=resume, or choose another --out_dir"
        problems.append(("out_dir", rule))
    micro_batch = cfg.batch_size * cfg.block_size
    if is_complete and cfg.total_batch_tokens is not None and cfg.gradient_accumulation_steps is not None:
        problems.append(("total_batch_tokens", "it determines gradient_accumulation_steps; give only one of them"))
    if cfg.init_from != "resume" and not cfg.is_set("dataset"):
        files = {origin.rpartition(":")[0] for origin in cfg.origins.values() if origin != COMMAND_LINE}
        if files:
            rule = (
                f"{' and '.join(sorted(files))} names no data set; add --dataset=NAME (nanoGPT's config files "
                f"without one mean --dataset=openwebtext)"
            )
            problems.append(("dataset", rule))
    if cfg.size and cfg.init_from != "resume":
        chosen = (*Shape.__dataclass_fields__, *names_with(type(cfg), Role.BATCH), "max_iters")
        by_command = [name for name in chosen if cfg.origins.get(name) == COMMAND_LINE]
        problems += [(name, "size=auto chooses it; leave out one of them") for name in by_command]
        if cfg.minutes is None:
            problems.append(("size", "auto needs the time of the run, as in --minutes=30"))
        if cfg.init_from != "scratch":
            problems.append(("size", f"auto chooses a new model, but --init_from={cfg.init_from} has one"))
        if under_torchrun():
            problems.append(("size", "auto measures the speed of one process; start it without torchrun"))
    if problems or micro_batch <= 0 or not is_complete:
        return problems
    if cfg.accumulation * cfg.batch_size >= 2**31:
        rule = "its product with batch_size must be less than 2**31"
        problems.append(("gradient_accumulation_steps", rule))
    if cfg.compile == "reduce-overhead" and cfg.accumulation > 1:
        problems.append(("compile", "CUDA graphs need steps of one micro-batch; use auto"))
    return problems


def unused_settings(cfg: Any, schedule: Schedule, runtime: Runtime) -> dict[str, str]:
    """The settings that were set but have no effect on this run because of others, each with the reason."""
    unused: dict[str, str] = {}
    decay = ("lr_decay_iters", "wsd_decay_iters", "min_lr")
    if not cfg.decay_lr:
        unused |= dict.fromkeys(("lr_schedule", "warmup_iters", *decay), "decay_lr=False")
    elif cfg.lr_schedule == "constant":
        unused |= dict.fromkeys(decay, "lr_schedule=constant")
    elif cfg.lr_schedule != "wsd":
        unused["wsd_decay_iters"] = f"lr_schedule={cfg.lr_schedule}"
    if cfg.optimizer != "muon":
        unused["muon_learning_rate"] = f"optimizer={cfg.optimizer}"
    if cfg.minutes and all(getattr(cfg, name) is None for name in STEP_COUNTS if name != "max_iters"):
        unused["max_iters"] = f"minutes={cfg.minutes:g}"
    if None not in (cfg.embd_pdrop, cfg.attn_pdrop, cfg.resid_pdrop):
        unused["dropout"] = "embd_pdrop, attn_pdrop and resid_pdrop are set"
    if schedule.max_iters <= MIN_STEPS:
        unused["skip_spikes"] = f"spikes are detected after {MIN_STEPS} steps"
    if not cfg.wandb_log:
        unused |= dict.fromkeys(("wandb_project", "wandb_run_name"), "wandb_log=False")
    if cfg.parallel == "fsdp":
        unused["sample_tokens"] = "parallel=fsdp"
    if cfg.init_from == "resume":
        unused["overwrite"] = "init_from=resume"
    if not runtime.group.gloo:
        unused["backend"] = "one process"
    if runtime.device.type == "cpu":
        unused["deterministic"] = "a CPU always is"
        if runtime.group.gloo:
            unused["backend"] = "always gloo on a CPU"
    return {name: reason for name, reason in unused.items() if cfg.is_set(name)}


def scaled_counts(cfg: Any, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the step counts. A config file's counts are scaled if the command line overrides its max_iters."""
    file_max_iters = overridden.get("max_iters", cfg.max_iters)
    counts = asdict(scaled_to_override(cfg.step_counts, origins, file_max_iters))
    old = asdict(cfg)
    scaled = [f"{name}={n:,} (was {old[name]:,})" for name, n in counts.items() if n != old[name]]
    if scaled and distributed.rank_from_env() == 0:
        print(
            f"max_iters={cfg.max_iters:,} instead of the config file's {file_max_iters:,}; scaled in proportion: "
            f"{', '.join(scaled)}"
        )
    return counts
