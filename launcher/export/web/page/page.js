// Asks for the state every other second while somebody looks, and shows it. No part of the page comes from elsewhere.

import { drawWaf } from "./charts.js";
import { incidentsTable, jobsTable, showNodes, showPlan, showVerdict } from "./panels.js";
import { clean, clock } from "./text.js";

const STATE_MS = 2000;
const WAF_MS = 5000;
const OLD_MS = 8000; // without a new state, after which it is said how old this one is

const $ = (id) => document.getElementById(id);
const seen = { state: null, waf: null, span: "hour", isSpanNew: true, newAt: 0, drawn: {}, opened: "", wafAt: -WAF_MS };

// -- what is shown ------------------------------------------------------------------------------------------------------

function show(section) {
  const wasShown = !$(section).hidden;
  for (const id of ["sign-in", "elsewhere", "cluster"]) $(id).hidden = id !== section;
  $("sign-out").hidden = section === "sign-in";
  if (section !== "cluster") $("where").textContent = "";
  if (section === "sign-in" && !wasShown) {
    forget();
    $("password").focus();
  }
}

// Who has signed out leaves nothing behind.
function forget() {
  Object.assign(seen, { state: null, waf: null, drawn: {}, isSpanNew: true });
  for (const id of ["verdict-reason", "problems", "waf-now", "waf", "waf-read", "plan", "jobs", "nodes", "nodes-count", "incidents"]) {
    $(id).replaceChildren();
  }
  document.title = "unicron";
}

function live(words, isNow) {
  $("live").textContent = words;
  $("live").classList.toggle("now", isNow);
}

function showTrouble(words) {
  $("trouble").hidden = !words;
  $("trouble").textContent = clean(words);
}

function showState() {
  const state = seen.state;
  const at = state.at_unix_s;
  const coordinator = state.coordinator ? `, coordinated by ${clean(state.coordinator.host, 120)}` : "";
  $("where").textContent = `${clean(state.where, 200)}${coordinator}`;
  document.title = `${state.verdict.level === "fine" ? "" : `${clean(state.verdict.level, 20)}: `}unicron`;
  const places = { card: $("verdict"), mark: $("verdict-mark"), level: $("verdict-level"), reason: $("verdict-reason"), problems: $("problems") };
  showVerdict(places, state.verdict);
  showPlan($("plan"), $("waf-now"), state.plan, at);
  $("jobs").replaceChildren(jobsTable(state.jobs, at));
  if (isNew("nodes", [state.nodes, $("filter").value])) {
    showNodes($("nodes"), $("nodes-count"), state.nodes, $("filter").value, at);
  }
  showIncidents();
}

// Whether a part would look another way than it does: what stays the same stays in place, under a finger as well.
function isNew(part, shown) {
  const text = JSON.stringify(shown);
  if (seen.drawn[part] === text) return false;
  seen.drawn[part] = text;
  return true;
}

function showIncidents() {
  if (!isNew("incidents", [seen.state.incidents, seen.opened, $("incidents").clientWidth])) return;
  const hadFocus = $("incidents").contains(document.activeElement) ? document.activeElement.textContent : null;
  const width = $("incidents").clientWidth;
  $("incidents").replaceChildren(incidentsTable(seen.state.incidents, seen.opened, seen.state.at_unix_s, width, open));
  if (hadFocus !== null) {
    [...$("incidents").querySelectorAll("button")].find((each) => each.textContent === hadFocus)?.focus();
  }
}

function open(key) {
  seen.opened = key;
  history.replaceState(null, "", key ? `#${key}` : "#");
  showIncidents();
}

function showWaf() {
  if (!seen.waf || $("cluster").hidden) return;
  const faults = (seen.state?.incidents ?? []).map((each) => Date.parse(each.time) / 1000);
  drawWaf($("waf"), seen.waf, faults, (words) => { $("waf-read").textContent = words; });
}

// -- what is asked ------------------------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  return [answer.status, await answer.json()];
}

async function poll() {
  try {
    const [status, told] = await ask("/state");
    if (status === 200) {
      take(told);
      await pollWaf();
    } else if (status === 401) {
      live("", false);
      show("sign-in");
    } else if (status === 409) {
      live("", false);
      show("elsewhere");
      $("elsewhere-text").textContent = clean(told.error);
      $("elsewhere-link").hidden = !/^http:\/\/[\w.:%[\]-]+\/$/.test(told.page ?? "");
      if (!$("elsewhere-link").hidden) $("elsewhere-link").setAttribute("href", told.page);
      $("elsewhere-link").textContent = `The page of ${clean(told.host, 120)}`;
    } else {
      lost(told.error ?? `The answer was ${status}.`);
    }
  } catch {
    lost("The process that serves this page does not answer.");
  }
}

function take(told) {
  if (told.state && told.state.at_unix_s !== seen.state?.at_unix_s) {
    seen.state = told.state;
    seen.newAt = performance.now();
  }
  if (!seen.state) return lost(told.trouble);
  const wasHidden = $("cluster").hidden;
  show("cluster");
  showTrouble(told.trouble);
  const isNow = !told.trouble && performance.now() - seen.newAt < OLD_MS;
  live(isNow ? `live, ${clock(seen.state.at_unix_s)}` : `as of ${clock(seen.state.at_unix_s)}`, isNow);
  showState();
  if (wasHidden) showWaf();
  return undefined;
}

async function pollWaf() {
  if (performance.now() - seen.wafAt < WAF_MS && !seen.isSpanNew) return;
  seen.isSpanNew = false;
  seen.wafAt = performance.now();
  const [status, waf] = await ask(`/waf?span=${seen.span}`);
  if (status === 200) {
    seen.waf = waf;
    showWaf();
  }
}

function lost(words) {
  live(seen.state ? `as of ${clock(seen.state.at_unix_s)}` : clean(words), false);
  if (seen.state) showTrouble(`${words} What is shown is old.`);
}

async function send(path, told) {
  return fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(told) });
}

// -- what is pressed ----------------------------------------------------------------------------------------------------

$("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("sign-in-error").textContent = "";
  try {
    const answer = await send("/sign-in", { password: $("password").value });
    if (!answer.ok) $("sign-in-error").textContent = clean((await answer.json()).error);
    else $("password").value = "";
  } catch {
    $("sign-in-error").textContent = "The process that serves this page does not answer.";
  }
  await poll();
});

$("sign-out").addEventListener("click", async () => {
  try {
    await send("/sign-out", {});
  } finally {
    await poll();
  }
});

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    Object.assign(seen, { span: button.dataset.span, isSpanNew: true });
    for (const each of document.querySelectorAll("[data-span]")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
    pollWaf().catch(() => {});
  });
}

$("filter").addEventListener("input", () => seen.state && showState());
window.addEventListener("resize", () => { showWaf(); if (seen.state) showIncidents(); });
window.addEventListener("hashchange", () => { seen.opened = location.hash.slice(1); if (seen.state) showIncidents(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

seen.opened = location.hash.slice(1);
live("asks …", false);
(async () => {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => { setTimeout(done, STATE_MS); });
  }
})();
