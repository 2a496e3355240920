"""The layout of the repository: allowed imports, no side effects at import, and tests that mirror the packages."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from folio.base.packages import packages_in
from tests.support.processes import run
from tests.support.repository import ROOT, shipped

CONFIGS = [path for path in shipped() if path.parent.name == "config"]  # parsed, never imported
FILES = sorted({*shipped(), *(ROOT / "tests").rglob("*.py")} - {*CONFIGS})
BENCH = ROOT / "lab" / "bench"
TOOLS = [path for path in shipped() if path.parent.name == "tools"]
NO_COMMANDS = {BENCH / "timing.py", BENCH.parent / "kill_and_resume.py"}
LAB = {path for path in shipped() if path.parent in (BENCH.parent, BENCH)} - NO_COMMANDS
PREPARE = [path for path in shipped() if path.parent.name == "prepare"]
SCRIPTS = [ROOT / "train.py", ROOT / "sample.py", *PREPARE, *TOOLS, *sorted(LAB)]
ALLOWED = {  # importer -> the project's modules and packages that it may import
    "model": set(),
    "folio": {"folio", "model"},
    "train": {"folio", "model"},
    "sample": {"folio", "model"},
    "prepare": {"folio", "model"},
    "data": {"folio", "model", "prepare"},  # nanoGPT's names of the prepare scripts
    "tools": {"folio", "model", "train", "sample", "lab"},
    "lab": {"folio", "model", "train", "sample", "lab"},
    "tests": {"folio", "model", "train", "sample", "prepare", "tools", "lab", "tests"},
}

# --- the packages of folio --------------------------------------------------------------------------------------------

LAYERS = (  # a package may import the layers above it in this list, and its own modules
    {"base"},
    {"machine"},
    {"data"},
    {"checkpoints"},
    {"training", "decoding"},
    {"evaluation"},
    {"experiments"},
    {"web"},
)
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
MAX_MODULES = 15
WITHOUT_MODEL = {"base", "data"}
USED_BY_DATA = {"folio.machine.compiled", "folio.machine.simd"}  # modules of machine that data may import
LOAD = ("folio", "folio.decoding.language_model")  # the upward import in folio.load


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(parsed(path))]


def find_modules(root: Path) -> dict[str, Path]:
    """The modules of folio by full name; a package has the name of its folder."""
    names = {}
    for path in sorted((root / "folio").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def referenced_modules(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a file refers to, in imports (also inside functions) and in strings."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules:
            yield node.value


def package_of(module: str) -> str:
    return module.split(".")[1]


def layout_problems(root: Path) -> list[str]:
    """The problems of the packages in a tree, one line each."""
    modules, problems, graph = find_modules(root), [], {}
    for module, path in modules.items():
        names = {name for name in referenced_modules(path, modules) if name.split(".")[0] in ("folio", "model")}
        graph[module] = {name for name in names - {module, "folio"} if name in modules and module != "folio"}
        if module == "folio":
            problems += [f"folio imports {name}" for name in names - {module} if (module, name) != LOAD]
            continue
        package = package_of(module)
        if package not in LAYER or path.parent == root / "folio":
            problems.append(f"{module} is in no package")
            continue
        for name in sorted(names - {module, "folio"}):
            if name == "model":
                if package in WITHOUT_MODEL:
                    problems.append(f"{module} imports model")
            elif name not in modules:
                problems.append(f"{module} imports {name}, which does not exist")
            elif package_of(name) != package and LAYER[package_of(name)] >= LAYER[package]:
                problems.append(f"{module} imports {name}, upward")
            elif package == "data" and package_of(name) == "machine" and name not in USED_BY_DATA:
                problems.append(f"{module} imports {name}")
        if package == "base" and "torch" in imports(path):
            problems.append(f"{module} imports torch")
        if path.name == "__init__.py":
            if [type(node) for node in parsed(path).body] != [ast.Expr]:
                problems.append(f"{module} has more than a docstring")
            if len(siblings := [*path.parent.glob("[a-z]*.py")]) > MAX_MODULES:
                problems.append(f"{module} has {len(siblings)} modules")
        elif path.parent / "__init__.py" not in modules.values():
            problems.append(f"{module} is in a folder without __init__.py")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("import cycle: " + " <- ".join(error.args[1]))
    stems = [path.stem for path in modules.values() if path.name != "__init__.py"]
    problems += [f"two modules are called {name}" for name in sorted({name for name in stems if stems.count(name) > 1})]
    paths = [*modules.values(), *root.glob("*.py")]
    classes = [node.name for path in paths for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    problems += [f"two classes are called {name}" for name in sorted({c for c in classes if classes.count(c) > 1})]
    for path in sorted((root / "tests").rglob("test_*.py")):
        tests = {name for name in referenced_modules(path, modules) if name.split(".")[-1].startswith("test_")}
        problems += [f"{path.name} imports {name}" for name in sorted(tests)]
    return problems


def test_packages_import_only_lower_layers():
    assert layout_problems(ROOT) == []


UPWARD = "folio.data.shards imports folio.training.loader, upward"
VIOLATIONS = [  # the problem, and the files that are added to a small tree
    ("folio.x is in no package", {"folio/x.py": ""}),
    ("folio.utils is in no package", {"folio/utils/__init__.py": "'x'"}),
    (UPWARD, {"folio/data/shards.py": "from folio.training import loader"}),
    (UPWARD, {"folio/data/shards.py": "def f():\n    from folio.training.loader import x"}),
    (UPWARD, {"folio/data/shards.py": "NAME = 'folio.training.loader'"}),
    (
        "folio.training.state imports folio.decoding.language_model, upward",
        {"folio/training/state.py": "import folio.decoding.language_model"},
    ),
    (
        "folio.data.shards imports folio.gone, which does not exist",
        {"folio/data/shards.py": "from folio.base import nothing\nimport folio.gone"},
    ),
    (
        "import cycle: folio.base.a <- folio.base.b <- folio.base.a",
        {"folio/base/a.py": "from folio.base import b", "folio/base/b.py": "def f():\n    import folio.base.a"},
    ),
    ("folio.base.a imports torch", {"folio/base/a.py": "def f():\n    import torch.nn"}),
    (
        "folio.data.shards imports folio.machine.runtime",
        {"folio/machine/runtime.py": "", "folio/data/shards.py": "from folio.machine import runtime"},
    ),
    ("folio.data.shards imports model", {"folio/data/shards.py": "from model import GPT"}),
    ("folio imports folio.base", {"folio/__init__.py": "import folio.base"}),
    ("folio.data has more than a docstring", {"folio/data/__init__.py": "'data'\nfrom folio.base import files"}),
    ("folio.data.more.x is in a folder without __init__.py", {"folio/data/more/x.py": ""}),
    ("folio.base has 16 modules", {f"folio/base/m{i}.py": "" for i in range(15)}),
    ("two modules are called files", {"folio/data/files.py": ""}),
    ("two classes are called Step", {"folio/base/a.py": "class Step: ...", "train.py": "class Step: ..."}),
    ("test_b.py imports test_a", {"tests/test_b.py": "from test_a import f"}),
]


def write_tree(root: Path, files: dict[str, str | None]) -> None:
    """Write files, except those whose content is None."""
    for name, content in files.items():
        if content is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)


@pytest.mark.parametrize("problem, files", [(None, {}), *VIOLATIONS])
def test_layout_violations_are_detected(problem, files, tmp_path):
    clean = {
        "folio/__init__.py": "def load():\n    from folio.decoding.language_model import x",
        "folio/base/files.py": "from folio import UserError",
        "folio/data/shards.py": "from folio.base import files",
        "folio/training/state.py": "from folio.data.shards import x\nfrom model import GPT",
        "folio/training/loader.py": "import torch",
        "folio/decoding/language_model.py": "'folio.data.shards'",
        "train.py": "from folio.training import state",
        "tests/test_a.py": "from tests.support import b",
    }
    packages = ("base", "machine", "data", "training", "decoding")
    clean |= {f"folio/{package}/__init__.py": f"'{package}'" for package in packages}
    write_tree(tmp_path, clean | files)
    assert layout_problems(tmp_path) == ([problem] if problem else [])


def test_torch_and_its_compiler_are_imported_only_where_needed():
    """The prepare scripts, training and sampling would each start a second later, and so would worker processes.

    torch._dynamo was imported by methods of torch's optimizers, and by filling tensors on the meta device.
    """
    names = [name for name in find_modules(ROOT) if name.startswith(("folio.base", "folio.data"))]
    code = f"""
