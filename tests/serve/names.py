"""List the names of vLLM that the plug-in uses and an installed vLLM lacks: `PYTHON_OF_VLLM -m tests.serve.names`.

One line a name that broke; exit code 1 if one did. Imports nothing but the standard library and what it checks, so it
runs in an environment of vLLM, nightly builds included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from inspect import getsource, signature


@dataclass(frozen=True)
class Name:
    """A name of vLLM.

    Attributes:
        module: that holds it.
        path: in the module.
        parameters: that a function or class takes, by name; attributes of what is no function.
        assigned: whether instances get it, so that the module's source alone shows it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    assigned: bool = False


PROCESSING, MODELS = "vllm.multimodal.processing", "vllm.model_executor.models"

UNSTABLE = (
    Name(f"{MODELS}.config", "MODELS_CONFIG_MAP", ("get",)),
    Name(
        f"{MODELS}.config",
        "VerifyAndUpdateConfig.verify_and_update_model_config",
        ("model_config",),
    ),
    Name(
        f"{MODELS}.llava",
        "LlavaForConditionalGeneration._processor_factory",
        ("info", "processor", "dummy_inputs"),
    ),
    Name(PROCESSING, "BaseMultiModalProcessor.apply", ("inputs", "timing_ctx")),
    Name(
        PROCESSING,
        "ProcessorInputs",
        ("prompt", "mm_data_items", "hf_processor_mm_kwargs", "media_io_kwargs"),
    ),
    Name(PROCESSING, "BaseMultiModalProcessor.get_dummy_inputs"),
    Name(
        PROCESSING,
        "BaseMultiModalProcessor._apply_prompt_updates",
        ("token_ids", "mm_prompt_updates"),
    ),
    Name("vllm.v1.worker.gpu_model_runner", "is_multimodal_pruning_enabled", assigned=True),
    Name(
        "vllm.model_executor.layers.attention",
        "MMEncoderAttention.__init__",
        ("head_size", "scale"),
    ),
    Name(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding.__init__",
        ("num_embeddings", "embedding_dim"),
    ),
    Name("vllm.compilation.decorators", "do_not_compile", assigned=True),
)

INTERFACES = (
    Name("vllm", "ModelRegistry.register_model", ("model_arch", "model_cls")),
    Name(f"{MODELS}.interfaces", "SupportsMultiModal.embed_multimodal"),
    Name(f"{MODELS}.interfaces", "SupportsMultiModal.get_language_model"),
    Name(
        f"{MODELS}.interfaces",
        "SupportsMRoPE.get_mrope_input_positions",
        ("input_tokens", "mm_features"),
    ),
    Name(
        f"{MODELS}.interfaces",
        "SupportsMultiModalPruning.recompute_mrope_positions",
        ("input_ids", "multimodal_embeddings", "mrope_positions", "num_computed_tokens"),
    ),
    Name(f"{MODELS}.interfaces", "SupportsEncoderCudaGraph.supports_encoder_cudagraph"),
    Name(
        PROCESSING,
        "BaseMultiModalProcessor._get_prompt_updates",
        ("mm_items", "hf_processor_mm_kwargs", "out_mm_kwargs"),
    ),
    Name(PROCESSING, "PromptReplacement", ("modality", "target", "replacement")),
    Name(PROCESSING, "PromptReplacement.resolve", ("item_idx",)),
    Name(PROCESSING, "PromptUpdateDetails", ("full", "is_embed")),
    Name("vllm.multimodal.inputs", "MultiModalFieldConfig.batched", ("modality", "keep_on_cpu")),
    Name("vllm.multimodal.inputs", "MultiModalKwargsItems.from_hf_inputs"),
    Name("vllm.multimodal.inputs", "PlaceholderRange", ("offset", "length", "is_embed")),
    Name("vllm.config", "MultiModalConfig", ("video_pruning_rate", "mm_encoder_tp_mode")),
    Name("vllm", "AsyncLLMEngine.from_engine_args", ("engine_args",)),
    Name("vllm.v1.worker.worker_base", "WorkerBase.get_model"),
    Name("vllm.exceptions", "VLLMClientError"),
)


def broken(names: Sequence[Name]) -> Iterator[str]:
    """A line for each name that is not as the plug-in takes it."""
    for name in names:
        reason = _broken(name)
        if reason is not None:
            yield f"{name.module}:{name.path} {reason}"


def _broken(name: Name) -> str | None:
    try:
        module = import_module(name.module)
        if name.assigned:
            return None if f"self.{name.path} =" in getsource(module) else "is not set any more"
        value = reduce(getattr, name.path.split("."), module)
    except (ImportError, AttributeError) as error:
        return f"is gone: {error}"
    if not name.parameters:
        return None
    has = {*signature(value).parameters} if callable(value) else {*dir(value)}
    missing = [parameter for parameter in name.parameters if parameter not in has]
    return f"has no {', '.join(missing)}" if missing else None


def main() -> int:
    """Print what broke."""
    lines = [*broken((*UNSTABLE, *INTERFACES))]
    print(*lines, f"{len(lines)} of {len(UNSTABLE) + len(INTERFACES)} names broke", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
