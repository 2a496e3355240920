// The view of an answer to a prompt such as "en: March 3 | de:": which source tokens it looks at while it is written.

defineView({
  id: "alignment", title: "Source and answer",
  about: "What a head looks at in the source (left of the |) while it predicts each token of the answer: in a "
    + "translation, at the counterpart.",
  offered: () => byId("text").value.includes(" | "),
  async draw(box, {ids, labels, token, layer, head, model, overview, ask}) {
    const source = labels.findIndex(label => label.trim() === "|");
    if (source < 1) return box.append("The text has no source.");
    // The answer begins after the colon, if there is one. Each token of it is predicted from the one before.
    const start = labels.indexOf(":", source) + 1 || source + 1, place = token - start;
    const {facts, tensors} = await ask("alignment", {layer, head, token: start - 1, source}), {heads} = facts;
    const next = overview.tensors.best.data.at(-1);
    const names = [...labels, next === model.eot ? "end" : pieces[next]].map(visible);
    const cell = clamp(Math.floor((roomFor(990) - 44) / source), 18, 38);
    box.append(controls(element("button", {class: "chosen", click: () =>
      continueText(ids.slice(0, start), {temperature: 0})}, "Write the answer")),
      div("row",
        matrixPicture("alignment", `Layer ${layer}, head ${head}`, tensors.weights, ["answer", names.slice(start)],
          ["source", names.slice(0, source)], {
            numbers: true, cell, least: cell < 30 ? 2 : 0.1,
            chosen: token < source ? [null, token] : place >= 0 && [place, null],
            click: (i, j) => selectToken(i === place ? j : start + i),
            note: "Click a row to select its token, and again for the column's.",
          }),
        tablePicture("alignment-heads", "Heads by coverage", ["layer", "head", "coverage"], heads, {
          most: 9, selected: i => heads[i][0] === layer && heads[i][1] === head,
          click: i => change({layer: heads[i][0], head: heads[i][1]}),
          note: "The largest weight of each column, averaged.",
        })));
  },
});
