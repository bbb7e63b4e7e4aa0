"""Detailed descriptions of pictures, with three references each."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from espalier.harness.evaluation.scoring.choices import is_legible
from espalier.tasks.videos.utils import rouge_l, words

Doc = dict[str, Any]

REFERENCES = ("GT_Caption_GPT4O", "GT_Caption_GPT4V", "GT_Caption_Gemini15Pro")


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    if not doc["binary"]:
        raise ValueError(f"{doc['image']} has no picture")
    return [Image.open(io.BytesIO(doc["binary"])).convert("RGB")]


def doc_to_text(doc: Doc) -> str:
    """Return the question, the same for every picture."""
    return "Describe this image in detail."


def references(doc: Doc) -> list[str]:
    """Return the references of a picture."""
    texts = [doc[name] for name in REFERENCES if doc.get(name)]
    if not texts:
        raise ValueError(f"{doc['image']} has no reference descriptions")
    return texts


def process_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return ROUGE-L against the nearest reference and the length in words; an answer that says nothing is unparsed."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    best = max(rouge_l(answer, reference) for reference in references(doc))
    length, unread = len(words(answer)), not is_legible(answer)
    return {"rouge_l": best, "words": float(length), "unparsed": float(unread)}
