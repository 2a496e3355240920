// Views of the output: from logits to the next token.

// --- sampling ---

function entropyOf(probabilities) {
  return probabilities.reduce((sum, p) => p > 0 ? sum - p * Math.log(p) : sum, 0);
}

// The distributions after each filter, in the order in which they apply: [{name, probabilities}]. The filters are those
// of the sampler (sampling.js). Ids from vocab_size on, a model's padding, are never drawn.
function samplingStages(logits, settings, vocab_size) {
  const stages = [{name: "softmax", probabilities: softmax(logits.slice())}];
  const filtered = logits.slice(0, vocab_size), values = filterSettings(settings);
  for (const [name, filter] of Object.entries(FILTERS)) {
    const value = values[name];
    if (value === null || name === "top_k" && value >= filtered.length) continue; // it changes nothing
    filter(filtered, value);
    const probabilities = logits.slice().fill(0);
    probabilities.set(softmax(filtered.slice()));
    stages.push({name: `${name.replace("_", "-")} ${value}`, probabilities});
  }
  return stages;
}

// --- the distribution of the next token ---

const SHOWN_TOKENS = 20; // that may be next
const SLIDERS = { // their minima, maxima, and steps
  temperature: [0, 2, 0.05], top_k: [0, 200, 1], top_p: [0.01, 1, 0.01], min_p: [0, 1, 0.01],
};

// Sliders that change how a token is sampled, and call update().
function samplingControls(update) {
  return controls(...Object.entries(SLIDERS).map(([name, [min, max, step]]) => slider(SETTINGS[name], {
    min, max, step, value: state[name], testid: `slider-${name}`, move: value => {
      remember({[name]: value});
      update();
    },
  })));
}

defineView({
  id: "output", title: "The next token",
  about: "The last norm and the table of token embeddings give a logit for every token. The softmax makes them "
    + "probabilities. Sampling changes these in stages, and then draws a token.",
  async draw(box, context) {
    const {names, token, ids, model} = context;
    const {tensors: {logits: {data: logits}}} = await context.ask("logits", {token});
    const order = ranked(logits), shown = order.slice(0, SHOWN_TOKENS);
    const result = div(""), update = () => result.replaceChildren(drawStages());
    update();
    box.append(samplingControls(update), result);

    function drawStages() {
      const stages = samplingStages(logits, state, model.vocab_size), final = stages.at(-1).probabilities;
      const columns = ["id", "token", "logit", ...stages.map(stage => stage.name)];
      const row = id => [id, pieces[id], logits[id], ...stages.map(stage => stage.probabilities[id])];
      return picture("distribution", `After token ${names[token]}`, () => ({columns, rows: order.map(row)}),
        div("row", tableOf(columns, shown.map(row), {
          selected: i => shown[i] === ids[token + 1],
          click: i => {
            const next = appended(ids.slice(0, token + 1), shown[i], model);
            history.pushState(null, ""); // the browser's Back undoes it
            change({ids: next.join(","), token: next.length - 1});
          },
        }), probabilityBars(shown, final)),
        stages.map(({name, probabilities}) => `${name}: entropy ${short(entropyOf(probabilities))} nats`).join("; ")
          + `. ${final.filter(p => p > 0).length} of ${logits.length} tokens can be drawn. `
          + "Click one to put it in the place of what follows.");
    }
  },
});

// The probabilities of tokens as bars, beside a table. Tokens that cannot be drawn are pale.
function probabilityBars(ids, probabilities) {
  const left = 90, line = 26.5, width = roomFor(440) - 2 * left, most = largest(probabilities);
  return svg("svg", {width: left + width + 90, height: (ids.length + 1) * line, role: "img"}, ids.map((id, i) => {
    const y = (i + 1) * line, p = probabilities[id], long = width * p / most;
    return svg("g", {opacity: p ? 1 : 0.35},
      svg("text", {x: left - 6, y: y + 17, "text-anchor": "end"}, visible(pieces[id])),
      svg("rect", {x: left, y: y + 5, width: Math.max(long, 0.5), height: line - 10, fill: BLUE}),
      softText(left + long + 6, y + 17, percent(p)));
  }));
}
