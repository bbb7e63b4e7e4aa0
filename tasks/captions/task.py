"""Short captions, scored together against several references each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmms_eval.api.task import ConfigurableMessagesTask

from espalier.tasks.captions.consensus import cider, tokenized

Doc = dict[str, Any]

#: The words of InternVL's own evaluation, and of lmms-eval.
QUESTION = "Provide a one-sentence caption for the provided image."

#: Column of a data set that has the references.
REFERENCES = ("text", "annotations_captions")


class Captions(ConfigurableMessagesTask):
    """A task whose metric is CIDEr-D; what was tokenized once is kept, for it may be computed of many parts."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the task file; `class` is what led here and no setting."""
        self._words: dict[str, str] = {}
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def aggregation(self) -> dict[str, Callable[..., float]]:
        """Return how metrics come out of samples."""
        return {**super().aggregation(), "CIDEr": self.cider}

    def cider(self, samples: Sequence[Mapping[str, Any]]) -> float:
        """Return the CIDEr-D of samples. Cost: one start of Java for all captions that are new."""
        texts = [text for one in samples for text in (one["answer"], *one["references"])]
        self._words |= tokenized(text for text in texts if text not in self._words)
        return cider(samples, self._words)


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    if doc["image"] is None:
        raise ValueError("a sample has no picture")
    return [doc["image"].convert("RGB")]


def doc_to_text(doc: Doc) -> str:
    """Return the question, the same for every picture."""
    return QUESTION


def references(doc: Doc) -> list[str]:
    """Return what people wrote about the picture."""
    found = next(list(doc[name]) for name in REFERENCES if name in doc)
    if not found:
        raise ValueError("a sample has no reference captions")
    return found


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Return what the metric needs of a sample; an answer without a word counts as wrong, and as unparsed."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    sample = {"answer": answer, "references": references(doc)}
    return {"CIDEr": sample, "unparsed": float(not any(one.isalnum() for one in answer))}


def consensus(samples: Sequence[Mapping[str, Any]]) -> float:
    """Return the CIDEr-D of samples; a task's own way keeps what it tokenized."""
    words = tokenized({text for one in samples for text in (one["answer"], *one["references"])})
    return cider(samples, words)
