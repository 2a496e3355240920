"""Measure tools/serve.py: throughput, latency, memory, and speed against llama.cpp.

    python lab/bench/serving.py out-shakespeare-char                            all but llama.cpp
    python lab/bench/serving.py out-shakespeare-char --what=load --clients=1,50,200
    python lab/bench/serving.py --what=llama --llama=../llama --repeats=1

load: concurrent streaming clients, against batch sampling with the same batch size, alternating. memory: of the server,
over thousands of requests. llama: random weights of GPT-2's 124M shape, against llama.cpp (npm install --prefix FOLDER
node-llama-cpp) on the same weights, alternating; llama.cpp's batches are measured in its process, without a server.

The clients run in one process, which shares the cores with the server. Measure on a quiet machine.
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
from folio.decoding.language_model import GenerationConfig, MeasuredModel  # noqa: E402
from lab.bench.baselines import llama_speed, write_llama_model  # noqa: E402
from lab.bench.timing import (  # noqa: E402
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
from lab.bench.viewer import write_run  # noqa: E402

PARTS = ("load", "memory", "llama")
LLAMA_SHAPE = dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768)  # GPT-2 124M
LLAMA_DTYPES = {"bfloat16": "F16", "int8": "Q8_0"}  # Folio's dtype -> llama.cpp's type of the same size
LLAMA_PROMPT = 16  # tokens
SAMPLING = {"temperature": 0.8, "top_k": 200}  # of every generated text
MEMORY_TOKENS = 20  # per request
MEMORY_CLIENTS = 50  # concurrent clients
MEMORY_INTERVAL = 500  # requests between two measurements
MB = 1_000_000


@dataclass(frozen=True)
class ServeBenchConfig(BenchConfig):
    # --- measurements ---
    run: tuple[str, ...] = ()  # a run, a checkpoint, or any model that --init_from takes
    what: str = "load,memory"  # load, memory, llama, comma-separated
    clients: str = "200"  # load: numbers of concurrent clients, comma-separated
    tokens: PositiveInt = 100  # load, llama: tokens per client, or fewer to fit into the context
    requests: PositiveInt = 10_000  # memory: number of requests
    seed: NonNegativeInt = 1337  # random seed of the prompts
    llama: str | None = None  # folder of node-llama-cpp
    llama_clients: str = "1,8,32"  # numbers of concurrent clients, comma-separated
    llama_threads: str = "1,2"  # numbers of threads of llama.cpp, comma-separated

    def problems(self) -> list[tuple[str, str]]:
        """Require known parts, and a run or node-llama-cpp for them."""
        problems = [
            *super().problems(),
            *unknown_names("what", self.what, PARTS),
            *not_integers("clients", self.clients, at_least=1),
            *not_integers("llama_clients", self.llama_clients, at_least=1),
            *not_integers("llama_threads", self.llama_threads, at_least=1),
        ]
        parts = comma_separated(self.what)
        if len(self.run) != 1 and parts != ["llama"]:
            problems.append(("run", "name one run, as in python lab/bench/serving.py out-shakespeare-char"))
        if "llama" in parts and self.llama is None:
            problems.append(("what", "llama needs --llama=FOLDER, an installation of node-llama-cpp"))
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


# --- server and lightweight client ------------------------------------------------------------------------------------


class ApiServer(NamedTuple):
    """A running tools/serve.py."""

    process: psutil.Process
    address: str  # http://host:port
    model: str  # model id
    block_size: int

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.address + path) as response:
            return json.load(response)


@contextmanager
def serving(run: str | Path, device: str, dtype: str) -> Iterator[ApiServer]:
    """Run tools/serve.py in a subprocess on a free port during the block. Raises UserError."""
    with running_server("serve.py", str(run), f"--device={device}", f"--dtype={dtype}") as (pid, address):
        server = ApiServer(psutil.Process(pid), address.removesuffix("/v1"), "", 0)
        (model,) = server.get("/v1/models")["data"]
        yield server._replace(model=model["id"], block_size=model["max_model_len"])


class Answer(NamedTuple):
    """A raw response. It is parsed lazily, to avoid computation during measurements."""

    parts: list[tuple[float, bytes]]  # (seconds since the start of the request, bytes)

    @property
    def is_complete(self) -> bool:
        """Whether it has the status 200, no error and, if it is a stream, the final event."""
        raw = b"".join(part for _, part in self.parts)
        is_stream = b"text/event-stream" in raw.partition(b"\r\n\r\n")[0]
        has_end = not is_stream or raw.endswith(b"data: [DONE]\n\n")
        return raw.startswith(b"HTTP/1.1 200 ") and has_end and b'{"error": ' not in raw

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the events of a stream with their arrival times in seconds."""
        received = b""
        for seconds, part in self.parts:
            *lines, received = (received + part).split(b"\n\n")
            for line in lines:
                _, data, event = line.rpartition(b"data: ")  # the first line also has the response's head
                if data and event != b"[DONE]":
                    yield seconds, json.loads(event)

    @property
    def text(self) -> str:
        return "".join(choice["text"] for _, event in self.events() for choice in event["choices"])

    @property
    def first_text(self) -> float:
        """Seconds until the first text of the stream."""
        return next(seconds for seconds, event in self.events() if any(choice["text"] for choice in event["choices"]))

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream's usage field."""
        return next(event["usage"]["completion_tokens"] for _, event in self.events() if event["usage"])


