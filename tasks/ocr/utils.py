"""Functions that the OCR task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from espalier.harness.media.images import page_image
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.media.images import page_image
from espalier.harness.evaluation.scoring.choices import has_words, is_legible
from espalier.harness.evaluation.scoring.documents.omnidoc_page import (
    PageScores,
    drawn_scores,
    overall_score,
    score_page,
)
from espalier.harness.evaluation.scoring.page_files import BASELINE, UNIT_TESTS
from espalier.harness.evaluation.scoring.text_scores import plain_markdown, read_label, read_scores
from espalier.harness.evaluation.scoring.unit_tests import passes
from espalier.harness.media.images import open_image

Doc = dict[str, Any]

#: The question of DeepSeek-OCR's training on pages, and of RTPrune's script.
QUESTION = "<|grounding|>Convert the document to markdown."

#: Pixels of the longer side of a page rendered from its PDF file, as in olmOCR-Bench.
LONGEST = 2048

#: Categories with tests of formulas, which the release renders and this code compares as LaTeX.
WRITTEN = ("arxiv_math", "old_scans_math")


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the page as a PIL image."""
    path = Path(doc["image"])
    if path.suffix == ".pdf":
        return [page_image(path, doc["page"], LONGEST)]
    return [open_image(path)]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return the question, with the prompt of the task file around it."""
    extra = lmms_eval_specific_kwargs or {}
    return extra.get("pre_prompt", "") + QUESTION + extra.get("post_prompt", "")


def doc_to_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    image = {"type": "image", "url": doc_to_visual(doc)[0]}
    text = {"type": "text", "text": doc_to_text(doc, lmms_eval_specific_kwargs)}
    return [{"role": "user", "content": [image, text]}]


def _answer(results: Sequence[Any]) -> tuple[str, dict[str, float]]:
    """Return the text of an answer, "" for signs and special tokens alone, and the metric `unparsed`."""
    answer = results[0] if results else ""
    answer = plain_markdown(answer) if isinstance(answer, str) and has_words(answer) else ""
    return answer, {"unparsed": float(not is_legible(answer))}


def _page(doc: Doc, page_scores: PageScores) -> Doc:
    """Return the metrics of a page, without metrics of parts that it lacks."""
    scores = {
        "text_edit": page_scores.text_edit,
        "formula_edit": page_scores.formula_edit,
        "table_teds": page_scores.table_teds,
        "table_teds_s": page_scores.table_teds_s,
        "order_edit": page_scores.order_edit,
    }
    language = {"english": "text_edit_en", "simplified_chinese": "text_edit_zh"}.get(
        doc["language"]
    )
    if language:
        scores[language] = page_scores.text_edit
    parts = [
        _share(page_scores.text_edit),
        _share(page_scores.formula_edit),
        page_scores.table_teds,
    ]
    present = {name: value for name, value in scores.items() if value is not None}
    return present | {"overall_formula_edit": parts}


def _share(edit: float | None) -> float | None:
    return None if edit is None else 1 - edit


def omnidocbench(doc: Doc, results: list[Any]) -> Doc:
    answer, unparsed = _answer(results)
    return _page(doc, score_page(json.loads(doc["annotation"]), answer)) | unparsed


def omnidocbench_cdm(doc: Doc, results: list[Any]) -> Doc:
    answer, unparsed = _answer(results)
    page_scores = score_page(json.loads(doc["annotation"]), answer)
    drawn = drawn_scores(page_scores.formulas)
    formula = {"formula_cdm": sum(drawn) / len(drawn)} if drawn else {}
    parts = [_share(page_scores.text_edit), formula.get("formula_cdm"), page_scores.table_teds]
    return _page(doc, page_scores) | formula | {"overall": parts} | unparsed


def aggregate_overall(parts: list[list[float | None]]) -> float:
    return overall_score(parts)


def olmocr_bench(doc: Doc, results: list[Any]) -> Doc:
    """Return the numbers of passed and of all tests of a page, by category."""
    answer, unparsed = _answer(results)
    tests = json.loads(doc["tests"])
    counts: dict[str, list[int]] = {}
    for test in tests:
        count = counts.setdefault(test["category"], [0, 0])
        count[0] += passes(test, answer)
        count[1] += 1
    named = {f"{name}_latex" if name in WRITTEN else name: count for name, count in counts.items()}
    every = [counts.get(name, [0, 0]) for name in (*UNIT_TESTS, BASELINE)]
    return named | {"overall_latex": every} | unparsed


def aggregate_rate(counts: list[list[int]]) -> float:
    """Return the share of tests that passed."""
    return sum(passed for passed, _ in counts) / sum(number for _, number in counts)


def aggregate_categories(pages: list[list[list[int]]]) -> float:
    """Return the mean over categories of the share of passed tests; a category without tests is left out."""
    sums = [
        [sum(count) for count in zip(*column, strict=True)] for column in zip(*pages, strict=True)
    ]
    rates = [passed / number for passed, number in sums if number]
    return sum(rates) / len(rates)


def _read(doc: Doc, results: list[Any], scene: bool, one_line: bool) -> Doc:
    answer, unparsed = _answer(results)
    read, right = (read_label(text, scene, one_line) for text in (answer, doc["label"]))
    scores = read_scores(read, right)
    return scores | {"meteor_no_synonyms": scores.pop("meteor")} | unparsed


def ocean_document(doc: Doc, results: list[Any]) -> Doc:
    return _read(doc, results, scene=False, one_line=False)


def ocean_scene_text(doc: Doc, results: list[Any]) -> Doc:
    return _read(doc, results, scene=True, one_line=False)


def ocean_handwriting(doc: Doc, results: list[Any]) -> Doc:
    return _read(doc, results, scene=False, one_line=True)
