"""Tasks of our own that ask what one of lmms-eval's asks, in its words and with its settings."""

from __future__ import annotations

import pytest

from espalier.harness.config.lmms_task_files import index_of, library
from espalier.harness.paths import ROOT


@pytest.mark.parametrize(
    ("ours", "theirs"), [("pope_by_kind", "pope"), ("mmmu_val_by_rule", "mmmu_val")]
)
@pytest.mark.parametrize(
    "key",
    ["dataset_path", "test_split", "output_type", "generation_kwargs", "lmms_eval_specific_kwargs"],
)
def test_questions_are_those_of_lmms_eval(ours: str, theirs: str, key: str) -> None:
    (leaf,), (other,) = index_of(ROOT / "tasks").leaves(ours), library().leaves(theirs)
    assert leaf.settings[key] == other.settings[key]
