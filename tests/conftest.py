"""Fixtures shared by all tests: a small text and data set, short runs, and browsers. Seeds are in support/seeds.py."""

import gc
import io
import logging
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # tiny models are slower with several threads
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

from folio.base.workers import cores
from folio.data import find_data, shards
from prepare import midi
from prepare import text as prepare_text
from prepare.midi import MidiConfig
from tests.support.music import write_pieces
from tests.support.prepared import edit_split, ids_of
from train import TrainConfig, train
from train import main as train_and_print

pytest_plugins = ["tests.support.seeds"]

LAB = Path(__file__).parent / "lab"  # tests of what maintainers run
MAX_PROCESSES = 4  # each may take 3.5 GB
WORDS = "the king shall love his crown and swear by fair night that no sword of ours can mend a broken vow".split()


def pytest_configure() -> None:
    gc.disable()  # until all tests are imported
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background commands ignore it
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes commands ignore it


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of processes for the whole suite; 0 (only this process) for single files, slow and GPU tests."""
    is_whole_suite = config.args == config.getini("testpaths")
    is_parallel = is_whole_suite and config.option.markexpr.startswith(("not ", "browser", "lab"))
    return min(cores(), MAX_PROCESSES) if is_parallel else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m lab, import only tests/lab; with -m browser, files that mention a browser or a fixture for its pages."""
    if config.option.markexpr.startswith("lab") and collection_path.name.startswith("test_"):
        return LAB not in collection_path.parents or None
    if config.option.markexpr.startswith("browser") and collection_path.name.startswith("test_"):
        return not re.search("browser|viewer|open_page", collection_path.read_text(encoding="utf-8")) or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests in tests/lab, and those that use the fixture `browser`, also by way of another fixture."""
    if LAB in item.path.parents:
        item.add_marker("lab")
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker("browser")


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collections. Each would visit 700,000 objects, in half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # packages that tests import later make each full collection slow again


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked with `needs` if one of the modules is not installed."""
    for marker in item.iter_markers("needs"):
        for module in marker.args:
            pytest.importorskip(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a hint to a failed test marked with `architecture`: the place to adapt after a change of model.py."""
    report = yield
    marker = item.get_closest_marker("architecture")
    if marker and report.failed:
        hint = f"This test assumes the original architecture of model.py. Adapt {marker.args[0]}"
        report.sections.append(("if you changed the model on purpose", hint))
    return report


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders that do not exist."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def no_shared_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own. Most tests need no folder, so none is created."""
    monkeypatch.setenv("FOLIO_CACHE", str(next(caches)))


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Generator[None, None, None]:
    """Disable os.fsync, which matters only if the machine crashes, and takes most of the time of a save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def short_last_sample() -> Generator[None, None, None]:
    """End each run with a sample of 20 tokens. The default of 300 takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("folio.training.session.FINAL_SAMPLE_TOKENS", 20)
        yield


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Generator[pytest.CaptureFixture[str], None, None]:
    """capfd, including uvicorn's messages, which pytest's log handler would otherwise capture."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(logging.lastResort)
    yield capfd
    logger.removeHandler(logging.lastResort)


@pytest.fixture(scope="session")
def text() -> str:
    """About 20,000 characters of random verse."""
    rng = random.Random(7)
    verses = [" ".join(rng.choices(WORDS, k=6)).capitalize() + rng.choice(".;,?") + "\n" for _ in range(700)]
    return "".join("ROMEO:\n" * (i % 20 == 0) + verse for i, verse in enumerate(verses))


@pytest.fixture(scope="session")
def data_dir(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one data set, "verse", of characters."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "verse.txt"
    source.write_text(text, encoding="utf-8")
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), data_dir=str(folder)))
    return folder


@pytest.fixture
def other_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces Folio's. Its prepare/mine.py prepares a text of 2,100 characters."""
    project = Path(find_data.ROOT)
    source = (project / "prepare" / "shakespeare_char.py").read_text(encoding="utf-8")
    source = source.replace("Path(__file__).resolve().parent.parent", f"Path({str(project)!r})")
    text = tmp_path / "text.txt"
    text.write_text("some words of my own\n" * 100, encoding="utf-8")
    source = source.replace("str(tiny_shakespeare())", repr(str(text))).replace('"shakespeare_char"', "'mine'")
    (tmp_path / "prepare").mkdir()
    (tmp_path / "prepare" / "mine.py").write_text(source, encoding="utf-8")
    (tmp_path / "prepare" / "broken.py").write_text("raise SystemExit(1)", encoding="utf-8")
    for module in (find_data, shards):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_in(data_dir: Path) -> Callable[..., TrainConfig]:
    """A function that returns settings for a run of a second, changed by its keyword arguments."""

    def make(**settings) -> TrainConfig:
        small = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4, max_iters=12, warmup_iters=2)
        small |= dict(learning_rate=3e-3, eval_interval=6, log_interval=1, eval_iters=4, dropout=0.1)
        small |= dict(dataset="verse", data_dir=str(data_dir), dtype="float32", sample_tokens=10)
        return TrainConfig(**{**small, **settings})

    return make


