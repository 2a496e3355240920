"""folio/base/packages.py: optional packages, and messages about missing ones."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from folio import UserError
from folio.base import packages
from folio.base.packages import describe_missing, packages_in, require
from folio.checkpoints import onnx_export
from folio.checkpoints.export_formats import FORMATS
from folio.data.sources import music
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.output_files import output_paths
from tests.support.processes import ROOT

FILES = sorted(path.name for path in ROOT.glob("requirements*.txt"))


FILE_OF = {"torch": "requirements.txt", "annotated_types": "requirements.txt", "pytest": "requirements-dev.txt"}
FILE_OF |= dict.fromkeys(("sacrebleu.metrics", "rouge_score"), "requirements-tasks.txt")


def test_a_missing_package_is_named_with_its_file(monkeypatch, tmp_path):
    for module, file in FILE_OF.items():
        monkeypatch.chdir(ROOT)
        package = module.partition(".")[0]
        assert describe_missing(module) == f"the package {package} is not installed: pip install -r {file}"
        monkeypatch.chdir(tmp_path)
        path = tmp_path / describe_missing(module).split()[-1]
        assert path.name == file and path.exists()
    for module in (None, "", "a_users_module"):
        assert describe_missing(module) is None


def test_a_missing_package_of_a_feature_is_an_error(monkeypatch):
    require("--to=x", "json", "re")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.chdir(packages.ROOT)
    with pytest.raises(UserError, match=r"^--to=x: .*gguf.*: pip install -r requirements-export.txt$"):
        require("--to=x", "gguf")


MUSIC = ("miditok", "symusic")
COMMANDS = {  # command -> modules of the optional packages that it needs
    "tools/export.py a b --to=hf": FORMATS["hf"].packages,
    "tools/export.py a b.gguf --to=gguf": FORMATS["gguf"].packages,
    "tools/export.py a b --to=onnx": onnx_export.PACKAGES,
    "tools/evaluate.py x.gguf": ("gguf",),
    "tools/evaluate.py a --tasks=hellaswag": ("lm_eval",),
    "tools/evaluate.py a --tasks=pairs": ("sacrebleu", "rouge_score"),
    "tools/evaluate.py a --tasks=music": (*MUSIC, "music21"),
    "tools/compare.py a b": ("scipy",),
    "tools/sweep.py config/shakespeare_char.py n_head=1..2 --trials=2": ("optuna", "sqlalchemy"),
    "prepare/translation.py --data_dir=data": ("babel", "num2words"),
    "prepare/midi.py a.mid --data_dir=data": MUSIC,
    "train.py config/shakespeare_char.py --tensorboard_log=True": ("tensorboard",),
}


CASES = [(command, module) for command, modules in COMMANDS.items() for module in modules]


@pytest.mark.parametrize("command, module", CASES)
def test_a_missing_package_is_reported_before_the_work_in_one_line(command, module, tmp_path, monkeypatch, capsys):
    """A missing package ended evaluations and whole sweeps after all the work was done."""
    for needed in COMMANDS[command]:
        pytest.importorskip(needed)
    (extra,) = [file for file in FILES if module in packages_in(ROOT / file)]
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "a.mid").write_bytes(b"MThd")
    script, *arguments = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    music._miditok.cache_clear()  # it holds an object of the package
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # restored after a script replaces it
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("error: ")
    assert re.search(rf"the package {module} is not installed: pip install -r \S*{extra}$", line)


@pytest.mark.needs(*MUSIC)
def test_the_packages_for_a_midi_file_are_checked_before_it_is_generated(monkeypatch):
    for module in MUSIC:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=f"{module} is not installed: pip install"):
            patch.setitem(sys.modules, module, None)
            output_paths(Path("a.mid"), 1, MidiTokenizer(["NoteOn_60", "TimeShift_1.0.4"], {}))


def test_each_optional_package_is_tested_with_a_command():
    others = {"requirements.txt", "requirements-dev.txt"}
    extras = set().union(*(packages_in(ROOT / file) for file in {*FILES} - others))
    assert extras == {*set().union(*COMMANDS.values())}
