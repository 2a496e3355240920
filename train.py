"""Train a GPT on a prepared data set. Every setting below can be set in a config file or as --key=value.

    python train.py config/shakespeare_char.py                            a recipe, prepared and trained
    python train.py config/shakespeare_char.py --n_layer=6 --out_dir=out6 the same, tweaked
    python train.py config/shakespeare_char.py --init_from=resume         go on where it stopped
    python train.py config/mine.py --init_from=out-shakespeare-char       finetune from a checkpoint
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py on 8 GPUs; docs/scaling.md

Dimensions: B batch (batch_size sequences), T time (block_size tokens).
"""

import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import folio.openmp  # noqa: F401  # isort: skip  (before torch)
import torch
from torch import Tensor, nn

from folio import UserError, checkpoint, configurator, convert, distributed, memory
from folio.budget import Budget, Plan
from folio.checkpoint import Checkpoint
from folio.configurator import COMMAND_LINE, Settings
from folio.distributed import Requests, name_rank_in_errors
from folio.files import locked
from folio.generate import Sampling, default_prompt, generate, text_of
from folio.guard import StepGuard
from folio.loader import BatchLoader, resident_bytes
from folio.metrics import Clock, Metrics, NullMetrics
from folio.optim import load_state_tensors, lr_at, make_optimizer, muon_momentum_at, state_tensors
from folio.randomness import derive_seed
from folio.runtime import Length, Runtime, Signals, attention_kernel, compiled, resolve_runtime
from folio.shards import Dataset, DatasetError, open_dataset
from folio.tokenizer import Tokenizer
from folio.windows import Mixture, ValidationWindows, parse_mixture
from model import GPT, GPTConfig

