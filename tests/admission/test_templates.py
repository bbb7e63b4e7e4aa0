"""`model.template` names a family that some task writes prompts for."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.runs.admission import check_template, families
from tests import commands

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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_models_template_is_known(path: Path) -> None:
    check_template(commands.spec_of(f"model={path.stem}").model.template, None)
