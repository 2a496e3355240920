from pathlib import Path

import pytest

import train
from folio import UserError
from tests.support.sweeps import parse, small_sweep


def test_a_sweep_without_a_config_file_or_in_a_runs_folder_is_an_error(data_dir, tiny):
    """The sweep trained GPT-2 for 600,000 steps, or mixed its trials with a run's checkpoints."""
    with pytest.raises(UserError, match="name a config file"):
        parse(["n_head=2,4"])
    train.train(tiny(max_iters=1))
    with pytest.raises(UserError, match=r"out_dir=.*run's folder; choose another --out_dir"):
        parse([*small_sweep(data_dir, Path(tiny().out_dir)), "n_head=2,4"])


def test_the_settings_and_the_sweep_of_a_command(data_dir, tmp_path):
    words = small_sweep(data_dir, tmp_path / "sweep")
    cfg, sweep = parse(["n_head=1,2", "learning_rate=1e-4..1e-2:log", "--trials=7", "--seeds=2", "--jobs=3", *words])
    assert (cfg.jobs, sweep.trials, sweep.points, sweep.tokens) == (3, 7, 7, None)
    assert sweep.seeds == [1337, 1338] and sweep.out_dir == tmp_path / "sweep"
    assert " ".join(map(str, sweep.space)) == "n_head=1,2 learning_rate=0.0001..0.01:log"
    assert sweep.arguments == [word for word in words if not word.startswith("--out_dir")]
