import json
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding.language_model import GenerationConfig, LanguageModel, Request
from folio.decoding.scheduler import Completion
from folio.web.api import ServedModel, make_app
from folio.web.completions import Limits
from folio.web.engine import Engine
from tests.support import servers
from tests.support.decoding import random_model
from tests.support.tolerances import logits_error
from tests.support.waiting import wait_until

CONTEXT = 32
ID, FINGERPRINT = "tiny", "fp_0123456789ab"
ALPHABET = "\nabcdefgh é日"
EOT = len(ALPHABET)
FOREVER = {"max_tokens": 10**6, "context_stride": 16, "logit_bias": {str(EOT): -100}}


class Response(servers.Response):
    def error(self) -> dict[str, Any]:
        """Return the error object, after checking that it has OpenAI's format."""
        assert self.headers["content-type"] == "application/json"
        content = self.json()
        assert list(content) == ["error"] and list(content["error"]) == ["message", "type", "param", "code"]
        assert isinstance(content["error"]["message"], str) and content["error"]["message"]
        return content["error"]

    def events(self) -> list[dict]:
        """Return the events of a stream, without [DONE]."""
        assert self.status == 200 and self.headers["content-type"].startswith("text/event-stream")
        assert self.headers["x-accel-buffering"] == "no"
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Client(servers.Client):
    def __init__(self, served: ServedModel, port: int):
        super().__init__(port)
        self.served, self.engine = served, served.engine

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        return Response(*super().request(method, path, body, **headers))

    def complete(self, **body: Any) -> Response:
        return self.request("POST", "/v1/completions", body)

    def texts(self, **body: Any) -> list[str]:
        """Return the texts of the choices of a successful response."""
        response = self.complete(**body)
        assert response.status == 200, response.body
        return [choice["text"] for choice in response.json()["choices"]]

    def connect(self, **body: Any) -> socket.socket:
        """Open a connection and send a request for completions."""
        return servers.open_request(self.port, "/v1/completions", body)


def language_model(tokenizer: Tokenizer) -> LanguageModel:
    model = random_model(3, vocab_size=tokenizer.vocab_size + 3, block_size=CONTEXT)
    return LanguageModel(model, tokenizer, "cpu")


@contextmanager
def serving(
    gpt: LanguageModel,
    rows: int = 32,
    max_waiting: int = 64,
    key: str | None = None,
    origins: frozenset[str] = frozenset(),
    **settings: Any,
) -> Iterator[Client]:
    """Run a server in a thread, on a real socket. settings: fields of ServedModel."""
    served = ServedModel(Engine(gpt, rows, max_waiting), ID, FINGERPRINT, limits=Limits(new_tokens=10**9), **settings)
    with servers.serving_app(lambda hosts: make_app(served, hosts, origins, key)) as port:
        yield Client(served, port)


@pytest.fixture(scope="module")
def gpt() -> LanguageModel:
    return language_model(CharTokenizer(ALPHABET, eot=True))


@pytest.fixture(scope="module")
def client(gpt: LanguageModel) -> Iterator[Client]:
    with serving(gpt) as client:
        yield client
        wait_until(lambda: client.engine.active == 0)


# --- completions ------------------------------------------------------------------------------------------------------


def generate(gpt: LanguageModel, requests: list[Request], config: GenerationConfig) -> list[str]:
    return [text for batch in gpt.batches(requests, config) for text in batch.run()]


def test_choices_equal_the_samples_of_sample_py(client, gpt):
    settings = {"seed": 5, "temperature": 0.9, "top_k": 7, "repetition_penalty": 1.2, "context_stride": 5}
    prompts, n = ["ab", "", "é日a"], 3
    config = GenerationConfig(**settings, max_new_tokens=50)
    requests = [(gpt.encode_prompt(prompt).ids, sample) for prompt in prompts for sample in range(n)]
    expected = generate(gpt, requests, config)
    body = {"prompt": prompts, "n": n, "max_tokens": 50, **settings}
    assert client.texts(**body) == expected
    assert client.texts(**{**body, "prompt": [requests[0][0], [], requests[-1][0]]}) == expected
    choices = client.complete(**body, stop=["b", "日"]).json()["choices"]
    for index, (choice, text) in enumerate(zip(choices, expected, strict=True)):
        ends = [text.index(stop) for stop in "b日" if stop in text]
        assert choice["index"] == index and choice["text"] == text[: min(ends, default=None)]
        assert ends == [] or choice["finish_reason"] == "stop"
    assert len({client.texts(prompt="a")[0] for _ in range(8)}) > 1  # without a seed


