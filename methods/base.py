"""What a method is: small bases, and the plain data that passes between a method and the engine.

A method never sees a model. It declares where it acts (`Site`) and what it must read (`Need`), receives a frozen
`View` of tensors, and answers with a `Plan`. The engine alone touches the model: it gathers the views, applies the
plans and restores everything afterwards. The same five words carry all kinds of method:

| kind                       | base            | where                          | answers with          |
| -------------------------- | --------------- | ------------------------------ | --------------------- |
| prune, merge (image, video)| TokenReducer    | `vision`, `prefix`, `layer`    | `Plan`                |
| inside the vision tower    | TokenReducer    | `tower`, picture by picture    | `Plan`                |
| part of the cache, by step | TokenReducer    | `decode`, from one layer on    | `Attended`            |
| diffusion-step reduction   | DenoisingReducer| `layer`, once for each step    | `Plan` (`view.step`)  |
| KV-cache compression       | CacheCompressor | `cache`, once for each layer   | scores and allocation |
| speculative decoding       | Decoder         | reads the target at one site   | tokens for the draft  |

Cache compressors are in methods/compressor.py, denoising reducers in methods/denoiser.py, two methods on one prompt in
methods/composed.py; decoders by the kind of their window in methods/windows.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

Where = Literal["tower", "vision", "prefix", "layer", "cache", "decode"]
Positions = Literal["original", "renumbered"]

#: Every signal a method may ask for. Shapes are those of `View.signals`; producers live in harness/engine/signals.py.
SIGNALS: Mapping[str, str] = {
    "cls_attention": "(B, N) attention that the tower's class token pays each patch, mean over heads, fp32; on towers "
    "without one the substitute that `model.facts.class_attention` names",
    "cls_logits": "(B, N) `cls_attention` before its softmax: scaled products of queries and keys, mean over heads",
    "tower_keys": "(B, N, Dk) keys of the tower layer whose output the projector reads, mean over heads",
    "wide_cls_attention": "(B, N) `cls_attention` of one head as wide as the tower in place of its own heads, fp32",
    "wide_tower_keys": "(B, N, H Dk) `tower_keys` of all heads side by side",
    "tower_states": "(B, N, D) mean of the tower's hidden states over its last third, 16 to 24 of 24, fp32",
    "projected": "(B, N, D) visual tokens as they entered the decoder",
    "text_embeddings": "(B, T, D) words as they entered the decoder, 0 where a row has fewer",
    "all_projected": "(B, M, D) visual tokens as they entered the decoder, those dropped since included, 0 where a row "
    "has fewer",
    "last_attention": "(B, N) attention that the last prompt token pays each visual token, mean over heads, fp32",
    "next_last_attention": "(B, N) `last_attention` in the site's own layer, which has not run yet",
    "mean_attention": "(B, N) attention a visual token receives, mean over all queries that can see it and heads, fp32",
    "text_received_max": "(B, N) attention a visual token receives, largest over heads, mean over the words behind the "
    "image, fp32",
    "visual_received_max": "(B, N) attention a visual token receives, largest over heads, mean over the visual tokens "
    "left, fp32",
    "text_attention": "(B, T, N) attention that each word pays each visual token, mean over heads, fp32, 0 where a row "
    "has fewer words",
    "text_rollout": "(B, T, N) attention rollout, the product of 0.5 A + 0.5 I with A the mean over heads, of the "
    "decoder layers since the last site: one row for each word, fp32, 0 where a row has fewer",
    "sizes": "(P, N) how many patches each slot of a picture stands for, fp32; at `tower` sites",
    "sequence": "(P, E + N) slots of a picture in the order of the last site's `Plan.order`, at the first site of the "
    "raster; a class token (E = 1) stands in front, as -1; at `tower` sites",
    "block_keys": "(P, N, Dk) keys of the site's tower block, mean over heads; at `tower` sites",
    "rollout": "(P, N) attention rollout, as in `text_rollout`, of the tower blocks since the last site: the class "
    "token's row, or the mean over rows where the tower has none, fp32; at `tower` sites",
    "visual_keys": "(B, H_kv, N, Dh) keys of the visual tokens, rotary positions applied",
    "text_queries": "(B, H, T, Dh) queries of the prompt's words, rotary positions applied, 0 where a row has fewer",
    "text_keys": "(B, H_kv, T, Dh) keys of the prompt's words, rotary positions applied, 0 where a row has fewer",
    "text_states": "(B, T, D) words as they enter the site's layer, 0 where a row has fewer",
    "normed": "(B, N, D) visual tokens as they enter the site's layer, after the decoder's final norm",
    "text_normed": "(B, T, D) words as they enter the site's layer, after the decoder's final norm, 0 where a row has "
    "fewer",
    "text_positions": "(B, T) place of each word in the row's prompt, -1 where a row has fewer",
    "visual_positions": "(B, N) place of each visual token in the row's prompt",
    "all_positions": "(B, M) place of each visual token in the row's prompt, those dropped since included, -1 where a "
    "row has fewer",
    "tile": "(B, N) crop of a high-resolution image that each visual token lies in, from 1; 0 for the global view",
    "luma": "(B, N, h + 2, w + 2) BT.601 luma in [-1, 1] of the pixels that each visual token was made of, as the "
    "tower sees them, with one pixel of border on each side, 0 outside the picture; fp32 or wider",
    "prior": "(B, N) calibrated mean of `last_attention` over many images at the token's place in its view (see "
    "harness/calibration), fp32",
}


@dataclass(frozen=True)
class Site:
    """A place where a method acts.

    `tower` is the inside of the vision tower's block `layer` (0-based), between its attention and its MLP; `vision` is
    the tower's output before the projector, `prefix` the projected tokens before decoder layer 0, `layer`
    the hidden states that enter decoder layer `layer` (0-based: layers 0..layer-1 still see every token), `cache` the
    key-value cache after prefill, `decode` the generation loop: for a token reducer the steps in which one new token
    enters decoder layer `layer`, when the layers below still see every entry of the cache.
    """

    where: Where
    layer: int = 0


@dataclass(frozen=True)
class Need:
    """A signal that must be in the view. `layer=None` means the natural one.

    For attention signals that is the decoder layer just before the site; for tower signals the layer whose output the
    projector reads.
    """

    signal: str
    layer: int | None = None

    @property
    def key(self) -> str:
        """Name under which the tensor stands in `View.signals`."""
        return self.signal if self.layer is None else f"{self.signal}@{self.layer}"


@dataclass(frozen=True)
class View:
    """What a method may read at one site. Rectangular: all B rows have the same number N of visual tokens.

    At `tower` sites a row is a picture (an image, a crop, a frame), a token is a slot of the tower, and a class token
    is never among them. The engine groups the rows of a batch by their token count and budget, so a method never meets
    padding.

    Attributes:
        site: where the method is asked.
        tokens: (B, N, D) visual tokens as they stand at the site, in sequence order.
        grid: (B, N, 4) integer coordinates of each token: image or frame, view, row, column. Views are an image's
            global view (0), its stitched crops (1), or its single tiles where a model does not stitch them. Tokens of
            one view stand together and fill one rectangle.
        signals: tensors asked for through `TokenReducer.needs`, by `Need.key`.
        generators: one CPU `torch.Generator` for each row, seeded by (run seed, sample); the only source of chance.
        step: denoising step of a diffusion model, 0 otherwise.
    """

    site: Site
    tokens: Tensor
    grid: Tensor
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    generators: Sequence[torch.Generator] = ()
    step: int = 0

    def __post_init__(self) -> None:
        """Raise MethodError unless there is one place in the grid for each token."""
        if self.grid.shape != (*self.tokens.shape[:2], 4):
            raise MethodError(
                f"a grid {tuple(self.grid.shape)} does not match tokens {tuple(self.tokens.shape)}"
            )


@dataclass(frozen=True)
class Assignment:
    """Merging in which every token goes to at most one kept slot: `new[k] = sum of weight[j] * token[j], slot[j] == k`.

    Attributes:
        slot: (B, N) index into the kept tokens, or -1 for a token that is only dropped.
        weight: (B, N) weight of each token in its slot; a kept token's own weight counts too.
    """

    slot: Tensor
    weight: Tensor

    def apply(self, tokens: Tensor, n_keep: int) -> Tensor:
        """Return the merged tokens (B, n_keep, D), accumulated in fp32. Cost: O(N D)."""
        merged = tokens.new_zeros(
            tokens.shape[0], n_keep + 1, tokens.shape[2], dtype=_accumulator(tokens)
        )
        slot = torch.where(
            self.slot < 0, n_keep, self.slot
        )  # the extra row swallows what is dropped
        weighted = tokens.to(merged.dtype) * self.weight.to(merged.dtype).unsqueeze(-1)
        merged.scatter_add_(1, slot.unsqueeze(-1).expand_as(weighted), weighted)
        return merged[:, :n_keep].to(tokens.dtype)


@dataclass(frozen=True)
class Mixture:
    """Merging in which a token may flow into several kept slots: `new = matrix @ tokens` with matrix (B, K, N)."""

    matrix: Tensor

    def apply(self, tokens: Tensor, n_keep: int) -> Tensor:
        """Return the merged tokens (B, n_keep, D), accumulated in fp32. Cost: O(n_keep N D)."""
        accumulator = _accumulator(tokens)
        return (self.matrix.to(accumulator) @ tokens.to(accumulator)).to(tokens.dtype)


@dataclass(frozen=True)
class Plan:
    """What a token reducer decided. Plans are data; harness/engine applies them in one place.

    Attributes:
        kept: (B, K) indices of the kept tokens, ascending, relative to `View.tokens`.
        merge: how dropped tokens flow into kept ones, or None for pure pruning. At `tower` sites the sizes of an
            `Assignment` add up by slot, those of a `Mixture` are mixed by its matrix.
        spare: (B,) kept tokens that only fill up the count, because the method's own rule had none left to choose;
            None for methods whose rule always has.
        order: (B, K) at `tower` sites, places in `kept` in the order in which the next site's `sequence` has them; the
            tokens themselves stay ascending. None: ascending there, too.
    """

    kept: Tensor
    merge: Assignment | Mixture | None = None
    spare: Tensor | None = None
    order: Tensor | None = None

    def check(self, n_tokens: int, keep: int | None) -> None:
        """Raise PlanError unless `kept` is strictly ascending, inside [0, n_tokens) and exactly `keep` wide.

        An `order`, if there is one, must hold each place of `kept` once.

        `keep=None` accepts any width of at least one (adaptive methods).
        """
        width = self.kept.shape[1]
        if width == 0 or (keep is not None and width != keep):
            raise PlanError(f"plan keeps {width} tokens, the budget asks for {keep}")
        steps = torch.diff(self.kept, dim=1) > 0
        inside = (self.kept[:, 0] >= 0) & (self.kept[:, -1] < n_tokens)
        if not bool(steps.all() & inside.all()):
            raise PlanError(f"kept indices must ascend strictly within [0, {n_tokens})")
        places = torch.arange(width, device=self.kept.device).expand_as(self.kept)
        if self.order is not None and not torch.equal(self.order.sort(dim=1).values, places):
            raise PlanError(f"an order must hold each of the {width} kept tokens once")


@dataclass(frozen=True)
class Attended:
    """Which visual entries of the cache one decoding step attends to.

    Attributes:
        entries: (B, N) booleans, or None for all entries.
        reference: (B, N) whatever the method wants to see again at the next step, such as the attention it chose by.
    """

    entries: Tensor | None
    reference: Tensor


class PlanError(ValueError):
    """A method broke the contract of `Plan`."""


class MethodError(ValueError):
    """A method cannot work with these hyper-parameters or on this model."""


@dataclass(frozen=True)
class Method(ABC):
    """Common to all bases: a frozen dataclass whose fields are the hyper-parameters under the paper's names."""

    #: Whether one prefill with `Plan`s is all that it asks for, which is what an engine session carries.
    in_one_prefill: ClassVar[bool] = False
    #: Whether a draft guesses the answer ahead: then the budget's ratio is what the draft does without, and may be 1.
    drafts: ClassVar[bool] = False

    @property
    def takes_draft(self) -> bool:
        """Whether a second model drafts."""
        return False

    @property
    def parts(self) -> tuple[Method, ...]:
        """Return the methods that it is made of: itself, unless it is a composition."""
        return (self,)

    @abstractmethod
    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return where the method acts in a model of `depth` decoder layers, first to last.

        Raises:
            MethodError: a layer hyper-parameter lies outside the model.
        """

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals that `View.signals` must hold at `site`."""
        del site
        return ()

    def read_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        """Return where the method reads, acting there or not, in a tower of `blocks` blocks and `depth` layers."""
        del blocks
        return self.sites(depth)


