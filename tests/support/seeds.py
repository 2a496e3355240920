"""Seeds of randomized tests: they follow from the tests' names; --seeds=N runs each randomized test with N new ones."""

import hashlib
import itertools
import os
import random
import shlex
import sys
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

SEED = pytest.StashKey[int]()
DURATIONS = "folio/durations"  # in pytest's cache: seconds of each randomized test in its last run


def derive_seed(node_id: str, base: str = "", index: int = 0) -> int:
    """A test's seed of 31 bits: of a plain run for index 0, the index-th of --seeds and --seeds-base otherwise."""
    name = f"{node_id}\n{base}\n{index}" if index else node_id
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1


def is_hypothesis_test(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def is_randomized(item: pytest.Item) -> bool:
    """Whether the test has the fixture `seed`, possibly through another fixture, or is one of Hypothesis."""
    return "seed" in getattr(item, "fixturenames", ()) or is_hypothesis_test(item)


def set_seed(item: pytest.Item, seed: int) -> None:
    """Set the seeds of the test's next run: the value of the fixture `seed`, and that of Hypothesis."""
    item.stash[SEED] = seed
    item.user_properties[:] = [("seed", seed)] if is_randomized(item) else []
    if is_hypothesis_test(item):
        import hypothesis

        hypothesis.seed(seed)(getattr(item.obj, "__func__", item.obj))


@pytest.fixture(autouse=True)
def seeded_generators(request: pytest.FixtureRequest) -> None:
    """Seed the global generators. Fixtures of the module or session, which only its first test sets up, come before."""
    value = request.node.stash[SEED]
    random.seed(value)
    np.random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that follows from the test's node id, so that each run draws the same numbers. $SEED replaces it."""
    value = request.node.stash[SEED]
    print(f"SEED={value}")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seeds of randomized tests")
    group.addoption("--seeds", type=int, metavar="N", help="run each randomized test N times, with new seeds")
    group.addoption("--seeds-base", default="", metavar="TEXT", help="another text gives --seeds other seeds")
    group.addoption("--seeds-under", type=float, metavar="S", help="only tests that took less than S s in the last run")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seeds is not None and config.option.seeds < 1:
        raise pytest.UsageError(f"--seeds={config.option.seeds}: the number of seeds must be at least 1")
    if config.option.seeds is not None and os.environ.get("SEED"):
        raise pytest.UsageError("SEED=n sets one seed for all tests, and --seeds=N draws N for each: use one of them")
    with suppress(ImportError):  # hypothesis is optional
        import hypothesis

        hypothesis.settings.register_profile("folio", derandomize=True, deadline=None, database=None)
        hypothesis.settings.load_profile("folio")
        # Otherwise, it also draws constants of the imported modules, which depend on the tests that ran before.
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --seeds=N, keep only the randomized tests, and of these only those that --seeds-under admits."""
    if config.option.seeds is None:
        return
    limit = config.option.seeds_under
    durations = config.cache.get(DURATIONS, {}) if limit else {}
    left = [item for item in items if is_randomized(item) and (not limit or durations.get(item.nodeid, 0) < limit)]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """With --seeds=N, run a test N times. Each failed run is reported, or, if there is none, the last."""
    options = item.config.option
    if options.seeds is None:
        set_seed(item, int(os.environ.get("SEED") or derive_seed(item.nodeid)))
        return None  # pytest runs it
    runner = item.config.pluginmanager.get_plugin("runner")
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    all_passed = True
    for index in range(1, options.seeds + 1):
        set_seed(item, derive_seed(item.nodeid, options.seeds_base, index))
        is_last = index == options.seeds
        # Before the last run's end, pytest is to tear down the fixtures of the test, but not those of its module.
        reports = runner.runtestprotocol(item, log=False, nextitem=nextitem if is_last else item.parent)
        passed = not any(report.failed for report in reports)
        all_passed &= passed
        if not passed or (is_last and all_passed):
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
        if item.session.shouldstop or item.session.shouldfail:
            break
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --seeds=N, print a command for each failed run; otherwise save the tests' durations for --seeds-under."""
    runs, durations = {}, Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if properties := dict(getattr(report, "user_properties", ())):
            durations[report.nodeid] += report.duration
            if report.failed:
                runs[properties["seed"], report.nodeid] = None
    if config.option.seeds is None:
        if cache := getattr(config, "cache", None):
            cache.set(DURATIONS, cache.get(DURATIONS, {}) | durations)
    elif runs:
        terminalreporter.section("seeds that fail")
        selection = config.option.markexpr
        is_default = not selection or f"-m={selection}" in config.getini("addopts")
        markers = "" if is_default else f" -m {shlex.quote(selection)}"
        for seed, node_id in runs:
            terminalreporter.line(f"SEED={seed} python -m pytest{markers} {shlex.quote(node_id)}")
