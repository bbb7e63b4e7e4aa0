"""Settings that no run has together: one table, with the reason and what is valid instead.

Everything that refuses a combination of settings reads it: the checks before torch, admission, kinds of method,
`espalier.apply`, `method=?` and docs/conflicts.md. What needs a search or a file, such as signals and weights, is
checked beside its code.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import combinations
from typing import Any

from espalier.harness.errors import Refused, UserError
from espalier.harness.specs.generation import ORIGIN, REMASKING, TIMESTEPS


@dataclass(frozen=True)
class Case:
    """A run, as far as it is known where it is checked.

    Attributes:
        spec: its settings: a RunSpec, a part of one, or a composed cell, whose sections are tables.
        method: the built method; None before it is built.
        values: further values that conditions and lines name, or functions that compute them for a line.
    """

    spec: Any
    method: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return what a line names: a fact, one of `values`, or a setting as `<key>=<value>`."""
        if name in COMPUTED:
            return COMPUTED[name](self)
        value = self.values[name] if name in self.values else self.label(name)
        return value() if callable(value) else value

    def value(self, key: str) -> Any:
        """Return a setting by its config key, a section by its name or rule; None where a run does not have it."""
        value = self.spec
        for part in NAMED.get(key, key).split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return value

    def label(self, key: str) -> str:
        """Return a setting as it is written on a command line, texts in quotes."""
        value = self.value(key)
        words = {None: "null", True: "true", False: "false"}
        if value is None or isinstance(value, bool):
            return f"{key}={words[value]}"
        is_whole = isinstance(value, float) and value.is_integer()
        return f"{key}={value:g}" if is_whole else f"{key}={value!r}"

    @property
    def text(self) -> Any:
        """Facts of the decoder's layers."""
        return self.value("model.facts.text")


#: The setting that a key of the command line stands for.
NAMED = {
    **{name: f"{name}.name" for name in ("model", "method", "benchmark", "backend")},
    "compressor": "method.compressor.name",
    **{"budget": "budget.rule", "ratio": "budget.ratio", "keep": "budget.count"},
}


@dataclass(frozen=True)
class Conflict:
    """A setting that a run cannot have beside others.

    The error line is `<setting>=<value> <why>; valid: <valid>`. Both texts are format strings over a Case: {method} is
    `method=<name>`.

    Attributes:
        setting: the config key that begins the line.
        applies: whether a run has the conflict.
        why: the reason; after a colon, it needs no verb.
        valid: values, or another setting.
        error: Refused where other cells of a sweep can run.
    """

    setting: str
    applies: Callable[[Case], Any]
    why: str
    valid: str
    error: type[UserError] = Refused

    def refusal(self, case: Case) -> UserError:
        """Return the error for a run."""
        why = self.why if self.why.startswith(":") else f" {self.why}"
        text = f"{why}; valid: {self.valid}".replace("{", "{0[").replace("}", "]}")
        # A value of the user's may hold braces.
        return self.error(case.label(self.setting) + text.format(case))


def refuse(group: str, spec: Any, method: Any = None, **values: Any) -> None:
    """Raise the first conflict of a group that a run has.

    Args:
        group: a key of CONFLICTS.
        spec: as in Case.
        method: the built method.
        values: further values of the group.

    Raises:
        UserError: one line; Refused where other cells of a sweep can run.
    """
    case = Case(spec, method, values)
    for conflict in CONFLICTS[group]:
        if conflict.applies(case):
            raise conflict.refusal(case)


def _differs(key: str, *plain: Any) -> Callable[[Case], bool]:
    """Return the condition that a setting has none of these values."""
    return lambda case: case.value(key) not in plain


def _is(key: str, *values: Any) -> Callable[[Case], bool]:
    """Return the condition that a setting has one of these values."""
    return lambda case: case.value(key) in values


def _are_set(*keys: str) -> Callable[[Case], bool]:
    """Return the condition that a run states all of these settings."""
    return lambda case: None not in map(case.value, keys)


