"""How a release of InternVL writes a chat, read off its conversation.py without running it."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from harness.adapters.internvl_processing import TOKENS
from harness.errors import UserError

_HOLDER = "{system_message}"


@dataclass(frozen=True)
class Prompt:
    """The texts around the turns of a chat.

    Attributes:
        heads: what stands before a turn, by role.
        system: the message of a chat that has none of its own.
        end: what stands after a turn; it holds the token that ends an answer.
    """

    heads: dict[str, str]
    system: str
    end: str

    def template(self, lead: str = "") -> str:
        """Return the chat template in Jinja.

        Args:
            lead: what stands before everything.
        """
        image, video = TOKENS["context_image_token"], TOKENS["video_token"]
        holders = {"image": f"{image}\n", "video": f"{video}\n"}
        start = f"{self.heads['system']}{self.system}{self.end}"
        return (
            f"{{% set heads = {_literal(self.heads)} %}}{{% set holders = {_literal(holders)} %}}"
            f"{{{{ {_literal(lead)} }}}}"
            f"{{% if messages[0].role != 'system' %}}{{{{ {_literal(start)} }}}}{{% endif %}}"
            "{% for turn in messages %}{{ heads[turn.role] }}"
            "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
            "{{ holders[part.type] if part.type in holders else part.text }}{% endfor %}{% endif %}"
            f"{{{{ {_literal(self.end)} }}}}{{% endfor %}}"
            "{% if add_generation_prompt %}{{ heads.assistant }}{% endif %}"
        )

    def render(self, question: str) -> str:
        """Return a chat of one question without pictures."""
        start = f"{self.heads['system']}{self.system}{self.end}"
        return f"{start}{self.heads['user']}{question}{self.end}{self.heads['assistant']}"


def read_prompt(file: Path, name: str) -> Prompt:
    """Return the chat format `name` of a conversation.py.

    Raises:
        UserError: the file is not there or does not parse, or describes the format in another way.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{str(file)!r} tells no chat format ({error})") from error
    formats = [_keywords(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = next((one for one in formats if one.get("name") == name), None)
    if found is None:
        raise UserError(f"{file.name} of the release describes no chat format {name!r}")
    head, roles, end = found.get("system_template"), found.get("roles"), found.get("sep")
    if not (
        found.get("sep_style") == "MPT"
        and isinstance(head, str)
        and head.endswith(_HOLDER)
        and isinstance(roles, tuple)
        and len(roles) == 2
        and isinstance(end, str)
    ):
        raise UserError(
            f"chat format {name!r} of {file.name} cannot be converted; valid: sep_style MPT, two roles"
        )
    heads = {"system": head.removesuffix(_HOLDER), "user": roles[0], "assistant": roles[1]}
    return Prompt(heads, str(found.get("system_message", "")), end)


def _keywords(call: ast.Call) -> dict[str, object]:
    """Return the keyword arguments of a call that are literals, and the last word of those that are names."""
    found: dict[str, object] = {}
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Attribute):
            found[str(keyword.arg)] = keyword.value.attr
            continue
        try:
            found[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return found


def _literal(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
