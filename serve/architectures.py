"""The pruned model classes, one for each architecture, built when vLLM looks up their name in this module."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from espalier.serve.clock import Stopwatch
from espalier.serve.families import FAMILIES
from espalier.serve.metrics import request_counts, selection_times
from espalier.serve.model import PrunedModel
from espalier.serve.processor import PrunedProcessor
from espalier.serve.signals import rank


def __getattr__(name: str) -> Any:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = pruned_class(name)
    return globals()[name]


def pruned_class(architecture: str) -> Any:
    """Return the model class of vLLM for an architecture, with the mixins over model and processor."""
    from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModalPruning

    family = FAMILIES[architecture]
    module = import_module(f"vllm.model_executor.models.{family.module}")
    base = getattr(module, family.architecture)
    factories = base._processor_factory

    def processor(info: Any, dummy_inputs: Any) -> Any:
        kind = type(factories.processor(info, dummy_inputs))
        body = {"counts": request_counts()}
        return type(f"Pruned{kind.__name__}", (PrunedProcessor, kind), body)(info, dummy_inputs)

    def initialise(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.channelled = vllm_config.model_config.uses_mrope
        # vLLM's own pruning of videos is refused when the engine starts.
        self.is_multimodal_pruning_enabled = False
        # The processes that share a layer take as long as the first.
        times = selection_times() if rank() == 0 else None
        self.stopwatch = Stopwatch(None if times is None else times.observe)

    # Behind the base: a model that has these protocols already allows no other order.
    protocols = (SupportsMRoPE, SupportsMultiModalPruning)
    missing = [protocol for protocol in protocols if protocol not in base.__mro__]
    body = {
        "__init__": initialise,
        "__module__": __name__,
        "__qualname__": architecture,
        "_processor_factory": replace(factories, processor=processor),
        "architecture": architecture,
    }
    return type(architecture, (PrunedModel, base, *missing), body)
