"""Train a GPT on a prepared data set. Every setting below can be set in a config file or as --key=value.

    python train.py config/shakespeare_char.py                            prepare the data and train
    python train.py config/shakespeare_char.py --n_layer=6 --out_dir=out6 override settings
    python train.py --init_from=resume --out_dir=out6                     resume a run (or --out_dir=latest)
    python train.py config/mine.py --init_from=out-shakespeare-char       finetune a checkpoint
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py train on 8 GPUs

Dimensions: B batch (batch_size sequences), T time (block_size tokens).
"""

import math
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import folio.machine.openmp  # noqa: F401  # isort: skip  (before torch)
import torch
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.number_format import counted
from folio.base.randomness import derive_seed
from folio.base.roles import Batch, Budget, Command, Data, Fixed, Initial, Machine, Output, Place, Rounding, Seed
from folio.base.settings import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
)
from folio.base.workers import under_torchrun
from folio.data.windows import Mixture, ValidationWindows
from folio.decoding.text_stream import sample_text
from folio.machine import distributed
from folio.machine.data_parallel import clip_grad_norm
from folio.machine.kernels import describe_attention
from folio.machine.runtime import Runtime
from folio.training.describe import (
    continue_command,
    describe_resumed_schedule,
    describe_run,
    format_losses,
    reason_to_end,
)
from folio.training.loader import BatchLoader
from folio.training.loggers import require_packages
from folio.training.optim import LR_SCHEDULES, OPTIMIZERS, LearningRates, update
from folio.training.planning.auto_size import choose_size
from folio.training.rules import scaled_counts, setting_problems
from folio.training.run_log import add_lost_sample
from folio.training.schedule import STEP_COUNTS, Schedule, StepCounts
from folio.training.session import Session
from folio.training.setup import (
    LossFunction,
    build_state,
    check_memory,
    find_runtime,
    make_loss,
    open_data,
    restart_history,
    run_record,
    time_budget,
    wrap,
)
from folio.training.start import load_start, model_config, repair, reserve, resolve_latest
from folio.training.state import TrainState
from model import ACTIVATIONS, GPT, POSITIONS


