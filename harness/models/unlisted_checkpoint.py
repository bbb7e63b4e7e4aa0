"""Models without a file in conf/model: family, sizes and prompt format are read from the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import build_skeleton, read_processor
from espalier.harness.models.chat_templates import template_of_processor
from espalier.harness.models.checkpoint_files import check_checkpoint
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.harness.models.loader import config_of, source_of
from espalier.harness.models.measured_facts import read_facts, reading_parts
from espalier.harness.specs.run_spec import CHECKPOINT
from espalier.harness.store.files.digests import Digests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier.harness.specs.run_spec import ModelSpec

_STACK = {"layers": 1, "hidden": 1, "intermediate": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
#: Placeholder facts of a spec until the real ones are read from the model.
UNREAD: Mapping[str, Any] = {
    "text": _STACK,
    "tower": _STACK,
    "projector": [1, 1],
    "vocabulary": 1,
    "visual_tokens": 1,
    "class_attention": "mean",
    "rotary_axes": 1,
}


def read_checkpoint(spec: ModelSpec, key: str, conversation: bool = True) -> ModelSpec:
    """Return the spec with the family, the facts and the prompt format of its checkpoint; no weights are read.

    Args:
        spec: the model, with UNREAD facts.
        key: the start of an error line.
        conversation: whether a chat template of the checkpoint becomes the prompt format if the spec has none.

    Cost: imports the family, seconds.

    Raises:
        UserError: the checkpoint is of no supported family, or does not describe the model completely.
    """
    if spec.path is not None:
        check_checkpoint(spec.path, Digests())
    spec = replace(spec, adapter=family_of(config_of(spec).get("model_type")))
    adapter = ADAPTERS.load(spec.adapter)
    if not adapter.self_described:
        raise UserError(
            f"{key}={source_of(spec)[0]!r}: checkpoints of the family {spec.adapter} do not describe the model "
            "completely; valid: a name of conf/model, with path=<this folder>"
        )
    adapter.check_settings(spec)
    config, processor = adapter.checkpoint_config(spec), read_processor(adapter, spec)
    if conversation and spec.conversation is None:
        template = template_of_processor(processor)
        spec = replace(spec, conversation=CHECKPOINT if template else None)
    with reading_parts(spec, config):
        skeleton = build_skeleton(adapter.class_of(config), config, spec)
        probe = adapter(skeleton, processor, spec)
        facts = read_facts(probe, adapter.lacking, adapter.patch_tokens, probe.unproved)
    return replace(spec, facts=facts)
