"""folio/training/planning/race.py: models that are trained in turns, through train() and a race of two of them."""

import json
from pathlib import Path

import pytest
import torch

import train as train_script
from folio import UserError
from folio.base.files import read_json, write_json
from folio.training.optim import LearningRates
from folio.training.planning import resolve
from folio.training.planning.race import Race
from folio.training.planning.resume import RACE, Draft
from folio.training.setup import new_state, open_run
from tests.support.runs import same_tensors
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, evaluate, timed_step

SMALL, WIDE = (
    dict(n_layer=1, n_embd=width, n_head=2, lr_schedule="wsd", warmup_iters=0, max_iters=40) for width in (16, 32)
)


def make_race(cfg: TrainConfig, **draft) -> Race:
    return Race(Draft(cfg, **draft), resolve.open_draft, timed_step, evaluate)


def enter(race: Race, name: str, **settings):
    return race.enter(name, Draft(race.draft.cfg.replace(**settings)))


def test_turns_are_an_uninterrupted_run(tiny):
    """With other models between them, and after decays of copies: weights, optimizer and progress are bitwise equal."""
    race = make_race(tiny())
    small, wide = enter(race, "small", **SMALL), enter(race, "wide", **WIDE)
    for steps, decay_steps in ((4, 0), (3, 5), (2, 1)):
        race.turn(small, steps, decay_steps)
        race.turn(wide, 1)
    expected = resolve.make_plan(Draft(tiny(**SMALL)))
    run = open_run(expected)
    state = new_state(run, expected.settings)
    for step in range(9):
        timed_step(run, state, expected.schedule.learning_rates_at(step), expected.settings)
    saved = race.checkpoint(small)
    weights, optimizer = state.tensors(keep=True, copy=False)
    assert same_tensors(saved.model, weights) and same_tensors(saved.optimizer(), optimizer)
    progress = state.progress()
    assert {name: saved.state[name] for name in progress} == json.loads(json.dumps(progress))


def test_a_turn_records_what_it_measured(tiny, monkeypatch):
    machine = SimulatedMachine(monkeypatch, lambda step: 10.0 if step < 2 else 0.25, lambda step: 3.0, trains=True)
    cfg = tiny(eval_iters=2)
    race = Race(Draft(cfg), resolve.open_draft, train_script.timed_step, train_script.evaluate)
    entrant = enter(race, "small", **SMALL)
    turn = race.turn(entrant, 5, decay_steps=4)
    assert (turn["model"], turn["step"], turn["steps"], turn["decay_steps"]) == ("small", 5, 5, 4)
    assert turn["step_seconds"] == 0.25  # without those of the first steps
    assert turn["spent"] == machine.now == 2 * 10 + 7 * 0.25 + 3 == race.spent
    assert read_json(Path(cfg.out_dir) / RACE)["turns"] == race.turns == [turn]


def test_the_decay_of_a_copy_lowers_the_loss(tiny):
    """Its rates go down to 0 from those of the schedule; a turn without one measures no loss."""
    rates = []

    def recorded(run, state, step_rates, cfg):
        rates.append(step_rates)
        return timed_step(run, state, step_rates, cfg)

    cfg = tiny(optimizer="muon", dropout=0.0)
    race = Race(Draft(cfg), resolve.open_draft, recorded, evaluate)
    entrant = enter(race, "small", **SMALL)
    assert race.turn(entrant, 2)["val_loss"] is None
    race.turn(entrant, 1, decay_steps=4)
    peak = LearningRates(3e-3, 0.02)
    assert rates == [peak] * 3 + [LearningRates(share * 3e-3, share * 0.02) for share in (1, 0.75, 0.5, 0.25)]


def test_a_killed_race_goes_on_after_its_turns(tiny):
    """The turn during which it is killed is lost, also if its checkpoint was written."""
    race = make_race(tiny())
    small = enter(race, "small", **SMALL)
    race.turn(small, 3)
    race.turn(small, 2)
    path = Path(race.draft.cfg.out_dir) / RACE
    record = read_json(path)
    write_json(path, {**record, "turns": record["turns"][:1]})
    resumed = make_race(tiny(), race={**record, "turns": record["turns"][:1]})
    again = enter(resumed, "small", **SMALL)
    assert resumed.turn(again, 3) == race.turns[0] and resumed.spent == race.turns[0]["spent"]
    resumed.turn(again, 2)
    assert again.step == 5 and resumed.turns[1]["loss"] == race.turns[1]["loss"]
    assert same_tensors(resumed.checkpoint(again).model, race.checkpoint(small).model)


def test_only_one_optimizer_is_in_memory(tiny, monkeypatch):
    import gc

    race = make_race(tiny())
    entrants = [enter(race, name, **settings) for name, settings in (("small", SMALL), ("wide", WIDE))]

    def optimizers() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.optim.Optimizer) for thing in gc.get_objects())

    before = optimizers()
    counts = []
    race.timed_step = lambda *args: counts.append(optimizers()) or timed_step(*args)
    for entrant in 2 * entrants:
        race.turn(entrant, 1)
    assert counts == [before + 1] * 4 and optimizers() == before


def test_a_race_that_cannot_be_written_is_an_error(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "race").write_text("in the way")
    race = make_race(tiny())
    (tmp_path / "out" / "race").write_text("in the way")
    with pytest.raises(UserError, match=r"^out_dir=.*out: it cannot be written"):
        race.turn(enter(race, "small", **SMALL), 1)
