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

The next step starts from every visual token again. Before the first step no token is unveiled, so that it keeps all.
The released code also renumbers the remaining positions from 0 after layer K, as engine.positions=method does.

Where the prompt is cached (Section 4.4), A is the deciders' attention to its entries in layer K. In later layers the
entries of dropped visual tokens merge by (20) and (21) in methods/select/entries.py, anew in each step: in the paper's
text into kept visual ones (targets=visual), in the released code into any that remains (targets=prompt).

Differs: with every=N, N steps share a choice, that of the first one's deciders, and its merged entries; only with a
cached prompt, where merging costs more than its attention spares. The paper chooses in each step (every=1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from espalier.methods.base import Assignment, Need, Plan, Positions, Site, View
from espalier.methods.checks import require, require_choices
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.select.entries import Entries, Targets, merged_entries
from espalier.methods.select.merge import nearest_kept, slot_sizes
from espalier.methods.select.topk import top

Merging = Literal["sum", "mean"]
State = Literal["attended", "entering"]
Similarity = Literal["attended", "normed"]
Newlines = Literal["stay", "merge"]
Rounding = Literal["nearest", "down"]


@dataclass(frozen=True)
class D3ToM(DenoisingReducer):
    """Merges the tokens that the deciders attend to least into those that they attend to most.

    Attributes:
        K: decoder layer inside which tokens merge; its attention still sees all of them.
        merging: whether a group's states are added up (eq. 10) or averaged.
        state: which states merge.
        similarity: which states are compared.
        targets: entries of a cached prompt that others merge into.
        newlines: whether a picture's newline tokens are visual tokens.
        rounding: of the number of tokens that stay.
        every: steps that share a choice among the entries of a cached prompt, from the first that merges on.
    """

    merges_entries: ClassVar[bool] = True
    takes_separators = True  # attention and states of the decoder

    K: int = 3
    merging: Merging = "sum"
    state: State = "attended"
    similarity: Similarity = "attended"
    targets: Targets = "visual"
    newlines: Newlines = "stay"
    rounding: Rounding = "nearest"
    every: int = 1

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.every >= 1, "every", self.every, "a number of steps, at least 1")
        require_choices(
            self,
            merging=Merging,
            state=State,
            similarity=Similarity,
            targets=Targets,
            newlines=Newlines,
            rounding=Rounding,
        )

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
        normed = (Need("layer_normed"),) if self.similarity == "normed" else ()
        return (Need("decider_attention"), *normed)

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
