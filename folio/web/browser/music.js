// The notes that the events of a piece of music write, as in folio/data/sources/music.py.

const KEYS = ["C", "C♯", "D", "E♭", "E", "F", "F♯", "G", "A♭", "A", "B♭", "B"]; // of an octave
const DEFAULT_VELOCITY = 100; // of notes in a format without velocities

// The name of a MIDI pitch: C4 is the middle C, 60.
function pitchName(pitch) {
  return `${KEYS[pitch % 12]}${Math.floor(pitch / 12) - 1}`;
}

// The notes that events write, in the order of their note-ons, and the time after each event, in steps. format: the
// JSON of an EventFormat. A note is {start, end, pitch, velocity, places}: those of its note-on, velocity and note-off,
// or null.
//
// A model's events need not make sense: a note-off without its note-on has no effect, and neither has a note-on without
// a velocity, if the format has velocities. Of notes of the same pitch, the first one ends first. Notes that are still
// sounding at the end stop there.
function placeNotes(events, format) {
  const meanings = meaningsOf(format), parsed = events.map(event => meanings.get(event) ?? ["", 0]);
  const notes = [], sounding = new Map(), times = []; // sounding: notes by pitch
  let now = 0;
  parsed.forEach(([kind, value], place) => {
    const [following, velocity] = parsed[place + 1] ?? ["", 0];
    if (kind === "TimeShift") {
      now += value;
    } else if (kind === "NoteOn" && (following === "Velocity" || !format.velocities)) {
      const note = format.velocities ? {velocity, places: [place, place + 1, null]}
        : {velocity: DEFAULT_VELOCITY, places: [place, null, null]};
      notes.push({start: now, end: null, pitch: value, ...note});
      if (!sounding.has(value)) sounding.set(value, []);
      sounding.get(value).push(notes.at(-1));
    } else if (kind === "NoteOff" && sounding.get(value)?.length) {
      const note = sounding.get(value).shift();
      note.end = now;
      note.places[2] = place;
    }
    times.push(now);
  });
  for (const note of notes) note.end ??= now;
  return {notes, times};
}

// The kind of each event, and its pitch, velocity, or steps of time.
function meaningsOf({lowest, highest, steps, velocities, longest_shift}) {
  const meanings = new Map();
  for (let pitch = lowest; pitch <= highest; pitch++) {
    for (const kind of ["NoteOn", "NoteOff"]) meanings.set(`${kind}_${pitch}`, [kind, pitch]);
  }
  for (let velocity = 1; velocities && velocity < 128; velocity++) {
    meanings.set(`Velocity_${velocity}`, ["Velocity", velocity]);
  }
  for (let shift = 1; shift <= longest_shift * steps; shift++) {
    meanings.set(`TimeShift_${Math.floor(shift / steps)}.${shift % steps}.${steps}`, ["TimeShift", shift]);
  }
  return meanings;
}
