"""The layout: which file may import which, and that nothing happens at import."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("", "folio", "prepare", "tools", "tests") for path in (ROOT / folder).glob("*.py"))
TOOLS = {*(ROOT / "tools").glob("*.py")} - {ROOT / "tools" / "bench_timing.py"}  # helpers without a command
SCRIPTS = [ROOT / "train.py", ROOT / "sample.py", *(ROOT / "prepare").glob("*.py"), *sorted(TOOLS)]
ALLOWED = {  # importer -> what of ours it may import
    "model": set(),
    "folio": {"folio", "model"},
    "train": {"folio", "model"},
    "sample": {"folio", "model"},
    "prepare": {"folio", "model"},
    "tools": {"folio", "model", "train", "sample", "tools"},  # the bench scripts share two modules
    "tests": {"folio", "model", "train", "sample", "prepare", "tools", "tests"},
}


def imports(path: Path) -> set[str]:
    """The first names of all modules that the file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows_point_one_way(path):
    place = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours, others = imports(path) & ALLOWED.keys(), imports(path) - ALLOWED.keys() - sys.stdlib_module_names
    assert ours <= ALLOWED[place]
    files = ["requirements.txt", *(["requirements-dev.txt"] if place == "tests" else [])]
    listed = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    required = re.findall(r"^([\w-]+)", listed.replace("-", "_"), re.MULTILINE)
    beside = {file.stem for file in path.parent.glob("*.py")} if place == "tests" else set()
    assert others - beside <= {*required, "tiktoken_ext"}  # tiktoken_ext is a part of the package tiktoken
    if place == "model":
        assert others == {"torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_happens_at_import(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or path.parent.name == "tests"
    for node in tree.body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            allowed = "sys.path.insert(0, str(ROOT))"
            if path == ROOT / "folio" / "openmp.py":  # the one exception, as torch reads these variables at its import
                allowed = "os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')"
            assert ast.unparse(node) == allowed, ast.unparse(node)
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
        else:
            assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try))


COMPUTING = [ROOT / "train.py", ROOT / "tools" / "evaluate.py", ROOT / "tools" / "plan.py"]  # batches, by matmuls


@pytest.mark.parametrize("path", COMPUTING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_computes_sets_openmp_up_before_torch(path, tmp_path):
    """torch reads OpenMP's variables when it is imported; what the user has set stays."""
    watch = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, *args):
        if name == "torch":
            print(os.environ["OMP_WAIT_POLICY"])
sys.meta_path.insert(0, Watch())
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv[1])
"""
    for given, expected in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        words = [sys.executable, "-c", watch, str(path)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.split() == [expected], done.stderr


def test_no_drawers():
    names = {path.name for path in FILES}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not {path.name for path in ROOT.glob("*.py")} & {"config.py", "data.py", "prepare.py"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_run_from_any_folder(path, tmp_path):
    done = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and path.name in done.stdout and done.stderr == ""


def test_prepare_scripts_run_as_modules():
    done = subprocess.run([sys.executable, "-m", "prepare.shakespeare_char", "--help"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and done.stderr == b""
