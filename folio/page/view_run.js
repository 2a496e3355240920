"use strict";
// The run of the model: its curves and samples, also while it trains.

const RUN_INTERVAL = 2000; // milliseconds between two questions about a run that is still training
const RUN_POINTS = 1500; // of a curve, at most; the tables have all of them
const RUN_CURVES = [
  {id: "run-loss", title: "Loss (nats per token)", names: {loss: "training", val_loss: "validation"}, height: 320},
  {id: "run-lr", title: "Learning rate", names: {lr: "learning rate"}, height: 190, from: 0},
  {id: "run-grad_norm", title: "Norm of the gradient", names: {grad_norm: "norm"}, height: 190, from: 0},
  {id: "run-speed", title: "Speed (tokens per second)", names: {tokens_per_second: "tokens per second"}, height: 190, from: 0},
];

let run = {lines: [], facts: {}}; // what is known about the run: a line for each logged step

// Add what is new to `run`.
async function loadRun() {
  const since = run.lines.at(-1)?.step ?? 0;
  let {facts, tensors} = await provider.ask({kind: "run", since});
  if (facts.last < since || !since) {
    run = {lines: []};
    if (since) ({facts, tensors} = await provider.ask({kind: "run"}));
  }
  const last = run.lines.at(-1)?.step ?? -1, names = Object.keys(tensors);
  Array.from(tensors.step?.data ?? []).forEach((step, i) => {
    if (step > last) run.lines.push(Object.fromEntries(names.map(name => [name, tensors[name].data[i]])));
  });
  run.facts = facts;
}

defineView({
  id: "run", title: "The run",
  about: "How the model was trained: the numbers and samples that the run has logged. While it is still training, they "
    + "are updated every 2 seconds. Gray ticks are checkpoints; click on a curve to look at the nearest one.",
  offered: () => described.models[0].step !== null,
  async draw(box, {model}) {
    await loadRun();
    if (!run.lines.length) {
      box.append(element("p", {}, "There are no numbers of a run: no metrics.jsonl beside the checkpoint."));
      return;
    }
    const status = element("p", {"data-testid": "run-status", role: "status"}), curves = element("div");
    const scale = element("label", {}, element("input", {
      type: "checkbox", checked: state.run_log > 0, "data-testid": "run-log", change: event => change({run_log: Number(event.target.checked)}),
    }), " steps on a log scale");
    const samples = element("div", {class: "scroll"});
    box.append(status, element("div", {class: "controls"}, scale), curves,
      picture("run-samples", "Samples", () => ({columns: ["step", "text"], rows: run.facts.samples}), samples,
        "Text that the model generated without a prompt at its evaluations, the newest first."));
    const show = () => {
      status.textContent = describeProgress();
      showCurves(curves, model);
      showSamples(samples);
    };
    const refresh = async () => {
      if (!box.isConnected) return; // another view, or this one again, has replaced it
      try {
        if (!document.hidden) await loadRun();
      } catch {
        status.textContent = "The server does not answer.";
        return again();
      }
      if (!box.isConnected) return;
      model.checkpoints = run.facts.checkpoints;
      drawCheckpoints(model);
      show();
      again();
    };
    const again = () => run.facts.training && setTimeout(refresh, RUN_INTERVAL);
    show();
    again();
  },
}, {run_log: 0});

function describeProgress() {
  const {training, idle, max_iters: maxIters, stopped_by: stoppedBy} = run.facts;
  const {step, tokens} = run.lines.at(-1), number = n => n.toLocaleString("en-US");
  const at = maxIters >= step ? `step ${number(step)} of ${number(maxIters)}` : `step ${number(step)}`;
  if (!training) {
    const reason = {null: "It was killed", undefined: "It was killed", "its end": "It has ended"}[stoppedBy] ?? `It was stopped by ${stoppedBy}`;
    return `${reason} after ${at}.`;
  }
  if (idle > 300) return `After ${at}, nothing was logged for ${number(Math.floor(idle / 60))} minutes. Was the run killed?`;
  const speeds = run.lines.map(line => line.tokens_per_second).filter(speed => speed > 0).slice(-20).sort((a, b) => a - b);
  const seconds = (maxIters - step) * tokens / step / speeds[speeds.length >> 1];
  const left = seconds >= 90 ? `${number(Math.round(seconds / 60))} minutes` : `${Math.round(seconds)} seconds`;
  return `It is still training: ${at}${seconds > 0 ? `, about ${left} to go` : ""}.`;
}

