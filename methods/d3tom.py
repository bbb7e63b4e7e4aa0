"""D3ToM: decider-guided dynamic token merging for diffusion MLLMs (AAAI 2026, arXiv 2511.12280).

At each denoising step, between attention and MLP of decoder layer K, the answer's tokens unveiled in the step before
(the deciders D, eq. 4) rank the visual tokens by the attention they pay them in that layer, A being the mean over
heads:

    s_j  = sum_{i in D} A_ij                                                       (5), (6)
    keep = the N_keep tokens with the highest s_j, the lower index first           (7)
    c(i) = argmax_{j in keep} cos(z_i, z_j)       for every other visual token i   (9)
    h_j <- h_j + sum_{i: c(i) = j} h_i                                             (10)

    paper    (state=attended, similarity=attended): h and z are the states after the layer's attention
    official (state=entering, similarity=normed):   h are the states x that entered the layer, and a kept token then
             adds its own attention's output: h_j = x_j + sum x_i + att_j; z is the layer's input norm of x

Visual tokens of the released code are all positions of a picture, newlines included (newlines=merge: 1008 of a square
one on LaViDa), of which int(N (1 - r)) stay (rounding=down).

The merged sequence lasts for one step: the next one starts from every visual token again. Before the first step no
token is unveiled, so that step keeps all. The released code also renumbers the positions of the remaining tokens from 0
after layer K, as engine.positions=method does.

Where the prompt is cached (Section 4.4), A is the deciders' attention to its entries in layer K, and in every layer
after K the entries of dropped visual tokens merge into kept ones, keys k without rotary positions and values v alike:

    c(i) = argmax_j cos(mean over heads k_i, mean over heads k_j)                  (20)
    k_j <- nu_k s / |s|,  s = k_j + sum_{i: c(i) = j} k_i,  and likewise v_j       (21)

    nu is the mean norm of these vectors before merging, over heads and all j. The printed formulas are hardly legible;
    the rule is that of the released code, in which j is any remaining entry, words included (targets=prompt). In the
    paper's text tokens merge into the kept visual ones (targets=visual). Each step merges the whole cache anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Assignment, Need, Plan, Positions, Site, View
from espalier.methods.checks import require, require_finite
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.select.entries import Entries, Targets, merged_entries
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.topk import rows_of, top

Merging = Literal["sum", "mean"]
State = Literal["attended", "entering"]
Similarity = Literal["attended", "normed"]
Newlines = Literal["stay", "merge"]
Rounding = Literal["nearest", "down"]

CHOICES = {
    "merging": Merging,
    "state": State,
    "similarity": Similarity,
    "targets": Targets,
    "newlines": Newlines,
    "rounding": Rounding,
}


@dataclass(frozen=True)
class D3ToM(DenoisingReducer):
    """Merges the tokens that the deciders attend to least into those that they attend to most.

    Attributes:
        K: decoder layer inside which tokens merge; its attention still sees all of them.
        merging: whether a group's states are added up (eq. 10) or averaged.
        state: which states merge.
        similarity: which states are compared.
        targets: entries of a cached prompt that others merge into.
        newlines: whether the newline tokens between a picture's rows are visual tokens.
        rounding: of the number of tokens that stay.
    """

    merges_entries: ClassVar[bool] = True

    K: int = 3
    merging: Merging = "sum"
    state: State = "attended"
    similarity: Similarity = "attended"
    targets: Targets = "visual"
    newlines: Newlines = "stay"
    rounding: Rounding = "nearest"

    takes_separators = True  # attention and states of the decoder

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        for name, kinds in CHOICES.items():
            value, valid = getattr(self, name), get_args(kinds)
            require(value in valid, name, value, ", ".join(valid))

    @property
    def takes_newlines(self) -> bool:
        """Whether newlines are ranked, merged and merged into."""
        return self.newlines == "merge"

    @property
    def rounds_down(self) -> bool:
        """Whether the number of tokens that stay is rounded down."""
        return self.rounding == "down"

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the inside of layer K."""
        valid = f"0 to {depth - 2} (the model has {depth} decoder layers)"
        require(0 <= self.K < depth - 1, "K", self.K, valid)
        return (Site("block", self.K),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the deciders' attention, and the normed states if these are compared."""
        del site
        rows = Need("decider_attention")
        return (rows, Need("layer_normed")) if self.similarity == "normed" else (rows,)

    def positions(self, depth: int) -> Positions:
        """Return `renumbered`: the released code closes the gaps after layer K."""
        del depth
        return "renumbered"

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest and merge the others into them. Cost: O(N log N + N keep D)."""
        kept = top(view.signals["decider_attention"].float(), keep)
        compared = view.signals["layer_normed"] if self.similarity == "normed" else view.tokens
        slot = nearest_kept(compared, kept)
        weight = slot.new_ones(slot.shape, dtype=compared.dtype)
        if self.merging == "mean":
            weight = 1 / slot_sizes(slot).to(weight.dtype)
        return Plan(kept, Assignment(slot, weight), entering=self.state == "entering")

    def chosen(self, attention: Tensor, keep: int) -> Tensor:
        """Return the `keep` highest, not checked to be finite, which would make the device wait. Cost: O(N log N)."""
        # NaNs reach the logits, which every step checks.
        order = attention.float().argsort(dim=1, descending=True, stable=True)
        return order[:, :keep].sort(dim=1).values

    def merged(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Merge a layer's entries by (20) and (21)."""
        return merged_entries(entries, self.targets)


def nearest_kept(states: Tensor, kept: Tensor) -> Tensor:
    """Return (B, N) the slot among `kept` (B, K) that each token goes to: a kept one to its own, others by cosine.

    Of equal cosines the lower index wins. Cost: O(N K D).
    """
    units = normalize(states.float() if states.element_size() < 4 else states, dim=-1)
    cosine = require_finite(units @ units[rows_of(kept), kept].transpose(1, 2), "cosine of states")
    slot = cosine.argmax(dim=2)
    own_slots = slot.new_tensor(range(kept.shape[1])).expand_as(kept)
    return slot.scatter(1, kept, own_slots)
