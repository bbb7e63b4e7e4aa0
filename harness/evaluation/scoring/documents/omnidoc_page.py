"""Score one page of OmniDocBench v1.5, end to end: a page's annotation and the markdown of an answer."""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lxml.html
import numpy as np
from apted import APTED
from lxml import etree
from rapidfuzz.distance import Levenshtein
from table_recognition_metric import TEDS
from table_recognition_metric.utils import CustomConfig

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.evaluation.scoring.documents.block_matches import (
    FOUND,
    BlockMatch,
    distances,
    one_to_one,
    quick_match,
)
from espalier.harness.evaluation.scoring.documents.markdown_blocks import (
    MarkdownBlock,
    blocks,
    letters,
    lines_of_column,
    plain_formula,
    unicode_text,
)

#: A table of an answer with more than MANY elements, and more than TIMES those of the reference, is wrong: its score
#: could not reach 1 / TIMES, and the distance of large trees takes minutes.
MANY, TIMES = 400, 4
#: Largest tree that is compared; references are smaller.
MOST = 4000

CONTENT = re.compile(r"<table\b[^>]*>(.*)</table>", re.DOTALL | re.IGNORECASE)
LOOKS = re.compile(r' (?:style|height|width|align|class)=".*?"')
WRAPPING = re.compile(
    r"</?(?:tbody|thead|sup|sub|span|div|p)\b[^>]*>|<colgroup>.*?</colgroup>", re.IGNORECASE
)
HEAD = re.compile(r"<(/?)th(?=[\s>])", re.IGNORECASE)
MATHML = re.compile(r"<math\b([^>]*)>.*?</math>", re.DOTALL | re.IGNORECASE)
ALTERNATIVE = re.compile(r'alttext="(.*?)"', re.DOTALL)


def table_similarity(answer: str, reference: str) -> tuple[float, float]:
    """Return the similarity of two tables with cell contents, and by structure only. 1 is equal.

    The distance of the trees is divided by the larger number of elements below the table, including elements in cells,
    as in OmniDocBench's evaluation. Anything that is not a table, or has impossible spans, has 0. Cost: O(n^2) to
    O(n^3) in the number of elements; a thousand cells take seconds.
    """
    tree, reference_tree = _table(normalised_table(answer)), _table(normalised_table(reference))
    if tree is None or reference_tree is None:
        return 0.0, 0.0
    answer_size, reference_size = (
        max(len(element.xpath(".//*")), 1) for element in (tree, reference_tree)
    )
    if max(answer_size, reference_size) > MOST or answer_size > max(MANY, TIMES * reference_size):
        return 0.0, 0.0
    full, bare = (
        _distance(tree, reference_tree, structure_only) / max(answer_size, reference_size)
        for structure_only in (False, True)
    )
    return max(0.0, 1.0 - full), max(0.0, 1.0 - bare)


def normalised_table(table: str) -> str:
    """Return the compared part of a table: headings as cells, no styles, no wrapping elements, NFKC."""
    table = HEAD.sub(r"<\1td", MATHML.sub(_alternative, table))
    table = unicodedata.normalize("NFKC", WRAPPING.sub("", table).replace("\n", "")).strip()
    inside = "".join(CONTENT.findall(table))
    inside = re.sub(r"\s+", " ", LOOKS.sub("", inside))
    return f"<html><body><table>{inside}</table></body></html>"


def table_cells(table: str) -> list[str]:
    """Return the nonempty texts of a table's cells."""
    tree = _table(normalised_table(table))
    texts = [] if tree is None else [cell.text_content().strip() for cell in tree.iter("td")]
    return [text for text in texts if text]


def _table(page: str) -> lxml.html.HtmlElement | None:
    parser = lxml.html.HTMLParser(remove_comments=True, encoding="utf-8")
    try:
        document = lxml.html.fromstring(page.encode(errors="replace"), parser=parser)
    except (*FOREIGN, etree.ParserError):
        return None
    tables = document.xpath("body/table")
    return tables[0] if tables else None


def _distance(
    answer: lxml.html.HtmlElement, reference: lxml.html.HtmlElement, structure_only: bool
) -> float:
    reader = TEDS(structure_only=structure_only)
    try:
        trees = [reader.load_html_tree(tree) for tree in (answer, reference)]
    except ValueError:  # a span that is not a number
        return float("inf")
    return float(APTED(*trees, CustomConfig()).compute_edit_distance())


