// All results: filtered rows, sorted by a column, a page at a time, so that ten thousand rows are no burden.
const PAGE = 40;
const UNREAD = "‡", UNREAD_MEANS = data.rows.columns.unread.some(Boolean) ? ` ${UNREAD} more than 5 % of the answers could not be read.` : "";
const board = { sort: "value", down: true, page: 0 };

const COLUMNS = [
  { key: "curve", head: "Method", text: true, show: (row) => curveName(row.curve) },
  { key: "kind", head: "Kind", text: true },
  { key: "model", head: "Model", text: true },
  { key: "benchmark", head: "Benchmark", text: true, show: (row) => [row.benchmark, element("div", { class: "range" }, row.metric)] },
  { key: "ratio", head: "Tokens removed", show: (row) => (has(row.keep) ? amount(row) : row.ratio ? removed(row.ratio) : "none") },
  { key: "value", head: "Score [95 %]", show: shownScore },
  { key: "retention", head: "Score kept (%)", show: (row) => ranged(row.kept) },
  { key: "flops", head: "Prefill FLOPs", show: (row) => (has(row.flops) ? `${percent(row.flops)} %` : "–") },
  { key: "ms", head: "To first token", show: (row) => (has(row.ms) ? [`${short(row.ms)} ms`, element("span", { class: "range" }, has(row.ms_low) ? ` [${short(row.ms_low)}, ${short(row.ms_high)}]` : "")] : "–") },
  { key: "kv", head: "KV cache", show: (row) => bytes(row.kv) },
  { key: "samples", head: "Samples" },
].filter((column) => column.key !== "model" || data.rows.texts.model.length > 1);

function shownScore(row) {
  const score = row.interval ? ranged(row.interval) : [scaled(row.metric, row.value)].flat();
  return row.unread ? [...score, UNREAD] : score;
}

function ranged(ends) {
  if (!ends || !has(ends[0])) return "–";
  const range = has(ends[1]) ? ` [${percent(ends[1])}, ${percent(ends[2])}]` : "";
  return [percent(ends[0]), element("span", { class: "range" }, range)];
}

function drawBoard() {
  const started = performance.now();
  const found = rows.filter((row) => matches(row)).sort(compared(board.sort, board.down));
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  board.page = Math.min(board.page, pages - 1);
  const first = board.page * PAGE, shown = found.slice(first, first + PAGE);
  const heads = COLUMNS.map((column) => headOf(column, board, sortBy));
  const lines = shown.map((row) => element("tr", {}, ...COLUMNS.map((column) => {
    const value = column.show ? column.show(row) : row[column.key];
    return element("td", { class: `${column.text ? "text" : ""} ${column.key}`, title: column.text ? row[column.key] : null }, ...(Array.isArray(value) ? value : [value]));
  })));
  const turn = (by, words) => element("button", {
    type: "button", "data-turn": by, disabled: by < 0 ? board.page === 0 : board.page === pages - 1,
    onclick: () => { board.page += by; drawBoard(); },
  }, words);
  const pager = pages > 1
    ? element("div", { class: "pager" }, turn(-1, "Previous"), `page ${board.page + 1} of ${pages}`, turn(1, "Next")) : null;
  const panel = document.getElementById("board");
  panel.replaceChildren(
    element("div", { class: "bar" },
      element("b", { id: "count" }, `${found.length} of ${rows.length} rows`), downloads("results", () => exported(found)),
      element("span", { class: "note" }, "Click a heading to sort. Scores in percent with their 95 % interval over samples; the score kept is in percent of the unpruned model's on the same samples; times are medians with the quartiles over samples." + UNREAD_MEANS)),
    ...[found.length ? element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines)))
      : nothing("row"), pager].filter(Boolean));
  panel.dataset.took = (performance.now() - started).toFixed(1);
}

const EXPORTED = ["model", "benchmark", "metric", "curve", "kind", "rule", "ratio", "keep", "seed", "samples", "value", "stderr", "retention", "flops", "ms", "ms_low", "ms_high", "kv", "device", "key"];

function exported(found) {
  const words = (row, column) => { const value = column.show ? column.show(row) : row[column.key]; return (Array.isArray(value) ? value : [value]).map((part) => (part instanceof Element ? ` ${part.textContent}` : String(part))).join("").trim(); };
  return { lines: [EXPORTED, ...found.map((row) => EXPORTED.map((key) => row[key]))], tex: latex(COLUMNS.map(({ head }) => head), found.map((row) => COLUMNS.map((column) => words(row, column)))) };
}

function sortBy(column) {
  board.down = board.sort === column.key ? !board.down : !column.text;
  board.sort = column.key;
  board.page = 0;
  drawBoard();
}
