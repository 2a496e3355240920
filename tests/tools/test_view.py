import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from folio import UserError
from folio.base import settings
from folio.checkpoints.training_data import open_training_data
from folio.data.sources.music import EventFormat, events_of_file
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, MidiTokenizer
from folio.decoding.language_model import LanguageModel
from folio.web.html_export import first_text
from folio.web.viewed_model import KNOWN_TEXT, ViewedModel, choose_text, first_sentences
from prepare import midi, pairs
from prepare import text as plain_text
from prepare.midi import MidiConfig
from prepare.pairs import PairsConfig
from prepare.text import TextConfig
from tests.support import processes
from tests.support.music import pieces_of, write_pieces
from tests.support.servers import open_request, serving_tool, start_server
from tests.support.tiny_tokenizers import trained
from tests.support.viewed_models import save_random_run
from tools import view
from tools.view import ViewConfig
from train import train

SEED = 3


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The folder of a run with a byte-level model."""
    save_random_run(tmp_path / "run", ByteTokenizer(), SEED, block_size=64)
    return str(tmp_path / "run")


@contextmanager
def viewing(*arguments: object) -> Iterator[http.client.HTTPConnection]:
    """Run the tool in a thread, and connect to it."""
    cfg = settings.load(ViewConfig, [*map(str, arguments), "--open=False", "--device=cpu"])
    with serving_tool(view, cfg) as address, closing(http.client.HTTPConnection(*address, timeout=300)) as connection:
        yield connection


def ask(connection: http.client.HTTPConnection, kind: str, **headers: str) -> dict:
    connection.request("POST", "/ask", json.dumps({"kind": kind}), {"content-type": "application/json", **headers})
    with connection.getresponse() as response:
        content = response.read()
        assert response.status == 200
    return json.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"models: .*python tools/view\.py"),
        (["a", "b", "c"], "models=a b c: name one model, or two"),
        (["a", "--host=0.0.0.0"], r"host=0\.0\.0\.0: .*127\.0\.0\.1, localhost, ::1"),
        (["a", "--host=192.0.2.1"], r"tools/export\.py --to=html a shared/index\.html, then python -m http\.server --"),
        (["a", "--models=b"], "without --models"),
        (["no-such-run"], "^no-such-run "),
    ],
)
def test_bad_arguments_are_an_error_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        view.main(settings.load(ViewConfig, arguments))
    assert "\n" not in str(error.value)


def test_bad_models_are_an_error_in_one_line(tmp_path, run):
    save_random_run(tmp_path / "other", CharTokenizer("ab"), SEED)
    save_random_run(tmp_path / "music", MidiTokenizer(["NoteOn_60"], {"steps": -1}), SEED)
    for models, message in (
        ([run, "other"], r"[^\n]* and [^\n]* have different tokenizers"),
        (["music"], "the format of this music tokenizer is damaged: "),
        ([run, "missing"], r"[^\n]*missing holds no checkpoint"),
    ):
        with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
            view.main(ViewConfig(models=tuple(str(tmp_path / name) for name in models)))


def test_a_taken_port_is_replaced_by_a_free_one(capsys, run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with viewing(run, f"--port={taken}") as connection:
            assert connection.port != taken
            for host in ("127.0.0.1", "localhost"):
                assert ask(connection, "models", host=f"{host}:{connection.port}")["models"][0]["name"] == run
    first, address = capsys.readouterr().out.splitlines()
    assert first == f"port {taken} cannot be used (Address already in use); using {connection.port}"
    assert address == f"http://127.0.0.1:{connection.port}/  (Ctrl-C stops)"
    listener = view.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with closing(listener), closing(view.listen("127.0.0.1", port)) as second:
        assert second.getsockname()[1] != port
    with closing(view.listen("127.0.0.1", port)) as third:
        assert third.getsockname()[1] == port
    with pytest.raises(UserError, match=r"^host=192\.0\.2\.1: cannot listen"):
        view.listen("192.0.2.1", 0)


def test_serving_on_ipv6(capsys, run):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with viewing(run, "--host=::1", "--port=0", "--text=one\\ntwo") as connection:
        assert ask(connection, "models")["text"] == "one\ntwo"
    assert capsys.readouterr().out == f"http://[::1]:{connection.port}/  (Ctrl-C stops)\n"


def test_two_models(tmp_path, run):
    save_random_run(tmp_path / "other", ByteTokenizer(), SEED + 1, block_size=32, n_layer=1)
    with viewing(run, tmp_path / "other", "--port=0") as connection:
        assert [model["limit"] for model in ask(connection, "models")["models"]] == [64, 32]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals for other processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_server_during_a_stream(run, tmp_path, number):
    """The server waited for the end of a stream without a reader."""
    process, port = start_server([view.__file__, run, "--open=False", "--port=0", "--device=cpu"], tmp_path)
    with open_request(port, "/generate", {"ids": [1], "num_samples": 16, "max_new_tokens": 4096}) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        os.kill(process.pid, number)
        assert processes.wait(process, timeout=60) == 128 + number
    assert (tmp_path / "errors").read_text() == f"stopped by {number.name}\n"
    assert len((tmp_path / "printed").read_text().splitlines()) == 1


# --- initial text -----------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def viewed_run(folder: Path, tokenizer, settings: dict) -> ViewedModel:
    save_random_run(folder, tokenizer, SEED, settings, block_size=64)
    return ViewedModel(str(folder), "best", CPU)


def sample_of(viewed: ViewedModel) -> str:
    return LanguageModel(viewed.model, viewed.tokenizer).generate("", max_new_tokens=64)


@pytest.fixture
def trained_on(tiny, tmp_path) -> Callable[..., ViewedModel]:
    """A function that prepares a data set in the folder "data", and trains a model on it."""

    def view_trained(prepare: ModuleType, config: type, source: Path, **settings) -> ViewedModel:
        data = str(tmp_path / "data")
        prepare.main(config(inputs=(str(source),), data_dir=data, num_workers=0, **settings))
        train(cfg := tiny(dataset=source.stem, data_dir=data, block_size=64))
        return ViewedModel(cfg.out_dir, "best", CPU)

    return view_trained


def test_the_initial_text_without_data_is_known_or_a_sample(tmp_path):
    """A known text for Shakespeare, pretrained models, and models that compute NaN."""
    characters = CharTokenizer.of(KNOWN_TEXT)
    assert choose_text(viewed_run(tmp_path / "a", characters, {"dataset": "shakespeare_char"})) == KNOWN_TEXT
    assert choose_text(viewed_run(tmp_path / "b", trained(), {})) == KNOWN_TEXT
    for name, dataset in (("c", None), ("d", "verse")):  # lack its characters; or the data, which is not here
        sampled = viewed_run(tmp_path / name, CharTokenizer("日本語\n"), {"dataset": dataset})
        assert choose_text(sampled) == sample_of(sampled) != ""
    broken = viewed_run(tmp_path / "e", ByteTokenizer(), {"dataset": "gone"})
    broken.model.transformer.ln_f.weight[0] = torch.nan
    assert choose_text(broken) == KNOWN_TEXT


@pytest.mark.parametrize("split_on", [None, "\\n\\n"], ids=["one text", "documents"])
def test_the_initial_text_does_not_occur_in_the_training_data(split_on, trained_on, tmp_path, text):
    """The first text of a model of Shakespeare was training text, and its loss was shown as if it were new."""
    lines = [f"{KNOWN_TEXT}\n\n", *(f"{line}\n\n" for line in text.splitlines())]
    source = tmp_path / "shakespeare.txt"
    source.write_text("".join([*lines[:300], *lines[:40], *lines[300:400]]))  # the beginning occurs twice
    viewed = trained_on(plain_text, TextConfig, source, val_fraction=0.3, split_on=split_on, tokenizer="char")
    (dataset,) = open_training_data(viewed.checkpoint, None)
    training, held_out = (viewed.tokenizer.decode(part[0].ids) for part in (dataset.train, dataset.val))
    chosen = choose_text(viewed)
    assert chosen in held_out and len(chosen) > 30
    assert not any(chosen[start : start + 32] in training for start in range(len(chosen) - 31))
    assert first_text(viewed, "", str(tmp_path / "data")) == KNOWN_TEXT  # a file quotes no held-out text
    (tmp_path / "data").rename(tmp_path / "moved")
    assert choose_text(viewed) == KNOWN_TEXT


def test_the_initial_text_of_a_model_of_plain_text_is_held_out(trained_on, tmp_path):
    """A viewer that was opened on a young run showed the loss of the model's own gibberish."""
    text = "".join(f"Sentence {k} of the text. Is it {k}? " for k in range(100))
    (tmp_path / "tale.txt").write_text(text)
    viewed = trained_on(plain_text, TextConfig, tmp_path / "tale.txt", tokenizer="char")
    held_out, chosen = text[round(0.9 * len(text)) :], choose_text(viewed)
    assert chosen in held_out and 20 < len(chosen) <= 64
    assert chosen[0] in "SI" and chosen[-1] in ".?"  # complete sentences
    assert first_text(viewed, "", str(tmp_path / "data")) == sample_of(viewed)  # a file quotes no private text


