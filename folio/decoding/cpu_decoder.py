"""Decoding on a CPU: weights, buffers, and threads for the compiled step of folio/decoding/decode_step.py.

Dimensions: B rows, N new tokens, C channels, H heads, D head size, S slots of the cache (block_size), V vocabulary,
L layers.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from folio.decoding.cpu_records import RECORDS
from folio.decoding.kv_cache import Prefix
from folio.decoding.quantize import pack_int4, quantize_int8
from folio.decoding.sampling import Sample, Sampling, add_bias
from folio.decoding.torch_decoder import TokenSampler
from folio.machine import compiled
from folio.machine.compiled import LANES, CompiledModule, CompileError
from model import GPT, POSITIONS, GPTConfig, angles

DECODE_STEP = CompiledModule("folio.decoding.decode_step", imports=("folio.decoding.cpu_records", "folio.machine.simd"))
FORMATS = ("float32", "bfloat16", "int8", "int4")  # of weights
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, in the order of the step
ALIGNMENT = 64  # bytes of a cache line
PREFILL = 64  # tokens of prompts that are computed together


class CPUDecoder:
    """A GPT's weights in a format for the compiled step. Those that are in it already are the model's own, not copies.

    dtype: one of FORMATS. With int8 and int4, weights are rounded (quantize.py) and activations are float32. The
    key-value cache is bfloat16, with float32 weights float32. weights: the model's parameters by name, each read once;
    needed if the model has none.
    """

    def __init__(self, model: GPT, dtype: str, weights: Mapping[str, Tensor] | None = None):
        weights = dict(model.named_parameters()) if weights is None else weights
        self.config, self.dtype = model.config, dtype
        in_pairs = dtype == "bfloat16" and compiled.cpu_features().get("avx512bf16", False)
        format = "bfloat16 pairs" if in_pairs else dtype
        self.cache_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        cache_format = str(self.cache_dtype).removeprefix("torch.")
        self.run_step, self.run_help = compiled.function(DECODE_STEP, "step"), compiled.function(DECODE_STEP, "help")
        self.functions = {
            "linear": compiled.address(DECODE_STEP, "linear", format),
            "widen": compiled.address(DECODE_STEP, "widen", format),
            "score": compiled.address(DECODE_STEP, "linear", cache_format),
            "mix": compiled.address(DECODE_STEP, "mix", cache_format),
            "run_part": compiled.address(DECODE_STEP, "run_part"),
        }
        self.x_bytes = 2 if in_pairs else 4  # per input of a linear layer
        self.multiple = 2 * LANES if in_pairs or dtype == "int4" else LANES  # of inputs
        self.memory: list[Tensor] = []  # what addresses refer to
        blocks = [f"transformer.h.{i}" for i in range(self.config.n_layer)]
        linears = [f"{block}.{name}" for block in blocks for name in LINEARS]
        norms = [f"{block}.{name}" for block in blocks for name in ("ln_1", "ln_2")] + ["transformer.ln_f"]
        head = self.matrix(weights, "transformer.wte")  # the largest, while memory holds no other one
        self.matrices = np.array([self.matrix(weights, linear) for linear in linears] + [head], RECORDS["matrix"])
        of_norms = [[self.floats(weights.get(f"{norm}.{kind}")) for kind in ("weight", "bias")] for norm in norms]
        self.norms = np.array([tuple(addresses) for addresses in of_norms], RECORDS["norm"])
        self.positions = self.floats(position_vectors(self.config, weights))
        self.bias = self.floats(bias_by_distance(self.config, weights))
        self.weight_bytes = int((self.matrices["stride"] * self.matrices["outputs"]).sum())

    def keep(self, tensor: Tensor) -> int:
        """The address of the tensor's values, which stay in memory as long as the decoder does."""
        tensor = tensor.detach().contiguous()
        if tensor.data_ptr() % ALIGNMENT:
            tensor = tensor.clone()
        self.memory.append(tensor)
        return tensor.data_ptr()

    def floats(self, tensor: Tensor | None) -> int:
        """The address of the values in float32; 0 for None."""
        return 0 if tensor is None else self.keep(tensor.float())

    def matrix(self, weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        """The record of a linear layer. Its inputs are padded with zeros to a multiple of what is computed together."""
        weight, scales = weights[f"{name}.weight"].detach(), None
        outputs, inputs = weight.shape
        if self.dtype == "int8":
            weight, scales = quantize_int8(weight)
        elif self.dtype != "int4":
            weight = weight.to(getattr(torch, self.dtype))
        if padding := -inputs % self.multiple:
            weight = nn.functional.pad(weight, (0, padding))
        if self.dtype == "int4":
            weight = pack_int4(weight)
        stride = weight.shape[1] * weight.itemsize
        bias = self.floats(weights.get(f"{name}.bias"))
        return self.keep(weight), stride, self.floats(scales), bias, inputs + padding, outputs

    @property
    def row_bytes(self) -> int:
        """Keys and values, and logits with the numbers that they are filtered with."""
        keys = self.cache_dtype.itemsize * self.config.block_size * self.config.n_embd  # bytes of those of a layer
        return 2 * self.config.n_layer * keys + 20 * self.config.vocab_size

    def batch(self, rows: int, vocab_size: int | None = None) -> "CPUBatch":
        return CPUBatch(self, rows, vocab_size)


def why_torch_decodes(model: GPT) -> str | None:
    """Why the compiled step cannot decode this model; None if it can."""
    try:
        if not computes_filters():
            return "folio/decoding/sampling.py was changed"
        return None if computes_model(model) else "model.py or the model was changed"
    except CompileError as error:
        return str(error)


@torch.no_grad()
def computes_model(model: GPT) -> bool:
    """Whether the compiled step computes what the model does, whose model.py or parts may have been changed.

    The parts are compared by their classes. A small model with large random weights is computed with both.
    """
    try:
        small = type(model)(replace(model.config, vocab_size=64, n_layer=2, n_head=2, n_embd=32, block_size=TOKENS))
        small.kernel = model.kernel
        return part_classes(small) == part_classes(model) and not has_hooks(model) and differs_by(small) < 1e-5
    except CompileError:
        raise
    except Exception:  # whatever a changed model raises: it has other parts, or other arguments
        return False


TOKENS = 160  # more than relative positions distinguish, and than are prefilled together


def part_classes(model: GPT) -> set[type]:
    return {type(module) for module in model.modules() if not isinstance(module, nn.Dropout)}


def has_hooks(model: GPT) -> bool:
    """Whether something was registered that may change what a module computes. In eval mode, dropout does nothing."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Dropout)]
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def differs_by(model: GPT) -> float:
    """The largest difference of the compiled step's logits from the model's, relative to the largest logit.

    Embeddings are so small that the epsilon of the norms matters.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.eval().named_parameters():
        parameter.normal_(std=0.02 if "wte" in name or "wpe" in name else 0.3, generator=generator)
    ids = torch.randint(64, (TOKENS,), generator=generator)
    batch = CPUBatch(CPUDecoder(model, "float32"), 3)
    largest = 0.0
    for count in (1, 40, TOKENS):
        batch.prefill({0: ids[:count].tolist()}, {})
        expected = model(ids[None, :count])[0][0, -1]
        largest = max(largest, ((batch.logits[0] - expected).abs().max() / expected.abs().max()).item())
    return largest


SAMPLING_FIELDS = [
    *("repetition_penalty", "temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
]


@cache
def computes_filters() -> bool:
    """Whether the compiled step samples the tokens that sampling.py does, whose filters may have been changed.

    Both sample from random logits of a small vocabulary, with each filter and with all.
    """
    if [field.name for field in fields(Sampling)] != SAMPLING_FIELDS:
        return False
    try:
        decoder = CPUDecoder(GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_embd=16, block_size=1)), "float32")
        logits = 3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        each = [(), (1.5,), (1, 0), (1, 0.5), (1, 1, 5), (1, 1, None, 0.5), (1, 1, None, None, 0.2)]
        penalties = [(1, 1, None, None, None, 0.5), (1, 1, None, None, None, 0, 0.5), (1, 0, None, None, None, 1, -1)]
        last = (1.3, 0.7, 30, 0.9, 0.02, 0.3, 0.2, ((3, 1.5), (59, -2.0)))
        batch, sampler = decoder.batch(8, vocab_size=60), TokenSampler(8, 64, 60, torch.device("cpu"))
        batch.logits.copy_(logits)
        for values in (*each, *penalties, last):
            for row in range(8):
                sample = Sample([row], row, Sampling(*values), seed=1)
                batch.start(row, sample)
                sampler.start(row, sample)
            for _ in range(3):
                if batch.sample(list(range(8)))() != sampler.sample(logits.clone(), list(range(8)))[:, 0].tolist():
                    return False
        return True
    except CompileError:
        raise
    except Exception:  # as in computes_model
        return False


