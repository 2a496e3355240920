"use strict";
// How a model changes while it learns: numbers about the current text over the checkpoints of its run.

const NAMED_LINES = 5; // heads that are named; the others are gray

defineView({
  id: "checkpoints", title: "While it learned", offered: () => described.models[0].checkpoints.length > 1,
  about: "The loss on this text, and what each head does with it, at every checkpoint of the run. Click into a curve to see "
    + "that checkpoint in all views.",
  async draw(box, context) {
    const {model, ids} = context, {checkpoints} = model, mine = drawing;
    const asked = checkpoints.map(step => question("overview", ids, {step}));
    const progress = element("progress", {max: checkpoints.length, "aria-label": "Checkpoints that were read"});
    const status = element("div", {class: "controls", "data-testid": "checkpoints-progress"}), result = element("div");
    const score = state.score in HEAD_SCORES ? state.score : "previous";
    const choice = element("select", {"data-testid": "score", change: event => change({score: event.target.value})},
      Object.keys(HEAD_SCORES).map(name => element("option", {value: name, selected: name === score}, name)));
    box.append(status, result);
    update();
    collect();

    // Ask for one checkpoint after another, and draw what is there a few times per second.
    async function collect() {
      let drawn = 0;
      for (const one of asked) {
        if (kept(one)) continue;
        while (document.body.dataset.drawn < mine && mine === drawing) await new Promise(resolve => setTimeout(resolve, 20));
        if (mine !== drawing) return;
        const failed = await ask(one).then(() => null, problem => problem);
        if (mine !== drawing) return;
        if (failed) return status.replaceChildren(element("span", {class: "error", role: "alert"}, failed.message));
        if (performance.now() - drawn > 250) update(), drawn = performance.now();
      }
      update();
    }

    function update() {
      const known = asked.flatMap((one, i) => kept(one) ? [{step: checkpoints[i], ...kept(one)}] : []);
      progress.value = known.length;
      status.replaceChildren(...known.length < checkpoints.length ? [progress] : [],
        `${known.length} of ${checkpoints.length} checkpoints`);
      status.dataset.complete = String(known.length === checkpoints.length);
      result.replaceChildren(...known.length > 1 ? [...ids.length > 1 ? [losses(known)] : [], headScores(known)] : []);
    }

    function chart(lines, options) {
      const current = state.step < 0 ? model.step : state.step;
      return element("div", {class: "scroll"}, lineChart(lines, {
        width: roomFor(760), logX: true, xTitle: "step (logarithmic)", mark: current, click: step => change({step}), ...options,
      }));
    }

    function losses(known) {
      const points = known.map(({step, facts}) => [step, facts.mean_loss]), best = points.reduce((a, b) => b[1] < a[1] ? b : a);
      return picture("losses-by-step", "Loss on this text", () => ({columns: ["step", "mean loss"], rows: points}),
        chart([{name: "mean loss", points}], {yTitle: "nats per token"}),
        `Lowest: ${short(best[1])} nats at step ${best[0].toLocaleString("en-US")}.`);
    }

    function headScores(known) {
      const heads = Array.from({length: context.config.n_layer * context.config.n_head}, (_, i) => {
        const layer = Math.floor(i / context.config.n_head), head = i % context.config.n_head;
        return {layer, head, points: known.map(({step, tensors}) => [step, tensors[`score_${score}`].data[i]])};
      });
      const most = ({points}) => points.reduce((highest, [, y]) => Math.max(highest, y), -Infinity);
      const order = [...heads].sort((a, b) => most(b) - most(a));
      const isSelected = ({layer, head}) => layer === context.layer && head === context.head;
      const shown = [...order.slice(0, NAMED_LINES), ...order.slice(NAMED_LINES).filter(isSelected)].map((one, i) => ({
        ...one, color: LINE_COLORS[i], width: isSelected(one) ? 3 : 1.8, name: `layer ${one.layer} head ${one.head}: ${short(one.points.at(-1)[1])}`,
        selected: isSelected(one), click: () => change({layer: one.layer, head: one.head}),
      }));
      const others = order.filter(one => !shown.some(({layer, head}) => layer === one.layer && head === one.head))
        .map(one => ({...one, color: "#c5ccd6", width: 1, name: `layer ${one.layer} head ${one.head}`}));
      return picture("scores-by-step", `What the heads do: ${score}`, () => ({
        columns: ["step", ...heads.map(({layer, head}) => `${layer}.${head}`)],
        rows: known.map(({step}, i) => [step, ...heads.map(({points}) => points[i][1])]),
      }), element("div", {}, element("div", {class: "controls"}, element("label", {}, "score ", choice), HEAD_SCORES[score]),
        legend(shown), chart([...others.reverse(), ...shown.reverse()], {height: 280, from: 0})),
      `A line is a head. The ${NAMED_LINES} with the highest values and the selected one are named, with their value at the last step.`);
    }
  },
}, {score: "previous"});
