"""How often two runs keep other tokens of the same sample: bf16 against fp32, another wording, another seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.figures import INK, Plot, Series, marker
from espalier.harness.reports.curves.stored_rows import with_settings
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    Line,
    ProtocolTable,
    frame_of,
    spots,
)
from espalier.harness.specs.comparable import Row, amount, brief, differences, identity
from espalier.harness.specs.comparable import name as name_of
from espalier.harness.specs.row_settings import COSTS
from espalier.harness.stats import mean_interval
from espalier.harness.store.answer_digest import Key

#: The kept tokens and the answer of each sample.
Kept = dict[Key, tuple[frozenset[int], str]]

WORDS = (
    "Pairs of runs with `engine.kept=true` that differ in one setting: the share of samples with other kept tokens, "
    "the mean share of tokens that both sets have in common (of their union), the share of answers that "
    "differ, and both scores; in percent, with 95 % intervals. Sets are those of the last decoder layer.",
)

#: Settings that only name the files read.
FILES = ("benchmark.files",)


def kept_sets(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return how kept sets and answers differ, for each pair of runs of a method that differ in one setting.

    Raises:
        UserError: no two such runs recorded what they kept.
    """
    groups: dict[Any, list[tuple[Row, Kept]]] = {}
    for result in with_settings(results)[0]:
        kept = {
            (entry["task"], entry["doc_id"]): (
                frozenset(entry["record"]["kept_tokens"]),
                entry["answer"],
            )
            for entry in result.journal()
            if entry.get("record", {}).get("kept_tokens")
        }
        if kept and result.row["method"] != "none":
            groups.setdefault(identity(result.row, ("seed",)), []).append((result.row, kept))
    lines = [
        line
        for group in groups.values()
        for first, second in combinations(group, 2)
        for line in _lines(*first, *second)
    ]
    if not lines:
        raise UserError(
            "--protocol=kept needs runs of one method that differ in one setting and recorded what they kept; valid: "
            "-m method=fastv ratio=0.9 engine.kept=true model.dtype=float32,bfloat16"
        )
    frame = frame_of(lines).sort_values(
        ["difference", "model", "method"], kind="stable", ignore_index=True
    )
    names = frame["method"] + " " + frame["removed"] + " " + frame["difference"]
    series = [
        Series(
            column,
            spots(frame.index, frame[column]),
            marker(shape, markerfacecolor=face, zorder=4),
            key=True,
        )
        for column, shape, face in (("other sets", "o", INK), ("other answers", "s", "#FFFFFF"))
    ]
    ticks: dict[float, str] = dict(enumerate(names))
    plot = Plot("dots", "Samples that differ", series, values="share (%)", ticks=ticks)
    return ProtocolTable("kept", "Do kept tokens stay the same?", WORDS, frame, [plot])


def _lines(first: Row, kept: Kept, second: Row, second_kept: Kept) -> Iterator[Line]:
    """Yield the line of two runs, if they differ in one setting, or in their seed, and share samples."""
    changes = {
        key: values
        for key, values in differences([first, second]).items()
        if key not in COSTS and key not in FILES
    }
    if first["seed"] != second["seed"]:
        changes["seed"] = [str(first["seed"]), str(second["seed"])]
    pairs = [(kept[key], second_kept[key]) for key in sorted(kept.keys() & second_kept.keys())]
    if len(changes) != 1 or not pairs:
        return
    ((setting, values),) = changes.items()
    common = [len(ours & theirs) / len(ours | theirs) for (ours, _), (theirs, _) in pairs]
    headline = first["extra"]["headline"]
    yield {
        "model": first["model"],
        "benchmark": first["benchmark"],
        "method": name_of(first),
        "removed": amount(first),
        "difference": f"{setting}: {' / '.join(map(brief, values))}",
        "other sets": mean_interval([float(ours[0] != theirs[0]) for ours, theirs in pairs]),
        "in common": mean_interval(common),
        "other answers": mean_interval([float(ours[1] != theirs[1]) for ours, theirs in pairs]),
        "first": float(first["metrics"][headline]["value"]),
        "second": float(second["metrics"][headline]["value"]),
        "samples": len(pairs),
    }