def test_the_end_of_text_ends_a_completion(client):
    response = client.complete(prompt="ab", model=ID, logit_bias={str(EOT): 100}).json()
    assert response["model"] == ID
    assert response["system_fingerprint"] == FINGERPRINT
    (choice,) = response["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "stop"


def test_log_probabilities_are_the_models_own(client, gpt):
    """Before temperature and filters."""
    ids = gpt.encode_prompt("ab日é a").ids
    settings = {"max_tokens": 5, "temperature": 0.3, "top_k": 2, "seed": 3, "logit_bias": {str(EOT): -100, "1": 5}}
    (choice,) = client.complete(prompt=ids, logprobs=3, **settings).json()["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 5 and "".join(logprobs["tokens"]) == choice["text"]
    text_ids = ids + gpt.encode_prompt(choice["text"]).ids
    with torch.no_grad():
        logits = gpt.model.logits(torch.tensor([text_ids]))[0]
    expected = logits.log_softmax(dim=-1)[:, : gpt.tokenizer.vocab_size]
    error = 2 * logits_error(gpt.model.config, len(text_ids)) * logits.abs().max().item()  # of a logit, and of the sum
    tokens = zip(text_ids[len(ids) :], expected[len(ids) - 1 : -1], strict=True)
    scores = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for (token, row), (logprob, top) in zip(tokens, scores, strict=True):
        assert logprob == pytest.approx(row[token].item(), rel=0, abs=error)
        assert top[gpt.tokenizer.decode([token])] == logprob and 3 <= len(top) <= 4
        assert (logprob == max(top.values())) == (row.argmax().item() == token)


def test_completions_do_not_depend_on_concurrent_requests(gpt, seed):
    """Also while some wait for a row."""

    def ask(number: int) -> tuple[list[str], list[str]]:
        rng = random.Random(seed + number)
        settings = {"seed": number, "temperature": rng.choice([0, 0.7, 1.3]), "context_stride": 9}
        prompt = "".join(rng.choices("abcd", k=rng.randint(1, 20)))
        body = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "n": 2, **settings}
        config = GenerationConfig(**settings, max_new_tokens=body["max_tokens"], top_k=None)
        ids = gpt.encode_prompt(prompt).ids
        if rng.random() < 0.5:
            texts = ["", ""]
            for event in client.complete(**body, stream=True).events():
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            texts = client.texts(**body)
        return texts, generate(gpt, [(ids, 0), (ids, 1)], config)

    with serving(gpt, rows=4) as client, ThreadPoolExecutor(20) as pool:
        for texts, expected in pool.map(ask, range(40)):
            assert texts == expected


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, path, body, status, code",
    [
        ("GET", "/", None, 404, None),
        ("GET", "/v1/completions", None, 405, None),
        ("GET", "/v1/models/a/b%2f..", None, 404, "model_not_found"),
        ("POST", "/v1/completions", '{"model": "other"}', 404, "model_not_found"),
        ("POST", "/v1/completions", '{"model": 5}', 400, None),
        ("POST", "/v1/completions", "[]", 400, None),
        ("POST", "/v1/completions", '{"max_tokens": 100}', 400, "context_length_exceeded"),
        ("POST", "/v1/chat/completions", '{"messages": []}', 404, "chat_not_supported"),
    ],
)
def test_errors_have_openais_format(client, method, path, body, status, code):
    response = client.request(method, path, body)
    assert response.status == status and response.error()["code"] == code


def test_allowed_origins(gpt):
    origin = "https://allowed.example"
    with serving(gpt, key="secret", origins=frozenset({origin})) as client:
        asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-stainless"}
        preflight = client.request("OPTIONS", "/v1/completions", origin=origin, **asked)
        assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == origin
        assert "x-stainless" in preflight.headers["access-control-allow-headers"]
        for key, status in (("secret", 200), ("other", 401)):
            response = client.request(
                "POST", "/v1/completions", {"prompt": "a"}, origin=origin, authorization=f"Bearer {key}"
            )
            assert response.status == status and response.headers["access-control-allow-origin"] == origin
            assert response.headers["access-control-allow-credentials"] is None
        assert client.request("GET", "/health", origin=f"{origin}.example.com").status == 403


