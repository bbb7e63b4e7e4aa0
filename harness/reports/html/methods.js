// A page for each method, the published tables, the pictures of other kinds, and what was left out.
// The published table with most measured cells is shown first.
const measuredCells = (table) => (table.html.match(/class="(near|within|FAR)"/g) || []).length;
const fullest = data.tables.reduce((best, table, i) => (measuredCells(table) > measuredCells(data.tables[best]) ? i : best), 0);
const chosen = { method: null, table: fullest };
const show = (key, value) => { chosen[key] = value; writeAddress(); draw(); };

// Light over what is dropped: the picture once, a path over the dropped places.
function overlay(picture, one, words) {
  const side = one ? one.side : 1;
  const dropped = one ? [...one.mask].map((kept, i) => (kept === "1" ? "" : `M${i % side},${Math.floor(i / side)}h1v1h-1z`)).join("") : "";
  const made = svg("svg", { viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": words },
    svg("image", { href: picture.source, width: side, height: side }));
  if (one) made.append(svg("path", { d: dropped, fill: "#ffffff", "fill-opacity": 0.78 }));
  return element("figure", {}, made, element("figcaption", {}, words));
}

function keptTokens(name) {
  const drawn = data.overlays.curves[name];
  if (!drawn) {
    const cause = (data.left_out["no picture of kept tokens"] || []).find((one) => one.startsWith(name));
    return [element("p", { class: "none" }, `No picture of kept tokens: ${cause || "this method drops none, or the report was made with --no-overlays"}.`)];
  }
  const ratios = Object.keys(drawn).sort((a, b) => a - b);
  return [element("div", { class: "scenes" }, ...data.overlays.pictures.map((picture, i) => element("div", {},
    element("h3", {}, `“${picture.question}”`),
    element("div", { class: "tokens" }, overlay(picture, null, "the picture"), ...ratios.map((ratio) => {
      const one = drawn[ratio][i], kept = [...one.mask].filter((letter) => letter === "1").length;
      return overlay(picture, one, `${removed(Number(ratio))} removed: ${kept} of ${one.mask.length} kept`);
    })))))];
}

function drawMethods() {
  const names = sorted(rows.filter((row) => matches(row, "ratio")).map((row) => row.curve)).filter((name) => name !== "none");
  const section = document.getElementById("methods");
  if (!names.length) { section.replaceChildren(nothing("method")); return; }
  if (!names.includes(chosen.method)) chosen.method = names[0];
  const name = chosen.method, ours = rows.filter((row) => row.curve === name && matches(row, "ratio"));
  const figures = data.panels.filter((panel) => matches({ ...panel, kind: ours[0].kind, words: ours[0].words + panel.benchmark + panel.model }, "ratio")).map((panel) => {
    const curve = panel.curves.find((one) => one.name === name);
    const floor = curve && panel.curves.find((one) => one.name === curve.floor);
    return curve ? element("figure", {}, caption(panel, 0), curvePlot(panel, floor ? [curve, floor] : [curve])) : null;
  }).filter(Boolean).slice(0, PANELS);
  section.replaceChildren(
    element("div", { class: "bar" }, choice("Method", name, names.map((one) => [one, one]), (v) => show("method", v)),
      element("span", { class: "note" }, `${ours[0].kind}; ${counted(ours, "row")} on ${counted(unique(ours.map((row) => row.benchmark)), "benchmark")}`)),
    element("h2", {}, "What it keeps"),
    element("p", { class: "note" }, `Light places are dropped; what the last layer of ${data.overlays.model || "the embedded model"} still sees is left as it is. Three validation scenes of the embedded model, each with a question about a place.`),
    ...keptTokens(name),
    ...(figures.length ? [element("h2", {}, "Beside random tokens at the same place"), element("div", { class: "grid" }, ...figures)] : []));
}

function drawTables() {
  const table = data.tables[chosen.table], papers = unique(data.tables.map((one) => one.paper)), holder = element("div", { class: "paper" });
  // Written and escaped by harness/reports/tables/table_formats.py.
  holder.innerHTML = table.html;
  for (const one of holder.querySelectorAll("table")) {
    const box = element("div", { class: "scroll" });
    one.replaceWith(box);
    box.append(one);
  }
  document.getElementById("tables").replaceChildren(
    element("div", { class: "bar" }, choice("Paper", table.paper, papers.map((paper) => [paper, paper]), (paper) => show("table", data.tables.findIndex((one) => one.paper === paper))),
      choice("Table", String(chosen.table), data.tables.map((one, i) => [String(i), one.title]).filter(([i]) => data.tables[i].paper === table.paper), (v) => show("table", Number(v)))),
    element("p", { class: "note" }, "Blue cells are near the printed number, orange ones far from it; grey ones are print alone. Point at a cell for its run, or for the command that fills it."), holder);
}

// The rows of decoders, each with how many times as fast as plain decoding it is.
function decoderTable() {
  if (!data.decoders.length) return [];
  const speed = ([value, low, high]) => (has(value) ? [`${value.toFixed(2)} times`, element("span", { class: "range" }, has(low) ? ` [${low.toFixed(2)}, ${high.toFixed(2)}]` : "")] : ["–"]);
  const columns = [["Decoder", (one) => [one.curve]], ["Model", (one) => [one.model]], ["Benchmark", (one) => [one.benchmark]], ["Draft without", (one) => [one.ratio ? removed(one.ratio) : "–"]], ["Decoding", (one) => speed(one.decode)], ["End to end", (one) => speed(one.end_to_end)],
    ["Tokens a target pass", (one) => [has(one.tokens_per_target_forward) ? one.tokens_per_target_forward.toFixed(2) : "–"]], ["Accepted (%)", (one) => [percent(one.acceptance)]], ["Answers", (one) => [String(one.samples)]], ["Device", (one) => [one.device]]];
  const shown = () => ({
    lines: [["curve", "model", "benchmark", "ratio", "decode", "decode_low", "decode_high", "end_to_end", "end_to_end_low", "end_to_end_high", "tokens_per_target_forward", "acceptance", "samples", "device"],
      ...data.decoders.map((one) => [one.curve, one.model, one.benchmark, one.ratio, ...one.decode, ...one.end_to_end, one.tokens_per_target_forward, one.acceptance, one.samples, one.device])],
    tex: latex(columns.map(([head]) => head), data.decoders.map((one) => columns.map(([, show]) => show(one).map((part) => (part instanceof Element ? part.textContent : part)).join("")))),
  });
  return [element("div", { class: "bar" }, element("h2", {}, "Decoders"), downloads("decoders", shown)),
    element("p", { class: "note" }, "Times as fast as plain decoding of the same answers, with the 95 % interval over answers. Decoders answer as the model does, so rows of any number of answers stand here."),
    element("div", { class: "scroll" }, element("table", { id: "decoders" }, element("thead", {}, element("tr", {}, ...columns.map(([head], i) => element("th", { class: i < 3 ? "text" : null }, head)))),
      element("tbody", {}, ...data.decoders.map((one) => element("tr", {}, ...columns.map(([, show], i) => element("td", { class: i < 3 ? "text" : null }, ...show(one))))))))];
}

function drawPictures() {
  let title = "";
  document.getElementById("pictures").replaceChildren(...decoderTable(), ...data.pictures.flatMap((one) => {
    const head = one.title === title ? [] : [element("h2", {}, one.title)];
    title = one.title;
    if (!one.source) return [...head, element("p", { class: "note" }, one.caption)];
    return [...head, element("figure", { class: "wide" }, element("figcaption", {}, one.caption), element("img", { src: one.source, alt: one.caption }))];
  }));
}

function drawLeftOut() {
  const boxes = (found, kind) => Object.entries(found).map(([reason, cases]) => element("details", { class: `box ${kind}`, open: cases.length <= 10 },
    element("summary", {}, `${reason}: ${cases.length}`), element("ul", {}, ...cases.map((one) => element("li", {}, one)))));
  const gone = boxes(data.left_out, ""), known = boxes(data.notes, "know");
  document.getElementById("leftout").replaceChildren(
    element("h2", {}, "Left out"), ...(gone.length ? gone : [element("p", { class: "none" }, "Nothing: every row of the store is on this page.")]),
    ...(known.length ? [element("h2", {}, "Good to know"), ...known] : []));
}
