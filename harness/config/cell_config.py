"""A cell of a command: its config as plain data, every reference in it resolved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.errors import UserError

#: By the keys of conf/config.yaml. Cells of one command share what they have in common: nobody changes it.
Cell = Mapping[str, Any]


class Piece:
    """What one key of a config holds.

    Args:
        written: as it stands in the files and on the command line, references unresolved.
    """

    def __init__(self, written: Any) -> None:
        self.written = written

    @cached_property
    def refers(self) -> bool:
        """Whether something in it is only known where the other keys are: a reference, or a value to be given."""
        return refers(self.written)

    @cached_property
    def node(self) -> Node:
        """The same as OmegaConf has it; in one config at a time."""
        node = OmegaConf.create({"it": self.written})._get_node("it")
        assert isinstance(node, Node)
        return node


def refers(value: Any) -> bool:
    """Say whether plain data holds a reference or a value that is missing."""
    if isinstance(value, dict):
        return any(map(refers, value.values()))
    if isinstance(value, list):
        return any(map(refers, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def resolved(config: DictConfig) -> Cell:
    """Return a config as plain data.

    Raises:
        UserError: a reference leads nowhere, or a value is missing.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def resolved_pieces(pieces: Mapping[str, Piece]) -> Cell:
    """Return the config made of pieces as plain data, what refers to nothing as it is.

    Raises:
        OmegaConfBaseException: a reference leads nowhere, or a value is missing.
    """
    if not any(piece.refers for piece in pieces.values()):
        return {key: piece.written for key, piece in pieces.items()}
    # Nodes move into this config from the last one: copying them costs ten times as much.
    config = OmegaConf.create({}, flags={"no_deepcopy_set_nodes": True})
    for key, piece in pieces.items():
        config[key] = piece.node
    return {
        key: _plain(config, key) if piece.refers else piece.written for key, piece in pieces.items()
    }


def _plain(config: DictConfig, key: str) -> Any:
    value = config[key]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value
