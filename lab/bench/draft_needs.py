"""Which visual tokens a draft model needs: `python -m lab.bench.draft_needs --ratio 0.5`.

Captions of held-out scenes with known objects, drafted by the embedded draft from chosen subsets of the visual tokens
and verified by the target, which sees all of them. For each subset it prints the share of verified
tokens that were accepted, with its interval over answers, both with the original positions of the draft's tokens and
with gaps closed as in `method=parallelvlm`; and the composition of the subset: the share of the objects' patches
in it, the share of a kept token's grid neighbours that are also kept, and the similarity of kept tokens (mean cosine of
feature pairs). Windows are fixed and the sides run in turns, so no figure depends on time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.drafts import Greedy
from espalier.harness.decoding.speculative.guidance import Guidance, GuidedReducer
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.errors import UserError
from espalier.harness.seedling.scene_benchmarks import sample_objects, sample_scene, samples
from espalier.harness.stats import Interval, share_interval
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.uvprune import UVPrune
from lab.bench.bench_page import bench_command, parser
from lab.bench.kept_objects import covered_patches
from lab.bench.token_subsets import SceneTokens, make_up, subsets

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.cache_utils import Cache

    from espalier.harness.decoding.speculative.cached_model import CachedModel
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.models.chat_media import Chat

Places = Literal["original", "renumbered"]
PLACES: tuple[Places, ...] = ("original", "renumbered")

#: The longest answer, and the space for drafted tokens after it.
LIMIT, AHEAD = 160, 32


@dataclass(frozen=True)
class RecordingReducer(TokenReducer):
    """Keeps all tokens and stores UV-Prune's inputs in `signals`."""

    rule: UVPrune
    signals: dict[str, Tensor]

    @property
    def adaptive(self) -> bool:
        """Ignore the requested count and keep all."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the rule's sites."""
        return self.rule.sites(depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals that the rule reads."""
        return self.rule.needs(site)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all tokens of one prompt."""
        del keep
        self.signals.update(
            features=view.signals["projected"][0].clone(), closer=self.rule.scores(view)[0].clone()
        )
        return Plan(torch.arange(view.tokens.shape[1])[None])


@dataclass(frozen=True)
class DraftPair:
    """The embedded target and its draft."""

    target: Adapter
    draft: Adapter

    def scene(self, sample: dict[str, Any]) -> TargetScene:
        """Run the target on a sample's scene and question."""
        # transformers reads the variables set in main at import time, and takes seconds to import.
        from espalier.harness.decoding.speculative.samplers import resolved_config

        scene, signals = sample_scene(sample), dict[str, Tensor]()
        chat = question(scene.to_pil(), sample["question"])
        config = resolved_config(self.target, {"max_new_tokens": LIMIT, "do_sample": False})
        target = _side(self.target, chat, config, RecordingReducer(UVPrune(), signals))
        target.start()
        count = len(signals["closer"])
        boxes = [item.box for item in sample_objects(sample)]
        objects = covered_patches(boxes, round(count**0.5), scene.image.shape[0])
        return TargetScene(chat, config, target, SceneTokens(**signals, objects=objects))

    def accepted(
        self, scene: TargetScene, kept: Tensor, places: Places, gamma: int
    ) -> tuple[int, int]:
        """Return the numbers of accepted and verified drafted tokens, with a draft that sees `kept`."""
        # Imports transformers, as above.
        from espalier.harness.engine.model_parts import ends_of

        guidance = Guidance(kept, len(scene.tokens.closer))
        draft = _side(self.draft, scene.chat, scene.config, GuidedReducer(lambda: guidance), places)
        ends = ends_of(scene.config)
        machine = Machine(draft, scene.target, Greedy(), SequentialTransport(), gamma, True, ends)
        rounds = machine.run(LIMIT).rounds
        return sum(round_.accepted for round_ in rounds), sum(round_.checked for round_ in rounds)


@dataclass(frozen=True)
class TargetScene:
    """One question, the target's side, and the target's view of the scene."""

    chat: Chat
    config: GenerationConfig
    target: CachedModel
    tokens: SceneTokens


def _side(
    adapter: Adapter,
    chat: Chat,
    config: GenerationConfig,
    method: TokenReducer,
    places: Places = "original",
) -> CachedModel:
    # The decoders and the engine import transformers, after main has set it offline.
    from espalier.harness.decoding.speculative.cached_model import CachedModel
    from espalier.harness.decoding.speculative.samplers import sampler_of
    from espalier.harness.engine.session import Session

    inputs = adapter.encode([list(chat)])

    def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
        with Session(
            adapter, method, Budget("kept", 0.0), positions=places, timed=False
        ) as session:
            return session.prefill(inputs, cache)

    return CachedModel(
        adapter, sampler_of(adapter, config, inputs["input_ids"]), LIMIT + AHEAD, prefill
    )


@dataclass(frozen=True)
class Line:
    """Result of one kind of subset: acceptance by token positions, and its mean composition."""

    name: str
    accepted: Mapping[Places, Interval]
    parts: Mapping[str, float]


def measured(pair: DraftPair, ratio: float, scenes: int, gamma: int) -> list[Line]:
    """Return one line for each kind of subset, the full prompt first. Cost: about a second per scene."""
    counts: dict[tuple[str, Places], list[tuple[int, int]]] = defaultdict(list)
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    target_scenes = [
        pair.scene(sample) for sample in samples("seedling_caption", "test", 0, 0, scenes)
    ]
    for number, scene in enumerate(target_scenes):
        every_token = torch.arange(len(scene.tokens.closer))
        keep = max(2, round(len(every_token) * (1 - ratio)))
        generator = torch.Generator().manual_seed(number)
        chosen = subsets(scene.tokens, target_scenes[number - 1].tokens, keep, generator)
        for name, kept in {"everything": every_token, **chosen}.items():
            parts[name].append(make_up(kept, scene.tokens))
            for places in PLACES:
                counts[name, places].append(pair.accepted(scene, kept, places, gamma))
    return [
        Line(
            name,
            {places: _share(counts[name, places]) for places in PLACES},
            {part: fmean(entry[part] for entry in make_ups) for part in make_ups[0]},
        )
        for name, make_ups in parts.items()
    ]


def _share(counts: Sequence[tuple[int, int]]) -> Interval:
    """Return accepted over verified tokens of all answers."""
    return share_interval([accepted for accepted, _ in counts], [judged for _, judged in counts])


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each kind of subset; return 0, or 2 for bad input."""
    arguments = parser("drafted")
    arguments.add_argument("--ratio", type=float, default=0.5, help="share removed for the draft")
    arguments.add_argument("--scenes", type=int, default=40)
    arguments.add_argument("--gamma", type=int, default=3, help="tokens drafted per round")
    options = arguments.parse_args(argv)
    if not 0 <= options.ratio < 1 or min(options.scenes - 1, options.gamma) < 1:
        raise UserError("0 <= --ratio < 1, --scenes is 2 or more, --gamma 1 or more")
    for line in measured(embedded_pair(), options.ratio, options.scenes, options.gamma):
        shares = "  ".join(f"{line.accepted[places].percent:>19}" for places in PLACES)
        measures = "  ".join(f"{name} {value:.2f}" for name, value in line.parts.items())
        print(f"{line.name:26}{shares}  {measures}")
    return 0


def embedded_pair() -> DraftPair:
    """Load target and draft."""
    # transformers takes seconds to import, which is not needed to refuse bad input.
    from espalier.harness.models.build_adapter import load_adapter

    loaded = []
    for name in ("seedling", "seedling_draft"):
        loaded.append(load_adapter(specs_of(f"model={name}", "method=none", "ratio=0")[0].model))
    return DraftPair(*loaded)


if __name__ == "__main__":
    sys.exit(main())