@pytest.fixture
def tiny(tiny_in: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    """Like tiny_in, with an out_dir for this test."""
    return lambda **settings: tiny_in(**{"out_dir": str(tmp_path / "out"), **settings})


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads until the end of the test."""
    import torch  # after OMP_NUM_THREADS is set

    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture
def process_group() -> Iterator[Any]:
    """A gloo process group of this process, as a folio.machine.distributed.Group."""
    from torch import distributed as dist

    from folio.machine.distributed import Group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def masked_dir(data_dir, tmp_path, seed) -> str:
    """A folder with the data set "verse", masked in stretches of at least 97 tokens."""
    shutil.copytree(data_dir / "verse", tmp_path / "masked" / "verse")
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        n_tokens = len(ids_of(tmp_path / "masked" / "verse", split))
        counted = rng.random(n_tokens // 97 + 1) > 0.7
        counted[0] |= split == "val"  # any evaluation has a target
        edit_split(tmp_path / "masked" / "verse", split, mask=np.repeat(counted, 97)[:n_tokens].astype(np.uint8))
    return str(tmp_path / "masked")


@pytest.fixture
def mixed_dir(data_dir, tmp_path) -> str:
    """A folder with the data sets "verse" and "prose", which share a tokenizer, and "bytes", which has another."""
    shutil.copytree(data_dir / "verse", tmp_path / "mixed" / "verse")
    source = tmp_path / "prose.txt"
    source.write_text("The king and the sword.\n" * 300)
    for name, tokenizer in (("prose", str(data_dir / "verse")), ("bytes", "byte")):
        cfg = prepare_text.TextConfig(
            inputs=(str(source),), name=name, tokenizer=tokenizer, data_dir=str(tmp_path / "mixed"), on_unknown="skip"
        )
        prepare_text.main(cfg)
    return str(tmp_path / "mixed")


@pytest.fixture(scope="module")
def trained_once(tiny_in, tmp_path_factory) -> Path:
    """The run that is copied for each test by the fixture `run`."""
    cfg = tiny_in(max_iters=20, out_dir=str(tmp_path_factory.mktemp("run") / "out"))
    with redirect_stdout(io.StringIO()):
        train(cfg)
    return Path(cfg.out_dir)


@pytest.fixture
def run(trained_once, tmp_path) -> str:
    """The folder of a short training run."""
    return str(shutil.copytree(trained_once, tmp_path / "out"))


@pytest.fixture
def music_run(tiny, tmp_path, capsys) -> str:
    """The folder of a short run on the MIDI files in tmp_path / "pieces"."""
    write_pieces(tmp_path / "pieces", 4)
    data = str(tmp_path / "data")
    midi.main(MidiConfig(inputs=(str(tmp_path / "pieces"),), data_dir=data, num_workers=0, time="beats", steps=4))
    cfg = tiny(dataset="pieces", data_dir=data, out_dir=str(tmp_path / "out-pieces"), block_size=64)
    train_and_print(cfg)
    return cfg.out_dir


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function that writes a config file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(content: str) -> str:
        Path("x.py").write_text(content, encoding="utf-8")
        return "x.py"

    return write


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright. Its event loop then runs in this thread: see tests.support.waiting.in_thread."""
    from tests.support.viewers import CHROMIUM

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens HTML in Chromium. Errors and network requests of the pages fail the test."""
    problems, pages = [], []

    def open_page(html: str, width: int = 1000, **options: Any) -> Any:
        path = tmp_path / "opened.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_context(viewport={"width": width, "height": 900}, **options).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or problems.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert not problems
