import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from folio.generate import generate, keep_top_k, keep_top_p, next_token_probabilities, opening, until
from folio.runtime import decide
from folio.tokenizer import CharTokenizer
from model import GPT, GPTConfig
from tests.test_tokenizer import bpe


@pytest.fixture(scope="module")
def runtime():
    return decide("cpu", "float32", False)


@pytest.fixture
def model(seed):
    """Random weights, far enough apart that the model has opinions."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, dropout=0.5))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1, None, None), (0.7, 5, None), (1.3, None, 0.8), (0.5, 9, 0.6)]
)
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p, seed):
    torch.manual_seed(seed)
    logits = torch.randn(4, 30) * 3
    theirs = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p:
        theirs.append(TopPLogitsWarper(top_p))
    expected = theirs(None, logits).softmax(-1)
    torch.testing.assert_close(next_token_probabilities(logits, temperature, top_k, top_p), expected)


def test_filters_keep_what_they_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [True, True, False, False]
    assert keep_top_k(logits, 99).isfinite().all()
    for p, kept in ((0.01, 1), (0.5, 1), (0.51, 2), (0.9, 3), (1.0, 4)):
        assert keep_top_p(logits, p).isfinite().sum() == kept
    assert next_token_probabilities(logits, 0, None, None).tolist() == [1, 0, 0, 0]


def test_greedy_is_the_argmax_over_the_window(model, runtime):
    prompt = [1, 2, 3]
    tokens = list(generate(model, prompt, runtime, max_new_tokens=20, block_size=8, temperature=0))
    context = list(prompt)
    for token in tokens:
        assert token == model(torch.tensor([context[-8:]]))[0][0, -1].argmax().item()
        context.append(token)
    assert tokens == list(generate(model, prompt, runtime, max_new_tokens=20, block_size=8, top_k=1, seed=5))


def test_draws_follow_from_the_seed(model, runtime):
    def draw(seed: int) -> list[int]:
        return list(generate(model, [1], runtime, max_new_tokens=20, block_size=8, seed=seed))

    assert draw(1) == draw(1) != draw(2)


def test_the_end_of_text_ends_it_unseen(model, runtime):
    free = list(generate(model, [1], runtime, max_new_tokens=20, block_size=8, temperature=0))
    ended = list(generate(model, [1], runtime, max_new_tokens=20, block_size=8, temperature=0, eot=free[5]))
    assert ended == free[: free.index(free[5])]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", ["\n\n", "aab", "x", None])
def test_text_ends_before_the_stop_however_it_is_cut(stop, size):
    text = "caaab\n \n\nmore aab"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    expected = text.split(stop)[0] if stop else text
    assert "".join(until(pieces, stop)) == expected


def test_text_out_of_nothing():
    assert opening(CharTokenizer("\nab")) == [0] and opening(CharTokenizer("ab\n")) == [2]
    assert opening(CharTokenizer("ab")) == [0] and opening(bpe()) == [261]
