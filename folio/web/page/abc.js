// Notes of tunes in ABC notation (https://abcnotation.com/wiki/abc:standard:v2.1), one voice.
//
// Generated text may be invalid: what is not a note, a rest, or a mark below is skipped.

const ABC_DEFAULT_TEMPO = 120; // quarter notes per minute, without a field Q
const ABC_LETTERS = {C: 0, D: 2, E: 4, F: 5, G: 7, A: 9, B: 11};
const ABC_ACCIDENTALS = {"^": 1, "^^": 2, _: -1, __: -2, "=": 0};
const ABC_MODES = {maj: 0, ion: 0, mix: -1, dor: -2, min: -3, m: -3, aeo: -3, phr: -4, loc: -5, lyd: 1}; // sharps added
const ABC_MODE = /^\s*(maj|min|ion|mix|dor|aeo|phr|loc|lyd|m(?![a-z]))/;
const ABC_TUPLETS = {2: 3, 3: 2, 4: 3, 6: 2, 8: 3}; // of others, 2, or 3 in compound meters
const ABC_FIELD = /^(?![A-Ga-g]:[|:])([A-Za-z+]):(.*)$/; // a line may also begin with a last note and a repeat, "A:|"
const ABC_TOKEN = new RegExp([
  /(?<skip>%.*|"[^"\n]*"|![^!\n]*!|\+[a-z.()<>0-9]+\+|\{[^}\n]*\})/,
  /\[(?<field>[A-Za-z]):(?<value>[^\]\n]*)\]/,
  /(?<bar>::|:\|+\]?:|:?\|[|\]]?:*|\[\||\|\])\s*(?<second>(?<=\|)[0-9][0-9,-]*)?/,
  /\[(?<ending>[0-9][0-9,-]*)/,
  /\((?<p>[2-9])(?::(?<q>[2-9]?)(?::(?<r>[0-9]*))?)?/,
  /\[(?<chord>(?:[\^_=]*[A-Ga-g][,']*[0-9/]*-?\s*)+)\](?<chordLength>[0-9]*[/]*[0-9]*)(?<chordTie>-?)/,
  /(?<accidental>\^\^?|__?|=)?(?<letter>[A-Ga-g])(?<octave>[,']*)(?<length>[0-9]*[/]*[0-9]*)(?<tie>-?)/,
  /(?<rest>[xz])(?<restLength>[0-9]*[/]*[0-9]*)/,
  /(?<bars>[XZ])(?<barCount>[0-9]*)/,
  /(?<broken><+|>+)/,
].map(({source}) => source).join("|"), "g");

// A length such as "", "3", "/", "//", "/4", "3/2".
function abcLength(text) {
  const [, number, slashes, divisor] = /^(\d*)([/]*)(\d*)$/.exec(text);
  return Number(number || 1) / (divisor ? Number(divisor) : 2 ** slashes.length);
}

function abcFraction(text) {
  const [, above, below = 1] = /(\d+)(?:\/(\d+))?/.exec(text) ?? [0, 1];
  return Number(above) / Number(below);
}

// The semitones that a key adds to each letter.
function abcKey(text) {
  const [, tonic = "C", rest = text] = /^\s*([A-G][#b]?)(.*)/.exec(text) ?? [];
  const mode = ABC_MODE.exec(rest.toLowerCase())?.[1] ?? "maj";
  const sharps = "FCGDAEB".indexOf(tonic[0]) - 1 + ({"#": 7, b: -7}[tonic[1]] ?? 0) + ABC_MODES[mode];
  const count = /^\s*h?p\b/i.test(text) ? 2 : /\bexp\b/.test(text) ? 0 : sharps; // HP: Highland bagpipes
  const key = {};
  for (let i = 0; i < Math.abs(count); i++) key[(count > 0 ? "FCGDAEB" : "BEADGCF")[i % 7]] = Math.sign(count);
  for (const [, accidental, letter] of rest.matchAll(/(?<=\s|^)(\^\^?|__?|=)([A-Ga-g])(?=\s|$)/g)) {
    key[letter.toUpperCase()] = ABC_ACCIDENTALS[accidental];
  }
  return key;
}

// Quarter notes per minute of a field Q, such as 1/4=120, 120 (of the default length), or "Allegro" 3/8=60.
function abcTempo(text, unit) {
  const [beats, rate] = text.replace(/"[^"]*"/g, "").split("=");
  if (!/\d/.test(rate ?? beats)) return ABC_DEFAULT_TEMPO;
  const beat = rate ? (beats.match(/\d+\/\d+/g) ?? ["1/4"]).reduce((sum, beat) => sum + abcFraction(beat), 0) : unit;
  return 4 * beat * abcFraction(rate ?? beats);
}

// Return the notes of tunes in the order in which they sound, with repeats, and the length, in quarter notes. A note is
// {start, end, pitch (of MIDI), from, to (its characters in the text)}. tempo: of the first tune, in quarter notes per
// minute. Another tempo later changes the length of its notes instead.
function tuneNotes(text) {
  const tempos = [], notes = [];
  let now = 0;
  for (const {index, 0: tune} of text.matchAll(/(?:^X:|^[MLK]:)[^]*?(?=^X:|(?![^]))/gm)) {
    const items = abcItems(tune, index, tempos);
    now = soundAt(now, expandRepeats(items), notes, tempos);
  }
  return {notes, length: now, tempo: tempos[0] ?? ABC_DEFAULT_TEMPO};
}

// Parse a tune. An item is a sound {pitches, length, tie, from, to, tempo}, or a mark {mark: "|:", ":|", "||", "|"} or
// {mark: "[", passes} of an ending. A length is in quarter notes. tempos: receives the tempos.
function abcItems(tune, offset, tempos) {
  const items = [];
  let unit = null, meter = 1, isCompound = false, key = null, tempo = null; // by fields
  let changed = {}, tied = {}, tuplet = {left: 0}, broken = 1, place = offset;

  function setField(name, value) {
    if (name === "M") {
      const isFraction = /\d+\/\d+/.test(value);
      meter = isFraction ? abcFraction(value) : 1;
      isCompound = /^\s*(6|9|12)\/\d/.test(value);
    }
    if (name === "L") unit = abcFraction(value);
    if (name === "Q") tempo = abcTempo(value, unitOf());
    if (name === "K") key = abcKey(value);
  }

  function unitOf() {
    return unit ?? (meter < 0.75 ? 1 / 16 : 1 / 8);
  }

  // The pitch of a note. An accidental holds for its letter, in all octaves, until the bar ends, and for tied notes.
  function pitchOf(accidental, letter, octave) {
    const name = letter.toUpperCase();
    const height = (letter === name ? 0 : 1) + octave.split("'").length - octave.split(",").length;
    if (accidental) changed[name] = ABC_ACCIDENTALS[accidental];
    const base = 60 + ABC_LETTERS[name] + 12 * height, sounding = tied[base];
    return {base, pitch: accidental || sounding === undefined ? base + (changed[name] ?? key[name] ?? 0) : sounding};
  }

  function add(notes, length, from, to) {
    const ratio = tuplet.left > 0 ? tuplet.ratio : 1, factor = broken;
    if (tuplet.left) tuplet.left--;
    broken = 1;
    tied = Object.fromEntries(notes.filter(({tie}) => tie).map(({base, pitch}) => [base, pitch]));
    items.push({pitches: notes, length: 4 * unitOf() * length * ratio * factor, from, to, tempo});
    tempo = null;
  }

  for (const line of tune.split("\n")) {
    const start = place, field = ABC_FIELD.exec(line);
    place += line.length + 1;
    if (field) setField(field[1], field[2].replace(/%.*/, ""));
    if (field || !key) continue;
    for (const match of line.matchAll(ABC_TOKEN)) {
      const {groups} = match, from = start + match.index, to = from + match[0].length;
      if (groups.field) {
        setField(groups.field, groups.value);
      } else if (groups.bar) {
        changed = {};
        if (groups.bar.startsWith(":")) items.push({mark: ":|"});
        else if (["||", "|]", "[|"].includes(groups.bar)) items.push({mark: "||"});
        if (groups.bar.endsWith(":")) items.push({mark: "|:"});
        if (groups.second) items.push({mark: "[", passes: passesOf(groups.second)});
      } else if (groups.ending) {
        items.push({mark: "[", passes: passesOf(groups.ending)});
      } else if (groups.p) {
        const p = Number(groups.p), q = Number(groups.q) || ABC_TUPLETS[p] || (isCompound ? 3 : 2);
        tuplet = {ratio: q / p, left: Number(groups.r) || p};
      } else if (groups.chord) {
        const notes = [...groups.chord.matchAll(/(\^\^?|__?|=)?([A-Ga-g])([,']*)([0-9/]*)(-?)/g)];
        add(notes.map(([, accidental, letter, octave, , tie]) =>
          ({...pitchOf(accidental, letter, octave), tie: Boolean(tie || groups.chordTie)})),
        abcLength(notes[0][4]) * abcLength(groups.chordLength), from, to);
      } else if (groups.letter) {
        const {accidental, letter, octave, length, tie} = groups;
        add([{...pitchOf(accidental, letter, octave), tie: Boolean(tie)}], abcLength(length), from, to);
      } else if (groups.rest) {
        add([], abcLength(groups.restLength), from, to);
      } else if (groups.bars) {
        items.push({pitches: [], length: 4 * meter * Number(groups.barCount || 1), from, to});
      } else if (groups.broken) {
        const last = items.findLast(({pitches}) => pitches), shorter = 0.5 ** groups.broken.length;
        if (!last) continue;
        const [before, after] = groups.broken[0] === ">" ? [2 - shorter, shorter] : [shorter, 2 - shorter];
        last.length *= before;
        broken = after;
      }
    }
  }
  const first = items.find(({tempo}) => tempo);
  tempos.push(first?.tempo ?? tempo ?? ABC_DEFAULT_TEMPO);
  return items;
}

// The passes of an ending, such as "1", "1,3" or "1-3".
function passesOf(text) {
  return text.split(",").flatMap(part => {
    const [first, last = first] = part.split("-").map(Number);
    return Array.from({length: Math.max(0, Math.min(last - first, 9) + 1)}, (_, i) => first + i);
  });
}

const MAX_SOUNDS = 20_000; // of a tune with repeats

// The sounds of items in the order of playing. A repeat begins at "|:", or else after the last repeat or double bar.
function expandRepeats(items) {
  const sounds = [];
  let start = 0, pass = 1, isOpen = false; // isOpen: a "|:" began the repeat
  for (let i = 0; i < items.length && sounds.length < MAX_SOUNDS; i++) {
    const {mark, passes} = items[i];
    if (!mark) {
      sounds.push(items[i]);
    } else if (mark === "|:") {
      [start, pass, isOpen] = [i + 1, 1, true];
    } else if (mark === "||" && !isOpen) {
      if (pass === 1) start = i + 1;
    } else if (mark === ":|") {
      if (pass < passesFrom(items, start)) {
        pass++;
        i = start - 1;
      } else {
        [start, pass, isOpen] = [i + 1, 1, false];
      }
    } else if (mark === "[" && !passes.includes(pass)) {
      const end = items.findIndex((item, k) => k > i && item.mark === "|:");
      const next = items.findIndex((item, k) => k > i && (end < 0 || k < end) && item.passes?.includes(pass));
      if (next > 0) i = next;
    }
  }
  return sounds;
}

// How often a part is played: twice, or as often as its endings say.
function passesFrom(items, start) {
  let count = 2;
  for (let i = start; i < items.length && items[i].mark !== "|:"; i++) {
    count = Math.max(count, ...items[i].passes ?? []);
    if (items[i].mark === ":|" && items[i + 1]?.mark !== "[") break;
  }
  return count;
}

// Append the notes of sounds that begin at a time, and return the time of their end. Tied notes become one.
function soundAt(start, sounds, notes, tempos) {
  let now = start, tied = new Map(), rate = tempos[0] / tempos.at(-1);
  for (const {pitches, length, from, to, tempo} of sounds) {
    if (tempo) rate = tempos[0] / tempo;
    const end = now + length * rate, ties = new Map();
    for (const {pitch, tie} of pitches) {
      const note = tied.get(pitch) ?? {start: now, pitch, from, to};
      if (!tied.has(pitch)) notes.push(note);
      note.end = end;
      if (tie) ties.set(pitch, note);
    }
    [now, tied] = [end, ties];
  }
  return now;
}
