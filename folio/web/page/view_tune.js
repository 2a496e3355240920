// The tune: the notes of a text in ABC notation over time, and playback.

const TUNE_VELOCITY = 100;

defineView({
  id: "tune", title: "Tune",
  available: () => !isMusic() && isTune(state.ids ? textOf(state.ids.split(",").map(Number)) : state.text),
  about: "The notes of the text, which is a tune in ABC notation: time to the right, pitch upward, with repeats. "
    + "Click a note to select its token.",
  draw(box, {ids, labels, token, names}) {
    const {notes: found, length, tempo, seconds} = tunePiece(labels.join(""));
    const ends = []; // of the characters of each token
    for (const label of labels) ends.push((ends.at(-1) ?? 0) + label.length);
    const tokenAt = place => ends.findIndex(end => end > place);
    const notes = found.map(note => ({
      ...note, on: tokenAt(note.from), off: tokenAt(note.to - 1), name: pitchLabel(note.pitch),
    }));
    const isAt = (t, {on, off}) => on <= t && t <= off, selected = notes.findIndex(note => isAt(token, note));
    const {start = 0, end = 0} = notes[selected] ?? {}, readout = readoutLine();
    const facts = {notes, unit: "quarter notes", end: length, before: start, time: end, note: selected};
    const roll = drawRoll(facts, (on = token) => describe(on)), scroll = scrolling(roll.drawing);
    describe(token);
    box.append(controls(playPiece(`tune ${ids}`, () => ({notes, seconds}), roll, scroll),
      `${short(tempo)} quarter notes per minute`),
    picture("tune", `${counted(notes.length, "note")}, ${Math.round(length * seconds)} s`, () => ({
      columns: ["token", "note", "start (quarter notes)", "end (quarter notes)"],
      rows: notes.map(({on, name, start, end}) => [on, name, start, end]),
    }), div("", scroll, readout)));
    requestAnimationFrame(() => scroll.scrollLeft = roll.X(start) - scroll.clientWidth / 2);

    function describe(on) {
      const places = notes.filter(note => isAt(on, note)).map(({name, start}) => `${name} at ${short(start)}`);
      readout.textContent = [names[on], ...places].join("   ");
    }
  },
});

// Whether a text has the field of a tune's key.
function isTune(text) {
  return /^K:/m.test(text) && tuneNotes(text).notes.length > 0;
}

// A tune as it is played.
function tunePiece(text) {
  const tune = tuneNotes(text), notes = tune.notes.map(note => ({...note, velocity: TUNE_VELOCITY}));
  return {...tune, notes, seconds: 60 / tune.tempo};
}

// The name of a MIDI pitch, as in the engine's pitchName().
function pitchLabel(pitch) {
  return `${"C C♯ D E♭ E F F♯ G A♭ A B♭ B".split(" ")[pitch % 12]}${Math.floor(pitch / 12) - 1}`;
}
