"""Make the pictures of inside.md, tasks.md, music.md and experiments.md: screenshots of the viewer and a sweep's page.

    python docs/screenshots.py out-shakespeare-char             all pictures of this recipe
    python docs/screenshots.py out-translate
    python docs/screenshots.py out-chorales
    python docs/screenshots.py sweep-shakespeare_char           the charts of the sweep in experiments.md
    python docs/screenshots.py out-shakespeare-char stream      those with these names

machine.webp is a loop: the same place of the machine at each snapshot of the training. The script needs Chromium, and
playwright and pillow of requirements-dev.txt.
"""

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
TEXT = "ROMEO:\nI have seen the sun that rose with thee,\nAnd all the world was"
SHORT = "the sun"
SHAKESPEARE = "out-shakespeare-char"
MARGIN = 4  # pixels around the pictures
LOOPS = ("machine",)  # pictures of all checkpoints
FRAME, LAST_FRAME = 160, 1500  # milliseconds


@dataclass(frozen=True)
class Shot:
    """A screenshot of the page, or of some pictures of a view."""

    view: str
    pictures: tuple[str, ...] = ()  # their test ids; none: the whole window
    state: dict[str, Any] = field(default_factory=dict)  # what the link to the view says besides
    click: str = ""  # a selector
    ready: str = ""  # a selector of what appears when everything is drawn
    size: tuple[int, int] = (1000, 660)  # of the window
    run: str = SHAKESPEARE  # the name of the run's folder
    exported: bool = False  # of the model's HTML file, instead of the viewer


SHOTS = {
    "story": Shot("story", state={"story": 3}, ready="[data-moving=false]", size=(1320, 860)),
    "machine": Shot("story", state={"story": 4}, ready="[data-moving=false]", size=(1180, 760)),
    "page": Shot("looking-back", state={"layer": 1, "head": 1, "token": 60}, size=(1100, 800)),
    "map": Shot("map", ("map",), size=(1240, 660)),
    "vocabulary": Shot("embedding", ("vocabulary-map",)),
    "row": Shot("attention-row", ("attention-row",), {"text": SHORT, "layer": 0, "head": 2}),
    "table": Shot(
        "attention-table", ("scores", "masked", "weights"), {"text": SHORT, "layer": 0, "head": 2}, size=(1400, 660)
    ),
    "stream": Shot("stream", ("lens-window",), size=(1100, 660)),
    "output": Shot("output", ("distribution",), {"token": 55, "top_k": 8}, size=(1240, 660)),
    "heads": Shot("all-heads", ("all-heads",)),
    "switch": Shot("switches", ("switch-differences",), {"heads_off": "0.2"}),
    "learning": Shot("checkpoints", ("scores-by-step",), {"layer": 0, "head": 2}, ready="[data-complete=true]"),
    "memorized": Shot("memorized", ("memorized-text", "memorized-place")),
    "playground": Shot(
        "playground",
        ("samples",),
        {"max_new_tokens": 200},
        click="[data-testid=generate]",
        ready=":nth-match(:text('200 tokens'), 3)",
        size=(1240, 660),
    ),
    "file": Shot(
        "playground",
        state={"max_new_tokens": 200},
        click="[data-testid=generate]",
        ready=":nth-match(:text('200 tokens'), 3)",
        size=(1240, 800),
        exported=True,
    ),
    "alignment": Shot(
        "alignment",
        ("alignment",),
        {"text": "en: Tuesday, March 3, 2026 | de: Dienstag, 3. März 2026", "layer": 3, "head": 3, "token": 16},
        run="out-translate",
    ),
    "piano-roll": Shot(
        "roll", ("roll",), {"layer": 3, "head": 3, "all_heads": 1, "token": 89}, size=(1100, 660), run="out-chorales"
    ),  # of the text that is shown first, which is held out
}


@contextmanager
def serving(run: str) -> Iterator[str]:
    """The address of tools/view.py while it runs."""
    command = [sys.executable, str(ROOT / "tools" / "view.py"), run, "--open=False", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as server:
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


@contextmanager
def exported(run: str) -> Iterator[str]:
    """The address of the run's model as an HTML file."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "model.html")
        subprocess.run([sys.executable, str(ROOT / "tools" / "export.py"), "--to=html", run, str(output)], check=True)
        yield output.as_uri()


def take(page: Page, address: str, shot: Shot) -> bytes:
    """A screenshot as PNG."""
    page.set_viewport_size({"width": shot.size[0], "height": shot.size[1]})
    page.goto("about:blank")
    text = {"text": TEXT} if shot.run == SHAKESPEARE else {}
    page.goto(f"{address}#{urlencode({'view': shot.view, **text, **shot.state})}")
    page.wait_for_selector(f"[data-testid=view-{shot.view}]")
    if shot.click:
        page.click(shot.click)
    if shot.ready:
        page.wait_for_selector(shot.ready)
    if not shot.pictures:
        return page.screenshot()
    return take_around(page, [page.locator(f"[data-testid={name}]") for name in shot.pictures])


def take_loop(page: Page, address: str, shot: Shot) -> bytes:
    """Screenshots of all checkpoints as an animated WebP."""
    take(page, address, shot)
    frames = []
    for step in page.evaluate("info.models[0].checkpoints"):
        page.evaluate("step => change({step})", step)
        page.evaluate("new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        frames.append(Image.open(io.BytesIO(page.screenshot())))
    durations = [FRAME] * (len(frames) - 1) + [LAST_FRAME]
    content = io.BytesIO()
    frames[0].save(
        content, "WEBP", save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=45, method=4
    )
    return content.getvalue()


def take_sweep(page: Page, folder: Path) -> bytes:
    """A screenshot of the first two charts of a sweep's page as PNG."""
    page.set_viewport_size({"width": 1060, "height": 1000})
    page.goto((folder / "sweep.html").resolve().as_uri())
    return take_around(page, page.locator("figure.chart").all()[:2])


def take_around(page: Page, pictures: list[Locator]) -> bytes:
    """A screenshot of the smallest rectangle around some elements, with a margin."""
    boxes = [picture.bounding_box() for picture in pictures]
    left, top = (min(box[side] for box in boxes) - MARGIN for side in ("x", "y"))
    right, bottom = max(b["x"] + b["width"] for b in boxes) + MARGIN, max(b["y"] + b["height"] for b in boxes) + MARGIN
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return page.screenshot(clip=clip, full_page=True)


def main(run: str, names: list[str]) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(exist_ok=True)
    names = names or [name for name, shot in SHOTS.items() if shot.run == Path(run).name]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        if Path(run, "sweep.html").exists():
            (FOLDER / "sweep.png").write_bytes(take_sweep(page, Path(run)))
        for is_exported, opened in ((False, serving), (True, exported)):
            if chosen := [name for name in names if SHOTS[name].exported == is_exported]:
                with opened(run) as address:
                    for name in chosen:
                        is_loop = name in LOOPS
                        picture = (take_loop if is_loop else take)(page, address, SHOTS[name])
                        (FOLDER / f"{name}.{'webp' if is_loop else 'png'}").write_bytes(picture)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
