"""Functions that the MMMU task file names. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

from lmms_eval.tasks.mmmu import utils as mmmu

try:
    from espalier.harness.evaluation.scoring.choices import is_legible, letter, lettered
    from espalier.harness.evaluation.upstream import without_guesses
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.evaluation.scoring.choices import is_legible, letter, lettered
    from espalier.harness.evaluation.upstream import without_guesses

Doc = dict[str, Any]


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the pictures that the question refers to."""
    return list(mmmu.mmmu_doc_to_visual(doc))


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return lmms-eval's question."""
    return str(mmmu.mmmu_doc_to_text(doc, lmms_eval_specific_kwargs))


def doc_to_messages(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> list[Doc]:
    """Return the question with its pictures where it names them."""
    return list(mmmu.mmmu_doc_to_messages(doc, lmms_eval_specific_kwargs))


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Score the option or text that an answer states; an answer without one is wrong and unparsed.

    Open questions are read by lmms-eval's rules, and all questions for `mmmu_acc_lmms_eval`.
    """
    answer = results[0] if results and isinstance(results[0], str) else ""
    with without_guesses():
        sample = mmmu.mmmu_process_results(doc, [answer])["mmmu_acc"]
    if doc["question_type"] == "multiple-choice":
        stated = letter(answer, lettered(ast.literal_eval(doc["options"])))
        scored, unparsed = {**sample, "parsed_pred": [stated]}, not stated
    else:
        scored, unparsed = sample, not is_legible(answer)
    return {"mmmu_acc": scored, "mmmu_acc_lmms_eval": sample, "unparsed": float(unparsed)}


def accuracy(samples: list[Doc]) -> float:
    """Return the share of questions answered right."""
    return float(mmmu.mmmu_aggregate_results(samples))
