from pathlib import Path
from types import SimpleNamespace

from folio.experiments.ideas.compare_code import describe_arm, describe_budget, describe_changes, describe_models
from folio.experiments.sweep.arms import Arm, Change


def arm(name: str, *options: str, commit: str | None = None, folder: Path = Path()) -> Arm:
    return Arm(name, folder, options, commit, "0")


def test_code_that_measures_or_prepares_is_named_first():
    experiment = SimpleNamespace(arms=[arm("a"), arm("b", "--n_layer=2")])
    files = [Change("model.py", 3, 1), Change("folio/evaluation/loss.py", 1, 0), Change("prepare/text.py", 0, 2)]
    first, second = describe_changes(experiment, files)
    assert first.startswith("caution: ") and first.endswith("folio/evaluation/loss.py, prepare/text.py")
    assert second.startswith("different: model.py +3 -1, ") and second.endswith("options: no options / --n_layer=2")
    (line,) = describe_changes(experiment, [Change(f"{n}.py", 1, 1) for n in range(20)])
    assert "and 12 more" in line


def test_a_change_of_the_evaluation_in_train_is_named_and_a_comment_is_not(tmp_path):
    evaluate = "def evaluate(run):\n    return {}\n\n\ndef train(cfg):\n    return {}\n"
    versions = {"a": (1, 2), "comment": ("1  # the mean", 2), "step": (1, 3), "evaluation": (4, 2), "broken": ("(", 2)}
    for name, values in versions.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(evaluate.format(*values))
    named = {}
    for name in versions:
        experiment = SimpleNamespace(arms=[arm("a", folder=tmp_path / "a"), arm(name, folder=tmp_path / name)])
        first = describe_changes(experiment, [Change("train.py", 1, 1)])[0]
        named[name] = first.startswith("caution") and "evaluate in train.py" in first
    assert named == {"a": False, "comment": False, "step": False, "evaluation": True, "broken": True}


def test_an_arm_is_named_with_its_commit():
    assert describe_arm(arm("main", commit="0123456789")) == "main (0123456)"
    assert describe_arm(arm(".", commit="0123456789-dirty")) == ". (0123456 with changes)"
    assert describe_arm(arm("/other")) == "/other"


def test_models_and_budgets():
    fact = {"parameters": 1000, "flops_per_token": 6_000_000.0}
    assert describe_models([fact, {}]) == (
        "A: 1,000 parameters, 6.00 MFLOP per token; B: its code cannot count parameters"
    )
    assert describe_budget(SimpleNamespace(minutes=0.5)) == "0.5 min"
    assert describe_budget(SimpleNamespace(minutes=None, max_iters=1200)) == "1,200 steps"
