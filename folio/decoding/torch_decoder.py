"""Decoding with torch, on any device: prefill, steps with a key-value cache, CUDA graphs, and sampling on the device.

Dimensions: B batch (rows), T time, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor

from folio.decoding.kv_cache import KVCache, Prefix
from folio.decoding.sampling import Sample, Sampling, next_token_probabilities, sample_token, uniforms
from folio.machine.runtime import Runtime
from model import GPT

STEPS_AHEAD = {"cuda": 1}
SMALL = 2**26  # bytes of weights times rows, for which one thread is enough
GREEDY = Sampling(temperature=0)


class TorchDecoder:
    """A model on its device. Puts it into eval mode."""

    def __init__(self, model: GPT, runtime: Runtime):
        self.model, self.config, self.runtime = model.eval(), model.config, runtime

        # torch's CPU kernel for one query and many keys is 2 to 5 times as fast in float32 as in bfloat16.
        self.cache_dtype = torch.float32 if runtime.device.type == "cpu" else runtime.dtype
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        default_threads()

    @property
    def row_bytes(self) -> int:
        """Two caches (full contexts are prefilled into a second one), a block's activations, and logits."""
        context = self.cache_dtype.itemsize * self.config.block_size * self.config.n_embd  # of one activation
        return (2 * 2 * self.config.n_layer + 16) * context + 32 * self.config.vocab_size

    def batch(self, rows: int, vocab_size: int | None = None) -> "TorchBatch":
        return TorchBatch(self, rows, vocab_size)


class TorchBatch:
    """Rows of a batch. A step computes all of them up to the last one that takes part, also those that do not: these
    lose their keys and values.
    """

    chunk, keeps_rows = None, False

    def __init__(self, decoder: TorchDecoder, rows: int, vocab_size: int | None = None):
        self.model, self.runtime, self.weight_bytes = decoder.model, decoder.runtime, decoder.weight_bytes
        model, runtime = self.model, self.runtime
        self.sampler = TokenSampler(rows, model.config.vocab_size, vocab_size, runtime.device)
        self.steps_ahead = STEPS_AHEAD.get(runtime.device.type, 0)
        self.cache = KVCache(model.config, rows, decoder.cache_dtype, runtime.device)
        self.lengths = [0] * rows  # tokens of each row, of which the cache has the newest ones
        self.stepping: list[int] = []  # the rows of the latest step, unless another one was prefilled since
        self.logits = torch.zeros(rows, model.config.vocab_size, device=runtime.device)
        self.chosen = torch.zeros(rows, 1, dtype=torch.long, device=runtime.device)
        # Autocast's copies of the weights would not outlive a capture.
        self.capturable = runtime.device.type == "cuda" and model.transformer.wte.weight.dtype == runtime.dtype
        self.forward = CUDAGraphDecoder(model, self.cache) if self.capturable else partial(model, kernel=self.cache)

    def start(self, row: int, sample: Sample) -> None:
        self.sampler.start(row, sample)

    @torch.inference_mode()
    def prefill(self, contexts: dict[int, list[int]], prefixes: dict[int, Prefix]) -> None:
        """Contexts of one length with the same prefix are computed together."""
        groups: dict[tuple[int, Prefix | None], list[int]] = {}
        for row, context in contexts.items():
            groups.setdefault((len(context), prefixes.get(row)), []).append(row)
        self.logits = self.logits.clone()
        for (length, prefix), rows in groups.items():
            part, count = self.empty_cache(len(rows)), 0
            if prefix:
                count = prefix.length
                part.kv[:, :, :, :, :count] = self.cache.kv[:, :, [prefix.row], :, :count]
                part.set_lengths([count] * len(rows))
            idx = torch.tensor([contexts[row][count:] for row in rows], device=self.runtime.device)
            with inference_context(self.model, self.runtime):
                logits, _ = self.model(idx, kernel=part)  # (n, 1, V)
            self.fill(rows, part, length, logits[:, -1])

    @torch.inference_mode()
    def score(self, row: int, context: list[int], count: int) -> Tensor:
        part, idx = self.empty_cache(1), torch.tensor([context], device=self.runtime.device)
        with inference_context(self.model, self.runtime):
            logits = self.model.logits(idx, kernel=part)[0].float()  # (T, V)
        self.logits = self.logits.clone()
        self.fill([row], part, len(context), logits[-1:])
        return logits[count:]

    def empty_cache(self, rows: int) -> KVCache:
        return KVCache(self.model.config, rows, self.cache.kv.dtype, self.runtime.device)

    def fill(self, rows: list[int], part: KVCache, length: int, logits: Tensor) -> None:
        """Take over the keys and values of other rows, and the logits after them."""
        self.cache.kv[:, :, rows, :, :length] = part.kv[:, :, :, :, :length]
        self.logits[rows] = logits.float()
        for row in rows:
            self.lengths[row] = length
        self.stepping = []

    @torch.inference_mode()
    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        self.chosen = self.chosen.index_copy(0, self.sampler.index(rows), self.sampler.sample(self.logits, rows))
        return to_host(self.chosen)

    @torch.inference_mode()
    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        if rows != self.stepping:  # the others have the length of the longest, so that equal lengths remain equal
            lengths = [max(self.lengths[row] for row in rows)] * len(self.lengths)
            for row in rows:
                lengths[row] = self.lengths[row]
            self.cache.set_lengths(lengths)
            self.stepping = rows
        for row in rows:
            self.lengths[row] += 1
        with inference_context(self.model, self.runtime), self.threads(len(rows)):
            logits = self.forward(self.chosen[: self.width(max(rows) + 1)])[0][:, 0].float()
        index = self.sampler.index(rows)
        self.logits = self.logits.index_copy(0, index, logits[index])
        return self.sample(rows)

    def threads(self, rows: int) -> AbstractContextManager:
        """Limit a step on a CPU to one thread if it is small, and otherwise to all threads but one.

        Threads wait for the slowest of them, and much longer if another process has its core. On two cores, one thread
        samples as fast as two, and beside a busy process 2 to 7 times as fast (docs/performance.md).
        """
        if self.runtime.device.type != "cpu":
            return nullcontext()
        return using_threads(1 if self.weight_bytes * rows < SMALL else max(1, default_threads() - 1))

    def width(self, rows: int) -> int:
        """How many rows to compute: a power of two or all for CUDA graphs, of which there are then few."""
        return min(len(self.lengths), 1 << (rows - 1).bit_length()) if self.capturable else rows


