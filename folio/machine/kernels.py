"""Faster implementations of parts of the model for particular hardware; the equations stay in model.py.

Dimensions: B batch, T time, H heads, D head size.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from folio.machine import compiled_attention, distributed
from folio.machine.runtime import Runtime
from model import GPT, POSITIONS, AttentionKernel, CausalSelfAttention, GPTConfig, Mask

# --- training ---------------------------------------------------------------------------------------------------------


def adapt(model: GPT, runtime: Runtime) -> None:
    """Set the implementations of attention, loss, dropout and residual stream that are fastest on the runtime.

    Call it before the model is wrapped or compiled.
    """
    model.kernel = choose_attention(runtime.device.type, runtime.dtype, model.config)
    if runtime.workers > 1 and runtime.dtype == torch.bfloat16 and compiled_attention.is_available():
        model.kernel = CompiledAttention()
    logits = max_logits(bool(runtime.compile)) // runtime.workers
    model.cross_entropy = make_cross_entropy(logits, model.config.vocab_size, runtime.size_multiple)
    if runtime.device.type == "cpu":
        keep_freed_memory()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Dropout) and child.p:
                    setattr(module, name, CPUDropout(child.p).train(child.training))
    if runtime.dtype == torch.bfloat16:
        model.transformer.drop.register_forward_hook(_residual_stream_in_bfloat16)


def _residual_stream_in_bfloat16(module: nn.Module, args: tuple, x: Tensor) -> Tensor:
    """Under autocast, which casts only matmuls, the residual stream would stay in float32."""
    return x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x


def pad_vocabulary(model: GPT, multiple: int) -> None:
    """Add rows of zeros to the token embeddings, up to a multiple of `multiple`, for faster matmuls on GPUs.

    The rows stay zero in training: no id selects them, the loss masks their logits, and `lm_head` returns
    logits without them. Checkpoints do not contain them. Call it before the optimizer is built.
    """
    V = model.config.vocab_size
    rows = round_up(V, multiple)
    if rows == V:
        return
    model.transformer.wte.weight = nn.Parameter(pad_rows(model.transformer.wte.weight.detach(), rows))
    model.tie_weights()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits[..., :V])


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros added, up to `rows`."""
    padding = tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, padding]) if len(padding) else tensor


def choose_attention(device_type: str, dtype: torch.dtype, config: GPTConfig) -> AttentionKernel:
    """The attention implementation that is fastest in training.

    On a CPU, torch's flash kernel is slow in bfloat16, and is not used with dropout or a mask that needs a gradient.
    torch's fallback then runs more operations than the definition in model.py.
    """
    if device_type == "cpu" and dtype == torch.bfloat16:
        return AttentionKernel()
    if device_type == "cpu" and (config.pdrop("attn") or trains_bias(config)):
        return FusedInEvaluation()
    if DOCUMENTS_BY_LENGTH and device_type == "cuda" and VarlenAttention.can_compute(dtype, config):
        return VarlenAttention()
    return FusedAttention()


def trains_bias(config: GPTConfig) -> bool:
    """Whether the position method adds a bias with parameters to the scores, so that the mask needs a gradient."""
    method = POSITIONS[config.position]
    return method.biases_scores and method.table_name is not None


class FusedAttention(AttentionKernel):
    """Attention by torch's scaled_dot_product_attention, whose flash kernels do not store the scores (B, H, T, T)."""

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout_p = layer.attn_dropout.p if layer.training else 0.0
        if mask.biases is None and mask.first_keys is None:  # then, torch computes no scores of later keys
            return F.scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, mask.tensor(q), dropout_p)


DOCUMENTS_BY_LENGTH = False  # whether VarlenAttention is used; it has not run on a GPU
MIN_DOCUMENT = 8  # tokens of a document in VarlenAttention, on average over a micro-batch


class VarlenAttention(FusedAttention):
    """Attention to a query's own document by torch's flash kernel for sequences of different lengths, on CUDA.

    A mask of the documents is as large as the scores of a head, (B, 1, T, T), in every layer, and the kernels that
    accept a mask compute the hidden scores too. This one gets only the bounds of the documents.
    """

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn  # compiles its operators, which few runs need

        self.attend = varlen_attn

    @staticmethod
    def can_compute(dtype: torch.dtype, config: GPTConfig) -> bool:
        """The kernel has no dropout and no mask. Token 0 also pads batches, whose padding would be many documents."""
        is_plain = not config.pdrop("attn") and not POSITIONS[config.position].biases_scores
        return bool(config.document_token) and dtype != torch.float32 and is_plain

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if mask.first_keys is None:
            return super().__call__(layer, q, k, v, mask)
        B, _, T, _ = q.shape
        bounds = document_bounds(mask.first_keys)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, H, D)
        y = self.attend(q, k, v, bounds, bounds, T, T, window_size=(-1, 0))  # (-1, 0): causal
        return y.unflatten(0, (B, T)).transpose(1, 2)


