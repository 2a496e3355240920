import io
import itertools
import json
import os
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_tokenizers import bpe

import sample
from folio import UserError, checkpoint, configurator, memory, tokenizer
from folio.tokenizer import ByteTokenizer
from model import GPT, GPTConfig
from prepare import text as prepare_text
from sample import SampleConfig, Sampler, main
from train import TrainConfig, train


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
    with pytest.raises(UserError, match=r"start=FILE:gone\.txt: the file gone\.txt does not exist"):
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
    wrong = dict(
        seed=-1, num_samples=0, batch_size=0, max_new_tokens=0, context_stride=0, temperature=-1.0, top_k=0, top_p=1.5
    )
    wrong |= dict(min_p=0.0, repetition_penalty=0.0, logprobs=-1, compile=True, stop="")
    with pytest.raises(UserError) as error:
        configurator.check(SampleConfig(**wrong))
    named = {line.removeprefix("default: ").split("=")[0] for line in str(error.value).splitlines()}
    assert named == wrong.keys()
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
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: it has no text \"prompt\"; write"):
        written(run, prompts=str(path))


def test_log_probabilities_are_those_of_the_model(run):
    lines = written(run, start="The", logprobs=2, max_new_tokens=3, temperature=0.0).splitlines()
    text = written(run, start="The", max_new_tokens=3, temperature=0.0).removeprefix("The").removesuffix("\n")
    loaded = checkpoint.load(Path(run), "best")
    model = loaded.build().eval()
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

    push, pushed = sample.TextStream.push, 0

    def interrupted(text, token):
        nonlocal pushed
        pushed += 1
        if pushed == 50:  # in the second text
            raise KeyboardInterrupt
        return push(text, token)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sample.TextStream, "push", interrupted)
    sample.main(SampleConfig(out_dir=run, interactive=True, max_new_tokens=40, dtype="float32", on_unknown="error"))
    out, err = capsys.readouterr()
    assert out.startswith("The king") and "\nA" in out and "the character 'Ω'" in err and "Ω" not in out
    assert len(out.split("\nThe sword")[1].split("\nA")[0]) == 8 and " tokens/s, the first after " in err


def test_standard_input_and_a_start_that_is_too_long(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The king " * 10)))
    assert written(run, start="-", max_new_tokens=None).startswith("The king " * 10)
    assert "the prompt has 90 tokens, of which the model sees the last 32" in capsys.readouterr().err


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


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory) -> str:
    """A run that several tests only read."""
    small = dict(n_layer=1, n_head=2, n_embd=24, block_size=16, batch_size=4, max_iters=4, warmup_iters=0)
    out_dir = str(tmp_path_factory.mktemp("trained") / "out")
    with redirect_stdout(io.StringIO()):
        train(TrainConfig(**small, dataset="verse", data_dir=str(data_dir), out_dir=out_dir, dtype="float32"))
    return out_dir


