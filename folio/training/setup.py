"""What a plan's steps are computed with: the model on its device, its loss, its batches, and the training state."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from folio.checkpoints.build_model import crop_block_size, with_vocab_size
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.windows import Mixture
from folio.machine import distributed
from folio.machine.data_parallel import DataParallelLoss
from folio.machine.kernels import adapt, compile_loss, dropout_contexts, pad_rows, pad_vocabulary
from folio.machine.runtime import Runtime
from folio.training.evaluations import Evaluations
from folio.training.guard import StepGuard
from folio.training.loader import BatchLoader, BatchShape
from folio.training.optim import make_optimizer
from folio.training.planning.resume import DROPOUT
from folio.training.planning.run_plan import Plan
from folio.training.planning.train_settings import TrainSettings
from folio.training.state import TrainState
from model import GPT, GPTConfig

LossFunction = Callable[[Tensor, Tensor], Tensor]  # inputs and targets, (B, T) each -> mean loss


class OpenRun(NamedTuple):
    """What the steps of a run are computed with."""

    model: GPT
    net: nn.Module  # computes the loss: DDP's or FSDP's module, or the model itself
    loss_fn: LossFunction
    loader: BatchLoader


def open_run(plan: Plan) -> OpenRun:
    """Build the plan's model or load its weights, on its device, and open its batches."""
    return build_run(plan.weights, plan.model, plan.settings, plan.data, plan.runtime, plan.batch)


def build_run(
    ckpt: Checkpoint | None, config: GPTConfig, cfg: TrainSettings, data: Mixture, runtime: Runtime, batch: BatchShape
) -> OpenRun:
    """Build a model, or load the checkpoint's weights into it, on its device, and open its batches."""
    weights = build_weights(ckpt, config, cfg) if ckpt else None
    model, net = wrap(weights, config, cfg, runtime)
    return OpenRun(model, net, make_loss(net, runtime), BatchLoader(data, runtime, batch))


def build_weights(ckpt: Checkpoint, config: GPTConfig, cfg: TrainSettings) -> GPT:
    """Build the checkpoint's model with the run's configuration: its dropout, context, vocabulary and mask."""
    model = ckpt.build(**{name: getattr(cfg, name) for name in DROPOUT})
    if config.vocab_size > model.config.vocab_size:
        model = with_vocab_size(model, config.vocab_size, cfg.seed)
    if config.block_size != model.config.block_size:
        crop_block_size(model, config.block_size)
    model.config = replace(model.config, document_token=config.document_token)
    return model


def wrap(model: GPT | None, config: GPTConfig, cfg: TrainSettings, runtime: Runtime) -> tuple[GPT, nn.Module]:
    """Move the model to its device, or build a new one if it is None, and wrap it for several processes.

    Returns the model, and the module that computes its loss: DDP's, FSDP's, or the model itself. Under FSDP no process
    holds all of a new model: it is built on the meta device, and each process fills its shards with initial values,
    which depend only on the seed and the parameters' names.
    """
    group, device = runtime.group, runtime.device
    if cfg.parallel == "fsdp":
        weights = dict(model.named_parameters()) if model else {}
        with torch.device("meta"):
            model = GPT(model.config if model else config)
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
    model = (model or GPT(config, cfg.seed)).to(device)
    pad_vocabulary(model, runtime.size_multiple)
    adapt(model, runtime)
    if cfg.recompute:
        distributed.checkpoint_activations(model.transformer.h, dropout_contexts if runtime.workers > 1 else None)
    return model, distributed.replicate(model, device) if group.gloo else model


def make_loss(net: nn.Module, runtime: Runtime) -> LossFunction:
    """The mean loss of a batch: divided among workers, compiled, or neither. net: from `wrap`."""
    return DataParallelLoss(net, runtime) if runtime.workers > 1 else compile_loss(net, runtime)


def new_state(run: OpenRun, cfg: TrainSettings) -> TrainState:
    """The state of training before the first step."""
    runtime = run.loader.runtime
    optimizer = make_optimizer(
        run.model,
        cfg.optimizer,
        cfg.learning_rate,
        (cfg.beta1, cfg.beta2),
        cfg.weight_decay,
        runtime.dtype,
        runtime.group,
        runtime.workers,
    )
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    return TrainState(run.model, run.net, optimizer, scaler, StepGuard(runtime.device, cfg.skip_spikes), Evaluations())


def open_state(plan: Plan, run: OpenRun) -> TrainState:
    """The state of training: new, that of the run to resume, or that of the winner of a race.

    The validation losses of a resumed run are forgotten if they were measured on other text, with which the next one
    must not be compared: as the best loss, for patience, and for a rollback.
    """
    state = new_state(run, plan.settings)
    if plan.saved:
        state.load(plan.saved.state, plan.saved.checkpoint.optimizer())
        if plan.forgets_evaluations:
            state.evaluations.forget()
    elif plan.head_start:
        state.restore(plan.head_start)
    return state
