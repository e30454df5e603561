// The parts of the page, each made of its part of the state.

import { drawTimeline } from "./charts.js";
import { clean, count, digits, draw, flops, make, milliseconds, moment, percent, plural, shape, span, word } from "./text.js";

const LEVELS = { fine: "M14 25l7 7 13-15", degraded: "M24 17v11M24 35v.1", critical: "M17 17l14 14M31 17L17 31" };
const OUTLINES = {
  fine: () => draw("circle", { cx: 24, cy: 24, r: 22, class: "shape" }),
  degraded: () => draw("path", { d: "M24 3L46 43H2Z", class: "shape" }),
  critical: () => draw("path", { d: "M15 2H33L46 15V33L33 46H15L2 33V15Z", class: "shape" }),
};
const JOB_STATES = {
  training: ["well", "well"], waiting: ["warn", "busy"], paused: ["quiet", "idle"],
  finished: ["quiet", "over"], cancelled: ["quiet", "over"], stopped: ["quiet", "over"], failed: ["bad", "bad"],
};
const NODE_STATES = {
  working: ["well", "well"], training: ["well", "well"], joining: ["warn", "busy"], leaving: ["warn", "busy"],
  waiting: ["warn", "busy"], idle: ["quiet", "idle"], spare: ["quiet", "idle"], absent: ["quiet", "idle"],
  lost: ["bad", "bad"],
};
const PHASES = {
  noticed: "until it was noticed", stopped: "until work was stopped",
  regrouped: "until all had met again", first_step: "until the first step",
};
const NODES_MOST = 300; // that are drawn at a time
const PROBLEMS_MOST = 12;
const ALIVE = ["training", "waiting", "paused"];

export function showVerdict(places, verdict) {
  const level = Object.hasOwn(LEVELS, verdict.level) ? verdict.level : "degraded";
  places.card.className = `card verdict ${level}`;
  places.mark.setAttribute("class", `mark ${level}`);
  places.mark.replaceChildren(OUTLINES[level](), draw("path", { d: LEVELS[level], class: "sign" }));
  places.level.textContent = level;
  const [first, ...others] = verdict.problems;
  places.reason.textContent = clean(first ? first.sentence : verdict.reason);
  const rest = others.length - PROBLEMS_MOST;
  places.problems.replaceChildren(
    ...others.slice(0, PROBLEMS_MOST).map((each) => make("li", {}, make("b", {}, clean(each.level, 20)), clean(each.sentence))),
    ...(rest > 0 ? [make("li", { class: "quiet" }, `… and ${count(rest)} more`)] : []),
  );
}

export function showPlan(place, now, plan, atUnix) {
  if (!plan) {
    now.replaceChildren();
    place.textContent = "Nothing is planned: the jobs here were started by hand, or there are none.";
    return;
  }
  const share = plan.waf_flops ? ` of ${flops(plan.waf_flops)} promised, ${percent(plan.achieved_waf_flops / plan.waf_flops)}` : "";
  now.replaceChildren(flops(plan.achieved_waf_flops), make("small", {}, share));
  const made = plan.made_unix_s ? ` Made at ${moment(plan.made_unix_s, atUnix)}.` : "";
  place.replaceChildren(
    make("b", {}, "The plan: "), clean(plan.reason), make("span", { class: "quiet" }, made, " ", clean(plan.overtaken)),
  );
}

// -- jobs -------------------------------------------------------------------------------------------------------------

export function jobsTable(jobs, atUnix) {
  if (!jobs.length) return make("p", { class: "empty" }, "No job is there.");
  const sorted = [...jobs].sort((a, b) => ALIVE.includes(b.state) - ALIVE.includes(a.state));
  const columns = [["Job"], ["State"], ["Nodes", true], ["Step", true], ["Steps/s", true], ["Achieved of promised", true], ["Restarts", true]];
  const rows = sorted.map((job) => jobRow(job, columns.map(([name]) => name), atUnix));
  return tableOf(columns, rows);
}

