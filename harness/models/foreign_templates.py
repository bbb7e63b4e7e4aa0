"""Chat templates that come with checkpoints: rendered in bounds before the library renders them without any."""

from __future__ import annotations

from functools import cache

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.bounded_templates import FAILURES, Bounded, TooMuch, render


def check_bounds(template: object, chat: Chat) -> None:
    """Render a checkpoint's own template in a sandbox first, which ends what would take all memory or time.

    What it raises beside that is left to the library, whose environment knows more words.

    Raises:
        TooMuch: it would.
    """
    if isinstance(template, str):
        try:
            render(_bounded(template), {"messages": chat, "add_generation_prompt": True})
        except TooMuch:
            raise
        except FAILURES:
            return


@cache  # parsed once, and asked for every prompt
def _bounded(template: str) -> Template:
    options = {"trim_blocks": True, "lstrip_blocks": True}
    return Bounded(**options, extensions=[_Generation, loopcontrols]).from_string(template)


class _Generation(Extension):
    """Reads `{% generation %}`, which marks answers in templates that models are trained with."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
