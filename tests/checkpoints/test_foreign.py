import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import warnings
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from folio import UserError
from folio.base import pickles
from folio.checkpoints import foreign, foreign_tokenizers
from folio.data.tokenizer import byte_alphabet
from folio.decoding.language_model import LanguageModel
from folio.machine import memory
from model import GPT, GPTConfig
from sample import SampleConfig
from sample import main as sample
from tests.support.tiny_tokenizers import bpe
from train import train

pytestmark = pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")

PAIRS = [("h", "e"), ("l", "l"), ("he", "ll")]
VOCAB = {token: i for i, token in enumerate([*byte_alphabet(), "he", "ll", "hell", "<|endoftext|>"])}


@pytest.fixture
def theirs(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=260, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=259, eos_token_id=259
    )
    model = GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def folder(theirs: GPT2LMHeadModel, tmp_path: Path) -> Path:
    """A folder as transformers saves it, with a tiny table of merges."""
    theirs.save_pretrained(tmp_path / "theirs")
    lines = "".join(" ".join(pair) + "\n" for pair in PAIRS)
    (tmp_path / "theirs" / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(VOCAB), encoding="utf-8")
    return tmp_path / "theirs"


def assert_same(theirs: GPT2LMHeadModel, init_from: Path) -> None:
    ids = torch.arange(40).view(2, 20)
    loaded, lazy = foreign.load(str(init_from)), foreign.load(str(init_from), lazy=True)
    ours = loaded.build().eval()
    assert all(p.is_meta for p in lazy.build().parameters()) and lazy.model.keys() == loaded.model.keys()
    for name, tensor in loaded.model.items():
        assert torch.equal(lazy.model[name], tensor) and lazy.model[name].stride() == tensor.stride()
    torch.testing.assert_close(ours(ids)[0], theirs(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_hugging_faces_weights_compute_the_same(theirs, folder):
    assert_same(theirs, folder)
    loaded = foreign.load(str(folder))
    assert loaded.tokenizer.encode("hello").tolist() == [258, ord("o") - 33] and loaded.tokenizer.eot == 259


def test_a_folder_that_is_larger_than_memory_is_refused(folder, monkeypatch):
    """It was copied until the system killed the process. int8 and int4 copy one tensor at a time."""
    monkeypatch.setattr(memory, "free", lambda device: 2**14)
    message = r"theirs: its weights in float32 take 0 MiB, and 0 MiB of memory is free: use sample.py with --dtype=int8"
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))
    assert LanguageModel.load(folder, dtype="int4").generate("hello", max_new_tokens=2)


def test_weights_that_were_copied_need_no_more_memory(folder, monkeypatch):
    """They counted twice, so a model that took more than half of the free memory was refused in float32."""
    size = 4 * sum(tensor.numel() for tensor in foreign.load(str(folder)).model.values())
    copied = False
    check_tensors = foreign.check_tensors

    def check_and_count(*args):
        nonlocal copied
        tensors = check_tensors(*args)
        copied = True
        return tensors

    monkeypatch.setattr(foreign, "check_tensors", check_and_count)
    monkeypatch.setattr(memory, "free", lambda device: 0 if copied else size)
    assert LanguageModel.load(folder, dtype="float32").path == folder


def test_old_files_with_buffers_and_without_prefix(theirs, folder):
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(old, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same(theirs, folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="llama"), "config.json has model_type='llama'; Folio supports only 'gpt2'"),
        (
            dict(activation_function="relu"),
            "has activation_function='relu'; Folio supports only 'gelu_new' or 'gelu' or 'gelu_pytorch_tanh'",
        ),
        (dict(vocab_size=300), r"transformer\.wte\.weight has the shape \(260, 16\) instead of \(300, 16\)"),
        (dict(n_embd=None), r"sizes must be integers above 0.*n_embd=None"),
    ],
)
def test_an_unsupported_config_is_refused(change, message, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder):
    with open(folder / "merges.txt", "a", encoding="utf-8") as file:
        file.write("hell o\n")
    change_json(folder, "vocab.json", **{"hello": 259, "<|endoftext|>": 260})
    with pytest.raises(UserError, match=r"the model has 260 tokens, but the tokenizer has 261"):
        foreign.load(str(folder))


