"""A benchmark whose scores take what is absent, and a template that no task has, are refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.runs.admission import check_template, families
from espalier.harness.specs import conflicts
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from tests import commands

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


# ------------------------------------------------------------------ templates


TASK = """\
task: counting
lmms_eval_specific_kwargs:
  # families
  default:
    pre_prompt: ""
    nested:
      deeper: 1
  "my_model":   # ours
    post_prompt: "yes: no"
  frames: 3

metadata:
  version: 1
"""


def test_families_are_the_tables_below_the_key(tmp_path: Path) -> None:
    (tmp_path / "counting.yaml").write_text(TASK)
    (tmp_path / "other.yaml").write_text("task: other\nmetadata:\n  inner:\n    x: 1\n")
    assert families(tmp_path) == {"default", "my_model"}
    check_template("my_model", tmp_path)
    with pytest.raises(UserError, match=r"model\.template='my_modl'.*my_model"):
        check_template("my_modl", tmp_path)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    "path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_models_template_is_known(path: Path) -> None:
    check_template(commands.spec_of(f"model={path.stem}").model.template, None)