def _alternative(formula: re.Match[str]) -> str:
    text = ALTERNATIVE.search(formula.group(1))
    return f"${html.escape(html.unescape(text.group(1)), quote=False)}$" if text else ""


#: Categories of scored text; displayed formulas and tables have separate scores.
TEXTS = ("text_block", "title", "code_txt", "code_txt_caption", "reference")
#: Categories that are matched, so that they do not match other blocks, and not scored.
BESIDE = [
    "figure_caption",
    "figure_footnote",
    "table_caption",
    "table_footnote",
    "code_algorithm",
    "code_algorithm_caption",
    "header",
    "footer",
    "page_footnote",
    "page_number",
    "equation_caption",
]
FORMULA = "equation_isolated"


@dataclass(frozen=True)
class PageElement:
    """A block of the page: category, content, content as compared, position in reading order."""

    category: str
    content: str
    text: str
    order: float


@dataclass(frozen=True)
class PageFormula:
    """A formula of the page and its match, as written; an empty answer means a missing formula."""

    reference: str
    answer: str


@dataclass(frozen=True)
class PageScores:
    """The metrics of one page; None for a kind that the page lacks.

    Attributes:
        text_edit: edits of all texts over their length, 0 is equal.
        formula_edit: the same for displayed formulas.
        order_edit: edit distance of the reading order.
        table_teds: mean similarity of the tables, 1 is equal.
        table_teds_s: the same for their structure only.
        formulas: displayed formulas with their matches.
    """

    text_edit: float | None
    formula_edit: float | None
    order_edit: float | None
    table_teds: float | None
    table_teds_s: float | None
    formulas: tuple[PageFormula, ...]


def score_page(page: Mapping[str, Any], answer: str) -> PageScores:
    """Compare an answer in markdown with an entry of OmniDocBench.json. No answer makes it raise.

    Cost: see `quick_match` and `tables.similarity`.
    """
    elements = _elements(page)
    answer_blocks = blocks(answer)
    tables_right = [element for element in elements if element.category == "table"]
    teds, spare = _tables(tables_right, answer_blocks)
    # Inline formulas come last: a text matches blocks at its own position better.
    mixed = sorted(
        [block for block in answer_blocks if not block.kind.endswith("table")] + spare,
        key=lambda block: (block.kind == "inline", block.position),
    )
    lines = (
        line for element in elements if element.category != "table" for line in _lines(element)
    )
    page_lines = sorted((line for line in lines if line.text), key=lambda line: line.order)
    compared = [
        (block, letters(block.content) if block.kind == "text" else plain_formula(block.content))
        for mixed_block in mixed
        for block in _split(mixed_block)
    ]
    answer_lines = [(block, text) for block, text in compared if text]
    unscored = [line.text for line in page_lines if line.category in BESIDE]
    near = np.any(distances(unscored, [text for _, text in answer_lines]) < FOUND, axis=0).tolist()
    page_lines = [line for line in page_lines if line.category not in BESIDE]
    answer_lines = [line for line, taken in zip(answer_lines, near, strict=True) if not taken]
    pairs = quick_match(
        [line_element.text for line_element in page_lines], [text for _, text in answer_lines]
    )
    return _scores(page_lines, answer_lines, pairs, teds)


def _scores(
    page_lines: Sequence[PageElement],
    answer_lines: Sequence[tuple[MarkdownBlock, str]],
    pairs: Sequence[BlockMatch],
    teds: Sequence[tuple[float, float]],
) -> PageScores:
    texts: list[tuple[str, str]] = []
    formulas: list[tuple[str, str]] = []
    written: list[PageFormula] = []
    ordered: list[BlockMatch] = []
    for pair in pairs:
        elements = [page_lines[place] for place in pair.page]
        matched = [answer_lines[place][0] for place in pair.answer]
        compared = (
            "".join(element.text for element in elements),
            "".join(answer_lines[place][1] for place in pair.answer),
        )
        if Counter(element.category for element in elements).most_common(1)[0][0] != FORMULA:
            texts.append(compared)
            ordered.append(pair)
        elif matched and matched[0].kind not in ("inline", "formula"):
            # The answer has the formula as text.
            plain = unicode_text("".join(element.content for element in elements))
            texts.append((letters(plain), compared[1]))
        else:
            formulas.append(compared)
            written.append(
                PageFormula(
                    _column([element.content for element in elements]),
                    _column([element.content for element in matched]),
                )
            )
    return PageScores(
        text_edit=_share(texts),
        formula_edit=_share(formulas),
        order_edit=_order(page_lines, answer_lines, ordered),
        table_teds=_mean([full for full, _ in teds]),
        table_teds_s=_mean([bare for _, bare in teds]),
        formulas=tuple(written),
    )


