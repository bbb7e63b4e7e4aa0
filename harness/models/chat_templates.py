"""Chat templates of checkpoints: find them, choose the one of a run, and render them within bounds."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.models.chat_media import Chat
from espalier.harness.models.conversations import flatten_template, sha256_of, takes_parts
from espalier.harness.models.loader import MALFORMED, unreadable
from espalier.harness.specs.bounded_templates import TooMuch, Unrendered, render
from espalier.harness.specs.run_spec import CHECKPOINT
from espalier.harness.specs.think_tags import Thinking

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import ModelSpec

log = logging.getLogger(__name__)

#: Variable of chat templates that turns reasoning on and off.
SWITCH = "enable_thinking"

#: Files that may hold a checkpoint's chat template; the first with a template is used.
TEMPLATE_FILES = (
    *("chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "tokenizer_config.json"),
)


def run_template(adapter: Adapter) -> str:
    """Return the chat template that the prompts of a run follow.

    Raises:
        UserError: `model.conversation=checkpoint`, and the checkpoint has no template.
    """
    spec = adapter.spec
    if spec.conversation != CHECKPOINT:
        return adapter.format(spec.conversation, spec.prompt.join, bool(_thinking(spec).prompted))
    template = adapter.shipped_template or local_template(spec)
    if template is None:
        raise UserError(
            f"model.conversation={CHECKPOINT!r}: model={spec.name!r} comes without a chat template; "
            f"valid: null for the family's own, {adapter.conversation}"
        )
    if takes_parts(template):
        return template
    return flatten_template(template, adapter.format_of_media(spec.prompt.join))


def local_template(spec: ModelSpec) -> str | None:
    """Return the chat template in a local model directory, for models built without their checkpoint.

    Raises:
        UserError: a file that may hold the template does not parse.
    """
    if spec.path is None:
        return None
    for name in TEMPLATE_FILES:
        file = spec.path / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            value = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
        except MALFORMED as error:
            raise unreadable(spec, error) from error
        if template := default_template(value):
            return template
    return None


def template_of_processor(processor: Any, tokenizers: bool = True) -> str | None:
    """Return the chat template that a processor was loaded with; with `tokenizers`, else that of its tokenizer."""
    template = default_template(getattr(processor, "chat_template", None))
    if template is not None or not tokenizers:
        return template
    return default_template(getattr(processor.tokenizer, "chat_template", None))


def default_template(value: Any) -> str | None:
    """Return the default template of one template, several by name, or a list of named ones as in old files."""
    if isinstance(value, list):
        value = {part.get("name"): part.get("template") for part in value if isinstance(part, dict)}
    return (value.get("default") if isinstance(value, dict) else value) or None


def other_template(spec: ModelSpec, shipped: str | None) -> str | None:
    """Return one line if the checkpoint's template differs from the hash in the model's file; else None."""
    expected, actual = spec.template_sha256, sha256_of(shipped)
    if expected is None or spec.weights == "random" or expected == actual:
        return None
    return (
        f"model={spec.name}: the checkpoint's chat template has sha256 {actual}, not {expected} "
        "(model.template_sha256): another revision, or changed; prompts follow it only under "
        f"model.conversation={CHECKPOINT}"
    )


def warn_of_template(spec: ModelSpec, shipped: str | None, template: str) -> None:
    """Log the line of `other_template`, or that prompts of a local directory do not follow its template."""
    line = other_template(spec, shipped)
    unstated = spec.conversation is None and spec.template_sha256 is None
    if line is None and spec.path is not None and shipped not in (None, template) and unstated:
        line = (
            f"model={spec.name}: prompts follow the family's own format; the chat template in {str(spec.path)!r} "
            f"differs, and is used under model.conversation={CHECKPOINT}"
        )
    if line is not None:
        log.warning("%s", line)


def render_chat(adapter: Adapter, chat: Chat) -> str:
    """Return a chat as one string with a placeholder for each image and video.

    Raises:
        UserError: the checkpoint's template fails on the chat, or exceeds the bounds.
    """
    processor = adapter.processor
    options = thinking_options(adapter.spec, processor.chat_template)
    if adapter.spec.conversation != CHECKPOINT:
        write = processor.apply_chat_template
        return str(write(chat, tokenize=False, add_generation_prompt=True, **options))
    # The library renders with these values too.
    values = {**processor.tokenizer.special_tokens_map, **options}
    values |= {"conversations": [chat], "add_generation_prompt": True}
    try:
        return render("chat", processor.chat_template, values)
    except (TooMuch, Unrendered) as error:
        raise UserError(
            f"model.conversation={CHECKPOINT!r}: the chat template of model={adapter.spec.name!r}: "
            f"{error}; valid: null for the family's own, {adapter.conversation}"
        ) from error


def thinking_options(spec: ModelSpec, template: str) -> dict[str, bool]:
    """Return `enable_thinking` for a chat template by `model.generation.thinking`; nothing if that is unset.

    Raises:
        UserError: reasoning is to be off, and the template has no such switch.
    """
    prompted = _thinking(spec).prompted
    if prompted is not None and SWITCH in template:
        return {SWITCH: prompted}
    if prompted is False:
        raise UserError(
            f"model.generation.thinking='off': the prompt format of model={spec.name!r} does not read {SWITCH}; valid: "
            f"null, or model.conversation={CHECKPOINT} where the checkpoint's template reads it"
        )
    return {}


def _thinking(spec: ModelSpec) -> Thinking:
    return Thinking.of(spec.generation.get("thinking")) or Thinking()
