"""Text out of a model: sampling filters, prefill, cached decoding, stops.

Dimensions: B batch (rows), T time, V vocabulary.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from folio import UserError
from folio.randomness import hash64
from folio.runtime import Runtime
from folio.tokenizer import Tokenizer

# --- filters ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. The filters apply in this order, which is that of transformers."""

    repetition_penalty: float = 1.0  # divides the logits of tokens that have occurred; 1: off (Keskar et al. 2019)
    temperature: float = 1.0  # divides all logits; 0: the likeliest, always
    top_k: int | None = None  # only the k likeliest
    top_p: float | None = None  # only the fewest likeliest whose probabilities sum to p or more
    min_p: float | None = None  # only those at least this times as probable as the likeliest


def penalize(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Logits (..., V) with those of tokens that `occurred`, (..., V), divided by the penalty, or times it below 0.

    "CTRL" (Keskar et al. 2019), section 4.1, as transformers has it.
    """
    return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits (..., V) with all but the k largest at -inf; those equal to the k-th largest stay."""
    if k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (..., V) with all at -inf but the fewest likeliest tokens whose probabilities sum to p or more.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". The likeliest always stays.
    """
    ordered, order = logits.sort(descending=True, dim=-1)
    probabilities = ordered.softmax(dim=-1)
    dropped = probabilities.cumsum(dim=-1) - probabilities >= p  # by the sum over the tokens that are likelier
    dropped[..., 0] = False  # also for a p so small that it is 0 in float32
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Logits (..., V) with all at -inf that are less than p times as probable as the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def next_token_probabilities(logits: Tensor, sampling: Sampling, occurred: Tensor | None = None) -> Tensor:
    """The distribution that the next token is drawn from: (..., V) logits to (..., V) probabilities.

    occurred: which tokens stand in the text so far, for the penalty. temperature=0 puts all on the likeliest.
    """
    if occurred is not None and sampling.repetition_penalty != 1:
        logits = penalize(logits, occurred, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits.softmax(dim=-1)


def uniforms(seed: int, samples: Sequence[int], first: int, count: int) -> Tensor:
    """Numbers in [0, 1), float64: for each sample (row) and position first .. first + count - 1 (column) its own.

    Each follows from (seed, sample, position) alone, so that sample k is sample k in any batch.
    """
    rows = np.array(samples, dtype=np.uint64)[:, None]
    bits = hash64(seed, rows, np.arange(first, first + count, dtype=np.uint64)) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def drawing_device(device: torch.device) -> torch.device:
    """Where tokens are drawn for a model on `device`: there, or on the CPU for devices without float64 (Apple's)."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def sample_token(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probabilities, (B, V), exceed each row's number in [0, 1), (B, 1): (B, 1) ids.

    `uniform` is on the drawing_device of the probabilities' device, the ids are on the latter.
    """
    sums = probabilities.to(uniform.device).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).to(probabilities.device)


# --- tokens -----------------------------------------------------------------------------------------------------------


LATE = {"cuda": 1}  # steps that are launched before a step's tokens are fetched: a GPU does not wait for the host


class Step(NamedTuple):
    """What came of one step: a token a row, None for one that has ended, and the logits that it was drawn from."""

    tokens: list[int | None]
    logits: Tensor  # (B, V), float32, before any filter


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    runtime: Runtime,
    *,
    max_new_tokens: int | None,
    sampling: Sampling | None = None,
    vocab_size: int | None = None,
    eot: int | None = None,
    seed: int = 1337,
    samples: Sequence[int] | None = None,
    stride: int | None = None,
    ended: list[bool] | None = None,
) -> Iterator[Step]:
    """Yield the tokens that follow each prompt (at least one id each), a step at a time, until all rows have ended.

    A row ends before the id `eot`; when the caller sets its entry of `ended`; or after max_new_tokens (None: as many as
    fit into block_size after its own prompt, at least one). Ids from `vocab_size` on, a model's padding, are never
    drawn. Row b is sample samples[b] (default b): its draws follow from (seed, sample, position), in whatever batch.
    Puts the model into eval mode.

    The model sees at most block_size tokens. When a row's context is full, its newest block_size - stride tokens are
    read again at positions 0 and on, with the new one: stride=1 is a window that moves by one, at the cost of a whole
    window per token; the default, half of block_size, costs half a window for that many tokens.
    """
    model.eval()
    sampling = sampling or Sampling()
    block_size = model.config.block_size
    keep = block_size - min(stride or block_size // 2 or 1, block_size)
    contexts = [list(prompt)[-block_size:] for prompt in prompts]
    samples = range(len(contexts)) if samples is None else samples
    ended = [False] * len(contexts) if ended is None else ended
    limits = [max(1, block_size - len(prompt)) if max_new_tokens is None else max_new_tokens for prompt in prompts]
    most = max(limits)
    # One query is read against many keys 2 to 5 times as fast in float32 as in bfloat16 by torch's kernel for CPUs.
    dtype = torch.float32 if runtime.device.type == "cpu" else runtime.dtype
    cache = model.new_cache(len(contexts), dtype)
    occurred = None
    if sampling.repetition_penalty != 1:
        occurred = torch.zeros(len(contexts), model.config.vocab_size, dtype=torch.bool, device=runtime.device)
        for row, prompt in enumerate(prompts):
            occurred[row, torch.tensor(list(prompt))] = True
    on_cuda = runtime.device.type == "cuda"
    cast = model.transformer.wte.weight.dtype == runtime.dtype  # autocast's copies would not outlive a capture
    forward = CUDAGraphDecoder(model, cache) if on_cuda and cast else partial(model.forward, cache=cache)

    def launched() -> Iterator[tuple[Callable[[], list[list[int]]], Tensor]]:
        """For each step a way to get its tokens, [[id], ...], and the logits that they were drawn from."""
        logits = prefill(model, cache, dict(enumerate(contexts)), runtime)  # (B, V)
        if logits.isnan().any():  # of which no token can be drawn
            raise UserError(
                "the model computes NaN: use another checkpoint, or --dtype=float32 if its weights are good"
            )
        ahead = 1024  # steps whose numbers are made at a time
        unread = []  # the steps that are not yet in `contexts`
        for step in range(most):
            if vocab_size is not None and vocab_size < logits.shape[-1]:
                logits[:, vocab_size:] = -torch.inf
            if sampling.temperature == 0 and occurred is None:
                chosen = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                if step % ahead == 0:
                    numbers = uniforms(seed, samples, step, min(ahead, most - step))
                    numbers = numbers.to(drawing_device(runtime.device)).T[:, :, None].unbind()  # (B, 1) for each step
                probabilities = next_token_probabilities(logits, sampling, occurred)  # (B, V)
                chosen = sample_token(probabilities, numbers[step % ahead])  # (B, 1)
            if occurred is not None:
                occurred.scatter_(1, chosen, True)
            unread.append(to_host(chosen))
            yield unread[-1], logits
            if step + 1 == most:
                return
            full = [row for row, length in enumerate(cache.lengths) if length == block_size]
            if full:
                for tokens in unread:
                    contexts[:] = [context + token for context, token in zip(contexts, tokens(), strict=True)]
                unread.clear()
                for row in full:  # all but the newest token, which is read below; nothing for a row that has ended
                    contexts[row] = contexts[row][len(contexts[row]) - 1 - (0 if ended[row] else keep) :]
                prefill(model, cache, {row: contexts[row][:-1] for row in full}, runtime)
            with computing(model, runtime):
                logits = forward(chosen)[0][:, 0].float()

    waiting: deque = deque()
    late = LATE.get(runtime.device.type, 0)
    count = 0  # tokens of each row so far
    for launch in chain(launched(), [None] * late):
        waiting.append(launch)
        if len(waiting) <= late:
            continue
        fetch, logits = waiting.popleft()
        tokens = [token for (token,) in fetch()]
        for row, token in enumerate(tokens):
            ended[row] = ended[row] or token == eot
        if all(ended):
            return
        yield Step([None if end else token for token, end in zip(tokens, ended, strict=True)], logits)
        count += 1
        for row, limit in enumerate(limits):
            ended[row] = ended[row] or count >= limit
        if all(ended):
            return


def to_host(chosen: Tensor) -> Callable[[], list[list[int]]]:
    """A way to get the ids (B, 1) as lists. On CUDA it waits for them alone, not for what was launched behind them."""
    if chosen.device.type != "cuda":
        return chosen.tolist
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def fetch() -> list[list[int]]:
        copied.synchronize()
        return host.tolist()

    return fetch


class CUDAGraphDecoder:
    """The model's step of one token a row on CUDA, captured as graphs: one by one, its small kernels would wait for
    Python. Each graph is for a number of positions that are read, a multiple of READ.
    """

    READ = 256

    def __init__(self, model: nn.Module, cache: Any):
        self.model, self.cache = model, cache
        self.ids = torch.zeros(len(cache.lengths), 1, dtype=torch.long, device=cache.kv.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, ids: Tensor) -> tuple[Tensor, None]:
        """As the model's forward: (B, 1) ids to logits (B, 1, V) and no loss."""
        self.ids.copy_(ids)
        lengths = [length + 1 for length in self.cache.lengths]
        reach = min(-(-max(lengths) // self.READ) * self.READ, self.model.config.block_size)
        if reach not in self.graphs:
            self.graphs[reach] = self.capture(reach)
        graph, logits = self.graphs[reach]
        graph.replay()
        self.cache.lengths = lengths
        return logits.clone(), None

    def capture(self, reach: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        lengths, at = self.cache.lengths, self.cache.at.clone()
        self.cache.reach = reach
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a kernel allocates at its first call must not be in the graph
            self.model.forward(self.ids, cache=self.cache)
        torch.cuda.current_stream().wait_stream(stream)
        self.cache.at.copy_(at)
        with torch.cuda.graph(graph):
            logits, _ = self.model.forward(self.ids, cache=self.cache)
        self.cache.reach, self.cache.lengths = None, lengths
        return graph, logits


def prefill(model: nn.Module, cache: Any, contexts: dict[int, list[int]], runtime: Runtime) -> Tensor:
    """Read a whole context, which may be empty, into each of these rows of the cache; the others stay as they are.

    Returns the logits after each context, (B, V) in float32, zeros in rows that read nothing. Contexts of one length
    are read together, and those that are the same only once.
    """
    logits = torch.zeros(len(cache.lengths), model.config.vocab_size, device=runtime.device)
    for length in sorted({len(context) for context in contexts.values()} - {0}):
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, context in contexts.items():
            if len(context) == length:
                rows.setdefault(tuple(context), []).append(row)
        part = model.new_cache(len(rows), cache.kv.dtype)
        with computing(model, runtime):
            found, _ = model(torch.tensor(list(rows), device=runtime.device), cache=part)  # (n, 1, V)
        for n, same in enumerate(rows.values()):
            cache.kv[:, :, same, :, :length] = part.kv[:, :, n : n + 1, :, :length]
            logits[same] = found[n, -1].float()
    lengths = dict(enumerate(cache.lengths)) | {row: len(context) for row, context in contexts.items()}
    cache.set_lengths(list(lengths.values()))
    return logits


class PackedLinear(nn.Module):
    """A linear layer with its weights laid out by oneDNN for its own kernels, as torch.compile would do it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """A linear layer with its weights in int8 and a scale for each output; activations stay bfloat16.

    torch's kernel (aten/src/ATen/native/cpu/int8mm_kernel.cpp) reads 16 inputs at a time, from aligned addresses, and
    checks nothing: it wants contiguous activations and a multiple of 16 inputs. The number of outputs may be any.
    """

    ALIGNMENT = 16

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
        self.padding = -linear.in_features % self.ALIGNMENT  # inputs that are 0, and add nothing
        self.weight = pad((weight / scale[:, None]).round().to(torch.int8), (0, self.padding))
        self.scale, self.bias = scale.bfloat16(), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.padding:
            rows = pad(rows, (0, self.padding))
        y = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


PACKED_FROM = {torch.bfloat16: 0, torch.float32: 400_000}  # weights of a layer from which packing pays off


def onednn_computes_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and has kernels in this dtype; in bfloat16 it wants AVX-512 of an x86 CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@torch.no_grad()
def pack(model: nn.Module, int8: bool = False) -> None:
    """Make a model that only decodes, on a CPU, faster (docs/performance.md): packed linear layers, or int8 ones, and
    modules that call each other directly. Neither hooks nor training work on it any more.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            if int8:
                setattr(module, name, Int8Linear(child))
            elif onednn_computes_in(child.weight.dtype) and child.weight.numel() >= PACKED_FROM[child.weight.dtype]:
                setattr(module, name, PackedLinear(child))
    for module in model.modules():
        for name, child in module.named_children():
            if not isinstance(child, (nn.ModuleDict, nn.Embedding)):  # of which the model reads attributes
                vars(module)[name] = direct(child)  # found before nn.Module's own search, which takes microseconds


def direct(module: nn.Module) -> Any:
    """What a call of the module computes in eval mode, without what nn.Module does around it."""
    if isinstance(module, nn.ModuleList):
        return [direct(child) for child in module]
    if isinstance(module, nn.Dropout):
        return lambda x: x
    if isinstance(module, nn.Linear):
        weight, bias = module.weight, module.bias
        return lambda x: linear(x, weight, bias)
    if isinstance(module, nn.LayerNorm):
        shape, gain, shift, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: torch.layer_norm(x, shape, gain, shift, eps)
    return module.forward


def computing(model: nn.Module, runtime: Runtime) -> AbstractContextManager:
    """The context of a forward pass: none for weights that are in the runtime's dtype, else its autocast."""
    return nullcontext() if model.transformer.wte.weight.dtype == runtime.dtype else runtime.compute()


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """A prompt for text out of nothing: the end-of-text token, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]


# --- text -------------------------------------------------------------------------------------------------------------


class Text:
    """One row's text as its tokens arrive: whole characters only, up to and without the first `stop`.

    What may be the beginning of `stop` is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None):
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.ended = False

    def push(self, token: int | None) -> str:
        """What can be shown now that this token has arrived; None says that the text ends here."""
        if self.ended:
            return ""
        self.ended = token is None
        self.held += self.decoder.decode(b"" if token is None else self.tokenizer.token_bytes(token), token is None)
        if self.stop and self.stop in self.held:
            self.ended = True
            return self.held[: self.held.index(self.stop)]
        keep = 0
        if self.stop and not self.ended:
            longest = min(len(self.stop) - 1, len(self.held))
            keep = next(n for n in range(longest, -1, -1) if self.held.endswith(self.stop[:n]))
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown


def text_of(tokenizer: Tokenizer, steps: Iterator[Step]) -> Iterator[str]:
    """The text of the first row, piece by piece."""
    text = Text(tokenizer)
    for step in steps:
        yield text.push(step.tokens[0])
    yield text.push(None)
