"""A setting of each role, added to train.py's, is treated right by every command without being named in any."""

from dataclasses import dataclass

import pytest

from folio import UserError
from folio.base import settings
from folio.base.roles import (
    UNCOMPARED,
    UNLISTED,
    WITHOUT_EFFECT,
    Batch,
    Budget,
    Command,
    Data,
    Fixed,
    Initial,
    Machine,
    Output,
    Place,
    Rounding,
    Seed,
    names_with,
    names_without,
)
from folio.base.settings import ConfigError, setting_names
from folio.evaluation.comparison import describe_settings
from folio.experiments.runs import Run
from folio.experiments.selection import different_settings
from folio.experiments.sweep.arguments import parse_sweep
from folio.training.planning.resolve import make_plan
from folio.training.planning.resume import Draft, merge_checkpoint
from tests.support.runs import write_run
from tests.support.sweeps import small_sweep
from tools.sweep import SweepConfig
from train import TrainConfig, train


@dataclass(frozen=True)
class Extended(TrainConfig):
    recipe: int = 0
    command: Command[int] = 0
    initial: Initial[int] = 0
    place: Place[int] = 0
    data: Data[int] = 0
    fixed: Fixed[int] = 0
    repetition: Seed[int] = 0
    batch: Batch[int] = 0
    budget: Budget[int] = 0
    rounding: Rounding[int] = 0
    machine: Machine[int] = 0
    output: Output[int] = 0


NEW = [name for name in setting_names(Extended) if name not in setting_names(TrainConfig)]


@pytest.fixture(scope="module")
def finished(tiny_in, tmp_path_factory) -> dict[str, str]:
    """The settings of a finished run whose new settings are 1."""
    small = tiny_in(out_dir=str(tmp_path_factory.mktemp("run") / "out"), max_iters=2, eval_interval=1, sample_tokens=0)
    given = {name: getattr(small, name) for name in setting_names(type(small)) if small.is_set(name)}
    train(settings.load(Extended, [f"--{name}={value}" for name, value in (given | dict.fromkeys(NEW, 1)).items()]))
    return {"out_dir": small.out_dir, "data_dir": small.data_dir, "init_from": "resume"}


def resume(finished: dict[str, str], *words: str) -> Draft:
    return merge_checkpoint(
        settings.load(Extended, [*words, *(f"--{name}={value}" for name, value in finished.items())]), []
    )


def test_a_resumed_run_takes_its_settings_from_the_checkpoint_and_those_of_the_command_from_the_command(finished):
    cfg = resume(finished).cfg
    assert {name for name in NEW if getattr(cfg, name) != 1} == {"command", "initial"}


def test_a_config_file_does_not_change_what_defines_a_resumed_run(finished, write):
    draft = resume(finished, write("".join(f"{name} = 2\n" for name in NEW)))
    kept = {name for name in NEW if getattr(draft.cfg, name) == 1}
    assert kept == {"data", "fixed", "repetition", "batch", "budget"}
    (line,) = [line for line in draft.lines if line.startswith("fixed settings come from")]
    assert all(f"{name}=1 (not 2)" in line for name in kept)


@pytest.mark.parametrize("name", NEW)
def test_a_change_on_the_command_line_is_refused_or_recorded_with_its_consequence(finished, name):
    if name in ("fixed", "repetition"):
        with pytest.raises(UserError, match=rf"cannot be resumed with other settings: {name}: 1 before, 2 now"):
            resume(finished, f"--{name}=2")
        return
    plan = make_plan(resume(finished, f"--{name}=2"))
    part = plan.record["parts"][-1]
    reported = f"{name} 2 (was 1)" in "\n".join(plan.lines)
    assert part["changes"] == ({name: [1, 2]} if reported else {})
    assert reported == (name not in ("command", "initial", "place", "data"))
    assert part["exact"] == (name not in ("batch", "rounding"))


@pytest.mark.parametrize("name", NEW)
def test_lists_of_different_settings_leave_out_what_a_run_does_not_depend_on(tmp_path, name):
    runs = [Run.of(write_run(tmp_path / f"{n}", {1: 2.0}, **{name: n})) for n in range(2)]
    listed = different_settings(runs, names_with(Extended, UNLISTED))
    assert listed == ([] if name in ("command", "place", "output") else [name])


def test_the_comparison_of_two_groups_names_the_settings_that_may_explain_the_difference():
    sides = [[dict.fromkeys(NEW, value)] for value in (0, 1)]
    line = describe_settings(sides, names_with(Extended, UNCOMPARED))
    assert {name for name in NEW if f"{name} 0 (A)" in line} == {*NEW} - {"command", "place", "output", "repetition"}


def test_only_settings_that_affect_the_loss_distinguish_a_run_from_its_reference():
    assert {*names_without(Extended, WITHOUT_EFFECT)} & {*NEW} == {"recipe", "initial", "fixed", "batch"}


@pytest.mark.parametrize("name", NEW)
def test_a_sweep_varies_what_belongs_to_a_run(data_dir, tmp_path, name):
    words = [f"{name}=1,2", *small_sweep(data_dir, tmp_path / "sweep")]
    if name in ("command", "place", "repetition", "budget"):
        with pytest.raises(ConfigError, match=f"{name} cannot be varied"):
            parse_sweep(SweepConfig, Extended, words)
    else:
        _, sweep = parse_sweep(SweepConfig, Extended, words)
        assert sweep.points == 2


def test_a_sweep_is_resumed_only_with_the_settings_that_affect_its_results(data_dir, tmp_path):
    words = ["learning_rate=1e-3,1e-2", *small_sweep(data_dir, tmp_path / "sweep")]
    _, sweep = parse_sweep(SweepConfig, Extended, words)
    assert {*NEW} - {*sweep.definition} == {"command", "place", "output"}
    assert {"eval_interval", "max_iters"} <= {*sweep.definition}
    with pytest.raises(ConfigError, match="--command: a sweep does not support it"):
        parse_sweep(SweepConfig, Extended, [*words, "--command=1"])
