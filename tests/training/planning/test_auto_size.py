"""folio/training/planning/auto_size.py: the model that --size=auto chooses, through train()."""

from pathlib import Path

import pytest

import train as train_script
from folio import UserError
from folio.base import settings
from folio.base.settings import ConfigError
from folio.checkpoints import checkpoint
from folio.training.planning import auto_size, resolve
from folio.training.planning.auto_size import choose_size
from folio.training.planning.choice import LARGE_MODEL_EPOCHS
from folio.training.planning.data import open_data
from folio.training.planning.law import RunSize, ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw
from folio.training.planning.resume import Draft
from folio.training.planning.shapes import Shape
from folio.training.setup import open_run
from prepare import text as prepare_text
from tests.support.runs import same_tensors
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, train


@pytest.fixture
def measured(monkeypatch) -> list[Shape]:
    """The shapes whose steps were measured, at 4e11 FLOP/s."""
    shapes, measure_step = [], train_script.measure_step

    def step_seconds(run, cfg):
        if run:  # the chosen model
            return measure_step(run, cfg)
        shapes.append(Shape(cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.block_size))
        return cfg.step_tokens * shapes[-1].flops_per_token(43) / 4e11

    monkeypatch.setattr(train_script, "measure_step", step_seconds)
    monkeypatch.setattr(resolve, "open_run", lambda plan: None)
    return shapes


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
    return choose_size(Draft(cfg), lambda trial: train_script.measure_step(None, trial.cfg))


def chosen(cfg: TrainConfig) -> TrainConfig:
    """The settings with the chosen size."""
    draft = sized(cfg)
    settings.check(draft.cfg.replace(size=None))
    assert draft.cfg.minutes == cfg.minutes
    print("\n".join(draft.lines))
    return draft.cfg


def test_more_minutes_mean_a_larger_model_whose_steps_were_measured(data_dir, measured, capsys):
    channels = [chosen(load(data_dir, f"--minutes={minutes}")).n_embd for minutes in (0.1, 10, 1000)]
    assert channels == sorted(channels) and channels[0] < channels[-1] == measured[-1].n_embd
    assert "size=auto: " in (out := capsys.readouterr().out) and "by the scaling of other texts" in out
    measured.clear()
    chosen(load(data_dir, "--minutes=3"))
    assert len(set(measured)) == len(measured)


def test_the_law_of_the_text_is_used(data_dir, measured, capsys):
    cfg = load(data_dir, "--minutes=1")
    data = open_data(cfg)
    law = ScalingLaw(1.0, 1e-9, 1.0, 300.0, 0.45)  # the size does not matter
    try:
        MeasuredLaw(data.hash, [RunSize(1, 1, 1, 1)], [1.0], [law]).save(data)
        assert chosen(cfg).n_embd == 32 and "expected validation loss" in capsys.readouterr().out
    finally:
        (data.datasets[0][0].folder / "scaling.json").unlink()


def test_settings_of_the_command_line_are_kept(data_dir, measured):
    cfg = chosen(load(data_dir, "--minutes=3", "--optimizer=adamw", "--learning_rate=1e-3", "--dropout=0.2"))
    assert (cfg.optimizer, cfg.learning_rate, cfg.dropout) == ("adamw", 1e-3, 0.2)
    assert cfg.muon_learning_rate == 0.03 and cfg.origins["n_layer"] == "--size=auto"


def test_a_config_files_model_is_replaced_and_named(data_dir, measured, write, capsys):
    """The file's settings were ignored silently."""
    name = write("n_layer = 30\nlearning_rate = 1e-5\nposition = 'rotary'\nmax_iters = 7\ndropout = 0.0\n")
    cfg = chosen(load(data_dir, name, "--minutes=3"))
    assert cfg.n_layer < 30 and cfg.position == "rotary" and cfg.max_iters > 7
    assert "size=auto replaces n_layer=30 (x.py:1), learning_rate=1e-05 (x.py:2)" in capsys.readouterr().out
    cfg = chosen(load(data_dir, write("n_head = 3\ntotal_batch_tokens = 500_000\n"), "--minutes=3"))
    assert cfg.step_tokens == cfg.batch_size * cfg.block_size < 10_000