def test_incomplete_folders_are_refused(folder):
    save_file({"h.0.ln_1.weight": torch.ones(16)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has no transformer\.wte\.weight"):
        foreign.load(str(folder))
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="is not a folder of Hugging Face's GPT-2"):
        foreign.load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        foreign.load(str(folder))


def change_json(folder: Path, name: str, **changes) -> None:
    """Change fields of a JSON file in the folder."""
    path = folder / name
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_an_untied_output_matrix_is_refused(file, theirs, folder):
    """lm_head.weight was ignored: an untied model computed different logits than transformers."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save = save_file if file == "model.safetensors" else torch.save
    save({**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}, folder / file)
    assert_same(theirs, folder)
    save({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1e-3}, folder / file)
    with pytest.raises(UserError, match=r"has an lm_head\.weight .* that differs from the token embeddings"):
        foreign.load(str(folder))


def test_an_untied_model_as_transformers_saves_it_is_refused(folder):
    config = GPT2Config.from_pretrained(folder, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(folder)
    with pytest.raises(UserError, match="tie_word_embeddings=False; Folio supports only True"):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06; Folio supports only 1e-05"),
        (dict(layer_norm_epsilon=None), "layer_norm_epsilon=None; Folio supports only 1e-05"),
        (dict(scale_attn_weights=False), "scale_attn_weights=False; Folio supports only True"),
        (dict(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx=True; Folio supports only False"),
        (
            dict(auto_map={"AutoModelForCausalLM": "own.Model"}),
            "config.json has auto_map={.*; Folio supports only None",
        ),
        (dict(n_layer=3), r"has no transformer\.h\.2\."),
        (dict(n_layer=1), r"has a tensor 'transformer\.h\.1\..*', which the model of model\.py does not have"),
        (dict(n_layer=10**9), r"has no transformer\.h\.2\."),
        (dict(n_layer=10**400), r"has no transformer\.h\.2\."),
        (dict(n_head=0), "sizes must be integers above 0.*n_head=0"),
    ],
)
def test_what_folio_computes_differently_is_refused(changes, message, folder):
    """A different epsilon, scale or width was loaded silently and computed something else, or ended in a traceback."""
    change_json(folder, "config.json", **changes)
    with pytest.raises(UserError, match=message) as refused:
        foreign.load(str(folder)).build()
    assert len(str(refused.value).splitlines()) == 1


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of model.safetensors; None removes one."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"transformer.h.1.attn.c_attn.bias": None}, r"has no transformer\.h\.1\.attn\.c_attn\.bias"),
        (
            {"transformer.h.0.crossattention.c_attn.weight": torch.ones(2)},
            "has a tensor .*crossattention.* does not have",
        ),
        ({"score.weight": torch.ones(2, 16)}, r"has a tensor 'transformer\.score\.weight'"),
        ({"ln_f.bias": torch.ones(16)}, r"holds 'transformer\.ln_f\.bias' twice"),
        (
            {"transformer.ln_f.bias": torch.ones(16).byte()},
            r"ln_f\.bias has the dtype torch\.uint8, which is not floating-point",
        ),
        ({"transformer.h.0.mlp.c_fc.weight": torch.ones(16, 32)}, r"has the shape \(32, 16\) instead of \(64, 16\)"),
    ],
)
def test_tensors_that_gpt2_does_not_have_are_refused(changes, message, folder):
    """They were ignored, or were refused only when the model was built, in several lines."""
    change_tensors(folder, changes)
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def save_sharded(theirs: GPT2LMHeadModel, folder: Path, kind: str) -> Path:
    """Replace the weights in the folder by shards of them; returns the index."""
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="9KB")
    index = folder / "model.safetensors.index.json"
    if kind == "bin":  # as older versions of transformers save it
        weight_map = json.loads(index.read_text())["weight_map"]
        for name in set(weight_map.values()):
            torch.save(load_file(folder / name), folder / name.replace("safetensors", "bin"))
            (folder / name).unlink()
        index.unlink()
        index = folder / "pytorch_model.bin.index.json"
        weight_map = {tensor: name.replace("safetensors", "bin") for tensor, name in weight_map.items()}
        index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_weights_are_read(kind, theirs, folder):
    """A folder with model.safetensors.index.json was refused as having no weights."""
    index = save_sharded(theirs, folder, kind)
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2
    assert_same(theirs, folder)


def test_shards_that_do_not_fit_their_index_are_refused(theirs, folder, tmp_path):
    index = save_sharded(theirs, folder, "safetensors")
    original = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(original.items()))
    save_file({name: torch.ones(2)}, tmp_path / "outside.safetensors")
    for weight_map, message in (
        ({**original, name: "../outside.safetensors"}, r"names a file outside its folder: '\.\./outside"),
        ({**original, name: str(tmp_path / "outside.safetensors")}, "names a file outside its folder"),
        ({**original, name: "gone.safetensors"}, "gone.safetensors"),
        ({n: file for n, file in original.items() if file != shard}, r"has no transformer\."),
        ([], "is not a folder of Hugging Face's GPT-2"),
        ({name: 5}, "is not a folder of Hugging Face's GPT-2"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=message):
            foreign.load(str(folder))
    index.write_text(json.dumps({"weight_map": {**original, "again": "again.safetensors"}}))
    (folder / "again.safetensors").write_bytes((folder / shard).read_bytes())
    with pytest.raises(UserError, match=r"holds 'transformer.*', which another shard also holds"):
        foreign.load(str(folder))
    (folder / shard).write_bytes(b"half")
    with pytest.raises(UserError, match="is not a folder of Hugging Face's GPT-2"):
        foreign.load(str(folder))


TEXT = "hello <|endoftext|> hell wörld's  日本\n"


def use_tokenizer_json(folder: Path, vocab: dict[str, int] = VOCAB) -> Path:
    """Replace merges.txt and vocab.json by tokenizer.json, as transformers writes it. Returns the folder."""
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    GPT2Tokenizer(vocab=dict(vocab), merges=PAIRS).save_pretrained(folder)
    return folder


def assert_same_ids(folder: Path) -> None:
    expected = AutoTokenizer.from_pretrained(folder)
    text = TEXT.replace("<|endoftext|>", "")
    assert foreign.load(str(folder)).tokenizer.encode(text).tolist() == expected(text).input_ids


def test_the_vocabulary_next_to_the_merges_is_used(folder):
    """vocab.json was not read: with ids in another order than GPT-2's, text was silently tokenized wrongly."""
    assert_same_ids(folder)
    swapped = {**VOCAB, "a": VOCAB["b"], "b": VOCAB["a"]}  # bytes may be in any order
    (folder / "vocab.json").write_text(json.dumps(swapped), encoding="utf-8")
    assert_same_ids(folder)
    assert foreign.load(str(folder)).tokenizer.encode("ab").tolist() == [VOCAB["b"], VOCAB["a"]]
    first = {token: (i + 1) % len(VOCAB) for token, i in VOCAB.items()}  # the end-of-text token first
    for vocab, message in (
        ({**VOCAB, "he": 257, "ll": 256}, "vocab.json: 'he' has the id 257, but the order of the merges gives it 256"),
        (first, "vocab.json: .* has the id "),
        (
            {**VOCAB, "<pad>": 260},
            r"no merge makes the token '<pad>' \(id 260\), and the only token that Folio adds is",
        ),
        ({token: i for token, i in VOCAB.items() if token != "hell"}, "the vocabulary lacks the token 'hell'"),
        ([], "is not a folder of Hugging Face's GPT-2"),
        ({"a": "b"}, "is not a folder of Hugging Face's GPT-2|vocab.json"),
    ):
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            foreign.load(str(folder))
    (folder / "vocab.json").unlink()
    with pytest.raises(UserError, match=r"No such file.*vocab\.json"):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "added_tokens.json",
            {"<|user|>": 260},
            r"added_tokens\.json: no merge makes the token '<\|user\|>' \(id 260\)",
        ),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space=True; Folio supports only False"),
        ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token=True; Folio supports only False"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"260": {"content": "<x>"}}},
            "no merge makes the token '<x>'",
        ),
    ],
)
def test_added_tokens_and_other_rules_are_refused(name, changes, message, folder):
    """The files that transformers reads in addition to merges.txt were ignored."""
    change_json(folder, name, **changes)
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "merges, message",
    [
        ("h e\nl l\n", "does not make a new token from two|no merge makes the token 'he'"),
        ("#version: 0.2\nhe ll\n", "the merge 'he ll' does not make a new token from two earlier tokens"),
        ("#version: 0.2\nh e\nh e\n", "the merge 'h e' does not make a new token"),
        ("#version: 0.2\nh e l\n", "the merge 'h e l' does not make a new token"),
        ("#version: 0.2\n日 本\n", "does not make a new token from two earlier tokens"),
        ("", "no merge makes the token 'he'"),
        ("#version: 0.2\nh e\nl l\n", "no merge makes the token 'hell'"),
    ],
)
def test_damaged_merges_are_refused(merges, message, folder):
    """They ended in a traceback. Without the version line, merges.txt lost a merge and all ids were shifted by one."""
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def test_a_merge_that_never_applies_is_refused(folder):
    """tiktoken merges by the result: it merged "ab" and "c" to "abc", and transformers only "a" and "bc"."""
    pairs = [("a", "b"), ("b", "c"), ("a", "bc")]
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), "ab", "bc", "abc"])}
    theirs = GPT2Tokenizer(vocab=vocab, merges=pairs)
    ranks = [token.encode() if len(token) > 1 else bytes([byte_alphabet()[token]]) for token in vocab]
    assert theirs("abc").input_ids != foreign_tokenizers.GPT2Tokenizer(ranks).encode("abc").tolist()
    lines = "".join(" ".join(pair) + "\n" for pair in pairs)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    with pytest.raises(UserError, match="the merge 'a bc' never applies, because earlier merges come first"):
        foreign.load(str(folder))


