"""Part 2 of tools/check_gpu.py: losses, gradients and optimizer steps against float64 on the CPU.

The error of a tensor is the norm of the difference relative to the norm of the reference. It may be MARGIN times the
error of the plain equations of model.py, in the same dtype on the CPU; of gradients, the worst parameter counts.

Measured on a CPU over the six position methods and three seeds, the worst errors of these equations are

    float32    logits 5e-7   loss 2e-7   gradients 9e-7
    bfloat16   logits 7e-3   loss 1e-4   gradients 1e-2
    float16    logits 9e-4   loss 2e-5   gradients 1.5e-3

For logits and gradients, all methods and seeds are within a factor of 2. Folio's kernels for a CPU, which round norms
and the residual stream to bfloat16, have gradients with errors of up to 3.3e-2. So a margin of 5 covers other kernels
in the same dtype. In float32 the margin is 20, because a GPU may compute a product from several TF32 products. With
TF32 alone the error would be 1,000 times that of float32.

Dimensions: B batch, T time, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from folio.machine.kernels import VarlenAttention, adapt, compile_loss, make_cross_entropy, pad_vocabulary
from folio.machine.runtime import Runtime
from folio.training.optim import LearningRates, make_optimizer, state_tensors, update
from lab.gpu.part import Part, can_compile, compiler_counters, name_of, quick_compiler, supported_dtypes
from model import GPT, POSITIONS, GPTConfig

B, T, V = 5, 64, 500
CHUNK = 100 * V  # logits per chunk: at most 128 of the 320 tokens
MARGIN = {torch.float32: 20.0, torch.bfloat16: 5.0, torch.float16: 5.0}
LOSS_SCALE = {torch.float16: 4096.0}
Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) each


class Results(NamedTuple):
    """The results of a batch, in float64 on the CPU."""

    logits: Tensor | None  # (B, T, V); not computed by a compiled loss
    loss: Tensor
    gradients: dict[str, Tensor]

    def errors(self, reference: "Results") -> dict[str, tuple[float, str]]:
        """The error of each quantity, and the tensor that has it."""
        errors = {}
        if self.logits is not None:
            errors["logits"] = relative_error(self.logits, reference.logits), "the logits"
        errors["loss"] = relative_error(self.loss, reference.loss), "the loss"
        errors["gradients"] = worst_error(self.gradients, reference.gradients)
        return errors


class Variant(NamedTuple):
    """An implementation of a training step's loss."""

    dtype: torch.dtype
    is_compiled: bool
    is_chunked: bool
    is_padded: bool

    @property
    def cells(self) -> tuple[str, ...]:
        mode = "compiled" if self.is_compiled else "eager"
        loss, vocabulary = "chunked" if self.is_chunked else "plain", "padded" if self.is_padded else "not padded"
        return name_of(self.dtype), mode, loss, vocabulary

    def compute(self, position: str, device: torch.device, batch: Batch) -> Results:
        runtime, model = Runtime(device, self.dtype, self.is_compiled, ""), small_model(position).to(device)
        if self.is_padded:
            pad_vocabulary(model, 128)
        adapt(model, runtime)
        if self.is_chunked:
            model.cross_entropy = make_cross_entropy(CHUNK, V, runtime.size_multiple)
        if not self.is_compiled:
            return compute(model, runtime, batch, compile_loss(model, runtime))
        torch.compiler.reset()  # otherwise the ninth model would not be compiled
        counters = compiler_counters()
        results = compute(model, runtime, batch, compile_loss(model, runtime))
        if counters["stats"]["unique_graphs"] != 1 or counters["graph_break"]:
            raise ValueError(f"{counters['stats']['unique_graphs']} graphs, breaks: {[*counters['graph_break']]}")
        return results


