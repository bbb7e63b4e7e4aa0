"""Prove on two probes what the engine does with a model of an unlisted class, each kind of site against a reference.

The references hide tokens by masks: the engine's own emulation before and between layers, hooks on the library's
forward in the encoder and the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError, first_words, foreign
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.loader import MALFORMED
from espalier.methods.base import Need, Plan, Site, TokenReducer, View, Where
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.none import NoReduction

#: Returns the features of the pictures of a batch.
Features = Callable[[Mapping[str, Any]], Tensor]

#: Answer ids and their logits.
Answers = tuple[Tensor, Tensor]

#: Tokens of an answer to a probe.
STEPS = 4

#: Width and height of the pictures of each probe, and its text.
PROBES = (((96, 64), "What is this?"), ((56, 112), "Describe the picture in a few words."))

#: Largest difference of logits, as a share of the largest logit, by the bytes of a number.
TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 3e-2}

NOTHING, HALF = Budget("kept", 0.0), Budget("kept", 0.5)


class Unproved(UserError):
    """A check has failed."""


@dataclass(frozen=True)
class _Half(TokenReducer):
    """Keeps half of the tokens at one site, by chance or those given; `read_signals` are those it has read."""

    where: Where = "prefix"
    layer: int = 0
    kept: Tensor | None = None
    read_signals: list[Mapping[str, Tensor]] = field(default_factory=list)

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        return (Site("tower", self.layer),) if self.where == "tower" else ()

    def sites(self, depth: int) -> tuple[Site, ...]:
        return () if self.where == "tower" else (Site(self.where, self.layer),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        return (
            (Need("last_attention"), Need("next_last_attention")) if site.where == "layer" else ()
        )

    def plan(self, view: View, keep: int) -> Plan:
        rows, tokens = view.tokens.shape[:2]
        self.read_signals.append(view.signals)
        kept = _chosen(tokens, keep) if self.kept is None else self.kept
        return Plan(kept.to(view.tokens.device).expand(rows, -1))


@dataclass(frozen=True)
class _HalfOfCache(CacheCompressor):
    """Keeps half of the entries, the same in all layers, by chance."""

    def score(self, view: CacheView) -> Tensor:
        entries = len(view.candidates)
        scores = torch.zeros(1, entries, device=view.keys.device)
        scores[0, _chosen(entries, entries // 2)] = 1.0
        return scores


def _chosen(tokens: int, keep: int) -> Tensor:
    """Return (keep,) ascending indices, by chance."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    return order[:keep].sort().values


def prove(adapter: Adapter, features: Features, where: str) -> dict[str, str]:
    """Check features, ratio 0 and the prefix site on two probes, and return other sites that fail, and why.

    Args:
        adapter: adapter of the loaded model; `facts.unproved` has the sites that are not tried.
        features: returns the features (units, D) of a batch's pictures, by the model's own interface.
        where: start of the error line.

    Cost: some twenty answers of `STEPS` tokens.

    Raises:
        UserError: features, ratio 0 or the prefix site failed.
    """
    problem = f"{where}: a probe ends with an error"
    with foreign(problem, "a class that answers to its own processor", MALFORMED):
        first, last = (adapter.encode([_chat(*probe)]) for probe in PROBES)
        probes = _Probe(adapter, first, last=False), _Probe(adapter, last, last=True)
        for probe in probes:
            try:
                probe.check_features(features(probe.inputs))
                probe.check_prefix()
            except Unproved as failed:
                raise UserError(f"{where}: {failed}") from failed
    checks: dict[str, Callable[[_Probe], None]] = {
        "layer": _Probe.check_layers,
        "cache": _Probe.check_cache,
        "tower": _Probe.check_tower,
    }
    unproved = {}
    for kind, check in checks.items():
        if kind in adapter.facts.unproved:
            continue
        try:
            for probe in probes:
                check(probe)
        except MALFORMED as error:
            unproved[kind] = first_words(error)
    return unproved


