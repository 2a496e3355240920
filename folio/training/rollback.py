"""The return to an earlier checkpoint of a run that diverges (on_divergence="rollback").

The run continues from the last checkpoint before the rise, skips the sequences that it has read since, as in PaLM
(Chowdhery et al. 2022, section 5.1), and lowers its learning rates. If it diverges again before the next checkpoint, it
skips as many sequences again, because bad text may be longer than the steps that detect it.
"""

from typing import Any

from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.schema import PartRecord
from folio.training.planning.resume import changed_settings
from folio.training.planning.train_settings import TrainSettings

MAX_ROLLBACKS = 3
LR_FACTOR = 0.5  # of each rollback


def new_part(
    cls: type[TrainSettings], current: PartRecord, saved: Checkpoint, next_sequence: int, config: dict[str, Any]
) -> PartRecord:
    """The part of a run that begins with a rollback.

    cls: train.py's settings. current: the part that diverged. saved: the checkpoint. next_sequence: the first one that
    is not read yet. config: the run's settings, which may have changed since the checkpoint.
    """
    step, begin = saved.state["step"], saved.state["next_sequence"]
    rollbacks = [part for part in saved.state["parts"] if part["from_step"] == step and "skipped_sequences" in part]
    already_skipped = next_sequence - rollbacks[0]["skipped_sequences"][0] if rollbacks else 0
    return {
        **current,
        "from_step": step,
        "after": "a rollback",
        "changes": changed_settings(cls, saved.state["config"], config),
        "exact": True,
        "decisions": None,  # Session.save fills them in
        "rollbacks": current.get("rollbacks", 0) + 1,
        "lr_factor": LR_FACTOR * current.get("lr_factor", 1.0),
        "skipped_sequences": (begin, next_sequence + already_skipped),
    }
