// Plots as SVG: axes, bands, lines with dashes and markers, and names beside the ends of lines.
const INK = "#222222", GRID = "#e6e6e6", AXIS = "#999999";

const MARKS = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  "^": (r) => `M0,${-1.2 * r}L${1.15 * r},${r}H${-1.15 * r}z`,
  v: (r) => `M0,${1.2 * r}L${1.15 * r},${-r}H${-1.15 * r}z`,
  "<": (r) => `M${-1.2 * r},0L${r},${-1.15 * r}V${1.15 * r}z`,
  ">": (r) => `M${1.2 * r},0L${-r},${-1.15 * r}V${1.15 * r}z`,
  D: (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
  P: (r) => `M${-r / 2.4},${-1.2 * r}h${r / 1.2}v${r / 1.2}h${r / 1.2}v${r / 1.2}h${-r / 1.2}v${r / 1.2}h${-r / 1.2}v${-r / 1.2}h${-r / 1.2}v${-r / 1.2}h${r / 1.2}z`,
  X: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
};

// Words in the colour of a curve, darker: 4.5 to 1 on white.
const wordColour = (colour) => `#${[1, 3, 5].map((at) => Math.round(0.66 * parseInt(colour.slice(at, at + 2), 16)).toString(16).padStart(2, "0")).join("")}`;

// Room for names beside a plot, and the letters that fit; the whole name is in the title of each mark.
const END = 150, LETTERS = Math.floor((END - 22) / 6.6);
const cut = (name) => (name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name);

const lookOf = (name) => data.styles[name] || { color: INK, dashes: [], marker: "o", control: true };

function marker(look, x, y, r = 4) {
  const cross = look.marker === "X";
  return svg("path", {
    d: MARKS[look.marker](r), transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    fill: look.control ? "#ffffff" : look.color, stroke: look.color, "stroke-width": cross ? 2 : 1.2,
  });
}

function legendOf(names, extra = []) {
  const entries = names.map((name) => {
    const look = lookOf(name);
    const sample = svg("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" },
      svg("path", { d: "M1,6H33", stroke: look.color, "stroke-width": 1.8, "stroke-dasharray": look.dashes.map((d) => 1.8 * d).join(" ") }),
      marker(look, 17, 6, 3.6));
    return element("span", {}, sample, curveName(name));
  });
  return element("div", { class: "legend" }, ...entries, ...extra);
}

function ticks(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(Number(t.toPrecision(10)));
  return found;
}

// Positions near the wanted ones, in their order, at least `gap` apart, between `low` and `high` where they fit.
function spread(wanted, gap, low, high) {
  const placed = wanted.slice();
  for (let i = 0; i < placed.length; i++) placed[i] = Math.max(placed[i], i ? placed[i - 1] + gap : low);
  for (let i = placed.length - 1; i >= 0; i--) placed[i] = Math.min(placed[i], i < placed.length - 1 ? placed[i + 1] - gap : high);
  return placed;
}

