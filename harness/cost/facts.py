"""Architecture facts of a model, known from its config file alone, and the work of a batch row before the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from espalier.harness.errors import UserError
from espalier.harness.settings import (
    By,
    Count,
    Natural,
    OneOf,
    check_keys,
    defaults,
    gather,
    read_section,
    table,
)


class Work(NamedTuple):
    """Work of one batch row before the decoder; pairs are attended pairs of tokens in one layer.

    Attributes:
        tokens: tokens that the vision tower processes.
        pairs: pairs in a layer with attention inside each image or frame.
        window_pairs: pairs in a layer with attention inside windows (0: the tower has none).
        units: inputs of the projector, each mapped to one visual token.
        pooled: patches that the projector's attention pools into these tokens, padding included (0: it has none).
        stem_tokens: tokens of the stack that runs before the tower (DeepSeek-OCR's SAM), 0 elsewhere.
        stem_pairs: its pairs in a global layer.
        stem_window_pairs: its pairs in a windowed layer.
        stem_window_tokens: attention tokens in a windowed layer, with windows padded at the border.
        stem_lines: pairs of a token and a row or column of tokens that it sees, in a global layer (relative positions).
        stem_window_lines: the same in a windowed layer.
        extra_tokens: tokens of tower layers that ran for a method alone (the projector does not read them), summed over
            these layers.
        extra_pairs: their pairs.
        reprojected: units that went through the projector a second time, after merging.
        spared_attention: tokens that a method inside the tower removed from attentions, summed over its layers.
        spared_mlp: tokens that it removed from MLPs, likewise.
        spared_pairs: attended pairs that it removed, likewise.
    """

    tokens: int = 0
    pairs: int = 0
    window_pairs: int = 0
    units: int = 0
    pooled: int = 0
    stem_tokens: int = 0
    stem_pairs: int = 0
    stem_window_pairs: int = 0
    stem_window_tokens: int = 0
    stem_lines: int = 0
    stem_window_lines: int = 0
    extra_tokens: int = 0
    extra_pairs: int = 0
    reprojected: int = 0
    spared_attention: int = 0
    spared_mlp: int = 0
    spared_pairs: int = 0

    def plus(self, addend: Work) -> Work:
        """Return the sum, entry by entry."""
        return Work(*(a + b for a, b in zip(self, addend, strict=True)))

    def untouched(self) -> Work:
        """Return the work of the same row without a method."""
        return self._replace(
            reprojected=0,
            extra_tokens=0,
            extra_pairs=0,
            spared_attention=0,
            spared_mlp=0,
            spared_pairs=0,
        )


NO_WORK = Work()


#: Replacements of the attention that a class token pays each patch: the token itself; the attention that a patch
#: receives, mean over queries (towers without a class token); or SigLIP's attention-pooling query.
CLASS_ATTENTION = ("token", "mean", "probe")

#: Signals that are the class token's where a tower has one.
OF_CLASS_TOKEN = frozenset({"cls_attention", "cls_logits", "wide_cls_attention"})

#: Text in a row if the model has no class token.
SUBSTITUTES = {
    "mean": "what a patch receives, mean over queries and heads",
    "probe": "what the tower's pooling query pays, mean over heads",
}


@dataclass(frozen=True)
class LinearFacts:
    """Layers of linear attention (gated delta rule) between full ones, as in Qwen3-Next and Qwen3.5.

    A linear layer holds one state of constant size. Full layers gate their attention's output by a second query map.

    Attributes:
        interval: one layer in so many is full, the last of each group.
        key_heads: heads of queries and keys.
        value_heads: heads of values, with a state each.
        key_dim: width of a head of queries and keys.
        value_dim: width of a head of values.
    """

    interval: Count
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count


@dataclass(frozen=True)
class WideFacts:
    """Full layers between sliding ones, with heads of other sizes and keys that are values too, as in DiffusionGemma.

    Attributes:
        interval: one layer in so many is full, the last of each group; the stack's last always is.
        kv_heads: key heads of a full layer.
        head_dim: width of its heads.
    """

    interval: Count
    kv_heads: Count
    head_dim: Count


@dataclass(frozen=True)
class StackFacts:
    """One transformer stack: enough to count its arithmetic and its cache, and to build it.

    Attributes:
        layers: layers that run.
        hidden: width of the residual stream.
        intermediate: width of the MLP that one token goes through (all its experts together).
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        gated: whether the MLP has three matrices (SwiGLU) or two.
        causal: whether attention is.
        window_layers: layers with attention inside windows.
        first_intermediate: MLP width of layer 0 where it differs; None: it does not.
        experts: outputs of a router: the experts, and the gate of a shared one if there is any; 0 for a plain MLP.
        linear: layers of linear attention between the full ones; None: there are none.
        wide: full layers that differ from the sliding ones, which `kv_heads` and `head_dim` describe; None: none do.

    Raises:
        UserError: all layers are linear.
    """

    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    gated: bool
    causal: bool
    window_layers: Natural = 0
    first_intermediate: Count | None = None
    experts: Natural = 0
    linear: LinearFacts | None = None
    wide: WideFacts | None = None

    def __post_init__(self) -> None:
        """Refuse a stack without a layer that holds the prompt."""
        if self.linear is not None and not self.full_layers:
            raise UserError(
                f"model.facts.text.layers={self.layers} leaves no layer that holds the prompt: one in "
                f"{self.linear.interval} does; valid: {self.linear.interval} and more"
            )

    def is_linear(self, layer: int) -> bool:
        """Return whether a layer has linear attention."""
        return self.linear is not None and (layer + 1) % self.linear.interval != 0

    def heads_of(self, layer: int) -> WideFacts | StackFacts:
        """Return the facts that state the key heads of a layer and the width of its heads."""
        if self.wide is None:
            return self
        is_full = (layer + 1) % self.wide.interval == 0 or layer == self.layers - 1
        return self.wide if is_full else self

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with keys and values."""
        return tuple(layer for layer in range(self.layers) if not self.is_linear(layer))

    @property
    def entry_values(self) -> int:
        """Values that one token adds to the caches of all layers."""
        parts = map(self.heads_of, self.full_layers)
        return 2 * sum(part.kv_heads * part.head_dim for part in parts)


@dataclass(frozen=True)
class DiffusionFacts:
    """Facts of a masked-diffusion model's answers: all words at once, unmasked step by step.

    Attributes:
        mask_id: token of positions that are not decided yet.
        end_ids: tokens that end an answer; the answer stops before the first of them.
        forbidden_ids: tokens that are never generated; neither is the mask.
        prefix_cache: whether the model was trained so that the prompt sees itself alone: then its keys and values may
            be kept from step to step.
        length: places of an answer that states no length.
        block: most places of a block that states no length; None: the whole answer.
        shifted: whether the logits at a position are those of the next token (Dream), not of its own.
    """

    mask_id: Natural
    end_ids: tuple[Natural, ...]
    forbidden_ids: tuple[Natural, ...] = ()
    prefix_cache: bool = False
    length: Count = 256
    block: Count | None = None
    shifted: bool = False

    @property
    def silent_ids(self) -> tuple[int, ...]:
        """Tokens that are never generated."""
        return (self.mask_id, *self.forbidden_ids)


def _read_work(key: str, value: Any) -> Work | None:
    """Return a table of counts as `Work`, and None as it is; raise UserError for other keys or values."""
    if value is None:
        return None
    counts = table(key, value)
    check_keys(key, counts, Work._fields)
    return Work(**gather({name: (f"{key}.{name}", n, Natural) for name, n in counts.items()}))


@dataclass(frozen=True)
class CanvasFacts:
    """Facts of answers on canvases of random words, denoised against the cache of all tokens before (DiffusionGemma).

    Attributes:
        length: places of a canvas.
        intermediate: width of the MLP by which the last step's distribution over words becomes an input of the next.
    """

    length: Count
    intermediate: Count


@dataclass(frozen=True)
class ModelFacts:
    """What validation, budgets and the FLOPs counter must know.

    Attributes:
        text: the decoder stack.
        tower: the vision tower (`layers` counts those up to the one that the projector reads; the rest idles).
        stem: the stack that runs before the tower, or None.
        stem_joins: tokens of the stem that become one of the tower's, by an attention among them and an MLP so many
            times as wide as the stem's (MiniCPM-V); 0: there is no such step.
        projector: widths of the projector's linear maps, from its input to the decoder's width.
        gated_projector: whether its last map but one has a second of the same shape, a gate.
        vocabulary: rows of the output head.
        visual_tokens: nominal visual tokens of one image; real counts come from the sample.
        nominal_work: work before the decoder on that image, as a row counts it; None: that of one view, each patch a
            share of one visual token.
        class_attention: meaning of the signal `cls_attention` on this model, one of CLASS_ATTENTION.
        rotary_axes: position axes of the decoder: 1; 3 for time, height and width; 4 with another for the sequence.
        signals: names out of espalier.harness.engine.signals.table.SIGNALS that the adapter can produce.
        patch_tokens: whether visual tokens are the tower's patches one to one, so that methods may act inside it.
        deepstack: tower layers that also feed the decoder: a separate projector maps the n-th one's output, which is
            added to the visual tokens after decoder layer n. Each projector has the widths of `projector`.
        diffusion: settings of a model that denoises its answers, with `text` not causal; None: it generates token by
            token, or a canvas.
        canvas: of a model that denoises canvases; `text` is then the stack that fills the cache. None: it has none.
        unproved: kinds of site where methods may not act, and why; empty: all. Where it names some, the model is known
            from its decoder on: `projector` is a placeholder, and nothing before the decoder is counted.
    """

    text: StackFacts
    tower: StackFacts
    stem: StackFacts | None
    projector: tuple[Count, ...]
    vocabulary: Count
    visual_tokens: Count
    class_attention: Annotated[str, OneOf(CLASS_ATTENTION)]
    rotary_axes: Count
    signals: frozenset[str]
    patch_tokens: bool = False
    deepstack: tuple[Natural, ...] = ()
    diffusion: DiffusionFacts | None = None
    unproved: Mapping[str, str] = field(default_factory=dict)
    gated_projector: bool = False
    stem_joins: Natural = 0
    nominal_work: Annotated[Work | None, By(_read_work)] = None
    canvas: CanvasFacts | None = None

    @property
    def expected_work(self) -> Work:
        """Work before the decoder on an image of nominal size."""
        if self.nominal_work is not None:
            return self.nominal_work
        units = self.visual_tokens
        tokens = units * self.projector[0] // self.tower.hidden + (self.class_attention == "token")
        return Work(tokens=tokens, pairs=tokens**2, units=units)

    @property
    def denoises(self) -> bool:
        """Whether answers are denoised, from masks or on a canvas, instead of generated token by token."""
        return self.diffusion is not None or self.canvas is not None

    @property
    def join_entries(self) -> int:
        """Entries of the matrices of the MLP that joins tokens of the stem."""
        if self.stem is None:
            return 0
        return (self.stem_joins**2 + self.stem_joins) * self.stem.hidden * self.stem.intermediate

    @property
    def projector_entries(self) -> int:
        """Entries of the projector's matrices."""
        products = [a * b for a, b in pairwise(self.projector)]
        return sum(products) + (products[-2] if self.gated_projector else 0)

    def scaled(self, layers: int | None, tower_layers: int | None) -> ModelFacts:
        """Return the facts of the same model with fewer (or more) layers; None leaves a stack alone."""
        text = self.text if layers is None else _scaled(self.text, layers)
        if tower_layers is None:
            return replace(self, text=text)
        kept = self.tower.window_layers * tower_layers // self.tower.layers
        tower = replace(self.tower, layers=tower_layers, window_layers=kept)
        read = tuple(layer for layer in self.deepstack if layer < tower_layers)
        return replace(self, text=text, tower=tower, deepstack=read)


def _scaled(text: StackFacts, layers: int) -> StackFacts:
    """Return a decoder with another number of layers; where some slide, one full layer ends each group."""
    if text.wide is not None:
        wide = replace(text.wide, interval=min(text.wide.interval, layers))
        scaled = replace(text, layers=layers, wide=wide)
        n_sliding = sum(scaled.heads_of(layer) is scaled for layer in range(layers))
        return replace(scaled, window_layers=n_sliding)
    windows = layers
    if text.window_layers < text.layers:
        windows -= layers // (text.layers // (text.layers - text.window_layers))
    return replace(text, layers=layers, window_layers=windows if text.window_layers else 0)


def read_facts(key: str, part: Mapping[str, Any]) -> ModelFacts:
    """Return the facts in the `facts` block of conf/model/<name>.yaml.

    Raises:
        UserError: one line with every fact that is missing, unknown or wrong.
    """
    diffusion = part.get("diffusion")
    tower = defaults(StackFacts) | {"gated": False, "causal": False}
    usual = {
        "text": defaults(StackFacts) | {"gated": True, "causal": diffusion is None},
        **{"tower": tower, "stem": tower, "diffusion": defaults(DiffusionFacts)},
    }
    tables = {
        name: values | table(f"{key}.{name}", part[name])
        for name, values in usual.items()
        if part.get(name) is not None
    }
    facts = read_section(ModelFacts, key, {**defaults(ModelFacts), "stem": None, **part, **tables})
    _check_diffusion(f"{key}.diffusion", facts)
    return facts


def _check_diffusion(key: str, facts: ModelFacts) -> None:
    """Raise UserError unless a model that denoises attends in both directions, and its token ids exist."""
    diffusion = facts.diffusion
    if (diffusion is None) != facts.text.causal:
        causal, block = str(facts.text.causal).lower(), "null" if diffusion is None else "set"
        raise UserError(
            f"{key.replace('diffusion', 'text.causal')}={causal} with {key}={block}: a model that denoises attends in "
            "both directions, and no other does; valid: leave causal out"
        )
    if diffusion is None:
        return
    ids = {
        "mask_id": (diffusion.mask_id,),
        "end_ids": diffusion.end_ids,
        "forbidden_ids": diffusion.forbidden_ids,
    }
    for name, numbers in ids.items():
        for number in numbers:
            if number >= facts.vocabulary:
                raise UserError(
                    f"{key}.{name}={number} is not a token; valid: 0 to {facts.vocabulary - 1} (model.facts.vocabulary)"
                )
    if set(diffusion.end_ids) <= set(diffusion.silent_ids):
        raise UserError(
            f"{key}.end_ids={list(diffusion.end_ids)} names no token that can be generated (mask_id and forbidden_ids "
            "are not); valid: at least one other token"
        )
