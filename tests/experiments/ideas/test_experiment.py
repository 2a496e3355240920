import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from folio.experiments.ideas import experiment as module
from folio.experiments.ideas.experiment import next_seed, prepare_command, setting_of, slug, units, validation_text
from folio.experiments.sweep.arms import Arm
from folio.experiments.sweep.outcome import Outcome
from prepare import text as prepare_text


def arm(*options: str, folder: Path = Path()) -> Arm:
    return Arm("x", folder, options, None, "0")


def test_the_last_option_of_an_arm_is_its_setting():
    experiment = SimpleNamespace(sweep=SimpleNamespace(base=SimpleNamespace(dataset="shared")))
    assert setting_of(experiment, arm(), "dataset") == "shared"
    assert setting_of(experiment, arm("--dataset=a", "--dataset=b", "--dataset_x=c"), "dataset") == "b"


def test_each_experiment_with_a_recipe_has_sixteen_seeds_of_its_own():
    entries = [{"recipe": "r", "seed": 1337}, {"recipe": "other", "seed": 5000}, {"recipe": "r", "seed": 40}]
    assert next_seed(entries, "r", 1337) == 1353
    assert next_seed(entries, "r", 9000) == 9000 and next_seed([], "r", 7) == 7


def test_a_folder_is_named_after_the_idea():
    assert slug("Less noise, more signal!") == "less-noise-more-signal"
    assert slug(".") == "" and len(slug("word " * 30)) <= 40


def test_a_data_set_is_prepared_by_the_arms_script(tmp_path):
    folder, data = tmp_path / "code", tmp_path / "data"
    (folder / "prepare").mkdir(parents=True)
    (folder / "prepare" / "mine.py").write_text("")
    assert prepare_command(arm(folder=folder), "mine", data) == [str(folder / "prepare" / "mine.py")]
    (data / "novel").mkdir(parents=True)
    made_by = "python /old/prepare/text.py 'my novel.txt' --name=novel --tokenizer=byte --data_dir=/old/data"
    (data / "novel" / "meta.json").write_text(json.dumps({"made_by": made_by}))
    command = prepare_command(arm(folder=folder), "novel", data)
    assert command == [str(folder / "prepare" / "text.py"), "my novel.txt", "--tokenizer=byte", "--name=novel"]


@pytest.fixture
def data_sets(data_dir, tmp_path, text) -> Path:
    """The data set "verse" of characters, the same text as bytes, and another text."""
    root = tmp_path / "data"
    shutil.copytree(data_dir / "verse", root / "verse")
    for name, content in (("bytes", text), ("other", text.replace("e", "a"))):
        source = tmp_path / f"{name}.txt"
        source.write_text(content, encoding="utf-8")
        options = dict(name=name, tokenizer="byte", data_dir=str(root))
        prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), **options))
    return root


@pytest.mark.parametrize("kind", ["same", "bytes", "other", "part"])
def test_losses_are_comparable_if_they_are_on_the_same_bytes(kind, data_sets, monkeypatch):
    names = ("verse", "verse" if kind == "same" else "other" if kind == "other" else "bytes")
    pair = [Outcome(point, 1, {}, "finished", text=name) for point, name in enumerate(names)]
    base = SimpleNamespace(dataset="verse", data_dir=str(data_sets))
    sweep = SimpleNamespace(base=base, folder=lambda *_: Path())
    experiment = SimpleNamespace(sweep=sweep, arms=[arm(f"--dataset={name}") for name in names])
    limit = 100 if kind == "part" else None
    run = SimpleNamespace(parts=[{"windows": 1, "max_val_tokens": limit}])
    monkeypatch.setattr(module.Run, "of", lambda folder: run)
    factors = units(experiment, pair)
    if kind == "same":
        assert factors == (1.0, 1.0)
    elif kind == "bytes":
        (_, n_bytes, n_characters), (_, n_bytes_2, n_tokens) = (
            validation_text(module.validation_set(experiment, each)) for each in experiment.arms
        )
        assert n_bytes == n_bytes_2 == n_tokens and factors == (n_characters / n_bytes, 1.0)
    else:
        assert ("different parts" if kind == "part" else "different validation texts") in factors
