"""Serve a model with OpenAI's API: openai, llm, LangChain, and lm-eval can use it.

    python tools/serve.py out-shakespeare-char             a run; http://127.0.0.1:8080/v1 for clients on this computer
    python tools/serve.py gpt2 --port=9000                 whatever --init_from takes
    FOLIO_KEY=... python tools/serve.py out --host=0.0.0.0 --allowed_hosts=gpu.example.org

Ctrl-C stops it. docs/serving.md shows clients, limits, and what to use for more than one machine.
"""

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import CommaSeparated, PositiveFloat, PositiveInt, Settings, run_script  # noqa: E402
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.decoding.language_model import LanguageModel  # noqa: E402
from folio.web.api import ServedModel, make_app  # noqa: E402
from folio.web.chat import chat_template  # noqa: E402
from folio.web.completions import Limits  # noqa: E402
from folio.web.engine import Engine  # noqa: E402
from folio.web.server import LOOPBACK, host_headers, listen, make_server, server_url  # noqa: E402

KEY = "FOLIO_KEY"
ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServeConfig(Settings):
    # --- model ---
    models: tuple[str, ...] = ()  # RUN: a run, a checkpoint, or what --init_from takes
    checkpoint: Literal["best", "last"] = "best"  # of a run, the one to serve
    device: str = "auto"  # cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # of the weights
    # --- server ---
    host: str = "127.0.0.1"  # another address than loopback needs a key; 0.0.0.0: all of this computer's
    port: Annotated[int, Ge(0), Le(65535)] = 8080  # if it is taken, or 0, a free one is used
    key: str = ""  # what clients must give as their API key; FOLIO_KEY=... before the command is not shown by ps
    allowed_hosts: CommaSeparated = ()  # by which names clients reach it, as in their address: gpu.example.org
    allowed_origins: CommaSeparated = ()  # pages of other sites that may use it: https://example.org
    # --- limits ---
    rows: PositiveInt | None = None  # texts generated at a time; None: 256, fewer if memory holds fewer
    max_waiting: PositiveInt = 64  # texts that wait for a row; while there are so many, requests are refused
    max_choices: PositiveInt = Limits.choices  # of a request: its prompts * n
    max_new_tokens: PositiveInt = Limits.new_tokens  # of a request: its choices * max_tokens
    max_prompt_tokens: PositiveInt = Limits.prompt_tokens  # of a request: those of all its prompts
    timeout: PositiveFloat = 600.0  # seconds for an answer

    @property
    def secret(self) -> str:
        return self.key or os.environ.get(KEY, "")

    def problems(self) -> list[tuple[str, str]]:
        """One model, and a key and a name where others reach the server."""
        problems = []
        if len(self.models) != 1:
            problems.append(("models", "give one: python tools/serve.py out-shakespeare-char"))
        if self.host not in LOOPBACK and not self.secret:
            problems.append(("host", f"anyone could use the server; set a key: {KEY}=SECRET python tools/serve.py ..."))
        if self.host in ANY_ADDRESS and not self.allowed_hosts:
            problems.append(("host", "name what clients call this computer: --allowed_hosts=gpu.example.org"))
        for name in self.allowed_hosts:
            if "/" in name:
                problems.append(("allowed_hosts", "give names without http:// or a path: gpu.example.org"))
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/*]+|null", origin):
                problems.append(("allowed_origins", f"write {origin} as browsers do: https://example.org"))
        if not re.fullmatch("[!-~]*", self.secret):
            problems.append(("key", "it must consist of visible ASCII characters, without spaces or line breaks"))
        return problems


def model_id(name: str, gpt: LanguageModel) -> str:
    """What clients call the model: the name of the run's folder, or else what was given, without its folders."""
    is_checkpoint = gpt.path is not None and (gpt.path / "manifest.json").exists()
    return gpt.path.resolve().parent.name if is_checkpoint else Path(name).resolve().name


def fingerprint(gpt: LanguageModel) -> str:
    """A short hash of the checkpoint: of its manifest, which has the hashes of its files; of other programs' files,
    of their names, sizes, and times.
    """
    path = gpt.path
    if path is None:
        raise UserError("the model was not loaded from a file")
    digest = hashlib.sha256()
    if (path / "manifest.json").exists():
        digest.update((path / "manifest.json").read_bytes())
    else:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return f"fp_{digest.hexdigest()[:12]}"


def hosts_of(cfg: ServeConfig, port: int) -> frozenset[str]:
    """The values of the header Host that are this server. A proxy may pass on a name without the port."""
    names = {*LOOPBACK, cfg.host} - {*ANY_ADDRESS}
    return host_headers({*names, *cfg.allowed_hosts}, port) | frozenset(name.lower() for name in cfg.allowed_hosts)


def main(cfg: ServeConfig) -> None:
    name = resolve(cfg.models[0])
    gpt = LanguageModel.load(name, cfg.checkpoint, cfg.device, cfg.dtype)
    limits = Limits(cfg.max_choices, cfg.max_new_tokens, cfg.max_prompt_tokens)
    engine = Engine(gpt, cfg.rows, cfg.max_waiting)
    served = ServedModel(engine, model_id(name, gpt), fingerprint(gpt), chat_template(gpt), limits, cfg.timeout)
    listener = listen(cfg.host, cfg.port)
    port = listener.getsockname()[1]
    origins = frozenset(origin.lower() for origin in cfg.allowed_origins)
    server = make_server(make_app(served, hosts_of(cfg, port), origins, cfg.secret or None))
    print_address(cfg, served, port)
    server.run(sockets=[listener])


def print_address(cfg: ServeConfig, served: ServedModel, port: int) -> None:
    """Say how to use the server."""
    host = cfg.allowed_hosts[0] if cfg.host in ANY_ADDRESS else cfg.host
    address = server_url(host, port)
    key = f' -H "Authorization: Bearer ${KEY}"' if cfg.secret else ""
    if served.chat:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "To be"}]}'
    else:
        path, body = "completions", '{"prompt": "To be", "max_tokens": 64}'
    rows = "one text" if served.engine.rows == 1 else f"{served.engine.rows:,} texts"
    print(f"{address}/v1  serves {served.model_id}, {rows} at a time (Ctrl-C stops)")
    print(f"curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    run_script(main, ServeConfig)
