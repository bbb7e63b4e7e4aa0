"""Setting of a request: method, budget, positions and seed, checked before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, get_args

import torch

from espalier import methods
from espalier.methods.base import (
    Method,
    MethodError,
    Need,
    Positions,
    Site,
    TokenReducer,
)
from espalier.methods.chance import row_generators
from espalier.methods.readings import readings_of
from espalier.serve.hyper_parameters import annotations_of, typed

#: The key of a request's `mm_processor_kwargs`, and of the engine's `hf_overrides`.
KEY = "espalier"

#: Signals that the plug-in can take out of vLLM before the decoder runs.
SIGNALS = frozenset(
    {
        *("cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys"),
        *("projected", "all_projected", "text_embeddings", "tile"),
    }
)

#: Places where vLLM can remove tokens: its prompt has the same length in every decoder layer.
PLACES = ("vision", "prefix")

#: Settings, and methods of settings, that a process remembers: a request may have any.
MOST = 1024

#: Counts this close to a half count as halves: ratios are decimal, and (1 - 0.9) * 15 < 1.5 in binary.
TIE = 1e-9


class SettingError(ValueError):
    """A setting cannot be served; one line with the key, the value and what is valid."""


@dataclass(frozen=True)
class Setting:
    """What is removed of every picture and video of a prompt.

    Attributes:
        method: name of a method that acts before the decoder.
        params: its hyper-parameters; those not given are those of `method=NAME` in the harness (conf/method).
        ratio: share of an item's visual tokens that is removed.
        keep: tokens of each item that stay, in place of `ratio`; None: the ratio applies.
        positions: those of the kept tokens in the full prompt, or `renumbered` without gaps.
        seed: of methods that draw random numbers.
        sample: name of the prompt, which also seeds them.
    """

    method: str = "none"
    params: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 0.0
    keep: int | None = None
    positions: Positions = "original"
    seed: int = 0
    sample: str = ""

    def changed(self, values: object) -> Setting:
        """Return the setting with the values of a request; a ratio replaces a count, and a count a ratio.

        Raises:
            SettingError: an unknown key, a value of the wrong type or out of range, or both a ratio and a count.
        """
        names = [entry.name for entry in fields(Setting)]
        if not isinstance(values, Mapping):
            raise SettingError(f"espalier={values!r} is no table; valid keys: {', '.join(names)}")
        for name in values:
            if name not in names:
                raise SettingError(f"espalier.{name} is unknown; valid: {', '.join(names)}")
        changes = dict(values)
        if changes.get("keep") is None:
            changes |= {"keep": None} if "ratio" in changes else {}
        elif "ratio" in changes:
            raise SettingError(
                f"espalier.ratio={changes['ratio']!r} and espalier.keep={changes['keep']!r} contradict each other; "
                "valid: one of both"
            )
        else:
            changes["ratio"] = 0.0
        if "method" in changes and changes["method"] != self.method:
            changes.setdefault("params", {})
        setting = replace(self, **changes)
        setting.check_values()
        return setting

    def check_values(self) -> None:
        """Raise SettingError for a value that no method takes."""
        ratio, keep, positions = self.ratio, self.keep, get_args(Positions)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
            raise SettingError(f"espalier.ratio={ratio!r} is out of range; valid: 0 <= ratio < 1")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise SettingError(f"espalier.keep={keep!r} is no count; valid: 1 and more, null")
        if self.positions not in positions:
            raise SettingError(
                f"espalier.positions={self.positions!r}; valid: {', '.join(positions)}"
            )
        if not isinstance(self.params, Mapping):
            raise SettingError(
                f"espalier.params={self.params!r} is no table; valid: {{}}, or hyper-parameters by name"
            )
        if type(self.seed) is not int:
            raise SettingError(f"espalier.seed={self.seed!r} is no seed; valid: an integer")
        if not isinstance(self.sample, str) or not _encodes(self.sample):
            raise SettingError(f"espalier.sample={self.sample!r} is no name; valid: a text")

    @property
    def values(self) -> dict[str, Any]:
        """Return what a request states for this setting: a ratio or a count."""
        idle = "ratio" if self.keep is not None else "keep"
        return {name: value for name, value in asdict(self).items() if name != idle}

    @cached_property
    def reducer(self) -> TokenReducer:
        """The built method, one for all settings that name it with these hyper-parameters.

        Raises:
            SettingError: there is no such method, or it does not take these hyper-parameters.
        """
        try:
            return _built(json.dumps([self.method, self.params], sort_keys=True))
        except TypeError as error:
            raise SettingError(
                f"espalier.params={self.params!r} is no JSON; valid: hyper-parameters by name"
            ) from error

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return where the method acts in a decoder of `depth` layers.

        Raises:
            SettingError: the method cannot be served, with the reason.
        """
        try:
            sites, reason = _placed(self.reducer, depth)
        except MethodError as error:
            raise SettingError(f"espalier.method={self.method!r}: {error}") from error
        if reason is not None:
            raise SettingError(refused(self.method, reason))
        return sites

    def needs(self, depth: int) -> tuple[Need, ...]:
        """Return the signals that the method reads."""
        return tuple(need for site in self.sites(depth) for need in self.reducer.needs(site))

    def reads_words(self, depth: int) -> bool:
        """Return whether the choice depends on the words of the prompt."""
        return any(need.signal.startswith("text") for need in self.needs(depth))

    def kept(self, count: int) -> int:
        """Return how many of an item's `count` visual tokens stay: half up, at least one."""
        if self.method == "none" or count == 0:
            return count
        target = (1 - self.ratio) * count if self.keep is None else min(self.keep, count)
        return min(count, max(1, math.floor(target + 0.5 + TIE)))

    def generator(self) -> torch.Generator:
        """Return the source of chance, the same for each item of a prompt."""
        return row_generators(self.seed, (self.sample,), 0)[0]

    def encode(self) -> str:
        """Return the setting as JSON, equal for equal settings."""
        return json.dumps(asdict(self), sort_keys=True)


