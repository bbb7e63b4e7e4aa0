"""The session: installs one method on one model for the length of a `with` block, and always restores the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.engine.artifacts.priors import Prior
from espalier.harness.engine.decode_loop import generate_answers
from espalier.harness.engine.engine_guards import check_generation, check_text_config
from espalier.harness.engine.evictor import CacheEvictor
from espalier.harness.engine.finite_logits import NonFiniteLogits, non_finite_origin
from espalier.harness.engine.forward_pass import Pass
from espalier.harness.engine.layout import Layout
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.prompt import Prompt, make_prompt
from espalier.harness.engine.record import Generated
from espalier.harness.engine.shared_prefill import TrunkReplay, unreduced_layers
from espalier.harness.engine.signal_watchers import ActivePass, install
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import Backend, DecodeLoop, PositionPolicy, Separators
from espalier.methods.base import MethodError, TokenReducer


@dataclass(frozen=True)
class PrefillResult:
    """A prompt that has been run: `logits` (V,) behind it, the `next` position (..., 1), and how its record is closed.

    Logits and position are on the device that inputs go to.

    `finish` takes the answer's ids (1, T) when decoding is over, and counts the time since the prefill as decoding.
    """

    logits: Tensor
    next: Tensor
    finish: Callable[[Tensor], Generated]


@dataclass(frozen=True)
class RunStart:
    """What a run begins with: what the model is given, its layout, and the prompt that stands for the vision side."""

    inputs: Mapping[str, Any]
    layout: Layout
    prompt: Prompt | None = None


class Session:
    """Runs `generate` with visual tokens reduced by a method.

    `backend="drop"` removes tokens physically: hidden states, rotary tables, masks and cache all get shorter.
    `backend="emulate"` is the slow reference: the full sequence runs everywhere and explicit masks hide what was
    dropped. Both make the same choices; tests hold them against each other.

    Args:
        adapter: the model.
        method: the reducer; a method without sites leaves the model alone.
        budget: rule and ratio.
        seed: run seed, from which every sample's generator is derived.
        backend: `drop` or `emulate`.
        positions: `original` keeps the position ids of kept tokens, `renumbered` closes the gaps after every site,
            `method` does what the method's released code does.
        prior: calibrated prior, for methods that need one.
        timed: whether phases are timed (the device is synchronised at both ends of each).
        evicting: what leaves the cache after each prefill; with a ratio of 0, or None: nothing.
        decode: `loop` says answers by the engine's own loop, `generate` by the library's, which beams always take.
        separators: `keep` leaves newline and separator tokens of pictures, `candidates` makes them visual tokens.

    Raises:
        MethodError: the model cannot carry the method.
        UserError: the model's attention or layers are not supported.
    """

    #: Whether it runs denoising steps, which methods of every prefill take as well.
    steps: ClassVar[bool] = False

    def __init__(
        self,
        adapter: Parts,
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
    ) -> None:
        if not method.in_one_prefill and not self.steps:
            raise MethodError(
                f"{type(method).__name__} is not a token reducer; sessions carry token reducers only"
            )
        if evicting is not None and evicting.ratio > 0 and backend == "emulate":
            raise UserError(
                "engine.backend='emulate' hides tokens of the prompt; cache entries are evicted for real; valid: drop"
            )
        check_text_config(adapter.decoder.config)
        self.adapter = adapter
        self.method = method
        self.budget = budget
        self._decode = decode
        self._separators = separators
        self._active = ActivePass()
        self.setup, self._tap = install(
            adapter,
            method,
            budget,
            seed=seed,
            emulate=backend == "emulate",
            positions=positions,
            prior=prior,
            timed=timed,
            active=self._active,
            evicting=evicting if evicting is not None and evicting.ratio > 0 else None,
        )
        self._open = False

    def __enter__(self) -> Session:
        """Wrap the attention functions that the method's signals need."""
        self._tap.__enter__()
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the model."""
        self._open = False
        self._tap.__exit__(kind, error, trace)

    def layout(self, inputs: Mapping[str, Any]) -> Layout:
        """Return the layout of a batch, with the candidates that this session has."""
        return self.adapter.layout(inputs, self._separators)

    @torch.inference_mode()
    def generate(
        self,
        inputs: Mapping[str, Any] | Prompt,
        samples: Sequence[str] | None = None,
        **generation: Any,
    ) -> Generated:
        """Generate answers for one left-padded batch.

        Args:
            inputs: what the adapter's `encode` returned, or a prompt made of it, which leaves the vision side out.
            samples: one unique id for each row; they seed the rows' generators.
            **generation: arguments of transformers' `generate`.

        Raises:
            UserError: an argument that the engine cannot honour, a prompt of another model.
            MethodError: the method cannot start from this prompt.
            PlanError: the method broke its contract.
            NonFiniteLogits: the model's logits hold NaN or infinity; the first module that put them out is named.
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
            first_token = {**generation, "max_new_tokens": 1, "min_new_tokens": None}
            error.origin = non_finite_origin(
                self.adapter, lambda: self._generate(start, names, first_token)
            )
            raise

    def _generate(
        self, start: RunStart, names: tuple[str, ...], generation: Mapping[str, Any]
    ) -> Generated:
        with self._run(start, names) as current_pass:
            result, loop = generate_answers(
                self.adapter, current_pass, start.inputs, generation, self._decode
            )
            return current_pass.finish(result.ids, result.logits, result.steps, loop)

    @torch.inference_mode()
    def prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        """Run a batch up to the decoder's entry, once for all who start there; it outlives this session.

        The prompt holds what this session's method reads before the decoder;
        `espalier.harness.engine.shared_prompt.shared_prompt` makes one for several methods.

        Args:
            inputs: what the adapter's `encode` returned.

        Raises:
            MethodError: the method acts inside the tower, in front of the place where prompts are kept.

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
        """Run one prompt into `cache`, for a decoding loop of the caller's own.

        Returns:
            logits: (V,) behind the last token of the prompt.
            next: (..., 1) position of the token that follows, on as many axes as the decoder takes.

        Raises:
            ValueError: several prompts, whose padding steps of one's own would have to mask.
            RuntimeError: outside the `with` block, or the method chooses anew at each decoding step.
        """
        result = self.prefilled(inputs, cache, sample)
        return result.logits, result.next

    @torch.inference_mode()
    def prefilled(
        self, inputs: Mapping[str, Any] | Prompt, cache: Cache, sample: str = "0"
    ) -> PrefillResult:
        """Do what `prefill` does, and keep what the record of the sample needs.

        Raises:
            NonFiniteLogits: the logits hold NaN or infinity; the first module that put them out is named.
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
        # On several axes the model derives the positions from the pictures, where there are any.
        if axes == 1 or not any(start.layout.counts):
            token_positions = inputs["attention_mask"].long().cumsum(1) - 1
            arguments["position_ids"] = (
                token_positions if axes == 1 else token_positions.expand(axes, -1, -1)
            )
        with self._run(start, (sample,)) as current_pass:
            output = self.adapter.model(**arguments)
            if current_pass.needs_steps:
                raise RuntimeError("this method or backend needs the engine in every step")
            current_pass.check_finite((1,))
        assert current_pass.positions is not None  # the decoder has run
        # Wherever a spread model ends, what goes on from here begins on its first device.
        next_position = current_pass.positions.amax().to(self.adapter.device) + 1
        return PrefillResult(
            logits=output.logits[0, -1].to(self.adapter.device),
            next=next_position.expand(*current_pass.positions.shape[:-1], 1),
            finish=lambda ids: current_pass.finish(ids, None),
        )

    # ------------------------------------------------------------------ one run

    def _start(self, name: str, inputs: Mapping[str, Any] | Prompt) -> RunStart:
        """Return what a run begins with.

        Raises:
            RuntimeError: outside the `with` block.
            UserError: a prompt of another model.
            MethodError: the method cannot start from this prompt.
        """
        if not self._open:
            raise RuntimeError(f"Session.{name} was called outside its `with` block")
        if not isinstance(inputs, Prompt):
            return RunStart(inputs, self.layout(inputs))
        inputs.check(self.setup)
        return RunStart(inputs.inputs, inputs.layout, inputs)

    @contextmanager
    def _run(self, start: RunStart, samples: tuple[str, ...]) -> Iterator[Pass]:
        """Install the hooks of one pass and let the watchers see it."""
        self.setup.signals.begin(start.inputs, start.prompt.signals if start.prompt else None)
        with (
            Pass(self.setup, start.layout, samples, start.prompt) as current_pass,
            self._active.running(current_pass.clock, current_pass),
            self._replay(start.prompt),
        ):
            yield current_pass

    def _replay(self, prompt: Prompt | None) -> TrunkReplay:
        """Return what puts a prompt's layers in the place of those that the method leaves as they are."""
        layers, setup = self.adapter.decoder.layers, self.setup
        count = 0 if setup.emulate else unreduced_layers(setup.sites, len(layers))
        return TrunkReplay(None if prompt is None else prompt.trunk, layers[:count], self._tap)
