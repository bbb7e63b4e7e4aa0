"""The base of methods that drop or merge visual tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from espalier.methods.blame import Blame
from espalier.methods.checks import PlanError
from espalier.methods.method import Method
from espalier.methods.plans import Attended, Plan, checked_plan
from espalier.methods.views import Site, View

Positions = Literal["original", "renumbered"]


@dataclass(frozen=True)
class TokenReducer(Method):
    """Drops or merges visual tokens at `vision`, `prefix` or `layer` sites."""

    in_one_prefill: ClassVar[bool] = True

    @property
    def adaptive(self) -> bool:
        """Whether `plan` may return another count than `keep`.

        The engine then plans one row at a time, and the budget can hold only in the mean over samples.
        """
        return False

    @property
    def curved(self) -> bool:
        """Whether each sample's counts follow a curve of its own, by `measured`, under the budget of all samples.

        The engine then plans one row at a time, and the budget holds in every sample.
        """
        return False

    @property
    def proportional(self) -> bool:
        """True if later tower blocks weigh a slot's key by its size (log-size added to the logits)."""
        return False

    @property
    def shrinks_pictures(self) -> bool:
        """True if the tower gets pictures reduced to the budget's share of pixels, and enlarged to their size again."""
        return False

    @property
    def takes_remainder(self) -> bool:
        """Whether it may act, between decoder layers, on what another method has left of each picture or frame."""
        return True

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

        It is not one of `sites`: nothing is dropped there, and the budget does not count it. Layers from `layer` on
        follow `attend`; `needs` may name `last_attention`, the new token's attention in layer `layer - 1`.
        """
        del depth
        return None

    def attend(self, view: View, last: Attended | None) -> Attended:
        """Choose among the N visual entries at one decoding step; a pure function of its arguments.

        Args:
            view: `tokens` are (B, N, 0), since only the cache is left of them.
            last: its result at the step before; None at the first one.
        """
        raise NotImplementedError(f"{type(self).__name__} has a decode site and no `attend`")

    def needs_frames(self) -> bool:
        """Return whether the method compares frames, so that it works on videos alone."""
        return False

    def positions(self, depth: int) -> Positions:
        """Return what the method's released code does with positions; `engine.positions=method` follows it.

        By default: closed gaps for tokens dropped before the decoder, original positions between its layers. A model
        with positions on several axes always keeps them.
        """
        before_decoder = all(site.where != "layer" for site in self.sites(depth))
        return "renumbered" if before_decoder else "original"

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share of the original visual tokens kept after each site, for one scalar in (0, 1].

        Must not increase from site to site, and must grow with `share`; harness/cost/budget.py solves it for the budget
        rule and turns it into integers. The default keeps the same share from the first site on.
        """
        return (share,) * n_sites

    def shares(self, share: float, sites: tuple[Site, ...]) -> tuple[float, ...]:
        """Return the `fractions` of a method at its sites in a model."""
        return self.fractions(share, len(sites))

    def measured(self, view: View) -> TokenReducer | None:
        """Return the method with the `fractions` of the view's only row, by which the site and later ones share.

        Counts of earlier sites stay. Called on `curved` methods alone; None: nothing is measured at this site.
        """
        del view
        return None

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...] | None:
        """Return the share removed at each of `steps` denoising steps; None: the run's budget holds in each."""
        del ratio, steps
        return None

    @abstractmethod
    def plan(self, view: View, keep: int) -> Plan:
        """Choose `keep` of the view's N tokens, 1 to N; a pure function of its arguments."""

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan after checking arguments and result; the engine calls this.

        Raises:
            PlanError: `keep` lies outside 1 to N (an adaptive method may get more, since it need not follow it), `plan`
                fails, or its result is invalid.
        """
        n_tokens = view.tokens.shape[1]
        if keep < 1 or (keep > n_tokens and not self.adaptive):
            raise PlanError(f"asked to keep {keep} of {n_tokens} tokens; valid: 1 to {n_tokens}")
        # Indices have no gradients, also where the caller's features have.
        with Blame(self, "plan", view.site), torch.no_grad():
            return checked_plan(self.plan(view, keep), view, None if self.adaptive else keep)
