// The piano roll: a piece of music as notes over time, what heads look at among them, and how it sounds.

const LOUDNESS = 0.15; // of the loudest note; a speaker has 1
const ATTACK = 0.01, RELEASE = 0.05; // time constants in seconds

let player = null; // of the piece that is heard: {audio, text}
let showTime; // moves the line in the view to a time, or hides it

defineView({
  id: "roll", title: "Piano roll", offered: () => described.models[0].tokenizer === "midi",
  about: "The piece as notes: time goes right, pitch up. Arcs show what a head looks at while it predicts what follows "
    + "the selected event, or the note-on of the note that you point at. A note's weight is the sum of the weights of "
    + "its events: note-on, velocity, and note-off. The weights of time shifts belong to no note.",
  async draw(box, context) {
    const {ids, token, names, layer, head, model} = context, text = String(ids);
    const first = await context.ask("notes", {layer, token}), {notes, unit, seconds, time} = first.facts;
    const roll = drawRoll(first.facts, point), {X, Y} = roll, scroll = scrolling(roll.drawing);
    const readout = div("readout");
    let pointed = token, looks; // by each head: {name, weights (of each note, and of no note), color}

    async function point(query = token) {
      pointed = query;
      const answer = await ask(question("notes", ids, {layer, token: query})).catch(() => null);
      if (answer && pointed === query) show(answer);
    }

    function show({facts: {time, note}, tensors: {weights}}) {
      const x = X(time), y = note < 0 ? roll.bottom : Y(notes[note].pitch);
      looks = arcHeads(context, h => rowOf(weights, h));
      roll.arcs.replaceChildren(...looks.flatMap((one, h) => notes.map(({name, start, pitch}, i) => {
        const left = X(start), top = Y(pitch), rise = 10 + 6 * h + 2.5 * Math.sqrt(Math.abs(x - left));
        return weightArc(left === x && top === y ? `M${x - 6} ${y} a6 9 0 1 1 12 0`
          : `M${left} ${top} Q${(left + x) / 2 - 12} ${(top + y) / 2 - rise} ${x} ${y}`, one.weights[i], one, name);
      })).filter(Boolean));
      const row = rowOf(weights, head), most = topIndices(row.subarray(0, notes.length), 5)
        .filter(i => row[i] > LEAST_WEIGHT).map(i => `${notes[i].name} at ${notes[i].start} ${percent(row[i])}`);
      readout.textContent = [`Head ${head}, ${names[pointed]} looks at`, ...most,
        `no note ${percent(row.at(-1))}`].join("   ");
    }

    const play = element("button", {click: () => player ? stopPlaying() : startPlaying(notes, text, seconds)}, "Stop");
    const write = () => writing ? writing = false : continueText(ids).then(draw);
    showTime = time => {
      play.textContent = time === undefined ? "Play" : "Stop";
      roll.line.setAttribute("transform", `translate(${time === undefined ? -9 : X(time)})`);
      if (time) scroll.scrollLeft = X(time) - scroll.clientWidth / 2;
    };
    if (player?.text !== text) stopPlaying();
    show(first);
    box.append(headPicker(context), controls(play, element("button", {
      click: write, disabled: !writing && ids.length >= model.limit,
    }, writing ? "Stop writing" : "Let the model continue"), checkbox("all_heads", "arcs of all heads")),
    picture("roll", `Layer ${layer}`, () => ({
      columns: ["token", "note", `start (${unit})`, `end (${unit})`, "velocity", ...looks.map(({name}) => name)],
      rows: [...notes.map(({on, name, start, end, velocity}) => [on, name, start, end, velocity]),
        ["", "no note", "", "", ""]].map((row, i) => [...row, ...looks.map(({weights}) => weights[i])]),
    }), div("", legend(looks), scroll, readout)));
    requestAnimationFrame(() => scroll.scrollLeft = X(time) - scroll.clientWidth + 60);
  },
});

