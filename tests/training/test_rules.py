"""Rules across train.py's settings, and derived step counts."""

import re
from pathlib import Path

import pytest

from folio.base import settings
from folio.base.settings import ConfigError
from model import GPTConfig
from train import TrainConfig


def test_all_invalid_training_settings_are_reported_together():
    invalid = ["--n_embd=30", "--n_head=4", "--learning_rate=-1", "--max_iters=10", "--dropout=1", "--batch_size=0"]
    invalid += [
        "--total_batch_tokens=0",
        "--gradient_accumulation_steps=2",
        "--min_lr=1",
        "--beta2=1",
        "--patience=0",
    ]
    with pytest.raises(ConfigError) as error:
        settings.load(TrainConfig, invalid)
    named = {line.split(": ")[1].split("=")[0] for line in str(error.value).splitlines()}
    assert named == set("n_head learning_rate dropout batch_size total_batch_tokens min_lr beta2 patience".split())
    assert "it must divide n_embd=30; use 2, 3 or 5" in str(error.value)


@pytest.mark.parametrize(
    "n_embd, n_head, message",
    [
        (30, 2, "n_head=2: position=rotary needs an even head size, and n_embd / n_head is 15; use 1, 3 or 5"),
        (30, 4, "n_head=4: it must divide n_embd=30; use 1, 3 or 5"),
        (33, 3, "n_head=3: position=rotary needs an even head size, and n_embd / n_head is 11; use n_embd=36"),
    ],
)
def test_rotary_positions_need_an_even_head_size(n_embd, n_head, message):
    """All suggested values work."""
    with pytest.raises(ConfigError, match=f"^command line: {message}$"):
        settings.load(TrainConfig, ["--position=rotary", f"--n_embd={n_embd}", f"--n_head={n_head}"])
    remedy = message.partition("; use ")[2]
    for number in map(int, re.findall(r"\d+", remedy)):
        changed = {"n_embd": number} if "n_embd" in remedy else {"n_head": number}
        GPTConfig(**{"n_embd": n_embd, "n_head": n_head, "position": "rotary", **changed})
    with pytest.raises(ConfigError, match=r"position=rope: expected 'learned', .*'rotary'"):
        settings.load(TrainConfig, ["--position=rope"])


@pytest.mark.parametrize("words", [["--n_embd=0", "--n_head=5"], ["--block_size=0", "--total_batch_tokens=64"]])
def test_an_invalid_setting_causes_only_one_error(words):
    """Rules across settings were checked with the default of an invalid one: "it must divide n_embd=768"."""
    with pytest.raises(ConfigError) as error:
        settings.load(TrainConfig, words)
    assert str(error.value) == f"command line: {words[0].removeprefix('--')}: it must be at least 1"


@pytest.mark.parametrize("tokens, accumulation", [(100_000, 10), (91_000, 9), (96_000, 10), (1, 1)])
def test_total_batch_tokens_determines_the_accumulation(tokens, accumulation):
    """It is rounded to a multiple of the micro-batch. Other values were refused."""
    cfg = settings.load(TrainConfig, [f"--total_batch_tokens={tokens}", "--batch_size=10", "--block_size=1000"])
    assert cfg.accumulation == accumulation and cfg.step_tokens == accumulation * 10_000


def test_a_config_file_without_a_data_set_is_refused(write):
    """nanoGPT's train_gpt2.py, which relies on nanoGPT's default, was run on Tiny Shakespeare."""
    path = write("n_layer = 12\nlr_decay_iters = 600000\n")
    with pytest.raises(ConfigError) as error:
        settings.load(TrainConfig, [path])
    assert "x.py names no data set; add --dataset=NAME" in str(error.value)
    resumed = settings.load(TrainConfig, [path, "--init_from=resume"])
    settings.check(resumed.replace(init_from="scratch", dataset="verse"))  # named in Python
    assert "--dataset=openwebtext" in str(error.value)
    assert settings.load(TrainConfig, [path, "--dataset=mine"]).dataset == "mine"
    assert settings.load(TrainConfig, [path, "--init_from=resume"]).n_layer == 12  # the run knows its data
    assert settings.load(TrainConfig, ["--n_layer=2"]).dataset == "shakespeare_char"


def test_max_iters_on_the_command_line_scales_a_config_files_step_counts(tmp_path, monkeypatch, capsys):
    """--max_iters=10 failed with "warmup must end before max_iters", also with nanoGPT's own config files."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(
        "max_iters = 5000\nlr_decay_iters = 5000\nwarmup_iters = 100\neval_interval = 250\ndataset = 'a'\n"
    )

    def counts(*args: str) -> tuple:
        cfg = settings.load(TrainConfig, ["x.py", *args])
        return cfg.max_iters, cfg.lr_decay_iters, cfg.warmup_iters, cfg.eval_interval, cfg.wsd_decay_iters

    assert counts() == (5000, 5000, 100, 250, None) and capsys.readouterr().out == ""
    assert counts("--max_iters=30") == (30, 30, 1, 2, None)
    assert capsys.readouterr().out == (
        "max_iters=30 instead of the config file's 5,000; scaled in proportion: warmup_iters=1 (was 100), "
        "lr_decay_iters=30 (was 5,000), eval_interval=2 (was 250)\n"
    )
    assert counts("--max_iters=10000") == (10000, 10000, 200, 500, None)
    assert counts("--max_iters=30", "--eval_interval=7", "--wsd_decay_iters=3") == (30, 30, 1, 7, 3)
    Path("y.py").write_text("max_iters = 40\n")
    assert counts("--max_iters=30", "y.py") == (40, 5000, 100, 250, None)  # the last argument decides
