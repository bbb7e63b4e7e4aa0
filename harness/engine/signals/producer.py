"""Producers of signals: they capture during a pass and return values per visual token; `Signals` calls a method's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layer_inputs import visible_to_last
from espalier.harness.engine.layout import (
    Layout,
    Stage,
    Visibility,
    fill_padding,
    take,
    visibility_of,
)
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.priors import Prior
from espalier.harness.engine.signals.table import DECLARED, PRODUCERS
from espalier.methods.base import MethodError, Need, PlanError, Site, TokenReducer

#: Key of a step's inputs with the mask (B, G) of the answer's tokens, the last ones, that are deciders.
DECIDERS = "deciders"

#: Key of the step's number.
STEP = "step"

#: Key of the indices (n,) of the visual tokens that the first step kept, of each row; none in the first step.
FIRST_KEPT = "first_kept"


@dataclass(frozen=True, eq=False)
class Context:
    """Data shared by all producers of a session.

    Attributes:
        parts: the model's facts and modules.
        sites: of the method, first to last.
        prior: calibrated prior, for methods that need one.
        stage: returns the current stage while a decoder layer of a prefill runs, None outside a prefill.
        stack_visibility: attention visibility of a decoder with layers alike.
    """

    parts: ModelParts
    sites: tuple[Site, ...]
    prior: Prior | None
    stage: Callable[[], Stage | None]
    stack_visibility: Visibility

    def visibility(self, stage: Stage, layer: int) -> Visibility:
        """Return the attention visibility in a decoder layer."""
        types = self.parts.layer_types
        return self.stack_visibility if types is None else types.visibility(stage, layer)

    def visible_to_last(self, stage: Stage, layer: int) -> Tensor:
        """Return (B, M): the slots that the prompt's last token sees in a decoder layer."""
        return visible_to_last(self.parts.layer_types, stage, layer)

    @property
    def class_tokens(self) -> int:
        """1 if slot 0 of each of the tower's images is a class token."""
        return int(self.parts.facts.class_attention == "token")


@dataclass(frozen=True, eq=False)
class ViewRequest:
    """The rows and tokens of a view.

    Attributes:
        layout: of the batch (its rows already repeated for beams).
        origin: (b, n) original visual index of the tokens in the view.
        rows: the batch rows of the view.
    """

    layout: Layout
    origin: Tensor
    rows: list[int] | slice

    def select(self, table: Tensor) -> Tensor:
        """Return (b, n, ...): the view's tokens out of (B, N, ...) values of all original visual tokens."""
        values, index = table[self.rows], self.origin.to(table.device)
        if values.dim() == 2:
            return take(values, index, -1)
        view_values = take(values.flatten(2), index, -2)
        return view_values.view(*view_values.shape[:2], *values.shape[2:])

    @property
    def real(self) -> Tensor:
        """(b, M) which entries of `layout.visual` are real tokens of the view's rows."""
        return fill_padding(self.layout.visual, self.layout.counts, -1)[self.rows] >= 0


