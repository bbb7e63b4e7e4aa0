"""Positions, rotary tables and masks of a decoder layer with the remaining tokens, by type of layer.

Masks have the form that the model's attention back end expects. What a slot sees is defined in
harness/engine/layout.py; the library builds the masks that it supports.

In stacks with layers of several types, such as Gemma 3's, each type has its own rotary tables and its own mask. A
sliding layer sees what lies less than a window back, and the distance is that of the positions that its rotary tables
encode. Where gaps stay (`engine.positions=original`) these are the positions of the full prompt, so that dropping
equals hiding; where gaps are closed they are the slots that are left. The library measures in slots, which is the same
only where gaps are closed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import create_causal_mask

from espalier.harness.engine.layout import (
    Layout,
    Stage,
    Visibility,
    VisualBlocks,
    fill_padding,
    visibility_of,
)
from espalier.harness.errors import UserError

SLIDING = "sliding_attention"
FULL = "full_attention"


class LayerTypes:
    """The types of a text stack's layers; makes what each type needs of a stage, once for each stage.

    Args:
        decoder: text stack with `config.layer_types`, and rotary tables by type.
        cut: whether a window hides tokens of the same picture too.
    """

    #: Value for subclasses without windows.
    _cut = True
    #: Whether new tokens need masks or tables by type.
    steps_differ = True

    def __init__(self, decoder: Any, cut: bool = True) -> None:
        self._cut = cut
        self._config = decoder.config
        self._embedding = decoder.rotary_emb
        self._types: tuple[str, ...] = tuple(decoder.config.layer_types)

    def name(self, layer: int) -> str:
        """Return the type of a layer."""
        return self._types[layer]

    def slides(self, layer: int) -> bool:
        """Return whether a layer sees a window only."""
        return self._types[layer] == SLIDING

    def blocks(self, layout: Layout) -> Tensor:
        """Return (B, L): for each slot the number of its block of tokens that see one another, -1 outside."""
        return blocks_of(layout)

    def begin(self, stage: Stage, layout: Layout, positions: Tensor) -> None:
        """Give the first stage of a prefill its blocks of visual tokens, and positions (B or 1, L)."""
        blocks = self.blocks(layout)
        places, span = positions.expand_as(blocks), blocks.shape[1]
        stage.blocks = VisualBlocks(blocks, places, span=span, cut=self._cut)

    def visibility(self, stage: Stage, layer: int) -> VisualBlocks:
        """Return the attention visibility of a layer during a prefill."""
        assert stage.blocks is not None  # set by `begin`
        return replace(stage.blocks, window=self._window(layer))

    def pairs(self, stage: Stage, layer: int) -> tuple[int, ...]:
        """Return the attended pairs of each row in a layer. Cost: O(B S^2), and one synchronisation with the device."""
        counts = self.visibility(stage, layer).seen_by(stage.valid) * stage.valid
        return tuple(counts.sum(1).tolist())

    def mask(self, stage: Stage, layer: int, hidden: Tensor) -> Tensor:
        """Return the prefill's mask of a layer for states `hidden` (B, M, D)."""
        layer_type = self._types[layer]
        if layer_type not in stage.masks:
            stage.masks[layer_type] = reference_mask(
                self._config, hidden, stage.valid, 0, self.visibility(stage, layer)
            )
        return stage.masks[layer_type]

    def tables(self, stage: Stage, layer: int, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary tables of a stage's slots in a layer."""
        layer_type = self._types[layer]
        if layer_type not in stage.tables:
            stage.tables[layer_type] = self._tables(
                layer, hidden, self.visibility(stage, layer).positions
            )
        return stage.tables[layer_type]

    def arguments(self, stage: Stage, layer: int, hidden: Tensor) -> dict[str, Any]:
        """Return mask and tables of a layer of a prefill."""
        return {
            "attention_mask": self.mask(stage, layer, hidden),
            "position_embeddings": self.tables(stage, layer, hidden),
        }

    def stack_masks(self, stage: Stage, hidden: Tensor) -> Any:
        """Return the masks that the stack takes for a prefill, by type."""
        return {
            name: self.mask(stage, layer, hidden) for name, layer in self.first_of_each().items()
        }

    def step_arguments(
        self, stage: Stage, layer: int, step: NewTokens, cache: Any
    ) -> dict[str, Any]:
        """Return mask and tables of a layer for new tokens.

        Args:
            stage: tokens of the prompt that entered the layer.
            layer: its number.
            step: the new tokens.
            cache: filled before them.
        """
        tables = self._tables(layer, step.hidden, step.positions)
        count, past = step.hidden.shape[1], cache.get_seq_length(layer)
        answer = past + count - stage.valid.shape[1]
        # New tokens are outside of blocks: a full layer is causal.
        visibility: VisualBlocks | None = None
        if self.slides(layer):
            visibility = self._after(self.visibility(stage, layer), answer, step.positions)
        sees_all = visibility is None or visibility.span < self._config.sliding_window
        if sees_all and count == 1 and not stage.padded:
            return {"attention_mask": None, "position_embeddings": tables}
        alive = pad(stage.valid, (0, answer), value=True)
        mask = reference_mask(self._config, step.hidden, alive, past, visibility)
        entries, _ = cache.get_mask_sizes(count, layer)
        return {"attention_mask": mask[..., -entries:], "position_embeddings": tables}

    def canvas_mask(self, stage: Stage, layer: int, step: NewTokens, cache: Any) -> Tensor | None:
        """Return the mask of a layer in which a canvas sees itself and all of a cache, or of its window.

        Arguments are those of `step_arguments`. None if every place sees the whole cache.
        """
        past, entries = cache.get_seq_length(layer), cache.layers[layer].keys.shape[2]
        answer = past - stage.valid.shape[1]
        visible = pad(stage.valid, (0, answer), value=True)
        if self.slides(layer):
            first = step.positions[:, :1]
            prompt = self._after(self.visibility(stage, layer), answer, first - 1)
            visible = visible & (prompt.positions > first - self._config.sliding_window)
        visible = visible[:, past - entries :]
        if bool(visible.all()):
            return None
        count = step.hidden.shape[1]
        visible = pad(visible, (0, count), value=True)[:, None, None].expand(-1, -1, count, -1)
        return explicit_mask(self._config, step.hidden, visible)

    def _after(self, prompt: VisualBlocks, answer: int, positions: Tensor) -> VisualBlocks:
        """Return the visibility of a prompt and the `answer` tokens after it, the last at `positions` (B, t)."""
        back = torch.arange(answer - 1, -1, -1, device=positions.device)
        answer_positions = (positions[:, -1:] - back).expand(len(prompt.positions), -1)
        return replace(
            prompt,
            blocks=pad(prompt.blocks, (0, answer), value=-1),
            positions=torch.cat([prompt.positions, answer_positions], 1),
            span=prompt.span + answer,
        )

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer, None for a full one."""
        return [self._window(layer) for layer in range(len(self._types))]

    def first_of_each(self) -> dict[str, int]:
        """Return the first layer of each type."""
        return {name: self._types.index(name) for name in dict.fromkeys(self._types)}

    def _window(self, layer: int) -> int | None:
        return self._config.sliding_window if self.slides(layer) else None

    def _tables(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return rotary_tables(self._embedding, hidden, positions, self._types[layer])


class JoinedPictures(LayerTypes):
    """Full layers of one type, in which all tokens of a prompt's pictures see one another, marks included (Molmo2).

    Args:
        decoder: text stack.
    """

    #: New tokens see all that is held.
    steps_differ = False

    def __init__(self, decoder: Any) -> None:
        self._config = decoder.config
        self._embedding = decoder.rotary_emb
        self._types = (FULL,) * len(decoder.layers)

    def blocks(self, layout: Layout) -> Tensor:
        """Return (B, L): 0 for visual tokens and the marks between them, -1 for others."""
        return -(layout.word_mask() | ~layout.valid).long()

    def stack_masks(self, stage: Stage, hidden: Tensor) -> Any:
        """Return the mask that the stack takes for a prefill."""
        return self.mask(stage, 0, hidden)

    def _tables(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return rotary_tables(self._embedding, hidden, positions)


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Tokens of a decoding step: their states `hidden` (B, t, D) and `positions` (B, t)."""

    hidden: Tensor
    positions: Tensor


def visible_to_last(types: LayerTypes | None, stage: Stage, layer: int) -> Tensor:
    """Return (B, M): the slots that the prompt's last token sees in a layer; batches are left-padded."""
    if types is None:
        return stage.valid
    width = stage.valid.shape[1]
    last = torch.tensor([width - 1], device=stage.valid.device)
    return stage.valid & types.visibility(stage, layer).sees(last, width)[:, 0]


def held_entries(stage: Stage, length: int) -> tuple[int, ...]:
    """Return the visual tokens of each row among the last `length` slots of a stage."""
    first = stage.valid.shape[1] - length
    rows = zip(stage.slots, stage.counts, strict=True)
    return tuple(int((slots[:count] >= first).sum()) for slots, count in rows)


def blocks_of(layout: Layout) -> Tensor:
    """Return (B, L): for each slot the number of its run of visual tokens in the row, -1 for others."""
    rows, width = layout.valid.shape
    before = pad(layout.visual, (1, 0), value=-2)[:, :-1]
    numbers = (layout.visual != before + 1).long().cumsum(1) - 1
    # Right padding is written to an extra column that is cut off.
    blocks = layout.visual.new_full((rows, width + 1), -1)
    blocks.scatter_(1, fill_padding(layout.visual, layout.counts, width), numbers)
    return blocks[:, :width]


def prefill_mask(config: Any, hidden: Tensor, valid: Tensor, padded: bool) -> Tensor | None:
    """Return the mask over the slots of `hidden` (B, M, D); the library builds it, also for a stack that is not causal.

    Padding queries may see themselves, so that no softmax row is empty.
    """
    mask: Any = create_causal_mask(config, hidden, valid if padded else None, None)
    if padded and mask is not None and mask.dim() == 4:
        diagonal = torch.eye(hidden.shape[1], dtype=torch.bool, device=mask.device)
        padding = (~valid)[:, None, :, None] & diagonal
        mask = mask | padding if mask.dtype == torch.bool else mask.masked_fill(padding, 0.0)
    return cast("Tensor | None", mask)


def decode_mask(
    config: Any, hidden: Tensor, valid: Tensor, padded: bool, cache: Any, layer: int
) -> Tensor | None:
    """Return the mask of the new tokens of `hidden` (B, t, D) over layer `layer`'s own cache and themselves."""
    key_valid = None
    if padded:
        n_new = cache.get_seq_length(layer) + hidden.shape[1] - valid.shape[1]
        key_valid = torch.cat([valid, valid.new_ones(valid.shape[0], n_new)], dim=1)
    mask: Any = create_causal_mask(config, hidden, key_valid, cache, layer_idx=layer)
    return cast("Tensor | None", mask)


def reference_mask(
    config: Any, hidden: Tensor, alive: Tensor, n_past: int, visibility: Visibility | None = None
) -> Tensor:
    """Return the explicit (B, 1, Q, S) mask of new tokens: visible keys among those alive, and each token itself.

    Args:
        config: text configuration; eager attention takes an additive mask, sdpa a boolean one.
        hidden: (B, Q, D) new hidden states, for shape, type and device.
        alive: (B, n_past + Q) keys that may be seen.
        n_past: keys already cached.
        visibility: attention visibility; None: as in the configuration.

    Raises:
        UserError: the back end takes no mask.
    """
    n_query, n_keys = hidden.shape[1], n_past + hidden.shape[1]
    key = torch.arange(n_keys, device=hidden.device)
    query = n_past + torch.arange(n_query, device=hidden.device)
    diagonal = key[None, :] == query[:, None]
    visible = (visibility or visibility_of(config)).sees(query, n_keys)
    return explicit_mask(config, hidden, ((visible & alive[:, None, :]) | diagonal)[:, None])


def explicit_mask(config: Any, hidden: Tensor, visible: Tensor) -> Tensor:
    """Return the mask that lets new tokens `hidden` (B, Q, D) see the keys of `visible` (B, 1, Q, S), as booleans.

    Raises:
        UserError: the back end takes no mask.
    """
    name = config._attn_implementation
    if name.startswith("flash"):
        raise UserError(f"model.attention={name!r} takes no explicit mask; valid: sdpa, eager")
    if name == "eager":
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        return torch.where(visible, zero, torch.finfo(hidden.dtype).min)
    return visible


#: Rule for positions on several axes, as stored in a row; `check_order` checks every prompt against it.
ORDER = "text behind the largest position"


class MisplacedText(RuntimeError):
    """A prompt's text has other positions than in the released models, so that answers would differ from theirs."""


def check_order(positions: Tensor, layout: Layout, axes: int) -> None:
    """Check that every text token of a prompt directly follows the largest position before it, on all axes.

    Args:
        positions: (axes, B, L) as they enter the decoder; additional rows before these axes are ignored.
        layout: of the batch, beams repeated.
        axes: position axes of the decoder.

    Raises:
        MisplacedText: some text token does not; the line names the row and the token.

    Cost: a few sums over B L integers, and one synchronisation with the device.
    """
    places = positions[-axes:]
    valid = layout.valid.to(places.device)
    largest_so_far = places.amax(0).masked_fill(~valid, -1).cummax(1).values
    expected = pad(largest_so_far[:, :-1] + 1, (1, 0))
    misplaced = (places != expected).any(0) & layout.word_mask().to(places.device)
    if not misplaced.any():
        return
    row, token = misplaced.nonzero()[0].tolist()
    raise MisplacedText(
        f"text token {token} of prompt {row} is at {places[:, row, token].tolist()} and should be at "
        f"{int(expected[row, token])}, after the largest position before it: the installed transformers places text "
        "differently than the released model; valid: the version of constraints.txt"
    )


def closed_positions(valid: Tensor) -> Tensor:
    """Return (B, M) positions that count the valid slots from 0; slots that are not valid get arbitrary ones."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def rotary_tables(
    embedding: Any, hidden: Tensor, positions: Tensor, *layer_type: str
) -> tuple[Tensor, ...]:
    """Return the rotary tables of `positions` (B, t), on the device of the states `hidden` that they are for.

    Args:
        embedding: the decoder's rotary embedding, so that scaled frequencies are the same.
        hidden: (B, t, D); gives type and device.
        positions: one for each state.
        layer_type: of the layer, where tables differ by type.
    """
    with torch.no_grad():
        tables = embedding(hidden, positions.to(hidden.device), *layer_type)
    return tuple(table.to(hidden.device) for table in tables)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor | None = None) -> Tensor:
    """Return (..., S, D) rotated by tables (S, d): pairs are d / 2 apart; dimensions after the first d stay.

    The result is written into `result` if there is one, in its type.
    """
    half = cos.shape[-1] // 2
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = torch.empty_like(x) if result is None or result.dtype != x.dtype else result
    parts = rotated[..., :half], rotated[..., half : 2 * half]
    torch.mul(first, cos[..., :half], out=parts[0]).addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=parts[1]).addcmul_(first, sin[..., half:])
    if x.shape[-1] > 2 * half:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated if result is None or rotated is result else result.copy_(rotated)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the inverse of `rotate` by the same tables, also if they are scaled or rounded."""
    scale = cos.square() + sin.square()
    return rotate(x, cos / scale, -sin / scale)
