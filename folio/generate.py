"""Text out of a model: sampling filters, the loop over tokens, stop rules, streaming.

Dimensions: B batch (1 here), T time, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from folio.runtime import Runtime
from folio.tokenizer import Tokenizer


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits (..., V) with all but the k largest at -inf; those equal to the k-th largest stay."""
    kth = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (..., V) with all at -inf but the fewest likeliest tokens whose probabilities sum to p or more.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". The likeliest always stays.
    """
    ordered, order = logits.sort(descending=True, dim=-1)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # the sum over the tokens that are likelier
    return logits.masked_fill((before >= p).scatter(-1, order, before >= p), -torch.inf)


def next_token_probabilities(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The distribution that the next token is drawn from: (..., V) logits to (..., V) probabilities.

    Temperature, then top_k, then top_p, as transformers applies them. temperature=0 puts all on the likeliest.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return logits.softmax(dim=-1)


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    runtime: Runtime,
    *,
    max_new_tokens: int,
    block_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eot: int | None = None,
    seed: int = 1337,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt` (at least one id), one at a time, up to and without the id `eot`.

    The model sees the last `block_size` tokens. Puts the model into eval mode. The draws follow from `seed` alone.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    context = torch.tensor([list(prompt)], device=runtime.device)  # (1, T)
    for _ in range(max_new_tokens):
        window = context[:, -block_size:]
        with runtime.compute(window.shape[1]):
            logits, _ = model(window)  # (1, 1, V)
        probabilities = next_token_probabilities(logits[0, -1].float().cpu(), temperature, top_k, top_p)  # (V,)
        token = torch.multinomial(probabilities, num_samples=1, generator=generator)  # (1,)
        if token.item() == eot:
            return
        yield int(token)
        context = torch.cat([window, token[None].to(context.device)], dim=1)


def until(pieces: Iterable[str], stop: str | None) -> Iterator[str]:
    """The pieces of text up to, and without, the first `stop`, however the pieces divide it.

    What may be the beginning of `stop` is held back until it is clear that it is not.
    """
    held = ""
    for piece in pieces:
        held += piece
        if not stop:
            yield held
            held = ""
            continue
        if stop in held:
            yield held[: held.index(stop)]
            return
        keep = next(n for n in range(len(stop) - 1, -1, -1) if held.endswith(stop[:n]))
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held


def opening(tokenizer: Tokenizer) -> list[int]:
    """A prompt for text out of nothing: the end-of-text token, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]
