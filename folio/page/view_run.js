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

// Add what is new to `run`. A run that was started again has fewer steps than are known.
async function loadRun() {
  const since = run.lines.at(-1)?.step ?? -1, {facts, tensors} = await provider.ask({kind: "run", since: Math.max(since, 0)});
  if (facts.last < since) {
    run = {lines: [], facts: {}};
    return loadRun();
  }
  const lines = Array.from(tensors.step?.data ?? [], (_, i) =>
    Object.fromEntries(Object.keys(tensors).map(name => [name, tensors[name].data[i]])));
  run = {lines: [...run.lines, ...lines.filter(({step}) => step > since)], facts};
}

defineView({
  id: "run", title: "The run",
  about: "How the model was trained: the numbers and samples that the run has logged. While it is still training, they "
    + "are updated every 2 seconds. Gray ticks are checkpoints; click on a curve to look at the nearest one.",
  offered: () => described.models[0].step !== null,
  async draw(box, {model}) {
    await loadRun();
    if (!run.lines.length) return box.append("There are no numbers of a run: no metrics.jsonl beside the checkpoint.");
    const status = element("p", {"data-testid": "run-status", role: "status"}), samples = scrolling();
    const curves = RUN_CURVES.filter(curve => seriesOf(curve).length), [loss, ...others] = curves.map(curve => {
      const columns = ["step", ...Object.keys(curve.names)], lines = Object.values(curve.names);
      return picture(curve.id, curve.title, () => ({columns, rows: run.lines.map(line => columns.map(name => line[name]))}),
        element("div", {}, lines.length > 1 && legend(lines.map((name, i) => ({name, color: LINE_COLORS[i]}))), svg("svg")));
    });
    box.append(status, controls(checkbox("run_log", "steps on a log scale", {"data-testid": "run-log"})), loss,
      element("div", {class: "row"}, others), picture("run-samples", "Samples",
        () => ({columns: ["step", "text"], rows: run.facts.samples}), samples, "Text that the model generated without a prompt, the newest first."));
    show();
    again();

    function show() {
      status.textContent = describeProgress();
      [loss, ...others].forEach((figure, i) => figure.querySelector("svg").replaceWith(runChart(curves[i], model)));
      samples.replaceChildren(...run.facts.samples.toReversed().map(([step, text]) => element("div", {"data-testid": `run-sample-${step}`},
        element("div", {class: "note"}, `step ${grouped(step)}`), element("div", {class: "token-strip"}, text))));
    }

    function again() {
      if (run.facts.training) setTimeout(refresh, RUN_INTERVAL);
    }

    async function refresh() {
      if (!box.isConnected) return; // another view, or this one again, has replaced it
      const {lines: {length}, facts: {training}} = run;
      await loadRun().catch(() => {}); // the next one may succeed
      if (!box.isConnected) return;
      model.checkpoints = run.facts.checkpoints;
      drawCheckpoints(model);
      if (run.lines.length > length || run.facts.training !== training) show();
      again();
    }
  },
}, {run_log: 0});

function describeProgress() {
  const {training, idle, max_iters: maxIters, stopped_by: stoppedBy} = run.facts, {step, tokens} = run.lines.at(-1);
  const at = maxIters >= step ? `step ${grouped(step)} of ${grouped(maxIters)}` : `step ${grouped(step)}`;
  if (!training) {
    return `${!stoppedBy ? "It was killed" : stoppedBy === "its end" ? "It has ended" : `It was stopped by ${stoppedBy}`} after ${at}.`;
  }
  if (idle > 300) return `After ${at}, nothing was logged for ${grouped(Math.floor(idle / 60))} minutes. Was the run killed?`;
  const speeds = run.lines.map(line => line.tokens_per_second).filter(speed => speed > 0).slice(-20).sort((a, b) => a - b);
  const seconds = (maxIters - step) * tokens / step / speeds[speeds.length >> 1];
  const left = seconds >= 90 ? `${grouped(Math.round(seconds / 60))} minutes` : `${Math.round(seconds)} seconds`;
  return `It is still training: ${at}${seconds > 0 ? `, about ${left} to go` : ""}.`;
}

// The lines of a curve. The evaluation before the first step is left out once there are others: a straight line from
// there would not be the curve.
function seriesOf({names}) {
  return Object.entries(names).map(([name, title], i) => {
    const known = run.lines.filter(line => Number.isFinite(line[name])).map(line => [line.step, line[name]]);
    const points = known.length > 1 ? known.filter(([step]) => step > 0) : known, every = Math.ceil(points.length / RUN_POINTS);
    return {name: title, color: LINE_COLORS[i], width: i ? 2.5 : 1.3, points: points.filter((_, k) => (points.length - 1 - k) % every === 0)};
  }).filter(series => series.points.length);
}

function runChart({id, title, names, height, from}, model) {
  const series = seriesOf({names}), values = series.flatMap(({points}) => points.map(point => point[1]));
  const low = from ?? Math.min(...values), high = Math.max(...values), last = run.lines.at(-1).step, {checkpoints} = run.facts;
  const ticks = checkpoints.filter(step => step <= last).map(step => (
    {name: `checkpoint of step ${step}`, color: "#9aa5b4", points: [[step, low], [step, low + 0.03 * (high - low)]]}));
  const current = state.step < 0 ? model.step : state.step, position = step => state.run_log ? Math.log1p(step) : step;
  const room = roomFor(1200), chart = lineChart([...ticks, ...series], {
    width: id === "run-loss" ? room : room >= 800 ? (room - 60) / 3 : Math.min(room, 400), height, from, logX: state.run_log > 0,
    xTitle: "step", mark: current <= last ? current : undefined,
    click: x => change({step: checkpoints.reduce((a, b) => Math.abs(position(b) - position(x)) < Math.abs(position(a) - position(x)) ? b : a)}),
  });
  chart.setAttribute("aria-label", title);
  return chart;
}
