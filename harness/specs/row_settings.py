"""The blocks of a row's settings that follow from the specs of its run, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.media.images import TRANSPARENCY
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import ORIGINAL, ModelSpec, PromptSpec


def model_settings(
    model: ModelSpec, revision: str | None, quantisation: str | None
) -> dict[str, Any]:
    """Return the settings of a model.

    Args:
        model: the model.
        revision: digest of the checkpoint's files, or hub id and commit.
        quantisation: of the weights; None: they are not quantised.
    """
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


def benchmark_settings(
    benchmark: BenchmarkSpec, model: ModelSpec, files: Sequence[str], data: str | None
) -> dict[str, Any]:
    """Return the settings of a benchmark.

    Args:
        benchmark: the benchmark.
        model: the model that answers.
        files: digests of the files that make its samples and scores.
        data: digest of its data set in a folder of the user; None: the data set of the hub.
    """
    # Older rows do not have the settings in `newer`.
    dataset = {"path": benchmark.dataset.path, "revision": benchmark.dataset.revision}
    newer = {
        "prompt": benchmark.prompt,
        "text": benchmark.text,
        "dataset": dataset if any(dataset.values()) else None,
        "data": data,
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
        "files": files,
        **{key: value for key, value in newer.items() if value},
        # The format of boxes only changes rows of benchmarks that request boxes.
        **({"boxes": model.boxes} if benchmark.kind == "localization" else {}),
    }


def _score(records: RecordSettings | None) -> dict[str, Any] | None:
    if records is None:
        return None
    tolerance = asdict(records.tolerance) if records.score == "number" else {}
    return {"name": records.score, **tolerance}


def judge_settings(judge: JudgeSpec, words: str | None) -> dict[str, Any]:
    """Return the settings of a judge; `words` is the digest of a prompt that replaces the benchmark's."""
    names = ("model", "temperature", "seed", "max_tokens", "options")
    return {**{name: getattr(judge, name) for name in names}, "prompt": words}


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
