"""The validation losses of a run: the best one, the last ones, and what they say about the run."""

import math
from typing import Any

RISE = 1.05  # ratio of the validation loss to the lowest of the last evaluations from which a run has diverged
EVALUATIONS = 5  # that are compared
NOTABLE_RISE = 1.01  # ratio to the best validation loss from which a rise is reported


class Evaluations:
    """The record of a run's evaluations. Losses are in nats per token."""

    def __init__(self) -> None:
        self.best_val_loss, self.best_step = math.inf, 0
        self.since_best = 0  # evaluations
        self.recent: list[float] = []  # the last EVALUATIONS validation losses
        self.last_step = 0  # of the last evaluation
        self.losses: dict[str, float] = {}  # of the last evaluation in this process
        self.training_loss: float | None = None  # at the last evaluation; None: no recent step had targets

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the values in state.json."""
        self.best_step = saved["best_step"]
        self.best_val_loss = saved["best_val_loss"] if self.best_step else math.inf
        self.since_best = saved["evaluations_since_best"]
        self.recent, self.last_step = saved["guard"]["val_losses"], saved["guard"]["evaluated_at"]
        self.losses, self.training_loss = {}, None

    def state(self) -> dict[str, Any]:
        """The values to save in state.json, besides those of the last evaluations."""
        return {
            "best_val_loss": self.best_val_loss if self.best_step else None,
            "best_step": self.best_step,
            "evaluations_since_best": self.since_best,
        }

    def add(self, losses: dict[str, float], step: int, training_loss: float | None) -> bool:
        """Add an evaluation after `step`. Returns whether it is the best so far.

        losses: "val_loss", and "val_loss/NAME" of several data sets.
        """
        val_loss = losses["val_loss"]
        self.losses, self.training_loss, self.last_step = losses, training_loss, step
        self.recent = [*self.recent, val_loss][-EVALUATIONS:]
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step, self.since_best = val_loss, step, 0
            return True
        self.since_best += 1
        return False

    def forget(self) -> None:
        """Start the history again: later losses cannot be compared with the earlier ones."""
        self.best_val_loss, self.best_step, self.since_best, self.recent = math.inf, 0, 0, []

    def is_out_of(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row did not improve; None: never."""
        return patience is not None and self.since_best >= patience

    def has_diverged(self, val_loss: float | None, training_loss: float | None) -> bool:
        """Whether a new validation loss is far above the last ones. False if the model overfits: then the training loss
        is below them. None: not known.
        """
        if val_loss is None or not self.recent or training_loss is None:
            return False
        return val_loss > RISE * min(self.recent) and training_loss > min(self.recent)

    @property
    def has_risen(self) -> bool:
        """Whether two or more evaluations in a row were above the best, and the last one notably."""
        if self.since_best < 2 or not self.losses:
            return False
        return self.losses["val_loss"] > NOTABLE_RISE * self.best_val_loss

    def remark(self, val_loss: float) -> str:
        """A remark on a loss that is worse than the best one; otherwise empty."""
        best, best_step = self.best_val_loss, self.best_step
        return f" ({val_loss - best:.4f} above the best, of step {best_step:,})" if val_loss > best else ""

    def describe_rise(self) -> str:
        """Describe the rise of the validation loss, its probable cause, and what helps.

        If the model overfits, the training loss is below the best validation loss. If the learning rate is too high,
        both losses rise.
        """
        best, last, best_step = self.best_val_loss, self.losses["val_loss"], self.best_step
        if self.training_loss is None:
            reason = "the last steps had no targets"
        elif self.training_loss < best:
            reason = "the model overfits (more text, more dropout or a smaller model would help)"
        else:
            reason = f"the training loss is {self.training_loss:.4f}, so the learning rate is probably too high"
        return (
            f"the validation loss has risen by {last - best:.4f} since step {best_step:,}, from {best:.4f} to "
            f"{last:.4f}: {reason}; sample.py takes the best checkpoint, of step {best_step:,}"
        )
