"""Measure tools/serve.py: throughput, the time to the first text, memory, and its speed against llama.cpp.

    python tools/bench/serving.py out-shakespeare-char                            all but llama.cpp
    python tools/bench/serving.py out-shakespeare-char --what=load --clients=1,50,200
    python tools/bench/serving.py --what=llama --llama=../llama --repeats=1

load: clients that stream at the same time, against the batch sampler at the same batch, alternating. memory: of the
server, over thousands of requests. llama: a model of GPT-2's 124M shape with random weights, against llama.cpp (npm
install --prefix FOLDER node-llama-cpp) on the same weights, alternating; llama.cpp's batches are measured inside of its
process, without a server.

The clients are one process that shares the cores with the server. Measure on a quiet machine.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import NonNegativeInt, PositiveInt, comma_separated, run_script  # noqa: E402
from folio.data.tokenizer import CharTokenizer  # noqa: E402
from folio.decoding.language_model import GenerationConfig, LanguageModel  # noqa: E402
from folio.decoding.text_stream import TextStream  # noqa: E402
from tools.bench.baselines import llama_speed, write_llama_model  # noqa: E402
from tools.bench.timing import (  # noqa: E402
    BenchConfig,
    alternate,
    busy_processes,
    describe_device,
    format_median,
    format_ratios,
    not_integers,
    print_table,
    running_server,
    unknown_names,
)
from tools.bench.viewer import write_run  # noqa: E402

PARTS = ("load", "memory", "llama")
LLAMA_SHAPE = dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768)  # GPT-2 124M
LLAMA_DTYPES = {"bfloat16": "F16", "int8": "Q8_0"}  # ours, and the matrices of llama.cpp of the same size
LLAMA_PROMPT = 16  # tokens
SAMPLING = {"temperature": 0.8, "top_k": 200}  # of every generated text
MEMORY_TOKENS = 20  # per request
MEMORY_CLIENTS = 50  # at a time
MEMORY_INTERVAL = 500  # requests between two measurements
MB = 1_000_000


@dataclass(frozen=True)
class ServeBenchConfig(BenchConfig):
    # --- what is measured ---
    run: tuple[str, ...] = ()  # a run, a checkpoint, or what --init_from takes
    what: str = "load,memory"  # separated by commas; llama is one more
    clients: str = "200"  # of load, all at a time; several numbers are separated by commas
    tokens: PositiveInt = 100  # of load per client, and of llama; fewer if the context holds fewer
    requests: PositiveInt = 10_000  # of memory
    seed: NonNegativeInt = 1337  # of prompts
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
    parts = comma_separated(cfg.what)
    with busy_processes(cfg.busy):
        if "load" in parts or "memory" in parts:
            with serving(cfg.run[0], cfg.device, "float32") as server:
                if "load" in parts:
                    bench_load(cfg, server)
                if "memory" in parts:
                    bench_memory(cfg, server)
        if "llama" in parts:
            bench_llama(cfg)


# --- the server, and a client that costs little -----------------------------------------------------------------------


class ApiServer(NamedTuple):
    """A running tools/serve.py."""

    process: psutil.Process
    address: str  # http://host:port
    model: str  # its id
    block_size: int

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.address + path) as response:
            return json.load(response)


@contextmanager
def serving(run: str | Path, device: str, dtype: str) -> Iterator[ApiServer]:
    """tools/serve.py in a process of its own, on a free port. Raises UserError."""
    with running_server("serve.py", str(run), f"--device={device}", f"--dtype={dtype}") as (pid, address):
        server = ApiServer(psutil.Process(pid), address.removesuffix("/v1"), "", 0)
        (model,) = server.get("/v1/models")["data"]
        yield server._replace(model=model["id"], block_size=model["max_model_len"])


class Answer(NamedTuple):
    """What a server sent before it closed the connection. Nothing is parsed while others are measured."""

    parts: list[tuple[float, bytes]]  # the seconds until they arrived, since the request began

    @property
    def is_complete(self) -> bool:
        """It has the status 200, no error and, if it is a stream, the end of one."""
        raw = b"".join(part for _, part in self.parts)
        is_stream = b"text/event-stream" in raw.partition(b"\r\n\r\n")[0]
        has_end = not is_stream or raw.endswith(b"data: [DONE]\n\n")
        return raw.startswith(b"HTTP/1.1 200 ") and has_end and b'{"error": ' not in raw

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events of a stream, with the seconds until they had arrived."""
        received = b""
        for seconds, part in self.parts:
            *lines, received = (received + part).split(b"\n\n")
            for line in lines:
                _, data, event = line.rpartition(b"data: ")  # the first line has the response's head
                if data and event != b"[DONE]":
                    yield seconds, json.loads(event)

    @property
    def text(self) -> str:
        return "".join(choice["text"] for _, event in self.events() for choice in event["choices"])

    @property
    def first_text(self) -> float:
        """Seconds until the first text of a stream."""
        return next(seconds for seconds, event in self.events() if any(choice["text"] for choice in event["choices"]))

    @property
    def tokens(self) -> int:
        """How many a stream says that it has."""
        return next(event["usage"]["completion_tokens"] for _, event in self.events() if event["usage"])


