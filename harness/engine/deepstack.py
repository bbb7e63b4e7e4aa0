"""DeepStack: add features to visual tokens after the first decoder layers, for the tokens that remain.

Some models pass features of earlier tower layers to the decoder: after layer l, the l-th of them are added to the
hidden states of the visual tokens (arXiv 2406.04334). The model finds these tokens by a mask over the whole prompt,
which no longer fits once some are dropped. The engine therefore takes the features out of the decoder's arguments and
adds them itself, to the tokens alive after that layer, at their current slots. A token merged by a method gets features
merged by the same plan, as if they had been part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.harness.engine.layout import Layout, Stage, take

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from espalier.harness.engine.reduce import Decision

#: Arguments of a decoder with DeepStack: a list of (V, D) features, and the (B, L) mask of the V tokens they are for.
FEATURES, MASK = "deepstack_visual_embeds", "visual_pos_masks"


class DeepStack:
    """The features of one batch: for each of the first decoder layers, one row for each original visual token.

    Args:
        layout: of the batch, its rows repeated for beams.
        features: for each layer (V, D) features of all visual tokens, row by row, each row in sequence order.

    Raises:
        ValueError: there are features for tokens that methods do not see.
    """

    def __init__(self, layout: Layout, features: Sequence[Tensor]) -> None:
        n_features, n_visual = len(features[0]), sum(layout.counts)
        if n_features != n_visual:
            raise ValueError(f"DeepStack features for {n_features} tokens, methods see {n_visual}")
        self._tables = [_table(layout, layer_features) for layer_features in features]

    def hook(
        self, layers: Iterable[nn.Module], stage: Callable[[], Stage | None]
    ) -> list[RemovableHandle]:
        """Add the features after the first layers; the caller removes the handles.

        Args:
            layers: of the decoder.
            stage: returns the current stage, None outside the prefill.
        """

        def adder(number: int) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
            def add(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                active = stage()
                return None if active is None else self.add_features(number, output, active)

            return add

        pairs = zip(layers, range(len(self._tables)), strict=False)
        return [layer.register_forward_hook(adder(number)) for layer, number in pairs]

    def add_features(self, number: int, hidden: Tensor, stage: Stage) -> Tensor:
        """Return the states (B, M, D) after layer `number` with the features of the alive tokens added."""
        stage.move(hidden.device)
        rows, places = _real_entries(stage.counts, hidden.device)
        slots, origin = stage.slots[rows, places], stage.origin[rows, places]
        table = self._tables[number].to(hidden.device, hidden.dtype)
        hidden = hidden.clone()
        hidden[rows, slots] = hidden[rows, slots] + table[rows, origin]
        return hidden

    def merge(self, decision: Decision, stage: Stage, first: int) -> None:
        """Merge the features not yet added in the way that a decision merges the tokens.

        Args:
            decision: the plans of a site.
            stage: before the site.
            first: decoder layer with the input that the site shortens.
        """
        device = stage.origin.device
        for merged in decision.merged:
            all_rows = range(len(stage.counts))
            members = merged.rows if isinstance(merged.rows, list) else list(all_rows[merged.rows])
            rows = torch.tensor(members, device=device)
            origin = stage.origin[rows][:, : stage.counts[members[0]]]
            kept = take(origin, merged.kept, -1)
            for number in range(first, len(self._tables)):
                table = self._tables[number].to(device)
                tokens = take(table[rows], origin, -2)
                table[rows[:, None], kept] = merged.merge.apply(tokens, merged.kept.shape[1])
                self._tables[number] = table


def extract_features(
    arguments: dict[str, Any], layout: Layout
) -> tuple[DeepStack | None, dict[str, Any]]:
    """Return the features among a decoder's arguments, None if there are none, and the arguments without them."""
    if not arguments.get(FEATURES):
        return None, arguments
    stack = DeepStack(layout, arguments[FEATURES])
    return stack, {**arguments, FEATURES: None, MASK: None}


def _table(layout: Layout, features: Tensor) -> Tensor:
    """Return (B, N, D) of (V, D) features."""
    table = features.new_zeros(*layout.visual.shape, features.shape[-1])
    table[_real_entries(layout.counts, features.device)] = features
    return table


def _real_entries(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and index of each entry that is not padding, row by row, without synchronising with the device."""
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    places = torch.cat([torch.arange(count) for count in counts])
    return rows.to(device), places.to(device)
