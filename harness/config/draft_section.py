"""The draft model of a run: a choice from conf/model that shares the inputs of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.composer import Composer
from espalier.harness.config.group_lists import merged
from espalier.harness.config.model_section import model_spec
from espalier.harness.errors import UserError
from espalier.harness.settings import unknown_key
from espalier.harness.specs.run_spec import ModelSpec, in_words_of_the_draft


def build_draft(
    draft_name: str | None,
    options: Mapping[str, Any],
    target: ModelSpec,
    tasks: tuple[str, ...] = (),
    composer: Composer | None = None,
) -> ModelSpec:
    """Return the draft model: the named one, else the first of the target's `drafts`, with the user's options.

    It is looked for in conf/model and in installed plug-ins, or by `composer`.

    It gets the target's video frames, its image processor settings if both are of one family (the target's choice holds
    for both models), its prompt set if the draft has it, and its dtype, which the machine supports.
    """
    if draft_name is None and not target.drafts:
        raise UserError(
            f"method.draft=null: model={target.name} names no draft; valid: a name of conf/model, the folder of a "
            "checkpoint, from Python also a loaded model"
        )
    composer = composer or Composer(Catalogue())
    part = composer.section("model", draft_name or target.drafts[0], "method.draft")
    part["video"], part["dtype"] = asdict(target.video), target.dtype
    if part["adapter"] == target.adapter:
        part["processor"] = dict(target.processor)
    if part["prompts"].get(target.prompt.name) is not None:
        part["prompt"] = target.prompt.name
    key = "method.draft_options"
    for name in options:
        if name not in part:
            raise unknown_key(f"{key}.{name}", (f"{key}.{valid}" for valid in part))
    with in_words_of_the_draft():
        return model_spec(merged(part, options), tasks)


def reserve_draft_card(target: ModelSpec, draft: ModelSpec | None) -> ModelSpec:
    """Return the target with the draft's card kept free, if the target is spread over cards and the draft is not."""
    same_devices = draft is None or draft == target or draft.device_map is not None
    if (
        draft is None
        or same_devices
        or target.device_map is None
        or not draft.device.startswith("cuda")
    ):
        return target
    return replace(target, spared_card=int(draft.device.partition(":")[2] or 0))
