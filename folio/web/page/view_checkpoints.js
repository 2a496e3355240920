// How a model changes while it learns: numbers about the current text over the checkpoints of its run.

const NAMED_LINES = 5; // heads that are named; the others are gray
const FEW = 5; // checkpoints

defineView({
  id: "checkpoints", title: "While it learned", offered: () => described.models[0].checkpoints.length > 1,
  about: "The loss on this text, and what each head does. Click on a curve to see that checkpoint in all views.",
  async draw(box, context) {
    const {model: {checkpoints}, ids, config: {n_head}} = context, mine = drawing;
    const asked = checkpoints.map(step => question("overview", ids, {step}));
    const score = state.score in HEAD_SCORES ? state.score : "previous", status = controls(), result = element("div");
    const options = {width: roomFor(760), logX: true, xTitle: "step", mark: shownStep(),
      click: step => change({step})};
    const choice = controls(select("score", Object.keys(HEAD_SCORES), score, score => change({score}),
      {testid: "score"}));
    box.append(status, result);
    update();
    collect();

    // Ask for one checkpoint after another, and draw what is there a few times per second. A run that is still training
    // may have removed some.
    async function collect() {
      let drawn = 0, failure;
      for (const one of asked) {
        if (kept(one)) continue;
        if (mine !== drawing) return;
        await ask(one).catch(problem => failure = problem);
        if (mine !== drawing) return;
        if (performance.now() - drawn > 250) update(), drawn = performance.now();
      }
      update();
      if (failure) status.append(errorBox(failure));
    }

    function update() {
      const known = asked.flatMap((one, i) => kept(one) ? [{step: checkpoints[i], ...kept(one)}] : []);
      status.textContent = `${known.length} of ${checkpoints.length} checkpoints`
        + (checkpoints.length < FEW ? "; training with --snapshots=30 keeps more" : "");
      status.dataset.complete = String(known.length === checkpoints.length);
      if (known.length > 1) result.replaceChildren(...ids.length > 1 ? [losses(known)] : [], choice, headScores(known));
    }

    function losses(known) {
      const points = known.map(({step, facts}) => [step, facts.mean_loss]);
      return chartPicture("losses-by-step", "Loss on this text", [{name: "mean loss", points}],
        {...options, yTitle: "nats per token"});
    }

    function headScores(known) {
      const points = i => known.map(({step, tensors}) => [step, tensors[`score_${score}`].data[i]]);
      const heads = Array.from(known[0].tensors[`score_${score}`].data, (_, i) => {
        const layer = Math.floor(i / n_head), head = i % n_head;
        return {
          name: `${layer}.${head}`, points: points(i), color: "#c5ccd6", width: 1,
          selected: layer === context.layer && head === context.head, click: () => change({layer, head}),
        };
      });
      const most = ({points}) => largest(points.map(point => point[1]));
      const strongest = heads.toSorted((a, b) => most(b) - most(a));
      const named = strongest.filter((one, i) => i < NAMED_LINES || one.selected).map((one, i) => {
        Object.assign(one, {color: LINE_COLORS[i], width: one.selected ? 3 : 1.8});
        return {...one, name: `head ${one.name}: ${short(one.points.at(-1)[1])}`};
      });
      return chartPicture("scores-by-step", "What the heads do", heads, {
        ...options, named, height: 280, from: 0,
        note: `${score}: ${HEAD_SCORES[score]}. The ${NAMED_LINES} heads with the highest values and the selected one `
          + "are named, with their last value.",
      });
    }
  },
}, {score: "previous"});
