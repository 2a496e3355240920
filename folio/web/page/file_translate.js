// Translating, with a model that was trained on prompts of two languages: the page writes the prompt.

const translation = {controller: null, parts: null}; // of the one that runs; what stays when the view is drawn again

defineView({
  id: "translate", title: "Translate",
  about: "The phrase becomes a prompt as in training, and the model continues it with the most likely token at each "
    + "step until the text ends. The text above is then the prompt and the answer, so the other views show both.",
  async draw(box, {model}) {
    const {languages: {pairs, template, example}} = await fileFacts;
    const sources = [...new Set(pairs.map(([source]) => source))];
    const source = sources.includes(state.source) ? state.source : example.source;
    const targets = pairs.filter(pair => pair[0] === source).map(pair => pair[1]);
    const target = [state.target, example.target].find(code => targets.includes(code)) ?? targets[0];
    const phrase = element("input", {
      value: state.phrase || example.text, testid: "phrase", "aria-label": "Phrase", dir: "auto", required: true,
      style: {width: "100%"},
      input: ({target: {value}}) => {
        clearTranslation();
        remember({phrase: value});
      },
    });
    const {answer, note, problem, stop} = translation.parts ??= {
      answer: element("p", {testid: "translation", dir: "auto", style: {fontSize: "1.4rem", color: "inherit"}}),
      note: element("output", {testid: "translated"}), problem: element("div", {class: "error", role: "alert"}),
      stop: element("button", {type: "button", testid: "stop", disabled: true,
        click: () => translation.controller?.abort()}, "Stop"),
    };
    const choose = changes => {
      clearTranslation();
      change(changes);
    };
    const submit = event => {
      event.preventDefault();
      const values = {source, target, text: phrase.value};
      translate(template.replace(/{(\w+)}/g, (_, name) => values[name]), model)
        .catch(({message}) => problem.textContent = message);
    };
    const form = element("form", {submit},
      controls(select("from", sources.map(named), source, source => choose({source}), {testid: "source"}),
        select("to", targets.map(named), target, target => choose({target}), {testid: "target"})),
      phrase,
      controls(element("button", {class: "chosen", testid: "translate"}, "Translate"), stop, note));
    box.append(form, problem, answer);
  },
}, {source: "", target: "", phrase: ""});

// A language's code and its name, for a list.
function named(code) {
  try {
    return [code, new Intl.DisplayNames("en", {type: "language"}).of(code)];
  } catch {
    return [code, code]; // it is no code
  }
}

function clearTranslation() {
  translation.controller?.abort();
  const {answer, note, problem} = translation.parts;
  for (const node of [answer, note, problem]) node.textContent = "";
}

async function translate(prompt, {limit}) {
  const {parts: {answer, note, stop}} = translation, controller = new AbortController(), {signal} = controller;
  let text = "", count = 0, ending = "stopped";
  clearTranslation();
  translation.controller = controller;
  stop.disabled = false;
  try {
    const {facts: {ids, unknown}} = await ask({kind: "tokens", text: prompt, whole: true});
    if (ids.length >= limit) throw new Error(`The prompt has ${short(ids.length)} tokens, and the context ${limit}.`);
    const question = {ids, num_samples: 1, temperature: 0, max_new_tokens: limit - ids.length};
    const began = performance.now();
    for await (const {samples} of provider.generate(question, signal)) {
      if (state.view !== "translate" || signal.aborted) break;
      const [id, piece, why] = samples?.[0] ?? [null, "", ending];
      text += piece;
      if (id === null) ending = why;
      else count++;
      answer.textContent = text.trim();
      const seconds = (performance.now() - began) / 1000;
      note.textContent = `${inTokens(count)}, ${short(Math.round(count / seconds))} tokens/s`;
    }
    if (unknown) note.textContent += `; ${unknown} characters are not in the vocabulary, and were left out`;
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    if (translation.controller === controller) stop.disabled = true;
  }
  if (signal.aborted || state.view !== "translate") return;
  if (ending === "max_new_tokens") note.textContent += "; the context is full";
  change({text: prompt + text, ids: "", token: -1});
}
