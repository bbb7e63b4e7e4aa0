"""A prompt for several methods: the signals they read before the decoder, and layers that they share, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.prompt import Prompt, recorded_trunk, refuse_tower_sites
from espalier.harness.engine.session import Session
from espalier.harness.engine.signals.table import DECLARED
from espalier.harness.engine.site_table import reads_features
from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.none import NoReduction


@dataclass(frozen=True)
class PromptReader(TokenReducer):
    """Reads the signals that several methods read before the decoder; its plan keeps every token.

    Attributes:
        wanted: signals.
        features: whether any method acts on the projector's input.
    """

    wanted: tuple[Need, ...] = ()
    features: bool = False

    @classmethod
    def of(cls, adapter: ModelParts, methods: Sequence[TokenReducer]) -> PromptReader:
        """Return the reader for all of the methods.

        Raises:
            MethodError: one acts inside the tower.
        """
        wanted: dict[Need, None] = {}
        features = False
        for method in methods:
            sites = method.all_sites(adapter.facts.tower.layers, adapter.facts.text.layers)
            refuse_tower_sites(method, sites)
            features |= reads_features(sites)
            needs = (need for site in sites for need in method.needs(site))
            wanted |= dict.fromkeys(need for need in needs if DECLARED[need.signal].units)
        return cls(tuple(wanted), features)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return one site before the decoder."""
        return (Site("vision" if self.features else "prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals."""
        return self.wanted

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all."""
        n_rows, n_tokens, _ = view.tokens.shape
        return Plan(torch.arange(n_tokens, device=view.tokens.device).expand(n_rows, n_tokens))


def shared_prompt(
    adapter: ModelParts,
    inputs: Mapping[str, Any],
    methods: Sequence[TokenReducer] = (),
    *,
    timed: bool = True,
) -> Prompt:
    """Make a prompt that all of the methods can start from; see `Session.prompt`.

    Raises:
        MethodError: a method acts inside the vision tower, or reads a signal that the model lacks.
    """
    reader = PromptReader.of(adapter, methods)
    with Session(adapter, reader, Budget("kept", 0.0), timed=timed) as session:
        return session.prompt(inputs)


def prompt_with_trunk(
    adapter: ModelParts, prompt: Prompt, depth: int, room: float = float("inf"), **generation: Any
) -> Prompt:
    """Return a prompt with its first decoder layers run, for all methods that start there and act only after them.

    Args:
        adapter: the model.
        prompt: of the batch.
        depth: layers; 0 leaves the prompt as it is, and so do layers that do not hold all of it.
        room: limit in bytes on their states, queries, keys and values; layers beyond it are not stored.
        **generation: arguments of `generate` of the answers to come.

    Cost: these layers of the unreduced prompt.
    """
    if depth == 0 or not all(map(adapter.holds_prompt, range(depth))):
        return prompt
    nothing = Budget("kept", 0.0)
    with (
        Session(adapter, NoReduction(), nothing, timed=False) as session,
        recorded_trunk(adapter.decoder, depth, room) as trunk,
    ):
        session.generate(prompt, **generation)
    return replace(prompt, trunk=trunk)