def test_a_small_text_is_not_repeated_without_end(data_dir, training_tokens, measured, capsys):
    training_tokens[0] = 10**5
    draft = sized(load(data_dir, "--minutes=1000"))
    tokens = LARGE_MODEL_EPOCHS * 10**5  # in whole steps
    assert tokens - draft.cfg.step_tokens < draft.cfg.max_iters * draft.cfg.step_tokens <= tokens and draft.fits_minutes
    assert f"{LARGE_MODEL_EPOCHS} epochs" in draft.lines[-1]


@pytest.mark.parametrize(
    "tokens, minutes, message",
    [
        (32, 1, "^size=auto: short has 28 training tokens, .* reads 33 at a time; use more text$"),
        (50, 1, "^minutes=1: size=auto needs more time, or more text than the 45 training tokens"),
        (2000, 1e-9, "^minutes=1e-09: size=auto needs more time, or more text than the 1,800 training tokens"),
    ],
)
def test_a_text_that_is_too_short_is_an_error_with_a_remedy_that_works(tmp_path, measured, tokens, minutes, message):
    """The error advised a smaller --block_size, which size=auto refuses."""
    with pytest.raises(UserError, match=message):
        sized(load_short(tmp_path, tokens, minutes))


def load_short(folder: Path, tokens: int, minutes: float) -> TrainConfig:
    """The settings of a run on a text with this number of characters."""
    (folder / "short.txt").write_text(("a word. " * tokens)[:tokens])
    prepare_text.main(prepare_text.TextConfig(inputs=(str(folder / "short.txt"),), data_dir=str(folder)))
    return load(folder, "--dataset=short", f"--minutes={minutes}")


def test_a_short_text_gets_a_context_that_fits(tmp_path, measured):
    """The default block_size of 1,024 was refused before a shorter one was chosen."""
    cfg = chosen(load_short(tmp_path, 160, 0.1))
    assert cfg.block_size <= 144
    open_data(cfg)


def test_contradictions_are_errors(data_dir):
    with pytest.raises(ConfigError, match="--minutes=30"):
        load(data_dir)
    for setting in ("n_layer=4", "max_iters=40", "total_batch_tokens=4096", "init_from=out-verse"):
        with pytest.raises(ConfigError, match=setting):
            load(data_dir, "--minutes=3", f"--{setting}")


def test_a_step_is_measured_without_a_change_of_weights(tiny):
    plan = resolve.make_plan(Draft(tiny(minutes=1.0)))
    run = open_run(plan)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    assert train_script.measure_step(run, plan.settings) > 0
    assert same_tensors(before, dict(run.model.named_parameters()))


def test_a_run_is_trained_and_resumed(tiny, measured, training_tokens, monkeypatch):
    """The printed command to continue it was refused: --max_iters is among the settings that size=auto chooses."""
    training_tokens[0] = 18_581
    measure_step = train_script.measure_step
    SimulatedMachine(monkeypatch, lambda step: 0.05, lambda step: 0.02)
    monkeypatch.setattr(train_script, "measure_step", lambda run, cfg: (1 if run else 100) * measure_step(run, cfg))
    cfg = tiny(size="auto", minutes=0.1, sample_tokens=0).replace({"minutes": "command line"})
    train(cfg)
    saved = checkpoint.load(Path(cfg.out_dir)).state
    assert saved["model"]["n_embd"] == measured[-1].n_embd and saved["config"]["size"] == "auto"
    measured.clear()
    resume = ["--init_from=resume", f"--out_dir={cfg.out_dir}", f"--max_iters={2 * saved['step']}"]
    train(settings.load(TrainConfig, resume))
    assert measured == [] and checkpoint.load(Path(cfg.out_dir)).state["model"] == saved["model"]
