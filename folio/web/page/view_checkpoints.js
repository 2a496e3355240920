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
    const choice = controls(select("score", Object.keys(HEAD_SCORES), score, score => change({score}),
      {testid: "score"})), picker = headPicker(context);
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
      result.replaceChildren(...ids.length > 1 ? [losses(results)] : [], choice, picker, headScores(results));
    }

    function chartOf(results, chart) {
      const values = results.map(({step}) => step);
      const pick = {values, choose: step => change({step})};
      return {x: "step", logX: true, current: shownStep(), pick, width: 760, ...chart};
    }

    function losses(results) {
      return chartPicture("losses-by-step", chartOf(results, {
        title: "Loss on this text", panels: [{title: "nats per token", height: 190}],
        groups: [oneLine("mean loss", results.map(({facts}) => facts.mean_loss), {x: results.map(({step}) => step)})],
      }));
    }

    function headScores(results) {
      const x = results.map(({step}) => step), selected = context.layer * n_head + context.head;
      const scores = results.map(({tensors}) => tensors[`score_${score}`].data); // by step, then by head
      const heads = Array.from(scores[0], (_, i) => ({
        name: `${Math.floor(i / n_head)}.${i % n_head}`, x, y: scores.map(data => data[i]),
        width: i === selected ? 3 : 1.8,
      }));
      const strongest = heads.toSorted((a, b) => maxAbs(b.y) - maxAbs(a.y));
      const isNamed = (head, i) => i < NAMED_LINES || head === heads[selected];
      const named = strongest.filter(isNamed).map(head =>
        ({name: `head ${head.name}: ${short(head.y.at(-1))}`, lines: [head]}));
      const others = strongest.filter((head, i) => !isNamed(head, i)).map(head => ({...head, width: 1}));
      return chartPicture("scores-by-step", chartOf(results, {
        title: "Head scores", panels: [{title: "", height: 240, from_zero: true}],
        groups: [...named, ...others.length ? [{name: "other heads", color: GRAY, lines: others}] : []],
      }), `${score}: ${HEAD_SCORES[score]}. Named: the ${NAMED_LINES} heads with the highest values at any step and `
        + "the selected head, whose line is thick, with their values at the last step.", heads);
    }
  },
}, {score: "previous"});