def _elements(page: Mapping[str, Any]) -> list[PageElement]:
    """Return the blocks of a page; blocks that the layout splits are joined.

    A block that is split twice has its middle piece twice, as in the released evaluation of published scores.
    """
    rings: list[list[Any]] = []
    for relation in page["extra"]["relation"]:
        if relation.get("relation_type") == "truncated":
            ends = [relation["source_anno_id"], relation["target_anno_id"]]
            touched = [ring for ring in rings if set(ring) & set(ends)]
            for ring in touched:
                ring += ends
            if not touched:
                rings.append(ends)
    parts = {annotation["anno_id"]: annotation for annotation in page["layout_dets"]}
    cut = {name for ring in rings for name in ring}
    elements = [
        _element(annotation, _content(annotation))
        for annotation in page["layout_dets"]
        if annotation["anno_id"] not in cut
    ]
    for ring in rings:
        pieces = sorted((parts[name] for name in ring if name in parts), key=_place)
        if pieces:
            elements.append(
                _element(pieces[0], "".join(_content(annotation) for annotation in pieces))
            )
    return [
        annotation
        for annotation in elements
        if annotation.category in (*TEXTS, *BESIDE, FORMULA, "table")
    ]


def _element(annotation: Mapping[str, Any], content: str) -> PageElement:
    category = annotation["category_type"]
    if category == "table":
        return PageElement(category, content, content, _place(annotation))
    compared = plain_formula if category == FORMULA else letters
    return PageElement(category, content, compared(content), _place(annotation))


def _content(annotation: Mapping[str, Any]) -> str:
    column = {"table": "html", FORMULA: "latex"}.get(annotation["category_type"], "text")
    return str(annotation.get(column) or "")


def _place(annotation: Mapping[str, Any]) -> float:
    return float(annotation.get("order") or 0)


def _lines(element: PageElement) -> list[PageElement]:
    """Return a formula of several lines as separate lines, so that each can be matched."""
    lines = lines_of_column(element.content) if element.category == FORMULA else None
    return (
        [element]
        if lines is None
        else [
            PageElement(
                FORMULA,
                f"\\[{line}\\]",
                plain_formula(f"\\[{line}\\]"),
                element.order + number / 10,
            )
            for number, line in enumerate(lines, start=1)
        ]
    )


def _split(block: MarkdownBlock) -> list[MarkdownBlock]:
    lines = None if block.kind == "text" else lines_of_column(block.content)
    return (
        [block]
        if lines is None
        else [
            MarkdownBlock(block.kind, f"\\[{line}\\]", block.position + number)
            for number, line in enumerate(lines)
        ]
    )


def _tables(
    page_tables: Sequence[PageElement], answer_blocks: Sequence[MarkdownBlock]
) -> tuple[list[tuple[float, float]], list[MarkdownBlock]]:
    """Return the similarity of each table of the page, and the cells of unmatched tables as texts."""
    if not page_tables:
        return [], []
    tables_of_answer = [block for block in answer_blocks if block.kind == "table"]
    if sum(block.kind == "latex_table" for block in answer_blocks) > len(tables_of_answer):
        return [(0.0, 0.0)] * len(page_tables), []
    ordered = sorted(page_tables, key=lambda element: element.order)
    pairs = one_to_one(
        [element.content for element in ordered], [block.content for block in tables_of_answer]
    )
    scores = [
        table_similarity(tables_of_answer[pair.answer[0]].content, ordered[pair.page[0]].content)
        if pair.answer
        else (0.0, 0.0)
        for pair in pairs
    ]
    taken = {place for pair in pairs for place in pair.answer}
    spare = [
        MarkdownBlock("text", cell, block.position)
        for place, block in enumerate(tables_of_answer)
        if place not in taken
        for cell in table_cells(block.content)
    ]
    return scores, spare


