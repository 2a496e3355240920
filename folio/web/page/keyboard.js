// Keyboard access to what the pointer reaches. A list or a grid is one tab stop, in which arrows move.

// Arrows move the focus between the items, as the pointer would enter them. Enter and Space click. first: the tab stop.
// columns: the number of items per row.
function reachByKeys(items, first = 0, columns = 1) {
  items.forEach((item, i) => {
    item.tabIndex = i === clamp(first, 0, items.length - 1) ? 0 : -1;
    handleKeys(item, key => {
      if (key === "Enter" || key === " ") return item.dispatchEvent(new MouseEvent("click", {bubbles: true}));
      const place = {ArrowLeft: i - 1, ArrowRight: i + 1, ArrowUp: i - columns, ArrowDown: i + columns, Home: 0,
        End: items.length - 1}[key];
      if (place === undefined) return false; // another key
      const next = items[place] ?? item;
      item.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      next.dispatchEvent(new PointerEvent("pointerenter"));
    });
  });
  return items;
}

// Arrows move a cursor over the cells of a grid, from `cell` on. move(i, j) is also called when the grid gets the
// focus, and leave() when it loses it. Enter and Space call click(i, j). node.cell is the cursor, for saveFocus().
function reachCells(node, rows, columns, cell, move, leave, click) {
  node.cell = cell;
  onArrows(node, {
    move(right, down) {
      const [i, j] = node.cell;
      node.cell = [clamp(i + down, 0, rows - 1), clamp(j + right, 0, columns - 1)];
      move(...node.cell);
    },
    leave, click: () => click?.(...node.cell),
  });
}

// A drawing, and a line with the tooltip of the part that the arrows have moved to. name: for screen readers.
function withTooltipKeys(drawing, name) {
  const tooltips = [...drawing.querySelectorAll("title")], readout = readoutLine();
  if (!tooltips.length) return drawing;
  const leave = () => {
    drawing.querySelector(".focused")?.classList.remove("focused");
    readout.textContent = "";
  };
  reachCells(drawing, 1, tooltips.length, [0, 0], (_, j) => {
    leave();
    tooltips[j].parentNode.classList.add("focused");
    readout.textContent = tooltips[j].textContent;
  }, leave);
  drawing.setAttribute("aria-label", name);
  return element("div", {}, drawing, readout);
}

// A line for the value under the pointer or the cursor, which screen readers read.
function readoutLine(attributes = {}) {
  return element("div", {class: "readout", "aria-live": "polite", ...attributes});
}
