"""folio/training/reference.py: the recorded recipes, and runs that are compared to them."""

from dataclasses import asdict, dataclass, replace

import pytest

from folio.base import settings
from folio.base.files import read_json, write_json
from folio.base.roles import WITHOUT_EFFECT, names_without
from folio.training import reference
from folio.training.reference import Reference, find_reference, read_references
from lab.bench import reference_losses
from lab.bench.reference_losses import ReferenceConfig
from tests.support.repository import ROOT
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, train


@pytest.mark.parametrize("entry", read_references(TrainConfig), ids=lambda entry: entry.recipe)
def test_the_settings_are_those_of_the_config_file(entry):
    cfg = settings.load(TrainConfig, [str(ROOT / entry.recipe)])
    config = asdict(cfg) | asdict(cfg.step_counts)
    assert entry.settings == {name: config[name] for name in names_without(TrainConfig, WITHOUT_EFFECT)}, (
        f"{entry.recipe} or a default has changed: train it with three seeds, and record the losses with "
        "lab/bench/reference_losses.py"
    )
    assert str(cfg.max_iters) in entry.losses and all(len(losses) == 3 for losses in entry.losses.values())


def test_a_setting_that_is_newer_than_a_reference_had_its_default_value():
    """A new setting broke the test above. A run with any other value of it was compared to the reference."""

    @dataclass(frozen=True)
    class NewerConfig(TrainConfig):
        qk_norm: bool = False
        registers: int = 0
        norm: str = "layer"

    (entry, *_) = read_json(reference.FILE)
    config = {**asdict(NewerConfig()), **entry["settings"]}
    assert find_reference(config, NewerConfig, entry["data"]).recipe == entry["recipe"]
    for change in ({"qk_norm": True}, {"registers": 4}, {"norm": "rms"}):
        assert find_reference(config | change, NewerConfig, entry["data"]) is None


def test_a_loss_is_far_if_it_is_outside_the_spread_of_the_seeds():
    recorded = Reference("config/x.py", "", {}, {"100": [2.0, 2.01, 2.02], "200": [1.0, 1.1, 1.2]})
    assert "far above the 2.0000 to 2.0200 of 3 seeds of config/x.py" in recorded.remark(100, 2.2)
    assert "far below" in recorded.remark(100, 1.8) and recorded.remark(100, 2.06) is None
    assert recorded.remark(200, 1.6) is None and recorded.remark(200, 1.8)  # seeds differ more
    assert recorded.remark(150, 9.0) is None


def test_a_run_of_a_recipe_is_compared_once(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "FILE", tmp_path / "losses.json")
    monkeypatch.setattr(reference_losses, "FILE", tmp_path / "losses.json")
    runs = [tiny(seed=seed, out_dir=str(tmp_path / f"out-{seed}"), eval_interval=4) for seed in (1, 2)]
    write_json(reference.FILE, [])
    for cfg in runs:
        train(cfg)
    reference_losses.main(ReferenceConfig(runs=tuple(cfg.out_dir for cfg in runs), recipe="config/x.py"))
    assert "3 evaluations of 2 runs of config/x.py" in capsys.readouterr().out
    (entry,) = read_json(reference.FILE)
    assert [*entry["losses"]] == ["4", "8", "12"]

    def lines(**changes) -> list[str]:
        train(replace(tiny(seed=3, eval_interval=4, overwrite=True), **changes))
        return [line for line in capsys.readouterr().out.splitlines() if "of config/x.py" in line]

    assert lines() == []
    entry["losses"] = {step: [loss - 1.0 for loss in losses] for step, losses in entry["losses"].items()}
    write_json(reference.FILE, [entry])
    (line,) = lines()
    assert line.startswith("step 4: a validation loss of ") and "far above" in line
    assert lines(dropout=0.2) == lines(max_iters=13) == []
    SimulatedMachine(monkeypatch, lambda step: 0.5, lambda step: 0.1, trains=True)
    assert lines(minutes=0.5, seed=4) == []
