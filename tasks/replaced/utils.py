"""Functions that the files of lmms-eval's tasks name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

from typing import Any

from lmms_eval.tasks.ocrbench import utils as ocrbench

from espalier.harness.evaluation.scoring.choices import is_legible

Doc = dict[str, Any]


def ocrbench_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return list(ocrbench.ocrbench_doc_to_visual(doc))


def ocrbench_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return lmms-eval's question."""
    return str(ocrbench.ocrbench_doc_to_text(doc, lmms_eval_specific_kwargs or {}))


def score_ocrbench(doc: Doc, results: list[Any]) -> Doc:
    """Score an answer by lmms-eval's rule: it is right if it contains the reference."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    sample = ocrbench.ocrbench_process_results(doc, [answer])["ocrbench_accuracy"]
    right = float(sample["score"])
    return {
        "ocrbench_accuracy": right,
        "ocrbench_accuracy_lmms_eval": right,
        "unparsed": float(not right and not is_legible(answer)),
    }


def share_of_a_thousand(scores: list[float]) -> float:
    """Return the right answers over the size of the whole set, the published score."""
    return sum(scores) / 1000
