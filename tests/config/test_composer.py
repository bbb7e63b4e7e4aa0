"""Cells made of sections are what Hydra composes in full: as written, and with every reference resolved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from espalier.harness.config import compose
from espalier.harness.config.cell_config import resolved
from espalier.harness.config.composer import Composer
from espalier.harness.config.group_lists import choices
from espalier.harness.config.hydra_internals import Loader
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.cell_runs import titles

PRESETS = sorted([*choices("experiment"), *titles()])
CHOICES = {
    "method": (
        "none",
        "fastv",
        "fastv_paper",
        "d2pruner",
        "d2pruner_di",
        "pearl",
        "dart",
        "nosuch",
    ),
    "method@compressor": ("none", "h2o", "pyramidkv", "pyramidkv_paper"),
    "benchmark": ("seedling_rec", "pope", "latency", "task:mmstar", "dense_description"),
    "model": ("seedling", "llava_ov_7b", "qwen2_vl_7b"),
    "budget": ("average", "kept"),
    "engine": ("default", "emulate"),
    "log": ("wandb",),
    "+experiment": ("kv_settings", "anchors", "d3tom_table5"),
    "+anchor": ("llava15_7b_pope",),
}
VALUES = (
    *("method.variant=paper", "method.variant=official", "method.variant=other"),
    *("ratio=0.5", "limit=3", "limit=${seed}", "+spare=1", "+spare=${ratio}", "~seed", "++seed=4"),
    *("method.params.K=3", "method.params.K=${seed}", "+method.params.K=3", "~method.params"),
    *("method.params={K:1}", "benchmark.name='latency_${benchmark.prompt_tokens}'", "rato=1"),
    *("keep=64", "keep=10%", "keep=null", "keep=nosuch"),
    *("benchmark=null", "model.device=cpu", "model.video={rate:3}", "engine.paired=0", "seed.x=1"),
    *("+benchmark.generation.top_k=3", "~benchmark.generation", "model.prompts.x=1", "~method"),
    *("compressor.ratio=0.25", "compressor.params.window=4", "store=${model.name}", "judge=null"),
    *("+model.max_memory.0=1GiB", "method.name=???", "hydra.mode=MULTIRUN", "seed=${nothing}"),
)


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    compose.register_sources()
    with compose._hydra() as found:
        yield found


def in_full(overrides: Sequence[str], loader: Loader) -> DictConfig:
    """The slow reference: Hydra's own composition of one command line."""
    return compose._job(compose._compose(overrides, loader))


def outcome(make: Any) -> Any:
    """What a call gives, or the line that it is refused with, by us or by Hydra."""
    try:
        return make()
    except (UserError, ValueError) as error:
        return str(error)


def check(composer: Composer, overrides: Sequence[str], loader: Loader, cell: Any = None) -> bool:
    """Compare a cell, made here if none is given, with the reference; return whether it was made of sections."""
    whole = outcome(lambda: in_full(overrides, loader))
    expected = whole if isinstance(whole, str) else outcome(lambda: resolved(whole))
    assert (cell or outcome(lambda: composer.cell(overrides))) == expected
    if isinstance(whole, str):
        return False
    # Where the line that a pattern was learnt from is wrong itself, `cell` composes in full.
    pieces = outcome(lambda: composer.pieces(overrides))
    if pieces is None or isinstance(pieces, str):
        return False
    assert {key: one.written for key, one in pieces.items()} == OmegaConf.to_container(whole)
    return True


@pytest.mark.sampled(32)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    class Watched(Composer):
        def cell(self, overrides: Sequence[str]) -> Any:
            asked.append(overrides)
            return super().cell(overrides)

    monkeypatch.setattr(compose, "Composer", Watched)
    command = compose.read_command([f"+experiment={preset}"])
    assert command is not None
    if not asked:
        return  # no sweep
    assert len(asked) == len(command.cells)
    # Neighbours differ in the key that varies fastest, cells far from each other in all of them.
    few = sorted({0, 1, *range(0, len(asked), max(len(asked) // 4, 1)), len(asked) - 1})
    with compose._hydra() as loader:
        composer = Composer(loader, lambda batch: in_full(batch, loader))
        for number in few:
            assert check(composer, asked[number], loader, command.cells[number])


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_command_lines(loader: Loader, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sampled_from(sorted(CHOICES)), max_size=4, unique=True))
    values = data.draw(st.lists(st.sampled_from(VALUES), max_size=3, unique=True))
    composer = Composer(loader, lambda batch: in_full(batch, loader))
    for _ in range(3):
        chosen = [f"{key}={data.draw(st.sampled_from(CHOICES[key]))}" for key in groups]
        check(composer, data.draw(st.permutations([*chosen, *values])), loader)
