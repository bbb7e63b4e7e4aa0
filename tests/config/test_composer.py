"""Cells are what Hydra composes of the same files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config import compose
from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.composer import Cell, Composer
from espalier.harness.config.group_lists import choices
from espalier.harness.config.kept_tokens import settled
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF

PRESETS = choices("experiment")
CHOICES = {
    "method": (
        "none",
        "fastv",
        "d2pruner",
        "pearl",
        "dart",
        "nosuch",
    ),
    "method@compressor": ("none", "h2o", "pyramidkv"),
    "benchmark": ("seedling_rec", "pope", "latency", "dense_description"),
    "model": ("seedling", "llava_ov_7b", "qwen2_vl_7b"),
    "budget": ("average", "kept"),
    "engine": ("default", "emulate"),
    "log": ("wandb",),
    "+experiment": ("kv_settings", "anchors"),
}
VALUES = (
    *("method.variant=paper", "method.variant=official", "method.variant=other"),
    *("ratio=0.5", "limit=3", "limit=${seed}", "+spare=1", "+spare=${ratio}", "~seed", "++seed=4"),
    *("method.params.K=3", "method.params.K=${seed}", "+method.params.K=3", "~method.params"),
    *("method.params={K:1}", "benchmark.name='latency_${benchmark.prompt_tokens}'", "rato=1"),
    *("keep=64", "keep=10%", "keep=null", "keep=nosuch"),
    *("model.device=cpu", "model.video={rate:3}", "engine.paired=0", "seed.x=1"),
    *("+benchmark.generation.top_k=3", "~benchmark.generation", "model.prompts.x=1", "log=wandb"),
    *("compressor.ratio=0.25", "compressor.params.window=4", "store=${model.name}", "judge=null"),
    *("+model.max_memory.0=1GiB", "method.name=???", "hydra.mode=MULTIRUN", "seed=${nothing}"),
)


def has_files(overrides: Sequence[str]) -> bool:
    """Whether all choices of a line are files of conf/: Hydra alone knows no other names."""
    chosen = (override.lstrip("+").partition("=") for override in overrides)
    groups = [(key.partition("@")[0], value) for key, _, value in chosen]
    return all(value in choices(key) for key, value in groups if (CONF / key).is_dir()) and (
        "anchor" not in dict(groups)
    )


def in_full(overrides: Sequence[str]) -> Cell:
    """The reference: Hydra's own composition of one command line."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = hydra_compose("config", overrides=list(overrides))
    OmegaConf.set_struct(config, False)
    del config["grids"]
    if config.get("keep") is not None:
        plain: Any = OmegaConf.to_container(config)
        config.update(settled(config["keep"], plain))
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def check(composer: Composer, overrides: Sequence[str], cell: Cell | None = None) -> None:
    """Compare a cell, composed here if none is given, with the reference; both refuse the same overrides."""
    try:
        expected = in_full(overrides)
    except (HydraException, OmegaConfBaseException, UserError):
        with pytest.raises(UserError):
            composer.cell(overrides)
    else:
        assert (cell or composer.cell(overrides)) == expected


@pytest.mark.sampled(48)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Sequence[str]] = []

    class Watched(Composer):
        def cell(self, overrides: Any) -> Cell:
            batches.append(overrides)
            return super().cell(overrides)

    monkeypatch.setattr(compose, "Composer", Watched)
    command = compose.read_command([f"+experiment={preset}"])
    if not batches:
        return  # no sweep
    assert len(batches) == len(command.cells)
    # Neighbours differ in the key that varies fastest, cells far from each other in all of them.
    few = sorted({0, 1, *range(0, len(batches), max(len(batches) // 4, 1)), len(batches) - 1})
    composer = Composer(Catalogue())
    for number in few:
        if has_files(batches[number]):
            check(composer, batches[number], command.cells[number])


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_command_lines(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sampled_from(sorted(CHOICES)), max_size=4, unique=True))
    # Hydra cannot remove a key after it got a value that refers to nothing; the composer can.
    values = data.draw(
        st.lists(st.sampled_from(VALUES), max_size=3, unique=True).filter(
            lambda drawn: not {"~seed", "seed=${nothing}"} <= set(drawn)
        )
    )
    composer = Composer(Catalogue())
    for _ in range(3):
        chosen = [f"{key}={data.draw(st.sampled_from(CHOICES[key]))}" for key in groups]
        check(composer, data.draw(st.permutations([*chosen, *values])))


def test_a_section_between_two_cells_changes_neither() -> None:
    composer, line = Composer(Catalogue()), ("method=d2pruner", "benchmark=refcoco_val")
    check(composer, line)
    # It takes the nodes that it shares with the cell, and has another kind of task.
    section = composer.section("method", "d2pruner")
    assert section["params"]["K"] != composer.cell(line)["method"]["params"]["K"]
    check(composer, line)
