"""The run key changes with everything that can change a number, and with nothing else."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.kinds.lookup import method_of
from espalier.harness.paths import ROOT
from espalier.harness.runs.admission import admit
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.runs.served import engine_process, engine_server
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests import commands

#: Changes of a run that can change a number, by the run.
CHANGING = {
    "method=fastv": [
        *("ratio=0.6", "limit=16", "method=divprune", "method=fastv_paper"),
        *("method.params.K=3", "benchmark=seedling_vqa", "budget=flops", "engine=emulate"),
        *("+benchmark.generation.max_new_tokens=2", "engine.batch_size=1"),
        *("engine.positions=method", "model=seedling_draft method.params.K=1"),
        *("model.dtype=bfloat16", "model.attention=eager", "model.template=llava_vid"),
        *("model.facts.vocabulary=105", "engine.rescore=true"),
    ],
    "method=random": ["seed=1"],
    # A decoder is its draft, and how both run.
    "method=pearl": [
        *("method.draft=seedling_full", "method.draft_options={attention:eager}"),
        *("method.draft_options={facts:{vocabulary:105}}", "method.params.gamma=3"),
        *("engine.transport=sequential", "engine.compare=false", "engine.graphs=auto"),
        "method=vanilla_sd",
    ],
    # Gaps are where a draft model sees another prompt.
    "method=parallelvlm": ["engine.positions=renumbered", "engine.positions=method"],
    "method=specvlm_sd": ["engine.positions=renumbered", "engine.positions=method"],
}

#: Changes that cannot.
UNCHANGING = {
    "method=fastv": [
        *("force=true", "log=wandb", "log=wandb log.options.project=other", "offline=false"),
        *("engine.threads=1", "engine.max_errors=3", "engine.paired=32", "engine.paired=0"),
        *("method.params.K=2", "ratio=0.50", "model.drafts=[]", "engine.transport=sequential"),
        *("engine.compare=false", "engine.patience=5", "engine.graphs=true", "seed=1"),
    ],
    "method=none": [
        *("ratio=0.9 budget=flops", "engine.positions=renumbered", "engine.positions=method"),
    ],
    "method=pearl": [
        *("method.draft=seedling_draft", "engine.patience=5", "engine.batch_size=2"),
        *("engine.positions=method", "ratio=0.9"),
    ],
    "method=std": ["engine.positions=method"],
    # Sides that never work at once take turns anyway.
    **{
        f"method={name} engine.transport=sequential": ["engine.transport=auto"]
        for name in ("vanilla_sd", "onsd", "autoregressive")
    },
}


def spec_of(store: Path, *argv: str) -> RunSpec:
    return commands.spec_of(f"store={store}", "method=fastv", "ratio=0.5", *argv)


@cache
def key_of(store: Path, *argv: str) -> str:
    return admit(spec_of(store, *argv), Digests()).key


def test_key_is_short_hex_and_repeats(store: Path) -> None:
    plain = key_of(store)
    assert re.fullmatch("[0-9a-f]{16}", plain)
    assert key_of.__wrapped__(store) == plain


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("line", "change", "counts"),
    [
        (line, change, counts)
        for table, counts in ((CHANGING, True), (UNCHANGING, False))
        for line, changes in table.items()
        for change in changes
    ],
)
def test_what_can_change_numbers_counts(store: Path, line: str, change: str, counts: bool) -> None:
    changed = key_of(store, *line.split(), *change.split()) != key_of(store, *line.split())
    assert changed is counts


def checkpoint(name: str) -> Path:
    """Return the folder of an embedded model."""
    return ROOT / "harness/seedling/weights" / name


def test_store_and_place_of_the_weights_do_not_matter(store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("seedling"), tmp_path / "copy")
    assert key_of(tmp_path / "other", f"model.path={copy}") == key_of(store)


def parts_of(spec: RunSpec) -> dict[str, Any]:
    job = admit(spec, Digests())
    return key_parts(job.spec, job.method, Digests())


def test_all_parts_are_part_of_the_key(tmp_path: Path) -> None:
    before = parts_of(spec_of(tmp_path))
    assert before["packages"]["torch"]
    for name in before:
        assert run_key(before | {name: "other"}) != run_key(before)


def test_source_digests_follow_content_and_name_but_not_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("x = 1\n")
    second.write_text("y = 1\n")
    before = Digests().files([first, second], tmp_path)
    assert Digests().files([second, first], tmp_path) == before
    renamed = Path(shutil.copy(second, tmp_path / "c.py"))
    assert Digests().files([first, renamed], tmp_path) != before
    second.write_text("y = 2\n")
    assert Digests().files([first, second], tmp_path) != before


def test_the_weights_of_the_draft_are_part_of_the_key(store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("seedling_draft"), tmp_path / "draft")
    decoder = ("method=pearl", f"method.draft_options={{path: {copy}}}")
    plain = key_of(store, "method=pearl")
    assert key_of(store, *decoder) == plain
    (copy / "generation_config.json").write_text("{}")
    assert key_of.__wrapped__(store, *decoder) != plain


@pytest.mark.parametrize("side", ["model", "draft"])
def test_the_version_of_what_unpacks_quantised_weights_is_part_of_the_key(
    side: str, store: Path, tmp_path: Path
) -> None:
    name = {"model": "seedling", "draft": "seedling_draft"}[side]
    folder = shutil.copytree(checkpoint(name), tmp_path / side)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    place = {"model": f"model.path={folder}", "draft": f"method.draft_options={{path: {folder}}}"}
    spec = spec_of(store, "method=vanilla_sd", place[side])
    assert "bitsandbytes" in key_parts(spec, method_of(spec.method), Digests())["packages"]
    assert "bitsandbytes" not in parts_of(spec_of(store))["packages"]


@pytest.mark.parametrize("served", ["engine", "server"])
def test_the_version_of_the_program_that_answers_is_part_of_the_key(
    served: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"engine": "backend.python=/bin/python", "server": "backend.url=http://localhost:1"}
    spec = spec_of(store, "method=divprune", "backend=vllm", place[served])
    keys = []
    module = {"engine": engine_process, "server": engine_server}[served]
    for version in ("1.0", "1.1", "1.0"):
        monkeypatch.setattr(module, f"{served}_version", lambda _, version=version: version)
        keys.append(run_key(key_parts(spec, method_of(spec.method), Digests())))
    assert keys[0] == keys[2] != keys[1]
