"""--size=auto: the model that is expected to reach the lowest loss on the data in the minutes of a run.

A law forecasts the loss of each shape from its size and from the steps that fit into the time of the run. Turns of a
race measure the time of a step, for the shapes that may be the best and for that of config/shakespeare_char.py.
"""

import math
from dataclasses import replace

from folio import UserError
from folio.base.number_format import counted, format_tokens
from folio.base.settings import COMMAND_LINE
from folio.checkpoints.schema import RaceTurn
from folio.data.find_data import find_datasets
from folio.data.windows import Mixture
from folio.training.planning.choice import TRAINING_SHARE, Candidate, choose, rank_shapes, recipes_shape
from folio.training.planning.data import open_data
from folio.training.planning.measured_law import best_laws
from folio.training.planning.race import Entrant, Race
from folio.training.planning.resume import SIZE_AUTO, Draft
from folio.training.planning.shapes import CHANNELS, Shape
from folio.training.planning.step_times import StepTimes
from folio.training.planning.train_settings import TrainSettings

MAX_SHARE = 0.25  # of the minutes, for the race
CHANGES = (("channels", -1), ("channels", 1), ("epochs", 2), ("dropout", 0.1), ("epochs", 0.5), ("dropout", -0.1))
MACHINE = "machine"  # name of the turn that only measures the machine
TURNS, TURN_STEPS = 2, 6  # to measure the time of a step
TURN_SHARE, MIN_TURN_STEPS = 0.01, 3  # if the steps of a turn take more than this share of the minutes, it has fewer


def choose_size(draft: Draft, race: Race) -> Draft:
    """For size="auto", return the draft with the best model, context, batch and recipe in its settings.

    The time for this is part of the minutes of the run, which continues the training of the chosen model.
    """
    cfg = draft.cfg
    longest, shortest_context = longest_text(cfg), Shape.of(CHANNELS[0]).block_size
    if longest <= shortest_context:
        raise UserError(
            f"size=auto: {cfg.dataset} has {counted(longest, 'training token')}, and the smallest model reads "
            f"{shortest_context + 1} at a time; use more text"
        )
    data = open_data(cfg.replace(block_size=shortest_context))
    if draft.race and draft.race["data"] != data.hash:
        raise UserError(f"{cfg.dataset} has changed since the race in {cfg.out_dir}; start the run again")
    contenders = Contenders(draft, data, longest, race)
    contenders.measure_speeds()
    best = choose(contenders.rank(), contenders.is_measured)
    if contenders.fits_minutes(best) and with_candidate(cfg, best).lr_schedule == "wsd":  # a small text
        best = contenders.improve(best)
    return contenders.decide(best)


