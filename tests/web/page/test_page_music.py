"""The piano roll in a browser, compared with NumPy and a simple event player."""

from dataclasses import dataclass

import numpy as np
import pytest

from folio import UserError
from folio.data.sources.music import EventFormat
from tests.support.audio import FAKE_AUDIO
from tests.support.decoding import random_model
from tests.support.music_models import PERFORMANCE, SCORE, random_text, tokenizer_of
from tests.support.numpy_gpt import NumpyGPT, assert_same
from tests.support.viewed_models import build_model
from tests.support.viewers import Served, Viewer, language_model
from tests.support.waiting import wait_until

SIZES = dict(block_size=64, n_layer=2, n_head=3, n_embd=24, position="relative")
KEYS = "C C♯ D E♭ E F F♯ G A♭ A B♭ B".split()


@dataclass
class Played:
    """A note, with times in beats or seconds."""

    pitch: int
    velocity: int
    start: float
    places: list[int]
    end: float | None = None

    @property
    def name(self) -> str:
        return f"{KEYS[self.pitch % 12]}{self.pitch // 12 - 1}"


def play(events: list[str], format: EventFormat) -> list[Played]:
    """Return the notes in the order of their note-ons."""
    now, notes = 0.0, []
    for place, event in enumerate(events):
        kind, _, value = event.partition("_")
        if kind == "TimeShift":
            units, part, steps = map(int, value.split("."))
            now += units + part / steps
        elif kind == "NoteOn" and not format.velocities:
            notes.append(Played(int(value), 100, now, [place]))
        elif kind == "NoteOn" and place + 1 < len(events) and events[place + 1].startswith("Velocity"):
            notes.append(Played(int(value), int(events[place + 1].split("_")[1]), now, [place, place + 1]))
        elif kind == "NoteOff":
            for note in notes:
                if note.pitch == int(value) and note.end is None:
                    note.end = now
                    note.places.append(place)
                    break
    for note in notes:
        note.end = now if note.end is None else note.end
    return notes


@pytest.fixture(params=[SCORE, PERFORMANCE], ids=["score", "performance"])
def music(request, serve, seed) -> tuple[Served, str]:
    """Serve a random model of music. Returns the server and its initial text."""
    tokenizer = tokenizer_of(request.param)
    text = random_text(tokenizer, seed, 40)
    model = random_model(seed, vocab_size=tokenizer.vocab_size, **SIZES)
    return serve(model, tokenizer=tokenizer, text=text), text


def check_roll(viewer: Viewer, text: str, layer: int, heads: list[int], token: int) -> list[Played]:
    """Check the notes of the text and the attention from a token."""
    viewed, table = viewer.viewed, viewer.table("roll")
    notes, unit = play(text.split(), viewed.music), viewed.music.time
    named = [f"head {head}" for head in heads]
    assert table["columns"] == ["token", "note", f"start ({unit})", f"end ({unit})", "velocity", *named]
    *rows, last = table["rows"]
    assert [row[:2] + row[4:5] for row in rows] == [[note.places[0], note.name, note.velocity] for note in notes]
    assert np.allclose([row[2:4] for row in rows], [[note.start, note.end] for note in notes])
    ids = viewed.tokenizer.encode(text).tolist()
    weights = NumpyGPT(viewed.model).run(ids).layer(layer).weights[heads, token]  # (H, T)
    note_weights = [weights[:, note.places].sum(1) for note in notes]
    assert_same([row[5:] for row in rows], note_weights)
    assert last[:5] == ["", "no note", "", "", ""]
    assert_same(last[5:], 1 - sum(note_weights, np.zeros(len(heads))))
    arcs = viewer("Array.from(document.querySelectorAll('#view figure path'), arc => arc.getAttribute('stroke-width'))")
    shown = np.array(note_weights).T.flatten()
    assert_same([(float(width) - 1) / 3 for width in arcs], shown[shown > 0.01])
    return notes


def test_the_roll_shows_notes_and_attention(new_viewer, music, seed):
    served, text = music
    viewer = new_viewer(served).open("roll", layer=1, head=2)
    last, notes = viewer.find("roll").locator("rect[rx]").last, check_roll(viewer, text, 1, [2], 39)
    token = notes[-1].places[0]
    last.hover()
    wait_until(lambda: f", {token} " in viewer.page.locator("#view .readout").text_content())
    check_roll(viewer, text, 1, [2], token)
    assert viewer.after(last.click).state("token") == [token]
    check_roll(viewer, text, 1, [2], token)
    viewer.after(viewer.page.get_by_label("arcs of all heads").check)
    check_roll(viewer, text, 1, [0, 1, 2], token)
    marked = viewer("Array.from(document.querySelectorAll('#view rect[rx]'), bar => bar.getAttribute('fill'))")
    assert marked.count(marked[-1]) == 1
    with served.perturbed(seed):
        viewer("answers.clear()")
        edited = random_text(viewer.viewed.tokenizer, seed + 1, 30)
        viewer.after(lambda: viewer.page.locator("#text").fill(edited))
        check_roll(viewer, edited, 1, [0, 1, 2], 29)