def test_merges_are_accepted_exactly_where_both_tokenizers_agree(seed):
    """Random merges over three letters. The oracle encodes each token with the merges before it, one by one."""
    rng = random.Random(seed)
    verdicts = set()
    for _ in range(300):
        rank = {letter: i for i, letter in enumerate("abc")}
        parts: dict[str, list[str]] = {}
        for _ in range(8):
            pair = [rng.choice(list(rank)) for _ in range(2)]
            token = "".join(pair)
            if token in rank:
                continue
            text = list(token)
            while True:  # byte-pair encoding by its definition: the lowest rank first, the leftmost of equal ranks
                merged = [text[i] + text[i + 1] for i in range(len(text) - 1)]
                best = min(merged, key=lambda t: rank.get(t, len(rank)))
                if best not in rank:
                    break
                at = merged.index(best)
                text[at : at + 2] = [best]
            verdicts.add(text == pair)
            assert foreign_tokenizers.merge_applies(*pair, rank, parts) == (text == pair), (parts, pair)
            if text == pair:
                rank[token], parts[token] = len(rank), pair
    assert verdicts == {True, False}


@pytest.mark.parametrize("vocab_size", [260, 50304])
def test_tokenizer_json_is_read_at_any_vocabulary_size(vocab_size, folder):
    """With 50,257 tokens or more, GPT-2's own tokenizer was used instead of the one in the folder."""
    use_tokenizer_json(folder)
    change_json(folder, "config.json", vocab_size=vocab_size)
    rows = torch.zeros(vocab_size - 260, 16)
    wte = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_tensors(folder, {"transformer.wte.weight": torch.cat([wte, rows])})
    assert_same_ids(folder)
    assert foreign.load(str(folder)).tokenizer.eot == 259


