"""Tunes in ABC notation in a browser: their notes, compared with music21 and with hand-written ones, and playback."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from folio.data.tokenizer import CharTokenizer
from tests.support.audio import FAKE_AUDIO
from tests.support.decoding import random_model
from tests.support.engine import Engine, engine_in
from tests.support.viewed_models import STRANGE
from tests.support.viewers import Viewer
from tests.support.waiting import wait_until

HEAD = "X:1\nM:4/4\nL:1/8\nK:C\n"
JIG = "X:1\nM:6/8\nL:1/8\nK:D\n|:DFA d2f|(3efg f e/2d/2 c>B|A3-A2 z:|\n|:[DFA]2 ^g =g_b B,|1 A3 a'3:|2 d6|]\n"
ALPHABET = CharTokenizer.of(JIG + "".join(map(chr, range(32, 127))) + STRANGE)

# Pitches with their lengths in eighths, the length of L. A tuple is a chord; None is a rest.
CASES = {
    "notes and octaves": ("C,, C, C c c' c''", [(36, 1), (48, 1), (60, 1), (72, 1), (84, 1), (96, 1)]),
    "lengths": ("C2 C/ C// C/4 C3/2 C3/", [(60, 2), (60, 0.5), (60, 0.25), (60, 0.25), (60, 1.5), (60, 1.5)]),
    "an accidental holds in its bar, in all octaves": ("^F f F|F", [(66, 1), (78, 1), (66, 1), (65, 1)]),
    "a natural cancels": ("_B =B B|B", [(70, 1), (71, 1), (71, 1), (71, 1)]),
    "double accidentals": ("^^F __B", [(67, 1), (69, 1)]),
    "rests": ("C z2 C x C", [(60, 1), (None, 2), (60, 1), (None, 1), (60, 1)]),
    "a rest of two bars": ("C Z2 C", [(60, 1), (None, 16), (60, 1)]),
    "ties join notes of one pitch": ("C2-C C-|C D-E", [(60, 3), (60, 2), (62, 1), (64, 1)]),
    "a tie keeps the accidental in the next bar": ("^C-|C C", [(61, 2), (60, 1)]),
    "chords": ("[CEG]2 [C2E2] C", [((60, 64, 67), 2), ((60, 64), 2), (60, 1)]),
    "an accidental holds in a chord": ("^C [CE]", [(61, 1), ((61, 64), 1)]),
    "a tied chord": ("[CE]-[CG]", "tied"),
    "broken rhythms": ("C>D C<D C>>D", [(60, 1.5), (62, 0.5), (60, 0.5), (62, 1.5), (60, 1.75), (62, 0.25)]),
    "a triplet": ("(3CDE F", [(60, 2 / 3), (62, 2 / 3), (64, 2 / 3), (65, 1)]),
    "two in the time of three": ("(2CD E", [(60, 1.5), (62, 1.5), (64, 1)]),
    "a tuplet by numbers": ("(3:2:2 C2D E", [(60, 4 / 3), (62, 2 / 3), (64, 1)]),
    "a repeat": ("|:CD:|E", [(60, 1), (62, 1), (60, 1), (62, 1), (64, 1)]),
    "a repeat of the beginning": ("CD:|E", [(60, 1), (62, 1), (60, 1), (62, 1), (64, 1)]),
    "a repeat that begins at a double bar": ("C||D:|E", [(60, 1), (62, 1), (62, 1), (64, 1)]),
    "two repeats": ("|:C::D:|", [(60, 1), (60, 1), (62, 1), (62, 1)]),
    "endings": ("|:C|1 D:|2 E|]F", [(60, 1), (62, 1), (60, 1), (64, 1), (65, 1)]),
    "endings in brackets": ("|:C[1D:|[2E||F", [(60, 1), (62, 1), (60, 1), (64, 1), (65, 1)]),
    "three passes": ("|:C|1,2 D:|3 E|", [(60, 1), (62, 1), (60, 1), (62, 1), (60, 1), (64, 1)]),
    "a change of the key, the length and the meter": ("F[K:G]F\nL:1/4\nF[M:3/4]Z F", [
        (65, 1), (66, 1), (66, 2), (None, 6), (66, 2)]),
    "what is no note": ('"Am"C !trill!D {ga}E (CD) .C ~D "^sharp"E % comment F', [
        (60, 1), (62, 1), (64, 1), (60, 1), (62, 1), (60, 1), (62, 1), (64, 1)]),
    "a note before a repeat, not a field": ("|:C\nA:|", [(60, 1), (69, 1), (60, 1), (69, 1)]),
    "lyrics and parts": ("P:A\nC\nw:do re\nD", [(60, 1), (62, 1)]),
}  # fmt: skip
KEYS = {
    "C": "", "G": "^F", "Dmaj": "^F^C", "F": "_B", "Bb": "_B_E", "F#": "^F^C^G^D^A^E", "Am": "", "Emin": "^F",
    "D minor": "_B", "Ddor": "", "G Mix": "", "Alyd": "^F^C^G^D", "Ephr": "", "Bloc": "", "C#m": "^F^C^G^D",
    "HP": "^F^C", "none": "", "D exp _b ^f": "_B^F", "Dphr ^f": "_B_E^F",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(browser: Any) -> Any:
    with engine_in(browser, "../page/abc.js") as engine:
        yield engine


def sounds(engine: Engine, tune: str) -> list[tuple]:
    """The notes as (start, end, pitch), in quarter notes, sorted."""
    notes = engine("tuneNotes(tune).notes", tune=tune)
    return sorted((round(note["start"], 6), round(note["end"], 6), note["pitch"]) for note in notes)


@pytest.mark.browser
@pytest.mark.parametrize("name", CASES)
def test_notes_of_the_notation(name, engine):
    music, expected = CASES[name]
    now, notes = 0.0, []
    if expected == "tied":
        notes = [(0.0, 1.0, 60), (0.0, 0.5, 64), (0.5, 1.0, 67)]
    else:
        for pitches, length in expected:
            end = now + length / 2
            notes += [(round(now, 6), round(end, 6), p) for p in np.atleast_1d(pitches).tolist() if p is not None]
            now = end
    assert sounds(engine, HEAD + music) == sorted(notes)


@pytest.mark.browser
def test_keys(engine):
    signs = {"^": 1, "_": -1}
    natural = dict(zip("CDEFGAB", (60, 62, 64, 65, 67, 69, 71), strict=True))
    for key, changes in KEYS.items():
        changed = {letter: signs[sign] for sign, letter in re.findall(r"(.)(.)", changes)}
        pitches = [pitch for _, _, pitch in sounds(engine, f"X:1\nL:1/8\nK:{key}\nCDEFGAB\n")]
        expected = [pitch + changed.get(letter, 0) for letter, pitch in natural.items()]
        assert sorted(pitches) == sorted(expected), key


@pytest.mark.browser
def test_the_tempo_and_the_places_of_notes(engine):
    for field, tempo in (("", 120), ("Q:1/4=90", 90), ("Q:3/8=60", 90), ("Q:100", 50), ('Q:"Allegro" 1/8=200', 100)):
        tune = f"X:1\nM:4/4\nL:1/8\n{field}\nK:C\nC"
        assert engine("tuneNotes(tune).tempo", tune=tune) == tempo
    faster = engine("tuneNotes(tune)", tune="X:1\nL:1/4\nQ:1/4=60\nK:C\nC[Q:1/4=120]C")
    assert [(note["start"], note["end"]) for note in faster["notes"]] == [(0, 1), (1, 1.5)]
    notes = engine("tuneNotes(tune).notes", tune=JIG)
    assert {JIG[note["from"] : note["to"]] for note in notes} >= {"D", "d2", "e/2", "[DFA]2", "^g", "a'3", "d6"}
    two = engine("tuneNotes(tune).notes", tune=HEAD + "C^F\n" + HEAD.replace("X:1", "X:2") + "F")
    assert [note["pitch"] for note in two] == [60, 66, 65]


@pytest.mark.browser
def test_random_text_has_finite_notes(engine, seed):
    """Generated text may be anything."""
    random = np.random.default_rng(seed)
    for _ in range(300):
        text = "".join(random.choice([*"ABCdefgz|:[]()1234/<>-^_=',\n \"!{}KLMQX"], random.integers(1, 80)))
        for start, end, pitch in sounds(engine, HEAD + text):
            assert np.isfinite([start, end, pitch]).all() and start <= end, text


def from_music21(tune: str) -> list[tuple]:
    """The notes of a tune by music21's ABC reader, as those of `sounds`."""
    music21 = pytest.importorskip("music21")
    score = music21.converter.parse(f"%abc-2.1\n{tune}", format="abc")  # accidentals hold until the bar ends
    part = score.parts[0].expandRepeats() if score.parts else score
    notes = []
    for note in part.stripTies().flatten().notes:
        for pitch in note.pitches:
            start = float(Fraction(note.offset))
            notes.append((round(start, 6), round(start + float(note.quarterLength), 6), pitch.midi))
    return sorted(notes)


