"""The tracked rows are of one clean commit, and none of their times is another program's on the same machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.store.exports import dated_rows
from espalier.harness.store.upkeep import DIRTY

STORES = ("demo", "demo_speculative")

#: How many times the median of its kind a time may be. On an idle machine the slowest is three times it.
MOST = 5.0

#: Times that depend on the model and the batch, hardly on method and benchmark: pictures and prompts are of one size.
OF_MODELS = ("vision_ms", "prefill_ms", "decode_ms_per_token")

#: Times of a decoder's two models: one forward of the target, of a window, and of the draft.
OF_DECODERS = ("target_ms", "window_ms", "draft_ms")


def rows_of(store: str) -> list[Mapping[str, Any]]:
    return [row for _, row in dated_rows(ROOT / "results" / store)]


def times(row: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield a row's times by kind: model, draft and batch size, for selection also the method with its settings."""
    draft = (row["settings"]["draft"] or {}).get("name")
    models = (row["model"], draft, row["settings"]["engine"].get("batch_size"))
    for name in OF_MODELS:
        yield (name, *models), row["time"][name] or 0.0
    for name in OF_DECODERS:
        yield (name, *models), (row["extra"]["speculative"] or {}).get(name) or 0.0
    selection = ("select_ms", *models, row["method"], row["extra"]["label"])
    yield selection, row["time"]["select_ms"] or 0.0


def outliers(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield times over `MOST` medians of their kind; 0 is a time that was not taken."""
    kinds = defaultdict(list)
    for row in rows:
        for kind, milliseconds in times(row):
            if milliseconds:
                kinds[kind].append((milliseconds, row))
    for (name, *_), members in kinds.items():
        usual = median(milliseconds for milliseconds, _ in members)
        for milliseconds, row in members:
            if milliseconds > MOST * usual:
                cell = " ".join(str(row[key]) for key in ("method", "benchmark", "ratio"))
                yield f"{cell}: {name}={milliseconds:.1f}, median {usual:.1f}"


@pytest.mark.parametrize("store", STORES)
def test_tracked_rows_are_of_one_commit_that_is_clean(store: str) -> None:
    commits = {row["extra"]["environment"]["commit"] for row in rows_of(store)}
    assert len(commits) == 1
    assert not commits.pop().endswith(DIRTY)


@pytest.mark.parametrize("store", STORES)
def test_no_time_of_the_tracked_rows_is_an_outlier(store: str) -> None:
    assert list(outliers(rows_of(store))) == []


@pytest.mark.parametrize("name", [*OF_MODELS, *OF_DECODERS, "select_ms"])
def test_a_time_of_another_program_is_an_outlier(name: str) -> None:
    usual = {"vision_ms": 3.0, "prefill_ms": 7.0, "decode_ms_per_token": 0.4, "select_ms": 0.3}
    rows = [
        {
            **{"model": "seedling", "method": "divprune", "benchmark": benchmark, "ratio": ratio},
            "settings": {"engine": {"batch_size": 50}, "draft": None},
            "extra": {"label": "", "speculative": dict.fromkeys(OF_DECODERS, 2.0 + ratio)},
            "time": {key: value * (1 + 2 * ratio) for key, value in usual.items()},
        }
        for benchmark in ("seedling_rec", "seedling_ocr")
        for ratio in (0.5, 0.75, 0.9, 0.95)
    ]
    assert list(outliers(rows)) == []
    measured = rows[3]["extra"]["speculative"] if name in OF_DECODERS else rows[3]["time"]
    measured[name] *= 6
    (line,) = outliers(rows)
    assert line.startswith(f"divprune seedling_rec 0.95: {name}=")
