"""The settings of a run, merged with those of the checkpoint that it starts from: its own, or one to finetune.

A setting takes the first value available, in this order:

    a new run            the arguments, the default
    a resumed run        the arguments, the checkpoint, the default
      fixed settings     the checkpoint (roles.KEPT); another value on the command line is an error
      minutes            the arguments on the command line (for that many more), the checkpoint
      step counts        as above; if max_iters changes, counts chosen for the old value are scaled
      device, dtype      as a new run, but "auto" keeps what it was resolved to (folio/machine/runtime.py)
    a finetuned run      as a new run
      mask_documents     the arguments, the checkpoint
      model shape        the checkpoint (SHAPE), except a block_size that the positions allow; other values as above

Arguments are config files and options; the last one to set a value wins. Where a config file contradicts a setting
that only the checkpoint decides, its value is ignored and a line says so.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base import settings
from folio.base.files import read_json
from folio.base.number_format import counted
from folio.base.roles import KEPT, OF_THE_COMMAND, UNCHANGEABLE, UNREPORTED, Role, names_with, names_without
from folio.base.settings import COMMAND_LINE, ConfigError, convert
from folio.base.workers import under_torchrun
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import MODEL_SETTINGS, Checkpoint
from folio.checkpoints.find_runs import find_run
from folio.checkpoints.identify import HUB, NoCheckpointError
from folio.checkpoints.run_folder import CheckpointError
from folio.checkpoints.schema import RaceFile, RaceTurn
from folio.machine import distributed
from folio.training.optim import LearningRates
from folio.training.planning.train_settings import TrainSettings
from folio.training.schedule import STEP_COUNTS, Schedule, StepCounts

DROPOUT = [name for name in MODEL_SETTINGS if "drop" in name]  # may change
SHAPE = [name for name in MODEL_SETTINGS if name not in DROPOUT]  # determine the shapes or the meaning of the weights
SIZE_AUTO = "--size=auto"  # origin of the settings that it chose
RACE = Path("race", "race.json")  # in out_dir; see race.py


@dataclass(frozen=True)
class SavedRun:
    """The run to resume: its last checkpoint, and the settings in it."""

    checkpoint: Checkpoint
    settings: TrainSettings

    @property
    def state(self) -> dict[str, Any]:
        """state.json."""
        return self.checkpoint.state

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def part(self) -> Mapping[str, Any]:
        """The last part of the run, a schema.PartRecord."""
        return self.state["parts"][-1]

    @cached_property
    def schedule(self) -> Schedule:
        return self.settings.schedule(self.settings.step_counts, self.part)

    @property
    def learning_rates(self) -> LearningRates:
        """The learning rates of the last step."""
        return self.schedule.learning_rates_at(max(0, self.step - 1))


@dataclass(frozen=True)
class Draft:
    """The settings of a run before they are resolved: the user's, adapted to the checkpoint to start from."""

    cfg: TrainSettings
    weights: Checkpoint | None = None  # to resume or to finetune; None: from scratch
    saved: SavedRun | None = None  # the run to resume; None: a new run
    adds_minutes: bool = False  # True: the resumed run is trained for cfg.minutes more
    fits_minutes: bool = False  # True: the step counts of a new run take less than cfg.minutes
    start_time: float | None = None  # in time.perf_counter()'s seconds, from which cfg.minutes count; None: now
    race: RaceFile | None = None  # that was killed, and continues
    turns: list[RaceTurn] = field(default_factory=list)  # of a race that is over
    head_start: Checkpoint | None = None  # its winner; see Plan
    step_seconds: float | None = None  # of the winner
    lines: list[str] = field(default_factory=list)  # to print; make_plan adds to them

    @property
    def part(self) -> Mapping[str, Any]:
        """The PartRecord whose schedule continues; empty for a new run. Added minutes set the number of steps again."""
        if not self.saved:
            return {}
        return {**self.saved.part, "decisions": None} if self.adds_minutes else self.saved.part

    @property
    def max_val_tokens(self) -> int | None:
        """Tokens of each validation set that an evaluation measures; None: all.

        A resumed run measures the same text as before, whatever its micro-batch is now, unless eval_iters changes.
        """
        if not self.saved or self.cfg.eval_iters != self.saved.settings.eval_iters:
            return self.cfg.max_val_tokens
        return self.saved.part["max_val_tokens"]

    @property
    def scaling(self) -> list[str]:
        """The step counts that follow the number of steps of a run of cfg.minutes."""
        origins = self.cfg.origins
        if self.adds_minutes:  # the run so far is the recipe, from which only counts of the command line are kept
            origins = {**origins, "max_iters": "checkpoint"}
        return self.cfg.step_counts.scaling_with_max_iters(origins)

    @property
    def lengthening(self) -> list[str]:
        """The step counts that follow the total number of steps if cfg.minutes are added to a run."""
        counts, saved_counts = self.cfg.step_counts, self.saved.settings.step_counts
        unchanged = [name for name in STEP_COUNTS if getattr(counts, name) == getattr(saved_counts, name)]
        return [name for name in unchanged if self.cfg.is_from_file(name) or self.saved.settings.minutes]


