// The leaderboard: models by benchmarks where there are several models; then, for each model, a line for each method
// at all shares of tokens removed, or at the one that the filter sets.
const GROUPS = 3; // models at once
const WIDEST = 6; // benchmarks at all shares: more columns cannot be read
const leaders = { sort: "", down: true, groups: GROUPS, method: "" };

// The share that most points have, the largest of these.
function usualRatio(panels) {
  const counts = new Map();
  for (const { curves } of panels) for (const curve of curves) for (const point of curve.points) if (point.ratio) counts.set(at(point), (counts.get(at(point)) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || b[0] - a[0]).map(([ratio]) => ratio)[0] ?? null;
}

const mean = (numbers) => (numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null);
const averageOf = new Map(data.averages.map((one) => [`${one.model}|${one.rule}|${one.curve}|${at(one)}`, one]));
const shareName = (ratio) => (ratio < 0 ? `${-ratio} kept` : removed(ratio));

const rowsOf = new Map();
for (const row of rows) {
  const key = `${row.model}|${row.benchmark}|${row.curve}|${row.kind === "unpruned" ? "" : `${row.rule}|${row.at}`}`;
  rowsOf.set(key, [...(rowsOf.get(key) || []), row]);
}
const unprunedOf = (panel) => rowsOf.get(`${panel.model}|${panel.benchmark}|none|`) || [];

// Costs of some panels: means over rows; how many times as fast as the unpruned model, on the same device.
function costsOf(panels, name, ratio) {
  const own = panels.flatMap(({ panel }) => (name === "none" ? unprunedOf(panel) : rowsOf.get(`${panel.model}|${panel.benchmark}|${name}|${panel.rule}|${ratio}`) || []));
  const costs = Object.fromEntries(["flops", "ms", "ms_low", "ms_high", "kv"].map((key) => [key, mean(own.map((row) => row[key]).filter(has))]));
  const pairs = own.filter((row) => has(row.ms)).flatMap((row) => unprunedOf(row).filter((full) => full.device === row.device && has(full.ms)).slice(0, 1).map((full) => [full.ms, row.ms]));
  const timed = own.filter((row) => has(row.faster));
  costs.paired = own.length > 0 && timed.length === own.length;
  costs.speed = name === "none" ? null : costs.paired ? mean(timed.map((row) => row.faster)) : pairs.length ? mean(pairs.map(([full]) => full)) / mean(pairs.map(([, ms]) => ms)) : null;
  costs.speeds = costs.paired && timed.length === 1 ? [timed[0].faster_low, timed[0].faster_high] : null;
  return costs;
}

// A line has a point for each panel and share, and what is averaged over the panels.
function leaderLines(panels, ratios) {
  const lines = new Map(), { model, rule } = panels[0].panel;
  panels.forEach(({ curves }, place) => curves.forEach((curve) => curve.points.forEach((point) => {
    const ratio = at(point);
    if (!ratios.includes(ratio)) return;
    if (!lines.has(curve.name)) lines.set(curve.name, { name: curve.name, kind: curve.kind, points: {}, ends: {}, costs: {} });
    const line = lines.get(curve.name);
    line.points[ratio] = line.points[ratio] || new Array(panels.length).fill(null);
    line.points[ratio][place] = point;
    line[`score${place}@${ratio}`] = point.score[0];
  })));
  for (const line of lines.values()) for (const ratio of ratios) {
    const points = line.points[ratio] || new Array(panels.length).fill(null), kept = points.map((point) => point && point.retention && point.retention[0]);
    const stored = averageOf.get(`${model}|${rule}|${line.name}|${ratio}`);
    line.points[ratio] = points;
    line.ends[ratio] = !kept.every(has) ? null : stored && stored.benchmarks === panels.length ? stored.retention : [mean(kept), null, null];
    line[`average@${ratio}`] = line.ends[ratio] && line.ends[ratio][0];
    line.costs[ratio] = points.some(Boolean) ? costsOf(panels, line.name, ratio) : {};
    for (const key of ["flops", "ms", "kv", "speed"]) line[`${key}@${ratio}`] = line.costs[ratio][key];
  }
  return [...lines.values()];
}

// Of each method's name whether it is marked in a column: 1 as told from all others by the test, 2 as not told from the best.
function marksOf(lines, place, ratio) {
  const points = lines.map((line) => [line.name, line.points[ratio][place]]).filter(([, point]) => point && has(point.best));
  const top = points.filter(([, point]) => point.best >= LEVEL);
  return new Map(top.length === points.length ? [] : top.map(([name]) => [name, top.length === 1 ? 1 : 2]));
}
const MARKED = ["span", "b", "u"];

const chanceOf = (point) => (!has(point.chance) ? "" : point.bound ? `p ≤ ${point.chance < 0.001 ? point.chance.toPrecision(1) : point.chance.toFixed(3)}` : point.chance < 0.001 ? "p < 0.001" : `p = ${point.chance.toFixed(3)}`);

function gainOf(point) {
  if (!point.gain || !has(point.gain[0])) return { words: "", sign: "", title: "no random dropping at its place ran" };
  const [value, low, high] = point.gain.map((end) => (has(end) ? 100 * end : null)), chance = chanceOf(point);
  const sure = has(point.chance) && point.chance < LEVEL;
  return { words: `${value < 0 ? "" : "+"}${value.toFixed(1)}${chance ? `, ${chance}` : ""}`, sign: sure ? (value > 0 ? "above" : "below") : "",
    title: `${value.toFixed(1)} [${has(low) ? low.toFixed(1) : ""}, ${has(high) ? high.toFixed(1) : ""}] points above random tokens at the same place; ${chance}, Holm's correction for all comparisons of the benchmark` };
}

// A score; a press shows where it comes from.
function leaderCell(line, point, mark, whole, panel) {
  if (!point) return element("td", {}, "–");
  const gain = gainOf(point), title = `${percent(point.score[0])} % [${percent(point.score[1])}, ${percent(point.score[2])}]; ${gain.title}`;
  return element("td", { title }, element("button", { type: "button", class: `cell ${whole ? "" : `gain ${gain.sign}`}`, onclick: () => openCell(line, point, panel) },
    element(MARKED[mark || 0], {}, percent(point.score[0])), point.unread ? UNREAD : ""),
    whole && gain.words ? element("div", { class: `gain ${gain.sign}`, title: gain.title }, gain.words) : null);
}

const kept = (ends, whole) => (ends ? [percent(ends[0]), whole && has(ends[1]) ? element("div", { class: "range" }, `[${percent(ends[1])}, ${percent(ends[2])}]`) : ""] : ["–"]);
const times = (costs, whole) => (has(costs.ms) ? [`${short(costs.ms)} ms`, whole && has(costs.ms_low) ? element("div", { class: "range" }, `[${short(costs.ms_low)}, ${short(costs.ms_high)}]`) : ""] : ["–"]);
const speeds = (costs) => (has(costs.speed) ? [`${costs.speed.toFixed(2)} times`, costs.speeds ? element("div", { class: "range" }, `[${costs.speeds.map((end) => end.toFixed(2)).join(", ")}]`) : ""] : ["–"]);

// The table of one model and budget rule.
function leaderTable(panels, several) {
  const { model, rule } = panels[0].panel, whole = Boolean(filters.ratio);
  const ratios = whole ? [Number(filters.ratio)] : sorted(panels.flatMap(({ curves }) => curves.flatMap((curve) => curve.points.map(at)))).filter(Boolean).sort((a, b) => (a > 0 && b > 0 ? a - b : b - a));
  const usual = whole ? ratios[0] : usualRatio(panels);
  // A share that this table lacks stands for the one that it has.
  const [key, ratio] = leaders.sort.split("@"), order = { sort: !key ? `average@${usual}` : ratio && !ratios.includes(Number(ratio)) ? `${key}@${usual}` : leaders.sort, down: leaders.down };
  const lines = leaderLines(panels, ratios).sort(compared(order.sort, order.down));
  if (!lines.length) return [element("b", {}, model), nothing("curve")];
  // A method without a test of its score against random dropping, by the reason.
  const bare = panels.flatMap(({ panel, curves }) => curves.filter((curve) => curve.kind !== "control" && !curve.floor).map((curve) => ({ ...curve, benchmark: panel.benchmark })));
  const floorless = unique(bare.map((curve) => curve.name)).map((name) => { const where = bare.filter((curve) => curve.name === name).map((curve) => curve.benchmark); return name + (where.length < panels.length ? ` on ${where.join(", ")}` : ""); });
  const remedies = unique(bare.map((curve) => `method=random${curve.layer ? ` method.params.layer=${curve.layer}` : ""}`));
  const full = costsOf(panels, "none");
  const groups = [{ key: "average", head: "Average kept", full: () => ["100.0"], cell: (line, ratio) => element("td", {}, ...kept(line.ends[ratio], whole)), printed: (line, ratio) => percent(line[`average@${ratio}`]) },
    ...(whole || panels.length <= WIDEST ? panels : []).map(({ panel }, place) => {
      const marks = Object.fromEntries(ratios.map((ratio) => [ratio, marksOf(lines, place, ratio)]));
      return { key: `score${place}`, head: panel.benchmark, note: `${panel.metric}, n = ${panel.samples}`, full: () => ranged(panel.full),
        cell: (line, ratio) => leaderCell(line, line.points[ratio][place], marks[ratio].get(line.name), whole, panel),
        printed: (line, ratio) => (line.points[ratio][place] ? percent(line.points[ratio][place].score[0]) + (line.points[ratio][place].unread ? UNREAD : "") : "–"),
        mark: (line, ratio) => marks[ratio].get(line.name) };
    }),
    { key: "flops", head: "Prefill FLOPs (%)", full: () => ["100.0"], cell: (line, ratio) => element("td", {}, percent(line[`flops@${ratio}`], whole ? 1 : 0)), printed: (line, ratio) => percent(line[`flops@${ratio}`]) },
    ...(whole ? [{ key: "ms", head: "First token", note: "median [quartiles]", full: () => times(full, true), cell: (line, ratio) => element("td", {}, ...times(line.costs[ratio], true)), extra: true },
      { key: "kv", head: "KV cache", full: () => [bytes(full.kv)], cell: (line, ratio) => element("td", {}, bytes(line[`kv@${ratio}`])), extra: true }] : []),
    { key: "speed", head: "First token, times as fast", full: () => (has(full.ms) ? [`1 (${short(full.ms)} ms)`] : ["1"]), cell: (line, ratio) => element("td", {}, ...(whole ? speeds(line.costs[ratio]) : [has(line[`speed@${ratio}`]) ? line[`speed@${ratio}`].toFixed(1) : "–"])), extra: true }];
  const sort = (column) => { leaders.down = order.sort === column.key ? !order.down : !column.text; leaders.sort = column.key; drawLeaders(); };
  const name = { key: "name", head: "Method", text: true }, acts = { key: "kind", head: "Acts", text: true };
  const words = (group) => [group.head, ...(group.note ? [element("div", { class: "range" }, group.note)] : [])];
  const heads = whole
    ? [element("tr", {}, ...[name, acts].map((column) => headOf(column, order, sort)), ...groups.map((group) => { const head = headOf({ ...group, key: `${group.key}@${usual}` }, order, sort); if (group.note) head.append(element("div", { class: "range" }, group.note)); return head; }))]
    : [element("tr", {}, element("th", { class: "text" }), element("th", { class: "text kind" }), ...groups.map((group) => element("th", { class: "group", colspan: ratios.length, scope: "colgroup" }, ...words(group)))),
      element("tr", {}, ...[name, acts].map((column) => headOf(column, order, sort)), ...groups.flatMap((group) => ratios.map((ratio) => headOf({ key: `${group.key}@${ratio}`, head: shareName(ratio) }, order, sort))))];
  const body = [element("tr", { class: "full" }, element("td", { class: "text" }, "unpruned"), element("td", { class: "text kind" }), ...groups.map((group) => element("td", { colspan: ratios.length }, ...[group.full()].flat()))),
    ...lines.map((line) => element("tr", { class: line.kind === "control" ? "control" : null }, element("td", { class: "text", title: line.name }, line.name), element("td", { class: "text kind" }, line.kind), ...groups.flatMap((group) => ratios.map((ratio) => group.cell(line, ratio)))))];
  const shown = () => {
    const methods = lines.filter((line) => line.kind !== "control"), scored = groups.filter((group) => !group.extra), ordered = [...methods, ...lines.filter((line) => line.kind === "control")];
    const columns = scored.flatMap((group) => ratios.map((ratio) => ({ group, ratio, head: whole ? group.head : `${group.head} ${shareName(ratio)}` })));
    const unpruned = columns.map(({ group }) => (group.key.startsWith("score") ? percent(panels[Number(group.key.slice(5))].panel.full && panels[Number(group.key.slice(5))].panel.full[0]) : "100.0"));
    return {
      lines: [["model", "method", "acts", "removed", "average_kept", "average_low", "average_high", ...panels.flatMap(({ panel }) => ["", "_low", "_high", "_gain", "_p"].map((end) => panel.benchmark + end)), "flops_share", "first_token_ms", "first_token_low", "first_token_high", "times_as_fast", "kv_bytes"],
        ...ratios.flatMap((ratio) => lines.filter((line) => line.points[ratio].some(Boolean)).map((line) => [model, line.name, line.kind, ratio < 0 ? `all but ${-ratio} tokens` : ratio, ...(line.ends[ratio] || [null, null, null]),
          ...line.points[ratio].flatMap((point) => (point ? [...point.score, point.gain && point.gain[0], point.chance] : [null, null, null, null, null])), ...["flops", "ms", "ms_low", "ms_high", "speed", "kv"].map((key) => line.costs[ratio][key])]))],
      tex: latex(["Method", ...columns.map(({ head }) => head)],
        [["unpruned", ...unpruned], ...ordered.map((line) => [line.name, ...columns.map(({ group, ratio }) => group.printed(line, ratio))])],
        [[], ...ordered.map((line) => [0, ...columns.map(({ group, ratio }) => (group.mark ? group.mark(line, ratio) : 0))])], methods.length + 1,
        `${model}. Bold: the best method of a column, which the paired test tells from every other one; underlined: methods that it does not tell from the best (p < ${LEVEL}, Holm's correction over the benchmark). Controls, which no paper proposes, stand below the last rule; they and averages are not marked.`),
    };
  };
  return [element("div", { class: "bar" }, element(several ? "h2" : "b", { id: several ? null : "at" }, `${whole ? `${ratios[0] < 0 ? `${-ratios[0]} visual tokens kept` : `${removed(ratios[0])} of the visual tokens removed`}, ` : ""}${model}${rule === "kept" ? "" : `, budget by ${rule}`}`), downloads("leaderboard", shown)),
    ...(floorless.length ? [element("p", { class: "note" }, `No points above random for ${floorless.join(", ")}: random dropping did not run at the same place. Add ${remedies.join(" or ")}.`)] : []),
    ...(whole || panels.length <= WIDEST ? [] : [element("p", { class: "note" }, `Averages over ${panels.length} benchmarks. Choose a share or a benchmark above to see each benchmark.`)]),
    element("div", { class: "scroll" }, element("table", { class: whole ? null : "shares" }, element("thead", {}, ...heads), element("tbody", {}, ...body)))];
}

// Models by benchmarks: the unpruned score, and below it that of a method, or of the best one.
function modelGrid(groups, ratio) {
  const benchmarks = unique(groups.flatMap((panels) => panels.map(({ panel }) => panel.benchmark)));
  const names = sorted(groups.flatMap((panels) => panels.flatMap(({ curves }) => curves.map((curve) => curve.name))));
  if (!names.includes(leaders.method)) leaders.method = "";
  const best = (curves) => curves.filter((curve) => (leaders.method ? curve.name === leaders.method : curve.kind !== "control"))
    .flatMap((curve) => curve.points.filter((point) => at(point) === ratio).map((point) => ({ curve, point }))).sort((a, b) => b.point.score[0] - a.point.score[0])[0];
  const cells = groups.map((panels) => benchmarks.map((benchmark) => {
    const found = panels.find(({ panel }) => panel.benchmark === benchmark);
    return found ? { panel: found.panel, top: best(found.curves) } : null;
  }));
  const title = (panels) => `${panels[0].panel.model}${panels[0].panel.rule === "kept" ? "" : `, budget by ${panels[0].panel.rule}`}`;
  const pick = (model) => { document.getElementById("f-model").value = model; filter("model", model); };
  const shown = () => ({
    lines: [["model", "benchmark", "n", "unpruned", "removed", "method", "score", "low", "high", "gain", "p"], ...cells.flatMap((line) => line.filter(Boolean).map(({ panel, top }) =>
      [panel.model, panel.benchmark, panel.samples, panel.full && panel.full[0], ratio, ...(top ? [top.curve.name, ...top.point.score, top.point.gain && top.point.gain[0], top.point.chance] : [null, null, null, null, null, null])]))],
    tex: latex(["Model", ...benchmarks.map((one) => `${one}: unpruned / pruned`)], groups.map((panels, i) => [title(panels), ...cells[i].map((cell) => (cell ? `${percent(cell.panel.full && cell.panel.full[0])} / ${cell.top ? percent(cell.top.point.score[0]) : "–"}` : "–"))])),
  });
  return [element("div", { class: "bar" }, element("b", { id: "at" }, `${groups.length} models by benchmark, ${ratio < 0 ? `${-ratio} visual tokens kept` : `${removed(ratio)} of the visual tokens removed`}`),
    choice("Method", leaders.method, [["", "the best of each cell"], ...names.map((one) => [one, one])], (v) => { leaders.method = v; drawLeaders(); }), downloads("models", shown)),
    element("p", { class: "note" }, `The unpruned score in percent; below it ${leaders.method ? "the method's" : "the highest score of a method that is no control, the largest of several and so rather high"}. Blue above and orange below random tokens at the same place (p < ${LEVEL}, Holm). Press a model to see it alone.`),
    element("div", { class: "scroll" }, element("table", { id: "models" }, element("thead", {}, element("tr", {}, element("th", { class: "text" }, "Model"), ...benchmarks.map((one) => element("th", {}, one)))),
      element("tbody", {}, ...groups.map((panels, i) => element("tr", {}, element("td", { class: "text" }, element("button", { type: "button", class: "cell", onclick: () => pick(panels[0].panel.model) }, title(panels))),
        ...cells[i].map((cell) => (cell ? element("td", {}, ...ranged(cell.panel.full), element("div", { class: `gain ${cell.top ? gainOf(cell.top.point).sign : ""}`, title: cell.top ? gainOf(cell.top.point).title : null }, cell.top ? `${leaders.method ? "" : `${cell.top.curve.name} `}${percent(cell.top.point.score[0])}` : "–")) : element("td", {}, "–")))))))) ];
}

function drawLeaders() {
  const section = document.getElementById("leaders"), every = shownPanels();
  if (!every.length) { section.replaceChildren(nothing("curve")); return; }
  const groups = [...every.reduce((found, one) => found.set(`${one.panel.model}|${one.panel.rule}`, [...(found.get(`${one.panel.model}|${one.panel.rule}`) || []), one]), new Map()).values()];
  const several = groups.length > 1;
  section.replaceChildren(...(several ? modelGrid(groups, filters.ratio ? Number(filters.ratio) : usualRatio(every)) : []),
    ...groups.slice(0, leaders.groups).flatMap((panels) => leaderTable(panels, several)),
    ...more(leaders.groups, groups.length, () => { leaders.groups += GROUPS; drawLeaders(); }, "models"),
    element("p", { class: "note" }, `Scores in percent, by share of visual tokens removed; Average kept: mean over benchmarks of the score in percent of the unpruned one. Blue: better than random tokens at the same place, orange: worse (paired test, p < ${LEVEL} after Holm's correction over the benchmark). Bold: the best method of a column, which the test tells from every other one; underlined: methods that it does not tell from the best; controls and averages have neither. ${filters.ratio ? "Brackets: 95 % intervals; of times the quartiles over samples." : "Point at a number for its 95 % interval; choose a share above for intervals, times and p-values."} Press a number to see its samples.` + UNREAD_MEANS));
}

// Where a score comes from: its runs, and the samples that broke.
function openCell(line, point, panel) {
  const runs = rows.filter((row) => row.curve === line.name && row.at === at(point) && row.model === panel.model && row.benchmark === panel.benchmark && row.rule === panel.rule);
  const base = unprunedOf(panel)[0], dialog = document.getElementById("cell"), gain = gainOf(point);
  const command = (row) => `python -m espalier store show ${row.key} --against ${base.key} --pictures broken --store ${row.store}`;
  dialog.replaceChildren(element("form", { method: "dialog" }, element("button", {}, "Close")),
    element("h2", {}, `${line.name}, ${amount(point)}`), element("p", { class: "note" }, `${panel.model} on ${panel.benchmark}, ${panel.metric}, n = ${panel.samples}`),
    element("p", {}, `${percent(point.score[0])} % [${percent(point.score[1])}, ${percent(point.score[2])}]; ${gain.title}.`),
    ...runs.flatMap((row) => (data.broken[row.key]
      ? [element("h3", {}, data.broken[row.key].words), element("iframe", { src: data.broken[row.key].page, title: "samples that broke" }), element("p", {}, element("a", { href: data.broken[row.key].page, target: "_blank" }, "Open these samples"))]
      : !row.store ? [element("p", { class: "note" }, `Run ${row.key} is of a table of scores, which holds no answers.`)]
      : base ? [element("p", { class: "note" }, `Samples that the unpruned model answers and run ${row.key} does not, as pictures with the kept tokens (the report's option --broken N puts N of each run here):`), element("pre", {}, command(row))]
        : [element("p", { class: "note" }, `Run ${row.key}; no unpruned run to compare its answers with.`)])));
  dialog.showModal();
}
