// The WAF over time, and the timeline of an incident, as SVG.

import { clock, digits, draw, flopsUnit, milliseconds } from "./text.js";

const HEIGHT = 220;
const EDGE = { left: 52, right: 10, top: 12, bottom: 34 };
const STEPS_S = [60, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600];

// Draws into `place`; `read` is told what is under the pointer, "" for nothing. `faults`: unix seconds.
export function drawWaf(place, waf, faults, read) {
  const points = waf.points;
  const known = points.filter(([, , achieved]) => achieved !== null);
  if (known.length < 2 || !known.some(([, plan, achieved]) => plan || achieved)) {
    const words = known.length ? "No job has told what it achieves yet." : "What is known from now on is drawn here.";
    place.replaceChildren(Object.assign(document.createElement("p"), { className: "empty", textContent: words }));
    return;
  }
  const width = Math.max(280, place.clientWidth || 280);
  const end = points[points.length - 1][0];
  const begin = end - Math.min(waf.span_s, Math.max(120, (end - points[0][0]) * 1.02));
  const [most, above] = scaleOf(known);
  const x = (at) => EDGE.left + ((at - begin) / (end - begin)) * (width - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - (value / most) * (HEIGHT - EDGE.top - EDGE.bottom);

  const chart = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": describe(known) });
  chart.append(...valueLines(most, width, y), ...timeMarks(begin, end, width, x));
  const runs = runsOf(points, 2, waf.apart_s);
  for (const run of runs) {
    const line = pathOf(run.map(([at, , achieved]) => [x(at), y(achieved)]));
    const base = y(0);
    chart.append(draw("path", { class: "area", d: `${line}L${x(run.at(-1)[0])} ${base}L${x(run[0][0])} ${base}Z` }));
    chart.append(draw("path", { class: "achieved", d: line }));
  }
  for (const run of runsOf(points, 1, waf.apart_s)) {
    const places = run.map(([at, plan]) => [x(at), plan > most ? EDGE.top : y(plan)]);
    chart.append(draw("path", { class: "planned", d: stairsOf(places) }));
  }
  if (above) chart.append(draw("text", { x: width - EDGE.right, y: EDGE.top - 4, "text-anchor": "end" }, above));
  for (const at of faults.filter((each) => each >= begin && each <= end)) {
    const [where, base] = [x(at), HEIGHT - EDGE.bottom];
    chart.append(draw("path", { class: "fault-line", d: `M${where} ${EDGE.top}V${base}` }));
    chart.append(draw("path", { class: "fault", d: `M${where} ${base - 9}l5.5 9h-11Z` }));
  }
  followPointer(chart, points, { x, y, begin, end, width }, read);
  place.replaceChildren(chart);
}

function describe(known) {
  const [, plan, achieved] = known.at(-1);
  const [factor, unit] = flopsUnit(Math.max(plan ?? 0, achieved));
  const goal = plan === null ? "" : ` of ${digits(plan / factor)} promised`;
  return `WAF over time, now ${digits(achieved / factor)}${goal} ${unit}`;
}

// How high it is drawn, and what is said of plans that are far above: before a job has been measured they are a guess.
function scaleOf(known) {
  const [plans, achieved] = [1, 2].map((column) => known.map((point) => point[column] ?? 0));
  const most = niceMost(Math.max(...achieved, Math.min(Math.max(...plans), 1.5 * Math.max(...achieved, plans.at(-1)))));
  const [factor, unit] = flopsUnit(Math.max(...plans));
  return [most, Math.max(...plans) > most ? `off the scale: promised ${digits(Math.max(...plans) / factor)} ${unit}` : ""];
}

function niceMost(most) {
  const power = 10 ** Math.floor(Math.log10(most * 1.05));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((each) => each * power >= most * 1.05) * power;
}

function valueLines(most, width, y) {
  const [factor, unit] = flopsUnit(most);
  const lines = [draw("text", { x: EDGE.left, y: EDGE.top - 2, dy: -2 }, unit)];
  for (const share of [0, 0.5, 1]) {
    const at = y(most * share);
    lines.push(draw("path", { class: "grid", d: `M${EDGE.left} ${at}H${width - EDGE.right}` }));
    lines.push(draw("text", { x: EDGE.left - 8, y: at + 4, "text-anchor": "end" }, digits((most * share) / factor)));
  }
  return lines;
}

function timeMarks(begin, end, width, x) {
  const apart = STEPS_S.find((each) => (end - begin) / each <= width / 90) ?? STEPS_S.at(-1);
  const offset = new Date(begin * 1000).getTimezoneOffset() * 60;
  const marks = [];
  for (let at = Math.ceil((begin - offset) / apart) * apart + offset; at <= end; at += apart) {
    const where = x(at);
    if (where < EDGE.left + 14 || where > width - 18) continue;
    marks.push(draw("path", { class: "grid", d: `M${where} ${HEIGHT - EDGE.bottom}v5` }));
    marks.push(draw("text", { x: where, y: HEIGHT - EDGE.bottom + 19, "text-anchor": "middle" }, clock(at, false)));
  }
  return marks;
}

// The points without what is not known, cut where somebody else coordinated or nobody looked.
function runsOf(points, column, apart) {
  const runs = [[]];
  let before = null;
  for (const point of points) {
    const isGap = point[column] === null || (before !== null && point[0] - before > 3 * apart);
    if (isGap && runs.at(-1).length) runs.push([]);
    if (point[column] !== null) runs.at(-1).push(point);
    before = point[0];
  }
  return runs.filter((run) => run.length);
}

function pathOf(places) {
  return places.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// A plan counts until the next one.
function stairsOf(places) {
  return places.map(([x, y], index) => (index ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`)).join("");
}

function followPointer(chart, points, scale, read) {
  const cursor = draw("path", { class: "cursor", visibility: "hidden" });
  const dot = draw("circle", { class: "dot", r: 4, visibility: "hidden" });
  chart.append(cursor, dot);
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    dot.setAttribute("visibility", "hidden");
    read("");
  };
  chart.addEventListener("pointermove", (event) => {
    const inside = (event.offsetX - EDGE.left) / (scale.width - EDGE.left - EDGE.right);
    const at = scale.begin + inside * (scale.end - scale.begin);
    const near = points.reduce((best, each) => (Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best));
    const [moment, plan, achieved] = near;
    if (inside < 0 || inside > 1 || achieved === null) return hide();
    const [factor, unit] = flopsUnit(Math.max(plan ?? 0, achieved));
    cursor.setAttribute("d", `M${scale.x(moment)} ${EDGE.top}V${HEIGHT - EDGE.bottom}`);
    dot.setAttribute("cx", scale.x(moment));
    dot.setAttribute("cy", scale.y(achieved));
    cursor.removeAttribute("visibility");
    dot.removeAttribute("visibility");
    const goal = plan === null ? "" : ` of ${digits(plan / factor)} promised`;
    return read(`${clock(moment)}: ${digits(achieved / factor)}${goal} ${unit}`);
  });
  chart.addEventListener("pointerleave", hide);
}

// Each phase as a bar that begins where the one before it ended. `phases`: [what it says, milliseconds or null].
export function drawTimeline(phases, width) {
  const isNarrow = width < 480;
  const [rowHeight, left, right] = isNarrow ? [44, 0, 76] : [28, 214, 92];
  const total = phases.reduce((sum, [, ms]) => sum + (ms ?? 0), 0) || 1;
  const room = Math.max(60, width - left - right);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${phases.length * rowHeight}`, role: "img" });
  let spent = 0;
  phases.forEach(([label, ms], row) => {
    const top = row * rowHeight + (isNarrow ? 20 : 0);
    const middle = top + 15;
    picture.append(draw("text", { x: 0, y: isNarrow ? top - 4 : middle }, label));
    picture.append(draw("rect", { class: "track", x: left, y: top + 4, width: room, height: 14, rx: 3 }));
    if (ms !== null) {
      const [from, long] = [left + (spent / total) * room, Math.max(2.5, (ms / total) * room)];
      const x = Math.min(from, left + room - long);
      picture.append(draw("rect", { class: "phase", x, y: top + 4, width: long, height: 14, rx: 2 }));
      spent += ms;
    }
    const told = ms === null ? "not known" : milliseconds(ms);
    picture.append(draw("text", { x: width, y: middle, "text-anchor": "end", class: ms === null ? "soft" : "" }, told));
  });
  const said = phases.map(([label, ms]) => `${label}: ${ms === null ? "not known" : milliseconds(ms)}`);
  picture.setAttribute("aria-label", `Timeline. ${said.join("; ")}`);
  return picture;
}
