// Samples side by side: those of all runs at a step, or those of a run at different steps.

const MAX_CARDS = 12; // at first

// chart: {title, runs: [{name, samples: [[step, text, validation loss or null], ...], by step}]}. Runs that are hidden
// in the chart of curves have no cards. The figure's show(chart) replaces the data.
function samplesFigure(figure, chart) {
  const choice = {mode: chart.runs.length > 1 ? "runs" : "steps", run: "", step: Infinity, all: false};
  const controls = div("buttons"), cards = div("cards"), note = element("div", {class: "note", role: "status"});
  figure.append(
    element("figcaption", {}, element("h2", {}, chart.title), controls), note, cards);
  figure.show = next => {
    chart = next;
    update();
  };
  document.addEventListener("shownlines", draw);
  update();

  function stepsOf(runs) {
    return [...new Set(runs.flatMap(({samples}) => samples.map(([step]) => step)))].sort((a, b) => a - b);
  }

  // The controls and the cards.
  function update() {
    const sampled = chart.runs.filter(({samples}) => samples.length), steps = stepsOf(sampled);
    const set = name => value => {
      choice[name] = value;
      choice.all = false;
      update();
    };
    if (!sampled.some(({name}) => name === choice.run)) choice.run = sampled[0].name;
    const last = steps.length - 1, index = steps.findLastIndex(step => step <= choice.step);
    const output = element("output", {}, `step ${valueText(steps[Math.max(index, 0)])}`);
    const slider = element("input", {
      type: "range", min: 0, max: last, value: Math.max(index, 0), "aria-label": "step",
      input: ({target}) => {
        choice.step = Number(target.value) === last ? Infinity : steps[target.value]; // Infinity: also later ones
        output.textContent = `step ${valueText(steps[target.value])}`;
        draw();
      },
    });
    const focused = [...controls.querySelectorAll("input, select")].indexOf(document.activeElement);
    const modes = [["runs", "runs at a step"], ["steps", "steps of a run"]];
    controls.replaceChildren(
      ...sampled.length > 1 ? [select("compare:", modes, choice.mode, set("mode"))] : [],
      ...choice.mode === "runs" ? [element("label", {}, slider, " ", output)]
        : sampled.length > 1 ? [select("run:", sampled.map(({name}) => name), choice.run, set("run"))] : []);
    controls.querySelectorAll("input, select")[focused]?.focus({preventScroll: true});
    draw();
  }

  function draw() {
    const colors = new Map(chart.runs.map(({name}, i) => [name, groupColor(i, chart.runs.length)]));
    const hidden = chartViews.get("curves")?.hidden ?? new Set();
    const sampled = chart.runs.filter(({samples}) => samples.length);
    const found = choice.mode === "runs"
      ? sampled.filter(({name}) => !hidden.has(name)).flatMap(({name, samples}) =>
        samples.filter(([step]) => step <= choice.step).slice(-1).map(sample => ({name, sample})))
      : sampled.find(({name}) => name === choice.run).samples.map(sample => ({name: choice.run, sample}));
    const shown = choice.all ? found : choice.mode === "runs" ? found.slice(0, MAX_CARDS) : evenly(found, MAX_CARDS);
    note.replaceChildren(...shown.length === found.length ? [] : [
      `${shown.length} of ${found.length} samples. `, button("show all", () => {
        choice.all = true;
        draw();
      })]);
    cards.replaceChildren(...shown.map(({name, sample: [step, text, loss]}) => element("section", {class: "card"},
      element("h3", {}, choice.mode === "runs" && [swatch(colors.get(name)), `${name} `],
        element("small", {}, [`step ${valueText(step)}`, loss !== null && `loss ${loss.toFixed(4)}`]
          .filter(Boolean).join(", "))),
      element("pre", {}, text))));
  }
}

// At most `count` items at even distances, with the first and the last one.
function evenly(items, count) {
  if (items.length <= count) return items;
  return Array.from({length: count}, (_, i) => items[Math.round(i * (items.length - 1) / (count - 1))]);
}
