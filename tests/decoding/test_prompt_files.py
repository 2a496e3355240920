"""Prompts from files and from standard input."""

import io
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from folio import UserError
from folio.data.tokenizer import ByteTokenizer
from folio.decoding.prompt_files import read_prompt, read_prompt_lines
from tests.support.music import SCORE, write

TEXT = "é\n日本 \\n x"


@pytest.fixture
def read_bytes(tmp_path, monkeypatch) -> Callable[[bytes], tuple[str, str]]:
    """A function that reads a prompt with this content from a file, and from standard input."""

    def read(content: bytes) -> tuple[str, str]:
        (tmp_path / "x.txt").write_bytes(content)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return tuple(read_prompt("start", value, ByteTokenizer()) for value in (f"FILE:{tmp_path / 'x.txt'}", "-"))

    return read


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_prompt_file_is_read_as_text(encoding, line_end, read_bytes):
    """For any encoding of an editor. \\n is a line break only on the command line."""
    assert read_bytes(TEXT.replace("\n", line_end).encode(encoding)) == (TEXT, TEXT)
    assert read_prompt("start", TEXT, ByteTokenizer()) == "é\n日本 \n x"


@pytest.mark.parametrize(
    "content, prompt",
    [
        (b"ROMEO:\n", "ROMEO:"),
        (b"ROMEO:\r\n", "ROMEO:"),
        (b"ROMEO:\n\n", "ROMEO:\n"),
        (b"a\r\n\r\n", "a\n"),
        (b"\n", ""),
        (b"a\nb ", "a\nb "),
    ],
)
def test_a_line_break_at_the_end_of_a_file_is_not_part_of_the_prompt(content, prompt, read_bytes, capsys):
    """Editors and echo add one, so that the model began another line without a word about it."""
    assert read_bytes(content) == (prompt, prompt)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 * content.endswith(b"\n")
    for line, value in zip(lines, ("FILE:", "-:"), strict=False):
        assert line.startswith(f"start={value}") and ": the line break" in line


def test_line_breaks_that_were_typed_or_are_in_json_are_part_of_the_prompt(tmp_path, capsys):
    for typed in ("ROMEO:\\n", "ROMEO:\n"):
        assert read_prompt("start", typed, ByteTokenizer()) == "ROMEO:\n"
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "ROMEO:\\n"}\r\n')
    assert read_prompt_lines(tmp_path / "x.jsonl") == ["ROMEO:\n"]
    assert capsys.readouterr().err == ""


def test_a_midi_file_becomes_events(tmp_path):
    """Two consecutive notes of one beat each."""
    path = write(tmp_path / "x.mid", [(0, 480, 60, 64), (480, 480, 62, 64)])
    events = read_prompt("start", f"FILE:{path}", SCORE.tokenizer())
    notes = [event for event in events.split() if event.startswith("Note")]
    assert notes == ["NoteOn_60", "NoteOff_60", "NoteOn_62", "NoteOff_62"] and events.count("TimeShift_1.0.4") == 2
    with pytest.raises(UserError, match=r"^start=FILE:.*x\.mid: it is a MIDI file, .* use a text file"):
        read_prompt("start", f"FILE:{path}", ByteTokenizer())


@pytest.mark.needs("miditok", "symusic")
def test_files_that_cannot_be_read_name_the_setting(tmp_path):
    (tmp_path / "latin.txt").write_bytes("abé".encode("latin-1"))
    (tmp_path / "damaged.mid").write_bytes(b"MThd")
    for name, tokenizer, message in (
        ("", ByteTokenizer(), "is not a file; name a file, or pipe"),
        ("gone.txt", ByteTokenizer(), r"gone\.txt cannot be read: No such file"),
        ("latin.txt", ByteTokenizer(), r"latin\.txt:1, byte 2 .* is not UTF-8"),
        ("damaged.mid", SCORE.tokenizer(), "this MIDI file cannot be used: "),
    ):
        with pytest.raises(UserError, match=rf"^start.*: .*{message}"):
            read_prompt("start", f"FILE:{tmp_path / name}", tokenizer)


def test_each_line_is_a_prompt(tmp_path):
    path = tmp_path / "x.jsonl"
    prompts = ["", TEXT, "a" * 10_000]
    path.write_text("\n\n".join(json.dumps({"prompt": prompt, "n": 1}) for prompt in prompts))
    assert read_prompt_lines(path) == prompts
    for content, message in (
        ("", r"^prompts=.*x\.jsonl: the file is empty"),
        ('{"prompt": "a"}\n{"prompt": 5}', r'x\.jsonl:2: it has no text "prompt"'),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_prompt_lines(path)
    with pytest.raises(UserError, match=r"it is not a file; name a \.jsonl file"):
        read_prompt_lines(tmp_path)