def test_the_key_is_required_except_for_health(gpt):
    with serving(gpt, key="sécret") as client:
        right = "Bearer sécret".encode().decode("latin-1")
        paths = ["/v1/models", f"/v1/models/{ID}", "/nothing", "/health/", "//health"]
        wrong = ["Bearer ", right + "x", "sécret", right.replace("Bearer", "Basic")]
        for headers in ({}, *({"authorization": value} for value in wrong)):
            for path in paths:
                response = client.request("GET", path, **headers)
                assert response.status == 401 and response.error()["code"] == "invalid_api_key"
            assert client.request("POST", "/v1/completions", "{", **headers).status == 401
            assert client.request("GET", "/health", **headers).status == 200
        assert [client.request("GET", path, authorization=right).status for path in paths] == [200, 200, 404, 404, 404]
        assert client.request("GET", "/v1/models", authorization=right.replace("Bearer", "bearer")).status == 200


def test_requests_beyond_the_queue_are_refused(gpt):
    with serving(gpt, rows=1, max_waiting=1) as client, ExitStack() as stack:
        stack.enter_context(client.connect(prompt="a", n=2, **FOREVER))
        wait_until(lambda: client.engine.active == 1)
        stack.enter_context(client.connect(prompt="a", **FOREVER))
        wait_until(lambda: client.engine.waiting == 1)
        for stream in (False, True):
            response = client.complete(prompt="a", stream=stream)
            assert response.status == 429 and response.headers["retry-after"] == "1"
            error = response.error()
            assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
    assert not client.served.responses.open


def test_a_timeout_ends_the_response_with_an_error(gpt):
    with serving(gpt, timeout=0.3) as client:
        response = client.complete(prompt="a", **FOREVER)
        assert response.status == 503 and response.headers["x-should-retry"] == "false"
        assert response.error()["code"] == "timeout"
        *texts, last = client.complete(prompt="a", stream=True, **FOREVER).events()
        assert texts and last["error"]["code"] == "timeout" and not any("error" in event for event in texts)
        wait_until(lambda: client.engine.active == 0)
        assert client.texts(prompt="a", max_tokens=1)


def test_nan_is_a_server_error():
    gpt = language_model(ByteTokenizer())
    gpt.model.transformer.ln_f.weight.data[:] = torch.nan
    with serving(LanguageModel(gpt.model, gpt.tokenizer, "cpu")) as client:
        for stream in (False, True):
            response = client.complete(prompt="a", stream=stream)
            assert response.status == 500 and "NaN" in response.error()["message"]
            assert response.headers["x-should-retry"] == "false"


# --- clients that disconnect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_disconnect_frees_the_rows(client, monkeypatch, stream, resets, terminal):
    submitted: list[Completion] = []
    submit = client.engine.submit
    monkeypatch.setattr(client.engine, "submit", lambda each: (submitted.extend(each), submit(each)))
    connections = [client.connect(prompt=["a", "b"], n=2, stream=stream, **FOREVER) for _ in range(4)]
    wait_until(lambda: len(submitted) == 16 and all(completion.tokens for completion in submitted))
    for connection in connections:
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    wait_until(lambda: client.engine.active == 0)
    assert {completion.finish_reason for completion in submitted} == {"cancelled"}
    wait_until(lambda: not client.served.responses.open)
    assert client.texts(prompt="a", max_tokens=1) and terminal.readouterr().err == ""


def test_a_disconnect_while_waiting_frees_the_queue(gpt):
    with serving(gpt, rows=1) as client, client.connect(prompt="a", **FOREVER):
        wait_until(lambda: client.engine.active == 1)
        for stream in (False, True):
            client.connect(prompt="a", stream=stream, **FOREVER).close()
        wait_until(lambda: len(client.served.responses.open) == 1)
        wait_until(lambda: client.engine.waiting == 0)


def test_the_server_stops_during_requests(gpt):
    with ExitStack() as connections, serving(gpt) as client:
        for stream in (False, True):
            connections.enter_context(client.connect(prompt="a", stream=stream, **FOREVER))
        wait_until(lambda: client.engine.active == 2)
    assert client.engine.closed


# --- other routes -----------------------------------------------------------------------------------------------------


def test_the_model_is_listed(client):
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert model["id"] == ID
    assert model["object"] == "model"
    assert model["max_model_len"] == CONTEXT
    assert client.request("GET", f"/v1/models/{ID}").json() == model
    wait_until(lambda: client.engine.active == 0)
    assert client.request("GET", "/health").json() == {"status": "ok", "rows": 32, "active": 0, "waiting": 0}


