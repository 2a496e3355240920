import io
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tiny_tokenizers import bpe

from folio import UserError, checkpoint, tokenizer
from prepare import text as prepare_text
from sample import SampleConfig, main
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
    wrong = SampleConfig(num_samples=0, max_new_tokens=0, temperature=-1.0, top_k=0, top_p=0.0)
    assert [name for name, _ in wrong.problems()] == "num_samples max_new_tokens temperature top_k top_p".split()
