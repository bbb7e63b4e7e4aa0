"""The run key changes with everything that can change a number, and with nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.kinds.lookup import method_of
from espalier.harness.runs.admission import admit
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.runs.served import engine_process, engine_server
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests import commands


def spec_of(store: Path, *argv: str) -> RunSpec:
    return commands.spec_of(f"store={store}", "method=fastv", "ratio=0.5", *argv)


def key_of(store: Path, *argv: str) -> str:
    return admit(spec_of(store, *argv), Digests()).key


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def plain(store: Path) -> str:
    return key_of(store)


def test_key_is_short_hex_and_repeats(store: Path, plain: str) -> None:
    assert re.fullmatch("[0-9a-f]{16}", plain)
    assert key_of(store) == plain


@pytest.mark.parametrize(
    "change",
    [
        "ratio=0.6",
        "seed=1",
        "limit=16",
        "method=divprune",
        "method=fastv_paper",
        "method.params.K=3",
        "benchmark=seedling_vqa",
        "+benchmark.generation.max_new_tokens=2",
        "budget=flops",
        "engine=emulate",
        "engine.batch_size=1",
        "engine.positions=method",
        "model=seedling_draft method.params.K=1",
        "model.dtype=bfloat16",
        "model.attention=eager",
        "model.template=llava_vid",
        "model.facts.vocabulary=105",
    ],
)
def test_changes_that_can_change_numbers(store: Path, plain: str, change: str) -> None:
    assert key_of(store, *change.split()) != plain


@pytest.mark.parametrize(
    "change",
    [
        "force=true",
        "log=wandb",
        "log=wandb log.options.project=other",
        "offline=false",
        "engine.threads=1",
        "engine.max_errors=3",
        "engine.paired=32",
        "engine.paired=0",
        "method.params.K=2",
        "ratio=0.50",
    ],
)
def test_changes_that_cannot(store: Path, plain: str, change: str) -> None:
    assert key_of(store, *change.split()) == plain


def test_store_and_place_of_the_weights_do_not_matter(tmp_path: Path, plain: str) -> None:
    import shutil

    copy = tmp_path / "copy"
    source = spec_of(tmp_path).model.path
    assert source is not None
    shutil.copytree(source, copy)
    assert key_of(tmp_path / "other", f"model.path={copy}") == plain


def test_a_method_without_sites_has_one_key_for_all_ratios(store: Path) -> None:
    assert key_of(store, "method=none", "ratio=0.5") == key_of(
        store, "method=none", "ratio=0.9", "budget=flops"
    )


def parts_of(spec: RunSpec) -> dict[str, Any]:
    job = admit(spec, Digests())
    return key_parts(job.spec, job.method, Digests())


def test_all_parts_are_part_of_the_key(tmp_path: Path) -> None:
    before = parts_of(spec_of(tmp_path))
    assert before["packages"]["torch"]
    for name in before:
        assert run_key(before | {name: "other"}) != run_key(before)


def test_source_digests_follow_content_and_name_but_not_order(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1\n")
    two.write_text("y = 1\n")
    before = Digests().files([one, two], tmp_path)
    assert Digests().files([two, one], tmp_path) == before
    two.write_text("y = 2\n")
    assert Digests().files([one, two], tmp_path) != before
    two.write_text("y = 1\n")
    two.rename(tmp_path / "c.py")
    assert Digests().files([one, tmp_path / "c.py"], tmp_path) != before


def decoder_key(store: Path, *argv: str) -> str:
    return key_of(store, "method=pearl", *argv)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        "method.draft=seedling_full",
        "method.draft_options={attention:eager}",
        "method.draft_options={facts:{vocabulary:105}}",
        "method.params.gamma=3",
        "engine.transport=sequential",
        "engine.compare=false",
        "engine.graphs=auto",
        "method=vanilla_sd",
    ],
)
def test_a_decoder_is_its_draft_and_how_both_run(store: Path, change: str) -> None:
    assert decoder_key(store, *change.split()) != decoder_key(store)


@pytest.mark.parametrize(
    "change",
    [
        "method.draft=seedling_draft",
        "engine.patience=5",
        "engine.batch_size=2",
        "engine.positions=method",
        "ratio=0.9",
    ],
)
def test_a_decoder_is_nothing_else(store: Path, change: str) -> None:
    assert decoder_key(store, *change.split()) == decoder_key(store)


def test_the_weights_of_the_draft_are_part_of_the_key(store: Path, tmp_path: Path) -> None:
    source = spec_of(store, "model=seedling_draft").model.path
    assert source is not None
    copy = tmp_path / "draft"
    shutil.copytree(source, copy)
    options = f"method.draft_options={{path: {copy}}}"
    assert decoder_key(store, options) == decoder_key(store)
    (copy / "generation_config.json").write_text("{}")
    assert decoder_key(store, options) != decoder_key(store)


@pytest.mark.parametrize("side", ["model", "draft"])
def test_the_version_of_what_unpacks_quantised_weights_is_part_of_the_key(
    side: str, store: Path, tmp_path: Path
) -> None:
    names = {"model": "model=seedling", "draft": "model=seedling_draft"}
    source = spec_of(store, names[side]).model.path
    assert source is not None
    folder = shutil.copytree(source, tmp_path / side)
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
    found = []
    module = {"engine": engine_process, "server": engine_server}[served]
    for version in ("1.0", "1.1", "1.0"):
        monkeypatch.setattr(module, f"{served}_version", lambda _, version=version: version)
        found.append(run_key(key_parts(spec, method_of(spec.method), Digests())))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("method", ["vanilla_sd", "onsd", "autoregressive"])
def test_sides_that_never_work_at_once_take_turns_anyway(store: Path, method: str) -> None:
    asked, left = (
        key_of(store, f"method={method}", f"engine.transport={how}")
        for how in ("sequential", "auto")
    )
    assert asked == left


@pytest.mark.slow
def test_where_no_token_goes_there_is_no_policy_for_gaps(store: Path) -> None:
    keys_of = {
        key_of(store, "method=none", f"engine.positions={policy}")
        for policy in ("original", "renumbered", "method")
    }
    assert len(keys_of) == 1


@pytest.mark.parametrize(
    ("method", "keys"), [("parallelvlm", 3), ("specvlm_sd", 3), ("std", 1), ("pearl", 1)]
)
def test_gaps_are_where_a_draft_model_is_told_what_to_see(
    store: Path, method: str, keys: int
) -> None:
    policies = ("original", "renumbered", "method") if keys == 3 else ("original", "method")
    found = {key_of(store, f"method={method}", f"engine.positions={one}") for one in policies}
    assert len(found) == keys


def test_a_reducer_is_not_what_drafts_but_whether_it_is_judged(store: Path, plain: str) -> None:
    for change in ("transport=sequential", "compare=false", "patience=5", "graphs=true"):
        assert key_of(store, f"engine.{change}") == plain
    assert key_of(store, "model.drafts=[]") == plain
    assert key_of(store, "engine.rescore=true") != plain
