// Alignment of an answer with the source in a prompt such as "en: March 3 | de:".

defineView({
  id: "alignment", title: "Source and answer",
  about: "Attention of a head to the source (left of the |) while it predicts each token of the answer: in a "
    + "translation, mostly to the corresponding words.",
  available: () => byId("text").value.includes(" | "),
  async draw(box, {ids, labels, token, layer, head, model, overview, ask}) {
    const source = labels.findIndex(label => label.trim() === "|");
    if (source < 1) return box.append("The text has no source.");
    // The answer begins after the colon, if any. Each of its tokens is predicted from the previous token.
    const start = labels.indexOf(":", source) + 1 || source + 1, row = token - start;
    const {facts, tensors} = await ask("alignment", {layer, head, token: start - 1, source}), {heads} = facts;
    const next = overview.tensors.best.data.at(-1);
    const names = [...labels, next === model.eot ? "end" : pieces[next]].map(visible);
    const cell = clamp(Math.floor((fitWidth(990) - 44) / source), 18, 38);
    box.append(controls(element("button", {class: "chosen", click: () =>
      continueText(ids.slice(0, start), {temperature: 0})}, "Generate the answer")),
      div("row",
        matrixPicture("alignment", `Layer ${layer}, head ${head}`, tensors.weights, ["answer", names.slice(start)],
          ["source", names.slice(0, source)], {
            labels: [names.slice(start), names.slice(0, source)], decimals: cell < 30 ? undefined : 2, cell, min: 0.1,
            selected: token < source ? [null, token] : row >= 0 && [row, null],
            click: (i, j) => selectToken(i === row ? j : start + i),
            note: "Click a row to select its token; click it again to select the column's token.",
          }),
        tablePicture("alignment-heads", "Heads by coverage", ["layer", "head", "coverage"], heads, {
          max: 9, selected: i => heads[i][0] === layer && heads[i][1] === head,
          click: i => change({layer: heads[i][0], head: heads[i][1]}),
          note: "The mean of the largest weight in each column.",
        })));
  },
});
