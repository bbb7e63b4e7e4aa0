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

#: Ends the names of metrics that read answers as lmms-eval does.
OWN = "_lmms_eval"

#: Words that make an answer a no by the script of LLaVA's evaluation.
DENIALS = {"No", "no", "not"}


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return list(pope.pope_doc_to_visual(doc))


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return the question as lmms-eval asks it."""
    return str(pope.pope_doc_to_text(doc, lmms_eval_specific_kwargs or {}))


def mapped(answer: str) -> str:
    """Return yes or no, to which the script of LLaVA's evaluation maps any answer by its first sentence."""
    words = answer.partition(".")[0].replace(",", "").split(" ")
    return "no" if DENIALS.intersection(words) else "yes"


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Return what the metrics need of a sample, by LLaVA's mapping and by lmms-eval's reading.

    An answer is unparsed if it states neither yes nor no, or is mapped to the one that it does not state.
    """
    answer = results[0] if results and isinstance(results[0], str) else ""
    said = mapped(answer)
    found = _samples(doc, said)
    own = {f"{name}{OWN}": sample for name, sample in _samples(doc, answer).items()}
    return {**found, **own, "unparsed": float(yes_or_no(answer) != said)}


def _samples(doc: Doc, answer: str) -> Doc:
    found = pope.pope_process_results(doc, [answer])
    return {**found, "pope_f1_mean": found["pope_f1_score"] | {"kind": doc["category"]}}


def f1_mean(samples: Sequence[Doc]) -> float:
    """Return the plain mean over kinds of absent objects of the F1 of each, of kinds that there are."""
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
