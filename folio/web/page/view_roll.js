// The piano roll: the notes of a piece over time, attention to notes, and playback.

defineView({
  id: "roll", title: "Piano roll", available: isMusic,
  about: "The notes of the piece: time to the right, pitch upward. Arcs show the attention of a head from the selected "
    + "event, or from the note-on of the note under the pointer. A note's weight is the sum of the weights of its "
    + "events: note-on, velocity, and note-off. Time shifts belong to no note.",
  async draw(box, context) {
    const {ids, token, names, layer, head, model} = context;
    const first = await context.ask("notes", {layer, token}), {notes, unit, seconds, time} = first.facts;
    const roll = drawRoll(first.facts, point), {X, Y} = roll, scroll = scrolling(roll.drawing);
    const readout = readoutLine();
    let shownToken = token, arcs; // arcs: {name, weights (of each note, and of no note), color} by head

    async function point(query = token) {
      shownToken = query;
      const answer = await ask(question("notes", ids, {layer, token: query})).catch(() => null);
      if (answer && shownToken === query) show(answer);
    }

    function show({facts: {time, note}, tensors: {weights}}) {
      const x = X(time), y = note < 0 ? roll.bottom : Y(notes[note].pitch);
      arcs = arcHeads(context, h => rowOf(weights, h));
      roll.arcs.replaceChildren(...arcs.flatMap((arc, h) => notes.map(({name, start, pitch}, i) => {
        const left = X(start), top = Y(pitch), rise = 10 + 6 * h + 2.5 * Math.sqrt(Math.abs(x - left));
        return weightArc(left === x && top === y ? `M${x - 6} ${y} a6 9 0 1 1 12 0`
          : `M${left} ${top} Q${(left + x) / 2 - 12} ${(top + y) / 2 - rise} ${x} ${y}`, arc.weights[i], arc, name);
      })).filter(Boolean));
      const row = rowOf(weights, head), strongest = topIndices(row.subarray(0, notes.length), 5)
        .filter(i => row[i] > MIN_WEIGHT).map(i => `${notes[i].name} at ${notes[i].start} ${percent(row[i])}`);
      readout.textContent = [`Head ${head}, ${names[shownToken]} attends to`, ...strongest,
        `no note ${percent(row.at(-1))}`].join("   ");
    }

    const toggle = () => isContinuing ? isContinuing = false : continueText(ids).then(draw);
    const play = playPiece(String(ids), () => ({notes, seconds}), roll, scroll);
    show(first);
    box.append(headPicker(context), controls(play, element("button", {
      click: toggle, disabled: !isContinuing && ids.length >= model.limit,
    }, isContinuing ? "Stop generating" : "Continue the piece"), checkbox("all_heads", "arcs of all heads")),
    picture("roll", `Layer ${layer}`, () => ({
      columns: ["token", "note", `start (${unit})`, `end (${unit})`, "velocity", ...arcs.map(({name}) => name)],
      rows: [...notes.map(({on, name, start, end, velocity}) => [on, name, start, end, velocity]),
        ["", "no note", "", "", ""]].map((row, i) => [...row, ...arcs.map(({weights}) => weights[i])]),
    }), div("", legend(arcs), scroll, readout)));
    requestAnimationFrame(() => scroll.scrollLeft = X(time) - scroll.clientWidth + 60);
  },
});

// Draw notes as bars. Returns the drawing, the scales of time (X) and pitch (Y, the middle of a row), the bottom, the
// group for arcs, and the playback line.
function drawRoll({notes, unit, end, before, time, note: selected}, point) {
  const pitches = notes.length ? notes.map(({pitch}) => pitch) : [60, 72];
  const low = Math.min(...pitches) - 2, high = Math.max(...pitches) + 2, all = range(high - low + 1).map(i => low + i);
  const left = 36, top = 26, row = clamp(Math.floor(320 / all.length), 5, 11), bottom = top + all.length * row;
  const length = Math.max(4, 4 * Math.ceil(end / 4)), scale = clamp((fitWidth(1400) - left - 8) / length, 24, 96);
  const right = left + length * scale, X = time => left + time * scale, Y = pitch => top + (high - pitch + 0.5) * row;
  const ruler = (x1, x2, y1, y2, stroke = PALE) => svg("line", {x1, x2, y1, y2, stroke});
  const bar = (x1, x2, y, height, options) => svg("rect", {x: x1, y, width: Math.max(4, x2 - x1), height, ...options});
  const arcs = svg("g", {"pointer-events": "none"}), line = ruler(0, 0, top, bottom, ORANGE);
  const drawing = svg("svg", {width: right + 8, height: bottom + 36},
    all.filter(pitch => [1, 3, 6, 8, 10].includes(pitch % 12)).map(pitch =>
      bar(left, right, Y(pitch) - row / 2, row, {fill: TINT})),
    range(length + 1).map(time => ruler(X(time), X(time), top, bottom)),
    linearTicks(0, length, Math.min(length, right / 50)).map(t => softText(X(t), bottom + 18, short(t), "middle")),
    softText(right, bottom + 33, `${unit} →`, "end"),
    all.filter(pitch => pitch % 12 === 0).map(pitch => [softText(left - 9, Y(pitch) + 4, `C${pitch / 12 - 1}`, "end"),
      ruler(left, right, Y(pitch) + row / 2, Y(pitch) + row / 2, GRAY)]),
    bar(X(before), X(time), bottom, 5, {fill: ORANGE}),
    reachByKeys(notes.map(({start, end, pitch, velocity, on, off}, i) => {
      const color = i === selected ? ORANGE : SOFT;
      return bar(X(start), X(end) - 1, Y(pitch) - row / 2, row - 1, {
        rx: 2, fill: color, "fill-opacity": 0.7 * velocity / 127, stroke: color, style: {cursor: "pointer"},
        "stroke-dasharray": off === null && "2 2",
        pointerenter: () => point(on), pointerleave: () => point(), click: () => selectToken(on),
        "aria-label": `note ${pitch}`, role: "button",
      });
    }), selected), arcs, line);
  return {drawing, X, Y, bottom, arcs, line};
}

// The button that plays the piece of a view, with a line that moves over its roll. Another piece stops.
function playPiece(key, piece, {line, X}, scroll) {
  if (player?.key !== key) stopPlaying();
  return playButton(key, piece, time => {
    line.setAttribute("transform", `translate(${time === undefined ? -9 : X(time)})`);
    if (time) scroll.scrollLeft = X(time) - scroll.clientWidth / 2;
  });
}