def resolve_latest(user_cfg: TrainSettings) -> TrainSettings:
    """Replace "latest", in out_dir (resume) or init_from (finetune), by the folder of the newest run.

    Raises UserError if there is no run, or under torchrun, whose processes and restarts may find different ones.
    """
    setting = "out_dir" if user_cfg.init_from == "resume" else "init_from"
    name = getattr(user_cfg, setting)
    folder = find_run(name)
    if folder != name and under_torchrun():
        raise UserError(f"{setting}={name}: under torchrun, name the run's folder: --{setting}={folder}")
    return user_cfg.replace(**{setting: folder})


def merge_checkpoint(user_cfg: TrainSettings, lines: list[str], writes: bool = True) -> Draft:
    """Load the checkpoint that the run starts from, if any, and adapt the user's settings to it. Raises UserError.

    A run that torchrun has restarted resumes, whatever init_from is. lines: those to print are appended, so that they
    are known also if there is an error. writes: False if no run is started, so that out_dir may hold any other one.
    """
    out_dir = Path(user_cfg.out_dir)
    restarted = under_torchrun() and distributed.is_restart(run_folder.last_state(out_dir).get("torchrun"))
    if restarted or user_cfg.init_from == "resume":
        if not run_folder.exists(out_dir) and (out_dir / RACE).is_file() and not user_cfg.eval_only:
            return resume_race(user_cfg, out_dir / RACE, lines)
        return resume_run(user_cfg, load_run(out_dir), restarted, lines)
    weights = None if user_cfg.init_from == "scratch" else load_weights(user_cfg.init_from)
    if writes and run_folder.exists(out_dir) and not (user_cfg.overwrite or user_cfg.eval_only):
        raise UserError(
            f"{out_dir} holds the checkpoints of an earlier run: resume it with --init_from=resume, choose another "
            f"--out_dir, or replace them with --overwrite=True"
        )
    return finetune_run(user_cfg, weights, lines) if weights else Draft(user_cfg, lines=lines)


def load_run(out_dir: Path) -> Checkpoint:
    """Load the last checkpoint of the run to resume. Raises UserError."""
    try:
        return checkpoint.load(out_dir)
    except NoCheckpointError as error:
        raise NoCheckpointError(error.path, "--out_dir=") from None


def load_weights(init_from: str) -> Checkpoint:
    """Load a checkpoint to finetune: a run, a name on the Hugging Face hub, or a foreign format. Raises UserError."""
    try:
        return foreign.load(init_from)
    except NoCheckpointError as error:
        if error.identity or Path(init_from).exists():
            raise NoCheckpointError(error.path, "--init_from=") from None
        known = ", ".join(["scratch", "resume", *HUB])
        raise UserError(f"init_from={init_from}: expected {known}, or the path of a checkpoint") from None


# --- a new run from trained weights -----------------------------------------------------------------------------------


