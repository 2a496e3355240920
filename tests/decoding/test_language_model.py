import re
from pathlib import Path

import numpy as np
import pytest
import torch

import folio
from folio import UserError
from folio.base.settings import setting_names
from folio.data.tokenizer import ByteTokenizer, CharTokenizer
from folio.decoding.language_model import QUANTIZED, GenerationConfig, LanguageModel
from folio.decoding.quantize import quantized
from folio.evaluation.text_loss import token_losses
from lab.bench.baselines import transformers_model
from model import GPT, POSITIONS, GPTConfig
from sample import SampleConfig
from tests.support.decoding import random_model
from tests.support.processes import ROOT
from tests.support.sampling import sample_text
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tolerances import logits_error, rounding_error, within
from train import train


@pytest.fixture
def gpt() -> LanguageModel:
    """A character model with random weights."""
    tokenizer = CharTokenizer("abcdefghij\n")
    return LanguageModel(GPT(GPTConfig(16, tokenizer.vocab_size, 2, 2, 32, dropout=0.5)), tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5, "seed": 7},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
        {"stop": "e", "max_new_tokens": None},
        {"temperature": 0, "context_stride": 3, "batch_size": 2},
    ],
)
def test_the_text_is_the_same_as_in_sample_py(settings, run):
    settings = {"max_new_tokens": 50, **settings}
    gpt = folio.load(run, which="last", dtype="float32")
    text = gpt.generate("ROMEO:", **settings)
    assert "".join(gpt.stream("ROMEO:", **settings)) == text
    samples = gpt.generate("ROMEO:", num_samples=3, **settings)
    assert samples[0] == text and len(samples) == 3
    printed = sample_text(run, checkpoint="last", start="ROMEO:", num_samples=3, **settings)
    assert printed.removesuffix("\n").split("\n---------------\n") == [f"ROMEO:{sample}" for sample in samples]


def test_load_accepts_a_run_or_a_checkpoint(run):
    step = Path(run, "step-000020")
    assert folio.load(step).generate("A") == folio.load(run, "last").generate("A")
    with pytest.raises(UserError, match=r"^which=newest: .* best or last$"):
        folio.load(run, which="newest")
    with pytest.raises(UserError, match=f"gone holds no checkpoint: try {re.escape(run)}$"):
        folio.load(Path(run).with_name("gone"))


def test_settings_are_those_of_sample_py_and_given_by_name(gpt):
    """generate("ROMEO:", 30), like nanoGPT's generate(idx, max_new_tokens), returned 30 long samples."""
    for name in setting_names(GenerationConfig):
        assert getattr(GenerationConfig.from_dict({}), name) == getattr(SampleConfig(), name)
    assert len(gpt.generate("")) == 500
    assert gpt.generate("a", max_new_tokens=2e1, temperature=1) == gpt.generate("a", max_new_tokens=20)
    with pytest.raises(TypeError):
        gpt.generate("abc", 30)
    assert repr(gpt).startswith("LanguageModel(") and "11 tokens (char), context 16, float32 on cpu" in repr(gpt)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": 1e9}, r"temperature=1000000000.0: .* 1e-6 to 1e6, or 0 .*"),
        ({"temprature": 1}, r"temprature is not a setting; .*num_samples, max_new_tokens, .*"),
        ({"top_k": 2.5}, r"top_k=2.5: .* integer or None"),
        ({"num_samples": "3"}, r"num_samples='3': .* integer"),
        ({"prompt": "aΩ"}, r"the character 'Ω' .* at position 1 .*"),
        ({"prompt": 5}, r".* text, not of type int"),
    ],
)
def test_invalid_arguments_are_one_line_errors_before_generation(settings, message, gpt):
    settings = {"prompt": "a", **settings}
    with pytest.raises(UserError, match=f"^{message}$"):
        gpt.generate(**settings)
    stream_message = "num_samples: a stream is one text; .*" if "num_samples" in settings else message
    with pytest.raises(UserError, match=f"^{stream_message}$"):
        gpt.stream(**settings)


def test_unknown_characters_can_be_left_out(gpt):
    """After a call with on_unknown="skip", gpt.tokenizer.encode left out characters without a word."""
    assert gpt.generate("aΩb", on_unknown="skip") == gpt.generate("ab")
    assert gpt.encode_prompt("aΩb", "skip") == ([0, 1], "ab", 1)
    assert gpt.encode_prompt("Ω", "skip") == ([10], "", 1)  # without a prompt, text begins after a line break
    for encode in (gpt.generate, gpt.tokenizer.encode):
        with pytest.raises(UserError, match="'Ω'"):
            encode("aΩb")


