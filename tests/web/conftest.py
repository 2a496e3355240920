"""Fixtures: the viewer in a browser."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from folio.data.tokenizer import Tokenizer
from model import GPT
from tests.support.viewed_models import SHAPES, TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import Served, Viewer, serving


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Callable[[str], Served]]:
    """Return a function that serves a kind of model with steps 100 and 200; "char" also has snapshots of 0 and 10."""
    started: dict[str, Served] = {}

    def serve(kind: str) -> Served:
        if kind not in started:
            models = {step: build_model(kind, seed=step) for step in (0, 10, 100, 200)}
            complete = {step: models[step] for step in (100, 200)}
            snapshots = {step: models[step] for step in (0, 10)} if kind == "char" else {}
            folder = tmp_path_factory.mktemp(kind) / "run"
            started[kind] = stack.enter_context(serving([save_run(folder, complete, TOKENIZERS[kind], snapshots)]))
        return started[kind]

    with ExitStack() as stack:
        yield serve


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., Served]]:
    """Return a function that serves one or two folders of runs, or models, which it saves with one checkpoint."""

    def serve(*runs: str | GPT, tokenizer: Tokenizer = TOKENIZERS["char"], text: str = TEXT) -> Served:
        folders = [
            run if isinstance(run, str) else save_run(tmp_path / f"run{i}", {1: run}, tokenizer, {})
            for i, run in enumerate(runs)
        ]
        return stack.enter_context(serving(folders, text))

    with ExitStack() as stack:
        yield serve


@pytest.fixture(params=SHAPES)
def served(servers, request) -> Served:
    return servers(request.param)


@pytest.fixture
def char(servers) -> Served:
    return servers("char")


@pytest.fixture
def new_viewer(browser, serve) -> Iterator[Callable[..., Viewer]]:
    """Return a function that opens a page. Fails at the end if a page had problems. Pages end before their servers."""
    viewers = []

    def new(served: Served, width: int = 1280, **options: Any) -> Viewer:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        viewers.append(Viewer(context.new_page(), served))
        return viewers[-1]

    yield new
    for viewer in viewers:
        viewer.page.context.close()
    assert [problem for viewer in viewers for problem in viewer.problems] == []


@pytest.fixture(scope="module")
def char_page(browser, servers) -> Iterator[Viewer]:
    """A page shared by a module, because loading a page is ten times slower than showing another view."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Viewer(context.new_page(), servers("char")).open("tokens")
    context.close()


@pytest.fixture
def char_viewer(char_page) -> Iterator[Viewer]:
    """The shared page of the character model, in the state left by the previous test."""
    yield char_page
    problems, char_page.problems = char_page.problems, []
    assert problems == []
