"""Train a GPT on a prepared data set. Every setting below can be set in a config file or as --key=value.

    python train.py config/shakespeare_char.py                            prepare the data and train
    python train.py config/shakespeare_char.py --n_layer=6 --out_dir=out6 override settings
    python train.py --init_from=resume --out_dir=out6                     resume a run (or --out_dir=latest)
    python train.py config/mine.py --init_from=out-shakespeare-char       finetune a checkpoint
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py train on 8 GPUs

Dimensions: B batch (batch_size sequences), T time (block_size tokens).
"""

import math
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import folio.machine.openmp  # noqa: F401  # isort: skip  (before torch)
import torch
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.number_format import counted
from folio.base.roles import Batch, Budget, Command, Data, Fixed, Initial, Machine, Output, Place, Rounding, Seed
from folio.base.settings import NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability
from folio.base.terminal import say
from folio.base.workers import under_torchrun
from folio.data.windows import ValidationWindows
from folio.decoding.text_stream import sample_text
from folio.machine import distributed
from folio.machine.data_parallel import clip_grad_norm
from folio.machine.runtime import Runtime
from folio.training.describe import describe_resumed_schedule, describe_run, format_losses, next_commands
from folio.training.graphs.step_graph import StepGraph
from folio.training.loader import BatchLoader
from folio.training.optim import LR_SCHEDULES, OPTIMIZERS, LearningRates, update
from folio.training.out_dir import reserve
from folio.training.planning.resolve import fit_minutes, resolve
from folio.training.planning.resume import merge_checkpoint, resolve_latest
from folio.training.planning.run_plan import Plan
from folio.training.planning.train_settings import TrainSettings
from folio.training.session import Session
from folio.training.setup import LossFunction, OpenRun, new_state, open_run, open_state
from folio.training.state import TrainState
from model import ACTIVATIONS, POSITIONS


@dataclass(frozen=True)
class TrainConfig(TrainSettings):
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
    step_graph: Rounding[bool] = False  # True: each step is one CUDA graph, for small models (not run on a GPU yet)
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


class Result(NamedTuple):
    """The outcome of a run."""

    best_val_loss: float  # nats per token
    step: int
    max_iters: int
    out_of_patience: bool = False
    stopped_by: int = 0  # the signal that ended the run


def train(user_cfg: TrainConfig) -> Result:
    """Train with these settings. Raises UserError, or TrainingError for a run that cannot continue."""
    with reserve(Path(user_cfg.out_dir), user_cfg.eval_only):
        # --- resolve: the user's settings, with the checkpoint, the data and the machine ---
        plan = resolve(user_cfg, timed_step, evaluate)
        say(*plan.lines)

        # --- open: the model, the batches, and what a step changes ---
        run = open_run(plan)
        if plan.settings.eval_only:
            return evaluate_only(plan, run)
        if plan.time_limit:  # the number of steps depends on the speed of this model on this machine
            plan = fit_minutes(plan, plan.time_limit.step_seconds or measure_step(run, plan.settings))
        cfg, data, schedule, runtime = plan.settings, plan.data, plan.schedule, plan.runtime
        state = open_state(plan, run)
        say(*describe_run(plan))
        sample = partial(sample_text, run.model, data.tokenizer, runtime, cfg.seed) if cfg.parallel == "ddp" else None
        session = Session(plan, state, sample)
        session.repair()
        if plan.resumes and session.finished:
            say(f"nothing to train: {session.reason_to_end}")
            return make_result(session)
        if plan.saved:
            say(describe_resumed_schedule(plan.saved, schedule))

        # --- loop ---
        with session:
            if not plan.resumes:
                losses = evaluate(run, cfg.batch_size) if session.evaluates_first else {}
                session.log_start(losses)
            step = StepGraph(train_step) if cfg.step_graph else train_step
            while not session.finished:
                rates = schedule.learning_rates_at(state.step)
                step(state, run.loss_fn, run.loader, rates, cfg.grad_clip, cfg.seed)
                due, losses = session.end_step(), {}
                if due.evaluate:
                    losses = evaluate(run, cfg.batch_size)
                    due = session.end_evaluation(losses, due)  # may also request a save (always_save_checkpoint)
                if due.log:  # on CUDA, steps without an evaluation or a save are logged by the next end_step
                    session.log(losses)
                if due.snapshot:
                    session.snapshot()
                if due.save:  # after what a run that is killed and resumed must not repeat
                    session.save()
                if due.evaluate:
                    session.sample()

        # --- summary ---
        session.print_summary()
        runtime.group.barrier()
        return make_result(session)


def evaluate_only(plan: Plan, run: OpenRun) -> Result:
    """Evaluate once, and print the losses."""
    cfg, data = plan.settings, plan.data
    losses = evaluate(run, cfg.batch_size)
    tokens = counted(data.validation_tokens, "token")
    say(f"validation set of {cfg.dataset} ({tokens}), in contexts of {plan.model.block_size}")
    say(f"validation loss {losses['val_loss']:.4f} nats per token{format_losses(losses)}")
    return Result(losses["val_loss"], plan.step, cfg.max_iters)


