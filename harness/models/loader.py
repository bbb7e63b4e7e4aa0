"""Loading a checkpoint and refusing one that does not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PretrainedConfig

from espalier.harness.errors import FOREIGN, UserError, first_words
from espalier.harness.models.conversations import sha256_of
from espalier.harness.models.memory_check import check_placed, free_bytes, weight_limits
from espalier.harness.specs.run_spec import CHECKPOINT

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Classes of the releases' own code, each with the place of the same weights in transformers' format.
ORIGINAL: Mapping[str, str] = {
    "LlavaLlamaForCausalLM": "llava-hf/ on the hub (llava-1.5-7b-hf, llava-v1.6-vicuna-7b-hf)",
    "LlavaMistralForCausalLM": "llava-hf/ on the hub (llava-v1.6-mistral-7b-hf)",
    "LlavaQwenForCausalLM": "llava-hf/ on the hub (llava-onevision-qwen2-7b-ov-hf)",
    "InternVLChatModel": "OpenGVLab/ on the hub, with -hf at the end of the name",
}


def check_format(spec: ModelSpec, source: str, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights, and releases that only their own code reads; nothing but config.json is needed.

    Args:
        spec: the model's part of the run.
        source: the checkpoint, as a line names it.
        config: what its config.json holds.

    Raises:
        UserError: one line with the repository or the command that has the weights in a format that loads.
    """
    quantised = config.get("quantization_config")
    if quantised is None and isinstance(config.get("text_config"), Mapping):
        quantised = config["text_config"].get("quantization_config")
    if quantised is not None:
        quantisation = (
            quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        )
        raise UserError(
            f"model={spec.name}: checkpoint {source!r} has quantised weights (quantization_config: {quantisation}), "
            "which are not supported; valid: the release in float16 or bfloat16"
        )
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in ORIGINAL:
            # A model's file names a repository of transformers' format, or the command that makes it.
            source_hint = spec.conversion or (
                f"{spec.hub}, the same weights" if spec.hub else ORIGINAL[name]
            )
            raise UserError(
                f"model={spec.name}: checkpoint {source!r} is in the format of its first release "
                f"({config.get('model_type')}, {name}); valid: transformers' format, from {source_hint}"
            )


log = logging.getLogger(__name__)

