import itertools
import pickle
import re
from dataclasses import asdict, replace

import pytest
import torch

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from folio import UserError
from folio.checkpoints import foreign, foreign_tokenizers
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import (
    FORMATS,
    check_fits,
    model_card,
    with_position_table,
    write_gguf,
    write_hugging_face,
    write_nanogpt,
)
from folio.data.tokenizer import CharTokenizer
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import generate
from folio.evaluation.export_checks import check_computes_gpt2, compare_export
from model import GPTConfig
from tests.support.decoding import decoder_in
from tests.support.exports import KINDS, checkpoint_of, output_path, run_export
from tests.support.tiny_tokenizers import TEXT, bpe
from tests.support.tolerances import logits_error, rounding_error, within
from tools import export

pytestmark = pytest.mark.architecture("folio/checkpoints/export_formats.py, which writes GPT-2's weights only")


WITHOUT_EOT = TEXT.replace("<|endoftext|>", "")


@pytest.mark.parametrize(
    "to, kind, position",
    [
        *(("hf", kind, "learned") for kind in KINDS),
        *(("gguf", kind, "learned") for kind in ("gpt2", "bpe")),
        *(("nanogpt", kind, "learned") for kind in ("char with eot", "gpt2")),
        *((to, "gpt2", "sinusoidal") for to in FORMATS),  # exported as a table
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_an_exported_file_is_read_back(to, kind, position, bias, tmp_path, monkeypatch):
    """By Folio, and for hf by transformers. For characters and bytes, the error was that tokenizer.json is not a
    byte-level BPE.
    """
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)  # nanoGPT's without a meta.pkl
    monkeypatch.setattr(foreign_tokenizers, "is_gpt2_size", lambda size: kind == "gpt2")
    activation = "gelu" if to == "nanogpt" or (to == "hf" and bias) else "gelu_new"
    loaded = checkpoint_of(KINDS[kind](), bias, 5, activation, position=position)
    gpt2, path = with_position_table(loaded), output_path(tmp_path, to)
    check_fits(gpt2, to)
    check_computes_gpt2(loaded, gpt2, to)
    FORMATS[to].write(gpt2, path)
    assert "tokens are identical" in compare_export(loaded, FORMATS[to].open(path))
    read = foreign.load(str(path / "ckpt.pt" if to == "nanogpt" else path))
    ids = loaded.tokenizer.encode(WITHOUT_EOT).tolist()
    assert read.tokenizer.encode(WITHOUT_EOT).tolist() == ids
    assert read.tokenizer.vocab_size == loaded.tokenizer.vocab_size and read.tokenizer.eot == loaded.tokenizer.eot
    assert asdict(read.config()) == {**asdict(gpt2.config()), "bias": bias or to != "nanogpt"}
    assert all(torch.equal(read.model[name], tensor) for name, tensor in gpt2.model.items())
    added = read.model.keys() - gpt2.model.keys()
    assert all(name.endswith(".bias") and not read.model[name].any() for name in added)
    assert bool(added) == (to != "nanogpt" and not bias)
    model, ids = loaded.build().eval(), torch.tensor([ids])
    expected = model.logits(ids)
    tolerance = within(expected, logits_error(model.config, ids.shape[1]))
    torch.testing.assert_close(read.build().eval().logits(ids), expected, **tolerance)
    if to == "hf":
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert hf_tokenizer(WITHOUT_EOT).input_ids == ids[0].tolist() and hf_tokenizer.decode(ids[0]) == WITHOUT_EOT
        assert hf_tokenizer.eos_token_id == loaded.tokenizer.eot == hf_model.config.eos_token_id
        torch.testing.assert_close(hf_model(ids).logits, expected, **tolerance)


def test_an_unknown_character_is_also_an_error_in_transformers(tmp_path):
    """It silently became the first character of the vocabulary, often the line break."""
    loaded = checkpoint_of(CharTokenizer.of("abc \n"), False)
    write_hugging_face(loaded, tmp_path / "hf")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    for folder in ("hf", "again"):
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert hf_tokenizer.decode(hf_tokenizer("a cab").input_ids) == "a cab" and len(hf_tokenizer) == 5
        for text in ("x", ["a cab", "caxb"]):
            with pytest.raises(Exception, match=r"WordLevel error: Missing \[UNK\] token from the vocabulary"):
                hf_tokenizer(text)
    pipe = transformers.pipeline("text-generation", str(tmp_path / "hf"), max_new_tokens=2)
    assert pipe("a cab")[0]["generated_text"].startswith("a cab")
    with pytest.raises(Exception, match="Missing"):
        pipe("a cxb")


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_card_says_how_to_use_the_model(kind, tmp_path, monkeypatch, capsys):
    """Its Python code runs unchanged in the parent folder of the export."""
    loaded = checkpoint_of(KINDS[kind](), False)
    dataset = {"folder": "/home/me/novel:3,letters:1", "prompt_format": None}
    state = {"dataset": dataset, "step": 7, "best_step": 7, "best_val_loss": 1.23456}
    loaded = replace(loaded, state={**loaded.state, **state})
    write_hugging_face(loaded, tmp_path / "exported")
    card = model_card(loaded, "exported", "4 tokens are identical")
    parameters = sum(p.numel() for p in loaded.build().parameters())
    for row in (
        f"| parameters | {parameters:,}, and ",
        "| context | 64 tokens |",
        "| training data | novel, letters |",
        "| validation loss | 1.2346 nats per token, after 7 steps |",
        "4 tokens are identical",
    ):
        assert row in card
    assert ("WordLevel error" in card) == ("The tokenizer encodes any text" not in card) == kind.startswith("char")
    other_step = replace(loaded, state={**loaded.state, "step": 8})
    assert "validation loss" not in model_card(other_step, "exported", "")
    seen = {"dataset": {**state["dataset"], "not_held_out": ["novel"]}}
    card = model_card(replace(loaded, state={**loaded.state, **seen}), "exported", "")
    assert "after 7 steps, on text that the weights it started from may have been trained on |" in card
    assert "training data" not in model_card(checkpoint_of(KINDS[kind](), True), "exported", "")
    sinusoidal = model_card(checkpoint_of(KINDS[kind](), True, position="sinusoidal"), "exported", "")
    assert "sinusoidal" in sinusoidal and "sinusoidal" not in card
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    exec(code, {})
    assert capsys.readouterr().out.strip()
    # It failed: "Input length of input_ids is 64, but max_length is set to 64"; before, model_max_length was 10**30, so
    # that truncation=True did nothing.
    long_prompt = "hello " * 100 + "world"
    exec(re.sub("prompt = .*", f"prompt = {long_prompt!r}", code), scope := {})
    prompt = scope["tokenizer"].decode(scope["inputs"].input_ids[0])
    assert scope["outputs"].shape[1] <= 64 and long_prompt.endswith(prompt)


@pytest.mark.parametrize(
    "to, kind, reason",
    [
        ("gguf", "char", "random: --to=gguf .*'char', only gpt2 and bpe; .*--to=hf.*--tokenizer=bpe"),
        ("nanogpt", "bpe", "random: --to=nanogpt .*'bpe', only char and gpt2; .*--to=hf.*--tokenizer=gpt2"),
    ],
)
def test_a_tokenizer_that_the_format_does_not_support_is_an_error(to, kind, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "load", lambda *_: checkpoint_of(KINDS[kind](), False))
    path = output_path(tmp_path, to)
    with pytest.raises(UserError, match=reason):
        run_export("random", path, f"--to={to}")
    assert not path.exists()


def changed(loaded: Checkpoint, tensors: dict | None = None, **settings) -> Checkpoint:
    """A checkpoint with changed tensors (None: removed) and changed settings of its model."""
    model = {name: tensor for name, tensor in {**loaded.model, **(tensors or {})}.items() if tensor is not None}
    return replace(loaded, model=model, state={"model": {**loaded.state["model"], **settings}})


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "tensors, settings, message",
    [
        ({"lm_head.weight": torch.ones(266, 16)}, {}, "does not support the parameter lm_head.weight"),
        ({"transformer.wpe.weight": None}, {}, "requires the parameter transformer.wpe.weight"),
        ({}, {"n_layer": 10**12}, "requires the parameter transformer.h.2.ln_1.weight"),
        ({"transformer.h.1.mlp.c_fc.weight": torch.ones(32, 16)}, {}, r"c_fc.weight .*\(64, 16\), not \(32, 16\)"),
        ({}, {"n_kv_head": 1}, "does not support .*n_kv_head=1"),
        ({}, {"position": "rotary"}, "does not support position='rotary', only learned and sinusoidal"),
        ({}, {"activation": "relu2"}, "does not support activation='relu2', only gelu_new and gelu"),
    ],
)
def test_features_that_a_format_does_not_support_are_errors(to, tensors, settings, message, tmp_path, monkeypatch):
    """The export was written with wrong logits, failed with a KeyError, or omitted a parameter."""
    loaded = changed(checkpoint_of(bpe(), True, 5), tensors, **settings)
    monkeypatch.setattr(foreign, "load", lambda *_: loaded)
    unwritable = replace(FORMATS[to], write=lambda *_: pytest.fail("the export was written"))
    monkeypatch.setattr(export, "FORMATS", {to: unwritable})
    path = output_path(tmp_path, to)
    with pytest.raises(UserError, match=rf"^random: --to={to} .*{message}"):
        run_export("random", path, f"--to={to}")
    assert not path.exists()


