"""A small model with random weights, and the tokens that it generates."""

import torch

from folio.generate import Sampling, generate
from folio.runtime import Runtime
from model import GPT, GPTConfig

GREEDY = Sampling(temperature=0)


def random_model(seed: int, **settings) -> GPT:
    """A model whose weights are so large that the logits differ clearly. settings: fields of GPTConfig to change."""
    torch.manual_seed(seed)
    sizes = dict(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, dropout=0.5)
    model = GPT(GPTConfig(**{**sizes, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def generate_tokens(model: GPT, prompts: list[list[int]], runtime: Runtime, **settings) -> list[list[int]]:
    """The tokens that follow each prompt; by default 20, greedy."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, runtime, **{"max_new_tokens": 20, "sampling": GREEDY, **settings}):
        for row, token in zip(rows, step.tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows
