// The story: the view with the machine, the stops that the reader pages through, and the words beside the stage.

const WRITING_PAUSE = 900, TRAINING_PAUSE = 450; // milliseconds between drawn tokens, and between checkpoints

function availableStops() {
  return STOPS.filter(({available = () => true}) => available());
}

const turnPage = pages => () => goToStop(clamp(state.story, 0, availableStops().length - 1) + pages);

function goToStop(number) {
  endSequence();
  const story = clamp(number, 0, availableStops().length - 1);
  if (story !== state.story) location.hash = link({story});
}

const isPresenting = () => document.body.classList.contains("presenting");

// Begin or end to present, in full screen if the browser allows it.
async function present() {
  document.body.classList.toggle("presenting");
  await (isPresenting() ? document.documentElement.requestFullscreen?.() : document.exitFullscreen?.())
    ?.catch(() => {});
  draw();
}

document.addEventListener("fullscreenchange", () => !document.fullscreenElement && isPresenting() && present());

defineView({
  id: "story", title: "The machine", about: "", defaultToken: storyToken,
  keys: {
    ArrowRight: turnPage(1), ArrowLeft: turnPage(-1),
    p: present, Escape: () => isPresenting() ? present() : recenter(),
    "]": nextHead, "[": previousHead,
  },
  async draw(box, pageContext) {
    const context = await contextOfModel(pageContext);
    const stops = availableStops(), number = clamp(state.story, 0, stops.length - 1), stop = stops[number];
    const sheet = await loadSheet(context, stop), scene = await stop.show(context, sheet);
    context.sheet = sheet;
    const roll = isMusic() && await storyRoll(context);
    const place = [stop.id, context.ids, context.token, state.story_head, state.story_model].join(" ");
    box.classList.add("story");
    box.replaceChildren(storyControls(context, stops, number), div("machine",
      storyWords(context, sheet, scene, stop, number, roll), // first for screen readers
      picture("story-machine", sheetTitle(context, sheet), () => sheetTable(context, sheet),
        div("stage", canvasOf(context)))));
    requestAnimationFrame(() => showScene(sheet, scene, place));
  },
}, {story: 0, story_head: 0, story_neuron: 0, story_swapped: 0, story_model: 0, story_step: -1});

function storyControls({token}, stops, number) {
  const arrow = (text, title, pages, isOff) => element("button", {
    click: turnPage(pages), disabled: isOff, "aria-label": title, testid: `story-${pages > 0 ? "next" : "back"}`,
  }, text);
  return element("nav", {class: "controls", "aria-label": "Stops"},
    arrow(["← ", element("span", {}, "Back")], "Back", -1, number === 0),
    stops.map(({name, title}, i) => element("a", {
      class: "step", href: link({story: i}), title, "aria-label": `${i} ${name}: ${title}`,
      "aria-current": i === number && "step",
    }, i, element("span", {}, ` ${name}`))),
    arrow([element("span", {}, "Next"), " →"], "Next", 1, number === stops.length - 1),
    stageButton("▶", "Play", replay, "machine-play"), stageButton("⤢", "Whole sheet", showWhole, "machine-whole"),
    element("a", {class: "button aside", href: link({view: "map", token})}, "All views"),
    element("button", {click: present, testid: "present", "aria-pressed": String(isPresenting())},
      isPresenting() ? "Exit" : "Present"));
}

function storyWords(context, sheet, scene, stop, number, roll) {
  const {words, action: [label, act], more = stop.more, extra = ""} = scene, place = placeOf(context, stop);
  const [what, difference, size] = scene.act?.check ?? [];
  const closer = (view, title) => !shownModel() && // the views show the first model
    element("a", {class: "button", href: link({view, ...place})}, title);
  return div("words", element("h2", {}, `${number ? `${number}. ` : ""}${stop.title}`), modelSwitch(),
    words.filter(Boolean).map(sentence => element("p", {}, sentence)), extra,
    what ? checkLine(what, difference, size) : "",
    controls(element("button", {class: "chosen", click: act, testid: "story-try"}, label),
      isAvailable(stop.closer) && closer(stop.closer, "Look closer"), more && closer(...more)),
    readoutLine({testid: "machine-readout", id: "machine-readout"}), roll,
    element("details", {class: "terms"}, element("summary", {}, "The terms"), element("dl", {},
      stop.terms(context).map(([term, meaning]) => [element("dt", {}, term), element("dd", {}, meaning)]))),
    element("details", {}, element("summary", {}, "The pass in words"),
      element("ol", {testid: "machine-list"}, passInWords(context, sheet).map(text => element("li", {}, text)))));
}

