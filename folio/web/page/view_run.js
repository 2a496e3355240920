// The training run: curves and samples, updated while it trains.

const RUN_INTERVAL = 2000; // milliseconds between updates
const MAX_CURVE_POINTS = 1500; // the tables have all points
const RUN_CURVES = [
  ["run-loss", "Loss (nats per token)", {loss: "training", val_loss: "validation"}],
  ["run-lr", "Learning rate", {lr: "learning rate"}],
  ["run-grad_norm", "Gradient norm", {grad_norm: "norm"}],
  ["run-speed", "Speed (tokens per second)", {tokens_per_second: "tokens per second"}],
];
const SMOOTH = new Set(["loss", "grad_norm", "tokens_per_second"]); // can be smoothed

let run = {lines: [], facts: {}}; // one line per logged step

// Add new lines to `run`. If the run was restarted, reload it.
async function loadRun() {
  const {facts, tensors} = await provider.ask({kind: "run", since: run.lines.at(-1)?.step ?? 0});
  const lastStep = run.lines.at(-1)?.step ?? -1;
  if (facts.last < lastStep) {
    run = {lines: [], facts: {}};
    answers.clear(); // steps may now belong to other checkpoints
    return loadRun();
  }
  const lines = range(tensors.step?.data.length ?? 0).map(i =>
    Object.fromEntries(Object.keys(tensors).map(name => [name, tensors[name].data[i]])));
  run = {lines: [...run.lines, ...lines.filter(({step}) => step > lastStep)], facts};
}

// Update the checkpoints. If `follow` is set, select the newest one.
function showCheckpoints(model) {
  model.checkpoints = run.facts.checkpoints;
  const newest = model.checkpoints.at(-1);
  if (state.follow && run.facts.training && newest !== shownStep()) return change({step: newest, follow: 1});
  drawCheckpoints(model);
}

// Notice the new checkpoints of a run that is training, in all views.
async function watchRun() {
  if (!isAvailable("run")) return;
  if (run.facts.training !== false) {
    await provider.ask({kind: "run", since: Number.MAX_SAFE_INTEGER}).then(({facts}) => {
      run.facts = facts;
      showCheckpoints(info.models[0]);
    }).catch(() => {}); // try again
  }
  setTimeout(watchRun, RUN_INTERVAL);
}

defineView({
  id: "run", title: "Training run",
  about: "The metrics of the run, updated while it trains. Gray ticks are checkpoints; click a curve to select one.",
  available: () => info.models[0].step !== null,
  async draw(box, {model}) {
    await loadRun();
    if (!run.lines.length) return box.append("There are no metrics: the run has no metrics.jsonl.");
    const status = element("p", {testid: "run-status", role: "status"});
    const samples = element("div", {class: "scroll", tabindex: 0});
    const curves = RUN_CURVES.filter(([, , names]) => linesOf(names).length);
    const charts = curves.map((curve, i) => lineChart(runChart(curve, i)));
    const figures = curves.map(([id, title, names], i) => {
      const columns = ["step", ...Object.keys(names)];
      const table = () => ({columns, rows: run.lines.map(line => columns.map(name => line[name]))});
      return picture(id, title, table, charts[i]);
    });
    const table = () => ({columns: ["step", "text"], rows: run.facts.samples});
    box.append(status, figures[0], div("pair", figures.slice(1)),
      picture("run-samples", "Samples", table, samples, "Generated without a prompt, newest first."));
    show();
    setTimeout(refresh, RUN_INTERVAL);

    function show() {
      status.textContent = describeProgress();
      charts.forEach((chart, i) => chart.show(runChart(curves[i], i)));
      samples.replaceChildren(...run.facts.samples.toReversed().flatMap(([step, text]) =>
        [div("note", `step ${short(step)}`), div("token-strip", text)]));
    }

    async function refresh() {
      if (!box.isConnected) return; // the view was replaced
      const {lines: {length}, facts: {training}} = run;
      await loadRun().catch(() => {}); // try again at the next update
      if (!box.isConnected) return;
      showCheckpoints(model);
      status.textContent = describeProgress();
      if (run.lines.length !== length || run.facts.training !== training) show();
      setTimeout(refresh, RUN_INTERVAL); // a run that has ended may be resumed or restarted
    }
  },
});

function describeProgress() {
  const {training, idle, max_iters: last, stopped_by: stoppedBy} = run.facts, {step} = run.lines.at(-1);
  const progress = last >= step ? `step ${short(step)} of ${short(last)}` : `step ${short(step)}`;
  const end = stoppedBy === "its end" ? "has finished" : stoppedBy ? `was stopped by ${stoppedBy}` : "was killed";
  if (!training) return `The run ${end} after ${progress}.`;
  return idle > 300 ? `Nothing was logged for ${Math.floor(idle / 60)} minutes after ${progress}. Was the run killed?`
    : `The run is training: ${progress}.`;
}

// The lines of a chart.
function linesOf(names) {
  return Object.entries(names).map(([key, name], i) => {
    const lines = run.lines.filter(line => Number.isFinite(line[key]));
    const stride = Math.ceil(lines.length / MAX_CURVE_POINTS);
    const shown = lines.filter((_, k) => (lines.length - 1 - k) % stride === 0);
    return oneLine(name, shown.map(line => line[key]), {
      x: shown.map(({step}) => step), width: i ? 2.5 : 1.3, points: i > 0, smooth: SMOOTH.has(key),
    });
  }).filter(({lines: [{x}]}) => x.length);
}

function runChart([name, title, names], i) {
  return {
    name, title, x: "step", panels: [{title: "", height: i ? 140 : 270, clip: !i}], groups: linesOf(names),
    width: 1200, current: shownStep(),
    pick: {
      values: run.facts.checkpoints, choose: step => change({step}), tickTitle: step => `checkpoint of step ${step}`,
    },
  };
}