// Notes as bars. Returns the drawing, the places in it of a time (X) and of the middle of a pitch (Y), its bottom, the
// group for arcs, and the line that moves.
function drawRoll({notes, unit, end, before, time, note: chosen}, point) {
  const pitches = notes.length ? notes.map(({pitch}) => pitch) : [60, 72];
  const low = Math.min(...pitches) - 2, high = Math.max(...pitches) + 2, all = upTo(high - low + 1).map(i => low + i);
  const left = 36, top = 26, row = clamp(Math.floor(320 / all.length), 5, 11), bottom = top + all.length * row;
  const long = Math.max(4, 4 * Math.ceil(end / 4)), scale = clamp((roomFor(1400) - left - 8) / long, 24, 96);
  const right = left + long * scale, X = time => left + time * scale, Y = pitch => top + (high - pitch + 0.5) * row;
  const ruler = (x1, x2, y1, y2, stroke = PALE) => svg("line", {x1, x2, y1, y2, stroke});
  const bar = (x1, x2, y, height, options) => svg("rect", {x: x1, y, width: Math.max(4, x2 - x1), height, ...options});
  const arcs = svg("g", {"pointer-events": "none"}), line = ruler(0, 0, top, bottom, ORANGE);
  const drawing = svg("svg", {width: right + 8, height: bottom + 36, role: "img"},
    all.filter(pitch => [1, 3, 6, 8, 10].includes(pitch % 12)).map(pitch =>
      bar(left, right, Y(pitch) - row / 2, row, {fill: "#eef1f5"})),
    upTo(long + 1).map(time => ruler(X(time), X(time), top, bottom)),
    ticksOf(0, long, Math.min(long, right / 50)).map(time => softText(X(time), bottom + 18, short(time), "middle")),
    softText(right, bottom + 33, `${unit} →`, "end"),
    all.filter(pitch => pitch % 12 === 0).map(pitch => [softText(left - 9, Y(pitch) + 4, `C${pitch / 12 - 1}`, "end"),
      ruler(left, right, Y(pitch) + row / 2, Y(pitch) + row / 2, "#9aa5b4")]),
    bar(X(before), X(time), bottom, 5, {fill: ORANGE}),
    notes.map(({start, end, pitch, velocity, on, off}, i) => {
      const color = i === chosen ? ORANGE : SOFT;
      return bar(X(start), X(end) - 1, Y(pitch) - row / 2, row - 1, {
        rx: 2, fill: color, "fill-opacity": 0.7 * velocity / 127, stroke: color, style: {cursor: "pointer"},
        "stroke-dasharray": off === null && "2 2",
        pointerenter: () => point(on), pointerleave: () => point(), click: () => selectToken(on),
      });
    }), arcs, line);
  return {drawing, X, Y, bottom, arcs, line};
}

// Play notes whose times are in units of so many seconds, until the view or the text changes.
function startPlaying(notes, text, seconds) {
  const audio = new AudioContext(), began = audio.currentTime + 0.1;
  const length = Math.max(0, ...notes.map(({end}) => end));
  for (const {start, end, pitch, velocity} of notes.filter(({start, end}) => end > start)) {
    const tone = new OscillatorNode(audio, {type: "triangle", frequency: 440 * 2 ** ((pitch - 69) / 12)});
    const volume = new GainNode(audio, {gain: 0}), {gain} = volume;
    tone.connect(volume).connect(audio.destination);
    gain.setTargetAtTime(LOUDNESS * velocity / 127, began + start * seconds, ATTACK);
    gain.setTargetAtTime(0, began + end * seconds, RELEASE);
    tone.start(began + start * seconds);
    tone.stop(began + end * seconds + 8 * RELEASE);
  }
  player = {audio, text};
  follow();

  function follow() {
    const time = (audio.currentTime - began) / seconds;
    if (player?.audio !== audio) return;
    if (state.view !== "roll" || time > length + 1) return stopPlaying();
    showTime(Math.max(0, time));
    requestAnimationFrame(follow);
  }
}

function stopPlaying() {
  player?.audio.close();
  player = null;
  showTime?.();
}
