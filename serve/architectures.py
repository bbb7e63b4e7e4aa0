"""The registered model classes, one of each kind for each architecture, built when vLLM looks up their name here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from espalier.serve.adapter import WITHOUT_OWN_PRUNING, with_processor, word_embeddings
from espalier.serve.clock import Stopwatch, TimedModel
from espalier.serve.families import FAMILIES, PLAIN, PRUNED
from espalier.serve.metrics import request_counts, selection_times
from espalier.serve.model import PrunedModel
from espalier.serve.processor import PrunedProcessor
from espalier.serve.setting import SettingError
from espalier.serve.signals import rank


def __getattr__(name: str) -> Any:
    for kind, build in ((PLAIN, plain_class), (PRUNED, pruned_class)):
        if name.removeprefix(kind) in FAMILIES and name.startswith(kind):
            globals()[name] = build(name.removeprefix(kind))
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def base_class(architecture: str) -> Any:
    """Return the model class of vLLM for an architecture."""
    family = FAMILIES[architecture]
    module = import_module(f"vllm.model_executor.models.{family.module}")
    return getattr(module, family.architecture)


def plain_class(architecture: str) -> Any:
    """Return vLLM's class with its encoder timed, for runs that leave pruning to vLLM."""
    return type(
        PLAIN + architecture, (TimedModel, base_class(architecture)), {"__module__": __name__}
    )


def check_adapters(lora_config: Any) -> None:
    """Check that an engine adapts the decoder alone.

    Raises:
        SettingError: it adapts its tower too, and there as many tokens as a method keeps.
    """
    if lora_config is not None and lora_config.enable_tower_connector_lora:
        raise SettingError(
            "--enable-tower-connector-lora=true would adapt as many tokens of the tower as a method keeps; valid: false"
        )


def pruned_class(architecture: str) -> Any:
    """Return vLLM's class with the mixins over model and processor."""
    from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModalPruning

    base = base_class(architecture)

    def processor(kind: Any) -> Any:
        return type(PRUNED + kind.__name__, (PrunedProcessor, kind), {"counts": request_counts()})

    def initialise(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        check_adapters(vllm_config.lora_config)
        TimedModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.channelled = vllm_config.model_config.uses_mrope
        self.word_embeddings = word_embeddings(self)
        # The processes that share a layer take as long as the first.
        times = selection_times() if rank() == 0 else None
        self.stopwatch = Stopwatch(None if times is None else times.observe)

    # Behind the base: a model that has these protocols already allows no other order.
    protocols = (SupportsMRoPE, SupportsMultiModalPruning)
    missing = [protocol for protocol in protocols if protocol not in base.__mro__]
    body = {
        **WITHOUT_OWN_PRUNING,
        "__init__": initialise,
        "__module__": __name__,
        **with_processor(base, processor),
        "architecture": architecture,
    }
    return type(PRUNED + architecture, (TimedModel, PrunedModel, base, *missing), body)