class Contenders:
    """The models among which --size=auto chooses, and what is known about them."""

    def __init__(self, draft: Draft, data: Mixture, longest: int, race: Race):
        self.draft, self.cfg, self.data, self.longest, self.race = draft, draft.cfg, data, longest, race
        self.laws, self.is_measured = best_laws(data)
        self.step_times = StepTimes(data.vocab_size)
        self.entered: dict[int, Candidate] = {}  # whose speed was measured, by channels
        self.entrants: dict[str, Entrant] = {}

    @property
    def seconds(self) -> float:
        """The time that is left."""
        return 60 * self.cfg.minutes - self.race.spent

    def rank(self) -> list[Candidate]:
        """The shapes that can be trained in the time that is left, the lowest expected loss first. Raises UserError."""
        U = self.data.training_tokens
        ranked = rank_shapes(self.laws, self.step_times, self.seconds, U, self.data.vocab_size, self.entered)
        ranked = [candidate for candidate in ranked if candidate.shape.block_size < self.longest]
        if not ranked:
            raise UserError(
                f"minutes={self.cfg.minutes:g}: size=auto needs more time, or more text than the "
                f"{counted(U, 'training token')} of {self.cfg.dataset}"
            )
        return ranked

    def enter(self, candidate: Candidate, name: str) -> Entrant:
        """The entrant of a candidate with a name."""
        if name not in self.entrants:
            draft = replace(self.draft, cfg=with_candidate(self.cfg, candidate).replace(compile=False), lines=[])
            self.entrants[name] = self.race.enter(name, draft)
        return self.entrants[name]

    # --- speeds -------------------------------------------------------------------------------------------------------

    def measure_speeds(self) -> None:
        """Measure the time of a step of the recipe's shape, and of the best shape until its time is measured.

        Each of them has TURNS turns, of which the fastest counts, because other programs may slow one down. A turn
        before them measures the machine, on which the batches and contexts depend.
        """
        self.measure_speed(recipes_shape(self.rank()), MACHINE)
        best = recipes_shape(self.rank())
        while True:
            if best.shape.n_embd not in self.entered:
                self.entered[best.shape.n_embd] = best
                self.measure_speed(best, best.name)
            elif behind := [entry for entry in self.entered.values() if len(self.entrants[entry.name].turns) < TURNS]:
                for candidate in behind:
                    self.measure_speed(candidate, candidate.name)
            else:
                return
            best = self.rank()[0]

    def measure_speed(self, candidate: Candidate, name: str) -> None:
        shape, entrant = candidate.shape, self.enter(candidate, name)
        affordable = TURN_SHARE * 60 * self.cfg.minutes / self.step_times(shape, candidate.step_tokens)
        self.race.turn(entrant, max(MIN_TURN_STEPS, min(TURN_STEPS, int(affordable))))
        fastest = min(turn["step_seconds"] for turn in entrant.turns)
        self.step_times.measured(shape, candidate.step_tokens, fastest)

    def run_seconds(self, candidate: Candidate) -> float:
        """The time of a run."""
        return candidate.size.steps * self.step_times(candidate.shape, candidate.step_tokens) / TRAINING_SHARE

    def fits_minutes(self, candidate: Candidate) -> bool:
        """Whether a run takes less than the time that is left, because its epochs end it."""
        return self.run_seconds(candidate) < 0.9 * self.seconds

    # --- small texts --------------------------------------------------------------------------------------------------

    def improve(self, best: Candidate) -> Candidate:
        """The best of some complete runs, beginning with one candidate, which change one thing at a time.

        Only as many as fit into MAX_SHARE of the minutes, and none if that is less than two.
        """
        limit, losses = MAX_SHARE * 60 * self.cfg.minutes, {}

        def is_affordable(candidate: Candidate, runs: int = 1) -> bool:
            return self.race.spent + runs * self.run_seconds(candidate) <= limit

        def loss(candidate: Candidate) -> float:
            if candidate.run_name not in losses:
                losses[candidate.run_name] = self.loss_of_a_run(candidate)
            return losses[candidate.run_name]

        if not is_affordable(best, 2):
            return best
        changes, is_better = [*CHANGES], True
        while is_better:
            is_better = False
            for change in changes:
                variant = self.changed(best, *change)
                if variant and variant.run_name not in losses and is_affordable(variant) and loss(variant) < loss(best):
                    best, is_better = variant, True
                    changes = [change, *(other for other in changes if other != change)]  # further in this direction
                    break
        return best

    def changed(self, candidate: Candidate, setting: str, factor: float) -> Candidate | None:
        """The candidate with one setting changed, or None if it cannot be."""
        size, shape, dropout = candidate.size, candidate.shape, candidate.dropout
        if setting == "epochs":
            size = size._replace(tokens=round(factor * size.tokens), steps=round(factor * size.steps))
        elif setting == "channels":
            i = CHANNELS.index(shape.n_embd) + factor
            if not 0 <= i < len(CHANNELS) or Shape.of(CHANNELS[i]).block_size >= self.longest:
                return None
            shape = Shape.of(CHANNELS[i])
            size = size._replace(weights=shape.matrix_weights(self.data.vocab_size))
        elif setting == "dropout":
            dropout = round(dropout + factor, 1)
            if dropout < 0 or self.cfg.origins.get("dropout") == COMMAND_LINE:
                return None
        return replace(candidate, shape=shape, dropout=dropout, size=size)

    def loss_of_a_run(self, candidate: Candidate) -> float:
        """The validation loss at the end of a run."""
        entrant = self.enter(candidate, candidate.run_name)
        counts = entrant.plan.schedule.counts
        begin = counts.max_iters - counts.wsd_decay_iters
        turn = self.race.turn(entrant, begin - entrant.step, counts.max_iters - begin)
        return math.inf if turn["val_loss"] is None else turn["val_loss"]

    # --- decision -----------------------------------------------------------------------------------------------------

    def decide(self, best: Candidate) -> Draft:
        """The draft with a candidate's settings."""
        cfg, entrant = self.cfg, self.entrants.get(best.run_name) or self.entrants[best.name]
        sized = with_candidate(cfg, best)
        seconds_per_step = self.step_times(best.shape, best.step_tokens)
        lines = self.draft.lines
        lines.append(describe_race(self.race.turns))
        lines.append(describe(best, best.step_tokens / seconds_per_step, self.is_measured))
        replaced = [
            f"{name}={getattr(cfg, name)} ({cfg.origins[name]})"
            for name in cfg.origins
            if cfg.is_from_file(name) and getattr(sized, name) != getattr(cfg, name)
        ]
        if replaced:
            lines.append(f"size=auto replaces {', '.join(replaced)}")
        constant_steps = sized.max_iters - sized.wsd_decay_iters
        fits_minutes = self.fits_minutes(best)
        continues = sized.lr_schedule in ("wsd", "constant") and (not fits_minutes or entrant.step <= constant_steps)
        if fits_minutes:  # no evaluation takes an epoch from it
            epochs = best.tokens / best.unique_tokens
            minutes = f"{self.run_seconds(best) / 60:.2g} of {counted(cfg.minutes, 'minute')}"
            lines.append(f"the run takes {minutes}: more than {epochs:.0f} epochs do not help")
        return replace(
            self.draft,
            cfg=sized,
            start_time=self.race.start_time,
            fits_minutes=fits_minutes,
            turns=self.race.turns,
            head_start=self.race.checkpoint(entrant) if continues else None,
            step_seconds=seconds_per_step,
        )


