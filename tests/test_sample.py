"""sample.py with models of text. Those of music are in test_sample_music.py."""

import errno
import io
import itertools
import json
import os
import re
import shutil
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

import sample
from folio import UserError
from folio.base import settings
from folio.base.stop_signals import StopSignal
from folio.checkpoints import checkpoint, foreign
from folio.checkpoints.checkpoint import LazyTensors
from folio.data import tokenizer
from folio.decoding import language_model
from folio.decoding.cpu_decoder import CPUDecoder
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.machine import memory
from prepare import text as prepare_text
from sample import SampleConfig, main
from tests.support.sampling import sample_text
from tests.support.tiny_tokenizers import bpe
from train import train


@pytest.fixture
def type_lines(monkeypatch) -> Callable[..., None]:
    """A function that sets what input() returns, or raises; at the end, Ctrl-D."""
    return lambda *lines: monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))


@pytest.fixture
def press_ctrl_c_at(monkeypatch) -> Callable[[int], None]:
    """A function that sets the number of the token at which Ctrl-C is pressed."""
    push, pushed = language_model.TextStream.push, itertools.count(1)

    def press_at(number: int) -> None:
        def push_or_interrupt(stream, token):
            if next(pushed) == number:
                raise KeyboardInterrupt
            return push(stream, token)

        monkeypatch.setattr(language_model.TextStream, "push", push_or_interrupt)

    return press_at


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_each_tokenizer_trains_and_samples_without_its_data(kind, tiny, tmp_path, text, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    (tmp_path / "poems").mkdir()
    for number in range(20):
        (tmp_path / "poems" / f"{number}.txt").write_text(text[number * 900 : number * 900 + 900] + "é🎉")
    inputs = (str(tmp_path / "poems"),)
    settings = dict(data_dir=str(tmp_path / "data"), tokenizer=kind, vocab_size=300, val_fraction=0.3)
    prepare_text.main(prepare_text.TextConfig(inputs=inputs, **settings))
    cfg = tiny(dataset="poems", data_dir=str(tmp_path / "data"), max_iters=5)
    train(cfg)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", None)  # the checkpoint has its own tokenizer
    shutil.rmtree(tmp_path / "data")
    assert sample_text(cfg.out_dir, start="The é").startswith("The é")
    assert "<|endoftext|>" not in sample_text(cfg.out_dir, max_new_tokens=300)


def test_sample_k_does_not_depend_on_num_samples_or_stream(run):
    separator = "\n---------------\n"
    samples = sample_text(run, num_samples=3).removesuffix("\n").split(separator)
    assert len(samples) == 3 and len(set(samples)) == 3
    assert sample_text(run, num_samples=1) == samples[0] + "\n"
    for changes in (dict(stream=False), dict(batch_size=2)):
        assert sample_text(run, num_samples=3, **changes).removesuffix("\n").split(separator) == samples
    assert sample_text(run, seed=2) != sample_text(run)


def test_a_text_begins_with_its_prompt_and_ends_before_stop(run, tmp_path):
    text = sample_text(run, temperature=0.0, start=r"The\nking")
    assert text.startswith("The\nking") and len(text) == len("The\nking") + 40 + 1
    stop = text[10:12]
    same = dict(temperature=0.0, start=r"The\nking", seed=2)
    assert sample_text(run, **same, stop=stop) == "The\nking" + text[8:].split(stop)[0] + "\n"
    assert "\n" not in sample_text(run, start="The", stop=r"\n", max_new_tokens=200).removesuffix("\n")
    (tmp_path / "prompt.txt").write_text("The crown\n", encoding="utf-8")
    assert sample_text(run, start=f"FILE:{tmp_path / 'prompt.txt'}") == sample_text(run, start="The crown")
    with pytest.raises(UserError, match=r"the character 'Ω' \(U\+03A9\) at position 4"):
        sample_text(run, start="The Ω")


def test_a_checkpoint_needs_nothing_else(run, tmp_path, monkeypatch):
    """It can be moved, and the data set is not needed."""
    moved = Path(run).rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    last = checkpoint.load(moved).path
    assert sample_text(str(moved), checkpoint="last") == sample_text("nowhere", init_from=str(last))


def test_a_folder_without_a_checkpoint_is_an_error_that_suggests_other_runs(run, tmp_path, monkeypatch):
    """It named no run, and for a folder that exists, no remedy."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^nowhere .* try --out_dir=out$"):
        sample_text("nowhere")
    with pytest.raises(UserError, match=r"^elsewhere .* try --init_from=out$"):
        sample_text("nowhere", init_from="elsewhere")
    shutil.rmtree(run)
    Path(run).mkdir()
    with pytest.raises(UserError, match=r"^out .* train one first: python train\.py config/"):
        sample_text("out")


def test_unknown_characters_of_the_prompt_are_counted_and_not_printed(run, capsys):
    """They were printed before the sample, as if the model had seen them."""
    assert sample_text(run, start="Ωthe ❤king", on_unknown="skip") == sample_text(run, start="the king")
    line, *_ = capsys.readouterr().err.splitlines()
    assert line == "left out 2 of 10 characters of the prompt, not in the vocabulary: 'Ω' '❤'"


def test_unknown_characters_in_a_file_of_prompts_are_counted_for_each_prompt(run, tmp_path, capsys):
    path, starts = tmp_path / "prompts.jsonl", ["A", "The Ω", "ΩΩ", "B" * 33]
    path.write_text("\n".join(json.dumps({"prompt": start}) for start in starts))
    lines = sample_text(run, prompts=str(path), on_unknown="skip", max_new_tokens=2).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == starts
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "left out 1 of 5 characters of prompt 2, not in the vocabulary: 'Ω'",
        "left out 2 of 2 characters of prompt 3, not in the vocabulary: 'Ω'",
        "prompt 4 has 33 tokens, but the model uses only the last 32",
    ]


def test_each_prompt_of_a_file_becomes_json_lines(run, tmp_path):
    """The text of a prompt does not depend on the other prompts of its batch."""
    path, starts = tmp_path / "prompts.jsonl", ["The king", "", "A", "Broken crown and sword"]
    path.write_text("\n".join(json.dumps({"prompt": start}) for start in starts))
    lines = [json.loads(line) for line in sample_text(run, prompts=str(path), num_samples=2, batch_size=3).splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(s, k) for s in starts for k in (0, 1)]
    for line in lines[::2]:
        assert line["prompt"] + line["text"] + "\n" == sample_text(run, start=line["prompt"])


def test_logprobs_match_the_model(run):
    lines = sample_text(run, start="The", logprobs=2, max_new_tokens=3, temperature=0.0).splitlines()
    text = sample_text(run, start="The", max_new_tokens=3, temperature=0.0).removeprefix("The").removesuffix("\n")
    loaded = checkpoint.load(Path(run), "best")
    model = loaded.build().eval()
    for n, line in enumerate(lines):
        ids = torch.from_numpy(loaded.tokenizer.encode("The" + text[:n]).astype(int))[None]
        logprobs, most_likely = model(ids)[0][0, -1].log_softmax(-1).topk(2)
        expected = [f"{loaded.tokenizer.characters[i]!r} {p:.3f}" for p, i in zip(logprobs, most_likely, strict=True)]
        assert line.split("  ")[0].strip() == expected[0] and line.endswith("  ".join(expected))


def test_interactive_mode_continues_after_errors_and_ctrl_c(run, type_lines, press_ctrl_c_at, capsys):
    """After a character that the model does not know, and a line that is not UTF-8."""
    type_lines("The king", "Ω", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "The sword", "A")
    press_ctrl_c_at(50)  # in the second text
    out = sample_text(run, interactive=True)
    assert out.startswith("The king") and "\nA" in out and "Ω" not in out
    assert len(out.split("\nThe sword")[1].split("\nA")[0]) == 8
    err = capsys.readouterr().err
    assert "the character 'Ω'" in err and "error: that line is not UTF-8" in err
    assert " tokens/s, first token after " in err


def test_a_prompt_from_standard_input_that_is_longer_than_the_context(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The king " * 10)))
    assert sample_text(run, start="-", max_new_tokens=None).startswith("The king " * 10)
    assert "the prompt has 90 tokens, but the model uses only the last 32" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tiny_in, tmp_path_factory) -> str:
    """The folder of a run that several tests share and do not change."""
    cfg = tiny_in(n_layer=1, n_embd=24, block_size=16, max_iters=4, out_dir=str(tmp_path_factory.mktemp("trained")))
    train(cfg)
    return cfg.out_dir


def run_command(out_dir: str, *arguments: str) -> str:
    """The standard output of `python sample.py ARGUMENTS`."""
    out = io.StringIO()
    with redirect_stdout(out):
        main(settings.load(SampleConfig, [f"--out_dir={out_dir}", "--dtype=float32", *arguments]))
    return out.getvalue()


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--start=FILE:pipe", r"start=FILE:pipe: .*--start=-"),
        (["--start=A", "--prompts=a.jsonl"], "prompts=a.jsonl: .*set only one"),
        ("--compile=True", "compile=True: .*leave it out"),
        ("--prompts=pipe", r"prompts=pipe: .* \.jsonl file"),
        ("--prompts=gone.jsonl", r"gone\.jsonl: no such file"),
        ("--prompts=bad.jsonl", r"bad\.jsonl:2: .* not JSON"),
        ("--prompts=unknown.jsonl", r"prompts=unknown\.jsonl: in prompt 2, the character 'Ω'"),
        ("--prompts=binary", r"binary:1, byte 2 .* zero byte"),
        ("--temperature=1e-300", r"temperature=1e-300: .* from 1e-6 to 1e6, or 0"),
        ("--temperature=1e300", r"from 1e-6 to 1e6, or 0"),
        ("--stop=", r"stop=: .* None turns it off"),
        (["--dtype=float16", "--device=cpu"], r"^dtype=float16: .*CUDA.* use "),
    ],
)
def test_invalid_arguments_are_one_line_errors(argument, message, trained, tmp_path, monkeypatch):
    """Some of these ended in a traceback, or without a message."""
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "A"}\n{"prompt": ')
    Path("unknown.jsonl").write_text('{"prompt": "A"}\n{"prompt": "A Ω"}', encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"A\xff\x00")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # reading it waited forever
    with pytest.raises(UserError, match=message) as error:
        run_command(trained, *([argument] if isinstance(argument, str) else argument))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argument, equivalent",
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
def test_extreme_values_are_equivalent_to_ordinary_ones(argument, equivalent, trained):
    """A top_p that is 0 in float32 kept no token, and sampling crashed."""
    common = [] if "max_new" in argument else ["--max_new_tokens=40"]
    assert run_command(trained, *common, argument) == run_command(trained, *common, equivalent)


@pytest.mark.architecture("this test, which pads the token embeddings, and with them the output matrix")
def test_logprobs_of_more_tokens_than_the_tokenizer_has(trained, monkeypatch):
    """Padding ids were also shown, but the tokenizer has no bytes for them."""
    loaded = checkpoint.load(Path(trained), "best")
    tokens, wte = loaded.tokenizer.vocab_size, loaded.model["transformer.wte.weight"]
    loaded.model["transformer.wte.weight"] = torch.cat([wte, wte])
    loaded.state["model"]["vocab_size"] = 2 * tokens
    monkeypatch.setattr(foreign, "load", lambda *_: loaded)
    (line,) = run_command(trained, "--logprobs=1000000000000000000000000", "--max_new_tokens=1").splitlines()
    assert len(re.findall(r" -\d+\.\d{3}", line)) == 1 + tokens


def test_the_first_of_many_samples_is_generated_at_once(trained, tmp_path, monkeypatch):
    """A list of all prompts and samples was created first."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "A"}')
    printed = Mock(side_effect=[None] * 19 + [KeyboardInterrupt, None])
    monkeypatch.setattr("builtins.print", printed)
    with pytest.raises(KeyboardInterrupt):
        run_command(trained, f"--prompts={path}", f"--num_samples={10**30}", "--batch_size=4", "--max_new_tokens=3")
    *lines, speed = [call.args[0] for call in printed.call_args_list]
    assert [json.loads(line)["sample"] for line in lines] == list(range(20)) and " tokens/s, " in speed


def test_batch_size_is_limited_by_the_free_memory(trained, monkeypatch, capsys):
    """With a large batch the allocator raised an exception, or the system killed the process."""
    expected = run_command(trained, "--num_samples=6", "--max_new_tokens=20")
    monkeypatch.setattr(CPUDecoder, "row_bytes", 10**9)
    monkeypatch.setattr(memory, "free", lambda device: 3 * 10**9)
    capsys.readouterr()
    with patch.object(LanguageModel, "_steps", autospec=True, side_effect=LanguageModel._steps) as steps:
        assert run_command(trained, "--num_samples=6", "--max_new_tokens=20", "--batch_size=1000000") == expected
    assert [len(call.args[1]) for call in steps.call_args_list] == [2, 2, 2]
    message = "batch_size=1,000,000: 2.8 GiB of memory is free, so 2 texts are generated at a time"
    assert capsys.readouterr().err.startswith(message)
    out_of_memory = "DefaultCPUAllocator: can't allocate memory"
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError(out_of_memory)):
        monkeypatch.setattr(language_model, "generate", Mock(side_effect=error))
        with pytest.raises(UserError, match=r"^batch_size=32: .* use a smaller --batch_size$"):
            run_command(trained)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_matrices_are_read_one_by_one(dtype, trained, monkeypatch):
    """The whole checkpoint was in memory in addition to the rounded weights. Now one tensor at a time is."""
    gpt = LanguageModel.load(trained, dtype="float32")
    expected = LanguageModel(gpt.model, gpt.tokenizer, "cpu", dtype).generate("The", seed=3)
    alive, max_alive = weakref.WeakSet(), 0
    read = LazyTensors.__getitem__

    def read_and_count(tensors: LazyTensors, name: str) -> torch.Tensor:
        nonlocal max_alive
        tensor = read(tensors, name)
        if tensor.dim() == 2 and "wpe" not in name:  # norms, biases, and positions stay in float32
            alive.add(tensor)
            max_alive = max(max_alive, len(alive))
        return tensor

    monkeypatch.setattr(LazyTensors, "__getitem__", read_and_count)
    small = LanguageModel.load(trained, dtype=dtype)
    assert small.generate("The", seed=3) == expected
    assert max_alive == 1 and not alive and all(p.is_meta for p in small.model.parameters())
    assert small.model.num_params() == gpt.model.num_params()
    with torch.inference_mode():
        assert LanguageModel.load(trained, dtype=dtype).generate("The", seed=3) == expected
    for other_dtype in (dtype, "float32"):  # the first one crashed the process
        with pytest.raises(UserError, match=r"^the model is on the meta device, without weights; load it again"):
            LanguageModel(small.model, small.tokenizer, "cpu", other_dtype)


