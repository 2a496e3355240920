import hashlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from folio import UserError
from folio.base import settings
from folio.data.tokenizer import ByteTokenizer
from folio.decoding.language_model import LanguageModel
from tests.support import processes
from tests.support.servers import Client, open_request, serving_tool, start_server
from tests.support.viewed_models import save_random_run
from tools import serve
from tools.serve import ServeConfig

SEED = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a byte-level model."""
    save_random_run(tmp_path / "the-run", ByteTokenizer(), SEED, block_size=64)
    return tmp_path / "the-run"


@contextmanager
def serving(*arguments: object) -> Iterator[int]:
    """Run the tool in a thread, and yield the port."""
    words = [*map(str, arguments), "--port=0", "--device=cpu", "--rows=2"]
    with serving_tool(serve, settings.load(ServeConfig, words)) as (_, port):
        yield port


def ask(port: int, method: str, path: str, body: dict | None = None, **headers: str) -> tuple[int, dict]:
    response = Client(port).request(method, path, body, **headers)
    return response.status, response.json()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"models: .*python tools/serve\.py"),
        (["a", "b"], "models=a b: name one"),
        (["a", "--host=192.168.1.2"], r"host=192\.168\.1\.2: .*set a key: FOLIO_KEY"),
        (["a", "--host=::", "--key=b"], r"host=::: .*--allowed_hosts=gpu\.example\.org,192\."),
        (["a", "--key=b "], "key=b : .*ASCII"),
        (["a", "--allowed_hosts=http://b"], "allowed_hosts=http://b: .*without http://"),
        (["a", "--allowed_origins=https://b.c/"], r"allowed_origins=https://b\.c/: .*write https://"),
        (["no-such-run"], "^no-such-run "),
    ],
)
def test_bad_arguments_are_an_error_in_one_line(monkeypatch, arguments, message):
    monkeypatch.delenv(serve.KEY, raising=False)
    with pytest.raises(UserError, match=message) as error:
        serve.main(settings.load(ServeConfig, arguments))
    assert "\n" not in str(error.value)


def test_a_run_is_served_under_its_folder_name(capsys, run):
    manifest = (run / "step-000020" / "manifest.json").read_bytes()
    gpt = LanguageModel.load(run)
    for name in (run, run / "step-000020"):
        with serving(name) as port:
            _, models = ask(port, "GET", "/v1/models")
            assert [model["id"] for model in models["data"]] == ["the-run"]
            settings = {"seed": 2, "temperature": 0.9}
            _, answer = ask(port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 20, **settings})
        assert answer["choices"][0]["text"] == gpt.generate("a", max_new_tokens=20, top_k=None, **settings)
        assert answer["system_fingerprint"] == f"fp_{hashlib.sha256(manifest).hexdigest()[:12]}"
        address, command = capsys.readouterr().out.splitlines()
        assert address == f"http://127.0.0.1:{port}/v1  serves the-run, 2 texts at a time (Ctrl-C stops)"
        words = shlex.split(command)
        assert words[:2] == ["curl", f"http://127.0.0.1:{port}/v1/completions"] and "prompt" in json.loads(words[-1])


def test_the_printed_example_matches_the_model(capsys):
    for prompt_format, path, field in ((None, "completions", "prompt"), ("chat", "chat/completions", "messages")):
        gpt = SimpleNamespace(prompt_format=prompt_format)
        served = SimpleNamespace(model_id="out", gpt=gpt, engine=SimpleNamespace(rows=1))
        serve.print_address(ServeConfig(), served, 80)
        address, command = capsys.readouterr().out.splitlines()
        assert address == "http://127.0.0.1:80/v1  serves out, one text at a time (Ctrl-C stops)"
        words = shlex.split(command)
        assert words[1] == f"http://127.0.0.1:80/v1/{path}" and field in json.loads(words[-1])


def test_the_limits_are_settings(run):
    with serving(run, "--max_choices=2", "--max_new_tokens=9", "--max_prompt_tokens=5") as port:
        request = {"prompt": "ab", "n": 2, "max_tokens": 4}
        assert ask(port, "POST", "/v1/completions", request)[0] == 200
        for change in ({"n": 3, "max_tokens": 1}, {"max_tokens": 5}, {"prompt": "abcdef"}):
            status, answer = ask(port, "POST", "/v1/completions", request | change)
            assert status == 400 and answer["error"]["param"] == next(iter(change))


def test_requests_to_a_public_address_need_a_key_and_an_allowed_host(monkeypatch, capsys, run):
    monkeypatch.setenv(serve.KEY, "secret")
    with serving(run, "--host=0.0.0.0", "--allowed_hosts=gpu.example.org,Other.example.org") as port:
        key = {"authorization": "Bearer secret"}
        names = ["gpu.example.org", f"gpu.example.org:{port}", f"other.example.org:{port}", f"localhost:{port}"]
        for host in names:
            assert ask(port, "GET", "/v1/models", host=host, **key)[0] == 200
            assert ask(port, "GET", "/v1/models", host=host)[0] == 401
        for host in (f"0.0.0.0:{port}", "example.org", "gpu.example.org:1", "localhost"):
            assert ask(port, "GET", "/v1/models", host=host, **key)[0] == 403
    address, command = capsys.readouterr().out.splitlines()
    assert address.startswith(f"http://gpu.example.org:{port}/v1 ")
    assert "Authorization: Bearer $FOLIO_KEY" in command and "secret" not in address + command


def test_the_fingerprint_of_other_programs_files(tmp_path):
    class Loaded:
        path = tmp_path / "model.gguf"

    Loaded.path.write_bytes(b"1")
    first = serve.fingerprint(Loaded)
    assert re.fullmatch("fp_[0-9a-f]{12}", first) and serve.fingerprint(Loaded) == first
    assert serve.model_id("folder/model.gguf", Loaded) == "model.gguf" and serve.model_id("gpt2", Loaded) == "gpt2"
    Loaded.path.write_bytes(b"12")
    second = serve.fingerprint(Loaded)
    (tmp_path / "config.json").touch()
    Loaded.path = tmp_path
    assert len({first, second, serve.fingerprint(Loaded)}) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals for other processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_server_while_requests_are_open(run, tmp_path, number):
    words = [serve.__file__, run, "--port=0", "--device=cpu", "--max_new_tokens=9999999"]
    process, port = start_server(words, tmp_path)
    body = {"prompt": "a", "max_tokens": 10**6, "context_stride": 9, "logit_bias": {"256": -100}}
    path, streamed = "/v1/completions", body | {"stream": True}
    with open_request(port, path, body), open_request(port, path, streamed) as stream:
        assert stream.recv(4096).startswith(b"HTTP/1.1 200 ")
        os.kill(process.pid, number)
        assert processes.wait(process, timeout=60) == 128 + number
    assert (tmp_path / "errors").read_text() == f"stopped by {number.name}\n"
    assert len((tmp_path / "printed").read_text().splitlines()) == 2