@dataclass(frozen=True)
class TrainConfig(Settings):
    # --- files ---
    out_dir: Command[NonEmptyStr] = "out"  # folder of the checkpoints and metrics.jsonl
    overwrite: Command[bool] = False  # True: a new run may replace the checkpoints in out_dir
    init_from: Initial[NonEmptyStr] = "scratch"  # scratch, resume, or weights to finetune: a run, latest, gpt2, ckpt.pt
    print_config: Command[bool] = False  # True: print all settings and exit
    # --- data ---
    dataset: Data[NonEmptyStr] = "shakespeare_char"  # in data_dir, or a path; "a:0.7,b:0.3" mixes several by weight
    data_dir: Place[str | None] = None  # folder of the data sets; None: data/ next to train.py
    block_size: Fixed[PositiveInt] = 1024  # T, context length in tokens
    batch_size: Batch[PositiveInt] = 12  # B, sequences per forward pass (the micro-batch)
    gradient_accumulation_steps: Batch[PositiveInt | None] = None  # micro-batches per step; None: 1
    total_batch_tokens: Batch[PositiveInt | None] = None  # approximate tokens per step, by the accumulation; None: off
    sampling: Fixed[Literal["epoch", "random"]] = "epoch"  # each window once per epoch; random: with replacement
    mask_documents: Fixed[bool] = False  # True: attention and positions restart after an end-of-text token
    # --- model ---
    size: Literal["auto"] | None = None  # auto: the best model and recipe for the text and --minutes; None: as below
    n_layer: Fixed[PositiveInt] = 12  # L, blocks
    n_head: Fixed[PositiveInt] = 12  # H, attention heads; divides n_embd
    n_embd: Fixed[PositiveInt] = 768  # C, channels
    bias: Fixed[bool] = False  # biases in linear layers and norms, as in GPT-2
    position: Fixed[Literal[tuple(POSITIONS)]] = "learned"  # or sinusoidal, rotary, relative, alibi, none
    activation: Fixed[Literal[tuple(ACTIVATIONS)]] = "gelu_new"  # GPT-2's approximation; gelu: exact, as in nanoGPT
    dropout: Probability = 0.0  # probability, for small data; 0: off
    embd_pdrop: Probability | None = None  # dropout after the embeddings; None: same as dropout
    attn_pdrop: Probability | None = None  # dropout on attention weights; None: same as dropout
    resid_pdrop: Probability | None = None  # dropout on the outputs of attention and MLP; None: same as dropout
    # --- optimizer ---
    max_iters: PositiveInt = 600_000  # total number of optimizer steps
    minutes: Budget[PositiveFloat | None] = None  # time budget; sets max_iters to the steps that fit; None: off
    optimizer: Fixed[Literal[OPTIMIZERS]] = "adamw"  # adamw, or muon: Muon for matrices of blocks, AdamW for the rest
    learning_rate: NonNegativeFloat = 6e-4  # AdamW's peak learning rate
    muon_learning_rate: NonNegativeFloat = 0.02  # Muon's peak learning rate; same schedule
    lr_schedule: Literal[LR_SCHEDULES] = "cosine"  # or linear, wsd: down to min_lr after the warmup; or constant
    decay_lr: bool = True  # False: a constant rate without warmup, as in nanoGPT
    warmup_iters: NonNegativeInt | None = None  # steps of linear warmup; 0: off; None: 2,000, or 1/20 of a shorter run
    lr_decay_iters: PositiveInt | None = None  # step at which min_lr is reached; None: max_iters
    wsd_decay_iters: PositiveInt | None = None  # decay steps at the end of "wsd"; None: a fifth of lr_decay_iters
    min_lr: NonNegativeFloat | None = None  # final learning rate; None: a tenth of learning_rate
    weight_decay: NonNegativeFloat = 0.1  # weight decay of matrices and embeddings; 0: off
    beta1: Probability = 0.9  # AdamW's decay rate of the mean gradient
    beta2: Probability = 0.95  # AdamW's decay rate of the mean squared gradient
    grad_clip: NonNegativeFloat = 1.0  # maximum norm of the gradient; 0: off
    max_bad_steps: PositiveInt = 10  # consecutive skipped steps (not finite, or spikes) after which the run diverges
    skip_spikes: PositiveFloat | None = None  # skip steps with loss or norm this many std above the mean; None: off
    on_divergence: Literal["stop", "rollback"] = "stop"  # rollback: resume from a checkpoint at half the rate
    # --- evaluation, checkpoints, logs ---
    eval_interval: Output[PositiveInt | None] = None  # steps between evaluations; None: 2,000, or 1/10 of a shorter run
    eval_iters: PositiveInt | None = None  # batches to evaluate, always the same text; None: the whole set
    eval_only: Command[bool] = False  # True: evaluate once and exit
    save_interval_minutes: Output[PositiveFloat | None] = 30.0  # minutes between additional saves; None: off
    async_save: Output[bool] = True  # write checkpoints in the background, from a copy in memory; False: wait
    keep_last: Output[PositiveInt] = 2  # number of newest checkpoints to keep, besides the best
    always_save_checkpoint: Output[bool] = True  # False: an evaluation saves only if the loss is the best so far
    snapshots: Output[NonNegativeInt] = 0  # number of weights-only snapshots, more frequent early in the run; 0: none
    sample_tokens: Output[NonNegativeInt] = 200  # length of the sample at each evaluation (samples.jsonl); 0: off
    patience: PositiveInt | None = None  # stop after this many evaluations without improvement; None: never
    log_interval: Output[PositiveInt] = 10  # steps between lines of metrics.jsonl
    tensorboard_log: Output[bool] = False  # also log to out_dir/tensorboard, for TensorBoard
    wandb_log: Output[bool] = False  # also log to wandb (WANDB_MODE=offline works)
    wandb_project: Output[str] = "folio"
    wandb_run_name: Output[str | None] = None  # None: chosen by wandb
    # --- machine ---
    seed: Seed[NonNegativeInt] = 1337  # for initialization, data order and dropout
    device: Rounding[str] = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Rounding[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"  # for matmuls; auto: a fast one here
    compile: Machine[bool | Literal["auto", "reduce-overhead"]] = "auto"  # auto: long GPU runs; reduce-overhead: graphs
    workers: Machine[PositiveInt | None] = None  # threads that divide a micro-batch, on a CPU; None: one per core
    deterministic: Rounding[bool] = False  # True: only deterministic kernels on a GPU (those of a CPU always are)
    # --- several processes, started by torchrun ---
    parallel: Rounding[Literal["ddp", "fsdp"]] = "ddp"  # ddp: all of the model per process; fsdp: sharded (FSDP2)
    backend: Machine[str] = "nccl"  # torch.distributed backend; without GPUs always gloo
    recompute: Rounding[bool] = False  # True: activation checkpointing: slower, with less memory; also in one process

    other_names = MappingProxyType(
        {
            "lr": "learning_rate",
            "steps": "max_iters",
            "epochs": "max_iters",
            "context": "block_size",
            "pos": "position",
            "pos_emb": "position",
            "rope": "position=rotary",
            "use_rope": "position=rotary",
            "rotary": "position=rotary",
            "alibi": "position=alibi",
            "resume": "init_from=resume --out_dir=RUN",
        }
    )

    replaces = MappingProxyType(  # on a command line that resumes a run, a setting turns another one off
        {
            "gradient_accumulation_steps": "total_batch_tokens",
            "total_batch_tokens": "gradient_accumulation_steps",
            "max_iters": "minutes",
        }
    )

    def problems(self) -> list[tuple[str, str]]:
        return setting_problems(self)

    def with_overrides(self, origins: Mapping[str, str], overridden: Mapping[str, Any]) -> "TrainConfig":
        return self.replace(**scaled_counts(self, origins, overridden))

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        if self.total_batch_tokens is not None:
            return max(1, round(Fraction(self.total_batch_tokens, self.batch_size * self.block_size)))
        return self.gradient_accumulation_steps or 1

    @property
    def step_tokens(self) -> int:
        return self.accumulation * self.batch_size * self.block_size

    @property
    def max_val_tokens(self) -> int | None:
        """Tokens of each validation set that eval_iters selects; None: all."""
        return self.eval_iters and self.eval_iters * self.batch_size * self.block_size

    @property
    def step_counts(self) -> StepCounts:
        return StepCounts(**{name: getattr(self, name) for name in STEP_COUNTS})

    def schedule(self, counts: StepCounts, part: Mapping[str, Any]) -> Schedule:
        """The schedule of learning rates and evaluations. part: PartRecord of the run, or empty."""
        lr_schedule = self.lr_schedule
        if not self.decay_lr:
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


class Result(NamedTuple):
    """The outcome of a run."""

    best_val_loss: float  # nats per token
    step: int
    max_iters: int
    out_of_patience: bool = False
    stopped_by: int = 0  # the signal that ended the run


def train(user_cfg: TrainConfig) -> Result:
    """Train with these settings. Raises UserError, or TrainingError for a run that cannot continue."""
    settings.check(user_cfg)
    with reserve(Path(user_cfg.out_dir), user_cfg.eval_only):
        # --- start: from scratch, from this run's last checkpoint, or from other weights ---
        start = load_start(user_cfg)
        require_packages(start.cfg)
        start = choose_size(start, train_step)
        cfg = start.cfg
        data = open_data(cfg, start.max_val_tokens)
        start_time = time.perf_counter() - start.seconds_spent  # the time budget excludes preparing the data set
        start.require_same_data(data)
        gpt_config = model_config(cfg, data)

        # --- runtime: device, dtype, compilation, processes ---
        runtime = find_runtime(cfg, start, gpt_config)
        group = runtime.group
        group.require_same(
            "checkpoints, data or settings",
            [start.saved_state.get("step"), data.hash[:8], crc32(repr(cfg).encode())],
        )
        print(runtime.description)
        parts = start.parts(runtime)
        check_memory(cfg, start, gpt_config, runtime, data)

        # --- model ---
        model, net = wrap(start.build_model(data.tokenizer), gpt_config, cfg, runtime)
        loss_fn = make_loss(net, runtime)
        if runtime.compile:
            print("compiling the model: the first step and the first evaluation may take a few minutes", flush=True)
        print(
            f"{model.num_params()['total']:,} parameters, {model.config.position} positions, dropout {cfg.dropout}, "
            f"attention by {describe_attention(runtime, model)}"
        )
        if cfg.eval_only:
            losses = evaluate(model, loss_fn, data, runtime, cfg.batch_size)
            print(
                f"validation set of {cfg.dataset} ({counted(data.validation_tokens, 'token')}), in contexts of "
                f"{model.config.block_size}"
            )
            print(f"validation loss {losses['val_loss']:.4f} nats per token{format_losses(losses)}")
            return Result(losses["val_loss"], start.saved_state.get("step", 0), cfg.max_iters)

        # --- optimizer and training state ---
        state = build_state(start, model, net, runtime)
        restart_history(start, state, data)
        group.barrier()  # every rank has read the checkpoint before anything in out_dir changes
        if group.rank == 0:
            repair(Path(cfg.out_dir), start.resuming)

        # --- batches and schedule ---
        loader = BatchLoader(data, runtime, cfg.batch_size, cfg.accumulation)
        counts, budget = time_budget(cfg, start, state, loss_fn, loader, train_step, start_time)
        schedule = start.schedule(counts)
        print("\n".join(describe_run(cfg, data, schedule, loader)))
        sample = partial(sample_text, model, data.tokenizer, runtime, cfg.seed) if cfg.parallel == "ddp" else None
        if start.resuming:
            if sample and cfg.sample_tokens and group.rank == 0:
                add_lost_sample(Path(cfg.out_dir), state.step, lambda: "".join(sample(cfg.sample_tokens)))
            if reason := reason_to_end(cfg, state, schedule):
                print(f"nothing to train: {reason}")
                return make_result(cfg, state, schedule)
            print(describe_resumed_schedule(start, schedule))

        # --- loop ---
        record = run_record(start, model, data, counts, parts)
        with Session(start, state, schedule, budget, data, runtime, record, sample) as session:
            if not start.resuming:
                losses = evaluate(model, loss_fn, data, runtime, cfg.batch_size) if session.evaluates_first else {}
                session.log_start(losses)
            while not session.finished:
                train_step(state, loss_fn, loader, schedule.learning_rates_at(state.step), cfg.grad_clip, cfg.seed)
                due, losses = session.end_step(), {}
                if due.evaluate:
                    losses = evaluate(model, loss_fn, data, runtime, cfg.batch_size)
                    due = session.record_evaluation(losses, due)  # may also request a save (always_save_checkpoint)
                if due.log:  # on CUDA, steps without an evaluation or a save are logged by the next end_step
                    session.log(losses)
                if due.snapshot:
                    session.snapshot()
                if due.save:  # after what a run that is killed and resumed must not repeat
                    session.save()
                if due.evaluate:
                    session.sample()

        # --- summary ---
        if state.guard.without_targets:
            print(f"{counted(state.guard.without_targets, 'step')} had no targets, and changed no weights")
        if session.stopped_by:
            print(f"stopped by {signal.Signals(session.stopped_by).name} and saved after step {state.step:,}")
        else:
            print(f"finished: {reason_to_end(cfg, state, schedule)}")
            epochs = ", ".join(f"{n:,.2f} epochs of {name}" for name, n in data.epochs(state.next_sequence).items())
            print(f"trained for {epochs}{format_losses(session.watch.losses)}")
            print(f"best validation loss {state.best_val_loss:.4f}, at step {state.best_step:,}")
            if session.watch.has_risen:
                print(session.watch.describe())
            session.print_sample()
        group.barrier()
        return make_result(cfg, state, schedule)._replace(stopped_by=session.stopped_by)


def make_result(cfg: TrainConfig, state: TrainState, schedule: Schedule) -> Result:
    return Result(state.best_val_loss, state.step, schedule.max_iters, state.is_out_of(cfg.patience))


def train_step(
    state: TrainState, loss_fn: LossFunction, loader: BatchLoader, rates: LearningRates, grad_clip: float, seed: int
) -> None:
    """Forward, backward, clip and update.

    A bad step (see folio/training/guard.py), or one without targets, only advances the counters.
    """
    model, optimizer, scaler, group = state.model, state.optimizer, state.scaler, loader.runtime.group
    model.train()
    loss = torch.zeros((), device=loader.runtime.device)  # mean over the step's targets of all ranks
    has_targets = False  # without any, no rank has a micro-batch
    for micro_step, (x, y, share) in enumerate(loader.micro_batches(state.next_sequence)):  # (B, T) each
        torch.manual_seed(derive_seed("dropout", seed, state.step, group.rank * loader.count + micro_step))
        distributed.sync_gradients(state.net, enabled=micro_step == loader.count - 1)
        micro_loss = loss_fn(x, y) * share  # share: this micro-batch's fraction of the step's targets
        scaler.scale(micro_loss * group.size).backward()  # gradients are averaged over ranks, losses summed
        loss += micro_loss.detach()
        has_targets = True
    loss = group.all_reduce(loss)

    if has_targets:
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm(model.parameters(), grad_clip or math.inf, loader.runtime)
        loss_scale = scaler.scale(torch.ones_like(loss)) if scaler.is_enabled() else None
        skip = state.guard.judge(loss, distributed.full_tensor(grad_norm), loss_scale)  # 1.0 or 0.0, on the device
        update(optimizer, rates, state.step, skip, loader.runtime.skips_on_device)
        scaler.update()
    else:
        state.guard.judge_without_targets()
    state.step += 1
    state.next_sequence += loader.sequences


def evaluate(model: GPT, loss_fn: LossFunction, data: Mixture, runtime: Runtime, batch_size: int) -> dict[str, float]:
    """Return the validation loss in nats per token as "val_loss".

    For several data sets, this is the weighted mean of their losses, which are returned as "val_loss/NAME".
    """
    model.eval()
    losses = [mean_loss(loss_fn, windows, runtime, batch_size) for windows in data.validation.values()]
    distributed.reshard(model)
    mean = sum(weight * loss for weight, loss in zip(data.weights, losses, strict=True))
    if len(losses) == 1:
        return {"val_loss": mean}
    return {"val_loss": mean, **{f"val_loss/{name}": loss for name, loss in zip(data.validation, losses, strict=True)}}


@torch.no_grad()
def mean_loss(loss_fn: LossFunction, validation: ValidationWindows, runtime: Runtime, batch_size: int) -> float:
    """The mean loss in nats over all counted targets of the validation windows, for any number of ranks."""
    group = runtime.group
    losses: list[Tensor] = []
    counts: list[int] = []
    for x, y in validation.batches(batch_size, group.rank, group.size):
        counts.append(int((y != -1).sum()))
        x, y = runtime.to_device(x, y)  # (B, T) each
        losses.append(loss_fn(x, y).clone())  # a captured graph writes the next loss into the same memory
    results_by_rank = group.all_gather_object(list(zip(torch.stack(losses).tolist(), counts, strict=True)))
    results = [result for row in zip(*results_by_rank, strict=True) for result in row]  # in one process's order
    batch_losses, weights = torch.tensor([r for r in results if r[1]], dtype=torch.float64).unbind(dim=1)
    return float(batch_losses @ weights / weights.sum())


def main(cfg: TrainConfig) -> None:
    cfg = resolve_latest(cfg)
    if cfg.print_config:
        if cfg.init_from == "resume":
            cfg = load_start(cfg).cfg
        for name, value in asdict(cfg).items():
            resolved = name == "gradient_accumulation_steps" and cfg.total_batch_tokens
            print(f"{name} = {value!r}" + (f"  # {cfg.accumulation}, from total_batch_tokens" if resolved else ""))
        return
    if cfg == TrainConfig():
        print("the default settings are GPT-2's; for a small model: python train.py config/shakespeare_char.py")
    try:
        result = train(cfg)
    except UserError as error:
        distributed.stop_torchrun(error)
        raise
    distributed.destroy_process_group()
    if not cfg.eval_only:
        sample_script = str(Path(sys.argv[0]).with_name("sample.py"))
        print(f"sample:   {shlex.join(['python', sample_script, f'--out_dir={cfg.out_dir}'])}")
        print(f"continue: {continue_command(cfg, result.step, result.max_iters, result.out_of_patience)}")
    if result.stopped_by and not under_torchrun():  # torchrun would treat it as a failure
        raise SystemExit(128 + result.stopped_by)


if __name__ == "__main__":
    settings.run_script(main, TrainConfig, needs_output=False)
