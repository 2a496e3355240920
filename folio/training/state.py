"""The state of training: everything that a step changes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.schema import RunProgress
from folio.machine.distributed import fill_shards, full_tensor
from folio.machine.kernels import pad_rows
from folio.training.guard import StepGuard
from folio.training.optim import load_state_tensors, state_tensors
from model import GPT


@dataclass
class TrainState:
    """Everything that a training step changes, and the best evaluation so far."""

    model: GPT
    net: nn.Module  # the model wrapped by DistributedDataParallel, or the model itself
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # scales the loss in float16
    guard: StepGuard
    step: int = 0
    next_sequence: int = 0
    best_val_loss: float = math.inf
    best_step: int = 0
    evaluations_since_best: int = 0

    def progress(self) -> RunProgress:
        """The values to save in state.json; tensors are saved separately."""
        return {
            "step": self.step,
            "next_sequence": self.next_sequence,
            "best_val_loss": self.best_val_loss if self.best_step else None,
            "best_step": self.best_step,
            "evaluations_since_best": self.evaluations_since_best,
            "guard": self.guard.state(),
            "grad_scaler": self.scaler.state_dict(),
        }

    def load(self, progress: dict[str, Any], optimizer: dict[str, Tensor]) -> None:
        """Restore the progress and the optimizer from a checkpoint. The model and the guard are restored when built."""
        load_state_tensors(self.model, self.optimizer, optimizer)
        if progress["grad_scaler"]:  # empty if the run was not in float16
            self.scaler.load_state_dict(progress["grad_scaler"])
        self.step, self.next_sequence = progress["step"], progress["next_sequence"]
        self.best_step = progress["best_step"]
        self.best_val_loss = progress["best_val_loss"] if self.best_step else math.inf
        self.evaluations_since_best = progress["evaluations_since_best"]

    def roll_back(self, saved: Checkpoint, next_sequence: int) -> None:
        """Restore everything from a checkpoint of this run, in place, and continue with another sequence."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            fill_shards(self.model, lambda name: pad_rows(saved.model[name], len(parameters[name])))
        self.guard.load(saved.state["guard"])
        self.load(saved.state, saved.optimizer())
        self.next_sequence = next_sequence

    def tensors(self, keep: bool, copy: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights and the optimizer state; see `weights`."""
        return self.weights(keep, copy), self._gather(state_tensors(self.model, self.optimizer), keep, copy)

    def weights(self, keep: bool, copy: bool) -> dict[str, Tensor]:
        """The weights by name, on the CPU. Sharded tensors are gathered, so every rank must call this.

        keep: whether this rank gets the tensors; otherwise the dict is empty. copy: whether to copy tensors on the CPU.
        """
        return self._gather(dict(self.model.named_parameters()), keep, copy)

    def _gather(self, tensors: dict[str, Tensor], keep: bool, copy: bool) -> dict[str, Tensor]:
        """The tensors as in a checkpoint: whole, on the CPU, and without the rows of pad_vocabulary."""
        gathered = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor.detach())
            if name.startswith("transformer.wte.") and full.dim():
                full = full[: self.model.config.vocab_size]
            if keep:
                gathered[name] = full.to("cpu", copy=copy)
        return gathered

    def forget_evaluations(self) -> None:
        """Start the history of validation losses again."""
        self.best_val_loss, self.best_step, self.evaluations_since_best = math.inf, 0, 0
        self.guard.val_losses = []

    def is_out_of(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row did not improve; None: never."""
        return patience is not None and self.evaluations_since_best >= patience

    def record_evaluation(self, val_loss: float) -> bool:
        """Record an evaluation. Returns whether it is the best so far."""
        improved = val_loss < self.best_val_loss
        if improved:
            self.best_val_loss, self.best_step, self.evaluations_since_best = val_loss, self.step, 0
        else:
            self.evaluations_since_best += 1
        return improved