def check_correctness(part: Part) -> None:
    batch, allowed = random_batch(), {}
    references = {name: compute(small_model(name).double(), cpu_runtime(torch.float32), batch) for name in POSITIONS}
    part.table("dtype", *(f"allowed error: {name}" for name in Results._fields))
    for dtype in supported_dtypes(part.device):
        allowed[dtype] = allowed_errors(dtype, references, batch)
        part.row(name_of(dtype), *(f"{error:.1e}" for error in allowed[dtype].values()))
    check_documents(part)
    check_optimizers(part)  # before the compiled variants, which take most of the time
    part.table("dtype", "mode", "loss function", "vocabulary", *(f"error: {name}" for name in Results._fields), "")
    losses = (True, True), (False, False), (True, False), (False, True)  # (chunked, padded); the first two matter most
    for compiled, (chunked, padded), dtype in product((False, True), losses, supported_dtypes(part.device)):
        variant = Variant(dtype, compiled, chunked, padded)
        if positions := applicable_positions(part, variant):
            check_variant(part, variant, positions, references, allowed[dtype], batch)
        else:
            part.note(f"not run: {', '.join(variant.cells)}")


def applicable_positions(part: Part, variant: Variant) -> list[str]:
    """The position methods to check with a variant: all, but compiling takes seconds for each."""
    if not variant.is_compiled:
        return [*POSITIONS]
    if part.is_late or not can_compile(part.device):
        return []
    if part.is_small:
        return ["rotary"] if variant == Variant(torch.bfloat16, True, True, True) else []
    return [*POSITIONS]


def check_variant(
    part: Part,
    variant: Variant,
    positions: list[str],
    references: dict[str, Results],
    allowed: dict[str, float],
    batch: Batch,
) -> None:
    failures = part.failures
    worst: dict[str, float] = {}
    for position in positions:
        what = f"{position}, {', '.join(variant.cells)}"
        if part.is_late:
            part.note(f"not run: {what}")
            continue
        with part.attempt(what), quick_compiler(part.device):
            errors = variant.compute(position, part.device, batch).errors(references[position])
            for quantity, (error, tensor) in errors.items():
                worst[quantity] = max(worst.get(quantity, 0.0), error)
                part.check(error <= allowed[quantity], f"{what}: the error of {tensor} is {error:.1e}")
    errors = (f"{worst[name]:.1e}" if name in worst else "" for name in allowed)
    part.row(*variant.cells, *errors, part.result_since(failures))


def allowed_errors(dtype: torch.dtype, references: dict[str, Results], batch: Batch) -> dict[str, float]:
    """MARGIN times the largest errors of model.py on the CPU, by quantity."""
    results = {position: compute(small_model(position), cpu_runtime(dtype), batch) for position in references}
    errors = [results[position].errors(references[position]) for position in references]
    return {name: MARGIN[dtype] * max(error[name][0] for error in errors) for name in Results._fields}


def small_model(position: str, vocab_size: int = V, block_size: int = T, std: float = 0.05) -> GPT:
    """A GPT in which no parameter is 0 or 1. std: of the values that are added to the initial ones."""
    shape = dict(n_layer=2, n_head=2, n_embd=128, bias=True)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, position=position, **shape))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=std)
    return model


def cpu_runtime(dtype: torch.dtype) -> Runtime:
    return Runtime(torch.device("cpu"), dtype, False, "")


def random_batch() -> Batch:
    inputs, targets = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(2))
    targets[0, :9] = -1  # masked
    return inputs, targets