def test_tokenizer_json_in_the_older_format_is_read(folder):
    """GPT-2's own on the hub: merges are strings, and the model has no type."""
    content = json.loads((use_tokenizer_json(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] = {"vocab": VOCAB, "merges": [" ".join(pair) for pair in PAIRS]}
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert_same_ids(folder)


NOT_GPT2 = "not a byte-level BPE with GPT-2's pre-tokenizer"
TOKEN = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda c: c["added_tokens"].append({"id": 260, "content": "<|user|>", **TOKEN}),
            r"its one added token must be",
        ),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), NOT_GPT2),
        (lambda c: c["pre_tokenizer"].update(use_regex=False), NOT_GPT2),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), NOT_GPT2),
        (lambda c: c["model"].update(dropout=0.1), NOT_GPT2),
        (lambda c: c["model"].update(type="Unigram"), "'Unigram' is not a byte-level BPE with GPT-2's pre-tokenizer"),
        (
            lambda c: c["post_processor"].update(special_tokens={"<s>": {}}),
            "a post_processor that adds tokens to each text",
        ),
        (lambda c: c["model"]["vocab"].update(he=257, ll=256), "'he' has the id 257"),
        (lambda c: c.pop("model"), "it has no 'model'"),
    ],
)
def test_tokenizer_json_of_another_kind_is_refused(change, message, folder):
    content = json.loads((use_tokenizer_json(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        foreign.load(str(folder))


def test_tokenizer_files_that_disagree_are_refused(folder):
    saved = {name: (folder / name).read_text(encoding="utf-8") for name in ("merges.txt", "vocab.json")}
    use_tokenizer_json(folder)
    for name, content in saved.items():
        (folder / name).write_text(content, encoding="utf-8")
    assert_same_ids(folder)
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nl o\n", encoding="utf-8")
    (folder / "vocab.json").write_text(saved["vocab.json"].replace('"hell"', '"lo"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"merges\.txt and tokenizer\.json have different tokens"):
        foreign.load(str(folder))


@pytest.mark.parametrize(
    "vocab_size, gpt2", [(50257, True), (50304, True), (50260, False), (60000, False), (260, False)]
)
def test_without_a_tokenizer_the_vocabulary_size_must_be_gpt2s(vocab_size, gpt2, folder, monkeypatch):
    """Any vocabulary of 50,257 tokens or more was assumed to be GPT-2's."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").unlink()
    change_json(folder, "config.json", vocab_size=vocab_size)
    change_tensors(folder, {"transformer.wte.weight": torch.zeros(vocab_size, 16)})
    if gpt2:
        assert foreign.load(str(folder)).tokenizer.vocab_size == bpe().vocab_size
        return
    with pytest.raises(UserError, match=f"no tokenizer.json, and a vocabulary of {vocab_size:,} tokens is not GPT-2's"):
        foreign.load(str(folder))


def save_nanogpt_checkpoint(path: Path, prefix: str = "_orig_mod.") -> GPT:
    """Write ckpt.pt and its data set as nanoGPT's train.py and prepare.py do. Returns the model."""
    shape = dict(block_size=16, vocab_size=3, n_layer=2, n_head=2, n_embd=16, bias=False)
    ours = GPT(GPTConfig(**shape, activation="gelu"), 5).eval()
    arguments = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=3, dropout=0.0)
    saved = dict(model={prefix + name: tensor for name, tensor in ours.state_dict().items()}, model_args=arguments)
    saved |= dict(optimizer={"state": {}}, iter_num=7, best_val_loss=torch.tensor(1.5), config={"dataset": "abc"})
    path.parent.mkdir(parents=True)
    torch.save(saved, path)
    data = path.parent.parent / "data" / "abc"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(bytes([0, 0, 1, 0, 2, 0] * 200))
    itos = dict(enumerate("\nab"))
    (data / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=3, itos=itos, stoi={c: i for i, c in itos.items()})))
    return ours


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_checkpoint_computes_the_same(prefix, tmp_path):
    ours = save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt", prefix)
    loaded = foreign.load(str(tmp_path / "out" / "ckpt.pt"))
    ids = torch.randint(3, (2, 10))
    assert torch.equal(loaded.build().eval()(ids)[0], ours(ids)[0])
    assert loaded.tokenizer.characters == "\nab"


def save_changed_checkpoint(path: Path, **changes) -> None:
    """The same with changes in the model's arguments (model_args), tensors (model) or settings (config)."""
    save_nanogpt_checkpoint(path, prefix="")
    saved = torch.load(path, weights_only=True)
    for name, change in changes.items():
        saved[name] = {**saved[name], **change}
    torch.save(saved, path)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model={"lm_head.weight": torch.ones(3, 16)}), r"lm_head\.weight .* differs from the token embeddings"),
        (dict(model_args={"use_rope": True}), "model_args has 'use_rope', which nanoGPT's GPT does not have"),
        (dict(model_args={"bias": True}), r"has no transformer\..*\.bias"),
        (dict(model={"transformer.h.0.attn.q_norm": torch.ones(2)}), r"has a tensor 'transformer\.h\.0\.attn\.q_norm'"),
        (dict(model={"module.transformer.ln_f.weight": torch.ones(16)}), r"holds 'transformer\.ln_f\.weight' twice"),
        (
            dict(config={"dataset": "gone"}),
            "a vocabulary of 3 tokens is not GPT-2's, and no meta.pkl .* data/gone next to ckpt.pt",
        ),
        (
            dict(config={"dataset": None}),
            "a vocabulary of 3 tokens is not GPT-2's, and no meta.pkl .* data/NAME next to ckpt.pt",
        ),
        (dict(config={"dataset": "x" * 5000}), "ckpt.pt"),
    ],
)
def test_a_nanogpt_checkpoint_that_folio_computes_differently_is_refused(changes, message, tmp_path):
    """An untied lm_head and the settings of nanoGPT's forks were ignored."""
    save_changed_checkpoint(tmp_path / "out" / "ckpt.pt", **changes)
    with pytest.raises(UserError, match=message):
        foreign.load(str(tmp_path / "out" / "ckpt.pt"))


