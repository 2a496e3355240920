"use strict";
// Views of the input: tokens, and what they are before the first layer.

// What each token of the text is, and how well the model predicted it.
defineView({
  id: "tokens", title: "Tokens",
  about: "The model reads ids, not text. The tokenizer maps pieces of text to ids. Each token but the first was predicted "
    + "from the ones before it: its loss is −ln p, its rank how many tokens were more likely.",
  draw(box, {ids, labels, token, overview}) {
    const {loss, rank, entropy, best, best_probability: probability} = overview.tensors;
    const rows = ids.map((id, t) => [
      t, visible(labels[t]), id, described.bytes[id] ?? hexadecimal(labels[t]),
      t ? loss.data[t - 1] : NaN, t ? rank.data[t - 1] : NaN,
      t ? visible(pieces[best.data[t - 1]]) : "", t ? probability.data[t - 1] : NaN, entropy.data[t],
    ]);
    const columns = [
      {title: "position"}, {title: "token", text: true}, {title: "id"}, {title: "bytes", text: true},
      {title: "loss (nats)"}, {title: "rank"}, {title: "predicted instead", text: true}, {title: "its probability"},
      {title: "entropy of the next (nats)"},
    ];
    const table = numberTable(columns, rows.map(row => row.map(x => Number.isNaN(x) ? "" : x)),
      {selected: t => t === token, click: t => change({token: t})});
    const exported = () => ({
      columns: columns.map(column => column.title),
      rows: rows.map((row, t) => [row[0], labels[t], ...row.slice(2, 6), t ? pieces[best.data[t - 1]] : "", ...row.slice(7)]),
    });
    box.append(picture("tokens", `${ids.length} tokens`, exported, table,
      overview.facts.mean_loss === null ? "" : `Mean loss: ${short(overview.facts.mean_loss)} nats per token, `
        + `perplexity ${short(Math.exp(overview.facts.mean_loss))}.`));
  },
});

function hexadecimal(text) {
  return Array.from(encoder.encode(text), byte => byte.toString(16).padStart(2, "0")).join(" ");
}
