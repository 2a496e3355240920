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

from folio.decoding.cpu_structs import STRUCTS
from folio.decoding.kv_cache import Prefix
from folio.decoding.quantize import pack_int4, quantize_int8
from folio.decoding.sampling import Sample, Sampling, add_bias
from folio.decoding.torch_decoder import TokenSampler
from folio.machine import compiled
from folio.machine.compiled import LANES, CompiledModule, CompileError
from model import GPT, POSITIONS, GPTConfig, angles

DECODE_STEP = CompiledModule(
    "folio.decoding.decode_step",
    imports=("folio.decoding.cpu_structs", "folio.machine.elementary", "folio.machine.simd"),
)
FORMATS = ("float32", "bfloat16", "int8", "int4")  # of weights
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, in the order of the step
ALIGNMENT = 64  # bytes of a cache line
PREFILL = 64  # prompt tokens to compute at once


class CPUDecoder:
    """A GPT's weights in a format for the compiled step. Weights that already have this format are not copied.

    dtype: one of FORMATS. With int8 and int4, weights are rounded (quantize.py) and activations are float32. The
    key-value cache is float32 for float32 weights, otherwise bfloat16. weights: the model's parameters by name, each
    read once; required if the model is on the meta device.
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
        self.multiple = 2 * LANES if in_pairs or dtype == "int4" else LANES  # to which inputs are padded
        self.memory: list[Tensor] = []  # keeps the tensors behind addresses alive
        blocks = [f"transformer.h.{i}" for i in range(self.config.n_layer)]
        linears = [f"{block}.{name}" for block in blocks for name in LINEARS]
        norms = [f"{block}.{name}" for block in blocks for name in ("ln_1", "ln_2")] + ["transformer.ln_f"]
        head = self.matrix(weights, "transformer.wte")  # the largest one first, to limit peak memory
        self.matrices = np.array([self.matrix(weights, linear) for linear in linears] + [head], STRUCTS["matrix"])
        norm_structs = [(self.floats(weights[f"{n}.weight"]), self.floats(weights.get(f"{n}.bias"))) for n in norms]
        self.norms = np.array(norm_structs, STRUCTS["norm"])
        self.positions = self.floats(position_embeddings(self.config, weights))
        self.bias = self.floats(bias_by_distance(self.config, weights))
        self.weight_bytes = int((self.matrices["stride"] * self.matrices["outputs"]).sum())

    def keep(self, tensor: Tensor) -> int:
        """Keep the tensor's values in memory as long as the decoder, and return their address."""
        tensor = tensor.detach().contiguous()
        if tensor.data_ptr() % ALIGNMENT:
            tensor = tensor.clone()
        self.memory.append(tensor)
        return tensor.data_ptr()

    def floats(self, tensor: Tensor | None) -> int:
        """The address of the values in float32; 0 for None."""
        return 0 if tensor is None else self.keep(tensor.float())

    def matrix(self, weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        """The struct of a linear layer. Its inputs are padded with zeros to a multiple of self.multiple."""
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
        """Bytes of keys, values, logits, and the scratch memory of the filters."""
        layer_keys = self.cache_dtype.itemsize * self.config.block_size * self.config.n_embd  # bytes per layer
        return 2 * self.config.n_layer * layer_keys + 20 * self.config.vocab_size

    def batch(self, rows: int, vocab_size: int | None = None) -> "CPUBatch":
        return CPUBatch(self, rows, vocab_size)


def unsupported_reason(model: GPT) -> str | None:
    """The reason why the compiled step cannot decode this model; None if it can."""
    try:
        if not computes_model(model):  # first: the filters are compared with the logits of a model
            return "model.py or the model was changed"
        return None if computes_filters() else "folio/decoding/sampling.py was changed"
    except CompileError as error:
        return str(error)


@torch.no_grad()
def computes_model(model: GPT) -> bool:
    """Whether the compiled step computes the same as the model: model.py or the model's modules may have been changed.

    Compares the classes of the modules, and the logits of a small model with large random weights.
    """
    try:
        sizes = dict(vocab_size=64, n_layer=2, n_head=2, n_embd=32, block_size=TOKENS)
        small = type(model)(replace(model.config, **sizes, document_token=None))  # a row holds one document
        if module_classes(small) != module_classes(model) or has_hooks(model) or max_error(small) >= 1e-5:
            return False  # with the definition of attention, which may have been changed, as may the model's kernel
        small.kernel = model.kernel
        return max_error(small) < 1e-5
    except CompileError:
        raise
    except Exception:  # a changed model may have other modules or arguments, and raise anything
        return False


TOKENS = 160  # more than PREFILL, and than the distances that relative positions distinguish


def module_classes(model: GPT) -> set[type]:
    return {type(module) for module in model.modules() if not isinstance(module, nn.Dropout)}


def has_hooks(model: GPT) -> bool:
    """Whether hooks may change the output of a module, except dropout, which does nothing in eval mode."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Dropout)]
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def max_error(model: GPT) -> float:
    """The maximum difference between the logits of the compiled step and the model, relative to the largest logit.

    Gives the model random weights. Embeddings are so small that the epsilon of the norms matters.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.eval().named_parameters():
        parameter.normal_(std=0.02 if "wte" in name or "wpe" in name else 0.3, generator=generator)
    ids = torch.randint(64, (TOKENS,), generator=generator)
    batch = CPUBatch(CPUDecoder(model, "float32"), 3)
    error = 0.0
    for count in (1, 40, TOKENS):
        batch.prefill({0: ids[:count].tolist()}, {})
        expected = model(ids[None, :count])[0][0, -1]
        error = max(error, ((batch.logits[0] - expected).abs().max() / expected.abs().max()).item())
    return error


SAMPLING_FIELDS = [
    *("repetition_penalty", "temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
]


@cache
def computes_filters() -> bool:
    """Whether the compiled step samples the same tokens as sampling.py, whose filters may have been changed.

    Both sample from random logits of a small vocabulary, with each filter and with all filters.
    """
    if [field.name for field in fields(Sampling)] != SAMPLING_FIELDS:
        return False
    try:
        decoder = CPUDecoder(GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_embd=16, block_size=1)), "float32")
        logits = 3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        filters = [(), (1.5,), (1, 0), (1, 0.5), (1, 1, 5), (1, 1, None, 0.5), (1, 1, None, None, 0.2)]
        penalties = [(1, 1, None, None, None, 0.5), (1, 1, None, None, None, 0, 0.5), (1, 0, None, None, None, 1, -1)]
        combined = (1.3, 0.7, 30, 0.9, 0.02, 0.3, 0.2, ((3, 1.5), (59, -2.0)))
        batch, sampler = decoder.batch(8, vocab_size=60), TokenSampler(8, 64, 60, torch.device("cpu"))
        batch.logits.copy_(logits)
        for values in (*filters, *penalties, combined):
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
    except Exception:  # see computes_model
        return False


