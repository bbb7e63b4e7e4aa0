"""A benchmark whose scores take what is absent is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from espalier.harness.errors import UserError
from espalier.harness.specs import conflicts
from espalier.harness.specs.benchmark_spec import BenchmarkSpec

PLAIN = BenchmarkSpec("captions", "captions", None, None, ("cider",), "cider")


def check_needs(spec: BenchmarkSpec) -> None:
    conflicts.refuse("tools of a benchmark", SimpleNamespace(benchmark=spec))


@pytest.mark.parametrize("path", ["/usr/bin/java", None])
def test_java_has_to_be_on_the_path(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.setattr(conflicts.shutil, "which", {"java": path}.get)
    check_needs(PLAIN)
    spec = replace(PLAIN, needs=("java",))
    if path:
        check_needs(spec)
        return
    with pytest.raises(UserError, match=r"^benchmark='captions': .*Java.*no java on PATH; valid: "):
        check_needs(spec)


def test_what_a_server_scores_is_refused_in_any_case() -> None:
    with pytest.raises(UserError, match=r"^benchmark='captions': .*submission server.*; valid: "):
        check_needs(replace(PLAIN, needs=("server",)))
