"""Turn a composed config into the frozen description of one run; check all that needs no loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.cell_settings import (
    CellSettings,
    CompressorSection,
    read_amount,
    read_settings,
)
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell, Composer
from espalier.harness.config.draft_section import build_draft, reserve_draft_card
from espalier.harness.config.model_section import check_texts, model_spec, with_question
from espalier.harness.cost.budget import RULES, Budget
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.errors import UserError, tell_once
from espalier.harness.settings import choice, shared_reader
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import METHODS, build_method, method_class
from espalier.harness.specs.generation import Thinking
from espalier.harness.specs.run_spec import (
    ANSWER,
    FRAME,
    VARIANTS,
    WORDS,
    Auto,
    CompressorSpec,
    MethodSpec,
    ModelSpec,
    RunOptions,
    RunSpec,
)
from espalier.methods.base import Method
from espalier.methods.readings import readings_of

#: The name of a compressor that evicts nothing, and the share that others evict if none is set.
NO_COMPRESSOR, USUAL_RATIO = "none", CompressorSpec.ratio


def build_spec(
    config: Cell | CellSettings,
    model: ModelSpec | None = None,
    method: Method | None = None,
    folders: Sequence[Path] = (),
    draft: ModelSpec | None = None,
) -> RunSpec:
    """Return the run of a cell; check every value that can be checked without a model or a file.

    Args:
        config: the cell, or its settings.
        model: in place of the cell's section.
        method: a built method, by which it is decided whether a draft is needed; None: by the name in the cell.
        folders: further folders of configs, in which a draft's name may lie.
        draft: a draft model, in place of the one that the cell names.

    Raises:
        UserError: one line with the config keys, the values and what is valid.
    """
    settings = config if isinstance(config, CellSettings) else read_settings(config)
    choice("budget.rule", settings.budget.rule, RULES)
    benchmark = replace(settings.benchmark, limit=settings.limit)
    tasks = (benchmark.kind, benchmark.name)
    model = model_spec(settings.model, tasks) if model is None else model
    check_texts(benchmark.texts, settings.model["prompts"])
    part = settings.method
    if method is None and part.code is None and part.name not in METHODS:
        raise UserError(
            f"method.name={part.name!r} has no file in methods/; valid: code: <package>.<module>:<class> in its config"
        )
    variant = variant_of("method", vars(part))
    drafts = (method or method_class(part.name, part.code)).drafts
    if drafts and (method or build_method(part.name, part.params, part.code)).takes_draft:
        if model.facts.denoises:
            draft = None  # a later check refuses the method by name, and a sweep may skip it
        elif draft is None:
            composer = Composer(Catalogue(folders))
            draft = build_draft(part.draft, part.draft_options, model, tasks, composer)
    elif typed := (draft.name if draft else part.draft) or part.draft_options:
        key = "method.draft_options" if typed is part.draft_options else "method.draft"
        raise UserError(
            f"{key}={typed!r}: method={part.name!r} takes no draft model; valid: without {key}"
        )
    model = with_longest(reserve_draft_card(model, draft), benchmark)
    method_spec = MethodSpec(
        part.name,
        variant,
        part.params,
        part.variants or {},
        compressor=_compressor(settings.compressor),
        draft=None if draft is None else with_longest(draft, benchmark),
        code=part.code,
    )
    rule = settings.budget.rule
    return RunSpec(
        **{option.name: getattr(settings, option.name) for option in fields(RunOptions)},
        model=model,
        method=method_spec,
        benchmark=with_question(_one_batch(benchmark, settings.engine.batch_size), model.prompt),
        budget=replace(
            read_budget(rule, settings.ratio, settings.keep, drafts, model.facts),
            down=settings.backend.built_in,
        ),
        engine=settings.engine,
        backend=settings.backend,
        log=settings.log.name,
        log_options=settings.log.options,
        log_samples=settings.log.samples,
        log_pictures=settings.log.pictures,
        judge=settings.judge,
        lease=settings.lease,
    )


def build_specs(cells: Iterable[CellSettings], folders: Sequence[Path] = ()) -> list[RunSpec]:
    """Return the runs of a command's cells, as `build_spec`; a model is read once for each benchmark."""
    models: dict[tuple[int, str, str], ModelSpec] = {}
    specs = []
    for cell in cells:
        key = (id(cell.model), cell.benchmark.kind, cell.benchmark.name)
        if key not in models:
            models[key] = model_spec(cell.model, key[1:])
        specs.append(build_spec(cell, models[key], folders=folders))
    return specs


