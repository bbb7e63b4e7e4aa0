"""A cell of a command: its config as plain data with every reference resolved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.errors import UserError

#: By the keys of conf/config.yaml. Cells of one command share equal parts, which must not be changed.
Cell = Mapping[str, Any]


class Piece:
    """The part of a config below one key.

    Args:
        written: the value from the files and the command line, with references unresolved.
    """

    def __init__(self, written: Any) -> None:
        self.written = written

    @cached_property
    def refers(self) -> bool:
        """Whether it can only be resolved with the other keys: it has a reference or a missing value."""
        return refers(self.written)

    @cached_property
    def node(self) -> Node:
        """The value as a node of OmegaConf, which one config at a time can hold."""
        node = OmegaConf.create({"it": self.written})._get_node("it")
        assert isinstance(node, Node)
        return node


def refers(value: Any) -> bool:
    """Return whether plain data has a reference or a missing value."""
    if isinstance(value, dict):
        return any(map(refers, value.values()))
    if isinstance(value, list):
        return any(map(refers, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """Return a config as plain data, with references resolved or as they are written."""
    data = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


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
    """Return the config of these pieces as plain data; pieces without references stay as they are.

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
