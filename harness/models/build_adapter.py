"""Build the adapter of a run: processor, configuration, checks, then weights.

Without a file in conf/model, a checkpoint describes its model: `read_checkpoint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig

from espalier.harness.errors import UserError, first_words, foreign
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.checkpoint_files import INDEX, check_checkpoint
from espalier.harness.models.conversations import template_of_processor, warn_of_template
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.harness.models.loader import (
    MALFORMED,
    check_type,
    config_of,
    conversion_hint,
    load_checkpoint,
    pretrained,
    quiet_library,
    source_of,
)
from espalier.harness.models.measured_facts import check_facts, reading_parts, unlisted_facts
from espalier.harness.models.memory_check import check_memory, free_bytes
from espalier.harness.models.quantisation import checkpoint_folder, quantisation_of, stored_bytes
from espalier.harness.models.random_weights import build_random, byte_tokenizer
from espalier.harness.paths import located
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec
from espalier.harness.store.files.digests import Digests

KEY = "tie_word_embeddings"
#: The output head, in all models and in releases of LLaVA.
HEAD = "lm_head.weight"


def load_adapter(spec: ModelSpec) -> Adapter:
    """Return the adapter of a run, loaded through its family.

    Raises:
        UserError: an unknown family, or a checkpoint that is missing or does not match.
    """
    with quiet_library():
        adapter = build_adapter(ADAPTERS.load(spec.adapter), spec)
    warn_of_template(spec, adapter.shipped_template, adapter.processor.chat_template)
    return adapter


def load_adapter_without_weights(spec: ModelSpec) -> Adapter:
    """Return the adapter of a model without its weights, to prepare prompts and count their tokens.

    Cost: no memory for weights; the checkpoint's weight files may be absent.

    Raises:
        UserError: as in `load_adapter`.
    """
    family: type[Adapter] = ADAPTERS.load(spec.adapter)
    with quiet_library():
        config, processor = read_parts(family, spec)
        skeleton = build_skeleton(family.class_of(config), config, spec)
        skeleton.generation_config = generation_config_of(spec, config)
        with reading_parts(spec, config):
            adapter = family(skeleton, processor, spec)
            check_facts(adapter)
    return adapter


def build_adapter(family: type[Adapter], spec: ModelSpec) -> Adapter:
    """Return the adapter of a run, with loaded weights, or with random ones for `model.weights=random`.

    Raises:
        UserError: a file is missing or does not match; the line names the config key.
    """
    config, processor = read_parts(family, spec)
    # Checked without weights first, before memory is taken.
    skeleton = build_skeleton(family.class_of(config), config, spec)
    with reading_parts(spec, config):
        # On a copy: an adapter replaces its processor's chat template, and the real one must find the checkpoint's.
        probe = family(skeleton, copy(processor), spec)
        check_facts(probe)
    stored, shards = stored_bytes(spec), _shards(probe)
    # Quantised weights have other sizes than the skeleton's.
    planned = skeleton if stored is None else None
    check_memory(spec, (stored or weight_bytes(skeleton)) // shards, free_bytes(), planned)
    if spec.weights == "random":
        model = build_random(family.class_of(config), config, processor.tokenizer, spec)
    else:
        model = load_checkpoint(family.class_of(config), config, spec, family.data.renames)
    adapter = family(model, processor, spec)
    if quantisation_of(spec) is None:  # packed weights have other shapes
        check_facts(adapter)
    adapter.verify()
    return adapter


def _shards(adapter: Adapter) -> int:
    """Return the number of processes that share each layer of a model.

    Raises:
        UserError: the library has no plan for the family's text stack, or cannot load it by its plan.
    """
    if adapter.spec.parallel != "tensor":
        return 1
    plan = getattr(adapter.decoder.config, "base_model_tp_plan", None)
    if not plan or not adapter.data.loads_shared:
        raise UserError(
            f"model.parallel='tensor': transformers has no plan (base_model_tp_plan) that loads the "
            f"{type(adapter.decoder).__name__} of model={adapter.spec.name}; valid: one process, with "
            "model.device_map=auto"
        )
    return dist.get_world_size()


def read_parts(family: type[Adapter], spec: ModelSpec) -> tuple[Any, Any]:
    """Return configuration and processor of a run's model.

    Raises:
        UserError: a file is missing or does not match; the line names the config key.
    """
    family.check_settings(spec)
    if spec.weights == "random":
        if family.data.text is None:
            raise UserError(
                f"model={spec.name}: model.weights=random needs a family; valid: a checkpoint's folder"
            )
        processor = random_processor(family, spec)
        return family.configuration(spec, processor.tokenizer), processor
    if spec.path is not None:
        check_checkpoint(spec.path, Digests(), spec.hub if spec.conversion is None else "")
    check_type(spec, family.types())
    config = family.checkpoint_config(spec)
    settle_head(config, spec, family.data.renames)
    with reading_parts(spec, config):
        text = config.get_text_config(decoder=True)
    if getattr(text, "output_router_logits", False):
        # A loss of training, for as many tokens as the mask has: it ends steps of decoding with an error.
        text.output_router_logits = False
    return config, read_processor(family, spec)


def read_processor(family: type[Adapter], spec: ModelSpec) -> Any:
    """Return the processor of a checkpoint.

    Raises:
        UserError: a file is missing or wrong.
    """
    problem = f"model={spec.name}: the processor of {source_of(spec)[0]!r} cannot be used"
    with foreign(problem, "the checkpoint's original files", MALFORMED):
        processor = family.load_processor(spec)
        _ = processor.tokenizer  # what has none is refused here
    return processor


def generation_config_of(spec: ModelSpec, config: Any) -> GenerationConfig:
    """Return a checkpoint's generation_config.json, or what its configuration implies, as `from_pretrained`."""
    source, revision = source_of(spec)
    try:
        stated: GenerationConfig = pretrained(GenerationConfig, source, **revision)
    except OSError:  # the file is optional
        return GenerationConfig.from_model_config(config)
    return stated


