"""Functions that the POPE task file names. lmms-eval runs this file once per name: no state here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lmms_eval.tasks.pope import utils as pope

Doc = dict[str, Any]


def doc_to_visual(doc: Doc) -> list[Any]:
    """Return the picture."""
    return list(pope.pope_doc_to_visual(doc))


def doc_to_text(doc: Doc, lmms_eval_specific_kwargs: Doc | None = None) -> str:
    """Return the question as lmms-eval asks it."""
    return str(pope.pope_doc_to_text(doc, lmms_eval_specific_kwargs or {}))


def process_results(doc: Doc, results: list[Any]) -> Doc:
    """Return what lmms-eval's metrics need of a sample; neither yes nor no is wrong, and unparsed."""
    answer = results[0] if results and isinstance(results[0], str) else ""
    found = pope.pope_process_results(doc, [answer])
    sample = found["pope_f1_score"]
    unparsed = sample["prediction"] not in ("yes", "no")
    return found | {"pope_f1_mean": sample | {"kind": doc["category"]}, "unparsed": float(unparsed)}


def f1_mean(samples: Sequence[Doc]) -> float:
    """Return the plain mean over kinds of absent objects of the F1 of each, of kinds that there are."""
    kinds = defaultdict(list)
    for one in samples:
        kinds[one["kind"]].append(one)
    return sum(f1_score(asked) for asked in kinds.values()) / len(kinds)


def f1_score(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_f1_score(samples))


def accuracy(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_accuracy(samples))


def precision(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_precision(samples))


def recall(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_recall(samples))


def yes_ratio(samples: Sequence[Doc]) -> float:
    return float(pope.pope_aggregate_yes_ratio(samples))
