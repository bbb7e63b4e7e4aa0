"""Turn a composed config into the frozen description of one run; check all that needs no loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.cell_settings import (
    CompressorSection,
    MethodSection,
    read_amount,
    read_settings,
)
from espalier.harness.config.composer import Cell, compose_section
from espalier.harness.config.group_lists import merged
from espalier.harness.config.model_section import check_texts, model_spec, with_question
from espalier.harness.cost.budget import RULES, Budget
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.errors import UserError, tell_once
from espalier.harness.settings import (
    choice,
    unknown_key,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import METHODS, build_method, method_class
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
    in_words_of_the_draft,
)
from espalier.harness.specs.think_tags import Thinking
from espalier.methods.base import Method
from espalier.methods.readings import readings_of

#: The name of a compressor that evicts nothing, and the share that others evict if none is set.
NO_COMPRESSOR, USUAL_RATIO = "none", CompressorSpec.ratio


def build_spec(
    config: Cell,
    model: ModelSpec | None = None,
    method: Method | None = None,
    folders: Sequence[Path] = (),
) -> RunSpec:
    """Return the run of a cell; check every value that can be checked without a model or a file.

    Args:
        config: the cell.
        model: in place of the cell's section.
        method: a built method, by which it is decided whether a draft is needed; None: by the name in the cell.
        folders: further folders of configs, in which a draft's name may lie.

    Raises:
        UserError: one line with the config keys, the values and what is valid.
    """
    settings = read_settings(config)
    choice("budget.rule", settings.budget.rule, RULES)
    benchmark = benchmark_spec(settings.benchmark, settings.limit)
    tasks = (benchmark.kind, benchmark.name)
    model = model_spec(settings.model, tasks) if model is None else model
    check_texts(benchmark.texts, settings.model["prompts"])
    if method is None:
        _check_code(settings.method)
    method_spec = replace(
        _method(settings.method, model, tasks, method, folders),
        compressor=_compressor(settings.compressor),
    )
    model = with_longest(reserve_draft_card(model, method_spec.draft), benchmark)
    if method_spec.draft is not None:
        method_spec = replace(method_spec, draft=with_longest(method_spec.draft, benchmark))
    drafts, rule = _decodes(method_spec, method), settings.budget.rule
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
    facts, generation = model.facts, benchmark.generation
    stated = generation.get("max_new_tokens")
    answer = benchmark.new_tokens or (stated if isinstance(stated, int) else ANSWER)
    answer += (Thinking.of(model.generation.get("thinking")) or Thinking()).budget or 0
    visual = facts.visual_tokens
    if benchmark.dataset.video:
        visual = max(visual, FRAME * model.video.frames)
    prompt = benchmark.prompt_tokens or visual + WORDS
    return replace(model, longest=prompt + answer)


def reserve_draft_card(target: ModelSpec, draft: ModelSpec | None) -> ModelSpec:
    """Return the target with the draft's card kept free, if the target is spread over cards and the draft is not."""
    same_devices = draft is None or draft == target or draft.device_map is not None
    if (
        draft is None
        or same_devices
        or target.device_map is None
        or not draft.device.startswith("cuda")
    ):
        return target
    return replace(target, spared_card=int(draft.device.partition(":")[2] or 0))


def _check_code(part: MethodSection) -> None:
    """Raise UserError for a file of a method that names no class."""
    if part.code is None and part.name not in METHODS:
        raise UserError(
            f"method.name={part.name!r} has no file in methods/; valid: code: <package>.<module>:<class> in its config"
        )


def _method(
    part: MethodSection,
    model: ModelSpec,
    tasks: tuple[str, ...],
    method: Method | None,
    folders: Sequence[Path],
) -> MethodSpec:
    name, params, draft = part.name, part.params, part.draft
    spec = MethodSpec(
        name, variant_of("method", vars(part)), params, part.variants or {}, code=part.code
    )
    if _decodes(spec, method) and (method or build_method(name, params, part.code)).takes_draft:
        if model.facts.denoises:
            return spec  # a later check refuses the method by name, and a sweep may skip it
        return replace(spec, draft=build_draft(draft, part.draft_options, model, tasks, folders))
    if draft is not None or part.draft_options:
        key = "method.draft_options" if draft is None else "method.draft"
        raise UserError(f"{key}: method={name!r} takes no draft model; valid: without {key}")
    return spec


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


def _decodes(spec: MethodSpec, method: Method | None) -> bool:
    """Return whether a method decodes speculatively; `method` is built, None: by the spec."""
    return (method or method_class(spec.name, spec.code)).drafts


def build_draft(
    draft_name: str | None,
    options: Mapping[str, Any],
    target: ModelSpec,
    tasks: tuple[str, ...] = (),
    folders: Sequence[Path] = (),
) -> ModelSpec:
    """Return the draft model: the named one, else the first of the target's `drafts`, with the user's options.

    It is looked for in conf/model, in installed plug-ins and in `folders`.

    It gets the target's video frames, its image processor settings if both are of one family (the target's choice holds
    for both models), its prompt set if the draft has it, and its dtype, which the machine supports.
    """
    if draft_name is None and not target.drafts:
        raise UserError(
            f"method.draft: model={target.name} names no draft (model.drafts); valid: a name of conf/model"
        )
    part = compose_section("model", draft_name or target.drafts[0], "method.draft", folders=folders)
    part["video"], part["dtype"] = asdict(target.video), target.dtype
    if part["adapter"] == target.adapter:
        part["processor"] = dict(target.processor)
    if part["prompts"].get(target.prompt.name) is not None:
        part["prompt"] = target.prompt.name
    key = "method.draft_options"
    for name in options:
        if name not in part:
            raise unknown_key(f"{key}.{name}", (f"{key}.{valid}" for valid in part))
    with in_words_of_the_draft():
        return model_spec(merged(part, options), tasks)
