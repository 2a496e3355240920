// Converts events of music to notes: see folio/data/sources/music.py.

const PITCH_NAMES = ["C", "C♯", "D", "E♭", "E", "F", "F♯", "G", "A♭", "A", "B♭", "B"];
const DEFAULT_VELOCITY = 100; // for formats without velocities

// The name of a MIDI pitch. 60 is C4, middle C.
function pitchName(pitch) {
  return `${PITCH_NAMES[pitch % 12]}${Math.floor(pitch / 12) - 1}`;
}

// Return the notes of events, ordered by note-on, and the time after each event, in steps. format: the JSON of an
// EventFormat. A note is {start, end, pitch, velocity, positions}: of its note-on, velocity and note-off, or null.
//
// Generated events may be inconsistent: a note-off without a note-on is ignored, and so is a note-on without a velocity
// if the format has velocities. Notes of the same pitch end in the order in which they began. Notes that are still
// sounding at the end of the piece end there.
function placeNotes(events, format) {
  const meanings = eventMeanings(format), parsed = events.map(event => meanings.get(event) ?? ["", 0]);
  const notes = [], sounding = new Map(), times = []; // sounding: notes by pitch
  let now = 0;
  parsed.forEach(([kind, value], i) => {
    const [nextKind, velocity] = parsed[i + 1] ?? ["", 0];
    if (kind === "TimeShift") {
      now += value;
    } else if (kind === "NoteOn" && (nextKind === "Velocity" || !format.velocities)) {
      const note = format.velocities ? {velocity, positions: [i, i + 1, null]}
        : {velocity: DEFAULT_VELOCITY, positions: [i, null, null]};
      notes.push({start: now, end: null, pitch: value, ...note});
      if (!sounding.has(value)) sounding.set(value, []);
      sounding.get(value).push(notes.at(-1));
    } else if (kind === "NoteOff" && sounding.get(value)?.length) {
      const note = sounding.get(value).shift();
      note.end = now;
      note.positions[2] = i;
    }
    times.push(now);
  });
  for (const note of notes) note.end ??= now;
  return {notes, times};
}

// Map each event to its kind and its pitch, velocity, or time steps.
function eventMeanings({lowest, highest, steps, velocities, longest_shift}) {
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
