// Translating, with a model that was trained on prompts of two languages: the page writes the prompt.

defineView({
  id: "translate", title: "Translate",
  about: "The phrase becomes a prompt as in training, and the model continues it with the most likely tokens until the "
    + "end of the text.",
  async draw(box, {model}) {
    const {languages: {pairs, template, example}} = await fileFacts;
    const sources = [...new Set(pairs.map(([source]) => source))];
    const source = sources.includes(state.source) ? state.source : example.source;
    const targets = pairs.filter(pair => pair[0] === source).map(pair => pair[1]);
    const target = targets.includes(state.target) ? state.target
      : targets.includes(example.target) ? example.target : targets[0];
    const answer = element("output", {class: "sample-scroll", testid: "translation", dir: "auto"});
    const note = div("note"), problem = element("div", {class: "error", role: "alert"});
    const phrase = element("input", {
      value: state.phrase || example.text, testid: "phrase", "aria-label": "Phrase", dir: "auto",
      style: {width: "100%"}, input: ({target: {value}}) => remember({phrase: value}),
    });
    const inside = element("a", {hidden: true, testid: "look-inside"}, "Look inside");
    let controller = null;
    const stop = element("button", {type: "button", testid: "stop", click: () => controller?.abort()}, "Stop");
    box.append(element("form", {submit: event => {
      event.preventDefault();
      translate().catch(({message}) => problem.textContent = message);
    }},
    controls(select("from", sources, source, source => change({source}), {testid: "source"}),
      select("to", targets, target, target => change({target}), {testid: "target"})), phrase,
    controls(element("button", {class: "chosen", testid: "translate"}, "Translate"), stop, note)),
    problem, answer, inside);

    async function translate() {
      controller?.abort();
      const mine = controller = new AbortController(), {signal} = mine, began = performance.now();
      const values = {source, target, text: phrase.value};
      const prompt = template.replace(/{(\w+)}/g, (_, name) => values[name]);
      let text = "", count = 0, why = "";
      problem.textContent = "";
      inside.hidden = true;
      const {facts: {ids, unknown}} = await ask({kind: "tokens", text: prompt, whole: true});
      const question = {ids, num_samples: 1, temperature: 0, max_new_tokens: Math.max(1, model.limit - ids.length)};
      try {
        for await (const {samples} of provider.generate(question, signal)) {
          if (!samples?.[0] || signal.aborted) continue;
          const [id, piece, ending] = samples[0];
          text += piece;
          if (id === null) why = ending;
          else count++;
          answer.textContent = text.trim();
        }
      } catch (error) {
        if (!signal.aborted) throw error;
        why = "stopped";
      }
      if (mine !== controller) return;
      const rate = count / (performance.now() - began) * 1000;
      note.textContent = `${short(count)} tokens, ${short(Math.round(rate))} tokens/s`
        + `${why === "max_new_tokens" ? ", ended by the end of the context" : why === "stopped" ? ", stopped" : ""}`
        + `${unknown ? `; ${unknown} characters are not in the vocabulary, and were left out` : ""}`;
      inside.href = link({view: "looking-back", text: prompt + text, ids: "", token: -1});
      inside.hidden = !("looking-back" in views);
    }
  },
}, {source: "", target: "", phrase: ""});
