"""Tokens of an answer that `--dry` assumes, by benchmark and model (conf/answer_lengths.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import CONF
from espalier.harness.runs.cluster.span import Span
from espalier.harness.settings import Count, Names, SomeNames, Text, read_section

PATH = CONF / "answer_lengths.yaml"


@dataclass(frozen=True)
class AnswerLength:
    """The length of answers to some benchmarks.

    Attributes:
        benchmarks: their names.
        tokens: fewest and most.
        source: where the numbers come from.
        models: patterns of the models that they hold for; empty: all.
    """

    benchmarks: SomeNames
    tokens: tuple[Count, ...]
    source: Text
    models: Names = ()


@cache
def answer_lengths() -> tuple[AnswerLength, ...]:
    """Return the entries of the file, those for single models first."""
    entries: Any = read_yaml(PATH)["lengths"]
    lengths = [
        read_section(AnswerLength, f"{PATH.name}, entry {number}", {"models": [], **entry})
        for number, entry in enumerate(entries, 1)
    ]
    return tuple(sorted(lengths, key=lambda length: not length.models))


@cache
def typical_length(benchmark: str, model: str) -> Span | None:
    """Return the fewest and the most tokens of an answer; None: the file does not know them."""
    for length in answer_lengths():
        patterns = length.models or ("*",)
        if benchmark in length.benchmarks and any(fnmatch(model, name) for name in patterns):
            return Span(*map(float, length.tokens))
    return None