def specs_of(*argv: str, typed: bool = False) -> list[RunSpec]:
    """Return the runs of a command line, `typed` by a person or made by a program; errors as of both steps."""
    command, read = read_command(argv, typed), shared_reader()
    return build_specs([read_settings(cell, read) for cell in command.cells], command.folders)


def read_budget(rule: str, ratio: Any, keep: Any, drafts: bool, facts: ModelFacts) -> Budget:
    """Return a budget.

    Args:
        rule: by which it counts.
        ratio: the share that is removed; unused with `keep`.
        keep: tokens that stay, or their share; None: the ratio applies.
        drafts: whether the ratio is the draft's, which can do without every token.
        facts: of the model.

    Raises:
        UserError: one of the values is out of range.
    """
    amount = read_amount(ratio, keep, drafts)
    return Budget.of_count(rule, amount, facts) if isinstance(amount, int) else Budget(rule, amount)


def _one_batch(benchmark: BenchmarkSpec, batch_size: int | Auto) -> BenchmarkSpec:
    """Return the benchmark; if the harness composes its prompts and no limit is set, limited to one batch."""
    if benchmark.prompt_tokens is None:
        return benchmark
    if batch_size == "auto":
        raise UserError(
            f"engine.batch_size='auto': benchmark={benchmark.name} times a batch of the size asked for; valid: a number"
        )
    return replace(benchmark, limit=benchmark.limit or batch_size)


def with_longest(model: ModelSpec, benchmark: BenchmarkSpec) -> ModelSpec:
    """Return the model with the tokens of the longest prompt and answer: as stated, else an estimate.

    An image counts its nominal tokens, a video FRAME for each frame. The sum is for one row of a batch.
    """
    if not benchmark.task:
        return model  # questions from Python, of any length
    facts, generation = model.facts, benchmark.generation
    stated = generation.get("max_new_tokens")
    answer = benchmark.new_tokens or (stated if isinstance(stated, int) else ANSWER)
    answer += (Thinking.of(model.generation.get("thinking")) or Thinking()).budget or 0
    visual = facts.visual_tokens
    if benchmark.dataset.video:
        visual = max(visual, FRAME * model.video.frames)
    prompt = benchmark.prompt_tokens or visual + WORDS
    return replace(model, longest=prompt + answer)


def variant_of(key: str, part: Mapping[str, Any]) -> str:
    """Return the variant of a method's section: one of those that it lists, else the reading that its file names.

    A sweep over variants can include methods with one reading: these run in that one, which a line reports.

    Raises:
        UserError: the section has no such variant.
    """
    listed: tuple[str, ...] = tuple(part.get("variants") or ())
    variant: str = choice(f"{key}.variant", part["variant"], listed or VARIANTS)
    # A file of conf/method knows nothing of a user's class under its name.
    readings = None if part.get("code") else readings_of(part["name"])
    only = VARIANTS[0] if readings is None else readings.default
    if listed or variant == only:
        return variant
    tell_once(f"{key}.variant={variant}: {key}={part['name']} has one reading, {only}, which runs")
    return only


def _compressor(part: CompressorSection) -> CompressorSpec | None:
    variant_of("compressor", vars(part))
    if part.name == NO_COMPRESSOR:
        if part.ratio != USUAL_RATIO:
            # A sweep over compressors can include none.
            tell_once(f"compressor.ratio={part.ratio}: compressor={NO_COMPRESSOR} evicts nothing")
        return None
    return CompressorSpec(part.name, part.params, part.ratio, part.code)