def random_tune(random: np.random.Generator) -> str:
    """A tune in full bars of 4/4, with repeats, endings, accidentals, octaves, rests, chords, triplets, and ties."""

    def note() -> str:
        accidental = random.choice(["", "", "", "", "^", "_", "="])
        return accidental + random.choice([*"CDEFGABcdefgab", "C,", "G,", "c'"])

    def bar() -> str:
        parts = []
        for i in range(4):  # of a quarter note each
            kinds = [f"{note()}2", f"{note()}{note()}", f"(3{note()}{note()}{note()}", f"{note()}>{note()}", "z2"]
            kinds += [f"{note()}/{note()}/{note()}", f"{note()}<{note()}"]
            if i == 0:  # music21 does not apply the accidentals of a bar to its chords
                kinds.append(f"[{random.choice([*'CDE'])}{random.choice([*'GAB'])}]2")
            parts.append(random.choice(kinds))
        return " ".join(parts)

    key = random.choice(["C", "G", "D", "A", "F", "Bb", "Am", "Em", "Ddor", "Amix"])
    first, second, third, fourth = (f"{bar()}|{bar()}" for _ in range(4))
    bodies = [f"|:{first}:|\n|:{second}:|", f"{first}|\n{second}|]", f"|:{first}|1 {bar()}:|2 {bar()}|]"]
    bodies += [f"|:{third}|{fourth}:|\n{bar()}|]"]
    return f"X:1\nM:4/4\nL:1/8\nK:{key}\n{random.choice(bodies)}\n"


