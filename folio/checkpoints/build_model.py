"""Models from saved tensors, and changes of a model's context and vocabulary."""

from dataclasses import replace

import torch
from torch import Tensor

from folio.machine.kernels import FusedAttention
from model import GPT, Embedding, GPTConfig


def model_from_tensors(config: GPTConfig, tensors: dict[str, Tensor]) -> GPT:
    """Build a model whose parameters are these tensors, without copying them. Tied weights occur once.

    Its attention is torch's, which is the fastest in evaluation. Raises KeyError, ValueError, or RuntimeError (from
    load_state_dict) if names or shapes do not match `config`.
    """
    if len({name.split(".")[2] for name in tensors if ".h." in name}) != config.n_layer:  # before building layers
        raise ValueError(f"these are not the weights of {config.n_layer} layers")
    with torch.device("meta"):
        model = GPT(config)
    model.kernel = FusedAttention()
    tensors = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model


def crop_block_size(model: GPT, block_size: int) -> None:
    """Change block_size. Only the first `block_size` learned positions are kept; ValueError if there are fewer."""
    if model.config.position == "learned":
        if block_size > model.config.block_size:
            raise ValueError(f"block_size={block_size} is more than the model's {model.config.block_size} positions")
        first_positions = model.transformer.wpe.weight[:block_size].clone()
        model.transformer.wpe = Embedding.from_pretrained(first_positions, freeze=False)
    model.config = model.position_encoding.config = replace(model.config, block_size=block_size)


def with_vocab_size(model: GPT, vocab_size: int, seed: int) -> GPT:
    """Copy a model with a larger vocabulary. The new rows are initialized as in a new model."""
    larger = GPT(replace(model.config, vocab_size=vocab_size), seed)
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in larger.named_parameters():
            p[: len(tensors[name])] = tensors[name]
    return larger