#: What transformers and its tokenizers raise for files that parse and make no sense.
MALFORMED: tuple[type[Exception], ...] = (
    *FOREIGN,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
#: Where a checkpoint may hold its chat template; the first that has one counts.
TEMPLATE_FILES = (
    *("chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "tokenizer_config.json"),
)


def source_of(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` takes: a directory or hub id, and the revision of the latter."""
    if spec.path is not None:
        return str(spec.path), {}
    return str(spec.hub), {"revision": spec.revision}


@contextmanager
def held_back() -> Iterator[None]:
    """Keep what the library logs inside the block until that has ended well; an error has a line of its own."""
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    names = ("transformers", "huggingface_hub")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
    for record in records:
        logging.getLogger(record.name).handle(record)


def load_part(spec: ModelSpec, part_class: Any, **options: Any) -> Any:
    """Return `part_class.from_pretrained` of the run's checkpoint: a processor, a tokenizer, an image processor.

    Raises:
        UserError: it is not there or does not parse.
    """
    source, revision = source_of(spec)
    try:
        return part_class.from_pretrained(source, **revision, **options)
    except MALFORMED as error:
        raise _unreadable(spec, error) from error


def template_beside(spec: ModelSpec) -> str | None:
    """Return the chat template in a local model directory, for a model that is built without its checkpoint.

    Raises:
        UserError: a file that should hold it does not parse.
    """
    if spec.path is None:
        return None
    for name in TEMPLATE_FILES:
        file = spec.path / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            value = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
        except MALFORMED as error:
            raise _unreadable(spec, error) from error
        if template := default_template(value):
            return template
    return None


def template_of_processor(processor: Any, tokenizers: bool = True) -> str | None:
    """Return the chat template that a processor was loaded with, whatever file it was in.

    `tokenizers` takes that of its tokenizer where it has none.
    """
    template = default_template(getattr(processor, "chat_template", None))
    if template is not None or not tokenizers:
        return template
    return default_template(getattr(processor.tokenizer, "chat_template", None))


def default_template(value: Any) -> str | None:
    """Return the template that is used of one, of several by name, or of a list of these as old files have it."""
    if isinstance(value, list):
        value = {part.get("name"): part.get("template") for part in value if isinstance(part, dict)}
    return (value.get("default") if isinstance(value, dict) else value) or None


def other_template(spec: ModelSpec, shipped: str | None) -> str | None:
    """Return one line if the template beside the weights is not the one that the model's file knows; else None."""
    expected, actual = spec.template_sha256, sha256_of(shipped)
    if expected is None or spec.weights == "random" or expected == actual:
        return None
    return (
        f"model={spec.name}: the chat template beside the weights has sha256 {actual}, not {expected} "
        "(model.template_sha256): another revision, or changed; prompts follow it only under "
        f"model.conversation={CHECKPOINT}"
    )


def warn_of_template(spec: ModelSpec, shipped: str | None, template: str) -> None:
    """Log what `other_template` finds, or that prompts of a local directory follow another template than its own."""
    line = other_template(spec, shipped)
    unstated = spec.conversation is None and spec.template_sha256 is None
    if line is None and spec.path is not None and shipped not in (None, template) and unstated:
        line = (
            f"model={spec.name}: prompts follow the family's own format, and the chat template in {str(spec.path)!r} "
            f"is another; it is used under model.conversation={CHECKPOINT}"
        )
    if line is not None:
        log.warning("%s", line)


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return what a checkpoint's config.json holds.

    Raises:
        UserError: there is none, it holds no table, or it describes a format that is not loaded here.
    """
    source, revision = source_of(spec)
    try:
        config, _ = PretrainedConfig.get_config_dict(source, **revision)
    except MALFORMED as error:
        raise _unreadable(spec, error) from error
    check_format(spec, source, config)
    return dict(config)


def check_type(spec: ModelSpec, valid: Sequence[str]) -> None:
    """Refuse a checkpoint of another architecture; the library would fill in defaults and build something huge.

    Raises:
        UserError: the checkpoint has no readable config.json, or its `model_type` is not among the valid ones.
    """
    model_type = config_of(spec).get("model_type")
    if model_type not in valid:
        expected = " or ".join(map(repr, valid))
        raise UserError(
            f"model={spec.name}: checkpoint {source_of(spec)[0]!r} is of type {model_type!r}, "
            f"needed is {expected}{_conversion(spec)}"
        )


def load_checkpoint(
    model_class: Any, config: Any, spec: ModelSpec, renames: Mapping[str, str] | None = None
) -> Any:
    """Return the model of a run, on its device or spread over several.

    Args:
        model_class: the transformers class of the family.
        config: its configuration.
        spec: the model's part of the run.
        renames: from patterns of the checkpoint's tensor names to the library's, applied one after the other.

    Raises:
        UserError: the checkpoint cannot be found or read, or its tensors do not match the architecture.
    """
    source, options = source_of(spec)
    if spec.device_map is not None:
        options["device_map"] = spec.device_map
        options["max_memory"] = dict(weight_limits(spec, free_bytes()))
    try:
        model, report = model_class.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            output_loading_info=True,
            # Reported and refused below, by name; the library's own error names no tensor.
            ignore_mismatched_sizes=True,
            key_mapping=dict(renames) if renames else None,
            **options,
        )
    except MALFORMED as error:
        raise _unreadable(spec, error) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(
            key
            if isinstance(key, str)
            else f"{key[0]} of shape {tuple(key[1])}, the model's has {tuple(key[2])}"
            for key in report[problem]
        )
        if names:
            raise UserError(
                f"model={spec.name}: checkpoint {source!r} has {len(names)} {problem.replace('_', ' ')}, "
                f"the first is {names[0]}{_conversion(spec)}"
            )
    if spec.device_map is None:
        return model.to(spec.device)
    check_placed(spec, getattr(model, "hf_device_map", {}))
    return model


def _unreadable(spec: ModelSpec, error: Exception) -> UserError:
    return UserError(
        f"model={spec.name}: no usable checkpoint at {source_of(spec)[0]!r} ({first_words(error)}); "
        f"give a local directory with model.path=<dir>{_conversion(spec)}"
    )


def _conversion(spec: ModelSpec) -> str:
    """Say how the original release becomes loadable, for models whose release is in another format."""
    return (
        ""
        if spec.conversion is None
        else f"; the original release is converted by: {spec.conversion}"
    )
