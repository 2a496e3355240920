"use strict";
// Which spans of the text occur in the training data.

const SPAN_SHADES = 4; // doublings of chance from white to the darkest color

defineView({
  id: "memorized", title: "Memorized from the training data",
  about: "The darker a token, the longer the span around it that occurs in the training data exactly. Common phrases occur "
    + "in any text. A span much longer than those of text that the model was not trained on is probably memorized.",
  async draw(box, context) {
    const {facts, tensors} = await context.ask("memorized"), {ids, labels} = context;
    if (facts.reason) {
      return box.append(element("p", {"data-testid": "memorized-reason"}, `Nothing can be said about this model: ${facts.reason}.`));
    }
    const {chance} = facts, {longest: {data: longest}, covering: {data: covering}} = tensors, least = Math.max(chance, 1);
    const size = ({start, end}) => end - start, spans = [...facts.spans].sort((a, b) => size(b) - size(a) || a.start - b.start);
    const chosen = chosenSpan(spans), isChosen = t => chosen && chosen.start <= t && t < chosen.end;
    const style = length => onColor(colorOf("sequential", length > chance ? 0.12 + 0.88 * Math.log2(length / least) / SPAN_SHADES : 0));
    const shades = Array.from({length: SPAN_SHADES}, (_, i) => least * 2 ** (i + 1));
    const key = [[0, `≤ ${chance}, chance`], [chance + 1, chance + 1], ...shades.map((length, i) => [length, i + 1 < SPAN_SHADES ? length : `≥ ${length}`])];
    const columns = ["position", "token", "id", "longest span that covers it", "longest span from here"];
    box.append(
      element("ul", {"data-testid": "memorized-facts"}, comparison(facts, spans[0] && size(spans[0]), ids.length).map(line => element("li", {}, line))),
      picture("memorized-text", "The text, shaded by what occurs in the training data",
        () => ({columns, rows: ids.map((id, t) => [t, labels[t], id, covering[t], longest[t]])}),
        element("div", {}, element("div", {class: "color-key"}, key.map(([length, text]) => element("span", {style: style(length)}, text))),
          element("div", {class: "token-strip"}, tokenSpans(labels, t => ({
            class: state.token === t ? "token selected" : "token", "data-testid": `memorized-${t}`, click: () => change({token: t, span: -1}),
            title: `${t}: ${visible(labels[t])} is in a span of ${inTokens(covering[t])}; from here, ${longest[t]} occur`,
            style: {...style(covering[t]), borderBottom: `2px solid ${isChosen(t) ? "var(--accent)" : "transparent"}`},
          })))),
        "Tokens in the span, light to dark. Click a token to see where its span occurs. Underlined: the span shown below."));
    if (chosen) box.append(placePicture(chosen, inTokens(size(chosen))));
    if (!spans.length) return;
    const table = {columns: ["tokens", "count", "position", "span"], rows: spans.map(span => [size(span), span.count, span.start, span.text])};
    box.append(picture("memorized-spans", `${grouped(spans.length)} spans longer than chance`, () => table,
      tokenTable({...table, rows: table.rows.map(row => row.with(3, [...row[3]].slice(0, 90).join("")))}, {
        selected: i => spans[i] === chosen, click: i => change({span: spans[i].start, token: spans[i].start}),
      }), "Spans that are not a part of a longer one. They may overlap. Count: how often it occurs in the training data."));
  },
}, {span: -1});

function inTokens(n) {
  return `${grouped(n)} token${n === 1 ? "" : "s"}`;
}

// The span that was clicked, otherwise the longest one that covers the selected token, or of all without such a token.
function chosenSpan(spans) {
  const covering = spans.filter(({start, end}) => state.token < 0 || (start <= state.token && state.token < end));
  return covering.find(({start}) => start === state.span) ?? covering[0];
}

// The longest span, what it compares to, and what was searched.
function comparison({chance, searched, complete, datasets, held_out: [median, long], init_from: base}, longest, length) {
  const others = base && !["scratch", "resume"].includes(base) ? ` What ${base} was trained on before was not searched.` : "";
  return [
    longest ? `The longest span here has ${inTokens(longest)}.` : "No span here is longer than chance.",
    `Text that the model was not trained on (the validation data): half of the tokens are in spans of ${median} or more, 1 in 100 in spans of ${long} or more.`,
    `Chance: 99 of 100 random texts of ${inTokens(length)} with the same token frequencies have no span longer than ${chance}.`,
    `Searched: ${complete ? "all" : "the first"} ${grouped(searched)} training tokens of ${datasets.join(" and ")}.${others}`,
  ];
}

// Where a span occurs first, with the text around it.
function placePicture(span, length) {
  const {count, dataset, shard, shards, offset, before, text, after} = span;
  const columns = ["start", "end", "count", "dataset", "shard", "offset", "before", "text", "after"];
  const quote = element("div", {class: "token-strip"}, before && `…${before}`, element("mark", {}, text), after && `${after}…`);
  return picture("memorized-place", `In the training data: ${length}`, () => ({columns, rows: [columns.map(name => span[name])]}), quote,
    `${count > 1 ? `The first of ${grouped(count)} places` : "The only place"}: ${dataset}`
    + `${shards > 1 ? `, shard ${shard} (the first of ${shards} is 0)` : ""}, from token ${grouped(offset)}.`);
}