def _are_on(*keys: str) -> Callable[[Case], bool]:
    """Return the condition that all of these settings are neither null nor false nor 0."""
    return lambda case: all(map(case.value, keys))


def _is_idle(name: str, acts: Callable[[Any], bool]) -> Callable[[Case], bool]:
    """Return the condition that a denoising setting is on where it does not act."""
    return lambda case: bool(case.value(f"generation.{name}")) and not acts(case.values["how"])


def _acts_on_stored(name: str) -> Callable[[Case], bool]:
    """Return the condition that a method of denoising steps meets a stored sequence."""
    return lambda case: (
        bool(case.value(f"generation.{name}")) and case.values["denoiser"] is not None
    )


def _acts_before_decoder(case: Case) -> bool:
    """Return whether a method's only site is just before the decoder of a model that generates token by token."""
    method, facts = case.method, case.spec.model.facts
    if not getattr(method, "in_one_prefill", False) or facts.diffusion is not None:
        return False
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    later = method.decode_site(facts.text.layers)
    is_before = {site.where for site in sites} <= {"vision", "prefix"}
    return later is None and len(sites) <= 1 and is_before


def _repeats(case: Case) -> int:
    """Return how many query heads share a key head, 1 where a compressor keeps one copy for all of them."""
    heads: int = case.text.heads // case.text.kv_heads
    return heads if case.method.repeats_heads else 1


def _holds_part(case: Case) -> bool:
    """Return whether some decoder layer does not hold the whole prompt."""
    return bool(case.text.window_layers or case.text.linear is not None)


def _partial_layers(case: Case) -> str:
    """Return how many decoder layers of a model do not hold the whole prompt, and their contents."""
    text = case.text
    count, content = text.window_layers, "a window of the prompt (model.facts.text.window_layers)"
    if text.linear is not None:
        count, content = text.layers - len(text.full_layers), "one state (model.facts.text.linear)"
    return f"{count} of {text.layers} decoder layers of {case.label('model')} hold {content}"


#: Facts that lines name.
COMPUTED: Mapping[str, Callable[[Case], object]] = {
    "partial_layers": _partial_layers,
    "layers": lambda case: case.text.layers,
    "repeats": _repeats,
    "places": lambda case: case.values["how"].length,
    "cause": lambda case: case.label(
        "generation.schedule"
        if case.value("generation.threshold") is None
        else "generation.threshold"
    ),
    "blocks": lambda case: case.values["length"] // case.values["block"],
    "least_of_block": lambda case: f"{1 / case.values['block']:g}",
    "share": lambda case: f"{case.values['how'].transfer_ratio:g}",
    "least": lambda case: f"{1 / case.values['how'].length:g}",
}


def _not_recorded(applies: Callable[[Case], Any], why: str) -> Conflict:
    """Return the conflict of `engine.graphs=true` with a model or a method."""
    return Conflict("engine.graphs", applies, f"records steps on one GPU, and {why}", "false, auto")


def _unlogged(key: str) -> Conflict:
    """Return the conflict of `log=none` with a setting of the log."""
    return Conflict(
        f"log.{key}",
        lambda case: case.value("log.name") == "none" and case.value(f"log.{key}"),
        "has no effect with log=none",
        "log=wandb",
        UserError,
    )