def random_processor(family: type[Adapter], spec: ModelSpec) -> Any:
    """Return the processor for random weights: loaded from `architecture.processor`, else one with a byte tokenizer."""
    folder = spec.architecture.get("processor")
    if folder is None:
        return family.new_processor(spec, byte_tokenizer(family.data.special))
    return family.load_processor(replace(spec, path=located(folder)))


def build_skeleton(model_class: Any, config: Any, spec: ModelSpec) -> Any:
    """Return the model of a configuration with all tensors on the meta device.

    Cost: a quarter of a second for the largest, and no memory.

    Raises:
        UserError: the configuration does not describe a model of this class.
    """
    try:
        with torch.device("meta"):
            return model_class._from_config(
                deepcopy(config),
                dtype=getattr(torch, spec.dtype),
                attn_implementation=spec.attention,
            )
    except ImportError as error:
        raise UserError(
            f"model.attention={spec.attention!r} cannot run here ({first_words(error)}); valid: sdpa, eager"
        ) from error
    except MALFORMED as error:
        eager = replace(spec, attention="eager")
        valid = ""
        if spec != eager:
            with suppress(UserError):
                build_skeleton(model_class, config, eager)
                valid = "; valid: model.attention=eager"
        raise UserError(
            f"model={spec.name}: its configuration does not build a {model_class.__name__} with "
            f"model.attention={spec.attention!r} ({first_words(error)}){valid}"
        ) from error


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, counting shared tensors once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def settle_head(config: Any, spec: ModelSpec, renames: Mapping[str, str]) -> None:
    """Set `tie_word_embeddings` of a checkpoint's configuration: whether the output head is the embedding.

    The library's classes have defaults that silently tie a missing head. Instead, the model's file, the checkpoint's
    config.json and its tensor names decide. Cost: reads tensor names, no weights.

    Args:
        config: configuration of the model, as read by the library.
        spec: the model's part of the run.
        renames: from patterns of the checkpoint's tensor names to the library's.

    Raises:
        UserError: no head is stored, but the model's file or the checkpoint states an untied head.
    """
    stated = []
    if spec.architecture:
        parts = [spec.architecture.get(part, {}) for part in ("model", "text")]
        values = [bool(part[KEY]) for part in parts if KEY in part]
        stated.append(any(values) if values else bool(getattr(type(config), KEY, False)))
    released = config_of(spec)
    text = released.get("text_config")
    if KEY in released:
        stated.append(bool(getattr(config, KEY, False)))
    elif isinstance(text, dict) and text.get(KEY) is not None:
        stated.append(bool(text[KEY]))
    stored = _stores_head(spec, renames)
    tied = all(stated) if stated else bool(getattr(config, KEY, False)) and not stored
    if stored is False and not tied:
        raise UserError(
            f"model={spec.name}: checkpoint {source_of(spec)[0]!r} has no {HEAD}, and {KEY} is false; "
            f"valid: all files of the original checkpoint{conversion_hint(spec)}"
        )
    setattr(config, KEY, tied)


def _stores_head(spec: ModelSpec, renames: Mapping[str, str]) -> bool | None:
    """Return whether the checkpoint stores a head; None if files are missing or malformed, which loading reports."""
    folder = checkpoint_folder(spec)
    if folder is None:
        return None
    names: list[str] = []
    try:
        if (folder / INDEX).is_file():
            names += json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        else:
            for file in folder.glob("*.safetensors"):
                with safe_open(file, framework="pt") as tensors:
                    names += tensors.keys()
    except MALFORMED:
        return None
    for pattern, name in renames.items():
        names = [re.sub(pattern, name, key) for key in names]
    return any(name.endswith(HEAD) for name in names) if names else None


_STACK = {"layers": 1, "hidden": 1, "intermediate": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
#: Placeholder facts of a spec until the real ones are read from the model.
UNREAD: Mapping[str, Any] = {
    "text": _STACK,
    "tower": _STACK,
    "projector": [1, 1],
    "vocabulary": 1,
    "visual_tokens": 1,
    "class_attention": "mean",
    "rotary_axes": 1,
}


def read_checkpoint(spec: ModelSpec, key: str, conversation: bool = True) -> ModelSpec:
    """Return the spec with the family, the facts and the prompt format of its checkpoint; no weights are read.

    Args:
        spec: the model, with UNREAD facts.
        key: the start of an error line.
        conversation: whether a chat template of the checkpoint becomes the prompt format if the spec has none.

    Cost: imports the family, seconds.

    Raises:
        UserError: the checkpoint is of no supported family, or does not describe the model completely.
    """
    if spec.path is not None:
        check_checkpoint(spec.path, Digests())
    spec = replace(spec, adapter=family_of(config_of(spec).get("model_type")))
    adapter = ADAPTERS.load(spec.adapter)
    if not adapter.data.self_described:
        raise UserError(
            f"{key}={source_of(spec)[0]!r}: checkpoints of the family {spec.adapter} do not describe the model "
            "completely; valid: a name of conf/model, with path=<this folder>"
        )
    adapter.check_settings(spec)
    config, processor = adapter.checkpoint_config(spec), read_processor(adapter, spec)
    if conversation and spec.conversation is None:
        template = template_of_processor(processor)
        spec = replace(spec, conversation=CHECKPOINT if template else None)
    with reading_parts(spec, config):
        skeleton = build_skeleton(adapter.class_of(config), config, spec)
        facts = unlisted_facts(adapter(skeleton, processor, spec))
    return replace(spec, facts=facts)
