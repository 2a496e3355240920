"""folio/training/planning/auto_size.py: the model that --size=auto chooses, through train()."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train as train_script
from folio import UserError
from folio.base import settings
from folio.base.settings import COMMAND_LINE, ConfigError
from folio.checkpoints import checkpoint
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.identify import NoCheckpointError
from folio.experiments.runs import read_metrics
from folio.training.planning import auto_size, choice, resolve
from folio.training.planning.auto_size import choose_size
from folio.training.planning.choice import MAX_EPOCHS
from folio.training.planning.data import open_data
from folio.training.planning.law import RunSize, ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw
from folio.training.planning.race import Race
from folio.training.planning.resume import Draft
from folio.training.planning.shapes import RECIPE_CHANNELS, Shape
from folio.training.setup import open_run
from prepare import text as prepare_text
from tests.support.replays import remove_older_checkpoints, replay
from tests.support.runs import same_tensors
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, train


class SimulatedRace(Race):
    """A race on a machine with 4e11 FLOP/s, where a step takes load(turn) times as long. It trains nothing.

    loss: the loss of a complete run with settings.
    """

    def __init__(
        self,
        draft: Draft,
        load: Callable[[int], float] = lambda turn: 1.0,
        loss: Callable[[TrainConfig], float] = lambda cfg: 2.0,
    ):
        super().__init__(draft, self.open_trial, None, None)
        self.load, self.loss, self.shapes = load, loss, []

    @staticmethod
    def open_trial(trial):
        schedule = trial.cfg.schedule(trial.cfg.step_counts, {})
        return SimpleNamespace(settings=trial.cfg, schedule=schedule), None

    def _train(self, entrant, steps, decay_steps):
        cfg = entrant.plan.settings
        shape = Shape(cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.block_size)
        self.shapes.append(shape)
        seconds = cfg.step_tokens * shape.flops_per_token(43) / 4e11 * self.load(len(self.turns))
        turn = {"model": entrant.name, "step": entrant.step + steps, "steps": steps, "step_seconds": seconds}
        val_loss = self.loss(cfg) if decay_steps else None
        return {
            **turn,
            "decay_steps": decay_steps,
            "val_loss": val_loss,
            "spent": self.spent + (steps + decay_steps) * seconds,
        }

    def checkpoint(self, entrant):
        return entrant.name


def load(data_dir, *words: str) -> TrainConfig:
    cfg = settings.load(TrainConfig, ["--dataset=verse", f"--data_dir={data_dir}", "--size=auto", *words])
    settings.check(cfg)
    return cfg


@pytest.fixture(autouse=True)
def training_tokens(monkeypatch) -> list[int]:
    """The tokens of the training text, in an item that a test may replace."""
    tokens = [10**7]

    def open_large_data(cfg):
        data = open_data(cfg)
        if cfg.dataset == "verse":
            data.training_tokens = tokens[0]
        return data

    monkeypatch.setattr(auto_size, "open_data", open_large_data)
    return tokens


def sized(cfg: TrainConfig) -> Draft:
    draft = Draft(cfg)
    return choose_size(draft, SimulatedRace(draft))


def chosen(cfg: TrainConfig, race: SimulatedRace | None = None) -> TrainConfig:
    """The settings with the chosen size."""
    draft = choose_size(Draft(cfg), race or SimulatedRace(Draft(cfg)))
    settings.check(draft.cfg.replace(size=None))
    assert draft.cfg.minutes == cfg.minutes
    print("\n".join(draft.lines))
    return draft.cfg


def test_more_minutes_mean_a_larger_model_whose_steps_were_measured(data_dir, capsys):
    channels = []
    for minutes in (0.1, 10, 1000):
        cfg = load(data_dir, f"--minutes={minutes}")
        race = SimulatedRace(Draft(cfg))
        channels.append(chosen(cfg, race).n_embd)
        assert race.shapes[0].n_embd == RECIPE_CHANNELS and channels[-1] in {shape.n_embd for shape in race.shapes}
    assert channels == sorted(channels) and channels[0] < channels[-1]
    assert "size=auto: " in (out := capsys.readouterr().out) and "by the scaling of other texts" in out


def test_other_programs_do_not_change_the_choice(data_dir):
    """One that slows the machine for some turns slows the reference beside them as much."""
    cfg = load(data_dir, "--minutes=10")
    quiet = chosen(cfg)
    for begin in range(4):
        busy = chosen(
            cfg, SimulatedRace(Draft(cfg), lambda turn, begin=begin: 2.0 if begin <= turn < begin + 2 else 1.0)
        )
        assert busy.n_embd == quiet.n_embd


def test_the_law_of_the_text_is_used(data_dir, capsys):
    cfg = load(data_dir, "--minutes=1")
    data = open_data(cfg)
    law = ScalingLaw(1.0, 1e-9, 1.0, 300.0, 0.45)  # the size does not matter
    try:
        MeasuredLaw(data.hash, [RunSize(1, 1, 1, 1)], [1.0], [law]).save(data)
        assert chosen(cfg).n_embd == 32 and "expected validation loss" in capsys.readouterr().out
    finally:
        (data.datasets[0][0].folder / "scaling.json").unlink()


def test_settings_of_the_command_line_are_kept(data_dir):
    cfg = chosen(load(data_dir, "--minutes=3", "--optimizer=adamw", "--learning_rate=1e-3", "--dropout=0.2"))
    assert (cfg.optimizer, cfg.learning_rate, cfg.dropout) == ("adamw", 1e-3, 0.2)
    assert cfg.muon_learning_rate == 0.03 and cfg.origins["n_layer"] == "--size=auto"


def test_a_config_files_model_is_replaced_and_named(data_dir, write, capsys):
    """The file's settings were ignored silently."""
    name = write("n_layer = 30\nlearning_rate = 1e-5\nposition = 'rotary'\nmax_iters = 7\ndropout = 0.0\n")
    cfg = chosen(load(data_dir, name, "--minutes=3"))
    assert cfg.n_layer < 30 and cfg.position == "rotary" and cfg.max_iters > 7
    assert "size=auto replaces n_layer=30 (x.py:1), learning_rate=1e-05 (x.py:2)" in capsys.readouterr().out
    cfg = chosen(load(data_dir, write("n_head = 3\ntotal_batch_tokens = 500_000\n"), "--minutes=3"))
    assert cfg.step_tokens == cfg.batch_size * cfg.block_size < 10_000


