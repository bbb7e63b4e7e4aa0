"""Functions that the video task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from rapidfuzz.distance import LCSseq

try:
    from espalier.harness.evaluation.judging.judge_scores import single
    from espalier.harness.media.timeline import unpacked
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.evaluation.judging.judge_scores import single
    from espalier.harness.media.timeline import unpacked

Doc = dict[str, Any]

#: The question for data sets without one. ParallelVLM does not print its question; this is the one in the released
#: code of SpecVLM, by its first author, for MVBench, MLVU and LongVideoBench.
DESCRIBE = (
    "Please provide a detailed description of the video, focusing on the main subjects, their actions, "
    "and the background scenes."
)

WORD = re.compile(r"\w+")


def _messages(video: str, question: str) -> list[dict[str, Any]]:
    """Return a video and a question about it as chat messages."""
    parts = [{"type": "video", "url": video}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def caption_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("videochatgpt/Test_Videos", doc["video_name"])]


def caption_text(doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return the data set's question."""
    return str(doc["question"])


def caption_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    return _messages(caption_visual(doc)[0], caption_text(doc))


def describe_text(doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return `DESCRIBE`."""
    return DESCRIBE


def videomme_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("videomme/data", doc["videoID"])]


def videomme_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    return _messages(videomme_visual(doc)[0], DESCRIBE)


def mlvu_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("mlvu", doc["video_name"])]


def mlvu_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    return _messages(mlvu_visual(doc)[0], DESCRIBE)


def longvideobench_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("datasets/longvideobench/videos", doc["video_path"])]


def longvideobench_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    return _messages(longvideobench_visual(doc)[0], DESCRIBE)


def mvbench_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("mvbench_video", doc["video_path"])]


def mvbench_messages(
    doc: Doc, lmms_eval_specific_kwargs: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    return _messages(mvbench_visual(doc)[0], DESCRIBE)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower())


def rouge_l(answer: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words (ROUGE-L, Lin 2004), from 0 to 1."""
    ours, theirs = words(answer), words(reference)
    # F1 of precision L / n and recall L / m is 2 L / (n + m).
    total = len(ours) + len(theirs)
    return 2 * LCSseq.similarity(ours, theirs) / total if total else 0.0


def _answer(results: list[Any]) -> str:
    return results[0] if results and isinstance(results[0], str) else ""


def process_caption(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return ROUGE-L against the reference, and the length of the answer in words."""
    answer = _answer(results)
    return {"rouge_l": rouge_l(answer, doc["answer"]), "words": float(len(words(answer)))}


def process_description(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the length of the answer in words."""
    return {"words": float(len(words(_answer(results))))}


def caption_parts(doc: Doc, answer: str) -> dict[str, str]:
    """Return the parts of the judge's prompt about a description."""
    return {"question": doc["question"], "reference": doc["answer"], "answer": answer}


def caption_rating(verdict: str) -> float | None:
    """Return a judge's rating from 0 to 5, None without one."""
    return single(verdict, 0, 5)


def process_judged_caption(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the judge's rating, and the metrics without a judge."""
    answer, verdict = results
    rating = caption_rating(verdict)
    if rating is None:
        raise ValueError(f"a verdict without a rating: {verdict[:80]!r}")
    return {"judge_score": rating, **process_caption(doc, [answer])}