@pytest.mark.parametrize("vocab_size, gpt2", [(50257, True), (50304, True), (50300, False), (100288, False)])
def test_a_nanogpt_checkpoint_without_meta_pkl_must_have_gpt2s_size(vocab_size, gpt2, tmp_path, monkeypatch):
    """Any vocabulary of 50,257 tokens or more was assumed to be GPT-2's; nanoGPT pads it to 50,304."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    rows = {"transformer.wte.weight": torch.zeros(vocab_size, 16), "lm_head.weight": torch.zeros(vocab_size, 16)}
    changes = dict(model=rows, model_args={"vocab_size": vocab_size}, config={"dataset": "openwebtext"})
    save_changed_checkpoint(tmp_path / "out" / "ckpt.pt", **changes)
    if gpt2:
        assert foreign.load(str(tmp_path / "out" / "ckpt.pt")).tokenizer.vocab_size == bpe().vocab_size
        return
    with pytest.raises(UserError, match=f"a vocabulary of {vocab_size:,} tokens is not GPT-2's, and no meta.pkl"):
        foreign.load(str(tmp_path / "out" / "ckpt.pt"))


def test_the_meta_pkl_of_another_vocabulary_is_refused(tmp_path):
    """With a data set that was prepared again with fewer characters, the model's ids decoded to other characters."""
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    (tmp_path / "data" / "abc" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}}))
    with pytest.raises(UserError, match=r"meta\.pkl has a vocabulary of 2, but the model has one of 3"):
        foreign.load(str(tmp_path / "out" / "ckpt.pt"))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_larger_than_their_file_are_refused(zipped, tmp_path, monkeypatch):
    """A tensor can be one stored number that is expanded: a file of 2 kB requested terabytes."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    shape = dict(block_size=2**25, vocab_size=50257, n_layer=1, n_head=1, n_embd=2**15, bias=False)
    one = torch.zeros(1, dtype=torch.float16)
    model = {name: one.expand(size) for name, size in foreign.parameter_shapes(shape).items()}
    saved = {"model": model, "model_args": shape, "config": {}}
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert (tmp_path / "ckpt.pt").stat().st_size < 10_000
    with pytest.raises(UserError, match="its tensors are larger than the data that it stores"):
        foreign.load(str(tmp_path / "ckpt.pt"))


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


@pytest.mark.parametrize("content", [Bomb(), {"model": Bomb()}, 5, {"model": {}}])
def test_a_pickle_that_would_run_code_is_refused(content, tmp_path, capfd):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt (was not opened: it may run code|is not nanoGPT's)"):
        foreign.load(str(tmp_path / "ckpt.pt"))
    assert "this must not run" not in capfd.readouterr().out


def test_a_pytorch_model_bin_that_would_run_code_is_refused(folder, capfd):
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin was not opened: it may run code"):
        foreign.load(str(folder))
    assert "this must not run" not in capfd.readouterr().out


FOREIGN_FILES = "config.json vocab.json merges.txt tokenizer.json tokenizer_config.json model.safetensors".split()
FOREIGN_FILES += ["pytorch_model.bin", "model.safetensors.index.json", "shard.safetensors", "ckpt.pt", "x.pt", "x.gguf"]


@pytest.mark.parametrize("name", FOREIGN_FILES)
def test_a_device_in_the_place_of_a_foreign_file_is_refused(name, folder):
    """A vocab.json that links to /dev/zero was read without end, and weights that are a FIFO were waited for.

    For config.json and files that are named, the error was that there was no checkpoint.
    """
    init_from = folder / name if name in ("ckpt.pt", "x.pt", "x.gguf") else folder
    if name in ("pytorch_model.bin", "model.safetensors.index.json", "shard.safetensors"):
        (folder / "model.safetensors").unlink()
    if name == "shard.safetensors":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(os.devnull)
    with pytest.raises(UserError, match=rf"{name} is not a regular file"):
        foreign.load(str(init_from))


def text(value: str) -> bytes:
    """A string as an opcode of a pickle."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def doubled(empty: bytes) -> bytes:
    """A list, b"]", or a tuple, b")", that holds another one twice, which holds another one twice, and so on."""
    content = empty + b"q\x00"
    for i in range(60):
        value = content + b"h" + bytes([i])
        content = (b"](" + value + b"e" if empty == b"]" else value + b"\x86") + b"q" + bytes([i + 1])
    return content


