"""Prove on two probes that a model of an unlisted class answers under the engine as it answers by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

#: Returns the features of the pictures of a batch.
Features = Callable[[Mapping[str, Any]], Tensor]

#: Tokens of an answer to a probe.
STEPS = 4

#: Width and height of the pictures of each probe, and its text.
PROBES = (((96, 64), "What is this?"), ((56, 112), "Describe the picture in a few words."))

#: Largest difference of logits, as a share of the largest logit, by the bytes of a number.
TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class _FirstTokens(TokenReducer):
    """Keeps the first tokens that enter the decoder."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        rows, tokens = view.tokens.shape[:2]
        kept = torch.arange(min(keep, tokens), device=view.tokens.device)
        return Plan(kept.expand(rows, -1))


def prove(adapter: Adapter, features: Features) -> None:
    """Check features, ratio 0 against plain `generate`, and half of the tokens against a mask, on two probes.

    Args:
        adapter: adapter of the loaded model.
        features: returns the features (units, D) of a batch's pictures, by the model's own interface.

    Cost: ten answers of `STEPS` tokens.

    Raises:
        UserError: the first check that failed.
    """
    chats = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": _picture(size)},
                    {"type": "text", "text": text},
                ],
            }
        ]
        for size, text in PROBES
    ]
    for chat in chats:
        inputs = adapter.encode([chat])
        _check_features(adapter, inputs, features(inputs))
        _check_answers(adapter, inputs)


def _picture(size: tuple[int, int]) -> Image.Image:
    """Return a picture of ramps, in which no two parts are equal."""
    width, height = size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([rows * 255 // height, columns * 255 // width, (rows * columns) % 256], -1)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


@torch.inference_mode()
def _check_features(adapter: Adapter, inputs: Mapping[str, Any], features: Tensor) -> None:
    """Check that the features enter the decoder unchanged, in the order of their placeholders, under a causal mask."""
    entered: list[Tensor] = []
    masks: list[Any] = []

    def watch(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        entered.append(kwargs["inputs_embeds"])
        masks.append(kwargs.get("attention_mask"))

    handle = adapter.decoder.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        adapter.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    finally:
        handle.remove()
    if isinstance(masks[0], Mapping) or (masks[0] is not None and masks[0].dim() > 2):
        _fail(
            adapter,
            "it gives the decoder masks of its own, which the engine would replace by causal ones",
        )
    layout = adapter.layout(inputs)
    tokens = entered[0][0, layout.visual[0].to(entered[0].device)]
    if features.shape != tokens.shape:
        _fail(adapter, f"{len(features)} features of pictures for {len(tokens)} placeholders")
    if not torch.equal(features.to(tokens), tokens):
        _fail(adapter, "the features of get_image_features are not what enters the decoder")


@torch.inference_mode()
def _check_answers(adapter: Adapter, inputs: Mapping[str, Any]) -> None:
    """Check answers under the engine against the model's own, and of half of the tokens against a mask."""
    settings: dict[str, Any] = {
        **{"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False},
        **{"output_logits": True, "suppress_tokens": [adapter.model.config.image_token_id]},
    }
    output = adapter.model.generate(**inputs, **settings, return_dict_in_generate=True)
    start = inputs["input_ids"].shape[1]
    plain = output.sequences[:, start:], torch.stack(output.logits, 1)
    none, half = Budget("kept", 0.0), Budget("kept", 0.5)
    for decode in ("loop", "generate"):
        with Session(adapter, NoReduction(), none, decode=decode) as session:
            _compare(adapter, plain, session.generate(inputs, **settings), f"ratio 0 ({decode})")
    halves = []
    for backend in ("emulate", "drop"):
        with Session(adapter, _FirstTokens(), half, backend=backend) as session:
            halves.append(session.generate(inputs, **settings))
    assert halves[0].logits is not None  # requested
    masked = halves[0].ids, halves[0].logits
    _compare(adapter, masked, halves[1], "dropping half of the visual tokens")


def _compare(adapter: Adapter, expected: tuple[Tensor, Tensor], answers: Any, check: str) -> None:
    ids, logits = expected
    equal = (ids == answers.ids).all(0)
    steps = int(equal.logical_not().nonzero()[0]) + 1 if not bool(equal.all()) else len(equal)
    scale = logits.abs().max()
    difference = (logits[:, :steps].float() - answers.logits[:, :steps].float()).abs().max() / scale
    tolerance = TOLERANCE[adapter.model.dtype.itemsize]
    if not difference <= tolerance:
        _fail(
            adapter,
            f"{check} changes logits by {difference:.1e} of the largest, more than {tolerance:.0e}",
        )


def _fail(adapter: Adapter, check: str) -> None:
    name = type(adapter.model).__name__
    raise UserError(
        f"model={adapter.spec.name}: {name}, which has no file here, cannot be used: {check}"
    )