def _encodes(text: str) -> bool:
    """Return whether a text has bytes; half of a pair of surrogates, which JSON can hold, has none."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_on(config: Any) -> bool:
    """Return whether an engine's `hf_overrides` hold the plug-in's key; without it the engine is vLLM's own.

    Args:
        config: of the checkpoint, with the overrides.
    """
    return getattr(config, KEY, None) is not None


@lru_cache(MOST)
def decode(text: str) -> Setting:
    """Return the setting of `Setting.encode`."""
    return Setting(**json.loads(text))


def refused(name: str, reason: str) -> str:
    """Return the line about a method that cannot be served."""
    return f"espalier.method={name!r} cannot be served: it {reason}; valid: {', '.join(served())}"


def why_refused(method: TokenReducer, sites: Iterable[Site], depth: int) -> str | None:
    """Return why vLLM cannot run a method, None if it can."""
    places = tuple(sites)
    if method.adaptive:
        return "keeps a count of its own, and vLLM sizes a prompt before the picture is encoded"
    if method.shrinks_pictures:
        return "reduces the picture before the tower, which vLLM's processor has prepared by then"
    if method.tower_sites(2):
        return "acts inside the vision tower"
    if method.decode_site(depth) is not None:
        return "chooses among the entries of the cache in decoding steps"
    deeper = [site.layer for site in places if site.where not in PLACES]
    if deeper:
        return (
            f"acts before decoder layer {deeper[0]}, and vLLM's cache has a slot for every token "
            "of the prompt in every layer"
        )
    if len(places) > 1:
        return "acts at several places"
    missing = {need.signal for site in places for need in method.needs(site)} - SIGNALS
    if missing:
        return f"reads {', '.join(sorted(missing))}, which vLLM does not hold before the decoder"
    return None


@lru_cache(MOST)
def _built(text: str) -> TokenReducer:
    """Return the method of a name and hyper-parameters in JSON."""
    name, params = json.loads(text)
    method = build(name, params)
    if not isinstance(method, TokenReducer) or not method.in_one_prefill:
        raise SettingError(refused(name, "does not remove tokens of a prompt"))
    return method


@lru_cache(MOST)
def _placed(method: TokenReducer, depth: int) -> tuple[tuple[Site, ...], str | None]:
    """Return where a method acts, and why it cannot be served."""
    sites = method.sites(depth)
    return sites, why_refused(method, sites, depth)


@cache
def names() -> tuple[str, ...]:
    """Return the names of all methods: each has a file of code and a file of configuration."""
    root = Path(methods.__file__).parent
    folders = (root.glob("*.py"), (root.parent / "conf" / "method").glob("*.yaml"))
    code, configs = ({path.stem for path in folder} for folder in folders)
    return tuple(sorted(code & configs))


def method_class(name: object) -> type[Method]:
    """Return the class of a method by its name.

    Raises:
        SettingError: there is no such method.
    """
    if not isinstance(name, str) or name not in names():
        raise SettingError(f"espalier.method={name!r} is unknown; valid: {', '.join(served())}")
    module = import_module(f"espalier.methods.{name}")
    (method,) = {
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
        and not isabstract(value)
    }
    return method


def build(name: object, params: Mapping[str, Any]) -> Method:
    """Return a method with these hyper-parameters.

    Raises:
        SettingError: there is no such method, or it does not take them.
    """
    kind = method_class(name)
    names_of_fields = [entry.name for entry in fields(kind)]
    for key in params:
        if key not in names_of_fields:
            valid = ", ".join(names_of_fields) or "none"
            raise SettingError(f"espalier.params.{key} is unknown; method {name} has: {valid}")
    readings = readings_of(str(name))
    values = {**({} if readings is None else readings.params), **params}
    try:
        return kind(**{key: _param(name, kind, key, value) for key, value in values.items()})
    except MethodError as error:
        raise SettingError(f"espalier.params of method {name}: {error}") from error


def _param(name: object, kind: type[Method], key: str, value: Any) -> Any:
    try:
        return typed(value, annotations_of(kind)[key])
    except TypeError as error:
        raise SettingError(
            f"espalier.params.{key}={value!r} is not valid for method {name}; valid: {error}"
        ) from None


def served() -> tuple[str, ...]:
    """Return the names of the methods that can be served, with their default hyper-parameters."""
    return tuple(name for name in names() if reason_of(name) is None)


def reason_of(name: str, depth: int = 32) -> str | None:
    """Return why a method cannot be served with its defaults in a decoder of `depth` layers, None if it can."""
    method = build(name, {})
    if not isinstance(method, TokenReducer) or not method.in_one_prefill:
        return "does not remove tokens of a prompt"
    return why_refused(method, method.sites(depth), depth)