// The notes of a piece up to the followed event, which is framed on the piano roll.
async function storyRoll({ask, token}) {
  const {facts} = await ask("notes", {token}), {drawing, X} = drawRoll(facts, () => {});
  const scroll = build(scrolling(drawing), {tabindex: 0, role: "group", "aria-label": "Piano roll"});
  requestAnimationFrame(() => scroll.scrollLeft = X(facts.time) - scroll.clientWidth / 2);
  return scroll;
}

// With two models, a sentence that says which one is shown, and a button that shows the other one.
function modelSwitch() {
  if (info.models.length < 2) return "";
  const index = shownModel();
  return controls(element("span", {testid: "shown-model"}, `This is ${info.models[index].name}.`), element("button", {
    testid: "switch-model", click: () => change({story_model: 1 - index}),
  }, `Show ${info.models[1 - index].name}`));
}

// The token, layer, and head of a stop, for its reference view.
function placeOf(context, {id}) {
  const {token, config: {n_layer}} = context;
  if (id === "neuron") return {token, layer: n_layer - 1};
  if (!["query", "mask", "values"].includes(id)) return {token};
  const {layer, head} = storyHead(context);
  return {token, layer, head};
}

// --- sequences -------------------------------------------------------------------------------------------------------

let sequence = 0; // number of the running sequence (writing or training); a new one, a key, or a press ends it

function endSequence() {
  sequence++;
}

const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));

// Draw tokens and append them, until a key, a press, or the end of the text.
async function writeOn() {
  const current = ++sequence;
  while (current === sequence && state.view === "story" && machine.context) {
    const {ids, model} = machine.context;
    if (ids.length >= model.limit && !model.can_slide) break;
    if (!await appendDrawn(machine.context, machine.context.sheet)) break; // a hidden page renders nothing
    await pause(WRITING_PAUSE);
  }
}

// Append the drawn token and follow it. Return whether the text goes on.
async function appendDrawn(context, {chosen}) {
  if (chosen === context.model.eot) return false;
  const ids = appended(context.ids.slice(0, context.token + 1), chosen, context.model);
  await change({ids: ids.join(","), token: ids.length - 1, loop_step: drawnSteps(context) + 1});
  return true;
}

// Show one checkpoint, or recorded step, after another.
async function playTraining() {
  const current = ++sequence, {checkpoints, training} = info.models[0];
  const changes = isRecorded() ? training.steps.map((_, i) => ({story_step: i})) : checkpoints.map(step => ({step}));
  for (const fields of changes) {
    if (current !== sequence || state.view !== "story") return;
    await change(fields);
    await pause(TRAINING_PAUSE);
  }
}

document.addEventListener("keydown", endSequence, true);
document.addEventListener("pointerdown", () => {
  endSequence();
  if (machine.isOverture) endMotion();
}, true);

// A swipe beside the stage turns the page.
let touchStart = null;
document.addEventListener("touchstart", event => {
  touchStart = state.view === "story" && event.target.closest(".words") ? event.touches[0] : null;
}, {passive: true});
document.addEventListener("touchcancel", () => touchStart = null);
document.addEventListener("touchend", ({changedTouches: [end]}) => {
  if (!touchStart) return;
  const x = end.clientX - touchStart.clientX, y = end.clientY - touchStart.clientY;
  if (Math.abs(x) > 60 && Math.abs(x) > 2 * Math.abs(y)) turnPage(x < 0 ? 1 : -1)();
});