def finetune_run(user_cfg: TrainSettings, ckpt: Checkpoint, lines: list[str]) -> Draft:
    """A new run from trained weights. lines: those to print are appended. Raises UserError."""
    cfg = user_cfg.replace(**shape_settings(user_cfg, ckpt, lines))
    is_masked = ckpt.config().document_token is not None
    if not cfg.is_set("mask_documents"):
        cfg = cfg.replace(mask_documents=is_masked)
    if not cfg.eval_only:
        lines.append(f"a new run in {cfg.out_dir}, from the weights of {ckpt.path}")
        if run_folder.exists(Path(cfg.init_from)):
            lines.append(
                f"(to continue the run in {cfg.init_from} instead: --init_from=resume --out_dir={cfg.init_from})"
            )
    if is_masked or cfg.mask_documents:
        trained = "as the weights were trained" if is_masked else "but the weights were trained without it"
        if not cfg.mask_documents:
            trained = "but the weights were trained with it"
        lines.append(f"mask_documents={cfg.mask_documents}, {trained}")
    settings.check(cfg)
    return Draft(cfg, ckpt, lines=lines)


def shape_settings(cfg: TrainSettings, ckpt: Checkpoint, lines: list[str]) -> dict[str, Any]:
    """The settings of the model's shape, from the checkpoint. lines: one about values in a config file that differ is
    appended.

    `cfg` may have a shorter block_size, and a longer one if positions are not learned. Raises UserError for any other
    value on the command line.
    """
    default = {field.name: field.default for field in fields(cfg)}
    config = ckpt.config()
    shape = {name: getattr(config, name) for name in SHAPE}
    refused, ignored = [], []
    for name, trained in shape.items():
        requested, origin = getattr(cfg, name), cfg.origins.get(name)
        if requested == trained or (requested == default[name] and origin is None):
            continue
        if name == "block_size" and (requested < trained or shape["position"] != "learned"):
            shape[name] = requested
        elif origin in (None, COMMAND_LINE):
            limit = ", the size of its position table" if name == "block_size" else ""
            refused.append(f"{name}={requested}: the checkpoint {ckpt.path} has {name}={trained}{limit}")
        else:
            ignored.append(f"{name}={trained} (not {requested})")
    if refused:
        raise UserError(f"{'; '.join(refused)}; leave the setting out")
    if ignored:
        lines.append(f"the model's shape comes from the checkpoint {ckpt.path}: {', '.join(ignored)}")
    return shape


# --- a run that continues ---------------------------------------------------------------------------------------------


def resume_run(user_cfg: TrainSettings, ckpt: Checkpoint, restarted: bool, lines: list[str]) -> Draft:
    """A run that continues from its own checkpoint. Raises UserError.

    restarted: torchrun has restarted the run, with the same command. lines: those to print are appended.
    """
    saved = SavedRun(ckpt, saved_settings(type(user_cfg), ckpt))
    if restarted:
        user_cfg = user_cfg.replace(init_from="resume", overwrite=False)
    cfg = merge_saved_settings(user_cfg, saved, restarted, lines)
    cfg = cfg.replace(**shape_settings(cfg, ckpt, lines))
    require_same_run(cfg, saved)
    cfg = cfg.replace(**batch_settings(user_cfg, cfg, saved))
    adds_minutes = not restarted and minutes_are_added(user_cfg, saved)
    cfg = cfg.replace(**asdict(resumed_step_counts(user_cfg, cfg, saved, adds_minutes, lines)))
    all_origins = {**dict.fromkeys(asdict(cfg), str(ckpt.path)), **cfg.origins}  # every setting is known now
    settings.check(cfg.replace(all_origins))
    return Draft(cfg, ckpt, saved, adds_minutes, lines=lines)


