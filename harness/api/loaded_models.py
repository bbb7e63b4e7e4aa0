"""Models for `apply`: loaded from a checkpoint, or taken from memory and restored after use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any

from espalier.harness.api.argument_errors import read_path, user_errors
from espalier.harness.config.checkpoint_names import (
    GROUP,
    PREFIX,
    model_choice,
)
from espalier.harness.config.composer import compose_section
from espalier.harness.config.group_lists import merged, read_choice
from espalier.harness.config.model_section import model_spec
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import (
    UNREAD,
    load_adapter,
    random_processor,
)
from espalier.harness.models.conversations import template_of_processor
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.harness.models.measured_facts import reading_parts, unlisted_facts
from espalier.harness.settings import check_keys, choice, read_value
from espalier.harness.specs.hub_cache import downloads, go_offline, restored_network
from espalier.harness.specs.run_spec import CHECKPOINT, DTYPES, ModelSpec
from espalier.harness.store.files.digests import Digests

#: Attribute of a model in memory: the name of the method that acts on it inside a `with`.
ACTING = "_espalier_method"

#: Settings of a model in memory; the other keys of the model section concern loading.
OF_BORROWED = ("name", "conversation", "generation", "processor", "video", "transparency", "media")


@dataclass(frozen=True, eq=False)
class Model:
    """A model that methods can be applied to.

    Attributes:
        spec: family, sizes and settings.
        borrowed: whether the caller owns the model in memory, so that no checkpoint is known.
        open_spec: returns a context manager that yields an adapter with the settings of a spec of this model.
        name: the name of conf/model that was loaded; None for other models.
        settings: keys of that file set by the caller.
    """

    spec: ModelSpec
    borrowed: bool = field(repr=False)
    open_spec: Callable[[ModelSpec], AbstractContextManager[Adapter]] = field(repr=False)
    name: str | None = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open_adapter(self) -> AbstractContextManager[Adapter]:
        """Return a context manager that yields the adapter."""
        return self.open_spec(self.spec)

    def __repr__(self) -> str:
        """Return name, family and size."""
        facts = self.spec.facts
        return (
            f"<espalier model {self.spec.name}: family {self.spec.adapter}, {facts.text.layers} decoder layers, "
            f"{self.spec.dtype} on {self.spec.device}>"
        )


def load(
    name: str | PathLike[str],
    *,
    path: str | PathLike[str] | None = None,
    offline: bool = False,
    **settings: Any,
) -> Model:
    """Load a model of conf/model, or any checkpoint of a known family.

    Args:
        name: name of a file in conf/model, without `.yaml`, or its hub id; or the folder of a checkpoint, or another
            hub id: then family and sizes are read from its configuration.
        path: folder of the checkpoint; None: as the model's file states, usually the local Hugging Face cache.
        offline: refuse a missing checkpoint, in place of a download.
        **settings: override the model's file, tables key by key: `dtype`, `device`, `attention`, `device_map`,
            `revision`, `conversation`, `processor`, `video`, `transparency`, `weights` and the other keys of
            conf/base/model.yaml.

    Raises:
        UserError: an unknown name or setting, or a checkpoint that is missing or does not match; one line.
    """
    with user_errors(), restored_network():
        go_offline()
        downloads.set(not read_value("offline", offline, bool))
        spec = named_spec(name, path, settings)
        model = load_spec(spec, offline)
    listed = model_choice(fspath(name), "name")
    config_name = None if listed.startswith(PREFIX) else listed
    if path is not None:
        settings["path"] = str(spec.path)
    return replace(model, name=config_name, settings=settings)


def load_spec(spec: ModelSpec, offline: bool) -> Model:
    """Load the model of a spec.

    Raises:
        UserError: the checkpoint is missing or does not match; one line with config keys.
    """
    check_model(spec, offline, Digests())
    adapter = load_adapter(spec)
    return Model(spec, False, lambda wanted: nullcontext(with_spec(adapter, wanted)))


def with_spec(adapter: Adapter, spec: ModelSpec) -> Adapter:
    """Return the adapter of a loaded model with other settings around the same weights: those of its prompts."""
    if spec == adapter.spec:
        return adapter
    family, random = type(adapter), spec.weights == "random"
    processor = random_processor(family, spec) if random else family.load_processor(spec)
    return family(adapter.model, processor, spec)


def named_spec(
    name: str | PathLike[str], path: str | PathLike[str] | None, settings: Mapping[str, Any]
) -> ModelSpec:
    """Return the spec of a model by name or folder, without loading weights.

    Raises:
        UserError: as in `load`.
    """
    if path is not None:
        settings = {**settings, "path": str(read_path("path", path))}
    if not isinstance(name, str | PathLike):
        raise UserError(
            f"name is a {type(name).__name__}; valid: a name of conf/model, a hub id, or the folder of a checkpoint"
        )
    return model_spec(_with(compose_section(GROUP, fspath(name), "name"), settings))


def wrap(hf_model: Any, hf_processor: Any, **settings: Any) -> Model:
    """Wrap a transformers model and processor that are already in memory.

    The family follows from `config.model_type`, and the sizes are read from the modules. Neither object is changed
    permanently: the processor is copied, and the `with` of `apply` restores the model at its end (inference mode,
    generation settings, attention functions, the position rule for videos).

    Args:
        hf_model: a model with `generate`, such as `LlavaForConditionalGeneration`; it stays on its device and in its
            precision.
        hf_processor: processor of the model.
        **settings: `name`, `conversation` (chat format; default: the processor's chat template if it has one),
            `generation`, `processor`, `video`, `transparency` and `media`, as in conf/base/model.yaml.

    Raises:
        UserError: an unknown family, or a class without `generate`; the line lists the valid ones.
    """
    with user_errors():
        family = _family(hf_model)
        adapter = ADAPTERS.load(family)
        check_keys("", settings, OF_BORROWED)
        if not hasattr(hf_processor, "tokenizer"):
            raise UserError(
                f"processor is a {type(hf_processor).__name__}; valid: that of the model, by AutoProcessor"
            )
        template = template_of_processor(hf_processor, adapter.data.self_described)
        section = {
            "name": str(hf_model.config.model_type),
            "adapter": family,
            "hub": "in memory",  # a spec requires a source
            "dtype": choice("hf_model.dtype", str(hf_model.dtype).removeprefix("torch."), DTYPES),
            "attention": hf_model.config._attn_implementation,
            "device": "cpu",
            "conversation": CHECKPOINT if template else None,
            "facts": UNREAD,
        }
        spec = replace(
            model_spec(_with(read_choice("base", GROUP) | section, settings)),
            hub=None,
            device=str(hf_model.device),
        )
        adapter.check_settings(spec)
        processor = adapter.adopt_processor(deepcopy(hf_processor), spec)
        with reading_parts(spec, hf_model.config), borrow(hf_model, processor, spec) as probe:
            facts = unlisted_facts(probe)
        spec = replace(spec, facts=facts)
        with borrow(hf_model, processor, spec) as loaded:
            loaded.verify()
            spec = replace(spec, facts=loaded.facts)
    return Model(spec, True, lambda wanted: borrow(hf_model, processor, wanted))


@contextmanager
def borrow(model: Any, processor: Any, spec: ModelSpec) -> Iterator[Adapter]:
    """Yield an adapter for the caller's model, and restore the model afterwards.

    `processor` is already a copy of the caller's; the adapter gets another shallow copy, so that it does not change
    attributes of this one.
    """
    generation, config = model.generation_config, dict(vars(model.config))
    # Adapters may override rules of the library, and generation stores position offsets on the model.
    attributes = [(part, dict(vars(part))) for part in (model, model.model)]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield ADAPTERS.load(spec.adapter)(model, copy(processor), spec)
    finally:
        model.generation_config = generation
        vars(model.config).clear()
        vars(model.config).update(config)
        for part, values in attributes:
            # Blocks need not close in the order in which they opened.
            acting = {key: method for key, method in vars(part).items() if key == ACTING}
            vars(part).clear()
            vars(part).update(
                {key: value for key, value in values.items() if key != ACTING}, **acting
            )
        for module, mode in modes:
            module.training = mode


def _family(hf_model: Any) -> str:
    """Return the family of a model in memory."""
    model_type = getattr(getattr(hf_model, "config", None), "model_type", None)
    family = family_of(model_type)
    model_class = ADAPTERS.load(family).class_of(hf_model.config)
    if not isinstance(hf_model, model_class):
        raise UserError(
            f"hf_model is a {type(hf_model).__name__}; valid for model_type={model_type!r}: {model_class.__name__}"
        )
    return family


def _with(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    check_keys("", settings, section)
    return merged(section, settings)
