"""The settings of train.py as folio reads them: their types, what follows from several of them, and their rules."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from folio.base.roles import Role, names_with
from folio.base.settings import COMMAND_LINE, Settings
from folio.base.terminal import say
from folio.base.workers import under_torchrun
from folio.checkpoints.find_runs import LATEST
from folio.machine import distributed
from folio.machine.distributed import Group
from folio.machine.runtime import Runtime
from folio.training.loader import BatchShape
from folio.training.planning.shapes import Shape
from folio.training.schedule import STEP_COUNTS, Schedule, StepCounts, scaled_to_override
from model import POSITIONS


class TrainSettings(Settings):
    """The type of train.py's TrainConfig, which gives each setting its role, its default and its help.

    It is declared here because folio does not import scripts.
    """

    # --- files ---
    out_dir: str
    overwrite: bool
    init_from: str
    # --- data ---
    dataset: str
    data_dir: str | None
    block_size: int
    batch_size: int
    gradient_accumulation_steps: int | None
    total_batch_tokens: int | None
    sampling: Literal["epoch", "random"]
    mask_documents: bool
    # --- model ---
    size: Literal["auto"] | None
    n_layer: int
    n_head: int
    n_embd: int
    position: str
    dropout: float
    embd_pdrop: float | None
    attn_pdrop: float | None
    resid_pdrop: float | None
    # --- optimizer ---
    max_iters: int
    minutes: float | None
    optimizer: str
    learning_rate: float
    muon_learning_rate: float
    lr_schedule: str
    decay_lr: bool
    warmup_iters: int | None
    lr_decay_iters: int | None
    wsd_decay_iters: int | None
    min_lr: float | None
    weight_decay: float
    beta1: float
    beta2: float
    grad_clip: float
    max_bad_steps: int
    skip_spikes: float | None
    on_divergence: Literal["stop", "rollback"]
    # --- evaluation, checkpoints, logs ---
    eval_interval: int | None
    eval_iters: int | None
    eval_only: bool
    save_interval_minutes: float | None
    async_save: bool
    keep_last: int
    always_save_checkpoint: bool
    snapshots: int
    sample_tokens: int
    patience: int | None
    log_interval: int
    wandb_log: bool
    # --- machine ---
    seed: int
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    compile: bool | Literal["auto", "reduce-overhead"]
    step_graph: bool
    workers: int | None
    deterministic: bool
    # --- several processes ---
    parallel: Literal["ddp", "fsdp"]
    backend: str
    recompute: bool

    replaces: ClassVar[Mapping[str, str]]  # on a command line that resumes a run, a setting turns another one off

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        if self.total_batch_tokens is not None:
            return max(1, round(Fraction(self.total_batch_tokens, self.batch_size * self.block_size)))
        return self.gradient_accumulation_steps or 1

    @property
    def local_micro_batches(self) -> int:
        """Micro-batches per step of each process."""
        return BatchShape.of(self.batch_size, self.accumulation, Group(0, distributed.size_from_env())).count

    @property
    def step_sequences(self) -> int:
        return self.accumulation * self.batch_size

    @property
    def step_tokens(self) -> int:
        return self.step_sequences * self.block_size

    def tokens_to_read(self, processes: int, step: int = 0) -> float:
        """The training tokens that each process reads after a step; infinite if a time limit decides."""
        return math.inf if self.minutes else (self.max_iters - step) * self.step_tokens / processes

    @property
    def max_val_tokens(self) -> int | None:
        """Tokens of each validation set that eval_iters selects; None: all."""
        return self.eval_iters and self.eval_iters * self.batch_size * self.block_size

    @property
    def uses_dropout(self) -> bool:
        pdrops = (self.embd_pdrop, self.attn_pdrop, self.resid_pdrop)
        return any(self.dropout if pdrop is None else pdrop for pdrop in pdrops)

    @property
    def step_counts(self) -> StepCounts:
        return StepCounts(**{name: getattr(self, name) for name in STEP_COUNTS})

    def schedule(self, counts: StepCounts, part: Mapping[str, Any]) -> Schedule:
        """The schedule of learning rates and evaluations. part: PartRecord of the run, or empty."""
        lr_schedule = self.lr_schedule
        if not self.decay_lr:  # nanoGPT's name for a constant rate without warmup
            lr_schedule, counts = "constant", replace(counts, warmup_iters=0)
        decisions = part.get("decisions") if self.minutes else None
        return Schedule(
            counts,
            lr_schedule,
            self.learning_rate,
            self.min_lr,
            decisions,
            part.get("lr_factor", 1.0),
            self.muon_learning_rate if self.optimizer == "muon" else 0.0,
        )

    def with_overrides(self, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> "TrainSettings":
        """Scale a config file's step counts if the command line overrides its max_iters."""
        file_max_iters = overridden.get("max_iters", self.max_iters)
        counts = asdict(scaled_to_override(self.step_counts, origins, file_max_iters))
        old = asdict(self)
        scaled = [f"{name}={n:,} (was {old[name]:,})" for name, n in counts.items() if n != old[name]]
        if scaled and distributed.rank_from_env() == 0:
            say(
                f"max_iters={self.max_iters:,} instead of the config file's {file_max_iters:,}; scaled in proportion: "
                f"{', '.join(scaled)}"
            )
        return self.replace(**counts)

    def problems(self) -> list[tuple[str, str]]:
        """Violations of rules that involve several settings, as (setting, problem and remedy)."""
        resumes = self.init_from == "resume"
        is_complete = not resumes or self.origins.keys() >= asdict(self).keys()  # else resume.py adds settings
        problems = []
        only_muon = self.optimizer == "muon" and self.learning_rate == 0
        peak = "muon_learning_rate" if only_muon else "learning_rate"  # the rate that the schedule lowers to min_lr
        if is_complete and self.min_lr is not None and self.min_lr > getattr(self, peak):
            problems.append(("min_lr", f"it must be at most {peak}={getattr(self, peak):g}"))
        if self.init_from == "scratch" and self.n_head > 0:  # a checkpoint has a valid shape
            problems += self._problems_of_heads()
        if self.out_dir == LATEST and not resumes and not Path(LATEST).is_dir():
            rule = "it names the newest run; resume that with --init_from=resume, or choose another --out_dir"
            problems.append(("out_dir", rule))
        if is_complete and self.total_batch_tokens is not None and self.gradient_accumulation_steps is not None:
            problems.append(("total_batch_tokens", "it determines gradient_accumulation_steps; give only one of them"))
        if not resumes and not self.is_set("dataset"):
            files = {origin.rpartition(":")[0] for origin in self.origins.values() if origin != COMMAND_LINE}
            if files:
                rule = (
                    f"{' and '.join(sorted(files))} names no data set; add --dataset=NAME (nanoGPT's config files "
                    f"without one mean --dataset=openwebtext)"
                )
                problems.append(("dataset", rule))
        if self.size and not resumes:
            problems += self._problems_of_size()
        if problems or self.batch_size * self.block_size <= 0 or not is_complete:
            return problems
        if self.step_sequences >= 2**31:
            rule = "its product with batch_size must be less than 2**31"
            problems.append(("gradient_accumulation_steps", rule))
        if self.compile == "reduce-overhead" and self.local_micro_batches > 1:
            problems.append(("compile", "CUDA graphs need steps of one micro-batch per process; use auto"))
        return problems

    def _problems_of_heads(self) -> list[tuple[str, str]]:
        multiple = POSITIONS[self.position].head_multiple
        divisor = multiple * self.n_head
        if self.n_embd % divisor == 0:
            return []
        candidates = [h for h in range(1, min(self.n_embd, 4096) + 1) if self.n_embd % (multiple * h) == 0]
        nearest = sorted(sorted(candidates, key=lambda h: abs(h - self.n_head))[:3])
        rule = f"it must divide n_embd={self.n_embd}"
        if self.n_embd % self.n_head == 0:
            head_size = self.n_embd // self.n_head
            rule = f"position={self.position} needs an even head size, and n_embd / n_head is {head_size}"
        multiples = -(-self.n_embd // divisor)
        remedy = " or ".join(", ".join(map(str, nearest)).rsplit(", ", 1)) or f"n_embd={multiples * divisor}"
        return [("n_head", f"{rule}; use {remedy}")]

    def _problems_of_size(self) -> list[tuple[str, str]]:
        chosen = (*Shape.__dataclass_fields__, *names_with(type(self), Role.BATCH), "max_iters")
        by_command = [name for name in chosen if self.origins.get(name) == COMMAND_LINE]
        problems = [(name, "size=auto chooses it; leave out one of them") for name in by_command]
        if self.minutes is None:
            problems.append(("size", "auto needs the time of the run, as in --minutes=30"))
        if self.init_from != "scratch":
            problems.append(("size", f"auto chooses a new model, but --init_from={self.init_from} has one"))
        if self.eval_only:
            problems.append(("eval_only", "size=auto trains models to choose one; leave out one of them"))
        if under_torchrun():
            problems.append(("size", "auto measures the speed of one process; start it without torchrun"))
        return problems

    def unused(self, runtime: Runtime) -> dict[str, str]:
        """The settings that were set but have no effect because of others, each with the reason."""
        unused: dict[str, str] = {}
        decay = ("lr_decay_iters", "wsd_decay_iters", "min_lr")
        if not self.decay_lr:
            unused |= dict.fromkeys(("lr_schedule", "warmup_iters", *decay), "decay_lr=False")
        elif self.lr_schedule == "constant":
            unused |= dict.fromkeys(decay, "lr_schedule=constant")
        elif self.lr_schedule != "wsd":
            unused["wsd_decay_iters"] = f"lr_schedule={self.lr_schedule}"
        if self.optimizer != "muon":
            unused["muon_learning_rate"] = f"optimizer={self.optimizer}"
        if self.minutes and all(getattr(self, name) is None for name in STEP_COUNTS if name != "max_iters"):
            unused["max_iters"] = f"minutes={self.minutes:g}"
        if None not in (self.embd_pdrop, self.attn_pdrop, self.resid_pdrop):
            unused["dropout"] = "embd_pdrop, attn_pdrop and resid_pdrop are set"
        if not self.wandb_log:
            unused |= dict.fromkeys(("wandb_project", "wandb_run_name"), "wandb_log=False")
        if self.parallel == "fsdp":
            unused["sample_tokens"] = "parallel=fsdp"
        if self.init_from == "resume":
            unused["overwrite"] = "init_from=resume"
        if not runtime.group.gloo:
            unused["backend"] = "one process"
        if runtime.device.type == "cpu":
            unused["deterministic"] = "a CPU always is"
            if runtime.group.gloo:
                unused["backend"] = "always gloo on a CPU"
        return {name: reason for name, reason in unused.items() if self.is_set(name)}