HUGE_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"J\xff\xff\xff\x7ftQ"
HOSTILE_PICKLES = {
    "a bytearray of 3 GB": (b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R", "it uses 'builtins bytearray'"),
    "lists that double": (doubled(b"]"), "too many values"),
    "a key that is a nested tuple": (b"}" + doubled(b")") + b"K\x01s", "a key of a dict is not a string or a number"),
    "the same in a mark": (b"}(" + doubled(b")") + b"K\x01u", "a key of a dict is not a string or a number"),
    "an OrderedDict of such items": (
        b"ccollections\nOrderedDict\n](" + doubled(b")") + b"K\x01\x86e\x85R",
        "OrderedDict from items",
    ),
    "a deep list": (b"]" * 1000 + b"a" * 999, "nested too deeply"),
    "a list that contains itself": (b"]q\x00h\x00a", "a value contains itself"),
    "a memo of 2**31 entries": (b"}r\xff\xff\xff\x7f", "LONG_BINPUT with the index 2,147,483,647"),
    "a storage larger than the file": (b"]" + HUGE_STORAGE + b"a", "its tensors are larger than the file"),
    "an opcode that torch.save does not write": (b"\x8f", "it uses EMPTY_SET"),
    "a stack that is empty": (b"]aaa", "it is damaged"),
    "two million values": (b"](" + b"N" * 2**21 + b"e", "more than 1,048,576 opcodes"),
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_a_hostile_pickle_is_refused_before_torch_opens_it(case, tmp_path, monkeypatch):
    """torch's unpickler, although it runs no code, allocated gigabytes for such a file, or never came back: computing
    the hash of a key, or printing a value, takes 2**60 steps.
    """
    monkeypatch.setattr(torch, "load", lambda *args, **named: pytest.fail("torch.load was called"))
    content, message = HOSTILE_PICKLES[case]
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
    with pytest.raises(UserError, match=rf"ckpt\.pt was not opened: .*\(.*{re.escape(message)}.*\); download it again"):
        foreign.load(str(tmp_path / "ckpt.pt"))


def test_a_shared_list_of_a_pickle_is_read_once(monkeypatch):
    """A list that holds another one n times was read n times: minutes for a file of 2 MB."""
    n, reads, iterate = 500, [], pickles.PickledValues.__iter__
    monkeypatch.setattr(pickles.PickledValues, "__iter__", lambda values: reads.append(len(values)) or iterate(values))
    inner = b"](" + b"K\x01" * n + b"eq\x00"
    content = b"\x80\x02](" + inner + b"h\x00" * (n - 1) + b"e."
    assert len(pickles.check(io.BytesIO(content)).value) == n
    assert sum(reads) < 10 * n


def zip_records(path: Path, *names: str, **settings) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", **settings) as archive:
        warnings.simplefilter("ignore")  # about names that occur twice
        for name in names:
            archive.writestr(name, b"\x80\x02}.")


def write_prefixed(path: Path) -> None:
    zip_records(path, "archive/data.pkl")
    path.write_bytes(b"PK\3\4" + path.read_bytes())


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda path: zip_records(path, "archive/data.pkl", compression=zipfile.ZIP_DEFLATED), "are compressed"),
        (lambda path: zip_records(path, "archive/data.pkl", "archive/data.pkl"), "have the same name"),
        (lambda path: zip_records(path, "archive/data.pkl", "other/DATA.pkl"), "have the same name"),
        (lambda path: zip_records(path, "archive/version"), "or it has no data.pkl"),
        (write_prefixed, "its first record is not at its beginning"),
    ],
)
def test_a_zip_file_that_torch_save_does_not_write_is_refused(write, message, tmp_path, monkeypatch):
    """A compressed data.pkl of 1 MB took 3.3 GB."""
    monkeypatch.setattr(torch, "load", lambda *args, **named: pytest.fail("torch.load was called"))
    write(tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=message):
        foreign.load(str(tmp_path / "ckpt.pt"))


def test_an_old_file_that_declares_more_data_than_it_has_is_refused(tmp_path, monkeypatch):
    """The old format allocates what the pickle says, and leaves it uninitialized unless the file lists it."""
    path = tmp_path / "ckpt.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    foreign.load_pickle(path)
    content = path.read_bytes()
    monkeypatch.setattr(torch, "load", lambda *args, **named: pytest.fail("torch.load was called"))
    numel = b"K\x03Nt"  # of the storage
    assert content.count(numel) == 1
    for changed, message in (
        (content.replace(numel, b"J\xff\xff\xff\x7fNt"), "its tensors are larger than the file"),
        (content[: content.rindex(b"\x80\x02")] + b"\x80\x02].", "its list of storages is not that of its tensors"),
    ):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=message):
            foreign.load(str(path))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nanogpt_and_its_forks_save_is_read(dtype, zipped, tmp_path):
    """With an optimizer's state, a GradScaler's, a state_dict that has metadata, tied weights, and values of all kinds.
    The pickle's check must know every opcode and name that torch.save writes for them.
    """
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    path = tmp_path / "out" / "ckpt.pt"
    saved = torch.load(path, weights_only=True)
    arguments = {name: value for name, value in saved["model_args"].items() if name != "dropout"}
    model = GPT(GPTConfig(**arguments, activation="gelu"), 5).to(dtype)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], betas=(0.9, 0.95), fused=True)
    model(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert state._metadata
    state["lm_head.weight"] = state["transformer.wte.weight"]
    state |= {"transformer.h.0.attn.bias": torch.ones(16, 16, dtype=torch.bool)}
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}
    others = {"seed": 2**62, "tokens": -(2**40), "best": None, "shape": torch.Size([2]), "betas": (1, 2, 3, 4), "": []}
    saved |= {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "scaler": scaler,
        "iter_num": 70_000,
        "other": others,
    }
    saved |= {
        "rng": torch.get_rng_state(),
        "device": torch.device("cpu"),
        "dtype": dtype,
        "ema": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    loaded = foreign.load(str(path))
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.model[name], parameter.detach().float())


