"""The settings that change a run's numbers: the block `settings` of its row, and that part of its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.media.images import TRANSPARENCY
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import ORIGINAL, ModelSpec, PromptSpec, RunSpec
from espalier.methods.base import Method


@dataclass(frozen=True)
class Contents:
    """The contents of the files that a run reads, whatever their names.

    Attributes:
        model: revision of the model's directory, or hub id and commit.
        draft: the same of the draft model; None without a draft.
        tasks: digests of the files that make a benchmark's samples and scores.
        artifacts: digests of the calibration files that the method reads.
        data: digest of the benchmark's data set in a folder of the user; None: the data set of the hub.
        words: digest of a judge prompt that replaces the benchmark's; None: the benchmark's.
        engine: version of the program that answers in the harness's place; None: the harness answers.
        quantisation: of the model's weights; None: they are not quantised.
        draft_quantisation: the same of the draft model.
    """

    model: str
    draft: str | None = None
    tasks: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    data: str | None = None
    words: str | None = None
    engine: str | None = None
    quantisation: str | None = None
    draft_quantisation: str | None = None


def cell_of(spec: RunSpec) -> dict[str, Any]:
    """Return the cell that a run fills; these are keys of the row itself."""
    budget = spec.budget
    return {
        "model": spec.model.name,
        "method": spec.method.title,
        "variant": spec.method.variant,
        "benchmark": spec.benchmark.name,
        # The share that a count removes is known after the run.
        **(
            {"ratio": budget.ratio}
            if budget.count is None
            else {"ratio": None, "keep": budget.count}
        ),
        "budget_rule": spec.budget.rule,
        "seed": spec.seed,
    }


def settings_of(spec: RunSpec, method: Method, contents: Contents) -> dict[str, Any]:
    """Return all other settings that change the run's numbers, as JSON values.

    Keys are those of the config where it has them. An engine setting that does not change the numbers of the method is
    null.

    Args:
        spec: the run.
        method: the built method; its fields are the hyper-parameters with defaults filled in.
        contents: the contents of the files that the run reads.
    """
    identity = kind_of(method, spec).identity(spec, method)
    draft = identity.draft
    blocks = {
        "model": _model(spec.model, contents.model, contents.quantisation),
        "method": {"params": identity.params},
        "draft": None
        if draft is None
        else {"name": draft.name, **_model(draft, contents.draft, contents.draft_quantisation)},
        "benchmark": {**_benchmark(spec.benchmark, contents), **_boxes(spec)},
        "engine": {
            "warmup": spec.engine.warmup,
            **identity.engine,
            # Rows without meters have no key for them, as rows older than a meter.
            **dict.fromkeys(spec.engine.meters, True),
            **_scope(spec),
            **({"kept": True} if spec.engine.kept else {}),
        },
        "artifacts": contents.artifacts,
    }
    if "judge" in spec.benchmark.needs:
        # Other settings of the judge do not change the numbers.
        blocks["judge"] = _judge(spec.judge, contents.words)
    if spec.backend.served:
        backend = asdict(spec.backend)
        blocks["backend"] = {
            # A server has settings that a run does not know.
            **({"server": True} if backend.pop("url") is not None else {}),
            # Rows of this package's methods have no key for it, as rows older than the setting.
            **{k: v for k, v in backend.items() if k != "pruning" or spec.backend.built_in},
            "python": None,  # where it is installed changes no number
            "version": contents.engine,
            "scope": "item",  # a choice in each picture by itself
        }
    return {key: _plain(value) for key, value in blocks.items()}


def _scope(spec: RunSpec) -> dict[str, str]:
    """Return the scope of a method's choice, if it is not the whole prompt; served runs have it beside the version."""
    scope = spec.engine.scope
    return {} if scope == "prompt" or spec.backend.served else {"scope": scope}


