"""`benchmark=task:<name>` through `run.py`: a task of lmms-eval and a group of three, in one sweep, without files."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from espalier.harness.store import Store
from tests.benchmarks.fixtures import FIXTURES
from tests.benchmarks.hub import PICTURE, TEXT, picture, write_card, write_split

KINDS = ("adversarial", "popular", "random")


def write_pope(root: Path) -> None:
    """Two questions of each way to choose absent things, in a split of its own, and all of them together."""
    FIXTURES["pope"](root)
    place = root / "lmms-lab-encoder" / "POPE"
    columns = {name: TEXT for name in ("id", "question_id", "question", "answer", "image_source")}
    columns |= {"image": PICTURE, "category": TEXT}
    for kind in KINDS:
        rows = [
            {
                **dict.fromkeys(columns, f"{number}"),
                "question": f"Is there a {what} in the image?",
                "answer": answer,
                "image": picture(number),
                "category": kind,
            }
            for number, (what, answer) in enumerate([("square", "yes"), ("horse", "no")])
        ]
        write_split(place / "Full" / f"{kind}-00000-of-00001.parquet", columns, rows)
    write_card(
        place,
        {
            "Full": {kind: f"Full/{kind}-*" for kind in KINDS},
            "default": {"test": "data/test-*"},
        },
    )


@pytest.mark.slow
def test_a_task_and_a_group_run_without_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, store = tmp_path / "data", tmp_path / "store"
    write_pope(root)
    code = run.main(
        [
            *("-m", "benchmark=task:pope,task:pope_full", f"benchmark.path={root}"),
            *(f"store={store}", "method=none", "model.device=cpu", "json=true"),
            *("engine.batch_size=2", "engine.warmup=0", "engine.paired=0"),
            *("+benchmark.generation.max_new_tokens=2", "model.closed_vocabulary=false"),
        ]
    )
    assert code == 0, capfd.readouterr().err
    rows = {row["benchmark"]: row for row in Store(store).rows()}
    assert set(rows) == {"task:pope", "task:pope_full"}
    single, all_three = rows["task:pope"], rows["task:pope_full"]
    assert single["extra"]["headline"] == all_three["extra"]["headline"] == "pope_accuracy"
    assert (single["n_samples"], all_three["n_samples"]) == (6, 6)
    values = {name: metric["value"] for name, metric in all_three["metrics"].items()}
    each = [values[f"pope_{kind}/pope_accuracy"] for kind in ("adv", "pop", "random")]
    assert values["pope_accuracy"] == pytest.approx(sum(each) / 3)
    # Runs differ by task, and the same command finds both in the store.
    assert single["run_key"] != all_three["run_key"]
