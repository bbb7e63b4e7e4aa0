// Tables that sort by their headings, and the files of what they show: CSV and LaTeX.
function compared(key, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const [p, q] = [a[key], b[key]];
    if (!has(p) || !has(q)) return has(p) ? -1 : has(q) ? 1 : 0;
    return sign * (typeof p === "string" ? p.localeCompare(q) : p - q);
  };
}

function headOf(column, order, sort) {
  return element("th", {
    class: `${column.text ? "text" : ""} ${column.key}`, scope: "col",
    "aria-sort": order.sort === column.key ? (order.down ? "descending" : "ascending") : "none",
  }, element("button", { type: "button", "data-sort": column.key, onclick: () => sort(column) }, column.head));
}

function save(name, type, text) {
  const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const csvCell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
const csv = (lines) => lines.map((line) => line.map((value) => csvCell(has(value) ? String(value) : "")).join(",") + "\n").join("");

const TEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "†": "\\dag{}", "‡": "\\ddag{}", "–": "--", "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}" };
const tex = (text) => text.replace(/[\\~^†‡–<>|%&$#_{}]/g, (letter) => TEX[letter] || `\\${letter}`);

// heads and lines of texts; bold where `ranks` has 1, underlined where it has 2; a rule after `above` lines; a note below.
function latex(heads, lines, ranks = [], above = lines.length, note = "") {
  const marked = (text, rank) => (rank === 1 ? `\\textbf{${text}}` : rank === 2 ? `\\underline{${text}}` : text);
  const rows = lines.map((line, i) => line.map((text, j) => marked(tex(text), (ranks[i] || [])[j])).join(" & ") + " \\\\");
  return ["% needs \\usepackage{booktabs}", `\\begin{tabular}{l${"r".repeat(heads.length - 1)}}`, "\\toprule", heads.map(tex).join(" & ") + " \\\\",
    "\\midrule", ...rows.slice(0, above), ...(above < rows.length ? ["\\midrule"] : []), ...rows.slice(above), "\\bottomrule", "\\end{tabular}",
    ...(note ? [`\\par{\\footnotesize ${tex(note)}\\par}`] : []), ""].join("\n");
}

// Buttons that save what a table shows; `shown` returns { lines, tex } when one is pressed.
function downloads(name, shown) {
  return element("span", { class: "downloads" },
    element("button", { type: "button", "data-save": "csv", onclick: () => save(`${name}.csv`, "text/csv", csv(shown().lines)) }, "CSV"),
    element("button", { type: "button", "data-save": "tex", onclick: () => save(`${name}.tex`, "text/x-tex", shown().tex) }, "LaTeX"));
}
