// Spans of the text that occur in the training data.

const SPAN_SHADES = 4; // doublings of the length expected by chance, from white to the darkest color

defineView({
  id: "memorized", title: "Memorized from the training data",
  about: "Tokens with a stronger color belong to longer spans of the training data. A span much longer than those "
    + "in the validation data is probably memorized.",
  async draw(box, context) {
    const {facts, tensors} = await context.ask("memorized"), {ids, labels} = context;
    if (facts.reason) {
      return box.append(element("p", {},
        `The training data cannot be searched: ${facts.reason}.`));
    }
    const {longest: {data: longest}, covering: {data: covering}} = tensors, size = ({start, end}) => end - start;
    const {chance} = facts, min = Math.max(chance, 1), max = min * 2 ** SPAN_SHADES;
    const spans = [...facts.spans].sort((a, b) => size(b) - size(a) || a.start - b.start);
    const selected = selectedSpan(spans), isSelected = t => selected && selected.start <= t && t < selected.end;
    const shade = length => onColor("sequential", length > chance
      ? 0.12 + 0.88 * Math.log2(length / min) / SPAN_SHADES : 0);
    const columns = ["position", "token", "id", "longest span covering it", "longest span from here"];
    const lines = comparison(facts, spans[0] && size(spans[0]), ids.length).map(line => element("li", {}, line));
    box.append(element("ul", {testid: "memorized-facts"}, lines),
      picture("memorized-text", "Lengths of spans in the training data",
        () => ({columns, rows: ids.map((id, t) => [t, labels[t], id, covering[t], longest[t]])}),
        tokenStrip(labels, state.token, t => ({
          testid: `memorized-${t}`, click: () => change({token: t, span: -1}),
          title: `${t}: in a span of ${countTokens(covering[t])}`,
          style: {...shade(covering[t]), borderBottom: `2px solid ${isSelected(t) ? "var(--accent)" : "transparent"}`},
        })), `No color: up to ${countTokens(chance)}, expected by chance. Strongest: ${max} or more. `
          + "Underlined: the span below."));
    if (selected) box.append(sourcePicture(selected, countTokens(size(selected))));
    if (!spans.length) return;
    const rows = spans.map(span => [size(span), span.count, span.start, span.text]);
    box.append(tablePicture("memorized-spans", `${short(spans.length)} spans longer than chance`,
      ["tokens", "count", "position", "span"], rows, {
        shown: rows.map(row => row.with(3, [...row[3]].slice(0, 90).map(inLine).join(""))),
        selected: i => spans[i] === selected, click: i => change({span: spans[i].start, token: spans[i].start}),
        note: "Spans that are not part of a longer span. Count: occurrences in the training data.",
      }));
  },
}, {span: -1});

// The clicked span; otherwise the longest span that covers the selected token; otherwise the longest span.
function selectedSpan(spans) {
  const covering = spans.filter(({start, end}) => state.token < 0 || (start <= state.token && state.token < end));
  return covering.find(({start}) => start === state.span) ?? covering[0];
}

// Lines about the longest span, its comparison with validation data and chance, and the searched data.
function comparison({chance, searched, complete, datasets, held_out: [median, long], init_from: base}, longest,
  length) {
  const others = base && !["scratch", "resume"].includes(base)
    ? ` The training data of ${base} was not searched.` : "";
  return [
    longest ? `The longest span has ${countTokens(longest)}.` : "No span is longer than expected by chance.",
    `In the validation data, half of the tokens are in spans of ${median} or more, and 1% of ${long} or more.`,
    `99% of random texts of ${length} tokens with the same frequencies have no span longer than ${chance}.`,
    `Searched: ${complete ? "all" : "the first"} ${short(searched)} tokens of ${datasets.join(" and ")}.${others}`,
  ];
}

// The first occurrence of a span, with its context.
function sourcePicture(span, length) {
  const {count, dataset, shard, shards, offset, before, text, after} = span;
  const columns = ["start", "end", "count", "dataset", "shard", "offset", "before", "text", "after"];
  const quote = div("token-strip", before && `…${before}`,
    element("mark", {style: {background: LIGHT, color: "inherit"}}, text), after && `${after}…`);
  return picture("memorized-place", `In the training data: ${length}`,
    () => ({columns, rows: [columns.map(name => span[name])]}), quote,
    `${count > 1 ? `The first of ${short(count)} occurrences` : "The only occurrence"}: ${dataset}`
    + `${shards > 1 ? `, shard ${shard} of ${shards} (from 0)` : ""}, from token ${short(offset)}.`);
}
