// The run of the model: its curves and samples, also while it trains.

const RUN_INTERVAL = 2000; // milliseconds between two questions about the run
const RUN_POINTS = 1500; // of a curve, at most; the tables have all of them
const RUN_CURVES = [
  ["run-loss", "Loss (nats per token)", {loss: "training", val_loss: "validation"}],
  ["run-lr", "Learning rate", {lr: "learning rate"}],
  ["run-grad_norm", "Norm of the gradient", {grad_norm: "norm"}],
  ["run-speed", "Speed (tokens per second)", {tokens_per_second: "tokens per second"}],
];

let run = {lines: [], facts: {}}; // what is known about the run: a line for each logged step

// Add what is new to `run`. A run that was started again has fewer steps than are known.
async function loadRun() {
  const {facts, tensors} = await provider.ask({kind: "run", since: run.lines.at(-1)?.step ?? 0});
  const known = run.lines.at(-1)?.step ?? -1;
  if (facts.last < known) {
    run = {lines: [], facts: {}};
    answers.clear(); // other checkpoints have the same steps now
    return loadRun();
  }
  const lines = upTo(tensors.step?.data.length ?? 0).map(i =>
    Object.fromEntries(Object.keys(tensors).map(name => [name, tensors[name].data[i]])));
  run = {lines: [...run.lines, ...lines.filter(({step}) => step > known)], facts};
}

defineView({
  id: "run", title: "The run",
  about: "What the run has logged, also while it trains. Gray ticks are checkpoints; click on a curve to see one.",
  offered: () => described.models[0].step !== null,
  async draw(box, {model}) {
    await loadRun();
    if (!run.lines.length) return box.append("There are no numbers of a run: no metrics.jsonl beside the checkpoint.");
    const status = element("p", {testid: "run-status", role: "status"}), samples = scrolling();
    const curves = RUN_CURVES.filter(([, , names]) => seriesOf(names).length);
    const figures = curves.map(([id, title, names]) => {
      const columns = ["step", ...Object.keys(names)];
      return picture(id, title, () => ({columns, rows: run.lines.map(line => columns.map(name => line[name]))}),
        element("div", {}, legend(seriesOf(names)), svg("svg")));
    });
    const table = () => ({columns: ["step", "text"], rows: run.facts.samples});
    box.append(status, figures[0], div("row", figures.slice(1)),
      picture("run-samples", "Samples", table, samples, "Generated without a prompt, the newest first."));
    show();
    setTimeout(refresh, RUN_INTERVAL);

    function show() {
      status.textContent = describeProgress();
      figures.forEach((figure, i) => figure.querySelector("svg").replaceWith(runChart(i, curves[i][2])));
      samples.replaceChildren(...run.facts.samples.toReversed().flatMap(([step, text]) =>
        [div("note", `step ${short(step)}`), div("token-strip", text)]));
    }

    async function refresh() {
      if (!box.isConnected) return; // another view, or this one again, has replaced it
      const {lines: {length}, facts: {training}} = run;
      await loadRun().catch(() => {}); // the next one may succeed
      if (!box.isConnected) return;
      model.checkpoints = run.facts.checkpoints;
      drawCheckpoints(model);
      status.textContent = describeProgress();
      if (run.lines.length !== length || run.facts.training !== training) show();
      setTimeout(refresh, RUN_INTERVAL); // a run that has ended may be resumed, or started again
    }
  },
});

function describeProgress() {
  const {training, idle, max_iters: last, stopped_by: stoppedBy} = run.facts, {step} = run.lines.at(-1);
  const at = last >= step ? `step ${short(step)} of ${short(last)}` : `step ${short(step)}`;
  const end = stoppedBy === "its end" ? "has ended" : stoppedBy ? `was stopped by ${stoppedBy}` : "was killed";
  if (!training) return `It ${end} after ${at}.`;
  return idle > 300 ? `After ${at}, nothing was logged for ${Math.floor(idle / 60)} minutes. Was the run killed?`
    : `It is still training: ${at}.`;
}

// The lines of a curve. The evaluation before the first step is left out once there are others: a straight line from
// there would not be the curve.
function seriesOf(names) {
  return Object.entries(names).map(([name, title], i) => {
    const known = run.lines.filter(line => Number.isFinite(line[name])).map(line => [line.step, line[name]]);
    const points = known.length > 1 ? known.filter(([step]) => step > 0) : known;
    const every = Math.ceil(points.length / RUN_POINTS);
    return {name: title, color: LINE_COLORS[i], width: i ? 2.5 : 1.3,
      points: points.filter((_, k) => (points.length - 1 - k) % every === 0)};
  }).filter(series => series.points.length);
}

function runChart(i, names) {
  const series = seriesOf(names), values = series.flatMap(({points}) => points.map(point => point[1]));
  const from = i ? 0 : Math.min(...values), high = Math.max(...values);
  const last = run.lines.at(-1).step, {checkpoints} = run.facts;
  const ticks = checkpoints.filter(step => step <= last).map(step => ({
    name: `checkpoint of step ${step}`, color: "#9aa5b4", points: [[step, from], [step, from + 0.03 * (high - from)]],
  }));
  const current = shownStep(), room = roomFor(1200);
  return lineChart([...ticks, ...series], {
    width: !i ? room : room >= 800 ? (room - 60) / 3 : Math.min(room, 400), height: i ? 190 : 320, from, xTitle: "step",
    mark: current <= last ? current : undefined,
    click: x => change({step: checkpoints.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a)}),
  });
}