def longest_text(cfg: TrainSettings) -> int:
    """The tokens of the longest training shard; of several data sets, of the one in which it is the shortest."""
    return min(max(map(len, dataset.train)) for dataset, _ in find_datasets(cfg.dataset, cfg.data_dir))


def with_candidate(cfg: TrainSettings, best: Candidate) -> TrainSettings:
    """The settings with those of a candidate, except what the command line has set."""
    settings = {**best.settings, "gradient_accumulation_steps": None, "total_batch_tokens": None}
    chosen = {name: value for name, value in settings.items() if cfg.origins.get(name) != COMMAND_LINE}
    return cfg.replace({**cfg.origins, **dict.fromkeys(chosen, SIZE_AUTO)}, **chosen)


def describe_race(turns: list[RaceTurn]) -> str:
    """The line about what was measured."""
    losses = {turn["model"]: turn["val_loss"] for turn in turns if turn["decay_steps"]}
    seconds: dict[str, float] = {}
    for turn in turns:
        if turn["model"] not in (MACHINE, *losses):
            seconds[turn["model"]] = min(turn["step_seconds"], seconds.get(turn["model"], math.inf))
    speeds = ", ".join(f"{name} {1000 * step_seconds:,.0f} ms" for name, step_seconds in seconds.items())
    line = f"size=auto: measured in {turns[-1]['spent']:.2g} s: a step of {speeds}"
    if losses:
        runs = sorted(losses.items(), key=lambda run: math.inf if run[1] is None else run[1])
        results = ", ".join(f"{name} {'diverged' if loss is None else f'{loss:.4f}'}" for name, loss in runs)
        line += f"; the loss of {counted(len(losses), 'complete run')}: {results}"
    return line


def describe(best: Candidate, tokens_per_second: float, is_measured: bool) -> str:
    """The line about the choice. is_measured: whether the law is that of this text."""
    shape = best.shape
    line = (
        f"size=auto: {counted(shape.n_layer, 'layer')} of {shape.n_embd} channels, contexts of {shape.block_size} "
        f"tokens, about {format_tokens(best.tokens)} tokens at {tokens_per_second:,.0f} per second"
    )
    if is_measured:
        return f"{line}; expected validation loss {best.forecast}"
    return f"{line}; by the scaling of other texts (tools/scaling.py measures that of this one)"