async def complete(server: ApiServer, **fields: Any) -> Answer:
    """Request a completion with HTTP/1.0, so that the response has no chunks and ends with the connection."""
    body = json.dumps({"model": server.model, **SAMPLING, **fields}).encode()
    name = server.address.removeprefix("http://")
    lines = ["POST /v1/completions HTTP/1.0", f"Host: {name}", "Content-Type: application/json"]
    host, port = name.rsplit(":", 1)
    start_time, parts = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    with suppress(ConnectionError):  # the answer is then incomplete
        while part := await reader.read(2**16):
            parts.append((time.perf_counter() - start_time, part))
    writer.transport.abort()
    return Answer(parts)


# --- load -------------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The answers to the clients of one round."""

    answers: list[Answer]
    seconds: float  # until the last answer was complete

    @property
    def speed(self) -> float:
        """Total tokens per second of all clients."""
        return sum(answer.tokens for answer in self.answers if answer.is_complete) / self.seconds

    @property
    def first_texts(self) -> list[float]:
        """Times to first text in seconds, in ascending order."""
        return sorted(answer.first_text for answer in self.answers if answer.is_complete)


def bench_load(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Measure errors, correctness, latency and throughput with concurrent streaming clients."""
    gpt = MeasuredModel.load(cfg.run[0], device=cfg.device, dtype="float32")
    for clients in map(int, comma_separated(cfg.clients)):
        measure_load(cfg, server, gpt, clients)


def measure_load(cfg: ServeBenchConfig, server: ApiServer, gpt: MeasuredModel, clients: int) -> None:
    """Measure `clients` concurrent clients against a batch with as many rows, and print a table."""
    tokens = min(cfg.tokens, server.block_size - 1)
    config = GenerationConfig(max_new_tokens=tokens, **SAMPLING)
    count, max_length = clients * (1 + cfg.repeats), server.block_size - tokens
    lengths = (1 + k * (max_length - 1) // count for k in range(count))
    prompts = random_prompts(gpt.tokenizer.vocab_size, lengths, cfg.seed)
    requests = [dict(prompt=prompt, max_tokens=tokens, seed=seed) for seed, prompt in enumerate(prompts)]
    loads, batch_speeds = [], []
    for first in range(0, len(prompts), clients):  # the first round warms up; the rounds have different prompts
        loads.append(asyncio.run(run_load(server, requests[first : first + clients])))
        batch_speeds.append(batch_speed(gpt, prompts[first : first + clients], config))
    answers = [answer for load in loads for answer in load.answers]
    errors = sum(not answer.is_complete for answer in answers)
    expected = (next(gpt.batches([(p, 0)], config.replace(seed=k))).run()[0] for k, p in enumerate(prompts))
    different = sum(text != answer.text for answer, text in zip(answers, expected, strict=True) if answer.is_complete)
    server_speeds, batch_speeds = [load.speed for load in loads[1:]], batch_speeds[1:]
    medians = [statistics.median(load.first_texts) for load in loads[1:]]
    percentiles = [load.first_texts[len(load.first_texts) * 99 // 100] for load in loads[1:]]
    rows = [
        ("errors", f"{errors} of {len(answers):,}", "0"),
        ("texts that differ from a batch of one", f"{different} of {len(answers):,}", "0"),
        ("first text, median", f"{1000 * statistics.median(medians):,.0f} ms", ""),
        ("first text, 99th percentile", f"{1000 * statistics.median(percentiles):,.0f} ms", "1,000 ms"),
        ("throughput", f"{format_median(server_speeds)} tokens/s", ""),
        ("batch sampler", f"{format_median(batch_speeds)} tokens/s", ""),
        ("ratio", format_ratios(server_speeds, batch_speeds), "at least 0.70"),
    ]
    print_table((f"{clients} streaming clients x {tokens} tokens, medians of {cfg.repeats}", "", "bar"), rows)


def random_prompts(vocab_size: int, lengths: Iterable[int], seed: int) -> list[list[int]]:
    """Return a random prompt of ids for each length, in random order."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    rng.shuffle(prompts)
    return prompts


def batch_speed(gpt: MeasuredModel, prompts: list[list[int]], config: GenerationConfig) -> float:
    """Return the tokens per second of completing all prompts as one batch."""
    start_tokens, start_seconds = gpt.tokens, gpt.seconds
    (batch,) = gpt.batches([(prompt, k) for k, prompt in enumerate(prompts)], config.replace(batch_size=len(prompts)))
    batch.run()
    return (gpt.tokens - start_tokens) / (gpt.seconds - start_seconds)


async def run_load(server: ApiServer, requests: list[dict[str, Any]]) -> Load:
    """Send all requests concurrently."""
    streaming = dict(stream=True, stream_options={"include_usage": True})
    start_time = time.perf_counter()
    answers = await asyncio.gather(*(complete(server, **request, **streaming) for request in requests))
    return Load(answers, time.perf_counter() - start_time)


# --- memory -----------------------------------------------------------------------------------------------------------


def bench_memory(cfg: ServeBenchConfig, server: ApiServer) -> None:
    """Measure the server's memory over many requests, half of them streaming."""
    start_time = time.perf_counter()
    sizes, errors = asyncio.run(watch_memory(server, cfg.requests))
    seconds = time.perf_counter() - start_time
    rows = [
        *((f"after {count:,} requests", f"{size / MB:,.1f} MB", "") for count, size in sizes.items()),
        ("largest difference", f"{(max(sizes.values()) - min(sizes.values())) / MB:,.1f} MB", "100 MB (± 50 MB)"),
        ("errors", errors, "0"),
        ("requests per second", f"{cfg.requests / seconds:,.0f}", ""),
    ]
    title = f"memory, {cfg.requests:,} requests of {MEMORY_TOKENS} tokens, {MEMORY_CLIENTS} concurrent"
    print_table((title, "", "bar"), rows)


async def watch_memory(server: ApiServer, requests: int) -> tuple[dict[int, int], int]:
    """Return the server's resident bytes by number of finished requests, and the number of errors."""
    sizes: dict[int, int] = {}
    finished = errors = 0
    numbers = iter(range(requests))

    async def send_requests() -> None:
        nonlocal finished, errors
        for k in numbers:
            answer = await complete(server, prompt="\n", max_tokens=MEMORY_TOKENS, seed=k, stream=k % 2 == 0)
            errors += not answer.is_complete
            finished += 1
            if finished % MEMORY_INTERVAL == 0 or finished == requests:
                sizes[finished] = server.process.memory_info().rss

    await asyncio.gather(*(send_requests() for _ in range(MEMORY_CLIENTS)))
    return sizes, errors


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def bench_llama(cfg: ServeBenchConfig) -> None:
    """Measure total tokens per second against llama.cpp's batches with its fastest number of threads."""
    tokens = min(cfg.tokens, LLAMA_SHAPE["block_size"] - LLAMA_PROMPT)
    rng = random.Random(cfg.seed)
    prompt = tuple(range(1, 1 + LLAMA_PROMPT))
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder) / "run"
        write_run(run, LLAMA_SHAPE, CharTokenizer("".join(map(chr, range(LLAMA_SHAPE["vocab_size"])))))
        model = MeasuredModel.load(run, device="cpu", dtype="float32").model
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
                folio = speeds.pop("Folio")
                threads, llama = max(speeds.items(), key=lambda item: statistics.median(item[1]))
                cells = (format_median(folio), format_median(llama), threads, format_ratios(folio, llama))
                rows.append((f"{dtype} / {matrices}", clients, *cells))
    heads = (f"GPT-2 124M, {tokens} tokens", "clients", "Folio, tokens/s", "llama.cpp", "its threads", "ratio")
    print_table(heads, rows)


def served_speed(server: ApiServer, rng: random.Random, clients: int, tokens: int) -> float:
    """Return the total tokens per second of `clients` concurrent clients with different prompts."""
    prompts = random_prompts(LLAMA_SHAPE["vocab_size"], [LLAMA_PROMPT] * clients, rng.randrange(2**31))
    return asyncio.run(run_load(server, [dict(prompt=prompt, max_tokens=tokens) for prompt in prompts])).speed


if __name__ == "__main__":
    run_script(main, ServeBenchConfig)
