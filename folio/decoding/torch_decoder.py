"""Decoding with torch, on any device: prefill, steps with a key-value cache, CUDA graphs, and sampling on the device.

Dimensions: B batch (rows), T time, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from folio.checkpoints.build_model import model_from_tensors
from folio.decoding.kv_cache import KVCache, Prefix
from folio.decoding.sampling import Sample, Sampling, next_token_probabilities, sample_token, uniforms
from folio.machine.kernels import pad_vocabulary
from folio.machine.runtime import Runtime
from model import GPT

STEPS_AHEAD = {"cuda": 1}
SINGLE_THREAD_BYTES = 2**26  # of weights times rows; smaller steps use one CPU thread
GREEDY = Sampling(temperature=0)


class TorchDecoder:
    """Decodes with the model itself, on its device. Puts it into eval mode."""

    def __init__(self, model: GPT, runtime: Runtime):
        self.model, self.config, self.runtime = padded(model.eval(), runtime.size_multiple), model.config, runtime
        # torch's CPU kernel for one query and many keys is 2 to 5 times as fast in float32 as in bfloat16.
        self.cache_dtype = torch.float32 if runtime.device.type == "cpu" else runtime.dtype
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        default_threads()

    @property
    def row_bytes(self) -> int:
        """Bytes of two caches (prefill uses a second one), a block's activations, logits, and CUDA graphs."""
        config, V, itemsize = self.config, len(self.model.lm_head.weight), self.cache_dtype.itemsize
        activation = itemsize * config.block_size * config.n_embd  # T x C
        graphs = 0
        if is_capturable(self.model, self.runtime):  # each graph keeps logits in the model's dtype and in float32
            # The rows of graphs are powers of two and all rows: together at most three times as many as all rows.
            graphs = 3 * -(-config.block_size // CUDAGraphDecoder.GRANULARITY) * (itemsize + 4) * V
        return (2 * 2 * config.n_layer + 16) * activation + 32 * V + graphs

    def batch(self, rows: int, vocab_size: int | None = None) -> "TorchBatch":
        return TorchBatch(self, rows, vocab_size)


class TorchBatch:
    """The rows of a batch. A step computes all rows up to the last active one. Inactive rows among them lose their keys
    and values.
    """

    chunk, keeps_rows = None, False

    def __init__(self, decoder: TorchDecoder, rows: int, vocab_size: int | None = None):
        self.model, self.runtime, self.weight_bytes = decoder.model, decoder.runtime, decoder.weight_bytes
        model, runtime = self.model, self.runtime
        self.sampler = TokenSampler(rows, model.config.vocab_size, vocab_size, runtime.device)
        self.steps_ahead = STEPS_AHEAD.get(runtime.device.type, 0)
        self.cache = KVCache(model.config, rows, decoder.cache_dtype, runtime.device)
        self.lengths = [0] * rows  # tokens of each row; the cache has the newest ones
        self.step_rows: list[int] = []  # the rows of the last step; empty after a prefill
        self.logits = torch.zeros(rows, model.config.vocab_size, device=runtime.device)
        self.sampled = torch.zeros(rows, 1, dtype=torch.long, device=runtime.device)
        self.capturable = is_capturable(model, runtime)
        new_logits = partial(next_logits, model, self.cache)
        self.new_logits = CUDAGraphDecoder(new_logits, self.cache) if self.capturable else new_logits

    def start(self, row: int, sample: Sample) -> None:
        self.sampler.start(row, sample)

    @torch.inference_mode()
    def prefill(self, contexts: dict[int, list[int]], prefixes: dict[int, Prefix]) -> None:
        """Contexts of the same length with the same prefix are computed together."""
        groups: dict[tuple[int, Prefix | None], list[int]] = {}
        for row, context in contexts.items():
            groups.setdefault((len(context), prefixes.get(row)), []).append(row)
        self.logits = self.logits.clone()
        for (length, prefix), rows in groups.items():
            cache, count = self.empty_cache(len(rows)), 0
            if prefix:
                count = prefix.length
                cache.kv[:, :, :, :, :count] = self.cache.kv[:, :, [prefix.row], :, :count]
                cache.set_lengths([count] * len(rows))
            idx = torch.tensor([contexts[row][count:] for row in rows], device=self.runtime.device)
            with inference_context(self.model, self.runtime):
                logits = next_logits(self.model, cache, idx)  # (n, V)
            self.fill(rows, cache, length, logits)

    def empty_cache(self, rows: int) -> KVCache:
        return KVCache(self.model.config, rows, self.cache.kv.dtype, self.runtime.device)

    def fill(self, rows: list[int], cache: KVCache, length: int, logits: Tensor) -> None:
        """Copy another cache into these rows, and the logits after it."""
        self.cache.kv[:, :, rows, :, :length] = cache.kv[:, :, :, :, :length]
        self.logits[rows] = logits
        for row in rows:
            self.lengths[row] = length
        self.step_rows = []

    @torch.inference_mode()
    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        ids = self.sampler.sample(self.logits.to(self.sampler.device), rows)
        self.sampled = self.sampled.index_copy(0, self.index(rows), ids.to(self.runtime.device))
        return to_host(self.sampled)

    def index(self, rows: list[int]) -> Tensor:
        """The rows as a tensor on the model's device."""
        return self.sampler.index(rows).to(self.runtime.device)

    @torch.inference_mode()
    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        if rows != self.step_rows:  # inactive rows get the maximum length, so that equal lengths stay equal
            lengths = [max(self.lengths[row] for row in rows)] * len(self.lengths)
            for row in rows:
                lengths[row] = self.lengths[row]
            self.cache.set_lengths(lengths)
            self.step_rows = rows
        for row in rows:
            self.lengths[row] += 1
        context = nullcontext() if self.capturable else inference_context(self.model, self.runtime)
        with context, self.threads(len(rows)):
            logits = self.new_logits(self.sampled[: self.padded_rows(max(rows) + 1)])
        index = self.index(rows)
        self.logits = self.logits.index_copy(0, index, logits[index])
        return self.sample(rows)

    def threads(self, rows: int) -> AbstractContextManager:
        """Limit a step on a CPU to one thread if it is small, otherwise to all threads but one.

        Threads wait for the slowest one, and much longer if another process uses its core. On two cores, one thread is
        as fast as two, and 2 to 7 times as fast if another process is busy (docs/lab/performance.md).
        """
        if self.runtime.device.type != "cpu":
            return nullcontext()
        is_small = self.weight_bytes * rows < SINGLE_THREAD_BYTES
        return using_threads(1 if is_small else max(1, default_threads() - 1))

    def padded_rows(self, rows: int) -> int:
        """The number of rows to compute. For CUDA graphs, a power of two or all rows, to limit the number of graphs."""
        return min(len(self.lengths), 1 << (rows - 1).bit_length()) if self.capturable else rows


def padded(model: GPT, multiple: int) -> GPT:
    """A model that shares the weights, and whose vocabulary is padded; the model itself if it needs no padding."""
    if len(model.lm_head.weight) % multiple:
        model = model_from_tensors(model.config, {name: p.detach() for name, p in model.named_parameters()}).eval()
        pad_vocabulary(model, multiple)
    return model


def next_logits(model: GPT, cache: KVCache, idx: Tensor) -> Tensor:
    """The logits after idx (B, T), (B, V) in float32."""
    return model(idx, kernel=cache)[0][:, 0].float()


@cache
def default_threads() -> int:
    """The number of torch's threads before the first step."""
    return torch.get_num_threads()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(default_threads())


def is_cast(model: GPT, runtime: Runtime) -> bool:
    """Whether the weights have the runtime's dtype, so that autocast is not needed."""
    return model.transformer.wte.weight.dtype == runtime.dtype


def is_capturable(model: GPT, runtime: Runtime) -> bool:
    """Whether steps are captured. A capture would keep the addresses of autocast's copies of the weights, which do not
    persist.
    """
    return runtime.device.type == "cuda" and is_cast(model, runtime)


# torch's cuDNN kernel is the fastest one on an H100, but takes 45 ms to plan each new length.
EAGER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def inference_context(model: GPT, runtime: Runtime) -> Iterator[None]:
    """The context of a forward pass that is not captured."""
    with ExitStack() as stack:
        if not is_cast(model, runtime):
            stack.enter_context(runtime.autocast())
        if runtime.device.type == "cuda":
            stack.enter_context(sdpa_kernel(EAGER_KERNELS))
        yield


def sampling_device(device: torch.device) -> torch.device:
    """The device on which to sample tokens: the model's, or the CPU if that cannot compute cumulative sums.

    Apple's GPUs do not support float64, and CUDA's cumsum raises an error under deterministic algorithms.
    """
    can_sample = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    return device if can_sample else torch.device("cpu")


@dataclass
class SampledRows:
    """Rows that are sampled in the same steps."""

    rows: list[int]
    index: Tensor  # the rows
    groups: list[tuple[Sampling, Tensor]]  # sampling settings, and the rows that have them as indices of `index`
    steps: int = 0  # of these rows
    captured: "CapturedFunction | None" = None

    @property
    def is_capturable(self) -> bool:
        """Whether the tensors of all settings persist; those of a bias are in a cache of limited size."""
        return not any(sampling.logit_bias for sampling, _ in self.groups)


class TokenSampler:
    """Samples the next token of each row of a batch. Ids >= vocab_size are never sampled.

    On CUDA, the operations of the same rows are captured after a few steps, because launching them takes longer than
    running them.
    """

    CHUNK = 1024  # random numbers to compute at once per row
    CAPTURE_STEP = 16  # of the same rows; a capture takes as long as several steps

    def __init__(self, rows: int, V: int, vocab_size: int | None, device: torch.device):
        self.shape, self.vocab_size, self.device = (rows, V), vocab_size or V, sampling_device(device)
        self.samples: dict[int, Sample] = {}  # by row
        self.steps = [0] * rows
        self.numbers = torch.zeros(rows, self.CHUNK, dtype=torch.float64, device=self.device)
        self.next_number = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.occurred: Tensor | None = None  # bool (B, V), for the repetition penalty
        self.counts: Tensor | None = None  # float32 (B, V), for the presence and frequency penalties
        self.last_rows: SampledRows | None = None

    def start(self, row: int, sample: Sample) -> None:
        """Set the sampling settings of a row."""
        self.samples[row], self.steps[row], self.last_rows = sample, 0, None
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
        return self.grouped(rows).index

    def grouped(self, rows: list[int]) -> SampledRows:
        """The rows by their sampling settings; the same object as in the last step if the rows are the same."""
        if self.last_rows is None or self.last_rows.rows != rows:
            indices: dict[Sampling, list[int]] = {}
            for i, row in enumerate(rows):
                indices.setdefault(self.samples[row].sampling, []).append(i)
            groups = [(sampling, torch.tensor(group, device=self.device)) for sampling, group in indices.items()]
            self.last_rows = SampledRows(list(rows), torch.tensor(rows, device=self.device), groups)
        return self.last_rows

    def sample(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Sample the next tokens of some rows, (rows, 1), from the logits of all rows, (B, V), on self.device."""
        self.add_numbers(rows)
        sampled_rows = self.grouped(rows)
        sampled_rows.steps += 1
        function = partial(self.tokens, sampled_rows.index, sampled_rows.groups)
        if self.device.type != "cuda" or sampled_rows.steps < self.CAPTURE_STEP or not sampled_rows.is_capturable:
            return function(logits)
        if sampled_rows.captured is None:
            sampled_rows.captured = CapturedFunction(function, logits)
        return sampled_rows.captured(logits)

    def tokens(self, index: Tensor, groups: list[tuple[Sampling, Tensor]], logits: Tensor) -> Tensor:
        """The next tokens of the rows `index`. See SampledRows. Reads nothing on the host."""
        logits = logits[index]  # (rows, V)
        logits[:, self.vocab_size :] = -torch.inf
        columns = self.next_number[index]
        self.next_number[index] = columns + 1
        uniform = self.numbers[index].gather(1, columns)
        tokens = torch.empty(len(index), 1, dtype=torch.long, device=self.device)
        for sampling, indices in groups:
            group = index[indices]
            occurred = self.occurred[group] if sampling.repetition_penalty != 1 else None
            counts = self.counts[group] if sampling.counts_tokens else None
            if sampling == GREEDY:
                ids = logits[indices].argmax(dim=-1, keepdim=True)
            else:
                probabilities = next_token_probabilities(logits[indices], sampling, occurred, counts)
                # NaN probabilities give id V, for which the embedding fails. On a GPU, no later operation would work.
                ids = sample_token(probabilities, uniform[indices]).clamp(max=self.vocab_size - 1)
            if occurred is not None:
                self.occurred[group[:, None], ids] = torch.ones_like(ids, dtype=torch.bool)  # True would be copied
            if counts is not None:
                self.counts[group[:, None], ids] += 1
            tokens[indices] = ids
        return tokens

    def add_numbers(self, rows: list[int]) -> None:
        """Count a step of these rows, and compute random numbers for those that have used theirs."""
        for row in rows:
            if self.steps[row] % self.CHUNK == 0:
                sample = self.samples[row]
                numbers = uniforms(sample.seed, [sample.number], self.steps[row], self.CHUNK)
                self.numbers[row], self.next_number[row] = numbers[0].to(self.device), 0
            self.steps[row] += 1


def to_host(ids: Tensor) -> Callable[[], list[int]]:
    """Return a function that fetches the ids (B, 1) as a list. On CUDA, it does not wait for later work."""
    if ids.device.type != "cuda":
        return ids[:, 0].tolist
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(ids.device))

    def fetch() -> list[int]:
        copied.synchronize()
        return host[:, 0].tolist()

    return fetch


class CapturedFunction:
    """A function of a tensor, captured as a CUDA graph. It can change other tensors, which must not move."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        """The function must have run before, so that allocations of the first call stay out of the graph."""
        self.x, self.function = x.clone(), function  # keeps the tensors of a partial function
        with torch.cuda.device(x.device):  # a new thread's current device is 0
            self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # By default, torch captures on one stream per process, on the device of the first capture. During a
            # capture, other threads may use CUDA: NCCL's watchdog polls its events.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.result = function(self.x)

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.result.clone()


class CUDAGraphDecoder:
    """Decodes one token per row with CUDA graphs, because launching the small kernels individually takes longer than
    running them. Each graph attends to a fixed number of positions, a multiple of GRANULARITY.
    """

    GRANULARITY = 256

    def __init__(self, new_logits: Callable[[Tensor], Tensor], cache: KVCache):
        """new_logits: returns the logits (B, V) after ids (B, 1) of the first rows, and updates the cache."""
        self.new_logits, self.cache = new_logits, cache
        self.graphs: dict[tuple[int, int], CapturedFunction] = {}  # by rows and positions

    def __call__(self, ids: Tensor) -> Tensor:
        B, block_size = len(ids), len(self.cache.slots)
        lengths = [length + 1 for length in self.cache.lengths[:B]] + self.cache.lengths[B:]
        capacity = min(-(-max(lengths[:B]) // self.GRANULARITY) * self.GRANULARITY, block_size)
        if (B, capacity) not in self.graphs:
            self.graphs[B, capacity] = self.capture(ids, capacity)
        logits = self.graphs[B, capacity](ids)
        self.cache.lengths = lengths
        return logits

    def capture(self, ids: Tensor, capacity: int) -> CapturedFunction:
        lengths, last = list(self.cache.lengths), self.cache.last.clone()
        self.cache.capacity = capacity
        self.new_logits(ids)  # warmup
        self.cache.last.copy_(last)
        captured = CapturedFunction(self.new_logits, ids)
        self.cache.capacity, self.cache.lengths = None, lengths
        return captured