import sys, {", ".join(names)}
from folio import UserError, load
assert "torch" not in sys.modules
import torch
from folio.checkpoints.build_model import model_from_tensors
from folio.training.optim import OPTIMIZERS, load_state_tensors, make_optimizer, state_tensors
from model import GPT, GPTConfig
config = GPTConfig(8, 9, 1, 1, 4)
for kind in OPTIMIZERS:
    model = model_from_tensors(config, dict(GPT(config).named_parameters()))
    optimizer = make_optimizer(model, kind, 1e-3, (0.9, 0.95), 0.1)
    idx = torch.zeros(1, 8, dtype=torch.long)
    model(idx, idx)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    load_state_tensors(model, optimizer, state_tensors(model, optimizer))
    assert "torch._dynamo" not in sys.modules, kind
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- test files -------------------------------------------------------------------------------------------------------

EXEMPT = {  # modules without a test file of their own, and the file that tests them
    "folio/decoding/cpu_structs.py": "tests/decoding/test_cpu_decoder.py",  # the arguments of the compiled step
    "folio/machine/attention_arguments.py": "tests/machine/test_compiled_attention.py",
    "folio/machine/causal_attention.py": "tests/machine/test_compiled_attention.py",  # which calls it
    "folio/machine/elementary.py": "tests/decoding/test_decode_step.py",  # which compiles it
    "folio/machine/openmp.py": "tests/test_layout.py",  # one line, which runs at import
}
CROSS_CUTTING = {  # test files without a module of the same name, and what they test
    "tests/checkpoints/test_damage.py": "damaged checkpoints in every command",
    "tests/checkpoints/test_strangers.py": "hostile files in every command that opens files",
    "tests/prepare/test_prepare_scripts.py": "all scripts",
    "tests/lab/test_bench.py": "lab/bench/",
    "tests/lab/test_check_gpu.py": "tools/check_gpu.py and lab/gpu/",
    "tests/tools/test_held_out.py": "every command that measures a run on validation data",
    "tests/training/test_soak.py": "a long run",
    "tests/web/test_api_clients.py": "the API with OpenAI's and others' clients",
}


