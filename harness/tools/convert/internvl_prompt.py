"""How a release of InternVL writes a chat, read off its conversation.py without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.conversations import ChatFrame, uniform_frame
from espalier.harness.models.conversations import roles as by_role

_HOLDER = "{system_message}"


def read_prompt(file: Path, name: str) -> ChatFrame:
    """Return the chat format `name` of a conversation.py.

    Raises:
        UserError: the file is not there or does not parse, or describes the format in another way.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except FOREIGN as error:
        raise UserError(f"{str(file)!r} tells no chat format ({error})") from error
    formats = [_keywords(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    template = next((entry for entry in formats if entry.get("name") == name), None)
    if template is None:
        raise UserError(f"{file.name} of the release describes no chat format {name!r}")
    head, roles, end = template.get("system_template"), template.get("roles"), template.get("sep")
    if not (
        template.get("sep_style") == "MPT"
        and isinstance(head, str)
        and head.endswith(_HOLDER)
        and isinstance(roles, tuple)
        and len(roles) == 2
        and isinstance(end, str)
    ):
        raise UserError(
            f"chat format {name!r} of {file.name} cannot be converted; valid: sep_style MPT, two roles"
        )
    heads = by_role(head.removesuffix(_HOLDER), *roles)
    return uniform_frame(str(template.get("system_message", "")), heads, end)


def _keywords(call: ast.Call) -> dict[str, object]:
    """Return the keyword arguments of a call that are literals, and the last word of those that are names."""
    keywords: dict[str, object] = {}
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Attribute):
            keywords[str(keyword.arg)] = keyword.value.attr
            continue
        try:
            keywords[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except FOREIGN:
            continue
    return keywords
