"""A sample of the fuzzer's cases, drawn anew from a fixed seed; `python -m tests.fuzz` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import Worker, fuzz
from tests.fuzz.worker import cases


def test_there_are_hundreds_of_cases_of_every_kind() -> None:
    drawn = cases(0)
    kinds = {case.kind.partition(":")[0] for case in drawn}
    assert len(drawn) >= 300
    assert kinds >= {"doors", "overrides", "values", "templates", "store", "cells", "checkpoint"}
    assert kinds >= {"outputs", "judge", "locale", "cleaning", "media", "stores", "paths"}
    assert kinds >= {"names", "arguments", "addresses", "links", "planted", "noise"}
    lines = [case.line for case in cases(0)]
    assert lines == [case.line for case in drawn]
    assert lines != [case.line for case in cases(1)]


@pytest.mark.slow
def test_a_sample_passes() -> None:
    assert fuzz(0, 36, ("paths", "templates", "flags", "judge")) == []


def test_a_case_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert Worker(0, tmp_path).outcome(0, seconds=-59.9) == ["no end within 0 s"]
