// View of the output: from logits to the next token.

// --- sampling ---

function entropyOf(probabilities) {
  return probabilities.reduce((sum, p) => p > 0 ? sum - p * Math.log(p) : sum, 0);
}

// The distributions after each filter of the sampler (sampling.js), in order of application: [{name, probabilities}].
// Ids from vocab_size on, the model's padding, are never sampled.
function samplingStages(logits, settings, vocab_size) {
  const stages = [{name: "softmax", probabilities: softmax(logits.slice())}];
  const filtered = logits.slice(0, vocab_size), values = filterSettings(settings);
  for (const [name, filter] of Object.entries(FILTERS)) {
    const value = values[name];
    if (value === null || name === "top_k" && value >= filtered.length) continue; // no effect
    filter(filtered, value);
    const probabilities = logits.slice().fill(0);
    probabilities.set(softmax(filtered.slice()));
    stages.push({name: `${name.replace("_", "-")} ${value}`, probabilities});
  }
  return stages;
}

// --- the distribution of the next token ---

const SHOWN_TOKENS = 20; // candidates in the table
const SLIDERS = { // [min, max, step]
  temperature: [0, 2, 0.05], top_k: [0, 200, 1], top_p: [0.01, 1, 0.01], min_p: [0, 1, 0.01],
};

// Sliders for the sampling settings, which call update().
function samplingControls(update) {
  return controls(...Object.entries(SLIDERS).map(([name, [min, max, step]]) => slider(SETTINGS[name], {
    min, max, step, value: state[name], testid: `slider-${name}`, move: value => {
      remember({[name]: value});
      update();
    },
  })));
}

defineView({
  id: "output", title: "Next token",
  about: "The final norm and the token embeddings give logits, and the softmax gives probabilities. Sampling filters "
    + "them in stages and then draws a token.",
  async draw(box, context) {
    const {token, ids, model} = context;
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const order = argsort(logits), shown = order.slice(0, SHOWN_TOKENS);
    const result = div(""), update = () => result.replaceChildren(drawStages());
    update();
    box.append(samplingControls(update), result);

    function drawStages() {
      const stages = samplingStages(logits, state, model.vocab_size), final = stages.at(-1).probabilities;
      const columns = ["id", "token", "logit", ...stages.map(stage => stage.name)];
      const row = id => [id, pieces[id], logits[id], ...stages.map(stage => stage.probabilities[id])];
      return picture("distribution", `After token ${tokenAt(context, token)}`, () => ({columns, rows: order.map(row)}),
        div("row", tableOf(columns, shown.map(row), {
          barsFrom: columns.length - stages.length, selected: i => shown[i] === ids[token + 1],
          click: i => {
            const next = appended(ids.slice(0, token + 1), shown[i], model);
            history.pushState(null, ""); // undone by the browser's Back button
            change({ids: next.join(","), token: next.length - 1});
          },
        }), probabilityBars(shown, final)),
        stages.map(({name, probabilities}) => `${name}: entropy ${short(entropyOf(probabilities))} nats`).join("; ")
          + `. ${final.filter(p => p > 0).length} of ${logits.length} tokens can be sampled. `
          + "Click a token to replace the following text by it.");
    }
  },
});

// Bars for probabilities. Tokens that cannot be sampled are pale.
function probabilityBars(ids, probabilities) {
  const width = fitWidth(440), line = 26.5, max = maxAbs(probabilities);
  const left = Math.max(90, 8 * Math.max(...ids.map(id => visible(pieces[id]).length)) + 12), room = width - left - 90;
  return svg("svg", {width, height: (ids.length + 1) * line}, ids.map((id, i) => {
    const y = (i + 1) * line, p = probabilities[id], length = Math.max(room * p / max, 0.5);
    return svg("g", {opacity: p ? 1 : 0.35},
      svg("text", {x: left - 6, y: y + 17, "text-anchor": "end"}, visible(pieces[id])),
      svg("rect", {x: left, y: y + 5, width: length, height: line - 10, fill: BLUE}),
      p > 0 && softText(left + length + 6, y + 17, percent(p)));
  }));
}