@torch.no_grad()
def position_embeddings(config: GPTConfig, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The embedding of each position, (S, C), or None if the position encoding has none."""
    encoding = POSITIONS[config.position](config)
    table = weights.get(f"transformer.{encoding.table_name}.weight")
    return encoding.embeddings(torch.arange(config.block_size), table)


@torch.no_grad()
def bias_by_distance(config: GPTConfig, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The bias of the attention scores at each distance, (H, S), or None if the position encoding has none."""
    encoding = POSITIONS[config.position](config)
    if not encoding.biases_scores:
        return None
    table = weights.get(f"transformer.{encoding.table_name}.weight")
    distances = torch.arange(config.block_size)[None, None, None]  # (1, 1, 1, S)
    return encoding.bias(distances, None if table is None else table.float())[0, :, 0]


class CPUBatch:
    """The rows of a batch: their key-value cache, sampling settings, and buffers."""

    steps_ahead, chunk, keeps_rows = 0, PREFILL, True

    def __init__(self, decoder: CPUDecoder, rows: int, vocab_size: int | None = None):
        config, self.decoder = decoder.config, decoder
        L, C, H, S, V = config.n_layer, config.n_embd, config.n_head, config.block_size, config.vocab_size
        N, D = max(rows, PREFILL), C // H
        width = D + -D % LANES  # keys and values are padded with zeros, which add nothing to a score
        inputs, expanded_inputs = C + -C % decoder.multiple, 4 * C + -4 * C % decoder.multiple
        self.vocab_size = vocab_size or V  # without padding
        self.memory: list[Tensor] = []  # keeps the tensors behind addresses alive
        self.tables: dict[int, dict[str, Tensor]] = {}  # by row and field: a number for each token of the vocabulary
        self.cache = torch.empty(L, 2, rows, H, S, width, dtype=decoder.cache_dtype)
        self.cache[..., D:] = 0  # the other values are written before they are read
        self.logits = torch.zeros(rows, V)
        self.output = torch.zeros(max(4 * N * C, N * V, inputs))  # of linear layers, also the logits of N tokens
        self.rotation = torch.zeros(0, D)  # cosines and sines of positions rotation_first, rotation_first + 1, ...
        self.rows = np.zeros(rows, STRUCTS["row"])
        self.rows["vocab_size"] = self.vocab_size
        self.tokens = np.zeros(N, STRUCTS["token"])
        self.predicted, self.sampled = np.zeros(N, np.int64), np.zeros(rows, np.int64)
        self.sync = torch.zeros(4, ALIGNMENT // 8, dtype=torch.int64)  # cache lines; see decode_step.py
        self.state = np.zeros(1, STRUCTS["state"])
        self.address, self.active_helpers = self.state.ctypes.data, self.sync.numpy()[3]
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
        """Allocate `count` float32 zeros, and return their address."""
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

    def score(self, context: list[int]) -> Tensor:
        """Fill row 0 with ids at positions 0, 1, ... Returns the logits after each of these T ids: (T, V)."""
        tokens, logits = self.new_tokens(0, context, 0), []
        for start in range(0, len(tokens), PREFILL):
            part = tokens[start : start + PREFILL]
            self.run_tokens(part, list(range(len(part))))
            logits.append(self.output[: len(part) * self.logits.shape[1]].view(len(part), -1).clone())
        return torch.cat(logits)

    def new_tokens(self, row: int, context: list[int], count: int) -> list[tuple[int, int, int]]:
        """The structs of a context's tokens, without the first `count`, which are cached."""
        V, S = self.decoder.config.vocab_size, self.decoder.config.block_size
        assert count < len(context) <= S
        if not 0 <= min(context) <= max(context) < V:  # the compiled step does not check bounds
            raise IndexError(f"a context has ids from {min(context)} to {max(context)}, the vocabulary {V} ids")
        self.rows["length"][row] = len(context)
        self.rotate_positions(0, len(context))
        return [(context[position], row, position) for position in range(count, len(context))]

    def run_tokens(self, tokens: list[tuple[int, int, int]], predicted: list[int]) -> None:
        """Compute the keys and values of at most PREFILL tokens, and logits after those with indices `predicted`."""
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
        """Sample the next tokens of these rows. appends: whether to append the last sampled tokens first, 0 or 1."""
        self.sampled[: len(rows)] = rows
        self.run(len(rows), appends=appends, count=0, sampled_count=len(rows))
        tokens = self.rows["token"].tolist()
        return lambda: tokens

    def rotate_positions(self, first: int, end: int) -> None:
        """Make sure that `rotation` covers positions first ... end - 1, if the model rotates queries and keys.

        Positions grow while the context slides. Those of cached keys are no longer needed.
        """
        start = self.state["rotation_first"][0]
        if self.decoder.config.position == "rotary" and not start <= first <= end <= start + len(self.rotation):
            a = angles(torch.arange(first, end + self.decoder.config.block_size), self.rotation.shape[1])
            self.rotation = torch.cat([a.cos(), a.sin()], dim=-1)
            self.set(rotation=self.rotation.data_ptr(), rotation_first=first)

    def run(self, tokens: int, **fields: int) -> None:
        """Run the compiled step for this number of tokens with these fields of the state."""
        threads = choose_threads(self.decoder, tokens)
        self.set(threads=threads, now=time.perf_counter(), **fields)
        if threads > 1 and self.active_helpers[0] < threads - 1:
            for helper in get_helpers(threads - 1):
                helper.wake(self)
        self.decoder.run_step(self.address)  # decode_step.step


SINGLE_THREAD_BYTES = 1.5e6  # of weights times tokens; in smaller steps, threads would mostly wait for each other


def choose_threads(decoder: CPUDecoder, tokens: int) -> int:
    """The number of torch's threads, or 1 for a small step."""
    return 1 if decoder.weight_bytes * tokens < SINGLE_THREAD_BYTES else torch.get_num_threads()


class Helper(threading.Thread):
    """A thread that runs parts of steps. It sleeps after a moment without work."""

    def __init__(self):
        super().__init__(daemon=True)
        self.batch: CPUBatch | None = None
        self.wake_event = threading.Event()
        self.stopping = False
        self.start()

    def wake(self, batch: CPUBatch) -> None:
        """Run parts of the batch's steps, after those of the previous batch."""
        self.batch = batch
        self.wake_event.set()

    def stop(self) -> None:
        self.stopping = True
        self.wake_event.set()
        self.join(timeout=1.0)

    def run(self) -> None:
        while not self.stopping:
            self.wake_event.wait()
            self.wake_event.clear()
            batch, self.batch = self.batch, None
            if batch is not None:
                batch.decoder.run_help(batch.address)
            del batch


_helpers: dict[int, list[Helper]] = {}  # by process, because a forked child does not have its parent's threads


def get_helpers(count: int) -> list[Helper]:
    """Return `count` threads, which all decoders share. Starts missing ones."""
    helpers = _helpers.setdefault(os.getpid(), [])
    if not helpers:
        atexit.register(stop_helpers)
    while len(helpers) < count:
        helpers.append(Helper())
    return helpers[:count]


def stop_helpers() -> None:
    """Stop the threads at exit, while the interpreter still runs: they may be in compiled code."""
    for helper in _helpers.pop(os.getpid(), []):
        helper.stop()
