"""The tests' own random numbers: the same in each run and on each machine, and new ones on request."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.seeds import derive_seed

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

TESTS = """
    import random
    import numpy as np
    import pytest

    def note(*values):
        with open("notes.txt", "a") as file:
            print(*values, file=file)

    @pytest.fixture(scope="module")
    def of_module():
        note("module set up")
        random.random(), np.random.rand()  # only if this test is the first of the module
        yield
        note("module torn down")

    @pytest.fixture
    def number(seed):
        return np.random.default_rng(seed).integers(1000)

    @pytest.mark.parametrize("case", ["a", "b"])
    def test_seed(case, seed, of_module):
        note("seed", case, seed)

    def test_half(number, of_module):
        note("half", number)
        assert number < 500

    def test_global_generators(of_module):
        note("global", random.random(), np.random.rand())
"""

PROPERTY = """
    import os
    from hypothesis import given, settings, strategies

    if "IMPORTED" in os.environ:
        __import__(os.environ["IMPORTED"])

    @given(strategies.sets(strategies.text()))
    @settings(max_examples=20)
    def test_property(words):
        with open("notes.txt", "a") as file:
            print("property", sorted(words), file=file)
"""


@pytest.fixture(autouse=True)
def bare_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No seed from outside, and no plugins of other packages, whose imports take seconds."""
    monkeypatch.delenv("SEED", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def notes_of(pytester: pytest.Pytester) -> Callable[..., tuple[list[str], str]]:
    """A function that runs pytest on TESTS with options, and returns what they wrote and what pytest printed."""
    pytester.makepyfile(test_some=TESTS)

    def run(*options: str) -> tuple[list[str], str]:
        Path("notes.txt").write_text("")
        result = pytester.runpytest_inprocess("-p", "tests.support.seeds", "--tb=no", *options)
        return Path("notes.txt").read_text().splitlines(), result.stdout.str() + result.stderr.str()

    return run


def test_a_seed_follows_from_the_node_id(notes_of):
    """The global generators also have it, whether or not the test is the first to use a fixture that draws."""
    notes, _ = notes_of()
    for case in "ab":
        assert f"seed {case} {derive_seed(f'test_some.py::test_seed[{case}]')}" in notes
    alone, _ = notes_of("-k", "global")
    assert alone[1] in notes


def test_the_environment_does_not_change_the_numbers(pytester, monkeypatch):
    """Python's hash seed, the time zone, the locale, the number of cores, the order, and xdist do not matter.

    Nor do the imported modules, whose constants Hypothesis drew, so that a test's numbers depended on the tests before.
    """
    pytest.importorskip("hypothesis")
    words = [f"constant {number}" for number in range(1000)]
    pytester.makepyfile(test_some=TESTS, test_property=PROPERTY, imported=f"words = {words}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def notes(prefix: list[str], files: list[str], **variables: str) -> list[str]:
        Path("notes.txt").write_text("")
        command = [*prefix, sys.executable, "-m", "pytest", "-p", "tests.support.seeds"]
        subprocess.run([*command, *files], env=os.environ | variables, stdout=subprocess.DEVNULL)
        return sorted(line for line in Path("notes.txt").read_text().splitlines() if "module" not in line)

    expected = notes([], ["test_some.py", "test_property.py"], PYTHONHASHSEED="0", TZ="Pacific/Auckland", LC_ALL="C")
    one_core = ["taskset", "-c", "0"] if shutil.which("taskset") else []
    changed = dict(PYTHONHASHSEED="1", TZ="America/New_York", LC_ALL="de_DE.UTF-8", IMPORTED="imported")
    xdist = ["-p", "xdist", "--numprocesses=1", "test_property.py", "test_some.py"]
    assert notes(one_core, xdist, **changed) == expected
    assert len(expected) > 20  # of Hypothesis, too


def test_new_seeds_are_repeatable_and_differ(notes_of):
    """--seeds=N runs each randomized test N times, and no other, and sets up the fixtures of a module once."""
    notes, _ = notes_of("--seeds=10")
    cases = {case: [line for line in notes if line.startswith(f"seed {case}")] for case in "ab"}
    assert all(len(set(lines)) == 10 for lines in cases.values())
    assert f"seed a {derive_seed('test_some.py::test_seed[a]', '', 10)}" == cases["a"][-1]
    assert [line for line in notes if "module" in line] == ["module set up", "module torn down"]
    assert not any(line.startswith("global") for line in notes)
    assert notes_of("--seeds=10")[0] == notes
    others, _ = notes_of("--seeds=10", "--seeds-base=another")
    assert len(set(notes) & set(others)) < 5  # two lines of the module, and perhaps one of 1,000 numbers
    some, _ = notes_of("--seeds=2", "-k", "seed", "test_some.py::test_half", "test_some.py::test_seed[a]")
    assert some[1:-1] == cases["a"][:2]


def test_failed_runs_are_printed_with_the_command_that_repeats_them(notes_of, monkeypatch):
    notes, output = notes_of("--seeds=10")
    drawn = [int(line.split()[1]) for line in notes if line.startswith("half")]
    seeds = re.findall(r"^SEED=(\d+) python -m pytest test_some.py::test_half$", output, re.M)
    assert 0 < len(seeds) == sum(number >= 500 for number in drawn) < 10
    assert f"{len(seeds)} failed, 2 passed" in output
    monkeypatch.setenv("SEED", seeds[0])
    notes, output = notes_of("-k", "half")
    assert notes[1] == f"half {next(number for number in drawn if number >= 500)}" and "1 failed" in output
    assert "SEED=n sets one seed" in notes_of("--seeds=2")[1]
    assert "--seeds=0: the number of seeds must be at least 1" in notes_of("--seeds=0")[1]


def test_tests_that_took_long_are_left_out_on_request(notes_of, pytester):
    """--seeds-under=S uses the durations of the last run without --seeds, and runs tests that have none."""
    notes_of("-k", "seed")
    path = pytester.path / ".pytest_cache" / "v" / "folio" / "durations"
    durations = json.loads(path.read_text())
    assert set(durations) == {f"test_some.py::test_seed[{case}]" for case in "ab"}
    path.write_text(json.dumps(durations | {"test_some.py::test_seed[a]": 0.1}))
    notes, _ = notes_of("--seeds=3", "--seeds-under=0.1")
    assert Counter(line.rpartition(" ")[0] for line in notes[1:-1]) == {"seed b": 3, "half": 3}
