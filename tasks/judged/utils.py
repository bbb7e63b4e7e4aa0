"""Functions that the judged task files name. lmms-eval runs this file once per name: no state here.

`process_results` of a judged task gets the answer and the text of the judge's verdict, which always holds a score.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from espalier.harness.evaluation.judging.judge_scores import pair, single
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.evaluation.judging.judge_scores import pair, single

Doc = dict[str, Any]

#: Kinds of questions of LLaVA-Bench.
LLAVA_CATEGORIES = ("conv", "detail", "complex")

#: The abilities of MMBench-Video, in the groups that its tables print.
ABILITIES: Mapping[str, tuple[str, ...]] = {
    "CP": ("Video Topic", "Video Emotion", "Video Scene", "Video Style"),
    "FP-S": (
        *("OCR", "Object Recognition", "Attribute Recognition", "Event Recognition"),
        *("Human Motion", "Counting"),
    ),
    "FP-C": ("Spatial Relationship", "Human-object Interaction", "Human Interaction"),
    "HL": ("Hallucination",),
    "LR": ("Structuralized Image-Text Understanding", "Mathematical Calculation"),
    "AR": ("Physical Property", "Function Reasoning", "Identity Reasoning"),
    "RR": ("Natural Relation", "Physical Relation", "Social Relation"),
    "CSR": ("Common Sense Reasoning",),
    "TR": ("Counterfactual Reasoning", "Causal Reasoning", "Future Prediction"),
}
PERCEPTION = ("CP", "FP-S", "FP-C", "HL")


def _around(text: str, kwargs: Mapping[str, str] | None) -> str:
    kwargs = kwargs or {}
    return f"{kwargs.get('pre_prompt', '')}{text}{kwargs.get('post_prompt', '')}"


# ---------------------------------------------------------------------------------------- LLaVA-Bench (in the Wild)


def llava_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return [doc["image"].convert("RGB")]


def llava_text(doc: Doc, lmms_eval_specific_kwargs: Mapping[str, str] | None = None) -> str:
    return _around(doc["question"], lmms_eval_specific_kwargs)


def llava_parts(doc: Doc, answer: str) -> dict[str, str]:
    """Return the parts of the judge's prompt: the description of the picture, the question and both answers."""
    caption = doc["caption"]
    return {
        "context": caption if isinstance(caption, str) else "\n".join(caption),
        "question": doc["question"],
        "reference": doc["gpt_answer"],
        "answer": answer,
        "category": doc["category"],
    }


def llava_ratings(verdict: str) -> tuple[float, float] | None:
    """Return the ratings of the reference and of the answer, None unless there are two from 0 to 10."""
    return pair(verdict, 0, 10)


def llava_score(doc: Doc, results: Sequence[str]) -> dict[str, list[float]]:
    """Return both ratings, for all questions and for the questions of this kind."""
    category = doc["category"]
    if category not in LLAVA_CATEGORIES:
        raise ValueError(f"category={category!r}; valid: {', '.join(LLAVA_CATEGORIES)}")
    _, verdict = results
    ratings = llava_ratings(verdict)
    if ratings is None:
        raise ValueError(f"a verdict without two ratings: {verdict[:80]!r}")
    return {"all": list(ratings), category: list(ratings)}


def llava_ratio(ratings: Sequence[Sequence[float]]) -> float:
    """Return the sum of the answers' ratings in percent of the references'; NaN if these are all 0."""
    reference, answer = (math.fsum(column) for column in zip(*ratings, strict=True))
    return 100 * answer / reference if reference else math.nan


# ---------------------------------------------------------------------------------------------------- MMBench-Video


def mmbench_video_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [doc["file"]]


def mmbench_video_text(doc: Doc, lmms_eval_specific_kwargs: Mapping[str, str] | None = None) -> str:
    return _around(doc["question"], lmms_eval_specific_kwargs)


def mmbench_video_messages(
    doc: Doc, lmms_eval_specific_kwargs: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the video and the question about it as chat messages."""
    parts = [
        {"type": "video", "url": doc["file"]},
        {"type": "text", "text": mmbench_video_text(doc, lmms_eval_specific_kwargs)},
    ]
    return [{"role": "user", "content": parts}]


def mmbench_video_parts(doc: Doc, answer: str) -> dict[str, str]:
    return {"question": doc["question"], "reference": doc["answer"], "answer": answer}


def mmbench_video_mark(verdict: str) -> float | None:
    """Return the mark from 0 to 3, None without one."""
    return single(verdict, 0, 3, integral=True)


def groups(dimensions: str) -> list[str]:
    """Return the groups of the abilities of a question, which the data set has as a list in a string."""
    requested = ast.literal_eval(dimensions)
    valid = {ability for group in ABILITIES.values() for ability in group}
    if not isinstance(requested, list) or not requested or not valid.issuperset(requested):
        raise ValueError(f"dimensions={dimensions!r}; valid: a list of {', '.join(sorted(valid))}")
    matches = [
        name for name, abilities in ABILITIES.items() if set(abilities).intersection(requested)
    ]
    wider = {"perception" if name in PERCEPTION else "reasoning" for name in matches}
    return ["overall", *sorted(wider), *matches]


def mmbench_video_score(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Return the mark for every group that the question belongs to."""
    _, verdict = results
    mark = mmbench_video_mark(verdict)
    if mark is None:
        raise ValueError(f"a verdict without a mark: {verdict[:80]!r}")
    return dict.fromkeys(groups(doc["dimensions"]), mark)
