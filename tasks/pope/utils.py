"""Functions that the POPE task file names. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_eval.tasks.pope import utils as pope

try:
    from espalier.harness.evaluation.scoring.choices import yes_or_no
except ImportError:  # started outside the repository, without Espalier on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from espalier.harness.evaluation.scoring.choices import yes_or_no

Doc = dict[str, Any]

#: Suffix of metrics by lmms-eval's reading.
OWN = "_lmms_eval"

#: Words that make an answer "no" in the script of LLaVA's evaluation.
DENIALS = {"No", "no", "not"}


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return list(pope.pope_doc_to_visual(doc))


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return lmms-eval's question."""
    return str(pope.pope_doc_to_text(doc, lmms_eval_specific_kwargs or {}))


def mapped(answer: str) -> str:
    """Return yes or no, as the script of LLaVA's evaluation maps any answer by its first sentence."""
    words = answer.partition(".")[0].replace(",", "").split(" ")
    return "no" if DENIALS.intersection(words) else "yes"


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Return the metrics' input of a sample, by LLaVA's mapping and by lmms-eval's reading.

    An answer is unparsed if it states neither yes nor no, or not the one that it is mapped to.
    """
    answer = results[0] if results and isinstance(results[0], str) else ""
    mapped_answer = mapped(answer)
    llava = _samples(doc, mapped_answer)
    lmms_eval = {f"{name}{OWN}": sample for name, sample in _samples(doc, answer).items()}
    return {**llava, **lmms_eval, "unparsed": float(yes_or_no(answer) != mapped_answer)}


def _samples(doc: Doc, answer: str) -> Doc:
    samples = pope.pope_process_results(doc, [answer])
    return {**samples, "pope_f1_mean": samples["pope_f1_score"] | {"kind": doc["category"]}}


def f1_mean(samples: Sequence[Doc]) -> float:
    """Return the unweighted mean of F1 over the kinds of absent objects that occur."""
    kinds = defaultdict(list)
    for sample in samples:
        kinds[sample["kind"]].append(sample)
    return sum(f1_score(samples) for samples in kinds.values()) / len(kinds)


def f1_score(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_f1_score(samples))


def accuracy(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_accuracy(samples))


def precision(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_precision(samples))


def recall(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_recall(samples))


def yes_ratio(samples: Sequence[Doc]) -> float:
    return sum(sample["prediction"] == "yes" for sample in samples) / len(samples)


def yes_ratio_lmms_eval(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_yes_ratio(samples))