def make_result(session: Session) -> Result:
    evaluations, max_iters = session.evaluations, session.schedule.max_iters
    out_of_patience = evaluations.is_out_of(session.cfg.patience)
    return Result(evaluations.best_val_loss, session.state.step, max_iters, out_of_patience, session.stopped_by)


def train_step(
    state: TrainState,
    loss_fn: LossFunction,
    loader: BatchLoader,
    rates: LearningRates | None,
    grad_clip: float,
    seed: int,
) -> None:
    """Forward, backward, clip and update.

    A bad step (see folio/training/guard.py), or one without targets, only advances the counters. rates: None if they
    are set (see folio/training/graphs/step_graph.py, which captures this function).
    """
    model, optimizer, scaler, group = state.model, state.optimizer, state.scaler, loader.runtime.group
    model.train()
    # The loss of a step is the mean over all its targets, on all ranks. A micro-batch of masked data may have fewer
    # targets than another, so its mean loss counts in proportion to its share of them: any division of the same
    # sequences has the same gradient.
    loss = torch.zeros((), device=loader.runtime.device)
    has_targets = False  # without any, no rank has a micro-batch
    for micro_step, (x, y, share) in enumerate(loader.micro_batches(state.next_sequence)):  # (B, T) each
        # A seed of its own for each micro-batch: a resumed run has the dropout masks of an uninterrupted one.
        loader.seed_dropout(seed, state.step, micro_step)
        distributed.sync_gradients(state.net, enabled=micro_step == loader.shape.count - 1)
        micro_loss = loss_fn(x, y) * share
        scaler.scale(micro_loss * group.size).backward()  # gradients are averaged over ranks, losses summed
        loss += micro_loss.detach()
        has_targets = True
    loss = group.all_reduce(loss)

    if has_targets:
        # Clipping returns the norm that the gradient had before, which the guard needs: a spike of the norm shows a bad
        # batch. The guard decides on the device, so that the CPU can queue the next step without waiting for this one.
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm(model.parameters(), grad_clip or math.inf, loader.runtime)
        loss_scale = scaler.scale(torch.ones_like(loss)) if scaler.is_enabled() else None
        skip = state.guard.judge(loss, distributed.full_tensor(grad_norm), loss_scale)  # 1.0 or 0.0, on the device
        update(optimizer, rates, state.step, skip)
        scaler.update()
    else:
        state.guard.judge_without_targets()
    state.step += 1
    state.next_sequence += loader.shape.sequences


def measure_step(run: OpenRun, cfg: TrainSettings) -> float:
    """Measure the seconds per step: the median over 2 seconds, at least 5 steps, after 2 warmup steps.

    It changes no weights: the learning rates are 0, and the optimizer is a new one. On a slow machine, it takes a tenth
    of the run's minutes, but at least one warmup step and another one.
    """
    limit = 6 * cfg.minutes if cfg.minutes else math.inf  # seconds
    state, times, is_measured = new_state(run, cfg), [], False
    while not is_measured:
        times.append(timed_step(run, state, LearningRates(0.0, 0.0), cfg))
        is_enough = len(times) >= 7 and sum(times[2:]) >= 2
        is_measured = run.loader.runtime.group.broadcast(len(times) >= 2 and (is_enough or sum(times) >= limit))
    return statistics.median(times[2:] or times[1:])


def timed_step(run: OpenRun, state: TrainState, rates: LearningRates, cfg: TrainSettings) -> float:
    """Take a step, and return its seconds, up to the end of its work on the device."""
    start = time.perf_counter()
    train_step(state, run.loss_fn, run.loader, rates, cfg.grad_clip, cfg.seed)
    state.guard.send()
    state.guard.read(state.step)  # waits for the device
    return time.perf_counter() - start


def evaluate(run: OpenRun, batch_size: int) -> dict[str, float]:
    """Return the validation loss in nats per token as "val_loss".

    For several data sets, this is the weighted mean of their losses, which are returned as "val_loss/NAME".
    """
    run.model.eval()
    data, runtime = run.loader.data, run.loader.runtime
    losses = [mean_loss(run.loss_fn, windows, runtime, batch_size) for windows in data.validation.values()]
    distributed.reshard(run.model)
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
        lines: list[str] = []
        try:
            cfg = merge_checkpoint(cfg, lines, writes=False).cfg
        finally:  # the lines may explain an error
            if lines and distributed.rank_from_env() == 0:
                say(*lines)
        for name, value in asdict(cfg).items():
            resolved = name == "gradient_accumulation_steps" and cfg.total_batch_tokens
            print(f"{name} = {value!r}" + (f"  # {cfg.accumulation}, from total_batch_tokens" if resolved else ""))
        return
    if cfg == TrainConfig():
        say("the default settings are GPT-2's; for a small model: python train.py config/shakespeare_char.py")
    try:
        result = train(cfg)
    except UserError as error:
        distributed.stop_torchrun(error)
        raise
    distributed.destroy_process_group()
    if not cfg.eval_only:
        say(*next_commands(cfg, result.step, result.max_iters, result.out_of_patience))
    if result.stopped_by and not under_torchrun():  # torchrun would treat it as a failure
        raise SystemExit(128 + result.stopped_by)


if __name__ == "__main__":
    settings.run_script(main, TrainConfig, needs_output=False)
