"""Functions that the video question task files name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import string
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from espalier.harness.evaluation.scoring.choices import letter, lettered
    from espalier.harness.media.timeline import unpacked
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.evaluation.scoring.choices import letter, lettered
    from espalier.harness.media.timeline import unpacked

Doc = dict[str, Any]
Settings = dict[str, str] | None

#: LongVideoBench's value in the column of a missing option.
NO_OPTION = "N/A"


def _text(results: Sequence[Any]) -> str:
    return results[0] if results and isinstance(results[0], str) else ""


def _scores(
    results: Sequence[Any], options: Mapping[str, str] | Sequence[str], right: str
) -> dict[str, float]:
    """Return the scores of the option that an answer states; an answer without one is wrong, and unparsed."""
    stated = letter(_text(results), options)
    return {"accuracy": float(stated == right), "unparsed": float(not stated)}


def mean_of_kinds(results: Sequence[Doc]) -> float:
    """Return the mean over the kinds of question that occur of the share of right answers."""
    kinds = defaultdict(list)
    for result in results:
        kinds[result["kind"]].append(result["score"])
    return sum(sum(scores) / len(scores) for scores in kinds.values()) / len(kinds)


# Video-MME


def videomme_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("videomme/data", doc["videoID"])]


def videomme_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Return the question with its options, which already have letters."""
    how = lmms_eval_specific_kwargs or {}
    options = "\n".join(doc["options"])
    if how.get("format") == "qwen3_vl":
        return f"{how['pre_prompt']}{doc['question']}\nOptions:\n{options}\n{how.get('post_prompt', '')}"
    first = (
        "Select the best answer to the following multiple-choice question based on the video and the subtitles. "
        "Respond with only the letter (A, B, C, or D) of the correct option."
    )
    return f"{first}\n{doc['question']}\n{options}\n{how.get('post_prompt', 'The best answer is:')}"


def videomme_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the scores of the option that an answer states."""
    # Options have letters: "A. Apples."
    texts = [option.partition(". ")[2] for option in doc.get("options", ())]
    return _scores(results, {**dict.fromkeys("ABCD", ""), **lettered(texts)}, doc["answer"])


# MLVU


def mlvu_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("mlvu", doc["video_name"])]


def mlvu_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Return the question, which holds its options."""
    how = lmms_eval_specific_kwargs or {}
    return f"{how.get('pre_prompt', '')}{doc['question']}{how.get('post_prompt', '')}"


def mlvu_results(doc: Doc, results: list[Any]) -> dict[str, Any]:
    """Return the scores of the option that an answer states, with the kind of question."""
    scores = _scores(results, "ABCD", doc["answer"])
    return scores | {"m_avg": {"kind": doc["task_type"], "score": scores["accuracy"]}}


# LongVideoBench


def _options(doc: Doc) -> list[str]:
    columns = [doc[f"option{number}"] for number in range(5)]
    return [option for option in columns if option != NO_OPTION]


def longvideobench_visual(doc: Doc) -> list[str]:
    """Return the path of the video."""
    return [unpacked("datasets/longvideobench/videos", doc["video_path"])]


def longvideobench_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Return the question with a letter before each of its options."""
    how = lmms_eval_specific_kwargs or {}
    listed = zip(string.ascii_uppercase, _options(doc), strict=False)
    options = "\n".join(f"{name}. {option}" for name, option in listed)
    first, last = how.get("pre_prompt", ""), how.get("post_prompt", "")
    return f"{first}{doc['question']}\n{options}\n{last}"


def longvideobench_target(doc: Doc) -> str:
    """Return the letter of the right option."""
    return string.ascii_uppercase[doc["correct_choice"]]


def longvideobench_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the scores of the option that an answer states.

    LongVideoBench's own evaluation, and lmms-eval's, take the first capital letter, or a random one.
    """
    return _scores(results, lettered(_options(doc)), longvideobench_target(doc))


# MVBench


def mvbench_visual(doc: Doc) -> list[str]:
    """Return the path of the video; folders of frames, as the data set's main revision has some, are refused."""
    return [unpacked(f"mvbench_video/{doc['folder']}", doc["video"])]


def mvbench_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Return the question with a letter before each of its options."""
    how = lmms_eval_specific_kwargs or {}
    listed = zip(string.ascii_uppercase, doc["candidates"], strict=False)
    options = "".join(f"({name}) {option}\n" for name, option in listed)
    return f"Question:{doc['question']}\nOption:\n{options}{how.get('post_prompt', '')}"


def mvbench_results(doc: Doc, results: list[Any]) -> dict[str, Any]:
    """Return the scores of the option that an answer states, with the subtask.

    An empty answer is wrong: lmms-eval leaves it out of the average, which rewards silence.
    """
    right = string.ascii_uppercase[doc["candidates"].index(doc["answer"])]
    scores = _scores(results, lettered(doc["candidates"]), right)
    return scores | {"average": {"kind": doc["subtask"], "score": scores["accuracy"]}}
