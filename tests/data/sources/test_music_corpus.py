"""Splitting and transposing pieces of music."""

from folio.data.sources.music import events_of_file
from folio.data.sources.music_corpus import relative_pitches, split_pieces, transpositions
from tests.support.music import SCORE, write_pieces


def test_a_piece_and_its_transposition_are_in_the_same_split(tmp_path):
    write_pieces(tmp_path / "pieces", 6)
    pieces = [events_of_file(path, SCORE) for path in sorted((tmp_path / "pieces").glob("*.mid"))]
    same = {pieces[0], pieces[6]}  # 0.mid and again.mid
    for fraction in (0.01, 0.2, 0.4, 0.6, 0.8, 0.99):
        val, train = split_pieces(pieces, fraction, relative_pitches)
        assert val and train and sorted(val + train) == sorted(pieces)
        assert same <= set(val) or same <= set(train)


def test_transpositions_out_of_range_are_skipped():
    assert transpositions("NoteOn_88 NoteOff_88", range(-1, 5), SCORE) == [
        f"NoteOn_{p} NoteOff_{p}" for p in (88, 87, 89, 90)
    ]
