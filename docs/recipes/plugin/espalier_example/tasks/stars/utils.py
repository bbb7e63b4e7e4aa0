"""Functions used by stars.yaml. lmms-eval runs this file once per function, so keep no state here."""

from __future__ import annotations

from typing import Any

from espalier.harness.seedling.scene_benchmarks import shared_scenes
from espalier.harness.seedling.scenes import make_layout

Doc = dict[str, Any]


def process_docs(dataset: Any) -> Any:
    """Expand the one-line data file into samples."""
    from datasets import Dataset

    (line,) = dataset
    index = range(line["first"], line["first"] + line["count"])
    layout = make_layout("test", 0, index)
    rows = [
        {
            "index": scene,
            "question": "is there a star ?",
            "answer": "yes" if any(thing.name == "star" for thing in layout.objects(n)) else "no",
        }
        for n, scene in enumerate(index)
    ]
    return Dataset.from_list(rows)


def doc_to_visual(doc: Doc) -> list[Any]:
    """Draw the scene of a sample as a PIL image."""
    return [shared_scenes().scene("test", 0, doc["index"]).to_pil()]


def doc_to_messages(doc: Doc) -> list[Doc]:
    """Return the sample as chat messages: the image, then the question."""
    content = [
        {"type": "image", "url": doc_to_visual(doc)[0]},
        {"type": "text", "text": doc["question"]},
    ]
    return [{"role": "user", "content": content}]


def process_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Score the answer of the model: yes or no, and nothing else."""
    answer = results[0].strip() if results and isinstance(results[0], str) else ""
    return {
        "accuracy": float(answer == doc["answer"]),
        "unparsed": float(answer not in ("yes", "no")),
    }