def test_foreign_names_are_shortened_in_messages(folder, theirs, tmp_path):
    """A key of 1 MB made a message of 1 MB."""
    long = "x" * 2**17
    checkpoints = [
        dict(model_args={long: 1}),
        dict(model={long: torch.ones(2)}),
        dict(model={long: "text"}),
        dict(model_args={"n_layer": long}),
        dict(config={"dataset": long}),
    ]
    paths = []
    for number, changes in enumerate(checkpoints):
        paths.append(tmp_path / f"run-{number}" / "out" / "ckpt.pt")
        save_changed_checkpoint(paths[-1], **changes)
    for number, (name, changes) in enumerate(
        [
            ("config.json", {"model_type": long}),
            ("config.json", {"n_layer": long}),
            ("config.json", {"n_layer": [[["text"] * 99] * 99] * 9}),
            ("vocab.json", {long: 1}),
            ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": long}}}),
            ("tokenizer.json", {"model": {"type": long, "vocab": {}}}),
        ]
    ):
        paths.append(Path(shutil.copytree(folder, tmp_path / str(number))))
        change_json(paths[-1], name, **changes)
    paths.append(Path(shutil.copytree(folder, tmp_path / "tensor")))
    change_tensors(paths[-1], {long: torch.ones(2)})
    paths += [
        write_gguf(theirs, tmp_path / "field.gguf", {"tokenizer.ggml.model": long}),
        write_gguf(theirs, tmp_path / "token.gguf", {"tokenizer.ggml.tokens": [*TOKENS[:258], long, TOKENS[259]]}),
        write_gguf(theirs, tmp_path / "merge.gguf", {"tokenizer.ggml.merges": [f"{long} a"]}),
    ]
    for path in paths:
        with pytest.raises(UserError) as refused:
            foreign.load(str(path))
        assert len(str(refused.value)) < 800 and len(str(refused.value).splitlines()) == 1, path


def test_foreign_weights_are_sampled_and_finetuned(folder, tiny, tmp_path):
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    for init_from, start in ((folder, "hello"), (tmp_path / "out" / "ckpt.pt", "ab")):
        out = io.StringIO()
        with redirect_stdout(out):
            sample(SampleConfig(init_from=str(init_from), start=start, max_new_tokens=10, dtype="float32"))
        assert out.getvalue().startswith(start)
    shape = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024)  # replaced by the checkpoint's shape
    cfg = tiny(**shape, init_from=str(tmp_path / "out" / "ckpt.pt"), dataset="abc", data_dir=str(tmp_path / "data"))
    assert train(cfg).best_val_loss < 1.3
    with pytest.raises(UserError, match="it is not scratch, resume, gpt2, gpt2-medium"):
        train(tiny(init_from="gtp2"))


def test_without_a_network_the_error_lists_the_files_to_provide(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"or put config\.json, model\.safetensors, vocab\.json, merges\.txt into a folder"
    ):
        foreign.load("gpt2")


