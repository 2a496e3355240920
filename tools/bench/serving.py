"""Measure tools/serve.py: load, memory, clients that leave, wrong requests, and its speed against llama.cpp.

    python tools/bench/serving.py out-shakespeare-char                            all but llama.cpp
    python tools/bench/serving.py out-shakespeare-char --what=load --clients=1,50,200
    python tools/bench/serving.py --what=llama --llama=../llama --repeats=1

load: clients that stream at the same time, against the batch sampler at the same batch, alternating. memory: of the
server, over thousands of requests. kill: clients whose connections end at random moments, and how long their rows stay
taken. fuzz: wrong bodies, paths, and headers, and slow senders. llama: a model of GPT-2's 124M shape with random
weights, against llama.cpp (npm install --prefix FOLDER node-llama-cpp) on the same weights, alternating; llama.cpp's
batches are measured inside of its process, without a server.

The clients are one process that shares the cores with the server. Measure on a quiet machine.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import NonNegativeInt, PositiveInt, comma_separated, run_script  # noqa: E402
from folio.base.workers import child_options  # noqa: E402
from folio.data.tokenizer import CharTokenizer  # noqa: E402
from folio.decoding.language_model import GenerationConfig, LanguageModel  # noqa: E402
from folio.decoding.text_stream import TextStream  # noqa: E402
from tools.bench.baselines import run_llama, write_llama_model  # noqa: E402
from tools.bench.timing import BenchConfig, busy_processes, describe_device, not_integers, unknown_names  # noqa: E402
from tools.bench.viewer import write_run  # noqa: E402

PARTS = ("load", "memory", "kill", "fuzz", "llama")
LLAMA_SHAPE = dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768)  # GPT-2 124M
LLAMA_DTYPES = {"bfloat16": "F16", "int8": "Q8_0"}  # ours, and the matrices of llama.cpp of the same size
LLAMA_PROMPT = 16  # tokens
SAMPLING = {"temperature": 0.8, "top_k": 200}  # of every generated text
MEMORY_TOKENS = 20  # per request
MEMORY_CLIENTS = 50  # at a time
MEMORY_INTERVAL = 500  # requests between two measurements
WAVE = 50  # clients that are killed together
KILLED_TOKENS = 1000  # that they ask for
POLL = 0.01  # seconds between two looks at the rows
HANG = 30.0  # seconds after which an answer is given up
SLOW_SENDERS = 20
MB = 1_000_000


@dataclass(frozen=True)
class ServeBenchConfig(BenchConfig):
    # --- what is measured ---
    run: tuple[str, ...] = ()  # a run, a checkpoint, or what --init_from takes
    what: str = "load,memory,kill,fuzz"  # separated by commas; llama is one more
    clients: str = "200"  # of load, all at a time; several numbers are separated by commas
    tokens: PositiveInt = 100  # of load per client, and of llama; fewer if the context holds fewer
    requests: PositiveInt = 10_000  # of memory
    killed: PositiveInt = 500  # clients of kill
    bodies: PositiveInt = 10_000  # of fuzz
    paths: PositiveInt = 200  # of fuzz
    seed: NonNegativeInt = 1337  # of prompts, moments, and wrong requests
    llama: str | None = None  # folder of an installation of node-llama-cpp
    llama_clients: str = "1,8,32"  # at a time, separated by commas
    llama_threads: str = "1,2"  # numbers of threads that llama.cpp is measured with, separated by commas

    def problems(self) -> list[tuple[str, str]]:
        """The parts are known, and what they need is there."""
        problems = [
            *super().problems(),
            *unknown_names("what", self.what, PARTS),
            *not_integers("clients", self.clients, at_least=1),
            *not_integers("llama_clients", self.llama_clients, at_least=1),
            *not_integers("llama_threads", self.llama_threads, at_least=1),
        ]
        parts = comma_separated(self.what)
        if len(self.run) != 1 and parts != ["llama"]:
            problems.append(("run", "name one, as in python tools/bench/serving.py out-shakespeare-char"))
        if "llama" in parts and self.llama is None:
            problems.append(("what", "llama needs --llama=FOLDER, where node-llama-cpp is installed"))
        return problems


def main(cfg: ServeBenchConfig) -> None:
    print(f"{describe_device(cfg.device)}\n")
    measures = {"load": bench_load, "memory": bench_memory, "kill": bench_kill, "fuzz": bench_fuzz}
    parts = comma_separated(cfg.what)
    with busy_processes(cfg.busy):
        if wanted := [part for part in parts if part in measures]:
            with serving(cfg.run[0], cfg.device, "float32") as server:
                for part in wanted:
                    measures[part](cfg, server)
        if "llama" in parts:
            bench_llama(cfg)


# --- the server -------------------------------------------------------------------------------------------------------


class ApiServer(NamedTuple):
    """A running tools/serve.py."""

    process: psutil.Process
    host: str
    port: int
    model: str  # its id
    block_size: int


@contextmanager
def serving(run: str | Path, device: str, dtype: str) -> Iterator[ApiServer]:
    """tools/serve.py in a process of its own, on a free port. Raises UserError."""
    options = ["--port=0", f"--device={device}", f"--dtype={dtype}"]
    words = [sys.executable, str(ROOT / "tools" / "serve.py"), str(run), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, encoding="utf-8", **child_options())
    try:
        address = next((word for line in process.stdout for word in line.split() if word.startswith("http://")), None)
        if address is None:
            raise UserError("tools/serve.py did not start; its output is above")
        host, port = address.removeprefix("http://").split("/")[0].split(":")
        server = ApiServer(psutil.Process(process.pid), host, int(port), "", 0)
        (model,) = asyncio.run(send(server, "GET", "/v1/models")).json()["data"]
        yield server._replace(model=model["id"], block_size=model["max_model_len"])
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


# --- a client that costs little ---------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a server sent before it closed the connection. Nothing is parsed while others are measured."""

    parts: list[tuple[float, bytes]]  # the seconds until they arrived, since the request began

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def raw(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    @property
    def status(self) -> int:
        """0: the server closed the connection without an answer."""
        words = self.raw[:100].split(maxsplit=2)
        return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0

    @property
    def body(self) -> bytes:
        return unchunk(self.raw)

    def json(self) -> Any:
        """Raises ValueError, also for NaN and infinity."""
        return json.loads(self.body, parse_constant=int)  # which refuses them

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream that ended as it should. Raises ValueError for others."""
        *events, end, rest = self.body.split(b"\n\n")
        if (end, rest) != (b"data: [DONE]", b""):
            raise ValueError("the stream ended early")
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def text(self) -> str:
        """Of the first choice."""
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])

    def first_text(self) -> float:
        """Seconds until the first text of a stream."""
        raw = b""
        for seconds, part in self.parts:
            raw += part
            events = unchunk(raw).split(b"\n\n")[:-1]
            if any(choice["text"] for event in events for choice in json.loads(event[6:])["choices"]):
                return seconds
        raise ValueError("the stream has no text")


def unchunk(raw: bytes) -> bytes:
    """The body of a response as far as it has arrived, without the framing of chunks."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size or b"0", 16)
        body, rest = body + rest[:count], rest[count + 2 :]
    return body


def request_bytes(server: ApiServer, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request of one connection. headers: others, or other values, with "_" for "-"; an empty one is left out."""
    given = {"host": f"{server.host}:{server.port}", "connection": "close", "content-length": str(len(body))}
    if method == "POST":
        given["content-type"] = "application/json"
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


async def exchange(server: ApiServer, content: bytes) -> Answer:
    """Send the bytes of a request, and read until the server closes the connection."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    parts = []
    try:
        with suppress(ConnectionError):  # a server that refuses a request need not read all of it
            writer.write(content)
            await writer.drain()
        with suppress(ConnectionError):
            while part := await reader.read(2**16):
                parts.append((time.perf_counter() - began, part))
    finally:
        writer.transport.abort()
    return Answer(parts)


async def send(server: ApiServer, method: str, path: str, fields: dict[str, Any] | None = None) -> Answer:
    """Send a request with a body of JSON, if any."""
    body = b"" if fields is None else json.dumps(fields).encode()
    return await exchange(server, request_bytes(server, method, path, body))


async def complete(server: ApiServer, **fields: Any) -> Answer:
    return await send(server, "POST", "/v1/completions", {"model": server.model, **SAMPLING, **fields})


async def at_a_time(count: int, tasks: Iterable[Awaitable]) -> None:
    """Await all tasks, so many at a time."""
    waiting = iter(tasks)

    async def work() -> None:
        for task in waiting:
            await task

    await asyncio.gather(*(work() for _ in range(count)))


# --- load -------------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What the clients of one round saw."""

    answers: list[Answer]
    seconds: float  # until the last one had everything

    @property
    def complete(self) -> list[Answer]:
        return [answer for answer in self.answers if judge(answer) == "answered"]

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return sum(answer.events()[-1]["usage"]["completion_tokens"] for answer in self.complete) / self.seconds

    @property
    def first_texts(self) -> list[float]:
        """Seconds, in increasing order."""
        return sorted(answer.first_text() for answer in self.complete)


def bench_load(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Clients that stream at the same time: errors, texts, time to the first one, and throughput."""
    gpt = LanguageModel.load(cfg.run[0], device=cfg.device, dtype="float32")
    for clients in map(int, comma_separated(cfg.clients)):
        measure_load(cfg, server, gpt, clients)


def measure_load(cfg: ServeBenchConfig, server: ApiServer, gpt: LanguageModel, clients: int) -> None:
    """Measure so many clients against a batch of as many rows, and print the table."""
    tokens = min(cfg.tokens, server.block_size - 1)
    config = GenerationConfig(max_new_tokens=tokens, **SAMPLING)
    prompts = sample_prompts(gpt, clients * (1 + cfg.repeats), server.block_size - tokens, cfg.seed)
    requests = [dict(prompt=prompt, max_tokens=tokens, seed=seed) for seed, prompt in enumerate(prompts)]
    loads, theirs = [], []
    for first in range(0, len(prompts), clients):  # the first round warms up; the rounds have different prompts
        loads.append(asyncio.run(run_load(server, requests[first : first + clients])))
        began = time.perf_counter()
        generated = generate_batch(gpt, prompts[first : first + clients], config)
        theirs.append(generated / (time.perf_counter() - began))
    answers = [answer for load in loads for answer in load.answers]
    errors = len(answers) - sum(len(load.complete) for load in loads)
    alone = (generate_alone(gpt, prompt, seed, config) for seed, prompt in enumerate(prompts))
    pairs = zip(answers, alone, strict=True)
    different = sum(text != answer.text() for answer, text in pairs if judge(answer) == "answered")
    loads, theirs = loads[1:], theirs[1:]
    medians = statistics.median(statistics.median(load.first_texts) for load in loads)
    latest = statistics.median(percentile_99(load.first_texts) for load in loads)
    ours = [load.speed for load in loads]
    rows = [
        ("errors", f"{errors} of {len(answers):,}", "0"),
        ("texts that differ from those of their seed alone", f"{different} of {len(answers):,}", "0"),
        ("first text, median", f"{1000 * medians:,.0f} ms", ""),
        ("first text, 99th percentile", f"{1000 * latest:,.0f} ms", "1,000 ms"),
        ("throughput", f"{statistics.median(ours):,.0f} tokens/s", ""),
        ("batch sampler", f"{statistics.median(theirs):,.0f} tokens/s", ""),
        ("ratio", format_ratios(ours, theirs), "at least 0.70"),
    ]
    print_table(f"{clients} streaming clients x {tokens} tokens, medians of {cfg.repeats}", rows)


def sample_prompts(gpt: LanguageModel, count: int, longest: int, seed: int) -> list[str]:
    """Prompts of different lengths, from 1 token to `longest`, which begin differently: parts of a generated text."""
    rng = random.Random(seed)
    config = GenerationConfig(max_new_tokens=4 * longest, seed=seed, **SAMPLING)
    text = generate_alone(gpt, "", seed, config)
    prompts = []
    for k in range(count):
        start = rng.randrange(max(1, len(text) - longest))
        prompt = text[start : start + 1 + k * (longest - 1) // count]
        while len(gpt.encode_prompt(prompt, "skip").ids) > longest:
            prompt = prompt[:-1]
        prompts.append(prompt)
    rng.shuffle(prompts)
    return prompts


def generate_alone(gpt: LanguageModel, prompt: str, seed: int, config: GenerationConfig) -> str:
    (text,) = gpt.complete([(gpt.encode_prompt(prompt).ids, 0)], 1, config.replace(seed=seed))
    return text


def generate_batch(gpt: LanguageModel, prompts: list[str], config: GenerationConfig) -> int:
    """Continue all prompts at a time, as LanguageModel.complete does. Returns how many tokens that are."""
    texts, count = [TextStream(gpt.tokenizer) for _ in prompts], 0
    ids = [gpt.encode_prompt(prompt).ids for prompt in prompts]
    for step in gpt.steps(ids, range(len(prompts)), config):
        for text, token in zip(texts, step.tokens, strict=True):
            text.push(token)
            count += token is not None
    return count


async def run_load(server: ApiServer, requests: list[dict[str, Any]]) -> Load:
    """Send all requests at the same time."""
    streaming = dict(stream=True, stream_options={"include_usage": True})
    began = time.perf_counter()
    answers = await asyncio.gather(*(complete(server, **request, **streaming) for request in requests))
    return Load(answers, time.perf_counter() - began)


def percentile_99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def format_ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the ratios of measurements that were made one after the other, and their range."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


# --- memory -----------------------------------------------------------------------------------------------------------


def bench_memory(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """The server's memory while it answers, half of the requests streaming."""
    sizes, errors, seconds = asyncio.run(watch_memory(server, cfg.requests))
    rows = [
        (f"after {(k + 1) * MEMORY_INTERVAL:,} requests", f"{size / MB:,.1f} MB", "") for k, size in enumerate(sizes)
    ]
    rows += [
        ("largest difference", f"{(max(sizes) - min(sizes)) / MB:,.1f} MB", "100 MB (± 50 MB)"),
        ("errors", f"{errors}", "0"),
        ("requests per second", f"{cfg.requests / seconds:,.0f}", ""),
    ]
    print_table(f"memory, {cfg.requests:,} requests of {MEMORY_TOKENS} tokens, {MEMORY_CLIENTS} at a time", rows)


async def watch_memory(server: ApiServer, requests: int) -> tuple[list[int], int, float]:
    """The server's resident bytes after every MEMORY_INTERVAL requests, how many had an error, and all seconds."""
    sizes: list[int] = []
    finished = errors = 0

    async def ask(k: int) -> None:
        nonlocal finished, errors
        answer = await complete(server, prompt="\n", max_tokens=MEMORY_TOKENS, seed=k, stream=k % 2 == 0)
        errors += answer.status != 200
        finished += 1
        if finished % MEMORY_INTERVAL == 0:
            sizes.append(server.process.memory_info().rss)

    began = time.perf_counter()
    await at_a_time(MEMORY_CLIENTS, map(ask, range(requests)))
    return sizes or [server.process.memory_info().rss], errors, time.perf_counter() - began


# --- clients that leave -----------------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """How many completions the server works on, at a moment."""

    at: float
    rows: int  # that generate
    waiting: int


def bench_kill(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Clients that close their connection at random moments, half of them not streaming."""
    rng = random.Random(cfg.seed)
    delays, left = [], []
    for first in range(0, cfg.killed, WAVE):
        delay, usage = asyncio.run(kill_clients(server, min(WAVE, cfg.killed - first), rng))
        delays.append(delay)
        left.append(usage.rows + usage.waiting)
    rows = [
        ("longest time until a row was free, median of the waves", f"{1000 * statistics.median(delays):,.0f} ms", ""),
        ("longest time until a row was free", f"{1000 * max(delays):,.0f} ms", "200 ms"),
        ("rows left after that", f"{sum(left)}", "0"),
    ]
    print_table(f"{cfg.killed} clients that leave, {WAVE} at a time", rows)


async def kill_clients(server: ApiServer, count: int, rng: random.Random) -> tuple[float, Usage]:
    """The longest time for which more completions were worked on than there were clients, and the last usage."""
    changes = [(time.perf_counter(), 0)]  # when a client came or left, and how many there were from then on

    def change(by: int) -> None:
        changes.append((time.perf_counter(), changes[-1][1] + by))

    async def leave_early(k: int) -> None:
        fields = dict(model=server.model, prompt="\n", max_tokens=KILLED_TOKENS, seed=k, stream=k % 2 == 0, **SAMPLING)
        fields["context_stride"] = max(1, server.block_size // 2)
        await asyncio.sleep(0.3 * rng.random())
        change(1)
        try:
            _, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(request_bytes(server, "POST", "/v1/completions", json.dumps(fields).encode()))
            await asyncio.sleep(rng.random())
            writer.transport.abort()
        finally:
            change(-1)

    delay, clients = 0.0, [asyncio.create_task(leave_early(k)) for k in range(count)]
    while True:
        all_left = all(client.done() for client in clients)
        usage = await read_usage(server)
        delay = max(delay, overdue(usage, changes))
        if all_left and (usage.rows + usage.waiting == 0 or usage.at - changes[-1][0] > HANG):
            await asyncio.gather(*clients)  # raises what they raised
            return delay, usage
        await asyncio.sleep(POLL)


def overdue(usage: Usage, changes: list[tuple[float, int]]) -> float:
    """For how many seconds there have been fewer clients than completions."""
    since = usage.at
    for at, clients in reversed(changes):
        if clients >= usage.rows + usage.waiting:
            break
        since = at
    return usage.at - since


async def read_usage(server: ApiServer) -> Usage:
    health = (await send(server, "GET", "/health")).json()
    return Usage(time.perf_counter(), health["active"], health["waiting"])


# --- wrong requests ---------------------------------------------------------------------------------------------------


def bench_fuzz(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Wrong bodies, paths, hosts, origins, and slow senders: no answer may be a failure of the server."""
    rng = random.Random(cfg.seed)
    kinds = {
        "bodies": [wrong_body(server, rng) for _ in range(cfg.bodies)],
        "paths": [wrong_path(server, rng) for _ in range(cfg.paths)],
        "foreign Host and Origin": foreign_requests(server),
    }
    counts = {kind: asyncio.run(count_verdicts(server, requests)) for kind, requests in kinds.items()}
    counts["slow senders"] = asyncio.run(send_slowly(server))
    usage = asyncio.run(read_usage(server))
    print(f"| wrong requests |{''.join(f' {verdict} |' for verdict in VERDICTS)}")
    print(f"|{'---|' * (1 + len(VERDICTS))}")
    for kind, count in counts.items():
        print(f"| {kind} |{''.join(f' {count[verdict]:,} |' for verdict in VERDICTS)}")
    print(f"\n{usage.rows + usage.waiting} completions left\n")


VERDICTS = ("answered", "refused", "no answer", "hang", "not in OpenAI's shape", "5xx")  # the last four are failures
ERROR_KEYS = {"message", "type", "param", "code"}
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**400, -0.5, 1e308, -1e-320, 0.1, 5)
TEXTS = ("", "a", "\n", "é🎉", "\ud800", "\0", "a" * 5000, "null", "NaN", "<|endoftext|>", "../../etc/passwd")
VALUES: dict[str, tuple] = {  # that the fields of a request take; each gets wrong ones, too
    "model": (None,),
    "prompt": ("a", "", [0], [1, 2, 3], [[1], [2, 3]], ["a", "b"], [[]]),
    "max_tokens": (0, 1, 5, 60),
    "temperature": (0, 0.5, 1, 2),
    "top_p": (0.1, 1),
    "n": (1, 2, 5),
    "best_of": (1, 2),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {}),
    "logprobs": (0, 1, 5, 20),
    "echo": (True, False),
    "stop": ("a", ["a", "b"], "\n"),
    "seed": (0, 1, 2**62),
    "presence_penalty": (-2, 0.5, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "logit_bias": ({"0": 100}, {"1": -100, "2": 0.5}, {}),
    "user": ("a",),
    "suffix": ("",),
    "top_k": (1, 5, 10**6),
    "min_p": (0.1, 1),
    "repetition_penalty": (0.5, 2),
    "context_stride": (1, 5, 10**6),
    "tokens": ([0, 1], []),
    "messages": ([{"role": "user", "content": "a"}],),
    "unknown": (1,),
}
PATHS = ("/v1/completions",) * 10 + ("/v1/chat/completions", "/tokenize", "/detokenize")
ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037")


def wrong_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say and, rarely, what Python adds to it."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice((None, True, False) * 20 + (float("nan"), float("inf"), -float("inf")))
    values = [wrong_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return values if kind == 6 else {rng.choice((*TEXTS, "0", "1", "include_usage")): value for value in values}


def wrong_body(server: ApiServer, rng: random.Random) -> bytes:
    """A request for completions, or for the tokenizer, whose body may be anything. Some are right."""
    fields: dict[str, Any] = {"prompt": "\n", "max_tokens": 1 + rng.randrange(4)}
    for name in rng.sample([*VALUES], rng.randrange(6)):
        fields[name] = wrong_value(rng) if rng.random() < 0.3 else rng.choice(VALUES[name])
    body = json.dumps(fields).encode()
    kind = rng.randrange(20)
    if kind == 0:
        body = body[: rng.randrange(len(body))]
    elif kind == 1:
        position = rng.randrange(len(body))
        body = body[:position] + rng.randbytes(3) + body[position + 1 :]
    elif kind == 2:
        body = rng.randbytes(rng.randrange(100))
    elif kind == 3:
        body = json.dumps(fields, ensure_ascii=False).encode(rng.choice(ENCODINGS), "replace")
    elif kind == 4:
        nested = rng.choice(("[", '{"a":', '{"prompt":[')) * rng.choice((100, 10_000))
        body = nested.encode() if rng.random() < 0.5 else b'{"prompt": ' + nested.encode() + b"}"
    elif kind == 5:
        body = json.dumps(wrong_value(rng)).encode()
    elif kind == 6 and rng.random() < 0.05:
        body = json.dumps({**fields, "prompt": "a" * 2**20}).encode()
    headers = {}
    if rng.random() < 0.03:
        headers["content_type"] = rng.choice(("", "text/plain", "application/json; charset=latin-1", "é"))
    return request_bytes(server, "POST", rng.choice(PATHS), body, **headers)


def wrong_path(server: ApiServer, rng: random.Random) -> bytes:
    """A request of a path that does not exist, or not for this method."""
    pieces = ("v1", "models", "completions", "..", "%2e%2e", "%00", "%ff", "etc", "passwd", "", "%", "é", "a" * 500)
    path = "/" + "/".join(rng.choice(pieces) for _ in range(rng.randrange(6))) + rng.choice(("", "?", "?a=b", "//"))
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"))
    return request_bytes(server, method, path, b"{}" if method == "POST" else b"")


def foreign_requests(server: ApiServer) -> list[bytes]:
    """Requests that another site could cause. All must be refused."""
    foreign = ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "null", "localhost:1", "[::1")
    own = f"{server.host}:{server.port}"
    heads: list[dict[str, str]] = [{"host": host} for host in (*foreign, "", f"{own}, evil.example", f"{own}é")]
    heads += [{"origin": origin} for name in foreign for origin in (name, f"http://{name}", f"https://{name}")]
    heads += [{"origin": f"https://{own}"}, {"origin": f"http://{own}.evil.example"}]
    body = json.dumps({"model": server.model, "prompt": "\n", "max_tokens": 1}).encode()
    posts = [request_bytes(server, "POST", "/v1/completions", body, **head) for head in heads]
    return posts + [request_bytes(server, "GET", "/v1/models", **head) for head in heads]


async def count_verdicts(server: ApiServer, requests: list[bytes]) -> Counter[str]:
    """How many of the requests got each verdict."""
    counts: Counter[str] = Counter()

    async def ask(content: bytes) -> None:
        try:
            answer = await asyncio.wait_for(exchange(server, content), HANG)
        except asyncio.TimeoutError:
            counts["hang"] += 1
            return
        verdict = judge(answer, is_head=content.startswith(b"HEAD"))
        counts[verdict] += 1
        if verdict not in ("answered", "refused"):
            print(f"{verdict}: {content[:300]!r} -> {answer.raw[:300]!r}", file=sys.stderr)

    await at_a_time(16, map(ask, requests))
    return counts


def judge(answer: Answer, is_head: bool = False) -> str:
    """What kind of answer it is, one of VERDICTS."""
    if answer.status == 0:
        return "no answer"
    if answer.status >= 500:
        return "5xx"
    try:
        if answer.status >= 400:
            error = {} if is_head else answer.json()["error"]
            is_openai = is_head or (error.keys() == ERROR_KEYS and isinstance(error["message"], str))
            return "refused" if is_openai else "not in OpenAI's shape"
        if b"text/event-stream" in answer.head:
            return "5xx" if any("error" in event for event in answer.events()) else "answered"
        if not is_head:
            answer.json()
        return "answered"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "not in OpenAI's shape"


async def send_slowly(server: ApiServer) -> Counter[str]:
    """Clients that send a head or a body too slowly, or not at all, while others are answered."""
    content = request_bytes(server, "POST", "/v1/completions", b'{"prompt": "' + b"a" * 1000)
    head = content.index(b"\r\n\r\n") + 4
    counts: Counter[str] = Counter()

    async def dribble(start: int) -> Answer:
        """Send so many bytes, and then one byte per second."""
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(content[:start])
        receiving = asyncio.create_task(reader.read(-1))
        while not receiving.done():
            await asyncio.wait([receiving], timeout=1)
            writer.write(content[start : start + 1])
            start += 1
        writer.transport.abort()
        with suppress(ConnectionError):
            return Answer([(0.0, receiving.result())])
        return Answer([])

    async def ask(k: int) -> None:
        try:
            answer = await asyncio.wait_for(dribble((0, 20, head - 2, head, head + 5)[k % 5]), HANG)
        except asyncio.TimeoutError:
            counts["hang"] += 1
            return
        verdict = judge(answer)
        counts["refused" if verdict == "no answer" else verdict] += 1  # HTTP allows to close without an answer

    slow = [asyncio.create_task(ask(k)) for k in range(SLOW_SENDERS)]
    quick = await asyncio.wait_for(complete(server, prompt="\n", max_tokens=1), HANG)
    counts["answered"] += quick.status == 200
    await asyncio.gather(*slow)
    return counts


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def bench_llama(cfg: ServeBenchConfig) -> None:
    """Tokens per second of all clients together, against llama.cpp's batches with its better number of threads."""
    all_threads = [int(threads) for threads in comma_separated(cfg.llama_threads)]
    tokens = min(cfg.tokens, LLAMA_SHAPE["block_size"] - LLAMA_PROMPT)
    rng = random.Random(cfg.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder) / "run"
        write_run(run, LLAMA_SHAPE, CharTokenizer("".join(map(chr, range(LLAMA_SHAPE["vocab_size"])))))
        model = LanguageModel.load(run, device="cpu", dtype="float32").model
        for matrices in LLAMA_DTYPES.values():
            write_llama_model(model, Path(folder) / f"{matrices}.gguf", matrices)
        del model
        servers = {dtype: stack.enter_context(serving(run, cfg.device, dtype)) for dtype in LLAMA_DTYPES}
        for dtype, matrices in LLAMA_DTYPES.items():
            file = Path(folder) / f"{matrices}.gguf"
            for clients in map(int, comma_separated(cfg.llama_clients)):
                served_speed(servers[dtype], rng, clients, tokens)  # warms up
                ours: list[float] = []
                theirs: dict[int, list[float]] = {threads: [] for threads in all_threads}
                for _ in range(cfg.repeats):
                    ours.append(served_speed(servers[dtype], rng, clients, tokens))
                    for threads, speeds in theirs.items():
                        speeds.append(llama_speed(Path(cfg.llama), file, threads, clients, tokens))
                best = max(all_threads, key=lambda threads: statistics.median(theirs[threads]))
                cells = [f"{statistics.median(speeds):,.0f}" for speeds in (ours, theirs[best])]
                rows.append((f"{dtype} / {matrices}", clients, *cells, best, format_ratios(ours, theirs[best])))
    heads = (f"GPT-2 124M, {tokens} tokens", "clients", "Folio, tokens/s", "llama.cpp", "its threads", "ratio")
    for row in (heads, ["---"] * len(heads), *rows):
        print(f"|{''.join(f' {cell} |' for cell in row)}")
    print()


def served_speed(server: ApiServer, rng: random.Random, clients: int, tokens: int) -> float:
    """Tokens per second that so many clients get together, each after another prompt."""
    V = LLAMA_SHAPE["vocab_size"]
    prompts = [[rng.randrange(V) for _ in range(LLAMA_PROMPT)] for _ in range(clients)]
    return asyncio.run(run_load(server, [dict(prompt=prompt, max_tokens=tokens) for prompt in prompts])).speed


def llama_speed(folder: Path, file: Path, threads: int, rows: int, tokens: int) -> float:
    """Tokens per second of llama.cpp, without starting its process and loading the file."""
    result = run_llama(folder, file, threads, SAMPLING["temperature"], range(1, 1 + LLAMA_PROMPT), rows, tokens)
    return rows * len(result["ids"]) / result["seconds"]


# --- tables -----------------------------------------------------------------------------------------------------------


def print_table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """rows: what was measured, its value, and the bar, if it has one."""
    print(f"| {title} | | bar |\n|---|---|---|")
    for what, value, bar in rows:
        print(f"| {what} | {value} | {bar} |")
    print()


if __name__ == "__main__":
    run_script(main, ServeBenchConfig)
