"""`tower` sites: blocks of the vision tower run on fewer slots, and the input of decoder layer 0 is shortened."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from espalier.harness.cost.row_work import NO_WORK, Work
from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.reduce import Decision, row_generators
from espalier.harness.engine.sites.prefix import gather_arguments
from espalier.harness.engine.sites.site import Arguments, NumberedSite, Sites
from espalier.harness.engine.tower.tower_run import TowerRun


class TowerSites(Sites):
    """The method plans image by image inside the tower, where a `TowerRun` replaces the blocks.

    Args:
        prefill: the batch.
        sites: all of the method's tower sites.

    Raises:
        MethodError: a row's tokens are blends of several patches.
    """

    in_tower = True

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        super().__init__(prefill, sites)
        #: Runs the tower's blocks; None if nothing is dropped inside the tower.
        self.run: TowerRun | None = None
        setup, layout = prefill.setup, prefill.layout
        if all(
            count == visual
            for counts, visual in zip(prefill.requested, layout.counts, strict=True)
            for count in counts[: len(sites)]
        ):
            return
        self.run = TowerRun(
            method=setup.method,
            sites=[site for _, site in sites],
            blocks=setup.adapter.tower_blocks(),
            extra=int(setup.adapter.facts.class_attention == "token"),
            layout=layout,
            requested=prefill.requested,
            generator_of=lambda row, picture, site: row_generators(
                setup.seed, [f"{prefill.samples[row]}/{picture}"], site
            )[0],
            emulate=setup.emulate,
            clock=prefill.clock,
        )

    def open(self) -> None:
        """Replace the tower's blocks."""
        if self.run is not None:
            self.run.__enter__()

    def close(self) -> None:
        """Restore the blocks' forward."""
        if self.run is not None:
            self.run.__exit__()

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running block."""
        if self.run is not None:
            self.run.watch(query, key, scaling)

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Drop the tokens of the patches that were dropped inside the tower."""
        prefill = self.prefill
        all_tokens = [torch.arange(count) for count in prefill.layout.counts]
        kept = all_tokens if self.run is None else self.run.kept()
        for number in range(len(self.sites) - 1):
            prefill.kept.append(tuple(counts[number] for counts in prefill.requested))
        index = pad_sequence(kept, batch_first=True)
        index = index.repeat_interleave(prefill.beams, 0).to(prefill.stage.valid.device)
        counts = tuple(len(row_kept) for row_kept in kept for _ in range(prefill.beams))
        return gather_arguments(prefill, Decision(index, counts, ()), kwargs)

    def work(self, row: int) -> Work:
        """Return the cost that the row's images saved."""
        return NO_WORK if self.run is None else self.run.spared(row)
