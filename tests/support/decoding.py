"""Small models with random weights, and generation of tokens."""

import copy
from collections.abc import Sequence

import torch

from folio.decoding.decoders import Decoder, make_decoder
from folio.decoding.sampling import Sampling, next_token_probabilities, sample_token, uniforms
from folio.decoding.scheduler import Completion, Scheduler, generate, shared_length
from folio.decoding.torch_decoder import TorchDecoder
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT, GPTConfig
from tests.support.tolerances import logits_error, rounding_error

GREEDY = Sampling(temperature=0)


def random_model(seed: int, **settings) -> GPT:
    """A model with weights large enough for clearly different logits. settings: changes of the GPTConfig."""
    torch.manual_seed(seed)
    sizes = dict(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, dropout=0.5)
    model = GPT(GPTConfig(**{**sizes, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def generate_tokens(
    model: GPT | Decoder, prompts: list[list[int]], runtime: Runtime | None = None, **settings
) -> list[list[int]]:
    """The tokens generated after each prompt; by default 20, greedy. runtime: only for a model."""
    decoder = make_decoder(model, runtime) if isinstance(model, GPT) else model
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(decoder, prompts, **{"max_new_tokens": 20, "sampling": GREEDY, **settings}):
        for row, token in zip(rows, step.tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def decoder_in(dtype: str, model: GPT) -> Decoder:
    """A decoder of the model in a dtype: the compiled CPU decoder, or TorchDecoder for "torch DTYPE"."""
    kind, _, dtype = dtype.rpartition(" ")
    runtime = resolve_runtime("cpu", "float32" if dtype == "float32" else "bfloat16", False)
    if dtype == "bfloat16":
        model = copy.deepcopy(model).to(torch.bfloat16)
    return TorchDecoder(model, runtime) if kind else make_decoder(model, runtime, dtype)


def run_scheduler(scheduler: Scheduler, *completions: Completion) -> None:
    """Add completions, and run until all have ended."""
    for completion in completions:
        scheduler.add(completion)
    while scheduler.is_busy:
        scheduler.step()


def assert_same_tokens(
    actual: Sequence[int],
    expected: Sequence[int],
    model: GPT | Decoder,
    prompt: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
    samples: Sequence[int] = (0,),
    eot: int | None = None,
    vocab_size: int | None = None,
    seed: int = 1337,
    stride: int | None = None,
) -> int:
    """Assert that two computations in float32 generate the same tokens, up to the first at which rounding decides.

    There, both tokens must follow from the logits of torch's decoder if each changes by at most logits_error. The next
    tokens are not compared, because they follow different texts. Returns the number of equal tokens.

    model: with a compiled decoder, which generated all tokens, rounding decides nothing, because its logits are bitwise
    independent of the batch. The other arguments are those of `generate`, for one row.
    """
    actual, expected = list(actual), list(expected)
    equal = shared_length(actual, expected)
    if actual == expected:
        return equal
    decoder = TorchDecoder(model, resolve_runtime("cpu", "float32", False)) if isinstance(model, GPT) else model
    assert isinstance(decoder, TorchDecoder), (actual, expected)
    settings = dict(sampling=sampling, vocab_size=vocab_size, seed=seed, samples=samples, stride=stride)
    steps = [
        (step.tokens[0], step.logits[0].clone())
        for step in generate(decoder, [prompt], max_new_tokens=equal + 1, **settings)
    ]
    assert [token for token, _ in steps[:-1]] == expected[:equal]
    _, logits = steps[-1]
    V = decoder.config.vocab_size
    counts = torch.bincount(torch.tensor(expected[:equal], dtype=torch.long), minlength=V)
    occurred = torch.bincount(torch.tensor([*prompt, *expected[:equal]]), minlength=V) > 0
    # The rounding of probabilities and of their sums is like a change of the logits divided by the temperature.
    change = logits_error(decoder.config, decoder.config.block_size) * logits.abs().max()
    change += sampling.temperature * rounding_error(V)
    signs = 2 * torch.randint(2, (1000, V), generator=torch.Generator().manual_seed(1)) - 1
    changed = logits + change * signs
    changed[:, vocab_size or V :] = -torch.inf
    probabilities = next_token_probabilities(changed, sampling, occurred, counts.float())
    possible = sample_token(probabilities, uniforms(seed, samples, equal, 1).expand(1000, 1)).unique().tolist()
    for tokens in (actual, expected):
        token = tokens[equal] if equal < len(tokens) else eot
        assert token in possible, f"token {equal} of {tokens} is {token}, but must be in {possible}"
    return equal
