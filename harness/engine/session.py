"""Session: one method installed on one model for the length of a `with` block, after which the model is restored.

A shared prompt serves several methods: the signals they read before the decoder, and layers that they share, computed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.engine.attention_probe import AttentionTap, Watcher
from espalier.harness.engine.engine_guards import check_proved, closes_gaps, decode_site
from espalier.harness.engine.finite_logits import NonFiniteLogits, non_finite_origin
from espalier.harness.engine.forward_pass import ActivePass, Pass, check_site_kinds
from espalier.harness.engine.generation_loop import ReasoningLimit, generate_answers
from espalier.harness.engine.layer_inputs import visible_to_last
from espalier.harness.engine.layout import Layout
from espalier.harness.engine.model_parts import ModelParts, TowerBlock
from espalier.harness.engine.priors import Prior
from espalier.harness.engine.prompt import Prompt, make_prompt, refuse_tower_sites, split_idle
from espalier.harness.engine.record import GeneratedBatch, LoopOutput
from espalier.harness.engine.session_setup import CacheEvictor, PrefillScores, SessionSetup
from espalier.harness.engine.signals.producer import Signals
from espalier.harness.engine.signals.table import DECLARED
from espalier.harness.engine.sites import reads_features, tower_sites, unreduced_layers
from espalier.harness.errors import UserError
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.generation import check_generation
from espalier.harness.specs.run_spec import Backend, DecodeLoop, PositionPolicy, Scope, Separators
from espalier.methods.base import MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.none import NoReduction


@dataclass(frozen=True)
class PrefillResult:
    """A prompt that has run: `logits` (V,) after its last token and the `next` position (..., 1), on the input device.

    `finish` takes the answer's ids (1, T) once decoding is over, and counts the time since the prefill as decoding.
    """

    logits: Tensor
    next: Tensor
    finish: Callable[[Tensor], GeneratedBatch]


@dataclass(frozen=True)
class RunStart:
    """Inputs of a run, their layout, and the prompt that replaces the vision side, if any."""

    inputs: Mapping[str, Any]
    layout: Layout
    prompt: Prompt | None = None


class Session:
    """Runs `generate` with visual tokens reduced by a method.

    `backend="drop"` removes tokens physically: hidden states, rotary tables, masks and cache all get shorter.
    `backend="emulate"` is the slow reference: the full sequence runs everywhere and explicit masks hide dropped tokens.
    Both make the same choices; tests compare them.

    Args:
        adapter: the model.
        method: the reducer; a method without sites leaves the model unchanged.
        budget: rule and ratio.
        seed: run seed, from which every sample's generator is derived.
        backend: `drop` or `emulate`.
        positions: `original` keeps the position ids of kept tokens, `renumbered` closes the gaps after every site,
            `method` does what the method's released code does.
        prior: calibrated prior, for methods that need one.
        timed: whether phases are timed (the device is synchronised at both ends of each).
        evicting: cache eviction after each prefill; None, or one that does not act, evicts nothing.
        decode: `loop` generates by the engine's own loop, `generate` by the library's, which always runs beam search.
        separators: `keep` leaves newline and separator tokens of images, `candidates` makes them visual tokens.
        scope: `item` lets the method choose in each picture and video by itself, before the decoder.

    Raises:
        MethodError: the model cannot run the method.
        UserError: the model's attention or layers are not supported.
    """

    #: Whether it runs denoising steps, which also accept methods for one prefill.
    steps: ClassVar[bool] = False

    def __init__(
        self,
        adapter: ModelParts,
        method: TokenReducer,
        budget: Budget,
        *,
        seed: int = 0,
        backend: Backend = "drop",
        positions: PositionPolicy = "original",
        prior: Prior | None = None,
        timed: bool = True,
        evicting: CacheEvictor | None = None,
        decode: DecodeLoop = "loop",
        separators: Separators = "keep",
        scope: Scope = "prompt",
    ) -> None:
        if not method.in_one_prefill and not self.steps:
            raise MethodError(
                f"{type(method).__name__} is not a token reducer; sessions run token reducers only"
            )
        if evicting is not None and evicting.acts and backend == "emulate":
            raise UserError(
                "engine.backend='emulate' only hides tokens, but evicted cache entries are removed; valid: drop"
            )
        facts, depth = adapter.facts, adapter.facts.text.layers
        model = {"name": adapter.spec.name, "facts": facts}
        refuse("layers of linear attention", {"model": model, "engine": {"backend": backend}})
        self.adapter = adapter
        self.method = method
        self.budget = budget
        self._decode = decode
        self._separators = separators
        self._active = ActivePass()
        self._open = False
        if evicting is not None and not evicting.acts:
            evicting = None
        sites = method.all_sites(facts.tower.layers, depth)
        check_site_kinds(method, sites)
        step_site = decode_site(method, depth)
        cache = () if evicting is None else ("cache",)
        steps = () if step_site is None else ("decode",)
        places = (*(site.where for site in sites), *cache, *steps)
        check_proved(facts, f"method={type(method).__name__}", places)
        partial_layers = [layer for layer in range(depth) if not adapter.holds_prompt(layer)]
        if step_site is not None and partial_layers:
            raise MethodError(
                f"{type(method).__name__} chooses entries at each step, and layers "
                f"{', '.join(map(str, partial_layers))} do not hold the whole prompt; valid: a method that drops "
                "tokens before the first step"
            )
        renumber, active = closes_gaps(positions, method, facts), self._active
        signals = Signals(adapter, method, sites, prior, stage=active.stage)
        tower_blocks: Sequence[TowerBlock] = ()
        if inside := tower_sites(sites):
            # Only runs that act in the tower import what runs its blocks.
            from espalier.harness.engine.tower_sites import watched_blocks

            tower_blocks = watched_blocks(adapter, method, inside)
        watchers: list[tuple[nn.Module, Watcher]] = [
            *signals.watchers(),
            *((block.attention, active.watch_tower) for block in tower_blocks),
            *(
                (layer.self_attn, partial(active.watch_cache, number))
                for number, layer in enumerate(adapter.decoder.layers)
                if evicting is not None and adapter.holds_prompt(number)
            ),
        ]
        watched_modules = [*(module for module, _ in watchers), *signals.watched_layers]
        # Tower blocks that the projector does not read: those that a method reads, and idle ones.
        extra, idle = split_idle(adapter.unread_blocks(), watched_modules)
        self.setup = SessionSetup(
            adapter=adapter,
            method=method,
            budget=budget,
            seed=seed,
            emulate=backend == "emulate",
            renumber=renumber,
            timed=timed,
            sites=sites,
            decode_site=step_site,
            signals=signals,
            extra_blocks=extra,
            idle_blocks=idle,
            evicting=evicting,
            by_item=scope == "item",
        )
        of_decoder = set(adapter.decoder.modules())
        taps = [
            (module, active.as_selection(watcher, module in of_decoder))
            for module, watcher in watchers
        ]
        if step_site is not None:  # the layer below it
            taps.append((adapter.decoder.layers[step_site.layer - 1].self_attn, active.watch_step))
        self._tap = AttentionTap(taps)

    def __enter__(self) -> Self:
        """Wrap the attention functions that the method's signals need."""
        self._tap.__enter__()
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Restore the model. Raises MethodError: a condition that nobody has read does not hold."""
        self._open = False
        self._tap.__exit__(kind, *error)
        if kind is None:
            self.setup.conditions.settle()

    def layout(self, inputs: Mapping[str, Any]) -> Layout:
        """Return the layout of a batch, with this session's candidates for removal."""
        return self.adapter.layout(inputs, self._separators)

    @torch.inference_mode()
    def generate(
        self,
        inputs: Mapping[str, Any] | Prompt,
        samples: Sequence[str] | None = None,
        **generation: Any,
    ) -> GeneratedBatch:
        """Generate answers for one left-padded batch.

        Args:
            inputs: the output of the adapter's `encode`, or a prompt made from it, which skips the vision side.
            samples: one unique id for each row; they seed the rows' generators.
            **generation: arguments of transformers' `generate`, and `thinking_budget`, tokens of reasoning.

        Raises:
            UserError: an argument that the engine cannot honour, or a prompt of another model.
            MethodError: the method cannot start from this prompt.
            PlanError: the method broke its contract.
            NonFiniteLogits: the model's logits contain NaN or infinity; names the first module with non-finite output.
        """
        start = self._start("generate", inputs)
        check_generation({**start.inputs, **generation})
        rows = start.layout.rows
        names = tuple(samples) if samples is not None else tuple(map(str, range(rows)))
        if len(names) != rows:
            raise ValueError(f"{len(names)} sample ids for {rows} rows")
        try:
            return self._generate(start, names, generation)
        except NonFiniteLogits as error:
            first_token = (
                {**generation, "max_new_tokens": 1, "min_new_tokens": None}
                if self.adapter.canvas is None
                else {**generation, "max_denoising_steps": 1}
            )
            error.origin = non_finite_origin(
                self.adapter, lambda: self._generate(start, names, first_token)
            )
            raise

    def _generate(
        self, start: RunStart, names: tuple[str, ...], generation: Mapping[str, Any]
    ) -> GeneratedBatch:
        arguments = dict(generation)
        budget = arguments.pop("thinking_budget", None)
        if budget is not None:
            tokenizer, lead = self.adapter.processor.tokenizer, self.adapter.answer_lead
            limit = ReasoningLimit(tokenizer, budget, lead)
            arguments["logits_processor"] = [*arguments.get("logits_processor", ()), limit]
        with self._run(start, names) as current_pass:
            output = generate_answers(
                self.adapter, current_pass, start.inputs, arguments, self._decode
            )
            return current_pass.finish(output)

    @contextmanager
    def collect_scores(self) -> Iterator[PrefillScores]:
        """Collect attention and scores of each prefill inside the block; prefills take longer meanwhile.

        Raises:
            UserError: the model's attention is not supported.
        """
        collector, setup = PrefillScores(), self.setup

        def watch(number: int, query: Tensor, key: Tensor, scaling: float) -> None:
            stage = self._active.stage()
            if stage is not None:
                stage.move(query.device)
                visible = visible_to_last(self.adapter.layer_types, stage, number)
                collector.watch(number, stage, visible, query, key, scaling)

        parts = self.adapter
        with AttentionTap(
            (parts.decoder_attention(number), partial(watch, number))
            for number in parts.facts.text.full_layers
        ):
            self.setup = replace(setup, collector=collector)
            try:
                yield collector
            finally:
                self.setup = setup

    @torch.inference_mode()
    def prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        """Run a batch up to the decoder's input, to be reused by any number of runs; the prompt outlives this session.

        The prompt stores the signals that this session's method reads before the decoder;
        `shared_prompt` makes one for several methods.

        Args:
            inputs: the output of the adapter's `encode`.

        Raises:
            MethodError: the method acts inside the tower, before the point where prompts are stored.

        Cost: tower and projector, and O(B L D) of memory while it is kept.
        """
        start = self._start("prompt", inputs)
        clock = Clock(*self.adapter.devices, enabled=self.setup.timed)
        self.setup.signals.begin(inputs)
        with self._active.running(clock):
            return make_prompt(self.setup, inputs, start.layout, clock)

    @torch.inference_mode()
    def prefill(
        self, inputs: Mapping[str, Any] | Prompt, cache: Cache, sample: str = "0"
    ) -> tuple[Tensor, Tensor]:
        """Run one prompt into `cache`, for a decoding loop of the caller.

        Returns:
            logits: (V,) after the last token of the prompt.
            next: (..., 1) position of the next token, on as many axes as the decoder takes.

        Raises:
            ValueError: several prompts, since the caller's steps would have to mask their padding.
            RuntimeError: outside the `with` block, or the method chooses again at each decoding step.
        """
        result = self.prefilled(inputs, cache, sample)
        return result.logits, result.next

    @torch.inference_mode()
    def prefilled(
        self, inputs: Mapping[str, Any] | Prompt, cache: Cache, sample: str = "0"
    ) -> PrefillResult:
        """Do the same as `prefill`, and keep the data for the sample's record.

        Raises:
            NonFiniteLogits: the logits contain NaN or infinity; names the first module with non-finite output.
        """
        start = self._start("prefill", inputs)
        if start.layout.rows != 1:
            raise ValueError(f"{start.layout.rows} prompts; a prefill by itself takes one")
        try:
            return self._run_prefill(start, cache, sample)
        except NonFiniteLogits as error:
            error.origin = non_finite_origin(
                self.adapter, lambda: self._run_prefill(start, DynamicCache(), sample)
            )
            raise

    def _run_prefill(self, start: RunStart, cache: Cache, sample: str) -> PrefillResult:
        inputs = start.inputs
        arguments = {**inputs, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        axes = self.adapter.facts.rotary_axes
        # On several axes the model derives the positions from the images, if any.
        if axes == 1 or not any(start.layout.counts):
            token_positions = inputs["attention_mask"].long().cumsum(1) - 1
            arguments["position_ids"] = (
                token_positions if axes == 1 else token_positions.expand(axes, -1, -1)
            )
        with self._run(start, (sample,)) as current_pass:
            output = self.adapter.model(**arguments)
            if current_pass.steps.needed_by_all:
                raise RuntimeError("this method or backend needs the engine in every step")
            current_pass.check_finite()
        assert current_pass.positions is not None  # the decoder has run
        # A model spread over devices ends on another one; the next step starts on the first.
        next_position = current_pass.positions.amax().to(self.adapter.device) + 1
        return PrefillResult(
            logits=output.logits[0, -1].to(self.adapter.device),
            next=next_position.expand(*current_pass.positions.shape[:-1], 1),
            finish=lambda ids: current_pass.finish(LoopOutput(ids, None, ids.shape[1] - 1)),
        )

    # ------------------------------------------------------------------ one run

    def _start(self, name: str, inputs: Mapping[str, Any] | Prompt) -> RunStart:
        """Return the start of a run.

        Raises:
            RuntimeError: outside the `with` block.
            UserError: a prompt of another model.
            MethodError: the method cannot start from this prompt.
        """
        if not self._open:
            raise RuntimeError(f"Session.{name} was called outside its `with` block")
        if not isinstance(inputs, Prompt):
            if self.method.shrinks_pictures and self.budget.ratio:
                inputs = self.adapter.coarse_inputs(inputs, 1 - self.budget.ratio)
            return RunStart(inputs, self.layout(inputs))
        inputs.check(self.setup)
        return RunStart(inputs.inputs, inputs.layout, inputs)

    @contextmanager
    def _run(self, start: RunStart, samples: tuple[str, ...]) -> Iterator[Pass]:
        """Install the hooks of one pass and show it to the watchers."""
        prompt, layers = start.prompt, self.adapter.decoder.layers
        self.setup.signals.begin(start.inputs, None if prompt is None else prompt.signals)
        replayed: AbstractContextManager[None] = nullcontext()
        if prompt is not None and prompt.trunk is not None and not self.setup.emulate:
            # Stored layers stand in for those before the first that the method changes.
            unchanged = unreduced_layers(self.setup.sites, len(layers))
            replayed = prompt.trunk.replayed(layers[:unchanged], self._tap)
        with (
            Pass(self.setup, start.layout, samples, start.prompt) as current_pass,
            self._active.running(current_pass.clock, current_pass),
            replayed,
        ):
            yield current_pass


@dataclass(frozen=True)
class PromptReader(TokenReducer):
    """Reads the signals that several methods read before the decoder; its plan keeps every token.

    Attributes:
        wanted: signals.
        features: whether any method acts on the projector's input.
    """

    wanted: tuple[Need, ...] = ()
    features: bool = False

    @classmethod
    def of(cls, adapter: ModelParts, methods: Sequence[TokenReducer]) -> PromptReader:
        """Return the reader for all of the methods.

        Raises:
            MethodError: one acts inside the tower.
        """
        wanted: dict[Need, None] = {}
        features = False
        for method in methods:
            sites = method.all_sites(adapter.facts.tower.layers, adapter.facts.text.layers)
            refuse_tower_sites(method, sites)
            features |= reads_features(sites)
            needs = (need for site in sites for need in method.needs(site))
            wanted |= dict.fromkeys(need for need in needs if DECLARED[need.signal].units)
        return cls(tuple(wanted), features)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return one site before the decoder."""
        return (Site("vision" if self.features else "prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals."""
        return self.wanted

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all."""
        n_rows, n_tokens, _ = view.tokens.shape
        return Plan(torch.arange(n_tokens, device=view.tokens.device).expand(n_rows, n_tokens))


def shared_prompt(
    adapter: ModelParts,
    inputs: Mapping[str, Any],
    methods: Sequence[TokenReducer] = (),
    *,
    timed: bool = True,
) -> Prompt:
    """Make a prompt that all of the methods can start from; see `Session.prompt`.

    Raises:
        MethodError: a method acts inside the vision tower, or reads a signal that the model lacks.
    """
    reader = PromptReader.of(adapter, methods)
    with Session(adapter, reader, Budget("kept", 0.0), timed=timed) as session:
        return session.prompt(inputs)


def prompt_with_trunk(
    adapter: ModelParts, prompt: Prompt, depth: int, room: float = float("inf"), **generation: Any
) -> Prompt:
    """Return a prompt with its first decoder layers run, for all methods that start there and act only after them.

    Args:
        adapter: the model.
        prompt: of the batch.
        depth: layers; 0 leaves the prompt as it is, and so do layers that do not hold all of it.
        room: limit in bytes on their states, queries, keys and values; layers beyond it are not stored.
        **generation: arguments of `generate` of the answers to come.

    Cost: these layers of the unreduced prompt.
    """
    if depth == 0 or not all(map(adapter.holds_prompt, range(depth))):
        return prompt
    # Only runs that share layers import it.
    from espalier.harness.engine.trunk import recorded_trunk

    nothing = Budget("kept", 0.0)
    with (
        Session(adapter, NoReduction(), nothing, timed=False) as session,
        recorded_trunk(adapter.decoder, depth, room) as trunk,
    ):
        session.generate(prompt, **generation)
    return replace(prompt, trunk=trunk)
