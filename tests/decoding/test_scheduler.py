import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from folio.decoding import torch_decoder
from folio.decoding.cpu_decoder import CPUBatch
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, Scheduler, generate
from folio.machine.runtime import resolve_runtime
from model import GPT
from tests.support import decoding
from tests.support.decoding import (
    GREEDY,
    assert_same_tokens,
    decoder_in,
    generate_tokens,
    random_model,
    run_scheduler,
)
from tests.support.tolerances import logits_error, within

CPU = resolve_runtime("cpu", "float32", False)
DTYPES = ["float32", "bfloat16", "int8", "torch float32"]
EOT = 3


def random_completions(rng: random.Random, count: int, V: int) -> Iterator[Completion]:
    """Prompts with common prefixes, longer or shorter than the context of 24 tokens, with random settings."""
    prefix = [rng.randrange(V) for _ in range(20)]
    for _ in range(count):
        prompt = prefix[: rng.choice([0, 0, 7, 20])] + [rng.randrange(V) for _ in range(rng.randint(1, 12))]
        sampling = Sampling(
            repetition_penalty=rng.choice([1.0, 1.3]),
            temperature=rng.choice([0, 0.8, 1.3]),
            top_k=rng.choice([None, 5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
            logit_bias=rng.choice([(), ((1, 2.0), (EOT, -1.0))]),
        )
        yield Completion(
            prompt,
            sampling,
            rng.choice([1, 2, 30, 60]),
            rng.randrange(3),
            rng.randrange(3),
            rng.choice([None, None, 1, 5]),
            logprobs=rng.choice([None, 0, 3]),
        )


@pytest.mark.parametrize("document_token", [None, 5])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("dtype, ahead", [*((dtype, 0) for dtype in DTYPES), ("torch float32", 1)])
def test_a_completion_is_independent_of_the_batch(dtype, ahead, position, document_token, seed, monkeypatch):
    """Completions join and leave at random steps. The compiled decoder's logits are bitwise equal."""
    rng = random.Random(seed)
    monkeypatch.setattr(torch_decoder, "STEPS_AHEAD", {"cpu": ahead})
    model = random_model(seed, block_size=24, n_embd=32, position=position, document_token=document_token)
    decoder = decoder_in(dtype, model)
    if "torch" not in dtype:
        monkeypatch.setattr(CPUBatch, "chunk", rng.choice([1, 5, 64]))
    # Logits are at most about 10; a log-probability is a logit minus a log-sum-exp.
    tolerance = 2 * 10 * logits_error(model.config, 24) if "torch" in dtype else 0
    scheduler = Scheduler(decoder, rows=rng.choice([2, 7]), eot=EOT)
    arriving = list(random_completions(rng, 20, 20))
    completions, cancelled = list(arriving), []
    while arriving or scheduler.is_busy:
        for _ in range(min(rng.choice([0, 0, 1, 5]), len(arriving))):
            scheduler.add(arriving.pop())
        if scheduler.completions and rng.random() < 0.05:
            cancelled.append(scheduler.completions[rng.choice(list(scheduler.completions))])
            scheduler.cancel(cancelled[-1])
        scheduler.step()
    assert not scheduler.completions and len(scheduler.free_rows) == len(scheduler.contexts)
    for completion in completions:
        alone = replace(completion, tokens=[], token_logprobs=[], finish_reason=None)
        run_scheduler(Scheduler(decoder, rows=1, eot=EOT), alone)
        expected = alone.tokens[: len(completion.tokens)] if completion in cancelled else alone.tokens
        settings = dict(sampling=completion.sampling, samples=[completion.sample], seed=completion.seed, eot=EOT)
        settings |= dict(stride=completion.context_stride)
        assert_same_tokens(completion.tokens, expected, decoder, completion.prompt, **settings)
        if completion in cancelled:
            assert completion.finish_reason == "cancelled"
        elif completion.tokens == expected:  # otherwise, rounding decided
            assert completion.finish_reason == ("length" if len(expected) == completion.max_new_tokens else "stop")
            actual = [entry.logprob for entry in completion.token_logprobs]
            assert actual == pytest.approx([entry.logprob for entry in alone.token_logprobs], abs=tolerance, rel=0)
            assert all(len(entry.top) == completion.logprobs for entry in completion.token_logprobs)
            assert len(actual) == (len(expected) if completion.logprobs is not None else 0)


def test_a_long_prompt_does_not_block_the_others(seed):
    """Between two chunks of its prefill, every other completion gets a token."""
    model = random_model(seed, block_size=1024, n_layer=1)
    scheduler = Scheduler(decoder_in("float32", model), rows=4)
    short = [Completion([n, 5], GREEDY, 500) for n in range(3)]
    for completion in short:
        scheduler.add(completion)
    scheduler.step()
    long = Completion([n % 20 for n in range(1000)], GREEDY, 5)
    scheduler.add(long)
    chunks = 0
    while not long.tokens:
        counts = [len(completion.tokens) for completion in short]
        scheduler.step()
        chunks += 1
        assert [len(completion.tokens) for completion in short] == [count + 1 for count in counts]
    assert chunks == -(-1000 // CPUBatch.chunk)


@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
def test_common_prefixes_are_computed_once(dtype, seed, monkeypatch):
    """Also if the prompts arrive together, and on a CPU after the first completion has ended."""
    computed = count_computed_tokens(monkeypatch)
    model = random_model(seed, block_size=128)
    decoder = decoder_in(dtype, model)
    scheduler = Scheduler(decoder, rows=6)
    computed.clear()
    prefix = [(7 * n) % 20 for n in range(100)]
    prompts = [[*prefix, 1, n] for n in range(4)]
    completions = [Completion(prompt, GREEDY, 10) for prompt in prompts]
    for completion in completions:
        scheduler.add(completion)
    scheduler.step(whole_prompts=True)
    assert sum(computed) == 102 + 3
    run_scheduler(scheduler)
    later = Completion([*prefix, 1, 2, *completions[2].tokens[:5], 9], GREEDY, 10)
    computed.clear()
    run_scheduler(scheduler, later)
    assert sum(computed) == (1 + 9 if dtype == "float32" else 108 + 9)
    for completion in (*completions, later):
        (expected,) = generate_tokens(decoder, [list(completion.prompt)], max_new_tokens=10)
        assert_same_tokens(completion.tokens, expected, decoder, completion.prompt)


def count_computed_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each forward pass appends its number of tokens."""
    computed: list[int] = []
    run, hidden_states = CPUBatch.run, GPT.hidden_states

    def counted_run(self, tokens, appends, count, **fields):
        computed.append(tokens if appends else count)
        run(self, tokens, appends=appends, count=count, **fields)

    def counted_states(self, idx, *rest):
        computed.append(idx.numel())
        return hidden_states(self, idx, *rest)

    monkeypatch.setattr(CPUBatch, "run", counted_run)
    monkeypatch.setattr(GPT, "hidden_states", counted_states)
    return computed


@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
def test_log_probabilities_match_the_model(dtype, seed):
    """Before penalties, temperature, and filters, against a forward pass and NumPy's softmax.

    The padding of the vocabulary has a probability, as in the loss, but is not returned.
    """
    model = random_model(seed, block_size=160)
    prompt = torch.randint(17, (100,)).tolist()
    sampling = Sampling(repetition_penalty=1.3, temperature=0.5, top_k=3, presence_penalty=1.0)
    completion = Completion(prompt, sampling, 30, logprobs=4)
    others = [Completion([5, n], sampling, 60) for n in range(3)]
    run_scheduler(Scheduler(decoder_in(dtype, model), rows=3, vocab_size=17), *others[:2], completion, others[2])
    ids = [*prompt, *completion.tokens]
    logits = model.logits(torch.tensor([ids]))[0].detach().double().numpy()
    logprobs = (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))[:, :17]
    assert len(completion.tokens) == 30
    scored = zip(completion.token_logprobs, completion.tokens, logprobs[len(prompt) - 1 : -1], strict=True)
    tolerance = 2 * within(logits, logits_error(model.config, len(ids)))["atol"]  # of a logit, and of a log-sum-exp
    for (logprob, top), token, expected in scored:
        assert logprob == pytest.approx(expected[token], abs=tolerance)
        assert [value for _, value in top] == pytest.approx(sorted(expected)[:-5:-1], abs=tolerance)
        assert [expected[id] for id, _ in top] == pytest.approx(sorted(expected)[:-5:-1], abs=tolerance)
        assert all(value == logprob for id, value in top if id == token)


@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
def test_penalties_and_bias_match_openais_formula(dtype, seed):
    """logit - frequency * count - presence, counting sampled tokens only, not the prompt's. Greedy tokens are checked
    against NumPy and a forward pass per token.
    """
    model = random_model(seed, block_size=64)
    frequency, presence, bias = 0.9, 0.6, {4: 1.5, 7: -100.0}
    sampling = Sampling(0.999999, 0, None, None, None, presence, frequency, tuple(bias.items()))
    completion = Completion([4, 4, 7], sampling, 40)
    run_scheduler(
        Scheduler(decoder_in(dtype, model), rows=2), Completion([1], Sampling(presence_penalty=2.0), 50), completion
    )
    ids, counts = [4, 4, 7], np.zeros(20)
    for token in completion.tokens:
        logits = model(torch.tensor([ids]))[0][0, -1].detach().double().numpy()
        for id, value in bias.items():
            logits[id] += value
        logits -= frequency * counts + presence * (counts > 0)
        tolerance = within(logits, logits_error(model.config, len(ids)))["atol"]
        assert logits[token] == pytest.approx(logits.max(), abs=tolerance) and token != 7
        counts[token] += 1
        ids.append(token)


@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
def test_a_cancelled_completion_frees_its_row_at_once(dtype, seed):
    """While it waits, during its prefill, and during decoding."""
    decoder = decoder_in(dtype, random_model(seed, block_size=200))
    scheduler = Scheduler(decoder, rows=1)
    first, second, third, last = (Completion([n] * 150, GREEDY, 20) for n in (0, 1, 2, 2))
    for completion in (first, second, third):
        scheduler.add(completion)
    scheduler.step()
    assert first.row == 0 and second.row is None
    scheduler.cancel(second)
    scheduler.cancel(first)
    assert not scheduler.completions and scheduler.free_rows == [0] and list(scheduler.waiting) == [third]
    while not third.tokens:
        scheduler.step()
    scheduler.cancel(third)
    scheduler.cancel(third)
    assert scheduler.free_rows == [0] and not scheduler.step() and not scheduler.is_busy
    run_scheduler(scheduler, last)
    assert_same_tokens(last.tokens, *generate_tokens(decoder, [last.prompt]), decoder, last.prompt)


def test_nan_ends_only_the_affected_completion(seed):
    model = random_model(seed, block_size=16)
    with torch.no_grad():
        model.transformer.wpe.weight[9] = torch.nan
    short, long = Completion([1], GREEDY, 5), Completion([2] * 12, GREEDY, 5)
    run_scheduler(Scheduler(decoder_in("float32", model), rows=2), long, short)
    assert long.finish_reason == "error" and "NaN" in long.error and not long.tokens
    assert short.finish_reason == "length" and len(short.tokens) == 5


def test_each_step_of_generate_has_a_token_of_each_row(seed):
    """Also when contexts are full at different steps."""
    model = random_model(seed)
    steps = list(generate(decoder_in("float32", model), [[1], [2, 3, 4], [5] * 8], max_new_tokens=30, sampling=GREEDY))
    assert len(steps) == 30 and all(None not in step.tokens for step in steps)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_rows_that_end_do_not_affect_the_others(model, runtime):
    prompts, decoder = [[1], [2, 3, 4], [5, 6]], decoding.make_decoder(model, runtime)
    full = generate_tokens(decoder, prompts)
    eot = full[0][4]
    for prompt, row, full_row in zip(prompts, generate_tokens(decoder, prompts, eot=eot), full, strict=True):
        expected = full_row[: full_row.index(eot)] if eot in full_row else full_row
        assert_same_tokens(row, expected, decoder, prompt, eot=eot)
    ended = [False] * 3  # set by the caller
    tokens = []
    steps = generate(decoder, prompts, max_new_tokens=20, sampling=GREEDY, ended=ended)
    for number, step in enumerate(steps):
        tokens.append(step.tokens)
        ended[1] = ended[1] or number == 2
        ended[0] = ended[2] = number >= 15
    for prompt, row, full_row, count in zip(prompts, zip(*tokens, strict=True), full, (16, 3, 16), strict=True):
        assert_same_tokens(row[:count], full_row[:count], decoder, prompt)
        assert row[count:] == (None,) * (16 - count)


@pytest.mark.parametrize("case", range(4))
def test_a_row_does_not_depend_on_its_batch(case, model, runtime, seed):
    """The tokens of (prompt, sample) are the same in any batch and in any order.

    With max_new_tokens=None, the longest prompt of a batch limited the tokens of each row.
    """
    rng, decoder = random.Random(seed + case), decoding.make_decoder(model, runtime)
    requests = [([rng.randrange(20) for _ in range(rng.randint(1, 11))], rng.randrange(1000)) for _ in range(6)]
    requests += [(requests[0][0], 7), requests[1], requests[1]]  # another sample of a prompt, and one sample twice
    max_new_tokens = rng.choice([None, 1, 30])
    settings = dict(
        sampling=rng.choice([GREEDY, Sampling(), Sampling(1.3, 0.9, top_k=8, top_p=0.9, min_p=0.01)]),
        stride=rng.choice([None, 1, 3, 8, 100]),
        eot=rng.choice([None, 3]),
        vocab_size=rng.choice([None, 18]),
        seed=rng.randrange(2**63),
    )
    print(max_new_tokens, settings)

    def generate_rows(batch: list[tuple[list[int], int]]) -> list[list[int]]:
        prompts, samples = zip(*batch, strict=True)
        return generate_tokens(decoder, prompts, samples=samples, max_new_tokens=max_new_tokens, **settings)

    for _ in range(3):
        rng.shuffle(requests)
        batch = requests[: rng.randint(2, len(requests))]
        for (prompt, k), row in zip(batch, generate_rows(batch), strict=True):
            assert_same_tokens(row, *generate_rows([(prompt, k)]), decoder, prompt, samples=[k], **settings)


@pytest.mark.parametrize("max_new_tokens", [2, 5])
@pytest.mark.parametrize("dtype", ["float32", "torch float32"])
def test_a_prompt_may_continue_a_generated_text(dtype, max_new_tokens, seed):
    """The last token of a text has no cached keys and values."""
    model = random_model(seed)
    decoder = decoder_in(dtype, model)
    scheduler, text = Scheduler(decoder, rows=2), Completion([1, 2], GREEDY, max_new_tokens)
    scheduler.add(text)
    while len(text.tokens) < 2:
        scheduler.step()
    reused, fresh = (Completion([1, 2, *text.tokens, 5], GREEDY, 2, logprobs=0) for _ in range(2))
    run_scheduler(scheduler, reused)
    run_scheduler(Scheduler(decoder, rows=1), fresh)
    equal = assert_same_tokens(reused.tokens, fresh.tokens, decoder, fresh.prompt)
    tolerance = 2 * 10 * logits_error(model.config, 8)  # logits of up to about 10
    for actual, expected in zip(reused.token_logprobs[:equal], fresh.token_logprobs, strict=False):
        assert actual.logprob == pytest.approx(expected.logprob, abs=tolerance)


def test_without_a_limit_each_row_fills_its_context(model, runtime):
    prompts = [[1], [2, 3, 4, 5, 6], list(range(12))]
    assert [len(row) for row in generate_tokens(model, prompts, runtime, max_new_tokens=None)] == [7, 3, 1]


def test_samples_and_seeds_give_different_texts(model, runtime):
    rows = [
        generate_tokens(model, [[1, 2]] * 5, runtime, sampling=Sampling(temperature=1.2), seed=seed) for seed in (1, 2)
    ]
    assert len({tuple(row) for row in rows[0]}) == 5 and rows[0] != rows[1]
