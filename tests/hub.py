"""A small Hugging Face hub on this machine, as far as its libraries ask it when they download a data set."""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

PATH = r"/plain/(.*)|/datasets/([^/]+/[^/]+)/resolve/(?:refs/convert/)?[^/]+/(.*)"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The server, and what it is to do."""

    url: str
    files: dict[str, bytes]  # repository/path -> content
    cut: int = 0  # downloads, from now on, that break off half-way
    busy: int = 0  # requests, from now on, that are answered with 503
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve these files of data sets, as well as /plain/PATH without any ceremony."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if status in (200, 206) and "ETag" in headers and hub.cut:
                hub.cut -= 1
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            else:
                self.wfile.write(content)

        def json(self, value: object) -> None:
            self.answer(json.dumps(value).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            hub.asked.append(f"{self.command} {path} from {start}")
            if hub.busy:
                hub.busy -= 1
                self.answer(b"", 503)
            elif found := re.fullmatch(
                r"/plain/(.*)|/datasets/([^/]+/[^/]+)/resolve/(?:refs/convert/)?[^/]+/(.*)", path
            ):
                name = found[1] or f"{found[2]}/{found[3]}"
                if name not in hub.files:
                    self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                    return
                content = hub.files[name]
                headers = dict(ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=COMMIT)
                if start:
                    headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.answer(content[start:], 206 if start else 200, **headers)
            elif found := re.match(r"/api/datasets/([^/]+/[^/]+)/(tree|revision|paths-info)/[^/]+/?([^?]*)", self.path):
                repository, what, below = found.groups()
                names = sorted(n.removeprefix(f"{repository}/") for n in hub.files if n.startswith(f"{repository}/"))
                sizes = {name: len(hub.files[f"{repository}/{name}"]) for name in names}
                entries = {n: {"type": "file", "path": n, "size": size, "oid": COMMIT} for n, size in sizes.items()}
                for name in names:
                    for parent in list(PurePosixPath(name).parents)[:-1]:
                        entries[str(parent)] = {"type": "directory", "path": str(parent), "oid": COMMIT}
                if what == "revision":
                    siblings = [{"rfilename": name} for name in names]
                    self.json({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
                elif what == "paths-info":
                    length = int(self.headers.get("Content-Length") or 0)
                    wanted = urllib.parse.parse_qs(self.rfile.read(length).decode()).get("paths", [])
                    self.json([entry for name, entry in entries.items() if name in wanted])
                else:
                    below = urllib.parse.unquote(below)
                    inside = [name for name in sorted(entries) if not below or name.startswith(f"{below}/")]
                    if "recursive=true" not in self.path.lower():
                        inside = [name for name in inside if str(PurePosixPath(name).parent) == (below or ".")]
                    if inside or not below:
                        self.json([entries[name] for name in inside])
                    else:
                        self.answer(b"", 404, X_Error_Code="EntryNotFound")
            else:
                self.answer(b"", 404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
