"""Models to ask: loaded from a checkpoint, or somebody's own, borrowed and given back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from espalier.harness.api.argument_errors import in_words_of_python
from espalier.harness.config.compose import CONF, compose_section
from espalier.harness.config.group_lists import merged
from espalier.harness.config.model_section import model_spec
from espalier.harness.errors import UserError
from espalier.harness.kinds.checks.checkpoint_check import check_model
from espalier.harness.models.adapter import ADAPTERS, Adapter, family_of, load_adapter
from espalier.harness.models.loader import config_of, template_of_processor
from espalier.harness.models.measured_facts import read_facts
from espalier.harness.models.skeleton import build_skeleton
from espalier.harness.settings import check_keys, choice, read_value
from espalier.harness.specs.run_spec import CHECKPOINT, DTYPES, ModelSpec
from espalier.harness.store.files.digests import Digests

#: Facts that stand in a spec until they have been read off the model.
_STACK = {"layers": 1, "hidden": 1, "intermediate": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
UNREAD: Mapping[str, Any] = {
    "text": _STACK,
    "tower": _STACK,
    "projector": [1, 1],
    "vocabulary": 1,
    "visual_tokens": 1,
    "class_attention": "mean",
    "rotary_axes": 1,
}

#: Settings of a model that is in memory already; the rest of the model section is about loading.
OF_BORROWED = ("name", "conversation", "generation", "processor", "video", "transparency", "media")


@dataclass(frozen=True, eq=False)
class Model:
    """A model that methods can be applied to.

    Attributes:
        spec: its family, sizes and settings.
        borrowed: whether it is somebody's own, in memory, with no checkpoint that is known.
        opened: gives its adapter for the length of a `with`.
    """

    spec: ModelSpec
    borrowed: bool = field(repr=False)
    opened: Callable[[], AbstractContextManager[Adapter]] = field(repr=False)

    def __repr__(self) -> str:
        """Say which model it is and how large."""
        facts = self.spec.facts
        return (
            f"<espalier model {self.spec.name}: family {self.spec.adapter}, {facts.text.layers} decoder layers, "
            f"{self.spec.dtype} on {self.spec.device}>"
        )


def load(
    name: str | PathLike[str],
    *,
    path: str | PathLike[str] | None = None,
    offline: bool = True,
    **settings: Any,
) -> Model:
    """Load a model of conf/model, or any checkpoint of a known family.

    Args:
        name: a file of conf/model, without `.yaml`; or the folder of a checkpoint, whose sizes are then read off its
            own configuration.
        path: the checkpoint's folder; None: where the model's file says, usually the local Hugging Face cache.
        offline: whether nothing may be downloaded.
        **settings: laid over the model's file, tables key by key: `dtype`, `device`, `attention`, `device_map`,
            `revision`, `conversation`, `processor`, `video`, `transparency`, `weights` and whatever else
            conf/base/model.yaml has.

    Raises:
        UserError: an unknown name or setting, or a checkpoint that is missing or does not fit; one line.
    """
    with in_words_of_python():
        spec = named_spec(name, path, settings)
        check_model(spec, read_value("offline", offline, bool), Digests())
        adapter = load_adapter(spec)
    return Model(spec, False, lambda: nullcontext(adapter))


def named_spec(
    name: str | PathLike[str], path: str | PathLike[str] | None, settings: Mapping[str, Any]
) -> ModelSpec:
    """Return the spec of a model by its name or folder; nothing is loaded.

    Raises:
        UserError: as `load`.
    """
    # Paths start at the caller's working directory; those of config files at the repository.
    if path is not None:
        settings = {**settings, "path": str(Path(path).expanduser().absolute())}
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return _folder_spec(folder.absolute(), settings)
    if not isinstance(name, str):
        raise UserError(
            f"name={str(name)!r} is no folder with a config.json; valid: one, or a name of conf/model"
        )
    return model_spec(_with(compose_section("model", name, "name"), settings))


def wrap(hf_model: Any, hf_processor: Any, **settings: Any) -> Model:
    """Take a model and a processor of transformers that are in memory already.

    The family follows from the model's own `config.model_type`, and its sizes are read off its modules. Both objects
    are left as they are: the processor is copied, and what a `with` of `apply` changes of the model (inference mode,
    generation settings, attention functions, the rule for positions of videos) is put back at its end.

    Args:
        hf_model: a model with `generate`, such as `LlavaForConditionalGeneration`; where it is and in which precision.
        hf_processor: its processor.
        **settings: `name`, `conversation` (the frame of prompts; by default the processor's own chat template, where
            it has one), `generation`, `processor`, `video`, `transparency` and `media`, as in conf/base/model.yaml.

    Raises:
        UserError: a model of another family, or a class without `generate`; the line names the valid ones.
    """
    with in_words_of_python():
        family = _family(hf_model)
        adapter = ADAPTERS.load(family)
        check_keys("", settings, OF_BORROWED)
        template = template_of_processor(hf_processor, adapter.self_described)
        known = {
            "name": str(hf_model.config.model_type),
            "adapter": family,
            "hub": "in memory",  # a spec must say where from
            "dtype": _dtype(hf_model),
            "attention": hf_model.config._attn_implementation,
            "device": "cpu",
            "conversation": CHECKPOINT if template else None,
            "facts": UNREAD,
        }
        spec = replace(
            model_spec(_with(_base() | known, settings)), hub=None, device=str(hf_model.device)
        )
        adapter.check_settings(spec)
        processor = adapter.adopted(deepcopy(hf_processor), spec)
        with borrowed(hf_model, processor, spec) as reading:
            facts = read_facts(reading, adapter.lacking, adapter.patch_tokens)
    spec = replace(spec, facts=facts)
    return Model(spec, True, lambda: borrowed(hf_model, processor, spec))


@contextmanager
def borrowed(model: Any, processor: Any, spec: ModelSpec) -> Iterator[Adapter]:
    """Yield an adapter around somebody's model; afterwards the model is as it was.

    `processor` is a copy of theirs; its own attributes are kept from the adapter, too.
    """
    generation, config = model.generation_config, dict(vars(model.config))
    # An adapter may lay its family's rule of positions over the library's, and answers leave offsets behind.
    inside = dict(vars(model.model))
    training = [(module, module.training) for module in model.modules()]
    try:
        yield ADAPTERS.load(spec.adapter)(model, copy(processor), spec)
    finally:
        model.generation_config = generation
        vars(model.config).clear()
        vars(model.config).update(config)
        vars(model.model).clear()
        vars(model.model).update(inside)
        for module, mode in training:
            module.training = mode


def _family(hf_model: Any) -> str:
    """Return the family of a model in memory."""
    kind = getattr(getattr(hf_model, "config", None), "model_type", None)
    family = family_of(kind)
    wanted = ADAPTERS.load(family).model_class
    if not isinstance(hf_model, wanted):
        raise UserError(
            f"hf_model is a {type(hf_model).__name__}; valid for model_type={kind!r}: {wanted.__name__}"
        )
    return family


def _dtype(hf_model: Any) -> str:
    return choice("hf_model.dtype", str(hf_model.dtype).removeprefix("torch."), DTYPES)


def _folder_spec(folder: Path, settings: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a checkpoint that no file of conf/model describes."""
    known = {
        "name": folder.name,
        "path": str(folder),
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "facts": UNREAD,
    }
    section = _with(_base() | known | {"adapter": "none"}, settings)
    spec = model_spec(section)
    spec = replace(spec, adapter=family_of(config_of(spec).get("model_type")))
    adapter = ADAPTERS.load(spec.adapter)
    if not adapter.self_described:
        raise UserError(
            f"name={str(folder)!r}: checkpoints of the family {spec.adapter} do not say all that is needed; valid: a "
            "name of conf/model, with path=<this folder>"
        )
    adapter.check_settings(spec)
    config, processor = adapter.checkpoint_config(spec), adapter.load_processor(spec)
    if "conversation" not in settings and spec.conversation is None:
        template = template_of_processor(processor)
        spec = replace(spec, conversation=CHECKPOINT if template else None)
    skeleton = build_skeleton(adapter.model_class, config, spec)
    reading = adapter(skeleton, processor, spec)
    return replace(spec, facts=read_facts(reading, adapter.lacking, adapter.patch_tokens))


def _base() -> dict[str, Any]:
    """Return what every model section starts from."""
    base = OmegaConf.to_container(OmegaConf.load(CONF / "base" / "model.yaml"))
    assert isinstance(base, dict)
    return {str(key): value for key, value in base.items()}


def _with(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    check_keys("", settings, section)
    return merged(section, settings)
