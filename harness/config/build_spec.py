"""A composed config becomes the frozen description of one run; every value is checked that can be without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.cell_config import Cell
from espalier.harness.config.compose import compose_section
from espalier.harness.config.draft_section import with_options
from espalier.harness.config.judge_section import KEYS as JUDGE
from espalier.harness.config.judge_section import judge_spec
from espalier.harness.config.model_section import model_spec
from espalier.harness.config.prompt_section import check_texts, worded
from espalier.harness.cost.budget import Budget
from espalier.harness.cost.schedule import RULES
from espalier.harness.errors import UserError, tell_once
from espalier.harness.paths import rooted
from espalier.harness.specs import value_checks as fields
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.draft_errors import in_words_of_the_draft
from espalier.harness.specs.run_spec import (
    ANSWER,
    AUTO_BATCH,
    AUTO_PAIRS,
    AUTO_PREFETCH,
    BACKENDS,
    DECODE_LOOPS,
    FRAME,
    LOGS,
    POSITIONS,
    REFUSED,
    SEPARATORS,
    SHARES,
    TRANSPORTS,
    VARIANTS,
    WORDS,
    CompressorSpec,
    EngineSpec,
    MethodSpec,
    ModelSpec,
    RunSpec,
)
from espalier.harness.store.files.lease import Terms

#: Keys of the sections; those of `benchmark` stand in harness/config/benchmark_section.py.
SECTIONS = {
    "model": (
        "name adapter path hub revision dtype attention weights scale device device_map max_memory offload "
        "check_weights template prompt prompts conversation join template_sha256 conversion generation processor video "
        "transparency media facts architecture drafts boxes resources"
    ),
    "method": "name variant params",
    "compressor": "name variant params ratio",
    "budget": "rule",
    "engine": (
        "backend batch_size positions separators decode threads max_errors warmup prefetch transport patience compare "
        "graphs rescore paired share"
    ),
    "log": "name options samples",
    "judge": JUDGE,
    "lease": "beat expiry",
}
#: Keys that only some files of a section have: those of methods with a draft model or with several variants.
OPTIONAL = dict.fromkeys(("method", "compressor"), ("draft", "draft_options", "variants"))
#: A compressor of this name stands for none.
NO_COMPRESSOR = "none"
#: Keys of a cell that say where it runs, and nothing of its run.
NOT_OF_A_RUN = ("cluster",)
SCALARS = (
    *("ratio", "seed", "limit", "force", "offline", "store", "curves", "report", "refused"),
    "json",
)


def build_spec(config: Cell) -> RunSpec:
    """Return the run of a cell; check every value that can be checked without a model or a file.

    Raises:
        UserError: one line with the config key, the value and what is valid.
    """
    config = {key: value for key, value in config.items() if key not in NOT_OF_A_RUN}
    fields.only_known("", config, (*SECTIONS, "benchmark", *SCALARS))
    parts = {name: _section(config, name) for name in SECTIONS}
    _check_log(parts["log"])
    curves = fields.optional_text("curves", config["curves"])
    report = fields.optional_text("report", config["report"])
    rule = fields.choice("budget.rule", parts["budget"]["rule"], RULES)
    benchmark = benchmark_spec(fields.table("benchmark", config["benchmark"]), config["limit"])
    asked = (benchmark.kind, benchmark.name)
    model = model_spec(parts["model"], asked)
    check_texts(benchmark.texts, parts["model"]["prompts"])
    method = replace(
        _method(parts["method"], model, asked), compressor=_compressor(parts["compressor"])
    )
    engine = _engine(parts["engine"])
    model = with_longest(beside(model, method.draft), benchmark)
    if method.draft is not None:
        method = replace(method, draft=with_longest(method.draft, benchmark))
    share = fields.draft_ratio if _decodes(method.name) else fields.ratio
    return RunSpec(
        model=model,
        method=method,
        benchmark=worded(_one_batch(benchmark, engine.batch_size), model.prompt),
        budget=Budget(rule=rule, ratio=share("ratio", config["ratio"])),
        engine=engine,
        seed=fields.integer("seed", config["seed"], at_least=0),
        force=fields.flag("force", config["force"]),
        log=fields.choice("log", parts["log"]["name"], LOGS),
        store=rooted(fields.text("store", config["store"])),
        offline=fields.flag("offline", config["offline"]),
        curves=None if curves is None else rooted(curves),
        report=None if report is None else rooted(report),
        refused=fields.choice("refused", config["refused"], REFUSED),
        json=fields.flag_or_auto("json", config["json"]),
        log_options=fields.table("log.options", parts["log"]["options"]),
        log_samples=fields.integer("log.samples", parts["log"]["samples"], at_least=0),
        judge=judge_spec(parts["judge"]),
        lease=_terms(parts["lease"]),
    )


def _check_log(section: Mapping[str, Any]) -> None:
    """Raise if settings of a log are given where nothing is logged."""
    if section["name"] == "none" and (section["samples"] or section["options"]):
        key = "samples" if section["samples"] else "options"
        raise UserError(f"log.{key}={section[key]!r} with log=none says nothing; valid: log=wandb")


def _terms(section: Mapping[str, Any]) -> Terms:
    return Terms(
        **{name: fields.positive(f"lease.{name}", value) for name, value in section.items()}
    )


def _one_batch(benchmark: BenchmarkSpec, batch_size: int) -> BenchmarkSpec:
    """Return the benchmark; of prompts that the harness composes one batch is all, where no limit is set."""
    if benchmark.prompt_tokens is None or benchmark.limit is not None:
        return benchmark
    if batch_size == AUTO_BATCH:
        raise UserError(
            f"engine.batch_size='auto': benchmark={benchmark.name} times a batch of the size asked for; valid: a number"
        )
    return replace(benchmark, limit=batch_size)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = fields.table(name, config[name])
    optional = [key for key in OPTIONAL.get(name, ()) if key in section]
    fields.only_known(name, section, [*SECTIONS[name].split(), *optional])
    return section


def with_longest(model: ModelSpec, benchmark: BenchmarkSpec) -> ModelSpec:
    """Return the model with the tokens of the longest prompt and answer: as stated, else an estimate.

    Of pictures the nominal tokens of one, of videos FRAME for each frame. Further rows of a batch come on top.
    """
    facts, generation = model.facts, benchmark.generation
    stated = generation.get("max_new_tokens")
    answer = benchmark.new_tokens or (stated if isinstance(stated, int) else ANSWER)
    visual = facts.visual_tokens
    if benchmark.dataset.video:
        visual = max(visual, FRAME * model.video.frames)
    prompt = benchmark.prompt_tokens or visual + WORDS
    return replace(model, longest=prompt + answer)


def beside(target: ModelSpec, draft: ModelSpec | None) -> ModelSpec:
    """Return the target with the draft's card left free, where the target is spread and the draft is not it."""
    alone = draft is None or draft == target or draft.device_map is not None
    if draft is None or alone or target.device_map is None or not draft.device.startswith("cuda"):
        return target
    return replace(target, spared_card=int(draft.device.partition(":")[2] or 0))