def _chat(size: tuple[int, int], text: str) -> list[dict[str, Any]]:
    """Return a turn with a picture of ramps, in which no two parts are equal, and a text."""
    width, height = size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([rows * 255 // height, columns * 255 // width, (rows * columns) % 256], -1)
    picture = Image.fromarray(pixels.to(torch.uint8).numpy())
    content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True, eq=False)
class _Probe:
    """One encoded chat, and the checks on it; `last` acts in the last layer and block, not the first that can."""

    adapter: Adapter
    inputs: Mapping[str, Any]
    last: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of an answer."""
        return {
            **{"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False},
            **{
                "output_logits": True,
                "suppress_tokens": [self.adapter.model.config.image_token_id],
            },
        }

    @torch.inference_mode()
    def plain(self) -> Answers:
        """Return the answer of the library."""
        output = self.adapter.model.generate(
            **self.inputs, **self.settings, return_dict_in_generate=True
        )
        start = self.inputs["input_ids"].shape[1]
        return output.sequences[:, start:].cpu(), torch.stack(output.logits, 1)

    def answer(self, method: TokenReducer, budget: Budget = HALF, **options: Any) -> GeneratedBatch:
        """Return the answer of the engine."""
        with Session(self.adapter, method, budget, **options) as session:
            return session.generate(self.inputs, **self.settings)

    @torch.inference_mode()
    def check_features(self, features: Tensor) -> None:
        """Check that the features enter the decoder unchanged, in the order of their placeholders, without a mask."""
        entered: list[Tensor] = []
        masks: list[Any] = []

        def watch(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            entered.append(kwargs["inputs_embeds"])
            masks.append(kwargs.get("attention_mask"))

        adapter = self.adapter
        with _before([adapter.decoder], watch):
            adapter.model.generate(**self.inputs, max_new_tokens=1, do_sample=False)
        if isinstance(masks[0], Mapping) or (masks[0] is not None and masks[0].dim() > 2):
            raise Unproved(
                "it gives the decoder masks of its own, which the engine would replace by causal ones"
            )
        layout = adapter.layout(self.inputs)
        tokens = entered[0][0, layout.visual[0].to(entered[0].device)]
        if features.shape != tokens.shape:
            raise Unproved(f"{len(features)} features of pictures for {len(tokens)} placeholders")
        if not torch.equal(features.to(tokens), tokens):
            raise Unproved("the features of get_image_features are not what enters the decoder")

    def check_prefix(self) -> None:
        """Check answers under the engine against the library's, and dropping before the decoder against masks."""
        plain = self.plain()
        for decode in ("loop", "generate"):
            answer = self.answer(NoReduction(), NOTHING, decode=decode)
            self._compare(plain, answer, f"ratio 0 ({decode})")
        masked = self.answer(_Half(), backend="emulate")
        self._compare(_of(masked), self.answer(_Half()), "dropping half of the visual tokens")

    def check_layers(self) -> None:
        """Check dropping between layers against masks, and attention that methods read against the library's eager."""
        depth = len(self.adapter.decoder.layers)
        if depth < 2:
            raise Unproved("its decoder has one layer")
        layer = depth - 1 if self.last else 1
        method = _Half("layer", layer)
        masked = self.answer(method, backend="emulate")
        self._compare(_of(masked), self.answer(method), f"dropping before layer {layer}")
        maps = self._attention()
        for signal, number in {"last_attention": layer - 1, "next_last_attention": layer}.items():
            check = f"{signal} of layer {number} differs"
            self._near(maps[number], method.read_signals[-1][signal][0], check, "weight")

    @torch.inference_mode()
    def _attention(self) -> list[Tensor]:
        """Return for each layer the attention (N,) of the last token to the visual ones under the eager kernel."""
        decoder, maps = self.adapter.decoder, list[Tensor]()

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            maps.append(output[1][0, :, -1].mean(0))

        kernel = decoder.config._attn_implementation
        with ExitStack() as stack:
            for layer in decoder.layers:
                stack.enter_context(layer.self_attn.register_forward_hook(watch))
            stack.callback(setattr, decoder.config, "_attn_implementation", kernel)
            decoder.config._attn_implementation = "eager"
            self.adapter.model(**self.inputs)
        visual = self._visual
        return [weights[visual.to(weights.device)] for weights in maps]

    @property
    def _visual(self) -> Tensor:
        """Slots (N,) of the visual tokens."""
        return self.adapter.layout(self.inputs).visual[0]

    def check_cache(self) -> None:
        """Check steps after an eviction against the library's, with a mask on the entries that were evicted."""
        visual = self._visual
        count = len(visual) // 2
        evicted = torch.ones(len(visual), dtype=torch.bool)
        evicted[_chosen(len(visual), count)] = False

        def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if kwargs["inputs_embeds"].shape[1] > 1:
                return None
            # The library leaves out masks of ones.
            length = kwargs["past_key_values"].get_seq_length() + 1
            mask = torch.ones(1, length, dtype=torch.long, device=kwargs["inputs_embeds"].device)
            mask[:, visual[evicted.to(visual.device)].to(mask.device)] = 0
            return args, {**kwargs, "attention_mask": mask}

        with _before([self.adapter.decoder], hide):
            masked = self.plain()
        evicting = CacheBudget(_HalfOfCache(), 0.5, count)
        answer = self.answer(NoReduction(), NOTHING, evicting=evicting)
        self._compare(masked, answer, "evicting half of the cache")

    def check_tower(self) -> None:
        """Check dropping inside the encoder against masks on its later blocks and a drop before the decoder."""
        layers, blocks = self.adapter.tower_layers(), len(self.adapter.tower_blocks())
        extra, tokens = int(self.adapter.facts.class_attention == "token"), len(self._visual)
        dropped = torch.zeros(tokens, dtype=torch.bool)

        def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            pictures, slots = hidden.shape[:2]
            patches = pictures * (slots - extra)
            if patches != tokens:
                raise Unproved(f"{patches} patches of its encoder become {tokens} tokens")
            bias = hidden.new_zeros(pictures, 1, slots, slots)
            hides = dropped.view(pictures, 1, 1, -1).to(hidden.device)
            bias[..., extra:].masked_fill_(hides, torch.finfo(hidden.dtype).min)
            return args[:1], {**kwargs, "attention_mask": bias}

        with _before(layers, hide):
            self.plain()
        block = blocks - 1 if self.last else 0
        answer = self.answer(_Half("tower", block))
        kept = answer.records[0].origin
        assert kept is not None  # every record of a prefill has it
        dropped[:] = True
        dropped[kept.cpu()] = False
        with _before(layers[block + 1 :], hide):
            masked = self.answer(_Half(kept=kept))
        self._compare(_of(masked), answer, f"dropping in block {block} of its encoder")

    def _compare(self, expected: Answers, answer: GeneratedBatch, check: str) -> None:
        """Raise Unproved unless logits are near, up to the first token that differs."""
        (ids, logits), (answered, answer_logits) = expected, _of(answer)
        equal = (ids == answered).all(0)
        steps = int(equal.logical_not().nonzero()[0]) + 1 if not bool(equal.all()) else len(equal)
        self._near(logits[:, :steps], answer_logits[:, :steps], f"{check} changes logits", "logit")

    def _near(self, expected: Tensor, value: Tensor, check: str, unit: str) -> None:
        """Raise Unproved unless two tensors are near."""
        difference = (expected.float() - value.to(expected.device).float()).abs().max()
        share = difference / expected.abs().max()
        tolerance = TOLERANCE[self.adapter.model.dtype.itemsize]
        if not share <= tolerance:
            raise Unproved(
                f"{check} by {share:.1e} of the largest {unit}, more than {tolerance:.0e}"
            )


def _of(answer: GeneratedBatch) -> Answers:
    """Return the ids and logits of an answer."""
    assert answer.logits is not None  # requested
    return answer.ids, answer.logits


def _before(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> ExitStack:
    """Call a hook with the arguments of modules inside the block; it may return others."""
    stack = ExitStack()
    for module in modules:
        stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
    return stack
