"""Functions that the clip task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from espalier.harness.seedling.video import clip_benchmarks as benchmarks
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.seedling.video import clip_benchmarks as benchmarks

Doc = dict[str, Any]
Settings = dict[str, str] | None


def process_docs(dataset: Any) -> Any:
    """Expand the one-line data file into samples."""
    from datasets import Dataset

    rows = [sample for line in dataset for sample in benchmarks.samples(**line)]
    return Dataset.from_list(rows)


def doc_to_visual(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> list[Any]:
    """Draw the clip of a sample: frames in memory, or the path of a file if the settings name a folder."""
    clip = benchmarks.sample_clip(doc)
    folder = (lmms_eval_specific_kwargs or {}).get("mp4", "")
    return [str(benchmarks.write_mp4(clip, folder)) if folder else benchmarks.in_memory(clip)]


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Return the question, with the prompt of the task file around it."""
    extra = lmms_eval_specific_kwargs or {}
    return f"{extra.get('pre_prompt', '')}{doc['question']}{extra.get('post_prompt', '')}"


def doc_to_messages(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> list[dict[str, Any]]:
    """Return the sample as chat messages: the video, then the question."""
    video = {"type": "video", "url": doc_to_visual(doc, lmms_eval_specific_kwargs)[0]}
    text = {"type": "text", "text": doc_to_text(doc, lmms_eval_specific_kwargs)}
    return [{"role": "user", "content": [video, text]}]


def _answer(results: list[Any]) -> str:
    return results[0] if results and isinstance(results[0], str) else ""


def process_caption(doc: Doc, results: list[Any]) -> Doc:
    return benchmarks.caption_metrics(doc, _answer(results))


def process_qa(doc: Doc, results: list[Any]) -> Doc:
    return benchmarks.qa_metrics(doc, _answer(results))


def process_find(doc: Doc, results: list[Any]) -> Doc:
    return benchmarks.find_metrics(doc, _answer(results))