def _method(part: Mapping[str, Any], model: ModelSpec, tasks: tuple[str, ...]) -> MethodSpec:
    name = fields.text("method.name", part["name"])
    params = fields.table("method.params", part["params"])
    variant = variant_of("method", part)
    asked = fields.optional_text("method.draft", part.get("draft"))
    options = fields.table("method.draft_options", part.get("draft_options"))
    if _decodes(name) and build_method(name, params).takes_draft:
        return MethodSpec(name, variant, params, build_draft(asked, options, model, tasks))
    if asked is not None or options:
        key = "method.draft_options" if asked is None else "method.draft"
        raise UserError(f"{key}: method={name!r} takes no draft model; valid: without {key}")
    return MethodSpec(name, variant, params)


def variant_of(key: str, part: Mapping[str, Any]) -> str:
    """Return the variant of a method's section: one of those that it lists, else `paper`.

    A sweep over variants may have methods with one reading among its cells: they run in that one, and say so.

    Raises:
        UserError: the section has no such variant.
    """
    listed: tuple[str, ...] = tuple(part.get("variants") or ())
    variant = fields.choice(f"{key}.variant", part["variant"], listed or VARIANTS)
    if listed or variant == VARIANTS[0]:
        return variant
    tell_once(
        f"{key}.variant={variant}: {key}={part['name']} has one reading, {VARIANTS[0]}, which runs"
    )
    return VARIANTS[0]