// options: width, lines [{name, points: [{x, y, low, high, title}]}], xs {low, high, log, ticks, label}, label of y,
// full {value, low, high}, front [[x, y]], join (whether points are joined), names (whether lines are named).
function plot(options) {
  const width = Math.max(320, Math.min(720, options.width)), named = options.names !== false;
  const right = named ? Math.min(END, 22 + 6.6 * Math.max(8, ...options.lines.map((line) => curveName(line.name).length))) : 14;
  const box = { left: 46, right: width - right, top: 12, bottom: Math.max(220, 14 * (options.lines.length + 2)) };
  const height = box.bottom + 40;
  const ys = options.lines.flatMap((line) => line.points.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]));
  if (options.full) ys.push(options.full[1], options.full[2]);
  let bottom = Math.min(...ys), top = Math.max(...ys);
  const pad = Math.max(0.06 * (top - bottom), 0.5);
  bottom -= pad; top += pad;
  const { xs } = options, log = xs.log ? Math.log : (v) => v;
  const x = (v) => box.left + 10 + (box.right - box.left - 20) * (log(v) - log(xs.low)) / ((log(xs.high) - log(xs.low)) || 1);
  const y = (v) => box.bottom - (box.bottom - box.top) * (v - bottom) / (top - bottom);
  const made = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.title });
  for (const t of ticks(bottom, top, 6)) {
    made.append(svg("path", { d: `M${box.left},${y(t)}H${box.right}`, stroke: GRID }),
      text(box.left - 6, y(t) + 4, short(t), "end"));
  }
  for (const t of xs.ticks) {
    made.append(svg("path", { d: `M${x(t.at)},${box.bottom}v4`, stroke: AXIS }), text(x(t.at), box.bottom + 16, t.text, "middle"));
  }
  made.append(svg("path", { d: `M${box.left},${box.top}V${box.bottom}H${box.right}`, stroke: AXIS, fill: "none" }),
    text((box.left + box.right) / 2, box.bottom + 34, xs.label, "middle"));
  if (options.full) {
    const [value, low, high] = options.full;
    made.append(svg("rect", { x: box.left, width: box.right - box.left, y: y(high), height: y(low) - y(high), fill: "#000", "fill-opacity": 0.07 }),
      svg("path", { d: `M${box.left},${y(value)}H${box.right}`, stroke: "#000", "stroke-width": 1.2, "stroke-dasharray": "7 4" }));
  }
  if (options.front && options.front.length > 1) {
    made.append(svg("path", { d: "M" + options.front.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("L"), class: "front",
      fill: "none", stroke: INK, "stroke-width": 5, "stroke-opacity": 0.16, "stroke-linejoin": "round" }));
  }
  const groups = new Map();
  for (const line of options.lines) {
    const group = curveGroup(line, x, y, options.join !== false);
    groups.set(line.name, group);
    group.addEventListener("mouseenter", () => choose(made, group, true));
    group.addEventListener("mouseleave", () => choose(made, group, false));
    made.append(group);
  }
  if (named) nameEnds(made, options, groups, x, y, box);
  return made;
}

function choose(made, group, on) {
  made.classList.toggle("chosen", on);
  group.classList.toggle("on", on);
}

function text(x, y, words, anchor, colour = INK) {
  return svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor, fill: colour }, words);
}

function curveGroup(line, x, y, join) {
  const look = lookOf(line.name), group = svg("g", { class: "curve", "data-curve": line.name });
  const banded = line.points.filter((p) => has(p.low));
  if (join && banded.length > 1) {
    const edge = [...banded.map((p) => [x(p.x), y(p.high)]), ...banded.slice().reverse().map((p) => [x(p.x), y(p.low)])];
    group.append(svg("path", { d: `M${edge.map((p) => p.map((v) => v.toFixed(1)).join()).join("L")}z`, fill: look.color, "fill-opacity": 0.11, class: "band" }));
  }
  if (join && line.points.length > 1) {
    const path = line.points.map((p) => `${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`).join("L");
    group.append(svg("path", { d: `M${path}`, fill: "none", stroke: look.color, "stroke-width": 1.8,
      "stroke-dasharray": look.dashes.map((d) => 1.8 * d).join(" ") }));
  }
  for (const p of line.points) {
    const mark = marker(look, x(p.x), y(p.y));
    mark.append(svg("title", {}, p.title));
    group.append(mark);
    if (p.unread) group.append(text(x(p.x) + 5, y(p.y) - 4, UNREAD, "start"));
  }
  return group;
}

function nameEnds(made, options, groups, x, y, box) {
  const ends = options.lines.map((line) => ({ name: line.name, last: line.points[line.points.length - 1], group: groups.get(line.name) }));
  ends.forEach((end) => { end.at = y(end.last.y); end.from = x(end.last.x); });
  if (options.full) ends.push({ name: "none", at: y(options.full[0]), from: box.right, group: made });
  ends.sort((a, b) => a.at - b.at);
  const places = spread(ends.map((end) => end.at), 13.5, box.top, box.bottom);
  ends.forEach((end, i) => {
    const look = lookOf(end.name), colour = end.name === "none" ? "#000000" : look.control ? "#555555" : wordColour(look.color);
    const start = Math.max(end.from + 6, box.right - 4);
    end.group.append(svg("path", { d: `M${start.toFixed(1)},${end.at.toFixed(1)}L${box.right + 12},${places[i].toFixed(1)}`, stroke: colour, "stroke-width": 0.7, fill: "none" }),
      text(box.right + 15, places[i] + 4, cut(curveName(end.name)), "start", colour));
  });
}
