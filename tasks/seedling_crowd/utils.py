"""Functions that the task file of crowded scenes names. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from espalier.harness.seedling import crowd as benchmark
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.seedling import crowd as benchmark

Doc = dict[str, Any]


def process_docs(dataset: Any) -> Any:
    """Expand the one-line data file into samples."""
    from datasets import Dataset

    return Dataset.from_list([sample for line in dataset for sample in benchmark.samples(**line)])


def doc_to_visual(doc: Doc) -> list[Any]:
    """Draw the scene of a sample as a PIL image."""
    return [benchmark.sample_scene(doc).to_pil()]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return the question, with the prompt of the task file around it."""
    extra = lmms_eval_specific_kwargs or {}
    return extra.get("pre_prompt", "") + doc["question"] + extra.get("post_prompt", "")


def doc_to_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the sample as chat messages: the image, then the question."""
    image = {"type": "image", "url": doc_to_visual(doc)[0]}
    text = {"type": "text", "text": doc_to_text(doc, lmms_eval_specific_kwargs)}
    return [{"role": "user", "content": [image, text]}]


def process_crowd(doc: Doc, results: list[Any]) -> Doc:
    answer = results[0] if results else ""
    return benchmark.crowd_metrics(doc, answer if isinstance(answer, str) else "")
