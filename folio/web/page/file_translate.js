// Translation with a model that was trained on translation prompts: the page writes the prompt.

// parts: elements that persist when the view is drawn again. isNew: translate the phrase when the view is drawn.
const translation = {controller: null, parts: null, isNew: false};

defineView({
  id: "translate", title: "Translate",
  about: "The phrase is put into the prompt format of training, and the model continues it with the most likely "
    + "token at each step. The text above becomes the prompt and the answer, so the other views show both.",
  async draw(box, {model}) {
    const {languages: {pairs, template, examples: [first, ...others]}} = await fileFacts;
    const sources = [...new Set(pairs.map(([source]) => source))];
    const source = sources.includes(state.source) ? state.source : first.source;
    const targets = pairs.filter(pair => pair[0] === source).map(pair => pair[1]);
    const target = [state.target, first.target].find(code => targets.includes(code)) ?? targets[0];
    const phrase = element("input", {
      value: state.phrase || first.text, testid: "phrase", "aria-label": "Phrase", dir: "auto", required: true,
      style: {width: "100%"},
      input: ({target: {value}}) => {
        clearTranslation();
        remember({phrase: value});
      },
    });
    const isFirst = !translation.parts && state.text === info.text; // not a text of a link
    const translatesAtOnce = isFirst || translation.isNew;
    translation.isNew = false;
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
      event?.preventDefault();
      const values = {source, target, text: phrase.value};
      translate(template.replace(/{(\w+)}/g, (_, name) => values[name]), model)
        .catch(({message}) => problem.textContent = message);
    };
    const form = element("form", {submit},
      controls(select("from", sources.map(languageOption), source, source => choose({source}), {testid: "source"}),
        select("to", targets.map(languageOption), target, target => choose({target}), {testid: "target"})),
      phrase,
      controls(element("button", {class: "chosen", testid: "translate"}, "Translate"), stop, note));
    const examples = [first, ...others].map(({text, source, target}) => element("button", {
      type: "button", dir: "auto", click: () => {
        clearTranslation();
        remember({phrase: text, source, target});
        translation.isNew = true;
        draw();
      },
    }, text));
    box.append(form, problem, answer, element("p", {testid: "phrases"},
      "The model knows only what its training pairs taught it. These phrases were held out of the training:"),
    controls(examples));
    if (translatesAtOnce) submit();
  },
}, {source: "", target: "", phrase: ""});

// A language code with its name, for a list.
function languageOption(code) {
  try {
    return [code, new Intl.DisplayNames("en", {type: "language"}).of(code)];
  } catch {
    return [code, code]; // not a language code
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
    if (ids.length >= limit) throw new Error(`The prompt has ${short(ids.length)} tokens; the limit is ${limit - 1}.`);
    const question = {ids, num_samples: 1, temperature: 0, max_new_tokens: limit - ids.length};
    const startTime = performance.now();
    for await (const {samples} of provider.generate(question, signal)) {
      if (state.view !== "translate" || signal.aborted) break;
      const [id, piece, reason] = samples?.[0] ?? [null, "", ending];
      text += piece;
      if (id === null) ending = reason;
      else count++;
      answer.textContent = text.trim();
      const seconds = (performance.now() - startTime) / 1000;
      note.textContent = `${countTokens(count)}, ${short(Math.round(count / seconds))} tokens/s`;
    }
    if (unknown) note.textContent += `; skipped: ${counted(unknown, "character")} not in the vocabulary`;
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    if (translation.controller === controller) stop.disabled = true;
  }
  if (signal.aborted || state.view !== "translate") return;
  if (ending === "max_new_tokens") note.textContent += "; the context is full";
  change({text: prompt + text, ids: "", token: -1});
}
