"""The state of training: everything that a step changes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.schema import RunProgress
from folio.machine.distributed import fill_shards, full_tensor
from folio.machine.kernels import pad_rows
from folio.training.evaluations import Evaluations
from folio.training.guard import StepGuard
from folio.training.optim import load_state_tensors, state_tensors
from folio.training.schedule import Schedule
from model import GPT


@dataclass
class TrainState:
    """Everything that a training step changes, and the evaluations so far."""

    model: GPT
    net: nn.Module  # the model wrapped by DistributedDataParallel, or the model itself
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # scales the loss in float16
    guard: StepGuard
    evaluations: Evaluations
    step: int = 0
    next_sequence: int = 0
    loads: int = 0  # how often it was loaded, after which a captured step would use the tensors before it

    def progress(self) -> RunProgress:
        """The values to save in state.json; tensors are saved separately."""
        return {
            "step": self.step,
            "next_sequence": self.next_sequence,
            **self.evaluations.state(),
            "guard": {
                **self.guard.state(),
                "val_losses": self.evaluations.recent,
                "evaluated_at": self.evaluations.last_step,
            },
            "grad_scaler": self.scaler.state_dict(),
        }

    def load(self, progress: dict[str, Any], optimizer: dict[str, Tensor]) -> None:
        """Restore the progress and the optimizer from a checkpoint. The model is restored when it is built."""
        load_state_tensors(self.model, self.optimizer, optimizer)
        self.loads += 1
        if progress["grad_scaler"]:  # empty if the run was not in float16
            self.scaler.load_state_dict(progress["grad_scaler"])
        self.step, self.next_sequence = progress["step"], progress["next_sequence"]
        self.guard.load(progress["guard"])
        self.evaluations.load(progress)

    def restore(self, saved: Checkpoint) -> None:
        """Restore everything from a checkpoint of this run, in place."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            fill_shards(self.model, lambda name: pad_rows(saved.model[name], len(parameters[name])))
        self.load(saved.state, saved.optimizer())

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


def state_file(
    record: dict[str, Any],
    state: TrainState,
    schedule: Schedule,
    budget: dict[str, float] | None = None,
    stopped_by: str | None = None,
    wandb_id: str | None = None,
) -> dict[str, Any]:
    """The content of a checkpoint's state.json. record: of the plan. The others are the progress of the run."""
    *old_parts, part = record["parts"]
    return {
        **record,
        **state.progress(),
        "stopped_by": stopped_by,
        "wandb_id": wandb_id,
        "parts": [*old_parts, {**part, "decisions": list(schedule.decisions)}],
        "budget": budget,
    }