def test_a_model_larger_than_memory_is_a_one_line_error(trained, monkeypatch):
    """It was loaded until the system killed the process. The line names the largest dtype that fits."""
    model = LanguageModel.load(trained, dtype="float32").model
    parameters = sum(p.numel() for p in model.parameters())
    matrix_weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wpe" not in name)
    sizes = {dtype: language_model.decoding_memory(model, dtype) for dtype in ("float32", "bfloat16", "int8", "int4")}
    assert sizes["float32"] == 4 * parameters and sizes["bfloat16"] == 2 * parameters
    assert sizes["int8"] == matrix_weights + 4 * (parameters - matrix_weights)
    assert sizes["int4"] == round(matrix_weights * (4 + 16 / 32) / 8) + 4 * (parameters - matrix_weights)
    monkeypatch.setattr(memory, "format_bytes", lambda n: f"{n} bytes")
    for free, requested, remedy in [
        (sizes["bfloat16"], "float32", "--dtype=bfloat16"),
        (sizes["bfloat16"] - 1, "float32", "--dtype=int8"),
        (sizes["int8"] - 1, "bfloat16", "--dtype=int4"),
        (sizes["int4"], "int8", "--dtype=int4"),
        (sizes["int4"] - 1, "int4", "a smaller model"),
    ]:
        monkeypatch.setattr(memory, "free", lambda device, free=free: free)
        message = f"dtype={requested}: .*{sizes[requested]} bytes.*{free} bytes.*use {remedy}"
        if remedy.startswith("--"):
            message += f".*{sizes[remedy.removeprefix('--dtype=')]} bytes"
        with pytest.raises(UserError, match=f"^{message}$"):
            run_command(trained, f"--dtype={requested}")
    monkeypatch.setattr(memory, "free", lambda device: sizes["int4"])
    assert run_command(trained, "--dtype=int4")
    with pytest.raises(UserError, match=r"^dtype=int3: use auto, float32, bfloat16, float16, int8, int4$"):
        LanguageModel.load(trained, dtype="int3")


