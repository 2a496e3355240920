"""Lines, curves and tables on terminals, and the exact lines elsewhere."""

import math
import re

import pytest

from folio.base.progress import note
from folio.base.terminal import display_width, one_line, say, sparkline, table, wrap
from tests.support.terminals import terminal

PROSE = "settings without effect: min_lr=6e-05, wsd_decay_iters=100 (lr_schedule=constant); activations take 1.2 GiB"
COMMAND = "python train.py --init_from=resume --out_dir='my, folder; 2' --max_iters=2000"


@pytest.mark.parametrize("width", [80, 40, 20])
def test_lines_break_between_words(width):
    """Lines were cut in the middle of words, such as "wsd_deca|y_iters"."""
    lines = wrap(PROSE, width).split("\n")
    assert len(lines) > 1 and " ".join(line.strip() for line in lines) == PROSE
    assert all(len(line) <= max(width, 2 + len("(lr_schedule=constant);")) for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("text", ["", "a  b ", "a\n\n b", "x" * 50, "\ttab\r"])
def test_lines_that_fit_and_single_words_are_unchanged(text):
    assert wrap(text, 40) == text


@pytest.mark.parametrize("prefix", ["continue: ", f"{PROSE}: ", "(see "])
@pytest.mark.parametrize("suffix", ["", "; or leave it", ", which takes long", ") and more words"])
def test_a_command_to_copy_has_no_line_breaks(prefix, suffix):
    assert COMMAND + suffix[:1] in wrap(prefix + COMMAND + suffix, 40)
    assert "--init_from=resume --out_dir=out" in wrap(f"{PROSE}; --init_from=resume --out_dir=out", 100)


@pytest.mark.parametrize("text", ["torchrun has restarted the run with python 3.13", "python and torchrun, of course"])
def test_names_of_programs_in_prose_are_ordinary_words(text):
    assert max(map(len, wrap(text, 20).split("\n"))) <= 20


def test_wide_characters_take_two_cells():
    assert display_width("日本a") == 5 and display_width("e\u0301") == 1
    assert wrap("日本 日本 日本", 10, indent=0) == "日本 日本\n日本"
    assert one_line("日本日本", 6) == "日本…" and one_line(" a\n\nb ", 6) == "a b"


@pytest.mark.parametrize(
    "values, width, curve",
    [
        ([], 8, ""),
        ([3.0], 8, "▁"),
        ([2.0, 2.0], 8, "▁▁"),
        ([math.nan], 8, "·"),
        ([3.0, math.nan, math.inf, 2.0, 1.0], 8, "█··▅▁"),
        (range(8), 8, "▁▂▃▄▅▆▇█"),
        (range(1000), 3, "▁▅█"),
        (range(1000), 1, "▁"),
        ([1.0], 0, ""),
    ],
)
def test_sparkline(values, width, curve):
    """NaN, one value and equal values have no scale."""
    assert sparkline(values, width) == curve


HEAD = ["model", "measure", "samples"]
ROWS = [["out-a", "loss, nats per token", "6 blocks of 1,024 bytes"], ["b", "", "1"]]


def test_a_table_fits_the_terminal():
    assert table(HEAD, ROWS, None).startswith("| model | measure              | samples")
    assert table(HEAD, ROWS, 80).split("\n")[2] == "out-a  loss, nats per token  6 blocks of 1,024 bytes"
    lines = table(HEAD, ROWS, 30).split("\n")
    assert max(map(len, lines)) <= 30 and lines[0].split() == HEAD
    assert lines[2:4] == ["out-a  loss, nats   6 blocks", "       per token    of 1,024"]


def test_a_long_path_does_not_make_a_table_wider():
    path = "/a/long/path/" * 5
    lines = table(HEAD, [[path, *ROWS[0][1:]]], 60).split("\n")
    assert max(map(len, lines)) <= 60 and lines[0].split() == HEAD
    assert "".join(line.partition(" ")[0] for line in lines[2:]) == path


def test_an_empty_column_is_a_column():
    """It was an error."""
    assert table(["a", ""], [["x", ""]], 80) == "a\n─  ─\nx"


def test_a_table_that_cannot_fit_has_a_line_per_cell():
    assert table(HEAD, ROWS, 20).split("\n\n")[1] == "model: b\nmeasure: \nsamples: 1"


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}])
def test_output_and_errors_wrap_on_a_terminal(columns, env):
    with terminal(columns, **env) as lines:
        say(PROSE)
        note(f"error: {PROSE}")
    assert lines == [*wrap(PROSE, columns).split("\n"), *wrap(f"error: {PROSE}", columns).split("\n"), ""]
    assert not re.search(r"\x1b", "".join(lines))


def test_a_dumb_terminal_and_a_pipe_have_the_exact_lines(capsys):
    with terminal(40, TERM="dumb") as lines:
        say(PROSE)
    say(PROSE, PROSE)
    assert lines == [PROSE, ""] and capsys.readouterr().out == f"{PROSE}\n{PROSE}\n"


def test_a_terminal_without_a_size_has_80_columns():
    with terminal(0) as lines:
        say(PROSE)
    assert lines[:-1] == wrap(PROSE, 80).split("\n")