@pytest.mark.browser
def test_tunes_are_those_of_music21(engine, seed):
    random = np.random.default_rng(seed)
    for _ in range(25):
        tune = random_tune(random)
        print(tune)
        assert sounds(engine, tune) == from_music21(tune)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tune_viewer(serve, new_viewer, seed) -> Viewer:
    sizes = dict(block_size=256, n_layer=1, n_head=2, n_embd=16)
    model = random_model(seed, vocab_size=ALPHABET.vocab_size, **sizes)
    viewer = new_viewer(serve(model, tokenizer=ALPHABET, text=JIG))
    viewer.page.add_init_script(FAKE_AUDIO)
    return viewer


def check_sounds(viewer: Viewer, notes: list[dict], seconds: float) -> None:
    """Compare what is scheduled, while a simulated clock runs, with notes."""
    for _ in range(200):
        viewer("clock.now += 1")
        viewer.page.clock.run_for(500)
        if viewer("player === null"):
            break
    sounds = viewer("window.sounds")
    begin = min(sound["start"] for sound in sounds) - notes[0]["start"] * seconds
    scheduled = sorted((s["start"] - begin, s["steps"][2][1] - begin, s["frequency"]) for s in sounds)
    expected = [[n["start"] * seconds, n["end"] * seconds, 440 * 2 ** ((n["pitch"] - 69) / 12)] for n in notes]
    assert np.array(scheduled) == pytest.approx(np.array(sorted(expected)), abs=1e-6)


def test_a_tune_is_shown_and_played(tune_viewer):
    viewer = tune_viewer
    viewer.page.clock.install()
    viewer.open("tune")
    notes = viewer("text => tuneNotes(text).notes", JIG)
    assert viewer.column("tune", "token") == [note["from"] for note in notes]
    assert viewer.column("tune", "start (quarter notes)") == [note["start"] for note in notes]
    assert viewer("sounds.length") == 0  # it plays after a click only
    play = viewer.find("play")
    play.focus()
    viewer.page.keyboard.press("Enter")
    assert play.inner_text() == "Stop" and 0 < viewer("sounds.length") < len(notes)
    check_sounds(viewer, notes, 0.5)
    assert play.inner_text() == "Play"
    viewer.after(viewer.find("tune").locator("rect[rx]").nth(3).click)
    assert viewer.state("token") == [notes[3]["from"]]


def test_playing_stops_with_the_view_and_the_text(tune_viewer):
    viewer = tune_viewer.open("tune")
    for stop in ("document.querySelector('[data-testid=play]').click()", "change({view: 'tokens'})",
                 "change({text: state.text + 'C'})"):  # fmt: skip
        viewer.show("tune", text=JIG)
        closed = viewer("clock.closed")
        viewer.find("play").click()
        viewer(f"void {stop}")
        wait_until(lambda closed=closed: viewer("clock.closed") == closed + 1)
        viewer.wait()


def test_a_text_without_a_tune_has_no_view_of_it(tune_viewer):
    viewer = tune_viewer.open("tokens", text="To be, or not to be")
    assert "tune" not in viewer.views()
    viewer.show("tokens", text=JIG)
    assert "tune" in viewer.views()


def test_a_sample_of_a_tune_is_played(tune_viewer):
    """With its prompt: the header has the key."""
    viewer = tune_viewer.open("playground", text=HEAD + "CDEF|", samples=1, max_new_tokens=40)
    viewer.find("generate").click()
    wait_until(lambda: viewer("playground.samples.length > 0 && playground.running.size === 0"))
    text = HEAD + "CDEF|" + viewer.find("sample-text").text_content()
    notes = viewer("text => tuneNotes(text).notes", text)
    viewer.page.clock.install()
    viewer.find("play").click()
    viewer.page.clock.run_for(50)
    assert viewer.find("play").inner_text() == "Stop"
    check_sounds(viewer, notes, 0.5)
    viewer.show("playground", text="To be", samples=1, max_new_tokens=5)
    viewer.find("generate").click()
    wait_until(lambda: viewer("playground.samples[0].before === 'To be' && playground.running.size === 0"))
    assert viewer.find("play").is_hidden()
