// Loss and head scores of the current text over the checkpoints of a run.

const NAMED_LINES = 5; // heads with names and colors; the others are gray
const FEW_CHECKPOINTS = 5;

defineView({
  id: "checkpoints", title: "During training", available: () => info.models[0].checkpoints.length > 1,
  about: "The loss on this text and the scores of all heads, over training. Click a curve to select a checkpoint.",
  async draw(box, context) {
    const {model: {checkpoints}, ids, config: {n_head}} = context, current = drawing;
    const questions = checkpoints.map(step => question("overview", ids, {step}));
    const score = state.score in HEAD_SCORES ? state.score : "previous", status = controls(), result = element("div");
    const options = {width: fitWidth(760), logX: true, xTitle: "step", mark: shownStep(),
      click: step => change({step})};
    const choice = controls(select("score", Object.keys(HEAD_SCORES), score, score => change({score}),
      {testid: "score"}));
    box.append(status, result);
    update();
    collect();

    // Ask for one checkpoint after another, and redraw a few times per second. A training run may have removed some.
    async function collect() {
      let updated = 0, failure;
      for (const question of questions) {
        if (cachedAnswer(question)) continue;
        if (current !== drawing) return;
        await ask(question).catch(problem => failure = problem);
        if (current !== drawing) return;
        if (performance.now() - updated > 250) update(), updated = performance.now();
      }
      update();
      if (failure) status.append(errorBox(failure));
    }

    function update() {
      const results = questions.flatMap((question, i) =>
        cachedAnswer(question) ? [{step: checkpoints[i], ...cachedAnswer(question)}] : []);
      const {length} = results, isComplete = length === checkpoints.length;
      status.textContent = `${isComplete ? "" : "Computing: "}${length} of ${checkpoints.length} checkpoints`
        + (checkpoints.length < FEW_CHECKPOINTS ? "; train with --snapshots=30 to save more" : "");
      status.dataset.complete = String(isComplete);
      if (results.length < 2) return;
      result.replaceChildren(...ids.length > 1 ? [losses(results)] : [], choice, headScores(results));
    }

    function losses(results) {
      const points = results.map(({step, facts}) => [step, facts.mean_loss]);
      return chartPicture("losses-by-step", "Loss on this text", [{name: "mean loss", points}],
        {...options, yTitle: "nats per token"});
    }

    function headScores(results) {
      const points = i => results.map(({step, tensors}) => [step, tensors[`score_${score}`].data[i]]);
      const heads = Array.from(results[0].tensors[`score_${score}`].data, (_, i) => {
        const layer = Math.floor(i / n_head), head = i % n_head;
        return {
          name: `${layer}.${head}`, points: points(i), color: GRAY, width: 1,
          selected: layer === context.layer && head === context.head, click: () => change({layer, head}),
        };
      });
      const peak = ({points}) => maxAbs(points.map(point => point[1]));
      const strongest = heads.toSorted((a, b) => peak(b) - peak(a));
      const named = strongest.filter((one, i) => i < NAMED_LINES || one.selected).map((one, i) => {
        Object.assign(one, {color: LINE_COLORS[i], width: one.selected ? 3 : 1.8});
        return {...one, name: `head ${one.name}: ${short(one.points.at(-1)[1])}`};
      });
      return chartPicture("scores-by-step", "Head scores", heads, {
        ...options, named, height: 280, from: 0,
        note: `${score}: ${HEAD_SCORES[score]}. Named: the ${NAMED_LINES} heads with the highest values at any step `
          + "and the selected head, with their values at the last step.",
      });
    }
  },
}, {score: "previous"});
