"""Functions that the task file names. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import json
from typing import Any

from espalier.harness.evaluation.synthetic_prompts import PromptComposition, parts

Doc = dict[str, Any]


def process_docs(dataset: Any) -> Any:
    """Return numbered samples; the data file has their count."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"number": number} for line in dataset for number in range(line["count"])]
    )


def doc_to_visual(doc: Doc, lmms_eval_specific_kwargs: Doc) -> list[Any]:
    return [part for part in _parts(doc, lmms_eval_specific_kwargs) if not isinstance(part, str)]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc) -> str:
    """Return the words after the pictures."""
    return str(_parts(doc, lmms_eval_specific_kwargs)[-1])


def doc_to_messages(doc: Doc, lmms_eval_specific_kwargs: Doc) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "url": part}
        for part in _parts(doc, lmms_eval_specific_kwargs)
    ]
    return [{"role": "user", "content": content}]


def process_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the measured metrics, which follow the answer like a judge's verdict."""
    return dict(json.loads(results[1]))


def _parts(doc: Doc, settings: Doc) -> list[Any]:
    prompt = PromptComposition(settings["before"], settings["pictures"], settings["behind"])
    return parts(prompt, doc["number"], settings["seed"])
