// Fetches the page again every five seconds and replaces the sections that have changed. What has the focus, what is
// scrolled, and what is selected stays. Without this script the browser loads the whole page again.
"use strict";

const EVERY_MS = 5000;
const FOCUSABLE = "a[href], button, [tabindex]";

function isSelected(section) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && selection.containsNode(section, true);
}

function replace(section, fresh) {
  const focused = [...section.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
  const scrolled = [...section.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  section.replaceWith(fresh);
  fresh.querySelectorAll(".scroll").forEach((each, index) => (each.scrollLeft = scrolled[index] ?? 0));
  if (focused >= 0) fresh.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
}

function show(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html").querySelector("main");
  const main = document.querySelector("main");
  const ids = (of) => [...of.querySelectorAll("section")].map((each) => each.id).join(" ");
  document.querySelector("header").dataset.refreshed = String(Date.now());
  if (ids(main) !== ids(fresh)) {
    main.replaceWith(fresh);
    return;
  }
  for (const section of main.querySelectorAll("section")) {
    const next = fresh.querySelector(`#${CSS.escape(section.id)}`);
    if (!section.isEqualNode(next) && !isSelected(section)) replace(section, next);
  }
}

async function refresh() {
  const silent = document.getElementById("silent");
  try {
    const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok && answer.status !== 404) throw new Error(String(answer.status));
    show(await answer.text());
    silent.hidden = true;
  } catch {
    silent.hidden = false;
  }
  setTimeout(refresh, EVERY_MS);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (button === null) return;
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "copied";
});
if (navigator.clipboard) document.documentElement.classList.add("can-copy");
setTimeout(refresh, EVERY_MS);