def test_texts_do_not_depend_on_the_device(gpt):
    """On a GPU, a text ended when its context was full, unless those of all other rows were full at the same step."""
    requests, config = [([0, 1, 2], 0), ([3], 1), ([4, 5, 6, 7, 8], 2)], GenerationConfig(max_new_tokens=60)
    expected = next(gpt.batches(requests, config)).run()
    with SimulatedGPU() as gpu:
        on_gpu = LanguageModel(gpt.model, gpt.tokenizer, "cuda", "float32")
        assert next(on_gpu.batches(requests, config)).run() == expected
    assert list(map(len, expected)) == [60] * 3
    assert gpu.replays


def test_the_model_is_a_plain_gpt_in_eval_mode(gpt):
    """Its hooks are called. (Text is generated with a copy in another format.)"""
    hooked = []
    gpt.model.transformer.h[0].mlp.register_forward_hook(lambda *args: hooked.append(True))
    ids = torch.tensor([gpt.encode_prompt("abc").ids])
    first, second = gpt.model(ids)[0], gpt.model(ids)[0]
    assert hooked == [True, True] and torch.equal(first, second)
    (step,) = next(gpt.batches([([0, 1, 2], 0)], GenerationConfig(max_new_tokens=1))).steps
    expected = first[:, 0].detach()
    torch.testing.assert_close(step.logits, expected, **within(expected, logits_error(gpt.model.config, 3)))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_model_in_training_is_not_changed(dtype):
    model = GPT(GPTConfig(16, 257, 1, 1, 16))
    gpt = LanguageModel(model, ByteTokenizer(), device="cpu", dtype=dtype)
    assert gpt.generate("a", max_new_tokens=9) and gpt.dtype == dtype
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert gpt.model.num_params() == model.num_params()  # the copy in another format is not `model`


def test_a_list_of_prompts_gives_a_list(gpt):
    settings = dict(max_new_tokens=20, batch_size=2, seed=5)
    prompts = ["abc", "", "defghij" * 4]
    alone = [gpt.generate(prompt, **settings) for prompt in prompts]
    assert gpt.generate(prompts, **settings) == gpt.generate(tuple(prompts), **settings) == alone
    for count in (1, 2):
        samples = [gpt.generate(prompt, num_samples=count, **settings) for prompt in prompts]
        assert gpt.generate(prompts, num_samples=count, **settings) == samples
        assert [first for first, *_ in samples] == alone
    assert gpt.generate([]) == []
    with pytest.raises(UserError, match="text, not of type list"):
        gpt.stream(prompts)
    with pytest.raises(UserError, match="text, not of type int"):
        gpt.generate(["a", 5])


# --- what the model computes for a text -------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_losses_and_logits_are_those_of_the_model(position, seed):
    """The vocabulary of the model is padded, and its attention is confined to documents."""
    tokenizer = ByteTokenizer()
    model = random_model(seed, block_size=16, vocab_size=272, position=position, document_token=tokenizer.eot)
    gpt = LanguageModel(model, tokenizer, dtype="float32")
    text = "a document<|endoftext|>next"
    ids = [*b"a document", 256, *b"next"]
    expected = model.eval().logits(torch.tensor([ids]))[0, :, :257].detach()  # (T, V)
    logits = gpt.logits(text)
    assert logits.dtype == np.float32 and logits.shape == (15, 257)
    tolerance = within(expected, logits_error(model.config, 16))
    np.testing.assert_allclose(logits, expected, **tolerance)
    tolerance["atol"] *= 2  # a loss is a logit minus a log-sum-exp
    losses = torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(gpt.losses(text), losses, **tolerance)
    assert gpt.loss(text) == pytest.approx(float(losses.mean()), abs=tolerance["atol"])
    assert type(gpt.loss(text)) is float
    for same in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), torch.tensor(ids)):
        np.testing.assert_array_equal(gpt.logits(same), logits)


def test_the_loss_of_a_long_text_is_that_of_evaluate(gpt, seed):
    """A text longer than the context is divided as in tools/evaluate.py."""
    ids = np.random.default_rng(seed).integers(11, size=100)
    expected = token_losses(gpt.model, ids, gpt.runtime, stride=16)
    error = 2 * logits_error(gpt.model.config, 16)  # of a logit, and of a log-sum-exp
    np.testing.assert_allclose(gpt.losses(ids), expected, **within(expected, error))
    np.testing.assert_array_equal(gpt.losses(gpt.tokenizer.decode(ids)), gpt.losses(ids))