def typed(out_dir: str, *arguments: str) -> str:
    """What the command line writes."""
    out = io.StringIO()
    with redirect_stdout(out):
        main(configurator.load(SampleConfig, [f"--out_dir={out_dir}", "--dtype=float32", *arguments]))
    return out.getvalue()


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--seed=-1", r"seed=-1: it must be at least 0"),
        (f"--seed={2**63}", r"seed=9223372036854775808: it must be less than 2\*\*63"),
        ("--start=FILE:folder", r"start=FILE:folder: folder is not a file; give a file, or pipe the text to --start=-"),
        ("--start=FILE:", r"start=FILE:: \. is not a file"),
        ("--start=FILE:pipe", r"start=FILE:pipe: pipe is not a file"),
        ("--prompts=pipe", r"prompts=pipe: it is not a file; name a \.jsonl file"),
        ("--prompts=-", r"prompts=-: it is not a file; name a \.jsonl file"),
        ("--start=FILE:gone.txt", r"start=FILE:gone\.txt: the file gone\.txt does not exist"),
        ("--start=FILE:binary", r"start=FILE:binary: it is not UTF-8 at byte 1; save it as UTF-8"),
        ("--prompts=folder", r"prompts=folder: it is not a file; name a \.jsonl file"),
        ("--prompts=gone.jsonl", r"gone\.jsonl: there is no such file"),
        ("--prompts=empty.jsonl", r"prompts=empty\.jsonl: the file is empty; write \{"),
        ("--prompts=bad.jsonl", r"bad\.jsonl:2: this line is not JSON"),
        ("--prompts=null.jsonl", r'null\.jsonl:1: it has no text "prompt"; write \{"prompt": "TEXT"\}'),
        ("--prompts=number.jsonl", r'number\.jsonl:1: it has no text "prompt"'),
        ("--prompts=other.jsonl", r'other\.jsonl:1: it has no text "prompt"'),
        (
            "--prompts=unknown.jsonl",
            r"prompts=unknown\.jsonl: in prompt 2, the character 'Ω' \(U\+03A9\) at position 2",
        ),
        ("--prompts=binary", r"binary:1: this line is not UTF-8 at byte 1"),
        ("--temperature=1e-300", r"temperature=1e-300: it must be from 1e-6 to 1e6, or 0"),
        ("--temperature=1e300", r"it must be from 1e-6 to 1e6, or 0"),
        ("--repetition_penalty=1e-200", r"it must be at least 1e-06"),
        ("--stop=", r"stop=: it must not be empty"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(argument, message, trained, tmp_path, monkeypatch):
    """A negative seed, a folder as a start and others ended in a traceback, or in no line at all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text('{"prompt": "A"}')
    files = {"empty": "\n", "bad": '{"prompt": "A"}\n{"prompt": ', "null": '{"prompt": null}', "other": '{"text": "A"}'}
    files |= {"number": '{"prompt": 1}', "unknown": '{"prompt": "A"}\n{"prompt": "A Ω"}'}
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"A\xff\x00")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # reading it waited forever
    with pytest.raises(UserError, match=message) as caught:
        typed(trained, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argument, means",
    [
        ("--top_k=1000000000000000000000000", "--top_k=None"),
        ("--top_p=1e-300", "--top_k=1"),
        ("--min_p=1e-300", "--min_p=None"),
        ("--context_stride=1000000000000000000000000", "--context_stride=16"),
        pytest.param(f"--stop={'king' * 10_000}", "--stop=None", id="a long stop"),
        ("--batch_size=1000000000000000000000000", "--batch_size=32"),
        ("--max_new_tokens=None", "--max_new_tokens=15"),
    ],
)
def test_huge_and_tiny_values_mean_what_they_say(argument, means, trained):
    """A top_p that is 0 in float32 left no token, and the drawing crashed."""
    common = [] if "max_new" in argument else ["--max_new_tokens=40"]
    assert typed(trained, *common, argument) == typed(trained, *common, means)


def test_more_runners_up_than_the_tokenizer_has(trained, monkeypatch):
    """Ids of a padded vocabulary were shown, too, and no tokenizer knows their bytes."""
    loaded = checkpoint.load(Path(trained), "best")
    tokens, wte = loaded.tokenizer.vocab_size, loaded.model["transformer.wte.weight"]
    loaded.model["transformer.wte.weight"] = torch.cat([wte, wte])
    loaded.state["model"]["vocab_size"] = 2 * tokens
    monkeypatch.setattr(sample.convert, "load", lambda *_: loaded)
    (line,) = typed(trained, "--logprobs=1000000000000000000000000", "--max_new_tokens=1").splitlines()
    assert len(re.findall(r" -\d+\.\d{3}", line)) == 1 + tokens


def test_endless_numbers_of_samples_begin_at_once(trained, tmp_path, monkeypatch):
    """All pairs of prompt and sample were listed before the first was generated."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "A"}')
    endless = f"--num_samples={10**30}"
    shown = []

    def show(line: str = "", **_) -> None:
        shown.append(line)
        if len(shown) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", show)
    with pytest.raises(KeyboardInterrupt):
        typed(trained, f"--prompts={path}", endless, "--batch_size=4", "--max_new_tokens=3")
    assert [json.loads(line)["sample"] for line in shown] == list(range(20))


def test_a_batch_is_as_large_as_memory_allows(trained, monkeypatch, capsys):
    """A large batch ended in a traceback of the allocator's, or the system ended the process."""
    expected = typed(trained, "--num_samples=6", "--max_new_tokens=20")
    row = (4 + 16) * 16 * 24 * 4  # bytes: caches and activations of one context; logits are small
    monkeypatch.setattr(memory, "free", lambda device: 3 * row)
    capsys.readouterr()
    texts, sizes = sample.Sampler.texts, []
    monkeypatch.setattr(sample.Sampler, "texts", lambda self, *rows: sizes.append(len(rows[0])) or texts(self, *rows))
    assert typed(trained, "--num_samples=6", "--max_new_tokens=20", "--batch_size=1000000") == expected
    assert sizes == [2, 2, 2]
    message = "batch_size=1,000,000: 0 MiB of memory are free, so 2 texts are generated at a time"
    assert capsys.readouterr().err.startswith(message)
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        monkeypatch.setattr(sample, "generate", lambda *_, error=error, **__: iter_error(error))
        with pytest.raises(UserError, match=r"^batch_size=32: memory ran out; use a smaller --batch_size$"):
            typed(trained)


def iter_error(error: Exception):
    raise error


def test_without_a_limit_a_prompt_is_answered_as_it_is_alone(trained, tmp_path):
    """The longest prompt of a batch decided how many tokens each text got."""
    starts = ["A", "The king", "The king and", "The king and his crown"]
    path = tmp_path / "prompts.jsonl"

    def answers(starts: list[str], *arguments: str) -> list[str]:
        path.write_text("\n".join(json.dumps({"prompt": start}) for start in starts))
        lines = typed(trained, f"--prompts={path}", "--max_new_tokens=None", *arguments).splitlines()
        return [json.loads(line)["text"] for line in lines]

    together = answers(starts)
    assert [len(text) for text in together] == [15, 8, 4, 1]
    assert together == list(itertools.chain(*(answers([start]) for start in starts)))
    assert together[::-1] == answers(starts[::-1], "--batch_size=3")
    free = answers(starts, "--temperature=0")
    stop = free[0][4:6]
    assert answers(starts, "--temperature=0", f"--stop={stop}") == [text.split(stop)[0] for text in free]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_ragged_prompts_in_each_dtype(dtype, trained, tmp_path):
    """Prompts of two lengths crashed; with a width of 24, int8 gave NaN or a segmentation fault."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "A"}\n{"prompt": "The king"}\n{"prompt": "The crow"}')
    lines = typed(trained, f"--prompts={path}", f"--dtype={dtype}", "--max_new_tokens=40").splitlines()
    assert [len(json.loads(line)["text"]) for line in lines] == [40] * 3


def test_ctrl_c_ends_a_text_and_the_speed_is_still_true(trained, monkeypatch, capsys):
    """The time of a text that was ended was not counted, while its tokens were."""
    push, pushed = sample.TextStream.push, itertools.count(1)

    def interrupted(text, token):
        if next(pushed) == 10:
            raise KeyboardInterrupt
        return push(text, token)

    monkeypatch.setattr(sample.TextStream, "push", interrupted)
    assert len(typed(trained, "--start=The", "--max_new_tokens=40")) == 3 + 9 + 1
    assert int(re.search(r"10 tokens, ([\d,]+) tokens/s", capsys.readouterr().err)[1].replace(",", "")) > 0


def test_a_line_that_is_not_utf8_does_not_end_a_conversation(trained, monkeypatch, capsys):
    asked = iter([UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "The king", EOFError()])

    def answer(prompt: str) -> str:
        if isinstance(line := next(asked), Exception):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    assert typed(trained, "--interactive=True", "--max_new_tokens=5").startswith("The king")
    assert "error: that line is not UTF-8" in capsys.readouterr().err


def test_a_start_as_windows_saves_it(trained, tmp_path):
    """With a byte-order mark, which is no character of the text, and with two characters for each line break."""
    (tmp_path / "start.txt").write_bytes(b"\xef\xbb\xbfThe king\r\nA")
    assert typed(trained, f"--start=FILE:{tmp_path / 'start.txt'}").startswith("The king\nA")


def test_weights_that_are_nan_are_told_in_one_line(trained, monkeypatch):
    """The drawing gave an id beyond the vocabulary, which ended in a traceback."""
    loaded = checkpoint.load(Path(trained), "best")
    loaded.model["transformer.ln_f.weight"][3] = torch.nan
    monkeypatch.setattr(sample.convert, "load", lambda *_: loaded)
    for dtype in ("float32", "int8"):
        with pytest.raises(UserError, match=r"^the model computes NaN: use another checkpoint, or --dtype=float32"):
            typed(trained, f"--dtype={dtype}")


def test_a_small_models_single_row_is_computed_by_one_thread(trained, monkeypatch):
    """Beside a busy process, its two threads waited for each other: 11 tokens per second."""
    threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    typed(trained, "--max_new_tokens=2")
    typed(trained, "--max_new_tokens=2", "--num_samples=3")
    monkeypatch.setattr(sample, "SMALL", 0)
    typed(trained, "--max_new_tokens=2")
    assert threads == [1, 7, 7]
