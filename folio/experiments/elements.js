// Elements, keys, and files: what all pages with drawings share.

// Create an element. Attributes that are functions become event handlers; testid becomes data-testid. Children that are
// strings become text, never markup.
function element(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

function div(className, ...children) {
  return element("div", {class: className}, ...children);
}

function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function build(node, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if ((value ?? false) !== false) node.setAttribute(name === "testid" ? "data-testid" : name, value);
  }
  node.append(...children.flat(Infinity).filter(child => (child ?? false) !== false));
  return node;
}

function clamp(x, low, high) {
  return Math.max(low, Math.min(high, x));
}

// --- keys ------------------------------------------------------------------------------------------------------------

const ARROWS = {
  ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0],
};

// Arrows move a cursor in a node, which is one tab stop: move(right, down). A focus by a key calls move(0, 0), its end
// leave(); Enter and Space call click().
function onArrows(node, {move, leave, click}) {
  build(node, { // screen readers leave the arrows to an application
    tabindex: 0, role: "application", focus: () => node.matches(":focus-visible") && move(0, 0), blur: leave,
  });
  handleKeys(node, key => {
    if (key === "Enter" || key === " ") return click?.();
    if (!ARROWS[key]) return false;
    move(...ARROWS[key]);
  });
}

// Call action(key). Unless it returns false, the key has no other effect, such as the keys of the page.
function handleKeys(node, action) {
  node.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || action(event.key) === false) return;
    event.preventDefault();
    event.stopPropagation();
  });
}

// --- files -----------------------------------------------------------------------------------------------------------

function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type}));
  element("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const NOT_IN_FILES = ".exports, .controls, .readout, .cursor, .buttons, .picker, .values, .legend [aria-pressed=false]";

// A figure as {text, width, height} of an SVG: its drawings, texts, backgrounds, and lines, where they are on the page.
function figureSvg(figure) {
  figure.classList.add("saved"); // without limits of its height
  const scrolled = [...figure.querySelectorAll("*")].filter(node => node.scrollTop || node.scrollLeft);
  const places = scrolled.map(node => [node.scrollLeft, node.scrollTop]);
  scrolled.forEach(node => node.scrollTo(0, 0)); // sticky table headers move
  const margin = 8, origin = figure.getBoundingClientRect(), nodes = [];
  let width = 0, height = 0;
  const placeOf = box => {
    const place = {x: box.left - origin.left + margin, y: box.top - origin.top + margin};
    width = Math.max(width, place.x + box.width + margin);
    height = Math.max(height, place.y + box.height + margin);
    return {...place, width: box.width, height: box.height};
  };

  function addText(node, {fontFamily, fontSize, fontWeight, color}) {
    const range = document.createRange(), lines = new Map(); // by top
    for (let i = 0; i < node.length; i++) {
      range.setStart(node, i);
      range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.width) continue;
      const line = lines.get(box.top) ?? {box, text: ""};
      lines.set(box.top, {...line, text: line.text + node.data[i]});
    }
    for (const {box, text} of lines.values()) {
      const {x, y, height} = placeOf(box);
      const style = {fontFamily, fontSize, fontWeight, fill: color, whiteSpace: "pre"};
      nodes.push(svg("text", {x, y: y + 0.79 * height, style}, text));
    }
  }

  function add(node) {
    if (node.nodeType === Node.TEXT_NODE) return addText(node, getComputedStyle(node.parentElement));
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!box.width || style.visibility === "hidden" || node.matches(NOT_IN_FILES)) return;
    if (node instanceof SVGSVGElement) {
      const copy = node.cloneNode(true), styled = "text, .grid-row", copies = copy.querySelectorAll(styled);
      node.querySelectorAll(styled).forEach((original, i) => {
        const {font, fill} = getComputedStyle(original);
        Object.assign(copies[i].style, {font, fill});
      });
      return nodes.push(build(copy, placeOf(box), []));
    }
    if (node instanceof HTMLCanvasElement) {
      const image = {...placeOf(box), href: node.toDataURL(), preserveAspectRatio: "none"};
      return nodes.push(svg("image", {...image, style: {imageRendering: "pixelated"}}));
    }
    const fill = style.backgroundColor, line = parseFloat(style.borderBottomWidth);
    if (fill !== "rgba(0, 0, 0, 0)") nodes.push(svg("rect", {...placeOf(box), fill}));
    if (line) {
      const place = placeOf({left: box.left, top: box.bottom - line, width: box.width, height: line});
      nodes.push(svg("rect", {...place, fill: style.borderBottomColor}));
    }
    if (node.matches(".chosen")) nodes.push(svg("rect", {...placeOf(box), fill: "none", stroke: "var(--ink)"}));
    node.childNodes.forEach(add);
  }

  figure.childNodes.forEach(add);
  scrolled.forEach((node, i) => node.scrollTo(...places[i]));
  figure.classList.remove("saved");
  const picture = svg("svg", {width, height}, svg("rect", {width, height, fill: PAPER}), nodes);
  return {text: resolveVariables(new XMLSerializer().serializeToString(picture)), width, height};
}

function saveSvg(name, figure) {
  download(`${name}.svg`, figureSvg(figure).text, "image/svg+xml");
}

// Save a figure with two pixels per pixel of the page.
async function savePng(name, figure) {
  const {text, width, height} = figureSvg(figure), image = new Image();
  const url = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
  image.src = url;
  await image.decode();
  const canvas = element("canvas", {width: 2 * Math.ceil(width), height: 2 * Math.ceil(height)});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  canvas.toBlob(blob => download(`${name}.png`, blob));
}
