// Which spans of the text occur in the training data.

const SPAN_SHADES = 4; // doublings of chance from white to the darkest color

defineView({
  id: "memorized", title: "Memorized from the training data",
  about: "The darker a token, the longer the span around it that occurs in the training data. A span much longer than "
    + "those of the validation data is probably memorized.",
  async draw(box, context) {
    const {facts, tensors} = await context.ask("memorized"), {ids, labels} = context;
    if (facts.reason) {
      return box.append(element("p", {},
        `Nothing can be said about this model: ${facts.reason}.`));
    }
    const {longest: {data: longest}, covering: {data: covering}} = tensors, size = ({start, end}) => end - start;
    const {chance} = facts, least = Math.max(chance, 1), most = least * 2 ** SPAN_SHADES;
    const spans = [...facts.spans].sort((a, b) => size(b) - size(a) || a.start - b.start);
    const chosen = chosenSpan(spans), isChosen = t => chosen && chosen.start <= t && t < chosen.end;
    const shade = length => onColor("sequential", length > chance
      ? 0.12 + 0.88 * Math.log2(length / least) / SPAN_SHADES : 0);
    const columns = ["position", "token", "id", "longest span that covers it", "longest span from here"];
    const lines = comparison(facts, spans[0] && size(spans[0]), ids.length).map(line => element("li", {}, line));
    box.append(element("ul", {testid: "memorized-facts"}, lines),
      picture("memorized-text", "The text, shaded by what occurs in the training data",
        () => ({columns, rows: ids.map((id, t) => [t, labels[t], id, covering[t], longest[t]])}),
        tokenStrip(labels, state.token, t => ({
          testid: `memorized-${t}`, click: () => change({token: t, span: -1}),
          title: `${t}: in a span of ${inTokens(covering[t])}`,
          style: {...shade(covering[t]), borderBottom: `2px solid ${isChosen(t) ? "var(--accent)" : "transparent"}`},
        })), `White: up to ${inTokens(chance)}, as by chance. Darkest: ${most} or more. Underlined: the span below.`));
    if (chosen) box.append(placePicture(chosen, inTokens(size(chosen))));
    if (!spans.length) return;
    const rows = spans.map(span => [size(span), span.count, span.start, span.text]);
    box.append(tablePicture("memorized-spans", `${short(spans.length)} spans longer than chance`,
      ["tokens", "count", "position", "span"], rows, {
        shown: rows.map(row => row.with(3, [...row[3]].slice(0, 90).map(inLine).join(""))),
        selected: i => spans[i] === chosen, click: i => change({span: spans[i].start, token: spans[i].start}),
        note: "Spans that are not a part of a longer one. Count: how often it occurs in the training data.",
      }));
  },
}, {span: -1});

function inTokens(n) {
  return `${short(n)} token${n === 1 ? "" : "s"}`;
}

// The span that was clicked, otherwise the longest one that covers the selected token, or of all without such a token.
function chosenSpan(spans) {
  const covering = spans.filter(({start, end}) => state.token < 0 || (start <= state.token && state.token < end));
  return covering.find(({start}) => start === state.span) ?? covering[0];
}

// The longest span, what it compares to, and what was searched.
function comparison({chance, searched, complete, datasets, held_out: [median, long], init_from: base}, longest,
  length) {
  const others = base && !["scratch", "resume"].includes(base)
    ? ` What ${base} was trained on before was not searched.` : "";
  return [
    longest ? `The longest span here has ${inTokens(longest)}.` : "No span here is longer than chance.",
    `In the validation data, half of the tokens are in spans of ${median} or more, 1 in 100 of ${long} or more.`,
    `99 of 100 random texts of ${length} tokens with the same frequencies have no span longer than ${chance}.`,
    `Searched: ${complete ? "all" : "the first"} ${short(searched)} tokens of ${datasets.join(" and ")}.${others}`,
  ];
}

// Where a span occurs first, with the text around it.
function placePicture(span, length) {
  const {count, dataset, shard, shards, offset, before, text, after} = span;
  const columns = ["start", "end", "count", "dataset", "shard", "offset", "before", "text", "after"];
  const quote = div("token-strip", before && `…${before}`,
    element("mark", {style: {background: "#fde2b3"}}, text), after && `${after}…`);
  return picture("memorized-place", `In the training data: ${length}`,
    () => ({columns, rows: [columns.map(name => span[name])]}), quote,
    `${count > 1 ? `The first of ${short(count)} places` : "The only place"}: ${dataset}`
    + `${shards > 1 ? `, shard ${shard} (the first of ${shards} is 0)` : ""}, from token ${short(offset)}.`);
}
