"""Load parts and weights of a checkpoint, and refuse checkpoints that do not match."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as library_logging

from espalier.harness.errors import FOREIGN, UserError, first_words
from espalier.harness.models.families import check_format
from espalier.harness.models.memory_check import check_placed, free_bytes, weight_limits
from espalier.harness.models.quantisation import quantisation_of, unpack
from espalier.harness.specs.run_spec import ModelSpec

#: Exceptions of transformers and its tokenizers for files that parse but are not valid.
MALFORMED: tuple[type[Exception], ...] = (
    *FOREIGN,
    RuntimeError,
    StopIteration,
    AssertionError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)

HALVES = (torch.float16, torch.bfloat16)


def source_of(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `from_pretrained`: a directory, or a hub id with its revision."""
    if spec.path is not None:
        return str(spec.path), {}
    return str(spec.hub), {"revision": spec.revision}


@contextmanager
def quiet_library() -> Iterator[None]:
    """Hide the library's progress bars in the block, and hold back its log records until the block ends.

    Records are dropped on an error, which has its own line.
    """
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    names = ("transformers", "huggingface_hub")
    with ExitStack() as stack:
        if library_logging.is_progress_bar_enabled():
            library_logging.disable_progress_bar()
            stack.callback(library_logging.enable_progress_bar)
        for handler in [handler for name in names for handler in logging.getLogger(name).handlers]:
            handler.addFilter(keep)
            stack.callback(handler.removeFilter, keep)
        yield
    for record in records:
        logging.getLogger(record.name).handle(record)


def pretrained(part_class: Any, source: str | PathLike[str], **options: Any) -> Any:
    """Return `part_class.from_pretrained` without the checkpoint's own code, which the library would offer to run."""
    return part_class.from_pretrained(source, trust_remote_code=False, **options)


def load_part(spec: ModelSpec, part_class: Any, **options: Any) -> Any:
    """Return `part_class.from_pretrained` of the run's checkpoint: a processor, a tokenizer, an image processor.

    Raises:
        UserError: the part is missing or does not parse.
    """
    source, revision = source_of(spec)
    try:
        return pretrained(part_class, source, **revision, **options)
    except MALFORMED as error:
        raise unreadable(spec, error) from error


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json.

    Raises:
        UserError: the file is missing or not a table, or describes an unsupported format.
    """
    source, revision = source_of(spec)
    try:
        config, _ = PretrainedConfig.get_config_dict(source, **revision)
    except MALFORMED as error:
        raise unreadable(spec, error) from error
    check_format(spec.name, source, config, spec.hub if spec.conversion is None else "")
    return dict(config)


def require_settings(
    config: Mapping[str, Any], valid: Mapping[str, Any], step: str = "loaded"
) -> None:
    """Refuse a release that the library's modules would compute differently; keys may be absent.

    Args:
        config: the release's config.json.
        valid: value of each key.
        step: what cannot be done, for the error line.

    Raises:
        UserError: a value differs; the line names the first key.
    """
    for key, value in valid.items():
        if config.get(key, value) != value:
            raise UserError(
                f"config.json: {key}={config[key]!r} cannot be {step}; valid: {value!r}"
            )


def check_type(spec: ModelSpec, valid: Sequence[str]) -> None:
    """Refuse a checkpoint of another architecture, for which the library would build a huge model from defaults.

    Raises:
        UserError: the checkpoint has no readable config.json, or its `model_type` is not among the valid ones.
    """
    model_type = config_of(spec).get("model_type")
    if model_type not in valid:
        raise UserError(
            f"model={spec.name}: checkpoint {source_of(spec)[0]!r} is of type {model_type!r}, "
            f"valid: {' or '.join(map(repr, valid))}{conversion_hint(spec)}"
        )


def load_checkpoint(
    model_class: Any, config: Any, spec: ModelSpec, renames: Mapping[str, str] | None = None
) -> Any:
    """Return the model of a run with its weights, on one device or spread over several.

    Args:
        model_class: the transformers class of the family.
        config: configuration of the model.
        spec: the model's part of the run.
        renames: from patterns of the checkpoint's tensor names to the library's, applied in order.

    Raises:
        UserError: the checkpoint cannot be found or read, or its tensors do not match the architecture.
    """
    source, options = source_of(spec)
    if spec.parallel == "tensor":
        options["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    elif spec.device_map is not None:
        options["device_map"] = spec.device_map
        options["max_memory"] = dict(weight_limits(spec, free_bytes()))
    elif quantisation_of(spec) is not None:
        # Packed weights cannot be moved by `to`.
        options["device_map"] = {"": spec.device}
    try:
        model, report = pretrained(
            model_class,
            source,
            config=config,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            output_loading_info=True,
            # Refused below with the tensor's name, which the library's error omits.
            ignore_mismatched_sizes=True,
            key_mapping=dict(renames) if renames else None,
            **options,
        )
    except MALFORMED as error:
        raise unreadable(spec, error) from error
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
                f"the first is {names[0]}{conversion_hint(spec)}"
            )
    if spec.parallel == "tensor":  # the library has placed each process's share
        return model
    if "device_map" not in options:
        return model.to(spec.device)
    if quantisation_of(spec) is not None:
        unpack(model)
        # Beside quantised weights, the library leaves half-precision parameters as stored.
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.dtype in HALVES:
                parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    check_placed(spec, getattr(model, "hf_device_map", {}))
    return model


def unreadable(spec: ModelSpec, error: Exception) -> UserError:
    """Return the error line for a checkpoint that cannot be read."""
    return UserError(
        f"model={spec.name}: no usable checkpoint at {source_of(spec)[0]!r} ({first_words(error)}); "
        f"give a local directory with model.path=<dir>{conversion_hint(spec)}"
    )


def conversion_hint(spec: ModelSpec) -> str:
    """Return a hint with the conversion command, for models released in another format."""
    return (
        ""
        if spec.conversion is None
        else f"; the original release is converted by: {spec.conversion}"
    )


def special_tokens_only(released: GenerationConfig, pad_id: int) -> GenerationConfig:
    """Return a generation configuration with the special tokens of a checkpoint's and nothing else.

    Penalties and sampling settings of the checkpoint would change answers without appearing in a row, because
    `generate` takes from here whatever a call leaves out. Such settings belong in `model.generation`.
    """
    return GenerationConfig(
        bos_token_id=released.bos_token_id,
        eos_token_id=released.eos_token_id,
        # Stated because `generate` otherwise sets it with a warning for each answer.
        pad_token_id=pad_id,
    )