@pytest.mark.parametrize("damaged", [{"block_size": "8"}, {"n_embd": None}])
def test_a_position_table_for_a_damaged_shape_is_a_one_line_error(damaged):
    with pytest.raises(UserError, match=r"do not fit state\.json"):
        with_position_table(changed(checkpoint_of(bpe(), True, position="sinusoidal"), **damaged))


@pytest.mark.parametrize("to", FORMATS)
def test_settings_that_are_off_or_default_or_only_for_training_are_supported(to, monkeypatch):
    """A new setting of the model whose default is a text ended all exports."""
    monkeypatch.setattr(GPTConfig, "norm", "layer", raising=False)
    loaded = checkpoint_of(bpe(), False)
    check_fits(changed(loaded, norm="layer"), to)
    with pytest.raises(UserError, match="does not support the model's setting norm='rms'"):
        check_fits(changed(loaded, norm="rms"), to)
    check_fits(changed(loaded, dropout=0.1, attn_pdrop=0.2, qk_norm=False, n_kv_head=None), to)
    without_bias = {name: value for name, value in loaded.state["model"].items() if name != "bias"}
    with pytest.raises(UserError, match=f"--to={to} requires the model's setting bias"):
        check_fits(replace(loaded, state={"model": without_bias}), to)


def test_a_missing_bias_is_zero_only_if_the_format_has_all_biases():
    loaded = changed(checkpoint_of(bpe(), True), {"transformer.ln_f.bias": None})
    check_fits(loaded, "hf")
    check_fits(loaded, "gguf")
    with pytest.raises(UserError, match=r"--to=nanogpt requires the parameter transformer\.ln_f\.bias"):
        check_fits(loaded, "nanogpt")
    extra = changed(checkpoint_of(bpe(), False), {"transformer.ln_f.bias": torch.ones(16)})
    check_fits(extra, "hf")
    with pytest.raises(UserError, match=r"--to=nanogpt does not support the parameter transformer\.ln_f\.bias"):
        check_fits(extra, "nanogpt")


