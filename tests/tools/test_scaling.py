"""tools/scaling.py: the runs that are measured, the answers, and the files."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from folio import UserError
from folio.base import settings
from folio.base.settings import ConfigError
from folio.data.find_data import find_datasets
from folio.data.windows import Mixture
from folio.training.planning.choice import TRAINING_SHARE
from folio.training.planning.law import RunSize, ScalingLaw, fit
from folio.training.planning.measured_law import MeasuredLaw, law_file, typical_law
from folio.training.planning.shapes import MIN_STEPS, Shape, step_tokens
from folio.training.planning.step_times import StepTimes
from tools import scaling
from tools.scaling import MeasuredRun, ScalingConfig
from train import TrainConfig, train

LAW = ScalingLaw(E=1.1, A=25.0, alpha=0.38, B=250.0, beta=0.45)


@pytest.fixture
def cfg(data_dir, tmp_path) -> ScalingConfig:
    shutil.copytree(data_dir / "verse", tmp_path / "data" / "verse")
    folders = dict(data_dir=str(tmp_path / "data"), out_dir=str(tmp_path / "scaling"))
    return ScalingConfig(dataset=("verse",), minutes=3.0, **folders)


def data_of(cfg: ScalingConfig) -> Mixture:
    return Mixture(find_datasets("verse", cfg.data_dir), block_size=1, seed=1, sampling="epoch")


@pytest.fixture
def data(cfg) -> Mixture:
    return data_of(cfg)


def chosen_for(cfg: ScalingConfig, minutes: str) -> TrainConfig:
    """The settings that the tool chose for a time."""
    return settings.load(TrainConfig, [str(Path(cfg.out_dir, f"minutes-{minutes}.py"))])


@pytest.fixture
def trained(monkeypatch, request) -> list[MeasuredRun]:
    """The measured runs. Their losses are those of LAW. They take no time, but as much on a simulated clock as on the
    typical machine, times the fixture's parameter.
    """
    runs, now = [], [0.0]
    ratio = getattr(request, "param", 1.0)

    def probe(cfg, shape, n_tokens):
        return ratio * StepTimes(43)(shape, n_tokens)

    def train_one(cfg, data, shape, tokens):
        batch = step_tokens(tokens)
        seconds_per_step = ratio * StepTimes(data.vocab_size)(shape, batch)
        now[0] += tokens / batch * seconds_per_step + scaling.OVERHEAD_SECONDS
        size = RunSize(shape.matrix_weights(data.vocab_size), tokens, tokens // batch, data.training_tokens)
        runs.append(MeasuredRun(shape, size, LAW.losses([size])[0], batch / seconds_per_step))
        return runs[-1]

    monkeypatch.setattr(scaling, "probe", probe)
    monkeypatch.setattr(scaling, "train_one", train_one)
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: now[0])
    return runs


@pytest.mark.parametrize("trained", [0.25, 1.0, 1.6], indirect=True, ids=lambda ratio: f"{ratio} of the typical time")
def test_shapes_are_measured_within_the_time(cfg, data, trained):
    """Also on a machine that is slower or faster than expected."""
    data.training_tokens = 10**7
    runs = scaling.measure(cfg, data, StepTimes(data.vocab_size))
    step_seconds = runs[-1].size.tokens / runs[-1].size.steps / runs[-1].tokens_per_second
    seconds = sum(run.size.tokens / run.tokens_per_second + scaling.OVERHEAD_SECONDS for run in runs)
    limit = 60 * cfg.minutes  # the last run takes its share of the time that is left, in whole steps
    assert runs == trained and TRAINING_SHARE * limit - step_seconds <= seconds <= limit
    assert runs[-1].shape == max(runs, key=lambda run: run.size.weights).shape
    assert len({run.shape for run in runs}) >= 3 and len({(run.shape, run.size.tokens) for run in runs}) == len(runs)
    assert all(run.size.steps >= scaling.MIN_STEPS for run in runs)
    assert all(run.size.tokens >= scaling.TOKENS_PER_WEIGHT * run.size.weights for run in runs)


def test_more_minutes_measure_larger_shapes(data):
    plans = scaling.possible_plans(data, StepTimes(43))
    plans = [scaling.choose_plan(plans, 60 * minutes).runs for minutes in (1, 10, 100)]
    assert all(len(plan) == 4 and plan[0][0] == plan[2][0] and plan[2][1] == 4 * plan[0][1] for plan in plans)
    largest = [plan[-1][0].n_embd for plan in plans]
    assert largest == sorted(largest) and len({*largest}) == 3


def test_the_answers_are_files_that_train_accepts(cfg, data, trained, capsys):
    """A GPU gets a larger model."""
    scaling.main(cfg)
    out = capsys.readouterr().out
    assert "| minutes" in out and "python train.py" in out
    for minutes in ("5", "30", "120"):
        chosen = chosen_for(cfg, minutes)
        settings.check(chosen)
        assert chosen.minutes == float(minutes) and chosen.dataset == "verse"
        shape = Shape(chosen.n_layer, chosen.n_head, chosen.n_embd, chosen.block_size)
        assert shape == Shape.of(chosen.n_embd)
    page = Path(cfg.out_dir, "scaling.html").read_text(encoding="utf-8")
    assert "Which size in which time" in page and "Measured runs" in page
    law = MeasuredLaw.of(data)
    assert law.runs == [run.size for run in trained] and law.losses == [run.loss for run in trained]
    fitted = fit(law.runs, law.losses, typical_law(data))
    assert law.laws == [ScalingLaw.from_parameters(fitted_law.parameters) for fitted_law in fitted]  # as they are saved
    here = chosen_for(cfg, "30")
    scaling.main(replace(cfg, gpu="H100"))
    assert chosen_for(cfg, "30").n_embd >= here.n_embd
    assert "a H100, by its data sheet" in Path(cfg.out_dir, "minutes-30.py").read_text()


def test_a_model_is_trained_to_the_end_of_its_schedule(cfg, data, capsys, monkeypatch):
    results = []
    monkeypatch.setattr(scaling, "train", lambda run_cfg: results.append(train(run_cfg)) or results[-1])
    run = scaling.train_one(cfg, data, Shape.of(32), MIN_STEPS * 32)
    assert run.size == RunSize(Shape.of(32).matrix_weights(43), MIN_STEPS * 32, MIN_STEPS, 18_581)
    ((loss, *steps, _, _),) = results
    assert run.loss == loss and steps == [MIN_STEPS, MIN_STEPS]
    assert run.tokens_per_second > 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize("trained", [1.0, 40.0], indirect=True, ids=lambda ratio: f"{ratio} of the typical time")
def test_a_time_that_is_too_short_is_refused_before_training(cfg, trained):
    """tools/scaling.py --minutes=1 trained a model, and said then that there was no time. It also was an IndexError."""
    cases = [(dict(minutes=0.05), r"minutes=0\.05: the 4 shortest runs take .* on this machine; use --minutes=")]
    cases += [(dict(minutes=60.0, times=("1e-6",)), "no model can be trained in 1e-6 minutes")]
    cases += [(dict(minutes=60.0, times=("1e-15",), gpu="H100"), "no model can be trained in 1e-15 minutes")]
    for changes, message in cases:
        with pytest.raises(UserError, match=message) as error:
            scaling.main(replace(cfg, **changes))
        assert not trained and not cfg.folder.exists()
        if suggested := re.search(r"--minutes=(\d+)", str(error.value)):
            scaling.check_time(replace(cfg, minutes=float(suggested[1])), data_of(cfg), StepTimes(43))


def test_measuring_that_has_begun_is_completed(cfg, data, trained, monkeypatch):
    """If the machine is slower than its first steps, a plan ended in an error after a part of its runs."""
    scaling.check_time(cfg, data, StepTimes(43))
    monkeypatch.setattr(scaling, "OVERHEAD_SECONDS", 500.0)
    runs = scaling.measure(cfg, data, StepTimes(43))
    assert runs == trained and len(runs) == scaling.N_RUNS and len({run.shape for run in runs}) == 3


def test_folders_are_refused_before_training(cfg, data, trained, run, tmp_path, monkeypatch):
    """They were first written after the training."""
    (tmp_path / "file").write_text("")
    for out_dir, message in (
        (run, "it is the folder of a run or of a data set"),
        (str(tmp_path / "data" / "verse"), "it is the folder of a run or of a data set"),
        (str(tmp_path / "file"), "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            scaling.main(replace(cfg, out_dir=out_dir))
    with scaling.output_folder(cfg, data), pytest.raises(UserError, match=r"another tools/scaling\.py is measuring"):
        scaling.main(cfg)
    law = law_file(data)
    monkeypatch.setattr(scaling.os, "access", lambda path, mode: path != law.parent)
    with pytest.raises(UserError, match=r"scaling\.json cannot be written"):
        scaling.main(cfg)
    assert not trained and not law.exists()


def test_a_text_that_is_too_short_for_three_shapes_is_refused(cfg, data, trained):
    data.training_tokens = 80
    with pytest.raises(UserError, match="its 80 training tokens are too few"):
        scaling.check_time(cfg, data, StepTimes(43))


def test_the_probe_measures_some_steps(cfg, capsys):
    shape = Shape.of(32)
    assert 0 < scaling.probe(cfg, shape, 256) < 10 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name one data set"),
        (["verse:0.7,letters:0.3"], "the law of a mixture is not measured"),  # was an AttributeError after the training
        (["verse", "--times=5,x"], "minutes above 0"),
        (["verse", "--gpu=X1"], "is not one of"),
    ],
)
def test_wrong_settings_are_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        settings.load(ScalingConfig, words)
