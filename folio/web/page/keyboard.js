// Keyboard access to what the pointer reaches. A list or a grid is one tab stop, in which arrows move.

const STEPS = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity};
const GRID_STEPS = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

// Arrows move the focus between the items, as the pointer would enter them. Enter and Space click. first: the tab stop.
function reachByKeys(items, first = 0) {
  items.forEach((item, i) => {
    item.tabIndex = i === clamp(first, 0, items.length - 1) ? 0 : -1;
    handleKeys(item, key => {
      if (key === "Enter" || key === " ") return item.dispatchEvent(new MouseEvent("click", {bubbles: true}));
      const next = items[clamp(i + STEPS[key], 0, items.length - 1)];
      if (!next) return false; // another key
      item.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      next.dispatchEvent(new PointerEvent("pointerenter"));
    });
  });
  return items;
}

// Arrows move a cursor over the cells of a grid, from `cell` on. move(i, j) is also called when the grid gets the
// focus, and leave() when it loses it. Enter and Space call click(i, j).
function reachCells(node, rows, columns, cell, move, leave, click) {
  node.setAttribute("tabindex", 0);
  node.setAttribute("role", "application"); // screen readers leave the arrow keys to it
  node.addEventListener("focus", () => node.matches(":focus-visible") && move(...cell));
  node.addEventListener("blur", leave);
  handleKeys(node, key => {
    if (key === "Enter" || key === " ") return click?.(...cell);
    if (!GRID_STEPS[key]) return false;
    const [down, right] = GRID_STEPS[key];
    cell = [clamp(cell[0] + down, 0, rows - 1), clamp(cell[1] + right, 0, columns - 1)];
    move(...cell);
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

// A line for the value under the pointer or the cursor, which screen readers read.
function readoutLine(attributes = {}) {
  return element("div", {class: "readout", "aria-live": "polite", ...attributes});
}
