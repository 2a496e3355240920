import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from folio.data.find_data import find_datasets
from folio.data.windows import Mixture
from folio.decoding.kv_cache import KVCache, split_documents
from folio.machine.kernels import (
    MAX_LOGITS,
    MIN_DOCUMENT,
    CompiledAttention,
    CPUDropout,
    FusedAttention,
    FusedInEvaluation,
    VarlenAttention,
    adapt,
    choose_attention,
    describe_attention,
    document_bounds,
    make_cross_entropy,
    pad_vocabulary,
)
from folio.machine.runtime import resolve_runtime
from model import GPT, POSITIONS, AttentionKernel, CausalSelfAttention, GPTConfig, Mask, document_starts
from tests.support.documents import attend_by_document
from tests.support.models import SMALL, tokens
from tests.support.operators import OperatorRecorder
from tests.support.tolerances import gradients_error, logits_error, norm_error, normal_limit, rounding_error, within

ATTENTION_ERROR = 2 * rounding_error(8 + 2 * 16 + 5)  # D = 8, T = 16: scores, softmax, and sums over values

# --- training ---------------------------------------------------------------------------------------------------------


def random_documents(seed: int, B: int = 3, T: int = 256) -> torch.Tensor:
    """Ids (B, T) with a few document tokens, 5, also as the first and the last id of a row, and two in a row."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(6, 40, (B, T), generator=generator)
    ends = torch.randint(T - 1, (B, 3), generator=generator)
    idx.scatter_(1, ends, 5)
    idx[1, 0] = idx[1, -1] = 5
    idx[2, ends[2, 0] + 1] = 5
    return idx


def test_attention_by_the_lengths_of_documents_equals_masked_attention(monkeypatch, seed):
    """Results and gradients of a model. The kernel itself is torch's, and has not run on a GPU."""
    config = GPTConfig(vocab_size=40, block_size=256, n_layer=2, n_head=2, n_embd=32, document_token=5)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_document)
    idx, results = random_documents(seed), []
    for kernel in (AttentionKernel(), VarlenAttention()):
        model = GPT(config, seed).double()
        model.kernel = kernel
        loss = model(idx, idx.roll(-1, 1))[1]
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def test_document_bounds_are_the_begins_of_the_documents(seed):
    idx = random_documents(seed)
    lengths = [len(part) for row in idx.tolist() for part in split_documents(row, 5)]
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    bounds = document_bounds(document_starts(idx, 5)).tolist()
    assert bounds[: len(begins)] == begins and {*bounds[len(begins) :]} == {idx.numel()}
    assert len(bounds) == 3 + 3 * 256 // MIN_DOCUMENT + 1
    shortest = torch.full((2, 4 * MIN_DOCUMENT), 6)  # with the largest number of documents
    shortest[:, ::MIN_DOCUMENT] = 5
    assert document_bounds(document_starts(shortest, 5)).unique().numel() == 2 * (4 + 1) + 1
    shortest[:, 1] = 5
    with pytest.raises(RuntimeError, match="too many short documents"):  # on CUDA, an error of the device
        document_bounds(document_starts(shortest, 5))


def test_documents_have_a_kernel_of_their_own_where_it_can_compute_them(monkeypatch):
    """It has not run on a GPU, so it is not used."""
    config = GPTConfig(document_token=5)
    assert type(choose_attention("cuda", torch.bfloat16, config)) is FusedAttention
    monkeypatch.setattr("folio.machine.kernels.DOCUMENTS_BY_LENGTH", True)
    for is_used, device, dtype, changes in (
        (True, "cuda", torch.bfloat16, {}),
        (True, "cuda", torch.float16, dict(position="rotary", resid_pdrop=0.1)),
        (False, "cuda", torch.float32, {}),
        (False, "cpu", torch.bfloat16, {}),
        (False, "cuda", torch.bfloat16, dict(dropout=0.1)),
        (False, "cuda", torch.bfloat16, dict(position="alibi")),
        (False, "cuda", torch.bfloat16, dict(document_token=None)),
        (False, "cuda", torch.bfloat16, dict(document_token=0)),
    ):
        kernel = choose_attention(device, dtype, replace(config, **changes))
        assert isinstance(kernel, VarlenAttention) == is_used


