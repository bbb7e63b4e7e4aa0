"""Compare HTML tables as trees (TEDS)."""

from __future__ import annotations

import html
import re
import unicodedata

import lxml.html
from apted import APTED
from lxml import etree
from table_recognition_metric import TEDS
from table_recognition_metric.utils import CustomConfig

from espalier.harness.errors import FOREIGN

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


def similarity(answer: str, reference: str) -> tuple[float, float]:
    """Return the similarity of two tables with cell contents, and by structure only. 1 is equal.

    The distance of the trees is divided by the larger number of elements below the table, including elements in cells,
    as in OmniDocBench's evaluation. Anything that is not a table, or has impossible spans, has 0. Cost: O(n^2) to
    O(n^3) in the number of elements; a thousand cells take seconds.
    """
    tree, reference_tree = _table(normalised(answer)), _table(normalised(reference))
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


def normalised(table: str) -> str:
    """Return the compared part of a table: headings as cells, no styles, no wrapping elements, NFKC."""
    table = HEAD.sub(r"<\1td", MATHML.sub(_alternative, table))
    table = unicodedata.normalize("NFKC", WRAPPING.sub("", table).replace("\n", "")).strip()
    inside = "".join(CONTENT.findall(table))
    inside = re.sub(r"\s+", " ", LOOKS.sub("", inside))
    return f"<html><body><table>{inside}</table></body></html>"


def cells(table: str) -> list[str]:
    """Return the nonempty texts of a table's cells."""
    tree = _table(normalised(table))
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