def _compressor(part: Mapping[str, Any]) -> CompressorSpec | None:
    name = fields.text("compressor.name", part["name"])
    variant_of("compressor", part)
    # The share counts where something is evicted; a sweep may ask for it beside cells where nothing is.
    ratio = fields.cache_ratio("compressor.ratio", part["ratio"])
    if name == NO_COMPRESSOR:
        return None
    return CompressorSpec(name, fields.table("compressor.params", part["params"]), ratio)


def _decodes(name: str) -> bool:
    """Say whether a method decodes speculatively; an unknown name, refused later, does not."""
    return name in METHODS and METHODS.load(name).drafts


def build_draft(
    asked: str | None, options: Mapping[str, Any], target: ModelSpec, tasks: tuple[str, ...] = ()
) -> ModelSpec:
    """Return the draft model: the one asked for, else the first that the target names, with the user's options.

    It sees the video frames that the target sees, and images cut as the target cuts them where both are of one family:
    what the target chooses is for both of them, and so is its prompt set if the draft has it. It computes in the
    target's type, which the machine at hand has.
    """
    if target.facts.diffusion is not None:
        raise UserError(
            f"method: a draft guesses one token after another, and model={target.name} denoises its answers; valid: a "
            "method that drops tokens, such as d3tom"
        )
    if asked is None and not target.drafts:
        raise UserError(
            f"method.draft: model={target.name} names no draft (model.drafts); valid: a name of conf/model"
        )
    part = compose_section("model", asked or target.drafts[0], "method.draft")
    part["video"], part["dtype"] = asdict(target.video), target.dtype
    if part["adapter"] == target.adapter:
        part["processor"] = dict(target.processor)
    if part["prompts"].get(target.prompt.name) is not None:
        part["prompt"] = target.prompt.name
    with in_words_of_the_draft():
        return model_spec(with_options(part, options), tasks)


def _engine(part: Mapping[str, Any]) -> EngineSpec:
    return EngineSpec(
        backend=fields.choice("engine.backend", part["backend"], BACKENDS),
        batch_size=fields.batch_size("engine.batch_size", part["batch_size"], auto=AUTO_BATCH),
        positions=fields.choice("engine.positions", part["positions"], POSITIONS),
        separators=fields.choice("engine.separators", part["separators"], SEPARATORS),
        decode=fields.choice("engine.decode", part["decode"], DECODE_LOOPS),
        threads=_threads(part["threads"]),
        max_errors=fields.integer("engine.max_errors", part["max_errors"], at_least=0),
        warmup=fields.integer("engine.warmup", part["warmup"], at_least=0),
        prefetch=fields.count_or_auto("engine.prefetch", part["prefetch"], auto=AUTO_PREFETCH),
        transport=fields.choice("engine.transport", part["transport"], TRANSPORTS),
        patience=fields.positive("engine.patience", part["patience"]),
        compare=fields.flag("engine.compare", part["compare"]),
        graphs=fields.flag_or_auto("engine.graphs", part["graphs"]),
        rescore=fields.flag("engine.rescore", part["rescore"]),
        paired=fields.count_or_auto("engine.paired", part["paired"], auto=AUTO_PAIRS),
        share=fields.choice("engine.share", part["share"], SHARES),
    )


def _threads(value: Any) -> int | None:
    # More threads than cores only take turns, and thousands of them crash the process.
    return fields.optional_integer("engine.threads", value, at_least=1, at_most=os.cpu_count() or 1)