def test_chat_completions():
    gpt = LanguageModel(random_model(3, vocab_size=ByteTokenizer.vocab_size, block_size=64), ByteTokenizer(), "cpu")
    gpt.prompt_format = "chat"
    with serving(gpt) as client:
        settings = {"seed": 2, "top_k": 5, "temperature": 0.9}
        text = gpt.generate("User: ab\n\nAssistant:", stop="\nUser:", max_new_tokens=None, **settings)
        expected = text.removeprefix(" ")
        body = {"model": ID, "messages": [{"role": "user", "content": "ab"}], **settings}
        answer = client.request("POST", "/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] == expected and answer["object"] == "chat.completion"
        first, *others = client.request("POST", "/v1/chat/completions", {**body, "stream": True}).events()
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in others) == expected
        assert others[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
        response = client.request("POST", "/v1/chat/completions", {"messages": []})
        assert response.status == 400 and response.error()["param"] == "messages"


# --- fuzzing ----------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**64, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def is_json(value: Any) -> bool:
    """Whether JSON can express a value, which has no infinity and no NaN."""
    try:
        return bool(json.dumps(value, allow_nan=False))
    except ValueError:
        return False


TEXT = st.text("ab é日", max_size=8)
IDS = st.lists(st.integers(0, 12), max_size=5)
VALID = {
    "prompt": TEXT | IDS.filter(bool) | st.lists(TEXT, min_size=1, max_size=3) | st.lists(IDS, min_size=1, max_size=3),
    "model": st.sampled_from([ID, None]),
    "max_tokens": st.integers(1, 12),
    "n": st.integers(1, 3),
    "stop": st.none() | st.text("ab", min_size=1, max_size=2) | st.lists(st.text("ab", min_size=1), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.none() | st.just({"include_usage": True}),
    "logprobs": st.none() | st.integers(0, 20),
    "temperature": st.sampled_from([0, 1e-6, 0.8, 1e6]),
    "top_p": st.sampled_from([1e-9, 0.5, 1]),
    "top_k": st.none() | st.integers(1, 30),
    "min_p": st.none() | st.sampled_from([1e-9, 0.5, 1]),
    "repetition_penalty": st.sampled_from([1e-6, 1, 1.5, 1e6]),
    "presence_penalty": st.sampled_from([-2, 0, 0.5]),
    "frequency_penalty": st.sampled_from([-2, 0, 0.5]),
    "logit_bias": st.dictionaries(st.integers(0, 12).map(str), st.integers(-100, 100), max_size=3),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "context_stride": st.none() | st.integers(1, 20),
    "user": ANYTHING.filter(is_json),
}


ODD = ANYTHING | st.sampled_from(["", -1, 3, 99, [[]], [""]])
REQUESTS = st.fixed_dictionaries({}, optional=VALID)
FEW = hypothesis.settings(max_examples=60)


@FEW
@hypothesis.given(REQUESTS, st.dictionaries(st.sampled_from([*VALID, "suffix", "best_of"]), ODD, max_size=2))
def test_valid_requests_are_answered_and_others_refused(client, valid, odd):
    response = client.complete(**valid | odd)
    if response.status != 200:
        assert odd and response.status in (400, 404) and response.error()
    elif response.headers["content-type"] == "application/json":
        assert {choice["finish_reason"] for choice in response.json()["choices"]} <= {"stop", "length"}
    else:
        assert not any("error" in event for event in response.events())


@st.composite
def damaged_bodies(draw: st.DrawFn) -> bytes:
    """Mostly invalid JSON: random bytes, deep nesting, or a truncated, modified, or re-encoded request."""
    text = json.dumps(draw(REQUESTS), ensure_ascii=False)
    body = text.encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(body)))
    encoding = draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"]))
    nested = draw(st.sampled_from([b"[", b'{"a":', b'{"prompt":['])) * 10_000
    changed = body[:at] + draw(st.binary(max_size=3)) + body[at + 1 :]
    others = [st.binary(max_size=100), st.just(text.encode(encoding, "replace")), st.just(b'{"prompt": ' + nested)]
    return draw(st.one_of(*others, st.sampled_from([nested, body[:at], changed])))


@FEW
@hypothesis.given(damaged_bodies())
def test_arbitrary_bodies_do_not_cause_server_errors(client, body):
    response = client.request("POST", "/v1/completions", body)
    assert response.status == 200 or (response.status in (400, 404) and response.error())


PATHS = st.text(st.characters(min_codepoint=33, max_codepoint=126)) | st.sampled_from(["v1/models/%", "%ff", "..", "*"])


@FEW
@hypothesis.given(st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]), PATHS)
def test_arbitrary_paths_do_not_cause_server_errors(client, method, path):
    response = client.request(method, f"/{path}")
    assert response.status in (200, 400, 404, 405)
    if response.status != 200 and method != "HEAD":
        assert response.error()