@pytest.mark.parametrize("has_biases", [False, True])
def test_every_attention_implementation_matches_torchs_kernel(has_biases, seed):
    """The definition in model.py, too. A position method may add any bias to a score, per head."""
    torch.manual_seed(seed)
    layer = CausalSelfAttention(GPTConfig(n_embd=32, n_head=4, attn_pdrop=0.5), index=0).eval()
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    mask = Mask(torch.randn(4, 16, 16) if has_biases else None)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.biases, is_causal=not has_biases)
    config = GPTConfig(block_size=16, vocab_size=9, n_layer=1, n_head=4, n_embd=32)
    cache = KVCache(config, 2, torch.float32, torch.device("cpu"))
    cache.begin_forward(torch.zeros(2, 16, dtype=torch.long))
    for attend in (AttentionKernel(), FusedAttention(), FusedInEvaluation(), CompiledAttention(), cache):
        torch.testing.assert_close(attend(layer, q, k, v, mask), expected, **within(v, ATTENTION_ERROR))


@pytest.mark.parametrize("has_biases", [False, True])
def test_every_kernel_confines_attention_to_documents(has_biases, seed):
    """Against torch's kernel with the mask as a tensor: rows with documents that begin at 0 and 5, and at 0 and 9."""
    torch.manual_seed(seed)
    layer = CausalSelfAttention(GPTConfig(n_embd=32, n_head=4), index=0)
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    starts = torch.tensor([[0] * 5 + [5] * 11, [0] * 9 + [9] * 7])
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1) | (torch.arange(16) < starts[:, None, :, None])
    biases = torch.randn(1, 4, 16, 16) if has_biases else torch.zeros(1, 1, 16, 16)
    mask = Mask(biases + torch.full((16, 16), -math.inf).triu(1) if has_biases else None, starts)
    expected = F.scaled_dot_product_attention(q, k, v, biases.masked_fill(hidden, -math.inf))
    for attend in (AttentionKernel(), FusedAttention(), FusedInEvaluation(), CompiledAttention()):
        torch.testing.assert_close(attend(layer, q, k, v, mask), expected, **within(v, ATTENTION_ERROR))


@pytest.mark.parametrize("position", POSITIONS)
def test_the_definition_of_attention_has_the_gradients_of_torchs_kernel(position, seed):
    """Including the gradient of the bias of relative positions, for which torch uses its math kernel."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=40, vocab_size=50, n_layer=2, n_head=4, n_embd=32, position=position)
    model, idx, gradients = GPT(config), torch.randint(50, (3, 40)), []
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    adapt(model, resolve_runtime("cpu", "float32", False))
    assert isinstance(model.kernel, FusedInEvaluation) == (position == "relative")
    for kernel in (FusedAttention(), AttentionKernel()):
        gradients.append(gradients_of(model, model(idx, idx, kernel)[1]))
    assert_same_gradients(*gradients, gradients_error(config, 3, 40))
    assert all((gradient != 0).any() for gradient in gradients[0].values())  # every parameter is trained


def gradients_of(model: GPT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (3 * loss).backward()  # scaled, as for float16 or for a micro-batch
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], error: float) -> None:
    """Assert that each gradient differs by at most error, relative to its norm."""
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= error * value.norm(), name


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype, dropout", [("float32", 0.0), ("float32", 0.1), ("bfloat16", 0.0)])
def test_the_startup_line_names_the_attention_kernel_of_training(position, dtype, dropout):
    """Against the operators that torch calls. On CUDA the line said "flash" for every position method."""
    model = GPT(GPTConfig(8, 9, 1, 2, 16, position=position, dropout=dropout))
    runtime, idx = resolve_runtime("cpu", dtype, False), torch.zeros(1, 8, dtype=torch.long)

    adapt(model, runtime)
    for attend, other in ((model.kernel, "matmuls"), (FusedAttention(), "torch's math kernel")):
        model.kernel, names = attend, []
        with OperatorRecorder(lambda name, *_, names=names: names.append(name)), runtime.autocast():
            model(idx, idx)
        is_flash = "_scaled_dot_product_flash_attention_for_cpu" in names
        assert describe_attention(runtime, model) == ("torch's flash kernel" if is_flash else other)


def test_a_recorder_receives_every_layer_and_changes_no_result(seed):
    """As that of the viewer."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=3, n_head=2, n_embd=16)).eval()
    idx, shapes = torch.randint(50, (2, 16)), {}

    class Recorder(AttentionKernel):
        def __call__(self, layer, q, k, v, mask):
            shapes[layer.index] = tuple((q @ k.mT + mask.tensor(q)).shape)
            return super().__call__(layer, q, k, v, mask)

    expected = model.logits(idx)
    error = within(expected, logits_error(model.config, 16))
    torch.testing.assert_close(model.logits(idx, Recorder()), expected, **error)
    assert shapes == dict.fromkeys(range(3), (2, 2, 16, 16))


