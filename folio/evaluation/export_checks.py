"""Check that an exported model computes the same as model.py, and that model.py computes GPT-2.

Dimensions: T time, V vocabulary.
"""

import torch
from torch import Tensor

from folio import UserError
from folio.base.settings import ROOT
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import ExportedModel, transformers_model
from folio.decoding.language_model import LanguageModel
from model import GPTConfig

TOLERANCE = 1e-4  # largest difference of the logits in float32, relative to the largest logit
OTHER_GELU_TOLERANCE = 1e-2  # the same if one computes the exact GELU and the other GPT-2's approximation


def logit_tolerance(loaded: Checkpoint, activations: tuple[str, ...]) -> float:
    """Return the tolerance for the logits of a program that implements `activations`."""
    same_activation = loaded.state["model"].get("activation", GPTConfig.activation) in activations
    return TOLERANCE if same_activation else OTHER_GELU_TOLERANCE


def check_computes_gpt2(loaded: Checkpoint, gpt2: Checkpoint, to: str) -> None:
    """Raise UserError unless model.py and transformers' GPT-2 compute the same logits from the checkpoint.

    gpt2: the checkpoint with a table of position embeddings. An edited model.py may keep the parameters and compute
    something else, which compare_export misses for formats that Folio itself reads. The ids are those of one document.
    """
    shape = gpt2.state["model"]
    known = [token for token in range(shape["vocab_size"]) if token != shape.get("document_token")]
    ids = torch.tensor(known)[torch.arange(shape["block_size"]) % len(known)][None]  # (1, T)
    with torch.inference_mode():
        logits = loaded.build().eval().logits(ids)  # (1, T, V)
        difference = relative_difference(logits, transformers_model(shape, gpt2.model)(ids).logits)
    if not difference < TOLERANCE:  # also if it is NaN
        raise UserError(
            f"model.py does not compute GPT-2: with these weights its logits differ by {difference:.1e} of the largest "
            f"from transformers' GPT-2, but --to={to} supports only GPT-2"
        )


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest expected logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def compare_export(loaded: Checkpoint, exported: ExportedModel, tolerance: float = TOLERANCE) -> str:
    """Compare an export with the checkpoint, on texts of one document. Raises UserError if tokens or logits differ."""
    model, tokenizer = loaded.build().eval(), loaded.tokenizer
    generated = LanguageModel(model, tokenizer, "cpu", "float32").generate("", max_new_tokens=200)
    n_tokens, differences = 0, []
    for text in ((ROOT / "train.py").read_text(encoding="utf-8"), generated):
        ids = tokenizer.encode(text, "skip").tolist()
        known_text = tokenizer.decode(ids)  # without characters outside the vocabulary
        if exported.encode(known_text) != ids or exported.decode(ids) != known_text:
            raise UserError(f"the exported tokenizer encodes {known_text[:40]!r}... differently")
        context = torch.tensor([ids[: model.config.block_size]])  # (1, T)
        with torch.inference_mode():
            expected = model.logits(context)  # (1, T, V)
            difference = relative_difference(exported.logits(context), expected)
        if not difference < tolerance:  # also if it is NaN
            raise UserError(f"the exported model's logits differ by {difference:.1e} of the largest")
        n_tokens += len(ids)
        differences.append(difference)
    return f"{n_tokens:,} tokens are identical; the largest relative difference of logits is {max(differences):.0e}"