def problems_of_test_files(root: Path, exempt: dict[str, str], cross_cutting: Collection[str]) -> list[str]:
    """The files of tests/ that do not mirror the tree, one line each. Tests of JavaScript may have any name."""
    problems, files = [], {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    modules = {path.relative_to(root).as_posix() for path in (root / "folio").rglob("*.py") if path.stem != "__init__"}
    for module in sorted(modules):
        path = Path(module)
        own = ("tests" / path.relative_to("folio").parent / f"test_{path.name}").as_posix()
        if (own in files) == (module in exempt):
            problems.append(f"{module} has no {own}" if own not in files else f"{module} is exempt and has {own}")
    for module, file in exempt.items():
        if module not in modules or not (root / file).is_file():
            problems.append(f"{module} is exempt, and {file if module in modules else 'it'} does not exist")
    for file in sorted(files):
        folder, name = Path(file).relative_to("tests").parent, Path(file).name.removeprefix("test_")
        tested = next((path for path in (root / "folio" / folder, root / folder) if path.is_dir()), None)
        if folder == Path() or file in cross_cutting:
            continue
        if tested is None or (any(tested.glob("*.py")) and not (tested / name).is_file()):
            problems.append(f"{file} names no module")
    problems += [f"{file} is listed, and does not exist" for file in cross_cutting if file not in files]
    names = [Path(file).name for file in files]
    return problems + [f"two files are called {name}" for name in sorted({n for n in names if names.count(n) > 1})]


def test_each_module_has_a_test_file_with_its_name():
    assert problems_of_test_files(ROOT, EXEMPT, CROSS_CUTTING) == []


MISPLACED = [  # the problem, and the files that are added to a small tree, or removed from it
    ("folio/data/x.py has no tests/data/test_x.py", {"folio/data/x.py": ""}),
    (
        "folio/data/more/x.py has no tests/data/more/test_x.py",
        {"folio/data/more/x.py": "", "tests/data/test_x.py": "", "folio/data/x.py": ""},
    ),
    ("folio/data/few.py is exempt and has tests/data/test_few.py", {"tests/data/test_few.py": ""}),
    (
        "folio/data/few.py is exempt, and tests/data/test_shards.py does not exist",
        {"tests/data/test_shards.py": None, "folio/data/shards.py": None},
    ),
    ("folio/data/few.py is exempt, and it does not exist", {"folio/data/few.py": None}),
    ("tests/data/test_x.py names no module", {"tests/data/test_x.py": ""}),
    ("tests/tools/test_x.py names no module", {"tests/tools/test_x.py": ""}),
    ("tests/more/test_x.py names no module", {"tests/more/test_x.py": ""}),
    ("two files are called test_shards.py", {"tests/test_shards.py": ""}),
    ("tests/data/test_everything.py is listed, and does not exist", {"tests/data/test_everything.py": None}),
]


@pytest.mark.parametrize("problem, files", [(None, {}), *MISPLACED])
def test_misplaced_test_files_are_detected(problem, files, tmp_path):
    clean = ["folio/__init__.py", "folio/data/__init__.py", "folio/data/shards.py", "folio/data/few.py"]
    clean += ["tests/data/test_shards.py", "tests/data/test_everything.py", "tests/test_layout.py"]
    clean += ["tools/view.py", "tests/tools/test_view.py", "folio/web/page/x.js"]
    clean += ["tests/web/page/test_page_x.py"]  # tests of JavaScript may have any name
    write_tree(tmp_path, dict.fromkeys(clean, "") | files)
    exempt, cross_cutting = {"folio/data/few.py": "tests/data/test_shards.py"}, ["tests/data/test_everything.py"]
    assert problems_of_test_files(tmp_path, exempt, cross_cutting) == ([problem] if problem else [])


# --- all files --------------------------------------------------------------------------------------------------------


def imports(path: Path) -> set[str]:
    """The top-level packages of all modules that the file imports."""
    return {name.split(".")[0] for name in referenced_modules(path, {})}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_have_only_allowed_imports(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    internal, external = imports(path) & ALLOWED.keys(), imports(path) - ALLOWED.keys() - sys.stdlib_module_names
    assert internal <= ALLOWED[package]
    is_dev_file = package == "tests" or path == BENCH / "viewer.py"  # which drives a browser
    files = [file for file in ROOT.glob("requirements*.txt") if is_dev_file or file.name != "requirements-dev.txt"]
    unlisted = {"tiktoken_ext"}  # part of the package tiktoken
    if path == BENCH / "training_peers.py":
        unlisted |= {"jax", "optax"}  # which Folio does not use
    assert external <= unlisted.union(*map(packages_in, files))
    if package == "model":
        assert external == {"torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_at_import(path):
    tree = parsed(path)
    assert ast.get_docstring(tree) or path.is_relative_to(ROOT / "tests")
    for node in tree.body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            allowed = "sys.path.insert(0, str(ROOT))"
            if path == ROOT / "folio" / "machine" / "openmp.py":  # the only exception: torch reads it when imported
                allowed = "os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')"
            assert ast.unparse(node) == allowed, ast.unparse(node)
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
        else:
            assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try))


RUN_SCRIPT = f"""
import os, runpy, sys
own_path = [*sys.path]

def run_script(path, name="<run_path>"):
    '''Run a script that imports the project's modules again, and only from where it looks for them.'''
    for module in [*sys.modules]:
        if module.split(".")[0] in {[*ALLOWED]!r}:
            del sys.modules[module]
    sys.path[:] = [os.path.dirname(path), *own_path]
    runpy.run_path(path, run_name=name)
"""
COMPUTING = [  # scripts with large batches
    ROOT / "train.py",
    *(ROOT / "tools" / name for name in ("compare.py", "evaluate.py", "memorized.py", "plan.py")),
]


def test_computing_scripts_configure_openmp_before_importing_torch(tmp_path):
    """torch reads OpenMP's variables when it is imported. A variable that the user has set is not changed.

    This test failed if the virtual environment was in the project's folder: it imported numpy more than once.
    """
    code = """
class TorchImported(BaseException):
    pass
class ImportObserver:
    def find_spec(self, name, *args):
        if name == "torch":
            raise TorchImported
sys.meta_path.insert(0, ImportObserver())
for script in sys.argv[1:]:
    for value in None, "ACTIVE":
        os.environ.pop("OMP_WAIT_POLICY", None)
        if value:
            os.environ["OMP_WAIT_POLICY"] = value
        try:
            run_script(script)
        except TorchImported:
            print(os.path.basename(script), os.environ.get("OMP_WAIT_POLICY"))
"""
    command = [sys.executable, "-c", RUN_SCRIPT + code, *map(str, COMPUTING)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    expected = [f"{path.name} {value}" for path in COMPUTING for value in ("PASSIVE", "ACTIVE")]
    assert result.stdout.splitlines() == expected, result.stderr


def test_a_users_own_files_are_not_tested(tmp_path):
    """All files in config/, prepare/ and tools/ were tested, including those of users, which failed."""
    listing = """## Files

```
train.py       settings; `python train.py`
folio/         what the scripts share
  base/        settings
prepare/       one script per data set: text.py
               pairs.py
data/          mine/prepare.py
tests/         the tests of folio/x/y.py are in tests/x/test_y.py
```
"""
    write_tree(tmp_path, {"docs/code/code-tour.md": listing})
    files = ["data/mine/prepare.py", "folio/base/settings.py", "prepare/pairs.py", "prepare/text.py", "train.py"]
    own = [*files, "prepare/mine.py", "config/mine.py", "mine.py"]
    write_tree(tmp_path, dict.fromkeys(own, "import nothing_that_exists\n"))
    assert [path.relative_to(tmp_path).as_posix() for path in shipped(tmp_path)] == files
    for file in ("prepare/text.py", "config/gpt2_124m.py", "folio/training/optim.py"):
        assert ROOT / file in shipped()


def test_a_failed_test_of_the_architecture_says_what_to_edit(request):
    """After a change of model.py, dozens of tests failed without saying what else to edit."""
    request.node.add_marker(pytest.mark.architecture("folio/x.py: f"))
    for check, hints in ((lambda: None, []), (pytest.fail, ["folio/x.py: f"])):
        call = pytest.CallInfo.from_call(check, "call")
        report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
        sections = [text for title, text in report.sections if title == "if you changed the model on purpose"]
        assert len(sections) == len(hints)
        assert all(text.endswith(hint) for text, hint in zip(sections, hints, strict=True))


def test_no_file_has_a_vague_name():
    names = {path.name for path in FILES}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not {path.name for path in FILES if path.parent == ROOT} & {"config.py", "data.py", "prepare.py"}


def test_scripts_run_from_any_folder(tmp_path):
    code = f"""
for script in {[*map(str, SCRIPTS)]!r}:
    print(f"<<{{script}}>>")
    sys.argv = [script, "--help"]
    try:
        run_script(script, "__main__")
    except SystemExit as exit:
        if exit.code:
            raise
"""
    (tmp_path / "all.py").write_text(RUN_SCRIPT + code, encoding="utf-8")
    result = run([tmp_path / "all.py"], tmp_path)
    assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
    for path, help in zip(SCRIPTS, re.split(r"^<<.*>>$", result.stdout, flags=re.MULTILINE)[1:], strict=True):
        assert path.name in help, path


def test_prepare_scripts_run_as_modules():
    result = subprocess.run([sys.executable, "-m", "prepare.shakespeare_char", "--help"], cwd=ROOT, capture_output=True)
    assert result.returncode == 0 and result.stderr == b""