def test_ckpt_pt_has_the_format_of_nanogpts_sample_py(tmp_path):
    """model_args match its GPTConfig, the tied matrix has both names, and meta.pkl maps characters both ways."""
    write_nanogpt(checkpoint_of(CharTokenizer.of(TEXT), bias=False), tmp_path / "exported")
    saved = torch.load(tmp_path / "exported" / "ckpt.pt", weights_only=True)
    assert set(saved["model_args"]) == {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert saved["model"]["lm_head.weight"] is not None
    meta = pickle.loads((tmp_path / "exported" / "data" / saved["config"]["dataset"] / "meta.pkl").read_bytes())
    assert all(meta["itos"][meta["stoi"][character]] == character for character in TEXT.split("<")[0])


# Quantization step relative to a block's largest weight, and maximum error in steps: of the code, and of the scale.
STEPS = {"F16": (2**-11, 1), "Q8_0": (1 / 127, 1 / 2 + 127 * 2**-11), "Q4_0": (1 / 8, 1 + 8 * 2**-11)}


@pytest.mark.parametrize("matrices", STEPS)
def test_quantized_matrices_are_read_back(matrices, tmp_path):
    """Each weight is within a quantization step of its block of 32; other tensors are exact."""
    loaded = checkpoint_of(bpe(), bias=True, n_embd=64)
    write_gguf(loaded, tmp_path / "exported.gguf", matrices)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "exported.gguf").tensors}
    names = foreign.gguf_names(2)
    assert read.keys() == {names[name] for name in loaded.model}
    for name, tensor in loaded.model.items():
        kind, data = read[names[name]].tensor_type, read[names[name]].data
        values = torch.from_numpy(gguf.dequantize(data, kind).copy())
        if tensor.dim() == 1 or name == "transformer.wpe.weight":
            assert kind.name == "F32" and torch.equal(values, tensor)
            continue
        assert kind.name == ("Q8_0" if matrices == "Q4_0" and name == "transformer.wte.weight" else matrices)
        blocks, expected = values.view(-1, 32), tensor.reshape(-1, 32)
        step, max_error = STEPS[kind.name]
        error = (blocks - expected).abs() / (step * expected.abs().amax(dim=1, keepdim=True))
        assert 0.1 < error.max() < max_error * (1 + rounding_error(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind, bias, padding", [("gpt2", True, 0), ("bpe", False, 0), ("bpe", False, 5)])
def test_llama_cpp_computes_and_generates_the_same(kind, bias, padding, tmp_path):
    """Needs llama.cpp's Python package: pip install llama-cpp-python, which takes minutes to compile."""
    llama_cpp = pytest.importorskip("llama_cpp")
    loaded = checkpoint_of(KINDS[kind](), bias, padding)
    write_gguf(loaded, tmp_path / "exported.gguf")
    llama = llama_cpp.Llama(str(tmp_path / "exported.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    text = WITHOUT_EOT[:60]
    ids = llama.tokenize(text.encode(), add_bos=False, special=False)
    assert ids == loaded.tokenizer.encode(text).tolist() and llama.detokenize(ids).decode() == text
    assert llama.token_eos() == loaded.tokenizer.eot
    llama.eval(ids)
    ours = loaded.build().eval()
    expected = ours.logits(torch.tensor([ids]))[0].detach()
    logits = torch.from_numpy(llama.scores[: len(ids)].copy())
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-3  # its float16 key-value cache
    llama.reset()
    steps = generate(decoder_in("float32", ours), [ids], max_new_tokens=8, sampling=Sampling(temperature=0))
    generated = list(itertools.islice(llama.generate(ids, temp=0.0, repeat_penalty=1.0), 8))
    assert generated == [step.tokens[0] for step in steps]