def test_the_definition_in_bfloat16_matches_the_fused_kernel_and_applies_dropout(seed):
    torch.manual_seed(seed)
    layer = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=2, attn_pdrop=0.5)).transformer.h[0].attn
    x, definition = torch.randn(2, 16, 32), (AttentionKernel(), Mask(), None)
    expected = layer.eval()(x, FusedAttention(), Mask(), None)
    with torch.autocast("cpu", torch.bfloat16):
        error = rounding_error(8, torch.bfloat16)  # x, 2 weights, q or k or v, scores, weights of values, heads, result
        torch.testing.assert_close(layer(x, *definition).float(), expected, **within(expected, error))
        outputs = [layer.train()(x, *definition) for _ in range(2)]
        assert not torch.equal(*outputs)  # dropout


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_dropout_drops_each_element_independently_with_probability_p(p, dtype, seed):
    """The same seed gives the same result. In evaluation nothing is dropped."""
    torch.manual_seed(seed)
    layer, x = CPUDropout(p), torch.ones(501, 403, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.float().sum().backward()
    dropped = (y == 0).double()
    n = dropped.numel()
    limit = normal_limit(comparisons=5)
    assert abs(dropped.mean() - p) < limit * math.sqrt(p * (1 - p) / n)
    for distance in (1, 2, 3, 4):  # four neighbors share a random number
        both = (dropped.flatten()[distance:] * dropped.flatten()[:-distance]).mean()
        # Pairs overlap, so that the variance of their number is up to three times that of independent ones.
        assert abs(both - p * p) < limit * math.sqrt(3 * p * p * (1 - p * p) / n)
    scale = torch.tensor(1 / (1 - p)).to(dtype).float()
    assert set(y.float().unique().tolist()) == {0.0, scale.item()}
    assert torch.equal(x.grad, y)
    torch.manual_seed(seed)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x or torch.equal(layer(x), x)


# --- the loss in chunks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
def test_masked_targets_do_not_affect_the_loss_or_the_gradients(masked_dir, chunks):
    """Against torch's cross-entropy over the unmasked targets. At positions with masked targets, all gradients of the
    last norm's output are exactly 0.
    """
    data = Mixture(find_datasets("verse", masked_dir), 32, 1337, "epoch")
    x, y = map(torch.from_numpy, data.batch(0, 32))  # enough sequences for some unmasked targets with any seed
    config = GPTConfig(block_size=32, vocab_size=data.vocab_size, n_layer=1, n_head=1, n_embd=16)
    model = with_chunked_loss(GPT(config, 1), -(-y.numel() * data.vocab_size // chunks))
    outputs = []
    model.transformer.ln_f.register_forward_hook(lambda norm, args, y: outputs.append(y) or y.retain_grad())
    _, loss = model(x, y)
    loss.backward()
    counts, gradient = y != -1, outputs[0].grad  # (B, T), (B, T, C)
    expected = F.cross_entropy(model.logits(x)[counts], y[counts]).item()
    # Both have the same logits. A loss is a log-sum-exp, and the mean is over all targets.
    assert loss.item() == pytest.approx(expected, rel=2 * rounding_error(data.vocab_size + y.numel()))
    assert (gradient[~counts] == 0).all() and (gradient[counts] != 0).any(dim=-1).all()
    model.zero_grad()
    _, loss = model(x, torch.full_like(y, -1))
    loss.backward()
    assert loss.item() == 0 and all((p.grad == 0).all() for p in model.parameters())


def with_chunked_loss(model: GPT, max_logits: int = MAX_LOGITS) -> GPT:
    model.cross_entropy = make_cross_entropy(max_logits)
    return model


@pytest.mark.parametrize("chunk_tokens", [48, 17, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_has_the_value_and_gradients_of_torchs(dtype, chunk_tokens, seed):
    """Against cross-entropy of all logits, in float32. In bfloat16, the gradient of each logit is rounded to 8 bits."""
    torch.manual_seed(seed)
    model = with_chunked_loss(GPT(GPTConfig(**SMALL)), 50 * chunk_tokens - 1)
    idx, targets = masked_batch(3)
    expected_loss = F.cross_entropy(model.logits(idx).mT, targets, ignore_index=-1)
    expected = gradients_of(model, expected_loss)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(idx, targets)[1]
        actual = gradients_of(model, loss)
        with torch.no_grad():
            assert torch.equal(model(idx, targets)[1], loss)
    tolerance = gradients_error(model.config, 3, 16, dtype)
    assert abs(loss - expected_loss) <= tolerance * expected_loss
    assert_same_gradients(actual, expected, tolerance)


def masked_batch(B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets, of which five are masked."""
    idx, targets = tokens(B, 16), tokens(B, 16)
    targets[1, :5] = -1
    return idx, targets


@pytest.mark.parametrize("max_logits, largest", [(2**26, 4 * 16 * 1000), (10_000, 10_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_never_holds_all_logits(dtype, max_logits, largest):
    """The largest tensor of a step or an evaluation is the logits of one chunk."""

    def record(name, args, result):
        sizes.extend(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))

    idx = tokens(4, 16, 1000)
    model = with_chunked_loss(GPT(GPTConfig(**{**SMALL, "vocab_size": 1000, "n_embd": 4, "n_head": 1})), max_logits)
    for training in (True, False):
        sizes: list[int] = []
        autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
        with OperatorRecorder(record), autocast, torch.set_grad_enabled(training):
            _, loss = model(idx, idx)
            if training:
                loss.backward()
        assert max(sizes) == largest


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # from torch
def test_the_chunked_loss_compiles_to_one_graph_without_scatter(seed):
    """Inductor does not fuse a scatter with the operations around it.

    With torch 2.11, all gradients were 0, because the forward pass added to its result in place.
    """
    torch.manual_seed(seed)
    model, (idx, targets), graphs = with_chunked_loss(GPT(GPTConfig(**SMALL)), 500), masked_batch(2), []

    def record(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()  # --seeds runs this more often than Dynamo compiles a function
    backend = aot_autograd(fw_compiler=record)
    compiled = torch.compile(lambda idx, targets: model(idx, targets)[1], backend=backend, fullgraph=True)
    losses = [loss_fn(idx, targets) for loss_fn in (compiled, lambda *batch: model(*batch)[1])]
    actual, expected = (gradients_of(model, loss) for loss in losses)
    error = gradients_error(model.config, 2, 16)
    assert_same_gradients(actual, expected, error)
    assert abs(losses[0] - losses[1]) <= error * losses[1]
    assert len(graphs) == 2  # forward and backward
    operators = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("log_softmax" in name for name in operators) == 4 and not any("scatter" in name for name in operators)


def test_the_chunked_loss_keeps_small_gradients_in_float16(seed):
    """Probabilities below 2^-24 became 0, and those below 2^-14 lost bits."""
    torch.manual_seed(seed)
    N, V, C = 64, 5000, 16
    x, weight, targets = torch.randn(N, C), torch.randn(V, C) / 4, torch.randint(V // 2, (N,))
    x[:, 0], weight[:, 0], weight[V // 2 :, 0] = 3, 0, -2.5  # half of the ids have probabilities near 2e-7
    gradients = {}
    for dtype in (torch.float32, torch.float16):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            (make_cross_entropy(1000 * V // 50)(*leaves, targets) * 1024).backward()
        gradients[dtype] = [leaf.grad for leaf in leaves]
    for half, single in zip(gradients[torch.float16], gradients[torch.float32], strict=True):
        # float16 has the logits' gradients, the inputs, and the sums over ids or tokens.
        assert (half - single).norm() < norm_error(4, torch.float16) * single.norm()
    improbable = [grads[1][V // 2 :] for grads in gradients.values()]
    # A logit of about -17 is rounded, and its rounding changes a small probability by as much.
    tolerance = norm_error(4, torch.float16) + 17 * norm_error(1, torch.float16)
    assert (improbable[1] - improbable[0]).norm() < tolerance * improbable[0].norm()


# --- a padded vocabulary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_logits", [MAX_LOGITS, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_vocabulary_changes_no_logit_loss_or_gradient(dtype, max_logits, seed):
    torch.manual_seed(seed)
    V, (idx, targets) = SMALL["vocab_size"], masked_batch(3)
    models = GPT(GPTConfig(**SMALL)), GPT(GPTConfig(**SMALL))
    pad_vocabulary(models[1], 64)
    assert models[0].num_params() == models[1].num_params() and len(models[1].lm_head.weight) == 64
    gradients, losses, logits = [], [], []
    for model in models:
        model.cross_entropy = make_cross_entropy(max_logits, V)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits.append(model.logits(idx))
            losses.append(model(idx, targets)[1])
            gradients.append(gradients_of(model, losses[-1]))
            assert model(idx)[0].shape == (3, 1, V)
    torch.testing.assert_close(*logits, **within(logits[1].detach(), logits_error(models[0].config, 16, dtype)))
    table, error = gradients[1]["transformer.wte.weight"], gradients_error(models[0].config, 3, 16, dtype)
    assert (table[V:] == 0).all()
    assert_same_gradients({**gradients[1], "transformer.wte.weight": table[:V]}, gradients[0], error)
    assert abs(losses[1] - losses[0]) <= error * losses[0]


def test_a_foreign_table_of_a_suitable_size_is_not_padded():
    """nanoGPT's vocabulary of 50,304 stays the model's vocabulary."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, n_layer=1))
        pad_vocabulary(model, 128)
    assert len(model.lm_head.weight) == 50304 and not model.lm_head._forward_hooks


def test_a_custom_position_method_with_a_trained_bias_is_trained_with_matmuls(monkeypatch):
    """The name "relative" decided, so that a custom method had torch's slower kernel on a CPU."""

    class Kerple(POSITIONS["relative"]):
        table_name = "log_r"

    monkeypatch.setitem(POSITIONS, "kerple", Kerple)
    kinds = {}
    for position in POSITIONS:
        config = GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=4, position=position)
        kinds[position] = type(choose_attention("cpu", torch.float32, config))
    assert kinds["kerple"] is kinds["relative"] is FusedInEvaluation
    assert kinds["alibi"] is kinds["learned"] is FusedAttention