def document_bounds(first_keys: Tensor) -> Tensor:
    """The first token of each document among all B T tokens, and after it B T, as int32 of a fixed length.

    first_keys: see Mask. The host does not know the number of documents, so there are bounds for B T / MIN_DOCUMENT of
    them, and those without tokens begin at B T. If there are more documents, the device raises an error.
    """
    (B, T), device = first_keys.shape, first_keys.device
    count = B + B * T // MIN_DOCUMENT
    begins = (first_keys == torch.arange(T, device=device)).flatten()  # (B T,)
    number = begins.cumsum(0)  # of a token's document, from 1
    torch._assert_async(number[-1] <= count, "mask_documents: too many short documents, see MIN_DOCUMENT in kernels.py")
    bounds = torch.full((count + 2,), B * T, dtype=torch.int32, device=device)
    index = torch.where(begins, number - 1, count + 1)  # the last element is written by all other tokens, and removed
    bounds.scatter_(0, index.clamp(max=count + 1), torch.arange(B * T, dtype=torch.int32, device=device))
    return bounds[:-1]


class FusedInEvaluation(AttentionKernel):
    """The definition in training, torch's kernel in evaluation, where it is faster."""

    fused = FusedAttention()

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if layer.training:
            return super().__call__(layer, q, k, v, mask)
        return self.fused(layer, q, k, v, mask)


class CompiledAttention(AttentionKernel):
    """Attention by a compiled function, in one thread, which computes no scores of later keys."""

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if not compiled_attention.can_compute(q, k, v, mask.biases):
            return super().__call__(layer, q, k, v, mask)
        dropped, seed = min(round(2**32 * layer.attn_dropout.p), 2**32 - 1) if layer.training else 0, 0
        if dropped:
            seed = torch.empty((), dtype=torch.int64).random_(generator=layer.attn_dropout.generator).item()
        return compiled_attention.CompiledFunction.apply(q, k, v, mask.biases, dropped, seed, mask.first_keys)


def describe_attention(runtime: Runtime, model: GPT) -> str:
    """The model's attention implementation in training, for the startup line."""
    if isinstance(model.kernel, CompiledAttention):
        return "a compiled kernel"
    if isinstance(model.kernel, VarlenAttention):
        return "torch's flash kernel for documents of different lengths"
    if not isinstance(model.kernel, FusedAttention):
        return "matmuls"
    if runtime.device.type not in ("cpu", "cuda"):
        return "scaled_dot_product_attention"
    config, like = model.config, dict(dtype=runtime.dtype, device=runtime.device)
    H, T, D = config.n_head, config.block_size, config.n_embd // config.n_head
    q, mask = torch.empty(1, H, T, D, **like, requires_grad=True), None
    if POSITIONS[config.position].biases_scores:
        mask = torch.empty(1, H, T, T, **like, requires_grad=trains_bias(config))
    kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, mask, config.pdrop("attn"), is_causal=mask is None))
    return f"torch's {kernel.name.removesuffix('_ATTENTION').lower()} kernel"


class CPUDropout(nn.Dropout):
    """nn.Dropout for a CPU. torch draws one random number per element; this draws 64 bits for four elements."""

    generator: torch.Generator | None = None  # None: torch's default one

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=self.generator)
        keep = draws.view(torch.int16)[: x.numel()] >= round(self.p * 2**16) - 2**15
        return x * (keep.view(torch.uint8).to(x.dtype) / (1 - self.p)).view_as(x)  # converting from bool is slow


def dropout_contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a block's computation and recomputation in which CPUDropout draws the same masks."""
    generators = {module.generator for module in block.modules() if isinstance(module, CPUDropout)} - {None}
    return nullcontext(), _restored({generator: generator.get_state() for generator in generators})


@contextmanager
def _restored(states: dict[torch.Generator, Tensor]) -> Iterator[None]:
    current = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in current.items():
            generator.set_state(state)


MAX_LOGITS = 2**26  # per chunk: 1,335 tokens with GPT-2's vocabulary, 256 MiB in float32
MAX_LOGITS_COMPILED = 2**28  # never in float32; with fewer chunks, compiling is faster (docs/lab/performance.md)
GRADIENT_SCALE = {torch.float16: 256}  # of the logits' gradients, most of which are near 1 / V


def max_logits(compiled: bool) -> int:
    """The number of logits that exist at the same time, of all workers together."""
    return MAX_LOGITS_COMPILED if compiled else MAX_LOGITS