function jobRow(job, names, atUnix) {
  const [kind, sign] = JOB_STATES[job.state] ?? ["warn", "warn"];
  const isAlive = ALIVE.includes(job.state);
  const weight = job.weight !== null ? `weight ${digits(job.weight)}` : "";
  const generation = job.generation !== null ? `generation ${job.generation}` : "";
  const about = [weight, generation, isAlive ? plural(job.workers ?? 0, "worker", "workers") : ""].filter(Boolean).join(", ");
  const state = job.is_incident_open ? word("recovers", "bad", "bad") : word(job.state, kind, sign);
  const coming = job.joining_nodes ? ` (+${job.joining_nodes})` : "";
  const wanted = job.wanted_nodes !== null ? ` of ${job.wanted_nodes}` : "";
  const ago = job.stepped_unix_s !== null && atUnix - job.stepped_unix_s > 10 ? `${span(atUnix - job.stepped_unix_s)} ago` : "";
  const cells = [
    make("td", { class: "lead named" }, make("div", { class: "name" }, clean(job.job, 120)), make("div", { class: "why" }, about)),
    make("td", {}, make("div", {}, state, job.why ? make("div", { class: "why" }, clean(job.why)) : "")),
    make("td", { class: "number" }, isAlive ? `${job.nodes}${wanted}${coming}` : "–"),
    make("td", { class: "number" }, make("div", {}, count(job.step), ago ? make("div", { class: "why" }, ago) : "")),
    make("td", { class: "number" }, isAlive && job.steps_per_s ? digits(job.steps_per_s) : "–"),
    make("td", { class: "number" }, isAlive ? shareOf(job) : "–"),
    make("td", { class: "number" }, job.restarts_used === null ? "–" : `${job.restarts_used} of ${job.max_restarts}`),
  ];
  cells.forEach((cell, index) => cell.setAttribute("data-label", names[index]));
  return make("tr", { class: isAlive ? null : "over" }, cells);
}

function shareOf(job) {
  if (job.weighted_flops === null) return "–";
  const share = job.of_expected;
  const earned = `${job.is_estimate ? "~" : ""}${flops(job.weighted_flops)}`; // nobody tells what a step computes
  if (share === null) return earned;
  const bar = draw("svg", { viewBox: "0 0 84 10", "aria-hidden": "true" },
    draw("rect", { class: "track", width: 84, height: 10, rx: 3 }),
    draw("rect", { class: share < 0.8 ? "bar low" : "bar", width: Math.min(84, share * 70), height: 10, rx: 3 }),
    draw("path", { class: "goal", d: "M70 0V10" }));
  return make("div", {}, make("div", { class: "share" }, bar, share > 1.05 ? ">100%" : percent(share)), make("div", { class: "why" }, earned));
}

function tableOf(columns, rows) {
  const heads = columns.map(([name, isNumber]) => make("th", { class: isNumber ? "number" : null, scope: "col" }, name));
  const table = make("table", { class: "stacked" }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows));
  return make("div", { class: "scroll" }, table);
}

// -- nodes ------------------------------------------------------------------------------------------------------------

export function showNodes(place, counted, all, filter, atUnix) {
  const nodes = all.filter((node) => !node.is_coordinator || node.state || node.job); // who only coordinates is no node
  const wanted = filter.trim().toLowerCase();
  const shown = nodes.filter((node) => !wanted || [node.host, node.job, node.state, node.health, node.label].join(" ").toLowerCase().includes(wanted));
  const counts = new Map();
  for (const node of nodes) counts.set(stateOf(node), (counts.get(stateOf(node)) ?? 0) + 1);
  const told = [...counts].map(([state, many]) => `${count(many)} ${state}`).join(", ");
  counted.textContent = `${plural(nodes.length, "node", "nodes")}${told ? `: ${told}` : ""}${wanted ? `; ${count(shown.length)} shown` : ""}`;
  const unwell = shown.filter((node) => node.health !== "well");
  const groups = new Map();
  for (const node of shown.filter((each) => each.health === "well").slice(0, NODES_MOST)) {
    groups.set(node.job, [...(groups.get(node.job) ?? []), node]);
  }
  const rest = shown.length - unwell.length - NODES_MOST;
  const names = [...groups.keys()].sort((a, b) => (a === "") - (b === ""));
  place.replaceChildren(
    make("ul", { class: "unwell" }, unwell.slice(0, NODES_MOST).map((node) => unwellLine(node, atUnix))),
    ...names.map((job) => make("div", { class: "group" },
      make("h3", {}, job ? clean(job, 120) : "Without a job"), make("div", { class: "chips" }, groups.get(job).map(chip)))),
    ...(rest > 0 ? [make("p", { class: "empty" }, `… and ${count(rest)} more; the filter finds them.`)] : []),
  );
}

function stateOf(node) {
  return node.health === "well" ? clean(node.state, 30) || "of a job by hand" : clean(node.health, 30);
}

