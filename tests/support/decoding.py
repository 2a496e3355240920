"""Small models with random weights, and generation of tokens."""

import copy

import torch

from folio.decoding.decoders import Decoder, make_decoder
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import generate
from folio.decoding.torch_decoder import TorchDecoder
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT, GPTConfig

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