def write_gguf(theirs: GPT2LMHeadModel, path: Path, fields: dict | None = None, tensors: dict | None = None) -> Path:
    """Write the model as llama.cpp's convert_hf_to_gguf.py does, with some of its fields and tensors changed (None:
    left out). Tensors are named and transposed in the same way; matrices are float16 if their dtype is.
    """
    kinds = [1] * 259 + [3]
    content = {
        "gpt2.block_count": 2,
        "gpt2.context_length": 32,
        "gpt2.embedding_length": 16,
        "gpt2.feed_forward_length": 64,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
        "general.name": "theirs",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(VOCAB),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in PAIRS],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 259,
    }
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, value in {**content, **(fields or {})}.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
            getattr(writer, f"add_{kind}")(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    data = {}
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            tensor = tensor.T if name.endswith(foreign.TRANSPOSED) else tensor
            data[names.get_name(name, (".weight", ".bias"))] = tensor.contiguous().numpy()
    for name, value in {**data, **(tensors or {})}.items():
        if value is not None:
            kind = None
            if value.dtype == np.uint8:  # a type that numpy does not have
                kind = gguf.GGMLQuantizationType.Q8_0 if value is QUANTIZED else gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTIZED = gguf.quants.quantize(np.ones((16, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)


def embeddings(theirs: GPT2LMHeadModel) -> np.ndarray:
    return theirs.transformer.wte.weight.detach().numpy().copy()


def test_the_output_of_llama_cpps_converter_computes_the_same(theirs, tmp_path):
    assert_same(theirs, write_gguf(theirs, tmp_path / "a.gguf"))
    assert foreign.load(str(tmp_path / "a.gguf")).tokenizer.encode("hello").tolist() == [258, VOCAB["o"]]
    # older converters repeat the embeddings as output.weight, and do not record the pre-tokenizer
    older = {"tokenizer.ggml.pre": None}
    assert_same(theirs, write_gguf(theirs, tmp_path / "b.gguf", older, {"output.weight": embeddings(theirs)}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gguf_in_16_bits_is_read(dtype, theirs, tmp_path):
    """bfloat16, which llama.cpp's converter may choose by default, was refused as quantized."""
    rounded = theirs.transformer.wte.weight.detach().to(dtype)
    theirs.transformer.wte.weight.data.copy_(rounded)
    data = rounded.numpy() if dtype == torch.float16 else rounded.view(torch.uint8).numpy()
    assert_same(theirs, write_gguf(theirs, tmp_path / "x.gguf", tensors={"token_embd.weight": data}))


def test_a_padded_vocabulary_is_read(theirs, tmp_path):
    pads = {"tokenizer.ggml.tokens": [*VOCAB, "[PAD260]"], "tokenizer.ggml.token_type": [1] * 259 + [3, 5]}
    rows = {"token_embd.weight": np.concatenate([embeddings(theirs), np.ones((1, 16), np.float32)])}
    loaded = foreign.load(str(write_gguf(theirs, tmp_path / "x.gguf", pads, rows)))
    assert loaded.state["model"]["vocab_size"] == 261 and loaded.tokenizer.eot == 259


TOKENS = list(VOCAB)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"gpt2.attention.layer_norm_epsilon": 1e-6}, "epsilon=9.99.*e-07; Folio supports only 9.99.*e-06"),
        ({"gpt2.attention.causal": False}, "causal=False; Folio supports only True"),
        ({"gpt2.attention.head_count": [2, 2]}, "sizes must be integers above 0"),
        ({"gpt2.attention.head_count": 0}, "sizes must be integers above 0"),
        ({"gpt2.block_count": 3}, r"has no transformer\.h\.2"),
        ({"gpt2.block_count": 2**31 - 1}, r"has no transformer\.h\.2"),
        ({"gpt2.block_count": 1}, r"has a tensor 'blk\.1\..*', which the model of model\.py does not have"),
        ({"gpt2.context_length": None}, "it has no 'gpt2.context_length'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama'; Folio supports only 'gpt2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe'; Folio supports only 'gpt-2'"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token=True; Folio supports only False"),
        ({"tokenizer.ggml.merges": None}, "it has no 'tokenizer.ggml.merges'"),
        (
            {"tokenizer.ggml.merges": ["l l", "h e", "he ll"]},
            "'he' has the id 256, but the order of the merges gives it 257",
        ),
        ({"tokenizer.ggml.merges": ["h e", "l l"]}, "no merge makes the token 'hell'"),
        ({"tokenizer.ggml.eos_token_id": 0}, "the token 0 is special; Folio supports only one special token, .* 259"),
        ({"tokenizer.ggml.eos_token_id": None}, "it has no 'tokenizer.ggml.eos_token_id'"),
        (
            {"tokenizer.ggml.tokens": [*TOKENS[:256], "ll", "he", *TOKENS[258:]]},
            "'ll' has the id 256, but the order of the merges",
        ),
        ({"tokenizer.ggml.tokens": [*TOKENS[:256], "he", "he", *TOKENS[258:]]}, "'he' has the id 257"),
        ({"tokenizer.ggml.tokens": TOKENS[:250], "tokenizer.ggml.token_type": [1] * 250}, "lacks the token"),
        ({"tokenizer.ggml.token_type": [1] * 258 + [4, 3]}, "lacks the token 'hell'"),
        (
            {"tokenizer.ggml.tokens": [*TOKENS, "<|user|>"], "tokenizer.ggml.token_type": [1] * 259 + [3, 3]},
            "the token 260 is special; Folio supports only one special token, the one after the last merge: 259",
        ),
        (
            {"tokenizer.ggml.tokens": [*TOKENS, "<|user|>"], "tokenizer.ggml.token_type": [1] * 259 + [3, 1]},
            r"no merge makes the token '<\|user\|>' \(id 260\)",
        ),
        ({"tokenizer.ggml.token_type": [1] * 10}, "is not a GGUF file of GPT-2"),
        ({"tokenizer.ggml.token_type": [77] * 260}, "no merge makes|lacks the token"),
    ],
)
def test_a_gguf_that_folio_computes_differently_is_refused(fields, message, theirs, tmp_path):
    """A different epsilon, tokens in another order or of another kind, and added tokens were loaded silently."""
    with pytest.raises(UserError, match=message) as refused:
        foreign.load(str(write_gguf(theirs, tmp_path / "x.gguf", fields)))
    assert len(str(refused.value).splitlines()) == 1 and "x.gguf" in str(refused.value)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"output.weight": np.ones((260, 16), np.float32)}, r"lm_head\.weight .* differs from the token embeddings"),
        (
            {"rope_freqs.weight": np.ones(4, np.float32)},
            r"has a tensor 'rope_freqs\.weight', which the model of model\.py does not have",
        ),
        ({"blk.1.ffn_up.bias": None}, r"has no transformer\.h\.1\.mlp\.c_fc\.bias"),
        ({"blk.1.ffn_up.bias": np.ones(63, np.float32)}, r"has the shape \(63,\) instead of \(64,\)"),
        ({"blk.1.ffn_up.bias": np.ones(64, np.int32)}, r"'blk\.1\.ffn_up\.bias' is I32: convert the model to F32"),
        ({"blk.1.ffn_down.weight": QUANTIZED}, r"'blk\.1\.ffn_down\.weight' is Q8_0: convert the model to F32"),
    ],
)
def test_gguf_tensors_that_gpt2_does_not_have_are_refused(tensors, message, theirs, tmp_path):
    """output.weight was ignored, even if it differed from the token embeddings."""
    with pytest.raises(UserError, match=message):
        foreign.load(str(write_gguf(theirs, tmp_path / "x.gguf", tensors=tensors)))