// Draw the curves. Those that are drawn already are replaced inside their figures, if anything is new.
function showCurves(box, model) {
  const version = `${run.lines.length} ${run.facts.checkpoints}`;
  if (box.dataset.version === version) return;
  box.dataset.version = version;
  const known = RUN_CURVES.map(curve => ({...curve, series: seriesOf(curve)})).filter(curve => curve.series.length);
  const drawn = [...box.querySelectorAll("figure")];
  if (drawn.map(figure => figure.dataset.testid).join() === known.map(curve => curve.id).join()) {
    drawn.forEach((figure, i) => figure.querySelector("svg").replaceWith(runChart(known[i], model)));
    return;
  }
  const figures = known.map(curve => {
    const names = Object.keys(curve.names);
    const table = () => ({columns: ["step", ...names], rows: run.lines.map(line => [line.step, ...names.map(name => line[name])])});
    const legend = element("span", {}, Object.values(curve.names).map((name, i) =>
      element("span", {style: {color: LINE_COLORS[i]}}, `━ ${name}  `)));
    return picture(curve.id, curve.title, table, element("div", {}, runChart(curve, model)), names.length > 1 && legend);
  });
  box.replaceChildren(...figures.slice(0, 1), element("div", {class: "row"}, figures.slice(1)));
}

// The lines of a curve. The evaluation before the first step is left out once there are others: a straight line from
// there would not be the curve.
function seriesOf({names}) {
  return Object.entries(names).map(([name, title], i) => {
    const known = run.lines.filter(line => Number.isFinite(line[name])).map(line => [line.step, line[name]]);
    const points = known.length > 1 ? known.filter(([step]) => step > 0) : known;
    const every = Math.ceil(points.length / RUN_POINTS);
    return {name: title, color: LINE_COLORS[i], width: i ? 2.5 : 1.3, points: points.filter((_, k) => (points.length - 1 - k) % every === 0)};
  }).filter(series => series.points.length);
}

function runChart({id, title, series, height, from}, model) {
  const values = series.flatMap(s => s.points.map(p => p[1]));
  const low = from ?? values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const checkpoints = run.facts.checkpoints, last = run.lines.at(-1).step;
  const ticks = checkpoints.filter(step => step <= last).map(step => (
    {name: `checkpoint of step ${step}`, color: "#9aa5b4", points: [[step, low], [step, low + 0.03 * (high - low)]]}));
  const current = state.step < 0 ? model.step : state.step;
  const position = step => state.run_log ? Math.log1p(step) : step;
  const available = clamp(document.getElementById("view").clientWidth - 40, 280, 1200);
  const width = id === "run-loss" ? available : available >= 800 ? (available - 60) / 3 : Math.min(available, 400);
  const chart = lineChart([...ticks, ...series], {
    width, height, from, logX: state.run_log > 0, xTitle: "step",
    mark: current <= last ? current : undefined,
    click: step => change({step: checkpoints.reduce((best, other) =>
      Math.abs(position(other) - position(step)) < Math.abs(position(best) - position(step)) ? other : best)}),
  });
  chart.setAttribute("aria-label", title);
  return chart;
}

function showSamples(box) {
  const {samples} = run.facts, newest = samples.at(-1)?.[0];
  if (box.dataset.newest === String(newest)) return;
  box.dataset.newest = newest;
  box.replaceChildren(...samples.toReversed().map(([step, text]) => element("div", {"data-testid": `run-sample-${step}`},
    element("div", {class: "note"}, `step ${step.toLocaleString("en-US")}`),
    element("div", {style: {font: "13px/1.4 var(--mono)", whiteSpace: "pre-wrap", overflowWrap: "anywhere", unicodeBidi: "isolate", marginBottom: ".8rem"}}, text))),
  samples.length ? "" : "There are no samples.");
}
