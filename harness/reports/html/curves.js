// Curves along tokens removed or FLOPs, and scores by cost with their Pareto fronts.
const MOST = 8;   // methods in a panel, beside controls: more cannot be told apart
const PANELS = 6; // panels at once
const along = { x: "removed", y: "retention", panels: PANELS };
const cost = { key: "flops", limit: 50, panels: PANELS };

const COSTS = {
  flops: { label: "prefill FLOPs, % of the unpruned model", of: (row) => 100 * row.flops, has: (row) => has(row.flops), show: (v) => `${short(v)} % of FLOPs` },
  ms: { label: "milliseconds to the first token (vision and prefill)", of: (row) => row.ms, has: (row) => has(row.ms), show: (v) => `${short(v)} ms` },
  kv: { label: "KV cache behind the prefill (MiB)", of: (row) => row.kv / 2 ** 20, has: (row) => has(row.kv), show: (v) => `${short(v)} MiB` },
};

const shownPanels = () => data.panels.map((panel) => ({ panel, curves: curvesOf(panel) })).filter((one) => one.curves.length);
const wide = (figures = Infinity) => {
  const whole = document.querySelector("main").clientWidth, columns = Math.max(1, Math.min(figures, Math.floor((whole + 26) / 446)));
  return (whole - 26 * (columns - 1)) / columns;
};

// The best methods at the largest ratio, and all controls; the number of the others.
function fewest(curves) {
  const end = (curve) => curve.points[curve.points.length - 1].score[0];
  const plain = curves.filter((curve) => curve.kind !== "control").sort((a, b) => end(b) - end(a));
  return { shown: [...plain.slice(0, MOST), ...curves.filter((curve) => curve.kind === "control").slice(0, 4)], hidden: Math.max(0, plain.length - MOST) };
}

function choice(label, value, options, change) {
  const list = element("select", { onchange: (event) => change(event.target.value), "aria-label": label },
    ...options.map(([key, words]) => element("option", { value: key, selected: key === value }, words)));
  return element("label", { class: "inline" }, label, list);
}

function caption(panel, hidden) {
  const more = hidden ? ` ${MOST} of ${MOST + hidden} methods, the best where most tokens go; filter to see others.` : "";
  return element("figcaption", {}, element("b", {}, panel.benchmark),
    ` ${panel.metric}, ${panel.samples} samples, ${panel.model}${panel.rule === "kept" ? "" : `, budget by ${panel.rule}`}.${more}`);
}

function more(shown, total, widen, what = "panels") {
  return total > shown ? [element("div", { class: "pager" }, element("button", { type: "button", onclick: widen }, `Show more of ${total} ${what}`))] : [];
}

function ratioAxis(ratios) {
  const left = (ratio) => 1 / (1 - ratio);
  return { low: left(Math.min(...ratios)), high: left(Math.max(...ratios)), log: true, label: "visual tokens removed (%), log scale of what is left",
    ticks: ratios.map((ratio) => ({ at: left(ratio), text: short(100 * ratio) })) };
}

function curvePlot(panel, curves, width = wide()) {
  const byFlops = along.x === "flops", kept = along.y === "retention";
  const ratios = sorted(curves.flatMap((curve) => curve.points.map((point) => point.ratio)));
  const flops = curves.flatMap((curve) => curve.points.map((point) => 100 * point.flops));
  const xs = byFlops ? { low: 0, high: Math.max(100, ...flops), ticks: ticks(0, 100, 5).map((t) => ({ at: t, text: short(t) })), label: "prefill FLOPs left (%)" } : ratioAxis(ratios);
  const lines = curves.map((curve) => ({
    name: curve.name,
    points: curve.points.filter((point) => (kept ? point.retention : point.score)).map((point) => {
      const [value, low, high] = (kept ? point.retention : point.score).map((end) => (has(end) ? 100 * end : null));
      return { x: byFlops ? 100 * point.flops : 1 / (1 - point.ratio), y: value, low, high,
        unread: point.unread, title: `${curve.name}: ${value.toFixed(1)} %${point.unread ? UNREAD : ""}${has(low) ? ` [${low.toFixed(1)}, ${high.toFixed(1)}]` : ""} with ${amount(point)}, ${percent(point.flops)} % of FLOPs` };
    }).sort((a, b) => a.x - b.x),
  })).filter((line) => line.points.length);
  if (!lines.length) return element("p", { class: "none" }, "No unpruned row to compare with.");
  const full = kept ? [100, 100, 100] : panel.full && panel.full.map((end) => 100 * end);
  return plot({ width, lines, xs, full, title: `${panel.benchmark} by ${xs.label}` });
}