@dataclass(frozen=True)
class TokenReducer(Method):
    """Drops or merges visual tokens at `vision`, `prefix` or `layer` sites."""

    in_one_prefill: ClassVar[bool] = True

    @property
    def adaptive(self) -> bool:
        """Whether `plan` may return another count than asked.

        The engine then asks for one row at a time, and the budget holds for the mean over a set at most.
        """
        return False

    @property
    def proportional(self) -> bool:
        """True if later tower blocks weigh a slot's key by its size (log-size added to the logits)."""
        return False

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return where the method acts in a tower of `blocks` running blocks, before all other sites.

        Raises:
            MethodError: a layer hyper-parameter lies outside the tower.
        """
        del blocks
        return ()

    def all_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        """Return the sites in a tower of `blocks` blocks, then those in and around a decoder of `depth` layers."""
        return self.tower_sites(blocks) + self.sites(depth)

    def read_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        """Return all sites, the decode site last."""
        step = self.decode_site(depth)
        return self.all_sites(blocks, depth) + ((step,) if step else ())

    def decode_site(self, depth: int) -> Site | None:
        """Return where the method chooses what decoding steps attend to, `Site("decode", layer)`, or None.

        It is no part of `sites`: nothing is dropped there, and the budget does not count it. Layers from `layer` on
        follow `attend`; `needs` may ask for `last_attention`, which the new token pays in layer `layer - 1`.
        """
        del depth
        return None

    def attend(self, view: View, last: Attended | None) -> Attended:
        """Choose among the N visual entries at one decoding step; a pure function of its arguments.

        Args:
            view: `tokens` are (B, N, 0), since only the cache is left of them.
            last: what it answered at the step before, None at the first one.
        """
        raise NotImplementedError(f"{type(self).__name__} has a decode site and no `attend`")

    def needs_frames(self) -> bool:
        """Return whether the method compares frames, so that it works on videos alone."""
        return False

    def positions(self, depth: int) -> Positions:
        """Return what the method's released code does with positions; `engine.positions=method` follows it.

        The habit of most: closed gaps where the prompt is built, before the decoder; original ones between its layers.
        A model whose positions have several axes keeps them whatever this says.
        """
        before_decoder = all(site.where != "layer" for site in self.sites(depth))
        return "renumbered" if before_decoder else "original"

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share of the original visual tokens kept after each site, for one scalar in (0, 1].

        Must not increase from site to site, and must grow with `share`; harness/budget.py solves it for the budget
        rule and turns it into integers. The default keeps the same share from the first site on.
        """
        return (share,) * n_sites

    @abstractmethod
    def plan(self, view: View, keep: int) -> Plan:
        """Choose `keep` of the view's N tokens, 1 to N; a pure function of its arguments."""

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan, checked on the way in and out; this is what the engine calls.

        Raises:
            PlanError: `keep` lies outside 1 to N (to an adaptive method it may be more, for it is only a wish), or the
                plan breaks its contract.
        """
        n_tokens = view.tokens.shape[1]
        if keep < 1 or (keep > n_tokens and not self.adaptive):
            raise PlanError(f"asked to keep {keep} of {n_tokens} tokens; valid: 1 to {n_tokens}")
        plan = self.plan(view, keep)
        plan.check(n_tokens, None if self.adaptive else keep)
        return plan


#: Tokens drafted in a round. auto: the ratio of the measured times of one step of target and draft. best: what promises
#: most by the times and the acceptance of the answers so far.
Window = int | Literal["auto", "best"]

#: Who drafts: nobody (the target decodes alone), a draft model, or the target itself on a part of its cache.
Source = Literal["nobody", "model", "cache"]


@dataclass(frozen=True)
class Decoder(Method):
    """Speculative decoding: who drafts, what the draft sees of the images, how far it goes, and when.

    The target keeps every token. What a decoder reads at its sites is the target's prefill, and what it chooses there
    is what the draft sees. The budget's ratio is the share of visual tokens that the draft does without.
    """

    drafts: ClassVar[bool] = True
    source: ClassVar[Source] = "model"
    #: Whether drafting goes on while the target verifies.
    overlap: ClassVar[bool] = False

    @property
    def takes_draft(self) -> bool:
        """Whether a second model drafts."""
        return self.source == "model"

    @property
    def window(self) -> Window:
        """Tokens drafted in a round."""
        return 1

    @property
    def text_only(self) -> bool:
        """Whether the draft sees no visual token at all."""
        return False

    @property
    def tree(self) -> tuple[int, ...]:
        """Parents of a drafted tree's tokens, level by level, -1 for a first token; empty: a chain is drafted."""
        return ()

    @property
    def guided(self) -> bool:
        """Whether the target chooses what the draft sees: `sites` has one site, `choose` answers there."""
        return False

    @property
    def reducer(self) -> TokenReducer | None:
        """What the draft does to its own visual tokens, where the target does not guide it; None: nothing."""
        return None

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return where the target is read: one site if `guided`, else none; layer `depth` is behind the last one."""
        del depth
        return ()

    def choose(self, view: View, keep: int) -> Tensor:
        """Choose what the draft sees, a pure function of its arguments.

        Returns:
            (B, keep) visual tokens, ascending; where the draft is the target on a part of its cache,
            (B, layers, keep) of each layer.
        """
        raise NotImplementedError(f"{type(self).__name__} has a site and no `choose`")


def _accumulator(tokens: Tensor) -> torch.dtype:
    """Accumulate half precision in fp32 and leave wider types as they are."""
    return torch.promote_types(tokens.dtype, torch.float32)