function chip(node) {
  const [kind, sign] = NODE_STATES[node.state] ?? ["quiet", "idle"];
  const does = node.state === "working" || node.state === "training" ? "" : clean(node.state, 30);
  const towards = node.towards ? `to ${clean(node.towards, 60)}` : "";
  const rank = node.rank !== null ? `rank ${node.rank}` : "";
  const about = [does, towards, rank, node.is_coordinator ? "coordinates" : ""].filter(Boolean).join(", ");
  return make("span", { class: `chip is-${kind}`, title: `${clean(node.host, 120)}: ${clean(node.state, 30)}` },
    shape(sign), make("span", { class: "host" }, clean(node.host, 120)), about ? make("small", {}, about) : "");
}

function unwellLine(node, atUnix) {
  const isBad = node.health === "broken";
  const until = node.until_unix_s ? `until ${moment(node.until_unix_s, atUnix)}` : "until it is lifted";
  const does = node.job ? `${clean(node.state, 30)} for ${clean(node.job, 60)}, ` : "";
  return make("li", { class: isBad ? "is-bad" : "is-warn" },
    word(node.health === "draining" ? "drained" : node.health, isBad ? "bad" : "warn", isBad ? "bad" : "warn"), " ",
    make("b", { class: "why" }, clean(node.host, 120)), make("span", { class: "why" }, ` ${clean(node.reason)} `),
    make("span", { class: "quiet" }, `(${does}${until}, by ${clean(node.by, 60)})`));
}

// -- incidents --------------------------------------------------------------------------------------------------------

export function keyOf(incident) {
  return [incident.run_id, incident.host, incident.number, incident.time].map(encodeURIComponent).join("/");
}

// `opened`: the key of the one whose story is told; `open` is called with the key of the one that is pressed.
export function incidentsTable(incidents, opened, atUnix, width, open) {
  if (!incidents.length) return make("p", { class: "empty" }, "Nothing broke since the agents began to tell, in the last day.");
  const columns = [["When"], ["What happened"], ["Severity"], ["Job"], ["To the next step", true]];
  const names = columns.map(([name]) => name);
  const rows = incidents.flatMap((incident) => {
    const key = keyOf(incident);
    const row = incidentRow(incident, names, atUnix, key === opened, () => open(key === opened ? "" : key));
    if (key !== opened) return [row];
    const story = make("td", { class: "wide", colspan: columns.length }, storyOf(incident, atUnix, width));
    return [row, make("tr", {}, story)];
  });
  return tableOf(columns, rows);
}

function incidentRow(incident, names, atUnix, isOpen, press) {
  const [kind, sign] = incident.severity === 1 ? ["bad", "bad"] : incident.severity === 2 ? ["warn", "warn"] : ["quiet", "idle"];
  const button = make("button", { type: "button", class: "row", "aria-expanded": isOpen ? "true" : "false" },
    moment(Date.parse(incident.time) / 1000, atUnix));
  button.addEventListener("click", press);
  const took = incident.is_open ? word("open", "bad", "bad") : milliseconds(incident.total_ms);
  const cells = [
    make("td", { class: "lead" }, button),
    make("td", { class: "wide" }, clean(incident.reason)),
    make("td", {}, word(`SEV${incident.severity}`, kind, sign)),
    make("td", { class: "named" }, clean(incident.run_id, 120)),
    make("td", { class: "number" }, took),
  ];
  cells.forEach((cell, index) => cell.setAttribute("data-label", names[index]));
  return make("tr", {}, cells);
}

function storyOf(incident, atUnix, width) {
  const known = Object.entries(PHASES).map(([name, label]) => [label, incident.phases_ms[name] ?? null]);
  const who = incident.rank === null ? `seen on ${incident.host}, came from another node` : `rank ${incident.rank}, seen on ${incident.host}`;
  const again = incident.micro_batches_recomputed ?? 0;
  const work = incident.micro_batches_reused === null ? null
    : `${plural(incident.micro_batches_reused, "micro-batch", "micro-batches")} reused, ${count(again)} computed again`;
  const facts = [
    ["Where", clean(who)], ["What", `${clean(incident.status, 120)} (SEV${incident.severity})`],
    ["Noticed by", clean(incident.method, 120)], ["Done", clean(`${incident.action || "undecided"}. ${incident.decision}`)],
    ["Work", work], ["In all", milliseconds(incident.total_ms)],
    ["More", `unicron incidents ${clean(incident.run_id, 120)}:${incident.number}, on ${clean(incident.host, 120)}`],
  ].filter(([, value]) => value);
  return make("div", { class: "story" },
    make("h3", {}, "From the fault to the next step"),
    make("div", { class: "line" }, drawTimeline(known, Math.min(width, 736))),
    make("dl", { class: "facts" }, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}