def test_a_small_text_is_not_repeated_without_end(data_dir, training_tokens):
    training_tokens[0] = 10**5
    draft = sized(load(data_dir, "--minutes=1000"))
    tokens = MAX_EPOCHS * 10**5  # in whole steps
    assert tokens - draft.cfg.step_tokens < draft.cfg.max_iters * draft.cfg.step_tokens <= tokens and draft.fits_minutes
    assert f"{MAX_EPOCHS} epochs" in draft.lines[-1]


def distance(cfg: TrainConfig) -> float:
    """The loss of a run on a text for which 96 channels, dropout 0.3 and 10 epochs are the best."""
    epochs = cfg.max_iters * cfg.step_tokens / 10**5
    return 2 + abs(cfg.n_embd - 96) / 32 + 10 * abs(cfg.dropout - 0.3) + abs(math.log2(epochs / 10))


def test_complete_runs_of_a_small_text_decide(data_dir, training_tokens):
    training_tokens[0] = 10**5
    cfg = load(data_dir, "--minutes=1000")
    race = SimulatedRace(Draft(cfg), loss=distance)
    draft = choose_size(Draft(cfg), race)
    assert (draft.cfg.n_embd, draft.cfg.dropout) == (96, 0.3) and distance(draft.cfg) < 2.1
    losses = {turn["model"]: turn["val_loss"] for turn in race.turns if turn["decay_steps"]}
    assert draft.head_start == min(losses, key=losses.get) and draft.fits_minutes


