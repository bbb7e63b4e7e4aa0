"""Methods inside the vision tower on tiny models: the families whose tokens are patches."""

from __future__ import annotations

from espalier.methods.base import TokenReducer
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.engine import check_cell
from tests.methods.runs import kept_by

#: A class token, crops and their padding, a tower without a class token.
TOWERS = ("llava", "llava_next", "onevision_image")


def chats_of(name: str) -> list[list[dict]]:
    """The family's chats whose tokens are single patches."""
    adapter, chats = adapter_of(name), FAMILIES[name].chats
    return [chat for chat in chats if not any(adapter.layout(adapter.encode([chat])).blended)]


def check_in_tower(name: str, method: TokenReducer) -> None:
    """Hold a method on a family as tests/methods/test_matrix.py holds every method."""
    adapter, chats = adapter_of(name), chats_of(name)
    plain = kept_by(adapter, NoReduction(), chats, 0.0)
    check_cell(adapter, method, chats, plain.logits, range(len(chats)))
