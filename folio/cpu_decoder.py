"""Decoding on a CPU: weights, buffers, and threads for the compiled step of folio/decode_step.py.

Dimensions: B rows, N new tokens, C channels, H heads, D head size, S slots of the cache (block_size), V vocabulary,
L layers.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from folio import compiled
from folio.cpu_records import RECORDS
from folio.generate import Sampling
from folio.quantize import pack_int4, quantize_int8
from folio.torch_decoder import TokenSampler
from model import GPT, alibi_slopes, angles, relative_bucket, sinusoids

FORMATS = ("float32", "bfloat16", "int8", "int4")  # of weights
FILTERS = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}  # that the compiled step has
LANES = 16  # floats that are computed together
ALIGNMENT = 64  # bytes of a cache line
PREFILL = 64  # tokens of prompts that are computed together


class CPUDecoder:
    """A GPT's weights in a format for the compiled step. Those that are in it already are the model's own, not copies.

    dtype: one of FORMATS. With int8 and int4, weights are rounded (folio/quantize.py) and activations are float32. The
    key-value cache is bfloat16, with float32 weights float32.
    """

    def __init__(self, model: GPT, dtype: str):
        self.config, self.dtype = model.config, dtype
        in_pairs = dtype == "bfloat16" and compiled.cpu_features().get("avx512bf16", False)
        format = "bfloat16 pairs" if in_pairs else dtype
        self.cache_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        cache_format = str(self.cache_dtype).removeprefix("torch.")
        self.run_step, self.run_help = compiled.function("step"), compiled.function("help")
        self.functions = {
            "linear": compiled.address("linear", format),
            "widen": compiled.address("widen", format),
            "score": compiled.address("linear", cache_format),
            "mix": compiled.address("mix", cache_format),
            "run_part": compiled.address("run_part"),
        }
        self.x_bytes = 2 if in_pairs else 4  # per input of a linear layer
        self.multiple = 2 * LANES if in_pairs or dtype == "int4" else LANES  # of inputs
        self.memory: list[Tensor] = []  # what addresses refer to
        network = model.transformer
        layers = [(block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj) for block in network.h]
        linears = [linear for layer in layers for linear in layer] + [model.lm_head]
        norms = [norm for block in network.h for norm in (block.ln_1, block.ln_2)] + [network.ln_f]
        self.matrices = np.array([self.matrix(linear) for linear in linears], RECORDS["matrix"])
        self.norms = np.array([(self.floats(norm.weight), self.floats(norm.bias)) for norm in norms], RECORDS["norm"])
        self.positions, self.bias = self.floats(position_vectors(model)), self.floats(bias_by_distance(model))
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

    def matrix(self, linear: nn.Linear) -> tuple[int, ...]:
        """The record of a linear layer. Its inputs are padded with zeros to a multiple of what is computed together."""
        outputs, inputs = linear.weight.shape
        weight, scales = linear.weight.detach(), None
        if self.dtype == "int8":
            weight, scales = quantize_int8(weight)
        elif self.dtype != "int4":
            weight = weight.to(getattr(torch, self.dtype))
        if padding := -inputs % self.multiple:
            weight = nn.functional.pad(weight, (0, padding))
        if self.dtype == "int4":
            weight = pack_int4(weight)
        stride = weight.shape[1] * weight.itemsize
        return self.keep(weight), stride, self.floats(scales), self.floats(linear.bias), inputs + padding, outputs

    def batch(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        sampling: Sampling,
        seed: int,
        vocab_size: int | None,
    ) -> "CPUBatch":
        batch = CPUBatch(self, len(prompts))
        if {field.name for field in fields(sampling)} != FILTERS:  # folio/generate.py was changed
            batch.sampler = TokenSampler(sampling, prompts, samples, seed, vocab_size, torch.device("cpu"))
        for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
            batch.set_sampling(row, prompt, sample, sampling, seed, vocab_size)
        return batch


@torch.no_grad()
def computes_model(model: GPT) -> bool:
    """Whether the compiled step computes what the model does, whose model.py or parts may have been changed.

    The parts are compared by their classes. A small model with large random weights is computed with both.
    """
    try:
        small = type(model)(replace(model.config, vocab_size=64, n_layer=2, n_head=2, n_embd=32, block_size=TOKENS))
        small.attend = model.attend
        return part_classes(small) == part_classes(model) and not has_hooks(model) and differs_by(small) < 1e-5
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
        batch.prefill({0: ids[:count].tolist()})
        expected = model(ids[None, :count])[0][0, -1]
        largest = max(largest, ((batch.logits[0] - expected).abs().max() / expected.abs().max()).item())
    return largest


@torch.no_grad()
def position_vectors(model: GPT) -> Tensor | None:
    """What is added to the token embedding at each position, (S, C), if the method adds anything."""
    if model.config.position == "learned":
        return model.transformer.wpe.weight
    if model.config.position == "sinusoidal":
        return sinusoids(torch.arange(model.config.block_size), model.config.n_embd)
    return None


@torch.no_grad()
def bias_by_distance(model: GPT) -> Tensor | None:
    """What is added to the scores of keys at each distance, (H, S), if the method adds anything."""
    distances = torch.arange(model.config.block_size)
    if model.config.position == "relative":
        return model.transformer.relative_bias.weight.float()[relative_bucket(distances)].T
    if model.config.position == "alibi":
        return -alibi_slopes(model.config.n_head, distances.device)[:, None] * distances
    return None


class CPUBatch:
    """Rows of tokens that are continued together: their key-value cache, sampling settings, and buffers."""

    steps_ahead = 0
    sampler: TokenSampler | None = None  # that of torch, for filters that the compiled step does not have

    def __init__(self, decoder: CPUDecoder, rows: int):
        config, self.decoder = decoder.config, decoder
        L, C, H, S, V = config.n_layer, config.n_embd, config.n_head, config.block_size, config.vocab_size
        N, D = max(rows, PREFILL), C // H
        width = D + -D % LANES  # the lanes of keys and values from D on are 0
        inputs, expanded_inputs = C + -C % decoder.multiple, 4 * C + -4 * C % decoder.multiple
        self.memory: list[Tensor] = []  # what addresses refer to
        self.cache = torch.zeros(L, 2, rows, H, S, width, dtype=decoder.cache_dtype)
        self.logits = torch.zeros(rows, V)
        self.rotation = torch.zeros(0, D)  # cosines and sines of each position so far
        self.rows = np.zeros(rows, RECORDS["row"])
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
            output=self.zeros(max(4 * N * C, rows * V, inputs)),
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

    def set_sampling(
        self, row: int, prompt: Sequence[int], sample: int, sampling: Sampling, seed: int, vocab_size: int | None
    ) -> None:
        """How the tokens of a row are sampled."""
        V = self.decoder.config.vocab_size
        occurred = 0
        if sampling.repetition_penalty != 1:
            self.memory.append(torch.zeros(V, dtype=torch.uint8))
            self.memory[-1][torch.tensor(list(prompt))] = 1
            occurred = self.memory[-1].data_ptr()
        settings = dict(
            vocab_size=min(V, vocab_size or V),
            temperature=sampling.temperature,
            top_k=min(sampling.top_k or V, V),
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            min_p=sampling.min_p or 0.0,
            repetition_penalty=sampling.repetition_penalty,
            occurred=occurred,
            seed=seed,
            sample=sample,
            drawn=0,
        )
        for name, value in settings.items():
            self.rows[name][row] = value

    @property
    def lengths(self) -> list[int]:
        return self.rows["length"].tolist()

    def prefill(self, contexts: dict[int, list[int]]) -> None:
        """Equal contexts are computed only once. Raises IndexError for ids that are not in the vocabulary."""
        V, S = self.decoder.config.vocab_size, self.decoder.config.block_size
        same: dict[tuple[int, ...], list[int]] = {}  # the rows of each context
        for row, context in contexts.items():
            assert len(context) <= S
            if context and not 0 <= min(context) <= max(context) < V:  # the compiled step reads whatever is there
                raise IndexError(f"a context has ids from {min(context)} to {max(context)}, the vocabulary {V} ids")
            same.setdefault(tuple(context), []).append(row)
            self.rows["length"][row] = len(context)
        self.extend_rotation(max(map(len, same)))
        tokens = [(id, row, position) for ids, (row, *_) in same.items() for position, id in enumerate(ids)]
        ends = {(row, len(ids) - 1) for ids, (row, *_) in same.items()}
        for start in range(0, len(tokens), PREFILL):
            part = tokens[start : start + PREFILL]
            last = [n for n, (_, row, position) in enumerate(part) if (row, position) in ends]
            self.tokens[: len(part)], self.predicted[: len(last)] = part, last
            self.run(len(part), appends=0, count=len(part), predicted_count=len(last), draws=0)
        for ids, (first, *others) in same.items():
            for row in others:
                self.cache[:, :, row, :, : len(ids)] = self.cache[:, :, first, :, : len(ids)]
                self.logits[row] = self.logits[first]

    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        return self.run_rows(rows, appends=0)

    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        if self.state["rotation"][0]:
            self.extend_rotation(max(self.lengths) + 1)
        return self.run_rows(rows, appends=1)

    def run_rows(self, rows: list[int], appends: int) -> Callable[[], list[int]]:
        """Append the tokens that were sampled last to these rows, if wanted, and sample the next ones."""
        self.sampled[: len(rows)] = rows
        self.run(len(rows), appends=appends, count=0, sampled_count=len(rows), draws=self.sampler is None)
        if self.sampler:
            self.rows["token"] = self.sampler.sample(self.logits.clone())[:, 0]
        tokens = self.rows["token"].tolist()
        return lambda: tokens

    def extend_rotation(self, positions: int) -> None:
        """Have the cosines and sines of so many positions, if the model rotates queries and keys."""
        if self.decoder.config.position == "rotary" and len(self.rotation) < positions:
            a = angles(torch.arange(2 * positions), self.rotation.shape[1])
            self.rotation = torch.cat([a.cos(), a.sin()], dim=-1)
            self.set(rotation=self.rotation.data_ptr())

    def run(self, tokens: int, **fields: int) -> None:
        """Run the compiled step for so many tokens with these fields of the state."""
        threads = choose_threads(self.decoder, tokens)
        self.set(threads=threads, now=time.perf_counter(), **fields)
        if threads > 1 and self.helping[0] < threads - 1:
            for helper in helpers(threads - 1):
                helper.wake(self)
        self.decoder.run_step(self.address)


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
