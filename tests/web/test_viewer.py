import base64
import gzip
import hashlib
import http.client
import json
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from folio.base.settings import setting_names
from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import LanguageModel
from folio.experiments.static_page import BASE_STYLE, COLORS
from folio.web import viewer
from folio.web.playground import GenerationQuestion
from folio.web.questions import KINDS, Answer, Question, TraceProvider
from folio.web.server import FAILURE
from folio.web.viewed_model import ViewedModel
from folio.web.viewer import read_page
from tests.support import servers
from tests.support.questions import texts_of
from tests.support.viewed_models import save_random_run
from tests.support.viewers import serving_provider

SEED = 5  # of the weights
JSON = "application/json"

# --- a server on a real socket ----------------------------------------------------------------------------------------


class Client(servers.Client):
    def ask(self, **fields: Any) -> tuple[int, Any]:
        """The status, and the header of the answer or {"error": ...}."""
        status, headers, content = self.request("POST", "/ask", fields)
        if headers["content-type"] == "application/octet-stream":
            content = content[4 : 4 + int.from_bytes(content[:4], "little")]
        return status, json.loads(content)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def post_head(self, path: str, *headers: str) -> bytes:
        host = f"Host: 127.0.0.1:{self.port}"
        return "\r\n".join([f"POST {path} HTTP/1.1", host, f"Content-Type: {JSON}", *headers, "", ""]).encode()


