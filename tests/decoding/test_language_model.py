import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import folio
from folio import UserError
from folio.data.tokenizer import ByteTokenizer, CharTokenizer
from folio.decoding import language_model
from folio.decoding.language_model import GenerationConfig, LanguageModel
from model import GPT, GPTConfig
from sample import SampleConfig, main
from tests.support.processes import ROOT
from tests.support.simulated_gpu import SimulatedGPU
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
def test_the_text_is_the_same_as_in_sample_py(settings, tiny):
    cfg = tiny(max_iters=4)
    train(cfg)
    settings = {"max_new_tokens": 50, **settings}
    gpt = folio.load(cfg.out_dir, which="last", dtype="float32")
    text = gpt.generate("ROMEO:", **settings)
    assert "".join(gpt.stream("ROMEO:", **settings)) == text
    samples = gpt.generate("ROMEO:", num_samples=3, **settings)
    assert samples[0] == text and len(samples) == 3
    sample_config = SampleConfig(
        out_dir=cfg.out_dir, checkpoint="last", dtype="float32", start="ROMEO:", num_samples=3, **settings
    )
    out = io.StringIO()
    with redirect_stdout(out):
        main(sample_config)
    assert out.getvalue().removesuffix("\n").split("\n---------------\n") == [f"ROMEO:{sample}" for sample in samples]


def test_load_accepts_a_run_or_a_checkpoint(tiny):
    cfg = tiny(max_iters=4)
    train(cfg)
    (step,) = Path(cfg.out_dir).glob("step-*")
    assert folio.load(step).generate("A") == folio.load(str(cfg.out_dir), "last").generate("A")
    with pytest.raises(UserError, match=r"^which=newest: .* best or last$"):
        folio.load(cfg.out_dir, which="newest")
    with pytest.raises(UserError, match=f"gone holds no checkpoint: try {re.escape(cfg.out_dir)}$"):
        folio.load(Path(cfg.out_dir).with_name("gone"))


def test_the_stream_consists_of_whole_characters():
    gpt = LanguageModel(GPT(GPTConfig(16, 257, 1, 1, 16)), ByteTokenizer())
    pieces = list(gpt.stream("é", max_new_tokens=60, temperature=2))
    assert all(pieces) and "".join(pieces) == gpt.generate("é", max_new_tokens=60, temperature=2)


def test_the_default_settings_are_those_of_sample_py(gpt):
    sample_config = SampleConfig()
    for name in GenerationConfig.__dataclass_fields__:
        assert getattr(GenerationConfig.from_dict({}), name) == getattr(sample_config, name)
    assert len(gpt.generate("")) == 500


def test_settings_are_converted_as_in_a_config_file(gpt):
    assert gpt.generate("a", max_new_tokens=2e1, temperature=1) == gpt.generate("a", max_new_tokens=20, temperature=1.0)


def test_settings_are_given_by_name(gpt):
    """generate("ROMEO:", 30), like nanoGPT's generate(idx, max_new_tokens), returned 30 long samples."""
    with pytest.raises(TypeError):
        gpt.generate("abc", 30)
    assert repr(gpt).startswith("LanguageModel(") and "11 tokens (char), context 16, float32 on cpu" in repr(gpt)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": 1e9}, r"temperature=1000000000.0: .* 1e-6 to 1e6, or 0 .*"),
        ({"temprature": 1}, r"temprature is not a setting; .*num_samples, max_new_tokens, .*"),
        ({"top_k": 2.5}, r"top_k=2.5: .* integer or None"),
        ({"top_p": 0}, r"top_p=0.0: .* above 0 and at most 1, or None"),
        ({"num_samples": "3"}, r"num_samples='3': .* integer"),
        ({"prompt": "aΩ"}, r"the character 'Ω' .* at position 1 .*"),
        ({"prompt": ["a"]}, r".* text, not of type list"),
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
    assert gpt.generate("aΩb", on_unknown="skip") == gpt.generate("ab")
    assert gpt.encode_prompt("aΩb", "skip") == ([0, 1], "ab", 1)
    assert gpt.encode_prompt("Ω", "skip") == ([10], "", 1)  # without a prompt, text begins after a line break
    with pytest.raises(UserError):  # on_unknown is a setting of each call
        gpt.generate("aΩb")


def test_generating_does_not_change_the_tokenizer(gpt):
    """After a call with on_unknown="skip", gpt.tokenizer.encode left out characters without a word."""
    gpt.generate("aΩb", on_unknown="skip", max_new_tokens=1)
    with pytest.raises(UserError, match="'Ω'"):
        gpt.tokenizer.encode("aΩb")


def test_texts_do_not_depend_on_the_device(gpt, monkeypatch):
    """On a GPU, a text ended when its context was full, unless those of all other rows were full at the same step."""
    requests, config = [([0, 1, 2], 0), ([3], 1), ([4, 5, 6, 7, 8], 2)], GenerationConfig(max_new_tokens=60)
    expected = list(gpt.complete(requests, 3, config))
    with SimulatedGPU(monkeypatch) as gpu:
        monkeypatch.setattr(language_model, "resolve_runtime", lambda *args: gpu.runtime())
        on_gpu = LanguageModel(gpt.model, gpt.tokenizer)
        assert list(on_gpu.complete(requests, 3, config)) == expected
    assert list(map(len, expected)) == [60] * 3 and gpu.replays


def test_the_model_is_a_plain_gpt_in_eval_mode(gpt):
    """Its hooks are called. (Text is generated with a copy in another format.)"""
    hooked = []
    gpt.model.transformer.h[0].mlp.register_forward_hook(lambda *args: hooked.append(True))
    ids = torch.tensor([gpt.encode_prompt("abc").ids])
    first, second = gpt.model(ids)[0], gpt.model(ids)[0]
    assert hooked == [True, True] and torch.equal(first, second)
    (step,) = gpt.steps([[0, 1, 2]], [0], GenerationConfig(max_new_tokens=1))
    torch.testing.assert_close(step.logits, first[:, 0].detach())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_model_in_training_is_not_changed(dtype):
    model = GPT(GPTConfig(16, 257, 1, 1, 16))
    gpt = LanguageModel(model, ByteTokenizer(), device="cpu", dtype=dtype)
    assert gpt.generate("a", max_new_tokens=9) and gpt.dtype == dtype
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert gpt.model.num_params() == model.num_params()  # the copy in another format is not `model`


def test_the_python_programs_in_the_docs(tiny, tmp_path, monkeypatch, capsys):
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/use/sampling.md")]
    programs = [program for page in pages for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    assert len(programs) == 3
    train(tiny(max_iters=2, eval_interval=2, out_dir=str(tmp_path / "out-shakespeare-char")))
    monkeypatch.chdir(tmp_path)
    for program in programs:
        capsys.readouterr()
        exec(program, {})
        assert capsys.readouterr().out.strip()