@pytest.mark.parametrize("music", [SCORE], ids=["score"], indirect=True)
def test_edge_cases(new_viewer, music):
    served, _ = music
    viewer = new_viewer(served).open("roll")
    for text in (
        "NoteOn_60",  # no time has passed
        "TimeShift_1.0.4",
        "NoteOff_60 NoteOff_61",
        "NoteOn_60 NoteOn_60 TimeShift_0.1.4 NoteOff_60 TimeShift_0.1.4 NoteOff_60 NoteOff_60",
        "NoteOn_60 TimeShift_0.2.4 NoteOn_66 NoteOff_60 TimeShift_1.0.4",  # the second one is still sounding
    ):
        viewer.show("roll", text=text)
        notes = check_roll(viewer, text, 0, [0], len(text.split()) - 1)
        dashed = viewer("document.querySelectorAll('#view [stroke-dasharray]').length")
        assert dashed == sum(len(note.places) == 1 for note in notes)
        assert viewer("Array.from(document.querySelectorAll('#view rect')).every(bar => bar.getBBox().width >= 4)")
    viewer.show("roll", text="")
    assert [row[1] for row in viewer.table("roll")["rows"]] == ["no note"]
    viewer.open("roll", text="ROMEO")
    assert viewer.page.locator("#text").input_value() == "ROMEO"
    assert viewer.page.get_by_text("'ROMEO' is not an event of this model").is_visible()
    assert all("400" in problem for problem in viewer.problems)
    viewer.problems.clear()
    viewer.after(lambda: viewer.page.locator("#text").fill("NoteOn_61"))
    check_roll(viewer, "NoteOn_61", 0, [0], 0)


def test_playback_uses_the_tempo_of_the_format(new_viewer, music):
    served, text = music
    format = served.provider.viewed[0].music
    played = play(text.split(), format)
    notes = [note for note in played if note.end > note.start]
    unit = 60 / format.tempo  # seconds
    viewer = new_viewer(served)
    viewer.page.add_init_script(FAKE_AUDIO)
    viewer.open("roll")
    play_button, stop_button = (viewer.page.get_by_role("button", name=name) for name in ("Play", "Stop"))
    play_button.click()
    wait_until(lambda: viewer("window.sounds.length"))
    beginning = viewer("window.sounds[0].start") - notes[0].start * unit
    viewer(f"clock.now = {beginning + notes[-1].start * unit - 1e-3}")  # notes are scheduled as time passes
    wait_until(lambda: viewer("window.sounds.length") == len(notes))
    sounds = viewer("window.sounds")
    assert 10 <= beginning <= 10.5
    for sound, note in zip(sounds, notes, strict=True):
        assert sound["frequency"] == pytest.approx(440 * 2 ** ((note.pitch - 69) / 12))
        silent, (loudness, start, attack), (target, end, release) = sound["steps"]
        assert silent == [0] and target == 0 and 0 < attack < 0.05 and 0 < release < 0.2
        assert [start, end] == pytest.approx([beginning + note.start * unit, beginning + note.end * unit])
        assert sound["start"] == start and end + 3 * release < sound["stop"] < end + 1
        assert loudness == pytest.approx(sounds[0]["steps"][1][0] * note.velocity / notes[0].velocity)
    place = "parseFloat(document.querySelector('#view line[transform]').getAttribute('transform').slice(10))"
    left = f"+document.querySelectorAll('#view rect[rx]')[{played.index(notes[0])}].getAttribute('x')"
    viewer(f"clock.now = {beginning + notes[0].start * unit}")
    wait_until(lambda: viewer(f"Math.abs({place} - {left}) < 1e-3"))
    viewer.press("]")  # another head
    assert stop_button.is_visible() and viewer("clock.closed") == 0
    stop_button.click()
    assert viewer("clock.closed") == 1 and play_button.is_visible()
    for stop in (f"clock.now += {1000 * unit}", "change({view: 'tokens'})", "change({text: 'TimeShift_0.1.4'})"):
        viewer.show("roll", text=text)
        closed = viewer("clock.closed")
        play_button.click()
        viewer(stop.replace("0.1.4", f"0.1.{format.steps}"))
        wait_until(lambda closed=closed: viewer("clock.closed") == closed + 1)
        viewer.wait()


@pytest.mark.parametrize("music", [PERFORMANCE], ids=["performance"], indirect=True)
def test_the_model_continues_the_piece(new_viewer, music):
    served, text = music
    viewed = served.provider.viewed[0]
    viewed.model.transformer.ln_f.bias.data[:] = 1
    viewed.model.transformer.wte.weight.data[viewed.tokenizer.eot] = -100  # the piece does not end
    settings = dict(temperature=1.5, seed=7, top_k=8)
    viewer = new_viewer(served).open("roll", layer=1, **settings)
    lengths = viewer.redrawn("state.ids.split(',').length")
    button = viewer.page.get_by_role("button", name="Continue the piece")
    viewer("""async () => {
      const click = name => Array.from(document.querySelectorAll("#view button"))
        .find(button => button.textContent === name).click();
      click("Continue the piece");
      while (state.ids.split(",").length < 42) await new Promise(resolve => setTimeout(resolve, 2));
      click("Stop generating");
    }""")
    button.wait_for()
    stopped = viewer.wait().state("ids")[0].split(",")
    assert 42 <= len(stopped) < 64 and viewer.state("token") == [-1]
    viewer.show("roll", layer=1, **settings)
    button.click()
    expected = language_model(viewer).generate(text, max_new_tokens=24, **settings)
    ids = viewed.tokenizer.encode(f"{text} {expected}").tolist()
    button.wait_for()
    assert viewer.wait().state("ids", "token") == [",".join(map(str, ids)), -1]
    assert set(range(41, len(ids))) <= set(lengths())
    check_roll(viewer, f"{text} {expected}", 1, [0], len(ids) - 1)
    assert button.is_disabled() and len(ids) == SIZES["block_size"]


def test_a_model_of_text_has_no_notes(serve):
    with pytest.raises(UserError, match="not a model of music"):
        serve(build_model("char", 1)).provider.answer({"kind": "notes", "ids": [1, 2]})