function drawCurves() {
  const found = shownPanels();
  const figures = found.slice(0, along.panels).map(({ panel, curves }) => {
    const { shown, hidden } = fewest(curves);
    return element("figure", {}, caption(panel, hidden), curvePlot(panel, shown, wide(found.length)));
  });
  document.getElementById("curves").replaceChildren(
    element("div", { class: "bar" },
      choice("Show", along.y, [["retention", "score kept, % of the unpruned"], ["score", "score (%)"]], (v) => { along.y = v; drawCurves(); }),
      choice("along", along.x, [["removed", "visual tokens removed"], ["flops", "prefill FLOPs left"]], (v) => { along.x = v; drawCurves(); })),
    element("p", { class: "note" }, "Bands are 95 % intervals, paired by sample where the score kept is shown. Grey, hollow and dashed: controls that no paper proposes. Point at a curve to single it out." + UNREAD_MEANS),
    found.length ? element("div", { class: "grid" }, ...figures) : nothing("curve"),
    ...more(along.panels, found.length, () => { along.panels += PANELS; drawCurves(); }));
}

// Points that no other beats in score without costing more, the cheapest first.
function front(points) {
  const found = [];
  for (const point of points.slice().sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!found.length || point.y > found[found.length - 1][1]) found.push([point.x, point.y]);
  }
  return found;
}

// From 0, or logarithmic where the dearest costs more than thirty times the cheapest.
function costAxis(least, most, label) {
  if (most < 30 * least) return { low: 0, high: 1.03 * most, ticks: ticks(0, most, 5).map((t) => ({ at: t, text: short(t) })), label };
  const powers = [];
  for (let t = 10 ** Math.floor(Math.log10(least)); t <= most * 10; t *= 10) powers.push(t);
  const [low, high] = [least / 1.2, most * 1.2];
  return { low, high, log: true, ticks: powers.filter((t) => t >= low && t <= high).map((t) => ({ at: t, text: short(t) })), label: `${label}, log scale` };
}

function costPlot(panel, curves, width) {
  const how = COSTS[cost.key], names = new Set(["none", ...curves.map((curve) => curve.name)]);
  const ours = rows.filter((row) => row.model === panel.model && row.benchmark === panel.benchmark && row.rule === panel.rule && names.has(row.curve) && how.has(row));
  const devices = sorted(ours.map((row) => row.device));
  const device = devices.map((one) => [ours.filter((row) => row.device === one).length, one]).sort((a, b) => b[0] - a[0]);
  const same = cost.key === "ms" && device.length > 1 ? ours.filter((row) => row.device === device[0][1]) : ours;
  const lines = unique(same.map((row) => row.curve)).map((name) => ({
    name,
    points: same.filter((row) => row.curve === name).map((row) => ({ x: how.of(row), y: 100 * row.value,
      unread: row.unread, title: `${curveName(name)}: ${percent(row.value)} %${row.unread ? UNREAD : ""} at ${how.show(how.of(row))}${row.ratio ? `, ${amount(row)}` : ""}` })).sort((a, b) => a.x - b.x),
  }));
  const all = lines.flatMap((line) => line.points);
  if (!all.length) return element("p", { class: "none" }, "No row has this cost.");
  const [least, most] = [Math.min, Math.max].map((end) => end(...all.map((point) => point.x)));
  const made = plot({ width, lines, join: false, names: false, front: front(all), title: `${panel.benchmark}, score by ${how.label}`,
    xs: costAxis(least, most, how.label) });
  const note = same.length < ours.length ? ` ${ours.length - same.length} rows of other devices than ${device[0][1]} are not in it.` : "";
  return element("div", {}, made, element("div", { class: "note" }, cost.key === "ms" ? `Medians on ${device[0][1]}; of rows in large batches they are no measurement of one answer.${note}` : ""));
}