class Producer:
    """Makes one signal for one site, or for all sites at once. Methods that do not apply keep the defaults.

    In a pass the engine calls `begin`, then `enter` at the decoder's input, then `reach` when states arrive at the
    site, then `view_values` for each view; watchers and hooks run with their modules.

    Args:
        context: of the session.
        site: where the method needs the signal; for a shared producer, the first such site.
        need: the signal, and the layer if the method names one.
    """

    #: Whether the signal is the same at every site, so that one producer serves all of them.
    shared: ClassVar[bool] = False

    #: Values stored in a prompt, used instead of a capture.
    kept_units: Tensor | None = None

    def __init__(self, context: Context, site: Site, need: Need) -> None:
        self.context = context
        self.site = site
        self.need = need

    @classmethod
    def attended(cls, need: Need, site: Site, sites: Sequence[Site]) -> Sequence[int]:
        """Return the decoder layers with attention that the signal is made from, for one of a method's `sites`."""
        return ()

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention modules with queries and keys to watch, for as long as the session is open."""
        return ()

    @property
    def watched_layers(self) -> Sequence[nn.Module]:
        """The tower's layers with outputs to read, which therefore must run."""
        return ()

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Hook `watched_layers` for one pass; `clock` counts its work as selection."""
        return []

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the last pass's captures; `inputs` are those of the next pass."""

    def units(self) -> Tensor:
        """Return the signal for each unit of the projector, if it is read before the decoder."""
        raise NotImplementedError

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Capture from the states (B, L, D) that enter the decoder, for a batch of this layout."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Capture from the states (B, M, D) that enter the layer of the site, before the method plans."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return the signal in the shape that it declares."""
        raise NotImplementedError


class DecoderSignal(Producer):
    """Base of signals from a decoder layer's attention as it runs: the layer before the site, or the named one."""

    #: Whether a view has all values of its rows, whichever tokens it holds.
    by_row: ClassVar[bool] = False
    _captured: Tensor | None = None
    _width = 0
    #: Positions of an answer after the prompt: 0 outside denoising steps.
    _answer_length = 0

    @classmethod
    def attended(cls, need: Need, site: Site, sites: Sequence[Site]) -> Sequence[int]:
        """Return the layer."""
        return (site.layer - 1 if need.layer is None else need.layer,)

    @property
    def layer(self) -> int:
        """The layer."""
        return self.attended(self.need, self.site, self.context.sites)[0]

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention of the layer."""
        self._check_layer(self.layer)
        return [(self.context.parts.decoder_attention(self.layer), self._watch)]

    def _check_layer(self, layer: int) -> None:
        """Raise PlanError unless a decoder layer has run its attention by the time of the site."""
        first = self.site.shortens
        last = (self.site.layer if first is None else first) - 1
        if not 0 <= layer <= last:
            place = f"at the site {self.site.where} {self.site.layer}"
            raise PlanError(
                f"`needs` returns {self.need} {place}, and no such decoder layer has run by then; "
                + (
                    f"valid for layer: 0 to {last}"
                    if last >= 0
                    else "valid: a site before a later layer"
                )
            )

    def _watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        stage = self.context.stage()
        if stage is not None:
            self._captured = self.capture(stage.move(query.device), query, key, scaling)

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return the values to keep, from (B, H, S, Dh) queries and (B, H_kv, S, Dh) keys of a prefill."""
        raise NotImplementedError

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the captured values."""
        self._captured = None
        self._answer_length = answer_length(inputs)

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Store the number of visual tokens of the longest row."""
        self._width = layout.visual.shape[1]

    @property
    def captured(self) -> Tensor:
        """Values captured in this pass."""
        assert self._captured is not None  # the layer runs before the site
        return self._captured

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return the captured values of the view's tokens, or of its rows."""
        return self.captured[request.rows] if self.by_row else request.select(self.captured)

    def per_token(self, stage: Stage, values: Tensor) -> Tensor:
        """Return (B, S, ...) per original visual token, so that a later site finds its tokens' values by index."""
        flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(-1)
        table = flat.new_zeros(stage.slots.shape[0], self._width, flat.shape[2])
        index = stage.origin.unsqueeze(-1).expand(-1, -1, flat.shape[2])
        table.scatter_(1, index, take(flat, stage.slots, -2))
        return table.view(*table.shape[:2], *values.shape[2:])


def answer_length(inputs: Mapping[str, Any]) -> int:
    """Return the number of answer positions after the prompt: 0 outside denoising steps."""
    deciders: Tensor | None = inputs.get(DECIDERS)
    return 0 if deciders is None else deciders.shape[1]


def word_states(states: Tensor, words: Tensor) -> Tensor:
    """Return the (B, ..., T, D) states in the slots `words` (B, T) of (B, ..., M, D); words are never dropped."""
    real = (words >= 0).view(words.shape[0], *[1] * (states.dim() - 3), -1, 1)
    return take(states, words.clamp(min=0), -2) * real