@pytest.mark.needs("transformers")
@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_attention_and_hidden_states_are_those_of_transformers(seed):
    model = random_model(seed, block_size=16, vocab_size=257, n_layer=3)
    ids = np.random.default_rng(seed).integers(257, size=12)
    gpt = LanguageModel(model, ByteTokenizer(), dtype="float32")
    theirs = transformers_model(model)
    theirs.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = theirs(torch.from_numpy(ids)[None], output_attentions=True, output_hidden_states=True)
    attention, states = gpt.attention(ids), gpt.hidden_states(ids)
    assert attention.dtype == states.dtype == np.float32
    error = logits_error(model.config, 12)
    np.testing.assert_allclose(attention, torch.cat(theirs.attentions), rtol=0, atol=error)
    expected = torch.cat(theirs.hidden_states)
    np.testing.assert_allclose(states, expected, **within(expected, error))
    H, C = model.config.n_head, model.config.n_embd
    assert attention.shape == (3, H, 12, 12) and states.shape == (4, 12, C)
    logits = gpt.logits(ids)
    np.testing.assert_allclose(states[-1] @ model.lm_head.weight.detach().numpy().T, logits, **within(logits, error))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_the_inside_in_other_precisions(dtype, seed):
    """Quantized weights are only in the decoder, which has no attention weights or hidden states."""
    tokenizer = ByteTokenizer()
    model = random_model(seed, block_size=32, vocab_size=260, n_embd=64, document_token=tokenizer.eot)
    gpt = LanguageModel(model, tokenizer, device="cpu", dtype=dtype)
    rounded = quantized(model, dtype).eval() if dtype in QUANTIZED else gpt.model
    ids = [*b"two<|>", 256, *b"documents"]
    expected = rounded.logits(torch.tensor([ids]))[0, :, :257].detach().float()
    logits = gpt.logits(ids)
    assert logits.dtype == np.float32
    error = logits_error(model.config, len(ids), torch.bfloat16)
    np.testing.assert_allclose(logits, expected, **within(expected, error))
    assert gpt.loss("a text that is much longer than the context " * 2) > 0
    if dtype in QUANTIZED:
        for inside in (gpt.attention, gpt.hidden_states):
            with pytest.raises(UserError, match=f"dtype={dtype}: .*dtype='float32'"):
                inside("abc")
    else:
        # Each weight is rounded to bfloat16, relative to itself, and the weights add up to 1.
        np.testing.assert_allclose(gpt.attention(ids).sum(-1), 1, rtol=rounding_error(2, torch.bfloat16))
        assert gpt.hidden_states(ids).dtype == np.float32


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the text is empty"),
        (np.zeros(0), "the text is empty"),
        ("abcdefgh" * 3, r"24 tokens, but the context has 16: .*encode\(text\)\[:16\]"),
        ("aΩ", "the character 'Ω' .* at position 1"),
        ([0, 11], "token ids from 0 to 11: the tokenizer's are 0 to 10"),
        ([-1], "token ids from -1 to -1"),
        ([0.5, 1.0], "token ids of type float64"),
        (torch.zeros(1, 3, dtype=torch.long), r"shape \(1, 3\): give one sequence"),
        (None, r"shape \(\)"),
        (["a", "b"], "token ids of type <U1"),
    ],
)
def test_texts_that_cannot_be_computed(text, message, gpt):
    losses = () if "context" in message else (gpt.loss,)  # a longer text is divided
    for compute in (gpt.logits, gpt.attention, gpt.hidden_states, *losses):
        with pytest.raises(UserError, match=message):
            compute(text)


def test_a_loss_needs_two_tokens(gpt):
    assert gpt.logits("a").shape == (1, 11) and gpt.attention("a").tolist() == [[[[1.0]]] * 2] * 2
    for loss in (gpt.loss, gpt.losses):
        with pytest.raises(UserError, match=r"1 token: .*at least 2"):
            loss("a")


# --- docs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampling_page(tiny, tmp_path) -> list[str]:
    """The programs in docs/use/sampling.md, and in tmp_path the run that they load."""
    train(tiny(max_iters=2, eval_interval=2, out_dir=str(tmp_path / "out-shakespeare-char")))
    return programs_in("docs/use/sampling.md")


def programs_in(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_programs_in_the_docs(sampling_page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    programs = [*programs_in("README.md"), *sampling_page]
    assert len(programs) == 4
    for program in programs:
        capsys.readouterr()
        exec(program, {})
        assert capsys.readouterr().out.strip()


@pytest.mark.needs("nbclient", "ipykernel")
@pytest.mark.slow
def test_the_programs_of_sampling_md_in_a_notebook(sampling_page, tmp_path, monkeypatch):
    """Each program is a cell of one notebook, run by Jupyter's kernel."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program) for program in sampling_page])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells:
        assert {output.output_type for output in cell.outputs} == {"stream"} and cell.outputs[0].text.strip()
