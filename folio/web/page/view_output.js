// Views of the output: from logits to the next token.

// --- sampling, as in folio/decoding/sampling.py ---

function highest(values) {
  return values.reduce((most, x) => Math.max(most, x), -Infinity);
}

function softmax(logits) {
  const most = highest(logits), exponentials = Float64Array.from(logits, x => Math.exp(x - most));
  const sum = sumOf(exponentials);
  return exponentials.map(x => x / sum);
}

function entropyOf(probabilities) {
  return probabilities.reduce((sum, p) => p > 0 ? sum - p * Math.log(p) : sum, 0);
}

// The distributions after each filter, in the order in which they apply: [{name, probabilities}]. Ids from vocab_size
// on, a model's padding, are never drawn.
function samplingStages(allLogits, {temperature, top_k, top_p, min_p}, vocab_size = Infinity) {
  const stages = [{name: "softmax", probabilities: softmax(allLogits)}];
  const logits = Float64Array.from(allLogits, (x, i) => i < vocab_size ? x : -Infinity);
  let current;
  const add = (name, changed) => {
    current = changed;
    stages.push({name, probabilities: softmax(current)});
  };
  if (temperature === 0) {
    const best = logits.indexOf(highest(logits));
    add("temperature 0", logits.map((_, i) => i === best ? 0 : -Infinity));
  } else {
    add(`temperature ${temperature}`, logits.map(x => x / temperature));
  }
  if (top_k > 0 && top_k < logits.length) {
    const kth = Float64Array.from(current).sort().at(-top_k);
    add(`top-k ${top_k}`, current.map(x => x < kth ? -Infinity : x));
  }
  if (top_p < 1) {
    const p = stages.at(-1).probabilities, order = ranked(p);
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
    const p = stages.at(-1).probabilities, least = min_p * highest(p);
    add(`min-p ${min_p}`, current.map((x, i) => p[i] < least ? -Infinity : x));
  }
  return stages;
}

// --- the distribution of the next token ---

const SHOWN_TOKENS = 20; // that may be next
const SLIDERS = {
  temperature: {min: 0, max: 2, step: 0.05, title: "temperature"},
  top_k: {min: 0, max: 200, step: 1, title: "top-k (0: off)"},
  top_p: {min: 0.01, max: 1, step: 0.01, title: "top-p (1: off)"},
  min_p: {min: 0, max: 1, step: 0.01, title: "min-p (0: off)"},
};

// Sliders that change how a token is sampled, and call update().
function samplingControls(update) {
  return controls(...Object.entries(SLIDERS).map(([name, {title, ...range}]) => slider(title, {
    ...range, value: state[name], testid: `slider-${name}`, move: value => {
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
    const result = element("div", {testid: "dist"}), update = () => result.replaceChildren(drawStages());
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
    const y = (i + 1) * line, long = width * probabilities[id] / most;
    return svg("g", {opacity: probabilities[id] ? 1 : 0.35},
      svg("text", {x: left - 6, y: y + 17, "text-anchor": "end"}, visible(pieces[id])),
      svg("rect", {x: left, y: y + 5, width: Math.max(long, 0.5), height: line - 10, fill: BLUE}),
      softText(left + long + 6, y + 17, percent(probabilities[id])));
  }));
}
