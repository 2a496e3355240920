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
  keys: {ArrowRight: turnPage(1), ArrowLeft: turnPage(-1), PageDown: turnPage(1), PageUp: turnPage(-1), p: present,
    Escape: () => isPresenting() && present(),
    "]": nextHead, "[": previousHead},
  async draw(box, context) {
    const scenes = availableScenes(), number = clamp(state.story, 1, scenes.length), scene = scenes[number - 1];
    const {picture, words, action: [label, act], more = scene.more, start} = await scene.draw(context);
    const place = placeOf(context, scene);
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
      element("h2", {}, `${number}. ${scene.title}`),
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
    if (start) requestAnimationFrame(start);
  },
}, {story: 1, story_head: 0, story_stage: 0, story_neuron: 0, story_swapped: 0});

// The token, layer, and head of a scene, for its reference view.
function placeOf(context, {id}) {
  const {token, config: {n_layer}} = context;
  if (id === "neuron") return {token, layer: n_layer - 1};
  if (!["query", "mask", "values"].includes(id)) return {token};
  const {layer, head} = storyHead(context);
  return {token, layer, head};
}