def test_without_a_limit_texts_do_not_depend_on_the_batch(trained, tmp_path):
    """The longest prompt of a batch limited the length of each text."""
    prompts = ["A", "The king", "The king and", "The king and his crown"]
    path = tmp_path / "prompts.jsonl"

    def texts(prompts: list[str], *arguments: str) -> list[str]:
        path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        lines = run_command(trained, f"--prompts={path}", "--max_new_tokens=None", *arguments).splitlines()
        return [json.loads(line)["text"] for line in lines]

    batch = texts(prompts)
    assert [len(text) for text in batch] == [15, 8, 4, 1]
    assert batch == [text for prompt in prompts for text in texts([prompt])]
    assert batch[::-1] == texts(prompts[::-1], "--batch_size=3")
    greedy = texts(prompts, "--temperature=0")
    stop = greedy[0][4:6]
    assert texts(prompts, "--temperature=0", f"--stop={stop}") == [text.split(stop)[0] for text in greedy]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_prompts_of_unequal_length_in_each_dtype(dtype, trained, tmp_path):
    """This crashed. With n_embd=24, int8 gave NaN or a segmentation fault."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "A"}\n{"prompt": "The king"}\n{"prompt": "The crow"}')
    lines = run_command(trained, f"--prompts={path}", f"--dtype={dtype}", "--max_new_tokens=40").splitlines()
    assert [len(json.loads(line)["text"]) for line in lines] == [40] * 3


def test_texts_that_have_ended_do_not_count_for_the_speed(trained, monkeypatch):
    """Their rows of a batch have no tokens until the longest text ends."""
    steps = [SimpleNamespace(tokens=tokens) for tokens in ([1, 2], [3, None], [4, None])]
    monkeypatch.setattr(LanguageModel, "_steps", lambda *args: iter(steps))
    sampler = sample.load_sampler(SampleConfig(out_dir=trained))
    (batch,) = sampler.batches([([0], 0), ([0], 1)], GenerationConfig())
    assert [*batch.steps] == steps and sampler.tokens == 4 and sampler.speed().startswith("4 tokens, ")


def test_ctrl_c_ends_the_text_and_exits_with_130(trained, press_ctrl_c_at, monkeypatch, capsys):
    """The exit status was 0, and the speed included the tokens of the interrupted text, but not its time."""
    press_ctrl_c_at(10)
    monkeypatch.setattr("sys.argv", ["sample.py", f"--out_dir={trained}", "--dtype=float32", "--start=The"])
    with pytest.raises(SystemExit) as end:
        settings.run_script(main, SampleConfig)
    out, err = capsys.readouterr()
    assert end.value.code == 130 and len(out) == 3 + 9 + 1 and out.endswith("\n")
    assert int(re.search(r"10 tokens, ([\d,]+) tokens/s", err)[1].replace(",", "")) > 0


@pytest.mark.parametrize("stop, texts", [(KeyboardInterrupt(), 2), (StopSignal(signal.SIGTERM), 1)])
def test_in_interactive_mode_only_ctrl_c_is_about_the_text(stop, texts, trained, type_lines, monkeypatch):
    """A closed terminal or SIGTERM ends the script."""
    type_lines("a", "b")
    monkeypatch.setattr(sample, "print_samples", print_samples := Mock(side_effect=stop))
    with pytest.raises(StopSignal) if texts == 1 else nullcontext():
        run_command(trained, "--interactive")
    assert print_samples.call_count == texts


@pytest.mark.parametrize("option", ["--start=FILE:", "--prompts=", "--out_dir=", "--save="])
def test_a_name_that_is_too_long_for_the_system_is_a_one_line_error(option, trained, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sample.py", f"--out_dir={trained}", option + "x" * 256])
    with pytest.raises(SystemExit) as end:
        settings.run_script(main, SampleConfig)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: xxx") and error.endswith("File name too long\n")


def test_an_error_of_the_system_without_a_file_name_keeps_its_traceback():
    """It was printed as "error: None: Permission denied", which names no cause."""
    for number in (errno.ENAMETOOLONG, errno.EACCES):
        with pytest.raises(OSError, match=os.strerror(number)):
            settings.run_script(Mock(side_effect=OSError(number, os.strerror(number))))


def test_interactive_mode_ends_with_ctrl_d_or_with_ctrl_c_at_the_prompt(trained, type_lines):
    """At the prompt, Ctrl-C exited with 0, too."""
    type_lines()
    assert run_command(trained, "--interactive") == "\n"
    type_lines(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run_command(trained, "--interactive")


def test_nan_weights_are_a_one_line_error(trained, monkeypatch):
    """An id beyond the vocabulary was sampled, which ended in a traceback."""
    loaded = checkpoint.load(Path(trained), "best")
    loaded.model["transformer.ln_f.weight"][3] = torch.nan
    monkeypatch.setattr(foreign, "load", lambda *_: loaded)
    for dtype in ("float32", "int8"):
        with pytest.raises(UserError, match=r"^the model computes NaN: use another checkpoint, or --dtype=float32"):
            run_command(trained, f"--dtype={dtype}")