#: Of each group, in the order in which a run is refused.
CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "two methods": (
        Conflict(
            "compressor",
            lambda case: case.values["kinds"][1] != "compressor",
            "evicts no cache entries",
            "none, {compressors}",
        ),
        Conflict(
            "method",
            lambda case: case.values["kinds"][0] == "compressor",
            "{compressor}: both evict cache entries",
            "one of them, with compressor=none",
        ),
        Conflict(
            "method",
            lambda case: case.values["kinds"][0] == "decoder",
            "{compressor}: a method that decodes speculatively keeps its caches whole",
            "compressor=none",
        ),
        Conflict(
            "method",
            lambda case: case.values["kinds"][0] != "reducer",
            "{compressor}: only a method that drops tokens in one prefill goes before a compressor",
            "compressor=none",
        ),
    ),
    "vocabulary": (
        Conflict(
            "benchmark",
            lambda case: (
                case.value("model.closed_vocabulary") is True
                and case.value("benchmark.dataset.path") is not None
            ),
            "on {model}, which knows the words of its own scenes alone: the score would mean nothing",
            "{benchmarks}, another model, or model.closed_vocabulary=false to run it anyway",
            UserError,
        ),
    ),
    "a model that denoises": (
        Conflict(
            "compressor",
            _differs("compressor", None, "none"),
            "needs a model that generates one token after another, and {model} denoises its answers",
            "none",
        ),
        Conflict(
            "method",
            lambda case: not case.values["of_steps"],
            "needs a model that generates one token after another, and {model} denoises its answers",
            "a method that drops tokens, such as fastv",
        ),
        Conflict(
            "method",
            lambda case: case.values["of_steps"],
            "ranks visual tokens by the places that a step unmasks, and {model} has no masks: it starts from random "
            "words, and a step accepts some by their entropy and draws all others anew",
            "a method that drops tokens in the prefill, such as fastv",
        ),
    ),
    "a budget of reasoning": tuple(
        Conflict(
            "model.generation.thinking",
            applies,
            f"writes tokens into the answer, and {why}",
            "strip, keep",
            UserError,
        )
        for applies, why in (
            (lambda case: case.method.drafts, "{method} verifies drafts"),
            (lambda case: case.spec.model.facts.denoises, "{model} denoises its answers"),
            (lambda case: case.spec.backend.served, "backend=vllm decodes by itself"),
            (
                lambda case: case.spec.engine.rescore,
                "engine.rescore judges the model's own tokens",
            ),
            (
                _differs("benchmark.new_tokens", None),
                "{benchmark} fixes the length of answers",
            ),
        )
    ),
    "a decoder": (
        Conflict(
            "engine.backend",
            _differs("engine.backend", "drop"),
            "hides dropped tokens, and {method} drops none of the model's tokens",
            "drop",
        ),
        Conflict(
            "engine.positions",
            lambda case: case.value("engine.positions") == "renumbered" and not case.values["gaps"],
            "closes the gaps of dropped tokens, and {method} drops none of the model's tokens",
            "original, method",
        ),
        Conflict(
            "engine.rescore",
            _is("engine.rescore", True),
            "judges answers of a reduced model, and {method} drops none of the model's tokens",
            "false (engine.compare=true finds tokens that differ)",
        ),
        Conflict(
            "budget",
            _differs("budget", "kept"),
            "counts what enters each layer, and {method} drops none of the model's tokens",
            "kept, the share that the draft does without",
        ),
        Conflict(
            "ratio",
            lambda case: case.value("ratio") == 1 and not case.method.text_only,
            "leaves the draft no visual token",
            "below 1, or method=onsd, or method.params.text_only=true",
        ),
    ),
    "answers of a decoder": (
        Conflict(
            "generation.num_beams",
            lambda case: (case.value("generation.num_beams") or 1) > 1,
            "is not supported: {method} verifies one answer at a time",
            "1",
        ),
    ),
    "a compressor": (
        Conflict(
            "method",
            lambda case: case.text.window_layers == case.text.layers,
            "evicts from layers that hold the whole prompt, and all {layers} of {model} hold a window",
            "model.scale.layers=null",
        ),
        Conflict(
            "budget",
            _differs("budget", "kept", "kv_bytes"),
            ": {method} evicts cache entries after a whole prefill, and can only keep a share of them",
            "kept, kv_bytes",
        ),
        Conflict(
            "budget",
            lambda case: case.value("budget") == "kv_bytes" and _holds_part(case),
            ": {partial_layers}, from which nothing is evicted",
            "kept",
        ),
        Conflict(
            "budget",
            lambda case: case.value("budget") == "kv_bytes" and case.method.scope != "visual",
            ": {method} evicts text entries as well, and the budget is of visual ones",
            "method.params.scope=visual, budget=kept",
        ),
        Conflict(
            "budget",
            lambda case: case.value("budget") == "kv_bytes" and _repeats(case) > 1,
            ": {method} keeps a copy of keys and values for every query head, {repeats} times the bytes",
            "budget=kept with a share of 1/{repeats} of the entries",
        ),
        Conflict(
            "engine.backend",
            _differs("engine.backend", "drop"),
            ": {method} evicts cache entries for real",
            "drop",
        ),
        Conflict(
            "keep",
            lambda case: case.value("keep") is not None and case.method.scope != "visual",
            "counts visual entries, and {method} evicts text as well",
            "ratio=<share of all entries>, method.params.scope=visual",
        ),
        Conflict(
            "engine.decode",
            lambda case: case.method.repeats_heads and case.value("engine.decode") != "loop",
            ": {method} keeps a copy of keys and values for every query head",
            "loop",
        ),
        Conflict(
            "model.attention",
            lambda case: case.method.repeats_heads and case.value("model.attention") != "sdpa",
            ": {method} keeps a copy of keys and values for every query head",
            "sdpa",
        ),
    ),
    "a reducer and a compressor": (
        Conflict(
            "budget",
            _is("budget", "kv_bytes"),
            ": {method} and its compressor both shrink the cache, and the budget is of one",
            "kept",
        ),
    ),
    "layers that hold a part of the prompt": (
        Conflict(
            "method",
            _holds_part,
            "{action}, and {partial_layers}",
            "a method that drops tokens before the first step",
        ),
    ),
    "layers of linear attention": (
        Conflict(
            "engine.backend",
            lambda case: case.text.linear is not None and case.value("engine.backend") != "drop",
            "hides tokens by masks, and tokens hidden from linear attention still fade the states of {model}",
            "drop",
        ),
        Conflict(
            "budget",
            lambda case: case.text.linear is not None and case.value("budget") == "kv_bytes",
            ": {partial_layers}, of a size that dropping does not change",
            "kept, average, flops",
        ),
    ),
    "masks": (
        Conflict(
            "model",
            lambda case: case.spec.model.facts.rotary_axes > 1 or case.spec.model.facts.deepstack,
            "denoises, and its positions have several axes or its tower feeds the decoder's first layers, which "
            "denoising steps do not support",
            "model.facts.rotary_axes=1, no deepstack",
        ),
        Conflict(
            "method",
            lambda case: (
                case.method.tower_sites(case.spec.model.facts.tower.layers)
                or case.method.decode_site(case.text.layers) is not None
            ),
            "acts inside the vision tower or in the steps of a cache, and {model} denoises its answers",
            "d3tom, or a method that drops tokens after the projector, such as fastv",
        ),
        Conflict(
            "budget",
            _is("budget", "kv_bytes"),
            ": {model} denoises without a cache",
            "kept, average, flops",
        ),
    ),
    "denoised answers": (
        Conflict(
            "method",
            lambda case: case.method.shrinks_pictures,
            "changes the pictures, and {model} denoises from a stored prompt",
            "uniform or pooled",
        ),
        Conflict(
            "engine.rescore",
            _is("engine.rescore", True),
            "judges answers one token after another, and {model} denoises them",
            "false",
        ),
        Conflict(
            "engine.decode",
            _differs("engine.decode", "loop"),
            "generates one token after another, and {model} denoises its answers",
            "loop",
        ),
    ),
    "canvases": (
        Conflict(
            "engine.positions",
            lambda case: case.values["gaps"],
            "closes gaps, and {model} places its canvases after the whole prompt",
            "original",
        ),
    ),
    "answers on canvases": (
        Conflict(
            "benchmark",
            _differs("benchmark.new_tokens", None),
            "fixes the length of answers, and {model} ends them in a canvas",
            "a benchmark with benchmark.new_tokens=null",
        ),
    ),
    "denoising steps elsewhere": (
        Conflict(
            "method",
            lambda case: case.method.read_sites(
                case.spec.model.facts.tower.layers, case.text.layers
            ),
            "drops tokens at denoising steps, and {model} decodes one token after another",
            "a method that drops them in the prefill, such as fastv",
        ),
    ),
    "scope": (
        Conflict(
            "engine.scope",
            lambda case: case.value("engine.scope") != "prompt" and not _acts_before_decoder(case),
            ": {method} does not act just before the decoder, at one site",
            "prompt",
        ),
    ),
    "precision": (
        Conflict(
            "model.dtype",
            lambda case: case.value("model.dtype") == "float16" and case.values["on_cpu"],
            "on the CPU: half precision is slow and overflows there",
            "float32, bfloat16",
            UserError,
        ),
        Conflict(
            "model.attention",
            lambda case: (
                case.value("model.attention") == "flash_attention_2"
                and (case.values["on_cpu"] or case.value("model.dtype") == "float32")
            ),
            "needs a GPU and half precision, not {model.dtype} on {model.device}",
            "sdpa, eager",
            UserError,
        ),
        Conflict(
            "model.attention",
            lambda case: (
                case.value("model.attention") == "flash_attention_2"
                and find_spec("flash_attn") is None
            ),
            "needs the package flash-attn, which is not installed",
            "sdpa, eager",
            UserError,
        ),
        Conflict(
            "model.dtype",
            lambda case: case.value("model.dtype") == "bfloat16" and case.values["lacks_bfloat16"],
            ": {gpu} has no bfloat16",
            "float16, float32",
            UserError,
        ),
    ),
    "random weights": (
        Conflict(
            "model.weights",
            lambda case: not case.value("model.architecture"),
            ": {model} states no model.architecture to build",
            "trained",
            UserError,
        ),
    ),
    "log": tuple(map(_unlogged, ("samples", "pictures", "options"))),
    "graphs": tuple(
        _not_recorded(applies, why)
        for applies, why in (
            (
                lambda case: not case.value("model.device").startswith("cuda"),
                "{model.device} is not a GPU",
            ),
            (
                lambda case: (
                    case.value("model.device_map") is not None and case.values["n_cards"] > 1
                ),
                "{model.device_map} spreads the model over several GPUs",
            ),
            (
                _differs("model.attention", "sdpa"),
                "{model.attention} is not sdpa, which can attend to a part of its keys by a mask",
            ),
            (
                lambda case: case.text.experts,
                "{model} routes to experts, and the host reads the choice",
            ),
        )
    ),
    "graphs of a draft": (
        _not_recorded(
            lambda case: case.values["ragged"],
            "{method} leaves the layers of its draft caches of different lengths",
        ),
    ),
    "graphs of a loaded model": (
        _not_recorded(
            lambda case: case.values["n_devices"] > 1, "{model} is spread over several devices"
        ),
        _not_recorded(
            lambda case: getattr(case.values["rotary"], "rope_type", None) == "dynamic",
            "{model} changes its rotary frequencies with the length, which the host reads",
        ),
    ),
    "tools of a benchmark": (
        Conflict(
            "benchmark",
            lambda case: "server" in case.spec.benchmark.needs,
            ": scored by a submission server alone (benchmark.needs=[server])",
            "a split with public answers",
            UserError,
        ),
        Conflict(
            "benchmark",
            lambda case: "java" in case.spec.benchmark.needs and shutil.which("java") is None,
            ": its scorer runs in Java (benchmark.needs=[java]), and there is no java on PATH",
            "with a Java runtime, for example OpenJDK 17",
            UserError,
        ),
    ),
    "judge": tuple(
        Conflict(
            "benchmark",
            _is(key, None),
            f"is scored by a judge, and {key}=null",
            "judge.base_url=http://localhost:8000/v1 judge.model=<its name there>, of any server that speaks OpenAI's "
            "chat completions (docs/judges.md)",
        )
        for key in ("judge.base_url", "judge.model")
    ),
    "tensor parallelism": (
        Conflict(
            "model.parallel",
            lambda case: case.values["processes"] == 1,
            "needs several processes",
            "torchrun --nproc_per_node <processes> run.py ...",
            UserError,
        ),
        Conflict(
            "model.parallel",
            lambda case: case.values["processes"] > case.values["heads"],
            "with {processes} processes: more tensor ranks than heads, {model} has {heads} key heads",
            "{counts}or model.parallel=data",
            UserError,
        ),
        Conflict(
            "model.parallel",
            lambda case: case.values["heads"] % case.values["processes"],
            "with {processes} processes: heads that do not divide, {model} has {heads} key heads",
            "{counts}or model.parallel=data",
            UserError,
        ),
        *(
            Conflict(
                "model.parallel",
                applies,
                f"does not take {setting}",
                "model.parallel=data",
                UserError,
            )
            for applies, setting in (
                (_differs("method.draft", None), "{method}, which has two models"),
                (lambda case: case.spec.model.facts.denoises, "{model}, which denoises"),
                (_is("model.weights", "random"), "{model.weights}"),
                (_differs("model.device_map", None), "{model.device_map}"),
                (lambda case: case.spec.backend.served, "{backend}"),
                (_differs("engine.share", "none"), "{engine.share}"),
                (_differs("benchmark.prompt_tokens", None), "{benchmark}, which measures times"),
                (lambda case: case.spec.log_pictures, "log.pictures"),
            )
        ),
    ),
    "several processes": (
        Conflict(
            "model.device_map",
            _differs("model.device_map", None),
            "lets one process use all devices, and there are {processes} processes",
            "null",
            UserError,
        ),
        Conflict(
            "method",
            _differs("method.draft", None),
            "has a device for its draft, which {processes} processes would share",
            "one process",
            UserError,
        ),
    ),
    "vllm": (
        Conflict(
            "engine.batch_size",
            _is("engine.batch_size", "auto"),
            "tries out memory of this process",
            "a number",
            UserError,
        ),
        Conflict(
            "benchmark",
            _differs("benchmark.prompt_tokens", None),
            "times the harness's own engine",
            "backend=transformers",
            UserError,
        ),
        Conflict(
            "model",
            lambda case: (
                case.value("model.in_memory") is not None
                or (case.value("model.weights") == "random" and not case.values["loads"])
            ),
            "has no checkpoint for backend=vllm to load",
            "model.weights=trained",
            UserError,
        ),
        Conflict(
            "model",
            lambda case: (
                case.values["family"] not in case.values["families"]
                or case.spec.model.facts.denoises
            ),
            "is a {family}, which backend=vllm does not serve",
            "{served}",
        ),
        Conflict(
            "method",
            lambda case: case.value("method.code") is not None or not case.values["reduces"],
            ": backend=vllm serves token reducers of methods/, one a run, and this is none",
            "a method that drops tokens, such as divprune",
        ),
    ),
    "a server of vllm": (
        Conflict(
            "backend.url",
            lambda case: case.value("backend.url") is not None and case.values["loads"],
            ": engines of a benchmark are started anew",
            "backend.python",
            UserError,
        ),
        Conflict(
            "backend.url",
            lambda case: None not in (case.value("backend.url"), case.value("backend.python")),
            ": backend.python is set as well",
            "one of both",
            UserError,
        ),
        Conflict(
            "backend.url",
            lambda case: case.value("backend.url") is not None and not case.values["is_plain"],
            ": a server has its own parallelism and options",
            "those of `vllm serve`",
            UserError,
        ),
        Conflict(
            "backend",
            lambda case: case.value("backend.url") is None and case.value("backend.python") is None,
            "needs backend.python, the interpreter of an environment with vllm, or backend.url, a server of it",
            "docs/serve.md",
            UserError,
        ),
    ),
    "pruning of vllm": (
        Conflict(
            "backend.pruning",
            lambda case: case.value("method") not in case.values["built_in"],
            ": vLLM has no {method} of its own for {model}",
            "{methods}",
        ),
        Conflict(
            "backend.pruning",
            lambda case: case.method != case.values["plain"],
            ": {method} takes no hyper-parameters in vLLM",
            "{params}",
            UserError,
        ),
        Conflict(
            "backend.pruning",
            _differs("keep", None),
            ": {keep} is no share",
            "ratio=<a number>",
            UserError,
        ),
    ),
    "steps of denoising": (
        Conflict(
            "generation.max_new_tokens",
            lambda case: case.values["length"] % case.values["block"],
            "is not a multiple of generation.block_length={block}",
            "a length of whole blocks",
            UserError,
        ),
        Conflict(
            "generation.steps",
            _are_set("generation.steps", "generation.step_ratio"),
            "and {generation.step_ratio} both set the steps",
            "one of them, the other null",
            UserError,
        ),
        Conflict(
            "generation.step_ratio",
            lambda case: int(case.values["block"] * (case.value("generation.step_ratio") or 1)) < 1,
            "leaves a block of {block} places no step",
            "{least_of_block} to 1",
            UserError,
        ),
        Conflict(
            "generation.steps",
            lambda case: (case.value("generation.steps") or 1) > case.values["length"],
            "is above {of}={length}: each step reveals a place",
            "1 to {length}",
            UserError,
        ),
        Conflict(
            "generation.steps",
            lambda case: (
                (case.value("generation.steps") or 0)
                % (case.values["length"] // case.values["block"])
            ),
            "is not divisible by {blocks} blocks (max_new_tokens={length}, block_length={block})",
            "a multiple of {blocks}",
            UserError,
        ),
    ),
    "caches of denoising": (
        Conflict(
            "generation.prefix_cache",
            lambda case: (
                case.value("generation.prefix_cache")
                and not case.value("model.facts.diffusion.prefix_cache")
            ),
            "hides the answer from the prompt, and {model} was not trained that way "
            "(model.facts.diffusion.prefix_cache=false)",
            "false",
        ),
        Conflict(
            "generation.prefix_cache",
            lambda case: (
                case.value("generation.prefix_cache")
                and case.values["denoiser"] is not None
                and not case.values["denoiser"].merges_entries
            ),
            "leaves no states of visual tokens in a step for {title} to act on",
            "false, or a method that acts on a cached prompt, such as d3tom, or once in its own run, such as fastv",
        ),
        Conflict(
            "generation.prefix_cache",
            lambda case: case.values["every"] > 1 and not case.value("generation.prefix_cache"),
            "runs every token anew in each step, which leaves {title} nothing to keep for {every} of them",
            "true, or method.params.every=1",
        ),
        Conflict(
            "engine.backend",
            lambda case: (
                case.value("generation.prefix_cache")
                and case.values["denoiser"] is not None
                and case.value("engine.backend") == "emulate"
            ),
            "hides tokens by masks, and under {generation.prefix_cache} {title} merges cache entries for real",
            "drop",
        ),
        *(
            Conflict(
                f"generation.{name}",
                _acts_on_stored(name),
                "leaves no states of visual tokens in most steps for {title} to act on",
                "null, or a method that acts once in a prefill, such as fastv",
            )
            for name in ("block_cache", "prompt_interval")
        ),
        Conflict(
            "generation.block_cache",
            lambda case: (
                case.value("generation.block_cache")
                and case.spec["generation"].drifts
                and case.values["rows"] > 1
            ),
            "with {cause}: answers of a batch start their blocks at different steps",
            "engine.batch_size=1 (engine.batch_size={rows})",
        ),
    ),
    "denoising settings": (
        *(
            Conflict(
                f"generation.{name}",
                _is_idle(name, acts),
                f"changes nothing without {remedy}",
                f"{remedy}, or {name}=null",
                UserError,
            )
            for name, acts, remedy in (
                ("shift", lambda how: how.schedule == "shift", "schedule=shift"),
                ("stop_words", lambda how: how.stop == "freeze", "stop=freeze"),
                (
                    "generation_interval",
                    lambda how: how.prompt_interval is not None,
                    "a prompt_interval",
                ),
                (
                    "transfer_ratio",
                    lambda how: how.generation_interval is not None,
                    "a generation_interval",
                ),
                ("eps", lambda how: how.schedule in (TIMESTEPS, ORIGIN), f"schedule={TIMESTEPS}"),
                (
                    "alg_temp",
                    lambda how: how.remasking != "random",
                    "another remasking than random",
                ),
                ("top_k", lambda how: how.temperature > 0, "a temperature above 0"),
                ("top_p", lambda how: how.temperature > 0, "a temperature above 0"),
            )
        ),
        *(
            Conflict(
                f"generation.{second}",
                _are_on(f"generation.{first}", f"generation.{second}"),
                f"with {{generation.{first}}}, which caches the prompt too",
                "one of prefix_cache, block_cache, prompt_interval",
                UserError,
            )
            for first, second in combinations(("prefix_cache", "block_cache", "prompt_interval"), 2)
        ),
        Conflict(
            "generation.generation_interval",
            lambda case: (
                case.values["how"].generation_interval is not None
                and case.values["how"].prompt_interval % case.values["how"].generation_interval
            ),
            "does not divide {generation.prompt_interval}: a whole sequence runs every place of the answer",
            "a divisor",
            UserError,
        ),
        Conflict(
            "generation.generation_interval",
            lambda case: (
                case.values["how"].generation_interval is not None and not case.values["how"].part
            ),
            "with generation.transfer_ratio={share} leaves none of {places} places to run",
            "generation.transfer_ratio={least} to 1",
            UserError,
        ),
        Conflict(
            "generation.remasking",
            lambda case: (
                case.values["how"].schedule == ORIGIN and case.values["how"].remasking != "random"
            ),
            f"with generation.schedule='{ORIGIN}', which gives each place a chance of its own",
            "random",
            UserError,
        ),
        *(
            Conflict(
                f"generation.{name}",
                _are_set("generation.threshold", f"generation.{name}"),
                "with {generation.threshold}: the confidence of its words decides when a place is unmasked",
                f"{name}=null",
                UserError,
            )
            for name in ("steps", "step_ratio", "schedule", "shift", "eps", "alg_temp")
        ),
        Conflict(
            "generation.remasking",
            lambda case: (
                case.value("generation.threshold") is not None
                and case.values["how"].remasking != REMASKING[0]
            ),
            "with {generation.threshold}, which is a probability",
            REMASKING[0],
            UserError,
        ),
    ),
    "arguments": (
        Conflict(
            "transport",
            lambda case: case.value("transport") is not None and not case.method.takes_draft,
            ": {method} takes no draft model",
            "without transport",
            UserError,
        ),
        Conflict(
            "compare",
            lambda case: case.value("compare") and not case.method.drafts,
            ": {method} is no speculative decoder",
            "without compare",
            UserError,
        ),
        Conflict(
            "cache_ratio",
            lambda case: case.value("cache_ratio") is not None and not case.value("evicts"),
            "is the share that a compressor evicts",
            "with compressor=..., and `ratio` for a method that evicts by itself",
            UserError,
        ),
    ),
    "steps": (
        Conflict(
            "generation.threshold",
            lambda case: case.value("generation.threshold") is not None and not case.values["even"],
            "leaves the number of steps open, and the shares of {title} follow it",
            "null, or a method with equal shares, such as d3tom",
        ),
    ),
}