def resume_race(user_cfg: TrainSettings, path: Path, lines: list[str]) -> Draft:
    """A new run whose race of --size=auto was killed, and continues with the same settings. Raises UserError."""
    cls = type(user_cfg)
    try:
        race = convert(read_json(path), RaceFile)
        saved_cfg = settings.from_json(cls, race["config"])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); start the run again, without --init_from=resume") from None
    command = {name: getattr(user_cfg, name) for name in names_with(cls, Role.COMMAND)}
    given = [name for name in names_without(cls, OF_THE_COMMAND) if user_cfg.is_set(name)]
    changed = [name for name in given if getattr(user_cfg, name) != getattr(saved_cfg, name)]
    if changed:
        values = ", ".join(f"{name}={getattr(user_cfg, name)}" for name in changed)
        raise UserError(f"{values}: the race in {path.parent} keeps its own settings; leave them out")
    lines.append(f"the race in {path.parent} continues after {counted(len(race['turns']), 'turn')}")
    return Draft(saved_cfg.replace(race["origins"], **command), lines=lines, race=race)


def saved_settings(cls: type[TrainSettings], ckpt: Checkpoint) -> TrainSettings:
    """The settings in the checkpoint of a run. Raises CheckpointError."""
    state = ckpt.state
    try:
        cfg = settings.from_json(cls, state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{ckpt.path}: state.json is damaged: {error}") from None
    skipped = sum(end - begin for part in state["parts"] for begin, end in [part.get("skipped_sequences", (0, 0))])
    if state["next_sequence"] != state["step"] * cfg.step_sequences + skipped:
        raise CheckpointError(f"{ckpt.path}: state.json is damaged: next_sequence does not fit its step")
    return cfg.replace(state["origins"])


def minutes_are_added(user_cfg: TrainSettings, saved: SavedRun) -> bool:
    """Whether a resumed run is trained for user_cfg.minutes more; otherwise, any time budget of the run continues.

    It continues if the minutes on the command line are its own and are not used up, so that the command that started a
    run also resumes it.
    """
    if user_cfg.minutes is None or user_cfg.is_from_file("minutes") or user_cfg.eval_only:
        return False
    max_iters = Schedule(saved.settings.step_counts, decisions=saved.part["decisions"]).max_iters
    return user_cfg.minutes != saved.settings.minutes or saved.step >= max_iters


def merge_saved_settings(user_cfg: TrainSettings, saved: SavedRun, restarted: bool, lines: list[str]) -> TrainSettings:
    """The user's settings; those that are not set come from the run's checkpoint.

    A config file cannot change the fixed settings of a run, because the original command line may have overridden the
    file; a line that names the ignored values is appended. On the command line, such a change is an error
    (require_same_run).
    """
    cls, saved_cfg = type(user_cfg), saved.settings
    turned_off = turned_off_settings(user_cfg, saved_cfg, restarted)
    chosen = {name for name, origin in saved_cfg.origins.items() if origin == SIZE_AUTO}
    fixed = {*names_with(cls, KEPT), *chosen}
    values, origins, ignored = {}, dict(user_cfg.origins), []
    for name in names_without(cls, OF_THE_COMMAND):
        trained, requested = getattr(saved_cfg, name), getattr(user_cfg, name)
        is_ignored = user_cfg.is_from_file(name) and name in fixed and requested != trained
        if name in turned_off:
            values[name] = None
            origins.pop(name, None)
        elif is_ignored or not user_cfg.is_set(name):
            values[name] = trained
            origins[name] = saved_cfg.origins.get(name)
            if is_ignored:
                ignored.append(f"{name}={trained} (not {requested})")
    if ignored:
        lines.append(f"fixed settings come from the checkpoint {saved.checkpoint.path}: {', '.join(ignored)}")
    return user_cfg.replace({name: origin for name, origin in origins.items() if origin}, **values)


def turned_off_settings(user_cfg: TrainSettings, saved_cfg: TrainSettings, restarted: bool) -> set[str]:
    """The settings that one on the command line `replaces`, unless the command sets both.

    A command line and a config file may both set one if they also did so when the run was started.
    """

    def is_on_command_line(name: str) -> bool:
        return user_cfg.is_set(name) and not user_cfg.is_from_file(name)

    turned_off = set()
    for name, replaced in user_cfg.replaces.items():
        is_repeated = restarted or saved_cfg.origins.get(name) == COMMAND_LINE
        stays = is_on_command_line(replaced) or (is_repeated and user_cfg.is_set(replaced))
        if is_on_command_line(name) and not stays:
            turned_off.add(replaced)
    return turned_off


def batch_settings(user_cfg: TrainSettings, cfg: TrainSettings, saved: SavedRun) -> dict[str, Any]:
    """The settings of a resumed run's batch, which keep the sequences per step. Raises UserError if they cannot.

    If the user sets only batch_size or only gradient_accumulation_steps, the other one follows.
    """
    sequences = saved.settings.step_sequences
    if cfg.step_sequences == sequences:
        return {}
    batch = names_with(type(cfg), Role.BATCH)
    given = {name: getattr(cfg, name) for name in batch if user_cfg.is_set(name) and not user_cfg.is_from_file(name)}
    follows = {"batch_size": "gradient_accumulation_steps", "gradient_accumulation_steps": "batch_size"}
    if len(given) == 1 and follows.keys() >= given.keys():
        ((name, value),) = given.items()
        if sequences % value == 0:
            return {"total_batch_tokens": None, follows[name]: sequences // value}
    divisors = [n for n in range(1, min(sequences, 4096) + 1) if sequences % n == 0]
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - cfg.batch_size))[:3])
    raise UserError(
        f"{', '.join(f'{name}={value}' for name, value in given.items())}: a step of {saved.checkpoint.path} has "
        f"{counted(sequences, 'sequence')}, which cannot change; set only --batch_size, to one of "
        f"{', '.join(map(str, nearest))}, or start a new run from its weights with --init_from={cfg.out_dir} and "
        f"another --out_dir"
    )


