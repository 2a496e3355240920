"""Models that are trained in turns, to compare them (auto_size.py), and of which one is trained to the end.

Between its turns, a model is a checkpoint in OUT_DIR/race, so that only one optimizer is in memory at a time.
OUT_DIR/race/race.json has the settings, and what each turn did and measured. If the process is killed, a resumed run
decides again from the recorded turns, without training, and continues after them. So a decision may depend on the
settings, the data and the turns, but on nothing else.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from folio.base.files import finite, write_json
from folio.base.progress import progress_bar
from folio.checkpoints import checkpoint
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.schema import RaceFile, RaceTurn
from folio.training.optim import LearningRates
from folio.training.out_dir import cannot_write
from folio.training.planning.resume import RACE, Draft
from folio.training.planning.run_plan import Plan
from folio.training.planning.train_settings import TrainSettings
from folio.training.setup import OpenRun, new_state
from folio.training.state import TrainState, state_file

TimedStep = Callable[[OpenRun, TrainState, LearningRates, TrainSettings], float]
Evaluate = Callable[[OpenRun, int], dict[str, float]]
WARMUP_STEPS = 2  # of a turn, which are slower than the others


@dataclass(eq=False)
class Entrant:
    """A model in a race."""

    name: str
    plan: Plan
    run: OpenRun
    turns: list[RaceTurn] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The steps that the model was trained for."""
        return self.turns[-1]["step"] if self.turns else 0


class Race:
    """Trains models in turns.

    open_entrant: opens the run of a draft. timed_step, evaluate: train.py's.
    """

    def __init__(
        self,
        draft: Draft,
        open_entrant: Callable[[Draft], tuple[Plan, OpenRun]],
        timed_step: TimedStep,
        evaluate: Evaluate,
    ):
        self.draft, self.open_entrant, self.timed_step, self.evaluate = draft, open_entrant, timed_step, evaluate
        self.path = Path(draft.cfg.out_dir) / RACE
        self.folder = self.path.parent
        self.past_turns = list(draft.race["turns"]) if draft.race else []  # still to be followed
        self.turns: list[RaceTurn] = []
        self.start_time = time.perf_counter() - (self.past_turns[-1]["spent"] if self.past_turns else 0.0)
        if not self.past_turns:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def spent(self) -> float:
        """Seconds from the start to the end of the last turn."""
        return self.turns[-1]["spent"] if self.turns else 0.0

    def enter(self, name: str, draft: Draft) -> Entrant:
        """Open a model."""
        return Entrant(name, *self.open_entrant(draft))

    def turn(self, entrant: Entrant, steps: int, decay_steps: int = 0) -> RaceTurn:
        """Train a model for a number of steps at the learning rates with which its run begins.

        decay_steps: then train a copy for this many steps, while its learning rates decay to 0, and measure its loss.
        """
        if self.past_turns:
            turn = self.past_turns.pop(0)
        else:
            try:
                turn = self._train(entrant, steps, decay_steps)
            except OSError as error:
                raise cannot_write(self.draft.cfg.out_dir, error) from None
        self.turns.append(turn)
        entrant.turns.append(turn)
        return turn

    def _train(self, entrant: Entrant, steps: int, decay_steps: int) -> RaceTurn:
        run, cfg = entrant.run, entrant.plan.settings
        schedule = cfg.replace(lr_schedule="constant").schedule(entrant.plan.counts, {})  # its run may become longer
        state = new_state(run, cfg)
        if entrant.turns:
            state.restore(self.checkpoint(entrant))
        times: list[float] = []
        with progress_bar(total=steps + decay_steps, desc=entrant.name, unit="step", leave=False) as bar:
            for _ in range(steps):
                times.append(self.timed_step(run, state, schedule.learning_rates_at(state.step), cfg))
                bar.update()
            self._save(entrant, state)
            step, loss, val_loss = state.step, state.guard.last_loss, None
            learning_rate, muon_learning_rate = schedule.learning_rates_at(step)
            for i in range(decay_steps):
                left = 1 - i / decay_steps
                self.timed_step(run, state, LearningRates(left * learning_rate, left * muon_learning_rate), cfg)
                bar.update()
        if decay_steps:
            val_loss = self.evaluate(run, cfg.batch_size)["val_loss"]
        turn: RaceTurn = {
            "model": entrant.name,
            "step": step,
            "steps": steps,
            "step_seconds": statistics.median(times[WARMUP_STEPS:] or times),
            "loss": finite(loss),
            "decay_steps": decay_steps,
            "val_loss": finite(val_loss),
            "spent": time.perf_counter() - self.start_time,
        }
        cfg, turns = self.draft.cfg, [*self.turns, turn]
        record = RaceFile(config=asdict(cfg), origins=dict(cfg.origins), data=entrant.plan.data.hash, turns=turns)
        write_json(self.path, record)
        return turn

    def _save(self, entrant: Entrant, state: TrainState) -> None:
        """Save a model until its next turn. Raises OSError."""
        folder = self.folder / entrant.name
        folder.mkdir(parents=True, exist_ok=True)
        content = state_file(entrant.plan.record, state, entrant.plan.schedule)
        weights, optimizer = state.tensors(keep=True, copy=False)
        # race.json is written after the checkpoint. The one before it stays, because the turn may be lost in between.
        tokenizer = entrant.plan.data.tokenizer
        checkpoint.save(folder, state.step, weights, optimizer, tokenizer, content, keep_last=2)

    def checkpoint(self, entrant: Entrant) -> Checkpoint:
        """The model after its last turn. Raises CheckpointError."""
        return checkpoint.load(self.folder / entrant.name / f"step-{entrant.step:06d}")