@pytest.mark.parametrize("minutes", [0.05, 0.2, 1, 5, 20])
def test_complete_runs_take_a_quarter_of_the_time_at_most(data_dir, training_tokens, minutes):
    training_tokens[0] = 10**5
    cfg = load(data_dir, f"--minutes={minutes}")
    race = SimulatedRace(Draft(cfg), loss=distance)
    draft = choose_size(Draft(cfg), race)
    losses = {turn["model"]: turn["val_loss"] for turn in race.turns if turn["val_loss"] is not None}
    assert len(losses) != 1  # nothing to compare
    assert race.spent <= 0.25 * 60 * minutes or not losses
    assert not losses or losses[draft.head_start] == min(losses.values())


def test_dropout_of_the_command_line_is_not_changed(data_dir, training_tokens):
    training_tokens[0] = 10**5
    cfg = load(data_dir, "--minutes=1000", "--dropout=0.2")
    race = SimulatedRace(Draft(cfg), loss=distance)
    assert choose_size(Draft(cfg), race).cfg.dropout == 0.2 and len(set(race.shapes)) > 2


@pytest.mark.parametrize(
    "tokens, minutes, message",
    [
        (32, 1, "^size=auto: short has 28 training tokens, .* reads 33 at a time; use more text$"),
        (2000, 1e-9, "^minutes=1e-09: size=auto needs more time, or more text than the 1,800 training tokens"),
    ],
)
def test_a_text_that_is_too_short_is_an_error_with_a_remedy_that_works(tmp_path, tokens, minutes, message):
    """The error advised a smaller --block_size, which size=auto refuses."""
    with pytest.raises(UserError, match=message):
        sized(load_short(tmp_path, tokens, minutes))


def load_short(folder: Path, tokens: int, minutes: float) -> TrainConfig:
    """The settings of a run on a text with this number of characters."""
    (folder / "short.txt").write_text(("a word. " * tokens)[:tokens])
    prepare_text.main(prepare_text.TextConfig(inputs=(str(folder / "short.txt"),), data_dir=str(folder)))
    return load(folder, "--dataset=short", f"--minutes={minutes}")


def test_a_short_text_gets_a_context_that_fits(tmp_path):
    """The default block_size of 1,024 was refused before a shorter one was chosen."""
    cfg = chosen(load_short(tmp_path, 160, 0.1))
    assert cfg.block_size <= 144
    open_data(cfg)


def test_contradictions_are_errors(data_dir):
    with pytest.raises(ConfigError, match="--minutes=30"):
        load(data_dir)
    for setting in ("n_layer=4", "max_iters=40", "total_batch_tokens=4096", "init_from=out-verse", "eval_only=True"):
        with pytest.raises(ConfigError, match=setting):
            load(data_dir, "--minutes=3", f"--{setting}")


def test_a_step_is_measured_without_a_change_of_weights(tiny):
    plan = resolve.make_plan(Draft(tiny(minutes=1.0)))
    run = open_run(plan)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    assert train_script.measure_step(run, plan.settings) > 0
    assert same_tensors(before, dict(run.model.named_parameters()))


@pytest.fixture
def small_race(monkeypatch, training_tokens) -> Callable[..., Any]:
    """train() with size="auto" on a simulated machine, whose steps take the time of their FLOPs in a race."""
    training_tokens[0] = 18_581
    monkeypatch.setattr(choice, "CHANNELS", (32, 64))
    SimulatedMachine(monkeypatch, lambda step: 0.2, lambda step: 0.02, trains=True)
    timed_step = train_script.timed_step

    def by_flops(run, state, rates, cfg):
        timed_step(run, state, rates, cfg)
        return cfg.step_tokens * run.model.config.flops_per_token()["total"] / 1e9

    monkeypatch.setattr(train_script, "timed_step", by_flops)

    def start(cfg: TrainConfig, kill_at: int | None = None) -> None:
        """Train, and kill the run before a step of its race."""
        steps = iter(range(10**6))

        def killed(*args):
            if next(steps) == kill_at:
                raise KeyboardInterrupt
            return by_flops(*args)

        monkeypatch.setattr(train_script, "timed_step", killed)
        with pytest.raises(KeyboardInterrupt) if kill_at is not None else nullcontext():
            train(cfg)

    return start