def make_cross_entropy(
    max_logits: int = MAX_LOGITS, vocab_size: int | None = None, row_multiple: int = 1
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """model.cross_entropy, computed in chunks of tokens if there are more than `max_logits` logits.

    vocab_size: the number of rows of `weight` without padding (see pad_vocabulary); None: all. A chunk's number of
    tokens is rounded up to a multiple of row_multiple.

    It is a function, not a partial object: torch compiles all partial objects as one function of its own, so that after
    calls with different shapes (a block's, the loss's), the sizes become variables of the graphs.
    """

    def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        N, V, mask = len(targets), len(weight), None
        if vocab_size is not None and vocab_size < V:
            mask = weight.new_zeros(V)  # added to the logits
            mask[vocab_size:] = -math.inf
        if N * V <= max_logits:
            return F.cross_entropy(F.linear(x, weight, mask), targets, ignore_index=-1, reduction="sum")
        chunks = -(-N * V // max_logits)
        rows = round_up(-(-N // chunks), row_multiple)
        return ChunkedCrossEntropy.apply(x, weight, mask, targets, rows, torch.is_grad_enabled())

    return cross_entropy


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy for a large vocabulary, whose logits (N, V) would be the largest tensor of a step.

    The loss and gradients of a chunk of tokens are computed together, so that its logits are computed once and freed.
    The idea is from Liger Kernel (Hsu et al. 2024) and Cut Cross-Entropy (Wijmans et al. 2024).
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, mask: Tensor | None, targets: Tensor, rows: int, needs_gradients: bool
    ) -> Tensor:
        total, grads_x, grad_weight = torch.zeros((), device=x.device), [], None
        for x_n, targets_n in zip(x.split(rows), targets.split(rows), strict=True):  # (n, C), (n,)
            loss, grad_x, grad_w = ChunkedCrossEntropy.chunk_loss(x_n, weight, mask, targets_n, needs_gradients)
            total = total + loss  # not +=: with torch 2.11, the compiled gradients would be 0
            if needs_gradients:
                grads_x.append(grad_x)
                grad_weight = grad_w.float() if grad_weight is None else grad_weight.add_(grad_w)
        if needs_gradients:
            ctx.scale = GRADIENT_SCALE.get(grads_x[0].dtype, 1)
            ctx.save_for_backward(torch.cat(grads_x).type_as(x), grad_weight.type_as(weight))
        return total

    @staticmethod
    def chunk_loss(
        x: Tensor, weight: Tensor, mask: Tensor | None, targets: Tensor, needs_gradients: bool
    ) -> tuple[Tensor | None, ...]:
        """The summed loss of a chunk, and its gradients with respect to x (n, C) and weight (V, C).

        The gradient of x is multiplied by GRADIENT_SCALE.
        """
        logits = F.linear(x, weight, mask)  # (n, V)
        log_p = logits.log_softmax(dim=-1, dtype=torch.float)
        loss = F.nll_loss(log_p, targets, ignore_index=-1, reduction="sum")
        if not needs_gradients:
            return loss, None, None
        scale = GRADIENT_SCALE.get(logits.dtype, 1)
        grad_logits = p_minus_one_hot(log_p, targets).mul_((targets != -1)[:, None] * scale).to(logits.dtype)  # (n, V)
        grad_weight = grad_logits.T @ (x if scale == 1 else x / scale)  # dividing x avoids an overflow of the sums
        return loss, grad_logits @ weight, grad_weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * (grad / ctx.scale), grad_weight * grad, None, None, None, None


def p_minus_one_hot(log_p: Tensor, targets: Tensor) -> Tensor:
    """exp(log_p) - one_hot(targets), (n, V). In place in eager mode; if compiled, without a scatter, to be fused."""
    if torch.compiler.is_compiling():
        is_target = torch.arange(log_p.shape[1], device=log_p.device) == targets[:, None]
        return log_p.exp() - is_target.float()
    return log_p.exp_().scatter_add_(1, targets.clamp(min=0)[:, None], -torch.ones_like(log_p[:, :1]))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def compile_loss(model: nn.Module, runtime: Runtime) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss as a function of inputs and targets, (B, T) each. If compiled, model and loss are one graph.

    DistributedDataParallel stays outside of the graph, so that its hooks can reduce gradients during the backward pass.
    The blocks and the loss of a sharded model are already compiled (training/setup.py).
    """

    def loss_fn(idx: Tensor, targets: Tensor) -> Tensor:
        with runtime.autocast():
            return model(idx, targets)[1]

    if not runtime.compile or distributed.is_sharded(next(model.parameters())):
        return loss_fn
    mode = runtime.compile if isinstance(runtime.compile, str) else None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.module = torch.compile(model.module, mode=mode)  # the model itself stays eager, for samples
        return loss_fn
    return torch.compile(loss_fn, mode=mode)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step. By default it returns large blocks to the system, and Linux
    clears each page again, which takes 13 to 18 % of a training step (docs/lab/lab-book.md).
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    with suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
