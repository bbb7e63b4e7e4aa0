"""Forward of the vision tower and its auxiliary heads during training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.scenes import COLOUR_NAMES, MAX_OBJECTS, SceneLayout
from espalier.harness.seedling.vocabulary import BINS
from lab.training.patch_targets import (
    CLASSES,
    GLOBAL_LABELS,
    PatchTargets,
    global_targets,
)


def patch_features(tower: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the hidden state that LLaVA reads, class token included: ``(B, 1 + N, D)``.

    The last layer is skipped, since the language model does not read its output.
    """
    hidden: torch.Tensor = tower.pre_layrnorm(tower.embeddings(pixels))
    for layer in tower.encoder.layers[:-1]:
        hidden = _plain(layer(hidden, attention_mask=None))
    return hidden


def _plain(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the tensor of a layer's output, which is a tuple in some versions of transformers."""
    return output[0] if isinstance(output, tuple) else output


def pooled_output(tower: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the last layer for the class token only: ``(B, 1 + N, D)`` to ``(B, D)``.

    Equal to the tower's pooler output; the other rows of the last layer are unused.
    """
    layer = tower.encoder.layers[-1]
    attention = layer.self_attn
    normed = layer.layer_norm1(hidden)
    batch, _, width = normed.shape

    def split(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(batch, -1, attention.num_heads, attention.head_dim).transpose(1, 2)

    query = split(attention.q_proj(normed[:, :1]))
    key, value = split(attention.k_proj(normed)), split(attention.v_proj(normed))
    mixed = F.scaled_dot_product_attention(query, key, value)
    mixed = attention.out_proj(mixed.transpose(1, 2).reshape(batch, 1, width))
    row = hidden[:, :1] + mixed
    row = row + layer.mlp(layer.layer_norm2(row))
    pooled: torch.Tensor = tower.post_layernorm(row[:, 0])
    return pooled


class TowerHeads(nn.Module):
    """Auxiliary heads: class, colour and box of patches, and the scene's contents from the class token.

    LLaVA's training does not train class attention; without the class-token loss, methods that prune
    by it would read noise.
    """

    def __init__(self, width: int = 128) -> None:
        """Build the heads for tower features of the given width."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.label = nn.Linear(width, CLASSES)
        self.colour = nn.Linear(width, len(COLOUR_NAMES))
        self.box = nn.Linear(width, 4 * BINS)
        self.scene = nn.Linear(width, GLOBAL_LABELS + MAX_OBJECTS + 1)

    def losses(
        self, hidden: torch.Tensor, pooled: torch.Tensor, layout: SceneLayout, targets: PatchTargets
    ) -> dict[str, torch.Tensor]:
        """Return the loss terms.

        Args:
            hidden: Tower features ``(B, 1 + N, D)``.
            pooled: Class-token output ``(B, D)``.
            layout: The scenes.
            targets: Their patch labels.
        """
        label, colour = torch.from_numpy(targets.label), torch.from_numpy(targets.colour)
        box = torch.from_numpy(targets.box)
        normed = self.norm(hidden[:, 1:])
        on_object = label > 0
        error = F.cross_entropy(self.label(normed).transpose(1, 2), label, reduction="none")
        objects = normed[on_object]
        bins = self.box(objects).view(-1, BINS)
        scene = self.scene(pooled)
        present = torch.from_numpy(global_targets(layout))
        contents = F.binary_cross_entropy_with_logits(scene[:, :GLOBAL_LABELS], present)
        count = F.cross_entropy(scene[:, GLOBAL_LABELS:], torch.from_numpy(layout.count))
        return {
            "label": error[on_object].mean() + 0.5 * error[~on_object].mean(),
            "colour": F.cross_entropy(self.colour(objects), colour[on_object]),
            "box": F.cross_entropy(bins, box[on_object].view(-1)),
            "scene": 4 * contents + 0.5 * count,
        }

    @torch.no_grad()
    def digit_votes(
        self, hidden: torch.Tensor, layout: SceneLayout, targets: PatchTargets
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the digit of each digit object from the mean log-probabilities of its patches.

        Returns:
            Predicted and true digits, both ``(number of digit objects,)``.
        """
        scores = self.label(self.norm(hidden[:, 1:])).log_softmax(-1)[..., 1:11].numpy()
        predicted, true = [], []
        for row in range(len(layout)):
            for slot in np.flatnonzero(layout.is_digit[row]):
                predicted.append(scores[row][targets.owner[row] == slot].mean(0).argmax())
                true.append(layout.digit[row, slot])
        return np.array(predicted), np.array(true)
