// Tabs and filters: one set of filters for all parts, and a part is drawn when it is seen.
const leftOut = Object.values(data.left_out).reduce((sum, cases) => sum + cases.length, 0);
const PARTS = {
  leaders: ["Leaderboard", drawLeaders], board: ["All results", drawBoard], curves: ["Retention curves", drawCurves], cost: ["Cost and score", drawCost], methods: ["Methods", drawMethods],
  tables: ["Published tables", drawTables], pictures: ["Decoding, cache, denoising", drawPictures], leftout: [`Left out (${leftOut})`, drawLeftOut],
};
const UNFILTERED = ["tables", "pictures", "leftout"];
let part = "leaders";

function draw() {
  PARTS[part][1]();
}

function open(name) {
  part = name in PARTS ? name : "leaders";
  for (const key of Object.keys(PARTS)) {
    document.getElementById(key).hidden = key !== part;
    const tab = document.getElementById(`tab-${key}`);
    tab.setAttribute("aria-selected", String(key === part));
    tab.tabIndex = key === part ? 0 : -1;
  }
  document.getElementById(`tab-${part}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  document.querySelector("details.filters").hidden = UNFILTERED.includes(part);
  draw();
}

// The address holds the part, the filters that are set, and the method or table that is shown: it can be kept and sent.
function writeAddress() {
  const set = new URLSearchParams(Object.entries(filters).filter(([, value]) => value));
  if (part === "methods" && chosen.method) set.set("method", chosen.method);
  if (part === "tables") set.set("table", data.tables[chosen.table].name);
  history.replaceState(null, "", `#/${part}${String(set) ? `?${set}` : ""}`);
}

function readAddress() {
  const [name, query] = location.hash.slice(2).split("?"), set = new URLSearchParams(query || "");
  for (const key in filters) {
    filters[key] = set.get(key) || "";
    document.getElementById(`f-${key}`).value = filters[key];
    if (document.getElementById(`f-${key}`).value !== filters[key]) filters[key] = ""; // a value that this page lacks
  }
  const table = data.tables.findIndex((one) => one.name === set.get("table"));
  if (table >= 0) chosen.table = table;
  chosen.method = set.get("method") || chosen.method; // drawMethods takes another where this page lacks it
  board.page = 0;
  open(name);
}

function filter(key, value) {
  filters[key] = value;
  board.page = 0;
  writeAddress();
  draw();
}

function offer(key, every, values, words = String) {
  const list = document.getElementById(`f-${key}`);
  list.replaceChildren(element("option", { value: "" }, every), ...values.map((value) => element("option", { value }, words(value))));
  list.addEventListener("change", () => filter(key, list.value));
}

offer("model", "all models", sorted(rows.map((row) => row.model)));
offer("benchmark", "all benchmarks", sorted(rows.map((row) => row.benchmark)));
offer("kind", "all kinds", data.kinds.filter((kind) => rows.some((row) => row.kind === kind)));
offer("ratio", "any share", sorted(rows.map((row) => row.at)), (share) => (share < 0 ? `all but ${-share}` : share ? removed(share) : "none"));
document.getElementById("f-text").addEventListener("input", (event) => filter("text", event.target.value.trim()));
document.getElementById("f-reset").addEventListener("click", () => {
  document.getElementById("filters").reset();
  for (const key in filters) filters[key] = "";
  board.page = 0;
  writeAddress();
  draw();
});
document.querySelector("nav").append(...Object.entries(PARTS).map(([key, [words]]) => element("button", {
  type: "button", role: "tab", id: `tab-${key}`, "aria-controls": key, onclick: () => { open(key); writeAddress(); },
}, words)));
document.querySelector("nav").addEventListener("keydown", (event) => {
  const keys = Object.keys(PARTS), place = keys.indexOf(part), last = keys.length - 1;
  const next = { ArrowRight: place === last ? 0 : place + 1, ArrowLeft: place ? place - 1 : last, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  open(keys[next]);
  writeAddress();
  document.getElementById(`tab-${keys[next]}`).focus();
});
window.addEventListener("hashchange", readAddress);
document.getElementById("summary").textContent =
  `${[counted(rows, "row"), ...["model", "benchmark"].map((key) => counted(unique(rows.map((row) => row[key])), key)),
    counted(unique(rows.map((row) => row.curve)).filter((name) => name !== "none"), "method")].join(", ")}; position policy ${data.positions}.`;

// On a telephone they would take half of the first screen.
document.querySelector("details.filters").open = window.innerWidth > 640;
let width = document.querySelector("main").clientWidth, timer = 0;
window.addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    const now = document.querySelector("main").clientWidth;
    if (now !== width) { width = now; document.querySelector("details.filters").open = window.innerWidth > 640; draw(); }
  }, 150);
});
readAddress();
