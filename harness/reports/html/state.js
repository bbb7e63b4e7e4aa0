// What the page knows, what is filtered, and small helpers for elements and numbers.
const data = JSON.parse(document.getElementById("data").textContent);

// What rows and points are compared at: the share removed, or a number of tokens as a negative number.
const at = (one) => (one.keep ? -one.keep : one.ratio);

const rows = (() => {
  const { texts, columns } = data.rows;
  const count = columns.ratio.length;
  const found = new Array(count);
  for (let i = 0; i < count; i++) {
    const row = {};
    for (const key in columns) row[key] = key in texts ? texts[key][columns[key][i]] : columns[key][i];
    row.at = at(row);
    row.words = `${row.curve} ${row.model} ${row.benchmark} ${row.kind} ${row.metric}`.toLowerCase();
    found[i] = row;
  }
  return found;
})();

// The interval of a row, where a panel has its curve.
for (const panel of data.panels) {
  panel.points = new Map();
  for (const curve of panel.curves) for (const point of curve.points) panel.points.set(`${curve.name}@${point.ratio}`, point);
}
const panelOf = new Map(data.panels.map((panel) => [`${panel.model}|${panel.benchmark}|${panel.rule}`, panel]));
for (const row of rows) {
  const panel = panelOf.get(`${row.model}|${row.benchmark}|${row.rule}`);
  const point = panel && panel.points.get(`${row.curve}@${row.ratio}`);
  row.interval = point ? point.score : panel && row.kind === "unpruned" ? panel.full : null;
  row.retention = point && point.retention ? point.retention[0] : null;
  row.kept = point ? point.retention : null;
}

const filters = { model: "", benchmark: "", kind: "", ratio: "", text: "" };

const matches = (row, without = "") =>
  (!filters.model || row.model === filters.model) &&
  (!filters.benchmark || row.benchmark === filters.benchmark) &&
  (!filters.kind || row.kind === filters.kind) &&
  (without === "ratio" || !filters.ratio || row.at === Number(filters.ratio)) &&
  filters.text.toLowerCase().split(/\s+/).every((word) => row.words.includes(word));

// Curves of a panel that the filters let through; words are looked for as in rows.
const curvesOf = (panel) =>
  panel.curves.filter((curve) => matches({
    model: panel.model, benchmark: panel.benchmark, kind: curve.kind,
    words: `${curve.name} ${panel.model} ${panel.benchmark} ${curve.kind} ${panel.metric}`.toLowerCase(),
  }, "ratio"));

const unique = (values) => [...new Set(values)];
const sorted = (values) => unique(values).sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(b)));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const has = (number) => number !== null && number !== undefined;
const percent = (share, digits = 1) => (has(share) ? (100 * share).toFixed(digits) : "–");
const short = (number) => String(Number(number.toPrecision(3)));
const removed = (ratio) => `${short(100 * ratio)} %`;
const amount = (one) => (has(one.keep) ? `${one.keep} tokens kept` : `${removed(one.ratio)} removed`);
const scaled = (metric, value) => (value <= 1.5 ? percent(value) : value.toFixed(1));
// As the terminal prints them.
const bytes = (count) => (!has(count) ? "–" : count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : count >= 2 ** 20 ? `${(count / 2 ** 20).toFixed(2)} MiB` : `${(count / 1024).toFixed(0)} KiB`);
const LEVEL = 0.05; // p-values below it are marked

// Why a part is empty: the filters, or what the rows are.
function nothing(what) {
  const without = what === "row" ? rows.length : what === "curve" ? data.panels.some((panel) => panel.curves.length) : rows.some((row) => row.curve !== "none");
  if (without && Object.values(filters).some(Boolean)) return element("p", { class: "none" }, `No ${what} has all of this. Reset a filter.`);
  const causes = Object.entries(data.left_out).flatMap(([reason, cases]) => cases.map((one) => `${reason}: ${one}`)), kinds = unique(rows.map((row) => row.kind));
  return element("div", { class: "none" }, element("p", {}, `No ${what} can be drawn: ${causes.length ? `${counted(causes, "case")} left out, of which the first are below, all of them under Left out.`
    : kinds.length === 1 && kinds[0] === "unpruned" ? "only the unpruned model ran. A run with method=random,fastv,divprune ratio=0.5,0.9 fills this page." : `the rows are of ${kinds.join(", ")}, which have no curve over tokens removed; see the other parts.`}`),
    element("ul", {}, ...causes.slice(0, 5).map((one) => element("li", {}, one))));
}

const counted = (some, word) => `${some.length} ${word}${some.length === 1 ? "" : "s"}`;
const curveName = (name) => (name === "none" ? "unpruned" : name);