LossFunction = Callable[[Tensor, Tensor], Tensor]  # of inputs and targets, (B, T) each

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class TrainConfig(Settings):
    # --- files ---
    out_dir: str = "out"  # folder of the checkpoints and metrics.jsonl
    overwrite: bool = False  # True: a new run may replace the checkpoints that are in out_dir
    init_from: str = "scratch"  # "scratch", "resume", or to finetune: a run, "gpt2", a Hugging Face folder, ckpt.pt
    print_config: bool = False  # True: print all settings and exit
    # --- data ---
    dataset: str = "shakespeare_char"  # folder under data_dir, or a path; several as "a:0.7,b:0.3", by weight
    data_dir: str | None = None  # folder of the data sets; None: data/ beside train.py
    block_size: int = 1024  # T, tokens a sequence sees at most
    batch_size: int = 12  # B, sequences a forward pass (the micro-batch)
    gradient_accumulation_steps: int | None = None  # micro-batches a step; None: 1
    total_batch_tokens: int | None = None  # tokens a step, from which accumulation follows; None: off
    sampling: Literal["epoch", "random"] = "epoch"  # each window once an epoch, or nanoGPT's draws with replacement
    # --- model ---
    n_layer: int = 12  # L, blocks
    n_head: int = 12  # H, attention heads; divides n_embd
    n_embd: int = 768  # C, channels
    bias: bool = False  # biases in linear layers and norms, as GPT-2 has them
    activation: Literal["gelu_new", "gelu"] = "gelu_new"  # GPT-2's approximation; exact GELU, as nanoGPT has it
    dropout: float = 0.0  # probability, for small data; 0: off
    embd_pdrop: float | None = None  # dropout after the embeddings; None: as dropout
    attn_pdrop: float | None = None  # dropout on attention weights; None: as dropout
    resid_pdrop: float | None = None  # dropout on what each block adds; None: as dropout
    # --- optimizer ---
    max_iters: int = 600_000  # optimizer steps in all
    minutes: float | None = None  # how long the run may take; sets max_iters to what this machine does in that time
    optimizer: Literal["adamw", "muon"] = "adamw"  # "muon": Muon for the blocks' matrices, AdamW for all else
    learning_rate: float = 6e-4  # AdamW's, at its highest
    muon_learning_rate: float = 0.02  # Muon's, at its highest; it follows the same schedule
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # from learning_rate down to min_lr
    decay_lr: bool = True  # False: a constant rate without warmup, whatever lr_schedule says
    warmup_iters: int | None = None  # steps of linear warmup; 0: off; None: 2,000, or a twentieth of a shorter run
    lr_decay_iters: int | None = None  # step at which min_lr is reached; None: max_iters
    wsd_decay_iters: int | None = None  # steps of decay at the end of "wsd"; None: a fifth of lr_decay_iters
    min_lr: float | None = None  # None: a tenth of learning_rate
    weight_decay: float = 0.1  # of matrices and embeddings; 0: off
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient; 0: off
    max_bad_steps: int = 10  # stop when this many steps in a row had to be skipped, as not finite or as spikes
    skip_spikes: float | None = None  # skip steps whose loss or norm is so many deviations above its mean; None: off
    # --- evaluation, checkpoints, logs ---
    eval_interval: int | None = None  # steps between evaluations, each with a checkpoint; the last step always has
    #                                   both; None: 2,000, or a tenth of a shorter run
    eval_iters: int | None = None  # validation batches, the same ones each time; None: the whole set
    eval_only: bool = False  # True: evaluate once and exit
    save_interval_minutes: float | None = 30.0  # also save when this long has passed; None: off
    async_save: bool = True  # write checkpoints behind the run, from a copy in memory; False: wait for the disk
    keep_last: int = 2  # newest checkpoints to keep, besides the best
    always_save_checkpoint: bool = True  # False: an evaluation saves only when the loss is the best so far
    sample_tokens: int = 200  # tokens that the model writes at each evaluation, into samples.jsonl; 0: off
    patience: int | None = None  # stop after this many evaluations without improvement; None: never
    log_interval: int = 10  # steps between lines of metrics.jsonl
    wandb_log: bool = False  # log to wandb too (WANDB_MODE=offline works)
    wandb_project: str = "folio"
    wandb_run_name: str | None = None  # None: wandb makes one up
    # --- machine ---
    seed: int = 1337  # of the weights, the order of the data and dropout
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first of cuda, mps, cpu that is here
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls; auto: what this device is fast in
    compile: bool | Literal["auto", "reduce-overhead"] = "auto"  # auto: on CUDA, if it pays; the other: CUDA graphs too
    deterministic: bool = False  # True: only kernels that repeat bit for bit on a GPU (a CPU always does)
    # --- several processes, started by torchrun ---
    parallel: Literal["ddp", "fsdp"] = "ddp"  # the whole model in each; or a share of every parameter (FSDP2)
    backend: str = "nccl"  # of torch.distributed; without GPUs always gloo
    recompute: bool = False  # True: keep less for the backward pass, and compute blocks again; also in one process

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to mend it) for all that cannot work."""
        found = []

        def require(good: bool, name: str, rule: str) -> None:
            if not good:
                found.append((name, rule))

        counts = "block_size batch_size n_layer n_head n_embd max_iters log_interval keep_last max_bad_steps"
        for name in counts.split():
            require(getattr(self, name) > 0, name, "it must be at least 1")
        optional = (
            "gradient_accumulation_steps total_batch_tokens eval_interval eval_iters patience lr_decay_iters "
            "wsd_decay_iters"
        )
        for name in optional.split():
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "it must be at least 1, or None")
        for name in "learning_rate muon_learning_rate warmup_iters weight_decay grad_clip sample_tokens seed".split():
            require((getattr(self, name) or 0) >= 0, name, "it must not be negative")
        for name in "minutes save_interval_minutes skip_spikes".split():
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "it must be above 0, or None")
        require(self.min_lr is None or 0 <= self.min_lr <= self.learning_rate, "min_lr", "from 0 to learning_rate")
        for name in "dropout embd_pdrop attn_pdrop resid_pdrop beta1 beta2".split():
            require(0 <= (getattr(self, name) or 0) < 1, name, "it must be at least 0 and less than 1")
        for name, value in asdict(self).items():
            require(type(value) is not int or value < 2**63, name, "it must be below 2**63")
        for name in "out_dir init_from dataset".split():
            require(getattr(self, name).strip() != "", name, "it must not be empty")
        if self.n_head > 0:
            near = [h for h in range(1, min(self.n_embd, 4096) + 1) if self.n_embd % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.n_head))[:3])
            rule = f"n_embd={self.n_embd} is not divisible by it; take {' or '.join(map(str, near))}"
            require(self.n_embd % self.n_head == 0, "n_head", rule)
        both = self.total_batch_tokens is not None and self.gradient_accumulation_steps is not None
        require(not both, "total_batch_tokens", "gradient_accumulation_steps says the same another way; give only one")
        micro = self.batch_size * self.block_size
        if self.total_batch_tokens is not None and micro > 0 and not both:
            nearest = max(1, round(self.total_batch_tokens / micro)) * micro
            rule = f"it must be a multiple of batch_size * block_size = {micro:,}; take {nearest}"
            require(self.total_batch_tokens % micro == 0, "total_batch_tokens", rule)
        if not found:
            rule = "with batch_size it makes more than 2**31 sequences per step"
            require(self.accumulation * self.batch_size < 2**31, "gradient_accumulation_steps", rule)
        if self.compile == "reduce-overhead" and not found:
            require(self.accumulation == 1, "compile", "captured graphs need steps of one micro-batch; take auto")
        return found

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        if self.total_batch_tokens is not None:
            return self.total_batch_tokens // (self.batch_size * self.block_size)
        return self.gradient_accumulation_steps or 1

    @property
    def data_folder(self) -> Path:
        return Path(self.data_dir) if self.data_dir else ROOT / "data"

    @property
    def step_tokens(self) -> int:
        return self.accumulation * self.batch_size * self.block_size

    @property
    def warmup_steps(self) -> int:
        return min(2000, self.max_iters // 20) if self.warmup_iters is None else self.warmup_iters

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations."""
        return self.eval_interval or min(2000, -(-self.max_iters // 10))

    def stretched(self, max_iters: int, names: Iterable[str]) -> dict[str, int]:
        """These counts of steps, where they are set, in proportion to another max_iters, rounded up."""
        counts = {name: getattr(self, name) for name in names}
        return {name: -(-n * max_iters // self.max_iters) for name, n in counts.items() if n and n > 0}

    def following(self, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> "TrainConfig":
        """These settings for a max_iters that the command line gives in place of a config file's: the counts of steps
        in that file are for its own length, so they are stretched with it. What the command line says stays.
        """
        theirs = overridden.get("max_iters", self.max_iters)
        if origins.get("max_iters") != COMMAND_LINE or self.max_iters < 1 or theirs in (self.max_iters, 0):
            return self
        names = [name for name in STEP_COUNTS if origins.get(name, COMMAND_LINE) != COMMAND_LINE]
        counts = replace(self, max_iters=theirs).stretched(self.max_iters, names)
        if counts and distributed.rank_from_env() == 0:
            told = ", ".join(f"{name}={n:,} (was {getattr(self, name):,})" for name, n in counts.items())
            print(f"max_iters={self.max_iters:,} in place of the config file's {theirs:,}, and in proportion: {told}")
        return replace(self, **counts)

    def recipe_counts(self, origins: Mapping[str, str]) -> list[str]:
        """The counts of steps that belong to max_iters, and are stretched with it: those set in the same place.

        A count that the command line gives without a max_iters stays; so do all counts where nobody set a max_iters.
        """
        place = origins.get("max_iters")
        if place is None and origins:
            return []
        given = [name for name in STEP_COUNTS if origins.get(name) == COMMAND_LINE and place != COMMAND_LINE]
        return [name for name in STEP_COUNTS if name not in given]

    def within(
        self, seconds: float, step_seconds: float, val_tokens: int, origins: Mapping[str, str] | None = None
    ) -> "TrainConfig":
        """The same recipe with as many steps as there is time for; what is counted in steps is stretched with them.

        Time goes into steps, into as many evaluations as before, and 1 second for the end. origins: where each setting
        was set. Raises UserError for too little time.
        """
        names = self.recipe_counts(origins or {})
        evaluation = self.evaluation_seconds(step_seconds, val_tokens)
        if self.eval_interval is None or "eval_interval" in names:
            recipe = self if self.eval_interval else replace(self, eval_interval=-(-self.max_iters // 10))
            names = [*dict.fromkeys([*names, "eval_interval"])]
            evaluations = -(-self.max_iters // recipe.eval_steps)
            steps = int((seconds - 1 - evaluations * evaluation) / step_seconds)
        else:
            recipe = self
            steps = int((seconds - 1 - evaluation) / (step_seconds + evaluation / self.eval_interval))
        if steps < 1:
            raise UserError(
                f"minutes={self.minutes:g}: it is too short where a step takes {step_seconds:.2g} s, and an "
                f"evaluation {evaluation:.2g} s; take more, a smaller model, or --eval_iters"
            )
        return replace(self, **{**recipe.stretched(steps, names), "max_iters": steps})

    def evaluation_seconds(self, step_seconds: float, val_tokens: int) -> float:
        """Of one: a token costs a third of what it costs in training, as there is no backward pass."""
        return val_tokens / self.step_tokens * step_seconds / 3

    def learning_rate_at(self, step: float) -> float:
        decay_iters = self.lr_decay_iters or self.max_iters
        return lr_at(
            step,
            schedule=self.lr_schedule if self.decay_lr else "constant",
            learning_rate=self.learning_rate,
            min_lr=self.learning_rate / 10 if self.min_lr is None else self.min_lr,
            warmup_iters=self.warmup_steps,
            lr_decay_iters=decay_iters,
            wsd_decay_iters=decay_iters // 5 if self.wsd_decay_iters is None else self.wsd_decay_iters,
        )


SHAPE = (
    "block_size",
    "n_layer",
    "n_head",
    "n_embd",
    "bias",
    "activation",
)  # of the model, given by a checkpoint that has one
DROPOUT = ("dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")  # free to change
FIXED = (*SHAPE, "seed", "sampling", "optimizer")  # what a run that is continued cannot change
INEXACT = (
    "batch_size",
    "gradient_accumulation_steps",
    "total_batch_tokens",
    "dtype",
    "device",
    "compile",
    "parallel",
    "recompute",
)
LAST_SAMPLE = 300  # tokens that are printed at the end of a run
STEP_COUNTS = ("max_iters", "warmup_iters", "lr_decay_iters", "wsd_decay_iters", "eval_interval")
PLACES = ("out_dir", "data_dir", "dataset", "init_from", "overwrite", "print_config", "eval_only")  # of no consequence


class TrainingError(UserError):
    """A run that cannot go on, though its settings are possible."""

    exit_code = 1


class Outcome(NamedTuple):
    """What came of a run."""

    best: float  # the lowest validation loss, in nats per token
    step: int
    max_iters: int
    out_of_patience: bool
    cfg: TrainConfig  # with the counts of steps that a budget of time came to


def train(cfg: TrainConfig) -> float:
    """Train as `cfg` says; returns the lowest validation loss, in nats per token. Raises UserError."""
    return run(cfg).best


def run(cfg: TrainConfig) -> Outcome:
    """`train`, with all that came of it."""
    configurator.check(cfg)
    out_dir, existed = Path(cfg.out_dir), os.path.exists(cfg.out_dir)
    try:
        with ExitStack() as stack:
            if not cfg.eval_only and distributed.rank_from_env() == 0:
                try:
                    busy = f"out_dir={out_dir}: another run is writing there; wait for it, or choose another --out_dir"
                    timeout = 60.0 if distributed.under_torchrun() else 0.0  # a lost machine's lock may outlive it
                    stack.enter_context(locked(out_dir / ".lock", busy, timeout))
                except OSError as error:
                    raise cannot_write(out_dir, error) from None
            return run_alone(cfg)
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, or not there
                out_dir.rmdir()


def cannot_write(out_dir: Path, error: OSError) -> UserError:
    return UserError(f"out_dir={out_dir}: it cannot be written ({error}); choose another --out_dir")


def run_alone(cfg: TrainConfig) -> Outcome:
    """The body of `train`, once out_dir is this process's own."""
    began = time.perf_counter()
    given, out_dir = cfg.origins, Path(cfg.out_dir)

    # --- start: from nothing, from where this run stopped, or from another run's weights ---
    start = None
    may_be_again = distributed.under_torchrun() and checkpoint.exists(out_dir)
    if may_be_again and distributed.restarted(checkpoint.written_by(out_dir)):
        cfg = replace(cfg, init_from="resume", overwrite=False)
    resuming = cfg.init_from == "resume"
    if resuming:
        start = checkpoint.load(out_dir)
    elif cfg.init_from != "scratch":
        if not Path(cfg.init_from).exists() and cfg.init_from not in convert.HUB:
            known = ", ".join(["scratch", "resume", *convert.HUB])
            raise UserError(f"init_from={cfg.init_from}: it is not {known}, or the folder of a checkpoint")
        start = convert.load(cfg.init_from)
    if start:
        cfg = with_shape_of(cfg, start, given)
    earlier = start.state if resuming else {}
    if resuming and cfg.minutes:
        if cfg.minutes != earlier["config"].get("minutes") and not cfg.eval_only:
            max_iters = Plan(earlier["config"]["max_iters"], earlier.get("decisions")).max_iters
            raise UserError(
                f"minutes={cfg.minutes:g}: the run in {out_dir} was given its length when it began; resume it without "
                f"--minutes, and with --max_iters={max_iters} or another"
            )
        cfg = replace(cfg, **{name: earlier["config"][name] for name in STEP_COUNTS})  # as the time was divided then
    elif resuming and given.get("warmup_iters") != COMMAND_LINE:
        before = TrainConfig(**{name: earlier["config"][name] for name in ("max_iters", "warmup_iters")}).warmup_steps
        if before <= earlier["step"] < cfg.warmup_steps:  # a warmup that is over stays over in a longer run
            cfg = replace(cfg, warmup_iters=before)
    changes = changes_since(start, cfg) if resuming else {}
    if checkpoint.exists(out_dir) and not (resuming or cfg.overwrite or cfg.eval_only):
        raise UserError(
            f"{out_dir} holds the checkpoints of an earlier run: continue it with --init_from=resume, "
            f"give this one another --out_dir, or replace them with --overwrite=True"
        )

    # --- data ---
    data = open_data(cfg)
    tokenizer = data.tokenizer
    if start and start.tokenizer.hash != tokenizer.hash:
        raise UserError(
            f"the checkpoint {start.path} was trained with another tokenizer ({start.tokenizer.kind}, "
            f"{start.tokenizer.vocab_size:,} tokens) than {cfg.dataset} ({tokenizer.kind}, "
            f"{tokenizer.vocab_size:,} tokens), so its ids would mean other text; prepare the data with this one: "
            f"--tokenizer={start.path}"
        )
    if resuming and earlier["dataset"]["hash"] != data.hash:
        raise UserError(
            f"{cfg.dataset} is not the data that this run began with; begin a run from its weights with "
            f"--init_from={out_dir} and another --out_dir"
        )

    # --- machine ---
    shape = GPTConfig(vocab_size=data.vocab_size, **{name: getattr(cfg, name) for name in SHAPE + DROPOUT})
    length = Length(
        cfg.max_iters * cfg.step_tokens * shape.flops_per_token()["total"], cfg.minutes and 60 * cfg.minutes
    )
    runtime = resolve_runtime(
        cfg.device, cfg.dtype, cfg.compile, cfg.deterministic, earlier.get("resolved"), length, cfg.backend
    )
    group = runtime.group
    if cfg.parallel == "fsdp" and (not group.gloo or runtime.dtype == torch.float16):
        remedy = "start it with torchrun" if not group.gloo else "it scales no losses; take --dtype=bfloat16"
        raise UserError(f"parallel=fsdp: {remedy}")
    group.require_same("checkpoints, data or settings", [earlier.get("step"), data.hash[:8], crc32(repr(cfg).encode())])
    print(runtime.described)
    resumes = earlier.get("resumes", [])
    if resuming:
        exact = not changes.keys() & set(INEXACT) and earlier["resolved"] == runtime.resolved
        exact = exact and earlier["versions"] == versions()
        after = earlier.get("stopped_by") or "a kill"
        resumes = [*resumes, {"step": earlier["step"], "after": after, "changes": changes, "exact": exact}]
        if cfg.minutes:
            told = f"the run's length is decided again after step {earlier['step']:,}"
            resumes[-1] |= {"decisions": told, "exact": False}
            exact = False
        told = "".join(f", {name} {now} (was {before})" for name, (before, now) in changes.items())
        print(f"going on from {start.path}{told}{'' if exact else '; no longer bit for bit'}")

    # --- model ---
    if (free := memory.free(runtime.device)) is not None and not cfg.eval_only:
        parts = group.size if cfg.parallel == "fsdp" else 1
        memory.refuse_too_large(shape, cfg.optimizer, free / processes_sharing_memory(runtime), parts)
    with torch.device("meta"):
        planned = GPT(replace(shape, vocab_size=start.state["model"]["vocab_size"]) if start else shape)
    print(memory_told(cfg, planned, runtime, data))
    model = None
    if start:
        model = start.build(GPT, GPTConfig, **{name: getattr(cfg, name) for name in DROPOUT})
        if cfg.block_size < model.config.block_size:
            print(f"block_size {cfg.block_size}: of the {model.config.block_size} trained positions the first are kept")
            model.crop_block_size(cfg.block_size)
    model, spread = wrap(model, shape, cfg, runtime)
    loss_of = compiled(spread, runtime)  # `model` stays the plain module, and is what gets saved
    print(
        f"{model.num_params()['total']:,} parameters, dropout {cfg.dropout}, "
        f"attention by {attention_kernel(runtime, model.config)}"
    )
    if cfg.eval_only:
        val_loss, val_losses = validate(model, loss_of, data, runtime, cfg.batch_size)
        print(f"validation loss {val_loss:.4f}{apart(val_losses)}")
        return Outcome(val_loss, earlier.get("step", 0), cfg.max_iters, False, cfg)

    # --- state ---
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    guard = StepGuard(runtime.device, cfg.skip_spikes, earlier.get("guard"))
    state = TrainState(model, spread, optimizer_for(model, cfg, runtime), scaler, guard)
    if resuming:
        state.load(start)
    group.barrier()  # before anything in out_dir changes, all have read it

    # --- length ---
    loader = BatchLoader(data, runtime, cfg.batch_size, cfg.accumulation)
    budget = None
    if cfg.minutes and earlier.get("budget"):
        spent = earlier["budget"]["spent"] + time.perf_counter() - began
        budget = Budget(cfg.minutes, **{**earlier["budget"], "spent": spent}, step=state.step)
    elif cfg.minutes and not resuming:
        step_seconds = seconds_a_step(cfg, model, spread, loss_of, loader)
        remaining = 60 * cfg.minutes - (time.perf_counter() - began)
        cfg = group.broadcast(cfg.within(remaining, step_seconds, data.validation_tokens, given))
        counts = ", ".join(f"{name} {n:,}" for name in STEP_COUNTS if (n := getattr(cfg, name)))
        print(f"{cfg.minutes:g} minutes, at {1000 * step_seconds:,.1f} ms per step: {counts}")
        an_evaluation = cfg.evaluation_seconds(step_seconds, data.validation_tokens)
        budget = Budget(cfg.minutes, step_seconds, an_evaluation, spent=time.perf_counter() - began)
    plan = Plan(cfg.max_iters, earlier.get("decisions") if cfg.minutes else None)
    step_sequences, step_tokens = loader.sequences, cfg.step_tokens
    print(data.described(plan.max_iters * step_sequences))
    if cfg.decay_lr and cfg.lr_schedule != "constant" and cfg.warmup_steps >= plan.max_iters:
        print(f"warmup_iters={cfg.warmup_steps:,}: the run of {plan.max_iters:,} steps ends before its warmup does")
    print(
        f"a step: {cfg.batch_size} sequences x {cfg.block_size} tokens x {cfg.accumulation} micro-batches = "
        f"{step_tokens:,} tokens"
        + (f"; each process computes {loader.count} x {loader.rows} sequences of them" if group.size > 1 else "")
    )

    if state.step >= plan.max_iters:
        print(f"nothing to train: {state.step:,} of {plan.max_iters:,} steps are done; give a larger --max_iters")

    # --- loop ---
    record = {  # what a checkpoint says of the run, besides how far it has come
        "resolved": runtime.resolved,
        "dataset": {"folder": cfg.dataset, "hash": data.hash},
        "model": asdict(model.config),
        "config": asdict(cfg),
        "resumes": resumes,
        "versions": versions(),
        "torchrun": distributed.run_id(),
    }
    patience = cfg.patience or math.inf
    peak_flops, flops_per_token = (runtime.peak_flops() or 0.0) * group.size, model.config.flops_per_token()["total"]
    try:
        metrics = NullMetrics()
        if group.rank == 0:
            out_dir.mkdir(parents=True, exist_ok=True)
            checkpoint.clear_unfinished(out_dir)
            metrics = Metrics(out_dir, state.step, plan.max_iters, asdict(cfg), earlier.get("wandb_id"))
    except OSError as error:
        raise cannot_write(out_dir, error) from None
    if cfg.overwrite and not resuming and group.rank == 0:
        shutil.rmtree(out_dir / "skipped", ignore_errors=True)
    replaces = cfg.overwrite and not resuming  # once this run has a checkpoint of its own
    saver, requests = checkpoint.Saver(out_dir, tokenizer, cfg.keep_last, replaces), Requests(group)
    with metrics, saver, Signals() as signals, name_rank_in_errors(group, lambda: state.step):
        clock, saved_at = Clock(), time.perf_counter()
        samples = cfg.sample_tokens and group.rank == 0 and cfg.parallel == "ddp"  # else no process has the whole model
        stopped_by = unread = None  # unread: a step whose numbers are on their way here
        several, val_losses = len(data.validation) > 1, {}

        def log(step: int, evaluating: bool = False) -> float | None:
            """Wait for the step; write its numbers, and what went wrong since the last time. The validation loss."""
            nonlocal val_losses
            judged = guard.read(step)
            rate = clock.rate(step)
            if budget:
                budget.mark(step)  # now the device is known to have finished it
            for found in judged:
                if found.skipped and group.rank == 0:
                    first = (found.step - 1) * step_sequences
                    inputs, _ = data.batch(first, step_sequences)
                    metrics.say(guard.record(out_dir, found, first, inputs, tokenizer))
            val_loss = None
            if evaluating:
                evaluation_began = time.perf_counter()
                val_loss, val_losses = validate(model, loss_of, data, runtime, cfg.batch_size)
                if budget:
                    budget.note_evaluation(time.perf_counter() - evaluation_began)
            if reason := guard.diagnose(model, cfg.max_bad_steps, val_loss):
                raise TrainingError(f"stopped at step {step:,}: {reason}")
            line = {
                "step": step,
                "tokens": step * step_tokens,
                "loss": judged[-1].loss,
                "val_loss": val_loss,
                **({f"val_loss/{name}": loss for name, loss in val_losses.items()} if evaluating and several else {}),
                **{f"epochs/{name}": n for name, n in data.epochs(step * step_sequences).items()},
                "lr": cfg.learning_rate_at(plan.recipe_step(step - 1)),
                "grad_norm": judged[-1].grad_norm,
                "skipped": guard.skipped,
                "tokens_per_second": rate and rate * step_tokens,
                "mfu": rate * step_tokens * flops_per_token / peak_flops if rate and peak_flops else None,
                "peak_memory": runtime.peak_memory(),
            }
            metrics.log(line)
            clock.start(step)
            return val_loss

        def settle(last: bool = False) -> None:
            """Wait for the checkpoint that is being written, if there is one."""
            failed = group.broadcast(saver.wait())
            if not failed:
                return
            state.best, state.best_step = before  # what could not be saved is not the best there is
            if last:
                raise TrainingError(f"{failed}; the checkpoints before it are as they were")
            metrics.say(f"{failed}; training goes on, and the next save tries again")

        def replan(step: int) -> None:
            """Decide on the run's length again, by what steps and evaluations take now; the same in all processes."""
            if budget is None or step >= plan.max_iters:
                return
            max_iters = group.broadcast(budget.max_iters(step, plan, cfg.eval_steps))
            if max_iters != plan.max_iters:
                metrics.say(
                    f"step {step:,}: a step takes {1000 * budget.step_seconds:,.1f} ms now, so {cfg.minutes:g} minutes "
                    f"are {max_iters:,} steps, not {plan.max_iters:,}"
                )
                plan.decide(step, max_iters)
                metrics.lengthen(max_iters)
            budget.start_stretch(step)

        if resuming:
            replan(state.step)
        while state.step < plan.max_iters and not stopped_by and state.stale < patience:
            take_step(cfg, plan, state, loss_of, loader)
            step = state.step
            metrics.advance()
            if unread:  # only now, when the device has the next step to do
                log(unread)
                unread = None

            # --- log, evaluate, save ---
            if budget and not runtime.runs_ahead:
                budget.mark(step)
            late = budget is not None and budget.is_late
            minutes = (time.perf_counter() - saved_at) / 60
            asked = signals.save or minutes >= (cfg.save_interval_minutes or math.inf)
            # Each step: no signal ends a run unsaved.
            stopped_by, saving, late = requests.agree(signals.stop, asked, late)
            if late and not plan.evaluates(step, cfg.eval_steps):
                replan(step)
            evaluating, saving = plan.evaluates(step, cfg.eval_steps), stopped_by or saving
            if not (evaluating or saving or step % cfg.log_interval == 0 or step == 1):
                continue
            guard.send()
            if not (evaluating or saving) and runtime.runs_ahead:
                unread = step
                continue
            val_loss = log(step, evaluating)
            if not (evaluating or saving):
                continue
            if evaluating:  # before the save, which keeps what is decided
                replan(step)
            saving_began = time.perf_counter()
            settle()
            before = state.best, state.best_step
            improved = evaluating and state.improves(val_loss)
            ending = step == plan.max_iters or state.stale >= patience
            if saving or ending or improved or cfg.always_save_checkpoint:
                after = signal.Signals(stopped_by).name if stopped_by else "its end" if ending else None
                kept = {**record, **state.kept(), "stopped_by": after, "wandb_id": metrics.wandb_id}
                kept |= {"decisions": [*plan.decisions], "budget": budget and budget.state()}
                tensors = state.tensors(keep=group.rank == 0, copied=cfg.async_save)
                if group.rank == 0:
                    saver.begin(step, *tensors, kept, improved)
                if ending or stopped_by or not cfg.async_save:
                    settle(last=ending or stopped_by)
                saved_at, signals.save = time.perf_counter(), False
            sampling_began = time.perf_counter()
            if evaluating and samples:  # what is optional comes last, and cannot end the run
                metrics.sample(step, lambda: "".join(written(model, tokenizer, runtime, cfg, cfg.sample_tokens)))
            group.barrier()
            if evaluating and budget:
                budget.note_saving(time.perf_counter() - saving_began)
                if samples:
                    token_seconds = (time.perf_counter() - sampling_began) / cfg.sample_tokens
                    budget.ending_seconds = 1.0 + token_seconds * LAST_SAMPLE
                budget.start_stretch(step)
            clock.start(step)

    # --- what came of it ---
    if stopped_by:
        print(f"stopped by {signal.Signals(stopped_by).name} and saved after step {state.step:,}")
    else:
        passed = ", ".join(f"{n:,.2f} epochs of {name}" for name, n in data.epochs(state.sequence).items())
        print(f"trained for {passed}{apart(val_losses)}")
        print(f"best validation loss {state.best:.4f}, at step {state.best_step:,}")
        if group.rank == 0 and cfg.parallel == "ddp":
            print("what the model writes now:\n")
            try:
                for piece in written(model, tokenizer, runtime, cfg, LAST_SAMPLE):
                    print(piece, end="", flush=True)
                print("\n")
            except BrokenPipeError:  # the reader has closed the pipe
                raise
            except Exception as error:  # the run is saved; its sample is optional
                print(f"no sample ({type(error).__name__}: {error})")
    group.barrier()
    return Outcome(state.best, state.step, plan.max_iters, state.stale >= patience, cfg)


def wrap(model: GPT | None, shape: GPTConfig, cfg: TrainConfig, runtime: Runtime) -> tuple[GPT, nn.Module]:
    """The model on its device, and what calls it for all processes. A model that is None is begun anew.

    Under FSDP no process ever holds all of a new model: its shape is made without memory, and each parameter's part
    is filled in from the whole value, which follows from the seed and the parameter's name.
    """
    group, device = runtime.group, runtime.device
    if cfg.parallel == "fsdp":
        given = dict(model.named_parameters()) if model else {}
        with torch.device("meta"):
            model = GPT(model.config if model else shape)
        blocks = model.transformer.h
        if cfg.recompute:
            distributed.checkpoint_activations(blocks)
        distributed.shard(model, blocks, group, device, runtime.dtype, bool(runtime.compile))
        value = model.initial_value
        distributed.fill_shards(model, lambda name, size: given[name] if given else value(name, size, cfg.seed))
        return model, model
    model = (model or GPT(shape, cfg.seed)).to(device)
    if cfg.recompute:
        distributed.checkpoint_activations(model.transformer.h)
    return model, distributed.replicate(model, device) if group.gloo else model


def memory_of(cfg: TrainConfig, model: GPT, dtype: torch.dtype, device: str, processes: int) -> memory.Memory:
    """What each of so many processes needs; the model may be on the meta device."""
    sequences = min(cfg.batch_size, -(-cfg.accumulation * cfg.batch_size // processes))
    return memory.needed(
        model,
        sequences,
        optimizer=cfg.optimizer,
        dtype=dtype,
        device=device,
        parts=processes if cfg.parallel == "fsdp" else 1,
        recompute=cfg.recompute,
    )


def leaner(cfg: TrainConfig, fits: Callable[[TrainConfig], bool]) -> str | None:
    """The settings with which the same steps fit, those that cost least first; or None."""
    sequences = cfg.accumulation * cfg.batch_size
    for recompute in dict.fromkeys((cfg.recompute, True)):
        for batch_size in range(min(cfg.batch_size, 4096), 0, -1):
            if sequences % batch_size:
                continue
            given = {"batch_size": batch_size, "recompute": recompute}
            if cfg.total_batch_tokens is None and batch_size != cfg.batch_size:
                given["gradient_accumulation_steps"] = sequences // batch_size
            if fits(replace(cfg, **given)):
                return " ".join(f"--{name}={value}" for name, value in given.items() if value != getattr(cfg, name))
    return None


def processes_sharing_memory(runtime: Runtime) -> int:
    """Processes of this run that share the memory of one device: on a CPU, all those of a machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if runtime.group.gloo and runtime.device.type == "cpu" else 1


def memory_told(cfg: TrainConfig, model: GPT, runtime: Runtime, data: Mixture) -> str:
    """What training is going to take, of what there is; and where that is too little, what would fit."""
    group, free = runtime.group, memory.free(runtime.device)
    resident = resident_bytes(data, runtime.device.type, free)
    sharing = processes_sharing_memory(runtime)

    def needed(changed: TrainConfig) -> memory.Memory:
        return replace(memory_of(changed, model, runtime.dtype, runtime.device.type, group.size), data=resident)

    told = f"memory: about {needed(cfg)}"
    if free is None:
        return told
    told += f" of {memory.in_words(free / sharing)} free"
    if needed(cfg).fits(free / sharing):
        return told
    remedy = leaner(cfg, lambda changed: needed(changed).fits(free / sharing))
    if needed(cfg).total > 2 * free / sharing and not cfg.eval_only:
        raise UserError(f"{told}: too little by far; take {remedy or 'a smaller model'}")
    spread = "" if cfg.parallel == "fsdp" else "; or spread it over several GPUs with --parallel=fsdp"
    return f"{told}: too little; what would fit: {remedy or 'no batch_size'}{spread}"


def optimizer_for(model: GPT, cfg: TrainConfig, runtime: Runtime) -> torch.optim.Optimizer:
    """The optimizer that `cfg` names, with nothing in it yet."""
    return make_optimizer(
        model,
        cfg.optimizer,
        cfg.learning_rate,
        (cfg.beta1, cfg.beta2),
        cfg.weight_decay,
        cfg.muon_learning_rate,
        torch.bfloat16 if runtime.dtype == torch.bfloat16 else torch.float32,
        runtime.group,
    )


@dataclass
class TrainState:
    """All that a step changes, and what came of it so far."""

    model: GPT
    spread: nn.Module  # the same behind DistributedDataParallel, or else the model itself
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of the loss, under float16
    guard: StepGuard
    step: int = 0  # steps that are done
    sequence: int = 0  # the number of the next one: all there is to know of the data, as sequence i follows from i
    best: float = math.inf  # validation loss
    best_step: int = 0
    stale: int = 0  # evaluations since the best

    def kept(self) -> dict[str, Any]:
        """What state.json holds of it; tensors go elsewhere."""
        return {
            "next_sequence": self.sequence,
            "best_val_loss": self.best if self.best_step else None,
            "best_step": self.best_step,
            "evaluations_since_best": self.stale,
            "guard": self.guard.state(),
            "grad_scaler": self.scaler.state_dict(),
        }

    def tensors(self, keep: bool, copied: bool) -> list[dict[str, Tensor]]:
        """Weights, and the optimizer's state, for the process that keeps them; where they are spread, all take part.

        copied: on the CPU, and untouched by the steps that follow.
        """
        kept = []
        for tensors in (dict(self.model.named_parameters()), state_tensors(self.model, self.optimizer)):
            all_of_each = ((name, distributed.full_tensor(tensor.detach())) for name, tensor in tensors.items())
            kept.append({name: tensor.to("cpu", copy=copied) for name, tensor in all_of_each if keep})
        return kept

    def load(self, start: Checkpoint) -> None:
        """Take up all but the weights and the guard's counts, which are there already."""
        kept = start.state
        load_state_tensors(self.model, self.optimizer, start.optimizer())
        self.scaler.load_state_dict(kept["grad_scaler"])
        self.step, self.sequence, self.best_step = kept["step"], kept["next_sequence"], kept["best_step"]
        self.best = kept["best_val_loss"] if self.best_step else math.inf
        self.stale = kept["evaluations_since_best"]

    def improves(self, val_loss: float) -> bool:
        """Whether this evaluation is the best so far; counts it."""
        if val_loss < self.best:
            self.best, self.best_step, self.stale = val_loss, self.step, 0
            return True
        self.stale += 1
        return False


def take_step(cfg: TrainConfig, plan: Plan, state: TrainState, loss_of: LossFunction, loader: BatchLoader) -> None:
    """One step: forward, backward, update."""
    model, optimizer, group = state.model, state.optimizer, loader.runtime.group
    lr = cfg.learning_rate_at(plan.recipe_step(state.step))
    for settings in optimizer.param_groups:
        settings["lr"] = lr * settings["lr_scale"]
        settings["momentum"] = muon_momentum_at(state.step)
    model.train()
    loss = torch.zeros((), device=loader.runtime.device)
    for micro_step, (x, y, share) in enumerate(loader.micro_batches(state.sequence)):  # (B, T) each
        torch.manual_seed(derive_seed("dropout", cfg.seed, state.step, group.rank * loader.count + micro_step))
        distributed.sync_gradients(state.spread, now=micro_step == loader.count - 1)
        micro_loss = loss_of(x, y) * share
        state.scaler.scale(micro_loss * group.size).backward()  # gradients are averaged, where losses are summed
        loss += micro_loss.detach()
    loss = group.all_reduce(loss)
    state.scaler.unscale_(optimizer)
    grad_norm = distributed.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf))
    scale = state.scaler.scale(torch.ones_like(loss)) if state.scaler.is_enabled() else None
    skip = state.guard.judge(loss, grad_norm, scale)
    if loader.runtime.skips_on_device:
        optimizer.found_inf = skip  # the fused step changes nothing where this is 1
        optimizer.step()
    elif not skip.item():
        optimizer.step()
    state.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.sequence += loader.sequences


def seconds_a_step(
    cfg: TrainConfig, model: GPT, spread: nn.Module, loss_of: LossFunction, loader: BatchLoader
) -> float:
    """How long a step takes here: the median over 2 seconds, and 5 steps at least, after 2 that warm up.

    The learning rate is 0, and the optimizer is another, so that the run has not begun when this ends.
    """
    cfg, group = replace(cfg, learning_rate=0.0, min_lr=0.0, weight_decay=0.0), loader.runtime.group
    guard = StepGuard(loader.runtime.device, None, None)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    times = []
    state = TrainState(model, spread, optimizer_for(model, cfg, loader.runtime), scaler, guard)
    while group.broadcast(len(times) < 7 or sum(times[2:]) < 2):
        begin = time.perf_counter()
        take_step(cfg, Plan(cfg.max_iters), state, loss_of, loader)
        guard.send()
        guard.read(state.step)  # waits for the device
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def validate(
    model: GPT, loss_of: LossFunction, data: Mixture, runtime: Runtime, batch_size: int
) -> tuple[float, dict[str, float]]:
    """The validation loss, in nats: on each data set, and before that their mean by the sets' weights."""
    model.eval()
    losses = {name: evaluate(loss_of, windows, runtime, batch_size) for name, windows in data.validation.items()}
    distributed.reshard(model)
    return sum(weight * loss for weight, loss in zip(data.weights, losses.values(), strict=True)), losses


@torch.no_grad()
def evaluate(loss_of: LossFunction, validation: ValidationWindows, runtime: Runtime, batch_size: int) -> float:
    """The mean loss over every target of the validation windows that counts, in nats."""
    group = runtime.group
    losses: list[Tensor] = []
    counts: list[int] = []
    for x, y in validation.batches(batch_size, group.rank, group.size):
        counts.append(int((y != -1).sum()))
        x, y = runtime.to_device(x, y)  # (B, T) each
        losses.append(loss_of(x, y).clone())  # a captured graph writes the next loss into the same memory
    of_ranks = group.all_gather_object(list(zip(torch.stack(losses).tolist(), counts, strict=True)))
    in_turn = [
        pair for of_round in zip(*of_ranks, strict=True) for pair in of_round if pair[1]
    ]  # as one process has them
    mean_of_batch, weights = torch.tensor(in_turn, dtype=torch.float64).unbind(dim=1)
    return float(mean_of_batch @ weights / weights.sum())


def apart(losses: dict[str, float]) -> str:
    """The losses of several data sets, to stand behind their mean."""
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())})" if len(losses) > 1 else ""


def open_data(cfg: TrainConfig) -> Mixture:
    """What cfg.dataset names, as the run reads it."""
    val_windows = cfg.eval_iters and cfg.eval_iters * cfg.batch_size
    return Mixture(find_datasets(cfg), cfg.block_size, cfg.seed, cfg.sampling, val_windows)


def find_datasets(cfg: TrainConfig) -> list[tuple[Dataset, float]]:
    """Open the data sets that cfg.dataset names, with their weights."""
    return [(find_dataset(cfg, name), weight) for name, weight in parse_mixture(cfg.dataset)]


def find_dataset(cfg: TrainConfig, name: str) -> Dataset:
    """Open one data set; one that is missing is prepared first, if there is a script of its name."""
    folder = cfg.data_folder / name
    script = ROOT / "prepare" / f"{folder.name}.py"
    if not folder.exists():
        if name != folder.name or not script.exists():
            there = sorted(path.parent.name for path in cfg.data_folder.glob("*/meta.json"))
            raise DatasetError(
                f"dataset={name}: there is no {folder}, and no prepare/{name}.py to make it; "
                f"prepared are: {', '.join(there) or 'none'}; for a text of your own: "
                f"python prepare/text.py FILE --name={name}"
            )
        if distributed.under_torchrun():
            raise DatasetError(f"dataset={name}: prepare it before the processes start: python prepare/{script.name}")
        print(f"{folder.name} is not prepared yet; running prepare/{script.name}")
        if subprocess.run([sys.executable, str(script), f"--data_dir={cfg.data_folder}"]).returncode:
            raise DatasetError(f"prepare/{script.name} failed; mend what it says above, or run it by itself")
    return open_dataset(folder)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


def changes_since(start: Checkpoint, cfg: TrainConfig) -> dict[str, list]:
    """The settings that differ from those of the run to be continued: name -> [then, now].

    Raises UserError for those that such a run cannot change: they define the model, or which sequence comes when.
    """
    then, now = start.state["config"], asdict(cfg)
    then_cfg = TrainConfig(**{name: value for name, value in then.items() if name in now})
    then, now = (
        {**c, "batch_size * gradient_accumulation_steps": k.accumulation * k.batch_size}
        for c, k in ((then, then_cfg), (now, cfg))
    )
    changes = {name: [then[name], now[name]] for name in now if name in then and then[name] != now[name]}
    refused = [
        f"{name}: {then[name]} then, {now[name]} now"
        for name in (*FIXED, "batch_size * gradient_accumulation_steps")
        if name in changes
    ]
    if refused:
        raise UserError(
            f"{start.path} cannot go on with other settings: {'; '.join(refused)}; set them back, or begin a run "
            f"from its weights with --init_from={cfg.out_dir} and another --out_dir"
        )
    return {name: change for name, change in changes.items() if name not in PLACES}


def with_shape_of(cfg: TrainConfig, start: Checkpoint, given: Mapping[str, str]) -> TrainConfig:
    """`cfg` with the model's shape taken from the checkpoint; a shorter block_size is kept, and crops the positions.

    given: where the user has set which settings. When finetuning, a line names those of a config file that have no
    effect. Raises UserError for others of the shape that are not the checkpoint's.
    """
    default = {field.name: field.default for field in fields(cfg)}
    shape = {name: start.state["model"][name] for name in SHAPE}
    refused, ignored = [], []
    for name, there in shape.items():
        here = getattr(cfg, name)
        if here == there or (here == default[name] and name not in given):
            continue
        if name == "block_size" and here < there:
            shape[name] = here
        elif given.get(name, COMMAND_LINE) == COMMAND_LINE or cfg.init_from == "resume":
            refused.append(f"{name}={here}: the checkpoint {start.path} has {name}={there}")
        else:
            ignored.append(f"{name}={there} (not {here})")
    if refused:
        raise UserError(f"{'; '.join(refused)}; leave the setting out")
    if ignored and distributed.rank_from_env() == 0:
        print(f"the model's shape is that of {start.path}: {', '.join(ignored)}")
    cfg = replace(cfg, **shape)
    configurator.check(cfg)
    return cfg


def written(model: GPT, tokenizer: Tokenizer, runtime: Runtime, cfg: TrainConfig, tokens: int) -> Iterator[str]:
    """What the model writes out of nothing, piece by piece."""
    steps = generate(
        model,
        [default_prompt(tokenizer)],
        runtime,
        max_new_tokens=tokens,
        sampling=Sampling(temperature=0.8),
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        seed=cfg.seed,
    )
    return text_of(tokenizer, steps)


def main(cfg: TrainConfig) -> None:
    if cfg.print_config:
        for name, value in asdict(cfg).items():
            print(f"{name} = {value!r}")
        return
    try:
        outcome = run(cfg)
    except UserError as error:
        distributed.stop_torchrun(error)
        raise
    distributed.destroy_process_group()
    if cfg.eval_only:
        return
    script, *given = sys.argv
    changed: dict[str, Any] = {"init_from": "resume"}
    if outcome.step >= outcome.max_iters:
        changed["max_iters"] = 2 * outcome.step
        if outcome.cfg.minutes:  # what the command line gave in steps was stretched to the time; so it is again
            names = [name for name in STEP_COUNTS if cfg.origins.get(name) == COMMAND_LINE]
            changed = {"minutes": None, **outcome.cfg.stretched(2 * outcome.step, names), **changed}
    elif outcome.out_of_patience:
        changed["patience"] = None
    given = [a for a in given if not a.startswith(tuple(f"--{name}=" for name in ("overwrite", *changed)))]
    given += [f"--{name}={value}" for name, value in changed.items()]
    print(f"sample:   {shlex.join(['python', str(Path(script).with_name('sample.py')), f'--out_dir={cfg.out_dir}'])}")
    print(f"continue: {shlex.join([*distributed.launch_command(), script, *given])}")


if __name__ == "__main__":
    configurator.run_script(main, TrainConfig)