@contextmanager
def serving(provider: Any) -> Iterator[Client]:
    with serving_provider(provider) as served:
        yield Client(served.port)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a character model whose vocabulary is padded."""
    folder = tmp_path_factory.mktemp("run")
    save_random_run(folder, CharTokenizer("\n abcdefghijklmnopqr.,é日", eot=True), SEED, vocab_size=32, block_size=16)
    return folder


@pytest.fixture(scope="module")
def provider(run: Path) -> TraceProvider:
    return TraceProvider([ViewedModel(str(run), "best", torch.device("cpu"))], "abc")


@pytest.fixture(scope="module")
def client(provider: TraceProvider) -> Iterator[Client]:
    with serving(provider) as client:
        yield client


# --- streams ----------------------------------------------------------------------------------------------------------


def test_concurrent_streams_and_questions(client, run):
    gpt = LanguageModel.load(run)
    expected = [gpt.generate("abc", num_samples=n, max_new_tokens=300, seed=n) for n in (1, 3)]
    _, tokens = client.ask(kind="tokens", text="abc")
    _, overview = client.ask(kind="overview", ids=tokens["ids"])
    lines: list[list[str]] = [[], []]
    with client.connect() as one, client.connect() as two:
        for connection, n in ((one, 1), (two, 3)):
            question = {"ids": tokens["ids"], "num_samples": n, "max_new_tokens": 300, "seed": n}
            body = json.dumps(question).encode()
            connection.sendall(client.post_head("/generate", f"Content-Length: {len(body)}") + body)
        streams = [http.client.HTTPResponse(one), http.client.HTTPResponse(two)]
        for stream in streams:
            stream.begin()
        while not all(stream.isclosed() for stream in streams):
            for stream, received in zip(streams, lines, strict=True):
                received.append(stream.readline())
            if len(lines[0]) % 50 == 0:
                assert client.ask(kind="overview", ids=tokens["ids"]) == (200, overview)
    events = [[json.loads(line) for line in received if line] for received in lines]
    assert [texts_of(stream) for stream in events] == expected


def test_stopping_the_server_ends_streams_and_unfinished_requests(run):
    provider = TraceProvider([ViewedModel(str(run), "best", torch.device("cpu"))], "")
    question = b'{"ids": [1], "max_new_tokens": 4096, "num_samples": 16}'
    with socket.socket() as stream, socket.socket() as unfinished:
        with serving(provider) as client:
            for connection, path, body in ((stream, "/generate", question), (unfinished, "/ask", question[1:])):
                connection.connect(("127.0.0.1", client.port))
                connection.sendall(client.post_head(path, f"Content-Length: {len(question)}") + body)
            assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        (engine,) = provider.engines.values.values()
        assert engine.closed and engine.active == 0


# --- access -----------------------------------------------------------------------------------------------------------


def test_requests_of_other_sites_are_refused(client):
    for headers in ({"Origin": "http://example.com"}, {"Host": f"example.com:{client.port}"}):  # DNS rebinding
        for method, path in (("POST", "/ask"), ("POST", "/generate"), ("GET", "/")):
            response = client.request(method, path, '{"kind": "positions"}', **headers)
            assert response.status == 403 and json.loads(response.body)["error"], headers


def test_only_the_page_can_be_fetched(client):
    for path in ("/core.js", "/favicon.ico", "/../README.md", "/%2e%2e/%2e%2e/README.md", "//etc/passwd"):
        response = client.request("GET", path)
        assert response.status == 404 and isinstance(json.loads(response.body)["error"], str)


class BrokenProvider:
    def answer(self, body: Any) -> Answer:
        raise RuntimeError("a secret")

    def close(self) -> None:
        pass


def test_tracebacks_appear_only_in_the_terminal(terminal):
    with serving(BrokenProvider()) as client:
        assert client.ask(kind="models") == (500, {"error": FAILURE})
    printed = terminal.readouterr().err
    assert "RuntimeError: a secret" in printed and "Traceback" in printed


def test_content_security_policy(client):
    """Each script and style is allowed by its hash; there are no inline handlers and no external resources."""
    response = client.request("GET", "/")
    page, policy = response.body.decode(), response.headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    for tag in ("script", "style"):
        contents = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert rules[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests] and digests
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\s(style|src|on\w+)\s*=", markup)
    assert "\r" not in page


def test_the_page_has_no_external_resources():
    assert not re.search(r"<link|<script [^>]*src|@import|//[a-z]+\.(com|org|net)(?!/(2000|1999))", read_page())


def test_the_page_has_the_shared_style_sheet_its_language_and_its_width():
    page, spaces = read_page(), re.compile(r"[\s;]")
    assert spaces.sub("", BASE_STYLE.read_text(encoding="utf-8")) in spaces.sub("", page)
    assert '<html lang="en">' in page and '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_the_page_contains_its_scripts_without_comments():
    """Removing comments is safe if no string in a script spans lines or contains the beginning of a comment."""
    lines, file_scripts = read_page().splitlines(), {*viewer.PAGE.glob("file*.js")}
    for file in {*viewer.PAGE.glob("*.js"), COLORS, viewer.PAGE.parent / "browser" / "sampling.js"} - file_scripts:
        script = file.read_text(encoding="utf-8").splitlines()
        assert all(line.count("`") % 2 == 0 and "/*" not in line for line in script), file.name
        program = [line.split(" // ")[0].strip() for line in script if not re.match(r"\s*(//|$)", line)]
        comments = [line for line in script if " // " in line.strip()]
        assert all(line.split(" // ")[0].count('"') % 2 == 0 for line in comments), file.name
        assert any(lines[i : i + len(program)] == program for i in range(len(lines))), file.name
    assert lines.count("<script>") == lines.count("</script>") == 1
    assert lines[lines.index("<script>") + 1] == '"use strict";'  # for all scripts


def test_the_page_is_small(client):
    response = client.request("GET", "/", accept_encoding="gzip")
    assert response.headers["content-encoding"] == "gzip" and len(response.body) <= 100_000
    assert gzip.decompress(response.body) == client.request("GET", "/").body


# --- fuzzing ----------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**64) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
VALID = {  # other fields may be 0 or 1
    "ids": st.lists(st.integers(0, 24), min_size=2, max_size=16),
    "text": st.text(max_size=10),
    "name": st.sampled_from(["transformer.wte.weight", "transformer.ln_f.weight"]),
    "heads_off": st.sampled_from(["", "0.0", "1.1,0.1,1.1"]),
    "mlps_off": st.sampled_from(["", "0", "1,0,1"]),
    "mask": st.sampled_from(["before", "after", "off"]),
    "scale": st.booleans(),
    "whole": st.booleans(),
    "model": st.just(0),
    "row": st.sampled_from([None, 0]),  # a vector has one row
    "first": st.just(0),  # at most `token`
    "step": st.sampled_from([None, 20]),
    "num_samples": st.integers(1, 3),
    "max_new_tokens": st.integers(1, 5),
    "stop": st.none() | st.text(min_size=1, max_size=2),
    "temperature": st.sampled_from([0, 1e-6, 0.8, 1e6]),
    "top_k": st.none() | st.integers(1, 30),
    "top_p": st.sampled_from([None, 1e-9, 0.5, 1]),
    "min_p": st.sampled_from([None, 1e-9, 0.5, 1]),
    "repetition_penalty": st.sampled_from([1e-6, 1, 1.5, 1e6]),
    "context_stride": st.none() | st.integers(1, 20),
    "batch_size": st.integers(1, 3),
    "on_unknown": st.sampled_from(["error", "skip", "replace"]),
}


@pytest.mark.parametrize("kind", [*sorted({*KINDS} - {"notes"}), "generate"])
@hypothesis.settings(max_examples=30)
@hypothesis.given(data=st.data())
def test_valid_questions_are_answered_and_others_answered_or_refused(client, kind, data):
    path, question = ("/generate", GenerationQuestion) if kind == "generate" else ("/ask", Question)
    names, arbitrary = setting_names(question), ANYTHING | st.sampled_from(["", "..", "0.", -1, 3, 99])
    valid = {**VALID, "kind": st.just(kind)}
    fields = data.draw(st.fixed_dictionaries({name: valid.get(name, st.integers(0, 1)) for name in names}))
    odd = data.draw(st.dictionaries(st.sampled_from(names), arbitrary, max_size=2))
    status, _, body = client.request("POST", path, json.dumps(fields | odd))
    assert status == 200 or (odd and status == 400), body
    if status == 400:
        assert list(json.loads(body)) == ["error"]
    elif path == "/generate":
        assert not any("error" in json.loads(line) for line in body.splitlines())


# --- slow and broken connections --------------------------------------------------------------------------------------


def test_broken_connections_print_nothing(client, terminal):
    """Closing a page during a transfer is not an error, nor are requests of other programs.

    For example, a page of an earlier server on this port may request a WebSocket every second.
    """
    question = b'{"ids": [1], "max_new_tokens": 4096}'
    request = client.post_head("/generate", f"Content-Length: {len(question)}") + question
    for beginning in (client.post_head("/ask", "Content-Length: 100") + b'{"kind": ', request, request[:-1]):
        for resets in (False, True):
            with client.connect() as connection:
                connection.sendall(beginning)
                if resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert client.request("GET", "/", Upgrade="websocket", Connection="Upgrade").status == 200
    with client.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\r\n\r\n")  # TLS
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert terminal.readouterr().err == ""
