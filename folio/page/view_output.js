"use strict";
// Views of the output: from logits to the next token.

// --- sampling, as in folio/generate.py -------------------------------------------------------------------------------

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const exponentials = Float64Array.from(logits, x => Math.exp(x - most));
  const sum = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map(x => x / sum);
}

function entropyOf(probabilities) {
  return probabilities.reduce((sum, p) => p > 0 ? sum - p * Math.log(p) : sum, 0);
}

// The distributions after each filter, in the order in which they apply: [{name, probabilities}]. Ids from vocab_size on,
// a model's padding, are never drawn.
function samplingStages(allLogits, {temperature, top_k, top_p, min_p}, vocab_size = Infinity) {
  const stages = [{name: "softmax", probabilities: softmax(allLogits)}];
  const logits = Float64Array.from(allLogits, (x, i) => i < vocab_size ? x : -Infinity);
  let current;
  const add = (name, changed) => {
    current = changed;
    stages.push({name, probabilities: softmax(current)});
  };
  if (temperature === 0) {
    const best = logits.indexOf(logits.reduce((a, b) => Math.max(a, b), -Infinity));
    add("temperature 0", Float64Array.from(logits, (_, i) => i === best ? 0 : -Infinity));
  } else {
    add(`temperature ${temperature}`, Float64Array.from(logits, x => x / temperature));
  }
  if (top_k > 0 && top_k < logits.length) {
    const kth = Float64Array.from(current).sort().at(-top_k);
    add(`top-k ${top_k}`, current.map(x => x < kth ? -Infinity : x));
  }
  if (top_p < 1) {
    const p = stages.at(-1).probabilities, order = Array.from(p.keys()).sort((a, b) => p[b] - p[a]);
    const kept = new Float64Array(current.length).fill(-Infinity);
    let sum = 0;
    for (const i of order) {
      if (sum >= top_p && sum > 0) break;
      kept[i] = current[i];
      sum += p[i];
    }
    add(`top-p ${top_p}`, kept);
  }
  if (min_p > 0) {
    const p = stages.at(-1).probabilities, least = min_p * p.reduce((a, b) => Math.max(a, b), 0);
    add(`min-p ${min_p}`, current.map((x, i) => p[i] < least ? -Infinity : x));
  }
  return stages;
}

// --- the distribution of the next token ------------------------------------------------------------------------------

const SHOWN_TOKENS = 30;
const SLIDERS = [
  {name: "temperature", min: 0, max: 2, step: 0.05, title: "temperature"},
  {name: "top_k", min: 0, max: 200, step: 1, title: "top-k (0: off)"},
  {name: "top_p", min: 0.01, max: 1, step: 0.01, title: "top-p (1: off)"},
  {name: "min_p", min: 0, max: 1, step: 0.01, title: "min-p (0: off)"},
];

// Sliders that change how a token is sampled, and call update().
function samplingControls(update) {
  return element("div", {class: "controls"}, SLIDERS.map(({name, min, max, step, title}) => {
    const value = element("output", {}, String(state[name]));
    return element("label", {}, `${title} `, element("input", {
      type: "range", min, max, step, value: Math.min(state[name], max), "data-testid": `slider-${name}`,
      input: event => {
        remember({[name]: Number(event.target.value)});
        value.textContent = String(state[name]);
        update();
      },
    }), " ", value);
  }));
}

defineView({
  id: "output", title: "The next token",
  about: "The last norm and the table of token embeddings give a logit for every token of the vocabulary. The softmax makes "
    + "them probabilities. Sampling changes these in stages, and then draws a token.",
  async draw(box, context) {
    const {labels, token, ids, model} = context;
    const {tensors: {logits}} = await context.ask("logits", {token});
    const result = element("div", {"data-testid": "dist"});
    const update = () => result.replaceChildren(drawStages(logits.data, ids[token + 1]));
    update();
    box.append(element("div", {class: "note"}, `After token ${token} ${visible(labels[token])}. Click a token to append it to the text before.`),
      samplingControls(update), result);

    function drawStages(logits, actual) {
      const stages = samplingStages(logits, state, model.vocab_size), final = stages.at(-1).probabilities;
      const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
      const shown = order.slice(0, SHOWN_TOKENS);
      const columns = [{title: "id"}, {title: "token", text: true}, {title: "logit"}, ...stages.map(stage => ({title: stage.name}))];
      const numbers = id => [id, pieces[id], logits[id], ...stages.map(stage => stage.probabilities[id])];
      const table = numberTable(columns, shown.map(id => numbers(id).with(1, visible(pieces[id]))),
        {selected: i => shown[i] === actual, click: i => change({ids: [...ids.slice(0, token + 1), shown[i]].join(","), token: token + 1})});
      const kept = final.reduce((count, p) => count + (p > 0), 0);
      const note = stages.map(stage => `${stage.name}: entropy ${short(entropyOf(stage.probabilities))} nats`).join("; ")
        + `. ${kept} of ${logits.length} tokens can be drawn.`;
      return picture("distribution", "From logits to probabilities",
        () => ({columns: columns.map(column => column.title), rows: order.map(numbers)}),
        element("div", {class: "row"}, table, bars(shown.map(id => ({
          label: visible(pieces[id]), value: final[id], text: percent(final[id]), dim: final[id] === 0,
        })), final.reduce((a, b) => Math.max(a, b), 0), {line: 23})), note);
    }
  },
});