// The best measured score of each method with at most so many FLOPs, a column for each panel.
function atMost(found) {
  const shown = found.slice(0, cost.panels), methods = new Map();
  shown.forEach(({ curves }, place) => curves.forEach((curve) => {
    const cheap = curve.points.filter((point) => 100 * point.flops <= cost.limit);
    if (!methods.has(curve.name)) methods.set(curve.name, { name: curve.name, kind: curve.kind, best: new Array(shown.length).fill(null) });
    methods.get(curve.name).best[place] = cheap.sort((a, b) => b.score[0] - a.score[0])[0] || null;
  }));
  const mean = (one) => one.best.reduce((sum, point) => sum + (point ? point.score[0] : 0), 0);
  const ordered = [...methods.values()].sort((a, b) => mean(b) - mean(a)).slice(0, 40);
  const cell = (point) => (point ? [...ranged(point.score), ...(point.unread ? [UNREAD] : []), element("div", { class: "range" }, `${amount(point)}, ${percent(point.flops, 0)} % FLOPs`)] : ["–"]);
  return element("div", { class: "scroll" }, element("table", { id: "atmost" },
    element("thead", {}, element("tr", {}, ...["Method", "Acts", ...shown.map(({ panel }) => panel.benchmark)].map((head, i) => element("th", { class: i < 2 ? "text" : null }, head)))),
    element("tbody", {}, ...ordered.map((one) => element("tr", {}, element("td", { class: "text" }, one.name), element("td", { class: "text" }, one.kind), ...one.best.map((point) => element("td", {}, ...cell(point))))))));
}

function drawCost() {
  const found = shownPanels(), names = new Set();
  const figures = found.slice(0, cost.panels).map(({ panel, curves }) => {
    const { shown, hidden } = fewest(curves);
    shown.forEach((curve) => names.add(curve.name));
    return element("figure", {}, caption(panel, hidden), costPlot(panel, shown, wide(found.length)));
  });
  const table = element("div", {}, atMost(found)), said = element("b", {}, `${cost.limit} %`);
  const slide = (event) => { cost.limit = Number(event.target.value); said.textContent = `${cost.limit} %`; table.replaceChildren(atMost(found)); };
  document.getElementById("cost").replaceChildren(
    element("div", { class: "bar" }, choice("Score by", cost.key, [["flops", "prefill FLOPs"], ["ms", "measured time"], ["kv", "KV cache bytes"]], (v) => { cost.key = v; drawCost(); })),
    element("p", { class: "note" }, "The broad grey line is the Pareto front: no method scores higher at less cost. Equal counts of tokens are not equal cost: a method inside the language model runs its first layers on all of them, one before it on none."),
    legendOf(["none", ...names]),
    found.length ? element("div", { class: "grid" }, ...figures) : nothing("curve"),
    ...more(cost.panels, found.length, () => { cost.panels += PANELS; drawCost(); }),
    element("h2", {}, "At equal FLOPs"),
    element("label", { class: "inline" }, "At most", element("input", { type: "range", id: "limit", min: 5, max: 100, step: 5, value: cost.limit, oninput: slide }), said, "of the unpruned prefill"),
    element("p", { class: "note" }, "Each method's best measured score that costs no more, the highest of several and so rather high, its interval that of a single point; with what it removes to get there; a dash where none of its rows is that cheap. Only prefill FLOPs of the language model count."),
    table);
}
