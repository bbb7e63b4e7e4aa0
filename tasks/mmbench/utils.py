"""Functions that the MMBench task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

from typing import Any

from lmms_eval.tasks.mmbench import cn_utils

from espalier.tasks.mmbench.letters import letter_of, share_of_questions

Doc = dict[str, Any]


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return cn_utils.mmbench_doc_to_visual(doc)


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return lmms-eval's question."""
    return str(cn_utils.mmbench_doc_to_text(doc, lmms_eval_specific_kwargs))


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Score the letter that an answer states; an answer without one is wrong, and unparsed."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    item = {option: doc.get(option) for option in "ABCD"} | {"prediction": answer.strip()}
    named = letter_of(item)
    sample = {"index": int(doc["index"]), "right": named == doc["answer"]}
    return {"accuracy": sample, "unparsed": float(not named)}


def accuracy(samples: list[Doc]) -> float:
    """Return the share of questions answered right in every rotation."""
    return share_of_questions(samples)