async def complete(server: ApiServer, **fields: Any) -> Answer:
    """Request a completion with HTTP/1.0: the answer has no chunks, and ends when the server closes the connection."""
    body = json.dumps({"model": server.model, **SAMPLING, **fields}).encode()
    name = server.address.removeprefix("http://")
    lines = ["POST /v1/completions HTTP/1.0", f"Host: {name}", "Content-Type: application/json"]
    host, port = name.rsplit(":", 1)
    began, parts = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    with suppress(ConnectionError):  # then the answer is not complete
        while part := await reader.read(2**16):
            parts.append((time.perf_counter() - began, part))
    writer.transport.abort()
    return Answer(parts)


# --- load -------------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What the clients of one round saw."""

    answers: list[Answer]
    seconds: float  # until the last one had everything

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return sum(answer.tokens for answer in self.answers if answer.is_complete) / self.seconds

    @property
    def first_texts(self) -> list[float]:
        """Seconds, in increasing order."""
        return sorted(answer.first_text for answer in self.answers if answer.is_complete)


def bench_load(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Clients that stream at the same time: errors, texts, time to the first one, and throughput."""
    gpt = LanguageModel.load(cfg.run[0], device=cfg.device, dtype="float32")
    for clients in map(int, comma_separated(cfg.clients)):
        measure_load(cfg, server, gpt, clients)


def measure_load(cfg: ServeBenchConfig, server: ApiServer, gpt: LanguageModel, clients: int) -> None:
    """Measure so many clients against a batch of as many rows, and print the table."""
    tokens = min(cfg.tokens, server.block_size - 1)
    config = GenerationConfig(max_new_tokens=tokens, **SAMPLING)
    count, longest = clients * (1 + cfg.repeats), server.block_size - tokens
    lengths = (1 + k * (longest - 1) // count for k in range(count))
    prompts = random_prompts(gpt.tokenizer.vocab_size, lengths, cfg.seed)
    requests = [dict(prompt=prompt, max_tokens=tokens, seed=seed) for seed, prompt in enumerate(prompts)]
    loads, theirs = [], []
    for first in range(0, len(prompts), clients):  # the first round warms up; the rounds have different prompts
        loads.append(asyncio.run(run_load(server, requests[first : first + clients])))
        theirs.append(batch_speed(gpt, prompts[first : first + clients], config))
    answers = [answer for load in loads for answer in load.answers]
    errors = sum(not answer.is_complete for answer in answers)
    alone = (next(gpt.complete([(prompt, 0)], 1, config.replace(seed=k))) for k, prompt in enumerate(prompts))
    different = sum(text != answer.text for answer, text in zip(answers, alone, strict=True) if answer.is_complete)
    ours, theirs = [load.speed for load in loads[1:]], theirs[1:]
    medians = [statistics.median(load.first_texts) for load in loads[1:]]
    latest = [load.first_texts[len(load.first_texts) * 99 // 100] for load in loads[1:]]
    rows = [
        ("errors", f"{errors} of {len(answers):,}", "0"),
        ("texts that differ from those of their seed alone", f"{different} of {len(answers):,}", "0"),
        ("first text, median", f"{1000 * statistics.median(medians):,.0f} ms", ""),
        ("first text, 99th percentile", f"{1000 * statistics.median(latest):,.0f} ms", "1,000 ms"),
        ("throughput", f"{format_median(ours)} tokens/s", ""),
        ("batch sampler", f"{format_median(theirs)} tokens/s", ""),
        ("ratio", format_ratios(ours, theirs), "at least 0.70"),
    ]
    print_table((f"{clients} streaming clients x {tokens} tokens, medians of {cfg.repeats}", "", "bar"), rows)


def random_prompts(vocab_size: int, lengths: Iterable[int], seed: int) -> list[list[int]]:
    """A prompt of ids for each length, which begin differently, in random order."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    rng.shuffle(prompts)
    return prompts


def batch_speed(gpt: LanguageModel, prompts: list[list[int]], config: GenerationConfig) -> float:
    """Tokens per second of continuing all prompts at a time, as LanguageModel.complete does."""
    began, count = time.perf_counter(), 0
    texts = [TextStream(gpt.tokenizer) for _ in prompts]
    for step in gpt.steps(prompts, range(len(prompts)), config):
        for text, token in zip(texts, step.tokens, strict=True):
            text.push(token)
            count += token is not None
    return count / (time.perf_counter() - began)


async def run_load(server: ApiServer, requests: list[dict[str, Any]]) -> Load:
    """Send all requests at the same time."""
    streaming = dict(stream=True, stream_options={"include_usage": True})
    began = time.perf_counter()
    answers = await asyncio.gather(*(complete(server, **request, **streaming) for request in requests))
    return Load(answers, time.perf_counter() - began)


# --- memory -----------------------------------------------------------------------------------------------------------


def bench_memory(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """The server's memory while it answers, half of the requests streaming."""
    began = time.perf_counter()
    sizes, errors = asyncio.run(watch_memory(server, cfg.requests))
    seconds = time.perf_counter() - began
    rows = [
        *((f"after {count:,} requests", f"{size / MB:,.1f} MB", "") for count, size in sizes.items()),
        ("largest difference", f"{(max(sizes.values()) - min(sizes.values())) / MB:,.1f} MB", "100 MB (± 50 MB)"),
        ("errors", errors, "0"),
        ("requests per second", f"{cfg.requests / seconds:,.0f}", ""),
    ]
    title = f"memory, {cfg.requests:,} requests of {MEMORY_TOKENS} tokens, {MEMORY_CLIENTS} at a time"
    print_table((title, "", "bar"), rows)


async def watch_memory(server: ApiServer, requests: int) -> tuple[dict[int, int], int]:
    """The server's resident bytes after every MEMORY_INTERVAL requests and the last one, and how many had an error."""
    sizes: dict[int, int] = {}
    finished = errors = 0
    numbers = iter(range(requests))

    async def ask() -> None:
        nonlocal finished, errors
        for k in numbers:
            answer = await complete(server, prompt="\n", max_tokens=MEMORY_TOKENS, seed=k, stream=k % 2 == 0)
            errors += not answer.is_complete
            finished += 1
            if finished % MEMORY_INTERVAL == 0 or finished == requests:
                sizes[finished] = server.process.memory_info().rss

    await asyncio.gather(*(ask() for _ in range(MEMORY_CLIENTS)))
    return sizes, errors


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def bench_llama(cfg: ServeBenchConfig) -> None:
    """Tokens per second of all clients together, against llama.cpp's batches with its better number of threads."""
    tokens = min(cfg.tokens, LLAMA_SHAPE["block_size"] - LLAMA_PROMPT)
    rng = random.Random(cfg.seed)
    prompt = tuple(range(1, 1 + LLAMA_PROMPT))
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder) / "run"
        write_run(run, LLAMA_SHAPE, CharTokenizer("".join(map(chr, range(LLAMA_SHAPE["vocab_size"])))))
        model = LanguageModel.load(run, device="cpu", dtype="float32").model
        for dtype, matrices in LLAMA_DTYPES.items():
            file = Path(folder) / f"{matrices}.gguf"
            write_llama_model(model, file, matrices)
            server = stack.enter_context(serving(run, cfg.device, dtype))
            for clients in map(int, comma_separated(cfg.llama_clients)):
                methods = {"Folio": partial(served_speed, server, rng, clients, tokens)}
                for threads in map(int, comma_separated(cfg.llama_threads)):
                    settings = (Path(cfg.llama), file, threads, SAMPLING["temperature"])
                    methods[f"{threads}"] = partial(llama_speed, *settings, prompt, clients, tokens)
                speeds = alternate(methods, cfg.repeats)
                ours = speeds.pop("Folio")
                threads, theirs = max(speeds.items(), key=lambda item: statistics.median(item[1]))
                numbers = (format_median(ours), format_median(theirs), threads, format_ratios(ours, theirs))
                rows.append((f"{dtype} / {matrices}", clients, *numbers))
    heads = (f"GPT-2 124M, {tokens} tokens", "clients", "Folio, tokens/s", "llama.cpp", "its threads", "ratio")
    print_table(heads, rows)


def served_speed(server: ApiServer, rng: random.Random, clients: int, tokens: int) -> float:
    """Tokens per second that so many clients get together, each after another prompt."""
    prompts = random_prompts(LLAMA_SHAPE["vocab_size"], [LLAMA_PROMPT] * clients, rng.randrange(2**31))
    return asyncio.run(run_load(server, [dict(prompt=prompt, max_tokens=tokens) for prompt in prompts])).speed


if __name__ == "__main__":
    run_script(main, ServeBenchConfig)