@pytest.mark.parametrize(
    "text, limit, expected",
    [
        ("y end. One two. Three four five.", 12, "One two."),
        ("One two. Three four five.", 12, "One two."),
        ("end of\na line\nand more", 10, "a line"),
        ("without an end of the sentence", 13, "without an"),
        ("\u5c3e\u3002\u65e5\u672c\u3002\u8a9e\u8a9e", 4, "\u65e5\u672c\u3002"),
        ("short", 100, "short"),
        ("", 100, ""),
    ],
)
def test_first_sentences(text, limit, expected):
    assert first_sentences(text, lambda text: text[:limit]) == expected


def test_the_initial_text_of_a_music_model_is_the_start_of_a_held_out_piece(trained_on, tmp_path):
    write_pieces(tmp_path / "pieces", 4)
    viewed = trained_on(midi, MidiConfig, tmp_path / "pieces", time="beats", steps=4)
    held_out = [pair.split() for pair in pieces_of(tmp_path / "data" / "pieces", "val")]
    assert choose_text(viewed).split() == held_out[0][:64]
    (tmp_path / "data").rename(tmp_path / "moved")
    assert choose_text(viewed, str(tmp_path / "moved")).split() == held_out[0][:64]
    assert choose_text(viewed) == sample_of(viewed) != ""
    viewed.model.transformer.ln_f.weight.data[0] = torch.nan
    assert choose_text(viewed) == ""
    untrained = viewed_run(tmp_path / "untrained", viewed.tokenizer, {})
    assert choose_text(untrained) == sample_of(untrained)


