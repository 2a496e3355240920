import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_tokenizers import bpe

import sample
from folio import UserError, checkpoint, tokenizer
from folio.tokenizer import ByteTokenizer
from model import GPT, GPTConfig
from prepare import text as prepare_text
from sample import SampleConfig, Sampler, main
from train import train


@pytest.fixture
def run(tiny) -> str:
    cfg = tiny(max_iters=20)
    with redirect_stdout(io.StringIO()):
        train(cfg)
    return cfg.out_dir


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_each_tokenizer_trains_and_writes_without_its_data(kind, tiny, tmp_path, text, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    (tmp_path / "poems").mkdir()
    for number in range(20):
        (tmp_path / "poems" / f"{number}.txt").write_text(text[number * 900 : number * 900 + 900] + "é🎉")
    inputs = (str(tmp_path / "poems"),)
    settings = dict(data_dir=str(tmp_path / "data"), tokenizer=kind, vocab_size=300, val_fraction=0.3)
    prepare_text.main(prepare_text.TextConfig(inputs=inputs, **settings))
    cfg = tiny(dataset="poems", data_dir=str(tmp_path / "data"), max_iters=5)
    train(cfg)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", None)  # a checkpoint needs nothing else
    shutil.rmtree(tmp_path / "data")
    assert written(cfg.out_dir, start="The é").startswith("The é")
    assert "<|endoftext|>" not in written(cfg.out_dir, max_new_tokens=300)


def written(out_dir: str, **settings) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        main(SampleConfig(out_dir=out_dir, **{"max_new_tokens": 40, "dtype": "float32", **settings}))
    return out.getvalue()


def test_a_prompt_goes_on(run):
    text = written(run, start="The king")
    assert text.startswith("The king") and len(text) == len("The king") + 40 + 1


def test_samples_are_the_same_however_many_and_however_shown(run):
    three = written(run, num_samples=3).removesuffix("\n").split("\n---------------\n")
    assert len(three) == 3 and len(set(three)) == 3
    assert written(run, num_samples=1) == three[0] + "\n"
    assert written(run, num_samples=3, stream=False).removesuffix("\n").split("\n---------------\n") == three
    assert written(run, seed=2) != written(run)


def test_stop_ends_the_text(run):
    whole = written(run, temperature=0.0, start="The")
    stop = whole[10:12]
    assert written(run, temperature=0.0, start="The", stop=stop) == "The" + whole[3:].split(stop)[0] + "\n"


def test_line_breaks_can_be_typed(run):
    assert written(run, start=r"The\nking").startswith("The\nking")
    assert "\n" not in written(run, start="The", stop=r"\n", max_new_tokens=200).removesuffix("\n")


def test_greedy_ignores_the_seed(run):
    assert written(run, temperature=0.0, seed=1) == written(run, temperature=0.0, seed=2)


def test_a_prompt_from_a_file(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("The crown\n", encoding="utf-8")
    assert written(run, start=f"FILE:{path}").startswith("The crown\n")
    with pytest.raises(UserError, match=r"start=FILE:gone\.txt: there is no file gone\.txt"):
        written(run, start="FILE:gone.txt")
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8 at byte 3"):
        written(run, start=f"FILE:{path}")


def test_an_unknown_character_is_named(run):
    with pytest.raises(UserError, match=r"the character 'Ω' \(U\+03A9\) at position 4"):
        written(run, start="The Ω")


def test_a_checkpoint_needs_nothing_else(run, tmp_path, monkeypatch):
    """Neither the data set nor the folder it was trained in."""
    moved = Path(run).rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    last = checkpoint.load(moved).path
    assert written(str(moved), checkpoint="last") == written("nowhere", init_from=str(last))


def test_nothing_to_sample_from():
    with pytest.raises(UserError, match="nowhere holds no checkpoint: train one first"):
        written("nowhere")


def test_impossible_settings_are_told_together():
    wrong = dict(num_samples=0, batch_size=0, max_new_tokens=0, context_stride=0, temperature=-1.0, top_k=0, top_p=1.5)
    wrong |= dict(min_p=0.0, repetition_penalty=0.0, logprobs=-1, compile=True, stop="")
    assert {name for name, _ in SampleConfig(**wrong).problems()} == wrong.keys()
    assert [name for name, _ in SampleConfig(prompts="a.jsonl", start="b").problems()] == ["prompts"]


def test_samples_do_not_depend_on_the_batch(run):
    assert written(run, num_samples=5, batch_size=2) == written(run, num_samples=5)


def test_unknown_characters_of_the_start_can_be_left_out(run):
    assert written(run, start="The Ω", on_unknown="skip").removeprefix("The Ω") == written(
        run, start="The "
    ).removeprefix("The ")


def test_prompts_from_a_file_come_out_as_json_lines(run, tmp_path):
    """In batches of ragged prompts, each as it is alone."""
    path, starts = tmp_path / "prompts.jsonl", ["The king", "", "A", "Broken crown and sword"]
    path.write_text("\n".join(json.dumps({"prompt": start}) for start in starts))
    lines = [json.loads(line) for line in written(run, prompts=str(path), num_samples=2, batch_size=3).splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(s, k) for s in starts for k in (0, 1)]
    for line in lines[::2]:
        assert line["prompt"] + line["text"] + "\n" == written(run, start=line["prompt"])
    with pytest.raises(UserError, match="there is no such file"):
        written(run, prompts="gone.jsonl")
    path.write_text('{"text": "a"}')
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: there is no field 'prompt'"):
        written(run, prompts=str(path))


def test_log_probabilities_are_those_of_the_model(run):
    lines = written(run, start="The", logprobs=2, max_new_tokens=3, temperature=0.0).splitlines()
    text = written(run, start="The", max_new_tokens=3, temperature=0.0).removeprefix("The").removesuffix("\n")
    loaded = checkpoint.load(Path(run), "best")
    model = loaded.build(GPT, GPTConfig).eval()
    for n, line in enumerate(lines):
        ids = torch.from_numpy(loaded.tokenizer.encode("The" + text[:n]).astype(int))[None]
        expected, likeliest = model(ids)[0][0, -1].log_softmax(-1).topk(2)
        shown = [f"{loaded.tokenizer.characters[i]!r} {p:.3f}" for p, i in zip(expected, likeliest, strict=True)]
        assert line.split("  ")[0].strip() == shown[0] and line.endswith("  ".join(shown))


def test_a_conversation_goes_on_after_a_mistake_and_ctrl_c(run, monkeypatch, capsys):
    asked = iter(["The king", "Ω", "The sword", "A"])

    def answer(prompt: str) -> str:
        try:
            return next(asked)
        except StopIteration:
            raise EOFError from None

    push, pushed = sample.Text.push, 0

    def interrupted(text, token):
        nonlocal pushed
        pushed += 1
        if pushed == 50:  # in the second text
            raise KeyboardInterrupt
        return push(text, token)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sample.Text, "push", interrupted)
    sample.main(SampleConfig(out_dir=run, interactive=True, max_new_tokens=40, dtype="float32", on_unknown="error"))
    out, err = capsys.readouterr()
    assert out.startswith("The king") and "\nA" in out and "the character 'Ω'" in err and "Ω" not in out
    assert len(out.split("\nThe sword")[1].split("\nA")[0]) == 8 and " tokens/s, the first after " in err


def test_standard_input_and_a_start_that_is_too_long(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("The king " * 10))
    assert written(run, start="-", max_new_tokens=None).startswith("The king " * 10)
    assert "the start has 90 tokens, of which the model sees the last 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "start, ids",
    [
        ("a<|endoftext|>b", [97, 256, 98]),
        ("<|endoftext|>", [256]),
        ("", [256]),  # text out of nothing begins there, too
        ("a<|end", [97, 60, 124, 101, 110, 100]),
    ],
)
def test_the_end_of_text_can_be_typed(start, ids):
    sampler = SimpleNamespace(tokenizer=ByteTokenizer(), model=GPT(GPTConfig(8, 257, 1, 1, 8)))
    assert Sampler.prompt(sampler, start) == ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_each_dtype_writes(dtype, run):
    assert len(written(run, start="The", dtype=dtype)) == 3 + 40 + 1


def test_a_text_can_fill_the_context(run):
    assert len(written(run, start="The", max_new_tokens=None)) == 32 + 1