def _share(compared: Sequence[tuple[str, str]]) -> float | None:
    """Return all edits divided by all lengths, the longer of each pair."""
    length = sum(max(len(first), len(second)) for first, second in compared)
    edits = sum(Levenshtein.distance(first, second) for first, second in compared)
    return edits / length if length else None


def _order(
    page_lines: Sequence[PageElement],
    answer_lines: Sequence[tuple[MarkdownBlock, str]],
    pairs: Sequence[BlockMatch],
) -> float | None:
    def orders(chosen: Sequence[BlockMatch]) -> list[float]:
        return [
            order for pair in chosen for place in pair.page if (order := page_lines[place].order)
        ]

    wanted = sorted(orders(pairs))
    read = orders(
        sorted(
            (pair for pair in pairs if pair.answer),
            key=lambda pair: answer_lines[pair.answer[0]][0].position,
        )
    )
    if not wanted and not read:
        return None
    return float(Levenshtein.normalized_distance(wanted, read))


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _column(lines: Sequence[str]) -> str:
    """Return formulas as written; several become one array."""
    if len(lines) < 2:
        return "".join(lines)
    rows = " \\\\ ".join("{" + re.sub(r"^\$+|\$+$", "", line.strip()) + "}" for line in lines)
    return f"\\begin{{array}}{{l}} {rows} \\end{{array}}"


def overall_score(parts: Sequence[Sequence[float | None]]) -> float:
    """Return the mean of the parts' means, each over the pages that have the part; a part without pages is left out.

    Args:
        parts: scores of text, formulas and tables of each page, 1 is perfect, None for a missing part.

    Raises:
        ZeroDivisionError: no page has any part.
    """
    columns = [
        [value for value in column if value is not None] for column in zip(*parts, strict=True)
    ]
    means = [sum(column) / len(column) for column in columns if column]
    return float(sum(means) / len(means))


#: Programs that draw the formulas: TeX with Chinese fonts, ImageMagick and Node.js.
PROGRAMS = ("xelatex", "magick", "node")
PACKAGES = ("skimage",)
MODULE = "lmms_eval.tasks.mdpbench.cdm_metric"

#: A formula that a working installation finds equal to itself.
KNOWN = PageFormula("\\[a^{2}+b^{2}=c^{2}\\]", "\\[a^{2}+b^{2}=c^{2}\\]")


def missing_programs() -> list[str]:
    """Return the programs and packages that are missing."""
    return [name for name in PROGRAMS if shutil.which(name) is None] + [
        name for name in PACKAGES if importlib.util.find_spec(name) is None
    ]


def check_drawing(key: str) -> None:
    """Raise UserError unless formulas can be compared here.

    The code gives 0 to a formula that it cannot draw, so it must find a formula equal to itself.
    """
    absent = missing_programs()
    if absent:
        raise UserError(
            f"{key}: formula_cdm needs {', '.join(absent)}, which this machine does not have; "
            "valid: a machine with TeX (xelatex, xeCJK and its fonts), ImageMagick, Node.js and scikit-image, or "
            "benchmark=omnidocbench, which compares formulas by edit distance"
        )
    if drawn_scores([KNOWN]) != [1.0]:
        raise UserError(
            f"{key}: formula_cdm finds a formula unequal to itself; valid: xelatex, magick and node that draw formulas"
        )


def drawn_scores(formulas: Sequence[PageFormula]) -> list[float]:
    """Return the CDM of each formula: 1 is equal, a formula missing in the answer has 0.

    Cost: a TeX run or two each, about a second.
    """
    # Imported here: it needs optional packages.
    module: Any = importlib.import_module(MODULE)
    with TemporaryDirectory(prefix="cdm-") as place:
        judge = module.CDM(output_root=str(Path(place)))
        return [
            float(judge.evaluate(reference, answer, str(number))["F1_score"])
            if (reference := _bare(formula.reference)) and (answer := _bare(formula.answer))
            else 0.0
            for number, formula in enumerate(formulas)
        ]


def _bare(latex: str) -> str:
    latex = latex.strip().strip("$").strip()
    inside = latex.startswith("\\[") and latex.endswith("\\]") and latex.count("\\[") == 1
    return latex[2:-2].strip() if inside else latex
