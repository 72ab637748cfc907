// What a page does beside links and forms: it works without this script as well.
"use strict";

const root = document.documentElement;
const isLive = root.dataset.live === "on";
const clockSkew = Date.parse(root.dataset.now) - Date.now();
let loadedAt = Date.now();
let failures = 0;
let waitUntil = 0;

// Refreshing: not in a hidden tab, not while text is selected or edited, and slower after errors.

document.addEventListener("htmx:before:request", event => {
  if (event.detail.ctx.sourceEvent?.type !== "every") return;
  const isBusy = document.activeElement?.matches("main input:not([type=checkbox]), main textarea, main select")
    || document.querySelector("main input:checked, dialog[open]") || String(getSelection());
  if (!isLive || document.hidden || isBusy || Date.now() < waitUntil) event.preventDefault();
});

document.addEventListener("htmx:before:swap", event => {
  const { status, raw } = event.detail.ctx.response;
  const failed = status >= 400 || raw.redirected;
  if (failed) event.preventDefault();
  count(failed);
});
document.addEventListener("htmx:after:swap", enhance);
document.addEventListener("htmx:error", () => count(true));

function count(failed) {
  failures = failed ? failures + 1 : 0;
  waitUntil = failed ? Date.now() + Math.min(60_000, 5_000 * 2 ** failures) : 0;
  if (!failed) loadedAt = Date.now();
}

// Ages: the text of <time> follows the clock of the server.

const UNITS = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];

function span(seconds) {
  const [size, unit] = UNITS.find(([size]) => seconds >= size) ?? [1, "s"];
  const amount = seconds / size;
  return `${amount < 9.95 && unit !== "min" && unit !== "s" ? amount.toFixed(1) : Math.round(amount)} ${unit}`;
}

function tick() {
  const now = Date.now() + clockSkew;
  for (const time of document.querySelectorAll("time[data-age]")) {
    const seconds = (now - Date.parse(time.dateTime)) / 1000;
    const text = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
    if (time.textContent !== text) time.textContent = text;
    if (time.title.endsWith(" UTC")) time.title += `, here ${new Date(time.dateTime).toLocaleString()}`;
  }
  const old = Math.round((Date.now() - loadedAt) / 1000);
  const refreshes = document.querySelector('[hx-trigger^="every"]');
  document.getElementById("freshness").textContent = !refreshes ? "" : old < 1 ? "now" : `${span(old)} ago`;
  document.querySelector(".live").classList.toggle("stale", isLive && (failures > 0 || (refreshes && old > 60)));
}
setInterval(() => document.hidden || tick(), 1000);

// Boxes that select all, and buttons that copy.

function enhance() {
  for (const hidden of document.querySelectorAll(".check-all[hidden], .copy[hidden]")) hidden.hidden = false;
  tick();
}

document.addEventListener("change", event => {
  if (event.target.matches("[name=spread]")) {  // the command does what the form does
    const command = document.querySelector(".shell code");
    if (command) command.textContent = command.textContent.replace(/--spread \d+m/, `--spread ${event.target.value}m`);
  }
  if (!event.target.matches(".check-all")) return;
  const boxes = event.target.closest("table").querySelectorAll('tbody input[name="id"]');
  for (const box of boxes) box.checked = event.target.checked;
});

document.addEventListener("click", async event => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const text = button.parentElement.querySelector("pre, .frames, code").textContent;
  const label = button.querySelector("span");
  const before = label.textContent;
  try {
    await navigator.clipboard.writeText(text.trim());
    label.textContent = "Copied";
  } catch {
    label.textContent = "Press Ctrl+C";
    getSelection().selectAllChildren(button.parentElement.querySelector("pre, .frames, code"));
  }
  setTimeout(() => { label.textContent = before; }, 2000);
});

// Keys.

let goesTo = false;

function step(by) {
  const rows = [...document.querySelectorAll("table.list tbody tr")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement?.closest("table.list tbody tr"));
  const row = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  row.tabIndex = -1;
  row.focus();
}

document.addEventListener("keydown", event => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.matches("input:not([type=checkbox]), textarea, select")) {
    if (key === "Escape") target.blur();
    return;
  }
  const row = target.closest("table.list tbody tr");
  if (goesTo) {
    goesTo = false;
    document.querySelector(`.side a[data-key="${CSS.escape(key)}"]`)?.click();
  } else if (key === "g") {
    goesTo = true;
    setTimeout(() => { goesTo = false; }, 1500);
  } else if (key === "/") {
    (document.getElementById("filter") ?? document.querySelector(".top .search input"))?.focus();
    event.preventDefault();
  } else if (key === "j" || key === "k") {
    step(key === "j" ? 1 : -1);
  } else if (key === "x" && row) {
    row.querySelector('input[name="id"]')?.click();
  } else if (key === "Enter" && target === row) {
    row.querySelector("th a, td a")?.click();
  } else if (key === "?") {
    document.getElementById("keys").showModal();
  }
});

enhance();
for (const current of document.querySelectorAll(":is(.side, .tabs) [aria-current]")) current.scrollIntoView({ inline: "nearest", block: "nearest" });