@torch.no_grad()
def position_vectors(config: GPTConfig, weights: Mapping[str, Tensor]) -> Tensor | None:
    """What is added to the token embedding at each position, (S, C), if the method adds anything."""
    method = POSITIONS[config.position](config)
    return method.embeddings(torch.arange(config.block_size), weights.get(f"transformer.{method.table_name}.weight"))


@torch.no_grad()
def bias_by_distance(config: GPTConfig, weights: Mapping[str, Tensor]) -> Tensor | None:
    """What is added to the scores of keys at each distance, (H, S), if the method adds anything."""
    if not config.biases_scores:
        return None
    method = POSITIONS[config.position](config)
    table = weights.get(f"transformer.{method.table_name}.weight")
    distances = torch.arange(config.block_size)[None, None, None]  # (1, 1, 1, S)
    return method.bias(distances, None if table is None else table.float())[0, :, 0]


class CPUBatch:
    """Rows of tokens that are continued together: their key-value cache, sampling settings, and buffers."""

    steps_ahead, chunk, keeps_rows = 0, PREFILL, True

    def __init__(self, decoder: CPUDecoder, rows: int, vocab_size: int | None = None):
        config, self.decoder = decoder.config, decoder
        L, C, H, S, V = config.n_layer, config.n_embd, config.n_head, config.block_size, config.vocab_size
        N, D = max(rows, PREFILL), C // H
        width = D + -D % LANES  # the lanes of keys and values from D on are 0, which adds nothing to a score
        inputs, expanded_inputs = C + -C % decoder.multiple, 4 * C + -4 * C % decoder.multiple
        self.vocab_size = vocab_size or V  # without padding
        self.memory: list[Tensor] = []  # what addresses refer to
        self.tables: dict[int, dict[str, Tensor]] = {}  # by row and field: a number for each token of the vocabulary
        self.cache = torch.empty(L, 2, rows, H, S, width, dtype=decoder.cache_dtype)
        self.cache[..., D:] = 0  # the rest is written before it is read
        self.logits = torch.zeros(rows, V)
        self.output = torch.zeros(max(4 * N * C, N * V, inputs))  # of linear layers, also the logits of N tokens
        self.rotation = torch.zeros(0, D)  # cosines and sines of positions, from rotation_first on
        self.rows = np.zeros(rows, RECORDS["row"])
        self.rows["vocab_size"] = self.vocab_size
        self.tokens = np.zeros(N, RECORDS["token"])
        self.predicted, self.sampled = np.zeros(N, np.int64), np.zeros(rows, np.int64)
        self.sync = torch.zeros(4, ALIGNMENT // 8, dtype=torch.int64)  # cache lines; the last counts helping threads
        self.state = np.zeros(1, RECORDS["state"])
        self.address, self.helping = self.state.ctypes.data, self.sync.numpy()[3]
        self.set(
            **decoder.functions,
            n_layer=L,
            n_head=H,
            n_embd=C,
            head_size=D,
            head_width=width,
            block_size=S,
            vocab_size=V,
            gelu_new=config.activation == "gelu_new",
            matrices=decoder.matrices.ctypes.data,
            norms=decoder.norms.ctypes.data,
            positions=decoder.positions,
            bias=decoder.bias,
            rows=rows,
            row_table=self.rows.ctypes.data,
            cache=self.cache.data_ptr(),
            cache_bytes=self.cache.itemsize,
            logits=self.logits.data_ptr(),
            tokens=self.tokens.ctypes.data,
            predicted=self.predicted.ctypes.data,
            sampled=self.sampled.ctypes.data,
            stream=self.zeros(N * C),
            x_bytes=decoder.x_bytes,
            normed=self.zeros(N * inputs),
            attended=self.zeros(N * inputs),
            x_stride=inputs * decoder.x_bytes,
            expanded=self.zeros(N * expanded_inputs),
            expanded_stride=expanded_inputs * decoder.x_bytes,
            qkv=self.zeros(3 * N * H * width),
            scores=self.zeros(4 * H * S),
            output=self.output.data_ptr(),
            filtered=self.zeros(3 * rows * V),
            sync=self.sync.data_ptr(),
        )

    def zeros(self, count: int) -> int:
        """The address of so many float32 zeros."""
        self.memory.append(torch.zeros(count))
        return self.memory[-1].data_ptr()

    def set(self, **fields: float) -> None:
        for name, value in fields.items():
            self.state[name] = value

    def start(self, row: int, sample: Sample) -> None:
        V, sampling = self.decoder.config.vocab_size, sample.sampling
        tables = {}
        if sampling.repetition_penalty != 1:
            tables["occurred"] = torch.zeros(V, dtype=torch.uint8)
            tables["occurred"][torch.tensor(sample.prompt)] = 1
        if sampling.counts_tokens:
            tables["counts"] = torch.zeros(V)
        if sampling.logit_bias:
            tables["logit_bias"] = add_bias(torch.zeros(V), sampling.logit_bias)
        self.tables[row] = tables
        settings = dict(
            **{name: tables[name].data_ptr() if name in tables else 0 for name in ("occurred", "counts", "logit_bias")},
            temperature=sampling.temperature,
            top_k=min(sampling.top_k or V, self.vocab_size),
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            min_p=sampling.min_p or 0.0,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sample.seed,
            sample=sample.number,
            drawn=0,
        )
        for name, value in settings.items():
            self.rows[name][row] = value

    @property
    def lengths(self) -> list[int]:
        return self.rows["length"].tolist()

    def prefill(self, contexts: dict[int, list[int]], prefixes: dict[int, Prefix]) -> None:
        """Raises IndexError for ids that are not in the vocabulary."""
        for row, (source, count) in prefixes.items():
            if row != source:
                self.cache[:, :, row, :, :count] = self.cache[:, :, source, :, :count]
        tokens, ends = [], set()
        for row, context in contexts.items():
            count = prefixes[row].length if row in prefixes else 0
            tokens += self.new_tokens(row, context, count)
            ends.add((row, len(context) - 1))
        for start in range(0, len(tokens), PREFILL):
            part = tokens[start : start + PREFILL]
            self.run_tokens(part, [n for n, (_, row, position) in enumerate(part) if (row, position) in ends])

    def score(self, row: int, context: list[int], count: int) -> Tensor:
        tokens, logits = self.new_tokens(row, context, count), []
        for start in range(0, len(tokens), PREFILL):
            part = tokens[start : start + PREFILL]
            self.run_tokens(part, list(range(len(part))))
            logits.append(self.output[: len(part) * self.logits.shape[1]].view(len(part), -1).clone())
        return torch.cat(logits)

    def new_tokens(self, row: int, context: list[int], count: int) -> list[tuple[int, int, int]]:
        """The records of a context's tokens but for the first `count`, which the row has already."""
        V, S = self.decoder.config.vocab_size, self.decoder.config.block_size
        assert count < len(context) <= S
        if not 0 <= min(context) <= max(context) < V:  # the compiled step reads whatever is there
            raise IndexError(f"a context has ids from {min(context)} to {max(context)}, the vocabulary {V} ids")
        self.rows["length"][row] = len(context)
        self.rotate_positions(0, len(context))
        return [(context[position], row, position) for position in range(count, len(context))]

    def run_tokens(self, tokens: list[tuple[int, int, int]], predicted: list[int]) -> None:
        """Compute the keys and values of at most PREFILL tokens, and the logits after some of them, by their places."""
        self.tokens[: len(tokens)], self.predicted[: len(predicted)] = tokens, predicted
        self.run(len(tokens), appends=0, count=len(tokens), predicted_count=len(predicted), sampled_count=0)

    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        return self.run_rows(rows, appends=0)

    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        if self.decoder.config.position == "rotary":
            lengths = self.rows["length"][rows]
            self.rotate_positions(lengths.min(), lengths.max() + 1)
        return self.run_rows(rows, appends=1)

    def run_rows(self, rows: list[int], appends: int) -> Callable[[], list[int]]:
        """Append the tokens that were sampled last to these rows, if wanted, and sample the next ones."""
        self.sampled[: len(rows)] = rows
        self.run(len(rows), appends=appends, count=0, sampled_count=len(rows))
        tokens = self.rows["token"].tolist()
        return lambda: tokens

    def rotate_positions(self, first: int, end: int) -> None:
        """Have the cosines and sines of positions first ... end - 1, if the model rotates queries and keys.

        While the context slides, positions grow, and those of the cached keys are not needed any more.
        """
        start = self.state["rotation_first"][0]
        if self.decoder.config.position == "rotary" and not start <= first <= end <= start + len(self.rotation):
            a = angles(torch.arange(first, end + self.decoder.config.block_size), self.rotation.shape[1])
            self.rotation = torch.cat([a.cos(), a.sin()], dim=-1)
            self.set(rotation=self.rotation.data_ptr(), rotation_first=first)

    def run(self, tokens: int, **fields: int) -> None:
        """Run the compiled step for so many tokens with these fields of the state."""
        threads = choose_threads(self.decoder, tokens)
        self.set(threads=threads, now=time.perf_counter(), **fields)
        if threads > 1 and self.helping[0] < threads - 1:
            for helper in helpers(threads - 1):
                helper.wake(self)
        self.decoder.run_step(self.address)  # decode_step.step


SMALL = 1.5e6  # bytes of weights times tokens, below which threads would mostly wait for each other


def choose_threads(decoder: CPUDecoder, tokens: int) -> int:
    """As many threads as torch uses, or one for little work."""
    return 1 if decoder.weight_bytes * tokens < SMALL else torch.get_num_threads()


class Helper(threading.Thread):
    """A thread that takes part in steps. It sleeps when there has been nothing to do for a moment."""

    def __init__(self):
        super().__init__(daemon=True)
        self.batch: CPUBatch | None = None
        self.awake = threading.Event()
        self.ends = False
        self.start()

    def wake(self, batch: CPUBatch) -> None:
        """Take part in the steps of the batch, after those of another one."""
        self.batch = batch
        self.awake.set()

    def end(self) -> None:
        self.ends = True
        self.awake.set()
        self.join(timeout=1.0)

    def run(self) -> None:
        while not self.ends:
            self.awake.wait()
            self.awake.clear()
            batch, self.batch = self.batch, None
            if batch is not None:
                batch.decoder.run_help(batch.address)
            del batch


_helpers: dict[int, list[Helper]] = {}  # by process: the threads of a parent do not exist in its child


def helpers(count: int) -> list[Helper]:
    """So many threads, which all decoders share."""
    ours = _helpers.setdefault(os.getpid(), [])
    if not ours:
        atexit.register(end_helpers)
    while len(ours) < count:
        ours.append(Helper())
    return ours[:count]


def end_helpers() -> None:
    """End the threads before the interpreter does, which could not: they may be outside of Python."""
    for helper in _helpers.pop(os.getpid(), []):
        helper.end()
