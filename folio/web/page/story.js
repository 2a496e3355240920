// The story: the frame around its scenes (scenes.js), with the keys and swipes that turn the pages.

function availableScenes() {
  return SCENES.filter(({available = () => true}) => available());
}

const turnPage = pages => () => goToScene(state.story + pages);

function goToScene(scene) {
  const story = clamp(scene, 1, availableScenes().length);
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

let touchStart = null; // where a swipe began

defineView({
  id: "story", title: "The story", about: "", defaultToken: storyToken,
  keys: {ArrowRight: turnPage(1), ArrowLeft: turnPage(-1), p: present, Escape: () => isPresenting() && present(),
    "]": nextHead, "[": previousHead},
  async draw(box, context) {
    const scenes = availableScenes(), number = clamp(state.story, 1, scenes.length), scene = scenes[number - 1];
    const {picture, words, action: [label, act], more = scene.more, start} = await scene.draw(context);
    const place = placeOf(context, scene), thread = drawThread(context, scenes, scene, await context.ask("token",
      {token: context.token}));
    const closer = (view, title) => element("a", {class: "button", href: link({view, ...place})}, title);
    const arrow = (text, title, pages, isOff) => element("button", {
      click: turnPage(pages), disabled: isOff, "aria-label": title, testid: `story-${pages > 0 ? "next" : "back"}`,
    }, text);
    box.classList.add("story");
    box.replaceChildren(
      element("nav", {class: "controls", "aria-label": "Scenes"},
        arrow(["← ", element("span", {}, "Back")], "Back", -1, number === 1),
        scenes.map(({name, title}, i) => element("a", {
          class: "step", href: link({story: i + 1}), title, "aria-label": `${i + 1} ${name}: ${title}`,
          "aria-current": i + 1 === number && "step",
        }, i + 1, element("span", {}, ` ${name}`))),
        arrow([element("span", {}, "Next"), " →"], "Next", 1, number === scenes.length),
        element("a", {class: "button aside", href: link({view: "map", token: context.token})}, "All views"),
        element("button", {click: present, testid: "present", "aria-pressed": String(isPresenting())},
          isPresenting() ? "Exit" : "Present")),
      div("title", element("h2", {}, `${number}. ${scene.title}`), thread),
      div("scene", div("stage", picture), div("words",
        words.filter(Boolean).map(sentence => element("p", {}, sentence)),
        controls(element("button", {class: "chosen", click: act, testid: "story-try"}, label),
          isAvailable(scene.closer) && closer(scene.closer, "Look closer"), more && closer(...more)),
        element("dl", {}, scene.terms(context).map(([term, meaning]) =>
          [element("dt", {}, term), element("dd", {}, meaning)])))));
    box.addEventListener("touchstart", event => {
      touchStart = event.target.closest(".scroll") ? null : event.touches[0];
    }, {passive: true});
    box.addEventListener("touchend", ({changedTouches: [end]}) => {
      if (!touchStart) return;
      const x = end.clientX - touchStart.clientX, y = end.clientY - touchStart.clientY;
      if (Math.abs(x) > 60 && Math.abs(x) > 2 * Math.abs(y)) turnPage(x < 0 ? 1 : -1)();
    });
    requestAnimationFrame(() => {
      start?.();
      if (number === 1) followThread(thread);
    });
  },
}, {story: 1, story_head: 0, story_stage: 0, story_neuron: 0, story_swapped: 0});

// The way of the token through the model, from its label to the expected token: a picture of each state, and below it
// what the logit lens reads in it. Marked: what the scene is about. A click opens the scene of a part.
function drawThread(context, scenes, {id}, answer) {
  const {labels, token, config: {n_layer}} = context, {states, lens_ids: best} = answer.tensors;
  const count = states.shape[0], layer = storyHead(context).layer, [[guess, p]] = expected(answer);
  const width = clamp(Math.floor(THREAD_WIDTH / count) - 15, 6, 48), isLabeled = width > 20;
  const part = (scene, isMarked, name, picture, below) => element("a", {
    href: link({story: 1 + Math.max(0, scenes.findIndex(other => other.id === scene))}), title: name,
    class: isMarked ? "part marked" : "part", "aria-label": name,
  }, picture, element("small", {}, isLabeled ? below : ""));
  const parts = [part("tokens", id === "tokens", `token ${quoted(labels[token])}`, chip(labels[token], ""), "token")];
  for (const s of range(count)) {
    const vector = rowOf(states, s), max = maxAbs(vector), rows = Math.min(8, vector.length);
    const image = imageOf(vector, rows, Math.floor(vector.length / rows), "signed", x => x / max);
    Object.assign(image.style, {width: `${width}px`, height: "2rem"});
    const isMarked = id === "guess" || id === "vector" && s === 0 || id === "neuron" && s === 2 * n_layer
      || ["query", "mask", "values"].includes(id) && s === 2 * layer + 1;
    const scene = s === 0 ? "vector" : s % 2 ? "query" : "neuron", reads = pieces[best.data[s * best.shape[1]]];
    parts.push(part(scene, isMarked, `${stateName(s)}: reads ${quoted(reads)}`, image, visible(reads)));
  }
  parts.push(part("choice", id === "choice", `expects ${quoted(pieces[guess])}`, chip(pieces[guess], ""), percent(p)));
  return element("div", {class: "thread", role: "group", testid: "story-thread", "aria-label":
    `The way of ${quoted(labels[token])} through the model`}, reachByKeys(parts));
}

const THREAD_WIDTH = 620; // of the states, in pixels

// Light the parts one after another.
function followThread(thread) {
  const parts = [...thread.children];
  animate(thread, 1500, t => parts.forEach((part, i) =>
    part.classList.toggle("lit", t < 1 && Math.floor(t * parts.length) === i)));
}

// The token, layer, and head of a scene, for its reference view.
function placeOf(context, {id}) {
  const {token, config: {n_layer}} = context;
  if (id === "neuron") return {token, layer: n_layer - 1};
  if (!["query", "mask", "values"].includes(id)) return {token};
  const {layer, head} = storyHead(context);
  return {token, layer, head};
}
