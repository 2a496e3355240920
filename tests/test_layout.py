"""Which file may import which, and that nothing runs at import."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run
from repository import ROOT, shipped

CONFIGS = [path for path in shipped() if path.parent.name == "config"]  # parsed, never imported
FILES = sorted({*shipped(), *(ROOT / "folio").glob("*.py"), *(ROOT / "tests").glob("*.py")} - {*CONFIGS})
TOOLS = {path for path in shipped() if path.parent.name == "tools"} - {ROOT / "tools" / "bench_timing.py"}  # no command
PREPARE = [path for path in shipped() if path.parent.name == "prepare"]
SCRIPTS = [ROOT / "train.py", ROOT / "sample.py", *PREPARE, *sorted(TOOLS)]
ALLOWED = {  # importer -> the project's modules and packages that it may import
    "model": set(),
    "folio": {"folio", "model"},
    "train": {"folio", "model"},
    "sample": {"folio", "model"},
    "prepare": {"folio", "model"},
    "data": {"folio", "model", "prepare"},  # nanoGPT's names of the prepare scripts
    "tools": {"folio", "model", "train", "sample", "tools"},  # the bench scripts share two modules
    "tests": {"folio", "model", "train", "sample", "prepare", "tools", "tests"},
}


def imports(path: Path) -> set[str]:
    """The top-level packages of all modules that the file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_import_only_what_they_may(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours, others = imports(path) & ALLOWED.keys(), imports(path) - ALLOWED.keys() - sys.stdlib_module_names
    assert ours <= ALLOWED[package]
    of_developers = package == "tests" or path == ROOT / "tools" / "bench_view.py"  # which drives a browser
    files = ["requirements.txt", *(["requirements-dev.txt"] if of_developers else [])]
    listed = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    required = re.findall(r"^([\w-]+)", listed.replace("-", "_"), re.MULTILINE)
    siblings = {file.stem for file in path.parent.glob("*.py")} if package == "tests" else set()
    assert others - siblings <= {*required, "tiktoken_ext"}  # tiktoken_ext is part of the package tiktoken
    if package == "model":
        assert others == {"torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_at_import(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or path.parent.name == "tests"
    for node in tree.body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            allowed = "sys.path.insert(0, str(ROOT))"
            if path == ROOT / "folio" / "openmp.py":  # the only exception, because torch reads it when imported
                allowed = "os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')"
            assert ast.unparse(node) == allowed, ast.unparse(node)
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
        else:
            assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try))


COMPUTING = [ROOT / "train.py", ROOT / "tools" / "evaluate.py", ROOT / "tools" / "plan.py"]  # large batches


@pytest.mark.parametrize("path", COMPUTING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_computing_scripts_configure_openmp_before_importing_torch(path, tmp_path):
    """torch reads OpenMP's variables when it is imported. A variable that the user has set is not changed."""
    code = """
import os, runpy, sys
class ImportObserver:
    def find_spec(self, name, *args):
        if name == "torch":
            print(os.environ["OMP_WAIT_POLICY"], flush=True)
            os._exit(0)
sys.meta_path.insert(0, ImportObserver())
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv[1])
"""
    for variables, expected in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | variables
        command = [sys.executable, "-c", code, str(path)]
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout.split() == [expected], result.stderr


def test_a_users_own_files_are_not_tested(tmp_path):
    """config/*.py, prepare/*.py and tools/*.py were all tested, so a user's own file there failed the tests."""
    listing = """## Files

```
train.py       settings; `python train.py`
folio/
  settings     configurator.py
prepare/       one script per data set: text.py
               pairs.py
data/          mine/prepare.py
tests/         test_<module>.py for each module
```
"""
    (tmp_path / "README.md").write_text(listing)
    files = ["data/mine/prepare.py", "folio/configurator.py", "prepare/pairs.py", "prepare/text.py", "train.py"]
    for file in [*files, "prepare/mine.py", "config/mine.py", "mine.py"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("import nothing_that_exists\n")
    assert [path.relative_to(tmp_path).as_posix() for path in shipped(tmp_path)] == files
    assert {ROOT / "prepare" / "text.py", ROOT / "config" / "gpt2_124m.py", ROOT / "folio" / "optim.py"} <= {*shipped()}


def test_a_failed_test_of_the_architecture_says_where_to_teach_it_a_change(request):
    """Dozens of tests failed for someone who changed model.py, and none said what else to edit."""
    request.node.add_marker(pytest.mark.architecture("folio/x.py: f"))
    for check, hints in ((lambda: None, []), (pytest.fail, ["folio/x.py: f"])):
        call = pytest.CallInfo.from_call(check, "call")
        report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
        given = [text for title, text in report.sections if title == "if you changed the model on purpose"]
        assert len(given) == len(hints) and all(text.endswith(hint) for text, hint in zip(given, hints, strict=True))


def test_no_file_has_a_vague_name():
    names = {path.name for path in FILES}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not {path.name for path in FILES if path.parent == ROOT} & {"config.py", "data.py", "prepare.py"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_run_from_any_folder(path, tmp_path):
    result = run([path, "--help"], tmp_path)
    assert result.returncode == 0 and path.name in result.stdout and result.stderr == ""


def test_prepare_scripts_run_as_modules():
    result = subprocess.run([sys.executable, "-m", "prepare.shakespeare_char", "--help"], cwd=ROOT, capture_output=True)
    assert result.returncode == 0 and result.stderr == b""
