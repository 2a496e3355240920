"""A local Hugging Face hub that answers the requests for downloading a data set."""

import hashlib
import http.server
import io
import json
import re
import threading
import urllib.parse
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

FILE = r"/plain/(.*)|/datasets/([^/]+/[^/]+)/resolve/(?:refs/convert/)?[^/]+/(.*)"
API = r"/api/datasets/([^/]+/[^/]+)/(tree|revision|paths-info)/[^/]+/?([^?]*)"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The state of the server."""

    url: str
    files: dict[str, bytes]  # repository/path -> content
    interrupt_next: int = 0  # number of downloads to interrupt halfway
    busy_next: int = 0  # number of requests to answer with 503
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve these files as data sets, and also as /plain/PATH."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if status in (200, 206) and "ETag" in headers and hub.interrupt_next:
                hub.interrupt_next -= 1
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            else:
                self.wfile.write(content)

        def json(self, value: object) -> None:
            self.answer(json.dumps(value).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            hub.requests.append(f"{self.command} {path} from {start}")
            if hub.busy_next:
                hub.busy_next -= 1
                self.answer(b"", 503)
            elif match := re.fullmatch(FILE, path):
                self.answer_file(match[1] or f"{match[2]}/{match[3]}", start)
            elif match := re.match(API, self.path):
                self.answer_api(*match.groups())
            else:
                self.answer(b"", 404)

        def answer_file(self, name: str, start: int) -> None:
            if name not in hub.files:
                self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                return
            content = hub.files[name]
            headers = dict(ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=COMMIT)
            if start:
                headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(content[start:], 206 if start else 200, **headers)

        def answer_api(self, repository: str, what: str, folder: str) -> None:
            names = sorted(n.removeprefix(f"{repository}/") for n in hub.files if n.startswith(f"{repository}/"))
            if what == "revision":
                siblings = [{"rfilename": name} for name in names]
                self.json({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
                return
            entries = self.entries(repository, names)
            if what == "paths-info":
                length = int(self.headers.get("Content-Length") or 0)
                paths = urllib.parse.parse_qs(self.rfile.read(length).decode()).get("paths", [])
                self.json([entry for name, entry in entries.items() if name in paths])
                return
            folder = urllib.parse.unquote(folder)
            inside = [name for name in sorted(entries) if not folder or name.startswith(f"{folder}/")]
            if "recursive=true" not in self.path.lower():
                inside = [name for name in inside if str(PurePosixPath(name).parent) == (folder or ".")]
            if inside or not folder:
                self.json([entries[name] for name in inside])
            else:
                self.answer(b"", 404, X_Error_Code="EntryNotFound")

        def entries(self, repository: str, names: list[str]) -> dict[str, dict]:
            """The files and folders of a repository, by name."""
            sizes = {name: len(hub.files[f"{repository}/{name}"]) for name in names}
            entries = {n: {"type": "file", "path": n, "size": size, "oid": COMMIT} for n, size in sizes.items()}
            for name in names:
                for parent in list(PurePosixPath(name).parents)[:-1]:
                    entries[str(parent)] = {"type": "directory", "path": str(parent), "oid": COMMIT}
            return entries

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", files)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def fake_wheel(path: Path, files: dict[str, str], root: str = "music21/corpus/") -> Path:
    """A zip file like music21's wheel. A .mxl file is stored as a zip file that contains the text."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            content = io.BytesIO()
            if name.endswith(".mxl"):
                with zipfile.ZipFile(content, "w") as score:
                    score.writestr("META-INF/container.xml", "<container/>")
                    score.writestr("score.xml", text)
            wheel.writestr(f"{root}{name}", content.getvalue() or text.encode("utf-8"))
    return path
