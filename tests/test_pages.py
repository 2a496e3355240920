"""The pages of the documentation: links, anchors, line lengths, and the commands that they show."""

import re
import shlex

import pytest
from torch.distributed.run import get_args_parser as torchrun_options

from folio.base.settings import load, split_arguments
from folio.experiments.sweep.arguments import parse_sweep
from lab.docs import pages, settings_class
from tests.support.repository import ROOT, shell_commands, shipped
from tools.ab import AbConfig
from tools.sweep import SweepConfig
from train import TrainConfig

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages()}
TOUR = PAGES["docs/code/code-tour.md"]


def without_code(content: str) -> str:
    return re.sub(r"^```.*?^```$", "", content, flags=re.DOTALL | re.MULTILINE)


def anchors(content: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(content), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_lines_fit_on_a_screen_and_links_and_anchors_exist(name):
    assert not [line for line in PAGES[name].splitlines() if len(line) > 120]
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(PAGES[name])):
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), target
        if anchor and not re.fullmatch(r"L\d+", anchor):
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


def test_each_page_is_on_a_shelf():
    first_page = PAGES["docs/README.md"]
    for name in PAGES:
        if name.startswith("docs/") and name != "docs/README.md":
            assert f"({name.removeprefix('docs/')})" in first_page, f"link {name} in docs/README.md"
    for shelf in ("use", "code", "lab"):
        assert f"(docs/{shelf}/" in PAGES["README.md"]


def matches(pattern: str, *folders: str) -> set[str]:
    """What matches the pattern in the Python files of these folders."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {match for path in paths for match in re.findall(pattern, path.read_text(encoding="utf-8"))}


def test_pages_that_the_code_names_exist_and_tests_that_the_docs_name():
    pages = matches(r"docs/[\w/-]+\.md", "folio", "prepare", "config", "tools", "lab")
    assert pages and pages <= PAGES.keys(), pages - PAGES.keys()
    named = {test for content in PAGES.values() for test in re.findall(r"::(test_\w+)`", content)}
    existing = matches(r"def (test_\w+)", "tests")
    assert named and named <= existing, named - existing


def test_the_files_that_the_code_tour_lists_exist():
    """Files are tested only if they are listed, because others may belong to a user."""
    missing = [path for path in shipped() if not path.is_file()]
    assert not missing, "docs/code/code-tour.md lists files that do not exist"


def test_excerpts_of_the_tour_are_in_the_file_that_is_named_before_them():
    """A Python block shows lines of the file of the reference before it, in their order. It may leave out comments."""
    path, excerpts = None, 0
    for reference, block in re.findall(r"\]\((?:\.\./)*([\w/]+\.py)#L\d+\)|```python\n(.*?)```", TOUR, re.DOTALL):
        path = reference or path
        lines = iter([code(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()])
        missing = [line for line in block.splitlines() if code(line) not in lines]
        assert not missing, f"{path} does not have these lines in this order"
        excerpts += bool(block)
    assert excerpts >= 4


def code(line: str) -> str:
    """A line of Python without its indentation and comment."""
    return line.partition("  # ")[0].strip()


# --- commands ---------------------------------------------------------------------------------------------------------


CHANGES = "docs/code/change-it.md"  # its commands need its changes; tests/test_change_it.py runs them
COMMANDS = [(name, command) for name in PAGES if name != CHANGES for command in shell_commands(PAGES[name])]


@pytest.mark.parametrize("name, command", COMMANDS)
def test_commands_name_files_and_settings_that_exist(name, command, monkeypatch):
    monkeypatch.setenv("FOLIO_KEY", "secret")  # as the page does before it serves other computers
    program, *arguments = shlex.split(command)
    if program == "pip" and arguments[:2] == ["install", "-r"]:
        assert (ROOT / arguments[2]).exists()
    elif program == "torchrun":
        options = torchrun_options().parse_args(arguments)
        check_script(options.training_script, options.training_script_args)
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        files = [argument.partition("::")[0] for argument in arguments if argument.startswith("tests/")]
        assert all((ROOT / file).exists() for file in files)
    elif program == "python" and arguments[0].endswith(".py"):
        check_script(arguments[0], arguments[1:])


def check_script(script: str, arguments: list[str]) -> None:
    """Parse the options of a script. Raises UserError for one that does not exist, and for a wrong value."""
    if script in ("docs/screenshots.py", "model.py") or script.startswith("lab/bench/"):  # without Settings
        assert (ROOT / script).exists()
    elif script == "tools/check_gpu.py":
        load(settings_class(script), [*arguments, "--device=cpu"])  # this machine may have no GPU
    elif script == "tools/sweep.py":
        parse_sweep(SweepConfig, TrainConfig, arguments)
    elif script == "tools/ab.py":
        own, rest = split_arguments(AbConfig, TrainConfig, arguments)
        assert load(AbConfig, own).ledger or load(TrainConfig, rest)
    else:
        if script == "prepare/translation.py":  # its settings ask for the languages of these packages
            pytest.importorskip("babel")
            pytest.importorskip("num2words")
        load(settings_class(script), arguments)