def _model(model: ModelSpec, revision: str | None, quantisation: str | None) -> dict[str, Any]:
    return {
        # Of a user's class without its folder.
        "adapter": model.adapter.rpartition("/")[2],
        "revision": revision,
        "dtype": model.dtype,
        "attention": model.attention,
        "weights": model.weights,
        "device": model.device,
        "device_map": model.device_map,
        "max_memory": model.max_memory,
        "spared_card": model.spared_card,
        "template": model.template,
        "conversation": model.conversation,
        "generation": model.generation,
        "processor": model.processor,
        "video": asdict(model.video),
        "media": model.media,
        # A checkpoint brings its own configuration, which its revision covers.
        "architecture": model.architecture if model.weights == "random" else None,
        "facts": _facts(model.facts),
        **_prompt(model.prompt),
        # Settings that older rows do not have.
        **({} if quantisation is None else {"quantisation": quantisation}),
        **({"offload": True} if model.offload else {}),
        **({} if model.parallel == "data" else {"parallel": model.parallel}),
        **({} if model.transparency == TRANSPARENCY[0] else {"transparency": model.transparency}),
    }


def _prompt(prompt: PromptSpec) -> dict[str, Any]:
    # Older rows do not have these, so original prompts add nothing. Pixels, videos and generation settings of the
    # prompt set are in the fields above, its text and its limits in those of the benchmark.
    newer = {"prompt": prompt.name if prompt.name != ORIGINAL else None, "join": prompt.join}
    return {key: value for key, value in newer.items() if value is not None}


def _facts(facts: ModelFacts) -> dict[str, Any]:
    stated = asdict(facts)
    # The signals of a model decide which methods run on it and do not change numbers: a new signal changes no row.
    # The work on a nominal picture enters estimates alone.
    del stated["signals"], stated["nominal_work"]
    if not facts.deepstack:
        # Older rows do not have this fact.
        del stated["deepstack"]
    if not facts.sites:
        del stated["sites"]
    return stated


def _benchmark(benchmark: BenchmarkSpec, contents: Contents) -> dict[str, Any]:
    # Older rows do not have the settings in `newer`.
    dataset = {"path": benchmark.dataset.path, "revision": benchmark.dataset.revision}
    newer = {
        "prompt": benchmark.prompt,
        "text": benchmark.text,
        "dataset": dataset if any(dataset.values()) else None,
        "data": contents.data,
        "score": _score(benchmark.records),
        "derived": {name: asdict(metric) for name, metric in benchmark.derived.items()},
        "answers": None if benchmark.answers is None else asdict(benchmark.answers),
        "prompt_tokens": benchmark.prompt_tokens,
        "new_tokens": benchmark.new_tokens,
        "cluster": None if benchmark.cluster is None else asdict(benchmark.cluster),
        # A nested table, since 0 is a setting and only None is absent.
        "intervals": None if benchmark.blocks is None else {"blocks": benchmark.blocks},
    }
    return {
        "task": benchmark.task,
        "limit": benchmark.limit,
        "metrics": benchmark.metrics,
        "headline": benchmark.headline,
        "higher_is_better": benchmark.higher_is_better,
        "generation": benchmark.generation,
        "files": contents.tasks,
        **{key: value for key, value in newer.items() if value},
    }


def _score(records: RecordSettings | None) -> dict[str, Any] | None:
    if records is None:
        return None
    tolerance = asdict(records.tolerance) if records.score == "number" else {}
    return {"name": records.score, **tolerance}


def _boxes(spec: RunSpec) -> dict[str, str]:
    # The format of boxes only changes rows of benchmarks that request boxes.
    return {"boxes": spec.model.boxes} if spec.benchmark.kind == "localization" else {}


def _judge(judge: JudgeSpec, words: str | None) -> dict[str, Any]:
    names = ("model", "temperature", "seed", "max_tokens", "options")
    return {**{name: getattr(judge, name) for name in names}, "prompt": words}


def _plain(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
