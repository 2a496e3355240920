"""Serve a model through OpenAI's API, for clients such as openai, llm, and LangChain.

    python tools/serve.py out-shakespeare-char             a run; http://127.0.0.1:8080/v1 for clients on this computer
    python tools/serve.py gpt2 --port=9000                 any model that --init_from takes
    FOLIO_KEY=... python tools/serve.py out --host=0.0.0.0 --allowed_hosts=gpu.example.org

Ctrl-C stops it. docs/use/serving.md shows clients, limits, and what to use for more than one machine.
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
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.decoding.language_model import LanguageModel  # noqa: E402
from folio.web.api import ServedModel, make_app  # noqa: E402
from folio.web.completions import Limits  # noqa: E402
from folio.web.engine import Engine  # noqa: E402
from folio.web.server import LOOPBACK, host_headers, listen, make_server, server_url  # noqa: E402

KEY = "FOLIO_KEY"
ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServeConfig(Settings):
    # --- model ---
    models: tuple[str, ...] = ()  # RUN: a run, a checkpoint, or any value that --init_from accepts
    checkpoint: Literal["best", "last"] = "best"  # which checkpoint of a run
    device: str = "auto"  # cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # dtype of the weights
    # --- server ---
    host: str = "127.0.0.1"  # addresses other than loopback need a key; 0.0.0.0: all interfaces
    port: Annotated[int, Ge(0), Le(65535)] = 8080  # port to listen on; if it is in use, or 0: a free port
    key: str = ""  # API key that clients must send; FOLIO_KEY in the environment sets it without showing it in ps
    allowed_hosts: CommaSeparated = ()  # names or addresses that clients use for this server: gpu.example.org
    allowed_origins: CommaSeparated = ()  # web origins that may use the server (CORS): https://example.org
    # --- limits ---
    rows: PositiveInt | None = None  # texts generated at once; None: up to 256, as memory allows
    max_waiting: PositiveInt = 64  # maximum number of queued texts; further requests are refused
    max_choices: PositiveInt = Limits.choices  # per request: prompts * n
    max_new_tokens: PositiveInt = Limits.new_tokens  # per request: choices * max_tokens
    max_prompt_tokens: PositiveInt = Limits.prompt_tokens  # per request: total tokens of its prompts
    timeout: PositiveFloat = 600.0  # seconds per response

    @property
    def secret(self) -> str:
        return self.key or os.environ.get(KEY, "")

    def problems(self) -> list[tuple[str, str]]:
        """Require one model, and for addresses other than loopback a key and a host name."""
        problems = []
        if len(self.models) != 1:
            problems.append(("models", "name one model: python tools/serve.py out-shakespeare-char"))
        if self.host not in LOOPBACK and not self.secret:
            problems.append(("host", f"anyone could use the server; set a key: {KEY}=SECRET python tools/serve.py ..."))
        if self.host in ANY_ADDRESS and not self.allowed_hosts:
            hosts = "--allowed_hosts=gpu.example.org,192.168.1.5"
            problems.append(("host", f"set the names or addresses of this computer that clients use: {hosts}"))
        for name in self.allowed_hosts:
            if "/" in name:
                problems.append(("allowed_hosts", "give names without http:// or a path: gpu.example.org"))
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/*]+|null", origin):
                problems.append(("allowed_origins", f"{origin} is not an origin; write https://example.org"))
        if not re.fullmatch("[!-~]*", self.secret):
            problems.append(("key", "it must consist of visible ASCII characters, without spaces or line breaks"))
        return problems


def model_id(name: str, gpt: LanguageModel) -> str:
    """Return the model's name for clients: the run's folder name, or the last part of the given path."""
    is_checkpoint = gpt.path is not None and (gpt.path / "manifest.json").exists()
    return gpt.path.resolve().parent.name if is_checkpoint else Path(name).resolve().name


def fingerprint(gpt: LanguageModel) -> str:
    """Return a short hash of the checkpoint.

    It is over the manifest, which has the hashes of all files, or for other formats over file names, sizes, and times.
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
    """Return the allowed values of the Host header. A proxy may forward a name without the port."""
    names = {*LOOPBACK, cfg.host} - {*ANY_ADDRESS}
    return host_headers({*names, *cfg.allowed_hosts}, port) | frozenset(name.lower() for name in cfg.allowed_hosts)


def main(cfg: ServeConfig) -> None:
    name = find_run(cfg.models[0])
    gpt = LanguageModel.load(name, cfg.checkpoint, cfg.device, cfg.dtype)
    limits = Limits(cfg.max_choices, cfg.max_new_tokens, cfg.max_prompt_tokens)
    engine = Engine(gpt, cfg.rows, cfg.max_waiting)
    served = ServedModel(engine, model_id(name, gpt), fingerprint(gpt), limits, cfg.timeout)
    listener = listen(cfg.host, cfg.port)
    port = listener.getsockname()[1]
    origins = frozenset(origin.lower() for origin in cfg.allowed_origins)
    server = make_server(make_app(served, hosts_of(cfg, port), origins, cfg.secret or None))
    print_address(cfg, served, port)
    server.run(sockets=[listener])


def print_address(cfg: ServeConfig, served: ServedModel, port: int) -> None:
    """Print the address and an example request."""
    host = cfg.allowed_hosts[0] if cfg.host in ANY_ADDRESS else cfg.host
    address = server_url(host, port)
    key = f' -H "Authorization: Bearer ${KEY}"' if cfg.secret else ""
    if served.gpt.prompt_format:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "To be"}]}'
    else:
        path, body = "completions", '{"prompt": "To be", "max_tokens": 64}'
    rows = "one text" if served.engine.rows == 1 else f"{served.engine.rows:,} texts"
    print(f"{address}/v1  serves {served.model_id}, {rows} at a time (Ctrl-C stops)")
    print(f"curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    run_script(main, ServeConfig, needs_output=False)
