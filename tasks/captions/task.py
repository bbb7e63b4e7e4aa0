"""Short captions, scored together with several references each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmms_eval.api.task import ConfigurableMessagesTask

from espalier.harness.evaluation.scoring.choices import is_legible
from espalier.tasks.captions.consensus import cider, tokenized

Doc = dict[str, Any]

#: The question of InternVL's evaluation, and of lmms-eval.
QUESTION = "Provide a one-sentence caption for the provided image."

#: Columns with references, in different data sets.
REFERENCES = ("text", "annotations_captions")


class CaptionTask(ConfigurableMessagesTask):
    """A task scored by CIDEr-D. It caches tokens, because the metric may be computed for many subsets."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the settings of the task file, without `class`."""
        self._words: dict[str, str] = {}
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def aggregation(self) -> dict[str, Callable[..., float]]:
        """Return the aggregations of metrics."""
        return {**super().aggregation(), "CIDEr": self.cider}

    def cider(self, samples: Sequence[Mapping[str, Any]]) -> float:
        """Return the CIDEr-D of samples. Cost: one start of Java for all new captions."""
        texts = [text for sample in samples for text in (sample["answer"], *sample["references"])]
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
    """Return the reference captions of the picture."""
    captions = next(list(doc[name]) for name in REFERENCES if name in doc)
    if not captions:
        raise ValueError("a sample has no reference captions")
    return captions


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Return the metric's input of a sample; an answer that says nothing is unparsed."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    sample = {"answer": answer, "references": references(doc)}
    return {"CIDEr": sample, "unparsed": float(not is_legible(answer))}


def consensus(samples: Sequence[Mapping[str, Any]]) -> float:
    """Return the CIDEr-D of samples; `CaptionTask.cider` caches tokens."""
    words = tokenized(
        {text for sample in samples for text in (sample["answer"], *sample["references"])}
    )
    return cider(samples, words)