def compute(
    model: GPT, runtime: Runtime, batch: Batch, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Results:
    """The results of a model. loss_fn: None: the model's forward. Raises ValueError if the padding has a gradient."""
    idx, targets = (tensor.to(runtime.device) for tensor in batch)
    scale, vocab_size = LOSS_SCALE.get(runtime.dtype, 1.0), model.config.vocab_size
    with runtime.autocast():
        logits = None if runtime.compile else model.logits(idx).detach().cpu().double()
        loss = loss_fn(idx, targets) if loss_fn else model(idx, targets)[1]
    (loss * scale).backward()
    gradients = {name: p.grad.cpu().double() / scale for name, p in model.named_parameters()}
    padded = gradients["transformer.wte.weight"]
    if padded[vocab_size:].any():
        raise ValueError("the padding of the vocabulary has a gradient")
    gradients["transformer.wte.weight"] = padded[:vocab_size]
    return Results(logits, loss.detach().cpu().double(), gradients)


def relative_error(a: Tensor, b: Tensor) -> float:
    error = ((a - b).norm() / b.norm()).item()
    return math.inf if math.isnan(error) else error


def worst_error(tensors: dict[str, Tensor], references: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name."""
    return max((relative_error(tensor, references[name]), name) for name, tensor in tensors.items())


def check_documents(part: Part) -> None:
    """Check attention to a query's own document by the kernel that gets the bounds of documents instead of a mask."""
    if part.device.type != "cuda":
        part.note("not run: documents of different lengths, whose kernel needs CUDA")
        return
    part.table("documents", *(f"error: {name}" for name in Results._fields), "")
    batch = random_batch()
    for dtype in (dtype for dtype in supported_dtypes(part.device) if dtype != torch.float32):
        what, failures = f"documents in {name_of(dtype)}", part.failures
        with part.attempt(what):
            exact = compute(documents_model().double(), cpu_runtime(torch.float32), batch)
            on_cpu = compute(documents_model(), cpu_runtime(dtype), batch).errors(exact)
            model = documents_model().to(part.device)
            model.kernel = VarlenAttention()
            errors = compute(model, Runtime(part.device, dtype, False, ""), batch).errors(exact)
            for name, (error, tensor) in errors.items():
                allowed = MARGIN[dtype] * on_cpu[name][0]
                part.check(error <= allowed, f"{what}: the error of {tensor} is {error:.1e}")
            part.row(name_of(dtype), *(f"{error:.1e}" for error, _ in errors.values()), part.result_since(failures))


def documents_model() -> GPT:
    """A small GPT that attends to a document, of about 64 tokens in a random batch."""
    model = small_model("learned")
    model.config = replace(model.config, document_token=int(random_batch()[0][0, T // 3]))
    return model


# --- optimizers -------------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Two optimizer steps, in float64 on the CPU, and a skipped one."""

    changes: dict[str, Tensor]  # of the weights
    moments: dict[str, Tensor]
    changed_by_skipped_step: list[str]  # names of weights, moments and step counts


def check_optimizers(part: Part) -> None:
    """Check steps with random gradients, and a skipped step whose gradients are not numbers."""
    heads = ("error: changes", "allowed", "error: moments", "allowed", "skipped step", "")
    part.table("optimizer", "matmuls", *heads)
    muon_dtypes = [dtype for dtype in supported_dtypes(part.device) if dtype != torch.float16]  # as train.py
    for kind, dtype in (("adamw", torch.float32), *(("muon", dtype) for dtype in muon_dtypes)):
        what, failures = f"{kind} in {name_of(dtype)}", part.failures
        with part.attempt(what):
            exact = optimizer_steps(small_model("relative").double(), kind, torch.float64)
            on_cpu = optimizer_steps(small_model("relative"), kind, dtype)
            steps, cells = optimizer_steps(small_model("relative").to(part.device), kind, dtype), []
            for name in Steps._fields[:2]:
                error, tensor = worst_error(getattr(steps, name), getattr(exact, name))
                allowed = MARGIN[dtype] * worst_error(getattr(on_cpu, name), getattr(exact, name))[0]
                part.check(error <= allowed, f"{what}: the error of the {name} of {tensor} is {error:.1e}")
                cells += [f"{error:.1e}", f"{allowed:.1e}"]
            changed = ", ".join(steps.changed_by_skipped_step)
            part.check(not changed, f"{what}: a skipped step changes {changed}")
            cells.append("changes weights or moments" if changed else "changes nothing")
            part.row(kind, name_of(dtype), *cells, part.result_since(failures))


def optimizer_steps(model: GPT, kind: str, dtype: torch.dtype) -> Steps:
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, device = make_optimizer(model, kind, 1e-3, (0.9, 0.95), 0.1, dtype), model.lm_head.weight.device
    generator = torch.Generator().manual_seed(3)

    def step(number: int, gradient_std: float, skip: float) -> None:
        for p in model.parameters():
            p.grad = (gradient_std * torch.randn(p.shape, generator=generator)).to(p)
        update(optimizer, LearningRates(1e-3, 0.02), number, torch.tensor(skip, device=device))

    step(0, 0.01, skip=0.0)
    step(1, 0.01, skip=0.0)
    state = {**dict(model.named_parameters()), **state_tensors(model, optimizer)}
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    step(2, math.nan, skip=1.0)
    changed = [name for name, tensor in state.items() if not torch.equal(tensor, before[name])]
    changes = {name: (before[name] - tensor).cpu().double() for name, tensor in initial.items()}
    moments = {name: tensor.cpu().double() for name, tensor in before.items() if "/" in name and tensor.dim()}
    return Steps(changes, moments, changed)
