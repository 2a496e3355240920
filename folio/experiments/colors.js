// The colors of all pages: palettes for numbers, and the variables of page.css.
//
// `sequential` goes from paper (0) to the darkest color (1), or the lightest in dark mode. It is monotone in luminance.
// `signed` goes from blue (-1) through paper (0) to orange (1): x and -x have the same luminance.

const PALETTES = {
  light: {
    sequential: [[255, 255, 255], [255, 237, 160], [254, 178, 76], [240, 90, 40], [165, 15, 60], [60, 0, 50]],
    signed: [[0, 74, 164], [0, 99, 216], [68, 139, 242], [137, 184, 253], [202, 222, 253], [255, 255, 255],
      [253, 213, 189], [246, 162, 111], [220, 108, 7], [166, 80, 0], [126, 58, 0]],
    missing: [208, 212, 218], // -∞ and NaN
  },
  dark: {
    sequential: [[26, 26, 26], [99, 28, 81], [185, 41, 82], [234, 95, 60], [254, 165, 65], [247, 234, 155]],
    signed: [[165, 201, 253], [113, 167, 247], [73, 129, 212], [43, 89, 156], [29, 53, 88], [26, 26, 26],
      [82, 42, 16], [143, 69, 5], [197, 105, 38], [233, 144, 87], [254, 183, 140]],
    missing: [70, 74, 80],
  },
};
const [BLUE, ORANGE, LIGHT, SOFT, PALE, GRAY, FILL, PAPER, TINT] =
  ["accent", "mark", "light", "soft", "line", "gray", "fill", "paper", "tint"].map(name => `var(--${name})`);
const LINE_COLORS = [BLUE, ORANGE, ...[0, 1, 2, 3, 4, 5].map(i => `var(--line-${i})`)];

const darkMode = matchMedia("(prefers-color-scheme: dark)");
let isPrinting = false; // on white paper

function palette() {
  return PALETTES[darkMode.matches && !isPrinting ? "dark" : "light"];
}

// Call draw() when the palette changes: for dark or light mode, before printing, and after it.
function onNewPalette(draw) {
  darkMode.addEventListener("change", draw);
  for (const event of ["beforeprint", "afterprint"]) {
    window.addEventListener(event, () => {
      isPrinting = event === "beforeprint";
      draw();
    });
  }
}

// The position of a number on a scale, from 0 to 1.
function positionOnScale(scale, x) {
  return Math.max(0, Math.min(1, scale === "signed" ? (x + 1) / 2 : x));
}

function colorAt(scale, position) {
  const stops = palette()[scale], x = position * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2);
  return stops[i].map((c, channel) => Math.round(c + (x - i) * (stops[i + 1][channel] - c)));
}

function colorOf(scale, x) {
  return colorAt(scale, positionOnScale(scale, x));
}

function css(color) {
  return `rgb(${color.join(",")})`;
}

// Black or white, whichever has more contrast by WCAG 2 (at least 4.5).
function textColorOn(color) {
  const [r, g, b] = color.map(c => c <= 10 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const MIN_MARKED = 0.02; // of a signed scale; in print, negative numbers beyond it have a mark

function isMarked(scale, x) {
  return isPrinting && scale === "signed" && x < -MIN_MARKED;
}

// The style of text on the color of a number, or on paper if the number is not finite. A marked number is underlined.
function onColor(scale, x) {
  const color = colorOf(scale, Number.isFinite(x) ? x : 0);
  return {background: css(color), color: textColorOn(color), textDecoration: isMarked(scale, x) ? "underline" : ""};
}

// Replace the variables in the text of an SVG by their values, for a file.
function resolveVariables(text) {
  const variables = getComputedStyle(document.documentElement);
  return text.replace(/var\((--[\w-]+)\)/g, (_, name) => variables.getPropertyValue(name).trim());
}