@cache
def default_threads() -> int:
    """How many threads torch used before the first step."""
    return torch.get_num_threads()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(default_threads())


def inference_context(model: GPT, runtime: Runtime) -> AbstractContextManager:
    """The context of a forward pass: none for weights that are in the runtime's dtype, else its autocast."""
    return nullcontext() if model.transformer.wte.weight.dtype == runtime.dtype else runtime.compute()


def sampling_device(device: torch.device) -> torch.device:
    """Where to sample tokens for a model on `device`: there, or on the CPU for devices without float64 (Apple's)."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


class TokenSampler:
    """Samples the next token of each row of a batch. Ids from vocab_size on are never sampled."""

    CHUNK = 1024  # steps whose random numbers are computed together

    def __init__(self, rows: int, V: int, vocab_size: int | None, device: torch.device):
        self.shape, self.vocab_size, self.device = (rows, V), vocab_size or V, device
        self.samples: dict[int, Sample] = {}  # by row
        self.steps = [0] * rows
        self.numbers = torch.zeros(rows, self.CHUNK, dtype=torch.float64, device=sampling_device(device))
        self.next_number = torch.zeros(rows, 1, dtype=torch.long, device=self.numbers.device)
        self.occurred: Tensor | None = None  # (B, V) of bool, for the repetition penalty
        self.counts: Tensor | None = None  # (B, V) of float32, for the penalties of tokens that were sampled
        self.grouped: tuple[list[int], Tensor, list[tuple[Sampling, Tensor]]] | None = None  # of the latest rows

    def start(self, row: int, sample: Sample) -> None:
        """Set how the tokens of a row are sampled from now on."""
        self.samples[row], self.steps[row], self.grouped = sample, 0, None
        if sample.sampling.repetition_penalty != 1:
            if self.occurred is None:
                self.occurred = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            self.occurred[row] = False
            self.occurred[row, torch.tensor(sample.prompt, device=self.device)] = True
        if sample.sampling.counts_tokens:
            if self.counts is None:
                self.counts = torch.zeros(self.shape, device=self.device)
            self.counts[row] = 0

    def index(self, rows: list[int]) -> Tensor:
        return self.groups(rows)[0]

    def groups(self, rows: list[int]) -> tuple[Tensor, list[tuple[Sampling, Tensor]]]:
        """The rows as a tensor, and for each kind of sampling the places of its rows in it."""
        if self.grouped is None or self.grouped[0] != rows:
            places: dict[Sampling, list[int]] = {}
            for place, row in enumerate(rows):
                places.setdefault(self.samples[row].sampling, []).append(place)
            groups = [(sampling, torch.tensor(of, device=self.device)) for sampling, of in places.items()]
            self.grouped = (list(rows), torch.tensor(rows, device=self.device), groups)
        return self.grouped[1:]

    def sample(self, logits: Tensor, rows: list[int]) -> Tensor:
        """The next tokens of some rows, (rows, 1), from the logits of all, (B, V)."""
        index, groups = self.groups(rows)
        logits = logits[index]  # (rows, V)
        logits[:, self.vocab_size :] = -torch.inf
        uniform = self.uniform(rows, index)
        chosen = torch.empty(len(rows), 1, dtype=torch.long, device=self.device)
        for sampling, places in groups:
            of_group = index[places]
            occurred = self.occurred[of_group] if sampling.repetition_penalty != 1 else None
            counts = self.counts[of_group] if sampling.counts_tokens else None
            if sampling == GREEDY:
                ids = logits[places].argmax(dim=-1, keepdim=True)
            else:
                probabilities = next_token_probabilities(logits[places], sampling, occurred, counts)
                ids = sample_token(probabilities, uniform[places.to(uniform.device)])
            if occurred is not None:
                self.occurred[of_group[:, None], ids] = True
            if counts is not None:
                self.counts[of_group[:, None], ids] += 1
            chosen[places] = ids
        return chosen

    def uniform(self, rows: list[int], index: Tensor) -> Tensor:
        """The random numbers of the next step, (rows, 1)."""
        for row in rows:
            if self.steps[row] % self.CHUNK == 0:
                sample = self.samples[row]
                numbers = uniforms(sample.seed, [sample.number], self.steps[row], self.CHUNK)
                self.numbers[row], self.next_number[row] = numbers[0].to(self.numbers.device), 0
            self.steps[row] += 1
        index = index.to(self.numbers.device)
        places = self.next_number[index]
        self.next_number[index] = places + 1
        return self.numbers[index].gather(1, places)


def to_host(chosen: Tensor) -> Callable[[], list[int]]:
    """Return a function that fetches the ids (B, 1) as a list. On CUDA it does not wait for later work."""
    if chosen.device.type != "cuda":
        return chosen[:, 0].tolist
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def fetch() -> list[int]:
        copied.synchronize()
        return host[:, 0].tolist()

    return fetch


class CUDAGraphDecoder:
    """One token per row on CUDA, captured as graphs, because launching the small kernels one by one takes longer than
    running them. Each graph attends to a fixed number of positions, a multiple of GRANULARITY.
    """

    GRANULARITY = 256

    def __init__(self, model: GPT, cache: KVCache):
        self.model, self.cache = model, cache
        self.ids = torch.zeros(len(cache.lengths), 1, dtype=torch.long, device=cache.kv.device)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, ids: Tensor) -> tuple[Tensor, None]:
        """Like the model's forward: ids (B, 1) of the first rows to logits (B, 1, V) and no loss."""
        B = len(ids)
        self.ids[:B].copy_(ids)
        lengths = [length + 1 for length in self.cache.lengths[:B]] + self.cache.lengths[B:]
        capacity = -(-max(lengths[:B]) // self.GRANULARITY) * self.GRANULARITY
        capacity = min(capacity, self.model.config.block_size)
        if (B, capacity) not in self.graphs:
            self.graphs[B, capacity] = self.capture(B, capacity)
        graph, logits = self.graphs[B, capacity]
        graph.replay()
        self.cache.lengths = lengths
        return logits.clone(), None

    def capture(self, B: int, capacity: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        lengths, last = list(self.cache.lengths), self.cache.last.clone()
        self.cache.capacity = capacity
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # keeps what kernels allocate at their first call out of the graph
            self.model.forward(self.ids[:B], kernel=self.cache)
        torch.cuda.current_stream().wait_stream(stream)
        self.cache.last.copy_(last)
        with torch.cuda.graph(graph):
            logits, _ = self.model.forward(self.ids[:B], kernel=self.cache)
        self.cache.capacity, self.cache.lengths = None, lengths
        return graph, logits
