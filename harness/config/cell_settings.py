"""The settings of a cell as dataclasses: every value that can be checked without torch, a model or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from espalier.harness.config.benchmark_section import benchmark_spec, is_own_data
from espalier.harness.config.composer import Cell
from espalier.harness.config.kept_tokens import MOST, is_count, ratio_of
from espalier.harness.errors import UserError
from espalier.harness.settings import (
    By,
    CacheRatio,
    Count,
    DraftRatio,
    Natural,
    OneOf,
    Ratio,
    Text,
    ValueReader,
    defaults,
    read_section,
    read_value,
    setting_hints,
    table,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.records.data_file import ON_THIS_MACHINE, VALID, check_address
from espalier.harness.specs.run_spec import BackendSpec, EngineSpec, RunOptions
from espalier.harness.store.files.lease import Terms

#: Keys of a cell that set where it runs and change nothing of its run.
NOT_OF_A_RUN = ("cluster",)


#: Keys of a cell that hold paths of files to write.
WRITTEN = ("store", "curves", "report")


@dataclass(frozen=True, kw_only=True)
class MethodSection:
    """The section `method`; keys with a default are those that few files have."""

    name: Text
    variant: Any
    params: Mapping[str, Any]
    code: Text | None = None
    draft: Text | None = None
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompressorSection(MethodSection):
    """The section `compressor`; its ratio may be set for cells without a compressor."""

    ratio: CacheRatio


@dataclass(frozen=True)
class _BudgetSection:
    # One of the rules of harness/cost/budget.py, which imports torch.
    rule: Text


@dataclass(frozen=True)
class _LogSection:
    name: Annotated[str, OneOf(("none", "wandb"))]
    options: Mapping[str, Any]
    samples: Natural
    pictures: Natural

    def __post_init__(self) -> None:
        """Raise UserError for settings of a log where nothing is logged."""
        refuse("log", {"log": self})


def _incomplete(section: type) -> By:
    """Return the reader of a table that need not have the keys with a default."""
    return By(lambda key, value: read_section(section, key, defaults(section) | table(key, value)))


def _read_benchmark(key: str, value: Any) -> BenchmarkSpec:
    return benchmark_spec(table(key, value))


def _read_backend(key: str, value: Any) -> BackendSpec:
    settings = table(key, value)
    backend = read_section(BackendSpec, key, defaults(BackendSpec) | settings)
    unused = sorted(settings.keys() - {"name"})
    if unused and not backend.served:
        raise UserError(
            f"{key}.{unused[0]} is for another engine than backend={backend.name}; valid: {key}=vllm, or without it"
        )
    return backend


@dataclass(frozen=True, kw_only=True)
class CellSettings(RunOptions):
    """All keys of a cell that concern its run; what is `Any` here is checked together with other settings."""

    ratio: Any
    keep: Any
    limit: Count | None
    model: Mapping[str, Any]
    benchmark: Annotated[BenchmarkSpec, By(_read_benchmark)]
    method: Annotated[MethodSection, _incomplete(MethodSection)]
    compressor: Annotated[CompressorSection, _incomplete(CompressorSection)]
    budget: _BudgetSection
    engine: EngineSpec
    backend: Annotated[BackendSpec, By(_read_backend)]
    log: _LogSection
    judge: JudgeSpec
    lease: Terms


#: Keys of a cell that concern its run.
RUN_KEYS = tuple(setting_hints(CellSettings))


def read_settings(cell: Cell, read: ValueReader = read_value) -> CellSettings:
    """Return the settings of a cell's run; cells of a command have one `read`, a `shared_reader`.

    Raises:
        UserError: one line with the config key, the value and what is valid.

    Cost: 0.5 ms.
    """
    part = {key: value for key, value in cell.items() if key not in NOT_OF_A_RUN}
    settings = read_section(CellSettings, "", part, read)
    benchmark = part["benchmark"]
    if is_own_data(benchmark) and benchmark["path"] is None:
        raise UserError(
            f"benchmark.path=null: benchmark={benchmark['name']} needs data; valid: {VALID}"
        )
    for key in WRITTEN:
        check_address(key, cell[key], ON_THIS_MACHINE)
    check_address("model.path", settings.model.get("path"))
    check_address("benchmark.include_path", benchmark.get("include_path"))
    return settings


def read_amount(ratio: Any, keep: Any, drafts: bool) -> float | int:
    """Return what a budget removes or keeps: a share of removed tokens (float), or a number of kept ones (int).

    Args:
        ratio: the share that is removed; unused with `keep`.
        keep: tokens that stay, or their share; None: the ratio applies.
        drafts: whether the ratio is the draft's, which can do without every token.

    Raises:
        UserError: one of the values is out of range.
    """
    if keep is None:
        return cast("float", read_value("ratio", ratio, DraftRatio if drafts else Ratio))
    removed = ratio_of(keep)
    if removed is not None:
        return removed
    if not is_count(keep):
        raise UserError(
            f"keep={keep!r} must be a number of visual tokens, 1 and more, or a share above 0% up to 100% without an "
            f"exponent, such as 10%; at most {MOST:,} tokens"
        )
    return cast("int", keep)
