// Elements, and how numbers and moments are written. What comes from the cluster goes in as text, and never as HTML.

const LONGEST = 400; // characters of a text that somebody else wrote
const SVG = "http://www.w3.org/2000/svg";

// A text from the cluster: bounded, and without what would change the order or the place of what stands beside it.
export function clean(text, longest = LONGEST) {
  const found = String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "\uFFFD");
  return found.length > longest ? `${found.slice(0, longest - 1)}…` : found;
}

// An element with attributes and children; a child that is no element is text.
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const UNITS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

// The unit in which all values up to `most` are written: its factor and its name.
export function flopsUnit(most) {
  const [factor, letter] = UNITS.find(([each]) => most >= each) ?? [1, ""];
  return [factor, `${letter}FLOP/s`];
}

export function digits(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: value >= 1000 ? 4 : 3 });
}

export function flops(value) {
  if (value === null || value === undefined) return "–";
  const [factor, unit] = flopsUnit(value);
  return `${digits(value / factor)} ${unit}`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function plural(value, one, many) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100_000) return span(value / 1000);
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value).toLocaleString("en")} ms` : `${digits(value)} ms`;
}

export function span(seconds) {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${digits(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

export function clock(unixSeconds, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(withSeconds ? { second: "2-digit" } : {}) };
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB", options);
}

// A moment, with its day if that is not the one of `now`.
export function moment(unixSeconds, now) {
  if (!Number.isFinite(unixSeconds)) return "–";
  const [day, today] = [unixSeconds, now].map((each) => new Date(each * 1000).toDateString());
  const date = new Date(unixSeconds * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return day === today ? clock(unixSeconds) : `${date}, ${clock(unixSeconds)}`;
}

// The shapes by which states are told where there is no colour.
const SHAPES = {
  well: () => draw("circle", { cx: 6, cy: 6, r: 5 }),
  busy: () => draw("path", { d: "M6 1A5 5 0 0 1 6 11Z" }),
  idle: () => draw("circle", { cx: 6, cy: 6, r: 4, class: "hollow" }),
  warn: () => draw("path", { d: "M6 0.5L11.7 11H0.3Z" }),
  bad: () => draw("path", { d: "M6 0L12 6L6 12L0 6Z" }),
  over: () => draw("path", { d: "M1 4.5H11V7.5H1Z" }),
};

export function shape(name) {
  const ring = name === "busy" ? draw("circle", { cx: 6, cy: 6, r: 4, class: "hollow" }) : null;
  return draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, ring, SHAPES[name]());
}

// A word with its shape.
export function word(text, kind, shapeName) {
  return make("span", { class: `word is-${kind}` }, shape(shapeName), clean(text, 60));
}