def test_the_initial_text_of_a_model_of_pairs_is_a_held_out_pair(trained_on, tmp_path):
    lines = [json.dumps({"prompt": f"{k}:", "completion": f" {k + 1}."}) for k in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    viewed = trained_on(pairs, PairsConfig, tmp_path / "pairs.jsonl", tokenizer="byte")
    assert choose_text(viewed) == pieces_of(tmp_path / "data" / "pairs", "val")[0].strip()


@pytest.mark.needs("miditok", "symusic")
def test_the_initial_text_may_be_a_midi_file(monkeypatch, capsys, tmp_path):
    format = EventFormat("beats", steps=4, longest_shift=4)
    save_random_run(tmp_path / "run", format.tokenizer(), SEED, block_size=64)
    write_pieces(tmp_path / "pieces", 1)
    file, events = tmp_path / "pieces" / "0.mid", events_of_file(tmp_path / "pieces" / "0.mid", format)
    with viewing(tmp_path / "run", "--port=0", f"--text=FILE:{file}") as connection:
        assert ask(connection, "models")["text"] == events
    monkeypatch.setattr(view, "MAX_CHARACTERS", 100)
    capsys.readouterr()
    with viewing(tmp_path / "run", "--port=0", f"--text=FILE:{file}") as connection:
        text = ask(connection, "models")["text"]
        assert events.startswith(f"{text} ") and 80 < len(text) <= 100
    assert f"text: the first 100 of {len(events):,} characters are shown\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^[^\n]*'ROMEO:' is not an event of this model[^\n]*$"):
        view.main(ViewConfig(models=(str(tmp_path / "run"),), text="ROMEO:"))
    (tmp_path / "broken.mid").write_text("hello")
    for name, message in (("broken.mid", "cannot be used: it is not a MIDI file"), ("none.mid", "cannot be read")):
        with pytest.raises(UserError, match=rf"^text[^\n]*{message}[^\n]*$"):
            view.main(ViewConfig(models=(str(tmp_path / "run"),), text=f"FILE:{tmp_path / name}"))
