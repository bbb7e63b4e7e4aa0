// The leaderboard: a line for each method at one share of tokens removed, a column for each benchmark, and the average.
const leaders = { sort: "average", down: true };

// The share that most points have, the largest of these.
function usualRatio(panels) {
  const counts = new Map();
  for (const { curves } of panels) for (const curve of curves) for (const point of curve.points) if (point.ratio) counts.set(at(point), (counts.get(at(point)) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || b[0] - a[0]).map(([ratio]) => ratio)[0] ?? null;
}

const mean = (numbers) => (numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null);
const averageOf = new Map(data.averages.map((one) => [`${one.model}|${one.rule}|${one.curve}|${at(one)}`, one]));

// A line has a point for each panel, and what is averaged over them.
function leaderLines(panels, ratio) {
  const lines = new Map();
  panels.forEach(({ panel, curves }, place) => curves.forEach((curve) => {
    const point = curve.points.find((one) => at(one) === ratio);
    if (!point) return;
    if (!lines.has(curve.name)) lines.set(curve.name, { name: curve.name, kind: curve.kind, points: new Array(panels.length).fill(null) });
    lines.get(curve.name).points[place] = point;
    lines.get(curve.name)[`score${place}`] = point.score[0];
  }));
  for (const line of lines.values()) {
    const { model, rule } = panels[0].panel, stored = averageOf.get(`${model}|${rule}|${line.name}|${ratio}`);
    const kept = line.points.map((point) => point && point.retention && point.retention[0]);
    const complete = kept.every(has);
    line.ends = !complete ? null : stored && stored.benchmarks === panels.length ? stored.retention : [mean(kept), null, null];
    line.average = line.ends && line.ends[0];
    const own = rows.filter((row) => row.curve === line.name && row.at === ratio && row.model === model && row.rule === rule && panels.some(({ panel }) => panel.benchmark === row.benchmark));
    for (const key of ["flops", "ms", "kv"]) line[key] = mean(own.map((row) => row[key]).filter(has));
  }
  return [...lines.values()];
}

function gainOf(point) {
  if (!point.gain || !has(point.gain[0])) return null;
  const [value, low, high] = point.gain.map((end) => (has(end) ? 100 * end : null));
  const chance = has(point.chance) ? (point.chance < 0.001 ? "p < 0.001" : `p = ${point.chance.toFixed(3)}`) : "";
  const sure = has(point.chance) && point.chance < 0.05;
  return { words: `${value < 0 ? "" : "+"}${value.toFixed(1)}${chance ? `, ${chance}` : ""}`, sign: sure ? (value > 0 ? "above" : "below") : "",
    title: `${value.toFixed(1)} [${has(low) ? low.toFixed(1) : ""}, ${has(high) ? high.toFixed(1) : ""}] points above random tokens at the same place; ${chance}, corrected for all comparisons of the benchmark` };
}

function leaderCell(point, rank) {
  if (!point) return element("td", {}, "–");
  const gain = gainOf(point);
  return element("td", { title: `${percent(point.score[0])} % [${percent(point.score[1])}, ${percent(point.score[2])}]` },
    element(rank === 1 ? "b" : rank === 2 ? "u" : "span", {}, percent(point.score[0])), point.unread ? UNREAD : "",
    gain ? element("div", { class: `gain ${gain.sign}`, title: gain.title }, gain.words) : null);
}

// 1 for the best number of a column as it is printed, 2 for the second.
function ranksOf(lines, key) {
  const printed = unique(lines.map((line) => percent(line[key])).filter((text) => text !== "–")).sort((a, b) => b - a);
  return lines.map((line) => (has(line[key]) ? printed.indexOf(percent(line[key])) + 1 : 0));
}

function drawLeaders() {
  const section = document.getElementById("leaders");
  const every = shownPanels(), first = every[0] && every[0].panel;
  const panels = every.filter(({ panel }) => panel.model === first.model && panel.rule === first.rule);
  const ratio = filters.ratio ? Number(filters.ratio) : usualRatio(panels);
  const lines = leaderLines(panels, ratio).sort(compared(leaders.sort, leaders.down));
  if (!lines.length) { section.replaceChildren(element("p", { class: "none" }, "No curve has all of this. Reset a filter.")); return; }
  const scores = panels.map(({ panel }, place) => ({ key: `score${place}`, head: panel.benchmark, note: `${panel.metric}, n = ${panel.samples}`, place }));
  const columns = [{ key: "name", head: "Method", text: true }, { key: "kind", head: "Acts", text: true }, { key: "average", head: "Average kept" }, ...scores,
    { key: "flops", head: "Prefill FLOPs" }, { key: "ms", head: "First token" }, { key: "kv", head: "KV cache" }];
  const ranks = Object.fromEntries(["average", ...scores.map((column) => column.key)].map((key) => [key, ranksOf(lines, key)]));
  const sort = (column) => { leaders.down = leaders.sort === column.key ? !leaders.down : !column.text; leaders.sort = column.key; drawLeaders(); };
  const heads = columns.map((column) => { const head = headOf(column, leaders, sort); if (column.note) head.append(element("div", { class: "range" }, column.note)); return head; });
  const full = element("tr", { class: "full" }, element("td", { class: "text" }, "unpruned"), element("td", { class: "text kind" }), element("td", {}, "100.0"),
    ...panels.map(({ panel }) => element("td", {}, ...ranged(panel.full))), element("td", {}, "100 %"), element("td", {}, "–"), element("td", {}, "–"));
  const body = lines.map((line, i) => element("tr", {},
    element("td", { class: "text", title: line.name }, line.name), element("td", { class: "text kind" }, line.kind),
    element("td", {}, element(ranks.average[i] === 1 ? "b" : ranks.average[i] === 2 ? "u" : "span", {}, percent(line.average)), element("div", { class: "range" }, line.ends && has(line.ends[1]) ? `[${percent(line.ends[1])}, ${percent(line.ends[2])}]` : "")),
    ...scores.map((column) => leaderCell(line.points[column.place], ranks[column.key][i])),
    element("td", {}, has(line.flops) ? `${percent(line.flops)} %` : "–"), element("td", {}, has(line.ms) ? `${short(line.ms)} ms` : "–"), element("td", {}, bytes(line.kv))));
  const shown = () => ({
    lines: [["method", "acts", "removed", "average_kept", "average_low", "average_high", ...scores.flatMap(({ head }) => ["", "_low", "_high", "_gain", "_p"].map((end) => head + end)), "flops_share", "first_token_ms", "kv_bytes"],
      ...lines.map((line) => [line.name, line.kind, ratio < 0 ? `all but ${-ratio} tokens` : ratio, ...(line.ends || [null, null, null]),
        ...line.points.flatMap((point) => (point ? [...point.score, point.gain && point.gain[0], point.chance] : [null, null, null, null, null])), line.flops, line.ms, line.kv])],
    tex: latex(["Method", ...scores.map(({ head }) => head), "Average kept (%)"],
      [["unpruned", ...panels.map(({ panel }) => percent(panel.full && panel.full[0])), "100.0"], ...lines.map((line) => [line.name, ...line.points.map((point) => (point ? percent(point.score[0]) + (point.unread ? UNREAD : "") : "–")), percent(line.average)])],
      [[], ...lines.map((_, i) => [0, ...scores.map(({ key }) => ranks[key][i]), ranks.average[i]])]),
  });
  const others = unique(every.map(({ panel }) => `${panel.model}, ${panel.rule}`)).length - 1;
  section.replaceChildren(
    element("div", { class: "bar" }, element("b", { id: "at" }, `${ratio < 0 ? `${-ratio} visual tokens kept` : `${removed(ratio)} of the visual tokens removed`}, ${first.model}`), downloads("leaderboard", shown)),
    element("p", { class: "note" }, "Scores in percent; below them the points above random tokens at the same place with their corrected p-value, blue where a method is better than random and orange where it is worse (p < 0.05). Average kept: mean over benchmarks of the score in percent of the unpruned one, with its 95 % interval."
      + (others ? ` ${counted(new Array(others).fill(0), "other model or budget rule").replace("rules", "rules")} in the filter above.` : "") + UNREAD_MEANS),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, full, ...body))));
}