class Signals:
    """Captures the signals that a method needs during a pass and returns them per visual token.

    Args:
        adapter: the model's facts and modules.
        method: the method with these needs.
        sites: its sites.
        prior: calibrated prior, for methods that need one.
        stage: returns the current stage while a decoder layer of a prefill runs, None outside a prefill.

    Raises:
        MethodError: the model lacks a signal, or a calibration is missing.
    """

    def __init__(
        self,
        adapter: ModelParts,
        method: TokenReducer,
        sites: tuple[Site, ...],
        prior: Prior | None,
        stage: Callable[[], Stage | None],
    ) -> None:
        visibility = visibility_of(adapter.decoder.config)
        self._method = method
        self._context = Context(adapter, sites, prior, stage, visibility)
        self._producers: list[Producer] = []
        self._by_site: dict[Site, dict[str, Producer]] = {}
        shared: dict[str, Producer] = {}
        for site in sites:
            self._by_site[site] = {}
            for need in method.needs(site):
                available = adapter.facts.signals
                if need.signal not in available:
                    raise MethodError(
                        f"signal {need.signal!r} is not available on this model; valid: {', '.join(sorted(available))}"
                    )
                if DECLARED[need.signal].inside_tower:
                    continue
                producer = shared.get(need.key)
                if producer is None:
                    producer = PRODUCERS.load(need.signal)(self._context, site, need)
                    self._producers.append(producer)
                if producer.shared:
                    shared[need.key] = producer
                self._by_site[site][need.key] = producer

    # ------------------------------------------------------------------ capturing

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Return the modules that an `AttentionTap` must watch, with their watchers."""
        pairs: list[tuple[nn.Module, Watcher]] = []
        for producer in self._producers:
            try:
                pairs += producer.watchers()
            except PlanError as error:
                raise PlanError(f"method {type(self._method).__name__}: {error}") from None
        return pairs

    @property
    def watched_layers(self) -> list[nn.Module]:
        """The tower's layers with outputs that are read."""
        return [layer for producer in self._producers for layer in producer.watched_layers]

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Watch the tower's layers for one pass, if their states are needed; the caller removes the handles."""
        return [handle for producer in self._producers for handle in producer.hook_tower(clock)]

    def begin(
        self, inputs: Mapping[str, Any], kept_units: Mapping[str, Tensor] | None = None
    ) -> None:
        """Drop the last pass's captures; `inputs` are those of the next pass.

        Args:
            inputs: of the batch.
            kept_units: a stored prompt's signals before the decoder, as `kept_units` returned them.
        """
        for producer in self._producers:
            producer.begin(inputs)
            producer.kept_units = (kept_units or {}).get(producer.need.key)

    def before_decoder(self) -> set[str]:
        """Return the keys of the needs that are read before the decoder."""
        needs = (producer.need for producer in self._producers)
        return {need.key for need in needs if DECLARED[need.signal].units}

    def kept_units(self) -> dict[str, Tensor]:
        """Return the signals read before the decoder, for each unit of the projector."""
        keys = self.before_decoder()
        return {
            producer.need.key: producer.units()
            for producer in self._producers
            if producer.need.key in keys
        }

    def start(self, layout: Layout, hidden: Tensor) -> None:
        """Capture the states (B, L, D) that enter the decoder."""
        for producer in self._producers:
            producer.enter(layout, hidden)

    def reach(self, site: Site, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Capture the states (B, M, D) that enter the layer of `site`, before the method plans."""
        for producer in self._by_site[site].values():
            producer.reach(stage, hidden, rotary)

    # ------------------------------------------------------------------ handing over

    def collect(
        self, site: Site, layout: Layout, origin: Tensor, rows: list[int] | slice
    ) -> dict[str, Tensor]:
        """Return the signals of `site` for the given rows, on the card of `origin`: the only place that moves them.

        Producers capture where a module runs, and a model may be spread over several cards.

        Args:
            site: the site being decided.
            layout: of the batch (its rows already repeated for beams).
            origin: (b, n) original visual index of the tokens in the view.
            rows: the batch rows of the view.
        """
        request = ViewRequest(layout, origin, rows)
        return {
            key: producer.view_values(request).to(origin.device)
            for key, producer in self._by_site[site].items()
        }
