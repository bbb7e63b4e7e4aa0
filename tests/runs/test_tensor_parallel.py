"""Two processes share the matrices of every layer: they give the answers of one, and only the first writes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.harness.ranks import Ranks
from espalier.harness.runs.admission import admit_here
from espalier.harness.store.files.digests import Digests
from espalier.methods.divprune import DivPrune
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from espalier.methods.snapkv import SnapKV
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import adapter_of, generation, saved
from tests.refused import refused
from tests.runs.test_data_parallel import launch
from tests.tiny import load_tiny

NAMES = (
    *("llava", "qwen2_5_vl_mixed", "internvl_phi3", "deepseek_ocr", "glm4v_moe"),
    *("gemma3", "qwen3_5_mixed", "qwen3_5_moe", "paddleocr_vl"),
)


def shared() -> tuple[str, ...]:
    """`NAMES`, and a family of each further adapter that declares a plan to share it, and has heads for two."""
    by_adapter = {FAMILIES[name].spec.adapter: name for name in NAMES}
    for name, family in FAMILIES.items():
        text, adapter = family.spec.facts.text, family.spec.adapter
        is_shared = ADAPTERS.load(adapter).data.loads_shared and text.kv_heads % 2 == 0
        # FastV reads a layer that is linear in MiniCPM-V's.
        if adapter in by_adapter or not is_shared or text.linear is not None:
            continue
        if getattr(adapter_of(name, "float32").decoder.config, "base_model_tp_plan", None):
            by_adapter[adapter] = name
    return (*NAMES, *(name for name in by_adapter.values() if name not in NAMES))


METHODS: tuple[tuple[Any, float, Any], ...] = (
    (NoReduction(), 0.0, None),
    (DivPrune(), 0.5, None),
    (FastV(), 0.5, None),
    (NoReduction(), 0.0, CacheBudget(SnapKV(), 0.5)),
    (NoReduction(), 0.0, CacheBudget(SnapKV(repeated=True), 0.5)),
)
RUN = ["model=seedling", "model.device=cpu", "benchmark=seedling_rec", "limit=3", "ratio=0.5"]
RUN += ["method=fastv", "engine.batch_size=2", "engine.paired=0"]


def answers(name: str, folder: Path, parallel: str) -> list[tuple[Any, ...]]:
    """Ids, logits, and bytes of the cache of a family's chats under each method."""
    adapter = load_tiny(replace(FAMILIES[name].spec, parallel=parallel), folder, "float32")
    inputs = adapter.encode(FAMILIES[name].chats)
    results = []
    for method, ratio, evicting in METHODS:
        with Session(adapter, method, Budget("kept", ratio), evicting=evicting) as session:
            batch = session.generate(inputs, **generation(adapter, inputs))
        results.append((batch.ids, batch.logits, [record.kv_bytes for record in batch.records]))
    return results


#: Runs in both processes, which meet once: all families, then the cells of the command.
SCRIPT = """
import pickle, sys
from pathlib import Path
import torch.distributed as dist
import run
from espalier.harness.cli import run as cli
from tests.runs.test_tensor_parallel import answers
folders, target, *command = sys.argv[1:]
plain = cli.run_cells
def run_cells(*arguments):
    results = {f.name: answers(f.name, f, "tensor") for f in map(Path, folders.split(","))}
    Path(f"{target}.{dist.get_rank()}").write_bytes(pickle.dumps(results))
    return plain(*arguments)
cli.run_cells = run_cells
sys.exit(run.main(command))
"""


@pytest.mark.slow
@pytest.mark.parametrize("families", [NAMES, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_two_processes_answer_as_one(families: tuple[str, ...] | None, tmp_path: Path) -> None:
    script, store = tmp_path / "both.py", tmp_path / "store"
    script.write_text(SCRIPT)
    command = [*RUN, "model.parallel=tensor", f"store={store}"]
    names = families or shared()
    folders = ",".join(str(saved(name)) for name in names)
    done = launch(script, folders, str(tmp_path / "results"), *command)
    assert done.code == 0, done.err
    first, second = (pickle.loads((tmp_path / f"results.{rank}").read_bytes()) for rank in range(2))
    for name in names:
        alone = answers(name, saved(name), "data")
        for result, repeat, expected in zip(first[name], second[name], alone, strict=True):
            assert torch.equal(result[1], repeat[1])
            assert torch.equal(result[0], expected[0])
            assert result[2] == expected[2]
            scale = expected[1].abs().max()
            # Largest measured: 1.7e-6, with linear layers 2.7e-6 and, with another make of processor, 4.1e-6.
            bound = 4e-6 if FAMILIES[name].spec.facts.text.linear is None else 1e-5
            assert (result[1] - expected[1]).abs().max() < bound * scale
    (row,) = done.rows
    assert row["settings"]["model"]["parallel"] == "tensor"
    (run,) = (store / "runs").iterdir()
    assert [path.name for path in run.glob("*.jsonl")] == ["journal.jsonl"]
    entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert sum("answer" in entry for entry in entries) == 3


@pytest.mark.parametrize(
    ("world", "overrides", "line"),
    [
        (1, [], "needs several processes; valid: torchrun"),
        (12, [], "12 processes: more tensor ranks than heads, model='seedling' has 6 key heads"),
        (
            4,
            [],
            "heads that do not divide, model='seedling' has 6 key heads; valid: 2, 3, 6, or model.parallel=data",
        ),
        (2, ["method=parallelvlm"], "does not take method='parallelvlm', which has two models"),
        (2, ["model=seedling_diffusion"], "'seedling_diffusion', which denoises"),
        (2, ["model.weights=random"], "does not take model.weights='random'"),
        (2, ["engine.share=prefix"], "does not take engine.share='prefix'"),
    ],
)
def test_what_cannot_be_shared_is_refused(world: int, overrides: list[str], line: str) -> None:
    spec = commands.spec_of(*RUN, "model.parallel=tensor", *overrides)
    assert line in refused(admit_here, spec, Ranks(world=world), Digests())


@pytest.mark.parametrize(
    ("name", "decoder"), [("qwen3_vl", "Qwen3VLTextModel"), ("qwen3_vl_moe", "Qwen3VLMoeTextModel")]
)
def test_a_family_without_a_plan_is_refused_before_weights_are_read(
    name: str, decoder: str
) -> None:
    spec = replace(FAMILIES[name].spec, parallel="tensor", weights="trained")
    with pytest.raises(UserError, match=rf"no plan .base_model_tp_plan. that loads the {decoder}"):
        load_adapter(replace(spec, path=saved(name)))