def resumed_step_counts(
    user_cfg: TrainSettings, cfg: TrainSettings, saved: SavedRun, adds_minutes: bool, lines: list[str]
) -> StepCounts:
    """The step counts of a resumed run. lines: one about those of the command line that are ignored is appended.

    A run with a time budget keeps its counts; those of added minutes follow when a step is measured. Otherwise, if
    max_iters changes, counts chosen for the old value are scaled, except that a warmup that is over is not repeated.
    """
    saved_cfg = saved.settings
    if cfg.minutes:
        counts = asdict(saved_cfg.step_counts)
        by_command = [name for name in STEP_COUNTS if user_cfg.origins.get(name) == COMMAND_LINE]
        if adds_minutes:
            counts |= {name: getattr(user_cfg, name) for name in by_command if name != "max_iters"}
        changed = {name: getattr(user_cfg, name) for name in by_command if getattr(user_cfg, name) != counts[name]}
        if changed:
            ignored = ", ".join(f"{name}={value}" for name, value in changed.items())
            lines.append(f"the time budget keeps its step counts; ignored: {ignored}")
        return StepCounts(**counts)
    was_scaled = [name for name in STEP_COUNTS if cfg.is_from_file(name) or saved_cfg.minutes]
    to_scale = [name for name in was_scaled if not user_cfg.is_set(name)]
    counts = replace(cfg.step_counts, max_iters=saved_cfg.max_iters).scaled(cfg.max_iters, to_scale)
    if user_cfg.origins.get("warmup_iters") != COMMAND_LINE:
        counts = counts.without_second_warmup(saved_cfg.step_counts, saved.step)
    return counts


def require_same_run(cfg: TrainSettings, saved: SavedRun) -> None:
    """Raise UserError if a setting changes that determines the model or the order of the sequences."""
    fixed = names_with(type(cfg), UNCHANGEABLE)
    changes = {name: (getattr(saved.settings, name), getattr(cfg, name)) for name in fixed}
    refused = [f"{name}: {old} before, {new} now" for name, (old, new) in changes.items() if old != new]
    if refused:
        raise UserError(
            f"{saved.checkpoint.path} cannot be resumed with other settings: {'; '.join(refused)}; set them back, or "
            f"start a new run from its weights with --init_from={cfg.out_dir} and another --out_dir"
        )


def changed_settings(cls: type[TrainSettings], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list]:
    """The settings in which two configurations of a run differ: name -> [old, new]."""
    return {name: [old.get(name), new[name]] for name in names_without(cls, UNREPORTED) if old.get(name) != new[name]}
