// Updates a page from its server while runs train. What the reader has chosen in charts stays.

const LIVE_INTERVAL = 3000; // milliseconds
const liveNote = element("span", {role: "status", class: "live"});
let version = ""; // of the shown page

document.querySelector("#top h1").append(" ", liveNote);
setTimeout(refresh, LIVE_INTERVAL);

async function refresh() {
  try {
    if (!document.hidden) await load();
    liveNote.textContent = "live";
    liveNote.title = "updated while the runs train";
  } catch {
    liveNote.textContent = "The server does not answer. Is tools/report.py still running?";
  }
  setTimeout(refresh, LIVE_INTERVAL);
}

async function load() {
  const response = await fetch(location.href, {headers: {"if-none-match": version}});
  if (response.status === 304) return;
  if (!response.ok) throw new Error();
  const text = await response.text();
  version = response.headers.get("etag");
  const next = new DOMParser().parseFromString(text, "text/html"), main = document.querySelector("main");
  document.title = next.title;
  document.querySelector("#top h1").firstChild.textContent = next.title;
  let place = main.firstElementChild; // the next part to be compared
  for (const part of next.querySelectorAll("main > *")) {
    const same = [...main.children].find(old => keyOf(old) === keyOf(part));
    if (!same) {
      main.insertBefore(part, place);
      if (part.matches("figure.chart")) drawFigure(part);
      continue;
    }
    while (place && place !== same) { // parts that are no longer in the page
      const gone = place;
      place = place.nextElementSibling;
      gone.remove();
    }
    place = same.nextElementSibling;
    if (same.matches("figure.chart")) same.show?.(chartOf(part));
    else if (same.innerHTML !== part.innerHTML) same.replaceChildren(...part.childNodes);
  }
  while (place) {
    const gone = place;
    place = place.nextElementSibling;
    gone.remove();
  }
}

// What identifies a part of the page: the name of a chart, a heading, or else the place among parts of its kind.
function keyOf(part) {
  if (part.matches("figure.chart")) return `chart ${part.dataset.name ?? chartOf(part).name}`;
  const heading = part.matches("h2") ? part : part.querySelector(":scope > summary");
  if (heading) return `heading ${heading.textContent}`;
  const before = part.previousElementSibling;
  return before ? `${part.tagName} after ${keyOf(before)}` : part.tagName;
}
