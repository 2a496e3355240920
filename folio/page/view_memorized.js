"use strict";
// Which spans of the text occur in the training data.

const SPAN_SHADES = 4; // doublings of chance from white to the darkest color

// The color of a token that a span of so many tokens covers.
function spanColor(length, chance) {
  return colorOf("sequential", length > chance ? 0.12 + 0.88 * Math.log2(length / Math.max(chance, 1)) / SPAN_SHADES : 0);
}

defineView({
  id: "memorized", title: "Memorized from the training data",
  about: "The darker a token, the longer the span around it that occurs in the training data exactly. Common phrases occur "
    + "in any text. A span much longer than those of text that the model was not trained on is probably memorized.",
  async draw(box, context) {
    const {facts, tensors} = await context.ask("memorized");
    if (facts.reason) {
      return box.append(element("p", {"data-testid": "memorized-reason"}, `Nothing can be said about this model: ${facts.reason}.`));
    }
    const {spans, chance} = facts, byLength = [...spans].sort((a, b) => spanLength(b) - spanLength(a) || a.start - b.start);
    const chosen = chosenSpan(byLength);
    box.append(drawComparison(facts, byLength[0], context.ids.length), drawShadedText(context, tensors, chance, chosen));
    if (chosen) box.append(drawTrainingPlace(chosen));
    else if (spans.length) box.append(element("p", {}, `Token ${context.token} is in no span longer than chance.`));
    if (spans.length) box.append(drawSpanTable(byLength, chosen));
  },
}, {span: -1});

function spanLength({start, end}) {
  return end - start;
}

function withNoun(n, what) {
  return `${n.toLocaleString("en-US")} ${what}${n === 1 ? "" : "s"}`;
}

// The span that was clicked, otherwise the longest one that covers the selected token, or of all without such a token.
function chosenSpan(byLength) {
  const {span, token} = state;
  const covering = byLength.filter(({start, end}) => token < 0 || (start <= token && token < end));
  return covering.find(({start}) => start === span) ?? covering[0];
}

// The longest span, what it compares to, and what was searched.
function drawComparison({chance, searched, complete, datasets, held_out: [median, long], init_from: base}, longest, length) {
  const others = base && !["scratch", "resume"].includes(base) ? ` What ${base} was trained on before was not searched.` : "";
  return element("ul", {"data-testid": "memorized-facts", style: {margin: "0 0 1rem", paddingLeft: "1.2rem"}}, [
    longest ? `The longest span here has ${withNoun(spanLength(longest), "token")}.` : "No span here is longer than chance.",
    `Text that the model was not trained on (the validation data): half of the tokens are in spans of ${median} or more, 1 in 100 in spans of ${long} or more.`,
    `Chance: 99 of 100 random texts of ${withNoun(length, "token")} with the same token frequencies have no span longer than ${chance}.`,
    `Searched: ${complete ? "all" : "the first"} ${withNoun(searched, "training token")} of ${datasets.join(" and ")}.${others}`,
  ].map(line => element("li", {}, line)));
}

// The text, each token shaded by the longest span that covers it.
function drawShadedText({ids, labels, token}, {longest, covering}, chance, chosen) {
  const text = element("div", {style: {
    font: "14px/1.75 var(--mono)", whiteSpace: "pre-wrap", overflowWrap: "anywhere", maxHeight: "22em", overflowY: "auto",
    border: "1px solid var(--line)", borderRadius: "6px", padding: ".3rem .5rem", maxWidth: "62rem",
  }}, labels.map((label, t) => {
    const color = spanColor(covering.data[t], chance), inside = chosen && chosen.start <= t && t < chosen.end;
    return element("span", {
      class: state.token === t ? "token selected" : "token", "data-testid": `memorized-${t}`,
      title: `${t}: ${visible(label)} is in a span of ${withNoun(covering.data[t], "token")}; from here, ${longest.data[t]} occur`,
      style: {background: css(color), color: textColorOn(color), borderBottom: `2px solid ${inside ? "var(--accent)" : "transparent"}`},
      click: () => change({token: t, span: -1}),
    }, label === "\n" ? "⏎\n" : visible(label).replaceAll("␣", " "));
  }));
  const steps = Array.from({length: SPAN_SHADES}, (_, i) => Math.max(chance, 1) * 2 ** (i + 1));
  const swatch = (length, title) => {
    const color = spanColor(length, chance);
    return element("span", {style: {
      background: css(color), color: textColorOn(color), padding: ".05rem .5rem", border: "1px solid var(--line)", font: "12px/1.5 var(--mono)",
    }}, title);
  };
  const legend = element("div", {class: "controls", style: {gap: ".2rem"}}, "tokens in the span: ",
    swatch(0, `≤ ${chance}, chance`), swatch(chance + 1, String(chance + 1)),
    steps.map((length, i) => swatch(length, i + 1 < SPAN_SHADES ? String(length) : `≥ ${length}`)));
  const table = () => ({
    columns: ["position", "token", "id", "longest span that covers it", "longest span from here"],
    rows: ids.map((id, t) => [t, labels[t], id, covering.data[t], longest.data[t]]),
  });
  return picture("memorized-text", "The text, shaded by what occurs in the training data", table, element("div", {}, legend, text),
    `Click a token to see where its span occurs in the training data.${chosen ? " Underlined: the span shown below." : ""}`);
}

// Where a span occurs first, with the text around it.
function drawTrainingPlace(span) {
  const {start, end, count, dataset, shard, shards, offset, before, text, after} = span;
  const table = () => ({
    columns: ["start", "end", "count", "data set", "shard", "offset", "before", "text", "after"],
    rows: [[start, end, count, dataset, shard, offset, before, text, after]],
  });
  const quote = element("blockquote", {style: {
    font: "14px/1.6 var(--mono)", whiteSpace: "pre-wrap", overflowWrap: "anywhere", margin: ".3rem 0", padding: ".4rem .8rem",
    borderLeft: "3px solid var(--accent)", background: "var(--tint)", maxWidth: "62rem", color: "var(--soft)", unicodeBidi: "isolate",
  }}, before && "…" + before, element("mark", {style: {background: "#fde2b3", color: "var(--ink)"}}, text), after && after + "…");
  const where = `${dataset}${shards > 1 ? `, shard ${shard} (the first of ${shards} is 0)` : ""}, from token ${offset.toLocaleString("en-US")}`;
  const others = count > 1 ? `The first of ${withNoun(count, "place")}` : "The only place";
  return picture("memorized-place", `In the training data: ${withNoun(spanLength(span), "token")}`, table, quote, `${others}: ${where}.`);
}

function drawSpanTable(byLength, chosen) {
  const columns = [{title: "tokens"}, {title: "count"}, {title: "position"}, {title: "span", text: true}];
  const line = text => visible((text.length > 90 ? Array.from(text).slice(0, 88).join("") + "…" : text).replaceAll("\n", "⏎"));
  const shown = byLength.map(span => [spanLength(span), span.count, span.start, line(span.text)]);
  const table = () => ({
    columns: columns.map(column => column.title),
    rows: byLength.map(span => [spanLength(span), span.count, span.start, span.text]),
  });
  return picture("memorized-spans", `${withNoun(byLength.length, "span")} longer than chance`, table,
    numberTable(columns, shown, {selected: i => byLength[i] === chosen, click: i => change({span: byLength[i].start, token: byLength[i].start})}),
    "Spans that are not a part of a longer one, the longest first. They may overlap. Count: how often it occurs in the training data.");
}