def auto(tiny, **settings) -> TrainConfig:
    cfg = tiny(size="auto", minutes=0.1, sample_tokens=0, lr_schedule="wsd", **settings)
    return cfg.replace({"minutes": COMMAND_LINE})


def saved_run(cfg: TrainConfig) -> Checkpoint:
    return checkpoint.load(Path(cfg.out_dir))


def test_the_best_models_training_continues(tiny, small_race, monkeypatch):
    """The run equals one of the chosen settings: a step is replayed from the beginning, without a race."""
    cfg = auto(tiny)
    small_race(cfg)
    state = saved_run(cfg).state
    turns = state["parts"][0]["race"]
    winner = f"{state['model']['n_layer']}x{state['model']['n_embd']}"
    assert turns[0]["model"] == "machine" and {turn["model"] for turn in turns} >= {winner}
    own = [turn for turn in turns if turn["model"] == winner]
    logged = {line["step"]: line for line in read_metrics(Path(cfg.out_dir))}
    assert all(logged[turn["step"]]["loss"] == turn["loss"] for turn in own) and own[-1]["step"] < state["step"]
    assert not (Path(cfg.out_dir) / "race").exists()
    remove_older_checkpoints(cfg.out_dir)
    monkeypatch.undo()
    assert replay(cfg.out_dir, state["step"])["bitwise"] is True


@pytest.mark.parametrize("kill_at", [7, 8, 11])
def test_a_run_that_is_killed_in_its_race_is_resumed(tiny, small_race, tmp_path, kill_at):
    """Its decisions are those of an uninterrupted run, and so are its weights."""
    whole, cfg = auto(tiny, out_dir=str(tmp_path / "whole")), auto(tiny)
    small_race(whole)
    small_race(cfg, kill_at)
    small_race(settings.load(TrainConfig, ["--init_from=resume", f"--out_dir={cfg.out_dir}"]))
    expected, saved = saved_run(whole), saved_run(cfg)
    part, expected_part = saved.state["parts"][0], expected.state["parts"][0]
    assert part["decisions"] == expected_part["decisions"]
    for turn, expected_turn in zip(part["race"], expected_part["race"], strict=True):
        assert turn == {**expected_turn, "spent": pytest.approx(expected_turn["spent"])}  # of another start
    assert same_tensors(saved.model, expected.model) and same_tensors(saved.optimizer(), expected.optimizer())


def test_a_race_goes_on_with_its_settings_and_its_data(tiny, small_race, write):
    cfg = auto(tiny)
    small_race(cfg, 8)
    resume = ["--init_from=resume", f"--out_dir={cfg.out_dir}"]
    with pytest.raises(UserError, match=r"minutes=3\.0: the race in .*race keeps its own settings; leave them out"):
        train(settings.load(TrainConfig, [*resume, "--minutes=3"]))
    with pytest.raises(NoCheckpointError):  # it trained
        train(settings.load(TrainConfig, [*resume, "--eval_only=True"]))
    path = Path(cfg.out_dir, "race", "race.json")
    record = path.read_text()
    path.write_text(record.replace('"data": "', '"data": "x'))
    with pytest.raises(UserError, match=r"verse has changed since the race in .*"):
        train(settings.load(TrainConfig, resume))
    path.write_text(record[:-9])
    with pytest.raises(UserError, match=r"race\.json is damaged .*; start the run again, without --init_from=resume$"):
        train(settings.load(TrainConfig, resume))
    small_race(cfg)  # from the beginning


def test_a_run_is_resumed_after_its_race(tiny, small_race):
    """The printed command to continue it was refused: --max_iters is among the settings that size=auto chooses."""
    cfg = auto(tiny)
    small_race(cfg)
    saved = saved_run(cfg).state
    assert saved["config"]["size"] == "auto"
    resume = ["--init_from=resume", f"--out_dir={cfg.out_dir}", f"--max_iters={saved['step'] + 3}"]
    small_race(settings.load(TrainConfig, resume), kill_at=None)
    resumed = saved_run(cfg).state
    assert resumed["step"] == saved["step"] + 3 and resumed["model"] == saved["model"]
