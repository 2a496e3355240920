import pytest

from folio.experiments.sweep.outcome import Trial
from tests.support.sweeps import parse, small_sweep


@pytest.mark.parametrize(
    ("words", "evaluations"),
    [
        (["--max_iters=100", "--eval_interval=10"], 10),
        (["--tokens=6400", "--eval_interval=10"], 10),  # of 100 steps; max_iters is 600,000 by default
        (["--tokens=6400"], 10),
    ],
)
def test_pruning_knows_the_number_of_evaluations(words, evaluations, data_dir):
    rest = ["--batch_size=4", "--block_size=16", "--dataset=verse", f"--data_dir={data_dir}", "--trials=9"]
    _, sweep = parse(["learning_rate=1e-3..1e-2", *words, *rest])
    assert sweep.evaluations == evaluations


def test_each_trial_has_its_own_folder_and_arguments(data_dir, tmp_path):
    words = small_sweep(data_dir, tmp_path / "sweep")
    _, sweep = parse(["n_head=1,2", *words])
    assert sweep.folder(3, 1338) == tmp_path / "sweep" / "trial-003-seed-1338"
    assert sweep.description(Trial(3, 1338, {"n_head": 2})) == {
        "sweep": sweep.definition,
        "params": {"n_head": 2},
        "seed": 1338,
    }
    assert sweep.arguments_of({"n_head": 2}, 1338) == [*sweep.arguments, "--n_head=2", "--seed=1338"]
    assert sweep.fraction({"n_head": 2}, step=2, seconds=9.0) == 2 / 8


def test_tokens_determine_the_steps_of_each_trial(data_dir, tmp_path):
    words = [word for word in small_sweep(data_dir, tmp_path / "sweep") if not word.startswith("--max_iters")]
    _, sweep = parse(["batch_size=2,8", "--tokens=512", *words])
    assert [sweep.max_iters_of({"batch_size": size}) for size in (2, 8)] == [16, 4]  # of 16 tokens per sequence
    assert sweep.arguments_of({"batch_size": 2}, 5)[-1] == "--max_iters=16"
