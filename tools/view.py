"""Look inside a model in the browser: its tokens, attention, neurons, predictions, and samples.

    python tools/view.py out-shakespeare-char              any checkpoint of a run, even while it trains
    python tools/view.py out-shakespeare-char out-six      two models, compared token by token
    python tools/view.py gpt2                              any model that --init_from takes
    python tools/view.py out-chorales --text=FILE:piece.mid

The page works offline, and the server is reachable only from this computer. Ctrl-C stops it. docs/use/inside.md is a
tour.
"""

import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.commands import command  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.decoding.prompt_files import read_prompt  # noqa: E402
from folio.decoding.prompts import encode_prompt  # noqa: E402
from folio.machine.runtime import resolve_runtime  # noqa: E402
from folio.web.questions import MAX_CHARACTERS, TraceProvider  # noqa: E402
from folio.web.server import LOOPBACK, host_headers, listen, make_server, server_url  # noqa: E402
from folio.web.viewed_model import ViewedModel, choose_text  # noqa: E402
from folio.web.viewer import make_app  # noqa: E402


@dataclass(frozen=True)
class ViewConfig(Settings):
    # --- files ---
    models: tuple[str, ...] = ()  # RUN [RUN]: a run, a checkpoint, or any value of --init_from; a second one to compare
    checkpoint: Literal["best", "last"] = "best"  # which checkpoint of a run
    text: str = ""  # initial text, as sample.py's start; default: a held-out text, Shakespeare, or a sample
    data_dir: str | None = None  # folder of the data sets, used if the training data has moved
    # --- server ---
    host: str = "127.0.0.1"  # a loopback address; for other computers, see tools/export.py --to=html
    port: Annotated[int, Ge(0), Le(65535)] = 8000  # port to listen on; if it is in use, or 0: a free port
    open: bool = True  # False: do not open the browser
    # --- machine ---
    device: str = "auto"  # cpu, cuda, mps

    def problems(self) -> list[tuple[str, str]]:
        """Require one or two models, and a loopback address."""
        problems = []
        if len(self.models) not in (1, 2):
            problems.append(("models", "name one model, or two to compare: python tools/view.py out-shakespeare-char"))
        if self.host not in LOOPBACK:
            export = command("tools/export.py", "--to=html", *self.models[:1], "shared/index.html")
            problems.append(
                (
                    "host",
                    f"use {', '.join(LOOPBACK)}, because the server has no authentication; to share the page, write it "
                    f"to a file and serve that: {export}, then python -m http.server --directory=shared",
                )
            )
        return problems


def main(cfg: ViewConfig) -> None:
    device = resolve_runtime(cfg.device, "float32", False).device
    models = [ViewedModel(name, cfg.checkpoint, device) for name in cfg.models]
    if len({viewed.tokenizer.hash for viewed in models}) > 1:
        names = " and ".join(viewed.name for viewed in models)
        raise UserError(f"{names} have different tokenizers, so their tokens are not comparable")
    text = read_prompt("text", cfg.text, models[0].tokenizer) or choose_text(models[0], cfg.data_dir)
    if len(text) > MAX_CHARACTERS:
        say(f"text: the first {MAX_CHARACTERS:,} of {len(text):,} characters are shown")
        text = text[:MAX_CHARACTERS].rsplit(" ", 1)[0]  # without a part of an event of music
    encode_prompt(models[0].tokenizer, text, "skip")  # raises UserError if a music model gets other text
    listener = listen(cfg.host, cfg.port)
    port = listener.getsockname()[1]
    address = f"{server_url(cfg.host, port)}/"
    server = make_server(make_app(TraceProvider(models, text, cfg.data_dir), host_headers(LOOPBACK, port)))
    print(f"{address}  (Ctrl-C stops)", flush=True)
    if cfg.open:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    run_script(main, ViewConfig, needs_output=False)
