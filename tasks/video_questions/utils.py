"""Functions that the questions about videos name. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import re
import string
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_eval.tasks._task_utils.mcq_extract import extract_mcq_answer
from lmms_eval.tasks.mvbench.utils import mcq_acc

try:
    from harness.media.unpacked import unpacked
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from harness.media.unpacked import unpacked

Doc = dict[str, Any]
Settings = dict[str, str] | None

#: What LongVideoBench's own evaluation takes out of an answer before it looks for a letter.
PHRASES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option is",
    "The correct option is",
    "Best answer:",
    "Best option:",
)

#: What LongVideoBench has in the columns of options that a question lacks.
NO_OPTION = "N/A"


def _said(results: Sequence[Any]) -> str:
    return results[0] if results and isinstance(results[0], str) else ""


def _scores(letter: str, right: str) -> dict[str, float]:
    """Return the scores of a letter; an empty one is no answer."""
    return {"accuracy": float(letter == right), "unparsed": float(not letter)}


def mean_of_kinds(results: Sequence[Doc]) -> float:
    """Return the mean over kinds of question of the share of right answers in each, of kinds that there are."""
    kinds = defaultdict(list)
    for one in results:
        kinds[one["kind"]].append(one["score"])
    return sum(sum(scores) / len(scores) for scores in kinds.values()) / len(kinds)


# Video-MME


def videomme_visual(doc: Doc) -> list[str]:
    """Returns the path of the video."""
    return [unpacked("videomme/data", doc["videoID"])]


def videomme_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Returns the question with its options, which bear their letters already."""
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
    """Returns the scores of the letter that lmms-eval reads out of an answer."""
    return _scores(extract_mcq_answer(_said(results), choices=list("ABCD")), doc["answer"])


# MLVU


def mlvu_visual(doc: Doc) -> list[str]:
    """Returns the path of the video."""
    return [unpacked("mlvu", doc["video_name"])]


def mlvu_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Returns the question, which holds its options."""
    how = lmms_eval_specific_kwargs or {}
    return f"{how.get('pre_prompt', '')}{doc['question']}{how.get('post_prompt', '')}"


def mlvu_results(doc: Doc, results: list[Any]) -> dict[str, Any]:
    """Returns the scores of the letter that lmms-eval reads out of an answer, with the kind of question."""
    scores = _scores(extract_mcq_answer(_said(results), choices=list("ABCD")), doc["answer"])
    return scores | {"m_avg": {"kind": doc["task_type"], "score": scores["accuracy"]}}


# LongVideoBench


def _options(doc: Doc) -> list[str]:
    columns = [doc[f"option{number}"] for number in range(5)]
    return [option for option in columns if option != NO_OPTION]


def longvideobench_visual(doc: Doc) -> list[str]:
    """Returns the path of the video."""
    return [unpacked("datasets/longvideobench/videos", doc["video_path"])]


def longvideobench_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Returns the question with a letter before each of its options."""
    how = lmms_eval_specific_kwargs or {}
    lettered = zip(string.ascii_uppercase, _options(doc), strict=False)
    options = "\n".join(f"{letter}. {option}" for letter, option in lettered)
    first, last = how.get("pre_prompt", ""), how.get("post_prompt", "")
    return f"{first}{doc['question']}\n{options}\n{last}"


def longvideobench_target(doc: Doc) -> str:
    """Returns the letter of the right option."""
    return string.ascii_uppercase[doc["correct_choice"]]


def longvideobench_letter(answer: str) -> str:
    """Returns the first letter from A to E in an answer without its usual phrases; empty where there is none.

    LongVideoBench's own evaluation, and lmms-eval's, draw a letter at random there.
    """
    for phrase in PHRASES:
        answer = answer.replace(phrase, "")
    found = re.search(r"[ABCDE]", answer)
    return found[0] if found else ""


def longvideobench_results(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Returns the scores of an answer's letter."""
    return _scores(longvideobench_letter(_said(results)), longvideobench_target(doc))


# MVBench


def mvbench_visual(doc: Doc) -> list[str]:
    """Returns the path of the video; folders of frames, as the data set's main revision has some, are refused."""
    return [unpacked(f"mvbench_video/{doc['folder']}", doc["video"])]


def mvbench_text(doc: Doc, lmms_eval_specific_kwargs: Settings = None) -> str:
    """Returns the question with a letter before each of its options."""
    how = lmms_eval_specific_kwargs or {}
    lettered = zip(string.ascii_uppercase, doc["candidates"], strict=False)
    options = "".join(f"({letter}) {option}\n" for letter, option in lettered)
    return f"Question:{doc['question']}\nOption:\n{options}{how.get('post_prompt', '')}"


def mvbench_results(doc: Doc, results: list[Any]) -> dict[str, Any]:
    """Returns the scores of the option that lmms-eval reads out of an answer, with the subtask.

    An empty answer is wrong: lmms-eval leaves it out of the average, and a silent model would win.
    """
    said = _said(results)
    letters = string.ascii_uppercase[: len(doc["candidates"])]
    letter = next((one for one in letters if said.strip() and mcq_acc(one, said)), "")
    scores = _scores(letter, letters[doc["candidates"].index(doc["answer"])])
    return scores | {"average": {"kind": doc["subtask"], "score": scores["accuracy"]}}
