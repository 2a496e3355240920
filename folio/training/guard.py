"""Detection of bad steps, which must not change the model, and of a run that diverges.

Steps are judged on the device, and reported at logged steps.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from folio.base.files import write_json
from folio.data.tokenizer import Tokenizer
from folio.machine.runtime import DeviceTime
from folio.training.evaluations import Evaluations

DECAY = 0.98  # of the running mean and variance, which cover about 50 steps
MIN_STEPS = 100  # before spikes are detected


class JudgedStep(NamedTuple):
    """The numbers of one step."""

    step: int
    loss: float | None  # None: the step had no targets, and changed nothing
    grad_norm: float | None
    skipped: bool  # whether the step was bad, and changed no weights, moments or optimizer steps


class StepGuard:
    """Judges each step by its loss and gradient norm, without waiting for the device.

    A step that is not finite is bad. With skip_spikes=z, so is a step whose loss or gradient norm is more than z
    standard deviations above its running mean.
    """

    def __init__(self, device: torch.device, skip_spikes: float | None):
        self.skip_spikes, self.device = skip_spikes, device
        self.load({"in_a_row": 0, "skipped": 0, "without_targets": 0, "moments": [[0.0, 0.0, 0.0]] * 2})

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()` of a checkpoint."""
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]  # skipped steps: consecutive, total
        self.without_targets = state["without_targets"]  # total of the steps
        self.streak = 0  # the most consecutive skipped steps in the last read
        self.moments = torch.tensor(state["moments"], dtype=torch.float32, device=self.device)  # (2, 3)
        self.judged: list[Tensor] = []  # on the device
        self.sent = torch.empty(0, 3)  # (steps, 3), on the host after sent_time
        self.sent_time = DeviceTime(self.device)
        self.recent: list[JudgedStep] = []  # the steps of the last read and the 50 before them

    def judge(self, loss: Tensor, grad_norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return 1.0 if the optimizer must skip this step, else 0.0, on the device (torch's found_inf).

        scale: float16's loss scale. If only the gradient is infinite, the scale is lowered and the step is not counted
        as skipped, unless the scale is below 1: then the unscaled gradients overflow float16.
        """
        values = torch.stack([loss, grad_norm]).float()  # (2,)
        bad = ~values.isfinite().all()
        if self.skip_spikes is not None:
            steps, mean, variance = self.moments.unbind(dim=1)  # (2,) each
            deviation = values - mean
            bad |= ((deviation > self.skip_spikes * variance.sqrt()) & (steps >= MIN_STEPS)).any()
            weight = (1 / (steps + 1)).clamp(min=1 - DECAY)  # the first steps have equal weights
            new_mean = mean + weight * deviation
            new_variance = (1 - weight) * (variance + weight * deviation**2)
            new_moments = torch.stack([steps + 1, new_mean, new_variance], dim=1)
            self.moments.copy_(torch.where(bad, self.moments, new_moments))  # a captured step reads this memory
        counted = bad
        if scale is not None:
            counted = bad & ~(loss.isfinite() & ~grad_norm.isfinite() & (scale >= 1))
        self.judged.append(torch.cat([values, counted[None]]))
        return bad.float()

    def judge_without_targets(self) -> None:
        """Record a step without targets, which was not computed, and is neither good nor bad."""
        self.judged.append(torch.tensor([math.nan, math.nan, 0.0], device=self.device))

    def send(self) -> None:
        """Start copying the judged steps to the host. On CUDA, this does not wait for the device."""
        self.sent = torch.stack(self.judged).to("cpu", non_blocking=self.device.type == "cuda")
        self.judged.clear()
        self.sent_time = DeviceTime(self.device)

    def read(self, step: int) -> list[JudgedStep]:
        """Return the steps that were sent, up to `step`. Waits for the device to finish it."""
        self.sent_time.wait()
        rows, self.sent = self.sent.tolist(), self.sent[:0]
        first = step - len(rows) + 1
        steps = [JudgedStep(n, loss, norm, bool(skipped)) for n, (loss, norm, skipped) in enumerate(rows, start=first)]
        steps = [
            judged._replace(loss=None, grad_norm=None) if math.isnan(judged.loss) and not judged.skipped else judged
            for judged in steps  # any other step whose loss is NaN is skipped
        ]
        self.streak = 0
        for judged in steps:
            if judged.loss is None:
                self.without_targets += 1
                continue
            self.in_a_row = self.in_a_row + 1 if judged.skipped else 0
            self.streak = max(self.streak, self.in_a_row)
            self.skipped += judged.skipped
        self.recent = self.recent[-50:] + steps
        return steps

    def write_skipped(
        self, out_dir: Path, judged: JudgedStep, first: int, inputs: np.ndarray, tokenizer: Tokenizer
    ) -> str:
        """Write skipped/step-N.json with the inputs (B, T) of a skipped step. Returns a line about it.

        first: the number of its first sequence.
        """
        path = out_dir / "skipped" / f"step-{judged.step:06d}.json"
        content = {
            **judged._asdict(),
            "sequences": [first, first + len(inputs) - 1],
            "text": [tokenizer.decode(x) for x in inputs],
            "before": [other._asdict() for other in self.recent if judged.step - 50 <= other.step < judged.step],
        }
        report = f"step {judged.step:,} was skipped: loss {judged.loss:.4g}, gradient norm {judged.grad_norm:.4g}"
        try:
            write_json(path, json.loads(json.dumps(content), parse_constant=str))  # NaN as "NaN"
        except OSError as error:
            return f"{report}; its record could not be written ({error})"
        return f"{report}; see {path}"

    def can_continue(self, max_bad_steps: int, val_loss: float | None) -> bool:
        """Whether the last read had fewer than max_bad_steps bad steps in a row, and the validation loss is finite."""
        return self.streak < max_bad_steps and math.isfinite(val_loss or 0.0)

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step that had one; None if no recent step had."""
        return next((judged.loss for judged in reversed(self.recent) if judged.loss is not None), None)

    def diagnose(
        self,
        model: nn.Module,
        max_bad_steps: int,
        val_loss: float | None,
        evaluations: Evaluations,
        has_checkpoint: bool,
    ) -> tuple[str, str]:
        """Why the run cannot continue, and the remedy.

        val_loss: of an evaluation now, or None. evaluations: the earlier ones. has_checkpoint: whether it has saved a
        checkpoint.
        """
        last = next((step for step in reversed(self.recent) if step.skipped), self.recent[-1])
        restart = "resume" if has_checkpoint else "start again"
        if not all(p.isfinite().all() for p in model.parameters()):
            reason, remedy = "the weights are not finite", "start again, or from another checkpoint"
        elif val_loss is not None and not math.isfinite(val_loss):
            reason, remedy = f"the validation loss is {val_loss}", f"{restart} with a smaller --learning_rate"
        elif evaluations.has_diverged(val_loss, self.last_loss):
            reason = f"the validation loss rose to {val_loss:.4f}, from {min(evaluations.recent):.4f} before"
            remedy = f"{restart} with a smaller --learning_rate"
        elif not math.isfinite(last.loss):
            reason, remedy = (
                f"the loss is {last.loss}",
                "look at the text in skipped/, or lower --learning_rate",
            )
        elif not math.isfinite(last.grad_norm):
            reason = "the gradient is not finite"
            remedy = f"{restart} with a smaller --learning_rate or --dtype=float32"
        else:
            reason = f"{max_bad_steps} spikes in a row, the last of loss {last.loss:.4g} and norm {last.grad_norm:.4g}"
            remedy = "look at the text in skipped/; if it is fine, raise --skip_spikes or leave it out"
        return reason, remedy

    def state(self) -> dict[str, Any]:
        """The state to save in checkpoints, after all steps are read. JSON preserves float32 exactly."""
        counts = {"in_a_row": self.in_a_row, "skipped": self.skipped, "without_targets": self.without_targets}
        return {**counts, "moments": self.moments.tolist()}
